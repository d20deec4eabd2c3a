/*
matmul: a linear layer without bias, by a GEMM library.

  forward   y = x weight^T
  backward  dx = dy weight,   dweight += dy^T x
  shapes    x (N,IC), weight (OC,IC), y and dy (N,OC) with row stride ldy >= OC
  numerics  products and sums in `real` by the library, in an order that it fixes for a given shape and
            number of threads
  flops     2 N IC OC forward, twice that backward

The library is oneDNN for fp32 where the build found it (ONEDNN), since it is the faster one on the products of
training (dev/BENCH.md), and CBLAS otherwise and for fp64. OpenBLAS, the usual CBLAS, may pick AVX2 kernels on a CPU
newer than itself, where AVX-512 ones would run twice as fast; matmul_prepare sees that and starts the program again
with the right kernels chosen.
*/
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#ifdef __cplusplus
extern "C" {
#endif
extern char *openblas_get_corename(void) __attribute__((weak)); // absent from other CBLAS libraries
extern char *openblas_get_config(void) __attribute__((weak));
#ifdef __cplusplus
}
#endif

#ifdef ONEDNN
static const bool matmul_by_onednn = sizeof(real) == sizeof(float);
#else
static const bool matmul_by_onednn = false;
#endif

// C = alpha op(A) op(B) + beta C;  op(A) is M x K, op(B) K x N, C M x N, row-major; not within a parallel region
static inline void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int M, int N, int K, real alpha, const real *A, int lda,
                        const real *B, int ldb, real beta, real *C, int ldc) {
#ifdef ONEDNN
    if (sizeof(real) == sizeof(float)) {
        dnnl_status_t status = dnnl_sgemm(ta == CblasTrans ? 'T' : 'N', tb == CblasTrans ? 'T' : 'N', M, N, K, (float)alpha,
                                          (const float *)(const void *)A, lda, (const float *)(const void *)B, ldb, (float)beta,
                                          (float *)(void *)C, ldc);
        CHECK(status == dnnl_success, "oneDNN failed to multiply %d x %d x %d (status %d): out of memory?", M, N, K, (int)status);
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

static inline void matmul_forward(floatX *y, const floatX *x, const floatX *weight, int N, int IC, int OC, int ldy) {
    gemm(CblasNoTrans, CblasTrans, N, OC, IC, 1, x, IC, weight, IC, 0, y, ldy);
}

static inline void matmul_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x, const floatX *weight,
                                   int N, int IC, int OC, int ldy) {
    gemm(CblasNoTrans, CblasNoTrans, N, IC, OC, 1, dy, ldy, weight, IC, 0, dx, IC);   // y = x weight^T
    gemm(CblasTrans, CblasNoTrans, OC, IC, N, 1, dy, ldy, x, IC, 1, dweight, IC);     // y = x weight^T
}

// To be called first in main. Sets OPENBLAS_CORETYPE and runs the program again when the library would leave
// AVX-512 unused; says so when it cannot.
static inline void matmul_prepare(char **argv) {
#if defined(__x86_64__)
    const char *wide[] = {"SkylakeX", "Cooperlake", "SapphireRapids"};
    if (matmul_by_onednn || openblas_get_corename == NULL || getenv("OPENBLAS_CORETYPE") != NULL) return;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl"))
        return;
    for (size_t i = 0; i < sizeof(wide) / sizeof(wide[0]); i++)
        if (strcmp(openblas_get_corename(), wide[i]) == 0) return;
    if (setenv("OPENBLAS_CORETYPE", "SkylakeX", 1) == 0) execv("/proc/self/exe", argv);
    warn("OpenBLAS uses its %s kernels on a CPU with AVX-512, at about half speed; set OPENBLAS_CORETYPE=SkylakeX",
         openblas_get_corename());
#else
    (void)argv;
#endif
}

// Name, version and kernels of the library, for run.json.
static inline const char *matmul_library(void) {
    static char text[256];
#ifdef ONEDNN
    const dnnl_version_t *version = dnnl_version();
    FORMAT(text, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
    if (matmul_by_onednn) return text;
#endif
    if (openblas_get_config == NULL || openblas_get_corename == NULL) return "CBLAS";
    FORMAT(text, "%s, kernels %s", openblas_get_config(), openblas_get_corename());
    return text;
}

// GFLOP/s of the library on a large product, best of a few: what a step's speed is compared with.
static inline double matmul_peak_gflops(void) {
    enum { SIZE = 1024, TRIES = 6 };
    real *m = (real *)buffer_alloc(3 * (size_t)SIZE * SIZE * sizeof(real), "measuring the peak of the GEMM library");
    double best = 0;
    for (int i = 0; i < TRIES; i++) {
        double start = now_seconds();
        gemm(CblasNoTrans, CblasTrans, SIZE, SIZE, SIZE, 1, m, SIZE, m + SIZE * SIZE, SIZE, 0, m + 2 * SIZE * SIZE, SIZE);
        double gflops = 2e-9 * SIZE * SIZE * SIZE / (now_seconds() - start);
        if (gflops > best) best = gflops;
    }
    buffer_free(m);
    return best;
}
#endif
