/*
generation.h: tests of sampling.
*/
#ifndef TESTS_GENERATION_H
#define TESTS_GENERATION_H
#include "harness.h"
#include "model.h"

// ---- sampling

static inline int compare_candidates(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->token - y->token; // ties: lower token first
}

// The definition: all logits sorted, all weights of the top_k largest summed.
static int sample_by_sorting(const float *logits, int V, double temperature, int top_k, double uniform) {
    Candidate *c = (Candidate *)checked_calloc(V, sizeof(Candidate));
    for (int v = 0; v < V; v++) c[v].logit = logits[v], c[v].token = v;
    qsort(c, V, sizeof(Candidate), compare_candidates);
    int count = temperature == 0 ? 1 : top_k > 0 ? min_int(top_k, V) : V, i = 0;
    double sum = 0, running = 0;
    for (int k = 0; k < count && count > 1; k++) sum += exp(((double)c[k].logit - c[0].logit) / temperature);
    for (; i < count - 1; i++) {
        running += exp(((double)c[i].logit - c[0].logit) / temperature);
        if (running >= uniform * sum) break;
    }
    int token = c[i].token;
    free(c);
    return token;
}

// Logits of several kinds: normal, with many ties and both zeros, with one far above the others, spread over floats.
static void make_logits(float *logits, int V, int kind, TestRandom *random) {
    for (int v = 0; v < V; v++) {
        float x = (float)(test_random_real(random) + test_random_real(random) + test_random_real(random));
        if (kind == 0) logits[v] = 5 * x;
        else if (kind == 1) logits[v] = test_random_int(random, 2) ? roundf(2 * x) : -roundf(fabsf(x) / 3);
        else if (kind == 2) logits[v] = x / 100 + (v == V / 2 ? 50.0f : 0);
        else logits[v] = copysignf(powf(10, 38 * x / 3), x);
    }
}

static void test_sampling_equals_sorting(void) {
    static const double temperatures[] = {0, 1e-300, 1e-3, 0.8, 1, 30, 1e300};
    static const double uniforms[] = {0x1p-54, 0.01, 0.3, 0.5, 0.9, 0.999999, 1 - 0x1p-53, 1};
    static const int sizes[] = {1, 2, 7, 300, 6000};
    enum { LARGEST = 6000 };
    static float logits[LARGEST];
    TestRandom random = {7};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        int V = sizes[i];
        const int top_ks[] = {0, 1, 2, 50, V - 1, V, V + 5};
        Sampler sampler = sampler_open(V);
        for (int n = 0; n < 4 * 7 * 7; n++) {
            int kind = n % 4, top_k = max_int(0, top_ks[n / 4 % 7]);
            double temperature = temperatures[n / 28];
            make_logits(logits, V, kind, &random);
            for (size_t u = 0; u < sizeof(uniforms) / sizeof(uniforms[0]); u++) {
                if (V == LARGEST && (n + (int)u) % 8) continue; // sorting is slow
                int token = sample_token(logits, V, temperature, top_k, uniforms[u], &sampler);
                int wanted = sample_by_sorting(logits, V, temperature, top_k, uniforms[u]);
                EXPECT(token == wanted,
                       "V %d, kind %d, temperature %g, top-k %d, uniform %g: %d (%g) instead of %d (%g)", V, kind,
                       temperature, top_k, uniforms[u], token, (double)logits[max_int(token, 0)], wanted,
                       (double)logits[wanted]);
            }
        }
        static const float broken[] = {NAN, INFINITY, -INFINITY};
        for (int b = 0; b < 3; b++)
            for (int greedy = 0; greedy < 2; greedy++) {
                make_logits(logits, V, 0, &random);
                logits[V - 1] = broken[b];
                int token = sample_token(logits, V, greedy ? 0 : 1, 0, 0.5, &sampler);
                EXPECT(token == -1, "a logit of %g: token %d", (double)broken[b], token);
            }
        sampler_close(&sampler);
    }
}

static const Test generation_tests[] = {
    {"sampling gives the token that sorting all logits gives", test_sampling_equals_sorting},
};
enum { GENERATION_TEST_COUNT = sizeof(generation_tests) / sizeof(generation_tests[0]) };
#endif
