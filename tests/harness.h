/*
harness.h: the test harness. A test is a sentence and a function. Each file of tests ends with a table of them, and
test_diffv2.c runs the tables. EXPECT prints a failure with its parameters, counts it and continues, so that one run
shows all failures.
*/
#pragma once
#include "../llmc/base/common.h"

typedef struct {
    const char *sentence;
    void (*run)(void);
} Test;

static int test_failures;      // of the running test
static char test_skipped[300]; // why it cannot run here; empty: it can

PRINTF_LIKE(3, 4)
static inline void test_failed(const char *file, int line, const char *fmt, ...) {
    if (test_failures++ >= 5) return; // more would only repeat
    va_list args;
    va_start(args, fmt);
    printf("    %s:%d: ", file, line);
    vprintf(fmt, args);
    printf("\n");
    va_end(args);
}
// States what the running test cannot check on this machine. A test that is skipped in part counts as skipped.
PRINTF_LIKE(1, 2)
static inline void test_skip(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(test_skipped, sizeof(test_skipped), fmt, args);
    va_end(args);
}
#define EXPECT(cond, ...)                                          \
    do {                                                           \
        if (!(cond)) test_failed(__FILE__, __LINE__, __VA_ARGS__); \
    } while (0)

typedef struct {
    int passed, failed, skipped;
} TestCounts;

static inline void test_run(TestCounts *counts, const char *subject, const Test *test) {
    double start = now_seconds();
    test_failures = 0, test_skipped[0] = 0;
    test->run();
    const char *result = test_failures ? "FAIL" : test_skipped[0] ? "skip" : "ok  ";
    printf("%s %s: %s (%.2f s)%s%s\n", result, subject, test->sentence, now_seconds() - start,
           test_skipped[0] ? ": " : "", test_skipped);
    if (test_failures) counts->failed++;
    else if (test_skipped[0]) counts->skipped++;
    else counts->passed++;
}

// Prints the last line of a test program and returns its exit status. A run without any test is a failure.
static inline int test_end(const TestCounts *counts) {
    char skipped[40] = "";
    CHECK(counts->passed + counts->failed + counts->skipped > 0, "no test was run");
    if (counts->skipped) FORMAT(skipped, ", %d skipped", counts->skipped);
    printf("%d passed, %d failed%s\n", counts->passed, counts->failed, skipped);
    return counts->failed ? EXIT_FAILED : EXIT_DONE;
}

// Which tests the arguments select: those whose subject or sentence contains one of the words, all without words,
// except those whose subject is, or whose sentence contains, the WORD of an argument -WORD. A word that begins with
// two dashes is the name of an option, and selects.
static inline bool test_word_excludes(const char *word) { return word[0] == '-' && word[1] != '-'; }
static inline bool test_word_fits(const char *word, const char *subject, const char *sentence) {
    if (test_word_excludes(word)) return strcmp(subject, word + 1) == 0 || strstr(sentence, word + 1);
    return strstr(subject, word) || strstr(sentence, word);
}
static inline bool test_chosen(int count, char **words, const char *subject, const char *sentence) {
    bool chosen = true;
    for (int i = 0; i < count; i++) chosen = chosen && test_word_excludes(words[i]);
    for (int i = 0; i < count; i++)
        if (test_word_fits(words[i], subject, sentence)) {
            if (test_word_excludes(words[i])) return false;
            chosen = true;
        }
    return chosen;
}

// A pseudorandom sequence that depends only on its seed.
typedef struct {
    uint64_t state;
} TestRandom;
static inline uint64_t test_random_bits(TestRandom *r) {
    uint64_t z = (r->state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static inline int test_random_int(TestRandom *r, int n) { return (int)(test_random_bits(r) % (uint64_t)n); }
// uniform in (-1, 1)
static inline double test_random_real(TestRandom *r) { return (double)(int64_t)test_random_bits(r) * 0x1p-63; }

// A new empty directory under TMPDIR; test_remove_directory removes it.
typedef struct {
    char path[512];
} TestDirectory;
static inline TestDirectory test_make_directory(void) {
    TestDirectory d;
    const char *tmp = getenv("TMPDIR");
    FORMAT(d.path, "%s/diffv2_test_XXXXXX", tmp && *tmp ? tmp : "/tmp");
    CHECK(mkdtemp(d.path) != NULL, "cannot make a temporary directory %s: %s", d.path, strerror(errno));
    return d;
}
static inline void test_remove_directory(const TestDirectory *d) {
    char command[600];
    FORMAT(command, "rm -rf '%s'", d->path);
    if (system(command) != 0) printf("    could not remove %s\n", d->path);
}

// The result of a child process. `out` and `err` are truncated to their sizes and end in 0.
typedef struct {
    int status; // exit status; 128 + N when signal N ended it
    char out[65536], err[16384];
} ProgramResult;

// The program under test: $TRAIN_DIFFV2, else ./train_diffv2.
static inline const char *test_program(void) {
    const char *program = getenv("TRAIN_DIFFV2");
    return program && *program ? program : "./train_diffv2";
}
// The absolute path of test_program, for commands that change the directory.
static inline const char *test_program_path(void) {
    static char path[PATH_MAX];
    CHECK(realpath(test_program(), path) != NULL, "cannot find %s: build it, or set TRAIN_DIFFV2", test_program());
    return path;
}
static inline void test_read_file(const char *path, char *text, size_t size) {
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(text, 1, size - 1, f) : 0;
    text[n] = 0;
    if (f) fclose(f);
}
// Runs a shell command line.
PRINTF_LIKE(2, 3)
static inline void run_command(ProgramResult *r, const char *fmt, ...) {
    static char text[8192], command[9000];
    TestDirectory d = test_make_directory();
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    CHECK(n >= 0 && (size_t)n < sizeof(text), "a test's command line is too long");
    FORMAT(command, "{ %s ; } >'%s/out' 2>'%s/err' </dev/null", text, d.path, d.path);
    int status = system(command);
    r->status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    char path[600];
    FORMAT(path, "%s/out", d.path);
    test_read_file(path, r->out, sizeof(r->out));
    FORMAT(path, "%s/err", d.path);
    test_read_file(path, r->err, sizeof(r->err));
    test_remove_directory(&d);
}
static inline int count_lines(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}
