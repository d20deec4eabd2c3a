/*
json.h: exact, reproducible JSON text; cJSON provides the tree and the parser.

  cJSON *json_parse(text, size)                text that is one JSON value; NULL if it is not, or has too many values.
                                               text[size] must be 0
  void   json_why(text, size, out, out_size)   the reason why json_parse returned NULL, for a message that begins with
                                               the name of the file
  bool   json_bounded(text, size)              whether it has at most JSON_VALUE_LIMIT values, which bounds the tree
  char  *json_text(item, &size)                two-space indent, arrays on one line, newline at the end; free()
  char  *json_line(item, &size)                the same text on one line, with a newline
  void   json_brief(item, out, out_size)       a value for messages: one line, truncated, without control characters
  bool   printable(string)                     whether it has no control characters
  void   json_add_u64(object, key, value)      a number; above 2^53, where doubles are inexact, a decimal string
  bool   json_get_u64(object, key, &value)
  bool   json_get_number(object, key, &value)
  bool   json_size(item, &value)               a number that is an integer in [0, 2^53]
  size_t json_escape(&text, out)               the next character of a string, escaped (at most 6 bytes)

cJSON prints 15 digits where they are accurate to one unit in the last place. Here a number has as many digits as it
takes to read back the same double. NaN and infinities are printed as null. Bytes that are not UTF-8 (sampled text, file
names) become U+FFFD.
*/
#pragma once
#include "common.h"

// A value takes about 100 bytes in a tree and 2 in text. A safetensors header of 100,000 tensors has 1.2 million.
enum { JSON_VALUE_LIMIT = 1 << 21 };

// Counts the characters that begin or separate values, without parsing. Each value needs one of them.
static inline bool json_bounded(const char *text, size_t size) {
    size_t values = 1;
    bool string = false;
    for (size_t i = 0; i < size && values <= JSON_VALUE_LIMIT; i++) {
        char c = text[i];
        if (string && c == '\\') i++;
        else if (c == '"') string = !string;
        else if (!string) values += c == ',' || c == ':' || c == '[' || c == '{';
    }
    return values <= JSON_VALUE_LIMIT;
}

static inline cJSON *json_parse(const char *text, size_t size) {
    assert(text[size] == 0);
    if (memchr(text, 0, size) || !json_bounded(text, size)) return NULL;
    // The length includes the closing 0: old versions of the parser otherwise read one byte past the end.
    const char *end = NULL;
    cJSON *item = cJSON_ParseWithLengthOpts(text, size + 1, &end, 0);
    for (; item && end < text + size; end++)
        if (!strchr(" \t\r\n", *end)) {
            cJSON_Delete(item);
            return NULL;
        }
    return item;
}

static inline void json_why(const char *text, size_t size, char *out, size_t out_size) {
    const char *end = NULL, *nul = (const char *)memchr(text, 0, size);
    if (!nul && strspn(text, " \t\r\n") == size) {
        snprintf(out, out_size, "is empty");
        return;
    }
    cJSON *item = nul ? NULL : cJSON_ParseWithLengthOpts(text, size + 1, &end, 0);
    if (nul) end = nul;
    else end += strspn(end, " \t\r\n");
    int shown = (int)min_size(12, text + size - end), at = 0;
    while (at < shown && end[at] >= 0x20 && end[at] < 0x7F) at++;
    snprintf(out, out_size, "%s byte %zu%s%.*s", item ? "has more than a JSON value, from" : "is not valid JSON from",
             (size_t)(end - text) + 1, at ? ": " : "", at, end);
    cJSON_Delete(item);
}

// Bytes of the UTF-8 character at s; 0 if it is invalid.
static inline int utf8_length(const unsigned char *s) {
    if (s[0] < 0x80) return 1;
    int length = s[0] >= 0xC2 && s[0] <= 0xDF ? 2 : (s[0] & 0xF0) == 0xE0 ? 3 : s[0] >= 0xF0 && s[0] <= 0xF4 ? 4 : 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    bool overlong = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
    bool beyond = (s[0] == 0xED && s[1] > 0x9F) || (s[0] == 0xF4 && s[1] > 0x8F); // surrogates, above U+10FFFF
    return overlong || beyond ? 0 : length;
}

// The number, from 1, of the first byte that is not UTF-8; 0: none.
static inline size_t utf8_invalid_at(const char *text, size_t size) {
    int length = 1;
    for (size_t at = 0; at < size; at += (size_t)length)
        if ((length = utf8_length((const unsigned char *)text + at)) == 0) return at + 1;
    return 0;
}

static inline size_t json_escape(const char **text, char out[8]) {
    unsigned char c = (unsigned char)**text;
    int length = utf8_length((const unsigned char *)*text);
    if (c == '"' || c == '\\') length = snprintf(out, 8, "\\%c", c);
    else if (c < 0x20 || c == 0x7F) length = snprintf(out, 8, "\\u%04x", c);
    else if (length == 0) length = snprintf(out, 8, "\xEF\xBF\xBD");
    else {
        memcpy(out, *text, length);
        *text += length;
        return length;
    }
    *text += 1;
    return length;
}

// A string of `size` bytes, which may include NUL; s[size] must be 0.
static inline void json_print_bytes(FILE *f, const char *s, size_t size) {
    char piece[8];
    fputc('"', f);
    for (const char *end = s + size; s < end;) {
        size_t length = json_escape(&s, piece);
        fwrite(piece, 1, length, f);
    }
    fputc('"', f);
}
static inline void json_print_string(FILE *f, const char *s) { json_print_bytes(f, s, strlen(s)); }

static inline void json_print_number(FILE *f, double x) {
    char digits[40];
    if (!isfinite(x)) FORMAT(digits, "null");
    else if (x == floor(x) && fabs(x) <= 0x1p53) FORMAT(digits, "%.0f", x);
    else
        for (int precision = 15; precision <= 17; precision++) {
            FORMAT(digits, "%.*g", precision, x);
            if (strtod(digits, NULL) == x) break;
        }
    fputs(digits, f);
}

// depth -1: on one line.
static inline void json_print(FILE *f, const cJSON *item, int depth) {
    int inner = depth < 0 ? -1 : depth + 1;
    if (cJSON_IsString(item)) json_print_string(f, item->valuestring);
    else if (cJSON_IsNumber(item)) json_print_number(f, item->valuedouble);
    else if (cJSON_IsBool(item)) fputs(cJSON_IsTrue(item) ? "true" : "false", f);
    else if (cJSON_IsArray(item) || cJSON_IsObject(item)) {
        bool object = cJSON_IsObject(item);
        fputc(object ? '{' : '[', f);
        for (const cJSON *child = item->child; child; child = child->next) {
            if (object) {
                if (depth >= 0) fprintf(f, "\n%*s", 2 * inner, "");
                json_print_string(f, child->string);
                fputs(": ", f);
            }
            json_print(f, child, inner);
            if (child->next) fputs(object && depth >= 0 ? "," : ", ", f);
        }
        if (object && item->child && depth >= 0) fprintf(f, "\n%*s", 2 * depth, "");
        fputc(object ? '}' : ']', f);
    } else fputs("null", f);
}

static inline char *json_printed(const cJSON *item, size_t *size, int depth) {
    char *text = NULL;
    FILE *f = open_memstream(&text, size);
    CHECK(f != NULL, "out of memory for a JSON text");
    json_print(f, item, depth);
    fputc('\n', f);
    bool failed = ferror(f) != 0;
    CHECK(fclose(f) == 0 && !failed, "out of memory for a JSON text");
    return text;
}

static inline char *json_text(const cJSON *item, size_t *size) { return json_printed(item, size, 0); }
static inline char *json_line(const cJSON *item, size_t *size) { return json_printed(item, size, -1); }

// Whether a name from a file can be part of a one-line message.
static inline bool printable(const char *s) {
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7F) return false;
    return true;
}

static inline void json_brief(const cJSON *item, char *out, size_t out_size) {
    char *text = cJSON_PrintUnformatted(item);
    snprintf(out, out_size, "%s", text ? text : "?");
    for (char *p = out; *p; p++) // DEL is not escaped by the printer
        if (*p == 0x7F) *p = '?';
    cJSON_free(text);
}

static inline bool json_size(const cJSON *item, uint64_t *value) {
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    if (!(x >= 0 && x <= 0x1p53 && x == floor(x))) return false;
    *value = (uint64_t)x;
    return true;
}

static inline void json_add_u64(cJSON *object, const char *key, uint64_t value) {
    char digits[24];
    FORMAT(digits, "%" PRIu64, value);
    bool exact = value <= 1ull << 53;
    CHECK(exact ? cJSON_AddNumberToObject(object, key, (double)value) : cJSON_AddStringToObject(object, key, digits),
          "out of memory for a JSON text");
}

static inline bool json_get_u64(const cJSON *object, const char *key, uint64_t *value) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (json_size(item, value)) return true;
    if (!cJSON_IsString(item) || !item->valuestring[0]) return false;
    uint64_t sum = 0;
    for (const char *p = item->valuestring; *p; p++) {
        if (*p < '0' || *p > '9' || __builtin_mul_overflow(sum, (uint64_t)10, &sum) ||
            __builtin_add_overflow(sum, (uint64_t)(*p - '0'), &sum))
            return false;
    }
    *value = sum;
    return true;
}

static inline bool json_get_number(const cJSON *object, const char *key, double *value) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (!cJSON_IsNumber(item)) return false;
    *value = item->valuedouble;
    return true;
}
