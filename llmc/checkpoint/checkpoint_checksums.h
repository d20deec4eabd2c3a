/*
checkpoint_checksums.h: digests that verify a checkpoint. trainer_state.json states them for all files and for itself.

  void   checksums_read(dir, files)                this rank's share of the digests of the files that exist
  cJSON *checksums_build(dir, files)               "checksums" of a trainer_state.json; frees the digests
  bool   checksums_verify(dir, checksums, optimizer, why)   whether the digests are unchanged; why: the first change.
                                                   optimizer: verify optimizer.safetensors too
  bool   checksums_sizes_match(dir, checksums)     whether the sizes are unchanged; reads no data
  void   checkpoint_state_write(path, state)       with the digest of its text; synced to disk
  cJSON *checkpoint_state_read(dir, why)           NULL and why if the digest does not match; cJSON_Delete()

All ranks call checksums_build and checksums_verify together. Any rank and thread may call the others. Format:
checkpoint.h.
*/
#pragma once
#include "../comm/comm.h"
#include "../base/common.h"
#include "../base/files.h"
#include "../base/json.h"

#ifndef CHECKSUM_CHUNK
#define CHECKSUM_CHUNK (64 << 20) // bytes of a file per checksum; part of the format
#endif
#ifndef CHECKSUM_PIECE
#define CHECKSUM_PIECE (64 << 10) // bytes per read
#endif
enum { CHECKPOINT_STATE_LIMIT = 32 << 20 };

static const char *const checkpoint_files[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                               "tokenizer.bin", "tokenizer.json"};
// files after CHECKPOINT_REQUIRED may be missing
enum { CHECKPOINT_FILE_COUNT = sizeof(checkpoint_files) / sizeof(checkpoint_files[0]), CHECKPOINT_REQUIRED = 3 };

// The reason of a failure, for a message.
typedef char Reason[512];

// XXH3-64 of each CHECKSUM_CHUNK of a file; NULL and errno. free(). Each of `ranks` ranks computes every ranks-th chunk
// and leaves the others 0.
static inline uint64_t *file_digests(const char *path, int rank, int ranks, size_t *count, uint64_t *bytes) {
    int fd = file_open_regular(path, bytes), error = 0;
    if (fd < 0) return NULL;
    *count = (*bytes + CHECKSUM_CHUNK - 1) / CHECKSUM_CHUNK;
    uint64_t *digests = (uint64_t *)checked_calloc(*count, sizeof(uint64_t)), size = *bytes;
    int64_t chunks = (int64_t)*count;
#pragma omp parallel for schedule(dynamic) if (chunks > 1)
    for (int64_t i = rank; i < chunks; i += ranks) {
        char piece[CHECKSUM_PIECE];
        XXH3_state_t *state = XXH3_createState();
        CHECK(state && XXH3_64bits_reset(state) == XXH_OK, "out of memory for the checksum of %s", path);
        uint64_t at = (uint64_t)i * CHECKSUM_CHUNK, end = at + CHECKSUM_CHUNK < size ? at + CHECKSUM_CHUNK : size;
        while (at < end) {
            size_t n = min_size(end - at, CHECKSUM_PIECE);
            if (!file_pread(fd, piece, n, at)) {
#pragma omp atomic write
                error = errno;
                break;
            }
            XXH3_64bits_update(state, piece, n);
            at += n;
        }
        digests[i] = XXH3_64bits_digest(state);
        XXH3_freeState(state);
    }
    close(fd);
    if (!error) return digests;
    free(digests);
    errno = error;
    return NULL;
}

// Combines the shares of all ranks: the result of file_digests and its errno, the same on all ranks. If one rank cannot
// read the file, it is unreadable for all.
static inline uint64_t *file_digests_gather(uint64_t *digests, int rank_error, size_t *count, uint64_t *bytes) {
    errno = rank_error;
    if (comm_ranks() == 1) return digests;
    struct {
        int error;
        uint64_t bytes;
    } self, *of_ranks = NULL;
    memset(&self, 0, sizeof(self));
    self.error = digests ? 0 : rank_error, self.bytes = digests ? *bytes : 0;
    of_ranks = (__typeof__(of_ranks))checked_calloc(comm_ranks(), sizeof(self));
    comm_gather(of_ranks, &self, sizeof(self));
    int error = 0;
    for (int r = 0; r < comm_ranks() && !error; r++)
        error = of_ranks[r].error ? of_ranks[r].error : of_ranks[r].bytes != of_ranks[0].bytes ? ESTALE : 0;
    free(of_ranks);
    if (error) {
        free(digests);
        errno = error;
        return NULL;
    }
    uint64_t *everyone = (uint64_t *)checked_calloc(comm_ranks() * *count, sizeof(uint64_t));
    if (*count) comm_gather(everyone, digests, *count * sizeof(uint64_t));
    for (size_t i = 0; i < *count; i++) digests[i] = everyone[i % comm_ranks() * *count + i];
    free(everyone);
    return digests;
}

typedef char Digest[20];
static inline void digest_text(uint64_t digest, Digest out) { snprintf(out, sizeof(Digest), "%016" PRIx64, digest); }

typedef struct {
    bool exists;
    int error; // errno, if digests are missing
    uint64_t *digests, bytes;
    size_t count;
} FileDigests;

static inline void checksums_read(const char *dir, FileDigests files[CHECKPOINT_FILE_COUNT]) {
    memset(files, 0, CHECKPOINT_FILE_COUNT * sizeof(files[0]));
    for (int i = 0; i < CHECKPOINT_FILE_COUNT; i++) {
        char path[PATH_SIZE];
        FileDigests *f = &files[i];
        FORMAT(path, "%s/%s", dir, checkpoint_files[i]);
        f->exists = i < CHECKPOINT_REQUIRED || access(path, F_OK) == 0;
        if (f->exists) f->digests = file_digests(path, comm_rank(), comm_ranks(), &f->count, &f->bytes);
        f->error = f->digests ? 0 : errno;
    }
}

static inline cJSON *checksums_build(const char *dir, FileDigests files[CHECKPOINT_FILE_COUNT]) {
    cJSON *checksums = cJSON_CreateObject();
    for (int i = 0; i < CHECKPOINT_FILE_COUNT; i++) {
        if (!files[i].exists) continue;
        size_t count = files[i].count;
        uint64_t bytes = files[i].bytes;
        uint64_t *digests = file_digests_gather(files[i].digests, files[i].error, &count, &bytes);
        CHECK(digests, "cannot read back %s/%s: %s", dir, checkpoint_files[i], strerror(errno));
        cJSON *file = cJSON_AddObjectToObject(checksums, checkpoint_files[i]);
        cJSON_AddNumberToObject(file, "bytes", (double)bytes);
        cJSON *list = cJSON_AddArrayToObject(file, "xxh3_64");
        CHECK(list, "out of memory for trainer_state.json");
        for (size_t k = 0; k < count; k++) {
            Digest d;
            digest_text(digests[k], d);
            cJSON_AddItemToArray(list, cJSON_CreateString(d));
        }
        free(digests);
    }
    return checksums;
}

static inline bool checksums_verify(const char *dir, const cJSON *checksums, bool optimizer, Reason why) {
    for (int i = 0; i < CHECKPOINT_FILE_COUNT; i++) {
        char path[PATH_SIZE];
        if (!optimizer && strcmp(checkpoint_files[i], "optimizer.safetensors") == 0) continue;
        FORMAT(path, "%s/%s", dir, checkpoint_files[i]);
        size_t count = 0;
        // an optional file that was not saved
        if (i >= CHECKPOINT_REQUIRED && !cJSON_GetObjectItemCaseSensitive(checksums, checkpoint_files[i])) continue;
        uint64_t bytes = 0, want_bytes = 0;
        uint64_t *digests = file_digests(path, comm_rank(), comm_ranks(), &count, &bytes);
        digests = file_digests_gather(digests, digests ? 0 : errno, &count, &bytes);
        if (!digests) {
            snprintf(why, sizeof(Reason), "cannot read its %s: %s", checkpoint_files[i], strerror(errno));
            return false;
        }
        const cJSON *file = cJSON_GetObjectItemCaseSensitive(checksums, checkpoint_files[i]);
        const cJSON *size = cJSON_GetObjectItemCaseSensitive(file, "bytes");
        const cJSON *list = cJSON_GetObjectItemCaseSensitive(file, "xxh3_64");
        bool stated = json_size(size, &want_bytes) && cJSON_IsArray(list) &&
                      (uint64_t)cJSON_GetArraySize(list) == (want_bytes + CHECKSUM_CHUNK - 1) / CHECKSUM_CHUNK;
        bool same = stated && bytes == want_bytes;
        if (!stated)
            snprintf(why, sizeof(Reason), "trainer_state.json does not state the checksums of its %s",
                     checkpoint_files[i]);
        else if (!same)
            snprintf(why, sizeof(Reason), "its %s has %" PRIu64 " bytes instead of %" PRIu64, checkpoint_files[i],
                     bytes, want_bytes);
        const cJSON *want = same ? list->child : NULL;
        for (size_t k = 0; same && k < count; k++, want = want->next) {
            Digest d;
            digest_text(digests[k], d);
            same = cJSON_IsString(want) && strcmp(want->valuestring, d) == 0;
            if (!same)
                snprintf(why, sizeof(Reason), "its %s does not match its checksum (chunk %zu of %zu)",
                         checkpoint_files[i], k + 1, count);
        }
        free(digests);
        if (!same) return false;
    }
    return true;
}

static inline bool checksums_sizes_match(const char *dir, const cJSON *checksums) {
    for (int i = 0; i < CHECKPOINT_FILE_COUNT; i++) {
        const cJSON *file = cJSON_GetObjectItemCaseSensitive(checksums, checkpoint_files[i]);
        if (i >= CHECKPOINT_REQUIRED && !file) continue;
        char path[PATH_SIZE];
        uint64_t bytes = 0;
        struct stat st;
        FORMAT(path, "%s/%s", dir, checkpoint_files[i]);
        if (!json_size(cJSON_GetObjectItemCaseSensitive(file, "bytes"), &bytes)) return false;
        if (stat(path, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != bytes) return false;
    }
    return true;
}

// The last member of trainer_state.json, for the `size` bytes of text before it.
static inline int checkpoint_state_tail(const char *text, size_t size, char out[64]) {
    return snprintf(out, 64, "\"checksum\": \"%016" PRIx64 "\"\n}\n", (uint64_t)XXH3_64bits(text, size));
}

static inline void checkpoint_state_write(const char *path, const cJSON *state) {
    size_t size = 0;
    char *object = json_text(state, &size), tail[64];
    assert(size >= 3 && strcmp(object + size - 3, "\n}\n") == 0); // replaces the end by another member
    char *text = (char *)checked_calloc(size + sizeof(tail) + 8, 1);
    memcpy(text, object, size - 3);
    size_t length = size - 3 + sprintf(text + size - 3, ",\n  ");
    length += checkpoint_state_tail(text, length, tail);
    strcat(text, tail);
    file_write_new(path, text, length);
    free(object);
    free(text);
}

static inline cJSON *checkpoint_state_read(const char *dir, Reason why) {
    char path[PATH_SIZE], tail[64];
    FORMAT(path, "%s/trainer_state.json", dir);
    size_t size = 0;
    char *text = file_read(path, CHECKPOINT_STATE_LIMIT, &size);
    if (!text) {
        snprintf(why, sizeof(Reason), "cannot read its trainer_state.json: %s", strerror(errno));
        return NULL;
    }
    size_t length = strlen("\"checksum\": \"0123456789abcdef\"\n}\n");
    cJSON *state = NULL;
    if (size > length) {
        checkpoint_state_tail(text, size - length, tail);
        if (memcmp(text + size - length, tail, length) == 0) state = json_parse(text, size);
    }
    if (!state) snprintf(why, sizeof(Reason), "its trainer_state.json does not match its checksum");
    free(text);
    return state;
}
