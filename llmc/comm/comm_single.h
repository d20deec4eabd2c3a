// clang-format off
/*
comm_single.h: the backend of comm.h in a program built without a library for several ranks. It rejects more than one
process, since each would act as rank 0 and write the same files.
*/
// clang-format on
#pragma once
#include "comm_launch.h"

#ifdef DEVICE_OPS
static const char *const comm_missing = "NCCL: install NCCL (package libnccl-dev or nvidia-nccl-cu13) and run make";
#else
static const char *const comm_missing = "MPI: run scripts/install_deps.sh --with-mpi and make";
#endif

static inline const char *comm_library(void) { return NULL; }
static inline void comm_open(const CommStart *start) {
    (void)start;
    int launched = launch_process_count();
    CHECK(launched == 1, "started as one of %d processes, but this program was built without %s", launched,
          comm_missing);
}
static inline void comm_close(void) {}
static inline void comm_alloc(size_t bucket_bytes, int level, int group) {
    (void)bucket_bytes, (void)level, (void)group;
}
static inline void comm_gather(void *all, const void *mine, size_t bytes) { memcpy(all, mine, bytes); }
static inline void comm_broadcast(void *data, size_t bytes) { (void)data, (void)bytes; }
static inline uint64_t comm_reduce_scatter(grad_t *bucket, size_t piece, grad_t *out, bool add, bool all_groups) {
    (void)bucket, (void)piece, (void)out, (void)add, (void)all_groups;
    return 0;
}
static inline uint64_t comm_all_gather(void *bucket, const void *piece, size_t piece_bytes) {
    (void)bucket, (void)piece, (void)piece_bytes;
    return 0;
}
static inline void comm_wait(uint64_t ticket) { (void)ticket; }
