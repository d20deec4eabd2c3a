/*
harness.h: the test harness. A test is a sentence and a function. Each file of tests ends with a table of them, and
test_main.h runs the tables of a program. EXPECT prints a failure with its parameters, counts it and continues, so that
one run shows all failures.
*/
#pragma once
#include "../llmc/base/common.h"

typedef struct {
    const char *sentence;
    void (*run)(void);
    int tier; // the first tier of scripts/test.sh that runs it: 0 or 1 the first, 2 the second
} Test;
#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // most rows of tests leave out the tier

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

// What the running test has until its end: texts, and directories in a directory under TMPDIR.
static struct {
    char path[500]; // of that directory; empty: there is none
    int directories, text_count;
    char **texts;
} test_owned;

// A text, which is freed after the test.
static inline char *test_text_of(const char *fmt, va_list args) {
    char *text = NULL;
    int length = vasprintf(&text, fmt, args);
    char **texts = (char **)realloc(test_owned.texts, (test_owned.text_count + 1) * sizeof(char *));
    CHECK(length >= 0 && texts, "no memory for a text of a test");
    test_owned.texts = texts;
    return test_owned.texts[test_owned.text_count++] = text;
}
PRINTF_LIKE(1, 2)
static inline char *test_text(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    char *text = test_text_of(fmt, args);
    va_end(args);
    return text;
}

// A new empty directory, which is removed after the test.
typedef struct {
    char path[512];
} TestDirectory;
static inline TestDirectory test_make_directory(void) {
    TestDirectory d;
    const char *tmp = getenv("TMPDIR");
    if (!test_owned.path[0]) {
        FORMAT(test_owned.path, "%s/diffv2_test_XXXXXX", tmp && *tmp ? tmp : "/tmp");
        CHECK(mkdtemp(test_owned.path), "cannot make a directory %s: %s", test_owned.path, strerror(errno));
    }
    FORMAT(d.path, "%s/%d", test_owned.path, test_owned.directories++);
    CHECK(mkdir(d.path, 0700) == 0, "cannot make the directory %s: %s", d.path, strerror(errno));
    return d;
}

// The path of a file in a new directory.
static inline const char *test_file(const char *name) {
    TestDirectory d = test_make_directory();
    return test_text("%s/%s", d.path, name);
}

// A test runs between these two. The second prints its line.
static inline double test_begin(void) {
    test_failures = 0, test_skipped[0] = 0;
    return now_seconds();
}
static inline void test_finish(TestCounts *counts, const char *line, double begin) {
    const char *result = test_failures ? "FAIL" : test_skipped[0] ? "skip" : "ok  ";
    printf("%s %s (%.2f s)%s%s\n", result, line, now_seconds() - begin, test_skipped[0] ? ": " : "", test_skipped);
    *(test_failures ? &counts->failed : test_skipped[0] ? &counts->skipped : &counts->passed) += 1;
    if (test_owned.path[0] && system(test_text("rm -rf '%s'", test_owned.path)) != 0)
        printf("    could not remove %s\n", test_owned.path);
    for (int i = 0; i < test_owned.text_count; i++) free(test_owned.texts[i]);
    free(test_owned.texts);
    memset(&test_owned, 0, sizeof(test_owned));
}
static inline void test_run(TestCounts *counts, const char *subject, const Test *test) {
    double begin = test_begin();
    test->run();
    test_finish(counts, test_text("%s: %s", subject, test->sentence), begin);
}

static int test_tier; // whose tests run; 0: those of all tiers
static inline bool test_of_tier(const Test *test) { return test_tier == 0 || (test_tier == 2) == (test->tier == 2); }
// Reads `--tier N`, with N 1 or 2, if it is the first argument, and removes it.
static inline void test_read_tier(int *argc, char ***argv) {
    if (*argc < 2 || strcmp((*argv)[1], "--tier") != 0) return;
    const char *tier = *argc > 2 ? (*argv)[2] : "";
    if (strcmp(tier, "1") != 0 && strcmp(tier, "2") != 0) {
        fprintf(stderr, "--tier '%s': expected 1 or 2\n", tier);
        exit(EXIT_USAGE);
    }
    test_tier = tier[0] - '0';
    *argc -= 2, *argv += 2;
}

// Prints the last line of a test program and returns its exit status. A run without any test is a failure, except of
// one tier, which may have none of the tests that words select.
static inline int test_end(const TestCounts *counts) {
    char skipped[40] = "";
    CHECK(test_tier || counts->passed + counts->failed + counts->skipped > 0, "no test was run");
    if (counts->skipped) FORMAT(skipped, ", %d skipped", counts->skipped);
    printf("%d passed, %d failed%s\n", counts->passed, counts->failed, skipped);
    return counts->failed ? EXIT_FAILED : EXIT_DONE;
}

// Which tests the arguments select: those whose subject or sentence contains one of the words; all without words.
static inline bool test_word_fits(const char *word, const char *subject, const char *sentence) {
    return strstr(subject, word) || strstr(sentence, word);
}
static inline bool test_chosen(int count, char **words, const char *subject, const char *sentence) {
    bool chosen = count == 0;
    for (int i = 0; i < count; i++) chosen = chosen || test_word_fits(words[i], subject, sentence);
    return chosen;
}

// Splits a text at its spaces, in place. Returns the number of words, of which there are fewer than `limit`.
static inline int test_words(char **words, int limit, char *text) {
    int count = 0;
    for (char *word = strtok(text, " "); word && count < limit - 1; word = strtok(NULL, " ")) words[count++] = word;
    words[count] = NULL;
    return count;
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
// The path of this executable; /proc/self/exe would name the shell that starts the child.
static inline const char *test_self(void) {
    static char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    CHECK(n > 0, "cannot find this executable: %s", strerror(errno));
    path[n] = 0;
    return path;
}
static inline void test_read_file(const char *path, char *text, size_t size) {
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(text, 1, size - 1, f) : 0;
    text[n] = 0;
    if (f) fclose(f);
}
static inline void test_write_file(const char *path, const void *bytes, size_t count) {
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, count, f) == count && fclose(f) == 0, "cannot write %s: %s", path, strerror(errno));
}
static inline void test_write_text(const char *path, const char *text) { test_write_file(path, text, strlen(text)); }
// A shard of tokens of 2 or 4 bytes.
static inline void test_write_shard(const char *path, int token_bytes, const int *tokens, size_t count) {
    const int32_t header[256] = {token_bytes == 2 ? 20240520 : 20240801, token_bytes == 2 ? 1 : 7, (int32_t)count};
    FILE *f = fopen(path, "wb");
    bool written = f && fwrite(header, sizeof(header), 1, f) == 1;
    for (size_t i = 0; i < count && written; i++) written = fwrite(&tokens[i], token_bytes, 1, f) == 1;
    CHECK(written && fclose(f) == 0, "cannot write %s: %s", path, strerror(errno));
}
// Runs a shell command line.
PRINTF_LIKE(2, 3)
static inline void run_command(ProgramResult *r, const char *fmt, ...) {
    TestDirectory d = test_make_directory();
    va_list args;
    va_start(args, fmt);
    char *text = test_text_of(fmt, args);
    va_end(args);
    int status = system(test_text("{ %s ; } >'%s/out' 2>'%s/err' </dev/null", text, d.path, d.path));
    r->status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    test_read_file(test_text("%s/out", d.path), r->out, sizeof(r->out));
    test_read_file(test_text("%s/err", d.path), r->err, sizeof(r->err));
}
static inline int count_lines(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}
