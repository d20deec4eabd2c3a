/*
add_to_sum.cuh: a running sum of a tensor in fp32. Equations in add_to_sum.h.
  mapping   a thread per pack
  traffic   x in and out, sum out and, with add, in
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

template <int W> static __global__ void add_to_sum_kernel(size_t begin, size_t end, real *sum, floatX *x, bool add) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float a[W], b[W];
    load<W>(a, x + i);
    if (add) {
        load_fp32<W>(b, sum + i);
        UNROLL
        for (int k = 0; k < W; k++) a[k] += b[k];
    }
    store_fp32<W>(sum + i, a);
    store<W>(x + i, a);
}

static inline void add_to_sum(real *sum, floatX *x, size_t count, bool add) {
    OPERATION();
    LAUNCH_ELEMENTS(add_to_sum_kernel, packed(0, x, sum), count, sum, x, add);
}
