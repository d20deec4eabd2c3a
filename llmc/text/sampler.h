/*
sampler.h: sampling of a token from logits, and printing of tokens as text.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H
#include "../base/common.h"
#include "../base/json.h"
#include "tokenizer.h"

enum { BYTE_VOCABULARY = 256, DOCUMENT_SEPARATOR = 0 }; // of byte-level shards: a NUL precedes each document

typedef struct {
    float logit;
    int token;
} Candidate;

static inline int compare_candidates(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->token - y->token; // ties: lower token first
}

// Samples from softmax(logits / temperature) over the top_k largest logits (0: all); temperature 0 selects the largest.
// uniform: a random number in (0,1). candidates: scratch for V entries. Logits must be finite.
static inline int sample_token(const float *logits, int V, double temperature, int top_k, double uniform,
                               Candidate *candidates) {
    for (int v = 0; v < V; v++) {
        candidates[v].logit = logits[v];
        candidates[v].token = v;
    }
    qsort(candidates, V, sizeof(Candidate), compare_candidates);
    if (temperature == 0) return candidates[0].token;
    int count = top_k > 0 ? min_int(top_k, V) : V;
    double sum = 0;
    for (int i = 0; i < count; i++) sum += exp(((double)candidates[i].logit - candidates[0].logit) / temperature);
    double target = uniform * sum, running = 0;
    for (int i = 0; i < count; i++) {
        running += exp(((double)candidates[i].logit - candidates[0].logit) / temperature);
        if (running >= target) return candidates[i].token;
    }
    return candidates[count - 1].token;
}

// Prints text for a terminal: invalid UTF-8 becomes U+FFFD, control characters U+00B7. text[size .. size+3] must exist.
static inline void print_text(FILE *out, const unsigned char *text, size_t size) {
    for (size_t i = 0; i < size;) {
        int length = utf8_length(text + i);
        if (length == 0 || i + length > size) fputs("\xEF\xBF\xBD", out), length = 1;
        else if ((text[i] < 0x20 && text[i] != '\n' && text[i] != '\t') || text[i] == 0x7F) fputs("\xC2\xB7", out);
        else fwrite(text + i, 1, length, out);
        i += length;
    }
}

// Prints tokens as text by the tokenizer; without one, byte tokens as bytes and those of other vocabularies as numbers.
// In text, a separator (-1: none) is printed as an empty line.
static inline void print_tokens(FILE *out, const int *tokens, int count, int V, const Tokenizer *tokenizer,
                                int separator) {
    if (!tokenizer && V != BYTE_VOCABULARY) {
        for (int i = 0; i < count; i++) fprintf(out, i ? " %d" : "%d", tokens[i]);
        return;
    }
    for (int begin = 0, end; begin < count; begin = end + 1) {
        for (end = begin; end < count && tokens[end] != separator; end++) {
        }
        unsigned char *bytes = NULL;
        size_t size = end - begin;
        if (tokenizer) bytes = (unsigned char *)tokenizer_decode(tokenizer, tokens + begin, size, &size);
        else bytes = (unsigned char *)checked_calloc(size + 4, 1);
        for (int i = begin; !tokenizer && i < end; i++) bytes[i - begin] = (unsigned char)tokens[i];
        print_text(out, bytes, size);
        free(bytes);
        if (end < count) fputs("\n\n", out);
    }
}
#endif
