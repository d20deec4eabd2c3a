/*
gate.h: a sigmoid gate on the output heads, from the layer's input.

  forward   y[n,h,i] = x[n,h,i] s,   s = sigmoid(g[n,h]) (one gate per head) or sigmoid(g[n,h,i])
  backward  dx[n,h,i] = dy[n,h,i] s,   dg = s (1 - s) dy x, summed over i for a gate per head
  shapes    x, y (N,heads,D); g (N,heads*width) with row stride ldg, width 1 or D
  traffic   D + width in, D out per (n,h); backward 2D + width in, D + width out: bandwidth-bound
  source    Qiu et al. 2025, "Gated Attention for Large Language Models" (arXiv 2505.06708)
*/
#pragma once
#include "../absmax.h"
#include "operations.h"
#include "../vecmath.h"

static inline void gate_forward(Activation y, const floatX *x, const floatX *g, int N, int heads, int D, int ldg,
                                int width) {
    assert(width == 1 || width == D);
#pragma omp parallel for schedule(static) if (worth_threads((size_t)N * heads * D))
    for (int n = 0; n < N; n++)
        for (int h = 0; h < heads; h++) {
            size_t at = ((size_t)n * heads + h) * D;
            const floatX *gate = g + (size_t)n * ldg + h * width;
            if (width == 1) {
                real s = real_sigmoid(gate[0]);
                for (int i = 0; i < D; i++) y.data[at + i] = x[at + i] * s;
            } else {
                for (int i = 0; i < D; i++) y.data[at + i] = x[at + i] * real_sigmoid(gate[i]);
            }
        }
    absmax_update(y, N, heads * D, heads * D);
}

static inline void gate_backward(floatX *dx, floatX *dg, const floatX *dy, const floatX *x, const floatX *g, int N,
                                 int heads, int D, int ldg, int width) {
    assert(width == 1 || width == D);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int h = 0; h < heads; h++) {
            size_t at = ((size_t)n * heads + h) * D;
            size_t gate = (size_t)n * ldg + h * width;
            const floatX *xh = x + at, *dyh = dy + at;
            floatX *dxh = dx + at;
            if (width == 1) {
                real s = real_sigmoid(g[gate]), dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int i = 0; i < D; i++) {
                    dxh[i] = dyh[i] * s;   // backward of x in y = x s
                    dot += dyh[i] * xh[i]; // backward of s
                }
                dg[gate] = s * (1 - s) * dot; // backward of s = sigmoid(g)
            } else {
                for (int i = 0; i < D; i++) {
                    real s = real_sigmoid(g[gate + i]);
                    dxh[i] = dyh[i] * s;
                    dg[gate + i] = s * (1 - s) * dyh[i] * xh[i];
                }
            }
        }
}
