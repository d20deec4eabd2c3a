/*
unread_data.h: the end of a run after a rank could not read training or validation data. The state of the last step is
saved first. The last line says what is wrong, and how a resume reads other data.

  void end_unread(c, loader, changes)   all ranks call it together; loader: training or validation data, after
                                        dataloader_read has failed on a rank
*/
#pragma once
#include "apply_changes.h"
#include "checkpointer.h"

enum { UNREAD_SIZE = PATH_SIZE + 4096 };

// The end of the line. option: the option with which a resume reads other data; or empty.
static inline void unread_advice(char advice[UNREAD_SIZE], const char *out, int64_t step, const char *option) {
    char saved[64] = "";
    if (out && step) FORMAT(saved, "; the state of step %" PRId64 " is saved", step);
    snprintf(advice, UNREAD_SIZE, "%s; restore the shard%s%s%s%s%s", saved, *option ? ", or read other data: " : "",
             *option && out ? "--out " : "", *option && out ? out : "", *option && out ? " --resume " : "", option);
}

static inline void end_unread(Checkpointer *c, DataLoader *l, const AppliedChanges *changes) {
    const Options *o = c->options;
    const TrainerState *s = c->state;
    char option[2048] = "", advice[UNREAD_SIZE];
    progress_break();
    if (c->saved_step != s->step) checkpointer_save(c, false);
    checkpointer_finish(c);
    comm_barrier();
    if (l != c->train) snprintf(option, sizeof(option), "--val-data DATA");
    else if (l->unread && dataloader_moved(l, l->reading) == l->reading)
        changes_past_window(changes, s->step + 1, l->reading - s->next_window, option, sizeof(option));
    unread_advice(advice, o->out, s->step, option);
    if (l->unread) dataloader_fail(l, advice);
    comm_barrier(); // ends when the failed rank ends
}
