/*
start_parts.h: how long each part of a start takes, for run.json. The start ends when run.json is written; the time of
the first step is in the log.

  const char *start_part(name)    begins a part, and returns the part that it interrupts or ends; seconds of a name
                                  add up
*/
#pragma once
#include "common.h"

enum { START_PARTS = 16 };

static struct {
    const char *names[START_PARTS];
    double seconds[START_PARTS], since;
    int count, current;
} start_parts;

static inline const char *start_part(const char *name) {
    double now = now_seconds();
    const char *before = start_parts.count ? start_parts.names[start_parts.current] : name;
    int i = 0;
    if (start_parts.count) start_parts.seconds[start_parts.current] += now - start_parts.since;
    while (i < start_parts.count && strcmp(start_parts.names[i], name) != 0) i++;
    assert(i < START_PARTS);
    start_parts.names[i] = name;
    start_parts.current = i;
    if (i == start_parts.count) start_parts.count++;
    start_parts.since = now;
    return before;
}
