/*
scale.cuh: x[:] *= factor, a thread per pack.
  traffic   1 in, 1 out per element
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

template <int W> static __global__ void scale_kernel(size_t begin, size_t end, floatX *x, real factor) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float v[W];
    load<W>(v, x + i);
    UNROLL
    for (int k = 0; k < W; k++) v[k] *= factor;
    store<W>(x + i, v);
}

static inline void scale_inplace(floatX *x, real factor, size_t count) {
    OPERATION();
    LAUNCH_ELEMENTS(scale_kernel, packed(0, x), count, x, factor);
}
