/*
stop_agreement.h: the ranks agree on a signal during a measurement, so that all abort it before the same batch. They do
so about once a second; the slowest rank determines how many batches that is.

  void stop_agreement_begin(a, signal, gathered)   before a measurement. signal: agreed on, or 0. gathered: room
                                                   for two numbers of each rank
  bool stop_agreement(a)                           before each batch (EvaluationModel.abandons): whether a rank has a
                                                   signal; sets a->signal
  void stop_agree_largest(gathered, values)           values [2] = the largest of all ranks
*/
#pragma once
#include "../comm/comm.h"
#include "stop_signals.h"

typedef struct {
    int signal;       // 0: none
    int period, left; // batches from one agreement to the next; batches left until the next
    double since;     // time of the last agreement, by this rank's clock
    double *gathered;
} StopAgreement;

static inline void stop_agree_largest(double *gathered, double values[2]) {
    comm_gather(gathered, values, 2 * sizeof(double));
    for (int i = 0; i < 2 * comm_ranks(); i++) values[i % 2] = fmax(values[i % 2], gathered[i]);
}

static inline void stop_agreement_begin(StopAgreement *a, int signal, double *gathered) {
    *a = (StopAgreement){signal, 0, 0, now_seconds(), gathered};
}

static inline bool stop_agreement(void *agreement) {
    StopAgreement *a = (StopAgreement *)agreement;
    if (comm_ranks() == 1) a->signal = stop_signal_read();
    if (comm_ranks() == 1 || a->signal || a->left-- > 0) return a->signal != 0;
    double values[2] = {(double)stop_signal_read(), now_seconds() - a->since};
    stop_agree_largest(a->gathered, values);
    a->signal = (int)values[0];
    a->period = max_int(1, min_int(2 * a->period, (int)(a->period / fmax(values[1], 1e-6))));
    a->left = a->period - 1;
    a->since = now_seconds();
    return a->signal != 0;
}
