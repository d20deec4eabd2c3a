/*
parametrization.h: how the initial values and the update of each kind of tensor depend on the model's shape.

  standard    they do not depend on the shape, except for L (tensors.h)
  completep   muP in width and CompleteP in depth, so that one learning rate suits all shapes with one head width:
              each factor is width^a depth^b, with width = C / base C and depth = L / base L

  rules       matrices of fan-in C: deviation width^-1/2, rate 1/width. Each branch is multiplied by 1/depth, and the
              logits by 1/width
  multipliers are no operations: with initial values, rate and 1/epsilon multiplied by k, AdamW computes w multiplied
              by k. So the last matrix of a branch holds the multiplier of the branch,
              and the final norm the multiplier of the logits. Exports hold them
  decay       divided by the factor of the rate: a step shrinks all weights by lr * weight_decay
  epsilon     scales as the gradient: 1/width, in branches 1/(width depth), divided by the multiplier
  sources     Yang et al. 2022, arXiv 2203.03466; Dey et al. 2025, arXiv 2505.01618; docs/mathematics.md for the rows of
              lambda, gates and routers
*/
#pragma once
#include "model_config.h"
#include "tensor_kinds.h"

typedef struct {
    double width, depth; // exponents of the ratios
} Powers;

typedef struct {
    uint64_t kinds; // bits of TensorKind
    Powers init, rate, eps;
} ScalingRow;

// clang-format off
#define KIND(kind) ((uint64_t)1 << (kind))
static const ScalingRow scaling_rows[] = {
    // kinds, then exponents of width and depth: initial values, learning rate, epsilon
    {KIND(T_EMBED) | KIND(T_LM_HEAD), {0, 0}, {0, 0}, {-1, 0}},
    {KIND(T_NORM_FINAL), {-1, 0}, {-1, 0}, {0, 0}},
    // lambda: a row is one number per head; there are C/D heads
    {KIND(T_Q) | KIND(T_K) | KIND(T_V) | KIND(T_LAMBDA) | KIND(T_GATE) | KIND(T_MLP_GATE) | KIND(T_MLP_UP) |
        KIND(T_EXPERT_GATE) | KIND(T_EXPERT_UP) | KIND(T_YOCO_K) | KIND(T_YOCO_V), {-0.5, 0}, {-1, 0}, {-1, -1}},
    // standard initial values have L^-1/2 of the branch's 1/depth
    {KIND(T_O) | KIND(T_MLP_DOWN) | KIND(T_EXPERT_DOWN), {-0.5, -0.5}, {-1, -1}, {-1, 0}},
    // as many rows at each width
    {KIND(T_ROUTER), {-1, 0}, {-1, 0}, {-1, -1}},
    {KIND(T_LAMBDA_Q1) | KIND(T_LAMBDA_K1) | KIND(T_LAMBDA_Q2) | KIND(T_LAMBDA_K2) | KIND(T_NORM1) | KIND(T_NORM2) |
        KIND(T_SUBLN) | KIND(T_Q_NORM) | KIND(T_K_NORM) | KIND(T_SINKS) | KIND(T_LAYER_LAMBDA) | KIND(T_ROUTER_BIAS) |
        KIND(T_YOCO_NORM) | KIND(T_YOCO_K_NORM), {0, 0}, {0, 0}, {-1, -1}},
};
#undef KIND
// clang-format on
enum { SCALING_ROW_COUNT = sizeof(scaling_rows) / sizeof(scaling_rows[0]) };

// Factors that multiply the standard initial values, --lr and --eps; --weight-decay is divided by `rate`.
typedef struct {
    double init, rate, eps;
} Scaling;

static inline double scaling_factor(const ModelConfig *c, Powers p) {
    double width = c->base_width ? (double)c->C / c->base_width : 1,
           depth = c->base_depth ? (double)c->L / c->base_depth : 1;
    return pow(width, p.width) * pow(depth, p.depth);
}

static inline Scaling scaling_of(const ModelConfig *c, TensorKind kind) {
    Scaling s = {1, 1, 1};
    int row = 0;
    if (c->parametrization == PARAMETRIZATION_STANDARD) return s;
    while (row < SCALING_ROW_COUNT && !(scaling_rows[row].kinds >> kind & 1)) row++;
    assert(row < SCALING_ROW_COUNT);
    s.init = scaling_factor(c, scaling_rows[row].init);
    s.rate = scaling_factor(c, scaling_rows[row].rate);
    s.eps = scaling_factor(c, scaling_rows[row].eps);
    return s;
}
