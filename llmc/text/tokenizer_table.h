/*
tokenizer_table.h: the compact token table of a corpus or checkpoint, tokenizer.bin, written by data/token_table.py.

  Tokenizer *tokenizer_open(path)        a file, or a directory that has tokenizer.bin; exits with one line on error
  Tokenizer *tokenizer_of_bytes()        the table of tokens that are bytes, as data/token_table.py writes it
  void       tokenizer_close(t)
  const unsigned char *tokenizer_token_bytes(t, id, &length)   the text of a token
  int        tokenizer_class(t, codepoint)                     CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE or 0, combined
                                                               with CLASS_HEAD and CLASS_TAIL

  format   little-endian. 8 bytes "DV2TOK\0\1"; 12 uint32: kind, vocab_size, pattern, flags, separator (2^32-1: none),
           merges, added, ranges, reason_bytes, token_bytes, 0, 0; then
             uint32 length[vocab_size]; the concatenated bytes of the tokens, padded to a multiple of 4;
             uint32 merge[merges][3]: left, right, result, by increasing rank;
             uint32 added[added]: ids of tokens that are matched in the text before it is split;
             uint32 range[ranges][3]: first and last code point, class; ascending; other code points have class 0;
             the reason why text cannot be encoded exactly (empty: it can), padded to a multiple of 4;
           and the XXH64 of everything before.
  flags    TOKENIZER_PREFIX_SPACE: text is encoded with a space before it; TOKENIZER_IGNORE_MERGES: a piece that is a
           token is not merged; TOKENIZER_STRIP_SPACE: one space at the beginning of a document is not part of its text
  classes  The library that tokenized the corpus defines them, whatever its Unicode version. A code point is at most one
           of letter, number and space. CLASS_HEAD and CLASS_TAIL state in which part of a word letters and marks may
           occur (capitals in the head). Only PATTERN_O200K uses them, and only its tables have them.
  errors   A file may come from an untrusted source: everything in it is checked before use.
  cost     Reading takes O(n log n) time and up to 8 times the size of the file in memory, whatever its content: equal
           tokens and added tokens count once, and the hash tables are seeded per process.
*/
#pragma once
#include "../base/files.h"
#include "../base/json.h"

enum { BYTE_VOCABULARY = 256, DOCUMENT_SEPARATOR = 0 }; // for byte-level shards: a NUL precedes each document
enum {
    TOKENIZER_HEADER_BYTES = 8 + 12 * 4,
    TOKENIZER_FILE_LIMIT = 64 << 20, // a vocabulary of 262,144 with its merges: 10 MB
    TOKEN_LENGTH_LIMIT = 65535,
    CLASS_LETTER = 1,
    CLASS_NUMBER = 2,
    CLASS_SPACE = 4,
    CLASS_BASE = CLASS_LETTER | CLASS_NUMBER | CLASS_SPACE,
    CLASS_HEAD = 8,
    CLASS_TAIL = 16,
};
typedef enum { TOKENIZER_BYTES, TOKENIZER_BPE, TOKENIZER_KIND_COUNT } TokenizerKind;
// How text is split before merging (pretokenize.h)
typedef enum { PATTERN_NONE, PATTERN_GPT2, PATTERN_CL100K, PATTERN_QWEN2, PATTERN_O200K, PATTERN_COUNT } Pattern;
enum { TOKENIZER_PREFIX_SPACE = 1, TOKENIZER_IGNORE_MERGES = 2, TOKENIZER_STRIP_SPACE = 4, TOKENIZER_FLAGS = 7 };

typedef struct {
    uint64_t pair; // left << 32 | right
    uint32_t rank, result;
} Merge;

typedef struct {
    const unsigned char *bytes;
    size_t length;
    uint32_t id, place; // place: index in the file's list
} AddedToken;

typedef struct {
    char *memory; // the file
    size_t size;
    TokenizerKind kind;
    Pattern pattern;
    unsigned flags;
    int vocab_size, separator; // -1: none
    AddedToken *added;         // sorted by their bytes, without duplicates
    const uint32_t *ranges;
    int added_count, range_count;
    char *reason;     // empty: text can be encoded
    size_t *token_at; // [vocab_size + 1]: offsets in `tokens`
    const unsigned char *tokens;
    Merge *merges; // open addressing; rank 2^32-1: free
    size_t merge_mask;
    uint64_t hash_seed; // per process, so that a file cannot provoke hash collisions
    uint32_t *words;    // ids by their bytes; only with TOKENIZER_IGNORE_MERGES
    size_t word_mask;
    int byte_token[256];      // -1: none
    unsigned char ascii[128]; // classes
} Tokenizer;

static const uint32_t NO_RANK = UINT32_MAX; // an empty slot, or a symbol that was merged

static inline const unsigned char *tokenizer_token_bytes(const Tokenizer *t, int id, size_t *length) {
    assert(id >= 0 && id < t->vocab_size);
    *length = t->token_at[id + 1] - t->token_at[id];
    return t->tokens + t->token_at[id];
}

static inline int tokenizer_class(const Tokenizer *t, uint32_t code) {
    if (code < 128) return t->ascii[code];
    int low = 0, high = t->range_count;
    while (low < high) { // find the first range that does not end before the code
        int middle = low + (high - low) / 2;
        if (t->ranges[3 * middle + 1] < code) low = middle + 1;
        else high = middle;
    }
    return low < t->range_count && t->ranges[3 * low] <= code ? (int)t->ranges[3 * low + 2] : 0;
}

static inline const Merge *tokenizer_find_merge(const Tokenizer *t, uint32_t left, uint32_t right) {
    uint64_t pair = (uint64_t)left << 32 | right;
    for (size_t i = XXH3_64bits_withSeed(&pair, 8, t->hash_seed) & t->merge_mask;; i = (i + 1) & t->merge_mask) {
        if (t->merges[i].rank == NO_RANK) return NULL;
        if (t->merges[i].pair == pair) return &t->merges[i];
    }
}

// The slot of the token with these bytes, or the empty slot where it belongs.
static inline size_t tokenizer_token_slot(const Tokenizer *t, const unsigned char *bytes, size_t size) {
    for (size_t i = XXH3_64bits_withSeed(bytes, size, t->hash_seed) & t->word_mask;; i = (i + 1) & t->word_mask) {
        if (t->words[i] == NO_RANK) return i;
        size_t length;
        const unsigned char *token = tokenizer_token_bytes(t, (int)t->words[i], &length);
        if (length == size && memcmp(token, bytes, size) == 0) return i;
    }
}

// The first token with these bytes, or -1. Only with TOKENIZER_IGNORE_MERGES.
static inline int tokenizer_find_token(const Tokenizer *t, const unsigned char *bytes, size_t size) {
    uint32_t id = t->words[tokenizer_token_slot(t, bytes, size)];
    return id == NO_RANK ? -1 : (int)id;
}

typedef struct {
    const Tokenizer *t;
    size_t at;
} TableReader;
// The next `bytes` bytes of the file, padded to a multiple of 4; NULL if the file ends before.
static inline const void *table_read(TableReader *r, size_t bytes) {
    size_t padded = round_up(bytes, 4), end = r->t->size - 8;
    if (bytes > end || padded > end - r->at) return NULL;
    const void *p = r->t->memory + r->at;
    r->at += padded;
    return p;
}

static inline bool tokenizer_read_tokens(Tokenizer *t, TableReader *r, size_t token_bytes) {
    const uint32_t *lengths = (const uint32_t *)table_read(r, 4 * t->vocab_size);
    if (!lengths) return false;
    t->token_at = (size_t *)checked_calloc(t->vocab_size + 1, sizeof(size_t));
    for (int i = 0; i < 256; i++) t->byte_token[i] = -1;
    for (int i = 0; i < t->vocab_size; i++) {
        if (lengths[i] > TOKEN_LENGTH_LIMIT) return false;
        t->token_at[i + 1] = t->token_at[i] + lengths[i];
    }
    t->tokens = (const unsigned char *)table_read(r, token_bytes);
    if (t->token_at[t->vocab_size] != token_bytes || !t->tokens) return false;
    for (int i = t->vocab_size - 1; i >= 0; i--)
        if (lengths[i] == 1) t->byte_token[t->tokens[t->token_at[i]]] = i;
    return true;
}

static inline bool tokenizer_read_merges(Tokenizer *t, TableReader *r, size_t count) {
    const uint32_t *merges = count <= t->size / 12 ? (const uint32_t *)table_read(r, 12 * count) : NULL;
    if (!merges) return false;
    size_t room = 16;
    while (room < 2 * count) room *= 2;
    t->merge_mask = room - 1;
    t->merges = (Merge *)checked_calloc(room, sizeof(Merge));
    for (size_t i = 0; i < room; i++) t->merges[i].rank = NO_RANK;
    for (size_t m = 0; m < count; m++) {
        const uint32_t *row = merges + 3 * m;
        for (int i = 0; i < 3; i++)
            if (row[i] >= (uint32_t)t->vocab_size) return false;
        uint64_t pair = (uint64_t)row[0] << 32 | row[1];
        size_t place = XXH3_64bits_withSeed(&pair, 8, t->hash_seed) & t->merge_mask;
        while (t->merges[place].rank != NO_RANK && t->merges[place].pair != pair) place = (place + 1) & t->merge_mask;
        if (t->merges[place].rank != NO_RANK) return false; // duplicate
        t->merges[place].pair = pair;
        t->merges[place].rank = (uint32_t)m;
        t->merges[place].result = row[2];
    }
    return true;
}

// Whether a class is one that pretokenize expects. Others could make it loop for ever.
static inline bool tokenizer_class_is_valid(Pattern pattern, uint32_t value) {
    uint32_t base = value & CLASS_BASE, part = value & (CLASS_HEAD | CLASS_TAIL);
    if (value == 0 || value != (base | part) || (base & (base - 1)) != 0) return false;
    if (pattern != PATTERN_O200K) return part == 0;
    return base == CLASS_LETTER ? part != 0 : base == 0 || part == 0;
}

static inline bool tokenizer_read_ranges(Tokenizer *t, TableReader *r, size_t count) {
    t->ranges = count <= t->size / 12 ? (const uint32_t *)table_read(r, 12 * count) : NULL;
    t->range_count = (int)count;
    for (size_t i = 0; t->ranges && i < count; i++) {
        const uint32_t *row = t->ranges + 3 * i;
        if (row[0] > row[1] || row[1] > 0x10FFFF || (i && row[0] <= t->ranges[3 * i - 2])) return false;
        if (!tokenizer_class_is_valid(t->pattern, row[2])) return false;
        for (uint32_t c = row[0]; c <= row[1] && c < 128; c++) t->ascii[c] = (unsigned char)row[2];
    }
    return t->ranges != NULL;
}

// Orders by bytes, a prefix first; equal tokens keep the order of the file.
static inline int compare_added(const void *a, const void *b) {
    const AddedToken *x = (const AddedToken *)a, *y = (const AddedToken *)b;
    int order = memcmp(x->bytes, y->bytes, min_size(x->length, y->length));
    if (order == 0) order = x->length < y->length ? -1 : x->length > y->length;
    return order ? order : x->place < y->place ? -1 : x->place > y->place;
}

static inline bool tokenizer_read_added(Tokenizer *t, TableReader *r, size_t count) {
    const uint32_t *ids = count <= t->size / 4 ? (const uint32_t *)table_read(r, 4 * count) : NULL;
    if (!ids) return false;
    bool *listed = (bool *)checked_calloc(t->vocab_size, sizeof(bool)), good = true;
    t->added = (AddedToken *)checked_calloc(count, sizeof(AddedToken));
    for (size_t i = 0; i < count; i++) {
        good = good && ids[i] < (uint32_t)t->vocab_size;
        if (!good || listed[ids[i]]) continue;
        AddedToken *a = &t->added[t->added_count++];
        a->bytes = tokenizer_token_bytes(t, (int)ids[i], &a->length);
        a->id = ids[i], a->place = (uint32_t)i;
        good = a->length > 0;
        listed[ids[i]] = true;
    }
    free(listed);
    if (t->added_count) qsort(t->added, t->added_count, sizeof(AddedToken), compare_added);
    int kept = 0;
    for (int i = 0; i < t->added_count; i++) {
        const AddedToken *a = &t->added[i], *last = kept ? &t->added[kept - 1] : NULL;
        if (last && last->length == a->length && memcmp(last->bytes, a->bytes, a->length) == 0) continue;
        t->added[kept++] = *a;
    }
    t->added_count = kept;
    return good;
}

static inline void tokenizer_index_words(Tokenizer *t) {
    size_t room = 16, vocabulary = t->vocab_size;
    while (room < 2 * vocabulary) room *= 2;
    t->word_mask = room - 1;
    t->words = (uint32_t *)checked_calloc(room, sizeof(uint32_t));
    for (size_t i = 0; i < room; i++) t->words[i] = NO_RANK;
    for (int id = 0; id < t->vocab_size; id++) {
        size_t length;
        const unsigned char *bytes = tokenizer_token_bytes(t, id, &length);
        size_t place = tokenizer_token_slot(t, bytes, length);
        if (t->words[place] == NO_RANK) t->words[place] = (uint32_t)id;
    }
}

// Reads the file; returns false if anything in it is invalid.
static inline bool tokenizer_read(Tokenizer *t) {
    uint32_t h[12];
    uint64_t stated;
    if (t->size < TOKENIZER_HEADER_BYTES + 8 || memcmp(t->memory, "DV2TOK\0\1", 8) != 0) return false;
    memcpy(&stated, t->memory + t->size - 8, 8);
    if (XXH64(t->memory, t->size - 8, 0) != stated) return false;
    memcpy(h, t->memory + 8, sizeof(h));
    bool plausible = h[0] < TOKENIZER_KIND_COUNT && h[1] >= 1 && h[1] <= t->size / 4 && h[2] < PATTERN_COUNT &&
                     h[3] <= TOKENIZER_FLAGS && (h[4] == UINT32_MAX || h[4] < h[1]);
    if (!plausible) return false;
    t->kind = (TokenizerKind)h[0], t->vocab_size = (int)h[1], t->pattern = (Pattern)h[2], t->flags = h[3];
    t->separator = h[4] == UINT32_MAX ? -1 : (int)h[4];
    TableReader r = {t, TOKENIZER_HEADER_BYTES};
    if (!tokenizer_read_tokens(t, &r, h[9]) || !tokenizer_read_merges(t, &r, h[5]) ||
        !tokenizer_read_added(t, &r, h[6]) || !tokenizer_read_ranges(t, &r, h[7]))
        return false;
    const char *reason = (const char *)table_read(&r, h[8]);
    if (!reason || r.at != t->size - 8) return false;
    t->reason = (char *)checked_calloc(h[8] + 1, 1);
    memcpy(t->reason, reason, h[8]);
    for (int i = 0; t->reason[0] == 0 && i < 256; i++)
        if (t->byte_token[i] < 0) return false; // every byte must have a token
    for (const char *space = " \r\n"; t->reason[0] == 0 && t->pattern != PATTERN_NONE && *space; space++)
        if (tokenizer_class(t, (uint32_t)*space) != CLASS_SPACE) return false; // pretokenize requires it
    if (t->flags & TOKENIZER_IGNORE_MERGES) tokenizer_index_words(t);
    return printable(t->reason);
}

static inline void tokenizer_close(Tokenizer *t) {
    if (!t) return;
    free(t->memory);
    free(t->reason);
    free(t->token_at);
    free(t->merges);
    free(t->words);
    free(t->added);
    free(t);
}

static inline Tokenizer *tokenizer_new(void) {
    Tokenizer *t = (Tokenizer *)checked_calloc(1, sizeof(Tokenizer));
    t->hash_seed = (uint64_t)(now_seconds() * 1e9) ^ (uint64_t)(uintptr_t)t ^ (uint64_t)getpid() << 40;
    return t;
}

static inline Tokenizer *tokenizer_of_bytes(void) {
    enum { V = BYTE_VOCABULARY, BYTES = TOKENIZER_HEADER_BYTES + 5 * V };
    uint32_t words[12 + V] = {TOKENIZER_BYTES, V};
    Tokenizer *t = tokenizer_new();
    t->size = BYTES + 8;
    t->memory = (char *)checked_calloc(t->size, 1);
    words[4] = DOCUMENT_SEPARATOR, words[9] = V;
    for (int i = 0; i < V; i++) {
        words[12 + i] = 1; // the length of the token
        t->memory[BYTES - V + i] = (char)i;
    }
    memcpy(t->memory, "DV2TOK\0\1", 8);
    memcpy(t->memory + 8, words, sizeof(words));
    uint64_t hash = XXH64(t->memory, BYTES, 0);
    memcpy(t->memory + BYTES, &hash, 8);
    bool valid = tokenizer_read(t);
    assert(valid);
    (void)valid;
    return t;
}

static inline Tokenizer *tokenizer_open(const char *path) {
    char file[PATH_SIZE];
    if (directory_exists(path)) FORMAT(file, "%s/tokenizer.bin", path);
    else FORMAT(file, "%s", path);
    Tokenizer *t = tokenizer_new();
    t->memory = file_read(file, TOKENIZER_FILE_LIMIT, &t->size);
    CHECK(t->memory != NULL, "cannot read the token table %s: %s", file, strerror(errno));
    CHECK(tokenizer_read(t), "%s is not a token table, or is damaged: create it again with data/token_table.py", file);
    return t;
}
