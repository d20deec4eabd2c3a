/*
parts.h: sums in double over a fixed number of parts, so that they do not depend on the number of threads.
*/
#pragma once
#include "operations.h"

enum { STATS_PARTS = 64 };

// Where part p of `count` elements begins.
static inline size_t part_begin(size_t count, int p) { return count * p / STATS_PARTS; }
static inline double parts_sum(const double *parts) {
    double sum = 0;
    for (int p = 0; p < STATS_PARTS; p++) sum += parts[p];
    return sum;
}
