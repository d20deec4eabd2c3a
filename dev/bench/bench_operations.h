/*
bench_operations.h: peaks of the machine and the time of each operation on a CPU (bench.c). Include after bench_model.h.
*/
#ifndef DEV_BENCH_OPERATIONS_H
#define DEV_BENCH_OPERATIONS_H

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
    // of bench_decode.h
    const char *preset;
    int batch, longest; // batch 0: 1 and 8
    double memory, seconds;
} bench = {"", 7, 0, NULL, {NULL}, NULL, 0, "small", 0, 65536, 4.0 * (1 << 30), 20};

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
               key_set(&model->plan, 0, 0, B, T, 0).shape};
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
    if (x) rmsnorm_forward(x[0], x[3], x[1], x[2], s->N, s->C, (real)1e-5, NULL);
    return 2.0 * s->N * s->C;
}
static double op_rmsnorm_b(const Shape *s, real *const *x) {
    if (x) rmsnorm_backward(x[0], x[4], x[1], x[2], x[3], x[5], s->N, s->C, true, NULL);
    return 4.0 * s->N * s->C;
}
static double op_rope(const Shape *s, real *const *x) {
    if (x) rope_forward(x[0], x[1], s->B, s->T, s->rope_heads, s->QD, s->ld, NULL);
    return 2.0 * s->N * s->rope_heads * s->QD;
}
static const HeadGroups bench_pairs = {1, 1};
static double op_combine(const Shape *s, real *const *x) {
    if (x) diff_combine_forward(x[0], x[1], x[2], s->N, s->NH, s->D, s->ld, bench_pairs, S_SIGMOID, NULL);
    return 3.0 * s->N * s->NH * s->D;
}
static double op_combine_b(const Shape *s, real *const *x) {
    if (x) diff_combine_backward(x[0], x[1], x[2], x[3], x[4], s->N, s->NH, s->D, s->ld, bench_pairs, S_SIGMOID);
    return 4.0 * s->N * s->NH * s->D;
}
static double op_fused_norm(const Shape *s, real *const *x) {
    if (x) residual_rmsnorm_forward(x[0], x[3], x[5], x[1], x[2], x[4], s->N, s->C, (real)1e-5, NULL);
    return 4.0 * s->N * s->C;
}
static double op_swiglu(const Shape *s, real *const *x) {
    if (x) swiglu_forward(x[0], x[1], s->N, s->F, NULL);
    return 3.0 * s->N * s->F;
}
static double op_swiglu_b(const Shape *s, real *const *x) {
    if (x) swiglu_backward(x[0], x[1], x[2], s->N, s->F, NULL);
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
    {"residual and rmsnorm",    ADD,     twice_per_layer, op_fused_norm},
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
} LinearCase;
enum { LINEARS = 5 };
static void linears_of(const Shape *s, LinearCase *l) {
    const LinearCase all[LINEARS] = {{"q,k,v,lambda", s->C, s->fused_rows, s->L},
                                     {"o_proj", s->NH * s->D, s->C, s->L},
                                     {"gate,up", s->C, 2 * s->F, s->L},
                                     {"down", s->F, s->C, s->L},
                                     {"head", s->C, s->V, 1}};
    memcpy(l, all, sizeof(all));
}

typedef enum { FORWARD, BACKWARD_X, BACKWARD_W, PRODUCTS } Product;
static void run_product(Product p, const LinearCase *l, int N, real *const *x) {
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

// Rounds of one operation: `amount` FLOPs or bytes, seconds, and the peak that was measured just before each.
typedef struct {
    double amount, seconds[64], share[64];
    int rounds;
} Rounds;

static void add_round(Rounds *m, double peak, double start) {
    double seconds = now_seconds() - start;
    m->share[m->rounds] = m->amount / seconds / peak;
    m->seconds[m->rounds++] = seconds;
}

static void print_operation(Rounds *m, const char *name, const char *shape, const char *unit) {
    double t = median(m->seconds, m->rounds);
    printf("  %-24s %-20s %9.3f ms %8.1f %-7s %4.0f%%\n", name, shape, 1e3 * t, 1e-9 * m->amount / t, unit,
           100 * median(m->share, m->rounds));
    fflush(stdout);
}

static bool wanted_operation(const char *name) { return wanted(name) || wanted("operations"); }

static void measure_products(const Shape *s, real *const *x) {
    static const char *const names[PRODUCTS] = {"y = x W^T", "dx = dy W", "dW += dy^T x"};
    LinearCase linears[LINEARS];
    linears_of(s, linears);
    for (int l = 0; l < LINEARS; l++)
        for (int p = 0; p < PRODUCTS; p++) {
            char name[64];
            FORMAT(name, "matmul %s", linears[l].name);
            if (!wanted_operation(name)) continue;
            Rounds m = {2.0 * s->N * linears[l].IC * linears[l].OC, {0}, {0}, 0};
            while (m.rounds < bench.rounds) {
                double peak = 1e9 * matmul_peak_gflops(), start = now_seconds();
                run_product((Product)p, &linears[l], s->N, x);
                add_round(&m, peak, start);
            }
            print_operation(&m, name, names[p], "GFLOP/s");
        }
}

static void measure_attention(const Model *model, int B, int T, bool backward, real *const *x) {
    AttentionShape s = shape_of(model, B, T).attention;
    char shape[64];
    const char *name = backward ? "attention backward" : "attention";
    if (!wanted_operation(name)) return;
    FORMAT(shape, "%d x %d, %d on %d", B, T, s.NQ, s.NKV);
    ops_init(attention_workspace_bytes(s, bench.threads));
    size_t k = (size_t)(s.NQ * s.D), v = k + (size_t)(s.NKV * s.D);
    Rounds m = {backward ? attention_backward_flops(s) : attention_forward_flops(s), {0}, {0}, 0};
    while (m.rounds < bench.rounds) {
        attention_forward(x[1], x[2], x[0], x[0] + k, x[0] + v, s);
        double peak = 1e9 * matmul_peak_gflops(), start = now_seconds();
        if (backward)
            attention_backward(x[3], x[3] + k, x[3] + v, x[4], x[1], x[2], x[0], x[0] + k, x[0] + v, s, false);
        else attention_forward(x[1], x[2], x[0], x[0] + k, x[0] + v, s);
        add_round(&m, peak, start);
    }
    print_operation(&m, name, shape, "GFLOP/s");
}

static void measure_memory_operation(const MemoryOperation *op, const Shape *s, real *const *x) {
    if (!wanted_operation(op->name)) return;
    Rounds m = {op->run(s, x) * sizeof(real), {0}, {0}, 0};
    while (m.rounds < bench.rounds) {
        double peak = probe_bandwidth(op->mix, PROBE_COUNT), start = now_seconds();
        op->run(s, x);
        add_round(&m, peak, start);
    }
    print_operation(&m, op->name, mix_names[op->mix], "GB/s");
}

static void table_operations(void) {
    enum { ROWS = 16384 };
    printf("\noperations: 124m, diff_v2; products with 1024 rows, others with %d (larger than the cache)\n", (int)ROWS);
    Model model;
    plan_model(&model, "124m", "diff_v2", 0, 1, 1024, FOR_TRAINING);
    Shape s = shape_of(&model, 1, 1024), large = shape_of(&model, 16, 1024);
    ops_init(model.plan.workspace_bytes);
    Arrays a = arrays_alloc((size_t)ROWS * (size_t)large.F * 2 + (size_t)large.V * (size_t)large.C);
    measure_products(&s, a.x);
    static const int lengths[][2] = {{4, 64}, {4, 256}, {1, 1024}};
    for (int i = 0; i < 6; i++) measure_attention(&model, lengths[i / 2][0], lengths[i / 2][1], i % 2, a.x);
    s.parameters = large.parameters = min_size(large.parameters, (size_t)large.V * (size_t)large.C);
    for (int i = 0; i < MEMORY_OPERATIONS; i++) {
        const MemoryOperation *op = &memory_operations[i];
        measure_memory_operation(op, op->run == op_entropy ? &s : &large, a.x); // a piece of the logits
    }
    arrays_free(&a);
    model_free(&model, false);
}
#endif
