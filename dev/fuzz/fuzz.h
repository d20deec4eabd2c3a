/*
fuzz.h: what the fuzz targets are made of. A target feeds one reader of llmc/ with hostile files.

A target is one file, fuzz_NAME.c, that includes this file, then the reader, and defines

  const char fuzz_file[]       the name that the input has as a file, in fuzz_directory()
  void fuzz_prepare(void)      once, before the first input: files beside it
  void fuzz_seeds(void)        calls fuzz_seed for small valid files and fuzz_word for the dictionary: both come
                               from the writers and tables of llmc/, so that they follow the formats
  void fuzz_one(data, size)    calls the reader; the input is already in its file
  void fuzz_large(void)        optional: calls fuzz_large_input for inputs far beyond FUZZ_INPUT_LIMIT, which are not
                               mutated: those that would take quadratic time, or many times their size of memory
  LLVMFuzzerCustomMutator      optional: mutates and then repairs what guards the reader (a checksum, a length)

harness.c turns it into a program: with libFuzzer (clang), or with replay.c, which runs given files and
simple mutations of them under any compiler.

A large input runs in a process of its own, under limits of CPU time and of memory that the sanitizers' own needs are
part of.

What counts as a defect: what AddressSanitizer and UndefinedBehaviorSanitizer report, a failed assert, an input
that takes longer than 5 seconds, more than FUZZ_ALLOCATION_LIMIT bytes in one allocation, a message that is not
one printable line, a reader that succeeds and leaves memory or a descriptor behind, and a FUZZ_EXPECT that does
not hold. A refusal is none: exit, which ends CHECK, returns to the harness instead, and what the reader held
then is released. Hence the macros below, behind the system headers: the readers themselves are the shipped ones.
*/
#ifndef FUZZ_H
#define FUZZ_H
#include "../../llmc/base/common.h"

enum { FUZZ_ALLOCATION_LIMIT = 32 << 20, FUZZ_INPUT_LIMIT = 1 << 14, FUZZ_LARGE_SECONDS = 5, FUZZ_LARGE_MIB = 600 };

extern const char fuzz_file[];
void fuzz_prepare(void);
void fuzz_seeds(void);
void fuzz_large(void);
void fuzz_one(const uint8_t *data, size_t size);

const char *fuzz_directory(void);                               // without a slash at its end
void fuzz_put(const char *name, const void *data, size_t size); // a file of that directory
void fuzz_seed(const char *name, const void *data, size_t size);
void fuzz_seed_from(const char *name, const char *path); // a seed that a writer of llmc/ has written
void fuzz_word(const char *word);
void fuzz_large_input(const char *name, const void *data, size_t size);
// head, then `piece` as often as it fits into `size` bytes with the tail behind it
void fuzz_large_text(const char *name, const char *head, const char *piece, const char *tail, size_t size);
PRINTF_LIKE(1, 2) _Noreturn void fuzz_defect(const char *fmt, ...); // ends the program; the input is kept
_Noreturn void fuzz_exit(int status);
PRINTF_LIKE(1, 2) void fuzz_warn(const char *fmt, ...);
int fuzz_open(const char *path, int flags, ...);
int fuzz_close(int fd);

// A part of an input is changed by the fuzzer's own means; of replay.c, when there is no libFuzzer.
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);

#define FUZZ_EXPECT(cond, ...)                 \
    do {                                       \
        if (!(cond)) fuzz_defect(__VA_ARGS__); \
    } while (0)

#ifndef FUZZ_HARNESS
#define exit(status) fuzz_exit(status)
#define program_exit(status) fuzz_exit(status)
#define warn(...) fuzz_warn(__VA_ARGS__)
#define open(...) fuzz_open(__VA_ARGS__)
#define close(fd) fuzz_close(fd)
#undef CHECK // check_failed lies before these macros
#define CHECK(cond, ...)       \
    do {                       \
        if (!(cond)) {         \
            warn(__VA_ARGS__); \
            exit(EXIT_FAILED); \
        }                      \
    } while (0)
#endif
#endif
