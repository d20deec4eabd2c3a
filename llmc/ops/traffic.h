/*
traffic.h: the FLOPs of the operations, and the bytes that their CUDA twins move. Benchmarks divide them by measured
times, a prediction (prediction.h) divides them by assumed rates.

  bytes   each tensor is read or written once, as if a row stayed in the cache between two passes over it
  types   a CUDA program counts its own. The CPU program predicts the bf16 program for GPUs, so it counts that one's.
*/
#ifndef LLMC_TRAFFIC_H
#define LLMC_TRAFFIC_H
#include "ops.h"
#ifdef DEVICE_OPS
enum { FLOATX_BYTES = sizeof(floatX) };
#else
enum { FLOATX_BYTES = 2 };
#endif
enum { FP32_BYTES = 4 }; // gradients, moments, master weights, statistics

// ---- matrix products and attention

// Bytes of workspace that attention may take, where no device tells its memory.
enum { GPU_ATTENTION_LIMIT = 1 << 30 };

// Rows of logits that a GPU computes at a time. Each piece reads and writes the whole gradient of the head in fp32: of V*C
// weights 8 V C bytes for 2 rows V C FLOPs, which takes a tenth of the time of the product at 8192 rows of an H200, and
// a fifth at 4096. Both are whole tiles of the library's kernels, and enough of them for the multiprocessors (dx:
// rows*C / (128*256) tiles).
static inline size_t gpu_logit_rows(size_t row_bytes) { return 8192 * row_bytes <= (size_t)1 << 30 ? 8192 : 4096; }

static inline double matmul_forward_flops(int N, int IC, int OC) { return 2.0 * N * IC * OC; }
static inline double matmul_backward_flops(int N, int IC, int OC) { return 4.0 * N * IC * OC; }
static inline size_t matmul_forward_bytes(int N, int IC, int OC) {
    return ((size_t)N * (size_t)(IC + OC) + (size_t)OC * (size_t)IC) * FLOATX_BYTES;
}
static inline size_t matmul_to_input_bytes(int N, int IC, int OC) { return matmul_forward_bytes(N, IC, OC); }
static inline size_t matmul_to_weight_bytes(int N, int IC, int OC, bool add) {
    return (size_t)N * (size_t)(IC + OC) * FLOATX_BYTES + (add ? 2 : 1) * (size_t)OC * (size_t)IC * FP32_BYTES;
}

static inline double attention_visible(AttentionShape s) {
    return s.B * ((double)s.T * s.first + 0.5 * s.T * (s.T + 1.0));
}
static inline double attention_forward_flops(AttentionShape s) {
    return 2.0 * s.NQ * attention_visible(s) * (s.D + s.DV);
}
static inline double attention_backward_flops(AttentionShape s) {
    return 2.0 * s.NQ * attention_visible(s) * (3.0 * s.D + 2.0 * s.DV);
}
static inline size_t attention_forward_bytes(AttentionShape s) {
    size_t rows = (size_t)s.B * (size_t)s.T, keys = (size_t)s.B * (size_t)(s.first + s.T);
    return (rows * (size_t)s.NQ + keys * (size_t)s.NKV) * (size_t)(s.D + s.DV) * FLOATX_BYTES +
           rows * (size_t)s.NQ * FP32_BYTES;
}
static inline size_t attention_backward_bytes(AttentionShape s) {
    size_t rows = (size_t)s.B * (size_t)s.T, queries = 2 * (size_t)s.D + 2 * (size_t)s.DV,
           keys = 2 * (size_t)(s.D + s.DV);
    return rows * ((size_t)s.NQ * queries + (size_t)s.NKV * keys) * FLOATX_BYTES + 3 * rows * (size_t)s.NQ * FP32_BYTES;
}

// ---- operations on rows, bound by memory

static inline size_t embedding_forward_bytes(int N, int C) {
    return (size_t)N * (2 * (size_t)C * FLOATX_BYTES + sizeof(int));
}
// distinct: tokens among the N. The rows are sorted by token: four passes over a token and a row number, in and out.
static inline size_t embedding_backward_bytes(int N, int C, int distinct) {
    return (size_t)N * ((size_t)C * FLOATX_BYTES + 4 * 16) + 2 * (size_t)distinct * (size_t)C * FP32_BYTES;
}
static inline size_t rmsnorm_forward_bytes(int N, int C) {
    return (size_t)N * (2 * (size_t)C * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t residual_rmsnorm_forward_bytes(int N, int C) {
    return (size_t)N * (4 * (size_t)C * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t rmsnorm_backward_bytes(int N, int C) { // without the partial sums of dweight
    return (size_t)N * (4 * (size_t)C * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t rope_bytes(int N, int heads, int D) {
    return (size_t)N * (size_t)D * (2 * (size_t)heads * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t sink_forward_bytes(int N, int NH, int D) {
    return 2 * (size_t)N * (size_t)NH * ((size_t)D * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t sink_backward_bytes(int N, int NH, int D) {
    return (size_t)N * (size_t)NH * (2 * (size_t)D * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t diff_combine_forward_bytes(int N, int NH, int D) {
    return (size_t)N * (size_t)NH * (3 * (size_t)D + 1) * FLOATX_BYTES;
}
static inline size_t diff_combine_backward_bytes(int N, int NH, int D) {
    return (size_t)N * (size_t)NH * (4 * (size_t)D + 2) * FLOATX_BYTES;
}
static inline size_t layer_lambda_bytes(size_t count) { return count * FLOATX_BYTES; }
static inline size_t gate_forward_bytes(int N, int heads, int D, int width) {
    return (size_t)N * (size_t)heads * (2 * (size_t)D + (size_t)width) * FLOATX_BYTES;
}
static inline size_t gate_backward_bytes(int N, int heads, int D, int width) {
    return (size_t)N * (size_t)heads * (3 * (size_t)D + 2 * (size_t)width) * FLOATX_BYTES;
}
static inline size_t scale_bytes(size_t count) { return 2 * count * FLOATX_BYTES; }
static inline size_t swiglu_forward_bytes(int N, int F) { return 3 * (size_t)N * (size_t)F * FLOATX_BYTES; }
static inline size_t swiglu_backward_bytes(int N, int F) { return 5 * (size_t)N * (size_t)F * FLOATX_BYTES; }
static inline size_t residual_forward_bytes(size_t count) { return 3 * count * FLOATX_BYTES; }
static inline size_t cross_entropy_bytes(int N, int V, int Vp, bool gradient) {
    return (size_t)N * (gradient ? 2 * (size_t)V + (size_t)Vp : (size_t)V) * FLOATX_BYTES;
}

// ---- operations on parameters

static inline size_t adamw_bytes(size_t count, bool master) {
    return count * (7 * FP32_BYTES + (master ? FP32_BYTES + FLOATX_BYTES : 0));
}
static inline size_t sum_of_squares_bytes(size_t count) { return count * FP32_BYTES; }
#endif
