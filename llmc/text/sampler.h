/*
sampler.h: sampling of a token from logits, and printing of tokens as text.
*/
#pragma once
#include "../base/common.h"
#include "../base/json.h"
#include "tokenizer.h"

typedef struct {
    float logit;
    int token;
} Candidate;

// Scratch memory for sampling from V logits.
typedef struct {
    Candidate *candidates, *moved; // [V]
    double *weights;               // [V]
} Sampler;

static inline Sampler sampler_open(int V) {
    Sampler s;
    s.candidates = (Candidate *)checked_calloc(V, sizeof(Candidate));
    s.moved = (Candidate *)checked_calloc(V, sizeof(Candidate));
    s.weights = (double *)checked_calloc(V, sizeof(double));
    return s;
}
static inline void sampler_close(Sampler *s) {
    free(s->candidates);
    free(s->moved);
    free(s->weights);
}

// The token with the largest logit, the first among equals; -1 if a logit is not finite.
static inline int largest_logit(const float *logits, int V) {
    int best = 0, broken = 0;
    for (int v = 0; v < V; v++) broken |= !isfinite(logits[v]);
    for (int v = 1; v < V; v++) best = logits[v] > logits[best] ? v : best;
    return broken ? -1 : best;
}

// A number that is smaller for a larger logit. -0 and 0 are equal.
static inline uint32_t descending_key(float logit) {
    uint32_t bits;
    logit += 0.0f;
    memcpy(&bits, &logit, sizeof(bits));
    return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
}

enum { RADIX_BITS = 11, RADIX_PASSES = 3, RADIX = 1 << RADIX_BITS };

static inline int radix_digit(float logit, int pass) {
    return (int)(descending_key(logit) >> (pass * RADIX_BITS) & (RADIX - 1));
}

// Sorts the candidates by descending logit in O(n). Equal logits keep their order: lower token first.
static inline void sort_candidates(Sampler *s, int n) {
    int counts[RADIX_PASSES][RADIX];
    memset(counts, 0, sizeof(counts));
    for (int i = 0; i < n; i++)
        for (int p = 0; p < RADIX_PASSES; p++) counts[p][radix_digit(s->candidates[i].logit, p)]++;
    for (int p = 0; p < RADIX_PASSES; p++) {
        for (int d = 0, at = 0; d < RADIX; d++) { // counts become positions
            int count = counts[p][d];
            counts[p][d] = at;
            at += count;
        }
        for (int i = 0; i < n; i++) s->moved[counts[p][radix_digit(s->candidates[i].logit, p)]++] = s->candidates[i];
        Candidate *sorted = s->moved;
        s->moved = s->candidates;
        s->candidates = sorted;
    }
}

// Collects the candidates that a sample can depend on: tokens among at least the top_k largest logits (0: all) whose
// weight is at least exp(-40) of the largest weight. Returns their number. The logits are counted in classes of equal
// width, and the classes that hold the top_k largest are kept whole.
static inline int select_candidates(Sampler *s, const float *logits, int V, float largest, double temperature,
                                    int top_k) {
    enum { CLASSES = 1024 };
    int counts[CLASSES + 1], last = CLASSES - 1, n = 0;
    double scale = fmin(CLASSES / (40 * temperature), DBL_MAX);
#define LOGIT_CLASS(v) (int)fmin(((double)largest - logits[v]) * scale, CLASSES)
    if (top_k > 0) {
        memset(counts, 0, sizeof(counts));
        for (int v = 0; v < V; v++) counts[LOGIT_CLASS(v)]++;
        for (int sum = counts[last = 0]; sum < top_k && last < CLASSES - 1; sum += counts[last]) last++;
    }
    for (int v = 0; v < V; v++) {
        s->candidates[n].logit = logits[v];
        s->candidates[n].token = v;
        n += LOGIT_CLASS(v) <= last;
    }
#undef LOGIT_CLASS
    return n;
}

// Samples from softmax(logits / temperature) over the top_k largest logits (0: all); temperature 0 selects the largest.
// uniform: a random number in (0,1). Returns -1 if a logit is not finite. The weights are summed in descending order,
// as after a sort of all logits: a weight below 2^-53 of the first does not change their sum.
static inline int sample_token(const float *logits, int V, double temperature, int top_k, double uniform, Sampler *s) {
    int best = largest_logit(logits, V);
    if (best < 0 || temperature == 0) return best;
    int n = select_candidates(s, logits, V, logits[best], temperature, top_k);
    sort_candidates(s, n);
    int count = top_k > 0 ? min_int(top_k, n) : n;
#pragma omp parallel for if (count > 4096)
    for (int i = 0; i < count; i++)
        s->weights[i] = exp(((double)s->candidates[i].logit - s->candidates[0].logit) / temperature);
    double sum = 0, running = 0;
    for (int i = 0; i < count; i++) sum += s->weights[i];
    double target = uniform * sum;
    for (int i = 0; i < count; i++) {
        running += s->weights[i];
        if (running >= target) return s->candidates[i].token;
    }
    return s->candidates[count - 1].token;
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

// The bytes of tokens, followed by four 0 bytes; free(). NULL if the tokens of the vocabulary have no text: there is no
// tokenizer, and tokens are not bytes. begins: a document begins with the tokens.
static inline unsigned char *tokens_text(const int *tokens, int count, bool begins, int V, const Tokenizer *tokenizer,
                                         size_t *size) {
    if (tokenizer) {
        char *text = tokenizer_decode(tokenizer, tokens, (size_t)count, size);
        if (begins && (tokenizer->flags & TOKENIZER_STRIP_SPACE) && text[0] == ' ') {
            *size -= 1;
            memmove(text, text + 1, *size + 4);
        }
        return (unsigned char *)text;
    }
    if (V != BYTE_VOCABULARY) return NULL;
    unsigned char *bytes = (unsigned char *)checked_calloc((size_t)count + 4, 1);
    for (int i = 0; i < count; i++) bytes[i] = (unsigned char)tokens[i];
    *size = (size_t)count;
    return bytes;
}

static inline void print_numbers(FILE *out, const int *tokens, int count, const char *between) {
    for (int i = 0; i < count; i++) fprintf(out, "%s%d", i ? between : "", tokens[i]);
}

// Prints tokens as text for a terminal, or as numbers if they have no text. In text, a separator (-1: none) is printed
// as an empty line. The tokens begin with a document.
static inline void print_tokens(FILE *out, const int *tokens, int count, int V, const Tokenizer *tokenizer,
                                int separator) {
    for (int begin = 0, end; begin < count; begin = end + 1) {
        size_t size = 0;
        for (end = begin; end < count && tokens[end] != separator; end++) {
        }
        unsigned char *bytes = tokens_text(tokens + begin, end - begin, true, V, tokenizer, &size);
        if (!bytes) {
            print_numbers(out, tokens, count, " ");
            return;
        }
        print_text(out, bytes, size);
        free(bytes);
        if (end < count) fputs("\n\n", out);
    }
}
