/*
qk_clip.h: QK-clip (--qk-clip T): after an update, the rows of q_proj of a query head whose largest logit in its step
exceeded T are scaled so that it would have been T. Where each query head has a key head of its own, the factor is
divided between the rows of both.

  void   qk_clip_measure(plan, acts, l, s, limit, first)  in a backward, of layer l; s: its key set 0. first: micro-step
  QkClip qk_clip_agree(plan, acts, limit)                 after the last micro-step; called by all ranks
  void   qk_clip_apply(state, acts, run, limit)           after run `run` of the tensors is updated: its layer, if it is
                                                          complete. Muon updates matrices when a layer is complete

  logits   exact where they exceed T; smaller ones need not be computed again (largest_logits)
  ranks    A maximum has no rounding: the factors do not depend on the number of ranks or micro-steps.
  source   Kimi Team 2025, "Kimi K2: Open Agentic Intelligence" (arXiv 2507.20534), section 2.1
*/
#pragma once
#include "state.h"

typedef struct {
    bool on;
    int heads;      // whose largest logit exceeded T
    double largest; // logit, or where none exceeded T the largest log-sum-exp
} QkClip;

static inline size_t qk_clip_count(const ModelPlan *plan) { return (size_t)plan->config.L * plan->dims.NQ; }

static inline void qk_clip_measure(const ModelPlan *plan, const Activations *a, int l, KeySet s, real limit,
                                   bool first) {
    const LayerActivations *layer = &a->layers[l];
    int NQ = plan->dims.NQ;
    if (first) buffer_zero(a->largest_logits + (size_t)l * NQ, NQ * sizeof(real));
    largest_logits(a->largest_logits + (size_t)l * NQ, layer->fused + s.q, layer->kv + s.k, layer->lse, s.shape,
                   plan->config.attention->key_sets, limit);
}

static inline QkClip qk_clip_agree(const ModelPlan *plan, const Activations *a, real limit) {
    QkClip clip = {limit > 0, 0, 0};
    size_t count = qk_clip_count(plan), bytes = count * sizeof(real);
    if (!clip.on) return clip;
    real *own = (real *)checked_calloc(count, sizeof(real)),
         *all = (real *)checked_calloc(count * comm_ranks(), sizeof(real));
    buffer_download(own, a->largest_logits, bytes);
    comm_gather(all, own, bytes);
    for (size_t i = 0; i < count; i++) {
        for (int q = 0; q < comm_ranks(); q++) own[i] = all[q * count + i] > own[i] ? all[q * count + i] : own[i];
        clip.heads += own[i] > limit;
        if ((double)own[i] > clip.largest) clip.largest = (double)own[i]; // GCC 12.2 for aarch64 crashes on fmax here
    }
    buffer_upload(a->largest_logits, own, bytes);
    free(own);
    free(all);
    return clip;
}

static inline void qk_clip_apply(const ModelState *s, const Activations *a, int run, real limit) {
    const TensorList *list = &s->plan->tensors;
    int l = list->runs[run].layer;
    if (!(limit > 0) || l < 0 || l >= list->L || !run_ends_group(list, run)) return;
    const AttentionDims *d = plan_dims(s->plan, l);
    bool own_keys = d->rope_heads == 2 * d->NQ; // of each query head
    for (int i = 0; i <= own_keys; i++) {
        const Tensor *t = tensor_of(list, i ? T_K : T_Q, l);
        for (OwnPiece p = own_pieces(s, t); own_next(s, t, &p);)
            clip_heads(p.weights, p.master, p.begin, p.count, (size_t)d->QD * t->shape[1],
                       a->largest_logits + (size_t)l * d->NQ, limit, own_keys);
    }
}
