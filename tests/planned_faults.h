/*
planned_faults.h: faults that a trainer under test causes on purpose.

  FAULT=KIND:RANK:STEP[:WHERE]    several, separated by commas
    kill, stop   SIGKILL or SIGSTOP to itself at WHERE: the name of a phase (watchdog_peers.h), or "write"

Include before the trainer, whose watch_phase is then the place for them.
*/
#ifndef TESTS_PLANNED_FAULTS_H
#define TESTS_PLANNED_FAULTS_H
#include "../llmc/base/common.h"
#include "../llmc/comm/watchdog.h"

static bool fault_is_of_step(const char *kind, int64_t step, const char *where) {
    const char *all = getenv("FAULT");
    char wanted[100];
    int n = snprintf(wanted, sizeof(wanted), "%s:%d:%" PRId64 "%s%s", kind, watch.rank, step, where ? ":" : "",
                     where ? where : "");
    for (const char *at = all; at && (at = strstr(at, wanted)); at++)
        if ((at == all || at[-1] == ',') && (at[n] == 0 || at[n] == ',')) return true;
    return false;
}

static bool fault_is(const char *kind, const char *where) { return fault_is_of_step(kind, WATCH_GET(step), where); }

static void fault_at(int64_t step, const char *where) {
    if (fault_is_of_step("kill", step, where)) raise(SIGKILL);
    if (fault_is_of_step("stop", step, where)) raise(SIGSTOP);
}

static void faulty_phase(Phase phase) {
    watch_phase(phase);
    fault_at(WATCH_GET(step), phases[phase].name);
}
#endif
