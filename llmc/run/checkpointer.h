/*
checkpointer.h: when and how a run writes checkpoints, and how it goes back to one (--rollback). All ranks call these
functions together.

  checkpointer_finish(c)                    waits for a checkpoint that is being written
  checkpointer_advance(c)                   once per step: a checkpoint's next stage, if all ranks have ended the last
  checkpointer_find_good(c, path)           the newest checkpoint whose weights gave finite losses and gradients, or
                                            "none"
  checkpointer_log_not_finite(c, path)      checkpointer_find_good, and logs that the run ends with non-finite values
  checkpointer_save(c, continues)           writes the checkpoint of the current step
  checkpointer_roll_back(c)                 loads an earlier checkpoint, when the detectors ask for it
  checkpoint_buffers(model)                 the buffers of a model that checkpoints contain

  The caller sets the fields due and stage of each step. Without --out nothing is written.
*/
#pragma once
#include "../checkpoint/checkpoint_background.h"
#include "../data/data_identity.h"
#include "../model/rank_check.h"
#include "run_records.h"
#include "../text/run_tokenizer.h"
#include "trainer_state.h"

typedef struct {
    const Options *options;
    TrainerState *state;
    ModelState *model;
    Log *log;
    const RunTokenizer *tokenizer;
    const DataLoader *train;
    uint64_t fingerprint; // fingerprint of the training data
    int64_t saved_step;   // step of the last checkpoint; 0 in a run without one
    double saved_at;      // when the last checkpoint was saved, or training began, by this rank's clock
    double stall_seconds; // how long training has waited for checkpoints
    bool due;             // --checkpoint-minutes have passed at the last step, by the clock of rank 0
    int stage;            // all ranks had reached this stage of the checkpoint in progress at the last step
} Checkpointer;

static inline CheckpointBuffers checkpoint_buffers(const ModelState *s) {
    CheckpointBuffers b;
    memset(&b, 0, sizeof(b));
    b.config = &s->plan->config;
    b.tensors = &s->plan->tensors;
    b.params = s->rank_params ? s->rank_params : s->params;
    b.master = s->master;
    b.m = s->m;
    b.v = s->v;
    b.sharding = &s->plan->sharding;
    return b;
}

static inline bool checkpointer_minutes_passed(const Checkpointer *c) {
    double minutes = c->options->checkpoint_minutes;
    return c->options->out && minutes > 0 && now_seconds() - c->saved_at >= 60 * minutes;
}

static inline void checkpointer_log(Checkpointer *c, int64_t step, bool in_background, double seconds, double stall) {
    c->stall_seconds += stall;
    log_checkpoint(c->log, c->state->step, step, in_background, seconds, stall);
}
static inline void checkpointer_log_background(Checkpointer *c) {
    checkpointer_log(c, background.save.step, true, background.end - background.begin, background.stall_seconds);
}

static inline void checkpointer_advance(Checkpointer *c) {
    if (background_advance(c->stage)) checkpointer_log_background(c);
}

static inline void checkpointer_finish(Checkpointer *c) {
    double start = now_seconds();
    if (!background.on) return;
    watch_stage(STAGE_SAVE);
    background_finish();
    background.stall_seconds += now_seconds() - start;
    checkpointer_log_background(c);
}

static inline void checkpointer_find_good(Checkpointer *c, char path[PATH_SIZE]) {
    checkpointer_finish(c);
    int64_t last_finite = c->state->step - c->state->guard.not_finite_in_row;
    int64_t bad = c->state->val_not_finite_since - 1; // the weights after that step had no finite validation
    if (bad >= 0 && bad < last_finite) last_finite = bad;
    bool found = c->options->out && checkpoint_find_before(c->options->out, last_finite, path) >= 0;
    if (!found) snprintf(path, PATH_SIZE, "none");
}

static inline void checkpointer_log_not_finite(Checkpointer *c, char path[PATH_SIZE]) {
    checkpointer_find_good(c, path);
    log_stopped(c->log, c->state->step, "not_finite", path);
    log_sync(c->log);
}

static inline void checkpointer_check_weights(Checkpointer *c, const CheckpointBuffers *buffers) {
    char good[PATH_SIZE];
    if (checkpoint_weights_finite(buffers)) return;
    checkpointer_log_not_finite(c, good);
    CHECK(false,
          "the weights after step %" PRId64
          " are not finite and are not saved; try a lower --lr; last good checkpoint: %s",
          c->state->step, good);
}

// continues: training continues, so the checkpoint may be written in the background. --keep does not delete a good
// checkpoint when it saves one whose last step or validation was not finite.
static inline void checkpointer_save(Checkpointer *c, bool continues) {
    const Options *o = c->options;
    const RunTokenizer *tokenizer = c->tokenizer;
    if (!o->out) return;
    checkpointer_finish(c);
    if (o->check_ranks_every) ranks_check(c->model, c->state->step);
    watch_stage(STAGE_SAVE);
    params_await(c->model);
    CheckpointBuffers buffers = checkpoint_buffers(c->model);
    double start = now_seconds();
    int64_t step = c->state->step, keep = trainer_state_finite(c->state) ? o->keep : -1;
    if (tokenizer->tokenizer) {
        buffers.tokenizer[0].data = tokenizer->tokenizer->memory;
        buffers.tokenizer[0].size = tokenizer->tokenizer->size;
        buffers.tokenizer[1].data = tokenizer->json;
        buffers.tokenizer[1].size = tokenizer->json_size;
    }
    bool in_background = continues && background_open(&buffers);
    if (in_background) buffers = background_copy(&buffers);
    checkpointer_check_weights(c, &buffers);
    cJSON *json = trainer_state_to_json(c->state, o, c->fingerprint, dataloader_identity(c->train));
    log_sync(c->log);
    c->saved_step = step;
    c->saved_at = now_seconds();
    if (in_background) {
        background_start(o->out, step, keep, &buffers, json);
        background.begin = start, background.stall_seconds = now_seconds() - start;
        return;
    }
    checkpoint_save(o->out, step, &buffers, json);
    if (comm_rank() == 0 && keep >= 0) checkpoint_prune(o->out, keep, step);
    cJSON_Delete(json);
    c->saved_at = now_seconds();
    checkpointer_log(c, step, false, c->saved_at - start, c->saved_at - start);
}

// --rollback: if too many of the last steps were bad, loads the newest checkpoint before them, and saves it again with
// the position in the data after them, where training continues. Returns whether it has loaded a checkpoint.
static inline bool checkpointer_roll_back(Checkpointer *c) {
    const Options *o = c->options;
    TrainerState *s = c->state;
    if (!rollback_due(&s->rollback, s->step) || !o->out) return false;
    checkpointer_finish(c);
    params_await(c->model);
    CheckpointBuffers buffers = checkpoint_buffers(c->model);
    int64_t first_bad = rollback_due(&s->rollback, s->step), from = s->step;
    char path[PATH_SIZE];
    if (checkpoint_find_before(o->out, first_bad, path) < 0) {
        warn("step %" PRId64 ": --rollback %s is due, but there is no checkpoint before step %" PRId64
             ": training continues",
             from, o->rollback, first_bad);
        s->rollback.bad_count = 0;
        return false;
    }
    cJSON *json = checkpoint_load_state(path);
    checkpoint_load_weights(path, &buffers, true);
    trainer_state_rewind(s, json, path);
    cJSON_Delete(json);
    bool again = rollback_restart_from(&s->rollback, s->step);
    log_rollback(c->log, s->step, from, first_bad, s->next_window);
    if (comm_rank() == 0) checkpoint_drop_after(o->out, s->step); // --resume must not find the later checkpoints,
    comm_barrier();                                               // even when the run ends here
    CHECK(again,
          "step %" PRId64 ": --rollback %s is due for the %dth time in a row to the checkpoint of step %" PRId64
          ": it does not help; try a lower --lr or --init from an earlier checkpoint",
          from, o->rollback, ROLLBACK_TIMES + 1, s->step);
    progress_break();
    warn("step %" PRId64 ": %" PRId64 " spikes or skipped updates since step %" PRId64
         ": back to the checkpoint of step %" PRId64 ", training continues with the data that follow (window %" PRIu64
         "); a resume from this checkpoint drops steps %" PRId64 " to %" PRId64 " of log.jsonl",
         from, s->rollback.count, first_bad, s->step, s->next_window, s->step + 1, from);
    params_changed(c->model);
    checkpointer_save(c, false);
    return true;
}
