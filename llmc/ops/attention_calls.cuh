/*
attention_calls: the calls of attention_forward and attention_backward; see attention_library.cuh.

  traffic   besides cuDNN's own: what is added is read once more, and its sum read and written
*/
#ifndef LLMC_ATTENTION_CALLS_CUH
#define LLMC_ATTENTION_CALLS_CUH

// to[n,h,:] += from[n,h,:]                      from (N,heads,width) without gaps, to with strides of rows and heads
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
    size_t rows = N * (size_t)heads;
    LAUNCH_ROWS(attention_add_kernel, packed((size_t)width, to, from), rows, width, to, from, (unsigned)rows,
                (unsigned)heads, width, ld, head);
}

// Where a call begins: first elements in the rows and in lse, and for the values' columns of a part.
typedef struct {
    size_t q, k, v, o, lse;
} AttentionStart;
static inline AttentionStart attention_start(const AttentionRoute *r, int call, int part) {
    AttentionShape s = r->shape;
    int shares = s.NKV / r->groups, kv = call % shares * r->groups;
    size_t b = (size_t)(call / shares * r->sequences), row = b * (size_t)s.T, h = (size_t)(kv * (s.NQ / s.NKV)),
           column = (size_t)(part * (s.DV / r->parts));
    AttentionStart a;
    a.q = row * (size_t)s.ldq + h * (size_t)s.q_head;
    a.k = row * (size_t)s.ldkv + (size_t)kv * (size_t)s.k_head;
    a.v = row * (size_t)s.ldkv + (size_t)kv * (size_t)s.v_head + column;
    a.o = row * (size_t)s.ldo + h * (size_t)s.o_head + column;
    a.lse = (b * (size_t)s.NQ + h) * (size_t)s.T;
    return a;
}
static inline int attention_calls(const AttentionRoute *r) {
    return r->shape.B / r->sequences * (r->shape.NKV / r->groups);
}

static inline void attention_call(CudnnPlan *plan, const CudnnTensors *t, const AttentionRoute *r, void *workspace) {
    char why[ATTENTION_WHY];
    AttentionShape s = r->shape;
    CHECK(cudnn_attention_run(plan, t, workspace, main_stream, why, sizeof(why)),
          "attention's %s of %d sequences of %d, %d and %d heads of width %d and %d: %s; --sdpa own does without cuDNN",
          r->backward ? "backward" : "forward", r->sequences, s.T, attention_queries(r), r->groups, s.D,
          s.DV / r->parts, why);
}

static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s) {
    OPERATION();
    const AttentionRoute *r = lse ? attention_route(s, false, false) : NULL;
    if (!r || !r->parts) {
        attention_builtin_forward(out, lse, q, k, v, s);
        return;
    }
    assert(packed(0, out, lse, q, k, v));
    char *workspace = (char *)(void *)ops_workspace_take(r->plan_bytes);
    for (int call = 0; call < attention_calls(r); call++)
        for (int part = 0; part < r->parts; part++) {
            AttentionStart at = attention_start(r, call, part);
            CudnnTensors t;
            memset(&t, 0, sizeof(t));
            t.q = q + at.q;
            t.k = k + at.k;
            t.v = v + at.v;
            t.out = out + at.o;
            t.lse = lse + at.lse; // the same from each half
            attention_call(r->plans[0], &t, r, workspace);
        }
}

// The gradients of part `part` of the values' columns in one call.
static inline void attention_backward_part(const AttentionRoute *r, int part, int call, floatX *dq, floatX *dk,
                                           floatX *dv, const floatX *dout, const floatX *out, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v) {
    AttentionShape s = r->shape;
    AttentionScratch scratch;
    char *workspace = (char *)(void *)ops_workspace_take(r->plan_bytes + r->scratch_bytes);
    attention_scratch(r, workspace + r->plan_bytes, &scratch);
    AttentionStart at = attention_start(r, call, part);
    int queries = attention_queries(r);
    size_t N = (size_t)r->sequences * (size_t)s.T;
    CudnnTensors t;
    t.q = q + at.q;
    t.k = k + at.k;
    t.v = v + at.v;
    t.out = const_cast<floatX *>(out) + at.o;
    t.lse = const_cast<real *>(lse) + at.lse;
    t.dout = dout + at.o;
    t.dq = part ? scratch.dq : dq + at.q;
    t.dk = part ? scratch.dk : dk + at.k;
    t.dv = r->add_dv ? scratch.dv : dv + at.v;
    attention_call(r->plans[part], &t, r, workspace);
    if (part) attention_add(dq + at.q, scratch.dq, N, queries, s.D, s.ldq, s.q_head);
    if (part) attention_add(dk + at.k, scratch.dk, N, r->groups, s.D, s.ldkv, s.k_head);
    if (r->add_dv) attention_add(dv + at.v, scratch.dv, N, r->groups, s.DV / r->parts, s.ldkv, s.v_head);
}

static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv) {
    OPERATION();
    const AttentionRoute *r = attention_route(s, true, add_dv);
    if (!r || !r->parts) {
        attention_builtin_backward(dq, dk, dv, dout, out, lse, q, k, v, s, add_dv);
        return;
    }
    assert(packed(0, dq, dk, dv, dout, out, lse, q, k, v));
    for (int call = 0; call < attention_calls(r); call++)
        for (int part = 0; part < r->parts; part++)
            attention_backward_part(r, part, call, dq, dk, dv, dout, out, lse, q, k, v);
}
#endif
