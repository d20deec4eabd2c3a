/*
prediction.h: memory and time of a training step on a GPU that this machine need not have. predict_diffv2.c defines
predicted_plan and predict_step.

  predicted_plan(plan, config, ...)         as plan_build, of the bf16 program on the GPU
  predicted_plan_like(plan, like, ...)      the same of the model of another plan, to train it
  predict_step(plan, options, end)          Prediction (prediction_types.h), with all assumptions at that end
  prediction_summary(prediction)            share of the peak, tokens/s, what limits the speed
  predict_range(plan, options)              the mean prediction, and those of both ends of the assumptions
*/
#pragma once
#include "prediction_types.h"

// For rank 0 of `ranks` on options->device, with the options' --matmul-dtype and attention.
static void predicted_plan(ModelPlan *plan, const ModelConfig *config, int B, int T, Purpose purpose,
                           Recompute recompute, int ranks, int zero, const Options *options);
static Prediction predict_step(const ModelPlan *plan, const Options *options, AssumptionEnd end);

typedef struct {
    double peak_share;   // of the dense bf16 peak
    double tokens_per_s; // of all ranks
    Bound bound;         // the largest limit
    double bound_share;  // of the step's time
} PredictionSummary;

static inline PredictionSummary prediction_summary(const Prediction *p) {
    const ModelPlan *m = p->plan;
    PredictionSummary s;
    double seconds = 1e-3 * p->step_ms;
    s.peak_share = p->micro_steps * training_flops(m, m->B, m->T) / (seconds * 1e12 * p->device->tflops);
    s.tokens_per_s = (double)p->options->total_batch / seconds;
    s.bound = BOUND_PRODUCTS;
    for (int i = 1; i < BOUNDS; i++)
        if (p->bound_ms[i] > p->bound_ms[s.bound]) s.bound = (Bound)i;
    s.bound_share = p->bound_ms[s.bound] / p->step_ms;
    return s;
}

// A step with the mean of each assumption, and with all assumptions at their fast and slow ends.
typedef struct {
    Prediction mean, fast, slow;
} PredictedRange;

static inline PredictedRange predict_range(const ModelPlan *plan, const Options *options) {
    PredictedRange r;
    r.mean = predict_step(plan, options, ALL_MEAN);
    r.fast = predict_step(plan, options, ALL_FAST);
    r.slow = predict_step(plan, options, ALL_SLOW);
    return r;
}

// For training the model of another plan, with this --zero level.
static inline void predicted_plan_like(ModelPlan *plan, const ModelPlan *like, int zero, const Options *options) {
    predicted_plan(plan, &like->config, like->B, like->T, FOR_TRAINING, like->recompute, plan_ranks(like), zero,
                   options);
}
