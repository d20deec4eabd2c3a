/*
dataloader.h: batches of token windows from token shards, read ahead of the step that uses them.

  corpus    the shards (shards.h) of one path of the data text (corpus.h), sorted by name: the files that a GLOB matches
            (with ~ and {a,b}), or train_*.bin or val_*.bin of a corpus directory
  window    T+1 consecutive tokens of one shard: T inputs and, shifted by one, T targets. Windows start every T tokens,
            so a shard of n tokens has floor((n-1)/T) windows. They are numbered across the shards of a corpus, from 0
            to W-1. A shard without a window is rejected.
  order     A run reads windows by a global index g = 0, 1, 2, ... that never restarts. For a single corpus:
                shuffled (training):       window = permutation(seed, epoch = g / W)[g % W]
                in order (validation):     window = g % W, that is, the first windows of the shards
            Micro-batch m of rank r takes g = base + m*(ranks*B) + r*B + b, b in [0,B). The windows of an update are
            therefore [base, base + windows per update), whatever the micro-batch size and the number of ranks. The
            index of the next window is the only state that a resume needs. A batch may cross the end of an epoch.
            A resume with other data begins at g = 0, and each corpus at its own position (positions.h).
  mixture   With several corpora of weights w that sum to 1, the first k blocks of M = MIXTURE_BLOCK places have
                floor(k M (w_0 + ... + w_i)) - floor(k M (w_0 + ... + w_i-1))
            places of corpus i. The deviation from its weight is less than one place at the end of a block, and the
            number of its places in a block differs by less than two from its share. A permutation keyed by (seed,
            block) orders the places of a block. In this order, each takes the next window of its corpus, in the order
            of a single corpus with a seed derived from the name. Weights are multiples of 2^-32, so all of this is
            exact.
                shuffled (training):       index g has place g
                in order (validation):     A corpus whose windows are all read is finished: its places are left out.
                                           The first W indices have each of the W windows of all corpora once, and
                                           index g the window of g % W.
            A loader keeps the places of one block for the thread, and of another block for its caller.
  reading   One thread fills DATALOADER_SLOTS batches ahead. The number of open files is bounded. An error in the thread
            is reported by the call that would have returned the batch, in the caller's thread.
  traffic   2 or 4 (T+1) bytes of file per window, 8T bytes copied to the caller
*/
#pragma once
#include "corpus.h"
#include "../base/permute.h"
#include "shards.h"

enum { DATALOADER_SLOTS = 2, DATALOADER_OPEN_FILES = 64, MIXTURE_BLOCK = 4096 };
#define MIXTURE_ONE (1ull << 32)

typedef struct {
    char name[CORPUS_NAME]; // empty if there is only one corpus
    const char *path;       // owned by DataLoader.specs
    double weight;
    uint64_t weight_end;        // sum of the weights up to this corpus, in units of 2^-32
    uint64_t seed, fingerprint; // fingerprint: set by dataloader_fingerprint
    uint64_t window_count;      // W: one epoch
    uint64_t begin;             // windows of its order that the run read before it opened these data (positions.h)
    size_t first_shard, shard_count, token_count;
    bool described; // has a corpus.json
    int vocab_size; // from corpus.json; 0: unknown
    Separator separator;
} Corpus;

typedef struct {
    const Corpus *corpus;
    uint64_t window; // in the corpus
} CorpusWindow;

// The places of a block of a mixture, at the global indices from `first` on. `window` of a place: the number of windows
// of the corpus at earlier places.
typedef struct {
    uint64_t first;
    size_t count; // 0: no block yet
    CorpusWindow places[MIXTURE_BLOCK];
} MixtureBlock;

// For experiments (--change), windows at the global indices first .. last are read from other indices: `by` later, or
// in reverse order. If both move a window, `by` counts.
typedef struct {
    uint64_t first, last, by;
    bool reverse;
} WindowMove;

// Callers may read the fields above the line, set `moves` before dataloader_start, and reset wait_seconds. The struct
// must not move between open and close.
typedef struct {
    int B, T, V, rank, ranks;
    uint64_t seed;
    bool shuffle;
    bool documents; // dataloader_next returns where documents begin; set before dataloader_start
    int corpus_count;
    Corpus *corpora;
    size_t shard_count, token_count;
    uint64_t window_count; // windows of all shards
    double wait_seconds;   // time that dataloader_next has waited since dataloader_open
    const WindowMove *moves;
    int move_count;
    bool unread;      // dataloader_read has failed since dataloader_start: `error` says why, at the window `reading`
    bool any_unread;  // a rank had `unread` at the last agreement; set by callers
    uint64_t reading; // the global index of the last window that the thread began to read
    // ---- private
    CorpusSpecs specs;
    Shard *shards;
    struct {
        int fd; // -1: free
        size_t shard;
    } open_files[DATALOADER_OPEN_FILES]; // used by the thread only: shard s is in place s % OPEN_FILES
    MixtureBlock *blocks;                // [0] the caller's block, [1] the thread's block
    int *slots;                          // (SLOTS, B, 2T+1): T+1 tokens, T document starts
    void *raw;                           // (T+1) tokens in the format of the file
    uint64_t first, produced, consumed;  // batches since dataloader_start; `first`: its global index
    bool running, stop, failed;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char error[SHARD_ERROR_BYTES];
} DataLoader;

// The number of places that the blocks before `block` have for the corpora up to the one with this weight_end:
// weight_end / 2^32 * block * MIXTURE_BLOCK, rounded down. Computed in two parts to avoid overflow.
static inline uint64_t mixture_places(uint64_t weight_end, uint64_t block) {
    uint64_t unit = MIXTURE_ONE / MIXTURE_BLOCK;
    return block / unit * weight_end + block % unit * weight_end / unit;
}

// given[i] = windows of corpus i at the places of the blocks before `block`. Returns their sum.
static inline uint64_t mixture_given(const DataLoader *l, uint64_t block, uint64_t *given) {
    uint64_t before = 0, sum = 0;
    for (int i = 0; i < l->corpus_count; i++) {
        uint64_t places = mixture_places(l->corpora[i].weight_end, block);
        given[i] = places - before;
        if (!l->shuffle) given[i] = min_size(given[i], l->corpora[i].window_count);
        before = places;
        sum += given[i];
    }
    return sum;
}

// Makes *m the block that has `index`, which is below window_count unless the loader shuffles.
static inline void mixture_find(const DataLoader *l, MixtureBlock *m, uint64_t index) {
    uint64_t given[CORPUS_LIMIT], block = index / MIXTURE_BLOCK, after = block + 1;
    if (index - m->first < m->count) return;
    for (; mixture_given(l, after, given) <= index; after *= 2) block = after; // places were left out
    while (after - block > 1) {
        uint64_t middle = block + (after - block) / 2;
        if (mixture_given(l, middle, given) <= index) block = middle;
        else after = middle;
    }
    m->first = mixture_given(l, block, given), m->count = 0;
    for (uint64_t k = 0; k < MIXTURE_BLOCK; k++) {
        uint64_t place = permutation_at(k, MIXTURE_BLOCK, l->shuffle ? l->seed : 0, block);
        const Corpus *c = l->corpora;
        while (place >= mixture_places(c->weight_end, block + 1) - mixture_places(c->weight_end, block)) c++;
        uint64_t *next = &given[c - l->corpora];
        if (l->shuffle || *next < c->window_count) m->places[m->count++] = (CorpusWindow){c, (*next)++};
    }
}

// read[i] = windows of corpus i among the indices below `count` of a loader that shuffles.
static inline void dataloader_windows_read(const DataLoader *l, uint64_t count, uint64_t *read) {
    mixture_given(l, count / MIXTURE_BLOCK, read);
    mixture_find(l, &l->blocks[0], count);
    for (uint64_t k = 0; k < count % MIXTURE_BLOCK; k++) read[l->blocks[0].places[k].corpus - l->corpora]++;
}

// The window at global index `index` of the run. m: the block of the calling thread.
static inline CorpusWindow dataloader_find(const DataLoader *l, MixtureBlock *m, uint64_t index) {
    CorpusWindow p = {l->corpora, index};
    if (l->corpus_count > 1) {
        if (!l->shuffle) index %= l->window_count;
        mixture_find(l, m, index);
        p = m->places[index - m->first];
    }
    uint64_t W = p.corpus->window_count, at = p.corpus->begin + p.window;
    p.window = l->shuffle ? permutation_at(at % W, W, p.corpus->seed, at / W) : at % W;
    return p;
}

// The window at a global index, for the caller of the loader.
static inline CorpusWindow dataloader_locate(const DataLoader *l, uint64_t index) {
    return dataloader_find(l, &l->blocks[0], index);
}

// Rounds the weights to units of 2^-32. A weight must be at least one window per block: with less, a corpus could have
// a negative number of places in a block.
static inline void dataloader_set_weights(DataLoader *l) {
    double sum = 0;
    uint64_t before = 0;
    for (int i = 0; i < l->corpus_count; i++) {
        Corpus *s = &l->corpora[i];
        sum += s->weight;
        s->weight_end = i + 1 < l->corpus_count ? (uint64_t)(sum * (double)MIXTURE_ONE + 0.5) : MIXTURE_ONE;
        CHECK(s->weight_end >= before + MIXTURE_ONE / MIXTURE_BLOCK,
              "the weight of '%s' is less than 1/%d of the sum: omit it", s->name, MIXTURE_BLOCK);
        s->weight = (double)(s->weight_end - before) / (double)MIXTURE_ONE;
        before = s->weight_end;
    }
}

static inline void dataloader_open_corpus(DataLoader *l, Corpus *corpus, const CorpusSpec *item) {
    CorpusInfo info;
    bool described = corpus_read_info(item->path, &info);
    CHECK(described || !directory_exists(item->path),
          "%s has no corpus.json: it is unfinished, or no corpus: run the program that creates it again, or specify "
          "shards by a pattern, '%s/*.bin'",
          item->path, item->path);
    CHECK(
        info.vocab_size <= l->V,
        "the token ids of %s go up to %d and the model has a vocabulary of %d: use --vocab %d or more; with --init use "
        "data of the model's tokenizer",
        item->path, info.vocab_size - 1, l->V, info.vocab_size);
    memcpy(corpus->name, item->name, sizeof(corpus->name));
    corpus->path = item->path;
    corpus->weight = item->weight;
    corpus->seed = l->corpus_count > 1 ? random_key(item->name, l->seed) : l->seed;
    corpus->vocab_size = info.vocab_size;
    corpus->separator = info.separator;
    ShardList found = shards_find(item->path, l->shuffle ? "train" : "val");
    corpus->described = described;
    corpus->first_shard = l->shard_count;
    corpus->shard_count = found.count;
    Shard *shards = (Shard *)realloc(l->shards, (l->shard_count + found.count) * sizeof(Shard));
    CHECK(shards != NULL, "out of memory: %zu shards", l->shard_count + found.count);
    l->shards = shards;
    for (size_t i = 0; i < found.count; i++) {
        Shard *s = &l->shards[l->shard_count++];
        *s = found.shards[i];
        shard_examine(s, l->T + 1);
        s->first_window = corpus->window_count;
        corpus->window_count += (s->token_count - 1) / l->T;
        corpus->token_count += s->token_count;
    }
    free(found.shards);
    if (described)
        corpus_check_shards(item->path, l->shuffle ? "train" : "val", l->shards + corpus->first_shard,
                            corpus->shard_count);
    l->window_count += corpus->window_count;
    l->token_count += corpus->token_count;
}

// Finds and checks the shards. Exits with one line if there are none or one of them is invalid.
static inline void dataloader_open(DataLoader *l, const char *text, int B, int T, int V, int rank, int ranks,
                                   uint64_t seed, bool shuffle) {
    assert(B > 0 && T > 0 && V > 0 && rank >= 0 && rank < ranks);
    memset(l, 0, sizeof(*l));
    l->B = B, l->T = T, l->V = V, l->rank = rank, l->ranks = ranks, l->seed = seed, l->shuffle = shuffle;
    l->specs = corpus_parse(text);
    l->corpus_count = l->specs.count;
    l->corpora = (Corpus *)checked_calloc(l->corpus_count, sizeof(Corpus));
    for (int i = 0; i < l->corpus_count; i++) dataloader_open_corpus(l, &l->corpora[i], &l->specs.items[i]);
    dataloader_set_weights(l);
    for (int i = 0; i < DATALOADER_OPEN_FILES; i++) l->open_files[i].fd = -1;
    l->blocks = (MixtureBlock *)checked_calloc(2, sizeof(MixtureBlock));
    l->slots = (int *)checked_calloc(DATALOADER_SLOTS * B, (2 * T + 1) * sizeof(int));
    l->raw = checked_calloc(T + 1, sizeof(uint32_t));
    CHECK(pthread_mutex_init(&l->lock, NULL) == 0 && pthread_cond_init(&l->changed, NULL) == 0,
          "out of memory for the data loader's lock");
}

static inline uint64_t dataloader_moved(const DataLoader *l, uint64_t index) {
    uint64_t moved = index;
    for (int i = 0; i < l->move_count; i++) {
        const WindowMove *m = &l->moves[i];
        if (index < m->first || index > m->last) continue;
        if (!m->reverse) return index + m->by;
        moved = m->first + m->last - index;
    }
    return moved;
}

// The shard of a window.
static inline size_t dataloader_shard(const DataLoader *l, CorpusWindow at) {
    size_t low = at.corpus->first_shard,
           high = low + at.corpus->shard_count; // search the last shard whose first window is not after it
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (l->shards[middle].first_window <= at.window) low = middle;
        else high = middle;
    }
    return low;
}

// tokens[0..T] = the window at global index `index`. With l->documents, tokens[T+1..2T] = the document starts of its
// inputs. Called by the thread only.
static inline bool dataloader_read_window(DataLoader *l, uint64_t index, int *tokens) {
    CorpusWindow at = dataloader_find(l, &l->blocks[1], dataloader_moved(l, index));
    size_t low = dataloader_shard(l, at);
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
    size_t first = (at.window - s->first_window) * l->T;
    if (!shard_read_tokens(s, l->open_files[place].fd, first, l->T + 1, l->V, l->raw, tokens, l->error)) return false;
    if (l->documents) documents_find(tokens + l->T + 1, tokens, l->T, at.corpus->separator);
    return true;
}

static inline void *dataloader_thread(void *argument) {
    DataLoader *l = (DataLoader *)argument;
    size_t row = 2 * l->T + 1, B = l->B;
    pthread_mutex_lock(&l->lock);
    while (!l->failed) {
        while (!l->stop && l->produced - l->consumed == DATALOADER_SLOTS) pthread_cond_wait(&l->changed, &l->lock);
        if (l->stop) break;
        uint64_t index = l->first + (l->produced * (uint64_t)l->ranks + (uint64_t)l->rank) * B;
        int *slot = l->slots + (l->produced % DATALOADER_SLOTS) * B * row;
        pthread_mutex_unlock(&l->lock);
        bool good = true;
        for (size_t b = 0; good && b < B; b++) good = dataloader_read_window(l, l->reading = index + b, slot + b * row);
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

// Starts reading ahead at a global window index, the same on all ranks. May be called again to seek.
static inline void dataloader_start(DataLoader *l, uint64_t first_window) {
    dataloader_stop(l);
    l->first = first_window;
    l->produced = l->consumed = 0;
    l->stop = l->failed = l->unread = l->any_unread = false;
    thread_start(&l->thread, dataloader_thread, l, "that reads the data");
    l->running = true;
}

// inputs, targets (B,T) = this rank's next micro-batch. document_starts (B,T), unless NULL = the position where the
// document of each input begins. The global index advances by ranks*B windows. False, now and from then on, if the
// batch could not be read.
static inline bool dataloader_read(DataLoader *l, int *inputs, int *targets, int *document_starts) {
    assert(l->running && (document_starts == NULL || l->documents));
    pthread_mutex_lock(&l->lock);
    double begin = l->produced == l->consumed ? now_seconds() : 0;
    while (l->produced == l->consumed && !l->failed) pthread_cond_wait(&l->changed, &l->lock);
    if (begin > 0) l->wait_seconds += now_seconds() - begin;
    bool ready = l->produced != l->consumed;
    pthread_mutex_unlock(&l->lock);
    l->unread = !ready;
    if (!ready) return false;
    size_t T = l->T, B = l->B;
    const int *row = l->slots + (l->consumed % DATALOADER_SLOTS) * B * (2 * T + 1);
    for (size_t b = 0; b < B; b++, row += 2 * T + 1) {
        memcpy(inputs + b * T, row, T * sizeof(int));
        memcpy(targets + b * T, row + 1, T * sizeof(int));
        if (document_starts) memcpy(document_starts + b * T, row + T + 1, T * sizeof(int));
    }
    pthread_mutex_lock(&l->lock);
    l->consumed++;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    return true;
}

// After dataloader_read has failed: exits with one line, the error and `more`.
static inline void dataloader_fail(DataLoader *l, const char *more) {
    dataloader_stop(l); // the thread has ended
    CHECK(false, "%s%s", l->error, more);
}

// As dataloader_read, but exits with one line if the batch could not be read.
static inline void dataloader_next(DataLoader *l, int *inputs, int *targets, int *document_starts) {
    if (!dataloader_read(l, inputs, targets, document_starts)) dataloader_fail(l, "");
}

// The global index of the next window, which a checkpoint stores and dataloader_start takes.
static inline uint64_t dataloader_position(const DataLoader *l) {
    return l->first + l->consumed * (uint64_t)l->ranks * (uint64_t)l->B;
}

static inline void dataloader_close(DataLoader *l) {
    dataloader_stop(l);
    for (int i = 0; i < DATALOADER_OPEN_FILES; i++)
        if (l->open_files[i].fd >= 0) close(l->open_files[i].fd);
    for (size_t i = 0; i < l->shard_count; i++) free(l->shards[i].path);
    free(l->shards);
    free(l->corpora);
    free(l->specs.items);
    free(l->blocks);
    free(l->slots);
    free(l->raw);
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->changed);
    memset(l, 0, sizeof(*l));
}
