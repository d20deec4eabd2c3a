/*
stop_signals.h: SIGTERM, SIGINT, SIGUSR1 (which schedulers send before they reclaim a machine) and SIGHUP (the terminal
is closed) stop a run after the current step, or the current batch of a measurement. A second signal ends the process at
once, with status 1. Signals within half a second of the first count as the same request: launchers forward signals that
a scheduler also sends to every process. SIGHUP keeps its disposition if it was ignored at the start of the program, as
with nohup.

  void stop_signals_block(void)          at the start of main, before there are other threads
  void stop_signals_end(line)            from here on they end the program at once with EXIT_SIGNALLED and this line,
                                         on all ranks: there is nothing to save. Before, they have their default actions
  void stop_signals_catch(notice)        from here on they stop the run.
                                         notice: a line for stderr, printed when the first one arrives; NULL: none
  bool stop_signal_arrived(void)         whether one has
  void interrupts_catch(prompt)          from here on SIGINT ends a continuation (--interactive): interrupt_arrived().
                                         prompt: for stdout, printed when one arrives while the program waits for input
  void interrupts_at_prompt(waits)       the program begins, or ends, to wait for input

  Threads that compute run no handler: the signals are blocked in them, and a dedicated thread waits for signals.
  oneDNN's fp32 products move the stack pointer into a buffer on the heap, and a handler that interrupts one corrupts
  the heap (observed with version 2.6.3, also with an alternate signal stack).
*/
#pragma once
#include "../comm/watchdog.h"

static volatile sig_atomic_t stop_signal; // the signal that requested the stop, or 0; written once

enum { STOP_SIGNAL_COUNT = 4 };
static const int stop_signals[STOP_SIGNAL_COUNT] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
static volatile sig_atomic_t stop_signals_caught; // stop_signals_catch() was called
static bool stop_signals_sighup_ignored;          // at the start of the program
static const char *stop_signals_notice, *stop_signals_line;

static inline int stop_signal_read(void) {
    if (fault_point(FAULT_SIGNAL, NULL, 0)) stop_signal = SIGTERM;
    return stop_signal;
}
static inline bool stop_signal_arrived(void) { return stop_signal_read() != 0; }

static inline sigset_t stop_signal_set(void) {
    sigset_t set;
    sigemptyset(&set);
    for (int i = 0; i < STOP_SIGNAL_COUNT; i++)
        if (stop_signals[i] != SIGHUP || !stop_signals_sighup_ignored) sigaddset(&set, stop_signals[i]);
    return set;
}

// Without stdio, which a handler must not use.
static inline void stop_signal_print(const char *line) {
    ssize_t written = write(STDERR_FILENO, line, strlen(line));
    (void)written; // nothing more can be done
}

// Called in the dedicated thread, or as a handler in a thread that a library started before main.
static inline void stop_signal_take(int signal_number) {
    static struct timespec first;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!stop_signal) {
        first = now;
        stop_signal = signal_number;
        if (stop_signals_notice) stop_signal_print(stop_signals_notice);
    } else if ((double)(now.tv_sec - first.tv_sec) + 1e-9 * (double)(now.tv_nsec - first.tv_nsec) > 0.5) {
        stop_signal_print("diffv2: second signal: ending at once, without a checkpoint of this step\n");
        _exit(EXIT_FAILED);
    }
}

static const char *interrupts_prompt; // NULL: SIGINT has its default action
static volatile sig_atomic_t interrupts_waiting, interrupted;

static inline void interrupt_take(int signal_number) {
    (void)signal_number;
    interrupted = 1;
    if (interrupts_waiting && write(STDOUT_FILENO, interrupts_prompt, strlen(interrupts_prompt)) < 0) interrupted = 2;
}

static inline void interrupts_catch(const char *prompt) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = interrupt_take;
    action.sa_flags = SA_RESTART;
    interrupts_prompt = prompt;
    CHECK(sigaction(SIGINT, &action, NULL) == 0, "cannot catch signal %d: %s", SIGINT, strerror(errno));
}

static inline void interrupts_at_prompt(bool waits) {
    interrupted = 0;
    interrupts_waiting = waits;
}
static inline bool interrupt_arrived(void) { return interrupted != 0; }

static inline void *stop_signals_thread(void *unused) {
    sigset_t set = stop_signal_set();
    for (int signal_number = 0; sigwait(&set, &signal_number) == 0;) {
        struct sigaction action;
        if (stop_signals_caught) stop_signal_take(signal_number);
        else if (interrupts_prompt && signal_number == SIGINT) interrupt_take(signal_number);
        else if (sigaction(signal_number, NULL, &action) == 0 && action.sa_handler != SIG_IGN) {
            __atomic_store_n(&ended_by_signal, true, __ATOMIC_SEQ_CST);
            if (failure_hook) failure_hook(); // removes an unfinished output
            if (stop_signals_line) watch_end_all(EXIT_SIGNALLED, stop_signals_line);
            // its default action
            pthread_sigmask(SIG_UNBLOCK, &set, NULL);
            raise(signal_number);
            pthread_sigmask(SIG_BLOCK, &set, NULL);
        }
    }
    return unused;
}

static inline void stop_signals_block(void) {
    pthread_t thread;
    struct sigaction hangup;
    stop_signals_sighup_ignored = sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler == SIG_IGN;
    sigset_t set = stop_signal_set();
    thread_start(&thread, stop_signals_thread, NULL, "that waits for signals");
    pthread_detach(thread);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

static inline void stop_signals_end(const char *line) { stop_signals_line = line; }

static inline void stop_signals_catch(const char *notice) {
    struct sigaction action;
    sigset_t set = stop_signal_set();
    memset(&action, 0, sizeof(action));
    action.sa_handler =
        stop_signal_take; // even if the parent process ignores them, as a shell does for background jobs
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    stop_signals_notice = notice;
    stop_signals_caught = 1;
    for (int i = 0; i < STOP_SIGNAL_COUNT; i++)
        CHECK(!sigismember(&set, stop_signals[i]) || sigaction(stop_signals[i], &action, NULL) == 0,
              "cannot catch signal %d: %s", stop_signals[i], strerror(errno));
}
// The notice of a run with one process. Several ranks have no notice: a launcher that ends a job after the failure of a
// rank also sends a signal, and then the step is not finished.
static inline const char *stop_notice(const char *out) {
    return out ? "diffv2: signal: the run stops after the current step and saves a checkpoint; a second signal ends it "
                 "at "
                 "once\n"
               : "diffv2: signal: the run stops after the current step and, without --out, saves nothing; a second "
                 "signal ends it at once\n";
}
