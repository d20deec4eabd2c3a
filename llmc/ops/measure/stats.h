/*
stats.h: statistics of a layer's activations, for the log.

  lambda      mean of s[n,h] = sigmoid(l[n,h]), or l[n,h] itself, over rows and heads
  rms         mean of sqrt(mean_i(x[n,h,i]^2)) over rows and heads. For the attention output, this is the
              "context RMS" of the DIFF V2 report
  magnitude   max |x|
  attention   on sampled query rows (b,t), from q, k and lse, the softmax statistics that the forward kept:
              S[j] = scale q.k[j],  A[j] = exp(S[j] - lse),  E = A1 - s A2, or A with one map,  j = 0 .. t
              first_effective  mean of |E[0]| / sum_j |E[j]| over rows and heads.
                               (If the heads of a pair read different values, E is not a map of either.)
              largest_logit    max |S[j]| over rows, heads and both maps
  sample      S = min(64, B (T-1)) rows, r = 0 .. S-1:  t = 1 + floor((2r+1) (T-1) / 2S),  b = r % B
              No row occurs twice, t is evenly spaced, and every call uses the same rows. t = 0 is excluded: it can
              attend only to position 0. With T = 1 there is no row, and every result is NaN.
  sinks       lse includes the sink, so A does not sum to 1: the quotient makes maps with and without sinks comparable.
              A row with A1 = s A2 everywhere has no direction and is excluded from first_effective.
  shapes      l (N,NH) with row stride ldl; x (N,heads,D) with row stride ld, or (N,C); q, k as for attention_forward
              with key set 0 first, the sets' heads alternating; lse (key_sets, lse_set_stride); each set
              is (B, NQ/key_sets, T)
  numerics    products q.k in `real`, all else in double, the largest magnitude rounded to fp32. Sums as in
              parts.h. NaN gives NaN.
  traffic     lambda N NH in, rms rows D in, magnitude N C in, attention per sampled row the keys before it
  source      probability of position 0: Gu et al. 2024, "When attention sink emerges"; largest activation: Sun et al.
              2024, "Massive activations in large language models"; RMS of the attention output: DIFF V2
*/
#pragma once
#include "../attention/attention.h"
#include "../absmax.h"
#include "operations.h"
#include "../runtime.h"
#include "../vecmath.h"
#include "parts.h"

static inline double lambda_mean(const floatX *l, int N, int NH, int ldl, Factor factor) {
    double parts[STATS_PARTS];
#pragma omp parallel for schedule(static)
    for (int p = 0; p < STATS_PARTS; p++) {
        parts[p] = 0;
        for (size_t n = part_begin(N, p); n < part_begin(N, p + 1); n++)
            for (int h = 0; h < NH; h++) parts[p] += factor_of((double)l[n * ldl + h], factor);
    }
    return parts_sum(parts) / ((double)N * NH);
}

static inline double rms_mean(const floatX *x, int N, int heads, int D, int ld) {
    size_t rows = (size_t)N * heads;
    double parts[STATS_PARTS];
#pragma omp parallel for schedule(static)
    for (int p = 0; p < STATS_PARTS; p++) {
        parts[p] = 0;
        for (size_t n = part_begin(rows, p); n < part_begin(rows, p + 1); n++) {
            const floatX *row = x + n / heads * ld + n % heads * D;
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < D; i++) sum += (double)row[i] * (double)row[i];
            parts[p] += sqrt(sum / D);
        }
    }
    return parts_sum(parts) / (double)rows;
}

static inline double magnitude_max(const floatX *x, int N, int C) {
    absmax_t bits = 0;
    float largest;
    absmax_update(activation(x, &bits), N, C, C);
    memcpy(&largest, &bits, sizeof(largest));
    return (double)largest;
}

// Sums over the output heads of one sampled row.
typedef struct {
    double effective, largest_logit; // largest_logit -1: the row attends only to itself
    int count;                       // heads in `effective`
} AttentionRowStats;

// Adds one output head whose second map has the factor `lambda`, over the visible keys [low, high). start: the first
// position of the document; a window may hide it.
static inline void attention_stats_head(AttentionRowStats *r, const StatsMap *maps, int map_count, double lambda,
                                        int start, int low, int high, AttentionShape s) {
    double first = 0, sum = 0;
    for (int j = low; j < high; j++) {
        double a[2] = {0, 0}; // A1[j], A2[j]
        for (int m = 0; m < map_count; m++) {
            const floatX *q = maps[m].q, *k = maps[m].k + (size_t)j * s.ldkv;
            real dot = 0;
            if (!sparse_reads(maps[m].list, s.sparse, j)) continue;
#pragma omp simd reduction(+ : dot)
            for (int i = 0; i < s.D; i++) dot += q[i] * k[i];
            double logit = (double)s.scale * (double)dot;
            r->largest_logit = larger_or_nan(r->largest_logit, fabs(logit));
            a[m] = exp(logit - maps[m].lse);
        }
        double e = fabs(a[0] - lambda * a[1]);
        if (j == start) first = e;
        sum += e;
    }
    if (sum == 0) return;
    r->effective += first / sum;
    r->count++;
}

static inline AttentionStats attention_stats(const floatX *q, const floatX *k, const real *lse, const floatX *l,
                                             AttentionShape s, int key_sets, int ldl, HeadGroups groups,
                                             Factor factor) {
    int maps = groups.noise ? 2 : 1, NH = output_heads(groups, s.NQ * key_sets);
    int rows = attention_stats_rows(s.B, s.T), count = 0;
    const AttentionStatsInput in = {q, k, l, lse, s, lse_set_stride(s), key_sets, ldl, rows, NH, groups, factor};
    AttentionRowStats parts[ATTENTION_STATS_ROWS];
#pragma omp parallel for schedule(dynamic)
    for (int r = 0; r < rows; r++) {
        int b, t;
        attention_stats_row(r, rows, s.B, s.T, &b, &t);
        parts[r] = (AttentionRowStats){0, -1, 0};
        int start = s.first_key ? s.first_key[b * s.T + t] : 0, low = attention_first_key(s, b, t);
        if (low == t) continue; // the first row of a document attends only to itself
        for (int h = 0; h < NH; h++) {
            double lambda = maps > 1 ? factor_of((double)l[((size_t)b * s.T + t) * ldl + h], factor) : 0;
            StatsMap map[2];
            for (int m = 0; m < maps; m++)
                map[m] = stats_map(&in, b, t, m ? noise_head(groups, h) : signal_head(groups, h));
            attention_stats_head(&parts[r], map, maps, lambda, start, low, t + 1, s);
        }
    }
    AttentionStats stats = {0, -1};
    for (int r = 0; r < rows; r++) {
        stats.first_position_share += parts[r].effective;
        count += parts[r].count;
        stats.largest_logit = larger_or_nan(stats.largest_logit, parts[r].largest_logit);
    }
    stats.first_position_share = count ? stats.first_position_share / count : NAN;
    if (stats.largest_logit < 0) stats.largest_logit = NAN;
    return stats;
}
