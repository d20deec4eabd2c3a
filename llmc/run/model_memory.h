/*
model_memory.h: the activations of a model, their layout, and the bytes of all its buffers. The one place that knows
these sizes. [] shapes are row-major.
*/
#ifndef LLMC_MODEL_MEMORY_H
#define LLMC_MODEL_MEMORY_H
#include "linear_layers.h"

// Rows of logits computed at a time, for rows of this many bytes. Tests make it small (tests/small_sizes.h).
#ifndef LOGIT_ROWS
#define LOGIT_ROWS(row_bytes) matmul_rows_at_a_time(row_bytes)
#endif

// The activations of a layer that its backward reads. Without a backward all layers share one set, except for the fused
// rows of a model for generation, which are its key/value cache. With --recompute layers share some: see layer_keeps.
typedef struct {
    floatX *norm1;    // (N, C)
    real *rstd1;      // (N)
    floatX *fused;    // (N, fused_ld): rows [q | k | v | lambda], q and k rotated
    floatX *heads;    // (N, NQ, DV): attention output of every query head
    real *lse;        // (key_sets, lse_set_stride): of a set (B, NQ/key_sets, T)
    floatX *lambda;   // (N, OH): where lambda is not projected from the input, else NULL
    floatX *combined; // (N, OH, DV): after the subtraction; without one, heads
    floatX *normed;   // (N, NH*D): combined, normalised; in variants without a norm: combined
    real *rstd_sub;   // (N, norm_count)
    floatX *attn_out; // (N, NH*D): input of o_proj, after the gate; in variants without a gate: normed
    floatX *x_mid;    // (N, C): residual stream after attention
    floatX *norm2;    // (N, C)
    real *rstd2;      // (N)
    floatX *gate_up;  // (N, 2F): rows [gate | up]
    floatX *hidden;   // (N, F)
    floatX *x_out;    // (N, C): residual stream after the MLP
} LayerActivations;

typedef struct {
    int *inputs, *targets;    // (N)
    int *first;               // (B): position of the first row of each sequence; for generation
    int *starts;              // (N): where the document of each input begins in its sequence; not for generation
    absmax_t *maxima;         // [L][LINEAR_BLOCK_COUNT][2]: --gemm fp8: the largest magnitudes of x and dy; or NULL
    real *losses;             // (N): summed over the micro-steps of an update
    real *rope;               // (T, 2, QD/2): cosines, sines
    floatX *embedded;         // (N, C)
    LayerActivations *layers; // [L]
    floatX *branch;           // (N, C): output of o_proj and of down_proj, before it joins the residual stream
    floatX *norm_final;       // (N, C)
    real *rstd_final;         // (N)
    floatX *logits;           // (logit_rows, Vp), then their gradient
    double *grad_squares;     // [buckets]: sums of squares of this rank's pieces of the gradients
    // of the backward: gradients of the activations with these names; dx: of the residual stream
    floatX *dx;        // (N, C)
    floatX *dnorm;     // (N, C)
    floatX *dfused;    // (N, fused_ld); columns from fused_rows on are zero
    floatX *dheads;    // (N, NQ, DV)
    floatX *dlambda;   // (N, OH): as lambda
    floatX *dcombined; // (N, OH, DV): as combined
    floatX *dnormed;   // (N, NH*D): as normed
    floatX *dattn_out; // (N, NH*D)
    floatX *dgate_up;  // (N, 2F)
    floatX *dhidden;   // (N, F)
} Activations;

// Bytes of an element of each type: in this program, or in the bf16 program for the GPU of --device.
typedef struct {
    size_t int_, double_, real_, floatX_, grad_t_;
} ElementBytes;
static const ElementBytes own_elements = {sizeof(int), sizeof(double), sizeof(real), sizeof(floatX), sizeof(grad_t)},
                          gpu_elements = {4, 8, 4, 2, 4};

// Allocates consecutive aligned pieces of a buffer; with base NULL it only counts their bytes.
typedef struct {
    char *base;
    size_t used;
    ElementBytes bytes;
} Arena;
static inline void *carve(Arena *arena, size_t count, size_t element_bytes) {
    size_t at = arena->used;
    arena->used += round_up(count * element_bytes, 256);
    return arena->base ? arena->base + at : NULL;
}
#define CARVE(arena, type, count) (type *)carve(arena, count, (arena)->bytes.type##_)

// Whether layer l has its own memory for the activations that --recompute LEVEL computes again; else it uses layer 0's.
static inline bool layer_keeps(const ModelPlan *plan, int l, Recompute level) {
    return l == 0 || (plan->purpose == FOR_TRAINING && plan->recompute < level);
}

// Lays the activations of the model out in the arena. Only this function knows their sizes.
static inline void activations_carve(Activations *a, const ModelPlan *plan, Arena *arena) {
    const ModelConfig *c = &plan->config;
    const AttentionDims *d = &plan->dims;
    size_t N = (size_t)plan->B * plan->T, C = (size_t)c->C, F = (size_t)c->F;
    size_t heads_width = (size_t)(d->NQ * d->DV), attn_width = (size_t)(c->NH * c->D), ld = (size_t)d->fused_ld;
    bool backward = plan->purpose == FOR_TRAINING, own_lambda = d->pair_stride && d->lambda_rows == 0;

    a->inputs = CARVE(arena, int, N);
    a->targets = CARVE(arena, int, N);
    a->first = plan->purpose == FOR_GENERATION ? CARVE(arena, int, plan->B) : NULL;
    a->starts = plan->purpose == FOR_GENERATION ? NULL : CARVE(arena, int, N);
    a->maxima = plan->fp8 ? (absmax_t *)CARVE(arena, int, linear_max_count(plan)) : NULL;
    a->losses = CARVE(arena, real, N);
    a->rope = CARVE(arena, real, (size_t)c->T * d->QD);
    a->embedded = CARVE(arena, floatX, N * C);
    for (int l = 0; l < c->L; l++) {
        LayerActivations *layer = &a->layers[l];
        bool own = layer_keeps(plan, l, RECOMPUTE_BLOCK);
        if (l) *layer = a->layers[0];
        if (l == 0 || backward) layer->x_out = CARVE(arena, floatX, N * C); // the next block's input
        if (own || plan->purpose == FOR_GENERATION) layer->fused = CARVE(arena, floatX, N * ld);
        if (own) {
            layer->heads = CARVE(arena, floatX, N * heads_width);
            layer->lse = CARVE(arena, real, lse_count(plan, plan->B, plan->T));
            layer->lambda = own_lambda ? CARVE(arena, floatX, N * d->OH) : NULL;
            layer->combined = d->pair_stride ? CARVE(arena, floatX, N * attn_width) : layer->heads;
            layer->x_mid = CARVE(arena, floatX, N * C);
        }
        if (layer_keeps(plan, l, RECOMPUTE_NORMS_AND_MLP)) {
            layer->norm1 = CARVE(arena, floatX, N * C);
            layer->rstd1 = CARVE(arena, real, N);
            layer->normed = d->norm_width ? CARVE(arena, floatX, N * attn_width) : NULL;
            layer->rstd_sub = d->norm_width ? CARVE(arena, real, N * d->norm_count) : NULL;
            layer->norm2 = CARVE(arena, floatX, N * C);
            layer->rstd2 = CARVE(arena, real, N);
            layer->gate_up = CARVE(arena, floatX, N * 2 * F);
            layer->hidden = CARVE(arena, floatX, N * F);
        }
        if (!d->norm_width) layer->normed = layer->combined;
        if (!d->gate_width) layer->attn_out = layer->normed;
        else if (own) layer->attn_out = CARVE(arena, floatX, N * attn_width);
    }
    a->branch = CARVE(arena, floatX, N * C);
    a->norm_final = CARVE(arena, floatX, N * C);
    a->rstd_final = CARVE(arena, real, N);
    a->logits = CARVE(arena, floatX, (size_t)plan->logit_rows * plan->Vp);
    if (!backward) return;
    a->grad_squares = CARVE(arena, double, (size_t)plan->sharding.count);
    a->dx = CARVE(arena, floatX, N * C);
    a->dnorm = CARVE(arena, floatX, N * C);
    a->dfused = CARVE(arena, floatX, N * ld);
    a->dheads = CARVE(arena, floatX, N * heads_width);
    a->dlambda = own_lambda ? CARVE(arena, floatX, N * d->OH) : NULL;
    a->dcombined = d->pair_stride ? CARVE(arena, floatX, N * attn_width) : a->dheads;
    a->dnormed = d->norm_width ? CARVE(arena, floatX, N * attn_width) : a->dcombined;
    a->dattn_out = d->gate_width ? CARVE(arena, floatX, N * attn_width) : a->dnormed;
    a->dgate_up = CARVE(arena, floatX, N * 2 * F);
    a->dhidden = CARVE(arena, floatX, N * F);
}

// Elements of the gradients of whole groups. With --zero 2 layer l uses the memory of layer l + 2, whose gradients have
// been reduced before. *layer_count: elements of the largest layer.
static inline size_t group_grads_count(const ModelPlan *plan, size_t *layer_count) {
    const TensorList *list = &plan->tensors;
    const size_t *at = list->group_offset;
    int L = list->L;
    *layer_count = 0;
    for (int l = 0; l < L; l++) *layer_count = max_size(*layer_count, at[l + 2] - at[l + 1]);
    if (plan->sharding.level < 2) return list->buffer_count;
    return at[1] + (size_t)min_int(L, 2) * *layer_count + (at[L + 2] - at[L + 1]);
}

// Sets the bytes of the plan's buffers.
static inline void plan_count_bytes(ModelPlan *plan, ElementBytes e) {
    int level = plan->sharding.level;
    size_t layer_count, own = plan->sharding.own;
    Arena count = {NULL, 0, e};
    Activations acts;
    acts.layers = (LayerActivations *)checked_calloc(plan->config.L, sizeof(LayerActivations));
    activations_carve(&acts, plan, &count);
    free(acts.layers);
    plan->activations_bytes = count.used;
    plan->params_bytes = plan->tensors.buffer_count * e.floatX_;
    if (plan->purpose != FOR_TRAINING) return;
    plan->grads_bytes = (group_grads_count(plan, &layer_count) + (level == 2 ? own : 0)) * e.grad_t_;
    plan->moments_bytes = 2 * (level ? own : plan->tensors.buffer_count) * e.real_;
    plan->master_bytes = e.floatX_ < e.real_ ? plan->moments_bytes / 2 : 0;
}

// Plans a model for up to B sequences of T positions, on rank `rank` of `ranks` that share its state as --zero `zero`
// says. Allocates lists only; plan_free() frees them.
static inline void plan_build(ModelPlan *plan, const ModelConfig *config, int B, int T, Purpose purpose,
                              Recompute recompute, int rank, int ranks, int zero) {
    memset(plan, 0, sizeof(*plan));
    plan->config = *config;
    plan->dims = attention_dims(config);
    plan->tensors = tensor_list_build(config, ranks);
    plan->sharding = sharding_build(&plan->tensors, rank, zero, BUCKET_ELEMENTS(ranks));
    plan->B = B;
    plan->T = T;
    plan->purpose = purpose;
    plan->recompute = recompute;
    plan->Vp = (int)round_up((size_t)config->V, 64);
    plan->Vw = (int)round_up((size_t)config->V, MATRIX_ROWS);
    plan->logit_rows = (int)min_size((size_t)B * T, LOGIT_ROWS((size_t)plan->Vp * sizeof(floatX)));
    if (purpose == FOR_GENERATION) plan->logit_rows = 1; // those of the next token
    plan->fp8 = linear_in_fp8() && purpose != FOR_GENERATION;
    plan_copies(plan);
    plan_count_bytes(plan, own_elements);
    if (purpose == FOR_TRAINING)
        plan->received_bytes =
            comm_received_bytes(plan->sharding.largest * sizeof(grad_t), ranks, plan->sharding.level);
    int widest = max_int(config->C, plan->dims.norm_width), N = B * T;
    AttentionShape attention = key_set(plan, 0, B, T, 0).shape;
    if (purpose != FOR_GENERATION) {
        attention_reserve(plan->params_bytes + plan->grads_bytes + plan->moments_bytes + plan->master_bytes +
                          plan->copies_bytes + plan->activations_bytes + plan->received_bytes);
        attention_prepare(attention, purpose == FOR_TRAINING, config->attention->key_sets > 1);
    }
    size_t needs[] = {attention_workspace_bytes(attention, omp_get_max_threads()), rmsnorm_workspace_bytes(widest),
                      embedding_workspace_bytes(N)};
    for (size_t i = 0; i < sizeof(needs) / sizeof(needs[0]); i++)
        plan->workspace_bytes = max_size(plan->workspace_bytes, needs[i]);
    for (int kind = 0; kind < LINEAR_COUNT; kind++) {
        Linear w = linear_shape(plan, (LinearKind)kind);
        int rows = kind == LINEAR_HEAD ? plan->logit_rows : N;
        if (linear_copy_bytes(w.IC, w.OC, kind == LINEAR_HEAD)) // otherwise nothing is rounded
            plan->workspace_bytes = max_size(plan->workspace_bytes, linear_workspace_bytes(rows, w.IC, w.OC));
    }
}
#endif
