/*
attention_backward: the kernels of attention_builtin_backward; see attention.cuh.

  delta   delta[t] = rowsum(dO O)
  dQ      dS = P (dP - delta), dP = dO V^T;  dQ = scale sum over keys of dS K       a block per 64 queries
  dK      dK = scale sum over heads of the group and queries of dS^T Q              a block per 64 keys
  dV      dV = sum over heads of the group and queries of P^T dO                    a block per 64 keys
*/
#ifndef LLMC_ATTENTION_BACKWARD_CUH
#define LLMC_ATTENTION_BACKWARD_CUH

// What all three read.
typedef struct {
    const floatX *dout, *q, *k, *v;
    const real *lse, *delta;
    AttentionShape shape;
    bool wide_qk, wide_v, wide_o;
} AttentionBackward;

template <int W>
static __global__ void attention_delta_kernel(int lanes, real *delta, const floatX *dout, const floatX *out,
                                              AttentionShape s) {
    unsigned row = row_index(lanes), n = row / (unsigned)s.NQ, h = row % (unsigned)s.NQ, T = (unsigned)s.T;
    int lane = row_lane(lanes);
    bool active = n < (unsigned)s.B * T;
    size_t at = n * (size_t)s.ldo + h * (size_t)s.o_head;
    float dot = 0, o[W], g[W];
    for (int c = lane * W; active && c < s.DV; c += lanes * W) {
        load<W>(o, out + at + c);
        load<W>(g, dout + at + c);
        UNROLL
        for (int k = 0; k < W; k++) dot += o[k] * g[k];
    }
    dot = lanes_sum(dot, lanes);
    if (active && lane == 0) delta[(n / T * (size_t)s.NQ + h) * T + n % T] = dot;
}

template <int PIECES>
static __global__ void __launch_bounds__(TILE_THREADS) attention_dq_kernel(floatX *dq, AttentionBackward a) {
    SHARED(float4, operands4, TILE_OPERANDS / 4);
    SHARED(float4, scores4, TILE_SCORES / 4);
    float *operands = (float *)(void *)operands4, *scores = (float *)(void *)scores4;
    AttentionShape s = a.shape;
    int heads = s.B * s.NQ, tiles = (s.T + TILE - 1) / TILE, head = (int)blockIdx.x % heads;
    int t0 = (tiles - 1 - (int)blockIdx.x / heads) * TILE, rows = min(TILE, s.T - t0),
        keys = t0 + rows; // the longest first
    int t = t0 + (int)threadIdx.x / 16 * 4, low[4];
    AttentionPlace at = attention_place(s, head / s.NQ, head % s.NQ);
    TileRows queries = tile_rows(a.q + at.q, t0, s.T, s.ldq, s.D, a.wide_qk);
    TileRows gradients = tile_rows(a.dout + at.o, t0, s.T, s.ldo, s.DV, a.wide_o);
    float out[PIECES][4][4], lse[4], delta[4], factor[4] = {s.scale, s.scale, s.scale, s.scale};
    tile_clear<PIECES>(out);
    for (int r = 0; r < 4; r++) {
        low[r] = attention_low(s, at.b, t + r);
        lse[r] = t + r < s.T ? a.lse[at.lse + (size_t)(t + r)] : 0;
        delta[r] = t + r < s.T ? a.delta[at.lse + (size_t)(t + r)] : 0;
    }
    for (int k0 = attention_low(s, at.b, t0) / TILE * TILE; k0 < keys; k0 += TILE) {
        float acc[2][4][4]; // S, dP
        int key = k0 + (int)threadIdx.x % 16 * 4;
        TileRows tile_of_k = tile_rows(a.k + at.kv_k, k0, keys, s.ldkv, s.D, a.wide_qk);
        tile_clear<2>(acc);
        tile_dot(acc[0], queries, tile_of_k, operands); // S = scale Q K^T
        tile_dot(acc[1], gradients, tile_rows(a.v + at.kv_v, k0, keys, s.ldkv, s.DV, a.wide_v), operands); // O = P V
        for (int r = 0; r < 4; r++)
            for (int c = 0; c < 4; c++)
                acc[0][r][c] =
                    attention_probability(acc[0][r][c], lse[r], t + r, low[r], key + c, s) * (acc[1][r][c] - delta[r]);
        tile_store_scores(scores, acc[0]);
        tile_accumulate<PIECES>(out, scores, tile_of_k, operands); // S = scale Q K^T
    }
    tile_write<PIECES>(dq + at.q + (size_t)t0 * (size_t)s.ldq, s.ldq, rows, s.D, out, factor, false);
}

// dK where of_k, else dV, of 64 keys: rows are keys, columns queries.
template <int PIECES, bool of_k>
static __global__ void __launch_bounds__(TILE_THREADS)
    attention_dkv_kernel(floatX *result, AttentionBackward a, bool add) {
    SHARED(float4, operands4, TILE_OPERANDS / 4);
    SHARED(float4, scores4, TILE_SCORES / 4);
    float *operands = (float *)(void *)operands4, *scores = (float *)(void *)scores4;
    AttentionShape s = a.shape;
    int heads = s.B * s.NKV, head = (int)blockIdx.x % heads, k0 = (int)blockIdx.x / heads * TILE; // the longest first
    int group = s.NQ / s.NKV, b = head / s.NKV, kv = head % s.NKV, rows = min(TILE, s.T - k0);
    int key = k0 + (int)threadIdx.x / 16 * 4;
    float f = of_k ? s.scale : 1, out[PIECES][4][4], factor[4] = {f, f, f, f};
    tile_clear<PIECES>(out);
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        AttentionPlace at = attention_place(s, b, h);
        TileRows keys = tile_rows(a.k + at.kv_k, k0, s.T, s.ldkv, s.D, a.wide_qk);
        TileRows values = tile_rows(a.v + at.kv_v, k0, s.T, s.ldkv, s.DV, a.wide_v);
        // first keys do not decrease: after a tile of queries that all begin beyond these keys, no row sees them
        for (int t0 = k0; t0 < s.T && attention_low(s, b, t0) < k0 + rows; t0 += TILE) {
            float acc[2][4][4]; // S^T, dP^T
            int t = t0 + (int)threadIdx.x % 16 * 4;
            TileRows queries = tile_rows(a.q + at.q, t0, s.T, s.ldq, s.D, a.wide_qk);
            TileRows gradients = tile_rows(a.dout + at.o, t0, s.T, s.ldo, s.DV, a.wide_o);
            tile_clear<2>(acc);
            tile_dot(acc[0], keys, queries, operands);                         // S = scale Q K^T
            if constexpr (of_k) tile_dot(acc[1], values, gradients, operands); // O = P V
            for (int c = 0; c < 4; c++) {
                bool exists = t + c < s.T;
                int low = attention_low(s, b, t + c);
                float lse = exists ? a.lse[at.lse + (size_t)(t + c)] : 0,
                      delta = exists ? a.delta[at.lse + (size_t)(t + c)] : 0;
                for (int r = 0; r < 4; r++) {
                    acc[0][r][c] = attention_probability(acc[0][r][c], lse, t + c, low, key + r, s);
                    if (of_k) acc[0][r][c] *= acc[1][r][c] - delta;
                }
            }
            tile_store_scores(scores, acc[0]);
            tile_accumulate<PIECES>(out, scores, of_k ? queries : gradients, operands);
        }
    }
    size_t at = (size_t)b * (size_t)s.T + (size_t)k0;
    floatX *to = result + at * (size_t)s.ldkv + (size_t)kv * (size_t)(of_k ? s.k_head : s.v_head);
    tile_write<PIECES>(to, s.ldkv, rows, of_k ? s.D : s.DV, out, factor, add);
}

static inline void attention_builtin_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                              const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                              AttentionShape s, bool add_dv) {
    attention_check(s);
    assert(s.first == 0);
    real *delta = ops_workspace_take(attention_builtin_workspace_bytes(s));
    AttentionBackward a;
    a.dout = dout, a.q = q, a.k = k, a.v = v;
    a.lse = lse, a.delta = delta;
    a.shape = s;
    a.wide_qk = attention_wide_qk(s, q, k);
    a.wide_v = packed((size_t)s.DV, v) && packed((size_t)s.ldkv) && packed((size_t)s.v_head);
    a.wide_o = packed((size_t)s.DV, dout) && packed((size_t)s.ldo) && packed((size_t)s.o_head);
    bool wide = a.wide_o && packed(0, out);
    LAUNCH_ROWS(attention_delta_kernel, wide, (size_t)s.B * (size_t)s.T * (size_t)s.NQ, s.DV, delta, dout, out, s);
    unsigned queries = attention_blocks((size_t)s.B * (size_t)s.NQ, s.T),
             keys = attention_blocks((size_t)s.B * (size_t)s.NKV, s.T);
#define ATTENTION_DQ(PIECES) LAUNCH((attention_dq_kernel<PIECES>), queries, TILE_THREADS, 0, dq, a)
#define ATTENTION_DK(PIECES) LAUNCH((attention_dkv_kernel<PIECES, true>), keys, TILE_THREADS, 0, dk, a, false)
#define ATTENTION_DV(PIECES) LAUNCH((attention_dkv_kernel<PIECES, false>), keys, TILE_THREADS, 0, dv, a, add_dv)
    ATTENTION_PIECES(s.D, ATTENTION_DQ);
    ATTENTION_PIECES(s.D, ATTENTION_DK);
    ATTENTION_PIECES(s.DV, ATTENTION_DV);
#undef ATTENTION_DQ
#undef ATTENTION_DK
#undef ATTENTION_DV
}
#endif
