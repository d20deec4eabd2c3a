/*
residual: y = a + b, a thread per pack, one rounding. See residual_rmsnorm_forward for the sum that a norm follows.
  traffic   2 in, 1 out per element
*/
#ifndef LLMC_RESIDUAL_CUH
#define LLMC_RESIDUAL_CUH
#include "../cuda/kernel_utils.cuh"
#include "ops.h"

template <int W>
static __global__ void residual_kernel(size_t begin, size_t end, floatX *y, const floatX *a, const floatX *b) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float v[W], w[W];
    load<W>(v, a + i);
    load<W>(w, b + i);
    UNROLL
    for (int k = 0; k < W; k++) v[k] += w[k];
    store<W>(y + i, v);
}

static inline void residual_forward(floatX *y, const floatX *a, const floatX *b, size_t count) {
    OPERATION();
    LAUNCH_ELEMENTS(residual_kernel, packed(0, y, a, b), count, y, a, b);
}
#endif
