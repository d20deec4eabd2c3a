/*
options_model.h: the model's shape, defaults that depend on other options, and checks of combinations of options.
*/
#ifndef LLMC_OPTIONS_MODEL_H
#define LLMC_OPTIONS_MODEL_H
#include "../comm/comm.h"
#include "../data/choices.h"
#include "../data/synthetic.h"
#include "../base/host.h"
#include "../model/tensors.h"
#include "../ops/all_ops.h"
#include "../cuda/device_peak.h"
#include "modes.h"
#include "options_table.h"
#include "../model/quantization.h"

// Reports a usage error on one line. The program reports all errors, then exits with status 2.
#define REFUSE(count, ...) (warn(__VA_ARGS__), (count)++)

typedef struct {
    const char *option;
    size_t field, preset, model; // offsets in Options (int64_t), Preset (int), ModelConfig (int)
} ModelDim;
#define DIMENSION(option, field, letter) \
    { option, offsetof(Options, field), offsetof(Preset, letter), offsetof(ModelConfig, letter) }
static const ModelDim model_dims[] = {
    DIMENSION("layers", layers, L),          DIMENSION("hidden", hidden, C),
    DIMENSION("heads", heads, NH),           DIMENSION("kv-heads", kv_heads, NKV),
    DIMENSION("head-dim", head_dim, D),      DIMENSION("ffn", ffn, F),
    DIMENSION("seq-len", seq_len, T),        DIMENSION("vocab", vocab, V),
    DIMENSION("experts", experts, E),        DIMENSION("experts-active", experts_active, K),
    DIMENSION("expert-ffn", expert_ffn, FE),
};
#undef DIMENSION
enum { MODEL_DIM_COUNT = sizeof(model_dims) / sizeof(model_dims[0]) };

static inline int64_t *option_int(Options *o, size_t field) { return (int64_t *)((char *)o + field); }

// Number of ranks of the run: those running, or those of --dry-run --ranks.
static inline int options_ranks(const Options *o) { return o->dry_run && o->ranks ? (int)o->ranks : comm_ranks(); }

// Sets every option without a value to the value that follows from the others.
static inline void options_derive(Options *o, int ranks) {
    const Preset *preset = &presets[o->preset];
    for (int i = 0; i < MODEL_DIM_COUNT; i++) {
        int r = option_row(model_dims[i].option);
        bool of_experts =
            model_dims[i].model == offsetof(ModelConfig, K) || model_dims[i].model == offsetof(ModelConfig, FE);
        if (!o->has[r])
            *option_int(o, model_dims[i].field) =
                of_experts && o->experts == 0 ? 0 : *(const int *)((const char *)preset + model_dims[i].preset);
        o->has[r] = true;
    }
    int tie = option_row("tie-embeddings"), total = option_row("total-batch"), warmup = option_row("warmup");
    int threads = option_row("threads"), aux = option_row("router-aux");
    if (!o->has[tie]) o->tie_embeddings = preset->tied;
    if (!o->has[total]) o->total_batch = o->batch_size * o->seq_len * ranks;
    if (!o->has[warmup]) o->warmup = o->steps / 10 < 100 ? o->steps / 10 : 100;
    if (!o->has[threads]) o->threads = max_int(1, host_cores("") / comm_ranks_here());
    if (!o->has[aux]) o->router_aux = o->router_bias ? 0 : 0.01;
    o->has[aux] = o->has[tie] = o->has[total] = o->has[warmup] = o->has[threads] = true;
}

// Whether the width of the MLP or of the experts follows from the number of parameters.
static inline bool options_match(const Options *o) { return o->match_params || o->match_active; }
// The option of that width.
static inline const char *options_match_name(const ModelConfig *c) { return c->E ? "expert-ffn" : "ffn"; }
static inline const char *options_match_kind(const ModelConfig *c) { return c->E ? "expert" : "MLP"; }

static inline ModelConfig options_config(const Options *o) {
    ModelConfig c;
    memset(&c, 0, sizeof(c));
    c.attention = &attention_variants[o->attention];
    for (int i = 0; i < MODEL_DIM_COUNT; i++)
        *(int *)((char *)&c + model_dims[i].model) = (int)*(const int64_t *)((const char *)o + model_dims[i].field);
    c.shared = (int)o->shared_experts;
    c.dense_layers = (int)o->dense_layers;
    c.rope_theta = o->rope_theta;
    c.rms_norm_eps = o->rms_norm_eps;
    c.tied = o->tie_embeddings;
    c.window = (int)o->window;
    c.full_every = (int)o->full_every;
    c.yoco = o->yoco;
    c.qk_norm = o->qk_norm;
    c.router_bias = o->router_bias;
    if (options_match(o)) *model_match_width(&c) = model_match_ffn(&c, o->match_active); // the option does not change
    return c;
}

// Whether none of the named options was given an invalid value. The list ends in NULL.
static inline bool options_usable(const Options *o, const char *const *names) {
    for (; *names; names++)
        if (o->refused[option_row(*names)]) return false;
    return true;
}

// Checks what the ranges of single options do not: the relations between heads, and whether --match-params has a
// solution.
static inline int options_model_problems(const Options *o) {
    static const char *const widths[] = {"hidden", "ffn", "expert-ffn", NULL};
    ModelConfig c = options_config(o);
    Problem problems[8];
    bool narrow = options_match(o) && *model_match_width(&c) < 1;
    if (narrow) *model_match_width(&c) = 1;
    int count = model_config_problems(&c, problems, 8);
    if (narrow && options_usable(o, widths))
        warn("--match-%s: %s has more parameters than the baseline with --%s %" PRId64
             " at any width; use a larger --%s",
             o->match_active ? "active" : "params", c.attention->name, options_match_name(&c),
             c.E ? o->expert_ffn : o->ffn, options_match_name(&c));
    for (int i = 0; i < count; i++)
        warn("%s (--attention %s --layers %d --heads %d --kv-heads %d --head-dim %d --window %d --full-every %d%s)",
             problems[i], c.attention->name, c.L, c.NH, c.NKV, c.D, c.window, c.full_every, c.yoco ? " --yoco" : "");
    bool dense = o->match_active && c.E == 0;
    if (dense) warn("--match-active requires --experts E; without experts all parameters are active: --match-params");
    return count + (narrow && options_usable(o, widths)) + dense;
}

// The largest --batch-size below the current one that divides --total-batch; 0: none.
static inline int64_t options_smaller_batch(const Options *o, int ranks) {
    int64_t row = o->seq_len * ranks, B = o->total_batch % row ? 0 : o->batch_size - 1;
    while (B > 0 && o->total_batch / row % B) B--;
    return B;
}

// The tasks of --eval-needles and --eval-shots. why: what is wrong with each of them, or NULL.
static inline SyntheticTasks options_synthetic(const Options *o, const char *why[2]) {
    SyntheticTasks tasks;
    memset(&tasks, 0, sizeof(tasks));
    why[0] = o->eval_needles ? needles_parse(&tasks, o->eval_needles) : NULL;
    why[1] = o->eval_shots ? shots_parse(&tasks, o->eval_shots) : NULL;
    return tasks;
}

// lengths: whether they fit into the context; otherwise whether they have their form.
static inline int options_synthetic_problems(const Options *o, bool lengths) {
    static const char *const names[] = {"eval-needles", "eval-shots"}, *const length[] = {"preset", "seq-len", NULL};
    const char *const values[] = {o->eval_needles, o->eval_shots}, *why[2];
    SyntheticTasks tasks = options_synthetic(o, why);
    const int64_t wanted[] = {needles_context(&tasks), shots_context(&tasks)};
    OptionText shown;
    int problems = 0;
    for (int i = 0; i < 2; i++) {
        if (values[i] && !lengths && why[i])
            REFUSE(problems, "--%s '%s' is not accepted: %s", names[i], option_shown(shown, values[i]), why[i]);
        if (values[i] && lengths && !why[i] && options_usable(o, length) && o->seq_len < wanted[i])
            REFUSE(problems, "--%s %s requires --seq-len %" PRId64 " or more, and it is %" PRId64, names[i],
                   option_shown(shown, values[i]), wanted[i], o->seq_len);
    }
    return problems;
}

// Checks numbers against each other. All options have values.
static inline int options_number_problems(const Options *o, int ranks) {
    static const char *const shape[] = {"attention",      "preset",       "heads",          "kv-heads",
                                        "head-dim",       "layers",       "window",         "full-every",
                                        "yoco",           "experts",      "experts-active", "expert-ffn",
                                        "shared-experts", "dense-layers", "router-bias",    NULL};
    static const char *const length[] = {"steps", "warmup", NULL};
    static const char *const batch[] = {"preset", "batch-size", "seq-len", "total-batch", NULL};
    int problems = options_usable(o, shape) ? options_model_problems(o) : 0;
    if (options_usable(o, length) && o->warmup > o->steps)
        REFUSE(problems, "--warmup %" PRId64 " is more than --steps %" PRId64, o->warmup, o->steps);
    problems += options_synthetic_problems(o, true);
    if (!options_usable(o, batch)) return problems;
    int64_t N = o->batch_size * o->seq_len, micro_step = N * ranks; // at most 2^48 each
    if (N > INT_MAX)
        REFUSE(problems,
               "--batch-size %" PRId64 " times --seq-len %" PRId64 " is more than %d tokens; use a smaller one",
               o->batch_size, o->seq_len, INT_MAX);
    else if (!o->generate && o->total_batch % micro_step) { // generation has no updates
        int64_t smaller = options_smaller_batch(o, ranks), larger = (o->total_batch / micro_step + 1) * micro_step;
        OptionText batch_size = ""; // suggested first: it does not change the updates
        if (smaller) FORMAT(batch_size, "--batch-size %" PRId64 " or ", smaller);
        REFUSE(problems,
               "--total-batch %" PRId64 " is not a multiple of --batch-size %" PRId64 " times --seq-len %" PRId64
               " times %d rank%s; use %s--total-batch %" PRId64,
               o->total_batch, o->batch_size, o->seq_len, ranks, ranks == 1 ? "" : "s", batch_size, larger);
    }
    return problems;
}

// Reads the next token ID of a comma-separated list and advances *at to the following one, or the end. Returns false
// if there is no valid ID.
static inline bool prompt_number(const char **at, int *id) {
    char *end = NULL;
    errno = 0;
    long long x = strtoll(*at, &end, 10);
    if (!isdigit((unsigned char)**at) || errno || x > INT_MAX || (*end && (*end != ',' || !end[1]))) return false;
    *id = (int)x;
    *at = end + (*end == ',');
    return true;
}

static inline bool prompt_numbers_valid(const char *text) {
    int id;
    do
        if (!prompt_number(&text, &id)) return false;
    while (*text);
    return true;
}

// Checks the options that a mode requires. `adopted`: the checkpoint's options have been read, if there is one.
static inline int options_missing(const Options *o, bool adopted) {
    int problems = 0;
    if (o->resume && !o->out && !o->refused[option_row("out")])
        REFUSE(problems, "--resume requires --out DIR, the run directory");
    if (o->resume && !adopted) return problems;
    for (int m = 0; m < MODE_COUNT; m++) {
        const ModeRow *row = &mode_rows[m];
        const char *dashes = row->option ? "--" : "", *name = row->option ? row->option : "training";
        if (!mode_selected(o, (Mode)m)) continue;
        if (row->train_data == DATA_REQUIRED && !o->train_data && !o->refused[option_row("train-data")])
            REFUSE(problems, "%s%s requires --train-data DATA", dashes, name);
        if (row->val_data == DATA_REQUIRED && !o->val_data && !o->refused[option_row("val-data")])
            REFUSE(problems, "%s%s requires --val-data DATA", dashes, name);
    }
    Separator separator;
    if (o->separator && !separator_parse(o->separator, &separator))
        REFUSE(problems, "--separator %s has an invalid format: it must be ID, ID:before or ID:after", o->separator);
    if (o->eval_out && !o->eval) REFUSE(problems, "--eval-out requires --eval");
    if (o->dump_attention && !o->eval) REFUSE(problems, "--dump-attention requires --eval");
    if (o->quantize && !o->eval) REFUSE(problems, "--quantize requires --eval");
    if (o->eval_needles && !o->eval && !o->dry_run) REFUSE(problems, "--eval-needles requires --eval");
    if (o->eval_shots && !o->eval && !o->dry_run) REFUSE(problems, "--eval-shots requires --eval");
    if (o->probe && !o->init && !o->resume)
        REFUSE(problems, "--probe requires --init DIR, the checkpoint that it measures");
    bool generates = o->generate || o->refused[option_row("generate")];
    if (o->prompts && !generates) REFUSE(problems, "--prompts requires --generate N");
    if (o->stop_at_separator && !generates) REFUSE(problems, "--stop-at-separator requires --generate N");
    return problems;
}

static inline int options_quantize_problems(const char *list) {
    int problems = 0, count = 0;
    bool valid;
    while (list) {
        OptionText shown;
        Quantization q = quantization_next(&list, &valid);
        count++;
        if (!valid)
            REFUSE(problems,
                   "--quantize '%s' is not accepted: it must be wNaM, wNaM:tensor, logitsN, or two of these joined by "
                   "'+', with 2 to 8 bits, or 16 for numbers that are not rounded",
                   option_shown(shown, q.name));
    }
    if (count > QUANTIZATION_LIMIT)
        REFUSE(problems, "--quantize has %d specifications, and at most %d are accepted", count, QUANTIZATION_LIMIT);
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

// The highest --zero: with 3 ranks gather each layer together, so all compute as many forwards.
static inline int options_most_zero(const Options *o) { return o->sample_every || o->eval_choices ? 2 : ZERO_MOST; }

// Reports a --device that no row matches. Returns 1.
static inline int options_unknown_device(const char *name) {
    char list[2048] = "";
    size_t used = 0;
    OptionText shown;
    for (int i = 0; i < DEVICE_PEAK_COUNT; i++)
        if (i == 0 || strcmp(device_peaks[i].name, device_peaks[i - 1].name) != 0)
            used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "", device_peaks[i].name);
    assert(used < sizeof(list));
    warn("--device '%s' is unknown: it must be one of %s, or a prefix of one", option_shown(shown, name), list);
    return 1;
}

static inline int options_exclusions(const Options *o) {
    OptionText shown;
    int problems = 0, modes = 0;
    if (o->match_params && o->match_active)
        REFUSE(problems, "--match-params and --match-active are mutually exclusive: both determine one width");
    if (o->init && o->resume)
        REFUSE(problems, "--init and --resume are mutually exclusive: a resumed run already has weights");
    if (o->prompt && o->prompt_tokens)
        REFUSE(problems, "--prompt and --prompt-tokens are mutually exclusive: both specify the prompt");
    const char *other = options_given(o, "prompt")          ? "prompt"
                        : options_given(o, "prompt-tokens") ? "prompt-tokens"
                                                            : NULL;
    if (o->prompts && other) // those of a checkpoint are not used
        REFUSE(problems, "--prompts and --%s are mutually exclusive: both specify the prompt", other);
    size_t invalid = o->prompt ? utf8_invalid_at(o->prompt, strlen(o->prompt)) : 0;
    if (invalid)
        REFUSE(problems, "--prompt is not valid UTF-8 at byte %zu: use UTF-8, or --prompt-tokens ID,ID,...", invalid);
    if (o->prompt_tokens && !prompt_numbers_valid(o->prompt_tokens))
        REFUSE(problems, "--prompt-tokens '%s' is not accepted: it must be token IDs separated by commas",
               option_shown(shown, o->prompt_tokens));
    if (o->ranks && !o->dry_run)
        REFUSE(problems,
               "--ranks requires --dry-run; to start %" PRId64 " ranks, use mpirun -n %" PRId64 " or srun -n %" PRId64,
               o->ranks, o->ranks, o->ranks);
    if (options_given(o, "link-gbs") && !(o->dry_run && o->ranks > 1))
        REFUSE(problems, "--link-gbs requires --dry-run --ranks W with W above 1");
    if (o->zero > options_most_zero(o) && (mode_selected(o, MODE_TRAIN) || o->dry_run))
        REFUSE(problems,
               "--zero 3 does not support --%s, for which ranks compute different numbers of forwards: use --zero 2, "
               "or evaluate the checkpoints",
               o->sample_every ? "sample-every" : "eval-choices");
    if (o->device && !o->dry_run) REFUSE(problems, "--device requires --dry-run");
    if (o->device && !ops_use_host_memory && sizeof(floatX) != 2)
        REFUSE(problems, "--device predicts the bf16 program; this program is compiled for fp32");
    if (o->dry_run_out && !o->device) REFUSE(problems, "--dry-run-out requires --device");
    if (o->device && !device_peak_named(o->device)) problems += options_unknown_device(o->device);
    const DevicePeak *gpu = o->device ? device_peak_named(o->device) : NULL;
    if (gpu && o->gemm == GEMM_FP8 && device_fp8_tflops(gpu) == 0)
        REFUSE(problems,
               "--gemm fp8 requires a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell); --device is %s",
               gpu->name);
    if (comm_ranks() > 1 && (o->eval_out || o->dump_attention))
        REFUSE(problems, "--eval-out and --dump-attention require a single process, not %d ranks", comm_ranks());
    if (o->quantize) problems += options_quantize_problems(o->quantize);
    if (o->eval_choices) problems += options_choices_problems(o->eval_choices);
    problems += options_synthetic_problems(o, false);
    int64_t rollback_count, rollback_steps;
    if (o->rollback && !rollback_parse(o->rollback, &rollback_count, &rollback_steps))
        REFUSE(problems,
               "--rollback '%.40s' is not accepted: it must be K:M, K spikes within M steps, 1 <= K <= M <= %d",
               o->rollback, ROLLBACK_LIMIT);
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

// Without --vocab, a new model has the vocabulary size of its data, and the preset's for data that does not specify
// one. --vocab may be larger than the data requires; a smaller value is an error when the data is opened.
static inline void options_adopt_data(Options *o) {
    int r = option_row("vocab"), vocabulary = 0, otherwise = presets[o->preset].V;
    if (o->has[r] || o->refused[r]) return;
    if (o->train_data) vocabulary = corpus_vocabulary(o->train_data, otherwise);
    if (o->val_data) vocabulary = max_int(vocabulary, corpus_vocabulary(o->val_data, otherwise));
    if (vocabulary == 0) return;
    o->vocab = vocabulary;
    o->has[r] = true;
}

// Threads beyond the number of cores make every barrier wait: a step takes a hundred times as long.
static inline void options_limit_threads(Options *o, int cores) {
    if (o->threads <= cores) return;
    warn("--threads %" PRId64 ": this process may use %d core%s; %d thread%s used", o->threads, cores,
         cores == 1 ? "" : "s", cores, cores == 1 ? " is" : "s are");
    o->threads = cores;
}

// Options that are given and change nothing.
static inline void options_warn_unused(const Options *o) {
    bool on_cpu = ops_use_host_memory && !o->device, saves = o->out || !mode_selected(o, MODE_TRAIN);
    const struct {
        const char *option;
        bool unused;
        const char *where;
    } rows[] = {
        {"router-aux", !o->experts, "without --experts"},
        {"router-z", !o->experts, "without --experts"},
        {"router-bias-rate", !o->router_bias, "without --router-bias"},
        {"val-every", o->val_every && !o->val_data && !o->eval_choices, "without --val-data or --eval-choices"},
        {"rollback", !o->out || !o->checkpoint_every,
         "without --out and --checkpoint-every: there is no checkpoint to return to"},
        {"checkpoint-every", o->checkpoint_every && !saves, "without --out"},
        {"checkpoint-minutes", o->checkpoint_minutes > 0 && !saves, "without --out"},
        {"keep", !saves, "without --out"},
        {"measure-peak", o->measure_peak && on_cpu, "on a CPU, whose peak is always measured"},
        {"deterministic", !o->deterministic && on_cpu, "on a CPU, which is always deterministic"},
        {"sdpa-linear", o->sdpa_linear && on_cpu, "on a CPU"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (rows[i].unused && options_given(o, rows[i].option))
            warn("--%s%s has no effect %s", strcmp(rows[i].option, "deterministic") == 0 ? "no-" : "", rows[i].option,
                 rows[i].where);
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

// The model configuration of finished options. Reports every problem of an invalid one, then exits with status 2.
static inline ModelConfig options_model(const Options *o) {
    if (options_model_problems(o)) program_exit(EXIT_USAGE);
    return options_config(o);
}

// Whether the width that --match-params starts from is known: given, adopted, or from a given preset.
static inline bool options_width_known(const Options *o, const ModelConfig *loaded) {
    return o->has[option_row(options_match_name(loaded))] || options_given(o, "preset");
}
static inline int64_t options_width(const Options *o, const ModelConfig *loaded) {
    const Preset *preset = &presets[o->preset];
    if (!o->has[option_row(options_match_name(loaded))]) return loaded->E ? preset->FE : preset->F;
    return loaded->E ? o->expert_ffn : o->ffn;
}

// Whether the model has no such dimension: without dense layers a model with experts has no MLP width.
static inline bool model_dim_unused(const ModelConfig *c, const ModelDim *d) {
    return d->model == offsetof(ModelConfig, F) && c->E && !c->dense_layers;
}

// Reports each architecture option that contradicts a loaded model, and returns their number. A given preset stands for
// the options that are not given. The sequence length may differ: no weight depends on it.
static inline int options_contradictions(const Options *o, const ModelConfig *loaded) {
    int count = 0, preset = option_row("preset");
    for (int i = 0; i < MODEL_DIM_COUNT; i++) {
        const ModelDim *d = &model_dims[i];
        int r = option_row(d->option), have = *(const int *)((const char *)loaded + d->model);
        if (d->model == offsetof(ModelConfig, T) || model_dim_unused(loaded, d)) continue;
        if (options_match(o) && strcmp(d->option, options_match_name(loaded)) == 0) continue; // checked below
        int64_t want = *(const int64_t *)((const char *)o + d->field);
        if (o->given[r] && want != have)
            REFUSE(count, "--%s %" PRId64 " contradicts the loaded model, which has %d", d->option, want, have);
        want = *(const int *)((const char *)&presets[o->preset] + d->preset);
        if (!o->given[r] && o->given[preset] && want != have)
            REFUSE(count, "--preset %s, with --%s %" PRId64 ", contradicts the loaded model, which has %d",
                   presets[o->preset].name, d->option, want, have);
    }
    ModelConfig matched = *loaded;
    if (options_match(o) && options_width_known(o, loaded)) {
        *model_match_width(&matched) = (int)options_width(o, loaded);
        int width = model_match_ffn(&matched, o->match_active), have = loaded->E ? loaded->FE : loaded->F;
        if (width != have)
            REFUSE(count, "--match-%s with --%s %" PRId64 " requires an %s width of %d; the loaded model has %d",
                   o->match_active ? "active" : "params", options_match_name(loaded), options_width(o, loaded),
                   options_match_kind(loaded), width, have);
    }
    const AttentionVariant *attention = &attention_variants[o->attention];
    if (options_given(o, "attention") && attention != loaded->attention)
        REFUSE(count, "--attention %s contradicts the loaded model, which has %s", attention->name,
               loaded->attention->name);
    if (options_given(o, "rope-theta") && o->rope_theta != loaded->rope_theta)
        REFUSE(count, "--rope-theta %.15g contradicts the loaded model, which has %.15g", o->rope_theta,
               loaded->rope_theta);
    if (options_given(o, "shared-experts") && o->shared_experts != loaded->shared)
        REFUSE(count, "--shared-experts %" PRId64 " contradicts the loaded model, which has %d", o->shared_experts,
               loaded->shared);
    if (options_given(o, "dense-layers") && o->dense_layers != loaded->dense_layers)
        REFUSE(count, "--dense-layers %" PRId64 " contradicts the loaded model, which has %d", o->dense_layers,
               loaded->dense_layers);
    if (options_given(o, "window") && o->window != loaded->window)
        REFUSE(count, "--window %" PRId64 " contradicts the loaded model, which has %d", o->window, loaded->window);
    if (options_given(o, "full-every") && o->full_every != loaded->full_every)
        REFUSE(count, "--full-every %" PRId64 " contradicts the loaded model, which has %d", o->full_every,
               loaded->full_every);
    if (options_given(o, "yoco") && o->yoco != loaded->yoco)
        REFUSE(count, "--%syoco contradicts the loaded model, which has %s", o->yoco ? "" : "no-",
               loaded->yoco ? "it" : "no YOCO");
    if (options_given(o, "qk-norm") && o->qk_norm != loaded->qk_norm)
        REFUSE(count, "--%sqk-norm contradicts the loaded model, which has %s", o->qk_norm ? "" : "no-",
               loaded->qk_norm ? "it" : "no norm of queries and keys");
    if (options_given(o, "router-bias") && o->router_bias != loaded->router_bias)
        REFUSE(count, "--%srouter-bias contradicts the loaded model, which has %s", o->router_bias ? "" : "no-",
               loaded->router_bias ? "it" : "none");
    bool tie_given = options_given(o, "tie-embeddings");
    bool tied = tie_given ? o->tie_embeddings : presets[o->preset].tied;
    if ((tie_given || o->given[preset]) && tied != loaded->tied)
        REFUSE(count, "%s contradicts the loaded model, whose embeddings are %stied",
               tie_given ? (tied ? "--tie-embeddings" : "--no-tie-embeddings") : "--preset",
               loaded->tied ? "" : "not ");
    return count;
}

// For --init and --resume: sets the architecture options to the loaded model's values, --seq-len only if it was neither
// given nor adopted. With --match-params, --ffn keeps the value that the loaded width was computed from; if that is
// unknown, the loaded width is used without matching. Exits with status 2 on contradictions.
static inline void options_adopt_model(Options *o, const ModelConfig *loaded) {
    if (options_contradictions(o, loaded)) program_exit(EXIT_USAGE);
    int width = option_row(options_match_name(loaded));
    if (options_match(o) && options_width_known(o, loaded)) {
        *option_int(o, option_rows[width].field) = options_width(o, loaded);
        o->has[width] = true;
    } else if (options_match(o)) {
        warn("--match-%s: using the loaded model's %s width %d, because no --%s or --preset specifies what to match",
             o->match_active ? "active" : "params", options_match_kind(loaded), loaded->E ? loaded->FE : loaded->F,
             option_rows[width].name);
        o->match_params = o->match_active = false;
    }
    for (int i = 0; i < MODEL_DIM_COUNT; i++) {
        int r = option_row(model_dims[i].option);
        if (model_dims[i].model == offsetof(ModelConfig, T) && o->has[r]) continue;
        if ((r == width && options_match(o)) || model_dim_unused(loaded, &model_dims[i])) continue;
        *option_int(o, model_dims[i].field) = *(const int *)((const char *)loaded + model_dims[i].model);
        o->has[r] = true;
    }
    o->attention = (int)(loaded->attention - attention_variants);
    o->rope_theta = loaded->rope_theta;
    o->rms_norm_eps = loaded->rms_norm_eps;
    o->shared_experts = loaded->shared;
    o->dense_layers = loaded->dense_layers;
    o->window = loaded->window;
    o->full_every = loaded->full_every;
    o->yoco = loaded->yoco;
    o->qk_norm = loaded->qk_norm;
    o->router_bias = loaded->router_bias;
    o->tie_embeddings = loaded->tied;
    o->has[option_row("tie-embeddings")] = true;
}
#endif
