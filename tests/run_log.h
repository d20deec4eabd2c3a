/*
run_log.h: reads the records of a run (log.jsonl).
*/
#pragma once
#include "../llmc/base/json.h"
#include "harness.h"

// An array of the records of a kind, or of all kinds if it is NULL, in their order. Every line must be a record.
static inline cJSON *read_records(const TestDirectory *d, const char *run, const char *kind) {
    static char line[65536];
    const char *path = test_text("%s/%s/log.jsonl", d->path, run);
    cJSON *records = cJSON_CreateArray();
    FILE *f = fopen(path, "r");
    EXPECT(f != NULL, "there is no %s", path);
    while (f && fgets(line, sizeof(line), f)) {
        cJSON *record = cJSON_Parse(line);
        const char *of = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "kind"));
        EXPECT(of && line[strlen(line) - 1] == '\n', "not a record: %.200s", line);
        if (of && (!kind || strcmp(of, kind) == 0)) cJSON_AddItemToArray(records, record);
        else cJSON_Delete(record);
    }
    if (f) fclose(f);
    return records;
}

// A number of a record; NaN for null.
static inline double record_number(const cJSON *record, const char *key) {
    double x = NAN;
    EXPECT(json_get_number(record, key, &x) || cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(record, key)),
           "a record without %s", key);
    return x;
}
