/*
corpus.h: the arguments of --train-data and --val-data: shards, a corpus directory, or several corpora with weights.

  text        GLOB | DIR | NAME=GLOB-or-DIR:WEIGHT NAME=...:WEIGHT ...
              A backslash makes the next character part of the path, for spaces. A weight is a share of the windows that
              are read; weights are normalized to sum to 1. A text that is the name of a file or directory, or that has
              no colon, is one path: a pattern may begin with NAME=, as in lang=en/train_*.bin.
  directory   train_*.bin, val_*.bin and corpus.json, which is written last
  corpus.json Keys read here: "vocab_size" (greater than every token id), "separator" {"token", "place": "before" or
              "after" a document}, "tokenizer" (a name; "bytes": tokens are bytes), and "shards" [{"file", "tokens"}],
              the files that the directory must have.

  CorpusSpecs corpus_parse(text)               exits with one line if the text is invalid
  bool        corpus_read_info(path, &info)    false if `path` is not a directory with a corpus.json
  void        corpus_check_shards(...)         exits unless the shards equal the list in corpus.json
  void        documents_find(...)             where the document of each token begins
*/
#pragma once
#include "../base/files.h"
#include "../base/json.h"
#include "shards.h"

enum { CORPUS_LIMIT = 64, CORPUS_NAME = 32 };

typedef struct {
    int token;  // the token that separates documents; -1: unknown
    bool after; // it follows each document; otherwise it precedes each
} Separator;

typedef struct {
    char name[CORPUS_NAME]; // empty if there is only one corpus
    char path[PATH_MAX];
    double weight;
} CorpusSpec;

typedef struct {
    int count;
    CorpusSpec *items;
} CorpusSpecs;

typedef struct {
    int vocab_size; // 0: unknown
    Separator separator;
    bool bytes, other; // whether "tokenizer" states that tokens are bytes, or names another tokenizer
} CorpusInfo;

#define CORPUS_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
static inline size_t corpus_name_length(const char *text) { return strspn(text, CORPUS_LETTERS); }

static inline bool corpus_is_mixture(const char *text) {
    struct stat file;
    const char *first = text + strspn(text, " \t\n");
    size_t name = corpus_name_length(first);
    return name > 0 && first[name] == '=' && strchr(text, ':') && stat(text, &file) != 0;
}

// Parses one NAME=PATH:WEIGHT of `mixture`; returns the rest of the text.
static inline const char *corpus_parse_spec(CorpusSpec *item, const char *text, const char *mixture) {
    size_t name = corpus_name_length(text), n = 0, colon = SIZE_MAX;
    CHECK(
        text[name] == '=' && name > 0 && name < CORPUS_NAME,
        "'%s': '%.*s' does not begin with NAME=, a name of 1 to %d letters, digits, - or _: specify several corpora as "
        "NAME=PATH:WEIGHT NAME=PATH:WEIGHT",
        mixture, (int)strcspn(text, " \t\n"), text, CORPUS_NAME - 1);
    memcpy(item->name, text, name);
    item->name[name] = 0;
    for (text += name + 1; *text && !strchr(" \t\n", *text); text++) {
        CHECK(n + 1 < PATH_MAX, "'%s': the path of '%s' is too long", mixture, item->name);
        if (*text == ':') colon = n;
        if (*text == '\\' && text[1]) text++;
        item->path[n++] = *text;
    }
    item->path[n] = 0;
    char *end = NULL;
    const char *number = colon == SIZE_MAX ? "" : item->path + colon + 1;
    item->weight = strtod(number, &end);
    CHECK(colon != SIZE_MAX && colon > 0, "'%s': '%s=%s' has no weight: write %s=PATH:0.5", mixture, item->name,
          item->path, item->name);
    CHECK(*number && strspn(number, "0123456789.eE+-") == strlen(number) && *end == 0 && item->weight > 0 &&
              isfinite(item->weight),
          "'%s': the weight '%s' of '%s' is not a positive number", mixture, number, item->name);
    item->path[colon] = 0;
    return text + strspn(text, " \t\n");
}

// Normalizes the weights to sum to 1. free(items).
static inline CorpusSpecs corpus_parse(const char *text) {
    CorpusSpecs list = {0, (CorpusSpec *)checked_calloc(CORPUS_LIMIT, sizeof(CorpusSpec))};
    if (!corpus_is_mixture(text)) {
        CHECK(strlen(text) < PATH_MAX, "a path of %zu bytes is too long", strlen(text));
        strcpy(list.items[0].path, text);
        list.items[0].weight = list.count = 1;
        return list;
    }
    double sum = 0;
    for (const char *at = text + strspn(text, " \t\n"); *at;) {
        CHECK(list.count < CORPUS_LIMIT, "'%s': more than %d corpora", text, CORPUS_LIMIT);
        CorpusSpec *item = &list.items[list.count++];
        at = corpus_parse_spec(item, at, text);
        sum += item->weight;
        for (int i = 0; i + 1 < list.count; i++)
            CHECK(strcmp(list.items[i].name, item->name) != 0,
                  "'%s': '%s' is specified more than once; add its weights", text, item->name);
    }
    CHECK(isfinite(sum), "'%s': the sum of the weights overflows: use smaller weights", text);
    for (int i = 0; i < list.count; i++) list.items[i].weight /= sum;
    return list;
}

// The separator of documents that a corpus.json states; it may be missing.
static inline Separator corpus_separator(const cJSON *json, const char *path, uint64_t vocab) {
    Separator s = {-1, false};
    const cJSON *separator = cJSON_GetObjectItemCaseSensitive(json, "separator");
    if (separator == NULL || cJSON_IsNull(separator)) return s;
    uint64_t token;
    const char *place = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(separator, "place"));
    CHECK(json_get_u64(separator, "token", &token) && token <= INT_MAX && place &&
              (!strcmp(place, "before") || !strcmp(place, "after")),
          "%s: its \"separator\" is not {\"token\": ID, \"place\": \"before\" or \"after\"}", path);
    CHECK(token < vocab, "%s: its separator %" PRIu64 " is not below its vocabulary size %" PRIu64, path, token, vocab);
    s.token = (int)token;
    s.after = strcmp(place, "after") == 0;
    return s;
}

// The corpus.json of a directory, for cJSON_Delete; NULL if `path` is not a directory with one.
static inline cJSON *corpus_read(const char *path) {
    struct stat file;
    if (stat(path, &file) != 0 || !S_ISDIR(file.st_mode)) return NULL;
    char name[PATH_MAX + 32];
    size_t size = 0;
    FORMAT(name, "%s/corpus.json", path);
    if (!file_exists(name)) return NULL;
    char *text = file_read(name, 64 << 20, &size);
    CHECK(text != NULL, "cannot read %s: %s", name, strerror(errno));
    CHECK(json_bounded(text, size), "%s has more than %d JSON values: create the corpus again with larger shards", name,
          (int)JSON_VALUE_LIMIT);
    cJSON *json = json_parse(text, size);
    CHECK(json != NULL, "%s is not valid JSON: create the corpus again", name);
    uint64_t format = 0;
    CHECK(json_get_u64(json, "format", &format) && format == 1,
          "%s: \"format\" must be 1, the format that this version reads", name);
    free(text);
    return json;
}

static inline bool corpus_read_info(const char *path, CorpusInfo *info) {
    char name[PATH_MAX + 32];
    uint64_t vocab = 0;
    info->vocab_size = 0;
    info->separator.token = -1;
    info->separator.after = false;
    info->bytes = info->other = false;
    cJSON *json = corpus_read(path);
    if (json == NULL) return false;
    FORMAT(name, "%s/corpus.json", path);
    CHECK(json_get_u64(json, "vocab_size", &vocab) && vocab >= 1 && vocab <= INT_MAX,
          "%s has no \"vocab_size\" of 1 or more", name);
    info->vocab_size = (int)vocab;
    info->separator = corpus_separator(json, name, vocab);
    const char *tokenizer = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "tokenizer"));
    info->bytes = tokenizer && strcmp(tokenizer, "bytes") == 0;
    info->other = tokenizer && !info->bytes;
    cJSON_Delete(json);
    return true;
}

// Exits unless the shards of `split` ("train" or "val") equal the list in corpus.json, if it has a list. An incomplete
// copy, or shards of another corpus in the directory, would be different data from what corpus.json describes.
static inline void corpus_check_shards(const char *path, const char *split, const Shard *shards, size_t count) {
    cJSON *json = corpus_read(path);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "shards"), *item;
    size_t listed = 0;
    bool *seen = (bool *)checked_calloc(count, sizeof(bool));
    cJSON_ArrayForEach(item, list) {
        const char *file = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "file"));
        uint64_t tokens = 0;
        CHECK(file && strspn(file, CORPUS_LETTERS ".") == strlen(file) && strlen(file) < PATH_MAX &&
                  json_get_u64(item, "tokens", &tokens),
              "%s/corpus.json: its \"shards\" are not [{\"file\": NAME, \"tokens\": NUMBER}, ...]", path);
        if (strncmp(file, split, strlen(split)) != 0 || file[strlen(split)] != '_') continue;
        char name[2 * PATH_MAX];
        FORMAT(name, "%s/%s", path, file);
        Shard wanted;
        wanted.path = name;
        const Shard *found = (const Shard *)bsearch(&wanted, shards, count, sizeof(Shard), shard_compare_paths);
        CHECK(found != NULL, "%s is missing, and %s/corpus.json lists it: copy or create the corpus again", name, path);
        CHECK(!seen[found - shards], "%s/corpus.json lists %s twice: create the corpus again", path, file);
        seen[found - shards] = true;
        CHECK(found->token_count == tokens,
              "%s has %zu tokens, and %s/corpus.json states %" PRIu64 ": copy or create the corpus again", name,
              found->token_count, path, tokens);
        listed++;
    }
    CHECK(list == NULL || listed == count,
          "%s has %zu %s_*.bin, and its corpus.json lists %zu of them: move the others, or specify the shards by a "
          "pattern",
          path, count, split, listed);
    free(seen);
    cJSON_Delete(json);
}

// The vocabulary size that the corpora of `text` require; a corpus that does not state its size counts as `fallback`.
static inline int corpus_vocabulary(const char *text, int fallback) {
    CorpusSpecs list = corpus_parse(text);
    int vocabulary = 0;
    for (int i = 0; i < list.count; i++) {
        CorpusInfo info;
        vocabulary = max_int(vocabulary, corpus_read_info(list.items[i].path, &info) ? info.vocab_size : fallback);
    }
    free(list.items);
    return vocabulary;
}

// --separator: "ID", "ID:before" or "ID:after"
static inline bool separator_parse(const char *text, Separator *s) {
    char *end = NULL;
    long token = strtol(text, &end, 10);
    if (strspn(text, "0123456789") == 0 || token > INT_MAX) return false;
    s->token = (int)token;
    s->after = strcmp(end, ":after") == 0;
    return *end == 0 || s->after || strcmp(end, ":before") == 0;
}

// start[t], in [0,t] = the position of the first token of the document of tokens[t]; 0 for a document that began before
// tokens[0]. Attention of position t is restricted to positions from start[t] on.
static inline void documents_find(int *start, const int *tokens, int T, Separator s) {
    for (int t = 0, first = 0; t < T; t++) {
        bool separates = s.after ? t > 0 && tokens[t - 1] == s.token : tokens[t] == s.token;
        if (separates) first = t;
        start[t] = first;
    }
}
