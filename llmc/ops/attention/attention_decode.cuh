/*
attention_decode.cuh: attention of one new position per sequence over a cache. Equations in attention.h, layout of the
cache in cache.h.

  mapping   flash decoding: a block computes a part of the keys (a split) for all query heads of a key/value head, so
            that each key and value is read from device memory once for the group. A second kernel merges the splits in
            order. Two kernels compute a split: attention_decode_mma.cuh (tensor cores), and the one here for fp32 and
            for rows that cannot be read in packs, with up to 16 heads per block.
  splits    as many as fill an H200 with two or three blocks per multiprocessor, from the shape and the capacity alone,
            so that the order of the sums does not depend on the device. Shorter sequences use fewer of them.
  numerics  products, softmax and sums in fp32, the output rounded once
  traffic   k, v and q once; per split, written and read: DV + 2 fp32 numbers for each query head
  source    Dao et al. 2023, "Flash-Decoding for long-context inference"
*/
#pragma once
#include "attention_decode_mma.cuh"
#include "attention_kernels.cuh"

enum { DECODE_MULTIPROCESSORS = 132, DECODE_KEYS = 64 }; // multiprocessors of an H200; keys per turn

// Blocks that reside on the device.
static inline int decode_blocks(AttentionShape s) { return (decode_narrow(s) ? 3 : 2) * DECODE_MULTIPROCESSORS; }
static inline int decode_splits(AttentionShape s, int capacity) {
    return max_int(1, min_int(decode_blocks(s) / (s.B * s.NKV), (capacity + DECODE_KEYS - 1) / DECODE_KEYS));
}
static inline size_t decode_bytes(AttentionShape s, size_t splits) { // splits: sum over all sequences
    return splits * s.NQ * (s.DV + 2) * sizeof(real);
}
// Enough for fewer sequences too, which have more splits each.
static inline size_t attention_decode_workspace_bytes(AttentionShape s, int capacity, int threads) {
    (void)threads; // a GPU does not use the host's threads
    AttentionShape one = s;
    one.B = 1;
    size_t most = min_size((size_t)s.B * decode_splits(one, capacity), (size_t)(decode_blocks(s) / s.NKV));
    return decode_bytes(s, max_size((size_t)s.B, most));
}

// Scores of the keys j0 .. j0 + DECODE_KEYS - 1: `lanes` neighbours share a row. scores (16, DECODE_KEYS), q (16, D)
template <int W>
static __device__ inline void decode_dot(float *scores, const float *q, const DecodePlace &p, AttentionShape s,
                                         float scale, int j0, int lanes) {
    int lane = row_lane(lanes), group = (int)threadIdx.x / lanes;
    for (int i = group; i < DECODE_KEYS; i += DECODE_THREADS / lanes) {
        float dot[DECODE_HEADS] = {0}, x[W];
        const floatX *key = p.k + (size_t)(j0 + i) * s.ldkv;
        for (int c = lane * W; j0 + i < p.end && c < s.D; c += lanes * W) {
            load<W>(x, key + c);
            UNROLL
            for (int h = 0; h < DECODE_HEADS; h++) {
                UNROLL
                for (int w = 0; w < W && h < p.heads; w++) dot[h] += q[h * s.D + c + w] * x[w];
            }
        }
        UNROLL
        for (int h = 0; h < DECODE_HEADS; h++) {
            if (h >= p.heads) break;
            float sum = lanes_sum(dot[h], lanes);
            if (lane == 0) scores[h * DECODE_KEYS + i] = j0 + i < p.end ? scale * sum : -INFINITY;
        }
    }
}

typedef struct {
    float max, sum, factor; // running; the factor of the latest turn
} DecodeHead;

// W: elements of K that are read at once; COLUMNS: columns of V per thread
template <int W, int COLUMNS>
static __global__ void __launch_bounds__(DECODE_THREADS) attention_decode_kernel(AttentionDecode a, int lanes) {
    SHARED(float, scores, DECODE_HEADS *DECODE_KEYS);
    SHARED(DecodeHead, state, DECODE_HEADS);
    DYNAMIC_SHARED(float, q);
    const AttentionShape s = a.shape;
    const DecodePlace p = decode_place(a);
    if (p.begin >= p.end) return; // a short sequence; all threads agree
    const int thread = (int)threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    float o[DECODE_HEADS][COLUMNS] = {{0}};
    for (int i = thread; i < p.heads * s.D; i += DECODE_THREADS) q[i] = to_float(p.q[i / s.D * s.q_head + i % s.D]);
    if (thread < DECODE_HEADS) state[thread].max = -8e37f, state[thread].sum = 0; // below any score, finite
    __syncthreads();
    for (int j0 = p.begin; j0 < p.end; j0 += DECODE_KEYS) {
        decode_dot<W>(scores, q, p, s, a.scale, j0, lanes);
        __syncthreads();
        for (int h = warp; h < p.heads; h += DECODE_WARPS) {
            float *x = scores + h * DECODE_KEYS, before = state[h].max, total = 0;
            float largest = fmaxf(before, lanes_max(fmaxf(x[lane], x[lane + WARP]), WARP)),
                  factor = exp2f(before - largest);
            for (int i = lane; i < DECODE_KEYS; i += WARP) total += x[i] = exp2f(x[i] - largest);
            total = lanes_sum(total, WARP);
            __syncwarp(); // all lanes have read state[h]: a shuffle does not order memory
            if (lane == 0) state[h] = {largest, state[h].sum * factor + total, factor};
        }
        __syncthreads();
        UNROLL
        for (int h = 0; h < DECODE_HEADS; h++) {
            UNROLL
            for (int c = 0; c < COLUMNS && h < p.heads; c++) o[h][c] *= state[h].factor;
        }
        for (int i = 0; i < min(DECODE_KEYS, p.end - j0); i++) {
            UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                int column = c * DECODE_THREADS + thread;
                float v = column < s.DV ? to_float(p.v[(size_t)(j0 + i) * s.ldkv + column]) : 0;
                UNROLL
                for (int h = 0; h < DECODE_HEADS; h++)
                    if (h < p.heads) o[h][c] += scores[h * DECODE_KEYS + i] * v;
            }
        }
        __syncthreads(); // the scores are read
    }
    UNROLL
    for (int h = 0; h < DECODE_HEADS; h++) {
        if (h >= p.heads) break;
        size_t at = (p.item + h) * a.splits + blockIdx.y;
        if (thread == 0) a.max[at] = state[h].max, a.sum[at] = state[h].sum;
        UNROLL
        for (int c = 0; c < COLUMNS; c++) {
            int column = c * DECODE_THREADS + thread;
            if (column < s.DV) a.out[at * s.DV + column] = o[h][c];
        }
    }
}

// A block per sequence and query head: out and lse of the splits that have keys, in order.
static __global__ void attention_decode_merge_kernel(floatX *out, real *lse, AttentionDecode a) {
    const float LN2 = 0.693147181f;
    SHARED(float, memory, WARP);
    const AttentionShape s = a.shape;
    const int b = (int)blockIdx.x / s.NQ, h = (int)blockIdx.x % s.NQ, thread = (int)threadIdx.x;
    const int keys = min(a.first[b] + 1, a.capacity), each = decode_keys_per_split(keys, a.splits);
    const int used = (keys + each - 1) / each;
    const size_t item = blockIdx.x * (size_t)a.splits;
    float top = -INFINITY, total = 0;
    for (int i = thread; i < used; i += DECODE_THREADS) top = fmaxf(top, a.max[item + i]);
    top = block_max(top, memory);
    for (int i = thread; i < used; i += DECODE_THREADS) total += a.sum[item + i] * exp2f(a.max[item + i] - top);
    total = block_sum(total, memory);
    for (int c = thread; c < s.DV; c += DECODE_THREADS) {
        float o = 0;
        for (int i = 0; i < used; i++) o += a.out[(item + i) * s.DV + c] * exp2f(a.max[item + i] - top);
        round_to(&out[(size_t)b * s.ldo + h * s.o_head + c], o / total);
    }
    if (lse && thread == 0) lse[blockIdx.x] = LN2 * (top + log2f(total));
}

static inline void attention_decode_plain(AttentionDecode a) {
    AttentionShape s = a.shape;
    bool wide = packed(s.D, a.k) && packed(s.ldkv) && packed(s.k_head);
    int group = s.NQ / s.NKV, lanes = row_lanes(wide ? s.D / PACK : s.D, wide);
    a.heads = DECODE_HEADS;
    dim3 grid(blocks_of((size_t)s.B * s.NKV * ((group + a.heads - 1) / a.heads), 1), (unsigned)a.splits);
    size_t shared = (size_t)min_int(group, a.heads) * s.D * sizeof(float); // the block's rows of q
#define ATTENTION_DECODE(W, COLUMNS) \
    LAUNCH((attention_decode_kernel<W, COLUMNS>), grid, DECODE_THREADS, shared, a, lanes)
    if (s.DV <= DECODE_THREADS && wide) ATTENTION_DECODE(PACK, 1);
    else if (s.DV <= DECODE_THREADS) ATTENTION_DECODE(1, 1);
    else if (wide) ATTENTION_DECODE(PACK, 4);
    else ATTENTION_DECODE(1, 4);
#undef ATTENTION_DECODE
}

static inline void attention_decode(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                    const int *first, int capacity, AttentionShape s) {
    OPERATION();
    s.query_offset = 0; // not used
    attention_check(s);
    AttentionDecode a;
    size_t splits = (size_t)decode_splits(s, capacity), items = (size_t)s.B * s.NQ * splits;
    a.out = ops_workspace_take(decode_bytes(s, (size_t)s.B * splits));
    a.max = a.out + items * s.DV;
    a.sum = a.max + items;
    a.q = q, a.k = k, a.v = v;
    a.first = first;
    a.shape = s;
    a.capacity = capacity;
    a.scale = (float)((double)s.scale / M_LN2);
    a.splits = (int)splits;
    if (decode_on_tensor_cores(a)) attention_decode_mma(a);
    else attention_decode_plain(a);
    LAUNCH(attention_decode_merge_kernel, blocks_of((size_t)s.B * s.NQ, 1), DECODE_THREADS, 0, out, lse, a);
}
