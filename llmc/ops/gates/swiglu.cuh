/*
swiglu.cuh: the gated activation of the MLP. Equations in swiglu.h.

  mapping   a thread per pack of a row of y, hence of the gate and of the up part
  traffic   2F in, F out per row; backward 3F in, 2F out: bandwidth-bound. No library for C++ computes it in the
            epilogue of gate and up (dev/BENCH.md, "Fusions, by bytes").
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "../absmax.cuh"
#include "operations.h"

template <int W, typename Max = NoMax>
static __global__ void swiglu_forward_kernel(floatX *y, const floatX *gate_up, const float *weights, const int *entries,
                                             int F, Max max) {
    unsigned n = blockIdx.x, i = column_index<W>();
    if (i < (unsigned)F) {
        const floatX *from = gate_up + n * 2 * (size_t)F + i;
        float g[W], u[W], w = weights ? weights[entries[n]] : 1;
        load<W>(g, from);
        load<W>(u, from + F);
        UNROLL
        for (int k = 0; k < W; k++) u[k] *= w * (g[k] * sigmoid_of(g[k]));
        store<W>(y + n * (size_t)F + i, u);
        max.add(u);
    }
    max.finish();
}

// y[n] times weights[entries[n]]; weights NULL: 1, which changes no bit
static inline void swiglu_weighted_forward(Activation y, const floatX *gate_up, const real *weights, const int *entries,
                                           int N, int F) {
    launch_with_max(y.max, [&](auto of_y) {
        typedef decltype(of_y) Max;
        LAUNCH_COLUMNS_EITHER((swiglu_forward_kernel<PACK, Max>), (swiglu_forward_kernel<1, Max>),
                              packed(F, y.data, gate_up), N, F, y.data, gate_up, weights, entries, F, of_y);
    });
}
static inline void swiglu_forward(Activation y, const floatX *gate_up, int N, int F) {
    OPERATION();
    swiglu_weighted_forward(y, gate_up, NULL, NULL, N, F);
}

template <int W, typename Max = NoMax>
static __global__ void swiglu_backward_kernel(floatX *dgate_up, const floatX *dy, const floatX *gate_up, int F,
                                              Max max) {
    unsigned n = blockIdx.x, i = column_index<W>();
    if (i < (unsigned)F) {
        size_t at = n * 2 * (size_t)F + i;
        float g[W], u[W], d[W];
        load<W>(g, gate_up + at);
        load<W>(u, gate_up + at + F);
        load<W>(d, dy + n * (size_t)F + i);
        UNROLL
        for (int k = 0; k < W; k++) {
            float p = sigmoid_of(g[k]), gk = g[k];
            g[k] = d[k] * u[k] * p * (1 + gk * (1 - p)); // backward of g p in y = g p u, with dp/dg = p (1 - p)
            u[k] = d[k] * gk * p;                        // backward of u
        }
        store<W>(dgate_up + at, g);
        store<W>(dgate_up + at + F, u);
        max.add(g);
        max.add(u);
    }
    max.finish();
}

static inline void swiglu_backward(Activation dgate_up, const floatX *dy, const floatX *gate_up, int N, int F) {
    OPERATION();
    launch_with_max(dgate_up.max, [&](auto of_d) {
        typedef decltype(of_d) Max;
        LAUNCH_COLUMNS_EITHER((swiglu_backward_kernel<PACK, Max>), (swiglu_backward_kernel<1, Max>),
                              packed(F, dgate_up.data, dy, gate_up), N, F, dgate_up.data, dy, gate_up, F, of_d);
    });
}
