/*
layer_tensors.h: the parameters of a layer and their gradients, as pointers that are valid from the allocation on. With
--zero 3 they point to the places of layer l % 2 (state.h).
*/
#pragma once
#include "state.h"

// clang-format off
// Vectors of a layer: name, kind. A member is NULL in a model without the tensor; its gradient is named d and the name.
#define LAYER_VECTORS(V)                                                                                          \
    V(norm1, T_NORM1) V(q_norm, T_Q_NORM) V(k_norm, T_K_NORM) V(subln, T_SUBLN) V(norm2, T_NORM2)                 \
    V(lambda_q1, T_LAMBDA_Q1) V(lambda_k1, T_LAMBDA_K1) V(lambda_q2, T_LAMBDA_Q2) V(lambda_k2, T_LAMBDA_K2)       \
    V(lambda, T_LAYER_LAMBDA) V(sinks, T_SINKS)                                                                 \
    V(kv_norm, T_YOCO_NORM) V(kv_k_norm, T_YOCO_K_NORM) /* YOCO, in the layer before which its keys are computed */
// clang-format on

typedef struct {
#define MEMBER(name, kind) \
    const floatX *name;    \
    grad_t *d##name;
    LAYER_VECTORS(MEMBER)
#undef MEMBER
    const floatX *norm_next; // norm1 of the next layer, or the final norm
    Linear qkvg, o;          // qkvg: q, k, v, and lambda or gate
    Linear kv;               // makes YOCO's keys and values; in the layer before which they are computed
    const Mlp *mlp;
} LayerTensors;

// A linear layer of layer l; its shape alone if the layer has none.
static inline Linear bound_linear(const ModelState *s, LinearKind kind, int l) {
    Linear none = linear_shape(s->plan, kind, l);
    return none.OC ? linear_of(s, kind, l) : none;
}

static inline Mlp mlp_bind(const ModelState *s, Activations *g, int l) {
    Mlp m;
    MlpDims dims = mlp_dims(&s->plan->config, l);
    memset(&m, 0, sizeof(m));
    m.layer = l, m.C = s->plan->config.C, m.dims = dims, m.a = &g->layers[l].mlp;
    m.gate_up = bound_linear(s, LINEAR_GATE_UP, l), m.down = bound_linear(s, LINEAR_DOWN, l);
    m.dgate_up = activation(g->dgate_up, linear_max(s->plan, g->maxima, LINEAR_GATE_UP, l, 1));
    m.dhidden = g->dhidden;
    if (!dims.experts) return m;
    m.expert_gate_up = experts_of(s, LINEAR_EXPERT_GATE_UP, l);
    m.expert_down = experts_of(s, LINEAR_EXPERT_DOWN, l);
    m.router = param(s, T_ROUTER, l), m.drouter = grad(s, T_ROUTER, l), m.router_bias = param(s, T_ROUTER_BIAS, l);
    m.rows = g->expert_rows, m.expert_out = g->expert_out;
    m.expert_hidden = activation(g->expert_hidden, linear_max(s->plan, g->maxima, LINEAR_EXPERT_DOWN, l, 0));
    m.dexpert_gate_up = activation(g->dexpert_gate_up, linear_max(s->plan, g->maxima, LINEAR_EXPERT_GATE_UP, l, 1));
    m.dexpert_hidden = g->dexpert_hidden, m.dexpert_weights = g->dexpert_weights;
    return m;
}

// The tensors of layer l. mlp: its MLP, which mlp_bind has filled.
static inline LayerTensors layer_tensors(const ModelState *s, const Mlp *mlp, int l) {
    LayerTensors p;
    bool last = l == s->plan->config.L - 1;
#define BIND(name, kind) p.name = param(s, kind, l), p.d##name = grad(s, kind, l);
    LAYER_VECTORS(BIND)
#undef BIND
    p.norm_next = last ? param(s, T_NORM_FINAL, 0) : param(s, T_NORM1, l + 1);
    p.qkvg = linear_of(s, LINEAR_QKVG, l), p.o = linear_of(s, LINEAR_O, l);
    memset(&p.kv, 0, sizeof(p.kv));
    if (l == yoco_layer(&s->plan->config)) p.kv = linear_of(s, LINEAR_KV, l);
    p.mlp = mlp;
    return p;
}

// The tensors and the MLPs of all layers: arrays [L], which the caller frees.
static inline LayerTensors *layer_tensors_alloc(Mlp **mlps, const ModelState *s, Activations *g) {
    int L = s->plan->config.L;
    LayerTensors *layers = (LayerTensors *)checked_calloc(L, sizeof(LayerTensors));
    *mlps = (Mlp *)checked_calloc(L, sizeof(Mlp));
    for (int l = 0; l < L; l++) {
        (*mlps)[l] = mlp_bind(s, g, l);
        layers[l] = layer_tensors(s, &(*mlps)[l], l);
    }
    return layers;
}

// The losses of a model's routers, without weights.
static inline RouterLosses router_losses(const ModelPlan *plan, const Activations *g) {
    const ModelConfig *c = &plan->config;
    RouterLosses r;
    memset(&r, 0, sizeof(r));
    r.first = c->dense_layers, r.L = c->L, r.E = c->E, r.K = c->K;
    r.totals = g->router_totals, r.loads = g->router_loads;
    return r;
}
