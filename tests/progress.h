/*
progress.h: the line of a step on a terminal, in a file and under a launcher; numbers as they are printed.
*/
#ifndef TESTS_PROGRESS_H
#define TESTS_PROGRESS_H
#include "harness.h"
#include "program.h"
#include "ranks.h"

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

// Each rewriting of a line, or line, of what a program wrote on a terminal of 80 columns.
static void test_progress_80_columns(void) {
    ProgramData d = program_data();
    ProgramResult r;
    char command[2000];
    FORMAT(command, "stty cols 80; TERM=xterm %s --train-data train.bin %s --steps 200", test_program_path(),
           small_model);
    run_command(&r, "cd '%s' && script -qec \"%s\" /dev/null", d.dir.path, command);
    EXPECT(r.status == EXIT_DONE && strstr(r.out, "\r\033[K") && strstr(r.out, "tok/s"), "status %d: %.300s", r.status,
           r.out);
    for (char *rest = r.out, *line; (line = strsep(&rest, "\r\n")) != NULL;) {
        size_t width = strlen(line);
        bool step = strncmp(line, "\033[Kstep", 7) == 0;
        EXPECT(!step || (width - 3 < 80 && strstr(line, "tok/s")), "%zu columns: %s", width - 3, line);
    }
    test_remove_directory(&d.dir);
}

static const char *const progress_plain =
    "| tee out >/dev/null; grep -c '^step .*left' out; grep -c \"$(printf '\\033')\" out";

static void test_progress_in_file(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_command(&r, "cd '%s' && %s --train-data train.bin %s --steps 50 %s", d.dir.path, test_program_path(),
                small_model, progress_plain);
    EXPECT(strcmp(r.out, "50\n0\n") == 0, "lines, and those with control sequences: %.200s", r.out);
    run_command(&r, "cd '%s' && TERM=dumb script -qec \"%s --train-data train.bin %s --steps 50\" /dev/null %s",
                d.dir.path, test_program_path(), small_model, progress_plain);
    EXPECT(strcmp(r.out, "50\n0\n") == 0, "on a terminal without control sequences: %.200s", r.out);
    test_remove_directory(&d.dir);
}

static void test_progress_nan(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_command(&r, "cd '%s' && %s --train-data train.bin --val-data train.bin %s --steps 4 --lr 1e30 2>&1", d.dir.path,
                test_program_path(), small_model);
    EXPECT(strstr(r.out, "nan") && !strstr(r.out, "-nan"), "%.900s", r.out);
    test_remove_directory(&d.dir);
}

// /sys takes no directories, even from root; the reason is that of mkdir, not of the look at what is there.
static void test_directory_error(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_command(&r, "cd '%s' && %s --train-data train.bin %s --out /sys/diffv2_test/run", d.dir.path,
                test_program_path(), small_model);
    EXPECT_ONE_LINE(r, EXIT_FAILED, "cannot create the directory /sys/diffv2_test: ");
    EXPECT(!strstr(r.err, strerror(ENOENT)), "stderr: %.300s", r.err);
    EXPECT(!strstr(r.out, "options ("), "a list of options before the failure: %.300s", r.out);
    test_remove_directory(&d.dir);
}

static void test_early_failure(void) {
    static const char *const failures[] = {
        "--train-data none.bin",
        "--train-data train.bin --val-data none.bin",
        "--train-data train.bin --sample-every 1 --tokenizer none",
        "--train-data train.bin --init none",
        "--train-data train.bin --doc-mask --vocab 300",
        "--train-data train.bin --hidden 1000000",
    };
    ProgramData d = program_data();
    ProgramResult r;
    for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
        run_command(&r, "cd '%s' && %s %s --steps 2 --out some/where", d.dir.path, test_program_path(), failures[i]);
        EXPECT(r.status == EXIT_FAILED || r.status == EXIT_USAGE, "%s: status %d", failures[i], r.status);
        EXPECT(!strstr(r.out, "options ("), "%s: a list of options before the failure: %.300s", failures[i], r.out);
        run_command(&r, "ls '%s'", d.dir.path);
        EXPECT(!strstr(r.out, "some"), "%s: it left a directory", failures[i]);
    }
    test_remove_directory(&d.dir);
}

static void test_progress_under_mpirun(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_command(&r, "cd '%s' && %s && TERM=xterm mpirun -q -n 1 %s --train-data train.bin %s --steps 50 %s", d.dir.path,
                ranks_environment, test_program_path(), small_model, progress_plain);
    EXPECT(strcmp(r.out, "50\n0\n") == 0, "lines, and those with control sequences: %.200s", r.out);
    test_remove_directory(&d.dir);
}

static const Test progress_tests[] = {
    {"a line of progress is narrower than the terminal", test_progress_width},
    {"a terminal of 80 columns has no fragments of lines", test_progress_80_columns},
    {"a file, and a terminal without control sequences, get whole lines", test_progress_in_file},
    {"a number is never printed as -nan", test_progress_nan},
    {"a directory that cannot be created is reported with the reason of mkdir, before other output",
     test_directory_error},
    {"an early failure leaves no directory and prints no list of options", test_early_failure},
    {"a program under mpirun writes whole lines, with any terminal", test_progress_under_mpirun},
};
#ifdef USE_MPI
enum { PROGRESS_TEST_COUNT = sizeof(progress_tests) / sizeof(progress_tests[0]) };
#else
enum { PROGRESS_TEST_COUNT = sizeof(progress_tests) / sizeof(progress_tests[0]) - 1 }; // all but the last
#endif
#endif
