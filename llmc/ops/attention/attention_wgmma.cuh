/*
attention_wgmma.cuh: attention's forward on the tensor cores of Hopper, for bf16 storage, with the asynchronous
instructions of sm_90a (hopper.cuh); and the choice between this kernel and attention_mma.cuh, whose contract, softmax,
masks and stores it shares. It has not run on a GPU: dev/emulator/ptx runs its PTX.

  mapping   A block has two warpgroups that compute and one that copies. Each of the first two has 64 rows against the
            same tiles of 128 keys. Plain form: 128 queries of one head. Pair form: 64 queries; the first warpgroup has
            the signal head, the second its noise head, whose result reaches the first in shared memory, in
            fp32. One thread copies: the queries once, then keys and values by turns in two stages
  overlap   The products with tile i's keys are issued before the products with tile i-1's values, and the softmax of
            tile i runs during the latter. The warpgroups issue their products in turns, from the second tile on: one
            multiplies while the other one computes its softmax
  widths    D and DV of 64 and 128 (not 128 and 64): whole boxes of the tensor maps. Others: attention_mma.cuh
  numerics  as in attention_mma.cuh, but a NaN in v reaches all rows of a block whose tiles it is in
  shared    Q, and two tiles of K and V, whose rows are swizzled by the copies; 2 KiB: 163 KiB at widths of 128, 83 KiB
            at 64. Results pass through the same memory at the end
  registers 168 per thread at the start, then 24 for threads that copy and 240 for the others: O has DV / 2,
            scores 64, and P 32 while the next scores are computed. One block on a multiprocessor
  cycles    of a multiprocessor of an H100, for 128 rows and 128 keys, at widths of 128 and of 64. It does 2048
            multiplications, moves 128 bytes of shared memory, computes 16 exponentials and issues 4 instructions per
            cycle; wgmma reads each operand once:
              tensor cores     2 * 128 * 128 * D / 2048                          2048   1024
              shared memory    2 (64 D + 128 D + 128 D) and 256 D, * 2 / 128     1792    896
              exponentials     128 * 128 / 16                                    1024   1024
              instructions     8 warps * about 450 / 4                            900    860
            At 128 a warpgroup's softmax takes 512 to 960, and in its turn the other one multiplies for 1024: from 2048,
            if all else is hidden, to 2048 + 1024 / 2 + 250, if half of the exponentials and one latency are exposed
            nevertheless: 73 to 100% of the peak in the loop; at 64 from 1200 to 2048 + 250: 45 to 85%. With
            causal T of 2048 the tiles have 6% more products than the rows, and the start and end of a block cost about
            one of its 8 tiles: 60 to 84% at 128. Computed, not measured; FlashAttention-3 reaches 75% without a mask
  rejected  Three warpgroups of 64 rows: 160 registers each, scores spill at 128. Tiles of 64 keys: shared memory is
            then as slow as the tensor cores. A signal and a noise head in one warpgroup: O of both is 128 registers,
            and P would wait for products. Clusters with multicast, and blocks that stay for several heads
            (FlashAttention-3): to be measured first
  source    Shah et al. 2024, "FlashAttention-3", for the warps' roles, their turns and the order of products
*/
#pragma once
#include "../../cuda/hopper.cuh"
#include "attention_mma.cuh"

enum { WGMMA_KEYS = 128, WGMMA_ROWS = 64, WGMMA_THREADS = 3 * WARPGROUP }; // keys of a tile; rows of a warpgroup

// Shared memory of a block: queries of two warpgroups, two tiles of keys and values as boxes of 64 columns, and this.
enum { WGMMA_STAGES = 2 };
typedef struct {
    uint64_t queries, k_full[WGMMA_STAGES], v_full[WGMMA_STAGES], k_empty[WGMMA_STAGES], v_empty[WGMMA_STAGES];
    uint64_t turn[2];          // a warpgroup may begin its products
    uint64_t done, noise;      // all products are computed; the noise head is in shared memory
    int low[2 * WGMMA_ROWS];   // the first key of each row
    float sums[2 * WARPGROUP]; // for wgmma_wait_after
} WgmmaBlock;
template <int D, int DV> constexpr int WGMMA_STAGE = (D + DV) * 2 * WGMMA_KEYS; // bytes
template <int D, int DV> constexpr int WGMMA_TILES = D * 4 * WGMMA_ROWS + WGMMA_STAGE<D, DV> *WGMMA_STAGES;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Begins to copy `rows` rows of WIDTH numbers, from a column and row of matrix b.
template <int WIDTH>
static __device__ inline void wgmma_copy(char *to, const CUtensorMap *map, int rows, int column, int row, int b,
                                         uint64_t *barrier) {
    UNROLL
    for (int c = 0; c < WIDTH; c += BOX_COLUMNS) tensor_load(to + c * rows * 2, map, column + c, row, b, barrier);
}

// scores (64,KEYS) = Q K^T, a group of products
template <int D>
static __device__ inline void wgmma_scores(float (&scores)[WGMMA_KEYS / 8][4], const char *queries, const char *keys) {
    wgmma_pin(scores);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < D; k += 16) {
        const int box = k / BOX_COLUMNS * BOX_ROW, within = k % BOX_COLUMNS;
        wgmma_shared<false, false>(scores, tile_of_rows(queries + box * WGMMA_ROWS, within),
                                   tile_of_rows(keys + box * WGMMA_KEYS, within), k > 0);
    }
    wgmma_commit();
}
// o (64,DV) += P V, a group of products
template <int DV>
static __device__ inline void wgmma_values(float (&o)[DV / 8][4], unsigned (&p)[WGMMA_KEYS / 16][4],
                                           const char *values) {
    wgmma_pin(o), wgmma_pin(p);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < WGMMA_KEYS; k += 16)
        wgmma_registers<true>(o, p[k / 16], tile_of_columns(values, k, WGMMA_KEYS), true);
    wgmma_commit();
}

// The lanes of a warp no longer read a tile.
static __device__ inline void wgmma_release(uint64_t *barrier) {
    if (threadIdx.x % WARP == 0) mbarrier_arrive(barrier);
}
#endif

template <int MAPS, int D, int DV>
static __global__ void __launch_bounds__(WGMMA_THREADS, 1)
    attention_wgmma_forward_kernel(AttentionMma a, const __grid_constant__ CUtensorMap of_q,
                                   const __grid_constant__ CUtensorMap of_k, const __grid_constant__ CUtensorMap of_v) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const int ROWS = 2 * WGMMA_ROWS / MAPS, KEYS = WGMMA_KEYS;
    DYNAMIC_SHARED(uint4, memory);
    char *queries = (char *)(void *)memory;
    queries += -shared_address(queries) % BOX_ALIGNMENT;
    char *stages = queries + 2 * WGMMA_ROWS * D * 2;
    WgmmaBlock *at = (WgmmaBlock *)(void *)(queries + WGMMA_TILES<D, DV>);
    const AttentionShape s = a.shape;
    const MmaPlace p = mma_place<MAPS, ROWS, KEYS>(s);
    if (p.b >= s.B) return;
    const int tiles = (p.end - p.begin + KEYS - 1) / KEYS;
    for (int i = (int)threadIdx.x; i < ROWS; i += WGMMA_THREADS)
        at->low[i] = attention_first_key(s, p.b, min(p.t0 + i, s.T - 1));
    if (threadIdx.x == 0) {
        mbarrier_init(&at->queries, 1), mbarrier_init(&at->done, 2 * WARPGROUP), mbarrier_init(&at->noise, WARPGROUP);
        for (int i = 0; i < 2; i++) mbarrier_init(&at->turn[i], WARPGROUP / WARP);
        for (int i = 0; i < WGMMA_STAGES; i++) {
            mbarrier_init(&at->k_full[i], 1), mbarrier_init(&at->v_full[i], 1);
            mbarrier_init(&at->k_empty[i], 2 * WARPGROUP / WARP), mbarrier_init(&at->v_empty[i], 2 * WARPGROUP / WARP);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    const int group = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0); // uniform, as in attention_mma.cuh
    if (group == 2) {                                                          // copies
        registers_less<24>();
        if (threadIdx.x % WARPGROUP) return;
        const int kv = p.j * MAPS / (s.NQ / s.NKV);
        mbarrier_expect(&at->queries, 2 * WGMMA_ROWS * D * 2);
        UNROLL
        for (int i = 0; i < 2; i++)
            wgmma_copy<D>(queries + i * WGMMA_ROWS * D * 2, &of_q, WGMMA_ROWS,
                          (p.j * MAPS + (MAPS == 2 ? i : 0)) * s.q_head, p.t0 + (MAPS == 1 ? i * WGMMA_ROWS : 0), p.b,
                          &at->queries);
        for (int i = 0; i < tiles; i++) {
            const int stage = i % WGMMA_STAGES, parity = i / WGMMA_STAGES % 2, key = p.begin + i * KEYS;
            char *keys = stages + stage * WGMMA_STAGE<D, DV>;
            if (i >= WGMMA_STAGES) mbarrier_wait(&at->k_empty[stage], !parity);
            mbarrier_expect(&at->k_full[stage], KEYS * D * 2);
            wgmma_copy<D>(keys, &of_k, KEYS, kv * s.k_head, key, p.b, &at->k_full[stage]);
            if (i >= WGMMA_STAGES) mbarrier_wait(&at->v_empty[stage], !parity);
            mbarrier_expect(&at->v_full[stage], KEYS * DV * 2);
            wgmma_copy<DV>(keys + KEYS * D * 2, &of_v, KEYS, kv * s.v_head, key, p.b, &at->v_full[stage]);
        }
        return;
    }

    registers_more<240>();
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x % WARPGROUP / WARP, 0);
    const int first = (MAPS == 1 ? group * WGMMA_ROWS : 0) + 16 * warp; // the warp's first row
    const char *group_q = queries + group * WGMMA_ROWS * D * 2;
    const float scale = s.scale * 1.44269504f;
    float o[DV / 8][4] = {{0}}, scores[KEYS / 8][4] = {{0}};
    float max[2] = {-8e37f, -8e37f}, sum[2] = {0}, factor[2]; // below any score, finite
    unsigned probabilities[KEYS / 16][4];
    // P of tile i from its scores
    const auto softmax = [&](int i) {
        const int k0 = p.begin + i * KEYS, rows = s.query_offset + p.t0 + first - k0; // to the key of its first row
        if (rows < KEYS - 1 || k0 < at->low[first + 15]) mma_mask<KEYS>(scores, at->low + first, k0, rows);
        mma_softmax<KEYS>(scores, factor, max, sum, scale);
    };
    const auto as_operand = [&] {
        UNROLL
        for (int i = 0; i < KEYS / 4; i++) {
            const float *from = &scores[i / 2][i % 2 * 2];
            probabilities[i / 4][i % 4] = bf16_pair(from[0], from[1]);
        }
    };
    mbarrier_wait(&at->queries, 0);
    mbarrier_wait(&at->k_full[0], 0);
    wgmma_scores<D>(scores, group_q, stages);
    wgmma_wait<0>();
    wgmma_pin(scores);
    wgmma_release(&at->k_empty[0]);
    softmax(0);
    as_operand();
    for (int i = 1; i < tiles; i++) {
        const int stage = i % WGMMA_STAGES, before = (i - 1) % WGMMA_STAGES;
        const char *keys = stages + stage * WGMMA_STAGE<D, DV>;
        const char *values = stages + before * WGMMA_STAGE<D, DV> + KEYS * D * 2;
        mbarrier_wait(&at->k_full[stage], i / WGMMA_STAGES % 2);
        mbarrier_wait(&at->v_full[before], (i - 1) / WGMMA_STAGES % 2);
        if (i + group > 1) mbarrier_wait(&at->turn[group], (i + group) % 2);
        wgmma_scores<D>(scores, group_q, keys);
        wgmma_values<DV>(o, probabilities, values);
        wgmma_release(&at->turn[1 - group]);
        wgmma_wait<1>();
        wgmma_pin(scores);
        wgmma_release(&at->k_empty[stage]);
        softmax(i); // while the products with the values take place
        wgmma_wait_after(&at->sums[threadIdx.x], sum[0] + sum[1]);
        wgmma_wait<0>();
        wgmma_pin(o), wgmma_pin(probabilities);
        wgmma_release(&at->v_empty[before]);
        mma_rescale<DV>(o, factor);
        as_operand();
    }
    const int last = (tiles - 1) % WGMMA_STAGES;
    mbarrier_wait(&at->v_full[last], (tiles - 1) / WGMMA_STAGES % 2);
    wgmma_values<DV>(o, probabilities, stages + last * WGMMA_STAGE<D, DV> + KEYS * D * 2);
    wgmma_wait<0>();
    wgmma_pin(o);

    mbarrier_arrive(&at->done);
    mbarrier_wait(&at->done, 0); // nothing reads queries, keys and values any more: results take their place
    const int t = p.t0 + first, count = s.T - t;
    float4 *noise = (float4 *)(void *)queries + threadIdx.x % WARPGROUP;
    uint4 *tile = (uint4 *)(void *)(queries + (MAPS == 2 ? WGMMA_ROWS * DV * 4 : 0)) + (4 * group + warp) * 16 * DV / 8;
    mma_divide<DV>(o, mma_lse(a, p, MAPS * p.j + (MAPS == 2 ? group : 0), t), count, max, sum, scale);
    if (MAPS == 2 && group == 1) { // a thread of the signal head has the same rows and columns as one of the noise head
        UNROLL
        for (int n = 0; n < DV / 8; n++) noise[n * WARPGROUP] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
        mbarrier_arrive(&at->noise);
        mma_store_rows<DV>(mma_noise(a, p, t), s.NQ / 2 * s.DV, count, s.DV, o, tile);
        return;
    }
    if (MAPS == 2) {
        float other[DV / 8][4];
        mbarrier_wait(&at->noise, 0);
        UNROLL
        for (int n = 0; n < DV / 8; n++) {
            const float4 v = noise[n * WARPGROUP];
            other[n][0] = v.x, other[n][1] = v.y, other[n][2] = v.z, other[n][3] = v.w;
        }
        mma_subtract<DV>(o, other, a, (size_t)p.b * s.T + t, p.j, count);
    }
    mma_store_rows<DV>(mma_out(a, p, t), s.ldo, count, s.DV, o, tile);
#else
    (void)a, (void)of_q, (void)of_k, (void)of_v;
#ifdef __CUDACC__
    __trap(); // hopper_heads
#endif
#endif
}

// Returns false if the kernel cannot start.
template <int MAPS, int D, int DV> static inline bool attention_wgmma_launch_widths(const AttentionMma &a) {
    const AttentionShape s = a.shape;
    const int rows = 2 * WGMMA_ROWS / MAPS, keys = s.query_offset + s.T;
    const size_t bytes = BOX_ALIGNMENT + WGMMA_TILES<D, DV> + sizeof(WgmmaBlock);
    auto kernel = attention_wgmma_forward_kernel<MAPS, D, DV>;
    static const bool starts = hopper_starts(kernel, "attention_wgmma_forward_kernel", MAPS, D, DV);
    static bool allowed; // more than 48 KiB in all
    if (!starts) return false;
    if (!allowed) LAUNCH_ALLOW_SHARED(kernel, bytes);
    allowed = true;
    LAUNCH(kernel, attention_grid(s, s.NQ / MAPS, rows), WGMMA_THREADS, bytes, a,
           tensor_map(a.q, (s.NQ - 1) * s.q_head + D, s.T, s.B, s.ldq, WGMMA_ROWS),
           tensor_map(a.k, (s.NKV - 1) * s.k_head + D, keys, s.B, s.ldkv, WGMMA_KEYS),
           tensor_map(a.v, (s.NKV - 1) * s.v_head + DV, keys, s.B, s.ldkv, WGMMA_KEYS));
    return true;
}

template <int MAPS> static inline bool attention_wgmma_launch(const AttentionMma &a) {
    if (a.shape.DV == 64) return attention_wgmma_launch_widths<MAPS, 64, 64>(a);
    if (a.shape.D == 64) return attention_wgmma_launch_widths<MAPS, 64, 128>(a);
    return attention_wgmma_launch_widths<MAPS, 128, 128>(a);
}

// ---------------------------------------------------------------------------------------------------
// Choice of the kernel

template <int MAPS> static inline void attention_tensor_cores(const AttentionMma &a) {
    if (!hopper_heads(a.shape.D, a.shape.DV) || !attention_wgmma_launch<MAPS>(a)) attention_mma_launch<MAPS>(a);
}

static inline AttentionMma attention_mma_arguments(floatX *out, real *lse, const floatX *q, const floatX *k,
                                                   const floatX *v, AttentionShape s) {
    AttentionMma a;
    memset(&a, 0, sizeof(a));
    assert(s.NQ % s.NKV == 0 && (s.query_offset == 0 || s.B == 1));
    a.out = out, a.lse = lse, a.q = q, a.k = k, a.v = v, a.shape = s;
    return a;
}
static inline void attention_mma_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                         AttentionShape s) {
    attention_tensor_cores<1>(attention_mma_arguments(out, lse, q, k, v, s));
}

// out = a1 - factor(l) a2 of pairs of heads; kept (N,NQ/2,DV): a2
static inline void diff_attention_mma_forward(floatX *out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                              const floatX *v, const floatX *l, int ldl, AttentionShape s,
                                              Factor factor) {
    AttentionMma a = attention_mma_arguments(out, lse, q, k, v, s);
    assert(s.groups.signals == 1 && s.groups.noise == 1 && s.NQ / 2 % s.NKV == 0);
    a.noise = kept, a.l = l, a.ldl = ldl, a.factor = factor;
    attention_tensor_cores<2>(a);
}
