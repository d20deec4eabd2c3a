/*
matmul.h: a linear layer without bias, by a GEMM library.

  forward   y = x weight^T
  backward  dx = dy weight,   dweight = dy^T x, or with add += dy^T x
  shapes    x (N,IC), weight (OC,IC), y and dy (N,OC) with row stride ldy >= OC
  numerics  products and sums in `real`, in an order that the library fixes for a given shape and number of threads.
            After matmul_use_bf16, x, weight and dy are first rounded to bf16, in the workspace, if N >= BF16_ROWS: for
            fewer rows rounding the weight costs more than it saves.
  flops     2 N IC OC forward, twice that backward
  library   oneDNN for fp32 if the build has it (ONEDNN), since it is faster on the products of training (dev/BENCH.md);
            CBLAS otherwise and for fp64. OpenBLAS, the usual CBLAS, may select AVX2 kernels on a CPU that is newer than
            its release, although AVX-512 kernels are twice as fast; environment.h then selects the right kernels.
*/
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H
#include "ops.h"
#include "runtime.h"
#include "matmul_bf16.h"

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

enum { BF16_ROWS = 16 };
static const bool matmul_has_choice = true; // of the type of the operands: --gemm
static bool matmul_in_bf16;                 // --gemm bf16
static bool matmul_bf16_native; // the CPU multiplies bf16; otherwise the rounded numbers are multiplied in fp32

static inline void matmul_use_bf16(bool on) {
    matmul_in_bf16 = on;
    matmul_bf16_native = on && matmul_by_onednn && bf16_begin();
}

static inline size_t bf16_size(void) { return matmul_bf16_native ? sizeof(bf16_t) : sizeof(float); }
static inline int bf16_stride(int columns) { return (int)round_up(columns, 32); } // whole cache lines

static inline size_t matmul_workspace_bytes(int N, int IC, int OC) {
    if (!matmul_in_bf16) return 0;
    size_t in = bf16_stride(IC), out = bf16_stride(OC);
    return bf16_size() * (N * in + OC * in + N * out);
}

// 64 MiB of rows are enough for the full speed of the GEMM (dev/BENCH.md).
static inline size_t matmul_rows_at_a_time(size_t row_bytes) { return max_size(64, (64u << 20) / row_bytes); }

// Writes a rounded matrix to `to`; returns the address behind it.
static inline char *matmul_round(char *to, const real *in, int ld, int rows, int columns) {
    int ldo = bf16_stride(columns);
    const float *from = (const float *)(const void *)in;
    if (matmul_bf16_native) bf16_round_matrix((bf16_t *)(void *)to, ldo, from, ld, rows, columns);
    else bf16_round_matrix_wide((float *)(void *)to, ldo, from, ld, rows, columns);
    return to + (size_t)rows * ldo * bf16_size();
}

static inline void matmul_rounded(Bf16Shape s, const char *A, const char *B, real *C) {
#ifdef ONEDNN
    if (matmul_bf16_native) {
        gemm_bf16(s, (const bf16_t *)(const void *)A, (const bf16_t *)(const void *)B, (float *)(void *)C);
        return;
    }
#endif
    gemm(s.ta ? CblasTrans : CblasNoTrans, s.tb ? CblasTrans : CblasNoTrans, s.M, s.N, s.K, 1,
         (const real *)(const void *)A, s.lda, (const real *)(const void *)B, s.ldb, s.add ? 1 : 0, C, s.ldc);
}

static inline void matmul_forward_bf16(floatX *y, const floatX *x, const floatX *weight, int N, int IC, int OC,
                                       int ldy) {
    int ldi = bf16_stride(IC);
    char *x16 = (char *)ops_workspace_take(matmul_workspace_bytes(N, IC, OC)),
         *weight16 = matmul_round(x16, x, IC, N, IC);
    matmul_round(weight16, weight, IC, OC, IC);
    Bf16Shape forward = {false, true, false, N, OC, IC, ldi, ldi, ldy};
    matmul_rounded(forward, x16, weight16, y);
}

static inline void matmul_backward_bf16(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x,
                                        const floatX *weight, int N, int IC, int OC, int ldy, bool add) {
    int ldi = bf16_stride(IC), ldo = bf16_stride(OC);
    char *x16 = (char *)ops_workspace_take(matmul_workspace_bytes(N, IC, OC)),
         *weight16 = matmul_round(x16, x, IC, N, IC);
    char *dy16 = matmul_round(weight16, weight, IC, OC, IC);
    matmul_round(dy16, dy, ldy, N, OC);
    Bf16Shape to_input = {false, false, false, N, IC, OC, ldo, ldi, IC},
              to_weight = {true, false, add, OC, IC, N, ldo, ldi, IC};
    matmul_rounded(to_input, dy16, weight16, dx);
    matmul_rounded(to_weight, dy16, x16, dweight);
}

static inline void matmul_forward(floatX *y, const floatX *x, const floatX *weight, int N, int IC, int OC, int ldy) {
    if (matmul_in_bf16 && N >= BF16_ROWS) matmul_forward_bf16(y, x, weight, N, IC, OC, ldy);
    else gemm(CblasNoTrans, CblasTrans, N, OC, IC, 1, x, IC, weight, IC, 0, y, ldy);
}

static inline void matmul_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x, const floatX *weight,
                                   int N, int IC, int OC, int ldy, bool add) {
    if (matmul_in_bf16 && N >= BF16_ROWS) {
        matmul_backward_bf16(dx, dweight, dy, x, weight, N, IC, OC, ldy, add);
        return;
    }
    gemm(CblasNoTrans, CblasNoTrans, N, IC, OC, 1, dy, ldy, weight, IC, 0, dx, IC);         // dx = dy weight
    gemm(CblasTrans, CblasNoTrans, OC, IC, N, 1, dy, ldy, x, IC, add ? 1 : 0, dweight, IC); // dweight = dy^T x
}

// Whether the library needs OPENBLAS_CORETYPE to use AVX-512.
static inline bool matmul_wants_wide_kernels(void) {
#if defined(__x86_64__)
    const char *wide[] = {"SkylakeX", "Cooperlake", "SapphireRapids"};
    if (matmul_by_onednn || openblas_get_corename == NULL) return false;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl"))
        return false;
    for (size_t i = 0; i < sizeof(wide) / sizeof(wide[0]); i++)
        if (strcmp(openblas_get_corename(), wide[i]) == 0) return false;
    return true;
#else
    return false;
#endif
}

static const bool matmul_has_algorithms = false;
static inline void matmul_tune_measure(void) {}
static inline char *matmul_tune_table(size_t *size) { return (char *)checked_calloc(*size = 1, 1); }
static inline bool matmul_tune_read(const char *text, size_t size, char *why, size_t why_size) {
    (void)text, (void)size;
    snprintf(why, why_size, "the libraries of the CPU have no choice of algorithms");
    return false;
}
static inline int matmul_tune_missed(void) { return 0; }

// Name, version and kernels of the library, for run.json.
static inline const char *matmul_library(void) {
    static char text[256];
    const char *bf16 = !matmul_in_bf16      ? ""
                       : matmul_bf16_native ? ", bf16 products"
                                            : ", fp32 products of numbers rounded to bf16";
#ifdef ONEDNN
    const dnnl_version_t *version = dnnl_version();
    FORMAT(text, "oneDNN %d.%d.%d%s", version->major, version->minor, version->patch, bf16);
    if (matmul_by_onednn) return text;
#endif
    bool openblas = openblas_get_config != NULL && openblas_get_corename != NULL;
    if (openblas) FORMAT(text, "%s, kernels %s%s", openblas_get_config(), openblas_get_corename(), bf16);
    else FORMAT(text, "CBLAS%s", bf16);
    return text;
}

// GFLOP/s of the library on a large product, the maximum of a few: the reference for the speed of a step.
static inline double matmul_peak_gflops(void) {
    enum { SIZE = 1024, TRIES = 6 };
    real *m = (real *)buffer_alloc(3 * (size_t)SIZE * SIZE * sizeof(real), "measuring the peak of the GEMM library");
    double best = 0;
    for (int i = 0; i < TRIES; i++) {
        double start = now_seconds();
        Bf16Shape shape = {false, true, false, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE};
        const char *A = (const char *)m, *B = (const char *)(m + SIZE * SIZE); // of either type: zeros
        if (matmul_in_bf16) matmul_rounded(shape, A, B, m + 2 * SIZE * SIZE);
        else
            gemm(CblasNoTrans, CblasTrans, SIZE, SIZE, SIZE, 1, m, SIZE, m + SIZE * SIZE, SIZE, 0, m + 2 * SIZE * SIZE,
                 SIZE);
        double gflops = 2e-9 * SIZE * SIZE * SIZE / (now_seconds() - start);
        if (gflops > best) best = gflops;
    }
    buffer_free(m);
    return best;
}
#endif
