/*
linear.h: a linear layer without bias whose operands are rounded as --gemm says.

  forward   y = R(x) R(weight)^T
  backward  dx = R(dy) R(weight),   dweight = R(dy)^T R(x), or with add += R(dy)^T R(x)
  rounding  bf16: each element to bf16
            fp8: each element times 448/max to E4M3 (dy: 57344/max to E5M2), max the largest magnitude of the tensor;
            the product is multiplied by the scales of its operands (fp8.h)
  shapes    x (N,IC), weight (OC,IC), y and dy (N,OC) with row stride ld >= OC
  copy      The rounded weight, made once per update. Without one nothing is rounded: the products of matmul.h. In bf16
            also for N < LINEAR_ROWS, where rounding x costs more than it saves.
  numerics  products exact, sums in fp32 (matmul_bf16.h, or in fp32 the library of matmul.h)
  memory    A rounded number is stored as bf16 if the CPU multiplies bf16, which holds every number of E4M3 and E5M2;
            otherwise as fp32.
*/
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H
#include "fp8.h"
#include "matmul.h"
#include "matmul_bf16.h"

enum { LINEAR_ROWS = 16, LINEAR_HEADER = 64 };
static GemmType linear_type;
static bool linear_native; // rounded numbers are stored and multiplied as bf16; otherwise as fp32

static inline const char *linear_configure(GemmType type) {
    if (type != GEMM_FP32 && sizeof(real) != sizeof(float))
        return "a build with REAL=double checks mathematics and rounds nothing; use --gemm fp32";
    linear_type = type;
    linear_native = type != GEMM_FP32 && matmul_by_onednn && bf16_begin();
    return NULL;
}

static inline bool linear_in_fp8(void) { return linear_type == GEMM_FP8; }

static inline size_t linear_element_bytes(void) { return linear_native ? sizeof(bf16_t) : sizeof(float); }
static inline int linear_stride(int columns) { return (int)round_up(columns, 32); } // whole cache lines

// A rounded matrix: its scale, then its rows.
typedef struct {
    char *memory;
    int stride; // of the rows, in elements
} Rounded;
static inline Rounded rounded_at(void *memory, int columns) {
    Rounded r = {(char *)memory, linear_stride(columns)};
    return r;
}
static inline size_t rounded_bytes(int rows, int columns) {
    return LINEAR_HEADER + (size_t)rows * linear_stride(columns) * linear_element_bytes();
}
static inline float *rounded_scale(Rounded r) { return (float *)(void *)r.memory; }
static inline char *rounded_rows(Rounded r) { return r.memory + LINEAR_HEADER; }

static inline size_t linear_copy_bytes(int IC, int OC, bool head) {
    return linear_type == GEMM_FP32 || (head && linear_type == GEMM_FP8) ? 0 : rounded_bytes(OC, IC);
}
static inline size_t linear_workspace_bytes(int N, int IC, int OC) {
    return linear_type == GEMM_FP32 ? 0 : rounded_bytes(N, IC) + rounded_bytes(N, OC);
}

// in (rows, columns) with row stride ld; max: its largest magnitude, for FP8
static inline void linear_round(Rounded r, const floatX *in, int ld, int rows, int columns, absmax_t max, Fp8Format f) {
    const float *from = (const float *)(const void *)in;
    void *to = rounded_rows(r);
    *rounded_scale(r) = linear_type == GEMM_FP8 ? fp8_scale(max, f) : 1;
    if (linear_type == GEMM_FP8) {
        float multiplier = fp8_multiplier(max, f);
        if (linear_native) fp8_round_matrix((bf16_t *)to, r.stride, from, ld, rows, columns, multiplier, f);
        else fp8_round_matrix_wide((float *)to, r.stride, from, ld, rows, columns, multiplier, f);
    } else {
        if (linear_native) bf16_round_matrix((bf16_t *)to, r.stride, from, ld, rows, columns);
        else bf16_round_matrix_wide((float *)to, r.stride, from, ld, rows, columns);
    }
}

static inline void linear_copy_weight(Linear w) {
    absmax_t max = 0;
    if (linear_type == GEMM_FP8) absmax_update(&max, w.weight, w.OC, w.IC, w.IC);
    linear_round(rounded_at(w.copy, w.IC), w.weight, w.IC, w.OC, w.IC, max, FP8_WEIGHT);
}

// C = op(A) op(B), or C += op(A) op(B), times the scales of A and B
static inline void linear_product(MatmulShape s, Rounded A, Rounded B, real *C) {
    float scale = *rounded_scale(A) * *rounded_scale(B);
    s.lda = A.stride, s.ldb = B.stride;
    s.scaled = linear_type == GEMM_FP8;
#ifdef ONEDNN
    if (linear_native) {
        gemm_bf16(s, (const bf16_t *)(const void *)rounded_rows(A), (const bf16_t *)(const void *)rounded_rows(B),
                  (float *)(void *)C, scale);
        return;
    }
#endif
    gemm(s.ta ? CblasTrans : CblasNoTrans, s.tb ? CblasTrans : CblasNoTrans, s.M, s.N, s.K, (real)scale,
         (const real *)(const void *)rounded_rows(A), s.lda, (const real *)(const void *)rounded_rows(B), s.ldb,
         s.add ? 1 : 0, C, s.ldc);
}

static inline bool linear_rounds(Linear w, int N) { return w.copy && (linear_type == GEMM_FP8 || N >= LINEAR_ROWS); }

static inline void linear_forward(floatX *y, const floatX *x, Linear w, int N) {
    if (!linear_rounds(w, N)) {
        matmul_forward(y, x, w.weight, N, w.IC, w.OC, w.ld);
        return;
    }
    Rounded x_rounded = rounded_at(ops_workspace_take(linear_workspace_bytes(N, w.IC, w.OC)), w.IC);
    linear_round(x_rounded, x, w.IC, N, w.IC, w.x_max ? *w.x_max : 0, FP8_ACTIVATION);
    MatmulShape forward = {false, true, false, false, N, w.OC, w.IC, 0, 0, w.ld};
    linear_product(forward, x_rounded, rounded_at(w.copy, w.IC), y);
}

static inline void linear_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x, Linear w, int N,
                                   bool add) {
    if (!linear_rounds(w, N)) {
        matmul_backward(dx, dweight, dy, x, w.weight, N, w.IC, w.OC, w.ld, add);
        return;
    }
    Rounded x_rounded = rounded_at(ops_workspace_take(linear_workspace_bytes(N, w.IC, w.OC)), w.IC);
    Rounded dy_rounded = rounded_at(x_rounded.memory + rounded_bytes(N, w.IC), w.OC);
    linear_round(x_rounded, x, w.IC, N, w.IC, w.x_max ? *w.x_max : 0, FP8_ACTIVATION);
    linear_round(dy_rounded, dy, w.ld, N, w.OC, w.dy_max ? *w.dy_max : 0, FP8_GRADIENT);
    MatmulShape to_input = {false, false, false, false, N, w.IC, w.OC, 0, 0, w.IC};
    MatmulShape to_weight = {true, false, add, false, w.OC, w.IC, N, 0, 0, w.IC};
    linear_product(to_input, dy_rounded, rounded_at(w.copy, w.IC), dx); // dx = dy weight
    linear_product(to_weight, dy_rounded, x_rounded, dweight);          // dweight = dy^T x
}

// Name, version and kernels of the library, for run.json.
static inline const char *matmul_library(void) {
    static char text[256];
    char rounded[64] = "";
    if (linear_type != GEMM_FP32)
        FORMAT(rounded, ", %s products of numbers rounded to %s", linear_native ? "bf16" : "fp32",
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

// GFLOP/s of the library on a large product, the maximum of a few: the reference for the speed of a step.
static inline double matmul_peak_gflops(void) {
    enum { SIZE = 1024, TRIES = 6 };
    const size_t count = (size_t)SIZE * SIZE + LINEAR_HEADER; // elements of a matrix of zeros, of any type
    real *m = (real *)buffer_alloc(3 * count * sizeof(real), "measuring the peak of the GEMM library");
    double best = 0;
    for (int i = 0; i < TRIES; i++) {
        double start = now_seconds();
        MatmulShape shape = {false, true, false, false, SIZE, SIZE, SIZE, 0, 0, SIZE};
        if (linear_type == GEMM_FP32) matmul_forward(m + 2 * count, m, m + count, SIZE, SIZE, SIZE, SIZE);
        else linear_product(shape, rounded_at(m, SIZE), rounded_at(m + count, SIZE), m + 2 * count);
        double gflops = 2e-9 * SIZE * SIZE * SIZE / (now_seconds() - start);
        if (gflops > best) best = gflops;
    }
    buffer_free(m);
    return best;
}
#endif
