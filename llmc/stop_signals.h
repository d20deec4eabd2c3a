/*
stop_signals.h: SIGTERM, SIGINT and SIGUSR1 (what schedulers send before they take a machine back) ask a run to
stop after the step that is under way; a second one ends the process at once, with status 1.
*/
#ifndef LLMC_STOP_SIGNALS_H
#define LLMC_STOP_SIGNALS_H
#include "common.h"

static volatile sig_atomic_t stop_signal; // the signal that asked, or 0

static inline void stop_signal_handler(int signal_number) {
    if (stop_signal) {
        static const char text[] = "diffv2: second signal: stopped at once, without a checkpoint of this step\n";
        ssize_t written = write(STDERR_FILENO, text, sizeof(text) - 1);
        (void)written; // nothing more can be done in a handler
        _exit(EXIT_FAILED);
    }
    stop_signal = signal_number;
}

static inline void stop_signals_catch(void) {
    static const int signals[] = {SIGTERM, SIGINT, SIGUSR1};
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = stop_signal_handler;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 3; i++)
        CHECK(sigaction(signals[i], &action, NULL) == 0, "cannot catch signal %d: %s", signals[i], strerror(errno));
}
#endif
