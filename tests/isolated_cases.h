/*
isolated_cases.h: a case that ends its process, or takes too long, is one failure (isolation.h runs the tests on
devices).
*/
#pragma once
#include "isolation.h"

static void planned_open(void) {}
static void planned_describe(int i, char *line, size_t size) { snprintf(line, size, "case %d", i); }
static void planned_run(int i, TestCounts *counts) {
    CHECK(i != 1, "a shape that a library refuses");
    if (i == 3) raise(SIGKILL);
    while (i == 5) pause(); // as for a kernel that does not end
    counts->passed++;
}

// Runs seven cases, of which the second exits, the fourth is killed and the sixth does not end, with their output in
// r->out and r->err.
static TestCounts run_planned(ProgramResult *r) {
    const IsolatedCases cases = {7, 1, planned_open, planned_run, planned_describe};
    TestDirectory d = test_make_directory();
    const char *names[] = {"out", "err"};
    int saved[2];
    char path[2][600];
    fflush(NULL);
    for (int i = 0; i < 2; i++) {
        FORMAT(path[i], "%s/%s", d.path, names[i]);
        saved[i] = dup(1 + i);
        int file = open(path[i], O_WRONLY | O_CREAT, 0600);
        CHECK(saved[i] >= 0 && file >= 0 && dup2(file, 1 + i) >= 0, "cannot redirect into %s", path[i]);
        close(file);
    }
    TestCounts counts = run_isolated(&cases);
    fflush(NULL);
    for (int i = 0; i < 2; i++) {
        CHECK(dup2(saved[i], 1 + i) >= 0, "cannot restore the output: %s", strerror(errno));
        close(saved[i]);
    }
    test_read_file(path[0], r->out, sizeof(r->out));
    test_read_file(path[1], r->err, sizeof(r->err));
    return counts;
}

static void test_isolated_cases(void) {
    ProgramResult r;
    TestCounts counts = run_planned(&r);
    EXPECT(counts.passed == 4 && counts.failed == 3, "%d passed, %d failed", counts.passed, counts.failed);
    EXPECT(strcmp(r.out, "FAIL case 1: its process ended, exit status 1\n"
                         "FAIL case 3: its process ended, signal 9\n"
                         "FAIL case 5: it took more than 1 s\n") == 0,
           "stdout: %s", r.out);
    EXPECT(strcmp(r.err, "diffv2: a shape that a library refuses\n") == 0, "stderr: %s", r.err);
}

static const Test isolated_tests[] = {
    {"a case that ends its process or takes too long is one failure, and later cases run", test_isolated_cases},
};
