/*
cuda_fp8.h: --gemm fp8 of the CUDA trainer: gradients against the CPU trainer's, equal bits, and messages.
*/
#pragma once
#include "cuda_trainer.h"

// The difference of two gradients in the units of the first: of all tensors together, and of the loss; and the least
// cosine of a tensor that is not small.
typedef struct {
    double loss, gradients, cosine;
} DumpDifference;

static DumpDifference dump_difference(const char *cpu, const char *gpu) {
    const std::vector<DumpPair> pairs = read_dumps("FP8", cpu, gpu);
    double norm[2] = {0, 0}, error[2] = {0, 0}, cosine = 1;
    for (const DumpPair &p : pairs) norm[p.name == "loss"] += p.xx, error[p.name == "loss"] += p.error;
    for (const DumpPair &p : pairs)
        if (p.name != "loss" && p.xx > 1e-6 * norm[0]) cosine = fmin(cosine, p.xy / sqrt(p.xx * p.yy));
    return {sqrt(error[1] / norm[1]), sqrt(error[0] / norm[0]), cosine};
}

// The two programs round activations that differ in the last bits, so some become neighbouring codes. At most all do,
// independently: a tensor's relative difference is then 2 u^2 / 3 in square, u = 2^-4 in E4M3 and 2^-3 in E5M2. A path
// through the model has 4 tensors per layer in each direction. Roundings of bf16 add to it (least_cosine).
static double fp8_difference(int layers) { return sqrt(4 * layers * (2 * 0x1p-8 / 3 + 2 * 0x1p-6 / 3)); }

// With fp32 storage activations differ by 1e-7 of their size: one of 10^5 codes differs, none in most of these models.
// Gradients then agree as those of --gemm fp32 do (compare_dumps).
static void test_fp8_gradients(void) {
    int layers[CUDA_CASES] = {3, 2, 1}, equal = 0; // of cuda_cases
    ProgramResult r;
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int c = 0; c < CUDA_CASES; c++) {
            TestDirectory d = cuda_data(cuda_cases[c].vocab);
            const char *options = test_text("--train-data data.bin --gemm fp8 %s --dump-grads",
                                            with_variant(v, cuda_cases[c].options, c));
            const char *what = test_text("%s, %s", attention_variants[v].name, cuda_cases[c].why);
            const char *cpu = test_text("%s/cpu", d.path), *gpu = test_text("%s/device", d.path);
            if (run_in(&r, &d, cpu_trainer(), 0, "%s cpu", options) &&
                run_in(&r, &d, device_trainer(), 0, "%s device", options)) {
                DumpDifference off = dump_difference(cpu, gpu);
                double most = fp8_difference(layers[c]);
                EXPECT(off.gradients <= most && off.loss <= 8 * 0x1p-8 &&
                           off.cosine >= least_cosine(&attention_variants[v]) - most * most / 2,
                       "%s: gradients differ by %.3g, the loss by %.3g, the least cosine is %.3g", what, off.gradients,
                       off.loss, off.cosine);
                if (c == 0) compare_dumps(what, 0, false, cpu, gpu); // the lengths of single tensors
                equal += off.gradients <= 64 * 0x1p-23 && off.loss <= 8 * 0x1p-23;
            }
        }
    EXPECT(!cuda_fp32 || 3 * equal >= 2 * ATTENTION_VARIANT_COUNT * CUDA_CASES,
           "in %d of %d models all codes are those of the CPU", equal, ATTENTION_VARIANT_COUNT * CUDA_CASES);
}

// Gradients near the CPU trainer's, and the same bits with recomputation, where experts are in FP8.
static void test_fp8_experts(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    const char *cpu = test_text("%s/cpu", d.path), *gpu = test_text("%s/level0", d.path);
    for (int i = 0; i < 2; i++) {
        const char *options = expert_options(i);
        for (int level = 0; level < 3; level++)
            run_in(&r, &d, device_with("CUDA_ON_CPU_CAPABILITY=89"), 0,
                   "%s --gemm fp8 --recompute %d --dump-grads level%d", options, level, level);
        expect_same_files(&d, "--recompute 1", "level0", "level1");
        expect_same_files(&d, "--recompute 2", "level0", "level2");
        run_in(&r, &d, cpu_trainer(), 0, "%s --gemm fp8 --dump-grads cpu", options);
        DumpDifference off = dump_difference(cpu, gpu);
        // a few codes of fp32 numbers, whose sums have another order, differ by one; 0.0032 was seen
        double most = cuda_fp32 ? 8e-3 : fp8_difference(3);
        EXPECT(off.gradients <= most && off.loss <= most / 8, "%s: gradients differ by %.3g, the loss by %.3g", options,
               off.gradients, off.loss);
    }
}

#ifdef CUDA_ON_CPU
// In the bf16 build, experts are in FP8 where mma.sync is faster in it. The start prints and run.json records the type.
static void test_fp8_experts_by_device(void) {
    static const struct {
        const char *capability, *experts, *type;
    } cases[] = {{"89", "--experts 5 --experts-active 3 --expert-ffn 24", "fp8"},
                 {"90", "--experts 5 --experts-active 3 --expert-ffn 24", "bf16"},
                 {"100", "--experts 5 --experts-active 3 --expert-ffn 24", "bf16"},
                 {"120", "--experts 5 --experts-active 3 --expert-ffn 24", "fp8"},
                 {"90", "", NULL}};
    enum { CASES = sizeof(cases) / sizeof(cases[0]) };
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    for (int i = 0; i < CASES; i++) {
        bool bf16 = !cuda_fp32 && cases[i].type && strcmp(cases[i].type, "bf16") == 0;
        run_in(&r, &d, device_with("CUDA_ON_CPU_CAPABILITY=%s", cases[i].capability), 0,
               TRAIN_ODD " %s --gemm fp8 --steps 1 --out run%d", cases[i].experts, i);
        EXPECT((strstr(r.out, "--gemm fp8: experts compute in bf16, which is faster on this GPU\n") != NULL) == bf16,
               "%s %s: %.300s", cases[i].capability, cases[i].experts, r.out);
        run_command(&r, "grep 'experts\":[[:space:]]*\"%s' '%s/run%d/run.json'", bf16 ? "bf16" : "fp8", d.path, i);
        EXPECT((r.status == 0) == (cases[i].type != NULL), "%s %s: %s", cases[i].capability, cases[i].experts, r.out);
        if (cases[i].type)
            expect_same_files(&d, "experts of one type on two GPUs", test_text("run%d/checkpoints", bf16),
                              test_text("run%d/checkpoints", i));
    }
    run_command(&r, "cmp -s '%s'/run[01]/checkpoints/step_00000001/model.safetensors", d.path);
    EXPECT((r.status == 0) == cuda_fp32, "the experts have the same numbers in FP8 and bf16");
    run_command(&r, "grep -c 'fp8: E4M3, gradients E5M2' '%s/run4/run.json'", d.path);
    EXPECT(r.status == 0, "run.json does not name the types of the products");
}

static void test_fp8_errors(void) {
    static const struct {
        const char *environment, *options, *error;
    } cases[] = {
        {"CUDA_ON_CPU_NAME='NVIDIA A100' CUDA_ON_CPU_CAPABILITY=80", "",
         "--gemm fp8: requires a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell); NVIDIA A100 has "
         "8.0"},
        {"CUDA_ON_CPU_CAPABILITY=89 CUDA_ON_CPU_CODE=80", "",
         "--gemm fp8: this GPU runs the program's code for 8.0, and 8.9 or higher is required: compile with ARCHS=89"},
        {"CUDA_ON_CPU_CAPABILITY=89 CUDA_ON_CPU_GEMM=no-fp8", "--sdpa own",
         "cuBLASLt does not support the FP8 product 48 x "},
    };
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    for (int i = 0; i < 3; i++) {
        run_in(&r, &d, device_with("%s", cases[i].environment), 1, TRAIN_ODD " %s --gemm fp8 --dump-grads none",
               cases[i].options);
        expect_error(&r, cases[i].error);
    }
    run_in(&r, &d, device_with("CUDA_ON_CPU_DEVICES=0"), 0, ODD_MODEL " --gemm fp8 --dry-run");
}

// Fast accumulation changes the products of the forward, a little, and no others.
static void test_fp8_fast_accumulation(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " --sdpa own --gemm fp8 --dump-grads first");
    run_in(&r, &d, device_trainer(), 0, TRAIN_ODD " --sdpa own --gemm fp8 --fp8-fast-accum --dump-grads fast");
    run_in(&r, &d, device_trainer(), 0,
           TRAIN_ODD " --sdpa own --gemm fp8 --fp8-fast-accum --recompute 2 --dump-grads again");
    expect_same_files(&d, "--recompute 2", "fast", "again");
    DumpDifference off = dump_difference(test_text("%s/first", d.path), test_text("%s/fast", d.path));
    EXPECT(off.gradients > 0 && off.gradients <= fp8_difference(3), "gradients differ by %.3g", off.gradients);
    run_in(&r, &d, device_trainer(), 0,
           TRAIN_ODD " --sdpa own --gemm fp8 --fp8-fast-accum --tune-gemm --steps 3 --stop-after 1 --out run");
    run_command(
        &r,
        "cd '%s/run' && grep -q ', fast accumulation in the forward\"' run.json && "
        "! grep '\"e4m3' run.json | grep -v fast && ! grep '\"[es].*fast accumulation\"' run.json | grep -v e4m3.*e4m3",
        d.path);
    EXPECT(r.status == 0, "fast accumulation is not that of the forward alone: %.300s", r.out);
    run_in(&r, &d, device_trainer(), 2, "--resume --gemm %s --out run", cuda_precision);
    expect_error(&r, "--fp8-fast-accum requires --gemm fp8");
}

// The choices have products in FP8, which a resume does not measure again, and which are none of another type.
static void test_fp8_choices(void) {
    TestDirectory d = cuda_data(43);
    ProgramResult r;
    run_in(&r, &d, device_trainer(), 0,
           TRAIN_ODD " --sdpa own --gemm fp8 --tune-gemm --steps 3 --stop-after 1 --out run");
    EXPECT(r.err[0] == 0, "%.300s", r.err);
    run_command(&r, "cd '%s/run' && grep -q '\"e4m3 . x' run.json && grep -q '\"e5m2 . x' run.json", d.path);
    EXPECT(r.status == 0, "the choices have no products in FP8");
    run_in(&r, &d, device_trainer(), 0, "--resume --stop-after 2 --out run");
    EXPECT(!strstr(r.out, " matrix products timed in "), "they are measured again: %.300s", r.out);
    run_in(&r, &d, device_trainer(), 0, "--resume --gemm %s --out run", cuda_precision);
    EXPECT(strstr(r.out, " matrix products timed in "), "products in FP8 are taken for others: %.300s", r.out);
}
#endif

static const CudaTest cuda_fp8_tests[] = {
    {BOTH_PRECISIONS, {"gradients of every variant in FP8 are near those of the CPU trainer", test_fp8_gradients}},
    {BOTH_PRECISIONS, {"experts in FP8 have the gradients of the CPU trainer", test_fp8_experts}},
#ifdef CUDA_ON_CPU
    {BOTH_PRECISIONS, {"experts compute in bf16 where FP8 is not faster", test_fp8_experts_by_device}},
    {BF16_ALONE, {"FP8 is refused by devices and libraries without it, in one line", test_fp8_errors}},
    {BOTH_PRECISIONS, {"fast accumulation in FP8 is that of the forward", test_fp8_fast_accumulation}},
    {BOTH_PRECISIONS, {"the choices of --tune-gemm have the products in FP8", test_fp8_choices}},
#endif
};
enum { CUDA_FP8_TEST_COUNT = sizeof(cuda_fp8_tests) / sizeof(cuda_fp8_tests[0]) };
