/*
bench_operation.h: a call of an operation of tests/operations/catalogue.h at the shapes of a model, without its tensors.
Included after bench_model.h.
*/
#pragma once
#include "../../tests/operations/catalogue.h"

static OpModel op_model_of(const Model *model, int B, int T) {
    const ModelConfig *c = &model->plan.config;
    const AttentionDims *d = &model->plan.dims;
    OpModel m;
    memset(&m, 0, sizeof(m));
    m.B = B, m.T = T, m.L = c->L, m.C = c->C, m.F = c->F, m.NH = c->NH, m.NKV = c->NKV, m.D = c->D, m.V = c->V;
    m.Vw = model->plan.Vw, m.Vp = model->plan.Vp, m.NQ = d->NQ, m.QD = d->QD, m.rotated = d->NQ + d->NK;
    m.width = d->fused_width, m.ld = d->fused_ld, m.logit_rows = 4096;
    m.update_rows = (int)(min_size(model->plan.tensors.parameter_count, (size_t)1 << 28) / (size_t)c->C);
    m.E = c->E, m.K = c->K, m.FE = c->FE;
    return m;
}
// Attention of a key set of the first layer.
static OpSize attention_size(const Model *model, const char *what, int B, int T) {
    const AttentionShape s = key_set(&model->plan, 0, 0, B, T, 0).shape;
    const int sets = model->plan.config.attention->key_sets, used = (s.NQ + s.NKV) * sets * s.D + s.NKV * s.DV;
    OpSize size = {OP_ATTENTION, what, {B, T, s.NQ, s.NKV, s.D, s.DV, sets, s.ldq - used, 0, 0, 0, s.window}, {0, 0}};
    return size;
}

typedef struct {
    OpCase c;
    OpSize size;
    OpCost cost;
    bool backward, measured; // measured: there is such a call, and it is not that of another row
    int *index;              // on the host
    void *dy;
    char name[64];
} BenchOperation;

// The tensors have no data.
static void operation_describe(BenchOperation *o, const OpSize *size, bool backward) {
    OpCase *c = &o->c;
    TestRandom random = {1};
    memset(o, 0, sizeof(*o));
    o->size = *size, o->backward = backward;
    op_describe(c, size->kind, o->size.d);
    op_call_name(o->name, sizeof(o->name), c, backward);
    o->measured = !(backward && c->no_backward) && size->calls[backward] >= 0;
    if (!o->measured) return;
    if (size->kind == OP_ATTENTION) attention_prepare(op_attention_shape(c), backward, false);
    c->index = o->index = (int *)checked_calloc((size_t)c->index_count + 1, sizeof(int));
    if (c->index_count) op_fill_index(c, c->index, &random);
    for (int n = 0; n < c->index_count; n++)
        if (size->kind == OP_EMBEDDING) c->index[n] = zipf_token(random_bits(7, (uint64_t)n), c->index_limit);
        else if (size->kind == OP_DECODE || size->kind == OP_CACHE_STORE) c->index[n] = c->index_limit - 1;
    o->cost = op_cost_of(c, backward);
}
