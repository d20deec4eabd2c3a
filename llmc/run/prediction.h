/*
prediction.h: the milliseconds of a training step on a GPU that need not be here (--dry-run --device NAME), from the
operations' FLOPs and bytes (traffic.h) and assumed rates (assumptions.h). Part of train_diffv2.c, which includes it:
predict_* walk through a step as model_micro_step and model_update do.

  operation       the slower of its FLOPs at the peak's share and its bytes at the bandwidth's; never faster than its
                  kernels can be launched
  matrix product  whole waves of tiles over all multiprocessors, for the best of some tiles; K is cut (split-K) only into
                  multiples of 128, as gemm_cublaslt asks
*/
#ifndef LLMC_PREDICTION_H
#define LLMC_PREDICTION_H
#include "assumptions.h"

typedef enum {
    CLASS_BLOCK_GEMMS,
    CLASS_LM_HEAD,
    CLASS_ATTENTION_FORWARD,
    CLASS_ATTENTION_BACKWARD,
    CLASS_SWIGLU,
    CLASS_NORMS,
    CLASS_ROPE,
    CLASS_COMBINE,
    CLASS_CROSS_ENTROPY,
    CLASS_EMBEDDING,
    CLASS_UPDATE,
    CLASS_COMMUNICATION,
    PREDICTION_CLASSES
} PredictionClass;
static const char *const prediction_classes[PREDICTION_CLASSES] = {
    "block GEMMs",
    "LM head",
    "attention forward",
    "attention backward",
    "swiglu",
    "norms",
    "rope",
    "combine and gates",
    "cross-entropy",
    "embedding",
    "optimizer",
    "communication, exposed",
};

// What keeps an operation from being faster.
typedef enum { BOUND_PRODUCTS, BOUND_ATTENTION, BOUND_MEMORY, BOUND_LAUNCHES, BOUND_COMMUNICATION, BOUNDS } Bound;
static const char *const bound_names[BOUNDS] = {"matrix products", "attention", "memory bandwidth",
                                                "launches of kernels", "communication"};
static inline Bound class_bound(PredictionClass kind) {
    return kind <= CLASS_LM_HEAD              ? BOUND_PRODUCTS
           : kind <= CLASS_ATTENTION_BACKWARD ? BOUND_ATTENTION
           : kind == CLASS_COMMUNICATION      ? BOUND_COMMUNICATION
                                              : BOUND_MEMORY;
}

// Stretches of a step; a layer's are of one layer.
typedef enum {
    PART_EMBED,
    PART_LAYER,
    PART_HEAD,
    PART_LAYER_BACKWARD,
    PART_RECOMPUTE,
    PART_EMBED_BACKWARD,
    PART_UPDATE,
    PARTS
} StepPart;

typedef struct {
    const char *name; // of the function
    PredictionClass kind;
    double calls, flops, bytes, ms; // of a step
} PredictedOp;

enum { PREDICTED_OPS = 40 };
typedef struct {
    const ModelPlan *model;
    const Options *options;
    const DevicePeak *device;
    double assumed[ASSUMPTION_COUNT];
    double micro_steps;
    int op_count;
    PredictedOp ops[PREDICTED_OPS];
    StepPart part;
    double times;          // that the part is done in a step
    double part_ms[PARTS]; // of one
    double class_ms[PREDICTION_CLASSES];
    double bound_ms[BOUNDS];
    // of a step's collectives; of that, latency of hops within machines and between them; what is exposed
    double reduce_ms, gather_ms, link_hops_ms, network_hops_ms, exposed_ms;
    double step_ms;
} Prediction;

// ---- memory

// Bytes of a plan for a GPU that is not this program's: what cuDNN's attention backward asks for, by the rules that
// attention_library.cuh has for a device that it cannot ask.
static size_t predicted_workspace(const ModelPlan *model, bool deterministic) {
    AttentionShape s = key_set(model, 0, model->B, model->T, 0).shape;
    size_t T = (size_t)s.T, NQ = (size_t)s.NQ;
    size_t each =
        deterministic ? NQ * round_up(T, 64) * round_up(T, 128) * FLOATX_BYTES : NQ * T * (size_t)s.D * FP32_BYTES;
    each += NQ * T * ((s.NQ > s.NKV ? (size_t)(s.D + s.DV) * FLOATX_BYTES : 0) + FP32_BYTES);
    int n = s.B;
    while (n > 1 && (s.B % n || each * (size_t)n > GPU_ATTENTION_LIMIT)) n--;
    return each * (size_t)n;
}

// Turns a plan into that of the bf16 program on this GPU; nothing is to be allocated by it.
static void model_plan_device(ModelPlan *model, const DevicePeak *gpu, bool deterministic) {
    model->device = gpu;
    if (!gpu || !ops_use_host_memory) return; // a GPU program's plan is its own
    size_t rows = gpu_logit_rows((size_t)model->Vp * FLOATX_BYTES);
    if (model->purpose == FOR_TRAINING) model->logit_rows = (int)min_size((size_t)model->B * (size_t)model->T, rows);
    plan_count_bytes(model, gpu_elements);
    model->workspace_bytes = predicted_workspace(model, deterministic);
    int ranks = model->sharding.ranks;
    model->received_bytes = model->sharding.level == 2 ? model->sharding.largest / (size_t)ranks * FP32_BYTES : 0;
}

// ---- rates

static void predict_op(Prediction *p, PredictionClass kind, const char *name, double calls, int launches, double flops,
                       double bytes, double ms) {
    int i = 0;
    while (i < p->op_count && (strcmp(p->ops[i].name, name) != 0 || p->ops[i].kind != kind)) i++;
    assert(i < PREDICTED_OPS);
    PredictedOp *op = &p->ops[i];
    if (i == p->op_count) {
        p->op_count++;
        memset(op, 0, sizeof(*op));
        op->name = name, op->kind = kind;
    }
    double launch_ms = 1e-3 * launches * p->assumed[ASSUME_LAUNCH];
    Bound bound = ms < launch_ms ? BOUND_LAUNCHES : class_bound(kind);
    ms = calls * fmax(ms, launch_ms);
    op->calls += p->times * calls, op->flops += p->times * calls * flops, op->bytes += p->times * calls * bytes;
    op->ms += p->times * ms;
    p->class_ms[kind] += p->times * ms;
    p->bound_ms[bound] += p->times * ms;
    p->part_ms[p->part] += ms;
}

static double memory_ms(const Prediction *p, double bytes) {
    return 1e-6 * bytes / (p->assumed[ASSUME_MEMORY] * p->device->memory_gbs);
}

// An operation that memory bounds.
static void predict_rows(Prediction *p, PredictionClass kind, const char *name, double calls, int launches,
                         size_t bytes) {
    double share = kind == CLASS_NORMS           ? p->assumed[ASSUME_NORMS]
                   : kind == CLASS_CROSS_ENTROPY ? p->assumed[ASSUME_CROSS_ENTROPY]
                                                 : 1;
    predict_op(p, kind, name, calls, launches, 0, (double)bytes, memory_ms(p, (double)bytes) / share);
}

// C (M,N) = A B over K.
static double gemm_ms(const Prediction *p, int M, int N, int K, double bytes) {
    static const struct {
        int M, N;
        double share;
    } tiles[] = {{128, 256, 1}, {256, 128, 1}, {128, 128, 0.93}, {64, 128, 0.75}};
    double rate = 1e9 * p->device->tflops * p->assumed[ASSUME_GEMM], best = INFINITY;
    int width = device_multiprocessors(p->device);
    for (size_t i = 0; i < sizeof(tiles) / sizeof(tiles[0]); i++)
        for (int split = 1; split == 1 || (split <= 8 && K % (128 * split) == 0); split *= 2) {
            double count = ceil((double)M / tiles[i].M) * ceil((double)N / tiles[i].N) * split,
                   waves = ceil(count / width);
            double flops = waves * width * tiles[i].M * tiles[i].N * 2.0 * K / split;
            double sums = split > 1 ? memory_ms(p, 2.0 * split * M * N * FP32_BYTES) : 0;
            best = fmin(best, flops / (rate * tiles[i].share) + sums);
        }
    double memory = memory_ms(p, bytes);
    return fmax(best, memory) + 0.25 * fmin(best, memory); // the first and last tiles of a wave overlap with nothing
}
static void predict_matmul_forward(Prediction *p, PredictionClass kind, double calls, int N, int IC, int OC) {
    double bytes = (double)matmul_forward_bytes(N, IC, OC);
    predict_op(p, kind, "matmul_forward", calls, 1, matmul_forward_flops(N, IC, OC), bytes,
               gemm_ms(p, N, OC, IC, bytes));
}
// The gradient of the weight is written by `writes` of a step's calls, the others add to it.
static void predict_matmul_backward(Prediction *p, PredictionClass kind, double calls, double writes, int N, int IC,
                                    int OC) {
    double adds = 1 - writes / (calls * p->times), to_input = (double)matmul_to_input_bytes(N, IC, OC);
    double to_weight = (double)matmul_to_weight_bytes(N, IC, OC, false) * (1 - adds) +
                       (double)matmul_to_weight_bytes(N, IC, OC, true) * adds;
    predict_op(p, kind, "matmul_backward", calls, 2, matmul_backward_flops(N, IC, OC), to_input + to_weight,
               gemm_ms(p, N, IC, OC, to_input) + gemm_ms(p, OC, IC, N, to_weight));
}
// Times that a step writes the gradient of a weight: with --zero 2 in each micro-step.
static double gradient_writes(const Prediction *p) { return p->model->sharding.level == 2 ? p->micro_steps : 1; }

static void predict_attention(Prediction *p, AttentionShape s, int sets, bool backward) {
    double share = p->assumed[backward ? ASSUME_ATTENTION_BACKWARD : ASSUME_ATTENTION_FORWARD];
    double length = p->assumed[backward ? ASSUME_BACKWARD_HALF : ASSUME_FORWARD_HALF];
    share *= s.T / (s.T + length) * fmin(1, 0.5 + s.D / 256.0); // narrow heads leave matrix units idle
    if (backward && p->options->deterministic) share *= p->assumed[ASSUME_DETERMINISTIC];
    if (p->options->sdpa == SDPA_OWN) share = p->assumed[ASSUME_OWN_ATTENTION];
    double flops = backward ? attention_backward_flops(s) : attention_forward_flops(s);
    double bytes = (double)(backward ? attention_backward_bytes(s) : attention_forward_bytes(s));
    double ms = fmax(1e-9 * flops / (share * p->device->tflops), memory_ms(p, bytes));
    predict_op(p, backward ? CLASS_ATTENTION_BACKWARD : CLASS_ATTENTION_FORWARD,
               backward ? "attention_backward" : "attention_forward", sets, backward ? 3 : 1, flops, bytes, ms);
}

// ---- a step's operations: the lines of train_diffv2.c

static void predict_begin(Prediction *p, StepPart part, double times) { p->part = part, p->times = times; }

static void predict_subnorm(Prediction *p, int N) {
    const AttentionDims *d = &p->model->dims;
    if (d->norm_count)
        predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N * d->norm_count, d->norm_width));
    if (p->model->config.attention->norm == NORM_HEAD)
        predict_rows(p, CLASS_NORMS, "scale_inplace", 1, 1, scale_bytes((size_t)N * (size_t)(d->OH * d->DV)));
}

static void predict_context(Prediction *p, int N) {
    const AttentionDims *d = &p->model->dims;
    const AttentionVariant *v = p->model->config.attention;
    predict_attention(p, key_set(p->model, 0, p->model->B, p->model->T, 0).shape, v->key_sets, false);
    if (v->sink) predict_rows(p, CLASS_COMBINE, "sink_forward", 1, 1, sink_forward_bytes(N, d->NQ, d->DV));
    if (d->pair_stride && d->lambda_rows == 0)
        predict_rows(p, CLASS_COMBINE,
                     v->lambda == LAMBDA_SCALAR ? "lambda_scalar_forward"
                     : v->lambda == LAMBDA_EXP  ? "lambda_exp_forward"
                                                : "fill_forward",
                     1, 1, layer_lambda_bytes((size_t)N * (size_t)d->OH));
    if (d->pair_stride)
        predict_rows(p, CLASS_COMBINE, "diff_combine_forward", 1, 1, diff_combine_forward_bytes(N, d->OH, d->DV));
    predict_subnorm(p, N);
    if (d->gate_width)
        predict_rows(p, CLASS_COMBINE, "gate_forward", 1, 1, gate_forward_bytes(N, d->OH, d->DV, d->gate_width));
}

static void predict_block_attention(Prediction *p, int N) {
    const ModelConfig *c = &p->model->config;
    const AttentionDims *d = &p->model->dims;
    predict_matmul_forward(p, CLASS_BLOCK_GEMMS, 1, N, c->C, d->fused_rows);
    predict_rows(p, CLASS_ROPE, "rope_forward", 1, 1, rope_bytes(N, d->NQ + d->NK, d->QD));
    predict_context(p, N);
    predict_matmul_forward(p, CLASS_BLOCK_GEMMS, 1, N, c->NH * c->D, c->C);
    predict_rows(p, CLASS_NORMS, "residual_rmsnorm_forward", 1, 1, residual_rmsnorm_forward_bytes(N, c->C));
}
static void predict_block_mlp(Prediction *p, int N) {
    const ModelConfig *c = &p->model->config;
    predict_matmul_forward(p, CLASS_BLOCK_GEMMS, 1, N, c->C, 2 * c->F);
    predict_rows(p, CLASS_SWIGLU, "swiglu_forward", 1, 1, swiglu_forward_bytes(N, c->F));
}

static void predict_forward(Prediction *p, int N) {
    const ModelConfig *c = &p->model->config;
    predict_begin(p, PART_EMBED, p->micro_steps);
    predict_rows(p, CLASS_EMBEDDING, "embedding_forward", 1, 1, embedding_forward_bytes(N, c->C));
    predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N, c->C));
    predict_begin(p, PART_LAYER, p->micro_steps * c->L);
    predict_block_attention(p, N);
    predict_block_mlp(p, N);
    predict_matmul_forward(p, CLASS_BLOCK_GEMMS, 1, N, c->F, c->C);
    predict_rows(p, CLASS_NORMS, "residual_rmsnorm_forward", 1, 1, residual_rmsnorm_forward_bytes(N, c->C));
}

static void predict_head(Prediction *p, int N) {
    const ModelPlan *m = p->model;
    int C = m->config.C, V = m->config.V, rows = min_int(m->logit_rows, N), rest = N % rows;
    predict_begin(p, PART_HEAD, p->micro_steps);
    for (int last = 0; last <= (rest > 0); last++) {
        int n = last ? rest : rows, chunks = last ? 1 : N / rows;
        predict_matmul_forward(p, CLASS_LM_HEAD, chunks, n, C, V);
        predict_rows(p, CLASS_CROSS_ENTROPY, "cross_entropy", chunks, 1, cross_entropy_bytes(n, V, m->Vp, true));
        predict_matmul_backward(p, CLASS_LM_HEAD, chunks, last ? 0 : gradient_writes(p), n, C, V);
    }
    predict_rows(p, CLASS_NORMS, "rmsnorm_backward", 1, 2, rmsnorm_backward_bytes(N, C));
}

static void predict_context_backward(Prediction *p, int N) {
    const AttentionDims *d = &p->model->dims;
    const AttentionVariant *v = p->model->config.attention;
    if (d->gate_width)
        predict_rows(p, CLASS_COMBINE, "gate_backward", 1, 1, gate_backward_bytes(N, d->OH, d->DV, d->gate_width));
    if (v->norm == NORM_HEAD)
        predict_rows(p, CLASS_NORMS, "scale_inplace", 1, 1, scale_bytes((size_t)N * (size_t)(d->OH * d->DV)));
    if (d->norm_count)
        predict_rows(p, CLASS_NORMS, "rmsnorm_backward", 1, 2,
                     rmsnorm_backward_bytes(N * d->norm_count, d->norm_width));
    if (d->pair_stride)
        predict_rows(p, CLASS_COMBINE, "diff_combine_backward", 1, 1, diff_combine_backward_bytes(N, d->OH, d->DV));
    if (v->lambda == LAMBDA_SCALAR || v->lambda == LAMBDA_EXP)
        predict_rows(p, CLASS_COMBINE, v->lambda == LAMBDA_SCALAR ? "lambda_scalar_backward" : "lambda_exp_backward", 1,
                     2, layer_lambda_bytes((size_t)N * (size_t)d->OH));
    if (v->sink == SINK_LEARNED)
        predict_rows(p, CLASS_COMBINE, "sink_backward", 1, 2, sink_backward_bytes(N, d->NQ, d->DV));
    predict_attention(p, key_set(p->model, 0, p->model->B, p->model->T, 0).shape, v->key_sets, true);
}

static void predict_backward(Prediction *p, int N) {
    const ModelConfig *c = &p->model->config;
    const AttentionDims *d = &p->model->dims;
    double writes = gradient_writes(p) * c->L;
    predict_begin(p, PART_LAYER_BACKWARD, p->micro_steps * c->L);
    predict_matmul_backward(p, CLASS_BLOCK_GEMMS, 1, writes, N, c->F, c->C);
    predict_rows(p, CLASS_SWIGLU, "swiglu_backward", 1, 1, swiglu_backward_bytes(N, c->F));
    predict_matmul_backward(p, CLASS_BLOCK_GEMMS, 1, writes, N, c->C, 2 * c->F);
    predict_rows(p, CLASS_NORMS, "rmsnorm_backward", 2, 2, rmsnorm_backward_bytes(N, c->C));
    predict_matmul_backward(p, CLASS_BLOCK_GEMMS, 1, writes, N, c->NH * c->D, c->C);
    predict_context_backward(p, N);
    predict_rows(p, CLASS_ROPE, "rope_backward", 1, 1, rope_bytes(N, d->NQ + d->NK, d->QD));
    predict_matmul_backward(p, CLASS_BLOCK_GEMMS, 1, writes, N, c->C, d->fused_rows);
    predict_begin(p, PART_EMBED_BACKWARD, p->micro_steps);
    int distinct = (int)(c->V * (1 - exp(-(double)N / c->V))); // of N tokens with equal chances
    predict_rows(p, CLASS_EMBEDDING, "embedding_backward", 1, 13, embedding_backward_bytes(N, c->C, distinct));
}

static void predict_recompute(Prediction *p, int N) {
    const ModelPlan *m = p->model;
    predict_begin(p, PART_RECOMPUTE, p->micro_steps * (m->config.L - 1));
    if (m->recompute == RECOMPUTE_NOTHING) return;
    predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N, m->config.C));
    if (m->recompute == RECOMPUTE_BLOCK) predict_block_attention(p, N);
    else {
        predict_subnorm(p, N);
        predict_rows(p, CLASS_NORMS, "rmsnorm_forward", 1, 1, rmsnorm_forward_bytes(N, m->config.C));
    }
    predict_block_mlp(p, N);
}

static void predict_update(Prediction *p) {
    const ModelPlan *m = p->model;
    const Sharding *s = &m->sharding;
    size_t own = s->level ? s->own : m->tensors.buffer_count;
    predict_begin(p, PART_UPDATE, 1);
    int zeroed = 0; // gradients that no product writes
    size_t zeros = 0;
    for (int i = 0; i < m->tensors.count; i++) {
        const Tensor *t = &m->tensors.tensors[i];
        if (!is_product_weight(m, t)) zeroed++, zeros += t->count;
    }
    predict_rows(p, CLASS_UPDATE, "buffer_zero", 1, 1, (size_t)m->B * (size_t)m->T * FP32_BYTES); // the losses
    predict_rows(p, CLASS_UPDATE, "buffer_zero", zeroed * gradient_writes(p), 1, zeros * FP32_BYTES / (size_t)zeroed);
    predict_rows(p, CLASS_UPDATE, "sum_of_squares", s->count, 2, sum_of_squares_bytes(s->own) / (size_t)s->count);
    predict_rows(p, CLASS_UPDATE, "adamw_update", m->tensors.count, 1,
                 adamw_bytes(own, true) / (size_t)m->tensors.count);
}

#include "prediction_communication.h"

// ---- a step

// changed: an assumption that is a tenth worse; ASSUMPTION_COUNT: none.
static Prediction predict_step(const ModelPlan *model, const Options *o, int changed) {
    Prediction p;
    memset(&p, 0, sizeof(p));
    p.model = model, p.options = o, p.device = model->device;
    p.micro_steps = (double)o->total_batch / ((double)model->B * model->T * model->sharding.ranks);
    for (int i = 0; i < ASSUMPTION_COUNT; i++) {
        p.assumed[i] = assumptions[i].value[p.device->generation];
        if (i == changed) p.assumed[i] *= assumptions[i].cost ? 1.1 : 0.9;
    }
    int N = model->B * model->T;
    predict_forward(&p, N);
    predict_head(&p, N);
    predict_backward(&p, N);
    predict_recompute(&p, N);
    predict_update(&p);
    predict_communication(&p);
    for (int i = 0; i < PREDICTION_CLASSES; i++) p.step_ms += p.class_ms[i];
    return p;
}
#endif
