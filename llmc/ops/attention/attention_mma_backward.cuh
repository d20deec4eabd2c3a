/*
attention_mma_backward.cuh: the backward of attention and of diff_attention on the tensor cores, for bf16 storage whose
rows can be read in packs and heads up to 128 wide. Equations in attention.h and diff_attention.h.

  maps      1: attention. 2: a signal head and its noise head, whose scores are the rows of one tile: 8 products for
            both instead of 10
  mapping   A block computes dK and dV of a tile of keys, in registers, over all query heads of the key/value head and
            all tiles of queries that attend to the keys. A step has ROWS = 64 rows of Q: 64 queries, or 32 of both
            heads. Four warps (value warps) compute S, P and dV, the other four (key warps) dP, dS and dK, each for a
            quarter of the keys and all rows, so that P and dS are operands in registers. Value warps are a step ahead.
            P passes to the key warps through shared memory, where dS takes its place; then all compute dQ = dS K.
              phase 1   value warps: dV += P^T dO, then S and P of the next step; key warps: dP, dS, dK += dS^T Q
              phase 2   all: dQ; the copies of the next dO and, after it, the next Q
  dQ        is summed in fp32 in the workspace. A counter per tile of queries fixes the order: from the tile of keys on
            the diagonal down to the first one. The first block stores, the others add, the last one rounds and writes
            dQ. Blocks take tiles of keys from a ticket, for each key/value head from the last to the first, so that a
            block waits only for blocks that run. Blocks that start together do not wait: each walks from its diagonal
            upwards, and comes to a tile of queries one step after the block of the next keys.
  add       by atomic instructions without a result: no register waits for device memory. The counters order the sums
            of an element, so the result has the same bits in every run.
  numerics  products exact, sums fp32; exponentials in base 2; P and dS are rounded to bf16 as operands, and dS is
            computed from the rounded P; dq, dk, dv rounded once, after the rotation
  rope      For queries and keys of 64 and 128 the kernel also computes rope_backward, on fp32 sums in registers: a
            thread has both elements of each pair, in the last block of a dQ and at the end of a dK. Other widths, whose
            pairs are in other places of a tile, are rotated by rope_backward
  memory    in the workspace, per query and head: numbers (log of the sum, delta, factor, first key) and dQ in fp32,
            4 (D + 4) bytes
  shared    K and V, two tiles of Q, one of dO, two of P and dS. 128 keys: 144 KiB at widths of 128, 88 KiB at 64; 64
            keys: 96 KiB, for devices with 99 KiB. Packs of 16 bytes are permuted within their rows: no bank conflicts
  cycles    of a step of 64 queries (plain) or 32 (pairs), 128 keys, D = DV = 128 on an A100: 1024 products and 128
            bytes of shared memory per cycle, 16 exponentials. Not measured
                          tensor cores   shared memory   exponentials   L2: dQ, Q, dO
              plain       5120           4352            512            64 KiB: 13 bytes per cycle, of about 40
              pairs       4096           3648            512            56 KiB: 14
            The two kinds of warps share each tensor core, and one has products while the other has exponentials or dS.
            If all overlap, and a step loses 300 cycles to two barriers, 94% of the peak; if phase 2 overlaps nothing of
            its shared memory and products, and phase 1 reaches 75%: 63%. Tiles on the diagonal, half masked, waste
            128/T; the last block of the grid has up to T/64 steps per head alone
  source    Dao 2023, "FlashAttention-2"
*/
#pragma once
#include "../../cuda/async_copy.cuh"
#include "attention_wgmma_backward.cuh"

enum { BACKWARD_WARPS = 8, BACKWARD_THREADS = BACKWARD_WARPS * WARP };

// ---------------------------------------------------------------------------------------------------
// Tiles in shared memory, and products of a warp

// The pack that a lane gives to ldmatrix for 16 rows and 2 packs, APART packs from each other: matrices 1 and 3 are
// lower (of_rows) or to the right. Tiles have 8 or 16 packs in a row; pack p of row i is in place p ^ i % 8.
template <int PACKS, int APART = 1> static __device__ inline int backward_lane(bool of_rows) {
    const int i = (int)threadIdx.x % 8, odd = (int)threadIdx.x / 8 % 2, high = (int)threadIdx.x / 16 % 2;
    return backward_fresh((i + 8 * (of_rows ? odd : high)) * PACKS + (i ^ APART * (of_rows ? high : odd)));
}
// Rows `row` .. and packs `pack`, pack + 1; multiples of 8 and of 2
template <bool TRANSPOSED, int PACKS>
static __device__ inline void backward_load(unsigned (&to)[4], const uint4 *tile, int lane, int row, int pack) {
    matrices_load<TRANSPOSED>(to, tile + (lane ^ pack) + row * PACKS);
}
// c[0], c[1] += a times the left and the right half of b
static __device__ inline void backward_multiply(float (&left)[4], float (&right)[4], const unsigned (&a)[4],
                                                const unsigned (&b)[4]) {
    const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_bf16(left, a, first);
    mma_bf16(right, a, second);
}

// c (16 I keys, 8 J rows) = X Y^T. X: keys from row `key` of x on. Y: rows y. Both are PACKS packs wide
template <int PACKS, int I, int J>
static __device__ inline void backward_scores(float (&c)[I][J][4], const uint4 *x, const uint4 *y, int key) {
    const int of_a = backward_lane<PACKS>(true) + key * PACKS, of_b = backward_lane<PACKS>(false);
    UNROLL
    for (int n = 0; n < I * J * 4; n++) c[n / 4 / J][n / 4 % J][n % 4] = 0;
    UNROLL
    for (int pack = 0; pack < PACKS; pack += 2) {
        unsigned a[I][4], b[4];
        UNROLL
        for (int i = 0; i < I; i++) backward_load<false, PACKS>(a[i], x, of_a, 16 * i, pack);
        UNROLL
        for (int j = 0; j < J; j += 2) {
            backward_load<false, PACKS>(b, y, of_b, 8 * j, pack);
            UNROLL
            for (int i = 0; i < I; i++) backward_multiply(c[i][j], c[i][j + 1], a[i], b);
        }
    }
}

// c (16 I keys, 8 PACKS columns) += A Y, with the first 16 J rows y
template <int PACKS, int J, int I, int K, int N>
static __device__ inline void backward_add(float (&c)[I][N][4], const unsigned (&a)[I][K][4], const uint4 *y) {
    const int of_b = backward_lane<PACKS>(true);
    UNROLL
    for (int j = 0; j < J; j++) {
        UNROLL
        for (int pack = 0; pack < PACKS; pack += 2) {
            unsigned b[4];
            backward_load<true, PACKS>(b, y, of_b, 16 * j, pack);
            UNROLL
            for (int i = 0; i < I; i++) backward_multiply(c[i][pack], c[i][pack + 1], a[i][j], b);
        }
    }
}

// Rotates back the gradients x and y of two adjacent columns and of the columns half a head further. rope: the table's
// row of cosines and sines, from the column on
template <int D> static __device__ inline void backward_rotate(float *x, float *y, const float *rope) {
    const float2 c = *(const float2 *)(const void *)rope, s = *(const float2 *)(const void *)(rope + D / 2);
    const float first = x[0], second = x[1];
    x[0] = first * c.x + y[0] * s.x, y[0] = y[0] * c.x - first * s.x;
    x[1] = second * c.y + y[1] * s.y, y[1] = y[1] * c.y - second * s.y;
}

// Starts the copy of `count` rows; rows from `valid` on become zeros.
template <int PACKS>
static __device__ inline void backward_copy(uint4 *to, const floatX *from, int ld, int count, int valid, int width) {
    for (int n = backward_fresh((int)threadIdx.x); n < count * PACKS; n += BACKWARD_THREADS) {
        int row = n / PACKS, pack = n % PACKS;
        bool exists = row < valid && pack * 8 < width;
        copy_async(to + row * PACKS + (pack ^ row % 8), from + (exists ? row * (size_t)ld + pack * 8 : 0), exists);
    }
}

// ---------------------------------------------------------------------------------------------------
// The kernel

template <int D_, int DV_, int KEYS_, int MAPS_> struct BackwardBlock : BackwardWalk<KEYS_, MAPS_> {
    enum { D = D_, DV = DV_, KEYS = KEYS_, MAPS = MAPS_, ROWS = BACKWARD_ROWS };
    enum { QUERIES = ROWS / MAPS, WARP_KEYS = KEYS / 4, I = WARP_KEYS / 16, J = ROWS / 8, COLUMNS = D > DV ? D : DV };
    enum { Q_PACKS = ROWS * D / 8, SCORE_PACKS = KEYS * ROWS / 8, NUMBER_PACKS = BackwardRows<MAPS>::NUMBERS / 4 };
    // places in shared memory, in packs
    enum {
        K = 0,
        V = K + KEYS * D / 8,
        Q = V + KEYS * DV / 8,
        DOUT = Q + 2 * Q_PACKS,
        SCORES = DOUT + QUERIES * DV / 8
    };
    enum { NUMBERS = SCORES + 2 * SCORE_PACKS, OTHERS = NUMBERS + 2 * NUMBER_PACKS }; // WARP numbers
    enum { SHARED_BYTES = OTHERS * 16 + WARP * 4 };
    static_assert((int)SHARED_BYTES <= 163 << 10, "shared memory of sm_80");

    typedef BackwardWalk<KEYS, MAPS> Walk;
    typedef BackwardRows<MAPS> Rows;
    using Walk::a, Walk::b, Walk::kv, Walk::key0, Walk::place;
    uint4 *shared;

    __device__ const float *numbers(BackwardStep s) const {
        return (const float *)(const void *)(shared + NUMBERS + s.slot * NUMBER_PACKS);
    }

    __device__ void fetch_queries(BackwardStep at) const {
        const AttentionShape &s = a.shape;
        const int t0 = at.tile * QUERIES;
        const floatX *from = a.q + ((size_t)b * s.T + t0) * s.ldq + at.head * MAPS * (size_t)s.q_head;
        for (int m = 0; m < MAPS; m++)
            backward_copy<D / 8>(shared + Q + at.slot * Q_PACKS + m * (Q_PACKS / MAPS), from + m * (size_t)s.q_head,
                                 s.ldq, QUERIES, s.T - t0, s.D);
        const uint4 *of_rows = (const uint4 *)(const void *)a.rows + place(at) * NUMBER_PACKS;
        for (int n = (int)threadIdx.x; n < NUMBER_PACKS; n += BACKWARD_THREADS)
            copy_async(shared + NUMBERS + at.slot * NUMBER_PACKS + n, of_rows + n, true);
    }
    __device__ void fetch_gradients(BackwardStep at) const {
        const AttentionShape &s = a.shape;
        const int t0 = at.tile * QUERIES;
        backward_copy<DV / 8>(shared + DOUT, a.dout + ((size_t)b * s.T + t0) * s.ldo + at.head * (size_t)s.o_head,
                              s.ldo, QUERIES, s.T - t0, s.DV);
    }

    // The words of P or dS, two numbers of bf16 each, from the lane's first key and rows on: word(lane, i, upper, j)
    // has rows 8j + 2r, 8j + 2r + 1 and key 16i + 8 upper + g of the warp
    __device__ unsigned *words(BackwardStep step) const {
        return (unsigned *)(void *)(shared + SCORES + step.slot * SCORE_PACKS);
    }
    static __device__ int first_word(int key) {
        const int lane = (int)threadIdx.x % WARP;
        return backward_fresh(((key + lane / 4) * J + lane / 4) * 4 + lane % 4);
    }
    static __device__ int word(int first_of_lane, int i, int upper, int j) {
        return (first_of_lane ^ 4 * j) + (16 * i + 8 * upper) * J * 4;
    }

    // Writes P of a step to shared memory and makes the operand of dV: P, or P1 - s P2. key: this warp's, in the tile
    __device__ void probabilities(unsigned (&p)[I][J / 2 / MAPS][4], BackwardStep step, int key) const {
        const int lane = backward_fresh((int)threadIdx.x % WARP), t0 = step.tile * QUERIES, base = first_word(key);
        const float *of_rows = numbers(step);
        unsigned *to = words(step);
        const float scale = a.shape.scale * (float)M_LOG2E;
        const int *low = (const int *)(const void *)(of_rows + Rows::LOW);
        float c[I][J][4];
        backward_scores<D / 8>(c, shared + K, shared + Q + step.slot * Q_PACKS, key); // S
        // some query does not attend to some key of the warp
        const bool part = key0 + key + WARP_KEYS - 1 > t0 || low[QUERIES - 1] > key0 + key;
        UNROLL
        for (int n = 0; n < J * I * 4; n++) {
            float &x = c[n / 4 % I][n / 4 / I][n % 4];
            const int row = n / 4 / I * 8 + lane % 4 * 2 + n % 2;
            x = exp2_fast(scale * x - of_rows[row]);
            if (part) {
                const int query = row % QUERIES, k = key0 + key + n / 4 % I * 16 + n / 2 % 2 * 8 + lane / 4;
                if (k > t0 + query || k < low[query]) x = 0;
            }
        }
        UNROLL
        for (int n = 0; n < I * J * 2; n++) {
            const int i = n / 2 / J, j = n / 2 % J, upper = n % 2;
            const unsigned pair = bf16_pair(c[i][j][2 * upper], c[i][j][2 * upper + 1]);
            to[word(base, i, upper, j)] = pair;
        }
        UNROLL
        for (int n = 0; n < I * J && MAPS == 2; n++) {
            const int i = n / J, j = n / 2 % (J / 2), upper = n % 2; // j: in the first head
            const float *factor = of_rows + Rows::FACTOR + 8 * j + lane % 4 * 2;
            const float *x = &c[i][j][2 * upper], *noise = &c[i][j + J / 2][2 * upper];
            p[i][j / 2][j % 2 * 2 + upper] = bf16_pair(x[0] - factor[0] * noise[0], x[1] - factor[1] * noise[1]);
        }
    }

    // The operand of dV of one head is P as the same lane has stored it. It is read late, since no registers are left
    // while dQ is computed.
    __device__ void read_probabilities(unsigned (&p)[I][J / 2 / MAPS][4], BackwardStep step, int key) const {
        const unsigned *from = words(step);
        const int base = first_word(key);
        UNROLL
        for (int n = 0; n < I * J / MAPS * 2; n++) {
            const int i = n / 2 / (J / MAPS), j = n / 2 % (J / MAPS), upper = n % 2;
            p[i][j / 2][j % 2 * 2 + upper] = from[word(base, i, upper, j)];
        }
    }

    // dS of a step, in place of P and as the operand of dK
    __device__ void score_gradients(unsigned (&ds)[I][J / 2][4], BackwardStep step, int key) const {
        const int lane = backward_fresh((int)threadIdx.x % WARP), base = first_word(key);
        const float *of_rows = numbers(step);
        unsigned *to = words(step);
        enum { H = I == 1 || MAPS == 2 ? J / 2 : J }; // of J / MAPS at a time: otherwise the compiler spills registers
        UNROLL
        for (int j0 = 0; j0 < J / MAPS; j0 += H) {
            float c[I][H][4];
            backward_scores<DV / 8>(c, shared + V, shared + DOUT + j0 * DV, key); // dP = V dO^T
            UNROLL
            for (int n = 0; n < I * H * 2 * MAPS; n++) {
                const int i = n / 2 % I, j = j0 + n / 2 / I, upper = n % 2;
                const float *delta = of_rows + Rows::DELTA + 8 * j + lane % 4 * 2;
                unsigned *at = to + word(base, i, upper, j), pair = *at;
                float dp[2] = {c[i][j % H][2 * upper], c[i][j % H][2 * upper + 1]};
                if (MAPS == 2 && j >= J / 2) { // dP2 = -s dP, delta2 = -s <g,a2>
                    const float *factor = of_rows + Rows::FACTOR + 8 * (j - J / 2) + lane % 4 * 2;
                    pair ^= 0x80008000u; // -P2
                    dp[0] *= factor[0], dp[1] *= factor[1];
                }
                pair = bf16_pair(bf16_first(pair) * (dp[0] - delta[0]), bf16_second(pair) * (dp[1] - delta[1]));
                *at = ds[i][j / 2][j % 2 * 2 + upper] = pair;
            }
        }
    }

    // dQ = dS K: for each warp 32 rows, and an eighth of a head's columns in both halves of it: c[i][2n] has columns 8n
    // to 8n + 7 of the eighth, c[i][2n + 1] the columns half a head further
    __device__ void query_gradients(BackwardStep step, bool is_last) const {
        enum { PACKS = D / 8, N = D / 32 };
        const AttentionShape &s = a.shape;
        const int thread = backward_fresh((int)threadIdx.x), warp = thread / WARP, lane = thread % WARP,
                  row0 = warp / 4 * 32;
        const int of_a = backward_lane<J>(false) ^ row0 / 8,
                  of_b = backward_lane<PACKS, PACKS / 2>(true) ^ warp % 4 * (N / 2);
        const uint4 *scores = shared + SCORES + step.slot * SCORE_PACKS;
        float c[2][N][4] = {{{0}}};
        UNROLL
        for (int key = 0; key < KEYS; key += 16) {
            unsigned x[2][4], y[4];
            UNROLL
            for (int i = 0; i < 2; i++) backward_load<true, J>(x[i], scores, of_a, key, 2 * i);
            UNROLL
            for (int n = 0; n < N / 2; n++) {
                backward_load<true, PACKS>(y, shared + K, of_b, key, n);
                UNROLL
                for (int i = 0; i < 2; i++) backward_multiply(c[i][2 * n], c[i][2 * n + 1], x[i], y);
            }
        }
        const int t0 = step.tile * QUERIES;
        const bool is_first = Walk::is_first(step);
        float *sum = a.sums + place(step) * (ROWS * D) + threadIdx.x;
        if (!is_last) {
            UNROLL
            for (int n = 0; n < 8 * N && is_first; n++, sum += BACKWARD_THREADS) *sum = c[n / 4 / N][n / 4 % N][n % 4];
            UNROLL
            for (int n = 0; n < 8 * N && !is_first; n++, sum += BACKWARD_THREADS)
                backward_add_to(sum, c[n / 4 / N][n / 4 % N][n % 4]);
            return;
        }
        UNROLL
        for (int i = 0; i < 2; i++) {
            UNROLL
            for (int n = 0; n < 4 * N && !is_first; n++, sum += BACKWARD_THREADS) c[i][n / 4][n % 4] += __ldcg(sum);
            UNROLL
            for (int upper = 0; upper < 2; upper++) {
                const int row = row0 + 16 * i + 8 * upper + lane / 4, t = t0 + row % QUERIES;
                if (t >= s.T) continue;
                const int column = warp % 4 * (D / 8) + lane % 4 * 2;
                unsigned *to = (unsigned *)(void *)(Walk::query_gradient(step, t, row / QUERIES) + column);
                UNROLL
                for (int n = 0; n < N / 2; n++) {
                    if (column + 8 * n >= s.D) break;
                    float *x = &c[i][2 * n][2 * upper], *y = &c[i][2 * n + 1][2 * upper];
                    if (s.rope) backward_rotate<D>(x, y, s.rope + (size_t)t * D + column + 8 * n);
                    to[4 * n] = bf16_pair(s.scale * x[0], s.scale * x[1]);
                    if (column + 8 * n + D / 2 < s.D) to[4 * n + D / 4] = bf16_pair(s.scale * y[0], s.scale * y[1]);
                }
            }
        }
    }

    __device__ void rotate_keys(float (&c)[I][COLUMNS / 8][4], int key) const {
        const int lane = backward_fresh((int)threadIdx.x % WARP);
        UNROLL
        for (int n = 0; n < I * 2; n++) {
            const int i = n / 2, upper = n % 2, t = key0 + key + 16 * i + 8 * upper + lane / 4;
            UNROLL
            for (int j = 0; j < D / 16; j++) {
                if (t >= a.shape.T) break;
                backward_rotate<D>(&c[i][j][2 * upper], &c[i][j + D / 16][2 * upper],
                                   a.shape.rope + (size_t)t * D + 8 * j + lane % 4 * 2);
            }
        }
    }

    // rows of dK or dV from row `key` on
    template <int N>
    __device__ void write(floatX *to, const float (&c)[I][N][4], int key, int head, int width, float factor,
                          bool add) const {
        const AttentionShape &s = a.shape;
        const int lane = backward_fresh((int)threadIdx.x % WARP);
        UNROLL
        for (int n = 0; n < I * 2; n++) {
            const int i = n / 2, upper = n % 2, t = key0 + key + 16 * i + 8 * upper + lane / 4;
            if (t >= s.T) continue;
            floatX *row = to + ((size_t)b * s.T + t) * s.ldkv + kv * (size_t)head;
            backward_store(row, c[i], upper, lane % 4 * 2, width, factor, add);
        }
    }
};

template <int D, int DV, int KEYS, int MAPS>
static __global__ void __launch_bounds__(BACKWARD_THREADS, 1) attention_backward_mma_kernel(AttentionBackwardMma a) {
    typedef BackwardBlock<D, DV, KEYS, MAPS> Block;
    DYNAMIC_SHARED(uint4, shared);
    int *memory = (int *)(void *)(shared + Block::OTHERS);
    const AttentionShape &s = a.shape;
    const int thread = (int)threadIdx.x,
              warp = __shfl_sync(ALL_LANES, thread / WARP, 0); // nvcc knows that it is uniform
    const int key = warp % 4 * Block::WARP_KEYS;
    const bool of_values = warp < 4;
    Block at = {Block::take(a, memory), shared};
    const int head_end = at.head_end();
    BackwardStep step = at.begin();
    const size_t kv_row = (size_t)at.b * s.T + at.key0;
    float sum[Block::I][Block::COLUMNS / 8][4] = {{{0}}}; // dV or dK
    unsigned p[Block::I][Block::J / 2 / MAPS][4];

    backward_copy<D / 8>(shared + Block::K, a.k + kv_row * s.ldkv + at.kv * (size_t)s.k_head, s.ldkv, KEYS,
                         s.T - at.key0, s.D);
    backward_copy<DV / 8>(shared + Block::V, a.v + kv_row * s.ldkv + at.kv * (size_t)s.v_head, s.ldkv, KEYS,
                          s.T - at.key0, s.DV);
    BackwardStep next = at.next(step);
    at.fetch_queries(step);
    at.fetch_gradients(step);
    if (next.head < head_end) at.fetch_queries(next);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    if (of_values) {
        at.probabilities(p, step, key);
        if (MAPS == 1) at.read_probabilities(p, step, key);
    }
    __syncthreads();
    for (; step.head < head_end; step = next) {
        next = at.next(step);
        unsigned *const kept = a.counters + at.place(step);
        const auto counter = [&] { return MAPS == 2 ? kept : at.counter(step); }; // so that fewer registers spill
        const unsigned before = at.before(step);
        const unsigned seen = thread == 0 && before ? backward_count(counter()) : 0;
        const bool is_last = at.is_last(at.numbers(step));
        if (of_values) {
            backward_add<DV / 8, Block::J / 2 / MAPS>(sum, p, shared + Block::DOUT); // dV += P^T dO
            if (next.head < head_end) at.probabilities(p, next, key);
        } else {
            unsigned ds[Block::I][Block::J / 2][4];
            at.score_gradients(ds, step, key);
            backward_add<D / 8, Block::J / 2>(sum, ds, shared + Block::Q + step.slot * Block::Q_PACKS); // dK += dS^T Q
        }
        if (thread == 0 && before) backward_wait(counter(), seen, before);
        __syncthreads();
        if (next.head < head_end) {
            const BackwardStep later = at.next(next);
            at.fetch_gradients(next);
            if (later.head < head_end) at.fetch_queries(later);
        }
        copy_commit();
        at.query_gradients(step, is_last);
        if (of_values && MAPS == 1 && next.head < head_end) at.read_probabilities(p, next, key);
        copy_wait<0>();
        __syncthreads();
        if (thread == 0) backward_added(counter());
    }
    if (MAPS == 2) at.kv = step.head / at.group() - 1; // instead of a register during the loop
    if (of_values) at.write(a.dv, sum, key, s.v_head, s.DV, 1, a.add_dv);
    else {
        if (s.rope && s.rope_heads > s.NQ) at.rotate_keys(sum, key);
        at.write(a.dk, sum, key, s.k_head, s.D, s.scale, false);
    }
}

template <int D, int DV, int MAPS> static inline void attention_mma_backward_launch(const AttentionBackwardMma &a) {
    enum { MOST = BackwardBlock<D, DV, 128, MAPS>::SHARED_BYTES };
    const AttentionShape s = a.shape;
    int limit = 0, index = 0;
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
#define ATTENTION_BACKWARD(KEYS)                                                                                 \
    do {                                                                                                         \
        enum { BYTES = BackwardBlock<D, DV, KEYS, MAPS>::SHARED_BYTES };                                         \
        LAUNCH_ALLOW_SHARED((attention_backward_mma_kernel<D, DV, KEYS, MAPS>), BYTES);                          \
        LAUNCH((attention_backward_mma_kernel<D, DV, KEYS, MAPS>),                                               \
               blocks_of((size_t)s.B *s.NKV *(((size_t)s.T + KEYS - 1) / KEYS), 1), BACKWARD_THREADS, BYTES, a); \
    } while (0)
    if constexpr (MOST <= 99 << 10) ATTENTION_BACKWARD(128);
    else if (MOST <= limit) ATTENTION_BACKWARD(128);
    else ATTENTION_BACKWARD(64);
#undef ATTENTION_BACKWARD
}

// Whether the kernel includes rope_backward. Hopper's kernel does not.
static inline bool attention_mma_backward_rotates(AttentionShape s, int maps) {
    return s.rope && s.D == backward_width(s, maps) && !hopper_heads(s.D, s.DV);
}

// dq, dk, dv, dout, q, k, v and add_dv are in a. MAPS 2: diff_attention of pairs. Returns whether it has also computed
// rope_backward.
template <int MAPS>
static inline bool attention_mma_backward(AttentionBackwardMma a, const BackwardInputs &in, AttentionShape s) {
    assert(s.query_offset == 0 && s.NQ / MAPS % s.NKV == 0);
    const bool rotates = attention_mma_backward_rotates(s, MAPS);
    if (!rotates) s.rope = NULL;
    size_t bytes = attention_mma_backward_memory(&a, s, MAPS, NULL);
    attention_mma_backward_memory(&a, s, MAPS, (char *)(void *)ops_workspace_take(bytes));
    auto rows = attention_backward_rows_kernel<MAPS>;
    LAUNCH_ROWS_EITHER(rows, rows, true, (size_t)s.B * a.tiles * (BACKWARD_ROWS / MAPS) * (s.NQ / MAPS), s.DV, a, in);
    if (hopper_heads(s.D, s.DV) && attention_wgmma_backward_launch<MAPS>(a)) return rotates;
    if (s.D <= 64 && s.DV <= 64) attention_mma_backward_launch<64, 64, MAPS>(a);
    else if (MAPS == 1 && s.D <= 64) attention_mma_backward_launch<64, 128, 1>(a);
    else attention_mma_backward_launch<128, 128, MAPS>(a);
    return rotates;
}
