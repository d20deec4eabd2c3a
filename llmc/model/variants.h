/*
variants.h: the table of attention variants. A trait is a number that becomes a loop bound or a size; only variant_find
compares names.

  signals   output heads that share a noise head, whose map is subtracted from theirs; 0: there are no noise heads
  key_sets  sets of keys; with 2, signal heads read the first and noise heads the second
  merge     number of adjacent heads merged into one output head; its width and its value width are merge*D
  split     query and key heads have width D/split
  noise     where a noise head is: after its signal heads, or after all signal heads (i, i+NH)
  lambda    origin of the number l of an output head, from which the factor s of its noise head follows
  factor    s as a function of l
  norm      normalization of the output heads before o_proj
  gate      sigmoid gate on the output, computed from the input
  sink      extra logit in the softmax denominator

  OH = NH/merge output heads of width DV = merge*D;  NQ = OH + OH/signals query heads of width QD = D/split;
  NV = NKV/merge value heads;  NK = key_sets*NV key heads of width QD.  OH*DV = NH*D always.
*/
#pragma once
#include "../ops/head_groups.h"

typedef enum { NOISE_NONE, NOISE_NEXT, NOISE_LAST } Noise;
// The constant 1; projected from the input; a parameter, one number per layer; or one number per layer,
// exp(q1.k1) - exp(q2.k2) + lambda_init.
typedef enum { LAMBDA_NONE, LAMBDA_ONE, LAMBDA_INPUT, LAMBDA_LAYER, LAMBDA_EXP } Lambda;
// RMSNorm over all NH*D elements; or over each head, with HEAD_NORM_EPS, and then times 1 - lambda_init.
typedef enum { NORM_NONE, NORM_ALL, NORM_HEAD } Norm;
typedef enum { GATE_NONE, GATE_HEAD, GATE_ELEM } Gate;
typedef enum { SINK_NONE, SINK_ZERO, SINK_LEARNED } Sink;

typedef struct {
    const char *name;
    int signals, key_sets, merge, split;
    Noise noise;
    Lambda lambda;
    Factor factor;
    Norm norm;
    Gate gate;
    Sink sink;
} AttentionVariant;

// clang-format off
static const AttentionVariant attention_variants[] = {
    // name                  signals, key_sets, merge, split; then noise, lambda, factor, norm, gate, sink
    {"baseline",             0, 1, 1, 1, NOISE_NONE, LAMBDA_NONE,  S_LINEAR,  NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_v2",              1, 1, 1, 1, NOISE_NEXT, LAMBDA_INPUT, S_SIGMOID, NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_v2_cross_group",  1, 1, 1, 1, NOISE_LAST, LAMBDA_INPUT, S_SIGMOID, NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_v2_no_lambda",    1, 1, 1, 1, NOISE_NEXT, LAMBDA_ONE,   S_LINEAR,  NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_v2_no_sigmoid",   1, 1, 1, 1, NOISE_NEXT, LAMBDA_INPUT, S_LINEAR,  NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_v2_layer_lambda", 1, 1, 1, 1, NOISE_NEXT, LAMBDA_LAYER, S_SIGMOID, NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_v2_gated_head",   1, 1, 1, 1, NOISE_NEXT, LAMBDA_INPUT, S_SIGMOID, NORM_NONE, GATE_HEAD, SINK_NONE},
    {"diff_v2_gated_elem",   1, 1, 1, 1, NOISE_NEXT, LAMBDA_INPUT, S_SIGMOID, NORM_NONE, GATE_ELEM, SINK_NONE},
    {"diff_v2_norm",         1, 1, 1, 1, NOISE_NEXT, LAMBDA_INPUT, S_SIGMOID, NORM_HEAD, GATE_NONE, SINK_NONE},
    {"diff_grouped_2",       2, 1, 1, 1, NOISE_NEXT, LAMBDA_INPUT, S_SIGMOID, NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_grouped_4",       4, 1, 1, 1, NOISE_NEXT, LAMBDA_INPUT, S_SIGMOID, NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_v1",              1, 2, 2, 1, NOISE_NEXT, LAMBDA_EXP,   S_LINEAR,  NORM_HEAD, GATE_NONE, SINK_NONE},
    {"diff_v1_no_norm",      1, 2, 2, 1, NOISE_NEXT, LAMBDA_EXP,   S_LINEAR,  NORM_NONE, GATE_NONE, SINK_NONE},
    {"diff_scalar",          1, 2, 1, 2, NOISE_NEXT, LAMBDA_LAYER, S_LINEAR,  NORM_ALL,  GATE_NONE, SINK_NONE},
    {"off_by_one",           0, 1, 1, 1, NOISE_NONE, LAMBDA_NONE,  S_LINEAR,  NORM_NONE, GATE_NONE, SINK_ZERO},
    {"sink",                 0, 1, 1, 1, NOISE_NONE, LAMBDA_NONE,  S_LINEAR,  NORM_NONE, GATE_NONE, SINK_LEARNED},
    {"gated_head",           0, 1, 1, 1, NOISE_NONE, LAMBDA_NONE,  S_LINEAR,  NORM_NONE, GATE_HEAD, SINK_NONE},
    {"gated_elem",           0, 1, 1, 1, NOISE_NONE, LAMBDA_NONE,  S_LINEAR,  NORM_NONE, GATE_ELEM, SINK_NONE},
};
// clang-format on
enum { ATTENTION_VARIANT_COUNT = sizeof(attention_variants) / sizeof(attention_variants[0]) };

static const double HEAD_NORM_EPS = 1e-5; // epsilon of NORM_HEAD

// The initial lambda of a layer (layers from 0).
static inline double lambda_init(int layer) { return 0.8 - 0.6 * exp(-0.3 * layer); }

// Whether a noise head and its signal heads share keys and values, and nothing changes heads before the subtraction.
static inline bool variant_shares_keys(const AttentionVariant *v) {
    return v->noise == NOISE_NEXT && v->key_sets == 1 && v->sink == SINK_NONE;
}

// NULL if there is no such variant.
static inline const AttentionVariant *variant_find(const char *name) {
    for (int i = 0; i < ATTENTION_VARIANT_COUNT; i++)
        if (strcmp(attention_variants[i].name, name) == 0) return &attention_variants[i];
    return NULL;
}
