/*
attention_probe.cuh: runs a backward of cuDNN before it is used, where versions with wrong results are known or likely.

  T % 128 = 64  On Hopper the kernel then reads 64 zero keys behind the last key. If it does not mask them, P =
                exp(0 - lse) is infinite for rows with lse < -88.7, and dQ = scale dS K is NaN. It has been seen in
                versions up to 9.26 without a causal mask; no report covers a causal mask. Sources:
                github.com/NVIDIA/cudnn-frontend/pull/628 (cause), github.com/pytorch/pytorch/issues/196678 (shapes).
  documents     cuDNN's own tests of sequences of length 0 require 9.25: earlier versions give NaN for rows without keys
                (github.com/NVIDIA/cudnn-frontend/issues/943). Here a document of length 0 has no rows either. One row
                with one key gives NaN without a mask (issue 1072 there). So on every device the probe has a document
                of 64 rows modulo 128, one of one row, behind which the keys are 0, and one of length 0.
  method        one group of heads, k = -97 and lse = -97.4: P and all gradients are 0
*/
#pragma once
#include "attention_answers.cuh"
#include "attention_documents.cuh"

// Whether `rows` rows of the gradients dq, dk and dv are finite.
static inline bool cudnn_probe_is_finite(const CudnnAttention *a, const CudnnTensors *t, int rows) {
    const void *from[] = {t->dq, t->dk, t->dv};
    const int widths[] = {a->dq.row, a->dk.row, a->dv.row};
    bool finite = true;
    for (int i = 0; i < 3; i++) {
        size_t count = (size_t)rows * widths[i];
        floatX *x = (floatX *)checked_calloc(count, sizeof(floatX));
        buffer_download(x, from[i], count * sizeof(floatX));
        for (size_t k = 0; k < count; k++) finite = finite && isfinite((float)x[k]);
        free(x);
    }
    return finite;
}

// Runs the plan of `a`, whose tensors are contiguous. 0x3F3F is 0.75 in bf16, 0xC2C2 is -97, 0xC2C2C2C2 is -97.4 in
// fp32.
static inline bool cudnn_probe_run(const CudnnAttention *a, CudnnPlan *plan, size_t plan_bytes, char *why,
                                   size_t size) {
    enum { Q, OUT, DOUT, DQ, K, V, DK, DV, LSE, TABLES, WORKSPACE, ROWS, PIECES };
    const int T = a->T, whole = a->documents && T > 64 ? (T - 65) / 128 * 128 + 64 : T;
    const int list[] = {0, min_int(whole, T - 1), min_int(whole, T - 1) + 1}, rows = a->documents ? list[2] : T;
    size_t width = max_int(a->D, a->DV) * sizeof(floatX), keys = round_up(T * width, 256), queries = keys * a->NQ;
    const size_t sizes[PIECES] = {queries,
                                  queries,
                                  queries,
                                  queries,
                                  keys,
                                  keys,
                                  keys,
                                  keys,
                                  queries,
                                  attention_tables_bytes(a->B),
                                  round_up(plan_bytes, 256),
                                  256};
    size_t at[PIECES + 1] = {0};
    for (int i = 0; i < PIECES; i++) at[i + 1] = at[i] + sizes[i];
    char *memory = (char *)buffer_alloc(at[PIECES], "a test of cuDNN's attention");
    CUDA_CHECK(cudaMemsetAsync(memory, 0x3F, at[PIECES], main_stream));
    CUDA_CHECK(cudaMemsetAsync(memory + at[K], 0xC2, at[DK] - at[K], main_stream));
    CUDA_CHECK(cudaMemsetAsync(memory + at[LSE], 0xC2, queries, main_stream));
    size_t visible = rows * a->D * sizeof(floatX);
    CUDA_CHECK(cudaMemsetAsync(memory + at[K] + visible, 0, keys - visible, main_stream));
    buffer_upload(memory + at[ROWS], list, sizeof(list));
    CudnnTensors t;
    memset(&t, 0, sizeof(t));
    t.q = memory + at[Q], t.k = memory + at[K], t.v = memory + at[V], t.out = memory + at[OUT];
    t.lse = memory + at[LSE], t.dout = memory + at[DOUT];
    t.dq = memory + at[DQ], t.dk = memory + at[DK], t.dv = memory + at[DV];
    if (a->documents)
        attention_write_tables(&t, memory + at[TABLES], a, (const int *)(void *)(memory + at[ROWS]), 0, 2,
                               (size_t)a->NQ * T, 0, 0);
    bool ran = cudnn_attention_run(plan, &t, memory + at[WORKSPACE], main_stream, why, size);
    bool finite = ran && cudnn_probe_is_finite(a, &t, rows);
    int longest = a->documents ? list[1] : T;
    if (ran && !finite)
        snprintf(why, size, "this cuDNN's backward gives NaN %s %d positions, where T %% 128 is %d",
                 a->documents ? "for documents, one of them of" : "at", longest, longest % 128);
    buffer_free(memory);
    return finite;
}

// Whether cuDNN's backward of this description, for one group of heads, gives finite gradients where the probe is
// needed.
static inline bool cudnn_probe(const CudnnAttention *of, int group, char *why, size_t size) {
    CudnnAttention a = *of;
    size_t bytes = 0;
    if (!a.documents && (a.T % 128 != 64 || cudnn_attention_capability() / 10 != 9)) return true;
    a.B = a.documents ? 3 : 1, a.NKV = 1, a.NQ = group;
    a.q.head = a.dq.head = a.k.head = a.dk.head = a.D;
    a.v.head = a.dv.head = a.out.head = a.DV;
    a.q.row = a.dq.row = group * a.D;
    a.k.row = a.dk.row = a.D;
    a.v.row = a.dv.row = a.DV;
    a.out.row = group * a.DV;
    CudnnPlan *plan = attention_ask(&a, &bytes, why, size);
    return plan && cudnn_probe_run(&a, plan, bytes, why, size);
}
