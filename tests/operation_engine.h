/*
operation_engine.h: every CPU operation against a naive definition in double and against finite differences.

A kind (OpKind) says how to run an operation and computes a naive reference of its forward, in double;
a table has its shapes. op_check does the rest, the same for all:

  memory    every buffer has guard zones. Gaps (row padding, a neighbour's columns) are NaN in inputs and
            a sentinel in outputs; outputs are NaN where the contract says "=", and hold something to be
            added to where it says "+=". Inputs keep their bits.
  repeats   runs with 2, 2, 1 and 3 threads give the same bits (matmul: the first two)
  forward   the output against the reference
  backward  <dx, u> against (f(x + h u) - f(x - h u)) / 2h, f(x) = sum(dy * reference(x)), for u a single
            element (a sample of each tensor) and for u of random signs (all of the tensor at once). The
            differences are those of the reference, in double, so that both builds are checked alike.
  errors    per tensor and relative to its norm: 8 epsilon sqrt(length of the longest sum); for a
            backward 1e-8 more, for the differences themselves (h^2 + epsilon_double / h, h = 2e-5)

Include after llmc/ops/all_ops.h. Compile once as it is and once with -DREAL=double.
*/
#ifndef TESTS_OPERATION_ENGINE_H
#define TESTS_OPERATION_ENGINE_H
#include "harness.h"

enum {
    OP_DIMS = 8,
    OP_VIEWS = 3,
    OP_ROWS = 160, // tokens or targets of a case, positions of a rope table
    OP_SAMPLES = 16,
    OP_DIRECTIONS = 2,
    OP_THREADS = 3,
    OP_BUFFERS = 32,
    OP_GUARD = 128, // bytes
    OP_GUARD_BYTE = 0xA5
};
#define OP_SENTINEL ((real)-12345)
static const double op_epsilon = sizeof(real) == 4 ? 0x1p-23 : 0x1p-52;

// Memory between guard zones, all of it the guard's byte at first. op_free looks at the guards and frees all.
static struct {
    unsigned char *memory;
    size_t bytes;
} op_buffers[OP_BUFFERS];
static int op_buffer_count;

static void *op_alloc_bytes(size_t bytes) {
    assert(op_buffer_count < OP_BUFFERS);
    unsigned char *p = (unsigned char *)checked_calloc(bytes + 2 * OP_GUARD, 1);
    memset(p, OP_GUARD_BYTE, bytes + 2 * OP_GUARD);
    op_buffers[op_buffer_count].memory = p;
    op_buffers[op_buffer_count++].bytes = bytes;
    return p + OP_GUARD;
}
static void op_free(const char *what) {
    for (int b = 0; b < op_buffer_count; b++) {
        const unsigned char *p = op_buffers[b].memory;
        int written = 0;
        for (size_t i = 0; i < OP_GUARD; i++)
            written += (p[i] != OP_GUARD_BYTE) + (p[OP_GUARD + op_buffers[b].bytes + i] != OP_GUARD_BYTE);
        EXPECT(written == 0, "%s: %d bytes were written outside of buffer %d", what, written, b);
        free(op_buffers[b].memory);
    }
    op_buffer_count = 0;
}
static real *op_alloc(size_t count) { return (real *)op_alloc_bytes(count * sizeof(real)); }
static real *op_alloc_random(TestRandom *random, size_t count, double scale) {
    real *p = op_alloc(count);
    for (size_t i = 0; i < count; i++) p[i] = (real)(scale * test_random_real(random));
    return p;
}
static real *op_alloc_copy(const real *x, size_t count) {
    return (real *)memcpy(op_alloc(count), x, count * sizeof(real));
}
static bool op_same(const real *a, const real *b, size_t count) { return memcmp(a, b, count * sizeof(real)) == 0; }
static int op_not_finite(const real *x, size_t count) {
    int n = 0;
    for (size_t i = 0; i < count; i++) n += !isfinite((double)x[i]);
    return n;
}

// One tensor within a buffer: element (row, head, i) is at offset + row*ld + head*stride + i.
typedef struct {
    const char *name;
    size_t offset;
    int rows, heads, width, ld, stride;
} OpView;

typedef struct {
    OpView view[OP_VIEWS];
    int views; // 0: there is no such buffer
    size_t count;
    real *data;
    double *ref; // inputs: a copy in double; outputs: what the reference computes
    bool adds;   // an output that is added to
} OpBuffer;

typedef struct OpCase OpCase;
typedef struct {
    const char *name, *dims;
    void (*setup)(OpCase *); // from the dimensions: views and what else is not zero
    void (*forward)(OpCase *), (*backward)(OpCase *), (*reference)(OpCase *);
} OpKind;
struct OpCase {
    const OpKind *kind;
    char what[200];             // name and dimensions, for messages
    const int *d;               // dimensions: a row of the kind's table
    OpBuffer x[2], dx[2], y[2]; // inputs; their gradients; the output and what the backward needs besides
    const real *dy;
    double scale;  // inputs are uniform in (-scale, scale)
    double length; // of the longest sum
    double dloss;  // not 0: all elements of dy; the gradient overwrites its operand and clears the padding
    bool threads_change_sums;
    int index[OP_ROWS], index_limit; // tokens or targets, random below the limit
    real *table;                     // of rope
    AttentionShape s;
};

static size_t op_size(const OpView *v) { return (size_t)v->rows * (size_t)v->heads * (size_t)v->width; }
static size_t op_at(const OpView *v, size_t i) {
    size_t width = (size_t)v->width, heads = (size_t)v->heads;
    return v->offset + i / width / heads * (size_t)v->ld + i / width % heads * (size_t)v->stride + i % width;
}
static void op_view(OpBuffer *b, const char *name, size_t offset, int rows, int heads, int width, int ld, int stride) {
    OpView v = {name, offset, rows, heads, width, ld, stride};
    assert(b->views < OP_VIEWS);
    b->view[b->views++] = v;
    b->count = (size_t)rows * (size_t)ld;
}
static void op_rows(OpBuffer *b, const char *name, int rows, int width, int ld) {
    op_view(b, name, 0, rows, 1, width, ld, width);
}
static real op_start(size_t i) { return (real)((double)(i * 37 % 64) / 16 - 2); } // what "+=" adds to
static double op_got(const OpBuffer *b, const OpView *v, size_t i) {
    return (double)b->data[op_at(v, i)] - (b->adds ? (double)op_start(i) : 0);
}

// Runs into the same outputs again and again: the same bits each time, all finite, gaps as they should be.
static void op_repeat(OpCase *c, void (*run)(OpCase *), OpBuffer *out, int outs, real gap) {
    static const int threads[] = {2, 2, 1, OP_THREADS};
    int before = omp_get_max_threads();
    real *first[2] = {NULL, NULL};
    for (int r = 0; r < (c->threads_change_sums ? 2 : 4); r++) {
        for (OpBuffer *b = out; b < out + outs; b++) {
            for (size_t i = 0; i < b->count; i++) b->data[i] = OP_SENTINEL;
            for (OpView *v = b->view; v < b->view + b->views; v++)
                for (size_t i = 0; i < op_size(v); i++) b->data[op_at(v, i)] = b->adds ? op_start(i) : (real)NAN;
        }
        omp_set_num_threads(threads[r]);
        run(c);
        for (int o = 0; o < outs; o++) {
            if (r == 0) first[o] = op_alloc_copy(out[o].data, out[o].count);
            EXPECT(op_same(first[o], out[o].data, out[o].count), "%s: %s differs between run 1 and run %d (%d threads)",
                   c->what, out[o].view->name, r + 1, threads[r]);
        }
    }
    omp_set_num_threads(before);
    for (int o = 0; o < outs; o++) {
        int bad = op_not_finite(first[o], out[o].count), written = 0;
        EXPECT(bad == 0, "%s: %d elements of %s are NaN or infinite", c->what, bad, out[o].view->name);
        for (OpView *v = out[o].view; v < out[o].view + out[o].views; v++)
            for (size_t i = 0; i < op_size(v); i++) first[o][op_at(v, i)] = gap;
        for (size_t i = 0; i < out[o].count; i++) written += first[o][i] != gap;
        EXPECT(written == 0, "%s: %d elements between the rows or heads of %s are not %g", c->what, written,
               out[o].view->name, (double)gap);
    }
}

static void op_compare(const OpCase *c, const OpBuffer *b) {
    double tolerance = 8 * op_epsilon * sqrt(c->length), error = 0, norm = 0;
    for (size_t i = 0; i < op_size(b->view); i++) {
        double want = b->ref[op_at(b->view, i)], difference = op_got(b, b->view, i) - want;
        error += difference * difference;
        norm += want * want + (b->adds ? 1 : 0);
    }
    EXPECT(sqrt(error) <= tolerance * sqrt(norm), "%s: %s is off by %.3g of its norm, tolerance %.3g", c->what,
           b->view->name, sqrt(error / norm), tolerance);
}

// The slope of sum(dy * y) along element `i` of a view, or along random signs of all its elements when seed != 0.
static double op_slope(OpCase *c, OpBuffer *x, const OpView *v, size_t i, uint64_t seed) {
    double h = 2e-5 * fmin(c->scale, 1), slope = 0, *up = (double *)checked_calloc(c->y->count, sizeof(double));
    for (int side = 1; side >= -1; side -= 2) {
        TestRandom signs = {seed};
        for (size_t j = seed ? 0 : i; j < (seed ? op_size(v) : i + 1); j++) {
            double u = seed && (test_random_bits(&signs) & 1) ? -1 : 1;
            x->ref[op_at(v, j)] = (double)x->data[op_at(v, j)] + side * h * u;
        }
        c->kind->reference(c);
        if (side == 1) memcpy(up, c->y->ref, c->y->count * sizeof(double));
    }
    for (size_t j = 0; j < op_size(c->y->view); j++) { // outputs that did not change cancel exactly
        size_t at = op_at(c->y->view, j);
        slope += (double)c->dy[at] * (up[at] - c->y->ref[at]) / (2 * h);
    }
    for (size_t j = 0; j < op_size(v); j++) x->ref[op_at(v, j)] = (double)x->data[op_at(v, j)];
    free(up);
    return slope;
}

static void op_check_gradient(OpCase *c, OpBuffer *x, const OpBuffer *dx, const OpView *v) {
    size_t size = op_size(v), samples = min_size(size, OP_SAMPLES);
    double tolerance = 8 * op_epsilon * sqrt(c->length) + 1e-8, norm = 0, error = 0;
    for (size_t i = 0; i < size; i++) norm += op_got(dx, v, i) * op_got(dx, v, i) / (double)size;
    // a gradient that vanishes (attention to a single key) is a difference of numbers as large as dy's
    norm = fmax(sqrt(norm), 0.1 * (c->dloss != 0 ? c->dloss : 0.5));
    TestRandom random = {(uint64_t)size};
    for (size_t k = 0; k < samples; k++) {
        size_t i = size <= OP_SAMPLES ? k : (size_t)test_random_bits(&random) % size;
        double difference = op_got(dx, v, i) - op_slope(c, x, v, i, 0);
        error += difference * difference / (double)samples;
    }
    EXPECT(sqrt(error) <= tolerance * norm, "%s: %s is off by %.3g of its norm in single elements, tolerance %.3g",
           c->what, v->name, sqrt(error) / norm, tolerance);
    for (uint64_t seed = 1; seed <= OP_DIRECTIONS; seed++) {
        double got = 0, want = op_slope(c, x, v, 0, seed);
        TestRandom signs = {seed};
        for (size_t i = 0; i < size; i++) got += (test_random_bits(&signs) & 1 ? -1 : 1) * op_got(dx, v, i);
        error = fabs(got - want) / sqrt((double)size);
        EXPECT(error <= 4 * tolerance * norm, "%s: %s is off by %.3g of its norm along random signs, tolerance %.3g",
               c->what, v->name, error / norm, 4 * tolerance);
    }
}

static void op_check(const OpKind *kind, const int *d) {
    OpCase c;
    memset(&c, 0, sizeof(c));
    c.kind = kind;
    c.d = d;
    c.scale = c.length = 1;
    FORMAT(c.what, "%s (%s) = (%d %d %d %d %d %d %d %d)", kind->name, kind->dims, d[0], d[1], d[2], d[3], d[4], d[5],
           d[6], d[7]);
    kind->setup(&c);
    TestRandom random = {20260101};
    assert(c.index_limit == 0 || d[0] <= OP_ROWS);
    for (int n = 0; n < OP_ROWS && c.index_limit > 0; n++) c.index[n] = test_random_int(&random, c.index_limit);
    real *before[2];
    int inputs = c.x[1].views ? 2 : 1, outputs = c.y[1].views ? 2 : 1;
    for (int b = 0; b < inputs; b++) {
        OpBuffer *x = &c.x[b];
        bool adds = c.dx[b].adds;
        x->data = op_alloc(x->count);
        x->ref = (double *)op_alloc_bytes(x->count * sizeof(double));
        for (size_t i = 0; i < x->count; i++) x->data[i] = (real)NAN;
        for (OpView *v = x->view; v < x->view + x->views; v++)
            for (size_t i = 0; i < op_size(v); i++) x->data[op_at(v, i)] = (real)(c.scale * test_random_real(&random));
        for (size_t i = 0; i < x->count; i++) x->ref[i] = (double)x->data[i];
        before[b] = op_alloc_copy(x->data, x->count);
        c.dx[b] = *x;
        c.dx[b].adds = adds;
        c.dx[b].data = op_alloc(x->count);
    }
    for (int o = 0; o < outputs; o++) {
        c.y[o].data = op_alloc(c.y[o].count);
        c.y[o].ref = (double *)op_alloc_bytes(c.y[o].count * sizeof(double));
    }
    op_repeat(&c, kind->forward, c.y, outputs, OP_SENTINEL);
    kind->reference(&c);
    for (int o = 0; o < outputs; o++) op_compare(&c, &c.y[o]);
    if (kind->backward) {
        real *dy = op_alloc(c.y->count);
        for (size_t i = 0; i < c.y->count; i++) dy[i] = (real)NAN;
        for (size_t i = 0; i < op_size(c.y->view); i++)
            dy[op_at(c.y->view, i)] = (real)(c.dloss != 0 ? c.dloss : test_random_real(&random));
        c.dy = dy;
        op_repeat(&c, kind->backward, c.dx, inputs, c.dloss != 0 ? 0 : OP_SENTINEL);
        for (int b = 0; b < inputs; b++)
            for (OpView *v = c.dx[b].view; v < c.dx[b].view + c.dx[b].views; v++)
                op_check_gradient(&c, &c.x[b], &c.dx[b], v);
    }
    for (int b = 0; b < inputs; b++)
        EXPECT(op_same(before[b], c.x[b].data, c.x[b].count), "%s: input %d was changed", c.what, b);
    op_free(c.what);
}
#define OP_CHECK_ALL(kind, shapes) \
    for (size_t op_i = 0; op_i < sizeof(shapes) / sizeof((shapes)[0]); op_i++) op_check(&(kind), (shapes)[op_i])
#endif
