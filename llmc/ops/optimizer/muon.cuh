/*
muon.cuh: Muon and NorMuon. Equations in muon.h.

  mapping    elements: a thread per pack. Rows: a warp per row. Sums of the matrix: one block. The library
             computes the products
  numerics   X, A and P = a I + b A + c A A are stored as floatX: in the bf16 build the products have bf16 operands and
             fp32 sums, and each of them is rounded once. The direction d is rounded to floatX, and X = d / |d| again.
             Sums of squares, second moments and the step are fp32
  workspace  X and A, each twice, with rows padded to packs
*/
#pragma once
#include "../../cuda/gemm.cuh"
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

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

enum { MUON_THREADS = 256 };

// squares[r] = the sum of squares of row r
static __global__ void muon_squares_kernel(float *squares, const floatX *x, int rows, int columns, int ld) {
    int r = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP), lane = (int)threadIdx.x % WARP;
    float sum = 0;
    if (r < rows) {
        const floatX *row = x + (size_t)r * ld;
        for (int c = lane; c < columns; c += WARP) sum += to_float(row[c]) * to_float(row[c]);
    }
    sum = lanes_sum(sum, WARP);
    if (lane == 0 && r < rows) squares[r] = sum;
}

// *factor = 1 / |x|
static __global__ void muon_norm_kernel(float *factor, const float *squares, int rows) {
    SHARED(float, memory, WARP);
    float sum = 0;
    for (int r = (int)threadIdx.x; r < rows; r += MUON_THREADS) sum += squares[r];
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) *factor = 1 / fmaxf(sqrtf(sum), 1e-7f);
}

// NorMuon: squares become factors of the rows.
static __global__ void muon_normalize_kernel(float *factor_of_all, float *squares, real *row_v, int rows, int columns,
                                             float beta2, float rest2) {
    SHARED(float, memory, WARP);
    float sum = 0;
    for (int r = (int)threadIdx.x; r < rows; r += MUON_THREADS) {
        float v = beta2 * row_v[r] + rest2 * (squares[r] / (float)columns), factor = 1 / (sqrtf(v) + 1e-10f);
        float size = sqrtf(squares[r]) * factor; // its square may exceed fp32 before this product
        sum += size * size;
        row_v[r] = v;
        squares[r] = factor;
    }
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) *factor_of_all = 0.2f * sqrtf((float)rows * (float)columns) / fmaxf(sqrtf(sum), 1e-7f);
}

// to (rows,columns) = from * constant * *factor * row_factors[row]; NULL: 1
template <typename T>
static __global__ void muon_copy_kernel(T *to, int to_ld, const floatX *from, int from_ld, int rows, int columns,
                                        float constant, const float *factor, const float *row_factors) {
    int r = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP), lane = (int)threadIdx.x % WARP;
    if (r >= rows) return;
    const floatX *x = from + (size_t)r * from_ld;
    T *y = to + (size_t)r * to_ld;
    float row_factor = row_factors ? row_factors[r] : 1, all = factor ? *factor : 1;
    for (int c = lane; c < columns; c += WARP) round_to(y + c, to_float(x[c]) * row_factor * all * constant);
}

// P = a I + b A + c P (k,k)
static __global__ void muon_polynomial_kernel(floatX *P, const floatX *A, int k, int ld, float a, float b, float c) {
    int i = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP);
    if (i >= k) return;
    floatX *p = P + (size_t)i * ld;
    const floatX *q = A + (size_t)i * ld;
    for (int j = (int)threadIdx.x % WARP; j < k; j += WARP)
        round_to(p + j, (j == i ? a : 0) + b * to_float(q[j]) + c * to_float(p[j]));
}

static inline size_t muon_workspace_bytes(int rows, int columns) { return muon_gpu_workspace_bytes(rows, columns); }

// next = one step of Newton-Schulz on X (rows,columns) with row stride ld_x; A, P (k,k)
static inline void muon_step(floatX *next, const floatX *X, floatX *A, floatX *P, int rows, int columns, int ld_x) {
    const bool tall = rows > columns;
    const int k = min_int(rows, columns), n = max_int(rows, columns), ld = muon_ld(k);
    const GemmShape to_A = {tall, !tall, false, false, k, k, n, ld_x, ld_x, ld},
                    to_P = {false, false, false, false, k, k, k, ld, ld, ld},
                    to_X = tall ? GemmShape{false, false, false, false, n, k, k, ld_x, ld, ld_x}
                                : GemmShape{false, false, false, false, k, n, k, ld, ld_x, ld_x};
    const double *c = muon_coefficients;
    gemm(to_A, A, X, X); // A = X X^T
    gemm(to_P, P, A, A); // P = A A
    LAUNCH(muon_polynomial_kernel, blocks_of((size_t)k, MUON_THREADS / WARP), MUON_THREADS, 0, P, A, k, ld, (float)c[0],
           (float)c[1], (float)c[2]);
    gemm(to_X, next, tall ? X : P, tall ? P : X); // P X
}

static inline void muon_orthogonalize(grad_t *out, real *row_v, const floatX *x, int rows, int columns, double beta2) {
    OPERATION();
    const int k = min_int(rows, columns), ld = muon_ld(columns);
    const size_t size = round_up((size_t)rows * ld, 64), square = round_up((size_t)k * muon_ld(k), 64);
    floatX *X = (floatX *)(void *)ops_workspace_take(muon_workspace_bytes(rows, columns)), *next = X + size,
           *A = next + size, *P = A + square;
    float *squares = (float *)(void *)(P + square), *of_all = squares + rows;
    const unsigned blocks = blocks_of((size_t)rows, MUON_THREADS / WARP);
    LAUNCH(muon_squares_kernel, blocks, MUON_THREADS, 0, squares, x, rows, columns, columns);
    LAUNCH(muon_norm_kernel, 1, MUON_THREADS, 0, of_all, squares, rows);
    LAUNCH((muon_copy_kernel<floatX>), blocks, MUON_THREADS, 0, X, ld, x, columns, rows, columns, 1.0f, of_all,
           nullptr);
    for (int step = 0; step < MUON_STEPS; step++) {
        muon_step(next, X, A, P, rows, columns, ld);
        floatX *before = X;
        X = next, next = before;
    }
    float factor = 0.2f * sqrtf((float)max_int(rows, columns));
    if (row_v) {
        LAUNCH(muon_squares_kernel, blocks, MUON_THREADS, 0, squares, X, rows, columns, ld);
        LAUNCH(muon_normalize_kernel, 1, MUON_THREADS, 0, of_all, squares, row_v, rows, columns, (float)beta2,
               (float)(1 - beta2));
        LAUNCH((muon_copy_kernel<grad_t>), blocks, MUON_THREADS, 0, out, columns, X, ld, rows, columns, 1.0f, of_all,
               squares);
    } else {
        LAUNCH((muon_copy_kernel<grad_t>), blocks, MUON_THREADS, 0, out, columns, X, ld, rows, columns, factor, nullptr,
               nullptr);
    }
}
