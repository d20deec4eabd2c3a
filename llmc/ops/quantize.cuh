/*
quantize.cuh: numbers rounded to b-bit integers times a step, for evaluation. Equations in quantize.h.

  mapping   A block per row; with one step for the matrix another kernel finds the largest magnitude before. Attention:
            a block per query row and head, which computes the logits twice, first for their extremes and then, as
            many at a time as it has threads, for the probabilities. Speed matters little here.
  numerics  as in C; in the bf16 program a rounded number is rounded to bf16 once more, when it is stored
*/
#pragma once
#include "attention_kernels.cuh"

enum { QUANTIZE_THREADS = 128, QUANTIZE_COLUMNS = 512 / QUANTIZE_THREADS };

static __device__ inline float quantized(float x, float levels, float max, float step) {
    return max == 0 ? x : rintf(levels * x / max) * step;
}

// Of the numbers of a row: fmaxf ignores NaN.
static __device__ inline float quantize_row_max(const floatX *row, int columns) {
    SHARED(float, memory, WARP);
    float max = 0;
    for (int c = (int)threadIdx.x; c < columns; c += QUANTIZE_THREADS) max = fmaxf(max, fabsf(to_float(row[c])));
    return block_max(max, memory);
}
static __global__ void quantize_max_kernel(absmax_t *all, const floatX *x, int columns, int ld) {
    float max = quantize_row_max(x + blockIdx.x * (size_t)ld, columns);
    if (threadIdx.x == 0) atomicMax(all, __float_as_uint(max));
}

// all: the bits of the matrix's maximum, or NULL
static __global__ void quantize_kernel(floatX *x, const absmax_t *all, int columns, int ld, float levels) {
    floatX *row = x + blockIdx.x * (size_t)ld;
    float max = all ? __uint_as_float(*all) : quantize_row_max(row, columns), step = max / levels;
    for (int c = (int)threadIdx.x; c < columns; c += QUANTIZE_THREADS)
        round_to(&row[c], quantized(to_float(row[c]), levels, max, step));
}

static inline float quantize_levels(int bits) { return (float)((1 << (bits - 1)) - 1); }

static inline void quantize_inplace(floatX *x, int N, int columns, int ld, int bits, bool whole) {
    OPERATION();
    absmax_t *largest = whole ? (absmax_t *)ops_scratch(sizeof(absmax_t)) : NULL;
    if (whole) {
        buffer_zero(largest, sizeof(absmax_t));
        LAUNCH(quantize_max_kernel, blocks_of(N, 1), QUANTIZE_THREADS, 0, largest, x, columns, ld);
    }
    LAUNCH(quantize_kernel, blocks_of(N, 1), QUANTIZE_THREADS, 0, x, largest, columns, ld, quantize_levels(bits));
}

static __device__ inline float quantize_logit(const floatX *q, const floatX *k, AttentionShape s) {
    float dot = 0;
    for (int i = 0; i < s.D; i++) dot += to_float(q[i]) * to_float(k[i]);
    return s.scale * dot;
}

static __global__ void attention_quantized_kernel(floatX *out, real *lse, const floatX *q, const floatX *k,
                                                  const floatX *v, AttentionShape s, float levels) {
    SHARED(float, memory, WARP);
    SHARED(float, p, QUANTIZE_THREADS);
    int t = (int)(blockIdx.x % (unsigned)s.T), b = (int)(blockIdx.x / (unsigned)s.T), thread = (int)threadIdx.x;
    AttentionPlace at = attention_place(s, b, (int)blockIdx.y);
    int low = attention_low(s, b, t), end = s.first + t + 1;
    const floatX *row = q + at.q + t * (size_t)s.ldq;
    float largest = 0, top = -INFINITY, sum = 0, acc[QUANTIZE_COLUMNS] = {0};
    for (int j = low + thread; j < end; j += QUANTIZE_THREADS) {
        float logit = quantize_logit(row, k + at.kv_k + j * (size_t)s.ldkv, s);
        largest = fmaxf(largest, fabsf(logit));
        top = fmaxf(top, logit);
    }
    largest = block_max(largest, memory);
    float step = largest / levels;
    top = quantized(block_max(top, memory), levels, largest, step);
    for (int j0 = low; j0 < end; j0 += QUANTIZE_THREADS) {
        int j = j0 + thread, count = min(QUANTIZE_THREADS, end - j0);
        float logit = j < end ? quantize_logit(row, k + at.kv_k + j * (size_t)s.ldkv, s) : 0;
        __syncthreads(); // the earlier keys are done
        p[thread] = j < end ? expf(quantized(logit, levels, largest, step) - top) : 0;
        sum += p[thread];
        __syncthreads();
        for (int i = 0, c = thread; c < s.DV; i++, c += QUANTIZE_THREADS)
            for (int n = 0; n < count; n++) acc[i] += p[n] * to_float(v[at.kv_v + (size_t)(j0 + n) * s.ldkv + c]);
    }
    sum = block_sum(sum, memory);
    for (int i = 0, c = thread; c < s.DV; i++, c += QUANTIZE_THREADS)
        round_to(&out[at.o + t * (size_t)s.ldo + c], acc[i] / sum);
    if (lse && thread == 0) lse[at.lse + t] = top + logf(sum);
}

static inline void attention_quantized_forward(floatX *out, real *lse, const floatX *q, const floatX *k,
                                               const floatX *v, AttentionShape s, int bits) {
    OPERATION();
    assert(s.DV <= QUANTIZE_COLUMNS * QUANTIZE_THREADS);
    dim3 grid(blocks_of((size_t)s.B * s.T, 1), (unsigned)s.NQ);
    LAUNCH(attention_quantized_kernel, grid, QUANTIZE_THREADS, 0, out, lse, q, k, v, s, quantize_levels(bits));
}
