/*
shards.h: token shards, the files of training and validation data.

  format    llm.c's, little-endian: a header of 256 int32 (magic, version, token count, unused) and the tokens. Magic
            20240520, version 1: uint16. Magic 20240801, version 7: uint32. The count is read as unsigned and must match
            the size of the file.
  reading   By pread, not mmap: a shard that is truncated during a run causes an error message instead of SIGBUS.
  source    the format: llm.c, dev/data/data_common.py
*/
#pragma once
#include "../base/files.h"

enum {
    SHARD_HEADER_BYTES = 256 * 4,
    SHARD_MAGIC_U16 = 20240520,
    SHARD_VERSION_U16 = 1,
    SHARD_MAGIC_U32 = 20240801,
    SHARD_VERSION_U32 = 7,
    SHARD_ERROR_BYTES = PATH_MAX + 512, // a path and a message
};

typedef struct {
    char *path;
    int token_bytes;       // 2 or 4
    int64_t file_bytes;    // at the start; a change during the run is an error
    int64_t modified;      // at the start: nanoseconds since 1970
    size_t token_count;    // n
    uint64_t first_window; // index in the corpus of this shard's first window
    dev_t device;          // with inode, identifies the file
    ino_t inode;
} Shard;

PRINTF_LIKE(2, 3)
static inline bool shard_fail(char *error, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(error, SHARD_ERROR_BYTES, fmt, args);
    va_end(args);
    return false;
}

// Opens a shard that existed at the start. Returns a descriptor, or -1 and an error message.
static inline int shard_open(const Shard *s, char *error) {
    int fd = open(s->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        shard_fail(error, "cannot open token shard %s: %s; it existed when the run began: restore it and use --resume",
                   s->path, strerror(errno));
    return fd;
}

// Reads exactly `bytes` bytes at `offset` of a file, which must not have changed since the start.
static inline bool shard_pread(const Shard *s, int fd, void *to, size_t bytes, int64_t offset, char *error) {
    struct stat now;
    if (fstat(fd, &now) != 0) return shard_fail(error, "cannot examine %s: %s", s->path, strerror(errno));
    if (now.st_nlink == 0)
        return shard_fail(error, "token shard %s was removed or replaced during the run; restore it and use --resume",
                          s->path);
    if ((int64_t)now.st_size != s->file_bytes)
        return shard_fail(
            error, "token shard %s had %lld bytes when the run began and has %lld now; restore it and use --resume",
            s->path, (long long)s->file_bytes, (long long)now.st_size);
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(fd, (char *)to + done, bytes - done, (off_t)(offset + (int64_t)done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return shard_fail(error, "cannot read %s at byte %lld: %s", s->path, (long long)offset + (long long)done,
                              n < 0 ? strerror(errno) : "the file was truncated");
        done += n;
    }
    return true;
}

// tokens[0..count) = tokens first .. first+count-1 of the shard, checked against V. raw: scratch for `count` tokens.
static inline bool shard_read_tokens(const Shard *s, int fd, size_t first, size_t count, int V, void *raw, int *tokens,
                                     char *error) {
    int64_t offset = SHARD_HEADER_BYTES + (int64_t)first * s->token_bytes;
    if (!shard_pread(s, fd, raw, count * s->token_bytes, offset, error)) return false;
    for (size_t i = 0; i < count; i++) {
        uint32_t token = s->token_bytes == 2 ? ((const uint16_t *)raw)[i] : ((const uint32_t *)raw)[i];
        if (token >= (uint32_t)V)
            return shard_fail(error,
                              "token %zu of %s is %u, outside the vocabulary of %d: use --vocab with the vocabulary "
                              "size of its tokenizer",
                              first + i, s->path, token, V);
        tokens[i] = (int)token;
    }
    return true;
}

// Reads the size and header of a shard into `s`; exits if it is invalid.
static inline void shard_examine(Shard *s, size_t window_tokens) {
    const char *advice = "text_to_shards converts text to token shards";
    struct stat file;
    int fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe with no writer must not block
    CHECK(fd >= 0, "cannot open token shard %s: %s", s->path, strerror(errno));
    CHECK(fstat(fd, &file) == 0, "cannot examine %s: %s", s->path, strerror(errno));
    CHECK(S_ISREG(file.st_mode), "%s is not a token shard, since it is not a regular file; %s", s->path, advice);
    s->file_bytes = (int64_t)file.st_size;
    s->modified = (int64_t)file.st_mtim.tv_sec * 1000000000 + file.st_mtim.tv_nsec;
    s->device = file.st_dev, s->inode = file.st_ino;
    CHECK(s->file_bytes >= SHARD_HEADER_BYTES, "%s is not a token shard: it has %lld bytes and a header has %d; %s",
          s->path, (long long)s->file_bytes, SHARD_HEADER_BYTES, advice);
    int32_t header[SHARD_HEADER_BYTES / 4];
    char error[SHARD_ERROR_BYTES];
    CHECK(shard_pread(s, fd, header, sizeof(header), 0, error), "%s", error);
    close(fd);
    bool narrow = header[0] == SHARD_MAGIC_U16;
    CHECK(narrow || header[0] == SHARD_MAGIC_U32, "%s is not a token shard: it begins with %d instead of %d or %d; %s",
          s->path, (int)header[0], SHARD_MAGIC_U16, SHARD_MAGIC_U32, advice);
    int version = narrow ? SHARD_VERSION_U16 : SHARD_VERSION_U32;
    CHECK(header[1] == version, "token shard %s has version %d; magic %d requires version %d: create it again", s->path,
          (int)header[1], (int)header[0], version);
    s->token_bytes = narrow ? 2 : 4;
    s->token_count = (uint32_t)header[2];
    int64_t want = SHARD_HEADER_BYTES + (int64_t)s->token_count * s->token_bytes;
    CHECK(s->file_bytes == want,
          "token shard %s has %lld bytes, but its header states %zu tokens, which take %lld: copy or create it again",
          s->path, (long long)s->file_bytes, s->token_count, (long long)want);
    CHECK(s->token_count >= window_tokens,
          "token shard %s has %zu tokens and a window has %zu: use a shorter --seq-len, omit the shard, or create a "
          "larger one (for validation: --val-tokens)",
          s->path, s->token_count, window_tokens);
}

static inline int shard_compare_paths(const void *a, const void *b) {
    return strcmp(((const Shard *)a)->path, ((const Shard *)b)->path); // glob's order depends on the locale
}

typedef struct {
    Shard *shards; // only their paths
    size_t count;
} ShardList;

static inline void shards_add(ShardList *list, const char *path) {
    if ((list->count & (list->count - 1)) == 0) { // double the capacity at powers of two
        Shard *more = (Shard *)realloc(list->shards, max_size(1, 2 * list->count) * sizeof(Shard));
        CHECK(more != NULL, "out of memory: %zu shards", list->count);
        list->shards = more;
    }
    Shard *s = &list->shards[list->count++];
    memset(s, 0, sizeof(*s));
    s->path = strdup(path);
    CHECK(s->path != NULL, "out of memory: %zu shards", list->count);
}

// The shards `split`_*.bin of a directory.
static inline ShardList shards_of_directory(const char *path, const char *split) {
    ShardList list = {NULL, 0};
    char name[PATH_MAX + 300];
    DIR *directory = opendir(path);
    CHECK(directory != NULL, "cannot read the directory %s: %s", path, strerror(errno));
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        size_t length = strlen(entry->d_name), prefix = strlen(split);
        if (strncmp(entry->d_name, split, prefix) != 0 || entry->d_name[prefix] != '_') continue;
        if (length < 4 || strcmp(entry->d_name + length - 4, ".bin") != 0) continue;
        FORMAT(name, "%s/%s", path, entry->d_name);
        shards_add(&list, name);
    }
    closedir(directory);
    CHECK(list.count > 0, "%s is a corpus without %s_*.bin: create it again%s, or specify other data", path, split,
          strcmp(split, "val") == 0 ? " without --val-tokens 0" : "");
    return list;
}

// The files that a pattern matches, sorted. A name that exists is not a pattern. Exits if there are none.
static inline ShardList shards_find(const char *pattern, const char *split) {
    ShardList list = {NULL, 0};
    struct stat file;
    if (stat(pattern, &file) == 0) {
        if (S_ISDIR(file.st_mode)) list = shards_of_directory(pattern, split);
        else shards_add(&list, pattern);
    } else {
        glob_t found;
        memset(&found, 0, sizeof(found));
        int rc = glob(pattern, GLOB_BRACE | GLOB_TILDE | GLOB_NOSORT, NULL, &found);
        CHECK(rc != GLOB_NOSPACE, "out of memory while looking for token shards %s", pattern);
        CHECK(rc == 0 && found.gl_pathc > 0, "no file matches '%s': check the path; %s", pattern,
              strchr(pattern, '=') ? "specify several corpora as NAME=PATH:WEIGHT NAME=PATH:WEIGHT"
                                   : "text_to_shards converts text to token shards");
        for (size_t i = 0; i < found.gl_pathc; i++) shards_add(&list, found.gl_pathv[i]);
        globfree(&found);
    }
    qsort(list.shards, list.count, sizeof(Shard), shard_compare_paths);
    return list;
}
