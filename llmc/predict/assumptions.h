/*
assumptions.h: the rates of a GPU that a prediction (prediction.h) assumes, by generation, each with its source. Peaks,
bandwidths and links are in device_peak.h; most values here are the share of them that a program reaches.

Sources name the values that were measured; all others are estimates. dev/gpu_check.sh prints predicted beside measured
times. If a device shows another value, correct it here and name the device in the source.

  rings   A reduce-scatter or all-gather of NCCL over R ranks on M machines takes
            base + (R - M) hops within a machine + (M - 1) hops between machines + (R-1)/R bytes / bandwidth
          for each of NCCL's protocols; NCCL uses the fastest. Reduction in switches (NVLS) is not used.
*/
#ifndef LLMC_ASSUMPTIONS_H
#define LLMC_ASSUMPTIONS_H
#include "../cuda/device_peak.h"

typedef enum {
    ASSUME_GEMM,
    ASSUME_FP8_GEMM,
    ASSUME_EXPERT_GEMM,
    ASSUME_EXPERT_FP8,
    ASSUME_SCAN,
    ASSUME_ATTENTION_FORWARD,
    ASSUME_ATTENTION_BACKWARD,
    ASSUME_FORWARD_HALF,
    ASSUME_BACKWARD_HALF,
    ASSUME_DETERMINISTIC,
    ASSUME_OWN_ATTENTION,
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

typedef struct {
    const char *what, *unit;
    double value[DEVICE_GENERATIONS]; // AMPERE, CARD, HOPPER, BLACKWELL
    bool cost;                        // a larger value makes a step slower
    const char *source;
} Assumption;

// clang-format off
static const Assumption assumptions[ASSUMPTION_COUNT] = {
    {"large matrix products", "of peak", {0.84, 0.88, 0.80, 0.72}, false,
        "H200 measured: 769 to 798 TFLOP/s at 8192^3 on random data; others estimated"},
    {"large matrix products in FP8", "of peak", {0.70, 0.80, 0.70, 0.65}, false, "estimated"},
    {"products of experts", "of peak", {0.50, 0.55, 0.35, 0.15}, false,
        "mma.sync without wgmma and tcgen05, 128 x 128 tiles (expert_gemm.cuh); estimated, not measured"},
    {"products of experts in FP8", "of the rate in bf16", {1.0, 1.7, 0.85, 0.85}, false,
        "native on cards, converted to fp16 on Hopper and Blackwell (mma.cuh); estimated"},
    {"step of a block that reads the choices of tokens", "us per 256", {0.5, 0.5, 0.5, 0.5}, true,
        "latency of the L2 cache and two barriers; estimated"},
    {"attention forward, long sequences", "of peak", {0.64, 0.70, 0.71, 0.62}, false,
        "H200, cuDNN 9.19, published: 484 to 673 TFLOP/s at 2K to 16K; A100: arXiv 2307.08691; others estimated"},
    {"attention backward, long sequences", "of peak", {0.56, 0.58, 0.63, 0.52}, false,
        "H200, cuDNN 9.19, published: 370 to 579 TFLOP/s at 2K to 16K; A100: arXiv 2307.08691; others estimated"},
    {"sequence length at half the forward's rate", "positions", {500, 400, 914, 1100}, true, "fitted to the same data"},
    {"sequence length at half the backward's rate", "positions", {700, 600, 1384, 1600}, true,
        "fitted to the same data"},
    {"deterministic attention backward", "of the nondeterministic rate", {0.76, 0.76, 0.76, 0.76}, false,
        "arXiv 2601.21824: up to 37.9% slower; estimated"},
    {"built-in attention kernels", "of peak", {0.02, 0.05, 0.02, 0.01}, false, "fp32 units only; estimated"},
    {"operations on rows and parameters", "of bandwidth", {0.82, 0.87, 0.85, 0.85}, false,
        "H200 measured: a copy at 4.3 of 4.8 TB/s, 95% of which is assumed; others estimated"},
    {"norms", "of that bandwidth", {0.94, 0.94, 0.94, 0.94}, false, "from their machine code; not measured"},
    {"cross-entropy", "of that bandwidth", {0.70, 0.70, 0.70, 0.70}, false, "from its machine code; not measured"},
    {"kernel launch", "us", {2.5, 2.5, 2.5, 2.5}, true, "estimated"},
    {"links within a machine", "of the data sheet", {0.80, 0.60, 0.80, 0.80}, false,
        "NCCL's model: 360 of 450 GB/s on Hopper, 720 of 900 on Blackwell; cards estimated"},
    {"network per GPU", "GB/s", {20, 5, 40, 40}, false, "80% of 200, 50, 400 and 400 Gbit/s; estimated"},
    {"ring hops", "of NCCL's table", {1, 1, 1, 1}, true, "NCCL's tuning table (2.28)"},
    {"slowdown of computation by communication", "of the overlap", {0.10, 0.10, 0.10, 0.10}, true,
        "llmq, 1.5B: 1 to 8 H100 cost 3%; estimated"},
};

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
// A tree all-reduce, for comparison.
static const double TREE_BASE_US = 8.4, TREE_LINK_US = 4.0, TREE_NETWORK_US = 14.0;
enum { RING_PROTOCOL_COUNT = sizeof(ring_protocols) / sizeof(ring_protocols[0]) };

// Memory of CUDA's context, the libraries' kernels and the workspaces of matrix products, and of NCCL's buffers, as in
// ops/runtime.cuh and comm.h.
enum { PREDICTED_CUDA_BYTES = 593 << 20, PREDICTED_NCCL_BYTES = 320 << 20 };

// GPUs connected by the links of a machine: 8, or the 72 of an NVL72.
static inline int device_ranks_here(const DevicePeak *gpu) { return gpu->source == SHEET_NVL72 ? 72 : 8; }
static inline int device_multiprocessors(const DevicePeak *gpu) {
    return gpu->multiprocessors ? gpu->multiprocessors : 148; // Blackwell
}
// Bytes that a program finds: slightly less than the data sheet's GiB.
static inline double device_memory_bytes(const DevicePeak *gpu) { return 0.99 * gpu->memory_gb * 1073741824; }
#endif
