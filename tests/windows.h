/*
windows.h: tests of generation with caches, with windows and YOCO. model.h has the gradients of these models.
*/
#pragma once
#include "harness.h"
#include "model.h"

// PREFILL_ROWS is 8 here. T - 1 new positions and more go through each ring.
static const ModelCase generation_cases[] = {
    {"no window", 29, 24, 2, 4, 2, 8, 20, 3, 41, true, 0, 0, false, false},
    {"windows of 6 positions, less than a piece of a prompt", 29, 24, 2, 4, 2, 8, 20, 3, 41, true, 6, 0, false, false},
    {"windows of 11 positions, every second layer full, QK-norm", 29, 24, 2, 4, 2, 8, 20, 3, 41, false, 11, 2, false,
     true},
    {"YOCO with QK-norm", 29, 24, 4, 4, 2, 8, 20, 3, 41, true, 6, 0, true, true},
    {"windows of one position", 29, 24, 2, 4, 2, 8, 20, 3, 41, true, 1, 0, false, false},
    {"windows of all positions but one", 29, 24, 2, 4, 2, 8, 20, 3, 41, true, 40, 0, false, false},
    {"groups of 8 query heads", 29, 24, 2, 16, 2, 8, 20, 3, 41, true, 6, 0, false, false},
    {"YOCO with a window of all positions", 29, 24, 2, 4, 2, 8, 20, 3, 41, false, 41, 0, true, false},
};
enum { GENERATION_CASES = sizeof(generation_cases) / sizeof(generation_cases[0]), GENERATION_V = 29 };
enum { GENERATION_SHORT = 4 }; // the first cases, for every variant; the others for diff_v2

// Logits [T][V] after each position, by one forward of the whole sequence.
static void whole_logits(Model *whole, const int *tokens, float *logits) {
    int T = whole->plan.T, C = whole->plan.config.C;
    model_read_batch(whole, tokens, tokens + 1, NULL, T);
    model_forward(whole, 1, T, NULL, NULL);
    for (int t = 0; t < T; t++)
        generation_logits(generation_model(whole), whole->acts.norm_final + (size_t)t * C, 1,
                          logits + (size_t)t * GENERATION_V);
}

// Eight operations per layer round; the widest sums have 2F terms, whose roundings add up as a random walk.
static void expect_logits(const float *got, const float *want, const Model *m, const char *what, int sequence, int t) {
    double largest = 0, worst = 0, tolerance = 0x1p-23 * 8 * m->plan.config.L * sqrt(2.0 * m->plan.config.F);
    for (int i = 0; i < GENERATION_V; i++) {
        largest = fmax(largest, fabs((double)want[i]));
        worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
    }
    EXPECT(worst <= tolerance * largest, "%s: sequence %d, position %d: a logit is off by %.3g of %.3g", what, sequence,
           t, worst, largest);
}

// Prompts of different lengths, then new tokens of all sequences together. When the longest is complete, its place is
// used for a new prompt.
static void expect_cached_logits(const ModelCase *mc, const AttentionVariant *variant) {
    enum { SEQUENCES = 4, B = 3 };
    const int lengths[SEQUENCES] = {1, 8, 29, 17}, T = mc->T;
    ModelConfig config = case_config(mc, variant);
    Model cached, whole;
    float *want[SEQUENCES], got[B * GENERATION_V];
    int *tokens[SEQUENCES], of[B] = {0, 1, 2}, first[B], next[B];
    const char *what = test_text("%s, %s", variant->name, mc->why);
    case_open(&cached, &config, B, T, FOR_GENERATION);
    case_randomize(&cached, 5);
    size_t workspace = cached.plan.workspace_bytes;
    model_plan(&whole, &config, 1, T, FOR_EVALUATION, RECOMPUTE_NOTHING, one_rank);
    model_alloc(&whole, &cached);
    for (int s = 0; s < SEQUENCES; s++) {
        tokens[s] = case_tokens(T + 1, GENERATION_V, 8 + (uint64_t)s);
        want[s] = (float *)checked_calloc((size_t)T * GENERATION_V, sizeof(float));
        ops_init(whole.plan.workspace_bytes);
        whole_logits(&whole, tokens[s], want[s]);
    }
    ops_init(workspace); // no more than the plan for generation
    for (int b = 0; b < B; b++) first[b] = 0;
    for (int s = B; s <= SEQUENCES; s++) {
        for (int b = 0; b < B; b++) {
            if (first[b]) continue;
            first[b] = lengths[of[b]];
            generation_prefill(generation_model(&cached), b, tokens[of[b]], first[b], got);
            expect_logits(got, want[of[b]] + (size_t)(first[b] - 1) * GENERATION_V, &cached, what, of[b], first[b] - 1);
        }
        for (; max_int(first[0], max_int(first[1], first[2])) < T; first[0]++, first[1]++, first[2]++) {
            for (int b = 0; b < B; b++) next[b] = tokens[of[b]][first[b]];
            generation_decode(generation_model(&cached), next, first, B, got);
            for (int b = 0; b < B; b++)
                expect_logits(got + b * GENERATION_V, want[of[b]] + (size_t)first[b] * GENERATION_V, &cached, what,
                              of[b], first[b]);
        }
        for (int b = 0; b < B && s < SEQUENCES; b++)
            if (first[b] == T) of[b] = s, first[b] = 0;
    }
    for (int s = 0; s < SEQUENCES; s++) {
        free(tokens[s]);
        free(want[s]);
    }
    model_free(&whole, false);
    case_close(&cached);
}

static void test_cached_logits(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int i = 0; i < GENERATION_CASES; i++)
            if (i < GENERATION_SHORT || &attention_variants[v] == variant_find("diff_v2"))
                expect_cached_logits(&generation_cases[i], &attention_variants[v]);
}

static const Test windows_tests[] = {
    {"logits with caches, of prompts in pieces and of batches, equal those of whole sequences", test_cached_logits},
};
