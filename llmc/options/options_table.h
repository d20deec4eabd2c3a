/*
options_table.h: the table of the command line's options, and their values.

One row per option of train_diffv2 or predict_diffv2 defines parsing, --help, the options printed at the start, and the
JSON of run.json and trainer_state.json. option_set reads every value from text, whether it comes from the command line,
a default of the table or a saved JSON. option_text writes every value, so that two values are equal exactly when their
texts are.

  given    specified on the command line
  has      has a value: a default, given, adopted from a checkpoint, or derived from other options
  refused  given with an invalid value; checks that need the value are omitted

To add an option, add a field to Options and a row to option_rows.
*/
#pragma once
#include "../model/sharding.h"
#include "../base/common.h"
#include "../model/presets.h"
#include "../ops/ops.h"
#include "schedule.h"

enum { OPTION_LIMIT = 128 };

// Reports a usage error on one line. The program reports all errors, then exits with status 2.
#define REFUSE(count, ...) (warn(__VA_ARGS__), (count)++)

typedef struct {
    ModelConfig model; // first: the offset of a field is the same in both. With --match-params its width is
                       // the baseline's width; options_config returns the model's
    int preset;        // an index into presets
    bool match_params;

    const char *train_data, *val_data, *separator, *tokenizer;
    bool doc_mask;
    int64_t batch_size, total_batch;

    int64_t steps;
    double minutes; // 0: not given
    double lr, min_lr_ratio;
    int64_t warmup;
    int schedule;        // a Schedule
    int64_t decay_steps; // 0: not given
    int optimizer;       // an Optimizer
    double weight_decay, beta1, beta2, eps, grad_clip, z_loss, router_aux, router_z, router_bias_rate;
    uint64_t seed;

    double skip_loss_z, skip_grad_z;
    const char *change; // NULL: off

    const char *out;
    bool resume;
    const char *init;
    int64_t stop_after; // 0: not given
    double checkpoint_minutes;
    int64_t checkpoint_every, keep, val_every, val_steps, sample_every, stats_every, recompute, threads;
    int matmul_dtype, attention_kernel; // a GemmType, an SdpaChoice
    bool deterministic, memory_check;

    int64_t zero, zero_group;
    double timeout, start_timeout;
    const char *rendezvous;
    int64_t check_ranks_every, ranks; // ranks: for --dry-run and predict_diffv2; 0: not given
    double link_gbs;                  // only predict_diffv2; 0: not given
    const char *rollback;             // NULL: off

    const char *dump_grads, *eval_choices;
    int64_t generate; // tokens; 0: not given
    const char *prompt, *prompt_tokens, *prompts;
    bool interactive;
    double temperature;
    int64_t top_k;
    bool eval, dry_run;
    const char *help_word; // WORD of --help WORD, not owned; NULL: not given
    const char *eval_out;
    const char *device, *prediction_out; // only predict_diffv2

    bool given[OPTION_LIMIT], has[OPTION_LIMIT], refused[OPTION_LIMIT]; // by row of the table
    char *errors; // errors of the command line, each ends with a newline; options_check reports them
    bool unknown; // an unknown option is among them
} Options;

typedef enum {
    OPTION_ACTION, // a flag that prints something and exits
    OPTION_BOOL,   // bool; takes no value, and also accepts --no-NAME
    OPTION_INT,    // int64_t
    OPTION_TOKENS, // int64_t; a number may end in K or M, 1024 and 1024^2
    OPTION_DIM,    // int
    OPTION_U64,    // uint64_t
    OPTION_REAL,   // double, finite
    OPTION_TEXT,   // const char *, not empty, owned; NULL without a value
    OPTION_CHOICE, // int, an index into a list of names
    OPTION_VARIANT // const AttentionVariant *
} OptionKind;

typedef enum {
    OPTION_LOCAL, // belongs to one start of the program: neither adopted nor compared on --resume
    OPTION_SAVED, // --resume adopts the checkpoint's value unless one is given
    OPTION_FIXED  // as OPTION_SAVED, and a given value must equal the checkpoint's
} OptionOnResume;

typedef enum {
    OF_BOTH,       // train_diffv2 and predict_diffv2
    OF_TRAINING,   // both accept it; the help of predict_diffv2 omits it, since it does not change a prediction
    OF_TRAINER,    // unknown to predict_diffv2
    OF_PREDICTION, // unknown to train_diffv2
} OptionPrograms;

typedef struct {
    OptionPrograms programs;
    const char *section, *name;
    OptionKind kind;
    OptionOnResume on_resume;
    size_t field;
    const char *placeholder;      // name of the argument in --help
    const char *fallback;         // default; NULL: none; in parentheses: description of a derived default
    const char *range;            // interval of a number, in mathematical notation
    const char *(*choice)(int i); // names of an OPTION_CHOICE; NULL after the last
    const char *help; // EVERYDAY "TEXT": --help prints it, up to the first semicolon, in one line of 80 columns
} OptionRow;
#define EVERYDAY "*"

static inline const char *attention_choice(int i) {
    return i < ATTENTION_VARIANT_COUNT ? attention_variants[i].name : NULL;
}
static inline const char *preset_choice(int i) { return i < PRESET_COUNT ? presets[i].name : NULL; }
static inline const char *parametrization_choice(int i) {
    return i < PARAMETRIZATION_COUNT ? parametrization_names[i] : NULL;
}
static inline const char *schedule_choice(int i) { return i < SCHEDULE_COUNT ? schedule_names[i] : NULL; }

// --rollback K:M
enum { ROLLBACK_LIMIT = 1000 }; // the largest M
static inline bool rollback_parse(const char *text, int64_t *count, int64_t *steps) {
    char end;
    bool digits = strspn(text, "0123456789:") == strlen(text) && isdigit((unsigned char)text[0]) && strlen(text) < 20;
    return digits && sscanf(text, "%" SCNd64 ":%" SCNd64 "%c", count, steps, &end) == 2 && *count >= 1 &&
           *count <= *steps && *steps <= ROLLBACK_LIMIT;
}

static inline const char *gemm_choice(int i) {
    return i == GEMM_FP32 ? "fp32" : i == GEMM_BF16 ? "bf16" : i == GEMM_FP8 ? "fp8" : NULL;
}

typedef enum { SDPA_AUTO, SDPA_CUDNN, SDPA_BUILTIN } SdpaChoice;
static inline const char *sdpa_choice(int i) {
    return i == SDPA_AUTO ? "auto" : i == SDPA_CUDNN ? "cudnn" : i == SDPA_BUILTIN ? "own" : NULL;
}

static inline const char *optimizer_choice(int i) {
    return i == OPTIMIZER_ADAMW ? "adamw" : i == OPTIMIZER_MUON ? "muon" : i == OPTIMIZER_NORMUON ? "normuon" : NULL;
}

// The place of a rank in a run of `ranks` ranks. Modes without updates may have another number of ranks than the run.
static inline RunRanks options_run_ranks(const Options *o, int rank, int ranks) {
    int group = o->zero_group && ranks % o->zero_group == 0 ? (int)o->zero_group : ranks;
    return (RunRanks){rank, ranks, group, (int)o->zero, (Optimizer)o->optimizer};
}

// clang-format off
#define FIELD(name) offsetof(Options, name)
static const OptionRow option_rows[] = {
    {OF_BOTH, "model", "attention", OPTION_VARIANT, OPTION_FIXED, FIELD(model.attention), "NAME", "diff_v2", NULL,
        attention_choice, EVERYDAY "attention variant"},
    {OF_BOTH, "model", "preset", OPTION_CHOICE, OPTION_FIXED, FIELD(preset), "NAME", "tiny", NULL, preset_choice,
        EVERYDAY "model shape; options below override it; NAME-1.5h and NAME-2h have 1.5 and 2 times as many heads"},
    {OF_BOTH, "model", "layers", OPTION_DIM, OPTION_FIXED, FIELD(model.L), "L", "(from the preset)", "[1, 65536]", NULL,
        EVERYDAY "number of layers"},
    {OF_BOTH, "model", "hidden", OPTION_DIM, OPTION_FIXED, FIELD(model.C), "C", "(from the preset)", "[1, 16777216]",
        NULL, EVERYDAY "hidden size"},
    {OF_BOTH, "model", "heads", OPTION_DIM, OPTION_FIXED, FIELD(model.NH), "NH", "(from the preset)", "[1, 65536]",
        NULL, EVERYDAY "number of attention heads whose output o_proj reads"},
    {OF_BOTH, "model", "kv-heads", OPTION_DIM, OPTION_FIXED, FIELD(model.NKV), "NKV", "(from the preset)", "[1, 65536]",
        NULL, "number of key/value heads, a divisor of --heads"},
    {OF_BOTH, "model", "head-dim", OPTION_DIM, OPTION_FIXED, FIELD(model.D), "D", "(from the preset)", "[8, 256]", NULL,
        "head dimension, an even number from 8 to 256"},
    {OF_BOTH, "model", "ffn", OPTION_DIM, OPTION_FIXED, FIELD(model.F), "F", "(from the preset)", "[1, 16777216]", NULL,
        "MLP width"},
    {OF_BOTH, "model", "experts", OPTION_DIM, OPTION_FIXED, FIELD(model.E), "E", "(from the preset)", "[0, 1024]", NULL,
        "mixture of experts: number of experts in each layer; 0: none"},
    {OF_BOTH, "model", "experts-active", OPTION_DIM, OPTION_FIXED, FIELD(model.K), "K", "(from the preset)", "[0, 64]",
        NULL, "number of experts that the router selects for a token"},
    {OF_BOTH, "model", "expert-ffn", OPTION_DIM, OPTION_FIXED, FIELD(model.FE), "F", "(from the preset)",
        "[0, 16777216]", NULL, "MLP width of an expert"},
    {OF_BOTH, "model", "shared-experts", OPTION_DIM, OPTION_FIXED, FIELD(model.shared), "S", "0", "[0, 1024]", NULL,
        "number of additional experts that every token passes"},
    {OF_BOTH, "model", "dense-layers", OPTION_DIM, OPTION_FIXED, FIELD(model.dense_layers), "N", "0", "[0, 65536]",
        NULL, "with --experts: the first N layers have no experts, but an MLP of width --ffn"},
    {OF_BOTH, "model", "router-bias", OPTION_BOOL, OPTION_FIXED, FIELD(model.router_bias), NULL, "no", NULL, NULL,
        "with --experts: balance the experts by a bias that a router adds to their probabilities for the selection"},
    {OF_TRAINING, "model", "rope-theta", OPTION_REAL, OPTION_SAVED, FIELD(model.rope_theta), "X", "10000", "(0, inf)",
        NULL, "base of the rotary position embedding"},
    {OF_BOTH, "model", "tie-embeddings", OPTION_BOOL, OPTION_FIXED, FIELD(model.tied), NULL, "(from the preset)", NULL,
        NULL, "share the weights of the embedding and the LM head"},
    {OF_BOTH, "model", "match-params", OPTION_BOOL, OPTION_FIXED, FIELD(match_params), NULL, "no", NULL, NULL,
        "choose the MLP width so that the model has as many parameters as the baseline of width --ffn; with --experts "
        "choose the width of the experts, compared with the baseline of width --expert-ffn"},
    {OF_BOTH, "model", "seq-len", OPTION_DIM, OPTION_SAVED, FIELD(model.T), "T",
        "(from the preset; with --init from the model)", "[1, 16777216]", NULL, EVERYDAY "sequence length"},
    {OF_BOTH, "model", "vocab", OPTION_DIM, OPTION_FIXED, FIELD(model.V), "V",
        "(from the corpus directory, or the preset)", "[1, 268435456]", NULL, "vocabulary size"},
    {OF_BOTH, "model", "window", OPTION_DIM, OPTION_FIXED, FIELD(model.window), "W", "0", "[0, 16777216]", NULL,
        "attention to the last W positions only; 0: to all positions"},
    {OF_BOTH, "model", "full-every", OPTION_DIM, OPTION_FIXED, FIELD(model.full_every), "K", "0", "[0, 65536]", NULL,
        "with --window or --sparse-blocks: every K-th layer attends to all positions; 0: no layer does"},
    {OF_BOTH, "model", "yoco", OPTION_BOOL, OPTION_FIXED, FIELD(model.yoco), NULL, "no", NULL, NULL,
        "the upper half of the layers attends to keys and values that are computed once, from the output of the lower "
        "half, whose layers have the --window"},
    {OF_BOTH, "model", "sparse-blocks", OPTION_DIM, OPTION_FIXED, FIELD(model.sparse_blocks), "K", "0", "[0, 64]", NULL,
        "block-sparse attention: to a position's own block, the first block, and the K blocks with the largest "
        "scores; 0: to all positions"},
    {OF_BOTH, "model", "sparse-block-size", OPTION_DIM, OPTION_FIXED, FIELD(model.sparse_size), "S", "64", "[1, 65536]",
        NULL, "with --sparse-blocks: positions of a block, a divisor of --seq-len"},
    {OF_BOTH, "model", "qk-norm", OPTION_BOOL, OPTION_FIXED, FIELD(model.qk_norm), NULL, "no", NULL, NULL,
        "normalize each query and key head before the rotary position embedding"},
    {OF_TRAINING, "model", "parametrization", OPTION_CHOICE, OPTION_FIXED, FIELD(model.parametrization), "NAME",
        "standard", NULL, parametrization_choice,
        "completep: scale initial values, learning rates, decay and epsilon of each kind of tensor with the shape, so "
        "that settings tuned at the base shape suit this shape"},
    {OF_TRAINING, "model", "base-width", OPTION_DIM, OPTION_FIXED, FIELD(model.base_width), "C", "0", "[0, 16777216]",
        NULL, "with completep: the --hidden of the base shape; 0: the model's --hidden"},
    {OF_TRAINING, "model", "base-depth", OPTION_DIM, OPTION_FIXED, FIELD(model.base_depth), "L", "0", "[0, 65536]",
        NULL, "with completep: the --layers of the base shape; 0: the model's --layers"},

    {OF_BOTH, "data", "train-data", OPTION_TEXT, OPTION_SAVED, FIELD(train_data), "DATA", NULL, NULL, NULL,
        EVERYDAY "training data, a corpus directory or token shards; a pattern of shards is quoted; a mixture is "
        "'NAME=DATA:WEIGHT NAME=DATA:WEIGHT ...'"},
    {OF_BOTH, "data", "val-data", OPTION_TEXT, OPTION_SAVED, FIELD(val_data), "DATA", NULL, NULL, NULL,
        EVERYDAY "validation data, in the forms of --train-data; a corpus directory has val_*.bin"},
    {OF_BOTH, "data", "doc-mask", OPTION_BOOL, OPTION_SAVED, FIELD(doc_mask), NULL, "no", NULL, NULL,
        "restrict attention to tokens of the same document"},
    {OF_TRAINING, "data", "separator", OPTION_TEXT, OPTION_SAVED, FIELD(separator), "ID[:after]", NULL, NULL, NULL,
        "token that begins each document, or ends it (ID:after); generated text starts after this token; a corpus "
        "directory specifies its own"},
    {OF_TRAINING, "data", "tokenizer", OPTION_TEXT, OPTION_SAVED, FIELD(tokenizer), "FILE",
        "(from the corpus, or the checkpoint)",
        NULL, NULL, "tokenizer.bin, or a directory that contains one, for prompts and samples"},

    {OF_BOTH, "batch", "batch-size", OPTION_INT, OPTION_SAVED, FIELD(batch_size), "B",
        "(8, or fewer to divide --total-batch)", "[1, 16777216]", NULL, EVERYDAY "sequences per rank and micro-step"},
    {OF_BOTH, "batch", "total-batch", OPTION_TOKENS, OPTION_SAVED, FIELD(total_batch), "TOKENS",
        "(from the preset; with --batch-size B*T*ranks)", "[1, 1e15]", NULL,
        EVERYDAY "tokens per update, a multiple of B*T*ranks; 64K is 65536"},

    {OF_BOTH, "training", "steps", OPTION_INT, OPTION_SAVED, FIELD(steps), "N", "100", "[1, 99999999]", NULL,
        EVERYDAY "number of updates"},
    {OF_TRAINER, "training", "minutes", OPTION_REAL, OPTION_LOCAL, FIELD(minutes), "M", NULL, "(0, 1e6]", NULL,
        EVERYDAY "instead of --steps: train for about M minutes; a trial of 5 to 10 seconds sets the number of steps"},
    {OF_TRAINING, "training", "lr", OPTION_REAL, OPTION_SAVED, FIELD(lr), "X", "(from the preset)", "[0, inf)", NULL,
        EVERYDAY "peak learning rate"},
    {OF_TRAINING, "training", "min-lr-ratio", OPTION_REAL, OPTION_SAVED, FIELD(min_lr_ratio), "X", "0.1", "[0, 1]",
        NULL, "learning rate of the last step as a fraction of --lr"},
    {OF_TRAINING, "training", "warmup", OPTION_INT, OPTION_SAVED, FIELD(warmup), "N", "(min(100, steps/10))",
        "[0, 1e15]", NULL, "steps of linear warmup to --lr"},
    {OF_TRAINING, "training", "schedule", OPTION_CHOICE, OPTION_SAVED, FIELD(schedule), "NAME", "cosine", NULL,
        schedule_choice, "decay after the warmup; wsd decays over the last --decay-steps only, linearly or by 1-sqrt"},
    {OF_TRAINING, "training", "decay-steps", OPTION_INT, OPTION_SAVED, FIELD(decay_steps), "N",
        "(20% of --steps, rounded up)", "[1, 1e15]", NULL,
        "with --schedule wsd: the number of last steps in which the learning rate decays"},
    {OF_BOTH, "training", "optimizer", OPTION_CHOICE, OPTION_FIXED, FIELD(optimizer), "NAME", "adamw", NULL,
        optimizer_choice, "optimizer of the matrices of blocks; AdamW updates all other parameters"},
    {OF_TRAINING, "training", "weight-decay", OPTION_REAL, OPTION_SAVED, FIELD(weight_decay), "X", "0.1", "[0, inf)",
        NULL, "decoupled weight decay of matrices"},
    {OF_TRAINING, "training", "beta1", OPTION_REAL, OPTION_SAVED, FIELD(beta1), "X", "0.9", "[0, 1)", NULL,
        "beta1 of AdamW"},
    {OF_TRAINING, "training", "beta2", OPTION_REAL, OPTION_SAVED, FIELD(beta2), "X", "0.95", "[0, 1)", NULL,
        "beta2 of AdamW, and of the row moments of NorMuon"},
    {OF_TRAINING, "training", "eps", OPTION_REAL, OPTION_SAVED, FIELD(eps), "X", "1e-8", "[1e-30, inf)", NULL,
        "epsilon of AdamW"},
    {OF_TRAINING, "training", "grad-clip", OPTION_REAL, OPTION_SAVED, FIELD(grad_clip), "X", "1.0", "[0, inf)", NULL,
        "maximum gradient norm; gradients with a larger norm are scaled down to it; 0: no limit"},
    {OF_TRAINING, "training", "z-loss", OPTION_REAL, OPTION_SAVED, FIELD(z_loss), "W", "0", "[0, inf)", NULL,
        "weight of the squared log-sum-exp of the LM head's logits; 0: none"},
    {OF_TRAINING, "training", "router-aux", OPTION_REAL, OPTION_SAVED, FIELD(router_aux), "X",
        "(0.01; with --router-bias 0)", "[0, inf)", NULL,
        "with --experts: weight of the load-balancing loss of the routers; 0: none"},
    {OF_TRAINING, "training", "router-z", OPTION_REAL, OPTION_SAVED, FIELD(router_z), "X", "0.001", "[0, inf)", NULL,
        "with --experts: weight of the squared log-sum-exp of the routers' logits; 0: none"},
    {OF_TRAINING, "training", "router-bias-rate", OPTION_REAL, OPTION_SAVED, FIELD(router_bias_rate), "X", "0.001",
        "[0, 1]", NULL, "with --router-bias: change of a bias in an update"},
    {OF_TRAINING, "training", "seed", OPTION_U64, OPTION_FIXED, FIELD(seed), "N", "1", NULL, NULL,
        "seed of the initial weights, the data order and samples"},

    {OF_TRAINING, "stability", "skip-loss-z", OPTION_REAL, OPTION_SAVED, FIELD(skip_loss_z), "Z", "0", "[0, inf)", NULL,
        "skip updates whose loss is Z deviations above the median of the last 128 steps; 0: off"},
    {OF_TRAINING, "stability", "skip-grad-z", OPTION_REAL, OPTION_SAVED, FIELD(skip_grad_z), "Z", "0", "[0, inf)", NULL,
        "skip updates whose gradient norm before clipping is Z deviations above the median; 0: off"},
    {OF_TRAINING, "stability", "rollback", OPTION_TEXT, OPTION_SAVED, FIELD(rollback), "K:M", NULL, NULL, NULL,
        "after K spikes or skipped updates within M steps, return to the last good checkpoint and continue with the "
        "data that follows"},

    {OF_TRAINING, "stability", "change", OPTION_TEXT, OPTION_LOCAL, FIELD(change), "STEPS:KEY=VALUE ...", NULL, NULL,
        NULL, "for experiments, change single steps FIRST[-LAST]: lr[@TENSOR[A:B]]=FACTOR, moments[@TENSOR[A:B]]=0, "
        "update-norm=X, replace=A-B or order=reverse (windows of the update); 'python3 scripts/lab spike' uses it"},

    {OF_TRAINER, "run", "out", OPTION_TEXT, OPTION_LOCAL, FIELD(out), "DIR", NULL, NULL, NULL,
        EVERYDAY "run directory; without it nothing is written"},
    {OF_TRAINER, "run", "resume", OPTION_BOOL, OPTION_LOCAL, FIELD(resume), NULL, "no", NULL, NULL,
        EVERYDAY "continue the run in --out from its last checkpoint; given options replace the checkpoint's options"},
    {OF_BOTH, "run", "init", OPTION_TEXT, OPTION_LOCAL, FIELD(init), "DIR", NULL, NULL, NULL,
        EVERYDAY "start from the architecture and weights of a checkpoint; scripts/export/convert.py converts a "
        "baseline to another attention variant"},
    {OF_TRAINING, "run", "stop-after", OPTION_INT, OPTION_LOCAL, FIELD(stop_after), "N", NULL, "[1, 1e15]", NULL,
        "stop after step N and save a checkpoint; the schedule still follows --steps"},
    {OF_TRAINING, "run", "checkpoint-every", OPTION_INT, OPTION_SAVED, FIELD(checkpoint_every), "N", "0", "[0, 1e15]",
        NULL, "save a checkpoint every N steps, in addition to the last step; 0: off"},
    {OF_TRAINING, "run", "checkpoint-minutes", OPTION_REAL, OPTION_SAVED, FIELD(checkpoint_minutes), "X", "30",
        "[0, inf)", NULL, "also save a checkpoint when the last one is X minutes old; 0: off"},
    {OF_TRAINING, "run", "keep", OPTION_INT, OPTION_SAVED, FIELD(keep), "N", "3", "[0, 1e15]", NULL,
        "number of checkpoints to keep, the newest complete ones; 0: all"},
    {OF_TRAINING, "run", "val-every", OPTION_INT, OPTION_SAVED, FIELD(val_every), "N", "0", "[0, 1e15]", NULL,
        EVERYDAY "validate every N steps; 0: only at the start and the end"},
    {OF_TRAINING, "run", "val-steps", OPTION_INT, OPTION_SAVED, FIELD(val_steps), "N", "20", "[1, 1e15]", NULL,
        "batches per validation"},
    {OF_TRAINING, "run", "eval-choices", OPTION_TEXT, OPTION_SAVED, FIELD(eval_choices), "'NAME=FILE ...'", NULL, NULL,
        NULL, "multiple-choice tasks to score with validations and --eval; files of data/prepare_choices.py or llm.c"},
    {OF_BOTH, "run", "sample-every", OPTION_INT, OPTION_SAVED, FIELD(sample_every), "N", "0", "[0, 1e15]", NULL,
        EVERYDAY "print generated text every N steps; 0: never"},
    {OF_TRAINING, "run", "stats-every", OPTION_INT, OPTION_SAVED, FIELD(stats_every), "N", "0", "[0, 1e15]", NULL,
        "log statistics of each layer to log.jsonl at step 1 and every N steps; 0: never"},
    {OF_BOTH, "run", "recompute", OPTION_INT, OPTION_SAVED, FIELD(recompute), "LEVEL", "0", "[0, 2]", NULL,
        "activation recomputation in the backward: 0 none, 1 norms and MLP activations, 2 whole blocks"},
    {OF_TRAINING, "run", "threads", OPTION_INT, OPTION_LOCAL, FIELD(threads), "N", "(the available cores)", "[1, 4096]",
        NULL, EVERYDAY "CPU threads; at most the number of cores available to the process"},
    {OF_TRAINING, "run", "memory-check", OPTION_BOOL, OPTION_LOCAL, FIELD(memory_check), NULL, "yes", NULL, NULL,
        "refuse to start if this machine or the GPU has too little memory available for the run"},
    {OF_BOTH, "run", "matmul-dtype", OPTION_CHOICE, OPTION_SAVED, FIELD(matmul_dtype), "TYPE", "fp32", NULL,
        gemm_choice, "type to which matrix products round operands (fp8: in the blocks); sums and weights stay fp32"},
    {OF_BOTH, "run", "attention-kernel", OPTION_CHOICE, OPTION_SAVED, FIELD(attention_kernel), "KERNEL", "auto", NULL,
        sdpa_choice, "attention kernel on a GPU; auto: the faster one, as measured, else cuDNN where it is supported"},
    {OF_BOTH, "run", "deterministic", OPTION_BOOL, OPTION_SAVED, FIELD(deterministic), NULL, "yes", NULL, NULL,
        "bitwise reproducible runs; cuDNN's attention backward is then slower and needs more memory: about 4 to 10% of "
        "a step of 1.4b on an H200 or H100, predicted"},

    {OF_BOTH, "ranks (mpirun, srun)", "zero", OPTION_INT, OPTION_SAVED, FIELD(zero), "LEVEL", "0", "[0, 3]", NULL,
        "state sharded across ranks: 0 none, 1 optimizer states and master weights, 2 gradients too, 3 parameters too"},
    {OF_BOTH, "ranks (mpirun, srun)", "zero-group", OPTION_INT, OPTION_SAVED, FIELD(zero_group), "N", "0", "[0, 1e6]",
        NULL,
        "share state among each N consecutive ranks, such as a machine's ranks, and sum gradients over the groups; "
        "0: among all ranks"},
    {OF_TRAINING, "ranks (mpirun, srun)", "timeout", OPTION_REAL, OPTION_SAVED, FIELD(timeout), "SECONDS", "600",
        "(0, 1e9)", NULL, "abort when a rank is unresponsive for this long"},
    {OF_TRAINING, "ranks (mpirun, srun)", "start-timeout", OPTION_REAL, OPTION_LOCAL, FIELD(start_timeout), "SECONDS",
        "60", "(0, 1e9)", NULL, "abort when not all ranks have connected within this time, plus 1 s for each 10 ranks"},
    {OF_TRAINING, "ranks (mpirun, srun)", "rendezvous", OPTION_TEXT, OPTION_LOCAL, FIELD(rendezvous), "DIR", NULL, NULL,
        NULL, "directory shared by all machines, in which the ranks of one user find each other (default: --out)"},
    {OF_TRAINING, "ranks (mpirun, srun)", "check-ranks-every", OPTION_INT, OPTION_SAVED, FIELD(check_ranks_every), "N",
        "0", "[0, 1e15]", NULL, "every N steps and before checkpoints, compare all ranks' state bit for bit; 0: never"},

    {OF_PREDICTION, "prediction", "device", OPTION_TEXT, OPTION_LOCAL, FIELD(device), "NAME", NULL, NULL, NULL,
        EVERYDAY "required: the GPU, such as H200, A100 or 'RTX 5090'"},
    {OF_PREDICTION, "prediction", "ranks", OPTION_INT, OPTION_LOCAL, FIELD(ranks), "W", "(1)", "[1, 65536]", NULL,
        EVERYDAY "number of ranks, each with a GPU"},
    {OF_PREDICTION, "prediction", "link-gbs", OPTION_REAL, OPTION_LOCAL, FIELD(link_gbs), "X", "(as assumed)",
        "(0, inf)", NULL, EVERYDAY "with --ranks: ranks send X GB/s, per direction"},
    {OF_PREDICTION, "prediction", "out", OPTION_TEXT, OPTION_LOCAL, FIELD(prediction_out), "FILE", NULL, NULL, NULL,
        EVERYDAY "write the prediction as JSON"},

    {OF_TRAINER, "modes", "dump-grads", OPTION_TEXT, OPTION_LOCAL, FIELD(dump_grads), "FILE", NULL, NULL, NULL,
        "run one forward and backward, and write the loss and all gradients as safetensors"},
    {OF_TRAINER, "modes", "generate", OPTION_INT, OPTION_LOCAL, FIELD(generate), "N", NULL, "[1, 1e9]", NULL,
        EVERYDAY "generate N tokens; ends earlier at the token that separates documents, if it is known"},
    {OF_TRAINING, "modes", "prompt", OPTION_TEXT, OPTION_SAVED, FIELD(prompt), "TEXT", NULL, NULL, NULL,
        EVERYDAY "text to continue; the separator is prepended if it is known"},
    {OF_TRAINING, "modes", "prompt-tokens", OPTION_TEXT, OPTION_SAVED, FIELD(prompt_tokens), "ID,ID,...", NULL, NULL,
        NULL, "token IDs to continue; nothing is prepended"},
    {OF_TRAINER, "modes", "prompts", OPTION_TEXT, OPTION_LOCAL, FIELD(prompts), "FILE", NULL, NULL, NULL,
        "with --generate: continue each prompt of FILE (- for stdin, line by line as it arrives), a text on each line "
        "or JSON lines, --batch-size at a time; print JSON lines"},
    {OF_TRAINER, "modes", "interactive", OPTION_BOOL, OPTION_LOCAL, FIELD(interactive), NULL, "no", NULL, NULL,
        EVERYDAY "continue the lines that you type, or of stdin; by up to --generate tokens (default here: 256), "
        "printed as they are generated; an empty line continues the last text, Ctrl-C ends a continuation, Ctrl-D the "
        "program"},
    {OF_TRAINING, "modes", "temperature", OPTION_REAL, OPTION_SAVED, FIELD(temperature), "X", "0.8", "[0, inf)", NULL,
        "sampling temperature; 0: always the most likely token"},
    {OF_TRAINING, "modes", "top-k", OPTION_INT, OPTION_SAVED, FIELD(top_k), "K", "0", "[0, 268435456]", NULL,
        "sample from the K most likely tokens; 0: from all"},
    {OF_TRAINER, "modes", "eval", OPTION_BOOL, OPTION_LOCAL, FIELD(eval), NULL, "no", NULL, NULL,
        EVERYDAY "print the validation loss; also the loss by position, associative recall and attention statistics"},
    {OF_TRAINER, "modes", "eval-out", OPTION_TEXT, OPTION_LOCAL, FIELD(eval_out), "FILE", NULL, NULL, NULL,
        "with --eval: write the results as JSON"},
    {OF_TRAINER, "modes", "dry-run", OPTION_BOOL, OPTION_LOCAL, FIELD(dry_run), NULL, "no", NULL, NULL,
        EVERYDAY "print parameters, memory and FLOPs"},
    {OF_TRAINER, "modes", "ranks", OPTION_INT, OPTION_LOCAL, FIELD(ranks), "W", NULL, "[1, 65536]", NULL,
        "with --dry-run: report for one of W ranks"},
    {OF_BOTH, "modes", "help", OPTION_ACTION, OPTION_LOCAL, 0, "[WORD]", NULL, NULL, NULL,
        EVERYDAY "options about WORD: an option, a section or any text; all: all options; no WORD: those of every day"},
    {OF_BOTH, "modes", "version", OPTION_ACTION, OPTION_LOCAL, 0, NULL, NULL, NULL, NULL,
        "print version and source revision"}, };
#undef FIELD
// clang-format on
enum { OPTION_ROW_COUNT = sizeof(option_rows) / sizeof(option_rows[0]) };

// The differences between programs: name, required arguments, purpose and exit statuses from 3 on.
typedef struct {
    const char *name, *required, *purpose, *statuses;
    OptionPrograms lacks, hides; // options that it does not have, and that its help omits
} Program;
#ifdef RECORDED_OPS
static const Program this_program = {
    "predict_diffv2",
    " --device NAME",
    "Predicts memory, speed and hours of a run of train_diffv2cu, which stores bf16, on a GPU that this machine need "
    "not have. Options of training that are not listed are accepted and change nothing.",
    "",
    OF_TRAINER,
    OF_TRAINING};
#else
static const Program this_program = {"train_diffv2",
                                     "",
                                     "Pretrains the Differential Transformer V2 and the models it is compared with.",
                                     "; 3 stopped by a signal, no step is lost",
                                     OF_PREDICTION,
                                     OF_PREDICTION};
#endif
static inline bool option_exists(const OptionRow *row) { return row->programs != this_program.lacks; }

// The row of an option of this program, else of another program, or -1. `name` has `length` characters and needs no
// terminator.
static inline int option_find(const char *name, size_t length) {
    int found = -1;
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        if (strlen(option_rows[r].name) != length || memcmp(option_rows[r].name, name, length) != 0) continue;
        if (option_exists(&option_rows[r])) return r;
        found = r;
    }
    return found;
}
// The row of an option that must exist.
static inline int option_row(const char *name) {
    int r = option_find(name, strlen(name));
    assert(r >= 0);
    return r;
}
static inline bool options_given(const Options *o, const char *name) { return o->given[option_row(name)]; }

// Where notes on the run are printed. With --prompts and --interactive, stdout has only the results.
static inline FILE *options_notes(const Options *o) { return o->prompts || o->interactive ? stderr : stdout; }

typedef char OptionText[512]; // a value or a description on one line

// Prepares a user's text for a message: replaces control characters, truncates after 100 characters.
static inline const char *option_shown(OptionText out, const char *text) {
    size_t n = 0;
    for (; text[n] && n < 100; n++) out[n] = iscntrl((unsigned char)text[n]) ? '?' : text[n];
    snprintf(out + n, sizeof(OptionText) - n, "%s", text[n] ? "..." : "");
    return out;
}

// The first choice from i on that lists include.
static inline int option_listed(const OptionRow *row, int i) {
    while (row->choice(i) && preset_has_more_heads(row->choice(i))) i++;
    return i;
}

// Describes the valid values of an option, for messages.
static inline const char *option_accepts(OptionText out, const OptionRow *row) {
    size_t n = 0;
    switch (row->kind) {
    case OPTION_DIM:
    case OPTION_INT: snprintf(out, sizeof(OptionText), "a whole number in %s", row->range); break;
    case OPTION_TOKENS:
        snprintf(out, sizeof(OptionText), "a whole number in %s, or one with K or M", row->range);
        break;
    case OPTION_U64: snprintf(out, sizeof(OptionText), "a whole number in [0, %" PRIu64 "]", UINT64_MAX); break;
    case OPTION_REAL: snprintf(out, sizeof(OptionText), "a number in %s", row->range); break;
    case OPTION_VARIANT:
    case OPTION_CHOICE:
        for (int i = 0; row->choice(i) && n < sizeof(OptionText); i = option_listed(row, i + 1))
            n += (size_t)snprintf(out + n, sizeof(OptionText) - n, "%s%s", i ? ", " : "one of ", row->choice(i));
        if (row->choice == preset_choice) snprintf(out + n, sizeof(OptionText) - n, ", or NAME-1.5h or NAME-2h");
        break;
    default: snprintf(out, sizeof(OptionText), "%s", row->placeholder ? "a non-empty text" : "no value");
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

// Parses a whole number: digits, or a number with an exponent (1e6, 2.5e6) up to 2^53, the limit of exact doubles.
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

// Parses a whole number, or digits with K or M.
static inline bool option_tokens(const char *text, int64_t *value) {
    size_t digits = strspn(text, "0123456789");
    bool unit = digits > 0 && digits < 10 && (text[digits] == 'K' || text[digits] == 'M') && !text[digits + 1];
    if (!unit) return option_whole_number(text, value);
    *value = strtoll(text, NULL, 10) << (text[digits] == 'K' ? 10 : 20);
    return true;
}

// Sets a value from text. Returns false and leaves it unchanged if the text is invalid. Numbers are decimal.
static inline bool option_set(Options *o, int r, const char *text) {
    const OptionRow *row = &option_rows[r];
    char *field = (char *)o + row->field, *end = NULL;
    bool digits = *text && strspn(text, "0123456789") == strlen(text);
    errno = 0;
    switch (row->kind) {
    case OPTION_ACTION: break; // has no value
    case OPTION_BOOL:
        if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0) return false;
        *(bool *)field = text[0] == 'y';
        break;
    case OPTION_DIM:
    case OPTION_INT:
    case OPTION_TOKENS: {
        int64_t x;
        bool number = row->kind == OPTION_TOKENS ? option_tokens(text, &x) : option_whole_number(text, &x);
        if (!number || !option_in_range(row->range, (double)x)) return false;
        if (row->kind == OPTION_DIM) *(int *)field = (int)x;
        else *(int64_t *)field = x;
        break;
    }
    case OPTION_U64: {
        unsigned long long x = digits ? strtoull(text, &end, 10) : 0;
        if (!digits || errno) return false;
        *(uint64_t *)field = x;
        break;
    }
    case OPTION_REAL: { // strtod alone would accept spaces, hexadecimal, inf and nan
        if (!*text || strspn(text, "0123456789.eE+-") != strlen(text)) return false;
        double x = strtod(text, &end) + 0.0; // -0 becomes 0
        if (errno || *end || !isfinite(x) || !option_in_range(row->range, x)) return false;
        *(double *)field = x;
        break;
    }
    case OPTION_TEXT: {
        if (!*text) return false;
        char *copy = strdup(text);
        CHECK(copy, "out of memory for --%s", row->name);
        free(*(char **)field);
        *(char **)field = copy;
        break;
    }
    case OPTION_VARIANT:
    case OPTION_CHOICE: {
        int i = 0;
        while (row->choice(i) && strcmp(row->choice(i), text) != 0) i++;
        if (!row->choice(i)) return false;
        if (row->kind == OPTION_CHOICE) *(int *)field = i;
        else *(const AttentionVariant **)field = &attention_variants[i];
        break;
    }
    }
    o->has[r] = true;
    return true;
}

// Writes a value in the form that option_set reads; reals have the fewest digits that restore them. `options`: Options,
// or for an option of the model a ModelConfig. A text is returned unchanged.
static inline const char *option_value(OptionText out, const OptionRow *row, const void *options) {
    const char *field = (const char *)options + row->field;
    switch (row->kind) {
    case OPTION_DIM: snprintf(out, sizeof(OptionText), "%d", *(const int *)field); break;
    case OPTION_INT:
    case OPTION_TOKENS: snprintf(out, sizeof(OptionText), "%" PRId64, *(const int64_t *)field); break;
    case OPTION_U64: snprintf(out, sizeof(OptionText), "%" PRIu64, *(const uint64_t *)field); break;
    case OPTION_TEXT: return *(const char *const *)field;
    case OPTION_CHOICE: return row->choice(*(const int *)field);
    case OPTION_VARIANT: return (*(const AttentionVariant *const *)field)->name;
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
// option_text, or NULL without a value.
static inline const char *option_text(OptionText out, const Options *o, int r) {
    return o->has[r] ? option_value(out, &option_rows[r], o) : NULL;
}

// Whether the option is in use: an accepted value that is not 0, "no" or missing.
static inline bool option_on(const Options *o, const char *name) {
    const OptionRow *row = &option_rows[option_row(name)];
    const char *field = (const char *)o + row->field;
    switch (row->kind) {
    case OPTION_CHOICE:
    case OPTION_DIM: return *(const int *)field != 0;
    case OPTION_INT:
    case OPTION_TOKENS: return *(const int64_t *)field != 0;
    case OPTION_REAL: return *(const double *)field != 0;
    case OPTION_TEXT: return *(const char *const *)field != NULL;
    default: return *(const bool *)field;
    }
}

// Whether the field belongs to the model's architecture, and whether its default comes from the preset.
static inline bool option_of_model(const OptionRow *row) {
    return row->kind != OPTION_ACTION && row->field < sizeof(ModelConfig);
}
static inline bool option_of_preset(const OptionRow *row) { return option_of_model(row) && row->fallback[0] == '('; }

// Copies the value of an option of the model.
static inline void option_copy(Options *o, int r, const ModelConfig *from) {
    const OptionRow *row = &option_rows[r];
    bool whole = row->kind == OPTION_DIM || row->kind == OPTION_CHOICE;
    size_t size = whole ? sizeof(int) : row->kind == OPTION_BOOL ? sizeof(bool) : sizeof(double);
    static_assert(sizeof(double) == sizeof(AttentionVariant *), "OPTION_REAL or OPTION_VARIANT");
    assert(option_of_model(row));
    memcpy((char *)o + row->field, (const char *)from + row->field, size);
    o->has[r] = true;
}

static inline void options_defaults(Options *o) {
    memset(o, 0, sizeof(*o));
    o->model.rms_norm_eps = 1e-5; // not an option; a loaded model has its own
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
    free(o->errors);
    memset(o, 0, sizeof(*o));
}
