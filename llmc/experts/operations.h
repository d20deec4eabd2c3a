/*
operations.h: the operations on experts (llmc/ops/ops.h says what a contract is): R = N K rows pass experts.
*/
#ifndef LLMC_EXPERTS_OPERATIONS_H
#define LLMC_EXPERTS_OPERATIONS_H
#include "../ops/gates/operations.h"
#include "../ops/linear/operations.h"
#include "routing.h"

// A router: each of N tokens goes to the K of E experts with the largest logits, or with a bias to the K experts with
// the largest softmax(logits) + bias. Among equal experts, the expert with the lower number is selected.
// logits = x weight^T; lse[n] = log of the sum of exp(logits[n,:]); experts[n,:] the K experts, best first;
// weights[n,k] = exp(logits[n,experts[n,k]]) / the sum of the K numerators     x (N,C), weight (E,C), logits (N,E),
//                                                          lse (N), experts, weights (N,K), bias (E); NULL: without one
static inline void router_forward(real *logits, real *lse, int *experts, real *weights, const floatX *x,
                                  const floatX *weight, const floatX *bias, Routing r);
// dweights (N,K). The gradient of the logits is the gradient through `weights` plus the gradients of two more losses:
//   balance sum_n sum_e loads[e] / (sum of loads) softmax(logits[n,:])[e]  and  z sum_n lse[n]^2
// dx (N,C) +=; dweight =, or with add +=
static inline void router_backward(floatX *dx, grad_t *dweight, const real *dweights, const floatX *x,
                                   const floatX *weight, const real *logits, const real *lse, const int *experts,
                                   const real *weights, const real *loads, real balance, real z, Routing r, bool add);
static inline size_t router_workspace_bytes(Routing r); // for the backward
// Adds to totals (2E+1): the tokens of each expert, the sum of the probabilities of each expert, the sum of lse^2.
// starts (E+1) comes from expert_group
static inline void router_totals(real *totals, const real *logits, const real *lse, const int *starts, Routing r);
// bias[i] += rate times the sign of (mean of loads) - loads[begin+i], for i < count    bias, master (count), loads (E)
// master: the unrounded bias; or NULL
static inline void router_balance(floatX *bias, real *master, const real *loads, double rate, int E, int begin,
                                  int count);

// Groups the choices of the tokens, entry i = n*K + k, by expert; within an expert the entries stay in order. places[i]
// is the place of entry i, entries[place] its inverse; the places of expert e are starts[e] .. starts[e+1]-1.
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

// The linear layers of `count` experts: expert e computes rows starts[e] .. starts[e+1]-1 of x and y.
typedef struct {
    Linear first; // the layer of expert 0; ld is OC
    int count;
    size_t stride, copy_stride; // from one expert to the next: elements of weights and gradients, bytes of copies
} ExpertLinear;
static inline void expert_linear_forward(floatX *y, Activation x, const ExpertLinear *w, const int *starts, int N,
                                         int R);
static inline void expert_linear_backward(floatX *dx, Activation dy, Activation x, const ExpertLinear *w,
                                          const int *starts, int N, int R, bool add); // dx =; dweight =, or with add +=
static inline void expert_linear_copy_weights(const ExpertLinear *w);                 // each with its own scale
static inline size_t expert_linear_workspace_bytes(int N, int R, int E, int IC, int OC); // see linear_workspace_bytes

// The codes of rows grouped by expert have the order of the rows. In the transposed codes, (columns,
// expert_code_columns), the columns of each expert begin at a multiple of 16, with zeros between.
static inline size_t expert_code_columns(int R, int E) { return fp8_padded(R) + (size_t)E * FP8_ALIGN; }
static inline size_t expert_codes_bytes(int R, int E, int columns, bool codes, bool transposed) {
    size_t rows = (codes ? fp8_padded(R) : 0) + (transposed ? expert_code_columns(R, E) : 0);
    return FP8_HEADER + rows * fp8_padded(columns);
}
static inline size_t expert_fp8_workspace_bytes(int R, int E, int IC, int OC) { // the backward needs more
    return expert_codes_bytes(R, E, IC, false, true) + expert_codes_bytes(R, E, OC, true, true);
}

// Experts with at least one of N tokens, if all are equally likely.
static inline double experts_used(Routing r) { return r.E * (1 - pow(1 - (double)r.K / r.E, r.N)); }
static inline size_t router_choices_bytes(Routing r) { // experts, weights and lse of all tokens
    return (size_t)r.N * ((size_t)r.K * (sizeof(int) + FP32_BYTES) + FP32_BYTES);
}
static inline size_t router_product_bytes(Routing r) { // x and weight, without the logits
    return ((size_t)r.N + (size_t)r.E) * (size_t)r.C * FLOATX_BYTES;
}
static inline size_t router_forward_bytes(Routing r) {
    return router_product_bytes(r) + 2 * (size_t)r.N * (size_t)r.E * FP32_BYTES + router_choices_bytes(r);
}
// dx is read and written; with add dweight is read, too
static inline size_t router_backward_bytes(Routing r, bool add) {
    size_t N = (size_t)r.N, C = (size_t)r.C, E = (size_t)r.E;
    size_t dlogits = N * E * (FP32_BYTES + FLOATX_BYTES) + N * (size_t)r.K * FP32_BYTES + router_choices_bytes(r);
    size_t to_input = (N * E + E * C + 2 * N * C) * FLOATX_BYTES;
    return dlogits + to_input + N * (E + C) * FLOATX_BYTES + (add ? 2 : 1) * E * C * FP32_BYTES;
}
static inline size_t router_totals_bytes(Routing r) {
    return (size_t)r.N * ((size_t)r.E + 1) * FP32_BYTES + ((size_t)r.E + 1) * sizeof(int);
}
// The update of `count` of E biases; master: there are unrounded biases
static inline size_t router_balance_bytes(size_t E, size_t count, bool master) {
    return E * FP32_BYTES + count * (master ? 2 * FP32_BYTES + FLOATX_BYTES : 2 * FLOATX_BYTES);
}
// Choices that a warp groups: so many that the counts of all warps fit the scratch memory with 1024 experts.
#ifndef EXPERT_GROUP_WARPS
#define EXPERT_GROUP_WARPS 256
#endif
static inline size_t expert_group_rows(Routing r) {
    const size_t warps = EXPERT_GROUP_WARPS, lanes = 32;
    return round_up(((size_t)r.N * (size_t)r.K + warps - 1) / warps, lanes);
}
static inline size_t expert_group_bytes(Routing r) { return 3 * (size_t)r.N * (size_t)r.K * sizeof(int); }
static inline size_t expert_gather_bytes(Routing r) {
    return (size_t)r.N * (size_t)r.C * ((size_t)r.K + 1) * FLOATX_BYTES + (size_t)r.N * (size_t)r.K * sizeof(int);
}
static inline size_t expert_combine_bytes(Routing r, bool add) {
    return expert_gather_bytes(r) + (add ? (size_t)r.N * (size_t)r.C * FLOATX_BYTES : 0);
}
// The bytes of swiglu, plus the weight and the entry of each row, and in the backward the gradient of the weight.
static inline size_t expert_swiglu_forward_bytes(size_t R, size_t F) {
    return swiglu_forward_bytes(R, F) + R * (sizeof(int) + FP32_BYTES);
}
static inline size_t expert_swiglu_backward_bytes(size_t R, size_t F) {
    return swiglu_backward_bytes(R, F) + R * (sizeof(int) + 2 * FP32_BYTES);
}
// size: bytes of an element of the operands, FLOATX_BYTES, or 1 in FP8. With IC and OC exchanged, the bytes of dx. A
// weight is read if its expert has a row.
static inline double expert_linear_forward_bytes(Routing r, size_t IC, size_t OC, size_t size) {
    return (double)r.N * r.K * (double)(IC * size + OC * FLOATX_BYTES) + experts_used(r) * (double)(OC * IC * size);
}
// All gradients are written: zeros for an expert without rows.
static inline double expert_linear_dweight_bytes(Routing r, size_t IC, size_t OC, size_t size, bool add) {
    return (double)r.N * r.K * (double)((IC + OC) * size) + (add ? 2.0 : 1.0) * r.E * (double)(OC * IC) * FP32_BYTES;
}
#endif
