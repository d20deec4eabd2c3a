/*
phase_records.h: what a run reports of its phases (phases.h).

  cJSON *phases_to_json(phases)           for run.json: [{"step": STEP, "changed": [{"name", "old", "new"}, ...]}, ...]
  void   log_phase(log, phases, step)     the event and the line of a phase that begins after `step`
*/
#pragma once
#include "../log/logger.h"
#include "../log/progress.h"
#include "../log/starts.h"
#include "../options/options_json.h"
#include "../options/phases.h"

// What phase k changes.
static inline cJSON *phase_changed(const Phases *p, int k) {
    cJSON *changed = cJSON_CreateArray();
    for (int i = 0; i < PHASE_ROW_COUNT; i++) {
        int r = option_row(phase_rows[i].option);
        cJSON *old = option_to_json(&p->items[k - 1].options, r), *now = option_to_json(&p->items[k].options, r);
        if (starts_same(old, now)) {
            cJSON_Delete(old);
            cJSON_Delete(now);
            continue;
        }
        cJSON *change = cJSON_CreateObject();
        json_add(change, "name", cJSON_CreateString(phase_rows[i].option));
        json_add(change, "old", old);
        json_add(change, "new", now);
        CHECK(cJSON_AddItemToArray(changed, change), "out of memory for a JSON text");
    }
    return changed;
}

static inline cJSON *phases_to_json(const Phases *p) {
    cJSON *list = cJSON_CreateArray();
    for (int k = 1; k < p->count; k++) {
        cJSON *phase = cJSON_CreateObject();
        json_add_u64(phase, "step", (uint64_t)p->items[k].step);
        json_add(phase, "changed", phase_changed(p, k));
        CHECK(cJSON_AddItemToArray(list, phase), "out of memory for a JSON text");
    }
    return list;
}

// The event has the first step of the phase: a resume from the checkpoint before it removes the record.
static inline void log_phase(Log *log, const Phases *p, int64_t step) {
    cJSON *changed = phase_changed(p, p->current), *event = starts_event(step + 1, changed), *item;
    CHECK(cJSON_ReplaceItemInObjectCaseSensitive(event, "what", cJSON_CreateString("phase")),
          "out of memory for a JSON text");
    progress_break();
    printf("after step %" PRId64 ", a phase with", step);
    cJSON_ArrayForEach(item, changed) {
        OptionText text;
        const char *name = json_member(item, "name")->valuestring;
        const char *value = option_text(text, &p->items[p->current].options, option_row(name));
        printf("%s %s=%s", item == changed->child ? "" : ",", name, value ? value : "");
    }
    printf("\n");
    log_record(log, event);
    cJSON_Delete(event);
    cJSON_Delete(changed);
}
