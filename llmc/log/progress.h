/*
progress.h: the line that stdout shows for a training step.

On a terminal the line is rewritten in place, and a line is kept for about every fortieth of the run. A line wider than
the terminal could not be rewritten, so the least important fields are dropped. Elsewhere every step is a line without
control sequences; this includes processes started by mpirun and srun, whose terminal may end in a file. Other output
calls progress_break first, and progress_flush instead of fflush.
*/
#pragma once
#include "../comm/comm.h"
#include <sys/ioctl.h>

static struct {
    bool open; // the cursor is at the end of a line that may be rewritten
} progress;

static inline void progress_break(void) {
    if (progress.open) printf("\n");
    progress.open = false;
}

// Flushes stdout. When its reader has closed it (`| head`, a closed terminal), warns once and discards further output,
// so that training continues. Requires that SIGPIPE is ignored. Other failures, such as a full disk, end the program
// after the run.
static inline void progress_flush(void) {
    struct pollfd out = {STDOUT_FILENO, 0, 0};
    if (fflush(stdout) == 0 && !ferror(stdout)) return;
    if (poll(&out, 1, 0) != 1 || !(out.revents & (POLLERR | POLLHUP))) return;
    stdout_discard();
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

// The mean time of a step, by which the time left is estimated: of all steps up to the 100th, then an exponential mean,
// since a run may become slower or faster.
typedef struct {
    int64_t count;
    double mean;
} RecentSteps;
static inline double recent_steps_mean(RecentSteps *r, double seconds) {
    r->count++;
    return r->mean += (seconds - r->mean) / (double)min_size((size_t)r->count, 100);
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

enum { PROGRESS_FIELDS = 7, PROGRESS_FIELD_SIZE = 64, PROGRESS_LINE_SIZE = 512 };

// Columns of the terminal; 0: stdout is not a terminal on which lines can be rewritten.
static inline int progress_columns(void) {
    struct winsize size;
    const char *kind = getenv("TERM");
    if (launch_has_launcher() || !isatty(STDOUT_FILENO) || !kind || strcmp(kind, "dumb") == 0) return 0;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// Joins the fields. While the line has `columns` or more characters (0: no limit), drops the fields of `dropped` one by
// one; cuts what is still too long.
static inline void progress_join(char line[PROGRESS_LINE_SIZE], char fields[][PROGRESS_FIELD_SIZE], int columns) {
    static const int dropped[] = {3, 5, 2, 6, 4}; // learning rate, share of the peak, norm, time left, tokens/s
    for (int d = 0;; d++) {
        int length = 0;
        for (int i = 0; i < PROGRESS_FIELDS; i++)
            if (fields[i][0])
                length +=
                    snprintf(line + length, (size_t)(PROGRESS_LINE_SIZE - length), "%s%s", i ? " | " : "", fields[i]);
        if (!columns || length < columns) return;
        if (d == (int)(sizeof(dropped) / sizeof(dropped[0]))) break;
        fields[dropped[d]][0] = 0;
    }
    line[columns - 1] = 0;
}

// share: the share of `of`, the peak or a measured rate; NaN if it is unknown
static inline void progress_step(int64_t step, int64_t steps, double loss, double grad_norm, double lr,
                                 double tokens_per_s, double share, const char *of, double seconds_left) {
    char fields[PROGRESS_FIELDS][PROGRESS_FIELD_SIZE] = {{0}}, line[PROGRESS_LINE_SIZE], rate[32], left[32];
    int width = snprintf(NULL, 0, "%" PRId64, steps), columns = progress_columns();
    int64_t stride = steps / 40 > 1 ? steps / 40 : 1;
    format_count(rate, sizeof(rate), tokens_per_s);
    format_duration(left, sizeof(left), seconds_left);
    FORMAT(fields[0], "step %*" PRId64 "/%" PRId64, width, step, steps);
    FORMAT(fields[1], "loss %7.4f", signless_nan(loss));
    FORMAT(fields[2], "norm %7.3f", signless_nan(grad_norm));
    FORMAT(fields[3], "lr %.2e", lr);
    FORMAT(fields[4], "%s tok/s", rate);
    if (share >= 0) FORMAT(fields[5], "%3.0f%% of %s", 100 * share, of);
    FORMAT(fields[6], "%s left", left);
    progress_join(line, fields, columns);
    printf("%s%s", columns ? "\r\033[K" : "", line);
    progress.open = columns > 0;
    if (!columns || step % stride == 0 || step == steps) {
        printf("\n");
        progress.open = false;
    }
    progress_flush();
}
