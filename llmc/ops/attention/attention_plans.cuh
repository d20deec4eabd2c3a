/*
attention_plans.cuh: the backend of attention for each shape: cuDNN where it supports the shape, otherwise the built-in
kernels (attention_mma.cuh, attention_kernels.cuh). attention_prepare makes one plan per shape and direction before the
workspace is allocated; cuDNN's plans are kept by description (attention_answers.cuh). A shape without a plan
(generation, the short sequences of --eval) uses the built-in kernels. If the user did not request them,
attention_warning prints the reason and the remedy.

  strides    cuDNN reads and writes q, k, v and their gradients with the strides of the fused GEMM; nothing is copied
  parts      If cuDNN does not support values of width DV (diff_v1: 2D), it is called once for each half of the value
             columns. O is the concatenation. With dP = dP_1 + dP_2 and delta = rowsum(dO O) = delta_1 + delta_2,
             dS = P (dP - delta) is dS_1 + dS_2, so dQ and dK are sums over the halves: the second half is written to
             scratch memory and added.
  add_dv     dV of a second key set is written to scratch memory and added
  window     the left bound of cuDNN's diagonal band. A window of T or more equals no window, and shares that plan.
  calls      cuDNN's deterministic backward may need NQ T^2 bf16 of workspace per sequence. If the workspace exceeds
             attention_limit, a call computes fewer sequences or, if one sequence is too large, fewer groups of heads (a
             key/value head with the query heads that read it), provided that lse stays aligned. No sum crosses
             sequences or groups, so the result is bitwise equal to the result of one call. The limit is half of the
             device memory that the run does not use. One group of one sequence may be larger.
  documents  With --doc-mask a call computes up to `sequences` documents, each as a sequence of its own: cuDNN reads
             their lengths and offsets (attention_documents.cuh). A batch of more documents takes several calls, so the
             number per call (attention_slots) decides the workspace and the time, not the result.
  numerics   terms that are added were rounded to floatX: one rounding more than in the built-in kernels
  order      bitwise reproducible, unless AttentionOptions say otherwise
*/
#pragma once
#include "../../cuda/device.cuh"
#include "attention_choice.h"
#include "attention_probe.cuh"
#include "operations.h"

enum { ATTENTION_PLANS = 128, ATTENTION_PARTS = 2 };

// The computation of one shape in one direction.
typedef struct {
    AttentionShape shape;
    int signals; // signal heads of groups that are computed together (attention_choice.h)
    bool backward, add_dv, documents;
    int parts;     // ranges of the value columns, one call each; 0: the built-in kernel
    int sequences; // per call, or documents
    int groups;    // groups of heads per call; all, unless a call computes one sequence
    CudnnPlan *cudnn[ATTENTION_PARTS];
    size_t plan_bytes;                 // workspace of cuDNN
    size_t scratch_bytes, table_bytes; // behind it: the scratch memory for sums, and the tables of documents
    char why[ATTENTION_WHY];           // the reason why cuDNN does not compute it
    const char *remedy;                // what makes cuDNN compute it; NULL: no warning is needed
    bool reported;                     // by attention_warning
} AttentionPlan;

static struct {
    AttentionOptions options;
    bool no_device;
    bool device_known; // `device` describes the current device
    const DevicePeak *device;
    const char *ignored; // an environment variable that attention_warning has yet to report
    int count;           // plans
    AttentionPlan plans[ATTENTION_PLANS];
    AttentionDocuments documents;
} attention_state;
static size_t attention_limit = GPU_ATTENTION_LIMIT; // bytes
static int attention_fewest_parts = 1;               // tests set 2 to split values that cuDNN supports whole

static inline bool attention_has_device(void) { // --dry-run runs without one
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

// The number of query heads that a call computes.
static inline int attention_queries(const AttentionPlan *p) { return p->groups * (p->shape.NQ / p->shape.NKV); }

static inline CudnnAttention attention_description(const AttentionPlan *p, int part) {
    AttentionShape s = p->shape;
    CudnnAttention a;
    memset(&a, 0, sizeof(a));
    a.backward = p->backward, a.deterministic = a.backward && attention_state.options.deterministic;
    a.B = p->sequences, a.T = s.T, a.NQ = attention_queries(p), a.NKV = p->groups;
    a.D = s.D, a.DV = s.DV / p->parts;
    a.window = s.window, a.documents = p->documents, a.scale = s.scale;
    a.q = CudnnStrides{s.ldq, s.q_head}, a.k = CudnnStrides{s.ldkv, s.k_head};
    a.v = CudnnStrides{s.ldkv, s.v_head}, a.out = CudnnStrides{s.ldo, s.o_head};
    if (!p->backward) return a;
    a.dq = part ? CudnnStrides{a.NQ * s.D, s.D} : a.q; // scratch memory is contiguous
    a.dk = part ? CudnnStrides{a.NKV * s.D, s.D} : a.k;
    a.dv = p->add_dv ? CudnnStrides{a.NKV * a.DV, a.DV} : a.v;
    return a;
}

// The scratch memory of a call, at `base`, behind cuDNN's workspace; returns its size in bytes.
typedef struct {
    floatX *dq, *dk, *dv;
} AttentionScratch;
static inline size_t attention_scratch(const AttentionPlan *p, char *base, AttentionScratch *to) {
    AttentionShape s = p->shape;
    size_t rows = min_size(p->sequences, s.B) * s.T * sizeof(floatX), queries = rows * attention_queries(p),
           kv = rows * p->groups, at = 0;
    to->dq = (floatX *)(void *)(base + at), at += p->parts > 1 ? round_up(queries * s.D, 256) : 0;
    to->dk = (floatX *)(void *)(base + at), at += p->parts > 1 ? round_up(kv * s.D, 256) : 0;
    to->dv = (floatX *)(void *)(base + at), at += p->add_dv ? round_up(kv * (s.DV / p->parts), 256) : 0;
    return at;
}

static inline size_t attention_bytes(const AttentionPlan *p) {
    return p->plan_bytes + p->scratch_bytes + p->table_bytes;
}

// The estimate for a run without a device: what cuDNN 9.19 supports on Hopper (tests/cudnn_plans.cpp). The backward
// needs rowsum(dO O); dS of all heads, or dQ in fp32; with grouped heads also dK and dV of each query head.
static inline bool attention_estimate(const CudnnAttention *a, size_t *bytes, char *why, size_t size) {
    size_t T = a->T, heads = (size_t)a->B * a->NQ, rows = heads * T;
    snprintf(why, size, "heads of width %d and %d", a->D, a->DV);
    *bytes = a->documents ? 16384 + 64 * (size_t)a->B : 0; // about
    if (a->D > 256 || a->DV > 256) return false;
    if (!a->backward) return true;
    if (a->deterministic) *bytes += heads * round_up(T, 64) * round_up(T, 128) * sizeof(floatX);
    else *bytes += rows * a->D * sizeof(float);
    if (a->NQ > a->NKV) *bytes += rows * (a->D + a->DV) * sizeof(floatX);
    *bytes += rows * sizeof(float);
    return true;
}

static inline bool attention_make_plans(AttentionPlan *p, int parts, int sequences, int groups) {
    size_t bytes = 0;
    p->parts = parts, p->sequences = sequences, p->groups = groups, p->plan_bytes = 0;
    for (int part = 0; part < (p->backward ? parts : 1); part++) { // the parts of a forward share one plan
        CudnnAttention a = attention_description(p, part);
        bool supported = attention_state.no_device && attention_estimate(&a, &bytes, p->why, sizeof(p->why));
        if (!attention_state.no_device) {
            p->cudnn[part] = attention_ask(&a, &bytes, p->why, sizeof(p->why));
            supported = p->cudnn[part] != NULL;
        }
        if (!supported) {
            p->parts = 0;
            return false;
        }
        p->plan_bytes = max_size(p->plan_bytes, round_up(bytes, 256));
    }
    AttentionScratch scratch;
    static char nowhere;
    p->scratch_bytes = p->backward ? attention_scratch(p, &nowhere, &scratch) : 0;
    p->table_bytes = p->documents ? attention_tables_bytes(sequences) : 0;
    return true;
}

// The largest divisor of n whose workspace is within the limit, or the smallest divisor; n itself if the lse of a
// second call would not be aligned. Each of the n items needs `bytes` of workspace and has `lse` elements of lse.
static inline int attention_share(int n, size_t bytes, size_t lse) {
    int best = n;
    for (int d = n; d > 0 && best * bytes > attention_limit; d--)
        if (n % d == 0 && d * lse % 4 == 0) best = d;
    return best;
}

static inline bool attention_fit(AttentionPlan *p, int parts) {
    AttentionShape s = p->shape;
    int most = p->documents ? attention_slots(s) : s.B, groups = s.NKV;
    if (!attention_make_plans(p, parts, most, groups)) return false;
    size_t each = p->plan_bytes / most;
    int sequences = p->documents ? (int)min_size(most, max_size(1, attention_limit / max_size(1, each)))
                                 : attention_share(most, each, (size_t)s.NQ * s.T);
    if (sequences == 1) groups = attention_share(groups, each / s.NKV, (size_t)(s.NQ / s.NKV) * s.T);
    return (sequences == most && groups == s.NKV) || attention_make_plans(p, parts, sequences, groups);
}

static inline bool attention_refuse(AttentionPlan *p, const char *why, const char *remedy) {
    FORMAT(p->why, "%s", why);
    p->remedy = remedy;
    return true;
}

static inline const DevicePeak *attention_device(void) { // NULL: not listed, or none
    if (!attention_state.device_known) {
        cudaDeviceProp facts;
        bool exists = !memory_is_short && attention_has_device();
        if (exists) facts = device_properties();
        attention_state.device = exists ? device_peak_find(facts.name, facts.multiProcessorCount) : NULL;
        attention_state.device_known = true;
    }
    return attention_state.device;
}

// How many times as fast as cuDNN the built-in kernel is; 0: not measured. signals: as in attention_choice.h
static inline double attention_speed(AttentionShape s, int signals, bool backward) {
    AttentionOptions o = attention_state.options;
    if (s.window || o.documents) return 0;
    return attention_builtin_speed(attention_device(), signals, s.D, s.DV, s.T, o.deterministic, backward);
}

// Whether the options, the build or the measured times request the built-in kernels. Known before plans are made.
static inline bool attention_requests_builtin(AttentionShape s, int signals, bool backward) {
    AttentionOptions o = attention_state.options;
    return o.builtin || !CUDNN_ATTENTION || (!o.cudnn && attention_speed(s, signals, backward) > 1);
}

// Whether the built-in kernel computes the shape without asking cuDNN.
static inline bool attention_refused(AttentionPlan *p) {
    AttentionShape s = p->shape;
    char measured[ATTENTION_WHY];
    FORMAT(measured, "%.2f times as fast as cuDNN on this GPU", attention_speed(s, p->signals, p->backward));
    int strides = s.ldq | s.ldkv | s.ldo | s.q_head | s.k_head | s.v_head | s.o_head;
    if (attention_state.options.builtin) return attention_refuse(p, "--attention-kernel own", NULL);
    if (sizeof(floatX) != 2) return attention_refuse(p, "an fp32 build; cuDNN supports bf16", NULL);
    if (!CUDNN_ATTENTION)
        return attention_refuse(p, "this build has no cuDNN",
                                "to add it: scripts/install_deps.sh --with-cuda-python, then make train_diffv2cu");
    if (s.T < 2) return attention_refuse(p, "one position", NULL);
    if ((s.D | s.DV | strides) % 8)
        return attention_refuse(p, "a head's width or offset is not a multiple of 8 elements",
                                "choose --head-dim so that the width of every head is a multiple of 8");
    return attention_requests_builtin(s, p->signals, p->backward) && attention_refuse(p, measured, NULL);
}

static inline bool attention_try_cudnn(AttentionPlan *p) {
    AttentionShape s = p->shape;
    char whole[ATTENTION_WHY];
    bool supported = attention_fit(p, attention_fewest_parts);
    if (supported || attention_fewest_parts > 1 || s.DV % 16 || (s.DV == s.D && s.DV <= 128)) return supported;
    memcpy(whole, p->why, sizeof(whole));
    supported = attention_fit(p, 2);
    if (!supported) memcpy(p->why, whole, sizeof(whole)); // the reason for the whole width says more
    return supported;
}

// Whether cuDNN, which has refused a plan, accepts it with --no-deterministic.
static inline bool attention_supported_loose(AttentionPlan p) {
    bool *deterministic = &attention_state.options.deterministic;
    if (!p.backward || !*deterministic) return false;
    *deterministic = false;
    bool supported = attention_try_cudnn(&p);
    *deterministic = true;
    return supported;
}

static inline const char *attention_remedy(const AttentionPlan *p) {
    AttentionPlan whole = *p; // without documents
    whole.documents = false;
    bool by_documents = p->documents && attention_try_cudnn(&whole);
    if (by_documents) return "cuDNN computes it without --doc-mask, and on an H200 or B200 with it";
    if (attention_supported_loose(*p))
        return "cuDNN computes it with --no-deterministic; a newer cuDNN may support it as it is (9.18 on a B200)";
    return "a newer cuDNN may support it, or heads of another width (--head-dim)";
}

// ---------------------------------------------------------------------------------------------------
// Choice

// Whether a plan that cuDNN supports computes finite gradients; otherwise the built-in kernel is used.
static inline bool attention_passes(AttentionPlan *p) {
    AttentionShape s = p->shape;
    CudnnAttention a = attention_description(p, 0);
    if (!p->backward || attention_state.no_device || cudnn_probe(&a, s.NQ / s.NKV, p->why, sizeof(p->why))) return true;
    p->parts = 0;
    p->remedy = p->documents ? "a newer cuDNN may compute it; cuDNN may compute it without --doc-mask"
                             : "cuDNN computes it if --seq-len is a multiple of 128; a newer cuDNN may compute it as "
                               "it is";
    return false;
}

static inline void attention_choose(AttentionPlan *p) {
    AttentionShape s = p->shape;
    bool supported = false;
    if (attention_refused(p)) supported = false;
    else if (!attention_state.no_device && !cudnn_attention_open(p->why, sizeof(p->why)))
        p->remedy = "make train_diffv2cu CUDNN=DIRECTORY builds with another cuDNN";
    else if (!attention_try_cudnn(p)) p->remedy = attention_remedy(p);
    else supported = attention_passes(p);
    CHECK(supported || !attention_state.options.cudnn,
          "--attention-kernel cudnn: %s of %d heads of width %d and %d: %s; omit the option to use the built-in kernel",
          p->backward ? "backward" : "forward", s.NQ, s.D, s.DV, p->why);
}

static inline bool attention_same_shape(AttentionShape a, AttentionShape b) {
    return a.B == b.B && a.T == b.T && a.query_offset == b.query_offset && a.NQ == b.NQ && a.NKV == b.NKV &&
           a.D == b.D && a.DV == b.DV && a.ldq == b.ldq && a.ldkv == b.ldkv && a.ldo == b.ldo && a.q_head == b.q_head &&
           a.k_head == b.k_head && a.v_head == b.v_head && a.o_head == b.o_head && a.scale == b.scale &&
           a.window == b.window;
}

// The shape as plans state it, the same for every batch.
static inline AttentionShape attention_planned(AttentionShape s) {
    s = attention_of_heads(s);
    if (s.window >= s.T) s.window = 0;
    s.first_key = NULL;
    return s;
}

// The plan for a shape; NULL: attention_prepare was not called for it.
static inline const AttentionPlan *attention_plan(AttentionShape s, bool backward, bool add_dv) {
    AttentionShape planned = attention_planned(s);
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionPlan *p = &attention_state.plans[i];
        bool same = attention_same_shape(p->shape, planned) && p->documents == (s.first_key != NULL);
        if (same && p->backward == backward && p->add_dv == add_dv) return p;
    }
    return NULL;
}

static inline void attention_prepare_one(AttentionShape s, bool documents, bool backward, bool add_dv) {
    static const int some = 0;
    s.first_key = documents ? &some : NULL;
    if (attention_plan(s, backward, add_dv)) return;
    CHECK(attention_state.count < ATTENTION_PLANS, "attention has more than %d shapes", ATTENTION_PLANS);
    AttentionPlan *p = &attention_state.plans[attention_state.count];
    memset(p, 0, sizeof(*p));
    p->shape = attention_planned(s), p->documents = documents, p->backward = backward, p->add_dv = add_dv;
    p->signals = s.groups.noise ? s.groups.signals : 0;
    attention_choose(p);
    attention_state.count++;
}
