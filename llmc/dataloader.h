/*
dataloader.h: batches of token windows out of token shards, read ahead of the step that uses them.

  shard     the format of llm.c, little-endian: a header of 256 int32 (magic, version, token count, then
            unused) and the tokens. Magic 20240520, version 1: uint16. Magic 20240801, version 7: uint32.
            The count is read as unsigned, and the file's size must agree with it. The shards of a loader
            are what its GLOB matches (with ~ and {a,b}), in the byte order of their names.
  window    T+1 tokens of one shard: T inputs and, shifted by one, T targets. Windows start every T tokens,
            so a shard of n tokens has floor((n-1)/T) of them. They are numbered through all shards,
            0 .. W-1; a shard without a window is refused.
  order     A run reads windows by a global index g = 0, 1, 2, ... that never restarts:
                shuffled (training):   window = permutation(seed, epoch = g / W)[g % W]
                not (validation):      window = g % W, that is, the first windows of the shards in order
            Micro-batch m of rank r takes g = base + m*(ranks*B) + r*B + b, b in [0,B). So the windows of an
            update are the indices [base, base + windows per update), whatever the micro-batch and the rank
            count; the index of the next window is all that a resume needs; and a batch may lie across an
            epoch's end.
  shuffle   The permutation is computed element by element, without a table: 8 Feistel rounds on an even
            number of bits that covers W (at least 6, since fewer mix badly), applied again while the result
            is not below W ("cycle walking": at most 4 times on average, 64/W for W < 16). Old checkpoints
            depend on it: changing the rounds or the mixing changes the order of every run.
  reading   One thread fills DATALOADER_SLOTS batches ahead, with pread and not mmap: a shard that shrinks
            under a run then is an error message instead of a SIGBUS. Descriptors are bounded, so thousands
            of shards work. What goes wrong in the thread is kept and reported by the dataloader_next that
            would have returned that batch, in the caller's thread; so nothing waits for ever.
  traffic   2 or 4 (T+1) bytes of file per window, 8T bytes copied to the caller
  source    the formats: llm.c, dev/data/data_common.py. Cycle walking: Black and Rogaway, "Ciphers with
            arbitrary finite domains" (2002). The mixing function is the finalizer of splitmix64.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H
#include "common.h"

enum {
    SHARD_HEADER_BYTES = 256 * 4,
    SHARD_MAGIC_U16 = 20240520,
    SHARD_VERSION_U16 = 1,
    SHARD_MAGIC_U32 = 20240801,
    SHARD_VERSION_U32 = 7,
    DATALOADER_SLOTS = 2,
    DATALOADER_OPEN_FILES = 64,
    DATALOADER_ERROR_BYTES = PATH_MAX + 512, // a path and a sentence
};

typedef struct {
    char *path;
    int token_bytes;       // 2 or 4
    int64_t file_bytes;    // as it was at the start; a change during the run is an error
    size_t token_count;    // n
    uint64_t first_window; // number of this shard's window 0
} Shard;

// Fields above the line are for everyone to read; wait_seconds may be reset. Do not move it between open and close.
typedef struct {
    int B, T, V, rank, ranks;
    uint64_t seed;
    bool shuffle;
    size_t shard_count, token_count;
    uint64_t window_count; // W, of all shards: one epoch
    double wait_seconds;   // that dataloader_next has waited for a batch since dataloader_open
    // ---- private
    Shard *shards;
    struct {
        int fd; // -1: free
        size_t shard;
    } open_files[DATALOADER_OPEN_FILES]; // used by the thread alone: shard s is kept in place s % OPEN_FILES
    int *slots;                          // (SLOTS, B, T+1)
    void *raw;                           // (T+1) tokens as they are in the file
    uint64_t first, produced, consumed;  // batches since dataloader_start, which was at global index `first`
    bool running, stop, failed;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char error[DATALOADER_ERROR_BYTES];
} DataLoader;

PRINTF_LIKE(2, 3)
static inline bool dataloader_fail(char *error, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(error, DATALOADER_ERROR_BYTES, fmt, args);
    va_end(args);
    return false;
}

static inline uint64_t dataloader_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// The place of `x` in a permutation of [0, count) that depends on (seed, epoch) alone.
static inline uint64_t dataloader_permute(uint64_t x, uint64_t count, uint64_t seed, uint64_t epoch) {
    assert(x < count && count <= 1ull << 62);
    int half_bits = 3;
    while ((1ull << (2 * half_bits)) < count) half_bits++;
    const uint64_t golden = 0x9E3779B97F4A7C15ull, mask = (1ull << half_bits) - 1;
    uint64_t key = dataloader_mix(dataloader_mix(seed + golden) + epoch);
    do {
        uint64_t left = x >> half_bits, right = x & mask;
        for (uint64_t round = 1; round <= 8; round++) {
            uint64_t mixed = left ^ (dataloader_mix((key + round * golden) ^ right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half_bits | right;
    } while (x >= count);
    return x;
}

// The window at global index `index` of the run.
static inline uint64_t dataloader_window_at(const DataLoader *l, uint64_t index) {
    uint64_t place = index % l->window_count;
    return l->shuffle ? dataloader_permute(place, l->window_count, l->seed, index / l->window_count) : place;
}

// Opens a shard that was there at the start: a descriptor, or -1 and a message.
static inline int shard_open(const Shard *s, char *error) {
    int fd = open(s->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        dataloader_fail(error,
                        "cannot open token shard %s: %s; it was there when the run began, put it back and "
                        "use --resume",
                        s->path, strerror(errno));
    return fd;
}

// Exactly `bytes` bytes at `offset` of a file that must still be what it was at the start.
static inline bool shard_pread(const Shard *s, int fd, void *to, size_t bytes, int64_t offset, char *error) {
    struct stat now;
    if (fstat(fd, &now) != 0) return dataloader_fail(error, "cannot examine %s: %s", s->path, strerror(errno));
    if (now.st_nlink == 0)
        return dataloader_fail(error,
                               "token shard %s was removed or replaced during the run; put it back and use "
                               "--resume",
                               s->path);
    if ((int64_t)now.st_size != s->file_bytes)
        return dataloader_fail(error,
                               "token shard %s had %lld bytes when the run began and has %lld now; put it back "
                               "and use --resume",
                               s->path, (long long)s->file_bytes, (long long)now.st_size);
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(fd, (char *)to + done, bytes - done, (off_t)(offset + (int64_t)done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return dataloader_fail(error, "cannot read %s at byte %lld: %s", s->path,
                                   (long long)offset + (long long)done,
                                   n < 0 ? strerror(errno) : "the file has become shorter");
        done += (size_t)n;
    }
    return true;
}

// tokens[0..count) = tokens first .. of the shard, checked against V; raw has room for `count` of them.
static inline bool shard_read_tokens(const Shard *s, int fd, size_t first, size_t count, int V, void *raw, int *tokens,
                                     char *error) {
    int64_t offset = SHARD_HEADER_BYTES + (int64_t)first * s->token_bytes;
    if (!shard_pread(s, fd, raw, count * (size_t)s->token_bytes, offset, error)) return false;
    for (size_t i = 0; i < count; i++) {
        uint32_t token = s->token_bytes == 2 ? ((const uint16_t *)raw)[i] : ((const uint32_t *)raw)[i];
        if (token >= (uint32_t)V)
            return dataloader_fail(error,
                                   "token %zu of %s is %u, outside the vocabulary of %d: use --vocab with the "
                                   "size of the tokenizer that made the shards",
                                   first + i, s->path, token, V);
        tokens[i] = (int)token;
    }
    return true;
}

// Takes the file's size and header into `s`, or ends the program.
static inline void shard_examine(Shard *s, int T) {
    const char *advice = "text_to_shards makes token shards from text";
    struct stat file;
    int fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe with no writer must not block
    CHECK(fd >= 0, "cannot open token shard %s: %s", s->path, strerror(errno));
    CHECK(fstat(fd, &file) == 0, "cannot examine %s: %s", s->path, strerror(errno));
    CHECK(S_ISREG(file.st_mode), "%s is no token shard, it is not even a regular file; %s", s->path, advice);
    s->file_bytes = (int64_t)file.st_size;
    CHECK(s->file_bytes >= SHARD_HEADER_BYTES, "%s is no token shard: it has %lld bytes and a header has %d; %s",
          s->path, (long long)s->file_bytes, SHARD_HEADER_BYTES, advice);
    int32_t header[SHARD_HEADER_BYTES / 4];
    char error[DATALOADER_ERROR_BYTES];
    CHECK(shard_pread(s, fd, header, sizeof(header), 0, error), "%s", error);
    close(fd);
    bool narrow = header[0] == SHARD_MAGIC_U16;
    CHECK(narrow || header[0] == SHARD_MAGIC_U32, "%s is no token shard: it begins with %d and not with %d or %d; %s",
          s->path, (int)header[0], SHARD_MAGIC_U16, SHARD_MAGIC_U32, advice);
    int version = narrow ? SHARD_VERSION_U16 : SHARD_VERSION_U32;
    CHECK(header[1] == version, "token shard %s has version %d; with magic %d version %d can be read: convert it again",
          s->path, (int)header[1], (int)header[0], version);
    s->token_bytes = narrow ? 2 : 4;
    s->token_count = (uint32_t)header[2];
    int64_t want = SHARD_HEADER_BYTES + (int64_t)s->token_count * s->token_bytes;
    CHECK(s->file_bytes == want,
          "token shard %s has %lld bytes, but %lld for the %zu tokens that its header states: it "
          "is not whole, copy or convert it again",
          s->path, (long long)s->file_bytes, (long long)want, s->token_count);
    CHECK(s->token_count > (size_t)T,
          "token shard %s has %zu tokens and a window has %d: use a shorter --seq-len, or "
          "leave the shard out",
          s->path, s->token_count, T + 1);
}

static inline int shard_compare_paths(const void *a, const void *b) {
    return strcmp(((const Shard *)a)->path, ((const Shard *)b)->path); // not glob's order, which follows the locale
}

// Finds and checks the shards. Ends the program with one line when there are none or one of them is not right.
static inline void dataloader_open(DataLoader *l, const char *pattern, int B, int T, int V, int rank, int ranks,
                                   uint64_t seed, bool shuffle) {
    assert(B > 0 && T > 0 && V > 0 && rank >= 0 && rank < ranks);
    memset(l, 0, sizeof(*l));
    l->B = B, l->T = T, l->V = V, l->rank = rank, l->ranks = ranks, l->seed = seed, l->shuffle = shuffle;
    glob_t found;
    memset(&found, 0, sizeof(found));
    struct stat file;
    bool literal = stat(pattern, &file) == 0; // a name that exists may contain brackets
    int rc = literal ? 0 : glob(pattern, GLOB_BRACE | GLOB_TILDE | GLOB_NOSORT, NULL, &found);
    l->shard_count = literal ? 1 : found.gl_pathc;
    CHECK(rc != GLOB_NOSPACE, "out of memory while looking for token shards %s", pattern);
    CHECK(rc == 0 && l->shard_count > 0,
          "no file matches '%s': check the path; text_to_shards makes token shards from text", pattern);
    l->shards = (Shard *)checked_calloc(l->shard_count, sizeof(Shard));
    for (size_t i = 0; i < l->shard_count; i++) {
        l->shards[i].path = strdup(literal ? pattern : found.gl_pathv[i]);
        CHECK(l->shards[i].path != NULL, "out of memory: %zu shards", l->shard_count);
    }
    globfree(&found);
    qsort(l->shards, l->shard_count, sizeof(Shard), shard_compare_paths);
    for (size_t i = 0; i < l->shard_count; i++) {
        shard_examine(&l->shards[i], T);
        l->shards[i].first_window = l->window_count;
        l->window_count += (l->shards[i].token_count - 1) / (size_t)T;
        l->token_count += l->shards[i].token_count;
    }
    for (int i = 0; i < DATALOADER_OPEN_FILES; i++) l->open_files[i].fd = -1;
    l->slots = (int *)checked_calloc((size_t)DATALOADER_SLOTS * (size_t)B * ((size_t)T + 1), sizeof(int));
    l->raw = checked_calloc((size_t)T + 1, sizeof(uint32_t));
    CHECK(pthread_mutex_init(&l->lock, NULL) == 0 && pthread_cond_init(&l->changed, NULL) == 0,
          "out of memory for the data loader's lock");
}

// tokens[0..T] = the window at global index `index`. Called by the thread alone.
static inline bool dataloader_read_window(DataLoader *l, uint64_t index, int *tokens) {
    uint64_t window = dataloader_window_at(l, index);
    size_t low = 0, high = l->shard_count; // the last shard whose first window is not after this one
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (l->shards[middle].first_window <= window) low = middle;
        else high = middle;
    }
    const Shard *s = &l->shards[low];
    size_t place = low % DATALOADER_OPEN_FILES;
    if (l->open_files[place].fd >= 0 && l->open_files[place].shard != low) {
        close(l->open_files[place].fd);
        l->open_files[place].fd = -1;
    }
    if (l->open_files[place].fd < 0) {
        l->open_files[place].fd = shard_open(s, l->error);
        l->open_files[place].shard = low;
    }
    if (l->open_files[place].fd < 0) return false;
    size_t first = (size_t)(window - s->first_window) * (size_t)l->T;
    return shard_read_tokens(s, l->open_files[place].fd, first, (size_t)l->T + 1, l->V, l->raw, tokens, l->error);
}

static inline void *dataloader_thread(void *argument) {
    DataLoader *l = (DataLoader *)argument;
    size_t row = (size_t)l->T + 1, B = (size_t)l->B;
    pthread_mutex_lock(&l->lock);
    while (!l->failed) {
        while (!l->stop && l->produced - l->consumed == DATALOADER_SLOTS) pthread_cond_wait(&l->changed, &l->lock);
        if (l->stop) break;
        uint64_t index = l->first + (l->produced * (uint64_t)l->ranks + (uint64_t)l->rank) * B;
        int *slot = l->slots + (l->produced % DATALOADER_SLOTS) * B * row;
        pthread_mutex_unlock(&l->lock);
        bool good = true;
        for (size_t b = 0; good && b < B; b++) good = dataloader_read_window(l, index + b, slot + b * row);
        pthread_mutex_lock(&l->lock);
        if (good) l->produced++;
        else l->failed = true;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static inline void dataloader_stop(DataLoader *l) {
    if (!l->running) return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    l->running = false;
}

// Begins reading ahead at a global window index, the same on all ranks. May be called again to go elsewhere.
static inline void dataloader_start(DataLoader *l, uint64_t first_window) {
    dataloader_stop(l);
    l->first = first_window;
    l->produced = l->consumed = 0;
    l->stop = l->failed = false;
    sigset_t all, before; // signals are for the main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&l->thread, NULL, dataloader_thread, l);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    CHECK(rc == 0, "cannot start the thread that reads the data: %s", strerror(rc));
    l->running = true;
}

// inputs, targets (B,T) = this rank's next micro-batch; the position advances by ranks*B. Ends the program with one
// line when it could not be read.
static inline void dataloader_next(DataLoader *l, int *inputs, int *targets) {
    assert(l->running);
    pthread_mutex_lock(&l->lock);
    double begin = l->produced == l->consumed ? now_seconds() : 0;
    while (l->produced == l->consumed && !l->failed) pthread_cond_wait(&l->changed, &l->lock);
    if (begin > 0) l->wait_seconds += now_seconds() - begin;
    bool ready = l->produced != l->consumed;
    pthread_mutex_unlock(&l->lock);
    if (!ready) dataloader_stop(l); // the thread has ended
    CHECK(ready, "%s", l->error);
    size_t T = (size_t)l->T, B = (size_t)l->B;
    const int *slot = l->slots + (l->consumed % DATALOADER_SLOTS) * B * (T + 1);
    for (size_t b = 0; b < B; b++) {
        memcpy(inputs + b * T, slot + b * (T + 1), T * sizeof(int));
        memcpy(targets + b * T, slot + b * (T + 1) + 1, T * sizeof(int));
    }
    pthread_mutex_lock(&l->lock);
    l->consumed++;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

// The global index of the next window: what a checkpoint stores and dataloader_start takes.
static inline uint64_t dataloader_position(const DataLoader *l) {
    return l->first + l->consumed * (uint64_t)l->ranks * (uint64_t)l->B;
}

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
// (all of a shard up to 64 KiB): tells other data from the same data elsewhere, at a cost that does not grow with it.
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
    uint64_t fingerprint = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return fingerprint;
}

static inline void dataloader_close(DataLoader *l) {
    dataloader_stop(l);
    for (int i = 0; i < DATALOADER_OPEN_FILES; i++)
        if (l->open_files[i].fd >= 0) close(l->open_files[i].fd);
    for (size_t i = 0; i < l->shard_count; i++) free(l->shards[i].path);
    free(l->shards);
    free(l->slots);
    free(l->raw);
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->changed);
    memset(l, 0, sizeof(*l));
}
#endif
