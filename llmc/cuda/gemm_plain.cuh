/*
gemm_plain.cuh: matrix products of any shape, stride and alignment, for products that the library refuses.

  mapping   a block of 256 threads per 64 x 64 piece of C, by the tiles of tile.cuh; no tensor cores
  numerics  products and sums in fp32, in the order of k, one rounding at the store
  traffic   A is read N/64 times, B M/64 times
*/
#pragma once
#include "gemm_shape.cuh"
#include "tile.cuh"

// to[d,i] = element (i0 + i, k0 + d) of an operand with `count` rows and K columns, d < TILE_DEPTH. The operand is
// stored by rows or by columns.
static __device__ inline void gemm_plain_load(float *to, const floatX *x, int ld, int i0, int count, int k0, int K,
                                              bool by_columns, bool wide) {
    if (!by_columns) {
        tile_load_transposed(to, tile_rows(x, i0, count, ld, K, wide), k0);
        return;
    }
    int d = (int)threadIdx.x / 8, i = (int)threadIdx.x % 8 * 8; // 32 x 8 threads
    float v[8];
    tile_load8(v, tile_rows(x, k0, K, ld, count, wide), d, i0 + i);
    store_fp32<8>(to + d * TILE_LD + i, v);
}

static __device__ inline void gemm_plain_store(GemmShape s, void *C, int m, int n, float sum) {
    if (m >= s.M || n >= s.N) return;
    size_t at = (size_t)m * s.ldc + n;
    if (s.fp32_out) {
        float *to = (float *)C + at;
        *to = sum + (s.add ? *to : 0);
    } else {
        floatX *to = (floatX *)C + at;
        round_to(to, sum + (s.add ? to_float(*to) : 0));
    }
}

// Computes the piece of C that begins at (m0, n0), by a block. operands: TILE_OPERANDS shared numbers
static __device__ inline void gemm_plain_piece(GemmShape s, void *C, const floatX *A, const floatX *B, int m0, int n0,
                                               bool wide_a, bool wide_b, float *operands) {
    float *a = operands, *b = a + TILE_DEPTH * TILE_LD, acc[1][4][4];
    tile_clear<1>(acc);
    for (int k0 = 0; k0 < s.K; k0 += TILE_DEPTH) {
        __syncthreads(); // earlier reads of the operands are complete
        gemm_plain_load(a, A, s.lda, m0, s.M, k0, s.K, s.transpose_a, wide_a);
        gemm_plain_load(b, B, s.ldb, n0, s.N, k0, s.K, !s.transpose_b, wide_b);
        __syncthreads();
        tile_multiply<TILE_DEPTH>(acc[0], a, b);
    }
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 4; c++)
            gemm_plain_store(s, C, m0 + (int)threadIdx.x / 16 * 4 + r, n0 + (int)threadIdx.x % 16 * 4 + c,
                             acc[0][r][c]);
}

static __global__ void __launch_bounds__(TILE_THREADS)
    gemm_plain_kernel(GemmShape s, void *C, const floatX *A, const floatX *B, bool wide_a, bool wide_b) {
    SHARED(float4, operands4, TILE_OPERANDS / 4);
    int columns = (s.N + TILE - 1) / TILE, m0 = (int)blockIdx.x / columns * TILE, n0 = (int)blockIdx.x % columns * TILE;
    gemm_plain_piece(s, C, A, B, m0, n0, wide_a, wide_b, (float *)(void *)operands4);
}

static inline void gemm_plain(GemmShape s, void *C, const floatX *A, const floatX *B) {
    assert(s.M > 0 && s.N > 0 && s.K > 0);
    bool wide_a = packed(s.lda, A) && packed((s.transpose_a ? s.M : s.K));
    bool wide_b = packed(s.ldb, B) && packed((s.transpose_b ? s.K : s.N));
    size_t pieces = (size_t)((s.M + TILE - 1) / TILE) * ((s.N + TILE - 1) / TILE);
    LAUNCH(gemm_plain_kernel, blocks_of(pieces, 1), TILE_THREADS, 0, s, C, A, B, wide_a, wide_b);
}
