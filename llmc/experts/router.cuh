/*
router.cuh: the router of a mixture of experts. Equations in router.h.

  mapping   logits by the matrix library; then a warp per token, which finds its K experts one after the other
  numerics  logits, softmax and sums in fp32; the gradient of the logits is rounded to floatX for its two products
  traffic   N E logits in fp32: written once, read about K + 2 times, from the caches
*/
#pragma once
#include "../cuda/gemm.cuh"
#include "../cuda/kernel_utils.cuh"
#include "operations.h"
#include "../ops/runtime.cuh"

// An expert and its score, by which experts are selected; expert -1: none.
struct RouterChoice {
    float score;
    int expert;
};
// Whether a comes before b: by falling score, NaN first, then by number.
static __device__ inline bool router_before(RouterChoice a, RouterChoice b) {
    if (a.expert < 0 || b.expert < 0) return b.expert < 0 && a.expert >= 0;
    bool a_nan = a.score != a.score, b_nan = b.score != b.score;
    if (a_nan != b_nan) return a_nan;
    return a.score > b.score || (!(a.score < b.score) && a.expert < b.expert);
}

// The first choice after `last`, the same in all lanes: by logits, or with a bias by probability and bias.
static __device__ inline RouterChoice router_next(const float *l, const floatX *bias, float lse, int E,
                                                  RouterChoice last) {
    RouterChoice best = {0, -1};
    for (int e = (int)threadIdx.x % WARP; e < E; e += WARP) {
        RouterChoice c = {bias ? expf(l[e] - lse) + (float)bias[e] : l[e], e};
        if ((last.expert < 0 || router_before(last, c)) && router_before(c, best)) best = c;
    }
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        RouterChoice other = {__shfl_xor_sync(ALL_LANES, best.score, distance),
                              __shfl_xor_sync(ALL_LANES, best.expert, distance)};
        if (router_before(other, best)) best = other;
    }
    return best;
}

enum { ROUTER_THREADS = 128 };
static inline unsigned router_blocks(Routing r) { return blocks_of((size_t)r.N, ROUTER_THREADS / WARP); }
static __device__ inline int router_row(void) { return (int)(blockIdx.x * blockDim.x + threadIdx.x) / WARP; }

static __global__ void router_choose_kernel(float *lse, int *experts, float *weights, const float *logits,
                                            const floatX *bias, Routing r) {
    int n = router_row(), lane = (int)threadIdx.x % WARP;
    if (n >= r.N) return; // a whole warp
    const float *l = logits + (size_t)n * r.E;
    int *chosen = experts + (size_t)n * r.K;
    float *w = weights + (size_t)n * r.K, sum = 0, kept = 0;
    RouterChoice last = {0, -1};
    float most = router_next(l, nullptr, 0, r.E, last).score;
    for (int e = lane; e < r.E; e += WARP) sum += expf(l[e] - most);
    float row_lse = most + logf(lanes_sum(sum, WARP));
    most = -INFINITY; // with a bias the largest logit may not be among the chosen ones
    for (int k = 0; k < r.K; k++) {
        last = router_next(l, bias, row_lse, r.E, last);
        most = fmaxf(most, l[last.expert]);
        if (lane == 0) chosen[k] = last.expert;
    }
    if (lane > 0) return;
    lse[n] = row_lse;
    for (int k = 0; k < r.K; k++) kept += w[k] = expf(l[chosen[k]] - most);
    for (int k = 0; k < r.K; k++) w[k] /= kept;
}

static inline void router_forward(real *logits, real *lse, int *experts, real *weights, const floatX *x,
                                  const floatX *weight, const floatX *bias, Routing r) {
    OPERATION();
    GemmShape product = {false, true, false, true, r.N, r.E, r.C, r.C, r.C, r.E};
    gemm(product, logits, x, weight);
    LAUNCH(router_choose_kernel, router_blocks(r), ROUTER_THREADS, 0, lse, experts, weights, logits, bias, r);
}

static __global__ void router_balance_kernel(floatX *bias, float *master, const float *loads, float rate, int E,
                                             int begin, int count) {
    double total = 0;
    for (int e = 0; e < E; e++) total += (double)loads[e];
    for (int i = (int)threadIdx.x; i < count; i += WARP) {
        double load = (double)loads[begin + i] * E;
        float b = (master ? master[i] : (float)bias[i]) + (load < total ? rate : load > total ? -rate : 0);
        if (master) master[i] = b;
        round_to(&bias[i], b);
    }
}
static inline void router_balance(floatX *bias, real *master, const real *loads, double rate, int E, int begin,
                                  int count) {
    OPERATION();
    LAUNCH(router_balance_kernel, 1, WARP, 0, bias, master, loads, (float)rate, E, begin, count);
}

static inline size_t router_workspace_bytes(Routing r) { return (size_t)r.N * r.E * sizeof(floatX); }

static __global__ void router_backward_kernel(floatX *dlogits, const float *dweights, const float *logits,
                                              const float *lse, const int *experts, const float *weights,
                                              const float *loads, float balance, float z, Routing r) {
    int n = router_row(), lane = (int)threadIdx.x % WARP;
    if (n >= r.N) return; // a whole warp
    const float *l = logits + (size_t)n * r.E, *w = weights + (size_t)n * r.K, *dw = dweights + (size_t)n * r.K;
    const int *chosen = experts + (size_t)n * r.K;
    float total = 0, mean = 0, along = 0;
    for (int e = lane; e < r.E; e += WARP) total += loads[e], mean += expf(l[e] - lse[n]) * loads[e];
    total = lanes_sum(total, WARP), mean = lanes_sum(mean, WARP);
    float scale = balance == 0 ? 0 : balance / total; // without the loss, loads may be unset
    if (balance == 0) mean = 0;
    for (int k = 0; k < r.K; k++) along += w[k] * dw[k];
    for (int e = lane; e < r.E; e += WARP) {
        float share = balance == 0 ? 0 : loads[e];
        float d = expf(l[e] - lse[n]) * (scale * (share - mean) + 2 * z * lse[n]);
        for (int k = 0; k < r.K; k++)
            if (chosen[k] == e) d += w[k] * (dw[k] - along);
        round_to(&dlogits[(size_t)n * r.E + e], d);
    }
}

static inline void router_backward(floatX *dx, grad_t *dweight, const real *dweights, const floatX *x,
                                   const floatX *weight, const real *logits, const real *lse, const int *experts,
                                   const real *weights, const real *loads, real balance, real z, Routing r, bool add) {
    OPERATION();
    floatX *dlogits = (floatX *)ops_workspace_take(router_workspace_bytes(r));
    GemmShape to_input = {false, false, true, false, r.N, r.C, r.E, r.E, r.C, r.C};
    GemmShape to_weight = {true, false, add, true, r.E, r.C, r.N, r.E, r.C, r.C};
    LAUNCH(router_backward_kernel, router_blocks(r), ROUTER_THREADS, 0, dlogits, dweights, logits, lse, experts,
           weights, loads, balance, z, r);
    gemm(to_input, dx, dlogits, weight);
    gemm(to_weight, dweight, dlogits, x);
}

// A block per expert; the last block sums the squares.
enum { ROUTER_TOTAL_THREADS = 256 };
static __global__ void router_totals_kernel(float *totals, const float *logits, const float *lse, const int *starts,
                                            Routing r) {
    SHARED(double, memory, WARP);
    int e = (int)blockIdx.x;
    double sum = 0;
    for (int n = (int)threadIdx.x; n < r.N; n += ROUTER_TOTAL_THREADS)
        sum += e < r.E ? (double)expf(logits[(size_t)n * r.E + e] - lse[n]) : (double)lse[n] * lse[n];
    sum = block_sum(sum, memory);
    if (threadIdx.x > 0) return;
    totals[r.E + e] += (float)sum;
    if (e < r.E) totals[e] += (float)(starts[e + 1] - starts[e]);
}
static inline void router_totals(real *totals, const real *logits, const real *lse, const int *starts, Routing r) {
    OPERATION();
    LAUNCH(router_totals_kernel, r.E + 1, ROUTER_TOTAL_THREADS, 0, totals, logits, lse, starts, r);
}
