/*
matmul_amx.h: products of bf16 matrices by the matrix instructions of Intel CPUs (AMX), with sums in fp32.

  bool amx_begin(void)                    whether this CPU, kernel and build have the instructions
  void amx_pack(...)                      bf16 rows to tiles
  void gemm_amx(shape, A, B, C, scale)    C = op(A) op(B), or C += op(A) op(B); with shape.scaled times `scale`

  shapes    op(A) M x K, op(B) K x N, packed; C M x N, fp32, row-major
  forms     A matrix is packed along its rows if K is the index of its columns, down its columns if K is that of its
            rows; and for the left (A) or the right (B) of the product.
  tiles     An instruction multiplies 16 x 32 numbers of A by 32 x 16 of B. A tile of A has 16 rows of 32 numbers; one
            of B has 16 rows with the numbers of two rows of B in turns. A tile is 1 KiB; the tiles of 16 rows of op(A),
            or of 16 columns of op(B), follow each other in the order of K. Missing rows and columns are zeros.
  numerics  products exact; per element of C sums in the order of K, in slabs of AMX_SLAB that are then added: they do
            not depend on the number of threads. The instruction treats subnormal numbers as zero.
  speed     Tiles are contiguous, so every load is a whole cache line, and the operands of a block of C stay in the L2
            cache. Packing is part of rounding (linear.h), which reads the matrix anyway.
  source    Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX, for the 2 x 2 tiles
*/
#pragma once
#include "ops.h"

typedef uint16_t bf16_t;

// C (M,N) = op(A) op(B), op(A) M x K; row-major with row strides lda, ldb, ldc
typedef struct {
    bool ta, tb, add, scaled;
    int M, N, K, lda, ldb, ldc;
} MatmulShape;

enum { AMX_ROWS = 16, AMX_DEPTH = 32, AMX_TILE = AMX_ROWS * AMX_DEPTH }; // elements

static inline size_t amx_packed_bytes(int rows, int columns) { // in each form
    return round_up((size_t)rows, AMX_DEPTH) * round_up((size_t)columns, AMX_DEPTH) * sizeof(bf16_t);
}

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// In elements; tests make them small (tests/small_sizes.h). The operands of a block of C fit in the L2 cache.
#ifndef AMX_SLAB
#define AMX_SLAB 1024
#define AMX_BLOCK_M 256
#define AMX_BLOCK_N 384
#endif

static inline bool amx_begin(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; // asm/prctl.h
    return __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Transposes 16 x 16 numbers of 32 bits: swaps the off-diagonal halves of blocks of 2, 4, 8 and 16.
static inline void amx_transpose(__m512i *row) {
    const __m512i column = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int half = 1; half < 16; half *= 2) {
        // index of a number of the first row, or 16 + index of one of the second
        __m512i moved = _mm512_xor_si512(column, _mm512_set1_epi32(half | 16));
        __mmask16 upper = _mm512_test_epi32_mask(column, _mm512_set1_epi32(half));
        __m512i first = _mm512_mask_mov_epi32(column, upper, moved);
        __m512i second = _mm512_mask_mov_epi32(moved, upper, _mm512_or_si512(column, _mm512_set1_epi32(16)));
        second = _mm512_mask_mov_epi32(_mm512_xor_si512(column, _mm512_set1_epi32(half)), upper, second);
        for (int i = 0; i < 16; i++) {
            if (i & half) continue;
            __m512i a = row[i], b = row[i | half];
            row[i] = _mm512_permutex2var_epi32(a, first, b);
            row[i | half] = _mm512_permutex2var_epi32(a, second, b);
        }
    }
}

// Masked forms: gcc 12 warns about the undefined values that the others pass in C++.
#define AMX_ALL ((__mmask16)0xFFFF)
static inline __m512i amx_widen(__m256i x) { return _mm512_maskz_cvtepu16_epi32(AMX_ALL, x); }

// A tile from the upper left of rows x columns numbers: 16 rows of 32, or `paired` 16 pairs of rows of 16, in turns.
static inline void amx_pack_tile(bf16_t *to, const bf16_t *from, int ld, int rows, int columns, bool paired,
                                 bool transpose) {
    __m512i row[16];
    columns = max_int(columns, 0);
    for (int i = 0; i < 16; i++)
        if (paired) {
            __mmask16 mask = (__mmask16)((1u << min_int(columns, 16)) - 1);
            const bf16_t *a = from + (size_t)2 * i * ld;
            __m256i even = _mm256_maskz_loadu_epi16(2 * i < rows ? mask : 0, a);
            __m256i odd = _mm256_maskz_loadu_epi16(2 * i + 1 < rows ? mask : 0, a + ld);
            row[i] = _mm512_or_si512(amx_widen(even), _mm512_maskz_slli_epi32(AMX_ALL, amx_widen(odd), 16));
        } else {
            __mmask32 mask = columns >= 32 ? 0xFFFFFFFF : (1u << columns) - 1;
            row[i] = _mm512_maskz_loadu_epi16(i < rows ? mask : 0, from + (size_t)i * ld);
        }
    if (transpose) amx_transpose(row);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 32, row[i]);
}

// Packs a part of a matrix of rows x columns: up to 32 rows and `width` columns from (r, c), multiples of 32, in either
// form unless it is NULL.
static inline void amx_pack(bf16_t *along, bf16_t *down, const bf16_t *part, int ld, int r, int c, int width, int rows,
                            int columns, bool left) {
    size_t along_strip = AMX_ROWS * round_up((size_t)columns, AMX_DEPTH);
    size_t down_strip = AMX_ROWS * round_up((size_t)rows, AMX_DEPTH);
    for (int j = c; j < c + width; j += AMX_DEPTH, part += AMX_DEPTH)
        for (int half = 0; half < AMX_DEPTH; half += AMX_ROWS) {
            if (along)
                amx_pack_tile(along + (r + half) / AMX_ROWS * along_strip + (size_t)j * AMX_ROWS,
                              part + (size_t)half * ld, ld, rows - r - half, columns - j, false, !left);
            if (down)
                amx_pack_tile(down + (j + half) / AMX_ROWS * down_strip + (size_t)r * AMX_ROWS, part + half, ld,
                              rows - r, columns - j - half, true, left);
        }
}

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} AmxConfig;

// P (32,32) = 2 x 2 tiles: products of 32 rows of A and 32 columns of B, whose second tiles are `next` elements later
static inline void amx_multiply(float *P, const bf16_t *A, const bf16_t *B, int tiles, size_t next) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < tiles; k++, A += AMX_TILE, B += AMX_TILE) {
        _tile_loadd(4, A, 64);
        _tile_loadd(6, B, 64);
        _tile_loadd(7, B + next, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, A + next, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, P, 128);
    _tile_stored(1, P + 16, 128);
    _tile_stored(2, P + 512, 128);
    _tile_stored(3, P + 528, 128);
}

static inline void amx_store(float *C, int ldc, const float *P, int rows, int columns, bool add, float scale) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            C[(size_t)i * ldc + j] = scale * P[i * 32 + j] + (add ? C[(size_t)i * ldc + j] : 0);
}

// Rows m0 .. m1 and columns n0 .. n1 of C
static inline void amx_block(MatmulShape s, const bf16_t *A, const bf16_t *B, float *C, float scale, int m0, int m1,
                             int n0, int n1) {
    float P[32 * 32] __attribute__((aligned(64)));
    size_t strip = round_up((size_t)s.K, AMX_DEPTH) * AMX_ROWS;
    int depth = (s.K + AMX_DEPTH - 1) / AMX_DEPTH;
    for (int k = 0; k < depth; k += AMX_SLAB / AMX_DEPTH)
        for (int m = m0; m < m1; m += 32)
            for (int n = n0; n < n1; n += 32) {
                for (int i = m; i < min_int(m + 32, s.M); i++) // reaches the cache while the products are computed
                    for (int j = n; j < min_int(n + 32, s.N); j += 16) __builtin_prefetch(C + (size_t)i * s.ldc + j, 1);
                amx_multiply(P, A + m / 16 * strip + (size_t)k * AMX_TILE, B + n / 16 * strip + (size_t)k * AMX_TILE,
                             min_int(AMX_SLAB / AMX_DEPTH, depth - k), strip);
                amx_store(C + (size_t)m * s.ldc + n, s.ldc, P, min_int(32, s.M - m), min_int(32, s.N - n), k || s.add,
                          scale);
            }
}

static inline int amx_blocks(int size, int block) { return (size + block - 1) / block; }

// Blocks of C are halved until each thread has several.
static inline void gemm_amx(MatmulShape s, const bf16_t *A, const bf16_t *B, float *C, float scale) {
    int M = AMX_BLOCK_M, N = AMX_BLOCK_N, wanted = omp_get_max_threads() > 1 ? 4 * omp_get_max_threads() : 1;
    while (M + N > 64 && amx_blocks(s.M, M) * amx_blocks(s.N, N) < wanted) {
        int *larger = M > N ? &M : &N;
        *larger = (int)round_up((size_t)*larger / 2, 32);
    }
    const int across = amx_blocks(s.N, N), blocks = across * amx_blocks(s.M, M);
    AmxConfig config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
#pragma omp parallel
    {
        _tile_loadconfig(&config);
#pragma omp for schedule(dynamic)
        for (int b = 0; b < blocks; b++) {
            int m = b / across * M, n = b % across * N;
            amx_block(s, A, B, C, s.scaled ? scale : 1, m, min_int(m + M, s.M), n, min_int(n + N, s.N));
        }
        _tile_release();
    }
}
#else
static inline bool amx_begin(void) { return false; }
static inline void amx_pack(bf16_t *along, bf16_t *down, const bf16_t *part, int ld, int r, int c, int width, int rows,
                            int columns, bool left) {
    (void)along, (void)down, (void)part, (void)ld, (void)r, (void)c, (void)width, (void)rows, (void)columns, (void)left;
}
static inline void gemm_amx(MatmulShape s, const bf16_t *A, const bf16_t *B, float *C, float scale) {
    (void)s, (void)A, (void)B, (void)C, (void)scale;
}
#endif
