/*
attention_mma.cuh: attention's forward on the tensor cores, for bf16 storage (sm_80 and later). Equations in attention.h
and diff_attention.h.

  mapping   A block has 4 warps, and a warp has two sets of 16 rows against one tile of keys, so that each fragment of K
            and V that is read from shared memory is used twice. Plain form: 128 queries of one head, 32 adjacent ones
            per warp. Pair form: 64 queries of a signal head and of its noise head, the same 16 of both per warp.
            A tile has 64 keys, or 32 where the values are wider than 64; the next tile is copied meanwhile. Tiles that
            no row attends to are skipped, by the block or a warp, and only those on a border are masked.
  products  S = Q K^T; P is the result of the first product, in the layout of the second one's operand; O += P V.
            Widths up to 64, 96 and 128 have kernels of their own; further columns are zeros in shared memory only
  softmax   running, in base 2. O is rescaled where a maximum grows by more than 2^8, seldom after the first tiles
  numerics  products exact, sums fp32, P rounded to bf16 as an operand and summed before; out and a2 (kept) rounded
            once; out = a1 - s a2 is computed before a2 is rounded. NaN in q or k gives NaN in the rows that attend to
            it, in v also in rows before it of the same tile. Sums have one order
  shared    Q, and two tiles of K and V: 64 KiB at widths of 128, 48 KiB at 96 and 64, and 0.5 KiB of first keys. Packs
            of 16 bytes are permuted within their rows: no bank conflicts
  registers O has DV, scores 32 or 64, of 255: two blocks on a multiprocessor with enough shared memory (one at widths
            of 128 on sm_86, 89 and 120)
  cycles    of a multiprocessor of an A100, for 128 rows and 64 keys at widths of 128. It does 1024 multiplications,
            moves 128 bytes of shared memory, computes 16 exponentials and issues 4 instructions per cycle:
              tensor cores     2 * 128 * 64 * 128 / 1024                        2048
              shared memory    4 warps * 48 KiB / 128, and 32 KiB of copies     1792
              exponentials     128 * 64 / 16                                     512
              instructions     4 warps * about 900 / 4                           900
            From 2048, if two blocks hide all else, to 2048 + 512 + 250, if a warp's softmax is exposed: 73 to 100% of
            the peak in the loop. With causal T of 2048 the tiles have 2% more products than the rows, and the start and
            end of a block cost about one of its 17 tiles of 64 keys: 67 to 92%. Computed, not measured
  rejected  Q in registers: 64 more. 64 keys with values of 128: scores of 64 registers spill. One stage of K and V with
            two barriers per tile, as in FlashAttention-2: the same memory, and more code between products. 16 rows per
            warp: shared memory is as slow as the tensor cores
  source    Dao 2023, "FlashAttention-2"; FlashAttention-4 for the bound below which O is not rescaled
*/
#pragma once
#include "../../cuda/async_copy.cuh"
#include "../../cuda/mma.cuh"
#include "attention_kernels.cuh"
#include "diff_combine.cuh"

enum { MMA_WARPS = 4, MMA_THREADS = MMA_WARPS * WARP, MMA_ROWS = 2 * 16 * MMA_WARPS, MMA_WIDTH = 128 };

// ---------------------------------------------------------------------------------------------------
// Tiles in shared memory: rows of W numbers in packs of 8. The packs of a row are permuted, so that 8 adjacent rows of
// one pack, and 8 adjacent packs, are in different banks. W is 64, 96 or 128.

template <int W> constexpr int MMA_PERMUTED = W % 64 ? 3 : 7; // bits of a pack's number
template <int W> static __device__ inline int mma_pack(int row, int pack) {
    return row * (W / 8) + (pack ^ (W % 64 ? row / 2 % 4 : row % 8));
}

// Begins to copy ROWS rows of `width` numbers. Rows from `count` on, and further columns, become zeros.
template <int W, int ROWS, int THREADS>
static __device__ inline void mma_copy_tile(uint4 *to, const floatX *from, int ld, int count, int width) {
    const int PACKS = W / 8, STEP = THREADS / PACKS / 8 * 8; // rows at a time; whole periods of the permutation
    int row = (int)threadIdx.x / PACKS, pack = (int)threadIdx.x % PACKS;
    if (row >= STEP) return;
    bool exists = pack * 8 < width;
    from += (size_t)row * ld + pack * 8;
    to += mma_pack<W>(row, pack);
    UNROLL
    for (int i = 0; i < ROWS; i += STEP) copy_async(to + i * PACKS, from + (size_t)i * ld, exists && row + i < count);
}

// The pack that a lane gives to matrices_load for 16 rows and columns. [0] and [1] are rows 0-7 and 8-15, [2] and [3]
// the same at column 8: the operand a; transposed, two operands b, whose sums are over the rows. With BY_COLUMNS [0]
// and [1] are columns 0-7 and 8-15, [2] and [3] the same at row 8: two operands b, whose sums are over the columns.
template <int W, bool BY_COLUMNS> static __device__ inline int mma_lane(void) {
    int row = (int)threadIdx.x % 8, matrix = (int)threadIdx.x % WARP / 8, low = matrix % 2, high = matrix / 2;
    return mma_pack<W>(row + 8 * (BY_COLUMNS ? high : low), BY_COLUMNS ? low : high);
}
// The fragments at other rows and columns, multiples of 16.
template <int W, bool TRANSPOSED>
static __device__ inline void mma_fragments(unsigned (&to)[4], const uint4 *tile, int lane, int row, int column) {
    const int pack = column / 8, permuted = pack & MMA_PERMUTED<W>;
    matrices_load<TRANSPOSED>(to, tile + ((lane ^ permuted) + (pack - permuted) + row * (W / 8)));
}

// ---------------------------------------------------------------------------------------------------
// Forward

typedef struct {
    floatX *out;
    real *lse;
    const floatX *q, *k, *v;
    AttentionShape shape;
    // only in the pair form: outputs of the noise heads, (N,NQ/2,DV), and their factors
    floatX *noise;
    const floatX *l;
    int ldl;
    Factor factor;
} AttentionMma;

// The queries and keys that a block computes.
typedef struct {
    int b, j, t0, rows, begin, end; // sequence, head or pair of heads; queries and keys
} MmaPlace;
template <int MAPS, int ROWS, int KEYS> static __device__ inline MmaPlace mma_place(const AttentionShape &s) {
    const int each = s.NQ / MAPS;
    const AttentionTile tile = attention_tile(ROWS);
    MmaPlace p;
    p.b = tile.head / each;
    p.j = tile.head % each;
    p.t0 = tile.t0;
    p.rows = min(ROWS, s.T - p.t0);
    p.begin = attention_first_key(s, p.b, p.t0) / KEYS * KEYS;
    p.end = s.query_offset + p.t0 + p.rows;
    return p;
}

// scores (2 x 16 rows, KEYS) = Q K^T; rows[i]: the 16 rows of set i
template <int D, int KEYS>
static __device__ inline void mma_scores(float (&scores)[2][KEYS / 8][4], const uint4 *queries, const uint4 *keys,
                                         const int (&rows)[2]) {
    const int a_lane = mma_lane<D, false>(), b_lane = mma_lane<D, true>();
    UNROLL
    for (int i = 0; i < KEYS; i++) scores[i % 2][i / 8][i / 2 % 4] = 0;
    UNROLL
    for (int k = 0; k < D; k += 16) {
        unsigned q[2][4];
        UNROLL
        for (int i = 0; i < 2; i++) mma_fragments<D, false>(q[i], queries, a_lane, rows[i], k);
        UNROLL
        for (int n = 0; n < KEYS / 8; n += 2) {
            unsigned b[4];
            mma_fragments<D, false>(b, keys, b_lane, n * 8, k);
            const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            UNROLL
            for (int i = 0; i < 2; i++) mma_bf16(scores[i][n], q[i], low), mma_bf16(scores[i][n + 1], q[i], high);
        }
    }
}

// o (2 x 16 rows, DV) += P V; p[i][n]: the P of keys 8n to 8n + 7
template <int DV, int KEYS>
static __device__ inline void mma_values(float (&o)[2][DV / 8][4], const float (&p)[2][KEYS / 8][4],
                                         const uint4 *values) {
    const int lane = mma_lane<DV, false>();
    UNROLL
    for (int k = 0; k < KEYS / 8; k += 2) {
        unsigned a[2][4];
        UNROLL
        for (int i = 0; i < 8; i++) {
            const float *from = &p[i / 4][k + i % 4 / 2][i % 2 * 2];
            a[i / 4][i % 4] = bf16_pair(from[0], from[1]);
        }
        UNROLL
        for (int n = 0; n < DV / 8; n += 2) {
            unsigned b[4];
            mma_fragments<DV, true>(b, values, lane, k * 8, n * 8);
            const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            UNROLL
            for (int i = 0; i < 2; i++) mma_bf16(o[i][n], a[i], low), mma_bf16(o[i][n + 1], a[i], high);
        }
    }
}

// Scores of keys that a row does not attend to become -infinity. low: the first key of each of the 16 rows; keys: from
// the first key of the tile to the first row's own.
template <int KEYS>
static __device__ inline void mma_mask(float (&scores)[KEYS / 8][4], const int *low, int k0, int keys) {
    const int g = (int)threadIdx.x % WARP / 4, column = (int)threadIdx.x % 4 * 2;
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        const int from = low[g + 8 * upper] - k0 - column, to = keys + g + 8 * upper - column;
        UNROLL
        for (int i = 0; i < KEYS / 4; i++) {
            const int key = i / 2 * 8 + i % 2;
            if (key < from || key > to) scores[i / 2][2 * upper + i % 2] = -INFINITY;
        }
    }
}

// Updates the running softmax of the lane's two rows; scores become P = exp2(scale (score - max)). max is the maximum
// of the scores so far, or up to MMA_SLACK / scale less, so that o is seldom rescaled; P and its sum have room for
// that. sum covers the lane's own keys. factor is what the caller multiplies o by.
enum { MMA_SLACK = 8 };
template <int KEYS>
static __device__ inline void mma_softmax(float (&scores)[KEYS / 8][4], float (&factor)[2], float (&max)[2],
                                          float (&sum)[2], float scale) {
    UNROLL
    for (int row = 0; row < 2; row++) {
        float even = max[row], odd = max[row], total = 0; // two chains: half of the latency
        UNROLL
        for (int n = 0; n < KEYS / 8; n++) {
            even = fmaxf(even, scores[n][2 * row]);
            odd = fmaxf(odd, scores[n][2 * row + 1]);
        }
        float largest = lanes_max(fmaxf(even, odd), 4); // the row's other keys
        if (scale * (largest - max[row]) <= MMA_SLACK) largest = max[row];
        factor[row] = exp2_fast(scale * (max[row] - largest));
        max[row] = largest;
        const float offset = scale * largest;
        UNROLL
        for (int n = 0; n < KEYS / 8; n++) {
            UNROLL
            for (int c = 2 * row; c < 2 * row + 2; c++)
                total += scores[n][c] = exp2_fast(fmaf(scale, scores[n][c], -offset));
        }
        sum[row] = sum[row] * factor[row] + total;
    }
}
template <int DV> static __device__ inline void mma_rescale(float (&o)[DV / 8][4], const float (&factor)[2]) {
    if (!__any_sync(ALL_LANES, factor[0] != 1 || factor[1] != 1)) return;
    UNROLL
    for (int n = 0; n < DV / 8; n++) {
        UNROLL
        for (int c = 0; c < 4; c++) o[n][c] *= factor[c / 2];
    }
}

// Stores the first `count` of 16 rows of a warp by way of its part of shared memory.
template <int DV>
static __device__ inline void mma_store_rows(floatX *to, int ld, int count, int width, const float (&o)[DV / 8][4],
                                             uint4 *tile) {
    const int lane = (int)threadIdx.x % WARP, g = lane / 4, r = lane % 4;
    __syncwarp(); // earlier reads of the tile are complete
    UNROLL
    for (int i = 0; i < DV / 4; i++) {
        unsigned *pack = (unsigned *)(void *)(tile + mma_pack<DV>(g + i % 2 * 8, i / 2));
        pack[r] = bf16_pair(o[i / 2][i % 2 * 2], o[i / 2][i % 2 * 2 + 1]);
    }
    __syncwarp();
    for (int i = lane; i < 16 * DV / 8; i += WARP) {
        int row = i / (DV / 8), pack = i % (DV / 8);
        if (row < count && pack * 8 < width)
            *(uint4 *)(void *)(to + (size_t)row * ld + pack * 8) = tile[mma_pack<DV>(row, pack)];
    }
}

// Divides o, P V of 16 rows of which `count` exist, by the sums; stores the rows' lse, unless it is NULL.
template <int DV>
static __device__ inline void mma_divide(float (&o)[DV / 8][4], real *lse, int count, const float (&max)[2],
                                         const float (&sum)[2], float scale) {
    const float LN2 = 0.693147181f;
    const int lane = (int)threadIdx.x % WARP;
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        const int i = upper * 8 + lane / 4;
        const float total = lanes_sum(sum[upper], 4), inverse = __fdividef(1, total);
        if (lse && lane % 4 == 0 && i < count) lse[i] = LN2 * (scale * max[upper] + log2f(total));
        UNROLL
        for (int n = 0; n < DV / 8; n++) o[n][2 * upper] *= inverse, o[n][2 * upper + 1] *= inverse;
    }
}
// o -= factor(l) noise for the first `count` of the 16 rows of pair j from `row` on
template <int DV>
static __device__ inline void mma_subtract(float (&o)[DV / 8][4], const float (&noise)[DV / 8][4],
                                           const AttentionMma &a, size_t row, int j, int count) {
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        const int i = upper * 8 + (int)threadIdx.x % WARP / 4;
        const float f = i < count ? diff_factor(a.l[(row + i) * a.ldl + j], a.factor) : 0;
        UNROLL
        for (int n = 0; n < DV / 8; n++) {
            UNROLL
            for (int c = 2 * upper; c < 2 * upper + 2; c++) o[n][c] -= f * noise[n][c];
        }
    }
}

// The places of a head's results from query t on: lse, NULL if it is not kept; out of head or pair j; a2 of pair j.
static __device__ inline real *mma_lse(const AttentionMma &a, const MmaPlace &p, int head, int t) {
    return a.lse ? a.lse + ((size_t)p.b * a.shape.NQ + head) * a.shape.T + t : NULL;
}
static __device__ inline floatX *mma_out(const AttentionMma &a, const MmaPlace &p, int t) {
    return a.out + ((size_t)p.b * a.shape.T + t) * a.shape.ldo + p.j * a.shape.o_head;
}
static __device__ inline floatX *mma_noise(const AttentionMma &a, const MmaPlace &p, int t) {
    return a.noise + (((size_t)p.b * a.shape.T + t) * (a.shape.NQ / 2) + p.j) * a.shape.DV;
}

// Stores a warp's results: o, P V of two sets of 16 rows from query t on.
template <int MAPS, int DV>
static __device__ inline void mma_finish(const AttentionMma &a, const MmaPlace &p, int t, float (&o)[2][DV / 8][4],
                                         const float (&max)[2][2], const float (&sum)[2][2], float scale, uint4 *tile) {
    const AttentionShape s = a.shape;
    const int count = s.T - t;
    if constexpr (MAPS == 1) {
        UNROLL
        for (int set = 0; set < 2; set++) {
            const int i = 16 * set;
            mma_divide<DV>(o[set], mma_lse(a, p, p.j, t + i), count - i, max[set], sum[set], scale);
            mma_store_rows<DV>(mma_out(a, p, t + i), s.ldo, count - i, s.DV, o[set], tile);
        }
    } else {
        UNROLL
        for (int set = 0; set < 2; set++)
            mma_divide<DV>(o[set], mma_lse(a, p, 2 * p.j + set, t), count, max[set], sum[set], scale);
        mma_store_rows<DV>(mma_noise(a, p, t), s.NQ / 2 * s.DV, count, s.DV, o[1], tile);
        mma_subtract<DV>(o[0], o[1], a, (size_t)p.b * s.T + t, p.j, count);
        mma_store_rows<DV>(mma_out(a, p, t), s.ldo, count, s.DV, o[0], tile);
    }
}

// The keys of a tile: O, which has DV registers, and the scores have to fit.
template <int DV> constexpr int MMA_KEYS = DV > 64 ? 32 : 64;

template <int MAPS, int D, int DV>
static __global__ void __launch_bounds__(MMA_THREADS, 2) attention_mma_forward_kernel(AttentionMma a) {
    const int ROWS = MMA_ROWS / MAPS, WIDEST = D > DV ? D : DV, KEYS = MMA_KEYS<DV>, STAGE = KEYS * (D + DV) / 8;
    DYNAMIC_SHARED(uint4, queries);
    uint4 *stages = queries + MMA_ROWS * WIDEST / 8;
    int *low = (int *)(void *)(stages + 2 * STAGE);     // the first key of each row
    MmaPlace *place = (MmaPlace *)(void *)(low + ROWS); // for the end, instead of registers
    const AttentionShape s = a.shape;
    const MmaPlace p = mma_place<MAPS, ROWS, KEYS>(s);
    if (p.b >= s.B) return;
    const AttentionPlace at = attention_place(s, p.b, p.j * MAPS);
    const floatX *k = a.k + at.kv_k + (size_t)p.begin * s.ldkv, *v = a.v + at.kv_v + (size_t)p.begin * s.ldkv;
    if (threadIdx.x == 0) *place = p;
    for (int i = (int)threadIdx.x; i < ROWS; i += MMA_THREADS)
        low[i] = attention_first_key(s, p.b, min(p.t0 + i, s.T - 1));
    UNROLL
    for (int map = 0; map < MAPS; map++)
        mma_copy_tile<D, ROWS, MMA_THREADS>(queries + map * ROWS * D / 8,
                                            a.q + at.q + (size_t)p.t0 * s.ldq + map * s.q_head, s.ldq, p.rows, s.D);
    mma_copy_tile<D, KEYS, MMA_THREADS>(stages, k, s.ldkv, p.end - p.begin, s.D);
    mma_copy_tile<DV, KEYS, MMA_THREADS>(stages + KEYS * D / 8, v, s.ldkv, p.end - p.begin, s.DV);
    copy_commit();

    // sets of 16 rows: where they are in shared memory, and their first queries
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARP, 0); // nvcc then knows that branches are uniform
    const int apart = MAPS == 1 ? 16 : 0, first = warp * (32 / MAPS), last = first + apart + 15;
    const int rows[2] = {first, first + (MAPS == 1 ? 16 : ROWS)};
    const float scale = s.scale * 1.44269504f;
    float o[2][DV / 8][4] = {{{0}}}, scores[2][KEYS / 8][4];
    float max[2][2] = {{-8e37f, -8e37f}, {-8e37f, -8e37f}}, sum[2][2] = {{0}}; // below any score, finite
    uint4 *keys = stages, *next = stages + STAGE;
    for (int k0 = p.begin; k0 < p.end; k0 += KEYS) {
        copy_wait<0>();
        __syncthreads(); // this stage has arrived, and the other one is no longer read
        if (k0 + KEYS < p.end) {
            k += (size_t)KEYS * s.ldkv, v += (size_t)KEYS * s.ldkv;
            mma_copy_tile<D, KEYS, MMA_THREADS>(next, k, s.ldkv, p.end - k0 - KEYS, s.D);
            mma_copy_tile<DV, KEYS, MMA_THREADS>(next + KEYS * D / 8, v, s.ldkv, p.end - k0 - KEYS, s.DV);
            copy_commit();
        }
        const int shift = s.query_offset + p.t0 - k0;      // the block's first row, counted from the tile's first key
        if (shift + last >= 0 && k0 + KEYS > low[first]) { // a row of the warp attends to a key
            const bool whole = shift + first >= KEYS - 1 && k0 >= low[last]; // every row attends to every key
            mma_scores<D, KEYS>(scores, queries, keys, rows);
            UNROLL
            for (int i = 0; i < 2; i++) {
                if (!whole) mma_mask<KEYS>(scores[i], low + first + i * apart, k0, shift + first + i * apart);
                float factor[2];
                mma_softmax<KEYS>(scores[i], factor, max[i], sum[i], scale);
                mma_rescale<DV>(o[i], factor);
            }
            mma_values<DV, KEYS>(o, scores, keys + KEYS * D / 8);
        }
        uint4 *used = keys;
        keys = next, next = used;
    }
    __syncthreads(); // the queries are no longer read: each warp's rows there, DV wide, become its results
    const MmaPlace end = place[0];
    mma_finish<MAPS, DV>(a, end, end.t0 + first, o, max, sum, scale, queries + first * MAPS / 2 * DV / 8);
}

template <int MAPS, int D, int DV> static inline void attention_mma_launch_widths(const AttentionMma &a) {
    const int widest = D > DV ? D : DV, rows = MMA_ROWS / MAPS;
    const size_t tiles = MMA_ROWS * widest + 2 * MMA_KEYS<DV> * (D + DV);
    const size_t bytes = 2 * tiles + rows * sizeof(int) + sizeof(MmaPlace);
    auto kernel = attention_mma_forward_kernel<MAPS, D, DV>;
    static bool allowed; // more than 48 KiB in all
    if (!allowed) LAUNCH_ALLOW_SHARED(kernel, bytes);
    allowed = true;
    LAUNCH(kernel, attention_grid(a.shape, a.shape.NQ / MAPS, rows), MMA_THREADS, bytes, a);
}

// Whether the tensor cores compute attention of this shape.
static inline bool attention_mma_fits(AttentionShape s) {
    return sizeof(floatX) == 2 && s.D <= MMA_WIDTH && s.DV <= MMA_WIDTH && attention_packed(s);
}

// Calls launch(MAPS, D, DV) with the smallest kernel that holds the heads.
template <int MAPS> static inline void attention_mma_launch(const AttentionMma &a) {
    const int D = a.shape.D, DV = a.shape.DV;
    if (D <= 64 && DV <= 64) attention_mma_launch_widths<MAPS, 64, 64>(a);
    else if (MAPS == 1 && D <= 64) attention_mma_launch_widths<1, 64, 128>(a);
    else if (D <= 96 && DV <= 96) attention_mma_launch_widths<MAPS, 96, 96>(a);
    else attention_mma_launch_widths<MAPS, 128, 128>(a);
}
