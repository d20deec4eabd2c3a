/*
generation.h: text from a model: the tokens that continue a prompt, one after another.

  The model is two callbacks, and keeps keys and values of earlier positions:
    prefill(model, sequence, tokens, count, logits)   processes `count` tokens from position 0; logits [V] after them
    decode(model, tokens, first, B, logits)           processes one more token of each sequence, at position first[b];
                                                      logits [B][V]
*/
#ifndef LLMC_GENERATION_H
#define LLMC_GENERATION_H
#include "../base/random.h"
#include "../text/sampler.h"
#include "run_tokenizer.h"

typedef struct {
    void *model;
    void (*prefill)(void *model, int sequence, const int *tokens, int count, float *logits);
    void (*decode)(void *model, const int *tokens, const int *first, int B, float *logits);
    int V, T; // vocabulary, longest context
    double temperature;
    int top_k;
} Generator;

// Appends up to `count` tokens to tokens[0 .. length-1], drawn with the random stream `key`, and returns how many. It
// stops early when the logits are not finite. When the context is full, its second half is processed again from
// position 0.
static inline int generate_tokens(const Generator *g, int *tokens, int length, int count, uint64_t key) {
    float *logits = (float *)checked_calloc(g->V, sizeof(float));
    Sampler sampler = sampler_open(g->V);
    int begin = max_int(0, length - g->T),
        cached = 0; // tokens[begin ..] is the context; `cached` of it are in the cache
    int end = length;
    for (; end < length + count; end++) {
        if (end - begin > g->T) {
            begin = end - max_int(1, g->T / 2);
            cached = 0;
        }
        if (cached && end - begin - cached == 1) g->decode(g->model, tokens + end - 1, &cached, 1, logits);
        else g->prefill(g->model, 0, tokens + begin, end - begin, logits);
        cached = end - begin;
        tokens[end] = sample_token(logits, g->V, g->temperature, g->top_k,
                                   random_uniform(key, (uint64_t)(end - length)), &sampler);
        if (tokens[end] < 0) break;
    }
    sampler_close(&sampler);
    free(logits);
    return end - length;
}

// Prints the prompt and the text that continues it; false when the logits were not finite.
static inline bool print_generated(const Generator *g, const RunTokenizer *tokenizer, int count, uint64_t key) {
    int length = tokenizer->prompt_length;
    int *tokens = (int *)checked_calloc((size_t)length + (size_t)count, sizeof(int));
    memcpy(tokens, tokenizer->prompt, (size_t)length * sizeof(int));
    int generated = generate_tokens(g, tokens, length, count, key);
    print_tokens(stdout, tokens + tokenizer->implied, length - tokenizer->implied + generated, g->V,
                 tokenizer->tokenizer, tokenizer->separator);
    printf("\n");
    fflush(stdout);
    free(tokens);
    return generated == count;
}
#endif
