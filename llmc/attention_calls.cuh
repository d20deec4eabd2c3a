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

static inline void attention_call(CudnnPlan *plan, const CudnnTensors *t, const AttentionRoute *r, void *workspace) {
    char why[ATTENTION_WHY];
    AttentionShape s = r->shape;
    CHECK(cudnn_attention_run(plan, t, workspace, main_stream, why, sizeof(why)),
          "attention's %s of %d sequences of %d, %d and %d heads of width %d and %d: %s; --sdpa own does without cuDNN",
          r->backward ? "backward" : "forward", r->sequences, s.T, s.NQ, s.NKV, s.D, s.DV / r->parts, why);
}

static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s) {
    const AttentionRoute *r = lse ? attention_route(s, false, false) : NULL;
    if (!r || !r->parts) {
        attention_own_forward(out, lse, q, k, v, s);
        return;
    }
    assert(packed(0, out, lse, q, k, v));
    char *workspace = (char *)(void *)ops_workspace_take(r->plan_bytes);
    for (int b = 0; b < s.B; b += r->sequences) {
        size_t row = (size_t)b * (size_t)s.T;
        for (int part = 0; part < r->parts; part++) {
            int column = part * (s.DV / r->parts);
            CudnnTensors t;
            memset(&t, 0, sizeof(t));
            t.q = q + row * (size_t)s.ldq;
            t.k = k + row * (size_t)s.ldkv;
            t.v = v + row * (size_t)s.ldkv + column;
            t.out = out + row * (size_t)s.ldo + column;
            t.lse = lse + row * (size_t)s.NQ; // the same from each half
            attention_call(r->plans[0], &t, r, workspace);
        }
    }
}

// The gradients of part `part` of the values' columns, of the sequences from `row` on.
static inline void attention_backward_part(const AttentionRoute *r, int part, size_t row, floatX *dq, floatX *dk,
                                           floatX *dv, const floatX *dout, const floatX *out, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v) {
    AttentionShape s = r->shape;
    AttentionScratch scratch;
    char *workspace = (char *)(void *)ops_workspace_take(r->plan_bytes + r->scratch_bytes);
    attention_scratch(r, workspace + r->plan_bytes, &scratch);
    int width = s.DV / r->parts, column = part * width;
    size_t to_q = row * (size_t)s.ldq, to_kv = row * (size_t)s.ldkv, to_o = row * (size_t)s.ldo + (size_t)column,
           N = (size_t)r->sequences * (size_t)s.T;
    floatX *sum_q = dq + to_q, *sum_k = dk + to_kv, *sum_v = dv + to_kv + column;
    CudnnTensors t;
    t.q = q + to_q;
    t.k = k + to_kv;
    t.v = v + to_kv + column;
    t.out = const_cast<floatX *>(out) + to_o;
    t.lse = const_cast<real *>(lse) + row * (size_t)s.NQ;
    t.dout = dout + to_o;
    t.dq = part ? scratch.dq : sum_q;
    t.dk = part ? scratch.dk : sum_k;
    t.dv = r->add_dv ? scratch.dv : sum_v;
    attention_call(r->plans[part], &t, r, workspace);
    if (part) attention_add(sum_q, scratch.dq, N, s.NQ, s.D, s.ldq, s.q_head);
    if (part) attention_add(sum_k, scratch.dk, N, s.NKV, s.D, s.ldkv, s.k_head);
    if (r->add_dv) attention_add(sum_v, scratch.dv, N, s.NKV, width, s.ldkv, s.v_head);
}

static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv) {
    const AttentionRoute *r = attention_route(s, true, add_dv);
    if (!r || !r->parts) {
        attention_own_backward(dq, dk, dv, dout, out, lse, q, k, v, s, add_dv);
        return;
    }
    assert(packed(0, dq, dk, dv, dout, out, lse, q, k, v));
    for (int b = 0; b < s.B; b += r->sequences)
        for (int part = 0; part < r->parts; part++)
            attention_backward_part(r, part, (size_t)b * (size_t)s.T, dq, dk, dv, dout, out, lse, q, k, v);
}
#endif
