/*
bpe.h: trains a byte-level BPE, with the result of the `tokenizers` library.

  void   bpe_start(b)                       the tokens before merges: <|endoftext|>, then the bytes
  size_t bpe_pieces(t, text, size, last, visit, context)   visits the pieces within which bytes are merged
  void   bpe_count(b, bytes, size)          counts a piece
  void   bpe_train(b, vocab_size, between)  merges until there are vocab_size tokens, or no pair is left; `between` is
                                            called between merges
  void   bpe_free(b)

  tokens   0 is the separator, then come the bytes in the order of their characters in byte-level vocabularies, then the
           result of each merge
  method   The pair of neighbours that occurs most often in the pieces of the text is merged; of equals, the one with
           the lowest tokens. aaa has the pair aa twice. A pair that occurs once is merged too. Only the distinct pieces
           in which the pair has been formed are read for it. BpeTrainer of the library does the same by default.
  pieces   of GPT-2's expression (pretokenize.h). A byte that is not UTF-8 is a piece.
  limits   Pieces are counted in parts of PART_BYTES, unlike in the library. No token is longer, and a merge reads at
           most so many bytes to find a pair.
  cost     Time and memory grow with the distinct pieces. 100 MB of sources and documentation take 10 s of CPU time and
           100 MB, with the encoding.
  errors   Exits with one line when memory is short.
  source   Sennrich, Haddow and Birch 2016, on bytes as GPT-2 has it
*/
#pragma once
#include "../llmc/text/pretokenize.h"

enum { PART_BYTES = 1024 };
#define BPE_SEPARATOR "<|endoftext|>" // token 0

typedef struct {
    size_t at;              // of its first byte
    uint32_t size, symbols; // bytes; of a piece also the tokens of which it consists now
    int64_t count;          // occurrences
} String;

// Distinct strings, numbered in the order in which they were added.
typedef struct {
    unsigned char *bytes;
    String *strings;
    size_t count, size, room, bytes_room; // size: of all bytes
    uint32_t *slots;                      // numbers, by open addressing; NO_RANK: free
    size_t mask;
} Strings;

// A pair, its count when it was queued, and the pieces in which it was formed: [where, where + pieces) of Bpe.where.
typedef struct {
    int64_t count;
    uint64_t key;
    size_t where;
    uint32_t pieces, pair;
} Candidate;

typedef struct {
    Strings tokens, pieces, pairs; // the bytes of a pair are its key, left << 32 | right
    uint16_t *symbols;             // the tokens of which a piece consists, from the place of its bytes
    uint64_t *formed;              // pair << 32 | piece, since candidates were queued
    uint32_t *where;               // pieces
    Candidate *heap;               // the best at [0]
    uint32_t (*merges)[3];         // left, right, result
    size_t formed_count, formed_room, where_count, where_room, heap_count, heap_room, merge_count, merge_room;
} Bpe;

typedef void PieceVisit(void *context, const unsigned char *bytes, size_t size);

// Makes room for `count` elements.
static void *make_room(void *p, size_t *room, size_t count, size_t size) {
    if (count <= *room) return p;
    *room = max_size(count, 2 * *room + 64);
    p = realloc(p, *room * size);
    CHECK(p != NULL, "out of memory: cannot allocate %zu bytes for the BPE", *room * size);
    return p;
}

// The slot of the string, or the free slot where it belongs.
static uint32_t *string_slot(const Strings *s, const void *bytes, size_t size) {
    for (size_t i = XXH3_64bits(bytes, size) & s->mask;; i = (i + 1) & s->mask) {
        if (s->slots[i] == NO_RANK) return &s->slots[i];
        const String *found = &s->strings[s->slots[i]];
        if (found->size == size && memcmp(s->bytes + found->at, bytes, size) == 0) return &s->slots[i];
    }
}

// Adds to the count of a string, which may be new. Returns its number.
static uint32_t strings_add(Strings *s, const void *bytes, size_t size, int64_t count) {
    if (2 * s->count >= s->mask) {
        CHECK(s->count < NO_RANK / 4, "the text has 2^30 different words or more: use --bpe on a part of it");
        s->mask = s->mask ? 2 * s->mask + 1 : 1023;
        free(s->slots);
        s->slots = (uint32_t *)checked_calloc(s->mask + 1, sizeof(uint32_t));
        memset(s->slots, 0xFF, (s->mask + 1) * sizeof(uint32_t));
        for (uint32_t n = 0; n < s->count; n++) *string_slot(s, s->bytes + s->strings[n].at, s->strings[n].size) = n;
    }
    uint32_t *slot = string_slot(s, bytes, size);
    if (*slot == NO_RANK) {
        s->strings = (String *)make_room(s->strings, &s->room, s->count + 1, sizeof(String));
        s->bytes = (unsigned char *)make_room(s->bytes, &s->bytes_room, s->size + size, 1);
        memcpy(s->bytes + s->size, bytes, size);
        s->strings[s->count] = (String){s->size, (uint32_t)size, 0, 0};
        s->size += size;
        *slot = (uint32_t)s->count++;
    }
    s->strings[*slot].count += count;
    return *slot;
}

// The code point of a byte in byte-level vocabularies: visible characters stand for themselves.
static uint32_t byte_character(int byte) {
    return byte < 0x21    ? 0x100 + byte
           : byte < 0x7F  ? byte
           : byte < 0xA1  ? 0x121 + byte - 0x7F
           : byte == 0xAD ? 0x143
                          : byte;
}

static void bpe_start(Bpe *b) {
    memset(b, 0, sizeof(*b));
    strings_add(&b->tokens, BPE_SEPARATOR, strlen(BPE_SEPARATOR), 0);
    for (uint32_t character = 0; character <= 0x143; character++)
        for (int byte = 0; byte < 256; byte++)
            if (byte_character(byte) == character) strings_add(&b->tokens, &(unsigned char){byte}, 1, 0);
}

static void bpe_free(Bpe *b) {
    Strings *strings[] = {&b->tokens, &b->pieces, &b->pairs};
    for (int i = 0; i < 3; i++) {
        free(strings[i]->bytes);
        free(strings[i]->strings);
        free(strings[i]->slots);
    }
    void *arrays[] = {b->symbols, b->formed, b->where, b->heap, b->merges};
    for (int i = 0; i < 5; i++) free(arrays[i]);
}

// Calls `visit` for each piece of the text and returns their bytes. text[size] to text[size + 2] must be 0. Unless the
// text is the last, pieces at its end that depend on what follows are left.
static size_t bpe_pieces(const Tokenizer *t, const unsigned char *text, size_t size, bool last, PieceVisit *visit,
                         void *context) {
    size_t at = 0;
    while (at < size) {
        size_t invalid = utf8_invalid_at((const char *)text + at, size - at), valid = invalid ? invalid - 1 : size - at;
        // Text ends at a byte that is not UTF-8. A character that is cut off at the end is not yet one.
        bool ends = last || at + valid + 4 <= size;
        CodePoints c;
        codepoints_read(&c, t, text + at, valid);
        size_t i = 0;
        for (size_t end; i < c.count; i = end) {
            end = pretokenize(t, &c, i);
            if (!ends && end + 1 >= c.count) break; // "'r" may become "'re", and spaces may be followed by text
            visit(context, text + at + c.at[i], c.at[end] - c.at[i]);
        }
        at += c.at[i];
        codepoints_free(&c);
        if (!ends) break;
        if (at < size) visit(context, text + at++, 1);
    }
    return at;
}

static void bpe_count(Bpe *b, const unsigned char *bytes, size_t size) {
    for (size_t at = 0; at < size; at += PART_BYTES)
        strings_add(&b->pieces, bytes + at, min_size(PART_BYTES, size - at), 1);
}

// A pair of neighbours is formed in a piece (sign 1), or is there no more (-1).
static void bpe_change(Bpe *b, size_t piece, uint64_t left, uint64_t right, int sign) {
    uint64_t key = left << 32 | right;
    uint64_t pair = strings_add(&b->pairs, &key, sizeof(key), sign * b->pieces.strings[piece].count);
    if (sign < 0) return;
    b->formed = (uint64_t *)make_room(b->formed, &b->formed_room, b->formed_count + 1, sizeof(uint64_t));
    b->formed[b->formed_count++] = pair << 32 | piece;
}

static bool candidate_before(const Candidate *x, const Candidate *y) {
    return x->count != y->count ? x->count > y->count : x->key < y->key;
}

static void bpe_push(Bpe *b, Candidate new_one) {
    b->heap = (Candidate *)make_room(b->heap, &b->heap_room, b->heap_count + 1, sizeof(Candidate));
    size_t i = b->heap_count++;
    for (; i > 0 && candidate_before(&new_one, &b->heap[(i - 1) / 2]); i = (i - 1) / 2)
        b->heap[i] = b->heap[(i - 1) / 2];
    b->heap[i] = new_one;
}

static Candidate bpe_pop(Bpe *b) {
    Candidate best = b->heap[0], last = b->heap[--b->heap_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < b->heap_count; i = child) {
        if (child + 1 < b->heap_count && candidate_before(&b->heap[child + 1], &b->heap[child])) child++;
        if (!candidate_before(&b->heap[child], &last)) break;
        b->heap[i] = b->heap[child];
    }
    b->heap[i] = last;
    return best;
}

static int compare_formed(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

// Makes candidates of the pairs that have been formed.
static void bpe_queue_formed(Bpe *b) {
    if (b->formed_count) qsort(b->formed, b->formed_count, sizeof(uint64_t), compare_formed);
    b->where = (uint32_t *)make_room(b->where, &b->where_room, b->where_count + b->formed_count, sizeof(uint32_t));
    for (size_t i = 0; i < b->formed_count;) {
        uint32_t pair = (uint32_t)(b->formed[i] >> 32);
        Candidate c = {b->pairs.strings[pair].count, ((uint64_t *)b->pairs.bytes)[pair], b->where_count, 0, pair};
        for (size_t begin = i; i < b->formed_count && b->formed[i] >> 32 == pair; i++)
            if (i == begin || b->formed[i] != b->formed[i - 1]) b->where[c.where + c.pieces++] = (uint32_t)b->formed[i];
        if (c.count == 0) continue; // its pieces were merged further
        b->where_count += c.pieces;
        bpe_push(b, c);
    }
    b->formed_count = 0;
}

static void bpe_merge(Bpe *b, size_t piece, uint32_t left, uint32_t right, uint32_t result) {
    uint16_t *s = b->symbols + b->pieces.strings[piece].at;
    size_t size = b->pieces.strings[piece].symbols, n = 0;
    for (size_t i = 0; i < size; n++) {
        if (i + 1 == size || s[i] != left || s[i + 1] != right) {
            s[n] = s[i++];
            continue;
        }
        if (n > 0) bpe_change(b, piece, s[n - 1], left, -1), bpe_change(b, piece, s[n - 1], result, 1);
        i += 2;
        if (i < size) bpe_change(b, piece, right, s[i], -1), bpe_change(b, piece, result, s[i], 1);
        s[n] = (uint16_t)result;
    }
    b->pieces.strings[piece].symbols = (uint32_t)n;
}

// Adds the token left + right. It is new: bytes that become one token were merged in the same order everywhere, and the
// text of the separator has letters and others, which are never in one piece.
static uint32_t bpe_new_token(Bpe *b, uint32_t left, uint32_t right) {
    unsigned char joined[PART_BYTES];
    const String *x = &b->tokens.strings[left], *y = &b->tokens.strings[right];
    assert(x->size + y->size <= PART_BYTES);
    memcpy(joined, b->tokens.bytes + x->at, x->size);
    memcpy(joined + x->size, b->tokens.bytes + y->at, y->size);
    uint32_t result = (uint32_t)b->tokens.count, found = strings_add(&b->tokens, joined, x->size + y->size, 0);
    assert(found == result);
    b->merges = (uint32_t(*)[3])make_room(b->merges, &b->merge_room, b->merge_count + 1, sizeof(*b->merges));
    memcpy(b->merges[b->merge_count++], (uint32_t[3]){left, right, result}, sizeof(*b->merges));
    return result;
}

static void bpe_train(Bpe *b, size_t vocab_size, void (*between)(void)) {
    b->symbols = (uint16_t *)checked_calloc(b->pieces.size, sizeof(uint16_t));
    for (size_t i = 0; i < b->pieces.size; i++)
        b->symbols[i] = (uint16_t)strings_add(&b->tokens, b->pieces.bytes + i, 1, 0);
    for (size_t piece = 0; piece < b->pieces.count; piece++) {
        String *p = &b->pieces.strings[piece];
        p->symbols = p->size;
        for (size_t i = p->at; i + 1 < p->at + p->size; i++) bpe_change(b, piece, b->symbols[i], b->symbols[i + 1], 1);
    }
    bpe_queue_formed(b);
    while (b->tokens.count < vocab_size && b->heap_count) {
        between();
        Candidate top = bpe_pop(b);
        int64_t count = b->pairs.strings[top.pair].count; // without the pieces in which it was merged further
        bool outdated = top.count != count;
        top.count = count;
        if (outdated && count > 0) bpe_push(b, top);
        if (outdated) continue;
        uint32_t left = (uint32_t)(top.key >> 32), right = (uint32_t)top.key, result = bpe_new_token(b, left, right);
        for (size_t i = 0; i < top.pieces; i++) bpe_merge(b, b->where[top.where + i], left, right, result);
        bpe_queue_formed(b);
    }
}
