/*
test_main.h: a test program: it runs the tests of its tables that the arguments select, and prints a line of each.

  PROGRAM                        all tests; the last line is `N passed, N failed`, and `, N skipped` if any were skipped
  PROGRAM WORDS...               those whose sentence or subject contains one of the WORDS
  PROGRAM --tier N [WORDS...]    of these, the tests of tier 1 or 2 of scripts/test.sh
*/
#pragma once
#include "../llmc/base/dtype.h"
#include "harness.h"

typedef enum { EVERY_BUILD, FP32_BUILD, FP64_BUILD } TestBuild; // REAL=float or double
typedef struct {
    const char *subject;
    const Test *tests;
    int count;
    TestBuild build;
} TestTable;
#define TESTS(list) list, (int)(sizeof(list) / sizeof(list[0]))

static inline bool table_is_of_this_build(const TestTable *table) {
    return table->build != (sizeof(real) == sizeof(double) ? FP32_BUILD : FP64_BUILD);
}

// Ends the program if a word matches no test of this build.
static inline void check_words(const TestTable *tables, int table_count, int count, char **words) {
    for (int w = 0; w < count; w++) {
        bool fits = false;
        for (const TestTable *table = tables; table < tables + table_count; table++)
            for (int t = 0; t < table->count && table_is_of_this_build(table); t++)
                fits = fits || test_word_fits(words[w], table->subject, table->tests[t].sentence);
        CHECK(fits, "no test's subject or sentence contains '%s'", words[w]);
    }
}

// Returns the exit status of the program.
static inline int test_main(const TestTable *tables, int table_count, int argc, char **argv) {
    TestCounts counts = {0, 0, 0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    test_read_tier(&argc, &argv);
    check_words(tables, table_count, argc - 1, argv + 1);
    for (const TestTable *table = tables; table < tables + table_count; table++)
        for (int t = 0; t < table->count && table_is_of_this_build(table); t++) {
            const Test *test = &table->tests[t];
            if (test_of_tier(test) && test_chosen(argc - 1, argv + 1, table->subject, test->sentence))
                test_run(&counts, table->subject, test);
        }
    return test_end(&counts);
}
