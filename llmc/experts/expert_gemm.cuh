/*
expert_gemm.cuh: the products of all experts in one launch. The rows of each expert are known to the device alone.

  by rows     C = A op(B_e): rows starts[e] .. starts[e+1]-1 of A and C belong to expert e. The grid has as many
              pieces as there may be; pieces beyond the last one end at once
  by weights  C_e = A^T B, or +=: sums over the rows of expert e; zeros for an expert without rows
  kernels     FP8, and bf16 rows that can be read in packs: tensor cores, pieces of 128 x 128, 32 numbers of bf16 or 64
              of FP8 deep, three of them in shared memory (48 KiB, two blocks per multiprocessor): two are copied while
              one is multiplied; each of four warps computes 64 x 64. Otherwise gemm_plain_piece
  limits      cycles of a piece: shared memory 384 (the warps read 32 KiB, 16 KiB are copied, 128 bytes a cycle); tensor
              cores 512 on sm_80, 256 on sm_90, 2048 on cards: at most 2/3 of the peak of sm_90. Warps of 64 x 32 would
              read 48 KiB: 512 cycles. Larger warp tiles do not fit: 64 x 64 sums take 128 registers of a thread
  FP8         all codes are contiguous along the sum, as mma.cuh requires: by weights the codes of the transposes, whose
              columns begin at a multiple of 16 for each expert (operations.h). A fragment of 4 codes of FP8 has the
              place of 2 numbers of bf16: only mma_fp8 differs, and the scales at the store
  rejected    cublasGemmGroupedBatchedEx (cuBLAS 13.1) takes the rows of each expert from the host: a copy and a
              synchronization in each layer.
              A launch per expert: 30b-a3b launches 6 E L = 36,864 products per step instead of 6 L = 288, and the host
              must know the rows, or each launch have the blocks of all R rows, E times as many.
              Groups padded to tiles in memory: the tiles waste the same FLOPs as here, 64 rows per expert on average
              (E/2 * 128 / R = 12.5% at 8,192 tokens, R = 65,536), but up to 127 E = 16,256 rows (25%) more of all
              activations are kept. Groups padded to the largest: the waste follows the load, 100% if one expert has
              twice the mean.
  open        cuDNN's MOE_GROUPED_MATMUL takes our `starts` on the device. 9.19 plans the forward for all devices, but
              not dx, whose weight is not contiguous along the sum, and has no dw, which requires 9.22 (dev/BENCH.md).
              CUTLASS's grouped GEMM reads the rows on the device, has all three products on sm_90 and sm_100, and would
              gain most on sm_100; to be measured there first (dev/BENCH.md)
  numerics    products exact, sums in fp32 in the order of the rows, one rounding at the store: the same bits for any
              order of blocks. Tensor cores with native FP8 may keep fewer bits of the sums
*/
#pragma once
#include "../cuda/async_copy.cuh"
#include "../cuda/gemm_plain.cuh"
#include "../cuda/mma.cuh"
#include "../ops/linear/fp8.cuh"

typedef struct {
    GemmShape shape;       // one expert's product, without M by rows, without K by weights. K, lda, ldb: in EXPERT_UNIT
    GemmOperands operands; // with FP8: B_scale of the first expert; in the header of each other one's codes
    const int *starts;     // (count+1)
    int count;
    size_t stride;       // bytes from one expert's B by rows, or C by weights, to the next
    bool by_rows, pairs; // pairs: two elements of C are stored at a time
} ExpertGemm;
// Bytes of one number of an operand in bf16 or fp32, or of two FP8 codes.
template <OperandType TYPE> constexpr size_t EXPERT_UNIT = TYPE == OPERAND_STORED ? sizeof(floatX) : 2;

// Finds the expert of a piece of `height` rows, and the piece's first row among the expert's rows; false: there is no
// such piece. Each warp counts the pieces of 32 experts at a time.
static __device__ inline bool expert_piece(const int *starts, int count, int piece, int height, int *expert, int *row) {
    int lane = (int)threadIdx.x % WARP;
    for (int e0 = 0; e0 < count; e0 += WARP) {
        int e = e0 + lane, pieces = e < count ? (starts[e + 1] - starts[e] + height - 1) / height : 0;
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
static inline unsigned expert_pieces(int R, int count, int height) { // at most
    int pieces = R / height + count;
    CHECK(pieces <= 65535, "%d rows of %d experts are too many for a launch: choose a smaller --batch-size", R, count);
    return (unsigned)pieces;
}

// Where the columns of expert e begin in transposed codes; start: the number of rows of the experts before it.
static __device__ inline size_t expert_code_column(int start, int e) {
    return (size_t)fp8_pad(start) + (size_t)e * FP8_ALIGN;
}

// A piece of one expert's product, which one block computes.
typedef struct {
    GemmShape s;
    const char *A, *B;
    char *C;
    float scale; // FP8
    int m0, n0;
} ExpertPiece;
template <OperandType TYPE>
static __device__ inline bool expert_find_piece(ExpertPiece *p, const ExpertGemm &g, void *C, int height, int width) {
    const size_t unit = EXPERT_UNIT<TYPE>;
    int e = (int)blockIdx.z;
    p->s = g.shape;
    p->n0 = (int)blockIdx.x * width;
    p->m0 = (int)blockIdx.y * height;
    if (g.by_rows && !expert_piece(g.starts, g.count, (int)blockIdx.y, height, &e, &p->m0)) return false;
    int start = g.starts[e], rows = g.starts[e + 1] - start;
    size_t stride = (size_t)e * g.stride;
    p->A = (const char *)g.operands.A;
    p->B = (const char *)g.operands.B;
    p->C = (char *)C;
    if (g.by_rows) {
        p->s.M = rows;
        p->A += (size_t)start * g.shape.lda * unit;
        p->B += stride;
        p->C += (size_t)start * g.shape.ldc * (g.shape.fp32_out ? sizeof(float) : sizeof(floatX));
    } else if (TYPE == OPERAND_STORED) {
        p->s.K = rows;
        p->A += (size_t)start * g.shape.lda * unit;
        p->B += (size_t)start * g.shape.ldb * unit;
        p->C += stride;
    } else {
        p->s.K = fp8_pad(rows) / 2;
        p->A += expert_code_column(start, e);
        p->B += expert_code_column(start, e);
        p->C += stride;
    }
    if (TYPE != OPERAND_STORED) {
        const float *of_b = (const float *)(const void *)((const char *)g.operands.B_scale + (g.by_rows ? stride : 0));
        p->scale = *g.operands.A_scale * *of_b;
    }
    return true;
}

static __global__ void __launch_bounds__(TILE_THREADS)
    expert_gemm_plain_kernel(ExpertGemm g, void *C, bool wide_a, bool wide_b) {
    SHARED(float4, operands4, TILE_OPERANDS / 4);
    ExpertPiece p;
    if (!expert_find_piece<OPERAND_STORED>(&p, g, C, TILE, TILE)) return;
    const floatX *A = (const floatX *)(const void *)p.A, *B = (const floatX *)(const void *)p.B;
    gemm_plain_piece(p.s, p.C, A, B, p.m0, p.n0, wide_a, wide_b, (float *)(void *)operands4);
}

// An operand's piece in shared memory: elements (i, k), i < EXPERT_TILE, k < EXPERT_DEPTH, in packs of 8 elements that
// are contiguous in device memory; an element is a number of bf16 or a pair of codes. By rows: 4 packs along k for
// each i; by columns: 16 packs along i for each k. The packs of a row are permuted, so that the 8 rows of a matrix of
// ldmatrix are in different banks: two rows by rows, or half a row by columns, are the 128 bytes of all banks.
enum { EXPERT_TILE = 128, EXPERT_DEPTH = 32, EXPERT_STAGES = 3, EXPERT_THREADS = 128 };
enum { EXPERT_PACKS = EXPERT_TILE * EXPERT_DEPTH / 8, EXPERT_COPIES = EXPERT_PACKS / EXPERT_THREADS };
template <bool BY_COLUMNS> static __device__ inline int expert_pack(int i, int k) {
    if (BY_COLUMNS) return k * (EXPERT_TILE / 8) + ((i / 8) ^ (k % 8));
    return i * (EXPERT_DEPTH / 8) + ((k / 8) ^ (i / 2 % 4));
}

// A thread copies four packs of each piece of an operand, which are EXPERT_THREADS packs apart in shared memory, and 32
// rows i or 8 columns k in device memory. All that does not change from piece to piece is computed before the loop.
template <bool BY_COLUMNS> struct ExpertCopies {
    enum {
        ROWS = BY_COLUMNS ? 0 : EXPERT_TILE / EXPERT_COPIES,
        COLUMNS = BY_COLUMNS ? EXPERT_DEPTH / EXPERT_COPIES : 0
    };
    const char *from;          // the first pack of the next piece
    size_t apart, step;        // bytes to the second one, and to the next piece
    int rows_left, depth_left; // rows i and columns k from the first pack on: a pack beyond is zero
    int to;

    // x: an operand of `count` rows i and K columns k, from row i0 on
    __device__ ExpertCopies(const char *x, int ld, int i0, int count, int K) {
        int at = (int)threadIdx.x;
        int i = BY_COLUMNS ? at % (EXPERT_TILE / 8) * 8 : at / (EXPERT_DEPTH / 8);
        int k = BY_COLUMNS ? at / (EXPERT_TILE / 8) : at % (EXPERT_DEPTH / 8) * 8;
        from = x + 2 * (BY_COLUMNS ? (size_t)k * ld + i0 + i : (size_t)(i0 + i) * ld + k);
        apart = 2 * (size_t)(BY_COLUMNS ? COLUMNS : ROWS) * ld;
        step = 2 * (size_t)EXPERT_DEPTH * (BY_COLUMNS ? ld : 1);
        rows_left = count - i0 - i, depth_left = K - k;
        to = expert_pack<BY_COLUMNS>(i, k);
    }
    __device__ void start(uint4 *shared) {
        UNROLL
        for (int j = 0; j < EXPERT_COPIES; j++)
            copy_async(shared + to + j * EXPERT_THREADS, from + j * apart,
                       rows_left > j * ROWS && depth_left > j * COLUMNS);
        from += step, depth_left -= EXPERT_DEPTH;
    }
};

// The pack that a lane gives to ldmatrix for the fragments of elements (i + 0..15, 0..15). Fragments of a: [0] and [1]
// are rows i and i + 8 at k, [2] and [3] are the rows at k + 8. Fragments of b: [0] and [1] are columns k and k + 8,
// the registers of one product, [2] and [3] are the columns at row i + 8.
template <bool BY_COLUMNS, bool OF_B> static __device__ inline int expert_lane(int i) {
    int row = (int)threadIdx.x % 8, matrix = (int)threadIdx.x % WARP / 8, low = matrix % 2 * 8, high = matrix / 2 * 8;
    return expert_pack<BY_COLUMNS>(i + (OF_B ? high : low) + (BY_COLUMNS ? 0 : row),
                                   (OF_B ? low : high) + (BY_COLUMNS ? row : 0));
}
// The same fragments i rows and k columns further, multiples of 16, below 64 rows: the permuted bits are exchanged.
template <bool BY_COLUMNS>
static __device__ inline void expert_fragments(unsigned (&to)[4], const uint4 *shared, int lane, int i, int k) {
    int pack = BY_COLUMNS ? (lane ^ (i / 8)) + k * (EXPERT_TILE / 8) : (lane ^ (k / 8)) + i * (EXPERT_DEPTH / 8);
    matrices_load<BY_COLUMNS>(to, shared + pack);
}

// acc += the products of a warp: 64 rows of a by 64 rows of b
template <bool A_BY_COLUMNS, bool B_BY_COLUMNS, OperandType TYPE>
static __device__ inline void expert_multiply(float (&acc)[4][8][4], const uint4 *a, const uint4 *b, int a_lane,
                                              int b_lane) {
    UNROLL
    for (int k = 0; k < EXPERT_DEPTH; k += 16) {
        unsigned bs[4][4];
        UNROLL
        for (int n = 0; n < 4; n++) expert_fragments<B_BY_COLUMNS>(bs[n], b, b_lane, n * 16, k);
        UNROLL
        for (int m = 0; m < 4; m++) {
            unsigned as[4];
            expert_fragments<A_BY_COLUMNS>(as, a, a_lane, m * 16, k);
            UNROLL
            for (int n = 0; n < 8; n++) {
                unsigned pair[2] = {bs[n / 2][n % 2 * 2], bs[n / 2][n % 2 * 2 + 1]};
                if constexpr (TYPE == OPERAND_STORED) mma_bf16(acc[m][n], as, pair);
                else mma_fp8<TYPE>(acc[m][n], as, pair);
            }
        }
    }
}

static __device__ inline void expert_store(const GemmShape &s, void *C, int m, int n, float x, float y, bool pairs) {
    if (m >= s.M || n >= s.N) return;
    size_t at = (size_t)m * s.ldc + n;
    if (!pairs) {
        gemm_plain_store(s, C, m, n, x);
        gemm_plain_store(s, C, m, n + 1, y);
    } else if (s.fp32_out) {
        float2 *to = (float2 *)(void *)((float *)C + at), before = s.add ? *to : make_float2(0, 0);
        *to = make_float2(before.x + x, before.y + y);
    } else {
        *(unsigned *)(void *)((floatX *)C + at) = bf16_pair(x, y);
    }
}

template <bool A_BY_COLUMNS, bool B_BY_COLUMNS, OperandType TYPE>
static __global__ void __launch_bounds__(EXPERT_THREADS, 2) expert_gemm_mma_kernel(ExpertGemm g, void *C) {
    SHARED(uint4, shared, 2 * EXPERT_STAGES * EXPERT_PACKS);
    ExpertPiece p;
    if (!expert_find_piece<TYPE>(&p, g, C, EXPERT_TILE, EXPERT_TILE)) return;
    const GemmShape s = p.s;
    if (s.K == 0 && s.add) return; // nothing to add
    int warp = (int)threadIdx.x / WARP, m0 = warp / 2 * 64, n0 = warp % 2 * 64, stage = 0;
    float acc[4][8][4] = {{{0}}};
    int a_lane = expert_lane<A_BY_COLUMNS, false>(m0), b_lane = expert_lane<B_BY_COLUMNS, true>(n0);
    ExpertCopies<A_BY_COLUMNS> a_copies(p.A, s.lda, p.m0, s.M, s.K);
    ExpertCopies<B_BY_COLUMNS> b_copies(p.B, s.ldb, p.n0, s.N, s.K);
    auto fetch = [&](int to) { // a group of copies; zeros beyond K
        a_copies.start(shared + 2 * to * EXPERT_PACKS);
        b_copies.start(shared + (2 * to + 1) * EXPERT_PACKS);
        copy_commit();
    };
    for (int i = 0; i < EXPERT_STAGES - 1; i++) fetch(i);
    for (int k = 0; k < s.K; k += EXPERT_DEPTH) {
        copy_wait<EXPERT_STAGES - 2>(); // the copies of this stage are complete
        __syncthreads();                // waits for all threads' copies and for reads of the stage that is fetched next
        fetch(stage ? stage - 1 : EXPERT_STAGES - 1);
        const uint4 *a = shared + 2 * stage * EXPERT_PACKS;
        expert_multiply<A_BY_COLUMNS, B_BY_COLUMNS, TYPE>(acc, a, a + EXPERT_PACKS, a_lane, b_lane);
        stage = stage + 1 < EXPERT_STAGES ? stage + 1 : 0;
    }
    copy_wait<0>();
    int row = p.m0 + m0 + (int)threadIdx.x % WARP / 4, column = p.n0 + n0 + (int)threadIdx.x % 4 * 2;
    UNROLL
    for (int m = 0; m < 4; m++) {
        UNROLL
        for (int n = 0; n < 8; n++) {
            float(&c)[4] = acc[m][n];
            UNROLL
            for (int i = 0; i < 4 && TYPE != OPERAND_STORED; i++) c[i] *= p.scale;
            expert_store(s, p.C, row + m * 16, column + n * 8, c[0], c[1], g.pairs);
            expert_store(s, p.C, row + m * 16 + 8, column + n * 8, c[2], c[3], g.pairs);
        }
    }
}

// R: rows of all experts; the other arguments are members of ExpertGemm
static inline void expert_gemm(void *C, GemmShape s, GemmOperands operands, const int *starts, int count, size_t stride,
                               int R) {
    ExpertGemm g = {s, operands, starts, count, stride, s.M == 0, false};
    const OperandType type = operands.types[0];
    const void *A = operands.A, *B = operands.B;
    const bool fp8 = type != OPERAND_STORED;
    const size_t size = s.fp32_out ? sizeof(float) : sizeof(floatX);
    int inner = g.by_rows ? s.K : s.M; // contiguous or strided, a multiple of a pack for tensor cores
    bool wide_a = packed(s.lda, A) && packed(inner), wide_b = packed(s.ldb, B) && packed(s.N) && packed(inner);
    wide_b = wide_b && g.stride % 16 == 0;
    bool tensor_cores = fp8 || (sizeof(floatX) == 2 && wide_a && wide_b && (uintptr_t)C % 16 == 0 && s.ldc % 8 == 0);
    g.pairs =
        s.N % 2 == 0 && s.ldc % 2 == 0 && (uintptr_t)C % (2 * size) == 0 && (g.by_rows || g.stride % (2 * size) == 0);
    int piece = tensor_cores ? (int)EXPERT_TILE : (int)TILE;
    unsigned columns = blocks_of((size_t)s.N, (size_t)piece);
    dim3 grid(columns, g.by_rows ? expert_pieces(R, g.count, piece) : blocks_of((size_t)s.M, (size_t)piece),
              g.by_rows ? 1u : (unsigned)g.count);
    auto forward = expert_gemm_mma_kernel<false, false, OPERAND_STORED>,
         to_input = expert_gemm_mma_kernel<false, true, OPERAND_STORED>,
         to_weight = expert_gemm_mma_kernel<true, true, OPERAND_STORED>,
         forward_fp8 = expert_gemm_mma_kernel<false, false, OPERAND_E4M3>,
         backward_fp8 = expert_gemm_mma_kernel<false, false, OPERAND_E5M2>;
    assert(!(s.transpose_a && s.transpose_b) && (!fp8 || (s.transpose_b && (uintptr_t)A % 16 == 0)));
    if (type == OPERAND_E4M3) LAUNCH(forward_fp8, grid, EXPERT_THREADS, 0, g, C);
    else if (fp8) LAUNCH(backward_fp8, grid, EXPERT_THREADS, 0, g, C);
    else if (tensor_cores && s.transpose_b) LAUNCH(forward, grid, EXPERT_THREADS, 0, g, C);
    else if (tensor_cores && !s.transpose_a) LAUNCH(to_input, grid, EXPERT_THREADS, 0, g, C);
    else if (tensor_cores) LAUNCH(to_weight, grid, EXPERT_THREADS, 0, g, C);
    else LAUNCH(expert_gemm_plain_kernel, grid, TILE_THREADS, 0, g, C, wide_a, wide_b);
}
