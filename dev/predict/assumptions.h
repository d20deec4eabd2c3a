/*
assumptions.h: the rates of a GPU that a prediction (prediction.h) assumes, by generation, each with its source. Peaks,
bandwidths and links are in device_peak.h; most values here are the share of them that a program reaches.

  ends    Each assumption has two values. `fast` is what short measurements of single kernels show; `slow` what long
          runs at the limit of power show, or the worse of two sources. A predicted time is a range: all values at one
          end. Where one number is needed, such as in lists of operations, each value is the mean of its ends.
  source  Sources name the values that were measured; all others are estimates. The published rates of matrix products
          are in tests/prediction.h. dev/gpu_check.sh prints predicted beside measured times. If a device shows another
          value, correct it here and name the device in the source.
  rings   A reduce-scatter or all-gather of NCCL over R ranks on M machines takes
            base + (R - M) hops within a machine + (M - 1) hops between machines + (R-1)/R bytes / bandwidth
          for each of NCCL's protocols; NCCL uses the fastest. Reduction in switches (NVLS) is not used.
*/
#pragma once
#include "../../llmc/cuda/device_peak.h"

typedef enum {
    ASSUME_GEMM,
    ASSUME_GEMM_ODD,
    ASSUME_FP8_GEMM,
    ASSUME_EXPERT_GEMM,
    ASSUME_EXPERT_FP8,
    ASSUME_SCAN,
    ASSUME_ATTENTION_FORWARD,
    ASSUME_ATTENTION_BACKWARD,
    ASSUME_FORWARD_HALF,
    ASSUME_BACKWARD_HALF,
    ASSUME_DETERMINISTIC,
    ASSUME_BUILTIN_FORWARD,
    ASSUME_BUILTIN_BACKWARD,
    ASSUME_BUILTIN_MMA,
    ASSUME_FP32_ATTENTION,
    ASSUME_MEMORY,
    ASSUME_NORMS,
    ASSUME_CROSS_ENTROPY,
    ASSUME_LAUNCH,
    ASSUME_LINK,
    ASSUME_NETWORK,
    ASSUME_HOPS,
    ASSUME_OVERLAP,
    ASSUMPTION_COUNT,
    ALL_FAST, // instead of one of them: all at that end
    ALL_SLOW
} AssumptionName;

typedef struct {
    const char *what, *unit;
    double slow[DEVICE_GENERATIONS], fast[DEVICE_GENERATIONS]; // AMPERE, CARD, HOPPER, BLACKWELL
    const char *source;
} Assumption;

// clang-format off
static const Assumption assumptions[ASSUMPTION_COUNT] = {
    {"large matrix products", "of peak", {0.74, 0.79, 0.74, 0.67}, {0.92, 0.97, 0.85, 0.77},
        "short: H100, H200 769 to 798 TFLOP/s at 8192^3, B200 1610 to 1745, A100 271; all products of a layer in turn: "
        "72% of the peak on an H200 NVL, 65 to 67% on a B300 (Transformer Engine's guide); others estimated"},
    {"matrix products with odd sizes", "of that rate", {0.7, 0.7, 0.33, 0.33}, {1, 1, 0.85, 0.85},
        "an unpadded LM head took 3 times as long (Netflix, 2026); H100, K = 2501: 509 TFLOP/s (float8_experimental "
        "#145); RTX 4090, 2057^3: 107 (pytorch #181718)"},
    {"large matrix products in FP8", "of peak", {0.65, 0.70, 0.65, 0.60}, {0.75, 0.90, 0.75, 0.70},
        "best of many shapes: H100 71%, H200 73%, B200 76% (ml-engineering); of a layer: H200 NVL 69%, B300 61 to 66%"},
    {"products of experts", "of peak", {0.40, 0.45, 0.30, 0.10}, {0.60, 0.65, 0.55, 0.20},
        "mma.sync without wgmma and tcgen05, limits of expert_gemm.cuh: at most 0.67 on Hopper; estimated"},
    {"products of experts in FP8", "of the rate in bf16", {0.85, 1.5, 0.7, 0.7}, {1.15, 1.9, 1.0, 1.0},
        "native on cards; converted to fp16 on Hopper and Blackwell (mma.cuh), which use bf16 instead; estimated"},
    {"step of a block that groups tokens by expert", "us", {0.7, 0.7, 0.7, 0.7}, {0.3, 0.3, 0.3, 0.3},
        "latency of memory, votes and a barrier; estimated"},
    {"attention forward, long sequences", "of peak", {0.56, 0.62, 0.63, 0.54}, {0.70, 0.76, 0.71, 0.68},
        "H200, cuDNN 9.19, published: 484 to 673 TFLOP/s at 2K to 16K; H100: 566 at 8K (flash-attention #1893); "
        "A100: arXiv 2307.08691; others estimated"},
    {"attention backward, long sequences", "of peak", {0.48, 0.50, 0.55, 0.45}, {0.62, 0.64, 0.63, 0.58},
        "H200, cuDNN 9.19, published: 370 to 579 TFLOP/s at 2K to 16K; H100: 470 at 8K (flash-attention #1893); "
        "A100: arXiv 2307.08691; others estimated"},
    {"sequence length at half the forward's rate", "positions", {550, 440, 1000, 1210}, {450, 360, 828, 990},
        "fitted to the same data"},
    {"sequence length at half the backward's rate", "positions", {770, 660, 1520, 1760}, {630, 540, 1248, 1440},
        "fitted to the same data"},
    {"deterministic attention backward", "of the nondeterministic rate", {0.64, 0.64, 0.64, 0.64},
        {0.82, 0.82, 0.82, 0.82},
        "by the bytes of dS on Hopper, all of it or the causal half: 0.64 to 0.78; FlashAttention-3 on an H100: 0.62 "
        "to 0.82 (arXiv 2601.21824, flash-attention #1893)"},
    {"built-in attention forward, long sequences", "of peak", {0.50, 0.65, 0.45, 0.10},
        {0.70, 0.90, 0.63, 0.17},
        "fast: FlashAttention-2, also by mma.sync: A100 arXiv 2307.08691; RTX 5090 191 TFLOP/s, a first kernel 143 "
        "(gau-nernst's blog); B200 362 (tritonbench #171); slow: 0.7 of it, estimated. Hopper by wgmma: below cuDNN, "
        "estimated"},
    {"built-in attention backward, long sequences", "of peak", {0.40, 0.42, 0.36, 0.10}, {0.60, 0.66, 0.55, 0.16},
        "fast: FlashAttention-2, nondeterministic: A100 arXiv 2307.08691; RTX A5000 77 TFLOP/s (ring-attention #10); "
        "B200 334 with D 64 (flash-attention #1589); slow: 0.65 of it, estimated. Hopper by wgmma, in the order of "
        "dQ's sums: estimated"},
    {"built-in attention by mma.sync on Hopper", "of that rate", {1, 1, 0.53, 1}, {1, 1, 0.57, 1},
        "heads other than 64 and 128: forward 304 to 312, backward 299 TFLOP/s (pytorch/benchmark #2296, "
        "flash-attention #2688); mma.sync has 0.63 of wgmma's peak (arXiv 2402.13499)"},
    {"attention kernels without tensor cores", "of peak", {0.01, 0.03, 0.01, 0.005}, {0.03, 0.07, 0.03, 0.015},
        "fp32 units only; estimated"},
    {"operations on rows and parameters", "of bandwidth", {0.77, 0.82, 0.80, 0.80}, {0.87, 0.92, 0.90, 0.90},
        "H200 measured: a copy at 4.3 of 4.8 TB/s; others estimated"},
    {"norms", "of that bandwidth", {0.88, 0.88, 0.88, 0.88}, {1, 1, 1, 1}, "from their machine code; not measured"},
    {"cross-entropy", "of that bandwidth", {0.6, 0.6, 0.6, 0.6}, {0.8, 0.8, 0.8, 0.8},
        "from its machine code; not measured"},
    {"kernel launch", "us", {4, 4, 4, 4}, {1, 1, 1, 1},
        "beyond their tiles, products of 1024^3 and 2048^3 take 1 to 4 us on H100 and B200; others estimated"},
    {"links within a machine", "of the data sheet", {0.75, 0.50, 0.75, 0.75}, {0.85, 0.70, 0.85, 0.85},
        "NCCL's model: 360 of 450 GB/s on Hopper, 720 of 900 on Blackwell; cards estimated"},
    {"network per GPU", "GB/s", {18, 4.5, 36, 36}, {22, 5.5, 44, 44}, "80% of 200, 50, 400 and 400 Gbit/s; estimated"},
    {"ring hops", "of NCCL's table", {1.2, 1.2, 1.2, 1.2}, {0.8, 0.8, 0.8, 0.8}, "NCCL's tuning table (2.28)"},
    {"slowdown of computation by communication", "of the overlap", {0.15, 0.15, 0.15, 0.15},
        {0.05, 0.05, 0.05, 0.05}, "llmq, 1.5B: 1 to 8 H100 cost 3%; estimated"},
};

// The value of an assumption: its mean; 10% worse if `change` names it; an end for ALL_FAST and ALL_SLOW.
static inline double assumption_value(int i, DeviceGeneration g, int change) {
    double slow = assumptions[i].slow[g], fast = assumptions[i].fast[g], mean = (slow + fast) / 2;
    if (change == i) return (slow > fast ? 1.1 : 0.9) * mean;
    return change == ALL_FAST ? fast : change == ALL_SLOW ? slow : mean;
}

// NCCL's ring protocols: microseconds of a call and of a hop, and the share of the bandwidth that they reach.
typedef struct {
    const char *name;
    double base_us, link_us, pci_us, network_us, share, most_gbs; // most_gbs: limit between machines; 0: none
} RingProtocol;
static const RingProtocol ring_protocols[] = {
    {"Simple", 8.4, 3.4, 5.7, 14.0, 1.00, 0},
    {"LL128", 14.0, 1.9, 2.5, 4.0, 0.92, 0},
    {"LL", 6.6, 0.6, 1.0, 2.7, 0.50, 36},
};
// clang-format on
// NCCL's tree all-reduce: microseconds, and the share of a ring's bandwidth.
static const double TREE_BASE_US = 8.4, TREE_LINK_US = 4.0, TREE_NETWORK_US = 14.0, TREE_SHARE = 0.92;
// The host's part of an exchange of numbers between ranks: it waits for the device, copies them there and back, and
// starts the next kernels. Estimated.
static const double AGREE_HOST_MS = 0.1;
enum { RING_PROTOCOL_COUNT = sizeof(ring_protocols) / sizeof(ring_protocols[0]) };

// Memory of CUDA's context, the libraries' kernels and the workspaces of matrix products, as in ops/runtime.cuh.
enum { PREDICTED_CUDA_BYTES = 593 << 20 };

// GPUs connected by the links of a machine: 8, or the 72 of an NVL72.
static inline int device_ranks_here(const DevicePeak *gpu) { return gpu->source == SHEET_NVL72 ? 72 : 8; }
static inline int device_multiprocessors(const DevicePeak *gpu) {
    return gpu->multiprocessors ? gpu->multiprocessors : 148; // Blackwell
}
// Bytes that a program finds: slightly less than the data sheet's GiB.
static inline double device_memory_bytes(const DevicePeak *gpu) { return 0.99 * gpu->memory_gb * 1073741824; }
