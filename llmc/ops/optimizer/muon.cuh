/*
muon.cuh: Muon and NorMuon. Equations in muon.h.

  mapping    elements: a thread per pack. Rows: a warp per row. Sums of a matrix: one block. blockIdx.y is the matrix.
             The library computes the products, those of all matrices in one call
  numerics   X, A and P = a I + b A + c A A are stored as floatX: in the bf16 build the products have bf16 operands and
             fp32 sums, and each of them is rounded once. The direction d is rounded to floatX, and X = d / |d| again.
             Sums of squares, second moments and the step are fp32
  workspace  per matrix X and A, each twice, with rows padded to packs
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
static __global__ void muon_squares_kernel(float *squares, const floatX *x, int rows, int columns, int ld,
                                           size_t apart) {
    int r = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP), lane = (int)threadIdx.x % WARP;
    float sum = 0;
    x += blockIdx.y * apart, squares += blockIdx.y * (size_t)rows;
    if (r < rows) {
        const floatX *row = x + (size_t)r * ld;
        for (int c = lane; c < columns; c += WARP) sum += to_float(row[c]) * to_float(row[c]);
    }
    sum = lanes_sum(sum, WARP);
    if (lane == 0 && r < rows) squares[r] = sum;
}

// factors[matrix] = 1 / |x|
static __global__ void muon_norm_kernel(float *factors, const float *squares, int rows) {
    SHARED(float, memory, WARP);
    float sum = 0;
    squares += blockIdx.y * (size_t)rows;
    for (int r = (int)threadIdx.x; r < rows; r += MUON_THREADS) sum += squares[r];
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) factors[blockIdx.y] = 1 / fmaxf(sqrtf(sum), 1e-7f);
}

// NorMuon: squares become factors of the rows.
static __global__ void muon_normalize_kernel(float *factors, float *squares, real *row_v, int rows, int columns,
                                             float beta2, float rest2) {
    SHARED(float, memory, WARP);
    float sum = 0;
    squares += blockIdx.y * (size_t)rows, row_v += blockIdx.y * (size_t)rows;
    for (int r = (int)threadIdx.x; r < rows; r += MUON_THREADS) {
        float v = beta2 * row_v[r] + rest2 * (squares[r] / (float)columns), factor = 1 / (sqrtf(v) + 1e-10f);
        float size = sqrtf(squares[r]) * factor; // its square may exceed fp32 before this product
        sum += size * size;
        row_v[r] = v;
        squares[r] = factor;
    }
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) factors[blockIdx.y] = 0.2f * sqrtf((float)rows * (float)columns) / fmaxf(sqrtf(sum), 1e-7f);
}

// to (rows,columns) = from * constant * factors[matrix] * row_factors[row]; NULL: 1
template <typename T>
static __global__ void muon_copy_kernel(T *to, int to_ld, size_t to_apart, const floatX *from, int from_ld,
                                        size_t from_apart, int rows, int columns, float constant, const float *factors,
                                        const float *row_factors) {
    int r = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP), lane = (int)threadIdx.x % WARP;
    if (r >= rows) return;
    const floatX *x = from + blockIdx.y * from_apart + (size_t)r * from_ld;
    T *y = to + blockIdx.y * to_apart + (size_t)r * to_ld;
    float row_factor = row_factors ? row_factors[blockIdx.y * (size_t)rows + r] : 1;
    float all = factors ? factors[blockIdx.y] : 1;
    for (int c = lane; c < columns; c += WARP) round_to(y + c, to_float(x[c]) * row_factor * all * constant);
}

// P = a I + b A + c P (k,k)
static __global__ void muon_polynomial_kernel(floatX *P, const floatX *A, int k, int ld, size_t apart, float a, float b,
                                              float c) {
    int i = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP);
    if (i >= k) return;
    floatX *p = P + blockIdx.y * apart + (size_t)i * ld;
    const floatX *q = A + blockIdx.y * apart + (size_t)i * ld;
    for (int j = (int)threadIdx.x % WARP; j < k; j += WARP)
        round_to(p + j, (j == i ? a : 0) + b * to_float(q[j]) + c * to_float(p[j]));
}

static inline size_t muon_workspace_bytes(MuonMatrices m) { return muon_gpu_workspace_bytes(m); }

// next = one step of Newton-Schulz on X (rows,columns); A, P (k,k). apart: elements from one matrix to the next
static inline void muon_step(floatX *next, const floatX *X, floatX *A, floatX *P, MuonMatrices m, size_t apart) {
    const bool tall = m.rows > m.columns;
    const int k = min_int(m.rows, m.columns), n = max_int(m.rows, m.columns), ld_x = muon_ld(m.columns),
              ld = muon_ld(k);
    const size_t count = (size_t)m.count;
    const GemmShape to_A = {tall, !tall, false, false, k, k, n, ld_x, ld_x, ld},
                    to_P = {false, false, false, false, k, k, k, ld, ld, ld},
                    to_X = tall ? GemmShape{false, false, false, false, n, k, k, ld_x, ld, ld_x}
                                : GemmShape{false, false, false, false, k, n, k, ld, ld_x, ld_x};
    const double *c = muon_coefficients;
    gemm_batch(to_A, count, apart, A, X, X); // A = X X^T
    gemm_batch(to_P, count, apart, P, A, A); // P = A A
    LAUNCH(muon_polynomial_kernel, dim3(blocks_of((size_t)k, MUON_THREADS / WARP), m.count), MUON_THREADS, 0, P, A, k,
           ld, apart, (float)c[0], (float)c[1], (float)c[2]);
    gemm_batch(to_X, count, apart, next, tall ? X : P, tall ? P : X); // P X
}

static inline void muon_orthogonalize(grad_t *out, real *row_v, const floatX *x, MuonMatrices m, double beta2) {
    OPERATION();
    const int rows = m.rows, columns = m.columns, k = min_int(rows, columns), ld = muon_ld(columns);
    const size_t size = round_up((size_t)rows * ld, MUON_ALIGN), square = round_up((size_t)k * muon_ld(k), MUON_ALIGN),
                 apart = 2 * (size + square);
    floatX *X = (floatX *)(void *)ops_workspace_take(muon_workspace_bytes(m)), *next = X + size, *A = next + size,
           *P = A + square;
    float *squares = (float *)(void *)(X + m.count * apart), *of_all = squares + (size_t)m.count * rows;
    const dim3 each(1, (unsigned)m.count), blocks(blocks_of((size_t)rows, MUON_THREADS / WARP), each.y);
    LAUNCH(muon_squares_kernel, blocks, MUON_THREADS, 0, squares, x, rows, columns, columns, m.apart);
    LAUNCH(muon_norm_kernel, each, MUON_THREADS, 0, of_all, squares, rows);
    LAUNCH((muon_copy_kernel<floatX>), blocks, MUON_THREADS, 0, X, ld, apart, x, columns, m.apart, rows, columns, 1.0f,
           of_all, nullptr);
    for (int step = 0; step < MUON_STEPS; step++) {
        muon_step(next, X, A, P, m, apart);
        floatX *before = X;
        X = next, next = before;
    }
    float factor = 0.2f * sqrtf((float)max_int(rows, columns));
    if (row_v) {
        LAUNCH(muon_squares_kernel, blocks, MUON_THREADS, 0, squares, X, rows, columns, ld, apart);
        LAUNCH(muon_normalize_kernel, each, MUON_THREADS, 0, of_all, squares, row_v, rows, columns, (float)beta2,
               (float)(1 - beta2));
    }
    LAUNCH((muon_copy_kernel<grad_t>), blocks, MUON_THREADS, 0, out, columns, m.apart, X, ld, apart, rows, columns,
           row_v ? 1.0f : factor, row_v ? of_all : nullptr, row_v ? squares : nullptr);
}
