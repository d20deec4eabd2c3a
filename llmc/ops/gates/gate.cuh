/*
gate.cuh: a sigmoid gate on the output heads. Equations in gate.h.

  mapping   up to a warp of threads per (n,h), one pack each at a time; the gradient of a gate per head is summed by
            exchange among the lanes of the head
  traffic   D + width in, D out per (n,h); backward 2D + width in, D + width out: bandwidth-bound
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "../absmax.cuh"
#include "operations.h"

// The gates of a pack: one for the head, or one per element.
template <int W> static __device__ inline void gate_load(float *s, const floatX *g, int i, int width) {
    if (width == 1) {
        float one = sigmoid_of(to_float(g[0]));
        for (int k = 0; k < W; k++) s[k] = one;
    } else {
        load<W>(s, g + i);
        for (int k = 0; k < W; k++) s[k] = sigmoid_of(s[k]);
    }
}

template <int W, typename Max = NoMax>
static __global__ void gate_forward_kernel(int lanes, floatX *y, const floatX *x, const floatX *g, int N, int heads,
                                           int D, int ldg, int width, Max max) {
    unsigned row = row_index(lanes), n = row / (unsigned)heads;
    int end = n < (unsigned)N ? D : 0;
    const floatX *gate = g + n * (size_t)ldg + row % (unsigned)heads * (size_t)width;
    float v[W], s[W];
    for (int i = row_lane(lanes) * W; i < end; i += lanes * W) {
        load<W>(v, x + row * (size_t)D + i);
        gate_load<W>(s, gate, i, width);
        UNROLL
        for (int k = 0; k < W; k++) v[k] *= s[k];
        store<W>(y + row * (size_t)D + i, v);
        max.add(v);
    }
    max.finish();
}

static inline bool gate_packed(const floatX *g, int D, int ldg, int width) {
    return width == 1 || (packed(D, g) && packed(ldg));
}

static inline void gate_forward(Activation y, const floatX *x, const floatX *g, int N, int heads, int D, int ldg,
                                int width) {
    OPERATION();
    assert(width == 1 || width == D);
    bool wide = packed(D, y.data, x) && gate_packed(g, D, ldg, width);
    launch_with_max(y.max, [&](auto of_y) {
        typedef decltype(of_y) Max;
        LAUNCH_ROWS_EITHER((gate_forward_kernel<PACK, Max>), (gate_forward_kernel<1, Max>), wide, (size_t)N * heads, D,
                           y.data, x, g, N, heads, D, ldg, width, of_y);
    });
}

template <int W>
static __global__ void gate_backward_kernel(int lanes, floatX *dx, floatX *dg, const floatX *dy, const floatX *x,
                                            const floatX *g, int N, int heads, int D, int ldg, int width) {
    unsigned row = row_index(lanes), n = row / (unsigned)heads;
    size_t gate = n * (size_t)ldg + row % (unsigned)heads * (size_t)width;
    int lane = row_lane(lanes);
    bool active = n < (unsigned)N; // the other lanes take part in the exchange
    float dot = 0, v[W], d[W], s[W];
    for (int i = lane * W; active && i < D; i += lanes * W) {
        load<W>(v, x + row * (size_t)D + i);
        load<W>(d, dy + row * (size_t)D + i);
        gate_load<W>(s, g + gate, i, width);
        UNROLL
        for (int k = 0; k < W; k++) {
            v[k] *= d[k]; // backward of s in y = x s
            dot += v[k];
            v[k] *= s[k] * (1 - s[k]); // backward of s = sigmoid(g)
            d[k] *= s[k];              // backward of x
        }
        store<W>(dx + row * (size_t)D + i, d);
        if (width > 1) store<W>(dg + gate + i, v);
    }
    if (width > 1) return;
    dot = lanes_sum(dot, lanes);
    if (!active || lane > 0) return;
    float one = sigmoid_of(to_float(g[gate]));
    round_to(dg + gate, one * (1 - one) * dot);
}

static inline void gate_backward(floatX *dx, floatX *dg, const floatX *dy, const floatX *x, const floatX *g, int N,
                                 int heads, int D, int ldg, int width) {
    OPERATION();
    assert(width == 1 || width == D);
    bool wide = packed(D, dx, dy, x) && gate_packed(g, D, ldg, width) && gate_packed(dg, D, ldg, width);
    LAUNCH_ROWS(gate_backward_kernel, wide, (size_t)N * heads, D, dx, dg, dy, x, g, N, heads, D, ldg, width);
}
