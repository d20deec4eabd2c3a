/*
sparse.cuh: the CUDA twin of sparse.h.

  mapping   means: a thread per element. Lists: a block per list, a thread per earlier block; thread 0 keeps the best
            ones, so that their order is that of C
  numerics  fp32; means are not rounded
*/
#ifndef LLMC_SPARSE_CUH
#define LLMC_SPARSE_CUH
#include "../cuda/kernel_utils.cuh"
#include "ops.h"

enum { SPARSE_THREADS = 128, SPARSE_QUERY = 512 }; // SPARSE_QUERY: the widest query of all key sets

static __global__ void sparse_means_kernel(real *means, const floatX *k, const int *first, int capacity, int width,
                                           AttentionShape s) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, blocks = i / (unsigned)width;
    int c = (int)(i % (unsigned)width), b = (int)(blocks / (unsigned)s.sparse.count);
    int j = (int)(blocks % (unsigned)s.sparse.count), size = s.sparse.size, end = (j + 1) * size;
    if (b >= s.B) return;
    int from = first ? first[b] : 0;
    if (end <= from || end > from + s.T) return; // complete before, or not yet
    float sum = 0;
    for (int p = j * size; p < end; p++)
        sum += to_float(k[((size_t)b * capacity + (p - s.sparse.base) % capacity) * s.ldkv + c]);
    means[i] = sum / size;
}

static inline void sparse_means(real *means, const floatX *k, const int *first, int capacity, int sets,
                                AttentionShape s) {
    OPERATION();
    int width = s.NKV * sets * s.D;
    size_t count = (size_t)s.B * s.sparse.count * width;
    if (count) LAUNCH(sparse_means_kernel, blocks_of(count, 256), 256, 0, means, k, first, capacity, width, s);
}

static __global__ void sparse_select_kernel(int *lists, const floatX *q, const real *means, const int *first, int sets,
                                            AttentionShape s) {
    SHARED(float, sum, SPARSE_QUERY);
    SHARED(float, scores, SPARSE_THREADS);
    SHARED(int, best, SPARSE_BLOCKS_LIMIT); // of thread 0, the best one first
    SHARED(float, values, SPARSE_BLOCKS_LIMIT);
    const SparseShape p = s.sparse;
    const int thread = (int)threadIdx.x, kind = (int)blockIdx.x % p.kinds, kv = (int)blockIdx.x / p.kinds % s.NKV;
    const int n = (int)blockIdx.x / p.kinds / s.NKV, b = n / s.T, t = n % s.T, group = s.NQ / s.NKV;
    const int position = (first ? first[b] : 0) + t, own = position / p.size, limit = p.blocks;
    const int document = s.first_key ? s.first_key[n] : 0, start = document / p.size;
    const int low = (s.window ? max(document, position - s.window + 1) : document) / p.size;
    for (int i = thread; i < sets * s.D; i += SPARSE_THREADS) {
        float x = 0;
        for (int h = kv * group, set = i / s.D; h < (kv + 1) * group; h++) {
            bool noise = sets > 1 ? set : p.heads.noise && h % (p.heads.signals + p.heads.noise) >= p.heads.signals;
            if (p.score != SPARSE_GROUP && noise != (p.score == SPARSE_APART && kind)) continue;
            x += to_float(q[(size_t)n * s.ldq + (size_t)h * s.q_head + i]);
        }
        sum[i] = x;
    }
    int count = 0; // of thread 0
    for (int j0 = max(low, start + 1); j0 < own; j0 += SPARSE_THREADS) {
        const real *mean = means + (((size_t)b * p.count + j0 + thread) * s.NKV + kv) * sets * s.D;
        float dot = 0;
        __syncthreads(); // sum is written, earlier scores are read
        for (int i = 0; j0 + thread < own && i < sets * s.D; i++) dot += sum[i] * mean[i];
        scores[thread] = dot;
        __syncthreads();
        for (int i = 0; thread == 0 && i < min(SPARSE_THREADS, own - j0); i++) {
            int at = count;
            while (at > 0 && scores[i] > values[at - 1]) at--;
            if (at == limit) continue;
            if (count < limit) count++;
            for (int r = count - 1; r > at; r--) best[r] = best[r - 1], values[r] = values[r - 1];
            best[at] = j0 + i, values[at] = scores[i];
        }
    }
    if (thread > 0) return;
    int *list = lists + (((size_t)(b * s.NKV + kv) * p.kinds + kind) * s.T + t) * sparse_width(p), filled = 0;
    if (start >= low && start < own) list[filled++] = start;
    for (int i = 0; i < count; i++) { // in ascending order
        int at = filled++;
        for (; at > 0 && list[at - 1] > best[i]; at--) list[at] = list[at - 1];
        list[at] = best[i];
    }
    list[filled++] = own;
    while (filled < sparse_width(p)) list[filled++] = -1;
}

static inline void sparse_select(int *lists, const floatX *q, const real *means, const int *first, int sets,
                                 AttentionShape s) {
    OPERATION();
    size_t items = (size_t)s.B * s.T * s.NKV * s.sparse.kinds;
    assert(sets * s.D <= SPARSE_QUERY && s.sparse.blocks <= SPARSE_BLOCKS_LIMIT);
    LAUNCH(sparse_select_kernel, blocks_of(items, 1), SPARSE_THREADS, 0, lists, q, means, first, sets, s);
}
#endif
