/*
comm.h: what the ranks of a run say to each other.

  void comm_open(start_timeout)             first of all in main: rank and number of ranks, and the watchdog; seconds
                                            that ranks may take to connect
  void comm_alloc(bucket_bytes, level)      memory for buckets of up to so many bytes with --zero `level`, before step 1
  int  comm_rank(), comm_ranks()            0 and 1 without a launcher
  int  comm_ranks_here()                    ranks on this machine, which share its cores
  void comm_close()

  On the host, the same call on every rank, returns when done:
    comm_gather(all, mine, bytes)           all [ranks][bytes]
    comm_sum_f64(x, count)                  in the order of ranks, so that all have the same bits
    comm_broadcast(data, bytes)             rank 0's
    comm_barrier()

  On operation memory, begun in the same order on every rank, done in that order behind the caller's back:
    ticket = comm_reduce_scatter(bucket, piece, out, add)   bucket [ranks][piece]: out [piece] = (or +=) the sum over
                                                            ranks of piece `rank` of their buckets; out may be that
                                                            piece
    ticket = comm_all_gather(bucket, piece_bytes)           bucket [ranks][piece_bytes], each rank's piece from that
                                                            rank
    comm_wait(ticket)                                       operations from here on find it done, and all that was begun
                                                            before it; 0: nothing

  twins     comm_mpi.h for operations on the CPU; comm_nccl.cuh for those on a GPU; comm_single.h for a program that was
            built without the library and refuses to be one of several
  traffic   (ranks-1)/ranks of a bucket sent and received per rank, by either collective
  faults    A peer that is gone is the watchdog's business, which is told how long this rank waits.
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H
#include "comm_state.h"
#if defined(DEVICE_OPS) && defined(USE_NCCL)
#include "comm_nccl.cuh"
#elif !defined(DEVICE_OPS) && defined(USE_MPI)
#include "comm_mpi.h"
#else
#include "comm_single.h"
#endif

static inline void comm_sum_f64(double *x, int count) {
    double *all = (double *)checked_calloc(comm.ranks, count * sizeof(double));
    comm_gather(all, x, count * sizeof(double));
    for (int i = 0; i < count; i++) {
        x[i] = all[i];
        for (int r = 1; r < comm.ranks; r++) x[i] += all[r * count + i];
    }
    free(all);
}
static inline void comm_barrier(void) {
    char none = 0, *all = (char *)checked_calloc(comm.ranks, 1);
    comm_gather(all, &none, 1);
    free(all);
}

// Memory of a rank that the library itself takes, and its name for the memory report.
static inline size_t comm_library_bytes(int ranks, const char **of) {
#ifdef DEVICE_OPS
#ifdef USE_NCCL
    *of = "NCCL";
    if (nccl.own_bytes) return nccl.own_bytes; // measured
#endif
    *of = "NCCL, about"; // up to 32 channels with 9.5 MiB of buffers each; the start of a run says what it has taken
    return ranks > 1 ? 320 << 20 : 0;
#else
    *of = "MPI, about"; // measured: tests/ranks.h
    return ranks > 1 ? 12 << 20 : 0;
#endif
}
#endif
