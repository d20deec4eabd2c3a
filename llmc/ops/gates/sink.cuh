/*
sink.cuh: an additional logit in the softmax of each head, whose column is dropped. Equations in sink.h.

  mapping   up to a warp of threads per (n,h). Backward: SINK_PARTS blocks per head, each for a part of the rows; their
            sums are added in order, without atomics.
  numerics  fp32; L' by the form that cannot overflow
  traffic   forward D in, D out per (n,h); backward 2D in
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

template <int W>
static __global__ void sink_forward_kernel(int lanes, floatX *out, real *lse, const floatX *sinks, int N, int T, int NH,
                                           int D) {
    unsigned row = row_index(lanes), n = row / (unsigned)NH, h = row % (unsigned)NH;
    int lane = row_lane(lanes);
    bool active = n < (unsigned)N;
    real *at = lse + (n / (unsigned)T * (size_t)NH + h) * T + n % (unsigned)T;
    float l = active ? *at : 0, s = active && sinks ? to_float(sinks[h]) : 0, v[W];
    __syncwarp(); // all lanes of the head have read *at
    if (!active) return;
    float keep = sigmoid_of(l - s);
    for (int i = lane * W; i < D; i += lanes * W) {
        load<W>(v, out + row * (size_t)D + i);
        UNROLL
        for (int k = 0; k < W; k++) v[k] *= keep;
        store<W>(out + row * (size_t)D + i, v);
    }
    if (lane == 0) *at = fmaxf(l, s) + log1pf(expf(-fabsf(l - s)));
}

static inline void sink_forward(floatX *out, real *lse, const floatX *sinks, int B, int T, int NH, int D) {
    OPERATION();
    int N = B * T;
    LAUNCH_ROWS(sink_forward_kernel, packed(D, out), (size_t)N * NH, D, out, lse, sinks, N, T, NH, D);
}

enum { SINK_PARTS = 64, SINK_THREADS = 256 };

// partial (parts, NH): block (h, part) sums its part of the rows, `lanes` threads per row
template <int W>
static __global__ void sink_backward_kernel(int lanes, float *partial, const floatX *dout, const floatX *out,
                                            const real *lse, const floatX *sinks, int N, int T, int NH, int D) {
    SHARED(float, memory, WARP);
    int h = (int)blockIdx.x, lane = row_lane(lanes), shift = __ffs(lanes) - 1;
    int begin = (int)((int64_t)N * blockIdx.y / gridDim.y), end = (int)((int64_t)N * (blockIdx.y + 1) / gridDim.y);
    float s = to_float(sinks[h]), sum = 0, g[W], o[W];
    for (int n = begin + ((int)threadIdx.x >> shift); n < end; n += SINK_THREADS >> shift) {
        size_t at = ((size_t)n * NH + h) * D;
        float dot = 0;
        for (int i = lane * W; i < D; i += lanes * W) {
            load<W>(g, dout + at + i);
            load<W>(o, out + at + i);
            UNROLL
            for (int k = 0; k < W; k++) dot += g[k] * o[k];
        }
        float l = lse[((size_t)(n / T) * NH + h) * T + (n % T)];
        sum -= expf(s - l) * dot; // backward of O' = sigmoid(L - s) O; block_sum adds the lanes' parts of dot
    }
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) partial[blockIdx.y * (size_t)NH + h] = sum;
}

static inline void sink_backward(grad_t *dsinks, const floatX *dout, const floatX *out, const real *lse,
                                 const floatX *sinks, int B, int T, int NH, int D) {
    OPERATION();
    int N = B * T, parts = max_int(1, min_int(SINK_PARTS, (N + 15) / 16));
    while (parts > 1 && (size_t)parts * NH * sizeof(float) > SCRATCH_BYTES) parts /= 2;
    float *partial = (float *)ops_scratch((size_t)parts * NH * sizeof(float));
    dim3 grid((unsigned)NH, (unsigned)parts);
    bool wide = packed(D, dout, out);
    int lanes = row_lanes(wide ? D / PACK : D, wide);
    if (wide)
        LAUNCH((sink_backward_kernel<PACK>), grid, SINK_THREADS, 0, lanes, partial, dout, out, lse, sinks, N, T, NH, D);
    else LAUNCH((sink_backward_kernel<1>), grid, SINK_THREADS, 0, lanes, partial, dout, out, lse, sinks, N, T, NH, D);
    column_sum(dsinks, partial, parts, NH);
}
