/*
choice_file.h: writes files of multiple-choice tasks word by word, as docs/formats.md describes them.
*/
#pragma once
#include "harness.h"

typedef struct {
    uint32_t words[16384];
    int version, count, examples, longest, begin;
} ChoiceFile;

static inline ChoiceFile *choice_file(int version) {
    ChoiceFile *f = (ChoiceFile *)checked_calloc(1, sizeof(ChoiceFile));
    f->version = version;
    return f;
}

static inline void choice_word(ChoiceFile *f, int word) {
    CHECK(f->count < 16384, "a test's file of choices is too long");
    f->words[f->count++] = (uint32_t)word;
}

static inline void choice_begin(ChoiceFile *f, int label, int completions, const int *context, int length) {
    f->begin = f->count;
    choice_word(f, f->version % 2 ? 65535 : -1);
    choice_word(f, 0);
    choice_word(f, f->examples++);
    choice_word(f, label);
    choice_word(f, completions);
    choice_word(f, length);
    for (int i = 0; i < length; i++) choice_word(f, context[i]);
}

static inline void choice_completion(ChoiceFile *f, const int *tokens, int length) {
    choice_word(f, length);
    for (int i = 0; i < length; i++) choice_word(f, tokens[i]);
}

static inline void choice_end(ChoiceFile *f) {
    int bytes = (f->count - f->begin) * (f->version % 2 ? 2 : 4);
    f->words[f->begin + 1] = (uint32_t)bytes;
    f->longest = max_int(f->longest, bytes);
}

// Writes the file and frees it.
static inline void choice_write(ChoiceFile *f, const char *path) {
    int32_t header[256] = {20240522, f->version, f->examples, f->longest};
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(header, sizeof(header), 1, file) == 1, "cannot write %s", path);
    for (int i = 0; i < f->count; i++) {
        uint16_t narrow = (uint16_t)f->words[i];
        bool wide = f->version % 2 == 0;
        CHECK(fwrite(wide ? (void *)&f->words[i] : (void *)&narrow, wide ? 4 : 2, 1, file) == 1, "cannot write %s",
              path);
    }
    CHECK(fclose(file) == 0, "cannot write %s", path);
    free(f);
}

// Random tokens below V: examples of `completions` ragged completions, the longest of T + 1 tokens.
static inline void choice_write_random(const char *path, int version, int examples, int completions, int V, int T,
                                       uint64_t seed) {
    ChoiceFile *f = choice_file(version);
    TestRandom r = {seed};
    for (int e = 0; e < examples; e++) {
        int tokens[256], context = 1 + test_random_int(&r, T - 6);
        for (int i = 0; i < T + 1; i++) tokens[i] = test_random_int(&r, V);
        choice_begin(f, test_random_int(&r, completions), completions, tokens, context);
        for (int c = 0; c < completions; c++) {
            int most = T + 1 - context, length = e == 1 ? most : 2 + test_random_int(&r, min_int(most - 1, 6));
            for (int i = 0; i < length; i++) tokens[i] = test_random_int(&r, V);
            choice_completion(f, tokens, length);
        }
        choice_end(f);
    }
    choice_write(f, path);
}
