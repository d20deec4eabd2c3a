/*
attention.h: causal grouped-query attention, block by block, without a matrix of scores in memory.

  forward   S = scale Q K^T (for the keys that the row attends to),  P = softmax(S),  O = P V
            L[t] = log sum_j exp(S[t,j]) is kept instead of P
  backward  P = exp(S - L) is recomputed. The gradient of each forward equation:
              O = P V                     =>  dP = dO V^T,   dV = P^T dO
              P = softmax(S)              =>  dS = P (dP - rowsum(P dP));  rowsum(P dP) = rowsum(dO O)
              S = scale Q K^T             =>  dQ = scale dS K,  dK = scale dS^T Q
  shapes    q (B,T,NQ,D), k (B,keys,NKV,D), v (B,keys,NKV,DV), out (B,T,NQ,DV) with the strides of
            AttentionShape; keys = first + T; L (B,NQ,T). Query head j uses KV head j / (NQ/NKV).
  method    Keys and values are first copied, once for all query heads that use them: transposed in panels of
            TILE_COLUMNS for the products with K^T and V^T, and as rows padded with zeros. A block of ATTENTION_ROWS
            queries of one head is then combined with the keys in blocks of ATTENTION_KEYS, with a running maximum and
            sum per row (forward), or accumulating dQ, dK and dV (backward). All products are tiles of tile.h. Each
            stops at the last key that its six rows attend to, so little is computed above the diagonal, and starts at
            the panel of the first, so little is computed outside of a window or document.
  numerics  all in `real`. One thread computes a block, so results do not depend on the number of threads. The heads of
            a group write separate dK and dV, which are then added in order
  memory    linear in T: the copies, blocks of scores per thread, and dK, dV per query head in the backward
  flops     forward 2 (D + DV) per query and visible key, backward 2 (3 D + 2 DV)
  source    Dao 2023, "FlashAttention-2", for the running softmax and the backward from O, dO and L;
            Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication", for the packing
*/
#pragma once
#include "diff_combine.h"
#include "operations.h"
#include "../runtime.h"
#include "../vecmath.h"
#include "../tile.h"

enum { ATTENTION_ROWS = 96, ATTENTION_KEYS = 192 }; // multiples of a tile; a block's scores fit in the L2 cache
// room for up to a tile of zeros after the last visible key, in whole vectors
enum { SCORES_LD = (ATTENTION_KEYS + TILE_ROWS + TILE_LANES - 1) / TILE_LANES * TILE_LANES };

// Sizes derived from a shape, and the arrays in the workspace.
typedef struct {
    size_t keys;       // visible to the last query
    size_t padded;     // keys, rounded up to whole tiles of rows and of columns
    size_t D, DV;      // widths, rounded up to whole vectors
    real *kt, *vt;     // (B, NKV, padded / TILE_COLUMNS, D | DV, TILE_COLUMNS): panels of columns of K^T and V^T
    real *k, *v;       // (B, NKV, padded, D | DV)
    real *dk, *dv;     // (B, NQ / maps, padded, D | DV): per query head, or group of heads whose maps are subtracted
    real *blocks;      // (threads, block_count)
    int maps, signals; // query heads of a group; without the noise head
    size_t block_count, total;
} AttentionWorkspace;

// The arrays of a thread for a block of queries of the heads of a group.
typedef struct {
    real *q, *acc; // (maps, ROWS, D | D or DV): acc is O, then dQ
    real *dout;    // (signals, ROWS, DV)
    real *p;       // (signals, ROWS, SCORES_LD): scores, then probabilities, then the difference from the noise head
    real *ds;      // (maps, ROWS, SCORES_LD): dP, then dS
    real *noise;   // (TILE_ROWS, SCORES_LD): probabilities of the noise head
    // numbers of rows, (signals, ROWS): <do, a> of the head's own output, the factor of the noise head, <do, a2>
    real *delta, *factor, *dot;
} AttentionBlock;

// The next `count` elements; NULL if memory is NULL and only the size is computed.
static inline real *attention_piece(AttentionWorkspace *a, real *memory, size_t count) {
    real *piece = memory ? memory + a->total : NULL;
    a->total += round_up(count, TILE_LANES);
    return piece;
}

static inline AttentionWorkspace attention_workspace(AttentionShape s, int threads, bool backward, real *memory) {
    AttentionWorkspace a;
    a.maps = attention_maps(s);
    a.signals = max_int(1, s.groups.signals);
    size_t heads = (size_t)s.B * s.NKV, queries = (size_t)s.B * s.NQ / a.maps;
    size_t maps = backward ? a.maps : 1, signals = backward ? a.signals : 1;
    a.keys = (size_t)s.query_offset + s.T;
    a.padded = round_up(round_up(a.keys, TILE_ROWS), TILE_COLUMNS);
    a.D = round_up(s.D, TILE_LANES);
    a.DV = round_up(s.DV, TILE_LANES);
    // as attention_block divides it
    a.block_count =
        ATTENTION_ROWS * (maps * (a.D + max_size(a.D, a.DV) + SCORES_LD) + signals * (a.DV + SCORES_LD + 3)) +
        TILE_ROWS * SCORES_LD;
    a.total = 0;
    a.kt = attention_piece(&a, memory, heads * a.padded * a.D);
    a.v = attention_piece(&a, memory, heads * a.padded * a.DV);
    a.blocks = attention_piece(&a, memory, threads * a.block_count);
    a.k = attention_piece(&a, memory, backward ? heads * a.padded * a.D : 0);
    a.vt = attention_piece(&a, memory, backward ? heads * a.padded * a.DV : 0);
    a.dk = attention_piece(&a, memory, backward ? queries * a.padded * a.D : 0);
    a.dv = attention_piece(&a, memory, backward ? queries * a.padded * a.DV : 0);
    return a;
}

static inline AttentionBlock attention_block(const AttentionWorkspace *a, bool backward) {
    AttentionBlock block;
    block.q = a->blocks + omp_get_thread_num() * a->block_count;
    size_t rows = ATTENTION_ROWS, maps = backward ? a->maps : 1, signals = backward ? a->signals : 1;
    block.acc = block.q + maps * rows * a->D;
    block.dout = block.acc + maps * rows * max_size(a->D, a->DV);
    block.p = block.dout + signals * rows * a->DV;
    block.ds = block.p + signals * rows * SCORES_LD;
    block.noise = block.ds + maps * rows * SCORES_LD;
    block.delta = block.noise + TILE_ROWS * SCORES_LD;
    block.factor = block.delta + signals * rows;
    block.dot = block.factor + signals * rows;
    return block;
}

// On the CPU there is no library, and all sums have a fixed order.
static inline void attention_configure(AttentionOptions use) {
    CHECK(!use.cudnn, "--attention-kernel cudnn requires a GPU: omit the option, or use train_diffv2cu");
}
static inline void attention_reserve(size_t bytes) { (void)bytes; }
static inline void attention_prepare(AttentionShape s, bool backward, bool add_dv) {
    (void)s, (void)backward, (void)add_dv;
}
static inline void attention_documents(int *list, const int *first_key, const int *document_starts, int N, int T) {
    (void)list, (void)first_key, (void)document_starts, (void)N, (void)T; // attention reads first_key alone
}
static inline const char *attention_backend(void) { return NULL; }
static inline const char *attention_library_version(void) { return "none"; }
static inline const char *attention_warning(void) { return NULL; }
static inline size_t attention_deterministic_bytes(void) { return 0; }
static inline void attention_close(void) {}

static inline size_t attention_workspace_bytes(AttentionShape s, int threads) {
    return attention_workspace(s, threads, s.query_offset == 0, NULL).total * sizeof(real);
}

// to (padded, width_padded) = factor * x for `count` rows of `width` columns, zeros elsewhere
static inline void attention_copy_rows(real *to, const floatX *x, size_t count, size_t padded, size_t width,
                                       size_t width_padded, size_t ld, real factor) {
    for (size_t t = 0; t < count; t++) {
        for (size_t c = 0; c < width; c++) to[t * width_padded + c] = factor * x[t * ld + c];
        for (size_t c = width; c < width_padded; c++) to[t * width_padded + c] = 0;
    }
    memset(to + count * width_padded, 0, (padded - count) * width_padded * sizeof(real));
}

// Copies x^T to panels: the columns of panel p are the rows of x from p*TILE_COLUMNS on.
static inline void attention_copy_panels(real *to, const floatX *x, size_t count, size_t padded, size_t width,
                                         size_t width_padded, size_t ld) {
    for (size_t t0 = 0; t0 < padded; t0 += TILE_LANES) {
        real *panel = to + t0 / TILE_COLUMNS * TILE_COLUMNS * width_padded + t0 % TILE_COLUMNS;
        const floatX *rows = x + t0 * ld;
        size_t c = 0;
        for (; t0 + TILE_LANES <= count && c + TILE_LANES <= width; c += TILE_LANES)
            tile_transpose(panel + c * TILE_COLUMNS, TILE_COLUMNS, rows + c, ld);
        for (; c < width; c++)
            for (size_t t = 0; t < TILE_LANES; t++) panel[c * TILE_COLUMNS + t] = t0 + t < count ? rows[t * ld + c] : 0;
    }
}

// The first key of the first block of keys that query row t of sequence b, or a later one, uses.
static inline int attention_first_block(AttentionShape s, int b, int t) {
    return attention_first_key(s, b, t) / ATTENTION_KEYS * ATTENTION_KEYS;
}

static inline void attention_copy_keys(const AttentionWorkspace *a, const floatX *k, const floatX *v, AttentionShape s,
                                       bool backward) {
    int parts = backward ? 4 : 2;
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s.B * s.NKV * parts; item++) {
        size_t head = (item / parts), b = head / s.NKV, kv = head % s.NKV;
        size_t from = attention_first_block(s, (int)b, 0), row = (b * s.T + from) * s.ldkv; // earlier keys are not used
        const floatX *kh = k + row + kv * s.k_head, *vh = v + row + kv * s.v_head;
        size_t at_k = (head * a->padded + from) * a->D, at_v = (head * a->padded + from) * a->DV;
        size_t D = s.D, DV = s.DV, ld = s.ldkv, keys = a->keys - from, padded = a->padded - from;
        switch (item % parts) {
        case 0: attention_copy_panels(a->kt + at_k, kh, keys, padded, D, a->D, ld); break;
        case 1: attention_copy_rows(a->v + at_v, vh, keys, padded, DV, a->DV, ld, 1); break;
        case 2: attention_copy_rows(a->k + at_k, kh, keys, padded, D, a->D, ld, 1); break;
        default: attention_copy_panels(a->vt + at_v, vh, keys, padded, DV, a->DV, ld);
        }
    }
}

// The number of keys of the block at k0 that a tile of rows uses whose last row is t.
static inline int attention_reach(AttentionShape s, int t, int k0) {
    return max_int(0, min_int(ATTENTION_KEYS, s.query_offset + min_int(t, s.T - 1) + 1 - k0));
}

// The number of keys at the start of the block at k0 that no row of a tile attends to, rounded down to whole panels.
// low: the first key that any of its rows attends to.
static inline int attention_unused(int low, int k0) { return max_int(0, low - k0) / TILE_COLUMNS * TILE_COLUMNS; }

// scores (TILE_ROWS, n) = a b^T,  a (TILE_ROWS, width), b in panels (n / TILE_COLUMNS, width_padded, TILE_COLUMNS)
static inline void attention_scores(real *scores, const real *a, size_t lda, const real *panels, int n, int width,
                                    size_t width_padded) {
    for (int j = 0; j < n; j += TILE_COLUMNS, panels += width_padded * TILE_COLUMNS)
        tile_multiply(min_int(TILE_COLUMNS, (int)round_up((n - j), TILE_LANES)), width, a, lda, panels, TILE_COLUMNS,
                      scores + j, SCORES_LD, false);
}

// Updates the running softmax of a row with a block of keys: p[j] = exp(score - max) for the visible keys [low, n), 0
// for the others up to `end`, rounded up to whole vectors. Returns the factor for the earlier sums.
static inline real attention_softmax(real *p, real *max, real *sum, int low, int n, int end) {
    real largest = *max;
    TileVector total = tile_zero;
    end = (end + TILE_LANES - 1) & -TILE_LANES;
#pragma omp simd reduction(max : largest)
    for (int j = 0; j < end; j++) {
        p[j] = j >= low && j < n ? p[j] : -(real)INFINITY;
        largest = p[j] > largest ? p[j] : largest;
    }
#pragma omp simd
    for (int j = 0; j < end; j++) p[j] = real_exp(p[j] - largest);
    for (int j = 0; j < end; j += TILE_LANES) total += *(const TileVector *)(const void *)(p + j);
    real factor = real_exp(*max - largest); // 0 at first, since *max is far below any score
    *sum = *sum * factor + tile_sum(total);
    *max = largest;
    return factor;
}

// Attention of a block of queries from row t0 of one head: returns (rows, DV) with stride a->DV, which the thread's
// next block overwrites. l (rows) or NULL
static inline const real *attention_forward_block(real *l, const floatX *q, const real *kt, const real *v, int b,
                                                  int t0, const AttentionWorkspace *a, AttentionShape s) {
    // below any score; finite, so that a row without a visible key in a block stays correct
    const real lowest = (real)-8e37;
    AttentionBlock block = attention_block(a, false);
    int rows = min_int(ATTENTION_ROWS, s.T - t0), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    real max[ATTENTION_ROWS], sum[ATTENTION_ROWS];
    for (int i = 0; i < ATTENTION_ROWS; i++) max[i] = lowest, sum[i] = 0;
    attention_copy_rows(block.q, q, rows, tiles * TILE_ROWS, s.D, a->D, s.ldq, s.scale);
    memset(block.acc, 0, tiles * TILE_ROWS * a->DV * sizeof(real));
    int k0 = attention_first_block(s, b, t0);
    for (; attention_reach(s, t0 + rows - 1, k0) > 0; k0 += ATTENTION_KEYS)
        for (int i0 = 0; i0 < rows; i0 += TILE_ROWS) {
            int from = attention_unused(attention_first_key(s, b, t0 + i0), k0), j0 = k0 + from;
            int n = attention_reach(s, t0 + i0 + TILE_ROWS - 1, k0) - from;
            if (n <= 0) continue;
            attention_scores(block.p, block.q + i0 * a->D, a->D, kt + j0 * a->D, n, s.D, a->D);
            for (int i = i0; i < min_int(i0 + TILE_ROWS, rows); i++) {
                int visible = max_int(0, attention_reach(s, t0 + i, k0) - from);
                int low = max_int(0, attention_first_key(s, b, t0 + i) - j0);
                real *p = block.p + (i - i0) * SCORES_LD, *acc = block.acc + i * a->DV;
                real factor = attention_softmax(p, &max[i], &sum[i], min_int(low, n), visible, n);
                if (factor != 1)
                    for (size_t c = 0; c < a->DV; c++) acc[c] *= factor;
            }
            tile_multiply((int)a->DV, n, block.p, SCORES_LD, v + j0 * a->DV, a->DV, block.acc + i0 * a->DV, a->DV,
                          true);
        }
    for (int i = 0; i < rows; i++) {
        real inverse = 1 / sum[i];
        for (size_t c = 0; c < a->DV; c++) block.acc[i * a->DV + c] *= inverse;
        if (l) l[i] = max[i] + (real)log((double)sum[i]);
    }
    return block.acc;
}

// The heads of each group, the noise head first, into kept; then the difference. Without noise heads every head is a
// group, and kept is NULL.
static inline void attention_forward_groups(floatX *out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                            const floatX *v, const floatX *l, int ldl, AttentionShape s,
                                            Factor factor) {
    AttentionWorkspace a = attention_workspace(s, omp_get_max_threads(), false,
                                               ops_workspace_take(attention_workspace_bytes(s, omp_get_max_threads())));
    int units = s.NQ / a.maps, blocks = (s.T + ATTENTION_ROWS - 1) / ATTENTION_ROWS, ldn = units * s.DV;
    assert(units % s.NKV == 0 && (s.query_offset == 0 || s.B == 1));
    attention_copy_keys(&a, k, v, s, false);
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s.B * units * blocks; item++) {
        int t0 = (blocks - 1 - item / (s.B * units)) * ATTENTION_ROWS; // the longest blocks first
        int b = item % (s.B * units) / units, j = item % (s.B * units) % units;
        size_t row = (size_t)b * s.T + t0, key_head = b * s.NKV + j / (units / s.NKV);
        const real *kt = a.kt + key_head * a.padded * a.D, *vh = a.v + key_head * a.padded * a.DV;
        for (int m = a.maps - 1; m >= 0; m--) {
            size_t head = (size_t)j * a.maps + m;
            real *lse0 = lse ? lse + (b * s.NQ + head) * s.T + t0 : NULL;
            const real *rows = attention_forward_block(lse0, q + row * s.ldq + head * s.q_head, kt, vh, b, t0, &a, s);
            for (int i = 0; i < min_int(ATTENTION_ROWS, s.T - t0); i++, rows += a.DV) {
                floatX *a2 = kept ? kept + (row + i) * ldn + j * s.DV : NULL;
                floatX *o = m == a.signals ? a2 : out + (row + i) * s.ldo + (j * a.signals + m) * s.o_head;
                for (int c = 0; c < s.DV; c++) o[c] = rows[c];
                if (!kept || m == a.signals) continue;
                real f = diff_factor(l[(row + i) * ldl + j * a.signals + m], factor);
                for (int c = 0; c < s.DV; c++) o[c] -= f * a2[c];
            }
        }
    }
}

static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s) {
    attention_forward_groups(out, NULL, lse, q, k, v, NULL, 0, s, S_LINEAR);
}
