/*
options_json.h: writes options as JSON for run.json and trainer_state.json, and reads them for --resume.

An object with the options' names as keys, in table order; null for an option without a value. A seed beyond 2^53, which
a double cannot represent, is a decimal string. json_text (json.h) writes reals so that reading restores them exactly.
*/
#pragma once
#include "options_table.h"

static inline cJSON *option_to_json(const Options *o, int r) {
    OptionText text;
    const char *value = option_text(text, o, r);
    if (!value) return cJSON_CreateNull();
    switch (option_rows[r].kind) {
    case OPTION_ACTION:
    case OPTION_BOOL: return cJSON_CreateBool(strcmp(value, "yes") == 0);
    case OPTION_TEXT:
    case OPTION_VARIANT:
    case OPTION_CHOICE: return cJSON_CreateString(value);
    default: break;
    }
    bool fits =
        option_rows[r].kind != OPTION_U64 || *(const uint64_t *)((const char *)o + option_rows[r].field) <= 1ull << 53;
    return fits ? cJSON_CreateNumber(strtod(value, NULL)) : cJSON_CreateString(value);
}

static inline cJSON *options_json(const Options *o, bool local_too) {
    cJSON *json = cJSON_CreateObject();
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        const OptionRow *row = &option_rows[r];
        if (row->kind == OPTION_ACTION || !option_exists(row) || (row->on_resume == OPTION_LOCAL && !local_too))
            continue;
        cJSON *item = option_to_json(o, r);
        CHECK(json && item && cJSON_AddItemToObject(json, row->name, item),
              "out of memory: cannot write the options as JSON");
    }
    return json;
}

// Every option (run.json). The caller deletes it.
static inline cJSON *options_to_json(const Options *o) { return options_json(o, true); }

// The options of the run (trainer_state.json), without options of one start such as --out, --resume and --threads:
// identical runs write identical checkpoints in any directory, resumed or not.
static inline cJSON *options_state_to_json(const Options *o) { return options_json(o, false); }

// Reads one saved value. Returns false if its type or value is invalid for the option.
static inline bool option_from_json(Options *o, int r, const cJSON *item) {
    OptionKind kind = option_rows[r].kind;
    bool number =
        kind == OPTION_INT || kind == OPTION_TOKENS || kind == OPTION_DIM || kind == OPTION_U64 || kind == OPTION_REAL;
    OptionText text;
    if (cJSON_IsBool(item)) return kind == OPTION_BOOL && option_set(o, r, cJSON_IsTrue(item) ? "yes" : "no");
    if (cJSON_IsString(item) && item->valuestring) return kind != OPTION_BOOL && option_set(o, r, item->valuestring);
    if (!cJSON_IsNumber(item) || !number || !isfinite(item->valuedouble)) return false;
    if (kind == OPTION_REAL) snprintf(text, sizeof(text), "%.17g", item->valuedouble);
    else if (fabs(item->valuedouble) > 0x1p53 || item->valuedouble != floor(item->valuedouble)) return false;
    else snprintf(text, sizeof(text), "%.0f", item->valuedouble);
    return option_set(o, r, text);
}

// For --resume: options that are not given adopt the saved value. Given options override it; each difference is printed
// on one line. Exits with status 2 if such an option must not change, and with status 1 if this program cannot have
// written the object. Ignores OPTION_LOCAL options. where: the checkpoint or file of the object, for messages. Returns
// the number of differences.
static inline int options_adopt_json(Options *o, const cJSON *saved, const char *where) {
    CHECK(cJSON_IsObject(saved), "the options in %s are not a JSON object: it is damaged", where);
    int differences = 0, refused = 0, damaged = 0;
    bool seen[OPTION_LIMIT];
    memset(seen, 0, sizeof(seen));
    Options checkpoint;
    memset(&checkpoint, 0, sizeof(checkpoint));
    for (const cJSON *item = saved->child; item; item = item->next) {
        const char *name = item->string ? item->string : "";
        OptionText shown_name, shown_old, shown_new, text_old, text_new;
        option_shown(shown_name, name);
        int r = option_find(name, strlen(name));
        if (r < 0 && cJSON_IsNull(item)) continue;
        CHECK(r >= 0 && option_rows[r].kind != OPTION_ACTION,
              "the options in %s contain --%s, which this version does not support", where, shown_name);
        if (seen[r]) {
            warn("the options in %s contain --%s twice", where, shown_name);
            damaged++;
            continue;
        }
        seen[r] = true;
        if (option_rows[r].on_resume == OPTION_LOCAL) continue;
        if (!cJSON_IsNull(item) && !option_from_json(&checkpoint, r, item)) {
            warn("the options in %s contain an invalid value of --%s: it must be %s", where, shown_name,
                 option_accepts(text_old, &option_rows[r]));
            damaged++;
            continue;
        }
        const char *old_value = option_text(text_old, &checkpoint, r);
        bool other = (strcmp(name, "prompt") == 0 && options_given(o, "prompt-tokens")) ||
                     (strcmp(name, "prompt-tokens") == 0 && options_given(o, "prompt")); // it replaces this one
        if (!o->given[r]) {
            if (old_value && !other) option_set(o, r, old_value);
            continue;
        }
        const char *new_value = option_text(text_new, o, r);
        if (old_value && new_value && strcmp(old_value, new_value) == 0) continue;
        old_value = option_shown(shown_old, old_value ? old_value : "none");
        new_value = option_shown(shown_new, new_value ? new_value : "none");
        differences++;
        if (option_rows[r].on_resume == OPTION_FIXED) {
            warn("--%s: %s in %s, %s now; a resumed run cannot change this option", name, old_value, where, new_value);
            refused++;
        } else {
            fprintf(options_notes(o), "option --%s: %s in %s, %s now\n", name, old_value, where, new_value);
        }
    }
    options_free(&checkpoint);
    CHECK(!damaged, "the options in %s cannot be read; another version may have written it", where);
    fflush(stdout);
    if (refused) program_exit(EXIT_USAGE);
    return differences;
}
