/*
attention_sparse.cuh: the CUDA twin of attention_sparse.h. Equations in attention.h.

  mapping   lanes of a warp share a row of keys, values or queries (launch_heads); a warp reads several whole rows at a
            time. Forward and dQ: a warp per query row and head, whose groups of lanes divide the keys of its
            list; with a cache, which has few rows, a block. Neighbouring warps are heads of one group, and find its
            keys in L1.
            dK, dV: a block per key, whose groups of lanes divide the rows whose lists have its block, for each query
            head of its group. The groups' sums are added in order: no atomics
  loads     each lane reads a pack of 16 bytes, and neighbouring lanes neighbouring packs: a load of a warp is
            512 / (2 D) rows of 2 D bytes of bf16. One element a lane where rows cannot be read in packs. The lists,
            by block, are read 32 entries at a time
  traffic   (K + 2) S (D + DV) elements per row and head, from L1 and L2
  numerics  products and sums in fp32, outputs rounded once
  source    keys are gathered as in MoBA (sparse.h)
*/
#pragma once
#include "attention_kernels.cuh"
#include "attention_sparse_apart.h"
#include "rope.cuh"
#include "sparse.cuh"

typedef struct {
    const floatX *q, *k, *v, *dout;
    const real *lse, *delta;
    const int *first;                  // with a cache: the position of each sequence; nullptr: rows query_offset + t
    int capacity;                      // positions of the cache
    int *counts, *block_starts, *rows; // only for the backward: sparse_rows_kernel
    AttentionShape s;
} SparseCall;

// ---------------------------------------------------------------------------------------------------
// Lists

// The keys that row n and the heads of a group read: the keys of the list from `low` to `position`.
typedef struct {
    const int *list;
    int b, t, position, low;
    size_t k, v; // offsets of the sequence and key/value head
} SparsePlace;
static __device__ inline SparsePlace sparse_place(const SparseCall &a, size_t n, int kv) {
    const AttentionShape &s = a.s;
    SparsePlace p;
    p.b = (int)(n / (unsigned)s.T), p.t = (int)(n % (unsigned)s.T);
    p.position = a.first ? a.first[p.b] : s.query_offset + p.t;
    p.low = a.first ? max(0, p.position - a.capacity + 1) : attention_first_key(s, p.b, p.t);
    const size_t sequence = (size_t)p.b * (a.first ? a.capacity : s.query_offset + s.T) * s.ldkv;
    p.k = sequence + (size_t)kv * s.k_head, p.v = sequence + (size_t)kv * s.v_head;
    p.list = s.sparse.lists + ((size_t)(p.b * s.NKV + kv) * s.T + p.t) * sparse_width(s.sparse);
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
    return (size_t)s.B * s.NKV * sparse_blocks_of(s);
}

// The rows whose lists have a block, in ascending order.
typedef struct {
    const int *rows;
    int count;
} SparseRows;
static __device__ inline SparseRows sparse_rows_of(const SparseCall &a, int b, int kv, int block) {
    const AttentionShape &s = a.s;
    const size_t list = (size_t)(b * s.NKV + kv), i = list * sparse_blocks_of(s) + block;
    return {a.rows + list * s.T * sparse_width(s.sparse) + a.block_starts[i], a.counts[i]};
}

// A warp per list and block: counts, or with `fill` starts and rows. counts, starts (lists, blocks);
// rows (lists, T (blocks + 2))
static __global__ void __launch_bounds__(SPARSE_THREADS) sparse_rows_kernel(SparseCall a, bool fill) {
    enum { LOADS = 8 }; // in flight
    const AttentionShape &s = a.s;
    const size_t item = blockIdx.x * (size_t)(SPARSE_THREADS / WARP) + threadIdx.x / WARP;
    if (item >= sparse_all_blocks(s)) return;
    const int lane = (int)threadIdx.x % WARP, blocks = sparse_blocks_of(s), width = sparse_width(s.sparse);
    const int block = (int)(item % (unsigned)blocks), entries = s.T * width;
    const size_t list = item / (unsigned)blocks;
    const int *of = s.sparse.lists + list * entries;
    int at = 0;
    if (fill) { // the sum of the earlier blocks' counts
        for (int j = lane; j < block; j += WARP) at += a.counts[item - block + j];
        at = lanes_sum(at, WARP);
        if (lane == 0) a.block_starts[item] = at;
    }
    for (int e0 = block * s.sparse.size * width + lane; e0 - lane < entries; e0 += LOADS * WARP) { // not earlier rows
        bool has[LOADS];
        UNROLL
        for (int i = 0; i < LOADS; i++) has[i] = e0 + i * WARP < entries && of[e0 + i * WARP] == block;
        UNROLL
        for (int i = 0; i < LOADS; i++) {
            const unsigned all = __ballot_sync(ALL_LANES, has[i]);
            if (fill && has[i])
                a.rows[list * entries + at + __popc(all & ((1u << lane) - 1))] = (e0 + i * WARP) / width;
            at += __popc(all);
        }
    }
    if (!fill && lane == 0) a.counts[item] = at;
}

static inline void sparse_gather(const SparseCall &a) {
    for (int fill = 0; fill < 2; fill++)
        LAUNCH(sparse_rows_kernel, blocks_of(sparse_all_blocks(a.s), SPARSE_THREADS / WARP), SPARSE_THREADS, 0, a,
               fill != 0);
}

// ---------------------------------------------------------------------------------------------------
// Attention

// A thread's group of lanes: one of the `count` groups of an item, whose threads begin at `first`.
typedef struct {
    int index, count, first, lanes;
    size_t item;
} SparseGroup;
static __device__ inline SparseGroup sparse_group(int lanes, int warps) { // warps per item
    const int threads = warps * WARP, thread = (int)threadIdx.x;
    return {thread % threads / lanes, threads / lanes, thread / threads * threads, lanes,
            blockIdx.x * (size_t)(SPARSE_THREADS / threads) + (size_t)(thread / threads)};
}
// Adds the sums of the groups of an item, in order; each group has the result. memory: SPARSE_THREADS times the count
template <int W, int PACKS>
static __device__ inline void sparse_sum(float (&x)[PACKS][W], float *memory, const SparseGroup &g) {
    const int thread = (int)threadIdx.x, lane = g.first + row_lane(g.lanes);
    __syncthreads(); // earlier uses of the memory are complete
    UNROLL
    for (int i = 0; i < PACKS * W; i++) memory[i * SPARSE_THREADS + thread] = x[i / W][i % W];
    __syncthreads();
    UNROLL
    for (int i = 0; i < PACKS * W; i++) {
        float sum = 0;
        for (int j = 0; j < g.count; j++) sum += memory[i * SPARSE_THREADS + lane + j * g.lanes];
        x[i / W][i % W] = sum;
    }
}
template <int W, int PACKS> static __device__ inline void sparse_scale(float (&x)[PACKS][W], float factor) {
    UNROLL
    for (int i = 0; i < PACKS * W; i++) x[i / W][i % W] *= factor;
}
// y += x z
template <int W, int PACKS>
static __device__ inline void sparse_add(float (&y)[PACKS][W], float x, const float (&z)[PACKS][W]) {
    UNROLL
    for (int i = 0; i < PACKS * W; i++) y[i / W][i % W] += x * z[i / W][i % W];
}

// A row and head, and where its numbers begin. Warps beyond the last one compute the last one again.
typedef struct {
    SparsePlace at;
    bool is;
    size_t q, o, lse;
} SparseRow;
static __device__ inline SparseRow sparse_row_of(const SparseCall &a, size_t item) {
    const AttentionShape &s = a.s;
    const size_t count = (size_t)s.B * s.T * s.NQ, i = item < count ? item : count - 1, n = i / (unsigned)s.NQ;
    const int h = (int)(i % (unsigned)s.NQ);
    SparseRow r;
    r.at = sparse_place(a, n, h / (s.NQ / s.NKV)), r.is = item < count;
    r.q = n * s.ldq + (size_t)h * s.q_head, r.o = n * s.ldo + (size_t)h * s.o_head;
    r.lse = ((size_t)r.at.b * s.NQ + h) * s.T + r.at.t;
    return r;
}

template <int W, int PACKS>
static __global__ void __launch_bounds__(SPARSE_THREADS, W *PACKS > 8 ? 2 : 8)
    sparse_forward_kernel(int lanes, floatX *out, real *lse, SparseCall a, int warps) {
    SHARED(float, memory, SPARSE_THREADS *W *PACKS);
    const AttentionShape &s = a.s;
    const SparseGroup g = sparse_group(lanes, warps);
    const SparseRow r = sparse_row_of(a, g.item);
    float q[PACKS][W], k[PACKS][W], v[PACKS][W], o[PACKS][W] = {{0}}, sum[1][1] = {{0}};
    float top = -8e37f, most; // below any score, finite
    load_head(q, a.q + r.q, lanes, s.D);
    for (int i = 0, from, end; i < sparse_width(s.sparse) && r.at.list[i] >= 0; i++) {
        sparse_span(&from, &end, a, r.at, i);
        for (int k0 = from; k0 < end; k0 += g.count) { // S = scale Q K^T, O = P V
            const bool is = k0 + g.index < end;
            const size_t key = sparse_key(a, is ? k0 + g.index : k0);
            load_head(k, a.k + r.at.k + key, lanes, is ? s.D : 0);
            load_head(v, a.v + r.at.v + key, lanes, is ? s.DV : 0);
            const float score = s.scale * lanes_sum(head_dot(q, k), lanes), before = top;
            if (is) top = fmaxf(top, score);
            const float p = is ? expf(score - top) : 0, factor = expf(before - top);
            sum[0][0] = sum[0][0] * factor + p;
            sparse_scale(o, factor);
            sparse_add(o, p, v);
        }
    }
    memory[threadIdx.x] = most = top;
    __syncthreads();
    for (int j = 0; j < g.count; j++) most = fmaxf(most, memory[g.first + j * lanes]);
    const float factor = expf(top - most);
    sum[0][0] *= factor;
    sparse_scale(o, factor);
    sparse_sum(sum, memory, g);
    sparse_sum(o, memory, g);
    sparse_scale(o, 1 / sum[0][0]);
    if (!r.is || g.index > 0) return;
    store_head(out + r.o, o, lanes, s.DV);
    if (lse && row_lane(lanes) == 0) lse[r.lse] = most + logf(sum[0][0]);
}

template <int W, int PACKS>
static __global__ void __launch_bounds__(SPARSE_THREADS, W *PACKS > 8 ? 2 : 8)
    sparse_dq_kernel(int lanes, floatX *dq, SparseCall a) {
    SHARED(float, memory, SPARSE_THREADS *W *PACKS);
    const AttentionShape &s = a.s;
    const SparseGroup g = sparse_group(lanes, 1);
    const SparseRow r = sparse_row_of(a, g.item);
    const float l = a.lse[r.lse], delta = a.delta[r.lse];
    float q[PACKS][W], dout[PACKS][W], k[PACKS][W], v[PACKS][W], sum[PACKS][W] = {{0}};
    load_head(q, a.q + r.q, lanes, s.D);
    load_head(dout, a.dout + r.o, lanes, s.DV);
    for (int i = 0, from, end; i < sparse_width(s.sparse) && r.at.list[i] >= 0; i++) {
        sparse_span(&from, &end, a, r.at, i);
        for (int k0 = from; k0 < end; k0 += g.count) { // S = scale Q K^T, recomputed; dP = dO V^T; dQ = scale dS K
            const bool is = k0 + g.index < end;
            const size_t key = sparse_key(a, is ? k0 + g.index : k0);
            load_head(k, a.k + r.at.k + key, lanes, is ? s.D : 0);
            load_head(v, a.v + r.at.v + key, lanes, is ? s.DV : 0);
            const float score = s.scale * lanes_sum(head_dot(q, k), lanes), dp = lanes_sum(head_dot(dout, v), lanes);
            sparse_add(sum, is ? expf(score - l) * (dp - delta) : 0, k);
        }
    }
    sparse_sum(sum, memory, g);
    sparse_scale(sum, s.scale);
    if (r.is && g.index == 0) store_head(dq + r.q, sum, lanes, s.D);
}

template <int W, int PACKS>
static __global__ void __launch_bounds__(SPARSE_THREADS, W *PACKS > 8 ? 2 : 6)
    sparse_dkv_kernel(int lanes, floatX *dk, floatX *dv, SparseCall a, bool add_dv) {
    SHARED(float, memory, SPARSE_THREADS *W *PACKS);
    const AttentionShape &s = a.s;
    const SparseGroup g = sparse_group(lanes, SPARSE_THREADS / WARP);
    const int kv = (int)blockIdx.x % s.NKV, n = (int)blockIdx.x / s.NKV, b = n / s.T, key = n % s.T;
    const int group = s.NQ / s.NKV, block = key / s.sparse.size;
    const size_t k_at = (size_t)n * s.ldkv + (size_t)kv * s.k_head, v_at = (size_t)n * s.ldkv + (size_t)kv * s.v_head;
    float k[PACKS][W], v[PACKS][W], q[PACKS][W], dout[PACKS][W], sum_k[PACKS][W] = {{0}}, sum_v[PACKS][W] = {{0}};
    load_head(k, a.k + k_at, lanes, s.D);
    load_head(v, a.v + v_at, lanes, s.DV);
    const SparseRows of = sparse_rows_of(a, b, kv, block);
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        for (int r0 = 0; r0 < of.count; r0 += g.count) {
            const int t = r0 + g.index < of.count ? of.rows[r0 + g.index] : -1;
            const bool sees = t >= key && attention_first_key(s, b, t) <= key;
            const size_t row = (size_t)b * s.T + (size_t)(sees ? t : key);
            const size_t at = ((size_t)b * s.NQ + h) * s.T + (size_t)(sees ? t : key);
            load_head(q, a.q + row * s.ldq + (size_t)h * s.q_head, lanes, sees ? s.D : 0);
            load_head(dout, a.dout + row * s.ldo + (size_t)h * s.o_head, lanes, sees ? s.DV : 0);
            const float score = s.scale * lanes_sum(head_dot(k, q), lanes), dp = lanes_sum(head_dot(v, dout), lanes);
            const float p = sees ? expf(score - a.lse[at]) : 0;
            sparse_add(sum_v, p, dout);                              // dV = P^T dO
            sparse_add(sum_k, sees ? p * (dp - a.delta[at]) : 0, q); // dK = scale dS^T Q
        }
    }
    sparse_sum(sum_k, memory, g);
    sparse_sum(sum_v, memory, g);
    sparse_scale(sum_k, s.scale);
    if (g.index > 0) return;
    load_head(v, dv + v_at, lanes, add_dv ? s.DV : 0);
    sparse_add(sum_v, 1, v);
    store_head(dk + k_at, sum_k, lanes, s.D);
    store_head(dv + v_at, sum_v, lanes, s.DV);
}

// Calls launch as launch_heads, for rows of keys and values at these addresses.
template <typename Launch, typename... Pointers>
static inline void sparse_launch(const AttentionShape &s, Launch launch, Pointers... pointers) {
    launch_heads(attention_packed(s) && packed(0, pointers...), max_int(s.D, s.DV), launch);
}

static inline void sparse_attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                            const int *first, int capacity, AttentionShape s) {
    OPERATION();
    if (first) s.query_offset = 0; // not used
    attention_check(s);
    const SparseCall a = {q, k, v, nullptr, nullptr, nullptr, first, capacity, nullptr, nullptr, nullptr, s};
    const int warps = first ? SPARSE_THREADS / WARP : 1;
    const size_t rows = (size_t)s.B * s.T * s.NQ;
    sparse_launch(
        s,
        [&](auto width, auto packs, int lanes) {
            LAUNCH((sparse_forward_kernel<decltype(width)::value, decltype(packs)::value>),
                   blocks_of(rows * warps, SPARSE_THREADS / WARP), SPARSE_THREADS, 0, lanes, out, lse, a, warps);
        },
        out, q, k, v);
}

static inline void sparse_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                             const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                             AttentionShape s, bool add_dv) {
    {
        OPERATION();
        attention_check(s);
        const bool wide = packed(s.DV, dout, out) && packed(s.ldo) && packed(s.o_head);
        const size_t rows = (size_t)s.B * s.T * s.NQ;
        real *delta = ops_workspace_take(sparse_attention_workspace_bytes(s, 1));
        int *counts = (int *)(void *)(delta + rows), *starts = counts + sparse_all_blocks(s);
        const SparseCall a = {q, k, v, dout, lse, delta, nullptr, 0, counts, starts, starts + sparse_all_blocks(s), s};
        sparse_gather(a);
        LAUNCH_ROWS(attention_delta_kernel, wide, rows, s.DV, delta, dout, out, s);
        sparse_launch(
            s,
            [&](auto width, auto packs, int lanes) {
                LAUNCH((sparse_dq_kernel<decltype(width)::value, decltype(packs)::value>),
                       blocks_of(rows, SPARSE_THREADS / WARP), SPARSE_THREADS, 0, lanes, dq, a);
                LAUNCH((sparse_dkv_kernel<decltype(width)::value, decltype(packs)::value>),
                       blocks_of((size_t)s.B * s.T * s.NKV, 1), SPARSE_THREADS, 0, lanes, dk, dv, a, add_dv);
            },
            dq, dk, dv, dout, q, k, v);
    }
    if (s.rope) rope_backward(dq, s.rope, s.B, s.T, s.rope_heads, s.D, s.ldq, s.q_head, NULL);
}
