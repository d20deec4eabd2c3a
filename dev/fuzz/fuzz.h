/*
fuzz.h: a libFuzzer target gives damaged and hostile files to one reader of llmc/. A target is one file, fuzz_NAME.c,
that includes this file and the reader, and defines

  const char fuzz_file[]       name of the input as a file in fuzz_directory()
  void fuzz_prepare(void)      called once, before the first input: writes the files beside it
  void fuzz_seeds(void)        writes small valid files to fuzz_seed_path, with fuzz_seed or the writers of llmc/, so
                               that they follow the formats
  void fuzz_one(data, size)    calls the reader; the input is already in its file
  void fuzz_large(void)        optional: calls fuzz_large_input for inputs far beyond FUZZ_INPUT_LIMIT, which are not
                               mutated: inputs that might take quadratic time, or many times their size of memory
  LLVMFuzzerCustomMutator      optional: mutates an input and then repairs what guards the reader (a checksum, a length)

With FUZZ_SEEDS=DIR in the environment, the program only writes the seeds to DIR and the large inputs to DIR.large.
FUZZ_SHOW=1 prints the messages of the reader.

Defects are: a report of AddressSanitizer or UndefinedBehaviorSanitizer, a failed assert, a message that is not one
printable line, a reader that succeeds and leaves memory or a descriptor behind, a FUZZ_EXPECT that does not hold, and
what exceeds the limits of time and memory that run.sh gives to libFuzzer. A failing CHECK is not a defect: it rejects
the input. What the reader held is then released here.

The readers are compiled as in the product. The linker redirects exit, open and close of all files to this one (--wrap,
see run.sh); warnings reach it through warn_hook. Allocations are counted by hooks of the sanitizer.
*/
#pragma once
#include "../../llmc/base/common.h"
#include <setjmp.h>

enum { FUZZ_INPUT_LIMIT = 1 << 14, FUZZ_BLOCK_LIMIT = 1 << 15, FUZZ_OPEN_LIMIT = 128 };

extern const char fuzz_file[];
void fuzz_prepare(void);
void fuzz_seeds(void);
void fuzz_one(const uint8_t *data, size_t size);
__attribute__((weak)) void fuzz_large(void);

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);

int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));
int __real_open(const char *path, int flags, ...);
int __real_close(int fd);
_Noreturn void __real_exit(int status);
_Noreturn void __real__exit(int status);
int __wrap_open(const char *path, int flags, int mode);
int __wrap_close(int fd);
_Noreturn void __wrap_exit(int status);
_Noreturn void __wrap__exit(int status);

static char fuzz_path[512];
static const char *fuzz_seed_path; // FUZZ_SEEDS
static jmp_buf fuzz_escape;
static bool fuzz_running, fuzz_show;
static _Thread_local bool fuzz_reads; // in the thread that runs the reader: libFuzzer has its own thread
static int fuzz_input = -1;
static const volatile void *fuzz_blocks[FUZZ_BLOCK_LIMIT]; // that the reader has not freed
static size_t fuzz_block_count;
static int fuzz_opened[FUZZ_OPEN_LIMIT], fuzz_open_count; // descriptors

#define FUZZ_EXPECT(cond, ...)                 \
    do {                                       \
        if (!(cond)) fuzz_defect(__VA_ARGS__); \
    } while (0)

// libFuzzer follows the readers alone.
#pragma clang attribute push(__attribute__((no_sanitize("coverage"))), apply_to = function)

// Ends the program; libFuzzer keeps the input.
PRINTF_LIKE(1, 2)
static _Noreturn void fuzz_defect(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fuzz_running = false;
    fprintf(stderr, "==== defect: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

static void fuzz_on_malloc(const volatile void *p, size_t bytes) {
    (void)bytes;
    if (!fuzz_reads || !fuzz_running || !p) return;
    if (fuzz_block_count == FUZZ_BLOCK_LIMIT) fuzz_defect("more than %d allocations", FUZZ_BLOCK_LIMIT);
    fuzz_blocks[fuzz_block_count++] = p;
}

// Most blocks are freed soon after their allocation.
static void fuzz_on_free(const volatile void *p) {
    for (size_t i = fuzz_reads && p ? fuzz_block_count : 0; i-- > 0;)
        if (fuzz_blocks[i] == p) {
            fuzz_blocks[i] = fuzz_blocks[--fuzz_block_count];
            return;
        }
}

int __wrap_open(const char *path, int flags, int mode) {
    int fd = __real_open(path, flags, mode);
    if (!fuzz_running || fd < 0) return fd;
    if (fuzz_open_count == FUZZ_OPEN_LIMIT) fuzz_defect("more than %d open files", FUZZ_OPEN_LIMIT);
    fuzz_opened[fuzz_open_count++] = fd;
    return fd;
}

int __wrap_close(int fd) {
    bool known = false;
    for (int i = 0; fuzz_running && i < fuzz_open_count && !known; i++)
        if (fuzz_opened[i] == fd) fuzz_opened[i] = fuzz_opened[--fuzz_open_count], known = true;
    if (fuzz_running && !known) fuzz_defect("descriptor %d is closed and was not open", fd);
    return __real_close(fd);
}

void __wrap_exit(int status) {
    if (!fuzz_running) __real_exit(status); // libFuzzer itself ends
    longjmp(fuzz_escape, 1);
}

// program_exit calls it from the second time on.
void __wrap__exit(int status) {
    if (!fuzz_running) __real__exit(status);
    longjmp(fuzz_escape, 1);
}

static bool fuzz_warn(const char *line) {
    if (strlen(line) >= FAILURE_SIZE - 1)
        fuzz_defect("a message of more than %d characters: %.100s", FAILURE_SIZE, line);
    for (const char *p = line; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7F) fuzz_defect("a message with a control character: %s", line);
    if (fuzz_show || !fuzz_running) fprintf(stderr, "%s\n", line);
    return true;
}

static inline const char *fuzz_directory(void) { return fuzz_path; } // without a slash at its end

static void fuzz_write(const char *in, const char *name, const void *data, size_t size) {
    char path[PATH_MAX];
    FORMAT(path, "%s/%s", in, name);
    FILE *f = fopen(path, "wb");
    bool written = f && fwrite(data, 1, size, f) == size;
    CHECK(f && fclose(f) == 0 && written, "cannot write %s: %s", path, strerror(errno));
}

// A file of fuzz_directory().
static inline void fuzz_put(const char *name, const void *data, size_t size) {
    fuzz_write(fuzz_path, name, data, size);
}

static inline void fuzz_seed(const char *name, const void *data, size_t size) {
    fuzz_write(fuzz_seed_path, name, data, size);
}

static inline void fuzz_large_input(const char *name, const void *data, size_t size) {
    char in[PATH_MAX];
    FORMAT(in, "%s.large", fuzz_seed_path);
    fuzz_write(in, name, data, size);
}

// head, then `piece` as often as it fits into `size` bytes with the tail behind it. Returns the bytes.
static inline size_t fuzz_repeat(char *text, const char *head, const char *piece, const char *tail, size_t size) {
    size_t n = strlen(head), step = strlen(piece), last = strlen(tail);
    assert(n + step + last <= size);
    memcpy(text, head, n);
    for (; n + step + last <= size; n += step) memcpy(text + n, piece, step);
    memcpy(text + n, tail, last);
    return n + last;
}

static inline void fuzz_large_text(const char *name, const char *head, const char *piece, const char *tail,
                                   size_t size) {
    char *text = (char *)checked_calloc(size, 1);
    fuzz_large_input(name, text, fuzz_repeat(text, head, piece, tail, size));
    free(text);
}

static void fuzz_remove_directory(void) {
    char command[600];
    FORMAT(command, "rm -rf '%s'", fuzz_path);
    if (system(command) != 0) fprintf(stderr, "could not remove %s\n", fuzz_path);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    static char buffer[4096];
    char path[PATH_MAX];
    const char *tmp = getenv("TMPDIR");
    fuzz_show = getenv("FUZZ_SHOW") != NULL;
    fuzz_seed_path = getenv("FUZZ_SEEDS");
    warn_hook = fuzz_warn;
    FORMAT(fuzz_path, "%s/diffv2_fuzz_XXXXXX", tmp && *tmp ? tmp : "/tmp");
    CHECK(mkdtemp(fuzz_path) != NULL, "cannot make a directory %s: %s", fuzz_path, strerror(errno));
    atexit(fuzz_remove_directory);
    // a stream allocates its buffer when it is first used, and readers may print to stdout
    CHECK(freopen("/dev/null", "w", stdout), "cannot open /dev/null: %s", strerror(errno));
    setvbuf(stdout, buffer, _IOFBF, sizeof(buffer));
    fuzz_prepare();
    if (fuzz_seed_path) {
        fuzz_seeds();
        if (fuzz_large) fuzz_large();
        exit(EXIT_DONE);
    }
    FORMAT(path, "%s/%s", fuzz_path, fuzz_file);
    fuzz_input = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK(fuzz_input >= 0, "cannot create %s: %s", path, strerror(errno));
    int hooks = __sanitizer_install_malloc_and_free_hooks(fuzz_on_malloc, fuzz_on_free);
    assert(hooks > 0);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    volatile bool accepted = false;
    CHECK(pwrite(fuzz_input, data, size, 0) == (ssize_t)size && ftruncate(fuzz_input, (off_t)size) == 0,
          "cannot write the input to %s/%s: %s", fuzz_path, fuzz_file, strerror(errno));
    fuzz_reads = size <= FUZZ_INPUT_LIMIT;
    fuzz_running = true;
    if (setjmp(fuzz_escape) == 0) {
        fuzz_one(data, size);
        accepted = true;
    }
    fuzz_running = false;
    if (fuzz_show) fprintf(stderr, "%s\n", accepted ? "accepted" : "refused");
    if (accepted && fuzz_block_count) fuzz_defect("%zu allocations are left", fuzz_block_count);
    if (accepted && fuzz_open_count) fuzz_defect("%d descriptors are left", fuzz_open_count);
    while (fuzz_block_count) {
        void *p = (void *)(uintptr_t)fuzz_blocks[fuzz_block_count - 1];
        fuzz_on_free(p); // called here: compilers assume that free changes no variable
        free(p);
    }
    while (fuzz_open_count) close(fuzz_opened[--fuzz_open_count]);
    return 0;
}

#pragma clang attribute pop
