/*
linear_layers.h: the linear layers of a model: their shapes, weights, rounded copies of the weights, and the largest
magnitudes of their operands.

  linear_shape(plan, kind, l)                  without memory; OC is 0 if layer l has no such linear layer
  linear_at(plan, params, copies, kind, l)     the linear layer of layer l, or of the model; the first of experts
  expert_linear_at(plan, params, copies, kind, l)   all experts of layer l
  linear_max(plan, maxima, kind, l, gradient)  where the largest magnitude of its x, or of its dy, is kept

Copies are made by weight_copies_refresh, called before a layer's first product after an update, and used by all
micro-steps of the next one. weight_copies_forget is called when weights have changed. With --zero 3 a layer has copies
while it has parameters: weight_copies_drop is called when others take their place.
*/
#pragma once
#include "plan.h"

// The shape of a linear layer, or of one expert, without memory.
static inline Linear linear_shape(const ModelPlan *plan, LinearKind kind, int l) {
    const ModelConfig *c = &plan->config;
    const AttentionDims *d = plan_dims(plan, l);
    MlpDims mlp = mlp_dims(c, l);
    Linear w = {NULL, NULL, NULL, c->C, c->C, c->C};
    switch (kind) {
    case LINEAR_QKVG: w.OC = d->fused_width, w.ld = d->fused_ld; break; // q, k, v and lambda or gate
    case LINEAR_O: w.IC = c->NH * c->D; break;
    case LINEAR_GATE_UP: w.OC = w.ld = 2 * mlp.width; break;
    case LINEAR_DOWN: w.IC = mlp.width, w.OC = mlp.width ? c->C : 0; break;
    case LINEAR_EXPERT_GATE_UP: w.OC = w.ld = mlp.experts ? 2 * mlp.expert_width : 0; break;
    case LINEAR_EXPERT_DOWN: w.IC = mlp.expert_width, w.OC = mlp.experts ? c->C : 0; break;
    case LINEAR_KV: w.OC = c->yoco ? (int)round_up(d->kv_rows, MATRIX_ROWS) : 0, w.ld = d->kv_ld; break;
    default: w.OC = plan->Vw, w.ld = plan->Vp;
    }
    return w;
}

static inline bool linear_of_experts(LinearKind kind) {
    return kind == LINEAR_EXPERT_GATE_UP || kind == LINEAR_EXPERT_DOWN;
}
// Whether --matmul-dtype fp8 leaves the linear layer out.
static inline bool linear_plain(LinearKind kind) {
    return kind == LINEAR_HEAD || (linear_of_experts(kind) && !linear_experts_in_fp8());
}

// maxima [L][LINEAR_BLOCK_COUNT][2], then with YOCO [2]: maxima of x and of dy; NULL: not kept
static inline size_t linear_max_count(const ModelPlan *plan) {
    return ((size_t)plan->config.L * LINEAR_BLOCK_COUNT + plan->config.yoco) * 2;
}
static inline absmax_t *linear_max(const ModelPlan *plan, absmax_t *maxima, LinearKind kind, int l, int gradient) {
    bool kept = maxima && !linear_plain(kind) && l >= 0 && l < plan->config.L;
    int at = kind == LINEAR_KV ? plan->config.L * LINEAR_BLOCK_COUNT : l * LINEAR_BLOCK_COUNT + (int)kind;
    return kept ? maxima + 2 * at + gradient : NULL;
}

// Bytes of the rounded copy of a linear layer's weight; 0: its operands are not rounded.
static inline size_t linear_rounded_bytes(Linear w, LinearKind kind) {
    return linear_copy_bytes(w.IC, w.OC, linear_plain(kind));
}

// Layers whose copies exist at a time.
static inline int copied_layers(const ModelPlan *plan) {
    return params_two_layers(plan) ? min_int(plan->config.L, 2) : plan->config.L;
}

enum { COPY_ALIGN = 256 };
// Lays out the rounded copies of the weights; generation reads the weights themselves.
static inline void plan_copies(ModelPlan *plan) {
    if (plan->purpose == FOR_GENERATION) return;
    for (int kind = 0; kind < LINEAR_COUNT; kind++) {
        size_t bytes = 0; // the larger one of the first and the last layer
        for (int l = 0; l < plan->config.L; l += max_int(1, plan->config.L - 1)) {
            Linear w = linear_shape(plan, (LinearKind)kind, l);
            size_t one = w.OC ? round_up(linear_rounded_bytes(w, (LinearKind)kind), COPY_ALIGN) : 0;
            bytes = max_size(bytes, linear_of_experts((LinearKind)kind) ? one * (size_t)plan->config.E : one);
        }
        if (kind < LINEAR_BLOCK_COUNT) {
            plan->copy_at[kind] = plan->layer_copies_bytes;
            plan->layer_copies_bytes += bytes;
            plan->copies_bytes = (size_t)copied_layers(plan) * plan->layer_copies_bytes;
        } else {
            plan->copy_at[kind] = plan->copies_bytes;
            plan->copies_bytes += bytes;
        }
    }
}

typedef struct {
    char *memory;  // NULL: no weight has a copy
    bool *current; // [L+1]: whether the copies of a layer, or of the LM head, are copies of the current weights
} WeightCopies;

static inline WeightCopies weight_copies_alloc(const ModelPlan *plan) {
    WeightCopies copies = {NULL, (bool *)checked_calloc(plan->config.L + 1, sizeof(bool))};
    if (plan->copies_bytes) copies.memory = (char *)buffer_alloc(plan->copies_bytes, "rounded copies of weights");
    return copies;
}
static inline void weight_copies_free(WeightCopies *copies) {
    buffer_free(copies->memory);
    free(copies->current);
}

// The tensor that is the linear layer's weight, or the first part of the weight.
static inline TensorKind linear_weight(const ModelPlan *plan, LinearKind kind) {
    const TensorKind kinds[LINEAR_COUNT] = {T_Q,           T_O,           T_MLP_GATE, T_MLP_DOWN,
                                            T_EXPERT_GATE, T_EXPERT_DOWN, T_YOCO_K,   lm_head_tensor(plan)};
    return kinds[kind];
}

static inline Linear linear_at(const ModelPlan *plan, const floatX *params, const WeightCopies *copies, LinearKind kind,
                               int l) {
    bool head = kind == LINEAR_HEAD, once = kind >= LINEAR_BLOCK_COUNT;
    Linear w = linear_shape(plan, kind, head ? 0 : l);
    w.weight = params + param_place(plan, tensor_of(&plan->tensors, linear_weight(plan, kind), head ? 0 : l));
    if (copies->memory && linear_rounded_bytes(w, kind))
        w.copy = copies->memory + plan->copy_at[kind] +
                 (once ? 0 : (size_t)(l % copied_layers(plan)) * plan->layer_copies_bytes);
    return w;
}

static inline ExpertLinear expert_linear_at(const ModelPlan *plan, const floatX *params, const WeightCopies *copies,
                                            LinearKind kind, int l) {
    ExpertLinear w;
    w.first = linear_at(plan, params, copies, kind, l);
    w.count = plan->config.E;
    w.stride = round_up((size_t)w.first.OC, MATRIX_ROWS) * (size_t)w.first.IC;
    w.stride = round_up(w.stride, TENSOR_ALIGN);
    w.copy_stride = round_up(linear_rounded_bytes(w.first, kind), COPY_ALIGN);
    return w;
}

// Copies the weights of layer l, or of the LM head (l = L), unless the copies are current.
static inline void weight_copies_refresh(WeightCopies *copies, const ModelPlan *plan, const floatX *params, int l) {
    bool head = l == plan->config.L;
    if (!copies->memory || copies->current[l]) return;
    int last = head ? LINEAR_HEAD : l == yoco_layer(&plan->config) ? LINEAR_KV : LINEAR_BLOCK_COUNT - 1;
    for (int kind = head ? LINEAR_HEAD : 0; kind <= last; kind++) {
        if (linear_shape(plan, (LinearKind)kind, head ? 0 : l).OC == 0) continue;
        ExpertLinear w = expert_linear_at(plan, params, copies, (LinearKind)kind, l);
        if (w.first.copy && linear_of_experts((LinearKind)kind)) expert_linear_copy_weights(&w);
        else if (w.first.copy) linear_copy_weight(&w.first);
    }
    copies->current[l] = true;
}
static inline void weight_copies_drop(WeightCopies *copies, int l) { copies->current[l] = false; }
static inline void weight_copies_forget(WeightCopies *copies, const ModelPlan *plan) {
    memset(copies->current, 0, (size_t)(plan->config.L + 1) * sizeof(bool));
}
