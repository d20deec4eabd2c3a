/*
upcycle.h: a baseline as a variant of attention that computes the same function (--init BASE --attention NAME).

  heads    the query heads of a pair both have the weights of the baseline's head, so that a = a_2i = a_2i+1. Their
           gradients have opposite signs: a pair separates by itself.
  factors  Wlambda, the variant's own lambda and Wgate are 0, so that sigmoid gives 1/2, and tanh and the identity 0.
           o_proj is multiplied by o_factor, a power of two, which rounds nothing.
  2 NH     A baseline with twice the heads: both heads of a pair have the baseline's weights. The columns of o_proj are
           Wo/2 + R and Wo/2 - R with a random R, as large as the initial o_proj: with equal columns the gradients of
           both heads would be equal, and they would never separate.
  sinks    SINK_START: a head is multiplied by 1 - exp(SINK_START - lse), lse the log-sum-exp of its logits. At lse 0
           that differs from 1 by 2e-9, by less with more keys. The gradient of a sink is as small.
*/
#pragma once
#include "initial_values.h"

// o_factor 0: there is no exact start; `text` is the reason.
typedef struct {
    const char *attention;
    double o_factor;
    const char *text;
} UpcycleRow;

// clang-format off
static const UpcycleRow upcycle_rows[] = {
    {"baseline",             1, "pairs of equal heads, Wo split into Wo/2 + R and Wo/2 - R with a random R"},
    {"diff_v2",              2, "pairs of equal heads, factor 1/2, Wo doubled"},
    {"diff_v2_cross_group",  0, "the heads of a pair read different keys and values"},
    {"diff_v2_no_lambda",    0, "with factor 1 a pair of equal heads gives 0"},
    {"diff_v2_no_sigmoid",   1, "pairs of equal heads, factor 0, Wo unchanged"},
    {"diff_v2_signed",       1, "pairs of equal heads, factor 0, Wo unchanged"},
    {"diff_v2_head_lambda",  2, "pairs of equal heads, factor 1/2, Wo doubled"},
    {"diff_v2_layer_lambda", 2, "pairs of equal heads, factor 1/2, Wo doubled"},
    {"diff_v2_gated_head",   4, "pairs of equal heads, factor 1/2, gates 1/2, Wo times 4"},
    {"diff_v2_gated_elem",   4, "pairs of equal heads, factor 1/2, gates 1/2, Wo times 4"},
    {"diff_v2_xsa",          0, "it removes the component of a head along its own value"},
    {"diff_v2_norm",         0, "it normalizes the heads before o_proj"},
    {"diff_grouped_2",       0, "2 signal heads share a noise head, which can equal one of them only"},
    {"diff_grouped_4",       0, "4 signal heads share a noise head, which can equal one of them only"},
    {"diff_v1",              0, "it normalizes the heads before o_proj"},
    {"diff_v1_no_norm",      0, "the heads of a pair read different keys"},
    {"diff_scalar",          0, "it normalizes the heads before o_proj"},
    {"off_by_one",           0, "its softmax has an extra logit of 0"},
    {"sink",                 1, "sinks of -20: heads are multiplied by 1 - exp(-20 - log-sum-exp of their logits)"},
    {"gated_head",           2, "gates 1/2, Wo doubled"},
    {"gated_elem",           2, "gates 1/2, Wo doubled"},
    {"xsa",                  0, "it removes the component of a head along its own value"},
};
// clang-format on
static_assert(sizeof(upcycle_rows) / sizeof(upcycle_rows[0]) == ATTENTION_VARIANT_COUNT, "a row for each variant");

static const double SINK_START = -20;

static inline const UpcycleRow *upcycle_row(const AttentionVariant *v) {
    int i = 0;
    while (strcmp(upcycle_rows[i].attention, v->name) != 0) i++;
    return &upcycle_rows[i];
}

typedef struct {
    const UpcycleRow *row; // NULL: the weights are taken as they are
    ModelConfig base, config;
    uint64_t seed; // of R
} Upcycle;

// Consecutive elements of a tensor that follow from consecutive elements of the base.
typedef struct {
    size_t from, count;
    int half; // of a pair of heads; 0: the first
} UpcycleRun;

// The run at element e. Blocks are the heads of a tensor; two of the model's have the weights of one of the base.
static inline UpcycleRun upcycle_run(const Upcycle *u, const Tensor *t, size_t e) {
    AttentionDims own = attention_dims(&u->config, false), base = attention_dims(&u->base, false);
    size_t block = t->row->kind == T_Q && own.NQ > base.NQ   ? own.QD * t->shape[1]
                   : t->row->kind == T_O && own.OH > base.OH ? (size_t)own.DV
                                                             : 0;
    if (!block) return (UpcycleRun){e, t->count - e, 0};
    return (UpcycleRun){e / block / 2 * block + e % block, block - e % block, (int)(e / block % 2)};
}

// Whether the base has no such tensor: it is constant.
static inline bool upcycle_adds(const Tensor *t) {
    TensorKind kind = t->row->kind;
    return kind == T_LAMBDA || kind == T_OWN_LAMBDA || kind == T_GATE || kind == T_SINKS;
}
static inline bool upcycle_changes(const Tensor *t) {
    return upcycle_adds(t) || t->row->kind == T_Q || t->row->kind == T_O;
}

// values[0..count): elements of a run, of which `values` are the base's.
static inline void upcycle_values(const Upcycle *u, const Tensor *t, UpcycleRun run, double *values, size_t count) {
    bool splits = t->row->kind == T_O && u->config.NH > u->base.NH;
    double mean, deviation, factor = splits ? 0.5 : t->row->kind == T_O ? u->row->o_factor : 1;
    uint64_t key = random_key(t->name, u->seed);
    init_scale(t, &u->config, &mean, &deviation);
    for (size_t i = 0; i < count; i++) {
        if (upcycle_adds(t)) values[i] = t->row->kind == T_SINKS ? SINK_START : 0;
        else values[i] *= factor;
        if (splits) values[i] += (run.half ? -deviation : deviation) * random_normal(key, run.from + i);
    }
}
