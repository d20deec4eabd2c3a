/*
attention_sparse_apart.h: on GPUs, and so in predictions, block-sparse attention of all query heads and diff_combine are
two operations (attention_sparse.cuh, dev/predict/recorded_operations.h).

  workspace  rowsum(dO O); counts and starts of the blocks, the rows of each
*/
#pragma once
#include "operations.h"

static inline size_t sparse_attention_workspace_bytes(AttentionShape s, int threads) {
    (void)threads; // a GPU does not use the host's threads
    size_t rows = (size_t)s.T * sparse_width(s.sparse) + 2 * (size_t)((s.T + s.sparse.size - 1) / s.sparse.size);
    return (size_t)s.B * s.NQ * s.T * FP32_BYTES + (size_t)s.B * s.NKV * rows * sizeof(int);
}

static inline int sparse_diff_attention_kept(AttentionShape s) { return s.NQ; }

static inline void sparse_diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q,
                                                 const floatX *k, const floatX *v, const floatX *l, int ldl,
                                                 AttentionShape s, Factor factor) {
    sparse_attention_forward(kept, lse, q, k, v, NULL, 0, attention_of_heads(s));
    diff_combine_forward(out, kept, l, s.B * s.T, output_heads(s.groups, s.NQ), s.DV, ldl, s.groups, factor);
}

static inline void sparse_diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                                  const floatX *dout, const floatX *out, const floatX *kept,
                                                  const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                                  const floatX *l, int ldl, AttentionShape s, Factor factor) {
    (void)out;
    diff_combine_backward(dkept, dl, dout, kept, l, s.B * s.T, output_heads(s.groups, s.NQ), s.DV, ldl, s.groups,
                          factor);
    sparse_attention_backward(dq, dk, dv, dkept, kept, lse, q, k, v, attention_of_heads(s), false);
}
