/*
tile.h: the innermost product of attention: a tile of TILE_ROWS rows whose sums stay in registers.

  C[i,:] (+)= sum_k A(i,k) B[k,:],   i in [0, TILE_ROWS),  A(i,k) = A[i*lda + k] or, transposed, A[k*lda + i]
  shapes    B and C have any multiple of TILE_LANES columns; the callers pad with zeros, so there are no partial vectors
  numerics  products are summed over k in order, with fused multiply-adds if the CPU has them
  speed     per k one load per vector of B, one broadcast per row of A, and TILE_ROWS * vectors multiply-adds: with
            AVX-512 24 multiply-adds for 10 loads, which keeps both units busy (dev/BENCH.md). The vector types of GCC
            and Clang are portable C: the code depends only on the number of lanes and of registers.
*/
#pragma once
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
static const TileVector tile_zero = {0};
typedef __typeof__(tile_zero > tile_zero) TileMask; // integers

// Inlined, so that `rows`, `vectors` and `a_row` or `a_k` are constants.
static inline __attribute__((always_inline)) void tile_kernel(int rows, int vectors, int K, const real *A, size_t a_row,
                                                              size_t a_k, const real *B, size_t ldb, real *C,
                                                              size_t ldc, bool add) {
    TileVector sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const TileVector *c = (const TileVector *)(const void *)(C + i * ldc + j * TILE_LANES);
            sum[i][j] = add ? *c : tile_zero;
        }
    for (int k = 0; k < K; k++, A += a_k, B += ldb) {
        TileVector b[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) b[j] = *(const TileVector *)(const void *)(B + j * TILE_LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sum[i][j] += A[i * a_row] * b[j];
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) *(TileVector *)(void *)(C + i * ldc + j * TILE_LANES) = sum[i][j];
}

// `columns` columns of C, a multiple of TILE_LANES, tile by tile
static inline __attribute__((always_inline)) void tile_product(int rows, int columns, int K, const real *A,
                                                               size_t a_row, size_t a_k, const real *B, size_t ldb,
                                                               real *C, size_t ldc, bool add) {
    int c = 0;
    for (; c + TILE_COLUMNS <= columns; c += TILE_COLUMNS)
        tile_kernel(rows, TILE_VECTORS, K, A, a_row, a_k, B + c, ldb, C + c, ldc, add);
    switch ((columns - c) / TILE_LANES) {
    case 3:
        tile_kernel(rows, TILE_VECTORS < 3 ? TILE_VECTORS : 3, K, A, a_row, a_k, B + c, ldb, C + c, ldc, add);
        break;
    case 2: tile_kernel(rows, 2, K, A, a_row, a_k, B + c, ldb, C + c, ldc, add); break;
    case 1: tile_kernel(rows, 1, K, A, a_row, a_k, B + c, ldb, C + c, ldc, add); break;
    default: break;
    }
}

// C (TILE_ROWS, columns) = A B or, with add, += A B;  A (TILE_ROWS, K), B (K, columns)
static inline void tile_multiply(int columns, int K, const real *A, size_t lda, const real *B, size_t ldb, real *C,
                                 size_t ldc, bool add) {
    tile_product(TILE_ROWS, columns, K, A, lda, 1, B, ldb, C, ldc, add);
}

// C (TILE_ROWS, columns) = A^T B or, with add, += A^T B;  A (K, TILE_ROWS), B (K, columns)
static inline void tile_multiply_transposed(int columns, int K, const real *A, size_t lda, const real *B, size_t ldb,
                                            real *C, size_t ldc, bool add) {
    tile_product(TILE_ROWS, columns, K, A, 1, lda, B, ldb, C, ldc, add);
}

// C (rows, columns) += A B for any number of rows;  A (rows, K), B (K, columns)
static inline void tile_multiply_rows(int rows, int columns, int K, const real *A, size_t lda, const real *B,
                                      size_t ldb, real *C, size_t ldc) {
    for (int i = 0, n; i < rows; i += n) {
        const real *a = A + i * lda;
        real *c = C + i * ldc;
        if (rows - i >= TILE_ROWS) tile_product(n = TILE_ROWS, columns, K, a, lda, 1, B, ldb, c, ldc, true);
        else if (rows - i >= 4) tile_product(n = 4, columns, K, a, lda, 1, B, ldb, c, ldc, true);
        else if (rows - i >= 2) tile_product(n = 2, columns, K, a, lda, 1, B, ldb, c, ldc, true);
        else tile_product(n = 1, columns, K, a, lda, 1, B, ldb, c, ldc, true);
    }
}

// Lane l is lane from[l] of x followed by y.
static inline __attribute__((always_inline)) TileVector tile_shuffle(TileVector x, TileVector y, TileMask from) {
#ifdef __clang__
    TileVector z = tile_zero;
    for (int l = 0; l < TILE_LANES; l++) z[l] = from[l] < TILE_LANES ? x[from[l]] : y[from[l] - TILE_LANES];
    return z;
#else
    return __builtin_shuffle(x, y, from);
#endif
}

// The sums of adjacent lanes of x, then of y.
static inline TileVector tile_pairs(TileVector x, TileVector y) {
    TileMask even, odd;
    for (int l = 0; l < TILE_LANES; l++) even[l] = 2 * l, odd[l] = 2 * l + 1;
    return tile_shuffle(x, y, even) + tile_shuffle(x, y, odd);
}

// The sum of the lanes. A simd reduction of the compiler adds them one after the other, which takes longer than a row.
static inline real tile_sum(TileVector x) {
#pragma GCC unroll 4
    for (int n = TILE_LANES; n > 1; n /= 2) x = tile_pairs(x, x);
    return x[0];
}

// x . y of `count` elements
static inline real tile_dot(const real *x, const real *y, int count) {
    TileVector sum = tile_zero;
    int c = 0;
    for (; c + TILE_LANES <= count; c += TILE_LANES)
        sum += *(const TileVector *)(const void *)(x + c) * *(const TileVector *)(const void *)(y + c);
    real dot = tile_sum(sum);
    for (; c < count; c++) dot += x[c] * y[c];
    return dot;
}

// to = x^T for a square of TILE_LANES rows and columns: merging its halves lane by lane log2(TILE_LANES) times
static inline void tile_transpose(real *to, size_t ldt, const real *x, size_t ldx) {
    TileVector rows[TILE_LANES], merged[TILE_LANES];
    TileMask low, high;
    for (int l = 0; l < TILE_LANES; l++)
        low[l] = l / 2 + l % 2 * TILE_LANES, high[l] = (TILE_LANES + l) / 2 + l % 2 * TILE_LANES;
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LANES; i++) rows[i] = *(const TileVector *)(const void *)(x + i * ldx);
#pragma GCC unroll 4
    for (int n = TILE_LANES; n > 1; n /= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < TILE_LANES; i++)
            merged[i] = tile_shuffle(rows[i / 2], rows[(TILE_LANES + i) / 2], i % 2 ? high : low);
#pragma GCC unroll 16
        for (int i = 0; i < TILE_LANES; i++) rows[i] = merged[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LANES; i++) *(TileVector *)(void *)(to + i * ldt) = rows[i];
}

// y[i] = a . B[i,:] for TILE_LANES rows of B;  a (K), B (TILE_LANES, K), K a multiple of TILE_LANES
static inline void tile_dots(real *y, const real *a, const real *B, size_t ldb, int K) {
    TileVector sum[TILE_LANES];
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LANES; i++) sum[i] = tile_zero;
    for (int k = 0; k < K; k += TILE_LANES) {
        TileVector x = *(const TileVector *)(const void *)(a + k);
#pragma GCC unroll 16
        for (int i = 0; i < TILE_LANES; i++) sum[i] += x * *(const TileVector *)(const void *)(B + i * ldb + k);
    }
#pragma GCC unroll 4
    for (int n = TILE_LANES / 2; n > 0; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) sum[i] = tile_pairs(sum[2 * i], sum[2 * i + 1]);
    *(TileVector *)(void *)y = sum[0];
}
