/*
cross_entropy.cuh: the loss of each row and, in the same buffer, its gradient. Equations in cross_entropy.h.

  mapping   a block per row. The first pass keeps a running maximum and a running sum of exponentials per thread, so the
            row is read once for the loss and once more, from the cache if it fits, for the gradient. The instruction
            rate is close to its limit as well: 11 and 11 instructions per logit (SASS of sm_90), where the memory of an
            H200 allows 24.
  packs     the row's first elements in packs, the rest one by one; V need not be a multiple of anything
  numerics  fp32; the gradient is rounded once. A NaN or +inf in a row makes its loss NaN.
  traffic   2V in, Vp out per row; V in without a gradient
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

// The maximum and the sum of exp(x - max) of a thread's logits.
typedef struct {
    float max, sum;
} RunningSum;

// Adds W logits: one factor for the old sum, one exponential each, no branch. The error of __expf(x) is at most
// 2 + 1.2 |x| ulp. For large |x| e^x is small: in a sum with the term e^0 the error is below 3 ulp.
template <int W> static __device__ inline void running_add(RunningSum *r, const float *x) {
    float max = r->max;
    UNROLL
    for (int k = 0; k < W; k++) max = fmaxf(max, x[k]);
    float sum = r->sum * __expf(r->max - max);
    UNROLL
    for (int k = 0; k < W; k++) sum += __expf(x[k] - max);
    r->max = max, r->sum = sum;
}

// The gradients of logits i .. i + W - 1; scale = dloss / sum. A branch, since few packs contain the target.
template <int W>
static __device__ inline void cross_entropy_gradient(float *v, int i, int target, float max, float scale, real dloss) {
    UNROLL
    for (int k = 0; k < W; k++) v[k] = __expf(v[k] - max) * scale; // backward of log sum exp(x)
    if ((unsigned)(target - i) >= W) return;
    UNROLL
    for (int k = 0; k < W; k++) v[k] -= i + k == target ? dloss : 0.0f; // backward of - x[target]
}

template <int W>
static __global__ void cross_entropy_kernel(real *losses, real *log_z, floatX *logits, const int *targets, int V,
                                            int Vp, real dloss, real z_loss) {
    SHARED(float, memory, WARP);
    floatX *x = logits + blockIdx.x * (size_t)Vp;
    int target = targets[blockIdx.x], whole = V / W * W, step = (int)blockDim.x;
    float v[W];
    RunningSum local = {-FLT_MAX, 0}; // finite, so that a logit of -inf adds 0
    for (int i = (int)threadIdx.x * W; i < whole; i += step * W) {
        load<W>(v, x + i);
        running_add<W>(&local, v);
    }
    for (int i = whole + (int)threadIdx.x; i < V; i += step) {
        load<1>(v, x + i);
        running_add<1>(&local, v);
    }
    floatX at_target = x[threadIdx.x == 0 ? target : 0]; // read before the gradient overwrites it
    float max = block_max(local.max, memory), sum = block_sum(local.sum * __expf(local.max - max), memory);
    float log_sum = logf(sum), z = max + log_sum;
    if (threadIdx.x == 0) {
        log_z[blockIdx.x] = z;
        losses[blockIdx.x] += log_sum + (max - to_float(at_target)); // near 0 for a confident correct prediction
    }
    if (dloss == 0) return;
    float scale = dloss * (1 + 2 * z_loss * z) / sum;
    for (int i = (int)threadIdx.x * W; i < whole; i += step * W) {
        load<W>(v, x + i);
        cross_entropy_gradient<W>(v, i, target, max, scale, dloss);
        store<W>(x + i, v);
    }
    for (int i = whole + (int)threadIdx.x; i < Vp; i += step) {
        v[0] = 0;
        if (i < V) {
            load<1>(v, x + i);
            cross_entropy_gradient<1>(v, i, target, max, scale, dloss);
        }
        store<1>(x + i, v);
    }
}

static inline void cross_entropy(real *losses, real *log_z, floatX *logits, const int *targets, int N, int V, int Vp,
                                 real dloss, real z_loss) {
    OPERATION();
    assert(V > 0 && Vp >= V);
    int threads = V >= 4096 ? 512 : V >= 1024 ? 256 : 64;
    if (packed(Vp, logits))
        LAUNCH((cross_entropy_kernel<PACK>), N, threads, 0, losses, log_z, logits, targets, V, Vp, dloss, z_loss);
    else LAUNCH((cross_entropy_kernel<1>), N, threads, 0, losses, log_z, logits, targets, V, Vp, dloss, z_loss);
}
