/*
cache.h: the key/value cache of a layer, and attention of one new position per sequence over it.

  cache     (B, capacity, width), rows [k | v]; the row of position p is p % capacity
  forward   S = scale Q K^T,  P = softmax(S),  O = P V for the query heads of a group, which share each element of the
            cache that is read; keys in the order of the cache's rows
  method    The keys are divided into parts of DECODE_KEYS. A part has its own maximum and sum; the results of the parts
            are then added in order, so they do not depend on the number of threads. While keys are multiplied, the
            values of the same rows are prefetched; with the values, the keys of the next head or part.
  traffic   B min(first + 1, capacity) width elements in, once
  source    Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context inference"
*/
#pragma once
#include "attention.h"
#include "operations.h"
#include "../runtime.h"
#include "../tile.h"
#include "../vecmath.h"

enum { DECODE_KEYS = 128 }; // a multiple of TILE_LANES; the rows of a part fit in the L2 cache

static inline void cache_store(floatX *cache, const floatX *rows, const int *first, int B, int T, int capacity,
                               int width, int ld) {
#pragma omp parallel for schedule(static) if (worth_threads((size_t)B * T * width))
    for (int n = 0; n < B * T; n++) {
        int b = n / T, t = n % T;
        if (t + capacity < T) continue; // a later row has the same place
        size_t place = (size_t)b * capacity + ((first ? first[b] : 0) + t) % capacity;
        memcpy(cache + place * width, rows + (size_t)n * ld, (size_t)width * sizeof(floatX));
    }
}

static inline void cache_load(floatX *rows, const floatX *cache, int first, int count, int capacity, int width) {
#pragma omp parallel for schedule(static) if (worth_threads((size_t)count * width))
    for (int i = 0; i < count; i++)
        memcpy(rows + (size_t)i * width, cache + (size_t)((first + i) % capacity) * width,
               (size_t)width * sizeof(floatX));
}

// Sizes derived from a shape, and the arrays in the workspace.
typedef struct {
    int group;           // query heads of a key/value head
    size_t D, DV;        // widths, rounded up to whole vectors
    size_t part_count;   // elements of a part's result
    real *parts;         // (items, part_count): sums of P V (group, DV), maxima (group) and sums of P (group)
    real *threads;       // (threads, thread_count)
    size_t thread_count; // q (group, D), scores or P (group, DECODE_KEYS), a copy of TILE_LANES rows of k or v
    size_t total;
} DecodeWorkspace;

static inline int decode_parts(int keys) { return (keys + DECODE_KEYS - 1) / DECODE_KEYS; }

static inline DecodeWorkspace decode_workspace(AttentionShape s, int capacity, int threads, real *memory) {
    DecodeWorkspace w;
    w.group = s.NQ / s.NKV;
    w.D = round_up(s.D, TILE_LANES);
    w.DV = round_up(s.DV, TILE_LANES);
    w.part_count = round_up(w.group * (w.DV + 2), TILE_LANES);
    w.thread_count = round_up(w.group * (w.D + DECODE_KEYS) + TILE_LANES * max_size(w.D, w.DV), TILE_LANES);
    size_t items = (size_t)s.B * s.NKV * decode_parts(capacity);
    w.parts = memory;
    w.threads = memory ? memory + items * w.part_count : NULL;
    w.total = items * w.part_count + threads * w.thread_count;
    return w;
}

static inline size_t attention_decode_workspace_bytes(AttentionShape s, int capacity, int threads) {
    return decode_workspace(s, capacity, threads, NULL).total * sizeof(real);
}

// A part of the keys of one key/value head; n rows.
typedef struct {
    const floatX *k, *v, *next; // next: the keys that are read after it
    int n;
} DecodePart;

// Requests rows that are read soon: the hardware does not foresee the steps between the heads of a row.
static inline void decode_prefetch(const floatX *x, int rows, int width, size_t ld) {
    for (int j = 0; j < rows; j++)
        for (int c = 0; c < width; c += 64 / (int)sizeof(floatX)) __builtin_prefetch(x + j * ld + c, 0, 1);
}

// `rows` rows of x as TILE_LANES rows of whole vectors: in place if they are that, else a copy with zeros
static inline const floatX *decode_rows(floatX *copy, const floatX *x, int rows, int width, size_t padded, size_t *ld) {
    if (rows == TILE_LANES && (size_t)width == padded) return x;
    attention_copy_rows(copy, x, rows, TILE_LANES, width, padded, *ld, 1);
    *ld = padded;
    return copy;
}

// The result of a part: O = P V, max = max S, sum = sum P with S = scale Q K^T, P = exp(S - max)
static inline void decode_part(real *o, real *max, real *sum, const real *q, real *p, floatX *copy, DecodePart part,
                               const DecodeWorkspace *w, AttentionShape s) {
    for (int j = 0; j < part.n; j += TILE_LANES) {
        int rows = min_int(TILE_LANES, part.n - j);
        size_t ld = s.ldkv, at = j * ld;
        const floatX *k = decode_rows(copy, part.k + at, rows, s.D, w->D, &ld);
        for (int g = 0; g < w->group; g++) {
            int from = rows * g / w->group;
            decode_prefetch(part.v + at + from * (size_t)s.ldkv, rows * (g + 1) / w->group - from, s.DV, s.ldkv);
            tile_dots(p + g * DECODE_KEYS + j, q + g * w->D, k, ld, (int)w->D);
        }
    }
    for (int g = 0; g < w->group; g++) {
        real *pg = p + g * DECODE_KEYS, largest = pg[0], total = 0;
#pragma omp simd reduction(max : largest)
        for (int j = 0; j < part.n; j++) largest = pg[j] > largest ? pg[j] : largest;
#pragma omp simd reduction(+ : total)
        for (int j = 0; j < part.n; j++) total += pg[j] = real_exp(pg[j] - largest);
        max[g] = largest, sum[g] = total;
    }
    memset(o, 0, w->group * w->DV * sizeof(real));
    for (int j = 0, rows; j < part.n; j += rows) {
        bool whole = (size_t)s.DV == w->DV; // then no copy is needed
        rows = min_int(TILE_LANES, part.n - j);
        size_t ld = s.ldkv, at = j * ld;
        const floatX *v = whole ? part.v + at : decode_rows(copy, part.v + at, rows, s.DV, w->DV, &ld);
        decode_prefetch(part.next + at, rows, s.D, s.ldkv);
        tile_multiply_rows(w->group, (int)w->DV, rows, p + j, DECODE_KEYS, v, ld, o, w->DV);
    }
}

// Adds the `parts` results of a head, `stride` elements apart, in order.
static inline void decode_merge(floatX *out, real *lse, const real *o, const real *max, const real *sum, int parts,
                                size_t stride, int DV) {
    real largest = max[0], total = 0;
    for (int i = 1; i < parts; i++) largest = max[i * stride] > largest ? max[i * stride] : largest;
    for (int c = 0; c < DV; c++) out[c] = 0;
    for (int i = 0; i < parts; i++) {
        real factor = real_exp(max[i * stride] - largest);
        total += factor * sum[i * stride];
        for (int c = 0; c < DV; c++) out[c] += factor * o[i * stride + c];
    }
    for (int c = 0; c < DV; c++) out[c] /= total;
    if (lse) *lse = largest + (real)log((double)total);
}

static inline void attention_decode(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                    const int *first, int capacity, AttentionShape s) {
    assert(s.NQ % s.NKV == 0 && s.T == 1);
    int items = 0, group = s.NQ / s.NKV, threads = omp_get_max_threads();
    for (int b = 0; b < s.B; b++) items += s.NKV * decode_parts(min_int(first[b] + 1, capacity));
    real *memory = ops_workspace_take(attention_decode_workspace_bytes(s, capacity, threads));
    DecodeWorkspace w = decode_workspace(s, capacity, threads, memory);
#pragma omp parallel for schedule(static)
    for (int item = 0; item < items; item++) { // (b, part, head): in the order of memory
        int b = 0, at = item, keys = min_int(first[0] + 1, capacity);
        for (; at >= s.NKV * decode_parts(keys); keys = min_int(first[++b] + 1, capacity))
            at -= s.NKV * decode_parts(keys);
        int kv = at % s.NKV, j = at / s.NKV * DECODE_KEYS, h = kv * group;
        size_t row = ((size_t)b * capacity + j) * s.ldkv;
        DecodePart part = {k + row + kv * s.k_head, v + row + kv * s.v_head, NULL, min_int(DECODE_KEYS, keys - j)};
        part.next = kv + 1 < s.NKV ? part.k + s.k_head : k + row + (size_t)DECODE_KEYS * s.ldkv;
        real *queries = w.threads + omp_get_thread_num() * w.thread_count, *p = queries + group * w.D;
        real *o = w.parts + item * w.part_count, *max = o + group * w.DV;
        for (int g = 0; g < group; g++)
            attention_copy_rows(queries + g * w.D, q + (size_t)b * s.ldq + (h + g) * s.q_head, 1, 1, s.D, w.D, s.ldq,
                                s.scale);
        decode_part(o, max, max + group, queries, p, p + group * DECODE_KEYS, part, &w, s);
    }
#pragma omp parallel for schedule(static) if (worth_threads(items * w.part_count))
    for (int bh = 0; bh < s.B * s.NQ; bh++) {
        int b = bh / s.NQ, h = bh % s.NQ, before = 0, g = h % group;
        for (int i = 0; i < b; i++) before += s.NKV * decode_parts(min_int(first[i] + 1, capacity));
        const real *o = w.parts + (before + h / group) * w.part_count, *max = o + group * w.DV;
        decode_merge(out + (size_t)b * s.ldo + h * s.o_head, lse ? lse + bh : NULL, o + g * w.DV, max + g,
                     max + group + g, decode_parts(min_int(first[b] + 1, capacity)), s.NKV * w.part_count, s.DV);
    }
}
