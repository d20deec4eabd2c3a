/*
options_table.h: the command line's options, as data, and their values.

One row per option drives parsing, --help, the start-up print and the JSON of run.json and
trainer_state.json. A value is read from text by one function (option_set) wherever it comes from:
the command line, a default of the table, or a saved JSON. It is written by one (option_text), so
that two values are the same exactly when their texts are.

  given    on the command line
  has      has a value: a default, given, adopted from a checkpoint, or derived from other options
  refused  given with a value that is not accepted; checks that would need the value leave it out

To add an option: a field in Options and a row in option_rows.
*/
#ifndef LLMC_OPTIONS_TABLE_H
#define LLMC_OPTIONS_TABLE_H
#include "../base/common.h"
#include "../model/presets.h"
#include "schedule.h"
#include "../model/variants.h"

enum { OPTION_LIMIT = 96 };

typedef struct {
    int attention, preset; // indices into attention_variants and presets
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn;
    double rope_theta;
    bool tie_embeddings, match_params;
    int64_t seq_len, vocab;

    const char *train_data, *val_data, *separator, *tokenizer;
    bool doc_mask;
    int64_t batch_size, total_batch;

    int64_t steps;
    double lr, min_lr_ratio;
    int64_t warmup;
    int schedule; // a Schedule
    double weight_decay, beta1, beta2, eps, grad_clip;
    uint64_t seed;

    double skip_loss_z, skip_grad_z;

    const char *out;
    bool resume;
    const char *init;
    int64_t stop_after; // 0: not given
    double checkpoint_minutes;
    int64_t checkpoint_every, keep, val_every, val_steps, sample_every, stats_every, recompute, threads;
    int gemm, sdpa; // a GemmType, an SdpaChoice
    const char *tune_gemm;
    bool deterministic, sdpa_linear, memory_check, measure_peak, checkpoint_background;

    int64_t zero;
    double timeout, start_timeout;
    int64_t check_ranks_every, ranks; // ranks: of --dry-run; 0: not given
    double link_gbs;
    const char *rollback; // NULL: off

    const char *dump_grads;
    int64_t generate; // tokens; 0: not asked for
    const char *prompt, *prompt_tokens;
    double temperature;
    int64_t top_k;
    bool eval, dry_run;
    const char *eval_out, *dump_attention;
    const char *device, *dry_run_out; // of --dry-run

    double rms_norm_eps; // no option: 1e-5, or what a loaded model has

    bool given[OPTION_LIMIT], has[OPTION_LIMIT], refused[OPTION_LIMIT]; // by row of the table
} Options;

typedef enum {
    OPTION_ACTION, // a flag that prints something and ends the program
    OPTION_BOOL,   // bool; takes no value, and has a --no-NAME
    OPTION_INT,    // int64_t
    OPTION_U64,    // uint64_t
    OPTION_REAL,   // double, finite
    OPTION_TEXT,   // const char *, not empty, owned; NULL when it has no value
    OPTION_CHOICE  // int, an index into a list of names
} OptionKind;

typedef enum {
    OPTION_LOCAL, // of this start of the program, not of the run: neither adopted nor compared on --resume
    OPTION_SAVED, // on --resume the checkpoint's value is adopted unless one is given
    OPTION_FIXED  // likewise, and one that is given must be the checkpoint's
} OptionOnResume;

typedef struct {
    const char *section, *name;
    OptionKind kind;
    OptionOnResume on_resume;
    size_t field;
    const char *placeholder;      // of its argument
    const char *fallback;         // default; NULL: none; in parentheses: words, for one that other options decide
    const char *range;            // of a number: an interval as mathematics writes it
    const char *(*choice)(int i); // names of a choice; NULL beyond the last
    const char *help;
} OptionRow;

static inline const char *attention_choice(int i) {
    return i < ATTENTION_VARIANT_COUNT ? attention_variants[i].name : NULL;
}
static inline const char *preset_choice(int i) { return i < PRESET_COUNT ? presets[i].name : NULL; }
static inline const char *schedule_choice(int i) { return i < SCHEDULE_COUNT ? schedule_names[i] : NULL; }

typedef enum { GEMM_FP32, GEMM_BF16 } GemmType;
static inline const char *gemm_choice(int i) { return i == GEMM_FP32 ? "fp32" : i == GEMM_BF16 ? "bf16" : NULL; }

typedef enum { SDPA_AUTO, SDPA_CUDNN, SDPA_OWN } SdpaChoice;
static inline const char *sdpa_choice(int i) {
    return i == SDPA_AUTO ? "auto" : i == SDPA_CUDNN ? "cudnn" : i == SDPA_OWN ? "own" : NULL;
}

// clang-format off
#define FIELD(name) offsetof(Options, name)
static const OptionRow option_rows[] = {
    {"model", "attention", OPTION_CHOICE, OPTION_FIXED, FIELD(attention), "NAME", "diff_v2", NULL, attention_choice,
        "attention variant"},
    {"model", "preset", OPTION_CHOICE, OPTION_FIXED, FIELD(preset), "NAME", "tiny", NULL, preset_choice,
        "shape of the model, each number of which has a flag below; -1.5h and -2h have more heads, for baselines"},
    {"model", "layers", OPTION_INT, OPTION_FIXED, FIELD(layers), "L", "(the preset's)", "[1, 65536]", NULL, "layers"},
    {"model", "hidden", OPTION_INT, OPTION_FIXED, FIELD(hidden), "C", "(the preset's)", "[1, 16777216]", NULL,
        "hidden size"},
    {"model", "heads", OPTION_INT, OPTION_FIXED, FIELD(heads), "NH", "(the preset's)", "[1, 65536]", NULL,
        "attention heads that o_proj reads"},
    {"model", "kv-heads", OPTION_INT, OPTION_FIXED, FIELD(kv_heads), "NKV", "(the preset's)", "[1, 65536]", NULL,
        "key/value heads, a divisor of --heads"},
    {"model", "head-dim", OPTION_INT, OPTION_FIXED, FIELD(head_dim), "D", "(the preset's)", "[8, 256]", NULL,
        "head dimension, an even number"},
    {"model", "ffn", OPTION_INT, OPTION_FIXED, FIELD(ffn), "F", "(the preset's)", "[1, 16777216]", NULL, "MLP width"},
    {"model", "rope-theta", OPTION_REAL, OPTION_FIXED, FIELD(rope_theta), "X", "10000", "(0, inf)", NULL,
        "base of the rotary position embedding"},
    {"model", "tie-embeddings", OPTION_BOOL, OPTION_FIXED, FIELD(tie_embeddings), NULL, "(the preset's)", NULL, NULL,
        "the LM head is the embedding"},
    {"model", "match-params", OPTION_BOOL, OPTION_FIXED, FIELD(match_params), NULL, "no", NULL, NULL,
        "choose the MLP width that gives the model as many parameters as baseline has with --ffn"},
    {"model", "seq-len", OPTION_INT, OPTION_FIXED, FIELD(seq_len), "T", "(the preset's; with --init the model's)",
        "[1, 16777216]", NULL, "sequence length"},
    {"model", "vocab", OPTION_INT, OPTION_FIXED, FIELD(vocab), "V", "(the corpus directory's, or the preset's)", "[1, 268435456]", NULL,
        "vocabulary size"},

    {"data", "train-data", OPTION_TEXT, OPTION_SAVED, FIELD(train_data), "DATA", NULL, NULL, NULL,
        "what to train on: token shards (a quoted pattern), a corpus directory, or 'NAME=DATA:WEIGHT NAME=DATA:WEIGHT ...'"},
    {"data", "val-data", OPTION_TEXT, OPTION_SAVED, FIELD(val_data), "DATA", NULL, NULL, NULL,
        "what to validate on, likewise; of a corpus directory its val_*.bin"},
    {"data", "doc-mask", OPTION_BOOL, OPTION_SAVED, FIELD(doc_mask), NULL, "no", NULL, NULL,
        "attention stays within documents"},
    {"data", "separator", OPTION_TEXT, OPTION_SAVED, FIELD(separator), "ID[:after]", NULL, NULL, NULL,
        "token that begins a document, or ends it; also what generated text begins after; a corpus directory says it itself"},
    {"data", "tokenizer", OPTION_TEXT, OPTION_SAVED, FIELD(tokenizer), "FILE", "(the corpus's, or the checkpoint's)", NULL, NULL,
        "token table for prompts and samples: a tokenizer.bin, or a directory with one"},

    {"batch", "batch-size", OPTION_INT, OPTION_SAVED, FIELD(batch_size), "B", "8", "[1, 16777216]", NULL,
        "sequences per rank and micro-step"},
    {"batch", "total-batch", OPTION_INT, OPTION_SAVED, FIELD(total_batch), "TOKENS", "(B*T*ranks)", "[1, 1e15]", NULL,
        "tokens per update, a multiple of B*T*ranks"},

    {"update", "steps", OPTION_INT, OPTION_SAVED, FIELD(steps), "N", "100", "[1, 1e15]", NULL, "updates of the run"},
    {"update", "lr", OPTION_REAL, OPTION_SAVED, FIELD(lr), "X", "1e-3", "[0, inf)", NULL, "largest learning rate"},
    {"update", "min-lr-ratio", OPTION_REAL, OPTION_SAVED, FIELD(min_lr_ratio), "X", "0.1", "[0, 1]", NULL,
        "learning rate of the last step, as a share of --lr"},
    {"update", "warmup", OPTION_INT, OPTION_SAVED, FIELD(warmup), "N", "(min(100, steps/10))", "[0, 1e15]", NULL,
        "steps of linear warmup to --lr"},
    {"update", "schedule", OPTION_CHOICE, OPTION_SAVED, FIELD(schedule), "NAME", "cosine", NULL, schedule_choice,
        "decay after the warmup; wsd decays over the last 20% of the steps"},
    {"update", "weight-decay", OPTION_REAL, OPTION_SAVED, FIELD(weight_decay), "X", "0.1", "[0, inf)", NULL,
        "of matrices, decoupled (AdamW)"},
    {"update", "beta1", OPTION_REAL, OPTION_SAVED, FIELD(beta1), "X", "0.9", "[0, 1)", NULL, "of AdamW"},
    {"update", "beta2", OPTION_REAL, OPTION_SAVED, FIELD(beta2), "X", "0.95", "[0, 1)", NULL, "of AdamW"},
    {"update", "eps", OPTION_REAL, OPTION_SAVED, FIELD(eps), "X", "1e-8", "(0, inf)", NULL, "of AdamW"},
    {"update", "grad-clip", OPTION_REAL, OPTION_SAVED, FIELD(grad_clip), "X", "1.0", "[0, inf)", NULL,
        "largest gradient norm that is applied unscaled; 0: no limit"},
    {"update", "seed", OPTION_U64, OPTION_FIXED, FIELD(seed), "N", "1", NULL, NULL,
        "of initial weights, data order and samples"},

    {"stability", "skip-loss-z", OPTION_REAL, OPTION_SAVED, FIELD(skip_loss_z), "Z", "0", "[0, inf)", NULL,
        "leave out updates whose loss is Z deviations above the last 1000; 0: off. When 100 more were left out than applied, the new level is accepted"},
    {"stability", "skip-grad-z", OPTION_REAL, OPTION_SAVED, FIELD(skip_grad_z), "Z", "0", "[0, inf)", NULL,
        "likewise for the gradient norm before clipping"},
    {"stability", "rollback", OPTION_TEXT, OPTION_SAVED, FIELD(rollback), "K:M", NULL, NULL, NULL,
        "after K spikes or steps left out within M steps go back to the last good checkpoint and on with the data that follows"},

    {"run", "out", OPTION_TEXT, OPTION_LOCAL, FIELD(out), "DIR", NULL, NULL, NULL,
        "directory of the run; without it nothing is written"},
    {"run", "resume", OPTION_BOOL, OPTION_LOCAL, FIELD(resume), NULL, "no", NULL, NULL,
        "continue the run in --out from its last checkpoint"},
    {"run", "init", OPTION_TEXT, OPTION_LOCAL, FIELD(init), "DIR", NULL, NULL, NULL,
        "start from the architecture and weights of a checkpoint directory"},
    {"run", "stop-after", OPTION_INT, OPTION_LOCAL, FIELD(stop_after), "N", NULL, "[1, 1e15]", NULL,
        "end after step N with a checkpoint; the schedule stays that of --steps"},
    {"run", "checkpoint-every", OPTION_INT, OPTION_SAVED, FIELD(checkpoint_every), "N", "0", "[0, 1e15]", NULL,
        "save a checkpoint every N steps, besides the last; 0: off"},
    {"run", "checkpoint-minutes", OPTION_REAL, OPTION_SAVED, FIELD(checkpoint_minutes), "X", "30", "[0, inf)", NULL,
        "also save a checkpoint when the last one is X minutes old; 0: off"},
    {"run", "checkpoint-background", OPTION_BOOL, OPTION_LOCAL, FIELD(checkpoint_background), NULL, "yes", NULL, NULL,
        "write checkpoints while training goes on, from a copy of the state in host memory, where there is room for it"},
    {"run", "keep", OPTION_INT, OPTION_SAVED, FIELD(keep), "N", "3", "[0, 1e15]", NULL,
        "number of checkpoints to keep, the newest complete ones; 0: all"},
    {"run", "val-every", OPTION_INT, OPTION_SAVED, FIELD(val_every), "N", "0", "[0, 1e15]", NULL,
        "validate every N steps; 0: only at the start and the end"},
    {"run", "val-steps", OPTION_INT, OPTION_SAVED, FIELD(val_steps), "N", "20", "[1, 1e15]", NULL,
        "batches of a validation"},
    {"run", "sample-every", OPTION_INT, OPTION_SAVED, FIELD(sample_every), "N", "0", "[0, 1e15]", NULL,
        "print generated text every N steps; 0: never"},
    {"run", "stats-every", OPTION_INT, OPTION_SAVED, FIELD(stats_every), "N", "0", "[0, 1e15]", NULL,
        "statistics of each layer in log.jsonl every N steps; 0: never"},
    {"run", "recompute", OPTION_INT, OPTION_SAVED, FIELD(recompute), "LEVEL", "0", "[0, 2]", NULL,
        "what the backward computes again instead of keeping it: 0 nothing, 1 norms and MLP activations, 2 whole blocks"},
    {"run", "threads", OPTION_INT, OPTION_LOCAL, FIELD(threads), "N", "(the cores)", "[1, 4096]", NULL,
        "CPU threads, at most the cores that the process may use"},
    {"run", "memory-check", OPTION_BOOL, OPTION_LOCAL, FIELD(memory_check), NULL, "yes", NULL, NULL,
        "refuse to start when this machine, or the GPU, has too little memory available for the run"},
    {"run", "measure-peak", OPTION_BOOL, OPTION_LOCAL, FIELD(measure_peak), NULL, "no", NULL, NULL,
        "compare a step's speed with a matrix product measured at the start, also on a GPU whose peak is listed"},
    {"run", "gemm", OPTION_CHOICE, OPTION_SAVED, FIELD(gemm), "TYPE", "fp32", NULL, gemm_choice,
        "matrix products: bf16 rounds what is multiplied; sums and weights stay fp32"},
    {"run", "tune-gemm", OPTION_TEXT, OPTION_SAVED, FIELD(tune_gemm), "FILE", NULL, NULL, NULL,
        "on a GPU: the fastest algorithm for each matrix product, as FILE says; where there is no FILE, it is measured and written"},
    {"run", "sdpa", OPTION_CHOICE, OPTION_SAVED, FIELD(sdpa), "KERNEL", "auto", NULL, sdpa_choice,
        "attention on a GPU; auto takes cuDNN where it can"},
    {"run", "deterministic", OPTION_BOOL, OPTION_SAVED, FIELD(deterministic), NULL, "yes", NULL, NULL,
        "the same bits in every run; without it cuDNN's attention backward may be faster, and needs less memory"},
    {"run", "sdpa-linear", OPTION_BOOL, OPTION_SAVED, FIELD(sdpa_linear), NULL, "no", NULL, NULL,
        "cuDNN's deterministic backward with memory linear in --seq-len, which is slower (Hopper, cuDNN 9.25)"},

    {"ranks (mpirun, srun)", "zero", OPTION_INT, OPTION_SAVED, FIELD(zero), "LEVEL", "0", "[0, 2]", NULL,
        "state that ranks share out instead of repeating it: 1 moments and master weights, 2 gradients too"},
    {"ranks (mpirun, srun)", "timeout", OPTION_REAL, OPTION_SAVED, FIELD(timeout), "SECONDS", "600", "(0, 1e9)", NULL,
        "end when a rank is silent, or waited for, this long"},
    {"ranks (mpirun, srun)", "start-timeout", OPTION_REAL, OPTION_LOCAL, FIELD(start_timeout), "SECONDS", "60", "(0, 1e9)", NULL,
        "abort when not all ranks have connected to rank 0 within this time"},
    {"ranks (mpirun, srun)", "check-ranks-every", OPTION_INT, OPTION_SAVED, FIELD(check_ranks_every), "N", "0", "[0, 1e15]", NULL,
        "every N steps and before a checkpoint compare what all ranks hold, bit for bit; 0: never"},

    {"instead of training", "dump-grads", OPTION_TEXT, OPTION_LOCAL, FIELD(dump_grads), "FILE", NULL, NULL, NULL,
        "one forward and backward; write the loss and all gradients as safetensors"},
    {"instead of training", "generate", OPTION_INT, OPTION_LOCAL, FIELD(generate), "N", NULL, "[1, 1e9]", NULL,
        "generate N tokens"},
    {"instead of training", "prompt", OPTION_TEXT, OPTION_SAVED, FIELD(prompt), "TEXT", NULL, NULL, NULL,
        "what generated text continues; the separator, where one is known, is put before it"},
    {"instead of training", "prompt-tokens", OPTION_TEXT, OPTION_SAVED, FIELD(prompt_tokens), "ID,ID,...", NULL, NULL, NULL,
        "the tokens to continue, exactly: nothing is put before them"},
    {"instead of training", "temperature", OPTION_REAL, OPTION_SAVED, FIELD(temperature), "X", "0.8", "[0, inf)", NULL,
        "of sampling; 0: always the likeliest token"},
    {"instead of training", "top-k", OPTION_INT, OPTION_SAVED, FIELD(top_k), "K", "0", "[0, 268435456]", NULL,
        "sample from the K likeliest tokens; 0: from all"},
    {"instead of training", "eval", OPTION_BOOL, OPTION_LOCAL, FIELD(eval), NULL, "no", NULL, NULL,
        "print the validation loss, the loss by position, associative recall, what attention does"},
    {"instead of training", "eval-out", OPTION_TEXT, OPTION_LOCAL, FIELD(eval_out), "FILE", NULL, NULL, NULL,
        "of --eval: the same as JSON"},
    {"instead of training", "dump-attention", OPTION_TEXT, OPTION_LOCAL, FIELD(dump_attention), "FILE", NULL, NULL, NULL,
        "of --eval: every head's attention maps of the first 64 tokens, as safetensors"},
    {"instead of training", "dry-run", OPTION_BOOL, OPTION_LOCAL, FIELD(dry_run), NULL, "no", NULL, NULL,
        "print parameters, memory and FLOPs"},
    {"instead of training", "ranks", OPTION_INT, OPTION_LOCAL, FIELD(ranks), "W", NULL, "[1, 65536]", NULL,
        "of --dry-run: for one of W ranks"},
    {"instead of training", "device", OPTION_TEXT, OPTION_LOCAL, FIELD(device), "NAME", NULL, NULL, NULL,
        "of --dry-run: predict memory, speed and hours of the bf16 program on this GPU, such as H200, A100 or 'RTX 5090'"},
    {"instead of training", "dry-run-out", OPTION_TEXT, OPTION_LOCAL, FIELD(dry_run_out), "FILE", NULL, NULL, NULL,
        "of --device: the prediction as JSON"},
    {"instead of training", "link-gbs", OPTION_REAL, OPTION_LOCAL, FIELD(link_gbs), "X", NULL, "(0, inf)", NULL,
        "of --dry-run: GB/s that a rank sends and receives, for the time of communication"},
    {"instead of training", "help", OPTION_ACTION, OPTION_LOCAL, 0, NULL, NULL, NULL, NULL, "print this text"},
    {"instead of training", "version", OPTION_ACTION, OPTION_LOCAL, 0, NULL, NULL, NULL, NULL,
        "print the source revision"},
};
#undef FIELD
// clang-format on
enum { OPTION_ROW_COUNT = sizeof(option_rows) / sizeof(option_rows[0]) };

// The row of an option, or -1. `name` need not end after its `length` characters.
static inline int option_find(const char *name, size_t length) {
    for (int r = 0; r < OPTION_ROW_COUNT; r++)
        if (strlen(option_rows[r].name) == length && memcmp(option_rows[r].name, name, length) == 0) return r;
    return -1;
}
// The row of an option that is known to exist.
static inline int option_row(const char *name) {
    int r = option_find(name, strlen(name));
    assert(r >= 0);
    return r;
}
static inline bool options_given(const Options *o, const char *name) { return o->given[option_row(name)]; }

typedef char OptionText[512]; // a value or a description, in one line

// A user's text for a message: one line, and not all of a long one.
static inline const char *option_shown(OptionText out, const char *text) {
    size_t n = 0;
    for (; text[n] && n < 100; n++) out[n] = iscntrl((unsigned char)text[n]) ? '?' : text[n];
    snprintf(out + n, sizeof(OptionText) - n, "%s", text[n] ? "..." : "");
    return out;
}

// What an option accepts, for messages and help.
static inline const char *option_accepts(OptionText out, const OptionRow *row) {
    size_t n = 0;
    switch (row->kind) {
    case OPTION_INT: snprintf(out, sizeof(OptionText), "a whole number in %s", row->range); break;
    case OPTION_U64: snprintf(out, sizeof(OptionText), "a whole number in [0, %" PRIu64 "]", UINT64_MAX); break;
    case OPTION_REAL: snprintf(out, sizeof(OptionText), "a number in %s", row->range); break;
    case OPTION_CHOICE:
        for (int i = 0; row->choice(i) && n < sizeof(OptionText); i++)
            n += (size_t)snprintf(out + n, sizeof(OptionText) - n, "%s%s", i ? ", " : "one of ", row->choice(i));
        break;
    default: snprintf(out, sizeof(OptionText), "%s", row->placeholder ? "a text that is not empty" : "no value");
    }
    return out;
}

static inline bool option_in_range(const char *range, double x) {
    char open, close;
    double low, high;
    int fields = sscanf(range, "%c%lf, %lf%c", &open, &low, &high, &close);
    assert(fields == 4);
    return (open == '[' ? x >= low : x > low) && (close == ']' ? x <= high : x < high);
}

// A whole number: digits alone, or with a power of ten (1e6, 2.5e6) up to 2^53, below which a double is exact.
static inline bool option_whole_number(const char *text, int64_t *value) {
    char *end = NULL;
    bool digits = *text && strspn(text, "0123456789") == strlen(text);
    errno = 0;
    if (digits) {
        long long x = strtoll(text, &end, 10);
        if (errno) return false;
        *value = x;
        return true;
    }
    if (!isdigit((unsigned char)*text) || strspn(text, "0123456789.eE+") != strlen(text) || !strpbrk(text, "eE"))
        return false;
    double x = strtod(text, &end);
    if (errno || *end || x != floor(x) || x > 9007199254740992.0) return false;
    *value = (int64_t)x;
    return true;
}

// Reads a value; false leaves it as it was. Numbers are decimal, all of the text.
static inline bool option_set(Options *o, int r, const char *text) {
    const OptionRow *row = &option_rows[r];
    char *field = (char *)o + row->field, *end = NULL;
    bool digits = *text && strspn(text, "0123456789") == strlen(text);
    errno = 0;
    switch (row->kind) {
    case OPTION_ACTION: return false; // has no value
    case OPTION_BOOL:
        if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0) return false;
        *(bool *)field = text[0] == 'y';
        break;
    case OPTION_INT: {
        int64_t x;
        if (!option_whole_number(text, &x) || !option_in_range(row->range, (double)x)) return false;
        *(int64_t *)field = x;
        break;
    }
    case OPTION_U64: {
        unsigned long long x = digits ? strtoull(text, &end, 10) : 0;
        if (!digits || errno) return false;
        *(uint64_t *)field = x;
        break;
    }
    case OPTION_REAL: { // strtod alone would take spaces, hexadecimal, inf and nan
        if (!*text || strspn(text, "0123456789.eE+-") != strlen(text)) return false;
        double x = strtod(text, &end) + 0.0; // -0 becomes 0
        if (errno || *end || !isfinite(x) || !option_in_range(row->range, x)) return false;
        *(double *)field = x;
        break;
    }
    case OPTION_TEXT: {
        if (!*text) return false;
        char *copy = strdup(text);
        CHECK(copy != NULL, "out of memory: a copy of --%s wanted", row->name);
        free(*(char **)field);
        *(char **)field = copy;
        break;
    }
    case OPTION_CHOICE: {
        int i = 0;
        while (row->choice(i) && strcmp(row->choice(i), text) != 0) i++;
        if (!row->choice(i)) return false;
        *(int *)field = i;
        break;
    }
    }
    o->has[r] = true;
    return true;
}

// Writes a value as option_set reads it, reals with the fewest digits that do; NULL when there is none. A text
// is returned as it is, whatever its length.
static inline const char *option_text(OptionText out, const Options *o, int r) {
    const OptionRow *row = &option_rows[r];
    const char *field = (const char *)o + row->field;
    if (!o->has[r]) return NULL;
    switch (row->kind) {
    case OPTION_INT: snprintf(out, sizeof(OptionText), "%" PRId64, *(const int64_t *)field); break;
    case OPTION_U64: snprintf(out, sizeof(OptionText), "%" PRIu64, *(const uint64_t *)field); break;
    case OPTION_TEXT: return *(const char *const *)field;
    case OPTION_CHOICE: return row->choice(*(const int *)field);
    case OPTION_REAL:
        for (int digits = 6; digits <= 17; digits++) {
            snprintf(out, sizeof(OptionText), "%.*g", digits, *(const double *)field);
            if (strtod(out, NULL) == *(const double *)field) break;
        }
        break;
    default: return *(const bool *)field ? "yes" : "no";
    }
    return out;
}

static inline void options_defaults(Options *o) {
    memset(o, 0, sizeof(*o));
    o->rms_norm_eps = 1e-5;
    assert((int)OPTION_ROW_COUNT <= (int)OPTION_LIMIT);
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        const char *fallback = option_rows[r].fallback;
        if (!fallback || fallback[0] == '(') continue;
        bool accepted = option_set(o, r, fallback);
        assert(accepted);
        (void)accepted;
    }
}

static inline void options_free(Options *o) {
    for (int r = 0; r < OPTION_ROW_COUNT; r++)
        if (option_rows[r].kind == OPTION_TEXT) free(*(char **)((char *)o + option_rows[r].field));
    memset(o, 0, sizeof(*o));
}
#endif
