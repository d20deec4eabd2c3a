/*
bench_cuda.cu: speed of the CUDA trainer on a GPU, and the time of each operation. dev/gpu_check.sh runs it.

  bench_cuda [OPTION...] facts                                         the device
  bench_cuda [OPTION...] kernels PRESET KV_HEADS B T [WORD]            each operation at a model's shapes
  bench_cuda [OPTION...] model PRESET T CASE...                        tokens/s of training and of the forward alone
  bench_cuda [OPTION...] profile PRESET ATTENTION KV_HEADS B T         time of each operation in a step
  bench_cuda [OPTION...] turns PRESET ATTENTION KV_HEADS B T           one step for each line on stdin; prints its
                                                                       milliseconds (for dev/gpu_check)
  bench_cuda [OPTION...] attention-turns PRESET ATTENTION KV_HEADS B T a layer's attention for each direction on stdin;
                                                                       prints the milliseconds
  bench_cuda [OPTION...] decode PRESET KV_HEADS B CONTEXT...           attention over a cache, by variant
  bench_cuda [OPTION...] decode-turns PRESET ATTENTION KV_HEADS B T    a token of each sequence for each context on
                                                                       stdin; prints the milliseconds
  KV_HEADS 0: the preset's. CASE: ATTENTION,KV_HEADS,HEADS[,fast] with HEADS 1 or 2 (the preset's, or twice as many);
  fast: --no-deterministic. All cases of a call run with the same B: that of --batch, or the largest power of two with
  which every case fits and B*T <= 32768.
  --batch B           sequences of a step (model)
  --no-update         forward and backward without the optimizer, its states and master weights (model)
  --matmul-dtype fp8  matrix products of blocks in FP8 (model, profile, turns; kernels measures both)
  --attention-kernel own, cudnn
                      attention by the built-in kernel, or by cuDNN
  --no-deterministic  cuDNN's faster backward, whose bits may vary from run to run
  --window W, --full-every K, --sparse-blocks K, --yoco, --qk-norm, --shared-experts S, --dense-layers N, --doc-mask
                      layers as the trainer's options; documents of a third of T
  --repeats N         repetitions of each operation (default: as many as take 0.15 s; 1 for profilers)
  --tiny              few repetitions and little memory, for dev/emulator
  --json FILE         appends each result to FILE, too: scripts for rented GPUs collect the results of several runs so

Each result is a row of dev/gpu_check/results.py, a line of JSON.

operations  median time between events; tensors larger than the L2 cache, random values. GB/s count the bytes of
            NAME_bytes, each tensor once. Shares are of the copy and of the product measured just before; of both
            for an operation that has bytes and FLOPs, the one that limits it. With experts (30b-a3b, moe-tiny) the
            grouped products alternate with one dense product of equal FLOPs.
steps       host clock, from the upload of the tokens to the end of the update. TFLOP/s use the trainer's count: the
            causal half of attention, without recomputation.
profile     events around each operation of a step; `outside` is the time that is in no operation

The benchmark includes the trainer, so it measures the code that trains.
*/
#undef USE_MPI
#ifndef DEVICE_OPS
#define DEVICE_OPS
#endif
static void profile_operation(const char *name);
#define OPERATION_HOOK(name) profile_operation(name)
#define main train_diffv2_main
#include "../../train_diffv2.cu"
#undef main
#include "bench_model.h"

static bool bench_tiny;
static int bench_batch;   // of --batch; 0: not given
static int bench_repeats; // of each operation; 0: as many as take 0.15 s
static FILE *bench_json;

// Makes a text valid inside a JSON string.
static void make_quotable(char *text) {
    for (char *c = text; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = '\'';
}
// `, "name": value`; of 0 and what is not finite: null.
static void add_number(char *line, size_t size, const char *name, double value) {
    size_t at = strlen(line);
    if (value == 0 || !isfinite(value)) snprintf(line + at, size - at, ", \"%s\": null", name);
    else snprintf(line + at, size - at, ", \"%s\": %.6g", name, value);
}

typedef struct {
    double middle, least, most; // of rounds
} Ratio;
// Prints a row of the results of dev/gpu_check (results.py describes the columns) as a line of JSON, and appends it to
// --json FILE. A number that is 0 is absent.
PRINTF_LIKE(8, 9)
static void record(const char *name, const char *of, double measured, const char *unit, double expected,
                   const char *against, Ratio ratio, const char *fmt, ...) {
    char line[1400], shape[256], note[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(note, sizeof(note), fmt, args);
    va_end(args);
    FORMAT(shape, "%s", of);
    make_quotable(shape);
    make_quotable(note);
    FORMAT(line, "{\"case\": \"%s\", \"of\": \"%s\", \"unit\": \"%s\", \"against\": \"%s\", \"note\": \"%s\"", name,
           shape, unit, against, note);
    add_number(line, sizeof(line), "measured", measured);
    add_number(line, sizeof(line), "expected", expected);
    add_number(line, sizeof(line), "ratio", ratio.middle);
    add_number(line, sizeof(line), "least", ratio.least);
    add_number(line, sizeof(line), "most", ratio.most);
    assert(strlen(line) + 2 < sizeof(line));
    printf("%s}\n", line);
    fflush(stdout);
    if (!bench_json) return;
    CHECK(fprintf(bench_json, "%s}\n", line) > 0 && fflush(bench_json) == 0, "cannot write to the file of --json: %s",
          strerror(errno));
}
static const Ratio NO_RATIO = {0, 0, 0};

static int number(const char *text, int least) {
    char *end;
    long value = strtol(text, &end, 10);
    CHECK(*text && !*end && value >= least && value <= 1 << 20, "'%s': expected a number of at least %d", text, least);
    return (int)value;
}

#include "bench_cuda_kernels.h"
#include "bench_decode.h"
#include "bench_cuda_attention.h"

// ---------------------------------------------------------------------------------------------------
// Steps

enum { STEPS = 12 };
static const double ENOUGH_SECONDS = 6;

// Median seconds of a step, after two that are not counted.
static double bench_steps(BenchModel *b, int *steps) {
    double seconds[STEPS], start = now_seconds();
    bench_step(b, NULL);
    if (!bench_tiny) bench_step(b, NULL);
    for (*steps = 0; *steps < (bench_tiny ? 2 : STEPS); (*steps)++) {
        if (*steps >= 3 && now_seconds() - start > ENOUGH_SECONDS) break;
        seconds[*steps] = bench_step(b, NULL);
    }
    return median(seconds, *steps);
}

static size_t bench_bytes(const Model *m) {
    return m->plan.params_bytes + m->plan.grads_bytes + m->plan.moments_bytes + m->plan.master_bytes +
           m->plan.copies_bytes + m->plan.activations_bytes + m->plan.workspace_bytes;
}

typedef struct {
    char preset[32], attention[32], text[80];
    int NKV;
    bool fast;
} ModelCase;

static ModelCase read_case(const char *preset, const char *text) {
    ModelCase c;
    int heads = 0;
    char option[8] = "";
    memset(&c, 0, sizeof(c));
    int read = sscanf(text, "%31[^,],%d,%d,%7s", c.attention, &c.NKV, &heads, option);
    c.fast = strcmp(option, "fast") == 0;
    CHECK(read == 3 + c.fast && (heads == 1 || heads == 2) && c.NKV >= 0,
          "invalid case '%s': expected ATTENTION,KV_HEADS,HEADS[,fast] with HEADS 1 or 2", text);
    FORMAT(c.preset, "%s%s", preset, heads == 2 ? "-2h" : "");
    FORMAT(c.text, "%s%s%s", c.attention, heads == 2 ? " with 2 NH heads" : "", c.fast ? ", not deterministic" : "");
    return c;
}

// Plans attention with the built-in kernel: a plan of cuDNN takes seconds. The spare bytes are for its workspace.
static int largest_batch(const ModelCase *cases, int count, int T, AttentionOptions use) {
    const AttentionOptions builtin = {true, false, true, false};
    size_t free_bytes = 0, total = 0, spare = (bench_tiny ? (size_t)1 << 20 : (size_t)4 << 30);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    attention_configure(builtin);
    for (int B = bench_tiny ? 2 : max_int(1, 32768 / T); B > 0; B /= 2) {
        bool fits = true;
        for (int i = 0; i < count; i++) {
            Model m;
            plan_model(&m, cases[i].preset, cases[i].attention, cases[i].NKV, B, T, FOR_TRAINING);
            fits = fits && bench_bytes(&m) + spare < free_bytes;
            model_free(&m, false);
            attention_stop(); // its plans for this B
        }
        if (!fits) continue;
        attention_configure(use);
        return B;
    }
    CHECK(false, "one sequence of %d tokens does not fit in the %.1f GiB that are free on this device", T,
          (double)free_bytes / 1073741824);
    return 0;
}

static void run_models(const char *preset, int T, int count, char **texts, AttentionOptions use) {
    ModelCase cases[16];
    CHECK(count > 0 && count <= 16, "1 to 16 cases are allowed, not %d", count);
    device_start();
    for (int i = 0; i < count; i++) cases[i] = read_case(preset, texts[i]);
    kernels_open(1, kernels_pool());
    ops_init(1);
    kernel_peaks();
    kernels_close();
    ops_free();
    int B = bench_batch ? bench_batch : largest_batch(cases, count, T, use);
    for (int i = 0; i < count; i++) {
        AttentionOptions of = use;
        of.deterministic = use.deterministic && !cases[i].fast;
        attention_stop(); // drops the plans of the previous model; the forward alone uses those of training
        attention_configure(of);
        for (int training = 1; training >= 0; training--) {
            BenchModel b;
            int steps = 0;
            bench_open(&b, cases[i].preset, cases[i].attention, cases[i].NKV, B, T,
                       training ? FOR_TRAINING : FOR_EVALUATION);
            double seconds = bench_steps(&b, &steps), tokens = (double)B * T;
            double flops = training ? training_flops(&b.model.plan, B, T) : forward_flops(&b.model.plan, B, T);
            double tflops = 1e-12 * flops / seconds, rated = ops_rated() ? ops_rated()->tflops : 0;
            char name[200];
            FORMAT(name, "%s %s, B %d T %d", preset, cases[i].text, B, T);
            Ratio share = {rated > 0 ? tflops / rated : 0, 0, 0};
            record(!training         ? "forward"
                   : bench_no_update ? "forward and backward"
                                     : "training",
                   name, tokens / seconds, "tokens/s", rated > 0 ? tokens / seconds * rated / tflops : 0,
                   rated > 0 ? "the device's bf16 peak" : "", share,
                   "%.3f ms, %.2f TFLOP/s, %.1f%% of a product; %d steps, %zu parameters, %zu bytes, attention by %s",
                   1e3 * seconds, tflops, 100 * tflops / kernels.gemm_tflops, steps,
                   b.model.plan.tensors.parameter_count, bench_bytes(&b.model), attention_backend());
            bench_close(&b);
        }
    }
}

// One step for each line on stdin; prints its milliseconds.
static void bench_turns(const char *preset, const char *attention, int NKV, int B, int T) {
    BenchModel b;
    bench_open(&b, preset, attention, NKV, B, T, FOR_TRAINING);
    printf("%zu parameters, %.6g FLOPs a step\n", b.model.plan.tensors.parameter_count,
           training_flops(&b.model.plan, B, T));
    fflush(stdout);
    for (int c; (c = getchar()) != EOF;)
        if (c == '\n') {
            printf("%.3f\n", 1e3 * bench_step(&b, NULL));
            fflush(stdout);
        }
    bench_close(&b);
}

// ---------------------------------------------------------------------------------------------------
// Profile

enum { PROFILE_EVENTS = 8192 };
static struct {
    bool on;
    int count, depth; // of events, two for each operation; of operations that other operations call
    cudaEvent_t events[PROFILE_EVENTS];
    const char *names[PROFILE_EVENTS / 2];
} profile;

// Called with the name when an operation begins and with NULL when it ends (llmc/cuda/launch.cuh). An operation that
// another one calls is part of it.
static void profile_operation(const char *name) {
    if (!profile.on || (name ? profile.depth++ : --profile.depth) > 0) return;
    CHECK(profile.count < PROFILE_EVENTS, "a step has more than %d operations: profile a model with fewer layers",
          PROFILE_EVENTS / 2);
    if (name) profile.names[profile.count / 2] = name;
    CUDA_CHECK(cudaEventRecord(profile.events[profile.count++], main_stream));
}

typedef struct {
    const char *name;
    int calls;
    double ms;
} Part;

static int compare_parts(const void *a, const void *b) {
    double x = ((const Part *)a)->ms, y = ((const Part *)b)->ms;
    return (x < y) - (x > y);
}

static void run_profile(const char *preset, const char *attention, int NKV, int B, int T) {
    BenchModel b;
    bench_open(&b, preset, attention, NKV, B, T, FOR_TRAINING);
    for (int i = 0; i < PROFILE_EVENTS; i++) CUDA_CHECK(cudaEventCreate(&profile.events[i]));
    int steps = 0;
    double plain = 1e3 * bench_steps(&b, &steps), inside = 0;
    profile.on = true;
    double whole = 1e3 * bench_step(&b, NULL);
    profile.on = false;
    Part parts[64];
    int count = 0;
    for (int i = 0; i + 1 < profile.count; i += 2) {
        float ms = 0;
        int p = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, profile.events[i], profile.events[i + 1]));
        while (p < count && strcmp(parts[p].name, profile.names[i / 2]) != 0) p++;
        assert(p < 64);
        if (p == count) parts[count].name = profile.names[i / 2], parts[count].calls = 0, parts[count++].ms = 0;
        parts[p].calls++, parts[p].ms += (double)ms, inside += (double)ms;
    }
    qsort(parts, (size_t)count, sizeof(Part), compare_parts);
    char of[96];
    FORMAT(of, "%s %s, B %d T %d%s", preset, attention, B, T, linear_in_fp8() ? ", fp8" : "");
    record("step", of, whole, "ms", 0, "", NO_RATIO, "1 call, %.3f ms without events", plain);
    for (int p = 0; p < count; p++)
        record(parts[p].name, of, parts[p].ms, "ms", 0, "", NO_RATIO, "%d calls, %.1f%% of the step", parts[p].calls,
               100 * parts[p].ms / whole);
    record("outside", of, whole - inside, "ms", 0, "", NO_RATIO, "1 call, %.1f%% of the step",
           100 * (1 - inside / whole));
    for (int i = 0; i < PROFILE_EVENTS; i++) CUDA_CHECK(cudaEventDestroy(profile.events[i]));
    bench_close(&b);
}

static void run_facts(void) {
    char name[256], driver[256];
    size_t free_bytes = 0, total = 0;
    int l2 = 0;
    ops_device(name, driver, sizeof(name));
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
    record("device", "", 0, "", 0, "", NO_RATIO, "%s", name);
    record("driver", "", 0, "", 0, "", NO_RATIO, "%s", driver);
    record("library", "", 0, "", 0, "", NO_RATIO, "%s", gemm_library());
    record("memory", "", 0, "", 0, "", NO_RATIO, "%zu of %zu bytes are free; L2 cache: %d bytes", free_bytes, total,
           l2);
    record("revision", "", 0, "", 0, "", NO_RATIO, "%s", source_revision());
}

int main(int argc, char **argv) {
    const char *usage =
        "usage: bench_cuda [--tiny] [--repeats N] [--batch B] [--no-update] [--matmul-dtype fp8] "
        "[--attention-kernel own|cudnn] [--window W] [--full-every K] [--sparse-blocks K] [--yoco] [--qk-norm] "
        "[--shared-experts S] [--dense-layers N] [--doc-mask] [--json FILE] facts | "
        "kernels PRESET KV_HEADS B T [WORD] | model PRESET T CASE... | profile PRESET ATTENTION KV_HEADS B T | "
        "turns PRESET ATTENTION KV_HEADS B T | attention-turns PRESET ATTENTION KV_HEADS B T | decode PRESET KV_HEADS "
        "B CONTEXT... | "
        "decode-turns PRESET ATTENTION KV_HEADS B T";
    int i = 1;
    bool fp8 = false;
    AttentionOptions use = {false, false, true, false};
    for (; i < argc && argv[i][0] == '-'; i++) {
        // --sdpa and --gemm are the earlier names: scripts for rented GPUs have them
        bool kernel = strcmp(argv[i], "--attention-kernel") == 0 || strcmp(argv[i], "--sdpa") == 0;
        bool type = strcmp(argv[i], "--matmul-dtype") == 0 || strcmp(argv[i], "--gemm") == 0;
        if (strcmp(argv[i], "--tiny") == 0) bench_tiny = true, bench_repeats = 3;
        else if (bench_layer_option(argc, argv, &i)) continue;
        else if (strcmp(argv[i], "--repeats") == 0 && i + 1 < argc)
            bench_repeats = min_int(number(argv[++i], 1), MOST_REPEATS);
        else if (strcmp(argv[i], "--batch") == 0 && i + 1 < argc) bench_batch = number(argv[++i], 1);
        else if (strcmp(argv[i], "--no-update") == 0) bench_no_update = true;
        else if (kernel && i + 1 < argc && strcmp(argv[i + 1], "own") == 0) use.builtin = true, i++;
        else if (kernel && i + 1 < argc && strcmp(argv[i + 1], "cudnn") == 0) use.cudnn = true, i++;
        else if (type && i + 1 < argc && strcmp(argv[i + 1], "fp8") == 0) fp8 = true, i++;
        else if (strcmp(argv[i], "--no-deterministic") == 0) use.deterministic = false;
        else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
            bench_json = fopen(argv[++i], "a");
            CHECK(bench_json, "cannot write %s: %s", argv[i], strerror(errno));
        } else break;
    }
    use.documents = bench_layers.documents;
    attention_configure(use);
    const char *refused = linear_configure(fp8 ? GEMM_FP8 : GEMM_BF16);
    CHECK(!refused, "--matmul-dtype fp8: %s", refused);
    const char *command = i < argc ? argv[i] : "";
    char **a = argv + i + 1;
    int count = argc - i - 1;
    if (strcmp(command, "facts") == 0 && count == 0) run_facts();
    else if (strcmp(command, "kernels") == 0 && (count == 4 || count == 5)) {
        device_start();
        kernels_run(a[0], number(a[1], 0), number(a[2], 1), number(a[3], 1), count == 5 ? a[4] : "");
    } else if (strcmp(command, "model") == 0 && count >= 3) run_models(a[0], number(a[1], 1), count - 2, a + 2, use);
    else if (strcmp(command, "profile") == 0 && count == 5)
        run_profile(a[0], a[1], number(a[2], 0), number(a[3], 1), number(a[4], 1));
    else if (strcmp(command, "turns") == 0 && count == 5)
        bench_turns(a[0], a[1], number(a[2], 0), number(a[3], 1), number(a[4], 1));
    else if (strcmp(command, "decode") == 0 && count >= 4)
        run_decode(a[0], number(a[1], 0), number(a[2], 1), count - 3, a + 3);
    else if (strcmp(command, "decode-turns") == 0 && count == 5)
        run_decode_turns(a[0], a[1], number(a[2], 0), number(a[3], 1), number(a[4], 1));
    else if (strcmp(command, "attention-turns") == 0 && count == 5)
        run_attention_turns(a[0], a[1], number(a[2], 0), number(a[3], 1), number(a[4], 1), use.deterministic);
    else {
        warn("%s", usage);
        return EXIT_USAGE;
    }
    if (bench_json) CHECK(fclose(bench_json) == 0, "cannot write to the file of --json: %s", strerror(errno));
    return EXIT_DONE;
}
