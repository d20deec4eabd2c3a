/*
divergence.h: whether a run has diverged, and the messages about it.

  A run has diverged if its last step or validation is not finite; then its exit status is not EXIT_DONE. It has also
  diverged if the mean of the last losses exceeds by more than 1 the mean at the start of training, or ln V, the loss of
  an untrained model. Losses of single batches may differ by more.

  void divergence_start(start_loss, state)   called before the first step and after each one
  void divergence_stop(checkpointer)         after a step: ends the program after NOT_FINITE_LIMIT bad steps in a row
  int  divergence_end(checkpointer, start_loss, V, status)   at the end of training: warns; returns the exit status
*/
#pragma once
#include "checkpointer.h"

enum { LOSS_STEPS = 16 }; // steps whose mean loss is compared

// start_loss: mean loss of the last LOSS_STEPS steps before this start, or of the run's first; NaN: not yet known.
static inline void divergence_start(double *start_loss, const TrainerState *s) {
    const SpikeDetector *d = &s->guard.loss;
    if (isnan(*start_loss) && d->count >= LOSS_STEPS) *start_loss = spike_mean(d, LOSS_STEPS);
}

static inline void divergence_stop(Checkpointer *c) {
    int64_t in_row = c->state->guard.not_finite_in_row, step = c->state->step;
    if (in_row < NOT_FINITE_LIMIT) return;
    char good[PATH_SIZE];
    checkpointer_log_not_finite(c, good);
    CHECK(false,
          "steps %" PRId64 " to %" PRId64
          " had no finite loss and gradient, the run is stopped; try a lower --lr, a longer --warmup, "
          "--grad-clip or --skip-grad-z from an earlier checkpoint; last good checkpoint: %s",
          step - in_row + 1, step, good);
}

static inline int divergence_end(Checkpointer *c, double start_loss, int V, int status) {
    double untrained = log(V), last = spike_mean(&c->state->guard.loss, LOSS_STEPS);
    char good[PATH_SIZE];
    progress_flush();
    if (!trainer_state_finite(c->state)) {
        if (status == EXIT_DONE) checkpointer_log_not_finite(c, good);
        else checkpointer_find_good(c, good);
        warn_not_finite(c->state->step, good);
        return status == EXIT_DONE ? EXIT_FAILED : status;
    }
    if (last > fmin(start_loss, untrained) + 1) warn_loss_rose(last, start_loss, untrained);
    return status;
}
