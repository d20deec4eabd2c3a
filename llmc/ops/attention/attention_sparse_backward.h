/*
attention_sparse_backward.h: the backward of attention_sparse.h, and groups of signal heads and their noise head, which
have one list. Equations in attention.h and diff_attention.h; method and numerics in attention_sparse.h.
*/
#pragma once
#include "attention_backward.h"
#include "attention_sparse.h"
#include "diff_attention.h"

// Makes P and dS from the scores and dP in w, for a row of all heads of a unit and a tile of keys; 0 for hidden keys.
// i: the row in the chunk, t: the row in the sequence
static inline void sparse_backward_row(const AttentionHead *h, int i, int t, SparseKeys k, int maps, int signals,
                                       const SparseThread *w, AttentionShape s) {
    const size_t map = ATTENTION_ROWS * SCORES_LD;
    int low, high, end = (int)round_up((size_t)k.keys, TILE_ROWS);
    real *noise = w->noise + i * SCORES_LD, *sum = w->ds + signals * map + i * SCORES_LD;
    sparse_visible(&low, &high, s, h->b, t, k);
    if (maps > 1)
        for (int j = low; j < high; j++) noise[j] = real_exp(noise[j] - h->lse[signals * s.T + t]);
    for (int m = 0; m < signals; m++) {
        const floatX *o = h->out + (size_t)t * s.ldo + m * s.o_head, *g = h->dout + (size_t)t * s.ldo + m * s.o_head;
        real *p = w->p + m * map + i * SCORES_LD, *ds = w->ds + m * map + i * SCORES_LD, l = h->lse[m * s.T + t];
        real delta = tile_dot(g, o, s.DV);
        if (maps > 1) {
            real f = diff_factor(h->l[(size_t)t * h->ldl + m], h->factor);
            real dot = tile_dot(g, h->noise + (size_t)t * h->ldn, s.DV);
            h->dl[(size_t)t * h->ldl + m] = -dot * diff_factor_slope(f, h->factor);
            attention_backward_signal(p, ds, sum, noise, l, delta + f * dot, f, dot, m > 0, low, high);
        } else attention_backward_row(p, ds, l, delta, low, high);
        for (int j = 0; j < end; j++)
            if (j < low || j >= high) p[j] = ds[j] = 0;
    }
    for (int j = 0; j < end && maps > 1; j++) sum[j] = j < low || j >= high ? 0 : -noise[j] * sum[j];
}

// Adds a chunk of rows of a unit to dq and, unless it is the first, to dk and dv of the tile.
static inline void sparse_backward_chunk(const AttentionHead *h, const int *rows, int n, SparseKeys k, bool first,
                                         const SparseThread *w, AttentionShape s) {
    const int maps = attention_maps(s), signals = max_int(1, s.groups.signals);
    const size_t R = ATTENTION_ROWS, map = R * SCORES_LD;
    for (int m = 0; m < maps; m++) { // S = scale Q K^T, recomputed
        real *to = m < signals ? w->p + m * map : w->noise;
        sparse_copy_rows(w->q + m * R * w->D, h->q + m * s.q_head, rows, n, s.D, w->D, s.ldq, s.scale);
        sparse_scores(to, w->q + m * R * w->D, w->kt, n, k, s.D, w->D);
    }
    for (int m = 0; m < signals; m++) { // dP = dO V^T, the backward of O = P V
        sparse_copy_rows(w->dout + m * R * w->DV, h->dout + m * s.o_head, rows, n, s.DV, w->DV, s.ldo, 1);
        sparse_scores(w->ds + m * map, w->dout + m * R * w->DV, w->vt, n, k, s.DV, w->DV);
    }
    for (int i = 0; i < n; i++) sparse_backward_row(h, i, rows[i], k, maps, signals, w, s);
    for (int j = 0; j < k.keys; j += TILE_ROWS) {
        for (int m = 0; m < signals; m++) // dV = P^T dO
            tile_multiply_transposed((int)w->DV, n, w->p + m * map + j, SCORES_LD, w->dout + m * R * w->DV, w->DV,
                                     w->dv + j * w->DV, w->DV, !first || m > 0);
        for (int m = 0; m < maps; m++) // dK = scale dS^T Q; w->q includes the scale
            tile_multiply_transposed((int)w->D, n, w->ds + m * map + j, SCORES_LD, w->q + m * R * w->D, w->D,
                                     w->dk + j * w->D, w->D, !first || m > 0);
    }
    for (int m = 0; m < maps; m++) { // dQ = scale dS K
        for (int i = 0; i < n; i += TILE_ROWS)
            tile_multiply((int)w->D, k.keys, w->ds + m * map + i * SCORES_LD, SCORES_LD, w->k, w->D, w->part + i * w->D,
                          w->D, false);
        for (int i = 0; i < n; i++) {
            floatX *dq = h->dq + (size_t)rows[i] * s.ldq + m * s.q_head;
            for (int c = 0; c < s.D; c++) dq[c] += s.scale * w->part[i * w->D + c];
        }
    }
}

// Computes dk and dv of key/value head kv of sequence b, and dq of its query heads
static inline void sparse_backward_group(const AttentionHead *first, floatX *dk, floatX *dv, const floatX *k,
                                         const floatX *v, int b, int kv, const SparseThread *w, AttentionShape s,
                                         bool add_dv) {
    int maps = attention_maps(s), units = s.NQ / s.NKV / maps;
    size_t sequence = (size_t)b * s.T * s.ldkv, k_at = sequence + kv * s.k_head, v_at = sequence + kv * s.v_head;
    const int *starts = w->block_starts;
    sparse_gather(w->block_starts, w->rows, sparse_row(s, b, kv * units * maps, 0), s);
    for (int t = 0; t < s.T; t++)
        for (int m = 0; m < units * maps; m++)
            memset(first->dq + ((size_t)b * s.T + t) * s.ldq + (kv * units * maps + m) * s.q_head, 0,
                   s.D * sizeof(floatX));
    for (int j = 0; j * s.sparse.size < s.T; j++) {
        SparseKeys part = sparse_keys(s, j, 0);
        for (int i = 0; part.keys > 0; part = sparse_keys(s, j, ++i)) {
            size_t at = (size_t)part.k0 * s.ldkv;
            bool begins = true;
            attention_copy_panels(w->kt, k + k_at + at, part.keys, part.padded, s.D, w->D, s.ldkv);
            attention_copy_panels(w->vt, v + v_at + at, part.keys, part.padded, s.DV, w->DV, s.ldkv);
            attention_copy_rows(w->k, k + k_at + at, part.keys, part.keys, s.D, w->D, s.ldkv, 1);
            for (int u = kv * units; u < (kv + 1) * units; u++) {
                AttentionHead h = attention_head(*first, b, u, s);
                for (int r = starts[j]; r < starts[j + 1]; r += ATTENTION_ROWS, begins = false)
                    sparse_backward_chunk(&h, w->rows + r, min_int(ATTENTION_ROWS, starts[j + 1] - r), part, begins, w,
                                          s);
            }
            attention_sum_group(dk + k_at + at, w->dk, 1, part.keys, s.D, s.ldkv, 0, w->D, false);
            attention_sum_group(dv + v_at + at, w->dv, 1, part.keys, s.DV, s.ldkv, 0, w->DV, add_dv);
        }
    }
}

static inline void sparse_backward_heads(AttentionHead first, floatX *dk, floatX *dv, const floatX *k, const floatX *v,
                                         AttentionShape s, bool add_dv) {
    assert(s.NQ % s.NKV == 0 && s.query_offset == 0);
    char *memory = sparse_workspace_take(s);
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s.B * s.NKV; item++) {
        SparseThread w = sparse_this_thread(s, true, memory);
        sparse_backward_group(&first, dk, dv, k, v, item / s.NKV, item % s.NKV, &w, s, add_dv);
    }
    if (s.rope) rope_backward(first.dq, s.rope, s.B, s.T, s.rope_heads, s.D, s.ldq, s.q_head, NULL);
}

static inline void sparse_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                             const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                             AttentionShape s, bool add_dv) {
    sparse_backward_heads(attention_first_head(dq, dout, out, lse, q), dk, dv, k, v, s, add_dv);
}

static inline void sparse_diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                                  const floatX *dout, const floatX *out, const floatX *kept,
                                                  const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                                  const floatX *l, int ldl, AttentionShape s, Factor factor) {
    (void)dkept;
    AttentionHead first = attention_first_head(dq, dout, out, lse, q);
    attention_set_group(&first, dl, kept, l, ldl, s, factor);
    sparse_backward_heads(first, dk, dv, k, v, s, false);
}
