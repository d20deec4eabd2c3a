/*
cross_entropy: the loss of each row and, in the same buffer, its gradient. Equations in cross_entropy.h.

  mapping   a block per row. The first pass keeps a running maximum and a running sum of exponentials per thread, so
            that the row is read once for the loss and once more, from the cache where it fits, for the gradient.
  packs     of the row's first V elements, then element by element: V need not be a multiple of anything
  numerics  fp32; the gradient is rounded once. A NaN or +inf in a row makes its loss NaN.
  traffic   2V in, Vp out per row; V in without a gradient
*/
#ifndef LLMC_CROSS_ENTROPY_CUH
#define LLMC_CROSS_ENTROPY_CUH

// (max, sum) of what a thread has seen: sum counts exp(x - max)
typedef struct {
    float max, sum;
} RunningSum;

static __device__ inline void running_add(RunningSum *r, float x) {
    if (x > r->max) {
        r->sum = r->sum * expf(r->max - x) + 1;
        r->max = x;
    } else {
        r->sum += expf(x - r->max);
    }
}

// The gradient of one logit: softmax - 1 at the target.
static __device__ inline float cross_entropy_gradient(float x, int v, int target, float max, float inverse,
                                                      real dloss) {
    return dloss * (expf(x - max) * inverse - (v == target ? 1.0f : 0.0f)); // d/dx (log sum exp(x) - x[target])
}

template <int W>
static __global__ void cross_entropy_kernel(real *losses, floatX *logits, const int *targets, int V, int Vp,
                                            real dloss) {
    SHARED(float, memory, WARP);
    floatX *x = logits + blockIdx.x * (size_t)Vp;
    int target = targets[blockIdx.x], whole = V / W * W, step = (int)blockDim.x;
    float v[W], at_target = to_float(x[target]);
    RunningSum own = {-FLT_MAX, 0}; // finite: a logit of -inf adds 0
    for (int i = (int)threadIdx.x * W; i < whole; i += step * W) {
        load<W>(v, x + i);
        UNROLL
        for (int k = 0; k < W; k++) running_add(&own, v[k]);
    }
    for (int i = whole + (int)threadIdx.x; i < V; i += step) running_add(&own, to_float(x[i]));
    float max = block_max(own.max, memory), sum = block_sum(own.sum * expf(own.max - max), memory);
    if (threadIdx.x == 0) losses[blockIdx.x] += logf(sum) + (max - at_target); // near 0 for a sure and right prediction
    if (dloss == 0) return;
    float inverse = 1 / sum;
    for (int i = (int)threadIdx.x * W; i < whole; i += step * W) {
        load<W>(v, x + i);
        UNROLL
        for (int k = 0; k < W; k++) v[k] = cross_entropy_gradient(v[k], i + k, target, max, inverse, dloss);
        store<W>(x + i, v);
    }
    for (int i = whole + (int)threadIdx.x; i < Vp; i += step)
        round_to(x + i, i < V ? cross_entropy_gradient(to_float(x[i]), i, target, max, inverse, dloss) : 0);
}

static inline void cross_entropy(real *losses, floatX *logits, const int *targets, int N, int V, int Vp, real dloss) {
    assert(V > 0 && Vp >= V);
    int threads = V >= 4096 ? 1024 : V >= 1024 ? 256 : 64;
    if (packed((size_t)Vp, logits))
        LAUNCH((cross_entropy_kernel<PACK>), N, threads, 0, losses, logits, targets, V, Vp, dloss);
    else LAUNCH((cross_entropy_kernel<1>), N, threads, 0, losses, logits, targets, V, Vp, dloss);
}
#endif
