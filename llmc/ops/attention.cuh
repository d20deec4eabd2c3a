/*
attention.cuh: the CUDA twin of attention: attention_forward and attention_backward, by cuDNN or the built-in kernels as
the plan of the shape says (attention_plans.cuh), and the text that names the backend. Equations in attention.h.

  traffic   besides the backend's own: what is added is read once more, and its sum read and written
*/
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH
#include "attention_kernels.cuh"
#include "attention_plans.cuh"

static inline const char *attention_library_version(void) { return cudnn_attention_version(); }

// Removes environment variables with which cuDNN's frontend would choose another algorithm, and so other rounding,
// without a record in the run's files.
static inline void attention_configure(AttentionOptions options) {
    static const char *const names[] = {"CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "CUDNN_RESCALE_THRESHOLD"};
    attention_state.options = options;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!getenv(names[i])) continue;
        attention_state.ignored = names[i];
        CHECK(unsetenv(names[i]) == 0, "cannot remove %s from the environment", names[i]);
    }
}

// The limit depends on the total memory of the device, so that runs on devices of one kind make the same calls.
static inline void attention_reserve(size_t bytes) {
    enum { LEAST = 64 << 20 };
    size_t free_bytes = 0, total = 0;
    if (!attention_has_device()) return;
    device_start();
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    attention_limit = max_size(LEAST, total > bytes ? (total - bytes) / 2 : 0);
}

static inline void attention_stop(void) {
    for (int i = 0; i < attention_state.count; i++) attention_free_plans(&attention_state.plans[i]);
    attention_state.count = attention_state.warned = 0;
    cudnn_attention_close();
}

static inline void attention_prepare(AttentionShape s, bool backward, bool add_dv) {
    attention_state.no_device = memory_is_short || !attention_has_device();
    if (!attention_state.no_device) device_start();
    s.first_key = NULL; // AttentionOptions.documents decides
    attention_prepare_one(s, false, false);
    if (backward) attention_prepare_one(s, true, false);
    if (backward && add_dv) attention_prepare_one(s, true, true);
}

static inline size_t attention_workspace_bytes(AttentionShape s, int threads) {
    (void)threads; // of the host
    size_t bytes = attention_builtin_workspace_bytes(s);
    s.first_key = NULL;
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionPlan *p = &attention_state.plans[i];
        if (attention_same_shape(p->shape, s)) bytes = max_size(bytes, p->plan_bytes + p->scratch_bytes);
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------
// Forward and backward

// to[n,h,:] += from[n,h,:]                      from (N,heads,width) contiguous, to with strides of rows and heads
template <int W>
static __global__ void attention_add_kernel(int lanes, floatX *to, const floatX *from, unsigned rows, unsigned heads,
                                            int width, int ld, int head) {
    unsigned row = row_index(lanes);
    if (row >= rows) return;
    floatX *sum = to + (row / heads) * (size_t)ld + (row % heads) * (size_t)head;
    const floatX *x = from + row * (size_t)width;
    float a[W], b[W];
    for (int i = row_lane(lanes) * W; i < width; i += lanes * W) {
        load<W>(a, sum + i);
        load<W>(b, x + i);
        UNROLL
        for (int k = 0; k < W; k++) a[k] += b[k];
        store<W>(sum + i, a);
    }
}

static inline void attention_add(floatX *to, const floatX *from, size_t N, int heads, int width, int ld, int head) {
    size_t rows = N * heads;
    LAUNCH_ROWS(attention_add_kernel, packed(width, to, from), rows, width, to, from, (unsigned)rows, (unsigned)heads,
                width, ld, head);
}

// Offsets of a call's first elements in q, k, v, the output and lse; `part` selects the columns of v and the output.
typedef struct {
    size_t q, k, v, o, lse;
} AttentionOffsets;
static inline AttentionOffsets attention_offsets(const AttentionPlan *p, int call, int part) {
    AttentionShape s = p->shape;
    int shares = s.NKV / p->groups;
    size_t b = call / shares * p->sequences, row = b * s.T, kv = call % shares * p->groups, h = kv * (s.NQ / s.NKV),
           column = part * (s.DV / p->parts);
    AttentionOffsets at;
    at.q = row * s.ldq + h * s.q_head;
    at.k = row * s.ldkv + kv * s.k_head;
    at.v = row * s.ldkv + kv * s.v_head + column;
    at.o = row * s.ldo + h * s.o_head + column;
    at.lse = (b * s.NQ + h) * s.T;
    return at;
}
static inline int attention_calls(const AttentionPlan *p) {
    return p->shape.B / p->sequences * (p->shape.NKV / p->groups);
}

static inline void attention_run_cudnn(CudnnPlan *plan, const CudnnTensors *t, const AttentionPlan *p,
                                       void *workspace) {
    char why[ATTENTION_WHY];
    AttentionShape s = p->shape;
    CHECK(cudnn_attention_run(plan, t, workspace, main_stream, why, sizeof(why)),
          "attention's %s of %d sequences of %d, %d and %d heads of width %d and %d: %s; --sdpa own avoids cuDNN",
          p->backward ? "backward" : "forward", p->sequences, s.T, attention_queries(p), p->groups, s.D,
          s.DV / p->parts, why);
}

static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s) {
    OPERATION();
    const AttentionPlan *p = lse ? attention_plan(s, false, false) : NULL;
    if (!p || !p->parts) {
        attention_builtin_forward(out, lse, q, k, v, s);
        return;
    }
    assert(packed(0, out, lse, q, k, v));
    char *workspace = (char *)(void *)ops_workspace_take(p->plan_bytes);
    for (int call = 0; call < attention_calls(p); call++)
        for (int part = 0; part < p->parts; part++) {
            AttentionOffsets at = attention_offsets(p, call, part);
            CudnnTensors t;
            memset(&t, 0, sizeof(t));
            t.q = q + at.q;
            t.k = k + at.k;
            t.v = v + at.v;
            t.out = out + at.o;
            t.lse = lse + at.lse; // the same from each part
            attention_run_cudnn(p->cudnn[0], &t, p, workspace);
        }
}

// The gradients of one part of the value columns in one call.
static inline void attention_backward_part(const AttentionPlan *p, int part, int call, floatX *dq, floatX *dk,
                                           floatX *dv, const floatX *dout, const floatX *out, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v) {
    AttentionShape s = p->shape;
    AttentionScratch scratch;
    char *workspace = (char *)(void *)ops_workspace_take(p->plan_bytes + p->scratch_bytes);
    attention_scratch(p, workspace + p->plan_bytes, &scratch);
    AttentionOffsets at = attention_offsets(p, call, part);
    int queries = attention_queries(p);
    size_t N = (size_t)p->sequences * s.T;
    CudnnTensors t;
    t.q = q + at.q;
    t.k = k + at.k;
    t.v = v + at.v;
    t.out = const_cast<floatX *>(out) + at.o;
    t.lse = const_cast<real *>(lse) + at.lse;
    t.dout = dout + at.o;
    t.dq = part ? scratch.dq : dq + at.q;
    t.dk = part ? scratch.dk : dk + at.k;
    t.dv = p->add_dv ? scratch.dv : dv + at.v;
    attention_run_cudnn(p->cudnn[part], &t, p, workspace);
    if (part) attention_add(dq + at.q, scratch.dq, N, queries, s.D, s.ldq, s.q_head);
    if (part) attention_add(dk + at.k, scratch.dk, N, p->groups, s.D, s.ldkv, s.k_head);
    if (p->add_dv) attention_add(dv + at.v, scratch.dv, N, p->groups, s.DV / p->parts, s.ldkv, s.v_head);
}

static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv) {
    OPERATION();
    const AttentionPlan *p = attention_plan(s, true, add_dv);
    if (!p || !p->parts) {
        attention_builtin_backward(dq, dk, dv, dout, out, lse, q, k, v, s, add_dv);
        return;
    }
    assert(packed(0, dq, dk, dv, dout, out, lse, q, k, v));
    for (int call = 0; call < attention_calls(p); call++)
        for (int part = 0; part < p->parts; part++)
            attention_backward_part(p, part, call, dq, dk, dv, dout, out, lse, q, k, v);
}

// ---------------------------------------------------------------------------------------------------
// Texts

// The backend of the first shape that was prepared.
static inline const char *attention_backend(void) {
    static char text[2 * ATTENTION_WHY];
    const AttentionPlan *forward = NULL, *backward = NULL;
    for (int i = attention_state.count - 1; i >= 0; i--) {
        const AttentionPlan *p = &attention_state.plans[i];
        if (p->backward) backward = p;
        else forward = p;
    }
    if (!forward) return NULL;
    const AttentionPlan *refused = !forward->parts ? forward : backward && !backward->parts ? backward : NULL;
    const AttentionPlan *cudnn = backward && backward->parts ? backward : forward;
    if (!cudnn->parts) {
        FORMAT(text, "the built-in kernel (%s)", forward->why);
        return text;
    }
    FORMAT(text, "%s%s", cudnn_attention_version(), cudnn->parts > 1 ? ", values in two parts" : "");
    size_t used = strlen(text);
    if (cudnn->backward)
        used += snprintf(text + used, sizeof(text) - used, ", %s backward",
                         attention_state.options.deterministic ? "deterministic" : "nondeterministic");
    if (cudnn->sequences < cudnn->shape.B)
        used += snprintf(text + used, sizeof(text) - used, ", %d sequence%s per call", cudnn->sequences,
                         cudnn->sequences == 1 ? "" : "s");
    if (cudnn->groups < cudnn->shape.NKV)
        used += snprintf(text + used, sizeof(text) - used, ", %d of %d groups of heads per call", cudnn->groups,
                         cudnn->shape.NKV);
    if (refused)
        snprintf(text + used, sizeof(text) - used, "; %s by the built-in kernel (%s)",
                 refused->backward ? "backward" : "forward", refused->why);
    return text;
}

// One line about the plans that were made since the last call; NULL: no further warning.
static inline const char *attention_warning(void) {
    static char text[2 * ATTENTION_WHY];
    const AttentionPlan *first = NULL;
    if (attention_state.ignored) {
        FORMAT(text,
               "%s is ignored, since it would change cuDNN's algorithm without a record; use --sdpa-linear or "
               "--no-deterministic",
               attention_state.ignored);
        attention_state.ignored = NULL;
        return text;
    }
    bool slow[2] = {false, false}; // forward, backward
    for (int i = attention_state.warned; i < attention_state.count; i++) {
        const AttentionPlan *p = &attention_state.plans[i];
        if (p->parts || !p->remedy) continue;
        first = first ? first : p;
        slow[p->backward] = true;
    }
    attention_state.warned = attention_state.count;
    if (!first) return NULL;
    FORMAT(text,
           "attention%s is computed by the built-in kernel, without tensor cores and several times slower: %s; %s; "
           "--sdpa own requests the built-in kernel without this warning",
           slow[0] && slow[1] ? ""
           : slow[0]          ? "'s forward"
                              : "'s backward",
           first->why, first->remedy);
    return text;
}
#endif
