/*
attention_backend: attention_forward and attention_backward, by cuDNN where it takes the shape, else by the built-in kernel
(attention.cuh). Which of the two is decided once per shape and direction, by attention_prepare, before the workspace is
allocated; a shape that was not prepared (generation, the short sequences of --eval) is our kernel's. Our kernel uses no
tensor cores: where the user did not ask for it, attention_warning gives the reason and the remedy.

  strides    q, k, v and their gradients are where the fused GEMM has them: cuDNN is told the strides, nothing is copied
  halves     where cuDNN does not take values of width DV (diff_v1: 2D), it is called for each half of their columns. O
             is put together; with dP = dP_1 + dP_2 and delta = rowsum(dO O) = delta_1 + delta_2, dS = P (dP - delta) is
             dS_1 + dS_2, so dQ and dK are sums over the halves: the second goes to scratch memory and is added.
  add_dv     dV of a second key set goes to scratch memory and is added
  calls      cuDNN's deterministic backward may need NQ T^2 bf16 of workspace for each sequence. A workspace larger than
             attention_limit is kept for fewer sequences at a time or, where one is too much, for fewer groups of heads
             (a key/value head with the query heads that read it), if lse stays aligned. Sums cross neither, so that
             the bits are those of a single call. The limit is half of the device's memory that the run leaves.
  numerics   what is added has been rounded to floatX, once more than in our kernel
  order      the same bits in every run, unless attention_configure was told that they need not be
*/
#ifndef LLMC_ATTENTION_LIBRARY_CUH
#define LLMC_ATTENTION_LIBRARY_CUH
#include "../cuda/attention_cudnn.h"

enum { ATTENTION_ROUTES = 16, ATTENTION_PARTS = 2, ATTENTION_WHY = 400 };

// How one shape is computed in one direction.
typedef struct {
    AttentionShape shape;
    bool backward, add_dv;
    int parts;     // of the values' columns, each a call; 0: the built-in kernel
    int sequences; // per call
    int groups;    // of heads per call; all, unless a call has one sequence
    CudnnPlan *plans[ATTENTION_PARTS];
    size_t plan_bytes, scratch_bytes; // workspace: of the plans, and behind it for what is added
    char why[ATTENTION_WHY];          // not cuDNN
    const char *remedy;               // what would give it to cuDNN; NULL: our kernel is no surprise
} AttentionRoute;

static struct {
    AttentionOptions use;
    bool no_device;
    const char *ignored; // a variable of the environment, until attention_warning has named it
    int count, warned;   // routes; those that attention_warning has looked at
    AttentionRoute routes[ATTENTION_ROUTES];
} attention_state;
static size_t attention_limit = GPU_ATTENTION_LIMIT; // bytes
static int attention_fewest_parts = 1;               // 2: halves even where the whole width is taken; for tests

static inline const char *attention_library_version(void) { return cudnn_attention_version(); }

// Variables by which cuDNN's frontend would choose an algorithm, and so the bits, without a word in the run's records.
static inline void attention_configure(AttentionOptions use) {
    static const char *const names[] = {"CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "CUDNN_RESCALE_THRESHOLD"};
    attention_state.use = use;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!getenv(names[i])) continue;
        attention_state.ignored = names[i];
        CHECK(unsetenv(names[i]) == 0, "cannot remove %s from the environment", names[i]);
    }
}

static inline bool attention_has_device(void) { // --dry-run does without one
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

// By the memory of all of the device, so that runs on devices of a kind make the same calls.
static inline void attention_reserve(size_t bytes) {
    enum { LEAST = 64 << 20 };
    size_t free_bytes = 0, total = 0;
    if (!attention_has_device()) return;
    device_start();
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    attention_limit = max_size(LEAST, total > bytes ? (total - bytes) / 2 : 0);
}

static inline void attention_stop(void) {
    for (int i = 0; i < attention_state.count; i++)
        for (int part = 0; part < ATTENTION_PARTS; part++) cudnn_attention_free(attention_state.routes[i].plans[part]);
    attention_state.count = attention_state.warned = 0;
    cudnn_attention_close();
}

// ---------------------------------------------------------------------------------------------------
// Plans

static inline CudnnStrides attention_strides(int row, int head) {
    CudnnStrides s = {row, head};
    return s;
}

// The query heads that a call computes.
static inline int attention_queries(const AttentionRoute *r) { return r->groups * (r->shape.NQ / r->shape.NKV); }

static inline CudnnAttention attention_description(const AttentionRoute *r, int part) {
    AttentionShape s = r->shape;
    CudnnAttention a;
    memset(&a, 0, sizeof(a));
    a.backward = r->backward, a.deterministic = attention_state.use.deterministic;
    a.linear = a.backward && a.deterministic && attention_state.use.linear;
    a.B = r->sequences, a.T = s.T, a.NQ = attention_queries(r), a.NKV = r->groups;
    a.D = s.D, a.DV = s.DV / r->parts;
    a.scale = s.scale;
    a.q = attention_strides(s.ldq, s.q_head), a.k = attention_strides(s.ldkv, s.k_head);
    a.v = attention_strides(s.ldkv, s.v_head), a.out = attention_strides(s.ldo, s.o_head);
    if (!r->backward) return a;
    a.dq = part ? attention_strides(a.NQ * s.D, s.D) : a.q; // scratch memory has no gaps
    a.dk = part ? attention_strides(a.NKV * s.D, s.D) : a.k;
    a.dv = r->add_dv ? attention_strides(a.NKV * a.DV, a.DV) : a.v;
    return a;
}

// The scratch memory of a call, behind the plans' workspace; returns its bytes.
typedef struct {
    floatX *dq, *dk, *dv;
} AttentionScratch;
static inline size_t attention_scratch(const AttentionRoute *r, char *base, AttentionScratch *to) {
    AttentionShape s = r->shape;
    size_t rows = (size_t)r->sequences * (size_t)s.T * sizeof(floatX), queries = rows * (size_t)attention_queries(r),
           kv = rows * (size_t)r->groups, at = 0;
    to->dq = (floatX *)(void *)(base + at), at += r->parts > 1 ? round_up(queries * (size_t)s.D, 256) : 0;
    to->dk = (floatX *)(void *)(base + at), at += r->parts > 1 ? round_up(kv * (size_t)s.D, 256) : 0;
    to->dv = (floatX *)(void *)(base + at), at += r->add_dv ? round_up(kv * (size_t)(s.DV / r->parts), 256) : 0;
    return at;
}

static inline void attention_forget(AttentionRoute *r) {
    for (int part = 0; part < ATTENTION_PARTS; part++) {
        cudnn_attention_free(r->plans[part]);
        r->plans[part] = NULL;
    }
}

// Where there is no device to ask: what cuDNN 9.19 takes on Hopper (tests/cudnn_plans.cpp). In a backward rowsum(dO O);
// dS of all heads, or dQ in fp32; with grouped heads dK and dV of each query head.
static inline bool attention_estimate(const CudnnAttention *a, size_t *bytes, char *why, size_t size) {
    size_t T = (size_t)a->T, heads = (size_t)a->B * (size_t)a->NQ, rows = heads * T;
    snprintf(why, size, "heads of width %d and %d", a->D, a->DV);
    *bytes = 0;
    if (a->D > 256 || a->DV > 256) return false;
    if (!a->backward) return true;
    if (a->deterministic && !a->linear) *bytes += heads * round_up(T, 64) * round_up(T, 128) * sizeof(floatX);
    else *bytes += rows * (size_t)a->D * sizeof(float);
    if (a->NQ > a->NKV) *bytes += rows * (size_t)(a->D + a->DV) * sizeof(floatX);
    *bytes += rows * sizeof(float);
    return true;
}

static inline bool attention_make_plans(AttentionRoute *r, int parts, int sequences, int groups) {
    size_t bytes = 0;
    attention_forget(r);
    r->parts = parts, r->sequences = sequences, r->groups = groups, r->plan_bytes = 0;
    for (int part = 0; part < (r->backward ? parts : 1); part++) { // both halves of a forward are one plan
        CudnnAttention a = attention_description(r, part);
        bool taken = attention_state.no_device && attention_estimate(&a, &bytes, r->why, sizeof(r->why));
        if (!attention_state.no_device) {
            r->plans[part] = cudnn_attention_plan(&a, &bytes, r->why, sizeof(r->why));
            taken = r->plans[part] != NULL;
        }
        if (!taken) {
            attention_forget(r);
            r->parts = 0;
            return false;
        }
        r->plan_bytes = max_size(r->plan_bytes, round_up(bytes, 256));
    }
    AttentionScratch scratch;
    static char nowhere;
    r->scratch_bytes = r->backward ? attention_scratch(r, &nowhere, &scratch) : 0;
    return true;
}

// The largest divisor of n that keeps the limit, or the smallest; n itself where the lse of a second call would not be
// aligned. Of each of n: bytes of workspace, and elements of lse.
static inline int attention_share(int n, size_t bytes, size_t lse) {
    int best = n;
    for (int d = n; d > 0 && (size_t)best * bytes > attention_limit; d--)
        if (n % d == 0 && (size_t)d * lse % 4 == 0) best = d;
    return best;
}
static inline bool attention_fit(AttentionRoute *r, int parts) {
    AttentionShape s = r->shape;
    if (!attention_make_plans(r, parts, s.B, s.NKV)) return false;
    size_t each = r->plan_bytes / (size_t)s.B;
    int sequences = attention_share(s.B, each, (size_t)s.NQ * (size_t)s.T), groups = s.NKV;
    if (sequences == 1) groups = attention_share(groups, each / (size_t)s.NKV, (size_t)(s.NQ / s.NKV) * (size_t)s.T);
    return (sequences == s.B && groups == s.NKV) || attention_make_plans(r, parts, sequences, groups);
}

static inline bool attention_refuse(AttentionRoute *r, const char *why, const char *remedy) {
    FORMAT(r->why, "%s", why);
    r->remedy = remedy;
    return true;
}
// Whether cuDNN need not be asked.
static inline bool attention_refused(AttentionRoute *r) {
    AttentionShape s = r->shape;
    int strides = s.ldq | s.ldkv | s.ldo | s.q_head | s.k_head | s.v_head | s.o_head;
    if (attention_state.use.builtin) return attention_refuse(r, "--sdpa own", NULL);
    if (sizeof(floatX) != 2) return attention_refuse(r, "an fp32 build; cuDNN's is bf16", NULL);
    if (!CUDNN_ATTENTION)
        return attention_refuse(r, "this build has no cuDNN",
                                "scripts/install_deps.sh --with-cuda-python and make train_diffv2cu give it one");
    if (attention_state.use.documents)
        return attention_refuse(r, "--doc-mask: cuDNN would see beyond documents",
                                "cuDNN computes it without --doc-mask");
    if (s.T < 2) return attention_refuse(r, "one position", NULL);
    if ((s.D | s.DV | strides) % 8)
        return attention_refuse(r, "a head's width or place is no multiple of 8 elements",
                                "choose --head-dim so that all heads are multiples of 8 wide");
    return false;
}

static inline bool attention_take(AttentionRoute *r) {
    AttentionShape s = r->shape;
    char whole[ATTENTION_WHY];
    bool taken = attention_fit(r, attention_fewest_parts);
    if (taken || attention_fewest_parts > 1 || s.DV % 16 || (s.DV == s.D && s.DV <= 128)) return taken;
    memcpy(whole, r->why, sizeof(whole));
    taken = attention_fit(r, 2);
    if (!taken) memcpy(r->why, whole, sizeof(whole)); // says more than that of half
    return taken;
}

// Whether cuDNN, which has refused a route, would take it without what an option demands.
static inline bool attention_would_take(AttentionRoute r, bool *demanded) {
    if (!r.backward || !*demanded) return false;
    *demanded = false;
    bool taken = attention_take(&r);
    attention_forget(&r);
    *demanded = true;
    return taken;
}
static inline const char *attention_remedy(const AttentionRoute *r) {
    if (attention_would_take(*r, &attention_state.use.linear)) return "cuDNN computes it without --sdpa-linear";
    if (attention_would_take(*r, &attention_state.use.deterministic))
        return "--no-deterministic gives it to cuDNN, and a newer cuDNN may take it as it is (9.18 on a B200)";
    return "a newer cuDNN may take it, or heads of another width (--head-dim)";
}

#include "attention_probe.cuh"

static inline void attention_choose(AttentionRoute *r) {
    AttentionShape s = r->shape;
    bool taken = false;
    if (attention_refused(r)) taken = false;
    else if (!attention_state.no_device && !cudnn_attention_open(r->why, sizeof(r->why)))
        r->remedy = "make train_diffv2cu CUDNN=DIRECTORY builds it with another";
    else if (!attention_take(r)) r->remedy = attention_remedy(r);
    else taken = attention_masks_tail(r);
    CHECK(taken || !attention_state.use.cudnn,
          "--sdpa cudnn: %s of %d heads of width %d and %d: %s; leave out --sdpa to use the built-in kernel",
          r->backward ? "backward" : "forward", s.NQ, s.D, s.DV, r->why);
}

static inline bool attention_same_shape(AttentionShape a, AttentionShape b) {
    return a.B == b.B && a.T == b.T && a.first == b.first && a.NQ == b.NQ && a.NKV == b.NKV && a.D == b.D &&
           a.DV == b.DV && a.ldq == b.ldq && a.ldkv == b.ldkv && a.ldo == b.ldo && a.q_head == b.q_head &&
           a.k_head == b.k_head && a.v_head == b.v_head && a.o_head == b.o_head && a.scale == b.scale &&
           a.first_key == b.first_key;
}

static inline const AttentionRoute *attention_route(AttentionShape s, bool backward, bool add_dv) {
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionRoute *r = &attention_state.routes[i];
        if (r->backward == backward && r->add_dv == add_dv && attention_same_shape(r->shape, s)) return r;
    }
    return NULL;
}

static inline void attention_prepare_one(AttentionShape s, bool backward, bool add_dv) {
    if (attention_route(s, backward, add_dv)) return;
    CHECK(attention_state.count < ATTENTION_ROUTES, "attention of more than %d shapes is not planned for",
          ATTENTION_ROUTES);
    AttentionRoute *r = &attention_state.routes[attention_state.count];
    memset(r, 0, sizeof(*r));
    r->shape = s, r->backward = backward, r->add_dv = add_dv;
    attention_choose(r);
    attention_state.count++;
}

static inline void attention_prepare(AttentionShape s, bool backward, bool add_dv) {
    attention_state.no_device = memory_is_short || !attention_has_device();
    if (!attention_state.no_device) device_start();
    s.first_key = NULL; // what attention_configure was told decides
    attention_prepare_one(s, false, false);
    if (backward) attention_prepare_one(s, true, false);
    if (backward && add_dv) attention_prepare_one(s, true, true);
}

static inline size_t attention_workspace_bytes(AttentionShape s, int threads) {
    (void)threads; // of the host
    size_t bytes = attention_builtin_workspace_bytes(s);
    s.first_key = NULL;
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionRoute *r = &attention_state.routes[i];
        if (attention_same_shape(r->shape, s)) bytes = max_size(bytes, r->plan_bytes + r->scratch_bytes);
    }
    return bytes;
}

#include "attention_words.cuh"
#include "attention_calls.cuh"
#endif
