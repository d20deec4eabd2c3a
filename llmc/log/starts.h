/*
starts.h: the list of a run's starts, for run.json and log.jsonl: the command, machine and changed options of each
start.

  void   starts_begin(run)                     adds "starts" with the entry of the first start to a new description
  cJSON *starts_changed(run, checkpoint, now)  the options that a resume changes: [{"name": NAME, "old": VALUE, "new":
                                               VALUE}, ...]
  void   starts_append(run, description, step, changed)
  cJSON *starts_event(step, changed)           the record of the log

  run          run.json; its other keys describe the first start
  description  the description of this start
  step         the start begins after this step
  options      the options of the run (options_state_to_json), without the options of a single start: --out, --resume,
               --init, --stop-after and --threads, which the command line of the entry shows; null: no value
  changed      An option is listed when its value differs from its value in the previous start or in the
               checkpoint. These two differ when the previous start ended without a checkpoint, or when a newer
               checkpoint is broken. The changes, applied in order, give the options of every start to readers of
               run.json, and also to readers of the log, from which a resume removes the records after its checkpoint.
               "old" is the value of the checkpoint or, where that equals the new value, the value of the previous
               start.
  use          The options at step s are the options of the last start in the list with a step below s.
*/
#pragma once
#include "../base/common.h"
#include "../base/json.h"

static inline const cJSON *json_member(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

static inline void json_add(cJSON *object, const char *key, cJSON *item) {
    CHECK(item && cJSON_AddItemToObject(object, key, item), "out of memory for a JSON text");
}

static inline cJSON *starts_entry(const cJSON *description, int64_t step, const cJSON *changed) {
    static const char *const keys[] = {"command_line", "version",         "revision",    "host",         "step",
                                       "ranks",        "threads",         "changed",     "system",       "devices",
                                       "peak",         "libraries",       "environment", "start_phases", "model",
                                       "data",         "data_fingerprint"};
    cJSON *entry = cJSON_CreateObject();
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        const cJSON *item = json_member(description, keys[i]);
        if (strcmp(keys[i], "step") == 0) json_add_u64(entry, "step", (uint64_t)step);
        else if (strcmp(keys[i], "changed") == 0) json_add(entry, "changed", cJSON_Duplicate(changed, true));
        else if (item) json_add(entry, keys[i], cJSON_Duplicate(item, true));
    }
    return entry;
}

static inline void starts_begin(cJSON *run) {
    cJSON *none = cJSON_CreateArray(), *starts = cJSON_CreateArray();
    CHECK(starts && cJSON_AddItemToArray(starts, starts_entry(run, 0, none)), "out of memory for a JSON text");
    json_add(run, "starts", starts);
    cJSON_Delete(none);
}

static inline void starts_append(cJSON *run, const cJSON *description, int64_t step, const cJSON *changed) {
    cJSON *starts = cJSON_GetObjectItemCaseSensitive(run, "starts");
    CHECK(cJSON_IsArray(starts), "\"starts\" in run.json is not a list; restore the file, or use another --out");
    CHECK(cJSON_AddItemToArray(starts, starts_entry(description, step, changed)), "out of memory for a JSON text");
}

// The value of an option in the last start of the list.
static inline const cJSON *starts_value(const cJSON *run, const char *name) {
    const cJSON *value = json_member(json_member(run, "options"), name), *start, *change;
    cJSON_ArrayForEach(start, json_member(run, "starts")) {
        cJSON_ArrayForEach(change, json_member(start, "changed")) {
            const char *option = cJSON_GetStringValue(json_member(change, "name"));
            if (option && strcmp(option, name) == 0) value = json_member(change, "new");
        }
    }
    return value;
}

// Compares two values of an option; NULL equals null.
static inline bool starts_same(const cJSON *a, const cJSON *b) {
    bool none = !a || cJSON_IsNull(a);
    if (none || !b || cJSON_IsNull(b)) return none && (!b || cJSON_IsNull(b));
    if (cJSON_IsString(a)) return cJSON_IsString(b) && strcmp(a->valuestring, b->valuestring) == 0;
    if (cJSON_IsNumber(a)) return cJSON_IsNumber(b) && a->valuedouble == b->valuedouble;
    return cJSON_IsBool(a) && cJSON_IsBool(b) && cJSON_IsTrue(a) == cJSON_IsTrue(b);
}

static inline cJSON *starts_changed(const cJSON *run, const cJSON *checkpoint, const cJSON *now) {
    cJSON *changed = cJSON_CreateArray();
    const cJSON *item;
    cJSON_ArrayForEach(item, now) {
        const cJSON *last = starts_value(run, item->string), *saved = json_member(checkpoint, item->string);
        const cJSON *old = starts_same(saved, item) ? last : saved;
        if (starts_same(old, item)) continue;
        cJSON *change = cJSON_CreateObject();
        json_add(change, "name", cJSON_CreateString(item->string));
        json_add(change, "old", old ? cJSON_Duplicate(old, true) : cJSON_CreateNull());
        json_add(change, "new", cJSON_Duplicate(item, true));
        CHECK(cJSON_AddItemToArray(changed, change), "out of memory for a JSON text");
    }
    return changed;
}

static inline cJSON *starts_event(int64_t step, const cJSON *changed) {
    cJSON *event = cJSON_CreateObject();
    json_add(event, "kind", cJSON_CreateString("event"));
    json_add_u64(event, "step", (uint64_t)step);
    json_add(event, "what", cJSON_CreateString("start"));
    json_add(event, "changed", cJSON_Duplicate(changed, true));
    return event;
}
