/*
attention_choice.h: measured times of attention by cuDNN and the built-in kernels, for --attention-kernel auto.

  rows        dev/gpu_check/attention_choice.py writes them from the results of dev/gpu_check.sh (part `attention`):
              full causal attention of a layer, both kernels in turns in one run
  signals     0: attention. Otherwise signal heads and a noise head, computed together (diff_attention); cuDNN's times
              include diff_combine. Since the two kernels keep different tensors, one of them computes both directions,
              and the sum of the times decides
  lookup      the row with this device and these head widths whose T is nearest
  unmeasured  devices without a row, windows and documents: cuDNN where it supports the shape
*/
#pragma once
#include "../../cuda/device_peak.h"

typedef struct {
    const char *device;                // the name of a row of device_peaks
    int signals, D, DV, T;             // signals: heads that share a noise head
    bool deterministic;                // the backward
    double cudnn_ms[2], builtin_ms[2]; // forward, backward
} AttentionTimes;

static const AttentionTimes attention_measured[] = {
    // rows: begin rows: end
    {NULL, 0, 0, 0, 0, false, {0, 0}, {0, 0}},
};
static const AttentionTimes *attention_times = attention_measured; // tests have rows of their own

// How many times as fast as cuDNN the built-in kernels are; 0: not measured. gpu may be NULL.
static inline double attention_builtin_speed(const DevicePeak *gpu, int signals, int D, int DV, int T,
                                             bool deterministic, bool backward) {
    const AttentionTimes *best = NULL;
    double distance = INFINITY;
    for (const AttentionTimes *row = attention_times; gpu && row->device; row++) {
        double apart = fabs(log((double)T / row->T));
        bool same = strcmp(row->device, gpu->name) == 0 && row->signals == signals && row->D == D && row->DV == DV &&
                    row->deterministic == deterministic;
        if (same && apart < distance) best = row, distance = apart;
    }
    if (!best) return 0;
    if (signals) return (best->cudnn_ms[0] + best->cudnn_ms[1]) / (best->builtin_ms[0] + best->builtin_ms[1]);
    return best->cudnn_ms[backward] / best->builtin_ms[backward];
}
