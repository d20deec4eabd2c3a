/*
tokenizer.h: encoding of text to tokens and decoding, with the table of tokenizer_table.h.

  size_t tokenizer_encode(t, text, size, &ids)   tokens of the text; free(*ids). Exits with one line if the text is not
                                                 UTF-8, or if the table states that it cannot encode
  char  *tokenizer_decode(t, ids, count, &size)  their bytes, followed by four 0 bytes; free()

  added tokens   are matched first, leftmost and longest, and are not split
  pieces         pretokenize.h splits the text between them
  merges         start from the bytes of a piece and merge the pair of the lowest rank, the leftmost of equals, until no
                 pair has a merge; O(n log n) for a piece of n bytes
  agreement      data/test_tokenizer.py compares the result with the `tokenizers` library
  source         byte pair encoding: Sennrich, Haddow and Birch 2016, on bytes as GPT-2 has it
*/
#pragma once
#include "pretokenize.h"

typedef struct {
    int *ids;
    size_t count, room;
} TokenList;

static inline void tokens_add(TokenList *list, int id) {
    if (list->count == list->room) {
        list->room = 2 * list->room + 64;
        list->ids = (int *)realloc(list->ids, list->room * sizeof(int));
        CHECK(list->ids != NULL, "out of memory for %zu tokens", list->room);
    }
    list->ids[list->count++] = id;
}

// A piece as a list of symbols, and a heap of possible merges with the best at [0].
typedef struct {
    uint32_t rank, left, right; // the symbols at `at` and after it when it was proposed
    size_t at;
} Proposal;
typedef struct {
    uint32_t *id;          // [size]; NO_RANK: merged into the previous symbol
    size_t *next, *before; // positions of the neighbours; `size` and SIZE_MAX at the ends
    Proposal *heap;        // [3 size]: each merge proposes at most two more
    size_t size, heap_count, room;
} Piece;

static inline void piece_free(Piece *p) {
    free(p->id);
    free(p->next);
    free(p->before);
    free(p->heap);
}

static inline void piece_reserve(Piece *p, size_t size) {
    if (size <= p->room) return;
    piece_free(p);
    p->room = max_size(size, 2 * p->room);
    p->id = (uint32_t *)checked_calloc(p->room, sizeof(uint32_t));
    p->next = (size_t *)checked_calloc(p->room, sizeof(size_t));
    p->before = (size_t *)checked_calloc(p->room, sizeof(size_t));
    p->heap = (Proposal *)checked_calloc(3 * p->room, sizeof(Proposal));
}

static inline bool merge_earlier(const Proposal *a, const Proposal *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static inline void piece_propose(const Tokenizer *t, Piece *p, size_t at) {
    if (at == SIZE_MAX || p->next[at] == p->size) return;
    const Merge *merge = tokenizer_find_merge(t, p->id[at], p->id[p->next[at]]);
    if (!merge) return;
    Proposal new_one = {merge->rank, p->id[at], p->id[p->next[at]], at};
    size_t i = p->heap_count++;
    for (; i > 0 && merge_earlier(&new_one, &p->heap[(i - 1) / 2]); i = (i - 1) / 2) p->heap[i] = p->heap[(i - 1) / 2];
    p->heap[i] = new_one;
}

static inline Proposal piece_best(Piece *p) {
    Proposal best = p->heap[0], last = p->heap[--p->heap_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < p->heap_count; i = child) {
        if (child + 1 < p->heap_count && merge_earlier(&p->heap[child + 1], &p->heap[child])) child++;
        if (!merge_earlier(&p->heap[child], &last)) break;
        p->heap[i] = p->heap[child];
    }
    p->heap[i] = last;
    return best;
}

static inline void tokenizer_encode_piece(const Tokenizer *t, Piece *p, const unsigned char *bytes, size_t size,
                                          TokenList *out) {
    int id = t->flags & TOKENIZER_IGNORE_MERGES ? tokenizer_find_token(t, bytes, size) : -1;
    if (id >= 0) {
        tokens_add(out, id);
        return;
    }
    piece_reserve(p, size);
    p->size = size;
    p->heap_count = 0;
    for (size_t i = 0; i < size; i++) {
        p->id[i] = (uint32_t)t->byte_token[bytes[i]];
        p->next[i] = i + 1;
        p->before[i] = i ? i - 1 : SIZE_MAX;
    }
    for (size_t i = 0; i < size; i++) piece_propose(t, p, i);
    while (p->heap_count) {
        Proposal best = piece_best(p);
        size_t at = best.at, right = p->id[at] == NO_RANK ? size : p->next[at];
        if (right == size || p->id[at] != best.left || p->id[right] != best.right) continue; // outdated
        p->id[at] = tokenizer_find_merge(t, best.left, best.right)->result;
        p->id[right] = NO_RANK;
        p->next[at] = p->next[right];
        if (p->next[at] < size) p->before[p->next[at]] = at;
        piece_propose(t, p, p->before[at]);
        piece_propose(t, p, at);
    }
    for (size_t i = 0; i < size; i = p->next[i]) tokens_add(out, (int)p->id[i]);
}

// Encodes text that contains no added tokens.
static inline void tokenizer_encode_text(const Tokenizer *t, const unsigned char *text, size_t size, TokenList *out) {
    if (size == 0) return;
    if (t->kind == TOKENIZER_BYTES) {
        for (size_t i = 0; i < size; i++) tokens_add(out, t->byte_token[text[i]]);
        return;
    }
    bool prefix = (t->flags & TOKENIZER_PREFIX_SPACE) && text[0] != ' ';
    unsigned char *bytes = (unsigned char *)checked_calloc(size + 1, 1);
    bytes[0] = ' ';
    memcpy(bytes + prefix, text, size);
    size += prefix;
    CodePoints c;
    bool valid = codepoints_read(&c, t, bytes, size);
    CHECK(valid, "the text is not valid UTF-8 at byte %zu: use UTF-8, or specify its tokens with --prompt-tokens",
          c.at[c.count]);
    Piece p = {NULL, NULL, NULL, NULL, 0, 0, 0};
    for (size_t i = 0, end; i < c.count; i = end) {
        end = pretokenize(t, &c, i);
        tokenizer_encode_piece(t, &p, bytes + c.at[i], c.at[end] - c.at[i], out);
    }
    piece_free(&p);
    codepoints_free(&c);
    free(bytes);
}

// The first of the added tokens [low,high) whose byte at `depth` is at least `next`; all share the bytes before.
static inline int added_bound(const Tokenizer *t, int low, int high, size_t depth, int next) {
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (t->added[middle].bytes[depth] < next) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The longest added token at the start of the text, or -1. Narrows the range of tokens that share its first bytes.
static inline int added_token(const Tokenizer *t, const unsigned char *text, size_t size, size_t *length) {
    int found = -1, low = 0, high = t->added_count;
    *length = 0;
    for (size_t depth = 0; low < high; depth++) {
        if (t->added[low].length == depth) { // a prefix of others is sorted before them
            found = (int)t->added[low++].id;
            *length = depth;
        }
        if (depth == size) break;
        low = added_bound(t, low, high, depth, text[depth]);
        high = added_bound(t, low, high, depth, text[depth] + 1);
    }
    return found;
}

static inline size_t tokenizer_encode(const Tokenizer *t, const char *text, size_t size, int **ids) {
    CHECK(t->reason[0] == 0, "text cannot be encoded exactly: %s; specify its tokens with --prompt-tokens", t->reason);
    bool starts[256] = {false}; // whether an added token starts with this byte
    for (int i = 0; i < t->added_count; i++) starts[t->added[i].bytes[0]] = true;
    const unsigned char *bytes = (const unsigned char *)text;
    TokenList list = {NULL, 0, 0};
    size_t begin = 0;
    for (size_t at = 0; at < size;) {
        size_t length = 0;
        int id = starts[bytes[at]] ? added_token(t, bytes + at, size - at, &length) : -1;
        if (id >= 0) {
            tokenizer_encode_text(t, bytes + begin, at - begin, &list);
            tokens_add(&list, id);
            begin = at + length;
        }
        at += max_size(length, 1);
    }
    tokenizer_encode_text(t, bytes + begin, size - begin, &list);
    *ids = list.ids;
    return list.count;
}

// The bytes of a token. A model may have more rows than its tokenizer has tokens: additional rows are U+FFFD.
static inline const unsigned char *tokenizer_decode_token(const Tokenizer *t, int id, size_t *length) {
    if (id < t->vocab_size) return tokenizer_token_bytes(t, id, length);
    *length = 3;
    return (const unsigned char *)"\xEF\xBF\xBD";
}

static inline char *tokenizer_decode(const Tokenizer *t, const int *ids, size_t count, size_t *size) {
    *size = 0;
    size_t length;
    for (size_t i = 0; i < count; i++, *size += length) tokenizer_decode_token(t, ids[i], &length);
    char *text = (char *)checked_calloc(*size + 4, 1), *to = text;
    for (size_t i = 0; i < count; i++, to += length) {
        const unsigned char *bytes = tokenizer_decode_token(t, ids[i], &length);
        memcpy(to, bytes, length);
    }
    return text;
}
