/*
tensor_stats.h: the weights, the update and Adam's moments of each kind of tensor in each layer: records "tensor" of
log.jsonl (--stats-every), and the norm of a whole update (update_norms.h), at the rates of the step (--change). All
ranks call these functions together, before the update, which they do not change.

  double update_norm_measure(state, step)           of all tensors that AdamW updates
  void   tensor_stats_measure(stats, state, step)   stats [groups][TENSOR_ROW_COUNT]
  void   log_tensor_stats(log, step, plan, stats)   one record per kind and layer; experts of a layer are one tensor

  ranks    Each measures what it updates; sums of different numbers of ranks differ by rounding in double.
*/
#pragma once
#include "../log/logger.h"
#include "../model/state.h"
#include "../options/options_table.h"

// The update that model_update makes: the factor of the gradients, the rate, and the number of the update.
typedef struct {
    const Options *options;
    double scale, lr;
    int64_t update;
} AdamwStep;

static inline UpdateStats tensor_stats_own(const ModelState *s, const Tensor *t, AdamwStep a) {
    const Options *o = a.options;
    Scaling k = tensor_scaling(&s->plan->config, t);
    UpdateStats sum = no_update_stats;
    if (t->row->kind == T_ROUTER_BIAS) return sum; // not AdamW
    for (OwnPiece p = own_pieces(s, t); own_next(s, t, &p);) {
        // Muon has no second moments, and its update follows from the orthogonalization
        UpdateStats piece = update_stats(p.weights, p.master, p.grads, p.m, t->muon ? p.m : p.v, p.count, a.scale,
                                         a.lr * p.rate * k.rate, t->muon ? o->muon_momentum : o->beta1, o->beta2,
                                         o->eps * k.eps, a.update);
        if (t->muon) piece.update = NAN;
        update_stats_add(&sum, &piece);
    }
    return sum;
}

// Adds up what the ranks have of `count` statistics.
static inline void tensor_stats_share(const ModelState *s, UpdateStats *stats, int count) {
    const Sharding *sharding = &s->plan->sharding;
    if (!sharding->level) return; // every rank updates everything
    UpdateStats *all = (UpdateStats *)checked_calloc((size_t)comm_ranks() * count, sizeof(UpdateStats));
    comm_gather(all, stats, (size_t)count * sizeof(UpdateStats));
    for (int k = 0; k < count; k++) stats[k] = no_update_stats;
    for (int q = 0; q < sharding->ranks; q++)
        for (int k = 0; k < count; k++) update_stats_add(&stats[k], &all[q * count + k]);
    free(all);
}

static inline double update_norm_measure(const ModelState *s, AdamwStep a) {
    const TensorList *list = &s->plan->tensors;
    UpdateStats sum = no_update_stats;
    for (int i = 0; i < list->run_count; i++) {
        UpdateStats run = list->runs[i].muon ? no_update_stats : tensor_stats_own(s, &list->runs[i], a);
        update_stats_add(&sum, &run);
    }
    tensor_stats_share(s, &sum, 1);
    return sqrt(sum.update);
}

static inline UpdateStats *tensor_stats_at(UpdateStats *stats, const Tensor *t) {
    return &stats[(t->layer + 1) * TENSOR_ROW_COUNT + (t->row - tensor_rows)];
}

static inline void tensor_stats_measure(UpdateStats *stats, const ModelState *s, AdamwStep a) {
    const TensorList *list = &s->plan->tensors;
    int groups = s->plan->sharding.groups;
    for (int k = 0; k < groups * TENSOR_ROW_COUNT; k++) stats[k] = no_update_stats;
    for (int i = 0; i < list->count; i++) {
        const Tensor *t = &list->tensors[i];
        UpdateStats own = tensor_stats_own(s, t, a);
        update_stats_add(tensor_stats_at(stats, t), &own);
    }
    for (int g = 0; g < groups; g++) tensor_stats_share(s, stats + g * TENSOR_ROW_COUNT, TENSOR_ROW_COUNT);
}

static inline void log_tensor_stats(Log *log, int64_t step, const ModelPlan *plan, UpdateStats *stats) {
    const TensorList *list = &plan->tensors;
    for (int i = 0; i < list->count; i++) {
        const Tensor *t = &list->tensors[i];
        if (t->expert > 0 || t->row->kind == T_ROUTER_BIAS) continue;
        const UpdateStats *s = tensor_stats_at(stats, t);
        double weights = sqrt(s->weights), update = sqrt(s->update);
        log_begin(log, "tensor", step);
        if (t->layer >= 0 && t->layer < list->L) log_integer(log, "layer", t->layer);
        else log_value(log, "layer", "null");
        log_string(log, "name", t->row->name);
        log_number(log, "weight_norm", weights);
        log_number(log, "update_norm", update);
        log_number(log, "ratio", update / weights);
        log_number(log, "m_max", s->largest_m);
        log_number(log, "v_min", t->muon ? NAN : s->least_v);
        log_number(log, "v_max", t->muon ? NAN : s->largest_v);
        log_end(log);
    }
}
