/*
comm_single.h: comm.h in a program that was built without the library for many ranks. It is one process, and refuses to
be one of several: each would be rank 0 and write the same files.
*/
#ifndef LLMC_COMM_SINGLE_H
#define LLMC_COMM_SINGLE_H
#include "comm_launch.h"

#ifdef DEVICE_OPS
static const char *const comm_missing =
    "NCCL and knows no others: get NCCL (package libnccl-dev or nvidia-nccl-cu13), then make";
#else
static const char *const comm_missing = "MPI and knows no others: scripts/install_deps.sh --with-mpi, then make";
#endif

static inline const char *comm_library(void) { return NULL; }
static inline void comm_open(double start_timeout) {
    (void)start_timeout;
    int launched = launch_process_count();
    CHECK(launched == 1, "started as one of %d processes, but this program was built without %s", launched,
          comm_missing);
}
static inline void comm_close(void) {}
static inline void comm_alloc(size_t bucket_bytes, int level) { (void)bucket_bytes, (void)level; }
static inline void comm_gather(void *all, const void *mine, size_t bytes) { memcpy(all, mine, bytes); }
static inline void comm_broadcast(void *data, size_t bytes) { (void)data, (void)bytes; }
static inline uint64_t comm_reduce_scatter(grad_t *bucket, size_t piece, grad_t *out, bool add) {
    (void)bucket, (void)piece, (void)out, (void)add;
    return 0;
}
static inline uint64_t comm_all_gather(void *bucket, size_t piece_bytes) {
    (void)bucket, (void)piece_bytes;
    return 0;
}
static inline void comm_wait(uint64_t ticket) { (void)ticket; }
#endif
