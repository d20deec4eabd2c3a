/*
test_operations.c: the tests of the C operations (operations/tests.h), with the arguments of test_main.h. It compiles
alone for the vectors of the oldest x86-64.
*/
#include "small_sizes.h"
#include "../llmc/base/dtype.h"
#include "../llmc/experts/all_operations.h"
#include "test_main.h"
#include "operations/tests.h"

static const TestTable test_tables[] = {{"operations", TESTS(operations_tests), EVERY_BUILD}};

int main(int argc, char **argv) { return test_main(TESTS(test_tables), argc, argv); }
