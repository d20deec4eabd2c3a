/*
train_diffv2.c: pretraining of decoder language models with differential attention, on the CPU.

The file reads top to bottom: the model and its memory, forward, backward (its exact mirror), update,
statistics, what a step costs, checkpoints, generation, the training loop, main. Operations are called by name and
declared in llmc/ops.h; nothing here dereferences a buffer, so that train_diffv2.cu can include this
very file with CUDA operations instead.

  B sequences of T positions make a micro-batch of N = B*T rows; a step (one update) sums the
  gradients of `micro_steps` of them. C hidden size, L layers, V vocabulary, F MLP width, D head
  dimension, NH output heads, NKV key/value heads, NQ query heads. [] shapes are row-major.
*/
#include "llmc/common.h"
#include "llmc/ops.h"
#include "llmc/model_config.h"
#include "llmc/random.h"
#include "llmc/options.h"
#include "llmc/schedule.h"
#include "llmc/speech.h"
#include "llmc/spikes.h"
#include "llmc/dataloader_whole.h"
#include "llmc/checkpoint.h"
#include "llmc/logger.h"
#include "llmc/sampler.h"
#include "llmc/recall.h"
#include "llmc/attention_maps.h"
#include "llmc/progress.h"
#include "llmc/stop_signals.h"

#ifndef REVISION
#define REVISION "unknown"
#endif

// ---------------------------------------------------------------------------------------------------
// The model and its memory

// What a layer computes and the backward needs again. Without a backward all layers share one set,
// but for the fused rows of a generating model, which are its key/value cache.
typedef struct {
    floatX *norm1;   // (N, C)
    real *rstd1;     // (N)
    floatX *fused;   // (N, fused_ld): rows [q | k | v | lambda], q and k rotated
    floatX *heads;   // (N, NQ, DV): attention output of every query head
    real *lse;       // (key_sets, B, NQ/key_sets, T)
    floatX *lambda;  // (N, OH): where lambda is not projected, else NULL
    floatX *combined; // (N, OH, DV): after the subtraction; without one, heads
    floatX *normed;  // (N, NH*D): combined, normalised; without a norm, combined
    real *rstd_sub;  // (N, norm_count)
    floatX *context; // (N, NH*D): what o_proj reads, after the gate; without one, normed
    floatX *x_mid;   // (N, C): residual stream after attention
    floatX *norm2;   // (N, C)
    real *rstd2;     // (N)
    floatX *gate_up; // (N, 2F): rows [gate | up]
    floatX *hidden;  // (N, F)
    floatX *x_out;   // (N, C): residual stream after the MLP
} LayerActivations;

typedef struct {
    int *inputs, *targets; // (N)
    int *starts;           // (N): where the document of each input begins in its sequence; not for generation
    real *losses;          // (N): summed over the micro-steps of an update
    real *rope;            // (T, 2, QD/2): cosines, sines
    floatX *embedded;      // (N, C)
    LayerActivations *layers; // [L]
    floatX *branch;        // (N, C): output of o_proj and of down_proj, before it joins the residual stream
    floatX *norm_final;    // (N, C)
    real *rstd_final;      // (N)
    floatX *logits;        // (logit_rows, Vp), then their gradient
    // the backward's own, named after what they are the gradient of; dx is the residual stream's
    floatX *dx;       // (N, C)
    floatX *dnorm;    // (N, C)
    floatX *dfused;   // (N, fused_ld)
    floatX *dheads;   // (N, NQ, DV)
    floatX *dlambda;  // (N, OH): as lambda
    floatX *dcombined; // (N, OH, DV): as combined
    floatX *dnormed;  // (N, NH*D): as normed
    floatX *dcontext; // (N, NH*D)
    floatX *dgate_up; // (N, 2F)
    floatX *dhidden;  // (N, F)
} Activations;

typedef enum { FOR_TRAINING, FOR_EVALUATION, FOR_GENERATION } Purpose;

typedef struct {
    ModelConfig config;
    AttentionDims dims;
    TensorList tensors;
    int B, T;       // largest micro-batch
    int Vp;         // row stride of the logits: V rounded up to 64
    int logit_rows; // rows that the classifier works on at a time
    Purpose purpose;
    bool documents; // attention stays within them: acts.starts counts
    floatX *params; // [tensors.buffer_count], layer-major, as are the next three
    grad_t *grads;
    real *m, *v; // Adam's moments
    Activations acts;
    size_t params_bytes, grads_bytes, moments_bytes, activations_bytes, workspace_bytes;
    char *activations_memory;
} Model;

static floatX *param(const Model *model, TensorKind kind, int layer) {
    const Tensor *t = tensor_of(&model->tensors, kind, layer);
    return t ? model->params + t->offset : NULL;
}
static grad_t *grad(const Model *model, TensorKind kind, int layer) {
    const Tensor *t = tensor_of(&model->tensors, kind, layer);
    return t ? model->grads + t->offset : NULL;
}

// The attention of one key set: which heads it reads and where they are in the fused rows.
typedef struct {
    AttentionShape shape;
    size_t q, k, v, out, lse; // first elements, in a fused row, in a row of heads, and in lse
} KeySet;

static KeySet key_set(const Model *model, int set, int B, int T, int first) {
    const AttentionDims *d = &model->dims;
    int sets = model->config.attention->key_sets;
    KeySet k;
    k.shape.B = B;
    k.shape.T = T;
    k.shape.first = first;
    k.shape.NQ = d->NQ / sets;
    k.shape.NKV = d->NV;
    k.shape.D = d->QD;
    k.shape.DV = d->DV;
    k.shape.ldq = k.shape.ldkv = d->fused_ld;
    k.shape.ldo = d->NQ * d->DV;
    k.shape.q_head = k.shape.k_head = sets * d->QD;
    k.shape.v_head = d->DV;
    k.shape.o_head = sets * d->DV;
    k.shape.scale = (real)(1 / sqrt((double)d->QD));
    k.shape.first_key = model->documents ? model->acts.starts : NULL;
    k.q = (size_t)(set * d->QD);
    k.k = (size_t)(d->k_at + set * d->QD);
    k.v = (size_t)d->v_at;
    k.out = (size_t)(set * d->DV);
    k.lse = (size_t)set * (size_t)B * (size_t)k.shape.NQ * (size_t)T;
    return k;
}

// Hands out consecutive aligned pieces; with base NULL it only counts.
typedef struct {
    char *base;
    size_t used;
} Arena;
static void *carve(Arena *arena, size_t count, size_t element_bytes) {
    size_t at = arena->used;
    arena->used += round_up(count * element_bytes, 256);
    return arena->base ? arena->base + at : NULL;
}
#define CARVE(arena, type, count) (type *)carve(arena, count, sizeof(type))

// Lays the activations of the model out in the arena: the one place that knows their sizes.
static void activations_carve(Model *model, Arena *arena) {
    const ModelConfig *c = &model->config;
    const AttentionDims *d = &model->dims;
    Activations *a = &model->acts;
    size_t N = (size_t)model->B * (size_t)model->T, C = (size_t)c->C, F = (size_t)c->F;
    size_t heads_width = (size_t)(d->NQ * d->DV), context_width = (size_t)(c->NH * c->D), ld = (size_t)d->fused_ld;
    bool backward = model->purpose == FOR_TRAINING, own_lambda = d->pair_stride && d->lambda_rows == 0;

    a->inputs = CARVE(arena, int, N);
    a->targets = CARVE(arena, int, N);
    a->starts = model->purpose == FOR_GENERATION ? NULL : CARVE(arena, int, N);
    a->losses = CARVE(arena, real, N);
    a->rope = CARVE(arena, real, (size_t)c->T * (size_t)d->QD);
    a->embedded = CARVE(arena, floatX, N * C);
    for (int l = 0; l < c->L; l++) {
        LayerActivations *layer = &a->layers[l];
        bool own = backward || l == 0;
        if (!own) *layer = a->layers[0];
        if (own || model->purpose == FOR_GENERATION) layer->fused = CARVE(arena, floatX, N * ld);
        if (!own) continue;
        layer->norm1 = CARVE(arena, floatX, N * C);
        layer->rstd1 = CARVE(arena, real, N);
        layer->heads = CARVE(arena, floatX, N * heads_width);
        layer->lse = CARVE(arena, real, N * (size_t)d->NQ);
        layer->lambda = own_lambda ? CARVE(arena, floatX, N * (size_t)d->OH) : NULL;
        layer->combined = d->pair_stride ? CARVE(arena, floatX, N * context_width) : layer->heads;
        layer->normed = d->norm_width ? CARVE(arena, floatX, N * context_width) : layer->combined;
        layer->rstd_sub = d->norm_width ? CARVE(arena, real, N * (size_t)d->norm_count) : NULL;
        layer->context = d->gate_width ? CARVE(arena, floatX, N * context_width) : layer->normed;
        layer->x_mid = CARVE(arena, floatX, N * C);
        layer->norm2 = CARVE(arena, floatX, N * C);
        layer->rstd2 = CARVE(arena, real, N);
        layer->gate_up = CARVE(arena, floatX, N * 2 * F);
        layer->hidden = CARVE(arena, floatX, N * F);
        layer->x_out = CARVE(arena, floatX, N * C);
    }
    a->branch = CARVE(arena, floatX, N * C);
    a->norm_final = CARVE(arena, floatX, N * C);
    a->rstd_final = CARVE(arena, real, N);
    a->logits = CARVE(arena, floatX, (size_t)model->logit_rows * (size_t)model->Vp);
    if (!backward) return;
    a->dx = CARVE(arena, floatX, N * C);
    a->dnorm = CARVE(arena, floatX, N * C);
    a->dfused = CARVE(arena, floatX, N * ld);
    a->dheads = CARVE(arena, floatX, N * heads_width);
    a->dlambda = own_lambda ? CARVE(arena, floatX, N * (size_t)d->OH) : NULL;
    a->dcombined = d->pair_stride ? CARVE(arena, floatX, N * context_width) : a->dheads;
    a->dnormed = d->norm_width ? CARVE(arena, floatX, N * context_width) : a->dcombined;
    a->dcontext = d->gate_width ? CARVE(arena, floatX, N * context_width) : a->dnormed;
    a->dgate_up = CARVE(arena, floatX, N * 2 * F);
    a->dhidden = CARVE(arena, floatX, N * F);
}

// Sizes of a model that works on up to B sequences of T positions; allocates nothing but the tensor list.
static void model_plan(Model *model, const ModelConfig *config, int B, int T, Purpose purpose) {
    const size_t logit_bytes = (size_t)64 << 20; // a chunk of logits this large keeps the GEMM at full speed
    memset(model, 0, sizeof(*model));
    model->config = *config;
    model->dims = attention_dims(config);
    model->tensors = tensor_list_build(config);
    model->B = B;
    model->T = T;
    model->purpose = purpose;
    model->Vp = (int)round_up((size_t)config->V, 64);
    size_t rows = max_size(64, logit_bytes / ((size_t)model->Vp * sizeof(floatX)));
    model->logit_rows = (int)min_size((size_t)B * (size_t)T, rows);
    model->acts.layers = (LayerActivations *)checked_calloc((size_t)config->L, sizeof(LayerActivations));
    Arena count = {NULL, 0};
    activations_carve(model, &count);
    model->activations_bytes = count.used;
    model->params_bytes = model->tensors.buffer_count * sizeof(floatX);
    if (purpose == FOR_TRAINING) {
        model->grads_bytes = model->tensors.buffer_count * sizeof(grad_t);
        model->moments_bytes = 2 * model->tensors.buffer_count * sizeof(real);
    }
    int widest = max_int(config->C, model->dims.norm_width), N = B * T, C = config->C;
    size_t needs[] = {attention_workspace_bytes(key_set(model, 0, B, T, 0).shape, omp_get_max_threads()),
                      rmsnorm_workspace_bytes(widest),
                      matmul_workspace_bytes(N, C, model->dims.fused_rows),
                      matmul_workspace_bytes(N, config->NH * config->D, C),
                      matmul_workspace_bytes(N, C, 2 * config->F),
                      matmul_workspace_bytes(N, config->F, C),
                      matmul_workspace_bytes(model->logit_rows, C, config->V)};
    for (size_t i = 0; i < sizeof(needs) / sizeof(needs[0]); i++) model->workspace_bytes = max_size(model->workspace_bytes, needs[i]);
}

// Allocates what model_plan counted. `shared` NULL, or a model whose parameters this one reads.
static void model_alloc(Model *model, const Model *shared) {
    model->params = shared ? shared->params : (floatX *)buffer_alloc(model->params_bytes, "parameters");
    if (model->purpose == FOR_TRAINING) {
        model->grads = (grad_t *)buffer_alloc(model->grads_bytes, "gradients");
        model->m = (real *)buffer_alloc(model->moments_bytes, "Adam's moments");
        model->v = model->m + model->tensors.buffer_count;
    }
    model->activations_memory = (char *)buffer_alloc(model->activations_bytes, "activations");
    Arena arena = {model->activations_memory, 0};
    activations_carve(model, &arena);

    size_t count = (size_t)model->config.T * (size_t)model->dims.QD;
    real *table = (real *)checked_calloc(count, sizeof(real));
    rope_table(table, model->config.T, model->dims.QD, model->config.rope_theta);
    buffer_upload(model->acts.rope, table, count * sizeof(real));
    free(table);
}

static void model_free(Model *model, bool owns_params) {
    if (owns_params) buffer_free(model->params);
    buffer_free(model->grads);
    buffer_free(model->m);
    buffer_free(model->activations_memory);
    free(model->acts.layers);
    tensor_list_free(&model->tensors);
    memset(model, 0, sizeof(*model));
}

// Initial values: a function of (seed, tensor name, element) alone.
static void model_init(Model *model, uint64_t seed) {
    enum { CHUNK = 1 << 20 };
    floatX *host = (floatX *)checked_calloc(CHUNK, sizeof(floatX));
    for (int i = 0; i < model->tensors.count; i++) {
        const Tensor *t = &model->tensors.tensors[i];
        uint64_t key = random_key(t->name, seed);
        Init init = t->row->init;
        double mean = init == INIT_ONE ? 1 : init == INIT_LAMBDA ? lambda_init(t->layer) : 0;
        double std = init == INIT_RESIDUAL ? 0.02 / sqrt(2.0 * model->config.L) : init == INIT_NORMAL ? 0.02 : init == INIT_WIDE ? 0.1 : 0;
        for (size_t begin = 0; begin < t->count; begin += CHUNK) {
            size_t count = min_size(CHUNK, t->count - begin);
#pragma omp parallel for schedule(static)
            for (size_t e = 0; e < count; e++)
                host[e] = (floatX)(float)(mean + (std > 0 ? std * random_normal(key, begin + e) : 0));
            buffer_upload(model->params + t->offset + begin, host, count * sizeof(floatX));
        }
    }
    free(host);
}

// ---------------------------------------------------------------------------------------------------
// Forward

// The factor of the second map in a layer where it is not projected from the input, for every row and head.
static void lambda_forward(Model *model, int l, int N) {
    size_t count = (size_t)N * (size_t)model->dims.OH;
    floatX *rows = model->acts.layers[l].lambda;
    switch (model->config.attention->lambda) {
    case LAMBDA_SCALAR: lambda_scalar_forward(rows, param(model, T_LAYER_LAMBDA, l), count); break;
    case LAMBDA_EXP:
        lambda_exp_forward(rows, param(model, T_LAMBDA_Q1, l), param(model, T_LAMBDA_K1, l), param(model, T_LAMBDA_Q2, l),
                           param(model, T_LAMBDA_K2, l), model->config.D, (real)lambda_init(l), count);
        break;
    default: fill_forward(rows, 1, count);
    }
}

static const double SUBLN_EPS = 1e-5; // of the norm before o_proj, whatever rms_norm_eps is

// Where diff_combine finds a layer's lambda (or its gradient): rows of its own, or columns of the fused rows.
typedef struct {
    floatX *rows;
    int ld;
} LambdaRows;
static LambdaRows lambda_rows(const AttentionDims *d, floatX *own, floatX *fused) {
    LambdaRows l;
    l.rows = own ? own : fused + d->lambda_at;
    l.ld = own ? d->OH : d->fused_ld;
    return l;
}

// From the fused rows to the context that o_proj reads; each step is there or not by a trait of the variant.
static void context_forward(Model *model, int l, floatX *fused, int B, int T, int first) {
    const AttentionVariant *variant = model->config.attention;
    const AttentionDims *d = &model->dims;
    const LayerActivations *a = &model->acts.layers[l];
    int N = B * T, ld = d->fused_ld;
    for (int set = 0; set < variant->key_sets; set++) {
        KeySet s = key_set(model, set, B, T, first);
        attention_forward(a->heads + s.out, a->lse + s.lse, fused + s.q, a->fused + s.k, a->fused + s.v, s.shape);
    }
    if (variant->sink) sink_forward(a->heads, a->lse, param(model, T_SINKS, l), B, T, d->NQ, d->DV);
    if (a->lambda) lambda_forward(model, l, N);
    if (d->pair_stride) {
        LambdaRows lambda = lambda_rows(d, a->lambda, fused);
        diff_combine_forward(a->combined, a->heads, lambda.rows, N, d->OH, d->DV, lambda.ld, d->pair_stride,
                             variant->lambda == LAMBDA_SIGMOID);
    }
    if (d->norm_count)
        rmsnorm_forward(a->normed, a->rstd_sub, a->combined, param(model, T_SUBLN, l), N * d->norm_count, d->norm_width,
                        (real)SUBLN_EPS);
    if (variant->norm == NORM_HEAD) scale_inplace(a->normed, (real)(1 - lambda_init(l)), (size_t)N * (size_t)(d->OH * d->DV));
    if (d->gate_width) gate_forward(a->context, a->normed, fused + d->gate_at, N, d->OH, d->DV, ld, d->gate_width);
}

// One block: x is the residual stream that enters it, layer->x_out the one that leaves it.
static void block_forward(Model *model, int l, const floatX *x, int B, int T, int first) {
    const ModelConfig *c = &model->config;
    const AttentionDims *d = &model->dims;
    const LayerActivations *a = &model->acts.layers[l];
    floatX *branch = model->acts.branch;
    int N = B * T, C = c->C, F = c->F, ld = d->fused_ld;
    real eps = (real)c->rms_norm_eps;
    floatX *fused = a->fused + (size_t)first * (size_t)ld; // the rows of this call; earlier rows are the cache

    rmsnorm_forward(a->norm1, a->rstd1, x, param(model, T_NORM1, l), N, C, eps);
    matmul_forward(fused, a->norm1, param(model, T_Q, l), N, C, d->fused_rows, ld); // q, k, v and lambda or gate
    rope_forward(fused, model->acts.rope, B, T, d->NQ + d->NK, d->QD, ld, first);
    context_forward(model, l, fused, B, T, first);
    matmul_forward(branch, a->context, param(model, T_O, l), N, c->NH * c->D, C, C);
    residual_forward(a->x_mid, x, branch, (size_t)N * (size_t)C);

    rmsnorm_forward(a->norm2, a->rstd2, a->x_mid, param(model, T_NORM2, l), N, C, eps);
    matmul_forward(a->gate_up, a->norm2, param(model, T_MLP_GATE, l), N, C, 2 * F, 2 * F);
    swiglu_forward(a->hidden, a->gate_up, N, F);
    matmul_forward(branch, a->hidden, param(model, T_MLP_DOWN, l), N, F, C, C);
    residual_forward(a->x_out, a->x_mid, branch, (size_t)N * (size_t)C);
}

// Runs positions first .. first+T-1 of B sequences whose tokens are in acts.inputs, up to the final norm.
// first > 0 only in a generating model, whose cache holds the positions before.
static void model_forward(Model *model, int B, int T, int first) {
    Activations *a = &model->acts;
    int N = B * T, C = model->config.C, L = model->config.L;
    assert(B <= model->B && first + T <= model->T && (first == 0 || model->purpose == FOR_GENERATION));
    embedding_forward(a->embedded, a->inputs, param(model, T_EMBED, 0), N, C);
    const floatX *x = a->embedded;
    for (int l = 0; l < L; l++) {
        block_forward(model, l, x, B, T, first);
        x = a->layers[l].x_out;
    }
    rmsnorm_forward(a->norm_final, a->rstd_final, x, param(model, T_NORM_FINAL, 0), N, C, (real)model->config.rms_norm_eps);
}

static TensorKind head_kind(const Model *model) { return model->config.tied ? T_EMBED : T_LM_HEAD; }

// Adds the loss of each row to acts.losses, in chunks of rows so that the logits stay small. With dloss != 0
// (the weight of one row in the loss that is minimised) also the head's gradient and, into dnorm, the final norm's.
static void model_classify(Model *model, int N, real dloss) {
    Activations *a = &model->acts;
    int C = model->config.C, V = model->config.V, Vp = model->Vp;
    const floatX *head = param(model, head_kind(model), 0);
    for (int n = 0; n < N; n += model->logit_rows) {
        int rows = min_int(model->logit_rows, N - n);
        size_t at = (size_t)n * (size_t)C;
        matmul_forward(a->logits, a->norm_final + at, head, rows, C, V, Vp);
        cross_entropy(a->losses + n, a->logits, a->targets + n, rows, V, Vp, dloss);
        if (dloss != 0)
            matmul_backward(a->dnorm + at, grad(model, head_kind(model), 0), a->logits, a->norm_final + at, head, rows,
                            C, V, Vp);
    }
}

// ---------------------------------------------------------------------------------------------------
// Backward: the forward's lines from the last to the first

static void lambda_backward(Model *model, int l, int N) {
    size_t count = (size_t)N * (size_t)model->dims.OH;
    const floatX *drows = model->acts.dlambda;
    switch (model->config.attention->lambda) {
    case LAMBDA_SCALAR: lambda_scalar_backward(grad(model, T_LAYER_LAMBDA, l), drows, count); break;
    case LAMBDA_EXP:
        lambda_exp_backward(grad(model, T_LAMBDA_Q1, l), grad(model, T_LAMBDA_K1, l), grad(model, T_LAMBDA_Q2, l),
                            grad(model, T_LAMBDA_K2, l), drows, param(model, T_LAMBDA_Q1, l), param(model, T_LAMBDA_K1, l),
                            param(model, T_LAMBDA_Q2, l), param(model, T_LAMBDA_K2, l), model->config.D, count);
        break;
    default: break; // constant
    }
}

// From the gradient of the context to that of the fused rows: context_forward's lines from the last to the first.
static void context_backward(Model *model, int l, int B, int T) {
    const AttentionVariant *variant = model->config.attention;
    const AttentionDims *d = &model->dims;
    const LayerActivations *a = &model->acts.layers[l];
    Activations *g = &model->acts;
    int N = B * T, ld = d->fused_ld;
    size_t width = (size_t)(d->OH * d->DV);
    if (d->gate_width)
        gate_backward(g->dnormed, g->dfused + d->gate_at, g->dcontext, a->normed, a->fused + d->gate_at, N, d->OH, d->DV, ld,
                      d->gate_width);
    if (variant->norm == NORM_HEAD) scale_inplace(g->dnormed, (real)(1 - lambda_init(l)), (size_t)N * width);
    if (d->norm_count) {
        buffer_zero(g->dcombined, (size_t)N * width * sizeof(floatX));
        rmsnorm_backward(g->dcombined, grad(model, T_SUBLN, l), g->dnormed, a->combined, param(model, T_SUBLN, l),
                         a->rstd_sub, N * d->norm_count, d->norm_width);
    }
    if (d->pair_stride) {
        LambdaRows lambda = lambda_rows(d, a->lambda, a->fused), dlambda = lambda_rows(d, g->dlambda, g->dfused);
        diff_combine_backward(g->dheads, dlambda.rows, g->dcombined, a->heads, lambda.rows, N, d->OH, d->DV, lambda.ld,
                              d->pair_stride, variant->lambda == LAMBDA_SIGMOID);
    }
    if (a->lambda) lambda_backward(model, l, N);
    if (variant->sink == SINK_LEARNED)
        sink_backward(grad(model, T_SINKS, l), g->dheads, a->heads, a->lse, param(model, T_SINKS, l), B, T, d->NQ, d->DV);
    for (int set = 0; set < variant->key_sets; set++) {
        KeySet s = key_set(model, set, B, T, 0);
        attention_backward(g->dfused + s.q, g->dfused + s.k, g->dfused + s.v, g->dheads + s.out, a->heads + s.out,
                           a->lse + s.lse, a->fused + s.q, a->fused + s.k, a->fused + s.v, s.shape, set > 0);
    }
}

// acts.dx is the gradient of x_out on entry and of x on return.
static void block_backward(Model *model, int l, const floatX *x, int B, int T) {
    const ModelConfig *c = &model->config;
    const AttentionDims *d = &model->dims;
    const LayerActivations *a = &model->acts.layers[l];
    Activations *g = &model->acts;
    int N = B * T, C = c->C, F = c->F, ld = d->fused_ld;

    // x_out = x_mid + down(hidden), hidden = swiglu(gate_up(norm2)): dx passes the sum unchanged
    matmul_backward(g->dhidden, grad(model, T_MLP_DOWN, l), g->dx, a->hidden, param(model, T_MLP_DOWN, l), N, F, C, C);
    swiglu_backward(g->dgate_up, g->dhidden, a->gate_up, N, F);
    matmul_backward(g->dnorm, grad(model, T_MLP_GATE, l), g->dgate_up, a->norm2, param(model, T_MLP_GATE, l), N, C,
                    2 * F, 2 * F);
    rmsnorm_backward(g->dx, grad(model, T_NORM2, l), g->dnorm, a->x_mid, param(model, T_NORM2, l), a->rstd2, N, C);

    // x_mid = x + o(context), context = context(rope(fused(norm1)))
    matmul_backward(g->dcontext, grad(model, T_O, l), g->dx, a->context, param(model, T_O, l), N, c->NH * c->D, C, C);
    context_backward(model, l, B, T);
    rope_backward(g->dfused, g->rope, B, T, d->NQ + d->NK, d->QD, ld, 0);
    matmul_backward(g->dnorm, grad(model, T_Q, l), g->dfused, a->norm1, param(model, T_Q, l), N, C, d->fused_rows, ld);
    rmsnorm_backward(g->dx, grad(model, T_NORM1, l), g->dnorm, x, param(model, T_NORM1, l), a->rstd1, N, C);
}

// After model_forward and model_classify with dloss != 0 on the same rows; adds to the gradients.
static void model_backward(Model *model, int B, int T) {
    Activations *a = &model->acts;
    int N = B * T, C = model->config.C, L = model->config.L;
    buffer_zero(a->dx, (size_t)N * (size_t)C * sizeof(floatX));
    rmsnorm_backward(a->dx, grad(model, T_NORM_FINAL, 0), a->dnorm, a->layers[L - 1].x_out,
                     param(model, T_NORM_FINAL, 0), a->rstd_final, N, C);
    for (int l = L - 1; l >= 0; l--) block_backward(model, l, l ? a->layers[l - 1].x_out : a->embedded, B, T);
    embedding_backward(grad(model, T_EMBED, 0), a->dx, a->inputs, N, C);
}

// The next batch, N rows. starts: where the document of each input begins in its sequence, which attention then does
// not look beyond; or NULL. Positions stay those of the sequence: rotary scores depend on distances alone.
static void model_read_batch(Model *model, const int *inputs, const int *targets, const int *starts, int N) {
    size_t bytes = (size_t)N * sizeof(int);
    buffer_upload(model->acts.inputs, inputs, bytes);
    buffer_upload(model->acts.targets, targets, bytes);
    model->documents = starts != NULL;
    if (starts) buffer_upload(model->acts.starts, starts, bytes);
}

// One micro-step of an update over `total_rows` rows: the gradient of their mean loss.
static void model_micro_step(Model *model, const int *inputs, const int *targets, const int *starts, int B, int T, double total_rows) {
    model_read_batch(model, inputs, targets, starts, B * T);
    model_forward(model, B, T, 0);
    model_classify(model, B * T, (real)(1 / total_rows));
    model_backward(model, B, T);
}

// Sum of the losses that model_classify has added up since they were last zeroed.
static double model_loss_sum(const Model *model, int N) {
    real *host = (real *)checked_calloc((size_t)N, sizeof(real));
    buffer_download(host, model->acts.losses, (size_t)N * sizeof(real));
    double sum = 0;
    for (int n = 0; n < N; n++) sum += (double)host[n];
    free(host);
    return sum;
}

// Adds the losses of `rows` rows to the means over `windows` windows, by the position in the window.
static void model_losses_by_position(const Model *model, double *means, int rows, int T, double windows) {
    real *host = (real *)checked_calloc((size_t)rows, sizeof(real));
    buffer_download(host, model->acts.losses, (size_t)rows * sizeof(real));
    for (int n = 0; n < rows; n++) means[n % T] += (double)host[n] / windows;
    free(host);
}

// ---------------------------------------------------------------------------------------------------
// Update

// Before clipping; NaN or infinite when an element is.
static double model_grad_norm(const Model *model) { return sqrt(sum_of_squares(model->grads, model->tensors.buffer_count)); }

// The factor of the gradients that brings their norm down to `clip` (0: any norm is right).
static double clip_factor(double grad_norm, double clip) { return clip > 0 && grad_norm > clip ? clip / grad_norm : 1; }

// One AdamW step on the accumulated gradients, whose norm is finite; `update` counts from 1 (bias correction).
static void model_update(Model *model, const Options *o, double lr, int64_t update, double grad_norm) {
    assert(isfinite(grad_norm) && update > 0);
    for (int i = 0; i < model->tensors.count; i++) {
        const Tensor *t = &model->tensors.tensors[i];
        adamw_update(model->params + t->offset, NULL, model->grads + t->offset, model->m + t->offset,
                     model->v + t->offset, t->count, clip_factor(grad_norm, o->grad_clip), lr, o->beta1, o->beta2,
                     o->eps, t->row->decay ? o->weight_decay : 0, update);
    }
}

// ---------------------------------------------------------------------------------------------------
// Statistics

typedef struct {
    Range lambda;      // as it multiplies the second map; NaN without one
    Range context_rms; // of what o_proj reads, per row and output head
    AttentionStats attention;
    Magnitudes residual; // of the stream that leaves the layer
    double grad_norm;    // before clipping
} LayerStats;

// Of the last micro-step, whose activations the backward leaves as they are, and of the gradients added up so far.
static LayerStats layer_stats(const Model *model, int l, int B, int T) {
    const AttentionDims *d = &model->dims;
    const LayerActivations *a = &model->acts.layers[l];
    const AttentionVariant *variant = model->config.attention;
    size_t N = (size_t)B * (size_t)T, begin = model->tensors.layer_offset[l], end = model->tensors.layer_offset[l + 1];
    LambdaRows lambda = lambda_rows(d, a->lambda, a->fused);
    bool sigmoid = variant->lambda == LAMBDA_SIGMOID;
    KeySet s = key_set(model, 0, B, T, 0);
    LayerStats stats;
    stats.lambda.min = stats.lambda.mean = stats.lambda.max = NAN;
    if (d->pair_stride) stats.lambda = lambda_stats(lambda.rows, (int)N, d->OH, lambda.ld, sigmoid);
    stats.context_rms = rms_stats(a->context, N * (size_t)d->OH, d->DV);
    stats.attention = attention_stats(a->fused + s.q, a->fused + s.k, a->lse, lambda.rows, s.shape, variant->key_sets,
                                      lambda.ld, d->pair_stride, sigmoid);
    stats.residual = magnitude_stats(a->x_out, N * (size_t)model->config.C);
    stats.grad_norm = sqrt(sum_of_squares(model->grads + begin, end - begin));
    return stats;
}

// ---------------------------------------------------------------------------------------------------
// What a step costs

// FLOPs of a forward over B sequences of T: 2 per weight of a matrix and row, and causal attention.
static double forward_flops(const Model *model, int B, int T) {
    double weights = 0;
    for (int i = 0; i < model->tensors.count; i++) {
        const Tensor *t = &model->tensors.tensors[i];
        bool lookup_only = t->row->kind == T_EMBED && !model->config.tied;
        if (t->ndim == 2 && !lookup_only) weights += (double)t->count;
    }
    KeySet s = key_set(model, 0, B, T, 0);
    return 2 * weights * B * T + model->config.L * model->config.attention->key_sets * attention_forward_flops(s.shape);
}
static double training_flops(const Model *model, int B, int T) { return 3 * forward_flops(model, B, T); }

// What a process takes besides its buffers: code, and the GEMM library's own (measured: dev/BENCH.md).
static const size_t PROCESS_BYTES = (size_t)24 << 20;

static void print_memory_row(const char *what, size_t bytes) { printf("  %-44s %10.1f MiB\n", what, (double)bytes / 1048576.0); }

static void print_match(const Model *model, const Options *o) {
    ModelConfig plain = model_as_baseline(&model->config);
    plain.F = (int)o->ffn;
    size_t own = model->tensors.parameter_count, baseline = model_parameter_count(&plain);
    printf("--match-params: MLP %d (baseline: %d), %zu parameters (baseline: %zu, %+.4f%%)\n", model->config.F, plain.F, own, baseline,
           100 * ((double)own / (double)baseline - 1));
}

static void print_dry_run(const Model *model, const Options *o) {
    const ModelConfig *c = &model->config;
    const char *part_names[] = {"embedding", "attention", "MLP", "norms", "LM head (untied)"};
    size_t parts[5] = {0};
    for (int i = 0; i < model->tensors.count; i++) {
        const Tensor *t = &model->tensors.tensors[i];
        TensorKind k = t->row->kind;
        parts[t->ndim == 1 && !strstr(t->name, "self_attn") ? 3 : k == T_EMBED ? 0 : k == T_LM_HEAD ? 4
              : k == T_MLP_GATE || k == T_MLP_UP || k == T_MLP_DOWN ? 2 : 1] += t->count;
    }
    printf("model: %s, %d layers, hidden %d, %d heads (%d query, %d key/value), head dimension %d, MLP %d, vocabulary %d, context %d\n",
           c->attention->name, c->L, c->C, c->NH, model->dims.NQ, c->NKV, c->D, c->F, c->V, c->T);
    printf("parameters\n");
    for (int i = 0; i < 5; i++)
        if (parts[i]) printf("  %-44s %14zu\n", part_names[i], parts[i]);
    printf("  %-44s %14zu\n", "total", model->tensors.parameter_count);
    if (o->match_params) print_match(model, o);
    printf("memory of this process\n");
    print_memory_row("parameters", model->params_bytes);
    print_memory_row("gradients", model->grads_bytes);
    print_memory_row("Adam's moments", model->moments_bytes);
    print_memory_row("activations", model->activations_bytes);
    print_memory_row("workspace", model->workspace_bytes);
    print_memory_row("program and libraries, about", PROCESS_BYTES);
    print_memory_row("total", model->params_bytes + model->grads_bytes + model->moments_bytes + model->activations_bytes +
                                  model->workspace_bytes + PROCESS_BYTES);
    double per_token = training_flops(model, model->B, model->T) / ((double)model->B * model->T);
    char text[4][32];
    format_count(text[0], sizeof(text[0]), per_token);
    format_count(text[1], sizeof(text[1]), per_token * (double)o->total_batch);
    format_count(text[2], sizeof(text[2]), (double)o->total_batch * (double)o->steps);
    format_count(text[3], sizeof(text[3]), per_token * (double)o->total_batch * (double)o->steps);
    printf("FLOPs (forward and backward)\n");
    printf("  %-44s %14s\n  %-44s %14s\n", "per token", text[0], "per step", text[1]);
    printf("  %-44s %14s\n  %-44s %14s\n", "tokens of the run", text[2], "of the run", text[3]);
}

// ---------------------------------------------------------------------------------------------------
// Generation

// Logits (V) after the tokens at positions first .. first+count-1 of one sequence; earlier ones are in the cache.
static void model_next_logits(Model *speaker, const int *tokens, int count, int first, float *logits) {
    Activations *a = &speaker->acts;
    int C = speaker->config.C, V = speaker->config.V;
    buffer_upload(a->inputs, tokens, (size_t)count * sizeof(int));
    model_forward(speaker, 1, count, first);
    matmul_forward(a->logits, a->norm_final + (size_t)(count - 1) * (size_t)C, param(speaker, head_kind(speaker), 0), 1,
                   C, V, speaker->Vp);
    floatX *host = (floatX *)checked_calloc((size_t)V, sizeof(floatX));
    buffer_download(host, a->logits, (size_t)V * sizeof(floatX));
    for (int v = 0; v < V; v++) logits[v] = (float)host[v];
    free(host);
}

// Appends `count` tokens to tokens[0 .. length-1], drawn with the stream `key`. When the context is full, its
// later half is read again at the positions from 0 and generation goes on. Returns how many there are: fewer when
// the logits are not finite.
static int model_generate(Model *speaker, int *tokens, int length, int count, double temperature, int top_k, uint64_t key) {
    int V = speaker->config.V, T = speaker->T;
    float *logits = (float *)checked_calloc((size_t)V, sizeof(float));
    Candidate *candidates = (Candidate *)checked_calloc((size_t)V, sizeof(Candidate));
    int begin = max_int(0, length - T), cached = 0; // tokens[begin ..] is the context; `cached` of it are in the cache
    int end = length;
    for (; end < length + count; end++) {
        if (end - begin > T) {
            begin = end - max_int(1, T / 2);
            cached = 0;
        }
        model_next_logits(speaker, tokens + begin + cached, end - begin - cached, cached, logits);
        cached = end - begin;
        if (!isfinite(logits[0])) break;
        tokens[end] = sample_token(logits, V, temperature, top_k, random_uniform(key, (uint64_t)(end - length)), candidates);
    }
    free(candidates);
    free(logits);
    return end - length;
}

// Text that continues the prompt, on stdout after it; false when it ends early.
static bool print_sample(Model *speaker, const Options *o, const Speech *speech, int count, uint64_t key) {
    int length = speech->prompt_length;
    int *tokens = (int *)checked_calloc((size_t)length + (size_t)count, sizeof(int));
    memcpy(tokens, speech->prompt, (size_t)length * sizeof(int));
    int generated = model_generate(speaker, tokens, length, count, o->temperature, (int)o->top_k, key);
    print_tokens(stdout, tokens + speech->implied, length - speech->implied + generated, speaker->config.V, speech->tokenizer);
    printf("\n");
    fflush(stdout);
    free(tokens);
    return generated == count;
}

// ---------------------------------------------------------------------------------------------------
// A run

typedef struct {
    Options options;
    Model model;
    Model speaker; // the same parameters with memory for generation; only with --sample-every
    DataLoader train, val;
    Speech speech;
    Log log;               // writes nothing without --out
    int64_t step;          // steps done; they count from 1
    int64_t updates;       // of them applied: Adam's own count, for its bias correction
    Guard guard;           // which of them are
    uint64_t next_window;  // of the training order
    uint64_t fingerprint;  // of the training data
    int micro_steps;       // per update
    int *inputs, *targets; // (B, T) on the host
    int *starts;           // likewise, of the documents of inputs; NULL without --doc-mask
    double peak_gflops;
} Run;

static CheckpointBuffers checkpoint_buffers(const Model *model) {
    CheckpointBuffers b;
    memset(&b, 0, sizeof(b));
    b.config = &model->config;
    b.tensors = &model->tensors;
    b.params = model->params;
    b.m = model->m;
    b.v = model->v;
    return b;
}

// The newest checkpoint whose weights have given a finite loss and gradient since, or "none".
static void run_last_good_checkpoint(const Run *run, char path[PATH_SIZE]) {
    int64_t last_finite = run->step - run->guard.not_finite_in_row;
    bool found = run->options.out && checkpoint_find_before(run->options.out, last_finite, path) >= 0;
    if (!found) snprintf(path, PATH_SIZE, "none");
}

static void run_checkpoint(Run *run) {
    if (!run->options.out) return;
    CheckpointBuffers buffers = checkpoint_buffers(&run->model);
    const Speech *speech = &run->speech;
    if (speech->tokenizer) {
        buffers.tokenizer[0].data = speech->tokenizer->memory, buffers.tokenizer[0].size = speech->tokenizer->size;
        buffers.tokenizer[1].data = speech->json, buffers.tokenizer[1].size = speech->json_size;
    }
    if (!checkpoint_weights_finite(&buffers)) {
        char good[PATH_SIZE];
        run_last_good_checkpoint(run, good);
        CHECK(false, "the weights after step %" PRId64 " are not finite and are not saved; try a lower --lr; last good checkpoint: %s",
              run->step, good);
    }
    cJSON *state = cJSON_CreateObject();
    json_add_u64(state, "step", (uint64_t)run->step);
    json_add_u64(state, "updates", (uint64_t)run->updates);
    json_add_u64(state, "next_window", run->next_window);
    json_add_u64(state, "seed", run->options.seed);
    json_add_u64(state, "data_fingerprint", run->fingerprint);
    CHECK(cJSON_AddItemToObject(state, "data", dataloader_identity(&run->train)) &&
              cJSON_AddItemToObject(state, "detectors", guard_to_json(&run->guard)) &&
              cJSON_AddItemToObject(state, "options", options_state_to_json(&run->options)),
          "out of memory for a checkpoint");
    double start = now_seconds();
    log_sync(&run->log);
    checkpoint_save(run->options.out, run->step, &buffers, state);
    checkpoint_prune(run->options.out, run->options.keep, run->step);
    cJSON_Delete(state);
    progress_break();
    printf("checkpoint of step %" PRId64 " written in %.1f s\n", run->step, now_seconds() - start);
}

// Mean loss over the first windows of the validation shards, the same ones each time. by_position (T) or NULL: the means.
static double run_validate(Run *run, double *by_position) {
    Model *model = &run->model;
    int B = model->B, T = model->T;
    uint64_t windows = (uint64_t)run->options.val_steps * (uint64_t)B;
    if (windows > run->val.window_count) windows = run->val.window_count;
    double sum = 0;
    dataloader_start(&run->val, 0);
    for (uint64_t done = 0; done < windows; done += (uint64_t)B) {
        int rows = T * (windows - done < (uint64_t)B ? (int)(windows - done) : B); // the last batch may be partial
        dataloader_next(&run->val, run->inputs, run->targets, run->starts);
        model_read_batch(model, run->inputs, run->targets, run->starts, rows);
        buffer_zero(model->acts.losses, (size_t)rows * sizeof(real));
        model_forward(model, rows / T, T, 0);
        model_classify(model, rows, 0);
        sum += model_loss_sum(model, rows);
        if (by_position) model_losses_by_position(model, by_position, rows, T, (double)windows);
    }
    return sum / ((double)windows * T);
}

static void run_log_validation(Run *run) {
    double loss = run_validate(run, NULL);
    log_begin(&run->log, "val", run->step);
    log_number(&run->log, "loss", loss);
    log_end(&run->log);
    progress_break();
    printf("step %" PRId64 ": validation loss %.4f (perplexity %.2f)\n", run->step, loss, exp(loss));
    fflush(stdout);
}

#include "llmc/evaluation.h" // run_evaluate, for --eval

enum { SAMPLE_TOKENS = 200 };

static void run_print_sample(Run *run) {
    progress_break();
    printf("--- sample after step %" PRId64 "\n", run->step);
    uint64_t key = random_mix(random_key("sample", run->options.seed) + (uint64_t)run->step);
    bool whole = print_sample(&run->speaker, &run->options, &run->speech, SAMPLE_TOKENS, key);
    printf(whole ? "---\n" : "--- cut: the model's logits are not finite\n");
    fflush(stdout);
}

typedef struct {
    double loss, grad_norm, lr, seconds;
    Verdict verdict;
} StepResult;

// One step: gradients of micro_steps micro-batches, then the update, unless it is to be left out.
static StepResult run_step(Run *run) {
    const Options *o = &run->options;
    Model *model = &run->model;
    int B = model->B, T = model->T, N = B * T;
    double start = now_seconds();
    StepResult r;
    buffer_zero(model->grads, model->grads_bytes);
    buffer_zero(model->acts.losses, (size_t)N * sizeof(real));
    for (int micro = 0; micro < run->micro_steps; micro++) {
        dataloader_next(&run->train, run->inputs, run->targets, run->starts);
        model_micro_step(model, run->inputs, run->targets, run->starts, B, T, (double)o->total_batch);
    }
    run->next_window = dataloader_position(&run->train);
    run->step++;
    r.loss = model_loss_sum(model, N) / (double)o->total_batch;
    r.lr = schedule_lr((Schedule)o->schedule, run->step, o->steps, o->warmup, o->lr, o->min_lr_ratio);
    r.grad_norm = model_grad_norm(model);
    r.verdict = guard_judge(&run->guard, r.loss, r.grad_norm, o->skip_loss_z, o->skip_grad_z);
    if (r.verdict.apply) model_update(model, o, r.lr, ++run->updates, r.grad_norm);
    r.seconds = now_seconds() - start;
    return r;
}

static void run_log_step(Run *run, const StepResult *r, double seconds_left) {
    const Options *o = &run->options;
    double flops = training_flops(&run->model, run->model.B, run->model.T) * run->micro_steps;
    double share = flops / r->seconds / (run->peak_gflops * 1e9), tokens_per_s = (double)o->total_batch / r->seconds;
    log_begin(&run->log, "train", run->step);
    log_number(&run->log, "loss", r->loss);
    log_number(&run->log, "grad_norm", r->grad_norm);
    log_number(&run->log, "lr", r->lr);
    log_integer(&run->log, "tokens", run->step * o->total_batch);
    log_number(&run->log, "tokens_per_s", tokens_per_s);
    log_number(&run->log, "ms", 1e3 * r->seconds);
    log_number(&run->log, "flops_util", share);
    log_number(&run->log, "loss_z", r->verdict.loss_z);
    log_number(&run->log, "grad_z", r->verdict.grad_z);
    log_bool(&run->log, "skipped", !r->verdict.apply);
    log_end(&run->log);
    progress_step(run->step, o->steps, r->loss, r->grad_norm, r->lr, tokens_per_s, share, seconds_left);
}

static void run_log_spike(Run *run, const char *of, double value, double z) {
    if (!(z >= SPIKE_Z)) return;
    log_begin(&run->log, "event", run->step);
    log_string(&run->log, "what", "spike");
    log_string(&run->log, "of", of);
    log_number(&run->log, "value", value);
    log_number(&run->log, "z", z);
    log_end(&run->log);
}

// What was out of the ordinary in a step: records in the log, and a line on stderr when its update was left out.
static void run_log_events(Run *run, const StepResult *r) {
    const Verdict *v = &r->verdict;
    run_log_spike(run, "loss", r->loss, v->loss_z);
    run_log_spike(run, "grad_norm", r->grad_norm, v->grad_z);
    if (v->apply) return;
    log_begin(&run->log, "event", run->step);
    log_string(&run->log, "what", v->finite ? "skipped" : "not_finite");
    log_number(&run->log, "loss", r->loss);
    log_number(&run->log, "grad_norm", r->grad_norm);
    log_number(&run->log, "loss_z", v->loss_z);
    log_number(&run->log, "grad_z", v->grad_z);
    if (!v->finite) log_integer(&run->log, "in_row", run->guard.not_finite_in_row);
    log_end(&run->log);
    progress_break();
    if (v->finite)
        warn("step %" PRId64 ": loss %.4f (z %.3g), gradient norm %.4g (z %.3g): skipped, the update was left out", run->step,
             r->loss, v->loss_z, r->grad_norm, v->grad_z);
    else
        warn("step %" PRId64 ": loss %g, gradient norm %g: not finite (%" PRId64 " in a row), the update was left out", run->step,
             r->loss, r->grad_norm, run->guard.not_finite_in_row);
}

static void run_stop_when_nothing_is_finite(Run *run) {
    if (run->guard.not_finite_in_row < NOT_FINITE_LIMIT) return;
    char good[PATH_SIZE];
    run_last_good_checkpoint(run, good);
    log_begin(&run->log, "event", run->step);
    log_string(&run->log, "what", "stopped");
    log_string(&run->log, "why", "not_finite");
    log_string(&run->log, "last_good_checkpoint", good);
    log_end(&run->log);
    log_sync(&run->log);
    CHECK(false, "steps %" PRId64 " to %" PRId64 " had no finite loss and gradient, the run is stopped; try a lower --lr, a longer --warmup, "
          "--grad-clip or --skip-grad-z from an earlier checkpoint; last good checkpoint: %s",
          run->step - run->guard.not_finite_in_row + 1, run->step, good);
}

static void print_spike_score(const char *of, const SpikeDetector *d, const char *end) {
    if (d->judged) printf("%s %.2f%% (%" PRId64 " of %" PRId64 " steps)%s", of, spike_score(d), d->spikes, d->judged, end);
    else printf("%s n/a (no step had %d before it)%s", of, (int)SPIKE_LEAST, end);
}

static void run_print_spikes(const Run *run) {
    const Guard *g = &run->guard;
    printf("spikes: ");
    print_spike_score("loss", &g->loss, ", ");
    print_spike_score("gradient norm", &g->grad_norm, "; ");
    printf("updates left out: %" PRId64 " skipped, %" PRId64 " not finite\n", g->skipped, g->not_finite);
}

// One record per layer. After the update, which leaves activations and gradients, and before a validation, which does not.
static void run_log_stats(Run *run) {
    for (int l = 0; l < run->model.config.L; l++) {
        LayerStats s = layer_stats(&run->model, l, run->model.B, run->model.T);
        log_begin(&run->log, "stats", run->step);
        log_integer(&run->log, "layer", l);
        log_number(&run->log, "lambda_min", s.lambda.min);
        log_number(&run->log, "lambda_mean", s.lambda.mean);
        log_number(&run->log, "lambda_max", s.lambda.max);
        log_number(&run->log, "context_rms_min", s.context_rms.min);
        log_number(&run->log, "context_rms_mean", s.context_rms.mean);
        log_number(&run->log, "context_rms_max", s.context_rms.max);
        log_number(&run->log, "first_mass_map0", s.attention.first[0]);
        log_number(&run->log, "first_mass_map1", s.attention.first[1]);
        log_number(&run->log, "first_mass_effective", s.attention.first_effective);
        log_number(&run->log, "logit_max", s.attention.largest_logit);
        log_number(&run->log, "residual_max", s.residual.largest);
        log_number(&run->log, "residual_median", s.residual.median);
        log_number(&run->log, "grad_norm", s.grad_norm);
        log_end(&run->log);
    }
}

static bool every(int64_t step, int64_t period) { return period > 0 && step % period == 0; }

// A run that ends before its last step says how it goes on. Returns the exit status.
static int run_stopped(Run *run) {
    const Options *o = &run->options;
    const char *why = stop_signal ? strsignal(stop_signal) : "--stop-after";
    log_begin(&run->log, "event", run->step);
    log_string(&run->log, "what", "stopped");
    log_string(&run->log, "why", why);
    log_end(&run->log);
    progress_break();
    if (o->out) printf("stopped after step %" PRId64 " of %" PRId64 " (%s); go on with --out %s --resume\n", run->step, o->steps, why, o->out);
    else printf("stopped after step %" PRId64 " of %" PRId64 " (%s); without --out nothing was saved\n", run->step, o->steps, why);
    run_print_spikes(run);
    return !stop_signal ? EXIT_DONE : o->out ? EXIT_SIGNALLED : EXIT_FAILED;
}

// Steps until the last one, --stop-after or a signal. Returns the exit status.
static int run_train(Run *run) {
    const Options *o = &run->options;
    int64_t first = run->step;
    printf("training from step %" PRId64 " to %" PRId64 ", %" PRId64 " tokens each (%d micro-steps of %d x %d); GEMM peak %.0f GFLOP/s\n",
           first, o->steps, o->total_batch, run->micro_steps, run->model.B, run->model.T, run->peak_gflops);
    fflush(stdout);
    if (o->stats_every && !o->out) warn("--stats-every: the statistics are left out, since without --out there is no log for them");
    if (o->val_data && run->step == 0) run_log_validation(run);
    double busy = 0; // seconds in steps; validation and samples come on top and are few
    dataloader_start(&run->train, run->next_window);
    while (run->step < o->steps && !stop_signal) {
        StepResult r = run_step(run);
        busy += r.seconds;
        run_log_step(run, &r, busy / (double)(run->step - first) * (double)(o->steps - run->step));
        run_log_events(run, &r);
        if (o->out && every(run->step, o->stats_every)) run_log_stats(run);
        run_stop_when_nothing_is_finite(run);
        bool last = run->step == o->steps;
        if (o->val_data && (last || every(run->step, o->val_every))) run_log_validation(run);
        if (every(run->step, o->sample_every)) run_print_sample(run);
        bool stop = last || stop_signal || run->step == o->stop_after;
        bool sound = run->guard.not_finite_in_row == 0; // else it would push a good one out of --keep
        if (stop || (sound && every(run->step, o->checkpoint_every))) run_checkpoint(run);
        if (stop) break;
    }
    if (run->step < o->steps) return run_stopped(run);
    char duration[32];
    format_duration(duration, sizeof(duration), busy);
    printf("done: %" PRId64 " steps in %s, waiting for data %.2f s\n", run->step - first, duration, run->train.wait_seconds);
    run_print_spikes(run);
    return EXIT_DONE;
}

// ---------------------------------------------------------------------------------------------------
// Modes and main

static uint64_t state_number(const cJSON *state, const char *key, uint64_t limit, const char *path) {
    uint64_t value = 0;
    CHECK(json_get_u64(state, key, &value), "%s: trainer_state.json has no \"%s\": it is not a checkpoint of this program", path, key);
    CHECK(value <= limit, "%s: trainer_state.json has \"%s\" %" PRIu64 ", more than %" PRIu64 ": it is not a checkpoint of this program",
          path, key, value, limit);
    return value;
}

// What --resume finds in --out. Without a checkpoint the run starts again from step 0, under the options of run.json.
typedef struct {
    char path[PATH_SIZE]; // what the weights are read from: the checkpoint, or else the run's own --init; or empty
    cJSON *state;         // trainer_state.json; NULL when there is no checkpoint
} Resume;

static Resume resume_find(Options *o) {
    Resume r;
    memset(&r, 0, sizeof(r));
    if (!o->resume) return r;
    cJSON *run_json = log_read_run_json(o->out);
    if (checkpoint_find_newest(o->out, r.path) >= 0) {
        r.state = checkpoint_load_state(r.path);
        options_adopt_json(o, cJSON_GetObjectItemCaseSensitive(r.state, "options"));
    } else {
        const cJSON *options = cJSON_GetObjectItemCaseSensitive(run_json, "options");
        const char *init = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(options, "init"));
        FORMAT(r.path, "%s", init ? init : "");
        options_adopt_json(o, options);
        printf("%s was stopped before its first checkpoint: starting again from step 0\n", o->out);
    }
    cJSON_Delete(run_json);
    return r;
}

// The options, complete, and the model they describe; from a checkpoint where there is one.
static ModelConfig configure(Options *o, Resume *resume, int argc, char **argv) {
    options_parse(o, argc, argv);
    *resume = resume_find(o);
    const char *loaded = resume->path[0] ? resume->path : o->init;
    if (loaded) {
        ModelConfig config = config_json_read(loaded);
        options_adopt_model(o, &config);
    }
    options_adopt_data(o);
    options_finish(o, 1);
    omp_set_num_threads((int)o->threads);
    CHECK(o->gemm != GEMM_BF16 || sizeof(real) == sizeof(float), "--gemm bf16: a build with REAL=double checks mathematics and rounds nothing; take --gemm fp32");
    matmul_use_bf16(o->gemm == GEMM_BF16);
    if (matmul_in_bf16 && !matmul_bf16_native)
        printf("--gemm bf16: this CPU or build does not multiply bf16; the rounded numbers are multiplied in fp32, at its speed\n");
    return options_model(o);
}

// Windows that the run reads in all its steps.
static double run_windows(const Options *o) { return (double)o->steps * (double)o->total_batch / (double)o->seq_len; }

static cJSON *run_description(const Run *run, int argc, char **argv) {
    const Options *o = &run->options;
    cJSON *json = cJSON_CreateObject(), *command = cJSON_AddArrayToObject(json, "command_line");
    for (int i = 0; i < argc; i++) cJSON_AddItemToArray(command, cJSON_CreateString(argv[i]));
    cJSON_AddItemToObject(json, "options", options_to_json(o));
    cJSON *size = cJSON_AddObjectToObject(json, "model"); // with the step's data, what a comparison of runs needs
    json_add_u64(size, "parameters", run->model.tensors.parameter_count);
    cJSON_AddNumberToObject(size, "ffn", run->model.config.F);
    cJSON_AddNumberToObject(size, "flops_per_token", training_flops(&run->model, run->model.B, run->model.T) / ((double)run->model.B * run->model.T));
    json_add_u64(json, "data_fingerprint", run->fingerprint);
    cJSON *data = cJSON_AddObjectToObject(json, "data");
    cJSON_AddItemToObject(data, "train", dataloader_description(&run->train, run_windows(o)));
    if (o->val_data) cJSON_AddItemToObject(data, "val", dataloader_description(&run->val, 0));
    cJSON_AddStringToObject(json, "revision", REVISION);
    struct utsname host;
    CHECK(uname(&host) == 0, "cannot ask for the host's name: %s", strerror(errno));
    cJSON_AddStringToObject(json, "host", host.nodename);
    char text[256];
    FORMAT(text, "%s %s %s", host.sysname, host.release, host.machine);
    cJSON_AddStringToObject(json, "system", text);
    cJSON *devices = cJSON_AddArrayToObject(json, "devices");
    FORMAT(text, "CPU: %d threads on %d cores", (int)o->threads, omp_get_num_procs());
    cJSON_AddItemToArray(devices, cJSON_CreateString(text));
    cJSON *libraries = cJSON_AddObjectToObject(json, "libraries");
    cJSON_AddStringToObject(libraries, "gemm", matmul_library());
    cJSON_AddStringToObject(libraries, "cjson", cJSON_Version());
    FORMAT(text, "%u", XXH_versionNumber());
    cJSON_AddStringToObject(libraries, "xxhash", text);
    cJSON_AddStringToObject(libraries, "compiler", __VERSION__);
    return json;
}

// --dump-grads: one forward and backward over the first B*T + 1 tokens in file order.
static void dump_gradients(Run *run) {
    const Options *o = &run->options;
    Model *model = &run->model;
    size_t N = (size_t)model->B * (size_t)model->T;
    int *tokens = (int *)checked_calloc(N + 1, sizeof(int));
    dataloader_first_tokens(&run->train, tokens, N + 1);
    CHECK(!run->starts || run->train.source_count == 1 || run->train.sources[0].token_count > N,
          "--dump-grads --doc-mask: the first of the corpora has %zu tokens and %zu are read: name one corpus", run->train.sources[0].token_count, N + 1);
    for (int b = 0; run->starts && b < model->B; b++) {
        size_t at = (size_t)b * (size_t)model->T;
        document_starts(run->starts + at, tokens + at, model->T, run->train.sources[0].separator);
    }
    model_micro_step(model, tokens, tokens + 1, run->starts, model->B, model->T, (double)N);
    double loss = model_loss_sum(model, (int)N) / (double)N;
    model_save_dump(o->dump_grads, &model->tensors, model->grads, loss);
    printf("loss %.9g, gradients written to %s\n", loss, o->dump_grads);
    free(tokens);
}

// --train-data or --val-data, with the separators that --doc-mask needs.
static void run_open_data(Run *run, DataLoader *loader, const char *option, const char *text, int V) {
    const Options *o = &run->options;
    dataloader_open(loader, text, (int)o->batch_size, (int)o->seq_len, V, 0, 1, o->seed, loader == &run->train);
    Separator given = {-1, false};
    if (o->separator) separator_parse(o->separator, &given);
    CHECK(given.token < V, "--separator %s: the model has a vocabulary of %d", o->separator, V);
    for (int i = 0; i < loader->source_count; i++) {
        Source *source = &loader->sources[i];
        if (given.token >= 0) source->separator = given;
        CHECK(!o->doc_mask || source->separator.token >= 0,
              "--doc-mask: nothing says which token separates the documents of --%s %s: give --separator ID", option, source->path);
    }
    loader->documents = o->doc_mask;
    struct stat file;
    for (int i = 0; i < loader->source_count; i++) {
        const Source *source = &loader->sources[i];
        if (!source->described && stat(source->path, &file) == 0 && S_ISDIR(file.st_mode))
            printf("--%s %s: no corpus.json, so its shards are taken as they are\n", option, source->path);
    }
    dataloader_refuse_shared(loader);
    if (loader == &run->train && !o->dump_grads) dataloader_print(loader, run_windows(o));
}

// Opens what the mode reads and allocates what it computes with: everything before the first step.
static void run_open(Run *run, const ModelConfig *config, const Resume *resume) {
    const Options *o = &run->options;
    bool training = !o->generate && !o->eval && !o->dry_run;
    int B = (int)o->batch_size, T = (int)o->seq_len;
    Purpose purpose = o->generate ? FOR_GENERATION : o->eval ? FOR_EVALUATION : FOR_TRAINING;
    model_plan(&run->model, config, o->generate ? 1 : B, T, purpose);
    if (o->dry_run) return;
    const char *loaded = resume->path[0] ? resume->path : o->init;
    if (loaded) checkpoint_check_weights(loaded, &run->model.tensors);
    speech_open(&run->speech, o, loaded, !o->generate);
    if (training) run_open_data(run, &run->train, "train-data", o->train_data, config->V);
    if (o->val_data && !o->generate && !o->dump_grads) run_open_data(run, &run->val, "val-data", o->val_data, config->V);
    if (training && !o->dump_grads) run->peak_gflops = matmul_peak_gflops(); // while memory is free
    model_alloc(&run->model, NULL);
    ops_init(run->model.workspace_bytes);
    if (training && !o->dump_grads) run->fingerprint = dataloader_fingerprint(&run->train);
    if (training && o->sample_every) {
        model_plan(&run->speaker, config, 1, T, FOR_GENERATION);
        model_alloc(&run->speaker, &run->model);
    }
    run->inputs = (int *)checked_calloc((size_t)B * (size_t)T, sizeof(int));
    run->targets = (int *)checked_calloc((size_t)B * (size_t)T, sizeof(int));
    if (o->doc_mask) run->starts = (int *)checked_calloc((size_t)B * (size_t)T, sizeof(int));
    run->micro_steps = (int)(o->total_batch / ((int64_t)B * T));

    CheckpointBuffers buffers = checkpoint_buffers(&run->model);
    if (loaded) checkpoint_load_weights(loaded, &buffers, resume->state && training);
    else model_init(&run->model, o->seed);
    if (!resume->state || !training) return;
    run->step = (int64_t)state_number(resume->state, "step", (uint64_t)CHECKPOINT_STEP_LIMIT, resume->path);
    run->updates = (int64_t)state_number(resume->state, "updates", (uint64_t)run->step, resume->path);
    run->next_window = state_number(resume->state, "next_window", UINT64_MAX / 2, resume->path);
    CHECK(guard_from_json(&run->guard, cJSON_GetObjectItemCaseSensitive(resume->state, "detectors")),
          "%s: the \"detectors\" of trainer_state.json are none of this program", resume->path);
    char difference[PATH_SIZE];
    dataloader_difference(&run->train, cJSON_GetObjectItemCaseSensitive(resume->state, "data"), difference, sizeof(difference));
    CHECK(run->fingerprint == state_number(resume->state, "data_fingerprint", UINT64_MAX, resume->path),
          "--train-data %s: not the data that %s was trained on%s; give the same shards and weights, or start anew with --init", o->train_data,
          o->out, difference);
}

static void run_close(Run *run) {
    if (run->train.shard_count) dataloader_close(&run->train);
    if (run->val.shard_count) dataloader_close(&run->val);
    log_close(&run->log);
    speech_close(&run->speech);
    if (run->speaker.params) model_free(&run->speaker, false);
    model_free(&run->model, true);
    ops_free();
    free(run->inputs);
    free(run->targets);
    free(run->starts);
    options_free(&run->options);
}

// Does what the options ask for. Returns the exit status.
static int run_mode(Run *run, int argc, char **argv) {
    const Options *o = &run->options;
    int64_t end = o->stop_after && o->stop_after < o->steps ? o->stop_after : o->steps;
    if (o->dry_run) print_dry_run(&run->model, o);
    else if (o->generate) {
        bool whole = print_sample(&run->model, o, &run->speech, (int)o->generate, random_key("generate", o->seed));
        CHECK(whole, "the model's logits are not finite: its weights are broken or training diverged");
    } else if (o->eval) run_evaluate(run);
    else if (o->dump_grads) dump_gradients(run);
    else if (run->step >= end) printf("%s has done %" PRId64 " of %" PRId64 " steps: nothing to do\n", o->out, run->step, end);
    else {
        options_print(o);
        if (o->match_params) print_match(&run->model, o);
        stop_signals_catch();
        if (o->out && o->resume) log_resume(&run->log, o->out, run->step);
        else if (o->out) {
            cJSON *description = run_description(run, argc, argv);
            log_create(&run->log, o->out, description);
            cJSON_Delete(description);
        }
        if (o->out) checkpoint_clean(o->out);
        return run_train(run);
    }
    return EXIT_DONE;
}

int main(int argc, char **argv) {
    matmul_prepare(argv);
    Run run;
    Resume resume;
    memset(&run, 0, sizeof(run));
    ModelConfig config = configure(&run.options, &resume, argc, argv);
    run_open(&run, &config, &resume);
    int status = run_mode(&run, argc, argv);
    run_close(&run);
    cJSON_Delete(resume.state);
    CHECK(fflush(stdout) == 0 && !ferror(stdout), "cannot write to stdout: %s", strerror(errno));
    return status;
}
