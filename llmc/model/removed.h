/*
removed.h: options and values of options that earlier versions had, and what replaces them.

  value     a value of an option that remains; a variant is a value of --attention. NULL: the option was removed
  instead   what to do, for messages
  revision  the last one that has it
*/
#pragma once
#include "../base/common.h"

typedef struct {
    const char *name, *value, *instead, *revision;
} Removed;

#define LAST_WITH_ALL "478aa6ac"
#define ATTENTION_STATISTICS "--eval-out has statistics of the attention of each layer"
static const Removed removed[] = {
    {"gemm", NULL, "--matmul-dtype replaces it, with the same values", "8a86d2a4"},
    {"sdpa", NULL, "--attention-kernel replaces it, with the same values", "8a86d2a4"},
    {"eval-needles", NULL, "data/needles.py writes this task as a file for --eval-choices", "b2bd9c98"},
    {"eval-shots", NULL, "--eval-choices scores the files of other tasks", "b2bd9c98"},
    {"tune-gemm", NULL, "the library chooses the algorithms", LAST_WITH_ALL},
    {"quantize", NULL, "round the numbers of the exported model in PyTorch", LAST_WITH_ALL},
    {"probe", NULL, ATTENTION_STATISTICS, "773d3ea6"},
    {"dump-attention", NULL, ATTENTION_STATISTICS, "bf378841"},
    {"dump-qkv", NULL, ATTENTION_STATISTICS, "bf378841"},
    {"dump-activations", NULL, "--stats-every logs the largest magnitude of the residual stream after each layer",
     "bf378841"},
    {"clip-update-norm", NULL, "--grad-clip limits gradients, --skip-grad-z skips them", "46bfc17d"},
    {"qk-clip", NULL, "--qk-norm bounds the logits of attention", "46bfc17d"},
    {"muon-split", NULL, "Muon orthogonalizes whole matrices", "46bfc17d"},
    {"muon-momentum", NULL, "the momentum of Muon is 0.95", "46bfc17d"},
    {"fp8-fast-accum", NULL, "sums of --matmul-dtype fp8 are fp32", "46bfc17d"},
    {"sdpa-linear", NULL, "--no-deterministic needs less memory; the last bits vary", "46bfc17d"},
    {"nvls", NULL, "NCCL_NVLS_ENABLE=2, with --no-deterministic on the command line", "46bfc17d"},
    {"reduce-dtype", NULL, "ranks send gradients in fp32", "46bfc17d"},
    {"decay-shape", NULL, "--schedule wsd-sqrt has the shape 1-sqrt, wsd is linear", "46bfc17d"},
    {"match-active", NULL, "--match-params counts all parameters", "46bfc17d"},
    {"base-head-dim", NULL, "the base of completep has the --head-dim of the model", "46bfc17d"},
    {"checkpoint-background", NULL,
     "checkpoints are written while training continues, where memory has room for a copy of the state", "46bfc17d"},
    {"measure-peak", NULL, "the peak of a GPU that is not listed is measured", "46bfc17d"},
    {"stop-at-separator", NULL, "--generate stops at the token that separates documents", "46bfc17d"},
    {"sparse-score", NULL, "all heads of a key/value group select together", "46bfc17d"},
    {"phase", NULL, "a phase is a resume with other options, as docs/training.md describes", "599870f4"},
    {"batch-schedule", NULL, "--resume may have another --total-batch", "599870f4"},
    {"decay-now", NULL, "--resume --schedule wsd --decay-steps N --steps S, with S = the checkpoint's step plus N",
     "599870f4"},
    {"device", NULL, "predict_diffv2 --device NAME predicts memory and speed on a GPU", "aad0bb09"},
    {"dry-run-out", NULL, "predict_diffv2 --device NAME --out FILE writes the prediction", "aad0bb09"},
    {"link-gbs", NULL, "predict_diffv2 --device NAME --link-gbs X predicts communication", "aad0bb09"},
    {"attention", "xsa", "baseline keeps the component along the own value", "46bfc17d"},
    {"attention", "diff_v2_xsa", "diff_v2 keeps the component along the own value", "46bfc17d"},
    {"attention", "diff_v2_signed", "diff_v2_no_sigmoid has factors of either sign", "46bfc17d"},
    {"attention", "diff_v2_head_lambda", "diff_v2_layer_lambda learns a factor per layer", "46bfc17d"},
};
enum { REMOVED_COUNT = sizeof(removed) / sizeof(removed[0]) };

// The row of a removed option; NULL: the option was not removed.
static inline const Removed *removed_option(const char *name, size_t length) {
    for (int i = 0; i < REMOVED_COUNT; i++)
        if (!removed[i].value && strlen(removed[i].name) == length && strncmp(removed[i].name, name, length) == 0)
            return &removed[i];
    return NULL;
}

// The row of a removed value; NULL: the value was not removed.
static inline const Removed *removed_value(const char *name, const char *value) {
    for (int i = 0; i < REMOVED_COUNT; i++)
        if (removed[i].value && strcmp(removed[i].name, name) == 0 && strcmp(removed[i].value, value) == 0)
            return &removed[i];
    return NULL;
}
