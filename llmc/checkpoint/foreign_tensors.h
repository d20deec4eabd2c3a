/*
foreign_tensors.h: weights that other programs store under another name, or as a part of a larger tensor.

  void foreign_tensors_view(s, list)   adds to `s` the tensors of `list` that it lacks, as views of what it stores, and
                                       removes what is viewed. `list` must outlive `s`, which has its names. Exits if
                                       a stored tensor has another shape than the model implies

  tied head  The embedding is stored only as lm_head.weight.
  experts    gate_up_proj [E, 2F, C] has the rows of w1 and then of w3 of each expert, down_proj [E, C, F] all w2: a
             Mixtral as Transformers 5 holds it in memory.
*/
#pragma once
#include "../model/tensors.h"
#include "safetensors.h"

// Where another program stores a kind of tensor, if not under its name.
typedef struct {
    TensorKind kind;
    const char *name; // for a tensor of a layer, what follows "model.layers.L."
    int parts, part;  // an expert has `parts` of the same shape in the stored tensor; this is number `part`
} ForeignTensor;
static const ForeignTensor foreign_tensors[] = {
    {T_EMBED, "lm_head.weight", 1, 0},
    {T_ROUTER, "mlp.gate.weight", 1, 0},
    {T_EXPERT_GATE, "mlp.experts.gate_up_proj", 2, 0},
    {T_EXPERT_UP, "mlp.experts.gate_up_proj", 2, 1},
    {T_EXPERT_DOWN, "mlp.experts.down_proj", 1, 0},
};
enum { FOREIGN_TENSORS = sizeof(foreign_tensors) / sizeof(foreign_tensors[0]) };

static inline void shape_text(int ndim, const size_t *shape, char out[160]) {
    int at = snprintf(out, 160, "[");
    for (int d = 0; d < ndim && at < 140; d++) at += snprintf(out + at, 160 - at, "%s%zu", d ? "," : "", shape[d]);
    snprintf(out + at, 160 - at, "]");
}

// Exits unless a tensor of a file has the shape that config.json implies.
static inline void tensor_check_shape(const SafeTensors *s, const SafeTensor *t, int ndim, const size_t *shape) {
    bool same = t->ndim == ndim;
    for (int d = 0; same && d < ndim; d++) same = t->shape[d] == shape[d];
    char want[160], have[160];
    shape_text(ndim, shape, want);
    shape_text(t->ndim, t->shape, have);
    CHECK(same, "%s: tensor %s has shape %s; config.json implies %s", s->path, t->name, have, want);
}

// The tensor that has `t` as a part; NULL if the file has none.
static inline const SafeTensor *foreign_stored(const SafeTensors *s, const Tensor *t, const ForeignTensor **how) {
    for (int i = 0; i < FOREIGN_TENSORS; i++) {
        char name[120] = "";
        if (foreign_tensors[i].kind != t->row->kind) continue;
        *how = &foreign_tensors[i];
        if (t->row->per_layer) FORMAT(name, "model.layers.%d.", t->layer);
        snprintf(name + strlen(name), sizeof(name) - strlen(name), "%s", (*how)->name);
        return safetensors_find(s, name);
    }
    return NULL;
}

static inline SafeTensor foreign_view(const SafeTensors *s, const SafeTensor *stored, const Tensor *t,
                                      const ForeignTensor *how, int experts) {
    size_t whole[] = {(size_t)experts, how->parts * t->shape[0], t->shape[1]};
    bool expert = t->row->per_expert;
    tensor_check_shape(s, stored, expert ? 3 : 2, expert ? whole : t->shape);
    SafeTensor view = *stored;
    uint64_t bytes = (stored->end - stored->begin) / (uint64_t)(expert ? experts * how->parts : 1);
    view.name = t->name;
    view.ndim = t->ndim;
    memset(view.shape, 0, sizeof(view.shape));
    memcpy(view.shape, t->shape, sizeof(t->shape));
    view.count = t->count;
    view.begin += bytes * (uint64_t)(t->expert * how->parts + how->part);
    view.end = view.begin + bytes;
    return view;
}

static inline void foreign_tensors_view(SafeTensors *s, const TensorList *list) {
    SafeTensor *views = (SafeTensor *)checked_calloc((size_t)list->count, sizeof(SafeTensor));
    bool *viewed = (bool *)checked_calloc(s->count, sizeof(bool));
    int experts = 0;
    size_t count = 0, kept = 0;
    for (int i = 0; i < list->count; i++) experts = max_int(experts, list->tensors[i].expert + 1);
    for (int i = 0; i < list->count; i++) {
        const Tensor *t = &list->tensors[i];
        const ForeignTensor *how = NULL;
        const SafeTensor *stored = safetensors_find(s, t->name) ? NULL : foreign_stored(s, t, &how);
        bool untied = t->row->kind == T_EMBED && tensor_of(list, T_LM_HEAD, 0); // then they are two tensors
        if (!stored || untied) continue;
        views[count++] = foreign_view(s, stored, t, how, experts);
        viewed[stored - s->tensors] = true;
    }
    for (size_t k = 0; k < s->count; k++)
        if (!viewed[k]) s->tensors[kept++] = s->tensors[k];
    s->tensors = (SafeTensor *)realloc(s->tensors, (kept + count + 1) * sizeof(SafeTensor));
    CHECK(s->tensors != NULL, "out of memory for the tensors of %s", s->path);
    memcpy(s->tensors + kept, views, count * sizeof(SafeTensor));
    s->count = kept + count;
    safetensors_sort(s);
    free(views);
    free(viewed);
}
