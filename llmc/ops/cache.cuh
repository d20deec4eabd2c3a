/*
cache.cuh: the key/value cache of a layer, and attention of one new position per sequence over it. Equations in cache.h.

  mapping   store, load: a row per group of lanes
*/
#ifndef LLMC_CACHE_CUH
#define LLMC_CACHE_CUH
#include "../cuda/kernel_utils.cuh"
#include "attention_kernels.cuh"
#include "ops.h"

template <int W>
static __global__ void cache_store_kernel(int lanes, floatX *cache, const floatX *rows, const int *first, int B, int T,
                                          int capacity, int width, int ld) {
    unsigned n = row_index(lanes);
    int b = (int)n / T, t = (int)n % T;
    if (b >= B || t + capacity < T) return; // a later row has the same place
    floatX *to = cache + ((size_t)b * capacity + ((first ? first[b] : 0) + t) % capacity) * width;
    const floatX *from = rows + n * (size_t)ld;
    float x[W];
    for (int i = row_lane(lanes) * W; i < width; i += lanes * W) {
        load<W>(x, from + i);
        store<W>(to + i, x);
    }
}

static inline void cache_store(floatX *cache, const floatX *rows, const int *first, int B, int T, int capacity,
                               int width, int ld) {
    OPERATION();
    LAUNCH_ROWS(cache_store_kernel, packed(width, cache, rows) && packed(ld), (size_t)B * T, width, cache, rows, first,
                B, T, capacity, width, ld);
}

template <int W>
static __global__ void cache_load_kernel(int lanes, floatX *rows, const floatX *cache, int first, int count,
                                         int capacity, int width) {
    unsigned n = row_index(lanes);
    if (n >= (unsigned)count) return;
    const floatX *from = cache + ((unsigned)first + n) % (unsigned)capacity * (size_t)width;
    floatX *to = rows + n * (size_t)width;
    float x[W];
    for (int i = row_lane(lanes) * W; i < width; i += lanes * W) {
        load<W>(x, from + i);
        store<W>(to + i, x);
    }
}

static inline void cache_load(floatX *rows, const floatX *cache, int first, int count, int capacity, int width) {
    OPERATION();
    LAUNCH_ROWS(cache_load_kernel, packed(width, cache, rows), (size_t)count, width, rows, cache, first, count,
                capacity, width);
}

static inline size_t attention_decode_workspace_bytes(AttentionShape s, int capacity, int threads) {
    (void)s, (void)capacity, (void)threads;
    return 0;
}

static __global__ void attention_decode_kernel(floatX *out, real *lse, const floatX *q, const floatX *k,
                                               const floatX *v, const int *first, int capacity, AttentionShape s) {
    int b = (int)blockIdx.x / s.NQ, h = (int)blockIdx.x % s.NQ, kv = h / (s.NQ / s.NKV);
    int keys = min(first[b] + 1, capacity), lane = (int)threadIdx.x;
    size_t sequence = (size_t)b * capacity * s.ldkv;
    const floatX *qh = q + (size_t)b * s.ldq + h * s.q_head, *kh = k + sequence + kv * s.k_head,
                 *vh = v + sequence + kv * s.v_head;
    float max = -8e37f, sum = 0;
    for (int j = 0; j < keys; j++) {
        float dot = 0;
        for (int c = 0; c < s.D; c++) dot += to_float(qh[c]) * to_float(kh[(size_t)j * s.ldkv + c]);
        max = fmaxf(max, s.scale * dot);
    }
    for (int c = lane; c < s.DV || c == lane; c += WARP) {
        float o = 0;
        sum = 0;
        for (int j = 0; j < keys; j++) {
            float dot = 0;
            for (int i = 0; i < s.D; i++) dot += to_float(qh[i]) * to_float(kh[(size_t)j * s.ldkv + i]);
            float p = expf(s.scale * dot - max);
            sum += p;
            if (c < s.DV) o += p * to_float(vh[(size_t)j * s.ldkv + c]);
        }
        if (c < s.DV) round_to(&out[(size_t)b * s.ldo + h * s.o_head + c], o / sum);
    }
    if (lse && lane == 0) lse[blockIdx.x] = max + logf(sum);
}

static inline void attention_decode(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                    const int *first, int capacity, AttentionShape s) {
    OPERATION();
    LAUNCH(attention_decode_kernel, blocks_of((size_t)s.B * s.NQ, 1), WARP, 0, out, lse, q, k, v, first, capacity, s);
}
#endif
