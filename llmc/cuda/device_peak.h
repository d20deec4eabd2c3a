/*
device_peak.h: the peak rate of GPUs in NVIDIA's documents: dense bf16 matrix products with fp32 accumulation, in
TFLOP/s. The trainer logs its speed as a share of it. Predictions (dev/predict/prediction.h) also use the size and
bandwidth of the memory and the link to other GPUs, from the same data sheets and NVIDIA's product pages.

  sources   Data center GPUs: data sheets, which list rates with structured sparsity; dense rates are half of them.
            RTX cards: whitepapers (appendix, "Peak BF16 Tensor TFLOPS with FP32 Accumulate", the dense rate). On
            GeForce this is half of the rate with fp16 accumulation: 512 FLOPs per multiprocessor and cycle at the
            boost clock.
            Cards that are newer than their whitepaper: the same rule with the clock of NVIDIA's product pages.
  fp8       Products of FP8 with fp32 accumulation have twice the bf16 rate in all documents of GPUs that have them,
            from Ada and Hopper on: 1979 of the H100 and H200, 4500 of the B200, 362 of the L40, 330.3 of the RTX 4090,
            419 of the RTX 5090. (The data sheet of the L40S has 733 beside 362.05.)
  matching  The name that CUDA reports, without "NVIDIA" and "GeForce", must equal the row's name ("RTX 4090" matches
            neither "RTX 4090 D" nor "RTX 4090 Laptop GPU"). A * in a row matches any text, such as a memory size. The
            number of multiprocessors must match too: there are two RTX 3080, and MIG instances must not match.
  unknown   A device without a row is NULL; the caller measures instead. Devices whose document or name could not be
            verified have no row.
*/
#pragma once
#include "../base/common.h"

static const char SHEET_A100[] = "NVIDIA A100 Tensor Core GPU data sheet";
static const char SHEET_AMPERE_CARDS[] = "NVIDIA A10, A30, A40 data sheets";
static const char SHEET_H100[] = "NVIDIA H100 Tensor Core GPU data sheet";
static const char SHEET_H200[] = "NVIDIA H200 Tensor Core GPU data sheet";
static const char SHEET_GH200[] = "NVIDIA GH200 Grace Hopper Superchip data sheet";
static const char SHEET_HGX_BLACKWELL[] = "NVIDIA HGX B200 and B300 data sheet (36 PFLOPS sparse of 8 GPUs)";
static const char SHEET_NVL72[] = "NVIDIA GB200 and GB300 NVL72 data sheets (360 PFLOPS sparse of 72 GPUs)";
static const char SHEET_L40S[] = "NVIDIA L40S data sheet";
static const char SHEET_L40[] = "NVIDIA L40 data sheet";
static const char SHEET_L4[] = "NVIDIA L4 data sheet";
static const char WHITEPAPER_GA102[] = "NVIDIA Ampere GA102 GPU Architecture whitepaper";
static const char WHITEPAPER_ADA[] = "NVIDIA Ada GPU Architecture whitepaper";
static const char WHITEPAPER_RTX_BLACKWELL[] = "NVIDIA RTX Blackwell GPU Architecture whitepaper";

typedef enum { AMPERE, CARD, HOPPER, BLACKWELL, DEVICE_GENERATIONS } DeviceGeneration;
// Whether mma.sync multiplies FP8 faster than bf16 (mma.cuh). If not, products of experts (expert_gemm.cuh) stay in
// bf16 with --matmul-dtype fp8.
static const bool generation_mma_fp8[DEVICE_GENERATIONS] = {false, true, false, false};
static inline DeviceGeneration device_generation(int major, int minor) { // generation of a compute capability
    if (major == 8) return minor ? CARD : AMPERE;
    return major == 9 ? HOPPER : major == 10 || major == 11 ? BLACKWELL : CARD;
}
// Whether the wgmma kernels of attention support heads of these widths: whole boxes (hopper.cuh).
static inline bool wgmma_widths(int D, int DV) { return (D == 64 || D == 128) && (DV == D || DV == 128); }
typedef struct {
    const char *name;
    int multiprocessors; // 0: any, if the document does not state it
    double tflops;
    double memory_gb, memory_gbs; // capacity; bandwidth
    double link_gbs;              // to other GPUs of the machine, per direction: NVLink, else PCI Express
    DeviceGeneration generation;  // CARD: GDDR memory, no fast link
    const char *source;
} DevicePeak;
// clang-format off
static const DevicePeak device_peaks[] = {
    // name, multiprocessors, TFLOP/s, memory GB, GB/s, link GB/s, generation, source
    {"A100-SXM4-80GB", 108, 312, 80, 2039, 300, AMPERE, SHEET_A100},
    {"A100-SXM4-40GB", 108, 312, 40, 1555, 300, AMPERE, SHEET_A100},
    {"A100-PCIE-40GB", 108, 312, 40, 1555, 32, AMPERE, SHEET_A100},
    {"A100 * PCIe", 108, 312, 80, 1935, 32, AMPERE, SHEET_A100},
    {"A30", 56, 165, 24, 933, 100, AMPERE, SHEET_AMPERE_CARDS},
    {"A40", 84, 149.7, 48, 696, 32, CARD, SHEET_AMPERE_CARDS},
    {"A10", 72, 125, 24, 600, 32, CARD, SHEET_AMPERE_CARDS},
    {"H100 * HBM3", 132, 989.4, 80, 3350, 450, HOPPER, SHEET_H100}, // SXM
    {"H100 PCIe", 114, 756.5, 80, 2000, 64, HOPPER, SHEET_H100},
    {"H100 NVL", 132, 835.5, 94, 3900, 64, HOPPER, SHEET_H100},
    {"H200", 132, 989.4, 141, 4800, 450, HOPPER, SHEET_H200}, // SXM
    {"H200 NVL", 132, 835.5, 141, 4800, 64, HOPPER, SHEET_H200},
    {"GH200 *", 132, 989.4, 96, 4000, 450, HOPPER, SHEET_GH200},
    {"B200", 0, 2250, 180, 7700, 900, BLACKWELL, SHEET_HGX_BLACKWELL},
    {"B300 *", 0, 2250, 270, 7700, 900, BLACKWELL, SHEET_HGX_BLACKWELL}, // "B300 SXM6 AC"
    {"GB200", 0, 2500, 186, 8000, 900, BLACKWELL, SHEET_NVL72},
    {"GB300", 0, 2500, 279, 8000, 900, BLACKWELL, SHEET_NVL72},
    {"L40S", 142, 362.05, 48, 864, 32, CARD, SHEET_L40S},
    {"L40", 142, 181.05, 48, 864, 32, CARD, SHEET_L40},
    {"L4", 58, 121, 24, 300, 32, CARD, SHEET_L4},
    {"RTX A6000", 84, 154.8, 48, 768, 32, CARD, WHITEPAPER_GA102}, // the chip of the next row, at the full rate
    {"RTX 6000 Ada Generation", 142, 364.2, 48, 960, 32, CARD, WHITEPAPER_ADA},
    {"RTX 3060", 28, 25.5, 12, 360, 32, CARD, WHITEPAPER_GA102},
    {"RTX 3060 Ti", 38, 32.4, 8, 448, 32, CARD, WHITEPAPER_GA102},
    {"RTX 3070", 46, 40.6, 8, 448, 32, CARD, WHITEPAPER_GA102},
    {"RTX 3070 Ti", 48, 43.5, 8, 608, 32, CARD, WHITEPAPER_GA102},
    {"RTX 3080", 68, 59.5, 10, 760, 32, CARD, WHITEPAPER_GA102},
    {"RTX 3080", 70, 61.3, 12, 912, 32, CARD, WHITEPAPER_GA102}, // 12 GB
    {"RTX 3080 Ti", 80, 68.2, 12, 912, 32, CARD, WHITEPAPER_GA102},
    {"RTX 3090", 82, 71.2, 24, 936, 32, CARD, WHITEPAPER_GA102},
    {"RTX 3090 Ti", 84, 80.0, 24, 1008, 32, CARD, WHITEPAPER_GA102},
    {"RTX 4060", 24, 30.2, 8, 272, 16, CARD, WHITEPAPER_ADA},
    {"RTX 4060 Ti", 34, 44.1, 8, 288, 16, CARD, WHITEPAPER_ADA},
    {"RTX 4070", 46, 58.3, 12, 504, 32, CARD, WHITEPAPER_ADA},
    {"RTX 4070 SUPER", 56, 71.0, 12, 504, 32, CARD, WHITEPAPER_ADA},
    {"RTX 4070 Ti", 60, 80.2, 12, 504, 32, CARD, WHITEPAPER_ADA},
    {"RTX 4070 Ti SUPER", 66, 88.2, 16, 672, 32, CARD, WHITEPAPER_ADA},
    {"RTX 4080", 76, 97.5, 16, 717, 32, CARD, WHITEPAPER_ADA},
    {"RTX 4080 SUPER", 80, 104.4, 16, 736, 32, CARD, WHITEPAPER_ADA},
    {"RTX 4090", 128, 165.2, 24, 1008, 32, CARD, WHITEPAPER_ADA},
    {"RTX 5060", 30, 38.4, 8, 448, 32, CARD, WHITEPAPER_RTX_BLACKWELL},
    {"RTX 5060 Ti", 36, 47.4, 8, 448, 32, CARD, WHITEPAPER_RTX_BLACKWELL},
    {"RTX 5070", 48, 61.7, 12, 672, 64, CARD, WHITEPAPER_RTX_BLACKWELL},
    {"RTX 5070 Ti", 70, 87.9, 16, 896, 64, CARD, WHITEPAPER_RTX_BLACKWELL},
    {"RTX 5080", 84, 112.6, 16, 960, 64, CARD, WHITEPAPER_RTX_BLACKWELL},
    {"RTX 5090", 170, 209.5, 32, 1792, 64, CARD, WHITEPAPER_RTX_BLACKWELL},
};
// clang-format on
enum { DEVICE_PEAK_COUNT = sizeof(device_peaks) / sizeof(device_peaks[0]) };

static inline const char *without_prefix(const char *name, const char *prefix) {
    size_t length = strlen(prefix);
    return strncmp(name, prefix, length) == 0 ? name + length : name;
}

// Whether a name matches a row. * matches any text, such as "480GB" or "144G HBM3e", but no MIG instance ("... MIG
// 1g.10gb").
static inline bool device_name_matches(const char *row, const char *name) {
    const char *star = strchr(row, '*');
    if (!star) return strcmp(row, name) == 0;
    size_t before = (size_t)(star - row), after = strlen(star + 1), length = strlen(name);
    if (length <= before + after || strncmp(row, name, before) != 0 || strcmp(name + length - after, star + 1) != 0)
        return false;
    return !strstr(name, "MIG");
}

// The dense rate of FP8 products with fp32 accumulation, in TFLOP/s; 0: the device has none (Ampere).
static inline double device_fp8_tflops(const DevicePeak *row) {
    bool ampere = row->source == SHEET_A100 || row->source == SHEET_AMPERE_CARDS || row->source == WHITEPAPER_GA102;
    return ampere ? 0 : 2 * row->tflops;
}

// The row of the device with this name and number of multiprocessors, as CUDA reports them; NULL: none.
static inline const DevicePeak *device_peak_find(const char *name, int multiprocessors) {
    name = without_prefix(without_prefix(name, "NVIDIA "), "GeForce ");
    for (int i = 0; i < DEVICE_PEAK_COUNT; i++) {
        const DevicePeak *row = &device_peaks[i];
        if (device_name_matches(row->name, name) &&
            (row->multiprocessors == 0 || row->multiprocessors == multiprocessors))
            return row;
    }
    return NULL;
}

// The first row that matches a user's name, ignoring case: the row's whole name, or its beginning up to a space or a
// hyphen ("a100", "H100"). NULL: none.
static inline const DevicePeak *device_peak_named(const char *name) {
    name = without_prefix(without_prefix(name, "NVIDIA "), "GeForce ");
    size_t length = strlen(name);
    for (int whole = 1; whole >= 0 && length; whole--)
        for (int i = 0; i < DEVICE_PEAK_COUNT; i++) {
            const char *row = device_peaks[i].name;
            if (strncasecmp(row, name, length) == 0 && (whole ? !row[length] : strchr(" -", row[length]) != NULL))
                return &device_peaks[i];
            if (whole && device_name_matches(row, name)) return &device_peaks[i];
        }
    return NULL;
}
