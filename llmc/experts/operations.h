/*
operations.h: the contract of the operations on experts, as llmc/ops/ops.h for the others, and their definitions: the
CUDA twins with DEVICE_OPS, otherwise the C twins. Routing is in llmc/experts/routing.h.
*/
#ifndef LLMC_EXPERTS_OPERATIONS_H
#define LLMC_EXPERTS_OPERATIONS_H
#include "../ops/all_ops.h"

// A router: each of N tokens goes to the K of E experts with the largest logits, or with a bias to those with the
// largest softmax(logits) + bias; the first of equal ones.
// logits = x weight^T; lse[n] = log of the sum of exp(logits[n,:]); experts[n,:] the K experts in that order;
// weights[n,k] = exp(logits[n,experts[n,k]]) over the sum of the K of them     x (N,C), weight (E,C), logits (N,E),
//                                                          lse (N), experts, weights (N,K), bias (E); NULL: without one
static inline void router_forward(real *logits, real *lse, int *experts, real *weights, const floatX *x,
                                  const floatX *weight, const floatX *bias, Routing r);
// dweights (N,K). The gradient of the logits is that through `weights`, and that of two further losses:
//   balance sum_n sum_e loads[e] / (sum of loads) softmax(logits[n,:])[e]  and  z sum_n lse[n]^2
// dx (N,C) +=; dweight =, or with add +=
static inline void router_backward(floatX *dx, grad_t *dweight, const real *dweights, const floatX *x,
                                   const floatX *weight, const real *logits, const real *lse, const int *experts,
                                   const real *weights, const real *loads, real balance, real z, Routing r, bool add);
static inline size_t router_workspace_bytes(Routing r); // for the backward
// Adds to totals (2E+1): of each expert, its tokens, then the sum of its probabilities; the sum of lse^2.
// starts (E+1): of expert_group
static inline void router_totals(real *totals, const real *logits, const real *lse, const int *starts, Routing r);
// bias[i] += rate times the sign of (mean of loads) - loads[begin+i], for i < count    bias, master (count), loads (E)
// master: the unrounded bias; or NULL
static inline void router_balance(floatX *bias, real *master, const real *loads, double rate, int E, int begin,
                                  int count);

// The choices of the tokens, entry i = n*K + k, grouped by expert; those of an expert stay in order. places[i] is the
// place of entry i, entries[place] its inverse; the places of expert e are starts[e] .. starts[e+1]-1.
// starts (E+1), entries, places (N*K)
static inline void expert_group(int *starts, int *entries, int *places, const int *experts, Routing r);
// y[p,:] = x[entries[p] / K,:]                               y (N*K,C), x (N,C)
static inline void expert_gather(floatX *y, const floatX *x, const int *entries, Routing r);
// y[n,:] = sum over k of x[places[n*K+k],:], or with add +=  y (N,C), x (N*K,C)
static inline void expert_combine(floatX *y, const floatX *x, const int *places, Routing r, bool add);
// y[p,:] = weights[entries[p]] silu(gate) * up               gate_up (R,2F) rows [gate | up], y (R,F); R = N*K rows
static inline void expert_swiglu_forward(Activation y, const floatX *gate_up, const real *weights, const int *entries,
                                         int R, int F);
static inline void expert_swiglu_backward(Activation dgate_up, real *dweights, const floatX *dy, const floatX *gate_up,
                                          const real *weights, const int *entries, int R,
                                          int F); // =; dweights has the order of weights

// The linear layers of `count` experts: rows starts[e] .. starts[e+1]-1 of x and y are those of expert e.
typedef struct {
    Linear first; // of expert 0; ld is OC
    int count;
    size_t stride, copy_stride; // from one expert to the next: elements of weights and gradients, bytes of copies
} ExpertLinear;
static inline void expert_linear_forward(floatX *y, Activation x, const ExpertLinear *w, const int *starts, int N,
                                         int R);
static inline void expert_linear_backward(floatX *dx, Activation dy, Activation x, const ExpertLinear *w,
                                          const int *starts, int N, int R, bool add); // dx =; dweight =, or with add +=
static inline void expert_linear_copy_weights(const ExpertLinear *w); // as linear_copy_weight, each with its own scale
static inline size_t expert_linear_workspace_bytes(int N, int R, int E, int IC, int OC); // as that of a linear layer

#ifdef DEVICE_OPS
#include "experts.cuh"
#include "router.cuh"
#elif !defined RECORDED_OPS
#include "experts.h"
#include "router.h"
#endif
#endif
