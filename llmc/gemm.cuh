/*
gemm.cuh: the one seam to a library for matrix products.

  gemm(shape, C, A, B)     C = op(A) op(B), or C += op(A) op(B);  op(A) is M x K, op(B) K x N, C M x N, all row-major

  types      A and B floatX; C floatX, or fp32 where shape.fp32_out
  numerics   products of floatX, sums in fp32 (never TF32), one rounding at the store
  behind it  cuBLASLt (gemm_cublaslt.cuh), with a kernel of our own for what it refuses (gemm_plain.cuh); where
             kernels run on the CPU, a C twin (dev/cuda_on_cpu/gemm.h)
*/
#ifndef LLMC_GEMM_CUH
#define LLMC_GEMM_CUH

typedef struct {
    bool transpose_a, transpose_b; // how op reads what is stored
    bool add, fp32_out;
    int M, N, K, lda, ldb, ldc; // row strides of what is stored
} GemmShape;

static inline void gemm(GemmShape shape, void *C, const floatX *A, const floatX *B);
static inline const char *gemm_library(void); // name and version
// static inline void gemm_start(void), gemm_stop(void): with ops_init and ops_free. The first allocates
// GEMM_WORKSPACE_BYTES of device memory. static inline bool gemm_started(void): between the two.
enum { GEMM_WORKSPACE_BYTES = 32 << 20 };

static inline double gemm_flops(GemmShape s) { return 2.0 * s.M * s.N * s.K; }
static inline size_t gemm_bytes(GemmShape s) {
    size_t M = (size_t)s.M, N = (size_t)s.N, K = (size_t)s.K, out = s.fp32_out ? sizeof(float) : sizeof(floatX);
    return (M * K + K * N) * sizeof(floatX) + M * N * out * (s.add ? 2 : 1);
}

#include "gemm_plain.cuh"
#ifdef CUDA_ON_CPU
#include "../dev/cuda_on_cpu/gemm.h"
#else
#include "gemm_cublaslt.cuh"
#endif
#endif
