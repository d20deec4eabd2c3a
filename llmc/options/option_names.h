/*
option_names.h: what an unknown option most likely means: a misspelt name, the name of another program, or an option of
an earlier version.
*/
#pragma once
#include "../model/removed.h"
#include "options_table.h"

enum { NAME_LIMIT = 64 };

// Lower case, without - and _.
static inline int name_fold(char out[NAME_LIMIT + 1], const char *name, size_t length) {
    int n = 0;
    for (size_t i = 0; i < length && n < NAME_LIMIT; i++)
        if (name[i] != '-' && name[i] != '_') out[n++] = (char)tolower((unsigned char)name[i]);
    out[n] = 0;
    return n;
}

// Letters to insert, delete or replace to turn a into b.
static inline int edit_distance(const char *a, int a_length, const char *b, int b_length) {
    int row[NAME_LIMIT + 1];
    for (int j = 0; j <= b_length; j++) row[j] = j;
    for (int i = 1; i <= a_length; i++) {
        int diagonal = row[0]; // distance of the prefixes i-1 and j-1
        row[0] = i;
        for (int j = 1; j <= b_length; j++) {
            int replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min_int(replaced, 1 + min_int(row[j], row[j - 1]));
        }
    }
    return row[b_length];
}

// The candidate closest to a name: few letters differ, or the name is a prefix of it. NULL: none.
static inline const char *name_nearest(const char *name, size_t length, const char *(*candidate)(int i)) {
    char folded[NAME_LIMIT + 1], other[NAME_LIMIT + 1];
    const char *nearest = NULL;
    int n = name_fold(folded, name, length), best = max_int(1, n / 3) + 1;
    if (n < 2 || length > NAME_LIMIT) return NULL;
    for (int i = 0; candidate(i); i++) {
        int m = name_fold(other, candidate(i), strlen(candidate(i)));
        int distance = strncmp(other, folded, (size_t)n) == 0 ? m > n : edit_distance(folded, n, other, m);
        if (distance < best) nearest = candidate(i), best = distance;
    }
    return nearest;
}

static inline const char *option_name(int r) {
    return r >= OPTION_ROW_COUNT ? NULL : option_exists(&option_rows[r]) ? option_rows[r].name : "";
}

// ---- names in nanoGPT, llm.c, Transformers and other programs

typedef struct {
    const char *names;  // separated by spaces
    const char *option; // the option that it is here; NULL: none
    const char *note;   // what differs from that option; without one, what to do
} ForeignName;
static const ForeignName foreign_names[] = {
    {"n-layer n-layers num-layers num-hidden-layers depth", "layers", ""},
    {"n-embd d-model hidden-size embed-dim dim", "hidden", ""},
    {"n-head n-heads num-heads num-attention-heads", "heads", ""},
    {"n-kv-head n-kv-heads num-kv-heads num-key-value-heads", "kv-heads", ""},
    {"d-ff intermediate-size ffn-hidden-size mlp", "ffn", ""},
    {"block-size context-length max-seq-len max-seq-length max-length", "seq-len", ""},
    {"vocab-size", "vocab", ""},
    {"model arch", "preset", "; --init DIR starts from a checkpoint"},
    {"init-from model-name-or-path checkpoint load resume-from-checkpoint", "init",
     "; --out DIR --resume continues a run"},
    {"dataset dataset-name data data-dir data-path train-file", "train-data", "; --val-data is for validation"},
    {"bs micro-batch-size device-batch-size per-device-train-batch-size", "batch-size", ": a number of sequences"},
    {"gradient-accumulation-steps grad-accum-steps global-batch-size", "total-batch", ": tokens per update"},
    {"max-iters max-steps iterations num-iterations train-steps", "steps", ""},
    {"epochs num-epochs num-train-epochs", NULL, "--steps N counts updates; the start prints how many epochs they are"},
    {"learning-rate max-lr", "lr", ""},
    {"min-lr", "min-lr-ratio", ": a fraction of --lr"},
    {"warmup-iters warmup-steps num-warmup-steps warmup-ratio", "warmup", ": a number of steps"},
    {"lr-decay-iters lr-decay-steps", NULL, "the learning rate decays until the last of --steps"},
    {"lr-scheduler lr-scheduler-type", "schedule", ""},
    {"wd", "weight-decay", ""},
    {"clip-grad max-grad-norm gradient-clipping", "grad-clip", ""},
    {"eval-interval eval-every eval-steps val-interval", "val-every", ""},
    {"eval-iters eval-batches", "val-steps", ""},
    {"eval-only do-eval", "eval", ""},
    {"save-every save-interval save-steps", "checkpoint-every", ""},
    {"out-dir output-dir save-dir", "out", ""},
    {"log-interval logging-steps log-every", NULL, "every step is printed, and is a line of log.jsonl in --out DIR"},
    {"dtype precision mixed-precision bf16 fp16", "matmul-dtype", ": fp32, bf16 or fp8"},
    {"gradient-checkpointing activation-checkpointing", "recompute", ": 0, 1 or 2"},
    {"compile torch-compile", NULL, "leave it out; the program is compiled"},
    {"flash-attn flash-attention attn-implementation", "attention-kernel", ""},
    {"device gpu cuda", NULL, "train_diffv2cu trains on a GPU, predict_diffv2 --device NAME predicts a run on one"},
    {"gpus num-gpus world-size nproc-per-node", NULL, "mpirun -np N or srun starts N ranks, each with a GPU"},
    {"fsdp deepspeed zero-stage", "zero", ""},
    {"config config-file", NULL, "options are on the command line; scripts/recipe.sh NAME adds those of its recipe"},
    {"wandb wandb-log wandb-project report-to tensorboard", NULL,
     "scripts/export/export_run.py RUN --wandb PROJECT or --tensorboard DIR exports a run, with --follow as it trains"},
    {"max-new-tokens", "generate", ""},
};
enum { FOREIGN_NAME_COUNT = sizeof(foreign_names) / sizeof(foreign_names[0]) };

// The row of a name of another program, whose option this program has; NULL: none.
static inline const ForeignName *foreign_name(const char *name, size_t length) {
    char folded[NAME_LIMIT + 1], other[NAME_LIMIT + 1];
    name_fold(folded, name, length);
    for (const ForeignName *row = foreign_names; row < foreign_names + FOREIGN_NAME_COUNT; row++) {
        if (row->option && !option_exists(&option_rows[option_row(row->option)])) continue;
        for (const char *at = row->names; *at; at += strspn(at, " ")) {
            size_t n = strcspn(at, " ");
            name_fold(other, at, n);
            if (strcmp(folded, other) == 0) return row;
            at += n;
        }
    }
    return NULL;
}

// The message about an argument that is not an option. what: its beginning, unless the option is known elsewhere.
static inline const char *option_unknown_text(OptionText out, const char *what, const char *argument) {
    OptionText shown;
    const char *name = argument + strspn(argument, "-");
    bool no = strncmp(name, "no-", 3) == 0, letter = name == argument + 1 && name[0] && !name[1];
    if (no) name += 3;
    size_t length = strcspn(name, "=");
    const Removed *gone = removed_option(name, length);
    const ForeignName *foreign = foreign_name(name, length);
    const char *nearest = name_nearest(name, length, option_name);
    if (nearest && option_rows[option_row(nearest)].kind != OPTION_BOOL) no = false;
    option_shown(shown, argument);
    shown[strcspn(shown, "=")] = 0;
    if (foreign && foreign->option)
        snprintf(out, sizeof(OptionText), "%.110s is --%s here%s", shown, foreign->option, foreign->note);
    else if (foreign) snprintf(out, sizeof(OptionText), "%.110s: %s", shown, foreign->note);
    else if (gone)
        snprintf(out, sizeof(OptionText), "--%s was removed: %s; the last revision with it is %s", gone->name,
                 gone->instead, gone->revision);
    else
        snprintf(out, sizeof(OptionText), "%s %.110s: %s%s%s%s--help all lists all", what, shown,
                 nearest  ? "did you mean --"
                 : letter ? "options have names, such as --batch-size; "
                          : "",
                 nearest && no ? "no-" : "", nearest ? nearest : "", nearest ? "? " : "");
    return out;
}
