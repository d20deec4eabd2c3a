/*
attention_backward_order.cuh: shared parts of the backward kernels of attention on the tensor cores: the numbers of
rows, the walk of a block through the tiles of queries, and the order in which blocks add to dQ.
attention_mma_backward.cuh describes them.
*/
#pragma once
#include "../../cuda/mma.cuh"
#include "diff_combine.cuh"
#include "operations.h"

enum { BACKWARD_ROWS = 64, BACKWARD_WIDEST = 128 };

// A tile of queries has these numbers: for each row log2 of the sum, and delta: <g,a>, or s <g,a2> of a noise head; for
// each query the factor and the first key.
template <int MAPS> struct BackwardRows {
    enum { QUERIES = BACKWARD_ROWS / MAPS };
    enum { DELTA = BACKWARD_ROWS, FACTOR = 2 * BACKWARD_ROWS, LOW = FACTOR + QUERIES, NUMBERS = LOW + QUERIES };
};

typedef struct {
    floatX *dq, *dk, *dv;
    const floatX *dout, *q, *k, *v;
    float *rows, *sums; // (B, NQ/MAPS, tiles, NUMBERS), (B, NQ/MAPS, tiles, ROWS D)
    unsigned *counters; // (B, NQ/MAPS, tiles), and the ticket
    AttentionShape shape;
    int tiles; // tiles of queries
    bool add_dv;
} AttentionBackwardMma;

// Whether all rows of q, k, v and the output can be accessed in packs, from aligned addresses on.
static inline bool attention_packed(AttentionShape s) {
    return packed(s.D) && packed(s.DV) && packed(s.ldq) && packed(s.ldkv) && packed(s.ldo) && packed(s.q_head) &&
           packed(s.k_head) && packed(s.v_head) && packed(s.o_head);
}

static inline bool attention_mma_backward_fits(AttentionShape s) {
    return sizeof(floatX) == 2 && s.query_offset == 0 && s.D <= BACKWARD_WIDEST && s.DV <= BACKWARD_WIDEST &&
           attention_packed(s);
}

// The width of queries and keys in shared memory, and of the sums of dQ.
static inline int backward_width(AttentionShape s, int maps) {
    return s.D <= 64 && (maps == 1 || s.DV <= 64) ? 64 : 128;
}

// Divides the workspace; returns its size.
static inline size_t attention_mma_backward_memory(AttentionBackwardMma *a, AttentionShape s, int maps, char *memory) {
    const int queries = BACKWARD_ROWS / maps;
    a->shape = s;
    a->tiles = (s.T + queries - 1) / queries;
    size_t tiles = (size_t)s.B * (s.NQ / maps) * a->tiles, at = 0;
    a->sums = (float *)(void *)(memory + at);
    at += tiles * BACKWARD_ROWS * backward_width(s, maps) * sizeof(float);
    a->rows = (float *)(void *)(memory + at);
    at += tiles * (2 * BACKWARD_ROWS + 2 * queries) * sizeof(float);
    a->counters = (unsigned *)(void *)(memory + at);
    return at + (tiles + 1) * sizeof(unsigned);
}

// ---------------------------------------------------------------------------------------------------
// Numbers of rows

// The inputs of the rows' numbers; for pairs also the noise heads' outputs, with strides of rows and pairs, l and dl.
typedef struct {
    const floatX *dout, *out, *noise, *l;
    floatX *dl;
    const float *lse;
    int ldn, n_head, ldl;
    Factor factor;
} BackwardInputs;

// Rows (B, tiles of queries, NQ/MAPS). Queries beyond the last one attend to no key. Zeroes the counters.
template <int MAPS>
static __global__ void attention_backward_rows_kernel(int lanes, AttentionBackwardMma a, BackwardInputs in) {
    typedef BackwardRows<MAPS> Rows;
    const AttentionShape s = a.shape;
    const unsigned heads = (unsigned)(s.NQ / MAPS), padded = (unsigned)(a.tiles * Rows::QUERIES),
                   row = row_index(lanes);
    const unsigned h = row % heads, t = row / heads % padded, b = row / heads / padded;
    const int lane = row_lane(lanes);
    const bool exists = b < (unsigned)s.B && t < (unsigned)s.T;
    size_t n = b * (size_t)s.T + t;
    float dot = 0, noise = 0, g[PACK], x[PACK];
    for (int c = lane * PACK; exists && c < s.DV; c += lanes * PACK) {
        load<PACK>(g, in.dout + n * s.ldo + h * (size_t)s.o_head + c);
        load<PACK>(x, in.out + n * s.ldo + h * (size_t)s.o_head + c);
        UNROLL
        for (int i = 0; i < PACK; i++) dot += g[i] * x[i];
        if (MAPS == 1) continue;
        load<PACK>(x, in.noise + n * in.ldn + h * (size_t)in.n_head + c);
        UNROLL
        for (int i = 0; i < PACK; i++) noise += g[i] * x[i];
    }
    dot = lanes_sum(dot, lanes);
    if (MAPS > 1) noise = lanes_sum(noise, lanes);
    if (lane > 0 || b >= (unsigned)s.B) return;
    const unsigned tile = (b * heads + h) * (unsigned)a.tiles + t / Rows::QUERIES, query = t % Rows::QUERIES;
    float *to = a.rows + tile * (size_t)Rows::NUMBERS, factor = 1;
    if (MAPS > 1 && exists) {
        factor = diff_factor(in.l[n * in.ldl + h], in.factor);
        round_to(in.dl + n * in.ldl + h, -noise * diff_factor_slope(factor, in.factor)); // s = factor(l)
        noise *= factor;
        dot += noise; // <g, a1> = <g, o> + s <g, a2>
    }
    for (int m = 0; m < MAPS; m++) {
        size_t of_lse = ((size_t)b * s.NQ + h * MAPS + m) * s.T + t;
        to[m * Rows::QUERIES + query] = exists ? in.lse[of_lse] * (float)M_LOG2E : 0;
        to[Rows::DELTA + m * Rows::QUERIES + query] = m ? noise : dot;
    }
    to[Rows::FACTOR + query] = factor;
    to[Rows::LOW + query] = __int_as_float(attention_first_key(s, (int)b, (int)t));
    if (query == 0) a.counters[tile] = 0;
    if (row == 0) a.counters[(size_t)s.B * heads * a.tiles] = 0; // the ticket
}

// ---------------------------------------------------------------------------------------------------
// The order of sums

// *to += x. Of atomicAdd nvcc 13.0 makes an instruction that returns the sum on sm_90 and later, though nobody reads it
static __device__ inline void backward_add_to(float *to, float x) {
#if defined(CUDA_ON_CPU) || __CUDA_ARCH__ < 900
    atomicAdd(to, x);
#else
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
#endif
}
// A block has added to a tile of dQ. All threads' sums come before: __syncthreads or the like
static __device__ inline void backward_added(unsigned *counter) {
    __threadfence();
#ifdef CUDA_ON_CPU
    atomicAdd(counter, 1u);
#else
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
#endif
}

static __device__ inline unsigned backward_count(unsigned *counter) { return atomicAdd(counter, 0u); }
// seen: what was read before, so that its latency has passed
static __device__ inline void backward_wait(unsigned *counter, unsigned seen, unsigned wanted) {
    while (seen != wanted) {
#ifdef CUDA_ON_CPU
        cuda_on_cpu::fail("a block waits for sum %u of dQ, after sum %u: blocks run in the order of their tickets",
                          wanted, seen);
#endif
        seen = backward_count(counter);
    }
    __threadfence(); // the sums of other blocks are complete, and come before this block's
}

// An index that the compiler does not keep in a register from step to step.
static __device__ inline int backward_fresh(int index) {
#ifndef CUDA_ON_CPU
    asm volatile("" : "+r"(index));
#endif
    return index;
}

// Two adjacent numbers of a tile's rows, at an even place: one access to shared memory
static __device__ inline float2 backward_pair(const float *numbers) { return *(const float2 *)(const void *)numbers; }

// A query head, or a pair of them, and a tile of queries; its stage in shared memory
typedef struct {
    int head, tile, slot;
} BackwardStep;

// The steps of a block: the tiles of queries, for all query heads of the group, that attend to its keys
template <int KEYS, int MAPS> struct BackwardWalk {
    typedef BackwardRows<MAPS> Rows;
    enum { ROWS = BACKWARD_ROWS, QUERIES = Rows::QUERIES };
    const AttentionBackwardMma &a;
    int b, kv, key0, end; // end: last tile of queries + 1

    __device__ int first() const { return key0 / QUERIES; }

    // The keys of the next ticket; all threads call it. memory: WARP numbers
    static __device__ BackwardWalk take(const AttentionBackwardMma &a, int *memory) {
        const AttentionShape &s = a.shape;
        const int key_tiles = (s.T + KEYS - 1) / KEYS;
        if (threadIdx.x == 0) memory[0] = (int)atomicAdd(a.counters + (size_t)s.B * (s.NQ / MAPS) * a.tiles, 1u);
        __syncthreads();
        const int item = memory[0] / key_tiles, key_tile = key_tiles - 1 - memory[0] % key_tiles;
        BackwardWalk at = {a, item / s.NKV, item % s.NKV, key_tile * KEYS, 0};
        BackwardStep step = at.begin();
        int count = 0; // first keys are nondecreasing
        for (step.tile += (int)threadIdx.x; step.tile < a.tiles; step.tile += (int)blockDim.x)
            count += at.attends(step);
        at.end = at.first() + block_sum(count, memory);
        return at;
    }
    __device__ int group() const { return a.shape.NQ / MAPS / a.shape.NKV; }
    __device__ BackwardStep begin() const { return {kv * group(), first(), 0}; }
    __device__ int head_end() const { return (kv + 1) * group(); }
    __device__ BackwardStep next(BackwardStep s) const {
        s.slot = 1 - s.slot;
        if (s.tile + 1 < end) s.tile++;
        else s.head++, s.tile = first();
        return s;
    }
    __device__ size_t place(BackwardStep s) const { // place of the step's counters, sums and numbers
        return ((size_t)b * (a.shape.NQ / MAPS) + s.head) * a.tiles + s.tile;
    }
    // computed again where it is used, instead of two registers in between
    __device__ unsigned *counter(BackwardStep s) const {
        s.tile = backward_fresh(s.tile);
        return a.counters + place(s);
    }
    // Whether the first query, and so maybe others, attend to these keys or earlier ones
    __device__ bool attends(BackwardStep s) const {
        return __float_as_int(a.rows[place(s) * Rows::NUMBERS + Rows::LOW]) < key0 + KEYS;
    }
    // the number of tiles of keys that add to dQ before this one; whether it is 0
    __device__ unsigned before(BackwardStep s) const { return (unsigned)(s.tile * QUERIES / KEYS - key0 / KEYS); }
    __device__ bool is_first(BackwardStep s) const { return s.tile * QUERIES / KEYS == key0 / KEYS; }
    // whether no earlier tile of keys adds to dQ; numbers: the numbers of the step
    __device__ bool is_last(const float *numbers) const { return __float_as_int(numbers[Rows::LOW]) >= key0; }
    __device__ floatX *query_gradient(BackwardStep s, int t, int map) const { // row of dQ
        return a.dq + ((size_t)b * a.shape.T + t) * a.shape.ldq + (s.head * MAPS + map) * (size_t)a.shape.q_head;
    }
};

// Stores the lane's columns, `column` + 8j and the next, in the upper or lower row of fragments. add: += instead of =
template <int N>
static __device__ inline void backward_store(floatX *row, const float (&c)[N][4], int upper, int column, int width,
                                             float factor, bool add) {
    unsigned *to = (unsigned *)(void *)(row + column);
    UNROLL
    for (int j = 0; j < N; j++) {
        if (column + 8 * j >= width) break;
        const unsigned before = add ? to[4 * j] : 0;
        to[4 * j] = bf16_pair(factor * c[j][2 * upper] + bf16_first(before),
                              factor * c[j][2 * upper + 1] + bf16_second(before));
    }
}
