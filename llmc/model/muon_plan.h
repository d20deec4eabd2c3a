/*
muon_plan.h: which tensors Muon updates (--optimizer muon, normuon), in which slices, and the rank that orthogonalizes
each of them.

  momentum   of all tensors, where AdamW has its first moments: sharded alike
  second     moments of AdamW's tensors, without gaps for those of Muon, then for NorMuon one number for each row of
             each slice, on every rank; those of a matrix are valid on its owner
  owner      The matrices of a layer are assigned by their FLOPs, the largest first, to the rank with the fewest
*/
#pragma once
#include "plan.h"

// What is orthogonalized of a matrix of Muon.
static inline MuonSlices muon_slices(const ModelPlan *plan, const Tensor *t) {
    const AttentionDims *d = &plan->dims;
    const TensorOptimizer of = t->row->optimizer;
    const int rows = (int)t->shape[0], columns = (int)t->shape[1], noise = d->groups.noise;
    const bool pair = plan->optimizer.split == SPLIT_PAIR;
    MuonSlices s = {1, rows, columns, columns, rows, 0, 0};
    if (!t->sliced) return s;
    if (of == MUON_O) { // the columns that read an output head
        s.count = d->OH, s.columns = d->DV, s.stride = (size_t)d->DV;
        return s;
    }
    int heads = of == MUON_Q ? d->NQ : of == MUON_K ? d->NK : d->NV, together = 1;
    if (pair && of == MUON_Q && noise) together = (d->groups.signals + noise) / noise;
    if (pair && of == MUON_K) together = plan->config.attention->key_sets;
    s.count = heads / together, s.rows = s.part_rows = rows / s.count, s.stride = (size_t)s.rows * (size_t)columns;
    if (pair && of == MUON_Q && noise > 1) { // all signal heads come before all noise heads
        s.part_rows = d->QD, s.stride = (size_t)d->QD * (size_t)columns;
        s.part_stride = (size_t)d->groups.signals * s.stride;
    }
    return s;
}

typedef struct {
    double flops;
    int tensor;
} MuonWork;
static inline int compare_muon_work(const void *a, const void *b) {
    const MuonWork *x = (const MuonWork *)a, *y = (const MuonWork *)b;
    if (x->flops != y->flops) return x->flops < y->flops ? 1 : -1;
    return x->tensor - y->tensor;
}

// Assigns the matrices among tensors[first] .. tensors[end-1], those of a layer.
static inline void muon_assign(ModelPlan *plan, int first, int end) {
    const int ranks = plan->sharding.ranks;
    double *load = (double *)checked_calloc(ranks, sizeof(double));
    MuonWork *work = (MuonWork *)checked_calloc(end - first, sizeof(MuonWork));
    int count = 0;
    for (int i = first; i < end; i++)
        if (plan->tensors.tensors[i].muon)
            work[count++] = (MuonWork){muon_flops(muon_slices(plan, &plan->tensors.tensors[i])), i};
    qsort(work, count, sizeof(MuonWork), compare_muon_work);
    for (int i = 0; i < count; i++) {
        int rank = 0;
        for (int r = 1; r < ranks; r++)
            if (load[r] < load[rank]) rank = r;
        plan->tensors.tensors[work[i].tensor].owner = rank;
        load[rank] += work[i].flops;
    }
    free(work);
    free(load);
}

// Completes the tensors of the plan and its number of second moments.
static inline void muon_plan(ModelPlan *plan, bool trains) {
    TensorList *list = &plan->tensors;
    Sharding *sharding = &plan->sharding;
    const bool rows = plan->optimizer.kind == OPTIMIZER_NORMUON;
    size_t less[2] = {0, 0};
    plan->second_count = sharding->level ? sharding->own : list->buffer_count;
    list->muon = trains && plan->optimizer.kind != OPTIMIZER_ADAMW;
    if (!list->muon) return;
    for (Tensor *t = list->tensors; t < list->tensors + list->count; t++) {
        size_t own = 0;
        t->muon = t->row->optimizer != ADAMW;
        t->sliced = t->muon && t->row->optimizer != MUON && plan->optimizer.split != SPLIT_MATRIX;
        memcpy(t->second, less, sizeof(less));
        if (!t->muon) continue;
        for (OwnRange r = sharding_ranges(sharding, t); sharding_next(sharding, t, &r);) own += r.count;
        less[0] += t->count / TENSOR_ALIGN * TENSOR_ALIGN; // other tensors keep their alignment
        less[1] += own / TENSOR_ALIGN * TENSOR_ALIGN;
    }
    size_t all[2] = {list->buffer_count - less[0], sharding->own - less[1]};
    for (Tensor *t = list->tensors; t < list->tensors + list->count; t++) {
        if (!t->muon || !rows) continue;
        MuonSlices s = muon_slices(plan, t);
        t->rows = (size_t)s.count * (size_t)s.rows;
        for (int i = 0; i < 2; i++) t->second[i] = all[i], all[i] += t->rows;
    }
    for (int i = 0, end; i < list->count; i = end) {
        for (end = i + 1; end < list->count && list->tensors[end].layer == list->tensors[i].layer;) end++;
        muon_assign(plan, i, end);
    }
    tensors_join(list, &plan->config);
    sharding->second = all[1];
    plan->second_count = all[sharding->level > 0];
}

static inline size_t muon_plan_workspace_bytes(const ModelPlan *plan) {
    size_t most = 0;
    for (int i = 0; i < plan->tensors.count; i++)
        if (plan->tensors.tensors[i].muon)
            most = max_size(most, muon_workspace_bytes(muon_slices(plan, &plan->tensors.tensors[i])));
    return most;
}
