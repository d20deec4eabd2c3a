/*
run_tokenizer.h: the tokenizer of a run, its files, which checkpoints contain, and the tokens of the prompt.

  void run_tokenizer_open(s, from, V)   finds the tokenizer: --tokenizer; else the tokenizer that the loaded checkpoint
                            and the corpora of --train-data and --val-data agree on. Where a corpus.json
                            states that tokens are bytes, it is the byte tokenizer, with or without a table. Tokens
                            without a description may be read with any tokenizer
  void run_tokenizer_close(s)

Without a tokenizer, tokens are bytes if the vocabulary has 256 tokens; otherwise they are printed as numbers.

  separator   the token that separates documents: --separator; else the separator in the training data's corpus.json
              (in training, or when --generate is given that data); else the tokenizer's; else byte 0 where tokens are
              bytes; else unknown
  prompt      --prompt-tokens are the whole context. A --prompt follows the separator, if it is known, as every document
              in training does. Without a prompt, text starts after the separator or, if it is unknown, after token 0,
              with a warning. The token that is put before the prompt is not printed.
*/
#pragma once
#include "../data/corpus.h"
#include "prompts.h"
#include "sampler.h"

enum { TOKENIZER_JSON_LIMIT = 256 << 20 };

// The sources of the tokenizer, the separator and the prompt: values of the options with these names, or NULL.
typedef struct {
    const char *loaded; // a checkpoint directory, or NULL
    const char *tokenizer, *train_data, *val_data, *separator, *prompt, *prompt_tokens;
} TokenizerSources;

typedef struct {
    Tokenizer *tokenizer;  // NULL: none
    char path[PATH_SIZE];  // path of the directory or file
    char other[PATH_SIZE]; // a corpus with a tokenizer for other tokens than bytes, and without a table; or empty
    char *json;            // tokenizer.json beside it; NULL: none
    size_t json_size;
    int separator; // token that separates documents; -1: unknown
    int *prompt;   // tokens to continue: the implied one, if any, and the tokens of the prompt
    int prompt_length;
    int implied; // tokens put before the prompt: 0 or 1
} RunTokenizer;

static inline void run_tokenizer_check_equal(bool equal, const char *path, const char *other) {
    CHECK(equal,
          "%s and %s have different tokenizers: their tokens have different meanings (--tokenizer FILE selects one "
          "anyway)",
          path, other);
}

// t: the tokenizer of a directory or file
static inline void run_tokenizer_adopt(RunTokenizer *s, Tokenizer *t, const char *path) {
    if (s->tokenizer) {
        bool equal = s->tokenizer->size == t->size && memcmp(s->tokenizer->memory, t->memory, t->size) == 0;
        run_tokenizer_check_equal(equal, s->path, path);
        tokenizer_close(t);
        return;
    }
    s->tokenizer = t;
    FORMAT(s->path, "%s", path);
    char json[PATH_SIZE];
    FORMAT(json, "%s/tokenizer.json", path);
    if (!directory_exists(path)) return;
    s->json = file_read(json, TOKENIZER_JSON_LIMIT, &s->json_size);
    CHECK(s->json || errno == ENOENT, "cannot read %s, which checkpoints contain: %s", json, strerror(errno));
}

// Uses the tokenizer of a directory, if it is known.
static inline void run_tokenizer_look(RunTokenizer *s, const char *directory) {
    char path[PATH_SIZE];
    CorpusInfo about;
    int n = snprintf(path, sizeof(path), "%s/tokenizer.bin", directory);
    if (n >= (int)sizeof(path)) return;
    if (file_exists(path)) run_tokenizer_adopt(s, tokenizer_open(directory), directory);
    else if (corpus_read_info(directory, &about)) {
        if (about.bytes) run_tokenizer_adopt(s, tokenizer_of_bytes(), directory);
        if (about.other) FORMAT(s->other, "%s", directory);
    }
}

static inline void run_tokenizer_look_in_corpora(RunTokenizer *s, const char *text) {
    CorpusSpecs list = corpus_parse(text);
    for (int i = 0; i < list.count; i++) run_tokenizer_look(s, list.items[i].path);
    free(list.items);
}

static inline void prompt_from_numbers(RunTokenizer *s, const char *text, int V) {
    TokenList list = {NULL, 0, 0};
    while (*text) {
        int id = 0;
        bool number = prompt_number(&text, &id);
        assert(number); // prompt_numbers_valid has read them
        (void)number;
        CHECK(id < V, "--prompt-tokens: token %d is outside the vocabulary of %d", id, V);
        tokens_add(&list, id);
    }
    s->prompt = list.ids;
    s->prompt_length = (int)list.count;
}

// The tokens of a text, by the tokenizer or, without one, its bytes; free(*ids). Returns their number.
static inline int text_tokens(const RunTokenizer *s, const char *text, size_t size, int **ids) {
    if (s->tokenizer) return (int)tokenizer_encode(s->tokenizer, text, size, ids);
    *ids = (int *)checked_calloc(size, sizeof(int));
    for (size_t i = 0; i < size; i++) (*ids)[i] = (unsigned char)text[i];
    return (int)size;
}

static inline void prompt_from_text(RunTokenizer *s, const char *text, int V) {
    CHECK(s->tokenizer || V == BYTE_VOCABULARY,
          "--prompt: there is no tokenizer for a vocabulary of %d: give --tokenizer FILE, or token IDs with "
          "--prompt-tokens",
          V);
    s->prompt_length = text_tokens(s, text, strlen(text), &s->prompt);
}

// The separator of the first corpus that specifies one; -1: none does.
static inline int run_tokenizer_separator_of_corpora(const char *text, int V) {
    CorpusSpecs list = corpus_parse(text);
    CorpusInfo about;
    int token = -1;
    for (int i = 0; i < list.count && token < 0; i++) {
        if (!corpus_read_info(list.items[i].path, &about)) continue;
        token = about.separator.token;
        CHECK(token < V,
              "the separator %d of %s is outside the model's vocabulary of %d: use --vocab %d or more, or with --init "
              "data of the model's tokenizer",
              token, list.items[i].path, V, about.vocab_size);
    }
    free(list.items);
    return token;
}

static inline int run_tokenizer_find_separator(const RunTokenizer *s, const TokenizerSources *from, int V) {
    int token = -1;
    Separator given = {-1, false};
    if (from->separator) separator_parse(from->separator, &given);
    CHECK(given.token < V, "--separator %s: the model has a vocabulary of %d", from->separator, V);
    if (given.token >= 0) return given.token;
    if (from->train_data) token = run_tokenizer_separator_of_corpora(from->train_data, V);
    if (token >= 0) return token;
    if (s->tokenizer) return s->tokenizer->separator;
    return V == BYTE_VOCABULARY ? DOCUMENT_SEPARATOR : -1;
}

// V: vocabulary of the model
static inline void run_tokenizer_open(RunTokenizer *s, const TokenizerSources *from, int V) {
    memset(s, 0, sizeof(*s));
    if (from->tokenizer) run_tokenizer_adopt(s, tokenizer_open(from->tokenizer), from->tokenizer);
    else {
        if (from->loaded) run_tokenizer_look(s, from->loaded);
        if (from->train_data) run_tokenizer_look_in_corpora(s, from->train_data);
        if (from->val_data) run_tokenizer_look_in_corpora(s, from->val_data);
    }
    bool bytes = s->tokenizer && s->tokenizer->kind == TOKENIZER_BYTES;
    run_tokenizer_check_equal(!bytes || !s->other[0], s->path, s->other);
    CHECK(!s->tokenizer || s->tokenizer->vocab_size <= V,
          "the tokenizer of %s has %d tokens and the model a vocabulary of %d", s->path, s->tokenizer->vocab_size, V);
    s->separator = run_tokenizer_find_separator(s, from, V);
    if (from->prompt) prompt_from_text(s, from->prompt, V);
    else if (from->prompt_tokens) prompt_from_numbers(s, from->prompt_tokens, V);
    s->implied = !from->prompt_tokens && (s->separator >= 0 || s->prompt_length == 0);
    int *tokens = (int *)checked_calloc((size_t)s->prompt_length + 1, sizeof(int));
    tokens[0] = max_int(s->separator, 0);
    if (s->prompt_length) memcpy(tokens + s->implied, s->prompt, (size_t)s->prompt_length * sizeof(int));
    free(s->prompt);
    s->prompt = tokens;
    s->prompt_length += s->implied;
}

// The bytes of the text of each of V tokens, 0 for the separator; free(). NULL: tokens have no text.
static inline int *run_tokenizer_bytes(const RunTokenizer *s, int V) {
    if (!s->tokenizer && V != BYTE_VOCABULARY) return NULL;
    int *bytes = (int *)checked_calloc(V, sizeof(int));
    for (int id = 0; id < V; id++) {
        size_t length = 1;
        if (s->tokenizer) tokenizer_decode_token(s->tokenizer, id, &length);
        bytes[id] = id == s->separator ? 0 : (int)length;
    }
    return bytes;
}

static inline void run_tokenizer_close(RunTokenizer *s) {
    tokenizer_close(s->tokenizer);
    free(s->json);
    free(s->prompt);
    memset(s, 0, sizeof(*s));
}
