/*
attention_sparse.cuh: the CUDA twin of attention_sparse.h. Equations in attention.h.

  mapping   forward, dQ: a block per query row and head, over the keys of its list. dK, dV: a block per key, over the
            rows whose lists have its block, gathered by sparse_rows_kernel, and all query heads of its group. Each sum
            is one thread's, in a fixed order: no atomics
  why       A tile of tensor cores would need 16 rows or more that read the same keys. A row has only the heads of its
            group in common, 2 to 8. The lists of 64 neighbouring rows have up to 64 K blocks together, so tiles with
            masks would compute with all T keys in the worst case. Rows gathered by block would fill tiles, but their
            partial outputs take (K + 2) DV fp32 numbers per row and head. So work is proportional to K here, on the
            fp32 units, and the kernels on tensor cores remain faster where (K + 2) S is not far below T / 2
  traffic   (K + 2) S (D + DV) elements per row and head, from L2
  numerics  products and sums in fp32, outputs rounded once
*/
#ifndef LLMC_ATTENTION_SPARSE_CUH
#define LLMC_ATTENTION_SPARSE_CUH
#include "attention_kernels.cuh"
#include "sparse.cuh"

enum { SPARSE_COLUMNS = 4 }; // of a head, per thread of SPARSE_THREADS

typedef struct {
    const floatX *q, *k, *v, *dout;
    const real *lse, *delta;
    const int *first; // of a cache: the position of each sequence; nullptr: rows s.first + t
    int capacity;     // of a cache
    int *starts, *rows;
    AttentionShape s;
} SparseCall;

// The keys of a row and head: those of its list from `low` to `position`.
typedef struct {
    int b, t, h, position, low;
    size_t q, o, k, v, lse; // offsets; k, v: of the sequence
    const int *list;
} SparseRow;
static __device__ inline SparseRow sparse_row_of(const SparseCall &a, size_t item) {
    const AttentionShape &s = a.s;
    SparseRow r;
    size_t n = item / (unsigned)s.NQ;
    r.h = (int)(item % (unsigned)s.NQ), r.b = (int)(n / (unsigned)s.T), r.t = (int)(n % (unsigned)s.T);
    r.position = a.first ? a.first[r.b] : s.first + r.t;
    r.low = a.first ? max(0, r.position - a.capacity + 1) : attention_low(s, r.b, r.t);
    size_t sequence = (size_t)r.b * (a.first ? a.capacity : s.first + s.T) * s.ldkv, kv = r.h / (s.NQ / s.NKV);
    r.q = n * s.ldq + (size_t)r.h * s.q_head, r.o = n * s.ldo + (size_t)r.h * s.o_head;
    r.k = sequence + kv * s.k_head, r.v = sequence + kv * s.v_head;
    r.lse = ((size_t)r.b * s.NQ + r.h) * s.T + r.t;
    r.list = s.sparse.lists + sparse_list(s, r.b, r.h) + (size_t)r.t * sparse_width(s.sparse);
    return r;
}
// The keys [*from, *end) of block i of the list; their rows are taken modulo the capacity of a cache.
static __device__ inline void sparse_span(int *from, int *end, const SparseCall &a, const SparseRow &r, int i) {
    int begin = r.list[i] * a.s.sparse.size - a.s.sparse.base;
    *from = max(r.low, begin), *end = min(r.position + 1, begin + a.s.sparse.size);
}
static __device__ inline size_t sparse_key(const SparseCall &a, int p) {
    return (size_t)(a.first ? p % a.capacity : p) * a.s.ldkv;
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
    for (int i = 0, from, end; i < sparse_width(s.sparse) && r.list[i] >= 0; i++) {
        sparse_span(&from, &end, a, r, i);
        for (int k0 = from; k0 < end; k0 += SPARSE_THREADS) {
            bool is = k0 + thread < end;
            float score = is ? s.scale * sparse_dot(q, a.k + r.k + sparse_key(a, k0 + thread), s.D) : -INFINITY;
            float before = top, e;
            top = fmaxf(top, block_max(score, memory));
            p[thread] = e = expf(score - top);
            sum = sum * expf(before - top) + block_sum(e, memory); // its barriers follow the writes of p
            for (int c = 0; c < SPARSE_COLUMNS; c++) {
                int column = c * SPARSE_THREADS + thread;
                if (column >= s.DV) break;
                o[c] *= expf(before - top);
                for (int j = 0; j < min((int)SPARSE_THREADS, end - k0); j++)
                    o[c] += p[j] * to_float(a.v[r.v + sparse_key(a, k0 + j) + column]);
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
    for (int i = 0, from, end; i < sparse_width(s.sparse) && r.list[i] >= 0; i++) {
        sparse_span(&from, &end, a, r, i);
        for (int k0 = from; k0 < end; k0 += SPARSE_THREADS) {
            if (k0 + thread < end) { // S = scale Q K^T, recomputed; dP = dO V^T
                size_t at = sparse_key(a, k0 + thread);
                float p = expf(s.scale * sparse_dot(q, a.k + r.k + at, s.D) - l);
                ds[thread] = p * (sparse_dot(g, a.v + r.v + at, s.DV) - delta);
            }
            __syncthreads();
            for (int c = 0; c < SPARSE_COLUMNS; c++) {
                int column = c * SPARSE_THREADS + thread;
                if (column >= s.D) break;
                for (int j = 0; j < min((int)SPARSE_THREADS, end - k0); j++) // dQ = scale dS K
                    sum[c] += ds[j] * to_float(a.k[r.k + sparse_key(a, k0 + j) + column]);
            }
            __syncthreads();
        }
    }
    for (int c = 0; c < SPARSE_COLUMNS; c++)
        if (c * SPARSE_THREADS + thread < s.D) round_to(&dq[r.q + c * SPARSE_THREADS + thread], s.scale * sum[c]);
}

// A block per list: the rows that have block j are rows[starts[j]] .. rows[starts[j+1]-1], in ascending order.
// starts (lists, count + 2), rows (lists, T (blocks + 2))
static __global__ void sparse_rows_kernel(SparseCall a) {
    const AttentionShape &s = a.s;
    const int width = sparse_width(s.sparse), entries = s.T * width, blocks = s.sparse.count + 1;
    int *starts = a.starts + blockIdx.x * (size_t)(blocks + 1), *rows = a.rows + blockIdx.x * (size_t)entries;
    const int *list = s.sparse.lists + blockIdx.x * (size_t)entries;
    for (int j = (int)threadIdx.x; j < blocks; j += SPARSE_THREADS) {
        int n = 0;
        for (int i = 0; i < entries; i++) n += list[i] == j;
        starts[j + 1] = n;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        starts[0] = 0;
        for (int j = 0; j < blocks; j++) starts[j + 1] += starts[j];
    }
    __syncthreads();
    for (int j = (int)threadIdx.x; j < blocks; j += SPARSE_THREADS)
        for (int i = 0, n = starts[j]; i < entries; i++)
            if (list[i] == j) rows[n++] = i / width;
}

static __global__ void __launch_bounds__(SPARSE_THREADS)
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
        size_t list = sparse_list(s, b, h) / ((size_t)s.T * width), row0 = (size_t)b * s.T;
        const int *starts = a.starts + list * (s.sparse.count + 2), *rows = a.rows + list * s.T * width;
        const floatX *q = a.q + row0 * s.ldq + (size_t)h * s.q_head, *g = a.dout + row0 * s.ldo + (size_t)h * s.o_head;
        for (int r0 = starts[block]; r0 < starts[block + 1]; r0 += SPARSE_THREADS) {
            int count = min((int)SPARSE_THREADS, starts[block + 1] - r0);
            if (thread < count) {
                int t = rows[r0 + thread];
                size_t at = ((size_t)b * s.NQ + h) * s.T + t;
                bool sees = t >= key && attention_low(s, b, t) <= key;
                float x = sees ? expf(s.scale * sparse_dot(k, q + (size_t)t * s.ldq, s.D) - a.lse[at]) : 0;
                p[thread] = x; // P^T, dS^T
                ds[thread] = sees ? x * (sparse_dot(v, g + (size_t)t * s.ldo, s.DV) - a.delta[at]) : 0;
            }
            __syncthreads();
            for (int c = 0; c < SPARSE_COLUMNS; c++)
                for (int i = 0, column = c * SPARSE_THREADS + thread; i < count; i++) {
                    size_t t = rows[r0 + i];
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

static inline size_t sparse_lists_count(AttentionShape s) { return (size_t)s.B * s.NKV * s.sparse.kinds; }
// Of the backward: delta, and the rows of each block.
static inline size_t sparse_workspace_bytes(AttentionShape s) {
    size_t rows = (size_t)s.T * sparse_width(s.sparse) + s.sparse.count + 2;
    return (size_t)s.B * s.NQ * s.T * sizeof(real) + sparse_lists_count(s) * rows * sizeof(int);
}
// first: the positions in a cache, or nullptr
static inline void sparse_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                  const int *first, int capacity, AttentionShape s) {
    attention_check(s);
    SparseCall a = {q, k, v, nullptr, nullptr, nullptr, first, capacity, nullptr, nullptr, s};
    LAUNCH(sparse_forward_kernel, blocks_of((size_t)s.B * s.T * s.NQ, 1), SPARSE_THREADS, 0, out, lse, a);
}
static inline void sparse_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                   const real *lse, const floatX *q, const floatX *k, const floatX *v, AttentionShape s,
                                   bool add_dv) {
    attention_check(s);
    real *delta = ops_workspace_take(sparse_workspace_bytes(s));
    int *starts = (int *)(void *)(delta + (size_t)s.B * s.NQ * s.T);
    SparseCall a = {q, k, v, dout, lse, delta, nullptr, 0, starts, nullptr, s};
    a.rows = starts + sparse_lists_count(s) * (size_t)(s.sparse.count + 2);
    bool wide = packed(s.DV, dout, out) && packed(s.ldo) && packed(s.o_head);
    LAUNCH_ROWS(attention_delta_kernel, wide, (size_t)s.B * s.T * s.NQ, s.DV, delta, dout, out, s);
    LAUNCH(sparse_rows_kernel, blocks_of(sparse_lists_count(s), 1), SPARSE_THREADS, 0, a);
    LAUNCH(sparse_dq_kernel, blocks_of((size_t)s.B * s.T * s.NQ, 1), SPARSE_THREADS, 0, dq, a);
    LAUNCH(sparse_dkv_kernel, blocks_of((size_t)s.B * s.T * s.NKV, 1), SPARSE_THREADS, 0, dk, dv, a, add_dv);
}
#endif
