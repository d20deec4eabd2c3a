/*
prompts.h: a file of prompts: one on each line, or JSON lines.

  Prompts prompts_read(path)   path "-": standard input. Exits with one line that names the file and the line if the
                               file cannot be read, has no prompts or has an invalid one
  void    prompts_close(p)

  format      JSON lines if the first character other than white space is '{': {"prompt": TEXT} or
              {"tokens": [ID, ...]}, without other keys; else each line is a text. Both are UTF-8; a byte order mark is
              skipped
  lines       end with LF or CRLF, the last one also with the end of the file. Empty lines are skipped, with a warning;
              in JSON lines also lines of spaces. {"prompt": ""} is an empty prompt
  refused     NUL bytes, also as \u0000: {"tokens": [0]} gives such a byte
  memory      twice the size of the file, which is at most PROMPTS_BYTES, with at most PROMPTS_COUNT prompts
*/
#pragma once
#include "../base/json.h"

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
    int empty; // lines that were skipped
} Prompts;

static inline void prompts_close(Prompts *p) {
    for (int i = 0; i < p->count; i++) {
        free(p->items[i].text);
        free(p->items[i].tokens);
    }
    free(p->items);
    memset(p, 0, sizeof(*p));
}

// All bytes of a file, which may be a pipe, followed by 8 zero bytes.
static inline char *prompts_load(const char *path, const char *name, size_t *size) {
    bool standard = strcmp(path, "-") == 0;
    int fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0, "--prompts %s cannot be opened: %s", name, strerror(errno));
    size_t room = 1 << 16;
    char *text = (char *)checked_calloc(room, 1);
    *size = 0;
    for (;;) {
        ssize_t n = read(fd, text + *size, room - 8 - *size);
        if (n < 0 && errno == EINTR) continue;
        CHECK(n >= 0, "--prompts %s cannot be read: %s", name, strerror(errno));
        *size += (size_t)n;
        CHECK(*size <= PROMPTS_BYTES, "--prompts %s is larger than %d MiB: split it", name, PROMPTS_BYTES >> 20);
        if (n == 0) break;
        if (room - 8 > *size) continue;
        text = (char *)realloc(text, room *= 2);
        CHECK(text != NULL, "out of memory for --prompts %s", name);
    }
    memset(text + *size, 0, 8);
    if (!standard) close(fd);
    return text;
}

static inline Prompt *prompts_add(Prompts *p, int line) {
    CHECK(p->count < PROMPTS_COUNT, "--prompts %s has more than %d prompts: split it", p->name, PROMPTS_COUNT);
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

// The line text[0 .. size-1], without its end; text[size] is 0.
static inline void prompts_add_line(Prompts *p, const char *text, size_t size, int line, bool json) {
    const char *nul = (const char *)memchr(text, 0, size);
    CHECK(!nul, "%s, line %d has a NUL byte at byte %zu: give the prompt as {\"tokens\": [ID, ...]}", p->name, line,
          nul ? (size_t)(nul - text) + 1 : 0);
    size_t invalid = utf8_invalid_at(text, size);
    CHECK(!invalid, "%s, line %d is not valid UTF-8 at byte %zu: use UTF-8, or {\"tokens\": [ID, ...]}", p->name, line,
          invalid);
    if (size == 0 || (json && strspn(text, " \t\r") == size)) p->empty++;
    else if (json) prompts_add_json(p, text, size, line);
    else prompt_set_text(prompts_add(p, line), text, size);
}

static inline Prompts prompts_read(const char *path) {
    Prompts p;
    memset(&p, 0, sizeof(p));
    p.name = strcmp(path, "-") == 0 ? "standard input" : path;
    size_t size;
    char *text = prompts_load(path, p.name, &size), *at = text, *end = text + size;
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) at += 3;
    bool json = at[strspn(at, " \t\r\n")] == '{';
    for (int line = 1; at < end; line++) {
        char *stop = (char *)memchr(at, '\n', (size_t)(end - at)), *next = stop ? stop + 1 : end;
        if (!stop) stop = end;
        if (stop > at && stop[-1] == '\r') stop--;
        *stop = 0;
        prompts_add_line(&p, at, (size_t)(stop - at), line, json);
        at = next;
    }
    CHECK(p.count > 0, "--prompts %s has no prompts: write one on each line", p.name);
    if (p.empty) warn("%s: %d empty line%s skipped", p.name, p.empty, p.empty == 1 ? " is" : "s are");
    free(text);
    return p;
}
