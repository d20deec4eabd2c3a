/*
attention_sparse_mma.cuh: block-sparse attention on the tensor cores, for bf16 storage whose rows can be read in packs
and have at most 128 columns; and the gathering of rows by block.

  mapping   forward, dQ: the queries (pairs of row and head) whose list has a block are gathered, 16 at a time by each
            warp, and computed over its keys; their partial results are stored in fp32, and a second kernel merges those
            of each query in the order of its list. dK, dV: a block per 16 keys, whose warps divide the same queries
            between them. The first block is in all lists: a block of threads for each block of keys would take
            T / ((K + 2) S) times as long as the others. Decoding: a block per row and list, for up to 16 heads that
            share it; its warps divide the keys
  why       A tile needs 16 queries that read the same keys. The heads of a group share a list, but are 2 to 16; the
            lists of 64 neighbouring rows have up to 64 K blocks together. Gathered, tiles are full. A query then moves
            (K + 2) (8 DV + 2 D) bytes; alone with the G heads of its group it would read 2 (K + 2) S (D + DV) / G from
            L2, which is more where G < 25 with S = 64
  products  the pieces of attention_decode_mma.cuh. dK, dV: S^T (keys, queries) = K Q^T, and dV += P^T dO, dK += dS^T Q
  traffic   each query and block of its list: forward Q, and O twice in fp32; dQ the same with dO; dK, dV 2 (D + DV)
            elements for each 16 keys. The keys of a block from L1
  numerics  products exact, sums in fp32, in a fixed order; P and dS as sums of two bf16 numbers; outputs rounded once
  source    the gathering is that of MoBA (sparse.h)
*/
#pragma once
#include "attention_decode_mma.cuh"
#include "attention_kernels.cuh"
#include "sparse.cuh"

enum { SPARSE_KEYS = 16, SPARSE_MMA_WIDTH = 128 }; // of a turn; the widest head

typedef struct {
    const floatX *q, *k, *v, *dout;
    const real *lse, *delta;
    const int *first;            // of a cache: the position of each sequence; nullptr: rows s.first + t
    int capacity;                // of a cache
    int *counts, *starts, *rows; // of the backward: sparse_rows_kernel
    AttentionShape s;
} SparseCall;

// ---------------------------------------------------------------------------------------------------
// Lists

// Lists of a group in this key set; the list of head h; the heads that share a list, and the i-th of them in its group.
static __host__ __device__ inline int sparse_kinds_of(const AttentionShape &s) {
    return s.sparse.kinds > 1 && s.sparse.heads.noise ? 2 : 1;
}
static __device__ inline int sparse_kind(const AttentionShape &s, int h) {
    const HeadGroups g = s.sparse.heads;
    return sparse_kinds_of(s) > 1 && h % (g.signals + g.noise) >= g.signals;
}
static __host__ __device__ inline int sparse_heads(const AttentionShape &s, int kind) {
    const HeadGroups g = s.sparse.heads;
    const int group = s.NQ / s.NKV;
    return sparse_kinds_of(s) == 1 ? group : group / (g.signals + g.noise) * (kind ? g.noise : g.signals);
}
static __device__ inline int sparse_head(const AttentionShape &s, int kind, int i) {
    const HeadGroups g = s.sparse.heads;
    if (sparse_kinds_of(s) == 1) return i;
    const int each = kind ? g.noise : g.signals;
    return i / each * (g.signals + g.noise) + (kind ? g.signals : 0) + i % each;
}

// What row n and the heads of a list read: the keys of the list from `low` to `position`.
typedef struct {
    const int *list;
    int b, t, position, low;
    size_t k, v; // offsets of the sequence and key/value head
} SparsePlace;
static __device__ inline SparsePlace sparse_place(const SparseCall &a, size_t n, int kv, int kind) {
    const AttentionShape &s = a.s;
    SparsePlace p;
    p.b = (int)(n / (unsigned)s.T), p.t = (int)(n % (unsigned)s.T);
    p.position = a.first ? a.first[p.b] : s.first + p.t;
    p.low = a.first ? max(0, p.position - a.capacity + 1) : attention_low(s, p.b, p.t);
    const size_t sequence = (size_t)p.b * (a.first ? a.capacity : s.first + s.T) * s.ldkv;
    p.k = sequence + (size_t)kv * s.k_head, p.v = sequence + (size_t)kv * s.v_head;
    const size_t list = (size_t)(p.b * s.NKV + kv) * s.sparse.kinds + kind;
    p.list = s.sparse.lists + (list * s.T + p.t) * sparse_width(s.sparse);
    return p;
}
// The keys [*from, *end) of block i of the list; their rows are taken modulo the capacity of a cache.
static __device__ inline void sparse_span(int *from, int *end, const SparseCall &a, const SparsePlace &p, int i) {
    int begin = p.list[i] * a.s.sparse.size - a.s.sparse.base;
    *from = max(p.low, begin), *end = min(p.position + 1, begin + a.s.sparse.size);
}
static __device__ inline size_t sparse_key(const SparseCall &a, int p) {
    return (size_t)(a.first ? p % a.capacity : p) * a.s.ldkv;
}

// ---------------------------------------------------------------------------------------------------
// Rows by block, for dK and dV

static __host__ __device__ inline int sparse_blocks_of(const AttentionShape &s) {
    return (s.T + s.sparse.size - 1) / s.sparse.size;
}
static __host__ __device__ inline size_t sparse_all_blocks(const AttentionShape &s) {
    return (size_t)s.B * s.NKV * sparse_kinds_of(s) * sparse_blocks_of(s);
}

// The places of a block in lists, in ascending order: t * (blocks + 2) + place in the list of row t.
typedef struct {
    const int *entries;
    int count;
} SparseRows;
static __device__ inline SparseRows sparse_rows_of(const SparseCall &a, int b, int kv, int kind, int block) {
    const AttentionShape &s = a.s;
    const size_t list = (size_t)(b * s.NKV + kv) * sparse_kinds_of(s) + kind, i = list * sparse_blocks_of(s) + block;
    return {a.rows + list * s.T * sparse_width(s.sparse) + a.starts[i], a.counts[i]};
}

// A warp per list and block: counts, or with `fill` starts and rows. counts, starts (lists, blocks);
// rows (lists, T (blocks + 2))
static __global__ void __launch_bounds__(DECODE_THREADS) sparse_rows_kernel(SparseCall a, bool fill) {
    const AttentionShape &s = a.s;
    const size_t item = blockIdx.x * (size_t)DECODE_WARPS + threadIdx.x / WARP;
    if (item >= sparse_all_blocks(s)) return;
    const int lane = (int)threadIdx.x % WARP, blocks = sparse_blocks_of(s), width = sparse_width(s.sparse);
    const int block = (int)(item % (unsigned)blocks), kinds = sparse_kinds_of(s);
    const size_t list = item / (unsigned)blocks, stored = list / (unsigned)kinds * s.sparse.kinds + list % kinds;
    int at = 0;
    if (fill) { // the sum of the earlier blocks' counts
        for (int j = lane; j < block; j += WARP) at += a.counts[item - block + j];
        for (int apart = WARP / 2; apart > 0; apart /= 2) at += __shfl_xor_sync(ALL_LANES, at, apart);
        if (lane == 0) a.starts[item] = at;
    }
    for (int t0 = block * s.sparse.size; t0 < s.T; t0 += WARP) { // earlier rows cannot have it
        const int *of = s.sparse.lists + (stored * s.T + t0 + lane) * width;
        int place = -1;
        for (int i = 0; t0 + lane < s.T && i < width; i++)
            if (of[i] == block) place = i;
        const unsigned all = __ballot_sync(ALL_LANES, place >= 0);
        if (fill && place >= 0)
            a.rows[list * s.T * width + at + __popc(all & ((1u << lane) - 1))] = (t0 + lane) * width + place;
        at += __popc(all);
    }
    if (!fill && lane == 0) a.counts[item] = at;
}

static inline void sparse_gather(const SparseCall &a) {
    for (int fill = 0; fill < 2; fill++)
        LAUNCH(sparse_rows_kernel, blocks_of(sparse_all_blocks(a.s), DECODE_WARPS), DECODE_THREADS, 0, a, fill != 0);
}

// ---------------------------------------------------------------------------------------------------
// Forward of single rows

// What a block computes: heads first .. first + heads - 1 of those that share a list.
typedef struct {
    SparsePlace at;
    int kv, kind, first, heads;
    size_t n;
} SparseTile;
static __device__ inline SparseTile sparse_tile(const SparseCall &a, int tiles) {
    const AttentionShape &s = a.s;
    const int kinds = sparse_kinds_of(s), x = (int)blockIdx.x / tiles;
    SparseTile r;
    r.kind = x % kinds, r.kv = x / kinds % s.NKV, r.n = (size_t)(x / kinds / s.NKV);
    r.first = (int)blockIdx.x % tiles * DECODE_HEADS;
    r.heads = min((int)DECODE_HEADS, sparse_heads(s, r.kind) - r.first);
    r.at = sparse_place(a, r.n, r.kv, r.kind);
    return r;
}
static __device__ inline size_t sparse_head_of(const AttentionShape &s, const SparseTile &r, int i) {
    return (size_t)(r.kv * (s.NQ / s.NKV) + sparse_head(s, r.kind, r.first + i));
}

// The keys key .. key + 15 of a turn, of which [from, end) exist; `turns` of them in all.
typedef struct {
    int key, from, end;
} SparseTurn;
static __device__ inline int sparse_turns(const SparseCall &a, const SparseTile &r) {
    int blocks = 0;
    while (blocks < sparse_width(a.s.sparse) && r.at.list[blocks] >= 0) blocks++;
    return blocks * ((a.s.sparse.size + SPARSE_KEYS - 1) / SPARSE_KEYS);
}
static __device__ inline SparseTurn sparse_turn(const SparseCall &a, const SparseTile &r, int turn) {
    const int each = (a.s.sparse.size + SPARSE_KEYS - 1) / SPARSE_KEYS, block = turn / each;
    SparseTurn k;
    sparse_span(&k.from, &k.end, a, r.at, block);
    k.key = r.at.list[block] * a.s.sparse.size - a.s.sparse.base + turn % each * SPARSE_KEYS;
    k.from = max(k.from, k.key), k.end = min(k.end, k.key + SPARSE_KEYS);
    return k;
}
// The row of key i of the turn; nullptr: it does not exist.
static __device__ inline const floatX *sparse_row_at(const SparseCall &a, const floatX *of, const SparseTurn &k,
                                                     int i) {
    const int p = k.key + i;
    return p >= k.from && p < k.end ? of + sparse_key(a, p) : nullptr;
}

// Packs of four rows for decode_values: row_of(i) for i of 2r, 2r+1, 2r+8, 2r+9; `width` columns
template <int PIECES, typename RowOf>
static __device__ inline void sparse_packs(unsigned (&to)[4][PIECES][4], int width, int lane, RowOf row_of) {
    UNROLL
    for (int n = 0; n < 4; n++) {
        const floatX *row = row_of(lane % 4 * 2 + n % 2 + n / 2 * 8);
        UNROLL
        for (int piece = 0; piece < PIECES; piece++) {
            const int column = lane / 4 * 8 + piece * 64;
            const bool exists = row && column < width;
            decode_pack(to[n][piece], exists ? row + column : row, exists);
        }
    }
}

template <int PIECES> static __device__ inline void sparse_zero(float (&o)[PIECES][8][4]) {
    UNROLL
    for (int i = 0; i < PIECES * 32; i++) o[i / 32][i / 4 % 8][i % 4] = 0;
}

// Adds the warps' sums, in order; store(row, column, x) receives four columns. all (DECODE_WARPS, 16, 64 PIECES)
template <int PIECES, typename Store>
static __device__ inline void sparse_merge(float *all, const float (&o)[PIECES][8][4], int columns, Store store) {
    const int thread = (int)threadIdx.x, warp = thread / WARP, lane = thread % WARP, width = PIECES * 64;
    __syncthreads(); // what the memory held is no longer read
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        float *to = all + (warp * SPARSE_KEYS + lane / 4 + 8 * upper) * width + lane % 4 * 16;
        UNROLL
        for (int i = 0; i < PIECES * 16; i += 4) {
            const int piece = i / 16, c = 2 * upper + i / 8 % 2, n = i % 8;
            *(float4 *)(void *)(to + 64 * piece + i % 16) =
                make_float4(o[piece][n][c], o[piece][n + 1][c], o[piece][n + 2][c], o[piece][n + 3][c]);
        }
    }
    __syncthreads();
    for (int i = thread; i < SPARSE_KEYS * width / 4; i += DECODE_THREADS) {
        const int row = i / (width / 4), column = i % (width / 4) * 4;
        if (column >= columns) continue;
        float x[4] = {0, 0, 0, 0};
        for (int w = 0; w < DECODE_WARPS; w++) {
            const float4 y = *(const float4 *)(const void *)(all + w * SPARSE_KEYS * width + 4 * i);
            x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
        }
        store(row, column, x);
    }
}

// WD, WV: widths of keys and of values in units of 64. scale: of scores in base 2. tiles: of 16 heads
template <int WD, int WV>
static __global__ void __launch_bounds__(DECODE_THREADS, 4 - WV)
    sparse_forward_mma_kernel(floatX *out, real *lse, SparseCall a, int tiles, float scale) {
    const float LN2 = 0.693147181f;
    SHARED(uint4, memory, DECODE_WARPS * SPARSE_KEYS * WV * 64 * 4 / 16);
    SHARED(float2, stats, DECODE_WARPS * DECODE_HEADS);
    const AttentionShape &s = a.s;
    const SparseTile r = sparse_tile(a, tiles);
    if (r.heads <= 0) return; // all threads agree
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, turns = sparse_turns(a, r);
    decode_load_rows(memory, s.D, 1, 2 * WD, (int)threadIdx.x, DECODE_THREADS, [&](int i) {
        return i < r.heads ? a.q + r.n * s.ldq + sparse_head_of(s, r, i) * s.q_head : (const floatX *)nullptr;
    });
    __syncthreads();
    float o[WV][8][4], most[2] = {-8e37f, -8e37f}, sum[2] = {0, 0}; // below any score, finite
    sparse_zero<WV>(o);
    for (int turn = warp; turn < turns; turn += DECODE_WARPS) {
        const SparseTurn k = sparse_turn(a, r, turn);
        if (k.from >= k.end) continue;
        unsigned values[4][WV][4], weights[2][4];
        sparse_packs<WV>(values, s.DV, lane, [&](int i) { return sparse_row_at(a, a.v + r.at.v, k, i); });
        const floatX *keys[2] = {sparse_row_at(a, a.k + r.at.k, k, lane / 4),
                                 sparse_row_at(a, a.k + r.at.k, k, lane / 4 + 8)};
        float scores[2][4];
        decode_scores<2 * WD>(scores, memory, keys, s.D, 2 * WD, lane);
        decode_softmax<WV>(weights, o, most, sum, scores, lane % 4 * 2, {k.from - k.key, k.from - k.key},
                           {k.end - k.key, k.end - k.key}, scale);
        decode_values<WV>(o, weights, values);
    }
    for (int upper = 0; upper < 2; upper++) {
        const float all = lanes_sum(sum[upper], 4);
        if (lane % 4 == 0) stats[warp * DECODE_HEADS + lane / 4 + 8 * upper] = make_float2(most[upper], all);
    }
    __syncthreads();
    float factor[2];
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        const int h = lane / 4 + 8 * upper;
        float top = -8e37f, total = 0;
        for (int w = 0; w < DECODE_WARPS; w++) top = fmaxf(top, stats[w * DECODE_HEADS + h].x);
        for (int w = 0; w < DECODE_WARPS; w++)
            total += stats[w * DECODE_HEADS + h].y * exp2f(stats[w * DECODE_HEADS + h].x - top);
        factor[upper] = exp2f(most[upper] - top) / total;
        if (lse && warp == 0 && lane % 4 == 0 && h < r.heads)
            lse[((size_t)r.at.b * s.NQ + sparse_head_of(s, r, h)) * s.T + r.at.t] = LN2 * (top + log2f(total));
    }
    UNROLL
    for (int i = 0; i < WV * 32; i++) o[i / 32][i / 4 % 8][i % 4] *= factor[i / 2 % 2];
    sparse_merge<WV>((float *)(void *)memory, o, s.DV, [&](int h, int column, const float(&x)[4]) {
        if (h < r.heads) store<4>(out + r.n * s.ldo + sparse_head_of(s, r, h) * s.o_head + column, x);
    });
}

// ---------------------------------------------------------------------------------------------------
// Queries by block

// A query of a turn. It reads the keys `low` to t.
typedef struct {
    size_t q, dout;   // offsets, so that the compiler sees reads of global memory
    float lse, delta; // lse in base 2
    int t, low;       // t < 0: there is none
    size_t part;      // among the partial results of its key/value head
} SparseQuery;
static __device__ inline SparseQuery sparse_query(const SparseCall &a, int b, int kv, int kind, SparseRows of, int i) {
    const AttentionShape &s = a.s;
    const int heads = sparse_heads(s, kind), width = sparse_width(s.sparse), group = s.NQ / s.NKV;
    SparseQuery q = {0, 0, 0, 0, -1, 0, 0};
    if (i >= of.count * heads) return q;
    const int entry = of.entries[i / heads], head = sparse_head(s, kind, i % heads);
    q.t = entry / width, q.low = attention_low(s, b, q.t);
    q.part = ((size_t)q.t * group + head) * width + entry % width;
    const size_t h = (size_t)(kv * group + head), n = (size_t)b * s.T + q.t, at = ((size_t)b * s.NQ + h) * s.T + q.t;
    q.q = n * s.ldq + h * s.q_head;
    if (!a.dout) return q; // of the forward
    q.dout = n * s.ldo + h * s.o_head, q.lse = a.lse[at] * 1.44269504f, q.delta = a.delta[at];
    return q;
}

// The row of a query, and of its gradient; nullptr: there is none.
static __device__ inline const floatX *sparse_row_of_q(const SparseCall &a, const SparseQuery &q) {
    return q.t < 0 ? nullptr : a.q + q.q;
}
static __device__ inline const floatX *sparse_row_of_dout(const SparseCall &a, const SparseQuery &q) {
    return q.t < 0 ? nullptr : a.dout + q.dout;
}

// The partial results of key/value heads first .. (of all sequences): o (heads, T, group, blocks + 2, columns), and for
// the forward their maxima and sums.
typedef struct {
    float *o;
    float2 *stats;
    int first, columns;
} SparseParts;

// The block of keys of a block of threads, and the queries that read it. blockIdx.y: one of SPARSE_PARTS parts of them
enum { SPARSE_PARTS = 4 };
typedef struct {
    int b, kv, kind, begin, end, count;
    SparseRows of;
    size_t parts; // first partial result of the key/value head
} SparseBlock;
static __device__ inline SparseBlock sparse_block(const SparseCall &a, const SparseParts &p) {
    const AttentionShape &s = a.s;
    const int blocks = sparse_blocks_of(s), kinds = sparse_kinds_of(s), block = (int)blockIdx.x % blocks;
    const int item = (int)blockIdx.x / blocks, pair = p.first + item / kinds;
    SparseBlock r;
    r.b = pair / s.NKV, r.kv = pair % s.NKV, r.kind = item % kinds;
    r.begin = block * s.sparse.size, r.end = min(s.T, r.begin + s.sparse.size);
    r.of = sparse_rows_of(a, r.b, r.kv, r.kind, block), r.count = r.of.count * sparse_heads(s, r.kind);
    r.parts = (size_t)(item / kinds) * s.T * (s.NQ / s.NKV) * sparse_width(s.sparse);
    return r;
}

// Stores the columns of the lane's two queries: 16 of each piece.
template <int PIECES>
static __device__ inline void sparse_store_part(const SparseParts &p, size_t first, const SparseQuery *queries,
                                                const float (&o)[PIECES][8][4], int lane) {
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        const SparseQuery &q = queries[lane / 4 + 8 * upper];
        float *to = p.o + (first + q.part) * p.columns;
        UNROLL
        for (int i = 0; i < PIECES * 16; i += 4) {
            const int piece = i / 16, c = 2 * upper + i / 8 % 2, n = i % 8,
                      column = 64 * piece + lane % 4 * 16 + i % 16;
            if (q.t >= 0 && column < p.columns)
                *(float4 *)(void *)(to + column) =
                    make_float4(o[piece][n][c], o[piece][n + 1][c], o[piece][n + 2][c], o[piece][n + 3][c]);
        }
    }
}

template <int WD, int WV>
static __global__ void __launch_bounds__(DECODE_THREADS, 4 - WV)
    sparse_forward_block_mma_kernel(SparseCall a, SparseParts parts, float scale) {
    SHARED(uint4, memory, DECODE_WARPS * WD * 2 * 2 * WARP);
    SHARED(SparseQuery, queries, DECODE_WARPS * SPARSE_KEYS);
    const AttentionShape &s = a.s;
    const SparseBlock r = sparse_block(a, parts);
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    uint4 *rows = memory + warp * WD * 2 * 2 * WARP;
    SparseQuery *own = queries + warp * SPARSE_KEYS;
    const size_t row0 = (size_t)r.b * s.T * s.ldkv;
    const floatX *k = a.k + row0 + (size_t)r.kv * s.k_head, *v = a.v + row0 + (size_t)r.kv * s.v_head;
    const int turn = SPARSE_KEYS * DECODE_WARPS * SPARSE_PARTS;
    for (int first = ((int)blockIdx.y * DECODE_WARPS + warp) * SPARSE_KEYS; first < r.count; first += turn) {
        if (lane < SPARSE_KEYS) own[lane] = sparse_query(a, r.b, r.kv, r.kind, r.of, first + lane);
        __syncwarp();
        decode_load_rows(rows, s.D, 1, 2 * WD, lane, WARP, [&](int i) { return sparse_row_of_q(a, own[i]); });
        __syncwarp();
        float o[WV][8][4], most[2] = {-8e37f, -8e37f}, sum[2] = {0, 0}; // below any score, finite
        sparse_zero<WV>(o);
        for (int key = r.begin; key < r.end; key += SPARSE_KEYS) {
            auto row_at = [&](const floatX *of, int i) {
                return key + i < r.end ? of + (size_t)(key + i) * s.ldkv : (const floatX *)nullptr;
            };
            unsigned values[4][WV][4], weights[2][4];
            sparse_packs<WV>(values, s.DV, lane, [&](int i) { return row_at(v, i); });
            const floatX *keys[2] = {row_at(k, lane / 4), row_at(k, lane / 4 + 8)};
            float scores[2][4];
            decode_scores<2 * WD>(scores, rows, keys, s.D, 2 * WD, lane);
            int low[2], left[2];
            UNROLL
            for (int upper = 0; upper < 2; upper++) {
                low[upper] = own[lane / 4 + 8 * upper].low - key;
                left[upper] = min(own[lane / 4 + 8 * upper].t + 1, r.end) - key;
            }
            decode_softmax<WV>(weights, o, most, sum, scores, lane % 4 * 2, low, left, scale);
            decode_values<WV>(o, weights, values);
        }
        sparse_store_part<WV>(parts, r.parts, own, o, lane);
        UNROLL
        for (int upper = 0; upper < 2; upper++) {
            const float all = lanes_sum(sum[upper], 4);
            const SparseQuery &q = own[lane / 4 + 8 * upper];
            if (lane % 4 == 0 && q.t >= 0) parts.stats[r.parts + q.part] = make_float2(most[upper], all);
        }
        __syncwarp(); // before the queries are overwritten
    }
}

template <int WD, int WV>
static __global__ void __launch_bounds__(DECODE_THREADS, 2)
    sparse_dq_mma_kernel(SparseCall a, SparseParts parts, float scale) {
    SHARED(uint4, memory, DECODE_WARPS * (WD + WV) * 2 * 2 * WARP);
    SHARED(SparseQuery, queries, DECODE_WARPS * SPARSE_KEYS);
    const AttentionShape &s = a.s;
    const SparseBlock r = sparse_block(a, parts);
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    uint4 *rows = memory + warp * (WD + WV) * 2 * 2 * WARP, *douts = rows + WD * 2 * 2 * WARP;
    SparseQuery *own = queries + warp * SPARSE_KEYS;
    const size_t row0 = (size_t)r.b * s.T * s.ldkv;
    const floatX *k = a.k + row0 + (size_t)r.kv * s.k_head, *v = a.v + row0 + (size_t)r.kv * s.v_head;
    const int turn = SPARSE_KEYS * DECODE_WARPS * SPARSE_PARTS;
    for (int first = ((int)blockIdx.y * DECODE_WARPS + warp) * SPARSE_KEYS; first < r.count; first += turn) {
        if (lane < SPARSE_KEYS) own[lane] = sparse_query(a, r.b, r.kv, r.kind, r.of, first + lane);
        __syncwarp();
        decode_load_rows(rows, s.D, 1, 2 * WD, lane, WARP, [&](int i) { return sparse_row_of_q(a, own[i]); });
        decode_load_rows(douts, s.DV, 1, 2 * WV, lane, WARP, [&](int i) { return sparse_row_of_dout(a, own[i]); });
        __syncwarp();
        float sum[WD][8][4];
        sparse_zero<WD>(sum);
        for (int key = r.begin; key < r.end; key += SPARSE_KEYS) {
            auto row_at = [&](const floatX *of, int i) {
                return key + i < r.end ? of + (size_t)(key + i) * s.ldkv : (const floatX *)nullptr;
            };
            const floatX *keys[2] = {row_at(k, lane / 4), row_at(k, lane / 4 + 8)};
            const floatX *values[2] = {row_at(v, lane / 4), row_at(v, lane / 4 + 8)};
            float scores[2][4], dp[2][4];
            unsigned ds[2][4], packs[4][WD][4];
            decode_scores<2 * WD>(scores, rows, keys, s.D, 2 * WD, lane); // S = scale Q K^T, recomputed
            decode_scores<2 * WV>(dp, douts, values, s.DV, 2 * WV, lane); // dP = dO V^T
            UNROLL
            for (int n = 0; n < 2; n++) {
                UNROLL
                for (int upper = 0; upper < 2; upper++) {
                    const SparseQuery &q = own[lane / 4 + 8 * upper];
                    float x[2];
                    UNROLL
                    for (int e = 0; e < 2; e++) {
                        const int at = key + 8 * n + lane % 4 * 2 + e;
                        const float p = exp2f(scale * scores[n][2 * upper + e] - q.lse);
                        x[e] = at >= q.low && at <= q.t && at < r.end ? p * (dp[n][2 * upper + e] - q.delta) : 0;
                    }
                    decode_split(ds, upper + 2 * n, x[0], x[1]);
                }
            }
            sparse_packs<WD>(packs, s.D, lane, [&](int i) { return row_at(k, i); });
            decode_values<WD>(sum, ds, packs); // dQ = scale dS K
        }
        sparse_store_part<WD>(parts, r.parts, own, sum, lane);
        __syncwarp(); // before the queries are overwritten
    }
}

// A warp per query: out and lse, or with GRADIENT dQ, from the partial results of its blocks in order.
template <bool GRADIENT>
static __global__ void __launch_bounds__(DECODE_THREADS)
    sparse_merge_kernel(floatX *to, real *lse, SparseCall a, SparseParts parts, int count) {
    const float LN2 = 0.693147181f;
    const AttentionShape &s = a.s;
    const int lane = (int)threadIdx.x % WARP, group = s.NQ / s.NKV, width = sparse_width(s.sparse);
    const unsigned item = blockIdx.x * DECODE_WARPS + threadIdx.x / WARP; // fewer than 2^32, since memory holds them
    if (item >= (size_t)count * s.T * group) return;
    const int head = (int)(item % (unsigned)group), t = (int)(item / (unsigned)group % (unsigned)s.T);
    const int pair = parts.first + (int)(item / (unsigned)group / (unsigned)s.T), b = pair / s.NKV, kv = pair % s.NKV;
    const size_t n = (size_t)b * s.T + t, h = (size_t)(kv * group + head), part = (size_t)item * width;
    const int *list = s.sparse.lists + sparse_list(s, b, (int)h) + (size_t)t * width;
    float top = -8e37f, total = 0;
    for (int i = 0; !GRADIENT && i < width && list[i] >= 0; i++) top = fmaxf(top, parts.stats[part + i].x);
    for (int i = 0; !GRADIENT && i < width && list[i] >= 0; i++)
        total += parts.stats[part + i].y * exp2f(parts.stats[part + i].x - top);
    for (int c = lane * 4; c < parts.columns; c += WARP * 4) {
        float x[4] = {0, 0, 0, 0};
        for (int i = 0; i < width && list[i] >= 0; i++) {
            const float4 o = *(const float4 *)(const void *)(parts.o + (part + i) * parts.columns + c);
            const float by = GRADIENT ? s.scale : exp2f(parts.stats[part + i].x - top) / total;
            x[0] += by * o.x, x[1] += by * o.y, x[2] += by * o.z, x[3] += by * o.w;
        }
        store<4>(to + n * (GRADIENT ? s.ldq : s.ldo) + h * (GRADIENT ? s.q_head : s.o_head) + c, x);
    }
    if (!GRADIENT && lse && lane == 0) lse[((size_t)b * s.NQ + h) * s.T + t] = LN2 * (top + log2f(total));
}

// ---------------------------------------------------------------------------------------------------
// dK and dV

// dV += P^T dO, dK += dS^T Q of a turn of 16 queries, for the keys key .. key + 15. keys, rows: K and V
template <int WD, int WV>
static __device__ inline void sparse_dkv_turn(float (&dk)[WD][8][4], float (&dv)[WV][8][4], const uint4 *keys,
                                              const uint4 *rows, const SparseQuery *queries, const SparseCall &a,
                                              int key, float scale, int lane) {
    const AttentionShape &s = a.s;
    const floatX *q[2] = {sparse_row_of_q(a, queries[lane / 4]), sparse_row_of_q(a, queries[lane / 4 + 8])};
    const floatX *g[2] = {sparse_row_of_dout(a, queries[lane / 4]), sparse_row_of_dout(a, queries[lane / 4 + 8])};
    float scores[2][4], dp[2][4];
    unsigned p[2][4], ds[2][4];
    decode_scores<2 * WD>(scores, keys, q, s.D, 2 * WD, lane);
    decode_scores<2 * WV>(dp, rows, g, s.DV, 2 * WV, lane);
    UNROLL
    for (int n = 0; n < 2; n++) {
        UNROLL
        for (int upper = 0; upper < 2; upper++) {
            const int at = key + lane / 4 + 8 * upper;
            float x[2], y[2];
            UNROLL
            for (int e = 0; e < 2; e++) {
                const SparseQuery &of = queries[8 * n + lane % 4 * 2 + e];
                const bool reads = of.t >= at && of.low <= at;
                x[e] = reads ? exp2f(scale * scores[n][2 * upper + e] - of.lse) : 0;
                y[e] = reads ? x[e] * (dp[n][2 * upper + e] - of.delta) : 0;
            }
            decode_split(p, upper + 2 * n, x[0], x[1]);
            decode_split(ds, upper + 2 * n, y[0], y[1]);
        }
    }
    unsigned douts[4][WV][4];
    sparse_packs<WV>(douts, s.DV, lane, [&](int i) { return sparse_row_of_dout(a, queries[i]); });
    decode_values<WV>(dv, p, douts);
    unsigned packs[4][WD][4];
    sparse_packs<WD>(packs, s.D, lane, [&](int i) { return sparse_row_of_q(a, queries[i]); });
    decode_values<WD>(dk, ds, packs);
}

template <int WD, int WV>
static __global__ void __launch_bounds__(DECODE_THREADS, 2)
    sparse_dkv_mma_kernel(floatX *dk, floatX *dv, SparseCall a, bool add_dv, float scale) {
    SHARED(uint4, memory, DECODE_WARPS * SPARSE_KEYS * 128 * 4 / 16);
    SHARED(SparseQuery, queries, DECODE_WARPS * SPARSE_KEYS);
    const AttentionShape &s = a.s;
    const int each = (s.sparse.size + SPARSE_KEYS - 1) / SPARSE_KEYS, blocks = sparse_blocks_of(s);
    const int item = (int)blockIdx.x / each, kv = item % s.NKV, block = item / s.NKV % blocks;
    const int b = item / s.NKV / blocks;
    const int key = block * s.sparse.size + (int)blockIdx.x % each * SPARSE_KEYS;
    const int end = min(min(s.T, (block + 1) * s.sparse.size), key + SPARSE_KEYS);
    if (key >= end) return; // all threads agree
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const size_t row0 = ((size_t)b * s.T + key) * s.ldkv, k_at = row0 + (size_t)kv * s.k_head,
                 v_at = row0 + (size_t)kv * s.v_head;
    uint4 *rows = memory + 2 * WD * 2 * WARP;
    SparseQuery *own = queries + warp * SPARSE_KEYS;
    decode_load_rows(memory, s.D, 1, 2 * WD, (int)threadIdx.x, DECODE_THREADS,
                     [&](int i) { return key + i < end ? a.k + k_at + (size_t)i * s.ldkv : (const floatX *)nullptr; });
    decode_load_rows(rows, s.DV, 1, 2 * WV, (int)threadIdx.x, DECODE_THREADS,
                     [&](int i) { return key + i < end ? a.v + v_at + (size_t)i * s.ldkv : (const floatX *)nullptr; });
    __syncthreads();
    float sum_k[WD][8][4], sum_v[WV][8][4];
    sparse_zero<WD>(sum_k), sparse_zero<WV>(sum_v);
    for (int kind = 0; kind < sparse_kinds_of(s); kind++) {
        const SparseRows of = sparse_rows_of(a, b, kv, kind, block);
        const int count = of.count * sparse_heads(s, kind);
        for (int first = warp * SPARSE_KEYS; first < count; first += DECODE_WARPS * SPARSE_KEYS) {
            if (lane < SPARSE_KEYS) own[lane] = sparse_query(a, b, kv, kind, of, first + lane);
            __syncwarp();
            sparse_dkv_turn<WD, WV>(sum_k, sum_v, memory, rows, own, a, key, scale, lane);
            __syncwarp(); // before the queries are overwritten
        }
    }
    sparse_merge<WD>((float *)(void *)memory, sum_k, s.D, [&](int i, int column, float(&x)[4]) {
        UNROLL
        for (int c = 0; c < 4; c++) x[c] *= s.scale;
        if (key + i < end) store<4>(dk + k_at + (size_t)i * s.ldkv + column, x);
    });
    sparse_merge<WV>((float *)(void *)memory, sum_v, s.DV, [&](int i, int column, float(&x)[4]) {
        if (key + i >= end) return;
        floatX *to = dv + v_at + (size_t)i * s.ldkv + column;
        float before[4];
        if (add_dv) load<4>(before, to);
        UNROLL
        for (int c = 0; c < 4; c++) x[c] += add_dv ? before[c] : 0;
        store<4>(to, x);
    });
}

// ---------------------------------------------------------------------------------------------------
// Calls

static inline bool sparse_mma_fits(AttentionShape s) {
    return sizeof(floatX) == 2 && s.D <= SPARSE_MMA_WIDTH && s.DV <= SPARSE_MMA_WIDTH && packed(s.D) && packed(s.DV) &&
           packed(s.ldq) && packed(s.ldkv) && packed(s.ldo) && packed(s.q_head) && packed(s.k_head) &&
           packed(s.v_head) && packed(s.o_head);
}
#define SPARSE_MMA(kernel, grid, ...)                                                              \
    do {                                                                                           \
        if (s.D <= 64 && s.DV <= 64) LAUNCH((kernel<1, 1>), grid, DECODE_THREADS, 0, __VA_ARGS__); \
        else if (s.D <= 64) LAUNCH((kernel<1, 2>), grid, DECODE_THREADS, 0, __VA_ARGS__);          \
        else LAUNCH((kernel<2, 2>), grid, DECODE_THREADS, 0, __VA_ARGS__);                         \
    } while (0)

static inline int sparse_tiles(AttentionShape s) {
    const int kinds = sparse_kinds_of(s), most = max_int(sparse_heads(s, 0), sparse_heads(s, kinds - 1));
    return (most + DECODE_HEADS - 1) / DECODE_HEADS;
}
static inline unsigned sparse_grid(AttentionShape s) {
    return blocks_of((size_t)s.B * s.T * s.NKV * sparse_kinds_of(s) * sparse_tiles(s), 1);
}
// The forward of rows of a cache, or of a piece of a prompt.
static inline void sparse_forward_rows(floatX *out, real *lse, SparseCall a) {
    const AttentionShape s = a.s;
    const float scale = (float)((double)s.scale / M_LN2);
    SPARSE_MMA(sparse_forward_mma_kernel, sparse_grid(s), out, lse, a, sparse_tiles(s), scale);
}

// Computes the partial results of as many key/value heads at a time as there is room for at `memory`.
static inline void sparse_by_blocks(floatX *to, real *lse, SparseCall a, float *memory, bool gradient) {
    const AttentionShape s = a.s;
    const float scale = (float)((double)s.scale / M_LN2);
    const int heads = s.B * s.NKV, once = (int)sparse_heads_at_once(s);
    const size_t each = (size_t)s.T * (s.NQ / s.NKV);
    SparseParts p = {memory, nullptr, 0, gradient ? s.D : s.DV};
    p.stats = (float2 *)(void *)(memory + once * each * sparse_width(s.sparse) * p.columns);
    for (; p.first < heads; p.first += once) {
        const int count = min_int(once, heads - p.first);
        const dim3 grid(blocks_of((size_t)count * sparse_kinds_of(s) * sparse_blocks_of(s), 1), SPARSE_PARTS);
        const unsigned merging = blocks_of(count * each, DECODE_WARPS);
        if (gradient) {
            SPARSE_MMA(sparse_dq_mma_kernel, grid, a, p, scale);
            LAUNCH((sparse_merge_kernel<true>), merging, DECODE_THREADS, 0, to, lse, a, p, count);
        } else {
            SPARSE_MMA(sparse_forward_block_mma_kernel, grid, a, p, scale);
            LAUNCH((sparse_merge_kernel<false>), merging, DECODE_THREADS, 0, to, lse, a, p, count);
        }
    }
}

static inline void sparse_dkv_mma(floatX *dk, floatX *dv, SparseCall a, bool add_dv) {
    const AttentionShape s = a.s;
    const float scale = (float)((double)s.scale / M_LN2);
    const size_t each = (s.sparse.size + SPARSE_KEYS - 1) / SPARSE_KEYS;
    SPARSE_MMA(sparse_dkv_mma_kernel, blocks_of((size_t)s.B * s.NKV * sparse_blocks_of(s) * each, 1), dk, dv, a, add_dv,
               scale);
}
#undef SPARSE_MMA
