/*
linear.h: a linear layer without bias whose operands are rounded as --matmul-dtype says.

  forward   y = R(x) R(weight)^T
  backward  dx = R(dy) R(weight),   dweight = R(dy)^T R(x), or with add += R(dy)^T R(x)
  rounding  bf16: each element to bf16
            fp8: each element times 448/max to E4M3 (dy: 57344/max to E5M2), max the largest magnitude of the tensor;
            the product is multiplied by the scales of its operands (fp8.h)
  shapes    x (N,IC), weight (OC,IC), y and dy (N,OC) with row stride ld >= OC
  copy      The rounded weight, made once per update. Without a copy nothing is rounded, as in matmul.h. In bf16 nothing
            is rounded for N < LINEAR_ROWS either, since rounding x would cost more than it saves.
  numerics  products exact, sums in fp32 (matmul_bf16.h, or in fp32 the library of matmul.h)
  memory    A rounded number is stored as bf16 if the CPU multiplies bf16, which holds every number of E4M3 and E5M2;
            otherwise as fp32.
*/
#pragma once
#include "../absmax.h"
#include "fp8.h"
#include "matmul.h"
#include "matmul_bf16.h"

enum { LINEAR_ROWS = 16, LINEAR_HEADER = 64 };
typedef enum { STORE_FP32, STORE_BF16 } LinearStorage;
static GemmType linear_type;
static LinearStorage linear_storage; // how rounded numbers are stored

static inline const char *linear_configure(GemmType type) {
    if (type != GEMM_FP32 && sizeof(real) != sizeof(float))
        return "a build with REAL=double checks mathematics and rounds nothing; use --matmul-dtype fp32";
    linear_type = type;
    linear_storage = type != GEMM_FP32 && matmul_by_onednn && bf16_begin() ? STORE_BF16 : STORE_FP32;
    return NULL;
}

// Whether the CPU multiplies rounded numbers faster than fp32.
static inline bool linear_native(void) { return linear_storage != STORE_FP32; }
static inline bool linear_in_fp8(void) { return linear_type == GEMM_FP8; }
static inline bool linear_experts_in_fp8(void) { return linear_in_fp8(); } // rounds for the numerics, not the speed

// A rounded matrix: its scale, then its numbers.
typedef struct {
    char *memory;
    int rows, columns;
} Rounded;
static inline Rounded rounded_at(void *memory, int rows, int columns) {
    Rounded r = {(char *)memory, rows, columns};
    return r;
}
static inline Rounded rounded_weight(const Linear *w) { return rounded_at(w->copy, w->OC, w->IC); }
static inline int rounded_stride(Rounded r) { return (int)round_up(r.columns, 32); } // whole cache lines
static inline size_t rounded_bytes(int rows, int columns) {
    size_t count = (size_t)rows * round_up((size_t)columns, 32);
    return LINEAR_HEADER + count * (linear_storage == STORE_BF16 ? sizeof(bf16_t) : sizeof(float));
}
static inline float *rounded_scale(Rounded r) { return (float *)(void *)r.memory; }
static inline void *rounded_numbers(Rounded r) { return r.memory + LINEAR_HEADER; }

static inline size_t linear_copy_bytes(int IC, int OC, bool plain) {
    return linear_type == GEMM_FP32 || (plain && linear_type == GEMM_FP8) ? 0 : rounded_bytes(OC, IC);
}
static inline size_t linear_workspace_bytes(int N, int IC, int OC) {
    return linear_type == GEMM_FP32 ? 0 : rounded_bytes(N, IC) + rounded_bytes(N, OC);
}

static inline void linear_round_narrow(bf16_t *to, int stride, const float *from, int ld, int rows, int columns,
                                       float multiplier, Fp8Format f) {
    if (linear_type == GEMM_FP8) fp8_round_matrix(to, stride, from, ld, rows, columns, multiplier, f);
    else bf16_round_matrix(to, stride, from, ld, rows, columns);
}

// in has the row stride ld
static inline void linear_round(Rounded r, Activation in, int ld, Fp8Format f) {
    const float *from = (const float *)(const void *)in.data;
    absmax_t max = in.max ? *in.max : 0;
    float multiplier = linear_type == GEMM_FP8 ? fp8_multiplier(max, f) : 1;
    float *wide = (float *)rounded_numbers(r);
    int stride = rounded_stride(r);
    *rounded_scale(r) = linear_type == GEMM_FP8 ? fp8_scale(max, f) : 1;
    if (linear_storage == STORE_BF16)
        linear_round_narrow((bf16_t *)rounded_numbers(r), stride, from, ld, r.rows, r.columns, multiplier, f);
    else if (linear_type == GEMM_FP8) fp8_round_matrix_wide(wide, stride, from, ld, r.rows, r.columns, multiplier, f);
    else bf16_round_matrix_wide(wide, stride, from, ld, r.rows, r.columns);
}

static inline void linear_copy_weight(const Linear *w) {
    absmax_t max = 0;
    Activation weight = activation(w->weight, &max);
    if (linear_type == GEMM_FP8) absmax_update(weight, w->OC, w->IC, w->IC);
    linear_round(rounded_weight(w), weight, w->IC, FP8_WEIGHT);
}

// C = op(A) op(B), or C += op(A) op(B), multiplied by the scales of A and B
static inline void linear_product(MatmulShape s, Rounded A, Rounded B, real *C) {
    float scale = *rounded_scale(A) * *rounded_scale(B);
    s.lda = rounded_stride(A), s.ldb = rounded_stride(B);
    s.scaled = linear_type == GEMM_FP8;
#ifdef ONEDNN
    if (linear_storage == STORE_BF16) {
        gemm_bf16(s, (const bf16_t *)rounded_numbers(A), (const bf16_t *)rounded_numbers(B), (float *)(void *)C, scale);
        return;
    }
#endif
    gemm(s.ta ? CblasTrans : CblasNoTrans, s.tb ? CblasTrans : CblasNoTrans, s.M, s.N, s.K, (real)scale,
         (const real *)rounded_numbers(A), s.lda, (const real *)rounded_numbers(B), s.ldb, s.add ? 1 : 0, C, s.ldc);
}

static inline bool linear_rounds(const Linear *w, int N) {
    return w->copy && (linear_type == GEMM_FP8 || N >= LINEAR_ROWS);
}

static inline void linear_forward(floatX *y, Activation x, const Linear *w, int N) {
    int IC = w->IC, OC = w->OC;
    if (!linear_rounds(w, N)) {
        matmul_forward(y, x.data, w->weight, N, IC, OC, w->ld);
        return;
    }
    real *memory = ops_workspace_take(linear_workspace_bytes(N, IC, OC));
    Rounded x_rounded = rounded_at(memory, N, IC);
    linear_round(x_rounded, x, IC, FP8_ACTIVATION);
    MatmulShape forward = {false, true, false, false, N, OC, IC, 0, 0, w->ld};
    linear_product(forward, x_rounded, rounded_weight(w), y);
}

static inline void linear_backward(floatX *dx, Activation dy, Activation x, const Linear *w, int N, bool add) {
    int IC = w->IC, OC = w->OC;
    if (!linear_rounds(w, N)) {
        matmul_backward(dx, w->dweight, dy.data, x.data, w->weight, N, IC, OC, w->ld, add);
        return;
    }
    real *memory = ops_workspace_take(linear_workspace_bytes(N, IC, OC));
    Rounded x_rounded = rounded_at(memory, N, IC);
    Rounded dy_rounded = rounded_at(x_rounded.memory + rounded_bytes(N, IC), N, OC);
    linear_round(x_rounded, x, IC, FP8_ACTIVATION);
    linear_round(dy_rounded, dy, w->ld, FP8_GRADIENT);
    MatmulShape to_input = {false, false, false, false, N, IC, OC, 0, 0, IC};
    MatmulShape to_weight = {true, false, add, false, OC, IC, N, 0, 0, IC};
    linear_product(to_input, dy_rounded, rounded_weight(w), dx);  // dx = dy weight
    linear_product(to_weight, dy_rounded, x_rounded, w->dweight); // dweight = dy^T x
}

// Name, version and kernels of the library, for run.json.
static inline const char *matmul_library(void) {
    static char text[256];
    char rounded[64] = "";
    if (linear_type != GEMM_FP32)
        FORMAT(rounded, ", %s products of numbers rounded to %s", linear_storage == STORE_BF16 ? "bf16" : "fp32",
               linear_type == GEMM_BF16 ? "bf16" : "fp8");
#ifdef ONEDNN
    const dnnl_version_t *version = dnnl_version();
    FORMAT(text, "oneDNN %d.%d.%d%s", version->major, version->minor, version->patch, rounded);
    if (matmul_by_onednn) return text;
#endif
    bool openblas = openblas_get_config != NULL && openblas_get_corename != NULL;
    if (openblas) FORMAT(text, "%s, kernels %s%s", openblas_get_config(), openblas_get_corename(), rounded);
    else FORMAT(text, "CBLAS%s", rounded);
    return text;
}

enum { PEAK_SIZE = 1024, PEAK_COUNT = PEAK_SIZE * PEAK_SIZE + LINEAR_HEADER }; // PEAK_COUNT: elements of any type
static inline Rounded peak_operand(real *m, int i) {
    return rounded_at(m + (size_t)i * PEAK_COUNT, PEAK_SIZE, PEAK_SIZE);
}

// m [3][PEAK_COUNT]: two operands of pseudorandom numbers between -1 and 1, rounded as --matmul-dtype says; the
// product. Not zeros: a library skips a product whose scale is 0, and power limits the speed of other numbers.
static inline void peak_fill(real *m) {
    uint32_t state = 1;
    for (int i = 0; i < 2; i++) {
        real *to = m + (linear_type == GEMM_FP32 ? i : 2) * (size_t)PEAK_COUNT;
        for (int k = 0; k < PEAK_SIZE * PEAK_SIZE; k++) {
            state = state * 1664525u + 1013904223u;
            to[k] = (real)((float)(state >> 8) / 8388608.0f - 1);
        }
        absmax_t max = 0;
        Activation operand = activation(to, &max);
        absmax_update(operand, PEAK_SIZE, PEAK_SIZE, PEAK_SIZE);
        if (linear_type != GEMM_FP32) linear_round(peak_operand(m, i), operand, PEAK_SIZE, FP8_ACTIVATION);
    }
}
static inline void peak_product(real *m) {
    MatmulShape shape = {false, true, false, false, PEAK_SIZE, PEAK_SIZE, PEAK_SIZE, 0, 0, PEAK_SIZE};
    real *to = m + 2 * (size_t)PEAK_COUNT;
    if (linear_type == GEMM_FP32) matmul_forward(to, m, m + PEAK_COUNT, PEAK_SIZE, PEAK_SIZE, PEAK_SIZE, PEAK_SIZE);
    else linear_product(shape, peak_operand(m, 0), peak_operand(m, 1), to);
}

// GFLOP/s of the library on a large product, the maximum of a few: the reference for the speed of a step.
static inline double matmul_peak_gflops(void) {
    enum { TRIES = 6 };
    real *m = (real *)buffer_alloc(3 * PEAK_COUNT * sizeof(real), "measuring the peak of the GEMM library");
    double best = 0;
    peak_fill(m);
    for (int i = 0; i < TRIES; i++) {
        double start = now_seconds();
        peak_product(m);
        best = fmax(best, 2e-9 * PEAK_SIZE * PEAK_SIZE * PEAK_SIZE / (now_seconds() - start));
    }
    buffer_free(m);
    return best;
}
