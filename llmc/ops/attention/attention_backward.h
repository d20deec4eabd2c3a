/*
attention_backward.h: the backward of attention. Derivation, method, numerics and source in attention.h.
*/
#pragma once
#include "operations.h"
#include "../runtime.h"
#include "../vecmath.h"
#include "attention.h"
#include "diff_combine.h"
#include "rope.h"

// The inputs and outputs of the backward of a query head, or of a group: the signal heads, then the noise head.
typedef struct {
    int b;
    floatX *dq;
    const floatX *q, *out, *dout;
    const real *lse;             // (maps, T)
    const real *k, *kt, *v, *vt; // copies for its KV head
    real *dk, *dv;               // (padded, D | DV)
    // only for a group of heads
    const floatX *noise, *l; // the noise head's output, with row stride ldn; lambda of its first signal head
    floatX *dl;
    int ldn, ldl;
    Factor factor;
} AttentionHead;

// The arrays of the first head. For a group the caller then sets noise, l and the fields that belong to them.
static inline AttentionHead attention_first_head(floatX *dq, const floatX *dout, const floatX *out, const real *lse,
                                                 const floatX *q) {
    AttentionHead first;
    memset(&first, 0, sizeof(first));
    first.dq = dq, first.q = q, first.out = out, first.dout = dout, first.lse = lse;
    return first;
}

// The arrays of head or group `unit` of sequence b; h has the arrays of the first one.
static inline AttentionHead attention_head(AttentionHead h, int b, int unit, AttentionShape s) {
    int maps = attention_maps(s), signals = max_int(1, s.groups.signals);
    size_t row = (size_t)b * s.T, q_at = row * s.ldq + unit * maps * s.q_head;
    size_t o_at = row * s.ldo + unit * signals * s.o_head;
    h.b = b;
    h.dq += q_at, h.q += q_at, h.out += o_at, h.dout += o_at, h.lse += ((size_t)b * s.NQ + unit * maps) * s.T;
    if (!h.noise) return h;
    h.noise += row * h.ldn + unit * s.DV, h.l += row * h.ldl + unit * signals, h.dl += row * h.ldl + unit * signals;
    return h;
}

// P and dS of a row: p holds scores and ds holds dP
static inline void attention_backward_row(real *p, real *ds, real l, real delta, int from, int to) {
#pragma omp simd
    for (int j = from; j < to; j++) {
        p[j] = real_exp(p[j] - l);
        ds[j] = p[j] * (ds[j] - delta); // backward of P = softmax(S)
    }
}
// Does the same for a row of a signal head; its P becomes the difference P - s P2. sum = s (dP - <do, a2>), or +=.
static inline void attention_backward_signal(real *p, real *ds, real *sum, const real *noise, real l, real delta,
                                             real factor, real dot, bool add, int from, int to) {
#pragma omp simd
    for (int j = from; j < to; j++) {
        real probability = real_exp(p[j] - l), scaled = factor * (ds[j] - dot);
        ds[j] = probability * (ds[j] - delta);
        p[j] = probability - factor * noise[j];
        sum[j] = add ? sum[j] + scaled : scaled;
    }
}

// P and dS of a block of rows and the keys from k0 on.
static inline void attention_backward_scores(const AttentionBlock *block, const AttentionHead *h, const int *low,
                                             int t0, int rows, int k0, const AttentionWorkspace *a, AttentionShape s) {
    const int signals = a->signals;
    const size_t map = ATTENTION_ROWS * SCORES_LD;
    for (int i0 = 0; i0 < rows; i0 += TILE_ROWS) {
        int n = attention_reach(s, t0 + i0 + TILE_ROWS - 1, k0), end = n ? n + TILE_ROWS : 0;
        int unused = attention_unused(low[i0], k0), j0 = k0 + unused;
        size_t at = i0 * SCORES_LD + unused;
        bool group = a->maps > 1;
        if (group)
            attention_scores(block->noise + unused, block->q + (signals * ATTENTION_ROWS + i0) * a->D, a->D,
                             h->kt + j0 * a->D, n - unused, s.D, a->D);
        for (int m = 0; m < signals; m++) {
            // S = scale Q K^T, recomputed
            attention_scores(block->p + m * map + at, block->q + (m * ATTENTION_ROWS + i0) * a->D, a->D,
                             h->kt + j0 * a->D, n - unused, s.D, a->D);
            // dP = dO V^T, the backward of O = P V
            attention_scores(block->ds + m * map + at, block->dout + (m * ATTENTION_ROWS + i0) * a->DV, a->DV,
                             h->vt + j0 * a->DV, n - unused, s.DV, a->DV);
        }
        for (int i = i0; i < min_int(i0 + TILE_ROWS, rows); i++) {
            int visible = attention_reach(s, t0 + i, k0), from = min_int(max_int(0, low[i] - k0), visible);
            int whole = (visible + TILE_LANES - 1) & -TILE_LANES; // whole vectors, for speed
            real *sum = block->ds + signals * map + i * SCORES_LD, *noise = block->noise + (i - i0) * SCORES_LD;
            if (group) {
                real l = h->lse[signals * s.T + t0 + i];
#pragma omp simd
                for (int j = unused; j < whole; j++) noise[j] = real_exp(noise[j] - l);
            }
            for (int m = 0; m < signals; m++) {
                real *p = block->p + m * map + i * SCORES_LD, *ds = block->ds + m * map + i * SCORES_LD;
                int row = m * ATTENTION_ROWS + i;
                real l = h->lse[m * s.T + t0 + i];
                if (group)
                    attention_backward_signal(p, ds, sum, noise, l, block->delta[row], block->factor[row],
                                              block->dot[row], m > 0, unused, whole);
                else attention_backward_row(p, ds, l, block->delta[row], unused, whole);
                for (int j = max_int(0, unused - TILE_ROWS); j < from; j++) p[j] = ds[j] = 0;
                for (int j = visible; j < end; j++) p[j] = ds[j] = 0; // the products below read whole tiles
            }
            if (!group) continue;
#pragma omp simd
            for (int j = unused; j < whole; j++) sum[j] *= -noise[j];
            for (int j = max_int(0, unused - TILE_ROWS); j < from; j++) sum[j] = 0;
            for (int j = visible; j < end; j++) sum[j] = 0;
        }
    }
}

// Computes the numbers of the rows from t0 on, and their first keys; for a group also the gradients of lambda.
static inline void attention_backward_rows(const AttentionBlock *block, int *low, const AttentionHead *h, int t0,
                                           int rows, const AttentionWorkspace *a, AttentionShape s) {
    for (int i = 0; i < rows; i++) {
        size_t t = (size_t)t0 + i;
        low[i] = attention_first_key(s, h->b, t0 + i);
        for (int m = 0; m < a->signals; m++) {
            const floatX *o = h->out + t * s.ldo + m * s.o_head, *g = h->dout + t * s.ldo + m * s.o_head;
            int row = m * ATTENTION_ROWS + i;
            block->delta[row] = tile_dot(g, o, s.DV);
            if (a->maps == 1) continue;
            real factor = diff_factor(h->l[t * h->ldl + m], h->factor), dot = tile_dot(g, h->noise + t * h->ldn, s.DV);
            block->delta[row] += factor * dot; // <g, a1> = <g, o> + s <g, a2>
            block->factor[row] = factor, block->dot[row] = dot;
            h->dl[t * h->ldl + m] = -dot * diff_factor_slope(factor, h->factor);
        }
    }
}

static inline void attention_backward_head(const AttentionHead *h, const AttentionWorkspace *a, AttentionShape s) {
    AttentionBlock block = attention_block(a, true);
    int low[ATTENTION_ROWS];
    const int signals = a->signals, maps = a->maps;
    const size_t R = ATTENTION_ROWS, map = R * SCORES_LD;
    for (int t0 = 0; t0 < s.T; t0 += ATTENTION_ROWS) {
        int rows = min_int(ATTENTION_ROWS, s.T - t0);
        size_t padded = round_up(rows, TILE_ROWS);
        attention_backward_rows(&block, low, h, t0, rows, a, s);
        for (int m = 0; m < maps; m++) {
            attention_copy_rows(block.q + m * R * a->D, h->q + (size_t)t0 * s.ldq + m * s.q_head, rows, padded, s.D,
                                a->D, s.ldq, s.scale);
            memset(block.acc + m * R * a->D, 0, padded * a->D * sizeof(real));
        }
        for (int m = 0; m < signals; m++)
            attention_copy_rows(block.dout + m * R * a->DV, h->dout + (size_t)t0 * s.ldo + m * s.o_head, rows, padded,
                                s.DV, a->DV, s.ldo, 1);
        int k0 = low[0] / ATTENTION_KEYS * ATTENTION_KEYS; // no row attends to an earlier key
        for (; attention_reach(s, t0 + rows - 1, k0) > 0; k0 += ATTENTION_KEYS) {
            attention_backward_scores(&block, h, low, t0, rows, k0, a, s);
            int keys = attention_reach(s, t0 + rows - 1, k0);
            int begin = max_int(0, low[0] - k0) / TILE_ROWS * TILE_ROWS; // no row attends to earlier keys
            for (int j0 = begin, r1 = rows; j0 < keys; j0 += TILE_ROWS, r1 = rows) {
                int r0 = max_int(0, k0 + j0 - t0); // the first row that attends to key j0
                bool add = k0 + j0 < t0;           // the first rows that attend to these keys set dk and dv
                size_t at = (k0 + j0);
                while (r1 > r0 && low[r1 - 1] >= k0 + j0 + TILE_ROWS) r1--; // the last rows attend to later keys alone
                for (int m = 0; m < signals; m++)
                    tile_multiply_transposed((int)a->DV, r1 - r0, block.p + m * map + r0 * SCORES_LD + j0, SCORES_LD,
                                             block.dout + (m * R + r0) * a->DV, a->DV, h->dv + at * a->DV, a->DV,
                                             add || m > 0); // dV = P^T dO
                for (int m = 0; m < maps; m++)
                    tile_multiply_transposed((int)a->D, r1 - r0, block.ds + m * map + r0 * SCORES_LD + j0, SCORES_LD,
                                             block.q + (m * R + r0) * a->D, a->D, h->dk + at * a->D, a->D,
                                             add || m > 0); // dK = scale dS^T Q; block.q includes the scale
            }
            for (int m = 0; m < maps; m++)
                for (int i0 = 0; i0 < rows; i0 += TILE_ROWS) {
                    int unused = attention_unused(low[i0], k0), n = attention_reach(s, t0 + i0 + TILE_ROWS - 1, k0);
                    tile_multiply((int)a->D, n - unused, block.ds + m * map + i0 * SCORES_LD + unused, SCORES_LD,
                                  h->k + (k0 + unused) * a->D, a->D, block.acc + (m * R + i0) * a->D, a->D,
                                  true); // dQ = scale dS K; the scale below
                }
        }
        for (int m = 0; m < maps; m++)
            for (int i = 0; i < rows; i++)
                for (int c = 0; c < s.D; c++)
                    h->dq[(size_t)(t0 + i) * s.ldq + m * s.q_head + c] = s.scale * block.acc[(m * R + i) * a->D + c];
    }
}

// dst[t,:] = sum over the `group` query heads of src[g][t,:] (rows padded to `stride`); with `add` dst[t,:] +=
static inline void attention_sum_group(floatX *dst, const real *src, int group, int T, int width, int ld, size_t padded,
                                       size_t stride, bool add) {
    for (int t = 0; t < T; t++) {
        floatX *to = dst + (size_t)t * ld;
        for (int g = 0; g < group; g++) {
            const real *from = src + (g * padded + t) * stride;
            if (g > 0 || add)
                for (int c = 0; c < width; c++) to[c] += from[c];
            else
                for (int c = 0; c < width; c++) to[c] = from[c];
        }
    }
}

// first: the arrays of the first head; attention_head derives the arrays of the others
static inline void attention_backward_heads(AttentionHead first, floatX *dk, floatX *dv, const floatX *k,
                                            const floatX *v, AttentionShape s, bool add_dv) {
    assert(s.NQ % s.NKV == 0 && s.query_offset == 0);
    AttentionWorkspace a = attention_workspace(s, omp_get_max_threads(), true,
                                               ops_workspace_take(attention_workspace_bytes(s, omp_get_max_threads())));
    size_t T = s.T, units = (size_t)s.NQ / a.maps, heads = s.B * units, group = units / s.NKV;
    assert(units % s.NKV == 0);
    attention_copy_keys(&a, k, v, s, true);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (size_t bh = 0; bh < heads; bh++) {
            size_t b = bh / units, j = bh % units, key_head = b * s.NKV + j / group;
            size_t k_at = key_head * a.padded * a.D, v_at = key_head * a.padded * a.DV;
            AttentionHead h = attention_head(first, (int)b, (int)j, s);
            h.k = a.k + k_at, h.kt = a.kt + k_at, h.v = a.v + v_at, h.vt = a.vt + v_at;
            h.dk = a.dk + bh * a.padded * a.D, h.dv = a.dv + bh * a.padded * a.DV;
            attention_backward_head(&h, &a, s);
        }
#pragma omp for schedule(static)
        for (size_t i = 0; i < (size_t)s.B * s.NKV; i++) {
            size_t b = i / (size_t)s.NKV, kv = i % (size_t)s.NKV, row = b * T * s.ldkv;
            size_t from = (b * units + kv * group) * a.padded;
            attention_sum_group(dk + row + kv * s.k_head, a.dk + from * a.D, (int)group, s.T, s.D, s.ldkv, a.padded,
                                a.D, false);
            attention_sum_group(dv + row + kv * s.v_head, a.dv + from * a.DV, (int)group, s.T, s.DV, s.ldkv, a.padded,
                                a.DV, add_dv);
        }
    }
    if (s.rope) rope_backward(first.dq, s.rope, s.B, s.T, s.rope_heads, s.D, s.ldq, s.q_head, NULL);
}

static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv) {
    attention_backward_heads(attention_first_head(dq, dout, out, lse, q), dk, dv, k, v, s, add_dv);
}
