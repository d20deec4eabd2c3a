/*
tile.cuh: products of 64 x 64 tiles by a block of 256 threads, for attention_kernels.cuh and gemm_plain.cuh.

  tile_dot         acc (64,64) += A B^T       A (64,width), B (64,width): rows of q, k, v or dO in device memory
  tile_accumulate  out (64,width) += P^T X    P (64,64) in shared memory, X (64,width)

Thread (y,x) of 16 x 16 holds rows 4y .. 4y+3 and columns 4x .. 4x+3 of every 64 x 64 piece in registers. Both products
copy a piece of the operands to shared memory as fp32, with zeros for missing rows and columns, and read it in vectors
of four numbers.

Shared memory holds either the two operands of tile_dot, (TILE_DEPTH, TILE_LD) each, transposed, or X, (TILE, TILE_LD).
*/
#pragma once
#include "kernel_utils.cuh"

enum { TILE = 64, TILE_DEPTH = 32, TILE_LD = TILE + 4, TILE_THREADS = 256 };
enum { TILE_OPERANDS = 2 * TILE_DEPTH * TILE_LD, TILE_SCORES = TILE * TILE_LD }; // floats

// At most TILE rows of a matrix in device memory.
typedef struct {
    const floatX *first;
    int ld, count, width;
    bool wide; // can be loaded in packs of 16 bytes
} TileRows;

static __device__ inline TileRows tile_rows(const floatX *x, int t0, int end, int ld, int width, bool wide) {
    TileRows rows;
    rows.first = x + (size_t)t0 * ld;
    rows.ld = ld;
    rows.count = min(TILE, end - t0);
    rows.width = width;
    rows.wide = wide;
    return rows;
}

// v[0..7] = row i, columns c .. c+7, 0 for missing elements
static __device__ inline void tile_load8(float *v, TileRows x, int i, int c) {
    const floatX *from = x.first + (size_t)i * x.ld + c;
    if (x.wide && i < x.count && c + 8 <= x.width) {
        UNROLL
        for (int k = 0; k < 8; k += PACK) load<PACK>(v + k, from + k);
    } else {
        UNROLL
        for (int k = 0; k < 8; k++) v[k] = i < x.count && c + k < x.width ? to_float(from[k]) : 0;
    }
}

// to[d,i] = x[i, c0 + d], d < TILE_DEPTH
static __device__ inline void tile_load_transposed(float *to, TileRows x, int c0) {
    int i = (int)threadIdx.x % TILE, d = (int)threadIdx.x / TILE * 8; // 64 x 4 threads
    float v[8];
    tile_load8(v, x, i, c0 + d);
    UNROLL
    for (int k = 0; k < 8; k++) to[(d + k) * TILE_LD + i] = v[k];
}

// to[i,c] = x[i, c0 + c], c < TILE
static __device__ inline void tile_load_rows(float *to, TileRows x, int c0) {
    int c = (int)threadIdx.x % 8 * 8; // 32 x 8 threads
    for (int i = (int)threadIdx.x / 8; i < TILE; i += TILE_THREADS / 8) {
        float v[8];
        tile_load8(v, x, i, c0 + c);
        store_fp32<8>(to + i * TILE_LD + c, v);
    }
}

// acc[r,c] += sum_d a[d, 4y + r] b[d, 4x + c]
template <int DEPTH> static __device__ inline void tile_multiply(float (&acc)[4][4], const float *a, const float *b) {
    const float *ay = a + threadIdx.x / 16 * 4, *bx = b + threadIdx.x % 16 * 4;
    for (int d = 0; d < DEPTH; d++) {
        float u[4], v[4];
        load_fp32<4>(u, ay + d * TILE_LD);
        load_fp32<4>(v, bx + d * TILE_LD);
        UNROLL
        for (int r = 0; r < 4; r++) {
            UNROLL
            for (int c = 0; c < 4; c++) acc[r][c] += u[r] * v[c];
        }
    }
}

static __device__ inline void tile_dot(float (&acc)[4][4], TileRows a, TileRows b, float *operands) {
    for (int c0 = 0; c0 < a.width; c0 += TILE_DEPTH) {
        __syncthreads(); // earlier reads of the operands are complete
        tile_load_transposed(operands, a, c0);
        tile_load_transposed(operands + TILE_DEPTH * TILE_LD, b, c0);
        __syncthreads();
        tile_multiply<TILE_DEPTH>(acc, operands, operands + TILE_DEPTH * TILE_LD);
    }
}

// Piece c of out has columns 64c .. 64c+63. p[j,i]: row i of out, row j of x.
template <int PIECES>
static __device__ inline void tile_accumulate(float (&out)[PIECES][4][4], const float *p, TileRows x, float *operands) {
    UNROLL
    for (int piece = 0; piece < PIECES; piece++) {
        if (piece * TILE >= x.width) break;
        __syncthreads(); // p is written, and earlier reads of the operands are complete
        tile_load_rows(operands, x, piece * TILE);
        __syncthreads();
        tile_multiply<TILE>(out[piece], p, operands);
    }
}

// p[4x + c, 4y + r] = acc[r,c], the layout of tile_accumulate
static __device__ inline void tile_store_scores(float *p, const float (&acc)[4][4]) {
    float *to = p + threadIdx.x % 16 * 4 * TILE_LD + threadIdx.x / 16 * 4;
    UNROLL
    for (int c = 0; c < 4; c++) {
        float column[4] = {acc[0][c], acc[1][c], acc[2][c], acc[3][c]};
        store_fp32<4>(to + c * TILE_LD, column);
    }
}

// rows[4y + r, :] = factor[r] out, or with add +=
template <int PIECES>
static __device__ inline void tile_write(floatX *rows, int ld, int count, int width, const float (&out)[PIECES][4][4],
                                         const float (&factor)[4], bool add) {
    int i0 = (int)threadIdx.x / 16 * 4, c0 = (int)threadIdx.x % 16 * 4;
    UNROLL
    for (int piece = 0; piece < PIECES; piece++) {
        UNROLL
        for (int r = 0; r < 4; r++) {
            UNROLL
            for (int c = 0; c < 4; c++) {
                int i = i0 + r, column = piece * TILE + c0 + c;
                if (i >= count || column >= width) continue;
                floatX *to = rows + (size_t)i * ld + column;
                round_to(to, factor[r] * out[piece][r][c] + (add ? to_float(*to) : 0));
            }
        }
    }
}

template <int PIECES> static __device__ inline void tile_clear(float (&out)[PIECES][4][4]) {
    UNROLL
    for (int piece = 0; piece < PIECES; piece++) {
        UNROLL
        for (int r = 0; r < 4; r++) {
            UNROLL
            for (int c = 0; c < 4; c++) out[piece][r][c] = 0;
        }
    }
}
