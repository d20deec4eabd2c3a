/*
attention_documents.cuh: the documents of a batch, for cuDNN (--doc-mask). Documents follow each other: document d has
the rows [rows[d], rows[d + 1]) of all B*T. cuDNN reads, for each document of a call, its length and the offset of its
first element in each tensor. A kernel writes these tables to the workspace before the call. Documents of a call beyond
the last one of the batch have length 0.

  lse       stays (B,NQ,T): a row has the offset b NQ T + t, and the heads are T apart
  traffic   4 bytes per row to the device per batch, at most; 72 bytes per document of a call
*/
#pragma once
#include "../../cuda/attention_cudnn.h"
#include "../../cuda/device.cuh"
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

typedef struct {
    const int *first_key; // the announced batch's first_key; NULL: none was announced
    int count, room;      // documents; elements of rows
    int *rows;            // [count + 1], on the host
    const int *list;      // rows, on the device
} AttentionDocuments;

// The number of documents per call, before the workspace limits it. Most batches of web text take one call: its
// documents have 400 to 1000 tokens on average, and the ends of B sequences divide up to B of them. More would slow
// down batches of few documents, since a kernel starts blocks for all of them.
static inline int attention_slots(AttentionShape s) {
    enum { TOKENS = 512 };
    return min_int(s.B * s.T, s.B + (s.B * s.T + TOKENS - 1) / TOKENS);
}

static inline void attention_documents_free(AttentionDocuments *d) {
    free(d->rows);
    memset(d, 0, sizeof(*d));
}

// document_starts (N): where the document of each row begins in its sequence of T rows
static inline void attention_documents_read(AttentionDocuments *d, int *list, const int *first_key,
                                            const int *document_starts, int N, int T) {
    if (N >= d->room) {
        attention_documents_free(d);
        d->room = N + 1;
        d->rows = (int *)checked_calloc(d->room, sizeof(int));
    }
    d->first_key = first_key;
    d->count = 0;
    for (int n = 0; n < N; n++)
        if (document_starts[n] == n % T) d->rows[d->count++] = n;
    d->rows[d->count] = N;
    d->list = list;
    buffer_upload(list, d->rows, (d->count + 1) * sizeof(int));
}

// ---------------------------------------------------------------------------------------------------
// Tables: lengths (slots), and behind them offsets (CUDNN_OFFSETS, cudnn_table_stride(slots))

static inline size_t attention_lengths_bytes(int slots) { return round_up(slots * sizeof(int), 256); }
static inline size_t attention_tables_bytes(int slots) {
    return attention_lengths_bytes(slots) + round_up(CUDNN_OFFSETS * cudnn_table_stride(slots) * sizeof(int64_t), 256);
}

// Element 0 of row n is at (n - base) * stride; in the lse at n / T * lse_stride + n % T.
typedef struct {
    int slots, T;
    size_t stride[CUDNN_OFFSETS], lse_stride;
    int base[CUDNN_OFFSETS];
} AttentionTables;

static __global__ void attention_tables_kernel(int *lengths, int64_t *offsets, size_t table_stride, const int *rows,
                                               int first, int count, AttentionTables t) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i > t.slots) return;
    int d = min(first + i, count), n = rows[d];
    if (i < t.slots) lengths[i] = d < count ? rows[d + 1] - n : 0;
    for (int k = 0; k < CUDNN_OFFSETS; k++) {
        size_t at = k == CUDNN_LSE ? n / t.T * t.lse_stride + n % t.T : (n - t.base[k]) * t.stride[k];
        offsets[k * table_stride + i] = (int64_t)at;
    }
}

// The tables of a call that computes `a` for the documents from `first` on. lse_stride: from one sequence to the next.
// Outputs that `in_scratch` marks are in scratch memory, from row `scratch_row` on.
static inline void attention_write_tables(CudnnTensors *to, char *memory, const CudnnAttention *a, const int *rows,
                                          int first, int count, size_t lse_stride, int scratch_row,
                                          unsigned in_scratch) {
    const int strides[CUDNN_OFFSETS] = {a->q.row, a->k.row, a->v.row, a->out.row, 0, a->dq.row, a->dk.row, a->dv.row};
    AttentionTables t;
    t.slots = a->B;
    t.T = a->T;
    t.lse_stride = lse_stride;
    for (int k = 0; k < CUDNN_OFFSETS; k++) {
        t.stride[k] = (size_t)strides[k];
        t.base[k] = in_scratch >> k & 1 ? scratch_row : 0;
    }
    int *lengths = (int *)(void *)memory;
    int64_t *offsets = (int64_t *)(void *)(memory + attention_lengths_bytes(a->B));
    LAUNCH(attention_tables_kernel, blocks_of(t.slots + 1, 128), 128, 0, lengths, offsets, cudnn_table_stride(a->B),
           rows, first, count, t);
    to->lengths = lengths;
    to->offsets = offsets;
}
