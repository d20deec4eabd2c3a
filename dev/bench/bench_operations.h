/*
bench_operations.h: peaks of the machine and the time of each operation on a CPU (bench.c). Include after bench_model.h.
*/
#pragma once
#include "bench_operation.h"

typedef enum { READ, WRITE, COPY, ADD, UPDATE, MIXES } Mix; // 1 in; 1 out; 1 in 1 out; 2 in 1 out; 1 changed in place
static const char *const mix_names[MIXES] = {"read", "write", "copy", "add", "update"};

enum { PROBE_COUNT = 32 << 20 }; // elements of a probe array: 128 MiB, beyond any cache
static struct {
    const char *filter;
    int rounds, threads;
    float *probe[3];
    float sink; // keeps reads from being optimized away
    // of bench_decode.h
    const char *preset;
    int batch, longest; // batch 0: 1 and 8
    double memory, seconds;
} bench = {"", 7, 0, {NULL}, 0, "small", 0, 65536, 4.0 * (1 << 30), 20};

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

// ---------------------------------------------------------------------------------------------------
// Operations of a training step

static real *operation_array(size_t count) {
    real *x = (real *)buffer_alloc(max_size(count, 2) * sizeof(real), "the benchmark");
#pragma omp parallel for schedule(static)
    for (size_t e = 0; e < count; e++) x[e] = (real)((e * 2654435761u >> 8) % 1000) / 1000 + (real)0.001;
    return x;
}
// The mix of streams with which its bandwidth is compared, by the bytes that it writes.
static Mix mix_of(const BenchOperation *o) {
    const OpCase *c = &o->c;
    double out = 0;
    for (int i = 0; i < OP_TENSORS; i++) {
        const OpTensor *t = o->backward ? &c->dx[i] : &c->y[i];
        for (int v = 0; v < t->views; v++) out += (double)op_size(&t->view[v]) * sizeof(real);
    }
    double in = (double)o->cost.bytes - out;
    if (c->in_place || c->dloss != 0 || in < out / 2) return UPDATE;
    return out < in / 100 ? READ : in > 1.4 * out ? ADD : COPY;
}
static void operation_alloc(BenchOperation *o) {
    OpCase *c = &o->c;
    o->dy = operation_array(o->backward ? c->y->count : 0);
    for (int i = 0; i < OP_TENSORS; i++) {
        c->x[i].data = operation_array(i < c->in_place ? 0 : c->x[i].count);
        c->dx[i].data = operation_array(o->backward && c->dx[i].views ? c->dx[i].count : 0);
        c->y[i].data = operation_array(c->y[i].count);
    }
    c->dy = o->dy;
    ops_init(max_size(o->cost.workspace, 1));
    if (c->kind == OP_ATTENTION) op_call(c, false); // whose output the backward reads
}
static void operation_close(BenchOperation *o) {
    for (int i = 0; i < OP_TENSORS; i++)
        buffer_free(o->c.x[i].data), buffer_free(o->c.dx[i].data), buffer_free(o->c.y[i].data);
    buffer_free(o->dy);
    free(o->index);
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

static void measure_operation(const OpSize *size, bool backward) {
    BenchOperation o;
    operation_describe(&o, size, backward);
    if (o.measured && wanted_operation(o.name)) {
        operation_alloc(&o);
        bool flops = o.cost.flops > 0;
        Mix mix = mix_of(&o);
        Rounds m = {flops ? o.cost.flops : (double)o.cost.bytes, {0}, {0}, 0};
        while (m.rounds < bench.rounds) {
            double peak = flops ? 1e9 * matmul_peak_gflops() : probe_bandwidth(mix, PROBE_COUNT), start = now_seconds();
            op_call(&o.c, backward);
            add_round(&m, peak, start);
        }
        print_operation(&m, o.name, *size->what ? size->what : mix_names[mix], flops ? "GFLOP/s" : "GB/s");
    }
    operation_close(&o);
}

static void table_operations(void) {
    enum { ROWS = 16384 };
    printf("\noperations: 124m, diff_v2; products with 1024 rows, others with %d (larger than the cache)\n", (int)ROWS);
    Model model;
    plan_model(&model, "124m", "diff_v2", 0, 1, 1024, FOR_TRAINING);
    OpModel few = op_model_of(&model, 1, 1024), many = op_model_of(&model, ROWS / 1024, 1024);
    few.logit_rows = many.logit_rows = 1024; // a piece of the logits
    OpSize small[OP_SIZES], large[OP_SIZES];
    int count = op_sizes(small, &few);
    many.update_rows = min_int(many.update_rows, many.V);
    op_sizes(large, &many);
    for (int product = 1; product >= 0; product--)
        for (int i = 0; i < 2 * count; i++)
            if (product == (small[i / 2].kind == OP_MATMUL))
                measure_operation(product ? &small[i / 2] : &large[i / 2], i % 2);
    static const int lengths[][2] = {{4, 64}, {4, 256}, {1, 1024}};
    for (int i = 0; i < 6; i++) {
        int B = lengths[i / 2][0], T = lengths[i / 2][1];
        char what[64];
        FORMAT(what, "%d x %d, %d on %d", B, T, few.NQ, few.NKV);
        const OpSize size = attention_size(&model, what, B, T);
        measure_operation(&size, i % 2);
    }
    model_free(&model, false);
}
