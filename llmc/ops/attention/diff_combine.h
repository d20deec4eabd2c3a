/*
diff_combine.h: subtracts from each signal head its noise head, times a factor.

  forward   o[n,h,:] = a[n,h1,:] - s a[n,h2,:],   s = sigmoid(l) or l,   l = l[n,h]
  backward  da[n,h1,:] = do[n,h,:]                 o is linear in a
            da[n,h2,:] = sum over the h that share the noise head: -s do[n,h,:]
            ds         = -<do[n,h,:], a[n,h2,:]>,  ds/dl = s (1 - s) or 1
            dl[n,h]    = ds ds/dl
  shapes    a (N,NQ,D), l (N,NH) with row stride ldl, o (N,NH,D); n = b*T + t
  heads     h1 and h2 by signal_head and noise_head (variants.h)
  numerics  arithmetic in `real`, one rounding at the store
  traffic   per output head D (1 + noise/signals) + 1 in, D out; backward as much in, and as much as `a` and l out:
            bandwidth-bound
  source    DIFF V2: the two heads of a pair share keys and values, lambda is projected from the input. More signal
            heads than noise heads: arXiv 2510.06949 (grouped differential attention)
*/
#pragma once
#include "../absmax.h"
#include "operations.h"
#include "../vecmath.h"

static inline real diff_factor(real l, Factor factor) { return factor == S_SIGMOID ? real_sigmoid(l) : l; }
// ds/dl
static inline real diff_factor_slope(real s, Factor factor) { return factor == S_SIGMOID ? s * (1 - s) : 1; }

static inline void diff_combine_forward(Activation o, const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                        HeadGroups groups, Factor factor) {
    size_t heads = (size_t)(NH + NH / groups.signals * groups.noise);
#pragma omp parallel for schedule(static) if (worth_threads((size_t)N * NH * D))
    for (int n = 0; n < N; n++)
        for (int h = 0; h < NH; h++) {
            const floatX *a1 = a + (n * heads + signal_head(groups, h)) * D;
            const floatX *a2 = a + (n * heads + noise_head(groups, h)) * D;
            floatX *out = o.data + ((size_t)n * NH + h) * D;
            real s = diff_factor(l[(size_t)n * ldl + h], factor);
            for (int i = 0; i < D; i++) out[i] = a1[i] - s * a2[i];
        }
    absmax_update(o, N, NH * D, NH * D);
}

static inline void diff_combine_backward(floatX *da, floatX *dl, const floatX *do_, const floatX *a, const floatX *l,
                                         int N, int NH, int D, int ldl, HeadGroups groups, Factor factor) {
    size_t heads = (size_t)(NH + NH / groups.signals * groups.noise);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int h = 0; h < NH; h++) {
            size_t first = (n * heads + signal_head(groups, h)) * D, second = (n * heads + noise_head(groups, h)) * D;
            bool shared = h > 0 && noise_head(groups, h) == noise_head(groups, h - 1); // the sum has begun
            const floatX *g = do_ + ((size_t)n * NH + h) * D;
            size_t at = (size_t)n * ldl + h;
            real s = diff_factor(l[at], factor), dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int i = 0; i < D; i++) {
                da[first + i] = g[i];                                       // backward of a1 in o = a1 - s a2
                da[second + i] = -s * g[i] + (shared ? da[second + i] : 0); // backward of a2
                dot += g[i] * a[second + i];
            }
            dl[at] = -dot * diff_factor_slope(s, factor); // backward of s = factor(l)
        }
}
