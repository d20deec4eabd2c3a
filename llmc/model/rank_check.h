/*
rank_check.h: --check-ranks-every: checks that the ranks of a run have the same bits.

  void ranks_check(model, step)   compares hashes of every tensor that all ranks hold whole: parameters, and without
                                  --zero the optimizer state; with --zero-group also the pieces of optimizer state that
                                  the ranks of the same place in their groups have. Ends the program with the first
                                  tensor that differs. All ranks call it; with one rank it does nothing
*/
#pragma once
#include "state.h"
#include <xxhash.h>

#ifndef RANKS_PIECE
#define RANKS_PIECE ((size_t)1 << 20) // bytes hashed at a time
#endif

typedef struct {
    const char *prefix;
    const void *data;
    size_t element_bytes;
} RankBuffer;

static inline uint64_t ranks_hash(const char *data, size_t bytes) {
    static char *host;
    if (!host) host = (char *)checked_calloc(RANKS_PIECE, 1);
    XXH3_state_t *state = XXH3_createState();
    CHECK(state && XXH3_64bits_reset(state) == XXH_OK, "out of memory for a hash");
    for (size_t at = 0, n; at < bytes; at += n) {
        n = min_size(RANKS_PIECE, bytes - at);
        buffer_download(host, data + at, n);
        XXH3_64bits_update(state, host, n);
    }
    uint64_t hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return hash;
}

// The hash that most ranks have; if two hashes are equally frequent, the hash of the lowest rank.
static inline uint64_t ranks_majority(const uint64_t *hash, int ranks, size_t stride) {
    int best = 0, best_count = 0;
    for (int r = 0; r < ranks; r++) {
        int count = 0;
        for (int q = 0; q < ranks; q++) count += hash[(size_t)q * stride] == hash[(size_t)r * stride];
        if (count > best_count) best = r, best_count = count;
    }
    return hash[(size_t)best * stride];
}

// Compares the pieces that only the ranks with the same place in their groups have.
static inline void ranks_check_pieces(const ModelState *model, int64_t step) {
    const ModelPlan *plan = model->plan;
    int ranks = comm_ranks(), group = plan->sharding.ranks;
    uint64_t hashes[3] = {0, 0, 0}, *all = (uint64_t *)checked_calloc(3 * (size_t)ranks, sizeof(uint64_t));
    hashes[0] = ranks_hash((const char *)model->m, plan->moments_bytes);
    if (model->master) hashes[1] = ranks_hash((const char *)model->master, plan->master_bytes);
    if (model->rank_params)
        hashes[2] = ranks_hash((const char *)model->rank_params, plan->sharding.owned * sizeof(floatX));
    comm_gather(all, hashes, sizeof(hashes));
    for (int r = group; r < ranks; r++)
        CHECK(memcmp(all + 3 * r, all + 3 * (r % group), sizeof(hashes)) == 0,
              "after step %" PRId64 " the pieces of rank %d and of rank %d differ, which have the same place in their "
              "groups: memory or processor of one is faulty; --resume continues from the newest checkpoint",
              step, r % group, r);
    free(all);
}

static inline void ranks_check(const ModelState *model, int64_t step) {
    const ModelPlan *plan = model->plan;
    const RankBuffer buffers[] = {{"", model->params, sizeof(floatX)},
                                  {"exp_avg.", model->m, sizeof(real)},
                                  {"exp_avg_sq.", model->v, sizeof(real)},
                                  {"master.", model->master, sizeof(real)}};
    int count = plan->sharding.level ? 1 : model->master ? 4 : 3;
    if (comm_ranks() == 1) return;
    watch_stage(STAGE_CHECK);
    params_await(model);
    const TensorList *list = &plan->tensors;
    int ranks = comm_ranks();
    size_t width = (size_t)(list->count * count);
    uint64_t *hashes = (uint64_t *)checked_calloc(width * (size_t)(ranks + 1), sizeof(uint64_t)), *all = hashes + width;
    for (int b = 0; b < count; b++)
        for (int i = 0; i < list->count; i++) {
            const Tensor *t = &list->tensors[i];
            bool moment2 = buffers[b].data == model->v;
            size_t at = param_place(plan, t) - (moment2 ? t->moment2_at[0] : 0);
            const char *data = (const char *)buffers[b].data + at * buffers[b].element_bytes;
            if (params_two_layers(plan) && t->layer >= 0 && t->layer < list->L) continue;
            if (moment2 && t->muon) continue;
            hashes[b * list->count + i] = ranks_hash(data, t->count * buffers[b].element_bytes);
        }
    comm_gather(all, hashes, width * sizeof(uint64_t));
    for (size_t k = 0; k < width; k++) {
        uint64_t right = ranks_majority(all + k, ranks, width);
        for (int r = 0; r < ranks; r++)
            CHECK(all[(size_t)r * width + k] == right,
                  "after step %" PRId64 " rank %d has different values in %s%s than %s: its memory or processor is "
                  "faulty; --resume continues from the newest checkpoint",
                  step, ranks == 2 ? 1 : r, buffers[k / (size_t)list->count].prefix,
                  list->tensors[k % (size_t)list->count].name,
                  ranks == 2 ? "rank 0 (one of the two is wrong)" : "most ranks");
    }
    free(hashes);
    if (plan->sharding.level && comm_groups() > 1) ranks_check_pieces(model, step);
}
