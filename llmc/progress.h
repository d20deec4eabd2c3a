/*
progress.h: the line of a training step that a person reads.

On a terminal the line is rewritten in place and kept about every fortieth of the run; elsewhere every
step is a line. Other output calls progress_break first, and progress_flush instead of fflush.
*/
#ifndef LLMC_PROGRESS_H
#define LLMC_PROGRESS_H
#include "common.h"

static struct {
    bool open; // the terminal's cursor is behind a line that may be rewritten
} progress;

static inline void progress_break(void) {
    if (progress.open) printf("\n");
    progress.open = false;
}

// Writes out what was printed. When nobody can read it any more (`| head`, a closed terminal), says so once and goes
// on without: a run is not lost for its progress lines. Requires that SIGPIPE is ignored. Any other failure, such as a
// full disk, is left to the end of the program.
static inline void progress_flush(void) {
    struct pollfd out = {STDOUT_FILENO, 0, 0};
    if (fflush(stdout) == 0 && !ferror(stdout)) return;
    if (poll(&out, 1, 0) != 1 || !(out.revents & (POLLERR | POLLHUP))) return;
    CHECK(freopen("/dev/null", "w", stdout) != NULL, "cannot open /dev/null: %s", strerror(errno));
    warn("stdout was closed by its reader; training goes on and prints nothing more to it");
}

// 5.2s, 3m05s, 2h07m, 4d03h
static inline void format_duration(char *out, size_t size, double seconds) {
    long long s = (long long)(seconds + 0.5);
    if (!(seconds >= 0 && seconds < 1e10)) snprintf(out, size, "?");
    else if (seconds < 60) snprintf(out, size, "%.1fs", seconds);
    else if (s < 3600) snprintf(out, size, "%lldm%02llds", s / 60, s % 60);
    else if (s < 86400) snprintf(out, size, "%lldh%02lldm", s / 3600, s % 3600 / 60);
    else snprintf(out, size, "%lldd%02lldh", s / 86400, s % 86400 / 3600);
}

// 1234 -> 1.23k: three digits and a factor of 1000
static inline void format_count(char *out, size_t size, double x) {
    static const char *const units[] = {"", "k", "M", "G", "T", "P", "E"};
    int u = 0;
    for (; x >= 999.5 && u < 6; u++) x /= 1000;
    snprintf(out, size,
             u == 0 && x == floor(x) ? "%.0f%s"
             : x < 9.995             ? "%.2f%s"
             : x < 99.95             ? "%.1f%s"
                                     : "%.0f%s",
             x, units[u]);
}

// share: of the measured peak, 0 .. 1, or negative when that is not known
static inline void progress_step(int64_t step, int64_t steps, double loss, double grad_norm, double lr,
                                 double tokens_per_s, double share, double seconds_left) {
    char rate[32], left[32], peak[32] = "";
    format_count(rate, sizeof(rate), tokens_per_s);
    format_duration(left, sizeof(left), seconds_left);
    if (share >= 0) snprintf(peak, sizeof(peak), " | %3.0f%% of peak", 100 * share);
    int width = snprintf(NULL, 0, "%" PRId64, steps);
    bool terminal = isatty(STDOUT_FILENO);
    int64_t stride = steps / 40 > 1 ? steps / 40 : 1;
    if (terminal) printf("\r\033[K");
    printf("step %*" PRId64 "/%" PRId64 " | loss %7.4f | norm %7.3f | lr %.2e | %s tok/s%s | %s left", width, step,
           steps, loss, grad_norm, lr, rate, peak, left);
    progress.open = terminal;
    if (!terminal || step % stride == 0 || step == steps) {
        printf("\n");
        progress.open = false;
    }
    progress_flush();
}
#endif
