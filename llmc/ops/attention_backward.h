/*
attention_backward.h: the backward of attention. Derivation, method, numerics and source in attention.h.
*/
#ifndef LLMC_ATTENTION_BACKWARD_H
#define LLMC_ATTENTION_BACKWARD_H
#include "ops.h"
#include "runtime.h"
#include "vecmath.h"
#include "attention.h"

// The inputs and outputs of the backward of one query head.
typedef struct {
    int b;
    floatX *dq;
    const floatX *q, *out, *dout;
    const real *lse;             // (T)
    const real *k, *kt, *v, *vt; // copies for its KV head
    real *dk, *dv;               // (padded, D | DV)
} AttentionHead;

// P and dS of a block of rows and the keys from k0 on; `low` and `delta` are the rows' first keys and rowsum(dO O).
static inline void attention_backward_scores(const AttentionBlock *block, const AttentionHead *h, const int *low,
                                             const real *delta, int t0, int rows, int k0, const AttentionWorkspace *a,
                                             AttentionShape s) {
    for (int i0 = 0; i0 < rows; i0 += TILE_ROWS) {
        int n = attention_reach(s, t0 + i0 + TILE_ROWS - 1, k0), end = n ? n + TILE_ROWS : 0;
        int unused = attention_unused(low[i0], k0), j0 = k0 + unused;
        real *p0 = block->p + i0 * SCORES_LD + unused, *ds0 = block->ds + i0 * SCORES_LD + unused;
        // S = scale Q K^T, recomputed
        attention_scores(p0, block->q + i0 * a->D, a->D, h->kt + j0 * a->D, n - unused, s.D, a->D);
        // dP = dO V^T, the backward of O = P V
        attention_scores(ds0, block->dout + i0 * a->DV, a->DV, h->vt + j0 * a->DV, n - unused, s.DV, a->DV);
        for (int i = i0; i < min_int(i0 + TILE_ROWS, rows); i++) {
            int visible = attention_reach(s, t0 + i, k0), from = min_int(max_int(0, low[i] - k0), visible);
            real *p = block->p + i * SCORES_LD, *ds = block->ds + i * SCORES_LD, l = h->lse[t0 + i], d = delta[i];
            int whole = (visible + TILE_LANES - 1) & -TILE_LANES; // whole vectors, for speed
#pragma omp simd
            for (int j = unused; j < whole; j++) {
                p[j] = real_exp(p[j] - l);
                ds[j] = p[j] * (ds[j] - d); // backward of P = softmax(S)
            }
            for (int j = max_int(0, unused - TILE_ROWS); j < from; j++) p[j] = ds[j] = 0;
            for (int j = visible; j < end; j++) p[j] = ds[j] = 0; // the products below read whole tiles
        }
    }
}

static inline void attention_backward_head(const AttentionHead *h, const AttentionWorkspace *a, AttentionShape s) {
    AttentionBlock block = attention_block(a);
    for (int t0 = 0; t0 < s.T; t0 += ATTENTION_ROWS) {
        int rows = min_int(ATTENTION_ROWS, s.T - t0), low[ATTENTION_ROWS];
        size_t padded = round_up(rows, TILE_ROWS);
        const floatX *out = h->out + (size_t)t0 * s.ldo, *dout = h->dout + (size_t)t0 * s.ldo;
        real delta[ATTENTION_ROWS];
        for (int i = 0; i < rows; i++) {
            const floatX *o = out + (size_t)i * s.ldo, *g = dout + (size_t)i * s.ldo;
            real dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int c = 0; c < s.DV; c++) dot += o[c] * g[c];
            delta[i] = dot;
            low[i] = attention_first_key(s, h->b, t0 + i);
        }
        attention_copy_rows(block.q, h->q + (size_t)t0 * s.ldq, rows, padded, s.D, a->D, s.ldq, s.scale);
        attention_copy_rows(block.dout, dout, rows, padded, s.DV, a->DV, s.ldo, 1);
        memset(block.acc, 0, padded * a->D * sizeof(real));
        int k0 = low[0] / ATTENTION_KEYS * ATTENTION_KEYS; // no row attends to an earlier key
        for (; attention_reach(s, t0 + rows - 1, k0) > 0; k0 += ATTENTION_KEYS) {
            attention_backward_scores(&block, h, low, delta, t0, rows, k0, a, s);
            int keys = attention_reach(s, t0 + rows - 1, k0);
            int begin = max_int(0, low[0] - k0) / TILE_ROWS * TILE_ROWS; // no row attends to earlier keys
            for (int j0 = begin, r1 = rows; j0 < keys; j0 += TILE_ROWS, r1 = rows) {
                int r0 = max_int(0, k0 + j0 - t0); // the first row that attends to key j0
                bool add = k0 + j0 < t0;           // the first rows that attend to these keys set dk and dv
                size_t at = (k0 + j0);
                while (r1 > r0 && low[r1 - 1] >= k0 + j0 + TILE_ROWS) r1--; // the last rows attend to later keys alone
                const real *p = block.p + r0 * SCORES_LD + j0, *ds = block.ds + r0 * SCORES_LD + j0;
                tile_multiply_transposed((int)a->DV, r1 - r0, p, SCORES_LD, block.dout + r0 * a->DV, a->DV,
                                         h->dv + at * a->DV, a->DV, add); // dV = P^T dO
                tile_multiply_transposed((int)a->D, r1 - r0, ds, SCORES_LD, block.q + r0 * a->D, a->D,
                                         h->dk + at * a->D, a->D, add); // dK = scale dS^T Q; block.q includes the scale
            }
            for (int i0 = 0; i0 < rows; i0 += TILE_ROWS) {
                int unused = attention_unused(low[i0], k0), n = attention_reach(s, t0 + i0 + TILE_ROWS - 1, k0);
                tile_multiply((int)a->D, n - unused, block.ds + i0 * SCORES_LD + unused, SCORES_LD,
                              h->k + (k0 + unused) * a->D, a->D, block.acc + i0 * a->D, a->D,
                              true); // dQ = scale dS K; the scale below
            }
        }
        for (int i = 0; i < rows; i++)
            for (int c = 0; c < s.D; c++) h->dq[(size_t)(t0 + i) * s.ldq + c] = s.scale * block.acc[i * a->D + c];
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

static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv) {
    assert(s.NQ % s.NKV == 0 && s.first == 0);
    int group = s.NQ / s.NKV;
    size_t T = s.T, heads = (size_t)s.B * s.NQ;
    AttentionWorkspace a = attention_workspace(s, omp_get_max_threads(), true,
                                               ops_workspace_take(attention_workspace_bytes(s, omp_get_max_threads())));
    attention_copy_keys(&a, k, v, s, true);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (size_t bh = 0; bh < heads; bh++) {
            size_t b = bh / s.NQ, j = bh % s.NQ, key_head = b * s.NKV + j / group;
            size_t q_at = b * T * s.ldq + j * s.q_head, o_at = b * T * s.ldo + j * s.o_head;
            size_t k_at = key_head * a.padded * a.D, v_at = key_head * a.padded * a.DV;
            AttentionHead h = {(int)b,
                               dq + q_at,
                               q + q_at,
                               out + o_at,
                               dout + o_at,
                               lse + bh * T,
                               a.k + k_at,
                               a.kt + k_at,
                               a.v + v_at,
                               a.vt + v_at,
                               a.dk + bh * a.padded * a.D,
                               a.dv + bh * a.padded * a.DV};
            attention_backward_head(&h, &a, s);
        }
#pragma omp for schedule(static)
        for (size_t i = 0; i < (size_t)s.B * s.NKV; i++) {
            size_t b = i / (size_t)s.NKV, kv = i % (size_t)s.NKV, row = b * T * s.ldkv;
            size_t first = (b * s.NQ + kv * group) * a.padded;
            attention_sum_group(dk + row + kv * s.k_head, a.dk + first * a.D, group, s.T, s.D, s.ldkv, a.padded, a.D,
                                false);
            attention_sum_group(dv + row + kv * s.v_head, a.dv + first * a.DV, group, s.T, s.DV, s.ldkv, a.padded, a.DV,
                                add_dv);
        }
    }
}
#endif
