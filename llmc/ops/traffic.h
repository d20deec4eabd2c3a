/*
traffic.h: the FLOPs of operations, and the bytes that their CUDA implementations move. Benchmarks divide them by
measured times; predictions (dev/predict/prediction.h) divide them by assumed rates.

  bytes   every tensor is read or written once: a row stays in the cache between two passes over it
  types   those of the program; predictions have the types of the bf16 program
*/
#ifndef LLMC_TRAFFIC_H
#define LLMC_TRAFFIC_H
#include "ops.h"
enum { FLOATX_BYTES = sizeof(floatX) };
enum { FP32_BYTES = 4 }; // gradients, optimizer states, master weights, statistics

// ---- matrix products and attention

// Limit of attention's workspace, in bytes, when the device's memory is unknown.
enum { GPU_ATTENTION_LIMIT = 1 << 30 };

// Rows of logits that a GPU computes at a time. Each chunk of rows reads and writes the whole fp32 gradient of the
// head: 8 V C bytes for 2 rows V C FLOPs. On an H200 this takes a tenth of the product's time at 8192 rows and a fifth
// at 4096. Both counts are whole tiles of the library's kernels and occupy all multiprocessors (dx: rows*C / (128*256)
// tiles).
static inline size_t gpu_logit_rows(size_t row_bytes) { return 8192 * row_bytes <= (size_t)1 << 30 ? 8192 : 4096; }

static inline double matmul_forward_flops(int N, int IC, int OC) { return 2.0 * N * IC * OC; }
static inline double matmul_backward_flops(int N, int IC, int OC) { return 4.0 * N * IC * OC; }
static inline size_t matmul_forward_bytes(size_t N, size_t IC, size_t OC) { // also those of dx
    return (N * (IC + OC) + OC * IC) * FLOATX_BYTES;
}
static inline size_t matmul_dweight_bytes(size_t N, size_t IC, size_t OC, bool add) {
    return N * (IC + OC) * FLOATX_BYTES + (add ? 2 : 1) * OC * IC * FP32_BYTES;
}

// Linear layers in FP8 (linear.cuh). Codes of a matrix, one byte each, are padded to multiples of 16 rows and columns.
// A copy of a weight is a header with its scale, its codes, and the codes of its transpose. The workspace has the codes
// of the operands, and a piece of an output whose shape the library does not write directly.
enum { FP8_ALIGN = 16, FP8_HEADER = 256 };
#ifndef LINEAR_PIECE_BYTES // tests make it small (test_diffv2.cu)
#define LINEAR_PIECE_BYTES (16 << 20)
#endif
static inline size_t fp8_padded(int n) { return round_up((size_t)n, FP8_ALIGN); }
static inline size_t fp8_codes_bytes(int rows, int columns) { return fp8_padded(rows) * fp8_padded(columns); }
static inline size_t fp8_copy_bytes(int IC, int OC) { return FP8_HEADER + 2 * fp8_codes_bytes(OC, IC); }
// The rows, a multiple of 16, of an output (M, N) that a piece holds.
static inline size_t fp8_piece_rows(int M, int N, size_t element_bytes) {
    size_t rows = LINEAR_PIECE_BYTES / (fp8_padded(N) * element_bytes) / FP8_ALIGN * FP8_ALIGN;
    return min_size(fp8_padded(M), max_size(rows, FP8_ALIGN));
}
static inline size_t fp8_piece_bytes(int M, int N, size_t element_bytes) {
    return fp8_piece_rows(M, N, element_bytes) * fp8_padded(N) * element_bytes;
}
static inline size_t fp8_workspace_bytes(int N, int IC, int OC) {
    size_t x = FP8_HEADER + fp8_codes_bytes(N, IC), dy = FP8_HEADER + 2 * fp8_codes_bytes(N, OC);
    size_t backward = max_size(fp8_piece_bytes(N, IC, FLOATX_BYTES), fp8_piece_bytes(OC, IC, FP32_BYTES));
    return max_size(x + fp8_piece_bytes(N, OC, FLOATX_BYTES), x + dy + backward);
}
// Rows grouped by expert have their codes in place. In the transposed codes the columns of an expert begin at a
// multiple of 16, with zeros up to the next: codes (columns, expert_code_columns).
static inline size_t expert_code_columns(int R, int E) { return fp8_padded(R) + (size_t)E * FP8_ALIGN; }
static inline size_t expert_codes_bytes(int R, int E, int columns, bool codes, bool transposed) {
    size_t rows = (codes ? fp8_padded(R) : 0) + (transposed ? expert_code_columns(R, E) : 0);
    return FP8_HEADER + rows * fp8_padded(columns);
}
static inline size_t expert_fp8_workspace_bytes(int R, int E, int IC, int OC) { // of the backward, the larger one
    return expert_codes_bytes(R, E, IC, false, true) + expert_codes_bytes(R, E, OC, true, true);
}
// Bytes moved: reading a matrix for its largest magnitude; rounding it to `outputs` matrices of codes (the codes, those
// of the transpose, or both); products, of which an output (M, N) with unaligned rows is copied from a piece.
static inline size_t absmax_bytes(size_t rows, size_t columns) { return rows * columns * FLOATX_BYTES; }
static inline size_t fp8_quantize_bytes(size_t rows, size_t columns, size_t outputs) {
    return rows * columns * (FLOATX_BYTES + outputs);
}
static inline size_t fp8_product_bytes(size_t M, size_t N, size_t K, size_t element_bytes, bool add) {
    bool direct = M % FP8_ALIGN == 0 && N % FP8_ALIGN == 0;
    return K * (M + N) + M * N * element_bytes * ((add ? 2 : 1) + (direct ? 0 : 2));
}

// Of block-sparse attention, from position 0 on, without documents: the keys that all rows attend to, and the blocks
// that are scored for them. The first block and the lowest one may be partly outside of a row's window. Of the scored
// blocks each is as likely to be selected.
static inline double sparse_visible_keys(AttentionShape s, double *scored) {
    double pairs = 0;
    *scored = 0;
    for (int t = 0, size = s.sparse.size; t < s.T; t++) {
        int first = s.window ? max_int(0, t - s.window + 1) : 0, low = first / size, own = t / size;
        int blocks = max_int(0, own - max_int(low, 1)), hidden = low > 0 && low < own ? first % size : 0;
        pairs += t + 1 - max_int(first, own * size) + (low == 0 && own > 0 ? size - first : 0);
        if (blocks) pairs += ((double)blocks * size - hidden) * min_int(blocks, s.sparse.blocks) / blocks;
        *scored += blocks;
    }
    return s.B * pairs;
}
// Of sparse_select.
static inline double sparse_select_flops(AttentionShape s) {
    double scored = 0;
    if (s.sparse.blocks) sparse_visible_keys(s, &scored);
    return (double)s.B * s.NKV * 2 * s.D * scored;
}
// Pairs of a query and a key that it attends to, per head.
static inline double attention_visible(AttentionShape s) {
    double scored;
    if (s.sparse.blocks) return sparse_visible_keys(s, &scored);
    double keys = (double)s.T * s.first + 0.5 * s.T * (s.T + 1.0), last = (double)s.first + s.T, hidden;
    double beyond = s.window ? fmax(0, last - s.window) : 0; // what the window hides from the last row
    double rows = fmin(beyond, s.T);                         // rows from which it hides something
    hidden = rows * (beyond - 0.5 * (rows - 1));
    return s.B * (keys - hidden);
}
// Of one new position per sequence, over `keys` positions of a cache.
static inline size_t attention_decode_bytes(AttentionShape s, size_t keys) {
    return s.B * (s.D + s.DV) * (keys * s.NKV + s.NQ) * FLOATX_BYTES;
}
static inline size_t cache_store_bytes(size_t rows, size_t width) { return 2 * rows * width * FLOATX_BYTES; }
static inline double attention_forward_flops(AttentionShape s) {
    return 2.0 * s.NQ * attention_visible(s) * (s.D + s.DV);
}
static inline double attention_backward_flops(AttentionShape s) {
    return 2.0 * attention_visible(s) * (s.NQ * 3.0 * s.D + output_heads(s.groups, s.NQ) * 2.0 * s.DV);
}
static inline size_t attention_forward_bytes(AttentionShape s) {
    size_t B = s.B, T = s.T, NQ = s.NQ, keys = B * (s.first + T) * s.NKV;
    return (B * T * NQ + keys) * (s.D + s.DV) * FLOATX_BYTES + B * T * NQ * FP32_BYTES;
}
static inline size_t attention_backward_bytes(AttentionShape s) {
    size_t B = s.B, T = s.T, NQ = s.NQ, heads = NQ + s.NKV;
    return B * T * heads * 2 * (s.D + s.DV) * FLOATX_BYTES + 3 * B * T * NQ * FP32_BYTES;
}
// Of groups of signal heads and a noise head: `heads` of NQ are outputs, the others are kept; l and its gradient.
static inline size_t diff_attention_forward_bytes(AttentionShape s) {
    size_t rows = (size_t)s.B * s.T, heads = output_heads(s.groups, s.NQ);
    return attention_forward_bytes(s) + rows * heads * FLOATX_BYTES;
}
static inline size_t diff_attention_backward_bytes(AttentionShape s) {
    size_t rows = (size_t)s.B * s.T, heads = output_heads(s.groups, s.NQ), NQ = s.NQ;
    size_t each = 2 * (NQ + s.NKV) * s.D + (NQ + heads + 2 * s.NKV) * s.DV + 2 * heads;
    return rows * (each * FLOATX_BYTES + 3 * NQ * FP32_BYTES);
}

// ---- operations on rows, bound by memory

static inline size_t embedding_forward_bytes(size_t N, size_t C) { return N * (2 * C * FLOATX_BYTES + sizeof(int)); }
// distinct: number of different tokens among the N. The rows are sorted by token: four passes that read and write a
// token and a row number.
static inline size_t embedding_backward_bytes(size_t N, size_t C, size_t distinct) {
    return N * (C * FLOATX_BYTES + 4 * 16) + 2 * distinct * C * FP32_BYTES;
}
static inline size_t rmsnorm_forward_bytes(size_t N, size_t C) { return N * (2 * C * FLOATX_BYTES + FP32_BYTES); }
static inline size_t residual_rmsnorm_forward_bytes(size_t N, size_t C) {
    return N * (4 * C * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t rmsnorm_backward_bytes(size_t N, size_t C) { // without the partial sums of dweight
    return N * (4 * C * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t rope_bytes(size_t N, size_t heads, size_t D) {
    return N * D * (2 * heads * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t sink_forward_bytes(size_t N, size_t NH, size_t D) {
    return 2 * N * NH * (D * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t sink_backward_bytes(size_t N, size_t NH, size_t D) {
    return N * NH * (2 * D * FLOATX_BYTES + FP32_BYTES);
}
// NQ heads in, NH out
static inline size_t diff_combine_forward_bytes(size_t N, size_t NQ, size_t NH, size_t D) {
    return N * (NQ * D + NH * (D + 1)) * FLOATX_BYTES;
}
static inline size_t diff_combine_backward_bytes(size_t N, size_t NQ, size_t NH, size_t D) {
    return N * 2 * (NQ * D + NH) * FLOATX_BYTES;
}
static inline size_t layer_lambda_bytes(size_t count) { return count * FLOATX_BYTES; }
// kept: whether the input is kept for a backward
static inline size_t head_norm_forward_bytes(size_t N, size_t heads, size_t D, bool kept) {
    return N * heads * D * (2 + kept) * FLOATX_BYTES;
}
static inline size_t head_norm_backward_bytes(size_t N, size_t heads, size_t D) {
    return 3 * N * heads * D * FLOATX_BYTES;
}
static inline size_t gate_forward_bytes(size_t N, size_t heads, size_t D, size_t width) {
    return N * heads * (2 * D + width) * FLOATX_BYTES;
}
static inline size_t gate_backward_bytes(size_t N, size_t heads, size_t D, size_t width) {
    return N * heads * (3 * D + 2 * width) * FLOATX_BYTES;
}
static inline size_t accumulate_bytes(size_t count, bool add) {
    return count * (2 * FLOATX_BYTES + (add ? 2 : 1) * FP32_BYTES);
}
static inline size_t scale_bytes(size_t count) { return 2 * count * FLOATX_BYTES; }
static inline size_t swiglu_forward_bytes(size_t N, size_t F) { return 3 * N * F * FLOATX_BYTES; }
static inline size_t swiglu_backward_bytes(size_t N, size_t F) { return 5 * N * F * FLOATX_BYTES; }
static inline size_t cross_entropy_bytes(size_t N, size_t V, size_t Vp, bool gradient) {
    return N * (gradient ? 2 * V + Vp : V) * FLOATX_BYTES;
}

// ---- mixture of experts: R = N K rows pass experts

// Experts with at least one of N tokens, if all are equally likely.
static inline double experts_used(Routing r) { return r.E * (1 - pow(1 - (double)r.K / r.E, r.N)); }
static inline size_t router_choices_bytes(Routing r) { // experts, weights and lse of all tokens
    return (size_t)r.N * ((size_t)r.K * (sizeof(int) + FP32_BYTES) + FP32_BYTES);
}
static inline size_t router_product_bytes(Routing r) { // of the logits, without the logits
    return ((size_t)r.N + (size_t)r.E) * (size_t)r.C * FLOATX_BYTES;
}
static inline size_t router_forward_bytes(Routing r) {
    return router_product_bytes(r) + 2 * (size_t)r.N * (size_t)r.E * FP32_BYTES + router_choices_bytes(r);
}
// dx is added to; add: dweight is, too
static inline size_t router_backward_bytes(Routing r, bool add) {
    size_t N = (size_t)r.N, C = (size_t)r.C, E = (size_t)r.E;
    size_t dlogits = N * E * (FP32_BYTES + FLOATX_BYTES) + N * (size_t)r.K * FP32_BYTES + router_choices_bytes(r);
    size_t to_input = (N * E + E * C + 2 * N * C) * FLOATX_BYTES;
    return dlogits + to_input + N * (E + C) * FLOATX_BYTES + (add ? 2 : 1) * E * C * FP32_BYTES;
}
static inline size_t router_totals_bytes(Routing r) {
    return (size_t)r.N * ((size_t)r.E + 1) * FP32_BYTES + ((size_t)r.E + 1) * sizeof(int);
}
// Of `count` biases of E; master: with unrounded ones
static inline size_t router_balance_bytes(size_t E, size_t count, bool master) {
    return E * FP32_BYTES + count * (master ? 2 * FP32_BYTES + FLOATX_BYTES : 2 * FLOATX_BYTES);
}
// Choices that a warp groups: so many that the counts of all warps fit the scratch memory with 1024 experts.
#ifndef EXPERT_GROUP_WARPS
#define EXPERT_GROUP_WARPS 256
#endif
static inline size_t expert_group_rows(Routing r) {
    const size_t warps = EXPERT_GROUP_WARPS, lanes = 32;
    return round_up(((size_t)r.N * (size_t)r.K + warps - 1) / warps, lanes);
}
static inline size_t expert_group_bytes(Routing r) { return 3 * (size_t)r.N * (size_t)r.K * sizeof(int); }
static inline size_t expert_gather_bytes(Routing r) {
    return (size_t)r.N * (size_t)r.C * ((size_t)r.K + 1) * FLOATX_BYTES + (size_t)r.N * (size_t)r.K * sizeof(int);
}
static inline size_t expert_combine_bytes(Routing r, bool add) {
    return expert_gather_bytes(r) + (add ? (size_t)r.N * (size_t)r.C * FLOATX_BYTES : 0);
}
// As swiglu, and the weight and the entry of each row, in the backward also the gradient of the weight.
static inline size_t expert_swiglu_forward_bytes(size_t R, size_t F) {
    return swiglu_forward_bytes(R, F) + R * (sizeof(int) + FP32_BYTES);
}
static inline size_t expert_swiglu_backward_bytes(size_t R, size_t F) {
    return swiglu_backward_bytes(R, F) + R * (sizeof(int) + 2 * FP32_BYTES);
}
// Of operands of `size` bytes: FLOATX_BYTES, or 1 in FP8. Also those of dx, with IC and OC exchanged. A weight is read
// if its expert has a row.
static inline double expert_linear_forward_bytes(Routing r, size_t IC, size_t OC, size_t size) {
    return (double)r.N * r.K * (double)(IC * size + OC * FLOATX_BYTES) + experts_used(r) * (double)(OC * IC * size);
}
// All gradients are written: zeros for an expert without rows.
static inline double expert_linear_dweight_bytes(Routing r, size_t IC, size_t OC, size_t size, bool add) {
    return (double)r.N * r.K * (double)((IC + OC) * size) + (add ? 2.0 : 1.0) * r.E * (double)(OC * IC) * FP32_BYTES;
}

// ---- operations on parameters

// Weights, two moments and the gradient; with master weights, which are the weights, parameters are written.
static inline size_t adamw_bytes(size_t count, bool master) {
    return count * (7 * FP32_BYTES + (master ? FLOATX_BYTES : 0));
}
// A direction per element: the moment is read and written, the gradient read, the direction written.
static inline size_t muon_direction_bytes(size_t count) { return count * (3 * FP32_BYTES + FLOATX_BYTES); }
static inline size_t muon_update_bytes(size_t count, bool master) {
    return count * (FP32_BYTES + (master ? 2 * FP32_BYTES + FLOATX_BYTES : 2 * FLOATX_BYTES));
}
// Newton-Schulz of a matrix (k,n), k <= n: MUON_STEPS times X = P X with P = a I + b A + c A A, A = X X^T. The
// bytes are those of X and A in each operation.
enum { MUON_STEPS = 5 };
static const double muon_momentum = 0.95, muon_coefficients[3] = {3.4445, -4.7750, 2.0315};
static inline double muon_flops(int rows, int columns) {
    double k = min_int(rows, columns), n = max_int(rows, columns);
    return MUON_STEPS * (4 * k * k * n + 2 * k * k * k);
}
static inline size_t muon_orthogonalize_bytes(int rows, int columns) {
    size_t k = (size_t)min_int(rows, columns), n = (size_t)max_int(rows, columns);
    size_t x = k * n, a = k * k, steps = MUON_STEPS * (3 * x + 6 * a), ends = 4 * x;
    return (steps + ends) * FLOATX_BYTES + x * FP32_BYTES;
}
// Row strides of X and of A in the workspace: packs of 16 bytes, whatever the shape.
static inline int muon_ld(int columns) { return (int)round_up((size_t)columns, 8); }
// X twice, A twice, then per row its sum of squares, and a factor.
static inline size_t muon_gpu_workspace_bytes(int rows, int columns) {
    size_t k = (size_t)min_int(rows, columns);
    size_t x = (size_t)rows * (size_t)muon_ld(columns), a = k * (size_t)muon_ld((int)k);
    return 2 * (round_up(x, 64) + round_up(a, 64)) * FLOATX_BYTES + ((size_t)rows + 1) * FP32_BYTES;
}
static inline size_t sum_of_squares_bytes(size_t count) { return count * FP32_BYTES; }
#endif
