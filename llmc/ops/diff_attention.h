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
    if (s.sparse.blocks) {
        sparse_pairs_forward(out.data, kept, lse, q, k, v, l, ldl, s, factor);
        absmax_update(out, s.B * s.T, output_heads(s.groups, s.NQ) * s.DV, s.ldo);
        return;
    }
    AttentionWorkspace a = attention_workspace(s, omp_get_max_threads(), false,
                                               ops_workspace_take(attention_workspace_bytes(s, omp_get_max_threads())));
    int units = s.NQ / a.maps, blocks = (s.T + ATTENTION_ROWS - 1) / ATTENTION_ROWS, ldn = units * s.DV;
    assert(s.groups.noise == 1 && units % s.NKV == 0 && s.first == 0);
    attention_copy_keys(&a, k, v, s, false);
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s.B * units * blocks; item++) {
        int t0 = (blocks - 1 - item / (s.B * units)) * ATTENTION_ROWS; // the longest blocks first
        int b = item % (s.B * units) / units, j = item % (s.B * units) % units;
        size_t row = (size_t)b * s.T + t0, key_head = b * s.NKV + j / (units / s.NKV);
        const real *kt = a.kt + key_head * a.padded * a.D, *vh = a.v + key_head * a.padded * a.DV;
        floatX *noise = kept + row * ldn + j * s.DV;
        for (int m = a.signals; m >= 0; m--) { // the noise head first
            size_t head = (size_t)j * a.maps + m;
            real *own = lse ? lse + (b * s.NQ + head) * s.T + t0 : NULL;
            const real *rows = attention_forward_block(own, q + row * s.ldq + head * s.q_head, kt, vh, b, t0, &a, s);
            for (int i = 0; i < min_int(ATTENTION_ROWS, s.T - t0); i++, rows += a.DV) {
                floatX *a2 = noise + (size_t)i * ldn,
                       *o = out.data + (row + i) * s.ldo + (j * a.signals + m) * s.o_head;
                if (m == a.signals) {
                    for (int c = 0; c < s.DV; c++) a2[c] = rows[c];
                    continue;
                }
                real f = diff_factor(l[(row + i) * ldl + j * a.signals + m], factor);
                for (int c = 0; c < s.DV; c++) o[c] = rows[c] - f * a2[c];
            }
        }
    }
    absmax_update(out, s.B * s.T, units * a.signals * s.DV, s.ldo);
}

static inline void diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                           const floatX *dout, const floatX *out, const floatX *kept, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v, const floatX *l, int ldl,
                                           AttentionShape s, Factor factor) {
    AttentionHead first;
    (void)dkept;
    memset(&first, 0, sizeof(first));
    first.dq = dq, first.q = q, first.out = out, first.dout = dout, first.lse = lse;
    first.noise = kept, first.l = l, first.dl = dl, first.factor = factor;
    first.ldn = s.NQ / attention_maps(s) * s.DV, first.ldl = ldl;
    attention_backward_heads(first, dk, dv, k, v, s, false);
}
