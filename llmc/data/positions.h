/*
positions.h: how far a run has read each of its corpora, when it opens its data again: with other corpora, weights or
another length of windows.

  A corpus is known by its fingerprint, so that names and paths may change. Its order follows from its first name, or of
  a single corpus from the run's seed, and is kept. Its position is a number of tokens: the windows that it gave, times
  their length. Windows of another length T continue in their own order at index position / T, rounded up.

  void   positions_leave(p, loader, windows)   after so many windows of the loader's order; requires fingerprints
  void   positions_enter(p, loader)            before dataloader_start; likewise
  cJSON *positions_to_json(p); bool positions_from_json(p, json)
*/
#pragma once
#include "data_identity.h"

enum { POSITION_LIMIT = 256 };

typedef struct {
    int count;
    struct {
        uint64_t fingerprint, tokens;
        uint64_t seed; // of its order
        bool ordered;  // the seed is known: earlier programs did not store it
    } items[POSITION_LIMIT];
} DataPositions;

// The place of a corpus in the list, which is its end for a new one.
static inline int positions_find(const DataPositions *p, uint64_t fingerprint) {
    int i = 0;
    while (i < p->count && p->items[i].fingerprint != fingerprint) i++;
    return i;
}

static inline void positions_leave(DataPositions *p, const DataLoader *l, uint64_t windows) {
    uint64_t read[CORPUS_LIMIT];
    dataloader_windows_read(l, windows, read);
    for (int c = 0; c < l->corpus_count; c++) {
        int i = positions_find(p, l->corpora[c].fingerprint);
        CHECK(i < POSITION_LIMIT, "the phases of the run have more than %d corpora", POSITION_LIMIT);
        p->items[i].fingerprint = l->corpora[c].fingerprint;
        p->items[i].tokens = (l->corpora[c].begin + read[c]) * (uint64_t)l->T;
        p->items[i].seed = l->corpora[c].seed, p->items[i].ordered = true;
        if (i == p->count) p->count++;
    }
}

static inline void positions_enter(const DataPositions *p, DataLoader *l) {
    for (int c = 0; c < l->corpus_count; c++) {
        int i = positions_find(p, l->corpora[c].fingerprint);
        uint64_t T = (uint64_t)l->T;
        l->corpora[c].begin = i < p->count ? (p->items[i].tokens + T - 1) / T : 0;
        if (i < p->count && p->items[i].ordered) l->corpora[c].seed = p->items[i].seed;
    }
}

static inline cJSON *positions_to_json(const DataPositions *p) {
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < p->count; i++) {
        cJSON *item = cJSON_CreateObject();
        json_add_u64(item, "fingerprint", p->items[i].fingerprint);
        json_add_u64(item, "tokens", p->items[i].tokens);
        if (p->items[i].ordered) json_add_u64(item, "order", p->items[i].seed);
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
            !json_get_u64(item, "tokens", &p->items[p->count].tokens) || p->items[p->count].tokens > UINT64_MAX / 4)
            return false;
        p->items[p->count].ordered = cJSON_GetObjectItemCaseSensitive(item, "order") != NULL;
        if (p->items[p->count].ordered && !json_get_u64(item, "order", &p->items[p->count].seed)) return false;
        p->count++;
    }
    return true;
}
