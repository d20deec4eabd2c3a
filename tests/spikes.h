/*
spikes.h: tests of the spike detectors, on series whose z-scores are known, and of the steps that are left out:
on a trainer inside this process, where a parameter can be made NaN, and on whole runs, whose log is judged anew.
*/
#ifndef TESTS_SPIKES_H
#define TESTS_SPIKES_H
#include "harness.h"
#include "program.h"

static void enter_series(SpikeDetector *d, int count, double even, double odd) {
    for (int i = 0; i < count; i++) spike_enter(d, i % 2 ? odd : even);
}
// The scale is (b - a) / QUARTILE_Z: a third of the values is b, the others a.
static void enter_levels(SpikeDetector *d, int count, double a, double b) {
    for (int i = 0; i < count; i++) spike_enter(d, i % 3 == 0 ? b : a);
}

static void test_spike_threshold(void) {
    static const int counts[] = {128, 129, 200, 700};
    for (int k = 0; k < 4; k++) {
        SpikeDetector d;
        memset(&d, 0, sizeof(d));
        enter_levels(&d, counts[k], 3, 3 + QUARTILE_Z); // median 3, scale 1 but for rounding
        double at = spike_observe(&d, 10 + 1e-14), below = spike_observe(&d, 10 - 1e-14), low = spike_observe(&d, -100);
        EXPECT(fabs(at - 7) < 1e-13 && at >= 7 && below < 7 && fabs(low + 103) < 1e-12, "n %d: z %.17g, %.17g, %.17g",
               counts[k], at, below, low);
        EXPECT(d.spikes == 1 && d.judged == 3 && d.count == 128, "%d spikes of %d", (int)d.spikes, (int)d.judged);
        EXPECT(fabs(spike_score(&d) - 100.0 / 3) < 1e-12, "the score is %.17g", spike_score(&d));
    }
}

static void test_spike_score_needs_128(void) {
    SpikeDetector d;
    memset(&d, 0, sizeof(d));
    enter_series(&d, 127, 3, 4);
    EXPECT(isnan(spike_observe(&d, 3)) && isnan(spike_observe(&d, 1e9)) && d.judged == 0 && isnan(spike_score(&d)),
           "a z with 127 values");
    spike_enter(&d, 3);
    EXPECT(spike_observe(&d, 3) == 0 && d.judged == 1 && spike_score(&d) == 0, "no z with 128 values");
    EXPECT(isnan(spike_observe(&d, NAN)) && isnan(spike_observe(&d, INFINITY)) && d.judged == 1 && d.spikes == 0,
           "a value that is not finite was judged");
}

static void test_spike_score_of_constants(void) {
    static const double values[] = {0, 0.1, 1e300, 5e-324};
    for (int k = 0; k < 4; k++) {
        SpikeDetector d;
        memset(&d, 0, sizeof(d));
        enter_series(&d, 1000, values[k], values[k]);
        double x = values[k], up = spike_z(&d, nextafter(x, DBL_MAX)), down = spike_z(&d, nextafter(x, -DBL_MAX));
        EXPECT(spike_z(&d, x) == 0 && up == DBL_MAX && down == -DBL_MAX, "%g: z %g, above %g, below %g", x,
               spike_z(&d, x), up, down);
    }
}

// A long series against the definition, from an array: the median and the upper quartile are found by counting. Every
// 97th value is a spike, and more of them do not hide the next.
static void test_spike_score_definition(void) {
    enum { COUNT = 2000 };
    static double x[COUNT];
    SpikeDetector d;
    TestRandom r = {11};
    memset(&d, 0, sizeof(d));
    int64_t spikes = 0;
    for (int i = 0; i < COUNT; i++) {
        x[i] = 3 + 2 * exp(-i / 200.0) + 0.1 * test_random_real(&r) + (i % 97 == 96 ? 2 : 0);
        int begin = max_int(0, i - 128), n = i - begin;
        double median = NAN, high = NAN;
        for (int j = begin; j < i; j++) {
            int less = 0; // all values differ
            for (int k = begin; k < i; k++) less += x[k] < x[j];
            if (less == n / 2) median = x[j];
            if (less == n * 3 / 4) high = x[j];
        }
        double want = (x[i] - median) / (high - median) * 0.6744897501960817, z = spike_observe(&d, x[i]);
        if (i < 128) EXPECT(isnan(z), "value %d has a z of %g", i, z);
        else EXPECT(fabs(z - want) <= 1e-13 * (1 + fabs(want)), "value %d: z %.17g, not %.17g", i, z, want);
        EXPECT(i < 1000 || (z >= 7) == (i % 97 == 96), "value %d: z %g", i, z);
        spikes += z >= 7;
        spike_enter(&d, x[i]);
    }
    EXPECT(d.spikes == spikes && spikes > 10 && d.judged == COUNT - 128, "%d spikes of %d, not %d", (int)d.spikes,
           (int)d.judged, (int)spikes);
}

static SpikeGuard guard_with(int count) {
    SpikeGuard g;
    memset(&g, 0, sizeof(g));
    enter_levels(&g.loss, count, 3, 3 + QUARTILE_Z);
    enter_levels(&g.grad_norm, count, 0.5, 0.5 + QUARTILE_Z / 2);
    return g;
}
static bool same_windows(const SpikeGuard *a, const SpikeGuard *b) {
    return memcmp(a->loss.window, b->loss.window, sizeof(a->loss.window)) == 0 && a->loss.count == b->loss.count &&
           memcmp(a->grad_norm.window, b->grad_norm.window, sizeof(a->grad_norm.window)) == 0 &&
           a->grad_norm.count == b->grad_norm.count && a->loss.oldest == b->loss.oldest &&
           a->grad_norm.oldest == b->grad_norm.oldest;
}

static void test_spike_not_finite(void) {
    static const double bad[][2] = {{NAN, 1}, {-NAN, 1},     {INFINITY, 1}, {-INFINITY, 1},
                                    {3, NAN}, {3, INFINITY}, {NAN, NAN}};
    for (int count = 0; count <= 1000; count += 500) { // before there is a z, with one, and with a full window
        SpikeGuard g = guard_with(count), before = g;
        for (int i = 0; i < 7; i++) {
            UpdateDecision v = spike_guard_decide(&g, bad[i][0], bad[i][1], 0, 0);
            EXPECT(!v.apply && !v.finite && same_windows(&g, &before), "%d values: loss %g, norm %g was applied", count,
                   bad[i][0], bad[i][1]);
            EXPECT(isnan(v.loss_z) == (count == 0 || !isfinite(bad[i][0])), "%d values: loss %g has z %g", count,
                   bad[i][0], v.loss_z);
            EXPECT(g.not_finite == i + 1 && g.not_finite_in_row == i + 1 && g.skipped == 0,
                   "%d not finite, %d in a row", (int)g.not_finite, (int)g.not_finite_in_row);
        }
        UpdateDecision v = spike_guard_decide(&g, 11, 0.5, 0, 0);
        EXPECT(v.apply && v.finite && (count == 0 || (fabs(v.loss_z - 8) < 1e-13 && v.grad_z == 0)),
               "%d values: afterwards z %g and %g", count, v.loss_z, v.grad_z);
        EXPECT(g.not_finite == 7 && g.not_finite_in_row == 0 && g.loss.spikes == (count > 0), "%d in a row, %d spikes",
               (int)g.not_finite_in_row, (int)g.loss.spikes);
        EXPECT(!same_windows(&g, &before) && g.loss.count == min_int(count + 1, 128),
               "a spike that was applied did not enter");
    }
}

static void test_spike_skip(void) {
    static const struct {
        double loss, grad_norm, skip_loss_z, skip_grad_z;
        bool apply;
    } cases[] = {
        {1e6, 1e6, 0, 0, true},                                                        // off
        {6, 0.5, 2.9999, 0, false},                                                    // z = 3
        {6, 0.5, 3.0001, 0, true},  {-1e6, -1e6, 0.1, 0.1, true},                      // only what is above the median
        {3, 2, 0, 2.9999, false},   {3, 2, 0, 3.0001, true},       {3, 2, 3, 0, true}, // each by its own
        {6, 0.5, 0, 3, true},       {6, 2, 2.9999, 2.9999, false},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        SpikeGuard g = guard_with(200), before = g;
        g.not_finite_in_row = g.not_finite = 5;
        UpdateDecision v =
            spike_guard_decide(&g, cases[i].loss, cases[i].grad_norm, cases[i].skip_loss_z, cases[i].skip_grad_z);
        EXPECT(v.finite && v.apply == cases[i].apply, "case %zu: z %g and %g, applied %d", i, v.loss_z, v.grad_z,
               v.apply);
        EXPECT(!same_windows(&g, &before) && g.loss.count == 128 && g.skipped == !v.apply, "case %zu: %d skipped", i,
               (int)g.skipped);
        EXPECT(g.not_finite == 5 && g.not_finite_in_row == 0, "case %zu: a finite step does not end the row", i);
    }
    SpikeGuard g = guard_with(127);
    EXPECT(spike_guard_decide(&g, 1e9, 1e9, 0.1, 0.1).apply, "skipped without a z");
}

// Steps of a synthetic run, as --skip-loss-z Z (or --skip-grad-z) judges them.
typedef struct {
    int corrupt, skipped_corrupt, skipped, longest; // longest: most skipped in a row
    double z_sum;
} JudgedSeries;

// Losses that fall from 5.5 to 2 as those of a training run, or gradient norms with a heavy tail (log-normal, sigma
// 0.5). One value in `every_corrupt` is 2 higher. From step `shift` on all are.
static JudgedSeries judge_series(bool loss, double z, int every_corrupt, int shift, int steps, uint64_t seed) {
    static SpikeGuard g;
    JudgedSeries s;
    TestRandom r = {seed};
    memset(&g, 0, sizeof(g));
    memset(&s, 0, sizeof(s));
    for (int i = 0, row = 0; i < steps; i++) {
        double normal = -6;
        for (int k = 0; k < 12; k++) normal += 0.5 + 0.5 * test_random_real(&r);
        bool corrupt = every_corrupt && (int)(r.state >> 20) % every_corrupt == 0;
        double x = loss ? 2 + 3.5 * exp(-i / 150.0) + 0.3 * normal : exp(0.5 * normal);
        x += 2 * (corrupt + (shift && i >= shift));
        UpdateDecision v = loss ? spike_guard_decide(&g, x, 1, z, 0) : spike_guard_decide(&g, 1, x, 0, z);
        double at = loss ? v.loss_z : v.grad_z;
        s.z_sum += isnan(at) ? 0 : at;
        s.skipped += !v.apply;
        if (i >= 512 && corrupt) s.corrupt++, s.skipped_corrupt += !v.apply;
        row = v.apply ? 0 : row + 1;
        s.longest = max_int(s.longest, row);
    }
    return s;
}

static void test_spike_skip_rates(void) {
    for (uint64_t seed = 1; seed <= 2; seed++) {
        // clean: a small Z does not narrow the window
        JudgedSeries norms = judge_series(false, 3, 0, 0, 4000, seed), same = judge_series(false, 0, 0, 0, 4000, seed),
                     losses = judge_series(true, 4, 0, 0, 4000, seed);
        EXPECT(norms.skipped > 20 && norms.skipped < 4000 * 0.03, "seed %d: %d of 4000 clean norms skipped with Z 3",
               (int)seed, norms.skipped);
        EXPECT(same.skipped == 0 && same.z_sum == norms.z_sum, "seed %d: z depends on what is skipped", (int)seed);
        EXPECT(losses.skipped < 4, "seed %d: %d of 4000 clean losses skipped with Z 4", (int)seed, losses.skipped);
        // 8% corrupt, as with 4 windows of which 2% are: nearly all are skipped once the losses of the start are gone
        JudgedSeries bad = judge_series(true, 4, 12, 0, 3000, seed);
        EXPECT(bad.corrupt > 150 && bad.skipped_corrupt > bad.corrupt * 0.85 && bad.skipped < bad.corrupt + 20,
               "seed %d: %d of %d corrupt steps skipped, %d in all", (int)seed, bad.skipped_corrupt, bad.corrupt,
               bad.skipped);
        // a lasting shift becomes the scale after about 32 steps, and with a low Z the median after 64
        JudgedSeries shift = judge_series(true, 4, 0, 1500, 2000, seed),
                     low = judge_series(true, 0.6, 0, 1500, 2000, seed);
        EXPECT(shift.longest >= 5 && shift.longest <= 33 && shift.skipped < 60, "seed %d: %d skipped, %d in a row",
               (int)seed, shift.skipped, shift.longest);
        EXPECT(low.longest > 33 && low.longest < 80, "seed %d: %d in a row with Z 0.6", (int)seed, low.longest);
    }
}

static void test_spike_state_round_trip(void) {
    static const int counts[] = {0, 1, 128, 1000, 1700};
    for (int k = 0; k < 5; k++) {
        TestRandom r = {5};
        SpikeGuard g, h;
        memset(&g, 0, sizeof(g));
        for (int i = 0; i < counts[k]; i++)
            spike_guard_decide(&g, i == 9 ? NAN : 3 + test_random_real(&r),
                               i == 11 ? 5e-324 : ldexp(1 + test_random_real(&r), i % 60), 0, 1.5);
        size_t size = 0, again_size = 0;
        cJSON *json = spike_guard_to_json(&g);
        char *text = json_text(json, &size);
        cJSON *parsed = json_parse(text, size);
        memset(&h, 0xFF, sizeof(h));
        EXPECT(spike_guard_from_json(&h, parsed), "%d steps: refused", counts[k]);
        cJSON *again = spike_guard_to_json(&h);
        char *again_text = json_text(again, &again_size);
        EXPECT(size == again_size && memcmp(text, again_text, size) == 0, "%d steps: the second text is another",
               counts[k]);
        for (int i = 0; i < 300; i++) {
            double loss = 3 + test_random_real(&r), norm = 1e9 * test_random_real(&r);
            UpdateDecision a = spike_guard_decide(&g, loss, norm, 0, 1.5),
                           b = spike_guard_decide(&h, loss, norm, 0, 1.5);
            bool same =
                memcmp(&a.loss_z, &b.loss_z, 8) == 0 && memcmp(&a.grad_z, &b.grad_z, 8) == 0 && a.apply == b.apply;
            EXPECT(same || (isnan(a.loss_z) && isnan(b.loss_z)), "%d steps and %d more: z %.17g and %.17g", counts[k],
                   i, a.loss_z, b.loss_z);
        }
        EXPECT(g.skipped == h.skipped && g.not_finite == h.not_finite && g.loss.judged == h.loss.judged &&
                   g.grad_norm.spikes == h.grad_norm.spikes,
               "%d steps: the counts differ", counts[k]);
        cJSON_Delete(json), cJSON_Delete(parsed), cJSON_Delete(again);
        free(text), free(again_text);
    }
}

#define DETECTOR(judged, spikes, window) "{\"judged\": " judged ", \"spikes\": " spikes ", \"window\": " window "}"
#define GUARD(in_row, loss, grad_norm)                                                       \
    "{\"skipped\": 1, \"not_finite\": 9, \"not_finite_in_row\": " in_row ", \"loss\": " loss \
    ", \"grad_norm\": " grad_norm "}"
static void test_spike_state_invalid(void) {
    static const char good[] = DETECTOR("5", "2", "[1, 2.5]");
    static const char *const wrong[] = {
        "null",
        "[]",
        "3",
        "{}",
        GUARD("10", DETECTOR("5", "2", "[1, 2.5]"), DETECTOR("5", "2", "[1, 2.5]")),
        GUARD("-1", DETECTOR("5", "2", "[1, 2.5]"), DETECTOR("5", "2", "[1, 2.5]")),
        GUARD("0.5", DETECTOR("5", "2", "[1, 2.5]"), DETECTOR("5", "2", "[1, 2.5]")),
        GUARD("\"1\"", DETECTOR("5", "2", "[1, 2.5]"), DETECTOR("5", "2", "[1, 2.5]")),
        "{\"skipped\": 1, \"not_finite\": 2, \"not_finite_in_row\": 3, \"loss\": " DETECTOR(
            "0", "0", "[]") ", \"grad_norm\": " DETECTOR("0", "0", "[]") "}",
        "{\"not_finite\": 2, \"not_finite_in_row\": 1, \"loss\": " DETECTOR(
            "0", "0", "[]") ", \"grad_norm\": " DETECTOR("0", "0", "[]") "}",
    };
    static const char *const wrong_detectors[] = {
        "null",
        "[]",
        "\"\"",
        "{}",
        "{\"judged\": 5, \"spikes\": 2}",
        "{\"judged\": 5, \"window\": [1, 2]}",
        "{\"spikes\": 2, \"window\": [1, 2]}",
        DETECTOR("5", "6", "[1, 2.5]"),
        DETECTOR("-1", "-1", "[1, 2.5]"),
        DETECTOR("1e17", "2", "[1, 2.5]"),
        DETECTOR("5.5", "2", "[1, 2.5]"),
        DETECTOR("null", "2", "[1, 2.5]"),
        DETECTOR("5", "true", "[1, 2.5]"),
        DETECTOR("5", "2", "[1]"),
        DETECTOR("5", "2", "[1, 2, 3]"),
        DETECTOR("5", "2", "{\"a\": 1, \"b\": 2}"),
        DETECTOR("5", "2", "[1, null]"),
        DETECTOR("5", "2", "[1, 1e999]"),
        DETECTOR("5", "2", "[1, \"2\"]"),
        DETECTOR("5", "2", "[1, [2]]"),
        DETECTOR("5", "2", "null"),
    };
    SpikeGuard g = guard_with(3), before = g;
    char text[60000];
    int count = (int)(sizeof(wrong) / sizeof(wrong[0])),
        detectors = (int)(sizeof(wrong_detectors) / sizeof(wrong_detectors[0]));
    for (int i = 0; i < count + 2 * detectors; i++) {
        if (i < count) FORMAT(text, "%s", wrong[i]);
        else
            FORMAT(text, GUARD("1", "%s", "%s"), i % 2 ? wrong_detectors[(i - count) / 2] : good,
                   i % 2 ? good : wrong_detectors[(i - count) / 2]);
        cJSON *json = json_parse(text, strlen(text));
        EXPECT(json && !spike_guard_from_json(&g, json) && memcmp(&g, &before, sizeof(g)) == 0, "accepted: %.200s",
               text);
        cJSON_Delete(json);
    }
    EXPECT(!spike_guard_from_json(&g, NULL), "nothing at all is accepted");
    // of an earlier program, which kept more values, and "skip_excess"
    char window[8000] = "[0";
    for (int i = 1; i < 1000; i++) strcat(window, i < 872 ? ", 1" : ", 2");
    strcat(window, "]");
    FORMAT(text, "{\"skip_excess\": 7, %s", &GUARD("1", DETECTOR("5", "2", "%s"), DETECTOR("5", "2", "%s"))[1]);
    char *whole = (char *)checked_calloc(1, 20000);
    snprintf(whole, 20000, text, window, window);
    cJSON *json = json_parse(whole, strlen(whole));
    EXPECT(spike_guard_from_json(&g, json) && g.loss.count == 128 && spike_mean(&g.loss, 1000) == 2, "1000 values");
    EXPECT(spike_mean(&before.loss, 2) == (6 + QUARTILE_Z) / 2 - QUARTILE_Z / 2, "the mean of the newest");
    cJSON_Delete(json);
    free(whole);
}

// ---- a trainer in this process

typedef struct {
    Run run;
    int threads; // of the tests
} InnerRun;

static InnerRun *inner_open(const ProgramData *d, const char *options) {
    static char text[2000];
    char *words[64];
    int count = 0;
    FORMAT(text, "test --train-data %s/train.bin %s --warmup 0 %s", d->dir.path, small_model, options);
    char *repeated = strstr(text, "--warmup 2"); // an option may be given once
    memset(repeated, ' ', strlen("--warmup 2"));
    for (char *word = strtok(text, " "); word && count < 63; word = strtok(NULL, " ")) words[count++] = word;
    words[count] = NULL;
    InnerRun *inner = (InnerRun *)checked_calloc(1, sizeof(InnerRun));
    inner->threads = omp_get_max_threads();
    Resume resume;
    ModelConfig config = start_configure(&inner->run.options, &resume, count, words);
    run_open(&inner->run, &config, &resume);
    dataloader_start(&inner->run.data.train, 0);
    return inner;
}
static void inner_close(InnerRun *inner) {
    int threads = inner->threads;
    run_close(&inner->run);
    free(inner);
    omp_set_num_threads(threads);
    signal(SIGPIPE, SIG_DFL); // run_open ignores it for the process, and for the programs that later tests start
    linear_configure(GEMM_FP32);
}

static void fill_detectors(Run *run) {
    memset(&run->state.guard, 0, sizeof(run->state.guard));
    enter_series(&run->state.guard.loss, 200, 0.9, 1.1); // far below a first loss of ln 256
    enter_series(&run->state.guard.grad_norm, 200, 0.0009, 0.0011);
}

// Three steps of which the second is left out are two updates on the first and the third batch.
static void test_skipped_step(void) {
    static const struct {
        const char *options;
        bool poison, detectors, applied;
    } cases[] = {
        {"", true, false, false},
        {"--skip-loss-z 100 --skip-grad-z 100", true, true, false},
        {"--skip-loss-z 7", false, true, false},
        {"--skip-grad-z 7", false, true, false},
        {"--skip-grad-z 7 --experts 4 --experts-active 2 --expert-ffn 16 --router-bias", false, true, false},
        {"", false, true, true}, // a spike is no reason by itself
    };
    ProgramData d = program_data();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *shape = strstr(cases[i].options, "--experts"); // the last options
        InnerRun *inner = inner_open(&d, cases[i].options), *other = inner_open(&d, shape ? shape : "");
        Run *run = &inner->run, *reference = &other->run;
        Model *model = &run->model;
        size_t at = (size_t)(grad(&model->state, T_NORM_FINAL, 0) - model->state.grads);
        floatX *params = (floatX *)checked_calloc(1, model->plan.params_bytes), kept;
        real *moments = (real *)checked_calloc(1, model->plan.moments_bytes);

        EXPECT(run_step(run).decision.apply && run_step(reference).decision.apply, "%s: the first step",
               cases[i].options);
        kept = model->state.params[at];
        if (cases[i].poison) model->state.params[at] = (floatX)NAN;
        if (cases[i].detectors) fill_detectors(run);
        memcpy(params, model->state.params, model->plan.params_bytes);
        memcpy(moments, model->state.m, model->plan.moments_bytes);
        StepResult r = run_step(run);
        EXPECT(r.decision.apply == cases[i].applied && r.decision.finite == !cases[i].poison, "%s: applied %d",
               cases[i].options, r.decision.apply);
        EXPECT(isfinite(r.loss) == !cases[i].poison && isfinite(r.grad_norm) == !cases[i].poison, "loss %g, norm %g",
               r.loss, r.grad_norm);
        bool same = memcmp(params, model->state.params, model->plan.params_bytes) == 0 &&
                    memcmp(moments, model->state.m, model->plan.moments_bytes) == 0;
        EXPECT(same == !cases[i].applied, "%s: weights or moments changed: %d", cases[i].options, !same);
        EXPECT(run->state.step == 2 && run->state.next_window == 8 && run->state.updates == 1 + cases[i].applied,
               "step %d, window %d, %d updates", (int)run->state.step, (int)run->state.next_window,
               (int)run->state.updates);
        EXPECT(run->state.guard.loss.count == (cases[i].detectors ? 128 : 2 - cases[i].poison), "%d losses entered",
               run->state.guard.loss.count);

        model->state.params[at] = cases[i].poison ? kept : model->state.params[at];
        memset(&run->state.guard, 0, sizeof(run->state.guard));
        run_step(run);
        if (cases[i].applied) run_step(reference);
        else dataloader_start(&reference->data.train, 8);
        run_step(reference);
        EXPECT(run->state.updates == reference->state.updates && run->state.next_window == reference->state.next_window,
               "%d and %d updates", (int)run->state.updates, (int)reference->state.updates);
        EXPECT(memcmp(model->state.params, reference->model.state.params, model->plan.params_bytes) == 0 &&
                   memcmp(model->state.m, reference->model.state.m, model->plan.moments_bytes) == 0,
               "case %zu: the next update is not that of a run without the step", i);
        free(params);
        free(moments);
        inner_close(inner);
        inner_close(other);
    }
    test_remove_directory(&d.dir);
}

// ---- whole runs

typedef struct {
    double loss, grad_norm, loss_z, grad_z; // NaN for null
    bool skipped;
} TrainRecord;
typedef struct {
    int train, spikes, skipped, not_finite, stopped; // records
} RecordCounts;

static double record_number(const cJSON *record, const char *key) {
    double x = NAN;
    EXPECT(json_get_number(record, key, &x) || cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(record, key)),
           "a record without %s", key);
    return x;
}

// Train record i is the one of step i + 1.
static RecordCounts read_records(const ProgramData *d, const char *run, TrainRecord *records, int limit) {
    char path[600], line[4096];
    RecordCounts n;
    memset(&n, 0, sizeof(n));
    FORMAT(path, "%s/%s/log.jsonl", d->dir.path, run);
    FILE *f = fopen(path, "r");
    EXPECT(f != NULL, "there is no %s", path);
    while (f && fgets(line, sizeof(line), f)) {
        cJSON *record = cJSON_Parse(line);
        const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "kind"));
        const char *what = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "what"));
        if (kind && strcmp(kind, "train") == 0 && n.train < limit) {
            TrainRecord *t = &records[n.train++];
            EXPECT(record_number(record, "step") == n.train, "train record %d is of another step: %.100s", n.train,
                   line);
            t->loss = record_number(record, "loss");
            t->grad_norm = record_number(record, "grad_norm");
            t->loss_z = record_number(record, "loss_z");
            t->grad_z = record_number(record, "grad_z");
            t->skipped = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(record, "skipped"));
        } else if (kind && strcmp(kind, "event") == 0) {
            EXPECT(what && record_number(record, "step") == n.train,
                   "an event of another step than the record before it: %.100s", line);
            bool spike = what && strcmp(what, "spike") == 0;
            const TrainRecord *t = n.train ? &records[n.train - 1] : NULL;
            const char *of = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "of"));
            bool loss = of && strcmp(of, "loss") == 0;
            EXPECT(!spike || (t && record_number(record, "value") == (loss ? t->loss : t->grad_norm) &&
                              record_number(record, "z") == (loss ? t->loss_z : t->grad_z)),
                   "a spike with other values than its step: %.200s", line);
            n.spikes += spike;
            n.skipped += what && strcmp(what, "skipped") == 0;
            n.not_finite += what && strcmp(what, "not_finite") == 0;
            n.stopped += what && strcmp(what, "stopped") == 0;
        }
        cJSON_Delete(record);
    }
    if (f) fclose(f);
    return n;
}

static int count_of(const char *text, const char *words) {
    int n = 0;
    for (const char *p = text; (p = strstr(p, words)) != NULL; p += strlen(words)) n++;
    return n;
}

// The logged z of record i, from the logged values of the steps before it.
static void expect_z(const TrainRecord *records, int i, double logged, size_t field) {
#define RECORD_FIELD(j) (*(const double *)((const char *)&records[j] + field))
    SpikeDetector d;
    memset(&d, 0, sizeof(d));
    for (int j = 0; j < i; j++) spike_enter(&d, RECORD_FIELD(j));
    double z = spike_z(&d, RECORD_FIELD(i));
    EXPECT(isnan(z) == isnan(logged) && (i < 128) == isnan(logged), "step %d has z %g", i + 1, logged);
    EXPECT(isnan(z) || fabs(z - logged) < 1e-6 * (1 + fabs(z)), "step %d: z %.9g in the log, %.9g from its values",
           i + 1, logged, z);
#undef RECORD_FIELD
}

static void test_skip_options(void) {
    enum { STEPS = 260 };
    static TrainRecord records[STEPS];
    ProgramData d = program_data();
    ProgramResult r;
    for (int flags = 0; flags < 2; flags++) {
        const char *name = flags ? "skips" : "plain";
        run_trainer(&r, &d, name,
                    flags ? "--steps 260 --lr 1e-1 --skip-loss-z 0.1 --skip-grad-z 2" : "--steps 260 --lr 1e-1");
        EXPECT_STATUS(r, 0);
        RecordCounts n = read_records(&d, name, records, STEPS);
        int skipped = 0, by_loss = 0, by_grad = 0, loss_spikes = 0, grad_spikes = 0;
        for (int i = 0; i < n.train; i++) {
            const TrainRecord *t = &records[i];
            expect_z(records, i, t->loss_z, offsetof(TrainRecord, loss));
            expect_z(records, i, t->grad_z, offsetof(TrainRecord, grad_norm));
            EXPECT(t->skipped == (flags && (t->loss_z >= 0.1 || t->grad_z >= 2)), "step %d: z %g and %g, skipped %d",
                   i + 1, t->loss_z, t->grad_z, t->skipped);
            loss_spikes += t->loss_z >= 7;
            grad_spikes += t->grad_z >= 7;
            skipped += t->skipped;
            by_loss += t->skipped && !(t->grad_z >= 2);
            by_grad += t->skipped && !(t->loss_z >= 0.1);
        }
        EXPECT(n.train == STEPS && n.skipped == skipped && n.not_finite == 0 && n.spikes == loss_spikes + grad_spikes,
               "%d records, %d events of %d skips, %d of %d and %d spikes", n.train, n.skipped, skipped, n.spikes,
               loss_spikes, grad_spikes);
        EXPECT(flags ? by_loss > 0 && by_grad > 0 && skipped < 100 : skipped == 0,
               "skipped for the loss %d, for the gradient %d", by_loss, by_grad);
        EXPECT(count_lines(r.err) == skipped && count_of(r.err, "skipped") == skipped,
               "%d lines on stderr for %d skips", count_lines(r.err), skipped);
        char summary[200];
        FORMAT(summary,
               "\nspikes: loss %.2f%% (%d of 132 steps), gradient norm %.2f%% (%d of 132 steps); updates skipped: %d "
               "as spikes, 0 not finite\n",
               loss_spikes / 1.32, loss_spikes, grad_spikes / 1.32, grad_spikes, skipped);
        EXPECT(strstr(r.out, summary), "no %s in %s", summary, r.out + max_int(0, (int)strlen(r.out) - 300));
        char dir[700];
        FORMAT(dir, "%s/%s/checkpoints/step_%08d", d.dir.path, name, STEPS);
        cJSON *state = checkpoint_load_state(dir);
        double updates = 0;
        json_get_number(state, "updates", &updates);
        EXPECT(updates == STEPS - skipped, "%g updates in %d steps with %d skipped", updates, STEPS, skipped);
        cJSON_Delete(state);
    }
    test_remove_directory(&d.dir);
}

static void test_spike_resume(void) {
    ProgramData d = program_data();
    ProgramResult r;
    static const char *const care = "--lr 1e-2 --skip-grad-z 1 --skip-loss-z 2";
    static const int splits[] = {60, 140, 171}; // before there is a z, and after
    char options[300], path[600];
    FORMAT(options, "--steps 180 %s", care);
    run_trainer(&r, &d, "whole", options);
    EXPECT_STATUS(r, 0);
    const char *summary = strstr(r.out, "\nspikes: ");
    EXPECT(summary && strstr(summary, "of 52 steps"), "the summary of the whole run: %.200s",
           summary ? summary : r.out);
    char whole[300];
    FORMAT(whole, "%s", summary ? summary : "?");
    FORMAT(options, "--steps %d %s", splits[0], care);
    run_trainer(&r, &d, "parts", options);
    EXPECT_STATUS(r, 0);
    for (int i = 1; i < 4; i++) {
        run_command(&r, "%s --out '%s/parts' --resume --steps %d --threads 2", test_program(), d.dir.path,
                    i < 3 ? splits[i] : 180);
        EXPECT_STATUS(r, 0);
    }
    EXPECT(strstr(r.out, whole), "the last part's summary is not %s", whole);
    expect_same_directories(&d, "whole/checkpoints/step_00000180", "parts/checkpoints/step_00000180");
    FORMAT(path, "%s", d.dir.path);
    run_command(&r,
                "cd '%s' && for run in whole parts; do sed -E '/\"what\": \"(start|checkpoint)\"/d; "
                "s/\"(tokens_per_s|ms|flops_util|comm_ms)\": [^,]*, //g' "
                "$run/log.jsonl > $run.log; done;"
                "cmp whole.log parts.log && grep -c '\"what\": \"skipped\"' whole.log",
                path);
    EXPECT(r.status == 0 && atoi(r.out) > 3, "the logs differ, or have no skips: %.300s %.200s", r.out, r.err);
    test_remove_directory(&d.dir);
}

// Reads the weights back: all finite.
static void expect_finite_weights(const ProgramData *d, const char *checkpoint) {
    char path[700];
    FORMAT(path, "%s/%s/model.safetensors", d->dir.path, checkpoint);
    SafeTensors *s = safetensors_open(path);
    for (size_t i = 0; i < s->count; i++) {
        const SafeTensor *t = &s->tensors[i];
        double *x = (double *)checked_calloc(t->count, sizeof(double));
        safetensors_read(s, t->name, 0, t->count, x, DTYPE_F64);
        for (size_t e = 0; e < t->count; e++)
            EXPECT(isfinite(x[e]), "%s: element %zu of %s is %g", checkpoint, e, t->name, x[e]);
        free(x);
    }
    safetensors_close(s);
}

// One update at this rate, and the next loss or gradient overflows. Of the weights themselves none does.
#define DIVERGING_LR "1e30"

static void test_diverged_run(void) {
    static TrainRecord records[60];
    ProgramData d = program_data();
    ProgramResult r;
    run_trainer(&r, &d, "run", "--steps 5");
    EXPECT_STATUS(r, 0);
    run_command(&r, "cp -r '%s/run/checkpoints/step_00000005' '%s/saved'", d.dir.path, d.dir.path);
    // the checkpoints of the broken weights must not push the good one out
    run_command(&r,
                "%s --out '%s/run' --resume --steps 60 --checkpoint-every 1 --keep 2 --threads 2 --lr " DIVERGING_LR,
                test_program(), d.dir.path);
    EXPECT(r.status == 1 && count_lines(r.err) == 11 && count_of(r.err, "in a row") == 10, "status %d, stderr: %.500s",
           r.status, r.err);
    const char *last = strstr(r.err, "the run is stopped");
    EXPECT(last && strstr(last, "--lr") && strstr(last, "run/checkpoints/step_00000005\n"), "the last line: %.400s",
           last ? last : "?");
    RecordCounts n = read_records(&d, "run", records, 60);
    EXPECT(n.not_finite == 10 && n.stopped == 1 && n.train >= 16 && n.train < 60, "%d records, %d not finite", n.train,
           n.not_finite);
    for (int i = 0; i < n.train; i++) {
        bool finite = isfinite(records[i].loss) && isfinite(records[i].grad_norm);
        EXPECT(finite == (i < n.train - 10) && records[i].skipped == !finite, "step %d: loss %g, norm %g, skipped %d",
               i + 1, records[i].loss, records[i].grad_norm, records[i].skipped);
    }
    expect_same_directories(&d, "run/checkpoints/step_00000005", "saved");
    run_command(&r, "ls '%s/run/checkpoints'", d.dir.path);
    EXPECT(strcmp(r.out, "step_00000005\nstep_00000006\n") == 0, "checkpoints: %s", r.out);
    expect_finite_weights(&d, "run/checkpoints/step_00000006");
    // the good one can be gone on with
    run_command(&r, "rm -r '%s/run/checkpoints/step_00000006'", d.dir.path);
    run_command(&r, "%s --out '%s/run' --resume --steps 8 --threads 2 --lr 1e-3", test_program(), d.dir.path);
    EXPECT_STATUS(r, 0);
    test_remove_directory(&d.dir);
}

// The row goes on over a resume, and a checkpoint within it is not called good.
static void test_divergence_count_saved(void) {
    static TrainRecord records[60];
    ProgramData d = program_data();
    ProgramResult r;
    run_trainer(&r, &d, "run", "--steps 6 --weight-decay 0 --lr " DIVERGING_LR);
    EXPECT_STATUS(r, 1);
    EXPECT(strstr(r.out, "n/a (no step had 128 before it)"), "the summary of a short run: %.300s",
           r.out + max_int(0, (int)strlen(r.out) - 300));
    int before = count_of(r.err, "in a row");
    EXPECT(before >= 3, "only %d of 6 steps were not finite", before);
    expect_finite_weights(&d, "run/checkpoints/step_00000006");
    run_command(&r, "%s --out '%s/run' --resume --steps 60 --threads 2", test_program(), d.dir.path);
    EXPECT(r.status == 1 && count_of(r.err, "in a row") == 10 - before && strstr(r.err, "last good checkpoint: none"),
           "status %d, stderr: %.500s", r.status, r.err);
    RecordCounts n = read_records(&d, "run", records, 60);
    EXPECT(n.train == 6 + 10 - before && n.not_finite == 10, "%d records, %d not finite", n.train, n.not_finite);
    // without --out there is none to name; samples of a broken model are no reason to stop earlier
    run_command(&r, "%s --train-data '%s/train.bin' %s --steps 60 --lr 1e300 --sample-every 1", test_program(),
                d.dir.path, small_model);
    EXPECT(r.status == 1 && strstr(r.err, "last good checkpoint: none") && count_of(r.err, "in a row") == 10,
           "status %d, stderr: %.300s", r.status, r.err);
    EXPECT(strstr(r.out, "logits are not finite"), "no word of the samples");
    test_remove_directory(&d.dir);
}

static const char *last_line(const char *text) {
    const char *last = text;
    for (const char *p = text; (p = strchr(p, '\n')) != NULL && *++p;) last = p;
    return last;
}

static void test_final_loss_warning(void) {
    static const struct {
        const char *options; // of a resume, where the run has begun
        int status;
        bool diverged;
    } starts[] = {
        {"--steps 20 --lr 1e-3", 0, false},
        {"--steps 40 --lr 3 --grad-clip 0 --weight-decay 0 --stop-after 30", 0, true},
        {"--steps 40 --lr 3", 0, true},
        {"--steps 43 --lr 0", 0, true}, // no worse than its own start
    };
    ProgramData d = program_data();
    ProgramResult r;
    for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++) {
        char options[200];
        FORMAT(options, "%s%s", starts[i].options, i ? " --resume" : "");
        run_trainer(&r, &d, "run", options);
        EXPECT_STATUS(r, starts[i].status);
        bool said = strstr(last_line(r.err), "the run has diverged; try a lower --lr") != NULL;
        EXPECT(said == starts[i].diverged, "%s: the last line is %.300s; stdout %.2000s", options, last_line(r.err),
               r.out);
    }
    test_remove_directory(&d.dir);
}

// Windows of 16 tokens, by chance of one letter or of any of 8: the losses of single steps differ by 2.
static void write_uneven_windows(const ProgramData *d) {
    char path[600];
    FORMAT(path, "%s/train.bin", d->dir.path);
    FILE *f = fopen(path, "r+b");
    TestRandom r = {3};
    CHECK(f && fseek(f, 1024, SEEK_SET) == 0, "cannot write %s", path);
    for (int w = 0; w < 12000; w++) {
        uint16_t tokens[16];
        int letters = test_random_int(&r, 2) ? 8 : 1;
        for (int i = 0; i < 16; i++) tokens[i] = (uint16_t)('a' + test_random_int(&r, letters));
        CHECK(fwrite(tokens, sizeof(tokens), 1, f) == 1, "cannot write %s", path);
    }
    CHECK(fclose(f) == 0, "cannot write %s", path);
}

static void test_noisy_run_not_diverged(void) {
    enum { FIRST = 150, STEPS = 5, STARTS = 6 };
    static TrainRecord records[FIRST + STEPS * STARTS];
    ProgramData d = program_data();
    ProgramResult r;
    int rose = 0;
    write_uneven_windows(&d);
    run_command(&r,
                "%s --train-data '%s/train.bin' --layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 "
                "--seq-len 16 --batch-size 1 --schedule constant --lr 1e-2 --threads 1 --steps %d --out '%s/run'",
                test_program(), d.dir.path, FIRST, d.dir.path);
    EXPECT_STATUS(r, 0);
    for (int i = 1; i <= STARTS; i++) {
        run_command(&r, "%s --out '%s/run' --resume --steps %d --threads 1", test_program(), d.dir.path,
                    FIRST + STEPS * i);
        EXPECT(r.status == 0 && r.err[0] == '\0', "start %d: status %d, stderr: %.300s", i, r.status, r.err);
    }
    RecordCounts n = read_records(&d, "run", records, FIRST + STEPS * STARTS);
    for (int i = FIRST; i < n.train; i += STEPS) rose += records[i + STEPS - 1].loss > records[i].loss + 1;
    EXPECT(n.train == FIRST + STEPS * STARTS && rose > 0, "no start of %d records ended 1 above its first loss",
           n.train);
    // unlike this one, though it is no worse than an untrained model
    run_command(&r, "%s --out '%s/run' --resume --steps %d --threads 1 --lr 0.3 --warmup 0", test_program(), d.dir.path,
                n.train + 20);
    EXPECT(strstr(last_line(r.err), "above the mean at the start"), "status %d, stderr: %.300s; stdout: %.2000s",
           r.status, r.err, r.out);
    test_remove_directory(&d.dir);
}

static void test_final_loss_not_finite(void) {
    static TrainRecord records[8];
    ProgramData d = program_data();
    ProgramResult r;
    run_trainer(&r, &d, "run", "--steps 2 --lr 1e-3");
    EXPECT_STATUS(r, 0);
    // also one that ends before its last step, and its checkpoint pushes no good one out
    run_trainer(&r, &d, "run", "--steps 9 --stop-after 5 --keep 1 --resume --lr " DIVERGING_LR);
    EXPECT(r.status == 1 &&
               strstr(last_line(r.err), "the run ends at step 5 with a loss or gradient that is not finite") &&
               strstr(last_line(r.err), "step_00000002\n"),
           "status %d, the last line: %.300s", r.status, last_line(r.err));
    run_trainer(&r, &d, "run", "--steps 6 --keep 1 --resume --lr " DIVERGING_LR);
    EXPECT(r.status == 1 &&
               strstr(last_line(r.err), "the run ends at step 6 with a loss or gradient that is not finite"),
           "status %d, the last line: %.300s", r.status, last_line(r.err));
    RecordCounts n = read_records(&d, "run", records, 8);
    EXPECT(n.train == 6 && n.stopped >= 1, "%d records, %d of a stop", n.train, n.stopped);
    run_trainer(&r, &d, "run", "--resume --steps 6");
    EXPECT(r.status == 1 && strstr(r.out, "nothing to do") && strstr(last_line(r.err), "step 6 is not finite"),
           "status %d, the last line: %.300s", r.status, last_line(r.err));
    run_command(&r, "ls '%s/run/checkpoints'", d.dir.path);
    EXPECT(strcmp(r.out, "step_00000002\nstep_00000005\nstep_00000006\n") == 0, "checkpoints: %s", r.out);

    static const char *const modes[] = {"--eval --eval-out eval", "--dump-grads grads", "--generate 5"};
    run_command(&r,
                "cd '%s/run/checkpoints/step_00000002' && rm trainer_state.json && printf '\\000\\000\\300\\177' | dd "
                "of=model.safetensors bs=1 conv=notrunc seek=$(($(wc -c < model.safetensors) - 4))",
                d.dir.path);
    EXPECT_STATUS(r, 0);
    for (int i = 0; i < 3; i++) {
        run_command(&r,
                    "cd '%s' && %s --init run/checkpoints/step_00000002 --val-data val.bin --train-data train.bin "
                    "--threads 2 %s",
                    d.dir.path, test_program_path(), modes[i]);
        EXPECT_ONE_LINE(r, 1, "not finite: ");
    }
    run_command(&r, "ls '%s/eval' '%s/grads'", d.dir.path, d.dir.path);
    EXPECT_STATUS(r, 0);
    test_remove_directory(&d.dir);
}

// A weight is NaN during the validation after step 2, which saved checkpoints do not contain. Until a validation is
// finite, --keep removes none of the checkpoints before, also after a resume.
static void test_validation_not_finite(void) {
    static const char *const saved[] = {"1 ", "1 2 ", "1 2 3 ", "4 "};
    ProgramData d = program_data();
    ProgramResult r;
    TrainerState resumed;
    char text[PATH_SIZE];
    FORMAT(text, "--val-data %s/val.bin --val-steps 1 --keep 1 --no-checkpoint-background --out %s", d.dir.path,
           d.dir.path);
    InnerRun *inner = inner_open(&d, text);
    Run *run = &inner->run;
    size_t at = (size_t)(grad(&run->model.state, T_NORM_FINAL, 0) - run->model.state.grads);
    for (int step = 1; step <= 4; step++) {
        run_step(run);
        floatX kept = run->model.state.params[at];
        if (step == 2) run->model.state.params[at] = (floatX)NAN;
        if (step % 2 == 0) run_log_validation(run);
        run->model.state.params[at] = kept;
        checkpointer_save(&run->checkpointer, false);
        run_command(&r, "ls '%s/checkpoints' | sed 's/step_0*//' | tr '\\n' ' '", d.dir.path);
        EXPECT(strcmp(r.out, saved[step - 1]) == 0, "checkpoints after step %d: %s", step, r.out);
        FORMAT(text, "%s/checkpoints/step_%08d", d.dir.path, step);
        cJSON *json = checkpoint_load_state(text);
        memset(&resumed, 0, sizeof(resumed));
        trainer_state_resume(&resumed, json, text);
        EXPECT(resumed.val_not_finite_since == (step == 2 || step == 3 ? 3 : 0) &&
                   trainer_state_finite(&run->state) == !resumed.val_not_finite_since,
               "after step %d: not finite since step %d", step, (int)resumed.val_not_finite_since);
        cJSON_Delete(json);
        checkpointer_find_good(&run->checkpointer, text);
        EXPECT(step != 3 || strstr(text, "step_00000001"), "the last good checkpoint is %s", text);
    }
    inner_close(inner);
    test_remove_directory(&d.dir);
}

static void test_finite_weights_saved(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_trainer(&r, &d, "run", "--steps 2");
    EXPECT_STATUS(r, 0);
    // the rate itself is beyond what a float holds, so one update breaks the weights
    run_command(&r, "%s --out '%s/run' --resume --steps 4 --lr 1e300 --threads 2", test_program(), d.dir.path);
    EXPECT(r.status == 1 && strstr(r.err, "are not saved") && strstr(r.err, "run/checkpoints/step_00000002\n"),
           "status %d, stderr: %.300s", r.status, r.err);
    run_command(&r, "ls '%s/run/checkpoints'", d.dir.path);
    EXPECT(strcmp(r.out, "step_00000002\n") == 0, "checkpoints: %s", r.out);
    expect_finite_weights(&d, "run/checkpoints/step_00000002");
    test_remove_directory(&d.dir);
}

static const Test spikes_tests[] = {
    {"a value seven deviations above the median is a spike, and one just below is not", test_spike_threshold},
    {"a z-score requires 128 values", test_spike_score_needs_128},
    {"a window of equal values gives finite scores", test_spike_score_of_constants},
    {"z-scores of a long series agree with the definition", test_spike_score_definition},
    {"an update that is not finite is not applied and does not enter the detectors", test_spike_not_finite},
    {"a step at or above the threshold is skipped, and its values enter the detectors", test_spike_skip},
    {"clean values and a lasting shift are rarely skipped, and rare outliers always", test_spike_skip_rates},
    {"the state of the detectors is read back bit for bit", test_spike_state_round_trip},
    {"an invalid state of the detectors is rejected", test_spike_state_invalid},
    {"a skipped step changes neither the weights nor the moments nor their step count", test_skipped_step},
    {"a run skips steps as its options specify, and logs them", test_skip_options},
    {"a resume restores the detectors bit for bit", test_spike_resume},
    {"a diverged run stops after 10 steps and names the last valid checkpoint", test_diverged_run},
    {"a checkpoint contains the number of consecutive steps that are not finite", test_divergence_count_saved},
    {"a run whose final loss is far above its first reports it in the last line", test_final_loss_warning},
    {"a run whose steps have uneven losses is not called diverged", test_noisy_run_not_diverged},
    {"a run fails if its last step is not finite, and other modes fail if their loss is not finite",
     test_final_loss_not_finite},
    {"a validation that is not finite protects the checkpoints before it", test_validation_not_finite},
    {"weights that are not finite are never saved", test_finite_weights_saved},
};
enum { SPIKES_TEST_COUNT = sizeof(spikes_tests) / sizeof(spikes_tests[0]) };
#endif
