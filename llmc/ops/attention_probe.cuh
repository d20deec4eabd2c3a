/*
attention_probe.cuh: a check of cuDNN's backward on Hopper, before it is relied on; see attention_library.cuh.

  bug      For T % 128 = 64 the kernel reads 64 keys of zeros behind the last one. Where it does not mask them,
           P = exp(0 - lse) is infinite for rows of lse < -88.7, and dQ = scale dS K is NaN. Seen in versions up to 9.26
           without a causal mask; with one, as here, no report says so.
  check    one group of heads of one sequence of T positions: k = -97, lse = -97.4, so that P and all gradients are 0
  source   github.com/NVIDIA/cudnn-frontend/pull/628 (cause), github.com/pytorch/pytorch/issues/196678 (shapes)
*/
#ifndef LLMC_ATTENTION_PROBE_CUH
#define LLMC_ATTENTION_PROBE_CUH

// Whether the gradients of the queries are finite. 0x3F3F is 0.75 in bf16, 0xC2C2 is -97, 0xC2C2C2C2 -97.4 in fp32.
static inline bool attention_run_probe(const AttentionRoute *r, CudnnPlan *plan, size_t plan_bytes, char *why) {
    enum { Q, OUT, DOUT, DQ, K, V, DK, DV, LSE, WORKSPACE, PIECES };
    AttentionShape s = r->shape;
    size_t width = (size_t)max_int(s.D, s.DV) * sizeof(floatX), keys = round_up((size_t)s.T * width, 256),
           queries = keys * (size_t)(s.NQ / s.NKV), at[PIECES + 1] = {0};
    for (int i = 0; i < PIECES; i++)
        at[i + 1] = at[i] + (i < K ? queries : i < LSE ? keys : i == LSE ? queries : plan_bytes);
    char *memory = (char *)buffer_alloc(at[PIECES], "a check of cuDNN's attention");
    CUDA_CHECK(cudaMemsetAsync(memory, 0x3F, at[PIECES], main_stream));
    CUDA_CHECK(cudaMemsetAsync(memory + at[K], 0xC2, at[DK] - at[K], main_stream));
    CUDA_CHECK(cudaMemsetAsync(memory + at[LSE], 0xC2, queries, main_stream));
    CudnnTensors t;
    t.q = memory + at[Q], t.k = memory + at[K], t.v = memory + at[V], t.out = memory + at[OUT];
    t.lse = memory + at[LSE], t.dout = memory + at[DOUT];
    t.dq = memory + at[DQ], t.dk = memory + at[DK], t.dv = memory + at[DV];
    bool finite = cudnn_attention_run(plan, &t, memory + at[WORKSPACE], main_stream, why, ATTENTION_WHY);
    if (finite) {
        floatX *dq = (floatX *)checked_calloc(queries, 1);
        size_t count = (size_t)s.T * (size_t)(s.NQ / s.NKV) * (size_t)s.D;
        buffer_download(dq, memory + at[DQ], count * sizeof(floatX));
        for (size_t i = 0; i < count; i++) finite = finite && isfinite((float)dq[i]);
        if (!finite)
            snprintf(why, ATTENTION_WHY, "this cuDNN's backward gives NaN at %d positions, where T %% 128 is 64", s.T);
        free(dq);
    }
    buffer_free(memory);
    return finite;
}

// Whether a route that cuDNN has taken may be used; otherwise it is our kernel's.
static inline bool attention_masks_tail(AttentionRoute *r) {
    AttentionShape s = r->shape;
    size_t bytes = 0;
    if (!r->backward || s.T % 128 != 64 || attention_state.no_device || cudnn_attention_capability() / 10 != 9)
        return true;
    CudnnAttention a = attention_description(r, 0);
    int group = s.NQ / s.NKV;
    a.B = a.NKV = 1, a.NQ = group;
    a.q = a.dq = attention_strides(group * s.D, s.D);
    a.k = a.dk = attention_strides(s.D, s.D);
    a.v = a.dv = attention_strides(a.DV, a.DV);
    a.out = attention_strides(group * a.DV, a.DV);
    CudnnPlan *plan = cudnn_attention_plan(&a, &bytes, r->why, sizeof(r->why));
    bool right = plan && attention_run_probe(r, plan, bytes, r->why);
    cudnn_attention_free(plan);
    if (right) return true;
    attention_forget(r);
    r->parts = 0;
    r->remedy = "a --seq-len that is a multiple of 128 goes to cuDNN, or a newer cuDNN may compute it";
    return false;
}
#endif
