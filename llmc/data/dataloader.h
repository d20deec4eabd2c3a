/*
dataloader.h: batches of token windows out of token shards, read ahead of the step that uses them.

  corpus    the shards (shards.h) that one path of the data text (corpus.h) names, in the byte order of their
            names, whole (a GLOB, with ~ and {a,b}) or the train_*.bin or val_*.bin of a corpus directory
  window    T+1 tokens of one shard: T inputs and, shifted by one, T targets. Windows start every T tokens,
            so a shard of n tokens has floor((n-1)/T) of them. They are numbered through all shards of a corpus,
            0 .. W-1; a shard without a window is refused.
  order     A run reads windows by a global index g = 0, 1, 2, ... that never restarts. Of one corpus:
                shuffled (training):   window = permutation(seed, epoch = g / W)[g % W]
                not (validation):      window = g % W, that is, the first windows of the shards in order
            Micro-batch m of rank r takes g = base + m*(ranks*B) + r*B + b, b in [0,B). So the windows of an
            update are the indices [base, base + windows per update), whatever the micro-batch and the rank
            count; the index of the next window is all that a resume needs; and a batch may lie across an
            epoch's end.
  mixture   Of several corpora with weights w that add up to 1, the first k blocks of M = MIXTURE_BLOCK indices have
                floor(k M (w_0 + ... + w_i)) - floor(k M (w_0 + ... + w_i-1))
            windows of corpus i: at every block's end less than one window from its weight, and less than two within
            a block. They lie at places that a permutation keyed by (seed, block) gives, and are the next ones of the
            order that the corpus has alone, with a seed from its name. Weights are multiples of 2^-32, so all is exact.
  reading   One thread fills DATALOADER_SLOTS batches ahead. Descriptors are bounded, so thousands
            of shards work. What goes wrong in the thread is kept and reported by the dataloader_next that
            would have returned that batch, in the caller's thread; so nothing waits for ever.
  traffic   2 or 4 (T+1) bytes of file per window, 8T bytes copied to the caller
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H
#include "corpus.h"
#include "../base/permute.h"
#include "shards.h"

enum { DATALOADER_SLOTS = 2, DATALOADER_OPEN_FILES = 64, MIXTURE_BLOCK = 4096 };
#define MIXTURE_ONE (1ull << 32)

typedef struct {
    char name[CORPUS_NAME]; // empty for the only one
    const char *path;       // owned by the loader's list
    double weight;
    uint64_t weight_end;        // its weight and those of the corpora before it, in units of 2^-32
    uint64_t seed, fingerprint; // the latter by dataloader_fingerprint
    uint64_t window_count;      // W: one epoch
    size_t first_shard, shard_count, token_count;
    bool described; // by a corpus.json
    int vocab_size; // of corpus.json; 0: not known
    Separator separator;
} Corpus;

// Fields above the line are for everyone to read; wait_seconds may be reset. Do not move it between open and close.
typedef struct {
    int B, T, V, rank, ranks;
    uint64_t seed;
    bool shuffle;
    bool documents; // dataloader_next gives the places where documents begin; set before dataloader_start
    int corpus_count;
    Corpus *corpora;
    size_t shard_count, token_count;
    uint64_t window_count; // of all shards
    double wait_seconds;   // that dataloader_next has waited for a batch since dataloader_open
    // ---- private
    CorpusSpecs specs;
    Shard *shards;
    struct {
        int fd; // -1: free
        size_t shard;
    } open_files[DATALOADER_OPEN_FILES]; // used by the thread alone: shard s is kept in place s % OPEN_FILES
    int *slots;                          // (SLOTS, B, 2T+1): T+1 tokens, T places of documents
    void *raw;                           // (T+1) tokens as they are in the file
    uint64_t first, produced, consumed;  // batches since dataloader_start, which was at global index `first`
    bool running, stop, failed;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char error[SHARD_ERROR_BYTES];
} DataLoader;

typedef struct {
    const Corpus *corpus;
    uint64_t window; // within the corpus
} CorpusWindow;

// The windows of the corpora up to one in the blocks before `block`: weight_end / 2^32 * block * MIXTURE_BLOCK, rounded down
// (in two parts, since the product would overflow).
static inline uint64_t mixture_windows(uint64_t weight_end, uint64_t block) {
    uint64_t unit = MIXTURE_ONE / MIXTURE_BLOCK;
    return block / unit * weight_end + block % unit * weight_end / unit;
}

// What is at global index `index` of the run.
static inline CorpusWindow dataloader_locate(const DataLoader *l, uint64_t index) {
    CorpusWindow p = {l->corpora, 0};
    if (l->corpus_count > 1) {
        // places in the block and windows of the corpora before
        uint64_t block = index / MIXTURE_BLOCK, low = 0, before = 0;
        uint64_t place = permutation_at(index % MIXTURE_BLOCK, MIXTURE_BLOCK, l->shuffle ? l->seed : 0, block);
        for (;; p.corpus++) { // the last one's ends at MIXTURE_BLOCK
            uint64_t done = mixture_windows(p.corpus->weight_end, block),
                     high = mixture_windows(p.corpus->weight_end, block + 1) - done;
            index = done - before + (place - low);
            if (place < high) break;
            low = high, before = done;
        }
    }
    uint64_t W = p.corpus->window_count;
    p.window = l->shuffle ? permutation_at(index % W, W, p.corpus->seed, index / W) : index % W;
    return p;
}

// Rounds the weights to units of 2^-32. One window of a block is the least: with less, a corpus's places in a block
// could begin behind their end.
static inline void dataloader_set_weights(DataLoader *l) {
    double sum = 0;
    uint64_t before = 0;
    for (int i = 0; i < l->corpus_count; i++) {
        Corpus *s = &l->corpora[i];
        sum += s->weight;
        s->weight_end = i + 1 < l->corpus_count ? (uint64_t)(sum * (double)MIXTURE_ONE + 0.5) : MIXTURE_ONE;
        CHECK(s->weight_end >= before + MIXTURE_ONE / MIXTURE_BLOCK,
              "the weight of '%s' is less than 1/%d of all: leave it out", s->name, MIXTURE_BLOCK);
        s->weight = (double)(s->weight_end - before) / (double)MIXTURE_ONE;
        before = s->weight_end;
    }
}

static inline void dataloader_open_corpus(DataLoader *l, Corpus *corpus, const CorpusSpec *item) {
    CorpusInfo about;
    bool described = corpus_read_info(item->path, &about);
    CHECK(about.vocab_size <= l->V,
          "the tokens of %s go up to %d and the model has a vocabulary of %d: use --vocab %d or more, or with --init "
          "data of the model's tokenizer",
          item->path, about.vocab_size - 1, l->V, about.vocab_size);
    memcpy(corpus->name, item->name, sizeof(corpus->name));
    corpus->path = item->path;
    corpus->weight = item->weight;
    corpus->seed = l->corpus_count > 1 ? random_key(item->name, l->seed) : l->seed;
    corpus->vocab_size = about.vocab_size;
    corpus->separator = about.separator;
    ShardList found = shards_find(item->path, l->shuffle ? "train" : "val");
    corpus->described = described;
    corpus->first_shard = l->shard_count;
    corpus->shard_count = found.count;
    Shard *all = (Shard *)realloc(l->shards, (l->shard_count + found.count) * sizeof(Shard));
    CHECK(all != NULL, "out of memory: %zu shards", l->shard_count + found.count);
    l->shards = all;
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

// Finds and checks the shards. Ends the program with one line when there are none or one of them is not right.
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
    l->slots = (int *)checked_calloc(DATALOADER_SLOTS * B, (2 * T + 1) * sizeof(int));
    l->raw = checked_calloc(T + 1, sizeof(uint32_t));
    CHECK(pthread_mutex_init(&l->lock, NULL) == 0 && pthread_cond_init(&l->changed, NULL) == 0,
          "out of memory for the data loader's lock");
}

// tokens[0..T] = the window at global index `index`, tokens[T+1..2T] = where their documents begin, if that is asked
// for. Called by the thread alone.
static inline bool dataloader_read_window(DataLoader *l, uint64_t index, int *tokens) {
    CorpusWindow at = dataloader_locate(l, index);
    size_t low = at.corpus->first_shard, high = low + at.corpus->shard_count; // the last shard that begins no later
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (l->shards[middle].first_window <= at.window) low = middle;
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
    size_t first = (at.window - s->first_window) * l->T;
    if (!shard_read_tokens(s, l->open_files[place].fd, first, l->T + 1, l->V, l->raw, tokens, l->error)) return false;
    if (l->documents) document_starts(tokens + l->T + 1, tokens, l->T, at.corpus->separator);
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
    thread_start(&l->thread, dataloader_thread, l, "that reads the data");
    l->running = true;
}

// inputs, targets (B,T) = this rank's next micro-batch, and, unless starts is NULL, starts (B,T) = where the document
// of each input begins; the position advances by ranks*B. Ends the program with one line when it could not be read.
static inline void dataloader_next(DataLoader *l, int *inputs, int *targets, int *starts) {
    assert(l->running && (starts == NULL || l->documents));
    pthread_mutex_lock(&l->lock);
    double begin = l->produced == l->consumed ? now_seconds() : 0;
    while (l->produced == l->consumed && !l->failed) pthread_cond_wait(&l->changed, &l->lock);
    if (begin > 0) l->wait_seconds += now_seconds() - begin;
    bool ready = l->produced != l->consumed;
    pthread_mutex_unlock(&l->lock);
    if (!ready) dataloader_stop(l); // the thread has ended
    CHECK(ready, "%s", l->error);
    size_t T = l->T, B = l->B;
    const int *row = l->slots + (l->consumed % DATALOADER_SLOTS) * B * (2 * T + 1);
    for (size_t b = 0; b < B; b++, row += 2 * T + 1) {
        memcpy(inputs + b * T, row, T * sizeof(int));
        memcpy(targets + b * T, row + 1, T * sizeof(int));
        if (starts) memcpy(starts + b * T, row + T + 1, T * sizeof(int));
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

static inline void dataloader_close(DataLoader *l) {
    dataloader_stop(l);
    for (int i = 0; i < DATALOADER_OPEN_FILES; i++)
        if (l->open_files[i].fd >= 0) close(l->open_files[i].fd);
    for (size_t i = 0; i < l->shard_count; i++) free(l->shards[i].path);
    free(l->shards);
    free(l->corpora);
    free(l->specs.items);
    free(l->slots);
    free(l->raw);
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->changed);
    memset(l, 0, sizeof(*l));
}
#endif
