/*
test_trainer.cu: the CUDA trainer, whose kernels dev/emulator runs, with planned faults, and tests in its process;
and the cases of test_diffv2.cu, since both programs would compile the same kernels, for most of their time.

  build/oncpu/test_trainer [ARGUMENTS]            the tests, as tests/test_main.h says
  build/oncpu/test_trainer --trainer ARGUMENTS    the trainer itself, which tests/cuda compares with the CPU's
  build/oncpu/test_trainer --operations [ARGUMENTS]    the cases; the script build/oncpu/test_diffv2 is the same
*/
static bool operations_are_tested;
#define CASE_SIZE(small, usual) (operations_are_tested ? (small) : (usual))
#define BUCKET_ELEMENTS test_bucket_elements
// Small, so that the gathers of a step take several rounds, the last of them partial, and the rings wrap around.
#define NCCL_HOST_BYTES 112
#define NCCL_EVENTS 256
#define NCCL_WAITS 64
#define LOGIT_ROWS(row_bytes) test_logit_rows(row_bytes)
#define PLANNED_FAULTS
#include "../llmc/base/common.h"
#include <cuda_runtime.h>
#include "../llmc/cuda/attention_cudnn.h"

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
template <class... Arguments> static CudnnPlan *witnessed_plan(Arguments... arguments) {
    if (memory_is_short) fprintf(stderr, "cuDNN is asked for a plan while memory is short\n");
    return cudnn_attention_plan(arguments...);
}

#define cudaStreamSynchronize counted_wait
#define cudnn_attention_plan witnessed_plan
#define main operations_main
#include "../test_diffv2.cu"
#undef main
#define main train_diffv2_main
#include "../train_diffv2.cu"
#undef main
#undef cudnn_attention_plan

#include "planned_faults.h"
#include "test_main.h"
#include "cuda_trainer.h"

static const TestTable test_tables[] = {{"CUDA trainer", TESTS(cuda_trainer_tests), EVERY_BUILD}};

int main(int argc, char **argv) {
    environment_reexecute(argv); // not the trainer, which knows only its own arguments
    operations_are_tested = argc > 1 && strcmp(argv[1], "--operations") == 0;
    if (operations_are_tested) return operations_main(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "--trainer") == 0) return train_diffv2_main(argc - 1, argv + 1);
    setenv("LOGIT_ROWS", "16", 1);
    return test_main(TESTS(test_tables), argc, argv);
}
