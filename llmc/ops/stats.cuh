/*
stats.cuh: statistics of a layer's activations, for the log. Equations in stats.h; attention in attention_stats.cuh.

  mapping     ranges: up to STATS_PARTS blocks, by the number of elements, each for a part of the rows, (sum, min, max)
              in double; the host combines them.
              magnitudes: blocks count the digits of their parts in shared memory; a second kernel adds the counts.
  numerics    as on the CPU: all but the products q.k in double; integer counts, so the median is exact
  atomics     of integers within a block: the counts do not depend on the order
  reads       wait for the device, a few KiB per call. Statistics are not computed in every step.
  traffic     lambda N NH in, rms rows D in, magnitude 3 count in
*/
#pragma once
#include "../cuda/kernel_utils.cuh"
#include "ops.h"

#ifndef STATS_LEAST
#define STATS_LEAST 8192 // elements of a block
#endif
enum { STATS_PARTS = 256, STATS_THREADS = 256 };
static inline unsigned stats_blocks(size_t elements) {
    return (unsigned)max_size(1, min_size(STATS_PARTS, elements / STATS_LEAST));
}

static __device__ inline double stats_factor(floatX l, Factor factor) { // factor_of, on the device
    double x = (double)to_float(l);
    return factor == S_SIGMOID ? 1 / (1 + exp(-x)) : factor == S_TANH ? tanh(x) : x;
}

// The sums and extremes of a block's threads. parts[blockIdx.x] of (sum, min, max)
static __device__ inline void stats_write_range(Range *parts, Range local) {
    SHARED(double, memory, WARP);
    SHARED(double, extremes, 2 * STATS_THREADS / WARP);
    int thread = (int)threadIdx.x, warp = thread / WARP;
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        local.min = fmin(local.min, __shfl_xor_sync(ALL_LANES, local.min, distance));
        local.max = fmax(local.max, __shfl_xor_sync(ALL_LANES, local.max, distance));
    }
    if (thread % WARP == 0) extremes[2 * warp] = local.min, extremes[2 * warp + 1] = local.max;
    local.mean = block_sum(local.mean, memory); // its barriers precede the reads of the extremes
    if (thread > 0) return;
    for (int i = 1; i < STATS_THREADS / WARP; i++) {
        local.min = fmin(local.min, extremes[2 * i]);
        local.max = fmax(local.max, extremes[2 * i + 1]);
    }
    parts[blockIdx.x] = local;
}

static __device__ inline Range stats_no_range(void) {
    Range r;
    r.min = INFINITY;
    r.mean = 0; // the sum, until stats_range
    r.max = -INFINITY;
    return r;
}
static __device__ inline void stats_range_add(Range *r, double x) {
    r->mean += x;
    r->min = fmin(r->min, x);
    r->max = fmax(r->max, x);
}

// Of the parts of so many blocks; count: divides the sum
static inline Range stats_range(const Range *device_parts, unsigned blocks, size_t count) {
    Range parts[STATS_PARTS], r = {INFINITY, 0, -INFINITY};
    buffer_download(parts, device_parts, blocks * sizeof(Range));
    for (unsigned p = 0; p < blocks; p++) {
        r.mean += parts[p].mean;
        r.min = fmin(r.min, parts[p].min);
        r.max = fmax(r.max, parts[p].max);
    }
    r.mean /= (double)count;
    if (isnan(r.mean)) r.min = r.max = r.mean; // fmin and fmax ignore NaN
    return r;
}

static __global__ void lambda_stats_kernel(Range *parts, const floatX *l, size_t count, int NH, int ldl,
                                           Factor factor) {
    Range local = stats_no_range();
    size_t begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
    for (size_t i = begin + threadIdx.x; i < end; i += STATS_THREADS)
        stats_range_add(&local, stats_factor(l[i / NH * ldl + i % NH], factor));
    stats_write_range(parts, local);
}

static inline Range lambda_stats(const floatX *l, int N, int NH, int ldl, Factor factor) {
    Range *parts = (Range *)ops_scratch(STATS_PARTS * sizeof(Range));
    size_t count = (size_t)N * NH;
    unsigned blocks = stats_blocks(count);
    LAUNCH(lambda_stats_kernel, blocks, STATS_THREADS, 0, parts, l, count, NH, ldl, factor);
    return stats_range(parts, blocks, count);
}

// `lanes` threads per row.
template <int W>
static __global__ void rms_stats_kernel(int lanes, Range *parts, const floatX *x, size_t rows, int heads, int D,
                                        int ld) {
    Range local = stats_no_range();
    size_t begin = rows * blockIdx.x / gridDim.x, end = rows * (blockIdx.x + 1) / gridDim.x;
    int lane = row_lane(lanes), shift = __ffs(lanes) - 1;
    for (size_t base = begin; base < end; base += STATS_THREADS >> shift) { // all lanes, since they exchange sums
        size_t row = base + (threadIdx.x >> shift);
        double sum = 0;
        float v[W];
        for (int i = row < end ? lane * W : D; i < D; i += lanes * W) {
            load<W>(v, x + row / heads * ld + row % heads * D + i);
            UNROLL
            for (int k = 0; k < W; k++) sum += (double)v[k] * (double)v[k];
        }
        sum = lanes_sum(sum, lanes);
        if (lane == 0 && row < end) stats_range_add(&local, sqrt(sum / D));
    }
    stats_write_range(parts, local);
}

static inline Range rms_stats(const floatX *x, int N, int heads, int D, int ld) {
    Range *parts = (Range *)ops_scratch(STATS_PARTS * sizeof(Range));
    size_t rows = (size_t)N * heads;
    bool wide = packed(D, x) && packed(ld);
    int lanes = row_lanes(wide ? D / PACK : D, wide);
    unsigned blocks = stats_blocks(rows * (size_t)D);
    if (wide) LAUNCH((rms_stats_kernel<PACK>), blocks, STATS_THREADS, 0, lanes, parts, x, rows, heads, D, ld);
    else LAUNCH((rms_stats_kernel<1>), blocks, STATS_THREADS, 0, lanes, parts, x, rows, heads, D, ld);
    return stats_range(parts, blocks, rows);
}

// ---------------------------------------------------------------------------------------------------
// Magnitudes: the bits of fp32 numbers without the sign have the order of the numbers, which gives the median digit by
// digit.

// PARTS: as many blocks as the scratch memory has counts for
enum { MAGNITUDE_DIGIT = 11, MAGNITUDE_VALUES = 1 << MAGNITUDE_DIGIT, MAGNITUDE_PARTS = 120 };

typedef struct {
    unsigned long long counts[MAGNITUDE_VALUES]; // per digit, of numbers with the median's higher digits
    unsigned long long largest;                  // bits
} MagnitudeCounts;

// parts (gridDim.x, MAGNITUDE_VALUES + 1): counts, then the largest bits
template <int W>
static __global__ void magnitude_kernel(unsigned *parts, const floatX *x, size_t count, int shift, uint64_t median) {
    SHARED(unsigned, counts, MAGNITUDE_VALUES);
    SHARED(unsigned, largest, STATS_THREADS / WARP);
    size_t packs = count / W, begin = packs * blockIdx.x / gridDim.x, end = packs * (blockIdx.x + 1) / gridDim.x;
    unsigned local = 0;
    for (int i = (int)threadIdx.x; i < MAGNITUDE_VALUES; i += STATS_THREADS) counts[i] = 0;
    __syncthreads();
    for (size_t i = begin + threadIdx.x; i < end; i += STATS_THREADS) {
        float v[W];
        load<W>(v, x + i * W);
        UNROLL
        for (int k = 0; k < W; k++) {
            unsigned bits = __float_as_uint(v[k]) & 0x7FFFFFFFu;
            local = max(local, bits);
            if ((uint64_t)bits >> (shift + MAGNITUDE_DIGIT) == median >> (shift + MAGNITUDE_DIGIT))
                atomicAdd(&counts[bits >> shift & (MAGNITUDE_VALUES - 1)], 1u);
        }
    }
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        local = max(local, __shfl_xor_sync(ALL_LANES, local, distance));
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = local;
    __syncthreads();
    unsigned *to = parts + blockIdx.x * (size_t)(MAGNITUDE_VALUES + 1);
    for (int i = (int)threadIdx.x; i < MAGNITUDE_VALUES; i += STATS_THREADS) to[i] = counts[i];
    if (threadIdx.x > 0) return;
    for (int i = 1; i < STATS_THREADS / WARP; i++) local = max(local, largest[i]);
    to[MAGNITUDE_VALUES] = local;
}

static __global__ void magnitude_sum_kernel(MagnitudeCounts *total, const unsigned *parts) {
    int value = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (value > MAGNITUDE_VALUES) return;
    unsigned long long sum = 0, largest = 0;
    for (int part = 0; part < MAGNITUDE_PARTS; part++) {
        unsigned n = parts[(size_t)part * (MAGNITUDE_VALUES + 1) + value];
        sum += n;
        largest = max(largest, (unsigned long long)n);
    }
    if (value < MAGNITUDE_VALUES) total->counts[value] = sum;
    else total->largest = largest;
}

static inline double magnitude_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return (double)x;
}

static inline Magnitudes magnitude_stats(const floatX *x, size_t count) {
    static MagnitudeCounts host; // 16 KiB
    assert(count > 0);
    MagnitudeCounts *total =
        (MagnitudeCounts *)ops_scratch(sizeof(host) + MAGNITUDE_PARTS * (MAGNITUDE_VALUES + 1) * sizeof(unsigned));
    unsigned *parts = (unsigned *)(total + 1);
    uint64_t median = 0; // the digits found so far; the lower digits are 0
    size_t rank = (count - 1) / 2;
    for (int shift = 2 * MAGNITUDE_DIGIT; shift >= 0; shift -= MAGNITUDE_DIGIT) {
        if (packed(count, x))
            LAUNCH((magnitude_kernel<PACK>), MAGNITUDE_PARTS, STATS_THREADS, 0, parts, x, count, shift, median);
        else LAUNCH((magnitude_kernel<1>), MAGNITUDE_PARTS, STATS_THREADS, 0, parts, x, count, shift, median);
        LAUNCH(magnitude_sum_kernel, blocks_of(MAGNITUDE_VALUES + 1, STATS_THREADS), STATS_THREADS, 0, total,
               (const unsigned *)parts);
        buffer_download(&host, total, sizeof(host));
        uint64_t digit = 0;
        while (rank >= host.counts[digit]) rank -= host.counts[digit++];
        median |= digit << shift;
    }
    Magnitudes m;
    m.largest = magnitude_of_bits((uint32_t)host.largest);
    m.median = magnitude_of_bits((uint32_t)median);
    return m;
}
