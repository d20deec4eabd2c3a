/*
activations.h: the activations of a model, their layout, and the bytes of all its buffers. The one place that knows
these sizes. [] shapes are row-major.
*/
#ifndef LLMC_MODEL_ACTIVATIONS_H
#define LLMC_MODEL_ACTIVATIONS_H
#include "linear_layers.h"

// Rows of logits computed at a time, for rows of this many bytes. Tests make it small (tests/small_sizes.h).
#ifndef LOGIT_ROWS
#define LOGIT_ROWS(row_bytes) matmul_rows_at_a_time(row_bytes)
#endif
// Positions of a prompt that generation processes at a time, likewise.
#ifndef PREFILL_ROWS
#define PREFILL_ROWS 512
#endif

// The activations of a layer that its backward reads. Without a backward all layers share one set, except for kv in a
// model for generation. With --recompute layers share some: see layer_keeps.
typedef struct {
    floatX *norm1; // (N, C)
    real *rstd1;   // (N)
    floatX *fused; // (N, fused_ld): rows [q | k | v | lambda | gate], q and k normalized and rotated
    floatX *qk;    // (N, rope_heads*QD): with qk_norm and a backward: q and k before their norm; else NULL
    // Keys and values that the layer's attention reads, as KeySet says: its fused rows, the rows of YOCO, or in a model
    // for generation its cache (B, cache_capacity, kv_rows)
    floatX *kv;
    floatX *heads;     // (N, NQ, DV): attention output of every query head
    real *lse;         // (key_sets, lse_set_stride): of a set (B, NQ/key_sets, T)
    floatX *lambda;    // (N, OH): where lambda is not projected from the input, else NULL
    floatX *combined;  // (N, OH, DV): after the subtraction; without one, heads
    floatX *exclusive; // (N, OH, DV): without the component along the own value; in variants that keep it, combined
    floatX *normed;    // (N, NH*D): exclusive, normalized; in variants without a norm: exclusive
    real *rstd_sub;    // (N, norm_count)
    floatX *attn_out;  // (N, NH*D): input of o_proj, after the gate; in variants without a gate: normed
    floatX *x_mid;     // (N, C): residual stream after attention
    floatX *norm2;     // (N, C)
    real *rstd2;       // (N)
    floatX *gate_up;   // (N, 2F): rows [gate | up]; F of the MLP that every token passes, NULL if there is none
    floatX *hidden;    // (N, F)
    // of layers with experts, else NULL. Routings are never computed again
    real *router_logits;    // (N, E)
    real *router_lse;       // (N)
    int *experts;           // (N, K)
    real *expert_weights;   // (N, K)
    int *starts;            // (E+1): as expert_group
    int *entries, *places;  // (N*K)
    floatX *expert_gate_up; // (N*K, 2FE)
    floatX *x_out;          // (N, C): residual stream after the MLP
} LayerActivations;

typedef struct {
    int *inputs, *targets;    // (N)
    int *first;               // (B): position of the first row of each sequence; for generation
    int *starts;              // (N): where the document of each input begins in its sequence; not for generation
    int *documents;           // (N+1): their first rows, for attention_documents; not for generation
    absmax_t *maxima;         // [L][LINEAR_BLOCK_COUNT][2]: --gemm fp8: the largest magnitudes of x and dy; or NULL
    real *losses;             // (N): summed over the micro-steps of an update
    real *rope;               // (T, 2, QD/2): cosines, sines
    floatX *kv_norm;          // with YOCO: (N, C): input of the keys and values of the upper half
    real *kv_rstd;            // (N)
    floatX *kv;               // (N, kv_ld): rows [k | v], k normalized and rotated
    floatX *kv_kept;          // (N, NK*QD): with qk_norm and a backward: k before its norm; else NULL
    floatX *staged;           // generation with windows: (window - 1 + rows, kv_rows): what a piece of a prompt reads
    floatX *embedded;         // (N, C)
    LayerActivations *layers; // [L]
    floatX *branch;           // (N, C): output of o_proj and of down_proj, before it joins the residual stream
    floatX *expert_rows[2];   // (N*K, C): of layers with experts: input and output of the experts, and their gradients
    floatX *expert_hidden;    // (N*K, FE)
    real *router_totals;      // (L, 2E+1): as router_totals, of the micro-steps of an update
    real *router_loads;       // (L, E): tokens of each expert, summed over ranks and over the micro-steps so far
    floatX *norm_final;       // (N, C)
    real *rstd_final;         // (N)
    floatX *logits;           // (logit_rows, Vp), then their gradient
    double *grad_squares;     // [buckets]: sums of squares of this rank's pieces of the gradients
    // of the backward: gradients of the activations with these names; dx: of the residual stream
    floatX *dx;         // (N, C)
    floatX *dnorm;      // (N, C)
    floatX *dfused;     // (N, fused_ld); columns from fused_rows on are zero
    floatX *dkv;        // (N, kv_ld): of kv, by one layer; then the sum over layers
    real *dkv_sum;      // (N, kv_ld)
    floatX *dheads;     // (N, NQ, DV)
    floatX *dlambda;    // (N, OH): as lambda
    floatX *dcombined;  // (N, OH, DV): as combined
    floatX *dexclusive; // (N, OH, DV): as exclusive
    floatX *dnormed;    // (N, NH*D): as normed
    floatX *dattn_out;  // (N, NH*D)
    floatX *dgate_up;   // (N, 2F)
    floatX *dhidden;    // (N, F)
    floatX *dexpert_gate_up, *dexpert_hidden;
    real *dexpert_weights; // (N, K)
} Activations;

// Allocates consecutive aligned pieces of a buffer; with base NULL it only counts their bytes.
typedef struct {
    char *base;
    size_t used, cached; // cached: by the caches of keys and values
} Arena;
static inline void *carve(Arena *arena, size_t count, size_t element_bytes) {
    size_t at = arena->used;
    arena->used += round_up(count * element_bytes, 256);
    return arena->base ? arena->base + at : NULL;
}
#define CARVE(arena, type, count) (type *)carve(arena, count, sizeof(type))

static inline size_t router_total_count(const ModelConfig *c) { return c->E ? 2 * (size_t)c->E + 1 : 0; } // of a layer

// Whether layer l has its own memory for the activations that --recompute LEVEL computes again; else it uses layer 0's.
static inline bool layer_keeps(const ModelPlan *plan, int l, Recompute level) {
    return l == 0 || (plan->purpose == FOR_TRAINING && plan->recompute < level);
}

// The cache of layer l: with YOCO the layers of the upper half share one.
static inline floatX *layer_carve_cache(const Activations *a, const ModelPlan *plan, int l, Arena *arena) {
    if (layer_cross(&plan->config, l) && l > yoco_layer(&plan->config)) return a->layers[l - 1].kv;
    size_t before = arena->used;
    floatX *cache = CARVE(arena, floatX, (size_t)plan->B * cache_capacity(plan, l) * plan->dims.kv_rows);
    arena->cached += arena->used - before;
    return cache;
}

// Without memory of its own a layer uses that of the layer before it.
static inline void layer_copy_mlp(LayerActivations *layer, const LayerActivations *before) {
    layer->gate_up = before->gate_up;
    layer->hidden = before->hidden;
    layer->router_logits = before->router_logits;
    layer->router_lse = before->router_lse;
    layer->experts = before->experts;
    layer->expert_weights = before->expert_weights;
    layer->starts = before->starts;
    layer->entries = before->entries;
    layer->places = before->places;
    layer->expert_gate_up = before->expert_gate_up;
}

// The MLP activations of layer l; own: it has its own memory for those that the backward may compute again.
static inline void layer_carve_mlp(LayerActivations *layer, const ModelPlan *plan, int l, bool own, Arena *arena) {
    MlpDims mlp = mlp_dims(&plan->config, l), before = mlp_dims(&plan->config, max_int(l - 1, 0));
    size_t N = (size_t)plan->rows, R = N * (size_t)mlp.active, E = (size_t)mlp.experts;
    bool first = l == 0 || mlp.kind != before.kind; // of its kind: the layers that follow may share its memory
    if (own || first) {
        layer->gate_up = mlp.width ? CARVE(arena, floatX, N * 2 * (size_t)mlp.width) : NULL;
        layer->hidden = mlp.width ? CARVE(arena, floatX, N * (size_t)mlp.width) : NULL;
        layer->expert_gate_up = E ? CARVE(arena, floatX, R * 2 * (size_t)mlp.expert_width) : NULL;
    }
    if (!first && plan->purpose != FOR_TRAINING) return;
    layer->router_logits = E ? CARVE(arena, real, N * E) : NULL;
    layer->router_lse = E ? CARVE(arena, real, N) : NULL;
    layer->experts = E ? CARVE(arena, int, R) : NULL;
    layer->expert_weights = E ? CARVE(arena, real, R) : NULL;
    layer->starts = E ? CARVE(arena, int, E + 1) : NULL;
    layer->entries = E ? CARVE(arena, int, R) : NULL;
    layer->places = E ? CARVE(arena, int, R) : NULL;
}

// Lays the activations of the model out in the arena. Only this function knows their sizes.
static inline void activations_carve(Activations *a, const ModelPlan *plan, Arena *arena) {
    const ModelConfig *c = &plan->config;
    const AttentionDims *d = &plan->dims;
    size_t N = (size_t)plan->rows, C = (size_t)c->C, R = N * (size_t)c->K, FE = (size_t)c->FE;
    size_t F = (size_t)max_int(mlp_dims(c, 0).width, mlp_dims(c, c->L - 1).width);
    size_t heads_width = (size_t)(d->NQ * d->DV), attn_width = (size_t)(c->NH * c->D), ld = (size_t)d->fused_ld;
    bool backward = plan->purpose == FOR_TRAINING, own_lambda = d->groups.noise && d->lambda_rows == 0;
    bool generates = plan->purpose == FOR_GENERATION, xsa = c->attention->xsa;

    a->inputs = CARVE(arena, int, N);
    a->targets = CARVE(arena, int, N);
    a->first = generates ? CARVE(arena, int, plan->B) : NULL;
    a->starts = generates ? NULL : CARVE(arena, int, N);
    a->documents = generates ? NULL : CARVE(arena, int, N + 1);
    a->maxima = plan->fp8 ? (absmax_t *)CARVE(arena, int, linear_max_count(plan)) : NULL;
    a->losses = CARVE(arena, real, N);
    a->rope = CARVE(arena, real, (size_t)c->T * d->QD);
    a->embedded = CARVE(arena, floatX, N * C);
    a->kv_norm = c->yoco ? CARVE(arena, floatX, N * C) : NULL;
    a->kv_rstd = c->yoco ? CARVE(arena, real, N) : NULL;
    a->kv = c->yoco ? CARVE(arena, floatX, N * d->kv_ld) : NULL;
    a->kv_kept = c->yoco && c->qk_norm && backward ? CARVE(arena, floatX, N * d->NK * d->QD) : NULL;
    bool ring = generates && c->window && c->window < plan->T;
    a->staged = ring ? CARVE(arena, floatX, (c->window - 1 + N) * d->kv_rows) : NULL;
    for (int l = 0; l < c->L; l++) {
        LayerActivations *layer = &a->layers[l];
        bool own = layer_keeps(plan, l, RECOMPUTE_BLOCK);
        if (l) *layer = a->layers[0];
        if (l) layer_copy_mlp(layer, &a->layers[l - 1]);
        if (l == 0 || backward) layer->x_out = CARVE(arena, floatX, N * C); // the next block's input
        if (own) {
            layer->fused = CARVE(arena, floatX, N * (size_t)plan_dims(plan, l)->fused_ld);
            size_t rotated = (size_t)plan_dims(plan, l)->rope_heads * d->QD;
            layer->qk = c->qk_norm && backward ? CARVE(arena, floatX, N * rotated) : NULL;
            layer->heads = CARVE(arena, floatX, N * heads_width);
            layer->lse =
                CARVE(arena, real, generates ? lse_count(plan, 1, plan->rows) : lse_count(plan, plan->B, plan->T));
            layer->lambda = own_lambda ? CARVE(arena, floatX, N * d->OH) : NULL;
            layer->combined = d->groups.noise ? CARVE(arena, floatX, N * attn_width) : layer->heads;
            layer->exclusive = xsa ? CARVE(arena, floatX, N * attn_width) : layer->combined;
            layer->x_mid = CARVE(arena, floatX, N * C);
        }
        if (layer_keeps(plan, l, RECOMPUTE_NORMS_AND_MLP)) {
            layer->norm1 = CARVE(arena, floatX, N * C);
            layer->rstd1 = CARVE(arena, real, N);
            layer->normed = d->norm_width ? CARVE(arena, floatX, N * attn_width) : NULL;
            layer->rstd_sub = d->norm_width ? CARVE(arena, real, N * d->norm_count) : NULL;
            layer->norm2 = CARVE(arena, floatX, N * C);
            layer->rstd2 = CARVE(arena, real, N);
        }
        layer_carve_mlp(layer, plan, l, layer_keeps(plan, l, RECOMPUTE_NORMS_AND_MLP), arena);
        layer->kv = layer->fused;
        if (generates) layer->kv = layer_carve_cache(a, plan, l, arena);
        else if (layer_cross(c, l)) layer->kv = a->kv;
        if (!d->norm_width) layer->normed = layer->exclusive;
        if (!d->gate_width) layer->attn_out = layer->normed;
        else if (own) layer->attn_out = CARVE(arena, floatX, N * attn_width);
    }
    a->branch = CARVE(arena, floatX, N * C);
    for (int i = 0; i < 2; i++) a->expert_rows[i] = c->E ? CARVE(arena, floatX, R * C) : NULL;
    a->expert_hidden = c->E ? CARVE(arena, floatX, R * FE) : NULL;
    a->norm_final = CARVE(arena, floatX, N * C);
    a->rstd_final = CARVE(arena, real, N);
    a->logits = CARVE(arena, floatX, (size_t)plan->logit_rows * plan->Vp);
    if (!backward) return;
    a->grad_squares = CARVE(arena, double, (size_t)plan->sharding.count);
    a->dx = CARVE(arena, floatX, N * C);
    a->dnorm = CARVE(arena, floatX, N * C);
    a->dfused = CARVE(arena, floatX, N * ld);
    a->dkv = c->yoco ? CARVE(arena, floatX, N * d->kv_ld) : NULL;
    a->dkv_sum = c->yoco ? CARVE(arena, real, N * d->kv_ld) : NULL;
    a->dheads = CARVE(arena, floatX, N * heads_width);
    a->dlambda = own_lambda ? CARVE(arena, floatX, N * d->OH) : NULL;
    a->dcombined = d->groups.noise ? CARVE(arena, floatX, N * attn_width) : a->dheads;
    a->dexclusive = xsa ? CARVE(arena, floatX, N * attn_width) : a->dcombined;
    a->dnormed = d->norm_width ? CARVE(arena, floatX, N * attn_width) : a->dexclusive;
    a->dattn_out = d->gate_width ? CARVE(arena, floatX, N * attn_width) : a->dnormed;
    a->dgate_up = F ? CARVE(arena, floatX, N * 2 * F) : NULL;
    a->dhidden = F ? CARVE(arena, floatX, N * F) : NULL;
    if (!c->E) return;
    a->dexpert_gate_up = CARVE(arena, floatX, R * 2 * FE);
    a->dexpert_hidden = CARVE(arena, floatX, R * FE);
    a->dexpert_weights = CARVE(arena, real, R);
    a->router_totals = CARVE(arena, real, (size_t)c->L * router_total_count(c));
    a->router_loads = CARVE(arena, real, (size_t)c->L * c->E);
}

// Allocates the activations of a plan, and fills the table of rotations. Returns their memory.
static inline char *activations_alloc(Activations *a, const ModelPlan *plan) {
    char *memory = (char *)buffer_alloc(plan->activations_bytes, "activations");
    Arena arena = {memory, 0, 0};
    a->layers = (LayerActivations *)checked_calloc(plan->config.L, sizeof(LayerActivations));
    activations_carve(a, plan, &arena);
    size_t count = (size_t)plan->config.T * plan->dims.QD;
    real *table = (real *)checked_calloc(count, sizeof(real));
    rope_table(table, plan->config.T, plan->dims.QD, plan->config.rope_theta);
    buffer_upload(a->rope, table, count * sizeof(real));
    free(table);
    return memory;
}

// The query heads or the key heads of rows, which --qk-norm normalizes.
typedef struct {
    floatX *rows, *kept; // kept: (N, ldk): before the norm; NULL: not kept
    int heads, ld, ldk;
    TensorKind weight;
} HeadRows;
// Of layer l, in its fused rows or their gradient. A layer of YOCO's upper half has no key heads.
static inline HeadRows query_heads(const ModelPlan *plan, const Activations *a, int l, floatX *fused) {
    const AttentionDims *d = plan_dims(plan, l);
    HeadRows h = {fused, a->layers[l].qk, d->NQ, d->fused_ld, d->rope_heads * d->QD, T_Q_NORM};
    return h;
}
static inline HeadRows key_heads(const ModelPlan *plan, const Activations *a, int l, floatX *fused) {
    const AttentionDims *d = plan_dims(plan, l);
    floatX *kept = a->layers[l].qk;
    HeadRows h = {fused + d->k_at, kept ? kept + d->q_rows : NULL, d->rope_heads - d->NQ,
                  d->fused_ld,     d->rope_heads * d->QD,          T_K_NORM};
    return h;
}
// Of the keys and values that YOCO's upper half shares, or of their gradient.
static inline HeadRows yoco_key_heads(const ModelPlan *plan, const Activations *a, floatX *kv) {
    const AttentionDims *d = &plan->cross_dims;
    HeadRows h = {kv, a->kv_kept, d->NK, d->kv_ld, d->NK * d->QD, T_YOCO_K_NORM};
    return h;
}

// The values of the rows that a forward computes: in the layer's fused rows, or in the rows of YOCO.
typedef struct {
    floatX *rows;
    int ld;
} ValueRows;
static inline ValueRows own_values(const ModelPlan *plan, const Activations *a, int l) {
    const AttentionDims *d = plan_dims(plan, l);
    bool cross = layer_cross(&plan->config, l);
    ValueRows v = {cross ? a->kv + d->NK * d->QD : a->layers[l].fused + d->v_at, cross ? d->kv_ld : d->fused_ld};
    return v;
}

// Elements of the gradients, and of the parameters: of whole groups, then of this rank's pieces when groups are not all
// there.
static inline size_t grads_groups_count(const ModelPlan *plan) {
    const TensorList *list = &plan->tensors;
    size_t first = list->group_offset[1], last = list->buffer_count - list->group_offset[list->L + 1];
    return grads_place(plan, list->L + 1) + (grads_ends_share(plan) ? max_size(first, last) : last);
}
static inline size_t grads_count(const ModelPlan *plan) {
    return grads_groups_count(plan) + (grads_two_layers(plan) ? plan->sharding.own : 0);
}
static inline size_t params_count(const ModelPlan *plan) {
    bool two = params_two_layers(plan);
    return group_places_count(&plan->tensors, two) + (two ? plan->sharding.own : 0);
}

// Sets the bytes of the plan's buffers.
static inline void plan_count_bytes(ModelPlan *plan) {
    int level = plan->sharding.level;
    size_t own = plan->sharding.own;
    Arena count = {NULL, 0, 0};
    Activations acts;
    acts.layers = (LayerActivations *)checked_calloc(plan->config.L, sizeof(LayerActivations));
    activations_carve(&acts, plan, &count);
    free(acts.layers);
    plan->activations_bytes = count.used;
    plan->cache_bytes = count.cached;
    plan->params_bytes = params_count(plan) * sizeof(floatX);
    if (plan->purpose != FOR_TRAINING) return;
    plan->grads_bytes = grads_count(plan) * sizeof(grad_t);
    plan->moments_bytes = 2 * (level ? own : plan->tensors.buffer_count) * sizeof(real);
    plan->master_bytes = sizeof(floatX) < sizeof(real) ? plan->moments_bytes / 2 : 0;
}

// Prepares attention of all layers; returns the bytes of its workspace.
static inline size_t plan_attention(const ModelPlan *plan) {
    int threads = omp_get_max_threads();
    size_t bytes = 0;
    if (plan->purpose != FOR_GENERATION)
        attention_reserve(plan->params_bytes + plan->grads_bytes + plan->moments_bytes + plan->master_bytes +
                          plan->copies_bytes + plan->activations_bytes + plan->received_bytes);
    for (int l = 0; l < plan->config.L; l++) {
        if (plan->purpose == FOR_GENERATION) {
            int piece = min_int(plan->T, PREFILL_ROWS);
            AttentionShape one = key_set(plan, l, 0, plan->B, 1, 0).shape;
            bytes = max_size(bytes, attention_decode_workspace_bytes(one, cache_capacity(plan, l), threads));
            for (int last = 0; last < 2; last++) { // the first piece of a prompt, and the last
                one = key_set(plan, l, 0, 1, piece, last * (plan->T - piece)).shape;
                bytes = max_size(bytes, attention_workspace_bytes(one, threads));
            }
            continue;
        }
        AttentionShape shape = key_set(plan, l, 0, plan->B, plan->T, 0).shape;
        attention_prepare(shape, plan->purpose == FOR_TRAINING, attention_adds_dv(plan, true));
        bytes = max_size(bytes, attention_workspace_bytes(shape, threads));
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
    for (int l = 0; l < plan->config.L && B > 0; l++) {
        AttentionShape shape = key_set(plan, l, 0, B, plan->T, 0).shape;
        attention_prepare(shape, false, false);
        plan->workspace_bytes =
            max_size(plan->workspace_bytes, attention_workspace_bytes(shape, omp_get_max_threads()));
    }
    if (B > 0) warn_of_attention();
}

// Plans a model for up to B sequences of T positions, on rank `rank` of `ranks` that share its state as --zero `zero`
// says. A model that is not for training has all parameters on every rank. Allocates lists only; plan_free() frees
// them.
static inline void plan_build(ModelPlan *plan, const ModelConfig *config, int B, int T, Purpose purpose,
                              Recompute recompute, int rank, int ranks, int zero) {
    memset(plan, 0, sizeof(*plan));
    plan->config = *config;
    plan->dims = attention_dims(config, false);
    plan->cross_dims = attention_dims(config, true);
    plan->tensors = tensor_list_build(config, ranks);
    int level = purpose == FOR_TRAINING ? zero : min_int(zero, 2);
    plan->sharding = sharding_build(&plan->tensors, rank, level, BUCKET_ELEMENTS(ranks));
    plan->B = B;
    plan->T = T;
    plan->rows = purpose == FOR_GENERATION ? max_int(B, min_int(T, PREFILL_ROWS)) : B * T;
    plan->purpose = purpose;
    plan->recompute = recompute;
    plan->Vp = (int)round_up((size_t)config->V, 64);
    plan->Vw = (int)round_up((size_t)config->V, MATRIX_ROWS);
    plan->logit_rows = (int)min_size(plan->rows, LOGIT_ROWS((size_t)plan->Vp * sizeof(floatX)));
    if (purpose == FOR_GENERATION) plan->logit_rows = B; // those of the next tokens
    plan->fp8 = linear_in_fp8() && purpose != FOR_GENERATION;
    plan_copies(plan);
    plan_count_bytes(plan);
    if (purpose == FOR_TRAINING)
        plan->received_bytes =
            comm_received_bytes(plan->sharding.largest * sizeof(grad_t), ranks, plan->sharding.level);
    int widest = max_int(config->C, plan->dims.norm_width), N = plan->rows;
    size_t needs[] = {plan_attention(plan), rmsnorm_workspace_bytes(widest), embedding_workspace_bytes(N),
                      head_norm_workspace_bytes(plan->dims.QD), router_workspace_bytes(plan_routing(plan, N))};
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
#endif
