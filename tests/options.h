/*
options.h: tests of presets, schedules and the command line. What ends the program is tested in the program
itself (test_program), or in a child process where it depends on a checkpoint.
*/
#ifndef TESTS_OPTIONS_H
#define TESTS_OPTIONS_H
#include "../llmc/base/json.h"
#include "../llmc/options/options.h"
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
    {100, 0, 1e-3, 0.1},    // no warmup
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
    return schedule_lr((Schedule)kind, step, c->steps, c->warmup, c->lr, c->min_lr_ratio);
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

static void test_floor(void) {
    FOR_EACH_SCHEDULE(kind, c) {
        bool decays = kind != SCHEDULE_CONSTANT && c->warmup < c->steps;
        double want = decays ? c->lr * c->min_lr_ratio : c->lr, lr = case_lr(kind, c, c->steps);
        EXPECT(lr == want, "%s, %d steps, warmup %d: the last step has %.17g, not %.17g", schedule_names[kind],
               (int)c->steps, (int)c->warmup, lr, want);
        EXPECT(c->warmup == c->steps || case_lr(kind, c, c->steps + 7) == want,
               "%s: steps beyond the last differ from it", schedule_names[kind]);
        if (decays && c->lr > 0 && c->min_lr_ratio < 1 && c->steps > c->warmup + 1)
            EXPECT(case_lr(kind, c, c->steps - 1) > want, "%s, %d steps, warmup %d: the floor comes early",
                   schedule_names[kind], (int)c->steps, (int)c->warmup);
    }
}

static void test_monotone(void) {
    FOR_EACH_SCHEDULE(kind, c) {
        for (int64_t step = c->warmup > 0 ? c->warmup : 1; step < c->steps; step++)
            EXPECT(case_lr(kind, c, step + 1) <= case_lr(kind, c, step), "%s, %d steps, warmup %d: it rises at %d",
                   schedule_names[kind], (int)c->steps, (int)c->warmup, (int)step + 1);
    }
}

// With n steps of decay, the shares of (lr - floor) that steps 1..n keep add up to (n-1)/2, for the cosine as for
// the line: sum of cos(pi k / n) over k = 1..n is -1.
static void test_closed_forms(void) {
    FOR_EACH_SCHEDULE(kind, c) {
        int64_t tail = (c->steps + 4) / 5, after = c->steps - c->warmup;
        int64_t n = kind == SCHEDULE_CONSTANT ? 0 : kind == SCHEDULE_WSD && tail < after ? tail : after;
        double floor_lr = c->lr * c->min_lr_ratio, sum = 0;
        double want = c->lr * (double)(after - n);
        if (n) want += floor_lr * (double)n + (c->lr - floor_lr) * (double)(n - 1) / 2;
        for (int64_t step = c->warmup + 1; step <= c->steps; step++) sum += case_lr(kind, c, step);
        double rounding = 1.2e-16 * (double)c->steps * (double)c->steps * c->lr; // steps additions, each of the sum
        EXPECT(fabs(sum - want) <= rounding, "%s, %d steps, warmup %d: sum %.17g, not %.17g", schedule_names[kind],
               (int)c->steps, (int)c->warmup, sum, want);
    }
    // a quarter of the way from step 20 to step 100 the two shapes are apart
    double line = schedule_lr(SCHEDULE_LINEAR, 40, 100, 20, 1.0, 0.2);
    double cosine = schedule_lr(SCHEDULE_COSINE, 40, 100, 20, 1.0, 0.2);
    EXPECT(fabs(line - 0.8) < 1e-15, "linear after a quarter: %.17g", line);
    EXPECT(fabs(cosine - (0.2 + 0.8 * (2 + sqrt(2.0)) / 4)) < 1e-15, "cosine after a quarter: %.17g", cosine);
    EXPECT(schedule_lr(SCHEDULE_WSD, 80, 100, 20, 1.0, 0.2) == 1.0, "wsd decays before its last 20%%");
    EXPECT(fabs(schedule_lr(SCHEDULE_WSD, 90, 100, 20, 1.0, 0.2) - 0.6) < 1e-15, "wsd half way down");
}

// ---- presets

// The words end in NULL. Not inline, as a compiler that sees their text warns of comparisons that are decided.
__attribute__((noinline)) static void parse_words(Options *o, const char *const *words) {
    int count = 0;
    while (words[count]) count++;
    options_parse(o, count, (char **)words);
}

static void test_presets(void) {
    // L (3CF + 2 NH D C + 2 NKV D C + 2C) + VC + C, and L C (NH D + NH) more for diff_v2
    static const struct {
        const char *preset;
        size_t baseline, diff_v2;
    } counts[] = {
        {"tiny", 771200, 838784},
        {"tiny-1.5h", 836736, 938112},
        {"tiny-2h", 902272, 1037440},
        {"small", 5968128, 6500608},
        {"small-1.5h", 6492416, 7291136},
        {"small-2h", 7016704, 8081664},
        {"124m", 116473344, 123661824},
        {"124m-1.5h", 123551232, 134333952},
        {"124m-2h", 130629120, 145006080},
        {"350m", 329910272, 355469312},
        {"350m-1.5h", 355076096, 393414656},
        {"350m-2h", 380241920, 431360000},
        {"830m", 833594880, 890807808},
        {"830m-1.5h", 833594880, 919414272},
        {"830m-2h", 890217984, 1004643840},
        {"1.4b", 1419741184, 1521190912},
        {"1.4b-1.5h", 1419741184, 1571915776},
        {"1.4b-2h", 1520404480, 1723303936},
        {"2.8b", 2778728960, 2990082560},
        {"2.8b-1.5h", 2778728960, 3095759360},
        {"2.8b-2h", 2988444160, 3411151360},
        {"3b", 3479153664, 3745459200},
        {"3b-1.5h", 3479153664, 3878611968},
        {"3b-2h", 3743394816, 4276005888},
        {"6.8b", 6861885440, 7402950656},
        {"6.8b-1.5h", 6861885440, 7673483264},
        {"6.8b-2h", 7398756352, 8480886784},
        {"13.1b", 13123015680, 14179783680},
        {"13.1b-1.5h", 13123015680, 14708167680},
        {"13.1b-2h", 14171591680, 16285127680},
        {"moe-tiny", 2397312, 2464896},
        {"moe-tiny-1.5h", 2462848, 2564224},
        {"moe-tiny-2h", 2528384, 2663552},
        {"moe-small", 18977024, 19509504},
        {"moe-small-1.5h", 19501312, 20300032},
        {"moe-small-2h", 20025600, 21090560},
        {"30b-a3b", 30532110336, 30937909248},
        {"30b-a3b-1.5h", 30934763520, 31543461888},
        {"30b-a3b-2h", 31337416704, 32149014528},
    };
    EXPECT(PRESET_COUNT == sizeof(counts) / sizeof(counts[0]), "%d presets", (int)PRESET_COUNT);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        for (int diff = 0; diff < 2; diff++) {
            const char *attention = diff ? "diff_v2" : "baseline", *preset = counts[i].preset;
            const char *words[] = {"train_diffv2", "--dry-run", "--preset", preset, "--attention", attention, NULL};
            Options o;
            parse_words(&o, words);
            options_finish(&o, 1);
            ModelConfig c = options_model(&o);
            TensorList list = tensor_list_build(&c, 1);
            size_t want = diff ? counts[i].diff_v2 : counts[i].baseline;
            EXPECT(list.parameter_count == want, "%s %s: %zu parameters, not %zu", preset, attention,
                   list.parameter_count, want);
            tensor_list_free(&list);
            options_free(&o);
        }
    }
}

// The parameters of one layer's attention, of `preset` with `kv_heads` as `attention`; *lambda of them in lambda_proj.
static size_t attention_parameters(const char *preset, int kv_heads, const char *attention, size_t *lambda) {
    char kv[16];
    FORMAT(kv, "%d", kv_heads);
    const char *words[] = {"train_diffv2", "--dry-run", "--preset",    preset,    "--kv-heads", kv, "--layers", "1",
                           "--vocab",      "1",         "--attention", attention, NULL};
    Options o;
    parse_words(&o, words);
    options_finish(&o, 1);
    ModelConfig c = options_model(&o);
    TensorList list = tensor_list_build(&c, 1);
    size_t count = 0;
    for (int i = 0; i < list.count; i++)
        if (strstr(list.tensors[i].name, "self_attn")) count += list.tensors[i].count;
    const Tensor *projection = tensor_of(&list, T_LAMBDA, 0);
    *lambda = projection ? projection->count : 0;
    tensor_list_free(&list);
    options_free(&o);
    return count;
}
static void test_comparison_presets(void) {
    for (int i = 0; i < PRESET_COUNT; i += 3) {
        const char *name = presets[i].name, *more_name = presets[i + 1].name, *twice_name = presets[i + 2].name;
        const ModelConfig *p = &presets[i].model, *more = &presets[i + 1].model, *twice = &presets[i + 2].model;
        int kv = more->NKV;
        size_t lambda, none, diff = attention_parameters(name, kv, "diff_v2", &lambda);
        EXPECT(2 * more->NH == 3 * p->NH && twice->NH == 2 * p->NH && twice->NKV == kv && p->NH / 2 % kv == 0,
               "%s: %d heads, then %d and %d, on %d key/value heads", name, p->NH, more->NH, twice->NH, kv);
        EXPECT(kv == p->NKV || p->NH / 2 % p->NKV, "%s: %d key/value heads, and %d with more heads", name, p->NKV, kv);
        EXPECT(attention_parameters(more_name, kv, "baseline", &none) == diff - lambda && lambda > 0 && none == 0,
               "%s has not the attention parameters of diff_v2 with the heads of %s", more_name, name);
        ModelConfig c, plain;
        memset(&c, 0, sizeof(c));
        c.attention = variant_find("diff_v2"), c.NH = p->NH, c.NKV = kv, c.D = p->D;
        plain = c;
        plain.attention = variant_find("baseline");
        plain.NH = twice->NH;
        AttentionDims a = attention_dims(&c, false), b = attention_dims(&plain, false);
        EXPECT(a.NQ == b.NQ && a.QD == b.QD && a.NK == b.NK && a.NV == b.NV && a.DV == b.DV,
               "%s has not the attention kernel of diff_v2 with the heads of %s", twice_name, name);
    }
}

// 3 C L parameters depend on each unit of the width, so half of that may be missing: at most 0.1% in tiny.
static void test_match_params(void) {
    static const char *const windows[] = {"--window=0", "--window=64", "--yoco"};
    static const char *const more[] = {NULL, "--qk-norm", "--window=64"};
    int covered[ATTENTION_VARIANT_COUNT] = {0}; // presets and options; few presets have heads for diff_grouped_4
    for (int p = 0; p < PRESET_COUNT; p++)
        for (int i = 0; i < 3 * ATTENTION_VARIANT_COUNT; i++) {
            int v = i / 3;
            const char *preset = presets[p].name, *attention = attention_variants[v].name;
            int signals = max_int(1, attention_variants[v].signals);
            if (presets[p].model.NH / presets[p].model.NKV % signals || presets[p].model.E) continue; // tests/experts.h
            covered[v]++;
            const char *words[] = {"x",           "--dry-run", "--match-params", "--preset",  preset,
                                   "--attention", attention,   windows[i % 3],   more[i % 3], NULL};
            Options o;
            parse_words(&o, words);
            options_finish(&o, 1);
            ModelConfig c = options_model(&o), plain = c;
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

// ---- what is refused

static ProgramResult program;

// clang-format off
static const char *const wrong_options[][2] = {
    // arguments, and what the one line on stderr says
    {"--bogus 1", "unknown option --bogus: "},
    {"--bogus=1", "unknown option --bogus: "},
    {"--wd 0.1", "unknown option --wd: did you mean --weight-decay?"}, // never -w 0
    {"-wd 0.1", "unknown option -wd: did you mean --weight-decay?"},
    {"--learning-rate 0.1", "unknown option --learning-rate: did you mean --lr?"},
    {"--learning_rate=0.1", "unknown option --learning_rate: did you mean --lr?"},
    {"--batch_size 4", "did you mean --batch-size?"},
    {"--Steps 4", "did you mean --steps?"},
    {"-l 3", "unknown option -l: "},
    {"--batch 4", "did you mean --batch-size?"},
    {"--step 4", "did you mean --steps?"},
    {"--warm-up=4", "did you mean --warmup?"},
    {"--trian-data 'x*'", "did you mean --train-data?"},
    {"--no-tie-embedings", "did you mean --no-tie-embeddings?"},
    {"--no-lr", "unknown option --no-lr: "},
    {"--dry-run --full-every 2", "--full-every 2 requires --window W (--attention"},
    {"--dry-run --window 8 --full-every 1", "--full-every 1 leaves no layer a window"},
    {"--dry-run --window 8 --full-every 5", "--full-every 5 is more than the 4 layers"},
    {"--dry-run --yoco", "YOCO requires a window for the lower half of the layers (--attention"},
    {"--dry-run --yoco --window 8 --full-every 2", "--yoco and --full-every are mutually exclusive"},
    {"--dry-run --yoco --window 8 --layers 3", "YOCO requires an even number of layers, not 3"},
    {"--dry-run --window -1", "--window '-1' is not accepted: it must be a whole number in [0, 16777216]"},
    {"--dry-run --window 16777217", "--window '16777217' is not accepted"},
    {"--dry-run --window 1.5", "--window '1.5' is not accepted"},
    {"--dry-run --window all --yoco", "--window 'all' is not accepted"}, // not: YOCO requires a window
    {"--dry-run --window 8 --full-every 65537", "--full-every '65537' is not accepted"},
    {"--dry-run --yoco 8 --window 8", "unexpected argument '8'"},
    {"--", "unknown option --: "},
    {"--kept 3 --dry-run", "unknown option --kept: "},
    {"--dry-run 5", "unexpected argument '5'"},
    {"shards.bin --dry-run", "unexpected argument 'shards.bin'"},
    {"'' --dry-run", "unexpected argument ''"},
    {"-5 --dry-run", "unexpected argument '-5'"},
    {"--dry-run=yes", "--dry-run takes no value, not 'yes'"},
    {"--no-dry-run=1 --dump-grads x --train-data x", "--dry-run takes no value, not '1'"},
    {"--lr --dry-run", "--lr requires a value: a number in [0, inf)"},
    {"--dry-run --lr", "--lr requires a value"},
    {"--dry-run --out --seed 1", "--out requires a value"},
    {"--dry-run --out ''", "--out '' is not accepted"},
    {"--dry-run --out=", "--out '' is not accepted"},
    {"--dry-run --lr 1e", "--lr '1e' is not accepted: it must be a number in [0, inf)"},
    {"--dry-run --lr 0x10", "--lr '0x10'"},
    {"--dry-run --lr ''", "--lr ''"},
    {"--dry-run --lr=", "--lr ''"},
    {"--dry-run --lr ' 3'", "--lr ' 3'"},
    {"--dry-run --lr '3 '", "--lr '3 '"},
    {"--dry-run --lr nan", "--lr 'nan'"},
    {"--dry-run --lr inf", "--lr 'inf'"},
    {"--dry-run --lr 1e999", "in [0, inf), 0 or of a magnitude from 2.3e-308 to 1.7e308"},
    {"--dry-run --lr 1e-999", "in [0, inf), 0 or of a magnitude from 2.3e-308 to 1.7e308"}, // not silently 0
    {"--dry-run --lr 1,5", "--lr '1,5'"},
    {"--dry-run --lr 1e-3.", "--lr '1e-3.'"},
    {"--dry-run --lr -1e-3", "--lr '-1e-3'"},
    {"--dry-run --skip-loss-z -1", "--skip-loss-z '-1' is not accepted: it must be a number in [0, inf)"},
    {"--dry-run --skip-grad-z inf", "--skip-grad-z 'inf'"},
    {"--dry-run --steps 1.5", "--steps '1.5' is not accepted: it must be a whole number in [1, 1e15]"},
    {"--dry-run --steps 1.5e0", "--steps '1.5e0'"},
    {"--dry-run --steps 1e16", "--steps '1e16'"},
    {"--dry-run --steps 1e-1", "--steps '1e-1'"},
    {"--dry-run --steps e3", "--steps 'e3'"},
    {"--dry-run --steps 1e", "--steps '1e'"},
    {"--dry-run --steps 1.", "--steps '1.'"},
    {"--dry-run --steps 0x10", "--steps '0x10'"},
    {"--dry-run --steps ' 3'", "--steps ' 3'"},
    {"--dry-run --steps +3", "--steps '+3'"},
    {"--dry-run --steps ''", "--steps ''"},
    {"--dry-run --steps 3k", "--steps '3k'"},
    {"--dry-run --steps 0", "--steps '0'"},
    {"--dry-run --steps -1", "--steps '-1'"},
    {"--dry-run --steps 9223372036854775808", "--steps '9223372036854775808'"}, // 2^63
    {"--dry-run --steps 18446744073709551617", "--steps '18446744073709551617'"}, // 2^64 + 1
    {"--dry-run --layers 0", "--layers '0'"},
    {"--dry-run --layers 4294967297", "--layers '4294967297'"}, // 1 as a 32-bit number
    {"--dry-run --head-dim 512", "--head-dim '512' is not accepted: it must be a whole number in [8, 256]"},
    {"--dry-run --batch-size 0", "--batch-size '0'"},
    {"--dry-run --min-lr-ratio 1.01", "--min-lr-ratio '1.01'"},
    {"--dry-run --beta1 1", "--beta1 '1' is not accepted: it must be a number in [0, 1)"},
    {"--dry-run --beta2 -0.1", "--beta2 '-0.1'"},
    {"--dry-run --eps 0", "--eps '0' is not accepted: it must be a number in (0, inf)"},
    {"--dry-run --rope-theta 0", "--rope-theta '0'"},
    {"--dry-run --grad-clip -1", "--grad-clip '-1'"},
    {"--dry-run --weight-decay -1", "--weight-decay '-1'"},
    {"--dry-run --temperature -1", "--temperature '-1'"},
    {"--dry-run --threads 0", "--threads '0'"},
    {"--dry-run --val-steps 0", "--val-steps '0'"},
    {"--dry-run --seed -1", "--seed '-1'"},
    {"--dry-run --seed 18446744073709551616", "--seed '18446744073709551616'"}, // 2^64
    {"--dry-run --gemm fp4", "--gemm 'fp4' is not accepted: did you mean fp8? It must be one of fp32, bf16, fp8"},
    {"--dry-run --gemm FP8", "did you mean fp8?"},
    {"--dry-run --gemm ''", "--gemm ''"},
    {"--dry-run --attention diff", "--attention 'diff' is not accepted: did you mean diff_v2? It must be one of"},
    {"--dry-run --attention diffv2", "--attention 'diffv2' is not accepted: did you mean diff_v2?"},
    {"--dry-run --attention DIFF_V1", "did you mean diff_v1?"},
    {"--dry-run --attention flash", "--attention 'flash' is not accepted: it must be one of baseline, diff_v2"},
    {"--dry-run --attention ''", "--attention ''"},
    {"--dry-run --preset 124M", "--preset '124M' is not accepted: did you mean 124m?"},
    {"--dry-run --schedule cos", "did you mean cosine? It must be one of cosine, linear, wsd, constant"},
    {"--dry-run --schedule \"$(printf 'a\\nb')\"", "--schedule 'a?b'"}, // a line stays a line
    {"--dry-run --lr 1 --lr 1", "--lr is specified more than once"},
    {"--dry-run --lr=1 --seed 2 --lr 2", "--lr is specified more than once"},
    {"--dry-run --tie-embeddings --no-tie-embeddings", "--tie-embeddings is specified more than once"},
    {"--steps 10", "training requires --train-data"},
    {"", "training requires --train-data"},
    {"--eval --train-data x", "--eval requires --val-data"},
    {"--dump-grads x --val-data x", "--dump-grads requires --train-data"},
    {"--generate 0 --train-data x", "--generate '0'"},
    {"--generate 3 --prompt 'a\xC3\xA9\xFFx'", "--prompt is not valid UTF-8 at byte 4: use UTF-8, or --prompt-tokens"},
    {"--generate 3 --prompt-tokens 1,x", "--prompt-tokens '1,x' is not accepted: it must be token IDs"},
    {"--generate 3 --prompt-tokens 1,,2", "--prompt-tokens '1,,2'"},
    {"--generate 3 --prompt-tokens 1,", "--prompt-tokens '1,'"},
    {"--generate 3 --prompt-tokens -1", "--prompt-tokens '-1'"},
    {"--generate 3 --prompt-tokens 2147483648", "--prompt-tokens '2147483648'"},
    {"--resume", "--resume requires --out"},
    {"--init a --resume --out b", "--init and --resume are mutually exclusive"},
    {"--eval --dry-run --val-data x", "--eval and --dry-run are mutually exclusive"},
    {"--eval --dump-grads y --generate 3 --dry-run --train-data x --val-data x",
     "--dump-grads and --generate and --eval and --dry-run are mutually exclusive"},
    {"--train-data x --quantize w8a8", "--quantize requires --eval"},
    {"--train-data x --eval-needles 4:2",
     "--eval-needles was removed: data/synthetic_tasks.py needles writes these tasks as a file for --eval-choices"},
    {"--train-data x --eval-shots=4", "--eval-shots was removed: data/synthetic_tasks.py shots"},
    {"--train-data x --tune-gemm y",
     "--tune-gemm takes no value, not 'y': the choices are part of --out, and a resumed run uses them"},
    {"--probe x --val-data y", "--probe was removed: 'python3 scripts/lab probe' computes its numbers from a file of"},
    {"--train-data x --dump-qkv y", "--dump-qkv requires --eval"},
    {"--eval --val-data x --quantize w8a8,w9a8", "--quantize 'w9a8' is not accepted: it must be wNaM, wNaM:tensor"},
    {"--eval --val-data x --quantize w1a8", "'w1a8'"},
    {"--eval --val-data x --quantize w166a8", "'w166a8'"},
    {"--eval --val-data x --quantize w8a8,", "''"},
    {"--eval --val-data x --quantize w8a8:channel", "'w8a8:channel'"},
    {"--eval --val-data x --quantize logits", "'logits'"},
    {"--eval --val-data x --quantize logitsw8a8", "'logitsw8a8'"},
    {"--eval --val-data x --quantize w8a8+w4a4", "'w8a8+w4a4'"},
    {"--eval --val-data x --quantize logits8+logits4", "'logits8+logits4'"},
    {"--eval --val-data x --quantize w8a8+", "'w8a8+'"},
    {"--eval --val-data x --quantize w16a16:tensor+logits16+logits16+logits16", "'w16a16:tensor+logits16+logits"},
    {"--dry-run --steps 10 --warmup 11", "--warmup 11 is more than --steps 10"},
    {"--dry-run --batch-size 3 --seq-len 5 --total-batch 44",
        "is not a multiple of --batch-size 3 times --seq-len 5 times 1 rank; use --total-batch 45"},
    {"--dry-run --batch-size 8 --seq-len 16 --total-batch 96", "1 rank; use --batch-size 6 or --total-batch 128"},
    {"--dry-run --batch-size 8 --seq-len 16 --total-batch 96 --ranks 3",
        "3 ranks; use --batch-size 2 or --total-batch 384"},
    {"--dry-run --batch-size 8 --seq-len 16 --total-batch 112", "1 rank; use --batch-size 7 or --total-batch 128"},
    {"--dry-run --batch-size 1000000 --seq-len 1000000", "is more than 2147483647 tokens"},
    {"--dry-run --heads 3", "3 heads are not a multiple of 2 key/value heads (--attention diff_v2 --layers 4 --heads"},
    {"--dry-run --kv-heads 3", "--kv-heads 3"},
    // a noise head has signal heads of one key/value group only
    {"--dry-run --attention diff_grouped_4 --heads 8 --kv-heads 4",
        "diff_grouped_4 needs a multiple of 4 heads for each key/value head, not 8 heads for 4"},
    {"--dry-run --attention diff_grouped_2 --heads 6 --kv-heads 2",
        "diff_grouped_2 needs a multiple of 2 heads for each key/value head, not 6 heads for 2"},
    {"--dry-run --attention diff_grouped_3",
        "'diff_grouped_3' is not accepted: did you mean diff_grouped_2? It must be one of baseline, diff_v2"},
    {"--dry-run --qk-norm=1", "--qk-norm takes no value, not '1'"},
    {"--dry-run --qk-norm --no-qk-norm", "is specified more than once"},
    {"--dry-run --qk_norm", "did you mean --qk-norm?"},
    {"--dry-run --match-params --ffn 40", "--match-params: diff_v2 has more parameters than the baseline with --ffn "
     "40"},
    {"--dry-run --match-params --ffn 4x", "--ffn '4x'"}, // and no word of what the preset's would come to
    {"--dry-run --match-params --kv-heads 3", "--kv-heads 3"},
    {"--dry-run --match-params=1", "--match-params takes no value"},
    {"--dry-run --match-params --no-match-params", "--match-params is specified more than once"},
};
// clang-format on
enum { WRONG_OPTION_COUNT = sizeof(wrong_options) / sizeof(wrong_options[0]) };

static void test_wrong_options(void) {
    for (int i = 0; i < WRONG_OPTION_COUNT; i++) {
        const char *arguments = wrong_options[i][0];
        run_command(&program, "%s %s", test_program(), arguments);
        EXPECT(program.status == 2, "%s: exit status %d", arguments, program.status);
        EXPECT(count_lines(program.err) == 1 && strncmp(program.err, "diffv2: ", 8) == 0,
               "%s: stderr is not one line: %s", arguments, program.err);
        EXPECT(strstr(program.err, wrong_options[i][1]) != NULL, "%s: '%s' is not in: %s", arguments,
               wrong_options[i][1], program.err);
        EXPECT(program.out[0] == 0, "%s: there is something on stdout: %s", arguments, program.out);
    }
}

static void test_options_without_effect(void) {
    static const char *const cases[][2] = {
        {"--dry-run --sdpa-linear", "--sdpa-linear has no effect on a CPU"},
        {"--dry-run --no-deterministic", "--no-deterministic has no effect on a CPU"},
        {"--dry-run --measure-peak", "--measure-peak has no effect on a CPU"},
        {"--dry-run --stop-after 9 --steps 3", "--stop-after 9 has no effect: the run ends after --steps 3"},
        {"--dry-run --val-every 2", "--val-every has no effect without --val-data"},
        {"--dry-run --rollback 1:2", "--rollback has no effect without --out"},
        {"--train-data none --checkpoint-every 2", "--checkpoint-every has no effect without --out"},
        {"--dry-run --sdpa-linear --device H100", ""},
        {"--dry-run --deterministic --no-measure-peak --stop-after 3 --steps 3", ""},
        {"--dry-run --checkpoint-every 2 --keep 2", ""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        run_command(&program, "%s %s", test_program(), cases[i][0]);
        EXPECT(cases[i][1][0] ? strstr(program.err, cases[i][1]) != NULL : !program.err[0], "%s: %s", cases[i][0],
               program.err);
    }
}

static void test_all_at_once(void) {
    static const char *const want[] = {
        "unknown option --bogus", "--lr '1e'",     "'file'", "--seed is specified more than once", "--beta1 '1'",
        "--init and --resume",    "--out requires"};
    enum { WANT_COUNT = sizeof(want) / sizeof(want[0]) };
    run_command(&program, "%s --bogus 1 --lr 1e file --seed 1 --seed 2 --beta1=1 --init x --resume --out",
                test_program());
    EXPECT(program.status == 2 && count_lines(program.err) == WANT_COUNT, "status %d, %d lines are expected: %s",
           program.status, (int)WANT_COUNT, program.err);
    for (int i = 0; i < WANT_COUNT; i++)
        EXPECT(strstr(program.err, want[i]) != NULL, "'%s' is missing: %s", want[i], program.err);

    // options against each other in the same go, when no checkpoint has a say
    run_command(&program, "%s --lr 1e --warmup 200 --steps 5 --heads 3 --batch-size 2 --total-batch 7", test_program());
    EXPECT(program.status == 2 && count_lines(program.err) == 5, "status %d, 5 lines are expected: %s", program.status,
           program.err);
    // a refused number brings no second complaint about the default in its place
    run_command(&program, "%s --dry-run --steps 1k --warmup 200 --heads 3x --kv-heads 3 --total-batch x",
                test_program());
    EXPECT(program.status == 2 && count_lines(program.err) == 3, "status %d, 3 lines are expected: %s", program.status,
           program.err);
}

static void test_accepted_edges(void) {
    static const char *const lines[] = {
        "--dry-run",
        "--dry-run --lr 0 --min-lr-ratio 0 --warmup 0 --grad-clip 0 --beta1 0 --beta2 0 --weight-decay 0 --top-k 0",
        "--dry-run --skip-loss-z 0 --skip-grad-z=1e9",
        "--dry-run --steps 1e3 --total-batch 1.048576e6 --batch-size 4E0 --seq-len 256 --warmup 1e+2",
        "--dry-run --min-lr-ratio 1 --steps 7 --warmup 7 --seed 18446744073709551615 --schedule wsd",
        "--dry-run --lr=.5 --eps=1E-8 --rope-theta=+5e5 --temperature=0",
        "--dry-run --batch-size 2 --seq-len 16 --total-batch 96 --threads 1",
        "--dry-run --no-tie-embeddings --no-resume --no-eval --attention baseline",
        "--dry-run --prompt=--lr",
        "--dry-run --match-params --ffn 45 --attention diff_v2", // 44 narrower
        "--dry-run --window 16777216",
        "--dry-run --window 1 --full-every 4",
        "--dry-run --window 1 --yoco --layers 2 --attention diff_v1",
        "--dry-run --window 0 --full-every 0 --no-yoco",
        "--dry-run --attention diff_grouped_4 --heads 8 --kv-heads 2 --qk-norm --window 8 --yoco",
        "--dry-run --attention diff_grouped_4 --heads 4 --kv-heads 1 --no-qk-norm",
    };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        run_command(&program, "%s %s", test_program(), lines[i]);
        EXPECT(program.status == 0 && program.err[0] == 0, "%s: status %d, %s", lines[i], program.status, program.err);
    }
}

// ---- values

static void test_derived_defaults(void) {
    static const char *const plain[] = {"train_diffv2", "--train-data", "x", NULL};
    Options o;
    parse_words(&o, plain);
    options_finish(&o, 3);
    EXPECT(o.warmup == 10, "warmup of 100 steps: %d", (int)o.warmup);
    EXPECT(o.total_batch == 8 * 256 * 3, "total batch on 3 ranks: %d", (int)o.total_batch);
    EXPECT(o.threads == host_cores(""), "threads: %d", (int)o.threads);
    EXPECT(o.lr == 1e-3 && o.seed == 1 && o.temperature == 0.8 && o.schedule == SCHEDULE_COSINE, "defaults");
    EXPECT(o.out == NULL && o.generate == 0 && !o.resume && !o.eval, "defaults that are off");
    EXPECT(options_given(&o, "train-data") && !options_given(&o, "lr"), "what is given");
    options_free(&o);

    static const char *const steps[][2] = {{"9", "0"}, {"700", "70"}, {"1000", "100"}, {"123456", "100"}};
    for (int i = 0; i < 4; i++) {
        const char *words[] = {"train_diffv2", "--dry-run", "--steps", steps[i][0], NULL};
        parse_words(&o, words);
        options_finish(&o, 1);
        EXPECT(o.warmup == atoi(steps[i][1]), "warmup of %s steps: %d", steps[i][0], (int)o.warmup);
        options_free(&o);
    }

    static const char *const flags[] = {
        "train_diffv2", "--train-data",        "x",         "--steps=5000", "--preset",   "350m", "--hidden", "512",
        "--vocab=300",  "--no-tie-embeddings", "--seq-len", "64",           "--head-dim", "32",   NULL};
    parse_words(&o, flags);
    options_finish(&o, 1);
    ModelConfig c = options_model(&o);
    EXPECT(o.warmup == 100, "warmup of 5000 steps: %d", (int)o.warmup);
    EXPECT(c.L == 24 && c.NH == 16 && c.NKV == 8 && c.F == 2752, "from the preset: L %d NH %d NKV %d F %d", c.L, c.NH,
           c.NKV, c.F);
    EXPECT(c.C == 512 && c.V == 300 && c.T == 64 && c.D == 32 && !c.tied, "from flags: C %d V %d T %d D %d tied %d",
           c.C, c.V, c.T, c.D, c.tied);
    EXPECT(c.rope_theta == 10000 && c.rms_norm_eps == 1e-5, "rope theta %g, eps %g", c.rope_theta, c.rms_norm_eps);
    options_free(&o);
}

// ---- checkpoints

// Runs a function in a child process and returns what it printed and how it ended.
static void run_in_child(ProgramResult *r, void (*run)(const void *), const void *argument) {
    TestDirectory d = test_make_directory();
    char out[600], err[600];
    FORMAT(out, "%s/out", d.path);
    FORMAT(err, "%s/err", d.path);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0, "cannot start a child process: %s", strerror(errno));
    if (pid == 0) {
        bool redirected = freopen(out, "w", stdout) && freopen(err, "w", stderr);
        if (redirected) run(argument);
        fflush(NULL);
        _exit(redirected ? 0 : 99);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid, "a child process is lost: %s", strerror(errno));
    r->status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    test_read_file(out, r->out, sizeof(r->out));
    test_read_file(err, r->err, sizeof(r->err));
    test_remove_directory(&d);
}

static cJSON *parse_json(const char *text) {
    cJSON *json = cJSON_Parse(text);
    CHECK(json != NULL, "a test's JSON is none: %s", text);
    return json;
}

static void test_json_round_trip(void) {
    static const char *const words[] = {"train_diffv2",
                                        "--train-data=a \"b\"\n\xC3\xA4*",
                                        "--val-data=\\",
                                        "--seed=18446744073709551615",
                                        "--lr=0.30000000000000004",
                                        "--eps=1.2345678901234567e-300",
                                        "--schedule=wsd",
                                        "--attention=baseline",
                                        "--no-tie-embeddings",
                                        "--steps=999999999999999",
                                        "--warmup=0",
                                        "--out=here",
                                        "--threads=3",
                                        "--preset=small",
                                        "--beta2=0.1",
                                        NULL};
    static const char *const resume[] = {"train_diffv2", "--resume", "--out=there", NULL};
    Options saved, adopted;
    parse_words(&saved, words);
    options_finish(&saved, 1);
    cJSON *all = options_to_json(&saved), *state = options_state_to_json(&saved);
    int index = 0;
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        const cJSON *item = cJSON_GetArrayItem(all, index);
        if (option_rows[r].kind == OPTION_ACTION) continue;
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
        parse_words(&adopted, resume);
        EXPECT(options_adopt_json(&adopted, back) == 0, "differences although nothing is given");
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

typedef struct {
    const char *saved;   // JSON
    const char *word[3]; // given besides --resume --out x
    int status, differences;
    const char *said; // on stdout when the status is 0, else on stderr
} AdoptCase;

// clang-format off
static const AdoptCase adopt_cases[] = {
    {"{\"lr\":0.001}", {NULL}, 0, 0, ""},
    {"{\"lr\":0.001}", {"--lr=1e-3", NULL}, 0, 0, ""}, // the same number, written otherwise
    {"{\"lr\":0.001}", {"--lr=0.002", NULL}, 0, 1, "option --lr: 0.001 in the checkpoint, 0.002 now\n"},
    {"{\"val-data\":null}", {"--val-data=x", NULL}, 0, 1, "option --val-data: none in the checkpoint, x now\n"},
    {"{\"threads\":3,\"out\":\"y\",\"init\":\"z\"}", {"--threads=2", NULL}, 0, 0, ""}, // of this start alone
    {"{\"later\":null}", {NULL}, 0, 0, ""},
    {"{\"seed\":1}", {"--seed=1", NULL}, 0, 0, ""},
    {"{\"seed\":1}", {"--seed=2", NULL}, 2, 0, "--seed: 1 in the checkpoint, 2 now"},
    {"{\"seq-len\":256}", {"--seq-len=128", NULL}, 2, 0, "--seq-len: 256 in the checkpoint, 128 now"},
    {"{\"layers\":4,\"seed\":1}", {"--layers=5", "--seed=3", NULL}, 2, 0, "--layers: 4 in the checkpoint, 5 now"},
    {"{\"layers\":4,\"seed\":1}", {"--layers=5", "--seed=3", NULL}, 2, 0, "--seed: 1 in the checkpoint, 3 now"},
    {"{\"attention\":\"diff_v2\"}", {"--attention=baseline", NULL}, 2, 0, "--attention: diff_v2 in the checkpoint"},
    {"{\"window\":8}", {"--window=9", NULL}, 2, 0, "--window: 8 in the checkpoint, 9 now"},
    {"{\"window\":8}", {"--window=8", NULL}, 0, 0, ""},
    {"{\"full-every\":2}", {"--full-every=3", NULL}, 2, 0, "--full-every: 2 in the checkpoint, 3 now"},
    {"{\"yoco\":true}", {"--no-yoco", NULL}, 2, 0, "--yoco: yes in the checkpoint, no now"},
    {"{\"qk-norm\":false}", {"--qk-norm", NULL}, 2, 0, "--qk-norm: no in the checkpoint, yes now"},
    {"{\"qk-norm\":true}", {"--no-qk-norm", NULL}, 2, 0, "--qk-norm: yes in the checkpoint, no now"},
    {"{\"qk-norm\":true}", {"--qk-norm", NULL}, 0, 0, ""},
    {"{\"tie-embeddings\":true}", {"--no-tie-embeddings", NULL}, 2, 0, "--tie-embeddings: yes in the checkpoint, no "
     "now"},
    // the file that earlier versions wrote
    {"{\"tune-gemm\":\"table.json\"}", {"--tune-gemm", NULL}, 0, 0, ""},
    {"{\"tune-gemm\":\"table.json\"}", {"--no-tune-gemm", NULL}, 0, 1, "option --tune-gemm: yes in the checkpoint, no "
     "now\n"},
    {"{\"tune-gemm\":null}", {NULL}, 0, 0, ""},
    // what this program does not write
    {"{\"tune-gemm\":1}", {NULL}, 1, 0, "value of --tune-gemm"},
    {"[]", {NULL}, 1, 0, "not a JSON object"},
    {"null", {NULL}, 1, 0, "not a JSON object"},
    {"{\"later\":1}", {NULL}, 1, 0, "--later, which this version does not support"},
    {"{\"help\":true}", {NULL}, 1, 0, "--help, which"},
    {"{\"lr\":1,\"lr\":2}", {NULL}, 1, 0, "--lr twice"},
    {"{\"\":1}", {NULL}, 1, 0, "does not support"},
    {"{\"lr\":\"a\"}", {NULL}, 1, 0, "value of --lr: it must be a number in [0, inf)"},
    {"{\"lr\":-1}", {NULL}, 1, 0, "value of --lr"},
    {"{\"lr\":1e999}", {NULL}, 1, 0, "value of --lr"},
    {"{\"lr\":true}", {NULL}, 1, 0, "value of --lr"},
    {"{\"lr\":[1]}", {NULL}, 1, 0, "value of --lr"},
    {"{\"lr\":{}}", {"--lr=1", NULL}, 1, 0, "value of --lr"}, // even where the flag wins
    {"{\"steps\":1.5}", {NULL}, 1, 0, "value of --steps"},
    {"{\"steps\":1e300}", {NULL}, 1, 0, "value of --steps"},
    {"{\"steps\":0}", {NULL}, 1, 0, "value of --steps"},
    {"{\"seed\":-1}", {NULL}, 1, 0, "value of --seed"},
    {"{\"seed\":18446744073709551615}", {NULL}, 1, 0, "value of --seed"}, // 2^64 - 1: no double holds it
    {"{\"seed\":9007199254740994}", {NULL}, 1, 0, "value of --seed"},     // 2^53 + 2: may have been rounded
    {"{\"seed\":\"1e3\"}", {NULL}, 1, 0, "value of --seed"},
    {"{\"layers\":4294967297}", {NULL}, 1, 0, "value of --layers"},
    {"{\"window\":-1}", {NULL}, 1, 0, "value of --window"},
    {"{\"yoco\":1}", {NULL}, 1, 0, "value of --yoco"},
    {"{\"schedule\":0}", {NULL}, 1, 0, "value of --schedule"},
    {"{\"schedule\":\"\"}", {NULL}, 1, 0, "value of --schedule"},
    {"{\"tie-embeddings\":1}", {NULL}, 1, 0, "value of --tie-embeddings"},
    {"{\"tie-embeddings\":\"yes\"}", {NULL}, 1, 0, "value of --tie-embeddings"},
    {"{\"train-data\":true}", {NULL}, 1, 0, "value of --train-data"}, // not the text "yes"
    {"{\"train-data\":5}", {NULL}, 1, 0, "value of --train-data"},
    {"{\"train-data\":\"\"}", {NULL}, 1, 0, "value of --train-data"},
};
// clang-format on

static void adopt_case_run(const void *argument) {
    const AdoptCase *c = (const AdoptCase *)argument;
    const char *words[7] = {"train_diffv2", "--resume", "--out=x", c->word[0], c->word[0] ? c->word[1] : NULL, NULL};
    Options o;
    parse_words(&o, words);
    cJSON *saved = parse_json(c->saved);
    int differences = options_adopt_json(&o, saved);
    fprintf(stderr, "%d", differences);
    cJSON_Delete(saved);
    options_free(&o);
}

static void test_adopt(void) {
    for (size_t i = 0; i < sizeof(adopt_cases) / sizeof(adopt_cases[0]); i++) {
        const AdoptCase *c = &adopt_cases[i];
        const char *word = c->word[0] ? c->word[0] : "";
        run_in_child(&program, adopt_case_run, c);
        EXPECT(program.status == c->status, "%s %s: status %d, %s", c->saved, word, program.status, program.err);
        if (c->status) {
            EXPECT(strstr(program.err, c->said) != NULL, "%s %s: '%s' is not in: %s", c->saved, word, c->said,
                   program.err);
        } else {
            EXPECT(strcmp(program.out, c->said) == 0, "%s %s: stdout '%s'", c->saved, word, program.out);
            EXPECT(atoi(program.err) == c->differences, "%s %s: %s differences", c->saved, word, program.err);
        }
    }
}

// A total batch and a warmup that the checkpoint has are not derived anew for other steps, batches or rank counts.
static void test_adopt_then_finish(void) {
    static const char *const words[] = {"train_diffv2", "--resume", "--out=x", "--batch-size=2", NULL};
    Options o;
    parse_words(&o, words);
    cJSON *saved =
        parse_json("{\"train-data\":\"t\",\"batch-size\":2,\"total-batch\":4096,\"warmup\":3,\"seq-len\":128}");
    EXPECT(options_adopt_json(&o, saved) == 0, "the batch size is the same");
    options_finish(&o, 4);
    EXPECT(o.total_batch == 4096 && o.warmup == 3 && o.model.T == 128 && o.model.L == 4,
           "total batch %d, warmup %d, seq-len %d", (int)o.total_batch, (int)o.warmup, o.model.T);
    cJSON_Delete(saved);
    options_free(&o);
}

static void finish_without_data(const void *argument) {
    static const char *const words[] = {"train_diffv2", "--resume", "--out=x", "--total-batch=2048", NULL};
    Options o;
    parse_words(&o, words);
    options_finish(&o, *(const int *)argument);
    options_free(&o);
}
static void test_finish_refuses(void) {
    int ranks = 3;
    run_in_child(&program, finish_without_data, &ranks);
    EXPECT(program.status == 2 && count_lines(program.err) == 2, "status %d, 2 lines are expected: %s", program.status,
           program.err);
    EXPECT(strstr(program.err, "training requires --train-data") &&
               strstr(program.err, "times 3 ranks; use --total-batch 6144"),
           "stderr: %s", program.err);
}

static ModelConfig loaded_model(void) {
    ModelConfig c;
    memset(&c, 0, sizeof(c));
    c.attention = variant_find("baseline");
    c.L = 3, c.C = 64, c.NH = 4, c.NKV = 2, c.D = 16, c.F = 96, c.T = 512, c.V = 1000;
    c.rope_theta = 500000;
    c.rms_norm_eps = 1e-6;
    c.tied = false;
    return c;
}

// clang-format off
static const struct {
    const char *words[10];
    int count; // of contradictions
    const char *said;
} contradiction_cases[] = {
    {{"x", "--init=m", "--dry-run", NULL}, 0, ""},
    {{"x", "--init=m", "--dry-run", "--seq-len=64", NULL}, 0, ""},
    {{"x", "--init=m", "--dry-run", "--layers=3", "--vocab=1000", "--no-tie-embeddings", "--attention=baseline", NULL},
     0, ""},
    {{"x", "--init=m", "--dry-run", "--layers=4", NULL}, 1, "--layers 4 contradicts the loaded model, which has 3"},
    {{"x", "--init=m", "--dry-run", "--vocab=256", NULL}, 1, "--vocab 256 contradicts"},
    {{"x", "--init=m", "--dry-run", "--attention=diff_v2", NULL}, 1, "--attention diff_v2 contradicts"},
    {{"x", "--init=m", "--dry-run", "--rope-theta=10000", NULL}, 1, "--rope-theta 10000 contradicts"},
    {{"x", "--init=m", "--dry-run", "--window=8", NULL}, 1, "--window 8 contradicts the loaded model, which has 0"},
    {{"x", "--init=m", "--dry-run", "--yoco", NULL}, 1, "--yoco contradicts the loaded model, which has --no-yoco"},
    {{"x", "--init=windows", "--dry-run", NULL}, 0, ""},
    {{"x", "--init=windows", "--dry-run", "--window=8", "--full-every=3", "--no-yoco", NULL}, 0, ""},
    {{"x", "--init=windows", "--dry-run", "--window=9", NULL}, 1, "--window 9 contradicts the loaded model, which"},
    {{"x", "--init=windows", "--dry-run", "--full-every=0", NULL}, 1, "--full-every 0 contradicts the loaded model, "
     "which has 3"},
    {{"x", "--init=yoco", "--dry-run", NULL}, 0, ""},
    {{"x", "--init=yoco", "--dry-run", "--yoco", "--window=8", NULL}, 0, ""},
    {{"x", "--init=yoco", "--dry-run", "--no-yoco", NULL},
        1,
        "--no-yoco contradicts the loaded model, which has --yoco"},
    {{"x", "--init=m", "--dry-run", "--qk-norm", NULL},
        1,
        "--qk-norm contradicts the loaded model, which has --no-qk-norm"},
    {{"x", "--init=qk-norm", "--dry-run", NULL}, 0, ""},
    {{"x", "--init=qk-norm", "--dry-run", "--qk-norm", NULL}, 0, ""},
    {{"x", "--init=qk-norm", "--dry-run", "--no-qk-norm", NULL}, 1, "--no-qk-norm contradicts the loaded model, which "
     "has --qk-norm"},
    {{"x", "--init=m", "--dry-run", "--tie-embeddings", NULL}, 1, "--tie-embeddings contradicts"},
    {{"x", "--init=m", "--dry-run", "--heads=2", "--ffn=95", "--head-dim=8", NULL}, 3, "--ffn 95 contradicts"},
    {{"x", "--init=m", "--dry-run", "--match-params", "--ffn=96", NULL}, 0, ""},
    {{"x", "--init=m", "--dry-run", "--match-params", "--ffn=95", NULL}, 1, "--ffn 95 requires an MLP width of 95; "
     "the loaded model has 96"},
    {{"x", "--init=m", "--dry-run", "--match-params", "--preset=tiny", "--hidden=64", "--layers=3",
      "--head-dim=16", "--vocab=1000", NULL}, 2, "--ffn 352 requires an MLP width of 352; the loaded"},
    // tiny differs in layers, hidden, head-dim, ffn, vocab and tied; heads and key/value heads agree
    {{"x", "--init=m", "--dry-run", "--preset=tiny", NULL}, 6, "--preset tiny, with --layers 4, contradicts"},
    {{"x", "--init=m", "--dry-run", "--preset=tiny", "--layers=3", "--no-tie-embeddings", NULL}, 4, "--hidden 128"},
};
// clang-format on

static void adopt_model_run(const void *argument) {
    Options o;
    parse_words(&o, (const char *const *)argument);
    ModelConfig loaded = loaded_model();
    bool windows = strcmp(o.init, "windows") == 0, yoco = strcmp(o.init, "yoco") == 0;
    if (windows || yoco) loaded.window = 8, loaded.full_every = windows ? 3 : 0;
    if (yoco) loaded.L = 4, loaded.yoco = true;
    loaded.qk_norm = strcmp(o.init, "qk-norm") == 0;
    options_adopt_model(&o, &loaded);
    options_finish(&o, 1);
    ModelConfig c = options_model(&o);
    int64_t T = options_given(&o, "seq-len") ? o.model.T : 512;
    loaded.T = (int)T;
    bool same = c.attention == loaded.attention && c.L == loaded.L && c.C == loaded.C && c.NH == loaded.NH &&
                c.NKV == loaded.NKV && c.D == loaded.D && c.F == loaded.F && c.V == loaded.V && c.T == loaded.T &&
                c.rope_theta == loaded.rope_theta && c.rms_norm_eps == loaded.rms_norm_eps && c.tied == loaded.tied &&
                c.window == loaded.window && c.full_every == loaded.full_every && c.yoco == loaded.yoco &&
                c.qk_norm == loaded.qk_norm;
    if (!same || o.total_batch != 8 * T) warn("the loaded model was not adopted");
    options_free(&o);
}

static void test_contradictions(void) {
    for (size_t i = 0; i < sizeof(contradiction_cases) / sizeof(contradiction_cases[0]); i++) {
        const char *const *words = contradiction_cases[i].words;
        const char *last = words[3] ? words[3] : "";
        int count = contradiction_cases[i].count;
        run_in_child(&program, adopt_model_run, words);
        EXPECT(program.status == (count ? 2 : 0), "%s: status %d", last, program.status);
        EXPECT(count_lines(program.err) == count, "%s: %d lines are expected: %s", last, count, program.err);
        EXPECT(strstr(program.err, contradiction_cases[i].said) != NULL, "%s: '%s' is not in: %s", last,
               contradiction_cases[i].said, program.err);
    }
}

// ---- help

static void help_text(char *text, size_t size) {
    char *buffer = NULL;
    size_t length = 0;
    FILE *f = open_memstream(&buffer, &length);
    CHECK(f != NULL, "cannot open a stream in memory: %s", strerror(errno));
    options_print_help(f);
    fclose(f);
    CHECK(length < size, "the help has %zu bytes, the test room for %zu", length, size);
    memcpy(text, buffer, length + 1);
    free(buffer);
}

static void test_help(void) {
    static char help[32768];
    help_text(help, sizeof(help));
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        char line[128];
        FORMAT(line, "\n  --%s%s", option_rows[r].kind == OPTION_BOOL ? "[no-]" : "", option_rows[r].name);
        const char *at = strstr(help, line);
        EXPECT(at && strchr(" ,\n", at[strlen(line)]), "--%s is not in the help", option_rows[r].name);
        EXPECT(strlen(option_rows[r].name) < 64 &&
                   strcspn(option_rows[r].name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == strlen(option_rows[r].name),
               "a name is long or not lower case: %s", option_rows[r].name);
        for (int other = 0; other < r; other++)
            EXPECT(strcmp(option_rows[r].name, option_rows[other].name) != 0, "two rows of --%s", option_rows[r].name);
    }
    for (const char *line = help; *line; line += strcspn(line, "\n") + 1)
        EXPECT(strcspn(line, "\n") <= 100, "too long a line of help: %.120s", line);
    static const char *const asks[] = {"--help", "-h", "--lr x --help"};
    for (int i = 0; i < 3; i++) {
        run_command(&program, "%s %s", test_program(), asks[i]);
        EXPECT(program.status == 0 && strcmp(program.out, help) == 0 && program.err[0] == 0,
               "%s prints, with status %d: %.300s %s", asks[i], program.status, program.out, program.err);
    }
    run_command(&program, "%s --version", test_program());
    EXPECT(program.status == 0 && count_lines(program.out) == 1, "--version prints, with status %d: %s", program.status,
           program.out);
}

static void test_options_document(void) {
    static char help[32768], document[65536];
    help_text(help, sizeof(help));
    test_read_file("docs/options.md", document, sizeof(document));
    EXPECT(strstr(document, help) != NULL, "docs/options.md does not contain the text of --help");
}

// clang-format off
static const Test options_tests[] = {
    {"a warmup rises linearly and reaches exactly the learning rate at its last step", test_warmup},
    {"a decaying schedule reaches exactly its floor at the last step, not before", test_floor},
    {"a learning rate never rises after the warmup", test_monotone},
    {"schedules have the sums and the values of their closed forms", test_closed_forms},
    {"presets have the parameter counts that they state", test_presets},
    {"presets of 1.5 and 2 times the heads have DIFF V2's attention parameters and its kernel",
     test_comparison_presets},
    {"--match-params gives every variant of every preset the baseline's parameters to within 0.1%", test_match_params},
    {"every invalid option ends the program with status 2 and a line that states what is accepted", test_wrong_options},
    {"an option that changes nothing is reported", test_options_without_effect},
    {"all errors of a command line are reported together", test_all_at_once},
    {"values at the edges of their ranges are accepted", test_accepted_edges},
    {"the defaults of options follow from the preset, the steps, the batch and the ranks", test_derived_defaults},
    {"options survive JSON exactly, in table order", test_json_round_trip},
    {"a resumed run adopts the checkpoint's options, reports changes and rejects damaged ones", test_adopt},
    {"a resumed run keeps its total batch and warmup for any batch size and rank count", test_adopt_then_finish},
    {"errors that depend on the rank count or a checkpoint are reported together", test_finish_refuses},
    {"architecture options that contradict a loaded model are rejected, a sequence length is not", test_contradictions},
    {"the help lists every option, in 100 columns, and is what the program prints", test_help},
    {"docs/options.md contains the text of the help", test_options_document},
};
// clang-format on
enum { OPTIONS_TEST_COUNT = sizeof(options_tests) / sizeof(options_tests[0]) };
#endif
