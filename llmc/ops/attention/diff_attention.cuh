/*
diff_attention.cuh: attention whose noise heads are subtracted. Contract in ops.h.

  forward   pairs of a signal and a noise head by one kernel on the tensor cores (attention_mma.cuh), if the built-in
            kernels compute attention; otherwise attention of all query heads and diff_combine, as with more signal
            heads to a noise head
  backward  pairs by one kernel (attention_mma_backward.cuh); otherwise diff_combine and attention of all query heads
  kept      the noise heads if pairs are computed by one kernel, else all heads
*/
#pragma once
#include "attention.cuh"
#include "diff_combine.cuh"

// Whether the built-in kernels compute a signal and a noise head together, in both directions. This decides what is
// kept, so it is known before plans are made; tensors are then aligned to 16 bytes.
static inline bool attention_by_groups(AttentionShape s) {
    return s.groups.signals == 1 && attention_mma_fits(s) && attention_mma_backward_fits(s) &&
           attention_requests_builtin(s, 1, true);
}

static inline int diff_attention_kept(AttentionShape s) { return attention_by_groups(s) ? s.NQ / 2 : s.NQ; }

static inline void diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                          const floatX *v, const floatX *l, int ldl, AttentionShape s, Factor factor) {
    if (attention_by_groups(s)) {
        OPERATION();
        assert(packed(0, out.data, kept, q, k, v));
        diff_attention_mma_forward(out.data, kept, lse, q, k, v, l, ldl, s, factor);
        absmax_update(out, s.B * s.T, output_heads(s.groups, s.NQ) * s.DV, s.ldo);
        return;
    }
    attention_forward(kept, lse, q, k, v, attention_of_heads(s));
    diff_combine_forward(out, kept, l, s.B * s.T, output_heads(s.groups, s.NQ), s.DV, ldl, s.groups, factor);
}

static inline void diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                           const floatX *dout, const floatX *out, const floatX *kept, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v, const floatX *l, int ldl,
                                           AttentionShape s, Factor factor) {
    if (attention_by_groups(s)) {
        bool rotated;
        {
            OPERATION();
            assert(packed(0, dq, dk, dv, dout, out, kept, q, k, v));
            const AttentionBackwardMma a = {dq, dk, dv, dout, q, k, v, nullptr, nullptr, nullptr, s, 0, false};
            const BackwardInputs in = {dout, out, kept, l, dl, lse, s.NQ / 2 * s.DV, s.DV, ldl, factor};
            rotated = attention_mma_backward<2>(a, in, s);
        }
        if (s.rope && !rotated) rope_backward(dq, s.rope, s.B, s.T, s.rope_heads, s.D, s.ldq, s.q_head, NULL);
        return;
    }
    diff_combine_backward(dkept, dl, dout, kept, l, s.B * s.T, output_heads(s.groups, s.NQ), s.DV, ldl, s.groups,
                          factor);
    attention_backward(dq, dk, dv, dkept, kept, lse, q, k, v, attention_of_heads(s), false);
}
