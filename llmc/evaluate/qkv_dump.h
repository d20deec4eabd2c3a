/*
qkv_dump.h: --dump-qkv FILE: what the attention of each layer reads and computes on validation windows, from which
scripts/lab/probe.py computes maps and rounding errors.

  parts     maps: the first MAP_TOKENS tokens of the first QKV_WINDOWS windows; rows: the first QKV_TOKENS tokens of the
            first QKV_ROW_WINDOWS. Windows come in batches P = 0, 1, .. of --batch-size
  file      safetensors. counts [V]: how often each token occurs in whole windows. key_windows [L]: keys that a row of a
            layer attends to, up to its own; 0: all. groups [3]: key sets, and signal and noise heads of a group;
            without noise heads there are no pairs. For each part and batch PART.P.tokens [B,T], and for each layer
            PART.P.layer.L. and
              q [B,T,NQ,D], k [B,T,NKV sets,D], lse [NQ,B,T]; query head i reads key set i % sets
              s [B,T,OH]: the factor of the noise head, of pairs
            and of rows also
              v [B,T,NKV,DV]; s_rounded [B,T,OH]: the factor of lambda rounded to bf16
              heads [B,T,NQ,DV] and, of pairs, combined [B,T,OH,DV]: as stored, only by a bf16 program
  dtypes    F32; of counts, s and s_rounded F64
  one process, without --doc-mask, as --eval
*/
#pragma once
#include "../base/dtype.h"
#include "evaluation_attention.h"

enum { QKV_WINDOWS = 64, QKV_ROW_WINDOWS = 4, QKV_TOKENS = 256, QKV_OF_LAYER = 8 };

typedef struct {
    const EvaluationModel *model;
    SafeTensorsWriter *writer;
    SafeTensorSpec *specs;
    int count, next; // tensors, and the one that is written next
    int windows, T;  // of the running forward
    bool rows;       // the part
} QkvDump;

// The tensor after those that are described so far; the last dimensions may be 0.
static inline void qkv_describe(QkvDump *d, const char *name, DType dtype, int a, int b, int c, int e) {
    SafeTensorSpec *s = &d->specs[d->count++];
    const int shape[] = {a, b, c, e};
    FORMAT(s->name, "%s", name);
    s->dtype = dtype;
    for (s->ndim = 0; s->ndim < 4 && shape[s->ndim]; s->ndim++) s->shape[s->ndim] = (size_t)shape[s->ndim];
}

// The tensors of a layer, in the order in which qkv_visit writes them.
static inline void qkv_describe_layer(QkvDump *d, const char *part, int batch, int l, int B, int T) {
    const ModelPlan *plan = d->model->plan;
    const AttentionDims *a = plan_dims(plan, l);
    const bool pairs = a->groups.noise > 0, stored = sizeof(floatX) == 2;
    const int sets = plan->config.attention->key_sets;
    const struct {
        const char *name;
        bool written;
        DType dtype;
        int shape[4];
    } list[] = {{"q", true, DTYPE_F32, {B, T, a->NQ, a->QD}},
                {"k", true, DTYPE_F32, {B, T, a->NV * sets, a->QD}},
                {"lse", true, DTYPE_F32, {a->NQ, B, T, 0}},
                {"s", pairs, DTYPE_F64, {B, T, a->OH, 0}},
                {"v", d->rows, DTYPE_F32, {B, T, a->NV, a->DV}},
                {"s_rounded", d->rows && pairs, DTYPE_F64, {B, T, a->OH, 0}},
                {"heads", d->rows && stored, DTYPE_F32, {B, T, a->NQ, a->DV}},
                {"combined", d->rows && stored && pairs, DTYPE_F32, {B, T, a->OH, a->DV}}};
    char name[128];
    for (size_t i = 0; i < sizeof(list) / sizeof(list[0]); i++) {
        FORMAT(name, "%s.%d.layer.%d.%s", part, batch, l, list[i].name);
        if (list[i].written)
            qkv_describe(d, name, list[i].dtype, list[i].shape[0], list[i].shape[1], list[i].shape[2],
                         list[i].shape[3]);
    }
}

static inline void qkv_write(QkvDump *d, const void *values, DType dtype, size_t count) {
    assert(count == safetensors_spec_elements(&d->specs[d->next]));
    safetensors_write(d->writer, d->next++, 0, values, dtype, count);
}

// `heads` heads of `width` numbers in each of N rows of ld numbers, packed.
static inline void qkv_write_heads(QkvDump *d, const floatX *from, size_t N, int heads, int width, int ld) {
    floatX *packed = (floatX *)checked_calloc(N * (size_t)(heads * width), sizeof(floatX));
    for (size_t n = 0; n < N; n++)
        memcpy(packed + n * (size_t)(heads * width), from + n * (size_t)ld, (size_t)(heads * width) * sizeof(floatX));
    qkv_write(d, packed, DTYPE_OF(floatX), N * (size_t)(heads * width));
    free(packed);
}

static inline void qkv_write_lse(QkvDump *d, const HostAttention *m) {
    size_t T = (size_t)m->shape.T, B = (size_t)m->shape.B, NQ = (size_t)m->shape.NQ, sets = (size_t)m->key_sets;
    real *packed = (real *)checked_calloc(NQ * sets * B * T, sizeof(real));
    for (size_t i = 0; i < NQ * sets; i++)
        for (size_t b = 0; b < B; b++)
            memcpy(packed + (i * B + b) * T, m->lse + i % sets * lse_set_stride(m->shape) + (b * NQ + i / sets) * T,
                   T * sizeof(real));
    qkv_write(d, packed, DTYPE_OF(real), NQ * sets * B * T);
    free(packed);
}

static inline void qkv_write_factors(QkvDump *d, const HostAttention *m, bool rounded) {
    int T = m->shape.T, heads = maps_output_heads(m), count = m->shape.B * T * heads;
    double *s = (double *)checked_calloc(count, sizeof(double));
    for (int i = 0; i < count; i++) {
        double l = (double)m->lambda[(size_t)(i / heads) * (size_t)m->ldl + (size_t)(i % heads)];
        s[i] = factor_of(rounded ? half_to_double(double_to_half(l, 8), 8) : l, m->factor);
    }
    qkv_write(d, s, DTYPE_F64, (size_t)count);
    free(s);
}

static inline void qkv_write_stored(QkvDump *d, const floatX *rows, size_t count) {
    floatX *host = (floatX *)checked_calloc(count, sizeof(floatX));
    buffer_download(host, rows, count * sizeof(floatX));
    qkv_write(d, host, DTYPE_OF(floatX), count);
    free(host);
}

// Writes a layer of the batch, right after its forward.
static inline void qkv_visit(void *data, int l) {
    QkvDump *d = (QkvDump *)data;
    const ModelPlan *plan = d->model->plan;
    const AttentionDims *a = plan_dims(plan, l);
    const LayerActivations *acts = &d->model->acts->layers[l];
    const bool pairs = a->groups.noise > 0, stored = sizeof(floatX) == 2;
    KeySet s = key_set(plan, l, 0, d->windows, d->T, 0);
    size_t N = (size_t)d->windows * d->T;
    LayerOnHost host = layer_to_host(plan, acts, l, s);
    const HostAttention *m = &host.attention;
    qkv_write_heads(d, m->q, N, a->NQ, a->QD, s.shape.ldq);
    qkv_write_heads(d, m->k, N, a->NV * m->key_sets, a->QD, s.shape.ldkv);
    qkv_write_lse(d, m);
    if (pairs) qkv_write_factors(d, m, false);
    if (d->rows) qkv_write_heads(d, host.kv + s.v, N, a->NV, a->DV, s.shape.ldkv);
    if (d->rows && pairs) qkv_write_factors(d, m, true);
    if (d->rows && stored) qkv_write_stored(d, acts->heads, N * (size_t)a->NQ * a->DV);
    if (d->rows && stored && pairs) qkv_write_stored(d, acts->combined, N * (size_t)a->OH * a->DV);
    layer_on_host_free(&host);
}

static const char *const qkv_parts[] = {"maps", "rows"};
static inline int qkv_part_windows(int part, int windows) {
    static const int most[] = {QKV_WINDOWS, QKV_ROW_WINDOWS};
    return min_int(windows, most[part]);
}
static inline int qkv_part_tokens(int part, int T) {
    static const int most[] = {MAP_TOKENS, QKV_TOKENS};
    return min_int(T, most[part]);
}

static inline void qkv_describe_all(QkvDump *d, int windows) {
    const ModelPlan *plan = d->model->plan;
    char name[128];
    qkv_describe(d, "counts", DTYPE_F64, plan->config.V, 0, 0, 0);
    qkv_describe(d, "key_windows", DTYPE_F32, plan->config.L, 0, 0, 0);
    qkv_describe(d, "groups", DTYPE_F32, 3, 0, 0, 0);
    for (int part = 0; part < 2; part++) {
        int all = qkv_part_windows(part, windows), T = qkv_part_tokens(part, plan->T);
        d->rows = part == 1;
        for (int done = 0, batch = 0; done < all; done += plan->B, batch++) {
            int B = min_int(plan->B, all - done);
            FORMAT(name, "%s.%d.tokens", qkv_parts[part], batch);
            qkv_describe(d, name, DTYPE_F32, B, T, 0, 0);
            for (int l = 0; l < plan->config.L; l++) qkv_describe_layer(d, qkv_parts[part], batch, l, B, T);
        }
    }
}

static inline void qkv_write_part(QkvDump *d, DataLoader *val, int part, int windows) {
    const ModelPlan *plan = d->model->plan;
    int all = qkv_part_windows(part, windows), T = d->T = qkv_part_tokens(part, plan->T);
    int64_t *ignored = (int64_t *)checked_calloc(plan->config.V, sizeof(int64_t));
    int *tokens = evaluation_windows(d->model, val, all, T, ignored);
    float *as_floats = (float *)checked_calloc((size_t)all * T, sizeof(float));
    for (int i = 0; i < all * T; i++) as_floats[i] = (float)tokens[i];
    d->rows = part == 1;
    for (int done = 0; done < all; done += plan->B) {
        d->windows = min_int(plan->B, all - done);
        qkv_write(d, as_floats + (size_t)done * T, DTYPE_F32, (size_t)d->windows * T);
        d->model->forward(d->model->model, tokens + (size_t)done * T, d->windows, T, qkv_visit, d);
    }
    free(ignored);
    free(tokens);
    free(as_floats);
}

// windows: those of the validation; the first of them are read.
static inline void dump_qkv(const EvaluationModel *m, DataLoader *val, int windows, const char *path) {
    const ModelPlan *plan = m->plan;
    const ModelConfig *c = &plan->config;
    OutputFile output;
    QkvDump d;
    memset(&d, 0, sizeof(d));
    d.model = m;
    size_t most = 3 + (size_t)(QKV_WINDOWS + QKV_ROW_WINDOWS) * (1 + (size_t)c->L * QKV_OF_LAYER);
    d.specs = (SafeTensorSpec *)checked_calloc(most, sizeof(SafeTensorSpec));
    qkv_describe_all(&d, windows);
    d.writer = safetensors_begin(output_open(&output, path), path, d.specs, d.count);
    int64_t *counts = (int64_t *)checked_calloc(c->V, sizeof(int64_t));
    double *numbers = (double *)checked_calloc(max_int(c->V, c->L), sizeof(double));
    free(evaluation_windows(m, val, qkv_part_windows(0, windows), 1, counts));
    for (int v = 0; v < c->V; v++) numbers[v] = (double)counts[v];
    qkv_write(&d, numbers, DTYPE_F64, (size_t)c->V);
    for (int l = 0; l < c->L; l++) numbers[l] = key_set(plan, l, 0, 1, plan->T, 0).shape.window;
    qkv_write(&d, numbers, DTYPE_F64, (size_t)c->L);
    const double groups[3] = {(double)c->attention->key_sets, (double)plan->dims.groups.signals,
                              (double)plan->dims.groups.noise};
    qkv_write(&d, groups, DTYPE_F64, 3);
    for (int part = 0; part < 2; part++) qkv_write_part(&d, val, part, windows);
    safetensors_finish(d.writer);
    output_publish(&output);
    free(counts);
    free(numbers);
    free(d.specs);
}
