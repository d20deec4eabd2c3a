/*
scale.cuh: x[:] *= factor, and QK-clip, a thread per pack.
  traffic   1 in, 1 out per element; clip_heads of the heads that are scaled
*/
#pragma once
#include "../cuda/kernel_utils.cuh"
#include "ops.h"

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

// A pack may belong to two heads.
template <int W>
static __global__ void clip_heads_kernel(size_t begin, size_t end, floatX *params, float *master, size_t offset,
                                         size_t head_size, const float *largest, float limit, bool root) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float w[W], factor[W];
    bool clips = false;
    UNROLL
    for (int k = 0; k < W; k++) {
        float most = largest[(offset + i + k) / head_size];
        factor[k] = most > limit ? limit / most : 1;
        clips = clips || most > limit;
    }
    if (!clips) return;
    if (master) load_fp32<W>(w, master + i);
    else load<W>(w, params + i);
    UNROLL
    for (int k = 0; k < W; k++) w[k] *= root ? sqrtf(factor[k]) : factor[k];
    if (master) store_fp32<W>(master + i, w);
    store<W>(params + i, w);
}

static inline void clip_heads(floatX *params, real *master, size_t begin, size_t count, size_t head_size,
                              const real *largest, real limit, bool root) {
    OPERATION();
    LAUNCH_ELEMENTS(clip_heads_kernel, packed(0, params, master), count, params, master, begin, head_size, largest,
                    limit, root);
}
