/*
trial.h: --minutes M: the number of updates that take M minutes on this machine, from a trial of 5 to 10 seconds.

  updates   The first TRIAL_WARM_UP are not measured. The time of an update is the median, on the clock of rank 0.
  others    The work that the options request between updates: a validation before the first update, after the last one
            and every --val-every; samples; checkpoints. Only the bytes of checkpoints are known: they are assumed to be
            written at CHECKPOINT_RATE.
  result    An estimate, at least TRIAL_LEAST_STEPS: the machine may be slower later.

  bool    trial_add(t, seconds)     records the next update; returns whether the trial ends with it
  double  trial_update(t)           seconds of an update
  double  trial_window(m, inputs, targets, starts)   seconds of a window of a validation on all ranks; --eval-choices
                                    counts as many windows as its tasks fill
  double  trial_token(generator)    seconds of a token of a sample
  int64_t trial_steps(o, costs)     --steps
*/
#pragma once
#include "../checkpoint/checkpoint.h"
#include "../evaluate/evaluation_model.h"
#include "../evaluate/generation.h"
#include "../options/options_table.h"
#include "../ops/runtime.h"

// The shortest trial in seconds; the longest is twice as long. Tests make it short (tests/small_sizes.h).
#ifndef TRIAL_SECONDS
#define TRIAL_SECONDS 5.0
#endif
enum { TRIAL_WARM_UP = 5, TRIAL_UPDATES = 1000, TRIAL_LEAST_STEPS = 20 };
static const double CHECKPOINT_RATE = 1e9; // bytes per second

typedef struct {
    int count; // number of updates so far
    double measured, seconds[TRIAL_UPDATES];
} Trial;

typedef struct {
    double update, validation, sample, checkpoint; // seconds of one each; 0: the run has none
} TrialCosts;

static inline int trial_measured(const Trial *t) { return max_int(0, t->count - TRIAL_WARM_UP); }

static inline bool trial_add(Trial *t, double seconds) {
    if (t->count++ < TRIAL_WARM_UP) return false;
    t->seconds[trial_measured(t) - 1] = seconds;
    t->measured += seconds;
    bool enough = t->measured >= TRIAL_SECONDS && trial_measured(t) >= TRIAL_LEAST_STEPS;
    return enough || t->measured >= 2 * TRIAL_SECONDS || trial_measured(t) == TRIAL_UPDATES;
}

static inline double trial_update(Trial *t) {
    int n = trial_measured(t);
    assert(n > 0);
    qsort(t->seconds, n, sizeof(double), compare_doubles);
    return (t->seconds[(n - 1) / 2] + t->seconds[n / 2]) / 2;
}

// Times a forward of a batch.
static inline double trial_window(const EvaluationModel *m, const int *inputs, const int *targets, const int *starts) {
    int B = m->plan->B, T = m->plan->T;
    double start = now_seconds();
    m->losses(m->model, inputs, targets, starts, B, T);
    ops_wait();
    return (now_seconds() - start) / (B * comm_ranks());
}

// Times a few tokens.
static inline double trial_token(const Generator *g) {
    enum { TOKENS = 8 };
    int token = 0;
    float *logits = (float *)checked_calloc(g->V, sizeof(float));
    double start = now_seconds();
    g->prefill(g->model, 0, &token, 1, logits);
    for (int i = 1; i < TOKENS; i++) {
        int first = min_int(i, g->T - 1);
        g->decode(g->model, &token, &first, 1, logits);
    }
    free(logits);
    return (now_seconds() - start) / TOKENS;
}

// M minutes = two validations, a checkpoint, the checkpoints of --checkpoint-minutes, and N updates with their shares.
static inline int64_t trial_steps(const Options *o, const TrialCosts *c) {
    double left = 60 * o->minutes - 2 * c->validation - c->checkpoint, each = c->update;
    if (o->val_every) each += c->validation / (double)o->val_every;
    if (o->sample_every) each += c->sample / (double)o->sample_every;
    if (o->checkpoint_every) each += c->checkpoint / (double)o->checkpoint_every;
    if (o->checkpoint_minutes > 0) left -= floor(o->minutes / o->checkpoint_minutes) * c->checkpoint;
    double steps = floor(left / fmax(each, 1e-9));
    return (int64_t)fmin(fmax(steps, TRIAL_LEAST_STEPS), (double)CHECKPOINT_STEP_LIMIT);
}
