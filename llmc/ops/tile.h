/*
tile.h: the innermost product of attention: a tile of TILE_ROWS rows whose sums stay in registers.

  C[i,:] (+)= sum_k A(i,k) B[k,:],   i in [0, TILE_ROWS),  A(i,k) = A[i*lda + k] or, transposed, A[k*lda + i]
  shapes    B and C have any multiple of TILE_LANES columns; the callers pad with zeros, so there are no partial vectors
  numerics  products are summed over k in order, with fused multiply-adds if the CPU has them
  speed     per k one load per vector of B, one broadcast per row of A, and TILE_ROWS * vectors multiply-adds: with
            AVX-512 24 multiply-adds for 10 loads, which keeps both units busy (dev/BENCH.md). The vector types of GCC
            and Clang are portable C: the code depends only on the number of lanes and of registers.
*/
#ifndef LLMC_TILE_H
#define LLMC_TILE_H
#include "ops.h"

#if defined(__AVX512F__)
enum { TILE_BYTES = 64, TILE_VECTORS = 4 }; // 6 x 4 of 32 registers hold sums
#elif defined(__AVX__)
enum { TILE_BYTES = 32, TILE_VECTORS = 2 }; // 6 x 2 of 16
#else
enum { TILE_BYTES = 16, TILE_VECTORS = 2 };
#endif
enum { TILE_ROWS = 6, TILE_LANES = TILE_BYTES / (int)sizeof(real), TILE_COLUMNS = TILE_VECTORS * TILE_LANES };

typedef real TileVector __attribute__((vector_size(TILE_BYTES), aligned(sizeof(real)), may_alias));

// Inlined, so that `vectors` and `a_row` or `a_k` are constants.
static inline __attribute__((always_inline)) void tile_kernel(int vectors, int K, const real *A, size_t a_row,
                                                              size_t a_k, const real *B, size_t ldb, real *C,
                                                              size_t ldc, bool add) {
    TileVector sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const TileVector *c = (const TileVector *)(const void *)(C + i * ldc + j * TILE_LANES);
            sum[i][j] = add ? *c : (TileVector){0};
        }
    for (int k = 0; k < K; k++, A += a_k, B += ldb) {
        TileVector b[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) b[j] = *(const TileVector *)(const void *)(B + j * TILE_LANES);
#pragma GCC unroll 6
        for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sum[i][j] += A[i * a_row] * b[j];
    }
#pragma GCC unroll 6
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) *(TileVector *)(void *)(C + i * ldc + j * TILE_LANES) = sum[i][j];
}

// `columns` columns of C, a multiple of TILE_LANES, tile by tile
static inline __attribute__((always_inline)) void tile_product(int columns, int K, const real *A, size_t a_row,
                                                               size_t a_k, const real *B, size_t ldb, real *C,
                                                               size_t ldc, bool add) {
    int c = 0;
    for (; c + TILE_COLUMNS <= columns; c += TILE_COLUMNS)
        tile_kernel(TILE_VECTORS, K, A, a_row, a_k, B + c, ldb, C + c, ldc, add);
    switch ((columns - c) / TILE_LANES) {
    case 3: tile_kernel(TILE_VECTORS < 3 ? TILE_VECTORS : 3, K, A, a_row, a_k, B + c, ldb, C + c, ldc, add); break;
    case 2: tile_kernel(2, K, A, a_row, a_k, B + c, ldb, C + c, ldc, add); break;
    case 1: tile_kernel(1, K, A, a_row, a_k, B + c, ldb, C + c, ldc, add); break;
    default: break;
    }
}

// C (TILE_ROWS, columns) = A B or, with add, += A B;  A (TILE_ROWS, K), B (K, columns)
static inline void tile_multiply(int columns, int K, const real *A, size_t lda, const real *B, size_t ldb, real *C,
                                 size_t ldc, bool add) {
    tile_product(columns, K, A, lda, 1, B, ldb, C, ldc, add);
}

// C (TILE_ROWS, columns) = A^T B or, with add, += A^T B;  A (K, TILE_ROWS), B (K, columns)
static inline void tile_multiply_transposed(int columns, int K, const real *A, size_t lda, const real *B, size_t ldb,
                                            real *C, size_t ldc, bool add) {
    tile_product(columns, K, A, 1, lda, B, ldb, C, ldc, add);
}
#endif
