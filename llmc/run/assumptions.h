/*
assumptions.h: the rates that a prediction (prediction.h) assumes of a GPU, by generation, each with its source. Peaks,
bandwidths and links are those of device_peak.h; a value here is mostly the share of them that is reached.

Values that were measured say so; the others are estimates. dev/gpu_check.sh prints predicted beside measured times:
correct a value here when a device shows another one, and name the device in the source.

  rings   NCCL's reduce-scatter and all-gather over R ranks on M machines take
            base + (R - M) hop within a machine + (M - 1) hop between machines + (R-1)/R bytes / bandwidth
          for each of its protocols, of which it takes the fastest. Sums within switches (NVLS) are off.
*/
#ifndef LLMC_ASSUMPTIONS_H
#define LLMC_ASSUMPTIONS_H
#include "../cuda/device_peak.h"

typedef enum {
    ASSUME_GEMM,
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
    {"attention forward, long sequences", "of peak", {0.64, 0.70, 0.71, 0.62}, false,
        "H200, cuDNN 9.19, published: 484 to 673 TFLOP/s at 2K to 16K; A100: arXiv 2307.08691; others estimated"},
    {"attention backward, long sequences", "of peak", {0.56, 0.58, 0.63, 0.52}, false,
        "H200, cuDNN 9.19, published: 370 to 579 TFLOP/s at 2K to 16K; A100: arXiv 2307.08691; others estimated"},
    {"length at which the forward reaches half", "positions", {500, 400, 914, 1100}, true, "fitted to the same"},
    {"length at which the backward reaches half", "positions", {700, 600, 1384, 1600}, true, "fitted to the same"},
    {"deterministic attention backward", "of the other", {0.76, 0.76, 0.76, 0.76}, false,
        "arXiv 2601.21824: costs up to 37.9%; estimated"},
    {"our own attention kernels", "of peak", {0.02, 0.05, 0.02, 0.01}, false, "fp32 units alone; estimated"},
    {"operations on rows and parameters", "of bandwidth", {0.82, 0.87, 0.85, 0.85}, false,
        "H200 measured: a copy at 4.3 of 4.8 TB/s, 95% of which is assumed; others estimated"},
    {"norms", "of those", {0.94, 0.94, 0.94, 0.94}, false, "read from their machine code; not measured"},
    {"cross-entropy", "of those", {0.70, 0.70, 0.70, 0.70}, false, "read from its machine code; not measured"},
    {"launch of a kernel", "us", {2.5, 2.5, 2.5, 2.5}, true, "estimated"},
    {"links within a machine", "of the sheet", {0.80, 0.60, 0.80, 0.80}, false,
        "NCCL's own model: 360 of 450 GB/s on Hopper, 720 of 900 on Blackwell; cards estimated"},
    {"network of a GPU", "GB/s", {20, 5, 40, 40}, false, "80% of 200, 50, 400 and 400 Gbit/s; estimated"},
    {"hops of a ring", "of NCCL's table", {1, 1, 1, 1}, true, "NCCL's tuning table (2.28)"},
    {"computing beside communication", "lost", {0.10, 0.10, 0.10, 0.10}, true,
        "llmq, 1.5B: 1 to 8 H100 cost 3%; estimated"},
};

// NCCL's protocols for rings: microseconds of a call and of a hop; what they reach of the bandwidth.
typedef struct {
    const char *name;
    double base_us, link_us, pci_us, network_us, share, most_gbs; // most_gbs: between machines; 0: no limit
} RingProtocol;
static const RingProtocol ring_protocols[] = {
    {"Simple", 8.4, 3.4, 5.7, 14.0, 1.00, 0},
    {"LL128", 14.0, 1.9, 2.5, 4.0, 0.92, 0},
    {"LL", 6.6, 0.6, 1.0, 2.7, 0.50, 36},
};
// clang-format on
static const double TREE_BASE_US = 8.4, TREE_LINK_US = 4.0, TREE_NETWORK_US = 14.0; // of an all-reduce, for comparison
enum { RING_PROTOCOL_COUNT = sizeof(ring_protocols) / sizeof(ring_protocols[0]) };

// What CUDA's context, the libraries' kernels and the workspaces of matrix products take, and NCCL's buffers: as
// ops/runtime.cuh and comm.h assume.
static const size_t PREDICTED_CUDA_BYTES = (size_t)593 << 20, PREDICTED_NCCL_BYTES = (size_t)320 << 20;

// GPUs that share a machine's links: 8, or those of an NVL72.
static inline int device_ranks_here(const DevicePeak *gpu) { return gpu->source == SHEET_NVL72 ? 72 : 8; }
static inline int device_multiprocessors(const DevicePeak *gpu) {
    return gpu->multiprocessors ? gpu->multiprocessors : 148; // those of Blackwell
}
// Bytes that a program finds: HBM's are slightly less than the sheet's GiB.
static inline double device_memory_bytes(const DevicePeak *gpu) { return 0.99 * gpu->memory_gb * 1073741824; }
#endif
