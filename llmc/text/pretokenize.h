// clang-format off
/*
pretokenize.h: splits text into pieces, as the regular expressions of known tokenizers do. Tokens are merged only
within a piece.

  PATTERN_GPT2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  PATTERN_CL100K  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+
                  |\s+(?!\S)|\s+
  PATTERN_QWEN2   PATTERN_CL100K with \p{N} instead of \p{N}{1,3}
  PATTERN_O200K   X?H*T+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|X?H+T*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}
                  | ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
                  with X = [^\r\n\p{L}\p{N}], H = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}], T = [\p{Ll}\p{Lm}\p{Lo}\p{M}]
  PATTERN_NONE    the whole text is one piece

An alternative is tried only if all earlier ones have failed. Each is greedy and gives back only what the rest of it
needs. Every code point is a letter, a number, a space or another character, so no text is lost. A mark (\p{M}) is
another character, and a member of H and T.
*/
// clang-format on
#pragma once
#include "tokenizer_table.h"

// Valid UTF-8 as code points.
typedef struct {
    uint32_t *code;      // [count], then 0
    unsigned char *kind; // [count], then 0
    size_t *at;          // [count + 1]: first byte of each
    size_t count;
} CodePoints;

static inline uint32_t utf8_decode(const unsigned char *s, int length) {
    if (length == 1) return s[0];
    uint32_t code = s[0] & (0xFFu >> (length + 1));
    for (int i = 1; i < length; i++) code = code << 6 | (s[i] & 0x3F);
    return code;
}

// Returns false if the bytes are not UTF-8.
static inline bool codepoints_read(CodePoints *c, const Tokenizer *t, const unsigned char *text, size_t size) {
    unsigned char *padded = (unsigned char *)checked_calloc(size + 4, 1); // a truncated character ends at a 0
    memcpy(padded, text, size);
    c->code = (uint32_t *)checked_calloc(size + 1, sizeof(uint32_t));
    c->kind = (unsigned char *)checked_calloc(size + 1, 1);
    c->at = (size_t *)checked_calloc(size + 1, sizeof(size_t));
    c->count = 0;
    size_t i = 0;
    while (i < size) {
        int length = utf8_length(padded + i);
        if (length == 0) break;
        c->code[c->count] = utf8_decode(padded + i, length);
        c->kind[c->count] = (unsigned char)tokenizer_class(t, c->code[c->count]);
        c->at[c->count++] = i;
        i += length;
    }
    c->at[c->count] = i;
    free(padded);
    return i == size;
}
static inline void codepoints_free(CodePoints *c) {
    free(c->code);
    free(c->kind);
    free(c->at);
}

// The end of the run at i of characters whose class is in `classes` (0: no letter, number or space).
static inline size_t skip_class(const CodePoints *c, size_t i, int classes) {
    while (i < c->count && (classes ? (c->kind[i] & classes) != 0 : (c->kind[i] & CLASS_BASE) == 0)) i++;
    return i;
}
static inline bool is_newline(const CodePoints *c, size_t i) {
    return i < c->count && (c->code[i] == '\r' || c->code[i] == '\n');
}

// The end of 's 't 're 've 'm 'll 'd at i; i if there is none.
static inline size_t match_contraction(const CodePoints *c, size_t i, bool any_case) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    if (c->code[i] != '\'') return i;
    for (size_t e = 0; e < sizeof(endings) / sizeof(endings[0]); e++) {
        size_t n = 0;
        for (; endings[e][n]; n++) {
            uint32_t code = i + 1 + n < c->count ? c->code[i + 1 + n] : 0, want = (uint32_t)endings[e][n];
            bool same = code == want || (any_case && (code == want - 32 || (want == 's' && code == 0x17F))); // long s
            if (!same) break;
        }
        if (!endings[e][n]) return i + 1 + n;
    }
    return i;
}

// The end of the spaces at i. If text follows, the last space is excluded, so that it can join the next piece.
static inline size_t match_spaces(const CodePoints *c, size_t i) {
    size_t end = skip_class(c, i, CLASS_SPACE);
    return end < c->count && end - i > 1 ? end - 1 : end;
}

static inline size_t match_gpt2(const CodePoints *c, size_t i) {
    size_t end = match_contraction(c, i, false), begin = i + (c->code[i] == ' ');
    if (end > i) return end;
    static const int classes[] = {CLASS_LETTER, CLASS_NUMBER, 0};
    for (int k = 0; k < 3; k++) {
        end = skip_class(c, begin, classes[k]);
        if (end > begin) return end;
    }
    return match_spaces(c, i);
}

// The alternatives after the words in the expressions of cl100k, qwen2 and o200k.
static inline size_t match_without_word(const CodePoints *c, size_t i, size_t digits, bool slash) {
    size_t end = i, begin = i + (c->code[i] == ' ');
    while (end < c->count && end - i < digits && (c->kind[end] & CLASS_NUMBER)) end++;
    if (end > i) return end;
    end = skip_class(c, begin, 0);
    if (end > begin) {
        while (is_newline(c, end) || (slash && end < c->count && c->code[end] == '/')) end++;
        return end;
    }
    size_t newline = skip_class(c, i, CLASS_SPACE); // after the last newline among the spaces, if any
    while (newline > i && !is_newline(c, newline - 1)) newline--;
    return newline > i ? newline : match_spaces(c, i);
}

// [^\r\n\p{L}\p{N}]: one such character may precede a word and belong to it.
static inline bool may_lead_word(const CodePoints *c, size_t i) {
    return !is_newline(c, i) && !(c->kind[i] & (CLASS_LETTER | CLASS_NUMBER));
}

static inline size_t match_cl100k(const CodePoints *c, size_t i, size_t digits) {
    size_t end = match_contraction(c, i, true), begin = i + may_lead_word(c, i);
    if (end > i) return end;
    end = skip_class(c, begin, CLASS_LETTER);
    return end > begin ? end : match_without_word(c, i, digits, false);
}

// The end of H*T+ at i; i if there is none. If no T follows the H*, it is shortened until its last character is a T.
static inline size_t match_word_with_tail(const CodePoints *c, size_t i) {
    size_t head = skip_class(c, i, CLASS_HEAD), end = skip_class(c, head, CLASS_TAIL);
    if (end > head) return end;
    while (head > i && !(c->kind[head - 1] & CLASS_TAIL)) head--;
    return head;
}

static inline size_t match_o200k(const CodePoints *c, size_t i) {
    size_t lead = may_lead_word(c, i);
    for (int tail = 1; tail >= 0; tail--) {
        for (size_t begin = i + lead;; begin = i) { // with a leading character, then without
            size_t end = tail ? match_word_with_tail(c, begin) : skip_class(c, begin, CLASS_HEAD);
            if (end > begin) return match_contraction(c, end, true);
            if (begin == i) break;
        }
    }
    return match_without_word(c, i, 3, true);
}

// The end of the piece at i < count.
static inline size_t pretokenize(const Tokenizer *t, const CodePoints *c, size_t i) {
    switch (t->pattern) {
    case PATTERN_GPT2: return match_gpt2(c, i);
    case PATTERN_CL100K: return match_cl100k(c, i, 3);
    case PATTERN_QWEN2: return match_cl100k(c, i, 1);
    case PATTERN_O200K: return match_o200k(c, i);
    default: return c->count;
    }
}
