/*
data_identity.h: fingerprint, description and comparison of the data of a loader, and its first tokens.
*/
#pragma once
#include "dataloader.h"

#ifndef FIRST_TOKENS_PIECE
#define FIRST_TOKENS_PIECE 65536 // tokens per read
#endif

// out[0..count) = the first tokens of the shards in file order, continued across shards.
static inline void dataloader_read_first_tokens(const DataLoader *l, int *out, size_t count) {
    CHECK(count <= l->token_count,
          "%zu tokens are needed and the shards (%s ...) have %zu: use a smaller --batch-size or --seq-len", count,
          l->shards[0].path, l->token_count);
    char error[SHARD_ERROR_BYTES];
    void *raw = checked_calloc(FIRST_TOKENS_PIECE, sizeof(uint32_t));
    for (size_t i = 0, done = 0; done < count; i++) {
        const Shard *s = &l->shards[i];
        int fd = shard_open(s, error);
        CHECK(fd >= 0, "%s", error);
        for (size_t at = 0; at < s->token_count && done < count;) {
            size_t n = min_size(FIRST_TOKENS_PIECE, min_size(s->token_count - at, count - done));
            CHECK(shard_read_tokens(s, fd, at, n, l->V, raw, out + done, error), "%s", error);
            at += n, done += n;
        }
        close(fd);
    }
    free(raw);
}

// XXH3 of the number of shards of a corpus and, for each shard in order, its token width, token count and 16 evenly
// spaced blocks of 4 KiB (all of a shard up to 64 KiB). Different data get different fingerprints; the path does not
// matter, and the cost does not grow with the size of a shard.
static inline uint64_t corpus_fingerprint(const DataLoader *l, const Corpus *corpus) {
    char error[SHARD_ERROR_BYTES];
    unsigned char block[4096];
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL, "out of memory for the data's fingerprint");
    XXH3_64bits_reset(state);
    uint64_t number = corpus->shard_count;
    XXH3_64bits_update(state, &number, sizeof(number));
    for (size_t i = 0; i < corpus->shard_count; i++) {
        const Shard *s = &l->shards[corpus->first_shard + i];
        uint64_t shape[2] = {(uint64_t)s->token_bytes, s->token_count};
        XXH3_64bits_update(state, shape, sizeof(shape));
        int fd = shard_open(s, error);
        CHECK(fd >= 0, "%s", error);
        size_t bytes = s->token_count * s->token_bytes, block_bytes = min_size(sizeof(block), bytes);
        for (size_t k = 0; k < 16; k++) {
            size_t offset = (bytes - block_bytes) * k / 15;
            CHECK(shard_pread(s, fd, block, block_bytes, SHARD_HEADER_BYTES + (int64_t)offset, error), "%s", error);
            XXH3_64bits_update(state, block, block_bytes);
        }
        close(fd);
    }
    uint64_t fingerprint = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return fingerprint;
}

// A hash of the sizes and times of the files, and of corpus.json. It changes if a shard is copied, or edited, even
// between the blocks of its fingerprint.
static inline uint64_t corpus_files(const DataLoader *l, const Corpus *corpus) {
    char path[PATH_MAX + 32];
    size_t size = 0;
    FORMAT(path, "%s/corpus.json", corpus->path);
    char *text = corpus->described ? file_read(path, 64 << 20, &size) : NULL;
    uint64_t hash = text ? XXH3_64bits(text, size) : 0;
    free(text);
    for (size_t i = 0; i < corpus->shard_count; i++) {
        const Shard *s = &l->shards[corpus->first_shard + i];
        const int64_t file[2] = {s->file_bytes, s->modified};
        hash = XXH3_64bits_withSeed(file, sizeof(file), hash);
    }
    return hash;
}

// The fingerprint of all data: a single corpus's fingerprint, or a hash of the fingerprints, names and weights of
// several corpora. Stores the fingerprint of each corpus.
static inline uint64_t dataloader_fingerprint(DataLoader *l) {
    uint64_t hash = 0;
    for (int i = 0; i < l->corpus_count; i++) {
        Corpus *s = &l->corpora[i];
        s->fingerprint = corpus_fingerprint(l, s);
        const uint64_t parts[3] = {s->fingerprint, s->weight_end, XXH3_64bits(s->name, strlen(s->name))};
        hash = i == 0 && l->corpus_count == 1 ? s->fingerprint : XXH3_64bits_withSeed(parts, sizeof(parts), hash);
    }
    return hash;
}

// The name of a corpus in messages and checkpoints: empty if there is only one.
static inline const char *corpus_shown_name(const DataLoader *l, const Corpus *s) {
    return l->corpus_count > 1 ? s->name : "";
}

// The "data" of a checkpoint, with which a resume can name differences.
static inline cJSON *dataloader_identity(const DataLoader *l) {
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < l->corpus_count; i++) {
        const Corpus *s = &l->corpora[i];
        cJSON *item = cJSON_CreateObject();
        cJSON_AddStringToObject(item, "name", corpus_shown_name(l, s));
        cJSON_AddNumberToObject(item, "weight", s->weight);
        json_add_u64(item, "shards", s->shard_count);
        json_add_u64(item, "tokens", s->token_count);
        json_add_u64(item, "fingerprint", s->fingerprint);
        CHECK(cJSON_AddItemToArray(list, item), "out of memory for a checkpoint");
    }
    return list;
}

// Writes to `text` how a corpus differs from an item of dataloader_identity; leaves `text` unchanged if it does not.
static inline void corpus_describe_difference(const DataLoader *l, const Corpus *s, const cJSON *item, char *text,
                                              size_t size) {
    const char *shown = corpus_shown_name(l, s);
    uint64_t shards = 0, tokens = 0, fingerprint = 0;
    if (!json_get_u64(item, "shards", &shards) || !json_get_u64(item, "tokens", &tokens) ||
        !json_get_u64(item, "fingerprint", &fingerprint)) {
        snprintf(text, size, ", and \"data\" in its checkpoint is invalid");
    } else if (shards != s->shard_count || tokens != s->token_count) {
        snprintf(text, size, ": %s had %" PRIu64 " tokens in %" PRIu64 " shards and now has %zu in %zu",
                 *shown ? shown : "it", tokens, shards, s->token_count, s->shard_count);
    } else if (fingerprint != s->fingerprint) {
        snprintf(text, size, ": %s had different tokens in its %zu shards", *shown ? shown : "it", s->shard_count);
    }
}

// Writes to `text`, as the end of a sentence, the first difference between the data and a checkpoint's data with the
// same names and weights. `text` is empty if the checkpoint has only a fingerprint.
static inline void dataloader_describe_difference(const DataLoader *l, const cJSON *identity, char *text, size_t size) {
    text[0] = 0;
    for (int i = 0; !text[0] && i < l->corpus_count && i < cJSON_GetArraySize(identity); i++)
        corpus_describe_difference(l, &l->corpora[i], cJSON_GetArrayItem(identity, i), text, size);
}

// Exits if two corpora share a file: both would read its windows, each in its own order.
static inline void dataloader_check_distinct_files(const DataLoader *l) {
    for (int i = 1; i < l->corpus_count; i++)
        for (size_t a = l->corpora[i].first_shard; a < l->corpora[i].first_shard + l->corpora[i].shard_count; a++)
            for (size_t b = 0; b < l->corpora[i].first_shard; b++)
                CHECK(
                    l->shards[a].device != l->shards[b].device || l->shards[a].inode != l->shards[b].inode,
                    "token shard %s is in '%s' and in an earlier corpus: specify it in one corpus and add the weights",
                    l->shards[a].path, l->corpora[i].name);
}

static inline double corpus_epochs(const Corpus *s, double windows) {
    return windows * s->weight / (double)s->window_count;
}

// For run.json, after dataloader_fingerprint. windows: the number that the run reads, 0 if unknown.
static inline cJSON *dataloader_describe(const DataLoader *l, double windows) {
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < l->corpus_count; i++) {
        const Corpus *s = &l->corpora[i];
        cJSON *item = cJSON_CreateObject(), *separator = NULL;
        cJSON_AddStringToObject(item, "name", s->name);
        cJSON_AddStringToObject(item, "path", s->path);
        cJSON_AddNumberToObject(item, "weight", s->weight);
        cJSON_AddNumberToObject(item, "shards", (double)s->shard_count);
        cJSON_AddNumberToObject(item, "tokens", (double)s->token_count);
        cJSON_AddNumberToObject(item, "windows", (double)s->window_count);
        json_add_u64(item, "fingerprint", s->fingerprint);
        json_add_u64(item, "files", corpus_files(l, s));
        if (windows > 0) cJSON_AddNumberToObject(item, "epochs", corpus_epochs(s, windows));
        if (s->vocab_size) cJSON_AddNumberToObject(item, "vocab_size", s->vocab_size);
        if (s->separator.token >= 0) separator = cJSON_AddObjectToObject(item, "separator");
        if (separator) cJSON_AddNumberToObject(separator, "token", s->separator.token);
        if (separator) cJSON_AddStringToObject(separator, "place", s->separator.after ? "after" : "before");
        CHECK(cJSON_AddItemToArray(list, item), "out of memory for run.json");
    }
    return list;
}

// Prints the training data at the start of a run.
static inline void dataloader_print(const DataLoader *l, double windows) {
    for (int i = 0; i < l->corpus_count; i++) {
        const Corpus *s = &l->corpora[i];
        if (l->corpus_count > 1) printf("%-12s %6.2f%% of the windows, ", s->name, 100 * s->weight);
        else printf("training data: ");
        printf("%zu tokens in %zu shard%s, %.2f epochs in this run", s->token_count, s->shard_count,
               s->shard_count == 1 ? "" : "s", corpus_epochs(s, windows));
        if (s->begin) printf(" after %.2f with other options", (double)s->begin / (double)s->window_count);
        printf(" (%s)\n", s->path);
    }
}
