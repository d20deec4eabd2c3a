/*
attention.cuh: the CUDA twin of attention: attention_forward and attention_backward, by cuDNN or the built-in kernels as
the plan of the shape says (attention_plans.cuh). Equations in attention.h.

  traffic   in addition to the backend's traffic: an added term is read once more, and its sum is read and written
*/
#pragma once
#include "attention_kernels.cuh"
#include "attention_wgmma.cuh"
#include "attention_report.cuh"
#include "rope.cuh"

static inline const char *attention_library_version(void) { return cudnn_attention_version(); }

// Removes environment variables with which cuDNN's frontend would choose another algorithm, and so other rounding,
// without a record in the run's files.
static inline void attention_configure(AttentionOptions options) {
    static const char *const names[] = {"CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "CUDNN_RESCALE_THRESHOLD"};
    attention_state.options = options;
    attention_state.device_known = false;
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

// Forgets the shapes that were prepared, but not the answers of cuDNN.
static inline void attention_stop(void) {
    attention_state.count = 0;
    attention_documents_free(&attention_state.documents);
}

static inline void attention_close(void) {
    attention_stop();
    attention_forget_answers();
    cudnn_attention_close();
}

static inline void attention_prepare(AttentionShape s, bool backward, bool add_dv) {
    attention_state.no_device = memory_is_short || !attention_has_device();
    if (!attention_state.no_device) device_start();
    bool documents = attention_state.options.documents;
    attention_prepare_one(s, documents, false, false);
    if (backward) attention_prepare_one(s, documents, true, false);
    if (backward && add_dv) attention_prepare_one(s, documents, true, true);
}

static inline void attention_documents(int *list, const int *first_key, const int *document_starts, int N, int T) {
    OPERATION();
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionPlan *p = &attention_state.plans[i];
        if (!p->documents || !p->parts) continue;
        attention_documents_read(&attention_state.documents, list, first_key, document_starts, N, T);
        return;
    }
}

static inline size_t attention_workspace_bytes(AttentionShape s, int threads) {
    (void)threads; // a GPU does not use the host's threads
    const size_t built_in = attention_builtin_workspace_bytes(s);
    size_t bytes = 0;
    bool planned = false;
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionPlan *p = &attention_state.plans[i];
        if (!attention_same_shape(p->shape, attention_planned(s))) continue;
        planned = true;
        bytes = max_size(bytes, p->backward && !p->parts ? built_in : attention_bytes(p));
    }
    return planned ? bytes : built_in;
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

// A call: some sequences or documents, and some groups of heads. Offsets of its first elements in q, k, v, the output
// and lse; `part` selects the columns of v and the output. Documents have tables of offsets; groups do not.
typedef struct {
    size_t q, k, v, o, lse;
    int first, row, rows; // the first sequence or document; its first row and its number of rows, among all B*T
} AttentionCall;
static inline AttentionCall attention_call(const AttentionPlan *p, int call, int part) {
    AttentionShape s = p->shape;
    AttentionCall c;
    int shares = s.NKV / p->groups;
    c.first = call / shares * p->sequences;
    c.row = c.first * s.T;
    c.rows = p->sequences * s.T;
    if (p->documents) {
        const AttentionDocuments *d = &attention_state.documents;
        c.row = d->rows[c.first];
        c.rows = d->rows[min_int(c.first + p->sequences, d->count)] - c.row;
    }
    size_t row = p->documents ? 0 : c.row, kv = call % shares * p->groups, h = kv * (s.NQ / s.NKV),
           column = part * (s.DV / p->parts);
    c.q = row * s.ldq + h * s.q_head;
    c.k = row * s.ldkv + kv * s.k_head;
    c.v = row * s.ldkv + kv * s.v_head + column;
    c.o = row * s.ldo + h * s.o_head + column;
    c.lse = row * s.NQ + h * s.T;
    return c;
}
static inline int attention_calls(const AttentionPlan *p) {
    int n = p->documents ? attention_state.documents.count : p->shape.B;
    return (n + p->sequences - 1) / p->sequences * (p->shape.NKV / p->groups);
}

// Whether the plan computes this shape. The documents of a batch must have been announced.
static inline bool attention_by_cudnn(const AttentionPlan *p, AttentionShape s) {
    if (!p || !p->parts) return false;
    const AttentionDocuments *d = &attention_state.documents;
    assert(!p->documents || (d->first_key == s.first_key && d->rows[d->count] == s.B * s.T));
    return true;
}

// Runs a call. in_scratch as in attention_write_tables.
static inline void attention_run_cudnn(const AttentionPlan *p, int part, const AttentionCall *c, CudnnTensors *t,
                                       unsigned in_scratch, char *workspace) {
    char why[ATTENTION_WHY];
    AttentionShape s = p->shape;
    const AttentionDocuments *d = &attention_state.documents;
    CudnnAttention a = attention_description(p, part);
    if (p->documents)
        attention_write_tables(t, workspace + p->plan_bytes + p->scratch_bytes, &a, d->list, c->first, d->count,
                               (size_t)s.NQ * s.T, c->row, in_scratch);
    CHECK(cudnn_attention_run(p->cudnn[p->backward ? part : 0], t, workspace, main_stream, why, sizeof(why)),
          "attention's %s of %d %s of %d, %d and %d heads of width %d and %d: %s; --attention-kernel own avoids cuDNN",
          p->backward ? "backward" : "forward", a.B, p->documents ? "documents" : "sequences", a.T, a.NQ, a.NKV, a.D,
          a.DV, why);
}

static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s) {
    OPERATION();
    const AttentionPlan *p = lse ? attention_plan(s, false, false) : NULL;
    if (!attention_by_cudnn(p, s)) {
        bool tensor_cores = attention_mma_fits(s) && packed(0, out, q, k, v);
        (tensor_cores ? attention_mma_forward : attention_builtin_forward)(out, lse, q, k, v, s);
        return;
    }
    assert(packed(0, out, lse, q, k, v));
    char *workspace = (char *)(void *)ops_workspace_take(attention_bytes(p));
    for (int call = 0; call < attention_calls(p); call++)
        for (int part = 0; part < p->parts; part++) {
            AttentionCall at = attention_call(p, call, part);
            CudnnTensors t;
            memset(&t, 0, sizeof(t));
            t.q = q + at.q;
            t.k = k + at.k;
            t.v = v + at.v;
            t.out = out + at.o;
            t.lse = lse + at.lse; // the same from each part
            attention_run_cudnn(p, part, &at, &t, 0, workspace);
        }
}

// The gradients of one part of the value columns in one call.
static inline void attention_backward_part(const AttentionPlan *p, int part, int call, floatX *dq, floatX *dk,
                                           floatX *dv, const floatX *dout, const floatX *out, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v) {
    AttentionShape s = p->shape;
    AttentionScratch scratch;
    char *workspace = (char *)(void *)ops_workspace_take(attention_bytes(p));
    attention_scratch(p, workspace + p->plan_bytes, &scratch);
    AttentionCall at = attention_call(p, call, part);
    int queries = attention_queries(p);
    size_t N = at.rows, first = p->documents ? at.row : 0;
    unsigned in_scratch = (part ? 1u << CUDNN_DQ | 1u << CUDNN_DK : 0) | (p->add_dv ? 1u << CUDNN_DV : 0);
    CudnnTensors t;
    memset(&t, 0, sizeof(t));
    t.q = q + at.q;
    t.k = k + at.k;
    t.v = v + at.v;
    t.out = const_cast<floatX *>(out) + at.o;
    t.lse = const_cast<real *>(lse) + at.lse;
    t.dout = dout + at.o;
    t.dq = part ? scratch.dq : dq + at.q;
    t.dk = part ? scratch.dk : dk + at.k;
    t.dv = p->add_dv ? scratch.dv : dv + at.v;
    attention_run_cudnn(p, part, &at, &t, in_scratch, workspace);
    dq += at.q + first * s.ldq;
    dk += at.k + first * s.ldkv;
    dv += at.v + first * s.ldkv;
    if (part) attention_add(dq, scratch.dq, N, queries, s.D, s.ldq, s.q_head);
    if (part) attention_add(dk, scratch.dk, N, p->groups, s.D, s.ldkv, s.k_head);
    if (p->add_dv) attention_add(dv, scratch.dv, N, p->groups, s.DV / p->parts, s.ldkv, s.v_head);
}

static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv) {
    bool rotated = false;
    const AttentionPlan *p = attention_plan(s, true, add_dv);
    if (!attention_by_cudnn(p, s)) {
        OPERATION();
        rotated = attention_builtin_backward(dq, dk, dv, dout, out, lse, q, k, v, s, add_dv);
    } else {
        OPERATION();
        assert(packed(0, dq, dk, dv, dout, out, lse, q, k, v));
        for (int call = 0; call < attention_calls(p); call++)
            for (int part = 0; part < p->parts; part++)
                attention_backward_part(p, part, call, dq, dk, dv, dout, out, lse, q, k, v);
    }
    if (s.rope && !rotated) rope_backward(dq, s.rope, s.B, s.T, s.rope_heads, s.D, s.ldq, s.q_head, NULL);
}
