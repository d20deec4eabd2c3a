/*
head_groups.h: how query heads form output heads by subtraction.

  o = a_signal - s(l) a_noise   for each output head, in diff_combine.h
*/
#pragma once
#include "../base/common.h"

typedef enum { S_LINEAR, S_SIGMOID } Factor; // s as a function of l

// The order of query heads: blocks of `signals` signal heads, then `noise` noise heads. Every signal head makes one
// output head; signals/noise consecutive signal heads share a noise head. Without noise heads both numbers are 0.
typedef struct {
    int signals, noise;
} HeadGroups;
// The query heads of output head h.
HOST_DEVICE int signal_head(HeadGroups g, int h) {
    return g.noise ? h / g.signals * (g.signals + g.noise) + h % g.signals : h;
}
HOST_DEVICE int noise_head(HeadGroups g, int h) {
    return h / g.signals * (g.signals + g.noise) + g.signals + h % g.signals / (g.signals / g.noise);
}

static inline int output_heads(HeadGroups g, int query_heads) {
    return g.noise ? query_heads / (g.signals + g.noise) * g.signals : query_heads;
}

// s(l), for statistics; operations compute it in their own precision
HOST_DEVICE double factor_of(double l, Factor factor) { return factor == S_SIGMOID ? 1 / (1 + exp(-l)) : l; }
