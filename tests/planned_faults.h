/*
planned_faults.h: faults that a program under test causes on purpose, chosen by environment variables. The program
defines PLANNED_FAULTS, includes the trainer, then this file. llmc/base/fault_point.h lists the places.

  FAULT=KIND:RANK:STEP[:WHERE]    several, separated by commas
    kill, stop   SIGKILL or SIGSTOP to itself at WHERE: the name of a stage (watchdog.h),
                 or `write`, in the middle of a file of this step's checkpoint
    hang         at WHERE, a stage: the device does not finish what it is given from then on (CUDA on the CPU)
    nan          a gradient of this step is NaN
    spike        a gradient of this step is large
    flip         one bit of the last weight of a tensor changes after the update
    broken       that weight is NaN
    moment       one bit of the last of a tensor's first moments changes after the update; with WHERE `exponent` one of
                 each of the last 16 (a cache line), which makes most small moments 256 times as large
    signal       a SIGTERM arrives before this step reads stop_signal for the WHEREth time (1, 2, ...)
  BUSY=TEXT      directories whose path contains TEXT cannot be removed, as on a network file system where another
                 process has a file open
  SLOW=MS        the first write of tensors to each file takes MS milliseconds longer
  NO_COPY=RANK   this rank gets no memory for the copy of a background checkpoint
  LATE=MS        data from other ranks arrives MS milliseconds later
  EARLY=1        data from other ranks arrives at once: the computation after it waits
*/
#pragma once
#include "../llmc/base/common.h"
#include "../llmc/comm/watchdog.h"

static int fault_number(const char *variable) { return getenv(variable) ? atoi(getenv(variable)) : -1; }
static void fault_sleep(const char *variable) {
    if (getenv(variable)) usleep((useconds_t)(1000 * fault_number(variable)));
}

// Whether FAULT contains KIND:RANK:STEP, or KIND:RANK:STEP:WHERE, of this rank.
static bool fault_is_planned(const char *kind, int64_t step, const char *where) {
    const char *all = getenv("FAULT");
    char wanted[100];
    if (!all) return false;
    FORMAT(wanted, "%s:%d:%" PRId64 "%s%s", kind, watch.rank, step, where ? ":" : "", where ? where : "");
    size_t n = strlen(wanted);
    for (const char *at = all; (at = strstr(at, wanted)) != NULL; at++)
        if ((at == all || at[-1] == ',') && (at[n] == 0 || at[n] == ',')) return true;
    return false;
}

static void fault_at(int64_t step, const char *where) {
    if (fault_is_planned("kill", step, where)) raise(SIGKILL);
    if (fault_is_planned("stop", step, where)) raise(SIGSTOP);
#ifdef CUDA_ON_CPU
    if (fault_is_planned("hang", step, where))
        cuda_on_cpu::on_stream_when(
            main_stream, "a planned fault", [] { return false; }, [] {});
#endif
}

static void fault_write(const char *path) {
    static __thread char slow_path[PATH_SIZE];
    const char *step = strstr(path, "step_");
    if (strcmp(path, slow_path) != 0) fault_sleep("SLOW");
    FORMAT(slow_path, "%s", path);
    if (step) fault_at(strtoll(step + strlen("step_"), NULL, 10), "write");
}

static void fault_gradient(grad_t *dweight, int64_t step) {
    if (fault_is_planned("nan", step, NULL)) dweight[0] = (grad_t)NAN;
    if (fault_is_planned("spike", step, NULL)) dweight[0] = (grad_t)1e4;
}

static void fault_update(floatX *last, int64_t step) {
    static bool done;
    bool broken = fault_is_planned("broken", step, NULL);
    if (done || !(broken || fault_is_planned("flip", step, NULL))) return;
    done = true;
    if (broken) *last = (floatX)NAN;
    else ((unsigned char *)last)[2] ^= 0x10; // high enough that no later rounding hides it
}

static void fault_moment(real *last, int64_t step) {
    static bool done;
    bool exponent = fault_is_planned("moment", step, "exponent");
    if (done || !(exponent || fault_is_planned("moment", step, NULL))) return;
    done = true;
    for (int i = 0; i < 16 && exponent; i++) ((unsigned char *)(last - i))[3] ^= 0x04;
    if (!exponent) ((unsigned char *)last)[2] ^= 0x10;
}

static bool fault_signal(int64_t step) {
    static int64_t last_step, reads;
    char where[24];
    reads = step == last_step ? reads + 1 : 1;
    last_step = step;
    FORMAT(where, "%" PRId64, reads);
    return fault_is_planned("signal", step, where);
}

static bool fault_remove(const char *path) {
    const char *busy = getenv("BUSY");
    if (!busy || !*busy || !strstr(path, busy)) return false;
    errno = EBUSY;
    return true;
}

static bool fault_point(FaultPlace place, void *data, size_t number) {
    int64_t step = WATCH_GET(self.step);
    switch (place) {
    case FAULT_STAGE: fault_at(step, watch_stages[number].name); break;
    case FAULT_GRADIENT: fault_gradient((grad_t *)data, step); break;
    case FAULT_UPDATE: fault_update((floatX *)data + number - 1, step); break;
    case FAULT_MOMENT: fault_moment((real *)data + number - 1, step); break;
    case FAULT_WRITE: fault_write((const char *)data); break;
    case FAULT_REMOVE: return fault_remove((const char *)data);
    case FAULT_COPY: return fault_number("NO_COPY") == watch.rank;
    case FAULT_RECEIVE: fault_sleep("LATE"); break;
    case FAULT_COMPLETE: return fault_number("EARLY") == 1;
    case FAULT_SIGNAL: return fault_signal(step);
    }
    return false;
}
