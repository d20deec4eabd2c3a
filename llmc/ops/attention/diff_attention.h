/*
diff_attention.h: attention whose noise heads are subtracted (diff_combine.h), in variants where the heads of a group
share keys and values. Equations of one head, method, shapes and numerics in attention.h.

  groups    r signal heads i, then their noise head, 2
  forward   o_i = a_i - s_i a2,  s_i = f(l_i), where a = P V of each head
  backward  g_i = do_i. Since da_i = g_i and da2 = -sum_i s_i g_i, and all heads share V:
              dP_i = g_i V^T,  dP2 = -sum_i s_i dP_i
              dV   = sum_i (P_i - s_i P2)^T g_i
              dS_i = P_i (dP_i - <g_i,a_i>),  <g_i,a_i> = <g_i,o_i> + s_i <g_i,a2>
              dS2  = -P2 sum_i s_i (dP_i - <g_i,a2>)
              dl_i = -f'(l_i) <g_i,a2>
            and dQ, dK of each head from its dS
  traffic   kept are o and a2: no output of a signal head, no gradient of heads, and no pass that combines them
  flops     forward as attention of r + 1 heads; backward 5r + 3 products instead of 5r + 5: r + 1 for S, r for dP,
            r for dV, r + 1 each for dQ and dK
*/
#pragma once
#include "attention_backward.h"
#include "diff_combine.h"

static inline int diff_attention_kept(AttentionShape s) { return s.NQ / attention_maps(s); } // the noise heads

static inline void diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                          const floatX *v, const floatX *l, int ldl, AttentionShape s, Factor factor) {
    attention_forward_groups(out.data, kept, lse, q, k, v, l, ldl, s, factor);
    absmax_update(out, s.B * s.T, output_heads(s.groups, s.NQ) * s.DV, s.ldo);
}

// Sets the first group's arrays of its noise head and of lambda; the names are as in diff_attention_backward.
static inline void attention_set_group(AttentionHead *first, floatX *dl, const floatX *kept, const floatX *l, int ldl,
                                       AttentionShape s, Factor factor) {
    first->noise = kept, first->l = l, first->dl = dl, first->factor = factor;
    first->ldn = diff_attention_kept(s) * s.DV, first->ldl = ldl;
}

static inline void diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                           const floatX *dout, const floatX *out, const floatX *kept, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v, const floatX *l, int ldl,
                                           AttentionShape s, Factor factor) {
    (void)dkept;
    AttentionHead first = attention_first_head(dq, dout, out, lse, q);
    attention_set_group(&first, dl, kept, l, ldl, s, factor);
    attention_backward_heads(first, dk, dv, k, v, s, false);
}
