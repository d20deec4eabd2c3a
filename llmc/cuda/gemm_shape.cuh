/*
gemm_shape.cuh: the description of a matrix product, and the interface of the library that computes it.

The library is cuBLASLt (gemm_cublaslt.cuh) or, for kernels that run on the CPU, CBLAS (dev/cuda_on_cpu/gemm.h). It
defines GemmHandles, its own description of a shape, and these functions:

  gemm_library()                           name and version
  gemm_library_start(), gemm_library_stop()
  gemm_describe(&handles, shape), gemm_forget(&handles)
  gemm_find(found, limit, &handles, &problem, may_split, &why)
                                           finds up to `limit` algorithms, the fastest by the library's estimate first;
                                           returns their number; 0: `why` is the reason
  gemm_parts_of_k(&algorithm)              number of parts into which the algorithm divides the sum over K
  gemm_accepts(&handles, &algorithm)       whether the library accepts an algorithm that was read from a file
  gemm_multiply(&handles, shape, &algorithm, C, A, B, workspace)
*/
#ifndef LLMC_GEMM_SHAPE_CUH
#define LLMC_GEMM_SHAPE_CUH
#include "device_types.cuh"
#include <stdint.h>

typedef struct {
    bool transpose_a, transpose_b; // op() transposes the stored matrix
    bool add, fp32_out;
    int M, N, K, lda, ldb, ldc; // ld: row strides of the stored matrices, in elements
} GemmShape;

typedef struct {
    GemmShape shape;
    unsigned alignment[3]; // bytes, of A, B and C: powers of two
} GemmProblem;
typedef struct {
    uint64_t data[8];
} GemmAlgorithm; // an algorithm in the library's encoding

enum { GEMM_WORKSPACE_BYTES = 32 << 20, GEMM_CANDIDATES = 8 };

enum { GEMM_DEEPEST_TILE = 128 };
// Whether the sum over K may be divided into `parts`: see gemm.cuh.
static inline bool gemm_may_split(int K, int parts) { return parts <= 1 || K % GEMM_DEEPEST_TILE == 0; }
#endif
