/*
tensors.h: the list of a model's tensors.

The table tensor_rows defines the names, shapes, order, initial values, weight decay and optimizer of all parameters.
tensor_list_build turns it into the list that allocation, initialization, the optimizer, checkpoints, gradient dumps and
tests iterate over.
*/
#pragma once
#include "parametrization.h"

// clang-format off
typedef enum {
    DIM_NONE, DIM_V, DIM_C, DIM_F, DIM_Q, DIM_K, DIM_VALUE, DIM_LAMBDA, DIM_GATE, DIM_O, DIM_SUBLN, DIM_LAMBDA_VECTOR,
    DIM_LAYER_LAMBDA, DIM_SINKS, DIM_Q_NORM, DIM_K_NORM, DIM_YOCO_NORM, DIM_YOCO_K, DIM_YOCO_V, DIM_YOCO_K_NORM,
    DIM_HEAD, DIM_EXPERTS, DIM_ROUTER_BIAS, DIM_EXPERT_F, DIM_COUNT
} Dim;
// clang-format on
// 0; 1; normal(0, 0.02); normal(0, 0.02) / sqrt(2L); normal(0, 0.1); lambda_init of the layer, or 0 before a sigmoid
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_RESIDUAL, INIT_WIDE, INIT_LAMBDA } Init;

// The optimizer of a tensor with --optimizer muon.
typedef enum { ADAMW, MUON } TensorOptimizer;

typedef struct {
    TensorKind kind;
    bool per_layer;   // in the group of a layer
    const char *name; // if per_layer, the name follows "model.layers.L."
    Dim shape[2];     // the second is DIM_NONE for a vector; a tensor with a dimension of size 0 does not exist
    Init init;
    bool decay;
    bool joined;               // stored directly after the previous tensor, as one matrix for a fused GEMM
    bool per_expert;           // one for each expert e, named "block_sparse_moe.experts.e." and `name`
    TensorOptimizer optimizer; // learning rates and the factor of the decay are the same for both
} TensorRow;

// clang-format off
static const TensorRow tensor_rows[] = {
    // kind, per_layer, name, shape, init, decay, joined, per_expert, optimizer
    {T_EMBED, false, "model.embed_tokens.weight", {DIM_V, DIM_C}, INIT_NORMAL, true, false, false, ADAMW},
    {T_YOCO_NORM, true, "model.yoco.norm.weight", {DIM_YOCO_NORM, DIM_NONE}, INIT_ONE, false, false, false, ADAMW},
    {T_YOCO_K, true, "model.yoco.k_proj.weight", {DIM_YOCO_K, DIM_C}, INIT_NORMAL, true, false, false, MUON},
    {T_YOCO_V, true, "model.yoco.v_proj.weight", {DIM_YOCO_V, DIM_C}, INIT_NORMAL, true, true, false, MUON},
    {T_YOCO_K_NORM, true, "model.yoco.k_norm.weight", {DIM_YOCO_K_NORM, DIM_NONE}, INIT_ONE, false, false, false,
        ADAMW},
    {T_NORM1, true, "input_layernorm.weight", {DIM_C, DIM_NONE}, INIT_ONE, false, false, false, ADAMW},
    {T_Q, true, "self_attn.q_proj.weight", {DIM_Q, DIM_C}, INIT_NORMAL, true, false, false, MUON},
    {T_K, true, "self_attn.k_proj.weight", {DIM_K, DIM_C}, INIT_NORMAL, true, true, false, MUON},
    {T_V, true, "self_attn.v_proj.weight", {DIM_VALUE, DIM_C}, INIT_NORMAL, true, true, false, MUON},
    {T_LAMBDA, true, "self_attn.lambda_proj.weight", {DIM_LAMBDA, DIM_C}, INIT_NORMAL, true, true, false, ADAMW},
    {T_GATE, true, "self_attn.gate_proj.weight", {DIM_GATE, DIM_C}, INIT_NORMAL, true, true, false, ADAMW},
    {T_Q_NORM, true, "self_attn.q_norm.weight", {DIM_Q_NORM, DIM_NONE}, INIT_ONE, false, false, false, ADAMW},
    {T_K_NORM, true, "self_attn.k_norm.weight", {DIM_K_NORM, DIM_NONE}, INIT_ONE, false, false, false, ADAMW},
    {T_O, true, "self_attn.o_proj.weight", {DIM_C, DIM_O}, INIT_RESIDUAL, true, false, false, MUON},
    {T_SUBLN, true, "self_attn.subln.weight", {DIM_SUBLN, DIM_NONE}, INIT_ONE, false, false, false, ADAMW},
    {T_LAMBDA_Q1, true, "self_attn.lambda_q1", {DIM_LAMBDA_VECTOR, DIM_NONE}, INIT_WIDE, false, false, false, ADAMW},
    {T_LAMBDA_K1, true, "self_attn.lambda_k1", {DIM_LAMBDA_VECTOR, DIM_NONE}, INIT_WIDE, false, false, false, ADAMW},
    {T_LAMBDA_Q2, true, "self_attn.lambda_q2", {DIM_LAMBDA_VECTOR, DIM_NONE}, INIT_WIDE, false, false, false, ADAMW},
    {T_LAMBDA_K2, true, "self_attn.lambda_k2", {DIM_LAMBDA_VECTOR, DIM_NONE}, INIT_WIDE, false, false, false, ADAMW},
    {T_LAYER_LAMBDA, true, "self_attn.lambda", {DIM_LAYER_LAMBDA, DIM_NONE}, INIT_LAMBDA, false, false, false, ADAMW},
    {T_SINKS, true, "self_attn.sinks", {DIM_SINKS, DIM_NONE}, INIT_ZERO, false, false, false, ADAMW},
    {T_NORM2, true, "post_attention_layernorm.weight", {DIM_C, DIM_NONE}, INIT_ONE, false, false, false, ADAMW},
    {T_MLP_GATE, true, "mlp.gate_proj.weight", {DIM_F, DIM_C}, INIT_NORMAL, true, false, false, MUON},
    {T_MLP_UP, true, "mlp.up_proj.weight", {DIM_F, DIM_C}, INIT_NORMAL, true, true, false, MUON},
    {T_MLP_DOWN, true, "mlp.down_proj.weight", {DIM_C, DIM_F}, INIT_RESIDUAL, true, false, false, MUON},
    {T_ROUTER, true, "block_sparse_moe.gate.weight", {DIM_EXPERTS, DIM_C}, INIT_NORMAL, true, false, false, ADAMW},
    // its gradient is 0: router_balance updates it
    {T_ROUTER_BIAS, true, "block_sparse_moe.gate.e_score_correction_bias", {DIM_ROUTER_BIAS, DIM_NONE}, INIT_ZERO,
        false, false, false, ADAMW},
    {T_EXPERT_GATE, true, "w1.weight", {DIM_EXPERT_F, DIM_C}, INIT_NORMAL, true, false, true, MUON},
    {T_EXPERT_UP, true, "w3.weight", {DIM_EXPERT_F, DIM_C}, INIT_NORMAL, true, true, true, MUON},
    {T_EXPERT_DOWN, true, "w2.weight", {DIM_C, DIM_EXPERT_F}, INIT_RESIDUAL, true, false, true, MUON},
    {T_NORM_FINAL, false, "model.norm.weight", {DIM_C, DIM_NONE}, INIT_ONE, false, false, false, ADAMW},
    {T_LM_HEAD, false, "lm_head.weight", {DIM_HEAD, DIM_C}, INIT_NORMAL, true, false, false, ADAMW},
};
// clang-format on
enum { TENSOR_ROW_COUNT = sizeof(tensor_rows) / sizeof(tensor_rows[0]), EXPERT_ROW_COUNT = 3 };

typedef struct {
    char name[96];
    const TensorRow *row;
    int layer;  // 0 .. L-1; -1 for tensors before the layers, L for tensors after them
    int expert; // from 0; 0 for tensors that do not belong to an expert
    int ndim;   // 1 or 2
    size_t shape[2];
    size_t count;  // elements
    size_t offset; // place of its first element in the buffers of parameters, gradients and moments
    // muon_plan (muon.h):
    bool muon;   // updated by Muon: it has no second moments of elements
    int owner;   // the rank that orthogonalizes it
    size_t rows; // NorMuon: its second moments, one per row; else 0
    // [0]: in a buffer of second moments of all tensors, [1]: of this rank's pieces. Muon's tensors: the place of
    // `rows`. AdamW's tensors: the number that is subtracted from the offset of the first moment
    size_t moment2_at[2];
} Tensor;

// The tensors of a model in the order of checkpoints and buffers: layer by layer. Each group of tensors (before the
// layers, each layer, after the layers) is padded so that `ranks` ranks can own equal pieces of it. A matrix, including
// the tensors joined to it, is padded with rows of zeros to a multiple of MATRIX_ROWS.
typedef struct {
    Tensor *tensors;
    int count;
    Tensor *spans; // [span_count]: the tensors with neighbours joined; see tensors_join
    int span_count;
    size_t parameter_count; // elements of all tensors
    size_t buffer_count;    // elements of a parameter buffer: all tensors with padding
    // [L+3]: offset of the tensors before the layers at [0], of layer l at [1+l], and of what follows the layers at
    // [L+1]
    size_t *group_offset;
    size_t largest_layer; // elements, with padding
    int ranks;            // groups are padded to a multiple of ranks * TENSOR_ALIGN elements
    bool muon;            // Muon updates some of the tensors
    int *index; // [L][TENSOR_KINDS]: index into tensors, or -1; see tensor_of. For experts: the first expert's tensor
    int L;
} TensorList;

enum { TENSOR_ALIGN = 64 }; // elements; 256 bytes of fp32

// NULL if the model has no such tensor. `layer` is ignored for tensors of the whole model.
static inline const Tensor *tensor_of(const TensorList *list, TensorKind kind, int layer) {
    int i = list->index[layer * TENSOR_KINDS + kind];
    return i < 0 ? NULL : &list->tensors[i];
}

// Whether the matrix of row r of the table continues in later rows.
static inline bool matrix_goes_on(int r, const size_t dims[DIM_COUNT]) {
    for (int i = r + 1; i < TENSOR_ROW_COUNT && tensor_rows[i].joined; i++)
        if (dims[tensor_rows[i].shape[0]] > 0) return true;
    return false;
}

// dims[]: the sizes that rows of the table refer to, in the group of layer l.
static inline void tensor_dims(const ModelConfig *c, int l, size_t dims[DIM_COUNT]) {
    AttentionDims a = attention_dims(c, layer_cross(c, l));
    bool yoco = l == yoco_layer(c); // the keys and values are computed before this layer
    dims[DIM_YOCO_NORM] = yoco ? c->C : 0;
    dims[DIM_YOCO_K] = yoco ? a.NK * a.QD : 0;
    dims[DIM_YOCO_V] = yoco ? a.NV * a.DV : 0;
    dims[DIM_YOCO_K_NORM] = yoco && c->qk_norm ? a.QD : 0;
    dims[DIM_Q_NORM] = c->qk_norm ? a.QD : 0;
    dims[DIM_K_NORM] = c->qk_norm && a.k_rows ? a.QD : 0;
    dims[DIM_V] = c->V;
    dims[DIM_C] = c->C;
    MlpDims mlp = mlp_dims(c, l);
    dims[DIM_F] = mlp.width;
    dims[DIM_EXPERTS] = mlp.experts;
    dims[DIM_ROUTER_BIAS] = c->router_bias ? mlp.experts : 0;
    dims[DIM_EXPERT_F] = mlp.experts ? mlp.expert_width : 0;
    dims[DIM_Q] = a.q_rows;
    dims[DIM_K] = a.k_rows;
    dims[DIM_VALUE] = a.v_rows;
    dims[DIM_LAMBDA] = a.lambda_rows;
    dims[DIM_GATE] = a.gate_rows;
    dims[DIM_O] = c->NH * c->D;
    dims[DIM_SUBLN] = a.norm_width;
    dims[DIM_LAMBDA_VECTOR] = c->attention->lambda == LAMBDA_EXP ? c->D : 0;
    dims[DIM_LAYER_LAMBDA] = c->attention->lambda == LAMBDA_LAYER;
    dims[DIM_SINKS] = c->attention->sink == SINK_LEARNED ? a.NQ : 0;
    dims[DIM_HEAD] = c->tied ? 0 : c->V;
}

// Where tensor_add puts the next tensor, and the matrix that it may continue.
typedef struct {
    size_t offset, matrix, rows; // matrix: its offset; rows: its rows so far
} TensorPlace;

// Appends the tensor of row r in the group of layer l, -1 before and L after the layers, unless it has no elements.
static inline void tensor_add(TensorList *list, TensorPlace *place, int r, const size_t dims[DIM_COUNT], int l,
                              int expert) {
    const TensorRow *row = &tensor_rows[r];
    size_t count = dims[row->shape[0]] * (row->shape[1] == DIM_NONE ? 1 : dims[row->shape[1]]);
    if (count == 0) return;
    if (!row->joined) place->matrix = place->offset = round_up(place->offset, TENSOR_ALIGN), place->rows = 0;
    Tensor *t = &list->tensors[list->count];
    bool whole = !row->per_layer || strncmp(row->name, "model.", 6) == 0;
    if (whole) FORMAT(t->name, "%s", row->name);
    else if (row->per_expert) FORMAT(t->name, "model.layers.%d.block_sparse_moe.experts.%d.%s", l, expert, row->name);
    else FORMAT(t->name, "model.layers.%d.%s", l, row->name);
    t->row = row;
    t->layer = l;
    t->expert = expert;
    t->ndim = row->shape[1] == DIM_NONE ? 1 : 2;
    t->shape[0] = dims[row->shape[0]];
    t->shape[1] = t->ndim == 2 ? dims[row->shape[1]] : 1;
    t->count = count;
    t->offset = place->offset;
    place->rows += t->shape[0];
    bool ends = t->ndim == 2 && !matrix_goes_on(r, dims);
    place->offset = ends ? place->matrix + round_up(place->rows, MATRIX_ROWS) * t->shape[1] : place->offset + count;
    list->parameter_count += count;
    for (int k = row->per_layer ? l : 0; k < (row->per_layer ? l + 1 : list->L) && expert == 0; k++)
        list->index[k * TENSOR_KINDS + row->kind] = list->count;
    list->count++;
}

// The factors of a tensor's rate and epsilon. With completep, Muon's rate has an additional factor width^1/2.
static inline Scaling tensor_scaling(const ModelConfig *c, const Tensor *t) {
    Scaling s = scaling_of(c, t->row->kind);
    const Powers rank = {0.5, 0};
    if (t->muon && c->parametrization != PARAMETRIZATION_STANDARD) s.rate *= scaling_factor(c, rank);
    return s;
}

// Whether the neighbours a and b can be in one span: one operation updates both, and one operation zeroes both
// gradients. A router's bias is alone, because router_balance updates it.
static inline bool tensors_alike(const ModelConfig *c, const Tensor *a, const Tensor *b) {
    bool balanced = a->row->kind == T_ROUTER_BIAS || b->row->kind == T_ROUTER_BIAS;
    Scaling x = tensor_scaling(c, a), y = tensor_scaling(c, b);
    bool same = a->row->decay == b->row->decay && a->muon == b->muon && x.rate == y.rate && x.eps == y.eps;
    return a->layer == b->layer && same && !balanced;
}

// A span has the row and the offset of its first tensor, and all elements to the end of its last: a layer with 128
// experts has 4 spans instead of 392 tensors. The span includes the padding between its tensors, which stays 0, since
// its gradient is 0.
static inline void tensors_join(TensorList *list, const ModelConfig *c) {
    free(list->spans);
    list->spans = (Tensor *)checked_calloc(list->count, sizeof(Tensor));
    list->span_count = 0;
    for (int i = 0; i < list->count; i++) {
        const Tensor *t = &list->tensors[i];
        if (i == 0 || !tensors_alike(c, t - 1, t)) list->spans[list->span_count++] = *t;
        Tensor *span = &list->spans[list->span_count - 1];
        span->count = t->offset + t->count - span->offset;
    }
}

// Whether a span is the last of its group.
static inline bool span_ends_group(const TensorList *list, int span) {
    return span + 1 == list->span_count || list->spans[span + 1].layer != list->spans[span].layer;
}

static inline TensorList tensor_list_build(const ModelConfig *c, int ranks) {
    size_t dims[DIM_COUNT] = {0};
    TensorList list;
    memset(&list, 0, sizeof(list));
    list.L = c->L;
    int index_count = c->L * TENSOR_KINDS;
    list.tensors =
        (Tensor *)checked_calloc((size_t)c->L * (TENSOR_ROW_COUNT + EXPERT_ROW_COUNT * (size_t)c->E), sizeof(Tensor));
    list.index = (int *)checked_calloc(index_count, sizeof(int));
    list.ranks = ranks;
    list.group_offset = (size_t *)checked_calloc(c->L + 3, sizeof(size_t));
    for (int i = 0; i < index_count; i++) list.index[i] = -1;

    TensorPlace place = {0, 0, 0};
    bool after = false; // the layers are done
    for (int r = 0; r < TENSOR_ROW_COUNT;) {
        int group_end = r; // rows r .. group_end-1 are either all per layer or all not
        while (group_end < TENSOR_ROW_COUNT && tensor_rows[group_end].per_layer == tensor_rows[r].per_layer)
            group_end++;
        bool per_layer = tensor_rows[r].per_layer;
        for (int l = 0; l < (per_layer ? c->L : 1); l++) {
            list.group_offset[per_layer ? 1 + l : after ? c->L + 1 : 0] = place.offset;
            tensor_dims(c, l, dims);
            for (int i = r, end; i < group_end; i = end) { // rows i .. end-1 make one matrix of each expert
                bool experts = tensor_rows[i].per_expert;
                for (end = i + 1; experts && end < group_end && tensor_rows[end].joined;) end++;
                for (int e = 0; e < (experts ? (int)dims[DIM_EXPERTS] : 1); e++)
                    for (int k = i; k < end; k++)
                        tensor_add(&list, &place, k, dims, per_layer ? l : after ? c->L : -1, e);
            }
            place.offset = round_up(place.offset, TENSOR_ALIGN * ranks);
        }
        after = after || per_layer;
        r = group_end;
    }
    list.buffer_count = list.group_offset[c->L + 2] = place.offset;
    tensors_join(&list, c);
    for (int l = 0; l < c->L; l++)
        list.largest_layer = max_size(list.largest_layer, list.group_offset[l + 2] - list.group_offset[l + 1]);
    return list;
}

static inline void tensor_list_free(TensorList *list) {
    free(list->tensors);
    free(list->spans);
    free(list->index);
    free(list->group_offset);
    memset(list, 0, sizeof(*list));
}

// active: without the experts that a token does not pass.
static inline size_t model_parameter_count(const ModelConfig *c, bool active) {
    TensorList list = tensor_list_build(c, 1);
    size_t count = list.parameter_count;
    for (int i = 0; i < list.count && active; i++)
        if (list.tensors[i].row->per_expert && list.tensors[i].expert >= c->K) count -= list.tensors[i].count;
    tensor_list_free(&list);
    return count;
}

// The same model with the baseline's attention in every layer.
static inline ModelConfig model_as_baseline(const ModelConfig *c) {
    ModelConfig plain = *c;
    plain.attention = variant_find("baseline");
    plain.window = plain.full_every = 0;
    plain.yoco = plain.qk_norm = false;
    return plain;
}

// The width that --match-params changes: the width of each expert, or of the MLP in a model without experts.
static inline int *model_match_width(ModelConfig *c) { return c->E ? &c->FE : &c->F; }

// The width at which the model's number of parameters is closest to the baseline's with the width of c; the larger of
// two equally close widths. A result below 1: there is no such width.
static inline int model_match_ffn(const ModelConfig *c) {
    ModelConfig plain = model_as_baseline(c), wider = *c;
    int width = *model_match_width(&plain);
    *model_match_width(&wider) = width + 1;
    // modulo 2^64: the difference may be negative
    size_t count = model_parameter_count(c, false), more = model_parameter_count(&plain, false) - count;
    double cost = (double)(model_parameter_count(&wider, false) - count);
    return width + (int)floor((double)(int64_t)more / cost + 0.5);
}
