/*
exclusive.h: removes from each output head its component along its position's own value.

  forward   y = x - c v,   c = <x,v> / <v,v>,   v = v[n, h / (heads/NKV)]; c = 0 where <v,v> is below EXCLUSIVE_LEAST
  backward  with b = <dy,v> / <v,v>:
            dx = dy - b v                              the projection is symmetric
            dv = sum over the heads of v: -c dy - b x + 2 b c v
  shapes    x, y (N,heads,D), v (N,NKV,D) with row stride ldv, dv likewise with row stride lddv
  numerics  arithmetic in `real`, one rounding at the store
  traffic   per head D in, D out, and v once; backward 2D in, D out, v in and dv out: bandwidth-bound
  source    Zhai 2026, "Exclusive Self Attention" (arXiv 2603.09078)
*/
#pragma once
#include "fp8.h"
#include "ops.h"

static inline real exclusive_dot(const floatX *a, const floatX *b, int D) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < D; i++) sum += a[i] * b[i];
    return sum;
}
// 1 / <v,v>, or 0
static inline real exclusive_scale(const floatX *v, int D) {
    real square = exclusive_dot(v, v, D);
    return square >= (real)EXCLUSIVE_LEAST ? 1 / square : 0;
}

static inline void exclusive_forward(floatX *y, const floatX *x, const floatX *v, int N, int heads, int NKV, int D,
                                     int ldv, absmax_t *max) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int kv = 0; kv < NKV; kv++) {
            const floatX *vh = v + (size_t)n * ldv + (size_t)kv * D;
            real scale = exclusive_scale(vh, D);
            for (int h = kv * (heads / NKV); h < (kv + 1) * (heads / NKV); h++) {
                size_t at = ((size_t)n * heads + h) * D;
                real c = exclusive_dot(x + at, vh, D) * scale;
                for (int i = 0; i < D; i++) y[at + i] = x[at + i] - c * vh[i];
            }
        }
    if (max) absmax_update(max, y, N, heads * D, heads * D);
}

static inline void exclusive_backward(floatX *dx, floatX *dv, const floatX *dy, const floatX *x, const floatX *v, int N,
                                      int heads, int NKV, int D, int ldv, int lddv) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int kv = 0; kv < NKV; kv++) {
            const floatX *vh = v + (size_t)n * ldv + (size_t)kv * D;
            floatX *dvh = dv + (size_t)n * lddv + (size_t)kv * D;
            real scale = exclusive_scale(vh, D);
            for (int i = 0; i < D; i++) dvh[i] = 0;
            for (int h = kv * (heads / NKV); h < (kv + 1) * (heads / NKV); h++) {
                size_t at = ((size_t)n * heads + h) * D;
                const floatX *g = dy + at;
                real c = exclusive_dot(x + at, vh, D) * scale, b = exclusive_dot(g, vh, D) * scale;
                for (int i = 0; i < D; i++) {
                    dvh[i] += 2 * b * c * vh[i] - c * g[i] - b * x[at + i]; // backward of v in y = x - (x.v / v.v) v
                    dx[at + i] = g[i] - b * vh[i];                          // backward of x
                }
            }
        }
}
