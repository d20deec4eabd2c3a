/*
comm_state.h: the state that the backends of comm.h share: this process's place among the ranks.
*/
#pragma once
#include "../base/element_types.h"
#include "watchdog.h"

static struct {
    bool on; // there are other ranks, and communication is open
    int rank, ranks, ranks_here;
    int group_ranks;     // in each group
    double wait_seconds; // time that operations and host have waited for other ranks
} comm = {false, 0, 1, 1, 1, 0};

static inline int comm_rank(void) { return comm.rank; }
static inline int comm_ranks(void) { return comm.ranks; }
static inline int comm_ranks_here(void) { return comm.ranks_here; }
static inline int comm_groups(void) { return comm.ranks / comm.group_ranks; }
static inline int comm_group(void) { return comm.rank / comm.group_ranks; }
static inline int comm_place(void) { return comm.rank % comm.group_ranks; }

// Memory of a rank for the pieces that it receives from the ranks of a group, also for a --dry-run of more ranks. The
// MPI backend sums received pieces here; NCCL sums them itself, except in the last addition of --zero 2 and 3.
static inline size_t comm_received_bytes(size_t bucket_bytes, int ranks, int level) {
    if (ranks == 1) return 0;
#if defined DEVICE_OPS || defined RECORDED_OPS
    return level >= 2 ? bucket_bytes / ranks : 0;
#else
    (void)level;
    return bucket_bytes;
#endif
}
