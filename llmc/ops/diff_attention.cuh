/*
diff_attention.cuh: attention whose noise heads are subtracted, as attention of all query heads, by cuDNN or the
built-in kernels, and diff_combine. All heads are kept for the backward. Contract in ops.h.
*/
#ifndef LLMC_DIFF_ATTENTION_CUH
#define LLMC_DIFF_ATTENTION_CUH
#include "attention.cuh"
#include "diff_combine.cuh"

static inline int diff_attention_kept(AttentionShape s) { return s.NQ; }

static inline void diff_attention_forward(floatX *out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                          const floatX *v, const floatX *l, int ldl, AttentionShape s, Factor factor,
                                          absmax_t *max) {
    attention_forward(kept, lse, q, k, v, attention_of_heads(s));
    diff_combine_forward(out, kept, l, s.B * s.T, output_heads(s.groups, s.NQ), s.DV, ldl, s.groups, factor, max);
}

static inline void diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                           const floatX *dout, const floatX *out, const floatX *kept, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v, const floatX *l, int ldl,
                                           AttentionShape s, Factor factor, bool add_dv) {
    (void)out;
    diff_combine_backward(dkept, dl, dout, kept, l, s.B * s.T, output_heads(s.groups, s.NQ), s.DV, ldl, s.groups,
                          factor);
    attention_backward(dq, dk, dv, dkept, kept, lse, q, k, v, attention_of_heads(s), add_dv);
}
#endif
