/*
trainer_state.h: the progress of a run: its counters and detectors, and trainer_state.json of a checkpoint.

  cJSON  *trainer_state_to_json(state, options, data_fingerprint, data_identity)   all but the checksums
  void    trainer_state_rewind(state, json, path)    the counters and detectors of a checkpoint; the position in the
                                                     data and the rollback state stay
  void    trainer_state_resume(state, json, path)    the complete state of a checkpoint
  void    trainer_state_validated(state, loss)       records whether the loss of a validation is finite
  bool    trainer_state_finite(state)                whether the last step and validation were finite
  uint64_t state_number(json, key, limit, path)      one number of the file

  errors   CHECK, with the path of the checkpoint
*/
#pragma once
#include "../base/revision.h"
#include "../checkpoint/checkpoint.h"
#include "../data/positions.h"
#include "../options/options_json.h"
#include "rollback.h"
#include "spikes.h"

typedef struct {
    int64_t step;    // steps done; they count from 1
    int64_t updates; // steps whose update was applied: Adam's step count, for its bias correction
    int64_t tokens;  // tokens of the steps done; each step counts the --total-batch of its start
    // If the last validation's loss is not finite: 1 + the step of the first validation in this series; else 0.
    int64_t val_not_finite_since;
    bool measurement_due; // a measurement after the last step was aborted or failed: a resume repeats it
    uint64_t next_window; // position in the training order, since the data were opened
    DataPositions opened; // positions of the corpora then, after a resume with other data
    SpikeGuard guard;     // decides which updates are applied
    Rollback rollback;    // decides when the run returns to a checkpoint
} TrainerState;

static inline void trainer_state_validated(TrainerState *s, double loss) {
    if (isfinite(loss)) s->val_not_finite_since = 0;
    else if (!s->val_not_finite_since) s->val_not_finite_since = s->step + 1;
}

// Whether the last step had a finite loss and gradient, and the last validation a finite loss.
static inline bool trainer_state_finite(const TrainerState *s) {
    return s->guard.not_finite_in_row == 0 && !s->val_not_finite_since;
}

static inline cJSON *trainer_state_to_json(const TrainerState *s, const Options *o, uint64_t data_fingerprint,
                                           cJSON *data_identity) {
    cJSON *json = cJSON_CreateObject();
    CHECK(cJSON_AddStringToObject(json, "version", program_version), "out of memory for a JSON text");
    json_add_u64(json, "step", (uint64_t)s->step);
    json_add_u64(json, "updates", (uint64_t)s->updates);
    json_add_u64(json, "tokens", (uint64_t)s->tokens);
    if (s->val_not_finite_since) json_add_u64(json, "val_not_finite_since", (uint64_t)s->val_not_finite_since);
    CHECK(!s->measurement_due || cJSON_AddTrueToObject(json, "measurement_due"), "out of memory for a JSON text");
    json_add_u64(json, "next_window", s->next_window);
    json_add_u64(json, "seed", o->seed);
    json_add_u64(json, "data_fingerprint", data_fingerprint);
    CHECK(cJSON_AddItemToObject(json, "data", data_identity) &&
              cJSON_AddItemToObject(json, "detectors", spike_guard_to_json(&s->guard)) &&
              (!s->opened.count || cJSON_AddItemToObject(json, "data_opened_at", positions_to_json(&s->opened))) &&
              (!s->rollback.count || cJSON_AddItemToObject(json, "rollback", rollback_to_json(&s->rollback))) &&
              cJSON_AddItemToObject(json, "options", options_state_to_json(o)),
          "out of memory for a checkpoint");
    return json;
}

static inline uint64_t state_number(const cJSON *json, const char *key, uint64_t limit, const char *path) {
    uint64_t value = 0;
    CHECK(json_get_u64(json, key, &value),
          "%s: trainer_state.json has no \"%s\": it is not a checkpoint of this program", path, key);
    CHECK(value <= limit,
          "%s: trainer_state.json has \"%s\" %" PRIu64 ", more than %" PRIu64
          ": it is not a checkpoint of this program",
          path, key, value, limit);
    return value;
}

static inline void trainer_state_rewind(TrainerState *s, const cJSON *json, const char *path) {
    s->step = (int64_t)state_number(json, "step", (uint64_t)CHECKPOINT_STEP_LIMIT, path);
    s->updates = (int64_t)state_number(json, "updates", (uint64_t)s->step, path);
    s->tokens = (int64_t)state_number(json, "tokens", INT64_MAX / 2, path);
    bool bad = cJSON_HasObjectItem(json, "val_not_finite_since");
    s->val_not_finite_since =
        bad ? (int64_t)state_number(json, "val_not_finite_since", (uint64_t)s->step + 1, path) : 0;
    CHECK(spike_guard_from_json(&s->guard, cJSON_GetObjectItemCaseSensitive(json, "detectors")),
          "%s: \"detectors\" in trainer_state.json has an invalid format", path);
}

static inline void trainer_state_resume(TrainerState *s, const cJSON *json, const char *path) {
    trainer_state_rewind(s, json, path);
    s->measurement_due = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "measurement_due"));
    s->next_window = state_number(json, "next_window", UINT64_MAX / 2, path);
    CHECK(positions_from_json(&s->opened, cJSON_GetObjectItemCaseSensitive(json, "data_opened_at")),
          "%s: \"data_opened_at\" in trainer_state.json has an invalid format", path);
    CHECK(rollback_from_json(&s->rollback, cJSON_GetObjectItemCaseSensitive(json, "rollback")),
          "%s: \"rollback\" in trainer_state.json has an invalid format", path);
}
