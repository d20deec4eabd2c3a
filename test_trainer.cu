/*
test_trainer.cu: the whole CUDA trainer against the CPU trainer, on a GPU or where dev/cuda_on_cpu runs the kernels.

  build/oncpu/test_trainer            the tests of the build (precision, sanitizers); the last line is `N passed, N failed`
  build/oncpu/test_trainer WORDS      those whose sentence contains WORDS, of any build
  build/oncpu/test_trainer --trainer ARGUMENTS    the trainer itself: what the tests start, and compare with
                                                  $TRAIN_DIFFV2 (default ./train_diffv2), the CPU's

Run it in the root of the repository. The precision is that of the build: fp32 agrees with the CPU to rounding, bf16 nearly.
*/
#undef USE_MPI // as in train_diffv2.cu
#include "llmc/common.h"
#include <cuda_runtime.h>

static int host_waits; // times that the host has waited for the device

static cudaError_t counted_wait(cudaStream_t stream) {
    host_waits++;
    return cudaStreamSynchronize(stream);
}
#define cudaStreamSynchronize counted_wait
#define main train_diffv2_main
#include "train_diffv2.cu"
#undef main
#include "tests/harness.h"
#include "tests/cuda_trainer.h"

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--trainer") == 0) return train_diffv2_main(argc - 1, argv + 1);
    setvbuf(stdout, NULL, _IOLBF, 0);
    int passed = 0, failed = 0;
    for (int t = 0; t < CUDA_TRAINER_TEST_COUNT; t++) {
        const Test *test = &cuda_trainer_tests[t].test;
        if (argc > 1 ? !strstr(test->sentence, argv[1]) : !cuda_test_belongs(cuda_trainer_tests[t].build)) continue;
        double start = now_seconds();
        test_failures = 0;
        test->run();
        printf("%s CUDA trainer, %s: %s (%.2f s)\n", test_failures ? "FAIL" : "ok  ", cuda_precision, test->sentence, now_seconds() - start);
        if (test_failures) failed++;
        else passed++;
    }
    CHECK(passed + failed > 0, "no test's sentence contains '%s'", argc > 1 ? argv[1] : "");
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? EXIT_FAILED : EXIT_DONE;
}
