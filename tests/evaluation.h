/*
evaluation.h: tests of --eval: the recall task and its score, attention maps against the outputs that attention itself
computes, and rounding.
*/
#pragma once
#include "harness.h"
#include "model.h"

static void test_recall_sequence(void) {
    int symbols[90], tokens[256], again[256], other[256];
    for (int i = 0; i < 90; i++) symbols[i] = 1000 + 3 * i;
    static const RecallCell cells[] = {{4, 0}, {4, 240}, {32, 128}, {45, 0}};
    for (int c = 0; c < 4; c++) {
        RecallCell cell = cells[c];
        int n = recall_length(cell), P = cell.pairs;
        recall_generate(tokens, cell, symbols, 90, 5);
        recall_generate(again, cell, symbols, 90, 5);
        recall_generate(other, cell, symbols, 90, 6);
        EXPECT(memcmp(tokens, again, (size_t)n * sizeof(int)) == 0, "%d pairs: not the same again", P);
        EXPECT(memcmp(tokens, other, (size_t)n * sizeof(int)) != 0, "%d pairs: another key, the same sequence", P);
        for (int i = 0; i < 2 * P; i++)
            for (int j = 0; j < i; j++)
                EXPECT(tokens[i] != tokens[j], "%d pairs: token %d is there twice", P, tokens[i]);
        for (int i = 0; i < cell.noise; i++)
            for (int j = 0; j < 2 * P; j++)
                EXPECT(tokens[2 * P + i] != tokens[j], "%d pairs: noise has a key or value", P);
        int asked = 0, in_order = 0;
        for (int k = 0; k < P; k++)
            for (int q = 0; q < P; q++) {
                const int *at = tokens + recall_query(cell, q);
                if (at[0] != tokens[2 * k]) continue;
                asked++;
                in_order += k == q;
                EXPECT(at[1] == tokens[2 * k + 1], "%d pairs: query %d is answered with %d, its value is %d", P, q,
                       at[1], tokens[2 * k + 1]);
            }
        EXPECT(asked == P && (P == 4 || in_order < P / 2), "%d pairs: %d asked for, %d in their order", P, asked,
               in_order);
        for (int i = 0; i < n; i++)
            EXPECT((tokens[i] - 1000) % 3 == 0 && tokens[i] >= 1000 && tokens[i] < 1270, "token %d", tokens[i]);
    }
}

static void test_recall_tokens(void) {
    int64_t counts[600] = {0};
    int symbols[RECALL_SYMBOLS];
    counts[7] = 5, counts[3] = 9, counts[500] = 5, counts[2] = 1;
    int count = recall_symbols(symbols, counts, 600);
    EXPECT(count == 4 && symbols[0] == 3 && symbols[1] == 7 && symbols[2] == 500 && symbols[3] == 2, "%d: %d %d %d %d",
           count, symbols[0], symbols[1], symbols[2], symbols[3]);
    for (int v = 0; v < 600; v++) counts[v] = v; // more than fit: the last ones are kept
    count = recall_symbols(symbols, counts, 600);
    EXPECT(count == RECALL_SYMBOLS && symbols[0] == 599 && symbols[RECALL_SYMBOLS - 1] == 600 - RECALL_SYMBOLS,
           "%d: %d .. %d", count, symbols[0], symbols[RECALL_SYMBOLS - 1]);
    RecallCell cells[RECALL_CELLS];
    EXPECT(recall_cells(cells, 15, 256) == 0 && recall_cells(cells, 256, 7) == 0, "cells that do not fit");
    EXPECT(recall_cells(cells, 16, 8) == 1 && cells[0].pairs == 4 && cells[0].noise == 0, "16 positions: %d pairs",
           cells[0].pairs);
    EXPECT(recall_cells(cells, 1024, 256) == RECALL_CELLS && cells[9].pairs == 64 && cells[9].noise == 768,
           "1024 positions");
}

static void test_recall_score(void) {
    // pairs (0,1) (2,3) (4,5) (6,7); the query at 8 is key 2, whose answer is 3, of a vocabulary of 10
    const RecallCell cell = {4, 0};
    const int tokens[16] = {0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 0, 1, 4, 5, 6, 7};
    float logits[10] = {0};
    RecallScore s;
    memset(&s, 0, sizeof(s));
    recall_score(&s, logits, 10, tokens, cell, 0); // all are equal: no match
    EXPECT(s.answers == 1 && s.exact == 0 && s.among == 0 && fabs(s.loss - log(10)) < 1e-12, "equal logits: loss %g",
           s.loss);
    logits[3] = 2, logits[9] = 3; // the best of the values, not of all tokens
    recall_score(&s, logits, 10, tokens, cell, 0);
    EXPECT(s.exact == 0 && s.among == 1, "%d exact, %d among the values", (int)s.exact, (int)s.among);
    double loss = log(8 + exp(2) + exp(3)) - 2;
    EXPECT(fabs(s.loss - log(10) - loss) < 1e-12, "loss %.15g, wanted %.15g", s.loss - log(10), loss);
    logits[9] = 0;
    recall_score(&s, logits, 10, tokens, cell, 0);
    EXPECT(s.answers == 3 && s.exact == 1 && s.among == 2, "%d exact, %d among the values", (int)s.exact, (int)s.among);
    recall_score(&s, logits, 10, tokens, cell, 1); // its answer is 1
    logits[3] = NAN;
    recall_score(&s, logits, 10, tokens, cell, 0);
    EXPECT(s.answers == 5 && s.exact == 1 && s.among == 2, "%d exact, %d among the values", (int)s.exact, (int)s.among);
}

static const ModelCase map_cases[] = {
    {"two key/value heads, two sequences", 13, 24, 2, 4, 2, 8, 20, 2, 11, true, 0, 0, false, false},
    {"windows of 3, every second layer full", 13, 24, 2, 4, 2, 8, 20, 2, 11, true, 3, 2, false, false},
    {"YOCO with QK-norm", 13, 24, 2, 4, 2, 8, 20, 2, 11, true, 3, 0, true, true},
};
enum { MAP_CASES = sizeof(map_cases) / sizeof(map_cases[0]), MAP_T = 11 };

// What a query head's map takes from the values is what attention gave that head.
static void expect_map_of_head(const Model *model, const HostAttention *m, int l, int b, int head, const char *what) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *d = plan_dims(&model->plan, l);
    const LayerActivations *a = &model->acts.layers[l];
    bool all = !c->window || (c->full_every && (l + 1) % c->full_every == 0) || (c->yoco && l >= c->L / 2);
    int kv = head / c->attention->key_sets / (m->shape.NQ / m->shape.NKV), T = MAP_T;
    bool cross = c->yoco && l >= c->L / 2, whole = c->attention->sink == SINK_NONE;
    const floatX *values = cross ? model->acts.kv + d->NK * d->QD : a->fused + d->v_at;
    int ld = cross ? d->kv_ld : d->fused_ld;
    float map[MAP_T * MAP_T];
    attention_map(map, NULL, m, b, head);
    for (int t = 0; t < T; t++) {
        double sum = 0, worst = 0;
        int wrong = 0;
        for (int j = 0; j < T; j++) {
            sum += (double)map[t * T + j];
            wrong += (map[t * T + j] > 0) != (j <= t && (all || t - j < c->window));
        }
        for (int i = 0; i < d->DV; i++) {
            double o = 0;
            for (int j = 0; j < T; j++)
                o += (double)map[t * T + j] * (double)values[(size_t)(b * T + j) * ld + kv * d->DV + i];
            worst = fmax(worst, fabs(o - (double)a->heads[((b * T + t) * d->NQ + head) * d->DV + i]));
        }
        EXPECT(worst < 1e-5 && !wrong && (whole ? fabs(sum - 1) < 1e-5 : sum > 0 && sum < 1),
               "%s, layer %d: head %d, row %d: sum %g, off by %g, %d keys are wrongly visible or not", what, l, head, t,
               sum, worst, wrong);
    }
}

// The heads of a pair are those that are subtracted.
static void expect_pairs_of_maps(const Model *model, const HostAttention *m, int l, const char *what) {
    const AttentionDims *d = plan_dims(&model->plan, l);
    const LayerActivations *a = &model->acts.layers[l];
    for (int h = 0; m->groups.noise && h < maps_output_heads(m); h++)
        for (int t = 0; t < MAP_T; t++) {
            int h1 = maps_query_head(m, h, 0), h2 = maps_query_head(m, h, 1), row = MAP_T + t;
            double o = (double)a->heads[(row * d->NQ + h1) * d->DV] -
                       map_lambda(m, 1, t, h) * (double)a->heads[(row * d->NQ + h2) * d->DV];
            EXPECT(fabs(o - (double)a->combined.data[(row * d->OH + h) * d->DV]) < 1e-5,
                   "%s, layer %d: pair %d, row %d", what, l, h, t);
        }
}

static void expect_maps_of_layer(void *data, int l) {
    const Model *model = (const Model *)data;
    const char *what = model->plan.config.attention->name;
    int B = model->plan.B;
    HostAttention host =
        attention_to_host(&model->plan, &model->acts.layers[l], l, key_set(&model->plan, l, 0, B, MAP_T, 0));
    for (int b = 0; b < B; b++)
        for (int head = 0; head < model->plan.dims.NQ; head++) expect_map_of_head(model, &host, l, b, head, what);
    expect_pairs_of_maps(model, &host, l, what);
    attention_on_host_free(&host);
}
static void test_attention_maps(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int i = 0; i < MAP_CASES; i++) {
            const ModelCase *mc = &map_cases[i];
            Model model;
            int *tokens = case_start(&model, mc, &attention_variants[v], FOR_EVALUATION);
            buffer_upload(model.acts.inputs, tokens, (size_t)mc->B * MAP_T * sizeof(int));
            model_forward(&model, mc->B, MAP_T, expect_maps_of_layer, &model);
            case_end(&model, tokens);
        }
}

static void test_means_of_attention_maps(void) {
    enum { T = 4 };
    float uniform[T * T] = {0}, first[T * T] = {0};
    for (int t = 0; t < T; t++) {
        first[t * T] = 1;
        for (int j = 0; j <= t; j++) uniform[t * T + j] = 1 / (float)(t + 1);
    }
    HostAttention m;
    memset(&m, 0, sizeof(m));
    floatX lambda[T] = {0.5, 0.5, 0.5, 0.5};
    m.shape.T = T, m.lambda = lambda, m.ldl = 1;
    double harmonic = (1 + 1 / 2.0 + 1 / 3.0 + 1 / 4.0) / T, logs = (log(2.0) + log(3.0) + log(4.0)) / T;
    MapMeans even = map_means(uniform, NULL, &m, 0, 0), one = map_means(first, NULL, &m, 0, 0);
    EXPECT(fabs(even.first_mass - harmonic) < 1e-7 && one.first_mass == 1, "mass %g and %g", even.first_mass,
           one.first_mass);
    EXPECT(fabs(even.entropy - logs) < 1e-6 && one.entropy == 0, "entropy %g and %g", even.entropy, one.entropy);
    MapMeans same = map_means(uniform, uniform, &m, 0, 0); // half of the map: the same after normalizing
    EXPECT(fabs(same.first_share - harmonic) < 1e-7 && fabs(same.entropy - logs) < 1e-6, "half of a map: %g, %g",
           same.first_share, same.entropy);
    for (int t = 0; t < T; t++) lambda[t] = 1; // the same map taken away: no row has a direction
    EXPECT(isnan(map_means(uniform, uniform, &m, 0, 0).first_share), "nothing is left");
    // uniform minus the first position's: |1/n - 1| at 0, 1/n elsewhere; the row t = 0 cancels
    double wanted = (1 / 2.0 + 2 / 4.0 + 3 / 6.0) / 3; // (n-1)/n of (n-1)/n + (n-1)/n
    double entropy = (log(2.0) + (log(2.0) + log(4.0)) / 2 + (log(2.0) + log(6.0)) / 2) / 3;
    MapMeans got = map_means(uniform, first, &m, 0, 0);
    EXPECT(fabs(got.first_share - wanted) < 1e-6 && fabs(got.entropy - entropy) < 1e-6,
           "uniform minus first: %g, wanted %g; entropy %g, wanted %g", got.first_share, wanted, got.entropy, entropy);
    for (int i = 0; i < T * T; i++) first[i] /= 4; // as with a sink that takes the rest
    one = map_means(first, NULL, &m, 0, 0);
    EXPECT(one.first_mass == 0.25 && one.first_share == 1 && one.entropy == 0, "with a sink: %g, %g, %g",
           one.first_mass, one.first_share, one.entropy);
}

static const Test evaluation_tests[] = {
    {"a recall sequence queries every key once", test_recall_sequence},
    {"recall uses the most frequent tokens, and the cells that fit into the context", test_recall_tokens},
    {"a recall score equals a count by hand", test_recall_score},
    {"attention maps times values equal the outputs of the heads", test_attention_maps},
    {"mass at the first position and entropy of known attention maps are correct", test_means_of_attention_maps},
};
