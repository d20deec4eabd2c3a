/*
schedule.h: the learning rate of an update.

  steps count from 1; floor = lr * min_lr_ratio
  warmup     step <= warmup:  lr * step / warmup, so step `warmup` has exactly lr
  after it   with p from 0 at the start of the decay to 1 at step `steps`, which has exactly the floor:
    cosine   floor + (lr - floor) * (1 + cos(pi p)) / 2         the decay starts at step `warmup`
    linear   floor + (lr - floor) * (1 - p)                     the decay starts at step `warmup`
    wsd      lr, then a linear decay over the last decay_steps steps   (warmup, stable, decay); also named wsd-linear
    wsd-sqrt as wsd, with the decay floor + (lr - floor) * (1 - sqrt(p))
    constant lr
  decay_steps 0: 20% of `steps`, rounded up. The decay starts after the warmup at the earliest. With warmup == steps
  there is no decay.
*/
#pragma once
#include "../base/common.h"

typedef enum {
    SCHEDULE_COSINE,
    SCHEDULE_LINEAR,
    SCHEDULE_WSD,
    SCHEDULE_WSD_LINEAR, // until options_derive
    SCHEDULE_WSD_SQRT,
    SCHEDULE_CONSTANT,
    SCHEDULE_COUNT
} Schedule;
static const char *const schedule_names[SCHEDULE_COUNT] = {"cosine",     "linear",   "wsd",
                                                           "wsd-linear", "wsd-sqrt", "constant"}; // in enum order
static inline bool schedule_is_wsd(int kind) { return kind >= SCHEDULE_WSD && kind <= SCHEDULE_WSD_SQRT; }

typedef struct {
    Schedule kind;
    int64_t steps, warmup, decay_steps;
    double lr, min_lr_ratio;
} LearningRate;

// The last step before the decay; without a decay, `steps`.
static inline int64_t schedule_decay_start(const LearningRate *r) {
    if (r->kind == SCHEDULE_CONSTANT) return r->steps;
    if (!schedule_is_wsd(r->kind)) return r->warmup;
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
    double above =
        r->kind == SCHEDULE_COSINE ? 0.5 * (1.0 + cos(M_PI * p)) : 1.0 - (r->kind == SCHEDULE_WSD_SQRT ? sqrt(p) : p);
    return floor_lr + (r->lr - floor_lr) * above;
}
