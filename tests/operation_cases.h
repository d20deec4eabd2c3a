/*
operation_cases.h: the operations under test, and one list of cases for the C and the CUDA implementation.

An entry of op_kinds describes an operation: the layout of its tensors, its definition in double, and the rounding
errors of the CUDA operation relative to the C operation. operation_calls.h calls the operations. Two engines run the
cases of operation_table.h:

  operation_engine.h   C against the definition and against finite differences of it, with several numbers of threads
  cuda_engine.h        CUDA against C in double, with several orders of threads and the exact workspace

To add an operation, add a name to OpKindName, its calls, an entry to op_kinds, and its cases with a reason each.
*/
#ifndef TESTS_OPERATION_CASES_H
#define TESTS_OPERATION_CASES_H
#include "../llmc/model/mlp_kinds.h"
#include "../llmc/model/variants.h"
#include "harness.h"

enum { OP_DIMS = 12, OP_VIEWS = 3, OP_TENSORS = 2, OP_KEYS = 1024 };
#define OP_EPS 1e-5      // of rmsnorm
#define OP_THETA 10000.0 // of rope

// Storage on a device; the C operations store everything but indices as `real`.
typedef enum { STORED, FP32, FP64, INT32 } TensorType;

// The error of fp32 arithmetic besides the rounding at the store, in units of 2^-24.
typedef struct {
    double relative; // times |value|: the number of rounded operations that a result passes through
    double absolute; // for sums with cancellation: the size of their terms times error_of_sum of their number
} Error;
// Rounding errors of a sum of `length` terms that several lanes share.
static inline double error_of_sum(double length) { return 4 + length / 16 + 4 * sqrt(length); }
// The same where a library adds them, perhaps sequentially: a random walk of steps that grow with the sum.
static inline double error_of_product(double length) { return 8 + length; }

// Part of a tensor: element (row, head, i) is at offset + row*ld + head*stride + i.
typedef struct {
    const char *name;
    size_t offset;
    int rows, heads, width, ld, stride;
    bool adds; // the operation adds to this output, or to the gradient of this input
} OpView;

typedef struct {
    OpView view[OP_VIEWS];
    int views; // 0: there is no such tensor
    size_t count;
    TensorType type;
    bool constant;    // an input without a gradient
    double spread;    // values, or what is added to, are uniform in (-spread, spread)
    double low, high; // CUDA: where high > 0, the backward's input is uniform in (low, high)
    Error error;      // of CUDA against C, as an output
    bool error_grows; // with the largest value of the tensor
    void *data;       // of the implementation under test
    double *ref;      // operation_engine.h: input or output of the definition
} OpTensor;

typedef enum {
    OP_EMBEDDING,
    OP_RMSNORM,
    OP_MATMUL,
    OP_ROPE,
    OP_ATTENTION,
    OP_ATTENTION_SETS,
    OP_SINK,
    OP_DIFF_COMBINE,
    OP_LAMBDA_EXP,
    OP_LAMBDA_LEARNED,
    OP_FILL,
    OP_SCALE,
    OP_ACCUMULATE,
    OP_CACHE_STORE,
    OP_CACHE_LOAD,
    OP_DECODE,
    OP_QUANTIZE,
    OP_ATTENTION_QUANTIZED,
    OP_GATE,
    OP_EXCLUSIVE,
    OP_HEAD_NORM,
    OP_SWIGLU,
    OP_CROSS_ENTROPY,
    OP_KIND_COUNT
} OpKindName;

typedef struct {
    int B, T, first, NQ, NKV, D, DV, maps, ld, ldo, window;
} OpAttention;

typedef struct {
    OpKindName kind;
    const int *d;                           // dimensions
    char what[240];                         // name and dimensions, for messages
    OpTensor x[OP_TENSORS], dx[OP_TENSORS]; // inputs and their gradients
    OpTensor y[OP_TENSORS];                 // the output, and what else the backward reads
    const void *dy;                         // with the layout of y[0]
    bool in_place;                          // y[0] is x[0] at first, and dx[0] is dy
    bool exact;                             // sums of whole numbers have no rounding error
    int integers;                           // inputs are whole numbers up to this: exact before rounding
    bool no_backward, threads_change_sums;
    bool max_of_y, max_of_dx;             // the operation also computes the largest magnitude of y[0], or of dx[0]
    uint32_t *max;                        // of the implementation under test: absmax_t; NULL: it is not asked for
    double length;                        // of the longest sum
    double dloss;                         // not 0: dx[0] is x[0] at first, and cleared between the rows
    int *index, index_count, index_limit; // tokens, targets or positions below the limit
    bool documents;                       // index has the first key of each row
    OpAttention a;
} OpCase;

// max, or the bits of |value| in fp32 if those are more.
static inline uint32_t op_max(uint32_t max, double value) {
    float f = (float)value;
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    bits &= 0x7FFFFFFF;
    return bits > max ? bits : max;
}
enum { OP_LARGE_MAX = 0x71000000, OP_INFINITE_MAX = 0x7F800000 }; // larger than any output; NaN is above infinity

static inline size_t product(int a, int b) { return (size_t)a * (size_t)b; }
static inline size_t op_size(const OpView *v) { return product(v->rows, v->heads) * (size_t)v->width; }
static inline size_t op_at(const OpView *v, size_t i) {
    size_t width = (size_t)v->width, heads = (size_t)v->heads;
    return v->offset + i / width / heads * (size_t)v->ld + i / width % heads * (size_t)v->stride + i % width;
}
static OpView *op_view(OpTensor *t, const char *name, size_t offset, int rows, int heads, int width, int ld,
                       int stride) {
    OpView v = {name, offset, rows, heads, width, ld, stride, false};
    assert(t->views < OP_VIEWS);
    t->view[t->views] = v;
    size_t end = offset - offset % (size_t)max_int(ld, 1) + product(rows, ld);
    if (end > t->count) t->count = end;
    return &t->view[t->views++];
}
static OpView *op_rows(OpTensor *t, const char *name, int rows, int width, int ld) {
    return op_view(t, name, 0, rows, 1, width, ld, width);
}
// A parameter: its gradient has its own type, and is added to.
static OpTensor *op_parameter(OpCase *c, int i, const char *name, int rows, int width, double spread) {
    op_rows(&c->x[i], name, rows, width, width)->adds = true;
    c->x[i].spread = spread;
    c->dx[i].type = FP32;
    return &c->dx[i];
}
static void op_statistics(OpTensor *t, const char *name, int rows, int width, double relative, double absolute) {
    op_rows(t, name, rows, width, width);
    t->type = FP32;
    t->error.relative = relative, t->error.absolute = absolute;
}
static void op_error(OpTensor *t, double relative, double absolute) {
    t->error.relative = relative, t->error.absolute = absolute;
}
static double op_start(size_t i) { return (double)(i * 37 % 64) / 16 - 2; } // what "+=" adds to in the C engine
static void op_index(OpCase *c, int count, int limit) { c->index_count = count, c->index_limit = limit; }
static void op_fill_index(const OpCase *c, int *index, TestRandom *random) {
    for (int n = 0; n < c->index_count && !c->documents; n++) index[n] = test_random_int(random, c->index_limit);
    if (c->kind == OP_EMBEDDING) // one token that occurs often
        for (int n = 0; n < c->index_count; n += 3) index[n] = c->index_limit / 2;
    if (c->index_limit) index[c->index_count - 1] = c->index_limit - 1;
    for (int n = 0, start = 0, T = c->a.T; n < c->index_count && c->documents; n++) {
        if (n % T == 0) start = 0;
        if (n % T == T / 2 || test_random_int(random, min_int(40, T / 4 + 2)) == 0) start = n % T;
        index[n] = start;
    }
}

// --- embedding: x weight (V,C), y (N,C) ---

static void embedding_setup(OpCase *c) {
    int N = c->d[0], V = c->d[1], C = c->d[2];
    op_index(c, N, V);
    // N sequential roundings of a sum near its value: 4 standard deviations of a random walk
    op_error(op_parameter(c, 0, "weight", V, C, 1), 4 + 4 * sqrt(N / 3.0), error_of_product(N));
    op_rows(&c->y[0], "x", N, C, C);
    c->length = N, c->exact = true;
}
static void embedding_reference(OpCase *c) {
    for (int i = 0, C = c->d[2]; i < c->d[0] * C; i++) c->y->ref[i] = c->x->ref[c->index[i / C] * C + i % C];
}

// --- rmsnorm: x (N,C), weight (C); y (N,C), rstd (N) ---

static void rmsnorm_setup(OpCase *c) {
    int N = c->d[0], C = c->d[1];
    op_rows(&c->x[0], "x", N, C, C)->adds = c->d[3] != 0;
    c->x[0].spread = 3.0 / c->d[2];
    op_rows(&c->y[0], "y", N, C, C);
    op_error(&c->y[0], error_of_sum(C) + 4, 0);
    op_statistics(&c->y[1], "rstd", 1, N, error_of_sum(C), 0);
    c->y[1].low = 0.5, c->y[1].high = 1.5;
    const double z = 3 * 1.5, g = 2; // largest |x rstd| and |dy weight|
    op_error(&c->dx[0], 4, 1.5 * (4 * g + z * z * g * error_of_sum(C) / sqrt((double)C)));
    op_error(op_parameter(c, 1, "weight", 1, C, 2), 4, z * error_of_sum(N));
    c->length = max_int(N, C), c->max_of_y = c->max_of_dx = true;
}
static void rmsnorm_reference(OpCase *c) {
    for (int n = 0, C = c->d[1]; n < c->d[0]; n++) {
        const double *x = c->x->ref + n * C;
        double mean = 0, *y = c->y->ref + n * C;
        for (int i = 0; i < C; i++) mean += x[i] * x[i] / C;
        c->y[1].ref[n] = 1 / sqrt(mean + OP_EPS);
        for (int i = 0; i < C; i++) y[i] = x[i] * c->y[1].ref[n] * c->x[1].ref[i];
    }
}

// --- matmul: x (N,IC), weight (OC,IC), y (N,OC) with row stride ldy ---

static void matmul_setup(OpCase *c) {
    int N = c->d[0], IC = c->d[1], OC = c->d[2];
    op_rows(&c->x[0], "x", N, IC, IC);
    op_error(&c->dx[0], 0, error_of_product(OC));
    op_error(op_parameter(c, 1, "weight", OC, IC, 1), 0, error_of_product(N));
    c->x[1].view->adds = c->d[4] != 0;
    op_rows(&c->y[0], "y", N, OC, c->d[3]);
    op_error(&c->y[0], 0, error_of_product(IC));
    c->length = max_int(N, max_int(IC, OC));
    c->threads_change_sums = c->exact = true;
}
static void matmul_reference(OpCase *c) {
    for (int i = 0, IC = c->d[1], OC = c->d[2]; i < c->d[0] * OC; i++) {
        double *y = c->y->ref + i / OC * c->d[3] + i % OC;
        *y = 0;
        for (int j = 0; j < IC; j++) *y += c->x[0].ref[i / OC * IC + j] * c->x[1].ref[i % OC * IC + j];
    }
}

// --- rope: x and y (N,heads,D) with row stride ldx, table (positions,D) ---

static void rope_setup(OpCase *c) {
    const int *d = c->d;
    op_view(&c->x[0], "x", 0, d[0] * d[1], d[2], d[3], d[4], d[3]);
    op_view(&c->y[0], "y", 0, d[0] * d[1], d[2], d[3], d[4], d[3]);
    op_statistics(&c->x[1], "table", d[5] + d[1], d[3], 0, 0);
    c->x[1].constant = true;
    op_index(c, d[0], d[5] + 1); // the first positions of the sequences
    op_error(&c->y[0], 0, 4);
    op_error(&c->dx[0], 0, 4);
    c->length = 2, c->in_place = true;
}
static void rope_reference(OpCase *c) {
    for (size_t i = 0; i < op_size(c->y->view); i++) {
        size_t at = op_at(c->y->view, i), D = (size_t)c->d[3], T = (size_t)c->d[1], half = D / 2;
        size_t n = i / D / (size_t)c->d[2], t = (size_t)c->index[n / T] + n % T;
        double angle = (double)t * pow(OP_THETA, -2.0 * (double)(i % half) / (double)D);
        const double *x = c->x->ref + at;
        c->y->ref[at] =
            i % D < half ? cos(angle) * x[0] - sin(angle) * x[half] : cos(angle) * x[0] + sin(angle) * *(x - half);
    }
}

// --- attention: x fused rows [q | k | v | padding], y[0] out (N,NQ,DV), y[1] lse (B,NQ,T) ---
// With maps 2 the heads of two key sets alternate, [heads][2][width], and both sets have the same values. "attention"
// runs the last set; "attention of two sets" runs both, as for diff_v1, and the second adds to dv.

typedef struct {
    size_t q, k, v, out, lse; // first elements of a key set
} OpKeySet;
static OpKeySet op_key_set(const OpAttention *a, int set) {
    OpKeySet s;
    s.q = product(a->first, a->ld) + product(set, a->D);
    s.k = product(a->NQ * a->maps, a->D) + product(set, a->D);
    s.v = product((a->NQ + a->NKV) * a->maps, a->D);
    s.out = product(set, a->DV);
    s.lse = (size_t)set * round_up(product(a->B * a->NQ, a->T), 4); // lse_set_stride
    return s;
}
static double attention_error(const OpAttention *a) { return error_of_sum(a->D) + error_of_sum(a->T + a->first) + 16; }
// The error of CUDA, and the sums of C, of the output and lse of attention to the keys 0 .. first + T - 1.
static void attention_rounding(OpCase *c, const OpAttention *a) {
    c->y[1].type = FP32;
    op_error(&c->y[0], 4, 2 * attention_error(a));
    op_error(&c->y[1], 4, attention_error(a));
    c->length = 4 * max_int(a->T + a->first, a->D); // errors of scores grow with their size, up to 4
}
// The key sets from `set` on.
static void attention_layout(OpCase *c, int maps, int set, int padding, int ldo_padding) {
    const int *d = c->d;
    OpAttention a = {d[0], d[1], c->a.first, d[2], d[3], d[4], d[5], maps, 0, 0, c->a.window};
    a.ld = (a.NQ + a.NKV) * maps * a.D + a.NKV * a.DV + padding;
    a.ldo = a.NQ * maps * a.DV + ldo_padding;
    c->a = a;
    OpKeySet s = op_key_set(&a, set);
    int rows = a.B * a.T, keys = a.B * (a.first + a.T), of = maps - set, step = set ? maps : 1;
    op_view(&c->x[0], "q", s.q, rows, of * a.NQ, a.D, a.ld, step * a.D);
    op_view(&c->x[0], "k", s.k, keys, of * a.NKV, a.D, a.ld, step * a.D);
    op_view(&c->x[0], "v", s.v, keys, a.NKV, a.DV, a.ld, a.DV);
    c->x[0].spread = 2; // scores spread enough for some keys to matter more than others
    op_view(&c->y[0], "out", s.out, rows, of * a.NQ, a.DV, a.ldo, step * a.DV);
    op_view(&c->y[1], "lse", s.lse, of, a.B * a.NQ, a.T, (int)op_key_set(&a, 1).lse, a.T);
    attention_rounding(c, &a);
    op_error(&c->dx[0], 4, attention_error(&a) + error_of_sum(a.DV));
    c->dx[0].error_grows = true;
}
static void attention_setup(OpCase *c) {
    const int *d = c->d;
    c->a.first = d[9], c->a.window = d[11];
    c->documents = d[8] == 2;
    c->no_backward = d[9] > 0;
    attention_layout(c, d[6], d[6] - 1, d[7], d[7]);
    c->x[0].view[2].adds = d[8] == 1;
    if (c->documents) op_index(c, d[0] * d[1], 0);
    if (d[10]) c->y[1].views = 0;
}
static void attention_sets_setup(OpCase *c) {
    c->a.window = c->d[8];
    attention_layout(c, 2, 0, c->d[7], c->d[7]);
}
static void sink_setup(OpCase *c) {
    attention_layout(c, 1, 0, c->d[7], 0); // sink_forward reads rows without padding
    if (!c->d[6]) return;
    op_error(op_parameter(c, 1, "sinks", 1, c->a.NQ, 2), 4,
             exp(4.0) * sqrt((double)c->a.DV) * error_of_sum(c->a.DV + c->a.B * c->a.T));
    c->length = 4 * max_int(c->a.B * c->a.T, c->a.D);
}
// Rounds to b-bit integers times a step, ties to even. bits 0: not.
static void quantize_define(double *x, int count, double max, int bits) {
    double levels = (1 << max_int(bits - 1, 0)) - 1;
    for (int i = 0; i < count && bits && max > 0; i++) x[i] = rint(x[i] * levels / max) * max / levels;
}
static double quantize_largest(const double *x, int count) {
    double max = 0;
    for (int i = 0; i < count; i++) max = fmax(max, fabs(x[i]));
    return max;
}
// The definition for one query row, which attends to the keys [low, end): the sum of exp(scale q.k). The softmax has
// `sum` more in its denominator. bits: of the logits
static double attention_define_row(double *out, const double *q, const double *k, const double *v, int ld, int low,
                                   int end, const OpAttention *s, double sum, int bits) {
    double scores[OP_KEYS], scale = 1 / sqrt((double)s->D);
    assert(low < end && end <= OP_KEYS);
    for (int i = 0; i < s->DV; i++) out[i] = 0;
    for (int j = low; j < end; j++) {
        scores[j] = 0;
        for (int i = 0; i < s->D; i++) scores[j] += scale * (q[i] * k[j * ld + i]);
    }
    quantize_define(scores + low, end - low, quantize_largest(scores + low, end - low), bits);
    for (int j = low; j < end; j++) {
        double p = exp(scores[j]); // scores are small: no maximum is needed
        sum += p;
        for (int i = 0; i < s->DV; i++) out[i] += p * v[j * ld + i];
    }
    for (int i = 0; i < s->DV; i++) out[i] /= sum;
    return sum;
}
// The definition, for one key set; `sinks` has one more logit per head, NULL: there is none.
static void attention_define(OpCase *c, int set, const double *sinks, int bits) {
    OpAttention s = c->a;
    OpKeySet at = op_key_set(&s, set);
    double *all_lse = c->y[1].views ? c->y[1].ref + at.lse : NULL;
    int head = s.maps * s.D;
#pragma omp parallel for
    for (int bh = 0; bh < s.B * s.NQ; bh++) {
        int b = bh / s.NQ, h = bh % s.NQ, kv = h / (s.NQ / s.NKV);
        const double *x = c->x->ref + b * s.T * s.ld, *q = x + at.q + h * head, *k = x + at.k + kv * head;
        const double *v = x + at.v + kv * s.DV;
        for (int t = 0; t < s.T; t++) {
            double *out = c->y->ref + at.out + (b * s.T + t) * s.ldo + h * s.maps * s.DV;
            int low = c->documents ? c->index[b * s.T + t] : 0, end = s.first + t + 1;
            if (s.window) low = max_int(low, end - s.window);
            double sum =
                attention_define_row(out, q + t * s.ld, k, v, s.ld, low, end, &s, sinks ? exp(sinks[h]) : 0, bits);
            if (all_lse) all_lse[bh * s.T + t] = log(sum);
        }
    }
}
static void attention_reference(OpCase *c) { attention_define(c, c->a.maps - 1, NULL, 0); }
static void attention_sets_reference(OpCase *c) {
    for (int set = 0; set < 2; set++) attention_define(c, set, NULL, 0);
}
static void sink_reference(OpCase *c) {
    static const double zeros[16] = {0};
    attention_define(c, 0, c->d[6] ? c->x[1].ref : zeros, 0);
}

// --- diff_combine: a (N,NQ,D), l (N,NH) with row stride ldl, y (N,NH,D); blocks of signal heads, then noise heads ---

static void diff_combine_setup(OpCase *c) {
    int N = c->d[0], NH = c->d[1], D = c->d[2], NQ = NH + NH / c->d[4] * c->d[5], shared = c->d[4] / c->d[5];
    op_rows(&c->x[0], "a", N, NQ * D, NQ * D);
    op_rows(&c->x[1], "l", N, NH, c->d[3]);
    c->x[1].spread = 6;
    op_rows(&c->y[0], "o", N, NH * D, NH * D);
    op_error(&c->y[0], 0, 16);
    // of a noise head: a sum of terms up to the largest factor
    op_error(&c->dx[0], 16, shared > 1 ? 16 * shared * (c->d[6] == S_LINEAR ? c->x[1].spread : 1) : 0);
    op_error(&c->dx[1], 16, error_of_sum(D));
    c->length = D, c->exact = c->d[6] == S_LINEAR;
    c->max_of_y = true;
}
static void diff_combine_reference(OpCase *c) {
    int NH = c->d[1], D = c->d[2], signals = c->d[4], noise = c->d[5], NQ = NH + NH / signals * noise;
    for (int i = 0; i < c->d[0] * NH * D; i++) {
        int n = i / D / NH, h = i / D % NH, block = h / signals * (signals + noise);
        const double *a = c->x[0].ref + n * NQ * D + i % D;
        double l = c->x[1].ref[n * c->d[3] + h];
        double s = c->d[6] == S_SIGMOID ? 1 / (1 + exp(-l)) : c->d[6] == S_TANH ? tanh(l) : l;
        int h1 = block + h % signals, h2 = block + signals + h % signals * noise / signals;
        c->y->ref[i] = a[h1 * D] - a[h2 * D] * s;
    }
}

// --- lambdas of layers: x[0] [q1 | k1 | gap], x[1] [q2 | k2 | gap], or x[0] lambda (1), or a constant; y l (count) ---

static void lambda_exp_setup(OpCase *c) {
    static const char *const names[] = {"q1", "k1", "q2", "k2"};
    int D = c->d[0], count = c->d[1];
    // the largest of the exponentials, of sums with a deviation of spread^2/3 sqrt(D)
    const double spread = 0.3, e = exp(4 * spread * spread / 3 * sqrt((double)D));
    for (int i = 0; i < 4; i++) {
        op_view(&c->x[i / 2], names[i], (size_t)(i % 2 * D), 1, 1, D, 2 * D + 3, D)->adds = true;
        c->x[i / 2].spread = spread;
        c->dx[i / 2].type = FP32;
        op_error(&c->dx[i / 2], 4, 4 * e * sqrt((double)count));
    }
    op_rows(&c->y[0], "l", 1, count, count);
    op_error(&c->y[0], 4, 4 * e);
    c->length = max_int(D, count);
}
static void lambda_exp_reference(OpCase *c) {
    double dot[2] = {0, 0};
    for (int m = 0; m < 2; m++)
        for (int i = 0, D = c->d[0]; i < D; i++) dot[m] += c->x[m].ref[i] * c->x[m].ref[D + i];
    for (int i = 0; i < c->d[1]; i++) c->y->ref[i] = exp(dot[0]) - exp(dot[1]) + lambda_init(c->d[2]);
}
static void lambda_learned_setup(OpCase *c) {
    int numbers = c->d[0], N = c->d[1], NH = c->d[2];
    op_error(op_parameter(c, 0, "lambda", 1, numbers, 1), 2, 2);
    op_rows(&c->y[0], "l", N, NH, NH);
    c->length = N * NH / numbers;
}
static void lambda_learned_reference(OpCase *c) {
    for (int i = 0; i < c->d[1] * c->d[2]; i++) c->y->ref[i] = c->x->ref[c->d[0] > 1 ? i % c->d[2] : 0];
}
static void fill_setup(OpCase *c) {
    op_rows(&c->y[0], "l", 1, c->d[0], c->d[0]);
    c->no_backward = true;
}
static void fill_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) c->y->ref[i] = c->d[1] / 8.0;
}

// --- scale_inplace: x and y (count) ---

static double op_factor(const OpCase *c) { return (double)(float)(c->d[1] / 10.0); } // the same in both types
static void scale_setup(OpCase *c) {
    op_rows(&c->x[0], "x", 1, c->d[0], c->d[0]);
    op_rows(&c->y[0], "y", 1, c->d[0], c->d[0]);
    c->in_place = true;
}
static void scale_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) c->y->ref[i] = c->x->ref[i] * op_factor(c);
}

// --- accumulate: x and y[0] (count), y[1] the running sum ---

static void accumulate_setup(OpCase *c) {
    op_rows(&c->x[0], "x", 1, c->d[0], c->d[0]);
    op_rows(&c->y[0], "x", 1, c->d[0], c->d[0]);
    op_error(&c->y[0], 1, 0);
    op_statistics(&c->y[1], "sum", 1, c->d[0], 0, 0);
    c->y[1].view->adds = c->d[1] != 0;
    c->in_place = c->no_backward = true;
}
static void accumulate_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) {
        c->y[1].ref[i] = c->x->ref[i];
        c->y[0].ref[i] = c->x->ref[i] + (c->d[1] ? op_start((size_t)i) : 0);
    }
}

// --- cache_store: x[0] and y the cache (B,capacity,width), x[1] rows (B,T,width) with row stride ld ---

static void cache_store_setup(OpCase *c) {
    const int *d = c->d;
    op_rows(&c->x[0], "cache", d[0] * d[2], d[3], d[3]);
    op_rows(&c->x[1], "rows", d[0] * d[1], d[3], d[4]);
    op_rows(&c->y[0], "cache", d[0] * d[2], d[3], d[3]);
    if (d[5] >= 0) op_index(c, d[0], d[5] + 1); // the first positions of the sequences
    c->in_place = c->no_backward = true;
}
static void cache_store_reference(OpCase *c) {
    int T = c->d[1], capacity = c->d[2], width = c->d[3];
    memcpy(c->y->ref, c->x->ref, c->y->count * sizeof(double));
    for (int n = 0; n < c->d[0] * T; n++) {
        int place = n / T * capacity + ((c->index ? c->index[n / T] : 0) + n % T) % capacity;
        memcpy(c->y->ref + place * width, c->x[1].ref + n * c->d[4], (size_t)width * sizeof(double));
    }
}

// --- cache_load: x the cache (capacity,width), y rows (count,width) ---

static void cache_load_setup(OpCase *c) {
    op_rows(&c->x[0], "cache", c->d[2], c->d[3], c->d[3]);
    op_rows(&c->y[0], "rows", c->d[1], c->d[3], c->d[3]);
    c->no_backward = true;
}
static void cache_load_reference(OpCase *c) {
    for (int i = 0, width = c->d[3]; i < c->d[1]; i++)
        memcpy(c->y->ref + i * width, c->x->ref + (c->d[0] + i) % c->d[2] * width, (size_t)width * sizeof(double));
}

// --- attention_decode: x[0] q (B,NQ,D), x[1] caches (B,capacity) of rows [k | v], y[0] out (B,NQ,DV), y[1] lse (B,NQ)
// With maps 2 the last of two key sets, as for attention. Rows of the cache without a position are NaN.

static void decode_setup(OpCase *c) {
    const int *d = c->d;
    OpAttention a = {d[0], 1, min_int(d[8], d[7] - 1), d[1], d[2], d[3], d[4], d[5], 0, 0, 0};
    int set = a.maps - 1, head = a.maps * a.D, keys = a.NKV * head, width = keys + a.NKV * a.DV;
    a.ld = a.NQ * head + d[6];
    a.ldo = a.NQ * a.maps * a.DV + d[6];
    c->a = a;
    op_view(&c->x[0], "q", product(set, a.D), a.B, a.NQ, a.D, a.ld, head);
    op_view(&c->x[1], "k", product(set, a.D), a.B * d[7], a.NKV, a.D, width, head);
    op_view(&c->x[1], "v", (size_t)keys, a.B * d[7], a.NKV, a.DV, width, a.DV);
    c->x[0].spread = c->x[1].spread = 2;
    op_view(&c->y[0], "out", product(set, a.DV), a.B, a.NQ, a.DV, a.ldo, a.maps * a.DV);
    if (!d[9]) op_rows(&c->y[1], "lse", a.B, a.NQ, a.NQ);
    attention_rounding(c, &a);
    op_index(c, a.B, d[8] + 1); // the positions of the sequences
    c->no_backward = true;
}
static void decode_reference(OpCase *c) {
    const OpAttention *s = &c->a;
    const OpView *k = &c->x[1].view[0], *v = &c->x[1].view[1];
    for (int bh = 0; bh < s->B * s->NQ; bh++) {
        int b = bh / s->NQ, h = bh % s->NQ, kv = h / (s->NQ / s->NKV), capacity = c->d[7];
        const double *cache = c->x[1].ref + b * capacity * k->ld;
        double sum = attention_define_row(c->y->ref + op_at(c->y->view, (size_t)(bh * s->DV)),
                                          c->x->ref + op_at(c->x->view, (size_t)(bh * s->D)),
                                          cache + k->offset + kv * k->stride, cache + v->offset + kv * v->stride, k->ld,
                                          0, min_int(c->index[b] + 1, capacity), s, 0, 0);
        if (c->y[1].views) c->y[1].ref[bh] = log(sum);
    }
}
// Whether element i of a view of x[1] is in a row that no position has.
static bool op_in_empty_row(const OpCase *c, const OpView *v, size_t i) {
    int row = c->kind == OP_DECODE ? (int)(i / (size_t)v->width) / v->heads : 0;
    return c->kind == OP_DECODE && row % c->d[7] > c->index[row / c->d[7]];
}

// --- quantize_inplace: x and y (N,columns) with row stride ld ---

static void quantize_setup(OpCase *c) {
    op_rows(&c->x[0], "x", c->d[0], c->d[1], c->d[2]);
    op_rows(&c->y[0], "y", c->d[0], c->d[1], c->d[2]);
    op_error(&c->y[0], 2, 0);
    c->in_place = c->no_backward = true;
    c->integers = 100;
}
static void quantize_reference(OpCase *c) {
    int N = c->d[0], columns = c->d[1], ld = c->d[2];
    double all = 0;
    for (int n = 0; n < N; n++) {
        memcpy(c->y->ref + n * ld, c->x->ref + n * ld, (size_t)columns * sizeof(double));
        all = fmax(all, quantize_largest(c->y->ref + n * ld, columns));
    }
    for (int n = 0; n < N; n++) {
        double *row = c->y->ref + n * ld;
        quantize_define(row, columns, c->d[4] ? all : quantize_largest(row, columns), c->d[3]);
    }
}

// --- attention_quantized_forward: as attention; D is a power of 4, so that scale q.k is exact ---

static void attention_quantized_setup(OpCase *c) {
    const int *d = c->d;
    c->no_backward = true;
    c->documents = d[8] != 0;
    c->a.window = d[10];
    c->integers = 2; // logits up to 4 sqrt(D), three roundings each
    attention_layout(c, d[6], d[6] - 1, d[7], d[7]);
    double logit_error = 12 * sqrt((double)d[4]);
    op_error(&c->y[0], 4, 4 * (attention_error(&c->a) + logit_error));
    op_error(&c->y[1], 4, attention_error(&c->a) + logit_error);
    if (c->documents) op_index(c, d[0] * d[1], 0);
}
static void attention_quantized_reference(OpCase *c) { attention_define(c, c->a.maps - 1, NULL, c->d[9]); }

// --- gate: x (N,heads,D), g (N,heads*width) with row stride ldg, y (N,heads,D) ---

static const double OP_TINY = 1e-20; // times 2^-24: a sigmoid less than 2^-125, which the device may take for 0
static void gate_setup(OpCase *c) {
    int N = c->d[0], heads = c->d[1], D = c->d[2];
    op_rows(&c->x[0], "x", N, heads * D, heads * D);
    op_rows(&c->x[1], "g", N, heads * c->d[4], c->d[3]);
    c->x[1].spread = 6;
    op_rows(&c->y[0], "y", N, heads * D, heads * D);
    op_error(&c->y[0], 16, OP_TINY);
    op_error(&c->dx[0], 16, OP_TINY);
    op_error(&c->dx[1], 16, c->d[4] == 1 ? error_of_sum(D) : 8); // 1 - s loses digits near 1
    c->length = D, c->max_of_y = true;
}
static void gate_reference(OpCase *c) {
    int heads = c->d[1], D = c->d[2];
    for (int i = 0; i < c->d[0] * heads * D; i++) {
        int of_head = i / D % heads * c->d[4] + (c->d[4] == 1 ? 0 : i % D);
        c->y->ref[i] = c->x[0].ref[i] / (1 + exp(-c->x[1].ref[i / D / heads * c->d[3] + of_head]));
    }
}

// --- exclusive: x (N,heads,D), v (N,NKV,D) with row stride ldv, y (N,heads,D) ---

static void exclusive_setup(OpCase *c) {
    int N = c->d[0], heads = c->d[1], NKV = c->d[2], D = c->d[3];
    op_rows(&c->x[0], "x", N, heads * D, heads * D);
    op_rows(&c->x[1], "v", N, NKV * D, c->d[4]);
    op_rows(&c->y[0], "y", N, heads * D, heads * D);
    // of c = x.v / v.v and of b = dy.v / v.v, which are at most 3 where v.v, D/3 in the mean, is at least D/12
    const double error = 4 * error_of_sum(D) * 12 / D;
    op_error(&c->y[0], 4, 4 + error);
    op_error(&c->dx[0], 4, 4 + error);
    op_error(&c->dx[1], 4, heads / NKV * (8 + 8 * error)); // dy, x and v are at most 1
    c->length = D * (heads / NKV), c->max_of_y = true;
}
static void exclusive_reference(OpCase *c) {
    int heads = c->d[1], D = c->d[3], shared = heads / c->d[2];
    for (int i = 0; i < c->d[0] * heads; i++) {
        const double *x = c->x[0].ref + i * D, *v = c->x[1].ref + i / heads * c->d[4] + i % heads / shared * D;
        double xv = 0, vv = 0;
        for (int k = 0; k < D; k++) xv += x[k] * v[k], vv += v[k] * v[k];
        for (int k = 0; k < D; k++) c->y->ref[i * D + k] = x[k] - xv / vv * v[k];
    }
}

// --- head_norm: x and y[0] (N,heads,D) with row stride ld, weight (D), y[1] x before, with row stride ldk, or none ---

static void head_norm_setup(OpCase *c) {
    int N = c->d[0], heads = c->d[1], D = c->d[2], ld = c->d[3], ldk = c->d[4];
    op_view(&c->x[0], "x", 0, N, heads, D, ld, D);
    c->x[0].spread = 1.0 / c->d[5];
    op_view(&c->y[0], "y", 0, N, heads, D, ld, D);
    if (ldk) op_view(&c->y[1], "kept", 0, N, heads, D, ldk, D);
    op_error(&c->y[0], error_of_sum(D) + 4, 0);
    // largest |x r|, r and |dy weight|: the root mean square of x is at least a quarter of the spread
    const double z = fmin(sqrt((double)D), 4), r = fmin(4 * c->d[5], 1 / sqrt(OP_EPS)), g = 2;
    op_error(&c->dx[0], 4 + error_of_sum(D), r * (4 * g + z * z * g * error_of_sum(D) / sqrt((double)D)));
    op_error(op_parameter(c, 1, "weight", 1, D, 2), 4, z * (error_of_sum(N * heads) + error_of_sum(D)));
    c->length = max_int(N * heads, D);
    c->in_place = true, c->no_backward = ldk == 0;
}
static void head_norm_reference(OpCase *c) {
    int heads = c->d[1], D = c->d[2];
    for (int i = 0; i < c->d[0] * heads; i++) {
        size_t at = op_at(c->y->view, (size_t)(i * D));
        const double *x = c->x->ref + at;
        double mean = 0;
        for (int k = 0; k < D; k++) mean += x[k] * x[k] / D;
        for (int k = 0; k < D; k++) c->y->ref[at + (size_t)k] = x[k] / sqrt(mean + OP_EPS) * c->x[1].ref[k];
        for (int k = 0; k < D && c->y[1].views; k++) c->y[1].ref[op_at(c->y[1].view, (size_t)(i * D + k))] = x[k];
    }
}

// --- swiglu: x rows [gate | up] (N,2F), y (N,F) ---

static void swiglu_setup(OpCase *c) {
    int N = c->d[0], F = c->d[1];
    op_rows(&c->x[0], "gate", N, F, 2 * F);
    op_view(&c->x[0], "up", (size_t)F, N, 1, F, 2 * F, F);
    c->x[0].spread = c->d[2];
    op_rows(&c->y[0], "y", N, F, F);
    op_error(&c->y[0], 16, OP_TINY);
    op_error(&c->dx[0], 16, 8 * c->d[2]); // 1 + g (1 - p) cancels for some g
    c->max_of_y = c->max_of_dx = true;
}
static void swiglu_reference(OpCase *c) {
    for (int i = 0, F = c->d[1]; i < c->d[0] * F; i++) {
        double g = c->x->ref[i / F * 2 * F + i % F], u = c->x->ref[i / F * 2 * F + F + i % F];
        c->y->ref[i] = g / (1 + exp(-g)) * u;
    }
}

// --- cross_entropy: x logits (N,V) with row stride Vp, y losses (N), which are added to ---

static void cross_entropy_setup(OpCase *c) {
    int N = c->d[0], V = c->d[1];
    op_index(c, N, V);
    op_rows(&c->x[0], "logits", N, V, c->d[2]);
    c->x[0].spread = 8;
    op_statistics(&c->y[0], "losses", 1, N, 4, 4 + error_of_sum(V));
    c->y[0].view->adds = true;
    c->length = V, c->dloss = 0.375;
    // the exponent's own rounding, and the difference to 1 at the target
    op_error(&c->dx[0], 16 + 16 + error_of_sum(V), 2 * c->dloss * error_of_sum(V) / 4);
}
static void cross_entropy_reference(OpCase *c) {
    for (int n = 0; n < c->d[0]; n++) {
        const double *x = c->x->ref + n * c->d[2];
        double sum = 0;
        for (int v = 0; v < c->d[1]; v++) sum += exp(x[v]);
        c->y->ref[n] = log(sum) - x[c->index[n]];
    }
}

static const struct {
    const char *name, *dims;
    void (*setup)(OpCase *); // sets the views, and all other fields that are not zero, from the dimensions
    void (*reference)(OpCase *);
} op_kinds[OP_KIND_COUNT] = {
    {"embedding", "N V C", embedding_setup, embedding_reference},
    {"rmsnorm", "N C 1/scale add", rmsnorm_setup, rmsnorm_reference},
    {"matmul", "N IC OC ldy add", matmul_setup, matmul_reference},
    {"rope", "B T heads D ldx first", rope_setup, rope_reference},
    {"attention", "B T NQ NKV D DV maps padding add_dv=1,documents=2 first no_lse window", attention_setup,
     attention_reference},
    {"attention of two sets", "B T NQ NKV D DV maps padding window", attention_sets_setup, attention_sets_reference},
    {"attention with sinks", "B T NQ NKV D DV learned padding", sink_setup, sink_reference},
    {"diff_combine", "N NH D ldl signals noise factor", diff_combine_setup, diff_combine_reference},
    {"lambda_exp", "D count layer", lambda_exp_setup, lambda_exp_reference},
    {"lambda_learned", "numbers N NH", lambda_learned_setup, lambda_learned_reference},
    {"fill", "count 8*value", fill_setup, fill_reference},
    {"scale_inplace", "count 10*factor", scale_setup, scale_reference},
    {"accumulate", "count add", accumulate_setup, accumulate_reference},
    {"cache_store", "B T capacity width ld first,NULL=-1", cache_store_setup, cache_store_reference},
    {"cache_load", "first count capacity width", cache_load_setup, cache_load_reference},
    {"attention_decode", "B NQ NKV D DV maps padding capacity first no_lse", decode_setup, decode_reference},
    {"quantize_inplace", "N columns ld bits whole", quantize_setup, quantize_reference},
    {"attention_quantized", "B T NQ NKV D DV maps padding documents bits window", attention_quantized_setup,
     attention_quantized_reference},
    {"gate", "N heads D ldg width", gate_setup, gate_reference},
    {"exclusive", "N heads NKV D ldv", exclusive_setup, exclusive_reference},
    {"head_norm", "N heads D ld ldk,NULL=0 1/scale", head_norm_setup, head_norm_reference},
    {"swiglu", "N F scale", swiglu_setup, swiglu_reference},
    {"cross_entropy", "N V Vp special", cross_entropy_setup, cross_entropy_reference},
};

// The layout of a case; data and ref are NULL.
static inline void op_describe(OpCase *c, OpKindName kind, const int *d) {
    memset(c, 0, sizeof(*c));
    c->kind = kind;
    c->d = d;
    c->length = 1;
    for (int i = 0; i < OP_TENSORS; i++) c->x[i].spread = c->dx[i].spread = c->y[i].spread = 1;
    op_kinds[kind].setup(c);
    for (int i = 0; i < OP_TENSORS; i++) {
        memcpy(c->dx[i].view, c->x[i].view, sizeof(c->x[i].view));
        c->dx[i].views = c->x[i].constant ? 0 : c->x[i].views;
        c->dx[i].count = c->x[i].count;
    }
}
#include "operation_table.h"
#endif
