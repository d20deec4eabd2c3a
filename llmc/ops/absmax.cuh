/*
absmax.cuh: the largest magnitude of a tensor, by an operation of its own or by the operation that writes the tensor.
Contract in absmax.h.

  maximum   of unsigned integers, the bits of |x|: fmaxf would lose NaN
  traffic   reads x once; an operation that writes x reads nothing
*/
#pragma once
#include "../cuda/kernel_utils.cuh"
#include "ops.h"

static __device__ inline absmax_t absmax_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// largest = max(largest, |v[i]|)
template <int W> static __device__ inline absmax_t absmax_of_pack(absmax_t largest, const float *v) {
    UNROLL
    for (int i = 0; i < W; i++) largest = max(largest, absmax_bits(v[i]));
    return largest;
}

// *max = max(*max, own of all threads); does nothing if max is NULL. All threads of the block, in whole warps, call it;
// a thread without elements has own = 0. `own` may be the maximum of fp32 numbers that are stored afterwards: rounding
// to floatX keeps the order, so rounding the maximum is enough. The result does not depend on the order of blocks.
static __device__ inline void absmax_of_block(absmax_t *max, absmax_t largest) {
    SHARED(absmax_t, of_warps, WARP);
    if (max == nullptr) return;
    int thread = (int)(threadIdx.y * blockDim.x + threadIdx.x), warps = (int)(blockDim.x * blockDim.y) / WARP;
    int lane = thread % WARP;
    largest = __reduce_max_sync(ALL_LANES, largest);
    __syncthreads(); // earlier uses of the memory are complete
    if (lane == 0) of_warps[thread / WARP] = largest;
    __syncthreads();
    if (thread >= WARP) return;
    largest = __reduce_max_sync(ALL_LANES, lane < warps ? of_warps[lane] : 0);
    floatX stored;
    round_to(&stored, __uint_as_float(largest));
    if (lane == 0) atomicMax(max, absmax_bits(to_float(stored)));
}

// A kernel's last argument, for the largest magnitude of its stores. A kernel with the template argument NoMax is
// compiled without it: only --matmul-dtype fp8 uses the maxima.
struct NoMax {
    template <int W> __device__ void add(const float (&)[W]) {}
    __device__ void finish() {}
};
struct Absmax {
    absmax_t *max, largest;
    template <int W> __device__ void add(const float (&v)[W]) { largest = absmax_of_pack<W>(largest, v); }
    __device__ void finish() { absmax_of_block(max, largest); } // all threads of the block call it
};
// Calls launch with such an argument.
template <typename Launch> static inline void launch_with_max(absmax_t *max, Launch launch) {
    if (max) launch(Absmax{max, 0});
    else launch(NoMax());
}

enum { ABSMAX_THREADS = 256, ABSMAX_ROWS = 4 }; // threads of a block; rows whose loads are independent

// `count` matrices of one shape, the second dimension of the grid: elements from one to the next, and bytes between
// their maxima, codes and scales.
typedef struct {
    int count;
    size_t stride, bytes;
} MatrixBatch;
template <typename T> static __device__ inline T *of_batch(T *first, const MatrixBatch &batch) {
    return (T *)(void *)((char *)first + blockIdx.y * batch.bytes);
}

static __global__ void absmax_clear_kernel(absmax_t *max, MatrixBatch batch) { *of_batch(max, batch) = 0; }

template <int W>
static __global__ void __launch_bounds__(ABSMAX_THREADS)
    absmax_kernel(absmax_t *max, const floatX *x, int N, int columns, int ld, MatrixBatch batch) {
    absmax_t largest = 0;
    max = of_batch(max, batch), x += blockIdx.y * batch.stride;
    int first = (int)blockIdx.x * ABSMAX_ROWS;
    for (int c = (int)threadIdx.x * W; c < columns; c += (int)blockDim.x * W) {
        float v[ABSMAX_ROWS][W];
        UNROLL
        for (int i = 0; i < ABSMAX_ROWS; i++) load<W>(v[i], x + (size_t)min(first + i, N - 1) * ld + c);
        UNROLL
        for (int i = 0; i < ABSMAX_ROWS; i++) largest = absmax_of_pack<W>(largest, v[i]);
    }
    absmax_of_block(max, largest);
}

static inline void absmax_update_batch(absmax_t *max, const floatX *x, int N, int columns, int ld, MatrixBatch batch) {
    bool wide = packed(ld, x) && packed(columns) && packed(batch.stride);
    int threads = min_int(ABSMAX_THREADS, (int)round_up((size_t)(columns / (wide ? PACK : 1)), WARP));
    dim3 grid(blocks_of(N, ABSMAX_ROWS), (unsigned)batch.count);
    if (wide) LAUNCH(absmax_kernel<PACK>, grid, threads, 0, max, x, N, columns, ld, batch);
    else LAUNCH(absmax_kernel<1>, grid, threads, 0, max, x, N, columns, ld, batch);
}
static inline void absmax_update(Activation x, int N, int columns, int ld) {
    if (!x.max) return;
    OPERATION();
    const MatrixBatch one = {1, 0, 0};
    absmax_update_batch(x.max, x.data, N, columns, ld, one);
}
