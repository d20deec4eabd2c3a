/*
layer_stats.h: statistics of a layer's activations and gradients: the records "stats" of log.jsonl (--stats-every).

  LayerStats layer_stats(plan, activations, key_set)     of the micro-batch that the activations hold
  void       log_layer_stats(log, step, layer, stats, grad_norm)

  source   attention mass on position 0: Gu et al. 2024, "When attention sink emerges in language models"; context RMS,
           the RMS of each output head's row of attention output: DIFF V2
*/
#ifndef LLMC_LAYER_STATS_H
#define LLMC_LAYER_STATS_H
#include "logger.h"
#include "model_memory.h"

typedef struct {
    Range lambda;      // the factor of the second map; NaN for variants without one
    Range context_rms; // RMS of the attention output per row and output head
    AttentionStats attention;
    Magnitudes residual; // of the residual stream after the layer
} LayerStats;

// s: key set 0 of layer l
static inline LayerStats layer_stats(const ModelPlan *plan, const LayerActivations *a, int l, KeySet s) {
    const AttentionDims *d = plan_dims(plan, l);
    const AttentionVariant *variant = plan->config.attention;
    size_t N = (size_t)s.shape.B * s.shape.T;
    LambdaRows lambda = lambda_rows(d, a->lambda, a->fused);
    LayerStats stats;
    stats.lambda.min = stats.lambda.mean = stats.lambda.max = NAN;
    if (d->groups.noise) stats.lambda = lambda_stats(lambda.rows, (int)N, d->OH, lambda.ld, variant->factor);
    stats.context_rms = rms_stats(a->attn_out, N * d->OH, d->DV);
    stats.attention = attention_stats(a->fused + s.q, a->kv + s.k, a->lse, lambda.rows, s.shape, variant->key_sets,
                                      lambda.ld, d->groups, variant->factor);
    stats.residual = magnitude_stats(a->x_out, N * plan->config.C);
    return stats;
}

// grad_norm: of the layer's gradients before clipping.
static inline void log_layer_stats(Log *log, int64_t step, int layer, const LayerStats *s, double grad_norm) {
    log_begin(log, "stats", step);
    log_integer(log, "layer", layer);
    log_number(log, "lambda_min", s->lambda.min);
    log_number(log, "lambda_mean", s->lambda.mean);
    log_number(log, "lambda_max", s->lambda.max);
    log_number(log, "context_rms_min", s->context_rms.min);
    log_number(log, "context_rms_mean", s->context_rms.mean);
    log_number(log, "context_rms_max", s->context_rms.max);
    log_number(log, "first_mass_map0", s->attention.first[0]);
    log_number(log, "first_mass_map1", s->attention.first[1]);
    log_number(log, "first_mass_effective", s->attention.first_effective);
    log_number(log, "logit_max", s->attention.largest_logit);
    log_number(log, "residual_max", s->residual.largest);
    log_number(log, "residual_median", s->residual.median);
    log_number(log, "grad_norm", grad_norm);
    log_end(log);
}
#endif
