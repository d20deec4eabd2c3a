/*
test_prediction.c: the tests of predict_diffv2, which this file includes, with the arguments of test_main.h.
*/
#define main predict_diffv2_main
#include "../dev/predict/predict_diffv2.c"
#undef main
#include "test_main.h"
#include "prediction.h"

static const TestTable test_tables[] = {{"prediction", TESTS(prediction_tests), EVERY_BUILD}};

int main(int argc, char **argv) { return test_main(TESTS(test_tables), argc, argv); }
