/*
sampler.h: from logits to a token, and from byte tokens to text that is safe to print.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H
#include "common.h"
#include "json.h"

enum { BYTE_VOCABULARY = 256, DOCUMENT_SEPARATOR = 0 }; // byte-level shards: a NUL before each document

typedef struct {
    float logit;
    int token;
} Candidate;

static inline int compare_candidates(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->token - y->token; // ties: the lower token first
}

// Draws from softmax(logits / temperature) over the top_k largest (0: all); temperature 0 takes the largest.
// uniform in (0,1); candidates is scratch for V entries. Logits must be finite.
static inline int sample_token(const float *logits, int V, double temperature, int top_k, double uniform, Candidate *candidates) {
    for (int v = 0; v < V; v++) {
        candidates[v].logit = logits[v];
        candidates[v].token = v;
    }
    qsort(candidates, (size_t)V, sizeof(Candidate), compare_candidates);
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

// Byte tokens as text: a separator ends a paragraph, invalid UTF-8 becomes U+FFFD, other control bytes become
// U+00B7, so that a terminal takes no harm. Tokens of another vocabulary are printed as numbers.
static inline void print_tokens(FILE *out, const int *tokens, int count, int V) {
    if (V != BYTE_VOCABULARY) {
        for (int i = 0; i < count; i++) fprintf(out, i ? " %d" : "%d", tokens[i]);
        return;
    }
    unsigned char *s = (unsigned char *)checked_calloc((size_t)count + 1, 1);
    for (int i = 0; i < count; i++) s[i] = (unsigned char)tokens[i];
    for (int i = 0; i < count;) {
        int length = utf8_length(s + i);
        if (length == 0) fputs("\xEF\xBF\xBD", out);
        else if (s[i] == DOCUMENT_SEPARATOR) fputs("\n\n", out);
        else if ((s[i] < 0x20 && s[i] != '\n' && s[i] != '\t') || s[i] == 0x7F) fputs("\xC2\xB7", out);
        else fwrite(s + i, 1, (size_t)length, out);
        i += max_int(length, 1);
    }
    free(s);
}
#endif
