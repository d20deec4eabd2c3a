/*
diff_combine.cuh: subtracts from each signal head its noise head, times a factor. Equations in diff_combine.h.

  mapping   up to a warp of threads per row and noise head, one pack each at a time, for all of the SHARE signal heads
            that read it, so that the noise head is read once. The backward writes all da; da of the noise
            head is a sum in registers over the signal heads in order. The same pass sums dl, by exchange among the
            lanes of the head, without atomics.
  numerics  arithmetic fp32, one rounding at each store; dl from the unrounded products
  traffic   per noise head (2 SHARE + 1) D + SHARE elements; backward (2 SHARE + 2) D + 2 SHARE: bandwidth-bound
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "../absmax.cuh"
#include "operations.h"

static __device__ inline float diff_factor(floatX l, Factor factor) {
    return factor == S_SIGMOID ? sigmoid_of(to_float(l)) : to_float(l);
}
// ds/dl
static __device__ inline float diff_factor_slope(float s, Factor factor) {
    return factor == S_SIGMOID ? s * (1 - s) : 1;
}

// Where a group of lanes finds noise head `row % (NH/SHARE)` of row n, and the SHARE consecutive signal heads that read
// it: elements of `a`, o and l. noise: noise heads per block of heads.
template <int SHARE> struct DiffHeads {
    unsigned n;
    size_t signal, second, out, l;
    __device__ DiffHeads(unsigned row, int NH, int D, int ldl, int noise) {
        unsigned heads = (unsigned)NH / SHARE, h = row % heads, block = h / (unsigned)noise, i = h % (unsigned)noise;
        n = row / heads;
        size_t first = n * (size_t)(heads * (SHARE + 1)) + block * (unsigned)(noise * (SHARE + 1));
        signal = (first + i * SHARE) * D;
        second = (first + (unsigned)(noise * SHARE) + i) * D;
        out = row * (size_t)(SHARE * D);
        l = n * (size_t)ldl + h * SHARE;
    }
};

// v[j] = pack i of the j-th of SHARE adjacent heads
template <int W, int SHARE> static __device__ inline void diff_load(float (*v)[W], const floatX *from, int D, int i) {
    UNROLL
    for (int j = 0; j < SHARE; j++) load<W>(v[j], from + (size_t)j * D + i);
}

template <int W, int SHARE, typename Max>
static __global__ void diff_combine_forward_kernel(int lanes, floatX *o, const floatX *a, const floatX *l, int N,
                                                   int NH, int D, int ldl, int noise, Factor factor, Max max) {
    const DiffHeads<SHARE> at(row_index(lanes), NH, D, ldl, noise);
    bool active = at.n < (unsigned)N; // the other lanes take part in the maximum
    floatX of[SHARE];
    float v1[SHARE][W] = {{0}}, v2[W] = {0}, s[SHARE];
    UNROLL
    for (int j = 0; j < SHARE; j++) of[j] = l[active ? at.l + j : 0];
    int i = active ? row_lane(lanes) * W : D;
    if (i < D)
        diff_load<W, SHARE>(v1, a + at.signal, D, i), load<W>(v2, a + at.second + i); // before the factors arrive
    UNROLL
    for (int j = 0; j < SHARE; j++) s[j] = diff_factor(of[j], factor);
    while (i < D) {
        UNROLL
        for (int j = 0; j < SHARE; j++) {
            UNROLL
            for (int k = 0; k < W; k++) v1[j][k] -= s[j] * v2[k];
            max.add(v1[j]);
        }
        UNROLL // multiples of W that nvcc recognizes, as in element_index
            for (int j = 0; j < SHARE; j++) store<W>(o + (at.out + (size_t)j * D + i) / W * W, v1[j]);
        i += lanes * W;
        if (i < D) diff_load<W, SHARE>(v1, a + at.signal, D, i), load<W>(v2, a + at.second + i);
    }
    max.finish();
}

template <int W, int SHARE>
static __global__ void diff_combine_backward_kernel(int lanes, floatX *da, floatX *dl, const floatX *do_,
                                                    const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                                    int noise, Factor factor) {
    const DiffHeads<SHARE> at(row_index(lanes), NH, D, ldl, noise);
    bool active = at.n < (unsigned)N; // the other lanes take part in the exchange
    floatX of[SHARE];
    float dot[SHARE] = {0}, g[SHARE][W] = {{0}}, v[W] = {0}, s[SHARE];
    UNROLL
    for (int j = 0; j < SHARE; j++) of[j] = l[active ? at.l + j : 0];
    int lane = row_lane(lanes), i = active ? lane * W : D;
    if (i < D) diff_load<W, SHARE>(g, do_ + at.out, D, i), load<W>(v, a + at.second + i);
    UNROLL
    for (int j = 0; j < SHARE; j++) s[j] = diff_factor(of[j], factor);
    while (i < D) {
        float sum[W];
        UNROLL
        for (int j = 0; j < SHARE; j++) {
            store<W>(da + at.signal + (size_t)j * D + i, g[j]); // backward of a1 in o = a1 - s a2
            UNROLL
            for (int k = 0; k < W; k++) {
                dot[j] += g[j][k] * v[k];
                sum[k] = j ? sum[k] - s[j] * g[j][k] : -s[j] * g[j][k]; // backward of a2
            }
        }
        store<W>(da + at.second + i, sum);
        i += lanes * W;
        if (i < D) diff_load<W, SHARE>(g, do_ + at.out, D, i), load<W>(v, a + at.second + i);
    }
    UNROLL
    for (int j = 0; j < SHARE; j++) {
        float total = lanes_sum(dot[j], lanes);
        if (active && lane == 0) round_to(dl + at.l + j, -total * diff_factor_slope(s[j], factor)); // s = factor(l)
    }
}

// Calls launch with the number of signal heads per noise head, a constant of its type.
template <typename Launch> static inline void diff_for_share(int NH, HeadGroups groups, Launch launch) {
    assert(groups.noise > 0 && NH % groups.signals == 0 && groups.signals % groups.noise == 0);
    switch (groups.signals / groups.noise) {
    case 1: launch(Constant<1>()); break;
    case 2: launch(Constant<2>()); break;
    case 4: launch(Constant<4>()); break;
    default: assert(!"a case for each number of signal heads in the table of variants");
    }
}

static inline void diff_combine_forward(Activation o, const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                        HeadGroups groups, Factor factor) {
    OPERATION();
    diff_for_share(NH, groups, [&](auto share) {
        constexpr int SHARE = decltype(share)::value;
        launch_with_max(o.max, [&](auto of_o) {
            typedef decltype(of_o) Max;
            LAUNCH_ROWS_EITHER((diff_combine_forward_kernel<PACK, SHARE, Max>),
                               (diff_combine_forward_kernel<1, SHARE, Max>), packed(D, o.data, a),
                               (size_t)N * (NH / SHARE), D, o.data, a, l, N, NH, D, ldl, groups.noise, factor, of_o);
        });
    });
}

static inline void diff_combine_backward(floatX *da, floatX *dl, const floatX *do_, const floatX *a, const floatX *l,
                                         int N, int NH, int D, int ldl, HeadGroups groups, Factor factor) {
    OPERATION();
    diff_for_share(NH, groups, [&](auto share) {
        constexpr int SHARE = decltype(share)::value;
        LAUNCH_ROWS_EITHER((diff_combine_backward_kernel<PACK, SHARE>), (diff_combine_backward_kernel<1, SHARE>),
                           packed(D, da, do_, a), (size_t)N * (NH / SHARE), D, da, dl, do_, a, l, N, NH, D, ldl,
                           groups.noise, factor);
    });
}
