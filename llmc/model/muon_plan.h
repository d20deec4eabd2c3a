/*
muon_plan.h: which tensors Muon updates (--optimizer muon, normuon), and the rank that orthogonalizes each of them.

  momentum   all tensors have it, where AdamW has its first moments, with the same sharding
  moment2     moments of AdamW's tensors, without gaps for Muon's tensors, then for NorMuon one number for each row, on
             every rank; the numbers of a matrix are valid on its owner
  owner      The matrices of a layer are assigned by their FLOPs, the largest first, to the rank with the fewest
*/
#pragma once
#include "plan.h"

typedef struct {
    double flops;
    int tensor;
} MuonWork;
static inline int compare_muon_work(const void *a, const void *b) {
    const MuonWork *x = (const MuonWork *)a, *y = (const MuonWork *)b;
    if (x->flops != y->flops) return x->flops < y->flops ? 1 : -1;
    return x->tensor - y->tensor;
}

// Assigns the matrices among the tensors of a layer, tensors[first] .. tensors[end-1].
static inline void muon_assign(ModelPlan *plan, int first, int end) {
    const int ranks = plan->sharding.ranks;
    double *load = (double *)checked_calloc(ranks, sizeof(double));
    MuonWork *work = (MuonWork *)checked_calloc(end - first, sizeof(MuonWork));
    int count = 0;
    for (int i = first; i < end; i++) {
        const Tensor *t = &plan->tensors.tensors[i];
        if (t->muon) work[count++] = (MuonWork){muon_flops((int)t->shape[0], (int)t->shape[1]), i};
    }
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

// Completes the tensors of the plan and the number of second moments.
static inline void muon_plan(ModelPlan *plan, bool trains) {
    TensorList *list = &plan->tensors;
    Sharding *sharding = &plan->sharding;
    const bool rows = plan->optimizer == OPTIMIZER_NORMUON;
    size_t less[2] = {0, 0};
    plan->moment2_count = sharding->level ? sharding->owned : list->buffer_count;
    list->muon = trains && plan->optimizer != OPTIMIZER_ADAMW;
    if (!list->muon) return;
    for (Tensor *t = list->tensors; t < list->tensors + list->count; t++) {
        size_t owned = 0;
        t->muon = t->row->optimizer != ADAMW;
        memcpy(t->moment2_at, less, sizeof(less));
        if (!t->muon) continue;
        for (RankRange r = sharding_ranges(sharding, t); sharding_next(sharding, t, &r);) owned += r.count;
        less[0] += t->count / TENSOR_ALIGN * TENSOR_ALIGN; // other tensors keep their alignment
        less[1] += owned / TENSOR_ALIGN * TENSOR_ALIGN;
    }
    size_t all[2] = {list->buffer_count - less[0], sharding->owned - less[1]};
    for (Tensor *t = list->tensors; t < list->tensors + list->count; t++) {
        if (!t->muon || !rows) continue;
        t->rows = t->shape[0];
        for (int i = 0; i < 2; i++) t->moment2_at[i] = all[i], all[i] += t->rows;
    }
    for (int i = 0, end; i < list->count; i = end) {
        for (end = i + 1; end < list->count && list->tensors[end].layer == list->tensors[i].layer;) end++;
        muon_assign(plan, i, end);
    }
    tensors_join(list, &plan->config);
    sharding->moment2_count = all[1];
    plan->moment2_count = all[sharding->level > 0];
}

static inline size_t muon_plan_workspace_bytes(const ModelPlan *plan) {
    size_t most = 0;
    for (const Tensor *t = plan->tensors.tensors; t < plan->tensors.tensors + plan->tensors.count; t++)
        if (t->muon) most = max_size(most, muon_workspace_bytes((int)t->shape[0], (int)t->shape[1]));
    return most;
}
