/*
rmsnorm.h: divides a row by its root mean square; also for the sum of a residual and its input.

  forward   r = 1/sqrt(mean_c(x[n,c]^2) + eps),   y[n,c] = x[n,c] r weight[c]
  backward  with z = x r (the normalized row) and g = dy * weight:
              y = z weight              =>  dweight[c] += sum_n dy[n,c] z[n,c]
              r = (mean(x^2)+eps)^-1/2  =>  dr/dx[c] = -r^3 x[c] / C
              dx[c] = r g[c] + (sum_j g[j] x[j]) dr/dx[c] = r (g[c] - z[c] mean_j(g[j] z[j]))
            With `add` dx accumulates, since the row also bypasses the norm (the residual stream).
  fused     sum = a + b, y = rmsnorm(sum) row by row, so that the norm reads the sum from the cache. The norm reads the
            stored sum with the code of rmsnorm_forward: a recomputed norm is bitwise equal. The backward of the sum
            needs no operation; the backward of the norm is above.
  shapes    x, y (N,C), weight (C), rstd (N)
  numerics  sums in `real`; dweight is summed over a fixed number of parts of the rows, so the result does not depend on
            the number of threads
  traffic   forward C in (twice, from cache), C out; fused 2C in, 2C out; backward 3C in, C out
  source    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"
*/
#pragma once
#include "../absmax.h"
#include "operations.h"
#include "../runtime.h"

// One row; returns its rstd. Not inlined, so that both forwards run the same instructions.
__attribute__((noinline)) static real rmsnorm_row(floatX *y, const floatX *x, const floatX *weight, int C, real eps) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < C; c++) sum += x[c] * x[c];
    real r = 1 / (real)sqrt((double)(sum / (real)C + eps));
    for (int c = 0; c < C; c++) y[c] = x[c] * r * weight[c];
    return r;
}

static inline void rmsnorm_forward(Activation y, real *rstd, const floatX *x, const floatX *weight, int N, int C,
                                   real eps) {
#pragma omp parallel for schedule(static) if (worth_threads((size_t)N * C))
    for (int n = 0; n < N; n++) {
        size_t row = (size_t)n * C;
        rstd[n] = rmsnorm_row(y.data + row, x + row, weight, C, eps);
    }
    absmax_update(y, N, C, C);
}

static inline void residual_rmsnorm_forward(floatX *sum, Activation y, real *rstd, const floatX *a, const floatX *b,
                                            const floatX *weight, int N, int C, real eps) {
#pragma omp parallel for schedule(static) if (worth_threads((size_t)N * C))
    for (int n = 0; n < N; n++) {
        size_t row = (size_t)n * C;
        for (int c = 0; c < C; c++) sum[row + c] = a[row + c] + b[row + c];
        rstd[n] = rmsnorm_row(y.data + row, sum + row, weight, C, eps);
    }
    absmax_update(y, N, C, C);
}

enum { RMSNORM_PARTS = 32 }; // parts of the rows, for any number of threads

static inline size_t rmsnorm_workspace_bytes(int C) { return RMSNORM_PARTS * (size_t)C * sizeof(real); }

static inline void rmsnorm_backward(Activation dx, grad_t *dweight, const floatX *dy, const floatX *x,
                                    const floatX *weight, const real *rstd, int N, int C, bool add) {
    real *partial = ops_workspace_take(rmsnorm_workspace_bytes(C)); // (PARTS, C): dweight of each part of the rows
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int part = 0; part < RMSNORM_PARTS; part++) {
            real *dw = partial + (size_t)part * C;
            int begin = (int)((int64_t)N * part / RMSNORM_PARTS), end = (int)((int64_t)N * (part + 1) / RMSNORM_PARTS);
            memset(dw, 0, C * sizeof(real));
            for (int n = begin; n < end; n++) {
                size_t row = (size_t)n * C;
                const floatX *xn = x + row, *dyn = dy + row;
                floatX *dxn = dx.data + row;
                real r = rstd[n], dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int c = 0; c < C; c++) dot += dyn[c] * weight[c] * xn[c];
                real mean = dot * r / (real)C; // mean_j(g[j] z[j])
#pragma omp simd
                for (int c = 0; c < C; c++) {
                    real z = xn[c] * r;
                    dw[c] += dyn[c] * z; // backward of weight in y = z weight
                    dxn[c] = (add ? dxn[c] : 0) + r * (dyn[c] * weight[c] - z * mean); // backward of y = x r weight
                }
            }
        }
#pragma omp for schedule(static)
        for (int c = 0; c < C; c++) {
            real sum = 0;
            for (int part = 0; part < RMSNORM_PARTS; part++) sum += partial[(size_t)part * C + c];
            dweight[c] += sum;
        }
    }
    absmax_update(dx, N, C, C);
}
