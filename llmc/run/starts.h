/*
starts.h: the starts of a run: what each of them was and changed, for run.json and log.jsonl.

  void   starts_begin(run)                     adds "starts" with the entry of the first start, where it is missing: in
                                               a new description, and in the run.json of a version that wrote none
  cJSON *starts_changed(run, checkpoint, now)  what a resume changes: [{"name": NAME, "old": VALUE, "new": VALUE}, ...]
  void   starts_append(run, description, step, changed)
  cJSON *starts_event(step, changed)           the record of the log

  run          run.json: its other keys stay those of the first start
  description  the same of this start
  step         the step that the start begins after
  options      those that belong to the run and not to one start of it (options_state_to_json), so without --out,
               --resume, --init, --stop-after and --threads, which the command line of the entry shows; null where not
               given
  changed      An option is listed when its value is not that of the start before, or not that of the checkpoint. The
               two differ when the start before ended without a checkpoint of its own, or a newer checkpoint is broken.
               So the changes in their order give the options of every start, to a reader of run.json, and also to a
               reader of the log, from which a resume removes the records after its checkpoint. "old" is the
               checkpoint's value; where that is the new one, it is the value of the start before.
  use          The options at step s are those of the last start in the list with a step below s.
*/
#ifndef LLMC_STARTS_H
#define LLMC_STARTS_H
#include "../base/common.h"
#include "../base/json.h"

static inline const cJSON *json_member(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

static inline void json_add(cJSON *object, const char *key, cJSON *item) {
    CHECK(item && cJSON_AddItemToObject(object, key, item), "out of memory for a JSON text");
}

static inline cJSON *starts_entry(const cJSON *description, int64_t step, const cJSON *changed) {
    static const char *const keys[] = {"command_line", "revision", "host", "step",      "ranks",      "changed",
                                       "system",       "devices",  "peak", "libraries", "environment"};
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
    if (json_member(run, "starts")) return;
    cJSON *none = cJSON_CreateArray(), *starts = cJSON_CreateArray();
    CHECK(starts && cJSON_AddItemToArray(starts, starts_entry(run, 0, none)), "out of memory for a JSON text");
    json_add(run, "starts", starts);
    cJSON_Delete(none);
}

static inline void starts_append(cJSON *run, const cJSON *description, int64_t step, const cJSON *changed) {
    starts_begin(run);
    cJSON *starts = cJSON_GetObjectItemCaseSensitive(run, "starts");
    CHECK(cJSON_IsArray(starts), "run.json has \"starts\" that are not a list; restore it, or give another --out");
    CHECK(cJSON_AddItemToArray(starts, starts_entry(description, step, changed)), "out of memory for a JSON text");
}

// The value of an option in the last start.
static inline const cJSON *starts_value(const cJSON *run, const char *name) {
    const cJSON *value = json_member(json_member(run, "options"), name), *start, *change;
    cJSON_ArrayForEach(start, json_member(run, "starts")) {
        cJSON_ArrayForEach(change, json_member(start, "changed")) {
            const char *of = cJSON_GetStringValue(json_member(change, "name"));
            if (of && strcmp(of, name) == 0) value = json_member(change, "new");
        }
    }
    return value;
}

// Of two values of options; NULL is null: a version that did not know the option.
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
#endif
