/*
attention_maps.h: attention maps, for --eval. Computed on the host from the activations of a forward; training computes
no maps.

  map         A[t,j] = exp(S[t,j] - lse[t]), S[t,j] = scale q_t.k_j, for the keys that row t attends to; else 0
  effective   E = A1 - s A2 of output head h, s per row; E = A if there is one map
  first mass  alpha = mean over the rows t of A[t,0]; for an effective map the first share, the mean of
              |E[t,0]| / sum_j |E[t,j]|, so that maps that sum to less than 1, as with a sink, compare
  entropy     entropy of the shares |E[t,j]| / sum_j |E[t,j]|, mean over the rows t, in nats
  sink rate   percentage of (window, layer, head) with alpha > 0.3 on 64 tokens
  shapes      fused rows (B*T, ld), lse (key_sets, lse_set_stride) as in the trainer; map (T,T)
  numerics    products in double
  source      Gu et al. 2024, "When attention sink emerges in language models"
*/
#pragma once
#include "../base/common.h"
#include "../ops/ops.h"

enum { MAP_TOKENS = 64 };
static const double SINK_ALPHA = 0.3;

// A layer's attention on the host, for B sequences of T positions.
typedef struct {
    AttentionShape shape; // shape of key set 0
    int key_sets;
    HeadGroups groups; // without noise heads: one map
    Factor factor;
    const floatX *q, *k; // first row of key set 0
    const real *lse;
    const floatX *lambda; // (N, .) with row stride ldl; not read without noise heads
    int ldl;
    void *copies[5]; // what the pointers point into
    int copy_count;
} HostAttention;

static inline int maps_output_heads(const HostAttention *m) {
    return output_heads(m->groups, m->shape.NQ * m->key_sets);
}
// The query head of map 0 or 1 of an output head.
static inline int maps_query_head(const HostAttention *m, int h, int map) {
    return map ? noise_head(m->groups, h) : signal_head(m->groups, h);
}

// The first key that row t attends to.
static inline int map_first_key(AttentionShape s, int t) { return s.window ? max_int(0, t - s.window + 1) : 0; }

// The map and the logits (T,T) of one query head of sequence b; logits may be NULL.
static inline void attention_map(float *map, float *logits, const HostAttention *m, int b, int head) {
    AttentionShape s = m->shape;
    int set = head % m->key_sets, h = head / m->key_sets, kv = h / (s.NQ / s.NKV);
    size_t T = (size_t)s.T, row = (size_t)b * T;
    const floatX *q = m->q + row * (size_t)s.ldq + (size_t)(h * s.q_head + set * s.D);
    const floatX *k = m->k + row * (size_t)s.ldkv + (size_t)(kv * s.k_head + set * s.D);
    const real *lse = m->lse + (size_t)set * lse_set_stride(s) + ((size_t)b * s.NQ + h) * T;
    for (size_t t = 0; t < T; t++)
        for (size_t j = 0; j < T; j++) {
            bool visible = j <= t && j >= (size_t)map_first_key(s, (int)t) &&
                           sparse_reads(sparse_row(s, b, h, (int)t), s.sparse, (int)j);
            double dot = 0;
            for (int i = 0; i < s.D && visible; i++)
                dot += (double)q[t * (size_t)s.ldq + (size_t)i] * (double)k[j * (size_t)s.ldkv + (size_t)i];
            double logit = (double)s.scale * dot;
            map[t * T + j] = visible ? (float)exp(logit - (double)lse[t]) : 0;
            if (logits) logits[t * T + j] = visible ? (float)logit : 0;
        }
}

// s of output head h in row t of sequence b
static inline double map_lambda(const HostAttention *m, int b, int t, int h) {
    floatX l = m->lambda[((size_t)b * m->shape.T + t) * (size_t)m->ldl + (size_t)h];
    return factor_of((double)l, m->factor);
}

// Means over the rows of a map.
typedef struct {
    double first_mass, first_share, entropy;
} MapMeans;

// a2 NULL: means of the map a1, whose rows sum to 1, or to less with a sink; else of the effective map of output head h
// in sequence b. Rows in which both maps cancel are not counted.
static inline MapMeans map_means(const float *a1, const float *a2, const HostAttention *m, int b, int h) {
    int T = m->shape.T, rows = 0;
    MapMeans means = {0, 0, 0};
    for (int t = 0; t < T; t++) {
        const float *one = a1 + (size_t)t * T, *two = a2 ? a2 + (size_t)t * T : NULL;
        double s = a2 ? map_lambda(m, b, t, h) : 0, sum = 0, first = 0, logs = 0;
        for (int j = 0; j <= t; j++) {
            double e = fabs((double)one[j] - (two ? s * (double)two[j] : 0));
            if (j == 0) first = e;
            if (e > 0) sum += e, logs += e * log(e);
        }
        if (sum == 0) continue;
        means.first_mass += first;
        means.first_share += first / sum;
        means.entropy += log(sum) - logs / sum;
        rows++;
    }
    means.first_mass /= rows;
    means.first_share /= rows;
    means.entropy /= rows;
    return means; // NAN: all rows cancel
}
