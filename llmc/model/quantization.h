/*
quantization.h: what `--eval --quantize SPEC[,SPEC...]` rounds (llmc/ops/quantize.h).

  wNaM          weights of the blocks' linear layers to N bits per output channel, their inputs to M bits per token;
                the fused q, k, v and lambda (or gate) are one matrix
  wNaM:tensor   one step for each weight matrix and for each input
  logitsN       scaled attention logits to N bits per query row and head
  A+B           both
  bits          2 to 8, or 16: not rounded
*/
#pragma once
#include "linear_layers.h"

enum { QUANTIZATION_NAME = 32, QUANTIZATION_LIMIT = 64 };
typedef struct {
    char name[QUANTIZATION_NAME];
    int weight_bits, activation_bits, logit_bits; // 0: not rounded
    bool whole;                                   // one step per matrix
    double loss;                                  // once measured
} Quantization;

// Parses `prefix` and a number of bits, and advances *at.
static inline bool quantization_bits(const char **at, const char *prefix, int *bits) {
    const char *number = *at + strlen(prefix);
    if (strncmp(*at, prefix, strlen(prefix)) != 0) return false;
    bool rounded = *number >= '2' && *number <= '8';
    if (!rounded && strncmp(number, "16", 2) != 0) return false;
    *bits = rounded ? *number - '0' : 0;
    *at = number + (rounded ? 1 : 2);
    return true;
}

static inline bool quantization_parse(Quantization *q, const char *spec) {
    static const char tensor[] = ":tensor";
    bool linear = false, logits = false;
    memset(q, 0, sizeof(*q));
    snprintf(q->name, sizeof(q->name), "%s", spec);
    for (bool more = true; more; spec++) {
        if (!logits && quantization_bits(&spec, "logits", &q->logit_bits)) {
            logits = true;
        } else {
            if (linear || !quantization_bits(&spec, "w", &q->weight_bits)) return false;
            if (!quantization_bits(&spec, "a", &q->activation_bits)) return false;
            linear = true;
            q->whole = strncmp(spec, tensor, sizeof(tensor) - 1) == 0;
            if (q->whole) spec += sizeof(tensor) - 1;
        }
        if (*spec && *spec != '+') return false;
        more = *spec == '+';
    }
    return true;
}

// The next SPEC of a comma-separated list; *at advances, to NULL after the last. valid: whether it is accepted.
static inline Quantization quantization_next(const char **at, bool *valid) {
    Quantization q;
    char spec[QUANTIZATION_NAME];
    size_t length = strcspn(*at, ",");
    snprintf(spec, sizeof(spec), "%.*s", (int)min_size(length, INT_MAX), *at);
    *valid = quantization_parse(&q, spec) && length < sizeof(spec);
    *at = (*at)[length] ? *at + length + 1 : NULL;
    return q;
}

// Rounds the weights of the blocks' linear layers in place.
static inline void quantize_weights(const Quantization *q, const ModelPlan *plan, floatX *params) {
    const WeightCopies none = {NULL, NULL};
    for (int l = 0; l < plan->config.L && q->weight_bits; l++)
        for (int kind = 0; kind <= (l == yoco_layer(&plan->config) ? LINEAR_KV : LINEAR_BLOCK_COUNT - 1); kind++) {
            if (linear_shape(plan, (LinearKind)kind, l).OC == 0) continue;
            ExpertLinear w = expert_linear_at(plan, params, &none, NULL, (LinearKind)kind, l);
            for (int e = 0; e < linear_count(plan, (LinearKind)kind); e++)
                quantize_inplace(params + (w.first.weight - params) + (size_t)e * w.stride, w.first.OC, w.first.IC,
                                 w.first.IC, q->weight_bits, q->whole);
        }
}
