/*
gemm.cuh: matrix products.

  gemm(shape, C, A, B)     C = op(A) op(B), or C += op(A) op(B);  op(A) is M x K, op(B) K x N, C M x N, all row-major
  gemm_batch(shape, count, apart, C, A, B)   `count` such products, of matrices that are `apart` elements apart
  gemm_fp8(shape, C, operands)   gemm of operands in FP8, multiplied by their scales

  types      A and B floatX, or FP8; C floatX, or fp32 with shape.fp32_out
  numerics   products of floatX, sums in fp32 (never TF32), one rounding at the store
  plans      An algorithm is chosen once per (shape, alignment of the addresses) and kept. It is the first of the
             library's choices that is safe, so that identical runs are identical.
             A product that the library refuses is computed by gemm_plain, with a warning; in FP8 it is an error.
  split K    A library may divide the sum over K among several blocks. In cuBLASLt 12.8 to 13.1 on H100, GB200 and GB300
             such algorithms omit the last K % tile products (reproducer: facebookexperimental/triton, pull request
             2767). K is therefore split only if it is a multiple of the deepest tile.
  workspace  GEMM_WORKSPACE_BYTES of device memory, the size that Hopper's kernels need, allocated before the first step
*/
#pragma once
#include "device.cuh"
#include "gemm_plain.cuh"
#include "gemm_shape.cuh"
#ifdef CUDA_ON_CPU
#include <emulator/gemm.h>
#else
#include "gemm_cublaslt.cuh"
#endif

enum { GEMM_PLANS = 256 };

typedef struct {
    GemmProblem problem;
    GemmAlgorithm algorithm;
    GemmHandles handles; // the library's description
    bool refused;
} GemmPlan;

static struct {
    void *workspace;
    int count; // number of plans made; beyond GEMM_PLANS the oldest is replaced
    GemmPlan plans[GEMM_PLANS];
} gemm_state;

static inline bool gemm_started(void) { return gemm_state.workspace != NULL; }
static inline void gemm_start(void) {
    gemm_library_start();
    gemm_state.workspace = buffer_alloc(GEMM_WORKSPACE_BYTES, "cuBLASLt's workspace");
}

static inline void gemm_stop(void) {
    if (!gemm_started()) return;
    for (int i = 0; i < min_int(gemm_state.count, GEMM_PLANS); i++) gemm_forget(&gemm_state.plans[i].handles);
    buffer_free(gemm_state.workspace);
    gemm_library_stop();
    memset(&gemm_state, 0, sizeof(gemm_state));
}

// The largest power of two, up to 256, that divides the address.
static inline unsigned gemm_alignment(const void *p) {
    unsigned alignment = 256;
    while ((uintptr_t)p % alignment) alignment /= 2;
    return alignment;
}

static inline void gemm_choose(GemmPlan *plan) {
    const GemmProblem *p = &plan->problem;
    const GemmShape *s = &p->shape;
    GemmAlgorithm found[GEMM_CANDIDATES];
    const char *why = "no algorithm is safe";
    int count = gemm_find(found, GEMM_CANDIDATES, &plan->handles, p, gemm_may_split(p, 2), &why), safe = 0;
    while (safe < count && !gemm_may_split(p, gemm_parts_of_k(&found[safe]))) safe++;
    plan->refused = safe == count;
    CHECK(!plan->refused || !gemm_in_fp8(p),
          "cuBLASLt has no FP8 product %d x %d x %d with row strides %d, %d, %d (%s); use --matmul-dtype bf16", s->M,
          s->N, s->K, s->lda, s->ldb, s->ldc, why);
    if (plan->refused)
        warn("cuBLASLt does not support the product %d x %d x %d with row strides %d, %d, %d (%s); a slower kernel "
             "computes it",
             s->M, s->N, s->K, s->lda, s->ldb, s->ldc, why);
    else plan->algorithm = found[safe];
}

static inline GemmPlan *gemm_plan(GemmShape shape, size_t count, size_t apart, void *C, const GemmOperands *x) {
    const unsigned alignment[] = {gemm_alignment(x->A), gemm_alignment(x->B), gemm_alignment(C)};
    const GemmProblem problem = {
        shape, {x->types[0], x->types[1]}, {alignment[0], alignment[1], alignment[2]}, count, apart};
    for (int i = 0; i < min_int(gemm_state.count, GEMM_PLANS); i++)
        if (memcmp(&gemm_state.plans[i].problem, &problem, sizeof(problem)) == 0) return &gemm_state.plans[i];
    GemmPlan *plan = &gemm_state.plans[gemm_state.count % GEMM_PLANS];
    if (gemm_state.count++ >= GEMM_PLANS) gemm_forget(&plan->handles);
    if (gemm_state.count == 2 * GEMM_PLANS) gemm_state.count = GEMM_PLANS;
    plan->problem = problem;
    gemm_describe(&plan->handles, &problem);
    gemm_set_scales(&plan->handles, x);
    gemm_choose(plan);
    return plan;
}

static inline void gemm_of(GemmShape shape, size_t count, size_t apart, void *C, const GemmOperands *x) {
    CHECK(gemm_started(), "gemm: a product of %d x %d x %d before gemm_start", shape.M, shape.N, shape.K);
    GemmPlan *plan = gemm_plan(shape, count, apart, C, x);
    const size_t out = shape.fp32_out ? sizeof(float) : sizeof(floatX);
    for (size_t i = 0; i < count && plan->refused; i++)
        gemm_plain(shape, (char *)C + i * apart * out, (const floatX *)x->A + i * apart,
                   (const floatX *)x->B + i * apart);
    if (plan->refused) return;
    gemm_set_scales(&plan->handles, x);
    gemm_multiply(&plan->handles, &plan->problem, &plan->algorithm, C, x, gemm_state.workspace);
}

static inline void gemm_batch(GemmShape shape, size_t count, size_t apart, void *C, const floatX *A, const floatX *B) {
    const GemmOperands operands = {A, B, NULL, NULL, {OPERAND_STORED, OPERAND_STORED}};
    gemm_of(shape, count, apart, C, &operands);
}
static inline void gemm(GemmShape shape, void *C, const floatX *A, const floatX *B) {
    gemm_batch(shape, 1, 0, C, A, B);
}

static inline void gemm_fp8(GemmShape shape, void *C, GemmOperands operands) {
    assert(operands.types[0] != OPERAND_STORED && operands.types[1] != OPERAND_STORED);
    gemm_of(shape, 1, 0, C, &operands);
}
