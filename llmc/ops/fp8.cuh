/*
fp8.cuh: numbers of 8 bits, and the scales that tensors need to be stored in them. Formats in fp8.h.
*/
#ifndef LLMC_FP8_CUH
#define LLMC_FP8_CUH
#include "../cuda/kernel_utils.cuh"
#include "ops.h"

static __global__ void absmax_kernel(absmax_t *max, const floatX *x, int columns, int ld) {
    SHARED(float, memory, WARP);
    const floatX *row = x + blockIdx.x * (size_t)ld;
    float largest = 0;
    for (int c = (int)threadIdx.x; c < columns; c += (int)blockDim.x) largest = fmaxf(largest, fabsf(to_float(row[c])));
    largest = block_max(largest, memory);
    if (threadIdx.x == 0) atomicMax(max, __float_as_uint(largest));
}

static inline void absmax_update(absmax_t *max, const floatX *x, int N, int columns, int ld) {
    OPERATION();
    LAUNCH(absmax_kernel, blocks_of(N, 1), 256, 0, max, x, columns, ld);
}
#endif
