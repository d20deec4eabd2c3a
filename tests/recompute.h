/*
recompute.h: tests of --recompute. Gradients, statistics and whole runs are bitwise equal at every level. Activations
that are recomputed take no memory, in the plan and in the resident size of the process.
*/
#ifndef TESTS_RECOMPUTE_H
#define TESTS_RECOMPUTE_H
#include "harness.h"
#include <sys/wait.h>
#include <time.h>

enum { RECOMPUTE_LEVELS = 3 };

// Three micro-steps: the second with documents, the third with statistics.
static void recompute_steps(Model *m, const ModelCase *mc, const int *tokens, LayerStats *stats) {
    int N = mc->B * mc->T;
    int *starts = (int *)checked_calloc(N, sizeof(int)), *marks = case_tokens(N, 5, 9);
    Separator s = {0, false};
    for (int b = 0; b < mc->B; b++) document_starts(starts + b * mc->T, marks + b * mc->T, mc->T, s);
    for (int step = 0; step < 3; step++) {
        m->stats = step == 2 ? stats : NULL;
        m->state.micro_step = step;
        model_micro_step(m, tokens + step, tokens + step + 1, step == 1 ? starts : NULL, mc->B, mc->T, 3.0 * N);
    }
    free(marks);
    free(starts);
}

static void expect_equal_levels(GemmType type) {
    static const ModelCase deep[] = {
        {"three layers, so that one is neither first nor last", 29, 24, 3, 4, 2, 8, 20, 2, 21, true, 0, 0, false,
         false},
        {"windows, every third layer full, QK-norm", 29, 24, 4, 4, 2, 8, 20, 2, 21, true, 6, 3, false, true},
        {"YOCO with QK-norm", 29, 24, 4, 4, 2, 8, 20, 2, 21, false, 6, 0, true, true},
    };
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int c = type == GEMM_FP32 ? 0 : PLAIN_CASE_COUNT; c < PLAIN_CASE_COUNT + 3; c++) { // else the deep ones
            const ModelCase *mc = c < PLAIN_CASE_COUNT ? &model_cases[c] : &deep[c - PLAIN_CASE_COUNT];
            ModelConfig config = case_config(mc, &attention_variants[v]);
            Problem problem;
            if (model_config_problems(&config, &problem, 1)) continue;
            int *tokens = case_tokens(mc->B * mc->T + 3, mc->V, 3);
            grad_t *kept = NULL;
            LayerStats stats[RECOMPUTE_LEVELS][4];
            for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
                Model m;
                model_plan(&m, &config, mc->B, mc->T, FOR_TRAINING, (Recompute)level, 0, 1, 0);
                model_alloc(&m, NULL);
                ops_init(m.plan.workspace_bytes);
                // NaN in all activations but the tables
                memset(m.activations_memory + m.plan.activations_bytes / 2, 0xFF, m.plan.activations_bytes / 2);
                memset(m.acts.dfused, 0, (size_t)(mc->B * mc->T) * m.plan.dims.fused_ld * sizeof(floatX));
                if (mc->yoco) memset(m.acts.dkv, 0, (size_t)(mc->B * mc->T) * m.plan.dims.kv_ld * sizeof(floatX));
                case_randomize(&m, 7);
                recompute_steps(&m, mc, tokens, stats[level]);
                EXPECT(isfinite(case_grad_norm(&m)) && case_grad_norm(&m) > 0, "%s, %s: the gradient norm is %g",
                       attention_variants[v].name, mc->why, case_grad_norm(&m));
                if (level == 0) kept = m.state.grads, m.state.grads = NULL;
                else
                    for (int i = 0; i < m.plan.tensors.count; i++) {
                        const Tensor *t = &m.plan.tensors.tensors[i];
                        EXPECT(memcmp(kept + t->offset, m.state.grads + t->offset, t->count * sizeof(grad_t)) == 0,
                               "%s, %s, %s: --recompute %d changes the gradient of %s", gemm_choice(type),
                               attention_variants[v].name, mc->why, level, t->name);
                    }
                EXPECT(memcmp(stats[0], stats[level], config.L * sizeof(LayerStats)) == 0,
                       "%s, %s: --recompute %d changes the statistics", attention_variants[v].name, mc->why, level);
                case_close(&m);
            }
            buffer_free(kept);
            free(tokens);
        }
}

static void test_recompute_gradients(void) {
    for (int type = GEMM_FP32; type <= (sizeof(real) == sizeof(float) ? GEMM_FP8 : GEMM_FP32); type++) {
        CHECK(!linear_configure((GemmType)type), "--gemm %s is refused", gemm_choice(type));
        expect_equal_levels((GemmType)type);
    }
    linear_configure(GEMM_FP32);
}

// Bytes of an activation tensor, rounded up to the alignment of the arena.
static size_t tensor_bytes(size_t N, size_t width) { return round_up(N * width * sizeof(real), 256); }

static void test_recompute_allocations(void) {
    for (int v = 0; v < 2 * ATTENTION_VARIANT_COUNT; v++) {
        bool yoco = v >= ATTENTION_VARIANT_COUNT;
        const ModelCase mc = {"", 29, 24, yoco ? 6 : 5, 4, 2, 8, 20, 2, 21, true, yoco ? 5 : 0, 0, yoco, v % 2 == 1};
        ModelConfig config = case_config(&mc, &attention_variants[v % ATTENTION_VARIANT_COUNT]);
        Model m;
        size_t bytes[RECOMPUTE_LEVELS], N = 42, NHD = (size_t)config.NH * 8;
        for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
            model_plan(&m, &config, mc.B, mc.T, FOR_TRAINING, (Recompute)level, 0, 1, 0);
            bytes[level] = m.plan.activations_bytes;
            if (level < 2) model_free(&m, true);
        }
        const AttentionDims *d = &m.plan.dims;
        const AttentionVariant *a = config.attention;
        size_t norms = 2 * tensor_bytes(N, 24) + 2 * tensor_bytes(N, 1),
               mlp = tensor_bytes(N, 40) + tensor_bytes(N, 20);
        if (d->norm_width) norms += tensor_bytes(N, NHD) + tensor_bytes(N, d->norm_count);
        size_t again = (size_t)mc.L - 1, upper = yoco ? 3 : 0, fused = (again - upper) * tensor_bytes(N, d->fused_ld);
        if (yoco) fused += upper * tensor_bytes(N, round_up(d->fused_rows - d->kv_rows, 64));
        size_t rest = tensor_bytes(N, d->NQ * d->DV) + tensor_bytes(N, d->NQ) + tensor_bytes(N, 24);
        if (d->groups.noise) rest += tensor_bytes(N, NHD);
        if (a->xsa) rest += tensor_bytes(N, NHD);
        if (mc.qk_norm) // kept before the norm: in the upper half of YOCO queries only
            fused += (again - upper) * tensor_bytes(N, d->q_rows + d->k_rows) + upper * tensor_bytes(N, d->q_rows);
        if (d->groups.noise && !d->lambda_rows) rest += tensor_bytes(N, d->OH);
        if (d->gate_width) rest += tensor_bytes(N, NHD);
        EXPECT(bytes[0] - bytes[1] == again * (norms + mlp), "%s: level 1 saves %zu bytes, not %zu", a->name,
               bytes[0] - bytes[1], again * (norms + mlp));
        EXPECT(bytes[1] - bytes[2] == fused + again * rest, "%s: level 2 saves %zu bytes more, not %zu", a->name,
               bytes[1] - bytes[2], fused + again * rest);
        model_free(&m, true);
        for (Purpose p = FOR_EVALUATION; p <= FOR_GENERATION; p = (Purpose)(p + 1)) {
            size_t other[2];
            for (int level = 0; level < 2; level++) {
                model_plan(&m, &config, 1, mc.T, p, level ? RECOMPUTE_BLOCK : RECOMPUTE_NOTHING, 0, 1, 0);
                other[level] = m.plan.activations_bytes;
                model_free(&m, true);
            }
            EXPECT(other[0] == other[1], "%s: --recompute changes the memory of a model without a backward", a->name);
        }
    }
}

// The peak resident size of a process, in bytes; 0 after it has ended. wait4 and getrusage cannot be used: they report
// at least the size of the process that forked, also after exec.
static double resident_peak(pid_t pid) {
    char path[64], line[256];
    double kib = 0;
    FORMAT(path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof(line), f) && sscanf(line, "VmHWM: %lf", &kib) != 1) {
    }
    if (f) fclose(f);
    return 1024 * kib;
}

// Peak resident bytes of the program with these arguments, or with `dry` the total that --dry-run prints.
static double peak_of(const ProgramData *d, const char *model, const char *options, bool dry) {
    char path[600], command[1200];
    const struct timespec a_millisecond = {0, 1000000};
    double peak = 0, now;
    int status = -1;
    FORMAT(path, "%s/out", d->dir.path);
    FORMAT(command, "exec '%s' --train-data '%s/train.bin' %s %s %s >'%s' 2>&1", test_program(), d->dir.path, model,
           options, dry ? "--dry-run" : "", path);
    pid_t pid = fork(), ended;
    CHECK(pid >= 0, "cannot start a process: %s", strerror(errno));
    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    while ((ended = waitpid(pid, &status, WNOHANG)) == 0) { // the last value: before exec it is that of this process
        if ((now = resident_peak(pid)) > 0) peak = now;
        nanosleep(&a_millisecond, NULL);
    }
    EXPECT(ended == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s failed", command);
    if (!dry) return peak;
    static char text[65536];
    test_read_file(path, text, sizeof(text));
    const char *memory = strstr(text, "memory of this process"), *total = memory ? strstr(memory, "  total ") : NULL;
    double mib = 0;
    EXPECT(total && sscanf(total, " total %lf MiB", &mib) == 1, "no total in %.300s", text);
    return 1048576 * mib;
}

// Compares differences between levels, which the memory of libraries does not affect.
static void test_recompute_memory(void) {
    const char *model = "--layers 8 --hidden 128 --heads 4 --kv-heads 2 --head-dim 32 --ffn 512 --seq-len 64 "
                        "--batch-size 32 --steps 1 --threads 2";
    ProgramData d = program_data();
    double peak[RECOMPUTE_LEVELS], said[RECOMPUTE_LEVELS];
    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
        static const char *const options[] = {"--recompute 0", "--recompute 1", "--recompute 2"};
        peak[level] = peak_of(&d, model, options[level], false);
        said[level] = peak_of(&d, model, options[level], true);
    }
    for (int level = 1; level < RECOMPUTE_LEVELS; level++) {
        double less = peak[level - 1] - peak[level], wanted = said[level - 1] - said[level];
        EXPECT(wanted > 40e6 && fabs(less - wanted) < 0.2 * wanted,
               "level %d: %.1f MB less than level %d, %.1f by --dry-run", level, less / 1e6, level - 1, wanted / 1e6);
    }
    test_remove_directory(&d.dir);
}

static const char *const recompute_model =
    "--layers 3 --hidden 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn 40 --seq-len 16 --batch-size 4 "
    "--schedule constant --warmup 2 --threads 2";

// A resume may change the level.
static void test_recompute_runs(void) {
    ProgramData d = program_data();
    ProgramResult r;
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors"};
    static const char *const names[] = {"diff_v2", "diff_v1", "diff_v2_gated_head"}, *const more[] = {
                                                                                         "", "",
                                                                                         "--qk-norm --gemm fp8"};
    for (int v = 0; v < 3; v++) {
        for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
            run_command(
                &r,
                "%s --train-data '%s/train.bin' %s --attention %s --total-batch 128 --doc-mask --separator 10:after "
                "--stats-every 1 --steps 4 --out '%s/%s%d' --recompute %d %s",
                test_program(), d.dir.path, recompute_model, names[v], d.dir.path, names[v], level, level, more[v]);
            EXPECT_STATUS(r, 0);
        }
        run_command(&r, "cd '%s' && rm -rf resumed && cp -r %s0 resumed && rm -r resumed/checkpoints/step_*",
                    d.dir.path, names[v]);
        run_command(
            &r, "%s --train-data '%s/train.bin' --out '%s/resumed' --resume --recompute 1 --stop-after 2 --threads 2",
            test_program(), d.dir.path, d.dir.path);
        EXPECT_STATUS(r, 0);
        run_command(&r, "%s --out '%s/resumed' --resume --recompute 2 --threads 2", test_program(), d.dir.path);
        EXPECT_STATUS(r, 0);
        EXPECT(strstr(r.out, "recompute"), "a resume does not print the change of --recompute: %.300s", r.out);
        for (int other = 1; other <= RECOMPUTE_LEVELS; other++) {
            char name[64];
            FORMAT(name, other < RECOMPUTE_LEVELS ? "%s%d" : "resumed", names[v], other);
            for (int f = 0; f < 2; f++) {
                run_command(&r, "cd '%s' && cmp %s0/checkpoints/step_00000004/%s %s/checkpoints/step_00000004/%s",
                            d.dir.path, names[v], files[f], name, files[f]);
                EXPECT(r.status == 0, "%s of %s differs from that of %s0: %.200s", files[f], name, names[v], r.out);
            }
            run_command(&r,
                        "cd '%s' && for r in %s0 %s; do grep -e '\"train\"' -e '\"stats\"' $r/log.jsonl | sed "
                        "'s/\"tokens_per_s.*\"loss_z/\"loss_z/' > $r/records; done; "
                        "test $(wc -l < %s/records) = 16 && cmp %s0/records %s/records",
                        d.dir.path, names[v], name, name, names[v], name);
            EXPECT(r.status == 0, "the log of %s differs from that of %s0: %.300s%.300s", name, names[v], r.out, r.err);
        }
    }
    test_remove_directory(&d.dir);
}

static const Test recompute_tests[] = {
    {"gradients and statistics of every variant are bitwise equal at every level", test_recompute_gradients},
    {"recomputed activations take no memory", test_recompute_allocations},
};
enum { RECOMPUTE_TEST_COUNT = sizeof(recompute_tests) / sizeof(recompute_tests[0]) };

static const Test recompute_program_tests[] = {
    {"--recompute reduces the memory of the process by the difference that --dry-run prints", test_recompute_memory},
    {"runs are equal at every level, and a resume may change the level", test_recompute_runs},
};
enum { RECOMPUTE_PROGRAM_TEST_COUNT = sizeof(recompute_program_tests) / sizeof(recompute_program_tests[0]) };
#endif
