/*
router_losses.h: the losses of the routers of a mixture of experts, in an update of total_rows tokens over micro-steps
and ranks. Equations in router.h.

  load balancing  1/layers sum over layers of E sum_e f_e P_e. P_e is the mean probability of expert e over the tokens
                  of the update. f_e is the share of expert e in the choices of all ranks. The backward of a
                  micro-step counts the update's micro-steps so far; the reported loss counts all of them
  z               1/layers sum over layers of the mean of (log sum exp of the logits)^2
  ranks           the numbers of tokens of each expert are summed over the ranks once per micro-step, not per layer;
                  with one rank they stay on the device until the end of the update
  source          Qiu et al. 2025, "Demons in the Detail" (arXiv 2501.11873): balance over the global batch, and counts
                  that grow over the micro-steps
*/
#pragma once
#include "../comm/comm.h"
#include "operations.h"

typedef struct {
    double aux_weight, z_weight; // weights of the losses in the minimized sum
    double bias_rate;            // rate of the bias; 0: it does not change
    double aux, z;               // their values in the last update, without the weights
    real balance, row_z;         // weights of the losses per row, for router_backward
    int first, L, E, K;          // layers first .. L-1 have routers; E 0: no layer has one
    real *totals;                // (L, 2E+1): totals of router_totals over the micro-steps of an update
    real *loads;                 // (L, E): tokens of each expert, summed over ranks and over the micro-steps so far
} RouterLosses;

static inline size_t router_total_count(int E) { return E ? 2 * (size_t)E + 1 : 0; } // per layer
static inline size_t router_all_totals(const RouterLosses *r) { return (size_t)r->L * router_total_count(r->E); }
static inline real *router_layer_totals(const RouterLosses *r, int l) {
    return r->totals + (size_t)l * router_total_count(r->E);
}

// The totals of all layers, summed over the ranks; the caller frees them. Called by all ranks.
static inline double *router_sum_totals(const RouterLosses *r) {
    size_t count = router_all_totals(r);
    real *totals = (real *)checked_calloc(count, sizeof(real));
    double *sums = (double *)checked_calloc(count, sizeof(double));
    buffer_download(totals, r->totals, count * sizeof(real));
    for (size_t i = 0; i < count; i++) sums[i] = (double)totals[i];
    comm_sum_f64(sums, (int)count);
    free(totals);
    return sums;
}

// Whether the tokens of each expert are summed over ranks in each micro-step.
static inline bool router_sums_loads(const RouterLosses *r) {
    return comm_ranks() > 1 && (r->aux_weight != 0 || r->bias_rate != 0);
}

// The tokens of each expert of layer l at the last router_count.
static inline const real *router_loads(const RouterLosses *r, int l) {
    return router_sums_loads(r) ? r->loads + (size_t)l * r->E : router_layer_totals(r, l);
}

// Sets aux and z to their values in an update of total_rows rows. Called by all ranks.
static inline void router_measure(RouterLosses *r, int64_t total_rows) {
    r->aux = r->z = 0;
    if (r->E == 0) return;
    double *sums = router_sum_totals(r), rows = (double)total_rows, layers = r->L - r->first;
    for (int l = r->first; l < r->L; l++) {
        const double *counts = sums + (size_t)l * router_total_count(r->E), *probabilities = counts + r->E;
        for (int e = 0; e < r->E; e++)
            r->aux += r->E * (counts[e] / (rows * r->K)) * (probabilities[e] / rows) / layers;
        r->z += counts[2 * r->E] / rows / layers;
    }
    free(sums);
}
