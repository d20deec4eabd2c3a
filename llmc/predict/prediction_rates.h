/*
prediction_rates.h: the predicted time of an operation on one GPU, from its FLOPs and bytes (traffic.h) and assumed
rates (assumptions.h).

  operation       the larger of its FLOPs at the assumed share of the peak and its bytes at the assumed bandwidth, and
                  at least the time to launch its kernels
  matrix product  whole waves of tiles over all multiprocessors, for the fastest of several tile shapes; K is split only
                  into multiples of 128, as gemm_cublaslt requires
*/
#ifndef LLMC_PREDICTION_RATES_H
#define LLMC_PREDICTION_RATES_H
#include "prediction_types.h"

// Adds `calls` calls of an operation per execution of the current part; `launches`, `flops`, `bytes` and `ms` are of
// one call.
static inline void predict_op(Prediction *p, PredictionClass kind, const char *name, double calls, int launches,
                              double flops, double bytes, double ms) {
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
    Bound bound = ms < launch_ms ? BOUND_LAUNCHES : prediction_classes[kind].bound;
    ms = calls * fmax(ms, launch_ms);
    op->calls += p->repeats * calls, op->flops += p->repeats * calls * flops, op->bytes += p->repeats * calls * bytes;
    op->ms += p->repeats * ms;
    p->class_ms[kind] += p->repeats * ms;
    p->bound_ms[bound] += p->repeats * ms;
    p->part_ms[p->part] += p->share * ms;
}

// An operation whose speed memory bandwidth limits.
static inline void predict_rows(Prediction *p, PredictionClass kind, const char *name, double calls, int launches,
                                size_t bytes) {
    double share = kind == CLASS_NORMS           ? p->assumed[ASSUME_NORMS]
                   : kind == CLASS_CROSS_ENTROPY ? p->assumed[ASSUME_CROSS_ENTROPY]
                                                 : 1;
    predict_op(p, kind, name, calls, launches, 0, (double)bytes, memory_ms(p, (double)bytes) / share);
}

// Whether the products of a class are those of linear layers in FP8.
static inline bool predicted_fp8(const Prediction *p, PredictionClass kind) {
    return p->plan->fp8 && kind == CLASS_BLOCK_GEMMS;
}

// Milliseconds of C (M,N) = A (M,K) B (K,N), which reads and writes `bytes` bytes.
static inline double gemm_ms(const Prediction *p, int M, int N, int K, double bytes, bool fp8) {
    static const struct {
        int M, N;
        double share;
    } tiles[] = {{128, 256, 1}, {256, 128, 1}, {128, 128, 0.93}, {64, 128, 0.75}};
    const DevicePeak *gpu = p->plan->device;
    double peak = fp8 ? device_fp8_tflops(gpu) : gpu->tflops, best = INFINITY;
    double rate = 1e9 * peak * p->assumed[fp8 ? ASSUME_FP8_GEMM : ASSUME_GEMM];
    int width = device_multiprocessors(gpu);
    for (size_t i = 0; i < sizeof(tiles) / sizeof(tiles[0]); i++)
        for (int split = 1; split == 1 || (split <= 8 && K % (128 * split) == 0); split *= 2) {
            double count = ceil((double)M / tiles[i].M) * ceil((double)N / tiles[i].N) * split,
                   waves = ceil(count / width);
            double flops = waves * width * tiles[i].M * tiles[i].N * 2.0 * K / split;
            double sums = split > 1 ? memory_ms(p, 2.0 * split * M * N * FP32_BYTES) : 0;
            best = fmin(best, flops / (rate * tiles[i].share) + sums);
        }
    double memory = memory_ms(p, bytes);
    return fmax(best, memory) + 0.25 * fmin(best, memory); // the first and last tiles do not overlap
}
static inline void predict_linear_forward(Prediction *p, PredictionClass kind, double calls, int N, int IC, int OC) {
    bool fp8 = predicted_fp8(p, kind);
    double rounding = fp8 ? (double)fp8_quantize_bytes(N, IC, 1) : 0;
    size_t padded = fp8_padded(OC); // rows of y have room for it
    double bytes =
        (double)(fp8 ? fp8_product_bytes(N, padded, IC, FLOATX_BYTES, false) : matmul_forward_bytes(N, IC, OC));
    predict_op(p, kind, "linear_forward", calls, fp8 ? 2 : 1, matmul_forward_flops(N, IC, OC), rounding + bytes,
               memory_ms(p, rounding) + gemm_ms(p, N, OC, IC, bytes, fp8));
}
// `writes` of the calls of a step write the weight's gradient; the others add to it.
static inline void predict_linear_backward(Prediction *p, PredictionClass kind, double calls, double writes, int N,
                                           int IC, int OC) {
    bool fp8 = predicted_fp8(p, kind);
    double dweight[2], share = 1 - writes / (calls * p->repeats); // of the calls that add
    double rounding = fp8 ? (double)(fp8_quantize_bytes(N, IC, 1) + fp8_quantize_bytes(N, OC, 2)) : 0;
    double dx = (double)(fp8 ? fp8_product_bytes(N, IC, OC, FLOATX_BYTES, false) : matmul_forward_bytes(N, IC, OC));
    for (int add = 0; add < 2; add++)
        dweight[add] =
            (double)(fp8 ? fp8_product_bytes(OC, IC, N, FP32_BYTES, add) : matmul_dweight_bytes(N, IC, OC, add));
    double written = dweight[0] * (1 - share) + dweight[1] * share;
    predict_op(p, kind, "linear_backward", calls, fp8 ? 4 : 2, matmul_backward_flops(N, IC, OC),
               rounding + dx + written,
               memory_ms(p, rounding) + gemm_ms(p, N, IC, OC, dx, fp8) + gemm_ms(p, OC, IC, N, written, fp8));
}
#endif
