/*
update_stats.cuh: statistics of an update before it is made. Equations in update_stats.h.

  mapping   up to STATS_PARTS blocks, each for a part of the elements; the host combines their results
  numerics  elements in fp32 as in adamw_update, sums in double
  reads     wait for the device: not part of a step, except with --change
  traffic   per element, bf16 with master weights or fp32: 16 bytes in
*/
#pragma once
#include "adamw.cuh"
#include "stats.cuh"

template <int W>
static __device__ inline void update_stats_elements(Range *u, Range *w, size_t i, const floatX *params,
                                                    const real *master, const grad_t *grads, const real *m,
                                                    const real *v, AdamwScalars s) {
    float x[W], mi[W], vi[W];
    adamw_moments<W>(x, mi, vi, i, params, master, grads, m, v, s);
    UNROLL
    for (int k = 0; k < W; k++) {
        double change = (double)(s.rate * mi[k] / (sqrtf(vi[k]) * s.rsqrt_correction2 + s.epsilon));
        u->mean += change * change;
        u->min = fmin(u->min, (double)vi[k]);
        u->max = fmax(u->max, (double)vi[k]);
        w->mean += (double)x[k] * (double)x[k];
        w->max = fmax(w->max, (double)fabsf(mi[k]));
    }
}

// parts (2, STATS_PARTS): of the changes with the extremes of v, then of the weights with those of |m|
template <int W>
static __global__ void update_stats_kernel(Range *parts, const floatX *params, const real *master, const grad_t *grads,
                                           const real *m, const real *v, size_t count, AdamwScalars s) {
    Range u = stats_no_range(), w = stats_no_range();
    size_t packs = count / W, begin = packs * blockIdx.x / gridDim.x, end = packs * (blockIdx.x + 1) / gridDim.x;
    for (size_t i = begin + threadIdx.x; i < end; i += STATS_THREADS)
        update_stats_elements<W>(&u, &w, i * W, params, master, grads, m, v, s);
    if (blockIdx.x == 0 && packs * W + threadIdx.x < count)
        update_stats_elements<1>(&u, &w, packs * W + threadIdx.x, params, master, grads, m, v, s);
    stats_write_range(parts, u);
    __syncthreads(); // the second call writes the shared memory that the first reads
    stats_write_range(parts + STATS_PARTS, w);
}

static inline UpdateStats update_stats(const floatX *params, const real *master, const grad_t *grads, const real *m,
                                       const real *v, size_t count, double grad_scale, double lr, double beta1,
                                       double beta2, double eps, int64_t step) {
    OPERATION();
    AdamwScalars s = adamw_scalars(grad_scale, lr, beta1, beta2, eps, 0, step);
    Range *parts = (Range *)ops_scratch(2 * STATS_PARTS * sizeof(Range));
    unsigned blocks = stats_blocks(count);
    if (packed(0, params, master, grads, m, v))
        LAUNCH((update_stats_kernel<PACK>), blocks, STATS_THREADS, 0, parts, params, master, grads, m, v, count, s);
    else LAUNCH((update_stats_kernel<1>), blocks, STATS_THREADS, 0, parts, params, master, grads, m, v, count, s);
    Range u = stats_range(parts, blocks, 1), w = stats_range(parts + STATS_PARTS, blocks, 1); // sums
    UpdateStats r = {w.mean, u.mean, w.max, u.min, u.max};
    return r;
}
