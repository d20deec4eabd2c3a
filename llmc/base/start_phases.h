/*
start_phases.h: how long each phase of a start takes, for run.json. The start ends when run.json is written; the time of
the first step is in the log.

  const char *start_phase(name)   begins a phase, and returns the phase that it interrupts or ends; seconds of a name
                                  add up
*/
#pragma once
#include "common.h"

enum { START_PHASES = 16 };

static struct {
    const char *names[START_PHASES];
    double seconds[START_PHASES], since;
    int count, current;
} start_phases;

static inline const char *start_phase(const char *name) {
    double now = now_seconds();
    const char *before = start_phases.count ? start_phases.names[start_phases.current] : name;
    int i = 0;
    if (start_phases.count) start_phases.seconds[start_phases.current] += now - start_phases.since;
    while (i < start_phases.count && strcmp(start_phases.names[i], name) != 0) i++;
    assert(i < START_PHASES);
    start_phases.names[i] = name;
    start_phases.current = i;
    if (i == start_phases.count) start_phases.count++;
    start_phases.since = now;
    return before;
}
