/*
probe.h: tests of --probe: matrices with known singular values, maps and blocks of o_proj whose statistics follow from a
calculation by hand, classes of tokens, all variants, and what the program writes.
*/
#ifndef TESTS_PROBE_H
#define TESTS_PROBE_H
#include "harness.h"
#include "model.h"
#include "program.h"

// ---- singular values

// a (I - 2 v v'/v'v), or with `left` (I - 2 v v'/v'v) a: a reflection keeps singular values
static void reflect(double *a, int n, uint64_t seed, bool left) {
    TestRandom r = {seed};
    double v[64], square = 0;
    for (int i = 0; i < n; i++) v[i] = test_random_real(&r), square += v[i] * v[i];
    for (int i = 0; i < n; i++) {
        double dot = 0;
        for (int j = 0; j < n; j++) dot += a[left ? j * n + i : i * n + j] * v[j];
        for (int j = 0; j < n; j++) a[left ? j * n + i : i * n + j] -= 2 * dot / square * v[j];
    }
}

// Cosines below 1e-10 give relative errors below n 1e-10; rounding gives errors of n epsilon times the largest value,
// for each of the two reflections and about 10 sweeps.
static void test_singular_values(void) {
    static const int sizes[] = {1, 2, 7, 64};
    for (int c = 0; c < 4; c++)
        for (int ratio = 0; ratio < 3; ratio++) { // equal values; from 1 to 2^-(n/2); half of them 0
            double a[64 * 64], want[64], got[64], norms[64];
            int n = sizes[c];
            memset(a, 0, sizeof(a));
            for (int i = 0; i < n; i++)
                a[i * n + i] = want[i] = ratio == 0 ? 3 : ratio == 1 ? pow(2, -i / 2.0) : 2 * i < n ? 1.0 + i : 0;
            reflect(a, n, 5, true);
            reflect(a, n, 6, false);
            singular_values(got, a, norms, n);
            qsort(want, n, sizeof(double), ascending_doubles);
            qsort(got, n, sizeof(double), ascending_doubles);
            for (int i = 0; i < n; i++) {
                double tolerance = n * 1e-10 * want[i] + 12 * n * DBL_EPSILON * want[n - 1];
                EXPECT(fabs(got[i] - want[i]) <= tolerance, "%d, case %d: value %d is %.17g, wanted %.17g", n, ratio, i,
                       got[i], want[i]);
            }
        }
}

static void test_effective_rank(void) {
    enum { T = 64 };
    double a[T * T] = {0};
    const double tolerance = T * T * DBL_EPSILON; // of exp of a sum of T terms
    EXPECT(isnan(effective_rank(a, T)), "zeros have a rank");
    for (int t = 0; t < T; t++) a[t * T] = 1; // every row attends to the first position
    double rank = effective_rank(a, T);
    EXPECT(fabs(rank - 1) < tolerance, "the first position alone: %.17g", rank);
    memset(a, 0, sizeof(a));
    for (int t = 0; t < T; t++) a[t * T + t] = 0.25;
    rank = effective_rank(a, T);
    EXPECT(fabs(rank - T) < T * tolerance, "the own position alone: %.17g", rank);
    memset(a, 0, sizeof(a));
    a[0] = 3, a[T + 1] = -1; // 3/4 and 1/4
    rank = effective_rank(a, T);
    double want = exp(0.75 * log(4.0 / 3) + 0.25 * log(4));
    EXPECT(fabs(rank - want) < tolerance, "values 3 and 1: %.17g, wanted %.17g", rank, want);
}

// ---- maps

enum { PROBE_T = 6 };
// Uniform rows that decay towards the past (step > 0) or the present (step < 0), within a window (0: none).
static void linear_map(float *map, double step, int window) {
    memset(map, 0, PROBE_T * PROBE_T * sizeof(float));
    for (int t = 0; t < PROBE_T; t++) {
        int first = window ? max_int(0, t - window + 1) : 0, n = t + 1 - first;
        for (int j = first; j <= t; j++)
            map[t * PROBE_T + j] = (float)(1.0 / n + step * (j - first - (n - 1) / 2.0) / (n * n));
    }
}
static MapProbe probe_of_pair(const float *a1, const float *a2, double s, int window) {
    HostAttention m;
    MapProbe p;
    floatX lambda[PROBE_T];
    double effective[PROBE_T * PROBE_T];
    memset(&m, 0, sizeof(m));
    memset(&p, 0, sizeof(p));
    for (int t = 0; t < PROBE_T; t++) lambda[t] = (floatX)s;
    m.shape.T = PROBE_T, m.shape.window = window, m.lambda = lambda, m.ldl = 1;
    map_pair_add(&p, effective, a1, a2, &m, 0, 0);
    return p;
}

static void test_maps_by_hand(void) {
    static const double factors[] = {-1.5, -0.5, 0, 0.25, 0.5, 1, 3};
    const double tolerance = 8 * 0x1p-24; // elements are floats
    float up[PROBE_T * PROBE_T], down[PROBE_T * PROBE_T];
    linear_map(up, 1, 0);
    linear_map(down, -1, 0);
    for (int i = 0; i < 7; i++) { // equal maps: E = (1 - s) A
        double s = factors[i], want = 1 - fabs(1 - s) / (1 + fabs(s));
        MapProbe p = probe_of_pair(up, up, s, 0);
        EXPECT(fabs(probe_mean(p.correlation) - 1) < 1e-9 && p.correlation.count == PROBE_T - 2,
               "s %g: correlation %.12g of %d rows", s, probe_mean(p.correlation), (int)p.correlation.count);
        EXPECT(fabs(probe_mean(p.cancelled) - want) < tolerance && p.cancelled.count == PROBE_T,
               "s %g: cancelled %.9g, wanted %.9g", s, probe_mean(p.cancelled), want);
        EXPECT(p.negative.count == (s == 1 ? 0 : PROBE_T) && p.negative.sum == (s > 1 ? PROBE_T : 0),
               "s %g: negative %g of %d rows", s, p.negative.sum, (int)p.negative.count);
    }
    MapProbe p = probe_of_pair(up, down, 0.5, 0);
    EXPECT(fabs(probe_mean(p.correlation) + 1) < 1e-6, "opposite maps: correlation %.12g", probe_mean(p.correlation));
    float uniform[PROBE_T * PROBE_T];
    linear_map(uniform, 0, 0);
    for (int i = 0; i < PROBE_T * PROBE_T; i += 2) uniform[i] = nextafterf(uniform[i], 1);
    p = probe_of_pair(up, uniform, 0.5, 0);
    EXPECT(p.correlation.count == 0, "a uniform map correlates in %d rows", (int)p.correlation.count);
    linear_map(up, 1, 2);
    p = probe_of_pair(up, up, 0.5, 2);
    EXPECT(p.correlation.count == 0 && p.cancelled.count == PROBE_T, "2 visible keys: %d rows with a correlation",
           (int)p.correlation.count);
    linear_map(up, 1, 3); // 3 visible keys: rows 1/3 + step (-1, 0, 1)/9 from row 2 on
    linear_map(down, -1, 3);
    down[1 * PROBE_T] = up[1 * PROBE_T], down[1 * PROBE_T + 1] = up[1 * PROBE_T + 1];
    p = probe_of_pair(up, down, 2, 3); // E = A1 - 2 A2 = (2-8, 3-6, 4-4)/9 = (-6, -3, 0)/9; in rows 0 and 1, -A1
    EXPECT(p.correlation.count == PROBE_T - 2 && probe_mean(p.negative) == 1 &&
               fabs(probe_mean(p.cancelled) - (1 - 1 / 3.0)) < tolerance,
           "windows of 3, s 2: %d rows, negative %.9g, cancelled %.9g", (int)p.correlation.count,
           probe_mean(p.negative), probe_mean(p.cancelled));
    p = probe_of_pair(up, down, 0.8, 3); // E = (2 - 3.2, 3 - 2.4, 4 - 1.6)/9 = (-1.2, 0.6, 2.4)/9
    double cancelled = (2 * (1 - 0.2 / 1.8) + 4 * (1 - 4.2 / 9 / 1.8)) / 6, negative = 4 * (1.2 / 4.2) / 6;
    EXPECT(fabs(probe_mean(p.cancelled) - cancelled) < tolerance && fabs(probe_mean(p.negative) - negative) < tolerance,
           "windows of 3, s 0.8: cancelled %.9g and negative %.9g, wanted %.9g and %.9g", probe_mean(p.cancelled),
           probe_mean(p.negative), cancelled, negative);
}

// ---- blocks of o_proj

enum { BLOCK_C = 40, BLOCK_D = 8 };
// o_proj (C, heads*D) of random elements; head `to` is `factor` times head `from`, unless factor is 0.
static floatX *random_blocks(int heads, uint64_t seed, int to, int from, double factor) {
    TestRandom r = {seed};
    int ld = heads * BLOCK_D;
    floatX *w = (floatX *)checked_calloc((size_t)BLOCK_C * ld, sizeof(floatX));
    for (int i = 0; i < BLOCK_C * ld; i++) w[i] = (floatX)test_random_real(&r);
    for (int i = 0; i < BLOCK_C * BLOCK_D && factor != 0; i++) {
        int c = i / BLOCK_D * ld, d = i % BLOCK_D;
        w[c + to * BLOCK_D + d] = (floatX)factor * w[c + from * BLOCK_D + d];
    }
    return w;
}
static SubtractionProbe probe_of_blocks(int heads, int groups, uint64_t seed, int to, int from, double factor) {
    floatX *w = random_blocks(heads, seed, to, from, factor);
    SubtractionProbe s = probe_subtraction(w, BLOCK_C, heads, groups, BLOCK_D, seed);
    free(w);
    return s;
}

static void test_subtraction_of_blocks(void) {
    const double least = 1.0 / (1 + PROBE_DRAWS);
    SubtractionProbe s = probe_of_blocks(2, 1, 1, 1, 0, -0.5);
    EXPECT(s.heads_in_group == 2 && fabs(s.adjacent.observed - 1) < 1e-14 && s.adjacent.p == least,
           "W1 = -W0 / 2: adjacent %.17g, p %g", s.adjacent.observed, s.adjacent.p);
    EXPECT(fabs(s.closest.observed - 1) < 1e-14 && s.closest.p == least, "W1 = -W0 / 2: closest %.17g, p %g",
           s.closest.observed, s.closest.p);
    EXPECT(s.adjacent.low < s.adjacent.mean && s.adjacent.mean < s.adjacent.high && s.adjacent.high < 0.5,
           "permuted: %g, %g, %g", s.adjacent.low, s.adjacent.mean, s.adjacent.high);
    s = probe_of_blocks(2, 1, 1, 1, 0, 2);
    EXPECT(fabs(s.adjacent.observed + 1) < 1e-14 && s.adjacent.p == 1, "W1 = 2 W0: adjacent %.17g, p %g",
           s.adjacent.observed, s.adjacent.p);
    s = probe_of_blocks(2, 1, 1, 1, 0, 1e-320); // a block of zeros: all draws are equal to the observed value
    EXPECT(s.adjacent.observed == 0 && s.adjacent.p == 1, "W1 = 0: adjacent %g, p %g", s.adjacent.observed,
           s.adjacent.p);
    s = probe_of_blocks(4, 2, 1, 2, 1, -1); // opposite heads of different groups
    EXPECT(s.closest.observed < 0.5 && s.adjacent.observed < 0.5, "of two groups: %g and %g", s.closest.observed,
           s.adjacent.observed);
    s = probe_of_blocks(4, 1, 1, 2, 1, -1); // no pair of adjacent heads, but two of four heads have a closest one
    EXPECT(s.closest.observed > 0.5 && s.closest.p == least && s.adjacent.observed < 0.5, "heads 1 and 2: %g and %g",
           s.closest.observed, s.adjacent.observed);
    s = probe_of_blocks(6, 2, 1, 2, 0, -1);
    EXPECT(s.heads_in_group == 3 && isnan(s.adjacent.observed) && isnan(s.adjacent.p) && s.closest.observed > 1 / 3.0,
           "groups of 3: %g and %g", s.adjacent.observed, s.closest.observed);
    s = probe_of_blocks(2, 2, 1, 1, 0, -1);
    EXPECT(s.heads_in_group == 1, "one head per group: %d", s.heads_in_group);
}

// p is uniform without a relation: the mean of 20 has a standard deviation of 1/sqrt(240). Observed values are those of
// a direct calculation.
static void test_subtraction_of_random_blocks(void) {
    double mean[2] = {0, 0}, sorted[PROBE_DRAWS];
    for (uint64_t seed = 1; seed <= 20; seed++) {
        SubtractionProbe s = probe_of_blocks(4, 2, seed, 0, 0, 0);
        EXPECT(s.adjacent.p > 2e-3 && s.closest.p > 2e-3, "seed %d: p %g and %g", (int)seed, s.adjacent.p, s.closest.p);
        mean[0] += s.adjacent.p / 20, mean[1] += s.closest.p / 20;
        floatX *w = random_blocks(4, seed, 0, 0, 0);
        double cosines = 0;
        for (int pair = 0; pair < 2; pair++) {
            double xx = 0, yy = 0, xy = 0;
            for (int i = 0; i < BLOCK_C * BLOCK_D; i++) {
                const floatX *x = w + i / BLOCK_D * 4 * BLOCK_D + 2 * pair * BLOCK_D + i % BLOCK_D;
                xx += (double)x[0] * (double)x[0], yy += (double)x[BLOCK_D] * (double)x[BLOCK_D];
                xy += (double)x[0] * (double)x[BLOCK_D];
            }
            cosines -= xy / sqrt(xx * yy) / 2;
        }
        EXPECT(fabs(cosines - s.adjacent.observed) < 1e-14 && fabs(cosines - s.closest.observed) < 1e-14,
               "seed %d: adjacent %.17g and closest %.17g, wanted %.17g", (int)seed, s.adjacent.observed,
               s.closest.observed, cosines);
        free(w);
    }
    for (int i = 0; i < 2; i++) EXPECT(fabs(mean[i] - 0.5) < 4 / sqrt(240), "mean p %g", mean[i]);
    for (int i = 0; i < PROBE_DRAWS; i++) sorted[i] = i;
    EXPECT(fabs(quantile_of(sorted, PROBE_DRAWS, 0.025) - 24.975) < 1e-9 &&
               fabs(quantile_of(sorted, PROBE_DRAWS, 1) - 999) < 1e-9,
           "quantiles %g and %g", quantile_of(sorted, PROBE_DRAWS, 0.025), quantile_of(sorted, PROBE_DRAWS, 1));
}

// ---- classes of tokens

static void test_punctuation(void) {
    static const struct {
        const char *text;
        bool is;
    } cases[] = {{",", true},    {" ,", true},  {"...\n", true},         {"}\t;", true},   {"", false},
                 {" \n", false}, {"a.", false}, {"\xE2\x80\xA6", false}, {".\xC3", false}, {"7", false}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        EXPECT(token_is_punctuation((const unsigned char *)cases[i].text, strlen(cases[i].text)) == cases[i].is,
               "text %d", (int)i);
}

// 100 bytes: of them may 5 be rare. "xyz" are rare with 1 + 2 + 2; of the three bytes that occur twice, the two larger.
static void test_token_classes(void) {
    static const char *const texts[] = {"xyyzzqqq,,;", "uuvvwwqqq,,;"};
    static const char *const rare[] = {"xyz", "wv"};
    for (int i = 0; i < 2; i++)
        for (int V = 256; V <= 257; V++) {
            int tokens[100], length = (int)strlen(texts[i]);
            int64_t counts[257] = {0};
            bool text = false;
            for (int t = 0; t < 100; t++) tokens[t] = t < length ? texts[i][t] : t % 2 ? 'e' : ' ';
            for (int t = 0; t < 100; t++) counts[tokens[t]]++;
            unsigned char *classes = token_classes(counts, tokens, 100, V, NULL, &text);
            EXPECT(text == (V == 256), "a vocabulary of %d has %s text", V, text ? "a" : "no");
            for (int t = 0; t < 100 && V == 256; t++) {
                int c = tokens[t], want = c == ',' || c == ';'         ? TOKENS_PUNCTUATION
                                          : strchr(rare[i], c) != NULL ? TOKENS_RARE
                                                                       : TOKENS_OTHER;
                EXPECT(classes[c] == want, "'%s': '%c' is %s", texts[i], c, token_class_names[classes[c]]);
            }
            EXPECT(V == 256 || (classes[';'] == TOKENS_RARE && classes['e'] == TOKENS_OTHER), "without text: ';' is %s",
                   token_class_names[classes[';']]);
            free(classes);
        }
}

// ---- models

// As probe_visit, with a number of threads that the forward does not have.
static int probe_threads;
static void probe_visit_with_threads(void *data, int l) {
    int before = omp_get_max_threads();
    omp_set_num_threads(probe_threads);
    probe_visit(data, l);
    if (l == 0) probe_weights((Probe *)data);
    omp_set_num_threads(before);
}

// Probes a model of the case on its B sequences. layers, factors [L]: factors that follow from the parameters, or NaN.
static void probe_case(const ModelCase *mc, const AttentionVariant *variant, LayerProbe *layers, double *factors) {
    Model model;
    Probe p;
    int *tokens = case_start(&model, mc, variant, FOR_EVALUATION);
    memset(&p, 0, sizeof(p));
    memset(layers, 0, (size_t)mc->L * sizeof(LayerProbe));
    EvaluationModel m = evaluation_model(&model);
    p.model = m;
    p.params = model.state.params;
    p.seed = 1;
    p.T = mc->T, p.batch = p.windows = mc->B;
    p.layers = layers;
    p.classes = (unsigned char *)checked_calloc((size_t)mc->B * mc->T, 1);
    for (int i = 0; i < mc->B * mc->T; i++)
        p.classes[i] = (unsigned char)(i % mc->T == 0 ? TOKENS_FIRST : i % 3 ? TOKENS_OTHER : TOKENS_RARE);
    model_forward_tokens(&model, tokens, mc->B, mc->T, probe_visit_with_threads, &p);
    for (int l = 0; l < mc->L; l++) {
        const Tensor *t = tensor_of(&model.plan.tensors, T_OWN_LAMBDA, l);
        double sum = 0;
        for (size_t i = 0; t && i < t->count; i++)
            sum += factor_of((double)model.state.params[t->offset + i], variant->factor) / (double)t->count;
        factors[l] = variant->lambda == LAMBDA_ONE ? 1 : t ? sum : NAN;
    }
    free(p.classes);
    case_end(&model, tokens);
}

static bool within(ProbeMean m, double low, double high) {
    double x = probe_mean(m), rounding = 1e-5;
    return x >= low - rounding && x <= high + rounding;
}

static void expect_layer_probe(const LayerProbe *p, const ModelCase *mc, const AttentionVariant *v, double factor,
                               const char *what) {
    bool pairs = v->noise != NOISE_NONE;
    const MapProbe *m = &p->maps;
    int heads = case_config(mc, v).NH / v->merge;
    EXPECT(m->broken == 0 && within(m->rank[RANK_EFFECTIVE], 1, mc->T), "%s: rank %g", what,
           probe_mean(m->rank[RANK_EFFECTIVE]));
    EXPECT(m->rank[RANK_EFFECTIVE].count == mc->B * heads, "%s: ranks of %d maps", what,
           (int)m->rank[RANK_EFFECTIVE].count);
    if (pairs) {
        EXPECT(within(m->correlation, -1, 1) && within(m->cancelled, 0, 1) && within(m->negative, 0, 1) &&
                   within(m->rank[RANK_SIGNAL], 1, mc->T) && within(m->rank[RANK_NOISE], 1, mc->T),
               "%s: %g %g %g %g %g", what, probe_mean(m->correlation), probe_mean(m->cancelled),
               probe_mean(m->negative), probe_mean(m->rank[RANK_SIGNAL]), probe_mean(m->rank[RANK_NOISE]));
        EXPECT(m->cancelled.count == mc->B * heads * mc->T && m->rank[RANK_NOISE].count * v->signals == mc->B * heads,
               "%s: %d rows, %d noise maps", what, (int)m->cancelled.count, (int)m->rank[RANK_NOISE].count);
    } else
        EXPECT(m->correlation.count == 0 && m->cancelled.count == 0 && m->rank[RANK_SIGNAL].count == 0,
               "%s: statistics of pairs", what);
    double sum = 0;
    int64_t count = 0;
    for (int i = TOKENS_FIRST; i < TOKEN_CLASSES; i++)
        sum += p->lambda[i].mean * (double)p->lambda[i].count, count += p->lambda[i].count;
    const LambdaProbe *all = &p->lambda[TOKENS_ALL];
    EXPECT(count == all->count && count == (pairs ? mc->B * mc->T * heads : 0), "%s: %d factors, of %d", what,
           (int)count, (int)all->count);
    EXPECT(p->lambda[TOKENS_FIRST].count == (pairs ? mc->B * heads : 0), "%s: %d factors at first positions", what,
           (int)p->lambda[TOKENS_FIRST].count);
    EXPECT(!pairs || fabs(sum / (double)count - all->mean) < 1e-12, "%s: factor %.15g, by classes %.15g", what,
           all->mean, sum / (double)count);
    EXPECT(isnan(factor) || fabs(all->mean - factor) < 1e-6, "%s: factor %.9g, wanted %.9g", what, all->mean, factor);
    EXPECT((p->subtraction.heads_in_group > 1) == !pairs, "%s: %d heads in a group", what,
           p->subtraction.heads_in_group);
}

static const ModelCase probe_cases[] = {
    {"two key/value heads", 13, 24, 2, 4, 2, 8, 20, 2, 11, true, 0, 0, false, false},
    {"windows of 3, every second layer full", 13, 24, 2, 4, 2, 8, 20, 2, 11, true, 3, 2, false, false},
    {"YOCO with QK-norm", 13, 24, 2, 4, 2, 8, 20, 2, 11, true, 3, 0, true, true},
};
static void test_probe_of_variants(void) {
    LayerProbe layers[2], again[2];
    double factors[2];
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int i = 0; i < 3; i++) {
            const ModelCase *mc = &probe_cases[i];
            const AttentionVariant *variant = &attention_variants[v];
            char what[200];
            probe_threads = 3;
            probe_case(mc, variant, again, factors);
            probe_threads = 1;
            probe_case(mc, variant, layers, factors);
            EXPECT(memcmp(layers, again, sizeof(layers)) == 0, "%s, %s: another number of threads, other results",
                   variant->name, mc->why);
            for (int l = 0; l < mc->L; l++) {
                FORMAT(what, "%s, %s, layer %d", variant->name, mc->why, l);
                expect_layer_probe(&layers[l], mc, variant, factors[l], what);
            }
        }
}

// ---- the program

// The number at part.key of layer 1; NaN: it is null, or not there.
static double probe_value(const cJSON *json, const char *part, const char *key) {
    const cJSON *layer = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(json, "layers"), 1);
    double x = NAN;
    json_get_number(cJSON_GetObjectItemCaseSensitive(layer, part), key, &x);
    return x;
}
static cJSON *probe_run(const ProgramData *d, const char *run, const char *options) {
    ProgramResult r;
    run_command(&r,
                "cd '%s' && %s --init %s/checkpoints/step_00000002 --probe probe.json --val-data val.bin --val-steps 3 "
                "--batch-size 3 --seq-len 40 --threads 1 %s && ! ls *.tmp 2>/dev/null && cat probe.json >&2",
                d->dir.path, test_program_path(), run, options);
    EXPECT(r.status == 0 && strstr(r.out, "parameters: the first 40 tokens of 9 windows"), "status %d: %.300s",
           r.status, r.out);
    cJSON *json = json_parse(r.err, strlen(r.err));
    EXPECT(json != NULL, "no JSON: %.300s", r.err);
    return json;
}

static void test_probe_output(void) {
    ProgramData d = program_data();
    ProgramResult r;
    double step = 0, windows = 0, positions = 0;
    run_trainer(&r, &d, "pairs", "--steps 2 --attention diff_v2");
    EXPECT_STATUS(r, 0);
    run_trainer(&r, &d, "plain", "--steps 2 --attention baseline");
    EXPECT_STATUS(r, 0);
    cJSON *pairs = probe_run(&d, "pairs", ""), *plain = probe_run(&d, "plain", "");
    json_get_number(pairs, "step", &step);
    json_get_number(pairs, "windows", &windows);
    json_get_number(pairs, "positions", &positions);
    EXPECT(step == 2 && windows == 9 && positions == 40, "step %g, %g windows, %g positions", step, windows, positions);
    const cJSON *layer = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(pairs, "layers"), 1);
    const cJSON *lambda = cJSON_GetObjectItemCaseSensitive(layer, "lambda");
    double first = 0, all = 0, mean = 0;
    json_get_number(cJSON_GetObjectItemCaseSensitive(lambda, "first"), "count", &first);
    json_get_number(cJSON_GetObjectItemCaseSensitive(lambda, "all"), "count", &all);
    json_get_number(cJSON_GetObjectItemCaseSensitive(lambda, "punctuation"), "mean", &mean);
    EXPECT(first == 9 * 2 && all == 9 * 40 * 2 && mean > 0.4 && mean < 0.6, "%g and %g factors, punctuation %g", first,
           all, mean);
    EXPECT(probe_value(pairs, "maps", "cancelled") > 0.5 && probe_value(pairs, "maps", "effective_rank_noise") > 1 &&
               cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(layer, "subtraction")),
           "cancelled %g", probe_value(pairs, "maps", "cancelled"));
    layer = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(plain, "layers"), 1);
    EXPECT(probe_value(plain, "subtraction", "heads_in_group") == 2 &&
               probe_value(plain, "subtraction", "adjacent_p") > 0 && isnan(probe_value(plain, "maps", "cancelled")) &&
               probe_value(plain, "maps", "effective_rank") > 1 &&
               cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(layer, "lambda")),
           "a Transformer: p %g", probe_value(plain, "subtraction", "adjacent_p"));
    cJSON_Delete(pairs);
    cJSON_Delete(plain);
    test_remove_directory(&d.dir);
}

static void test_probe_refusals(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_trainer(&r, &d, "run", "--steps 2");
    EXPECT_STATUS(r, 0);
    const char *trainer = test_program_path(), *dir = d.dir.path;
    run_command(&r, "cd '%s' && %s --probe x --val-data val.bin", dir, trainer);
    EXPECT_ONE_LINE(r, 2, "--probe requires --init DIR");
    run_command(&r, "cd '%s' && %s --probe x --init run/checkpoints/step_00000002", dir, trainer);
    EXPECT_ONE_LINE(r, 2, "--probe requires --val-data DATA");
    run_command(&r, "cd '%s' && %s --probe x --eval --init run/checkpoints/step_00000002 --val-data val.bin", dir,
                trainer);
    EXPECT_ONE_LINE(r, 2, "--eval and --probe are mutually exclusive");
    run_command(&r, "cd '%s' && %s --probe no/x --init run/checkpoints/step_00000002 --val-data val.bin", dir, trainer);
    EXPECT_ONE_LINE(r, 1, "cannot create no/x: ");
    run_command(&r, // FILE is replaced as a whole, or not at all
                "cd '%s' && echo old >x && (ulimit -f 0; %s --probe x --init run/checkpoints/step_00000002 --val-data "
                "val.bin 2>&1 >/dev/null; echo status $?) | cat >&2; grep -x old x; ls | grep tmp",
                dir, trainer);
    EXPECT(strstr(r.err, "cannot write x: File too large\nstatus 1") && strcmp(r.out, "old\n") == 0,
           "a file size limit: stdout %.200s, stderr %.300s", r.out, r.err);
    test_remove_directory(&d.dir);
}

static const Test probe_tests[] = {
    {"singular values of known matrices are correct", test_singular_values},
    {"the effective rank of a map of one position is 1, and of the identity T", test_effective_rank},
    {"statistics of a pair of maps equal a calculation by hand", test_maps_by_hand},
    {"opposite blocks of o_proj are found, in one group only", test_subtraction_of_blocks},
    {"random blocks of o_proj give uniform p, and the cosines of a direct calculation",
     test_subtraction_of_random_blocks},
    {"punctuation is ASCII punctuation apart from white space", test_punctuation},
    {"rare tokens are the least frequent ones that are not punctuation", test_token_classes},
    {"all variants are probed, with windows, YOCO and QK-norm, by any number of threads", test_probe_of_variants},
};
enum { PROBE_TEST_COUNT = sizeof(probe_tests) / sizeof(probe_tests[0]) };
static const Test probe_program_tests[] = {
    {"--probe writes JSON of pairs and of a Transformer", test_probe_output},
    {"--probe refuses what it cannot do in one line", test_probe_refusals},
};
enum { PROBE_PROGRAM_TEST_COUNT = sizeof(probe_program_tests) / sizeof(probe_program_tests[0]) };
#endif
