/*
options.h: tests of presets, schedules and the values of options. What the program says of them is tested by
tests/programs/test_options.py.
*/
#pragma once
#include "../llmc/base/json.h"
#include "../llmc/options/options.h"
#include "../llmc/run/trial.h"
#include "harness.h"

// ---- schedules

typedef struct {
    int64_t steps, warmup;
    double lr, min_lr_ratio;
} ScheduleCase;

static const ScheduleCase schedule_cases[] = {
    {1, 0, 1e-3, 0.1},      // the only step is the last
    {1, 1, 1e-3, 0.1},      // ... and the last of the warmup
    {4, 0, 1e-3, 0.1},      // 20% of the steps is less than one step
    {101, 0, 1e-3, 0.1},    // no warmup; 20% of the steps is 20.2: 21 steps
    {100, 10, 3e-4, 0.1},   // the defaults' shape
    {100, 100, 1e-3, 0.1},  // warmup only
    {100, 99, 1e-3, 0.1},   // one step of decay
    {100, 90, 1e-3, 0.0},   // the warmup reaches into wsd's last 20%
    {997, 31, 1.7e-3, 1.0}, // primes; the floor is the top
    {997, 31, 0.0, 0.5},    // nothing to schedule
};
enum { SCHEDULE_CASE_COUNT = sizeof(schedule_cases) / sizeof(schedule_cases[0]) };

#define FOR_EACH_SCHEDULE(kind, c)                                                              \
    for (const ScheduleCase *c = schedule_cases; c < schedule_cases + SCHEDULE_CASE_COUNT; c++) \
        for (int kind = 0; kind < SCHEDULE_COUNT; kind++)

static double case_lr(int kind, const ScheduleCase *c, int64_t step) {
    LearningRate r = {(Schedule)kind, c->steps, c->warmup, 0, c->lr, c->min_lr_ratio};
    return schedule_lr(&r, step);
}

static void test_warmup(void) {
    FOR_EACH_SCHEDULE(kind, c) {
        for (int64_t step = 1; step <= c->warmup; step++) {
            double want = c->lr * (double)step / (double)c->warmup, lr = case_lr(kind, c, step);
            EXPECT(fabs(lr - want) <= 4e-16 * want, "%s, step %d of warmup %d: %.17g, not %.17g", schedule_names[kind],
                   (int)step, (int)c->warmup, lr, want);
        }
        if (c->warmup)
            EXPECT(case_lr(kind, c, c->warmup) == c->lr, "%s, warmup %d of %d steps ends at %.17g, not at %.17g",
                   schedule_names[kind], (int)c->warmup, (int)c->steps, case_lr(kind, c, c->warmup), c->lr);
    }
}

// With n steps of decay, the shares of (lr - floor) that steps 1..n keep add up to (n-1)/2, for the cosine as for
// the line: sum of cos(pi k / n) over k = 1..n is -1. For 1-sqrt they add up to n less the roots of k / n.
static void test_closed_forms(void) {
    FOR_EACH_SCHEDULE(kind, c) {
        int64_t tail = (c->steps + 4) / 5, after = c->steps - c->warmup;
        int64_t n = kind == SCHEDULE_CONSTANT ? 0 : schedule_is_wsd(kind) && tail < after ? tail : after;
        double floor_lr = c->lr * c->min_lr_ratio, sum = 0;
        double want = c->lr * (double)(after - n), shares = n ? (double)(n - 1) / 2 : 0;
        if (kind == SCHEDULE_WSD_SQRT) {
            shares = (double)n;
            for (int64_t k = 1; k <= n; k++) shares -= sqrt((double)k / (double)n);
        }
        want += floor_lr * (double)n + (c->lr - floor_lr) * shares;
        for (int64_t step = c->warmup + 1; step <= c->steps; step++) sum += case_lr(kind, c, step);
        double rounding = 1.2e-16 * (double)c->steps * (double)c->steps * c->lr; // steps additions, each of the sum
        EXPECT(fabs(sum - want) <= rounding, "%s, %d steps, warmup %d: sum %.17g, not %.17g", schedule_names[kind],
               (int)c->steps, (int)c->warmup, sum, want);
    }
    // a quarter of the way from step 20 to step 100 the shapes are apart
    static const struct {
        Schedule kind;
        int64_t decay_steps, step;
        double above; // share of lr - floor
    } points[] = {
        {SCHEDULE_LINEAR, 0, 40, 0.75},      {SCHEDULE_COSINE, 0, 40, 0.5 + 0.25 * M_SQRT2},
        {SCHEDULE_WSD_SQRT, 0, 80, 1}, // its last 20%
        {SCHEDULE_WSD, 0, 90, 0.5},          {SCHEDULE_WSD, 80, 40, 0.75},
        {SCHEDULE_WSD_LINEAR, 80, 40, 0.75}, {SCHEDULE_WSD_SQRT, 80, 40, 0.5},
        {SCHEDULE_WSD_SQRT, 4, 96, 1}, // exactly --decay-steps
        {SCHEDULE_WSD_SQRT, 4, 97, 0.5},     {SCHEDULE_WSD_SQRT, 4, 100, 0},
        {SCHEDULE_WSD, 90, 40, 0.75}, // not before the end of the warmup
        {SCHEDULE_LINEAR, 0, 107, 0}, // beyond the last step
    };
    for (size_t i = 0; i < sizeof(points) / sizeof(points[0]); i++) {
        LearningRate r = {points[i].kind, 100, 20, points[i].decay_steps, 1.0, 0.2};
        double lr = schedule_lr(&r, points[i].step), want = 0.2 + 0.8 * points[i].above;
        EXPECT(fabs(lr - want) < 1e-15, "point %d: %s at step %d: %.17g, not %.17g", (int)i,
               schedule_names[points[i].kind], (int)points[i].step, lr, want);
    }
}

// ---- presets

// With spaces between the words of the text.
PRINTF_LIKE(2, 3)
static void parse_text(Options *o, const char *fmt, ...) {
    char *words[32];
    va_list args;
    va_start(args, fmt);
    int count = test_words(words, 32, test_text("train_diffv2 %s", test_text_of(fmt, args)));
    va_end(args);
    options_read(o, count, words);
    options_check(o);
}

// 3 C L parameters depend on each unit of the width, so half of that may be missing: at most 0.1% in tiny.
static void test_match_params(void) {
    static const char *const windows[] = {"--window=0", "--window=64 --qk-norm", "--yoco --window=64"};
    int covered[ATTENTION_VARIANT_COUNT] = {0}; // presets and options; few presets have heads for diff_grouped_4
    for (int p = 0; p < PRESET_COUNT; p++)
        for (int i = 0; i < 3 * ATTENTION_VARIANT_COUNT; i++) {
            int v = i / 3;
            const char *preset = presets[p].name, *attention = attention_variants[v].name;
            int signals = max_int(1, attention_variants[v].signals);
            if (presets[p].model.NH / presets[p].model.NKV % signals || presets[p].model.E) continue; // tests/experts.h
            covered[v]++;
            Options o;
            parse_text(&o, "--dry-run --match-params --preset %s --attention %s %s", preset, attention, windows[i % 3]);
            options_finish(&o, 1);
            ModelConfig c = options_config(&o), plain = c;
            plain.attention = variant_find("baseline");
            plain.F = presets[p].model.F;
            plain.window = 0, plain.yoco = plain.qk_norm = false;
            double want = (double)model_parameter_count(&plain, false),
                   difference = (double)model_parameter_count(&c, false) - want;
            EXPECT(fabs(difference) <= 1e-3 * want && 2 * fabs(difference) <= 3.0 * c.C * c.L,
                   "%s %s %s: MLP %d leaves %g parameters of %g", preset, attention, windows[i % 3], c.F, difference,
                   want);
            EXPECT(o.model.F == presets[p].model.F && (c.F == plain.F || c.attention != plain.attention || c.yoco) &&
                       c.window == 64 * (i % 3 > 0) && c.yoco == (i % 3 == 2) && c.qk_norm == (i % 3 == 1),
                   "%s %s %s: MLP %d, --ffn %d", preset, attention, windows[i % 3], c.F, o.model.F);
            // the baseline with YOCO lacks the key and value matrices of half of the layers, and has one more
            double wider = (double)c.F - plain.F, lacks = (c.L / 2 - 1) * 2.0 * c.NKV * c.D / (3.0 * c.L);
            EXPECT(!c.yoco || v > 0 || fabs(wider - lacks) <= 1, "%s %s: the MLP of YOCO is %g wider, not %g", preset,
                   attention, wider, lacks);
            options_free(&o);
        }
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        EXPECT(covered[v] > 0, "no preset has heads for %s", attention_variants[v].name);
}

// ---- values

static void test_derived_defaults(void) {
    Options o;
    parse_text(&o, "--train-data x");
    options_finish(&o, 3);
    EXPECT(o.warmup == 10, "warmup of 100 steps: %d", (int)o.warmup);
    EXPECT(o.threads == host_cores(""), "threads: %d", (int)o.threads);
    EXPECT(o.lr == 4e-3 && o.seed == 1 && o.temperature == 0.8 && o.schedule == SCHEDULE_COSINE, "defaults");
    EXPECT(o.out == NULL && o.generate == 0 && !o.resume && !o.eval, "defaults that are off");
    EXPECT(options_given(&o, "train-data") && !options_given(&o, "lr"), "what is given");
    options_free(&o);

    static const struct {
        const char *options;
        int ranks, batch, total;
    } batches[] = {
        {"", 1, 4, 1024},
        {"", 3, 1, 768},
        {"", 16, 1, 4096},
        {"--seq-len 512", 1, 2, 1024},
        {"--batch-size 3", 2, 3, 1536},
        {"--total-batch 1536", 1, 6, 1536},
        {"--total-batch 4096", 2, 8, 4096},
        {"--preset 124m", 8, 8, 524288},
        {"--preset small", 1, 8, 2048},
        {"--total-batch 3K", 1, 6, 3072},
    };
    for (size_t i = 0; i < sizeof(batches) / sizeof(batches[0]); i++) {
        parse_text(&o, "--train-data x %s", batches[i].options);
        options_finish(&o, batches[i].ranks);
        EXPECT(o.batch_size == batches[i].batch && o.total_batch == batches[i].total, "%s: %d sequences, %d tokens",
               batches[i].options, (int)o.batch_size, (int)o.total_batch);
        options_free(&o);
    }

    static const int steps[][2] = {{9, 0}, {700, 70}, {1000, 100}, {123456, 100}};
    for (int i = 0; i < 4; i++) {
        parse_text(&o, "--dry-run --steps %d", steps[i][0]);
        options_finish(&o, 1);
        EXPECT(o.warmup == steps[i][1], "warmup of %d steps: %d", steps[i][0], (int)o.warmup);
        options_free(&o);
    }
}

// ---- checkpoints

static void test_json_round_trip(void) {
    static const char *const words[] = {"train_diffv2",
                                        "--train-data=a \"b\"\n\xC3\xA4*",
                                        "--val-data=\\",
                                        "--seed=18446744073709551615",
                                        "--lr=0.30000000000000004",
                                        "--weight-decay=1.2345678901234567e-300",
                                        "--schedule=wsd",
                                        "--attention=baseline",
                                        "--no-tie-embeddings",
                                        "--steps=99999999",
                                        "--val-every=999999999999999",
                                        "--warmup=0",
                                        "--out=here",
                                        "--threads=3",
                                        "--preset=small",
                                        "--beta2=0.1"};
    Options saved, adopted;
    options_read(&saved, (int)(sizeof(words) / sizeof(words[0])), (char **)words);
    options_check(&saved);
    options_finish(&saved, 1);
    cJSON *all = options_to_json(&saved), *state = options_state_to_json(&saved);
    int index = 0;
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        const cJSON *item = cJSON_GetArrayItem(all, index);
        if (option_rows[r].kind == OPTION_ACTION || !option_exists(&option_rows[r])) continue;
        EXPECT(item && strcmp(item->string, option_rows[r].name) == 0, "--%s is not item %d", option_rows[r].name,
               index);
        index++;
    }
    EXPECT(cJSON_IsNull(cJSON_GetObjectItem(all, "init")), "an unset text is not null");
    EXPECT(cJSON_IsString(cJSON_GetObjectItem(all, "seed")), "a seed of 2^64-1 is not a string");
    EXPECT(cJSON_IsFalse(cJSON_GetObjectItem(all, "tie-embeddings")), "a flag is not a boolean");
    EXPECT(cJSON_GetObjectItem(state, "lr") && !cJSON_GetObjectItem(state, "out") &&
               !cJSON_GetObjectItem(state, "threads"),
           "the state has what is not of the run");
    for (int through = 0; through < 2; through++) { // all options, then those of the state
        size_t size = 0;
        char *text = json_text(through ? state : all, &size);
        cJSON *back = json_parse(text, size);
        parse_text(&adopted, "--resume --out=there");
        EXPECT(options_adopt_json(&adopted, back, "the checkpoint") == 0, "differences although nothing is given");
        options_finish(&adopted, 1);
        for (int r = 0; r < OPTION_ROW_COUNT; r++) {
            OptionText a, b;
            const char *was = option_text(a, &saved, r), *is = option_text(b, &adopted, r);
            if (option_rows[r].on_resume == OPTION_LOCAL) continue;
            EXPECT(was == is || (was && is && strcmp(was, is) == 0), "--%s: %s became %s", option_rows[r].name,
                   was ? was : "none", is ? is : "none");
        }
        EXPECT(strcmp(adopted.out, "there") == 0 && adopted.resume, "--out or --resume was adopted");
        EXPECT(adopted.lr == saved.lr && adopted.eps == saved.eps && adopted.seed == saved.seed, "a number changed");
        options_free(&adopted);
        cJSON_Delete(back);
        free(text);
    }
    cJSON_Delete(all);
    cJSON_Delete(state);
    options_free(&saved);
}

// A total batch and a warmup that the checkpoint has are not derived anew for other steps, batches or rank counts.
static void test_adopt_then_finish(void) {
    Options o;
    parse_text(&o, "--resume --out=x --batch-size=2");
    cJSON *saved =
        cJSON_Parse("{\"train-data\":\"t\",\"batch-size\":2,\"total-batch\":4096,\"warmup\":3,\"seq-len\":128}");
    EXPECT(options_adopt_json(&o, saved, "the checkpoint") == 0, "the batch size is the same");
    options_finish(&o, 4);
    EXPECT(o.total_batch == 4096 && o.warmup == 3 && o.model.T == 128 && o.model.L == 4,
           "total batch %d, warmup %d, seq-len %d", (int)o.total_batch, (int)o.warmup, o.model.T);
    cJSON_Delete(saved);
    options_free(&o);
}

// A trial without noise has its end and its result by hand: the first five updates, and moments in which others use the
// machine, do not count.
static void test_trial(void) {
    static const struct {
        double update, slow; // seconds: of most updates, and of every third one
        int measured;
    } cases[] = {{1e-3, 1e-3, 0}, {0.01, 0.02, 0}, {0.4, 0.4, 0}, {30, 30, 1}};
    for (int i = 0; i < 4; i++) {
        static Trial t;
        memset(&t, 0, sizeof(t));
        int n = 0;
        for (bool ends = false; !ends; n++)
            ends = trial_add(&t, n < TRIAL_WARM_UP ? 100 : n % 3 == 0 ? cases[i].slow : cases[i].update);
        double most = fmax(2 * TRIAL_SECONDS, cases[i].update), sum = t.measured;
        EXPECT(n == t.count && (cases[i].measured == 0 || trial_measured(&t) == cases[i].measured), "%d updates", n);
        EXPECT(sum >= TRIAL_SECONDS - 1e-9 && sum < most + cases[i].slow, "%g s measured", sum);
        EXPECT(trial_update(&t) == cases[i].update, "an update takes %g s", trial_update(&t));
    }
    Options o;
    parse_text(
        &o,
        "--train-data=t --minutes=1.5 --val-every=10 --sample-every=50 --checkpoint-every=20 --checkpoint-minutes=0.5");
    TrialCosts costs = {0.08, 0.1, 0.25, 0.1}; // 90 s = 2 * 0.1 + 4 * 0.1 + N * (0.08 + 0.01 + 0.005 + 0.005)
    EXPECT(trial_steps(&o, &costs) == 894, "%d steps", (int)trial_steps(&o, &costs));
    costs.update = 1e6;
    EXPECT(trial_steps(&o, &costs) == TRIAL_LEAST_STEPS, "%d steps", (int)trial_steps(&o, &costs));
    options_free(&o);
}

static void test_foreign_names(void) {
    for (const ForeignName *row = foreign_names; row < foreign_names + FOREIGN_NAME_COUNT; row++)
        for (const char *at = row->names; *at; at += strcspn(at, " "), at += strspn(at, " ")) {
            size_t n = strcspn(at, " ");
            int same = option_find(at, n);
            EXPECT(same < 0 || !option_exists(&option_rows[same]), "--%.*s is an option", (int)n, at);
            EXPECT(foreign_name(at, n) == row, "--%.*s is in two rows, or its option does not exist", (int)n, at);
        }
}

// clang-format off
static const Test options_tests[] = {
    {"a warmup rises linearly and reaches exactly the learning rate at its last step", test_warmup},
    {"schedules have the sums and the values of their closed forms", test_closed_forms},
    {"--match-params gives every variant of every preset the baseline's parameters to within 0.1%", test_match_params},
    {"the defaults of options follow from the preset, the steps, the batch and the ranks", test_derived_defaults},
    {"each name of another program is answered, and is no option", test_foreign_names},
    {"options survive JSON exactly, in table order", test_json_round_trip},
    {"a trial measures long enough, and its number of steps leaves time for all else", test_trial},
    {"a resumed run keeps its total batch and warmup for any batch size and rank count", test_adopt_then_finish},
};
// clang-format on
