/*
inputs.h: what a run reads besides its model: the data of its mode, tokenizer, prompts and tasks.

  void     inputs_open(in, o, mode, phases, plan, generates, loaded)
                                                               completes the plan for the last batch of a validation.
                                                               generates: text is drawn from the model. loaded: a
                                                               checkpoint directory, or NULL
  void     inputs_open_data(in, o, mode, plan, V), inputs_close_data(in)   the part of the data and tasks
  void     inputs_check_phases(in, phases, V)                  ends the program if data of a later phase are unusable
  void     inputs_compare(in, trains)                          ends the program if ranks read different data
  void     inputs_close(in)
  uint64_t validation_windows(in, o)                           windows that a validation reads: the first ones
*/
#pragma once
#include "../evaluate/evaluation_choices.h"
#include "../evaluate/generated_text.h"
#include "../options/modes.h"
#include "run_data.h"

typedef struct {
    DataLoader train, val;
    uint64_t fingerprint, val_fingerprint; // of their data
    RunTokenizer tokenizer;
    Prompts prompts;     // --prompts
    Sequence *sequences; // their tokens
    ChoiceTasks choices; // --eval-choices
} Inputs;

static inline uint64_t validation_windows(const Inputs *in, const Options *o) {
    uint64_t all = in->val.window_count, B = (uint64_t)o->batch_size;
    return (uint64_t)o->val_steps <= all / B ? (uint64_t)o->val_steps * B : all;
}

// plan: NULL: the data are only checked.
static inline void inputs_open_data(Inputs *in, const Options *o, Mode mode, ModelPlan *plan, int V) {
    const ModeRow *row = &mode_rows[mode];
    if (row->train_data) run_data_open(&in->train, o, "train-data", o->train_data, V, true);
    if (row->val_data && o->val_data) run_data_open(&in->val, o, "val-data", o->val_data, V, false);
    if (in->val.shard_count && plan) plan_last_batch(plan, (int)(validation_windows(in, o) % (uint64_t)plan->B));
    if (mode == MODE_TRAIN || mode == MODE_EVAL)
        in->choices = choices_open_all(o->eval_choices, V, o->model.T, in->tokenizer.tokenizer);
}

static inline void inputs_open(Inputs *in, const Options *o, Mode mode, const Phases *phases, ModelPlan *plan,
                               bool generates, const char *loaded) {
    const ModeRow *row = &mode_rows[mode];
    int V = plan->config.V, T = o->model.T;
    run_tokenizer_open(&in->tokenizer, o, loaded, !row->prompts, mode == MODE_TRAIN ? phases : NULL);
    if (o->prompts)
        in->sequences =
            prompts_sequences(&in->prompts, &in->tokenizer, V, T, (int)o->generate, random_key("generate", o->seed));
    if (generates && in->tokenizer.implied && in->tokenizer.separator < 0 && comm_rank() == 0)
        warn("generated text begins after token 0, because the token that separates documents is unknown: give "
             "--separator ID, or --prompt-tokens");
    inputs_open_data(in, o, mode, plan, V);
}

// Ranks must read the same data.
static inline void inputs_compare(Inputs *in, bool trains) {
    if (trains) in->fingerprint = dataloader_fingerprint(&in->train);
    if (in->val.shard_count) in->val_fingerprint = dataloader_fingerprint(&in->val);
    run_data_compare(in->fingerprint, in->val.window_count, in->val_fingerprint);
}

static inline void inputs_close_data(Inputs *in) {
    if (in->train.shard_count) dataloader_close(&in->train);
    if (in->val.shard_count) dataloader_close(&in->val);
    choices_close_all(&in->choices);
}

// Opens and closes the data of the later phases: an error in them ends the run at its start.
static inline void inputs_check_phases(const Inputs *in, const Phases *p, int V) {
    for (int k = p->current + 1; k < p->count; k++) {
        Inputs later;
        if (!p->items[k].rebuilds) continue;
        memset(&later, 0, sizeof(later));
        later.tokenizer = in->tokenizer;
        inputs_open_data(&later, &p->items[k].options, MODE_TRAIN, NULL, V);
        inputs_close_data(&later);
    }
}

static inline void inputs_close(Inputs *in) {
    inputs_close_data(in);
    free_sequences(in->sequences, in->prompts.count);
    prompts_close(&in->prompts);
    run_tokenizer_close(&in->tokenizer);
}
