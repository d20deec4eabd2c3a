/*
layer_stats.h: statistics of a layer's activations and gradients: the records "stats" of log.jsonl (--stats-every).

  LayerStats layer_stats(plan, activations, key_set)     of the micro-batch that the activations hold
  void       log_layer_stats(log, step, layer, stats, grad_norm)

  source   attention mass on position 0: Gu et al. 2024, "When attention sink emerges in language models"; context RMS,
           the RMS of each output head's row of attention output: DIFF V2
*/
#pragma once
#include "../log/logger.h"
#include "../model/activations.h"

typedef struct {
    double load[MAX_EXPERTS]; // the tokens of each expert, relative to an equal share
    double entropy;           // of the router's probabilities, nats, mean over the tokens
    double largest_logit;     // |logit|
} RouterStats;

typedef struct {
    Range lambda;       // the factor of the second map; NaN for variants without one
    Range context_rms;  // RMS of the attention output per row and output head
    Range q_rms, k_rms; // of the rotated queries and keys per row and head; NaN in layers that read those of another
    AttentionStats attention;
    Magnitudes residual; // of the residual stream after the layer
    int experts;         // of the layer
    int head_width;      // of queries and keys
    RouterStats router;
    double agreement; // selection_agreement()
} LayerStats;

// Of N tokens. The sums are on the host, in the order of the tokens.
static inline RouterStats router_stats(const LayerActivations *a, int N, int E, int K) {
    size_t count = (size_t)N * E;
    RouterStats s;
    memset(&s, 0, sizeof(s));
    real *logits = (real *)checked_calloc(count, sizeof(real)), *lse = (real *)checked_calloc(N, sizeof(real));
    int *starts = (int *)checked_calloc(E + 1, sizeof(int));
    buffer_download(logits, a->router_logits, count * sizeof(real));
    buffer_download(lse, a->router_lse, (size_t)N * sizeof(real));
    buffer_download(starts, a->starts, (size_t)(E + 1) * sizeof(int));
    for (int e = 0; e < E; e++) s.load[e] = (double)(starts[e + 1] - starts[e]) * E / ((double)N * K);
    for (size_t i = 0; i < count; i++) {
        double logit = (double)logits[i], log_p = logit - (double)lse[i / (size_t)E];
        s.entropy -= exp(log_p) * log_p / N;
        if (!(fabs(logit) <= s.largest_logit)) s.largest_logit = fabs(logit); // NaN stays
    }
    free(logits);
    free(lse);
    free(starts);
    return s;
}

// Of block-sparse attention with lists of signal and noise heads: the share of the selected blocks that both have, mean
// of the rows with at least as many earlier blocks as they select; NaN without such a row.
static inline double selection_agreement(const int *device_lists, AttentionShape s) {
    int width = sparse_width(s.sparse), rows = 0, common = 0;
    size_t count = (size_t)s.B * s.NKV * s.sparse.kinds * s.T * width;
    int *lists = (int *)checked_calloc(count, sizeof(int));
    buffer_download(lists, device_lists, count * sizeof(int));
    for (int row = 0; row < s.B * s.NKV * s.T; row++) {
        const int *a = lists + ((size_t)(row / s.T * 2) * s.T + row % s.T) * width, *b = a + (size_t)s.T * width;
        if (a[width - 1] < 0) continue; // a full list has the first block, the selected ones and its own
        rows++;
        for (int i = 1; i < width - 1; i++)
            for (int j = 1; j < width - 1; j++) common += a[i] == b[j];
    }
    free(lists);
    return (double)common / ((double)rows * s.sparse.blocks);
}

// s: key set 0 of layer l
static inline LayerStats layer_stats(const ModelPlan *plan, const LayerActivations *a, int l, KeySet s) {
    const AttentionDims *d = plan_dims(plan, l);
    const AttentionVariant *variant = plan->config.attention;
    size_t N = (size_t)s.shape.B * s.shape.T;
    LambdaRows lambda = lambda_rows(d, a->lambda, a->fused);
    LayerStats stats;
    memset(&stats, 0, sizeof(stats));
    stats.experts = mlp_dims(&plan->config, l).experts;
    if (stats.experts) stats.router = router_stats(a, (int)N, stats.experts, plan->config.K);
    stats.lambda.min = stats.lambda.mean = stats.lambda.max = NAN;
    if (d->groups.noise) stats.lambda = lambda_stats(lambda.rows, (int)N, d->OH, lambda.ld, variant->factor);
    int heads = d->rope_heads - d->NQ; // of keys
    stats.context_rms = rms_stats(a->attn_out, (int)N, d->OH, d->DV, d->OH * d->DV);
    stats.q_rms = rms_stats(a->fused, (int)N, d->NQ, d->QD, d->fused_ld);
    stats.k_rms.min = stats.k_rms.mean = stats.k_rms.max = NAN;
    if (heads) stats.k_rms = rms_stats(a->fused + d->k_at, (int)N, heads, d->QD, d->fused_ld);
    stats.head_width = d->QD;
    stats.attention = attention_stats(a->fused + s.q, a->kv + s.k, a->lse, lambda.rows, s.shape, variant->key_sets,
                                      lambda.ld, d->groups, variant->factor);
    stats.residual = magnitude_stats(a->x_out, N * plan->config.C);
    stats.agreement = NAN;
    if (s.shape.sparse.blocks && s.shape.sparse.kinds == 2) stats.agreement = selection_agreement(a->lists, s.shape);
    return stats;
}

static inline void log_router_stats(Log *log, const RouterStats *s, int experts) {
    char number[32];
    log_key(log, "expert_load");
    for (int e = 0; e < experts; e++) {
        FORMAT(number, "%s%.4g", e ? ", " : "[", s->load[e]);
        log_append(log, number, strlen(number));
    }
    log_append(log, "]", 1);
    log_number(log, "router_entropy", s->entropy);
    log_number(log, "router_logit_max", s->largest_logit);
}

// Of the rows of the last micro-batch: the logarithm of the LM head's partition function.
static inline void log_logit_stats(Log *log, int64_t step, const Activations *a, int N) {
    real *z = (real *)checked_calloc(N, sizeof(real));
    double sum = 0, squares = 0, least = INFINITY, largest = -INFINITY;
    buffer_download(z, a->log_z, (size_t)N * sizeof(real));
    for (int n = 0; n < N; n++) {
        double x = (double)z[n];
        sum += x, squares += x * x;
        least = fmin(least, x), largest = fmax(largest, x);
    }
    free(z);
    log_begin(log, "logits", step);
    log_number(log, "log_z_min", least);
    log_number(log, "log_z_mean", sum / N);
    log_number(log, "log_z_max", largest);
    log_number(log, "z_loss", squares / N);
    log_end(log);
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
    double root = sqrt(s->head_width);
    log_number(log, "q_norm_mean", s->q_rms.mean * root);
    log_number(log, "q_norm_max", s->q_rms.max * root);
    log_number(log, "k_norm_mean", s->k_rms.mean * root);
    log_number(log, "k_norm_max", s->k_rms.max * root);
    if (s->experts) log_router_stats(log, &s->router, s->experts);
    if (!isnan(s->agreement)) log_number(log, "selection_agreement", s->agreement);
    log_end(log);
}
