/*
expert_gemm.cuh: the products of all experts in one launch. The rows of each expert are known to the device alone.

  by rows     C = A op(B_e): rows starts[e] .. starts[e+1]-1 of A and C are those of expert e. The grid has as many pieces
              as there may be; those beyond the last one end at once
  by weights  C_e = A^T B, or +=: sums over the rows of expert e; zeros for an expert without rows
  kernels     bf16 rows that can be read in packs: tensor cores, pieces of 128 x 128, 32 numbers deep, the next operands
              loaded into registers during the products; otherwise gemm_plain_piece
  numerics    products exact, sums in fp32 in the order of the rows, one rounding at the store: the same bits for any
              order of blocks
*/
#ifndef LLMC_EXPERT_GEMM_CUH
#define LLMC_EXPERT_GEMM_CUH
#include "../cuda/gemm_plain.cuh"
#include "../cuda/mma.cuh"

typedef struct {
    GemmShape shape;   // of one expert; by rows without M, by weights without K
    const int *starts; // (count+1)
    int count;
    size_t stride; // elements from one expert's weight, or gradient, to the next
    bool by_rows;
} ExpertGemm;

// The expert and the first row, within its rows, of a piece of `height` rows; false: there is no such piece.
static __device__ inline bool expert_piece(const ExpertGemm &g, int piece, int height, int *expert, int *row) {
    for (int e = 0; e < g.count; e++) {
        int pieces = (g.starts[e + 1] - g.starts[e] + height - 1) / height;
        if (piece < pieces) {
            *expert = e, *row = piece * height;
            return true;
        }
        piece -= pieces;
    }
    return false;
}
static inline unsigned expert_pieces(const ExpertGemm &g, int R, int height) { // of rows, at most
    return (unsigned)(R / height + g.count);
}

// What a block computes: a piece of one expert's product.
typedef struct {
    GemmShape s;
    const floatX *A, *B;
    void *C;
    int m0, n0;
} ExpertPiece;
static __device__ inline bool expert_find_piece(ExpertPiece *p, const ExpertGemm &g, void *C, const floatX *A,
                                                const floatX *B, int height, int width) {
    int e = (int)blockIdx.z;
    p->s = g.shape;
    p->n0 = (int)blockIdx.x * width;
    p->m0 = (int)blockIdx.y * height;
    if (g.by_rows && !expert_piece(g, (int)blockIdx.y, height, &e, &p->m0)) return false;
    size_t first = (size_t)g.starts[e], stride = (size_t)e * g.stride, size = g.shape.fp32_out ? 4 : sizeof(floatX);
    int rows = g.starts[e + 1] - g.starts[e];
    p->A = A + first * g.shape.lda;
    if (g.by_rows) {
        p->s.M = rows;
        p->B = B + stride;
        p->C = (char *)C + first * g.shape.ldc * size;
    } else {
        p->s.K = rows;
        p->B = B + first * g.shape.ldb;
        p->C = (char *)C + stride * size;
    }
    return true;
}

static __global__ void __launch_bounds__(TILE_THREADS)
    expert_gemm_plain_kernel(ExpertGemm g, void *C, const floatX *A, const floatX *B, bool wide_a, bool wide_b) {
    SHARED(float4, operands4, TILE_OPERANDS / 4);
    ExpertPiece p;
    if (!expert_find_piece(&p, g, C, A, B, TILE, TILE)) return;
    gemm_plain_piece(p.s, p.C, p.A, p.B, p.m0, p.n0, wide_a, wide_b, (float *)(void *)operands4);
}

// Shared operands: element (i, k) at i * EXPERT_LD + k; the stride avoids bank conflicts of the fragments.
enum { EXPERT_TILE = 128, EXPERT_DEPTH = 32, EXPERT_LD = EXPERT_DEPTH + 8, EXPERT_THREADS = 256, EXPERT_PACKS = 2 };

// The packs of a thread of the operand's elements (i0 + i, k0 + k), which has `count` rows i and K columns k and is stored
// by rows or by columns.
static __device__ inline void expert_fetch(uint4 (&to)[EXPERT_PACKS], const floatX *x, int ld, int i0, int count,
                                           int k0, int K, bool by_columns) {
    UNROLL
    for (int p = 0; p < EXPERT_PACKS; p++) {
        int at = (int)threadIdx.x + p * EXPERT_THREADS;
        int i = i0 + (by_columns ? at % (EXPERT_TILE / 8) * 8 : at / (EXPERT_DEPTH / 8));
        int k = k0 + (by_columns ? at / (EXPERT_TILE / 8) : at % (EXPERT_DEPTH / 8) * 8);
        to[p] = make_uint4(0, 0, 0, 0);
        if (i < count && k < K)
            to[p] = *(const uint4 *)(const void *)(x + (by_columns ? (size_t)k * ld + i : (size_t)i * ld + k));
    }
}
static __device__ inline void expert_put(unsigned short *shared, const uint4 (&from)[EXPERT_PACKS], bool by_columns) {
    UNROLL
    for (int p = 0; p < EXPERT_PACKS; p++) {
        int at = (int)threadIdx.x + p * EXPERT_THREADS;
        if (!by_columns) {
            int i = at / (EXPERT_DEPTH / 8), k = at % (EXPERT_DEPTH / 8) * 8;
            *(uint4 *)(void *)(shared + i * EXPERT_LD + k) = from[p];
            continue;
        }
        int i = at % (EXPERT_TILE / 8) * 8, k = at / (EXPERT_TILE / 8);
        unsigned short x[8];
        memcpy(x, &from[p], sizeof(x));
        UNROLL
        for (int c = 0; c < 8; c++) shared[(i + c) * EXPERT_LD + k] = x[c];
    }
}
static __device__ inline unsigned expert_pair(const unsigned short *shared, int i, int k) {
    return *(const unsigned *)(const void *)(shared + i * EXPERT_LD + k);
}

// acc += the products of a warp: 64 rows of a by 32 rows of b
static __device__ inline void expert_multiply(float (&acc)[4][4][4], const unsigned short *a, const unsigned short *b) {
    int g = (int)threadIdx.x % WARP / 4, r = (int)threadIdx.x % 4 * 2;
    UNROLL
    for (int k = 0; k < EXPERT_DEPTH; k += 16) {
        unsigned bs[4][2];
        UNROLL
        for (int n = 0; n < 4; n++) {
            bs[n][0] = expert_pair(b, n * 8 + g, k + r);
            bs[n][1] = expert_pair(b, n * 8 + g, k + r + 8);
        }
        UNROLL
        for (int m = 0; m < 4; m++) {
            unsigned as[4] = {expert_pair(a, m * 16 + g, k + r), expert_pair(a, m * 16 + g + 8, k + r),
                              expert_pair(a, m * 16 + g, k + r + 8), expert_pair(a, m * 16 + g + 8, k + r + 8)};
            UNROLL
            for (int n = 0; n < 4; n++) mma_bf16(acc[m][n], as, bs[n]);
        }
    }
}

static __device__ inline void expert_store(const GemmShape &s, void *C, int m, int n, float x, float y) {
    if (m >= s.M || n >= s.N) return;
    size_t at = (size_t)m * s.ldc + n;
    if (s.fp32_out) {
        float2 *to = (float2 *)(void *)((float *)C + at), before = s.add ? *to : make_float2(0, 0);
        *to = make_float2(before.x + x, before.y + y);
    } else {
        *(unsigned *)(void *)((floatX *)C + at) = bf16_pair(x, y);
    }
}

static __global__ void __launch_bounds__(EXPERT_THREADS)
    expert_gemm_mma_kernel(ExpertGemm g, void *C, const floatX *A, const floatX *B) {
    SHARED(uint4, shared4, 2 * EXPERT_TILE * EXPERT_LD / 8);
    unsigned short *a = (unsigned short *)(void *)shared4, *b = a + EXPERT_TILE * EXPERT_LD;
    ExpertPiece p;
    if (!expert_find_piece(&p, g, C, A, B, EXPERT_TILE, EXPERT_TILE)) return;
    const GemmShape s = p.s;
    int warp = (int)threadIdx.x / WARP, m0 = warp / 4 * 64, n0 = warp % 4 * 32;
    float acc[4][4][4] = {{{0}}};
    uint4 next_a[EXPERT_PACKS], next_b[EXPERT_PACKS];
    expert_fetch(next_a, p.A, s.lda, p.m0, s.M, 0, s.K, s.transpose_a);
    expert_fetch(next_b, p.B, s.ldb, p.n0, s.N, 0, s.K, !s.transpose_b);
    for (int k = 0; k < s.K; k += EXPERT_DEPTH) {
        __syncthreads(); // earlier reads of the operands are complete
        expert_put(a, next_a, s.transpose_a);
        expert_put(b, next_b, !s.transpose_b);
        __syncthreads();
        expert_fetch(next_a, p.A, s.lda, p.m0, s.M, k + EXPERT_DEPTH, s.K, s.transpose_a);
        expert_fetch(next_b, p.B, s.ldb, p.n0, s.N, k + EXPERT_DEPTH, s.K, !s.transpose_b);
        expert_multiply(acc, a + m0 * EXPERT_LD, b + n0 * EXPERT_LD);
    }
    int row = p.m0 + m0 + (int)threadIdx.x % WARP / 4, column = p.n0 + n0 + (int)threadIdx.x % 4 * 2;
    UNROLL
    for (int m = 0; m < 4; m++) {
        UNROLL
        for (int n = 0; n < 4; n++) {
            expert_store(s, p.C, row + m * 16, column + n * 8, acc[m][n][0], acc[m][n][1]);
            expert_store(s, p.C, row + m * 16 + 8, column + n * 8, acc[m][n][2], acc[m][n][3]);
        }
    }
}

// R: rows of all experts
static inline void expert_gemm(ExpertGemm g, void *C, const floatX *A, const floatX *B, int R) {
    const GemmShape s = g.shape;
    int inner = g.by_rows ? s.K : s.M; // contiguous or strided, a multiple of a pack for tensor cores
    bool wide_a = packed(s.lda, A) && packed(inner), wide_b = packed(s.ldb, B) && packed(s.N) && packed(inner);
    wide_b = wide_b && packed(g.stride);
    bool tensor_cores = sizeof(floatX) == 2 && wide_a && wide_b && (uintptr_t)C % 16 == 0 && s.ldc % 8 == 0;
    int piece = tensor_cores ? (int)EXPERT_TILE : (int)TILE;
    unsigned columns = blocks_of((size_t)s.N, (size_t)piece);
    dim3 grid(columns, g.by_rows ? expert_pieces(g, R, piece) : blocks_of((size_t)s.M, (size_t)piece),
              g.by_rows ? 1u : (unsigned)g.count);
    if (tensor_cores) LAUNCH(expert_gemm_mma_kernel, grid, EXPERT_THREADS, 0, g, C, A, B);
    else LAUNCH(expert_gemm_plain_kernel, grid, TILE_THREADS, 0, g, C, A, B, wide_a, wide_b);
}
#endif
