/*
test_trainer.cu: the whole CUDA trainer against the CPU trainer, on a GPU or where dev/cuda_on_cpu runs the kernels.

  build/oncpu/test_trainer            the tests of the build (precision, sanitizers); the last line is `N passed, N
                                      failed`, and `, N skipped` if any were skipped
  build/oncpu/test_trainer WORDS...   those whose sentence contains WORDS, of any build
  build/oncpu/test_trainer --trainer ARGUMENTS    the trainer itself: what the tests start, and compare with
                                                  $TRAIN_DIFFV2 (default ./train_diffv2), the CPU's

Run it in the root of the repository. The precision is that of the build: fp32 agrees with the CPU to rounding, bf16
nearly.
*/
#define BUCKET_ELEMENTS test_bucket_elements
// Small, so that the gathers of a step take several rounds, the last of them partial, and the rings wrap around.
#define NCCL_HOST_BYTES 112
#define NCCL_EVENTS 256
#define NCCL_WAITS 64
#define NCCL_RANKS_PER_ROOT 2
#define LOGIT_ROWS(row_bytes) test_logit_rows(row_bytes)
#define PLANNED_FAULTS
#include "llmc/base/common.h"
#include <cuda_runtime.h>
#include "llmc/cuda/attention_cudnn.h"

// BUCKET=1024: small buckets, so that the groups of a small model have several.
static size_t bucket_elements(int ranks);
static size_t test_bucket_elements(int ranks) {
    return getenv("BUCKET") ? (size_t)atoi(getenv("BUCKET")) : bucket_elements(ranks);
}

// LOGIT_ROWS=16: few rows, so that the models of the tests have several pieces of logits, the last of them partial.
static size_t matmul_rows_at_a_time(size_t row_bytes);
static size_t test_logit_rows(size_t row_bytes) {
    return getenv("LOGIT_ROWS") ? (size_t)atoi(getenv("LOGIT_ROWS")) : matmul_rows_at_a_time(row_bytes);
}

static int host_waits; // the number of times the host waited for the device

static cudaError_t counted_wait(cudaStream_t stream) {
    host_waits++;
    return cudaStreamSynchronize(stream);
}
static cudaError_t forgetful_wait(cudaStream_t stream, cudaEvent_t event);
template <class... Arguments> static CudnnPlan *witnessed_plan(Arguments... arguments) {
    if (memory_is_short) fprintf(stderr, "cuDNN is asked for a plan while memory is short\n");
    return cudnn_attention_plan(arguments...);
}

#define cudaStreamSynchronize counted_wait
#define cudaStreamWaitEvent(stream, event, flags) forgetful_wait(stream, event)
#define cudnn_attention_plan witnessed_plan
#define main train_diffv2_main
#include "train_diffv2.cu"
#undef main
#undef cudnn_attention_plan
#undef cudaStreamWaitEvent

// MISSING_WAIT=collectives or operations: these do not wait for the others.
static cudaError_t forgetful_wait(cudaStream_t stream, cudaEvent_t event) {
    const char *missing = getenv("MISSING_WAIT");
    bool forgets = missing && strcmp(missing, stream == main_stream ? "operations" : "collectives") == 0;
    return forgets ? cudaSuccess : cudaStreamWaitEvent(stream, event, 0);
}

#include "tests/planned_faults.h"
#include "tests/harness.h"
#include "tests/cuda_trainer.h"
#include "tests/cuda_fp8.h"
#include "tests/cuda_ranks.h"

enum { CUDA_TESTS_ALONE = CUDA_TRAINER_TEST_COUNT + CUDA_FP8_TEST_COUNT }; // on one rank
enum { CUDA_TESTS = CUDA_TESTS_ALONE + CUDA_RANKS_TEST_COUNT };
static const CudaTest *cuda_test(int t) {
    if (t < CUDA_TRAINER_TEST_COUNT) return &cuda_trainer_tests[t];
    return t < CUDA_TESTS_ALONE ? &cuda_fp8_tests[t - CUDA_TRAINER_TEST_COUNT]
                                : &cuda_ranks_tests[t - CUDA_TESTS_ALONE];
}

int main(int argc, char **argv) {
    environment_reexecute(argv); // not the trainer, which knows only its own arguments
    if (argc > 1 && strcmp(argv[1], "--trainer") == 0) return train_diffv2_main(argc - 1, argv + 1);
    setenv("LOGIT_ROWS", "16", 1);
    setvbuf(stdout, NULL, _IOLBF, 0);
    TestCounts counts = {0, 0, 0};
    char subject[40];
    FORMAT(subject, "CUDA trainer, %s", cuda_precision);
    for (int w = 1; w < argc; w++) {
        bool fits = false;
        for (int t = 0; t < CUDA_TESTS; t++)
            fits = fits || test_word_fits(argv[w], subject, cuda_test(t)->test.sentence);
        CHECK(fits, "no test's sentence contains '%s'", argv[w]);
    }
    for (int t = 0; t < CUDA_TESTS; t++) {
        const CudaTest *which = cuda_test(t);
        if (argc > 1 ? test_chosen(argc - 1, argv + 1, subject, which->test.sentence) : cuda_test_belongs(which->build))
            test_run(&counts, subject, &which->test);
    }
    return test_end(&counts);
}
