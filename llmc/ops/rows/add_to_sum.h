/*
add_to_sum.h: a running sum of a tensor in `real`: sum = x or sum += x, then x = sum. For gradients of a tensor that
several layers read.
  traffic   2 in, 2 out per element
*/
#pragma once
#include "operations.h"

static inline void add_to_sum(real *sum, floatX *x, size_t count, bool add) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < count; i++) x[i] = sum[i] = add ? sum[i] + x[i] : x[i];
}
