/*
resume.h: how a start begins: what --resume finds in --out, the options and the model that follow, and the log that the
start opens.

  ModelConfig start_configure(options, resume)               the options and the model
  void        start_open_log(log, options, resume, step, measures, description)   a new log, or the one that --resume
                                                                     continues; measures: see log_resume
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
#include "init_model.h"
#include "stop_signals.h"
#include "trainer_state.h"

// What --resume finds in --out. A run that was stopped before its first checkpoint starts again from step 0, under the
// options of run.json.
typedef struct {
    char path[PATH_SIZE]; // where the weights are: the checkpoint, or else --init of the first start; or empty
    cJSON *state;         // trainer_state.json; NULL when there is no checkpoint
    cJSON *run_json;      // NULL without --resume
    cJSON *saved;         // options that --resume adopts
    double rates[2];      // learning rates of the checkpoint's step and the next one, if options change them
    RunLock lock;         // rank 0's lock of a run that will be trained
} Resume;

static inline void resume_free(Resume *r) {
    cJSON_Delete(r->state);
    cJSON_Delete(r->run_json);
    cJSON_Delete(r->saved);
    memset(r, 0, sizeof(*r));
}

// The checkpoint directory that weights are loaded from, or NULL.
static inline const char *resume_weights(const Resume *r, const Options *o) { return r->path[0] ? r->path : o->init; }

// The step of the checkpoint; 0 without one.
static inline int64_t resume_step(const Resume *r) {
    return r->state ? (int64_t)state_number(r->state, "step", (uint64_t)CHECKPOINT_STEP_LIMIT, r->path) : 0;
}

// Whether a start of the run was given the option.
static inline bool resume_gave(const Resume *r, const char *name) {
    size_t length = strlen(name);
    const cJSON *starts = json_member(r->run_json, "starts"), *word;
    for (int i = -1; i < cJSON_GetArraySize(starts); i++) { // the description itself describes the first start
        const cJSON *start = i < 0 ? r->run_json : cJSON_GetArrayItem(starts, i);
        cJSON_ArrayForEach(word, json_member(start, "command_line")) {
            const char *text = cJSON_IsString(word) ? word->valuestring : "";
            if (strncmp(text, "--", 2) == 0 && strncmp(text + 2, name, length) == 0 &&
                (text[2 + length] == 0 || text[2 + length] == '='))
                return true;
        }
    }
    return false;
}

// Marks defaults that must be derived again: options that no start was given and that follow from options that have
// changed. The tokens of an update stay if the sequences divide them.
static inline void resume_derive_again(Options *o, const Resume *r) {
    int warmup = option_row("warmup"), batch = option_row("batch-size"), total = option_row("total-batch");
    int64_t row = (int64_t)o->model.T * options_ranks(o), micro_step = options_micro_step(o, options_ranks(o));
    double steps = 0, T = 0, tokens = 0;
    json_get_number(r->saved, "steps", &steps);
    json_get_number(r->saved, "seq-len", &T);
    json_get_number(r->saved, "total-batch", &tokens);
    bool batch_given = o->given[batch] || resume_gave(r, "batch-size");
    bool total_given = o->given[total] || resume_gave(r, "total-batch");
    if (!o->given[warmup] && !resume_gave(r, "warmup") && (double)o->steps != steps) o->has[warmup] = false;
    if (!o->has[batch] || !o->has[total] || row < 1) return; // not saved: derived in any case
    if (!total_given && o->model.T != T && o->total_batch % (batch_given ? micro_step : row) != 0)
        o->has[total] = false;
    if (!batch_given && (o->model.T != T || (double)o->total_batch != tokens || o->total_batch % micro_step))
        o->has[batch] = false;
}

// The learning rates of the checkpoint's step and of the next step, if options make the rate jump there.
static inline void resume_compare_rates(const Options *o, Resume *r) {
    static const char *const names[] = {"steps", "lr", "min-lr-ratio", "warmup", "schedule", "decay-steps"};
    Options before = *o;
    before.decay_steps = 0; // null: not given
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        option_from_json(&before, option_row(names[i]), json_member(r->saved, names[i]));
    LearningRate old = options_learning_rate(&before), now = options_learning_rate(o);
    int64_t step = resume_step(r);
    if (step < 1 || step >= options_last_step(o) || schedule_lr(&old, step + 1) == schedule_lr(&now, step + 1)) return;
    r->rates[0] = schedule_lr(&old, step), r->rates[1] = schedule_lr(&now, step + 1);
}

// Refuses a run whose checkpoints are gone: starting again would drop its steps from the log. Every start creates
// checkpoints/: if the directory is missing, the checkpoints were deleted.
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
          "be mounted",
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
        r.saved = cJSON_Duplicate(json_member(r.state, "options"), true);
        options_adopt_json(o, r.saved, "the checkpoint");
    } else {
        r.saved = cJSON_Duplicate(json_member(r.run_json, "options"), true);
        resume_check_lost(o->out);
        CHECK(options_mode(o) == MODE_TRAIN || options_mode(o) == MODE_DRY_RUN,
              "%s was stopped before its first checkpoint: there are no weights; --resume alone trains it", o->out);
        const char *init = cJSON_GetStringValue(json_member(r.saved, "init"));
        FORMAT(r.path, "%s", init ? init : "");
        options_adopt_json(o, r.saved, "run.json");
        fprintf(options_notes(o), "%s was stopped before its first checkpoint: starting again from step 0\n", o->out);
    }
    return r;
}

// Sets the precision and the libraries of the operations.
static inline void start_configure_operations(Options *o) {
    if (!matmul_has_choice) { // the build decides
        int built_for = matmul_in_bf16 ? GEMM_BF16 : GEMM_FP32;
        CHECK(!options_given(o, "matmul-dtype") || o->matmul_dtype == built_for || o->matmul_dtype == GEMM_FP8,
              "--matmul-dtype %s: this build stores and multiplies %s; build it with PRECISION=%s",
              gemm_choice(o->matmul_dtype), gemm_choice(built_for), gemm_choice(o->matmul_dtype));
        if (o->matmul_dtype != GEMM_FP8) o->matmul_dtype = built_for;
    }
    const char *why = linear_configure((GemmType)o->matmul_dtype), *type = gemm_choice(o->matmul_dtype);
    CHECK(!why, "--matmul-dtype %s: %s", type, why);
    bool own = o->attention_kernel == SDPA_BUILTIN, cudnn = o->attention_kernel == SDPA_CUDNN;
    attention_configure((AttentionOptions){own, cudnn, o->deterministic, o->doc_mask});
    if (o->matmul_dtype != GEMM_FP32 && !linear_native())
        fprintf(
            options_notes(o),
            "--matmul-dtype %s: this CPU or build does not multiply bf16; rounded numbers are multiplied in fp32, at "
            "its speed\n",
            type);
    if (o->matmul_dtype == GEMM_FP8 && o->model.E && !linear_experts_in_fp8())
        fprintf(options_notes(o), "--matmul-dtype fp8: experts compute in bf16, which is faster on this GPU\n");
}

static inline ModelConfig start_configure(Options *o, Resume *resume) {
    options_check(o);
    if (options_mode(o) == MODE_TRAIN) stop_signals_end("signal: ended before the first step; nothing is lost");
    if (options_mode(o) == MODE_EVAL) stop_signals_end("signal: ended before everything was measured");
    watch_timeout(o->timeout);
    char *facts = comm_ranks() > 1 ? ranks_describe(o) : NULL; // before the first collective
    if (facts) ranks_compare(facts, "start all ranks with the same program and the same options", EXIT_USAGE);
    free(facts);
    *resume = resume_find(o);
    const char *loaded = resume_weights(resume, o);
    if (loaded && o->init) init_refuse_run(loaded);
    if (loaded) { // resume_find has verified a checkpoint of the run
        if (!resume->state && options_mode(o) != MODE_DRY_RUN) checkpoint_check_init(loaded);
        ModelConfig config = config_json_read(loaded);
        if (!resume->state) {
            init_refuse_conversion(o, &config, loaded);
            init_sparse(o, &config);
        }
        options_adopt_model(o, &config);
    }
    options_adopt_data(o);
    if (o->resume) resume_derive_again(o, resume);
    options_finish(o, options_ranks(o));
    if (o->resume && options_mode(o) == MODE_TRAIN) resume_compare_rates(o, resume);
    watch_timeout(o->timeout); // the value may come from the checkpoint
    omp_set_num_threads((int)o->threads);
    start_configure_operations(o);
    return options_config(o);
}

// Warns of data whose path and fingerprint are the same as in the last start but whose files have changed since.
// Returns their paths, for the log.
static inline cJSON *start_modified_data(const cJSON *run, const cJSON *description) {
    static const char *const kinds[] = {"train", "val"};
    cJSON *paths = cJSON_CreateArray();
    const cJSON *starts = json_member(run, "starts"), *now;
    const cJSON *last = cJSON_GetArrayItem(starts, cJSON_GetArraySize(starts) - 1);
    for (int k = 0; k < 2; k++) {
        const cJSON *before = json_member(json_member(last, "data"), kinds[k]);
        cJSON_ArrayForEach(now, json_member(json_member(description, "data"), kinds[k])) {
            const cJSON *old = before ? before->child : NULL, *path = json_member(now, "path");
            while (old && !starts_same(path, json_member(old, "path"))) old = old->next;
            const cJSON *files = json_member(old, "files");
            bool same = starts_same(json_member(now, "fingerprint"), json_member(old, "fingerprint"));
            if (!files || !same || starts_same(files, json_member(now, "files"))) continue;
            warn("--%s-data %s: shards or corpus.json were modified or copied since the last start; 16 blocks of each "
                 "shard are compared, and are the same: restore the files if other tokens were edited",
                 kinds[k], path->valuestring);
            cJSON_AddItemToArray(paths, cJSON_CreateString(path->valuestring));
        }
    }
    return paths;
}

// Prints what a resume changes in addition to the given options: options that are derived again, options that the last
// start had but saved in no checkpoint, and the learning rate.
static inline void start_print_changes(const cJSON *changed, const Options *o, const Resume *r, int64_t step) {
    const cJSON *item;
    const double *rates = r->rates;
    cJSON_ArrayForEach(item, changed) {
        char old[200], now[200] = "none";
        const char *name = json_member(item, "name")->valuestring;
        const cJSON *before = json_member(item, "old"), *value = json_member(item, "new");
        if (options_given(o, name) || cJSON_IsNull(before)) continue;
        json_brief(before, old, sizeof(old));
        if (!cJSON_IsNull(value)) json_brief(value, now, sizeof(now));
        printf("option --%s: %s before, %s now\n", name, old, now);
    }
    if (rates[0] != rates[1])
        printf("the learning rate %s from %.3g to %.3g at step %" PRId64 "\n", rates[1] < rates[0] ? "falls" : "rises",
               rates[0], rates[1], step + 1);
}

static inline void start_open_log(Log *log, const Options *o, const Resume *resume, int64_t step, bool measures,
                                  cJSON *description) {
    cJSON *changed = NULL, *modified = NULL;
    if (o->resume) {
        modified = start_modified_data(resume->run_json, description);
        cJSON *now = options_state_to_json(o);
        changed = starts_changed(resume->run_json, resume->saved, now);
        cJSON_Delete(now);
        start_print_changes(changed, o, resume, step);
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
    if (cJSON_GetArraySize(modified)) json_add(event, "modified", modified);
    else cJSON_Delete(modified);
    if (resume->rates[0] != resume->rates[1]) json_add(event, "rates", cJSON_CreateDoubleArray(resume->rates, 2));
    log_record(log, event);
    cJSON_Delete(event);
    cJSON_Delete(changed);
    checkpoint_clean(o->out);
}
