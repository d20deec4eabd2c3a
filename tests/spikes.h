/*
spikes.h: tests of the spike detectors, on series whose z-scores are known, and of the steps that are left out, on a
trainer inside this process, where a parameter can be made NaN. tests/programs/test_spikes.py has those of whole runs,
and of resumes.
*/
#pragma once
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

#define GUARD(not_finite, in_row, spikes, window)                                     \
    "{\"skipped\": 4, \"not_finite\": " not_finite ", \"not_finite_in_row\": " in_row \
    ", \"loss\": {\"judged\": 5, \"spikes\": " spikes ", \"window\": " window         \
    "}, \"grad_norm\": {\"judged\": 6, \"spikes\": 0, \"window\": [3.5, 4.5]}}"
static bool guard_is_rejected(const cJSON *json) {
    SpikeGuard g = guard_with(3), before = g;
    return !spike_guard_from_json(&g, json) && memcmp(&g, &before, sizeof(g)) == 0;
}
// Each value below `parent` is left out, and has wrong types and sizes. A value of a window is any number.
static void spoil_values(const cJSON *root, cJSON *parent) {
    static const char *const wrong[] = {"", "null", "true", "\"1\"", "[]", "{}", "1e999", "-1", "0.5", "1e17"};
    for (int left = cJSON_GetArraySize(parent); left > 0; left--) {
        cJSON *item = cJSON_DetachItemFromArray(parent, 0);
        const char *key = item->string ? item->string : "";
        for (int i = 0; i < (*key ? 10 : 7); i++) {
            cJSON *other = cJSON_Parse(wrong[i]);
            cJSON_AddItemToObject(parent, key, other);
            EXPECT(guard_is_rejected(root), "'%s' as '%s' is accepted", wrong[i], key);
            cJSON_Delete(cJSON_DetachItemViaPointer(parent, other));
        }
        cJSON_AddItemToObject(parent, key, item);
        spoil_values(root, item);
    }
}
static void test_spike_state_invalid(void) {
    static const char *const wrong[] = {
        "null",
        "[]",
        "3",
        GUARD("0", "1", "3", "[1, 2]"),
        GUARD("10", "10", "3", "[1, 2]"),
        GUARD("2", "1", "6", "[1, 2]"),
        GUARD("2", "1", "3", "[1, 2, 3]"),
        GUARD("2", "1", "3", "{\"a\": 1, \"b\": 2}"),
    };
    SpikeGuard g = guard_with(3);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        cJSON *json = cJSON_Parse(wrong[i]);
        EXPECT(guard_is_rejected(json), "%s is accepted", wrong[i]);
        cJSON_Delete(json);
    }
    EXPECT(guard_is_rejected(NULL) && spike_mean(&g.loss, 2) == 3, "no JSON is accepted, or the mean is wrong");
    cJSON *json = cJSON_Parse(GUARD("2", "1", "3", "[1.5, 2.5]"));
    spoil_values(json, json);
    EXPECT(spike_guard_from_json(&g, json) && g.loss.count == 2, "a valid state is rejected");
    cJSON_Delete(json);
}

// ---- a trainer in this process

typedef struct {
    Run run;
    int threads; // of the tests
} InnerRun;

// With more options.
PRINTF_LIKE(2, 3)
static InnerRun *inner_open(const TestDirectory *d, const char *fmt, ...) {
    char *words[64];
    va_list args;
    va_start(args, fmt);
    char *text =
        test_text("test --train-data %s/train.bin %s --warmup 0 %s", d->path, small_model, test_text_of(fmt, args));
    va_end(args);
    char *repeated = strstr(text, "--warmup 2"); // an option may be given once
    memset(repeated, ' ', strlen("--warmup 2"));
    int count = test_words(words, 64, text);
    InnerRun *inner = (InnerRun *)checked_calloc(1, sizeof(InnerRun));
    inner->threads = omp_get_max_threads();
    Resume resume;
    options_read(&inner->run.options, count, words);
    ModelConfig config = start_configure(&inner->run.options, &resume);
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
    memset(&run->trainer.guard, 0, sizeof(run->trainer.guard));
    enter_series(&run->trainer.guard.loss, 200, 0.9, 1.1); // far below a first loss of ln 256
    enter_series(&run->trainer.guard.grad_norm, 200, 0.0009, 0.0011);
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
    TestDirectory d = program_data();
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
        EXPECT(run->trainer.step == 2 && run->trainer.next_window == 8 && run->trainer.updates == 1 + cases[i].applied,
               "step %d, window %d, %d updates", (int)run->trainer.step, (int)run->trainer.next_window,
               (int)run->trainer.updates);
        EXPECT(run->trainer.guard.loss.count == (cases[i].detectors ? 128 : 2 - cases[i].poison), "%d losses entered",
               run->trainer.guard.loss.count);

        model->state.params[at] = cases[i].poison ? kept : model->state.params[at];
        memset(&run->trainer.guard, 0, sizeof(run->trainer.guard));
        run_step(run);
        if (cases[i].applied) run_step(reference);
        else dataloader_start(&reference->data.train, 8);
        run_step(reference);
        EXPECT(run->trainer.updates == reference->trainer.updates &&
                   run->trainer.next_window == reference->trainer.next_window,
               "%d and %d updates", (int)run->trainer.updates, (int)reference->trainer.updates);
        EXPECT(memcmp(model->state.params, reference->model.state.params, model->plan.params_bytes) == 0 &&
                   memcmp(model->state.m, reference->model.state.m, model->plan.moments_bytes) == 0,
               "case %zu: the next update is not that of a run without the step", i);
        free(params);
        free(moments);
        inner_close(inner);
        inner_close(other);
    }
}

// A weight is NaN during the validation after step 2, which saved checkpoints do not contain. Until a validation is
// finite, --keep removes none of the checkpoints before, also after a resume.
static void test_validation_not_finite(void) {
    static const char *const saved[] = {"1 ", "1 2 ", "1 2 3 ", "4 "};
    TestDirectory d = program_data();
    ProgramResult r;
    TrainerState resumed;
    char good[PATH_SIZE];
    InnerRun *inner = inner_open(&d, "--val-data %s/val.bin --val-steps 1 --keep 1 --out %s", d.path, d.path);
    Run *run = &inner->run;
    size_t at = (size_t)(grad(&run->model.state, T_NORM_FINAL, 0) - run->model.state.grads);
    for (int step = 1; step <= 4; step++) {
        run_step(run);
        floatX kept = run->model.state.params[at];
        if (step == 2) run->model.state.params[at] = (floatX)NAN;
        if (step % 2 == 0) run_log_validation(run);
        run->model.state.params[at] = kept;
        checkpointer_save(&run->checkpointer, false);
        run_command(&r, "ls '%s/checkpoints' | sed 's/step_0*//' | tr '\\n' ' '", d.path);
        EXPECT(strcmp(r.out, saved[step - 1]) == 0, "checkpoints after step %d: %s", step, r.out);
        const char *directory = test_text("%s/checkpoints/step_%08d", d.path, step);
        cJSON *json = checkpoint_load_state(directory);
        memset(&resumed, 0, sizeof(resumed));
        trainer_state_resume(&resumed, json, directory);
        EXPECT(resumed.val_not_finite_since == (step == 2 || step == 3 ? 3 : 0) &&
                   trainer_state_finite(&run->trainer) == !resumed.val_not_finite_since,
               "after step %d: not finite since step %d", step, (int)resumed.val_not_finite_since);
        cJSON_Delete(json);
        checkpointer_find_good(&run->checkpointer, good);
        EXPECT(step != 3 || strstr(good, "step_00000001"), "the last good checkpoint is %s", good);
    }
    inner_close(inner);
}

static const Test spikes_tests[] = {
    {"a value seven deviations above the median is a spike, and one just below is not", test_spike_threshold},
    {"a window of equal values gives finite scores", test_spike_score_of_constants},
    {"an update that is not finite is not applied and does not enter the detectors", test_spike_not_finite},
    {"an invalid state of the detectors is rejected", test_spike_state_invalid},
    {"a skipped step changes neither the weights nor the moments nor their step count", test_skipped_step},
    {"a validation that is not finite protects the checkpoints before it", test_validation_not_finite},
};
