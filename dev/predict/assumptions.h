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
    ASSUMPTION_COUNT
} AssumptionName;

// Which value of all assumptions a prediction has.
typedef enum { ALL_MEAN, ALL_FAST, ALL_SLOW } AssumptionEnd;

typedef struct {
    double slow[DEVICE_GENERATIONS], fast[DEVICE_GENERATIONS]; // AMPERE, CARD, HOPPER, BLACKWELL
} Assumption;

// clang-format off
static const Assumption assumptions[ASSUMPTION_COUNT] = {
    // Large matrix products, of peak. Short: H100, H200 769 to 798 TFLOP/s at 8192^3, B200 1610 to 1745, A100 271; all
    // products of a layer in turn: 72% of the peak on an H200 NVL, 65 to 67% on a B300 (Transformer Engine's guide);
    // others estimated.
    {{0.74, 0.79, 0.74, 0.67}, {0.92, 0.97, 0.85, 0.77}},
    // Matrix products with odd sizes, of that rate. An unpadded LM head took 3 times as long (Netflix, 2026); H100, K =
    // 2501: 509 TFLOP/s (float8_experimental #145); RTX 4090, 2057^3: 107 (pytorch #181718).
    {{0.7, 0.7, 0.33, 0.33}, {1, 1, 0.85, 0.85}},
    // Large matrix products in FP8, of peak. Best of many shapes: H100 71%, H200 73%, B200 76% (ml-engineering); of a
    // layer: H200 NVL 69%, B300 61 to 66%.
    {{0.65, 0.70, 0.65, 0.60}, {0.75, 0.90, 0.75, 0.70}},
    // Products of experts, of peak. mma.sync without wgmma and tcgen05, limits of expert_gemm.cuh: at most 0.67 on
    // Hopper; estimated.
    {{0.40, 0.45, 0.30, 0.10}, {0.60, 0.65, 0.55, 0.20}},
    // Products of experts in FP8, of the rate in bf16. Native on cards; converted to fp16 on Hopper and Blackwell
    // (mma.cuh), which use bf16 instead; estimated.
    {{0.85, 1.5, 0.7, 0.7}, {1.15, 1.9, 1.0, 1.0}},
    // Step of a block that groups tokens by expert, us. Latency of memory, votes and a barrier; estimated.
    {{0.7, 0.7, 0.7, 0.7}, {0.3, 0.3, 0.3, 0.3}},
    // Attention forward, long sequences, of peak. H200, cuDNN 9.19, published: 484 to 673 TFLOP/s at 2K to 16K; H100:
    // 566 at 8K (flash-attention #1893); A100: arXiv 2307.08691; others estimated.
    {{0.56, 0.62, 0.63, 0.54}, {0.70, 0.76, 0.71, 0.68}},
    // Attention backward, long sequences, of peak. H200, cuDNN 9.19, published: 370 to 579 TFLOP/s at 2K to 16K; H100:
    // 470 at 8K (flash-attention #1893); A100: arXiv 2307.08691; others estimated.
    {{0.48, 0.50, 0.55, 0.45}, {0.62, 0.64, 0.63, 0.58}},
    // Sequence length at half the forward's rate, positions. Fitted to the same data.
    {{550, 440, 1000, 1210}, {450, 360, 828, 990}},
    // Sequence length at half the backward's rate, positions. Fitted to the same data.
    {{770, 660, 1520, 1760}, {630, 540, 1248, 1440}},
    // Deterministic attention backward, of the nondeterministic rate. By the bytes of dS on Hopper, all of it or the
    // causal half: 0.64 to 0.78; FlashAttention-3 on an H100: 0.62 to 0.82 (arXiv 2601.21824, flash-attention #1893).
    {{0.64, 0.64, 0.64, 0.64}, {0.82, 0.82, 0.82, 0.82}},
    // Built-in attention forward, long sequences, of peak. Fast: FlashAttention-2, also by mma.sync: A100 arXiv
    // 2307.08691; RTX 5090 191 TFLOP/s, a first kernel 143 (gau-nernst's blog); B200 362 (tritonbench #171); slow: 0.7
    // of it, estimated. Hopper by wgmma: below cuDNN, estimated.
    {{0.50, 0.65, 0.45, 0.10}, {0.70, 0.90, 0.63, 0.17}},
    // Built-in attention backward, long sequences, of peak. Fast: FlashAttention-2, nondeterministic: A100 arXiv
    // 2307.08691; RTX A5000 77 TFLOP/s (ring-attention #10); B200 334 with D 64 (flash-attention #1589); slow: 0.65 of
    // it, estimated. Hopper by wgmma, in the order of dQ's sums: estimated.
    {{0.40, 0.42, 0.36, 0.10}, {0.60, 0.66, 0.55, 0.16}},
    // Built-in attention by mma.sync on Hopper, of that rate. Heads other than 64 and 128: forward 304 to 312, backward
    // 299 TFLOP/s (pytorch/benchmark #2296, flash-attention #2688); mma.sync has 0.63 of wgmma's peak (arXiv
    // 2402.13499).
    {{1, 1, 0.53, 1}, {1, 1, 0.57, 1}},
    // Attention kernels without tensor cores, of peak. Fp32 units only; estimated.
    {{0.01, 0.03, 0.01, 0.005}, {0.03, 0.07, 0.03, 0.015}},
    // Operations on rows and parameters, of bandwidth. H200 measured: a copy at 4.3 of 4.8 TB/s; others estimated.
    {{0.77, 0.82, 0.80, 0.80}, {0.87, 0.92, 0.90, 0.90}},
    // Norms, of that bandwidth. From their machine code; not measured.
    {{0.88, 0.88, 0.88, 0.88}, {1, 1, 1, 1}},
    // Cross-entropy, of that bandwidth. From its machine code; not measured.
    {{0.6, 0.6, 0.6, 0.6}, {0.8, 0.8, 0.8, 0.8}},
    // Kernel launch, us. Beyond their tiles, products of 1024^3 and 2048^3 take 1 to 4 us on H100 and B200; others
    // estimated.
    {{4, 4, 4, 4}, {1, 1, 1, 1}},
    // Links within a machine, of the data sheet. NCCL's model: 360 of 450 GB/s on Hopper, 720 of 900 on Blackwell;
    // cards estimated.
    {{0.75, 0.50, 0.75, 0.75}, {0.85, 0.70, 0.85, 0.85}},
    // Network per GPU, GB/s. 80% of 200, 50, 400 and 400 Gbit/s; estimated.
    {{18, 4.5, 36, 36}, {22, 5.5, 44, 44}},
    // Ring hops, of NCCL's table. NCCL's tuning table (2.28).
    {{1.2, 1.2, 1.2, 1.2}, {0.8, 0.8, 0.8, 0.8}},
    // Slowdown of computation by communication, of the overlap. llmq, 1.5B: 1 to 8 H100 cost 3%; estimated.
    {{0.15, 0.15, 0.15, 0.15}, {0.05, 0.05, 0.05, 0.05}},
};

static inline double assumption_value(int i, DeviceGeneration g, AssumptionEnd end) {
    double slow = assumptions[i].slow[g], fast = assumptions[i].fast[g];
    return end == ALL_FAST ? fast : end == ALL_SLOW ? slow : (slow + fast) / 2;
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
