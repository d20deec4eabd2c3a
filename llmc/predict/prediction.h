/*
prediction.h: predicts memory and time of a training step on a GPU that this machine need not have (--dry-run --device
NAME).

  plan_for_device(plan, device, options)         turns a plan into that of the bf16 program on the GPU
  predict_step(plan, options, worse)             Prediction (prediction_types.h)
  prediction_summary(prediction)                 share of the peak, tokens/s, hours, what limits the speed
*/
#ifndef LLMC_PREDICTION_H
#define LLMC_PREDICTION_H
#include "../model/activations.h"
#include "prediction_communication.h"
#include "prediction_operations.h"

// As attention_share of attention_plans.cuh, for a device whose memory is unknown.
static inline size_t predicted_share(size_t n, size_t bytes, size_t lse) {
    size_t best = n;
    for (size_t d = n; d > 0 && best * bytes > GPU_ATTENTION_LIMIT; d--)
        if (n % d == 0 && d * lse % 4 == 0) best = d;
    return best;
}
// Bytes of workspace of cuDNN's attention backward, by the rules of attention_plans.cuh. Layers differ only in their
// windows, which need the same. documents: --doc-mask, of which a call computes several.
static inline size_t predicted_workspace(const ModelPlan *plan, bool deterministic, bool documents) {
    enum { DOCUMENT_BYTES = 136, DOCUMENT_TOKENS = 512 }; // tables and cuDNN's own; as attention_slots
    AttentionShape s = key_set(plan, 0, 0, plan->B, plan->T, 0).shape;
    size_t T = s.T, rows = s.B * T, group = s.NQ / s.NKV, head = T * FP32_BYTES; // rowsum(dO O)
    head += deterministic ? round_up(T, 64) * round_up(T, 128) * FLOATX_BYTES : T * s.D * FP32_BYTES;
    head += group > 1 ? T * (s.D + s.DV) * FLOATX_BYTES : 0;
    size_t slots = min_size(rows, s.B + (rows + DOCUMENT_TOKENS - 1) / DOCUMENT_TOKENS);
    if (documents && plan->device->generation < HOPPER) return slots * DOCUMENT_BYTES; // only the forward
    size_t sequences = documents ? min_size(slots, max_size(1, GPU_ATTENTION_LIMIT / (s.NQ * head)))
                                 : predicted_share(s.B, s.NQ * head, s.NQ * T);
    size_t groups = sequences == 1 ? predicted_share(s.NKV, group * head, group * T) : (size_t)s.NKV;
    return sequences * (groups * group * head + (documents ? DOCUMENT_BYTES : 0));
}

// The rounded copies of weights and the workspace of --gemm fp8, as plan_copies and plan_build.
static inline void plan_fp8_for_device(ModelPlan *plan) {
    for (int kind = 0; kind < LINEAR_HEAD; kind++) {
        size_t largest = 0, copies = kind < LINEAR_BLOCK_COUNT ? copied_layers(plan) : 1;
        for (int l = 0; l < plan->config.L; l += max_int(1, plan->config.L - 1)) {
            Linear w = linear_shape(plan, (LinearKind)kind, l);
            if (w.OC == 0) continue;
            int N = plan->B * plan->T, E = plan->config.E;
            size_t bytes = round_up(fp8_copy_bytes(w.IC, w.OC), COPY_ALIGN);
            largest = max_size(largest, bytes * (size_t)linear_count(plan, (LinearKind)kind));
            bytes = linear_of_experts((LinearKind)kind) ? expert_fp8_workspace_bytes(N * plan->config.K, E, w.IC, w.OC)
                                                        : fp8_workspace_bytes(N, w.IC, w.OC);
            plan->workspace_bytes = max_size(plan->workspace_bytes, bytes);
        }
        plan->copies_bytes += copies * largest;
    }
}

// Turns a plan into that of the bf16 program on this GPU, with the same --gemm fp8. The plan must not be allocated. A
// CUDA program's plan already is one: only its device changes.
static inline void plan_for_device(ModelPlan *plan, const DevicePeak *gpu, const Options *o) {
    plan->device = gpu;
    if (!gpu || !ops_use_host_memory) return;
    const Sharding *s = &plan->sharding;
    size_t rows = gpu_logit_rows((size_t)plan->Vp * FLOATX_BYTES);
    if (plan->purpose == FOR_TRAINING) plan->logit_rows = (int)min_size((size_t)plan->B * plan->T, rows);
    plan_count_bytes(plan, gpu_elements);
    plan->workspace_bytes = predicted_workspace(plan, o->deterministic, o->doc_mask);
    plan->copies_bytes = 0;
    if (plan->config.E) {
        size_t logits = (size_t)plan->B * plan->T * plan->config.E * FLOATX_BYTES; // as router_workspace_bytes
        plan->workspace_bytes = max_size(plan->workspace_bytes, logits);
    }
    if (plan->fp8) plan_fp8_for_device(plan);
    plan->received_bytes = s->level >= 2 ? s->largest / s->ranks * FP32_BYTES : 0;
}

// worse: an assumption to make 10% worse; ASSUMPTION_COUNT: none.
static inline Prediction predict_step(const ModelPlan *plan, const Options *o, int worse) {
    Prediction p;
    memset(&p, 0, sizeof(p));
    p.plan = plan, p.options = o;
    p.micro_steps = (double)o->total_batch / ((double)plan->B * plan->T * plan->sharding.ranks);
    for (int i = 0; i < ASSUMPTION_COUNT; i++) {
        p.assumed[i] = assumptions[i].value[plan->device->generation];
        if (i == worse) p.assumed[i] *= assumptions[i].cost ? 1.1 : 0.9;
    }
    int N = plan->B * plan->T;
    predict_forward(&p, N);
    predict_head(&p, N);
    predict_backward(&p, N);
    predict_recompute(&p, N);
    predict_update(&p);
    if (plan->fp8) predict_fp8(&p, N);
    predict_communication(&p);
    for (int i = 0; i < PREDICTION_CLASSES; i++) p.step_ms += p.class_ms[i];
    return p;
}

typedef struct {
    double peak_share;          // of the dense bf16 peak
    double tokens_per_s, hours; // of all ranks; of the run
    Bound bound;                // the largest limit
    double bound_share;         // of the step's time
} PredictionSummary;

static inline PredictionSummary prediction_summary(const Prediction *p) {
    const ModelPlan *m = p->plan;
    PredictionSummary s;
    double seconds = 1e-3 * p->step_ms;
    s.peak_share = p->micro_steps * training_flops(m, m->B, m->T) / (seconds * 1e12 * m->device->tflops);
    s.tokens_per_s = (double)p->options->total_batch / seconds;
    s.hours = (double)p->options->steps * seconds / 3600;
    s.bound = BOUND_PRODUCTS;
    for (int i = 1; i < BOUNDS; i++)
        if (p->bound_ms[i] > p->bound_ms[s.bound]) s.bound = (Bound)i;
    s.bound_share = p->bound_ms[s.bound] / p->step_ms;
    return s;
}
#endif
