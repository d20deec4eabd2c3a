/*
train_diffv2.c: pretraining of decoder language models with differential attention, on the CPU.

The file reads top to bottom: the model, forward, backward (the gradients of the forward's lines, in reverse order),
update, generation, a run with its training step and training loop, main. Operations are called by name; operations.h in
the folders of llmc/ops declares them. Nothing here dereferences a device buffer. train_diffv2.cu includes this file
with CUDA operations; predict_diffv2.c includes it, up to the update, with operations that record their cost
(RECORDED_OPS).

  B sequences of T positions are a micro-batch of N = B*T rows. A step sums the gradients of `micro_steps` micro-batches
  and does one update. C hidden size, L layers, V vocabulary, F MLP width, D head width, NH output heads, NKV key/value
  heads, NQ query heads. [] shapes are row-major.
*/
#include "llmc/base/common.h"
#include "llmc/experts/all_operations.h"
#include "llmc/model/cached_attention.h"
#include "llmc/model/layer_tensors.h"
#include "llmc/options/options_table.h"
#include "llmc/evaluate/generation_model.h"
#include "llmc/evaluate/layer_stats.h"

// ---------------------------------------------------------------------------------------------------
// The model

typedef struct {
    ModelPlan plan;   // configuration, sizes and layouts
    ModelState state; // parameters, gradients, optimizer state
    Activations acts;
    char *activations_memory;
    LayerTensors *layers; // [L]: parameters and their gradients
    Mlp *mlps;            // [L]
    Linear head;
    GenerationModel generation;
    LayerStats *stats;    // [L]: filled by the backward, layer by layer; NULL: not computed
    double stats_seconds; // time spent on them
    RouterLosses router;  // --router-aux, --router-z, and their values in the last update
    real z_loss;          // --z-loss
} Model;

// Allocates the buffers of the plan. shared: the model whose parameters this model uses, or NULL.
static void model_alloc(Model *model, const Model *shared) {
    state_alloc(&model->state, &model->plan, shared ? &shared->state : NULL);
    model->activations_memory = activations_alloc(&model->acts, &model->plan);
    model->state.rank_sums = model->acts.grad_squares;
    model->layers = layer_tensors_alloc(&model->mlps, &model->state, &model->acts);
    model->head = linear_of(&model->state, LINEAR_HEAD, 0);
    model->router = router_losses(&model->plan, &model->acts);
}

static void model_free(Model *model, bool owns_params) {
    state_free(&model->state, owns_params);
    buffer_free(model->activations_memory);
    free(model->acts.layers);
    free(model->layers);
    free(model->mlps);
    plan_free(&model->plan);
    memset(model, 0, sizeof(*model));
}

// ---------------------------------------------------------------------------------------------------
// Forward

static void qk_norm_forward(Model *model, int l, int N) {
    const AttentionDims *dims = plan_dims(&model->plan, l);
    const LayerTensors *p = &model->layers[l];
    const LayerActivations *layer = &model->acts.layers[l];
    int QD = dims->QD, ld = dims->fused_ld, kept_ld = dims->rope_heads * QD;
    real eps = (real)model->plan.config.rms_norm_eps;
    if (p->q_norm) head_norm_forward(layer->q, layer->qk, p->q_norm, N, dims->NQ, QD, ld, kept_ld, eps);
    if (p->k_norm) head_norm_forward(layer->k, layer->k_kept, p->k_norm, N, dims->NK, QD, ld, kept_ld, eps);
}

// heads, lse = attention(q, k, v) of every query head, for each set of keys
static void heads_forward(Model *model, int l, Rows rows) {
    for (int set = 0; set < model->plan.config.attention->key_sets; set++) {
        AttentionTensors t = attention_tensors(&model->plan, &model->acts, l, set, rows.B, rows.T, 0);
        if (t.shape.sparse.blocks) sparse_attention_forward(t.out, t.lse, t.q, t.k, t.v, NULL, 0, t.shape);
        else attention_forward(t.out, t.lse, t.q, t.k, t.v, t.shape);
    }
}

// Writes lambda for each row and head, unless it is a projection of the input. The factor of the noise head is
// s(lambda): lambda itself, or its sigmoid.
static void lambda_forward(Model *model, int l, int N) {
    const LayerTensors *p = &model->layers[l];
    floatX *lambda = model->acts.layers[l].lambda;
    size_t count = (size_t)N * model->plan.dims.OH;
    switch (model->plan.config.attention->lambda) {
    case LAMBDA_ONE: fill_forward(lambda, 1, count); break;
    case LAMBDA_LAYER: lambda_learned_forward(lambda, p->lambda, count); break;
    case LAMBDA_EXP:
        lambda_exp_forward(lambda, p->lambda_q1, p->lambda_k1, p->lambda_q2, p->lambda_k2, model->plan.config.D,
                           (real)lambda_init(l), count);
        break;
    default: break;
    }
}

// combined = signal heads - s(lambda) * noise heads of attention; in variants without noise heads, all heads
static void combined_forward(Model *model, int l, Rows rows) {
    const AttentionVariant *variant = model->plan.config.attention;
    const AttentionDims *dims = plan_dims(&model->plan, l);
    const LayerActivations *layer = &model->acts.layers[l];
    AttentionTensors t = attention_tensors(&model->plan, &model->acts, l, 0, rows.B, rows.T, 0);
    bool pairs = model->plan.diff_attention;
    if (model->plan.purpose == FOR_GENERATION) cached_attention_forward(&model->plan, &model->acts, l, rows);
    else {
        key_blocks_complete(&model->plan, &model->acts, l, layer->kv, 0, rows.T, rows);
        key_blocks_select(&model->plan, &model->acts, l, rows);
        if (!pairs) heads_forward(model, l, rows);
    }
    if (variant->sink)
        sink_forward(layer->heads, layer->lse, model->layers[l].sinks, rows.B, rows.T, dims->NQ, dims->DV);
    if (pairs)
        (t.shape.sparse.blocks ? sparse_diff_attention_forward : diff_attention_forward)(
            layer->combined, t.out, t.lse, t.q, t.k, t.v, layer->lambda, dims->lambda_ld, t.shape, variant->factor);
    else if (dims->groups.noise)
        diff_combine_forward(layer->combined, layer->heads, layer->lambda, rows.B * rows.T, dims->OH, dims->DV,
                             dims->lambda_ld, dims->groups, variant->factor);
}

// Applies the norm before o_proj, if the variant has one.
static void subnorm_forward(Model *model, int l, int N) {
    const AttentionDims *dims = &model->plan.dims;
    const LayerActivations *layer = &model->acts.layers[l];
    const AttentionVariant *variant = model->plan.config.attention;
    double eps = variant->norm == NORM_HEAD ? HEAD_NORM_EPS : model->plan.config.rms_norm_eps;
    if (dims->norm_count)
        rmsnorm_forward(activation(layer->normed, NULL), layer->rstd_sub, layer->combined.data, model->layers[l].subln,
                        N * dims->norm_count, dims->norm_width, (real)eps);
    if (variant->norm == NORM_HEAD)
        scale_inplace(layer->normed, (real)(1 - lambda_init(l)), (size_t)N * (dims->OH * dims->DV));
}

// The attention half of a block reads norm1, the norm of its input x, and writes x_mid and norm2. Traits of the variant
// select the operations; the output of an omitted operation is the same memory as its input.
static void block_forward_attention(Model *model, int l, Rows rows) {
    const AttentionDims *dims = plan_dims(&model->plan, l);
    const LayerTensors *p = &model->layers[l];
    const LayerActivations *layer = &model->acts.layers[l];
    const Activations *acts = &model->acts;
    real eps = (real)model->plan.config.rms_norm_eps;
    int B = rows.B, T = rows.T, N = B * T, C = model->plan.config.C, ld = dims->fused_ld, width = dims->OH * dims->DV;
    linear_forward(layer->fused, layer->norm1, &p->qkvg, N);
    qk_norm_forward(model, l, N);
    rope_forward(layer->fused, acts->rope, B, T, dims->rope_heads, dims->QD, ld, dims->QD, acts->start_position);
    lambda_forward(model, l, N);
    combined_forward(model, l, rows);
    subnorm_forward(model, l, N);
    if (dims->gate_width)
        gate_forward(layer->attn_out, layer->normed, layer->gate, N, dims->OH, dims->DV, ld, dims->gate_width);
    else if (!layer->combined.max) absmax_update(layer->attn_out, N, width, width);
    linear_forward(acts->branch, layer->attn_out, &p->o, N);
    residual_rmsnorm_forward(layer->x_mid, layer->norm2, layer->rstd2, layer->x, acts->branch, p->norm2, N, C, eps);
}

// A block reads the residual stream x and its norm, norm1, and writes x_out and the norm that follows the block.
static void block_forward(Model *model, int l, Rows rows) {
    const ModelConfig *c = &model->plan.config;
    const LayerTensors *p = &model->layers[l];
    const LayerActivations *layer = &model->acts.layers[l];
    floatX *branch = model->acts.branch;
    int N = rows.B * rows.T;
    block_forward_attention(model, l, rows);
    mlp_forward(branch, layer->norm2, p->mlp, N);
    layer_params(&model->state, l + 1);
    residual_rmsnorm_forward(layer->x_out, layer->norm_next, layer->rstd_next, layer->x_mid, branch, p->norm_next, N,
                             c->C, (real)c->rms_norm_eps);
}

// YOCO: computes the keys and values that the upper half of the layers reads from the output of the lower half.
static void yoco_forward(Model *model, Rows rows) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *dims = &model->plan.cross_dims;
    Activations *acts = &model->acts;
    int l = yoco_layer(c), N = rows.B * rows.T, capacity = cache_capacity(&model->plan, l),
        heads_width = dims->NK * dims->QD;
    const LayerTensors *p = &model->layers[l];
    real eps = (real)c->rms_norm_eps;
    rmsnorm_forward(acts->kv_norm, acts->kv_rstd, acts->layers[l].x, p->kv_norm, N, c->C, eps);
    linear_forward(acts->kv, acts->kv_norm, &p->kv, N);
    if (p->kv_k_norm)
        head_norm_forward(acts->kv, acts->kv_kept, p->kv_k_norm, N, dims->NK, dims->QD, dims->kv_ld, heads_width, eps);
    rope_forward(acts->kv, acts->rope, rows.B, rows.T, dims->NK, dims->QD, dims->kv_ld, dims->QD, acts->start_position);
    if (model->plan.purpose != FOR_GENERATION) return;
    floatX *cache = acts->layers[l].kv + (size_t)rows.sequence * capacity * dims->kv_rows;
    cache_store(cache, acts->kv, acts->start_position, rows.B, rows.T, capacity, dims->kv_rows, dims->kv_ld);
    key_blocks_complete(&model->plan, acts, l, cache, 0, capacity, rows);
}

// Computes the embeddings of the N tokens in acts.inputs, and their norm: the input of the first block.
static void model_forward_embedding(void *self, int N) {
    Model *model = (Model *)self;
    ModelState *state = &model->state;
    Activations *acts = &model->acts;
    const ModelConfig *c = &model->plan.config;
    activations_begin(acts, &model->plan);
    forward_begin(state);
    layer_params(state, -1);
    embedding_forward(acts->embedded, acts->inputs, param(state, T_EMBED, 0), N, c->C);
    layer_params(state, 0);
    rmsnorm_forward(acts->layers[0].norm1, acts->layers[0].rstd1, acts->embedded, model->layers[0].norm1, N, c->C,
                    (real)c->rms_norm_eps);
}

// Runs layers from .. to-1, and computes YOCO's keys and values after its lower half. Calls visit after each layer,
// unless it is NULL.
static void model_forward_layers(void *self, int from, int to, Rows rows, LayerVisit visit, void *visitor) {
    Model *model = (Model *)self;
    for (int l = from; l < to; l++) {
        layer_params(&model->state, l);
        block_forward(model, l, rows);
        if (l + 1 == yoco_layer(&model->plan.config)) yoco_forward(model, rows);
        layer_done(&model->state, l, 1);
        if (visit) visit(visitor, l);
    }
}

// Runs B whole sequences of T positions, whose tokens are in acts.inputs, up to the final norm, and makes the LM head
// available. Measurements may run more and shorter sequences than the plan.
static void model_forward(Model *model, int B, int T, LayerVisit visit, void *visitor) {
    assert(B * T <= model->plan.rows && T <= model->plan.config.T && model->plan.purpose != FOR_GENERATION);
    Rows rows = {B, T, 0, 0};
    model_forward_embedding(model, B * T);
    model_forward_layers(model, 0, model->plan.config.L, rows, visit, visitor);
}

// Adds the loss of each row to acts.losses, logit_rows rows at a time. dloss is the weight of one row in the minimized
// loss. If it is not 0, also computes the gradients of the LM head and, into dnorm, of the final norm's output. Both
// include --z-loss.
static void model_classify(Model *model, int N, real dloss) {
    const ModelPlan *plan = &model->plan;
    Activations *acts = &model->acts;
    for (int n = 0; n < N; n += plan->logit_rows) {
        int count = min_int(plan->logit_rows, N - n);
        size_t at = (size_t)n * plan->config.C;
        Activation input = activation(acts->norm_final + at, NULL);
        linear_forward(acts->logits, input, &model->head, count);
        cross_entropy(acts->losses + n, acts->log_z + n, acts->logits, acts->targets + n, count, plan->config.V,
                      plan->Vp, dloss, model->z_loss);
        if (dloss != 0)
            linear_backward(acts->dnorm + at, activation(acts->logits, NULL), input, &model->head, count,
                            n > 0 || grads_add(&model->state));
    }
}

// ---------------------------------------------------------------------------------------------------
// Backward: the gradients of the forward's lines in reverse order; each comment quotes the forward line

// q, k = head_norm(q, k); the gradients of q and k are replaced in place
static void qk_norm_backward(Model *model, int l, int N) {
    const AttentionDims *dims = plan_dims(&model->plan, l);
    const LayerTensors *p = &model->layers[l];
    const LayerActivations *layer = &model->acts.layers[l];
    int QD = dims->QD, ld = dims->fused_ld, kept_ld = dims->rope_heads * QD;
    real eps = (real)model->plan.config.rms_norm_eps;
    if (p->q_norm)
        head_norm_backward(layer->dfused.data, p->dq_norm, layer->qk, p->q_norm, N, dims->NQ, QD, ld, kept_ld, eps);
    if (p->k_norm)
        head_norm_backward(layer->dk, p->dk_norm, layer->k_kept, p->k_norm, N, dims->NK, QD, ld, kept_ld, eps);
}

static void lambda_backward(Model *model, int l, int N) {
    const LayerTensors *p = &model->layers[l];
    const floatX *dlambda = model->acts.layers[l].dlambda;
    size_t count = (size_t)N * model->plan.dims.OH;
    switch (model->plan.config.attention->lambda) {
    // lambda = the learned number of the layer
    case LAMBDA_LAYER: lambda_learned_backward(p->dlambda, dlambda, count); break;
    // lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init
    case LAMBDA_EXP:
        lambda_exp_backward(p->dlambda_q1, p->dlambda_k1, p->dlambda_q2, p->dlambda_k2, dlambda, p->lambda_q1,
                            p->lambda_k1, p->lambda_q2, p->lambda_k2, model->plan.config.D, count);
        break;
    default: break; // constant, or columns of the fused rows
    }
}

// Computes the gradients of queries, keys, values and lambda from dcombined.
static void combined_backward(Model *model, int l, int B, int T) {
    const AttentionVariant *variant = model->plan.config.attention;
    const AttentionDims *dims = plan_dims(&model->plan, l);
    const LayerTensors *p = &model->layers[l];
    const LayerActivations *layer = &model->acts.layers[l];
    Activations *acts = &model->acts;
    AttentionTensors t = attention_tensors(&model->plan, acts, l, 0, B, T, 0);
    bool sparse = t.shape.sparse.blocks > 0;
    if (model->plan.diff_attention) {
        (sparse ? sparse_diff_attention_backward : diff_attention_backward)(
            t.dq, t.dk, t.dv, layer->dlambda, t.dout, acts->dcombined, layer->combined.data, t.out, t.lse, t.q, t.k,
            t.v, layer->lambda, dims->lambda_ld, t.shape, variant->factor);
        return;
    }
    // combined = signal head - s(lambda) * noise head
    if (dims->groups.noise)
        diff_combine_backward(acts->dheads, layer->dlambda, acts->dcombined, layer->heads, layer->lambda, B * T,
                              dims->OH, dims->DV, dims->lambda_ld, dims->groups, variant->factor);
    // heads *= exp(lse) / (exp(lse) + exp(sink)); attention_backward reads the lse that includes the sink
    if (variant->sink == SINK_LEARNED)
        sink_backward(p->dsinks, acts->dheads, layer->heads, layer->lse, p->sinks, B, T, dims->NQ, dims->DV);
    // heads, lse = attention(q, k, v), for each set of keys
    for (int set = 0; set < variant->key_sets; set++) {
        t = attention_tensors(&model->plan, acts, l, set, B, T, 0);
        (sparse ? sparse_attention_backward : attention_backward)(t.dq, t.dk, t.dv, t.dout, t.out, t.lse, t.q, t.k, t.v,
                                                                  t.shape, set > 0);
    }
}

// Computes the gradient of the fused rows before the rotation from dattn_out. YOCO's upper half also adds to dkv_sum.
static void heads_backward(Model *model, int l, int B, int T) {
    const AttentionVariant *variant = model->plan.config.attention;
    const AttentionDims *dims = plan_dims(&model->plan, l);
    const LayerTensors *p = &model->layers[l];
    const LayerActivations *layer = &model->acts.layers[l];
    Activations *acts = &model->acts;
    int N = B * T, ld = dims->fused_ld, OH = dims->OH, DV = dims->DV;
    // attn_out = normed * sigmoid(gate)
    if (dims->gate_width)
        gate_backward(acts->dnormed, layer->dgate, acts->dattn_out, layer->normed, layer->gate, N, OH, DV, ld,
                      dims->gate_width);
    // normed = rmsnorm(combined), times 1 - lambda_init in DIFF V1
    if (variant->norm == NORM_HEAD) scale_inplace(acts->dnormed, (real)(1 - lambda_init(l)), (size_t)N * (OH * DV));
    if (dims->norm_count)
        rmsnorm_backward(activation(acts->dcombined, NULL), p->dsubln, acts->dnormed, layer->combined.data, p->subln,
                         layer->rstd_sub, N * dims->norm_count, dims->norm_width, false);
    // combined = signal heads - s(lambda) * noise heads; heads = attention(q, k, v)
    combined_backward(model, l, B, T);
    lambda_backward(model, l, N);
    // the layers of YOCO's upper half read the same keys and values
    if (layer_cross(&model->plan.config, l))
        add_to_sum(acts->dkv_sum, acts->dkv.data, (size_t)N * dims->kv_ld, l < model->plan.config.L - 1);
}

// kv = rope(kv(rmsnorm(x))); dkv is the gradient of kv, summed over the upper half of the layers. Adds to acts.dx.
static void yoco_backward(Model *model, int B, int T) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *dims = &model->plan.cross_dims;
    Activations *acts = &model->acts;
    int l = yoco_layer(c), N = B * T, heads_width = dims->NK * dims->QD;
    const LayerTensors *p = &model->layers[l];
    real eps = (real)c->rms_norm_eps;
    rope_backward(acts->dkv.data, acts->rope, B, T, dims->NK, dims->QD, dims->kv_ld, dims->QD, NULL);
    if (p->kv_k_norm)
        head_norm_backward(acts->dkv.data, p->dkv_k_norm, acts->kv_kept, p->kv_k_norm, N, dims->NK, dims->QD,
                           dims->kv_ld, heads_width, eps);
    absmax_update(acts->dkv, N, dims->kv_rows, dims->kv_ld);
    linear_backward(acts->dnorm, acts->dkv, acts->kv_norm, &p->kv, N, grads_add(&model->state));
    rmsnorm_backward(acts->layers[l - 1].dx_out, p->dkv_norm, acts->dnorm, acts->layers[l].x, p->kv_norm, acts->kv_rstd,
                     N, c->C, true);
}

// --recompute: recomputes the activations that were not kept. The operations of the forward give the same bits. The
// activations of the last block are still in memory.
static void block_recompute(Model *model, int l, int B, int T) {
    const LayerTensors *p = &model->layers[l];
    const LayerActivations *layer = &model->acts.layers[l];
    int N = B * T, C = model->plan.config.C;
    real eps = (real)model->plan.config.rms_norm_eps;
    Rows rows = {B, T, 0, 0};
    if (model->plan.recompute == RECOMPUTE_NOTHING || l == model->plan.config.L - 1) return;
    rmsnorm_forward(layer->norm1, layer->rstd1, layer->x, p->norm1, N, C, eps);
    if (model->plan.recompute == RECOMPUTE_BLOCK) block_forward_attention(model, l, rows);
    else {
        subnorm_forward(model, l, N);
        rmsnorm_forward(layer->norm2, layer->rstd2, layer->x_mid, p->norm2, N, C, eps);
    }
    mlp_recompute(layer->norm2, p->mlp, N);
}

// On entry acts.dx is the gradient of x_out, on return the gradient of x. The residual stream passes it on unchanged;
// the norms add to it.
static void block_backward(Model *model, int l, int B, int T) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *dims = plan_dims(&model->plan, l);
    const LayerTensors *p = &model->layers[l];
    const LayerActivations *layer = &model->acts.layers[l];
    Activations *acts = &model->acts;
    int N = B * T, C = c->C;
    bool add = grads_add(&model->state);
    // YOCO: the padding columns of this half's fused rows still hold gradients of the other half
    if (c->yoco && (l == c->L - 1 || l == c->L / 2 - 1))
        buffer_zero(acts->dfused, (size_t)N * dims->fused_ld * sizeof(floatX));

    // x_out = x_mid + mlp(norm2)
    mlp_backward(acts->dnorm, layer->dx_out, layer->norm2, p->mlp, &model->router, N, add);
    rmsnorm_backward(layer->dx_mid, p->dnorm2, acts->dnorm, layer->x_mid, p->norm2, layer->rstd2, N, C, true);

    // x_mid = x + o(attn_out), attn_out = heads(rope(qk_norm(fused(norm1))))
    linear_backward(acts->dattn_out, layer->dx_mid, layer->attn_out, &p->o, N, add);
    heads_backward(model, l, B, T);
    qk_norm_backward(model, l, N);
    absmax_update(layer->dfused, N, dims->fused_width, dims->fused_ld);
    linear_backward(acts->dnorm, layer->dfused, layer->norm1, &p->qkvg, N, add);
    rmsnorm_backward(layer->dx_in, p->dnorm1, acts->dnorm, layer->x, p->norm1, layer->rstd1, N, C, true);
    if (l == yoco_layer(c)) yoco_backward(model, B, T);
}

static void model_gather_stats(Model *model, int l, int B, int T) {
    ops_wait(); // so that only the statistics are timed
    double start = now_seconds();
    model->stats[l] = layer_stats(&model->plan, &model->acts, l, B, T);
    model->stats_seconds += now_seconds() - start;
}

// Writes the gradients, or adds to them. Requires model_forward and model_classify with dloss != 0 on the same rows.
static void model_backward(Model *model, int B, int T) {
    ModelState *state = &model->state;
    Activations *acts = &model->acts;
    int N = B * T, C = model->plan.config.C, L = model->plan.config.L;
    // norm_final = rmsnorm(x_out of the last block)
    rmsnorm_backward(acts->layers[L - 1].dx_out, grad(state, T_NORM_FINAL, 0), acts->dnorm, acts->layers[L - 1].x_out,
                     param(state, T_NORM_FINAL, 0), acts->rstd_final, N, C, false);
    grads_close(state, L);
    for (int l = L - 1; l >= 0; l--) {
        layer_params(state, l);
        block_recompute(model, l, B, T);
        if (model->stats) model_gather_stats(model, l, B, T);
        grads_open(state, l);
        block_backward(model, l, B, T);
        layer_done(state, l, -1);
        grads_close(state, l);
    }
    // embedded = embedding(inputs); a tied LM head has already added to the gradient
    if (!model->plan.config.tied) grads_open(state, -1);
    embedding_backward(grad(state, T_EMBED, 0), acts->dx, acts->inputs, N, C);
    grads_close(state, -1);
}

// Uploads a batch of N rows. document_starts: the position in its sequence at which the document of each input begins,
// or NULL; attention reads no earlier keys. Positions count from the start of the sequence, since rotary scores depend
// on distances only.
static void model_read_batch(Model *model, const int *inputs, const int *targets, const int *document_starts, int N) {
    size_t bytes = (size_t)N * sizeof(int);
    buffer_upload(model->acts.inputs, inputs, bytes);
    buffer_upload(model->acts.targets, targets, bytes);
    model->acts.first_key = document_starts ? model->acts.document_starts : NULL;
    if (!document_starts) return;
    buffer_upload(model->acts.document_starts, document_starts, bytes);
    attention_documents(model->acts.documents, model->acts.document_starts, document_starts, N, model->plan.T);
}

// Runs one micro-step of an update over total_rows rows: adds its part of the gradient of the mean loss of all rows.
static void model_micro_step(Model *model, const int *inputs, const int *targets, const int *document_starts, int B,
                             int T, double total_rows) {
    ModelState *state = &model->state;
    model_read_batch(model, inputs, targets, document_starts, B * T);
    watch_stage(STAGE_FORWARD);
    model_forward(model, B, T, NULL, NULL);
    router_count(&model->router, model->mlps, B * T, total_rows, state->micro_step == 0);
    watch_stage(STAGE_BACKWARD);
    if (model->plan.config.tied) grads_open(state, -1); // a tied head adds to the gradient of the embedding
    grads_open(state, model->plan.config.L);
    model_classify(model, B * T, (real)(1 / total_rows));
    model_backward(model, B, T);
}

// ---------------------------------------------------------------------------------------------------
// Update

// The factor that scales gradients down to the norm `clip`; a clip of 0 is no limit.
static double clip_factor(double grad_norm, double clip) { return clip > 0 && grad_norm > clip ? clip / grad_norm : 1; }

// Applies Muon's step to the matrices of layer l, for which muon_direction has been called.
static void model_update_matrices(Model *model, const Options *o, double lr, int l) {
    ModelState *state = &model->state;
    layer_orthogonalize(state, l, o->beta2);
    for (int i = 0; i < model->plan.tensors.span_count; i++) {
        const Tensor *tensor = &model->plan.tensors.spans[i];
        if (tensor->layer != l || !tensor->muon) continue;
        Scaling k = tensor_scaling(&model->plan.config, tensor);
        for (RankPiece piece = rank_pieces(state, tensor); rank_next(state, tensor, &piece);)
            muon_update(piece.weights, piece.master, piece.grads, piece.count, lr * piece.rate * k.rate,
                        tensor->row->decay ? o->weight_decay / k.rate : 0);
    }
}

// One optimizer step on the summed gradients, whose norm must be finite. update: the number of this update, from 1, for
// the bias correction of AdamW.
static void model_update(Model *model, const Options *o, double lr, int64_t update, double grad_norm) {
    assert(isfinite(grad_norm) && update > 0);
    ModelState *state = &model->state;
    double scale = clip_factor(grad_norm, o->grad_clip);
    for (int i = 0; i < model->plan.tensors.span_count; i++) {
        const Tensor *tensor = &model->plan.tensors.spans[i];
        Scaling k = tensor_scaling(&model->plan.config, tensor);
        for (RankPiece piece = rank_pieces(state, tensor); rank_next(state, tensor, &piece);) {
            if (tensor->row->kind == T_ROUTER_BIAS)
                router_balance(piece.weights, piece.master, router_loads(&model->router, tensor->layer),
                               model->router.bias_rate, model->plan.config.E, (int)piece.begin, (int)piece.count);
            else if (tensor->muon)
                muon_direction(piece.direction, piece.m, piece.grads, piece.count, scale, muon_momentum);
            else
                adamw_update(piece.weights, piece.master, piece.grads, piece.m, piece.v, piece.count, scale,
                             lr * piece.rate * k.rate, o->beta1, o->beta2, o->eps * k.eps,
                             tensor->row->decay ? o->weight_decay / k.rate : 0, update);
        }
        bool in_layer = tensor->layer >= 0 && tensor->layer < model->plan.config.L;
        if (model->plan.tensors.muon && in_layer && span_ends_group(&model->plan.tensors, i))
            model_update_matrices(model, o, lr, tensor->layer);
        params_updated(state, i);
    }
}

#ifndef RECORDED_OPS // predict_diffv2.c includes only the part above
#include "llmc/base/random.h"
#include "llmc/model/initial_values.h"
#include "llmc/options/environment.h"
#include "llmc/options/schedule.h"
#include "llmc/evaluate/evaluation.h"
#include "llmc/evaluate/generated_text.h"
#include "llmc/evaluate/gradient_dump.h"
#include "llmc/run/apply_changes.h"
#include "llmc/run/checkpointer.h"
#include "llmc/run/divergence.h"
#include "llmc/run/dry_run.h"
#include "llmc/run/inputs.h"
#include "llmc/run/resume.h"
#include "llmc/run/run_description.h"
#include "llmc/run/run_records.h"
#include "llmc/run/run_report.h"
#include "llmc/run/step_exchange.h"
#include "llmc/run/stop_agreement.h"
#include "llmc/run/trial.h"
#include "llmc/run/unread_data.h"

// ---------------------------------------------------------------------------------------------------
// Other uses of the forward: measurements and generation

static void model_forward_tokens(void *self, const int *tokens, int B, int T, LayerVisit visit, void *visitor) {
    Model *model = (Model *)self;
    model_read_batch(model, tokens, tokens, NULL, B * T);
    model_forward(model, B, T, visit, visitor);
}
static void model_losses(void *self, const int *inputs, const int *targets, const int *document_starts, int B, int T) {
    Model *model = (Model *)self;
    model_read_batch(model, inputs, targets, document_starts, B * T);
    model_forward(model, B, T, NULL, NULL);
    model_classify(model, B * T, 0);
}
static void model_gradients(void *self, const int *inputs, const int *targets, const int *document_starts, int B, int T,
                            double total_rows) {
    model_micro_step((Model *)self, inputs, targets, document_starts, B, T, total_rows);
}
static EvaluationModel evaluation_model(Model *model) {
    return (EvaluationModel){&model->plan,         &model->acts, &model->state,   &model->head, NULL, model,
                             model_forward_tokens, model_losses, model_gradients, NULL,         NULL};
}

static const GenerationModel *generation_model(Model *model) {
    model->generation = (GenerationModel){
        &model->plan, &model->acts, &model->head, model, model_forward_embedding, model_forward_layers};
    return &model->generation;
}

// ---------------------------------------------------------------------------------------------------
// A run

enum { SAMPLE_TOKENS = 200, LAST_SAMPLE_TOKENS = 100 };

typedef struct {
    Options options;
    Mode mode;
    TrainerState trainer;
    Model model;
    Model sampling_model; // shares the parameters and has memory for generation; only with --sample-every
    Inputs data;
    Log log; // open on rank 0 with --out
    Checkpointer checkpointer;
    Validation validation;                   // the last one; the loss is NaN before the first
    double start_loss;                       // set by divergence_start
    int stop;                                // the signal that a rank had received at the last agreement; 0: none
    StopAgreement agreement;                 // during the measurement
    double *agreed;                          // [ranks + 1][step_exchange_count]
    int micro_steps;                         // per update
    int *inputs, *targets, *document_starts; // (B, T) on the host; document_starts: or NULL
    LayerStats *stats;                       // [L]: statistics of the last micro-step of a step that logs them; or NULL
    double *update_squares;                  // [groups]: sums of squares of the last update that was measured
    AppliedChanges changes;                  // --change
    Peak peak;
} Run;

static const ModelPlan *run_sampling_plan(const Run *run) {
    return run->sampling_model.plan.config.L ? &run->sampling_model.plan : NULL;
}
static bool is_rank0(void) { return comm_rank() == 0; } // rank 0 writes the log and prints
static bool every(int64_t step, int64_t period) { return period > 0 && step % period == 0; }

// Step 1 shows the statistics of the initial weights.
static bool stats_due(const Options *o, int64_t step) {
    return o->stats_every > 0 && (step == 1 || every(step, o->stats_every));
}

// ---------------------------------------------------------------------------------------------------
// A training step

// Exchanges the results of a step that all ranks must know.
static void run_gather_step_facts(Run *run, StepResult *result) {
    Model *model = &run->model;
    watch_stage(STAGE_GRADIENTS);
    StepExchange one = {loss_sum(&model->acts, model->plan.B * model->plan.T), stop_signal_read(),
                        checkpointer_minutes_passed(&run->checkpointer), background_progress(), run->data.train.unread};
    StepExchange all = step_exchange(&model->state, one, run->agreed);
    run->stop = max_int(run->stop, all.signal);
    run->checkpointer.due = all.due;
    run->checkpointer.stage = all.stage;
    run->data.train.any_unread = all.unread;
    router_measure(&model->router, run->options.total_batch);
    result->loss = all.loss / (double)run->options.total_batch;
    result->routed = model->plan.config.E > 0;
    result->router_aux = model->router.aux;
    result->router_z = model->router.z;
    result->grad_norm = squares_norm(&model->state, 0, model->plan.sharding.groups - 1);
}

// Measures an update that is logged or whose norm is limited (--change). Returns the factor of its learning rate.
static double run_measure_update(Run *run, StepResult *result) {
    const Options *o = &run->options;
    TrainerState *s = &run->trainer;
    bool log_stats = o->out && stats_due(o, s->step);
    double norm_limit = changes_norm(&run->changes, s->step);
    result->measured = result->decision.apply && (log_stats || norm_limit < INFINITY);
    if (!result->measured) return 1;
    ops_wait();
    double start = now_seconds();
    result->update_norm =
        update_norm_by_group(run->update_squares, &run->model.state, o, clip_factor(result->grad_norm, o->grad_clip),
                             result->lr, s->updates + 1);
    result->update_scale = fmin(1, norm_limit / result->update_norm);
    if (log_stats) run->model.stats_seconds += now_seconds() - start;
    return result->update_scale;
}

// One step computes the gradients of micro_steps micro-batches and applies the update, unless the update is skipped. If
// a rank cannot read a batch (any_unread), the gradients are discarded and the state does not change.
static StepResult run_step(Run *run) {
    const Options *o = &run->options;
    Model *model = &run->model;
    TrainerState *s = &run->trainer;
    int B = model->plan.B, T = model->plan.T, N = B * T;
    double start = now_seconds(), waited = comm.wait_seconds;
    StepResult result;
    watch_step(s->step + 1);
    model->stats_seconds = 0;
    buffer_zero(model->acts.losses, (size_t)N * sizeof(real));
    for (int micro = 0; micro < run->micro_steps; micro++) {
        bool last = micro + 1 == run->micro_steps;
        watch_stage(STAGE_DATA);
        dataloader_read(&run->data.train, run->inputs, run->targets, run->document_starts);
        model->stats = last && stats_due(o, s->step + 1) ? run->stats : NULL;
        grads_begin(&model->state, micro, last);
        model_micro_step(model, run->inputs, run->targets, run->document_starts, B, T, (double)o->total_batch);
    }
    run_gather_step_facts(run, &result);
    if (run->data.train.any_unread) return result;
    s->next_window = dataloader_position(&run->data.train);
    s->step++;
    s->tokens += o->total_batch;
    LearningRate rate = options_learning_rate(o);
    result.lr = schedule_lr(&rate, s->step);
    result.decision = spike_guard_decide(&s->guard, result.loss, result.grad_norm, o->skip_loss_z, o->skip_grad_z);
    watch_stage(STAGE_UPDATE);
    changes_update(&run->changes, &model->state, s->step);
    double scaled = result.lr * run_measure_update(run, &result);
    if (result.decision.apply) model_update(model, o, scaled, ++s->updates, result.grad_norm);
    bool spike = result.decision.loss_z >= SPIKE_Z || result.decision.grad_z >= SPIKE_Z;
    rollback_record_step(&s->rollback, s->step, spike || !result.decision.apply);
    watch_stage(STAGE_LOG);
    result.seconds = now_seconds() - start - model->stats_seconds;
    result.comm_seconds = comm.wait_seconds - waited;
    return result;
}

// ---------------------------------------------------------------------------------------------------
// The training loop

// Writes the records and prints the lines of a step. seconds_left: estimated time until the run ends.
static void run_log_step(Run *run, const StepResult *result, double seconds_left) {
    const ModelPlan *plan = &run->model.plan;
    const TrainerState *s = &run->trainer;
    double flops = training_flops(plan, plan->B, plan->T) * run->micro_steps;
    log_step(&run->log, &run->options, s->step, s->tokens, result, flops, run->peak, seconds_left);
    log_step_events(&run->log, s->step, result, s->guard.not_finite_in_row);
    log_changes(&run->log, s->step, &run->changes, &run->data.train);
}

// --stats-every: logs statistics of the step's last micro-batch, of the gradients, and of the update, if there was one.
static void run_log_stats(Run *run, const StepResult *result) {
    for (int l = 0; l < run->model.plan.config.L; l++)
        log_layer_stats(&run->log, run->trainer.step, l, &run->stats[l], squares_norm(&run->model.state, 1 + l, 1 + l),
                        result->measured ? sqrt(run->update_squares[1 + l]) : NAN);
}

static EvaluationModel run_evaluation_model(Run *run) {
    EvaluationModel m = evaluation_model(&run->model);
    m.token_bytes = run->data.token_bytes;
    return m;
}

static EvaluationModel run_measured_model(Run *run) {
    EvaluationModel m = run_evaluation_model(run);
    m.abandons = stop_agreement, m.agreement = &run->agreement;
    stop_agreement_begin(&run->agreement, run->stop, run->agreed);
    return m;
}

// Measures and logs the validation loss and the multiple-choice tasks.
static void run_log_validation(Run *run) {
    if (run->data.val.shard_count) {
        EvaluationModel m = run_measured_model(run);
        uint64_t windows = validation_windows(&run->data, &run->options);
        Validation result = validate(&m, &run->data.val, windows, NULL);
        run->stop = run->agreement.signal;
        run->trainer.measurement_due = run->stop != 0;
        if (run->stop) return;
        if (run->data.val.any_unread) {
            run->trainer.measurement_due = true;
            end_unread(&run->checkpointer, &run->data.val, &run->changes);
        }
        run->validation = result;
        trainer_state_validated(&run->trainer, result.loss);
        log_validation(&run->log, run->trainer.step, &result, windows, run->data.val_fingerprint);
    }
    watch_stage(STAGE_VALIDATION);
    for (int i = 0; i < run->data.choices.count; i++) {
        EvaluationModel m = run_measured_model(run);
        ChoiceScore score = choices_measure(&m, &run->data.choices.tasks[i]);
        run->stop = run->agreement.signal;
        run->trainer.measurement_due = run->stop != 0;
        if (run->stop) return;
        log_choices(&run->log, run->trainer.step, &score);
    }
}

// Prints generated text. log: where a record of it is written; NULL: nowhere.
static void run_print_sample(Run *run, Generator *g, int count, Log *log) {
    progress_break();
    printf("--- sample after step %" PRId64 "\n", run->trainer.step);
    uint64_t key = random_mix(random_key("sample", run->options.seed) + (uint64_t)run->trainer.step);
    g->abandons = stop_signal_arrived;
    StopReason why = print_generated(g, &run->data.tokenizer, count, key, log, run->trainer.step);
    printf("%s\n", why == NOT_STOPPED          ? "--- abandoned after a signal"
                   : why == STOPPED_NOT_FINITE ? "--- cut: the model's logits are not finite"
                                               : "---");
    run->trainer.measurement_due = why == NOT_STOPPED;
    progress_flush();
}

static bool validation_due(const Options *o, int64_t step) {
    return step == 0 || step == o->steps || every(step, o->val_every);
}
static bool sample_due(const Options *o, int64_t step) { return step > 0 && every(step, o->sample_every); }

// Validates and samples, if due, before the first step and after each step. After a signal, a resume repeats it.
static void run_measure(Run *run) {
    TrainerState *s = &run->trainer;
    s->measurement_due = false;
    if (validation_due(&run->options, s->step)) run_log_validation(run);
    bool due = sample_due(&run->options, s->step);
    if (due && run->stop) s->measurement_due = true;
    if (!due || run->stop) return;
    params_await(&run->model.state);
    Generator g =
        generator_of(generation_model(&run->sampling_model), run->options.temperature, (int)run->options.top_k, -1);
    if (is_rank0()) run_print_sample(run, &g, SAMPLE_TOKENS, &run->log);
    double largest[2] = {(double)stop_signal_read(), (double)s->measurement_due};
    stop_agree_largest(run->agreed, largest); // the other ranks wait for rank 0
    run->stop = (int)largest[0], s->measurement_due = largest[1] != 0;
}

// Whether this start repeats a measurement that a signal aborted.
static bool run_measures_again(const Run *run) {
    const Options *o = &run->options;
    int64_t step = run->trainer.step;
    return run->trainer.measurement_due && (validation_due(o, step) || sample_due(o, step));
}

// Whether a signal asks the run to stop. Called once per step, so that the checkpoint, the end of the loop and the exit
// status follow from one answer; a signal that arrives later counts for the next step. Several ranks stop at the same
// step, in which they agree on it.
static bool run_stop(Run *run) {
    if (comm_ranks() == 1) run->stop = stop_signal_read();
    else if (run->stop && is_rank0())
        warn("signal: all ranks have finished step %" PRId64 "%s; a second signal ends the run at once",
             run->trainer.step, run->options.out ? ", and a checkpoint is saved" : "; without --out nothing is saved");
    return run->stop != 0;
}

// Reports a run that ends before its last step. Returns the exit status.
static int run_stopped(Run *run) {
    const Options *o = &run->options;
    const char *why = run->stop ? strsignal(run->stop) : "--stop-after";
    log_stopped(&run->log, run->trainer.step, why, NULL);
    print_stopped(run->trainer.step, o->steps, why, o->out);
    print_spikes(&run->trainer.guard);
    return !run->stop ? EXIT_DONE : o->out ? EXIT_SIGNALLED : EXIT_FAILED;
}

// A sample at the end of a run whose tokens are text. The model has no memory for generation, unless --sample-every.
static void run_print_last_sample(Run *run) {
    const Options *o = &run->options;
    const RunTokenizer *tokenizer = &run->data.tokenizer;
    if (!tokenizer->tokenizer || o->zero == 3 || sample_due(o, run->trainer.step)) return;
    params_await(&run->model.state);
    EvaluationModel forward = evaluation_model(&run->model);
    int rows = min_int(run->model.plan.T, (int)round_up((size_t)tokenizer->prompt_length + LAST_SAMPLE_TOKENS, 64));
    UncachedModel uncached = {generation_model(&run->model), &forward, (int *)checked_calloc(rows, sizeof(int)), rows};
    Generator g = uncached_generator(&uncached, o->temperature, (int)o->top_k);
    if (is_rank0()) run_print_sample(run, &g, LAST_SAMPLE_TOKENS, NULL);
    free(uncached.tokens);
}

// Reports a run that has made its last step.
static void run_print_end(Run *run, const RunFacts *facts) {
    print_losses(facts, &run->validation);
    if (!run->options.out) return;
    run_print_last_sample(run);
    print_next(facts);
}

static void run_train_begin(Run *run) {
    run->validation.loss = run->validation.bits_per_byte = NAN;
    run->checkpointer.saved_step = run->trainer.step;
    if (run->trainer.step == 0 || run->trainer.measurement_due) run_measure(run);
    run->checkpointer.saved_at = now_seconds();
    dataloader_start(&run->data.train, run->trainer.next_window);
    run->start_loss = NAN;
    divergence_start(&run->start_loss, &run->trainer);
}

// Trains until the last step, --stop-after or a signal. Returns the exit status.
static int run_train(Run *run, const RunFacts *facts) {
    const Options *o = &run->options;
    const TrainerState *s = &run->trainer;
    Checkpointer *checkpointer = &run->checkpointer;
    int V = run->model.plan.config.V;
    double busy = 0; // seconds in steps, without validation and samples, which are few
    RecentSteps recent = {0, 0};
    run_train_begin(run);
    bool stop = run->stop || s->step >= options_last_step(o);
    if (stop && !run->stop) checkpointer_save(checkpointer, false); // saves the last step with its measurements
    while (!stop) {
        StepResult result = run_step(run);
        if (run->data.train.any_unread) end_unread(checkpointer, &run->data.train, &run->changes);
        busy += result.seconds;
        divergence_start(&run->start_loss, s);
        run_log_step(run, &result, recent_steps_mean(&recent, result.seconds) * (double)(o->steps - s->step));
        checkpointer_advance(checkpointer);
        if (recent.count == 1) memory_log(&run->log, s->step, &run->model.plan, run_sampling_plan(run));
        if (run->stats && stats_due(o, s->step)) run_log_stats(run, &result);
        if (every(s->step, o->check_ranks_every)) ranks_check(&run->model.state, s->step);
        divergence_stop(checkpointer);
        if (checkpointer_roll_back(checkpointer)) continue;
        run_measure(run);
        stop = run_stop(run) || s->step >= options_last_step(o);
        bool finite = s->guard.not_finite_in_row == 0; // --keep must not delete a good checkpoint for a bad one
        bool due = every(s->step, o->checkpoint_every) || checkpointer->due;
        if (stop || (finite && due)) checkpointer_save(checkpointer, !stop);
    }
    if (s->step < o->steps || s->measurement_due)
        return divergence_end(checkpointer, run->start_loss, V, run_stopped(run));
    print_done(recent.count, busy, run->data.train.wait_seconds, checkpointer->stall_seconds,
               comm_ranks() > 1 ? comm.wait_seconds : NAN);
    print_spikes(&s->guard);
    if (trainer_state_finite(s)) run_print_end(run, facts);
    return divergence_end(checkpointer, run->start_loss, V, EXIT_DONE);
}

// ---------------------------------------------------------------------------------------------------
// Opening and closing a run

// Plans the model and the model for samples; allocates nothing.
static void run_plan(Run *run, const ModelConfig *config) {
    const Options *o = &run->options;
    int B = (int)o->batch_size;
    if (run->mode == MODE_GENERATE && run->data.prompts.fd < 0) B = min_int(B, run->data.prompts.count);
    if (run->mode == MODE_GENERATE && !o->prompts) B = 1;
    Purpose purpose = mode_rows[run->mode].purpose;
    bool trains = run->mode == MODE_TRAIN || run->mode == MODE_DRY_RUN;
    plan_options(&run->model.plan, o, config, B, purpose);
    if (trains && o->sample_every) {
        plan_options(&run->sampling_model.plan, o, config, 1, FOR_GENERATION);
        size_t *bytes = &run->model.plan.workspace_bytes; // both models share it
        *bytes = max_size(*bytes, run->sampling_model.plan.workspace_bytes);
    }
    if (attention_backend() && is_rank0()) fprintf(options_notes(o), "attention: %s\n", attention_backend());
    warn_of_attention();
}

// Sets the batch and the weights of the losses from the options.
static void run_set_batch(Run *run) {
    const Options *o = &run->options;
    RouterLosses *router = &run->model.router;
    size_t N = (size_t)run->model.plan.B * run->model.plan.T;
    run->inputs = (int *)checked_calloc(N, sizeof(int));
    run->targets = (int *)checked_calloc(N, sizeof(int));
    run->document_starts = o->doc_mask ? (int *)checked_calloc(N, sizeof(int)) : NULL;
    run->micro_steps = (int)(o->total_batch / ((int64_t)N * comm_ranks()));
    run->model.z_loss = (real)o->z_loss;
    router->aux_weight = o->router_aux;
    router->z_weight = o->router_z;
    router->bias_rate = o->model.router_bias ? o->router_bias_rate : 0;
}

static void run_alloc(Run *run) {
    const Options *o = &run->options;
    Model *model = &run->model;
    const ModelPlan *plan = &model->plan;
    int ranks = comm_ranks();
    comm_alloc(plan->sharding.largest * sizeof(grad_t), plan->sharding.level,
               plan->sharding.ranks); // before the model: its test needs memory temporarily
    model_alloc(model, NULL);
    ops_init(plan->workspace_bytes);
    if (run_sampling_plan(run)) model_alloc(&run->sampling_model, model);
    run->agreed = (double *)checked_calloc((size_t)(ranks + 1) * step_exchange_count(plan), sizeof(double));
    bool log_stats = run->mode == MODE_TRAIN && o->stats_every && o->out;
    if (log_stats && is_rank0()) run->stats = (LayerStats *)checked_calloc(plan->config.L, sizeof(LayerStats));
    run->update_squares = (double *)checked_calloc(plan->sharding.groups, sizeof(double));
    run_set_batch(run);
}

// Initializes the weights, or loads them from a checkpoint, and sets where the run continues.
static void run_load(Run *run, const Resume *resume) {
    const Options *o = &run->options;
    Inputs *data = &run->data;
    TrainerState *s = &run->trainer;
    CheckpointBuffers buffers = checkpoint_buffers(&run->model.state);
    const char *loaded = resume_weights(resume, o);
    bool trains = run->mode == MODE_TRAIN, resumes = trains && resume->state;
    if (trains && o->out) checkpoint_check_size(&buffers);
    run->checkpointer = (Checkpointer){
        o, s, &run->model.state, &run->log, &data->tokenizer, &data->train, data->fingerprint, 0, 0, 0, false, 0};
    if (o->rollback) rollback_parse(o->rollback, &s->rollback.count, &s->rollback.steps);
    if (loaded) checkpoint_load_weights(loaded, &buffers, resumes);
    else model_init(&run->model.plan, buffers.params, buffers.master, o->seed);
    if (!loaded && run->mode == MODE_GENERATE)
        warn("--generate: the weights are random; --out DIR --resume or --init DIR loads trained weights");
    params_changed(&run->model.state);
    if (!resumes) return;
    trainer_state_resume(s, resume->state, resume->path);
    run_data_resume(&data->train, data->fingerprint, s, resume->state, resume->saved, resume->path, o);
}

// Opens the data of the mode, allocates memory and loads the weights: everything before the first step.
static void run_open(Run *run, const ModelConfig *config, const Resume *resume) {
    const Options *o = &run->options;
    const char *loaded = resume_weights(resume, o);
    run->mode = options_mode(o);
    bool trains = run->mode == MODE_TRAIN;
    if (trains) signal(SIGPIPE, SIG_IGN); // progress_flush
    if (o->prompts) run->data.prompts = prompts_read(o->prompts);
    start_part("plans");
    run_plan(run, config);
    int64_t step = resume_step(resume);
    if ((trains || run->mode == MODE_DRY_RUN) && step < options_last_step(o)) changes_check(o, &run->model.plan, step);
    if (run->mode == MODE_DRY_RUN) return;
    if (loaded) checkpoint_check_weights(loaded, &run->model.plan.tensors);
    memory_admit(&run->model.plan, run_sampling_plan(run), options_most_zero(o), o->memory_check);
    start_part("data");
    inputs_open(&run->data, o, run->mode, &run->model.plan, mode_rows[run->mode].prompts || run_sampling_plan(run),
                loaded);
    start_part("peak");
    if (trains) run->peak = peak_find(); // while memory is free
    start_part("memory");
    run_alloc(run);
    start_part("data");
    inputs_compare(&run->data, trains);
    start_part("weights");
    run_load(run, resume);
}

static void run_close(Run *run) {
    comm_barrier(); // parameters of the last update may still be in transfer
    background_close();
    log_close(&run->log);
    inputs_close(&run->data);
    if (run_sampling_plan(run)) model_free(&run->sampling_model, false);
    model_free(&run->model, true);
    ops_free();
    attention_close();
    free(run->inputs);
    free(run->targets);
    free(run->document_starts);
    free(run->agreed);
    free(run->stats);
    free(run->update_squares);
    changes_close(&run->changes);
    options_free(&run->options);
}

// ---------------------------------------------------------------------------------------------------
// --minutes: a trial before the first step

// Runs updates until rank 0 has measured enough. Logs and saves nothing.
static void run_trial_updates(Run *run, Trial *trial) {
    dataloader_start(&run->data.train, 0);
    for (double ends[2] = {0, 0}; ends[0] == 0;) {
        StepResult result = run_step(run);
        if (run->data.train.unread) dataloader_fail(&run->data.train, "; restore the shard");
        if (run->data.train.any_unread) comm_barrier(); // ends when the failed rank ends
        ends[0] = is_rank0() && trial_add(trial, result.seconds);
        stop_agree_largest(run->agreed, ends);
    }
    dataloader_stop(&run->data.train);
}

// Restores everything that the updates of the trial have changed.
static void run_begin_again(Run *run, const Resume *resume) {
    ModelState *state = &run->model.state;
    params_await(state);
    buffer_zero(state->m, run->model.plan.moments_bytes); // v is behind it
    memset(&run->trainer, 0, sizeof(run->trainer));
    run->data.train.wait_seconds = comm.wait_seconds = 0;
    run_load(run, resume);
}

// Sets --steps. The run then equals a run with this --steps, bit for bit.
static void run_choose_steps(Run *run, const Resume *resume) {
    const ModelPlan *plan = &run->model.plan;
    Options *o = &run->options;
    static Trial trial;
    TrialCosts costs = {0, 0, 0, 0};
    start_part("trial");
    run_trial_updates(run, &trial);
    EvaluationModel m = run_evaluation_model(run);
    double windows = (double)validation_windows(&run->data, o) + choices_windows(&run->data.choices, plan->T);
    costs.validation = windows * trial_window(&m, run->inputs, run->targets, run->document_starts);
    params_await(&run->model.state);
    if (is_rank0()) {
        costs.update = trial_update(&trial);
        Generator g = generator_of(generation_model(&run->sampling_model), 0, 0, -1);
        if (run_sampling_plan(run)) costs.sample = SAMPLE_TOKENS * trial_token(&g);
        if (o->out)
            costs.checkpoint =
                (double)(plan->params_bytes + plan->master_bytes + plan->moments_bytes) / CHECKPOINT_RATE;
    }
    double steps[2] = {is_rank0() ? (double)trial_steps(o, &costs) : 0, 0};
    stop_agree_largest(run->agreed, steps);
    options_set_steps(o, (int64_t)steps[0], comm_ranks());
    changes_check(o, plan, 0);
    printf("--minutes %g: an update took %.3g ms, the median of %d: --steps %" PRId64 "\n", o->minutes,
           1e3 * costs.update, trial_measured(&trial), o->steps);
    run_begin_again(run, resume);
}

// ---------------------------------------------------------------------------------------------------
// Modes and main

// The number of windows of the open data that the run has read and will read.
static double run_windows(const Run *run) {
    double tokens = (double)(run->options.steps - run->trainer.step) * (double)run->options.total_batch;
    return (double)run->trainer.next_window + tokens / (double)run->options.model.T;
}

static int mode_train(Run *run, const Resume *resume, int argc, char **argv) {
    const Options *o = &run->options;
    if (o->minutes > 0) {
        if (o->out && is_rank0()) log_refuse_run(o->out);
        run_choose_steps(run, resume);
    }
    int64_t end = options_last_step(o), step = run->trainer.step;
    if (step >= end && !run_measures_again(run)) {
        if (resume->lock.held) checkpoint_clean(o->out);
        printf("%s is at step %" PRId64 " and the run ends after step %" PRId64
               ": nothing to do; a larger --%s continues it\n",
               o->out, step, end, end < o->steps ? "stop-after" : "steps");
        CHECK(trainer_state_finite(&run->trainer),
              "%s: the loss or gradient of step %" PRId64 " is not finite: the run has diverged", o->out, step);
        return EXIT_DONE;
    }
    double windows = run_windows(run);
    RunFacts facts = {
        argc,    argv,     o, &run->model.plan, run_sampling_plan(run), &run->data, &run->trainer, run->micro_steps,
        windows, run->peak};
    changes_open(&run->changes, o, &run->model.plan.tensors, &run->data.train, step, run->trainer.next_window);
    stop_signals_catch(comm_ranks() > 1 ? NULL : stop_notice(o->out)); // several ranks: run_stop prints the notice
    if (o->out && is_rank0()) {                                        // the last check that can refuse to start
        cJSON *description = run_description(&facts);
        start_open_log(&run->log, o, resume, step, run_measures_again(run), description);
        cJSON_Delete(description);
    }
    print_start(&facts);
    comm_barrier();
    int status = run_train(run, &facts);
    progress_flush();
    return status;
}

static void mode_dump_gradients(Run *run) {
    EvaluationModel m = evaluation_model(&run->model);
    dump_gradients(&m, &run->data.train, run->options.dump_grads);
}

static int mode_generate(Run *run) {
    const Options *o = &run->options;
    Inputs *data = &run->data;
    Generator g = generator_of(generation_model(&run->model), o->temperature, (int)o->top_k, data->tokenizer.separator);
    uint64_t key = random_key("generate", o->seed);
    if (o->interactive) return interactive(&g, &data->tokenizer, (int)o->generate, key) ? EXIT_DONE : EXIT_FAILED;
    if (o->prompts) {
        print_cache(&run->model.plan);
        int broken = print_answers(&g, &data->answers);
        CHECK(broken == 0,
              "the model's logits are not finite after %d of %d prompts: its weights are broken or training diverged",
              broken, data->prompts.count);
        return EXIT_DONE;
    }
    StopReason why = print_generated(&g, &data->tokenizer, (int)o->generate, key, NULL, 0);
    CHECK(why != STOPPED_NOT_FINITE, "the model's logits are not finite: its weights are broken or training diverged");
    return EXIT_DONE;
}

static void mode_evaluate(Run *run) {
    const Options *o = &run->options;
    Inputs *data = &run->data;
    EvaluationModel m = run_evaluation_model(run);
    evaluate(&m, &data->val, validation_windows(data, o), data->val_fingerprint, &data->choices, o);
}

// Runs the mode. Returns the exit status.
static int run_mode(Run *run, const Resume *resume, int argc, char **argv) {
    switch (run->mode) {
    case MODE_TRAIN: return mode_train(run, resume, argc, argv);
    case MODE_DUMP_GRADS: mode_dump_gradients(run); break;
    case MODE_GENERATE: return mode_generate(run);
    case MODE_EVAL: mode_evaluate(run); break;
    default: print_dry_run(&run->model.plan, run_sampling_plan(run), &run->options);
    }
    return EXIT_DONE;
}

int main(int argc, char **argv) {
    program_begin();
    start_part("rendezvous");
    static Run run; // too large for the stack
    options_read(&run.options, argc, argv);
    if (options_help_or_version(&run.options, launch_rank() == 0)) return end_of_output(EXIT_DONE);
    environment_reexecute(argv); // once, to set variables that libraries read before main
    environment_check();
    stop_signals_block();
    Resume resume;
    CommStart comm_start = options_comm_start(&run.options);
    comm_open(&comm_start);
    start_part("options");
    if (comm_rank() != 0) stdout_discard(); // rank 0 prints for all
    ModelConfig config = start_configure(&run.options, &resume);
    run.log.lock = resume.lock;
    run_open(&run, &config, &resume);
    int status = run_mode(&run, &resume, argc, argv);
    run_close(&run);
    resume_free(&resume);
    comm_close();
    program_exit(end_of_output(status));
}
#endif
