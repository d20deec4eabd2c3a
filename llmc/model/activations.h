/*
activations.h: the activations of a model, their layout, and the bytes of all its buffers. No other file defines these
sizes. [] shapes are row-major.
*/
#pragma once
#include "../experts/mlp.h"
#include "linear_layers.h"
#include "muon_plan.h"

// Rows of logits computed at a time, for rows of this many bytes. Tests make it small (tests/small_sizes.h).
#ifndef LOGIT_ROWS
#define LOGIT_ROWS(row_bytes) matmul_rows_at_a_time(row_bytes)
#endif
// Positions of a prompt that generation processes at a time. Tests make it small, too.
#ifndef PREFILL_ROWS
#define PREFILL_ROWS 512
#endif

// clang-format off
// The activations of a layer that its backward reads: type, name, elements, and the level of --recompute from which
// they are recomputed. M has no type: it is an Activation, and its last column is the linear layer that reads it.
// Elements: rows by columns by ..., row-major; a tensor without elements is NULL, but in the chain heads, combined,
// normed, attn_out it is an alias of the one before, and so is its gradient (layer_bind). For the MLP see
// MLP_ACTIVATIONS (mlp.h).
enum { RECOMPUTE_NEVER = RECOMPUTE_BLOCK + 1 };
#define LAYER_ACTIVATIONS(A, M)                                                                                       \
    M(norm1, N * C, RECOMPUTE_NORMS_AND_MLP, LINEAR_QKVG)                                                             \
    A(real, rstd1, N, RECOMPUTE_NORMS_AND_MLP)                                                                        \
    /* rows [q | k | v | lambda | gate], q and k normalized and rotated */                                            \
    A(floatX, fused, N * d->fused_ld, RECOMPUTE_BLOCK)                                                                \
    /* q and k before qk_norm */                                                                                      \
    A(floatX, qk, c->qk_norm && backward ? N * d->rope_heads * d->QD : 0, RECOMPUTE_BLOCK)                            \
    /* attention output of every query head, or `kept` of diff_attention: (N, heads_kept, DV) */                      \
    A(floatX, heads, N * heads_kept(plan, l) * d->DV, RECOMPUTE_BLOCK)                                                \
    /* (key_sets, lse_set_stride); each set is (B, NQ/key_sets, T) */                                                 \
    A(real, lse, lse_count(plan, generates ? 1 : plan->B, generates ? plan->rows : plan->T), RECOMPUTE_BLOCK)         \
    /* lists of block-sparse attention (SparseShape.lists) */                                                         \
    A(int, lists, (layer_sparse(c, l) ? N * d->NV * (layer_sparse(c, l) + 2) : 0), RECOMPUTE_BLOCK)                   \
    /* (N, OH); columns of fused in variants that project lambda from the input */                                    \
    A(floatX, lambda, separate_lambda ? N * d->OH : 0, RECOMPUTE_BLOCK)                                               \
    M(combined, d->groups.noise ? N * width : 0, RECOMPUTE_BLOCK, LINEAR_O) /* after the subtraction: (N, OH, DV) */  \
    A(floatX, normed, d->norm_width ? N * width : 0, RECOMPUTE_NORMS_AND_MLP) /* combined after the norm */           \
    A(real, rstd_sub, d->norm_width ? N * d->norm_count : 0, RECOMPUTE_NORMS_AND_MLP)                                 \
    /* normed after the gate, input of o_proj: (N, NH*D) */                                                           \
    M(attn_out, d->gate_width ? N * width : 0, RECOMPUTE_BLOCK, LINEAR_O)                                             \
    A(floatX, x_mid, N * C, RECOMPUTE_BLOCK)                  /* residual stream after attention */                   \
    M(norm2, N * C, RECOMPUTE_NORMS_AND_MLP, LINEAR_GATE_UP)                                                          \
    A(real, rstd2, N, RECOMPUTE_NORMS_AND_MLP)                                                                        \
    A(floatX, x_out, N * C, RECOMPUTE_NEVER) /* residual stream after the MLP, the next block's input */

// The activations of the model: type, name, elements. M: an Activation; its last columns are the linear layer that
// reads it, and whether the layer reads it as a gradient.
#define ACTIVATIONS(A, M)                                                                                         \
    A(int, inputs, N)                                                                                             \
    A(int, targets, N)                                                                                            \
    /* for generation: position of the first row of each sequence */                                              \
    A(int, start_position, generates ? plan->B : 0)                                                               \
    A(int, document_starts, generates ? 0 : N) /* where the document of each input begins in its sequence */      \
    A(int, documents, generates ? 0 : N + 1) /* first rows of the documents, for attention_documents */           \
    /* [L][LINEAR_BLOCK_COUNT][2]: --matmul-dtype fp8: the largest magnitudes of x and dy */                      \
    A(absmax_t, maxima, plan->fp8 ? linear_max_count(plan) : 0)                                                   \
    A(real, losses, N)                                        /* summed over the micro-steps of an update */      \
    A(real, log_z, N)                                         /* log sum of exp(logits) of each row */            \
    A(real, rope, (size_t)c->T * d->QD)                       /* (T, 2, QD/2): cosines, sines */                  \
    A(floatX, embedded, N * C)                                                                                    \
    /* YOCO: input of the shared keys and values; kv: rows [k | v], k normalized and rotated; k before qk_norm */ \
    M(kv_norm, c->yoco ? N * C : 0, LINEAR_KV, 0)                                                                 \
    A(real, kv_rstd, c->yoco ? N : 0)                                                                             \
    A(floatX, kv, c->yoco ? N * d->kv_ld : 0)                                                                     \
    A(floatX, kv_kept, c->yoco && c->qk_norm && backward ? N * d->NK * d->QD : 0)                                 \
    /* means of the blocks of keys of one layer; generation keeps the means of all layers */                      \
    A(real, block_means, generates || !c->sparse_blocks ? 0 : N / c->sparse_size * d->NK * d->QD)                 \
    /* generation with windows: the keys and values that a piece of a prompt reads */                             \
    A(floatX, staged, ring ? (c->window - 1 + N) * d->kv_rows : 0)                                                \
    /* output of o_proj and of down_proj, before the addition to the residual stream */                           \
    A(floatX, branch, N * C)                                                                                      \
    /* input of the experts, then their output; the backward uses both for gradients */                           \
    A(floatX, expert_rows, R * C)                                                                                 \
    A(floatX, expert_out, R * C)                                                                                  \
    A(floatX, expert_hidden, R * FE)                                                                              \
    A(floatX, norm_final, N * C)                                                                                  \
    A(real, rstd_final, N)                                                                                        \
    A(floatX, logits, (size_t)plan->logit_rows * plan->Vp)    /* then their gradient */                           \
    /* sums of squares of this rank's pieces of the gradients, one for each bucket */                             \
    A(double, grad_squares, backward ? (size_t)plan->sharding.count : 0)                                          \
    /* gradients of the activations with these names; dx is the gradient of the residual stream */                \
    A(floatX, dx, backward ? N * C : 0)                                                                           \
    A(floatX, dnorm, backward ? N * C : 0)                                                                        \
    A(floatX, dfused, backward ? N * d->fused_ld : 0)         /* columns from fused_rows on are zero */           \
    /* dkv: the gradient of kv by one layer, then the sum over the layers */                                      \
    M(dkv, backward && c->yoco ? N * d->kv_ld : 0, LINEAR_KV, 1)                                                  \
    A(real, dkv_sum, backward && c->yoco ? N * d->kv_ld : 0)                                                      \
    A(floatX, dheads, backward && heads_kept(plan, 0) == d->NQ ? N * d->NQ * d->DV : 0)                           \
    A(floatX, dlambda, backward && separate_lambda ? N * d->OH : 0)                                                    \
    A(floatX, dcombined, backward && d->groups.noise ? N * width : 0)                                             \
    A(floatX, dnormed, backward && d->norm_width ? N * width : 0)                                                 \
    A(floatX, dattn_out, backward && d->gate_width ? N * width : 0)                                               \
    A(floatX, dgate_up, backward ? N * 2 * F : 0)                                                                 \
    A(floatX, dhidden, backward ? N * F : 0)                                                                      \
    A(floatX, dexpert_gate_up, backward ? R * 2 * FE : 0)                                                         \
    A(floatX, dexpert_hidden, backward ? R * FE : 0)                                                              \
    A(real, dexpert_weights, backward ? R : 0)                                                                    \
    /* (L, 2E+1): totals of router_totals over the micro-steps of an update */                                    \
    A(real, router_totals, backward ? c->L * router_total_count(c->E) : 0)                                        \
    /* tokens of each expert, summed over ranks and over the micro-steps so far */                                \
    A(real, router_loads, backward ? (size_t)c->L * c->E : 0)
// clang-format on

typedef struct {
#define MEMBER(type, name, elements, level) type *name;
#define MEASURED_MEMBER(name, elements, level, linear) Activation name;
    LAYER_ACTIVATIONS(MEMBER, MEASURED_MEMBER)
#undef MEMBER
#undef MEASURED_MEMBER
    MlpActivations mlp;
    // Keys and values that the layer's attention reads at the offsets of KeySet: the fused rows, YOCO's rows, or in a
    // model for generation the layer's cache (B, cache_capacity, kv_rows)
    floatX *kv;
    // Means of blocks of keys, (B, SparseShape.count, NK, QD): block_means, or in a model for generation beside kv
    real *means;
    const floatX *x;               // the residual stream that enters the layer
    floatX *q, *k, *k_kept, *gate; // columns of fused, and of qk; k: NULL without keys
    Activation norm_next;          // norm1 of the next layer, or the final norm
    real *rstd_next;
    // gradients in buffers that layers share, with the maxima of this layer's linear layers
    Activation dx_in, dx_mid, dx_out, dfused;
    floatX *dk, *dgate, *dlambda;
} LayerActivations;

typedef struct {
#define MEMBER(type, name, elements) type *name;
#define MEASURED_MEMBER(name, elements, linear, gradient) Activation name;
    ACTIVATIONS(MEMBER, MEASURED_MEMBER)
#undef MEMBER
#undef MEASURED_MEMBER
    LayerActivations *layers; // [L]
    const int *first_key;     // AttentionShape.first_key: with --doc-mask document_starts, else NULL
} Activations;

// Allocates consecutive aligned pieces of a buffer; with base NULL it only counts their bytes.
typedef struct {
    char *base;
    size_t used, cached; // cached: by the caches of keys and values
} Arena;
static inline void *carve(Arena *arena, size_t bytes) {
    size_t at = arena->used;
    arena->used += round_up(bytes, 256);
    return arena->base && bytes ? arena->base + at : NULL;
}

// Memory that layers share.
typedef struct {
    void *memory;
    size_t bytes;
} LayerMemory;
// Without a backward all layers share one set of activations; with --recompute they share the recomputed ones.
static inline void *layer_carve(Arena *arena, const ModelPlan *plan, Recompute level, size_t bytes,
                                LayerMemory *shared) {
    if (bytes == 0) return NULL;
    if (plan->purpose == FOR_TRAINING && plan->recompute < level) return carve(arena, bytes);
    if (shared->bytes < bytes) shared->memory = carve(arena, bytes), shared->bytes = bytes;
    return shared->memory;
}

// Allocates the cache of layer l; with YOCO the layers of the upper half share one.
static inline floatX *layer_carve_cache(const Activations *acts, const ModelPlan *plan, int l, Arena *arena) {
    if (layer_cross(&plan->config, l) && l > yoco_layer(&plan->config)) return acts->layers[l - 1].kv;
    size_t bytes = (size_t)plan->B * cache_capacity(plan, l) * plan->dims.kv_rows * sizeof(floatX);
    arena->cached += round_up(bytes, 256);
    return (floatX *)carve(arena, bytes);
}
static inline real *layer_carve_means(const Activations *acts, const ModelPlan *plan, int l, Arena *arena) {
    if (layer_cross(&plan->config, l) && l > yoco_layer(&plan->config)) return acts->layers[l - 1].means;
    size_t bytes = plan->B * sparse_means_count(plan, l) * sizeof(real);
    arena->cached += round_up(bytes, 256);
    return (real *)carve(arena, bytes);
}

// Lays the activations of the model out in the arena.
static inline void activations_carve(Activations *acts, const ModelPlan *plan, Arena *arena) {
    const ModelConfig *c = &plan->config;
    const AttentionDims *d = &plan->dims;
    size_t N = (size_t)plan->rows, C = (size_t)c->C, R = N * (size_t)c->K, FE = (size_t)c->FE;
    size_t F = (size_t)max_int(mlp_dims(c, 0).width, mlp_dims(c, c->L - 1).width), width = (size_t)(c->NH * c->D);
    bool backward = plan->purpose == FOR_TRAINING, generates = plan->purpose == FOR_GENERATION;
    bool separate_lambda = d->groups.noise && d->lambda_rows == 0, ring = generates && c->window && c->window < plan->T;
    struct {
#define MEMBER(type, name, elements, level) LayerMemory name;
#define MEASURED_MEMBER(name, elements, level, linear) LayerMemory name;
        LAYER_ACTIVATIONS(MEMBER, MEASURED_MEMBER)
        MLP_ACTIVATIONS(MEMBER, MEASURED_MEMBER)
#undef MEMBER
#undef MEASURED_MEMBER
    } shared;
    memset(&shared, 0, sizeof(shared));
#define CARVE(type, name, elements) acts->name = (type *)carve(arena, (elements) * sizeof(type));
#define CARVE_MEASURED(name, elements, linear, gradient)                         \
    acts->name = activation((floatX *)carve(arena, (elements) * sizeof(floatX)), \
                            linear_max(plan, acts->maxima, linear, yoco_layer(c), gradient));
    ACTIVATIONS(CARVE, CARVE_MEASURED)
#undef CARVE
#undef CARVE_MEASURED
    for (int l = 0; l < c->L; l++) {
        LayerActivations *layer = &acts->layers[l];
        MlpDims mlp = mlp_dims(c, l);
        d = plan_dims(plan, l);
#define CARVE_AT(type, name, elements, level) \
    (type *)layer_carve(arena, plan, (Recompute)(level), (elements) * sizeof(type), &shared.name)
#define CARVE(type, name, elements, level) layer->name = CARVE_AT(type, name, elements, level);
#define CARVE_MEASURED(name, elements, level, linear) \
    layer->name = activation(CARVE_AT(floatX, name, elements, level), linear_max(plan, acts->maxima, linear, l, 0));
        LAYER_ACTIVATIONS(CARVE, CARVE_MEASURED)
#undef CARVE
#undef CARVE_MEASURED
#define CARVE(type, name, elements, level) layer->mlp.name = CARVE_AT(type, name, elements, level);
#define CARVE_MEASURED(name, elements, level, linear) \
    layer->mlp.name = activation(CARVE_AT(floatX, name, elements, level), linear_max(plan, acts->maxima, linear, l, 0));
        MLP_ACTIVATIONS(CARVE, CARVE_MEASURED)
#undef CARVE
#undef CARVE_MEASURED
#undef CARVE_AT
        layer->kv = generates ? layer_carve_cache(acts, plan, l, arena) : layer_cross(c, l) ? acts->kv : layer->fused;
        layer->means = generates ? layer_carve_means(acts, plan, l, arena) : acts->block_means;
    }
}

// Sets pointers into memory of other activations: the layer's input, columns of rows, outputs of operations that the
// variant does not have (the output is then the input), and gradients.
static inline void layer_bind(const Activations *acts, const ModelPlan *plan, int l) {
    const AttentionDims *d = plan_dims(plan, l);
    LayerActivations *layer = &acts->layers[l];
    int L = plan->config.L, yoco = yoco_layer(&plan->config);
    bool last = l == L - 1;
    layer->x = l ? acts->layers[l - 1].x_out : acts->embedded;
    layer->q = layer->fused;
    layer->k = d->k_rows ? layer->fused + d->k_at : NULL;
    layer->k_kept = layer->qk ? layer->qk + d->q_rows : NULL;
    layer->gate = layer->fused + d->gate_at;
    if (!layer->lambda) layer->lambda = layer->fused + d->lambda_at;
    if (!d->groups.noise) layer->combined.data = layer->heads;
    if (!layer->normed) layer->normed = layer->combined.data;
    if (!layer->attn_out.data) layer->attn_out.data = layer->normed;
    if (!d->groups.noise || layer->attn_out.data != layer->combined.data) layer->combined.max = NULL;
    layer->norm_next = last ? activation(acts->norm_final, NULL) : acts->layers[l + 1].norm1;
    layer->rstd_next = last ? acts->rstd_final : acts->layers[l + 1].rstd1;
    if (plan->purpose != FOR_TRAINING) return;
    layer->dx_in = activation(acts->dx, l == yoco ? NULL : linear_max(plan, acts->maxima, LINEAR_DOWN, l - 1, 1));
    layer->dx_mid = activation(acts->dx, linear_max(plan, acts->maxima, LINEAR_O, l, 1));
    layer->dx_out = activation(acts->dx, linear_max(plan, acts->maxima, LINEAR_DOWN, l, 1));
    layer->dfused = activation(acts->dfused, linear_max(plan, acts->maxima, LINEAR_QKVG, l, 1));
    layer->dk = acts->dfused + d->k_at;
    layer->dgate = acts->dfused + d->gate_at;
    layer->dlambda = acts->dlambda ? acts->dlambda : acts->dfused + d->lambda_at;
}

// Allocates the activations of a plan, and fills the table of rotations. Returns their memory.
static inline char *activations_alloc(Activations *acts, const ModelPlan *plan) {
    char *memory = (char *)buffer_alloc(plan->activations_bytes, "activations");
    Arena arena = {memory, 0, 0};
    acts->layers = (LayerActivations *)checked_calloc(plan->config.L, sizeof(LayerActivations));
    acts->first_key = NULL;
    activations_carve(acts, plan, &arena);
    if (!acts->dcombined) acts->dcombined = acts->dheads;
    if (!acts->dnormed) acts->dnormed = acts->dcombined;
    if (!acts->dattn_out) acts->dattn_out = acts->dnormed;
    for (int l = 0; l < plan->config.L; l++) layer_bind(acts, plan, l);
    size_t count = (size_t)plan->config.T * plan->dims.QD;
    real *table = (real *)checked_calloc(count, sizeof(real));
    rope_table(table, plan->config.T, plan->dims.QD, plan->config.rope_theta);
    buffer_upload(acts->rope, table, count * sizeof(real));
    free(table);
    return memory;
}

// Clears the maxima that the operations of a forward and its backward find. Called before the forward.
static inline void activations_begin(const Activations *acts, const ModelPlan *plan) {
    if (acts->maxima) buffer_zero(acts->maxima, linear_max_count(plan) * sizeof(absmax_t));
}

// The rows of a forward: T rows of each of B sequences. Training and evaluation run whole sequences. A model for
// generation keeps keys and values in caches: it runs a piece of one sequence's prompt, or one new position of each.
typedef struct {
    int B, T;
    int start_position; // generation: position of the first row of the piece
    int sequence;       // generation: the sequence's place in the caches
} Rows;

// What the attention of one key set of a layer reads and writes. The backward of attention includes rope_backward.
typedef struct {
    AttentionShape shape;
    floatX *out, *q, *k, *v;
    real *lse;
    floatX *dout, *dq, *dk, *dv; // NULL without a backward; dout is also NULL if diff_attention keeps only noise heads
} AttentionTensors;

static inline AttentionTensors attention_tensors(const ModelPlan *plan, const Activations *acts, int l, int set, int B,
                                                 int T, int query_offset) {
    const LayerActivations *layer = &acts->layers[l];
    KeySet s = key_set(plan, l, set, B, T, query_offset);
    AttentionTensors t;
    memset(&t, 0, sizeof(t));
    t.shape = s.shape, t.shape.rope = acts->rope, t.shape.first_key = acts->first_key;
    t.shape.sparse.lists = layer->lists, t.out = layer->heads + s.out, t.lse = layer->lse + s.lse;
    t.q = layer->fused + s.q, t.k = layer->kv + s.k, t.v = layer->kv + s.v;
    if (plan->purpose != FOR_TRAINING) return t;
    floatX *dkv = layer_cross(&plan->config, l) ? acts->dkv.data : acts->dfused;
    t.dout = acts->dheads ? acts->dheads + s.out : NULL;
    t.dq = acts->dfused + s.q, t.dk = dkv + s.k, t.dv = dkv + s.v;
    return t;
}

// Elements of the gradients, and of the parameters: complete groups, then this rank's pieces if only some groups exist
// at a time.
static inline size_t grads_groups_count(const ModelPlan *plan) {
    const TensorList *list = &plan->tensors;
    size_t first = list->group_offset[1], last = list->buffer_count - list->group_offset[list->L + 1];
    return grads_place(plan, list->L + 1) + (grads_ends_share(plan) ? max_size(first, last) : last);
}

// Sets the bytes of the plan's buffers.
static inline void plan_count_bytes(ModelPlan *plan) {
    int level = plan->sharding.level;
    size_t owned = level ? plan->sharding.owned : plan->tensors.buffer_count;
    Arena count = {NULL, 0, 0};
    Activations acts;
    acts.layers = (LayerActivations *)checked_calloc(plan->config.L, sizeof(LayerActivations));
    activations_carve(&acts, plan, &count);
    free(acts.layers);
    plan->activations_bytes = count.used;
    plan->cache_bytes = count.cached;
    bool two = params_two_layers(plan);
    plan->params_bytes = (group_places_count(&plan->tensors, two) + (two ? plan->sharding.owned : 0)) * sizeof(floatX);
    if (plan->purpose != FOR_TRAINING) return;
    plan->grads_bytes =
        (grads_groups_count(plan) + (grads_two_layers(plan) ? plan->sharding.owned : 0)) * sizeof(grad_t);
    plan->moments_bytes = (owned + plan->moment2_count) * sizeof(real);
    plan->master_bytes = sizeof(floatX) < sizeof(real) ? owned * sizeof(real) : 0;
    plan->directions_bytes = plan->tensors.muon ? plan->tensors.largest_layer * sizeof(floatX) : 0;
}

// Prepares attention of B whole sequences in all layers; returns the bytes of its workspace.
static inline size_t plan_sequences(const ModelPlan *plan, int B, bool backward) {
    size_t bytes = 0;
    for (int l = 0; l < plan->config.L; l++) {
        AttentionShape shape = key_set(plan, l, 0, B, plan->T, 0).shape;
        if (!shape.sparse.blocks) attention_prepare(shape, backward, plan->config.attention->key_sets > 1);
        bytes = max_size(bytes, attention_bytes_of(shape));
    }
    return bytes;
}
// Prepares attention of all layers; returns the bytes of its workspace.
static inline size_t plan_attention(const ModelPlan *plan) {
    size_t bytes = 0;
    if (plan->purpose != FOR_GENERATION) {
        attention_reserve(plan->params_bytes + plan->grads_bytes + plan->moments_bytes + plan->master_bytes +
                          plan->directions_bytes + plan->copies_bytes + plan->activations_bytes + plan->received_bytes);
        return plan_sequences(plan, plan->B, plan->purpose == FOR_TRAINING);
    }
    for (int l = 0; l < plan->config.L; l++) {
        int piece = min_int(plan->T, PREFILL_ROWS), capacity = cache_capacity(plan, l);
        AttentionShape one = key_set(plan, l, 0, plan->B, 1, 0).shape;
        if (!one.sparse.blocks)
            bytes = max_size(bytes, attention_decode_workspace_bytes(one, capacity, omp_get_max_threads()));
        for (int last = 0; last < 2; last++) // the first piece of a prompt, and the last
            bytes = max_size(bytes, attention_bytes_of(key_set(plan, l, 0, 1, piece, last * (plan->T - piece)).shape));
    }
    return bytes;
}

// Warns of prepared shapes whose attention is slower than the user may expect.
static inline void warn_of_attention(void) {
    for (const char *text = attention_warning(); text; text = attention_warning())
        if (comm_rank() == 0) warn("%s", text);
}

// Prepares attention of B whole sequences, fewer than the plan's: the last batch of a validation.
static inline void plan_last_batch(ModelPlan *plan, int B) {
    if (B <= 0) return;
    plan->workspace_bytes = max_size(plan->workspace_bytes, plan_sequences(plan, B, false));
    warn_of_attention();
}

// Plans a model for up to B sequences of T positions. A model that is not for training has all parameters on every
// rank. Allocates lists only; plan_free() frees them.
static inline void plan_build(ModelPlan *plan, const ModelConfig *config, int B, int T, Purpose purpose,
                              Recompute recompute, RunRanks ranks) {
    memset(plan, 0, sizeof(*plan));
    plan->config = *config;
    plan->dims = attention_dims(config, false);
    plan->cross_dims = attention_dims(config, true);
    plan->tensors = tensor_list_build(config, ranks.group);
    if (purpose != FOR_TRAINING) ranks.zero = min_int(ranks.zero, 2);
    plan->sharding = sharding_build(&plan->tensors, ranks, BUCKET_ELEMENTS(ranks.ranks));
    plan->optimizer = ranks.optimizer;
    muon_plan(plan, purpose == FOR_TRAINING);
    plan->B = B;
    plan->T = T;
    plan->rows = purpose == FOR_GENERATION ? max_int(B, min_int(T, PREFILL_ROWS)) : B * T;
    plan->purpose = purpose;
    plan->recompute = recompute;
    plan->Vp = (int)round_up((size_t)config->V, 64);
    plan->Vw = (int)round_up((size_t)config->V, MATRIX_ROWS);
    plan->logit_rows = (int)min_size(plan->rows, LOGIT_ROWS((size_t)plan->Vp * sizeof(floatX)));
    if (purpose == FOR_GENERATION) plan->logit_rows = B; // the logits of the next tokens
    plan->fp8 = linear_in_fp8() && purpose != FOR_GENERATION;
    plan->diff_attention = purpose == FOR_TRAINING && variant_shares_keys(config->attention);
    plan_copies(plan);
    plan_count_bytes(plan);
    if (purpose == FOR_TRAINING)
        plan->received_bytes =
            comm_received_bytes(plan->sharding.largest * sizeof(grad_t), ranks.group, plan->sharding.level);
    int widest = max_int(config->C, plan->dims.norm_width), N = plan->rows;
    size_t needs[] = {plan_attention(plan),
                      rmsnorm_workspace_bytes(widest),
                      embedding_workspace_bytes(N),
                      head_norm_workspace_bytes(plan->dims.QD),
                      router_workspace_bytes(plan_routing(plan, N)),
                      muon_plan_workspace_bytes(plan)};
    for (size_t i = 0; i < sizeof(needs) / sizeof(needs[0]); i++)
        plan->workspace_bytes = max_size(plan->workspace_bytes, needs[i]);
    for (int kind = 0; kind < LINEAR_COUNT; kind++) {
        int rows = kind == LINEAR_HEAD ? plan->logit_rows : N;
        for (int l = 0; l < config->L; l += max_int(1, config->L - 1)) {
            Linear w = linear_shape(plan, (LinearKind)kind, l);
            if (!w.OC || !linear_rounded_bytes(w, (LinearKind)kind)) continue; // nothing is rounded
            size_t need = linear_of_experts((LinearKind)kind)
                              ? expert_linear_workspace_bytes(N, N * config->K, config->E, w.IC, w.OC)
                              : linear_workspace_bytes(rows, w.IC, w.OC);
            plan->workspace_bytes = max_size(plan->workspace_bytes, need);
        }
    }
}
