/*
prediction_operations.h: the predicted time of every operation of a training step on one GPU. predict_forward,
predict_head, predict_backward, predict_recompute and predict_update list the operations in the order in which
train_diffv2.c calls them; tests/prediction_test.py checks that every operation occurs as often as there.
*/
#ifndef LLMC_PREDICTION_OPERATIONS_H
#define LLMC_PREDICTION_OPERATIONS_H
#include "../model/linear_layers.h"
#include "prediction_experts.h"

// How often a step writes the gradient of a weight: once, or from --zero 2 on in every micro-step.
static inline double gradient_writes(const Prediction *p) { return p->plan->sharding.level >= 2 ? p->micro_steps : 1; }

// Whether the built-in kernel computes attention. cuDNN has a backward of documents only for data center GPUs from
// Hopper on (tests/cudnn_plans.cpp).
static inline bool predicted_builtin(const Prediction *p, bool backward) {
    bool masked = backward && p->options->doc_mask && p->plan->device->generation < HOPPER;
    return p->options->sdpa == SDPA_OWN || masked;
}
static inline void predict_attention(Prediction *p, AttentionShape s, int sets, bool backward) {
    double share = p->assumed[backward ? ASSUME_ATTENTION_BACKWARD : ASSUME_ATTENTION_FORWARD];
    double length = p->assumed[backward ? ASSUME_BACKWARD_HALF : ASSUME_FORWARD_HALF];
    // A row of a long sequence attends to half of `span` keys on average; without a window span is T. Rows behind the
    // first W also compute the rest of the tile in which their window begins: half of it on average.
    enum { TILE = 128 };
    double span = 2 * attention_visible(s) / ((double)s.B * s.T) - 1;
    if (s.window) length += TILE * (1 - (double)s.window / s.T);
    share *= span / (span + length) * fmin(1, 0.5 + s.D / 256.0); // narrow heads leave matrix units idle
    if (backward && p->options->deterministic) share *= p->assumed[ASSUME_DETERMINISTIC];
    if (predicted_builtin(p, backward)) share = p->assumed[ASSUME_OWN_ATTENTION];
    double flops = backward ? attention_backward_flops(s) : attention_forward_flops(s);
    double bytes = (double)(backward ? attention_backward_bytes(s) : attention_forward_bytes(s));
    double ms = fmax(1e-9 * flops / (share * p->plan->device->tflops), memory_ms(p, bytes));
    predict_op(p, backward ? CLASS_ATTENTION_BACKWARD : CLASS_ATTENTION_FORWARD,
               backward ? "attention_backward" : "attention_forward", sets, backward ? 3 : 1, flops, bytes, ms);
}

// ---- the operations of a step

// Begins a part that a micro-step, or the update, has once.
static inline void predict_begin(Prediction *p, StepPart part) {
    p->part = part, p->share = 1;
    p->repeats = part == PART_UPDATE ? 1 : p->micro_steps;
}
// Begins operations of `count` layers.
static inline void predict_begin_layers(Prediction *p, StepPart part, int count) {
    p->part = part, p->share = (double)count / (p->plan->config.L - (part == PART_RECOMPUTE));
    p->repeats = p->micro_steps * count;
}

// Layers with the same operations and sizes: the first of them, and their number.
typedef struct {
    int l, count;
} LayerKind;
enum { LAYER_KINDS = 4 }; // with and without a window, or the halves of YOCO; each with and without experts

static inline bool same_layers(const ModelConfig *c, int a, int b) {
    return layer_window(c, a) == layer_window(c, b) && layer_cross(c, a) == layer_cross(c, b) &&
           mlp_dims(c, a).kind == mlp_dims(c, b).kind;
}
// The kinds among the first `layers` layers; returns their number.
static inline int layer_kinds(const ModelConfig *c, int layers, LayerKind kinds[LAYER_KINDS]) {
    int count = 0;
    for (int l = 0; l < layers; l++) {
        int k = 0;
        while (k < count && !same_layers(c, kinds[k].l, l)) k++;
        assert(k < LAYER_KINDS);
        if (k == count) kinds[count].l = l, kinds[count++].count = 0;
        kinds[k].count++;
    }
    return count;
}

// --qk-norm: of the query heads, then of the layer's own key heads
static inline void predict_head_norms(Prediction *p, const AttentionDims *d, int N) {
    const int heads[] = {d->NQ, d->rope_heads - d->NQ};
    for (int i = 0; i < 2 && p->plan->config.qk_norm; i++)
        if (heads[i])
            predict_rows(p, CLASS_NORMS, "head_norm_forward", 1, 1, head_norm_forward_bytes(N, heads[i], d->QD, true));
}
static inline void predict_head_norms_backward(Prediction *p, const AttentionDims *d, int N) {
    const int heads[] = {d->NQ, d->rope_heads - d->NQ};
    for (int i = 0; i < 2 && p->plan->config.qk_norm; i++)
        if (heads[i])
            predict_rows(p, CLASS_NORMS, "head_norm_backward", 1, 2, head_norm_backward_bytes(N, heads[i], d->QD));
}

static inline void predict_subnorm(Prediction *p, int N) {
    const AttentionDims *d = &p->plan->dims;
    if (d->norm_count)
        predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N * d->norm_count, d->norm_width));
    if (p->plan->config.attention->norm == NORM_HEAD)
        predict_rows(p, CLASS_NORMS, "scale_inplace", 1, 1, scale_bytes((size_t)N * d->OH * d->DV));
}

static inline void predict_heads(Prediction *p, int l, int N) {
    const AttentionDims *d = plan_dims(p->plan, l);
    const AttentionVariant *v = p->plan->config.attention;
    predict_attention(p, key_set(p->plan, l, 0, p->plan->B, p->plan->T, 0).shape, v->key_sets, false);
    if (v->sink) predict_rows(p, CLASS_COMBINE, "sink_forward", 1, 1, sink_forward_bytes(N, d->NQ, d->DV));
    if (d->groups.noise && d->lambda_rows == 0)
        predict_rows(p, CLASS_COMBINE,
                     v->lambda == LAMBDA_ONE   ? "fill_forward"
                     : v->lambda == LAMBDA_EXP ? "lambda_exp_forward"
                                               : "lambda_learned_forward",
                     1, 1, layer_lambda_bytes((size_t)N * d->OH));
    if (d->groups.noise)
        predict_rows(p, CLASS_COMBINE, "diff_combine_forward", 1, 1,
                     diff_combine_forward_bytes(N, d->NQ, d->OH, d->DV));
    if (v->xsa)
        predict_rows(p, CLASS_COMBINE, "exclusive_forward", 1, 1, exclusive_forward_bytes(N, d->OH, d->NV, d->DV));
    predict_subnorm(p, N);
    if (d->gate_width)
        predict_rows(p, CLASS_COMBINE, "gate_forward", 1, 1, gate_forward_bytes(N, d->OH, d->DV, d->gate_width));
}

static inline void predict_block_attention(Prediction *p, int l, int N) {
    const ModelConfig *c = &p->plan->config;
    const AttentionDims *d = plan_dims(p->plan, l);
    predict_linear_forward(p, CLASS_BLOCK_GEMMS, 1, N, c->C, d->fused_rows);
    predict_head_norms(p, d, N);
    predict_rows(p, CLASS_ROPE, "rope_forward", 1, 1, rope_bytes(N, d->rope_heads, d->QD));
    predict_heads(p, l, N);
    predict_linear_forward(p, CLASS_BLOCK_GEMMS, 1, N, c->NH * c->D, c->C);
    predict_rows(p, CLASS_NORMS, "residual_rmsnorm_forward", 1, 1, residual_rmsnorm_forward_bytes(N, c->C));
}
static inline void predict_block_mlp(Prediction *p, int l, int N) {
    const ModelConfig *c = &p->plan->config;
    MlpDims mlp = mlp_dims(c, l);
    if (mlp.experts) predict_experts_mlp(p, N);
    if (mlp.width == 0) return;
    predict_linear_forward(p, CLASS_BLOCK_GEMMS, 1, N, c->C, 2 * mlp.width);
    predict_rows(p, CLASS_SWIGLU, "swiglu_forward", 1, 1, swiglu_forward_bytes(N, mlp.width));
}
static inline void predict_block_down(Prediction *p, int l, int N) {
    const ModelConfig *c = &p->plan->config;
    MlpDims mlp = mlp_dims(c, l);
    if (mlp.width) predict_linear_forward(p, CLASS_BLOCK_GEMMS, 1, N, mlp.width, c->C);
    if (mlp.experts) predict_experts_down(p, N);
}

// YOCO: the keys and values of the upper half.
static inline void predict_yoco(Prediction *p, int N) {
    const AttentionDims *d = &p->plan->cross_dims;
    int C = p->plan->config.C;
    if (!p->plan->config.yoco) return;
    predict_begin_layers(p, PART_LAYER, 1);
    predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N, C));
    predict_linear_forward(p, CLASS_BLOCK_GEMMS, 1, N, C, d->kv_rows);
    if (p->plan->config.qk_norm)
        predict_rows(p, CLASS_NORMS, "head_norm_forward", 1, 1, head_norm_forward_bytes(N, d->NK, d->QD, true));
    predict_rows(p, CLASS_ROPE, "rope_forward", 1, 1, rope_bytes(N, d->NK, d->QD));
}
static inline void predict_yoco_backward(Prediction *p, int N) {
    const AttentionDims *d = &p->plan->cross_dims;
    int C = p->plan->config.C, layers = p->plan->config.L / 2;
    size_t count = (size_t)N * d->kv_ld;
    if (!p->plan->config.yoco) return;
    predict_begin_layers(p, PART_LAYER_BACKWARD, 1);
    for (int h = 0; h < 2; h++) { // gradients of the fused rows, whose padding differs between the halves
        int ld = h ? p->plan->dims.fused_ld : d->fused_ld;
        predict_rows(p, CLASS_YOCO, "buffer_zero", 1, 1, (size_t)N * ld * FLOATX_BYTES);
    }
    predict_rows(p, CLASS_YOCO, "accumulate", 1, 1, accumulate_bytes(count, false));
    predict_rows(p, CLASS_YOCO, "accumulate", layers - 1, 1, accumulate_bytes(count, true));
    predict_rows(p, CLASS_ROPE, "rope_backward", 1, 1, rope_bytes(N, d->NK, d->QD));
    if (p->plan->config.qk_norm)
        predict_rows(p, CLASS_NORMS, "head_norm_backward", 1, 2, head_norm_backward_bytes(N, d->NK, d->QD));
    predict_linear_backward(p, CLASS_BLOCK_GEMMS, 1, gradient_writes(p), N, C, d->kv_rows);
    predict_rows(p, CLASS_NORMS, "rmsnorm_backward", 1, 2, rmsnorm_backward_bytes(N, C));
}

static inline void predict_forward(Prediction *p, int N) {
    const ModelConfig *c = &p->plan->config;
    LayerKind kinds[LAYER_KINDS];
    int count = layer_kinds(c, c->L, kinds);
    predict_begin(p, PART_EMBED);
    if (p->options->doc_mask)
        predict_rows(p, CLASS_ATTENTION_FORWARD, "attention_documents", 1, 1, (size_t)N * sizeof(int));
    predict_rows(p, CLASS_EMBEDDING, "embedding_forward", 1, 1, embedding_forward_bytes(N, c->C));
    predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N, c->C));
    for (int k = 0; k < count; k++) {
        predict_begin_layers(p, PART_LAYER, kinds[k].count);
        predict_block_attention(p, kinds[k].l, N);
        if (mlp_dims(c, kinds[k].l).experts) predict_route(p, N), predict_router_totals(p, N);
        predict_block_mlp(p, kinds[k].l, N);
        predict_block_down(p, kinds[k].l, N);
        predict_rows(p, CLASS_NORMS, "residual_rmsnorm_forward", 1, 1, residual_rmsnorm_forward_bytes(N, c->C));
    }
    predict_yoco(p, N);
}

static inline void predict_head(Prediction *p, int N) {
    const ModelPlan *m = p->plan;
    int C = m->config.C, V = m->config.V, rows = min_int(m->logit_rows, N), rest = N % rows;
    predict_begin(p, PART_HEAD);
    for (int last = 0; last <= (rest > 0); last++) {
        int n = last ? rest : rows, chunks = last ? 1 : N / rows;
        predict_linear_forward(p, CLASS_LM_HEAD, chunks, n, C, V);
        predict_rows(p, CLASS_CROSS_ENTROPY, "cross_entropy", chunks, 1, cross_entropy_bytes(n, V, m->Vp, true));
        predict_linear_backward(p, CLASS_LM_HEAD, chunks, last ? 0 : gradient_writes(p), n, C, V);
    }
    predict_rows(p, CLASS_NORMS, "rmsnorm_backward", 1, 2, rmsnorm_backward_bytes(N, C));
}

static inline void predict_heads_backward(Prediction *p, int l, int N) {
    const AttentionDims *d = plan_dims(p->plan, l);
    const AttentionVariant *v = p->plan->config.attention;
    if (d->gate_width)
        predict_rows(p, CLASS_COMBINE, "gate_backward", 1, 1, gate_backward_bytes(N, d->OH, d->DV, d->gate_width));
    if (v->norm == NORM_HEAD)
        predict_rows(p, CLASS_NORMS, "scale_inplace", 1, 1, scale_bytes((size_t)N * d->OH * d->DV));
    if (d->norm_count)
        predict_rows(p, CLASS_NORMS, "rmsnorm_backward", 1, 2,
                     rmsnorm_backward_bytes(N * d->norm_count, d->norm_width));
    if (v->xsa)
        predict_rows(p, CLASS_COMBINE, "exclusive_backward", 1, 1, exclusive_backward_bytes(N, d->OH, d->NV, d->DV));
    if (d->groups.noise)
        predict_rows(p, CLASS_COMBINE, "diff_combine_backward", 1, 1,
                     diff_combine_backward_bytes(N, d->NQ, d->OH, d->DV));
    if (v->lambda > LAMBDA_INPUT)
        predict_rows(p, CLASS_COMBINE, v->lambda == LAMBDA_EXP ? "lambda_exp_backward" : "lambda_learned_backward", 1,
                     2, layer_lambda_bytes((size_t)N * d->OH));
    if (v->sink == SINK_OWN)
        predict_rows(p, CLASS_COMBINE, "sink_backward", 1, 2, sink_backward_bytes(N, d->NQ, d->DV));
    predict_attention(p, key_set(p->plan, l, 0, p->plan->B, p->plan->T, 0).shape, v->key_sets, true);
}

static inline void predict_block_mlp_backward(Prediction *p, int l, double writes, int N) {
    const ModelConfig *c = &p->plan->config;
    MlpDims mlp = mlp_dims(c, l);
    if (mlp.width) {
        predict_linear_backward(p, CLASS_BLOCK_GEMMS, 1, writes, N, mlp.width, c->C);
        predict_rows(p, CLASS_SWIGLU, "swiglu_backward", 1, 1, swiglu_backward_bytes(N, mlp.width));
        predict_linear_backward(p, CLASS_BLOCK_GEMMS, 1, writes, N, c->C, 2 * mlp.width);
    }
    if (mlp.experts) predict_experts_backward(p, writes, N);
}
static inline void predict_layers_backward(Prediction *p, LayerKind kind, int N) {
    const ModelConfig *c = &p->plan->config;
    const AttentionDims *d = plan_dims(p->plan, kind.l);
    double writes = gradient_writes(p) * kind.count;
    predict_begin_layers(p, PART_LAYER_BACKWARD, kind.count);
    predict_block_mlp_backward(p, kind.l, writes, N);
    predict_rows(p, CLASS_NORMS, "rmsnorm_backward", 2, 2, rmsnorm_backward_bytes(N, c->C));
    predict_linear_backward(p, CLASS_BLOCK_GEMMS, 1, writes, N, c->NH * c->D, c->C);
    predict_heads_backward(p, kind.l, N);
    predict_rows(p, CLASS_ROPE, "rope_backward", 1, 1, rope_bytes(N, d->rope_heads, d->QD));
    predict_head_norms_backward(p, d, N);
    predict_linear_backward(p, CLASS_BLOCK_GEMMS, 1, writes, N, c->C, d->fused_rows);
}
static inline void predict_backward(Prediction *p, int N) {
    const ModelConfig *c = &p->plan->config;
    LayerKind kinds[LAYER_KINDS];
    int count = layer_kinds(c, c->L, kinds);
    for (int k = 0; k < count; k++) predict_layers_backward(p, kinds[k], N);
    predict_yoco_backward(p, N);
    predict_begin(p, PART_EMBED_BACKWARD);
    int distinct =
        (int)(c->V * (1 - exp(-(double)N / c->V))); // expected number of different tokens among N, all equally likely
    predict_rows(p, CLASS_EMBEDDING, "embedding_backward", 1, 13, embedding_backward_bytes(N, c->C, distinct));
}

// The last layer computes nothing again.
static inline void predict_recompute(Prediction *p, int N) {
    const ModelPlan *m = p->plan;
    LayerKind kinds[LAYER_KINDS];
    int count = m->recompute == RECOMPUTE_NOTHING ? 0 : layer_kinds(&m->config, m->config.L - 1, kinds);
    for (int k = 0; k < count; k++) {
        predict_begin_layers(p, PART_RECOMPUTE, kinds[k].count);
        predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N, m->config.C));
        if (m->recompute == RECOMPUTE_BLOCK) predict_block_attention(p, kinds[k].l, N);
        else {
            predict_subnorm(p, N);
            predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N, m->config.C));
        }
        predict_block_mlp(p, kinds[k].l, N);
    }
}

static inline void predict_update(Prediction *p) {
    const ModelPlan *m = p->plan;
    const Sharding *s = &m->sharding;
    const Sharding *own_only = s->level ? s : NULL;
    size_t own = s->level ? s->own : m->tensors.buffer_count;
    predict_begin(p, PART_UPDATE);
    int zeroed = 0; // gradients that no matrix product writes
    size_t zeros = 0, updates = 0;
    for (int i = 0; i < m->tensors.run_count; i++) {
        const Tensor *t = &m->tensors.runs[i];
        if (!is_product_weight(m, t)) zeroed++, zeros += t->count;
        bool balanced = t->row->kind == T_ROUTER_BIAS;
        for (OwnRange r = sharding_ranges(own_only, t); sharding_next(own_only, t, &r);) {
            if (balanced) predict_rows(p, CLASS_ROUTER, "router_balance", 1, 1, t->count * 3 * FP32_BYTES);
            else updates++;
        }
    }
    predict_rows(p, CLASS_UPDATE, "buffer_zero", 1, 1, (size_t)m->B * m->T * FP32_BYTES); // the losses
    predict_rows(p, CLASS_UPDATE, "buffer_zero", zeroed * gradient_writes(p), 1, zeros * FP32_BYTES / zeroed);
    if (m->config.E) {
        size_t totals = m->config.L * router_total_count(&m->config) * FP32_BYTES;
        predict_rows(p, CLASS_UPDATE, "buffer_zero", 1, 1, totals);
    }
    predict_rows(p, CLASS_UPDATE, "sum_of_squares", s->count, 2, sum_of_squares_bytes(s->own) / s->count);
    predict_rows(p, CLASS_UPDATE, "adamw_update", updates, 1, adamw_bytes(own, true) / updates);
}

// How often a step rounds the weights of a layer, on average: once, with --zero 3 whenever they have been gathered.
static inline double predicted_copies(const Prediction *p) {
    int L = p->plan->config.L, gathers = 0;
    if (!params_two_layers(p->plan)) return 1;
    for (int l = 0; l < L; l++) gathers += gathers_of_group(&p->plan->tensors, 1 + l, 3, (int)p->micro_steps);
    return (double)gathers / L;
}
static inline void predict_fp8_copy(Prediction *p, LinearKind kind, LayerKind layers) {
    Linear w = linear_shape(p->plan, kind, layers.l);
    if (w.OC == 0) return;
    size_t count = (size_t)linear_count(p->plan, kind);
    predict_begin(p, PART_UPDATE);
    predict_rows(p, CLASS_FP8, linear_of_experts(kind) ? "expert_linear_copy_weights" : "linear_copy_weight",
                 layers.count * predicted_copies(p), 3,
                 count * (absmax_bytes(w.OC, w.IC) + fp8_quantize_bytes(w.OC, w.IC, 2)));
}
static inline void predict_fp8_maximum(Prediction *p, StepPart part, int layers, int N, int columns) {
    if (layers == 0) return;
    predict_begin_layers(p, part, layers);
    predict_rows(p, CLASS_FP8, "absmax_update", 1, 1, absmax_bytes(N, columns));
}
// What --gemm fp8 adds: the copies of weights, once per update, and maxima of tensors whose producers do not compute
// them.
static inline void predict_fp8(Prediction *p, int N) {
    const ModelConfig *c = &p->plan->config;
    const AttentionDims *d = &p->plan->dims;
    LayerKind kinds[LAYER_KINDS], once = {yoco_layer(c), 1};
    int count = layer_kinds(c, c->L, kinds);
    bool by_operation = (d->groups.noise || c->attention->xsa) && !d->norm_count;
    predict_begin(p, PART_EMBED);
    predict_rows(p, CLASS_FP8, "buffer_zero", 1, 1, linear_max_count(p->plan) * sizeof(absmax_t));
    for (int k = 0; k < count; k++) {
        for (int kind = 0; kind < LINEAR_BLOCK_COUNT; kind++) predict_fp8_copy(p, (LinearKind)kind, kinds[k]);
        predict_fp8_maximum(p, PART_LAYER_BACKWARD, kinds[k].count, N, plan_dims(p->plan, kinds[k].l)->fused_width);
    }
    if (c->yoco) {
        predict_fp8_copy(p, LINEAR_KV, once);
        predict_fp8_maximum(p, PART_LAYER_BACKWARD, 1, N, d->kv_rows);
    }
    if (by_operation || d->gate_width) return;
    predict_fp8_maximum(p, PART_LAYER, c->L, N, d->OH * d->DV);
    if (p->plan->recompute == RECOMPUTE_BLOCK) predict_fp8_maximum(p, PART_RECOMPUTE, c->L - 1, N, d->OH * d->DV);
}
#endif
