/*
scale.h: x[:] *= factor. The factor is constant, so the backward is the same operation on the gradient.
  traffic   1 in, 1 out per element
*/
#pragma once
#include "operations.h"

static inline void scale_inplace(floatX *x, real factor, size_t count) {
#pragma omp parallel for simd schedule(static) if (parallel : worth_threads(count))
    for (size_t i = 0; i < count; i++) x[i] *= factor;
}
