/*
exclusive.cuh: removes from each output head its component along its position's own value. Equations in exclusive.h.

  mapping   up to a warp of threads per head, which keep it in registers (launch_heads). The backward has them per value
            head: they take its output heads in sequence, the next one loaded before the sums of the current one, and
            keep the sum of dv, which is the same for any order of blocks. No atomics.
  numerics  sums and arithmetic in fp32, y, dx and dv rounded once each
  traffic   per output head D in, D out, and v once; backward 2D in, D out, v in and dv out: bandwidth-bound
*/
#pragma once
#include "../cuda/kernel_utils.cuh"
#include "fp8.cuh"
#include "ops.h"

// 1 / <v,v>, or 0; the same in all lanes
template <int W, int PACKS> static __device__ inline float exclusive_scale(const float (&v)[PACKS][W], int lanes) {
    float square = lanes_sum(head_dot(v, v), lanes);
    return square >= (float)EXCLUSIVE_LEAST ? 1 / square : 0;
}

// shared: output heads per value head
template <int W, int PACKS, typename Max>
static __global__ void exclusive_forward_kernel(int lanes, floatX *y, const floatX *x, const floatX *v, int N,
                                                int heads, int shared, int D, int ldv, Max max) {
    unsigned row = row_index(lanes), n = row / (unsigned)heads, h = row % (unsigned)heads;
    int width = n < (unsigned)N ? D : 0; // the other lanes take part in the sums
    float a[PACKS][W], b[PACKS][W];
    load_head(a, x + row * (size_t)D, lanes, width);
    load_head(b, v + n * (size_t)ldv + h / (unsigned)shared * (size_t)D, lanes, width);
    float c = lanes_sum(head_dot(a, b), lanes) * exclusive_scale(b, lanes);
    UNROLL
    for (int p = 0; p < PACKS; p++) {
        UNROLL
        for (int k = 0; k < W; k++) a[p][k] -= c * b[p][k];
        if ((row_lane(lanes) + p * lanes) * W < width) max.add(a[p]);
    }
    store_head(y + row * (size_t)D, a, lanes, width);
    max.finish();
}

static inline void exclusive_forward(floatX *y, const floatX *x, const floatX *v, int N, int heads, int NKV, int D,
                                     int ldv, absmax_t *max) {
    OPERATION();
    assert(heads % NKV == 0);
    launch_with_max(max, [&](auto of_y) {
        typedef decltype(of_y) Max;
        launch_heads(packed(D, y, x, v) && packed(ldv), D, [&](auto width, auto packs, int lanes) {
            LAUNCH((exclusive_forward_kernel<decltype(width)::value, decltype(packs)::value, Max>),
                   blocks_of((size_t)N * heads, (size_t)(ROW_THREADS / lanes)), ROW_THREADS, 0, lanes, y, x, v, N,
                   heads, heads / NKV, D, ldv, of_y);
        });
    });
}

template <int W, int PACKS>
static __global__ void exclusive_backward_kernel(int lanes, floatX *dx, floatX *dv, const floatX *dy, const floatX *x,
                                                 const floatX *v, int N, int NKV, int shared, int D, int ldv,
                                                 int lddv) {
    unsigned row = row_index(lanes), n = row / (unsigned)NKV, kv = row % (unsigned)NKV;
    int width = n < (unsigned)N ? D : 0; // the other lanes take part in the sums
    size_t at = row * (size_t)(shared * D);
    float own[PACKS][W], g[PACKS][W], a[PACKS][W], next_g[PACKS][W], next_a[PACKS][W], sum[PACKS][W] = {{0}}, along = 0;
    load_head(own, v + n * (size_t)ldv + kv * (size_t)D, lanes, width);
    load_head(g, dy + at, lanes, width);
    load_head(a, x + at, lanes, width);
    float scale = exclusive_scale(own, lanes);
    for (int h = 0; h < shared; h++, at += D) {
        int next = h + 1 < shared ? width : 0;
        load_head(next_g, dy + at + D, lanes, next);
        load_head(next_a, x + at + D, lanes, next);
        float c = lanes_sum(head_dot(a, own), lanes) * scale, b = lanes_sum(head_dot(g, own), lanes) * scale;
        along += 2 * b * c;
        UNROLL
        for (int p = 0; p < PACKS; p++) {
            UNROLL
            for (int k = 0; k < W; k++) {
                sum[p][k] += c * g[p][k] + b * a[p][k]; // backward of v in y = x - (x.v / v.v) v, without 2 b c v
                g[p][k] -= b * own[p][k];               // backward of x
            }
        }
        store_head(dx + at, g, lanes, width);
        UNROLL
        for (int p = 0; p < PACKS; p++) {
            UNROLL
            for (int k = 0; k < W; k++) g[p][k] = next_g[p][k], a[p][k] = next_a[p][k];
        }
    }
    UNROLL
    for (int p = 0; p < PACKS; p++) {
        UNROLL
        for (int k = 0; k < W; k++) sum[p][k] = along * own[p][k] - sum[p][k];
    }
    store_head(dv + n * (size_t)lddv + kv * (size_t)D, sum, lanes, width);
}

static inline void exclusive_backward(floatX *dx, floatX *dv, const floatX *dy, const floatX *x, const floatX *v, int N,
                                      int heads, int NKV, int D, int ldv, int lddv) {
    OPERATION();
    assert(heads % NKV == 0);
    bool wide = packed(D, dx, dv, dy, x, v) && packed(ldv) && packed(lddv);
    launch_heads(wide, D, [&](auto width, auto packs, int lanes) {
        LAUNCH((exclusive_backward_kernel<decltype(width)::value, decltype(packs)::value>),
               blocks_of((size_t)N * NKV, (size_t)(ROW_THREADS / lanes)), ROW_THREADS, 0, lanes, dx, dv, dy, x, v, N,
               NKV, heads / NKV, D, ldv, lddv);
    });
}
