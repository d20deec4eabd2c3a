/*
cached_attention.h: attention of a model for generation. The new keys and values, in the fused rows, are stored in
the cache of their layer; a layer with a window has a ring of the window's positions (cache_capacity).
*/
#pragma once
#include "key_blocks.h"

// heads, lse = attention(q, k, v) of every query head, as in a forward of whole sequences
static inline void cached_attention_forward(const ModelPlan *plan, const Activations *acts, int l, Rows r) {
    const AttentionDims *d = plan_dims(plan, l);
    const LayerActivations *layer = &acts->layers[l];
    int capacity = cache_capacity(plan, l), width = d->kv_rows, earlier = 0;
    floatX *cache = layer->kv + (size_t)r.sequence * capacity * width;
    const floatX *k = cache;
    bool ring = capacity < plan->T && r.T > 1, cross = layer_cross(&plan->config, l);
    if (ring) { // the piece overwrites positions that its first rows attend to: they are copied
        earlier = min_int(r.start_position, capacity - 1);
        if (earlier) cache_load(acts->staged, cache, r.start_position - earlier, earlier, capacity, width);
        cache_store(acts->staged + (size_t)earlier * width, layer->k, NULL, 1, r.T, r.T, width, d->fused_ld);
        k = acts->staged;
    }
    if (!cross) cache_store(cache, layer->k, acts->start_position, r.B, r.T, capacity, width, d->fused_ld);
    if (!cross)
        key_blocks_complete(plan, acts, l, k, ring ? r.start_position - earlier : 0, ring ? plan->T : capacity, r);
    key_blocks_select(plan, acts, l, r);
    for (int set = 0; set < plan->config.attention->key_sets; set++) {
        AttentionTensors t = attention_tensors(plan, acts, l, set, r.B, r.T, ring ? earlier : r.start_position);
        const floatX *keys = k + (t.k - layer->kv), *values = k + (t.v - layer->kv);
        if (ring) t.shape.sparse.base = r.start_position - earlier;
        if (layer_sparse(&plan->config, l))
            sparse_attention_forward(t.out, t.lse, t.q, keys, values, r.T == 1 ? acts->start_position : NULL, capacity,
                                     t.shape);
        else if (r.T == 1) attention_decode(t.out, t.lse, t.q, keys, values, acts->start_position, capacity, t.shape);
        else attention_forward(t.out, t.lse, t.q, keys, values, t.shape);
    }
}
