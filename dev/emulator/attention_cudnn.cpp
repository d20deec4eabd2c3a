/*
attention_cudnn.cpp: llmc/cuda/attention_cudnn.h where kernels run on the CPU: reference loops that replace cuDNN. They
use only the dimensions and strides of the call, write all of their outputs, and round where cuDNN does: P and dS to
bf16 before products, the part of dK and dV of each query head before the sum of the parts.

It does not support what cuDNN does not support: fp32, strides, widths and addresses that are no multiple of 16 bytes, T
= 1 in the backward, and widths above $CUDA_ON_CPU_CUDNN: "forward,backward" (default "256,256", as on Hopper; "256,128"
is as elsewhere). A plan asks for as much workspace as cuDNN's on Hopper (tests/cudnn_plans.cpp), and each run fills it
with NaN. A forward asks for none there, here for $CUDA_ON_CPU_CUDNN_FORWARD bytes per sequence.

  $CUDA_ON_CPU_CUDNN_VERSION   of the emulated library (91900 is 9.19.0). On a device whose name has "B200" in
                               it ($CUDA_ON_CPU_NAME) there is a deterministic backward from 9.18 on; one of linear
                               memory is on an "H200" from 9.25 on
  $CUDA_ON_CPU_CUDNN_FAULT     "open: TEXT", "plan: TEXT", "window: TEXT" (a plan with a window) or "run: TEXT": the
                               call that fails, and its message; or
                               "tail: on": the backward reads 64 keys of zeros past the last one, without a mask,
                               where the number of keys is 64 modulo 128
  documents                    as by cuDNN 9.18.1: no backward on devices other than an H200 or a B200; a forward on
                               others from 9.18.1 on. Lengths above T, a length after one of 0, and offsets that
                               decrease end the program
  order                        a plan before cudnn_attention_open, cudnn_attention_close while there are plans, and a
                               run of a plan after its end: each ends the program
*/
#ifndef USE_CUDNN
#define USE_CUDNN
#endif
#include "../../llmc/cuda/attention_cudnn.h"
#include "../../llmc/cuda/launch.cuh"
#include <cuda_bf16.h>

#include <set>
#include <vector>

typedef __nv_bfloat16 bf16;

struct CudnnPlan {
    CudnnAttention a;
    bool tail; // the planted bug
    size_t workspace_bytes;
};

static float rounded(float x) { return (float)__float2bfloat16_rn(x); }

// ---------------------------------------------------------------------------------------------------
// One head of one sequence or document: what is read and written, from its first row on

// Offset of sequence b in a tensor whose sequences follow each other, or of document b.
static size_t offset_of(const CudnnAttention *a, const CudnnTensors *t, CudnnTable table, int b, size_t row) {
    if (!a->documents) return (size_t)b * (size_t)a->T * row;
    return (size_t)((const int64_t *)t->offsets)[(size_t)table * cudnn_table_stride(a->B) + (size_t)b];
}

struct Head {
    const CudnnAttention *a;
    const bf16 *q, *k, *v, *dout;
    bf16 *out;
    float *lse;
    int T;

    Head(const CudnnAttention *of, const CudnnTensors *t, int b, int h) : a(of) {
        size_t kv = (size_t)(h / (of->NQ / of->NKV));
        auto at = [&](CudnnTable table, CudnnStrides s, size_t head) {
            return offset_of(of, t, table, b, (size_t)s.row) + head * (size_t)s.head;
        };
        q = (const bf16 *)t->q + at(CUDNN_Q, of->q, (size_t)h);
        k = (const bf16 *)t->k + at(CUDNN_K, of->k, kv);
        v = (const bf16 *)t->v + at(CUDNN_V, of->v, kv);
        out = (bf16 *)t->out + at(CUDNN_OUT, of->out, (size_t)h);
        dout = (const bf16 *)t->dout + (t->dout ? at(CUDNN_OUT, of->out, (size_t)h) : 0);
        lse = (float *)t->lse + at(CUDNN_LSE, CudnnStrides{of->NQ, of->T}, (size_t)h);
        T = of->documents ? ((const int *)t->lengths)[b] : of->T;
    }
    int first_key(int t) const { return a->window && t >= a->window ? t - a->window + 1 : 0; }
    static float dot(const bf16 *x, const bf16 *y, int width) {
        float sum = 0;
        for (int i = 0; i < width; i++) sum += (float)x[i] * (float)y[i];
        return sum;
    }
    static const bf16 *row(const bf16 *x, CudnnStrides s, int t) { return x + (size_t)t * (size_t)s.row; }
    float score(int t, int key) const { return a->scale * dot(row(q, a->q, t), row(k, a->k, key), a->D); }
};

static void forward_head(const Head &h) {
    const CudnnAttention *a = h.a;
    std::vector<float> p((size_t)a->T), sums((size_t)a->DV);
    for (int t = 0; t < h.T; t++) {
        float largest = -INFINITY, total = 0;
        for (int key = h.first_key(t); key <= t; key++) largest = fmaxf(largest, p[(size_t)key] = h.score(t, key));
        sums.assign(sums.size(), 0);
        for (int key = h.first_key(t); key <= t; key++) {
            float e = expf(p[(size_t)key] - largest);
            total += e;
            const bf16 *v = Head::row(h.v, a->v, key);
            for (int c = 0; c < a->DV; c++) sums[(size_t)c] += rounded(e) * (float)v[c];
        }
        bf16 *out = h.out + (size_t)t * (size_t)a->out.row;
        for (int c = 0; c < a->DV; c++) out[c] = __float2bfloat16_rn(sums[(size_t)c] / total);
        h.lse[t] = largest + logf(total);
    }
}

// Of one query head: dq, and its part of dk (T,D) and dv (T,DV).
static void backward_head(const Head &h, bf16 *dq, std::vector<float> &dk, std::vector<float> &dv) {
    const CudnnAttention *a = h.a;
    std::vector<float> sums((size_t)a->D);
    for (int t = 0; t < h.T; t++) {
        const bf16 *dout = Head::row(h.dout, a->out, t), *q = Head::row(h.q, a->q, t);
        float delta = Head::dot(dout, Head::row(h.out, a->out, t), a->DV);
        sums.assign(sums.size(), 0);
        for (int key = h.first_key(t); key <= t; key++) {
            const bf16 *k = Head::row(h.k, a->k, key);
            float p = expf(h.score(t, key) - h.lse[t]), dp = Head::dot(dout, Head::row(h.v, a->v, key), a->DV);
            float ds = rounded(a->scale * p * (dp - delta));
            for (int c = 0; c < a->D; c++) {
                sums[(size_t)c] += ds * (float)k[c];
                dk[(size_t)key * (size_t)a->D + (size_t)c] += ds * (float)q[c];
            }
            for (int c = 0; c < a->DV; c++) dv[(size_t)key * (size_t)a->DV + (size_t)c] += rounded(p) * (float)dout[c];
        }
        for (int c = 0; c < a->D; c++)
            dq[(size_t)t * (size_t)a->dq.row + (size_t)c] = __float2bfloat16_rn(sums[(size_t)c]);
    }
}

// The heads of a group of query heads, added up in order.
static void store_sum(bf16 *to, const std::vector<std::vector<float>> &parts, int T, int width, CudnnStrides s) {
    for (int t = 0; t < T; t++)
        for (int c = 0; c < width; c++) {
            size_t at = (size_t)t * (size_t)width + (size_t)c;
            float sum = 0;
            for (const std::vector<float> &part : parts) sum += rounded(part[at]);
            to[(size_t)t * (size_t)s.row + (size_t)c] = __float2bfloat16_rn(sum);
        }
}

static void backward_group(const CudnnAttention *a, const CudnnTensors *t, int b, int kv) {
    int group = a->NQ / a->NKV, T = 0;
    std::vector<std::vector<float>> dk, dv;
    auto at = [&](void *x, CudnnTable table, CudnnStrides s, int head) {
        return (bf16 *)x + offset_of(a, t, table, b, (size_t)s.row) + (size_t)head * (size_t)s.head;
    };
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        Head head(a, t, b, h);
        T = head.T;
        dk.emplace_back((size_t)T * (size_t)a->D, 0.0f);
        dv.emplace_back((size_t)T * (size_t)a->DV, 0.0f);
        backward_head(head, at(t->dq, CUDNN_DQ, a->dq, h), dk.back(), dv.back());
    }
    store_sum(at(t->dk, CUDNN_DK, a->dk, kv), dk, T, a->D, a->dk);
    store_sum(at(t->dv, CUDNN_DV, a->dv, kv), dv, T, a->DV, a->dv);
}

// The contract of the lengths and offsets of documents.
static void check_documents(const CudnnAttention *a, const CudnnTensors *t) {
    const int *lengths = (const int *)t->lengths;
    for (int b = 0; b < a->B; b++) {
        if (lengths[b] < 0 || lengths[b] > a->T)
            cuda_on_cpu::fail("cuDNN's document %d has %d of %d rows", b, lengths[b], a->T);
        if (b > 0 && lengths[b] > 0 && lengths[b - 1] == 0) cuda_on_cpu::fail("document %d follows one of length 0", b);
        for (int table = 0; table < (a->backward ? CUDNN_OFFSETS : CUDNN_DQ); table++)
            if (offset_of(a, t, (CudnnTable)table, b + 1, 0) < offset_of(a, t, (CudnnTable)table, b, 0))
                cuda_on_cpu::fail("the offsets %d of documents decrease after %d", table, b);
    }
}

static void compute(const CudnnAttention *a, const CudnnTensors *t) {
    int heads = a->backward ? a->NKV : a->NQ;
    if (a->documents) check_documents(a, t);
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < a->B * heads; i++) {
        if (a->backward) backward_group(a, t, i / heads, i % heads);
        else forward_head(Head(a, t, i / heads, i % heads));
    }
}

// Keys of zeros have the score 0: P = exp(0 - lse) times zeros, which is NaN where P is infinite.
static void add_tail(const CudnnAttention *a, const CudnnTensors *t) {
    for (int i = 0; i < a->B * a->NQ; i++) {
        int b = i / a->NQ, h = i % a->NQ;
        Head head(a, t, b, h);
        bf16 *first = (bf16 *)t->dq + offset_of(a, t, CUDNN_DQ, b, (size_t)a->dq.row) + (size_t)h * (size_t)a->dq.head;
        for (int row = 0; row < head.T && head.T % 128 == 64; row++) {
            bf16 *dq = first + (size_t)row * (size_t)a->dq.row;
            for (int c = 0; c < a->D; c++) dq[c] = __float2bfloat16_rn((float)dq[c] + expf(0 - head.lse[row]) * 0.0f);
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// The interface

static bool refuse(char *why, size_t size, const char *reason) {
    snprintf(why, size, "%s", reason);
    return false;
}

static bool is_open;
static std::set<CudnnPlan *> plans;
static uint64_t asked;
uint64_t cuda_on_cpu::cudnn_plans_asked() { return asked; }

static bool fails(const char *call, char *why, size_t size) {
    const char *fault = getenv("CUDA_ON_CPU_CUDNN_FAULT"), *text = fault ? strstr(fault, ": ") : NULL;
    CHECK(!fault || text, "CUDA_ON_CPU_CUDNN_FAULT '%s' is not CALL: TEXT", fault);
    return text && strncmp(fault, call, (size_t)(text - fault)) == 0 && !refuse(why, size, text + 2);
}
static size_t version() {
    const char *text = getenv("CUDA_ON_CPU_CUDNN_VERSION");
    return text ? strtoull(text, NULL, 10) : 91900;
}
extern "C" int cudnn_attention_capability(void) {
    cudaDeviceProp facts;
    if (cudaGetDeviceProperties(&facts, 0) != cudaSuccess) return 0;
    return strstr(facts.name, "B200") ? 100 : strstr(facts.name, "H200") ? 90 : 80;
}

extern "C" bool cudnn_attention_open(char *why, size_t size) {
    is_open = is_open || (cudnn_version_usable(version(), why, size) && !fails("open", why, size));
    return is_open;
}
extern "C" void cudnn_attention_close(void) {
    if (!plans.empty()) cuda_on_cpu::fail("cuDNN is closed while %zu of its plans exist", plans.size());
    is_open = false;
}
extern "C" const char *cudnn_attention_version(void) { return "loops in the place of cuDNN"; }
extern "C" void cudnn_attention_free(CudnnPlan *plan) {
    if (plan && !plans.erase(plan)) cuda_on_cpu::fail("a plan of cuDNN is forgotten twice");
    delete plan;
}

static bool valid(const CudnnAttention *a, char *why, size_t size) {
    const CudnnStrides strides[] = {a->q, a->k, a->v, a->out, a->dq, a->dk, a->dv};
    int widths[2] = {256, 256}, widest = a->D > a->DV ? a->D : a->DV;
    const char *given = getenv("CUDA_ON_CPU_CUDNN");
    CHECK(!given || sscanf(given, "%d,%d", &widths[0], &widths[1]) == 2, "CUDA_ON_CPU_CUDNN '%s' is not two widths",
          given);
    for (int i = 0; i < (a->backward ? 7 : 4); i++)
        if (strides[i].row % 8 || strides[i].head % 8) return refuse(why, size, "a stride is no multiple of 16 bytes");
    if (a->D % 8 || a->DV % 8) return refuse(why, size, "a head's width is no multiple of 8");
    if (a->B < 1 || a->T < 1 || a->NKV < 1 || a->NQ % a->NKV) return refuse(why, size, "not an attention");
    if (a->backward && a->T == 1) return refuse(why, size, "T = 1 has no backward");
    if (widest > widths[a->backward != 0]) return refuse(why, size, "heads are too wide");
    if (a->window < 0) return refuse(why, size, "a left bound below 0");
    if (a->documents && cudnn_attention_capability() < 90 && (a->backward || version() < 91801))
        return refuse(why, size, "documents are only supported on Hopper and above");
    if (a->backward && a->deterministic && cudnn_attention_capability() == 100 && version() < 91800)
        return refuse(why, size, "no deterministic backward on a B200 below 9.18.0");
    return true;
}

extern "C" CudnnPlan *cudnn_attention_plan(const CudnnAttention *a, size_t *workspace_bytes, char *why, size_t size) {
    *workspace_bytes = 0;
    asked++;
    if (!is_open) cuda_on_cpu::fail("cuDNN is asked for a plan before it is opened");
    if (fails("plan", why, size) || (a->window && fails("window", why, size)) || !valid(a, why, size)) return NULL;
    size_t heads = (size_t)a->B * (size_t)a->NQ, T = (size_t)a->T, rows = heads * T;
    const char *each = getenv("CUDA_ON_CPU_CUDNN_FORWARD");
    if (a->documents) *workspace_bytes = 16384 + 64 * (size_t)a->B;
    if (!a->backward && each) *workspace_bytes += (size_t)a->B * strtoull(each, NULL, 10);
    if (a->backward) {
        *workspace_bytes += rows * sizeof(float); // rowsum(dO O)
        if (a->deterministic)
            *workspace_bytes += heads * ((T + 63) / 64 * 64) * ((T + 127) / 128 * 128) * sizeof(bf16); // dS
        else *workspace_bytes += rows * (size_t)a->D * sizeof(float);                                  // dQ
        if (a->NQ > a->NKV)
            *workspace_bytes += rows * (size_t)(a->D + a->DV) * sizeof(bf16); // dK and dV of each query head
    }
    return *plans.insert(new CudnnPlan{*a, a->backward && fails("tail", why, size), *workspace_bytes}).first;
}

extern "C" bool cudnn_attention_run(CudnnPlan *plan, const CudnnTensors *tensors, void *workspace, void *stream,
                                    char *why, size_t size) {
    if (!plans.count(plan)) cuda_on_cpu::fail("cuDNN runs a plan that does not exist");
    if (fails("run", why, size)) return false;
    const CudnnTensors t = *tensors;
    const void *all[] = {t.q, t.k, t.v, t.out, t.lse, t.dout, t.dq, t.dk, t.dv, workspace, t.lengths, t.offsets};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bool used = i < 5 || (plan->a.backward && i < 9) || (i == 9 && plan->workspace_bytes > 0) ||
                    (i > 9 && plan->a.documents);
        if (used && (!all[i] || (uintptr_t)all[i] % 16))
            return refuse(why, size, "an address is no multiple of 16 bytes");
    }
    CudnnAttention a = plan->a;
    bool tail = plan->tail;
    size_t bytes = plan->workspace_bytes;
    cuda_on_cpu::on_stream((cudaStream_t)stream, "cuDNN's attention", [=] {
        if (bytes) memset(workspace, 0xFF, bytes);
        compute(&a, &t);
        if (tail) add_tail(&a, &t);
    });
    return true;
}
