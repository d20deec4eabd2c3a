/*
router.h: the router of a mixture of experts.

  forward   l = x W^T;  p = softmax(l);  for the K largest logits: w = softmax over these K alone = p / (sum of their p)
  bias      with a bias b the K experts with the largest p + b, and w from p as before: b has no gradient. After an
            update b_e += rate sign(mean load - load_e), so that experts with few tokens get more
  losses    balance: E sum_e f_e P_e, f_e the share of all choices that fell on expert e, taken as a constant, P_e the
            mean of p_e over the tokens; 1 if both are uniform.  z: mean of (log sum exp l)^2
  backward  chosen k: dl += w_k (dw_k - sum_j w_j dw_j);  all e: dl += p_e (b f_e - sum_j p_j b f_j) + 2 z lse p_e
            with b and z the weights of the losses per token;  dx += dl W,  dW = dl^T x
  shapes    x (N,C), W (E,C), l (N,E), w and the chosen experts (N,K)
  ties      the expert with the smaller number
  numerics  logits, softmax and gradients of logits in `real`
  source    Fedus, Zoph, Shazeer 2021 (arXiv 2101.03961), equation 4; Zoph et al. 2022, "ST-MoE" (arXiv 2202.08906),
            equation 5; the weights are renormalized and ordered as in Mixtral. Bias: Wang et al. 2024,
            "Auxiliary-Loss-Free Load Balancing" (arXiv 2408.15664), algorithm 1, with its gate replaced by softmax: the
            bias is on the scale of probabilities, where one rate suits tokens of any logit scale
*/
#pragma once
#include "../ops/linear/matmul.h"
#include "operations.h"
#include "../ops/runtime.h"
#include "../ops/vecmath.h"

// Whether expert a comes before expert b: by falling score, NaN first, then by number.
static inline bool router_before(const real *scores, int a, int b) {
    bool a_nan = scores[a] != scores[a], b_nan = scores[b] != scores[b];
    if (a_nan != b_nan) return a_nan;
    return scores[a] > scores[b] || (!(scores[a] < scores[b]) && a < b);
}

// The first expert after `last`, or of all experts if `last` is -1.
static inline int router_next(const real *scores, int E, int last) {
    int best = -1;
    for (int e = 0; e < E; e++)
        if ((last < 0 || router_before(scores, last, e)) && (best < 0 || router_before(scores, e, best))) best = e;
    return best;
}

static inline void router_forward(real *logits, real *lse, int *experts, real *weights, const floatX *x,
                                  const floatX *weight, const floatX *bias, Routing r) {
    matmul_forward(logits, x, weight, r.N, r.C, r.E, r.E);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < r.N; n++) {
        const real *l = logits + (size_t)n * r.E;
        int *chosen = experts + (size_t)n * r.K;
        real *w = weights + (size_t)n * r.K, most = l[router_next(l, r.E, -1)], sum = 0, kept = 0, biased[MAX_EXPERTS];
        for (int e = 0; e < r.E; e++) sum += real_exp(l[e] - most);
        lse[n] = most + (real)log((double)sum);
        for (int e = 0; e < r.E && bias; e++) biased[e] = real_exp(l[e] - lse[n]) + bias[e];
        for (int k = 0; k < r.K; k++) chosen[k] = router_next(bias ? biased : l, r.E, k ? chosen[k - 1] : -1);
        most = l[chosen[0]]; // with a bias the largest logit may not be among the chosen ones
        for (int k = 1; k < r.K; k++) most = l[chosen[k]] > most ? l[chosen[k]] : most;
        for (int k = 0; k < r.K; k++) kept += w[k] = real_exp(l[chosen[k]] - most);
        for (int k = 0; k < r.K; k++) w[k] /= kept;
    }
}

static inline void router_balance(floatX *bias, real *master, const real *loads, double rate, int E, int begin,
                                  int count) {
    double total = 0;
    for (int e = 0; e < E; e++) total += (double)loads[e];
    for (int i = 0; i < count; i++) {
        double load = (double)loads[begin + i] * E;
        real b = (master ? master[i] : bias[i]) + (real)(load < total ? rate : load > total ? -rate : 0);
        if (master) master[i] = b;
        bias[i] = b;
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

static inline void router_totals(real *totals, const real *logits, const real *lse, const int *starts, Routing r) {
#pragma omp parallel for schedule(static)
    for (int e = 0; e < r.E; e++) {
        double probability = 0;
        for (int n = 0; n < r.N; n++) probability += exp((double)(logits[(size_t)n * r.E + e] - lse[n]));
        totals[e] += (real)(starts[e + 1] - starts[e]);
        totals[r.E + e] += (real)probability;
    }
    double squares = 0;
    for (int n = 0; n < r.N; n++) squares += (double)lse[n] * lse[n];
    totals[2 * r.E] += (real)squares;
}
