/*
tensor_kinds.h: the kinds of tensors of a model. tensors.h describes each of them.
*/
#pragma once
// clang-format off
typedef enum { // a tensor of a layer, or of the whole model
    T_EMBED,
    T_YOCO_NORM, T_YOCO_K, T_YOCO_V, T_YOCO_K_NORM,
    T_NORM1, T_Q, T_K, T_V, T_LAMBDA, T_GATE, T_Q_NORM, T_K_NORM, T_O, T_SUBLN,
    T_LAMBDA_Q1, T_LAMBDA_K1, T_LAMBDA_Q2, T_LAMBDA_K2, T_LAYER_LAMBDA, T_SINKS,
    T_NORM2, T_MLP_GATE, T_MLP_UP, T_MLP_DOWN, T_ROUTER, T_ROUTER_BIAS,
    T_EXPERT_GATE, T_EXPERT_UP, T_EXPERT_DOWN,
    T_NORM_FINAL, T_LM_HEAD,
    TENSOR_KINDS
} TensorKind;
// clang-format on
