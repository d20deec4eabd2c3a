// clang-format off
/*
comm.h: communication between the ranks of a run.

  void comm_open(start)                     called first in main: determines rank and number of ranks, connects the
                                            ranks in the directory and the time of `start`, and starts the watchdog
  void comm_alloc(bucket_bytes, level, group)
                                            memory for buckets of up to bucket_bytes with --zero `level`, before step 1.
                                            Each `group` ranks in a row share their state (--zero-group)
  int  comm_rank(), comm_ranks()            0 and 1 without a launcher
  int  comm_ranks_here()                    ranks on this machine, which share its cores
  int  comm_groups(), comm_group()          the number of groups, and the number of this rank's group
  void comm_close()

  Host memory. All ranks make the same call; it returns when the operation is complete.
    comm_gather(all, mine, bytes)           all [ranks][bytes]
    comm_sum_f64(x, count)                  in the order of ranks, so that all ranks get the same bits
    comm_broadcast(data, bytes)             from rank 0
    comm_barrier()

  Operation memory. All ranks start the same operations in the same order; they run asynchronously, in that order. Here
  `ranks` is the size of a group, and `rank` is the place in it.
    ticket = comm_reduce_scatter(bucket, piece, out, add, all_groups)
                                            bucket [ranks][piece]; out [piece] = (add: +=) the sum over the group of
                                            piece `rank` of their buckets, in fp32; out may be that piece.
                                            all_groups: out is the sum over all groups, with the same bits in each group
    ticket = comm_all_gather(bucket, piece, piece_bytes)
                                            bucket [ranks][piece_bytes]: each rank provides piece [piece_bytes], which
                                            may be in the bucket
    comm_wait(ticket)                       later operations see the result of this one and of all earlier ones;
                                            ticket 0: no operation

  backends  comm_mpi.h for operations on the CPU; comm_nccl.cuh for operations on GPUs; comm_single.h for a program
            built without the library, which rejects more than one rank
  traffic   each rank sends and receives (ranks-1)/ranks of a bucket in either collective; with
            `all_groups` also twice (groups-1)/groups of a piece
  faults    The watchdog detects ranks that have ended or hang. The backends report waits to it.
*/
// clang-format on
#pragma once
#include "comm_state.h"
#if defined(DEVICE_OPS) && defined(USE_NCCL)
#include "comm_nccl.cuh"
#elif defined(RECORDED_OPS) // declared by recorded_operations.h
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
#if defined(DEVICE_OPS) && defined(USE_NCCL)
    *of = "NCCL";
    if (nccl.measured) return nccl.device_bytes;
#endif
#if defined(DEVICE_OPS) || defined(RECORDED_OPS)
    *of = "NCCL, about"; // up to 32 channels with 9.5 MiB of buffers each; a run prints the measured size
    return ranks > 1 ? 320 << 20 : 0;
#else
    *of = "MPI, about"; // measured in tests/programs/test_ranks_start.py
    return ranks > 1 ? 12 << 20 : 0;
#endif
}
