/*
schedule.h: the learning rate of an update.

  steps count from 1; floor = lr * min_lr_ratio
  warmup     step <= warmup:  lr * step / warmup, so step `warmup` has exactly lr
  after it   with p from 0 at the start of the decay to 1 at step `steps`, which has exactly the floor:
    cosine   floor + (lr - floor) * (1 + cos(pi p)) / 2         the decay starts at step `warmup`
    linear   floor + (lr - floor) * (1 - p)                     likewise
    wsd      lr, then linear over the last 20% of `steps`       (warmup, stable, decay)
    constant lr
  The 20% are of `steps`, rounded up, and start after the warmup at the earliest. With warmup == steps there is no
  decay.
*/
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H
#include "../base/common.h"

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT, SCHEDULE_COUNT } Schedule;

static const char *const schedule_names[SCHEDULE_COUNT] = {"cosine", "linear", "wsd", "constant"}; // in enum order

static inline double schedule_lr(Schedule kind, int64_t step, int64_t steps, int64_t warmup, double lr,
                                 double min_lr_ratio) {
    assert(step >= 1 && warmup >= 0);
    if (step <= warmup) return lr * ((double)step / (double)warmup);
    int64_t start = warmup; // the last step before the decay
    if (kind == SCHEDULE_WSD) {
        int64_t decay = steps / 5 + (steps % 5 != 0);
        if (steps - decay > start) start = steps - decay;
    }
    if (kind == SCHEDULE_CONSTANT || step <= start) return lr;
    double floor_lr = lr * min_lr_ratio;
    if (step >= steps) return floor_lr;
    double p = (double)(step - start) / (double)(steps - start);
    double above = kind == SCHEDULE_COSINE ? 0.5 * (1.0 + cos(M_PI * p)) : 1.0 - p;
    return floor_lr + (lr - floor_lr) * above;
}
#endif
