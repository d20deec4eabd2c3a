/*
stats.cuh: statistics of a layer's activations, for the log. Equations in stats.h; attention in attention_stats.cuh.

  mapping     sums of parts.cuh. The largest magnitude: absmax_update.
  numerics    in double
  traffic     lambda N NH in, rms rows D in, magnitude N C in
*/
#pragma once
#include "../absmax.cuh"
#include "operations.h"
#include "parts.cuh"

static __global__ void lambda_mean_kernel(double *parts, const floatX *l, size_t count, int NH, int ldl,
                                          Factor factor) {
    double local = 0;
    size_t begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
    for (size_t i = begin + threadIdx.x; i < end; i += STATS_THREADS)
        local += factor_of((double)to_float(l[i / NH * ldl + i % NH]), factor);
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
