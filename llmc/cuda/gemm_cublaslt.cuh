/*
gemm_cublaslt.cuh: matrix products by cuBLASLt, with the interface of gemm_shape.cuh.

  layout     row-major C = A B is column-major C^T = B^T A^T: cuBLASLt gets B as its first operand and A as its second;
             our rows are its columns
  numerics   compute type fp32 for bf16 and fp32: TF32 is not allowed. Split sums are added in fp32, in the workspace,
             never in the output's type. Sums of FP8 are moved to fp32 registers every few products: the default of
             CUBLASLT_MATMUL_DESC_FAST_ACCUM
*/
#pragma once
#include "device.cuh"
#include "gemm_shape.cuh"
#include <cublasLt.h>

#define CUBLAS_CHECK(call)                                                               \
    do {                                                                                 \
        cublasStatus_t cublas_status = (call);                                           \
        if (cublas_status == CUBLAS_STATUS_ALLOC_FAILED) out_of_device_memory(0, #call); \
        CHECK(cublas_status == CUBLAS_STATUS_SUCCESS, "cuBLASLt failed: %s (%s, %s:%d)", \
              cublasLtGetStatusString(cublas_status), #call, __FILE__, __LINE__);        \
    } while (0)

typedef struct {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;
} GemmHandles;

static cublasLtHandle_t cublaslt;
static_assert(sizeof(GemmAlgorithm) == sizeof(cublasLtMatmulAlgo_t), "an algorithm of cuBLASLt has another size");

static inline void gemm_library_start(void) { CUBLAS_CHECK(cublasLtCreate(&cublaslt)); }
static inline void gemm_library_stop(void) { CUBLAS_CHECK(cublasLtDestroy(cublaslt)); }

// The layouts and the operation in cuBLASLt's terms: its first operand is B, its second A, its rows are our columns.
static inline void gemm_describe(GemmHandles *h, const GemmProblem *p) {
    const GemmShape s = p->shape;
    const cudaDataType_t stored = sizeof(floatX) == 2 ? CUDA_R_16BF : CUDA_R_32F;
    const cudaDataType_t types[OPERAND_TYPES] = {stored, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    cublasOperation_t op_b = s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                      op_a = s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&h->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(h->operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof(op_b)));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(h->operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof(op_a)));
    uint64_t M = (uint64_t)s.M, N = (uint64_t)s.N, K = (uint64_t)s.K;
    CUBLAS_CHECK(
        cublasLtMatrixLayoutCreate(&h->b, types[p->types[1]], s.transpose_b ? K : N, s.transpose_b ? N : K, s.ldb));
    CUBLAS_CHECK(
        cublasLtMatrixLayoutCreate(&h->a, types[p->types[0]], s.transpose_a ? M : K, s.transpose_a ? K : M, s.lda));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&h->c, s.fp32_out ? CUDA_R_32F : stored, N, M, s.ldc));
    const int32_t count = (int32_t)p->count;
    const int64_t apart = (int64_t)p->apart;
    for (auto to : {h->a, h->b, h->c}) {
        CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
        CUBLAS_CHECK(
            cublasLtMatrixLayoutSetAttribute(to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &apart, sizeof(apart)));
    }
}

static inline void gemm_set_scales(const GemmHandles *h, const GemmOperands *x) {
    if (x->types[0] == OPERAND_STORED) return;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(h->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &x->B_scale,
                                                sizeof(x->B_scale)));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(h->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x->A_scale,
                                                sizeof(x->A_scale)));
}

static inline void gemm_forget(GemmHandles *h) {
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(h->a));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(h->b));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(h->c));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(h->operation));
}

static inline int gemm_find(GemmAlgorithm *found, int limit, const GemmHandles *h, const GemmProblem *p, bool may_split,
                            const char **why) {
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        uint32_t value;
    } wishes[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p->alignment[1]}, // its first operand is our B
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p->alignment[0]},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p->alignment[2]},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p->alignment[2]},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, // the type in which split sums are added; NONE: no splitting
         may_split ? (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : (uint32_t)CUBLASLT_REDUCTION_SCHEME_NONE}};
    size_t bytes = GEMM_WORKSPACE_BYTES;
    cublasLtMatmulPreference_t wish;
    cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES];
    int count = 0, sound = 0;
    assert(limit <= GEMM_CANDIDATES);
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&wish));
    CUBLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes)));
    for (size_t i = 0; i < sizeof(wishes) / sizeof(wishes[0]); i++)
        CUBLAS_CHECK(
            cublasLtMatmulPreferenceSetAttribute(wish, wishes[i].name, &wishes[i].value, sizeof(wishes[i].value)));
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(cublaslt, h->operation, h->b, h->a, h->c, h->c, wish, limit, results, &count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(wish));
    if (status != CUBLAS_STATUS_SUCCESS) count = 0;
    for (int i = 0; i < count; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) memcpy(&found[sound++], &results[i].algo, sizeof(GemmAlgorithm));
        else status = results[i].state;
    }
    if (sound == 0 && status != CUBLAS_STATUS_SUCCESS) *why = cublasLtGetStatusString(status);
    return sound;
}

// The number of parts into which an algorithm divides the sum over K.
static inline int gemm_parts_of_k(const GemmAlgorithm *algorithm) {
    int32_t parts = 1;
    size_t written = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoConfigGetAttribute((const cublasLtMatmulAlgo_t *)(const void *)algorithm,
                                                      CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts),
                                                      &written));
    return parts;
}

static inline void gemm_multiply(const GemmHandles *h, const GemmProblem *p, const GemmAlgorithm *algorithm, void *C,
                                 const GemmOperands *x, void *workspace) {
    const float one = 1, beta = p->shape.add ? 1 : 0;
    CUBLAS_CHECK(cublasLtMatmul(cublaslt, h->operation, &one, x->B, h->b, x->A, h->a, &beta, C, h->c, C, h->c,
                                (const cublasLtMatmulAlgo_t *)(const void *)algorithm, workspace, GEMM_WORKSPACE_BYTES,
                                main_stream));
}

static inline const char *gemm_library(void) {
    static char text[64];
    size_t version = cublasLtGetVersion();
    FORMAT(text, "cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return text;
}
