/*
attention_decode_mma.cuh: the scores and the weighted sum of attention_decode on the tensor cores, for bf16 storage
whose rows can be read in packs. attention_decode.cuh divides the work and merges the splits.

  mapping   A block has 4 warps, and computes one split of the keys for all query heads of a key/value head. A warp has
            16 heads and up to 128 columns of the values. If that covers all, the warps divide the keys; with wider
            values and larger groups each part of the columns, and each 16 heads, has its own warp. These warps read
            the same rows at about the same time, so device memory is read once (the others hit the L1 or L2 cache).
  products  16 keys at a time. Scores (heads, keys) = Q K^T: a lane reads packs of 16 bytes of K, and these are the
            operand in registers, since the order of the columns does not matter if Q has the same. O (heads, columns)
            += P V: P is the result of the first product, in the layout of the second one's operand. A lane reads packs
            of four rows of V; pairs of neighbouring rows are interleaved by a byte permutation.
  cost      equal for 1 to 16 heads of a group: the rows of missing heads are zeros
  memory    Q in shared memory (32 D bytes per 16 heads), in the order of the lanes; then the 8 KiB of each warp's O
  registers O 64, packs of K and of V 32 each at D = DV = 128. Two blocks on a multiprocessor then have 64 KiB of loads
            in flight, three blocks at widths up to 64 have 48 KiB; 4.8 TB/s at a latency of 1000 cycles requires 21 KiB
  numerics  products exact, sums in fp32; exponentials in base 2; P as the sum of two bf16 numbers, to within 2^-16 of
            itself
*/
#pragma once
#include "../../cuda/mma.cuh"
#include "operations.h"

enum { DECODE_WARPS = 4, DECODE_THREADS = DECODE_WARPS * WARP };
enum { DECODE_HEADS = 16, DECODE_COLUMNS = 128, DECODE_MMA_WIDTH = 256 }; // heads and columns per warp; the largest D
static inline bool decode_narrow(AttentionShape s) { return s.D <= 64 && s.DV <= 64; }

typedef struct {
    const floatX *q, *k, *v;
    const int *first;
    real *out, *max, *sum; // results of the splits: (B, NQ, splits, DV) and (B, NQ, splits)
    AttentionShape shape;
    int capacity, splits;
    int heads;   // heads of a group that a block computes
    float scale; // for scores in base 2: exp(scale q.k) = exp2(score)
} AttentionDecode;

// The heads and keys that a block computes.
typedef struct {
    const floatX *q, *k, *v; // point to the first head, in the sequence's first row
    int heads, begin, end;   // keys [begin, end)
    size_t item;             // b * NQ + h for the first head
} DecodePlace;

static __host__ __device__ inline int decode_keys_per_split(int keys, int splits) {
    const int unit = DECODE_WARPS * 16; // keys per turn of the block
    return ((keys + splits - 1) / splits + unit - 1) / unit * unit;
}

static __device__ inline DecodePlace decode_place(const AttentionDecode &a) {
    const AttentionShape s = a.shape;
    DecodePlace p;
    int group = s.NQ / s.NKV, blocks = (group + a.heads - 1) / a.heads, x = (int)blockIdx.x;
    int b = x / blocks / s.NKV, kv = x / blocks % s.NKV, h0 = x % blocks * a.heads, h = kv * group + h0;
    int keys = min(a.first[b] + 1, a.capacity), each = decode_keys_per_split(keys, a.splits);
    p.heads = min(a.heads, group - h0);
    p.begin = (int)blockIdx.y * each;
    p.end = min(keys, p.begin + each);
    p.q = a.q + (size_t)b * s.ldq + h * s.q_head;
    p.k = a.k + (size_t)b * a.capacity * s.ldkv + kv * s.k_head;
    p.v = a.v + (size_t)b * a.capacity * s.ldkv + kv * s.v_head;
    p.item = (size_t)b * s.NQ + h;
    return p;
}

// A pack of 16 bytes, or zeros.
static __device__ inline void decode_pack(unsigned (&to)[4], const floatX *from, bool exists) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (exists) x = *(const uint4 *)(const void *)from;
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// Rows in the order of the lanes: pack [tile of 16 rows][chunk of 32 columns][row < 8, row >= 8][lane]. row_of(i):
// address of row i of width D; nullptr: zeros. thread: index among the threads that load
template <typename RowOf>
static __device__ inline void decode_load_rows(uint4 *rows, int D, int tiles, int chunks, int thread, int threads,
                                               RowOf row_of) {
    for (int i = thread; i < tiles * chunks * 2 * WARP; i += threads) {
        int lane = i % WARP, upper = i / WARP % 2, chunk = i / WARP / 2 % chunks, tile = i / WARP / 2 / chunks;
        int column = chunk * 32 + lane % 4 * 8;
        const floatX *row = row_of(tile * DECODE_HEADS + upper * 8 + lane / 4);
        unsigned pack[4];
        const bool exists = row && column < D;
        decode_pack(pack, exists ? row + column : row, exists);
        rows[i] = make_uint4(pack[0], pack[1], pack[2], pack[3]);
    }
}

// scores[n] (16 heads, keys 8n .. 8n+7 of the turn) = Q K^T, CHUNKS chunks of 32 columns at a time. k: the lane's two
// keys, rows of width D; nullptr: no key
template <int CHUNKS>
static __device__ inline void decode_scores(float (&scores)[2][4], const uint4 *queries, const floatX *const (&k)[2],
                                            int D, int chunks, int lane) {
    UNROLL
    for (int i = 0; i < 8; i++) scores[i / 4][i % 4] = 0;
    for (int first = 0; first < chunks; first += CHUNKS) {
        unsigned keys[2][CHUNKS][4];
        UNROLL
        for (int n = 0; n < 2; n++) {
            UNROLL
            for (int c = 0; c < CHUNKS; c++) {
                int column = (first + c) * 32 + lane % 4 * 8;
                const bool exists = k[n] && column < D;
                decode_pack(keys[n][c], exists ? k[n] + column : k[n], exists);
            }
        }
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            const uint4 *rows = queries + (first + c) * 2 * WARP + lane, low = rows[0], high = rows[WARP];
            const unsigned a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
            UNROLL
            for (int n = 0; n < 2; n++) {
                UNROLL
                for (int m = 0; m < 2; m++) {
                    const unsigned b[2] = {keys[n][c][2 * m], keys[n][c][2 * m + 1]};
                    mma_bf16(scores[n], a[m], b);
                }
            }
        }
    }
}

// Two neighbouring numbers as a sum of two operands.
static __device__ inline void decode_split(unsigned (&p)[2][4], int at, float x, float y) {
    unsigned high = bf16_pair(x, y);
    p[0][at] = high;
    p[1][at] = bf16_pair(x - bf16_first(high), y - bf16_second(high));
}

// Updates the running maximum and sum of the lane's two heads; scores become P, as a sum of two operands, and O is
// rescaled. The sum includes only the lane's keys, the first of which is number `key` of the turn; each head reads
// [low, left).
template <int PIECES>
static __device__ inline void decode_softmax(unsigned (&p)[2][4], float (&o)[PIECES][8][4], float (&max)[2],
                                             float (&sum)[2], float (&scores)[2][4], int key, const int (&low)[2],
                                             const int (&left)[2], float scale) {
    float factor[2];
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        float largest = max[upper], total = 0;
        UNROLL
        for (int i = 0; i < 4; i++) {
            float &x = scores[i / 2][2 * upper + i % 2];
            int at = key + i / 2 * 8 + i % 2;
            x = at >= low[upper] && at < left[upper] ? scale * x : -INFINITY;
            largest = fmaxf(largest, x);
        }
        largest = lanes_max(largest, 4); // the head's other keys
        UNROLL
        for (int n = 0; n < 2; n++) {
            float *x = &scores[n][2 * upper];
            x[0] = exp2f(x[0] - largest), x[1] = exp2f(x[1] - largest);
            total += x[0] + x[1];
            decode_split(p, upper + 2 * n, x[0], x[1]);
        }
        factor[upper] = exp2f(max[upper] - largest);
        sum[upper] = sum[upper] * factor[upper] + total;
        max[upper] = largest;
    }
    if (!__any_sync(ALL_LANES, factor[0] != 1 || factor[1] != 1)) return; // no head has a new maximum
    UNROLL
    for (int i = 0; i < PIECES * 32; i++) o[i / 32][i / 4 % 8][i % 4] *= factor[i / 2 % 2];
}

// O += P V. v: packs of the rows 2r, 2r+1, 2r+8, 2r+9; tile i of a piece has its columns 8g + i.
template <int PIECES>
static __device__ inline void decode_values(float (&o)[PIECES][8][4], const unsigned (&p)[2][4],
                                            const unsigned (&v)[4][PIECES][4]) {
    UNROLL
    for (int piece = 0; piece < PIECES; piece++) {
        UNROLL
        for (int i = 0; i < 8; i++) {
            const unsigned which = i % 2 ? 0x7632 : 0x5410; // the high or the low halves of both
            const unsigned b[2] = {__byte_perm(v[0][piece][i / 2], v[1][piece][i / 2], which),
                                   __byte_perm(v[2][piece][i / 2], v[3][piece][i / 2], which)};
            mma_bf16(o[piece][i], p[0], b);
            mma_bf16(o[piece][i], p[1], b);
        }
    }
}

// Merges the warps that divided the keys, `turns` of them, `roles` apart, and stores the split's result.
// all: (DECODE_WARPS, 16, 64 PIECES); stats: (DECODE_WARPS, 16) maxima and sums
template <int PIECES>
static __device__ inline void decode_merge_warps(const AttentionDecode &a, const DecodePlace &p, float *all,
                                                 float2 *stats, float (&o)[PIECES][8][4], const float (&max)[2],
                                                 const float (&sum)[2], int warp, int roles, int parts) {
    const int lane = (int)threadIdx.x % WARP, g = lane / 4, r = lane % 4, role = warp % roles, width = PIECES * 64;
    const int turns = DECODE_WARPS / roles, h0 = role / parts * DECODE_HEADS, column0 = role % parts * DECODE_COLUMNS;
    float top[2], total[2];
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        float all_keys = lanes_sum(sum[upper], 4);
        if (r == 0) stats[warp * DECODE_HEADS + g + 8 * upper] = make_float2(max[upper], all_keys);
    }
    __syncthreads(); // also: the queries are no longer read
    UNROLL
    for (int upper = 0; upper < 2; upper++) {
        top[upper] = max[upper], total[upper] = 0;
        for (int w = role; w < DECODE_WARPS; w += roles)
            top[upper] = fmaxf(top[upper], stats[w * DECODE_HEADS + g + 8 * upper].x);
        for (int w = role; w < DECODE_WARPS; w += roles) {
            float2 of = stats[w * DECODE_HEADS + g + 8 * upper];
            total[upper] += of.y * exp2f(of.x - top[upper]);
        }
        float factor = exp2f(max[upper] - top[upper]);
        float *to = all + (warp * DECODE_HEADS + g + 8 * upper) * width + 16 * r; // 16 columns of each piece
        UNROLL
        for (int i = 0; i < PIECES * 16; i += 4) {
            const int piece = i / 16, c = 2 * upper + i / 8 % 2, n = i % 8;
            *(float4 *)(void *)(to + 64 * piece + i % 16) =
                make_float4(o[piece][n][c] * factor, o[piece][n + 1][c] * factor, o[piece][n + 2][c] * factor,
                            o[piece][n + 3][c] * factor);
        }
        size_t at = (p.item + (h0 + g + 8 * upper)) * a.splits + blockIdx.y;
        if (r == 0 && warp == role && role % parts == 0 && h0 + g + 8 * upper < p.heads)
            a.max[at] = top[upper], a.sum[at] = total[upper];
    }
    __syncthreads();
    for (int i = warp / roles * WARP + lane; i < DECODE_HEADS * width / 4; i += turns * WARP) {
        int h = h0 + i / (width / 4), column = column0 + i % (width / 4) * 4;
        if (h >= p.heads || column >= a.shape.DV) continue;
        float4 x = make_float4(0, 0, 0, 0);
        for (int w = role; w < DECODE_WARPS; w += roles) {
            float4 y = *(const float4 *)(const void *)(all + w * DECODE_HEADS * width + 4 * i);
            x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
        }
        size_t at = (p.item + h) * a.splits + blockIdx.y;
        *(float4 *)(void *)(a.out + at * a.shape.DV + column) = x;
    }
}

// parts: of 128 columns of the values; tiles: of 16 heads. Each has a warp. Both numbers are powers of two.
template <int CHUNKS, int PIECES>
static __global__ void __launch_bounds__(DECODE_THREADS, 4 - PIECES)
    attention_decode_mma_kernel(AttentionDecode a, int parts, int tiles) {
    SHARED(uint4, memory, DECODE_WARPS * DECODE_HEADS * PIECES * 64 * 4 / 16);
    SHARED(float2, stats, DECODE_WARPS * DECODE_HEADS);
    const AttentionShape s = a.shape;
    const DecodePlace p = decode_place(a);
    if (p.begin >= p.end) return; // a short sequence; all threads agree
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, roles = parts * tiles;
    const int part = warp % roles % parts, tile = warp % roles / parts, turn = warp / roles,
              turns = DECODE_WARPS / roles;
    // chunks of 32 columns, the last ones zeros; constant, as the loop then is, in the kernel for D up to 64
    const int chunks = CHUNKS == 2 ? 2 : (s.D + 32 * CHUNKS - 1) / (32 * CHUNKS) * CHUNKS;
    const uint4 *queries = memory + tile * chunks * 2 * WARP;
    decode_load_rows(memory, s.D, tiles, chunks, (int)threadIdx.x, DECODE_THREADS,
                     [&](int h) { return h < p.heads ? p.q + h * s.q_head : (const floatX *)nullptr; });
    __syncthreads();
    float o[PIECES][8][4], max[2] = {-8e37f, -8e37f}, sum[2] = {0, 0}; // below any score, finite
    UNROLL
    for (int i = 0; i < PIECES * 32; i++) o[i / 32][i / 4 % 8][i % 4] = 0;
    const int row = lane % 4 * 2, column0 = part * DECODE_COLUMNS + lane / 4 * 8, ahead = p.begin + 16 * turn;
    const size_t ld = (size_t)s.ldkv;
    const floatX *k = p.k + (ahead + lane / 4) * ld, *v = p.v + (ahead + row) * ld + column0;
    for (int left = p.end - ahead; left > 0; left -= 16 * turns, k += 16 * turns * ld, v += 16 * turns * ld) {
        unsigned values[4][PIECES][4], weights[2][4];
        UNROLL
        for (int n = 0; n < 4; n++) { // before the scores, so that all loads are in flight
            UNROLL
            for (int piece = 0; piece < PIECES; piece++)
                decode_pack(values[n][piece], v + (n % 2 + n / 2 * 8) * ld + piece * 64,
                            row + n % 2 + n / 2 * 8 < left && column0 + piece * 64 < s.DV);
        }
        float scores[2][4];
        const floatX *keys[2] = {lane / 4 < left ? k : nullptr, lane / 4 + 8 < left ? k + 8 * ld : nullptr};
        decode_scores<CHUNKS>(scores, queries, keys, s.D, chunks, lane);
        decode_softmax<PIECES>(weights, o, max, sum, scores, row, {0, 0}, {left, left}, a.scale);
        decode_values<PIECES>(o, weights, values);
    }
    decode_merge_warps<PIECES>(a, p, (float *)(void *)memory, stats, o, max, sum, warp, roles, parts);
}

static inline bool decode_on_tensor_cores(const AttentionDecode &a) {
    AttentionShape s = a.shape;
    return sizeof(floatX) == 2 && s.D <= DECODE_MMA_WIDTH && packed(s.D, a.q, a.k) && packed(s.DV, a.v) &&
           packed(s.ldq) && packed(s.ldkv) && packed(s.q_head) && packed(s.k_head) && packed(s.v_head);
}

static inline void attention_decode_mma(AttentionDecode a) {
    AttentionShape s = a.shape;
    int group = s.NQ / s.NKV, parts = 1, tiles = 1;
    while (parts * DECODE_COLUMNS < s.DV) parts *= 2;
    while (parts * tiles < DECODE_WARPS && tiles * DECODE_HEADS < group) tiles *= 2;
    a.heads = tiles * DECODE_HEADS;
    dim3 grid(blocks_of((size_t)s.B * s.NKV * ((group + a.heads - 1) / a.heads), 1), (unsigned)a.splits);
#define ATTENTION_DECODE(CHUNKS, PIECES) \
    LAUNCH((attention_decode_mma_kernel<CHUNKS, PIECES>), grid, DECODE_THREADS, 0, a, parts, tiles)
    if (decode_narrow(s)) ATTENTION_DECODE(2, 1);
    else if (s.D <= 64) ATTENTION_DECODE(2, 2);
    else ATTENTION_DECODE(4, 2);
#undef ATTENTION_DECODE
}
