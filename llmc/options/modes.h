/*
modes.h: the modes of the program: it trains, unless options select another mode.

One row per mode says which option selects it and what it needs. To add a mode: a value of Mode, a row, and its case in
run_mode (train_diffv2.c).
*/
#pragma once
#include "../model/plan.h"
#include "options_table.h"

typedef enum { MODE_TRAIN, MODE_DUMP_GRADS, MODE_GENERATE, MODE_EVAL, MODE_DRY_RUN, MODE_COUNT } Mode;

typedef enum { DATA_NOT_READ, DATA_OPTIONAL, DATA_REQUIRED } DataNeed;

typedef struct {
    const char *option; // option that selects the mode; NULL: the default
    Purpose purpose;    // what the model's memory is for
    DataNeed train_data, val_data;
    bool many_ranks;    // runs under mpirun or srun
    bool prompts;       // reads a prompt, and the corpora only for their tokenizer
    bool reads_weights; // reads a model's weights and does not change them
} ModeRow;

static const ModeRow mode_rows[MODE_COUNT] = {
    {NULL, FOR_TRAINING, DATA_REQUIRED, DATA_OPTIONAL, true, false, false},
    {"dump-grads", FOR_TRAINING, DATA_REQUIRED, DATA_NOT_READ, false, false, true},
    {"generate", FOR_GENERATION, DATA_NOT_READ, DATA_NOT_READ, false, true, true},
    {"eval", FOR_EVALUATION, DATA_NOT_READ, DATA_REQUIRED, true, false, true},
    {"dry-run", FOR_TRAINING, DATA_NOT_READ, DATA_NOT_READ, false, false, false},
};

// Whether the options select the mode. Training: no option selects another mode, not even with an invalid value.
static inline bool mode_selected(const Options *o, Mode mode) {
    if (mode == MODE_TRAIN) {
        for (int m = MODE_TRAIN + 1; m < MODE_COUNT; m++)
            if (mode_selected(o, (Mode)m) || o->refused[option_row(mode_rows[m].option)]) return false;
        return true;
    }
    return option_on(o, mode_rows[mode].option) || (mode == MODE_GENERATE && o->interactive);
}

// The mode of accepted options; options_exclusions refuses two modes.
static inline Mode options_mode(const Options *o) {
    int mode = MODE_TRAIN;
    while (mode < MODE_COUNT - 1 && !mode_selected(o, (Mode)mode)) mode++;
    return (Mode)mode;
}
