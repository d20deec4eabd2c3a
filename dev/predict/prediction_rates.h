/*
prediction_rates.h: the predicted time of an operation on one GPU, from its FLOPs and bytes (operations.h) and assumed
rates (assumptions.h).

  operation       the larger of its FLOPs at the assumed share of the peak and its bytes at the assumed bandwidth, and
                  at least the time to launch its kernels
  matrix product  launch, then whole waves of tiles over all multiprocessors, for the fastest of several tile shapes: a
                  product with few rows or columns fills few of them. K is split only into multiples of 128, as
                  gemm_cublaslt requires, and the parts are added in fp32. Sizes that are no multiple of 8 take slower
                  kernels; V = 50257 and the rows of q, k, v and lambda are padded (MATRIX_ROWS) and do not
  experts         all are equally likely. Whole waves of 128 x 128 tiles; an expert's rows fill half of their last tile
                  on average. The weights of all experts that have a row are read: of 128 with 8 active, all from about
                  200 tokens on
  attention       by cuDNN or by the built-in kernels, as the run chooses (attention_plans.cuh). A long sequence reaches
                  the assumed rate; the time beside the products is the same with either. The built-in kernels compute a
                  signal head and its noise head together: 8 products in the backward instead of 10, and no pass that
                  combines heads (diff_attention.h). Their backward is deterministic
  grouping        a warp passes its choices twice, 32 at a time: latency, not bandwidth, limits it
*/
#pragma once
#include "prediction_types.h"
#include "../../llmc/ops/attention/attention_choice.h"

// FLOPs per millisecond of a large matrix product with a weight (OC, IC). FP8 matrices are padded to 16.
static inline double gemm_rate(const Prediction *p, int IC, int OC, bool fp8) {
    const DevicePeak *gpu = p->device;
    if (fp8) return 1e9 * device_fp8_tflops(gpu) * p->assumed[ASSUME_FP8_GEMM];
    double share = (IC | OC) % 8 ? p->assumed[ASSUME_GEMM_ODD] : 1;
    return 1e9 * gpu->tflops * p->assumed[ASSUME_GEMM] * share;
}
// Milliseconds of C (M,N) = A (M,K) B (K,N) at this rate, which reads and writes `bytes` bytes.
static inline double gemm_ms(const Prediction *p, int M, int N, int K, double bytes, double rate) {
    static const struct {
        int M, N;
        double share;
    } tiles[] = {{128, 256, 1}, {256, 128, 1}, {128, 128, 0.93}, {64, 128, 0.75}};
    double best = INFINITY;
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
    return fmax(best, memory) + 0.25 * fmin(best, memory); // the first and last tiles do not overlap
}

// What computes attention: cuDNN, the built-in kernels on tensor cores, or those on fp32 units.
typedef enum { BY_CUDNN, BY_TENSOR_CORES, BY_FP32_UNITS } AttentionKernel;

// Whether cuDNN supports the shape, by the plans of version 9.19 (tests/cudnn_plans.cpp): a backward of documents only
// for data center GPUs from Hopper on.
static inline bool predicted_cudnn(const DevicePeak *gpu, AttentionShape s, bool documents, bool backward) {
    int widest = gpu->generation == HOPPER ? 256 : 128, DV = s.DV > widest && s.DV % 16 == 0 ? s.DV / 2 : s.DV;
    if (backward && documents && gpu->generation < HOPPER) return false;
    return s.T > 1 && (s.D | s.DV) % 8 == 0 && s.D <= widest && DV <= widest;
}
// Whether the built-in kernels on tensor cores support the shape.
static inline bool predicted_fits(AttentionShape s) {
    enum { WIDEST = 128 };
    return (s.D | s.DV) % 8 == 0 && s.D <= WIDEST && s.DV <= WIDEST;
}
// Whether --attention-kernel or the measured times request the built-in kernels.
static inline bool predicted_builtin(const DevicePeak *gpu, const Options *o, AttentionShape s, bool backward) {
    int signals = s.groups.noise ? s.groups.signals : 0;
    if (o->attention_kernel != SDPA_AUTO || s.window || o->doc_mask) return o->attention_kernel == SDPA_BUILTIN;
    return attention_builtin_speed(gpu, signals, s.D, s.DV, s.T, o->deterministic, backward) > 1;
}
static inline AttentionKernel predicted_attention(const DevicePeak *gpu, const Options *o, AttentionShape s,
                                                  bool backward) {
    if (s.sparse.blocks) return BY_FP32_UNITS;
    bool cudnn = !predicted_builtin(gpu, o, s, backward) && predicted_cudnn(gpu, s, o->doc_mask, backward);
    return cudnn ? BY_CUDNN : predicted_fits(s) ? BY_TENSOR_CORES : BY_FP32_UNITS;
}
// Whether a signal head and its noise head are computed together (diff_attention.cuh).
static inline bool predicted_pairs(const DevicePeak *gpu, const Options *o, AttentionShape s) {
    return s.groups.noise && s.groups.signals == 1 && predicted_builtin(gpu, o, s, true) && predicted_fits(s);
}
// Whether the built-in kernels are those of wgmma (hopper_heads).
static inline bool predicted_wgmma(const DevicePeak *gpu, AttentionShape s) {
    return gpu->generation == HOPPER && wgmma_widths(s.D, s.DV);
}
// Whether the kernel of attention's backward also computes that of RoPE (attention_mma_backward.cuh).
static inline bool predicted_rotates(const DevicePeak *gpu, AttentionShape s, AttentionKernel by) {
    return by == BY_TENSOR_CORES && (s.D == 64 || s.D == 128) && !predicted_wgmma(gpu, s);
}
static inline double attention_ms(const Prediction *p, AttentionShape s, AttentionKernel by, double flops, double bytes,
                                  bool backward) {
    const AssumptionName library = backward ? ASSUME_ATTENTION_BACKWARD : ASSUME_ATTENTION_FORWARD;
    double share = p->assumed[library], length = p->assumed[backward ? ASSUME_BACKWARD_HALF : ASSUME_FORWARD_HALF];
    // A row of a long sequence attends to half of `span` keys on average; without a window span is T. Rows behind the
    // first W also compute the rest of the tile in which their window begins: half of it on average.
    enum { TILE = 128 };
    double span = 2 * attention_visible(s) / ((double)s.B * s.T) - 1;
    if (by == BY_TENSOR_CORES) {
        share = p->assumed[backward ? ASSUME_BUILTIN_BACKWARD : ASSUME_BUILTIN_FORWARD];
        if (!predicted_wgmma(p->device, s)) share *= p->assumed[ASSUME_BUILTIN_MMA];
        length *= share / assumption_value(library, p->device->generation, ALL_MEAN);
    }
    if (s.window) length += TILE * (1 - (double)s.window / s.T);
    double narrow = fmin(1, s.D / 128.0), idle = by == BY_CUDNN ? 0.5 : 0.25; // matrix units wait for the softmax
    share *= span / (span + length) * (1 - idle * (1 - narrow));
    if (by == BY_CUDNN && backward && p->options->deterministic) share *= p->assumed[ASSUME_DETERMINISTIC];
    if (by == BY_FP32_UNITS) share = p->assumed[ASSUME_FP32_ATTENTION];
    return fmax(1e-9 * flops / (share * p->device->tflops), memory_ms(p, bytes));
}

// Milliseconds of `tiles` tiles of a product of experts with sums over K, which reads and writes `bytes` bytes.
static inline double expert_product_ms(const Prediction *p, double tiles, double K, double bytes, bool fp8) {
    enum { TILE = 128 };
    int width = device_multiprocessors(p->device), depth = fp8 ? 64 : 32;
    double flops = ceil(tiles / width) * width * 2 * TILE * TILE * ceil(K / depth) * depth;
    double rate = p->device->tflops * p->assumed[ASSUME_EXPERT_GEMM];
    if (fp8) rate *= p->assumed[ASSUME_EXPERT_FP8];
    double ms = flops / (1e9 * rate), memory = memory_ms(p, bytes);
    return fmax(ms, memory) + 0.25 * fmin(ms, memory); // as gemm_ms
}
static inline double expert_tiles(int n) { return ceil(n / 128.0); }
// Rows of tiles of all experts together.
static inline double expert_row_tiles(Routing r) {
    double used = experts_used(r);
    return fmax(used, r.N * r.K / 128.0 + used / 2);
}
