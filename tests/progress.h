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

static void test_recent_mean(void) {
    double mean = recent_mean(recent_mean(0, 1, 2), 2, 4);
    EXPECT(mean == 3, "the mean of two steps is %g", mean);
    for (int64_t count = 1000; count < 1500; count++) mean = recent_mean(mean, count, 8);
    EXPECT(mean > 7.9, "after 500 steps of 8 seconds the mean is %g", mean);
}

static const Test progress_tests[] = {
    {"the time left follows the speed of the last steps", test_recent_mean},
    {"a line of progress is narrower than the terminal", test_progress_width},
};
