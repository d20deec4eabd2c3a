/*
attention: causal grouped-query attention, tile by tile. Equations in attention.h; what differs here:

  forward   a block per 64 queries of one head, over tiles of 64 keys with a running softmax; the scores exist only as
            one tile in registers and shared memory
  backward  no atomics: delta = rowsum(dO O) first, then a block per 64 queries for dQ, and blocks per 64 keys of a
            key/value head for dK and for dV, which add over the queries of all heads of the group in order. The scores
            are computed three times in all; in exchange each block needs registers for one result only, so heads of any
            width to 512 fit.
  shapes    any D and DV to 512, any strides; packs where widths, strides and addresses allow it
  numerics  products, softmax and sums in fp32, P and dS too; out, dq, dk, dv rounded once (with add_dv, dv + the sum).
            Sums run in one order, so results are the same bits in every run.
  traffic   q, out and per tile of queries k, v, from the cache
  flops     as counted by attention_forward_flops and attention_backward_flops; computed besides: the masked halves of
            the tiles on the diagonal and, in the backward, Q K^T twice and dO V^T once more
  use       the fp32 build, and what a library's kernel does not take (attention_library.cuh decides, and has
            attention_forward and attention_backward); it uses no tensor cores
*/
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH
#include "../cuda/attention_tile.cuh"

// of the backward: delta (B,NQ,T)
static inline size_t attention_builtin_workspace_bytes(AttentionShape s) {
    return (size_t)s.B * (size_t)s.NQ * (size_t)s.T * sizeof(real);
}

// What a block works on: head h of sequence b, and its tensors from the sequence's first row on.
typedef struct {
    int b, h;
    size_t q, kv_k, kv_v, o, lse; // offsets
} AttentionPlace;

static __device__ inline AttentionPlace attention_place(AttentionShape s, int b, int h) {
    AttentionPlace p;
    size_t row = (size_t)b * (size_t)s.T; // keys and values have first + T rows, but then B is 1
    int kv = h / (s.NQ / s.NKV);
    p.b = b;
    p.h = h;
    p.q = row * (size_t)s.ldq + (size_t)h * (size_t)s.q_head;
    p.kv_k = row * (size_t)s.ldkv + (size_t)kv * (size_t)s.k_head;
    p.kv_v = row * (size_t)s.ldkv + (size_t)kv * (size_t)s.v_head;
    p.o = row * (size_t)s.ldo + (size_t)h * (size_t)s.o_head;
    p.lse = ((size_t)b * (size_t)s.NQ + (size_t)h) * (size_t)s.T;
    return p;
}

// The first key that query row t of sequence b sees; beyond the last row: more than any.
static __device__ inline int attention_low(AttentionShape s, int b, int t) {
    if (t >= s.T) return INT_MAX;
    return s.first_key ? s.first_key[(size_t)b * (size_t)s.T + (size_t)t] : 0;
}

// P = exp(scale S - lse), 0 where row t does not see the key.
static __device__ inline float attention_probability(float score, float lse, int t, int low, int key,
                                                     AttentionShape s) {
    return key >= low && key <= s.first + t ? expf(s.scale * score - lse) : 0;
}

// ---------------------------------------------------------------------------------------------------
// Forward

// One tile of scores joins the running softmax of the thread's four rows; acc becomes P, out is brought to the new
// maximum.
template <int PIECES>
static __device__ inline void attention_softmax(float (&acc)[4][4], float (&out)[PIECES][4][4], float (&max)[4],
                                                float (&sum)[4], const int (&low)[4], int t, int key,
                                                AttentionShape s) {
    UNROLL
    for (int r = 0; r < 4; r++) {
        float largest = max[r], total = 0;
        UNROLL
        for (int c = 0; c < 4; c++) {
            bool visible = key + c >= low[r] && key + c <= s.first + t + r;
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
    int heads = s.B * s.NQ, tiles = (s.T + TILE - 1) / TILE, head = (int)blockIdx.x % heads;
    int t0 = (tiles - 1 - (int)blockIdx.x / heads) * TILE; // the longest first
    int t = t0 + (int)threadIdx.x / 16 * 4, rows = min(TILE, s.T - t0), keys = s.first + t0 + rows, low[4];
    AttentionPlace at = attention_place(s, head / s.NQ, head % s.NQ);
    float o[PIECES][4][4], max[4], sum[4], inverse[4];
    tile_clear<PIECES>(o);
    for (int r = 0; r < 4; r++) {
        max[r] = -8e37f; // below any score; finite, so that a row that sees no key of a tile stays right
        sum[r] = 0;
        low[r] = attention_low(s, at.b, t + r);
    }
    TileRows queries = tile_rows(q + at.q, t0, s.T, s.ldq, s.D, wide_qk);
    for (int k0 = attention_low(s, at.b, t0) / TILE * TILE; k0 < keys; k0 += TILE) {
        float acc[1][4][4];
        tile_clear<1>(acc);
        tile_dot(acc[0], queries, tile_rows(k + at.kv_k, k0, keys, s.ldkv, s.D, wide_qk), operands);
        attention_softmax<PIECES>(acc[0], o, max, sum, low, t, k0 + (int)threadIdx.x % 16 * 4, s);
        tile_store_scores(scores, acc[0]);
        tile_accumulate<PIECES>(o, scores, tile_rows(v + at.kv_v, k0, keys, s.ldkv, s.DV, wide_v), operands);
    }
    for (int r = 0; r < 4; r++) inverse[r] = 1 / sum[r];
    tile_write<PIECES>(out + at.o + (size_t)t0 * (size_t)s.ldo, s.ldo, rows, s.DV, o, inverse, false);
    if (lse && threadIdx.x % 16 == 0)
        for (int r = 0; r < 4; r++)
            if (t + r < s.T) lse[at.lse + (size_t)(t + r)] = max[r] + logf(sum[r]);
}

// Calls CALL(PIECES) for the least number of 64-column pieces that hold the width.
#define ATTENTION_PIECES(width, CALL)          \
    do {                                       \
        if ((width) <= TILE) CALL(1);          \
        else if ((width) <= 2 * TILE) CALL(2); \
        else if ((width) <= 4 * TILE) CALL(4); \
        else CALL(8);                          \
    } while (0)

static inline unsigned attention_blocks(size_t heads, int T) {
    return blocks_of(heads * (size_t)((T + TILE - 1) / TILE), 1);
}
static inline bool attention_wide_qk(AttentionShape s, const void *q, const void *k) {
    return packed((size_t)s.D, q, k) && packed((size_t)s.ldq) && packed((size_t)s.ldkv) && packed((size_t)s.q_head) &&
           packed((size_t)s.k_head);
}
static inline void attention_check(AttentionShape s) {
    assert(s.NQ % s.NKV == 0 && (s.first == 0 || s.B == 1));
    CHECK(s.D > 0 && s.DV > 0 && s.D <= 8 * TILE && s.DV <= 8 * TILE,
          "attention: heads of width %d and %d; up to %d can be computed", s.D, s.DV, 8 * TILE);
}

static inline void attention_builtin_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                             AttentionShape s) {
    attention_check(s);
    bool wide_qk = attention_wide_qk(s, q, k),
         wide_v = packed((size_t)s.DV, v) && packed((size_t)s.ldkv) && packed((size_t)s.v_head);
    unsigned blocks = attention_blocks((size_t)s.B * (size_t)s.NQ, s.T);
#define ATTENTION_FORWARD(PIECES) \
    LAUNCH((attention_forward_kernel<PIECES>), blocks, TILE_THREADS, 0, out, lse, q, k, v, s, wide_qk, wide_v)
    ATTENTION_PIECES(s.DV, ATTENTION_FORWARD);
#undef ATTENTION_FORWARD
}
#include "attention_backward.cuh"
#include "attention_library.cuh"
#endif
