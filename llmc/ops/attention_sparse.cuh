/*
attention_sparse.cuh: the CUDA twin of attention_sparse.h. Equations in attention.h.

  mapping   here, in fp32 and for wide heads: forward, dQ: a block per query row and head, over the keys of its list.
            dK, dV: a block per key, over the rows whose lists have its block and all query heads of its group. Each sum
            is one thread's, in a fixed order: no atomics. attention_sparse_mma.cuh: the same on tensor cores
  traffic   (K + 2) S (D + DV) elements per row and head, from L2
  numerics  products and sums in fp32, outputs rounded once
*/
#pragma once
#include "attention_sparse_mma.cuh"

enum { SPARSE_COLUMNS = 4 }; // of a head, per thread of SPARSE_THREADS

// The keys of a row and head: those of its list from `low` to `position`.
typedef struct {
    SparsePlace at;
    size_t q, o, lse; // offsets
} SparseRow;
static __device__ inline SparseRow sparse_row_of(const SparseCall &a, size_t item) {
    const AttentionShape &s = a.s;
    const int h = (int)(item % (unsigned)s.NQ), group = s.NQ / s.NKV;
    const size_t n = item / (unsigned)s.NQ;
    SparseRow r;
    r.at = sparse_place(a, n, h / group, sparse_kind(s, h));
    r.q = n * s.ldq + (size_t)h * s.q_head, r.o = n * s.ldo + (size_t)h * s.o_head;
    r.lse = ((size_t)r.at.b * s.NQ + h) * s.T + r.at.t;
    return r;
}
static __device__ inline void sparse_read(float *to, const floatX *from, int width) {
    for (int c = (int)threadIdx.x; c < width; c += SPARSE_THREADS) to[c] = to_float(from[c]);
}
static __device__ inline float sparse_dot(const float *a, const floatX *b, int width) {
    float dot = 0;
    for (int c = 0; c < width; c++) dot += a[c] * to_float(b[c]);
    return dot;
}

static __global__ void __launch_bounds__(SPARSE_THREADS) sparse_forward_kernel(floatX *out, real *lse, SparseCall a) {
    SHARED(float, q, SPARSE_QUERY);
    SHARED(float, p, SPARSE_THREADS);
    SHARED(float, memory, WARP);
    const AttentionShape &s = a.s;
    const SparseRow r = sparse_row_of(a, blockIdx.x);
    const int thread = (int)threadIdx.x;
    float o[SPARSE_COLUMNS] = {0}, top = -8e37f, sum = 0; // below any score, finite
    sparse_read(q, a.q + r.q, s.D);
    __syncthreads();
    for (int i = 0, from, end; i < sparse_width(s.sparse) && r.at.list[i] >= 0; i++) {
        sparse_span(&from, &end, a, r.at, i);
        for (int k0 = from; k0 < end; k0 += SPARSE_THREADS) {
            bool is = k0 + thread < end;
            float score = is ? s.scale * sparse_dot(q, a.k + r.at.k + sparse_key(a, k0 + thread), s.D) : -INFINITY;
            float before = top, e;
            top = fmaxf(top, block_max(score, memory));
            p[thread] = e = expf(score - top);
            sum = sum * expf(before - top) + block_sum(e, memory); // its barriers follow the writes of p
            for (int c = 0; c < SPARSE_COLUMNS; c++) {
                int column = c * SPARSE_THREADS + thread;
                if (column >= s.DV) break;
                o[c] *= expf(before - top);
                for (int j = 0; j < min((int)SPARSE_THREADS, end - k0); j++)
                    o[c] += p[j] * to_float(a.v[r.at.v + sparse_key(a, k0 + j) + column]);
            }
            __syncthreads();
        }
    }
    for (int c = 0; c < SPARSE_COLUMNS; c++)
        if (c * SPARSE_THREADS + thread < s.DV) round_to(&out[r.o + c * SPARSE_THREADS + thread], o[c] / sum);
    if (lse && thread == 0) lse[r.lse] = top + logf(sum);
}

static __global__ void __launch_bounds__(SPARSE_THREADS) sparse_dq_kernel(floatX *dq, SparseCall a) {
    SHARED(float, q, SPARSE_QUERY);
    SHARED(float, g, SPARSE_QUERY);
    SHARED(float, ds, SPARSE_THREADS);
    const AttentionShape &s = a.s;
    const SparseRow r = sparse_row_of(a, blockIdx.x);
    const int thread = (int)threadIdx.x;
    const float l = a.lse[r.lse], delta = a.delta[r.lse];
    float sum[SPARSE_COLUMNS] = {0};
    sparse_read(q, a.q + r.q, s.D);
    sparse_read(g, a.dout + r.o, s.DV);
    __syncthreads();
    for (int i = 0, from, end; i < sparse_width(s.sparse) && r.at.list[i] >= 0; i++) {
        sparse_span(&from, &end, a, r.at, i);
        for (int k0 = from; k0 < end; k0 += SPARSE_THREADS) {
            if (k0 + thread < end) { // S = scale Q K^T, recomputed; dP = dO V^T
                size_t at = sparse_key(a, k0 + thread);
                float p = expf(s.scale * sparse_dot(q, a.k + r.at.k + at, s.D) - l);
                ds[thread] = p * (sparse_dot(g, a.v + r.at.v + at, s.DV) - delta);
            }
            __syncthreads();
            for (int c = 0; c < SPARSE_COLUMNS; c++) {
                int column = c * SPARSE_THREADS + thread;
                if (column >= s.D) break;
                for (int j = 0; j < min((int)SPARSE_THREADS, end - k0); j++) // dQ = scale dS K
                    sum[c] += ds[j] * to_float(a.k[r.at.k + sparse_key(a, k0 + j) + column]);
            }
            __syncthreads();
        }
    }
    for (int c = 0; c < SPARSE_COLUMNS; c++)
        if (c * SPARSE_THREADS + thread < s.D) round_to(&dq[r.q + c * SPARSE_THREADS + thread], s.scale * sum[c]);
}

static __global__ void __launch_bounds__(SPARSE_THREADS, 7)
    sparse_dkv_kernel(floatX *dk, floatX *dv, SparseCall a, bool add_dv) {
    SHARED(float, k, SPARSE_QUERY);
    SHARED(float, v, SPARSE_QUERY);
    SHARED(float, p, SPARSE_THREADS);
    SHARED(float, ds, SPARSE_THREADS);
    const AttentionShape &s = a.s;
    const int thread = (int)threadIdx.x, kv = (int)blockIdx.x % s.NKV, n = (int)blockIdx.x / s.NKV, b = n / s.T;
    const int key = n % s.T, group = s.NQ / s.NKV, block = key / s.sparse.size, width = sparse_width(s.sparse);
    const size_t k_at = (size_t)n * s.ldkv + (size_t)kv * s.k_head, v_at = (size_t)n * s.ldkv + (size_t)kv * s.v_head;
    float sum_k[SPARSE_COLUMNS] = {0}, sum_v[SPARSE_COLUMNS] = {0};
    sparse_read(k, a.k + k_at, s.D);
    sparse_read(v, a.v + v_at, s.DV);
    __syncthreads();
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        const SparseRows of = sparse_rows_of(a, b, kv, sparse_kind(s, h), block);
        const size_t row0 = (size_t)b * s.T;
        const floatX *q = a.q + row0 * s.ldq + (size_t)h * s.q_head, *g = a.dout + row0 * s.ldo + (size_t)h * s.o_head;
        for (int r0 = 0; r0 < of.count; r0 += SPARSE_THREADS) {
            int count = min((int)SPARSE_THREADS, of.count - r0);
            if (thread < count) {
                int t = of.entries[r0 + thread] / width;
                size_t at = ((size_t)b * s.NQ + h) * s.T + t;
                bool sees = t >= key && attention_low(s, b, t) <= key;
                float x = sees ? expf(s.scale * sparse_dot(k, q + (size_t)t * s.ldq, s.D) - a.lse[at]) : 0;
                p[thread] = x; // P^T, dS^T
                ds[thread] = sees ? x * (sparse_dot(v, g + (size_t)t * s.ldo, s.DV) - a.delta[at]) : 0;
            }
            __syncthreads();
            for (int c = 0; c < SPARSE_COLUMNS; c++)
                for (int i = 0, column = c * SPARSE_THREADS + thread; i < count; i++) {
                    size_t t = (size_t)(of.entries[r0 + i] / width);
                    if (column < s.D) sum_k[c] += ds[i] * to_float(q[t * s.ldq + column]);
                    if (column < s.DV) sum_v[c] += p[i] * to_float(g[t * s.ldo + column]);
                }
            __syncthreads();
        }
    }
    for (int c = 0; c < SPARSE_COLUMNS; c++) {
        int column = c * SPARSE_THREADS + thread;
        if (column < s.D) round_to(&dk[k_at + column], s.scale * sum_k[c]); // dK = scale dS^T Q
        if (column < s.DV)                                                  // dV = P^T dO
            round_to(&dv[v_at + column], sum_v[c] + (add_dv ? to_float(dv[v_at + column]) : 0));
    }
}

// The arrays of a call that gathers rows, in the workspace; returns the address of the partial results.
static inline float *sparse_arrays(SparseCall *a, bool tensor_cores, real **delta) {
    const AttentionShape s = a->s;
    float *memory = ops_workspace_take(sparse_device_bytes(s, tensor_cores));
    *delta = memory + (tensor_cores ? sparse_heads_at_once(s) * sparse_partial_bytes(s) / sizeof(float) : 0);
    a->counts = (int *)(void *)(*delta + (size_t)s.B * s.NQ * s.T);
    a->starts = a->counts + sparse_all_blocks(s);
    a->rows = a->starts + sparse_all_blocks(s);
    sparse_gather(*a);
    return memory;
}

// first: the positions in a cache, or nullptr
static inline void sparse_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                  const int *first, int capacity, AttentionShape s) {
    attention_check(s);
    SparseCall a = {q, k, v, nullptr, nullptr, nullptr, first, capacity, nullptr, nullptr, nullptr, s};
    real *delta;
    if (!sparse_mma_fits(s) || !packed(0, out, q, k, v))
        LAUNCH(sparse_forward_kernel, blocks_of((size_t)s.B * s.T * s.NQ, 1), SPARSE_THREADS, 0, out, lse, a);
    else if (first || s.first || s.sparse.base) sparse_forward_rows(out, lse, a);
    else {
        float *parts = sparse_arrays(&a, true, &delta);
        sparse_by_blocks(out, lse, a, parts, false);
    }
}
static inline void sparse_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                   const real *lse, const floatX *q, const floatX *k, const floatX *v, AttentionShape s,
                                   bool add_dv) {
    attention_check(s);
    const bool tensor_cores = sparse_mma_fits(s) && packed(0, dq, dk, dv, dout, q, k, v);
    const bool wide = packed(s.DV, dout, out) && packed(s.ldo) && packed(s.o_head);
    SparseCall a = {q, k, v, dout, lse, nullptr, nullptr, 0, nullptr, nullptr, nullptr, s};
    real *delta;
    float *parts = sparse_arrays(&a, tensor_cores, &delta);
    a.delta = delta;
    LAUNCH_ROWS(attention_delta_kernel, wide, (size_t)s.B * s.T * s.NQ, s.DV, delta, dout, out, s);
    if (tensor_cores) {
        sparse_by_blocks(dq, nullptr, a, parts, true);
        sparse_dkv_mma(dk, dv, a, add_dv);
    } else {
        LAUNCH(sparse_dq_kernel, blocks_of((size_t)s.B * s.T * s.NQ, 1), SPARSE_THREADS, 0, dq, a);
        LAUNCH(sparse_dkv_kernel, blocks_of((size_t)s.B * s.T * s.NKV, 1), SPARSE_THREADS, 0, dk, dv, a, add_dv);
    }
}
