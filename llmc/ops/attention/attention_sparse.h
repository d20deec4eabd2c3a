/*
attention_sparse.h: attention of each query row to the blocks of its list (sparse.h). Equations in attention.h and
diff_attention.h; S, P and all sums run over the keys of the list that the row may see.

  method    The queries of a head are gathered by block: up to ATTENTION_ROWS rows whose lists have the block form dense
            tiles with its keys (tile.h). Blocks are visited in ascending order. The forward keeps a running maximum and
            sum per row, and the output holds the running sum of P V. In the backward all rows of a block are seen at
            once, so dK and dV of a block are written once; a row of dQ receives the sums of its blocks in order.
  numerics  all in `real`. One thread computes a head (forward) or a key/value head (backward), so results do not depend
            on the number of threads
  memory    per thread: for each row and list blocks + 2 integers and two numbers; a few tiles
  flops     2 (D + DV) per query and visible key of its list; backward as attention
  source    keys are gathered as in MoBA (sparse.h)
*/
#pragma once
#include "attention.h"
#include "sparse.h"

// The arrays of a thread.
typedef struct {
    size_t D, DV;                           // widths, rounded up to whole vectors
    real *kt, *vt, *k, *v, *dk, *dv;        // (ATTENTION_KEYS, D | DV): keys of a block, as in AttentionWorkspace
    real *q, *dout, *p, *ds, *noise, *part; // rows of a chunk, as in AttentionBlock; part (ROWS, D | DV)
    real *max, *sum;                        // (T)
    int *block_starts, *rows;               // rows of the lists by block: (count + 3), (T (blocks + 2))
    size_t total;                           // bytes
} SparseThread;

static inline void *sparse_piece(SparseThread *w, char *memory, size_t bytes) {
    void *piece = memory ? memory + w->total : NULL;
    w->total += round_up(bytes, 64);
    return piece;
}

static inline SparseThread sparse_thread(AttentionShape s, bool backward, char *memory) {
    SparseThread w;
    size_t maps = backward ? attention_maps(s) : 1, signals = backward ? max_int(1, s.groups.signals) : 1;
    size_t rows = ATTENTION_ROWS, keys = ATTENTION_KEYS;
    w.D = round_up(s.D, TILE_LANES), w.DV = round_up(s.DV, TILE_LANES);
    const struct {
        real **at;
        size_t count;
    } arrays[] = {{&w.kt, keys * w.D},
                  {&w.v, keys * w.DV},
                  {&w.q, maps * rows * w.D},
                  {&w.p, signals * rows * SCORES_LD},
                  {&w.part, rows * max_size(w.D, w.DV)},
                  {&w.max, (size_t)s.T},
                  {&w.sum, (size_t)s.T},
                  {&w.vt, backward * keys * w.DV},
                  {&w.k, backward * keys * w.D},
                  {&w.dk, backward * keys * w.D},
                  {&w.dv, backward * keys * w.DV},
                  {&w.dout, backward * signals * rows * w.DV},
                  {&w.ds, backward * maps * rows * SCORES_LD},
                  {&w.noise, backward * rows * SCORES_LD}};
    w.total = 0;
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++)
        *arrays[i].at = (real *)sparse_piece(&w, memory, arrays[i].count * sizeof(real));
    w.block_starts = (int *)sparse_piece(&w, memory, (s.sparse.count + 3) * sizeof(int));
    w.rows = (int *)sparse_piece(&w, memory, (size_t)s.T * sparse_width(s.sparse) * sizeof(int));
    return w;
}
// Workspace for one new position per sequence: scores and rows of the keys of a list.
static inline size_t sparse_decode_bytes(AttentionShape s) {
    return round_up((size_t)sparse_width(s.sparse) * s.sparse.size * (sizeof(real) + sizeof(int)), 64);
}
static inline size_t sparse_attention_workspace_bytes(AttentionShape s, int threads) {
    return threads * max_size(sparse_thread(s, s.query_offset == 0, NULL).total, sparse_decode_bytes(s));
}
static inline char *sparse_workspace_take(AttentionShape s) {
    return (char *)ops_workspace_take(sparse_attention_workspace_bytes(s, omp_get_max_threads()));
}
static inline SparseThread sparse_this_thread(AttentionShape s, bool backward, char *memory) {
    return sparse_thread(s, backward, memory + omp_get_thread_num() * sparse_thread(s, backward, NULL).total);
}

// The rows whose list has block j: rows[starts[j]] .. rows[starts[j+1]-1], in ascending order.
static inline void sparse_gather(int *starts, int *rows, const int *list, AttentionShape s) {
    int width = sparse_width(s.sparse), count = s.sparse.count + 1, entries = s.T * width;
    memset(starts, 0, (count + 2) * sizeof(int));
    for (int i = 0; i < entries; i++)
        if (list[i] >= 0) starts[list[i] + 2]++;
    for (int j = 0; j < count; j++) starts[j + 2] += starts[j + 1];
    for (int i = 0; i < entries; i++)
        if (list[i] >= 0) rows[starts[list[i] + 1]++] = i / width;
}

// The keys of a tile: rows k0 .. k0 + keys - 1 of k, a part of a block.
typedef struct {
    int k0, keys, padded; // padded: to whole panels
} SparseKeys;
static inline SparseKeys sparse_keys(AttentionShape s, int block, int part) {
    int from = max_int(0, block * s.sparse.size - s.sparse.base);
    int end = min_int((block + 1) * s.sparse.size - s.sparse.base, s.query_offset + s.T);
    SparseKeys k = {from + part * ATTENTION_KEYS, 0, 0};
    k.keys = max_int(0, min_int(ATTENTION_KEYS, end - k.k0));
    k.padded = (int)round_up((size_t)k.keys, TILE_COLUMNS);
    return k;
}
// The keys of the tile that row t sees: [low, high), from its first one on.
static inline void sparse_visible(int *low, int *high, AttentionShape s, int b, int t, SparseKeys k) {
    *high = max_int(0, min_int(k.keys, s.query_offset + t + 1 - k.k0));
    *low = min_int(max_int(0, attention_first_key(s, b, t) - k.k0), *high);
}

// x (rows of a chunk) = factor * the gathered rows of one head, zeros up to whole tiles
static inline void sparse_copy_rows(real *to, const floatX *x, const int *rows, int n, int width, size_t padded,
                                    size_t ld, real factor) {
    for (int i = 0; i < n; i++) attention_copy_rows(to + i * padded, x + rows[i] * ld, 1, 1, width, padded, ld, factor);
    memset(to + n * padded, 0, (round_up((size_t)n, TILE_ROWS) - n) * padded * sizeof(real));
}
static inline void sparse_scores(real *scores, const real *rows, const real *panels, int n, SparseKeys k, int width,
                                 size_t padded) {
    for (int i = 0; i < n; i += TILE_ROWS)
        attention_scores(scores + i * SCORES_LD, rows + i * padded, padded, panels, k.padded, width, padded);
}

// The tile of a chunk of rows of one head; max and sum are updated, and out holds the sums of exp(S - max) V.
static inline void sparse_forward_chunk(floatX *out, const floatX *q, const int *rows, int n, SparseKeys k, int b,
                                        const SparseThread *w, AttentionShape s, int ldo) {
    int low, high;
    real factors[ATTENTION_ROWS];
    sparse_copy_rows(w->q, q, rows, n, s.D, w->D, s.ldq, s.scale);
    sparse_scores(w->p, w->q, w->kt, n, k, s.D, w->D);
    for (int i = 0; i < n; i++) {
        sparse_visible(&low, &high, s, b, rows[i], k);
        factors[i] = attention_softmax(w->p + i * SCORES_LD, &w->max[rows[i]], &w->sum[rows[i]], low, high, k.padded);
    }
    for (int i = 0; i < n; i += TILE_ROWS)
        tile_multiply((int)w->DV, k.keys, w->p + i * SCORES_LD, SCORES_LD, w->v, w->DV, w->part + i * w->DV, w->DV,
                      false);
    for (int i = 0; i < n; i++) {
        floatX *o = out + (size_t)rows[i] * ldo;
        for (int c = 0; c < s.DV; c++) o[c] = factors[i] * o[c] + w->part[i * w->DV + c];
    }
}

// out (T, DV) with row stride ldo and lse (T) of query head h of sequence b
static inline void sparse_forward_head(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v, int b,
                                       int h, const SparseThread *w, AttentionShape s, int ldo) {
    size_t kv = h / (s.NQ / s.NKV), sequence = (size_t)b * (s.query_offset + s.T) * s.ldkv;
    const int *starts = w->block_starts, *all = w->rows;
    q += (size_t)b * s.T * s.ldq + h * s.q_head;
    k += sequence + kv * s.k_head, v += sequence + kv * s.v_head;
    sparse_gather(w->block_starts, w->rows, sparse_row(s, b, h, 0), s);
    for (int t = 0; t < s.T; t++) {
        w->max[t] = (real)-8e37, w->sum[t] = 0; // as in attention_forward_block
        for (int c = 0; c < s.DV; c++) out[(size_t)t * ldo + c] = 0;
    }
    for (int j = 0; j <= s.sparse.count; j++) {
        if (starts[j] == starts[j + 1]) continue;
        SparseKeys part = sparse_keys(s, j, 0);
        for (int i = 0; part.keys > 0; part = sparse_keys(s, j, ++i)) {
            size_t at = (size_t)part.k0 * s.ldkv;
            attention_copy_panels(w->kt, k + at, part.keys, part.padded, s.D, w->D, s.ldkv);
            attention_copy_rows(w->v, v + at, part.keys, part.keys, s.DV, w->DV, s.ldkv, 1);
            for (int r = starts[j]; r < starts[j + 1]; r += ATTENTION_ROWS)
                sparse_forward_chunk(out, q, all + r, min_int(ATTENTION_ROWS, starts[j + 1] - r), part, b, w, s, ldo);
        }
    }
    for (int t = 0; t < s.T; t++) {
        real inverse = 1 / w->sum[t];
        for (int c = 0; c < s.DV; c++) out[(size_t)t * ldo + c] *= inverse;
        if (lse) lse[t] = w->max[t] + (real)log((double)w->sum[t]);
    }
}

// One new position per sequence: the rows of the cache of the blocks of its list.
static inline void sparse_decode(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                 const int *first, int capacity, AttentionShape s) {
    size_t keys = (size_t)sparse_width(s.sparse) * s.sparse.size, each = sparse_decode_bytes(s);
    char *memory = sparse_workspace_take(s);
    assert(s.NQ % s.NKV == 0 && s.T == 1);
#pragma omp parallel for schedule(static)
    for (int bh = 0; bh < s.B * s.NQ; bh++) {
        int b = bh / s.NQ, h = bh % s.NQ, kv = h / (s.NQ / s.NKV), n = 0;
        const int *list = sparse_row(s, b, h, 0);
        const floatX *qh = q + (size_t)b * s.ldq + h * s.q_head;
        const floatX *kh = k + (size_t)b * capacity * s.ldkv + kv * s.k_head;
        const floatX *vh = v + (size_t)b * capacity * s.ldkv + kv * s.v_head;
        floatX *o = out + (size_t)b * s.ldo + h * s.o_head;
        real *scores = (real *)(memory + omp_get_thread_num() * each), max = -(real)INFINITY, sum = 0;
        int *rows = (int *)(scores + keys);
        for (int i = 0; i < sparse_width(s.sparse) && list[i] >= 0; i++) {
            int p = max_int(list[i] * s.sparse.size, first[b] - capacity + 1);
            for (; p < min_int((list[i] + 1) * s.sparse.size, first[b] + 1); p++, n++) {
                rows[n] = p % capacity;
                scores[n] = s.scale * tile_dot(qh, kh + (size_t)rows[n] * s.ldkv, s.D);
                max = scores[n] > max ? scores[n] : max;
            }
        }
        for (int c = 0; c < s.DV; c++) o[c] = 0;
        for (int j = 0; j < n; j++) {
            real p = real_exp(scores[j] - max);
            const floatX *row = vh + (size_t)rows[j] * s.ldkv;
            sum += p;
            for (int c = 0; c < s.DV; c++) o[c] += p * row[c];
        }
        for (int c = 0; c < s.DV; c++) o[c] /= sum;
        if (lse) lse[bh] = max + (real)log((double)sum);
    }
}

// attention_forward_groups for block-sparse attention.
static inline void sparse_forward_groups(floatX *out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                         const floatX *v, const floatX *l, int ldl, AttentionShape s, Factor factor) {
    int maps = attention_maps(s), signals = max_int(1, s.groups.signals), units = s.NQ / maps, ldn = units * s.DV;
    char *memory = sparse_workspace_take(s);
    assert(s.NQ % s.NKV == 0 && (s.query_offset == 0 || s.B == 1));
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s.B * units; item++) {
        int b = item / units, unit = item % units;
        SparseThread w = sparse_this_thread(s, s.query_offset == 0, memory);
        size_t row = (size_t)b * s.T;
        floatX *noise = kept ? kept + row * ldn + unit * s.DV : NULL;
        for (int m = maps - 1; m >= 0; m--) {
            int h = unit * maps + m;
            real *head_lse = lse ? lse + ((size_t)b * s.NQ + h) * s.T : NULL;
            floatX *o = out + row * s.ldo + (unit * signals + m) * s.o_head;
            sparse_forward_head(m < signals ? o : noise, head_lse, q, k, v, b, h, &w, s, m < signals ? s.ldo : ldn);
            for (int t = 0; t < s.T && m < signals && noise; t++) {
                real f = diff_factor(l[(row + t) * ldl + unit * signals + m], factor);
                for (int c = 0; c < s.DV; c++) o[(size_t)t * s.ldo + c] -= f * noise[(size_t)t * ldn + c];
            }
        }
    }
}

static inline void sparse_attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                            const int *first, int capacity, AttentionShape s) {
    if (first) sparse_decode(out, lse, q, k, v, first, capacity, s);
    else sparse_forward_groups(out, NULL, lse, q, k, v, NULL, 0, s, S_LINEAR);
}

static inline int sparse_diff_attention_kept(AttentionShape s) { return s.NQ / attention_maps(s); } // the noise heads

static inline void sparse_diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q,
                                                 const floatX *k, const floatX *v, const floatX *l, int ldl,
                                                 AttentionShape s, Factor factor) {
    sparse_forward_groups(out.data, kept, lse, q, k, v, l, ldl, s, factor);
    absmax_update(out, s.B * s.T, output_heads(s.groups, s.NQ) * s.DV, s.ldo);
}
