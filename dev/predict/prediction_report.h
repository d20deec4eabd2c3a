/*
prediction_report.h: prints a prediction, and writes it as JSON (--out).

  print_prediction(plan, sampling, o)           sampling: the plan of the model that draws samples, or NULL
  write_prediction(path, plan, sampling, o)
*/
#pragma once
#include "prediction.h"
#include "prediction_communication.h"
#include "prediction_rates.h"
#include "../../llmc/base/files.h"
#include "../../llmc/base/json.h"
#include "../../llmc/run/memory_parts.h"
#include "../../llmc/run/model_report.h"

// memory_fit returns "fits", or how many bytes of `needed` the GPU lacks.
typedef char FitText[64];
static inline const char *memory_fit(FitText text, const DevicePeak *gpu, size_t needed) {
    double missing = (double)needed - device_memory_bytes(gpu);
    if (missing <= 0) return "fits";
    snprintf(text, sizeof(FitText), "too little by %.1f MiB", missing / 1048576);
    return text;
}

// Prints the memory of one rank, and whether it fits the GPU.
static inline void print_predicted_memory(const ModelPlan *plan, const ModelPlan *sampling, const Options *o) {
    const DevicePeak *gpu = device_peak_named(o->device);
    MemoryPart parts[MEMORY_PARTS];
    FitText fit;
    int count = memory_parts(plan, sampling, parts);
    if (o->ranks > 1) printf("memory of one of %d ranks, --zero %d\n", (int)o->ranks, (int)o->zero);
    else printf("memory of the GPU\n");
    print_memory_parts(parts, count);
    printf("%s has about %.1f MiB: %s\n", gpu->name, device_memory_bytes(gpu) / 1048576,
           memory_fit(fit, gpu, memory_total(parts, count)));
}

// By --zero level: the memory of a rank, the bytes it sends, the time to send them at --link-gbs if no computation
// hides it, and the step.
static inline void print_levels(const ModelPlan *plan, const ModelPlan *sampling, const Options *o) {
    printf("by --zero level              memory of a rank    sent by a rank per step%s          expected step    %s\n",
           o->link_gbs > 0 ? "  time to send" : "", "fits the GPU");
    for (int zero = 0; zero <= options_most_zero(o); zero++) {
        ModelPlan other;
        FitText fit;
        predicted_plan_like(&other, plan, zero, o);
        PredictedRange r = predict_range(&other, o);
        size_t needed = process_bytes(&other, sampling);
        printf("  %d %36.1f MiB %22.1f MiB", zero, in_mib(needed), r.mean.sent_bytes / 1048576.0);
        if (o->link_gbs > 0) printf(" %10.1f ms", 1e3 * r.mean.sent_bytes / (o->link_gbs * 1e9));
        printf(" %9.1f to %.1f ms    %s\n", r.fast.step_ms, r.slow.step_ms, memory_fit(fit, r.mean.device, needed));
        plan_free(&other);
    }
}

// A row of the report: from the smaller to the larger of two values.
static inline void print_span(const char *what, double a, double b, int decimals) {
    printf("  %-24s %10.*f to %8.*f", what, decimals, fmin(a, b), decimals, fmax(a, b));
}

static inline void print_prediction_classes(const PredictedRange *r) {
    const Prediction *p = &r->mean;
    printf("  %-24s %22s %7s\n", "class", "ms", "share");
    for (int i = 0; i < PREDICTION_CLASSES; i++) {
        double flops = 0, bytes = 0, fast = r->fast.class_ms[i], slow = r->slow.class_ms[i];
        for (int k = 0; k < p->op_count; k++)
            if (p->ops[k].kind == (PredictionClass)i) flops += p->ops[k].flops, bytes += p->ops[k].bytes;
        if (slow == 0) continue;
        print_span(prediction_classes[i].name, fast, slow, 2);
        printf(" %6.1f%%", 100 * p->class_ms[i] / p->step_ms);
        if (flops > 0) printf(" %6.0f to %.0f TFLOP/s", 1e-9 * flops / slow, 1e-9 * flops / fast);
        else if (bytes > 0) printf(" %6.0f to %.0f GB/s", 1e-6 * bytes / slow, 1e-6 * bytes / fast);
        printf("\n");
    }
}

static inline void print_prediction_communication(const PredictedRange *r) {
    const Prediction *p = &r->mean, *f = &r->fast, *w = &r->slow;
    const Sharding *s = &p->plan->sharding;
    RingSpan group = ring_in_group(p), across = ring_across_groups(p);
    int here = group.here, machines = ring_machines(group);
    if (plan_ranks(p->plan) == 1) return;
    bool by_network;
    double gbs = ring_gbs(p, group, &by_network);
    printf("communication of a step: rings over %d machine%s of %d GPUs at %.0f GB/s (%s), %d buckets\n", machines,
           machines == 1 ? "" : "s", here, gbs,
           p->options->link_gbs > 0 ? "--link-gbs"
           : by_network             ? "the network"
                                    : "links within a machine",
           s->count);
    if (across.ranks > 1)
        printf("  sums over %d such groups: rings over %d machines of %d GPUs at %.0f GB/s\n", across.ranks,
               ring_machines(across), across.here, ring_gbs(p, across, &by_network));
    print_span("reducing gradients", f->reduce_ms, w->reduce_ms, 2);
    printf(" ms\n");
    print_span("gathering parameters", f->gather_ms, w->gather_ms, 2);
    printf(" ms\n");
    print_span("latency of both", f->link_hops_ms + f->network_hops_ms, w->link_hops_ms + w->network_hops_ms, 2);
    printf(" ms, %.2f to %.2f of it between machines\n", f->network_hops_ms, w->network_hops_ms);
    print_span("loss and norm", f->agree_ms, w->agree_ms, 2);
    printf(" ms, for which the update waits\n");
    print_span("exposed", f->exposed_ms, w->exposed_ms, 2);
    printf(" ms, including the slowdown of concurrent computation\n");
}

static inline AttentionKernel predicted_backward(const Prediction *p) {
    const ModelPlan *plan = p->plan;
    return predicted_attention(p->device, p->options, key_set(plan, 0, 0, plan->B, plan->T, 0).shape, true);
}

static inline double run_hours(const Prediction *p) { return (double)p->options->steps * p->step_ms / 3.6e6; }

static inline void print_step(const ModelPlan *plan, const Options *o) {
    PredictedRange r = predict_range(plan, o);
    const Prediction *p = &r.mean;
    PredictionSummary s = prediction_summary(p), fast = prediction_summary(&r.fast), slow = prediction_summary(&r.slow);
    const DevicePeak *d = p->device;
    char low[32], high[32];
    char fp8[64] = "";
    if (plan->fp8)
        FORMAT(fp8, ", blocks fp8 (%.1f TFLOP/s)%s", device_fp8_tflops(d),
               plan->config.E && !generation_mma_fp8[d->generation] ? ", experts bf16" : "");
    printf("expected step on %s (%.1f TFLOP/s, %.0f GB/s), bf16%s: from assumed rates, not measured\n", d->name,
           d->tflops, d->memory_gbs, fp8);
    print_prediction_classes(&r);
    static const char *const kernels[] = {"cuDNN", "the built-in kernels on tensor cores",
                                          "the built-in kernels without tensor cores"}; // by AttentionKernel
    printf("  %-24s %s\n", "backward of attention by", kernels[predicted_backward(p)]);
    if (o->doc_mask) printf("  --doc-mask: as if each sequence were one document\n");
    print_span("step", r.fast.step_ms, r.slow.step_ms, 2);
    printf(" ms for %.0f micro-step%s of %d x %d, %d rows of logits at a time\n", p->micro_steps,
           p->micro_steps == 1 ? "" : "s", plan->B, plan->T, plan->logit_rows);
    print_span("", 100 * slow.peak_share, 100 * fast.peak_share, 1);
    printf("%% of the dense bf16 peak\n");
    format_count(low, sizeof(low), slow.tokens_per_s);
    format_count(high, sizeof(high), fast.tokens_per_s);
    printf("  %-24s %10s to %8s tokens/s", "", low, high);
    format_count(low, sizeof(low), slow.tokens_per_s / plan_ranks(plan));
    format_count(high, sizeof(high), fast.tokens_per_s / plan_ranks(plan));
    if (plan_ranks(plan) > 1) printf(", %s to %s per GPU", low, high);
    printf("\n  %-24s %10.3g to %8.3g hours of the run\n", "", run_hours(&r.fast), run_hours(&r.slow));
    printf("  %-24s %10.0f%% of it bound by %s\n", "", 100 * s.bound_share, bound_names[s.bound]);
    print_prediction_communication(&r);
}

static inline void print_prediction(const ModelPlan *plan, const ModelPlan *sampling, const Options *o) {
    print_model(plan, o);
    print_predicted_memory(plan, sampling, o);
    if (plan_ranks(plan) > 1) print_levels(plan, sampling, o);
    print_flops(plan, o);
    print_step(plan, o);
}

static inline void add_operations(cJSON *json, const Prediction *p) {
    cJSON *ops = cJSON_AddArrayToObject(json, "operations");
    for (int i = 0; i < p->op_count; i++) {
        cJSON *op = cJSON_CreateObject();
        cJSON_AddStringToObject(op, "name", p->ops[i].name);
        cJSON_AddStringToObject(op, "class", prediction_classes[p->ops[i].kind].name);
        cJSON_AddNumberToObject(op, "calls", p->ops[i].calls);
        cJSON_AddNumberToObject(op, "ms", p->ops[i].ms);
        cJSON_AddItemToArray(ops, op);
    }
}

// The times and rates of a step, and the hours of the run.
static inline void add_times(cJSON *json, const Prediction *p) {
    PredictionSummary s = prediction_summary(p);
    cJSON_AddNumberToObject(json, "step_ms", p->step_ms);
    cJSON_AddNumberToObject(json, "share_of_peak", s.peak_share);
    cJSON_AddNumberToObject(json, "tokens_per_s", s.tokens_per_s);
    cJSON_AddNumberToObject(json, "hours", run_hours(p));
    cJSON *classes = cJSON_AddObjectToObject(json, "classes");
    for (int i = 0; i < PREDICTION_CLASSES; i++)
        cJSON_AddNumberToObject(classes, prediction_classes[i].name, p->class_ms[i]);
}

// Writes the prediction as JSON, which dev/gpu_check reads.
static inline void write_prediction(const char *path, const ModelPlan *plan, const ModelPlan *sampling,
                                    const Options *o) {
    PredictedRange r = predict_range(plan, o);
    double needs = (double)process_bytes(plan, sampling);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "device", r.mean.device->name);
    cJSON_AddNumberToObject(json, "memory_bytes", needs);
    cJSON_AddBoolToObject(json, "fits", needs <= device_memory_bytes(r.mean.device));
    add_times(json, &r.mean);
    add_times(cJSON_AddObjectToObject(json, "fast"), &r.fast);
    add_times(cJSON_AddObjectToObject(json, "slow"), &r.slow);
    add_operations(json, &r.mean);
    size_t size;
    char *text = json_text(json, &size);
    file_write_atomic(path, text, size);
    free(text);
    cJSON_Delete(json);
}
