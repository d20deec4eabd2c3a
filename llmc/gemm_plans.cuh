/*
gemm_plans: how a product is computed, chosen once per (shape, alignment of its addresses) and kept. Behind gemm.cuh,
before the library (gemm_cublaslt.cuh).

  choice     the algorithm that the library takes for the fastest. What the library refuses is computed by gemm_plain,
             and said in one line.
  split K    A library may give parts of the sum over K to several blocks. cuBLASLt 12.8 to 13.1 leaves out the last
             K % tile products then, on H100, GB200 and GB300 (reproducer: facebookexperimental/triton, pull request
             2767). So K is only split where it is a multiple of the deepest tile.
  workspace  GEMM_WORKSPACE_BYTES of device memory, which Hopper's kernels ask for, allocated before the first step
*/
#ifndef LLMC_GEMM_PLANS_CUH
#define LLMC_GEMM_PLANS_CUH

enum { GEMM_PLANS = 256, GEMM_DEEPEST_TILE = 128 };

typedef struct {
    GemmProblem problem;
    GemmAlgorithm algorithm;
    GemmHandles handles; // the library's
    bool refused;
} GemmPlan;

static struct {
    void *workspace;
    int count; // of all plans made; of more than GEMM_PLANS the oldest are forgotten
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

static inline bool gemm_same_problem(const GemmProblem *a, const GemmProblem *b) {
    const GemmShape *s = &a->shape, *t = &b->shape;
    return s->transpose_a == t->transpose_a && s->transpose_b == t->transpose_b && s->add == t->add &&
           s->fp32_out == t->fp32_out && s->M == t->M && s->N == t->N && s->K == t->K && s->lda == t->lda &&
           s->ldb == t->ldb && s->ldc == t->ldc && memcmp(a->alignment, b->alignment, sizeof(a->alignment)) == 0;
}

// Whether the sum over K may be divided into `parts`.
static inline bool gemm_may_split(int K, int parts) { return parts <= 1 || K % GEMM_DEEPEST_TILE == 0; }

// The library's algorithms for a problem, the fastest by its estimate first; returns how many.
static inline int gemm_candidates(GemmAlgorithm found[GEMM_CANDIDATES], const GemmPlan *plan, const char **why) {
    const GemmShape *s = &plan->problem.shape;
    int count = gemm_find(found, GEMM_CANDIDATES, &plan->handles, &plan->problem, gemm_may_split(s->K, 2), why);
    int sound = 0;
    for (int i = 0; i < count; i++)
        if (gemm_may_split(s->K, gemm_parts_of_k(&found[i]))) found[sound++] = found[i];
    return sound;
}

static inline void gemm_choose(GemmPlan *plan) {
    const GemmShape *s = &plan->problem.shape;
    GemmAlgorithm found[GEMM_CANDIDATES];
    const char *why = "no algorithm is safe";
    plan->refused = gemm_candidates(found, plan, &why) == 0;
    if (plan->refused)
        warn("cuBLASLt does not multiply %d x %d x %d with row strides %d, %d, %d (%s); a slower kernel does", s->M,
             s->N, s->K, s->lda, s->ldb, s->ldc, why);
    else plan->algorithm = found[0];
}

static inline const GemmPlan *gemm_plan(GemmShape shape, const void *A, const void *B, const void *C) {
    GemmProblem problem = {shape, {gemm_alignment(A), gemm_alignment(B), gemm_alignment(C)}};
    for (int i = 0; i < min_int(gemm_state.count, GEMM_PLANS); i++)
        if (gemm_same_problem(&gemm_state.plans[i].problem, &problem)) return &gemm_state.plans[i];
    GemmPlan *plan = &gemm_state.plans[gemm_state.count % GEMM_PLANS];
    if (gemm_state.count++ >= GEMM_PLANS) gemm_forget(&plan->handles);
    if (gemm_state.count == 2 * GEMM_PLANS) gemm_state.count = GEMM_PLANS;
    plan->problem = problem;
    gemm_describe(&plan->handles, shape);
    gemm_choose(plan);
    return plan;
}

static inline void gemm(GemmShape shape, void *C, const floatX *A, const floatX *B) {
    CHECK(gemm_started(), "gemm: a product of %d x %d x %d before gemm_start", shape.M, shape.N, shape.K);
    const GemmPlan *plan = gemm_plan(shape, A, B, C);
    if (plan->refused) gemm_plain(shape, C, A, B);
    else gemm_multiply(&plan->handles, shape, &plan->algorithm, C, A, B, gemm_state.workspace);
}
#endif
