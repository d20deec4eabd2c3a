/*
prediction_experts.h: the predicted time of the router and the experts of a layer (router.cuh, experts.cuh,
expert_gemm.cuh), if all experts are equally likely. The functions list the operations as train_diffv2.c calls them.

  products   whole waves of 128 x 128 tiles; an expert's rows fill half of their last tile on average. The weights of
             all experts that have a row are read: of 128 with 8 active, all from about 200 tokens on
  grouping   a block per expert reads all choices, 256 at a time: latency, not bandwidth, limits it
*/
#ifndef LLMC_PREDICTION_EXPERTS_H
#define LLMC_PREDICTION_EXPERTS_H
#include "prediction_rates.h"

// Milliseconds of `passes` passes of a block over the choices of all tokens.
static inline double choices_scan_ms(const Prediction *p, Routing r, int passes) {
    enum { AT_A_TIME = 256 };
    double waves = ceil((double)r.E / (8 * device_multiprocessors(p->plan->device)));
    return 1e-3 * passes * waves * ceil((double)r.N * r.K / AT_A_TIME) * p->assumed[ASSUME_SCAN];
}

static inline void predict_route(Prediction *p, int N) {
    Routing r = plan_routing(p->plan, N);
    double bytes = (double)router_forward_bytes(r), product = (double)router_product_bytes(r);
    predict_op(p, CLASS_ROUTER, "router_forward", 1, 2, matmul_forward_flops(N, r.C, r.E), bytes,
               gemm_ms(p, N, r.E, r.C, product, false) + memory_ms(p, bytes - product));
    double group = (double)expert_group_bytes(r);
    predict_op(p, CLASS_ROUTER, "expert_group", 1, 3, 0, group, fmax(memory_ms(p, group), choices_scan_ms(p, r, 2)));
}
// Once per micro-step, after the forward of all layers.
static inline void predict_router_totals(Prediction *p, int N) {
    Routing r = plan_routing(p->plan, N);
    double bytes = (double)router_totals_bytes(r);
    predict_op(p, CLASS_ROUTER, "router_totals", 1, 1, 0, bytes, fmax(memory_ms(p, bytes), choices_scan_ms(p, r, 1)));
}
static inline void predict_router_backward(Prediction *p, double writes, int N) {
    Routing r = plan_routing(p->plan, N);
    double adds = 1 - writes / p->repeats, bytes = (double)router_backward_bytes(r, false);
    bytes += adds * ((double)router_backward_bytes(r, true) - bytes);
    double product = (double)router_product_bytes(r);
    predict_op(p, CLASS_ROUTER, "router_backward", 1, 3, matmul_backward_flops(N, r.C, r.E), bytes,
               gemm_ms(p, N, r.C, r.E, product, false) + gemm_ms(p, r.E, r.C, N, product, false) +
                   memory_ms(p, fmax(0, bytes - 2 * product)));
}

// Milliseconds of `tiles` tiles of a product with sums over K, which reads and writes `bytes` bytes.
static inline double expert_product_ms(const Prediction *p, double tiles, double K, double bytes) {
    enum { TILE = 128 };
    int width = device_multiprocessors(p->plan->device), depth = p->plan->fp8 ? 64 : 32;
    double flops = ceil(tiles / width) * width * 2 * TILE * TILE * ceil(K / depth) * depth;
    double rate = p->plan->device->tflops * p->assumed[ASSUME_EXPERT_GEMM];
    if (p->plan->fp8) rate *= p->assumed[ASSUME_EXPERT_FP8];
    double ms = flops / (1e9 * rate), memory = memory_ms(p, bytes);
    return fmax(ms, memory) + 0.25 * fmin(ms, memory); // as gemm_ms
}
static inline double expert_tiles(int n) { return ceil(n / 128.0); }
// Rows of tiles of all experts together.
static inline double expert_row_tiles(Routing r) {
    double used = experts_used(r);
    return fmax(used, r.N * r.K / 128.0 + used / 2);
}
static inline void predict_expert_forward(Prediction *p, int N, int IC, int OC) {
    Routing r = plan_routing(p->plan, N);
    bool fp8 = p->plan->fp8;
    double rounding = fp8 ? (double)fp8_quantize_bytes((size_t)N * r.K, IC, 1) : 0,
           bytes = expert_linear_forward_bytes(r, IC, OC, fp8 ? 1 : FLOATX_BYTES);
    predict_op(p, CLASS_EXPERT_GEMMS, "expert_linear_forward", 1, fp8 ? 2 : 1, r.K * matmul_forward_flops(N, IC, OC),
               rounding + bytes,
               memory_ms(p, rounding) + expert_product_ms(p, expert_row_tiles(r) * expert_tiles(OC), IC, bytes));
}
static inline void predict_expert_backward(Prediction *p, double writes, int N, int IC, int OC) {
    Routing r = plan_routing(p->plan, N);
    bool fp8 = p->plan->fp8;
    size_t R = (size_t)N * r.K, size = fp8 ? 1 : FLOATX_BYTES;
    double rounding = fp8 ? (double)(fp8_quantize_bytes(R, IC, 1) + fp8_quantize_bytes(R, OC, 2)) : 0;
    double adds = 1 - writes / p->repeats, dx = expert_linear_forward_bytes(r, OC, IC, size),
           dweight = expert_linear_dweight_bytes(r, IC, OC, size, false);
    dweight += adds * (expert_linear_dweight_bytes(r, IC, OC, size, true) - dweight);
    predict_op(p, CLASS_EXPERT_GEMMS, "expert_linear_backward", 1, fp8 ? 4 : 2, r.K * matmul_backward_flops(N, IC, OC),
               rounding + dx + dweight,
               memory_ms(p, rounding) + expert_product_ms(p, expert_row_tiles(r) * expert_tiles(IC), OC, dx) +
                   expert_product_ms(p, r.E * expert_tiles(OC) * expert_tiles(IC), (double)N * r.K / r.E, dweight));
}

static inline void predict_gather(Prediction *p, int N) {
    predict_rows(p, CLASS_EXPERT_ROWS, "expert_gather", 1, 1, expert_gather_bytes(plan_routing(p->plan, N)));
}
static inline void predict_combine(Prediction *p, int N, bool add) {
    predict_rows(p, CLASS_EXPERT_ROWS, "expert_combine", 1, 1, expert_combine_bytes(plan_routing(p->plan, N), add));
}
static inline void predict_expert_hidden(Prediction *p, int N) {
    const ModelConfig *c = &p->plan->config;
    predict_rows(p, CLASS_SWIGLU, "expert_swiglu_forward", 1, 1, expert_swiglu_forward_bytes((size_t)N * c->K, c->FE));
}

// As the part of the experts in block_forward_mlp and experts_backward.
static inline void predict_experts_mlp(Prediction *p, int N) {
    const ModelConfig *c = &p->plan->config;
    predict_gather(p, N);
    predict_expert_forward(p, N, c->C, 2 * c->FE);
}
static inline void predict_experts_down(Prediction *p, int N) {
    const ModelConfig *c = &p->plan->config;
    predict_expert_hidden(p, N);
    predict_expert_forward(p, N, c->FE, c->C);
    predict_combine(p, N, c->shared > 0);
}
static inline void predict_experts_backward(Prediction *p, double writes, int N) {
    const ModelConfig *c = &p->plan->config;
    predict_expert_hidden(p, N);
    predict_gather(p, N);
    predict_expert_backward(p, writes, N, c->FE, c->C);
    predict_rows(p, CLASS_SWIGLU, "expert_swiglu_backward", 1, 1,
                 expert_swiglu_backward_bytes((size_t)N * c->K, c->FE));
    predict_gather(p, N);
    predict_expert_backward(p, writes, N, c->C, 2 * c->FE);
    predict_combine(p, N, c->shared > 0);
    predict_router_backward(p, writes, N);
}
#endif
