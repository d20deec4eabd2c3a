/*
residual: y = a + b. Its backward needs no operation: the gradient of y is that of a and of b.
  traffic   2 in, 1 out per element
*/
#ifndef LLMC_RESIDUAL_H
#define LLMC_RESIDUAL_H
#include "ops.h"

static inline void residual_forward(floatX *y, const floatX *a, const floatX *b, size_t count) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < count; i++) y[i] = a[i] + b[i];
}
#endif
