/*
stats.cuh: statistics of a layer's activations and of an update, for the log. Equations in stats.h; attention in
attention_stats.cuh.

  mapping     up to STATS_PARTS blocks, by the number of elements, each for a part of them: sums in double, which the
              host adds up. The largest magnitude: absmax_update.
  numerics    elements of an update in fp32 as in adamw_update, all else in double
  reads       wait for the device: not part of a step, except with --change
  traffic     lambda N NH in, rms rows D in, magnitude N C in, update 12 bytes in per element
*/
#pragma once
#include "../optimizer/adamw.cuh"
#include "../absmax.cuh"
#include "../ops.h"

#ifndef STATS_LEAST
#define STATS_LEAST 8192 // elements of a block
#endif
enum { STATS_PARTS = 256, STATS_THREADS = 256 };
static inline unsigned stats_blocks(size_t elements) {
    return (unsigned)max_size(1, min_size(STATS_PARTS, elements / STATS_LEAST));
}

static __device__ inline double stats_factor(floatX l, Factor factor) { // factor_of, on the device
    double x = (double)to_float(l);
    return factor == S_SIGMOID ? 1 / (1 + exp(-x)) : x;
}

// parts[blockIdx.x] = the sum over the block's threads
static __device__ inline void stats_write(double *parts, double local) {
    SHARED(double, memory, WARP);
    local = block_sum(local, memory);
    if (threadIdx.x == 0) parts[blockIdx.x] = local;
}

// Of the parts of so many blocks.
static inline double stats_sum(const double *device_parts, unsigned blocks) {
    double parts[STATS_PARTS], sum = 0;
    buffer_download(parts, device_parts, blocks * sizeof(double));
    for (unsigned p = 0; p < blocks; p++) sum += parts[p];
    return sum;
}

static __global__ void lambda_mean_kernel(double *parts, const floatX *l, size_t count, int NH, int ldl,
                                          Factor factor) {
    double local = 0;
    size_t begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
    for (size_t i = begin + threadIdx.x; i < end; i += STATS_THREADS)
        local += stats_factor(l[i / NH * ldl + i % NH], factor);
    stats_write(parts, local);
}

static inline double lambda_mean(const floatX *l, int N, int NH, int ldl, Factor factor) {
    double *parts = (double *)ops_scratch(STATS_PARTS * sizeof(double));
    size_t count = (size_t)N * NH;
    unsigned blocks = stats_blocks(count);
    LAUNCH(lambda_mean_kernel, blocks, STATS_THREADS, 0, parts, l, count, NH, ldl, factor);
    return stats_sum(parts, blocks) / (double)count;
}

// `lanes` threads per row.
template <int W>
static __global__ void rms_mean_kernel(int lanes, double *parts, const floatX *x, size_t rows, int heads, int D,
                                       int ld) {
    double local = 0;
    size_t begin = rows * blockIdx.x / gridDim.x, end = rows * (blockIdx.x + 1) / gridDim.x;
    int lane = row_lane(lanes), shift = __ffs(lanes) - 1;
    for (size_t base = begin; base < end; base += STATS_THREADS >> shift) { // all lanes, since they exchange sums
        size_t row = base + (threadIdx.x >> shift);
        double sum = 0;
        float v[W];
        for (int i = row < end ? lane * W : D; i < D; i += lanes * W) {
            load<W>(v, x + row / heads * ld + row % heads * D + i);
            UNROLL
            for (int k = 0; k < W; k++) sum += (double)v[k] * (double)v[k];
        }
        sum = lanes_sum(sum, lanes);
        if (lane == 0 && row < end) local += sqrt(sum / D);
    }
    stats_write(parts, local);
}

static inline double rms_mean(const floatX *x, int N, int heads, int D, int ld) {
    double *parts = (double *)ops_scratch(STATS_PARTS * sizeof(double));
    size_t rows = (size_t)N * heads;
    bool wide = packed(D, x) && packed(ld);
    int lanes = row_lanes(wide ? D / PACK : D, wide);
    unsigned blocks = stats_blocks(rows * (size_t)D);
    if (wide) LAUNCH((rms_mean_kernel<PACK>), blocks, STATS_THREADS, 0, lanes, parts, x, rows, heads, D, ld);
    else LAUNCH((rms_mean_kernel<1>), blocks, STATS_THREADS, 0, lanes, parts, x, rows, heads, D, ld);
    return stats_sum(parts, blocks) / (double)rows;
}

static inline double magnitude_max(const floatX *x, int N, int C) {
    absmax_t *max = (absmax_t *)ops_scratch(sizeof(absmax_t));
    float largest;
    buffer_zero(max, sizeof(*max));
    absmax_update(activation(x, max), N, C, C);
    buffer_download(&largest, max, sizeof(largest));
    return (double)largest;
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
