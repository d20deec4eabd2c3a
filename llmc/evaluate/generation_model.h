/*
generation_model.h: the interface of a model for generation.h: plain data, and callbacks that run its layers.

  generator_of(m, temperature, top_k, stop)   a Generator of the model
  generation_prefill, generation_decode       its callbacks
  uncached_generator(u, temperature, top_k)   a Generator of a model that is planned for training
  generation_logits(m, rows, B, logits)       logits [B][V] of B rows of the final norm's output
*/
#pragma once
#include "../model/state.h"
#include "evaluation_model.h"
#include "generation.h"

typedef struct {
    const ModelPlan *plan;
    const Activations *acts;
    const Linear *head;
    void *model;
    void (*embed)(void *model, int N); // the N tokens in acts->inputs
    // Runs layers from .. to-1, and after the last one the final norm. visit: as in EvaluationModel.forward
    void (*layers)(void *model, int from, int to, Rows rows, LayerVisit visit, void *visitor);
} GenerationModel;

static inline void generation_logits(const GenerationModel *m, const floatX *rows, int B, float *logits) {
    int V = m->plan->config.V, Vp = m->plan->Vp;
    linear_forward(m->acts->logits, activation(rows, NULL), m->head, B);
    for (int b = 0; b < B && sizeof(floatX) == sizeof(float); b++)
        buffer_download(logits + (size_t)b * V, m->acts->logits + (size_t)b * Vp, (size_t)V * sizeof(float));
    if (sizeof(floatX) == sizeof(float)) return;
    floatX *host = (floatX *)checked_calloc((size_t)B * Vp, sizeof(floatX));
    buffer_download(host, m->acts->logits, (size_t)B * Vp * sizeof(floatX));
    for (int b = 0; b < B; b++)
        for (int v = 0; v < V; v++) logits[(size_t)b * V + v] = (float)host[(size_t)b * Vp + v];
    free(host);
}

// Copies row `from` of x, with rows of C elements, to row 0.
static inline void row_to_front(floatX *x, int from, int C) {
    if (from) cache_load(x, x, from, 1, from + 1, C);
}

// Processes the prompt of a sequence, piece by piece. With YOCO the upper half runs for the last token alone.
static inline void generation_prefill(const void *model, int sequence, const int *tokens, int count, float *logits) {
    const GenerationModel *m = (const GenerationModel *)model;
    const ModelConfig *c = &m->plan->config;
    const Activations *acts = m->acts;
    int lower = c->yoco ? yoco_layer(c) : c->L, last = 0;
    assert(count > 0 && count <= m->plan->T && sequence < m->plan->B);
    for (int first = 0; first < count; first += PREFILL_ROWS) {
        Rows r = {1, min_int(PREFILL_ROWS, count - first), first, sequence};
        buffer_upload(acts->inputs, tokens + first, (size_t)r.T * sizeof(int));
        buffer_upload(acts->start_position, &first, sizeof(int));
        m->embed(m->model, r.T);
        m->layers(m->model, 0, lower, r, NULL, NULL);
        last = r.T - 1;
    }
    if (c->yoco) {
        Rows r = {1, 1, count - 1, sequence};
        row_to_front(acts->layers[lower - 1].x_out, last, c->C);
        row_to_front(acts->layers[lower].norm1.data, last, c->C);
        row_to_front(acts->kv, last, m->plan->cross_dims.kv_ld);
        buffer_upload(acts->start_position, &r.start_position, sizeof(int));
        m->layers(m->model, lower, c->L, r, NULL, NULL);
        last = 0;
    }
    generation_logits(m, acts->norm_final + (size_t)last * c->C, 1, logits);
}

static inline void generation_decode(const void *model, const int *tokens, const int *first, int B, float *logits) {
    const GenerationModel *m = (const GenerationModel *)model;
    Rows r = {B, 1, 0, 0};
    assert(B <= m->plan->B);
    buffer_upload(m->acts->inputs, tokens, (size_t)B * sizeof(int));
    buffer_upload(m->acts->start_position, first, (size_t)B * sizeof(int));
    m->embed(m->model, B);
    m->layers(m->model, 0, m->plan->config.L, r, NULL, NULL);
    generation_logits(m, m->acts->norm_final, B, logits);
}

// A model without a cache computes all rows of a context for each token. The rows after the last token are padding.
typedef struct {
    const GenerationModel *m;
    const EvaluationModel *forward;
    int *tokens, rows; // [rows]
} UncachedModel;

static inline void uncached_logits(const UncachedModel *u, int count, float *logits) {
    u->forward->forward(u->forward->model, u->tokens, 1, u->rows, NULL, NULL);
    generation_logits(u->m, u->m->acts->norm_final + (size_t)(count - 1) * u->m->plan->config.C, 1, logits);
}

static inline void uncached_prefill(const void *model, int sequence, const int *tokens, int count, float *logits) {
    const UncachedModel *u = (const UncachedModel *)model;
    assert(sequence == 0 && count <= u->rows);
    memcpy(u->tokens, tokens, (size_t)count * sizeof(int));
    uncached_logits(u, count, logits);
}

static inline void uncached_decode(const void *model, const int *tokens, const int *first, int B, float *logits) {
    const UncachedModel *u = (const UncachedModel *)model;
    assert(B == 1 && *first < u->rows);
    u->tokens[*first] = *tokens;
    uncached_logits(u, *first + 1, logits);
}

static inline Generator uncached_generator(const UncachedModel *u, double temperature, int top_k) {
    return (Generator){u,   uncached_prefill, uncached_decode, 1, u->rows, u->m->plan->config.V, temperature, top_k, -1,
                       NULL};
}

static inline Generator generator_of(const GenerationModel *m, double temperature, int top_k, int stop) {
    Generator g;
    g.model = m, g.prefill = generation_prefill, g.decode = generation_decode;
    g.B = m->plan->B, g.T = m->plan->T, g.V = m->plan->config.V;
    g.temperature = temperature, g.top_k = top_k, g.stop = stop;
    g.abandons = NULL;
    return g;
}
