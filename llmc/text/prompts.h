/*
prompts.h: a file of prompts: one on each line, or JSON lines.

  Prompts prompts_open(path)      path "-": standard input
  bool    prompts_next(p, wait)   adds the next prompt to the list. Returns false at the end of the file or, without
                                  wait, if no whole line has arrived
  Prompts prompts_read(path)      all prompts of a file; of standard input, which may go on, none yet
  void    prompts_close(p)
  These exit with one line that names the file and the line if the file cannot be read, has no prompts or has an invalid
  one.

  format      JSON lines if the first character other than white space is '{': {"prompt": TEXT} or
              {"tokens": [ID, ...]}, without other keys; else each line is a text. Both are UTF-8; a byte order mark is
              skipped
  lines       end with LF or CRLF, the last one also with the end of the file. Empty lines are skipped, with a warning;
              in JSON lines, and before the first text, also lines of spaces. {"prompt": ""} is an empty prompt
  refused     NUL bytes, also as \u0000: {"tokens": [0]} gives such a byte
  memory      twice the size of the file, which is at most PROMPTS_BYTES, with at most PROMPTS_COUNT prompts; of
              standard input each line is at most PROMPTS_BYTES
*/
#pragma once
#include "../base/json.h"
#include <poll.h>

enum { PROMPTS_BYTES = 256 << 20, PROMPTS_COUNT = 1 << 20 };

// Reads the next token ID of a comma-separated list and advances *at to the following one, or the end. Returns false
// if there is no valid ID.
static inline bool prompt_number(const char **at, int *id) {
    char *end = NULL;
    errno = 0;
    long long x = strtoll(*at, &end, 10);
    if (!isdigit((unsigned char)**at) || errno || x > INT_MAX || (*end && (*end != ',' || !end[1]))) return false;
    *id = (int)x;
    *at = end + (*end == ',');
    return true;
}

static inline bool prompt_numbers_valid(const char *text) {
    int id;
    do
        if (!prompt_number(&text, &id)) return false;
    while (*text);
    return true;
}

typedef struct {
    char *text;  // `size` bytes, followed by a 0; NULL: the prompt is given as tokens
    size_t size; // bytes of the text
    int *tokens; // IDs as in the file, not yet compared with a vocabulary
    int count;   // number of tokens
    int line;    // line in the file, from 1
} Prompt;

typedef struct {
    const char *name; // name of the file, for messages
    Prompt *items;
    int count, room;
    int fd;                            // -1: the file has been read to its end
    char *text;                        // bytes begin .. end-1 have been read and are not parsed; 8 zero bytes follow
    size_t begin, end, scanned, space; // the first `scanned` of these bytes have no line end; space: of text
    int line, empty;                   // lines that were read, and that were skipped
    bool json, decided;                // whether prompts are JSON; a line with text has decided it
    bool ended;                        // the end has been reported
} Prompts;

static inline Prompts prompts_open(const char *path) {
    Prompts p;
    bool standard = strcmp(path, "-") == 0;
    memset(&p, 0, sizeof(p));
    p.name = standard ? "standard input" : path;
    p.fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    CHECK(p.fd >= 0, "--prompts %s cannot be opened: %s", p.name, strerror(errno));
    p.space = 1 << 17;
    p.text = (char *)checked_calloc(p.space, 1);
    return p;
}

static inline void prompt_free(Prompt *prompt) {
    free(prompt->text);
    free(prompt->tokens);
    memset(prompt, 0, sizeof(*prompt));
}

static inline void prompts_close(Prompts *p) {
    for (int i = 0; i < p->count; i++) prompt_free(&p->items[i]);
    free(p->items);
    free(p->text);
    memset(p, 0, sizeof(*p));
}

// Reads the bytes that have arrived, or waits for one.
static inline void prompts_fill(Prompts *p) {
    memmove(p->text, p->text + p->begin, p->end - p->begin);
    p->end -= p->begin;
    p->begin = 0;
    if (p->space < p->end + (1 << 16)) {
        p->space *= 2;
        p->text = (char *)realloc(p->text, p->space);
        CHECK(p->text != NULL, "out of memory for %s", p->name);
    }
    ssize_t n = read(p->fd, p->text + p->end, p->space - 8 - p->end);
    while (n < 0 && errno == EINTR) n = read(p->fd, p->text + p->end, p->space - 8 - p->end);
    CHECK(n >= 0, "--prompts %s cannot be read: %s", p->name, strerror(errno));
    p->end += (size_t)n;
    memset(p->text + p->end, 0, 8);
    CHECK(p->end <= PROMPTS_BYTES, "line %d of %s is longer than %d MiB: split it", p->line + 1, p->name,
          PROMPTS_BYTES >> 20);
    if (n > 0) return;
    if (p->fd != STDIN_FILENO) close(p->fd);
    p->fd = -1;
}

// The next line, without its end and followed by a 0; valid until the next call. NULL: see prompts_next.
static inline char *prompts_line(Prompts *p, bool wait, size_t *size) {
    for (;;) {
        size_t unread = p->end - p->begin;
        char *at = p->text + p->begin;
        char *stop = unread > p->scanned ? (char *)memchr(at + p->scanned, '\n', unread - p->scanned) : NULL;
        if (stop || (p->fd < 0 && unread)) {
            *size = stop ? (size_t)(stop - at) : unread;
            p->begin += *size + (stop != NULL);
            p->scanned = 0;
            p->line++;
            if (*size && at[*size - 1] == '\r') --*size;
            at[*size] = 0;
            bool marked = p->line == 1 && strncmp(at, "\xEF\xBB\xBF", 3) == 0;
            *size -= marked ? 3 : 0;
            return at + (marked ? 3 : 0);
        }
        p->scanned = unread;
        struct pollfd input = {p->fd, POLLIN, 0};
        if (p->fd < 0 || (!wait && poll(&input, 1, 0) == 0)) return NULL;
        prompts_fill(p);
    }
}

static inline Prompt *prompts_add(Prompts *p, int line) {
    if (p->count == p->room) {
        p->room = 2 * p->room + 64;
        p->items = (Prompt *)realloc(p->items, (size_t)p->room * sizeof(Prompt));
        CHECK(p->items != NULL, "out of memory for %d prompts", p->room);
    }
    Prompt *prompt = &p->items[p->count++];
    memset(prompt, 0, sizeof(*prompt));
    prompt->line = line;
    return prompt;
}

static inline void prompt_set_text(Prompt *prompt, const char *text, size_t size) {
    prompt->text = (char *)checked_calloc(size + 1, 1);
    memcpy(prompt->text, text, size);
    prompt->size = size;
}

static inline void prompt_set_tokens(Prompt *prompt, const cJSON *list, const char *name) {
    prompt->tokens = (int *)checked_calloc((size_t)cJSON_GetArraySize(list), sizeof(int));
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        uint64_t id = 0;
        CHECK(json_size(item, &id) && id <= INT_MAX, "%s, line %d: element %d of \"tokens\" is not a token ID", name,
              prompt->line, prompt->count + 1);
        prompt->tokens[prompt->count++] = (int)id;
    }
    CHECK(prompt->count > 0, "%s, line %d: \"tokens\" is empty: give at least one token ID", name, prompt->line);
}

// Whether a JSON text has the character U+0000, at which the parser would end a string.
static inline bool json_has_nul(const char *text) {
    for (const char *at = strchr(text, '\\'); at; at = strchr(at, '\\')) {
        if (strncmp(at, "\\u0000", 6) == 0) return true;
        at += at[1] ? 2 : 1;
    }
    return false;
}

// A line {"prompt": TEXT} or {"tokens": [ID, ...]}. text[size] is 0.
static inline void prompts_add_json(Prompts *p, const char *text, size_t size, int line) {
    static const char *const form = "a line is {\"prompt\": TEXT} or {\"tokens\": [ID, ...]}";
    cJSON *object = json_parse(text, size);
    CHECK(cJSON_IsObject(object), "%s, line %d is not a JSON object: %s, because the file begins with '{'", p->name,
          line, form);
    CHECK(!json_has_nul(text), "%s, line %d has the character U+0000: give the prompt as \"tokens\"", p->name, line);
    Prompt *prompt = prompts_add(p, line);
    char key[40] = "";
    const cJSON *item;
    cJSON_ArrayForEach(item, object) {
        cJSON *name = cJSON_CreateStringReference(item->string);
        json_brief(name, key, sizeof(key));
        cJSON_Delete(name);
        bool text_key = strcmp(item->string, "prompt") == 0, tokens_key = strcmp(item->string, "tokens") == 0;
        CHECK(text_key || tokens_key, "%s, line %d has the key %s: %s", p->name, line, key, form);
        CHECK(!prompt->text && !prompt->tokens, "%s, line %d has more than one prompt: %s", p->name, line, form);
        CHECK(text_key ? cJSON_IsString(item) : cJSON_IsArray(item), "%s, line %d: %s is not %s: %s", p->name, line,
              key, text_key ? "a string" : "a list", form);
        if (text_key) prompt_set_text(prompt, item->valuestring, strlen(item->valuestring));
        else prompt_set_tokens(prompt, item, p->name);
    }
    CHECK(prompt->text || prompt->tokens, "%s, line %d has no prompt: %s", p->name, line, form);
    cJSON_Delete(object);
}

// A line, as prompts_line returns it.
static inline void prompts_add_line(Prompts *p, const char *text, size_t size) {
    const char *nul = (const char *)memchr(text, 0, size);
    CHECK(!nul, "%s, line %d has a NUL byte at byte %zu: give the prompt as {\"tokens\": [ID, ...]}", p->name, p->line,
          nul ? (size_t)(nul - text) + 1 : 0);
    size_t invalid = utf8_invalid_at(text, size);
    CHECK(!invalid, "%s, line %d is not valid UTF-8 at byte %zu: use UTF-8, or {\"tokens\": [ID, ...]}", p->name,
          p->line, invalid);
    size_t spaces = strspn(text, " \t\r");
    if (!p->decided && spaces < size) p->decided = true, p->json = text[spaces] == '{';
    if (size == 0 || (spaces == size && (p->json || !p->decided))) p->empty++;
    else if (p->json) prompts_add_json(p, text, size, p->line);
    else prompt_set_text(prompts_add(p, p->line), text, size);
}

static inline bool prompts_next(Prompts *p, bool wait) {
    int count = p->count;
    for (char *line; p->count == count;) {
        size_t size;
        if ((line = prompts_line(p, wait, &size)) != NULL) prompts_add_line(p, line, size);
        else break;
    }
    if (p->count > count || p->fd >= 0 || p->ended) return p->count > count;
    CHECK(p->count > 0, "--prompts %s has no prompts: write one on each line", p->name);
    if (p->empty) warn("%s: %d empty line%s skipped", p->name, p->empty, p->empty == 1 ? " is" : "s are");
    p->ended = true;
    return false;
}

static inline Prompts prompts_read(const char *path) {
    Prompts p = prompts_open(path);
    size_t bytes = 0;
    while (p.fd != STDIN_FILENO && prompts_next(&p, true)) {
        const Prompt *prompt = &p.items[p.count - 1];
        bytes += prompt->size + (size_t)prompt->count;
        CHECK(bytes <= PROMPTS_BYTES, "--prompts %s is larger than %d MiB: split it", p.name, PROMPTS_BYTES >> 20);
        CHECK(p.count <= PROMPTS_COUNT, "--prompts %s has more than %d prompts: split it", p.name, PROMPTS_COUNT);
    }
    return p;
}
