/*
stats.h: tests of the per-layer statistics. The direct_ functions compute them by the definitions, in double, from the
queries, keys and outputs of a layer: whole rows of probabilities, without the stored log-sum-exp.
*/
#pragma once
#include "harness.h"
#include "model.h"
#include "program.h"
#include "spikes.h"

static const ModelCase stats_cases[] = {
    {"the sample has all rows except position 0, groups of 3 heads, prime T", 37, 20, 2, 6, 2, 8, 28, 2, 13, false, 0,
     0, false, false},
    {"B does not divide the size of the sample, head dimension 16, QK-norm", 29, 24, 2, 4, 4, 16, 20, 3, 41, true, 0, 0,
     false, true},
    {"windows of 4, every second layer full", 23, 20, 2, 4, 2, 8, 12, 2, 13, true, 4, 2, false, false},
    {"YOCO with QK-norm", 23, 20, 2, 4, 2, 8, 12, 2, 13, true, 4, 0, true, true},
};
enum { STATS_CASE_COUNT = sizeof(stats_cases) / sizeof(stats_cases[0]) };

static inline double direct_rms(const floatX *x, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum / count);
}

// The factor of the second map of output head h in row n.
static inline double direct_lambda(const Model *m, int layer, int n, int h) {
    double l = (double)m->acts.layers[layer].lambda[n * plan_dims(&m->plan, layer)->lambda_ld + h];
    return m->plan.config.attention->factor == S_SIGMOID ? 1 / (1 + exp(-l)) : l;
}

// The query head of map 0 or 1 of output head h: of g + 1 heads in a row, g make outputs, and the last is subtracted.
static inline int direct_query_head(const AttentionDims *d, const AttentionVariant *a, int h, int map) {
    int g = a->signals;
    if (g == 0) return h;
    if (a->noise == NOISE_LAST) return h + map * d->OH;
    return (g + 1) * (h / g) + (map ? g : h % g);
}

// The key head of query head h. With two key sets, query heads are [OH][2] and key heads [NV][2], and each pair of key
// heads has one value head. Otherwise NQ/NK query heads read one key and value head.
static inline int direct_key_head(const AttentionDims *d, int h) {
    return d->NK > d->NV ? 2 * (h / 2 / (d->OH / d->NV)) + h % 2 : h / (d->NQ / d->NK);
}

// Where the document of position t of sequence b begins, and the first position that it attends to.
static inline int direct_start(const Model *m, int b, int t, int T) {
    return m->acts.first_key ? m->acts.first_key[b * T + t] : 0;
}
static inline int direct_low(const Model *m, int layer, int b, int t, int T) {
    const ModelConfig *c = &m->plan.config;
    bool all = !c->window || (c->full_every && (layer + 1) % c->full_every == 0) || (c->yoco && layer >= c->L / 2);
    return max_int(direct_start(m, b, t, T), all ? 0 : t - c->window + 1);
}

// Computes the probabilities p (t+1) of query head h at position t of sequence b. Returns the largest |logit|.
static inline double direct_probabilities(double *p, const Model *m, int layer, int h, int b, int t, int T) {
    const AttentionDims *d = plan_dims(&m->plan, layer);
    const AttentionVariant *a = m->plan.config.attention;
    const floatX *fused = m->acts.layers[layer].fused, *q = fused + (b * T + t) * d->fused_ld + h * d->QD;
    const bool cross = layer_cross(&m->plan.config, layer);
    const floatX *k = (cross ? m->acts.kv : fused + d->k_at) + direct_key_head(d, h) * d->QD;
    const int ld = cross ? d->kv_ld : d->fused_ld;
    double largest = 0, sum = a->sink == SINK_ZERO      ? 1
                              : a->sink == SINK_LEARNED ? exp((double)param(&m->state, T_SINKS, layer)[h])
                                                        : 0;
    int low = direct_low(m, layer, b, t, T);
    for (int j = 0; j < low; j++) p[j] = 0;
    for (int j = low; j <= t; j++) {
        double dot = 0;
        for (int i = 0; i < d->QD; i++) dot += (double)q[i] * (double)k[(b * T + j) * ld + i];
        double logit = dot / sqrt(d->QD);
        largest = fmax(largest, fabs(logit));
        sum += p[j] = exp(logit);
    }
    for (int j = 0; j <= t; j++) p[j] /= sum;
    return largest;
}

typedef struct {
    double sum, count, mean;
} DirectMean;
static inline void direct_add(DirectMean *r, double x) {
    r->sum += x;
    r->mean = r->sum / ++r->count;
}

// The attention statistics of one layer; `sampled` (N): whether the sample has the query row. condition: the mean of
// sum(A1 + |s| A2) / sum |A1 - s A2| of rows, by which a rounding grows in the effective map.
static inline LayerStats direct_stats(double *condition, const Model *m, int layer, int B, int T, const bool *sampled) {
    const AttentionDims *d = plan_dims(&m->plan, layer);
    const LayerActivations *acts = &m->acts.layers[layer];
    const AttentionVariant *a = m->plan.config.attention;
    DirectMean lambda, rms, effective, grows;
    memset(&lambda, 0, sizeof(lambda));
    rms = effective = grows = lambda;
    double *p = (double *)checked_calloc(2 * T, sizeof(double)), largest = 0;
    for (int n = 0; n < B * T; n++) {
        int t = n % T, start = direct_start(m, n / T, t, T), low = direct_low(m, layer, n / T, t, T);
        for (int h = 0; h < d->OH; h++) {
            double s = a->signals ? direct_lambda(m, layer, n, h) : 0, sum = 0, all = 0;
            if (a->signals) direct_add(&lambda, s);
            direct_add(&rms, direct_rms(acts->attn_out.data + (n * d->OH + h) * d->DV, d->DV));
            if (!sampled[n] || low == t) continue;
            for (int map = 0; map < (a->signals ? 2 : 1); map++) {
                int head = direct_query_head(d, a, h, map);
                largest = fmax(largest, direct_probabilities(p + map * T, m, layer, head, n / T, t, T));
            }
            for (int j = 0; j <= t; j++) sum += fabs(p[j] - s * p[T + j]), all += p[j] + fabs(s) * p[T + j];
            direct_add(&grows, all / sum);
            direct_add(&effective, fabs(p[start] - s * p[T + start]) / sum);
        }
    }
    *condition = grows.mean;
    double residual = 0;
    for (int i = 0; i < B * T * m->plan.config.C; i++) residual = fmax(residual, fabs((double)(float)acts->x_out[i]));
    LayerStats stats = {lambda.mean, rms.mean, {effective.mean, largest}, residual};
    free(p);
    return stats;
}

static inline double direct_grad_norm(const Model *m, int layer) {
    double sum = 0;
    for (int i = 0; i < m->plan.tensors.count; i++) {
        const Tensor *t = &m->plan.tensors.tensors[i];
        const char *prefix = test_text("model.layers.%d.", layer);
        bool keys = strncmp(t->name, "model.yoco.", 11) == 0 && layer == m->plan.config.L / 2;
        if (!keys && strncmp(t->name, prefix, strlen(prefix)) != 0) continue;
        for (size_t e = 0; e < t->count; e++) sum += pow((double)m->state.grads[t->offset + e], 2);
    }
    return sqrt(sum);
}

// The model rounds sums of up to C, D or T terms in `real`, and means over rows and heads in double. `scale` is the
// magnitude of the rounded values.
static void expect_near(const Model *m, const char *why, int layer, const char *what, double got, double wanted,
                        double scale) {
    double epsilon = sizeof(real) == 8 ? 0x1p-53 : 0x1p-24;
    double tolerance =
        (m->plan.config.C + m->plan.config.D + m->plan.T) * epsilon + m->plan.B * m->plan.T * m->plan.dims.OH * 0x1p-53;
    EXPECT(fabs(got - wanted) <= tolerance * scale, "%s, %s, layer %d: %s is %.9g, not %.9g (error %.2g of %.2g)",
           m->plan.config.attention->name, why, layer, what, got, wanted, fabs(got - wanted), tolerance * scale);
}
// A micro-step as in case_loss, with documents of about five tokens.
static void documents_step(Model *m, const int *tokens, int B, int T) {
    int *starts = (int *)checked_calloc(B * T, sizeof(int));
    Separator s = {0, false};
    int *marks = case_tokens(B * T, 5, 9);
    for (int b = 0; b < B; b++) documents_find(starts + b * T, marks + b * T, T, s);
    model_micro_step(m, tokens, tokens + 1, starts, B, T, B * T);
    free(marks);
    free(starts);
}

// Statistics of layer l after a forward and a backward, which does not change the activations.
static void expect_layer_stats(const Model *m, const char *why, int l, const LayerStats *got, int B, int T) {
    const ModelConfig *c = &m->plan.config;
    const AttentionStats *g = &got->attention;
    bool *sampled = (bool *)checked_calloc(B * T, sizeof(bool));
    int rows = attention_stats_rows(B, T);
    double condition;
    for (int r = 0; r < rows; r++) sampled[r % B * T + 1 + (2 * r + 1) * (T - 1) / (2 * rows)] = true;
    LayerStats wanted = direct_stats(&condition, m, l, B, T, sampled);
    const AttentionStats *w = &wanted.attention;
    if (c->attention->signals)
        expect_near(m, why, l, "lambda", got->lambda, wanted.lambda, fmax(1, fabs(wanted.lambda)));
    else EXPECT(isnan(got->lambda), "%s has the factor of a second map", c->attention->name);
    expect_near(m, why, l, "context RMS", got->context_rms, wanted.context_rms, wanted.context_rms);
    expect_near(m, why, l, "effective mass", g->first_position_share, w->first_position_share, condition);
    expect_near(m, why, l, "largest logit", g->largest_logit, w->largest_logit, w->largest_logit);
    EXPECT(got->residual_max == wanted.residual_max, "%s, layer %d: largest magnitude %.9g, not %.9g",
           c->attention->name, l, got->residual_max, wanted.residual_max);
    free(sampled);
}

// Every case runs twice: with one document per sequence and with several.
static void test_statistics_definition(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int c = 0; c < 2 * STATS_CASE_COUNT; c++) {
            const ModelCase *mc = &stats_cases[c / 2];
            Model m;
            int *tokens = case_start(&m, mc, &attention_variants[v], FOR_TRAINING);
            case_loss(&m, tokens, mc->B, mc->T, true);
            if (c % 2) documents_step(&m, tokens, mc->B, mc->T);
            case_grad_norm(&m); // computes the layers' norms
            for (int l = 0; l < m.plan.config.L; l++) {
                LayerStats got = layer_stats(&m.plan, &m.acts, l, mc->B, mc->T);
                double grad_norm = direct_grad_norm(&m, l);
                expect_layer_stats(&m, mc->why, l, &got, mc->B, mc->T);
                expect_near(&m, mc->why, l, "gradient norm", squares_norm(&m.state, 1 + l, 1 + l), grad_norm,
                            grad_norm);
            }
            case_end(&m, tokens);
        }
}

static void test_statistics_sampled_rows(void) {
    static const int shapes[][2] = {{1, 2},  {1, 65},    {64, 2}, {65, 2},     {3, 41},
                                    {8, 65}, {64, 1024}, {2, 13}, {1, 1 << 24}};
    for (int i = 0; i < 9; i++) {
        int B = shapes[i][0], T = shapes[i][1], rows = attention_stats_rows(B, T), seen[64], in_first_half = 0,
            first_sequence = 0;
        int wanted = (int64_t)B * (T - 1) < 64 ? B * (T - 1) : 64;
        EXPECT(rows == wanted, "B %d, T %d: %d rows, not %d", B, T, rows, wanted);
        for (int r = 0; r < rows && r < 64; r++) {
            int b, t;
            attention_stats_row(r, rows, B, T, &b, &t);
            EXPECT(b >= 0 && b < B && t >= 1 && t < T, "B %d, T %d: row (%d,%d)", B, T, b, t);
            seen[r] = b * T + t;
            for (int other = 0; other < r; other++)
                EXPECT(seen[other] != seen[r], "B %d, T %d: row (%d,%d) twice", B, T, b, t);
            in_first_half += 2 * (t - 1) < T - 1;
            first_sequence += b == 0;
        }
        EXPECT(T == 2 || abs(2 * in_first_half - rows) <= B, "B %d, T %d: %d of %d rows in the first half", B, T,
               in_first_half, rows);
        EXPECT(abs(first_sequence * B - rows) < B, "B %d, T %d: %d of %d rows in the first sequence", B, T,
               first_sequence, rows);
    }
}

// Comparisons must not drop a NaN at any position.
static void test_statistics_nan(void) {
    floatX x[6];
    for (int at = 0; at < 6; at++) {
        for (int i = 0; i < 6; i++) x[i] = i == at ? (floatX)NAN : (floatX)(i + 1);
        double a = lambda_mean(x, 3, 2, 2, S_SIGMOID), b = rms_mean(x, 3, 1, 2, 2);
        EXPECT(isnan(a) && isnan(b), "NaN at %d: lambda %g, rms %g", at, a, b);
    }
    const ModelCase *mc = &stats_cases[0];
    Model m;
    int *tokens = case_start(&m, mc, variant_find("diff_v2"), FOR_TRAINING);
    case_loss(&m, tokens, mc->B, mc->T, true);
    m.acts.layers[0].fused[5 * m.plan.dims.fused_ld] = (floatX)NAN; // one query
    LayerStats s = layer_stats(&m.plan, &m.acts, 0, mc->B, mc->T);
    EXPECT(isnan(s.attention.first_position_share) && isnan(s.attention.largest_logit), "a NaN in a query: %g %g",
           s.attention.first_position_share, s.attention.largest_logit);
    case_end(&m, tokens);
}

static void test_statistics_one_position(void) {
    const ModelCase *mc = &model_cases[0];
    Model m;
    int *tokens = case_start(&m, mc, variant_find("diff_v2"), FOR_TRAINING);
    case_loss(&m, tokens, mc->B, mc->T, true);
    case_grad_norm(&m);
    LayerStats s = layer_stats(&m.plan, &m.acts, 0, mc->B, mc->T);
    EXPECT(isnan(s.attention.first_position_share) && isnan(s.attention.largest_logit), "attention: %g %g",
           s.attention.first_position_share, s.attention.largest_logit);
    EXPECT(s.lambda > 0 && s.context_rms > 0 && s.residual_max > 0 && squares_norm(&m.state, 1, 1) > 0,
           "the others: %g %g %g %g", s.lambda, s.context_rms, s.residual_max, squares_norm(&m.state, 1, 1));
    case_end(&m, tokens);
}

static void test_statistics_threads(void) {
    const ModelCase *mc = &stats_cases[1];
    Model m;
    int before = omp_get_max_threads();
    int *tokens = case_start(&m, mc, variant_find("diff_v2"), FOR_TRAINING);
    case_loss(&m, tokens, mc->B, mc->T, true);
    LayerStats stats[4];
    for (int threads = 1; threads <= 4; threads++) {
        omp_set_num_threads(threads);
        stats[threads - 1] = layer_stats(&m.plan, &m.acts, 1, mc->B, mc->T);
        EXPECT(memcmp(&stats[0], &stats[threads - 1], sizeof(stats[0])) == 0, "%d threads give different statistics",
               threads);
    }
    omp_set_num_threads(before);
    case_end(&m, tokens);
}

static const char *const stats_keys[] = {
    "kind",      "step",         "layer",     "lambda_mean", "context_rms_mean", "first_mass_effective",
    "logit_max", "residual_max", "grad_norm", "update_norm"};
enum { STATS_KEY_COUNT = sizeof(stats_keys) / sizeof(stats_keys[0]) };

static const char *const stats_model =
    "--layers 2 --hidden 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn 40 --seq-len 16 --batch-size 4 "
    "--total-batch 128 --schedule constant --warmup 2 --threads 2";

// Statistics do not change the run, and a validation in the same step does not change the statistics.
static void test_statistics_change_nothing(void) {
    TestDirectory d = program_data();
    ProgramResult r;
    static const char *const options[] = {"", "--stats-every 1",
                                          "--stats-every 1 --val-every 1 --val-steps 2 --val-data"};
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors"};
    for (int i = 0; i < 3; i++) {
        run_command(&r, "cd '%s' && %s --train-data train.bin %s --steps 4 --out run%d %s %s", d.path,
                    test_program_path(), stats_model, i, options[i], i == 2 ? "val.bin" : "");
        EXPECT_STATUS(r, 0);
        for (int f = 0; f < 2; f++) {
            run_command(&r, "cd '%s' && cmp run0/checkpoints/step_00000004/%s run%d/checkpoints/step_00000004/%s",
                        d.path, files[f], i, files[f]);
            EXPECT(r.status == 0, "\"%s\" differs with \"%s\": %.200s", files[f], options[i], r.out);
        }
        run_command(&r,
                    "cd '%s' && for r in run%d run0; do grep train $r/log.jsonl | cut -d, -f1-4 > $r/train; done; cmp "
                    "run%d/train run0/train",
                    d.path, i, i);
        EXPECT(r.status == 0, "the losses differ with \"%s\": %.200s", options[i], r.out);
    }
    run_command(&r,
                "cd '%s' && for i in 1 2; do grep stats run$i/log.jsonl > run$i/stats; done; test $(wc -l < "
                "run1/stats) = 8 && cmp run1/stats run2/stats",
                d.path);
    EXPECT(r.status == 0, "statistics differ when the step is validated: %.200s%.200s", r.out, r.err);
}

// The learning rate is too small to change a weight, so the second micro-step of a step equals a step of its own.
static void test_statistics_last_micro_step(void) {
    static const char *const options[] = {"--total-batch 128 --steps 2 --stats-every 2",
                                          "--total-batch 64 --steps 4 --stats-every 4",
                                          "--total-batch 64 --steps 3 --stats-every 3"};
    static const char *const keys[] = {"lambda_mean", "context_rms_mean", "first_mass_effective", "residual_max"};
    TestDirectory d = program_data();
    ProgramResult r;
    double x[3][4];
    for (int i = 0; i < 3; i++) {
        const char *out = test_text("run%d", i);
        run_command(&r, "%s --train-data '%s/train.bin' %s --out '%s/%s' --attention diff_v2 --lr 1e-30 %s",
                    test_program(), d.path, small_model, d.path, out, options[i]);
        EXPECT_STATUS(r, 0);
        cJSON *records = read_records(&d, out, "stats");
        const cJSON *last = cJSON_GetArrayItem(records, cJSON_GetArraySize(records) - 1);
        for (int k = 0; k < 4; k++) x[i][k] = record_number(last, keys[k]);
        cJSON_Delete(records);
    }
    for (int k = 0; k < 4; k++)
        EXPECT(x[0][k] == x[1][k] && x[0][k] != x[2][k],
               "%s is %.9g after two micro-steps, %.9g after the second alone, %.9g after the first", keys[k], x[0][k],
               x[1][k], x[2][k]);
}

// Reads a record as run_log_stats writes it. Magnitudes have the 9 digits that a float needs.
static LayerStats read_layer_stats(const cJSON *record, double *grad_norm) {
    double value[STATS_KEY_COUNT];
    for (int k = 3; k < STATS_KEY_COUNT; k++) value[k] = record_number(record, stats_keys[k]);
    *grad_norm = value[8];
    return (LayerStats){value[3], value[4], {value[5], value[6]}, (double)(float)value[7]};
}

// What step 1 reports, on data of a single batch: its loss is that of a validation before it and of --dump-grads, its
// norms are those of the gradients in that file, and the logged statistics of each layer equal a direct computation.
static void test_statistics_of_first_step(void) {
    static const char *const models[] = {
        "--attention diff_v2 --doc-mask --separator 10 --no-tie-embeddings",
        "--attention baseline --window 5 --full-every 2 --doc-mask --separator 10",
        "--attention diff_v2_layer_lambda --window 5 --yoco --qk-norm --doc-mask --separator 10",
        "--experts 4 --experts-active 2 --expert-ffn 16 --dense-layers 1 --doc-mask --separator 10",
    };
    TestDirectory d = test_make_directory();
    ProgramResult r;
    write_grammar_shard(test_text("%s/train.bin", d.path), 4 * 16 + 1, 1);
    for (int i = 0; i < 4; i++) {
        const char *what = models[i];
        run_command(&r, "cd '%s' && %s --train-data train.bin %s %s --dump-grads grads", d.path, test_program_path(),
                    small_model, what);
        double loss = 0, grad_norm = 0, squares = 0;
        EXPECT(r.status == 0 && sscanf(r.out, "loss %lf", &loss) == 1, "%s: status %d: %.300s", what, r.status, r.err);
        InnerRun *inner = inner_open(&d, "%s --val-data %s/train.bin --val-steps 1 --stats-every 9 --lr 1e-30 --out %s",
                                     what, d.path, d.path);
        Model *m = &inner->run.model;
        log_open(&inner->run.log, d.path, O_CREAT | O_TRUNC);
        EvaluationModel measured = evaluation_model(m);
        const Inputs *data = &inner->run.data;
        double val_loss =
            validate(&measured, &inner->run.data.val, validation_windows(data, &inner->run.options), NULL).loss;
        StepResult step = run_step(&inner->run);
        run_log_stats(&inner->run, &step);
        SafeTensors *saved = safetensors_open(test_text("%s/grads", d.path));
        for (int t = 0; t < m->plan.tensors.count; t++) {
            const Tensor *x = &m->plan.tensors.tensors[t];
            safetensors_read(saved, x->name, 0, x->count, m->state.grads + x->offset, DTYPE_F32);
            for (size_t e = 0; e < x->count; e++) squares += pow((double)m->state.grads[x->offset + e], 2);
        }
        safetensors_close(saved);
        EXPECT(fabs(step.loss - loss) < 1e-6 * loss && fabs(val_loss - loss) < 1e-6 * loss,
               "%s: loss %.9g, of a validation %.9g, of --dump-grads %.9g", what, step.loss, val_loss, loss);
        EXPECT(fabs(step.grad_norm - sqrt(squares)) < 1e-5 * step.grad_norm, "%s: norm %.9g, of --dump-grads %.9g",
               what, step.grad_norm, sqrt(squares));
        cJSON *records = read_records(&d, ".", "stats");
        for (int l = 0; l < m->plan.config.L; l++) {
            const cJSON *record = cJSON_GetArrayItem(records, l);
            LayerStats logged = read_layer_stats(record, &grad_norm);
            EXPECT(record_number(record, "layer") == l, "%s: record %d is of another layer", what, l);
            expect_layer_stats(m, what, l, &logged, 4, 16);
            double wanted = direct_grad_norm(m, l);
            EXPECT(fabs(grad_norm - wanted) < 1e-5 * wanted, "%s, layer %d: gradient norm %.9g, of --dump-grads %.9g",
                   what, l, grad_norm, wanted);
        }
        EXPECT(cJSON_GetArraySize(records) == m->plan.config.L, "%s: %d records", what, cJSON_GetArraySize(records));
        cJSON_Delete(records);
        inner_close(inner);
    }
}

static const Test stats_tests[] = {
    {"statistics of a layer equal a direct computation, for every variant", test_statistics_definition},
    {"the sampled query rows are distinct and evenly distributed", test_statistics_sampled_rows},
    {"a NaN propagates to the statistics", test_statistics_nan},
    {"a sequence of one position has no attention statistics", test_statistics_one_position},
    {"statistics do not depend on the number of threads", test_statistics_threads},
};
static const Test stats_program_tests[] = {
    {"statistics do not change the run, bit for bit", test_statistics_change_nothing},
    {"statistics describe the last micro-step", test_statistics_last_micro_step},
    {"the loss, norms and statistics of step 1 equal those of a validation and --dump-grads",
     test_statistics_of_first_step},
};
