/*
dry_run.h: the report of --dry-run: parameters, memory, communication, FLOPs, and with --device the predicted step.

  plan_options(plan, o, config, B, purpose)   the plan of a start or of a --dry-run
  print_dry_run(plan, sampling, o)            sampling: the plan of the model that draws samples, or NULL
*/
#pragma once
#include "prediction_report.h"
#include "../options/options_model.h"

// predicted_plan, or without --device plan_build, of the options' length and ranks.
static inline void plan_options(ModelPlan *plan, const Options *o, const ModelConfig *config, int B, Purpose purpose) {
    int T = o->model.T, ranks = options_ranks(o);
    Recompute recompute = purpose == FOR_GENERATION ? RECOMPUTE_NOTHING : (Recompute)o->recompute;
    if (o->device) predicted_plan(plan, config, B, T, purpose, recompute, ranks, (int)o->zero, o);
    else plan_build(plan, config, B, T, purpose, recompute, options_run_ranks(o, comm_rank(), ranks));
}

static inline void print_match(const ModelPlan *plan, const Options *o) {
    ModelConfig c = plan->config, baseline = model_as_baseline(&c);
    *model_match_width(&baseline) = c.E ? o->model.FE : o->model.F;
    size_t own = model_parameter_count(&c, false), others = model_parameter_count(&baseline, false);
    printf("--match-params: %s %d (baseline: %d), %zu parameters (baseline: %zu, %+.4f%%)\n", c.E ? "experts" : "MLP",
           *model_match_width(&c), *model_match_width(&baseline), own, others,
           100 * ((double)own / (double)others - 1));
}

// Bytes that a rank sends in a step, and receives: (ranks-1)/ranks of every buffer that is scattered or gathered, and
// twice (replicas-1)/replicas of its pieces of the gradients.
static inline double communication_bytes(const ModelPlan *plan, int zero, int micro_steps) {
    const TensorList *list = &plan->tensors;
    double share = 1 - 1.0 / plan->sharding.ranks, grads = (double)list->buffer_count * sizeof(grad_t), params = 0;
    for (int g = 0; g < list->L + 2; g++)
        params += (double)(list->group_offset[g + 1] - list->group_offset[g]) * sizeof(floatX) *
                  gathers_of_group(list, g, zero, micro_steps);
    if (plan->tensors.muon) { // directions in floatX, steps in grad_t
        double layers = (double)(list->group_offset[list->L + 1] - list->group_offset[1]);
        params += layers * (sizeof(floatX) * (zero > 0) + sizeof(grad_t) * (zero == 0));
        params += layers * sizeof(grad_t);
    }
    double across = 2 * (1 - 1.0 / plan->sharding.replicas) * grads / plan->sharding.ranks;
    double reduced = zero > 1 ? micro_steps : 1, gathered = zero == 0;
    return share * ((reduced + gathered) * grads + params) + across;
}

// By --zero level: the memory of a rank, the bytes it sends, and the time to send them if no computation hides it.
static inline void print_communication(const ModelPlan *plan, const ModelPlan *sampling, const Options *o) {
    int micro_steps = (int)(o->total_batch / (o->batch_size * o->model.T * plan_ranks(plan)));
    printf("by --zero level              memory of a rank    sent by a rank per step%s%s\n",
           o->link_gbs > 0 ? "  time to send" : "", plan->device ? "          expected step    fits the GPU" : "");
    for (int zero = 0; zero <= options_most_zero(o); zero++) {
        ModelPlan other;
        int B = plan->B, T = plan->T, ranks = plan_ranks(plan);
        if (plan->device) predicted_plan(&other, &plan->config, B, T, FOR_TRAINING, plan->recompute, ranks, zero, o);
        else plan_build(&other, &plan->config, B, T, FOR_TRAINING, plan->recompute, plan_run_ranks(plan, zero));
        double bytes = communication_bytes(&other, zero, micro_steps), fast = 0, slow = 0;
        if (plan->device) { // in the types of the bf16 program
            PredictedRange r = predict_range(&other, o);
            bytes = r.mean.sent_bytes, fast = r.fast.step_ms, slow = r.slow.step_ms;
        }
        size_t needed = process_bytes(&other, sampling);
        FitText fit;
        printf("  %d %36.1f MiB %22.1f MiB", zero, in_mib(needed), bytes / 1048576.0);
        if (o->link_gbs > 0) printf(" %10.1f ms", 1e3 * bytes / (o->link_gbs * 1e9));
        if (plan->device) printf(" %9.1f to %.1f ms    %s", fast, slow, memory_fit(fit, plan->device, needed));
        printf("\n");
        plan_free(&other);
    }
}

static inline void print_parameters(const ModelPlan *plan) {
    enum { EMBEDDING, ATTENTION, MLP, ROUTER, EXPERTS, NORMS, HEAD, GROUPS };
    static const char *const names[GROUPS] = {"embedding", "attention",       "MLP", "routers", "experts",
                                              "norms",     "LM head (untied)"};
    size_t counts[GROUPS] = {0};
    for (int i = 0; i < plan->tensors.count; i++) {
        const Tensor *t = &plan->tensors.tensors[i];
        TensorKind k = t->row->kind;
        int group = k == T_ROUTER || k == T_ROUTER_BIAS                   ? ROUTER
                    : t->ndim == 1 && !strstr(t->name, "self_attn")       ? NORMS
                    : k == T_EMBED                                        ? EMBEDDING
                    : k == T_LM_HEAD                                      ? HEAD
                    : t->row->per_expert                                  ? EXPERTS
                    : k == T_MLP_GATE || k == T_MLP_UP || k == T_MLP_DOWN ? MLP
                                                                          : ATTENTION;
        counts[group] += t->count;
    }
    printf("parameters\n");
    for (int i = 0; i < GROUPS; i++)
        if (counts[i]) printf("  %-44s %14zu\n", names[i], counts[i]);
    printf("  %-44s %14zu\n", "total", plan->tensors.parameter_count);
    if (plan->config.E) printf("  %-44s %14zu\n", "active in a token", model_parameter_count(&plan->config, true));
}

static inline void print_flops(const ModelPlan *plan, const Options *o) {
    double per_token = training_flops(plan, plan->B, plan->T) / ((double)plan->B * plan->T);
    double tokens = (double)o->steps * (double)o->total_batch;
    const struct {
        const char *of;
        double count;
    } rows[] = {{"per token", per_token},
                {"per step", per_token * (double)o->total_batch},
                {"tokens of the run", tokens},
                {"of the run", per_token * tokens}};
    printf("FLOPs (forward and backward)\n");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char text[32];
        format_count(text, sizeof(text), rows[i].count);
        printf("  %-44s %14s\n", rows[i].of, text);
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

// Of each kind of MLP that the model has: its layers and widths.
static inline void print_mlps(const ModelConfig *c) {
    for (size_t k = 0; k < sizeof(mlp_kinds) / sizeof(mlp_kinds[0]); k++) {
        int layers = 0;
        MlpDims mlp = {NULL, 0, 0, 0, 0};
        for (int l = 0; l < c->L; l++)
            if (mlp_dims(c, l).kind == &mlp_kinds[k]) mlp = mlp_dims(c, l), layers++;
        if (layers == 0) continue;
        printf("MLP of %d layer%s: %s, ", layers, layers == 1 ? "" : "s", mlp_kinds[k].name);
        if (mlp.experts)
            printf("%d of width %d, %d of them in a token, and %d shared\n", mlp.experts, mlp.expert_width, mlp.active,
                   c->shared);
        else printf("width %d\n", mlp.width);
    }
}

static inline void print_windows(const ModelConfig *c) {
    int windows = 0;
    for (int l = 0; l < c->L; l++) windows += layer_window(c, l) > 0;
    printf("layers: %d attend to the last %d positions, %d to all", windows, c->window, c->L - windows);
    printf(c->yoco ? ", with keys and values that they share\n" : "\n");
}

static inline void print_sparse(const ModelConfig *c) {
    int sparse = 0;
    for (int l = 0; l < c->L; l++) sparse += layer_sparse(c, l) > 0;
    printf("block-sparse attention: %d layers select %d blocks of %d positions besides the first and their own\n",
           sparse, c->sparse_blocks, c->sparse_size);
}

static inline void print_dry_run(const ModelPlan *plan, const ModelPlan *sampling, const Options *o) {
    const ModelConfig *c = &plan->config;
    char mlp[32] = ""; // with experts, print_mlps has the widths
    if (c->E == 0) FORMAT(mlp, "MLP %d, ", c->F);
    printf("model: %s, %d layers, hidden %d, %d heads (%d query, %d key/value), head dimension %d, %svocabulary %d, "
           "context %d\n",
           c->attention->name, c->L, c->C, c->NH, plan->dims.NQ, c->NKV, c->D, mlp, c->V, c->T);
    if (c->E) print_mlps(c);
    if (c->window) print_windows(c);
    if (c->sparse_blocks) print_sparse(c);
    if (c->qk_norm) printf("queries and keys are normalized\n");
    print_parameters(plan);
    if (o->match_params) print_match(plan, o);
    if (o->ranks > 1) printf("memory of one of %d ranks, --zero %d\n", (int)o->ranks, (int)o->zero);
    else printf("memory of %s\n", plan->device ? "the GPU" : "this process");
    print_memory(plan, sampling);
    if (plan_ranks(plan) > 1) print_communication(plan, sampling, o);
    print_flops(plan, o);
    print_schedule(o);
    if (plan->device) print_prediction(plan, o);
    if (o->dry_run_out) write_prediction(o->dry_run_out, plan, sampling, o);
}
