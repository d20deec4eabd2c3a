/*
mlp.h: the MLP of a layer of any kind (mlp_kinds.h): an MLP for every token, experts, or both.

  every token  branch[n] = down(swiglu(gate_up(x[n])))
  experts      branch[n] = sum over the K experts of token n of down(w swiglu(gate_up(x[n]))), added to the MLP of every
               token, if there is one; w is the weight that the router gives the expert (router.h, experts.h)
  recompute    mlp_recompute gives the bits of the forward. It omits the routing, which is kept, and the
               products whose output no backward reads
*/
#pragma once
#include "mlp_kinds.h"
#include "operations.h"
#include "router_losses.h"

// clang-format off
// The activations of a layer's MLP with the MlpDims `mlp`. The columns are as in LAYER_ACTIVATIONS (activations.h).
#define MLP_ACTIVATIONS(A, M)                                                                                         \
    /* rows [gate | up] of the MLP that every token passes */                                                         \
    A(floatX, gate_up, N * 2 * mlp.width, RECOMPUTE_NORMS_AND_MLP)                                                    \
    M(hidden, N * mlp.width, RECOMPUTE_NORMS_AND_MLP, LINEAR_DOWN)                                                    \
    A(real, router_logits, N * mlp.experts, RECOMPUTE_NEVER)                                                          \
    A(real, router_lse, mlp.experts ? N : 0, RECOMPUTE_NEVER)                                                         \
    A(int, experts, N * mlp.active, RECOMPUTE_NEVER)                                                                  \
    A(real, expert_weights, N * mlp.active, RECOMPUTE_NEVER)                                                          \
    A(int, expert_starts, mlp.experts ? mlp.experts + 1 : 0, RECOMPUTE_NEVER) /* the starts of expert_group */        \
    A(int, entries, N * mlp.active, RECOMPUTE_NEVER)                                                                  \
    A(int, places, N * mlp.active, RECOMPUTE_NEVER)                                                                   \
    A(floatX, expert_gate_up, N * mlp.active * 2 * mlp.expert_width, RECOMPUTE_NORMS_AND_MLP)
// clang-format on
typedef struct {
#define MEMBER(type, name, elements, level) type *name;
#define MEASURED_MEMBER(name, elements, level, linear) Activation name;
    MLP_ACTIVATIONS(MEMBER, MEASURED_MEMBER)
#undef MEMBER
#undef MEASURED_MEMBER
} MlpActivations;

// The MLP of a layer, and the buffers that all layers share. dweight and gradients: NULL without a backward.
typedef struct {
    int layer, C;
    MlpDims dims;
    Linear gate_up, down; // for every token; dims.width 0: none
    Activation dgate_up;
    floatX *dhidden;
    ExpertLinear expert_gate_up, expert_down; // dims.experts 0: none
    const floatX *router, *router_bias;       // (E,C), (E); router_bias: NULL without one
    grad_t *drouter;
    floatX *rows, *expert_out; // (R,C): the rows of the experts, and their output or its gradient
    Activation expert_hidden, dexpert_gate_up;
    floatX *dexpert_hidden;
    real *dexpert_weights;
    MlpActivations *a; // the layer's activations
} Mlp;

static inline Routing mlp_routing(const Mlp *m, int N) { return (Routing){N, m->C, m->dims.experts, m->dims.active}; }

// hidden = weight * swiglu(expert_gate_up) for the rows of experts; the backward recomputes it
static inline void mlp_expert_hidden(const Mlp *m, int N) {
    const MlpActivations *a = m->a;
    expert_swiglu_forward(m->expert_hidden, a->expert_gate_up, a->expert_weights, a->entries, N * m->dims.active,
                          m->dims.expert_width);
}

// Computes the inputs of the down projections, except for the hidden rows of experts (mlp_expert_hidden).
static inline void mlp_recompute(Activation x, const Mlp *m, int N) {
    const MlpActivations *a = m->a;
    if (m->dims.experts) {
        expert_gather(m->rows, x.data, a->entries, mlp_routing(m, N));
        expert_linear_forward(a->expert_gate_up, activation(m->rows, x.max), &m->expert_gate_up, a->expert_starts, N,
                              N * m->dims.active);
    }
    if (m->dims.width) {
        linear_forward(a->gate_up, x, &m->gate_up, N);
        swiglu_forward(a->hidden, a->gate_up, N, m->dims.width);
    }
}

// branch, x (N,C)
static inline void mlp_forward(floatX *branch, Activation x, const Mlp *m, int N) {
    const MlpActivations *a = m->a;
    Routing r = mlp_routing(m, N);
    if (m->dims.experts) {
        router_forward(a->router_logits, a->router_lse, a->experts, a->expert_weights, x.data, m->router,
                       m->router_bias, r);
        expert_group(a->expert_starts, a->entries, a->places, a->experts, r);
    }
    mlp_recompute(x, m, N);
    if (m->dims.width) linear_forward(branch, a->hidden, &m->down, N);
    if (m->dims.experts) {
        mlp_expert_hidden(m, N);
        expert_linear_forward(m->expert_out, m->expert_hidden, &m->expert_down, a->expert_starts, N,
                              N * m->dims.active);
        expert_combine(branch, m->expert_out, a->places, r, m->dims.width > 0);
    }
}

// Adds a micro-step of N rows to the loads and losses, between its forward and its backward. first: the first
// micro-step of the update. Called by all ranks.
static inline void router_count(RouterLosses *losses, const Mlp *layers, int N, double total_rows, bool first) {
    size_t loads = (size_t)losses->L * losses->E;
    if (losses->E == 0) return;
    double rows = total_rows * (losses->L - losses->first);
    losses->balance = (real)(losses->aux_weight * losses->E / rows);
    losses->row_z = (real)(losses->z_weight / rows);
    if (first) buffer_zero(losses->totals, router_all_totals(losses) * sizeof(real));
    for (int l = losses->first; l < losses->L; l++) {
        const MlpActivations *a = layers[l].a;
        router_totals(router_layer_totals(losses, l), a->router_logits, a->router_lse, a->expert_starts,
                      mlp_routing(&layers[l], N));
    }
    if (!router_sums_loads(losses)) return;
    double *sums = router_sum_totals(losses);
    real *summed = (real *)checked_calloc(loads, sizeof(real));
    for (size_t i = 0; i < loads; i++)
        summed[i] = (real)sums[i / losses->E * router_total_count(losses->E) + i % losses->E];
    buffer_upload(losses->loads, summed, loads * sizeof(real));
    free(summed);
    free(sums);
}

// Computes dx from dbranch; dx += if every token also has an MLP, else =.
static inline void mlp_experts_backward(floatX *dx, Activation dbranch, Activation x, const Mlp *m,
                                        const RouterLosses *losses, int N, bool add) {
    const MlpActivations *a = m->a;
    Routing r = mlp_routing(m, N);
    int R = N * r.K;
    mlp_expert_hidden(m, N);
    // branch = sum of down(hidden) over the places of a row
    expert_gather(m->rows, dbranch.data, a->entries, r);
    expert_linear_backward(m->dexpert_hidden, activation(m->rows, dbranch.max), m->expert_hidden, &m->expert_down,
                           a->expert_starts, N, R, add);
    // hidden = weight * swiglu(expert_gate_up)
    expert_swiglu_backward(m->dexpert_gate_up, m->dexpert_weights, m->dexpert_hidden, a->expert_gate_up,
                           a->expert_weights, a->entries, R, m->dims.expert_width);
    // expert_gate_up = gate_up(the rows of x)
    expert_gather(m->rows, x.data, a->entries, r);
    expert_linear_backward(m->expert_out, m->dexpert_gate_up, activation(m->rows, x.max), &m->expert_gate_up,
                           a->expert_starts, N, R, add);
    expert_combine(dx, m->expert_out, a->places, r, m->dims.width > 0);
    // expert_weights = router(x), and the two losses of the router
    router_backward(dx, m->drouter, m->dexpert_weights, x.data, m->router, a->router_logits, a->router_lse, a->experts,
                    a->expert_weights, router_loads(losses, m->layer), losses->balance, losses->row_z, r, add);
}

// dx =; the gradients of weights =, or with add +=
static inline void mlp_backward(floatX *dx, Activation dbranch, Activation x, const Mlp *m, const RouterLosses *losses,
                                int N, bool add) {
    const MlpActivations *a = m->a;
    if (m->dims.width) {
        linear_backward(m->dhidden, dbranch, a->hidden, &m->down, N, add);
        swiglu_backward(m->dgate_up, m->dhidden, a->gate_up, N, m->dims.width);
        linear_backward(dx, m->dgate_up, x, &m->gate_up, N, add);
    }
    if (m->dims.experts) mlp_experts_backward(dx, dbranch, x, m, losses, N, add);
}
