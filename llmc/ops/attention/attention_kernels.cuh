/*
attention_kernels.cuh: the built-in attention kernels, tile by tile. Equations in attention.h. Differences:

  forward   A block computes 64 queries of one head, over tiles of 64 keys with a running softmax. The scores exist only
            as one tile in registers and shared memory.
  backward  no atomics. delta = rowsum(dO O) first; then a block per 64 queries for dQ, and blocks per 64 keys of a
            key/value head for dK and for dV, which add over the queries of all heads of the group in order. The scores
            are computed three times; in exchange a block keeps one result in registers, which allows any width to 512.
  shapes    any D and DV to 512, any strides; 16-byte packs if widths, strides and addresses allow them
  numerics  products, softmax and sums in fp32, as are P and dS; out, dq, dk, dv rounded once (with add_dv, dv + the
            sum). Sums have one order: bitwise reproducible.
  traffic   q, out, k and v once from device memory (attention_grid); per tile of queries k and v from the cache
  windows   tiles of keys that no row of the block attends to are skipped, in dK and dV tiles of queries, so the time
            grows with T * window
  flops     attention_forward_flops and attention_backward_flops, and in addition the masked part of the tiles on
            the diagonal and at the window's end and, in the backward, Q K^T twice and dO V^T once more
  use       the fp32 build, and shapes that neither cuDNN (attention_plans.cuh) nor the kernels on tensor cores
            (attention_mma.cuh) support; no tensor cores
*/
#pragma once
#include "../../cuda/tile.cuh"
#include "attention_mma_backward.cuh"
#include "operations.h"

// for the backward: delta (B,NQ,T), or what the kernel on tensor cores needs
static inline size_t attention_builtin_workspace_bytes(AttentionShape s) {
    AttentionBackwardMma mma;
    size_t delta = (size_t)s.B * s.NQ * s.T * sizeof(real);
    if (!attention_mma_backward_fits(s)) return delta;
    delta = max_size(delta, attention_mma_backward_memory(&mma, s, 1, NULL));
    return s.groups.signals == 1 ? max_size(delta, attention_mma_backward_memory(&mma, s, 2, NULL)) : delta;
}

// Head h of sequence b, and the offsets of its tensors at the sequence's first row.
typedef struct {
    int b, h;
    size_t q, kv_k, kv_v, o, lse; // offsets
} AttentionPlace;

static __device__ inline AttentionPlace attention_place(AttentionShape s, int b, int h) {
    AttentionPlace p;
    size_t row = (size_t)b * s.T; // with first > 0 keys and values have more rows, but then B is 1
    int kv = h / (s.NQ / s.NKV);
    p.b = b;
    p.h = h;
    p.q = row * s.ldq + h * s.q_head;
    p.kv_k = row * s.ldkv + kv * s.k_head;
    p.kv_v = row * s.ldkv + kv * s.v_head;
    p.o = row * s.ldo + h * s.o_head;
    p.lse = ((size_t)b * s.NQ + h) * s.T;
    return p;
}

// The grid: (heads or pairs of a section, tiles of queries, sections). Blocks start in this order: the keys and values
// of a section stay in the L2 cache until its last tile, so device memory is read once, not once for each tile of
// queries.
// each: heads, or pairs of them, of a sequence; rows: queries of a tile
#ifdef CUDA_ON_CPU
enum { ATTENTION_SECTION = 64 << 10 }; // tests of small shapes have several sections
#else
enum { ATTENTION_SECTION = 20 << 20 }; // bytes of K and V
#endif
static inline dim3 attention_grid(AttentionShape s, int each, int rows) {
    const size_t bytes = (size_t)(s.query_offset + s.T) * (s.D + s.DV) * sizeof(floatX); // of a key/value head
    const size_t heads = (size_t)s.B * s.NKV, most = max_size(1, ATTENTION_SECTION / bytes);
    const unsigned sections = blocks_of(heads, most), section = blocks_of(heads, sections);
    const unsigned tiles = blocks_of((size_t)s.T, (size_t)rows);
    CHECK(tiles <= 65535, "attention: a sequence of %d tokens is too long for one launch; choose a shorter --seq-len",
          s.T);
    return dim3(section * (unsigned)(each / s.NKV), tiles, sections);
}

// The head, or pair, of a block among those of all sequences, and its first query, the longest rows first. The last
// section may be smaller: blocks without a head return at once
typedef struct {
    int head, t0;
} AttentionTile;
static __device__ inline AttentionTile attention_tile(int rows) {
    return {(int)(blockIdx.z * gridDim.x + blockIdx.x), (int)(gridDim.y - 1 - blockIdx.y) * rows};
}

// P = exp(scale S - lse), 0 if row t does not attend to the key.
static __device__ inline float attention_probability(float score, float lse, int t, int low, int key,
                                                     AttentionShape s) {
    return key >= low && key <= s.query_offset + t ? expf(s.scale * score - lse) : 0;
}

// ---------------------------------------------------------------------------------------------------
// Forward

// Updates the running softmax of the thread's four rows with one tile of scores: acc becomes P, out is rescaled to the
// new maximum.
template <int PIECES>
static __device__ inline void attention_softmax(float (&acc)[4][4], float (&out)[PIECES][4][4], float (&max)[4],
                                                float (&sum)[4], const int (&low)[4], int t, int key,
                                                AttentionShape s) {
    UNROLL
    for (int r = 0; r < 4; r++) {
        float largest = max[r], total = 0;
        UNROLL
        for (int c = 0; c < 4; c++) {
            bool visible = key + c >= low[r] && key + c <= s.query_offset + t + r;
            acc[r][c] = visible ? s.scale * acc[r][c] : -INFINITY;
            largest = fmaxf(largest, acc[r][c]);
        }
        largest = lanes_max(largest, 16); // the row's other columns
        UNROLL
        for (int c = 0; c < 4; c++) total += acc[r][c] = expf(acc[r][c] - largest);
        float factor = expf(max[r] - largest);
        sum[r] = sum[r] * factor + lanes_sum(total, 16);
        max[r] = largest;
        UNROLL
        for (int piece = 0; piece < PIECES; piece++) {
            UNROLL
            for (int c = 0; c < 4; c++) out[piece][r][c] *= factor;
        }
    }
}

template <int PIECES>
static __global__ void __launch_bounds__(TILE_THREADS)
    attention_forward_kernel(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, bool wide_qk, bool wide_v) {
    SHARED(float4, operands4, TILE_OPERANDS / 4);
    SHARED(float4, scores4, TILE_SCORES / 4);
    float *operands = (float *)(void *)operands4, *scores = (float *)(void *)scores4;
    const AttentionTile tile = attention_tile(TILE);
    if (tile.head >= s.B * s.NQ) return;
    const int t0 = tile.t0, t = t0 + (int)threadIdx.x / 16 * 4;
    int rows = min(TILE, s.T - t0), keys = s.query_offset + t0 + rows, low[4];
    AttentionPlace at = attention_place(s, tile.head / s.NQ, tile.head % s.NQ);
    float o[PIECES][4][4], max[4], sum[4], inverse[4];
    tile_clear<PIECES>(o);
    for (int r = 0; r < 4; r++) {
        max[r] = -8e37f; // below any score; finite, so that a row without a visible key in a tile stays correct
        sum[r] = 0;
        low[r] = attention_first_key(s, at.b, t + r);
    }
    TileRows queries = tile_rows(q + at.q, t0, s.T, s.ldq, s.D, wide_qk);
    for (int k0 = attention_first_key(s, at.b, t0) / TILE * TILE; k0 < keys; k0 += TILE) {
        float acc[1][4][4];
        tile_clear<1>(acc);
        tile_dot(acc[0], queries, tile_rows(k + at.kv_k, k0, keys, s.ldkv, s.D, wide_qk), operands);
        attention_softmax<PIECES>(acc[0], o, max, sum, low, t, k0 + (int)threadIdx.x % 16 * 4, s);
        tile_store_scores(scores, acc[0]);
        tile_accumulate<PIECES>(o, scores, tile_rows(v + at.kv_v, k0, keys, s.ldkv, s.DV, wide_v), operands);
    }
    for (int r = 0; r < 4; r++) inverse[r] = 1 / sum[r];
    tile_write<PIECES>(out + at.o + (size_t)t0 * s.ldo, s.ldo, rows, s.DV, o, inverse, false);
    if (lse && threadIdx.x % 16 == 0)
        for (int r = 0; r < 4; r++)
            if (t + r < s.T) lse[at.lse + (t + r)] = max[r] + logf(sum[r]);
}

// Calls CALL(PIECES) with the smallest number of 64-column pieces that hold the width.
#define ATTENTION_PIECES(width, CALL)          \
    do {                                       \
        if ((width) <= TILE) CALL(1);          \
        else if ((width) <= 2 * TILE) CALL(2); \
        else if ((width) <= 4 * TILE) CALL(4); \
        else CALL(8);                          \
    } while (0)

static inline bool attention_wide_qk(AttentionShape s, const void *q, const void *k) {
    return packed(s.D, q, k) && packed(s.ldq) && packed(s.ldkv) && packed(s.q_head) && packed(s.k_head);
}
static inline void attention_check(AttentionShape s) {
    assert(s.NQ % s.NKV == 0 && (s.query_offset == 0 || s.B == 1));
    CHECK(s.D > 0 && s.DV > 0 && s.D <= 8 * TILE && s.DV <= 8 * TILE,
          "attention: heads of width %d and %d; the maximum is %d", s.D, s.DV, 8 * TILE);
}

static inline void attention_builtin_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                             AttentionShape s) {
    attention_check(s);
    bool wide_qk = attention_wide_qk(s, q, k), wide_v = packed(s.DV, v) && packed(s.ldkv) && packed(s.v_head);
#define ATTENTION_FORWARD(PIECES)                                                                                    \
    LAUNCH((attention_forward_kernel<PIECES>), attention_grid(s, s.NQ, TILE), TILE_THREADS, 0, out, lse, q, k, v, s, \
           wide_qk, wide_v)
    ATTENTION_PIECES(s.DV, ATTENTION_FORWARD);
#undef ATTENTION_FORWARD
}

// ---------------------------------------------------------------------------------------------------
// Backward

// The inputs of all three kernels.
typedef struct {
    const floatX *dout, *q, *k, *v;
    const real *lse, *delta;
    AttentionShape shape;
    bool wide_qk, wide_v, wide_o;
} AttentionBackward;

template <int W>
static __global__ void attention_delta_kernel(int lanes, real *delta, const floatX *dout, const floatX *out,
                                              AttentionShape s) {
    unsigned row = row_index(lanes), n = row / (unsigned)s.NQ, h = row % (unsigned)s.NQ, T = (unsigned)s.T;
    int lane = row_lane(lanes);
    bool active = n < (unsigned)s.B * T;
    size_t at = n * (size_t)s.ldo + h * (size_t)s.o_head;
    float dot = 0, o[W], g[W];
    for (int c = lane * W; active && c < s.DV; c += lanes * W) {
        load<W>(o, out + at + c);
        load<W>(g, dout + at + c);
        UNROLL
        for (int k = 0; k < W; k++) dot += o[k] * g[k];
    }
    dot = lanes_sum(dot, lanes);
    if (active && lane == 0) delta[(n / T * (size_t)s.NQ + h) * T + n % T] = dot;
}

template <int PIECES>
static __global__ void __launch_bounds__(TILE_THREADS, PIECES <= 2 ? 2 : 1)
    attention_dq_kernel(floatX *dq, AttentionBackward a) {
    SHARED(float4, operands4, TILE_OPERANDS / 4);
    SHARED(float4, scores4, TILE_SCORES / 4);
    float *operands = (float *)(void *)operands4, *scores = (float *)(void *)scores4;
    AttentionShape s = a.shape;
    const AttentionTile tile = attention_tile(TILE);
    if (tile.head >= s.B * s.NQ) return;
    const int t0 = tile.t0, t = t0 + (int)threadIdx.x / 16 * 4, keys = min(t0 + TILE, s.T);
    int low[4];
    AttentionPlace at = attention_place(s, tile.head / s.NQ, tile.head % s.NQ);
    TileRows queries = tile_rows(a.q + at.q, t0, s.T, s.ldq, s.D, a.wide_qk);
    TileRows gradients = tile_rows(a.dout + at.o, t0, s.T, s.ldo, s.DV, a.wide_o);
    float out[PIECES][4][4], lse[4], delta[4], factor[4] = {s.scale, s.scale, s.scale, s.scale};
    tile_clear<PIECES>(out);
    for (int r = 0; r < 4; r++) {
        low[r] = attention_first_key(s, at.b, t + r);
        lse[r] = t + r < s.T ? a.lse[at.lse + (t + r)] : 0;
        delta[r] = t + r < s.T ? a.delta[at.lse + (t + r)] : 0;
    }
    for (int k0 = attention_first_key(s, at.b, t0) / TILE * TILE; k0 < keys; k0 += TILE) {
        float acc[2][4][4]; // S, dP
        int key = k0 + (int)threadIdx.x % 16 * 4;
        TileRows tile_of_k = tile_rows(a.k + at.kv_k, k0, keys, s.ldkv, s.D, a.wide_qk);
        tile_clear<2>(acc);
        tile_dot(acc[0], queries, tile_of_k, operands); // S = scale Q K^T, recomputed
        // dP = dO V^T
        tile_dot(acc[1], gradients, tile_rows(a.v + at.kv_v, k0, keys, s.ldkv, s.DV, a.wide_v), operands);
        for (int r = 0; r < 4; r++)
            for (int c = 0; c < 4; c++)
                acc[0][r][c] =
                    attention_probability(acc[0][r][c], lse[r], t + r, low[r], key + c, s) * (acc[1][r][c] - delta[r]);
        tile_store_scores(scores, acc[0]);
        tile_accumulate<PIECES>(out, scores, tile_of_k, operands); // dQ = scale dS K
    }
    tile_write<PIECES>(dq + at.q + (size_t)t0 * s.ldq, s.ldq, queries.count, s.D, out, factor, false);
}

// dK (of_k) or dV of 64 keys; rows are keys, columns are queries.
template <int PIECES, bool of_k>
static __global__ void __launch_bounds__(TILE_THREADS)
    attention_dkv_kernel(floatX *result, AttentionBackward a, bool add) {
    SHARED(float4, operands4, TILE_OPERANDS / 4);
    SHARED(float4, scores4, TILE_SCORES / 4);
    float *operands = (float *)(void *)operands4, *scores = (float *)(void *)scores4;
    AttentionShape s = a.shape;
    int heads = s.B * s.NKV, head = (int)blockIdx.x % heads, k0 = (int)blockIdx.x / heads * TILE; // the longest first
    int group = s.NQ / s.NKV, b = head / s.NKV, kv = head % s.NKV, rows = min(TILE, s.T - k0);
    int key = k0 + (int)threadIdx.x / 16 * 4;
    float f = of_k ? s.scale : 1, out[PIECES][4][4], factor[4] = {f, f, f, f};
    tile_clear<PIECES>(out);
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        AttentionPlace at = attention_place(s, b, h);
        TileRows keys = tile_rows(a.k + at.kv_k, k0, s.T, s.ldkv, s.D, a.wide_qk);
        TileRows values = tile_rows(a.v + at.kv_v, k0, s.T, s.ldkv, s.DV, a.wide_v);
        // first keys are nondecreasing: after a tile of queries that begin beyond these keys, no row attends to them
        for (int t0 = k0; t0 < s.T && attention_first_key(s, b, t0) < k0 + rows; t0 += TILE) {
            float acc[2][4][4]; // S^T, dP^T
            int t = t0 + (int)threadIdx.x % 16 * 4;
            TileRows queries = tile_rows(a.q + at.q, t0, s.T, s.ldq, s.D, a.wide_qk);
            TileRows gradients = tile_rows(a.dout + at.o, t0, s.T, s.ldo, s.DV, a.wide_o);
            tile_clear<2>(acc);
            tile_dot(acc[0], keys, queries, operands);                         // S^T = scale K Q^T, recomputed
            if constexpr (of_k) tile_dot(acc[1], values, gradients, operands); // dP^T = V dO^T
            for (int c = 0; c < 4; c++) {
                bool exists = t + c < s.T;
                int low = attention_first_key(s, b, t + c);
                float lse = exists ? a.lse[at.lse + (t + c)] : 0, delta = exists ? a.delta[at.lse + (t + c)] : 0;
                for (int r = 0; r < 4; r++) {
                    acc[0][r][c] = attention_probability(acc[0][r][c], lse, t + c, low, key + r, s);
                    if (of_k) acc[0][r][c] *= acc[1][r][c] - delta;
                }
            }
            tile_store_scores(scores, acc[0]);
            // dK = scale dS^T Q, dV = P^T dO
            tile_accumulate<PIECES>(out, scores, of_k ? queries : gradients, operands);
        }
    }
    size_t at = (size_t)b * s.T + k0;
    floatX *to = result + at * s.ldkv + kv * (of_k ? s.k_head : s.v_head);
    tile_write<PIECES>(to, s.ldkv, rows, of_k ? s.D : s.DV, out, factor, add);
}

// Returns whether it has also computed rope_backward.
static inline bool attention_builtin_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                              const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                              AttentionShape s, bool add_dv) {
    attention_check(s);
    assert(s.query_offset == 0);
    if (attention_mma_backward_fits(s) && packed(0, dq, dk, dv, dout, out, q, k, v)) {
        AttentionBackwardMma mma = {dq, dk, dv, dout, q, k, v, nullptr, nullptr, nullptr, s, 0, add_dv};
        const BackwardInputs in = {dout, out, nullptr, nullptr, nullptr, lse, 0, 0, 0, S_LINEAR};
        return attention_mma_backward<1>(mma, in, s);
    }
    real *delta = ops_workspace_take(attention_builtin_workspace_bytes(s));
    AttentionBackward a;
    a.dout = dout, a.q = q, a.k = k, a.v = v;
    a.lse = lse, a.delta = delta;
    a.shape = s;
    a.wide_qk = attention_wide_qk(s, q, k);
    a.wide_v = packed(s.DV, v) && packed(s.ldkv) && packed(s.v_head);
    a.wide_o = packed(s.DV, dout) && packed(s.ldo) && packed(s.o_head);
    bool wide = a.wide_o && packed(0, out);
    LAUNCH_ROWS(attention_delta_kernel, wide, (size_t)s.B * s.T * s.NQ, s.DV, delta, dout, out, s);
    unsigned keys = blocks_of((size_t)s.B * s.NKV * ((s.T - 1) / TILE + 1), 1);
#define ATTENTION_DQ(PIECES) \
    LAUNCH((attention_dq_kernel<PIECES>), attention_grid(s, s.NQ, TILE), TILE_THREADS, 0, dq, a)
#define ATTENTION_DK(PIECES) LAUNCH((attention_dkv_kernel<PIECES, true>), keys, TILE_THREADS, 0, dk, a, false)
#define ATTENTION_DV(PIECES) LAUNCH((attention_dkv_kernel<PIECES, false>), keys, TILE_THREADS, 0, dv, a, add_dv)
    ATTENTION_PIECES(s.D, ATTENTION_DQ);
    ATTENTION_PIECES(s.D, ATTENTION_DK);
    ATTENTION_PIECES(s.DV, ATTENTION_DV);
    return false;
#undef ATTENTION_DQ
#undef ATTENTION_DK
#undef ATTENTION_DV
}
