/*
phase_cost.h: memory and cost of the phases of a run (phases.h).

  plan_options(plan, o, config, B, purpose)   predicted_plan or plan_build, of the options' device, length and ranks
  plan_reserve(plan, phases)                  raises its memory to that of the largest of the later phases
  phase_cost(phases, k), run_cost(phases)     tokens, FLOPs, and with --device hours
*/
#pragma once
#include "../model/activations.h"
#include "../options/options_model.h"
#include "prediction.h"

static inline void plan_options(ModelPlan *plan, const Options *o, const ModelConfig *config, int B, Purpose purpose) {
    int T = o->model.T, ranks = options_ranks(o);
    Recompute recompute = purpose == FOR_GENERATION ? RECOMPUTE_NOTHING : (Recompute)o->recompute;
    if (o->device) predicted_plan(plan, config, B, T, purpose, recompute, ranks, (int)o->zero, o);
    else plan_build(plan, config, B, T, purpose, recompute, options_run_ranks(o, comm_rank(), ranks));
}

// Activations and workspace are allocated once for all phases.
static inline void plan_reserve(ModelPlan *plan, const Phases *phases) {
    for (int k = phases->current + 1; k < phases->count; k++) {
        const Options *o = &phases->items[k].options;
        ModelConfig config = options_config(o);
        ModelPlan later;
        if (!phases->items[k].rebuilds) continue;
        plan_options(&later, o, &config, plan->purpose == FOR_TRAINING ? (int)o->batch_size : plan->B, plan->purpose);
        plan->activations_bytes = max_size(plan->activations_bytes, later.activations_bytes);
        plan->workspace_bytes = max_size(plan->workspace_bytes, later.workspace_bytes);
        plan_free(&later);
    }
}

// Of the steps of a phase, or of a run. hours: with --device.
typedef struct {
    double tokens, flops, hours, fast_hours, slow_hours;
} RunCost;

static inline RunCost phase_cost(const Phases *phases, int k) {
    const Options *o = &phases->items[k].options;
    ModelConfig config = options_config(o);
    ModelPlan plan;
    double steps = (double)(phases_end(phases, k) - phases->items[k].step), hours = steps / 3.6e6; // per millisecond
    plan_options(&plan, o, &config, (int)o->batch_size, FOR_TRAINING);
    RunCost c = {steps * (double)o->total_batch, 0, 0, 0, 0};
    c.flops = c.tokens * (training_flops(&plan, plan.B, plan.T) / ((double)plan.B * plan.T));
    if (o->device) {
        PredictedRange r = predict_range(&plan, o);
        c.hours = hours * r.mean.step_ms, c.fast_hours = hours * r.fast.step_ms, c.slow_hours = hours * r.slow.step_ms;
    }
    plan_free(&plan);
    return c;
}

static inline RunCost run_cost(const Phases *phases) {
    RunCost sum = {0, 0, 0, 0, 0};
    for (int k = 0; k < phases->count; k++) {
        RunCost c = phase_cost(phases, k);
        sum.tokens += c.tokens, sum.flops += c.flops;
        sum.hours += c.hours, sum.fast_hours += c.fast_hours, sum.slow_hours += c.slow_hours;
    }
    return sum;
}
