/*
recorded_operations.h: the third twin of the operations that a training step calls: each records its FLOPs, bytes
(operations.h of its folder) and predicted time on a GPU instead of computing. predict_diffv2.c includes the trainer
with them, so that the trainer's calls are the prediction's list of operations. Nothing is allocated: pointers are
places in an address space that nothing dereferences. Sizes of workspaces and copies are those of the CUDA twins.

  clock        `now` advances by the time of each operation
  collectives  run one after another, from the time at which they are called. The ticket of one is the time at which it
               ends, in picoseconds. Communication is exposed when comm_wait waits for it
*/
#pragma once
#ifndef RECORDED_OPS
#define RECORDED_OPS
#endif
#include "../../llmc/experts/all_operations.h"
#include "../../llmc/ops/attention/attention_sparse_apart.h"

static inline void *buffer_alloc(size_t bytes, const char *what);
static inline void buffer_free(void *p);
static inline void buffer_zero(void *p, size_t bytes);
static inline void buffer_upload(void *to, const void *host, size_t bytes);
static inline void buffer_download(void *host, const void *from, size_t bytes);
static inline void comm_gather(void *all, const void *mine, size_t bytes);
static inline void comm_broadcast(void *data, size_t bytes);
static inline uint64_t comm_reduce_scatter(grad_t *bucket, size_t piece, grad_t *out, bool add, bool all_groups);
static inline uint64_t comm_all_gather(void *bucket, const void *piece, size_t piece_bytes);
static inline void comm_wait(uint64_t ticket);

#include "prediction_communication.h"
#include "prediction_rates.h"
#include "../../llmc/model/linear_layers.h"

static const bool ops_use_host_memory = false;

static struct {
    const DevicePeak *device; // of the plan that is being built
    const Options *options;
    Prediction *p;      // of the step that is being recorded
    const floatX *head; // the LM head's weight
    double times;       // how often the step does what is being recorded
    double now;         // milliseconds
    double ring;        // when the last collective ends
    size_t allocated;
} recorded;

static inline void record(PredictionClass kind, const char *name, int launches, double flops, double bytes, double ms) {
    Prediction *p = recorded.p;
    int i = 0;
    while (i < p->op_count && (strcmp(p->ops[i].name, name) != 0 || p->ops[i].kind != kind)) i++;
    assert(i < PREDICTED_OPS);
    PredictedOp *op = &p->ops[i];
    if (i == p->op_count) p->op_count++, op->name = name, op->kind = kind;
    double launch_ms = 1e-3 * launches * p->assumed[ASSUME_LAUNCH], times = recorded.times;
    Bound bound = ms < launch_ms ? BOUND_LAUNCHES : prediction_classes[kind].bound;
    ms = prediction_classes[kind].bound == BOUND_PRODUCTS ? ms + launch_ms : fmax(ms, launch_ms);
    op->calls += times, op->flops += times * flops, op->bytes += times * bytes, op->ms += times * ms;
    p->class_ms[kind] += times * ms;
    p->bound_ms[bound] += times * ms;
    recorded.now += ms;
}

// An operation whose speed memory bandwidth limits.
static inline void record_rows(PredictionClass kind, const char *name, int launches, size_t bytes) {
    const Prediction *p = recorded.p;
    double share = kind == CLASS_NORMS           ? p->assumed[ASSUME_NORMS]
                   : kind == CLASS_CROSS_ENTROPY ? p->assumed[ASSUME_CROSS_ENTROPY]
                                                 : 1;
    record(kind, name, launches, 0, (double)bytes, memory_ms(p, (double)bytes) / share);
}

// ---- memory

static inline int ops_memory_parts(MemoryPart *parts) {
    parts[0] = memory_part("CUDA and its libraries, about", PREDICTED_CUDA_BYTES, true);
    return 1;
}
static inline void *buffer_alloc(size_t bytes, const char *what) {
    char *place = (char *)4096 + recorded.allocated;
    recorded.allocated += round_up(bytes, 4096);
    return place;
}
static inline void buffer_free(void *p) {}
static inline void buffer_zero(void *p, size_t bytes) { record_rows(CLASS_UPDATE, __func__, 1, bytes); }
static inline void buffer_upload(void *to, const void *host, size_t bytes) {}
static inline void buffer_download(void *host, const void *from, size_t bytes) { memset(host, 0, bytes); }
static inline void rope_table(real *table, int positions, int D, double theta) {}

// ---- collectives

// A collective that sends so many bytes.
static inline uint64_t record_ring(Ring ring, double bytes, double *total) {
    Prediction *p = recorded.p;
    recorded.ring = fmax(recorded.ring, recorded.now) + ring.ms;
    *total += recorded.times * ring.ms;
    p->sent_bytes += recorded.times * bytes;
    p->link_hops_ms += recorded.times * ring.link_ms, p->network_hops_ms += recorded.times * ring.network_ms;
    return (uint64_t)(1e9 * recorded.ring);
}
static inline uint64_t comm_reduce_scatter(grad_t *bucket, size_t piece, grad_t *out, bool add, bool all_groups) {
    Prediction *p = recorded.p;
    RingSpan group = ring_in_group(p), across = ring_across_groups(p);
    double bytes = (double)(piece * sizeof(grad_t)), *total = &p->reduce_ms;
    uint64_t ticket = record_ring(ring_of(p, group, group.ranks * bytes), (group.ranks - 1) * bytes, total);
    if (!all_groups || across.ranks == 1) return ticket;
    return record_ring(all_reduce_of(p, across, bytes), 2 * bytes * (across.ranks - 1) / across.ranks, total);
}
// With --zero 0 the sums of gradients are gathered.
static inline uint64_t comm_all_gather(void *bucket, const void *piece, size_t piece_bytes) {
    Prediction *p = recorded.p;
    RingSpan group = ring_in_group(p);
    double bytes = (double)piece_bytes, *total = p->plan->sharding.level ? &p->gather_ms : &p->reduce_ms;
    return record_ring(ring_of(p, group, group.ranks * bytes), (group.ranks - 1) * bytes, total);
}
static inline void comm_wait(uint64_t ticket) {
    double waits = fmax(0, 1e-9 * (double)ticket - recorded.now);
    recorded.now += waits;
    recorded.p->exposed_ms += recorded.times * waits;
}
static inline void comm_gather(void *all, const void *mine, size_t bytes) { memset(all, 0, bytes * comm_ranks()); }
static inline void comm_broadcast(void *data, size_t bytes) {}

// ---- linear layers

static inline size_t matmul_rows_at_a_time(size_t row_bytes) { return gpu_logit_rows(row_bytes); }
static inline bool linear_in_fp8(void) { return recorded.options->matmul_dtype == GEMM_FP8; }
static inline bool linear_experts_in_fp8(void) {
    return linear_in_fp8() && generation_mma_fp8[recorded.device->generation];
}
static inline size_t linear_copy_bytes(int IC, int OC, bool plain) {
    return linear_in_fp8() && !plain ? fp8_copy_bytes(IC, OC) : 0;
}
static inline size_t linear_workspace_bytes(int N, int IC, int OC) { return fp8_workspace_bytes(N, IC, OC); }
static inline size_t expert_linear_workspace_bytes(int N, int R, int E, int IC, int OC) {
    return expert_fp8_workspace_bytes(R, E, IC, OC);
}

static inline PredictionClass linear_class(const Linear *w) {
    return w->weight == recorded.head ? CLASS_LM_HEAD : CLASS_BLOCK_GEMMS;
}
static inline void linear_forward(floatX *y, Activation x, const Linear *w, int N) {
    const Prediction *p = recorded.p;
    bool fp8 = w->copy != NULL;
    double rounding = fp8 ? (double)fp8_quantize_bytes(N, w->IC, 1) : 0;
    size_t padded = fp8_padded(w->OC); // rows of y have room for it
    double bytes = (double)(fp8 ? fp8_product_bytes(N, padded, w->IC, sizeof(floatX), false)
                                : matmul_forward_bytes(N, w->IC, w->OC));
    record(linear_class(w), __func__, fp8 ? 2 : 1, matmul_forward_flops(N, w->IC, w->OC), rounding + bytes,
           memory_ms(p, rounding) + gemm_ms(p, N, w->OC, w->IC, bytes, gemm_rate(p, w->IC, w->OC, fp8)));
}
static inline void linear_backward(floatX *dx, Activation dy, Activation x, const Linear *w, int N, bool add) {
    const Prediction *p = recorded.p;
    int IC = w->IC, OC = w->OC;
    bool fp8 = w->copy != NULL;
    double rounding = fp8 ? (double)(fp8_quantize_bytes(N, IC, 1) + fp8_quantize_bytes(N, OC, 2)) : 0;
    double rate = gemm_rate(p, IC, OC, fp8);
    double to_x = (double)(fp8 ? fp8_product_bytes(N, IC, OC, sizeof(floatX), false) : matmul_forward_bytes(N, IC, OC));
    double to_weight =
        (double)(fp8 ? fp8_product_bytes(OC, IC, N, sizeof(grad_t), add) : matmul_dweight_bytes(N, IC, OC, add));
    record(linear_class(w), __func__, fp8 ? 4 : 2, matmul_backward_flops(N, IC, OC), rounding + to_x + to_weight,
           memory_ms(p, rounding) + gemm_ms(p, N, IC, OC, to_x, rate) + gemm_ms(p, OC, IC, N, to_weight, rate));
}
static inline size_t copy_traffic(const Linear *w) {
    return absmax_bytes(w->OC, w->IC) + fp8_quantize_bytes(w->OC, w->IC, 2);
}
static inline void linear_copy_weight(const Linear *w) { record_rows(CLASS_FP8, __func__, 3, copy_traffic(w)); }
static inline void expert_linear_copy_weights(const ExpertLinear *w) {
    record_rows(CLASS_FP8, __func__, 3, (size_t)w->count * copy_traffic(&w->first));
}
static inline void absmax_update(Activation x, int N, int columns, int ld) {
    if (x.max) record_rows(CLASS_FP8, __func__, 1, absmax_bytes(N, columns));
}

// ---- attention

// As attention_share of attention_plans.cuh, for a device whose memory is unknown.
static inline size_t attention_share(size_t n, size_t bytes, size_t lse) {
    size_t best = n;
    for (size_t d = n; d > 0 && best * bytes > GPU_ATTENTION_LIMIT; d--)
        if (n % d == 0 && d * lse % 4 == 0) best = d;
    return best;
}
// The built-in backward needs rows of numbers, and dQ in fp32 (attention_mma_backward.cuh); cuDNN follows the rules of
// attention_plans.cuh. With --doc-mask a call of cuDNN computes several documents.
static inline size_t attention_workspace_bytes(AttentionShape s, int threads) {
    enum { DOCUMENT_BYTES = 136, DOCUMENT_TOKENS = 512 }; // tables and cuDNN's own; as attention_slots
    bool documents = recorded.options->doc_mask;
    AttentionKernel by = predicted_attention(recorded.device, recorded.options, s, true);
    if (by != BY_CUDNN) return (size_t)s.B * s.NQ * s.T * (by == BY_TENSOR_CORES ? s.D + 4 : 1) * sizeof(real);
    size_t T = s.T, rows = s.B * T, group = s.NQ / s.NKV, head = T * sizeof(real); // rowsum(dO O)
    head +=
        recorded.options->deterministic ? round_up(T, 64) * round_up(T, 128) * sizeof(floatX) : T * s.D * sizeof(real);
    head += group > 1 ? T * (s.D + s.DV) * sizeof(floatX) : 0;
    size_t slots = min_size(rows, s.B + (rows + DOCUMENT_TOKENS - 1) / DOCUMENT_TOKENS);
    size_t sequences = documents ? min_size(slots, max_size(1, GPU_ATTENTION_LIMIT / (s.NQ * head)))
                                 : attention_share(s.B, s.NQ * head, s.NQ * T);
    size_t groups = sequences == 1 ? attention_share(s.NKV, group * head, group * T) : (size_t)s.NKV;
    return sequences * (groups * group * head + (documents ? DOCUMENT_BYTES : 0));
}
static inline size_t attention_decode_workspace_bytes(AttentionShape s, int capacity, int threads) { return 0; }
static inline void attention_reserve(size_t bytes) {}
static inline void attention_prepare(AttentionShape s, bool backward, bool add_dv) {}
static inline const char *attention_warning(void) { return NULL; }
static inline void record_attention(const char *name, AttentionShape s, AttentionKernel by, bool backward) {
    bool group = s.groups.noise;
    double flops = backward ? attention_backward_flops(s) : attention_forward_flops(s);
    double bytes = (double)(group ? (backward ? diff_attention_backward_bytes(s) : diff_attention_forward_bytes(s))
                                  : (backward ? attention_backward_bytes(s) : attention_forward_bytes(s)));
    record(backward ? CLASS_ATTENTION_BACKWARD : CLASS_ATTENTION_FORWARD, name, backward ? 3 : 1, flops, bytes,
           attention_ms(recorded.p, s, by, flops, bytes, backward));
}
static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s) {
    record_attention(__func__, s, predicted_attention(recorded.device, recorded.options, s, false), false);
}
static inline void rope_backward(floatX *dx, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                 const int *first) {
    record_rows(CLASS_ROPE, __func__, 1, rope_bytes((size_t)B * T, heads, D));
}
static inline void record_attention_backward(const char *name, AttentionShape s, AttentionKernel by) {
    record_attention(name, s, by, true);
    if (!predicted_rotates(recorded.device, s, by))
        rope_backward(NULL, s.rope, s.B, s.T, s.rope_heads, s.D, s.ldq, s.q_head, NULL);
}
static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv) {
    record_attention_backward(__func__, s, predicted_attention(recorded.device, recorded.options, s, true));
}
static inline void sparse_attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                            const int *first, int capacity, AttentionShape s) {
    record_attention(__func__, s, predicted_attention(recorded.device, recorded.options, s, false), false);
}
static inline void sparse_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                             const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                             AttentionShape s, bool add_dv) {
    record_attention_backward(__func__, s, predicted_attention(recorded.device, recorded.options, s, true));
}
static inline void attention_documents(int *list, const int *first_key, const int *document_starts, int N, int T) {
    record_rows(CLASS_ATTENTION_FORWARD, __func__, 1, (size_t)N * sizeof(int));
}
static inline void rope_forward(floatX *x, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                const int *first) {
    record_rows(CLASS_ROPE, __func__, 1, rope_bytes((size_t)B * T, heads, D));
}
static inline void sparse_means(real *means, const floatX *k, const int *first, int capacity, int sets,
                                AttentionShape s) {
    record_rows(CLASS_ATTENTION_FORWARD, __func__, 1, (size_t)s.B * s.T * s.NKV * sets * s.D * sizeof(floatX));
}
static inline void sparse_select(int *lists, const floatX *q, const real *means, const int *first, int sets,
                                 AttentionShape s) {
    size_t rows = (size_t)s.B * s.T;
    double bytes = (double)(rows * (s.NQ * sets * s.D * sizeof(floatX) + s.NKV * sparse_width(s.sparse) * sizeof(int)));
    record(CLASS_ATTENTION_FORWARD, __func__, 1, sets * sparse_select_flops(s), bytes, memory_ms(recorded.p, bytes));
}
static inline void sink_forward(floatX *out, real *lse, const floatX *sinks, int B, int T, int NH, int D) {
    record_rows(CLASS_COMBINE, __func__, 1, sink_forward_bytes((size_t)B * T, NH, D));
}
static inline void sink_backward(grad_t *dsinks, const floatX *dout, const floatX *out, const real *lse,
                                 const floatX *sinks, int B, int T, int NH, int D) {
    record_rows(CLASS_COMBINE, __func__, 2, sink_backward_bytes((size_t)B * T, NH, D));
}
static inline size_t combined_heads(int NH, HeadGroups g) { return (size_t)(NH + NH * g.noise / g.signals); }
static inline void diff_combine_forward(Activation o, const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                        HeadGroups groups, Factor factor) {
    record_rows(CLASS_COMBINE, __func__, 1, diff_combine_forward_bytes(N, combined_heads(NH, groups), NH, D));
}
static inline void diff_combine_backward(floatX *da, floatX *dl, const floatX *do_, const floatX *a, const floatX *l,
                                         int N, int NH, int D, int ldl, HeadGroups groups, Factor factor) {
    record_rows(CLASS_COMBINE, __func__, 1, diff_combine_backward_bytes(N, combined_heads(NH, groups), NH, D));
}
// As the CUDA twin: pairs together, or attention of all heads and diff_combine.
static inline bool record_pairs(AttentionShape s) { return predicted_pairs(recorded.device, recorded.options, s); }
static inline int diff_attention_kept(AttentionShape s) { return record_pairs(s) ? s.NQ / attention_maps(s) : s.NQ; }
static inline void diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                          const floatX *v, const floatX *l, int ldl, AttentionShape s, Factor factor) {
    AttentionKernel by = predicted_attention(recorded.device, recorded.options, s, false);
    if (record_pairs(s)) {
        record_attention(__func__, s, by, false);
        absmax_update(out, s.B * s.T, output_heads(s.groups, s.NQ) * s.DV, s.ldo);
        return;
    }
    record_attention("attention_forward", attention_of_heads(s), by, false);
    diff_combine_forward(out, kept, l, s.B * s.T, output_heads(s.groups, s.NQ), s.DV, ldl, s.groups, factor);
}
static inline void diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                           const floatX *dout, const floatX *out, const floatX *kept, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v, const floatX *l, int ldl,
                                           AttentionShape s, Factor factor) {
    AttentionKernel by = predicted_attention(recorded.device, recorded.options, s, true);
    if (record_pairs(s)) {
        record_attention_backward(__func__, s, by);
        return;
    }
    diff_combine_backward(dkept, dl, dout, kept, l, s.B * s.T, output_heads(s.groups, s.NQ), s.DV, ldl, s.groups,
                          factor);
    record_attention_backward("attention_backward", attention_of_heads(s), by);
}
static inline void fill_forward(floatX *l, real value, size_t count) {
    record_rows(CLASS_COMBINE, __func__, 1, layer_lambda_bytes(count));
}
static inline void lambda_learned_forward(floatX *l, const floatX *lambda, size_t count) {
    record_rows(CLASS_COMBINE, __func__, 1, layer_lambda_bytes(count));
}
static inline void lambda_learned_backward(grad_t *dlambda, const floatX *dl, size_t count) {
    record_rows(CLASS_COMBINE, __func__, 2, layer_lambda_bytes(count));
}
static inline void lambda_exp_forward(floatX *l, const floatX *q1, const floatX *k1, const floatX *q2, const floatX *k2,
                                      int D, real init, size_t count) {
    record_rows(CLASS_COMBINE, __func__, 1, layer_lambda_bytes(count));
}
static inline void lambda_exp_backward(grad_t *dq1, grad_t *dk1, grad_t *dq2, grad_t *dk2, const floatX *dl,
                                       const floatX *q1, const floatX *k1, const floatX *q2, const floatX *k2, int D,
                                       size_t count) {
    record_rows(CLASS_COMBINE, __func__, 2, layer_lambda_bytes(count));
}
static inline void gate_forward(Activation y, const floatX *x, const floatX *g, int N, int heads, int D, int ldg,
                                int width) {
    record_rows(CLASS_COMBINE, __func__, 1, gate_forward_bytes(N, heads, D, width));
}
static inline void gate_backward(floatX *dx, floatX *dg, const floatX *dy, const floatX *x, const floatX *g, int N,
                                 int heads, int D, int ldg, int width) {
    record_rows(CLASS_COMBINE, __func__, 1, gate_backward_bytes(N, heads, D, width));
}

// ---- norms

// The workspaces of these are smaller than that of attention.
static inline size_t rmsnorm_workspace_bytes(int C) { return 0; }
static inline size_t head_norm_workspace_bytes(int D) { return 0; }
static inline size_t embedding_workspace_bytes(int N) { return 0; }
static inline void rmsnorm_forward(Activation y, real *rstd, const floatX *x, const floatX *weight, int N, int C,
                                   real eps) {
    record_rows(CLASS_NORMS, __func__, 1, rmsnorm_forward_bytes(N, C));
}
static inline void rmsnorm_backward(Activation dx, grad_t *dweight, const floatX *dy, const floatX *x,
                                    const floatX *weight, const real *rstd, int N, int C, bool add) {
    record_rows(CLASS_NORMS, __func__, 2, rmsnorm_backward_bytes(N, C));
}
static inline void residual_rmsnorm_forward(floatX *sum, Activation y, real *rstd, const floatX *a, const floatX *b,
                                            const floatX *weight, int N, int C, real eps) {
    record_rows(CLASS_NORMS, __func__, 1, residual_rmsnorm_forward_bytes(N, C));
}
static inline void head_norm_forward(floatX *x, floatX *kept, const floatX *weight, int N, int heads, int D, int ld,
                                     int ldk, real eps) {
    record_rows(CLASS_NORMS, __func__, 1, head_norm_forward_bytes(N, heads, D, kept != NULL));
}
static inline void head_norm_backward(floatX *dx, grad_t *dweight, const floatX *kept, const floatX *weight, int N,
                                      int heads, int D, int ld, int ldk, real eps) {
    record_rows(CLASS_NORMS, __func__, 2, head_norm_backward_bytes(N, heads, D));
}
static inline void scale_inplace(floatX *x, real factor, size_t count) {
    record_rows(CLASS_NORMS, __func__, 1, scale_bytes(count));
}

// ---- embedding, MLP and loss

static inline void embedding_forward(floatX *x, const int *tokens, const floatX *weight, int N, int C) {
    record_rows(CLASS_EMBEDDING, __func__, 1, embedding_forward_bytes(N, C));
}
static inline void embedding_backward(grad_t *dweight, const floatX *dx, const int *tokens, int N, int C) {
    int V = recorded.p->plan->config.V;
    int distinct = (int)(V * (1 - exp(-(double)N / V))); // expected among N tokens, all equally likely
    record_rows(CLASS_EMBEDDING, __func__, 13, embedding_backward_bytes(N, C, distinct));
}
static inline void swiglu_forward(Activation y, const floatX *gate_up, int N, int F) {
    record_rows(CLASS_SWIGLU, __func__, 1, swiglu_forward_bytes(N, F));
}
static inline void swiglu_backward(Activation dgate_up, const floatX *dy, const floatX *gate_up, int N, int F) {
    record_rows(CLASS_SWIGLU, __func__, 1, swiglu_backward_bytes(N, F));
}
static inline void add_to_sum(real *sum, floatX *x, size_t count, bool add) {
    record_rows(CLASS_YOCO, __func__, 1, add_to_sum_bytes(count, add));
}
static inline void cross_entropy(real *losses, real *log_z, floatX *logits, const int *targets, int N, int V, int Vp,
                                 real dloss, real z_loss) {
    record_rows(CLASS_CROSS_ENTROPY, __func__, 1, cross_entropy_bytes(N, V, Vp, dloss != 0));
}

// ---- experts

static inline void router_forward(real *logits, real *lse, int *experts, real *weights, const floatX *x,
                                  const floatX *weight, const floatX *bias, Routing r) {
    const Prediction *p = recorded.p;
    double bytes = (double)router_forward_bytes(r), product = (double)router_product_bytes(r);
    record(CLASS_ROUTER, __func__, 2, matmul_forward_flops(r.N, r.C, r.E), bytes,
           gemm_ms(p, r.N, r.E, r.C, product, gemm_rate(p, r.C, r.E, false)) + memory_ms(p, bytes - product));
}
static inline void router_backward(floatX *dx, grad_t *dweight, const real *dweights, const floatX *x,
                                   const floatX *weight, const real *logits, const real *lse, const int *experts,
                                   const real *weights, const real *loads, real balance, real z, Routing r, bool add) {
    const Prediction *p = recorded.p;
    double bytes = (double)router_backward_bytes(r, add), product = (double)router_product_bytes(r);
    double rate = gemm_rate(p, r.C, r.E, false);
    record(CLASS_ROUTER, __func__, 3, matmul_backward_flops(r.N, r.C, r.E), bytes,
           gemm_ms(p, r.N, r.C, r.E, product, rate) + gemm_ms(p, r.E, r.C, r.N, product, rate) +
               memory_ms(p, fmax(0, bytes - 2 * product)));
}
static inline size_t router_workspace_bytes(Routing r) { return (size_t)r.N * r.E * sizeof(floatX); }
// steps: the number of times that a block waits for memory
static inline void record_choices(const char *name, int launches, size_t bytes, double steps) {
    const Prediction *p = recorded.p;
    record(CLASS_ROUTER, name, launches, 0, (double)bytes,
           fmax(memory_ms(p, (double)bytes), 1e-3 * steps * p->assumed[ASSUME_SCAN]));
}
static inline void router_totals(real *totals, const real *logits, const real *lse, const int *starts, Routing r) {
    enum { ROWS = 256, BLOCKS = 8 }; // of router_totals_kernel: rows at a time; blocks of a multiprocessor
    double waves = ceil((r.E + 1.0) / (BLOCKS * device_multiprocessors(recorded.p->device)));
    record_choices(__func__, 1, router_totals_bytes(r), waves * ceil((double)r.N / ROWS));
}
static inline void expert_group(int *starts, int *entries, int *places, const int *experts, Routing r) {
    record_choices(__func__, 3, expert_group_bytes(r), 2 * (double)expert_group_rows(r) / 32);
}
static inline void router_balance(floatX *bias, real *master, const real *loads, double rate, int E, int begin,
                                  int count) {
    record_rows(CLASS_ROUTER, __func__, 1, router_balance_bytes(E, count, master != NULL));
}
static inline void expert_gather(floatX *y, const floatX *x, const int *entries, Routing r) {
    record_rows(CLASS_EXPERT_ROWS, __func__, 1, expert_gather_bytes(r));
}
static inline void expert_combine(floatX *y, const floatX *x, const int *places, Routing r, bool add) {
    record_rows(CLASS_EXPERT_ROWS, __func__, 1, expert_combine_bytes(r, add));
}
static inline void expert_swiglu_forward(Activation y, const floatX *gate_up, const real *weights, const int *entries,
                                         int R, int F) {
    record_rows(CLASS_SWIGLU, __func__, 1, expert_swiglu_forward_bytes(R, F));
}
static inline void expert_swiglu_backward(Activation dgate_up, real *dweights, const floatX *dy, const floatX *gate_up,
                                          const real *weights, const int *entries, int R, int F) {
    record_rows(CLASS_SWIGLU, __func__, 1, expert_swiglu_backward_bytes(R, F));
}
static inline void expert_linear_forward(floatX *y, Activation x, const ExpertLinear *w, const int *starts, int N,
                                         int R) {
    const Prediction *p = recorded.p;
    int IC = w->first.IC, OC = w->first.OC;
    Routing r = {N, p->plan->config.C, w->count, R / N};
    bool fp8 = w->first.copy != NULL;
    double rounding = fp8 ? (double)fp8_quantize_bytes(R, IC, 1) : 0,
           bytes = expert_linear_forward_bytes(r, IC, OC, fp8 ? 1 : sizeof(floatX));
    record(CLASS_EXPERT_GEMMS, __func__, fp8 ? 2 : 1, matmul_forward_flops(R, IC, OC), rounding + bytes,
           memory_ms(p, rounding) + expert_product_ms(p, expert_row_tiles(r) * expert_tiles(OC), IC, bytes, fp8));
}
static inline void expert_linear_backward(floatX *dx, Activation dy, Activation x, const ExpertLinear *w,
                                          const int *starts, int N, int R, bool add) {
    const Prediction *p = recorded.p;
    int IC = w->first.IC, OC = w->first.OC;
    Routing r = {N, p->plan->config.C, w->count, R / N};
    bool fp8 = w->first.copy != NULL;
    size_t size = fp8 ? 1 : sizeof(floatX);
    double rounding = fp8 ? (double)(fp8_quantize_bytes(R, IC, 1) + fp8_quantize_bytes(R, OC, 2)) : 0;
    double to_x = expert_linear_forward_bytes(r, OC, IC, size),
           to_weight = expert_linear_dweight_bytes(r, IC, OC, size, add);
    record(CLASS_EXPERT_GEMMS, __func__, fp8 ? 4 : 2, matmul_backward_flops(R, IC, OC), rounding + to_x + to_weight,
           memory_ms(p, rounding) + expert_product_ms(p, expert_row_tiles(r) * expert_tiles(IC), OC, to_x, fp8) +
               expert_product_ms(p, r.E * expert_tiles(OC) * expert_tiles(IC), (double)R / r.E, to_weight, fp8));
}

// ---- update

static inline void adamw_update(floatX *params, real *master, const grad_t *grads, real *m, real *v, size_t count,
                                double grad_scale, double lr, double beta1, double beta2, double eps,
                                double weight_decay, int64_t step) {
    record_rows(CLASS_UPDATE, __func__, 1, adamw_bytes(count, master != NULL));
}
static inline void muon_direction(floatX *direction, real *m, const grad_t *grads, size_t count, double grad_scale,
                                  double momentum) {
    record_rows(CLASS_UPDATE, __func__, 1, muon_direction_bytes(count));
}
static inline void muon_update(floatX *params, real *master, const grad_t *step, size_t count, double lr,
                               double weight_decay) {
    record_rows(CLASS_UPDATE, __func__, 1, muon_update_bytes(count, master != NULL));
}
static inline size_t muon_workspace_bytes(MuonMatrices m) { return muon_gpu_workspace_bytes(m); }
static inline void muon_orthogonalize(grad_t *out, real *row_v, const floatX *x, MuonMatrices m, double beta2) {
    const Prediction *p = recorded.p;
    const int k = min_int(m.rows, m.columns), n = max_int(m.rows, m.columns), all = m.count * k; // rows of all products
    size_t x_bytes = (size_t)all * n * sizeof(floatX), a_bytes = (size_t)all * k * sizeof(floatX);
    double step = gemm_ms(p, all, k, n, (double)(x_bytes + a_bytes), gemm_rate(p, n, k, false)) +
                  gemm_ms(p, all, k, k, (double)(3 * a_bytes), gemm_rate(p, k, k, false)) +
                  gemm_ms(p, all, n, k, (double)(2 * x_bytes + a_bytes), gemm_rate(p, k, n, false));
    double others = (double)(3 * MUON_STEPS * a_bytes + 3 * x_bytes + (size_t)all * n * FP32_BYTES);
    record(CLASS_MUON, __func__, MUON_STEPS * 4 + 4, m.count * muon_flops(m.rows, m.columns),
           (double)m.count * (double)muon_orthogonalize_bytes(m.rows, m.columns),
           MUON_STEPS * step + memory_ms(p, others));
}
static inline void sum_of_squares(double *sum, const grad_t *x, size_t count) {
    record_rows(CLASS_UPDATE, __func__, 2, sum_of_squares_bytes(count));
}

// ---- generation, measurements and statistics, which no step calls

static inline void ops_wait(void) {}
static inline void cache_store(floatX *cache, const floatX *rows, const int *first, int B, int T, int capacity,
                               int width, int ld) {
    assert(false);
}
static inline void cache_load(floatX *rows, const floatX *cache, int first, int count, int capacity, int width) {
    assert(false);
}
static inline void attention_decode(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                    const int *first, int capacity, AttentionShape s) {
    assert(false);
}
static inline double lambda_mean(const floatX *l, int N, int NH, int ldl, Factor factor) { return 0; }
static inline double rms_mean(const floatX *x, int N, int heads, int D, int ld) { return 0; }
static inline double magnitude_max(const floatX *x, int N, int C) { return 0; }
static inline double update_squares(const grad_t *grads, const real *m, const real *v, size_t count, double grad_scale,
                                    double lr, double beta1, double beta2, double eps, int64_t step) {
    return 0;
}
static inline AttentionStats attention_stats(const floatX *q, const floatX *k, const real *lse, const floatX *l,
                                             AttentionShape s, int key_sets, int ldl, HeadGroups groups,
                                             Factor factor) {
    return (AttentionStats){0, 0};
}
