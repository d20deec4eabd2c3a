/*
fp8.cuh: numbers of 8 bits, and the scales that tensors need to be stored in them. Formats and numerics in fp8.h: both
twins round to the same bits.

  fp8_quantize(...)     the codes of a matrix, of its transpose, or of both, padded to multiples of 16 with zeros; with
                        NaN if the tensor has one, since all products with it are NaN
  fp8_copy_weights(...) the codes of many matrices of one shape, each with its own scale

  mapping   a block of 256 threads per 128 x 128 tile, which is in shared memory as codes. A thread transposes 16 rows
            of 4 columns in registers. Global memory is read and written 16 bytes at a time, whole lines of 128 bytes.
  traffic   reads x once (2 bytes per element in bf16), writes 1 byte per element and output
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "../absmax.cuh"
#include "fp8.h"
#include "operations.h"
#include <cuda_fp8.h>

enum { FP8_TILE = 128, FP8_THREADS = 256, FP8_BLOCKS = 4 }; // blocks per multiprocessor, at least

// A matrix in FP8: addresses in device memory.
typedef struct {
    uint8_t *codes;      // (fp8_padded(rows), fp8_padded(columns)), or NULL
    uint8_t *transposed; // (fp8_padded(columns), fp8_padded(rows)), or NULL
    float *scale;        // factor of the stored numbers
} Fp8Codes;

// The first word of a row of the tile. Each 16 rows are followed by 16 bytes, so that the 8 x 4 threads of a warp that
// read columns of words, 16 rows apart, read from 32 banks.
enum { FP8_TILE_WORDS = FP8_TILE * FP8_TILE / 4 + FP8_TILE / 16 * 4 };
static __device__ inline int fp8_tile_row(int row) { return row * (FP8_TILE / 4) + row / 16 * 4; }

// The codes of W numbers, in the order of memory.
template <int W, __nv_fp8_interpretation_t FORMAT>
static __device__ inline void fp8_store(uint8_t *to, const float *v, float multiplier) {
    uint8_t codes[W];
    if constexpr (W == 1) {
        codes[0] = __nv_cvt_float_to_fp8(__fmul_rn(v[0], multiplier), __NV_SATFINITE, FORMAT);
    } else {
        UNROLL
        for (int k = 0; k < W; k += 2) {
            const float2 pair = make_float2(__fmul_rn(v[k], multiplier), __fmul_rn(v[k + 1], multiplier));
            const __nv_fp8x2_storage_t two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, FORMAT);
            memcpy(codes + k, &two, sizeof(two));
        }
    }
    typename Bits<W>::type bits;
    memcpy(&bits, codes, sizeof(bits));
    *(typename Bits<W>::type *)(void *)to = bits;
}

// Several loads are under way before the first is used.
template <int W, __nv_fp8_interpretation_t FORMAT>
static __device__ inline void fp8_load_tile(unsigned *tile, const floatX *x, int rows, int columns, int ld,
                                            float multiplier) {
    enum { LOADS = 4, STEP = FP8_THREADS * W };
    for (int first = 0; first < FP8_TILE * FP8_TILE; first += LOADS * STEP) {
        float v[LOADS][W];
        UNROLL
        for (int i = 0; i < LOADS; i++) {
            int at = first + i * STEP + (int)threadIdx.x * W, row = at / FP8_TILE, column = at % FP8_TILE;
            UNROLL
            for (int k = 0; k < W; k++) v[i][k] = 0;
            if (row < rows && column < columns) load<W>(v[i], x + (size_t)row * ld + column);
        }
        UNROLL
        for (int i = 0; i < LOADS; i++) {
            int at = first + i * STEP + (int)threadIdx.x * W, row = at / FP8_TILE, column = at % FP8_TILE;
            fp8_store<W, FORMAT>((uint8_t *)(tile + fp8_tile_row(row)) + column, v[i], multiplier);
        }
    }
}

// Stores a tile of codes (rows, columns), both multiples of 16, with row stride ld.
static __device__ inline void fp8_store_tile(uint8_t *codes, const unsigned *tile, int rows, int columns, int ld) {
    UNROLL
    for (int first = 0; first < FP8_TILE * FP8_TILE; first += FP8_THREADS * 16) {
        int at = first + (int)threadIdx.x * 16, row = at / FP8_TILE, column = at % FP8_TILE;
        if (row < rows && column < columns)
            *(uint4 *)(void *)(codes + (size_t)row * ld + column) =
                *(const uint4 *)(const void *)(tile + fp8_tile_row(row) + column / 4);
    }
}

// t[j] = byte j of words a, b, c, d
static __device__ inline void fp8_transpose_4x4(unsigned t[4], unsigned a, unsigned b, unsigned c, unsigned d) {
    unsigned ab_low = __byte_perm(a, b, 0x5140), cd_low = __byte_perm(c, d, 0x5140); // a0 b0 a1 b1
    unsigned ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    t[0] = __byte_perm(ab_low, cd_low, 0x5410), t[1] = __byte_perm(ab_low, cd_low, 0x7632);
    t[2] = __byte_perm(ab_high, cd_high, 0x5410), t[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// Stores the transposed tile: rows of the output are columns of the tile. A thread has 16 rows of 4 columns; at least
// one row is below `rows`.
static __device__ inline void fp8_store_transposed(uint8_t *codes, const unsigned *tile, int rows, int columns,
                                                   int ld) {
    int row = (int)threadIdx.x % 8 * 16, column = (int)threadIdx.x / 8 * 4;
    if (row >= rows || column >= columns) return;
    unsigned t[4][4]; // [4 rows each][column]
    UNROLL
    for (int i = 0; i < 4; i++) {
        const unsigned *word = tile + fp8_tile_row(row) + 4 * i * (FP8_TILE / 4) + column / 4;
        fp8_transpose_4x4(t[i], word[0], word[FP8_TILE / 4], word[FP8_TILE / 2], word[FP8_TILE / 4 * 3]);
    }
    UNROLL
    for (int j = 0; j < 4; j++)
        *(uint4 *)(void *)(codes + (size_t)(column + j) * ld + row) = make_uint4(t[0][j], t[1][j], t[2][j], t[3][j]);
}

// A tile of a matrix: where it begins in x and in the codes; the rows and columns of x, and the padded rows of the
// codes, from there to the end; and the row strides.
typedef struct {
    const floatX *x;
    uint8_t *codes, *transposed; // or NULL
    int rows, columns, ld;
    int code_rows, code_ld, transposed_ld;
} Fp8Tile;

static __device__ inline int fp8_pad(int n) { return (n + FP8_ALIGN - 1) / FP8_ALIGN * FP8_ALIGN; }

// max: the maximum of the whole tensor; NULL means 0. One block writes the scale.
template <int W, __nv_fp8_interpretation_t FORMAT>
static __device__ inline void fp8_quantize_tile(Fp8Tile t, float *scale, bool writes_scale, const absmax_t *max,
                                                float largest) {
    SHARED(uint4, tile4, FP8_TILE_WORDS / 4);
    unsigned *tile = (unsigned *)(void *)tile4;
    float most = max ? fabsf(__uint_as_float(*max)) : 0;
    if (most < FP8_SMALLEST) most = FP8_SMALLEST; // NaN stays NaN
    if (writes_scale && threadIdx.x == 0) *scale = __fdiv_rn(most, largest);
    fp8_load_tile<W, FORMAT>(tile, t.x, t.rows, t.columns, t.ld, __fdiv_rn(largest, most));
    __syncthreads();
    if (t.codes) fp8_store_tile(t.codes, tile, t.code_rows, fp8_pad(t.columns), t.code_ld);
    if (t.transposed) fp8_store_transposed(t.transposed, tile, t.rows, fp8_pad(t.columns), t.transposed_ld);
}

template <int W, __nv_fp8_interpretation_t FORMAT>
static __global__ void __launch_bounds__(FP8_THREADS, FP8_BLOCKS)
    fp8_quantize_kernel(Fp8Codes to, const floatX *x, int rows, int columns, int ld, const absmax_t *max, float largest,
                        MatrixBatch batch) {
    int across = (columns + FP8_TILE - 1) / FP8_TILE, padded_rows = fp8_pad(rows), padded_columns = fp8_pad(columns);
    int row = (int)blockIdx.x / across * FP8_TILE, column = (int)blockIdx.x % across * FP8_TILE;
    uint8_t *codes = to.codes ? of_batch(to.codes, batch) + (size_t)row * padded_columns + column : nullptr;
    uint8_t *transposed = to.transposed ? of_batch(to.transposed, batch) + (size_t)column * padded_rows + row : nullptr;
    const Fp8Tile tile = {x + blockIdx.y * batch.stride + (size_t)row * ld + column,
                          codes,
                          transposed,
                          rows - row,
                          columns - column,
                          ld,
                          padded_rows - row,
                          padded_columns,
                          padded_rows};
    fp8_quantize_tile<W, FORMAT>(tile, of_batch(to.scale, batch), blockIdx.x == 0, max ? of_batch(max, batch) : nullptr,
                                 largest);
}

template <__nv_fp8_interpretation_t FORMAT>
static inline void fp8_quantize_as(Fp8Codes to, const floatX *x, int rows, int columns, int ld, const absmax_t *max,
                                   float largest, MatrixBatch batch) {
    size_t tiles = (size_t)((rows + FP8_TILE - 1) / FP8_TILE) * (size_t)((columns + FP8_TILE - 1) / FP8_TILE);
    dim3 grid(blocks_of(tiles, 1), (unsigned)batch.count);
    if (packed(ld, x) && packed(columns) && packed(batch.stride))
        LAUNCH((fp8_quantize_kernel<PACK, FORMAT>), grid, FP8_THREADS, 0, to, x, rows, columns, ld, max, largest,
               batch);
    else LAUNCH((fp8_quantize_kernel<1, FORMAT>), grid, FP8_THREADS, 0, to, x, rows, columns, ld, max, largest, batch);
}

// x (rows, columns) with row stride ld; without x.max its largest magnitude is taken as 0
static inline void fp8_quantize(Fp8Codes to, Activation x, int rows, int columns, int ld, Fp8Format f) {
    const MatrixBatch one = {1, 0, 0};
    assert(rows > 0 && columns > 0 && ld >= columns && to.scale);
    assert((uintptr_t)to.codes % 16 == 0 && (uintptr_t)to.transposed % 16 == 0);
    float largest = fp8_formats[f].largest;
    if (f == FP8_E4M3) fp8_quantize_as<__NV_E4M3>(to, x.data, rows, columns, ld, x.max, largest, one);
    else fp8_quantize_as<__NV_E5M2>(to, x.data, rows, columns, ld, x.max, largest, one);
}

// Takes the memory of codes (rows, columns) from `memory`, which begins with their scale.
static inline Fp8Codes fp8_codes_at(char **memory, int rows, int columns, bool both) {
    char *at = *memory + FP8_HEADER;
    size_t bytes = fp8_codes_bytes(rows, columns);
    Fp8Codes codes = {(uint8_t *)at, both ? (uint8_t *)at + bytes : NULL, (float *)(void *)*memory};
    *memory = at + (both ? 2 : 1) * bytes;
    return codes;
}

// The copies of weights (OC, IC): each has a header with scale and largest magnitude, its codes and its transposed
// codes
static inline void fp8_copy_weights(void *copy, const floatX *weight, int IC, int OC, MatrixBatch batch) {
    char *memory = (char *)copy;
    absmax_t *max = (absmax_t *)(void *)(memory + FP8_ALIGN);
    LAUNCH(absmax_clear_kernel, dim3(1, (unsigned)batch.count), 1, 0, max, batch);
    absmax_update_batch(max, weight, OC, IC, IC, batch);
    static_assert(FP8_WEIGHT == FP8_E4M3, "the format of the copies");
    fp8_quantize_as<__NV_E4M3>(fp8_codes_at(&memory, OC, IC, true), weight, OC, IC, IC, max,
                               fp8_formats[FP8_WEIGHT].largest, batch);
}
