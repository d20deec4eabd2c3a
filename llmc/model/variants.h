/*
variants.h: the table of attention variants. A trait is a number that becomes a loop bound or a size; only variant_find
compares names.

  maps      attention maps per output head: 1, or 2 of which the second is subtracted
  key_sets  sets of keys; with 2, map m reads key set m
  merge     number of adjacent heads merged into one output head; its width and its value width are merge*D
  split     query and key heads have width D/split
  pair      query heads of a pair: adjacent (2i, 2i+1) or across groups (i, i+NH)
  lambda    origin of the factor of the second map
  norm      normalisation of the output heads before o_proj
  norm_eps  epsilon of that norm; 0: rms_norm_eps of the configuration
  gate      sigmoid gate on the output, computed from the input
  sink      extra logit in the softmax denominator

  OH = NH/merge output heads of width DV = merge*D;  NQ = maps*OH query heads of width QD = D/split;
  NV = NKV/merge value heads;  NK = key_sets*NV key heads of width QD.  OH*DV = NH*D always.
*/
#ifndef LLMC_VARIANTS_H
#define LLMC_VARIANTS_H
#include "../base/common.h"

typedef enum { PAIR_NONE, PAIR_NEXT, PAIR_HALF } Pair;
// Projected from the input, with or without a sigmoid; the constant 1; or one number per layer, a parameter or
// exp(q1.k1) - exp(q2.k2) + lambda_init.
typedef enum { LAMBDA_NONE, LAMBDA_SIGMOID, LAMBDA_LINEAR, LAMBDA_ONE, LAMBDA_SCALAR, LAMBDA_EXP } Lambda;
// RMSNorm over all NH*D elements, or over each head and then times 1 - lambda_init.
typedef enum { NORM_NONE, NORM_ALL, NORM_HEAD } Norm;
typedef enum { GATE_NONE, GATE_HEAD, GATE_ELEMENT } Gate;
typedef enum { SINK_NONE, SINK_ZERO, SINK_LEARNED } Sink;

typedef struct {
    const char *name;
    int maps, key_sets, merge, split;
    Pair pair;
    Lambda lambda;
    Norm norm;
    double norm_eps;
    Gate gate;
    Sink sink;
} AttentionVariant;

// clang-format off
static const AttentionVariant attention_variants[] = {
    // name                 maps keys merge split pair       lambda          norm       eps   gate       sink
    {"baseline",            1,   1,   1,    1,    PAIR_NONE, LAMBDA_NONE,    NORM_NONE, 0,    GATE_NONE, SINK_NONE},
    {"diff_v2",             2,   1,   1,    1,    PAIR_NEXT, LAMBDA_SIGMOID, NORM_NONE, 0,    GATE_NONE, SINK_NONE},
    {"diff_v2_cross_group", 2,   1,   1,    1,    PAIR_HALF, LAMBDA_SIGMOID, NORM_NONE, 0,    GATE_NONE, SINK_NONE},
    {"diff_v2_no_lambda",   2,   1,   1,    1,    PAIR_NEXT, LAMBDA_ONE,     NORM_NONE, 0,    GATE_NONE, SINK_NONE},
    {"diff_v2_no_sigmoid",  2,   1,   1,    1,    PAIR_NEXT, LAMBDA_LINEAR,  NORM_NONE, 0,    GATE_NONE, SINK_NONE},
    {"diff_v1",             2,   2,   2,    1,    PAIR_NEXT, LAMBDA_EXP,     NORM_HEAD, 1e-5, GATE_NONE, SINK_NONE},
    {"diff_scalar",         2,   2,   1,    2,    PAIR_NEXT, LAMBDA_SCALAR,  NORM_ALL,  0,    GATE_NONE, SINK_NONE},
    {"off_by_one",          1,   1,   1,    1,    PAIR_NONE, LAMBDA_NONE,    NORM_NONE, 0,    GATE_NONE, SINK_ZERO},
    {"sink",                1,   1,   1,    1,    PAIR_NONE, LAMBDA_NONE,    NORM_NONE, 0,    GATE_NONE, SINK_LEARNED},
    {"gated_head",          1,   1,   1,    1,    PAIR_NONE, LAMBDA_NONE,    NORM_NONE, 0,    GATE_HEAD, SINK_NONE},
    {"gated_elem",          1,   1,   1,    1,    PAIR_NONE, LAMBDA_NONE,    NORM_NONE, 0,    GATE_ELEMENT, SINK_NONE},
};
// clang-format on
enum { ATTENTION_VARIANT_COUNT = sizeof(attention_variants) / sizeof(attention_variants[0]) };

// The initial lambda of a layer (layers from 0).
static inline double lambda_init(int layer) { return 0.8 - 0.6 * exp(-0.3 * layer); }

// NULL if there is no such variant.
static inline const AttentionVariant *variant_find(const char *name) {
    for (int i = 0; i < ATTENTION_VARIANT_COUNT; i++)
        if (strcmp(attention_variants[i].name, name) == 0) return &attention_variants[i];
    return NULL;
}
#endif
