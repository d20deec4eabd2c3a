/*
cuda_trainer.h: the CUDA trainer against the CPU trainer, both run as programs: gradients, losses and statistics of
every variant, resumed runs, activation recomputation, messages about the device and its memory. One test runs in this
process: it counts how often a step waits for the device.

The shapes are unaligned on purpose: rows that are no multiple of 8 or 16, widths that are no multiple of a 16-byte
pack, a vocabulary with V % 8 = 3 or of a few tokens, one row, and a sequence below the model's context.
*/
#pragma once
#include "choice_file.h"
#include "fixture.h"
#include "harness.h"
#include "run_log.h"
#include <string>
#include <vector>

static const bool cuda_fp32 = sizeof(floatX) == 4;
static const char *const cuda_precision = sizeof(floatX) == 4 ? "fp32" : "bf16";

typedef struct {
    const char *why, *options;
    int vocab;
} CudaCase;
#define ODD_SHAPE                                                                                       \
    "--hidden 20 --heads 6 --kv-heads 2 --head-dim 12 --ffn 27 --vocab 43 --seq-len 13 --batch-size 3 " \
    "--no-tie-embeddings"
#define ODD_MODEL "--layers 3 " ODD_SHAPE
#define TRAIN_ODD "--train-data data.bin " ODD_MODEL
static const CudaCase cuda_cases[] = {
    {"39 rows, V % 8 = 3, widths no multiple of 8, groups of 3", ODD_MODEL, 43},
    {"packs of 16 bytes everywhere, one past a tile of rows",
     "--layers 2 --hidden 64 --heads 4 --kv-heads 4 --head-dim 16 --ffn 96 --vocab 256 --seq-len 65 --batch-size 2 "
     "--tie-embeddings",
     256},
    {"one row, five tokens, one layer, with a z-loss",
     "--layers 1 --hidden 16 --heads 2 --kv-heads 2 --head-dim 8 --ffn 12 --vocab 5 --seq-len 1 --batch-size 1 "
     "--tie-embeddings --z-loss 0.5",
     5},
};
enum { CUDA_CASES = sizeof(cuda_cases) / sizeof(cuda_cases[0]) };

// --attention and the options of a shape, with as many more heads as the variant needs; every second time QK-norm.
static const char *with_variant(int variant, const char *shape, int time) {
    const AttentionVariant *a = &attention_variants[variant];
    const char *at = strstr(shape, "--heads "), *kv = strstr(shape, "--kv-heads ");
    int heads = 0, groups = 0, length = 0;
    CHECK(at && sscanf(at, "--heads %d%n", &heads, &length) == 1 && kv && sscanf(kv, "--kv-heads %d", &groups) == 1,
          "a shape without heads: %s", shape);
    while (a->signals > 1 && heads / groups % a->signals) heads += groups;
    return test_text("--attention %s %.*s--heads %d%s%s", a->name, (int)(at - shape), shape, heads, at + length,
                     (variant + time) % 2 ? " --qk-norm" : "");
}
static int variant_index(const char *name) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        if (strcmp(attention_variants[v].name, name) == 0) return v;
    CHECK(false, "no variant %s", name);
}

// Options of one of two models with experts.
static const char *expert_options(int model) {
    return test_text("--train-data data.bin %s %s", with_variant(variant_index("diff_v2"), ODD_SHAPE, 0),
                     model ? "--experts 4 --experts-active 1 --expert-ffn 12 --shared-experts 2 --dense-layers 1"
                           : "--experts 5 --experts-active 3 --expert-ffn 24");
}

// The device's trainer: this program.
static const char *device_trainer(void) { return test_text("'%s' --trainer", test_self()); }
// With assignments of its environment.
PRINTF_LIKE(1, 2)
static const char *device_with(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const char *command = test_text("%s %s", test_text_of(fmt, args), device_trainer());
    va_end(args);
    return command;
}
static const char *cpu_trainer(void) { return test_text("'%s'", test_program_path()); }

// A directory with a shard data.bin of tokens below `vocab`. One of six tokens is 0, which separates documents, so that
// most sequences have one. With this seed no row of a batch is so near zero that its norm before o_proj amplifies the
// rounding of bf16.
static TestDirectory cuda_data(int vocab) {
    int tokens[4000];
    TestDirectory d = test_make_directory();
    TestRandom r = {12};
    for (int &token : tokens) {
        token = min_int(test_random_int(&r, vocab), test_random_int(&r, vocab)); // small tokens are more likely
        if (test_random_int(&r, 6) == 0) token = 0;
    }
    test_write_shard(test_text("%s/data.bin", d.path), 2, tokens, 4000);
    return d;
}

// Runs a trainer in a directory and expects the exit status. Returns whether it was that.
PRINTF_LIKE(5, 6)
static bool run_in(ProgramResult *r, const TestDirectory *d, const char *trainer, int status, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const char *options = test_text_of(fmt, args);
    va_end(args);
    run_command(r, "cd '%s' && %s --threads 1 %s", d->path, trainer, options);
    EXPECT(r->status == status, "status %d, not %d: %s %s: %.400s", r->status, status, trainer, options, r->err);
    return r->status == status;
}

// Trains the run "cpu" on the CPU and "device" on the device.
PRINTF_LIKE(2, 3)
static void run_both(const TestDirectory *d, const char *fmt, ...) {
    ProgramResult r;
    va_list args;
    va_start(args, fmt);
    const char *options = test_text_of(fmt, args);
    va_end(args);
    run_in(&r, d, cpu_trainer(), 0, "%s --out cpu", options);
    run_in(&r, d, device_trainer(), 0, "%s --out device", options);
}

static void expect_same_files(const TestDirectory *d, const char *what, const char *a, const char *b) {
    ProgramResult r;
    run_command(&r, "cd '%s' && diff -rq %s %s", d->path, a, b);
    EXPECT(r.status == 0, "%s: %s and %s differ: %.300s", what, a, b, r.out);
}

// stderr is one line, and contains `text`.
static void expect_error(const ProgramResult *r, const char *text) {
    EXPECT(count_lines(r->err) == 1 && strstr(r->err, text), "stderr is not one line with '%s': %.600s", text, r->err);
}

// A tensor of two dumps of gradients: the squares of the CPU's (x) and the device's (y), their product, and the square
// of their difference.
typedef struct {
    std::string name;
    double xx, yy, xy, error;
} DumpPair;
static std::vector<DumpPair> read_dumps(const char *what, const char *cpu, const char *gpu) {
    SafeTensors *a = safetensors_open(cpu), *b = safetensors_open(gpu);
    std::vector<DumpPair> pairs;
    EXPECT(a->count == b->count, "%s: %zu tensors on the device, %zu on the CPU", what, b->count, a->count);
    for (size_t i = 0; i < a->count; i++) {
        const SafeTensor *t = &a->tensors[i], *u = safetensors_find(b, t->name);
        EXPECT(u && u->count == t->count, "%s: the device has no %s of this size", what, t->name);
        if (!u || u->count != t->count) continue;
        std::vector<double> x(t->count), y(t->count);
        DumpPair p = {t->name, 0, 0, 0, 0};
        safetensors_read(a, t->name, 0, t->count, x.data(), DTYPE_F64);
        safetensors_read(b, t->name, 0, t->count, y.data(), DTYPE_F64);
        for (size_t e = 0; e < t->count; e++)
            p.xx += x[e] * x[e], p.yy += y[e] * y[e], p.xy += x[e] * y[e], p.error += (x[e] - y[e]) * (x[e] - y[e]);
        pairs.push_back(p);
    }
    safetensors_close(a);
    safetensors_close(b);
    return pairs;
}

// Compares two dumps of gradients. In fp32 they agree to rounding, which grows with the depth of the model and depends
// on the kernels of the CPU's library: 77 units were seen. In bf16, which rounds each activation to 8 bits, directions
// agree to `cosine` and lengths to 15%. The gradients of lambda vectors are a scalar times another vector; much of the
// scalar cancels, and cuDNN rounds probabilities too: 40% (24% was seen, and less than 15% without cuDNN). In fp32 it
// costs another bit. exact: the comparison of fp32.
static void compare_dumps(const char *what, double cosine, bool exact, const char *cpu, const char *gpu) {
    const std::vector<DumpPair> pairs = read_dumps(what, cpu, gpu);
    double largest = 0, epsilon = exact ? 0x1p-23 : 0x1p-8;
    for (const DumpPair &p : pairs) largest = p.name == "loss" ? largest : fmax(largest, sqrt(p.xx));
    for (const DumpPair &p : pairs) {
        const char *name = p.name.c_str();
        double norm = sqrt(p.xx), error = sqrt(p.error), angle = p.xy / sqrt(p.xx * p.yy), length = sqrt(p.yy) / norm;
        bool lambda = strstr(name, ".lambda_q") || strstr(name, ".lambda_k");
        if (p.name == "loss")
            EXPECT(error <= 8 * epsilon * norm, "%s: losses differ by %.3g of %.6g", what, error, norm);
        else if (exact)
            EXPECT(error <= (lambda ? 256 : 128) * epsilon * norm + 4 * epsilon * largest,
                   "%s: %s is off by %.3g of its norm", what, name, error / norm);
        else if (norm > 1e-3 * largest)
            EXPECT(angle >= cosine && fabs(length - 1) < (lambda ? 0.4 : 0.15),
                   "%s: %s: cosine %.5f, %.3f times as long", what, name, angle, length);
    }
}

// With lambda 1, two maps that are similar at the start are subtracted: most of the difference is rounding.
static double least_cosine(const AttentionVariant *a) { return a->lambda == LAMBDA_ONE ? 0.93 : 0.99; }

static void dump_both(const TestDirectory *d, const AttentionVariant *variant, const char *what, const char *options) {
    ProgramResult r;
    if (run_in(&r, d, cpu_trainer(), 0, "%s --dump-grads cpu.safetensors", options) &&
        run_in(&r, d, device_trainer(), 0, "%s --dump-grads device.safetensors", options))
        compare_dumps(what, least_cosine(variant), cuda_fp32, test_text("%s/cpu.safetensors", d->path),
                      test_text("%s/device.safetensors", d->path));
}

// On the weights of the reference, with more options.
static void dump_fixture(const char *variant, const char *name, const char *more) {
    TestDirectory d = test_make_directory();
    Fixture f = fixture_open(variant, name);
    const char *options = test_text("--init '%s' --train-data '%s/tokens.bin' --batch-size %d --seq-len %d %s",
                                    f.dir.path, f.dir.path, f.B, f.T, more);
    dump_both(&d, variant_find(variant), f.name, options);
    safetensors_close(f.file);
}

// On the weights of the reference, which are so large that every gradient is, and on initial weights at unaligned
// shapes.
static void test_gradients_of_variants(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        const char *name = attention_variants[v].name;
        for (int s = 0; s < (cuda_fp32 ? 2 : 1); s++) dump_fixture(name, s == 0 ? "a" : "b", "");
        for (int c = 0; c < CUDA_CASES; c++) {
            TestDirectory d = cuda_data(cuda_cases[c].vocab);
            const char *options = test_text("--train-data data.bin %s", with_variant(v, cuda_cases[c].options, c));
            dump_both(&d, &attention_variants[v], test_text("%s, %s", name, cuda_cases[c].why), options);
        }
    }
}

// Windows in all layers, in all but every second one, and the lower half of YOCO, within and beyond documents. The
// sequence has 13 positions: a window of 13 hides none.
static void test_gradients_of_windows(void) {
    static const char *const windows[] = {"--yoco --window 13", "--yoco --window 4 --doc-mask --separator 0",
                                          "--window 4 --full-every 2", "--window 1 --doc-mask --separator 0"};
    TestDirectory d = cuda_data(43);
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int w = 0; w < 4; w++) {
            const char *name = attention_variants[v].name;
            if (w > 1 && strcmp(name, "diff_v2") != 0 && strcmp(name, "diff_v1") != 0 && strcmp(name, "sink") != 0)
                continue;
            const char *options =
                test_text("--train-data data.bin --layers 4 %s %s", with_variant(v, ODD_SHAPE, w), windows[w]);
            dump_both(&d, &attention_variants[v], test_text("%s, %s", name, windows[w]), options);
        }
}

// Every number of the records but the times is within `tolerance` of its size, and finite where the CPU's is.
static void compare_records(const TestDirectory *d, const char *what, const char *kind, int wanted, double tolerance) {
    cJSON *cpu = read_records(d, "cpu", kind), *gpu = read_records(d, "device", kind);
    int cpu_count = cJSON_GetArraySize(cpu), device_count = cJSON_GetArraySize(gpu);
    EXPECT(cpu_count == wanted && device_count == wanted, "%s: %d and %d %s records, not %d", what, cpu_count,
           device_count, kind, wanted);
    for (int i = 0; i < min_int(cpu_count, device_count); i++)
        for (const cJSON *x = cJSON_GetArrayItem(cpu, i)->child; x; x = x->next) {
            const cJSON *y = cJSON_GetObjectItemCaseSensitive(cJSON_GetArrayItem(gpu, i), x->string);
            if (strstr(x->string, "ms") || strcmp(x->string, "tokens_per_s") == 0 ||
                strcmp(x->string, "flops_util") == 0)
                continue;
            // in bf16, near ties of a few of 12 examples have another order
            double slack = !cuda_fp32 && strncmp(x->string, "accuracy", 8) == 0 ? 0.35 : 1e-6;
            EXPECT(y && x->type == y->type, "%s: %s of %s is of another kind", what, x->string, kind);
            if (y && cJSON_IsNumber(x))
                EXPECT(fabs(x->valuedouble - y->valuedouble) <= tolerance * fabs(x->valuedouble) + slack,
                       "%s: %s record %d: %s is %.9g, on the CPU %.9g", what, kind, i, x->string, y->valuedouble,
                       x->valuedouble);
        }
    cJSON_Delete(cpu);
    cJSON_Delete(gpu);
}

// Phases of five lengths, with windows in half of the layers and a smaller last batch of each validation.
static void test_phases(void) {
    static const char *const train =
        "--train-data data.bin --val-data data.bin --layers 2 --hidden 20 --heads 2 --kv-heads 1 --head-dim 8 --ffn 27 "
        "--vocab 43 --window 3 --full-every 2 --seq-len 12 --batch-size 2 --total-batch 24 --steps 6 --lr 3e-3 "
        "--warmup 1 --val-every 1 --phase 1:seq-len=6,batch-size=4 --phase 2:seq-len=8,batch-size=3 --phase "
        "3:seq-len=4,batch-size=6 --phase 4:seq-len=3,batch-size=8,rope-theta=500 --phase 5:total-batch=48";
    TestDirectory d = cuda_data(43);
    run_both(&d, "%s", train);
    compare_records(&d, "phases", "train", 6, cuda_fp32 ? 2e-4 : 0.03);
    compare_records(&d, "phases", "val", 7, cuda_fp32 ? 2e-4 : 0.03);
}

// The reference's models with experts, then initial weights at unaligned shapes. In bf16 a few tokens near a tie go to
// other experts than on the CPU: there the gradients are compared between levels of recomputation, bit for bit, and the
// losses of a run.
static void test_experts(void) {
    static const char *const fixtures[][2] = {{"baseline", "m"}, {"diff_v2", "m"}, {"diff_v1", "x"}};
    ProgramResult r;
    for (int i = 0; i < 3 && cuda_fp32; i++)
        dump_fixture(fixtures[i][0], fixtures[i][1], "--router-aux 0.5 --router-z 0.1");
    TestDirectory d = cuda_data(43);
    for (int i = 0; i < 2; i++) {
        const char *options = expert_options(i);
        if (cuda_fp32) dump_both(&d, variant_find("diff_v2"), options, options);
        for (int level = 0; level < 3; level++)
            run_in(&r, &d, device_trainer(), 0, "%s --recompute %d --dump-grads level%d.safetensors", options, level,
                   level);
        expect_same_files(&d, "--recompute 1", "level0.safetensors", "level1.safetensors");
        expect_same_files(&d, "--recompute 2", "level0.safetensors", "level2.safetensors");
        run_both(&d, "%s --steps 3 --lr 3e-3 --warmup 1 --val-data data.bin --val-steps 1 --stats-every 3", options);
        compare_records(&d, options, "train", 3, cuda_fp32 ? 1e-4 : 0.03);
        run_command(&r, "cd '%s' && rm -r cpu device", d.path);
    }
}

// The reference's block-sparse models, in fp32: in bf16 rows near a tie select other blocks than on the CPU. Then a run
// with documents and statistics, and text from a ring of keys, of which bf16 tests the losses.
static void test_sparse_models(void) {
    static const char *const fixtures[][2] = {
        {"baseline", "s"}, {"diff_v2", "s"}, {"diff_v2", "p"}, {"diff_v1", "p"}, {"diff_grouped_2", "o"}};
    ProgramResult text[2];
    for (int i = 0; i < 5 && cuda_fp32; i++) dump_fixture(fixtures[i][0], fixtures[i][1], "");
    TestDirectory d = cuda_data(43);
    run_both(&d, "--train-data data.bin --doc-mask --separator 0 --preset tiny --layers 2 --hidden 32 --heads 2 "
                 "--kv-heads 1 --head-dim 8 --ffn 32 --vocab 43 --seq-len 32 --batch-size 2 --window 20 --yoco "
                 "--sparse-blocks 1 --sparse-block-size 4 --steps 3 --lr 3e-3 --warmup 1 --stats-every 3");
    for (int gpu = 0; gpu < 2; gpu++)
        run_in(&text[gpu], &d, gpu ? device_trainer() : cpu_trainer(), 0,
               "--init cpu/checkpoints/step_00000003 --generate 28 --prompt-tokens 1,2,3 --temperature 0");
    compare_records(&d, "block-sparse attention", "train", 3, cuda_fp32 ? 1e-4 : 0.03);
    EXPECT(!cuda_fp32 || strcmp(text[0].out, text[1].out) == 0, "text of block-sparse attention: %.200s and %.200s",
           text[0].out, text[1].out);
}

// With documents for every second variant, completep for some of the others and Muon for every third; with validation,
// multiple choice and statistics. In fp32 with --qk-clip: in bf16 single heads are on the other side of the limit.
// Where a norm of each head follows, the gradient of a projected lambda is about 0 at the start, as the maps of a pair
// are similar: AdamW makes steps of its rounding, and a small rate keeps them small.
static void test_losses_of_variants(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    choice_write_random(test_text("%s/three", d.path), 3, 12, 3, 43, 13, 5);
    choice_write_random(test_text("%s/one", d.path), 4, 12, 1, 43, 13, 6);
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v += cuda_fp32 ? 2 : 1) { // in fp32 every second variant
        const char *name = attention_variants[v].name;
        run_both(&d,
                 "--train-data data.bin --val-data data.bin --val-steps 1 %s --steps 3 --lr %s "
                 "--warmup 1 --stats-every 3 --eval-choices 'three=three one=one' %s %s",
                 with_variant(v, cuda_cases[0].options, 0),
                 attention_variants[v].lambda == LAMBDA_INPUT && attention_variants[v].norm == NORM_HEAD ? "3e-4"
                                                                                                         : "3e-3",
                 v % 2        ? "--doc-mask --separator 0"
                 : v % 4 == 2 ? "--parametrization completep --base-width 16 --base-depth 1 --base-head-dim 8"
                              : "",
                 v % 3 == 1                ? "--optimizer normuon --muon-split pair"
                 : cuda_fp32 && v % 2 == 0 ? "--qk-clip 0.004"
                                           : "");
        compare_records(&d, name, "train", 3, cuda_fp32 ? 1e-4 : 0.03);
        compare_records(&d, name, "val", 2, cuda_fp32 ? 1e-5 : 0.01);
        compare_records(&d, name, "choices", 4, cuda_fp32 ? 1e-4 : 0.05);
        compare_records(&d, name, "stats", 6, cuda_fp32 ? 2e-3 : 0.3);
        run_command(&r, "cd '%s' && rm -rf cpu device", d.path);
    }
}

static void test_recompute_bits(void) {
    ProgramResult r;
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        TestDirectory d = cuda_data(43);
        const char *name = attention_variants[v].name;
        for (int fp8 = 0; fp8 < (v % 3 ? 1 : 2); fp8++) { // in fp8 every third variant
            for (int level = 0; level < 3; level++)
                run_in(&r, &d, device_trainer(), 0, "--train-data data.bin %s --recompute %d --dump-grads %d %s",
                       with_variant(v, cuda_cases[0].options, 0), level, level, fp8 ? "--gemm fp8" : "");
            expect_same_files(&d, fp8 ? "in fp8" : name, "0", "1");
            expect_same_files(&d, fp8 ? "in fp8" : name, "0", "2");
        }
    }
}

#ifdef CUDA_ON_CPU
// A result that depends on the order of threads is a race.
static void test_thread_orders(void) {
    static const char *const orders[] = {"forward", "reverse", "shuffled:5"};
    static const char *const names[] = {
        "diff_v2", "diff_v1", "sink", "gated_elem", "diff_grouped_2", "diff_v2_head_lambda", "diff_v2_xsa", "diff_v2"};
    enum { NAMES = sizeof(names) / sizeof(names[0]) };
    ProgramResult r;
    for (int v = 0; v < NAMES; v++) { // the last one in fp8
        TestDirectory d = cuda_data(43);
        for (int o = 0; o < 3; o++) {
            run_in(&r, &d, device_with("CUDA_ON_CPU_ORDER=%s", orders[o]), 0,
                   "--train-data data.bin %s --dump-grads %d %s",
                   with_variant(variant_index(names[v]), cuda_cases[0].options, 0), o,
                   v == NAMES - 1 ? "--gemm fp8" : "");
        }
        expect_same_files(&d, names[v], "0", "1");
        expect_same_files(&d, names[v], "0", "2");
    }
}

// The first line of the output states what computes attention, and why it is not cuDNN. Gradients of diff_v1, whose
// widths of keys and values differ, agree with the CPU's.
static void expect_attention_of(const char *model, const char *options, const char *fp32_line, const char *bf16_line) {
    const char *line = cuda_fp32 ? fp32_line : bf16_line;
    TestDirectory d = cuda_data(256);
    ProgramResult r;
    const char *all = test_text("--train-data data.bin %s %s", model, options);
    run_in(&r, &d, device_trainer(), 0, "%s --steps 1", all);
    const char *first = test_text("%.*s", (int)strcspn(r.out, "\n"), r.out);
    EXPECT(strcmp(first, line) == 0, "%s: '%s', not '%s'", options, first, line);
    bool diff_v1 = strstr(options, "diff_v1") != NULL;
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        if (diff_v1 && strcmp(attention_variants[v].name, "diff_v1") == 0)
            dump_both(&d, &attention_variants[v], line, all);
}
static void expect_attention(const char *cudnn, const char *options, const char *fp32_line, const char *bf16_line) {
    if (cudnn) setenv("CUDA_ON_CPU_CUDNN", cudnn, 1);
    expect_attention_of(cuda_cases[1].options, options, fp32_line, bf16_line);
    unsetenv("CUDA_ON_CPU_CUDNN");
}
static const char ONE_ODD_SEQUENCE[] = "--layers 2 --hidden 64 --heads 2 --kv-heads 2 --head-dim 16 --ffn 96 "
                                       "--vocab 256 --seq-len 65 --batch-size 1 --tie-embeddings";

#define DEFAULT_CUDNN "attention: loops in the place of cuDNN (the default, not measured on this GPU)"
static void test_attention_line(void) {
    static const char fp32[] = "attention: the built-in kernel (an fp32 build; cuDNN supports bf16)";
    static const char cudnn[] = DEFAULT_CUDNN ", deterministic backward";
    expect_attention(NULL, "", fp32, cudnn);
    expect_attention("16,16", "--attention diff_v1", fp32,
                     DEFAULT_CUDNN ", values in two parts, deterministic backward");
    expect_attention("32,16", "--attention diff_v1", fp32,
                     DEFAULT_CUDNN ", values in two parts, deterministic backward");
    expect_attention("32,8", "--attention diff_v1", fp32,
                     DEFAULT_CUDNN "; backward by the built-in kernel (heads are too wide)");
    expect_attention("8,8", "--attention diff_v1", fp32, "attention: the built-in kernel (heads are too wide)");
    expect_attention(NULL, "--no-deterministic", fp32, DEFAULT_CUDNN ", nondeterministic backward");
    expect_attention(NULL, "--sdpa own", "attention: the built-in kernel (--sdpa own)",
                     "attention: the built-in kernel (--sdpa own)");
    expect_attention(NULL, "--window 9 --full-every 2", fp32, cudnn);
    setenv("CUDA_ON_CPU_CUDNN_FAULT", "window: no engine", 1);
    expect_attention(NULL, "--window 9 --full-every 2", fp32,
                     "attention: the built-in kernel (no engine); layers without a window: loops in the place of "
                     "cuDNN (the default, not measured on this GPU), deterministic backward");
    unsetenv("CUDA_ON_CPU_CUDNN_FAULT");
    expect_attention(NULL, "--doc-mask --separator 0", fp32,
                     DEFAULT_CUDNN ", up to 3 documents per call; backward by the built-in kernel "
                                   "(documents are only supported on Hopper and above)");
    setenv("CUDA_ON_CPU_NAME", "H200", 1);
    expect_attention(NULL, "--attention diff_v1 --doc-mask --separator 0 --window 9 --full-every 2", fp32,
                     DEFAULT_CUDNN ", deterministic backward, up to 3 documents per call");
    unsetenv("CUDA_ON_CPU_NAME");
    // 65 log-sum-exps of the first key set, of 4 bytes each: those of the second begin on the next 16 bytes
    expect_attention_of(ONE_ODD_SEQUENCE, "--attention diff_v1", fp32, cudnn);
    expect_attention_of(ONE_ODD_SEQUENCE, "--attention diff_scalar", fp32, cudnn);
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    run_in(&r, &d, device_trainer(), 1, TRAIN_ODD " --steps 1 --sdpa cudnn");
    expect_error(&r, "--sdpa cudnn: forward");
    run_in(&r, &d, cpu_trainer(), 1, TRAIN_ODD " --steps 1 --sdpa cudnn");
    expect_error(&r, "--sdpa cudnn: this program computes on the CPU");
}

// What cuDNN does not support in the environment of a case is printed once, with a remedy that works.
static void test_attention_warnings(void) {
    static const char *const b200 = "CUDA_ON_CPU_NAME='NVIDIA B200' CUDA_ON_CPU_CUDNN_VERSION=";
    static const struct {
        bool on_b200;
        const char *environment, *options; // no shape: heads of 16, 9 positions
        const char *warning;               // NULL: none
    } cases[] = {
        {false, "", "", NULL},
        {false, "", "--sdpa own", NULL},
        {false, "", "--head-dim 16 --seq-len 1", NULL},
        {false, "", "--head-dim 12 --seq-len 9", "attention is computed by the built-in kernel"},
        {false, "", "--head-dim 12 --seq-len 9",
         "choose --head-dim so that the width of every head is a multiple of 8"},
        {false, "", "--head-dim 12 --seq-len 9 --dry-run",
         "choose --head-dim so that the width of every head is a multiple of 8"},
        {false, "", "--window 4", NULL},
        {false, "CUDA_ON_CPU_CUDNN_FAULT='window: no engine'", "--window 4", "slower: no engine; a newer cuDNN"},
        {false, "", "--doc-mask --separator 0", "attention's backward is computed by the built-in kernel"},
        {false, "", "--doc-mask --separator 0", "cuDNN computes it without --doc-mask, and on an H200 or B200 with"},
        {false, "CUDA_ON_CPU_NAME=H200", "--doc-mask --separator 0 --window 4", NULL},
        {false, "CUDA_ON_CPU_NAME=H200 CUDA_ON_CPU_CUDNN_FAULT='tail: on'",
         "--head-dim 16 --seq-len 65 --doc-mask --separator 0",
         "gives NaN for documents, one of them of 64 positions, where T % 128 is 64; a newer cuDNN may"},
        {true, "91800", "--doc-mask --separator 0", NULL},
        {false, "", "--doc-mask --separator 0 --sdpa own", NULL},
        {false, "CUDA_ON_CPU_CUDNN=16,8", "", "attention's backward is computed by the built-in kernel"},
        {false, "CUDA_ON_CPU_CUDNN=16,8", "",
         "heads are too wide; a newer cuDNN may support it, or heads of another width"},
        {true, "91700", "", "attention's backward is computed by the built-in kernel"},
        {true, "91700", "", "cuDNN computes it with --no-deterministic"},
        {true, "91700", "--no-deterministic", NULL},
        {true, "91700", "--eval --init run/checkpoints/step_00000001 --val-data data.bin --val-steps 1", NULL},
        {true, "91800", "", NULL},
        {true, "91800", "--sdpa-linear", NULL},
        {false, "", "--sdpa-linear", "--sdpa-linear: cuDNN 9.19 has no such backward for compute capability 8.0"},
        {false, "CUDA_ON_CPU_NAME=H200 CUDA_ON_CPU_CUDNN_VERSION=92400", "--sdpa-linear", "without --sdpa-linear"},
        {false, "CUDA_ON_CPU_NAME=H200 CUDA_ON_CPU_CUDNN_VERSION=92500", "--sdpa-linear", NULL},
        {false, "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0", "", "ATTN_DP_WORKSPACE_LIMIT is ignored"},
        {false, "CUDNN_RESCALE_THRESHOLD=1", "", "CUDNN_RESCALE_THRESHOLD is ignored"},
        {false, "CUDA_ON_CPU_NAME=H200 CUDA_ON_CPU_CUDNN_FAULT='tail: on'", "--head-dim 16 --seq-len 192",
         "attention's backward is computed by the built-in kernel"},
        {false, "CUDA_ON_CPU_NAME=H200 CUDA_ON_CPU_CUDNN_FAULT='tail: on'", "--head-dim 16 --seq-len 192",
         "gives NaN at 192 positions, where T % 128 is 64; cuDNN computes it if --seq-len is a multiple of 128"},
        {false, "CUDA_ON_CPU_NAME=H200", "--head-dim 16 --seq-len 192", NULL},
        {false, "CUDA_ON_CPU_NAME=H200 CUDA_ON_CPU_CUDNN_FAULT='tail: on'", "--head-dim 16 --seq-len 128", NULL},
        {false, "CUDA_ON_CPU_CUDNN_FAULT='tail: on'", "--head-dim 16 --seq-len 192", NULL},
        {false, "CUDA_ON_CPU_CUDNN_VERSION=90800", "", "cuDNN 9.8.0 has known bugs in attention: 9.11 or newer"},
        {false, "CUDA_ON_CPU_CUDNN_VERSION=91000", "", "cuDNN 9.10.0 has known bugs"},
        {false, "CUDA_ON_CPU_CUDNN_VERSION=91001", "", "cuDNN 9.10.1 has known bugs"},
        {false, "CUDA_ON_CPU_CUDNN_VERSION=91002", "", NULL},
        {false, "CUDA_ON_CPU_CUDNN_FAULT='open: it does not start'", "", "slower: it does not start; make"},
        {false, "CUDA_ON_CPU_CUDNN_FAULT='plan: no engine'", "", "slower: no engine; a newer cuDNN"},
    };
    TestDirectory d = cuda_data(256);
    ProgramResult r;
    const char *model = "--layers 1 --hidden 32 --heads 2 --kv-heads 2 --ffn 32 --vocab 256 --batch-size 2 --steps 1 "
                        "--train-data data.bin",
               *shape = "--head-dim 16 --seq-len 9";
    run_in(&r, &d, device_trainer(), 0, "%s %s --out run", model, shape);
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        bool eval = strstr(cases[c].options, "--eval") != NULL;
        run_command(&r, "cd '%s' && %s%s %s --threads 1 %s %s %s", d.path, cases[c].on_b200 ? b200 : "",
                    cases[c].environment, device_trainer(), eval ? "" : model,
                    eval || strstr(cases[c].options, "--head-dim") ? "" : shape, cases[c].options);
        const char *wanted =
            cuda_fp32 && !strstr(cases[c].environment, "CUDNN_FRONTEND") && !strstr(cases[c].environment, "THRESHOLD")
                ? NULL
                : cases[c].warning;
        EXPECT(r.status == 0 && count_lines(r.err) == (wanted != NULL) && (!wanted || strstr(r.err, wanted)),
               "%s %s: status %d, stderr: %.500s", cases[c].environment, cases[c].options, r.status, r.err);
    }
}

static void test_cudnn_errors(void) {
    static const struct {
        const char *environment, *options, *error;
    } cases[] = {
        {"CUDA_ON_CPU_CUDNN_VERSION=91001", "--sdpa cudnn",
         "--sdpa cudnn: forward of 8 heads of width 16 and 16: "
         "cuDNN 9.10.1 has known bugs"},
        {"CUDA_ON_CPU_CUDNN_FAULT='plan: no engine'", "--sdpa cudnn", "no engine; leave out --sdpa"},
        {"CUDA_ON_CPU_CUDNN_FAULT='run: no launch'", "", "no launch; --sdpa own avoids cuDNN"},
    };
    TestDirectory d = cuda_data(256);
    ProgramResult r;
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        run_command(&r, "cd '%s' && %s %s --threads 1 --train-data data.bin %s --steps 1 %s", d.path,
                    cases[c].environment, device_trainer(), cuda_cases[1].options, cases[c].options);
        EXPECT(r.status == 1 && count_lines(r.err) == 1 && strstr(r.err, cases[c].error),
               "%s: status %d, stderr: %.500s", cases[c].environment, r.status, r.err);
    }
}

// Seven windows, one by one or as four and three: the same kernel gives the same losses. The built-in kernel and cuDNN
// round differently.
static void test_validation_remainder(void) {
    TestDirectory d = cuda_data(256);
    ProgramResult r;
    double losses[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        run_in(&r, &d, device_trainer(), 0,
               "--train-data data.bin --val-data data.bin --val-steps 7 --layers 1 --hidden 32 --heads 2 --kv-heads 2 "
               "--head-dim 16 --ffn 32 --vocab 256 --seq-len 500 --batch-size %d --total-batch 2000 --steps 1 --lr 0 "
               "--out %s",
               i ? 4 : 1, i ? "four" : "one");
        cJSON *records = read_records(&d, i ? "four" : "one", "val");
        losses[i] = record_number(cJSON_GetArrayItem(records, 0), "loss");
        cJSON_Delete(records);
    }
    EXPECT(fabs(losses[0] - losses[1]) <= 1e-12 * losses[0], "losses %.17g and %.17g", losses[0], losses[1]);
}

// dS of 8 query heads, (1088, 1152) or (2112, 2176) in bf16, takes 20 or 74 MiB per sequence. The limit is half of the
// device memory that the run leaves, at least 64 MiB, and 1 GiB without a device.
static void test_attention_workspace(void) {
    static const struct {
        const char *environment, *options, *line;
    } cases[] = {
        {"", "--seq-len 1030 --batch-size 16", "deterministic backward\n"},
        {"CUDA_ON_CPU_DEVICES=0", "--seq-len 1030 --batch-size 16", "deterministic backward\n"},
        {"CUDA_ON_CPU_MEMORY=64", "--seq-len 1030 --batch-size 16", "deterministic backward, 2 sequences per call\n"},
        {"CUDA_ON_CPU_MEMORY=64", "--seq-len 2100 --batch-size 1",
         "deterministic backward, 2 of 4 groups of heads per call\n"},
        {"CUDA_ON_CPU_MEMORY=64", "--seq-len 2100 --batch-size 2",
         "deterministic backward, 1 sequence per call, 2 of 4 groups of heads per call\n"},
        {"CUDA_ON_CPU_MEMORY=64", "--seq-len 2100 --batch-size 2 --no-deterministic", "nondeterministic backward\n"},
        {"CUDA_ON_CPU_MEMORY=64 CUDA_ON_CPU_NAME=H200 CUDA_ON_CPU_CUDNN_VERSION=92500",
         "--seq-len 2100 --batch-size 2 --sdpa-linear", "deterministic backward\n"},
    };
    TestDirectory d = test_make_directory();
    ProgramResult r;
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        run_command(&r,
                    "cd '%s' && %s %s --dry-run --layers 1 --hidden 64 --heads 4 --kv-heads 4 --head-dim 16 --ffn "
                    "96 --vocab 256 %s",
                    d.path, cases[c].environment, device_trainer(), cases[c].options);
        EXPECT(r.status == 0 && strncmp(r.out, "attention: ", 11) == 0 && strstr(r.out, cases[c].line), "%s %s: %.200s",
               cases[c].environment, cases[c].options, r.out);
    }
}

// The total that --dry-run prints, in MiB.
static double dry_run_total(const TestDirectory *d, const char *options) {
    ProgramResult r;
    double mib = 0;
    run_in(&r, d, device_trainer(), 0, "--dry-run %s", options);
    const char *memory = strstr(r.out, "memory of this process"), *total = memory ? strstr(memory, "  total ") : NULL;
    EXPECT(total && sscanf(total, " total %lf MiB", &mib) == 1, "no total: %.600s", r.out);
    return mib;
}

// The savings in the message are those of --dry-run.
static void test_out_of_memory(void) {
    static const char *const options = "--layers 3 --hidden 20 --heads 6 --kv-heads 2 --head-dim 12 --ffn 27 --vocab "
                                       "43 --seq-len 13 --total-batch 10400 --steps 1 --sdpa own";
    static const char *const offers[] = {"--recompute 1", "--recompute 2", "--batch-size 400"};
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    double needed = 0, saved = 0;
    // MiB: enough for a measurement of the peak
    run_in(&r, &d, device_with("CUDA_ON_CPU_MEMORY=40"), 1,
           "--train-data data.bin --out run %s --batch-size 800 --no-memory-check", options);
    EXPECT(count_lines(r.err) == 1 && strstr(r.err, "out of device memory: ") && strstr(r.err, "MiB for activations") &&
               strstr(r.err, "of 40.0 MiB free"),
           "stderr: %.600s", r.err);
    const char *needs = strstr(r.err, "the run needs ");
    EXPECT(needs && sscanf(needs, "the run needs %lf MiB: parameters", &needed) == 1 &&
               fabs(needed - dry_run_total(&d, test_text("%s --batch-size 800", options))) < 0.11,
           "stderr: %.600s", r.err);
    for (int i = 0; i < 3; i++) {
        const char *offer = test_text("%s (", offers[i]);
        const char *at = strstr(r.err, offer);
        EXPECT(at && sscanf(at + strlen(offer), "%lf MiB)", &saved) == 1, "no %s in: %.600s", offers[i], r.err);
        double then = dry_run_total(&d, test_text("%s %s %s", options, i < 2 ? "--batch-size 800" : "", offers[i]));
        EXPECT(saved > 1 && fabs(needed - saved - then) < 0.21, "%s is said to save %.1f of %.1f MiB, and leaves %.1f",
               offers[i], saved, needed, then);
    }
    EXPECT(!strstr(r.err, "--zero"), "--zero is offered to one rank: %.600s", r.err);
    EXPECT(!directory_exists(test_text("%s/run", d.path)), "a run that could not start left a directory");
}

// The device has memory for the run, but not for the workspace of a library.
static void test_out_of_memory_in_library(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    // less than the workspace of matrix products
    run_in(&r, &d, device_with("CUDA_ON_CPU_MEMORY=20"), 1,
           "--train-data data.bin --steps 1 --sdpa own --no-memory-check %s", cuda_cases[0].options);
    EXPECT(count_lines(r.err) == 1 && strstr(r.err, "for cuBLASLt's workspace") && strstr(r.err, "the run needs "),
           "stderr: %.600s", r.err);
}

// The run needs 33 MiB of buffers, most of them the workspace of matrix products, and an estimate of 560 MiB for CUDA.
static void test_memory_of_other_processes(void) {
    static const struct {
        const char *memory, *others; // MiB
        int status;
        const char *dry_run, *said;
    } cases[] = {
        {"4096", "0", 0, "this device has 4096.0 MiB, of which 4096.0 MiB are free now: enough\n", ""},
        {"4096", "4070", 1, "of which 26.0 MiB are free now: too little until other processes end\n",
         "MiB needed without CUDA's own memory, 26.0 of 4096.0 MiB free; the run needs "},
        {"500", "0", 0, "this device has 500.0 MiB, of which 500.0 MiB are free now: too little\n",
         "device memory may be too little: "},
        {"20", "0", 1, "this device has 20.0 MiB, of which 20.0 MiB are free now: too little\n",
         "MiB needed without CUDA's own memory, 20.0 of 20.0 MiB free; the run needs "},
    };
    TestDirectory d = cuda_data(256);
    ProgramResult r;
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        const char *trainer =
            device_with("CUDA_ON_CPU_MEMORY=%s CUDA_ON_CPU_OTHERS=%s", cases[c].memory, cases[c].others);
        run_in(&r, &d, trainer, 0, "%s --dry-run", cuda_cases[1].options);
        EXPECT(strstr(r.out, cases[c].dry_run), "%s MiB, %s of others': %.2000s", cases[c].memory, cases[c].others,
               strstr(r.out, "this device"));
        run_in(&r, &d, trainer, cases[c].status, "--train-data data.bin --steps 1 --out run%d %s", (int)c,
               cuda_cases[1].options);
        EXPECT(count_lines(r.err) == (cases[c].said[0] != 0) && strstr(r.err, cases[c].said), "%s MiB: %.900s",
               cases[c].memory, r.err);
        EXPECT(cases[c].status == 0 || (strstr(r.err, "--batch-size 1 (") && strstr(r.err, "--no-memory-check starts")),
               "no advice: %.900s", r.err);
    }
    run_in(&r, &d, device_with("CUDA_ON_CPU_MEMORY=20"), 1, "--train-data data.bin --steps 1 --no-memory-check %s",
           cuda_cases[1].options);
    expect_error(&r, "out of device memory");
}

static void test_device_peak(void) {
    static const struct {
        const char *name, *option, *from;
        double gflops; // 0: measured
    } devices[] = {{"NVIDIA B200", "", cuda_fp32 ? "measured" : "HGX B200", cuda_fp32 ? 0 : 2250e3},
                   {"NVIDIA B200", "--measure-peak", "measured", 0},
                   {"NVIDIA B2000", "", "measured", 0},
                   {"NVIDIA B300 SXM6 AC MIG 1g.34gb", "", "measured", 0}};
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    for (int i = 0; i < (int)(sizeof(devices) / sizeof(devices[0])); i++) {
        double said = 0, printed = 0;
        run_in(&r, &d, device_with("CUDA_ON_CPU_NAME='%s'", devices[i].name), 0, TRAIN_ODD " --steps 1 --out run%d %s",
               i, devices[i].option);
        const char *name = devices[i].gflops > 0 ? "; peak " : "; rate ", *peak = strstr(r.out, name);
        EXPECT(peak && sscanf(peak + strlen(name), "%lf GFLOP/s (", &printed) == 1 && strstr(peak, devices[i].from),
               "no peak: %.800s", r.out);
        EXPECT(devices[i].gflops > 0 ? printed == devices[i].gflops : printed > 0, "%s has a peak of %.0f GFLOP/s",
               devices[i].name, printed);
        EXPECT(strstr(r.out, devices[i].gflops > 0 ? "% of peak" : "% of rate"), "no share: %.800s", r.out);
        cJSON *json = log_read_run_json(test_text("%s/run%d", d.path, i)),
              *of = cJSON_GetObjectItemCaseSensitive(json, "peak");
        EXPECT(json_get_number(of, "gflops", &said) && fabs(said - printed) <= 0.5,
               "run.json has a peak of %.1f GFLOP/s", said);
        cJSON_Delete(json);
        cJSON *steps = read_records(&d, test_text("run%d", i), "train");
        double share = record_number(cJSON_GetArrayItem(steps, 0), "flops_util");
        EXPECT(cJSON_GetArraySize(steps) == 1 && share > 0, "flops_util is %g", share);
        cJSON_Delete(steps);
    }
}

// What a run prints of its prediction: at the end the times, at the start that FP8 is slower.
static void test_predicted_times(void) {
    static const struct {
        const char *name, *options;
        bool listed, price, slower; // the end has times, and the price of --deterministic; the start warns
    } cases[] = {{"NVIDIA B200", "", true, true, false},
                 {"NVIDIA B200", "--no-deterministic", true, false, false},
                 {"NVIDIA B200", "--sdpa own", true, false, false},
                 {"NVIDIA B200", "--gemm fp8", true, true, true},
                 {"NVIDIA B2000", "--gemm fp8", false, false, false}};
    TestDirectory d = cuda_data(256);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ProgramResult r;
        double took = 0, fast = 0, slow = 0;
        const bool bf16 = !cuda_fp32;
        run_in(&r, &d, device_with("CUDA_ON_CPU_NAME='%s'", cases[i].name), 0, "--train-data data.bin %s --steps 2 %s",
               cuda_cases[1].options, cases[i].options);
        const char *line = strstr(r.out, "\na step took ");
        int count = sscanf(line ? line : "", "\na step took %lf ms; predicted: %lf to %lf ms", &took, &fast, &slow);
        EXPECT((bf16 && cases[i].listed) ? count == 3 && took > 0 && 0 < fast && fast < slow : !line, "%s %s: %.80s",
               cases[i].name, cases[i].options, line ? line : "no line");
        EXPECT((line && strstr(line, ", of which --deterministic costs ")) == (bf16 && cases[i].price), "%s %s: %.120s",
               cases[i].name, cases[i].options, line ? line : "no line");
        EXPECT((strstr(r.err, "--gemm fp8 is predicted to be slower than") != NULL) == (bf16 && cases[i].slower),
               "%s %s: %.300s", cases[i].name, cases[i].options, r.err);
    }
}

// The line about the memory has the numbers of its event, in MiB.
static void expect_printed_memory(const char *out, const cJSON *event) {
    static const char *const keys[] = {"used_bytes", "total_bytes", "at_start_bytes", "planned_bytes",
                                       "estimated_bytes"};
    const char *line = strstr(out, "device memory: ");
    double printed[5] = {0};
    int count = sscanf(line ? line : "",
                       "device memory: %lf of %lf MiB in use, %lf MiB of it before the first buffer; planned: %lf MiB, "
                       "%lf MiB of it estimated",
                       &printed[0], &printed[1], &printed[2], &printed[3], &printed[4]);
    for (int i = 0; i < 5; i++) {
        double logged = record_number(event, keys[i]);
        EXPECT(count == 5 && fabs(logged / 1048576 - printed[i]) < 0.06, "%s is %.0f: %.800s", keys[i], logged, out);
    }
}

// The bytes that cudaMalloc returned are those of the plan without its estimates of CUDA's own memory.
static void test_dry_run_memory(void) {
    static const char *const options[] = {
        "--recompute 1 --sample-every 3", "--recompute 2 --doc-mask --separator 0 --val-data data.bin --val-steps 1",
        "--attention diff_v1 --stats-every 1 --total-batch 78", "--gemm fp8 --val-data data.bin --val-steps 1",
        "--optimizer normuon --muon-split head"};
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " %s --steps 1 --out run", options[i]);
        cJSON *events = read_records(&d, "run", "event"), *memory = cJSON_GetArrayItem(events, 1);
        double used = record_number(memory, "used_bytes"), at_start = record_number(memory, "at_start_bytes"),
               planned = record_number(memory, "planned_bytes"), estimated = record_number(memory, "estimated_bytes");
        expect_printed_memory(r.out, memory);
        EXPECT(cJSON_GetArraySize(events) == 3, "%s: %d events, not the start's, the memory's and the checkpoint's",
               options[i], cJSON_GetArraySize(events));
        EXPECT(used - at_start == planned - estimated && used > 0 && estimated > 0,
               "%s: %.0f bytes in use, %.0f planned", options[i], used - at_start, planned - estimated);
        cJSON_Delete(events);
        double said = dry_run_total(&d, test_text(TRAIN_ODD " %s --steps 1", options[i]));
        EXPECT(fabs(said - planned / 1048576) < 0.06, "%s: --dry-run says %.1f MiB, the run planned %.1f", options[i],
               said, planned / 1048576);
        run_command(&r, "rm -r '%s/run'", d.path);
    }
}

// Most of the memory is cuDNN's workspace, whose size cannot be queried without a device.
static void test_dry_run_without_device(void) {
    static const char *const options[] = {"--kv-heads 4", "--kv-heads 2", "--kv-heads 2 --attention diff_v1",
                                          "--kv-heads 4 --no-deterministic"};
    TestDirectory d = test_make_directory();
    double total[4];
    for (int i = 0; i < 4; i++) {
        const char *text = test_text(
            "--layers 1 --hidden 64 --heads 4 --head-dim 16 --ffn 96 --vocab 256 --seq-len 1030 --batch-size 1 "
            "--tie-embeddings %s",
            options[i]);
        total[i] = dry_run_total(&d, text);
        setenv("CUDA_ON_CPU_DEVICES", "0", 1);
        double without = dry_run_total(&d, text);
        unsetenv("CUDA_ON_CPU_DEVICES");
        EXPECT(without == total[i], "%s: %.1f MiB, without a device %.1f", options[i], total[i], without);
    }
    // 8 query heads of dS, (1088, 1152) in bf16, against dQ, (1030, 16) in fp32
    double more = 8 * (1088 * 1152 * 2 - 1030 * 16 * 4) / 1048576.0;
    EXPECT(fabs(total[0] - total[3] - more) < 0.21, "a deterministic backward takes %.1f MiB more, not %.1f",
           total[0] - total[3], more);
}
#else

// Includes the estimates. No other process may use the device.
static void test_dry_run_accuracy(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    run_in(&r, &d, device_trainer(), 0,
           "--train-data data.bin --preset 124m --vocab 50257 --batch-size 8 --seq-len 1024 --steps 2 --out run");
    cJSON *events = read_records(&d, "run", "event"), *memory = cJSON_GetArrayItem(events, 1);
    double used = record_number(memory, "used_bytes"), planned = record_number(memory, "planned_bytes");
    EXPECT(cJSON_GetArraySize(events) == 3, "%d events", cJSON_GetArraySize(events));
    EXPECT(fabs(planned - used) <= 0.02 * used, "%.1f MiB in use, %.1f planned: %s", used / 1048576, planned / 1048576,
           strstr(r.out, "device memory"));
    cJSON_Delete(events);
}
#endif

static void test_resume_bits(void) {
    static const char *const names[] = {"diff_v2", "diff_v1", "gated_head --gemm fp8",
                                        "diff_v2_cross_group --optimizer normuon --muon-split pair"};
    ProgramResult r;
    for (int v = 0; v < 4; v++) {
        TestDirectory d = cuda_data(43);
        const char *options = cuda_cases[0].options, *name = names[v];
        run_in(&r, &d, device_trainer(), 0,
               "--train-data data.bin --attention %s %s --total-batch 78 --steps 4 --checkpoint-every 2 --out whole",
               name, options);
        run_in(&r, &d, device_trainer(), 0,
               "--train-data data.bin --attention %s %s --total-batch 78 --steps 4 --checkpoint-every 2 --stop-after 2 "
               "--out parts",
               name, options);
        run_in(&r, &d, device_trainer(), 0, "--resume --out parts");
        expect_same_files(&d, name, "whole/checkpoints", "parts/checkpoints");
    }
}

// The update of step 3 makes the weights so large that step 4 is not finite. After the return to step 2 the weights,
// their masters and moments are those of its checkpoint, and step 3 computes what a resumed run computes.
static void test_rollback_bits(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    double loss[2] = {0, 1}, norm[2] = {0, 1};
    run_in(&r, &d, device_trainer(), 0,
           TRAIN_ODD " --gemm fp8 --sdpa own --steps 5 --warmup 0 --schedule constant --checkpoint-every 2 "
                     "--rollback 1:1 --stop-after 2 --out run");
    run_command(&r, "cd '%s' && cp -r run/checkpoints before", d.path);
    for (int resumed = 0; resumed < 2; resumed++) {
        run_in(&r, &d, device_trainer(), resumed ? 0 : 1, "--out run --resume --lr 1e10 %s",
               resumed ? "--stop-after 3" : "");
        EXPECT(resumed || strstr(r.err, "for the 4th time in a row to the checkpoint of step 2"), "%.900s", r.err);
        cJSON *records = read_records(&d, "run", "train"), *record;
        cJSON_ArrayForEach(record, records) {
            if (record_number(record, "step") != 3) continue;
            loss[resumed] = record_number(record, "loss");
            norm[resumed] = record_number(record, "grad_norm");
        }
        cJSON_Delete(records);
    }
    run_command(&r,
                "cd '%s' && for f in model optimizer; do "
                "cmp before/step_00000002/$f.safetensors run/checkpoints/step_00000002/$f.safetensors; done",
                d.path);
    EXPECT(r.out[0] == 0 && r.err[0] == 0, "%.300s%.300s", r.out, r.err);
    EXPECT(loss[0] == loss[1] && norm[0] == norm[1],
           "step 3 after the return: loss %.9g, norm %.9g; resumed: %.9g, %.9g", loss[0], norm[0], loss[1], norm[1]);
}

// bf16 has 8 bits: a step of 1e-6 changes the master weight of 0.02, but not the weight.
static void test_master_weights(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    const char *name = "model.layers.0.mlp.down_proj.weight",
               *master_name = "master.model.layers.0.mlp.down_proj.weight";
    for (int i = 0; i < 2; i++)
        run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " --steps %d --lr %s --warmup 0 --schedule constant --out run%d",
               i ? 3 : 1, i ? "1e-6" : "0", i);
    float weights[2][20 * 27], master[2][20 * 27], rounded[20 * 27];
    for (int i = 0; i < 2; i++) {
        const char *path = test_text("%s/run%d/checkpoints/step_0000000%d", d.path, i, i ? 3 : 1);
        SafeTensors *s = safetensors_open(path);
        safetensors_read(s, name, 0, 20 * 27, weights[i], DTYPE_F32);
        safetensors_close(s);
        s = safetensors_open(test_text("%s/optimizer.safetensors", path));
        safetensors_read(s, master_name, 0, 20 * 27, master[i], DTYPE_F32);
        safetensors_close(s);
        uint16_t half_bits[20 * 27];
        convert_elements(half_bits, DTYPE_BF16, master[i], DTYPE_F32, 20 * 27);
        convert_elements(rounded, DTYPE_F32, half_bits, DTYPE_BF16, 20 * 27);
        EXPECT(memcmp(rounded, weights[i], sizeof(rounded)) == 0,
               "run %d: the weights are not the rounded master weights", i);
    }
    int moved = 0, masters_moved = 0;
    for (int e = 0; e < 20 * 27; e++)
        moved += weights[0][e] != weights[1][e], masters_moved += master[0][e] != master[1][e];
    EXPECT(masters_moved > 500 && moved < 100, "of 540 weights %d moved, of their masters %d", moved, masters_moved);
}

// Both trainers evaluate a checkpoint of the device and generate greedy text.
static void test_checkpoint_on_cpu(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    double loss[2] = {0, 0};
    static char text[2][65536];
    run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " --steps 3 --out run");
    for (int gpu = 0; gpu < 2; gpu++) {
        const char *trainer = gpu ? device_trainer() : cpu_trainer();
        run_in(&r, &d, trainer, 0,
               "--init run/checkpoints/step_00000003 --val-data data.bin --val-steps 2 --batch-size 3 --eval");
        const char *at = strstr(r.out, "validation loss ");
        EXPECT(at && sscanf(at, "validation loss %lf", &loss[gpu]) == 1, "no loss: %.300s", r.out);
        run_in(&r, &d, trainer, 0,
               "--init run/checkpoints/step_00000003 --generate 30 --prompt-tokens 1,2,3 --temperature 0");
        memcpy(text[gpu], r.out, sizeof(r.out));
    }
    EXPECT(fabs(loss[0] - loss[1]) <= (cuda_fp32 ? 1e-6 : 1e-2) * loss[0], "loss %.9g on the CPU, %.9g on the device",
           loss[0], loss[1]);
    EXPECT(!cuda_fp32 || strcmp(text[0], text[1]) == 0, "the CPU says %.100s, the device %.100s", text[0], text[1]);
    run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " --steps 1 --sample-every 1");
    EXPECT(strstr(r.out, "--- sample after step 1"), "no sample: %.300s", r.out);
    // a first piece of a prompt, which has nothing before it in the cache of a window
    run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " --steps 1 --window 5 --out windows");
    run_in(&r, &d, device_trainer(), 0, "--init windows/checkpoints/step_00000001 --generate 3 --prompt-tokens 1,2,3");
}

static void test_run_record(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " --steps 1 --out run");
    cJSON *json = log_read_run_json(test_text("%s/run", d.path));
    const cJSON *devices = cJSON_GetObjectItemCaseSensitive(json, "devices"),
                *libraries = cJSON_GetObjectItemCaseSensitive(json, "libraries");
    const char *gpu = cJSON_GetStringValue(cJSON_GetArrayItem(devices, 0));
    const char *cuda = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(libraries, "cuda"));
    const char *gemm = cJSON_GetStringValue(
        cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "options"), "gemm"));
    EXPECT(cJSON_GetArraySize(devices) == 2 && gpu && strstr(gpu, "multiprocessors"), "devices: %s",
           gpu ? gpu : "none");
    EXPECT(cuda && strstr(cuda, "runtime") && strstr(cuda, cuda_precision), "libraries.cuda: %s", cuda ? cuda : "none");
    EXPECT(gemm && strcmp(gemm, cuda_precision) == 0, "--gemm is said to be %s", gemm ? gemm : "nothing");
    cJSON_Delete(json);
    run_in(&r, &d, device_trainer(), 1, TRAIN_ODD " --steps 1 --gemm %s", cuda_fp32 ? "bf16" : "fp32");
    expect_error(&r, "PRECISION=");
    run_in(&r, &d, device_trainer(), 0, "%s --dry-run", cuda_cases[0].options);
    EXPECT(!strstr(r.out, "master weights") == cuda_fp32, "--dry-run: %.600s", r.out);
}

static void test_host_waits(void) {
    enum { B = 3, T = 13, MICRO_STEPS = 12 }; // more uploads than buffers for them
    char arguments[] = "x --layers 2 --hidden 20 --heads 6 --kv-heads 2 --head-dim 12 --ffn 27 --vocab 43 --seq-len 13 "
                       "--batch-size 3 --train-data x",
         *argv[32];
    int argc = test_words(argv, 32, arguments), tokens[B * T + 1];
    Options o;
    options_parse(&o, argc, argv);
    options_finish(&o, 1);
    ModelConfig config = options_model(&o);
    Model m;
    model_plan(&m, &config, B, T, FOR_TRAINING, RECOMPUTE_BLOCK, one_rank);
    model_alloc(&m, NULL);
    ops_init(m.plan.workspace_bytes);
    model_init(&m.plan, m.state.params, m.state.master, 1);
    for (int i = 0; i <= B * T; i++) tokens[i] = i * 7 % 43;
    ops_wait();
    for (int64_t step = 1; step <= 2; step++) {
        host_waits = 0;
        buffer_zero(m.acts.losses, B * T * sizeof(real));
        for (m.state.micro_step = 0; m.state.micro_step < MICRO_STEPS; m.state.micro_step++)
            model_micro_step(&m, tokens, tokens + 1, NULL, B, T, MICRO_STEPS * B * T);
        EXPECT(host_waits == 0, "%d waits in the micro-steps", host_waits);
        own_squares(&m.state, m.state.squares);
        double loss = loss_sum(&m.acts, B * T) / (MICRO_STEPS * B * T),
               norm = squares_norm(&m.state, 0, m.plan.sharding.groups - 1);
        EXPECT(host_waits == 2, "%d waits for the loss and the norm", host_waits);
        EXPECT(fabs(loss - log(43)) < 0.1 && norm > 0 && isfinite(norm), "loss %g, norm %g", loss, norm);
        model_update(&m, &o, 1e-3, step, norm);
        EXPECT(host_waits == 2, "%d waits with the update", host_waits);
    }
    options_free(&o);
    model_free(&m, true);
    ops_free();
}

static void test_logit_pieces(void) {
    for (size_t V = 64; V <= (size_t)1 << 20; V += 64 * 1021) {
        size_t bytes = V * sizeof(floatX), rows = matmul_rows_at_a_time(bytes);
        EXPECT(rows >= 4096 && rows <= 8192 && rows % 256 == 0 && (rows * bytes <= (size_t)1 << 30 || rows == 4096),
               "a vocabulary of %zu: %zu rows at a time", V, rows);
    }
    EXPECT(matmul_rows_at_a_time(50304 * 2) == 8192 && matmul_rows_at_a_time(100288 * 2) == 4096,
           "%zu rows at a time for V = 50,304, %zu for 100,288", matmul_rows_at_a_time(50304 * 2),
           matmul_rows_at_a_time(100288 * 2));
    for (int p = FOR_TRAINING; p <= FOR_GENERATION; p++) {
        Options o;
        char *argv[] = {(char *)"x", (char *)"--train-data", (char *)"x"};
        options_parse(&o, 3, argv);
        options_finish(&o, 1);
        ModelConfig config = options_model(&o);
        Model m;
        model_plan(&m, &config, 1, 64, (Purpose)p, RECOMPUTE_NOTHING, one_rank);
        EXPECT(m.plan.logit_rows == (p == FOR_GENERATION ? 1 : 16), "purpose %d: %d rows of logits", p,
               m.plan.logit_rows);
        model_free(&m, true);
        options_free(&o);
    }
}

#ifdef CUDA_ON_CPU
static void test_gemm_fallback(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    run_in(&r, &d, cpu_trainer(), 0, TRAIN_ODD " --dump-grads cpu");
    run_in(&r, &d, device_with("CUDA_ON_CPU_GEMM=aligned"), 0, TRAIN_ODD " --sdpa own --dump-grads device");
    EXPECT(strstr(r.err, "cuBLASLt does not support the product ") && strstr(r.err, "a slower kernel computes it"),
           "%.300s", r.err);
    ProgramResult failed;
    run_in(&failed, &d, device_with("CUDA_ON_CPU_GEMM=fails"), 1, TRAIN_ODD " --sdpa own --dump-grads none");
    expect_error(&failed, "cuBLASLt failed");
    compare_dumps("products by the built-in kernel", 1 - 1e-2, cuda_fp32, test_text("%s/cpu", d.path),
                  test_text("%s/device", d.path));
}

// Starts the run "run" again before its first checkpoint, after a change of its run.json by sed.
static void run_again(ProgramResult *r, const TestDirectory *d, const char *change, const char *options) {
    run_command(r, "cd '%s' && rm -r run/checkpoints && sed -E -i '%s' run/run.json", d->path, change);
    EXPECT(r->status == 0, "%s: %.300s", change, r->err);
    run_in(r, d, device_trainer(), 0, "--resume --out run --stop-after 1 %s", options);
    EXPECT(r->err[0] == 0, "%s: %.300s", change, r->err);
}

static void test_gemm_choices(void) {
    static const char timed[] = " matrix products timed in ", state[] = "step_00000001/optimizer.safetensors",
                      tuned[] = TRAIN_ODD " --sdpa own --steps 3 --checkpoint-every 1 --keep 0 --tune-gemm --out run";
    // the second emulated algorithm begins sums with the last part
    static const char forwards[] = "s/(align [0-9 ]+\": )[0-9]+/\\10/g",
                      backwards[] = "s/(align [0-9 ]+\": )[0-9]+/\\11/g";
    static const char *const invalid[] = {"s/(align [0-9 ]+\": )[0-9]+/\\19/g",
                                          "s/(align [0-9 ]+\": )[0-9]+/\\1null/g"};
    static const char *const missing[] = {
        "s/(\"made_for\": \")/\\1Other /", "s/CBLAS in/CBLAS 2 in/",
        "s/gemm_choices/gemm_choice/",     "s/(\"made_for\": .*; )[a-z0-9]+\"/\\1fp64\"/",
        "s/\"products\": /\"product\": /", "s/ align / aligned /"};
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " --sdpa own --steps 3 --stop-after 1 --out without");
    run_in(&r, &d, device_trainer(), 0, "%s --stop-after 1", tuned);
    EXPECT(strstr(r.out, timed) && r.err[0] == 0, "%.300s%.300s", r.out, r.err);
    run_in(&r, &d, device_trainer(), 0, "--resume --out run");
    EXPECT(!strstr(r.out, timed) && r.err[0] == 0, "it is measured again: %.300s%.300s", r.out, r.err);
    run_command(&r,
                "cd '%s/run' && for step in 1 3; do "
                "sed -n '/\"gemm_choices\"/,/^  }/p' checkpoints/step_0000000$step/trainer_state.json > $step; done && "
                "grep -q 'align' 1 && cmp 1 3 && grep -o '\"gemm_choices\"' run.json | wc -l",
                d.path);
    EXPECT(r.status == 0 && atoi(r.out) == 3, "the choices of the run: %.300s%.300s", r.out, r.err);
    run_in(&r, &d, device_trainer(), 0, "--resume --out run --steps 4 --batch-size 1 --total-batch 39");
    EXPECT(strstr(r.out, timed), "products of other shapes are not measured: %.300s", r.out);
    run_in(&r, &d, device_with("CUDA_ON_CPU_NAME='NVIDIA A100'"), 0, "--resume --out run --steps 5");
    EXPECT(strstr(r.out, timed) && strstr(r.out, " s on NVIDIA A100, "), "another device: %.300s", r.out);

    run_again(&r, &d, forwards, "");
    EXPECT(!strstr(r.out, timed), "it is measured again: %.300s", r.out);
    run_command(&r, "cd '%s' && cmp run/checkpoints/%s without/checkpoints/%s", d.path, state, state);
    EXPECT(r.status == 0, "the library's first choices give other bits: %.300s", r.out);
    run_again(&r, &d, backwards, "");
    run_command(&r, "cd '%s' && ! cmp -s run/checkpoints/%s without/checkpoints/%s", d.path, state, state);
    EXPECT(r.status == 0, "the choices do not decide the bits");
    for (size_t i = 0; i < sizeof(invalid) / sizeof(invalid[0]); i++) run_again(&r, &d, invalid[i], "");
    for (size_t i = 0; i < sizeof(missing) / sizeof(missing[0]); i++) {
        run_again(&r, &d, missing[i], "");
        EXPECT(strstr(r.out, timed), "%s: %.300s", missing[i], r.out);
        run_command(&r, "cd '%s' && rm -r run", d.path);
        run_in(&r, &d, device_trainer(), 0, "%s --stop-after 1", tuned);
    }
    run_again(&r, &d, "s/gemm_choices/gemm_choice/; s/\"tune-gemm\": true/\"tune-gemm\": \"table.json\"/", "");
    EXPECT(strstr(r.out, timed), "a run of a version with tables: %.300s", r.out);
    run_in(&r, &d, cpu_trainer(), 1, TRAIN_ODD " --tune-gemm");
    expect_error(&r, "--tune-gemm requires a GPU");
}
#endif

// For sanitizers; the other builds test the numbers.
static void test_odd_shapes(void) {
    TestDirectory d = cuda_data(11);
    ProgramResult r;
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        run_in(&r, &d, device_trainer(), 0, "--train-data data.bin %s --steps %d --recompute %d %s %s",
               with_variant(v,
                            "--layers 2 --hidden 20 --heads 4 --kv-heads 2 --head-dim 12 --ffn 27 --vocab 11 "
                            "--seq-len 7 --batch-size 2",
                            0),
               v % 4 ? 1 : 3, v % 3, v % 2 ? "--doc-mask --separator 0" : "--val-data data.bin --val-steps 1",
               v % 4 ? "" : "--stats-every 3 --out run --sample-every 3 && rm -r run");
}

// Both precisions run the same kernels except for the rounding: bf16 alone tests equality of bits. With sanitizers a
// step takes seconds.
typedef enum { BOTH_PRECISIONS, BF16_ALONE, SANITIZED } CudaBuild;
#ifdef CUDA_ON_CPU_ASAN
static const bool cuda_sanitized = true;
#else
static const bool cuda_sanitized = false;
#endif
static inline bool cuda_test_belongs(CudaBuild build) {
    return build == SANITIZED ? cuda_sanitized : !cuda_sanitized && (build == BOTH_PRECISIONS || !cuda_fp32);
}

typedef struct {
    CudaBuild build;
    Test test;
} CudaTest;
static const CudaTest cuda_trainer_tests[] = {
    {BOTH_PRECISIONS, {"a step waits for the device only to read the loss and the norm", test_host_waits}},
    {BOTH_PRECISIONS, {"logits are computed in pieces of 4096 to 8192 rows, one row in generation", test_logit_pieces}},
    {BOTH_PRECISIONS,
     {"three steps of the variants have the losses and statistics of the CPU trainer", test_losses_of_variants}},
    {BOTH_PRECISIONS, {"gradients of every variant equal those of the CPU trainer", test_gradients_of_variants}},
    {BOTH_PRECISIONS, {"gradients of windows and YOCO equal those of the CPU trainer", test_gradients_of_windows}},
    {BOTH_PRECISIONS, {"gradients, losses and text of block-sparse attention equal the CPU's", test_sparse_models}},
    {BOTH_PRECISIONS, {"gradients and losses of models with experts equal those of the CPU trainer", test_experts}},
    {BOTH_PRECISIONS, {"losses in phases of several lengths equal those of the CPU trainer", test_phases}},
    {BF16_ALONE,
     {"activation recomputation does not change a bit of the gradients of any variant", test_recompute_bits}},
#ifdef CUDA_ON_CPU
    {BF16_ALONE, {"gradients do not depend on the order of threads", test_thread_orders}},
    {BOTH_PRECISIONS,
     {"a run prints its implementation of attention, and all implementations agree", test_attention_line}},
    {BOTH_PRECISIONS,
     {"a run warns if attention falls back to the built-in kernel, and the suggested option works",
      test_attention_warnings}},
    {BF16_ALONE, {"the workspace of attention depends on the device memory", test_attention_workspace}},
    {BF16_ALONE, {"a run that requires cuDNN fails if cuDNN does not support its shapes", test_cudnn_errors}},
    {BF16_ALONE, {"cuDNN also computes the last, partial batch of a validation", test_validation_remainder}},
    {BF16_ALONE,
     {"an out-of-memory error of the device names the buffer and options that require less", test_out_of_memory}},
    {BF16_ALONE,
     {"memory of other processes does not count as free, and the advice calls no library",
      test_memory_of_other_processes}},
    {BF16_ALONE, {"an out-of-memory error in a library names the library", test_out_of_memory_in_library}},
    {BOTH_PRECISIONS,
     {"the peak of a listed device is the vendor's, and that of another device is measured", test_device_peak}},
    {BOTH_PRECISIONS, {"a run on a listed device says what was predicted of its steps", test_predicted_times}},
    {BOTH_PRECISIONS, {"a dry run predicts the allocated memory to the byte", test_dry_run_memory}},
    {BOTH_PRECISIONS, {"matrix products fall back to the built-in kernel with a warning", test_gemm_fallback}},
    {BOTH_PRECISIONS,
     {"a resume uses the algorithms that --tune-gemm has chosen, and measures only what they lack", test_gemm_choices}},
    {BF16_ALONE, {"a dry run prints the same with and without a device", test_dry_run_without_device}},
#else
    {BOTH_PRECISIONS, {"a dry run predicts the memory in use to two percent", test_dry_run_accuracy}},
#endif
    {BF16_ALONE, {"a resumed run equals an uninterrupted one, bit for bit", test_resume_bits}},
    {BF16_ALONE, {"a rollback restores the weights, their masters and moments, bit for bit", test_rollback_bits}},
    {BF16_ALONE, {"updates too small for bf16 change the master weights", test_master_weights}},
    {BOTH_PRECISIONS, {"the CPU trainer reads checkpoints of the device", test_checkpoint_on_cpu}},
    {BOTH_PRECISIONS, {"run.json names the device and libraries, and --gemm must match the build", test_run_record}},
    {SANITIZED, {"a step of every variant at unaligned shapes succeeds", test_odd_shapes}},
};
enum { CUDA_TRAINER_TEST_COUNT = sizeof(cuda_trainer_tests) / sizeof(cuda_trainer_tests[0]) };
