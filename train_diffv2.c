/*
train_diffv2.c: pretraining of decoder language models with differential attention, on the CPU.

The file reads top to bottom: the model and its memory, forward, backward (the forward's lines in reverse), update, a
run with its checkpoints and validation, the training step, the training loop, main. Operations are called by name and
declared in llmc/ops/ops.h. Nothing here dereferences a device buffer, so that train_diffv2.cu includes this file with
CUDA operations.

  B sequences of T positions are a micro-batch of N = B*T rows. A step sums the gradients of `micro_steps` micro-batches
  and does one update. C hidden size, L layers, V vocabulary, F MLP width, D head width, NH output heads, NKV key/value
  heads, NQ query heads. [] shapes are row-major.
*/
#include "llmc/base/common.h"
#include "llmc/ops/all_ops.h"
#include "llmc/base/random.h"
#include "llmc/run/checkpointer.h"
#include "llmc/run/dry_run.h"
#include "llmc/run/environment.h"
#include "llmc/run/evaluation.h"
#include "llmc/run/evaluation_choices.h"
#include "llmc/run/evaluation_synthetic.h"
#include "llmc/run/gemm_table.h"
#include "llmc/run/generated_text.h"
#include "llmc/run/layer_stats.h"
#include "llmc/run/linear_layers.h"
#include "llmc/run/model_init.h"
#include "llmc/run/model_memory.h"
#include "llmc/run/probe.h"
#include "llmc/run/quantization.h"
#include "llmc/run/resume.h"
#include "llmc/run/router_losses.h"
#include "llmc/run/run_data.h"
#include "llmc/run/run_description.h"
#include "llmc/run/run_records.h"
#include "llmc/run/schedule.h"
#include "llmc/run/stop_signals.h"

// ---------------------------------------------------------------------------------------------------
// The model and its memory

typedef struct {
    ModelPlan plan;
    floatX *params; // [tensors.buffer_count], layer by layer; with --zero 3 as grads with 2, then own_params
    grad_t *grads;  // likewise; from --zero 2 on: the groups before and after the layers, two layers, own_grads
    real *m, *v;    // moments of Adam, likewise; from --zero 1 on of this rank's own pieces
    real *master;   // as m: the weights, of which params are the rounded values; NULL when floatX is as wide as real
    Activations acts;
    char *activations_memory;
    WeightCopies copies;  // rounded, with --gemm bf16 and fp8
    Quantization quant;   // --quantize: what the forward rounds
    bool documents;       // --doc-mask: attention stays within the documents that acts.starts describes
    grad_t **group_grads; // [L+2]: where the gradients of each group of tensors are
    grad_t *own_grads;    // from --zero 2 on: of this rank's own pieces, summed over ranks and micro-steps; else NULL
    floatX *own_params;   // --zero 3: this rank's own pieces; else NULL
    int held[2];     // --zero 3: the layer whose parameters are in each of the two places, or on their way; -1: none
    double *squares; // [buckets][ranks]: sums of squares of the pieces of the reduced gradients
    int micro_step;  // of the update: the backward of the first writes the gradients, the others add to them
    bool reduce;     // this micro-step's backward sums the gradients over the ranks
    uint64_t *reduced, *gathered; // [L+2]: tickets of the collectives on a group's gradients and parameters
    LayerStats *stats;            // [L]: filled by the backward, layer by layer; NULL: not computed
    double stats_seconds;         // spent on them
    RouterLosses router;          // --router-aux, --router-z, and their values in the last update
} Model;

static floatX *param(const Model *model, TensorKind kind, int layer) {
    const Tensor *t = tensor_of(&model->plan.tensors, kind, layer);
    return t ? model->params + param_place(&model->plan, t) : NULL;
}
static grad_t *tensor_grad(const Model *model, const Tensor *t) {
    return model->group_grads[t->layer + 1] + (t->offset - model->plan.tensors.group_offset[t->layer + 1]);
}
static grad_t *grad(const Model *model, TensorKind kind, int layer) {
    const Tensor *t = tensor_of(&model->plan.tensors, kind, layer);
    return t ? tensor_grad(model, t) : NULL;
}

// A linear layer of block l, or the LM head.
static Linear linear_of(const Model *model, LinearKind kind, int l) {
    return linear_at(&model->plan, model->params, &model->copies, model->acts.maxima, kind, l);
}
static ExpertLinear experts_of(const Model *model, LinearKind kind, int l) {
    return expert_linear_at(&model->plan, model->params, &model->copies, model->acts.maxima, kind, l);
}
// The largest magnitudes of its input and of its output's gradient, for --gemm fp8; NULL: not needed.
static absmax_t *input_max(const Model *model, LinearKind kind, int l) {
    return linear_max(&model->plan, model->acts.maxima, kind, l, 0);
}
static absmax_t *output_max(const Model *model, LinearKind kind, int l) {
    return linear_max(&model->plan, model->acts.maxima, kind, l, 1);
}

// Whether the backward adds to the gradients. From --zero 2 on it writes them in every micro-step, and own_grads sums
// them.
static bool grads_add(const Model *model) { return model->micro_step > 0 && !grads_two_layers(&model->plan); }

// As key_set; with --doc-mask attention stays within documents.
static KeySet model_key_set(const Model *model, int l, int set, int B, int T, int first) {
    KeySet k = key_set(&model->plan, l, set, B, T, first);
    k.shape.first_key = model->documents ? model->acts.starts : NULL;
    return k;
}

// The model's plan, without memory. It runs as rank `rank` of `ranks` that share its state as --zero `zero` says.
static void model_plan(Model *model, const ModelConfig *config, int B, int T, Purpose purpose, Recompute recompute,
                       int rank, int ranks, int zero) {
    memset(model, 0, sizeof(*model));
    plan_build(&model->plan, config, B, T, purpose, recompute, rank, ranks, zero);
}

// Sets group_grads, own_grads and own_params, in the buffers that grads_count and params_count sized.
static void model_place_groups(Model *model) {
    const ModelPlan *plan = &model->plan;
    for (int g = 0; g < plan->sharding.groups; g++) model->group_grads[g] = model->grads + grads_place(plan, g);
    model->own_grads = grads_two_layers(plan) ? model->grads + grads_groups_count(plan) : NULL;
    model->own_params = params_two_layers(plan) ? model->params + group_places_count(&plan->tensors, true) : NULL;
}

// Allocates the buffers of the plan. shared: a model whose parameters this one reads, or NULL.
static void model_alloc(Model *model, const Model *shared) {
    const ModelPlan *plan = &model->plan;
    const Sharding *s = &plan->sharding;
    size_t groups = (size_t)s->groups;
    model->acts.layers = (LayerActivations *)checked_calloc(plan->config.L, sizeof(LayerActivations));
    model->group_grads = (grad_t **)checked_calloc(groups, sizeof(grad_t *));
    model->reduced = (uint64_t *)checked_calloc(groups, sizeof(uint64_t));
    model->gathered = (uint64_t *)checked_calloc(groups, sizeof(uint64_t));
    model->squares = (double *)checked_calloc((size_t)s->count * s->ranks, sizeof(double));
    model->held[0] = model->held[1] = -1;
    model->params = shared ? shared->params : (floatX *)buffer_alloc(plan->params_bytes, "parameters");
    if (plan->purpose == FOR_TRAINING) {
        model->grads = (grad_t *)buffer_alloc(plan->grads_bytes, "gradients");
        model_place_groups(model);
        model->m = (real *)buffer_alloc(plan->moments_bytes, "optimizer states");
        model->v = model->m + plan->moments_bytes / (2 * sizeof(real));
        if (plan->master_bytes) model->master = (real *)buffer_alloc(plan->master_bytes, "master weights");
    }
    model->copies = weight_copies_alloc(plan);
    model->activations_memory = (char *)buffer_alloc(plan->activations_bytes, "activations");
    Arena arena = {model->activations_memory, 0, 0, own_elements};
    activations_carve(&model->acts, plan, &arena);

    size_t count = (size_t)plan->config.T * plan->dims.QD;
    real *table = (real *)checked_calloc(count, sizeof(real));
    rope_table(table, plan->config.T, plan->dims.QD, plan->config.rope_theta);
    buffer_upload(model->acts.rope, table, count * sizeof(real));
    free(table);
}

static void model_free(Model *model, bool owns_params) {
    if (owns_params) buffer_free(model->params);
    buffer_free(model->grads);
    buffer_free(model->m);
    buffer_free(model->master);
    weight_copies_free(&model->copies);
    buffer_free(model->activations_memory);
    free(model->acts.layers);
    free(model->group_grads);
    free(model->reduced);
    free(model->gathered);
    free(model->squares);
    plan_free(&model->plan);
    memset(model, 0, sizeof(*model));
}

// ---------------------------------------------------------------------------------------------------
// Parameters of other ranks. comm_wait(model->gathered[group]) waits for them

static void params_gather(Model *model, int group) {
    floatX *place = model->params + params_place(&model->plan, group);
    model->gathered[group] = sharding_gather(&model->plan.sharding, group, place, model->own_params, sizeof(floatX));
}

// --zero 3: called ahead of the computation of layer l, and after that of the layer in its place: starts to gather its
// parameters, unless they are there.
static void params_fetch(Model *model, int l) {
    if (!params_two_layers(&model->plan) || l < 0 || l >= model->plan.config.L || model->held[l % 2] == l) return;
    model->held[l % 2] = l;
    weight_copies_drop(&model->copies, l);
    params_gather(model, 1 + l);
}

// Called when this rank's pieces of a group are new. With --zero 3 the third layer and those after it are gathered when
// they are needed.
static void params_renew(Model *model, int group) {
    int l = group - 1;
    bool layer = params_two_layers(&model->plan) && l >= 0 && l < model->plan.config.L;
    if (layer && l >= 2) return;
    if (layer) model->held[l] = l;
    params_gather(model, group);
}

// --zero 3: called when all pieces of this rank were loaded.
static void params_renew_all(Model *model) {
    for (int g = 0; g < model->plan.sharding.groups && params_two_layers(&model->plan); g++) params_renew(model, g);
}

// --zero 3: a rank without rows takes part in a forward of the others.
static void params_follow_forward(Model *model) {
    for (int l = -2; l < model->plan.config.L && params_two_layers(&model->plan); l++) {
        if (l >= 0) comm_wait(model->gathered[1 + l]);
        params_fetch(model, l + 2);
    }
}

// ---------------------------------------------------------------------------------------------------
// Forward

// y = the linear layer of block l on x. --quantize rounds x in place: nothing else reads it then.
static void block_linear_forward(const Model *model, floatX *y, floatX *x, LinearKind kind, int l, int N) {
    const Quantization *q = &model->quant;
    Linear w = linear_of(model, kind, l);
    if (q->activation_bits) quantize_inplace(x, N, w.IC, w.IC, q->activation_bits, q->whole);
    linear_forward(y, x, w, N);
}

// The query and key heads of a layer's fused rows, or the key heads of YOCO: their norm with --qk-norm.
typedef struct {
    floatX *rows, *kept; // kept: (N, ldk): before the norm; or NULL
    int heads, ld, ldk;
    TensorKind weight;
} HeadNorm;
static HeadNorm query_norm(const Model *model, int l, floatX *fused) {
    const AttentionDims *d = plan_dims(&model->plan, l);
    HeadNorm n = {fused, model->acts.layers[l].qk, d->NQ, d->fused_ld, d->rope_heads * d->QD, T_Q_NORM};
    return n;
}
static HeadNorm key_norm(const Model *model, int l, floatX *fused) {
    const AttentionDims *d = plan_dims(&model->plan, l);
    floatX *kept = model->acts.layers[l].qk;
    HeadNorm n = {fused + d->k_at, kept ? kept + d->q_rows : NULL, d->rope_heads - d->NQ,
                  d->fused_ld,     d->rope_heads * d->QD,          T_K_NORM};
    return n;
}
static HeadNorm yoco_key_norm(const Model *model, floatX *kv) {
    const AttentionDims *d = &model->plan.cross_dims;
    HeadNorm n = {kv, model->acts.kv_kept, d->NK, d->kv_ld, d->NK * d->QD, T_YOCO_K_NORM};
    return n;
}
static void normalise_heads(Model *model, int l, HeadNorm n, int N) {
    const ModelConfig *c = &model->plan.config;
    if (!c->qk_norm || n.heads == 0) return;
    head_norm_forward(n.rows, n.kept, param(model, n.weight, l), N, n.heads, model->plan.dims.QD, n.ld, n.ldk,
                      (real)c->rms_norm_eps);
}

// Lambda, the factor of the noise head, of each row and head, in variants that do not project it from the input.
static void lambda_forward(Model *model, int l, int N) {
    int OH = model->plan.dims.OH;
    floatX *rows = model->acts.layers[l].lambda;
    size_t count = (size_t)N * OH;
    switch (model->plan.config.attention->lambda) {
    case LAMBDA_LAYER: lambda_learned_forward(rows, param(model, T_OWN_LAMBDA, l), 1, N, OH); break;
    case LAMBDA_HEAD: lambda_learned_forward(rows, param(model, T_OWN_LAMBDA, l), OH, N, OH); break;
    case LAMBDA_EXP:
        lambda_exp_forward(rows, param(model, T_LAMBDA_Q1, l), param(model, T_LAMBDA_K1, l),
                           param(model, T_LAMBDA_Q2, l), param(model, T_LAMBDA_K2, l), model->plan.config.D,
                           (real)lambda_init(l), count);
        break;
    default: fill_forward(rows, 1, count);
    }
}

// The norm before o_proj, where the variant has one.
static void subnorm_forward(Model *model, int l, int N) {
    const AttentionDims *d = &model->plan.dims;
    const LayerActivations *a = &model->acts.layers[l];
    const AttentionVariant *variant = model->plan.config.attention;
    double eps = variant->norm == NORM_HEAD ? HEAD_NORM_EPS : model->plan.config.rms_norm_eps;
    if (d->norm_count)
        rmsnorm_forward(a->normed, a->rstd_sub, a->exclusive, param(model, T_SUBLN, l), N * d->norm_count,
                        d->norm_width, (real)eps, NULL);
    if (variant->norm == NORM_HEAD) scale_inplace(a->normed, (real)(1 - lambda_init(l)), (size_t)N * (d->OH * d->DV));
}

// The rows of a forward: T rows of each of B sequences. Training and evaluation run whole sequences. A model for
// generation keeps keys and values in caches: it runs a piece of one sequence's prompt, or one new position of each.
typedef struct {
    int B, T;
    int first;    // of a piece: the position of its first row
    int sequence; // of a piece: its place in the caches
} Rows;

// Attention of a model for generation: the new keys and values, in the fused rows, join those of the cache.
static void cached_attention_forward(Model *model, int l, const floatX *fused, Rows r) {
    const ModelPlan *plan = &model->plan;
    const AttentionDims *d = plan_dims(plan, l);
    const LayerActivations *a = &model->acts.layers[l];
    int capacity = cache_capacity(plan, l), width = d->kv_rows, earlier = 0;
    floatX *cache = a->kv + (size_t)r.sequence * capacity * width;
    const floatX *k = cache, *own = fused + d->k_at;
    const int *first = model->acts.first;
    bool ring = capacity < plan->T && r.T > 1, cross = layer_cross(&plan->config, l);
    if (ring) { // the piece overwrites positions that its first rows attend to: they are copied
        earlier = min_int(r.first, capacity - 1);
        if (earlier) cache_load(model->acts.staged, cache, r.first - earlier, earlier, capacity, width);
        cache_store(model->acts.staged + (size_t)earlier * width, own, NULL, 1, r.T, r.T, width, d->fused_ld);
        k = model->acts.staged;
    }
    if (!cross) cache_store(cache, own, first, r.B, r.T, capacity, width, d->fused_ld);
    for (int set = 0; set < plan->config.attention->key_sets; set++) {
        KeySet s = key_set(plan, l, set, r.B, r.T, ring ? earlier : r.first);
        floatX *out = a->heads + s.out;
        real *lse = a->lse + s.lse;
        if (r.T == 1) attention_decode(out, lse, fused + s.q, k + s.k, k + s.v, first, capacity, s.shape);
        else attention_forward(out, lse, fused + s.q, k + s.k, k + s.v, s.shape);
    }
}

// The values of the rows that a forward computes: in the layer's fused rows, or in the rows of YOCO.
typedef struct {
    floatX *rows;
    int ld;
} ValueRows;
static ValueRows own_values(const Model *model, int l) {
    const AttentionDims *d = plan_dims(&model->plan, l);
    bool cross = layer_cross(&model->plan.config, l);
    ValueRows v = {cross ? model->acts.kv + d->NK * d->QD : model->acts.layers[l].fused + d->v_at,
                   cross ? d->kv_ld : d->fused_ld};
    return v;
}

// From the fused rows to the attention output that o_proj reads. Traits of the variant decide which steps there are.
static void attention_heads_forward(Model *model, int l, Rows r) {
    const AttentionVariant *variant = model->plan.config.attention;
    const AttentionDims *d = plan_dims(&model->plan, l);
    const LayerActivations *a = &model->acts.layers[l];
    bool cached = model->plan.purpose == FOR_GENERATION;
    int B = r.B, T = r.T, N = B * T, ld = d->fused_ld;
    absmax_t *max = input_max(model, LINEAR_O, l); // of attn_out, by the last operation if it can
    if (cached) cached_attention_forward(model, l, a->fused, r);
    for (int set = 0; set < variant->key_sets && !cached; set++) {
        KeySet s = model_key_set(model, l, set, B, T, 0);
        floatX *out = a->heads + s.out, *q = a->fused + s.q, *k = a->kv + s.k, *v = a->kv + s.v;
        int bits = model->quant.logit_bits;
        if (bits) attention_quantized_forward(out, a->lse + s.lse, q, k, v, s.shape, bits);
        else attention_forward(out, a->lse + s.lse, q, k, v, s.shape);
    }
    if (variant->sink) sink_forward(a->heads, a->lse, param(model, T_SINKS, l), B, T, d->NQ, d->DV);
    if (a->lambda) lambda_forward(model, l, N);
    if (d->groups.noise) {
        LambdaRows lambda = lambda_rows(d, a->lambda, a->fused);
        diff_combine_forward(a->combined, a->heads, lambda.rows, N, d->OH, d->DV, lambda.ld, d->groups, variant->factor,
                             a->combined == a->attn_out ? max : NULL);
    }
    if (variant->xsa) {
        ValueRows v = own_values(model, l);
        exclusive_forward(a->exclusive, a->combined, v.rows, N, d->OH, d->NV, d->DV, v.ld,
                          a->exclusive == a->attn_out ? max : NULL);
    }
    subnorm_forward(model, l, N);
    if (d->gate_width)
        gate_forward(a->attn_out, a->normed, a->fused + d->gate_at, N, d->OH, d->DV, ld, d->gate_width, max);
    else if (max && (d->norm_count || a->attn_out == a->heads))
        absmax_update(max, a->attn_out, N, d->OH * d->DV, d->OH * d->DV);
}

// YOCO: the keys and values that the upper half of the layers reads, from x, the output of the lower half.
static void yoco_forward(Model *model, const floatX *x, Rows r) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *d = &model->plan.cross_dims;
    Activations *a = &model->acts;
    int l = yoco_layer(c), N = r.B * r.T, capacity = cache_capacity(&model->plan, l);
    weight_copies_refresh(&model->copies, &model->plan, model->params, l);
    rmsnorm_forward(a->kv_norm, a->kv_rstd, x, param(model, T_YOCO_NORM, l), N, c->C, (real)c->rms_norm_eps,
                    input_max(model, LINEAR_KV, l));
    block_linear_forward(model, a->kv, a->kv_norm, LINEAR_KV, l, N);
    normalise_heads(model, l, yoco_key_norm(model, a->kv), N);
    rope_forward(a->kv, a->rope, r.B, r.T, d->NK, d->QD, d->kv_ld, a->first);
    if (model->plan.purpose == FOR_GENERATION)
        cache_store(a->layers[l].kv + (size_t)r.sequence * capacity * d->kv_rows, a->kv, a->first, r.B, r.T, capacity,
                    d->kv_rows, d->kv_ld);
}

// The norm that follows a block: of the next block, or the final norm. Its operation also adds to the residual stream.
typedef struct {
    floatX *y;
    real *rstd;
    const floatX *weight;
    absmax_t *max; // of y
} NextNorm;
static NextNorm norm_after_block(Model *model, int l) {
    bool last = l == model->plan.config.L - 1;
    NextNorm n;
    n.y = last ? model->acts.norm_final : model->acts.layers[l + 1].norm1;
    n.rstd = last ? model->acts.rstd_final : model->acts.layers[l + 1].rstd1;
    n.weight = last ? param(model, T_NORM_FINAL, 0) : param(model, T_NORM1, l + 1);
    n.max = input_max(model, LINEAR_FUSED, l + 1);
    return n;
}

// The attention half of a block: from norm1, the norm of its input x, to x_mid and norm2.
static void block_forward_attention(Model *model, int l, const floatX *x, Rows r) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *d = plan_dims(&model->plan, l);
    const LayerActivations *a = &model->acts.layers[l];
    floatX *branch = model->acts.branch;
    int N = r.B * r.T, C = c->C;
    block_linear_forward(model, a->fused, a->norm1, LINEAR_FUSED, l, N); // q, k, v, lambda, gate
    normalise_heads(model, l, query_norm(model, l, a->fused), N);
    normalise_heads(model, l, key_norm(model, l, a->fused), N);
    rope_forward(a->fused, model->acts.rope, r.B, r.T, d->rope_heads, d->QD, d->fused_ld, model->acts.first);
    attention_heads_forward(model, l, r);
    block_linear_forward(model, branch, a->attn_out, LINEAR_O, l, N);
    residual_rmsnorm_forward(a->x_mid, a->norm2, a->rstd2, x, branch, param(model, T_NORM2, l), N, C,
                             (real)c->rms_norm_eps, input_max(model, LINEAR_GATE_UP, l));
}

// The experts that the rows of norm2 go to, and their weights.
static void block_route(Model *model, int l, int N) {
    const LayerActivations *a = &model->acts.layers[l];
    Routing r = plan_routing(&model->plan, N);
    if (!a->starts) return;
    router_forward(a->router_logits, a->router_lse, a->experts, a->expert_weights, a->norm2, param(model, T_ROUTER, l),
                   param(model, T_ROUTER_BIAS, l), r);
    expert_group(a->starts, a->entries, a->places, a->experts, r);
}

// y = a linear layer of the experts of block l on their rows of x. As block_linear_forward.
static void block_experts_forward(const Model *model, floatX *y, floatX *x, LinearKind kind, int l, int N) {
    const Quantization *q = &model->quant;
    ExpertLinear w = experts_of(model, kind, l);
    int R = N * model->plan.config.K;
    if (q->activation_bits) quantize_inplace(x, R, w.first.IC, w.first.IC, q->activation_bits, q->whole);
    expert_linear_forward(y, x, w, model->acts.layers[l].starts, N, R);
}

// The MLP half without its down projections: from norm2 to hidden, the activation of what every token passes, and to
// the products of the experts.
static void block_forward_mlp(Model *model, int l, int N) {
    const LayerActivations *a = &model->acts.layers[l];
    if (a->starts) {
        expert_gather(model->acts.expert_rows[0], a->norm2, a->entries, plan_routing(&model->plan, N));
        block_experts_forward(model, a->expert_gate_up, model->acts.expert_rows[0], LINEAR_EXPERT_GATE_UP, l, N);
    }
    if (!a->gate_up) return;
    block_linear_forward(model, a->gate_up, a->norm2, LINEAR_GATE_UP, l, N);
    swiglu_forward(a->hidden, a->gate_up, N, mlp_dims(&model->plan.config, l).width, input_max(model, LINEAR_DOWN, l));
}

// The activation of the experts, each row times its weight, which is not kept for the backward.
static void block_expert_hidden(Model *model, int l, int N) {
    const ModelConfig *c = &model->plan.config;
    const LayerActivations *a = &model->acts.layers[l];
    expert_swiglu_forward(model->acts.expert_hidden, a->expert_gate_up, a->expert_weights, a->entries, N * c->K, c->FE,
                          input_max(model, LINEAR_EXPERT_DOWN, l));
}

// The down projections: from hidden and the products of the experts to branch.
static void block_forward_down(Model *model, int l, int N) {
    const LayerActivations *a = &model->acts.layers[l];
    Activations *g = &model->acts;
    if (a->gate_up) block_linear_forward(model, g->branch, a->hidden, LINEAR_DOWN, l, N);
    if (!a->starts) return;
    block_expert_hidden(model, l, N);
    block_experts_forward(model, g->expert_rows[1], g->expert_hidden, LINEAR_EXPERT_DOWN, l, N);
    expert_combine(g->branch, g->expert_rows[1], a->places, plan_routing(&model->plan, N), a->gate_up != NULL);
}

// One block: from the residual stream x and its norm, norm1, to x_out and the norm that follows the block.
static void block_forward(Model *model, int l, const floatX *x, Rows r) {
    const LayerActivations *a = &model->acts.layers[l];
    floatX *branch = model->acts.branch;
    int N = r.B * r.T, C = model->plan.config.C;
    weight_copies_refresh(&model->copies, &model->plan, model->params, l);
    block_forward_attention(model, l, x, r);
    block_route(model, l, N);
    block_forward_mlp(model, l, N);
    block_forward_down(model, l, N);
    NextNorm next = norm_after_block(model, l);
    comm_wait(model->gathered[2 + l]); // the weight of that norm
    residual_rmsnorm_forward(a->x_out, next.y, next.rstd, a->x_mid, branch, next.weight, N, C,
                             (real)model->plan.config.rms_norm_eps, next.max);
    params_fetch(model, l + 2);
}

// The residual stream that enters block l.
static const floatX *block_input(const Model *model, int l) {
    return l ? model->acts.layers[l - 1].x_out : model->acts.embedded;
}

// The embeddings of the tokens in acts.inputs, and their norm: the input of the first block.
static void model_forward_embedding(Model *model, int N) {
    Activations *a = &model->acts;
    int C = model->plan.config.C;
    if (a->maxima) buffer_zero(a->maxima, linear_max_count(&model->plan) * sizeof(absmax_t));
    params_fetch(model, 0);
    params_fetch(model, 1);
    comm_wait(model->gathered[0]); // the last update of other ranks
    embedding_forward(a->embedded, a->inputs, param(model, T_EMBED, 0), N, C);
    comm_wait(model->gathered[1]);
    rmsnorm_forward(a->layers[0].norm1, a->layers[0].rstd1, a->embedded, param(model, T_NORM1, 0), N, C,
                    (real)model->plan.config.rms_norm_eps, input_max(model, LINEAR_FUSED, 0));
}

// Runs layers from .. to-1, and before the upper half of YOCO its keys and values. visit: called after each layer; or
// NULL.
static void model_forward_layers(Model *model, int from, int to, Rows r, LayerVisit visit, void *visitor) {
    for (int l = from; l < to; l++) {
        const floatX *x = block_input(model, l);
        if (l == yoco_layer(&model->plan.config)) yoco_forward(model, x, r);
        block_forward(model, l, x, r);
        if (visit) visit(visitor, l);
    }
}

// Runs B whole sequences of T positions, whose tokens are in acts.inputs, up to the final norm.
static void model_forward(Model *model, int B, int T) {
    assert(B <= model->plan.B && T <= model->plan.T && model->plan.purpose != FOR_GENERATION);
    Rows r = {B, T, 0, 0};
    model_forward_embedding(model, B * T);
    model_forward_layers(model, 0, model->plan.config.L, r, NULL, NULL);
}

// Adds the loss of each row to acts.losses, logit_rows rows at a time. dloss: the weight of one row in the loss that is
// minimised; unless it is 0, also computes the gradients of the LM head and, into dnorm, of the final norm's output.
static void model_classify(Model *model, int N, real dloss) {
    Activations *a = &model->acts;
    int C = model->plan.config.C, V = model->plan.config.V, Vp = model->plan.Vp;
    weight_copies_refresh(&model->copies, &model->plan, model->params, model->plan.config.L);
    Linear head = linear_of(model, LINEAR_HEAD, 0);
    for (int n = 0; n < N; n += model->plan.logit_rows) {
        int rows = min_int(model->plan.logit_rows, N - n);
        size_t at = (size_t)n * C;
        linear_forward(a->logits, a->norm_final + at, head, rows);
        cross_entropy(a->losses + n, a->logits, a->targets + n, rows, V, Vp, dloss);
        if (dloss != 0)
            linear_backward(a->dnorm + at, grad(model, head_kind(&model->plan), 0), a->logits, a->norm_final + at, head,
                            rows, n > 0 || grads_add(model));
    }
}

// ---------------------------------------------------------------------------------------------------
// Statistics

// Norm of the gradients of groups first .. last, from the squares of all pieces, summed in the same order on all ranks.
// NaN or infinite when an element is.
static double squares_norm(const Model *model, int first, int last) {
    const Sharding *s = &model->plan.sharding;
    double sum = 0;
    for (int i = s->first[first] * s->ranks; i < s->first[last + 1] * s->ranks; i++) sum += model->squares[i];
    return sqrt(sum);
}

static void model_gather_stats(Model *model, int l, int B, int T) {
    ops_wait(); // so that only the statistics are timed
    double start = now_seconds();
    model->stats[l] = layer_stats(&model->plan, &model->acts.layers[l], l, model_key_set(model, l, 0, B, T, 0));
    model->stats_seconds += now_seconds() - start;
}

// ---------------------------------------------------------------------------------------------------
// Backward: the lines of the forward in reverse order; each comment quotes what it inverts

// Inverts normalise_heads: n.rows are the gradients.
static void normalise_heads_backward(Model *model, int l, HeadNorm n, int N) {
    const ModelConfig *c = &model->plan.config;
    if (!c->qk_norm || n.heads == 0) return;
    head_norm_backward(n.rows, grad(model, n.weight, l), n.kept, param(model, n.weight, l), N, n.heads,
                       model->plan.dims.QD, n.ld, n.ldk, (real)c->rms_norm_eps);
}

static void lambda_backward(Model *model, int l, int N) {
    int OH = model->plan.dims.OH;
    size_t count = (size_t)N * OH;
    const floatX *drows = model->acts.dlambda;
    switch (model->plan.config.attention->lambda) {
    // inverts lambda = the number of the layer, or of the head
    case LAMBDA_LAYER: lambda_learned_backward(grad(model, T_OWN_LAMBDA, l), drows, 1, N, OH); break;
    case LAMBDA_HEAD: lambda_learned_backward(grad(model, T_OWN_LAMBDA, l), drows, OH, N, OH); break;
    // inverts lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init
    case LAMBDA_EXP:
        lambda_exp_backward(grad(model, T_LAMBDA_Q1, l), grad(model, T_LAMBDA_K1, l), grad(model, T_LAMBDA_Q2, l),
                            grad(model, T_LAMBDA_K2, l), drows, param(model, T_LAMBDA_Q1, l),
                            param(model, T_LAMBDA_K1, l), param(model, T_LAMBDA_Q2, l), param(model, T_LAMBDA_K2, l),
                            model->plan.config.D, count);
        break;
    default: break; // constant
    }
}

// The inverse of attention_heads_forward: from the gradient of the attention output to that of the fused rows.
static void attention_heads_backward(Model *model, int l, int B, int T) {
    const AttentionVariant *variant = model->plan.config.attention;
    const AttentionDims *d = plan_dims(&model->plan, l);
    const LayerActivations *a = &model->acts.layers[l];
    Activations *g = &model->acts;
    int N = B * T, ld = d->fused_ld;
    size_t width = (size_t)(d->OH * d->DV);
    // inverts attn_out = normed * sigmoid(gate)
    if (d->gate_width)
        gate_backward(g->dnormed, g->dfused + d->gate_at, g->dattn_out, a->normed, a->fused + d->gate_at, N, d->OH,
                      d->DV, ld, d->gate_width);
    // inverts normed = rmsnorm(exclusive), times 1 - lambda_init in DIFF V1
    if (variant->norm == NORM_HEAD) scale_inplace(g->dnormed, (real)(1 - lambda_init(l)), (size_t)N * width);
    if (d->norm_count) {
        rmsnorm_backward(g->dexclusive, grad(model, T_SUBLN, l), g->dnormed, a->exclusive, param(model, T_SUBLN, l),
                         a->rstd_sub, N * d->norm_count, d->norm_width, false, NULL);
    }
    bool cross = layer_cross(&model->plan.config, l);
    floatX *dkv = cross ? g->dkv : g->dfused;
    // inverts exclusive = combined without its component along the own value; attention_backward adds to dV
    if (variant->xsa) {
        ValueRows v = own_values(model, l);
        exclusive_backward(g->dcombined, dkv + model_key_set(model, l, 0, B, T, 0).v, g->dexclusive, a->combined,
                           v.rows, N, d->OH, d->NV, d->DV, v.ld, v.ld);
    }
    // inverts combined = signal head - s(lambda) * noise head
    if (d->groups.noise) {
        LambdaRows lambda = lambda_rows(d, a->lambda, a->fused), dlambda = lambda_rows(d, g->dlambda, g->dfused);
        diff_combine_backward(g->dheads, dlambda.rows, g->dcombined, a->heads, lambda.rows, N, d->OH, d->DV, lambda.ld,
                              d->groups, variant->factor);
    }
    if (a->lambda) lambda_backward(model, l, N);
    // inverts heads *= exp(lse) / (exp(lse) + exp(sink)) for the sinks; attention_backward reads lse with the sink
    if (variant->sink == SINK_OWN)
        sink_backward(grad(model, T_SINKS, l), g->dheads, a->heads, a->lse, param(model, T_SINKS, l), B, T, d->NQ,
                      d->DV);
    // inverts heads, lse = attention(q, k, v), for each set of keys
    for (int set = 0; set < variant->key_sets; set++) {
        KeySet s = model_key_set(model, l, set, B, T, 0);
        attention_backward(g->dfused + s.q, dkv + s.k, dkv + s.v, g->dheads + s.out, a->heads + s.out, a->lse + s.lse,
                           a->fused + s.q, a->kv + s.k, a->kv + s.v, s.shape, attention_adds_dv(&model->plan, set > 0));
    }
    // the layers of YOCO's upper half read the same keys and values
    if (cross) accumulate(g->dkv_sum, dkv, (size_t)N * d->kv_ld, l < model->plan.config.L - 1);
}

// Inverts yoco_forward: from the gradient of its keys and values, the sum over the upper half, adds to acts.dx.
static void yoco_backward(Model *model, const floatX *x, int B, int T) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *d = &model->plan.cross_dims;
    Activations *g = &model->acts;
    int l = yoco_layer(c), N = B * T;
    rope_backward(g->dkv, g->rope, B, T, d->NK, d->QD, d->kv_ld, NULL);
    normalise_heads_backward(model, l, yoco_key_norm(model, g->dkv), N);
    if (g->maxima) absmax_update(output_max(model, LINEAR_KV, l), g->dkv, N, d->kv_rows, d->kv_ld);
    linear_backward(g->dnorm, grad(model, T_YOCO_K, l), g->dkv, g->kv_norm, linear_of(model, LINEAR_KV, l), N,
                    grads_add(model));
    rmsnorm_backward(g->dx, grad(model, T_YOCO_NORM, l), g->dnorm, x, param(model, T_YOCO_NORM, l), g->kv_rstd, N, c->C,
                     true, output_max(model, LINEAR_DOWN, l - 1));
}

// --recompute: computes the activations that were not kept again, by the operations of the forward, with equal bits.
// Those of the last block are still in memory.
static void block_recompute(Model *model, int l, const floatX *x, int B, int T) {
    const LayerActivations *a = &model->acts.layers[l];
    int N = B * T, C = model->plan.config.C;
    real eps = (real)model->plan.config.rms_norm_eps;
    if (model->plan.recompute == RECOMPUTE_NOTHING || l == model->plan.config.L - 1) return;
    rmsnorm_forward(a->norm1, a->rstd1, x, param(model, T_NORM1, l), N, C, eps, input_max(model, LINEAR_FUSED, l));
    Rows r = {B, T, 0, 0};
    if (model->plan.recompute == RECOMPUTE_BLOCK) block_forward_attention(model, l, x, r);
    else {
        subnorm_forward(model, l, N);
        rmsnorm_forward(a->norm2, a->rstd2, a->x_mid, param(model, T_NORM2, l), N, C, eps,
                        input_max(model, LINEAR_GATE_UP, l));
    }
    block_forward_mlp(model, l, N);
}

// Inverts the part of the experts in block_forward_down and block_forward_mlp, and block_route: from dx to dnorm.
// add: the gradient joins that of what every token passes.
static void block_backward_experts(Model *model, int l, int N, bool add) {
    const ModelConfig *c = &model->plan.config;
    const LayerActivations *a = &model->acts.layers[l];
    Activations *g = &model->acts;
    Routing r = plan_routing(&model->plan, N);
    floatX *rows = g->expert_rows[0], *drows = g->expert_rows[1];
    int R = N * c->K;
    bool grads = grads_add(model);
    block_expert_hidden(model, l, N);
    // inverts branch = sum over the places of a row, of down(hidden)
    expert_gather(rows, g->dx, a->entries, r);
    expert_linear_backward(g->dexpert_hidden, grad(model, T_EXPERT_DOWN, l), rows, g->expert_hidden,
                           experts_of(model, LINEAR_EXPERT_DOWN, l), a->starts, N, R, grads);
    // inverts hidden = weight * swiglu(expert_gate_up)
    expert_swiglu_backward(g->dexpert_gate_up, g->dexpert_weights, g->dexpert_hidden, a->expert_gate_up,
                           a->expert_weights, a->entries, R, c->FE, output_max(model, LINEAR_EXPERT_GATE_UP, l));
    // inverts expert_gate_up = gate_up(the rows of norm2)
    expert_gather(rows, a->norm2, a->entries, r);
    expert_linear_backward(drows, grad(model, T_EXPERT_GATE, l), g->dexpert_gate_up, rows,
                           experts_of(model, LINEAR_EXPERT_GATE_UP, l), a->starts, N, R, grads);
    expert_combine(g->dnorm, drows, a->places, r, add);
    // inverts the router, with its two losses
    const real *loads = router_loads(&model->router, &model->plan, g, l);
    router_backward(g->dnorm, grad(model, T_ROUTER, l), g->dexpert_weights, a->norm2, param(model, T_ROUTER, l),
                    a->router_logits, a->router_lse, a->experts, a->expert_weights, loads, model->router.balance,
                    model->router.squares, r, grads);
}

// Inverts the MLP half of a block: from dx, the gradient of x_out, to that of x_mid.
static void block_backward_mlp(Model *model, int l, int N) {
    const LayerActivations *a = &model->acts.layers[l];
    Activations *g = &model->acts;
    bool add = grads_add(model);
    // inverts x_out = x_mid + down(hidden), hidden = swiglu(gate_up(norm2)); the sum passes dx on unchanged
    if (a->gate_up) {
        linear_backward(g->dhidden, grad(model, T_MLP_DOWN, l), g->dx, a->hidden, linear_of(model, LINEAR_DOWN, l), N,
                        add);
        swiglu_backward(g->dgate_up, g->dhidden, a->gate_up, N, mlp_dims(&model->plan.config, l).width,
                        output_max(model, LINEAR_GATE_UP, l));
        linear_backward(g->dnorm, grad(model, T_MLP_GATE, l), g->dgate_up, a->norm2,
                        linear_of(model, LINEAR_GATE_UP, l), N, add);
    }
    if (a->starts) block_backward_experts(model, l, N, a->gate_up != NULL);
    rmsnorm_backward(g->dx, grad(model, T_NORM2, l), g->dnorm, a->x_mid, param(model, T_NORM2, l), a->rstd2, N,
                     model->plan.config.C, true, output_max(model, LINEAR_O, l));
}

// On entry acts.dx is the gradient of x_out, on return that of x.
static void block_backward(Model *model, int l, const floatX *x, int B, int T) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *d = plan_dims(&model->plan, l);
    const LayerActivations *a = &model->acts.layers[l];
    Activations *g = &model->acts;
    int N = B * T, C = c->C;
    bool add = grads_add(model), yoco = l == yoco_layer(c);
    // columns that pad the rows of this half of YOCO were others in the other half
    if (c->yoco && (l == c->L - 1 || l == c->L / 2 - 1))
        buffer_zero(g->dfused, (size_t)N * d->fused_ld * sizeof(floatX));

    block_backward_mlp(model, l, N);

    // inverts x_mid = x + o(attn_out), attn_out = heads(rope(fused(norm1)))
    linear_backward(g->dattn_out, grad(model, T_O, l), g->dx, a->attn_out, linear_of(model, LINEAR_O, l), N, add);
    attention_heads_backward(model, l, B, T);
    rope_backward(g->dfused, g->rope, B, T, d->rope_heads, d->QD, d->fused_ld, NULL);
    normalise_heads_backward(model, l, query_norm(model, l, g->dfused), N);
    normalise_heads_backward(model, l, key_norm(model, l, g->dfused), N);
    if (g->maxima) absmax_update(output_max(model, LINEAR_FUSED, l), g->dfused, N, d->fused_width, d->fused_ld);
    linear_backward(g->dnorm, grad(model, T_Q, l), g->dfused, a->norm1, linear_of(model, LINEAR_FUSED, l), N, add);
    rmsnorm_backward(g->dx, grad(model, T_NORM1, l), g->dnorm, x, param(model, T_NORM1, l), a->rstd1, N, C, true,
                     yoco ? NULL : output_max(model, LINEAR_DOWN, l - 1));
    if (yoco) yoco_backward(model, x, B, T);
}

// Called before a group's gradients are written or added to. From --zero 2 on waits until the gradients that were in
// the same place have been reduced. Zeroes gradients that operations add to; matrix products write theirs.
static void grads_open(Model *model, int group) {
    int L = model->plan.config.L;
    if (grads_two_layers(&model->plan)) {
        comm_wait(model->reduced[group]);
        if (group > 0 && group + 2 < L + 1) comm_wait(model->reduced[group + 2]);
        bool end = (group == 0 || group == L + 1) && grads_ends_share(&model->plan);
        if (end) comm_wait(model->reduced[L + 1 - group]);
        const size_t *at = model->plan.tensors.group_offset;
        // the padding between tensors, which the norm includes, was gradients of a group of another shape
        if (end || model->plan.config.yoco || model->plan.config.dense_layers)
            buffer_zero(model->group_grads[group], (at[group + 1] - at[group]) * sizeof(grad_t));
    }
    if (grads_add(model)) return;
    for (int i = 0; i < model->plan.tensors.run_count; i++) {
        const Tensor *t = &model->plan.tensors.runs[i];
        if (t->layer + 1 == group && !is_product_weight(&model->plan, t))
            buffer_zero(tensor_grad(model, t), t->count * sizeof(grad_t));
    }
}

// This rank's piece of a bucket of gradients, which receives the sum over all ranks.
static grad_t *own_grads(const Model *model, const Bucket *b) {
    const Sharding *s = &model->plan.sharding;
    if (model->own_grads) return model->own_grads + b->begin / (size_t)s->ranks;
    return model->group_grads[b->group] + (b->begin - model->plan.tensors.group_offset[b->group]) +
           (size_t)s->rank * b->piece;
}

// Called when a group's gradients are complete: starts to sum them over the ranks, while the backward continues.
static void grads_close(Model *model, int group) {
    const Sharding *s = &model->plan.sharding;
    if (!model->reduce) return;
    for (int i = s->first[group]; i < s->first[group + 1]; i++) {
        const Bucket *b = &s->buckets[i];
        grad_t *bucket = model->group_grads[group] + (b->begin - model->plan.tensors.group_offset[group]);
        model->reduced[group] =
            comm_reduce_scatter(bucket, b->piece, own_grads(model, b), model->own_grads && model->micro_step > 0);
        if (s->level == 0)
            model->reduced[group] = comm_all_gather(bucket, own_grads(model, b), b->piece * sizeof(grad_t));
    }
}

// Requires model_forward and model_classify with dloss != 0 on the same rows. Writes the gradients, or adds to them.
static void model_backward(Model *model, int B, int T) {
    Activations *a = &model->acts;
    int N = B * T, C = model->plan.config.C, L = model->plan.config.L;
    // inverts norm_final = rmsnorm(x_out of the last block)
    rmsnorm_backward(a->dx, grad(model, T_NORM_FINAL, 0), a->dnorm, a->layers[L - 1].x_out,
                     param(model, T_NORM_FINAL, 0), a->rstd_final, N, C, false, output_max(model, LINEAR_DOWN, L - 1));
    grads_close(model, L + 1);
    for (int l = L - 1; l >= 0; l--) {
        const floatX *x = block_input(model, l);
        comm_wait(model->gathered[1 + l]); // with --zero 3 once more
        weight_copies_refresh(&model->copies, &model->plan, model->params, l);
        block_recompute(model, l, x, B, T);
        if (model->stats) model_gather_stats(model, l, B, T);
        grads_open(model, 1 + l);
        block_backward(model, l, x, B, T);
        params_fetch(model, l - 2); // before the reduction: it is needed earlier
        grads_close(model, 1 + l);
    }
    if (!model->plan.config.tied) grads_open(model, 0);
    embedding_backward(grad(model, T_EMBED, 0), a->dx, a->inputs, N, C); // inverts embedded = embedding(inputs)
    grads_close(model, 0);                                               // a tied head has added to it before
}

// Uploads a batch of N rows. starts: where the document of each input begins in its sequence, before which attention
// does not look; or NULL. Positions count from the start of the sequence: rotary scores depend on distances only.
static void model_read_batch(Model *model, const int *inputs, const int *targets, const int *starts, int N) {
    size_t bytes = (size_t)N * sizeof(int);
    buffer_upload(model->acts.inputs, inputs, bytes);
    buffer_upload(model->acts.targets, targets, bytes);
    model->documents = starts != NULL;
    if (!starts) return;
    buffer_upload(model->acts.starts, starts, bytes);
    attention_documents(model->acts.documents, model->acts.starts, starts, N, model->plan.T);
}

// One micro-step of an update over total_rows rows: adds its part of the gradient of their mean loss.
static void model_micro_step(Model *model, const int *inputs, const int *targets, const int *starts, int B, int T,
                             double total_rows) {
    model_read_batch(model, inputs, targets, starts, B * T);
    watch_phase(PHASE_FORWARD);
    model_forward(model, B, T);
    router_count(&model->router, &model->plan, &model->acts, B * T, total_rows, model->micro_step == 0);
    watch_phase(PHASE_BACKWARD);
    if (model->plan.config.tied) grads_open(model, 0); // the head's gradient is the embedding's
    grads_open(model, model->plan.config.L + 1);
    model_classify(model, B * T, (real)(1 / total_rows));
    model_backward(model, B, T);
}

// Sum of acts.losses, which model_classify adds to.
static double model_loss_sum(const Model *model, int N) {
    real *host = (real *)checked_calloc(N, sizeof(real));
    buffer_download(host, model->acts.losses, (size_t)N * sizeof(real));
    double sum = 0;
    for (int n = 0; n < N; n++) sum += (double)host[n];
    free(host);
    return sum;
}

// Adds the losses of `rows` rows to means [T], the mean loss at each position over `windows` windows.
static void model_losses_by_position(const Model *model, double *means, int rows, int T, double windows) {
    real *host = (real *)checked_calloc(rows, sizeof(real));
    buffer_download(host, model->acts.losses, (size_t)rows * sizeof(real));
    for (int n = 0; n < rows; n++) means[n % T] += (double)host[n] / windows;
    free(host);
}

// ---------------------------------------------------------------------------------------------------
// Update

// Waits for the reduced gradients; own [buckets]: sums of squares of this rank's pieces.
static void model_own_squares(const Model *model, double *own) {
    const Sharding *s = &model->plan.sharding;
    for (int g = 0; g < s->groups; g++) comm_wait(model->reduced[g]);
    for (int i = 0; i < s->count; i++)
        sum_of_squares(model->acts.grad_squares + i, own_grads(model, &s->buckets[i]), s->buckets[i].piece);
    buffer_download(own, model->acts.grad_squares, (size_t)s->count * sizeof(double));
}

// The factor that scales gradients down to the norm `clip`; 0: no limit.
static double clip_factor(double grad_norm, double clip) { return clip > 0 && grad_norm > clip ? clip / grad_norm : 1; }

// One AdamW step on the summed gradients, whose norm is finite. update: counts from 1, for the bias correction.
static void model_update(Model *model, const Options *o, double lr, int64_t update, double grad_norm) {
    assert(isfinite(grad_norm) && update > 0);
    const Sharding *s = &model->plan.sharding;
    const Sharding *mine = s->level ? s : NULL; // else every rank updates everything
    double scale = clip_factor(grad_norm, o->grad_clip);
    floatX *params = model->own_params ? model->own_params : model->params;
    weight_copies_forget(&model->copies, &model->plan);
    for (int i = 0; i < model->plan.tensors.run_count; i++) {
        const Tensor *t = &model->plan.tensors.runs[i];
        for (OwnRange r = sharding_ranges(mine, t); sharding_next(mine, t, &r);) {
            const grad_t *grads = model->own_grads ? model->own_grads + r.compact_at : model->grads + r.at;
            real *master = model->master ? model->master + r.compact_at : NULL;
            floatX *weights = params + (model->own_params ? r.compact_at : r.at);
            if (t->row->kind == T_ROUTER_BIAS) {
                const real *loads = router_loads(&model->router, &model->plan, &model->acts, t->layer);
                router_balance(weights, master, loads, model->router.bias_rate, model->plan.config.E, (int)r.begin,
                               (int)r.count);
                continue;
            }
            adamw_update(weights, master, grads, model->m + r.compact_at, model->v + r.compact_at, r.count, scale, lr,
                         o->beta1, o->beta2, o->eps, t->row->decay ? o->weight_decay : 0, update);
        }
        bool group_ends = i + 1 == model->plan.tensors.run_count || t[1].layer != t->layer;
        if (mine && group_ends) params_renew(model, t->layer + 1);
    }
}

// Waits until this rank has all parameters of the last update, not only its own pieces; with --zero 3 those on their
// way.
static void model_await_params(const Model *model) {
    for (int g = 0; g < model->plan.sharding.groups; g++) comm_wait(model->gathered[g]);
}

// ---------------------------------------------------------------------------------------------------
// Other uses of the forward: evaluation and generation

// The forward of an EvaluationModel: up to the final norm, with a call of `visit` after each layer unless it is NULL;
// then the LM head is ready.
static void model_forward_tokens(void *data, const int *tokens, int B, int T, LayerVisit visit, void *visitor) {
    Model *model = (Model *)data;
    Rows r = {B, T, 0, 0};
    model_read_batch(model, tokens, tokens, NULL, B * T);
    model_forward_embedding(model, B * T);
    model_forward_layers(model, 0, model->plan.config.L, r, visit, visitor);
    weight_copies_refresh(&model->copies, &model->plan, model->params, model->plan.config.L);
}

static EvaluationModel evaluation_model(Model *model) {
    EvaluationModel m = {&model->plan, &model->acts, linear_of(model, LINEAR_HEAD, 0), model, model_forward_tokens};
    return m;
}

// Logits [B][V] of B rows of the final norm's output.
static void model_logits(Model *model, const floatX *rows, int B, float *logits) {
    int V = model->plan.config.V, Vp = model->plan.Vp;
    linear_forward(model->acts.logits, rows, linear_of(model, LINEAR_HEAD, 0), B);
    floatX *host = (floatX *)checked_calloc((size_t)B * Vp, sizeof(floatX));
    buffer_download(host, model->acts.logits, (size_t)B * Vp * sizeof(floatX));
    for (int b = 0; b < B; b++)
        for (int v = 0; v < V; v++) logits[(size_t)b * V + v] = (float)host[(size_t)b * Vp + v];
    free(host);
}

// Row `from` of x, with rows of C elements, becomes row 0.
static void row_to_front(floatX *x, int from, int C) {
    if (from) cache_load(x, x, from, 1, from + 1, C);
}

// Processes the prompt of a sequence, piece by piece, and computes the logits [V] after its last token. With YOCO the
// upper half runs for that token alone.
static void model_prefill(void *generator, int sequence, const int *tokens, int count, float *logits) {
    Model *model = (Model *)generator;
    const ModelConfig *c = &model->plan.config;
    Activations *a = &model->acts;
    int lower = c->yoco ? yoco_layer(c) : c->L, last = 0;
    assert(count > 0 && count <= model->plan.T && sequence < model->plan.B);
    for (int first = 0; first < count; first += PREFILL_ROWS) {
        Rows r = {1, min_int(PREFILL_ROWS, count - first), first, sequence};
        buffer_upload(a->inputs, tokens + first, (size_t)r.T * sizeof(int));
        buffer_upload(a->first, &first, sizeof(int));
        model_forward_embedding(model, r.T);
        model_forward_layers(model, 0, lower, r, NULL, NULL);
        if (c->yoco) yoco_forward(model, block_input(model, lower), r);
        last = r.T - 1;
    }
    if (c->yoco) {
        Rows r = {1, 1, count - 1, sequence};
        row_to_front(a->layers[lower - 1].x_out, last, c->C);
        row_to_front(a->layers[lower].norm1, last, c->C);
        row_to_front(a->kv, last, model->plan.cross_dims.kv_ld);
        buffer_upload(a->first, &r.first, sizeof(int));
        for (int l = lower; l < c->L; l++) block_forward(model, l, block_input(model, l), r);
        last = 0;
    }
    model_logits(model, a->norm_final + (size_t)last * c->C, 1, logits);
}

// Processes one more token of each of the sequences 0 .. B-1, at position first[b]; logits [B][V].
static void model_decode(void *generator, const int *tokens, const int *first, int B, float *logits) {
    Model *model = (Model *)generator;
    Rows r = {B, 1, 0, 0};
    assert(B <= model->plan.B);
    buffer_upload(model->acts.inputs, tokens, (size_t)B * sizeof(int));
    buffer_upload(model->acts.first, first, (size_t)B * sizeof(int));
    model_forward_embedding(model, B);
    model_forward_layers(model, 0, model->plan.config.L, r, NULL, NULL);
    model_logits(model, model->acts.norm_final, B, logits);
}

static Generator model_generator(Model *sampling_model, double temperature, int top_k, int stop) {
    const ModelPlan *plan = &sampling_model->plan;
    Generator g = {sampling_model, model_prefill, model_decode, plan->B, plan->T,
                   plan->config.V, temperature,   top_k,        stop};
    return g;
}

// ---------------------------------------------------------------------------------------------------
// A run

enum { AGREED_NUMBERS = 4, SAMPLE_TOKENS = 200 };

enum { LOSS_STEPS = 16 }; // steps whose mean loss tells whether the run has diverged

typedef struct {
    Options options;
    Mode mode;
    TrainerState state;
    Model model;
    Model sampling_model; // the same parameters with memory for generation; only with --sample-every
    DataLoader train, val;
    ChoiceTasks choices;                   // --eval-choices
    Synthetic synthetic;                   // --eval-needles, --eval-shots
    uint64_t fingerprint, val_fingerprint; // of their data
    RunTokenizer tokenizer;
    Prompts prompts;     // --prompts
    Sequence *sequences; // their tokens
    Log log;             // rank 0 with --out; else closed
    double start_loss;   // mean of the last LOSS_STEPS before this start, else of the run's first; NaN: not yet known
    int stop;            // the signal that one of the ranks got, as of the last step; 0: none
    Checkpointer checkpointer;
    double *agreed;        // [ranks + 1][AGREED_NUMBERS + buckets]: what the ranks gather once per step
    int micro_steps;       // per update
    int *inputs, *targets; // (B, T) on the host
    int *starts;           // (B, T): where the document of each input begins; NULL without --doc-mask
    LayerStats *stats;     // [L], of the last micro-step of a step that logs them; NULL when none does
    double peak_gflops;    // of matrix products
    const char *peak_from; // source of that number
    uint64_t gemm_table;   // digest of the table of --tune-gemm
} Run;

static const ModelPlan *run_sampling_plan(const Run *run) {
    return run->sampling_model.plan.config.L ? &run->sampling_model.plan : NULL;
}
static bool is_rank0(void) { return comm_rank() == 0; } // writes the log and prints
static bool every(int64_t step, int64_t period) { return period > 0 && step % period == 0; }

// Step 1 shows the statistics of the initial weights.
static bool stats_due(const Options *o, int64_t step) {
    return o->stats_every > 0 && (step == 1 || every(step, o->stats_every));
}

// ---------------------------------------------------------------------------------------------------
// Checkpoints

static CheckpointBuffers checkpoint_buffers(const Model *model) {
    CheckpointBuffers b;
    memset(&b, 0, sizeof(b));
    b.config = &model->plan.config;
    b.tensors = &model->plan.tensors;
    b.params = model->own_params ? model->own_params : model->params;
    b.master = model->master;
    b.m = model->m;
    b.v = model->v;
    b.sharding = &model->plan.sharding;
    return b;
}

// Whether the last step had a finite loss and gradient, and the last validation a finite loss.
static bool run_is_finite(const Run *run) {
    return run->state.guard.not_finite_in_row == 0 && !run->state.val_not_finite_since;
}

// --check-ranks-every: the parameters that all ranks have, and without --zero the moments, are the same bits.
static void run_check_ranks(Run *run) {
    Model *model = &run->model;
    RankBuffer buffers[] = {{"", model->params, sizeof(floatX)},
                            {"exp_avg.", model->m, sizeof(real)},
                            {"exp_avg_sq.", model->v, sizeof(real)},
                            {"master.", model->master, sizeof(real)}};
    if (comm_ranks() == 1) return;
    watch_phase(PHASE_CHECK);
    model_await_params(model);
    int count = model->plan.sharding.level ? 1 : model->master ? 4 : 3;
    ranks_check(&model->plan, buffers, count, run->state.step);
}

// continues: training continues, so that the checkpoint may be written in the background.
static void run_checkpoint(Run *run, bool continues) {
    if (!run->options.out) return;
    checkpointer_finish(&run->checkpointer);
    if (run->options.check_ranks_every) run_check_ranks(run);
    watch_phase(PHASE_SAVE);
    model_await_params(&run->model);
    checkpointer_save(&run->checkpointer, checkpoint_buffers(&run->model), &run->tokenizer, continues,
                      run_is_finite(run), run->fingerprint, dataloader_identity(&run->train));
}

// --rollback: back to an earlier checkpoint when too many of the last steps were bad.
static void run_roll_back(Run *run) {
    CheckpointBuffers buffers = checkpoint_buffers(&run->model);
    if (!rollback_due(&run->state.rollback, run->state.step) || !run->options.out) return;
    checkpointer_finish(&run->checkpointer);
    model_await_params(&run->model);
    if (!checkpointer_roll_back(&run->checkpointer, &buffers)) return;
    params_renew_all(&run->model);
    weight_copies_forget(&run->model.copies, &run->model.plan);
    run_checkpoint(run, false);
}

// ---------------------------------------------------------------------------------------------------
// Validation, evaluation, samples

// Windows that a validation reads: the first ones of the shards.
static uint64_t run_validation_windows(const Run *run) {
    uint64_t windows = (uint64_t)run->options.val_steps * (uint64_t)run->model.plan.B;
    return windows < run->val.window_count ? windows : run->val.window_count;
}

// Mean loss over the first windows of the validation shards, the same ones each time. by_position (T) or NULL: adds the
// mean loss of each position.
static double run_validate(Run *run, double *by_position) {
    Model *model = &run->model;
    int B = model->plan.B, T = model->plan.T;
    uint64_t windows = run_validation_windows(run), mine = (uint64_t)comm_rank() * (uint64_t)B;
    double sum = 0;
    watch_phase(PHASE_VALIDATION);
    dataloader_start(&run->val, 0);
    for (uint64_t first = 0; first < windows; first += (uint64_t)B * (uint64_t)comm_ranks()) {
        uint64_t done = first + mine;
        if (done >= windows) {
            params_follow_forward(model);
            break;
        }
        int rows = T * (windows - done < (uint64_t)B ? (int)(windows - done) : B); // the last batch may be partial
        dataloader_next(&run->val, run->inputs, run->targets, run->starts);
        model_read_batch(model, run->inputs, run->targets, run->starts, rows);
        buffer_zero(model->acts.losses, (size_t)rows * sizeof(real));
        model_forward(model, rows / T, T);
        model_classify(model, rows, 0);
        sum += model_loss_sum(model, rows);
        if (by_position) model_losses_by_position(model, by_position, rows, T, (double)windows);
    }
    comm_sum_f64(&sum, 1);
    if (by_position) comm_sum_f64(by_position, T);
    return sum / ((double)windows * T);
}

// The validation loss, and the multiple-choice tasks.
static void run_log_validation(Run *run) {
    if (run->val.shard_count) {
        double loss = run_validate(run, NULL);
        trainer_state_validated(&run->state, loss);
        log_validation(&run->log, run->state.step, loss, run_validation_windows(run), run->val_fingerprint);
    }
    EvaluationModel m = evaluation_model(&run->model);
    watch_phase(PHASE_VALIDATION);
    for (int i = 0; i < run->choices.count; i++) {
        ChoiceScore score = choices_measure(&m, &run->choices.tasks[i]);
        log_choices(&run->log, run->state.step, &score);
    }
}

// --quantize: the validation loss for each SPEC, into list. Returns their number; the model is as before.
static int run_validate_quantized(Run *run, Quantization *list) {
    Model *model = &run->model;
    const size_t bytes = model->plan.params_bytes;
    int count = 0;
    bool valid;
    if (!run->options.quantize) return 0;
    void *weights = checked_calloc(bytes, 1);
    buffer_download(weights, model->params, bytes);
    for (const char *next = run->options.quantize; next; count++) {
        model->quant = list[count] = quantization_next(&next, &valid);
        quantize_weights(&model->quant, &model->plan, model->params);
        weight_copies_forget(&model->copies, &model->plan);
        list[count].loss = run_validate(run, NULL);
        buffer_upload(model->params, weights, bytes);
    }
    free(weights);
    memset(&model->quant, 0, sizeof(model->quant));
    weight_copies_forget(&model->copies, &model->plan);
    return count;
}

static void run_evaluate(Run *run) {
    Model *model = &run->model;
    const Options *o = &run->options;
    Quantization quantized[QUANTIZATION_LIMIT];
    int quantized_count = run_validate_quantized(run, quantized);
    double *by_position = (double *)checked_calloc(model->plan.T, sizeof(double));
    double loss = run_validate(run, by_position);
    Evaluation e = {evaluation_model(model),
                    &run->val,
                    loss,
                    quantized,
                    quantized_count,
                    by_position,
                    run_validation_windows(run),
                    run->val_fingerprint,
                    o->seed,
                    o->eval_out,
                    o->dump_attention,
                    &run->choices,
                    &run->synthetic};
    evaluate(&e);
    free(by_position);
    CHECK(isfinite(loss), "the validation loss is not finite: the model's weights are broken or training diverged");
}

static void run_probe(Run *run, const char *checkpoint) {
    Model *model = &run->model;
    Probe p;
    memset(&p, 0, sizeof(p));
    p.model = evaluation_model(model);
    p.params = model->params;
    p.val = &run->val;
    p.tokenizer = run->tokenizer.tokenizer;
    p.windows = (int)min_size(PROBE_WINDOWS, (size_t)run_validation_windows(run));
    p.seed = run->options.seed;
    p.checkpoint = checkpoint;
    p.out = run->options.probe;
    probe(&p);
}

static Generator run_generator(const Run *run, Model *model) {
    const Options *o = &run->options;
    int stop = o->stop_at_separator ? run->tokenizer.separator : -1;
    return model_generator(model, o->temperature, (int)o->top_k, stop);
}

// Prints, and writes to a log or NULL, `count` tokens that a model for generation appends to the prompt; false when its
// logits are not finite.
static bool run_generate(const Run *run, Model *model, int count, uint64_t key, Log *log) {
    Generator generator = run_generator(run, model);
    return print_generated(&generator, &run->tokenizer, count, key, log, run->state.step);
}

static void run_print_sample(Run *run) {
    model_await_params(&run->model);
    if (!is_rank0()) return;
    progress_break();
    printf("--- sample after step %" PRId64 "\n", run->state.step);
    uint64_t key = random_mix(random_key("sample", run->options.seed) + (uint64_t)run->state.step);
    bool whole = run_generate(run, &run->sampling_model, SAMPLE_TOKENS, key, &run->log);
    printf(whole ? "---\n" : "--- cut: the model's logits are not finite\n");
    progress_flush();
}

// ---------------------------------------------------------------------------------------------------
// A training step

// What all ranks must know of a step: the loss, the norm of the gradients, whether one of them is to stop, whether a
// checkpoint is due, and the stage of the one that is being written. All ranks compute the same from the same numbers.
static void run_agree(Run *run, StepResult *r) {
    Model *model = &run->model;
    int ranks = comm_ranks(), count = model->plan.sharding.count, width = AGREED_NUMBERS + count;
    double *own = run->agreed, *all = own + width, loss = 0;
    watch_phase(PHASE_GRADIENTS);
    own[0] = model_loss_sum(model, model->plan.B * model->plan.T);
    own[1] = stop_signal_read();
    own[2] = checkpointer_minutes_passed(&run->checkpointer);
    own[3] = background_progress();
    model_own_squares(model, own + AGREED_NUMBERS);
    comm_gather(all, own, (size_t)width * sizeof(double));
    run->checkpointer.stage = INT_MAX;
    for (int q = 0; q < ranks; q++) {
        const double *theirs = all + q * width;
        run->checkpointer.stage = min_int(run->checkpointer.stage, (int)theirs[3]);
        loss += theirs[0];
        run->stop = max_int(run->stop, (int)theirs[1]);
        for (int b = 0; b < count; b++) model->squares[b * ranks + q] = theirs[AGREED_NUMBERS + b];
    }
    run->checkpointer.due = all[2] != 0;
    r->loss = loss / (double)run->options.total_batch;
    router_measure(&model->router, &model->plan, &model->acts, run->options.total_batch);
    r->routed = model->plan.config.E > 0;
    r->router_aux = model->router.aux;
    r->router_z = model->router.z;
    r->grad_norm = squares_norm(model, 0, model->plan.sharding.groups - 1);
}

// One step: gradients of micro_steps micro-batches, then the update, unless it is to be skipped.
static StepResult run_step(Run *run) {
    const Options *o = &run->options;
    Model *model = &run->model;
    TrainerState *s = &run->state;
    int B = model->plan.B, T = model->plan.T, N = B * T;
    double start = now_seconds(), waited = comm.wait_seconds;
    StepResult r;
    watch_step(s->step + 1);
    model->stats_seconds = 0;
    buffer_zero(model->acts.losses, (size_t)N * sizeof(real));
    for (int micro = 0; micro < run->micro_steps; micro++) {
        bool stats = run->stats && micro == run->micro_steps - 1 && stats_due(o, s->step + 1);
        watch_phase(PHASE_DATA);
        dataloader_next(&run->train, run->inputs, run->targets, run->starts);
        model->stats = stats ? run->stats : NULL;
        model->micro_step = micro;
        model->reduce = comm_ranks() > 1 && (micro + 1 == run->micro_steps || model->own_grads);
        model_micro_step(model, run->inputs, run->targets, run->starts, B, T, (double)o->total_batch);
    }
    s->next_window = dataloader_position(&run->train);
    s->step++;
    s->tokens += o->total_batch;
    r.lr = schedule_lr((Schedule)o->schedule, s->step, o->steps, o->warmup, o->lr, o->min_lr_ratio);
    run_agree(run, &r);
    r.decision = spike_guard_decide(&s->guard, r.loss, r.grad_norm, o->skip_loss_z, o->skip_grad_z);
    watch_phase(PHASE_UPDATE);
    if (r.decision.apply) model_update(model, o, r.lr, ++s->updates, r.grad_norm);
    bool spike = r.decision.loss_z >= SPIKE_Z || r.decision.grad_z >= SPIKE_Z;
    rollback_record_step(&s->rollback, s->step, spike || !r.decision.apply);
    watch_phase(PHASE_LOG);
    r.seconds = now_seconds() - start - model->stats_seconds;
    r.comm_seconds = comm.wait_seconds - waited;
    return r;
}

// The records and lines of a step. seconds_left: of the run.
static void run_log_step(Run *run, const StepResult *r, double seconds_left) {
    const ModelPlan *plan = &run->model.plan;
    const TrainerState *s = &run->state;
    StepWork work = {training_flops(plan, plan->B, plan->T) * run->micro_steps, run->peak_gflops,
                     run->options.total_batch};
    log_step(&run->log, s->step, run->options.steps, s->tokens, r, work, seconds_left);
    log_step_events(&run->log, s->step, r, s->guard.not_finite_in_row);
}

// --stats-every: of the last micro-batch of the step and of its gradients.
static void run_log_stats(Run *run) {
    for (int l = 0; l < run->model.plan.config.L; l++)
        log_layer_stats(&run->log, run->state.step, l, &run->stats[l], squares_norm(&run->model, 1 + l, 1 + l));
}

// ---------------------------------------------------------------------------------------------------
// The training loop

// Logs that the run has diverged; good: the checkpoint from which it can continue.
static void run_log_diverged(Run *run, char good[PATH_SIZE]) {
    checkpointer_find_good(&run->checkpointer, good);
    log_stopped(&run->log, run->state.step, "not_finite", good);
    log_sync(&run->log);
}

static void run_stop_when_nothing_is_finite(Run *run) {
    int64_t in_row = run->state.guard.not_finite_in_row;
    if (in_row < NOT_FINITE_LIMIT) return;
    char good[PATH_SIZE];
    run_log_diverged(run, good);
    CHECK(false,
          "steps %" PRId64 " to %" PRId64
          " had no finite loss and gradient, the run is stopped; try a lower --lr, a longer --warmup, "
          "--grad-clip or --skip-grad-z from an earlier checkpoint; last good checkpoint: %s",
          run->state.step - in_row + 1, run->state.step, good);
}

// Whether a signal asks the run to stop. Called once per step: the checkpoint, the end of the loop and the exit status
// follow from one answer, and a signal that arrives a moment later counts for the next step. With several ranks all
// stop at the same step, the one in which they have agreed on it.
static bool run_stop(Run *run) {
    if (comm_ranks() == 1) run->stop = stop_signal_read();
    else if (run->stop && is_rank0())
        warn("signal: all ranks have finished step %" PRId64 "%s; a second signal ends the run at once",
             run->state.step, run->options.out ? ", and a checkpoint is saved" : "; without --out nothing is saved");
    return run->stop != 0;
}

// A run that ends before its last step. Returns the exit status.
static int run_stopped(Run *run) {
    const Options *o = &run->options;
    const char *why = run->stop ? strsignal(run->stop) : "--stop-after";
    log_stopped(&run->log, run->state.step, why, NULL);
    print_stopped(run->state.step, o->steps, why, o->out);
    print_spikes(&run->state.guard);
    return !run->stop ? EXIT_DONE : o->out ? EXIT_SIGNALLED : EXIT_FAILED;
}

// Called at the start and after each step.
static void run_note_start_loss(Run *run) {
    const SpikeDetector *d = &run->state.guard.loss;
    if (isnan(run->start_loss) && d->count >= LOSS_STEPS) run->start_loss = spike_mean(d, LOSS_STEPS);
}

// Warns about a run that has diverged, and returns its exit status. It has diverged when the last step or validation is
// not finite: then the exit status is not EXIT_DONE. It also has when the mean of the last losses is more than 1 above
// start_loss, or above ln V, the loss of an untrained model. Losses of single batches may differ by more.
static int run_end(Run *run, int status) {
    double untrained = log(run->model.plan.config.V), last = spike_mean(&run->state.guard.loss, LOSS_STEPS);
    char good[PATH_SIZE];
    progress_flush();
    if (!run_is_finite(run)) {
        if (status == EXIT_DONE) run_log_diverged(run, good);
        else checkpointer_find_good(&run->checkpointer, good);
        warn_not_finite(run->state.step, good);
        return status == EXIT_DONE ? EXIT_FAILED : status;
    }
    if (last > fmin(run->start_loss, untrained) + 1) warn_loss_rose(last, run->start_loss, untrained);
    return status;
}

static void run_train_begin(Run *run) {
    const Options *o = &run->options;
    print_training(run->state.step, o, comm_ranks(), run->micro_steps, run->peak_gflops, run->peak_from);
    if (o->stats_every && !o->out)
        warn("--stats-every without --out: statistics are not computed, because there is no log to write them to");
    if (run->state.step == 0) run_log_validation(run);
    run->checkpointer.saved_at = now_seconds();
    dataloader_start(&run->train, run->state.next_window);
    run->start_loss = NAN;
    run_note_start_loss(run);
}

// Steps until the last one, --stop-after or a signal. Returns the exit status.
static int run_train(Run *run) {
    const Options *o = &run->options;
    const TrainerState *s = &run->state;
    double busy = 0; // seconds in steps; validation and samples come on top and are few
    int64_t done = 0;
    run_train_begin(run);
    int missed = matmul_tune_missed(); // by a validation
    for (bool stop = false; !stop;) {
        StepResult r = run_step(run);
        busy += r.seconds;
        run_note_start_loss(run);
        run_log_step(run, &r, busy / (double)++done * (double)(o->steps - s->step));
        if (done == 1 && o->tune_gemm && matmul_tune_missed() > missed)
            warn("--tune-gemm %s lacks %d of the matrix products of a step, for which the library's first choice is "
                 "used",
                 o->tune_gemm, matmul_tune_missed() - missed);
        checkpointer_advance(&run->checkpointer);
        if (done == 1) memory_log(&run->log, s->step, &run->model.plan, run_sampling_plan(run));
        if (run->stats && stats_due(o, s->step)) run_log_stats(run);
        if (every(s->step, o->check_ranks_every)) run_check_ranks(run);
        run_stop_when_nothing_is_finite(run);
        run_roll_back(run);
        bool last = s->step == o->steps;
        if (last || every(s->step, o->val_every)) run_log_validation(run);
        if (every(s->step, o->sample_every)) run_print_sample(run);
        stop = run_stop(run) || last || s->step == o->stop_after;
        bool finite = s->guard.not_finite_in_row == 0; // --keep must not delete a good checkpoint for a bad one
        bool due = every(s->step, o->checkpoint_every) || run->checkpointer.due;
        if (stop || (finite && due)) run_checkpoint(run, !stop);
    }
    if (s->step < o->steps) return run_end(run, run_stopped(run));
    print_done(done, busy, run->train.wait_seconds, run->checkpointer.stall_seconds,
               comm_ranks() > 1 ? comm.wait_seconds : NAN);
    print_spikes(&s->guard);
    return run_end(run, EXIT_DONE);
}

// ---------------------------------------------------------------------------------------------------
// Opening and closing a run

static void warn_of_attention(void) {
    for (const char *text = attention_warning(); text; text = attention_warning())
        if (is_rank0()) warn("%s", text);
}

// The plans of the model and of the one for samples; nothing is allocated.
static void run_plan(Run *run, const ModelConfig *config) {
    const Options *o = &run->options;
    int B = (int)o->batch_size, T = (int)o->seq_len, ranks = options_ranks(o);
    if (run->mode == MODE_GENERATE) B = o->prompts ? min_int(B, run->prompts.count) : 1;
    model_plan(&run->model, config, B, T, mode_rows[run->mode].purpose, (Recompute)o->recompute, comm_rank(), ranks,
               (int)o->zero);
    bool samples = o->sample_every && (run->mode == MODE_TRAIN || run->mode == MODE_DRY_RUN);
    if (samples)
        model_plan(&run->sampling_model, config, 1, T, FOR_GENERATION, RECOMPUTE_NOTHING, comm_rank(), ranks,
                   (int)o->zero);
    if (o->device) {
        const DevicePeak *gpu = device_peak_named(o->device);
        plan_for_device(&run->model.plan, gpu, o);
        if (samples) plan_for_device(&run->sampling_model.plan, gpu, o);
        return;
    }
    if (attention_backend() && is_rank0()) fprintf(options_notes(o), "attention: %s\n", attention_backend());
    warn_of_attention();
}

// Refuses a run for which the memory is too little, before any rank allocates. loaded: a checkpoint directory, or NULL.
static void run_check_memory(Run *run, const char *loaded) {
    memory_announce(&run->model.plan, run_sampling_plan(run), options_most_zero(&run->options));
    if (loaded) checkpoint_check_weights(loaded, &run->model.plan.tensors);
    if (run->options.memory_check) {
        memory_check_host(&run->model.plan, run_sampling_plan(run));
        memory_check_device(&run->model.plan, run_sampling_plan(run));
    }
    comm_barrier(); // all ranks have looked at what is available
}

// Attention of the last batch of a validation, which may be partial.
static void run_plan_last_batch(Run *run) {
    ModelPlan *plan = &run->model.plan;
    int B = (int)(run_validation_windows(run) % (uint64_t)plan->B);
    if (B == 0) return;
    for (int l = 0; l < plan->config.L; l++) {
        AttentionShape shape = key_set(plan, l, 0, B, plan->T, 0).shape;
        attention_prepare(shape, false, false);
        plan->workspace_bytes =
            max_size(plan->workspace_bytes, attention_workspace_bytes(shape, omp_get_max_threads()));
    }
    warn_of_attention();
}

// The tokenizer and the data that the mode reads.
static void run_open_data(Run *run, const char *loaded) {
    const Options *o = &run->options;
    const ModeRow *mode = &mode_rows[run->mode];
    int V = run->model.plan.config.V;
    run_tokenizer_open(&run->tokenizer, o, loaded, !mode->prompts);
    if (o->prompts)
        run->sequences = prompts_sequences(&run->prompts, &run->tokenizer, V, (int)o->seq_len, (int)o->generate,
                                           random_key("generate", o->seed));
    bool generates = mode->prompts || run_sampling_plan(run);
    if (generates && run->tokenizer.implied && run->tokenizer.separator < 0 && is_rank0())
        warn("generated text begins after token 0, because the token that separates documents is unknown: give "
             "--separator ID, or --prompt-tokens");
    if (mode->train_data) run_data_open(&run->train, o, "train-data", o->train_data, V, true);
    if (mode->val_data && o->val_data) run_data_open(&run->val, o, "val-data", o->val_data, V, false);
    if (run->val.shard_count) run_plan_last_batch(run);
    if (run->mode == MODE_TRAIN || run->mode == MODE_EVAL)
        run->choices = choices_open_all(o->eval_choices, V, (int)o->seq_len, run->tokenizer.tokenizer);
    if (run->mode == MODE_EVAL)
        synthetic_open(&run->synthetic, o, &run->val, V, run->tokenizer.tokenizer, run->tokenizer.separator);
}

// The peak that the speed of a step is compared with: the manufacturer's, or that of a matrix product measured now.
static void run_find_peak(Run *run) {
    run->peak_gflops = run->options.measure_peak ? 0 : ops_rated_gflops(&run->peak_from);
    if (run->peak_gflops > 0) return;
    run->peak_gflops = matmul_peak_gflops();
    run->peak_from = "a large matrix product, measured";
}

static void run_alloc(Run *run) {
    const Options *o = &run->options;
    const ModelPlan *plan = &run->model.plan;
    int ranks = plan->sharding.ranks;
    size_t N = (size_t)plan->B * plan->T, agreed = (size_t)(AGREED_NUMBERS + plan->sharding.count);
    model_alloc(&run->model, NULL);
    ops_init(plan->workspace_bytes);
    comm_alloc(plan->sharding.largest * sizeof(grad_t), plan->sharding.level);
    if (run_sampling_plan(run)) model_alloc(&run->sampling_model, &run->model);
    run->agreed = (double *)checked_calloc((size_t)(ranks + 1) * agreed, sizeof(double));
    run->inputs = (int *)checked_calloc(N, sizeof(int));
    run->targets = (int *)checked_calloc(N, sizeof(int));
    if (o->doc_mask) run->starts = (int *)checked_calloc(N, sizeof(int));
    if (run->mode == MODE_TRAIN && o->stats_every && o->out && is_rank0())
        run->stats = (LayerStats *)checked_calloc(plan->config.L, sizeof(LayerStats));
    run->micro_steps = (int)(o->total_batch / ((int64_t)N * ranks));
    run->model.router.aux_weight = o->router_aux;
    run->model.router.z_weight = o->router_z;
    run->model.router.bias_rate = o->router_bias ? o->router_bias_rate : 0;
}

// --tune-gemm: measures the matrix products of two micro-steps: one writes the gradients, one adds to them. With
// --zero 3 the other ranks compute them too.
static char *run_measure_gemm(Run *run, size_t *size) {
    Model *model = &run->model;
    int B = model->plan.B, T = model->plan.T;
    double start = now_seconds();
    if (is_rank0()) matmul_tune_measure();
    for (model->micro_step = 0; model->micro_step < 2; model->micro_step++)
        model_micro_step(model, run->inputs, run->targets, run->starts, B, T, B * T);
    model->micro_step = 0;
    buffer_zero(model->acts.losses, (size_t)(B * T) * sizeof(real));
    return !is_rank0() ? NULL : gemm_table_write(run->options.tune_gemm, now_seconds() - start, size);
}

static void run_tune_gemm(Run *run) {
    const char *path = run->options.tune_gemm;
    size_t size = 0;
    char *table = is_rank0() ? gemm_table_read(path, &size) : NULL;
    bool measure = is_rank0() && !table;
    if (params_two_layers(&run->model.plan)) comm_broadcast(&measure, sizeof(measure));
    if (measure) table = run_measure_gemm(run, &size);
    run->gemm_table = gemm_table_use(path, table, size);
}

// Opens what the mode reads and allocates what it computes with: everything before the first step.
static void run_open(Run *run, const ModelConfig *config, const Resume *resume) {
    const Options *o = &run->options;
    const char *loaded = resume_weights(resume, o);
    run->mode = options_mode(o);
    run->checkpointer.options = o;
    run->checkpointer.state = &run->state;
    run->checkpointer.log = &run->log;
    bool trains = run->mode == MODE_TRAIN;
    if (trains) signal(SIGPIPE, SIG_IGN); // progress_flush
    if (o->prompts) run->prompts = prompts_read(o->prompts);
    run_plan(run, config);
    if (run->mode == MODE_DRY_RUN) return;
    run_check_memory(run, loaded);
    run_open_data(run, loaded);
    if (trains) run_find_peak(run); // while memory is free
    run_alloc(run);
    if (trains) run->fingerprint = dataloader_fingerprint(&run->train);
    if (run->val.shard_count) run->val_fingerprint = dataloader_fingerprint(&run->val);
    run_data_compare(run->fingerprint, run->val.window_count, run->val_fingerprint);
    TrainerState *s = &run->state;
    if (o->rollback) rollback_parse(o->rollback, &s->rollback.count, &s->rollback.steps);

    CheckpointBuffers buffers = checkpoint_buffers(&run->model);
    bool resumes = trains && resume->state;
    if (loaded) checkpoint_load_weights(loaded, &buffers, resumes);
    else model_init(&run->model.plan, buffers.params, buffers.master, o->seed);
    params_renew_all(&run->model);
    if (o->tune_gemm && mode_rows[run->mode].purpose == FOR_TRAINING) run_tune_gemm(run);
    if (!resumes) return;
    trainer_state_resume(s, resume->state, resume->path);
    run_data_check_resumed(&run->train, run->fingerprint, resume->state, resume->path, o);
}

static void run_close(Run *run) {
    comm_barrier(); // parameters of the last update may still be on their way
    background_close();
    if (run->train.shard_count) dataloader_close(&run->train);
    if (run->val.shard_count) dataloader_close(&run->val);
    choices_close_all(&run->choices);
    synthetic_close(&run->synthetic);
    log_close(&run->log);
    free_sequences(run->sequences, run->prompts.count);
    prompts_close(&run->prompts);
    run_tokenizer_close(&run->tokenizer);
    if (run_sampling_plan(run)) model_free(&run->sampling_model, false);
    model_free(&run->model, true);
    ops_free();
    free(run->inputs);
    free(run->targets);
    free(run->starts);
    free(run->agreed);
    free(run->stats);
    options_free(&run->options);
}

// ---------------------------------------------------------------------------------------------------
// Modes and main

// --dump-grads: one forward and backward over the first B*T + 1 tokens in file order.
static void dump_gradients(Run *run) {
    const Options *o = &run->options;
    Model *model = &run->model;
    int B = model->plan.B, T = model->plan.T;
    size_t N = (size_t)B * T;
    const Corpus *first = &run->train.corpora[0];
    int *tokens = (int *)checked_calloc(N + 1, sizeof(int));
    dataloader_read_first_tokens(&run->train, tokens, N + 1);
    CHECK(!run->starts || run->train.corpus_count == 1 || first->token_count > N,
          "--dump-grads --doc-mask: the first corpus has %zu tokens, and %zu are read: give one corpus",
          first->token_count, N + 1);
    for (int b = 0; run->starts && b < B; b++) {
        size_t at = (size_t)b * T;
        document_starts(run->starts + at, tokens + at, T, first->separator);
    }
    model_micro_step(model, tokens, tokens + 1, run->starts, B, T, (double)N);
    double loss = model_loss_sum(model, (int)N) / (double)N;
    checkpoint_save_gradients(o->dump_grads, &model->plan.tensors, model->grads, loss);
    printf("loss %.9g, gradients written to %s\n", signless_nan(loss), o->dump_grads);
    CHECK(isfinite(loss), "the loss is not finite: the model's weights are broken or training diverged");
    free(tokens);
}

// Windows that the run reads in all its steps: those that it has read, and what the other steps read now.
static double run_windows(const Run *run) {
    const Options *o = &run->options;
    double left = (double)(o->steps - run->state.step);
    return (double)run->state.next_window + left * (double)o->total_batch / (double)o->seq_len;
}

static void run_open_log(Run *run, const Resume *resume, int argc, char **argv) {
    const ModelPlan *plan = &run->model.plan;
    double per_token = training_flops(plan, plan->B, plan->T) / ((double)plan->B * plan->T);
    RunFacts facts = {argc,
                      argv,
                      &run->options,
                      plan->tensors.parameter_count,
                      model_parameter_count(&plan->config, true),
                      plan->config.F,
                      plan->config.FE,
                      per_token,
                      &run->train,
                      run->options.val_data ? &run->val : NULL,
                      &run->choices,
                      run->fingerprint,
                      run_windows(run),
                      run->peak_gflops,
                      run->peak_from,
                      run->gemm_table};
    cJSON *description = run_description(&facts);
    start_open_log(&run->log, &run->options, resume, run->state.step, description);
    cJSON_Delete(description);
}

static int mode_train(Run *run, const Resume *resume, int argc, char **argv) {
    const Options *o = &run->options;
    int64_t end = o->stop_after && o->stop_after < o->steps ? o->stop_after : o->steps, step = run->state.step;
    if (step >= end) {
        printf("%s is at step %" PRId64 " and the run ends after step %" PRId64
               ": nothing to do; a larger --%s continues it\n",
               o->out, step, end, end < o->steps ? "stop-after" : "steps");
        CHECK(run_is_finite(run), "%s: the loss or gradient of step %" PRId64 " is not finite: the run has diverged",
              o->out, step);
        return EXIT_DONE;
    }
    stop_signals_catch(comm_ranks() > 1 ? NULL : stop_notice(o->out)); // run_stop prints it for several ranks
    if (o->out && is_rank0()) run_open_log(run, resume, argc, argv);   // the last that may refuse to start
    dataloader_print(&run->train, run_windows(run));
    options_print(o);
    if (options_match(o)) print_match(&run->model.plan, o);
    comm_barrier();
    int status = run_train(run);
    progress_flush();
    return status;
}

static void mode_generate(Run *run) {
    const Options *o = &run->options;
    Model *model = &run->model;
    if (o->prompts) {
        Generator g = run_generator(run, model);
        print_cache(&model->plan);
        int broken = print_results(&g, run->sequences, &run->prompts, &run->tokenizer);
        CHECK(broken == 0,
              "the model's logits are not finite after %d of %d prompts: its weights are broken or training diverged",
              broken, run->prompts.count);
        return;
    }
    bool whole = run_generate(run, model, (int)o->generate, random_key("generate", o->seed), NULL);
    CHECK(whole, "the model's logits are not finite: its weights are broken or training diverged");
}

// Does what the options ask for. Returns the exit status.
static int run_mode(Run *run, const Resume *resume, int argc, char **argv) {
    switch (run->mode) {
    case MODE_TRAIN: return mode_train(run, resume, argc, argv);
    case MODE_DUMP_GRADS: dump_gradients(run); break;
    case MODE_GENERATE: mode_generate(run); break;
    case MODE_EVAL: run_evaluate(run); break;
    case MODE_PROBE: run_probe(run, resume_weights(resume, &run->options)); break;
    default: print_dry_run(&run->model.plan, run_sampling_plan(run), &run->options);
    }
    return EXIT_DONE;
}

// The exit status of a program that has printed everything.
static int end_of_output(int status) {
    CHECK(fflush(stdout) == 0 && !ferror(stdout), "cannot write to stdout: %s", strerror(errno));
    return status;
}

int main(int argc, char **argv) {
    program_begin();
    if (options_answer(argc, argv, launch_rank() == 0)) return end_of_output(EXIT_DONE);
    environment_reexecute(argv); // once, with the variables that libraries read before main
    environment_refuse();
    stop_signals_block();
    static Run run; // too large for the stack
    Resume resume;
    comm_open(options_start_timeout(argc, argv));
    if (comm_rank() != 0) stdout_discard(); // rank 0 prints for all
    ModelConfig config = start_configure(&run.options, &resume, argc, argv);
    run.log.lock = resume.lock;
    run_open(&run, &config, &resume);
    int status = run_mode(&run, &resume, argc, argv);
    run_close(&run);
    resume_free(&resume);
    comm_close();
    program_exit(end_of_output(status));
}
