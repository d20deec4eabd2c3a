/*
experts.cuh: the experts of a mixture of experts. Equations in experts.h; products in expert_gemm.cuh.

  grouping  a stable sort by expert (counting_sort.cuh): at most 256 warps read the N K choices twice, and 256 E
            counts are scanned. No atomics, hence the same order every time
  mapping   gather: a row per group of lanes; combine and activation: a thread per pack; the activation's backward: a
            block per row, which sums the gradient of its weight
  numerics  arithmetic in fp32, each result rounded once
*/
#pragma once
#include "../cuda/counting_sort.cuh"
#include "../ops/gates/swiglu.cuh"
#include "../ops/linear/linear.cuh"
#include "operations.h"
#include "expert_gemm.cuh"

// One warp per block. place false: counts (E, blocks) = number of the warp's choices of each expert. place true: counts
// are places.
enum { EXPERT_BITS = 10 };
static_assert(1 << EXPERT_BITS >= MAX_EXPERTS, "a number of an expert has more bits");
static __global__ void expert_group_kernel(int *counts, int *starts, int *entries, int *places, const int *experts,
                                           int E, int R, int each, bool place) {
    SHARED(int, at, MAX_EXPERTS);
    int lane = (int)threadIdx.x, warp = (int)blockIdx.x, warps = (int)gridDim.x;
    for (int e = lane; e < E; e += WARP) at[e] = place ? counts[e * warps + warp] : 0;
    if (place && warp == 0) { // the first warp's first places are the starts of all experts
        for (int e = lane; e < E; e += WARP) starts[e] = at[e];
        if (lane == 0) starts[E] = R;
    }
    sort_rows(
        at, warp * each, min(R, (warp + 1) * each), EXPERT_BITS, [=](int i) { return experts[i]; },
        [=](int i, int to) {
            if (!place) return;
            entries[to] = i;
            places[i] = to;
        });
    for (int e = lane; e < E && !place; e += WARP) counts[e * warps + warp] = at[e];
}
static inline void expert_group(int *starts, int *entries, int *places, const int *experts, Routing r) {
    OPERATION();
    int R = r.N * r.K, each = (int)expert_group_rows(r);
    unsigned warps = blocks_of((size_t)R, (size_t)each);
    int *counts = (int *)ops_scratch((size_t)r.E * warps * sizeof(int));
    LAUNCH(expert_group_kernel, warps, WARP, 0, counts, starts, entries, places, experts, r.E, R, each, false);
    sort_scan(counts, r.E * (int)warps);
    LAUNCH(expert_group_kernel, warps, WARP, 0, counts, starts, entries, places, experts, r.E, R, each, true);
}

template <int W>
static __global__ void expert_gather_kernel(int lanes, floatX *y, const floatX *x, const int *entries, int R, int K,
                                            int C) {
    unsigned p = row_index(lanes);
    if (p >= (unsigned)R) return;
    copy_row<W>(y + p * (size_t)C, x + (size_t)(entries[p] / K) * C, C, lanes);
}
static inline void expert_gather(floatX *y, const floatX *x, const int *entries, Routing r) {
    OPERATION();
    size_t R = (size_t)r.N * r.K;
    LAUNCH_ROWS(expert_gather_kernel, packed(r.C, y, x), R, r.C, y, x, entries, (int)R, r.K, r.C);
}

template <int W>
static __global__ void expert_combine_kernel(floatX *y, const floatX *x, const int *places, int K, int C, bool add) {
    unsigned n = blockIdx.x, c = column_index<W>();
    if (c >= (unsigned)C) return;
    float sum[W] = {0}, v[W];
    if (add) load<W>(sum, y + n * (size_t)C + c);
    for (int k = 0; k < K; k++) {
        load<W>(v, x + (size_t)places[n * (size_t)K + k] * C + c);
        UNROLL
        for (int i = 0; i < W; i++) sum[i] += v[i];
    }
    store<W>(y + n * (size_t)C + c, sum);
}
static inline void expert_combine(floatX *y, const floatX *x, const int *places, Routing r, bool add) {
    OPERATION();
    LAUNCH_COLUMNS(expert_combine_kernel, packed(r.C, y, x), r.N, r.C, y, x, places, r.K, r.C, add);
}

static inline void expert_swiglu_forward(Activation y, const floatX *gate_up, const real *weights, const int *entries,
                                         int R, int F) {
    OPERATION();
    swiglu_weighted_forward(y, gate_up, weights, entries, R, F);
}

enum { EXPERT_ROW_THREADS = 128 };
template <int W, typename Max = NoMax>
static __global__ void expert_swiglu_backward_kernel(floatX *dgate_up, float *dweights, const floatX *dy,
                                                     const floatX *gate_up, const float *weights, const int *entries,
                                                     int F, Max max) {
    SHARED(float, memory, WARP);
    size_t p = blockIdx.x;
    float w = weights[entries[p]], sum = 0;
    for (int i = (int)threadIdx.x * W; i < F; i += EXPERT_ROW_THREADS * W) {
        size_t at = p * 2 * (size_t)F + i;
        float g[W], u[W], d[W];
        load<W>(g, gate_up + at);
        load<W>(u, gate_up + at + F);
        load<W>(d, dy + p * (size_t)F + i);
        UNROLL
        for (int k = 0; k < W; k++) {
            float s = sigmoid_of(g[k]), gk = g[k];
            sum += d[k] * (gk * s * u[k]);                   // backward of w in y = w g s u
            g[k] = w * d[k] * u[k] * s * (1 + gk * (1 - s)); // backward of g s, with ds/dg = s (1 - s)
            u[k] = w * d[k] * gk * s;                        // backward of u
        }
        store<W>(dgate_up + at, g);
        store<W>(dgate_up + at + F, u);
        max.add(g);
        max.add(u);
    }
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) dweights[entries[p]] = sum;
    max.finish();
}
static inline void expert_swiglu_backward(Activation dgate_up, real *dweights, const floatX *dy, const floatX *gate_up,
                                          const real *weights, const int *entries, int R, int F) {
    OPERATION();
    launch_with_max(dgate_up.max, [&](auto of_d) {
        typedef decltype(of_d) Max;
        if (packed(F, dgate_up.data, dy, gate_up))
            LAUNCH((expert_swiglu_backward_kernel<PACK, Max>), R, EXPERT_ROW_THREADS, 0, dgate_up.data, dweights, dy,
                   gate_up, weights, entries, F, of_d);
        else
            LAUNCH((expert_swiglu_backward_kernel<1, Max>), R, EXPERT_ROW_THREADS, 0, dgate_up.data, dweights, dy,
                   gate_up, weights, entries, F, of_d);
    });
}

// The codes of rows x (R, columns) that are grouped by expert, in place, transposed, or both: a block has a tile of one
// expert's rows.
template <int W, __nv_fp8_interpretation_t FORMAT>
static __global__ void __launch_bounds__(FP8_THREADS, FP8_BLOCKS)
    expert_quantize_kernel(Fp8Codes to, const floatX *x, const int *starts, int E, int R, int columns,
                           const absmax_t *max, float largest) {
    int e, row, column = (int)blockIdx.x * FP8_TILE, width = fp8_pad(columns), across = fp8_pad(R) + E * FP8_ALIGN;
    if (!expert_piece(starts, E, (int)blockIdx.y, FP8_TILE, &e, &row)) return;
    int start = starts[e], rows = starts[e + 1] - start - row;
    size_t at = (size_t)(start + row) * width + column,
           at_transposed = (size_t)column * across + expert_code_column(start, e) + row;
    const Fp8Tile tile = {x + (size_t)(start + row) * columns + column,
                          to.codes ? to.codes + at : nullptr,
                          to.transposed ? to.transposed + at_transposed : nullptr,
                          rows,
                          columns - column,
                          columns,
                          rows,
                          width,
                          across};
    fp8_quantize_tile<W, FORMAT>(tile, to.scale, blockIdx.x == 0 && blockIdx.y == 0, max, largest);
}
template <__nv_fp8_interpretation_t FORMAT>
static inline void expert_quantize_as(Fp8Codes to, const floatX *x, const int *starts, int E, int R, int columns,
                                      const absmax_t *max, float largest) {
    dim3 grid(blocks_of((size_t)columns, FP8_TILE), expert_pieces(R, E, FP8_TILE));
    auto wide = expert_quantize_kernel<PACK, FORMAT>, narrow = expert_quantize_kernel<1, FORMAT>;
    LAUNCH((packed(columns, x) ? wide : narrow), grid, FP8_THREADS, 0, to, x, starts, E, R, columns, max, largest);
}
// Takes the memory of the codes, which begins with their scale, from `memory`.
static inline Fp8Codes expert_quantize(char **memory, bool codes, bool transposed, Activation x, const int *starts,
                                       int E, int R, int columns, Fp8Format f) {
    uint8_t *at = (uint8_t *)*memory + FP8_HEADER;
    Fp8Codes to = {codes ? at : NULL, transposed ? at + (codes ? fp8_codes_bytes(R, columns) : 0) : NULL,
                   (float *)(void *)*memory};
    *memory += expert_codes_bytes(R, E, columns, codes, transposed);
    float largest = fp8_formats[f].largest;
    if (f == FP8_E4M3) expert_quantize_as<__NV_E4M3>(to, x.data, starts, E, R, columns, x.max, largest);
    else expert_quantize_as<__NV_E5M2>(to, x.data, starts, E, R, columns, x.max, largest);
    return to;
}

static inline size_t expert_linear_workspace_bytes(int N, int R, int E, int IC, int OC) {
    (void)N;
    return linear_in_fp8() ? expert_fp8_workspace_bytes(R, E, IC, OC) : 0;
}
static inline void expert_linear_copy_weights(const ExpertLinear *w) {
    OPERATION();
    const MatrixBatch all = {w->count, w->stride, w->copy_stride};
    fp8_copy_weights(w->first.copy, w->first.weight, w->first.IC, w->first.OC, all);
}

static inline GemmOperands expert_operands(const floatX *A, const floatX *B) {
    GemmOperands operands = {A, B, NULL, NULL, {OPERAND_STORED, OPERAND_STORED}};
    return operands;
}

static inline void expert_linear_forward(floatX *y, Activation x, const ExpertLinear *w, const int *starts, int N,
                                         int R) {
    OPERATION();
    const int IC = w->first.IC, OC = w->first.OC, E = w->count;
    GemmShape forward = {false, true, false, sizeof(floatX) == sizeof(float), 0, OC, IC, IC, IC, OC}; // y = x weight^T
    if (!w->first.copy) {
        expert_gemm(y, forward, expert_operands(x.data, w->first.weight), starts, E, w->stride * sizeof(floatX), R);
        return;
    }
    char *memory = (char *)ops_workspace_take(expert_linear_workspace_bytes(N, R, E, IC, OC)),
         *copy = (char *)w->first.copy;
    Fp8Codes w8 = fp8_codes_at(&copy, OC, IC, true),
             x8 = expert_quantize(&memory, true, false, x, starts, E, R, IC, FP8_ACTIVATION);
    forward.K = forward.lda = forward.ldb = (int)fp8_padded(IC) / 2;
    expert_gemm(y, forward, linear_operands(x8.codes, w8.codes, x8, w8, OPERAND_E4M3), starts, E, w->copy_stride, R);
}
// dx = dy weight; dweight = dy^T x
static inline GemmShape expert_to_input_shape(const ExpertLinear *w) {
    const int IC = w->first.IC, OC = w->first.OC;
    return {false, false, false, sizeof(floatX) == sizeof(float), 0, IC, OC, OC, IC, IC};
}
static inline GemmShape expert_to_weight_shape(const ExpertLinear *w, bool add) {
    return {true, false, add, true, w->first.OC, w->first.IC, 0, w->first.OC, w->first.IC, w->first.IC};
}
static inline void expert_linear_backward(floatX *dx, Activation dy, Activation x, const ExpertLinear *w,
                                          const int *starts, int N, int R, bool add) {
    OPERATION();
    const int IC = w->first.IC, OC = w->first.OC, E = w->count;
    const size_t dweight_stride = w->stride * sizeof(grad_t);
    GemmShape to_input = expert_to_input_shape(w), to_weight = expert_to_weight_shape(w, add);
    if (!w->first.copy) {
        expert_gemm(dx, to_input, expert_operands(dy.data, w->first.weight), starts, E, w->stride * sizeof(floatX), R);
        expert_gemm(w->first.dweight, to_weight, expert_operands(dy.data, x.data), starts, E, dweight_stride, R);
        return;
    }
    char *memory = (char *)ops_workspace_take(expert_linear_workspace_bytes(N, R, E, IC, OC)),
         *copy = (char *)w->first.copy;
    Fp8Codes w8 = fp8_codes_at(&copy, OC, IC, true),
             x8 = expert_quantize(&memory, false, true, x, starts, E, R, IC, FP8_ACTIVATION),
             dy8 = expert_quantize(&memory, true, true, dy, starts, E, R, OC, FP8_GRADIENT);
    to_input.transpose_b = to_weight.transpose_b = true, to_weight.transpose_a = false; // the codes' transposes
    to_input.K = to_input.lda = to_input.ldb = (int)fp8_padded(OC) / 2;
    to_weight.lda = to_weight.ldb = (int)expert_code_columns(R, E) / 2;
    expert_gemm(dx, to_input, linear_operands(dy8.codes, w8.transposed, dy8, w8, OPERAND_E5M2), starts, E,
                w->copy_stride, R);
    expert_gemm(w->first.dweight, to_weight, linear_operands(dy8.transposed, x8.transposed, dy8, x8, OPERAND_E5M2),
                starts, E, dweight_stride, R);
}
