/*
fuzz_choices.c: choices_open with a damaged file of multiple-choice tasks. In every accepted file all tokens are in the
vocabulary and in the file, every scored token follows another one within the context, and the rows are dealt to ranks
once.

Most mutations change the examples, and then make them one example of the stated length, or keep the header: random ones
would hit its unused part.
*/
#include "fuzz.h"
#include "../../llmc/data/choices.h"

const char fuzz_file[] = "choices.bin";

enum { T = 6, V = 300, BODY_LIMIT = 512, SEED_WORDS = 64 };

void fuzz_prepare(void) {}

// `examples` examples of `completions` completions.
static void seed(const char *name, int version, int examples, int completions) {
    static uint8_t file[SHARD_HEADER_BYTES + 4 * SEED_WORDS * 3];
    uint32_t words[SEED_WORDS * 3], count = 0;
    size_t width = version == 1 ? 2 : 4, longest = 0;
    for (int e = 0; e < examples; e++) {
        uint32_t begin = count;
        const uint32_t head[] = {width == 2 ? 65535 : UINT32_MAX, 0, (uint32_t)e, 0, (uint32_t)completions, 2, 7, 8};
        for (size_t i = 0; i < sizeof(head) / sizeof(head[0]); i++) words[count++] = head[i];
        for (int c = 0; c < completions; c++) {
            const uint32_t completion[] = {2, 9, (uint32_t)(100 + c)};
            for (int i = 0; i < 3; i++) words[count++] = completion[i];
        }
        words[begin + 1] = (uint32_t)((count - begin) * width);
        longest = max_size(longest, words[begin + 1]);
    }
    const int32_t header[4] = {CHOICES_MAGIC, version, examples, (int32_t)longest};
    memcpy(file, header, sizeof(header));
    for (uint32_t i = 0; i < count; i++) memcpy(file + SHARD_HEADER_BYTES + i * width, &words[i], width);
    fuzz_seed(name, file, SHARD_HEADER_BYTES + count * width);
}

void fuzz_seeds(void) {
    seed("four", 1, 2, 4);
    seed("wide", 2, 2, 2);
    seed("single", 1, 3, 1);
    seed("none", 1, 0, 0);
}

// A file of many examples, or one example of many completions.
static void large(const char *name, int examples, int completions) {
    size_t words = (size_t)examples * (7 + 2 * (size_t)completions), count = 0;
    uint8_t *file = (uint8_t *)checked_calloc(SHARD_HEADER_BYTES + 4 * words, 1);
    uint32_t *body = (uint32_t *)(void *)(file + SHARD_HEADER_BYTES);
    for (int e = 0; e < examples; e++) {
        uint32_t bytes = (uint32_t)(4 * (7 + 2 * completions));
        const uint32_t head[] = {UINT32_MAX, bytes, (uint32_t)e, 0, (uint32_t)completions, 1, 7};
        for (int i = 0; i < 7; i++) body[count++] = head[i];
        for (int c = 0; c < 2 * completions; c++) body[count++] = 1;
    }
    const int32_t header[4] = {CHOICES_MAGIC, 2, examples, 4 * (7 + 2 * completions)};
    memcpy(file, header, sizeof(header));
    fuzz_large_input(name, file, SHARD_HEADER_BYTES + 4 * words);
    free(file);
}

void fuzz_large(void) {
    large("many examples", 300000, 2);
    large("many completions", 1, 1000000);
}

void fuzz_one(const uint8_t *data, size_t size) {
    ChoiceSpec spec = {"fuzz", ""};
    ChoiceTask t;
    FORMAT(spec.path, "%s/%s", fuzz_directory(), fuzz_file);
    choices_open(&t, &spec, V, T);
    size_t words = (size - SHARD_HEADER_BYTES) / (data[4] == 1 ? 2 : 4), tokens = 0; // data[4]: the version
    int *order = (int *)checked_calloc(t.row_count, sizeof(int)), dealt = 0, computed = 0;
    for (int i = 0; i < t.count; i++) {
        const ChoiceExample *e = &t.examples[i];
        FUZZ_EXPECT(e->count > 1 && e->label < e->count && e->context + e->context_length <= words, "example %d", i);
        for (int r = e->first; r < e->first + e->count; r++) {
            const ChoiceRow *row = &t.rows[r];
            FUZZ_EXPECT(row->equal >= e->first && row->equal <= r, "row %d equals row %d", r, row->equal);
            FUZZ_EXPECT(row->example == i && row->tokens + row->length <= words && row->length > 0 &&
                            e->context_length > 0 && choice_length(&t, r) <= T,
                        "row %d of example %d", r, i);
            for (int k = 0; k < row->length; k++) FUZZ_EXPECT(t.words[row->tokens + k] < V, "a token of row %d", r);
            tokens += (size_t)row->length;
            computed += row->equal == r;
        }
        for (int k = 0; k < e->context_length; k++) FUZZ_EXPECT(t.words[e->context + k] < V, "a token of %d", i);
    }
    FUZZ_EXPECT(tokens <= words, "%zu tokens in %zu words", tokens, words);
    for (int rank = 0; rank < 3; rank++) dealt += choices_deal(&t, rank, 3, order);
    FUZZ_EXPECT(dealt == computed, "%d of %d rows are dealt", dealt, computed);
    free(order);
    choices_close(&t);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed_value) {
    if (size < SHARD_HEADER_BYTES || max_size < SHARD_HEADER_BYTES + BODY_LIMIT || seed_value % 8 == 0)
        return LLVMFuzzerMutate(data, size, max_size);
    int32_t header[4];
    if (seed_value % 8 == 1) {
        LLVMFuzzerMutate(data, sizeof(header), sizeof(header));
        return size;
    }
    uint8_t *body = data + SHARD_HEADER_BYTES;
    size_t bytes = LLVMFuzzerMutate(body, min_size(size - SHARD_HEADER_BYTES, BODY_LIMIT), BODY_LIMIT);
    memcpy(header, data, sizeof(header));
    size_t width = header[1] == 1 ? 2 : 4;
    bytes -= bytes % width;
    if (seed_value % 8 < 4 || bytes < 3 * width) return SHARD_HEADER_BYTES + bytes;
    const uint32_t head[3] = {UINT32_MAX, (uint32_t)bytes, 0}; // one example
    for (int i = 0; i < 3; i++) memcpy(body + (size_t)i * width, &head[i], width);
    for (size_t i = 1; i < bytes && seed_value % 8 > 5 && width == 2; i += 2) // small lengths and tokens
        if (i > 6) body[i] = 0;
    header[2] = 1, header[3] = (int32_t)bytes;
    memcpy(data, header, sizeof(header));
    return SHARD_HEADER_BYTES + bytes;
}
