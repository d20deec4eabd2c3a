/*
speech.h: what a run speaks with: its tokenizer, the files of it that go into checkpoints, and the prompt's tokens.

  void speech_open(s, o, loaded, data)   finds the tokenizer: --tokenizer; else that of the loaded checkpoint and of the
                                         corpora of --train-data and --val-data, which must then be one and the same
  void speech_close(s)

Without a tokenizer text is bytes when the vocabulary has 256 tokens, and otherwise there are only numbers.
*/
#ifndef LLMC_SPEECH_H
#define LLMC_SPEECH_H
#include "corpus.h"
#include "options_table.h"
#include "sampler.h"

typedef struct {
    Tokenizer *tokenizer; // NULL: none
    char path[PATH_SIZE]; // of the directory or file
    char *json;           // tokenizer.json beside it; NULL: none
    size_t json_size;
    int *prompt; // tokens to continue: the separator, if there is one, and the prompt's
    int prompt_length;
    int implied; // of them not part of the prompt
} Speech;

static inline void speech_adopt(Speech *s, const char *path) {
    Tokenizer *t = tokenizer_open(path);
    if (s->tokenizer) {
        bool same = s->tokenizer->size == t->size && memcmp(s->tokenizer->memory, t->memory, t->size) == 0;
        CHECK(same,
              "%s and %s have different tokenizers: their tokens do not mean the same (--tokenizer FILE takes one of "
              "them all the same)",
              s->path, path);
        tokenizer_close(t);
        return;
    }
    s->tokenizer = t;
    FORMAT(s->path, "%s", path);
    char json[PATH_SIZE];
    FORMAT(json, "%s/tokenizer.json", path);
    if (!is_directory(path)) return;
    s->json = file_read(json, TOKENIZER_FILE_LIMIT, &s->json_size);
    CHECK(s->json || errno == ENOENT, "cannot read %s, which checkpoints are to have: %s", json, strerror(errno));
}

// From a directory, if it has one.
static inline void speech_look(Speech *s, const char *directory) {
    char path[PATH_SIZE];
    struct stat file;
    int n = snprintf(path, sizeof(path), "%s/tokenizer.bin", directory);
    if (n < (int)sizeof(path) && stat(path, &file) == 0) speech_adopt(s, directory);
}

static inline void speech_look_in_corpora(Speech *s, const char *text) {
    CorpusList list = corpus_parse(text);
    for (int i = 0; i < list.count; i++) speech_look(s, list.items[i].path);
    free(list.items);
}

static inline void prompt_from_numbers(Speech *s, const char *text, int V) {
    TokenList list = {NULL, 0, 0};
    for (const char *at = text;; at++) {
        char *end = NULL;
        errno = 0;
        long long id = strtoll(at, &end, 10);
        CHECK(strspn(at, "0123456789") > 0 && !errno && (*end == ',' || *end == 0),
              "--prompt-tokens %.100s: not token numbers with commas between them", text);
        CHECK(id < V, "--prompt-tokens: token %lld is outside the vocabulary of %d", id, V);
        tokens_add(&list, (int)id);
        at = end;
        if (*end == 0) break;
    }
    s->prompt = list.ids;
    s->prompt_length = (int)list.count;
}

static inline void prompt_from_text(Speech *s, const char *text, int V) {
    CHECK(s->tokenizer || V == BYTE_VOCABULARY,
          "--prompt is text, and there is no tokenizer for a vocabulary of %d: give --tokenizer FILE, or the prompt's "
          "tokens with --prompt-tokens",
          V);
    size_t size = strlen(text);
    if (s->tokenizer) {
        s->prompt_length = (int)tokenizer_encode(s->tokenizer, text, size, &s->prompt);
        return;
    }
    s->prompt = (int *)checked_calloc(size, sizeof(int));
    s->prompt_length = (int)size;
    for (size_t i = 0; i < size; i++) s->prompt[i] = (unsigned char)text[i];
}

// `loaded`: a checkpoint directory or NULL. `data`: whether the options' data is read.
static inline void speech_open(Speech *s, const Options *o, const char *loaded, bool data) {
    memset(s, 0, sizeof(*s));
    int V = (int)o->vocab;
    if (o->tokenizer) speech_adopt(s, o->tokenizer);
    else {
        if (loaded) speech_look(s, loaded);
        if (data && o->train_data) speech_look_in_corpora(s, o->train_data);
        if (data && o->val_data) speech_look_in_corpora(s, o->val_data);
    }
    CHECK(!s->tokenizer || s->tokenizer->vocab_size <= V,
          "the tokenizer of %s has %d tokens and the model a vocabulary of %d", s->path, s->tokenizer->vocab_size, V);
    if (o->prompt) prompt_from_text(s, o->prompt, V);
    else if (o->prompt_tokens) prompt_from_numbers(s, o->prompt_tokens, V);
    // A text begins after a separator; where there is none and no prompt either, after token 0.
    int separator = s->tokenizer ? s->tokenizer->separator : DOCUMENT_SEPARATOR;
    s->implied = separator >= 0 || s->prompt_length == 0;
    int *tokens = (int *)checked_calloc((size_t)s->prompt_length + 1, sizeof(int));
    tokens[0] = max_int(separator, 0);
    if (s->prompt_length) memcpy(tokens + s->implied, s->prompt, (size_t)s->prompt_length * sizeof(int));
    free(s->prompt);
    s->prompt = tokens;
    s->prompt_length += s->implied;
}

static inline void speech_close(Speech *s) {
    tokenizer_close(s->tokenizer);
    free(s->json);
    free(s->prompt);
    memset(s, 0, sizeof(*s));
}
#endif
