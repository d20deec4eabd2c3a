/*
gemm_cublaslt: matrix products by cuBLASLt, behind gemm.cuh.

  layout     row-major C = A B is column-major C^T = B^T A^T: cuBLASLt is handed B first, then A; our rows are its
             columns
  plans      the descriptors and the algorithm of a product are looked up once per (shape, alignment of its addresses)
             and kept. What cuBLASLt refuses (odd strides, perhaps) is computed by gemm_plain, and said in one line.
  workspace  GEMM_WORKSPACE_BYTES of device memory, which Hopper's kernels ask for, allocated before the first step
  numerics   compute type fp32 for bf16 and fp32 alike: TF32 is not allowed. Split sums are put together in fp32, in the
             workspace, never in the output's type.
*/
#ifndef LLMC_GEMM_CUBLASLT_CUH
#define LLMC_GEMM_CUBLASLT_CUH
#include <cublasLt.h>

#define CUBLAS_CHECK(call)                                                               \
    do {                                                                                 \
        cublasStatus_t cublas_status = (call);                                           \
        if (cublas_status == CUBLAS_STATUS_ALLOC_FAILED) out_of_device_memory(0, #call); \
        CHECK(cublas_status == CUBLAS_STATUS_SUCCESS, "cuBLASLt failed: %s (%s, %s:%d)", \
              cublasLtGetStatusString(cublas_status), #call, __FILE__, __LINE__);        \
    } while (0)

enum { GEMM_PLANS = 256 };

typedef struct {
    GemmShape shape;
    unsigned alignment[3]; // bytes, of A, B and C: powers of two
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
    bool refused;
} GemmPlan;

static struct {
    cublasLtHandle_t handle;
    void *workspace;
    int count; // of all plans made; of more than GEMM_PLANS the oldest are forgotten
    GemmPlan plans[GEMM_PLANS];
} gemm_state;

static inline bool gemm_started(void) { return gemm_state.handle != NULL; }
static inline void gemm_start(void) {
    CUBLAS_CHECK(cublasLtCreate(&gemm_state.handle));
    gemm_state.workspace = buffer_alloc(GEMM_WORKSPACE_BYTES, "cuBLASLt's workspace");
}

static inline void gemm_forget(GemmPlan *plan) {
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->a));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->b));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->c));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan->operation));
}

static inline void gemm_stop(void) {
    if (gemm_state.handle == NULL) return;
    for (int i = 0; i < min_int(gemm_state.count, GEMM_PLANS); i++) gemm_forget(&gemm_state.plans[i]);
    buffer_free(gemm_state.workspace);
    CUBLAS_CHECK(cublasLtDestroy(gemm_state.handle));
    memset(&gemm_state, 0, sizeof(gemm_state));
}

// The largest power of two, up to 256, that divides the address.
static inline unsigned gemm_alignment(const void *p) {
    unsigned alignment = 256;
    while ((uintptr_t)p % alignment) alignment /= 2;
    return alignment;
}

static inline bool gemm_same_shape(GemmShape a, GemmShape b) {
    return a.transpose_a == b.transpose_a && a.transpose_b == b.transpose_b && a.add == b.add &&
           a.fp32_out == b.fp32_out && a.M == b.M && a.N == b.N && a.K == b.K && a.lda == b.lda && a.ldb == b.ldb &&
           a.ldc == b.ldc;
}

// The layouts and the operation, as cuBLASLt sees them: its first operand is B, its second A, its rows are our columns.
static inline void gemm_describe(GemmPlan *plan, cudaDataType_t in, cudaDataType_t out) {
    GemmShape s = plan->shape;
    cublasOperation_t op_b = s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                      op_a = s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof(op_b)));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof(op_a)));
    uint64_t M = (uint64_t)s.M, N = (uint64_t)s.N, K = (uint64_t)s.K;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->b, in, s.transpose_b ? K : N, s.transpose_b ? N : K, s.ldb));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->a, in, s.transpose_a ? M : K, s.transpose_a ? K : M, s.lda));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->c, out, N, M, s.ldc));
}

static inline void gemm_choose(GemmPlan *plan) {
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        unsigned bytes;
    } alignments[] = {{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, plan->alignment[1]}, // its first operand is our B
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, plan->alignment[0]},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plan->alignment[2]},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, plan->alignment[2]}};
    size_t bytes = GEMM_WORKSPACE_BYTES;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasLtMatmulPreference_t wish;
    cublasLtMatmulHeuristicResult_t found;
    memset(&found, 0, sizeof(found));
    int count = 0;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&wish));
    CUBLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes)));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                                                      sizeof(reductions)));
    for (size_t i = 0; i < sizeof(alignments) / sizeof(alignments[0]); i++)
        CUBLAS_CHECK(
            cublasLtMatmulPreferenceSetAttribute(wish, alignments[i].name, &alignments[i].bytes, sizeof(unsigned)));
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gemm_state.handle, plan->operation, plan->b, plan->a,
                                                           plan->c, plan->c, wish, 1, &found, &count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(wish));
    const GemmShape *s = &plan->shape;
    plan->refused = status != CUBLAS_STATUS_SUCCESS || count == 0 || found.state != CUBLAS_STATUS_SUCCESS;
    if (plan->refused)
        warn("cuBLASLt does not multiply %d x %d x %d with row strides %d, %d, %d (%s); a slower kernel does", s->M,
             s->N, s->K, s->lda, s->ldb, s->ldc,
             cublasLtGetStatusString(status != CUBLAS_STATUS_SUCCESS ? status
                                     : count                         ? found.state
                                                                     : CUBLAS_STATUS_NOT_SUPPORTED));
    plan->algorithm = found.algo;
}

static inline const GemmPlan *gemm_plan(GemmShape shape, const void *A, const void *B, const void *C) {
    unsigned alignment[3] = {gemm_alignment(A), gemm_alignment(B), gemm_alignment(C)};
    for (int i = 0; i < min_int(gemm_state.count, GEMM_PLANS); i++) {
        const GemmPlan *plan = &gemm_state.plans[i];
        if (gemm_same_shape(plan->shape, shape) && memcmp(plan->alignment, alignment, sizeof(alignment)) == 0)
            return plan;
    }
    GemmPlan *plan = &gemm_state.plans[gemm_state.count % GEMM_PLANS];
    if (gemm_state.count++ >= GEMM_PLANS) gemm_forget(plan);
    if (gemm_state.count == 2 * GEMM_PLANS) gemm_state.count = GEMM_PLANS;
    plan->shape = shape;
    memcpy(plan->alignment, alignment, sizeof(alignment));
    cudaDataType_t in = sizeof(floatX) == 2 ? CUDA_R_16BF : CUDA_R_32F;
    gemm_describe(plan, in, shape.fp32_out ? CUDA_R_32F : in);
    gemm_choose(plan);
    return plan;
}

static inline void gemm(GemmShape shape, void *C, const floatX *A, const floatX *B) {
    assert(gemm_started());
    const GemmPlan *plan = gemm_plan(shape, A, B, C);
    if (plan->refused) {
        gemm_plain(shape, C, A, B);
        return;
    }
    const float one = 1, beta = shape.add ? 1 : 0;
    CUBLAS_CHECK(cublasLtMatmul(gemm_state.handle, plan->operation, &one, B, plan->b, A, plan->a, &beta, C, plan->c, C,
                                plan->c, &plan->algorithm, gemm_state.workspace, GEMM_WORKSPACE_BYTES, main_stream));
}

static inline const char *gemm_library(void) {
    static char text[64];
    size_t version = cublasLtGetVersion();
    FORMAT(text, "cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return text;
}
#endif
