/*
rollback.h: decides when training returns to an earlier checkpoint (--rollback K:M).

A step is bad when its loss or gradient norm was a spike (spikes.h), or its update was skipped. When K of the last M
steps are bad, the run returns to its newest checkpoint before the first of them, and continues with the data after the
last one: the windows in between are not read again. All ranks decide the same, from the same numbers.

  void    rollback_record_step(r, step, bad)   once per step
  int64_t rollback_due(r, step)            the first of the bad steps; 0: no rollback is due
  bool    rollback_restart_from(r, step)   records that the run returns to `step`; false when it has done so
                                           ROLLBACK_TIMES times in a row: another return would not help
  cJSON  *rollback_to_json(r); bool rollback_from_json(r, json)   state in checkpoints: a resumed run decides equally
  source  the restarts of Chowdhery et al. 2022, "PaLM", section 5.1
*/
#pragma once
#include "../base/json.h"
#include "../options/options_table.h"

enum { ROLLBACK_TIMES = 3 };

typedef struct {
    int64_t count, steps; // K of M; 0: off
    int64_t bad[ROLLBACK_LIMIT];
    int bad_count; // the last bad steps, oldest first; at most K
    int64_t target;
    int64_t times; // how often in a row the run returned to `target`
} Rollback;

static inline void rollback_record_step(Rollback *r, int64_t step, bool bad) {
    if (r->count == 0 || !bad) return;
    if (r->bad_count == r->count) memmove(r->bad, r->bad + 1, (size_t)--r->bad_count * sizeof(r->bad[0]));
    r->bad[r->bad_count++] = step;
}

static inline int64_t rollback_due(const Rollback *r, int64_t step) {
    bool due = r->count > 0 && r->bad_count == r->count && step - r->bad[0] < r->steps;
    return due ? r->bad[0] : 0;
}

static inline bool rollback_restart_from(Rollback *r, int64_t step) {
    r->times = r->target == step ? r->times + 1 : 1;
    r->target = step;
    r->bad_count = 0;
    return r->times <= ROLLBACK_TIMES;
}

static inline cJSON *rollback_to_json(const Rollback *r) {
    cJSON *json = cJSON_CreateObject(), *bad = cJSON_AddArrayToObject(json, "bad");
    for (int i = 0; i < r->bad_count; i++)
        CHECK(cJSON_AddItemToArray(bad, cJSON_CreateNumber((double)r->bad[i])), "out of memory for a JSON text");
    json_add_u64(json, "target", (uint64_t)r->target);
    json_add_u64(json, "times", (uint64_t)r->times);
    return json;
}

// Requires count and steps. json NULL: the state of a run without --rollback.
static inline bool rollback_from_json(Rollback *r, const cJSON *json) {
    uint64_t target = 0, times = 0, step = 0;
    const cJSON *bad = cJSON_GetObjectItemCaseSensitive(json, "bad"), *item;
    r->bad_count = 0;
    if (!json) return true;
    if (!cJSON_IsArray(bad) || !json_get_u64(json, "target", &target) || !json_get_u64(json, "times", &times))
        return false;
    if (target > INT64_MAX || times > ROLLBACK_TIMES) return false;
    r->target = (int64_t)target, r->times = (int64_t)times;
    int64_t older = cJSON_GetArraySize(bad) - r->count; // the last K are kept, whatever K was
    cJSON_ArrayForEach(item, bad) {
        if (!json_size(item, &step)) return false;
        if (older-- <= 0) rollback_record_step(r, (int64_t)step, true);
    }
    return true;
}
