/*
rmsnorm.cuh: divides a row by its root mean square. Equations in rmsnorm.h.

  forward   up to a warp per row; its second pass reads the row from the cache. residual_rmsnorm_forward reads a and b,
            writes their sum, and normalizes the rounded sum: bitwise equal to rmsnorm_forward of the stored sum,
            without reading it again.
  backward  A block processes rows in sequence, several at once if they are short. A thread has the same columns in all
            rows: it loads dy, x and dx of a row at once, keeps them while the block adds the product, and keeps dweight
            in registers. The partial sums of all blocks are then added in order. The division of the rows depends on N
            and C alone.
  numerics  sums in fp32; y and dx rounded once each
  traffic   forward C in, C out (with the residual 2C in, 2C out); backward 4C in (dx included), C out, and
            RMSNORM_BLOCKS C fp32 out and in
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "../absmax.cuh"
#include "operations.h"

// y_sum and b are NULL if the row is `a`.
template <int W, typename Max = NoMax>
static __global__ void rmsnorm_forward_kernel(int lanes, floatX *y_sum, floatX *y, real *rstd, const floatX *a,
                                              const floatX *b, const floatX *weight, int N, int C, real eps, Max max) {
    unsigned n = row_index(lanes);
    size_t row = n * (size_t)C;
    int lane = row_lane(lanes);
    bool active = n < (unsigned)N;
    const floatX *x = b ? y_sum : a;
    float sum = 0, v[W], w[W];
    if (active)
        for (int c = lane * W; c < C; c += lanes * W) {
            load<W>(v, a + row + c);
            if (b) {
                load<W>(w, b + row + c);
                UNROLL
                for (int k = 0; k < W; k++) v[k] += w[k];
                store<W>(y_sum + row + c, v);
                load<W>(v, y_sum + row + c); // the rounded sum
            }
            UNROLL
            for (int k = 0; k < W; k++) sum += v[k] * v[k];
        }
    sum = lanes_sum(sum, lanes);
    float r = 1 / sqrtf(sum / (float)C + eps);
    for (int c = active ? lane * W : C; c < C; c += lanes * W) {
        load<W>(v, x + row + c);
        load<W>(w, weight + c);
        UNROLL
        for (int k = 0; k < W; k++) v[k] = v[k] * r * w[k];
        store<W>(y + row + c, v);
        max.add(v);
    }
    if (active && lane == 0) rstd[n] = r;
    max.finish();
}

static inline void rmsnorm_forward(Activation y, real *rstd, const floatX *x, const floatX *weight, int N, int C,
                                   real eps) {
    OPERATION();
    bool wide = packed(C, y.data, x, weight);
    floatX *none = nullptr;
    launch_with_max(y.max, [&](auto of_y) {
        typedef decltype(of_y) Max;
        LAUNCH_ROWS_EITHER((rmsnorm_forward_kernel<PACK, Max>), (rmsnorm_forward_kernel<1, Max>), wide, N, C, none,
                           y.data, rstd, x, (const floatX *)none, weight, N, C, eps, of_y);
    });
}

static inline void residual_rmsnorm_forward(floatX *y_sum, Activation norm, real *rstd, const floatX *a,
                                            const floatX *b, const floatX *weight, int N, int C, real eps) {
    OPERATION();
    bool wide = packed(C, y_sum, norm.data, a, b, weight);
    launch_with_max(norm.max, [&](auto of_norm) {
        typedef decltype(of_norm) Max;
        LAUNCH_ROWS_EITHER((rmsnorm_forward_kernel<PACK, Max>), (rmsnorm_forward_kernel<1, Max>), wide, N, C, y_sum,
                           norm.data, rstd, a, b, weight, N, C, eps, of_norm);
    });
}

#ifndef RMSNORM_BLOCKS // blocks of the backward; tests define fewer
#define RMSNORM_BLOCKS 512
#endif
enum { RMSNORM_LANES = 1024, RMSNORM_THREADS = 256 }; // maximum threads per row; threads per block for shorter rows

static inline size_t rmsnorm_workspace_bytes(int C) { return RMSNORM_BLOCKS * (size_t)C * sizeof(real); }

// A thread's part of dy . (weight x) over all columns of a row except `skip`.
template <int W>
static __device__ inline float rmsnorm_other_columns(const floatX *dy, const floatX *x, const floatX *weight, int C,
                                                     int skip) {
    float d[W], v[W], w[W], dot = 0;
    for (int c = (int)threadIdx.x * W; c < C; c += (int)blockDim.x * W) {
        if (c == skip) continue;
        load<W>(d, dy + c);
        load<W>(v, x + c);
        load<W>(w, weight + c);
        UNROLL
        for (int k = 0; k < W; k++) dot += d[k] * w[k] * v[k];
    }
    return dot;
}

// A block's part of the rows: blockDim.y rows at once, blockDim.x threads per row, one pack of columns per thread. If a
// row has more packs, PARTS is true and blockIdx.y selects the columns; the product covers the whole row.
// partial (gridDim.x, C)
template <int W, bool PARTS, typename Max = NoMax>
static __global__ void __launch_bounds__(RMSNORM_LANES)
    rmsnorm_backward_kernel(floatX *dx, float *partial, const floatX *dy, const floatX *x, const floatX *weight,
                            const real *rstd, int N, int C, bool add, Max max) {
    SHARED(float, dots, 2 * WARP); // two halves in turns, so that one barrier per row is enough
    DYNAMIC_SHARED(float, sums);   // (blockDim.y - 1, blockDim.x, W)
    int lane = (int)threadIdx.x % WARP, warps = (int)blockDim.x / WARP, groups = (int)blockDim.y;
    int begin = (int)((int64_t)N * blockIdx.x / gridDim.x), end = (int)((int64_t)N * (blockIdx.x + 1) / gridDim.x);
    int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W, group = (int)threadIdx.y;
    float total[W] = {0}, inverse = 1 / (float)C;
    for (int base = begin, turn = 0; base < end; base += groups, turn = WARP - turn) {
        int n = base + group;
        bool active = n < end && c < C; // the other lanes take part in the reduction
        size_t row = (size_t)n * C;
        float d[W] = {0}, v[W] = {0}, g[W] = {0}, w[W] = {0}, r = 0, dot = 0;
        if (PARTS && n < end) dot = rmsnorm_other_columns<W>(dy + row, x + row, weight, C, c);
        if (active) {
            r = rstd[n];
            load<W>(w, weight + c); // from the cache: kept over the rows, it would make the registers spill
            load<W>(d, dy + row + c);
            load<W>(v, x + row + c);
            if (add) load<W>(g, dx + row + c);
        }
        UNROLL
        for (int k = 0; k < W; k++) dot += d[k] * w[k] * v[k];
        dot = lanes_sum(dot, WARP);
        if (warps > 1) {
            float *of_group = dots + turn + group * warps;
            if (lane == 0) of_group[threadIdx.x / WARP] = dot;
            __syncthreads();
            dot = lanes_sum(lane < warps ? of_group[lane] : 0.0f, WARP);
        }
        float mean = dot * r * inverse; // mean_j(g[j] z[j])
        UNROLL
        for (int k = 0; k < W; k++) {
            float z = v[k] * r;
            total[k] += d[k] * z;                 // backward of weight in y = z weight
            g[k] += r * (d[k] * w[k] - z * mean); // backward of y = x r weight
        }
        if (active) {
            store<W>(dx + row + c, g);
            max.add(g);
        }
    }
    max.finish();
    if (group > 0) store_fp32<W>(sums + (size_t)((group - 1) * (int)blockDim.x + (int)threadIdx.x) * W, total);
    __syncthreads();
    if (group > 0 || c >= C) return;
    for (int i = 0; i < groups - 1; i++) {
        float part[W];
        load_fp32<W>(part, sums + (size_t)(i * (int)blockDim.x + (int)threadIdx.x) * W);
        UNROLL
        for (int k = 0; k < W; k++) total[k] += part[k];
    }
    store_fp32<W>(partial + blockIdx.x * (size_t)C + c, total);
}

static inline void rmsnorm_backward(Activation dx, grad_t *dweight, const floatX *dy, const floatX *x,
                                    const floatX *weight, const real *rstd, int N, int C, bool add) {
    OPERATION();
    float *partial = ops_workspace_take(rmsnorm_workspace_bytes(C));
    bool wide = packed(C, dx.data, dy, x, weight);
    int width = wide ? PACK : 1, packs = C / width;
    int lanes = min_int(RMSNORM_LANES, (packs + WARP - 1) / WARP * WARP), groups = max_int(1, RMSNORM_THREADS / lanes);
    int parts = min_int(RMSNORM_BLOCKS, (N + groups - 1) / groups);
    size_t bytes = (size_t)(groups - 1) * (lanes * width) * sizeof(float);
    dim3 grid((unsigned)parts, (unsigned)((packs + lanes - 1) / lanes)), block((unsigned)lanes, (unsigned)groups);
    launch_with_max(dx.max, [&](auto of_dx) {
        typedef decltype(of_dx) Max;
        if (!wide)
            LAUNCH((rmsnorm_backward_kernel<1, true, Max>), grid, block, bytes, dx.data, partial, dy, x, weight, rstd,
                   N, C, add, of_dx);
        else if (grid.y > 1)
            LAUNCH((rmsnorm_backward_kernel<PACK, true, Max>), grid, block, bytes, dx.data, partial, dy, x, weight,
                   rstd, N, C, add, of_dx);
        else
            LAUNCH((rmsnorm_backward_kernel<PACK, false, Max>), grid, block, bytes, dx.data, partial, dy, x, weight,
                   rstd, N, C, add, of_dx);
    });
    column_sum(dweight, partial, parts, C);
}
