/*
inputs.h: what a run reads besides its model: the data of its mode, tokenizer, prompts and tasks.

  void     inputs_open(in, o, mode, plan, generates, loaded)   completes the plan for the last batch of a validation.
                                                               generates: text is drawn from the model. loaded: a
                                                               checkpoint directory, or NULL
  void     inputs_compare(in, trains)                          ends the program if ranks read different data
  void     inputs_close(in)
  uint64_t validation_windows(in, o)                           windows that a validation reads: the first ones
*/
#pragma once
#include "../evaluate/evaluation_choices.h"
#include "../evaluate/generated_text.h"
#include "../options/modes.h"
#include "interactive.h"
#include "run_data.h"

typedef struct {
    DataLoader train, val;
    uint64_t fingerprint, val_fingerprint; // fingerprints of train and val
    RunTokenizer tokenizer;
    int *token_bytes;    // [V]: run_tokenizer_bytes
    Prompts prompts;     // --prompts
    Answers answers;     // to them
    ChoiceTasks choices; // --eval-choices
} Inputs;

static inline uint64_t validation_windows(const Inputs *in, const Options *o) {
    uint64_t all = in->val.window_count, B = (uint64_t)o->batch_size;
    return (uint64_t)o->val_steps <= all / B ? (uint64_t)o->val_steps * B : all;
}

// If the mode does not read the data of the options, the tokenizer follows from --train-data only if this start is
// given --train-data: the data of the checkpoint may no longer exist.
static inline void inputs_open_tokenizer(Inputs *in, const Options *o, bool reads_data, const char *loaded) {
    TokenizerSources from = {loaded, o->tokenizer, NULL, NULL, o->separator, o->prompt, o->prompt_tokens};
    if (reads_data || options_given(o, "train-data")) from.train_data = o->train_data;
    if (reads_data) from.val_data = o->val_data;
    run_tokenizer_open(&in->tokenizer, &from, o->model.V);
}

static inline void inputs_open(Inputs *in, const Options *o, Mode mode, ModelPlan *plan, bool generates,
                               const char *loaded) {
    const ModeRow *row = &mode_rows[mode];
    int V = plan->config.V, T = o->model.T;
    inputs_open_tokenizer(in, o, !row->prompts, loaded);
    in->token_bytes = run_tokenizer_bytes(&in->tokenizer, V);
    if (o->prompts)
        in->answers = answers_of(&in->prompts, &in->tokenizer, V, T, (int)o->generate, random_key("generate", o->seed));
    if (o->interactive) interactive_check(&in->tokenizer, V);
    if (generates && !o->prompts && !o->interactive && in->tokenizer.implied && in->tokenizer.separator < 0 &&
        comm_rank() == 0)
        warn("generated text begins after token 0, because the token that separates documents is unknown: give "
             "--separator ID, or --prompt-tokens");
    if (row->train_data) run_data_open(&in->train, o, "train-data", o->train_data, V, true);
    if (row->val_data && o->val_data) run_data_open(&in->val, o, "val-data", o->val_data, V, false);
    if (in->val.shard_count) plan_last_batch(plan, (int)(validation_windows(in, o) % (uint64_t)plan->B));
    if (mode == MODE_TRAIN || mode == MODE_EVAL)
        in->choices = choices_open_all(o->eval_choices, V, T, in->tokenizer.tokenizer);
}

// Checks that ranks read the same data.
static inline void inputs_compare(Inputs *in, bool trains) {
    if (trains) in->fingerprint = dataloader_fingerprint(&in->train);
    if (in->val.shard_count) in->val_fingerprint = dataloader_fingerprint(&in->val);
    run_data_compare(in->fingerprint, in->val.window_count, in->val_fingerprint);
}

static inline void inputs_close(Inputs *in) {
    if (in->train.shard_count) dataloader_close(&in->train);
    if (in->val.shard_count) dataloader_close(&in->val);
    choices_close_all(&in->choices);
    answers_close(&in->answers);
    prompts_close(&in->prompts);
    free(in->token_bytes);
    run_tokenizer_close(&in->tokenizer);
}
