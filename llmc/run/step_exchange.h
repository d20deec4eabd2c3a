/*
step_exchange.h: one exchange per step of all that every rank must know: all compute the same from the same numbers.

  step_exchange_count(plan)             numbers of one rank; `gathered` has room for all ranks and one more
  step_exchange(state, self, gathered)   also sets state->squares. Called by all ranks
*/
#pragma once
#include "../comm/comm.h"
#include "../model/state.h"

typedef struct {
    double loss; // summed over rows
    int signal;  // a signal that a rank received; 0: none
    bool due;    // a checkpoint is due, by the clock of rank 0
    int stage;   // the lowest stage of the checkpoint that is being written
    bool unread; // a rank could not read its data
} StepExchange;

static inline size_t step_exchange_count(const ModelPlan *plan) {
    return (size_t)(AGREED_NUMBERS + plan->sharding.count);
}

static inline StepExchange step_exchange(ModelState *s, StepExchange self, double *gathered) {
    int pieces = s->plan->sharding.ranks, count = s->plan->sharding.count; // the pieces of every group are equal
    size_t width = step_exchange_count(s->plan);
    double *all = gathered + width;
    gathered[0] = self.loss, gathered[1] = self.signal, gathered[2] = self.due, gathered[3] = self.stage;
    gathered[4] = self.unread;
    rank_squares(s, gathered + AGREED_NUMBERS);
    comm_gather(all, gathered, width * sizeof(double));
    StepExchange agreed = {0, 0, all[2] != 0, INT_MAX, false};
    for (int q = 0; q < comm_ranks(); q++) {
        const double *theirs = all + q * width;
        agreed.loss += theirs[0];
        agreed.signal = max_int(agreed.signal, (int)theirs[1]);
        agreed.stage = min_int(agreed.stage, (int)theirs[3]);
        agreed.unread = agreed.unread || theirs[4] != 0;
        for (int b = 0; b < count && q < pieces; b++) s->grad_square_sums[b * pieces + q] = theirs[AGREED_NUMBERS + b];
    }
    return agreed;
}
