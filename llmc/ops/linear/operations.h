/*
operations.h: matrix products and linear layers.
*/
#ifndef LLMC_LINEAR_OPERATIONS_H
#define LLMC_LINEAR_OPERATIONS_H
#include "../ops.h"

// y = x weight^T                                             x (N,IC), weight (OC,IC), y (N,OC) with row stride ldy
static inline void matmul_forward(floatX *y, const floatX *x, const floatX *weight, int N, int IC, int OC, int ldy);
static inline void matmul_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x, const floatX *weight,
                                   int N, int IC, int OC, int ldy, bool add); // dx =; dweight =, or with add +=
// Returns the number of rows of the logits to compute per call; row_bytes is the size of one row. Sums over rows depend
// on this number, so it depends on the argument alone.
static inline size_t matmul_rows_at_a_time(size_t row_bytes);

// Rows of logits that a GPU computes at a time. Each chunk of rows reads and writes the whole fp32 gradient of the
// head: 8 V C bytes for 2 rows V C FLOPs. On an H200 this takes a tenth of the product's time at 8192 rows and a fifth
// at 4096. Both counts are whole tiles of the library's kernels and occupy all multiprocessors (dx: rows*C / (128*256)
// tiles).
static inline size_t gpu_logit_rows(size_t row_bytes) { return 8192 * row_bytes <= (size_t)1 << 30 ? 8192 : 4096; }

static inline double matmul_forward_flops(int N, int IC, int OC) { return 2.0 * N * IC * OC; }
static inline double matmul_backward_flops(int N, int IC, int OC) { return 4.0 * N * IC * OC; }
static inline size_t matmul_forward_bytes(size_t N, size_t IC, size_t OC) { // the bytes of dx are equal
    return (N * (IC + OC) + OC * IC) * FLOATX_BYTES;
}
static inline size_t matmul_dweight_bytes(size_t N, size_t IC, size_t OC, bool add) {
    return N * (IC + OC) * FLOATX_BYTES + (add ? 2 : 1) * OC * IC * FP32_BYTES;
}

// The same product with operands rounded as --matmul-dtype says: linear.h. `copy` holds the rounded weight, made once
// per update. Without a copy nothing is rounded, as in matmul_forward. Columns of y between OC and ld may
// be overwritten.
static inline void linear_forward(floatX *y, Activation x, const Linear *w, int N);
static inline void linear_backward(floatX *dx, Activation dy, Activation x, const Linear *w, int N,
                                   bool add); // dx =; dweight =, or with add +=
static inline void linear_copy_weight(const Linear *w);
static inline size_t linear_copy_bytes(int IC, int OC, bool plain); // plain: FP8 leaves the layer out
static inline size_t linear_workspace_bytes(int N, int IC, int OC); // for the forward, the backward and the copy
// Selects the type; called once, before the functions above. Returns NULL, or the reason why it is not supported.
static inline const char *linear_configure(GemmType type);
static inline bool linear_in_fp8(void);
static inline bool linear_experts_in_fp8(void); // on GPUs where their product in FP8 is not faster, FP8 leaves them out

// Linear layers in FP8 (linear.cuh). Codes of a matrix, one byte each, are padded to multiples of 16 rows and columns.
// A copy of a weight is a header with its scale, its codes, and the codes of its transpose. The workspace has the codes
// of the operands, and a piece of an output if the library cannot write its shape directly.
enum { FP8_ALIGN = 16, FP8_HEADER = 256 };
#ifndef LINEAR_PIECE_BYTES // tests make it small (test_diffv2.cu)
#define LINEAR_PIECE_BYTES (16 << 20)
#endif
static inline size_t fp8_padded(int n) { return round_up((size_t)n, FP8_ALIGN); }
static inline size_t fp8_codes_bytes(int rows, int columns) { return fp8_padded(rows) * fp8_padded(columns); }
static inline size_t fp8_copy_bytes(int IC, int OC) { return FP8_HEADER + 2 * fp8_codes_bytes(OC, IC); }
// How many rows of an output (M, N) a piece holds, a multiple of 16.
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

// Bytes that are moved when a matrix is rounded to `outputs` matrices (codes, transposed codes, or both), and by a
// product. An output (M, N) with unaligned rows is copied from a piece.
static inline size_t fp8_quantize_bytes(size_t rows, size_t columns, size_t outputs) {
    return rows * columns * (FLOATX_BYTES + outputs);
}
static inline size_t fp8_product_bytes(size_t M, size_t N, size_t K, size_t element_bytes, bool add) {
    bool direct = M % FP8_ALIGN == 0 && N % FP8_ALIGN == 0;
    return K * (M + N) + M * N * element_bytes * ((add ? 2 : 1) + (direct ? 0 : 2));
}
#endif
