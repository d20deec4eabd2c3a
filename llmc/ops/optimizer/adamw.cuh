/*
adamw.cuh: one step of Adam with decoupled weight decay. Equations in adamw.h.

  mapping   a thread per pack of parameters with their moments, gradients and master weights
  numerics  the scalars are combined in double on the host; the elements are computed in fp32 from the master weights,
            or from the parameters if there are none; the parameter is the master weight rounded once
  update    update_squares: elements in fp32 as in adamw_update, sums of parts.cuh
  traffic   per element, bf16 with master weights: 16 bytes in, 14 out; fp32: 16 in, 12 out; update_squares 12 in
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "../measure/parts.cuh"
#include "operations.h"

// m and v of W elements after the update
template <int W>
static __device__ inline void adamw_moments(float (&mi)[W], float (&vi)[W], size_t i, const grad_t *grads,
                                            const real *m, const real *v, AdamwScalars s) {
    float g[W];
    load_fp32<W>(g, grads + i);
    load_fp32<W>(mi, m + i);
    load_fp32<W>(vi, v + i);
    UNROLL
    for (int k = 0; k < W; k++) {
        g[k] *= s.scale;
        mi[k] = s.b1 * mi[k] + s.rest1 * g[k];
        vi[k] = s.b2 * vi[k] + s.rest2 * g[k] * g[k];
    }
}

template <int W>
static __global__ void adamw_kernel(size_t begin, size_t end, floatX *params, real *master, const grad_t *grads,
                                    real *m, real *v, AdamwScalars s) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float w[W], mi[W], vi[W];
    if (master) load_fp32<W>(w, master + i);
    else load<W>(w, params + i);
    adamw_moments<W>(mi, vi, i, grads, m, v, s);
    UNROLL
    for (int k = 0; k < W; k++)
        w[k] = w[k] * s.keep - s.rate * mi[k] / (sqrtf(vi[k]) * s.rsqrt_correction2 + s.epsilon);
    store_fp32<W>(m + i, mi);
    store_fp32<W>(v + i, vi);
    if (master) store_fp32<W>(master + i, w);
    store<W>(params + i, w);
}

static inline void adamw_update(floatX *params, real *master, const grad_t *grads, real *m, real *v, size_t count,
                                double grad_scale, double lr, double beta1, double beta2, double eps,
                                double weight_decay, int64_t step) {
    OPERATION();
    AdamwScalars s = adamw_scalars(grad_scale, lr, beta1, beta2, eps, weight_decay, step);
    LAUNCH_ELEMENTS(adamw_kernel, packed(0, params, master, grads, m, v), count, params, master, grads, m, v, s);
}

template <int W>
static __device__ inline double update_elements(size_t i, const grad_t *grads, const real *m, const real *v,
                                                AdamwScalars s) {
    float mi[W], vi[W];
    double sum = 0;
    adamw_moments<W>(mi, vi, i, grads, m, v, s);
    UNROLL
    for (int k = 0; k < W; k++) {
        double change = (double)(s.rate * mi[k] / (sqrtf(vi[k]) * s.rsqrt_correction2 + s.epsilon));
        sum += change * change;
    }
    return sum;
}

template <int W>
static __global__ void update_squares_kernel(double *parts, const grad_t *grads, const real *m, const real *v,
                                             size_t count, AdamwScalars s) {
    double local = 0;
    size_t packs = count / W, begin = packs * blockIdx.x / gridDim.x, end = packs * (blockIdx.x + 1) / gridDim.x;
    for (size_t i = begin + threadIdx.x; i < end; i += STATS_THREADS)
        local += update_elements<W>(i * W, grads, m, v, s);
    if (blockIdx.x == 0 && packs * W + threadIdx.x < count)
        local += update_elements<1>(packs * W + threadIdx.x, grads, m, v, s);
    stats_write(parts, local);
}

static inline double update_squares(const grad_t *grads, const real *m, const real *v, size_t count, double grad_scale,
                                    double lr, double beta1, double beta2, double eps, int64_t step) {
    OPERATION();
    AdamwScalars s = adamw_scalars(grad_scale, lr, beta1, beta2, eps, 0, step);
    double *parts = (double *)ops_scratch(STATS_PARTS * sizeof(double));
    unsigned blocks = stats_blocks(count);
    if (packed(0, grads, m, v))
        LAUNCH((update_squares_kernel<PACK>), blocks, STATS_THREADS, 0, parts, grads, m, v, count, s);
    else LAUNCH((update_squares_kernel<1>), blocks, STATS_THREADS, 0, parts, grads, m, v, count, s);
    return stats_sum(parts, blocks);
}
