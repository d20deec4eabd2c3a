/*
layer_stats.h: statistics of a layer: the records "stats" of log.jsonl (--stats-every).

  LayerStats layer_stats(plan, activations, l, s)       statistics of the micro-batch that the activations hold
  double     update_norm_by_group(squares, state, o, scale, lr, update)
  void       log_layer_stats(log, step, layer, stats, grad_norm, update_norm)

  update   includes only tensors that AdamW updates, not Muon's matrices, whose update follows from orthogonalization
  ranks    Each rank measures its own updates; sums over different numbers of ranks differ by rounding in double.
  source   attention mass on position 0: Gu et al. 2024, "When attention sink emerges in language models"; context RMS,
           the RMS of each output head's row of attention output: DIFF V2
*/
#pragma once
#include "../log/logger.h"
#include "../model/state.h"
#include "../ops/measure/operations.h"
#include "../ops/optimizer/operations.h"
#include "../options/options_table.h"

typedef struct {
    double lambda;      // mean factor of the second map; NaN for variants without one
    double context_rms; // mean RMS of the attention output, per row and output head
    AttentionStats attention;
    double residual_max; // largest magnitude of the residual stream after the layer
} LayerStats;

// The statistics of layer l after a forward of B sequences of T positions.
static inline LayerStats layer_stats(const ModelPlan *plan, const Activations *acts, int l, int B, int T) {
    const LayerActivations *layer = &acts->layers[l];
    const AttentionDims *d = plan_dims(plan, l);
    const AttentionVariant *variant = plan->config.attention;
    AttentionTensors t = attention_tensors(plan, acts, l, 0, B, T, 0);
    int N = B * T;
    LayerStats stats;
    stats.lambda = d->groups.noise ? lambda_mean(layer->lambda, N, d->OH, d->lambda_ld, variant->factor) : NAN;
    stats.context_rms = rms_mean(layer->attn_out.data, N, d->OH, d->DV, d->OH * d->DV);
    stats.attention = attention_stats(t.q, t.k, t.lse, layer->lambda, t.shape, variant->key_sets, d->lambda_ld,
                                      d->groups, variant->factor);
    stats.residual_max = magnitude_max(layer->x_out, N, plan->config.C);
    return stats;
}

// squares [groups], summed over all ranks: sums of squares of the changes that model_update makes in the tensors before
// the layers, in each layer, and after the layers, without weight decay, at the rates of the step (--change). All ranks
// call it before the update. scale: factor of the gradients; update: its number. Returns the update's norm.
static inline double update_norm_by_group(double *squares, const ModelState *s, const Options *o, double scale,
                                          double lr, int64_t update) {
    const TensorList *list = &s->plan->tensors;
    const Sharding *sharding = &s->plan->sharding;
    size_t bytes = (size_t)sharding->groups * sizeof(double);
    double sum = 0;
    memset(squares, 0, bytes);
    for (int i = 0; i < list->span_count; i++) {
        const Tensor *t = &list->spans[i];
        Scaling k = tensor_scaling(&s->plan->config, t);
        if (t->muon || t->row->kind == T_ROUTER_BIAS) continue;
        for (RankPiece p = rank_pieces(s, t); rank_next(s, t, &p);)
            squares[t->layer + 1] += update_squares(p.grads, p.m, p.v, p.count, scale, lr * p.rate * k.rate, o->beta1,
                                                    o->beta2, o->eps * k.eps, update);
    }
    if (sharding->level) {                                             // otherwise every rank updates everything
        if (comm_rank() >= sharding->ranks) memset(squares, 0, bytes); // another group has updated the same
        comm_sum_f64(squares, sharding->groups);
    }
    for (int g = 0; g < sharding->groups; g++) sum += squares[g];
    return sqrt(sum);
}

// grad_norm: norm of the layer's gradients before clipping. update_norm: NaN without an update
static inline void log_layer_stats(Log *log, int64_t step, int layer, const LayerStats *s, double grad_norm,
                                   double update_norm) {
    log_begin(log, "stats", step);
    log_integer(log, "layer", layer);
    log_number(log, "lambda_mean", s->lambda);
    log_number(log, "context_rms_mean", s->context_rms);
    log_number(log, "first_mass_effective", s->attention.first_position_share);
    log_number(log, "logit_max", s->attention.largest_logit);
    log_number(log, "residual_max", s->residual_max);
    log_number(log, "grad_norm", grad_norm);
    log_number(log, "update_norm", update_norm);
    log_end(log);
}
