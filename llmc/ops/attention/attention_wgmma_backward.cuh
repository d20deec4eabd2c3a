/*
attention_wgmma_backward.cuh: the backward of attention and of diff_attention on the tensor cores of Hopper (sm_90a),
for heads of 64 or 128. attention_mma_backward.cuh states the contract, numerics, memory and order of sums;
equations are in attention.h and diff_attention.h. hopper.cuh describes the instructions.

  mapping   A block has a tile of 128 keys, and walks through steps of ROWS = 64 rows of Q: 64 queries, or 32 of both
            heads. Two warpgroups compute 64 keys each, with dK and dV in registers. A thread of the third one copies
            (TMA, two stages), another waits for the block's turn to add to dQ, and passes it on. Products:
              S = K Q^T, dP = V dO^T    from shared memory
              dV += P^T dO              P, or P1 - s P2, in registers: S has the layout of operand A
              dK += dS^T Q              dS in registers; dO and Q are transposed, since sums are over their rows
              dQ = dS K                 dS through shared memory, both transposed: of 64 rows each warpgroup half the
                                        columns, over all keys
  step      S; dP, under which P; dV, under which dS; dK; dQ, when both warpgroups have written dS. dS has two places,
            so that one meeting in a step is enough. While one warpgroup adds dQ, the other one's products go on
  dQ        added in fp32, four numbers per instruction, whose results are not used, in the order of fragments
  registers 24 for a thread that copies, 240 for one that multiplies: dK and dV have 128, S and dP 32 each, P 16 twice
            (wgmma still reads one while dS takes the other's place), dQ 32
  shared    K, V, two stages of Q and dO, two of dS: 160 KiB at widths of 128, 96 at 64; one block per multiprocessor
  cycles    of a step at D = DV = 128 on an H100: 2048 products, 128 bytes of shared memory, 16 exponentials per cycle
                          tensor cores   shared memory   exponentials   L2: dQ, Q, dO
              plain       2560           2568            512            64 KiB: 25 bytes per cycle
              pairs       2048           2304            512            56 KiB: 25
            Shared memory is as slow as the tensor cores, since A of 64 rows is read for 64 columns only. If all
            overlaps, 89 to 99% of the peak; if each step shows a warpgroup's exponentials, the meeting and the sums of
            dQ (900 cycles): 64 to 74%. L2 has about as many bytes per cycle, and may be slower. Not measured
  rejected  128 rows in a step: S and dP have 128 registers, beside 128 of dK and dV. S as rows x keys: P and dS then
            pass through shared memory for dV and dK too. dQ added under S of the next step: ptxas serializes wgmma
            where branches read registers of earlier ones. Bulk reductions of dQ: 32 KiB more through shared memory
  source    Shah and others 2024, "FlashAttention-3"
*/
#pragma once
#include "../../cuda/hopper.cuh"
#include "attention_backward_order.cuh"

enum { WGMMA_BACKWARD_KEYS = 128, WGMMA_BACKWARD_STAGES = 2, WGMMA_MULTIPLIERS = 2 * WARPGROUP };

typedef struct {
    AttentionBackwardMma a;
    CUtensorMap q, k, v, dout;
} AttentionBackwardWgmma;

// Places in shared memory, in bytes. A matrix is boxes of all its rows.
template <int D, int DV, int MAPS> struct WgmmaBackwardPlaces {
    enum { KEYS = WGMMA_BACKWARD_KEYS, STAGES = WGMMA_BACKWARD_STAGES, QUERIES = BACKWARD_ROWS / MAPS };
    enum { K = 0, V = K + KEYS * D * 2, TILES = V + KEYS * DV * 2 };
    enum { DOUT = BACKWARD_ROWS * D * 2, TILE_BYTES = DOUT + QUERIES * DV * 2 }; // a stage has Q, and dO behind it
    enum { SCORES = TILES + STAGES * TILE_BYTES, SCORE_BYTES = KEYS * BACKWARD_ROWS * 2 };
    enum { NUMBERS = SCORES + 2 * SCORE_BYTES, NUMBER_BYTES = BackwardRows<MAPS>::NUMBERS * 4 };
    enum { BARRIERS = NUMBERS + STAGES * NUMBER_BYTES, OTHERS = BARRIERS + (2 * STAGES + 4) * 8 }; // WARP numbers
    enum { BYTES = OTHERS + WARP * 4 + BOX_ALIGNMENT };
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

typedef struct {
    uint64_t full[WGMMA_BACKWARD_STAGES], empty[WGMMA_BACKWARD_STAGES];
    uint64_t keys, scores, turn, added; // dS is written; this block's sums of dQ are next; they are added
} WgmmaBackwardBarriers;

// Arrives once for a warp, when its lanes are here.
static __device__ inline void wgmma_backward_arrive(uint64_t *barrier) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(barrier);
}

// Copies K and V, and the tiles of all steps: by one thread.
template <int D, int DV, int MAPS>
static __device__ inline void wgmma_backward_copy(const AttentionBackwardWgmma &of,
                                                  const BackwardWalk<WGMMA_BACKWARD_KEYS, MAPS> &at, char *shared,
                                                  WgmmaBackwardBarriers *barriers) {
    typedef WgmmaBackwardPlaces<D, DV, MAPS> Places;
    const AttentionShape &s = of.a.shape;
    mbarrier_expect(&barriers->keys, Places::TILES);
    for (int c = 0; c < D; c += BOX_COLUMNS)
        tensor_load(shared + Places::K + c * Places::KEYS * 2, &of.k, at.kv * s.k_head + c, at.key0, at.b,
                    &barriers->keys);
    for (int c = 0; c < DV; c += BOX_COLUMNS)
        tensor_load(shared + Places::V + c * Places::KEYS * 2, &of.v, at.kv * s.v_head + c, at.key0, at.b,
                    &barriers->keys);
    int n = 0;
    for (BackwardStep step = at.begin(); step.head < at.head_end(); step = at.next(step), n++) {
        uint64_t *full = &barriers->full[step.slot];
        char *tiles = shared + Places::TILES + step.slot * Places::TILE_BYTES;
        const int t0 = step.tile * Places::QUERIES;
        if (n >= Places::STAGES) mbarrier_wait(&barriers->empty[step.slot], n / Places::STAGES + 1 & 1);
        mbarrier_expect(full, Places::TILE_BYTES + Places::NUMBER_BYTES);
        for (int c = 0; c < D; c += BOX_COLUMNS)
            for (int map = 0; map < MAPS; map++)
                tensor_load(tiles + c * BACKWARD_ROWS * 2 + map * Places::QUERIES * BOX_ROW, &of.q,
                            (step.head * MAPS + map) * s.q_head + c, t0, at.b, full);
        for (int c = 0; c < DV; c += BOX_COLUMNS)
            tensor_load(tiles + Places::DOUT + c * Places::QUERIES * 2, &of.dout, step.head * s.o_head + c, t0, at.b,
                        full);
        bulk_load(shared + Places::NUMBERS + step.slot * Places::NUMBER_BYTES,
                  of.a.rows + at.place(step) * BackwardRows<MAPS>::NUMBERS, Places::NUMBER_BYTES, full);
    }
}

// Waits for this block's turn to add to dQ of each step, and passes it on: by one thread.
template <int MAPS>
static __device__ inline void wgmma_backward_turns(const BackwardWalk<WGMMA_BACKWARD_KEYS, MAPS> &at,
                                                   WgmmaBackwardBarriers *barriers) {
    int n = 0;
    for (BackwardStep step = at.begin(); step.head < at.head_end(); step = at.next(step), n++) {
        unsigned *counter = at.a.counters + at.place(step);
        const unsigned before = at.before(step);
        if (before) backward_wait(counter, backward_count(counter), before);
        mbarrier_arrive(&barriers->turn);
        mbarrier_wait(&barriers->added, n & 1);
        backward_added(counter);
    }
}

// The 64 keys of a warpgroup
template <int D, int DV, int MAPS> struct WgmmaBackwardKeys {
    typedef WgmmaBackwardPlaces<D, DV, MAPS> Places;
    typedef BackwardRows<MAPS> Rows;
    enum { ROWS = BACKWARD_ROWS, QUERIES = Rows::QUERIES, KEYS = Places::KEYS, J = ROWS / 8, JQ = QUERIES / 8 };
    const BackwardWalk<KEYS, MAPS> &at;
    char *shared;
    WgmmaBackwardBarriers *barriers;
    int group, key; // number of the warpgroup; the warp's first key, in the tile

    // The columns of a matrix of `rows` rows from `column` on, over which sums are
    static __device__ uint64_t by_columns(const char *boxes, int rows, int column) {
        return tile_of_rows(boxes + column / BOX_COLUMNS * rows * BOX_ROW, column % BOX_COLUMNS);
    }

    // P from S, as operand a: `all` for all rows, p for dV
    __device__ void probabilities(unsigned (&all)[J / 2][4], unsigned (&p)[JQ / 2][4], float (&c)[J][4],
                                  BackwardStep step, const float *numbers) const {
        const int lane = backward_fresh((int)threadIdx.x % WARP), t0 = step.tile * QUERIES, first = at.key0 + key;
        const float scale = at.a.shape.scale * (float)M_LOG2E;
        const int *low = (const int *)(const void *)(numbers + Rows::LOW);
        const bool part = first + 15 > t0 || low[QUERIES - 1] > first; // a query does not attend to a key of the warp
        UNROLL
        for (int n = 0; n < J * 2; n++) {
            const float2 log = backward_pair(numbers + n / 2 * 8 + lane % 4 * 2);
            float *x = &c[n / 2][n % 2 * 2];
            x[0] = exp2_fast(scale * x[0] - log.x), x[1] = exp2_fast(scale * x[1] - log.y);
        }
        UNROLL
        for (int n = 0; n < J * 4 && part; n++) {
            const int query = (n / 4 * 8 + lane % 4 * 2 + n % 2) % QUERIES, k = first + n / 2 % 2 * 8 + lane / 4;
            c[n / 4][n % 4] = (k > t0 + query) | (k < low[query]) ? 0 : c[n / 4][n % 4];
        }
        UNROLL
        for (int n = 0; n < J * 2; n++) all[n / 4][n % 4] = bf16_pair(c[n / 2][n % 2 * 2], c[n / 2][n % 2 * 2 + 1]);
        UNROLL
        for (int n = 0; n < JQ * 2; n++) {
            const int j = n / 2, i = n % 2 * 2;
            p[n / 4][n % 4] = all[n / 4][n % 4];
            if (MAPS == 1) continue;
            const float2 factor = backward_pair(numbers + Rows::FACTOR + 8 * j + lane % 4 * 2);
            const float *noise = c[(j + JQ) % J];
            p[n / 4][n % 4] = bf16_pair(c[j][i] - factor.x * noise[i], c[j][i + 1] - factor.y * noise[i + 1]);
        }
    }

    // dS in place of P, and to shared memory
    __device__ void score_gradients(unsigned (&ds)[J / 2][4], const float (&dp)[JQ][4], char *scores,
                                    const float *numbers) const {
        const int lane = backward_fresh((int)threadIdx.x % WARP);
        UNROLL
        for (int n = 0; n < J * 2; n++) {
            const int j = n / 2, i = n % 2 * 2;
            const float2 delta = backward_pair(numbers + Rows::DELTA + 8 * j + lane % 4 * 2);
            float x[2] = {dp[j % JQ][i], dp[j % JQ][i + 1]};
            unsigned &pair = ds[n / 4][n % 4];
            if (j >= JQ) { // dP2 = -s dP, delta2 = -s <g,a2>
                const float2 factor = backward_pair(numbers + Rows::FACTOR + 8 * (j - JQ) + lane % 4 * 2);
                pair ^= 0x80008000u; // -P2
                x[0] *= factor.x, x[1] *= factor.y;
            }
            pair = bf16_pair(bf16_first(pair) * (x[0] - delta.x), bf16_second(pair) * (x[1] - delta.y));
        }
        const int row = key + lane % 16;
        UNROLL
        for (int n = 0; n < J / 2; n++)
            matrices_store(scores + row * BOX_ROW + ((2 * n + lane / 16) ^ row % 8) * 16, ds[n]);
    }

    // Adds step n's dQ, or stores it, when it is this block's turn.
    __device__ void query_gradients(float (&dq)[D / 16][4], BackwardStep step, bool is_last, int n) const {
        const AttentionShape &s = at.a.shape;
        const int lane = backward_fresh((int)threadIdx.x % WARP), row0 = key % 64 + lane / 4;
        const bool is_first = at.is_first(step);
        float *sum = at.a.sums + at.place(step) * (ROWS * D) + 4 * threadIdx.x;
        mbarrier_wait(&barriers->turn, n & 1);
        if (is_last && !is_first) {
            UNROLL
            for (int i = 0; i < D / 16; i++, sum += 4 * WGMMA_MULTIPLIERS) {
                const float4 x = __ldcg((const float4 *)(const void *)sum);
                dq[i][0] += x.x, dq[i][1] += x.y, dq[i][2] += x.z, dq[i][3] += x.w;
            }
        } else if (!is_last && is_first) {
            UNROLL
            for (int i = 0; i < D / 16; i++, sum += 4 * WGMMA_MULTIPLIERS)
                *(float4 *)(void *)sum = make_float4(dq[i][0], dq[i][1], dq[i][2], dq[i][3]);
        } else if (!is_last) {
            UNROLL
            for (int i = 0; i < D / 16; i++, sum += 4 * WGMMA_MULTIPLIERS) add_four(sum, dq[i]);
        }
        UNROLL
        for (int upper = 0; upper < 2 && is_last; upper++) {
            const int row = row0 + 8 * upper, t = step.tile * QUERIES + row % QUERIES;
            if (t >= s.T) continue;
            backward_store(at.query_gradient(step, t, row / QUERIES), dq, upper, group * (D / 2) + lane % 4 * 2, s.D,
                           s.scale, false);
        }
        wgmma_backward_arrive(&barriers->added);
    }

    // rows of dK or dV
    template <int N>
    __device__ void write(floatX *to, const float (&c)[N][4], int head, int width, float factor, bool add) const {
        const AttentionShape &s = at.a.shape;
        const int lane = backward_fresh((int)threadIdx.x % WARP);
        UNROLL
        for (int upper = 0; upper < 2; upper++) {
            const int t = at.key0 + key + 8 * upper + lane / 4;
            if (t >= s.T) continue;
            floatX *row = to + ((size_t)at.b * s.T + t) * s.ldkv + at.kv * (size_t)head;
            backward_store(row, c, upper, lane % 4 * 2, width, factor, add);
        }
    }

    __device__ void run() const {
        const AttentionBackwardMma &a = at.a;
        const char *k = shared + Places::K, *v = shared + Places::V;
        const char *group_k = k + group * 64 * BOX_ROW, *group_v = v + group * 64 * BOX_ROW; // rows
        const char *of_dq = k + group * (D == 64 ? BOX_ROW / 2 : KEYS * BOX_ROW);            // columns
        float dk[D / 8][4] = {{0}}, dv[DV / 8][4] = {{0}};
        int n = 0;
        mbarrier_wait(&barriers->keys, 0);
        for (BackwardStep step = at.begin(); step.head < at.head_end(); step = at.next(step), n++) {
            const char *q = shared + Places::TILES + step.slot * Places::TILE_BYTES, *dout = q + Places::DOUT;
            char *scores = shared + Places::SCORES + n % 2 * Places::SCORE_BYTES;
            const float *numbers =
                (const float *)(const void *)(shared + Places::NUMBERS + step.slot * Places::NUMBER_BYTES);
            float s[J][4], dp[JQ][4], dq[D / 16][4];
            unsigned p[JQ / 2][4], ds[J / 2][4];
            mbarrier_wait(&barriers->full[step.slot], n / Places::STAGES & 1);
            wgmma_fence();
            UNROLL
            for (int c = 0; c < D; c += 16) // S = K Q^T
                wgmma_shared<false, false>(s, by_columns(group_k, KEYS, c), by_columns(q, ROWS, c), c > 0);
            wgmma_commit();
            UNROLL
            for (int c = 0; c < DV; c += 16) // dP = V dO^T
                wgmma_shared<false, false>(dp, by_columns(group_v, KEYS, c), by_columns(dout, QUERIES, c), c > 0);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_pin(s);
            probabilities(ds, p, s, step, numbers);
            wgmma_pin(p); // registers of their own, which are not read until the products are complete
            wgmma_fence();
            UNROLL
            for (int c = 0; c < QUERIES; c += 16) // dV += P^T dO
                wgmma_registers<true>(dv, p[c / 16], tile_of_columns(dout, c, QUERIES), true);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_pin(dp);
            score_gradients(ds, dp, scores, numbers);
            proxy_fence();
            wgmma_backward_arrive(&barriers->scores);
            wgmma_pin(ds);
            wgmma_fence();
            UNROLL
            for (int c = 0; c < ROWS; c += 16) // dK += dS^T Q
                wgmma_registers<true>(dk, ds[c / 16], tile_of_columns(q, c, ROWS), true);
            wgmma_commit();
            mbarrier_wait(&barriers->scores, n & 1);
            wgmma_fence();
            UNROLL
            for (int c = 0; c < KEYS; c += 16) // dQ = dS K
                wgmma_shared<true, true>(dq, tile_of_columns(scores, c, KEYS), tile_of_columns(of_dq, c, KEYS), c > 0);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin(dv), wgmma_pin(dk), wgmma_pin(dq);
            const bool is_last = at.is_last(numbers);
            wgmma_backward_arrive(&barriers->empty[step.slot]);
            query_gradients(dq, step, is_last, n);
        }
        write(a.dk, dk, a.shape.k_head, D, a.shape.scale, false);
        write(a.dv, dv, a.shape.v_head, DV, 1, a.add_dv);
    }
};
#endif

template <int D, int DV, int MAPS>
static __global__ void __launch_bounds__(WGMMA_MULTIPLIERS + WARPGROUP, 1)
    attention_wgmma_backward_kernel(const __grid_constant__ AttentionBackwardWgmma of) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef WgmmaBackwardPlaces<D, DV, MAPS> Places;
    DYNAMIC_SHARED(uint4, memory);
    char *shared = (char *)(void *)memory;
    shared += -shared_address(shared) % BOX_ALIGNMENT;
    WgmmaBackwardBarriers *barriers = (WgmmaBackwardBarriers *)(void *)(shared + Places::BARRIERS);
    if (threadIdx.x == 0) {
        const int warps = WGMMA_MULTIPLIERS / WARP;
        for (int i = 0; i < Places::STAGES; i++)
            mbarrier_init(&barriers->full[i], 1), mbarrier_init(&barriers->empty[i], warps);
        mbarrier_init(&barriers->keys, 1), mbarrier_init(&barriers->scores, warps);
        mbarrier_init(&barriers->turn, 1), mbarrier_init(&barriers->added, warps);
        mbarrier_init_fence();
    }
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARP, 0); // nvcc knows that it is uniform
    const auto at = BackwardWalk<Places::KEYS, MAPS>::take(of.a, (int *)(void *)(shared + Places::OTHERS));
    if (warp * WARP >= WGMMA_MULTIPLIERS) {
        registers_less<24>();
        if (threadIdx.x == WGMMA_MULTIPLIERS) wgmma_backward_copy<D, DV>(of, at, shared, barriers);
        if (threadIdx.x == WGMMA_MULTIPLIERS + WARP) wgmma_backward_turns(at, barriers);
    } else {
        registers_more<240>();
        const WgmmaBackwardKeys<D, DV, MAPS> keys = {at, shared, barriers, warp / 4, warp * 16};
        keys.run();
    }
#else
    (void)of;
#ifdef __CUDACC__
    __trap(); // hopper_heads
#endif
#endif
}

// Returns false if the kernel cannot start.
template <int D, int DV, int MAPS> static inline bool attention_wgmma_backward_widths(const AttentionBackwardMma &a) {
    typedef WgmmaBackwardPlaces<D, DV, MAPS> Places;
    const AttentionShape &s = a.shape;
    static const bool starts =
        hopper_starts(attention_wgmma_backward_kernel<D, DV, MAPS>, "attention_wgmma_backward_kernel", D, DV, MAPS);
    if (!starts) return false;
    AttentionBackwardWgmma of;
    of.a = a;
    of.q = tensor_map(a.q, (s.NQ - 1) * s.q_head + D, s.T, s.B, s.ldq, Places::QUERIES);
    of.k = tensor_map(a.k, (s.NKV - 1) * s.k_head + D, s.T, s.B, s.ldkv, Places::KEYS);
    of.v = tensor_map(a.v, (s.NKV - 1) * s.v_head + DV, s.T, s.B, s.ldkv, Places::KEYS);
    of.dout = tensor_map(a.dout, (s.NQ / MAPS - 1) * s.o_head + DV, s.T, s.B, s.ldo, Places::QUERIES);
    LAUNCH_ALLOW_SHARED((attention_wgmma_backward_kernel<D, DV, MAPS>), Places::BYTES);
    LAUNCH((attention_wgmma_backward_kernel<D, DV, MAPS>),
           blocks_of((size_t)s.B * s.NKV * (((size_t)s.T + Places::KEYS - 1) / Places::KEYS), 1),
           WGMMA_MULTIPLIERS + WARPGROUP, Places::BYTES, of);
    return true;
}

template <int MAPS> static inline bool attention_wgmma_backward_launch(const AttentionBackwardMma &a) {
    if (a.shape.DV == 64) return attention_wgmma_backward_widths<64, 64, MAPS>(a);
    if (a.shape.D == 64) return attention_wgmma_backward_widths<64, 128, MAPS>(a);
    return attention_wgmma_backward_widths<128, 128, MAPS>(a);
}
