/*
activation_dump.h: --dump-activations FILE: the activations of one forward of the first B*T tokens of the training
shards, N = B*T rows, from which `python3 scripts/lab run coordinates` computes how they depend on the shape.

  file   safetensors, F32: of each layer L layer.L. and q, k (rotated), v, lambda, gate: what the
         projections of norm1 give, as far as the layer has them; attention, the input of o_proj [N,NH*D]; x_mid [N,C],
         the residual stream after attention; gate_up [N,2F], hidden [N,F], router [N,E]; x [N,C], the residual stream
         after the layer. Then embedded [N,C], norm_final [N,C] and logits [N,V]
  one process, without --doc-mask
*/
#pragma once
#include "../checkpoint/safetensors_writer.h"
#include "../data/data_identity.h"
#include "evaluation_model.h"

enum { DUMPED_OF_LAYER = 11 };

// `columns` columns of rows of ld elements.
typedef struct {
    const char *name;
    const void *from;
    int columns, ld;
    bool is_real; // elements are `real`, not floatX
} DumpedRows;

typedef struct {
    const EvaluationModel *model;
    SafeTensorsWriter *writer;
    int next; // tensor
    size_t N;
} ActivationDump;

static inline int dumped_rows(const ModelPlan *plan, const LayerActivations *a, int l, DumpedRows *out) {
    const AttentionDims *d = plan_dims(plan, l);
    const MlpDims mlp = mlp_dims(&plan->config, l);
    int C = plan->config.C, width = d->OH * d->DV, ld = d->fused_ld, count = 0;
    const DumpedRows rows[DUMPED_OF_LAYER] = {
        {"q", a->fused, d->q_rows, ld, false},
        {"k", a->fused + d->k_at, d->k_rows, ld, false},
        {"v", a->fused + d->v_at, d->v_rows, ld, false},
        {"lambda", a->fused + d->lambda_at, d->lambda_rows, ld, false},
        {"gate", a->fused + d->gate_at, d->gate_rows, ld, false},
        {"attention", a->attn_out, width, width, false},
        {"x_mid", a->x_mid, C, C, false},
        {"gate_up", a->gate_up, 2 * mlp.width, 2 * mlp.width, false},
        {"hidden", a->hidden, mlp.width, mlp.width, false},
        {"router", a->router_logits, mlp.experts, mlp.experts, true},
        {"x", a->x_out, C, C, false},
    };
    for (int i = 0; i < DUMPED_OF_LAYER; i++)
        if (rows[i].columns) out[count++] = rows[i];
    return count;
}

// Writes the rows first .. first+N-1 of the next tensor.
static inline void dump_rows(ActivationDump *d, const DumpedRows *r, size_t first, size_t N) {
    size_t size = r->is_real ? sizeof(real) : sizeof(floatX), row = (size_t)r->columns * size;
    size_t bytes = ((N - 1) * (size_t)r->ld + (size_t)r->columns) * size, at = first * (size_t)r->columns;
    char *host = (char *)checked_calloc(bytes, 1);
    buffer_download(host, r->from, bytes);
    for (size_t n = 1; n < N; n++) memmove(host + n * row, host + n * (size_t)r->ld * size, row);
    safetensors_write(d->writer, d->next, at, host, r->is_real ? DTYPE_OF(real) : DTYPE_OF(floatX), N * r->columns);
    free(host);
}

static inline void dump_layer(void *data, int l) {
    ActivationDump *d = (ActivationDump *)data;
    DumpedRows rows[DUMPED_OF_LAYER];
    int count = dumped_rows(d->model->plan, &d->model->acts->layers[l], l, rows);
    for (int i = 0; i < count; i++, d->next++) dump_rows(d, &rows[i], 0, d->N);
}

static inline void dump_logits(ActivationDump *d) {
    const ModelPlan *plan = d->model->plan;
    floatX *logits = d->model->acts->logits;
    DumpedRows rows = {"logits", logits, plan->config.V, plan->Vp, false};
    for (size_t n = 0; n < d->N; n += (size_t)plan->logit_rows) {
        size_t count = min_size((size_t)plan->logit_rows, d->N - n);
        linear_forward(logits, d->model->acts->norm_final + n * plan->config.C, d->model->head, (int)count);
        dump_rows(d, &rows, n, count);
    }
}

static inline void dump_describe(SafeTensorSpec *s, size_t N, int columns, const char *name) {
    FORMAT(s->name, "%s", name);
    s->dtype = DTYPE_F32;
    s->ndim = 2;
    s->shape[0] = N, s->shape[1] = (size_t)columns;
}

static inline void dump_activations(const EvaluationModel *m, DataLoader *train, const char *path) {
    const ModelPlan *plan = m->plan;
    const ModelConfig *c = &plan->config;
    ActivationDump d = {m, NULL, 0, (size_t)plan->B * plan->T};
    DumpedRows rows[DUMPED_OF_LAYER], ends[] = {{"embedded", m->acts->embedded, c->C, c->C, false},
                                                {"norm_final", m->acts->norm_final, c->C, c->C, false}};
    SafeTensorSpec *specs = (SafeTensorSpec *)checked_calloc(3 + (size_t)c->L * DUMPED_OF_LAYER, sizeof(*specs));
    OutputFile output;
    char name[64];
    int count = 0;
    for (int l = 0; l < c->L; l++)
        for (int i = 0, of_layer = dumped_rows(plan, &m->acts->layers[l], l, rows); i < of_layer; i++) {
            FORMAT(name, "layer.%d.%s", l, rows[i].name);
            dump_describe(&specs[count++], d.N, rows[i].columns, name);
        }
    for (int i = 0; i < 2; i++) dump_describe(&specs[count++], d.N, c->C, ends[i].name);
    dump_describe(&specs[count++], d.N, c->V, "logits");
    d.writer = safetensors_begin(output_open(&output, path), path, specs, count);
    int *tokens = (int *)checked_calloc(d.N, sizeof(int));
    dataloader_read_first_tokens(train, tokens, d.N);
    m->forward(m->model, tokens, plan->B, plan->T, dump_layer, &d);
    for (int i = 0; i < 2; i++, d.next++) dump_rows(&d, &ends[i], 0, d.N);
    dump_logits(&d);
    safetensors_finish(d.writer);
    output_publish(&output);
    printf("activations of %zu tokens written to %s\n", d.N, path);
    free(tokens);
    free(specs);
}
