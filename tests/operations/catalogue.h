/*
catalogue.h: every operation, described once. A folder of llmc/ops has a case file here: shapes and rounding errors of
each operation (setup), its definition in double, its call, bytes, FLOPs and workspace; then its cases, each with the
reason for its shape, and its shapes in a step of a model. What uses them:

  engine.h               C against the definition and against finite differences of it, with several numbers of threads
  ../cuda_engine.h       CUDA against C in double, with several orders of threads and the exact workspace
  dev/bench              the time of both, beside the bytes and FLOPs

  cases   the smallest; no multiple of a vector, of a pack, of a warp or of a tile of 64; and large enough for several
          blocks. A pack is what a thread of a CUDA kernel loads at once, 16 bytes: 8 elements in bf16, 4 in fp32. Where
          tensors are small, the CUDA engine runs a case at unaligned addresses too

To add an operation, add a name to OpKindName, and to its case file a row of kinds, cases, and sizes.

There is no include guard, here and in the case files: a CUDA program includes this file once for its operations, and
within namespace twin for the C operations.
*/
#include "operation.h"

#ifdef DEVICE_OPS
enum { OP_MASTER = sizeof(floatX) == 2 }; // whether the update has master weights
#else
enum { OP_MASTER = 0 };
#endif

#include "linear.h"
#include "rows.h"
#include "gates.h"
#include "attention.h"
#include "optimizer.h"
#include "measure.h"
#include "experts.h"

static const struct {
    const OpKind *kinds;
    int kind_count;
    const OpRow *cases;
    int case_count;
    int (*sizes)(OpSize *list, const OpModel *m);
} op_tables[] = {
    {linear_kinds, OP_COUNT(linear_kinds), linear_cases, OP_COUNT(linear_cases), linear_sizes},
    {rows_kinds, OP_COUNT(rows_kinds), rows_cases, OP_COUNT(rows_cases), rows_sizes},
    {gates_kinds, OP_COUNT(gates_kinds), gates_cases, OP_COUNT(gates_cases), gates_sizes},
    {attention_kinds, OP_COUNT(attention_kinds), attention_cases, OP_COUNT(attention_cases), attention_sizes},
    {optimizer_kinds, OP_COUNT(optimizer_kinds), optimizer_cases, OP_COUNT(optimizer_cases), optimizer_sizes},
    {measure_kinds, OP_COUNT(measure_kinds), measure_cases, OP_COUNT(measure_cases), measure_sizes},
    {experts_kinds, OP_COUNT(experts_kinds), experts_cases, OP_COUNT(experts_cases), experts_sizes},
};

static inline const OpKind *op_kind(OpKindName kind) {
    const OpKind *found = NULL;
    for (int t = 0; t < OP_COUNT(op_tables); t++)
        for (int i = 0; i < op_tables[t].kind_count; i++)
            if (op_tables[t].kinds[i].kind == kind) found = &op_tables[t].kinds[i];
    assert(found);
    return found;
}
// Case number i of all tables; NULL: there are fewer.
static inline const OpRow *op_row(int i) {
    for (int t = 0; t < OP_COUNT(op_tables); i -= op_tables[t++].case_count)
        if (i < op_tables[t].case_count) return &op_tables[t].cases[i];
    return NULL;
}
// The shapes of all operations in a step of the model. Returns their number.
static inline int op_sizes(OpSize *list, const OpModel *m) {
    int count = 0;
    for (int t = 0; t < OP_COUNT(op_tables); t++) count += op_tables[t].sizes(list + count, m);
    assert(count <= OP_SIZES);
    return count;
}

// The layout of a case; data and ref are NULL.
static inline void op_describe(OpCase *c, OpKindName kind, const int *d) {
    memset(c, 0, sizeof(*c));
    c->kind = kind;
    c->d = d;
    c->length = 1;
    for (int i = 0; i < OP_TENSORS; i++) c->x[i].spread = c->dx[i].spread = c->y[i].spread = 1;
    op_kind(kind)->setup(c);
    c->no_backward = c->no_backward || !op_kind(kind)->call_backward;
    for (int i = 0; i < OP_TENSORS; i++) {
        memcpy(c->dx[i].view, c->x[i].view, sizeof(c->x[i].view));
        c->dx[i].views = c->x[i].constant ? 0 : c->x[i].views;
        c->dx[i].count = c->x[i].count;
    }
}
static inline OpCost op_cost_of(const OpCase *c, bool backward) {
    return op_kind(c->kind)->cost ? op_kind(c->kind)->cost(c, backward) : op_cost(0, 0, 0);
}
// What a layer in FP8 reads besides its operands: their largest magnitudes, and the rounded weights.
static inline void op_prepare_fp8(const OpCase *c, bool backward) {
    const OpView *x = c->x[0].view, *y = c->y[0].view;
    absmax_update(OP_OPERAND_X, x->rows, x->width, x->ld);
    if (backward) absmax_update(OP_OPERAND_DY, y->rows, y->width, y->ld);
    if (c->kind == OP_LINEAR_FP8) {
        const Linear w = op_linear(c);
        linear_copy_weight(&w);
    } else {
        const ExpertLinear w = op_expert_linear(c);
        expert_linear_copy_weights(&w);
    }
}
static inline void op_call(const OpCase *c, bool backward) {
    const OpKind *kind = op_kind(c->kind);
    (backward ? kind->call_backward : kind->call)(c);
}
// Its name as in ops.h and in the tables of the benchmarks: NAME_forward and NAME_backward, if there are two.
static inline void op_call_name(char *name, size_t size, const OpCase *c, bool backward) {
    const OpKind *kind = op_kind(c->kind);
    const char *base = kind->name, *end = "";
    if (c->kind == OP_EXPERT_GATHER) base = backward ? "expert_combine" : base;
    else if (c->dloss != 0) end = backward ? "" : " of an evaluation"; // one function computes both
    else if (c->kind == OP_RESIDUAL_RMSNORM || (kind->call_backward && c->kind != OP_SCALE))
        end = backward ? "_backward" : "_forward";
    const int word = (int)strcspn(base, " ");
    snprintf(name, size, "%.*s%s%s", word, base, end, base + word);
}
