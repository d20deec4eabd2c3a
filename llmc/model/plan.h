/*
plan.h: the plan of a model: its configuration, the sizes that follow from it, and the bytes of its buffers. Plain
data: a plan exists without the model's memory, so that --dry-run and memory reports need no model.

  B sequences of T positions at a time; C hidden size, V vocabulary, Vp row stride of the logits
  plan_build (activations.h) fills a plan; plan_free frees its lists
*/
#pragma once
#include "../experts/operations.h"
#include "../ops/attention/operations.h"
#include "../ops/optimizer/operations.h"
#include "../ops/rows/operations.h"
#include "sharding.h"
#include "tensors.h"

typedef enum { FOR_TRAINING, FOR_EVALUATION, FOR_GENERATION } Purpose;

// Activation recomputation: which activations the backward computes again. NORMS_AND_MLP: the norms and the inner
// activations of the MLP. BLOCK: everything in a block except its input.
typedef enum { RECOMPUTE_NOTHING, RECOMPUTE_NORMS_AND_MLP, RECOMPUTE_BLOCK } Recompute;

// The linear layers of a block, then the linear layers that a model has once.
typedef enum {
    LINEAR_QKVG,
    LINEAR_O,
    LINEAR_GATE_UP,
    LINEAR_DOWN,
    LINEAR_EXPERT_GATE_UP,
    LINEAR_EXPERT_DOWN,
    LINEAR_BLOCK_COUNT,
    LINEAR_KV = LINEAR_BLOCK_COUNT, // with YOCO: the keys and values of the upper half
    LINEAR_HEAD,
    LINEAR_COUNT
} LinearKind;

typedef struct {
    ModelConfig config;
    AttentionDims dims;       // dimensions of a layer with its own keys and values
    AttentionDims cross_dims; // dimensions of a layer without them: layer_cross
    TensorList tensors;
    Sharding sharding;
    Optimizer optimizer;
    int B, T;       // largest micro-batch; for generation: number of sequences, and positions per sequence
    int rows;       // largest N of a forward: B*T; generation has fewer, since it processes the prompt in pieces
    int Vp;         // row stride of the logits: V rounded up to 64
    int Vw;         // columns of the logits that matrix products compute: V rounded up to MATRIX_ROWS
    int logit_rows; // rows of logits computed at a time
    Purpose purpose;
    Recompute recompute;
    size_t params_bytes, grads_bytes, moments_bytes, master_bytes, activations_bytes, workspace_bytes;
    size_t moment2_count;         // elements: all tensors have second moments, or from level 1 on this rank's pieces
    size_t directions_bytes;      // Muon: the directions of a layer
    size_t copies_bytes;          // rounded copies of the weights of the layers, then of the LM head
    size_t copy_at[LINEAR_COUNT]; // a layer's copies begin here in layer_copies_bytes; the LM head's in copies_bytes
    size_t layer_copies_bytes;
    bool fp8;              // --matmul-dtype fp8: the largest magnitudes of operands are kept
    bool diff_attention;   // attention and the subtraction of noise heads are one operation
    size_t received_bytes; // gradient pieces received from other ranks
    size_t cache_bytes;    // for generation: keys and values of earlier positions, a part of the activations
} ModelPlan;

static inline void plan_free(ModelPlan *plan) {
    sharding_free(&plan->sharding);
    tensor_list_free(&plan->tensors);
    memset(plan, 0, sizeof(*plan));
}

// The number of ranks of the run.
static inline int plan_ranks(const ModelPlan *plan) { return plan->sharding.ranks * plan->sharding.replicas; }
// The argument of plan_build for the same rank at another level of --zero.
static inline RunRanks plan_run_ranks(const ModelPlan *plan, int zero) {
    const Sharding *s = &plan->sharding;
    return (RunRanks){s->rank, plan_ranks(plan), s->ranks, zero, plan->optimizer};
}

static inline TensorKind lm_head_tensor(const ModelPlan *plan) { return plan->config.tied ? T_EMBED : T_LM_HEAD; }

// Whether the parameters, or the gradients, of at most two layers exist at a time.
static inline bool params_two_layers(const ModelPlan *plan) { return plan->sharding.level >= 3; }
static inline bool grads_two_layers(const ModelPlan *plan) { return plan->sharding.level >= 2; }

// The first element of a group, or of a tensor, in the buffer of parameters that operations read.
static inline size_t params_place(const ModelPlan *plan, int group) {
    return group_place(&plan->tensors, group, params_two_layers(plan));
}
static inline size_t param_place(const ModelPlan *plan, const Tensor *t) {
    return params_place(plan, t->layer + 1) + (t->offset - plan->tensors.group_offset[t->layer + 1]);
}

// Whether the gradients before and after the layers have one place: the gradient of an untied embedding is written
// after the gradient of the LM head has been reduced.
static inline bool grads_ends_share(const ModelPlan *plan) { return grads_two_layers(plan) && !plan->config.tied; }

// The first element of a group in the buffer of gradients that operations write.
static inline size_t grads_place(const ModelPlan *plan, int group) {
    const TensorList *list = &plan->tensors;
    bool share = grads_ends_share(plan);
    if (share && group == 0) group = list->L + 1;
    return group_place(list, group, grads_two_layers(plan)) - (share ? list->group_offset[1] : 0);
}

// Whether the tensor is the weight of a matrix product, whose backward writes all of its gradient.
static inline bool is_product_weight(const ModelPlan *plan, const Tensor *t) {
    return t->ndim == 2 && (t->row->kind != T_EMBED || plan->config.tied);
}

static inline const AttentionDims *plan_dims(const ModelPlan *plan, int l) {
    return layer_cross(&plan->config, l) ? &plan->cross_dims : &plan->dims;
}

// The number of positions whose keys and values generation keeps in layer l: a ring of the window, or all positions.
static inline int cache_capacity(const ModelPlan *plan, int l) {
    int window = layer_window(&plan->config, l);
    return window ? min_int(window, plan->T) : plan->T;
}

// The blocks of keys that layer l selects, without the lists. T: length of the sequences, for generation of the longest
static inline SparseShape sparse_shape(const ModelPlan *plan, int l, int T) {
    const ModelConfig *c = &plan->config;
    SparseShape p;
    memset(&p, 0, sizeof(p));
    p.blocks = layer_sparse(c, l);
    if (!p.blocks) return p;
    p.size = c->sparse_size;
    p.count = (plan->purpose == FOR_GENERATION ? plan->T : T) / p.size;
    return p;
}
// Elements of the means of layer l's blocks in one sequence.
static inline size_t sparse_means_count(const ModelPlan *plan, int l) {
    return (size_t)sparse_shape(plan, l, plan->T).count * plan->dims.NK * plan->dims.QD;
}

// The attention of one key set of layer l: which heads it reads, and where they are in the fused rows and in the rows
// of keys and values (LayerActivations.kv).
typedef struct {
    AttentionShape shape;
    size_t q, k, v, out, lse; // first element in a fused row (q), a row of keys and values, a row of heads, lse
} KeySet;

static inline KeySet key_set(const ModelPlan *plan, int l, int set, int B, int T, int query_offset) {
    const AttentionDims *d = plan_dims(plan, l);
    bool self_keys = plan->purpose != FOR_GENERATION && !layer_cross(&plan->config, l); // keys are in the fused rows
    int window = layer_window(&plan->config, l);
    int sets = plan->config.attention->key_sets;
    KeySet k;
    k.shape.B = B;
    k.shape.T = T;
    k.shape.query_offset = query_offset;
    k.shape.NQ = d->NQ / sets;
    k.shape.NKV = d->NV;
    k.shape.D = d->QD;
    k.shape.DV = d->DV;
    k.shape.ldq = d->fused_ld;
    k.shape.ldkv = self_keys ? d->fused_ld : plan->purpose == FOR_GENERATION ? d->kv_rows : d->kv_ld;
    k.shape.groups.signals = plan->diff_attention ? d->groups.signals : 0;
    k.shape.groups.noise = plan->diff_attention ? d->groups.noise : 0;
    k.shape.ldo = (plan->diff_attention ? d->OH : d->NQ) * d->DV;
    k.shape.q_head = k.shape.k_head = sets * d->QD;
    k.shape.v_head = d->DV;
    k.shape.o_head = sets * d->DV;
    k.shape.scale = (real)(1 / sqrt((double)d->QD));
    k.shape.window = window < plan->T ? window : 0;
    k.shape.first_key = NULL; // attends to all earlier positions
    k.shape.rope = NULL;
    k.shape.sparse = sparse_shape(plan, l, T);
    k.shape.rope_heads = d->rope_heads / sets;
    k.q = (size_t)(set * d->QD);
    k.k = (size_t)((self_keys ? d->k_at : 0) + set * d->QD);
    k.v = (size_t)(self_keys ? d->v_at : d->NK * d->QD);
    k.out = (size_t)(set * d->DV);
    k.lse = (size_t)set * lse_set_stride(k.shape);
    return k;
}

// Bytes of the workspace of a layer's attention.
static inline size_t attention_bytes_of(AttentionShape s) {
    return (s.sparse.blocks ? sparse_attention_workspace_bytes : attention_workspace_bytes)(s, omp_get_max_threads());
}

// Heads that layer l keeps of attention for its backward.
static inline int heads_kept(const ModelPlan *plan, int l) {
    AttentionShape s = key_set(plan, l, 0, plan->B, plan->T, 0).shape;
    if (!plan->diff_attention) return plan_dims(plan, l)->NQ;
    return (s.sparse.blocks ? sparse_diff_attention_kept : diff_attention_kept)(s);
}

// Elements of the lse of all key sets.
static inline size_t lse_count(const ModelPlan *plan, int B, int T) {
    return (size_t)plan->config.attention->key_sets * lse_set_stride(key_set(plan, 0, 0, B, T, 0).shape);
}

// The routing of N tokens in a layer with experts.
static inline Routing plan_routing(const ModelPlan *plan, int N) {
    Routing r = {N, plan->config.C, plan->config.E, plan->config.K};
    return r;
}

// FLOPs of the selection of blocks over B sequences of T. It has no backward.
static inline double selection_flops(const ModelPlan *plan, int B, int T) {
    double sum = 0;
    for (int l = 0; l < plan->config.L; l++) sum += sparse_select_flops(key_set(plan, l, 0, B, T, 0).shape);
    return plan->config.attention->key_sets * sum;
}
// FLOPs of a forward over B sequences of T: 2 per weight of a matrix and row that passes it, causal attention, and the
// selection of blocks.
static inline double forward_flops(const ModelPlan *plan, int B, int T) {
    double weights = 0;
    for (int i = 0; i < plan->tensors.count; i++) {
        const Tensor *t = &plan->tensors.tensors[i];
        if (is_product_weight(plan, t) && (!t->row->per_expert || t->expert < plan->config.K))
            weights += (double)t->count;
    }
    double attention = 0;
    for (int l = 0; l < plan->config.L; l++) attention += attention_forward_flops(key_set(plan, l, 0, B, T, 0).shape);
    return 2 * weights * B * T + plan->config.attention->key_sets * attention + selection_flops(plan, B, T);
}
// FLOPs of a forward and backward: the backward of an operation has twice the FLOPs of its forward.
static inline double training_flops(const ModelPlan *plan, int B, int T) {
    return 3 * forward_flops(plan, B, T) - 2 * selection_flops(plan, B, T);
}
