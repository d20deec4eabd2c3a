/*
positions.h: how far a run has read each of its corpora, when a resume opens other data: other corpora, weights or
another length of windows.

  A corpus is identified by its fingerprint, so that names and paths may change. Its order follows from its first name,
  or for a single corpus from the run's seed, and is kept; it distinguishes copies with the same fingerprint. Its
  position is a number of tokens: its windows that were read, times their length. Windows of another length T continue
  in their own order at index position / T, rounded up.

  void   positions_open(l, data, seed, T)      the corpora of a checkpoint ("data" of trainer_state.json) without their
                                               shards, for positions_leave; false: data is invalid. positions_close(l)
  void   positions_leave(p, loader, windows)   after `windows` windows of the loader's order; requires fingerprints
  void   positions_enter(p, loader)            before dataloader_start; requires fingerprints
  cJSON *positions_to_json(p); bool positions_from_json(p, json)
*/
#pragma once
#include "data_identity.h"

enum { POSITION_LIMIT = 256 };

typedef struct {
    int count;
    struct {
        uint64_t fingerprint, tokens;
        uint64_t seed; // seed of its order
    } items[POSITION_LIMIT];
} DataPositions;

// The place of a corpus in the list; the end for a new corpus. any: a place of any order that is not yet taken.
static inline int positions_find(const DataPositions *p, const Corpus *c, const bool *taken, bool any) {
    int i = 0;
    while (i < p->count &&
           (p->items[i].fingerprint != c->fingerprint || (any && taken[i]) || (!any && p->items[i].seed != c->seed)))
        i++;
    return i;
}

static inline bool positions_open(DataLoader *l, const cJSON *data, uint64_t seed, int T) {
    memset(l, 0, sizeof(*l));
    l->T = T, l->seed = seed, l->shuffle = true;
    l->corpus_count = cJSON_GetArraySize(data);
    if (l->corpus_count < 1 || l->corpus_count > CORPUS_LIMIT || T < 1) return false;
    l->corpora = (Corpus *)checked_calloc(l->corpus_count, sizeof(Corpus));
    l->blocks = (MixtureBlock *)checked_calloc(1, sizeof(MixtureBlock));
    for (int c = 0; c < l->corpus_count; c++) {
        const cJSON *item = cJSON_GetArrayItem(data, c);
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "name"));
        Corpus *corpus = &l->corpora[c];
        if (!name || !json_get_u64(item, "fingerprint", &corpus->fingerprint) ||
            !json_get_number(item, "weight", &corpus->weight))
            return false;
        corpus->seed = l->corpus_count > 1 ? random_key(name, seed) : seed;
    }
    dataloader_set_weights(l);
    return true;
}

static inline void positions_close(DataLoader *l) {
    free(l->corpora);
    free(l->blocks);
}

static inline void positions_leave(DataPositions *p, const DataLoader *l, uint64_t windows) {
    uint64_t read[CORPUS_LIMIT];
    dataloader_windows_read(l, windows, read);
    for (int c = 0; c < l->corpus_count; c++) {
        int i = positions_find(p, &l->corpora[c], NULL, false);
        CHECK(i < POSITION_LIMIT, "the run has read more than %d corpora", POSITION_LIMIT);
        if (i < p->count && read[c] == 0) continue; // its position does not change by rounding
        p->items[i].fingerprint = l->corpora[c].fingerprint;
        p->items[i].tokens = (l->corpora[c].begin + read[c]) * (uint64_t)l->T;
        p->items[i].seed = l->corpora[c].seed;
        if (i == p->count) p->count++;
    }
}

static inline void positions_enter(const DataPositions *p, DataLoader *l) {
    bool taken[POSITION_LIMIT] = {false};
    int places[CORPUS_LIMIT];
    for (int k = 0; k < 2 * l->corpus_count; k++) { // first places with the same order, then places of other names
        int c = k % l->corpus_count;
        if (k == c || places[c] == p->count) places[c] = positions_find(p, &l->corpora[c], taken, k != c);
        if (places[c] < p->count) taken[places[c]] = true;
    }
    for (int c = 0; c < l->corpus_count; c++) {
        int i = places[c];
        uint64_t T = (uint64_t)l->T;
        l->corpora[c].begin = i < p->count ? (p->items[i].tokens + T - 1) / T : 0;
        if (i < p->count) l->corpora[c].seed = p->items[i].seed;
    }
}

static inline cJSON *positions_to_json(const DataPositions *p) {
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < p->count; i++) {
        cJSON *item = cJSON_CreateObject();
        json_add_u64(item, "fingerprint", p->items[i].fingerprint);
        json_add_u64(item, "tokens", p->items[i].tokens);
        json_add_u64(item, "order", p->items[i].seed);
        CHECK(cJSON_AddItemToArray(list, item), "out of memory for a checkpoint");
    }
    return list;
}

// json NULL: the first data of a run.
static inline bool positions_from_json(DataPositions *p, const cJSON *json) {
    const cJSON *item;
    p->count = 0;
    if (json && !cJSON_IsArray(json)) return false;
    cJSON_ArrayForEach(item, json) {
        if (p->count == POSITION_LIMIT || !json_get_u64(item, "fingerprint", &p->items[p->count].fingerprint) ||
            !json_get_u64(item, "tokens", &p->items[p->count].tokens) || p->items[p->count].tokens > UINT64_MAX / 4 ||
            !json_get_u64(item, "order", &p->items[p->count].seed))
            return false;
        p->count++;
    }
    return true;
}
