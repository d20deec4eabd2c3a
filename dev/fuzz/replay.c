/*
replay.c: runs a target without libFuzzer: regressions, and machines without clang.

  NAME seeds DIR                  writes the target's seeds to DIR and its dictionary to DIR.dict
  NAME large                      runs the target's large inputs
  NAME run MUTATIONS FILE...      runs the files, then MUTATIONS inputs made from them, equal in every run

An input that fails is written to $FUZZ_ARTIFACT, or fuzz_failed. FUZZ_SHOW=1 prints the messages of the readers.
*/
#define FUZZ_HARNESS
#include "fuzz.h"

void __sanitizer_set_death_callback(void (*callback)(void)); // of the sanitizers' runtime
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void fuzz_write_seeds(const char *to);
void fuzz_run_large(void);
__attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);

enum { INPUT_SECONDS = 5 };

static uint8_t input[FUZZ_INPUT_LIMIT];
static size_t input_size;
static uint64_t random_state = 1;

static size_t random_below(size_t n) {
    uint64_t z = (random_state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (size_t)((z ^ (z >> 31)) % n);
}

static void keep_input(void) {
    const char *path = getenv("FUZZ_ARTIFACT");
    if (!path) path = "fuzz_failed";
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    ssize_t n = fd < 0 ? -1 : write(fd, input, input_size);
    fprintf(stderr, n == (ssize_t)input_size ? "input kept as %s\n" : "the input could not be written to %s\n", path);
}

static void too_slow(int signal_number) {
    (void)signal_number;
    fprintf(stderr, "==== defect: an input takes more than %d seconds\n", INPUT_SECONDS);
    keep_input();
    _Exit(EXIT_FAILED); // the linker redirects _exit
}

static void run_input(void) {
    alarm(INPUT_SECONDS);
    // a copy of the exact size, so that AddressSanitizer sees a read beyond it
    uint8_t *copy = (uint8_t *)malloc(input_size ? input_size : 1);
    CHECK(copy, "out of memory for an input");
    memcpy(copy, input, input_size);
    LLVMFuzzerTestOneInput(copy, input_size);
    free(copy);
    alarm(0);
}

static void load(const char *path) {
    FILE *f = fopen(path, "rb");
    CHECK(f, "cannot read %s: %s", path, strerror(errno));
    input_size = fread(input, 1, sizeof(input), f);
    CHECK(!ferror(f) && (input_size < sizeof(input) || fgetc(f) == EOF), "%s is too large for an input", path);
    fclose(f);
}

// Makes one small change.
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) {
    // clang-format off
    static const char *const pieces[] = {"null", "-1", "1e999", "0", "18446744073709551615", "9007199254740993", "\"\"",
                                         "{}", "[]", "\\u0000", "\\ud800", "\x7f", ",", "}", "true", "0.5"};
    // clang-format on
    size_t at = random_below(size + 1), kind = random_below(6);
    if (kind == 0 && size) data[at % size] = (uint8_t)random_below(256);
    else if (kind == 1 && size) data[at % size] ^= (uint8_t)(1u << random_below(8));
    else if (kind == 2 && size) {
        size_t n = 1 + random_below(size - at % size);
        memmove(data + at % size, data + at % size + n, size - at % size - n);
        return size - n;
    } else {
        const char *piece = pieces[random_below(sizeof(pieces) / sizeof(pieces[0]))];
        size_t n = strlen(piece), from = random_below(size + 1);
        char copy[64];
        if (kind == 3 && size > from)
            memcpy(copy, data + from, n = 1 + random_below(min_size(sizeof(copy), size - from)));
        else memcpy(copy, piece, n);
        if (kind == 4) { // replaces a number
            while (at < size && !isdigit(data[at])) at++;
            size_t end = at;
            while (end < size && isdigit(data[end])) end++;
            memmove(data + at, data + end, size - end);
            size -= end - at;
        }
        if (size + n > max_size) return size;
        memmove(data + at + n, data + at, size - at);
        memcpy(data + at, copy, n);
        return size + n;
    }
    return size;
}

static void mutate(void) {
    for (size_t changes = 1 + random_below(4); changes; changes--) {
        size_t room = sizeof(input);
        input_size = LLVMFuzzerCustomMutator
                         ? LLVMFuzzerCustomMutator(input, input_size, room, (unsigned)random_below(UINT_MAX))
                         : LLVMFuzzerMutate(input, input_size, room);
    }
}

int main(int argc, char **argv) {
    bool large = argc == 2 && strcmp(argv[1], "large") == 0;
    CHECK(argc > 2 || large, "usage: %s seeds DIR | large | run MUTATIONS FILE...", argv[0]);
    __sanitizer_set_death_callback(keep_input);
    signal(SIGALRM, too_slow);
    LLVMFuzzerInitialize(&argc, &argv);
    if (strcmp(argv[1], "seeds") == 0) {
        fuzz_write_seeds(argv[2]);
        return EXIT_DONE;
    }
    if (large) {
        fuzz_run_large();
        return EXIT_DONE;
    }
    int files = argc - 3;
    long mutations = strtol(argv[2], NULL, 10);
    for (int i = 0; i < files; i++) {
        load(argv[3 + i]);
        if (getenv("FUZZ_SHOW")) fprintf(stderr, "%s: ", argv[3 + i]);
        run_input();
    }
    for (long i = 0; files && i < mutations; i++) {
        load(argv[3 + i % files]);
        mutate();
        run_input();
    }
    fprintf(stderr, "%d files, %ld mutations\n", files, mutations);
    return EXIT_DONE;
}
