/*
options_model.h: the model's shape, defaults that depend on other options, and checks of combinations of options.
*/
#pragma once
#include "changes.h"
#include "../comm/comm.h"
#include "../data/choices.h"
#include "../text/prompts.h"
#include "../base/host.h"
#include "../model/tensors.h"
#include "../experts/all_operations.h"
#include "modes.h"

// Number of ranks of the run: the running ranks, or --ranks.
static inline int options_ranks(const Options *o) { return o->ranks ? (int)o->ranks : comm_ranks(); }

// Tokens of a micro-step of all ranks. More than INT_MAX per rank are refused.
static inline int64_t options_micro_step(const Options *o, int ranks) {
    int64_t N = o->batch_size * o->model.T; // at most 2^48
    return (N < INT_MAX ? N : INT_MAX) * ranks;
}

// Sets the sequences of a micro-step and the tokens of an update if they are not given: an update has the tokens of the
// preset, or one sequence on each rank; with --batch-size it has one micro-step.
static inline void options_derive_batch(Options *o, int ranks) {
    int batch = option_row("batch-size"), total = option_row("total-batch");
    int64_t row = (int64_t)o->model.T * ranks, tokens = presets[o->preset].tokens; // row: a sequence on each rank
    if (!o->has[total] && !o->has[batch]) o->total_batch = tokens > row ? tokens / row * row : row;
    else if (!o->has[total]) o->total_batch = options_micro_step(o, ranks);
    if (!o->has[batch])
        for (o->batch_size = 8; o->batch_size > 1 && o->total_batch % (o->batch_size * row);) o->batch_size--;
    o->has[batch] = o->has[total] = true;
}

// Sets every option without a value to the value that follows from the others.
static inline void options_derive(Options *o, int ranks) {
    const ModelConfig *preset = &presets[o->preset].model;
    int active = option_row("experts-active"), width = option_row("expert-ffn");
    int rate = option_row("lr"), warmup = option_row("warmup");
    int threads = option_row("threads"), aux = option_row("router-aux"), generate = option_row("generate");
    for (int r = 0; r < OPTION_ROW_COUNT; r++)
        if (option_of_preset(&option_rows[r]) && !o->has[r] && r != active && r != width) option_copy(o, r, preset);
    if (!o->has[active]) o->model.K = o->model.E ? preset->K : 0;
    if (!o->has[width]) o->model.FE = o->model.E ? preset->FE : 0;
    options_derive_batch(o, ranks);
    if (o->interactive && !o->has[generate]) option_set(o, generate, "256");
    if (o->schedule == SCHEDULE_WSD_LINEAR) o->schedule = SCHEDULE_WSD; // saved under one name
    if (!o->has[rate]) o->lr = presets[o->preset].lr;
    if (!o->has[warmup]) o->warmup = o->steps / 10 < 100 ? o->steps / 10 : 100;
    if (!o->has[threads]) o->threads = max_int(1, host_cores("") / comm_ranks_here());
    if (!o->has[aux]) o->router_aux = o->model.router_bias ? 0 : 0.01;
    o->has[active] = o->has[width] = o->has[rate] = o->has[warmup] = o->has[threads] = o->has[aux] = true;
}

// The last step of this start.
static inline int64_t options_last_step(const Options *o) {
    return o->stop_after && o->stop_after < o->steps ? o->stop_after : o->steps;
}

static inline LearningRate options_learning_rate(const Options *o) {
    return (LearningRate){(Schedule)o->schedule, o->steps, o->warmup, o->decay_steps, o->lr, o->min_lr_ratio};
}

// The name of the option whose width --match-params sets.
static inline const char *options_match_name(const ModelConfig *c) { return c->E ? "expert-ffn" : "ffn"; }
static inline const char *options_match_kind(const ModelConfig *c) { return c->E ? "expert" : "MLP"; }

// The model's configuration, which options_finish checks.
static inline ModelConfig options_config(const Options *o) {
    ModelConfig c = o->model;
    if (o->match_params) *model_match_width(&c) = model_match_ffn(&c); // the option does not change
    return c;
}

// Whether none of the named options was given an invalid value. The list ends in NULL.
static inline bool options_usable(const Options *o, const char *const *names) {
    for (; *names; names++)
        if (o->refused[option_row(*names)]) return false;
    return true;
}

// Checks what the ranges of single options do not cover: the relations between heads, and whether --match-params has a
// solution.
static inline int options_model_problems(const Options *o) {
    static const char *const widths[] = {"hidden", "ffn", "expert-ffn", NULL};
    ModelConfig c = options_config(o);
    Problem problems[8];
    bool narrow = o->match_params && *model_match_width(&c) < 1;
    if (narrow) *model_match_width(&c) = 1;
    int count = model_config_problems(&c, problems, 8);
    OptionText sparse = "";
    if (c.sparse_blocks)
        FORMAT(sparse, " --seq-len %d --sparse-blocks %d --sparse-block-size %d", c.T, c.sparse_blocks, c.sparse_size);
    if (narrow && options_usable(o, widths))
        warn("--match-params: %s has more parameters than the baseline with --%s %d at any width; use a larger --%s",
             c.attention->name, options_match_name(&c), c.E ? o->model.FE : o->model.F, options_match_name(&c));
    for (int i = 0; i < count; i++)
        warn("%s (--attention %s --layers %d --heads %d --kv-heads %d --head-dim %d --window %d --full-every %d%s%s)",
             problems[i], c.attention->name, c.L, c.NH, c.NKV, c.D, c.window, c.full_every, c.yoco ? " --yoco" : "",
             sparse);
    return count + (narrow && options_usable(o, widths));
}

// The largest --batch-size below the current one that divides --total-batch; 0: none.
static inline int64_t options_smaller_batch(const Options *o, int ranks) {
    int64_t row = (int64_t)o->model.T * ranks, B = o->total_batch % row ? 0 : o->batch_size - 1;
    while (B > 0 && o->total_batch / row % B) B--;
    return B;
}

// Checks the tokens of a micro-step and an update.
static inline int options_batch_problems(const Options *o, int ranks) {
    int heads = o->model.attention->norm == NORM_HEAD ? o->model.NH : 1;
    int problems = 0, each = max_int(heads, o->model.K); // rows of a token in a norm of heads, or in its experts
    int64_t N = o->batch_size * o->model.T, micro_step = options_micro_step(o, ranks);
    if (N > INT_MAX)
        REFUSE(problems, "--batch-size %" PRId64 " times --seq-len %d is more than %d tokens; use a smaller one",
               o->batch_size, o->model.T, INT_MAX);
    else if (N * each > INT_MAX)
        REFUSE(problems, "--batch-size %" PRId64 " times --seq-len %d times %s %d is more than %d; use a smaller one",
               o->batch_size, o->model.T, each > heads ? "--experts-active" : "--heads", each, INT_MAX);
    else if (!(mode_selected(o, MODE_TRAIN) || o->dry_run)) return problems; // no updates
    else if (o->total_batch / micro_step > INT_MAX)
        REFUSE(problems,
               "--total-batch %" PRId64 " is more than %d micro-steps of %" PRId64 " tokens; use a smaller one",
               o->total_batch, INT_MAX, micro_step);
    else if (o->total_batch % micro_step) {
        int64_t smaller = options_smaller_batch(o, ranks), larger = (o->total_batch / micro_step + 1) * micro_step;
        OptionText batch_size = ""; // suggested first: it does not change the updates
        if (smaller) FORMAT(batch_size, "--batch-size %" PRId64 " or ", smaller);
        REFUSE(problems,
               "--total-batch %" PRId64 " is not a multiple of --batch-size %" PRId64
               " times --seq-len %d times %d rank%s; use %s--total-batch %" PRId64,
               o->total_batch, o->batch_size, o->model.T, ranks, ranks == 1 ? "" : "s", batch_size, larger);
    }
    return problems;
}

// Checks numbers against each other. All options have values.
static inline int options_number_problems(const Options *o, int ranks) {
    static const char *const shape[] = {
        "attention",   "preset",  "heads",         "kv-heads",          "head-dim",   "layers",         "window",
        "full-every",  "yoco",    "experts",       "experts-active",    "expert-ffn", "shared-experts", "dense-layers",
        "router-bias", "seq-len", "sparse-blocks", "sparse-block-size", NULL};
    static const char *const length[] = {"steps", "warmup", "schedule", "decay-steps", NULL};
    static const char *const batch[] = {"preset", "batch-size", "seq-len", "total-batch", NULL};
    int problems = options_usable(o, shape) ? options_model_problems(o) : 0;
    if (options_usable(o, length) && o->warmup > o->steps)
        REFUSE(problems, "--warmup %" PRId64 " is more than --steps %" PRId64, o->warmup, o->steps);
    else if (options_usable(o, length) && schedule_is_wsd(o->schedule) && o->decay_steps > o->steps - o->warmup)
        REFUSE(problems,
               "--decay-steps %" PRId64 " is more than the %" PRId64 " steps after the warmup: --steps %" PRId64
               " less --warmup %" PRId64,
               o->decay_steps, o->steps - o->warmup, o->steps, o->warmup);
    if (options_usable(o, batch)) problems += options_batch_problems(o, ranks);
    return problems;
}

typedef struct {
    const char *option, *needs; // `option` requires the other one
    const char *what;           // the message: is required
} Requirement;
static const Requirement requirements[] = {
    {"resume", "out", "--out DIR, the run directory"},
    {"eval-out", "eval", "--eval"},
    {"prompts", "generate", "--generate N"},
};

typedef struct {
    const char *a, *b;
    bool given; // only a given value of b counts, not a checkpoint's
    const char *why;
} Exclusion;
static const Exclusion exclusions[] = {
    {"init", "resume", false, "a resumed run already has weights"},
    {"minutes", "steps", true, "both set the number of updates"},
    {"minutes", "stop-after", false, "the last step is not known before the trial"},
    {"minutes", "resume", false, "a resumed run continues to its --steps"},
    {"prompt", "prompt-tokens", false, "both specify the prompt"},
    {"prompts", "prompt", true, "both specify the prompt"},
    {"prompts", "prompt-tokens", true, "both specify the prompt"},
    {"interactive", "prompt", true, "it reads prompts from stdin"},
    {"interactive", "prompt-tokens", true, "it reads prompts from stdin"},
    {"interactive", "prompts", true, "it reads prompts from stdin"},
};

static inline int options_requirements(const Options *o) {
    int problems = 0;
    for (size_t i = 0; i < sizeof(requirements) / sizeof(requirements[0]); i++) {
        const Requirement *q = &requirements[i];
        if (option_on(o, q->option) && !option_on(o, q->needs) && !o->refused[option_row(q->needs)])
            REFUSE(problems, "--%s requires %s", q->option, q->what);
    }
    return problems;
}

// Whether the options load the weights of a run or a checkpoint, even if their values are invalid.
static inline bool options_load(const Options *o) {
    return o->resume || o->init || o->refused[option_row("resume")] || o->refused[option_row("init")];
}

// Checks that options which other options or a mode require are there. `adopted`: the options of a checkpoint, if there
// is one, have been read.
static inline int options_missing(const Options *o, bool adopted) {
    int problems = options_requirements(o);
    if (o->resume && !adopted) return problems;
    for (int m = 0; m < MODE_COUNT; m++) {
        const ModeRow *row = &mode_rows[m];
        const char *dashes = row->option ? "--" : "", *name = row->option ? row->option : "training";
        if (m == MODE_GENERATE && o->interactive) name = "interactive";
        if (!mode_selected(o, (Mode)m)) continue;
        if (row->train_data == DATA_REQUIRED && !o->train_data && !o->refused[option_row("train-data")])
            REFUSE(problems, "%s%s requires --train-data DATA", dashes, name);
        if (row->val_data == DATA_REQUIRED && !o->val_data && !o->refused[option_row("val-data")])
            REFUSE(problems, "%s%s requires --val-data DATA", dashes, name);
        if (row->reads_weights && o->out && !options_load(o))
            REFUSE(problems, "--%s with --out requires --resume, for the weights of that run, or --init DIR", name);
    }
    Separator separator;
    if (o->separator && !separator_parse(o->separator, &separator))
        REFUSE(problems, "--separator %s has an invalid format: it must be ID, ID:before or ID:after", o->separator);
    return problems;
}

static inline int options_choices_problems(const char *text) {
    const char *why = NULL;
    OptionText shown;
    int problems = 0;
    free(choices_parse(text, &why).items);
    if (why) REFUSE(problems, "--eval-choices '%s' is not accepted: %s", option_shown(shown, text), why);
    return problems;
}

static inline int options_change_problems(const char *text) {
    Changes changes;
    OptionText shown;
    char wrong[200];
    int problems = 0, count = changes_count(text);
    const char *why = count <= CHANGES_LIMIT ? changes_parse(&changes, text, wrong) : NULL;
    if (why) REFUSE(problems, "--change '%s' is not accepted: %s", option_shown(shown, wrong), why);
    if (count > CHANGES_LIMIT)
        REFUSE(problems, "--change has %d changes, and the limit is %d: use ranges of steps and beginnings of names",
               count, CHANGES_LIMIT);
    if (count == 0) REFUSE(problems, "--change has no changes: give FIRST[-LAST]:KEY=VALUE, or omit the option");
    return problems;
}

// The highest --zero that the options allow: at level 3 ranks gather layers together and must run as many forwards.
static inline int options_most_zero(const Options *o) { return o->sample_every || o->eval_choices ? 2 : ZERO_MOST; }

// Refuses texts that JSON cannot represent.
static inline int options_text_problems(const Options *o) {
    int problems = 0;
    OptionText room;
    for (int r = 0; o->out && r < OPTION_ROW_COUNT; r++) {
        const OptionRow *row = &option_rows[r];
        bool text = row->kind == OPTION_TEXT && strcmp(row->name, "prompt") != 0;
        const char *value = text ? option_text(room, o, r) : NULL;
        size_t at = value ? utf8_invalid_at(value, strlen(value)) : 0;
        if (at) REFUSE(problems, "--%s is not valid UTF-8 at byte %zu: use another name", row->name, at);
    }
    return problems;
}

static inline int options_sharding_problems(const Options *o) {
    int problems = 0;
    if (o->zero > options_most_zero(o) && (mode_selected(o, MODE_TRAIN) || o->dry_run))
        REFUSE(problems,
               "--zero 3 does not support --%s, for which ranks compute different numbers of forwards: use --zero 2, "
               "or evaluate the checkpoints",
               o->sample_every ? "sample-every" : "eval-choices");
    bool groups = mode_selected(o, MODE_TRAIN) || o->dry_run || options_given(o, "zero-group");
    if (groups && (o->zero_group == 1 || (o->zero_group && options_ranks(o) % o->zero_group)))
        REFUSE(problems,
               "--zero-group %" PRId64 " does not divide the number of ranks, %d: it must be a divisor, 2 or more, or "
               "0 for one group",
               o->zero_group, options_ranks(o));
    return problems;
}

static inline int options_exclusions(const Options *o) {
    OptionText shown;
    int problems = options_text_problems(o), modes = 0;
    for (size_t i = 0; i < sizeof(exclusions) / sizeof(exclusions[0]); i++) {
        const Exclusion *e = &exclusions[i];
        if (option_on(o, e->a) && (e->given ? options_given(o, e->b) : option_on(o, e->b)))
            REFUSE(problems, "--%s and --%s are mutually exclusive: %s", e->a, e->b, e->why);
    }
    size_t invalid = o->prompt ? utf8_invalid_at(o->prompt, strlen(o->prompt)) : 0;
    if (invalid)
        REFUSE(problems, "--prompt is not valid UTF-8 at byte %zu: use UTF-8, or --prompt-tokens ID,ID,...", invalid);
    if (o->prompt_tokens && !prompt_numbers_valid(o->prompt_tokens))
        REFUSE(problems, "--prompt-tokens '%s' is not accepted: it must be token IDs separated by commas",
               option_shown(shown, o->prompt_tokens));
    if (o->minutes > 0 && !mode_selected(o, MODE_TRAIN)) REFUSE(problems, "--minutes is an option of training alone");
    if (o->ranks && !o->dry_run)
        REFUSE(problems,
               "--ranks requires --dry-run; to start %" PRId64 " ranks, use mpirun -n %" PRId64 " or srun -n %" PRId64,
               o->ranks, o->ranks, o->ranks);
    problems += options_sharding_problems(o);
    // a directory that does not exist is created
    if (o->rendezvous && access(o->rendezvous, F_OK) == 0 &&
        (!directory_exists(o->rendezvous) || access(o->rendezvous, W_OK | X_OK) != 0))
        REFUSE(problems, "--rendezvous %s must be a directory in which files can be created", o->rendezvous);
    if (comm_ranks() > 1 && o->eval_out)
        REFUSE(problems, "--eval-out requires a single process, not %d ranks", comm_ranks());
    if (o->eval_choices) problems += options_choices_problems(o->eval_choices);
    int64_t rollback_count, rollback_steps;
    if (o->rollback && !rollback_parse(o->rollback, &rollback_count, &rollback_steps))
        REFUSE(problems,
               "--rollback '%.40s' is not accepted: it must be K:M, K spikes within M steps, 1 <= K <= M <= %d",
               o->rollback, ROLLBACK_LIMIT);
    if (o->change) problems += options_change_problems(o->change);
    OptionText list;
    list[0] = 0;
    for (int m = MODE_TRAIN + 1; m < MODE_COUNT; m++) {
        size_t n = strlen(list);
        if (!mode_selected(o, (Mode)m)) continue;
        snprintf(list + n, sizeof(list) - n, "%s--%s", modes++ ? " and " : "", mode_rows[m].option);
        if (comm_ranks() > 1 && !mode_rows[m].many_ranks)
            REFUSE(problems, "--%s requires a single process, not %d ranks", mode_rows[m].option, comm_ranks());
    }
    if (modes > 1) REFUSE(problems, "%s are mutually exclusive: a process runs in one mode", list);
    return problems;
}

// Without --vocab, a new model has the vocabulary size of its data, or the preset's if the data does not specify a
// size. --vocab may be larger than the data requires; a smaller value is an error when the data is opened.
static inline void options_adopt_data(Options *o) {
    int r = option_row("vocab"), vocabulary = 0, otherwise = presets[o->preset].model.V;
    if (o->has[r] || o->refused[r]) return;
    if (o->train_data) vocabulary = corpus_vocabulary(o->train_data, otherwise);
    if (o->val_data) vocabulary = max_int(vocabulary, corpus_vocabulary(o->val_data, otherwise));
    if (vocabulary == 0) return;
    o->model.V = vocabulary;
    o->has[r] = true;
}

// Threads beyond the number of cores make every barrier wait: a step takes a hundred times as long.
static inline void options_limit_threads(Options *o, int cores) {
    if (o->threads <= cores) return;
    warn("--threads %" PRId64 ": this process may use %d core%s; %d thread%s used", o->threads, cores,
         cores == 1 ? "" : "s", cores, cores == 1 ? " is" : "s are");
    o->threads = cores;
}

// Warns of given options that change nothing.
static inline void options_warn_unused(const Options *o) {
    bool saves = o->out || !mode_selected(o, MODE_TRAIN);
    bool samples = mode_selected(o, MODE_GENERATE) || o->sample_every;
    const struct {
        const char *option;
        bool unused;
        const char *where;
    } rows[] = {
        {"sparse-block-size", !o->model.sparse_blocks, "without --sparse-blocks"},
        {"decay-steps", !schedule_is_wsd(o->schedule), "without --schedule wsd"},
        {"router-aux", !o->model.E, "without --experts"},
        {"router-z", !o->model.E, "without --experts"},
        {"router-bias-rate", !o->model.router_bias, "without --router-bias"},
        {"val-every", o->val_every && !o->val_data && !o->eval_choices, "without --val-data or --eval-choices"},
        {"rollback", !o->out || (!o->checkpoint_every && o->checkpoint_minutes <= 0),
         "without --out and --checkpoint-every: there is no checkpoint to return to"},
        {"checkpoint-every", o->checkpoint_every && !saves, "without --out"},
        {"checkpoint-minutes", o->checkpoint_minutes > 0 && !saves, "without --out"},
        {"keep", !saves, "without --out"},
        {"stats-every", o->stats_every && !o->out, "without --out: there is no log to write statistics to"},
        {"deterministic", !o->deterministic && ops_use_host_memory, "on a CPU, which is always deterministic"},
        {"prompt", !samples, "without --generate or --sample-every"},
        {"prompt-tokens", !samples, "without --generate or --sample-every"},
        {"temperature", !samples, "without --generate or --sample-every"},
        {"top-k", !samples, "without --generate or --sample-every"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (rows[i].unused && options_given(o, rows[i].option))
            warn("--%s%s has no effect %s", strcmp(rows[i].option, "deterministic") == 0 ? "no-" : "", rows[i].option,
                 rows[i].where);
    int64_t window = 0, bad = 0;
    double kept = (double)(o->keep - 1) * (double)o->checkpoint_every;
    if (o->rollback && o->out && o->keep && o->checkpoint_every && rollback_parse(o->rollback, &bad, &window) &&
        kept < (double)window)
        warn("--rollback %s: --keep %" PRId64 " and --checkpoint-every %" PRId64
             " do not keep a checkpoint from before the last %" PRId64 " steps; use a larger --keep",
             o->rollback, o->keep, o->checkpoint_every, window);
    if (o->stop_after > o->steps)
        warn("--stop-after %" PRId64 " has no effect: the run ends after --steps %" PRId64, o->stop_after, o->steps);
}

// Resolves defaults that depend on other options, and checks combinations: reports every problem, then exits with
// status 2. Call after the values of a checkpoint have been adopted.
static inline void options_finish(Options *o, int ranks) {
    assert(ranks >= 1);
    options_derive(o, ranks);
    int problems = options_exclusions(o) + options_missing(o, true) + options_number_problems(o, ranks);
    if (problems) program_exit(EXIT_USAGE);
    options_limit_threads(o, host_cores(""));
    options_warn_unused(o);
}

// --minutes: sets --steps of finished options, and the options that follow from it. Exits with status 2 if other
// options contradict it.
static inline void options_set_steps(Options *o, int64_t steps, int ranks) {
    o->steps = steps;
    o->has[option_row("warmup")] = options_given(o, "warmup");
    options_derive(o, ranks);
    if (options_number_problems(o, ranks)) program_exit(EXIT_USAGE);
}

// Whether the initial width of --match-params is known: given, adopted, or from a given preset.
static inline bool options_width_known(const Options *o, const ModelConfig *loaded) {
    return o->has[option_row(options_match_name(loaded))] || options_given(o, "preset");
}
static inline int options_width(const Options *o, const ModelConfig *loaded) {
    bool has = o->has[option_row(options_match_name(loaded))];
    const ModelConfig *from = has ? &o->model : &presets[o->preset].model;
    return loaded->E ? from->FE : from->F;
}

// Whether the model does not have the option: a model with experts and without dense layers has no MLP width.
static inline bool option_unused(const OptionRow *row, const ModelConfig *c) {
    return row->field == offsetof(ModelConfig, F) && c->E && !c->dense_layers;
}

// Whether a loaded model may have another value: --seq-len, and in a resumed run --rope-theta.
static inline bool option_of_start(const Options *o, const OptionRow *row) {
    return row->field == offsetof(ModelConfig, T) || (o->resume && row->on_resume == OPTION_SAVED);
}

// The option as on a command line, for a value of option_value.
static inline const char *option_phrase(OptionText out, const OptionRow *row, const char *value) {
    bool flag = row->kind == OPTION_BOOL, no = flag && strcmp(value, "no") == 0;
    snprintf(out, sizeof(OptionText), "--%s%s%s%.100s", no ? "no-" : "", row->name, flag ? "" : " ", flag ? "" : value);
    return out;
}

// Reports each architecture option that contradicts a loaded model, and returns their number. A given preset stands for
// the options that are not given, except --vocab, which data choose, and --seq-len, on which no weight depends.
static inline int options_contradictions(const Options *o, const ModelConfig *loaded) {
    int count = 0;
    bool match = o->match_params, preset = options_given(o, "preset");
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        OptionText wanted, loaded_value, asked, other, shape = "";
        const OptionRow *row = &option_rows[r];
        if (!option_of_model(row) || option_of_start(o, row) || option_unused(row, loaded)) continue;
        if (match && strcmp(row->name, options_match_name(loaded)) == 0) continue; // checked below
        bool of_preset = preset && option_of_preset(row) && row->field != offsetof(ModelConfig, V);
        if (!o->given[r] && !of_preset) continue;
        if (!o->given[r]) FORMAT(shape, "--preset %s, with ", presets[o->preset].name);
        const char *want = option_value(wanted, row, o->given[r] ? &o->model : &presets[o->preset].model);
        const char *have = option_value(loaded_value, row, loaded);
        if (strcmp(want, have) == 0) continue;
        REFUSE(count, "%s%s%s contradicts the loaded model, which has %s", shape, option_phrase(asked, row, want),
               *shape ? "," : "", row->kind == OPTION_BOOL ? option_phrase(other, row, have) : have);
    }
    ModelConfig matched = *loaded;
    if (match && options_width_known(o, loaded)) {
        *model_match_width(&matched) = options_width(o, loaded);
        int width = model_match_ffn(&matched), have = loaded->E ? loaded->FE : loaded->F;
        if (width != have)
            REFUSE(count, "--match-params with --%s %d requires an %s width of %d; the loaded model has %d",
                   options_match_name(loaded), options_width(o, loaded), options_match_kind(loaded), width, have);
    }
    return count;
}

// For --init and --resume: sets the architecture options to the loaded model's values, --seq-len only if it was neither
// given nor adopted, and --rope-theta of a resumed run likewise: no weight depends on them. With --match-params, --ffn
// keeps the value that the loaded width was computed from; if that is unknown, the loaded width is used without
// matching. Exits with status 2 on contradictions.
static inline void options_adopt_model(Options *o, const ModelConfig *loaded) {
    if (options_contradictions(o, loaded)) program_exit(EXIT_USAGE);
    int width = option_row(options_match_name(loaded));
    ModelConfig adopted = *loaded;
    if (o->match_params && options_width_known(o, loaded)) {
        *model_match_width(&adopted) = options_width(o, loaded);
    } else if (o->match_params) {
        warn(
            "--match-params: using the loaded model's %s width %d, because no --%s or --preset specifies what to match",
            options_match_kind(loaded), loaded->E ? loaded->FE : loaded->F, option_rows[width].name);
        o->match_params = false;
    }
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        const OptionRow *row = &option_rows[r];
        if (option_of_model(row) && !(option_of_start(o, row) && o->has[r]) && !option_unused(row, loaded))
            option_copy(o, r, &adopted);
    }
    o->model.rms_norm_eps = loaded->rms_norm_eps;
}
