/*
generation.h: text from a model: the tokens that continue prompts, one after another.

  prefill(model, b, tokens, count, logits)     computes the tokens of sequence b at positions 0 .. count-1, and the
                                               logits [V] after the last one
  decode(model, tokens, first, B, logits)      computes one more token of each of the sequences 0 .. B-1, tokens[b] at
                                               position first[b], and the logits [B][V]
  The model keeps earlier positions of a sequence in its key/value cache.

  batches   g->B sequences are generated at a time. When one has stopped, the next of the queue takes its place. The
            tokens of a sequence depend on its own prompt and random stream alone, apart from the rounding of products
            of different sizes.
  context   a prompt longer than T tokens begins with its last T. When the context is full, its second half is processed
            again from position 0.
*/
#pragma once
#include "../base/random.h"
#include "../text/sampler.h"

typedef struct {
    const void *model;
    void (*prefill)(const void *model, int b, const int *tokens, int count, float *logits);
    void (*decode)(const void *model, const int *tokens, const int *first, int B, float *logits);
    int B, T, V; // sequences at a time, longest context, vocabulary
    double temperature;
    int top_k;
    int stop;               // token that ends a sequence; -1: none
    bool (*abandons)(void); // whether to abort the sequences, as NOT_STOPPED; called before each token; NULL: never
} Generator;

typedef enum { NOT_STOPPED, STOPPED_AT_LENGTH, STOPPED_AT_SEPARATOR, STOPPED_NOT_FINITE } StopReason;

typedef struct {
    int *tokens; // [length + count]: the prompt, then the generated ones
    int length, count;
    uint64_t key;      // key of the random stream
    int end;           // tokens so far
    int begin, cached; // tokens[begin .. end-1] is the context; `cached` of it are in the model's cache
    StopReason stopped;
} Sequence;

typedef struct {
    double prefill_seconds, decode_seconds;
    int64_t prefill_tokens, decode_tokens;
} GenerationTimes;

// Where sequences come from, and who follows them.
typedef struct {
    void *to;
    Sequence *(*next)(void *to, bool wait);  // the next sequence; NULL: none or, without wait, none yet
    void (*advanced)(void *to, Sequence *s); // called after each token of s, and when s stops; NULL: not called
} SequenceQueue;

// T: longest context
static inline Sequence sequence_of(int T, int *tokens, int length, int count, uint64_t key) {
    Sequence s = {tokens, length, count, key, length, max_int(0, length - T), 0, NOT_STOPPED};
    return s;
}

// Draws the token that follows the context. A separator that stops the sequence is not part of the sequence.
static inline void sequence_draw(const Generator *g, Sequence *s, const float *logits, Sampler *sampler) {
    int token = sample_token(logits, g->V, g->temperature, g->top_k,
                             random_uniform(s->key, (uint64_t)(s->end - s->length)), sampler);
    s->cached = s->end - s->begin;
    if (token < 0) s->stopped = STOPPED_NOT_FINITE;
    else if (token == g->stop) s->stopped = STOPPED_AT_SEPARATOR;
    else s->tokens[s->end++] = token;
    if (!s->stopped && s->end == s->length + s->count) s->stopped = STOPPED_AT_LENGTH;
    if (s->end - s->begin <= g->T) return;
    s->begin = s->end - max_int(1, g->T / 2);
    s->cached = 0;
}

// The sequences that are being generated, and their scratch memory.
typedef struct {
    Sequence **running;  // [B]; NULL: none
    int *tokens, *first; // [B]
    float *logits;       // [B][V]
    Sampler *samplers;   // one for each thread that draws
    int B, threads;
} GenerationBatch;

static inline GenerationBatch batch_open(const Generator *g) {
    GenerationBatch w;
    w.B = g->B;
    w.threads = min_int(w.B, omp_get_max_threads());
    w.running = (Sequence **)checked_calloc(w.B, sizeof(Sequence *));
    w.tokens = (int *)checked_calloc(w.B, sizeof(int));
    w.first = (int *)checked_calloc(w.B, sizeof(int));
    w.logits = (float *)checked_calloc((size_t)w.B * g->V, sizeof(float));
    w.samplers = (Sampler *)checked_calloc(w.threads, sizeof(Sampler));
    for (int i = 0; i < w.threads; i++) w.samplers[i] = sampler_open(g->V);
    return w;
}

static inline void batch_close(GenerationBatch *w) {
    for (int i = 0; i < w->threads; i++) sampler_close(&w->samplers[i]);
    free(w->samplers);
    free(w->logits);
    free(w->first);
    free(w->tokens);
    free(w->running);
}

// A token of the sequence in place b has been drawn. Its place is free when it has stopped.
static inline void batch_advanced(const SequenceQueue *queue, GenerationBatch *w, int b) {
    Sequence *s = w->running[b];
    if (s->stopped) w->running[b] = NULL;
    if (queue->advanced) queue->advanced(queue->to, s);
}

// Gives each free place the next sequence of the queue, and processes contexts that are not in the cache. Returns the
// number of places up to the last one in use.
static inline int batch_prefill(const Generator *g, GenerationBatch *w, const SequenceQueue *queue,
                                GenerationTimes *times) {
    int used = 0, running = 0;
    for (int b = 0; b < w->B; b++) running += w->running[b] != NULL;
    for (int b = 0; b < w->B; b++) {
        for (;;) {
            if (!w->running[b]) {
                w->running[b] = queue->next(queue->to, running == 0);
                running += w->running[b] != NULL;
            }
            Sequence *s = w->running[b];
            if (!s || s->cached) break;
            double start = now_seconds();
            g->prefill(g->model, b, s->tokens + s->begin, s->end - s->begin, w->logits);
            times->prefill_tokens += s->end - s->begin;
            sequence_draw(g, s, w->logits, w->samplers);
            times->prefill_seconds += now_seconds() - start;
            batch_advanced(queue, w, b);
            running -= w->running[b] == NULL;
        }
        if (w->running[b]) used = b + 1;
    }
    return used;
}

static inline void batch_draw(const Generator *g, GenerationBatch *w, int b) {
    if (w->running[b])
        sequence_draw(g, w->running[b], w->logits + (size_t)b * g->V, &w->samplers[omp_get_thread_num()]);
}

// Computes one token for each of the places 0 .. used-1. A place without a sequence computes a token that nothing
// reads.
static inline void batch_decode(const Generator *g, GenerationBatch *w, int used, GenerationTimes *times) {
    double start = now_seconds();
    for (int b = 0; b < used; b++) {
        const Sequence *s = w->running[b];
        w->tokens[b] = s ? s->tokens[s->end - 1] : 0;
        w->first[b] = s ? s->cached : 0;
        times->decode_tokens += s != NULL;
    }
    g->decode(g->model, w->tokens, w->first, used, w->logits);
    if (used == 1) batch_draw(g, w, 0); // all threads draw one token
    else {
#pragma omp parallel for schedule(static, 1)
        for (int b = 0; b < used; b++) batch_draw(g, w, b);
    }
    times->decode_seconds += now_seconds() - start;
}

// Generates the sequences of a queue until each has stopped.
static inline GenerationTimes generate_sequences(const Generator *g, const SequenceQueue *queue) {
    GenerationTimes times = {0, 0, 0, 0};
    GenerationBatch w = batch_open(g);
    for (int used; (used = batch_prefill(g, &w, queue, &times)) > 0 && !(g->abandons && g->abandons());) {
        batch_decode(g, &w, used, &times);
        for (int b = 0; b < used; b++)
            if (w.running[b]) batch_advanced(queue, &w, b);
    }
    batch_close(&w);
    return times;
}

// A queue of one sequence.
static inline Sequence *only_sequence(void *to, bool wait) {
    Sequence **at = (Sequence **)to, *s = *at;
    (void)wait;
    *at = NULL;
    return s;
}

// Appends up to `count` tokens to tokens[0 .. length-1], drawn with the random stream `key`, and returns how many.
static inline int generate_tokens(const Generator *g, int *tokens, int length, int count, uint64_t key,
                                  StopReason *stopped) {
    Sequence s = sequence_of(g->T, tokens, length, count, key), *next = &s;
    SequenceQueue queue = {&next, only_sequence, NULL};
    generate_sequences(g, &queue);
    *stopped = s.stopped;
    return s.end - length;
}
