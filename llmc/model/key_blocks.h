/*
key_blocks.h: the blocks of keys that the rows of a layer attend to (block-sparse attention:
llmc/ops/attention/sparse.h). Both calls do nothing in a layer that attends to all keys.

  key_blocks_complete(plan, acts, l, k, base, capacity, rows)  means of the blocks that the rows complete. k: keys from
                                                               position `base` on, in a cache of `capacity` rows
  key_blocks_select(plan, acts, l, rows)                       lists of blocks of each row
*/
#pragma once
#include "activations.h"

static inline real *key_block_means(const ModelPlan *plan, const Activations *acts, int l, Rows r) {
    return acts->layers[l].means + r.sequence * sparse_means_count(plan, l);
}

static inline void key_blocks_complete(const ModelPlan *plan, const Activations *acts, int l, const floatX *k, int base,
                                       int capacity, Rows r) {
    if (!layer_sparse(&plan->config, l)) return;
    KeySet s = key_set(plan, l, 0, r.B, r.T, 0);
    s.shape.sparse.base = base;
    sparse_means(key_block_means(plan, acts, l, r), k + s.k, acts->start_position, capacity,
                 plan->config.attention->key_sets, s.shape);
}

static inline void key_blocks_select(const ModelPlan *plan, const Activations *acts, int l, Rows r) {
    AttentionTensors t = attention_tensors(plan, acts, l, 0, r.B, r.T, 0);
    if (layer_sparse(&plan->config, l))
        sparse_select(acts->layers[l].lists, t.q, key_block_means(plan, acts, l, r), acts->start_position,
                      plan->config.attention->key_sets, t.shape);
}
