/*
attention: causal grouped-query attention in blocks of query rows, its products by the GEMM library.

  forward   S = scale Q K^T (keys up to the row's own position),  P = softmax(S),  O = P V
            L[t] = log sum_j exp(S[t,j]) is kept instead of P
  backward  P = exp(S - L) is computed again, then
              O = P V                     =>  dP = dO V^T,   dV = P^T dO
              P = softmax(S)              =>  dS = P (dP - rowsum(P dP));  rowsum(P dP) = rowsum(dO O)
              S = scale Q K^T             =>  dQ = scale dS K,  dK = scale dS^T Q
  shapes    q (B,T,NQ,D), k (B,keys,NKV,D), v (B,keys,NKV,DV), out (B,T,NQ,DV) with the strides of
            AttentionShape; keys = first + T; L (B,NQ,T). Query head j reads KV head j / (NQ/NKV).
  numerics  all in `real`; one thread computes a block, so results do not depend on their number.
            The heads of a group first write dK and dV of their own, which are then added in order.
  memory    linear in T: a block of scores per thread, and dK, dV per query head in the backward
  flops     forward 2 (D + DV) per query and visible key, backward 2 (3 D + 2 DV)
  source    Dao 2023, "FlashAttention-2", for the backward from O, dO and L
*/
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

enum { ATTENTION_BLOCK = 64 }; // query rows at a time: a block's scores stay in the L2 cache for T up to 2048

static inline double attention_forward_flops(AttentionShape s) {
    double visible = (double)s.T * s.first + 0.5 * s.T * (s.T + 1.0);
    return 2.0 * s.B * s.NQ * visible * (s.D + s.DV);
}

static inline size_t attention_workspace_bytes(AttentionShape s, int threads) {
    size_t keys = (size_t)s.first + (size_t)s.T, rows = (size_t)s.B * (size_t)s.NQ * (size_t)s.T;
    size_t blocks = 2 * (size_t)threads * ATTENTION_BLOCK * keys;
    return (blocks + rows * (size_t)(s.D + s.DV)) * sizeof(real);
}

// scores[i,:] of one block of `rows` query rows that starts at row t0, over `keys` keys
static inline void attention_scores(real *scores, const floatX *q, const floatX *k, int rows, int keys, AttentionShape s) {
    gemm(CblasNoTrans, CblasTrans, rows, keys, s.D, s.scale, q, s.ldq, k, s.ldkv, 0, scores, keys);
}

static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s) {
    assert(s.NQ % s.NKV == 0 && (s.first == 0 || s.B == 1));
    int group = s.NQ / s.NKV, blocks = (s.T + ATTENTION_BLOCK - 1) / ATTENTION_BLOCK, heads = s.B * s.NQ;
    size_t keys_max = (size_t)s.first + (size_t)s.T;
    real *workspace = ops_workspace_take(attention_workspace_bytes(s, omp_get_max_threads()));
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < heads * blocks; item++) {
        int t0 = (blocks - 1 - item / heads) * ATTENTION_BLOCK; // the longest blocks first
        int b = item % heads / s.NQ, h = item % heads % s.NQ, kv = h / group;
        int rows = min_int(ATTENTION_BLOCK, s.T - t0), keys = s.first + t0 + rows;
        real *p = workspace + (size_t)omp_get_thread_num() * ATTENTION_BLOCK * keys_max;
        size_t row0 = (size_t)b * (size_t)s.T + (size_t)t0, key0 = (size_t)b * (size_t)s.T;
        const floatX *vh = v + key0 * (size_t)s.ldkv + (size_t)kv * (size_t)s.v_head;
        floatX *oh = out + row0 * (size_t)s.ldo + (size_t)h * (size_t)s.o_head;
        attention_scores(p, q + row0 * (size_t)s.ldq + (size_t)h * (size_t)s.q_head,
                         k + key0 * (size_t)s.ldkv + (size_t)kv * (size_t)s.k_head, rows, keys, s);
        real inverse[ATTENTION_BLOCK];
        for (int i = 0; i < rows; i++) {
            real *pi = p + (size_t)i * (size_t)keys, max = pi[0], sum = 0;
            int visible = s.first + t0 + i + 1;
#pragma omp simd reduction(max : max)
            for (int j = 0; j < visible; j++) max = pi[j] > max ? pi[j] : max;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < visible; j++) sum += pi[j] = real_exp(pi[j] - max);
            for (int j = visible; j < keys; j++) pi[j] = 0;
            inverse[i] = 1 / sum;
            if (lse) lse[((size_t)b * (size_t)s.NQ + (size_t)h) * (size_t)s.T + (size_t)(t0 + i)] = max + (real)log((double)sum);
        }
        gemm(CblasNoTrans, CblasNoTrans, rows, s.DV, keys, 1, p, keys, vh, s.ldkv, 0, oh, s.ldo);
        for (int i = 0; i < rows; i++)
            for (int c = 0; c < s.DV; c++) oh[(size_t)i * (size_t)s.ldo + (size_t)c] *= inverse[i];
    }
}

// dq, and dk and dv of one query head alone: dkh (T,D), dvh (T,DV)
static inline void attention_backward_head(floatX *dq, real *dkh, real *dvh, const floatX *dout, const floatX *out,
                                           const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                           real *p, real *ds, AttentionShape s) {
    memset(dkh, 0, (size_t)s.T * (size_t)s.D * sizeof(real));
    memset(dvh, 0, (size_t)s.T * (size_t)s.DV * sizeof(real));
    for (int t0 = 0; t0 < s.T; t0 += ATTENTION_BLOCK) {
        int rows = min_int(ATTENTION_BLOCK, s.T - t0), keys = t0 + rows;
        const floatX *qb = q + (size_t)t0 * (size_t)s.ldq;
        const floatX *ob = out + (size_t)t0 * (size_t)s.ldo, *dob = dout + (size_t)t0 * (size_t)s.ldo;
        attention_scores(p, qb, k, rows, keys, s);
        gemm(CblasNoTrans, CblasTrans, rows, keys, s.DV, 1, dob, s.ldo, v, s.ldkv, 0, ds, keys); // O = P V
        for (int i = 0; i < rows; i++) {
            real *pi = p + (size_t)i * (size_t)keys, *dsi = ds + (size_t)i * (size_t)keys, delta = 0, l = lse[t0 + i];
            int visible = t0 + i + 1;
#pragma omp simd reduction(+ : delta)
            for (int c = 0; c < s.DV; c++)
                delta += ob[(size_t)i * (size_t)s.ldo + (size_t)c] * dob[(size_t)i * (size_t)s.ldo + (size_t)c];
            for (int j = 0; j < visible; j++) {
                pi[j] = real_exp(pi[j] - l);
                dsi[j] = s.scale * pi[j] * (dsi[j] - delta); // P = softmax(S), and the scale in S
            }
            for (int j = visible; j < keys; j++) pi[j] = dsi[j] = 0;
        }
        gemm(CblasTrans, CblasNoTrans, keys, s.DV, rows, 1, p, keys, dob, s.ldo, 1, dvh, s.DV);        // O = P V
        gemm(CblasTrans, CblasNoTrans, keys, s.D, rows, 1, ds, keys, qb, s.ldq, 1, dkh, s.D);          // S = Q K^T
        gemm(CblasNoTrans, CblasNoTrans, rows, s.D, keys, 1, ds, keys, k, s.ldkv, 0, dq + (size_t)t0 * (size_t)s.ldq, s.ldq);
    }
}

// dst[t,:] = the sum over the `group` query heads of src[g][t,:]; with `add`, += it
static inline void attention_sum_group(floatX *dst, const real *src, int group, int T, int width, int ld, bool add) {
    for (int t = 0; t < T; t++)
        for (int c = 0; c < width; c++) {
            real sum = 0;
            for (int g = 0; g < group; g++) sum += src[((size_t)g * (size_t)T + (size_t)t) * (size_t)width + (size_t)c];
            floatX *to = &dst[(size_t)t * (size_t)ld + (size_t)c];
            *to = add ? *to + sum : sum;
        }
}

static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv) {
    assert(s.NQ % s.NKV == 0 && s.first == 0);
    int group = s.NQ / s.NKV;
    size_t T = (size_t)s.T, heads = (size_t)s.B * (size_t)s.NQ, block = ATTENTION_BLOCK * T;
    real *dkh = ops_workspace_take(attention_workspace_bytes(s, omp_get_max_threads())); // (B,NQ,T,D)
    real *dvh = dkh + heads * T * (size_t)s.D;                                           // (B,NQ,T,DV)
    real *blocks = dvh + heads * T * (size_t)s.DV;                                       // (threads,2,BLOCK,T)
#pragma omp parallel
    {
        real *p = blocks + 2 * block * (size_t)omp_get_thread_num(), *ds = p + block;
#pragma omp for schedule(dynamic)
        for (size_t bh = 0; bh < heads; bh++) {
            size_t b = bh / (size_t)s.NQ, h = bh % (size_t)s.NQ, kv = h / (size_t)group, row = b * T;
            size_t q_at = row * (size_t)s.ldq + h * (size_t)s.q_head, o_at = row * (size_t)s.ldo + h * (size_t)s.o_head;
            attention_backward_head(dq + q_at, dkh + bh * T * (size_t)s.D, dvh + bh * T * (size_t)s.DV, dout + o_at,
                                    out + o_at, lse + bh * T, q + q_at, k + row * (size_t)s.ldkv + kv * (size_t)s.k_head,
                                    v + row * (size_t)s.ldkv + kv * (size_t)s.v_head, p, ds, s);
        }
#pragma omp for schedule(static)
        for (size_t i = 0; i < (size_t)s.B * (size_t)s.NKV; i++) {
            size_t b = i / (size_t)s.NKV, kv = i % (size_t)s.NKV, row = b * T * (size_t)s.ldkv;
            size_t first = (b * (size_t)s.NQ + kv * (size_t)group) * T;
            attention_sum_group(dk + row + kv * (size_t)s.k_head, dkh + first * (size_t)s.D, group, s.T, s.D, s.ldkv, false);
            attention_sum_group(dv + row + kv * (size_t)s.v_head, dvh + first * (size_t)s.DV, group, s.T, s.DV, s.ldkv, add_dv);
        }
    }
}
#endif
