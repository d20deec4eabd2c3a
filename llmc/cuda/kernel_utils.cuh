/*
kernel_utils.cuh: the parts that kernels share: packs of 16 bytes, mappings of threads to elements, reductions.

  packs        `load<W>` and `store<W>` move W elements of floatX, PACK (16 bytes) or 1. A launcher chooses PACK where
               `packed` holds for widths and pointers, otherwise 1: slower, with the same result.
  reductions   by exchange within a warp, then over the warps in order: bitwise reproducible, no atomics
  rounding     arithmetic is fp32, each result is rounded once, when it is stored
*/
#pragma once
#include "device.cuh"
#include <type_traits>

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

enum { WARP = 32, PACK = 16 / sizeof(floatX) };

static inline unsigned blocks_of(size_t count, size_t per_block) {
    size_t blocks = (count + per_block - 1) / per_block;
    CHECK(blocks <= INT_MAX, "a tensor of %zu elements is too large for one launch; choose a smaller --batch-size",
          count);
    return (unsigned)blocks;
}

// ---------------------------------------------------------------------------------------------------
// Packs

// Whether rows of `width` elements at these addresses can be accessed 16 bytes at a time.
static inline bool packed(size_t width) { return width % PACK == 0; }
template <typename... Pointers> static inline bool packed(size_t width, const void *first, Pointers... others) {
    return (uintptr_t)first % 16 == 0 && packed(width, others...);
}

static __device__ inline float to_float(floatX x) { return (float)x; }
static __device__ inline void round_to(float *to, float x) { *to = x; }
static __device__ inline void round_to(__nv_bfloat16 *to, float x) {
    // two statements: gcc's ThreadSanitizer does not see a structure that a call returns into memory
    const __nv_bfloat16 rounded = __float2bfloat16_rn(x);
    *to = rounded;
}

// The bits of W stored elements, one access.
template <int BYTES> struct Bits;
template <> struct Bits<1> { typedef unsigned char type; };
template <> struct Bits<2> { typedef unsigned short type; };
template <> struct Bits<4> { typedef unsigned type; };
template <> struct Bits<8> { typedef uint2 type; };
template <> struct Bits<16> { typedef uint4 type; };
template <int W> using Stored = typename Bits<W *(int)sizeof(floatX)>::type;

template <int W> static __device__ inline void load(float *v, const floatX *from) {
    const Stored<W> bits = *(const Stored<W> *)(const void *)from;
    floatX x[W];
    memcpy((void *)x, &bits, sizeof(x));
    UNROLL
    for (int i = 0; i < W; i++) v[i] = to_float(x[i]);
}

template <int W> static __device__ inline void store(floatX *to, const float *v) {
    floatX x[W];
    UNROLL
    for (int i = 0; i < W; i++) round_to(&x[i], v[i]);
    Stored<W> bits;
    memcpy(&bits, x, sizeof(x));
    *(Stored<W> *)(void *)to = bits;
}

// load and store for the fp32 numbers of a pack, also 16 bytes at a time.
template <int W> static __device__ inline void load_fp32(float *v, const float *from) {
    if constexpr (W == 1) {
        v[0] = from[0];
    } else {
        UNROLL
        for (int i = 0; i < W; i += 4) {
            const float4 x = *(const float4 *)(const void *)(from + i);
            v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
        }
    }
}

template <int W> static __device__ inline void store_fp32(float *to, const float *v) {
    if constexpr (W == 1) {
        to[0] = v[0];
    } else {
        UNROLL
        for (int i = 0; i < W; i += 4) *(float4 *)(void *)(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    }
}

// ---------------------------------------------------------------------------------------------------
// Mappings

// Elements: a thread per pack of [begin, end), then a thread per remaining element. A kernel<W>(begin, end, ...)
// obtains its index from element_index.
enum { ELEMENT_THREADS = 256 };
#define LAUNCH_ELEMENTS_ON(stream, kernel, wide, count, ...)                                                          \
    do {                                                                                                              \
        size_t elements_end = (count), elements_packed = (wide) ? elements_end / PACK * PACK : 0;                     \
        if (elements_packed > 0)                                                                                      \
            LAUNCH_ON(stream, (kernel<PACK>), blocks_of(elements_packed / PACK, ELEMENT_THREADS), ELEMENT_THREADS, 0, \
                      (size_t)0, elements_packed, __VA_ARGS__);                                                       \
        if (elements_packed < elements_end)                                                                           \
            LAUNCH_ON(stream, (kernel<1>), blocks_of(elements_end - elements_packed, ELEMENT_THREADS),                \
                      ELEMENT_THREADS, 0, elements_packed, elements_end, __VA_ARGS__);                                \
    } while (0)
#define LAUNCH_ELEMENTS(kernel, wide, count, ...) LAUNCH_ELEMENTS_ON(main_stream, kernel, wide, count, __VA_ARGS__)

// The expression is a multiple of W that nvcc recognizes; otherwise it splits a 16-byte store into four.
template <int W> static __device__ inline size_t element_index(size_t begin) {
    return (begin / W + blockIdx.x * (size_t)ELEMENT_THREADS + threadIdx.x) * W;
}

// Elements of rows, if the column matters: one or several blocks per row; a kernel<W>(...) computes row blockIdx.x and
// the column of column_index. This avoids a division by the row width, which would take longer than the memory access.
// LAUNCH_COLUMNS_EITHER names both instances of a kernel with further template arguments.
#define LAUNCH_COLUMNS_OF(W, kernel, rows, width, ...)                                                          \
    do {                                                                                                        \
        int columns_threads = (width) / (W);                                                                    \
        int columns_block = min_int(ELEMENT_THREADS, (columns_threads + WARP - 1) / WARP * WARP);               \
        if (columns_threads == 0) break;                                                                        \
        dim3 columns_grid((unsigned)(rows), (unsigned)((columns_threads + columns_block - 1) / columns_block)); \
        LAUNCH(kernel, columns_grid, columns_block, 0, __VA_ARGS__);                                            \
    } while (0)
#define LAUNCH_COLUMNS_EITHER(of_packs, of_one, wide, rows, width, ...)        \
    do {                                                                       \
        if (wide) LAUNCH_COLUMNS_OF(PACK, of_packs, rows, width, __VA_ARGS__); \
        else LAUNCH_COLUMNS_OF(1, of_one, rows, width, __VA_ARGS__);           \
    } while (0)
#define LAUNCH_COLUMNS(kernel, ...) LAUNCH_COLUMNS_EITHER((kernel<PACK>), (kernel<1>), __VA_ARGS__)

template <int W> static __device__ inline unsigned column_index(void) {
    return (blockIdx.y * blockDim.x + threadIdx.x) * W;
}

// Rows: `lanes` neighbouring threads, a power of two up to a warp, share a row of `packs` packs. If a row has fewer
// packs than a warp has lanes, fewer lanes process several packs each if that leaves fewer lanes idle: 4 for 12 packs
// (D = 96), not 16. At least 64 bytes of a row are read at once.
enum { ROW_THREADS = 128, ROW_LEAST_LANES = 4 };
static inline int row_lanes(int packs, bool wide) {
    int lanes = 1;
    while (lanes < packs && lanes < WARP) lanes *= 2;
    for (int fewer = lanes / 2; wide && packs < WARP && fewer >= ROW_LEAST_LANES; fewer /= 2)
        if ((packs + fewer - 1) / fewer * fewer < (packs + lanes - 1) / lanes * lanes) lanes = fewer;
    return lanes;
}
#define LAUNCH_ROWS_EITHER(of_packs, of_one, wide, rows, width, ...)                                                \
    do {                                                                                                            \
        int rows_lanes = row_lanes((wide) ? (width) / PACK : (width), wide);                                        \
        CHECK((size_t)(rows) <= INT_MAX / 2, "%zu rows are too many for one launch; choose a smaller --batch-size", \
              (size_t)(rows));                                                                                      \
        unsigned rows_blocks = blocks_of((rows), (size_t)(ROW_THREADS / rows_lanes));                               \
        if (wide) LAUNCH(of_packs, rows_blocks, ROW_THREADS, 0, rows_lanes, __VA_ARGS__);                           \
        else LAUNCH(of_one, rows_blocks, ROW_THREADS, 0, rows_lanes, __VA_ARGS__);                                  \
    } while (0)
#define LAUNCH_ROWS(kernel, ...) LAUNCH_ROWS_EITHER((kernel<PACK>), (kernel<1>), __VA_ARGS__)

static __device__ inline unsigned row_index(int lanes) {
    int shift = __ffs(lanes) - 1;
    return blockIdx.x * (unsigned)(ROW_THREADS >> shift) + (threadIdx.x >> shift);
}
static __device__ inline int row_lane(int lanes) { return (int)threadIdx.x & (lanes - 1); }
// to = from, `width` elements, by neighbouring lanes
template <int W> static __device__ inline void copy_row(floatX *to, const floatX *from, int width, int lanes) {
    for (int i = row_lane(lanes) * W; i < width; i += lanes * W)
        *(Stored<W> *)(void *)(to + i) = *(const Stored<W> *)(const void *)(from + i);
}

// Heads: rows of at most HEAD_WIDEST elements, which their lanes keep in registers, PACKS packs each: pack p of a lane
// is the pack lane + p lanes of the head. Calls launch(W, PACKS, lanes) with the first two as types of constants.
enum { HEAD_PART = 16, HEAD_WIDEST = WARP * HEAD_PART }; // elements per lane, elements per head
template <int value> using Constant = std::integral_constant<int, value>;
template <typename Launch> static inline void launch_heads(bool wide, int D, Launch launch) {
    int packs = wide ? D / PACK : D, lanes = 1;
    assert(D > 0 && D <= HEAD_WIDEST);
    while (lanes < packs && lanes < WARP) lanes *= 2;
    if (!wide) launch(Constant<1>(), Constant<HEAD_PART>(), lanes);
    else if (packs <= WARP) launch(Constant<PACK>(), Constant<1>(), lanes);
    else launch(Constant<PACK>(), Constant<HEAD_PART / PACK>(), lanes);
}
// Elements beyond `width` are 0.
template <int W, int PACKS>
static __device__ inline void load_head(float (&v)[PACKS][W], const floatX *from, int lanes, int width) {
    UNROLL
    for (int p = 0; p < PACKS; p++) {
        int i = (row_lane(lanes) + p * lanes) * W;
        UNROLL
        for (int k = 0; k < W; k++) v[p][k] = 0;
        if (i < width) load<W>(v[p], from + i);
    }
}
template <int W, int PACKS>
static __device__ inline void store_head(floatX *to, const float (&v)[PACKS][W], int lanes, int width) {
    UNROLL
    for (int p = 0; p < PACKS; p++) {
        int i = (row_lane(lanes) + p * lanes) * W;
        if (i < width) store<W>(to + i, v[p]);
    }
}
// A lane's part of <a,b>
template <int W, int PACKS>
static __device__ inline float head_dot(const float (&a)[PACKS][W], const float (&b)[PACKS][W]) {
    float dot = 0;
    UNROLL
    for (int p = 0; p < PACKS; p++) {
        UNROLL
        for (int k = 0; k < W; k++) dot += a[p][k] * b[p][k];
    }
    return dot;
}

// ---------------------------------------------------------------------------------------------------
// Reductions. All threads of the warps (or of the block) call them, and all receive the result.

static const unsigned ALL_LANES = 0xFFFFFFFFu;

// reduces over `lanes` neighbours, a power of two
template <typename T> static __device__ inline T lanes_sum(T x, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}
static __device__ inline float lanes_max(float x, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
}

// `memory`: WARP elements shared by the block, available for other use after the next barrier
template <typename T> static __device__ inline T block_sum(T x, T *memory) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = lanes_sum(x, WARP);
    __syncthreads(); // earlier uses of the memory are complete
    if (lane == 0) memory[warp] = x;
    __syncthreads();
    return lanes_sum(lane < warps ? memory[lane] : (T)0, WARP);
}
static __device__ inline float block_max(float x, float *memory) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = lanes_max(x, WARP);
    __syncthreads();
    if (lane == 0) memory[warp] = x;
    __syncthreads();
    return lanes_max(lane < warps ? memory[lane] : -INFINITY, WARP);
}

// out[c] += sum over the parts, in a fixed order, of partial[part,c]       partial (parts, C)
enum { COLUMN_GROUPS = 32 };
static __global__ void column_sum_kernel(float *out, const float *partial, int parts, int C) {
    SHARED(float, sums, COLUMN_GROUPS *WARP);
    int lane = (int)threadIdx.x % WARP, group = (int)threadIdx.x / WARP, c = (int)blockIdx.x * WARP + lane;
    float sum = 0;
    if (c < C)
        for (int part = group; part < parts; part += COLUMN_GROUPS) sum += partial[(size_t)part * C + c];
    sums[group * WARP + lane] = sum;
    __syncthreads();
    if (group > 0 || c >= C) return;
    for (int g = 1; g < COLUMN_GROUPS; g++) sum += sums[g * WARP + lane];
    out[c] += sum;
}
static inline void column_sum(float *out, const float *partial, int parts, int C) {
    LAUNCH(column_sum_kernel, blocks_of(C, WARP), COLUMN_GROUPS * WARP, 0, out, partial, parts, C);
}

// Error below 4 ulp: expf 1, the sum 1/2, __fdividef 2. An exact division has a branch per element. Below -87 the
// quotient is 0 instead of a value below 2^-125; NaN gives NaN.
static __device__ inline float sigmoid_of(float x) { return __fdividef(1, 1 + expf(-x)); }

// 2^x with an error of 2 ulp, 0 below 2^-126: one instruction, where exp2f has four for smaller results.
static __device__ inline float exp2_fast(float x) {
#ifdef CUDA_ON_CPU
    float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y; // NaN stays
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
