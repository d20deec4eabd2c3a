/*
sum_of_squares.cuh: the sum of squares, for the global gradient norm.
  mapping   up to SQUARES_PARTS blocks, fewer for a short range, each for a part; one block adds their sums. The result
            stays on the device until the program has queued all of its work. It is also the check that gradients are
            finite: squares are summed in double, where no square of an fp32 number overflows, so the sum is NaN or
            infinite exactly if an element is.
  traffic   1 in per element
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

#ifndef SQUARES_PARTS // maximum blocks, a multiple of a warp, and minimum elements per block; smaller in tests
#define SQUARES_PARTS 512
#define SQUARES_LEAST 8192
#endif
enum { SQUARES_THREADS = 512 };

template <int W> static __global__ void sum_of_squares_kernel(double *partial, const grad_t *x, size_t count) {
    SHARED(double, memory, WARP);
    size_t size = ((count + gridDim.x - 1) / gridDim.x + 15) / 16 * 16;
    size_t begin = min(count, blockIdx.x * size), end = min(count, begin + size), whole = begin + (end - begin) / W * W;
    double sum = 0;
    float v[W];
    for (size_t i = begin + threadIdx.x * (size_t)W; i < whole; i += SQUARES_THREADS * W) {
        load_fp32<W>(v, x + i);
        UNROLL
        for (int k = 0; k < W; k++) sum += (double)v[k] * (double)v[k];
    }
    for (size_t i = whole + threadIdx.x; i < end; i += SQUARES_THREADS) sum += (double)x[i] * (double)x[i];
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

static __global__ void sum_of_parts_kernel(double *total, const double *partial, int parts) {
    SHARED(double, memory, WARP);
    double sum = block_sum((int)threadIdx.x < parts ? partial[threadIdx.x] : 0.0, memory);
    if (threadIdx.x == 0) *total = sum;
}

static inline void sum_of_squares(double *sum, const grad_t *x, size_t count) {
    OPERATION();
    double *partial = (double *)ops_scratch(SQUARES_PARTS * sizeof(double));
    int parts = (int)max_size(1, min_size(SQUARES_PARTS, (count + SQUARES_LEAST - 1) / SQUARES_LEAST));
    if ((uintptr_t)x % 16 == 0) LAUNCH((sum_of_squares_kernel<4>), parts, SQUARES_THREADS, 0, partial, x, count);
    else LAUNCH((sum_of_squares_kernel<1>), parts, SQUARES_THREADS, 0, partial, x, count);
    LAUNCH(sum_of_parts_kernel, 1, SQUARES_PARTS, 0, sum, partial, parts);
}
