/*
traffic.h: the bytes that the contracts in llmc state for an operation are those of its tensors in the catalogue, at the
shapes of a model.

A forward reads its inputs and the index, and writes its outputs; a backward reads the inputs, dy and the outputs but
the first, and writes the gradients. What is added to is read and written. traffic_exceptions has what differs, with the
reason. Both may leave out 1%: vectors of parameters and statistics of rows.
*/
#pragma once
#include "engine.h"

// How often an operation reads or writes each tensor.
typedef struct {
    double x[OP_TENSORS], y[OP_TENSORS], dx[OP_TENSORS], dy, index;
    double more; // bytes
} Traffic;

static Traffic traffic_of(const OpCase *c, bool backward) {
    Traffic t;
    memset(&t, 0, sizeof(t));
    for (int i = 0; i < OP_TENSORS; i++) t.x[i] = 1, t.y[i] = !backward || i > 0, t.dx[i] = backward;
    t.dy = backward && c->dloss == 0, t.index = 1;
    return t;
}
static void traffic_exceptions(Traffic *t, const OpCase *c, bool backward) {
    const int *d = c->d;
    const double logits = (double)product(d[0], d[2]) * FLOATX_BYTES; // of a router
    switch ((int)c->kind) {
    case OP_SCALE: // linear: a backward does not read the input
        if (backward) t->x[0] = 0;
        break;
    case OP_ROPE: // the same; each sequence reads the table
        if (backward) t->x[0] = 0;
        t->x[1] = d[0];
        break;
    case OP_EMBEDDING: // rows of the table: one per token; the gradients of tokens that occur, sorted in four passes
        t->x[0] = backward ? 0 : (double)d[0] / d[1];
        t->dx[0] = backward ? (double)op_distinct(c) / d[1] : 0;
        if (backward) t->index = 16;
        break;
    case OP_MATMUL:
    case OP_EXPERT_LINEAR: // a backward has two products, which both read dy
        if (backward) t->dy = 2;
        break;
    case OP_CROSS_ENTROPY: // a row of logits does not stay in the cache between the loss and the gradient
        if (backward) t->x[0] = 2;
        break;
    case OP_ADAMW: // with master weights, the parameters are only written; without, they are fp32
        t->x[0] = d[2] ? 0 : (double)FP32_BYTES / FLOATX_BYTES;
        t->y[0] = d[2] ? 1 : t->x[0];
        break;
    case OP_DIFF_COMBINE: // the gradient of l needs the noise heads alone
        if (backward) t->x[0] = (double)d[5] / (d[4] + d[5]);
        break;
    case OP_MUON_DIRECTION: t->x[0] = 0; break; // only written
    case OP_MUON_UPDATE:                        // as adamw
        t->x[0] = d[1] ? 0 : 1;
        break;
    case OP_HEAD_NORM: // a backward reads the input that was kept
        if (backward) t->x[0] = 0;
        break;
    case OP_ATTENTION:
    case OP_SINKS: // sum(dout * out) of each row
        if (backward) t->y[0] = 1;
        break;
    case OP_CACHE_STORE: // writes rows of the cache, whose other rows stay
        t->x[0] = 0;
        break;
    case OP_ROUTER: // the product writes logits, and the choice reads them; their gradients are written and read twice
        if (!backward) t->y[1] = 2;
        else t->more = 3 * logits;
        break;
    case OP_ROUTER_TOTALS: // reads where experts begin, not the choices
        t->index = (d[2] + 1.0) / c->index_count;
        break;
    case OP_EXPERT_GROUP: // reads the experts, which are a part of the index
        t->index = (double)product(d[0], d[3]) / c->index_count;
        break;
    case OP_EXPERT_GATHER: // linear
        if (backward) t->x[0] = 0;
        break;
    default: break;
    }
}
static double traffic_bytes(const OpTensor *tensor, double times) {
    double bytes = 0;
    for (const OpView *v = tensor->view; v < tensor->view + tensor->views; v++)
        bytes += (double)op_size(v) * (v->adds ? 2 : 1);
    return times * bytes * (tensor->type == STORED ? FLOATX_BYTES : tensor->type == FP64 ? 8 : 4);
}
static void expect_traffic(const OpSize *s, bool backward) {
    OpCase c;
    TestRandom random = {1};
    char name[64];
    op_describe(&c, s->kind, s->d);
    if (backward && c.no_backward) return;
    op_call_name(name, sizeof(name), &c, backward);
    c.index = (int *)checked_calloc((size_t)c.index_count + 1, sizeof(int));
    if (c.index_count) op_fill_index(&c, c.index, &random);
    Traffic t = traffic_of(&c, backward);
    traffic_exceptions(&t, &c, backward);
    double stated = (double)op_cost_of(&c, backward).bytes, sum = t.more + t.index * c.index_count * sizeof(int);
    for (int i = 0; i < OP_TENSORS; i++) {
        for (OpView *v = c.x[i].view; v < c.x[i].view + c.x[i].views; v++) v->adds = false; // of its gradient
        sum += traffic_bytes(&c.x[i], t.x[i]) + traffic_bytes(&c.y[i], t.y[i]) + traffic_bytes(&c.dx[i], t.dx[i]);
    }
    sum += traffic_bytes(&c.y[0], t.dy);
    EXPECT(fabs(stated / sum - 1) <= 0.01, "%s %s: the contract states %.4g bytes, the tensors have %.4g", name,
           s->what, stated, sum);
    free(c.index);
}

static void test_traffic(void) {
    const OpModel model = {8,  2048, 24, 2048, 5632, 16, 8, 128,  50257, 50257, 50304,
                           32, 128,  40, 6160, 6208, 64, 4, 1024, 4096,  50000};
    // Not: two key sets, whose bytes are those of one of the two calls; products in FP8, whose codes have one byte.
    const OpSize others[] = {
        {OP_ATTENTION, "", {8, 2048, 32, 8, 128, 128, 1, 0}, {0, 0}},
        {OP_SINKS, "", {8, 2048, 32, 8, 128, 128, 1, 0}, {0, 0}},
        {OP_LAMBDA_EXP, "", {128, 1 << 20, 3}, {0, 0}},
        {OP_LAMBDA_LEARNED, "", {1 << 20}, {0, 0}},
        {OP_FILL, "", {1 << 20, 4}, {0, 0}},
        {OP_ADD_TO_SUM, "", {1 << 20, 0}, {0, 0}},
        {OP_ADD_TO_SUM, "adds", {1 << 20, 1}, {0, 0}},
        {OP_CACHE_STORE, "", {8, 2048, 2048, 4096, 6208, 0}, {0, 0}},
        {OP_CACHE_LOAD, "", {0, 2048, 2048, 4096}, {0, 0}},
        {OP_DECODE, "", {8, 32, 8, 128, 128, 1, 0, 2048, 2047}, {0, 0}},
        {OP_ADAMW, "master", {50000, 2048, 1, 100, 0}, {0, 0}},
        {OP_EXPERT_LINEAR, "", {16384, 2048, 64, 4, 1024}, {0, 0}},
    };
    const int other_count = (int)(sizeof(others) / sizeof(others[0]));
    OpSize sizes[OP_SIZES];
    int count = op_sizes(sizes, &model);
    for (int i = 0; i < count + other_count; i++)
        for (int backward = 0; backward < 2; backward++)
            expect_traffic(i < count ? &sizes[i] : &others[i - count], backward);
}
