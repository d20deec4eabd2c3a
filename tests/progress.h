/*
progress.h: the width of the line of a step. tests/programs/test_progress.py tests what the program prints.
*/
#pragma once
#include "../llmc/log/progress.h"
#include "harness.h"

static void test_progress_width(void) {
    char line[PROGRESS_LINE_SIZE], whole[PROGRESS_LINE_SIZE];
    for (int columns = 0; columns <= 120; columns++) {
        char fields[PROGRESS_FIELDS][PROGRESS_FIELD_SIZE] = {"step  12345/1000000", "loss 10.1234", "norm   0.867",
                                                             "lr 2.64e-03",         "9.95k tok/s",  " 48% of peak",
                                                             "12h17m left"};
        progress_join(columns ? line : whole, fields, columns);
        if (!columns) continue;
        EXPECT(strlen(line) < (size_t)columns, "%d columns: '%s'", columns, line);
        EXPECT(columns <= 20 || strncmp(line, "step  12345/1000000", 19) == 0, "%d columns: '%s'", columns, line);
        const char *last = strrchr(line, '|') ? strrchr(line, '|') : line, *field = strstr(whole, last);
        size_t whole_field = field ? strcspn(field + 1, "|") : 0; // with the space before the next one
        EXPECT(columns <= 36 || whole_field + 1 - (strlen(field) > strlen(last)) == strlen(last),
               "%d columns: the last field is cut: '%s'", columns, line);
        EXPECT(columns < 80 || strstr(line, "| loss 10.1234 | "), "%d columns: '%s'", columns, line);
        EXPECT((size_t)columns <= strlen(whole) || strcmp(line, whole) == 0, "%d columns: '%s'", columns, line);
    }
    EXPECT(strcmp(whole,
                  "step  12345/1000000 | loss 10.1234 | norm   0.867 | lr 2.64e-03 | 9.95k tok/s |  48% of peak | "
                  "12h17m left") == 0,
           "'%s'", whole);
}

static void test_recent_steps(void) {
    RecentSteps r = {0, 0};
    EXPECT(recent_steps_mean(&r, 2) == 2 && recent_steps_mean(&r, 4) == 3, "the mean of two steps is %g", r.mean);
    for (int i = 0; i < 998; i++) recent_steps_mean(&r, 3);
    for (int i = 0; i < 500; i++) recent_steps_mean(&r, 8);
    EXPECT(r.count == 1500 && r.mean > 7.9, "after 500 steps of 8 seconds the mean is %g", r.mean);
}

static const Test progress_tests[] = {
    {"the time left follows the speed of the last steps", test_recent_steps},
    {"a line of progress is narrower than the terminal", test_progress_width},
};
