/*
choices.h: files of multiple-choice tasks, for --eval-choices: a context, several completions, the correct one.

  format    llm.c's (hellaswag_val.bin), little-endian: a header of 256 int32 (magic 20240522, version, number of
            examples, bytes of the longest example, unused) and the examples, as words. An example: the largest value
            of a word; the bytes of the example with these words; its index; the label; the number of completions; the
            length and the tokens of the context; for each completion its length and tokens.
  versions  1: words are uint16. 2: uint32, for vocabularies above 65,535; only this program has it.
  checks    Everything is checked when the file is opened, and the file is not read again.
  dealing   Examples are sorted by the length of their longest row and dealt to the ranks in turn: each rank has rows of
            every length, and all rows of an example. A row is the context and one completion; the rows of a rank are
            sorted by length, so that a batch of consecutive rows needs little padding.
  equal     Completions of an example with equal tokens have one row, the first of them: rounding, which depends on the
            place of a row in its batch, must not decide between them.

  ChoiceSpecs choices_parse(text, &why)       the list of --eval-choices, NAME=FILE separated by white space; a
                                              backslash makes the next character part of FILE. why: what is wrong with
                                              it, or NULL; free(items)
  void choices_open(task, spec, V, T)         exits with one line if the file is invalid for vocabulary V and context T
  int  choices_deal(task, rank, ranks, order) order: the rows of a rank that are computed; returns their number
  void choices_close(task)
  source    the format: llm.c, dev/data/data_common.py and llmc/dataloader.h
*/
#pragma once
#include "../base/files.h"
#include "corpus.h"

enum {
    CHOICES_MAGIC = 20240522,
    CHOICES_HEAD = 5,      // words before the context
    CHOICES_SHORTEST = 11, // words of an example of two completions, with one token before the scored ones
    CHOICES_LIMIT = 64     // files
};
#define CHOICES_BLANK " \t\n"
#ifndef CHOICES_FILE_LIMIT
#define CHOICES_FILE_LIMIT ((size_t)1 << 30) // bytes
#endif

typedef struct {
    char name[CORPUS_NAME], path[PATH_MAX];
} ChoiceSpec;

typedef struct {
    int count;
    ChoiceSpec *items;
} ChoiceSpecs;

typedef struct {
    size_t context; // its first word in ChoiceTask.words
    int context_length, label;
    int first, count; // its rows
} ChoiceExample;

// The tokens of a completion.
typedef struct {
    size_t tokens; // the first word in ChoiceTask.words
    int length, example;
    int equal;                  // the first row of the example with the same tokens: both rows have one score
    uint32_t characters, bytes; // size of the text (evaluation_choices.h); 0: not known
} ChoiceRow;

typedef struct {
    ChoiceSpec spec;
    uint64_t fingerprint; // XXH64 of the file
    uint32_t *words;      // words of all examples
    ChoiceExample *examples;
    ChoiceRow *rows;
    int count, row_count;
} ChoiceTask;

// Positions of a row that the model computes: the last token is only predicted.
static inline int choice_length(const ChoiceTask *t, int row) {
    return t->examples[t->rows[row].example].context_length + t->rows[row].length - 1;
}

// ---- the list of the option

// Parses the next NAME=FILE and advances *at. Returns NULL, or what is wrong.
static inline const char *choices_next(const char **at, ChoiceSpec *spec) {
    const char *text = *at;
    size_t name = corpus_name_length(text), n = 0;
    if (name == 0 || name >= CORPUS_NAME || text[name] != '=')
        return "it must be NAME=FILE NAME=FILE ..., with names of 1 to 31 letters, digits, - or _";
    memcpy(spec->name, text, name);
    spec->name[name] = 0;
    for (text += name + 1; *text && !strchr(CHOICES_BLANK, *text); text++) {
        if (n + 1 == PATH_MAX) return "a path is too long";
        if (*text == '\\' && text[1]) text++;
        spec->path[n++] = *text;
    }
    spec->path[n] = 0;
    *at = text + strspn(text, CHOICES_BLANK);
    return n ? NULL : "a name has no file";
}

static inline ChoiceSpecs choices_parse(const char *text, const char **why) {
    ChoiceSpecs list = {0, (ChoiceSpec *)checked_calloc(CHOICES_LIMIT, sizeof(ChoiceSpec))};
    *why = NULL;
    for (const char *at = text + strspn(text, CHOICES_BLANK); !*why && (*at || list.count == 0);) {
        if (list.count == CHOICES_LIMIT) *why = "it has more than 64 files";
        else *why = choices_next(&at, &list.items[list.count++]);
        for (int i = 0; !*why && i + 1 < list.count; i++)
            if (strcmp(list.items[i].name, list.items[list.count - 1].name) == 0) *why = "a name is given twice";
    }
    return list;
}

// ---- reading

// The reader's position in the words of one example or of the file, which end at `end`.
typedef struct {
    const ChoiceTask *task;
    size_t at, end;
    int example;
} ChoiceReader;

static inline uint32_t choices_word(ChoiceReader *r) {
    CHECK(r->at < r->end, "%s: example %d ends within its tokens: write the file again", r->task->spec.path,
          r->example);
    return r->task->words[r->at++];
}

// Checks and skips the tokens of a part.
static inline void choices_skip(ChoiceReader *r, uint32_t length, int V, const char *of) {
    const ChoiceTask *t = r->task;
    CHECK(length <= r->end - r->at, "%s: example %d has %s of %u tokens, beyond its end: write the file again",
          t->spec.path, r->example, of, length);
    for (size_t end = r->at + length; r->at < end; r->at++)
        CHECK(t->words[r->at] < (uint32_t)V,
              "%s: example %d has token %u, outside the vocabulary of %d: write the file with the model's tokenizer",
              t->spec.path, r->example, t->words[r->at], V);
}

static inline ChoiceRow *choices_add_row(ChoiceTask *t) {
    if ((t->row_count & (t->row_count - 1)) == 0) { // double the capacity at powers of two
        t->rows = (ChoiceRow *)realloc(t->rows, max_size(1, 2 * (size_t)t->row_count) * sizeof(ChoiceRow));
        CHECK(t->rows != NULL, "out of memory: %d completions", t->row_count);
    }
    ChoiceRow *row = &t->rows[t->row_count++];
    memset(row, 0, sizeof(*row));
    return row;
}

// Reads the next completion; returns its row.
static inline const ChoiceRow *choices_read_completion(ChoiceTask *t, ChoiceReader *r, int V) {
    ChoiceRow *row = choices_add_row(t);
    uint32_t length = choices_word(r);
    CHECK(length > 0, "%s: example %d has a completion of 0 tokens: write the file again", t->spec.path, r->example);
    row->tokens = r->at;
    choices_skip(r, length, V, "a completion");
    row->length = (int)length, row->example = r->example;
    return row;
}

// The first row of the same example that has the same tokens as this row.
static inline int choices_first_equal(const ChoiceTask *t, int row) {
    const ChoiceRow *b = &t->rows[row];
    for (int i = t->examples[b->example].first; i < row; i++) {
        const ChoiceRow *a = &t->rows[i];
        if (a->length == b->length &&
            memcmp(t->words + a->tokens, t->words + b->tokens, (size_t)a->length * sizeof(uint32_t)) == 0)
            return i;
    }
    return row;
}

// Reads the next example: `width` bytes per word, at most `longest` bytes.
static inline void choices_read_example(ChoiceTask *t, ChoiceReader *r, size_t words, int width, int64_t longest, int V,
                                        int T) {
    const char *path = t->spec.path;
    int i = r->example, length = 0;
    ChoiceExample *e = &t->examples[i];
    size_t begin = r->at;
    uint32_t mark = width == 2 ? UINT16_MAX : UINT32_MAX;
    CHECK(words - begin >= CHOICES_SHORTEST, "%s ends before example %d: copy or write it again", path, i);
    const uint32_t *head = t->words + begin;
    CHECK(head[0] == mark, "%s: example %d begins with %u instead of %u: write the file again", path, i, head[0], mark);
    CHECK(head[1] % (uint32_t)width == 0 && head[1] / (uint32_t)width >= CHOICES_SHORTEST &&
              head[1] / (uint32_t)width <= words - begin && head[1] <= longest,
          "%s: example %d states %u bytes: it must be whole words, at least %u bytes, within the file, and at most the "
          "%lld of the longest example: write the file again",
          path, i, head[1], CHOICES_SHORTEST * (uint32_t)width, (long long)longest);
    CHECK(head[2] == (uint32_t)i, "%s: example %d has index %u: write the file again", path, i, head[2]);
    CHECK(head[3] < head[4], "%s: example %d has label %u of %u completions: write the file again", path, i, head[3],
          head[4]);
    CHECK(head[4] > 1, "%s: example %d has one completion, and 2 or more are required: omit the example", path, i);
    uint32_t count = head[4];
    r->at = begin + CHOICES_HEAD;
    r->end = begin + head[1] / (uint32_t)width;
    e->label = (int)head[3];
    uint32_t context = choices_word(r);
    e->context = r->at;
    choices_skip(r, context, V, "a context");
    CHECK(context > 0, "%s: example %d has no context: a token, such as the separator, must precede the completions",
          path, i);
    e->context_length = (int)context;
    e->first = t->row_count;
    for (uint32_t c = 0; c < count; c++) length = max_int(length, choices_read_completion(t, r, V)->length);
    e->count = t->row_count - e->first;
    for (int row = e->first; row < t->row_count; row++) t->rows[row].equal = choices_first_equal(t, row);
    CHECK(r->at == r->end, "%s: example %d has %zu words after its completions: write the file again", path, i,
          r->end - r->at);
    CHECK((int64_t)e->context_length + length <= (int64_t)T + 1,
          "%s: example %d has %lld tokens with its longest completion, and --seq-len %d allows %lld: use a longer "
          "--seq-len, or omit the example",
          path, i, (long long)e->context_length + length, T, (long long)T + 1);
}

// Exits unless the header is valid; returns the bytes of a word.
static inline int choices_check_header(const ChoiceSpec *spec, const int32_t *header, size_t bytes) {
    const char *path = spec->path, *advice = "data/prepare_choices.py writes such files";
    CHECK(bytes >= SHARD_HEADER_BYTES && header[0] == CHOICES_MAGIC,
          "--eval-choices %s: %s is not a file of choices, which begins with %d and a header of %d bytes; %s",
          spec->name, path, CHOICES_MAGIC, SHARD_HEADER_BYTES, advice);
    CHECK(header[1] == 1 || header[1] == 2, "%s has version %d and must have 1 or 2: write it again; %s", path,
          (int)header[1], advice);
    size_t body = bytes - SHARD_HEADER_BYTES, width = header[1] == 1 ? 2 : 4;
    CHECK(header[2] > 0 && (size_t)header[2] <= body / (CHOICES_SHORTEST * width) && body % width == 0,
          "%s has %zu bytes, and its header states %d examples: copy or write it again", path, bytes, (int)header[2]);
    return (int)width;
}

static inline void choices_open(ChoiceTask *t, const ChoiceSpec *spec, int V, int T) {
    size_t bytes = 0;
    int32_t header[4] = {0};
    memset(t, 0, sizeof(*t));
    t->spec = *spec;
    char *file = file_read(spec->path, CHOICES_FILE_LIMIT, &bytes);
    CHECK(file, "--eval-choices %s: cannot read %s: %s", spec->name, spec->path, strerror(errno));
    memcpy(header, file, bytes < sizeof(header) ? 0 : sizeof(header));
    int width = choices_check_header(spec, header, bytes);
    size_t words = (bytes - SHARD_HEADER_BYTES) / (size_t)width;
    const char *body = file + SHARD_HEADER_BYTES;
    t->fingerprint = XXH64(file, bytes, 0);
    t->words = (uint32_t *)checked_calloc(words, sizeof(uint32_t));
    for (size_t i = 0; i < words && width == 2; i++) t->words[i] = ((const uint16_t *)(const void *)body)[i];
    if (width == 4) memcpy(t->words, body, words * sizeof(uint32_t));
    free(file);
    t->count = header[2];
    t->examples = (ChoiceExample *)checked_calloc(t->count, sizeof(ChoiceExample));
    ChoiceReader r = {t, 0, 0, 0};
    for (; r.example < t->count; r.example++) choices_read_example(t, &r, words, width, header[3], V, T);
    CHECK(r.at == words, "%s has %zu bytes after its %d examples: copy or write it again", spec->path,
          (words - r.at) * (size_t)width, t->count);
}

static inline void choices_close(ChoiceTask *t) {
    free(t->words);
    free(t->examples);
    free(t->rows);
    memset(t, 0, sizeof(*t));
}

// ---- dealing

typedef struct {
    int length, item; // item: an example or a row
} ChoiceOrder;

// Sorts the longest first; equal lengths keep their order.
static inline int choices_compare(const void *a, const void *b) {
    const ChoiceOrder *x = (const ChoiceOrder *)a, *y = (const ChoiceOrder *)b;
    return x->length != y->length ? (x->length < y->length) - (x->length > y->length)
                                  : (x->item > y->item) - (x->item < y->item);
}

// order [row_count]: the rows of the rank that are computed, the longest first.
static inline int choices_deal(const ChoiceTask *t, int rank, int ranks, int *order) {
    ChoiceOrder *examples = (ChoiceOrder *)checked_calloc(t->count, sizeof(ChoiceOrder)),
                *rows = (ChoiceOrder *)checked_calloc(t->row_count, sizeof(ChoiceOrder));
    int count = 0;
    for (int i = 0; i < t->count; i++) {
        examples[i].item = i;
        for (int row = t->examples[i].first; row < t->examples[i].first + t->examples[i].count; row++)
            examples[i].length = max_int(examples[i].length, choice_length(t, row));
    }
    qsort(examples, t->count, sizeof(ChoiceOrder), choices_compare);
    for (int i = rank; i < t->count; i += ranks) {
        const ChoiceExample *e = &t->examples[examples[i].item];
        for (int row = e->first; row < e->first + e->count; row++) {
            if (t->rows[row].equal != row) continue;
            rows[count].item = row;
            rows[count++].length = choice_length(t, row);
        }
    }
    qsort(rows, count, sizeof(ChoiceOrder), choices_compare);
    for (int i = 0; i < count; i++) order[i] = rows[i].item;
    free(examples);
    free(rows);
    return count;
}
