/*
router_losses.h: the losses of the routers of a mixture of experts, in an update of total_rows tokens over micro-steps
and ranks. Equations in llmc/ops/router.h.

  load balancing  1/layers sum over layers of E sum_e f_e P_e. P_e is the mean probability of expert e over the tokens
                  of the update. f_e is the share of expert e in all choices: of all ranks, and in the backward of a
                  micro-step of this and the earlier micro-steps of the update; its value is reported for all of them
  z               1/layers sum over layers of the mean of (log sum exp of the logits)^2
  ranks           the numbers of tokens of each expert are summed over the ranks once per micro-step, not per layer;
                  with one rank they stay on the device until the end of the update
  source          Qiu et al. 2025, "Demons in the Detail" (arXiv 2501.11873): balance over the global batch, and counts
                  that grow over the micro-steps
*/
#pragma once
#include "activations.h"

typedef struct {
    double aux_weight, z_weight; // of the losses in the sum that is minimized
    double bias_rate;            // of the bias; 0: it does not change
    double aux, z;               // their values in the last update, without the weights
    real balance, squares;       // of a row, in router_backward
} RouterLosses;

static inline size_t router_total_bytes(const ModelPlan *plan) {
    return (size_t)plan->config.L * router_total_count(&plan->config) * sizeof(real);
}

// The totals of all layers and ranks, in host memory to be freed. Called by all ranks.
static inline double *router_sum_totals(const ModelPlan *plan, const Activations *a) {
    size_t count = router_total_bytes(plan) / sizeof(real);
    real *own = (real *)checked_calloc(count, sizeof(real));
    double *sums = (double *)checked_calloc(count, sizeof(double));
    buffer_download(own, a->router_totals, count * sizeof(real));
    for (size_t i = 0; i < count; i++) sums[i] = (double)own[i];
    comm_sum_f64(sums, (int)count);
    free(own);
    return sums;
}

// Whether the tokens of each expert are summed over ranks in each micro-step.
static inline bool router_sums_loads(const RouterLosses *losses) {
    return comm_ranks() > 1 && (losses->aux_weight != 0 || losses->bias_rate != 0);
}

// The tokens of each expert of layer l, as of the last router_count.
static inline const real *router_loads(const RouterLosses *losses, const ModelPlan *plan, const Activations *a, int l) {
    return router_sums_loads(losses) ? a->router_loads + (size_t)l * plan->config.E
                                     : a->router_totals + (size_t)l * router_total_count(&plan->config);
}

// After the forward of a micro-step over N rows, before its backward. first: of the update.
static inline void router_count(RouterLosses *losses, const ModelPlan *plan, Activations *a, int N, double total_rows,
                                bool first) {
    const ModelConfig *c = &plan->config;
    if (c->E == 0) return;
    Routing r = plan_routing(plan, N);
    double rows = total_rows * expert_layers(c);
    losses->balance = (real)(losses->aux_weight * c->E / rows);
    losses->squares = (real)(losses->z_weight / rows);
    if (first) buffer_zero(a->router_totals, router_total_bytes(plan));
    for (int l = c->dense_layers; l < c->L; l++) {
        const LayerActivations *layer = &a->layers[l];
        router_totals(a->router_totals + (size_t)l * router_total_count(c), layer->router_logits, layer->router_lse,
                      layer->starts, r);
    }
    if (!router_sums_loads(losses)) return;
    double *sums = router_sum_totals(plan, a);
    real *loads = (real *)checked_calloc((size_t)c->L * c->E, sizeof(real));
    for (int i = 0; i < c->L * c->E; i++)
        loads[i] = (real)sums[(size_t)(i / c->E) * router_total_count(c) + (size_t)(i % c->E)];
    buffer_upload(a->router_loads, loads, (size_t)c->L * c->E * sizeof(real));
    free(loads);
    free(sums);
}

// Sets aux and z to their values in an update of total_rows rows. Called by all ranks.
static inline void router_measure(RouterLosses *losses, const ModelPlan *plan, const Activations *a,
                                  int64_t total_rows) {
    const ModelConfig *c = &plan->config;
    losses->aux = losses->z = 0;
    if (c->E == 0) return;
    double *sums = router_sum_totals(plan, a), rows = (double)total_rows, layers = expert_layers(c);
    for (int l = c->dense_layers; l < c->L; l++) {
        const double *counts = sums + (size_t)l * router_total_count(c), *probabilities = counts + c->E;
        for (int e = 0; e < c->E; e++)
            losses->aux += c->E * (counts[e] / (rows * c->K)) * (probabilities[e] / rows) / layers;
        losses->z += counts[2 * c->E] / rows / layers;
    }
    free(sums);
}
