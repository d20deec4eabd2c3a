/*
gemm.cuh: matrix products.

  gemm(shape, C, A, B)     C = op(A) op(B), or C += op(A) op(B);  op(A) is M x K, op(B) K x N, C M x N, all row-major
  gemm_fp8(shape, C, operands)   the same of operands in FP8, times their scales

  types      A and B floatX, or FP8; C floatX, or fp32 with shape.fp32_out
  numerics   products of floatX, sums in fp32 (never TF32), one rounding at the store
  plans      An algorithm is chosen once per (shape, alignment of the addresses) and kept. It is the one that
             --tune-gemm has chosen (gemm_choices.cuh), otherwise the library's first choice, so that identical runs
             are identical.
             A product that the library refuses is computed by gemm_plain, with a warning; in FP8 it is an error.
  measuring  To choose, the library's first algorithms are timed on the operands of the product. The product is
             repeated, so its output is invalid.
  split K    A library may divide the sum over K among several blocks. In cuBLASLt 12.8 to 13.1 on H100, GB200 and GB300
             such algorithms omit the last K % tile products (reproducer: facebookexperimental/triton, pull request
             2767). K is therefore split only if it is a multiple of the deepest tile.
  workspace  GEMM_WORKSPACE_BYTES of device memory, the size that Hopper's kernels need, allocated before the first step
*/
#pragma once
#include "gemm_choices.cuh"
#include "gemm_plain.cuh"

enum { GEMM_PLANS = 256, GEMM_TRIES = 3 };

typedef struct {
    GemmProblem problem;
    GemmAlgorithm algorithm;
    GemmHandles handles; // the library's description
    bool refused;
} GemmPlan;

static struct {
    void *workspace;
    int count; // of all plans made; beyond GEMM_PLANS the oldest is replaced
    GemmPlan plans[GEMM_PLANS];
} gemm_state;

static inline bool gemm_started(void) { return gemm_state.workspace != NULL; }
static inline void gemm_start(void) {
    gemm_library_start();
    gemm_state.workspace = buffer_alloc(GEMM_WORKSPACE_BYTES, "cuBLASLt's workspace");
}

static inline void gemm_forget_plans(void) {
    for (int i = 0; i < min_int(gemm_state.count, GEMM_PLANS); i++) gemm_forget(&gemm_state.plans[i].handles);
    gemm_state.count = 0;
}

static inline void gemm_stop(void) {
    if (!gemm_started()) return;
    gemm_forget_plans();
    gemm_choices_free();
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

static inline bool gemm_same_problem(const GemmProblem *a, const GemmProblem *b) {
    const GemmShape *s = &a->shape, *t = &b->shape;
    return s->transpose_a == t->transpose_a && s->transpose_b == t->transpose_b && s->add == t->add &&
           s->fp32_out == t->fp32_out && s->M == t->M && s->N == t->N && s->K == t->K && s->lda == t->lda &&
           s->ldb == t->ldb && s->ldc == t->ldc && memcmp(a->types, b->types, sizeof(a->types)) == 0 &&
           memcmp(a->alignment, b->alignment, sizeof(a->alignment)) == 0 && a->fast_sums == b->fast_sums;
}

// The library's safe algorithms for a problem, the fastest by its estimate first; returns their number.
static inline int gemm_candidates(GemmAlgorithm found[GEMM_CANDIDATES], const GemmPlan *plan, const char **why) {
    const GemmProblem *p = &plan->problem;
    int count = gemm_find(found, GEMM_CANDIDATES, &plan->handles, p, gemm_may_split(p, 2), why);
    int sound = 0;
    for (int i = 0; i < count; i++)
        if (gemm_may_split(p, gemm_parts_of_k(&found[i]))) found[sound++] = found[i];
    return sound;
}

// The minimum milliseconds of a few runs, after one that loads the kernel.
static inline double gemm_time(const GemmPlan *plan, const GemmAlgorithm *algorithm, void *C,
                               const GemmOperands *operands) {
    cudaEvent_t begin, end;
    double best = INFINITY;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int i = 0; i <= GEMM_TRIES; i++) {
        float ms = 0;
        CUDA_CHECK(cudaEventRecord(begin, main_stream));
        gemm_multiply(&plan->handles, &plan->problem, algorithm, C, operands, gemm_state.workspace);
        CUDA_CHECK(cudaEventRecord(end, main_stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i > 0) best = fmin(best, (double)ms);
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return best;
}

// The fastest candidate; one other than the first must be faster by more than 1%.
static inline int gemm_fastest(const GemmPlan *plan, const GemmAlgorithm *found, int count, void *C,
                               const GemmOperands *operands) {
    int fastest = 0;
    double least = gemm_time(plan, &found[0], C, operands);
    for (int i = 1; i < count; i++) {
        double ms = gemm_time(plan, &found[i], C, operands);
        if (ms < 0.99 * least) fastest = i, least = ms;
    }
    return fastest;
}

static inline void gemm_choose(GemmPlan *plan, void *C, const GemmOperands *operands) {
    const GemmShape *s = &plan->problem.shape;
    GemmAlgorithm found[GEMM_CANDIDATES];
    const char *why = "no algorithm is safe";
    int count = gemm_candidates(found, plan, &why), choice = gemm_chosen(&plan->problem, count);
    plan->refused = count == 0;
    CHECK(!plan->refused || !gemm_in_fp8(&plan->problem),
          "cuBLASLt does not support the FP8 product %d x %d x %d with row strides %d, %d, %d (%s); use --gemm bf16",
          s->M, s->N, s->K, s->lda, s->ldb, s->ldc, why);
    if (plan->refused) {
        warn("cuBLASLt does not support the product %d x %d x %d with row strides %d, %d, %d (%s); a slower kernel "
             "computes it",
             s->M, s->N, s->K, s->lda, s->ldb, s->ldc, why);
        return;
    }
    if (choice < 0 && gemm_choices.measuring) {
        choice = gemm_fastest(plan, found, count, C, operands);
        gemm_choose_place(&plan->problem, choice);
    }
    plan->algorithm = found[max_int(choice, 0)];
}

static inline GemmPlan *gemm_plan(GemmShape shape, void *C, const GemmOperands *x) {
    GemmProblem problem = {shape,
                           {x->types[0], x->types[1]},
                           {gemm_alignment(x->A), gemm_alignment(x->B), gemm_alignment(C)},
                           x->fast_sums};
    for (int i = 0; i < min_int(gemm_state.count, GEMM_PLANS); i++)
        if (gemm_same_problem(&gemm_state.plans[i].problem, &problem)) return &gemm_state.plans[i];
    GemmPlan *plan = &gemm_state.plans[gemm_state.count % GEMM_PLANS];
    if (gemm_state.count++ >= GEMM_PLANS) gemm_forget(&plan->handles);
    if (gemm_state.count == 2 * GEMM_PLANS) gemm_state.count = GEMM_PLANS;
    plan->problem = problem;
    gemm_describe(&plan->handles, &problem);
    gemm_set_scales(&plan->handles, x);
    gemm_choose(plan, C, x);
    return plan;
}

static inline void gemm_of(GemmShape shape, void *C, const GemmOperands *x) {
    CHECK(gemm_started(), "gemm: a product of %d x %d x %d before gemm_start", shape.M, shape.N, shape.K);
    GemmPlan *plan = gemm_plan(shape, C, x);
    if (plan->refused) {
        gemm_plain(shape, C, (const floatX *)x->A, (const floatX *)x->B);
        return;
    }
    gemm_set_scales(&plan->handles, x);
    gemm_multiply(&plan->handles, &plan->problem, &plan->algorithm, C, x, gemm_state.workspace);
}

static inline void gemm(GemmShape shape, void *C, const floatX *A, const floatX *B) {
    const GemmOperands operands = {A, B, NULL, NULL, {OPERAND_STORED, OPERAND_STORED}, false};
    gemm_of(shape, C, &operands);
}

static inline void gemm_fp8(GemmShape shape, void *C, GemmOperands operands) {
    assert(operands.types[0] != OPERAND_STORED && operands.types[1] != OPERAND_STORED);
    gemm_of(shape, C, &operands);
}
