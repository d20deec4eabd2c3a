/*
diff_combine.h: subtracts the second head of each pair from the first.

  forward   o[n,h,:] = a[n,h1,:] - s a[n,h2,:],   s = sigmoid(l[n,h]) or s = l[n,h]
  backward  da[n,h1,:] = do[n,h,:]                 o is linear in a
            da[n,h2,:] = -s do[n,h,:]
            ds         = -<do[n,h,:], a[n,h2,:]>,  ds/dl = s (1 - s) or 1
            dl[n,h]    = ds ds/dl
  shapes    a (N,2NH,D), l (N,NH) with row stride ldl, o (N,NH,D); n = b*T + t
  pairing   h1 = 2 stride (h / stride) + h % stride,  h2 = h1 + stride
  numerics  arithmetic in `real`, one rounding at the store
  traffic   2D+1 in, D out per (n,h); backward 2D+1 in, 2D+1 out: bandwidth-bound
  source    DIFF V2: the two heads of a pair share keys and values, lambda is projected from the input
*/
#ifndef LLMC_DIFF_COMBINE_H
#define LLMC_DIFF_COMBINE_H
#include "fp8.h"
#include "ops.h"
#include "vecmath.h"

static inline int diff_first_head(int h, int stride) { return 2 * stride * (h / stride) + h % stride; }

static inline real diff_factor(real l, bool sigmoid) { return sigmoid ? real_sigmoid(l) : l; }

static inline void diff_combine_forward(floatX *o, const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                        int stride, bool sigmoid, absmax_t *max) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int h = 0; h < NH; h++) {
            const floatX *a1 = a + ((size_t)n * 2 * NH + diff_first_head(h, stride)) * D;
            const floatX *a2 = a1 + (size_t)stride * D;
            floatX *out = o + ((size_t)n * NH + h) * D;
            real s = diff_factor(l[(size_t)n * ldl + h], sigmoid);
            for (int i = 0; i < D; i++) out[i] = a1[i] - s * a2[i];
        }
    if (max) absmax_update(max, o, N, NH * D, NH * D);
}

static inline void diff_combine_backward(floatX *da, floatX *dl, const floatX *do_, const floatX *a, const floatX *l,
                                         int N, int NH, int D, int ldl, int stride, bool sigmoid) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int h = 0; h < NH; h++) {
            size_t first = ((size_t)n * 2 * NH + diff_first_head(h, stride)) * D;
            size_t second = first + (size_t)stride * D;
            const floatX *g = do_ + ((size_t)n * NH + h) * D;
            size_t at = (size_t)n * ldl + h;
            real s = diff_factor(l[at], sigmoid), dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int i = 0; i < D; i++) {
                da[first + i] = g[i];       // backward of a1 in o = a1 - s a2
                da[second + i] = -s * g[i]; // backward of a2
                dot += g[i] * a[second + i];
            }
            dl[at] = -dot * (sigmoid ? s * (1 - s) : 1); // backward of s = sigmoid(l), or s = l
        }
}
#endif
