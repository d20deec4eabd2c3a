/*
resume.h: how a start begins: what --resume finds in --out, the options and the model that follow, and the log that the
start opens.

  ModelConfig start_configure(options, phases, resume, argc, argv)   the options of all phases, and those and the model
                                                                     of the phase that the run is in
  void        start_open_log(log, options, resume, step, measures, description)   a new log, or the one that --resume
                                                                     continues; measures: as log_resume
*/
#pragma once
#include "../checkpoint/checkpoint.h"
#include "../comm/watchdog.h"
#include "../model/config_json.h"
#include "../log/logger.h"
#include "../options/modes.h"
#include "../options/options.h"
#include "../options/ranks.h"
#include "../log/starts.h"
#include "stop_signals.h"
#include "trainer_state.h"

// What --resume finds in --out. A run that was stopped before its first checkpoint starts again from step 0, under the
// options of run.json.
typedef struct {
    char path[PATH_SIZE]; // where the weights are: the checkpoint, or else --init of the first start; or empty
    cJSON *state;         // trainer_state.json; NULL when there is no checkpoint
    cJSON *run_json;      // NULL without --resume
    RunLock lock;         // of rank 0, when the run will be trained
} Resume;

static inline void resume_free(Resume *r) {
    cJSON_Delete(r->state);
    cJSON_Delete(r->run_json);
    memset(r, 0, sizeof(*r));
}

// The checkpoint directory that weights are loaded from, or NULL.
static inline const char *resume_weights(const Resume *r, const Options *o) { return r->path[0] ? r->path : o->init; }

// Refuses a run whose checkpoints are gone: starting again would drop its steps from the log. Every start creates
// checkpoints/, so that one without this directory was not merely stopped before its first checkpoint.
static inline void resume_check_lost(const char *out) {
    char path[PATH_SIZE];
    int64_t saved = 0, last = log_last_step(out, &saved);
    FORMAT(path, "%s/checkpoints", out);
    CHECK(!saved,
          "%s has no checkpoint, but log.jsonl states one of step %" PRId64 ": restore the directory, which may have "
          "been moved or not be mounted, or start a new run with another --out",
          path, saved);
    CHECK(!last || directory_exists(path),
          "%s is missing, but log.jsonl has %" PRId64 " steps: restore the directory, which may have been moved or not "
          "be mounted; if the run has never saved a checkpoint, create it empty to start again from step 0",
          path, last);
}

// Training locks the run before it reads any of it, so that no other process can add steps in between.
static inline Resume resume_find(Options *o) {
    Resume r;
    memset(&r, 0, sizeof(r));
    if (!o->resume) return r;
    if (options_mode(o) == MODE_TRAIN && comm_rank() == 0) r.lock = log_lock(o->out);
    r.run_json = log_read_run_json(o->out);
    if (checkpoint_find_newest(o->out, r.path) >= 0) {
        r.state = checkpoint_load_state(r.path);
        options_adopt_json(o, cJSON_GetObjectItemCaseSensitive(r.state, "options"), "the checkpoint");
    } else {
        const cJSON *options = cJSON_GetObjectItemCaseSensitive(r.run_json, "options");
        resume_check_lost(o->out);
        CHECK(options_mode(o) == MODE_TRAIN || options_mode(o) == MODE_DRY_RUN,
              "%s was stopped before its first checkpoint: there are no weights; --resume alone trains it", o->out);
        const char *init = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(options, "init"));
        FORMAT(r.path, "%s", init ? init : "");
        options_adopt_json(o, options, "run.json");
        fprintf(options_notes(o), "%s was stopped before its first checkpoint: starting again from step 0\n", o->out);
    }
    return r;
}

// Sets the precision and the libraries of the operations.
static inline void start_configure_operations(Options *o) {
    if (!matmul_has_choice) { // the build decides
        int built_for = matmul_in_bf16 ? GEMM_BF16 : GEMM_FP32;
        CHECK(!options_given(o, "gemm") || o->gemm == built_for || o->gemm == GEMM_FP8,
              "--gemm %s: this build stores and multiplies %s; build it with PRECISION=%s", gemm_choice(o->gemm),
              gemm_choice(built_for), gemm_choice(o->gemm));
        if (o->gemm != GEMM_FP8) o->gemm = built_for;
    }
    const char *why = linear_configure((GemmType)o->gemm);
    CHECK(!why, "--gemm %s: %s", gemm_choice(o->gemm), why);
    // a prediction for another GPU requires no library here
    AttentionOptions attention = {o->sdpa == SDPA_OWN, o->sdpa == SDPA_CUDNN && !o->device, o->deterministic,
                                  o->doc_mask};
    attention_configure(attention);
    if (o->gemm != GEMM_FP32 && !o->device && !linear_native())
        fprintf(options_notes(o),
                "--gemm %s: this CPU or build does not multiply bf16; the rounded numbers are multiplied in fp32, at "
                "its speed\n",
                gemm_choice(o->gemm));
    if (o->gemm == GEMM_FP8 && o->model.E && !o->device && !linear_experts_in_fp8())
        fprintf(options_notes(o), "--gemm fp8: experts compute in bf16, which is faster on this GPU\n");
}

// The step of the checkpoint; 0 without one.
static inline int64_t resume_step(const Resume *r) {
    return r->state ? (int64_t)state_number(r->state, "step", (uint64_t)CHECKPOINT_STEP_LIMIT, r->path) : 0;
}

// --decay-now: the checkpoint becomes the last step before the decay of wsd, which ends the run. A later --resume
// follows from the options that this sets.
static inline void start_decay(Options *o, const Resume *r) {
    if (!o->decay_now) return;
    const cJSON *saved = cJSON_GetObjectItemCaseSensitive(r->state, "options");
    double steps = 0, decay_steps = 0; // of the checkpoint; a default is null
    int problems = 0, schedule = option_row("schedule");
    CHECK(saved, "--decay-now: %s has no checkpoint to decay from", o->out);
    json_get_number(saved, "steps", &steps);
    json_get_number(saved, "decay-steps", &decay_steps);
    Options before = *o;
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(saved, "schedule"));
    before.steps = (int64_t)steps, before.decay_steps = (int64_t)decay_steps;
    if (name) option_set(&before, schedule, name);
    LearningRate rate = options_learning_rate(&before);
    int64_t step = resume_step(r);
    bool decays = before.schedule == SCHEDULE_COSINE || before.schedule == SCHEDULE_LINEAR;
    if (decays || o->schedule == SCHEDULE_COSINE || o->schedule == SCHEDULE_LINEAR)
        REFUSE(problems, "--decay-now requires --schedule wsd or constant, not %s, which decays from the warmup on",
               schedule_names[decays ? before.schedule : o->schedule]);
    else if (step < o->warmup || step > schedule_decay_start(&rate))
        REFUSE(problems,
               "--decay-now: the checkpoint of step %" PRId64 " is in the %s: use a checkpoint of the "
               "constant rate, from step %" PRId64 " to %" PRId64 "%s",
               step, step < o->warmup ? "warmup" : "decay", o->warmup, schedule_decay_start(&rate),
               step < o->warmup ? "" : ", or continue without --decay-now");
    if (!o->decay_steps) REFUSE(problems, "--decay-now requires --decay-steps N");
    if (step + o->decay_steps > CHECKPOINT_STEP_LIMIT) // a resume would refuse such --steps
        REFUSE(problems,
               "--decay-now: --decay-steps %" PRId64 " after step %" PRId64 " end after the limit, step %" PRId64,
               o->decay_steps, step, CHECKPOINT_STEP_LIMIT);
    if (problems) program_exit(EXIT_USAGE);
    o->steps = step + o->decay_steps;
    if (!schedule_is_wsd(o->schedule)) o->schedule = SCHEDULE_WSD;
    fprintf(options_notes(o), "--decay-now: the rate decays from step %" PRId64 " to the last step, %" PRId64 "\n",
            step, o->steps);
}

// Refuses a run directory as --init, with the name of its newest checkpoint.
static inline void init_refuse_run(const char *dir) {
    char path[PATH_SIZE];
    size_t count = 0;
    FORMAT(path, "%s/config.json", dir);
    if (access(path, F_OK) == 0 || !directory_exists(dir)) return;
    int64_t *steps = checkpoint_steps(dir, &count);
    if (count) checkpoint_path(dir, steps[0], "", path);
    free(steps);
    CHECK(count == 0, "--init %s is the directory of a run: use its newest checkpoint, --init %s", dir, path);
}

// Refuses --init of a baseline with another --attention, or with twice the --heads, and names what converts it.
static inline void init_refuse_conversion(const Options *o, const ModelConfig *config, const char *dir) {
    bool variant = o->resume || options_given(o, "attention"), heads = o->resume || options_given(o, "heads");
    const AttentionVariant *baseline = variant_find("baseline"), *to = variant ? o->model.attention : baseline;
    int problems = 0;
    if (config->attention != baseline) return;
    if (to != baseline)
        REFUSE(problems,
               "--attention %s: the model of --init %s is a baseline: convert it with scripts/export/convert.py %s "
               "--attention %s OUT, and use --init OUT",
               to->name, dir, dir, to->name);
    else if (heads && o->model.NH == 2 * config->NH)
        REFUSE(problems,
               "--heads %d: the model of --init %s has %d: convert it with scripts/export/convert.py %s --heads %d "
               "OUT, and use --init OUT",
               o->model.NH, dir, config->NH, dir, o->model.NH);
    if (problems) program_exit(EXIT_USAGE);
}

// --init with --sparse-blocks or --sparse-block-size: `config`, the model of the directory, selects so. No weight
// depends on them.
static inline void init_sparse(const Options *o, ModelConfig *config) {
    if (o->resume || options_given(o, "sparse-blocks")) config->sparse_blocks = o->model.sparse_blocks;
    if (o->resume || options_given(o, "sparse-block-size")) config->sparse_size = o->model.sparse_size;
}

// The model of a checkpoint has the values of its phase; the options to adopt are those of phase 0. A resume may change
// phases that are still to come.
static inline void resume_undo_phases(const Resume *r, const Options *o, ModelConfig *loaded) {
    Phases phases;
    Options endless = *o; // phases of the steps so far count, whatever --steps is now
    endless.steps = INT64_MAX;
    int problems = phases_build(&phases, &endless);
    const TrainingPhase *now = &phases.items[phases_at(&phases, resume_step(r))];
    for (size_t i = 0; i < PHASE_ROW_COUNT && !problems; i++) {
        OptionText have, want;
        int k = option_row(phase_rows[i].option);
        const OptionRow *row = &option_rows[k];
        if (!option_of_model(row) || !o->has[k]) continue;
        option_value(have, row, loaded);
        option_value(want, row, &now->options);
        if (strcmp(have, want) != 0)
            REFUSE(problems,
                   "--%s is %s in the checkpoint of step %" PRId64 ", and %s by the options and phases now; a "
                   "resumed run can only change --phase after that step",
                   row->name, have, resume_step(r), want);
        memcpy((char *)loaded + row->field, (const char *)o + row->field,
               row->kind == OPTION_DIM ? sizeof(int) : sizeof(double));
    }
    phases_free(&phases);
    if (problems) program_exit(EXIT_USAGE);
}

static inline ModelConfig start_configure(Options *o, Phases *phases, Resume *resume, int argc, char **argv) {
    options_parse(o, argc, argv);
    if (options_mode(o) == MODE_TRAIN) stop_signals_end("signal: ended before the first step; nothing is lost");
    if (options_mode(o) == MODE_EVAL) stop_signals_end("signal: ended before everything was measured");
    watch_timeout(o->timeout);
    char *own = comm_ranks() > 1 ? ranks_describe(o) : NULL; // before the first collective
    if (own) ranks_compare(own, "start all ranks with the same program and the same options", EXIT_USAGE);
    free(own);
    *resume = resume_find(o);
    const char *loaded = resume_weights(resume, o);
    if (loaded && o->init) init_refuse_run(loaded);
    if (loaded) { // resume_find has verified a checkpoint of the run
        if (!resume->state && options_mode(o) != MODE_DRY_RUN) checkpoint_check_init(loaded);
        ModelConfig config = config_json_read(loaded);
        if (resume->state) {
            resume_undo_phases(resume, o, &config);
        } else {
            init_refuse_conversion(o, &config, loaded);
            init_sparse(o, &config);
        }
        options_adopt_model(o, &config);
    }
    start_decay(o, resume);
    options_adopt_data(o);
    options_finish(o, options_ranks(o));
    watch_timeout(o->timeout); // may be the checkpoint's
    omp_set_num_threads((int)o->threads);
    start_configure_operations(o);
    phases_build(phases, o);
    phases->current = phases_at(phases, resume_step(resume));
    *o = phases->items[phases->current].options;
    return options_model(o);
}

static inline void start_open_log(Log *log, const Options *o, const Resume *resume, int64_t step, bool measures,
                                  cJSON *description) {
    cJSON *changed = NULL;
    if (o->resume) {
        const cJSON *before = resume->state ? resume->state : resume->run_json;
        cJSON *now = options_state_to_json(o);
        changed = starts_changed(resume->run_json, cJSON_GetObjectItemCaseSensitive(before, "options"), now);
        cJSON_Delete(now);
        starts_append(resume->run_json, description, step, changed);
        log_write_run(log, o->out, resume->run_json);
        log_resume(log, o->out, step, measures);
    } else {
        changed = cJSON_CreateArray();
        starts_begin(description);
        log_create(log, o->out, description);
    }
    checkpoint_create_directory(o->out); // before the first record
    cJSON *event = starts_event(step, changed);
    json_add_u64(event, "threads", (uint64_t)o->threads);
    log_record(log, event);
    cJSON_Delete(event);
    cJSON_Delete(changed);
    checkpoint_clean(o->out);
}
