/*
tokenizer.h: tests of the C tokenizer with a small generated table. data/test_tokenizer.py compares it with the library
whose tables it reads, and tests/programs/test_tokenizer.py tests its use in a run.
*/
#pragma once
#include "../llmc/text/tokenizer.h"
#include "harness.h"

enum { TOY_SIZE = 40000, TOY_MERGES = 60, TOY_VOCABULARY = 256 + TOY_MERGES + 1, TOY_END = TOY_VOCABULARY - 1 };

typedef struct {
    unsigned char bytes[TOY_SIZE];
    size_t size;
    int merges[TOY_MERGES][3];
    char tokens[TOY_VOCABULARY][64];
    int lengths[TOY_VOCABULARY];
} ToyTable;

static void toy_number(ToyTable *t, uint32_t n) {
    memcpy(t->bytes + t->size, &n, 4);
    t->size += 4;
}
static void toy_seal(ToyTable *t) {
    uint64_t digest = XXH64(t->bytes, t->size, 0);
    memcpy(t->bytes + t->size, &digest, 8);
    t->size += 8;
}

// 256 bytes, then random merges of short tokens over a few letters, then "<|end|>".
static void toy_make(ToyTable *t, uint64_t seed, Pattern pattern, unsigned flags) {
    TestRandom r = {seed};
    memset(t, 0, sizeof(*t));
    for (int i = 0; i < 256; i++) t->tokens[i][0] = (char)i, t->lengths[i] = 1;
    const char *letters = "abc ";
    for (int m = 0; m < TOY_MERGES;) {
        int pair[2];
        for (int i = 0; i < 2; i++) {
            int pick = test_random_int(&r, 4 + m);
            pair[i] = pick < 4 ? (unsigned char)letters[pick] : 256 + pick - 4;
        }
        bool bad = t->lengths[pair[0]] + t->lengths[pair[1]] > 60;
        for (int i = 0; i < m; i++) bad |= t->merges[i][0] == pair[0] && t->merges[i][1] == pair[1];
        if (bad) continue;
        int id = 256 + m;
        t->merges[m][0] = pair[0], t->merges[m][1] = pair[1], t->merges[m][2] = id;
        memcpy(t->tokens[id], t->tokens[pair[0]], t->lengths[pair[0]]);
        memcpy(t->tokens[id] + t->lengths[pair[0]], t->tokens[pair[1]], t->lengths[pair[1]]);
        t->lengths[id] = t->lengths[pair[0]] + t->lengths[pair[1]];
        m++;
    }
    memcpy(t->tokens[TOY_END], "<|end|>", 7);
    t->lengths[TOY_END] = 7;
    uint32_t parts = pattern == PATTERN_O200K;
    const uint32_t ranges[][3] = {{9, 13, 4},
                                  {32, 32, 4},
                                  {48, 57, 2},
                                  {65, 90, 1 | 8 * parts},
                                  {97, 122, 1 | 16 * parts},
                                  {0xE9, 0xE9, 1 | 16 * parts},
                                  {0x672C, 0x672C, 1 | 24 * parts},
                                  {0xFE20, 0xFE2F, 24}};
    // the last are marks
    uint32_t bytes = 0, ranges_count = sizeof(ranges) / sizeof(ranges[0]) - !parts;
    for (int i = 0; i < TOY_VOCABULARY; i++) bytes += (uint32_t)t->lengths[i];
    memcpy(t->bytes, "DV2TOK\0\1", 8);
    t->size = 8;
    const uint32_t header[12] = {
        TOKENIZER_BPE, TOY_VOCABULARY, pattern, flags, TOY_END, TOY_MERGES, 1, ranges_count, 0, bytes, 0, 0};
    for (int i = 0; i < 12; i++) toy_number(t, header[i]);
    for (int i = 0; i < TOY_VOCABULARY; i++) toy_number(t, (uint32_t)t->lengths[i]);
    for (int i = 0; i < TOY_VOCABULARY; i++) {
        memcpy(t->bytes + t->size, t->tokens[i], t->lengths[i]);
        t->size += t->lengths[i];
    }
    t->size = round_up(t->size, 4);
    for (int m = 0; m < TOY_MERGES; m++)
        for (int i = 0; i < 3; i++) toy_number(t, (uint32_t)t->merges[m][i]);
    toy_number(t, TOY_END);
    for (uint32_t i = 0; i < ranges_count; i++)
        for (int k = 0; k < 3; k++) toy_number(t, ranges[i][k]);
    toy_seal(t);
}

static Tokenizer *toy_open(const ToyTable *t, const char *path) {
    test_write_file(path, t->bytes, t->size);
    return tokenizer_open(path);
}

static void test_tokenizer_patterns(void) {
    const char *path = test_file("t.bin");
    static ToyTable table;
    static const struct {
        Pattern pattern;
        const char *text, *pieces; // with | between them
    } cases[] = {
        {PATTERN_GPT2, "Don't  stop", "Don|'t| | stop"},
        {PATTERN_GPT2, "a\n\n b12 3", "a|\n\n| b|12| 3"},
        {PATTERN_GPT2, "'S'll!? \t", "'|S|'ll|!?| \t"},
        {PATTERN_CL100K, "DON'T x", "DON|'T| x"},
        {PATTERN_CL100K, "12345 6", "123|45| |6"},
        {PATTERN_QWEN2, "12 3", "1|2| |3"},
        {PATTERN_CL100K, "a.\n\nb", "a|.\n\n|b"},
        {PATTERN_CL100K, "a \n  \n  b", "a| \n  \n| | b"},
        {PATTERN_CL100K, "(word", "(word"},
        {PATTERN_CL100K, "\tword -x", "\tword| -|x"},
        {PATTERN_GPT2, "caf\xC3\xA9s \xE2\x82\xAC", "caf\xC3\xA9s| \xE2\x82\xAC"},
        {PATTERN_NONE, "a b", "a b"},
        {PATTERN_O200K, "HTTPServer's 'LL", "HTTPServer's| '|LL"},
        {PATTERN_O200K, "McDonald ABC'LLx", "Mc|Donald| ABC'LL|x"},
        {PATTERN_O200K,
         "\xE6\x9C\xAC"
         "AB\xC3\xA9 1234",
         "\xE6\x9C\xAC"
         "AB\xC3\xA9| |123|4"}, // caseless, capitals, a small one
        {PATTERN_O200K,
         "A\xE6\x9C\xAC"
         "BC",
         "A\xE6\x9C\xAC|BC"}, // given back to what may end a word
        {PATTERN_O200K,
         "\xEF\xB8\xA0 \xEF\xB8\xA0"
         "AB",
         "\xEF\xB8\xA0| \xEF\xB8\xA0|AB"}, // a mark leads, or is a word
        {PATTERN_O200K, "a./\n/b  \n c", "a|./\n/|b|  \n| c"},
    };
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++) {
        toy_make(&table, 1, cases[k].pattern, 0);
        Tokenizer *t = toy_open(&table, path);
        CodePoints c;
        char pieces[200] = "";
        const char *text = cases[k].text;
        bool valid = codepoints_read(&c, t, (const unsigned char *)text, strlen(text));
        EXPECT(valid, "'%s' is UTF-8", text);
        for (size_t i = 0, end; i < c.count; i = end) {
            end = pretokenize(t, &c, i);
            snprintf(strchr(pieces, 0), 100, "%s%.*s", i ? "|" : "", (int)(c.at[end] - c.at[i]), text + c.at[i]);
        }
        EXPECT(strcmp(pieces, cases[k].pieces) == 0, "'%s' is cut into '%s', not '%s'", text, pieces, cases[k].pieces);
        codepoints_free(&c);
        tokenizer_close(t);
    }
}

// Truncated tables and tables with a changed byte are rejected, with or without a valid checksum.
static void test_tokenizer_damaged_tables(void) {
    static ToyTable tables[2], damaged;
    toy_make(&tables[0], 1, PATTERN_GPT2, TOKENIZER_IGNORE_MERGES);
    toy_make(&tables[1], 1, PATTERN_O200K, 0);
    TestRandom r = {3};
    int taken = 0;
    for (int round = 0; round < 8000; round++) {
        const ToyTable table = tables[round / 4 % 2];
        damaged = table;
        bool sealed = round % 2;
        size_t at = test_random_int(&r, (int)table.size - 8);
        if (round % 4 < 2) damaged.size = sealed ? at / 4 * 4 : at;
        else {
            damaged.bytes[at] ^= (unsigned char)(1 << test_random_int(&r, 8));
            damaged.size -= sealed ? 8 : 0;
        }
        if (sealed) toy_seal(&damaged);
        Tokenizer *t = (Tokenizer *)checked_calloc(1, sizeof(Tokenizer));
        t->memory = (char *)checked_calloc(damaged.size + 8, 1);
        memcpy(t->memory, damaged.bytes, damaged.size);
        t->size = damaged.size;
        bool good = tokenizer_read(t);
        EXPECT(!good || (sealed && round % 4 == 3), "a table with %s is taken",
               round % 4 < 2 ? "an end missing" : "a byte changed");
        if (good && t->reason[0] == 0) { // another table, and a possible one: it must be safe to use
            int *ids = NULL;
            size_t count = tokenizer_encode(t, "ab c<|end|> 12\n", 15, &ids), size;
            free(tokenizer_decode(t, ids, count, &size));
            free(ids);
            taken++;
        }
        tokenizer_close(t);
    }
    EXPECT(taken > 100, "only %d changed tables were tried", taken);
}

// Added tokens over two letters, many of them equal or prefixes of others, in random order and one listed twice. As in
// a search through all of them, the longest match is found, and the first in the list of equal ones.
static void test_tokenizer_added_tokens(void) {
    enum { ADDED = 60, TEXT = 400 };
    static ToyTable t;
    const char *path = test_file("t.bin");
    for (uint64_t seed = 1; seed <= 20; seed++) {
        TestRandom r = {seed};
        char added[ADDED][8];
        uint32_t listed[ADDED + 1], bytes = 256;
        for (int i = 0; i < ADDED; i++) {
            int length = 1 + test_random_int(&r, 7);
            for (int k = 0; k < length; k++) added[i][k] = "ab"[test_random_int(&r, 2)];
            added[i][length] = 0;
            bytes += (uint32_t)length;
            listed[i] = 256 + (uint32_t)i;
        }
        for (int i = ADDED - 1; i > 0; i--) {
            int k = test_random_int(&r, i + 1);
            uint32_t other = listed[i];
            listed[i] = listed[k], listed[k] = other;
        }
        listed[ADDED] = listed[5];
        const uint32_t header[12] = {TOKENIZER_BYTES, 256 + ADDED, 0, 0, UINT32_MAX, 0, ADDED + 1, 0, 0, bytes, 0, 0};
        memset(&t, 0, sizeof(t));
        memcpy(t.bytes, "DV2TOK\0\1", t.size = 8);
        for (int i = 0; i < 12; i++) toy_number(&t, header[i]);
        for (int i = 0; i < 256 + ADDED; i++) toy_number(&t, i < 256 ? 1 : (uint32_t)strlen(added[i - 256]));
        for (int i = 0; i < 256; i++) t.bytes[t.size++] = (unsigned char)i;
        for (int i = 0; i < ADDED; i++) t.size += sprintf((char *)t.bytes + t.size, "%s", added[i]);
        t.size = round_up(t.size, 4);
        for (int i = 0; i <= ADDED; i++) toy_number(&t, listed[i]);
        toy_seal(&t);
        Tokenizer *table = toy_open(&t, path);
        char text[TEXT + 1] = "";
        for (int i = 0; i < TEXT; i++) text[i] = "aabbc"[test_random_int(&r, 5)];
        int *ids = NULL;
        size_t count = tokenizer_encode(table, text, TEXT, &ids), n = 0;
        for (size_t at = 0; at < TEXT; n++) {
            int want = (unsigned char)text[at];
            size_t longest = 0;
            for (int i = 0; i <= ADDED; i++) {
                size_t length = strlen(added[listed[i] - 256]);
                if (length <= longest || strncmp(text + at, added[listed[i] - 256], length) != 0) continue;
                want = (int)listed[i], longest = length;
            }
            EXPECT(n < count && ids[n] == want, "seed %d, place %zu: token %d, not %d", (int)seed, at,
                   n < count ? ids[n] : -1, want);
            at += max_size(longest, 1);
        }
        EXPECT(n == count, "%zu tokens, not %zu", count, n);
        free(ids);
        tokenizer_close(table);
    }
}

// With such classes a pattern could match no piece or two pieces at the same position.
static void test_tokenizer_invalid_classes(void) {
    static const struct {
        Pattern pattern;
        uint32_t value;
        bool good;
    } cases[] = {
        {PATTERN_GPT2, 1, true},    {PATTERN_GPT2, 0, false},   {PATTERN_GPT2, 3, false},   {PATTERN_GPT2, 8, false},
        {PATTERN_GPT2, 9, false},   {PATTERN_O200K, 9, true},   {PATTERN_O200K, 17, true},  {PATTERN_O200K, 25, true},
        {PATTERN_O200K, 24, true},  {PATTERN_O200K, 2, true},   {PATTERN_O200K, 1, false},  {PATTERN_O200K, 0, false},
        {PATTERN_O200K, 12, false}, {PATTERN_O200K, 18, false}, {PATTERN_O200K, 33, false},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool good = tokenizer_class_is_valid(cases[i].pattern, cases[i].value);
        EXPECT(good == cases[i].good, "pattern %d, class %u: %d", cases[i].pattern, cases[i].value, good);
    }
}

static const Test tokenizer_tests[] = {
    {"text is split as by the regular expressions", test_tokenizer_patterns},
    {"damaged tables are rejected", test_tokenizer_damaged_tables},
    {"the longest added token is matched, and the first of equal ones", test_tokenizer_added_tokens},
    {"classes that are invalid for a pattern are rejected", test_tokenizer_invalid_classes},
};
