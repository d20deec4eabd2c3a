/*
cache.h: the key/value cache of a layer, and attention of one new position per sequence over it.

  cache     (B, capacity, width), rows [k | v]; the row of position p is p % capacity
  forward   attention.h for one query row; keys in the order of the cache's rows
*/
#ifndef LLMC_CACHE_H
#define LLMC_CACHE_H
#include "attention.h"
#include "ops.h"

static inline void cache_store(floatX *cache, const floatX *rows, const int *first, int B, int T, int capacity,
                               int width, int ld) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < B * T; n++) {
        int b = n / T, t = n % T;
        if (t + capacity < T) continue; // a later row has the same place
        size_t place = (size_t)b * capacity + ((first ? first[b] : 0) + t) % capacity;
        memcpy(cache + place * width, rows + (size_t)n * ld, (size_t)width * sizeof(floatX));
    }
}

static inline void cache_load(floatX *rows, const floatX *cache, int first, int count, int capacity, int width) {
#pragma omp parallel for schedule(static)
    for (int i = 0; i < count; i++)
        memcpy(rows + (size_t)i * width, cache + (size_t)((first + i) % capacity) * width,
               (size_t)width * sizeof(floatX));
}

static inline size_t attention_decode_workspace_bytes(AttentionShape s, int capacity, int threads) {
    (void)s;
    return (size_t)threads * capacity * sizeof(real);
}

static inline void attention_decode(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                    const int *first, int capacity, AttentionShape s) {
    real *workspace = ops_workspace_take(attention_decode_workspace_bytes(s, capacity, omp_get_max_threads()));
#pragma omp parallel for schedule(static)
    for (int item = 0; item < s.B * s.NQ; item++) {
        int b = item / s.NQ, h = item % s.NQ, kv = h / (s.NQ / s.NKV), keys = min_int(first[b] + 1, capacity);
        real *scores = workspace + (size_t)omp_get_thread_num() * capacity;
        size_t sequence = (size_t)b * capacity * s.ldkv;
        attention_row_scores(scores, q + (size_t)b * s.ldq + h * s.q_head, k + sequence + kv * s.k_head, 0, keys, s);
        attention_row_output(out + (size_t)b * s.ldo + h * s.o_head, lse ? lse + item : NULL, scores,
                             v + sequence + kv * s.v_head, 0, keys, s);
    }
}
#endif
