/*
sparse.h: which blocks of keys a query attends to in block-sparse attention (attention_sparse.h).

  blocks   positions j*size .. j*size + size-1 are block j
  means    m[j] = mean of the keys of block j, once they are all known
  scores   of a row t and a block j: sum of <q_h, m[j]> over the query heads of a key/value group
  list     the row's own block, the first block of its document, and of the blocks between them the `blocks` ones with
           the largest scores, ties to the lower number. Blocks outside of the row's window are left out. A block with
           a score is complete before the row's own begins, so no later token has an influence: generation selects the
           same blocks
  numerics all in `real`; queries are added in the order of heads
  flops    2 D per row, list and earlier block, 1/size of what the logits of a head cost
  source   Lu et al. 2025 (arXiv 2502.13189), "MoBA: mixture of block attention for long-context LLMs"
*/
#pragma once
#include "attention.h"
#include "operations.h"
#include "../tile.h"

static inline void sparse_means(real *means, const floatX *k, const int *first, int capacity, int sets,
                                AttentionShape s) {
    int size = s.sparse.size, width = s.NKV * sets * s.D;
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int j = 0; j < s.sparse.count; j++) {
            int from = first ? first[b] : 0, end = (j + 1) * size;
            if (end <= from || end > from + s.T) continue; // complete before, or not yet
            real *mean = means + ((size_t)b * s.sparse.count + j) * width;
            for (int c = 0; c < width; c++) mean[c] = 0;
            for (int p = j * size; p < end; p++) {
                const floatX *row = k + ((size_t)b * capacity + (p - s.sparse.base) % capacity) * s.ldkv;
                for (int c = 0; c < width; c++) mean[c] += row[c];
            }
            for (int c = 0; c < width; c++) mean[c] /= size;
        }
}

// Keeps the best `limit` of the candidates, the best one first; candidates come in ascending order.
static inline int sparse_insert(int *best, real *scores, int count, int limit, int block, real score) {
    int at = count;
    while (at > 0 && score > scores[at - 1]) at--;
    if (at == limit) return count;
    if (count < limit) count++;
    for (int i = count - 1; i > at; i--) best[i] = best[i - 1], scores[i] = scores[i - 1];
    best[at] = block, scores[at] = score;
    return count;
}

// list = the blocks of a row, in ascending order: the first one, the best ones, its own; then -1
static inline void sparse_write_list(int *list, const int *best, int count, int low, int start, int self, int width) {
    int n = 0;
    if (start >= low && start < self) list[n++] = start;
    for (int i = 0; i < count; i++) {
        int at = n++;
        for (; at > 0 && list[at - 1] > best[i]; at--) list[at] = list[at - 1];
        list[at] = best[i];
    }
    list[n++] = self;
    while (n < width) list[n++] = -1;
}

static inline void sparse_select(int *lists, const floatX *q, const real *means, const int *first, int sets,
                                 AttentionShape s) {
    const SparseShape p = s.sparse;
    int group = s.NQ / s.NKV, mean_ld = s.NKV * sets * s.D;
#pragma omp parallel for schedule(static)
    for (int item = 0; item < s.B * s.T * s.NKV; item++) {
        int kv = item % s.NKV, n = item / s.NKV, b = n / s.T, t = n % s.T;
        AttentionShape row = s;
        row.query_offset = first ? first[b] : 0;
        int self = (row.query_offset + t) / p.size, count = 0;
        int low = attention_first_key(row, b, t) / p.size, start = s.first_key ? s.first_key[n] / p.size : 0;
        int best[SPARSE_BLOCKS_LIMIT];
        real scores[SPARSE_BLOCKS_LIMIT], sum[2 * 256]; // the sum of the queries of each key set
        for (int i = 0; i < sets * s.D; i++) sum[i] = 0;
        for (int h = kv * group; h < (kv + 1) * group; h++)
            for (int set = 0; set < sets; set++) {
                const floatX *x = q + (size_t)n * s.ldq + h * s.q_head + set * s.D;
                for (int i = 0; i < s.D; i++) sum[set * s.D + i] += x[i];
            }
        for (int j = max_int(low, start + 1); j < self; j++) {
            const real *mean = means + ((size_t)b * p.count + j) * mean_ld + kv * sets * s.D;
            count = sparse_insert(best, scores, count, p.blocks, j, tile_dot(sum, mean, sets * s.D));
        }
        int *list = lists + ((size_t)(b * s.NKV + kv) * s.T + t) * sparse_width(p);
        sparse_write_list(list, best, count, low, start, self, sparse_width(p));
    }
}
