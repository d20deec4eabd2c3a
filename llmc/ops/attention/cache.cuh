/*
cache.cuh: rows of the key/value cache of a layer. Equations in cache.h; attention over it: attention_decode.cuh.

  mapping   a row per group of lanes
  traffic   each row in and out; the bits are copied
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

template <int W>
static __global__ void cache_store_kernel(int lanes, floatX *cache, const floatX *rows, const int *first, int B, int T,
                                          int capacity, int width, int ld) {
    unsigned n = row_index(lanes);
    int b = (int)n / T, t = (int)n % T;
    if (b >= B || t + capacity < T) return; // a later row has the same place
    floatX *to = cache + ((size_t)b * capacity + ((first ? first[b] : 0) + t) % capacity) * width;
    copy_row<W>(to, rows + n * (size_t)ld, width, lanes);
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
    copy_row<W>(rows + n * (size_t)width, from, width, lanes);
}

static inline void cache_load(floatX *rows, const floatX *cache, int first, int count, int capacity, int width) {
    OPERATION();
    LAUNCH_ROWS(cache_load_kernel, packed(width, cache, rows), (size_t)count, width, rows, cache, first, count,
                capacity, width);
}
