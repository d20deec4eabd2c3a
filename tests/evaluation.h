/*
evaluation.h: tests of --eval: the recall task and its score, attention maps against the outputs that attention itself
computes, and what the program writes.
*/
#ifndef TESTS_EVALUATION_H
#define TESTS_EVALUATION_H
#include "harness.h"
#include "model.h"
#include "program.h"
#include "ranks.h"

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

// For every variant: what a query head's map takes from the values is what attention gave that head.
static void test_attention_maps(void) {
    const ModelCase mc = {"two key/value heads, two sequences", 13, 24, 2, 4, 2, 8, 20, 2, 11, true};
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        ModelConfig config = case_config(&mc, &attention_variants[v]);
        Model model;
        case_open(&model, &config, mc.B, mc.T, FOR_TRAINING);
        case_randomise(&model, 11);
        int T = mc.T, *tokens = case_tokens(mc.B * T + 1, mc.V, 4), l = 1;
        case_loss(&model, tokens, mc.B, T, false);
        LayerOnHost host = layer_to_host(&model.plan, &model.acts.layers[l], model_key_set(&model, 0, mc.B, T, 0));
        const HostAttention *m = &host.attention;
        const AttentionDims *d = &model.plan.dims;
        const LayerActivations *a = &model.acts.layers[l];
        float map[11 * 11], second[11 * 11];
        for (int b = 0; b < mc.B; b++)
            for (int head = 0; head < d->NQ; head++) {
                int kv = head / config.attention->key_sets / (m->shape.NQ / m->shape.NKV);
                attention_map(map, NULL, m, b, head);
                for (int t = 0; t < T; t++) {
                    double sum = 0, worst = 0;
                    size_t row = (size_t)(b * T + t);
                    for (int j = 0; j < T; j++) sum += (double)map[t * T + j];
                    for (int i = 0; i < d->DV; i++) {
                        double o = 0;
                        for (int j = 0; j < T; j++)
                            o += (double)map[t * T + j] * (double)a->fused[(size_t)(b * T + j) * (size_t)d->fused_ld +
                                                                           (size_t)(d->v_at + kv * d->DV + i)];
                        worst = fmax(
                            worst,
                            fabs(o - (double)a->heads[row * (size_t)(d->NQ * d->DV) + (size_t)(head * d->DV + i)]));
                    }
                    bool whole = config.attention->sink == SINK_NONE;
                    EXPECT(worst < 1e-5 && (whole ? fabs(sum - 1) < 1e-5 : sum > 0 && sum < 1),
                           "%s: head %d, row %d: sum %g, off by %g", config.attention->name, head, t, sum, worst);
                }
            }
        for (int h = 0; m->stride && h < maps_output_heads(m); h++) // and the pair is the one that is subtracted
            for (int t = 0; t < T; t++) {
                int h1 = maps_query_head(m, h);
                attention_map(map, NULL, m, 1, h1);
                attention_map(second, NULL, m, 1, h1 + m->stride);
                size_t row = (size_t)(T + t), ldh = (size_t)d->NQ * (size_t)d->DV;
                double s = map_lambda(m, 1, t, h),
                       o = (double)a->heads[row * ldh + (size_t)(h1 * d->DV)] -
                           s * (double)a->heads[row * ldh + (size_t)((h1 + m->stride) * d->DV)];
                EXPECT(fabs(o - (double)a->combined[row * (size_t)(d->OH * d->DV) + (size_t)(h * d->DV)]) < 1e-5,
                       "%s: pair %d, row %d", config.attention->name, h, t);
            }
        layer_on_host_free(&host);
        free(tokens);
        case_close(&model);
    }
}

static void test_attention_map_first_mass(void) {
    enum { T = 4 };
    float uniform[T * T] = {0}, first[T * T] = {0};
    for (int t = 0; t < T; t++) {
        first[t * T] = 1;
        for (int j = 0; j <= t; j++) uniform[t * T + j] = 1 / (float)(t + 1);
    }
    double harmonic = (1 + 1 / 2.0 + 1 / 3.0 + 1 / 4.0) / T;
    EXPECT(fabs(map_first_mass(uniform, T) - harmonic) < 1e-7 && map_first_mass(first, T) == 1, "mass %g and %g",
           map_first_mass(uniform, T), map_first_mass(first, T));
    HostAttention m;
    memset(&m, 0, sizeof(m));
    floatX lambda[T] = {0.5, 0.5, 0.5, 0.5};
    m.shape.T = T, m.lambda = lambda, m.ldl = 1;
    double same = map_effective_first_mass(uniform, uniform, &m, 0, 0); // half of the map: the same after normalising
    EXPECT(fabs(same - harmonic) < 1e-7, "half of a map: %g", same);
    for (int t = 0; t < T; t++) lambda[t] = 1; // the same map taken away: no row has a direction
    EXPECT(isnan(map_effective_first_mass(uniform, uniform, &m, 0, 0)), "nothing is left");
    // uniform minus the first position's: |1/n - 1| at 0, 1/n elsewhere; the row t = 0 cancels
    double wanted = (1 / 2.0 + 2 / 4.0 + 3 / 6.0) / 3; // (n-1)/n of (n-1)/n + (n-1)/n
    double got = map_effective_first_mass(uniform, first, &m, 0, 0);
    EXPECT(fabs(got - wanted) < 1e-6, "uniform minus first: %g, wanted %g", got, wanted);
}

static void test_eval_output(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_trainer(&r, &d, "run", "--steps 2 --attention diff_v2");
    EXPECT_STATUS(r, 0);
    for (int i = 0; i < 2; i++) {
        run_command(&r,
                    "%s --init '%s/run/checkpoints/step_00000002' --eval --val-data '%s/val.bin' --val-steps 3 "
                    "--batch-size %d --seq-len 40 --threads 1 "
                    "--eval-out '%s/eval%d' --dump-attention '%s/maps%d'",
                    test_program(), d.dir.path, d.dir.path, 3, d.dir.path, i, d.dir.path, i);
        EXPECT(r.status == 0 && strstr(r.out, "loss by position\n") && strstr(r.out, "exact match"),
               "status %d: %.300s", r.status, r.err);
    }
    run_command(&r, "cd '%s' && cmp eval0 eval1 && cmp maps0 maps1 && ! ls *.tmp", d.dir.path);
    EXPECT(r.status == 0, "the same evaluation twice: %.200s", r.out);
    char path[600], text[65536];
    FORMAT(path, "%s/eval0", d.dir.path);
    test_read_file(path, text, sizeof(text));
    cJSON *json = cJSON_Parse(text);
    const cJSON *by_position = cJSON_GetObjectItemCaseSensitive(json, "loss_by_position"), *item;
    double loss = 0, mean = 0, accuracy = -1;
    json_get_number(json, "loss", &loss);
    cJSON_ArrayForEach(item, by_position) mean += item->valuedouble / 40;
    EXPECT(cJSON_GetArraySize(by_position) == 40 && fabs(mean - loss) < 1e-6, "%d positions, mean %g, loss %g",
           cJSON_GetArraySize(by_position), mean, loss);
    json_get_number(cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(json, "recall"), 1), "exact", &accuracy);
    EXPECT(accuracy >= 0 && accuracy < 0.5, "an untrained model recalls %g", accuracy);
    const cJSON *layers =
        cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "attention"), "layers");
    EXPECT(cJSON_GetArraySize(layers) == 2, "%d layers", cJSON_GetArraySize(layers));
    cJSON_Delete(json);
    FORMAT(path, "%s/maps0", d.dir.path);
    SafeTensors *maps = safetensors_open(path);
    float a2[1600], lambda[40], tokens[40];
    safetensors_read(maps, "layer.1.head.1.a2", 0, 1600, a2, DTYPE_F32);
    safetensors_read(maps, "layer.1.head.1.lambda", 0, 40, lambda, DTYPE_F32);
    safetensors_read(maps, "tokens", 0, 40, tokens, DTYPE_F32);
    double last = 0;
    for (int j = 0; j < 40; j++) last += (double)a2[39 * 40 + j];
    EXPECT(fabs(last - 1) < 1e-5 && a2[1] == 0 && a2[0] == 1 && lambda[7] > 0 && lambda[7] < 1 && tokens[0] >= 'a',
           "sum %g, lambda %g", last, (double)lambda[7]);
    safetensors_close(maps);
    run_command(&r, "%s --train-data '%s/train.bin' --eval-out x --dump-attention y", test_program(), d.dir.path);
    EXPECT(r.status == 2 && count_lines(r.err) == 2 && strstr(r.err, "--eval-out requires --eval"), "status %d: %.300s",
           r.status, r.err);
    test_remove_directory(&d.dir);
}

// All numbers of two JSON texts of one form, within the rounding of sums in another order. Rates count what is above a
// threshold, so a rounding may move one of them by a count.
static void expect_same_numbers(const cJSON *a, const cJSON *b, const char *what) {
    const char *key = a && a->string ? a->string : "";
    bool rate = strcmp(key, "exact") == 0 || strcmp(key, "among_values") == 0 || strncmp(key, "sink", 4) == 0;
    bool alike = a && b && a->type == b->type;
    EXPECT(alike, "%s: '%s' is in one of two evaluations only", what, key);
    if (alike && cJSON_IsNumber(a))
        EXPECT(fabs(a->valuedouble - b->valuedouble) <= 1e-4 * fabs(a->valuedouble) + (rate ? 5e-3 : 1e-6),
               "%s: '%s' is %.9g, with one batch %.9g", what, key, b->valuedouble, a->valuedouble);
    const cJSON *x = a ? a->child : NULL, *y = b ? b->child : NULL;
    for (; x || y; x = x ? x->next : NULL, y = y ? y->next : NULL) expect_same_numbers(x, y, what);
}

static cJSON *evaluate_in_batches(const ProgramData *d, const char *trainer, int batch_size) {
    ProgramResult r;
    char text[65536];
    run_command(&r,
                "cd '%s' && %s --init run/checkpoints/step_00000030 --eval --val-data short.bin --val-steps 100 "
                "--batch-size %d --seq-len 40 --threads 1 --eval-out eval && cat eval",
                d->dir.path, trainer, batch_size);
    EXPECT_STATUS(r, 0);
    FORMAT(text, "%s", strchr(r.out, '{') ? strchr(r.out, '{') : "");
    return cJSON_Parse(text);
}

// 20 windows and 128 recall sequences: a batch of all, of one, and two that leave a smaller last one, of which the
// faulty trainer computes seven rows of logits at a time.
static void test_evaluation_batch_sizes(void) {
    ProgramData d = program_data();
    ProgramResult r;
    char path[600], what[100];
    FORMAT(path, "%s/short.bin", d.dir.path);
    write_grammar_shard(path, 20 * 40 + 1, 3);
    run_trainer(&r, &d, "run", "--steps 30 --lr 1e-2 --attention diff_v2");
    EXPECT_STATUS(r, 0);
    // the faulty trainer has checksums of other pieces
    run_command(&r, "rm '%s/run/checkpoints/step_00000030/trainer_state.json'", d.dir.path);
    EXPECT_STATUS(r, 0);
    cJSON *whole = evaluate_in_batches(&d, test_program_path(), 20);
    double windows = 0, answers = 0;
    const cJSON *cell = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(whole, "recall"), 0);
    json_get_number(whole, "windows", &windows);
    json_get_number(cell, "answers", &answers);
    EXPECT(windows == 20 && answers == 4 * RECALL_SEQUENCES, "%g windows, %g answers", windows, answers);
    static const int batch_sizes[] = {1, 3, 7};
    for (int i = 0; i < 3; i++) {
        cJSON *parts =
            evaluate_in_batches(&d, i < 2 ? test_program_path() : ranks_program("faulty_diffv2"), batch_sizes[i]);
        FORMAT(what, "in batches of %d", batch_sizes[i]);
        expect_same_numbers(whole, parts, what);
        cJSON_Delete(parts);
    }
    cJSON_Delete(whole);
    test_remove_directory(&d.dir);
}

static const Test evaluation_tests[] = {
    {"a recall sequence queries every key once", test_recall_sequence},
    {"recall uses the most frequent tokens, and the cells that fit into the context", test_recall_tokens},
    {"a recall score equals a count by hand", test_recall_score},
    {"attention maps times values equal the outputs of the heads", test_attention_maps},
    {"the mass at the first position of known attention maps is correct", test_attention_map_first_mass},
};
enum { EVALUATION_TEST_COUNT = sizeof(evaluation_tests) / sizeof(evaluation_tests[0]) };
static const Test evaluation_program_tests[] = {
    {"--eval writes its measurements, and a second --eval writes the same", test_eval_output},
    {"an evaluation does not depend on the sizes of its batches and pieces", test_evaluation_batch_sizes},
};
enum { EVALUATION_PROGRAM_TEST_COUNT = sizeof(evaluation_program_tests) / sizeof(evaluation_program_tests[0]) };
#endif
