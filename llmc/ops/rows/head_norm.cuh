/*
head_norm.cuh: RMSNorm of query and key heads, in the rows of a fused matrix. Equations in head_norm.h.

  mapping   up to a warp of threads per head, which keep it in registers (launch_heads): both passes over a head, and
            its copy, are one load. Backward: a block takes its part of the heads in sequence, several at once. A thread
            has the same columns of all of them and keeps their dweight in registers; the block adds the sums of its
            groups of lanes in order, and column_sum adds the sums of the blocks. The division depends on the number
            and width of heads alone. No atomics.
  numerics  sums and arithmetic in fp32, x and dx rounded once each
  traffic   D in, 2D out per head; backward 2D in, D out, and HEAD_NORM_BLOCKS D fp32 out and in
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

template <int W, int PACKS>
static __global__ void head_norm_forward_kernel(int lanes, floatX *x, floatX *kept, const floatX *weight, int N,
                                                int heads, int D, int ld, int ldk, real eps) {
    unsigned row = row_index(lanes), n = row / (unsigned)heads, h = row % (unsigned)heads;
    int width = n < (unsigned)N ? D : 0; // the other lanes take part in the sum
    floatX *head = x + n * (size_t)ld + h * (size_t)D;
    float v[PACKS][W], w[PACKS][W];
    load_head(v, head, lanes, width);
    load_head(w, weight, lanes, width);
    float r = 1 / sqrtf(lanes_sum(head_dot(v, v), lanes) / (float)D + eps);
    if (kept) store_head(kept + n * (size_t)ldk + h * (size_t)D, v, lanes, width);
    UNROLL
    for (int p = 0; p < PACKS; p++) {
        UNROLL
        for (int k = 0; k < W; k++) v[p][k] = v[p][k] * r * w[p][k];
    }
    store_head(head, v, lanes, width);
}

static inline void head_norm_forward(floatX *x, floatX *kept, const floatX *weight, int N, int heads, int D, int ld,
                                     int ldk, real eps) {
    OPERATION();
    bool wide = packed(D, x, weight) && packed(ld) && (!kept || packed(ldk, kept));
    launch_heads(wide, D, [&](auto width, auto packs, int lanes) {
        LAUNCH((head_norm_forward_kernel<decltype(width)::value, decltype(packs)::value>),
               blocks_of((size_t)N * heads, (size_t)(ROW_THREADS / lanes)), ROW_THREADS, 0, lanes, x, kept, weight, N,
               heads, D, ld, ldk, eps);
    });
}

#ifndef HEAD_NORM_BLOCKS // blocks of the backward; tests define fewer
#define HEAD_NORM_BLOCKS 1024
#endif
enum { HEAD_NORM_THREADS = 256 };

static inline size_t head_norm_workspace_bytes(int D) { return HEAD_NORM_BLOCKS * (size_t)D * sizeof(real); }

// partial (gridDim.x, D): dweight of each block's part of the N*heads heads
template <int W, int PACKS>
static __global__ void __launch_bounds__(HEAD_NORM_THREADS)
    head_norm_backward_kernel(int lanes, floatX *dx, float *partial, const floatX *kept, const floatX *weight, int N,
                              int heads, int D, int ld, int ldk, real eps) {
    DYNAMIC_SHARED(float, sums); // (groups, D)
    int shift = __ffs(lanes) - 1, group = (int)threadIdx.x >> shift, groups = HEAD_NORM_THREADS >> shift;
    size_t count = (size_t)N * heads;
    unsigned begin = (unsigned)(count * blockIdx.x / gridDim.x), end = (unsigned)(count * (blockIdx.x + 1) / gridDim.x);
    float total[PACKS][W] = {{0}}, w[PACKS][W], v[PACKS][W], g[PACKS][W], inverse = 1 / (float)D;
    load_head(w, weight, lanes, D);
    for (unsigned base = begin; base < end; base += (unsigned)groups) {
        unsigned row = base + (unsigned)group, n = row / (unsigned)heads, h = row % (unsigned)heads;
        int width = row < end ? D : 0; // the other lanes take part in the sums
        floatX *of_x = dx + n * (size_t)ld + h * (size_t)D;
        load_head(v, kept + n * (size_t)ldk + h * (size_t)D, lanes, width);
        load_head(g, of_x, lanes, width);
        float dot = 0;
        UNROLL
        for (int p = 0; p < PACKS; p++) {
            UNROLL
            for (int k = 0; k < W; k++) dot += g[p][k] * w[p][k] * v[p][k];
        }
        float r = 1 / sqrtf(lanes_sum(head_dot(v, v), lanes) * inverse + eps);
        float mean = lanes_sum(dot, lanes) * r * inverse; // mean_i(g[i] z[i])
        UNROLL
        for (int p = 0; p < PACKS; p++) {
            UNROLL
            for (int k = 0; k < W; k++) {
                float z = v[p][k] * r;
                total[p][k] += g[p][k] * z;                   // backward of weight in y = z weight
                g[p][k] = r * (g[p][k] * w[p][k] - z * mean); // backward of y = x r weight
            }
        }
        store_head(of_x, g, lanes, width);
    }
    UNROLL
    for (int p = 0; p < PACKS; p++) {
        int i = (row_lane(lanes) + p * lanes) * W;
        if (i < D) store_fp32<W>(sums + group * D + i, total[p]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < D; i += HEAD_NORM_THREADS) {
        float sum = 0;
        for (int other = 0; other < groups; other++) sum += sums[other * D + i];
        partial[blockIdx.x * (size_t)D + i] = sum;
    }
}

static inline void head_norm_backward(floatX *dx, grad_t *dweight, const floatX *kept, const floatX *weight, int N,
                                      int heads, int D, int ld, int ldk, real eps) {
    OPERATION();
    float *partial = ops_workspace_take(head_norm_workspace_bytes(D));
    size_t count = (size_t)N * heads;
    unsigned parts = 0;
    CHECK(count <= INT_MAX, "%zu heads are too many for one launch; choose a smaller --batch-size", count);
    bool wide = packed(D, dx, kept, weight) && packed(ld) && packed(ldk);
    launch_heads(wide, D, [&](auto width, auto packs, int lanes) {
        size_t groups = HEAD_NORM_THREADS / (size_t)lanes;
        parts = (unsigned)min_size(HEAD_NORM_BLOCKS, (count + groups - 1) / groups);
        LAUNCH((head_norm_backward_kernel<decltype(width)::value, decltype(packs)::value>), parts, HEAD_NORM_THREADS,
               groups * D * sizeof(float), lanes, dx, partial, kept, weight, N, heads, D, ld, ldk, eps);
    });
    column_sum(dweight, partial, (int)parts, D);
}
