/*
swiglu.h: the gated activation of the MLP.

  forward   y = g sigmoid(g) u
  backward  with p = sigmoid(g):  du = dy g p,   dg = dy u p (1 + g (1 - p))
  shapes    gate_up (N,2F): row n is [g (F) | u (F)];  y (N,F)
  traffic   2F in, F out per row; backward 3F in, 2F out: bandwidth-bound
  source    Shazeer 2020, "GLU Variants Improve Transformer"
*/
#pragma once
#include "../absmax.h"
#include "operations.h"
#include "../vecmath.h"

// y[n] times weights[entries[n]]; weights NULL: 1, which changes no bit
static inline void swiglu_weighted_forward(Activation y, const floatX *gate_up, const real *weights, const int *entries,
                                           int N, int F) {
#pragma omp parallel for schedule(static) if (worth_threads((size_t)N * F))
    for (int n = 0; n < N; n++) {
        const floatX *g = gate_up + 2 * (size_t)n * F, *u = g + F;
        floatX *yn = y.data + (size_t)n * F;
        real w = weights ? weights[entries[n]] : 1;
        for (int i = 0; i < F; i++) yn[i] = w * (g[i] * real_sigmoid(g[i]) * u[i]);
    }
    absmax_update(y, N, F, F);
}

static inline void swiglu_forward(Activation y, const floatX *gate_up, int N, int F) {
    swiglu_weighted_forward(y, gate_up, NULL, NULL, N, F);
}

static inline void swiglu_backward(Activation dgate_up, const floatX *dy, const floatX *gate_up, int N, int F) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const floatX *g = gate_up + 2 * (size_t)n * F, *u = g + F;
        const floatX *d = dy + (size_t)n * F;
        floatX *dg = dgate_up.data + 2 * (size_t)n * F, *du = dg + F;
        for (int i = 0; i < F; i++) {
            real p = real_sigmoid(g[i]);
            du[i] = d[i] * g[i] * p;                        // backward of u in y = g p u
            dg[i] = d[i] * u[i] * p * (1 + g[i] * (1 - p)); // backward of g p, with dp/dg = p (1 - p)
        }
    }
    absmax_update(dgate_up, N, 2 * F, 2 * F);
}
