/*
removed.h: options that earlier versions had, and what replaces them.

  instead   what to do, for messages
  revision  the last one that has it
*/
#pragma once
#include "../base/common.h"

typedef struct {
    const char *name, *instead, *revision;
} Removed;

#define LAST_WITH_ALL "478aa6ac"
#define ATTENTION_STATISTICS "--eval-out has statistics of the attention of each layer"
static const Removed removed[] = {
    {"gemm", "--matmul-dtype replaces it, with the same values", "8a86d2a4"},
    {"sdpa", "--attention-kernel replaces it, with the same values", "8a86d2a4"},
    {"eval-needles", "data/needles.py writes this task as a file for --eval-choices", "b2bd9c98"},
    {"eval-shots", "--eval-choices scores the files of other tasks", "b2bd9c98"},
    {"tune-gemm", "the library chooses the algorithms", LAST_WITH_ALL},
    {"quantize", "round the numbers of the exported model in PyTorch", LAST_WITH_ALL},
    {"probe", ATTENTION_STATISTICS, "773d3ea6"},
    {"dump-attention", ATTENTION_STATISTICS, "bf378841"},
    {"dump-qkv", ATTENTION_STATISTICS, "bf378841"},
    {"dump-activations", "--stats-every logs the largest magnitude of the residual stream after each layer",
     "bf378841"},
    {"clip-update-norm", "--grad-clip limits gradients, --skip-grad-z skips them", "46bfc17d"},
    {"qk-clip", "--qk-norm bounds the logits of attention", "46bfc17d"},
    {"muon-split", "Muon orthogonalizes whole matrices", "46bfc17d"},
    {"muon-momentum", "the momentum of Muon is 0.95", "46bfc17d"},
    {"fp8-fast-accum", "sums of --matmul-dtype fp8 are fp32", "46bfc17d"},
    {"sdpa-linear", "--no-deterministic needs less memory; the last bits vary", "46bfc17d"},
    {"nvls", "NCCL_NVLS_ENABLE=2, with --no-deterministic on the command line", "46bfc17d"},
    {"reduce-dtype", "ranks send gradients in fp32", "46bfc17d"},
    {"decay-shape", "--schedule wsd-sqrt has the shape 1-sqrt, wsd is linear", "46bfc17d"},
    {"match-active", "--match-params counts all parameters", "46bfc17d"},
    {"base-head-dim", "the base of completep has the --head-dim of the model", "46bfc17d"},
    {"checkpoint-background",
     "checkpoints are written while training continues, where memory has room for a copy of the state", "46bfc17d"},
    {"measure-peak", "the peak of a GPU that is not listed is measured", "46bfc17d"},
    {"stop-at-separator", "--generate stops at the token that separates documents", "46bfc17d"},
    {"sparse-score", "all heads of a key/value group select together", "46bfc17d"},
    {"phase", "a phase is a resume with other options, as docs/training.md describes", "599870f4"},
    {"batch-schedule", "--resume may have another --total-batch", "599870f4"},
    {"decay-now", "--resume --schedule wsd --decay-steps N --steps S, with S = the checkpoint's step plus N",
     "599870f4"},
    {"device", "predict_diffv2 --device NAME predicts memory and speed on a GPU", "aad0bb09"},
    {"dry-run-out", "predict_diffv2 --device NAME --out FILE writes the prediction", "aad0bb09"},
    {"link-gbs", "predict_diffv2 --device NAME --link-gbs X predicts communication", "aad0bb09"},
};
enum { REMOVED_COUNT = sizeof(removed) / sizeof(removed[0]) };

// The row of a removed option; NULL: the option was not removed.
static inline const Removed *removed_option(const char *name, size_t length) {
    for (int i = 0; i < REMOVED_COUNT; i++)
        if (strlen(removed[i].name) == length && strncmp(removed[i].name, name, length) == 0) return &removed[i];
    return NULL;
}
