/*
earlier_phases.h: runs of earlier programs whose options change during a start, by --phase or --batch-schedule. Now a
phase is a resume. "phases" of run.json has them in the order of their steps: [{"step": STEP, "changed": [{"name":
OPTION, "old": VALUE, "new": VALUE}, ...]}, ...]. A phase begins after its step.

  void phases_adopt(saved, run, step)      saved: options of a checkpoint, which become those of the phase of its step
  void phases_require(run, options, step)  prints the starts that continue with the phases after this step. Ends the
                                           program with status 1 if this start passes the beginning of the next phase
                                           without all of its options
*/
#pragma once
#include "../log/starts.h"
#include "../model/removed.h"
#include "../options/options_model.h"

static inline void phases_adopt(cJSON *saved, const cJSON *run, int64_t step) {
    static const char *const texts[] = {"phase", "batch-schedule"};
    const cJSON *phase, *change, *first = json_member(run, "options");
    bool phases = false;
    for (int i = 0; i < 2; i++) {
        const cJSON *text = json_member(saved, texts[i]);
        phases = phases || cJSON_IsString(text);
        CHECK(
            starts_same(text, json_member(first, texts[i])) || !phases,
            "the run was resumed with another --%s, which was removed: the last revision that can resume the run is %s",
            texts[i], removed_option(texts[i], strlen(texts[i]))->revision);
        cJSON_DeleteItemFromObjectCaseSensitive(saved, texts[i]);
    }
    cJSON_ArrayForEach(phase, json_member(run, "phases")) {
        uint64_t begins = 0;
        if (!phases || !json_get_u64(phase, "step", &begins) || begins >= (uint64_t)step) break;
        cJSON_ArrayForEach(change, json_member(phase, "changed")) {
            const char *name = cJSON_GetStringValue(json_member(change, "name"));
            cJSON *value = cJSON_Duplicate(json_member(change, "new"), true);
            if (!name || !cJSON_ReplaceItemInObjectCaseSensitive(saved, name, value)) cJSON_Delete(value);
        }
    }
}

// Prints the start with the options of a phase. Returns whether this one is given all of them.
static inline bool phase_print(const cJSON *phase, const Options *o) {
    char line[8192], value[4096];
    int n = snprintf(line, sizeof(line), "  --out %s --resume", o->out);
    bool given = true;
    uint64_t next = 0;
    const cJSON *change;
    cJSON_ArrayForEach(change, json_member(phase, "changed")) {
        const char *name = cJSON_GetStringValue(json_member(change, "name"));
        const cJSON *item = json_member(change, "new");
        const char *text = cJSON_GetStringValue(item), *quote = text && strpbrk(text, " *?[]{}\\~") ? "'" : "";
        int row = name ? option_find(name, strlen(name)) : -1;
        if (!text) json_brief(item, value, sizeof(value)), text = value;
        given = given && row >= 0 && o->given[row];
        if (row >= 0 && n < (int)sizeof(line))
            n += snprintf(line + n, sizeof(line) - (size_t)n, " --%s %s%s%s", name, quote, text, quote);
    }
    if (json_get_u64(phase->next, "step", &next) && next < (uint64_t)o->steps && n < (int)sizeof(line))
        snprintf(line + n, sizeof(line) - (size_t)n, " --stop-after %" PRIu64, next);
    warn("%s", line);
    return given;
}

static inline void phases_require(const cJSON *run, const Options *o, int64_t step) {
    const cJSON *phase;
    bool said = true;
    uint64_t first = 0, now = (uint64_t)step, last = (uint64_t)options_last_step(o), begins = 0;
    cJSON_ArrayForEach(phase, json_member(run, "phases")) {
        if (!json_get_u64(phase, "step", &begins) || begins < now || begins >= (uint64_t)o->steps) continue;
        if (!first) {
            first = begins;
            warn("%s is at step %" PRIu64
                 " and was started with phases, which are resumes now: these starts continue it",
                 o->out, now);
            if (first > now) warn("  --out %s --resume --stop-after %" PRIu64, o->out, first);
        }
        bool given = phase_print(phase, o);
        if (begins < last && !(given && begins == first)) said = false;
    }
    char stop[64] = "";
    if (first > now) FORMAT(stop, ", or --stop-after %" PRIu64, first);
    CHECK(said, "this start would pass step %" PRIu64 " without the options of the next phase: give them%s", first,
          stop);
}
