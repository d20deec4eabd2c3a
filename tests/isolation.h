/*
isolation.h: runs cases in a child process, so that a case that ends its process is one failing case.

CHECK ends the process, and after some errors no CUDA call of a process succeeds. Therefore the parent, which never uses
the device, starts a new child after a case that failed. Parent and child share one page: the index of the running case,
and the counts. SIGALRM ends a case that takes too long: a kernel that waits for ever on a device, or a loop.
*/
#pragma once
#include "harness.h"
#include <sys/mman.h>
#include <sys/prctl.h>

// The longest that a case of the CUDA operations may take. The emulation of kernels is slow.
#ifdef CUDA_ON_CPU
enum { CASE_SECONDS = 600 };
#else
enum { CASE_SECONDS = 20 };
#endif

typedef struct {
    volatile int at; // the running case; -1: none yet; the number of cases: all have run
    TestCounts counts;
} IsolatedProgress;

typedef struct {
    int count, seconds;                               // cases; the longest that one may take
    void (*open)(void);                               // prepares a child for its cases
    void (*run)(int i, TestCounts *counts);           // runs a case and prints its line
    void (*describe)(int i, char *line, size_t size); // writes the line of a case that did not
} IsolatedCases;

static inline void isolated_child(const IsolatedCases *cases, int first, IsolatedProgress *shared) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    cases->open();
    for (int i = first; i < cases->count; i++) {
        shared->at = i;
        alarm((unsigned)cases->seconds);
        cases->run(i, &shared->counts);
    }
    alarm(0);
    shared->at = cases->count;
    exit(EXIT_DONE);
}

static inline TestCounts run_isolated(const IsolatedCases *cases) {
    IsolatedProgress *shared =
        (IsolatedProgress *)mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED, "no memory for the progress of the cases: %s", strerror(errno));
    memset(shared, 0, sizeof(*shared));
    for (int first = 0; first < cases->count;) {
        int status = 0;
        char line[512] = "the end of the process, after the last case";
        fflush(NULL);
        shared->at = -1;
        pid_t child = fork();
        CHECK(child >= 0, "cannot start a process for the cases: %s", strerror(errno));
        if (child == 0) isolated_child(cases, first, shared);
        CHECK(waitpid(child, &status, 0) == child, "cannot wait for the process of the cases: %s", strerror(errno));
        bool ended = WIFEXITED(status) && WEXITSTATUS(status) == EXIT_DONE && shared->at == cases->count;
        first = shared->at + 1;
        if (ended) break;
        CHECK(shared->at >= 0, "the process of the cases ended before the first case: the device cannot be used");
        if (shared->at < cases->count) cases->describe(shared->at, line, sizeof(line));
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
            printf("FAIL %s: it took more than %d s\n", line, cases->seconds);
        else
            printf("FAIL %s: its process ended, %s %d\n", line, WIFSIGNALED(status) ? "signal" : "exit status",
                   WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        shared->counts.failed++;
    }
    TestCounts counts = shared->counts;
    munmap(shared, sizeof(*shared));
    return counts;
}
