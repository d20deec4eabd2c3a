/*
diff_combine.cuh: subtracts the second head of each pair from the first. Equations in diff_combine.h.

  mapping   up to a warp of threads per (n,h), one pack each at a time; the backward writes both da and sums dl in the
            same pass, by exchange among the lanes of the head, without atomics
  numerics  arithmetic fp32, one rounding at each store; dl from the unrounded products
  traffic   forward 2D+1 in, D out per (n,h); backward 2D+1 in, 2D+1 out: bandwidth-bound
*/
#ifndef LLMC_DIFF_COMBINE_CUH
#define LLMC_DIFF_COMBINE_CUH
#include "../cuda/kernel_utils.cuh"
#include "fp8.cuh"
#include "ops.h"

static __device__ inline float diff_factor(floatX l, bool sigmoid) {
    return sigmoid ? sigmoid_of(to_float(l)) : to_float(l);
}

// The offset in `a` of the first head of the pair of output head h of row n.
static __device__ inline size_t diff_first(unsigned n, int h, int NH, int D, int stride) {
    return (n * (size_t)(2 * NH) + (2 * stride * (h / stride) + h % stride)) * D;
}

template <int W, typename Max = NoMax>
static __global__ void diff_combine_forward_kernel(int lanes, floatX *o, const floatX *a, const floatX *l, int N,
                                                   int NH, int D, int ldl, int stride, bool sigmoid, Max max) {
    unsigned row = row_index(lanes), n = row / (unsigned)NH;
    int h = (int)(row % (unsigned)NH);
    bool active = n < (unsigned)N; // the other lanes take part in the maximum
    const floatX *a1 = a + diff_first(n, h, NH, D, stride), *a2 = a1 + (size_t)stride * D;
    floatX factor = l[active ? n * (size_t)ldl + h : 0];
    float v1[W] = {0}, v2[W] = {0};
    int i = active ? row_lane(lanes) * W : D;
    if (i < D) load<W>(v1, a1 + i), load<W>(v2, a2 + i); // issued before the factor arrives
    float s = diff_factor(factor, sigmoid);
    while (i < D) {
        UNROLL
        for (int k = 0; k < W; k++) v1[k] -= s * v2[k];
        store<W>(o + row * (size_t)D + i, v1);
        max.add(v1);
        i += lanes * W;
        if (i < D) load<W>(v1, a1 + i), load<W>(v2, a2 + i);
    }
    max.finish();
}

static inline void diff_combine_forward(floatX *o, const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                        int stride, bool sigmoid, absmax_t *max) {
    OPERATION();
    assert(stride > 0 && NH % stride == 0);
    LAUNCH_MAX(LAUNCH_ROWS_EITHER, diff_combine_forward_kernel, max, packed(D, o, a), (size_t)N * NH, D, o, a, l, N, NH,
               D, ldl, stride, sigmoid);
}

template <int W>
static __global__ void diff_combine_backward_kernel(int lanes, floatX *da, floatX *dl, const floatX *do_,
                                                    const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                                    int stride, bool sigmoid) {
    unsigned row = row_index(lanes), n = row / (unsigned)NH;
    size_t at = n * (size_t)ldl + row % (unsigned)NH;
    size_t first = diff_first(n, (int)(row % (unsigned)NH), NH, D, stride), second = first + (size_t)stride * D;
    bool active = n < (unsigned)N; // the other lanes take part in the exchange
    int lane = row_lane(lanes), i = active ? lane * W : D;
    float dot = 0, g[W] = {0}, v[W] = {0};
    floatX factor = l[active ? at : 0];
    if (i < D) load<W>(g, do_ + row * (size_t)D + i), load<W>(v, a + second + i);
    float s = diff_factor(factor, sigmoid);
    while (i < D) {
        store<W>(da + first + i, g); // backward of a1 in o = a1 - s a2
        UNROLL
        for (int k = 0; k < W; k++) {
            dot += g[k] * v[k];
            v[k] = -s * g[k]; // backward of a2
        }
        store<W>(da + second + i, v);
        i += lanes * W;
        if (i < D) load<W>(g, do_ + row * (size_t)D + i), load<W>(v, a + second + i);
    }
    dot = lanes_sum(dot, lanes);
    if (active && lane == 0)
        round_to(dl + at, -dot * (sigmoid ? s * (1 - s) : 1)); // backward of s = sigmoid(l), or s = l
}

static inline void diff_combine_backward(floatX *da, floatX *dl, const floatX *do_, const floatX *a, const floatX *l,
                                         int N, int NH, int D, int ldl, int stride, bool sigmoid) {
    OPERATION();
    assert(stride > 0 && NH % stride == 0);
    LAUNCH_ROWS(diff_combine_backward_kernel, packed(D, da, do_, a), (size_t)N * NH, D, da, dl, do_, a, l, N, NH, D,
                ldl, stride, sigmoid);
}
#endif
