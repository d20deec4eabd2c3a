/*
operation.h: the types of the catalogue of operations (catalogue.h): a case of an operation and its tensors.
*/
#pragma once
#include "../../llmc/experts/mlp_kinds.h"
#include "../../llmc/model/variants.h"
#include "../../llmc/experts/routing.h"
#include "../harness.h"

enum { OP_DIMS = 12, OP_VIEWS = 3, OP_TENSORS = 5 };
#define OP_EPS 1e-5      // of rmsnorm
#define OP_THETA 10000.0 // of rope
#define OP_TINY 1e-20    // times 2^-24: a sigmoid less than 2^-125, which the device may take for 0

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
static inline double error_of_product(double length) { return 12 + 1.5 * length; }

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
    double spread;    // values, or the previous ones with add, are uniform in (-spread, spread)
    double low, high; // where high > 0, an input is uniform in (low, high); CUDA: also an output that a backward reads
    double step;      // an input is a multiple of it, except where finite differences are taken
    Error error;      // of CUDA against C, as an output
    double rounded_terms; // besides error, in roundings to storage: terms of a sum that CUDA rounds
    bool error_grows;     // with the largest value of the tensor
    void *data;           // of the implementation under test
    double *ref;          // engine.h: input or output of the definition
} OpTensor;

typedef enum {
    OP_EMBEDDING,
    OP_RMSNORM,
    OP_MATMUL,
    OP_LINEAR_FP8,
    OP_ROPE,
    OP_ATTENTION,
    OP_ATTENTION_SETS,
    OP_SINKS,
    OP_DIFF_COMBINE,
    OP_DIFF_ATTENTION,
    OP_LAMBDA_EXP,
    OP_LAMBDA_LEARNED,
    OP_FILL,
    OP_SCALE,
    OP_ADD_TO_SUM,
    OP_CACHE_STORE,
    OP_CACHE_LOAD,
    OP_DECODE,
    OP_GATE,
    OP_HEAD_NORM,
    OP_SWIGLU,
    OP_CROSS_ENTROPY,
    OP_RESIDUAL_RMSNORM,
    OP_SINK,
    OP_ADAMW,
    OP_MUON_DIRECTION,
    OP_MUON_ORTHOGONALIZE,
    OP_MUON_UPDATE,
    OP_SUM_OF_SQUARES,
    OP_ROUTER,
    OP_ROUTER_TOTALS,
    OP_ROUTER_BALANCE,
    OP_EXPERT_GROUP,
    OP_EXPERT_GATHER,
    OP_EXPERT_SWIGLU,
    OP_EXPERT_LINEAR,
    OP_EXPERT_LINEAR_FP8,
    OP_KIND_COUNT
} OpKindName;

typedef struct {
    int B, T, first, NQ, NKV, D, DV, maps, ld, ldo, window;
} OpAttention;

typedef struct {
    OpKindName kind;
    const int *d;                           // dimensions, in the order of OpKind.dims
    char what[240];                         // name and dimensions, for messages
    OpTensor x[OP_TENSORS], dx[OP_TENSORS]; // inputs and their gradients
    OpTensor y[OP_TENSORS];                 // the output, and what else the backward reads
    const void *dy;                         // with the layout of y[0]
    int in_place;                           // so many y[i] are x[i] at first, and dx[0] is dy
    bool exact;                             // sums of whole numbers have no rounding error
    int integers;                           // inputs are whole numbers up to this: exact before rounding
    bool no_backward, threads_change_sums;
    bool max_of_y, max_of_dx;             // the operation also computes the largest magnitude of y[0], or of dx[0]
    uint32_t *max;                        // of the implementation under test: absmax_t; NULL: it is not asked for
    bool fp8;                             // the operands x[0], x[1] and dy are rounded to FP8 (op_prepare_fp8)
    void *copy;                           // of the weights x[1], in FP8; NULL: the operands are rounded already
    uint32_t *operand_max[2];             // the largest magnitudes of x[0] and of dy
    double length;                        // of the longest sum
    long double loss;                     // that the definition adds to sum(dy * y)
    bool continuous;                      // finite differences are taken
    int add_tensor, add_view;             // x[add_tensor - 1].view[add_view] may be added to, or not; 0: no choice
    double dloss;                         // not 0: dx[0] is x[0] at first, and cleared between the rows
    int *index, index_count, index_limit; // tokens, targets or positions below the limit
    bool documents;                       // index has the first key of each row
    int max_experts;                      // not 0: index has the experts of N tokens, K of this many each
    bool grouped;                         // and how they are grouped
    OpAttention a;
} OpCase;

// The tensors of the implementation under test, as its twin takes them.
#define OP_X(i) ((floatX *)c->x[i].data)
#define OP_Y(i) ((floatX *)c->y[i].data)
#define OP_REAL(i) ((real *)c->x[i].data)
#define OP_STAT(i) ((real *)c->y[i].data)
#define OP_DX(i) ((floatX *)c->dx[i].data)
#define OP_DW(i) ((grad_t *)c->dx[i].data) // the gradient of a parameter
#define OP_DY ((const floatX *)c->dy)
#define OP_MEASURED_Y activation(OP_Y(0), c->max)
#define OP_MEASURED_DX activation(OP_DX(0), c->max)
#define OP_OPERAND_X activation(OP_X(0), c->operand_max[0])
#define OP_OPERAND_DY activation(OP_DY, c->operand_max[1])

// What one call moves and computes, as its contract states, and the workspace that it asks for. 0: not stated, or none.
typedef struct {
    size_t bytes;
    double flops;
    size_t workspace;
} OpCost;
static inline OpCost op_cost(size_t bytes, double flops, size_t workspace) {
    OpCost cost = {bytes, flops, workspace};
    return cost;
}

// The numbers of an update, of which the cases of adamw name one.
typedef struct {
    double grad_scale, lr, beta1, beta2, eps, weight_decay;
} AdamwNumbers;
static const AdamwNumbers adamw_numbers[] = {
    {0.5, 1e-2, 0.9, 0.95, 1e-8, 0.1},  // a scale below 1, as clipping makes it
    {1, 1e-3, 0.9, 0.95, 1e-8, 0},      // neither clipped nor decayed
    {0.37, 1e-2, 0.9, 0.95, 1e-8, 0.1}, // a scale that rounds
    {1, 1e-2, 0.9, 0.999, 0.5, 0.1},    // eps as large as the gradients: it stands outside the root
    {8, 1e-2, 0, 0.5, 1e-8, 3},         // no momentum, a decay that shows
};

// An operation of the catalogue.
typedef struct {
    OpKindName kind;
    const char *name, *dims;
    void (*setup)(OpCase *);     // sets the views, and all other fields that are not zero, from the dimensions
    void (*reference)(OpCase *); // the definition, in double
    void (*call)(const OpCase *), (*call_backward)(const OpCase *); // NULL: there is no backward
    OpCost (*cost)(const OpCase *, bool backward);                  // NULL: not stated
} OpKind;

#define OP_FORWARD(name) name##_setup, name##_reference, name##_call, NULL
#define OP_BOTH_WAYS(name) name##_setup, name##_reference, name##_call, name##_call_backward
#define OP_COUNT(list) (int)(sizeof(list) / sizeof(list[0]))

// One engine only: the shape is too slow in the other, or means nothing there.
typedef enum { BOTH, C_ONLY, CUDA_ONLY } OpEngines;
typedef struct {
    OpKindName kind;
    int d[OP_DIMS]; // in the order of OpKind.dims
    OpEngines engines;
    const char *why;
} OpRow;

// The operation whose cases are those of `kind`: the operations of a router, and of its experts, have the same ones.
static inline OpKindName op_cases_of(OpKindName kind) {
    bool grouped = kind == OP_EXPERT_GATHER || kind == OP_EXPERT_SWIGLU || kind == OP_EXPERT_LINEAR;
    return grouped ? OP_EXPERT_GROUP : kind == OP_ROUTER_TOTALS ? OP_ROUTER : kind;
}

// A model and a micro-batch. The fused rows [q | k | v | lambda] have the row stride ld.
typedef struct {
    int B, T, L, C, F, NH, NKV, D, V, Vw, Vp; // Vw: rows of the LM head that are computed
    int NQ, QD, rotated, width, ld;           // query heads, their width, the heads that rope rotates, a fused row
    int E, K, FE;                             // experts, 0: none
    int logit_rows, update_rows;              // rows of logits at a time; of width C that one update changes
} OpModel;

typedef struct {
    OpKindName kind;
    const char *what; // which of several shapes; empty: the only one
    int d[OP_DIMS];
    double calls[2]; // in a step: forward, backward; 0: in no step of diff_v2; -1: it is that of another row
} OpSize;
enum { OP_SIZES = 36 };

// The names and values of the dimensions.
static inline void op_shape_text(char *text, size_t size, const char *dims, const int *d, const char *joined) {
    size_t used = 0;
    for (text[0] = 0; *dims && used < size; d++) {
        int length = (int)strcspn(dims, " ");
        used += (size_t)snprintf(text + used, size - used, "%s%.*s%s%d", used ? " " : "", length, dims, joined, *d);
        dims += length + (dims[length] == ' ');
    }
}

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
static inline double op_start(size_t i) { return (double)(i * 37 % 64) / 16 - 2; } // what "+=" adds to in the C engine
static void op_index(OpCase *c, int count, int limit) { c->index_count = count, c->index_limit = limit; }
// K different experts for each of N tokens, then the places. skew 0: any; 1: the same for all tokens; 2: only even
// numbers, if there are enough; 3: the first K for a whole tile of tokens, then for each token the K that follow.
static inline void op_fill_experts(const OpCase *c, int *experts, TestRandom *random) {
    enum { TILE = 128, MOST = 1024 }; // of rows of the grouped product in CUDA
    const int N = c->d[0], E = c->d[2], K = c->d[3], R = N * K, skew = c->grouped ? c->d[5] : 0;
    const bool even = skew == 2 && 2 * K <= E;
    int order[MOST], *starts = experts + R, *entries = starts + E + 1, *places = entries + R;
    assert(E <= MOST);
    for (int n = 0; n < N; n++) {
        for (int e = 0; e < E; e++) order[e] = even ? 2 * e % E : e;
        for (int k = 0; k < K; k++) {
            int other = k, choices = even ? (E + 1) / 2 : E;
            if (skew == 3) order[k] = n < TILE ? k : (K * (n - TILE + 1) + k) % E;
            else if (skew != 1) other += test_random_int(random, choices - k);
            int e = order[other];
            order[other] = order[k], order[k] = e;
            experts[n * K + k] = e;
        }
    }
    if (!c->grouped) return;
    for (int e = 0, p = 0; e <= E; e++) {
        starts[e] = p;
        for (int i = 0; i < R; i++)
            if (experts[i] == e) entries[p] = i, places[i] = p++;
    }
}
static inline void op_fill_index(const OpCase *c, int *index, TestRandom *random) {
    if (c->max_experts) {
        op_fill_experts(c, index, random);
        return;
    }
    for (int n = 0; n < c->index_count && !c->documents; n++) index[n] = test_random_int(random, c->index_limit);
    if (c->kind == OP_EMBEDDING) // one token that occurs often
        for (int n = 0; n < c->index_count; n += 3) index[n] = c->index_limit / 2;
    if (c->index_limit) index[c->index_count - 1] = c->index_limit - 1;
    for (int n = 0, start = 0, T = c->a.T; n < c->index_count && c->documents; n++) {
        if (n % T == 0) start = 0;
        bool begins = n % T == T / 2 || n % T > T - 3; // the last ones have one row
        if (begins || test_random_int(random, min_int(40, T / 4 + 2)) == 0) start = n % T;
        index[n] = start;
    }
}
// Element i of input t, before it is rounded.
static inline double op_input(const OpCase *c, int t, size_t i, TestRandom *random) {
    const OpTensor *x = &c->x[t];
    double uniform = test_random_real(random);
    if (c->kind == OP_ADAMW && t >= 2 && i == 0 && x->count > 1) return 0; // moves nothing and divides nothing by 0
    if (c->kind == OP_ROUTER && t == 3 && c->d[4] != 1) return NAN;        // loads that are not read
    if (c->integers) return floor((uniform + 1) / 2 * (2 * c->integers + 1)) - c->integers;
    double value = x->high > 0 ? x->low + (x->high - x->low) * fabs(uniform) : x->spread * uniform;
    if (c->kind == OP_EXPERT_LINEAR_FP8 && t == 1)
        value = ldexp(value, (int)(i / (size_t)x->view->width) % 5); // by expert
    return x->step > 0 && !c->continuous ? rint(value / x->step) * x->step : value;
}
// The error of a product of operands in FP8 with `length` terms below 1: of fp32 sums and of the scales. On a GPU also
// of partial sums: Hopper's tensor cores keep 14 bits of them (DeepSeek-V3 technical report, section 3.3.2).
static inline void op_error_fp8(OpTensor *t, double length, double largest) {
#ifdef CUDA_ON_CPU
    op_error(t, 4, largest * error_of_product(length));
#else
    op_error(t, 4, largest * (error_of_product(length) + 0x1p10 * length));
#endif
}
// Tokens that differ, of those that an embedding reads.
static inline int op_distinct(const OpCase *c) {
    bool *seen = (bool *)checked_calloc((size_t)c->index_limit, sizeof(bool));
    int distinct = 0;
    for (int n = 0; n < c->index_count; n++) distinct += !seen[c->index[n]], seen[c->index[n]] = true;
    free(seen);
    return distinct;
}
