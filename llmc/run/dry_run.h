/*
dry_run.h: the report of --dry-run: parameters, memory, FLOPs and schedule.

  plan_options(plan, o, config, B, purpose)   the plan of a start or of a --dry-run
  print_dry_run(plan, sampling, o)            sampling: the plan of the model that draws samples, or NULL
*/
#pragma once
#include "memory_report.h"
#include "model_report.h"

// plan_build with the options' sequence length and ranks.
static inline void plan_options(ModelPlan *plan, const Options *o, const ModelConfig *config, int B, Purpose purpose) {
    Recompute recompute = purpose == FOR_GENERATION ? RECOMPUTE_NOTHING : (Recompute)o->recompute;
    plan_build(plan, config, B, o->model.T, purpose, recompute, options_run_ranks(o, comm_rank(), options_ranks(o)));
}

static inline void print_memory_by_level(const ModelPlan *plan, const ModelPlan *sampling, const Options *o) {
    printf("by --zero level              memory of a rank\n");
    for (int zero = 0; zero <= options_most_zero(o); zero++) {
        ModelPlan other;
        plan_build(&other, &plan->config, plan->B, plan->T, FOR_TRAINING, plan->recompute, plan_run_ranks(plan, zero));
        printf("  %d %36.1f MiB\n", zero, in_mib(process_bytes(&other, sampling)));
        plan_free(&other);
    }
}

static inline void print_schedule(const Options *o) {
    LearningRate rate = options_learning_rate(o);
    int64_t decay = schedule_decay_start(&rate);
    printf("learning rate %g, %s: warmup to step %" PRId64, o->lr, schedule_names[o->schedule], o->warmup);
    if (decay > o->warmup) printf(", constant to step %" PRId64, decay);
    if (decay < o->steps) printf(", decay to step %" PRId64, o->steps);
    printf("\n");
}

static inline void print_dry_run(const ModelPlan *plan, const ModelPlan *sampling, const Options *o) {
    print_model(plan, o);
    if (o->ranks > 1) printf("memory of one of %d ranks, --zero %d\n", (int)o->ranks, (int)o->zero);
    else printf("memory of this process\n");
    print_memory(plan, sampling);
    if (plan_ranks(plan) > 1) print_memory_by_level(plan, sampling, o);
    print_flops(plan, o);
    print_schedule(o);
}
