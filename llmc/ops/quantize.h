/*
quantize.h: numbers rounded to b-bit integers times a step, for `--eval --quantize`: what low precision would cost.

  levels    L = 2^(b-1) - 1: the integers are -L .. L
  rounding  Q(x) = round(L x / max) * (max / L), ties to even; max: the largest magnitude of the row or of the matrix
  forward   S = scale Q K^T,  P = softmax(Q_row(S)),  O = P V: max is that of a query row and head over its visible keys
  shapes    x (N,columns) with row stride ld; those of attention_forward
  numerics  fp32: one product, one division and one rounding to an integer per element, one division per max, one
            product. Numbers of b bits are kept as floatX. A NaN stays NaN and does not count for max;
            an infinity gives NaN in its row, or matrix.
  traffic   the matrix twice in, once out. Attention: a row of logits at a time, by the definition
  source    symmetric round-to-nearest quantization, as LLM.int8() (Dettmers et al. 2022) and SmoothQuant (Xiao et al.
            2023) state it; logits: DIFF V1 (arXiv 2410.05258), on activation outliers
*/
#pragma once
#include "attention.h"

static inline real quantize_levels(int bits) { return (real)((1 << (bits - 1)) - 1); }

static inline real quantize_row_max(const floatX *x, int columns) {
    real max = 0;
#pragma omp simd reduction(max : max)
    for (int c = 0; c < columns; c++) {
        real magnitude = x[c] < 0 ? -x[c] : x[c];
        max = magnitude > max ? magnitude : max;
    }
    return max;
}

static inline void quantize_row(floatX *x, int columns, real max, int bits) {
    const real levels = quantize_levels(bits), step = max / levels;
    if (max == 0) return; // zeros, and perhaps NaN
    for (int c = 0; c < columns; c++) x[c] = (real)rint((double)(levels * x[c] / max)) * step;
}

static inline void quantize_inplace(floatX *x, int N, int columns, int ld, int bits, bool whole) {
    real largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest) if (whole)
    for (int n = 0; n < (whole ? N : 0); n++) {
        real max = quantize_row_max(x + (size_t)n * ld, columns);
        largest = max > largest ? max : largest;
    }
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        floatX *row = x + (size_t)n * ld;
        quantize_row(row, columns, whole ? largest : quantize_row_max(row, columns), bits);
    }
}

static inline void attention_quantized_forward(floatX *out, real *lse, const floatX *q, const floatX *k,
                                               const floatX *v, AttentionShape s, int bits) {
    size_t keys = (size_t)(s.first + s.T);
    real *memory = (real *)checked_calloc(keys * omp_get_max_threads(), sizeof(real));
#pragma omp parallel for schedule(dynamic, 16)
    for (int item = 0; item < s.B * s.NQ * s.T; item++) {
        int t = item % s.T, h = item / s.T % s.NQ, b = item / s.T / s.NQ, kv = h / (s.NQ / s.NKV);
        int low = attention_first_key(s, b, t), end = s.first + t + 1;
        size_t row = (size_t)b * s.T + t, sequence = (size_t)b * s.T * s.ldkv;
        real *scores = memory + omp_get_thread_num() * keys;
        attention_row_scores(scores, q + row * s.ldq + h * s.q_head, k + sequence + kv * s.k_head, low, end, s);
        quantize_row(scores + low, end - low, quantize_row_max(scores + low, end - low), bits);
        attention_row_output(out + row * s.ldo + h * s.o_head, lse ? lse + item : NULL, scores,
                             v + sequence + kv * s.v_head, low, end, s);
    }
    free(memory);
}
