/*
scale.h: x[:] *= factor. The factor is constant, so the backward is the same operation on the gradient. And QK-clip: the
rows of a head whose largest logit exceeded the limit times limit / largest, or its root where the rows of its key head
are scaled, too.
  traffic   1 in, 1 out per element; clip_heads of the heads that are scaled
  source    Kimi Team 2025, "Kimi K2: Open Agentic Intelligence" (arXiv 2507.20534), section 2.1
*/
#pragma once
#include "ops.h"

static inline void scale_inplace(floatX *x, real factor, size_t count) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < count; i++) x[i] *= factor;
}

static inline void clip_heads(floatX *params, real *master, size_t begin, size_t count, size_t head_size,
                              const real *largest, real limit, bool root) {
    for (size_t at = 0, end; at < count; at = end) {
        size_t head = (begin + at) / head_size;
        end = min_size(count, (head + 1) * head_size - begin);
        if (!(largest[head] > limit)) continue;
        real factor = limit / largest[head];
        if (root) factor = (real)sqrt((double)factor);
#pragma omp parallel for simd schedule(static)
        for (size_t i = at; i < end; i++) {
            real w = (master ? master[i] : params[i]) * factor;
            if (master) master[i] = w;
            params[i] = w;
        }
    }
}
