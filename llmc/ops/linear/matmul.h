/*
matmul.h: a linear layer without bias, by a GEMM library.

  forward   y = x weight^T
  backward  dx = dy weight,   dweight = dy^T x, or with add += dy^T x
  shapes    x (N,IC), weight (OC,IC), y and dy (N,OC) with row stride ldy >= OC
  numerics  products and sums in `real`, in an order that the library fixes for a given shape and number of threads;
            up to MATMUL_FEW_ROWS rows of the forward in an order that depends on the shape alone
  flops     2 N IC OC forward, twice that backward
  library   oneDNN for fp32 if the build has it (ONEDNN), since it is faster on the products of training (dev/BENCH.md);
            CBLAS otherwise and for fp64. OpenBLAS, the usual CBLAS, may select AVX2 kernels on a CPU that is newer than
            its release, although AVX-512 kernels are twice as fast: OPENBLAS_CORETYPE=SkylakeX selects them
*/
#pragma once
#include "operations.h"
#include "../runtime.h"
#include "../tile.h"

#ifdef __cplusplus
extern "C" {
#endif
extern char *openblas_get_corename(void) __attribute__((weak)); // missing in other CBLAS libraries
extern char *openblas_get_config(void) __attribute__((weak));
#ifdef __cplusplus
}
#endif

#ifdef ONEDNN
static const bool matmul_by_onednn = sizeof(real) == sizeof(float);
#else
static const bool matmul_by_onednn = false;
#endif

// C = alpha op(A) op(B) + beta C;  op(A) is M x K, op(B) K x N, C M x N, row-major; must not be called in a parallel
// region
static inline void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int M, int N, int K, real alpha, const real *A, int lda,
                        const real *B, int ldb, real beta, real *C, int ldc) {
#ifdef ONEDNN
    if (sizeof(real) == sizeof(float)) {
        dnnl_status_t status = dnnl_sgemm(ta == CblasTrans ? 'T' : 'N', tb == CblasTrans ? 'T' : 'N', M, N, K,
                                          (float)alpha, (const float *)(const void *)A, lda,
                                          (const float *)(const void *)B, ldb, (float)beta, (float *)(void *)C, ldc);
        CHECK(status == dnnl_success, "oneDNN failed to multiply %d x %d x %d (status %d): out of memory?", M, N, K,
              (int)status);
        return;
    }
#endif
    if (sizeof(real) == sizeof(float))
        cblas_sgemm(CblasRowMajor, ta, tb, M, N, K, (float)alpha, (const float *)(const void *)A, lda,
                    (const float *)(const void *)B, ldb, (float)beta, (float *)(void *)C, ldc);
    else
        cblas_dgemm(CblasRowMajor, ta, tb, M, N, K, (double)alpha, (const double *)(const void *)A, lda,
                    (const double *)(const void *)B, ldb, (double)beta, (double *)(void *)C, ldc);
}

// 64 MiB of rows are enough for the full speed of the GEMM (dev/BENCH.md).
static inline size_t matmul_rows_at_a_time(size_t row_bytes) { return max_size(64, (64u << 20) / row_bytes); }

// For few rows, as in generation: reads the weight once for all rows, at the speed of memory (dev/BENCH.md). A GEMM of
// tiles takes longer than this read. IC is a multiple of TILE_LANES. A thread reads one row of the weight at a time,
// MATMUL_AHEAD elements ahead into the L2 cache, and takes the next piece of at most MATMUL_PIECE bytes when it has
// finished one: other work on the machine slows one thread more than another.
enum { MATMUL_FEW_ROWS = 8, MATMUL_PIECE = 96 << 10, MATMUL_AHEAD = 4096 / (int)sizeof(floatX) };

// The sum of the lanes, one after the other: the order of the last OC % TILE_LANES columns.
static inline real matmul_lanes(TileVector x) {
    real sum = 0;
    for (int l = 0; l < TILE_LANES; l++) sum += x[l];
    return sum;
}

// y[n] = x[n] . w for N rows; inlined, so that N is a constant. last: y is one of the last OC % TILE_LANES columns
static inline __attribute__((always_inline)) void matmul_column(int N, floatX *y, const floatX *x, const floatX *w,
                                                                int IC, int ldy, bool last) {
    TileVector sum[MATMUL_FEW_ROWS];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[n] = tile_zero;
    for (int c = 0; c < IC; c += TILE_LANES) {
        TileVector b = *(const TileVector *)(const void *)(w + c);
        __builtin_prefetch(w + c + MATMUL_AHEAD, 0, 2);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[n] += b * *(const TileVector *)(const void *)(x + (size_t)n * IC + c);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) y[(size_t)n * ldy] = last ? matmul_lanes(sum[n]) : tile_sum(sum[n]);
}

static inline void matmul_few_rows(floatX *y, const floatX *x, const floatX *weight, int N, int IC, int OC, int ldy) {
    int piece = MATMUL_PIECE / (IC * (int)sizeof(floatX)), several = OC / (8 * omp_get_max_threads());
    piece = max_int(1, min_int(piece, several));
#pragma omp parallel for schedule(dynamic, piece) if (worth_threads((size_t)OC * IC))
    for (int o = 0; o < OC; o++) {
        const floatX *w = weight + (size_t)o * IC;
        bool last = o >= OC / TILE_LANES * TILE_LANES;
        for (int n = 0, rows; n < N; n += rows) { // the row of the weight is then in the cache
            floatX *to = y + (size_t)n * ldy + o;
            const floatX *from = x + (size_t)n * IC;
            if (N - n >= 8) matmul_column(rows = 8, to, from, w, IC, ldy, last);
            else if (N - n >= 4) matmul_column(rows = 4, to, from, w, IC, ldy, last);
            else if (N - n >= 2) matmul_column(rows = 2, to, from, w, IC, ldy, last);
            else matmul_column(rows = 1, to, from, w, IC, ldy, last);
        }
    }
}

static inline void matmul_forward(floatX *y, const floatX *x, const floatX *weight, int N, int IC, int OC, int ldy) {
    if (N <= MATMUL_FEW_ROWS && IC % TILE_LANES == 0) matmul_few_rows(y, x, weight, N, IC, OC, ldy);
    else gemm(CblasNoTrans, CblasTrans, N, OC, IC, 1, x, IC, weight, IC, 0, y, ldy);
}

static inline void matmul_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x, const floatX *weight,
                                   int N, int IC, int OC, int ldy, bool add) {
    gemm(CblasNoTrans, CblasNoTrans, N, IC, OC, 1, dy, ldy, weight, IC, 0, dx, IC);         // dx = dy weight
    gemm(CblasTrans, CblasNoTrans, OC, IC, N, 1, dy, ldy, x, IC, add ? 1 : 0, dweight, IC); // dweight = dy^T x
}

static const bool matmul_has_choice = true; // --matmul-dtype chooses the type of the operands
static const bool matmul_in_bf16 = false;   // the build stores bf16
