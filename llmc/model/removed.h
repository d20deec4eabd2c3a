/*
removed.h: options and values of options that earlier versions had, and what replaces them.

  what      REMOVED_SAVED: an option whose value a checkpoint states; REMOVED_LOCAL: an option of one start;
            REMOVED_VALUE: a value of an option that remains; a variant is a value of --attention;
            REMOVED_NAME: an option that has another name now, with the same values
  value     the default that the option had, the value that was removed, or the new name; NULL: no default
  instead   what to do, for messages
  revision  the last one that has it
*/
#pragma once
#include "../base/common.h"

typedef enum { REMOVED_SAVED, REMOVED_LOCAL, REMOVED_VALUE, REMOVED_NAME } RemovedWhat;
typedef struct {
    RemovedWhat what;
    const char *name, *value, *instead, *revision;
} Removed;

#define LAST_WITH_ALL "478aa6ac"
#define ATTENTION_STATISTICS "--eval-out has statistics of the attention of each layer"
static const Removed removed[] = {
    {REMOVED_NAME, "gemm", "matmul-dtype", "--matmul-dtype replaces it, with the same values", "8a86d2a4"},
    {REMOVED_NAME, "sdpa", "attention-kernel", "--attention-kernel replaces it, with the same values", "8a86d2a4"},
    {REMOVED_LOCAL, "eval-needles", NULL, "data/needles.py writes this task as a file for --eval-choices", "b2bd9c98"},
    {REMOVED_LOCAL, "eval-shots", NULL, "--eval-choices scores the files of other tasks", "b2bd9c98"},
    {REMOVED_SAVED, "tune-gemm", "no", "the library chooses the algorithms", LAST_WITH_ALL},
    {REMOVED_LOCAL, "quantize", NULL, "round the numbers of the exported model in PyTorch", LAST_WITH_ALL},
    {REMOVED_LOCAL, "probe", NULL, ATTENTION_STATISTICS, "773d3ea6"},
    {REMOVED_LOCAL, "dump-attention", NULL, ATTENTION_STATISTICS, "bf378841"},
    {REMOVED_LOCAL, "dump-qkv", NULL, ATTENTION_STATISTICS, "bf378841"},
    {REMOVED_LOCAL, "dump-activations", NULL,
     "--stats-every logs the largest magnitude of the residual stream after each layer", "bf378841"},
    {REMOVED_SAVED, "clip-update-norm", NULL, "--grad-clip limits gradients, --skip-grad-z skips them", "46bfc17d"},
    {REMOVED_SAVED, "qk-clip", "0", "--qk-norm bounds the logits of attention", "46bfc17d"},
    {REMOVED_SAVED, "muon-split", "matrix", "Muon orthogonalizes whole matrices", "46bfc17d"},
    {REMOVED_SAVED, "muon-momentum", "0.95", "the momentum of Muon is 0.95", "46bfc17d"},
    {REMOVED_SAVED, "fp8-fast-accum", "no", "sums of --matmul-dtype fp8 are fp32", "46bfc17d"},
    {REMOVED_SAVED, "sdpa-linear", "no", "--no-deterministic needs less memory; the last bits vary", "46bfc17d"},
    {REMOVED_LOCAL, "nvls", NULL, "NCCL_NVLS_ENABLE=2, with --no-deterministic on the command line", "46bfc17d"},
    {REMOVED_SAVED, "reduce-dtype", "fp32", "ranks send gradients in fp32", "46bfc17d"},
    {REMOVED_SAVED, "decay-shape", "linear", "--schedule wsd-sqrt has the shape 1-sqrt, wsd is linear", "46bfc17d"},
    {REMOVED_SAVED, "match-active", "no", "--match-params counts all parameters", "46bfc17d"},
    {REMOVED_SAVED, "base-head-dim", "0", "the base of completep has the --head-dim of the model", "46bfc17d"},
    {REMOVED_LOCAL, "checkpoint-background", NULL,
     "checkpoints are written while training continues, where memory has room for a copy of the state", "46bfc17d"},
    {REMOVED_LOCAL, "measure-peak", NULL, "the peak of a GPU that is not listed is measured", "46bfc17d"},
    {REMOVED_LOCAL, "stop-at-separator", NULL, "--generate stops at the token that separates documents", "46bfc17d"},
    {REMOVED_SAVED, "sparse-score", "group", "all heads of a key/value group select together", "46bfc17d"},
    {REMOVED_SAVED, "phase", NULL, "a phase is a resume with other options, as docs/training.md describes", "599870f4"},
    {REMOVED_SAVED, "batch-schedule", NULL, "--resume may have another --total-batch", "599870f4"},
    {REMOVED_LOCAL, "decay-now", NULL,
     "--resume --schedule wsd --decay-steps N --steps S, with S = the checkpoint's step plus N", "599870f4"},
    {REMOVED_LOCAL, "device", NULL, "predict_diffv2 --device NAME predicts memory and speed on a GPU", "aad0bb09"},
    {REMOVED_LOCAL, "dry-run-out", NULL, "predict_diffv2 --device NAME --out FILE writes the prediction", "aad0bb09"},
    {REMOVED_LOCAL, "link-gbs", NULL, "predict_diffv2 --device NAME --link-gbs X predicts communication", "aad0bb09"},
    {REMOVED_VALUE, "attention", "xsa", "baseline keeps the component along the own value", "46bfc17d"},
    {REMOVED_VALUE, "attention", "diff_v2_xsa", "diff_v2 keeps the component along the own value", "46bfc17d"},
    {REMOVED_VALUE, "attention", "diff_v2_signed", "diff_v2_no_sigmoid has factors of either sign", "46bfc17d"},
    {REMOVED_VALUE, "attention", "diff_v2_head_lambda", "diff_v2_layer_lambda learns a factor per layer", "46bfc17d"},
};
enum { REMOVED_COUNT = sizeof(removed) / sizeof(removed[0]) };

// The row of a removed option; NULL: the option was not removed.
static inline const Removed *removed_option(const char *name, size_t length) {
    for (int i = 0; i < REMOVED_COUNT; i++)
        if (removed[i].what != REMOVED_VALUE && strlen(removed[i].name) == length &&
            strncmp(removed[i].name, name, length) == 0)
            return &removed[i];
    return NULL;
}

// The name that an option of an earlier version has now.
static inline const char *option_renamed(const char *name) {
    const Removed *row = removed_option(name, strlen(name));
    return row && row->what == REMOVED_NAME ? row->value : name;
}

// The row of a removed value; NULL: the value was not removed.
static inline const Removed *removed_value(const char *name, const char *value) {
    for (int i = 0; i < REMOVED_COUNT; i++)
        if (removed[i].what == REMOVED_VALUE && strcmp(removed[i].name, name) == 0 &&
            strcmp(removed[i].value, value) == 0)
            return &removed[i];
    return NULL;
}
