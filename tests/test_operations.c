/*
test_operations.c: the tests of the C operations (operations.h) in a program of their own, which compiles in a fraction
of the time of test_diffv2.c, for builds that test nothing else: vectors of the oldest x86-64. No arguments.
*/
#include "small_sizes.h"
#include "../llmc/base/dtype.h"
#include "../llmc/ops/all_ops.h"
#include "harness.h"
#include "operations.h"

int main(void) {
    TestCounts counts = {0, 0, 0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t t = 0; t < sizeof(operations_tests) / sizeof(operations_tests[0]); t++)
        test_run(&counts, "operations", &operations_tests[t]);
    return test_end(&counts);
}
