/*
engine.h: the cases of the catalogue for the C operations. op_check does the same for all:

  memory    Every buffer has guard zones. Gaps (row padding, a neighbour's columns) are NaN in inputs and a sentinel in
            outputs. Outputs are NaN where the contract says "=", and have a value where it says "+=". Inputs keep their
            bits. The workspace is NaN, and has the size that the operation asks for.
  max       The largest magnitude of an output is that of what was stored, and of where it started: the same bits.
  repeats   Runs with 2, 2, 1 and 3 threads give the same bits (products of a library: the first two).
  forward   The output is that of the definition.
  backward  <dx, u> is (f(x + h u) - f(x - h u)) / 2h, f(x) = sum(dy * reference(x)), for u a single element (a sample
            of each tensor) and for u of random signs (all of the tensor at once). The differences are those of the
            definition, in double, for both builds.
  errors    Per tensor and relative to its norm: 8 epsilon sqrt(length of the longest sum); for a backward 1e-8 more,
            for the differences themselves (h^2 + epsilon_double / h, h = 2e-5).

Include after llmc/experts/all_operations.h. Compile once as it is and once with -DREAL=double.
*/
#pragma once
#include "catalogue.h"

enum {
#ifdef __SANITIZE_ADDRESS__ // slow, and looks for other errors
    OP_SAMPLES = 1,
    OP_DIRECTIONS = 1,
#else
    OP_SAMPLES = 16,
    OP_DIRECTIONS = 2,
#endif
    OP_THREADS = 3,
    OP_BUFFERS = 96,
    OP_GUARD = 128, // bytes
    OP_GUARD_BYTE = 0xA5
};
#define OP_SENTINEL ((real)-12345)
static const double op_epsilon = sizeof(real) == 4 ? 0x1p-23 : 0x1p-52;

// Memory between guard zones, all of it the guard's byte at first. op_free checks the guards and frees all.
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
// The largest |a - b|, or |a| if b is NULL. GCC 12.2 for ARM crashes at -O3 on fmax of floats in double in a loop.
static double op_difference(const real *a, const real *b, size_t count) {
    double most = 0;
    for (size_t i = 0; i < count; i++) {
        double difference = fabs((double)a[i] - (b ? (double)b[i] : 0));
        if (difference > most) most = difference;
    }
    return most;
}
static int op_not_finite(const real *x, size_t count) {
    int n = 0;
    for (size_t i = 0; i < count; i++) n += !isfinite((double)x[i]);
    return n;
}

// The workspace as an operation may find it, all NaN, and whether the operation wrote beyond the bytes it asked for.
enum { WORKSPACE_TAIL = 1024 };
static void workspace_poison(size_t need) {
    if (ops_workspace.bytes < need + WORKSPACE_TAIL) ops_init(need + WORKSPACE_TAIL);
    memset(ops_workspace.memory, 0xFF, need + WORKSPACE_TAIL);
}
static void workspace_check(size_t need, const char *what) {
    int written = 0;
    const unsigned char *tail = (unsigned char *)ops_workspace.memory + need;
    for (int i = 0; i < WORKSPACE_TAIL; i++) written += tail[i] != 0xFF;
    EXPECT(written == 0, "%s: the workspace is too small for %d threads", what, omp_get_max_threads());
}

static real *op_data(const OpTensor *t) { return (real *)t->data; }
static size_t op_bytes(const OpTensor *t) {
    return t->count * (t->type == INT32 ? sizeof(int) : t->type == FP64 ? sizeof(double) : sizeof(real));
}
static double op_load(const OpTensor *t, size_t i) {
    if (t->type == INT32) return ((const int *)t->data)[i] == INT_MIN ? NAN : ((const int *)t->data)[i];
    return t->type == FP64 ? ((const double *)t->data)[i] : (double)((const real *)t->data)[i];
}
static void op_store(OpTensor *t, size_t i, double value) {
    if (t->type == INT32) ((int *)t->data)[i] = isnan(value) ? INT_MIN : (int)value;
    else if (t->type == FP64) ((double *)t->data)[i] = value;
    else ((real *)t->data)[i] = (real)value;
}
static double op_got(const OpTensor *t, const OpView *v, size_t i) {
    return op_load(t, op_at(v, i)) - (v->adds ? op_start(i) : 0);
}
static void op_copy_view(real *to, const real *from, const OpView *v) {
    for (size_t i = 0; i < op_size(v); i++) to[op_at(v, i)] = from[op_at(v, i)];
}

static void op_run(OpCase *c, bool backward) {
    OpTensor *out = backward ? c->dx : c->y;
    for (OpTensor *t = out; t < out + OP_TENSORS; t++) {
        for (size_t i = 0; i < t->count; i++) op_store(t, i, OP_SENTINEL);
        for (OpView *v = t->view; v < t->view + t->views; v++)
            for (size_t i = 0; i < op_size(v); i++) op_store(t, op_at(v, i), v->adds ? op_start(i) : NAN);
    }
    for (int i = 0; i < (backward ? min_int(c->in_place, 1) : c->in_place); i++)
        if (out[i].views)
            op_copy_view(op_data(&out[i]), backward ? (const real *)c->dy : op_data(&c->x[i]), c->y[i].view);
    if (backward && c->dloss != 0) memcpy(c->dx->data, c->x->data, c->x->count * sizeof(real)); // NaN in the padding
    size_t need = op_cost_of(c, backward).workspace;
    workspace_poison(need);
    op_call(c, backward);
    workspace_check(need, c->what);
}

// c->max, of an output that was computed since *c->max was `start`.
static void op_check_max(const OpCase *c, const OpTensor *out, uint32_t start) {
    uint32_t want = start;
    for (const OpView *v = out->view; v < out->view + out->views; v++)
        for (size_t i = 0; i < op_size(v); i++) want = op_max(want, (double)op_data(out)[op_at(v, i)]);
    EXPECT(*c->max == want, "%s: the largest magnitude of %s is %08x, not %08x", c->what, out->view->name, *c->max,
           want);
}

// Runs into the same outputs repeatedly: the same bits each time, all finite, gaps as they should be.
static void op_repeat(OpCase *c, bool backward) {
    static const int threads[] = {2, 2, 1, OP_THREADS};
    OpTensor *out = backward ? c->dx : c->y;
    real gap = backward && c->dloss != 0 ? 0 : OP_SENTINEL;
    OpTensor first[OP_TENSORS];
    int before = omp_get_max_threads();
    for (int r = 0; r < (c->threads_change_sums ? 2 : 4); r++) {
        uint32_t start = r % 2 ? OP_LARGE_MAX : 0, max = start;
        c->max = r > 0 && (backward ? c->max_of_dx : c->max_of_y) ? &max : NULL;
        omp_set_num_threads(threads[r]);
        op_run(c, backward);
        if (c->max) op_check_max(c, out, start);
        for (int o = 0; o < OP_TENSORS; o++) {
            if (r == 0) {
                first[o] = out[o];
                first[o].data = memcpy(op_alloc_bytes(op_bytes(&out[o])), out[o].data, op_bytes(&out[o]));
            }
            EXPECT(memcmp(first[o].data, out[o].data, op_bytes(&out[o])) == 0,
                   "%s: %s differs between run 1 and run %d (%d threads)", c->what, out[o].view->name, r + 1,
                   threads[r]);
        }
    }
    omp_set_num_threads(before);
    for (int o = 0; o < OP_TENSORS; o++) {
        int bad = 0, written = 0;
        for (size_t i = 0; i < out[o].count; i++) bad += !isfinite(op_load(&first[o], i));
        EXPECT(bad == 0, "%s: %d elements of %s are NaN or infinite", c->what, bad, out[o].view->name);
        for (OpView *v = out[o].view; v < out[o].view + out[o].views; v++)
            for (size_t i = 0; i < op_size(v); i++) op_store(&first[o], op_at(v, i), gap);
        for (size_t i = 0; i < out[o].count; i++) written += op_load(&first[o], i) != gap;
        EXPECT(written == 0, "%s: %d elements between the rows or heads of %s are not %g", c->what, written,
               out[o].view->name, (double)gap);
    }
}

static void op_compare(const OpCase *c, const OpTensor *t) {
    double tolerance = 8 * op_epsilon * sqrt(c->length), error = 0, norm = 0;
    for (size_t i = 0; i < op_size(t->view); i++) {
        double want = t->ref[op_at(t->view, i)], difference = op_got(t, t->view, i) - want;
        error += difference * difference;
        norm += want * want + (t->view->adds ? 1 : 0);
    }
    EXPECT(sqrt(error) <= tolerance * sqrt(norm), "%s: %s is off by %.3g of its norm, tolerance %.3g", c->what,
           t->view->name, sqrt(error / norm), tolerance);
}

// The slope of sum(dy * y) along element `i` of a view, or along random signs of all its elements when seed != 0.
static double op_slope(OpCase *c, OpTensor *x, const OpView *v, size_t i, uint64_t seed) {
    double h = 2e-5 * fmin(x->spread, 1), slope = 0, *up = (double *)checked_calloc(c->y->count, sizeof(double));
    long double loss = 0; // a sum much larger than its difference
    for (int side = 1; side >= -1; side -= 2) {
        TestRandom signs = {seed};
        for (size_t j = seed ? 0 : i; j < (seed ? op_size(v) : i + 1); j++) {
            double u = seed && (test_random_bits(&signs) & 1) ? -1 : 1;
            x->ref[op_at(v, j)] = (double)op_data(x)[op_at(v, j)] + side * h * u;
        }
        op_kind(c->kind)->reference(c);
        if (side == 1) memcpy(up, c->y->ref, c->y->count * sizeof(double)), loss = c->loss;
    }
    for (size_t j = 0; j < op_size(c->y->view); j++) { // outputs that did not change cancel exactly
        size_t at = op_at(c->y->view, j);
        slope += (double)((const real *)c->dy)[at] * (up[at] - c->y->ref[at]) / (2 * h);
    }
    slope += (double)((loss - c->loss) / (2 * h));
    for (size_t j = 0; j < op_size(v); j++) x->ref[op_at(v, j)] = (double)op_data(x)[op_at(v, j)];
    free(up);
    return slope;
}

static void op_check_gradient(OpCase *c, OpTensor *x, const OpTensor *dx, const OpView *v) {
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
    EXPECT(sqrt(error) <= tolerance * norm, "%s: d%s is off by %.3g of its norm in single elements, tolerance %.3g",
           c->what, v->name, sqrt(error) / norm, tolerance);
    for (uint64_t seed = 1; seed <= OP_DIRECTIONS; seed++) {
        double got = 0, want = op_slope(c, x, v, 0, seed);
        TestRandom signs = {seed};
        for (size_t i = 0; i < size; i++) got += (test_random_bits(&signs) & 1 ? -1 : 1) * op_got(dx, v, i);
        error = fabs(got - want) / sqrt((double)size);
        EXPECT(error <= 4 * tolerance * norm, "%s: d%s is off by %.3g of its norm along random signs, tolerance %.3g",
               c->what, v->name, error / norm, 4 * tolerance);
    }
}

// Allocates the tensors of a case, and fills its inputs, which are NaN between their views.
static void op_allocate(OpCase *c, TestRandom *random) {
    if (c->index_count) {
        c->index = (int *)op_alloc_bytes((size_t)c->index_count * sizeof(int));
        op_fill_index(c, c->index, random);
    }
    for (int i = 0; i < OP_TENSORS; i++) {
        OpTensor *x = &c->x[i], *all[] = {x, &c->dx[i], &c->y[i]};
        for (int t = 0; t < 3; t++) {
            all[t]->data = op_alloc_bytes(op_bytes(all[t]));
            all[t]->ref = (double *)op_alloc_bytes(all[t]->count * sizeof(double));
        }
        for (size_t e = 0; e < x->count; e++) op_data(x)[e] = (real)NAN;
        for (OpView *v = x->view; v < x->view + x->views; v++)
            for (size_t e = 0; e < op_size(v); e++) op_data(x)[op_at(v, e)] = (real)op_input(c, i, e, random);
        for (OpView *v = x->view; v < x->view + x->views && i == 1; v++)
            for (size_t e = 0; e < op_size(v); e++)
                if (op_in_empty_row(c, v, e)) op_data(x)[op_at(v, e)] = (real)NAN;
        if (c->kind == OP_ROPE && x->constant) op_rope_table(op_data(x), c);
        for (size_t e = 0; e < x->count; e++) x->ref[e] = (double)op_data(x)[e];
    }
}

// The size of an update, to 1e-5: the elements are computed in `real`.
static void update_squares_expect(const OpCase *c) {
    const AdamwNumbers *a = &adamw_numbers[c->d[4]];
    double want = 0,
           got = update_squares((const grad_t *)c->x[4].data, (const real *)c->x[2].data, (const real *)c->x[3].data,
                                c->x[0].count, a->grad_scale, a->lr, a->beta1, a->beta2, a->eps, c->d[3]);
    for (size_t i = 0; i < c->x[0].count; i++) {
        double w = c->x[c->d[2] ? 1 : 0].ref[i], u = (1 - a->lr * a->weight_decay) * w - c->y[0].ref[i];
        want += u * u;
    }
    EXPECT(fabs(got - want) <= 1e-5 * want, "%s: update_squares is %.9g, not %.9g", c->what, got, want);
}
static void op_check(OpKindName kind, const OpRow *row) {
    OpCase c;
    const int *d = row->d;
    op_describe(&c, kind, d);
    c.continuous = !c.no_backward;
    char shape[180];
    op_shape_text(shape, sizeof(shape), op_kind(c.kind)->dims, d, "=");
    FORMAT(c.what, "%s %s", op_kind(c.kind)->name, shape);
    TestRandom random = {20260101};
    op_allocate(&c, &random);
    real *before[OP_TENSORS];
    for (int i = 0; i < OP_TENSORS; i++) before[i] = op_alloc_copy(op_data(&c.x[i]), c.x[i].count);
    op_repeat(&c, false);
    op_kind(c.kind)->reference(&c);
    for (int i = 0; i < OP_TENSORS; i++)
        if (c.y[i].views) op_compare(&c, &c.y[i]);
    if (c.kind == OP_ADAMW && c.y[1].views)
        EXPECT(op_same(op_data(&c.y[0]), op_data(&c.y[1]), c.y->count), "%s: the weights are not the master's", c.what);
    if (c.kind == OP_ADAMW) update_squares_expect(&c);
    if (!c.no_backward) {
        real *dy = op_alloc(c.y->count);
        for (size_t i = 0; i < c.y->count; i++) dy[i] = (real)NAN;
        for (size_t i = 0; i < op_size(c.y->view); i++)
            dy[op_at(c.y->view, i)] = (real)(c.dloss != 0 ? c.dloss : test_random_real(&random));
        c.dy = dy;
        op_repeat(&c, true);
        for (int i = 0; i < OP_TENSORS; i++)
            for (OpView *v = c.dx[i].view; v < c.dx[i].view + c.dx[i].views; v++)
                op_check_gradient(&c, &c.x[i], &c.dx[i], v);
    }
    for (int i = 0; i < OP_TENSORS; i++)
        EXPECT(op_same(before[i], op_data(&c.x[i]), c.x[i].count), "%s: input %d was changed", c.what, i);
    op_free(c.what);
}
static bool op_any(const OpRow *row) { return row != NULL; }
static void op_check_some(OpKindName kind, bool (*belongs)(const OpRow *)) {
    int cases = 0;
    const OpRow *row;
    for (int i = 0; (row = op_row(i)) != NULL; i++)
        if (row->kind == op_cases_of(kind) && row->engines != CUDA_ONLY && belongs(row)) op_check(kind, row), cases++;
    EXPECT(cases > 0, "%s has no case", op_kind(kind)->name);
}
static void op_check_all(OpKindName kind) { op_check_some(kind, op_any); }
