/*
fuzz_tokenizer.c: tokenizer_open with a damaged tokenizer.bin, whose checksum the mutator repairs. When it is accepted,
every token is decoded. When the table allows it, text is encoded and decoded to the same text.
*/
#include "fuzz.h"
#include "../../llmc/text/tokenizer.h"

const char fuzz_file[] = "tokenizer.bin";
static const char text[] = "It's  <|end|> 12345 abab\n\n \xC3\xA9t\xC3\xA9 'LL\t\xE6\x95\xB0";

void fuzz_prepare(void) {}

static size_t put_numbers(uint8_t *table, size_t at, const uint32_t *numbers, size_t count) {
    memcpy(table + at, numbers, 4 * count);
    return at + 4 * count;
}

// 256 bytes, "ab", "abab" and "<|end|>".
static size_t make_table(uint8_t *table, uint32_t pattern, uint32_t flags, const char *reason) {
    static const uint32_t merges[6] = {'a', 'b', 256, 256, 256, 257}, added = 258;
    bool parts = pattern == PATTERN_O200K;
    uint32_t ranges[15] = {'\t', '\r',           4,    ' ',      ' ',           4, 'A', 'Z', parts ? 9 : 1, 'a',
                           'z',  parts ? 17 : 1, 0xE0, 0x10FFFF, parts ? 24 : 2};
    uint32_t reason_bytes = (uint32_t)strlen(reason),
             header[12] = {TOKENIZER_BPE, 259, pattern, flags, 258, 2, 1, 5, reason_bytes, 256 + 2 + 4 + 7, 0, 0};
    memcpy(table, "DV2TOK\0\1", 8);
    size_t at = put_numbers(table, 8, header, 12);
    for (uint32_t i = 0; i < 259; i++) {
        uint32_t length = i < 256 ? 1 : i == 256 ? 2 : i == 257 ? 4 : 7;
        at = put_numbers(table, at, &length, 1);
    }
    for (int i = 0; i < 256; i++) table[at++] = (uint8_t)i;
    memcpy(table + at, "ababab<|end|>", 13);
    at = round_up(at + 13, 4);
    at = put_numbers(table, at, merges, 6);
    at = put_numbers(table, at, &added, 1);
    at = put_numbers(table, at, ranges, 15);
    memcpy(table + at, reason, reason_bytes);
    at = round_up(at + reason_bytes, 4);
    uint64_t digest = XXH64(table, at, 0);
    memcpy(table + at, &digest, 8);
    return at + 8;
}

void fuzz_seeds(void) {
    static const char *const names[] = {"none", "gpt2", "cl100k", "qwen2", "o200k"};
    uint8_t table[4096];
    memset(table, 0, sizeof(table));
    for (uint32_t p = 0; p < PATTERN_COUNT; p++) fuzz_seed(names[p], table, make_table(table, p, p % 4, ""));
    memset(table, 0, sizeof(table));
    fuzz_seed("reason", table, make_table(table, 0, 0, "of a reason"));
}

// 256 bytes, then `vocabulary` equal tokens of `length` bytes each; the last one `added` times.
static void large_table(const char *name, uint32_t vocabulary, uint32_t length, uint32_t added) {
    size_t room = 8 * (size_t)vocabulary + (size_t)vocabulary * length + 4 * (size_t)added + 4096, at = 8;
    uint8_t *table = (uint8_t *)checked_calloc(room, 1);
    uint32_t header[12] = {TOKENIZER_BPE, 256 + vocabulary, 0, TOKENIZER_IGNORE_MERGES, UINT32_MAX, 0, added};
    header[9] = 256 + vocabulary * length; // bytes of all tokens
    memcpy(table, "DV2TOK\0\1", 8);
    at = put_numbers(table, at, header, 12);
    for (uint32_t i = 0; i < 256 + vocabulary; i++) {
        uint32_t bytes = i < 256 ? 1 : length;
        at = put_numbers(table, at, &bytes, 1);
    }
    for (int i = 0; i < 256; i++) table[at++] = (uint8_t)i;
    memset(table + at, 'a', (size_t)vocabulary * length);
    at = round_up(at + (size_t)vocabulary * length, 4);
    for (uint32_t i = 0; i < added; i++) {
        uint32_t id = 255 + vocabulary - i % min_size(vocabulary, 1000);
        at = put_numbers(table, at, &id, 1);
    }
    uint64_t digest = XXH64(table, at, 0);
    memcpy(table + at, &digest, 8);
    fuzz_large_input(name, table, at + 8);
    free(table);
}

void fuzz_large(void) {
    large_table("empty tokens", 1000000, 0, 0);
    large_table("equal tokens", 1000000, 2, 0);
    large_table("equal long tokens", 1000, 4000, 0);
    large_table("added tokens that are equal", 250000, 3, 250000);
    large_table("a long token that is added again and again", 1, 60000, 1000000);
}

void fuzz_one(const uint8_t *data, size_t size) {
    (void)data, (void)size;
    Tokenizer *t = tokenizer_open(fuzz_directory());
    for (int i = 0; i < t->vocab_size; i++) {
        size_t length;
        free(tokenizer_decode(t, &i, 1, &length));
        FUZZ_EXPECT(length <= TOKEN_LENGTH_LIMIT, "a token of %zu bytes", length);
    }
    int *ids = NULL;
    size_t bytes, count = tokenizer_encode(t, text, sizeof(text) - 1, &ids);
    for (size_t i = 0; i < count; i++)
        FUZZ_EXPECT(ids[i] >= 0 && ids[i] < t->vocab_size, "token %d of %d", ids[i], t->vocab_size);
    free(tokenizer_decode(t, ids, count, &bytes));
    free(ids);
    tokenizer_close(t);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    if (seed % 16 == 0 || size < 16) return LLVMFuzzerMutate(data, size, max_size);
    size_t body = LLVMFuzzerMutate(data, size - 8, max_size - 12);
    if (seed % 4) body = body / 4 * 4;
    uint64_t digest = XXH64(data, body, 0);
    memcpy(data + body, &digest, 8);
    return body + 8;
}
