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
    float largest = logits[0];
#pragma omp simd reduction(max : largest) reduction(| : broken)
    for (int v = 0; v < V; v++) {
        largest = logits[v] > largest ? logits[v] : largest;
        broken |= !isfinite(logits[v]);
    }
    while (!broken && logits[best] < largest) best++;
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

// Classes of logits of equal width, the largest first. The last one has the logits whose weight is below exp(-40) of
// the largest weight: no sample depends on them. The place of a logit is its class and the fraction of the class.
enum { LOGIT_CLASSES = 1024 };
static const double class_width = 40.0 / LOGIT_CLASSES; // of the logarithm of weights
static inline double logit_scale(double temperature) { return fmin(1 / (class_width * temperature), DBL_MAX); }
static inline double logit_place(float logit, float largest, double scale) { return ((double)largest - logit) * scale; }
static inline int logit_class(double place) { return place < LOGIT_CLASSES ? (int)place : LOGIT_CLASSES; }
static inline double logit_weight(float logit, float largest, double temperature) {
    return exp(((double)logit - largest) / temperature);
}

// Collects the candidates of the classes first .. last. Returns their number.
static inline int collect_candidates(Sampler *s, const float *logits, int V, float largest, double scale, int first,
                                     int last) {
    int n = 0;
    for (int v = 0; v < V; v++) {
        int c = logit_class(logit_place(logits[v], largest, scale));
        if (c < first || c > last) continue;
        s->candidates[n].logit = logits[v];
        s->candidates[n++].token = v;
    }
    return n;
}

// The last class that a sample from the top_k largest logits (0: all) can depend on.
static inline int last_class(const float *logits, int V, float largest, double scale, int top_k) {
    int counts[LOGIT_CLASSES + 1] = {0}, last = 0;
    if (top_k <= 0) return LOGIT_CLASSES - 1;
    for (int v = 0; v < V; v++) counts[logit_class(logit_place(logits[v], largest, scale))]++;
    for (int sum = counts[0]; sum < top_k && last < LOGIT_CLASSES - 1; sum += counts[last]) last++;
    return last;
}

// The sample from all tokens, found without sorting them: sums the weights of each class, and sorts the class in which
// the running sum reaches uniform * sum. Returns -1 if rounding could change the sample: sums have another order, and
// weights a relative error below 1e-12, since a Taylor polynomial is exp(x) of a fraction -x of a class.
static inline int sample_unsorted(Sampler *s, const float *logits, int V, float largest, double temperature,
                                  double uniform) {
    double sums[LOGIT_CLASSES + 1] = {0}, scale = logit_scale(temperature), sum = 0, running = 0;
    double weight = 1, factor = exp(-class_width); // of a class, and from one class to the next
    int found = 0;
#pragma omp parallel for schedule(static) reduction(+ : sums) if (V > 4096)
    for (int v = 0; v < V; v++) {
        double place = logit_place(logits[v], largest, scale);
        int c = logit_class(place);
        double x = (c - place) * class_width;
        sums[c] += 1 + x * (1 + x * (1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720))))));
    }
    for (int c = 0; c < LOGIT_CLASSES; c++, weight *= factor) sum += sums[c] *= weight;
    double target = uniform * sum, slack = (4 * V * DBL_EPSILON + 1e-12) * sum;
    while (found < LOGIT_CLASSES && running + sums[found] < target - slack) running += sums[found++];
    int n = collect_candidates(s, logits, V, largest, scale, found, found);
    sort_candidates(s, n);
    for (int i = 0; i < n; i++) {
        running += logit_weight(s->candidates[i].logit, largest, temperature);
        if (running > target + slack) return s->candidates[i].token;
        if (running >= target - slack) break;
    }
    return -1;
}

// Samples from softmax(logits / temperature) over the top_k largest logits (0: all); temperature 0 selects the largest.
// uniform: a random number in (0,1). Returns -1 if a logit is not finite. The weights are summed in descending order,
// as after a sort of all logits: a weight below 2^-53 of the first does not change their sum.
static inline int sample_token(const float *logits, int V, double temperature, int top_k, double uniform, Sampler *s) {
    int best = largest_logit(logits, V);
    if (best < 0 || temperature == 0) return best;
    int unsorted = top_k > 0 ? -1 : sample_unsorted(s, logits, V, logits[best], temperature, uniform);
    if (unsorted >= 0) return unsorted;
    double scale = logit_scale(temperature);
    int last = last_class(logits, V, logits[best], scale, top_k);
    int n = collect_candidates(s, logits, V, logits[best], scale, 0, last);
    sort_candidates(s, n);
    int count = top_k > 0 ? min_int(top_k, n) : n;
    for (int i = 0; i < count; i++)
        s->weights[i] = logit_weight(s->candidates[i].logit, s->candidates[0].logit, temperature);
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
