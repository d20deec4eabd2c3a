/*
sink.h: an additional logit in the softmax of each head, whose column is dropped, so that a head can attend to nothing.

  Input: out = O and lse = L of attention without a sink. With the sink's logit s (learned per head, or 0),

  forward   softmax with the sink  P' = exp(S - L'),  L' = log(exp(L) + exp(s))
            O' = exp(L - L') O = sigmoid(L - s) O;   out and lse are replaced by O' and L'
  backward  attention_backward with P' = exp(S - L') and rowsum(dO' O') is correct as it is, since the column of the
            sink is one more column of P' whose value is 0. For the sink itself dP = 0, so
              ds = sum_t P'_sink (0 - rowsum(dO' O')) = -sum_t exp(s - L') rowsum(dO' O')
  shapes    out, dout (N,NH,D), lse (B,NH,T), sinks and dsinks (NH); sinks NULL: all 0
  numerics  s is not scaled by 1/sqrt(D). L' = s + log1p(exp(L - s)) or L + log1p(exp(s - L)), the form that cannot
            overflow. dsinks is summed over b and t in order.
  traffic   forward D in, D out per (n,h); backward 2D in
  source    Miller 2023, "Attention is off by one"; learned sinks: the gpt-oss model card (arXiv 2508.10925)
*/
#pragma once
#include "operations.h"
#include "../vecmath.h"

static inline void sink_forward(floatX *out, real *lse, const floatX *sinks, int B, int T, int NH, int D) {
#pragma omp parallel for collapse(2) schedule(static) if (worth_threads((size_t)B * T * NH * D))
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
                real *l = lse + ((size_t)b * NH + h) * T + t;
                floatX *o = out + (((size_t)b * T + t) * (size_t)NH + h) * D;
                real s = sinks ? sinks[h] : 0, keep = real_sigmoid(*l - s);
                for (int i = 0; i < D; i++) o[i] *= keep;
                double larger = (double)(*l > s ? *l : s), smaller = (double)(*l > s ? s : *l);
                *l = (real)(larger + log1p(exp(smaller - larger)));
            }
}

// Called after sink_forward: out and lse are O' and L'. Not called for constant sinks.
static inline void sink_backward(grad_t *dsinks, const floatX *dout, const floatX *out, const real *lse,
                                 const floatX *sinks, int B, int T, int NH, int D) {
#pragma omp parallel for schedule(static)
    for (int h = 0; h < NH; h++) {
        real sum = 0;
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) {
                size_t at = (((size_t)b * T + t) * (size_t)NH + h) * D;
                real l = lse[((size_t)b * NH + h) * T + t], dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int i = 0; i < D; i++) dot += dout[at + i] * out[at + i];
                sum -= real_exp(sinks[h] - l) * dot; // backward of O' = sigmoid(L - s) O
            }
        dsinks[h] += sum;
    }
}
