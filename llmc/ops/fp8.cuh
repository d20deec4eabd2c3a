/*
fp8.cuh: numbers of 8 bits, and the scales that tensors need to be stored in them. Formats and numerics in fp8.h.
*/
#ifndef LLMC_FP8_CUH
#define LLMC_FP8_CUH
#include "../cuda/kernel_utils.cuh"
#include "ops.h"

// ---------------------------------------------------------------------------------------------------
// The largest magnitude: a maximum of unsigned integers, the bits of |x|. fmaxf would lose NaN.

static __device__ inline absmax_t absmax_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// own = max(own, |v[i]|)
template <int W> static __device__ inline absmax_t absmax_of_pack(absmax_t own, const float *v) {
    UNROLL
    for (int i = 0; i < W; i++) own = max(own, absmax_bits(v[i]));
    return own;
}

// *max = max(*max, own of all threads), or nothing if max is NULL. All threads of the block call it, whole warps; a
// thread without elements has own = 0. `own` may be that of fp32 numbers which are then stored: rounding to floatX
// keeps their order, so the maximum is rounded in place of each. The result does not depend on the order of blocks.
static __device__ inline void absmax_of_block(absmax_t *max, absmax_t own) {
    SHARED(absmax_t, of_warps, WARP);
    if (max == nullptr) return;
    int thread = (int)(threadIdx.y * blockDim.x + threadIdx.x), warps = (int)(blockDim.x * blockDim.y) / WARP;
    int lane = thread % WARP;
    own = __reduce_max_sync(ALL_LANES, own);
    __syncthreads(); // earlier uses of the memory are complete
    if (lane == 0) of_warps[thread / WARP] = own;
    __syncthreads();
    if (thread >= WARP) return;
    own = __reduce_max_sync(ALL_LANES, lane < warps ? of_warps[lane] : 0);
    floatX stored;
    round_to(&stored, __uint_as_float(own));
    if (lane == 0) atomicMax(max, absmax_bits(to_float(stored)));
}

// The largest magnitude of what a kernel stores, as its last argument. A kernel with the template argument NoMax is
// compiled without it: only --gemm fp8 uses the maxima.
struct NoMax {
    template <int W> __device__ void add(const float (&)[W]) {}
    __device__ void finish() {}
};
struct Absmax {
    absmax_t *max, own;
    template <int W> __device__ void add(const float (&v)[W]) { own = absmax_of_pack<W>(own, v); }
    __device__ void finish() { absmax_of_block(max, own); } // all threads of the block call it
};
// LAUNCH_ROWS or LAUNCH_COLUMNS_EITHER with or without the maximum
#define LAUNCH_MAX(LAUNCH_EITHER, kernel, max, ...)                                                   \
    do {                                                                                              \
        const Absmax launch_max = {max, 0};                                                           \
        if (max) LAUNCH_EITHER((kernel<PACK, Absmax>), (kernel<1, Absmax>), __VA_ARGS__, launch_max); \
        else LAUNCH_EITHER((kernel<PACK, NoMax>), (kernel<1, NoMax>), __VA_ARGS__, NoMax());          \
    } while (0)

enum { ABSMAX_THREADS = 256, ABSMAX_PACKS = 8 }; // of a block; loads per thread

// A block per `rows` rows; its threads read a row together.
template <int W>
static __global__ void __launch_bounds__(ABSMAX_THREADS)
    absmax_kernel(absmax_t *max, const floatX *x, int N, int columns, int ld, int rows) {
    absmax_t own = 0;
    int first = (int)blockIdx.x * rows, last = min(N, first + rows);
    for (int n = first; n < last; n++)
        for (int c = (int)threadIdx.x * W; c < columns; c += (int)blockDim.x * W) {
            float v[W];
            load<W>(v, x + (size_t)n * ld + c);
            own = absmax_of_pack<W>(own, v);
        }
    absmax_of_block(max, own);
}

static inline void absmax_update(absmax_t *max, const floatX *x, int N, int columns, int ld) {
    OPERATION();
    bool wide = packed(ld, x) && packed(columns);
    int packs = columns / (wide ? PACK : 1), threads = min_int(ABSMAX_THREADS, (int)round_up(packs, WARP));
    int rows = max_int(1, ABSMAX_PACKS * threads / packs);
    if (wide) LAUNCH(absmax_kernel<PACK>, blocks_of(N, rows), threads, 0, max, x, N, columns, ld, rows);
    else LAUNCH(absmax_kernel<1>, blocks_of(N, rows), threads, 0, max, x, N, columns, ld, rows);
}
#endif
