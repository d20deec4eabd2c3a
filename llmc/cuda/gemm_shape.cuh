/*
gemm_shape.cuh: the description of a matrix product, and the interface of the library that computes it.

The library is cuBLASLt (gemm_cublaslt.cuh) or, for kernels that run on the CPU, CBLAS (dev/emulator/gemm.h). It
defines GemmHandles, its own description of a shape, and these functions:

  gemm_library()                           name and version
  gemm_library_start(), gemm_library_stop()
  gemm_describe(&handles, &problem), gemm_forget(&handles)
  gemm_set_scales(&handles, operands)      products in FP8: the scales of the next gemm_find and gemm_multiply
  gemm_find(found, limit, &handles, &problem, may_split, &why)
                                           finds up to `limit` algorithms, the fastest by the library's estimate first;
                                           returns their number; 0: `why` is the reason
  gemm_parts_of_k(&algorithm)              number of parts into which the algorithm divides the sum over K
  gemm_multiply(&handles, &problem, &algorithm, C, operands, workspace)

  FP8   cuBLASLt multiplies E4M3 by E4M3 or E5M2, with C in bf16 or fp32. Compute capabilities 8.9, 9.0 and 12.0 require
        both operands contiguous along K (A not transposed, B transposed; the "TN" layout of cuBLASLt); sizes are
        multiples of 16, addresses and rows of 16 bytes (cuBLAS documentation, "cublasLtMatmul").
*/
#pragma once
#include "../base/element_types.h"
#include <stdint.h>

typedef struct {
    bool transpose_a, transpose_b; // op() transposes the stored matrix
    bool add, fp32_out;
    int M, N, K, lda, ldb, ldc; // ld: row strides of the stored matrices, in elements
} GemmShape;

// The types of A and B: floatX, or a format of FP8
typedef enum { OPERAND_STORED, OPERAND_E4M3, OPERAND_E5M2, OPERAND_TYPES } OperandType;

typedef struct {
    GemmShape shape;
    OperandType types[2];  // types of A and B
    unsigned alignment[3]; // bytes, of A, B and C: powers of two
    size_t count, apart;   // products, and the elements from one A, B and C to the next: a multiple of 128
} GemmProblem;
static_assert(sizeof(GemmProblem) == 4 * sizeof(bool) + 11 * sizeof(int) + 2 * sizeof(size_t), "padding is compared");
static inline bool gemm_in_fp8(const GemmProblem *p) { return p->types[0] != OPERAND_STORED; }

typedef struct {
    const void *A, *B;
    const float *A_scale, *B_scale; // FP8: factors of the stored numbers, in device memory; else NULL
    OperandType types[2];
} GemmOperands;

typedef struct {
    uint64_t data[8];
} GemmAlgorithm; // an algorithm in the library's encoding

enum { GEMM_WORKSPACE_BYTES = 32 << 20, GEMM_CANDIDATES = 8 };

enum { GEMM_DEEPEST_TILE = 128 }; // in elements of floatX; twice as many in FP8
// Whether the sum over K may be divided into `parts`: see gemm.cuh.
static inline bool gemm_may_split(const GemmProblem *p, int parts) {
    return parts <= 1 || p->shape.K % ((gemm_in_fp8(p) ? 2 : 1) * GEMM_DEEPEST_TILE) == 0;
}
