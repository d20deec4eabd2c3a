/*
bench.c: speed of the CPU trainer and its share of what the machine allows. `make bench` runs it.

  build/bench [--filter WORD] [--rounds N] [--threads N] [--turns PRESET,ATTENTION,KV_HEADS,B,T]
    --filter  only tables and rows whose name contains WORD (peaks, operations, steps, threads, loader, memory, ...)
    --rounds  repetitions of each measurement (7); medians are printed
    --threads OpenMP threads (all cores)
    --turns   no tables: one step for each line on stdin; prints its milliseconds (for dev/bench/bench_peers.py)

peaks       GEMM rate of the library (1024^3), and memory bandwidth for five mixes of streams. Bytes are those that the
            program names: a write that misses the cache also reads, which no mix counts.
operations  time, GFLOP/s or GB/s of each operation, and its share of the peak that was measured just before it, for
            arrays larger than the cache. A bandwidth is compared with the operation's mix of streams.
steps       whole steps and a lower bound: the products of the model alone by the library, attention at 80% of the GEMM
            peak, and the bytes of the other operations at the bandwidth of their mix. Step and bound are measured in
            turns, and the share is the median over the turns: a shared machine changes its speed within seconds.
threads     all threads against one, in turns
loader      tokens/s of the data loader alone, from shards in the page cache
memory      VmHWM of the trainer after two steps, and the total of its --dry-run

The benchmark includes the trainer, so it measures the code that trains.
*/
#define main train_diffv2_main
#include "../../train_diffv2.c"
#undef main
#include "bench_model.h"
#include <sys/resource.h>

typedef enum { READ, WRITE, COPY, ADD, UPDATE, MIXES } Mix; // 1 in; 1 out; 1 in 1 out; 2 in 1 out; 1 changed in place
static const char *const mix_names[MIXES] = {"read", "write", "copy", "add", "update"};

enum { PROBE_COUNT = 32 << 20 }; // elements of a probe array: 128 MiB, beyond any cache
static struct {
    const char *filter;
    int rounds, threads;
    const char *turns;
    float *probe[3];
    int *tokens;
    float sink; // keeps reads from being optimised away
} bench = {"", 7, 0, NULL, {NULL}, NULL, 0};

static bool wanted(const char *name) { return strstr(name, bench.filter) != NULL; }

// ---------------------------------------------------------------------------------------------------
// Peaks

// Bytes per second of one pass over `count` elements with this mix of streams.
static double probe_bandwidth(Mix mix, size_t count) {
    float *a = bench.probe[0], *b = bench.probe[1], *c = bench.probe[2], sum = 0;
    double start = now_seconds();
    switch (mix) {
    case READ:
#pragma omp parallel for simd reduction(+ : sum) schedule(static)
        for (size_t i = 0; i < count; i++) sum += a[i];
        break;
    case WRITE:
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) a[i] = 1.5f;
        break;
    case COPY:
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) b[i] = a[i];
        break;
    case ADD:
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) c[i] = a[i] + b[i];
        break;
    default:
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) a[i] *= 0.999f;
    }
    double seconds = now_seconds() - start;
    static const int streams[MIXES] = {1, 1, 2, 3, 2};
    bench.sink += sum;
    return streams[mix] * sizeof(float) * (double)count / seconds;
}

static void table_peaks(void) {
    printf("\npeaks                     1 thread   %2d threads\n", bench.threads);
    double values[2][64];
    for (int row = -1; row < MIXES; row++) {
        for (int r = 0; r < bench.rounds; r++)
            for (int all = 0; all < 2; all++) {
                omp_set_num_threads(all ? bench.threads : 1);
                values[all][r] = row < 0 ? matmul_peak_gflops() : 1e-9 * probe_bandwidth((Mix)row, PROBE_COUNT);
            }
        printf("  %-22s %8.1f   %8.1f  %s\n", row < 0 ? "GEMM" : mix_names[row], median(values[0], bench.rounds),
               median(values[1], bench.rounds), row < 0 ? "GFLOP/s" : "GB/s");
    }
    omp_set_num_threads(bench.threads);
}

// ---------------------------------------------------------------------------------------------------
// Operations of a training step and their cost

typedef struct {
    int B, T, N, L, C, F, V, Vp, NH, NQ, D, QD, fused_rows, ld, rope_heads; // as in train_diffv2.c
    size_t parameters;
    AttentionShape attention;
} Shape;

static Shape shape_of(const Model *model, int B, int T) {
    const ModelConfig *c = &model->plan.config;
    Shape s = {B,
               T,
               B * T,
               c->L,
               c->C,
               c->F,
               c->V,
               model->plan.Vp,
               c->NH,
               model->plan.dims.NQ,
               c->D,
               model->plan.dims.QD,
               model->plan.dims.fused_rows,
               model->plan.dims.fused_ld,
               model->plan.dims.NQ + model->plan.dims.NK,
               model->plan.tensors.parameter_count,
               key_set(&model->plan, 0, B, T, 0).shape};
    return s;
}

typedef struct {
    const char *name;
    Mix mix;
    double (*calls)(const Shape *s); // in a step
    // Returns the elements that it moves between memory and the CPU, each array once. Runs unless x is NULL, on arrays
    // large enough for every operation.
    double (*run)(const Shape *s, real *const *x);
} MemoryOperation;

static double per_layer(const Shape *s) { return s->L; }
static double twice_per_layer(const Shape *s) { return 2.0 * s->L; }
static double norms(const Shape *s) { return 2.0 * s->L + 1; }
static double once(const Shape *s) { return (void)s, 1; }
static double never(const Shape *s) { return (void)s, 0; }
static double pairs(const Shape *s) { return s->NQ == 2 * s->NH ? s->L : 0; }

static double op_embedding(const Shape *s, real *const *x) {
    if (x) embedding_forward(x[0], bench.tokens, x[1], s->N, s->C);
    return 2.0 * s->N * s->C;
}
static double op_embedding_b(const Shape *s, real *const *x) {
    if (x) embedding_backward(x[0], x[1], bench.tokens, s->N, s->C);
    return 3.0 * s->N * s->C;
}
static double op_rmsnorm(const Shape *s, real *const *x) {
    if (x) rmsnorm_forward(x[0], x[3], x[1], x[2], s->N, s->C, (real)1e-5);
    return 2.0 * s->N * s->C;
}
static double op_rmsnorm_b(const Shape *s, real *const *x) {
    if (x) rmsnorm_backward(x[0], x[4], x[1], x[2], x[3], x[5], s->N, s->C, true);
    return 4.0 * s->N * s->C;
}
static double op_rope(const Shape *s, real *const *x) {
    if (x) rope_forward(x[0], x[1], s->B, s->T, s->rope_heads, s->QD, s->ld, 0);
    return 2.0 * s->N * s->rope_heads * s->QD;
}
static double op_combine(const Shape *s, real *const *x) {
    if (x) diff_combine_forward(x[0], x[1], x[2], s->N, s->NH, s->D, s->ld, 1, true);
    return 3.0 * s->N * s->NH * s->D;
}
static double op_combine_b(const Shape *s, real *const *x) {
    if (x) diff_combine_backward(x[0], x[1], x[2], x[3], x[4], s->N, s->NH, s->D, s->ld, 1, true);
    return 4.0 * s->N * s->NH * s->D;
}
static double op_residual(const Shape *s, real *const *x) {
    if (x) residual_forward(x[0], x[1], x[2], (size_t)s->N * (size_t)s->C);
    return 3.0 * s->N * s->C;
}
static double op_residual_norm(const Shape *s, real *const *x) {
    if (x) {
        residual_forward(x[0], x[1], x[2], (size_t)s->N * (size_t)s->C);
        rmsnorm_forward(x[3], x[5], x[0], x[4], s->N, s->C, (real)1e-5);
    }
    return 4.0 * s->N * s->C;
}
static double op_fused_norm(const Shape *s, real *const *x) {
    if (x) residual_rmsnorm_forward(x[0], x[3], x[5], x[1], x[2], x[4], s->N, s->C, (real)1e-5);
    return 4.0 * s->N * s->C;
}
static double op_swiglu(const Shape *s, real *const *x) {
    if (x) swiglu_forward(x[0], x[1], s->N, s->F);
    return 3.0 * s->N * s->F;
}
static double op_swiglu_b(const Shape *s, real *const *x) {
    if (x) swiglu_backward(x[0], x[1], x[2], s->N, s->F);
    return 5.0 * s->N * s->F;
}
static double op_entropy(const Shape *s, real *const *x) {
    if (x) cross_entropy(x[1], x[0], bench.tokens, s->N, s->V, s->Vp, (real)1e-3);
    return 2.0 * s->N * s->Vp;
}
static double op_norm(const Shape *s, real *const *x) {
    double sum = 0;
    if (x) sum_of_squares(&sum, x[0], s->parameters);
    bench.sink += (float)sum;
    return (double)s->parameters;
}
static double op_adamw(const Shape *s, real *const *x) {
    if (x) adamw_update(x[0], NULL, x[1], x[2], x[3], s->parameters, 1, 1e-3, 0.9, 0.95, 1e-8, 0.1, 100);
    return 7.0 * (double)s->parameters;
}

// clang-format off
static const MemoryOperation memory_operations[] = {
    {"embedding",               COPY,    once,            op_embedding},
    {"embedding backward",      UPDATE,  once,            op_embedding_b},
    {"rmsnorm",                 COPY,    once,            op_rmsnorm},
    {"rmsnorm backward",        ADD,     norms,           op_rmsnorm_b},
    {"rope",                    UPDATE,  twice_per_layer, op_rope},
    {"diff_combine",            ADD,     pairs,           op_combine},
    {"diff_combine backward",   COPY,    pairs,           op_combine_b},
    {"residual",                ADD,     never,           op_residual},
    {"residual and rmsnorm",    ADD,     twice_per_layer, op_fused_norm},
    {"residual, then rmsnorm",  ADD,     never,           op_residual_norm}, // the same in two operations
    {"swiglu",                  ADD,     per_layer,       op_swiglu},
    {"swiglu backward",         ADD,     per_layer,       op_swiglu_b},
    {"cross_entropy",           UPDATE,  once,            op_entropy},
    {"gradient norm",           READ,    once,            op_norm},
    {"adamw",                   UPDATE,  once,            op_adamw},
};
// clang-format on
enum { MEMORY_OPERATIONS = sizeof(memory_operations) / sizeof(memory_operations[0]) };

// The three products of a linear layer.
typedef struct {
    const char *name;
    int IC, OC;
    double calls; // per step and row
} Linear;
enum { LINEARS = 5 };
static void linears_of(const Shape *s, Linear *l) {
    const Linear all[LINEARS] = {{"q,k,v,lambda", s->C, s->fused_rows, s->L},
                                 {"o_proj", s->NH * s->D, s->C, s->L},
                                 {"gate,up", s->C, 2 * s->F, s->L},
                                 {"down", s->F, s->C, s->L},
                                 {"head", s->C, s->V, 1}};
    memcpy(l, all, sizeof(all));
}

typedef enum { FORWARD, BACKWARD_X, BACKWARD_W, PRODUCTS } Product;
static void run_product(Product p, const Linear *l, int N, real *const *x) {
    switch (p) {
    case FORWARD: gemm(CblasNoTrans, CblasTrans, N, l->OC, l->IC, 1, x[0], l->IC, x[1], l->IC, 0, x[2], l->OC); break;
    case BACKWARD_X:
        gemm(CblasNoTrans, CblasNoTrans, N, l->IC, l->OC, 1, x[2], l->OC, x[1], l->IC, 0, x[0], l->IC);
        break;
    default: gemm(CblasTrans, CblasNoTrans, l->OC, l->IC, N, 1, x[2], l->OC, x[0], l->IC, 1, x[1], l->IC);
    }
}

enum { ARRAYS = 6 };
typedef struct {
    real *x[ARRAYS];
} Arrays;

static Arrays arrays_alloc(size_t count) {
    Arrays a;
    for (int i = 0; i < ARRAYS; i++) {
        a.x[i] = (real *)buffer_alloc(count * sizeof(real), "the benchmark");
#pragma omp parallel for schedule(static)
        for (size_t e = 0; e < count; e++) a.x[i][e] = (real)((e * 2654435761u >> 8) % 1000) / 1000 + (real)0.001;
    }
    return a;
}
static void arrays_free(Arrays *a) {
    for (int i = 0; i < ARRAYS; i++) buffer_free(a->x[i]);
}

static void print_operation(const char *name, const char *shape, double seconds, double rate, const char *unit,
                            double share) {
    printf("  %-24s %-20s %9.3f ms %8.1f %-7s %4.0f%%\n", name, shape, 1e3 * seconds, rate, unit, 100 * share);
    fflush(stdout);
}

static void table_operations(void) {
    enum { ROWS = 16384 };
    printf("\noperations: 124m, diff_v2; products with 1024 rows, the others with %d (beyond the cache)\n", (int)ROWS);
    Model model;
    plan_model(&model, "124m", "diff_v2", 0, 1, 1024, FOR_TRAINING);
    Shape s = shape_of(&model, 1, 1024), large = shape_of(&model, 16, 1024);
    Linear linears[LINEARS];
    linears_of(&s, linears);
    ops_init(model.plan.workspace_bytes);
    Arrays a = arrays_alloc((size_t)ROWS * (size_t)large.F * 2 + (size_t)large.V * (size_t)large.C);
    double seconds[64], share[64];
    for (int l = 0; l < LINEARS; l++)
        for (int p = 0; p < PRODUCTS; p++) {
            static const char *const names[PRODUCTS] = {"y = x W^T", "dx = dy W", "dW += dy^T x"};
            char name[64], shape[64];
            FORMAT(name, "matmul %s", linears[l].name);
            if (!wanted(name) && !wanted("operations")) continue;
            FORMAT(shape, "%s", names[p]);
            double flops = 2.0 * s.N * linears[l].IC * linears[l].OC;
            for (int r = 0; r < bench.rounds; r++) {
                double peak = 1e9 * matmul_peak_gflops(), start = now_seconds();
                run_product((Product)p, &linears[l], s.N, a.x);
                seconds[r] = now_seconds() - start;
                share[r] = flops / seconds[r] / peak;
            }
            double t = median(seconds, bench.rounds);
            print_operation(name, shape, t, 1e-9 * flops / t, "GFLOP/s", median(share, bench.rounds));
        }
    static const int attention_shapes[][2] = {{4, 64}, {4, 256}, {1, 1024}};
    for (int i = 0; i < 3; i++)
        for (int backward = 0; backward < 2; backward++) {
            Shape at = shape_of(&model, attention_shapes[i][0], attention_shapes[i][1]);
            AttentionShape as = at.attention;
            char name[64], shape[64];
            FORMAT(name, "attention%s", backward ? " backward" : "");
            FORMAT(shape, "%d x %d, %d on %d", at.B, at.T, as.NQ, as.NKV);
            if (!wanted(name) && !wanted("operations")) continue;
            ops_init(attention_workspace_bytes(as, bench.threads));
            size_t k = (size_t)(as.NQ * as.D), v = k + (size_t)(as.NKV * as.D);
            double flops = backward ? attention_backward_flops(as) : attention_forward_flops(as);
            for (int r = 0; r < bench.rounds; r++) {
                attention_forward(a.x[1], a.x[2], a.x[0], a.x[0] + k, a.x[0] + v, as);
                double peak = 1e9 * matmul_peak_gflops(), start = now_seconds();
                if (backward)
                    attention_backward(a.x[3], a.x[3] + k, a.x[3] + v, a.x[4], a.x[1], a.x[2], a.x[0], a.x[0] + k,
                                       a.x[0] + v, as, false);
                else attention_forward(a.x[1], a.x[2], a.x[0], a.x[0] + k, a.x[0] + v, as);
                seconds[r] = now_seconds() - start;
                share[r] = flops / seconds[r] / peak;
            }
            double t = median(seconds, bench.rounds);
            print_operation(name, shape, t, 1e-9 * flops / t, "GFLOP/s", median(share, bench.rounds));
        }
    for (int i = 0; i < MEMORY_OPERATIONS; i++) {
        const MemoryOperation *op = &memory_operations[i];
        if (!wanted(op->name) && !wanted("operations")) continue;
        Shape here = large;
        if (op->run == op_entropy) here = s; // a piece of the logits
        here.parameters = min_size(large.parameters, (size_t)large.V * (size_t)large.C);
        double bytes = op->run(&here, a.x) * sizeof(real);
        for (int r = 0; r < bench.rounds; r++) {
            double peak = probe_bandwidth(op->mix, PROBE_COUNT), start = now_seconds();
            op->run(&here, a.x);
            seconds[r] = now_seconds() - start;
            share[r] = bytes / seconds[r] / peak;
        }
        double t = median(seconds, bench.rounds);
        print_operation(op->name, mix_names[op->mix], t, 1e-9 * bytes / t, "GB/s", median(share, bench.rounds));
    }
    arrays_free(&a);
    model_free(&model, false);
}

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

// The lower bound of a step in seconds: products alone, attention at 80% of the peak, others at their bandwidth.
static double step_bound(const Shape *s, real *const *x, double part[3]) {
    Linear linears[LINEARS];
    linears_of(s, linears);
    double attention = s->L * (attention_forward_flops(s->attention) + attention_backward_flops(s->attention));
    part[0] = part[2] = 0;
    part[1] = attention / (0.8e9 * matmul_peak_gflops());
    for (int l = 0; l < LINEARS; l++)
        for (int p = 0; p < PRODUCTS; p++) {
            double start = now_seconds();
            run_product((Product)p, &linears[l], s->N, x);
            part[0] += linears[l].calls * (now_seconds() - start);
        }
    double bandwidth[MIXES];
    for (int m = 0; m < MIXES; m++) bandwidth[m] = probe_bandwidth((Mix)m, PROBE_COUNT);
    for (int i = 0; i < MEMORY_OPERATIONS; i++) {
        const MemoryOperation *op = &memory_operations[i];
        part[2] += op->calls(s) * op->run(s, NULL) * sizeof(real) / bandwidth[op->mix];
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
        Shape s = shape_of(&b.model, c->B, c->T);
        Arrays a = arrays_alloc(max_size((size_t)s.N * (size_t)s.V, (size_t)s.V * (size_t)s.C) +
                                (size_t)s.N * (size_t)s.C * 8);
        double step[64], bound[64], share[64], part[3][64], bound_part[3][64], parts[3];
        double first = bench_step(&b, parts);
        step_bound(&s, a.x, parts); // the library prepares for the shapes
        for (int r = 0; r < bench.rounds; r++) {
            step[r] = bench_step(&b, parts);
            for (int p = 0; p < 3; p++) part[p][r] = parts[p];
            bound[r] = step_bound(&s, a.x, parts);
            for (int p = 0; p < 3; p++) bound_part[p][r] = parts[p];
            double after = bench_step(&b, parts);
            share[r] = bound[r] / (0.5 * (step[r] + after));
        }
        double t = median(step, bench.rounds);
        printf("  %-32s %10.1f (%7.1f %8.1f %7.1f)  %5.2fx %9.0f  %8.1f (%7.1f %7.1f %6.1f)  %5.0f%%\n", name, 1e3 * t,
               1e3 * median(part[0], bench.rounds), 1e3 * median(part[1], bench.rounds),
               1e3 * median(part[2], bench.rounds), first / t, s.N / t, 1e3 * median(bound, bench.rounds),
               1e3 * median(bound_part[0], bench.rounds), 1e3 * median(bound_part[1], bench.rounds),
               1e3 * median(bound_part[2], bench.rounds), 100 * median(share, bench.rounds));
        fflush(stdout);
        arrays_free(&a);
        bench_close(&b);
    }
}

static void table_threads(void) {
    if (bench.threads == 1) return;
    printf("\nthreads                          ms with 1     with %d     ratio   GEMM peak\n", bench.threads);
    for (size_t i = 0; i < sizeof(step_cases) / sizeof(step_cases[0]); i++) {
        const StepCase *c = &step_cases[i];
        char name[64];
        FORMAT(name, "%s %s %d x %d", c->preset, c->attention, c->B, c->T);
        if (!wanted(name) && !wanted("threads")) continue;
        BenchModel b;
        bench_open(&b, c->preset, c->attention, 0, c->B, c->T, FOR_TRAINING);
        double seconds[2][64], ratio[64], peak[64];
        for (int r = -1; r < bench.rounds; r++) {
            double gflops[2];
            for (int all = 0; all < 2; all++) {
                omp_set_num_threads(all ? bench.threads : 1);
                gflops[all] = matmul_peak_gflops();
                double t = bench_step(&b, NULL);
                if (r >= 0) seconds[all][r] = t;
            }
            if (r >= 0) ratio[r] = seconds[0][r] / seconds[1][r], peak[r] = gflops[1] / gflops[0];
        }
        printf("  %-28s %10.1f %10.1f %8.2fx %8.2fx\n", name, 1e3 * median(seconds[0], bench.rounds),
               1e3 * median(seconds[1], bench.rounds), median(ratio, bench.rounds), median(peak, bench.rounds));
        fflush(stdout);
        bench_close(&b);
    }
}

// A shard of random tokens of GPT-2's vocabulary.
static void write_shard(const char *path, int32_t count, uint64_t key) {
    int32_t header[SHARD_HEADER_BYTES / 4] = {SHARD_MAGIC_U16, SHARD_VERSION_U16, count};
    uint16_t *tokens = (uint16_t *)checked_calloc((size_t)count, sizeof(uint16_t));
    for (int32_t i = 0; i < count; i++) tokens[i] = (uint16_t)(random_bits(key, (uint64_t)i) % 50257);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(header, sizeof(header), 1, f) == 1 &&
              fwrite(tokens, sizeof(uint16_t), (size_t)count, f) == (size_t)count && fclose(f) == 0,
          "cannot write %s: %s", path, strerror(errno));
    free(tokens);
}

// ---------------------------------------------------------------------------------------------------
// Memory

// Peak resident bytes of build/train_diffv2 with these arguments; stdout goes to `out`.
static double trainer_peak(char *const *arguments, FILE *out) {
    fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0, "cannot start a process: %s", strerror(errno));
    if (pid == 0) {
        dup2(fileno(out), 1);
        execv(arguments[0], arguments);
        _exit(127);
    }
    int status;
    struct rusage usage;
    CHECK(wait4(pid, &status, 0, &usage) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "%s failed (see above): build it with make", arguments[0]);
    return 1024.0 * (double)usage.ru_maxrss;
}

static double dry_run_total(FILE *out) {
    char line[512];
    double total = 0, mib;
    bool memory = false;
    rewind(out);
    while (fgets(line, sizeof(line), out)) {
        if (strstr(line, "memory of this process")) memory = true;
        if (memory && total == 0 && sscanf(line, " total %lf MiB", &mib) == 1) total = mib * 1048576;
    }
    return total;
}

static void table_memory(void) {
    if (!wanted("memory")) return;
    printf("\nmemory                         peak of the process     --dry-run\n");
    const char *shard = "build/bench_tokens.bin";
    write_shard(shard, 100000, 0);
    for (size_t i = 0; i < sizeof(step_cases) / sizeof(step_cases[0]); i++) {
        const StepCase *c = &step_cases[i];
        char B[16], T[16], threads[16], program[] = "build/train_diffv2";
        FORMAT(B, "%d", c->B);
        FORMAT(T, "%d", c->T);
        FORMAT(threads, "%d", bench.threads);
        const char *train[] = {program, "--preset",  c->preset, "--attention", c->attention, "--batch-size",
                               B,       "--seq-len", T,         "--threads",   threads,      "--train-data",
                               shard,   "--steps",   "2",       NULL,          NULL};
        FILE *out = tmpfile();
        CHECK(out, "cannot make a temporary file: %s", strerror(errno));
        double peak = trainer_peak((char *const *)(uintptr_t)train, out);
        train[15] = "--dry-run";
        rewind(out);
        CHECK(ftruncate(fileno(out), 0) == 0, "cannot empty a temporary file: %s", strerror(errno));
        trainer_peak((char *const *)(uintptr_t)train, out);
        double planned = dry_run_total(out);
        printf("  %-8s %-8s %d x %-6d %10.1f MiB %12.1f MiB   %+.1f%%\n", c->preset, c->attention, c->B, c->T,
               peak / 1048576, planned / 1048576, 100 * (peak / planned - 1));
        fclose(out);
    }
    remove(shard);
}

// ---------------------------------------------------------------------------------------------------
// Data loader

enum { LOADER_SHARDS = 4, LOADER_TOKENS = 8 << 20, LOADER_SEPARATOR = 700 };

// Seconds for `count` tokens in batches of B windows, requested without a pause.
static double loader_seconds(const char *text, int B, int T, bool documents, int count) {
    DataLoader l;
    int *batch = (int *)checked_calloc(3 * (size_t)B * (size_t)T, sizeof(int)),
        *starts = documents ? batch + 2 * B * T : NULL;
    dataloader_open(&l, text, B, T, 50257, 0, 1, 1, true);
    l.documents = documents;
    for (int i = 0; i < l.corpus_count; i++) l.corpora[i].separator.token = LOADER_SEPARATOR;
    double start = now_seconds();
    dataloader_start(&l, 0);
    for (int done = 0; done < count; done += B * T) dataloader_next(&l, batch, batch + B * T, starts);
    double seconds = now_seconds() - start;
    dataloader_close(&l);
    free(batch);
    return seconds;
}

static void table_loader(void) {
    static const struct {
        const char *name;
        int B, T;
        bool mixed, documents;
    } cases[] = {
        {"one corpus", 8, 256, false, false},
        {"one corpus", 4, 1024, false, false},
        {"two corpora", 8, 256, true, false},
        {"two corpora, --doc-mask", 8, 256, true, true},
        {"two corpora, --doc-mask", 4, 1024, true, true},
    };
    enum { COUNT = 8 << 20 };
    if (!wanted("loader")) return;
    char directory[300], path[400], mixed[900];
    const char *tmp = getenv("TMPDIR");
    FORMAT(directory, "%s/diffv2_bench_XXXXXX", tmp && *tmp ? tmp : "/tmp");
    CHECK(mkdtemp(directory) != NULL, "cannot make a temporary directory %s: %s", directory, strerror(errno));
    for (int i = 0; i < LOADER_SHARDS; i++) {
        FORMAT(path, "%s/%c_%d.bin", directory, i % 2 ? 'b' : 'a', i);
        write_shard(path, LOADER_TOKENS, (uint64_t)i);
    }
    FORMAT(path, "%s/*.bin", directory);
    FORMAT(mixed, "a=%s/a_*.bin:0.7 b=%s/b_*.bin:0.3", directory, directory);
    printf("\nloader                              B     T   Mtokens/s  ns/token\n");
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        double seconds[64];
        for (int r = 0; r < bench.rounds; r++)
            seconds[r] =
                loader_seconds(cases[c].mixed ? mixed : path, cases[c].B, cases[c].T, cases[c].documents, COUNT);
        double each = median(seconds, bench.rounds) / COUNT;
        printf("  %-30s %5d %5d %11.1f %9.2f\n", cases[c].name, cases[c].B, cases[c].T, 1e-6 / each, 1e9 * each);
    }
    for (int i = 0; i < LOADER_SHARDS; i++) {
        FORMAT(path, "%s/%c_%d.bin", directory, i % 2 ? 'b' : 'a', i);
        unlink(path);
    }
    rmdir(directory);
}

int main(int argc, char **argv) {
    environment_reexecute(argv);
    bench.threads = omp_get_num_procs();
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        int number = atoi(value);
        if (strcmp(argv[i], "--filter") == 0 && value[0]) bench.filter = value;
        else if (strcmp(argv[i], "--rounds") == 0 && number > 0 && number <= 64) bench.rounds = number;
        else if (strcmp(argv[i], "--threads") == 0 && number > 0) bench.threads = number;
        else if (strcmp(argv[i], "--turns") == 0 && value[0]) bench.turns = value;
        else {
            warn("%s %s: usage: build/bench [--filter WORD] [--rounds 1..64] [--threads N] [--turns CASE]", argv[i],
                 value);
            return EXIT_USAGE;
        }
    }
    omp_set_num_threads(bench.threads);
    if (bench.turns) {
        char preset[32], attention[32];
        int NKV, B, T;
        CHECK(sscanf(bench.turns, "%31[^,],%31[^,],%d,%d,%d", preset, attention, &NKV, &B, &T) == 5 && B > 0 && T > 0,
              "--turns %s: expected PRESET,ATTENTION,KV_HEADS (0: the preset's),B,T", bench.turns);
        bench_turns(preset, attention, NKV, B, T);
        return 0;
    }
    for (int i = 0; i < 3; i++) bench.probe[i] = (float *)buffer_alloc(PROBE_COUNT * sizeof(float), "the benchmark");
    bench.tokens = (int *)checked_calloc(1 << 16, sizeof(int));
    for (int i = 0; i < 1 << 16; i++) bench.tokens[i] = (int)(random_bits(3, (uint64_t)i) % 50257);
    printf("%d threads, %s, revision %s; medians of %d\n", bench.threads, matmul_library(), source_revision(),
           bench.rounds);
    table_peaks();
    table_operations();
    table_steps();
    table_threads();
    table_loader();
    for (int i = 0; i < 3; i++) buffer_free(bench.probe[i]);
    table_memory();
    return 0;
}
