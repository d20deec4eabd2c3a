/*
parts.cuh: sums in double over elements, for the log.

  mapping   up to STATS_PARTS blocks, by the number of elements, each for a part of them; the host adds up their sums
  reads     wait for the device: not part of a step, except with --change
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"

#ifndef STATS_LEAST
#define STATS_LEAST 8192 // least elements of a block
#endif
enum { STATS_PARTS = 256, STATS_THREADS = 256 };
static inline unsigned stats_blocks(size_t elements) {
    return (unsigned)max_size(1, min_size(STATS_PARTS, elements / STATS_LEAST));
}

// parts[blockIdx.x] = the sum over the block's threads
static __device__ inline void stats_write(double *parts, double local) {
    SHARED(double, memory, WARP);
    local = block_sum(local, memory);
    if (threadIdx.x == 0) parts[blockIdx.x] = local;
}

// The sum of the parts of `blocks` blocks.
static inline double stats_sum(const double *device_parts, unsigned blocks) {
    double parts[STATS_PARTS], sum = 0;
    buffer_download(parts, device_parts, blocks * sizeof(double));
    for (unsigned p = 0; p < blocks; p++) sum += parts[p];
    return sum;
}
