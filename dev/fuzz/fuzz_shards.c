/*
fuzz_shards.c: the data loader with a damaged token shard, alone and behind a valid one: header, fingerprint, first
tokens, windows in both orders. The function that the thread of the loader calls reads the windows, without the thread.
The tokens are compared with the bytes of the file.

Most mutations change the three numbers of the header that are read, and the tokens, and keep the size of the file equal
to what the header says: random ones would hit the unused part of the header.
*/
#include "fuzz.h"
#include "../../llmc/data/data_identity.h"

const char fuzz_file[] = "b.bin";

enum { T = 4, V = 300, TOKENS = 24, GOOD_TOKENS = 10, TOKEN_BYTES_LIMIT = 512 };
static char alone[PATH_MAX], both[PATH_MAX];

static size_t make_shard(uint8_t *out, int token_bytes, uint32_t count, uint32_t step) {
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};
    header[0] = token_bytes == 2 ? SHARD_MAGIC_U16 : SHARD_MAGIC_U32;
    header[1] = token_bytes == 2 ? SHARD_VERSION_U16 : SHARD_VERSION_U32;
    header[2] = (int32_t)count;
    memcpy(out, header, sizeof(header));
    for (uint32_t i = 0; i < count; i++) {
        uint32_t token = i * step;
        memcpy(out + SHARD_HEADER_BYTES + i * (uint32_t)token_bytes, &token, (size_t)token_bytes);
    }
    return SHARD_HEADER_BYTES + count * (size_t)token_bytes;
}

void fuzz_prepare(void) {
    uint8_t shard[2048];
    fuzz_put("a.bin", shard, make_shard(shard, 2, GOOD_TOKENS, 1));
    FORMAT(alone, "%s/b.bin", fuzz_directory());
    FORMAT(both, "%s/[ab].bin", fuzz_directory());
}

void fuzz_seeds(void) {
    uint8_t shard[2048];
    fuzz_seed("narrow", shard, make_shard(shard, 2, 20, 7));
    fuzz_seed("wide", shard, make_shard(shard, 4, 23, 11));
    fuzz_seed("one_window", shard, make_shard(shard, 2, T + 1, 1));
    fuzz_seed("no_window", shard, make_shard(shard, 4, T, 1));
    fuzz_seed("no_token", shard, make_shard(shard, 2, 0, 1));
    fuzz_seed("outside_vocabulary", shard, make_shard(shard, 4, 9, 100));
}

// Token `i` of the input, read independently of the loader.
static int token_of(const uint8_t *data, int token_bytes, size_t i) {
    const uint8_t *p = data + SHARD_HEADER_BYTES + i * (size_t)token_bytes;
    return p[0] | p[1] << 8 | (token_bytes == 4 ? p[2] << 16 | (int)((uint32_t)p[3] << 24) : 0);
}

static void read_all(const char *pattern, bool shuffle, const uint8_t *data, size_t size) {
    static DataLoader loader;
    int window[2 * T + 1], tokens[GOOD_TOKENS + TOKENS];
    DataLoader *l = &loader;
    dataloader_open(l, pattern, 2, T, V, 0, 1, 1, shuffle);
    const Shard *s = &l->shards[l->shard_count - 1];
    FUZZ_EXPECT(SHARD_HEADER_BYTES + s->token_count * (size_t)s->token_bytes == size, "the sizes do not agree");
    FUZZ_EXPECT(l->window_count >= l->shard_count && l->window_count <= l->token_count / T, "there are %zu windows",
                (size_t)l->window_count);
    FUZZ_EXPECT(shuffle || dataloader_fingerprint(l) != 0, "there is no fingerprint");
    for (uint64_t g = 0; g < min_size(l->window_count, TOKENS / T) + 2; g++) {
        uint64_t at = dataloader_locate(l, g).window;
        FUZZ_EXPECT(at < l->window_count, "window %zu of %zu", (size_t)at, (size_t)l->window_count);
        CHECK(dataloader_read_window(l, g, window), "%s", l->error);
        for (size_t i = 0; at >= s->first_window && i <= T; i++)
            FUZZ_EXPECT(window[i] == token_of(data, s->token_bytes, (size_t)(at - s->first_window) * T + i) &&
                            window[i] >= 0 && window[i] < V,
                        "a token differs from the file's");
    }
    size_t count = min_size(l->token_count, GOOD_TOKENS + TOKENS), before = l->token_count - s->token_count;
    dataloader_read_first_tokens(l, tokens, count);
    for (size_t i = before; i < count; i++)
        FUZZ_EXPECT(tokens[i] == token_of(data, s->token_bytes, i - before), "a first token differs from the file's");
    dataloader_close(l);
}

void fuzz_one(const uint8_t *data, size_t size) {
    read_all(alone, false, data, size);
    read_all(both, true, data, size);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    uint32_t header[3];
    if (size < SHARD_HEADER_BYTES || max_size < SHARD_HEADER_BYTES + TOKEN_BYTES_LIMIT || seed % 8 == 0)
        return LLVMFuzzerMutate(data, size, max_size);
    if (seed % 8 == 1) {
        LLVMFuzzerMutate(data, sizeof(header), sizeof(header));
        return size;
    }
    size_t tokens = LLVMFuzzerMutate(data + SHARD_HEADER_BYTES, min_size(size - SHARD_HEADER_BYTES, TOKEN_BYTES_LIMIT),
                                     TOKEN_BYTES_LIMIT);
    memcpy(header, data, sizeof(header));
    if (seed % 8 == 2) { // the other format
        bool narrow = header[0] == SHARD_MAGIC_U32;
        header[0] = narrow ? SHARD_MAGIC_U16 : SHARD_MAGIC_U32;
        header[1] = narrow ? SHARD_VERSION_U16 : SHARD_VERSION_U32;
    }
    size_t width = header[0] == SHARD_MAGIC_U16 ? 2 : 4;
    tokens -= tokens % width;
    header[2] = (uint32_t)(tokens / width);
    if (seed % 8 == 3) { // most tokens into the vocabulary, which other mutations leave
        for (size_t i = 0; i < tokens; i++)
            if (i % width) data[SHARD_HEADER_BYTES + i] = 0;
    }
    memcpy(data, header, sizeof(header));
    return SHARD_HEADER_BYTES + tokens;
}
