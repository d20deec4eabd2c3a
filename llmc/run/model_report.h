/*
model_report.h: what the trainer's --dry-run and predict_diffv2 print of a model.

  print_model(plan, o)    shape and parameters
  print_flops(plan, o)
  print_match(plan, o)    the width that --match-params has chosen
*/
#pragma once
#include "../log/progress.h"
#include "../model/plan.h"
#include "../options/options_model.h"

static inline void print_match(const ModelPlan *plan, const Options *o) {
    ModelConfig c = plan->config, baseline = model_as_baseline(&c);
    *model_match_width(&baseline) = c.E ? o->model.FE : o->model.F;
    size_t count = model_parameter_count(&c, false), others = model_parameter_count(&baseline, false);
    printf("--match-params: %s %d (baseline: %d), %zu parameters (baseline: %zu, %+.4f%%)\n", c.E ? "experts" : "MLP",
           *model_match_width(&c), *model_match_width(&baseline), count, others,
           100 * ((double)count / (double)others - 1));
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

// The MLPs of a model with experts.
static inline void print_mlps(const ModelConfig *c) {
    int layers = expert_layers(c), dense = c->dense_layers;
    if (dense) printf("MLP of %d layer%s: dense, width %d\n", dense, dense == 1 ? "" : "s", c->F);
    printf("MLP of %d layer%s: experts, %d of width %d, %d of them in a token, and %d shared\n", layers,
           layers == 1 ? "" : "s", c->E, c->FE, c->K, c->shared);
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

// The model's shape and parameters.
static inline void print_model(const ModelPlan *plan, const Options *o) {
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
}
