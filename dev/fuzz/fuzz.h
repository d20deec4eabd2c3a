/*
fuzz.h: the interface of a fuzz target and the harness. A target gives damaged and hostile files to one reader of llmc/.

A target is one file, fuzz_NAME.c, that includes this file and the reader, and defines

  const char fuzz_file[]       name of the input as a file in fuzz_directory()
  void fuzz_prepare(void)      called once, before the first input: writes the files beside it
  void fuzz_seeds(void)        calls fuzz_seed for small valid files and fuzz_word for the dictionary. Both use the
                               writers and tables of llmc/, so that they follow the formats.
  void fuzz_one(data, size)    calls the reader; the input is already in its file
  void fuzz_large(void)        optional: calls fuzz_large_input for inputs far beyond FUZZ_INPUT_LIMIT, which are not
                               mutated: inputs that might take quadratic time, or many times their size of memory
  LLVMFuzzerCustomMutator      optional: mutates an input and then repairs what guards the reader (a checksum, a length)

harness.c makes it a program: with libFuzzer (clang), or with replay.c, which runs files and simple mutations of them
under any compiler. A large input runs in its own process, under limits of CPU time and memory that include the needs of
the sanitizers.

Defects are: a report of AddressSanitizer or UndefinedBehaviorSanitizer, a failed assert, an input that takes longer
than 5 seconds, one allocation of more than FUZZ_ALLOCATION_LIMIT bytes, a message that is not one printable line, a
reader that succeeds and leaves memory or a descriptor behind, and a FUZZ_EXPECT that does not hold. A failing CHECK is
not a defect: it rejects the input. The harness releases what the reader held.

The readers are compiled as in the product. The linker redirects exit, open and close of all files to the harness
(--wrap, see run.sh); warnings reach it through warn_hook.
*/
#pragma once
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
void fuzz_words(const char *words); // separated by line ends
void fuzz_large_input(const char *name, const void *data, size_t size);
// head, then `piece` as often as it fits into `size` bytes with the tail behind it
void fuzz_large_text(const char *name, const char *head, const char *piece, const char *tail, size_t size);
PRINTF_LIKE(1, 2) _Noreturn void fuzz_defect(const char *fmt, ...); // ends the program; the input is kept
bool fuzz_warn(const char *line);
void fuzz_set_hooks(void);

// Changes a part of an input by the fuzzer's own means; defined by replay.c when there is no libFuzzer.
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);

#define FUZZ_EXPECT(cond, ...)                 \
    do {                                       \
        if (!(cond)) fuzz_defect(__VA_ARGS__); \
    } while (0)

#ifndef FUZZ_HARNESS // in the target: warn_hook is a variable of each file
void fuzz_set_hooks(void) { warn_hook = fuzz_warn; }
#endif
