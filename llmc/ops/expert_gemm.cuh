/*
expert_gemm.cuh: the products of all experts in one launch. The rows of each expert are known to the device alone.

  by rows     C = A op(B_e): rows starts[e] .. starts[e+1]-1 of A and C are those of expert e. The grid has as many
              pieces as there may be; those beyond the last one end at once
  by weights  C_e = A^T B, or +=: sums over the rows of expert e; zeros for an expert without rows
  kernels     bf16 rows that can be read in packs: tensor cores, pieces of 128 x 128, 32 numbers deep, three of them in
              shared memory (48 KiB, two blocks per multiprocessor): two are copied while one is multiplied; a warp
              computes 64 x 32. Otherwise gemm_plain_piece
  rejected    cublasGemmGroupedBatchedEx (cuBLAS 13.1) takes the rows of each expert from the host: a copy and a
              synchronization in each layer. cublasLt.h 13.1 has no grouped layout.
              A launch per expert: 30b-a3b launches 6 E L = 36,864 products per step instead of 6 L = 288, and the host
              must know the rows, or each launch have the blocks of all R rows, E times as many.
              Groups padded to tiles in memory: the tiles waste the same FLOPs as here, 64 rows per expert on average
              (E/2 * 128 / R = 12.5% at 8,192 tokens, R = 65,536), but up to 127 E = 16,256 rows (25%) more of all
              activations are kept. Groups padded to the largest: the waste is that of the load, 100% if one expert has
              twice the mean.
  numerics    products exact, sums in fp32 in the order of the rows, one rounding at the store: the same bits for any
              order of blocks
*/
#ifndef LLMC_EXPERT_GEMM_CUH
#define LLMC_EXPERT_GEMM_CUH
#include "../cuda/async_copy.cuh"
#include "../cuda/gemm_plain.cuh"
#include "../cuda/mma.cuh"

typedef struct {
    GemmShape shape;   // of one expert; by rows without M, by weights without K
    const int *starts; // (count+1)
    int count;
    size_t stride; // elements from one expert's weight, or gradient, to the next
    bool by_rows;
} ExpertGemm;

// The expert and the first row, within its rows, of a piece of `height` rows; false: there is no such piece. Each warp
// counts the pieces of 32 experts at a time.
static __device__ inline bool expert_piece(const ExpertGemm &g, int piece, int height, int *expert, int *row) {
    int lane = (int)threadIdx.x % WARP;
    for (int e0 = 0; e0 < g.count; e0 += WARP) {
        int e = e0 + lane, pieces = e < g.count ? (g.starts[e + 1] - g.starts[e] + height - 1) / height : 0;
        int end = pieces;
        for (int distance = 1; distance < WARP; distance *= 2) {
            int lower = __shfl_up_sync(ALL_LANES, end, distance);
            if (lane >= distance) end += lower;
        }
        unsigned after = __ballot_sync(ALL_LANES, piece < end); // the lane of the piece and all higher ones
        int first = (WARP - __popc(after)) % WARP;
        int before = __shfl_sync(ALL_LANES, end - pieces, first);
        if (after) {
            *expert = e0 + first, *row = (piece - before) * height;
            return true;
        }
        piece -= __shfl_sync(ALL_LANES, end, WARP - 1);
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

// An operand's piece in shared memory: elements (i, k), i < EXPERT_TILE, k < EXPERT_DEPTH, in packs of 8 numbers that
// are contiguous in device memory. By rows: 4 packs along k for each i; by columns: 16 packs along i for each k. The
// packs of a row are permuted, so that the 8 rows of a matrix of ldmatrix are in different banks: two rows by rows, or
// half a row by columns, are the 128 bytes of all banks.
enum { EXPERT_TILE = 128, EXPERT_DEPTH = 32, EXPERT_STAGES = 3, EXPERT_THREADS = 256 };
enum { EXPERT_PACKS = EXPERT_TILE * EXPERT_DEPTH / 8 };
template <bool BY_COLUMNS> static __device__ inline int expert_pack(int i, int k) {
    if (BY_COLUMNS) return k * (EXPERT_TILE / 8) + ((i / 8) ^ (k % 8));
    return i * (EXPERT_DEPTH / 8) + ((k / 8) ^ (i / 2 % 4));
}

// Starts the copies of the elements (i0 + i, k0 + k) of an operand of `count` rows i and K columns k.
template <bool BY_COLUMNS>
static __device__ inline void expert_fetch(uint4 *shared, const floatX *x, int ld, int i0, int count, int k0, int K) {
    UNROLL
    for (int at = (int)threadIdx.x; at < EXPERT_PACKS; at += EXPERT_THREADS) {
        int i = BY_COLUMNS ? at % (EXPERT_TILE / 8) * 8 : at / (EXPERT_DEPTH / 8);
        int k = BY_COLUMNS ? at / (EXPERT_TILE / 8) : at % (EXPERT_DEPTH / 8) * 8;
        bool valid = i0 + i < count && k0 + k < K;
        size_t from = BY_COLUMNS ? (size_t)(k0 + k) * ld + i0 + i : (size_t)(i0 + i) * ld + k0 + k;
        copy_async(shared + expert_pack<BY_COLUMNS>(i, k), x + (valid ? from : 0), valid);
    }
}

// The fragments of elements (i + 0..15, k + 0..15): [0] and [1] rows i and i + 8, [2] and [3] the same at k + 8.
template <bool BY_COLUMNS>
static __device__ inline void expert_fragments(unsigned (&to)[4], const uint4 *shared, int i, int k) {
    int row = (int)threadIdx.x % 8, matrix = (int)threadIdx.x % WARP / 8;
    i += matrix % 2 * 8 + (BY_COLUMNS ? 0 : row);
    k += matrix / 2 * 8 + (BY_COLUMNS ? row : 0);
    matrices_load<BY_COLUMNS>(to, shared + expert_pack<BY_COLUMNS>(i, k));
}

// acc += the products of a warp: 64 rows of a from m0 by 32 rows of b from n0
template <bool A_BY_COLUMNS, bool B_BY_COLUMNS>
static __device__ inline void expert_multiply(float (&acc)[4][4][4], const uint4 *a, const uint4 *b, int m0, int n0) {
    UNROLL
    for (int k = 0; k < EXPERT_DEPTH; k += 16) {
        unsigned bs[2][4];
        UNROLL
        for (int n = 0; n < 2; n++) expert_fragments<B_BY_COLUMNS>(bs[n], b, n0 + n * 16, k);
        UNROLL
        for (int m = 0; m < 4; m++) {
            unsigned as[4];
            expert_fragments<A_BY_COLUMNS>(as, a, m0 + m * 16, k);
            UNROLL
            for (int n = 0; n < 4; n++) {
                unsigned pair[2] = {bs[n / 2][n % 2], bs[n / 2][n % 2 + 2]};
                mma_bf16(acc[m][n], as, pair);
            }
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

template <bool A_BY_COLUMNS, bool B_BY_COLUMNS>
static __global__ void __launch_bounds__(EXPERT_THREADS, 2)
    expert_gemm_mma_kernel(ExpertGemm g, void *C, const floatX *A, const floatX *B) {
    SHARED(uint4, shared, 2 * EXPERT_STAGES * EXPERT_PACKS);
    ExpertPiece p;
    if (!expert_find_piece(&p, g, C, A, B, EXPERT_TILE, EXPERT_TILE)) return;
    const GemmShape s = p.s;
    if (s.K == 0 && s.add) return; // nothing to add
    int warp = (int)threadIdx.x / WARP, m0 = warp / 4 * 64, n0 = warp % 4 * 32, stage = 0;
    float acc[4][4][4] = {{{0}}};
    auto fetch = [&](int to, int k) { // a group of copies, empty beyond K
        uint4 *a = shared + 2 * to * EXPERT_PACKS, *b = a + EXPERT_PACKS;
        if (k < s.K) {
            expert_fetch<A_BY_COLUMNS>(a, p.A, s.lda, p.m0, s.M, k, s.K);
            expert_fetch<B_BY_COLUMNS>(b, p.B, s.ldb, p.n0, s.N, k, s.K);
        }
        copy_commit();
    };
    for (int i = 0; i < EXPERT_STAGES - 1; i++) fetch(i, i * EXPERT_DEPTH);
    for (int k = 0; k < s.K; k += EXPERT_DEPTH) {
        copy_wait<EXPERT_STAGES - 2>(); // the copies of this stage are complete
        __syncthreads();                // those of all threads; and earlier reads of the stage that is fetched next
        fetch(stage ? stage - 1 : EXPERT_STAGES - 1, k + (EXPERT_STAGES - 1) * EXPERT_DEPTH);
        const uint4 *a = shared + 2 * stage * EXPERT_PACKS;
        expert_multiply<A_BY_COLUMNS, B_BY_COLUMNS>(acc, a, a + EXPERT_PACKS, m0, n0);
        stage = stage + 1 < EXPERT_STAGES ? stage + 1 : 0;
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
    auto forward = expert_gemm_mma_kernel<false, false>, to_input = expert_gemm_mma_kernel<false, true>,
         to_weight = expert_gemm_mma_kernel<true, true>;
    assert(!(s.transpose_a && s.transpose_b));
    if (tensor_cores && s.transpose_b) LAUNCH(forward, grid, EXPERT_THREADS, 0, g, C, A, B);
    else if (tensor_cores && !s.transpose_a) LAUNCH(to_input, grid, EXPERT_THREADS, 0, g, C, A, B);
    else if (tensor_cores) LAUNCH(to_weight, grid, EXPERT_THREADS, 0, g, C, A, B);
    else LAUNCH(expert_gemm_plain_kernel, grid, TILE_THREADS, 0, g, C, A, B, wide_a, wide_b);
}
#endif
