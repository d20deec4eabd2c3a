/*
schedule.h: the learning rate of an update.

  steps count from 1; floor = lr * min_lr_ratio
  warmup     step <= warmup:  lr * step / warmup, so step `warmup` has exactly lr
  after it   with p from 0 at the start of the decay to 1 at step `steps`, which has exactly the floor:
    cosine   floor + (lr - floor) * (1 + cos(pi p)) / 2         the decay starts at step `warmup`
    linear   floor + (lr - floor) * (1 - p)                     likewise
    wsd      lr, then a decay over the last decay_steps steps   (warmup, stable, decay)
             its shape: linear, cosine, or 1-sqrt: floor + (lr - floor) * (1 - sqrt(p))
    constant lr
  decay_steps 0: 20% of `steps`, rounded up. The decay starts after the warmup at the earliest. With warmup == steps
  there is no decay.
*/
#pragma once
#include "../base/common.h"

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT, SCHEDULE_COUNT } Schedule;
static const char *const schedule_names[SCHEDULE_COUNT] = {"cosine", "linear", "wsd", "constant"}; // in enum order

typedef enum { DECAY_LINEAR, DECAY_SQRT, DECAY_COSINE, DECAY_SHAPE_COUNT } DecayShape;
static const char *const decay_shape_names[DECAY_SHAPE_COUNT] = {"linear", "1-sqrt", "cosine"}; // in enum order

typedef struct {
    Schedule kind;
    DecayShape shape; // of wsd
    int64_t steps, warmup, decay_steps;
    double lr, min_lr_ratio;
} LearningRate;

// The last step before the decay; `steps` without one.
static inline int64_t schedule_decay_start(const LearningRate *r) {
    if (r->kind == SCHEDULE_CONSTANT) return r->steps;
    if (r->kind != SCHEDULE_WSD) return r->warmup;
    int64_t decay = r->decay_steps ? r->decay_steps : r->steps / 5 + (r->steps % 5 != 0);
    return r->steps - decay > r->warmup ? r->steps - decay : r->warmup;
}

static inline double schedule_lr(const LearningRate *r, int64_t step) {
    assert(step >= 1 && r->warmup >= 0);
    if (step <= r->warmup) return r->lr * ((double)step / (double)r->warmup);
    int64_t start = schedule_decay_start(r);
    if (r->kind == SCHEDULE_CONSTANT || step <= start) return r->lr;
    double floor_lr = r->lr * r->min_lr_ratio;
    if (step >= r->steps) return floor_lr;
    double p = (double)(step - start) / (double)(r->steps - start);
    bool own = r->kind == SCHEDULE_WSD, cosine = own ? r->shape == DECAY_COSINE : r->kind == SCHEDULE_COSINE;
    double above = cosine ? 0.5 * (1.0 + cos(M_PI * p)) : 1.0 - (own && r->shape == DECAY_SQRT ? sqrt(p) : p);
    return floor_lr + (r->lr - floor_lr) * above;
}
