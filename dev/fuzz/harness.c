/*
harness.c: runs one input through a target and releases what the reader has left.

Memory: the allocation hooks of the sanitizer keep the set of blocks that were allocated since the input began and not
freed: an array, and a hash table from the address of a block to its place in the array. Descriptors: a list, kept by
__wrap_open and __wrap_close. This file is not instrumented for coverage, so that the fuzzer follows the readers alone.
*/
#define FUZZ_HARNESS
#include "fuzz.h"
#include <setjmp.h>
#include <sys/resource.h>
#include <sys/wait.h>

// of the sanitizers' runtime, whose headers some compilers lack
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));

static char directory[512], seed_directory[PATH_MAX];
static jmp_buf escape;
static bool running, show;
static int input_fd = -1;
static size_t input_bytes; // of the file as it is now

// ---- memory

enum { LIVE_BITS = 16, LIVE_SLOTS = 1 << LIVE_BITS, LIVE_LIMIT = LIVE_SLOTS / 2 };
static const volatile void *live[LIVE_LIMIT];
static size_t live_count;
static uint32_t live_index[LIVE_SLOTS]; // place in live + 1; 0: free

static size_t live_home(const volatile void *p) {
    return (size_t)(((uint64_t)(uintptr_t)p * 0x9E3779B97F4A7C15ull) >> (64 - LIVE_BITS));
}
static size_t live_slot(const volatile void *p) {
    size_t i = live_home(p);
    while (live_index[i] && live[live_index[i] - 1] != p) i = (i + 1) % LIVE_SLOTS;
    return i;
}

// Whether this thread runs the reader: libFuzzer has its own thread, which allocates when it starts.
static _Thread_local bool reads;

static void on_malloc(const volatile void *p, size_t bytes) {
    if (!reads || !running || !p) return;
    running = false; // the report itself may allocate
    if (bytes > FUZZ_ALLOCATION_LIMIT)
        fuzz_defect("an allocation of %zu bytes for an input of %zu", bytes, input_bytes);
    if (live_count == LIVE_LIMIT)
        fuzz_defect("more than %d allocations for an input of %zu bytes", LIVE_LIMIT, input_bytes);
    running = true;
    live[live_count++] = p;
    live_index[live_slot(p)] = (uint32_t)live_count;
}

static void on_free(const volatile void *p) {
    if (!reads || !p || !live_count) return;
    size_t hole = live_slot(p);
    if (!live_index[hole]) return;
    size_t place = live_index[hole] - 1, last = live_slot(live[live_count - 1]);
    live_index[last] = (uint32_t)place + 1;
    live[place] = live[--live_count];
    live_index[hole] = 0;
    for (size_t i = (hole + 1) % LIVE_SLOTS; live_index[i];
         i = (i + 1) % LIVE_SLOTS) { // moves up entries whose search would end at the hole
        size_t home = live_home(live[live_index[i] - 1]);
        if ((i - home) % LIVE_SLOTS < (i - hole) % LIVE_SLOTS) continue;
        live_index[hole] = live_index[i];
        live_index[i] = 0;
        hole = i;
    }
}

// ---- descriptors

enum { OPEN_LIMIT = 128 };
static int open_fds[OPEN_LIMIT], open_count;

int __real_open(const char *path, int flags, ...);
int __real_close(int fd);
_Noreturn void __real_exit(int status);
_Noreturn void __real__exit(int status);
int __wrap_open(const char *path, int flags, int mode);
int __wrap_close(int fd);
_Noreturn void __wrap_exit(int status);
_Noreturn void __wrap__exit(int status);

int __wrap_open(const char *path, int flags, int mode) {
    int fd = __real_open(path, flags, mode);
    if (!running || fd < 0) return fd;
    if (open_count == OPEN_LIMIT) fuzz_defect("more than %d open files", OPEN_LIMIT);
    open_fds[open_count++] = fd;
    return fd;
}

int __wrap_close(int fd) {
    bool known = false;
    for (int i = 0; running && i < open_count && !known; i++)
        if (open_fds[i] == fd) open_fds[i] = open_fds[--open_count], known = true;
    if (running && !known) fuzz_defect("descriptor %d is closed and was not open", fd);
    return __real_close(fd);
}

// ---- how a reader ends

void fuzz_defect(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    running = false;
    fprintf(stderr, "==== defect: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

void __wrap_exit(int status) {
    if (!running) __real_exit(status); // the harness itself ends
    longjmp(escape, 1);
}

// program_exit calls it from the second time on.
void __wrap__exit(int status) {
    if (!running) __real__exit(status);
    longjmp(escape, 1);
}

bool fuzz_warn(const char *line) {
    if (strlen(line) >= FAILURE_SIZE - 1)
        fuzz_defect("a message of more than %d characters: %.100s", FAILURE_SIZE, line);
    for (const char *p = line; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7F) fuzz_defect("a message with a control character: %s", line);
    if (show || !running) fprintf(stderr, "%s\n", line);
    return true;
}

// ---- files

const char *fuzz_directory(void) { return directory; }

static void path_of(char path[PATH_MAX], const char *in, const char *name) {
    int n = snprintf(path, PATH_MAX, "%s/%s", in, name);
    assert(n > 0 && n < PATH_MAX);
}

static void put(const char *in, const char *name, const void *data, size_t size) {
    char path[PATH_MAX];
    path_of(path, in, name);
    FILE *f = fopen(path, "wb");
    bool written = f && fwrite(data, 1, size, f) == size;
    CHECK(f && fclose(f) == 0 && written, "cannot write %s: %s", path, strerror(errno));
}
void fuzz_put(const char *name, const void *data, size_t size) { put(directory, name, data, size); }
void fuzz_seed(const char *name, const void *data, size_t size) {
    if (seed_directory[0]) put(seed_directory, name, data, size);
}

void fuzz_seed_from(const char *name, const char *path) {
    static char bytes[FUZZ_INPUT_LIMIT];
    FILE *f = fopen(path, "rb");
    CHECK(f, "cannot read %s: %s", path, strerror(errno));
    size_t size = fread(bytes, 1, sizeof(bytes), f);
    fclose(f);
    fuzz_seed(name, bytes, size);
}

// Appends a line to the dictionary, in the notation of libFuzzer.
void fuzz_word(const char *word) {
    char path[PATH_MAX + 8];
    snprintf(path, sizeof(path), "%s.dict", seed_directory);
    FILE *f = fopen(path, "a");
    CHECK(f, "cannot write %s: %s", path, strerror(errno));
    fputc('"', f);
    for (const unsigned char *p = (const unsigned char *)word; *p; p++)
        if (*p < 0x20 || *p > 0x7E || *p == '"' || *p == '\\') fprintf(f, "\\x%02X", *p);
        else fputc(*p, f);
    fputs("\"\n", f);
    fclose(f);
}

void fuzz_words(const char *words) {
    char word[256];
    while (*words) {
        size_t n = strcspn(words, "\n");
        FORMAT(word, "%.*s", (int)n, words);
        fuzz_word(word);
        words += n + (words[n] == '\n');
    }
}

void fuzz_write_seeds(const char *to);
void fuzz_write_seeds(const char *to) {
    snprintf(seed_directory, sizeof(seed_directory), "%s", to);
    fuzz_words("null\ntrue\nfalse\n1e999\n-1\n-0.0\n0.5\n[]\n{}\n\"\"\n9007199254740993\n18446744073709551615\n"
               "\\u0000\n\\u007f\n\\ud800\n\x7f");
    fuzz_seeds();
}

// ---- large inputs

static int large_count;
static double large_seconds, large_mib; // largest over the inputs

static double cpu_seconds(const struct rusage *used) {
    return (double)(used->ru_utime.tv_sec + used->ru_stime.tv_sec) +
           1e-6 * (double)(used->ru_utime.tv_usec + used->ru_stime.tv_usec);
}

void fuzz_large_input(const char *name, const void *data, size_t size) {
    fuzz_put(fuzz_file, data, size);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0, "cannot start a process: %s", strerror(errno));
    if (child == 0) {
        struct rlimit limit = {FUZZ_LARGE_SECONDS + 1, FUZZ_LARGE_SECONDS + 2};
        setrlimit(RLIMIT_CPU, &limit);
        running = true;
        bool accepted = setjmp(escape) == 0;
        if (accepted) fuzz_one((const uint8_t *)data, size);
        running = false;
        if (show) fprintf(stderr, "%s\n", accepted ? "accepted" : "refused");
        _exit(EXIT_DONE);
    }
    struct rusage used;
    int status = 0;
    CHECK(wait4(child, &status, 0, &used) == child, "cannot wait for a process: %s", strerror(errno));
    double seconds = cpu_seconds(&used), mib = (double)used.ru_maxrss / 1024;
    if (show) fprintf(stderr, "%s: %zu bytes, %.2f s, %.0f MiB\n", name, size, seconds, mib);
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGXCPU && WTERMSIG(status) != SIGKILL)
        fuzz_defect("large input %s: signal %d", name, WTERMSIG(status));
    if (seconds > FUZZ_LARGE_SECONDS || mib > FUZZ_LARGE_MIB)
        fuzz_defect("large input %s of %zu bytes takes %.1f s of %d and %.0f MiB of %d", name, size, seconds,
                    FUZZ_LARGE_SECONDS, mib, FUZZ_LARGE_MIB);
    if (status != 0) fuzz_defect("large input %s: status %#x", name, (unsigned)status);
    large_count++;
    large_seconds = fmax(large_seconds, seconds), large_mib = fmax(large_mib, mib);
}

void fuzz_large_text(const char *name, const char *head, const char *piece, const char *tail, size_t size) {
    char *text = (char *)checked_calloc(size, 1);
    size_t n = strlen(head), step = strlen(piece), last = strlen(tail);
    assert(n + step + last <= size);
    memcpy(text, head, n);
    for (; n + step + last <= size; n += step) memcpy(text + n, piece, step);
    memcpy(text + n, tail, last);
    fuzz_large_input(name, text, n + last);
    free(text);
}

__attribute__((weak)) void fuzz_large(void) {}

void fuzz_run_large(void);
void fuzz_run_large(void) {
    fuzz_large();
    if (large_count) fprintf(stderr, "%d, up to %.1f s and %.0f MiB\n", large_count, large_seconds, large_mib);
    else fprintf(stderr, "none\n");
}

static void write_input(const uint8_t *data, size_t size) {
    bool written = size == 0 || pwrite(input_fd, data, size, 0) == (ssize_t)size;
    if (size < input_bytes) written = written && ftruncate(input_fd, (off_t)size) == 0;
    CHECK(written, "cannot write the input to %s/%s: %s", directory, fuzz_file, strerror(errno));
    input_bytes = size;
}

// ---- the two functions that libFuzzer and replay.c call

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void remove_directory(void) {
    char command[600];
    snprintf(command, sizeof(command), "rm -rf '%s'", directory);
    if (system(command) != 0) fprintf(stderr, "could not remove %s\n", directory);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    static char buffer[4096];
    char path[PATH_MAX];
    show = getenv("FUZZ_SHOW") != NULL;
    const char *tmp = getenv("TMPDIR");
    FORMAT(directory, "%s/diffv2_fuzz_XXXXXX", tmp && *tmp ? tmp : "/tmp");
    CHECK(mkdtemp(directory) != NULL, "cannot make a directory %s: %s", directory, strerror(errno));
    atexit(remove_directory);
    // a stream allocates its buffer when it is first used, and readers may print to stdout
    CHECK(freopen("/dev/null", "w", stdout), "cannot open /dev/null: %s", strerror(errno));
    setvbuf(stdout, buffer, _IOFBF, sizeof(buffer));
    fuzz_set_hooks();
    fuzz_prepare();
    path_of(path, directory, fuzz_file);
    input_fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK(input_fd >= 0, "cannot create %s: %s", path, strerror(errno));
    int hooks = __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
    assert(hooks > 0);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    volatile bool accepted = false;
    write_input(data, size);
    reads = running = true;
    if (setjmp(escape) == 0) {
        fuzz_one(data, size);
        accepted = true;
    }
    running = false;
    if (show) fprintf(stderr, "%s\n", accepted ? "accepted" : "refused");
    if (accepted && live_count) fuzz_defect("%zu allocations are left", live_count);
    if (accepted && open_count) fuzz_defect("%d descriptors are left", open_count);
    while (live_count) {
        void *p = (void *)(uintptr_t)live[live_count - 1];
        on_free(p); // called here: compilers assume that free changes no variable
        free(p);
    }
    while (open_count) close(open_fds[--open_count]);
    return 0;
}
