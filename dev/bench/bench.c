/*
bench.c: speed of the CPU trainer and its share of what the machine allows. `make bench` runs it.

  build/bench [--filter WORD] [--rounds N] [--threads N] [--matmul-dtype TYPE]
              [--preset NAME] [--batch N] [--longest N] [--memory GIB] [--seconds N]
              [--window W] [--full-every K] [--yoco] [--qk-norm] [--shared-experts S] [--dense-layers N] [--doc-mask]
    --filter  only tables and rows whose name contains WORD (operations, steps, ...)
    --rounds  repetitions of each measurement (7); medians are printed
    --threads OpenMP threads (all cores)
    --matmul-dtype  fp32 (default), bf16 or fp8, as for train_diffv2
    --window, --full-every, --yoco, --qk-norm, --shared-experts, --dense-layers, --doc-mask
              traits of the layers in steps, as the trainer's
    --preset, --batch, --longest, --memory, --seconds
              of the tables decode and prefill: the shape (small), the batch (1 and 8), the longest
              context (65536), the memory for all arms together (4 GiB), and the time of a prompt up to which the prompt
              of twice its length is measured too (20 s); there --window is the window of YOCO (512)

operations  time, GFLOP/s or GB/s of each operation, and its share of the peak that was measured just before it, for
            arrays larger than the cache: the GEMM rate of the library (1024^3), or the bandwidth for the operation's
            mix of streams. Bytes are those that the program names: a write that misses the cache also reads, which no
            mix counts.
steps       whole steps and a lower bound: the products of the model alone by the library, attention at 80% of the GEMM
            peak, and the bytes of the other operations at the bandwidth of their mix. Step and bound are measured in
            turns, and the share is the median over the turns: a shared machine changes its speed within seconds.
decode, prefill
            only by name: generation at contexts of 1K to --longest and batches of 1 and 8 (bench_decode.h). Arms run in
            turns; ratios are those of a round.

The benchmark includes the trainer, so it measures the code that trains.
*/
#define main train_diffv2_main
#include "../../train_diffv2.c"
#undef main
#include "bench_model.h"
#include "bench_operations.h"

// ---------------------------------------------------------------------------------------------------
// Steps

typedef struct {
    const char *preset, *attention;
    int B, T;
} StepCase;
static const StepCase step_cases[] = {
    {"tiny", "diff_v2", 8, 256},  {"small", "diff_v2", 16, 256}, {"124m", "baseline", 4, 64},
    {"124m", "baseline", 4, 256}, {"124m", "baseline", 1, 1024}, {"124m", "diff_v2", 4, 64},
    {"124m", "diff_v2", 4, 256},  {"124m", "diff_v2", 1, 1024},
};

// The operations of a step, each opened once.
typedef struct {
    BenchOperation all[2 * OP_SIZES];
    double calls[2 * OP_SIZES];
    int count;
    AttentionShape attention;
    int L;
} StepOperations;
static void step_operations_open(StepOperations *o, const Model *model, int B, int T) {
    OpModel m = op_model_of(model, B, T);
    OpSize sizes[OP_SIZES];
    m.logit_rows = B * T;
    int count = op_sizes(sizes, &m);
    o->count = 0, o->L = m.L;
    o->attention = key_set(&model->plan, 0, 0, B, T, 0).shape;
    for (int i = 0; i < 2 * count; i++) {
        double calls = sizes[i / 2].calls[i % 2];
        bool combine = sizes[i / 2].kind == OP_DIFF_COMBINE;
        if (calls <= 0 || (combine && (model->plan.diff_attention || m.NQ != 2 * m.NH))) continue;
        o->calls[o->count] = calls;
        operation_describe(&o->all[o->count], &sizes[i / 2], i % 2);
        if (sizes[i / 2].kind == OP_MATMUL) operation_alloc(&o->all[o->count]); // the others are not called
        o->count++;
    }
}
static void step_operations_close(StepOperations *o) {
    for (int i = 0; i < o->count; i++) operation_close(&o->all[i]);
}
// The lower bound of a step in seconds: products alone, attention at 80% of the peak, others at their bandwidth.
static double step_bound(const StepOperations *o, double part[3]) {
    double attention = o->L * (attention_forward_flops(o->attention) + attention_backward_flops(o->attention)),
           bandwidth[MIXES];
    part[0] = part[2] = 0;
    part[1] = attention / (0.8e9 * matmul_peak_gflops());
    for (int m = 0; m < MIXES; m++) bandwidth[m] = probe_bandwidth((Mix)m, PROBE_COUNT);
    for (int i = 0; i < o->count; i++) {
        const BenchOperation *run = &o->all[i];
        double start = now_seconds();
        if (run->cost.flops == 0) part[2] += o->calls[i] * (double)run->cost.bytes / bandwidth[mix_of(run)];
        else op_call(&run->c, run->backward), part[0] += o->calls[i] * (now_seconds() - start);
    }
    return part[0] + part[1] + part[2];
}

static void table_steps(void) {
    printf("\nsteps                                         ms a step (forward backward update)   first  tokens/s"
           "   bound: ms (products attention rest)   share\n");
    for (size_t i = 0; i < sizeof(step_cases) / sizeof(step_cases[0]); i++) {
        const StepCase *c = &step_cases[i];
        char name[64];
        FORMAT(name, "%s %s %d x %d", c->preset, c->attention, c->B, c->T);
        if (!wanted(name) && !wanted("steps")) continue;
        BenchModel b;
        bench_open(&b, c->preset, c->attention, 0, c->B, c->T, FOR_TRAINING);
        StepOperations operations;
        step_operations_open(&operations, &b.model, c->B, c->T);
        ops_init(b.model.plan.workspace_bytes); // that of the step
        double step[64], bound[64], share[64], part[3][64], bound_part[3][64], parts[3];
        double first = bench_step(&b, parts);
        step_bound(&operations, parts); // the library prepares for the shapes
        for (int r = 0; r < bench.rounds; r++) {
            step[r] = bench_step(&b, parts);
            for (int p = 0; p < 3; p++) part[p][r] = parts[p];
            bound[r] = step_bound(&operations, parts);
            for (int p = 0; p < 3; p++) bound_part[p][r] = parts[p];
            double after = bench_step(&b, parts);
            share[r] = bound[r] / (0.5 * (step[r] + after));
        }
        double t = median(step, bench.rounds);
        printf("  %-32s %10.1f (%7.1f %8.1f %7.1f)  %5.2fx %9.0f  %8.1f (%7.1f %7.1f %6.1f)  %5.0f%%\n", name, 1e3 * t,
               1e3 * median(part[0], bench.rounds), 1e3 * median(part[1], bench.rounds),
               1e3 * median(part[2], bench.rounds), first / t, c->B * c->T / t, 1e3 * median(bound, bench.rounds),
               1e3 * median(bound_part[0], bench.rounds), 1e3 * median(bound_part[1], bench.rounds),
               1e3 * median(bound_part[2], bench.rounds), 100 * median(share, bench.rounds));
        fflush(stdout);
        step_operations_close(&operations);
        bench_close(&b);
    }
}

#include "bench_decode.h"

// Selects the type of products; false for an unknown one.
static bool find_gemm(const char *name) {
    for (int i = 0; gemm_choice(i); i++)
        if (strcmp(name, gemm_choice(i)) == 0) {
            const char *why = linear_configure((GemmType)i);
            CHECK(!why, "--matmul-dtype %s: %s", name, why);
            return true;
        }
    return false;
}

int main(int argc, char **argv) {
    environment_reexecute(argv);
    bench.threads = omp_get_num_procs();
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        int number = atoi(value);
        if (bench_layer_option(argc, argv, &i)) i--; // some have no value
        else if (strcmp(argv[i], "--filter") == 0 && value[0]) bench.filter = value;
        else if (strcmp(argv[i], "--rounds") == 0 && number > 0 && number <= 64) bench.rounds = number;
        else if (strcmp(argv[i], "--threads") == 0 && number > 0) bench.threads = number;
        else if (strcmp(argv[i], "--preset") == 0 && value[0]) bench.preset = value;
        else if (strcmp(argv[i], "--batch") == 0 && (number == 1 || number == 8)) bench.batch = number;
        else if (strcmp(argv[i], "--longest") == 0 && number >= DECODE_SHORTEST) bench.longest = number;
        else if (strcmp(argv[i], "--seconds") == 0 && number > 0) bench.seconds = number;
        else if (strcmp(argv[i], "--memory") == 0 && number > 0) bench.memory = (double)number * (1 << 30);
        else if (strcmp(argv[i], "--matmul-dtype") == 0 && find_gemm(value)) continue;
        else {
            warn("%s %s: usage: build/bench [--filter WORD] [--rounds 1..64] [--threads N] "
                 "[--matmul-dtype fp32|bf16|fp8] [--preset NAME] [--batch 1|8] [--longest N] "
                 "[--memory GIB] [--window W] [--full-every K] [--yoco]",
                 argv[i], value);
            return EXIT_USAGE;
        }
    }
    omp_set_num_threads(bench.threads);
    for (int i = 0; i < 3; i++) bench.probe[i] = (float *)buffer_alloc(PROBE_COUNT * sizeof(float), "the benchmark");
    printf("%d threads, %s, revision %s; medians of %d\n", bench.threads, matmul_library(), source_revision(),
           bench.rounds);
    bool decode = strcmp(bench.filter, "decode") == 0;
    if (decode || strcmp(bench.filter, "prefill") == 0) {
        decode ? table_decode() : table_prefill();
        return 0;
    }
    table_operations();
    table_steps();
    return 0;
}
