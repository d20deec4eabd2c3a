/*
corpus.h: what --train-data and --val-data name: shards, corpus directories, or several of them with weights.

  text        GLOB | DIR | NAME=GLOB-or-DIR:WEIGHT NAME=...:WEIGHT ...
              A backslash makes the next character part of a path, for spaces. A weight is a share of the windows that
              are read; their sum is taken for 1. A text that is the name of a file or directory is that alone.
  directory   what data/prepare.py makes: train_*.bin, val_*.bin and corpus.json, which is written last, so that a
              directory without it is unfinished
  corpus.json read here: "vocab_size" (every token id is below it) and "separator" {"token", "place": "before" or
              "after" a document}

  CorpusList corpus_parse(text)                ends the program with one line when it cannot be read
  bool       corpus_describe(path, &about)     false when `path` is no corpus directory
  void       document_starts(...)              where the document of each token begins
*/
#ifndef LLMC_CORPUS_H
#define LLMC_CORPUS_H
#include "files.h"
#include "json.h"

enum { CORPUS_LIMIT = 64, CORPUS_NAME = 32 };

typedef struct {
    int token;  // that separates documents; -1: not known
    bool after; // it ends a document; otherwise it begins one
} Separator;

typedef struct {
    char name[CORPUS_NAME]; // empty for the only one
    char path[PATH_MAX];
    double weight;
} CorpusItem;

typedef struct {
    int count;
    CorpusItem *items;
} CorpusList;

typedef struct {
    int vocab_size; // 0: not known
    Separator separator;
} CorpusAbout;

static inline bool corpus_is_mixture(const char *text) {
    struct stat file;
    size_t name = strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-");
    return name > 0 && text[name] == '=' && stat(text, &file) != 0;
}

// One NAME=PATH:WEIGHT; returns what follows it.
static inline const char *corpus_parse_item(CorpusItem *item, const char *text, const char *whole) {
    size_t name = strcspn(text, "= \t\n"), n = 0, colon = SIZE_MAX;
    CHECK(text[name] == '=' && name > 0 && name < CORPUS_NAME,
          "'%s': '%.*s' does not begin with NAME=, a name of 1 to %d letters: several corpora are NAME=PATH:WEIGHT NAME=PATH:WEIGHT", whole,
          (int)strcspn(text, " \t\n"), text, CORPUS_NAME - 1);
    memcpy(item->name, text, name);
    item->name[name] = 0;
    for (text += name + 1; *text && !strchr(" \t\n", *text); text++) {
        CHECK(n + 1 < PATH_MAX, "'%s': the path of '%s' is too long", whole, item->name);
        if (*text == ':') colon = n;
        if (*text == '\\' && text[1]) text++;
        item->path[n++] = *text;
    }
    item->path[n] = 0;
    char *end = NULL;
    const char *number = colon == SIZE_MAX ? "" : item->path + colon + 1;
    item->weight = strtod(number, &end);
    CHECK(colon != SIZE_MAX && colon > 0, "'%s': '%s=%s' has no weight: write %s=PATH:0.5", whole, item->name, item->path, item->name);
    CHECK(*number && strspn(number, "0123456789.eE+-") == strlen(number) && *end == 0 && item->weight > 0 && isfinite(item->weight),
          "'%s': the weight '%s' of '%s' is no positive number", whole, number, item->name);
    item->path[colon] = 0;
    return text + strspn(text, " \t\n");
}

// Weights add up to 1. free(items).
static inline CorpusList corpus_parse(const char *text) {
    CorpusList list = {0, (CorpusItem *)checked_calloc(CORPUS_LIMIT, sizeof(CorpusItem))};
    if (!corpus_is_mixture(text)) {
        CHECK(strlen(text) < PATH_MAX, "a path of %zu bytes is too long", strlen(text));
        strcpy(list.items[0].path, text);
        list.items[0].weight = list.count = 1;
        return list;
    }
    double sum = 0;
    for (const char *at = text + strspn(text, " \t\n"); *at;) {
        CHECK(list.count < CORPUS_LIMIT, "'%s': more than %d corpora", text, CORPUS_LIMIT);
        CorpusItem *item = &list.items[list.count++];
        at = corpus_parse_item(item, at, text);
        sum += item->weight;
        for (int i = 0; i + 1 < list.count; i++)
            CHECK(strcmp(list.items[i].name, item->name) != 0, "'%s': '%s' is there twice; add its weights up", text, item->name);
    }
    for (int i = 0; i < list.count; i++) list.items[i].weight /= sum;
    return list;
}

// The token that separates documents, of a corpus.json; a missing one is none.
static inline Separator corpus_separator(const cJSON *json, const char *path) {
    Separator s = {-1, false};
    const cJSON *separator = cJSON_GetObjectItemCaseSensitive(json, "separator");
    if (separator == NULL || cJSON_IsNull(separator)) return s;
    uint64_t token;
    const char *place = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(separator, "place"));
    CHECK(json_get_u64(separator, "token", &token) && token <= INT_MAX && place && (!strcmp(place, "before") || !strcmp(place, "after")),
          "%s: its \"separator\" is not {\"token\": ID, \"place\": \"before\" or \"after\"}", path);
    s.token = (int)token;
    s.after = strcmp(place, "after") == 0;
    return s;
}

static inline bool corpus_describe(const char *path, CorpusAbout *about) {
    struct stat file;
    about->vocab_size = 0;
    about->separator.token = -1;
    about->separator.after = false;
    if (stat(path, &file) != 0 || !S_ISDIR(file.st_mode)) return false;
    char name[PATH_MAX + 32];
    size_t size = 0;
    FORMAT(name, "%s/corpus.json", path);
    CHECK(stat(name, &file) == 0,
          "%s has no corpus.json: a corpus that is not finished (run data/prepare.py again, it goes on), or no corpus; shards are named by a "
          "pattern, '%s/*.bin'",
          path, path);
    char *text = file_read(name, 64 << 20, &size);
    CHECK(text != NULL, "cannot read %s: %s", name, strerror(errno));
    cJSON *json = json_parse(text, size);
    uint64_t format = 0, vocab = 0;
    CHECK(json != NULL, "%s is not JSON: make the corpus again", name);
    CHECK(json_get_u64(json, "format", &format) && format == 1, "%s has another \"format\" than 1: it is not for this version", name);
    CHECK(json_get_u64(json, "vocab_size", &vocab) && vocab >= 1 && vocab <= INT_MAX, "%s has no \"vocab_size\" of 1 or more", name);
    about->vocab_size = (int)vocab;
    about->separator = corpus_separator(json, name);
    cJSON_Delete(json);
    free(text);
    return true;
}

// The vocabulary that the corpus directories of `text` need; 0 when there are none.
static inline int corpus_vocabulary(const char *text) {
    CorpusList list = corpus_parse(text);
    int vocabulary = 0;
    for (int i = 0; i < list.count; i++) {
        CorpusAbout about;
        corpus_describe(list.items[i].path, &about);
        vocabulary = max_int(vocabulary, about.vocab_size);
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

// start[t] = the place of the first token of the document that tokens[t] belongs to, in [0,t]; 0 for the document that
// was under way. Its tokens may see each other and nothing before.
static inline void document_starts(int *start, const int *tokens, int T, Separator s) {
    for (int t = 0, first = 0; t < T; t++) {
        bool separates = s.after ? t > 0 && tokens[t - 1] == s.token : tokens[t] == s.token;
        if (separates) first = t;
        start[t] = first;
    }
}
#endif
