/*
ops.h: the types of the operations, and what a twin is.

A folder is a chapter of docs/mathematics.md. Its operations.h is the contract between them and the trainer: it declares
each operation once, with its shapes, and states its FLOPs and bytes. An operation is defined twice under the same name:
in `NAME.h` (C) and in `NAME.cuh` (CUDA, selected by DEVICE_OPS); llmc/experts/all_operations.h includes either. One
that is declared but not defined is a compiler warning, which is treated as an error. The operations of a training step
have a third definition, which records their cost for predictions (selected by RECORDED_OPS).

  B sequences, T positions, N = B*T rows, C hidden size, L layers, V vocabulary, Vp row stride of the logits, F MLP
  width, D head dimension, NH output heads, NKV key/value heads, NQ query heads.
  Matrices are row-major; weights are [out, in]. `ld` is a row stride in elements.
  "=" overwrites, "+=" accumulates. Gradients of vectors and of the embedding accumulate; others do if `add` is true.

  bytes  that the CUDA operation moves; benchmarks divide them by measured times, predictions by assumed rates. Every
         tensor is read or written once: a row stays in the cache between two passes over it. Types are the program's
         types; predictions use the types of the bf16 program

Pointers refer to memory of buffer_alloc. Only operations dereference them.
*/
#ifndef LLMC_OPS_H
#define LLMC_OPS_H
#include "../base/element_types.h"
#include "head_groups.h"

enum { FLOATX_BYTES = sizeof(floatX) };
// Whether several threads process so many elements faster than one: their start takes as long as 16K elements.
static inline bool worth_threads(size_t count) { return count > 16384; }
enum { FP32_BYTES = 4 }; // gradients, optimizer states, master weights, statistics

// A matrix of activations, or their gradient. An operation that writes an Activation also computes its largest
// magnitude, for a product in FP8 that reads it: *max = max(*max, |x|), unless max is NULL. The bits are in absmax.h.
typedef uint32_t absmax_t;
typedef struct {
    floatX *data;
    absmax_t *max;
} Activation;
static inline Activation activation(const floatX *data, absmax_t *max) {
    Activation a = {(floatX *)data, max};
    return a;
}

// The largest magnitude of an Activation that an operation without it has written; does nothing if x.max is NULL.
// x (N,columns) with row stride ld
static inline void absmax_update(Activation x, int N, int columns, int ld);
static inline size_t absmax_bytes(size_t rows, size_t columns) { return rows * columns * FLOATX_BYTES; }

// A linear layer; --matmul-dtype says how its operands are rounded.
typedef enum { GEMM_FP32, GEMM_BF16, GEMM_FP8 } GemmType;
typedef struct {
    const floatX *weight; // (OC,IC)
    grad_t *dweight;      // (OC,IC); NULL without a backward
    void *copy;           // linear_copy_bytes, in memory of buffer_alloc; or NULL
    int IC, OC, ld;       // ld: row stride of y
} Linear;

// Block-sparse attention (sparse.h): a row attends to the blocks of keys of its list alone. Operations named sparse_*
// and statistics read this; other operations attend to all keys.
enum { SPARSE_BLOCKS_LIMIT = 64 };
typedef struct {
    int blocks, size; // blocks of a list besides the first and the row's own; positions of a block; blocks 0: attention
                      // to all keys
    int count;        // complete blocks of a sequence in the array of means
    int base;         // position of the first row of keys; > 0 only in generation
    const int *lists; // (B, NKV, T, blocks + 2): ascending block numbers, then -1
} SparseShape;
HOST_DEVICE int sparse_width(SparseShape p) { return p.blocks + 2; }

// Causal attention of NQ query heads over NKV key/value heads; query head j uses key/value head j / (NQ/NKV). Rows of
// q, k, v and of the output have separate strides, and so do the heads within a row, so that q, k and v are read
// directly from the output of the fused GEMM. Query row t has position query_offset + t and attends to
// keys 0 .. query_offset+t; keys and values have query_offset + T rows (> T only in generation, with B = 1).
typedef struct {
    int B, T, query_offset;
    int NQ, NKV, D, DV;                 // D: width of a query and key head; DV: width of a value head
    int ldq, ldkv, ldo;                 // row strides
    int q_head, k_head, v_head, o_head; // head strides
    real scale;
    int window;           // a row attends to the last `window` keys up to its own position; 0: to all of them
    const int *first_key; // (B,T): the first key that a row may attend to, nondecreasing in T; NULL: 0
    HeadGroups groups;    // for diff_attention; attention has no noise heads
    // With a table, the backward also applies rope_backward to the gradients of rope_heads heads, from the first head
    // of q on: the heads of q, or of q and k, if one buffer holds both.
    const real *rope;
    int rope_heads;
    SparseShape sparse;
} AttentionShape;

// The first key that query row t of sequence b attends to; INT_MAX beyond the last row.
HOST_DEVICE int attention_first_key(AttentionShape s, int b, int t) {
    if (t >= s.T) return INT_MAX;
    int document = s.first_key ? s.first_key[(size_t)b * s.T + t] : 0, of_window = s.query_offset + t - s.window + 1;
    return s.window && of_window > document ? of_window : document;
}

// The list of row t of query head h of a key set; NULL: the row attends to all keys.
HOST_DEVICE const int *sparse_row(AttentionShape s, int b, int h, int t) {
    size_t row = (size_t)(b * s.NKV + h / (s.NQ / s.NKV)) * s.T + t;
    return s.sparse.blocks ? s.sparse.lists + row * sparse_width(s.sparse) : NULL;
}
HOST_DEVICE bool sparse_reads(const int *list, SparseShape p, int key) {
    bool found = !list;
    for (int i = 0; !found && i < p.blocks + 2 && list[i] >= 0; i++) found = list[i] == key / p.size;
    return found;
}

// Query heads that are computed together, since their outputs are subtracted.
static inline int attention_maps(AttentionShape s) { return max_int(1, s.groups.signals + s.groups.noise); }
// The shape of attention without the subtraction, whose output has every query head.
static inline AttentionShape attention_of_heads(AttentionShape s) {
    if (s.groups.noise) s.o_head = s.DV, s.ldo = s.NQ * s.DV;
    s.groups.signals = s.groups.noise = 0;
    return s;
}

// Elements of lse per key set: a multiple of 16 bytes, the alignment that cuDNN requires.
static inline size_t lse_set_stride(AttentionShape s) { return round_up((size_t)s.B * s.NQ * s.T, 16 / sizeof(float)); }

// A part of the memory of a process.
typedef struct {
    const char *what;
    size_t bytes;
    bool about; // an estimate
} MemoryPart;
static inline MemoryPart memory_part(const char *what, size_t bytes, bool about) {
    MemoryPart part = {what, bytes, about};
    return part;
}

typedef struct {
    size_t used, total, at_start; // bytes, used by all processes; at_start: used before this process's first buffer
} DeviceMemory;
#endif
