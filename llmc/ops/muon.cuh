/*
muon.cuh: Muon and NorMuon. Equations in muon.h.

  mapping    elements: a thread per pack. Rows of all slices: a warp per row. Sums of a slice: a block per slice. The
             products are those of the library, a call for each slice
  numerics   X, A and P = a I + b A + c A A are stored as floatX: in the bf16 build the products have bf16 operands and
             fp32 sums, and each of them is rounded once. The direction d is rounded to floatX, and X = d / |d| again.
             Sums of squares, second moments and the step are fp32
  workspace  X and A of all slices, each twice, with rows padded to packs
*/
#pragma once
#include "../cuda/gemm.cuh"
#include "../cuda/kernel_utils.cuh"
#include "ops.h"
#include "traffic.h"

template <int W>
static __global__ void muon_direction_kernel(size_t begin, size_t end, floatX *direction, real *m, const grad_t *grads,
                                             float scale, float keep, float rest) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float d[W], g[W], mi[W];
    load_fp32<W>(g, grads + i);
    load_fp32<W>(mi, m + i);
    UNROLL
    for (int k = 0; k < W; k++) {
        g[k] = rest * (scale * g[k]);
        mi[k] = keep * mi[k] + g[k];
        d[k] = keep * mi[k] + g[k];
    }
    store_fp32<W>(m + i, mi);
    store<W>(direction + i, d);
}

static inline void muon_direction(floatX *direction, real *m, const grad_t *grads, size_t count, double grad_scale,
                                  double momentum) {
    OPERATION();
    LAUNCH_ELEMENTS(muon_direction_kernel, packed(0, direction, m, grads), count, direction, m, grads,
                    (float)grad_scale, (float)momentum, (float)(1 - momentum));
}

template <int W>
static __global__ void muon_update_kernel(size_t begin, size_t end, floatX *params, real *master, const grad_t *step,
                                          float keep, float rate) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float w[W], u[W];
    if (master) load_fp32<W>(w, master + i);
    else load<W>(w, params + i);
    load_fp32<W>(u, step + i);
    UNROLL
    for (int k = 0; k < W; k++) w[k] = w[k] * keep - rate * u[k];
    if (master) store_fp32<W>(master + i, w);
    store<W>(params + i, w);
}

static inline void muon_update(floatX *params, real *master, const grad_t *step, size_t count, double lr,
                               double weight_decay) {
    OPERATION();
    LAUNCH_ELEMENTS(muon_update_kernel, packed(0, params, master, step), count, params, master, step,
                    (float)(1 - lr * weight_decay), (float)lr);
}

// ---- rows of slices: row i of all is row i % rows of slice i / rows

enum { MUON_THREADS = 256 };

static __device__ inline size_t muon_row_at(MuonSlices s, int i) {
    int slice = i / s.rows, row = i % s.rows;
    return (size_t)slice * s.stride + (size_t)(row / s.part_rows) * s.part_stride + (size_t)(row % s.part_rows) * s.ld;
}

// squares[i] = the sum of squares of row i
static __global__ void muon_squares_kernel(float *squares, const floatX *x, MuonSlices s) {
    int i = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP), lane = (int)threadIdx.x % WARP;
    float sum = 0;
    if (i < s.count * s.rows) {
        const floatX *row = x + muon_row_at(s, i);
        for (int c = lane; c < s.columns; c += WARP) sum += to_float(row[c]) * to_float(row[c]);
    }
    sum = lanes_sum(sum, WARP);
    if (lane == 0 && i < s.count * s.rows) squares[i] = sum;
}

// factors[slice] = 1 / |slice|
static __global__ void muon_norm_kernel(float *factors, const float *squares, int rows) {
    SHARED(float, memory, WARP);
    float sum = 0;
    for (int r = (int)threadIdx.x; r < rows; r += MUON_THREADS) sum += squares[(size_t)blockIdx.x * rows + r];
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) factors[blockIdx.x] = 1 / fmaxf(sqrtf(sum), 1e-7f);
}

// NorMuon: squares become factors of the rows.
static __global__ void muon_normalize_kernel(float *factors, float *squares, real *second, int rows, int columns,
                                             float beta2, float rest2) {
    SHARED(float, memory, WARP);
    float sum = 0;
    for (int r = (int)threadIdx.x; r < rows; r += MUON_THREADS) {
        size_t i = (size_t)blockIdx.x * rows + r;
        float v = beta2 * second[i] + rest2 * (squares[i] / (float)columns), factor = 1 / (sqrtf(v) + 1e-10f);
        float size = sqrtf(squares[i]) * factor; // its square may exceed fp32 before this product
        sum += size * size;
        second[i] = v;
        squares[i] = factor;
    }
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) factors[blockIdx.x] = 0.2f * sqrtf((float)rows * (float)columns) / fmaxf(sqrtf(sum), 1e-7f);
}

// to = from * constant * factors[slice] * row_factors[row]; NULL: 1
template <typename T>
static __global__ void muon_copy_kernel(T *to, MuonSlices t, const floatX *from, MuonSlices f, float constant,
                                        const float *factors, const float *row_factors) {
    int i = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP), lane = (int)threadIdx.x % WARP;
    if (i >= t.count * t.rows) return;
    const floatX *x = from + muon_row_at(f, i);
    T *y = to + muon_row_at(t, i);
    float row_factor = row_factors ? row_factors[i] : 1, factor = factors ? factors[i / t.rows] : 1;
    for (int c = lane; c < t.columns; c += WARP) round_to(y + c, to_float(x[c]) * row_factor * factor * constant);
}

// P = a I + b A + c P, of the rows of all slices (k,k)
static __global__ void muon_polynomial_kernel(floatX *P, const floatX *A, int rows, int k, int ld, float a, float b,
                                              float c) {
    int i = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP);
    if (i >= rows) return;
    floatX *p = P + (size_t)i * ld;
    const floatX *q = A + (size_t)i * ld;
    for (int j = (int)threadIdx.x % WARP; j < k; j += WARP)
        round_to(p + j, (j == i % k ? a : 0) + b * to_float(q[j]) + c * to_float(p[j]));
}

static inline size_t muon_workspace_bytes(MuonSlices s) { return muon_gpu_workspace_bytes(s); }

// next = one step of Newton-Schulz on X, the slices w; A, P (count,k,k)
static inline void muon_step(floatX *next, const floatX *X, floatX *A, floatX *P, MuonSlices w) {
    const bool tall = w.rows > w.columns;
    const int k = min_int(w.rows, w.columns), n = max_int(w.rows, w.columns), ld = muon_ld(k), rows = w.count * k;
    const GemmShape to_A = {tall, !tall, false, false, k, k, n, w.ld, w.ld, ld},
                    to_P = {false, false, false, false, k, k, k, ld, ld, ld},
                    to_X = tall ? GemmShape{false, false, false, false, n, k, k, w.ld, ld, w.ld}
                                : GemmShape{false, false, false, false, k, n, k, ld, w.ld, w.ld};
    const double *c = muon_coefficients;
    for (int i = 0; i < w.count; i++) {
        const floatX *x = X + (size_t)i * w.stride;
        floatX *a = A + (size_t)i * k * ld;
        gemm(to_A, a, x, x);                      // A = X X^T
        gemm(to_P, P + (size_t)i * k * ld, a, a); // P = A A
    }
    LAUNCH(muon_polynomial_kernel, blocks_of((size_t)rows, MUON_THREADS / WARP), MUON_THREADS, 0, P, A, rows, k, ld,
           (float)c[0], (float)c[1], (float)c[2]);
    for (int i = 0; i < w.count; i++) {
        const floatX *x = X + (size_t)i * w.stride, *p = P + (size_t)i * k * ld;
        gemm(to_X, next + (size_t)i * w.stride, tall ? x : p, tall ? p : x); // P X
    }
}

static inline void muon_orthogonalize(grad_t *out, real *second, const floatX *x, MuonSlices s, double beta2) {
    OPERATION();
    const int k = min_int(s.rows, s.columns), ld = muon_ld(s.columns);
    const size_t rows = (size_t)s.count * s.rows;
    const MuonSlices w = {s.count, s.rows, s.columns, ld, s.rows, (size_t)s.rows * ld, 0}; // in the workspace
    const size_t size = round_up(rows * ld, 64), square = round_up((size_t)s.count * k * muon_ld(k), 64);
    floatX *X = (floatX *)(void *)ops_workspace_take(muon_workspace_bytes(s)), *next = X + size, *A = next + size,
           *P = A + square;
    float *squares = (float *)(void *)(P + square), *factors = squares + rows;
    const unsigned blocks = blocks_of(rows, MUON_THREADS / WARP);
    LAUNCH(muon_squares_kernel, blocks, MUON_THREADS, 0, squares, x, s);
    LAUNCH(muon_norm_kernel, (unsigned)s.count, MUON_THREADS, 0, factors, squares, s.rows);
    LAUNCH((muon_copy_kernel<floatX>), blocks, MUON_THREADS, 0, X, w, x, s, 1.0f, factors, nullptr);
    for (int step = 0; step < MUON_STEPS; step++) {
        muon_step(next, X, A, P, w);
        floatX *before = X;
        X = next, next = before;
    }
    float factor = 0.2f * sqrtf((float)max_int(s.rows, s.columns));
    if (second) {
        LAUNCH(muon_squares_kernel, blocks, MUON_THREADS, 0, squares, X, w);
        LAUNCH(muon_normalize_kernel, (unsigned)s.count, MUON_THREADS, 0, factors, squares, second, s.rows, s.columns,
               (float)beta2, (float)(1 - beta2));
        LAUNCH((muon_copy_kernel<grad_t>), blocks, MUON_THREADS, 0, out, s, X, w, 1.0f, factors, squares);
    } else {
        LAUNCH((muon_copy_kernel<grad_t>), blocks, MUON_THREADS, 0, out, s, X, w, factor, nullptr, nullptr);
    }
}
