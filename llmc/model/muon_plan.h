/*
muon_plan.h: which tensors Muon updates (--optimizer muon, normuon), and the rank that orthogonalizes each of them.

  momentum   all tensors have it, where AdamW has its first moments, with the same sharding
  moment2     moments of AdamW's tensors, without gaps for Muon's tensors, then for NorMuon one number for each row, on
             every rank; the numbers of a matrix are valid on its owner
  together   Matrices of experts are orthogonalized together: many small products take the time of their launches.
             The groups, and so the bits, do not depend on the number of ranks
  owner      The groups of a layer are assigned by their FLOPs, the largest first, to the rank with the fewest
*/
#pragma once
#include "plan.h"

// The group of matrices that begins at tensor t: neighbours of one shape at equal distances.
enum { MUON_TOGETHER = 12 << 20 }; // elements, with up to 96 MiB of workspace on a GPU; a larger matrix is alone
static inline MuonMatrices muon_matrices(const Tensor *t) {
    MuonMatrices m = {(int)t->shape[0], (int)t->shape[1], 1, 0};
    while (t->row->per_expert && (size_t)(m.count + 1) * t->count <= MUON_TOGETHER) {
        const Tensor *u = t + m.count; // tensors of no expert end the list
        if (!u->row->per_expert || memcmp(u->shape, t->shape, sizeof(t->shape)) != 0) break;
        if (m.count == 1) m.apart = u->offset - t->offset;
        if (u->offset - t->offset != m.count * m.apart) break;
        m.count++;
    }
    return m;
}

// Assigns the groups among the tensors of a layer, tensors[0] .. tensors[count-1].
static inline void muon_assign(Tensor *tensors, int count, int ranks) {
    double *load = (double *)checked_calloc(ranks, sizeof(double));
    for (int i = 0; i < count; i++) tensors[i].owner = -1;
    for (;;) {
        Tensor *largest = NULL;
        double most = 0;
        for (Tensor *t = tensors; t < tensors + count; t += muon_matrices(t).count) {
            double flops = muon_matrices(t).count * muon_flops((int)t->shape[0], (int)t->shape[1]);
            if (t->muon && t->owner < 0 && flops > most) most = flops, largest = t;
        }
        if (!largest) break;
        int rank = 0;
        for (int r = 1; r < ranks; r++)
            if (load[r] < load[rank]) rank = r;
        load[rank] += most;
        for (Tensor *t = largest + muon_matrices(largest).count - 1; t >= largest; t--) t->owner = rank;
    }
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
        muon_assign(&list->tensors[i], end - i, sharding->ranks);
    }
    tensors_join(list, &plan->config);
    sharding->moment2_count = all[1];
    plan->moment2_count = all[sharding->level > 0];
}

static inline size_t muon_plan_workspace_bytes(const ModelPlan *plan) {
    size_t most = 0;
    for (const Tensor *t = plan->tensors.tensors; t < plan->tensors.tensors + plan->tensors.count;
         t += muon_matrices(t).count)
        if (t->muon) most = max_size(most, muon_workspace_bytes(muon_matrices(t)));
    return most;
}
