/*
dataloader_whole.h: what is asked of a loader's data as a whole: its first tokens, and whether it is other data.
*/
#ifndef LLMC_DATALOADER_WHOLE_H
#define LLMC_DATALOADER_WHOLE_H
#include "dataloader.h"

// out[0..count) = the first tokens of the shards in file order, across shards, each token once.
static inline void dataloader_first_tokens(const DataLoader *l, int *out, size_t count) {
    CHECK(count <= l->token_count,
          "%zu tokens are wanted and the shards (%s ...) have %zu: use a smaller --batch-size or "
          "--seq-len",
          count, l->shards[0].path, l->token_count);
    char error[DATALOADER_ERROR_BYTES];
    size_t chunk = 65536;
    void *raw = checked_calloc(chunk, sizeof(uint32_t));
    for (size_t i = 0, done = 0; done < count; i++) {
        const Shard *s = &l->shards[i];
        int fd = shard_open(s, error);
        CHECK(fd >= 0, "%s", error);
        for (size_t at = 0; at < s->token_count && done < count;) {
            size_t n = min_size(chunk, min_size(s->token_count - at, count - done));
            CHECK(shard_read_tokens(s, fd, at, n, l->V, raw, out + done, error), "%s", error);
            at += n, done += n;
        }
        close(fd);
    }
    free(raw);
}

// XXH3 over the number of shards and, for each in order, token width, token count and 16 evenly spread blocks of 4 KiB
// (all of a shard up to 64 KiB), and, of several sources, their names and shares: tells other data from the same data elsewhere, at a cost that does not grow with it.
static inline uint64_t dataloader_fingerprint(const DataLoader *l) {
    char error[DATALOADER_ERROR_BYTES];
    unsigned char block[4096];
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL, "out of memory for the data's fingerprint");
    XXH3_64bits_reset(state);
    uint64_t number = l->shard_count;
    XXH3_64bits_update(state, &number, sizeof(number));
    for (size_t i = 0; i < l->shard_count; i++) {
        const Shard *s = &l->shards[i];
        uint64_t shape[2] = {(uint64_t)s->token_bytes, s->token_count};
        XXH3_64bits_update(state, shape, sizeof(shape));
        int fd = shard_open(s, error);
        CHECK(fd >= 0, "%s", error);
        size_t bytes = s->token_count * (size_t)s->token_bytes, block_bytes = min_size(sizeof(block), bytes);
        for (size_t k = 0; k < 16; k++) {
            size_t offset = (bytes - block_bytes) * k / 15;
            CHECK(shard_pread(s, fd, block, block_bytes, SHARD_HEADER_BYTES + (int64_t)offset, error), "%s", error);
            XXH3_64bits_update(state, block, block_bytes);
        }
        close(fd);
    }
    for (int i = 0; l->source_count > 1 && i < l->source_count; i++) {
        uint64_t part[2] = {l->sources[i].shard_count, l->sources[i].per_block};
        XXH3_64bits_update(state, part, sizeof(part));
        XXH3_64bits_update(state, l->sources[i].name, strlen(l->sources[i].name) + 1);
    }
    uint64_t fingerprint = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return fingerprint;
}
#endif
