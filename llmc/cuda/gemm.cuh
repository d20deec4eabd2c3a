/*
gemm.cuh: the one seam to a library for matrix products.

  gemm(shape, C, A, B)     C = op(A) op(B), or C += op(A) op(B);  op(A) is M x K, op(B) K x N, C M x N, all row-major

  types      A and B floatX; C floatX, or fp32 where shape.fp32_out
  numerics   products of floatX, sums in fp32 (never TF32), one rounding at the store
  behind it  gemm_plans.cuh and gemm_table.cuh choose how; cuBLASLt computes (gemm_cublaslt.cuh), or where kernels run
             on the CPU a C twin (dev/cuda_on_cpu/gemm.h); gemm_plain.cuh is a kernel of our own for what the library
             refuses
*/
#ifndef LLMC_GEMM_CUH
#define LLMC_GEMM_CUH

typedef struct {
    bool transpose_a, transpose_b; // how op reads what is stored
    bool add, fp32_out;
    int M, N, K, lda, ldb, ldc; // row strides of what is stored
} GemmShape;

typedef struct {
    GemmShape shape;
    unsigned alignment[3]; // bytes, of A, B and C: powers of two
} GemmProblem;
typedef struct {
    uint64_t data[8];
} GemmAlgorithm; // how a library computes a product, in its own words

enum { GEMM_WORKSPACE_BYTES = 32 << 20, GEMM_CANDIDATES = 8 };

// gemm_plans.cuh
static inline void gemm(GemmShape shape, void *C, const floatX *A, const floatX *B);
// gemm_start and gemm_stop: with ops_init and ops_free. The first allocates GEMM_WORKSPACE_BYTES of device memory.
// gemm_started: between the two.
static inline void gemm_plain(GemmShape s, void *C, const floatX *A, const floatX *B); // gemm_plain.cuh

// The library defines GemmHandles, its own description of a shape, gemm_library_start and gemm_library_stop, and:
static inline const char *gemm_library(void); // name and version
//   void gemm_describe(GemmHandles *, GemmShape), void gemm_forget(GemmHandles *)
//   int gemm_find(GemmAlgorithm *found, int limit, const GemmHandles *, const GemmProblem *, bool may_split, const char
//       **why)                        up to `limit` algorithms, the fastest by its estimate first; why: there is none
//   int gemm_parts_of_k(const GemmAlgorithm *)                      in how many parts the algorithm sums over K
//   bool gemm_accepts(const GemmHandles *, const GemmAlgorithm *)   whether an algorithm out of a file is one for it
//   void gemm_multiply(const GemmHandles *, GemmShape, const GemmAlgorithm *, C, A, B, workspace)

enum { GEMM_DEEPEST_TILE = 128 };
// Whether the sum over K may be divided into `parts`: see gemm_plans.cuh.
static inline bool gemm_may_split(int K, int parts) { return parts <= 1 || K % GEMM_DEEPEST_TILE == 0; }

static inline double gemm_flops(GemmShape s) { return 2.0 * s.M * s.N * s.K; }
static inline size_t gemm_bytes(GemmShape s) {
    size_t M = (size_t)s.M, N = (size_t)s.N, K = (size_t)s.K, out = s.fp32_out ? sizeof(float) : sizeof(floatX);
    return (M * K + K * N) * sizeof(floatX) + M * N * out * (s.add ? 2 : 1);
}

#include "gemm_plain.cuh"
#ifdef CUDA_ON_CPU
#include <cuda_on_cpu/gemm.h>
#else
#include "gemm_cublaslt.cuh"
#endif
#include "gemm_table.cuh"
#include "gemm_plans.cuh"
#endif
