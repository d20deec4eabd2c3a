/*
head_norm.h: RMSNorm of query and key heads, in the rows of a fused matrix (QK-norm).

  forward   r = 1/sqrt(mean_i(x[n,h,i]^2) + eps),   x[n,h,i] *= r weight[i], in place; kept = x before
  backward  as in rmsnorm.h: with z = kept r and g = dx weight, dweight[i] += sum_n,h dx z,
            dx = r (g - z mean_i(g z)); r is computed again
  shapes    x (N, heads*D) with row stride ld, kept likewise with row stride ldk, weight (D)
  numerics  sums in `real`; dweight is summed over a fixed number of parts of the rows, so the result does not depend on
            the number of threads
  traffic   D in, 2D out per head; backward 2D in, D out: bandwidth-bound
  source    Henry et al. 2020, "Query-Key Normalization for Transformers"; with one weight for all heads as in Qwen3
*/
#pragma once
#include "operations.h"
#include "../runtime.h"

static inline real head_norm_rstd(const floatX *x, int D, real eps) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < D; i++) sum += x[i] * x[i];
    return 1 / (real)sqrt((double)(sum / (real)D + eps));
}

static inline void head_norm_forward(floatX *x, floatX *kept, const floatX *weight, int N, int heads, int D, int ld,
                                     int ldk, real eps) {
#pragma omp parallel for schedule(static) if (worth_threads((size_t)N * heads * D))
    for (int n = 0; n < N; n++)
        for (int h = 0; h < heads; h++) {
            floatX *head = x + (size_t)n * ld + (size_t)h * D;
            real r = head_norm_rstd(head, D, eps);
            if (kept) memcpy(kept + (size_t)n * ldk + (size_t)h * D, head, D * sizeof(floatX));
            for (int i = 0; i < D; i++) head[i] = head[i] * r * weight[i];
        }
}

enum { HEAD_NORM_PARTS = 32 }; // parts of the rows, for any number of threads

static inline size_t head_norm_workspace_bytes(int D) { return HEAD_NORM_PARTS * (size_t)D * sizeof(real); }

static inline void head_norm_backward(floatX *dx, grad_t *dweight, const floatX *kept, const floatX *weight, int N,
                                      int heads, int D, int ld, int ldk, real eps) {
    real *partial = ops_workspace_take(head_norm_workspace_bytes(D)); // (PARTS, D): dweight of each part of the rows
#pragma omp parallel for schedule(static)
    for (int part = 0; part < HEAD_NORM_PARTS; part++) {
        real *dw = partial + (size_t)part * D;
        memset(dw, 0, D * sizeof(real));
        int begin = (int)((int64_t)N * part / HEAD_NORM_PARTS), end = (int)((int64_t)N * (part + 1) / HEAD_NORM_PARTS);
        for (int n = begin; n < end; n++)
            for (int h = 0; h < heads; h++) {
                const floatX *x = kept + (size_t)n * ldk + (size_t)h * D;
                floatX *g = dx + (size_t)n * ld + (size_t)h * D;
                real r = head_norm_rstd(x, D, eps), dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int i = 0; i < D; i++) dot += g[i] * weight[i] * x[i];
                real mean = dot * r / (real)D; // mean_i(g[i] z[i])
#pragma omp simd
                for (int i = 0; i < D; i++) {
                    real z = x[i] * r;
                    dw[i] += g[i] * z;                        // backward of weight in y = z weight
                    g[i] = r * (g[i] * weight[i] - z * mean); // backward of y = x r weight
                }
            }
    }
    for (int i = 0; i < D; i++) {
        real sum = 0;
        for (int part = 0; part < HEAD_NORM_PARTS; part++) sum += partial[(size_t)part * D + i];
        dweight[i] += sum;
    }
}
