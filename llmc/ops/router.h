/*
router.h: the router of a mixture of experts.

  forward   l = x W^T;  p = softmax(l);  of the K largest logits: w = softmax over these K alone = p / (sum of their p)
  losses    balance: E sum_e f_e P_e, f_e the share of all choices that fell on expert e, taken as a constant, P_e the
            mean of p_e over the tokens; 1 if both are uniform.  z: mean of (log sum exp l)^2
  backward  chosen k: dl += w_k (dw_k - sum_j w_j dw_j);  all e: dl += p_e (b f_e - sum_j p_j b f_j) + 2 z lse p_e
            with b and z the weights of the losses per token;  dx += dl W,  dW = dl^T x
  shapes    x (N,C), W (E,C), l (N,E), w and the chosen experts (N,K)
  ties      the expert with the smaller number
  numerics  logits, softmax and gradients of logits in `real`
  source    Fedus, Zoph, Shazeer 2021 (arXiv 2101.03961), equation 4; Zoph et al. 2022, "ST-MoE" (arXiv 2202.08906),
            equation 5; the renormalised weights and their order are those of Mixtral
*/
#ifndef LLMC_ROUTER_H
#define LLMC_ROUTER_H
#include "../model/mlp_kinds.h"
#include "matmul.h"
#include "ops.h"
#include "runtime.h"

// Whether expert a comes before expert b: by falling logit, NaN first, then by number.
static inline bool router_before(const real *l, int a, int b) {
    bool a_nan = l[a] != l[a], b_nan = l[b] != l[b];
    if (a_nan != b_nan) return a_nan;
    return l[a] > l[b] || (!(l[a] < l[b]) && a < b);
}

static inline void router_forward(real *logits, real *lse, int *experts, real *weights, const floatX *x,
                                  const floatX *weight, Routing r) {
    matmul_forward(logits, x, weight, r.N, r.C, r.E, r.E);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < r.N; n++) {
        const real *l = logits + (size_t)n * r.E;
        int *chosen = experts + (size_t)n * r.K;
        real *w = weights + (size_t)n * r.K, sum = 0, kept = 0;
        for (int k = 0; k < r.K; k++) { // the first of those that follow the last one
            int best = -1;
            for (int e = 0; e < r.E; e++)
                if ((k == 0 || router_before(l, chosen[k - 1], e)) && (best < 0 || router_before(l, e, best))) best = e;
            chosen[k] = best;
        }
        real most = l[chosen[0]];
        for (int e = 0; e < r.E; e++) sum += real_exp(l[e] - most);
        lse[n] = most + (real)log((double)sum);
        for (int k = 0; k < r.K; k++) kept += w[k] = real_exp(l[chosen[k]] - most);
        for (int k = 0; k < r.K; k++) w[k] /= kept;
    }
}

static inline size_t router_workspace_bytes(Routing r) { return (size_t)r.N * r.E * sizeof(real); }

static inline void router_backward(floatX *dx, grad_t *dweight, const real *dweights, const floatX *x,
                                   const floatX *weight, const real *logits, const real *lse, const int *experts,
                                   const real *weights, const real *loads, real balance, real z, Routing r, bool add) {
    real *dlogits = ops_workspace_take(router_workspace_bytes(r)), total = 0, share[MAX_EXPERTS];
    for (int e = 0; e < r.E; e++) total += loads[e];
    for (int e = 0; e < r.E; e++) share[e] = balance == 0 ? 0 : balance * loads[e] / total;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < r.N; n++) {
        const real *l = logits + (size_t)n * r.E, *w = weights + (size_t)n * r.K, *dw = dweights + (size_t)n * r.K;
        real *d = dlogits + (size_t)n * r.E, mean = 0, along = 0;
        for (int e = 0; e < r.E; e++) mean += real_exp(l[e] - lse[n]) * share[e];
        for (int e = 0; e < r.E; e++) d[e] = real_exp(l[e] - lse[n]) * (share[e] - mean + 2 * z * lse[n]);
        for (int k = 0; k < r.K; k++) along += w[k] * dw[k];
        for (int k = 0; k < r.K; k++) d[experts[(size_t)n * r.K + k]] += w[k] * (dw[k] - along);
    }
    gemm(CblasNoTrans, CblasNoTrans, r.N, r.C, r.E, 1, dlogits, r.E, weight, r.C, 1, dx, r.C);         // dx += dl W
    gemm(CblasTrans, CblasNoTrans, r.E, r.C, r.N, 1, dlogits, r.E, x, r.C, add ? 1 : 0, dweight, r.C); // dW = dl^T x
}

static inline void router_totals(real *totals, const real *logits, const real *lse, const int *experts, Routing r) {
#pragma omp parallel for schedule(static)
    for (int e = 0; e < r.E; e++) {
        double tokens = 0, probability = 0;
        for (int n = 0; n < r.N; n++) {
            probability += exp((double)(logits[(size_t)n * r.E + e] - lse[n]));
            for (int k = 0; k < r.K; k++) tokens += experts[(size_t)n * r.K + k] == e;
        }
        totals[e] += (real)tokens;
        totals[r.E + e] += (real)probability;
    }
    double squares = 0;
    for (int n = 0; n < r.N; n++) squares += (double)lse[n] * lse[n];
    totals[2 * r.E] += (real)squares;
}
#endif
