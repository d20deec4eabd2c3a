/*
stats.h: statistics of a layer's activations, for the log.

  lambda      s[n,h] = sigmoid(l[n,h]), or l[n,h] itself: min, mean, max over all rows and heads
  rms         sqrt(mean_i(x[n,h,i]^2)) of each row and head: min, mean, max. Of the attention output and its heads this
              is the "context RMS" of the DIFF V2 report
  magnitude   of |x|: the maximum and the median (of an even count the lower of the middle two)
  attention   on sampled query rows (b,t), from q, k and lse, the softmax statistics that the forward kept:
              S[j] = scale q.k[j],  A[j] = exp(S[j] - lse),  j = 0 .. t
              first            mean of A[0] over rows and heads, for each map: the first and the second of a pair
              first_effective  mean of |E[0]| / sum_j |E[j]|, E = A1 - s A2; of A[0] with one map.
                               (If the heads of a pair read different values, E is not a map of either.)
              largest_logit    max |S[j]| over rows, heads and both maps
  sample      S = min(64, B (T-1)) rows, r = 0 .. S-1:  t = 1 + floor((2r+1) (T-1) / 2S),  b = r % B
              No row occurs twice, t is evenly spaced, and every call uses the same rows. t = 0 is excluded: it can
              attend only to position 0. With T = 1 there is no row, and every result is NaN.
  sinks       lse includes the sink, so A does not sum to 1: the dropped column counts in the denominator. A row with
              A1 = s A2 everywhere has no direction and is excluded from first_effective.
  shapes      l (N,NH) with row stride ldl; x (N,heads,D) with row stride ld, or (count); q, k as for attention_forward
              with key set 0 first, the sets' heads alternating; lse (key_sets, lse_set_stride), of a set
              (B, NQ/key_sets, T)
  numerics    products q.k in `real`, all else in double, the magnitudes rounded to fp32. Work is divided into a fixed
              number of parts, so results do not depend on the number of threads. NaN gives NaN, except in the median,
              where NaN are the largest values.
  traffic     lambda N NH in, rms rows D in, magnitude 3 count in, attention per sampled row the keys before it
  source      probability of position 0: Gu et al. 2024, "When attention sink emerges"; largest and median activation:
              Sun et al. 2024, "Massive activations in large language models"; RMS of the attention output: DIFF V2
*/
#pragma once
#include "attention.h"
#include "ops.h"
#include "runtime.h"
#include "vecmath.h"

enum { STATS_PARTS = 64, ATTENTION_STATS_ROWS = 64 };

static inline void range_start(Range *r) {
    r->min = INFINITY;
    r->mean = 0; // the sum, until range_finish
    r->max = -INFINITY;
}

static inline void range_add(Range *r, double sum, double min, double max) {
    r->mean += sum;
    if (min < r->min) r->min = min;
    if (max > r->max) r->max = max;
}

static inline Range range_finish(const Range *parts, size_t count) {
    Range r;
    range_start(&r);
    for (int p = 0; p < STATS_PARTS; p++) range_add(&r, parts[p].mean, parts[p].min, parts[p].max);
    r.mean /= (double)count;
    if (isnan(r.mean)) r.min = r.max = r.mean; // comparisons ignore NaN
    return r;
}

static inline Range lambda_stats(const floatX *l, int N, int NH, int ldl, Factor factor) {
    Range parts[STATS_PARTS];
#pragma omp parallel for schedule(static)
    for (int p = 0; p < STATS_PARTS; p++) {
        range_start(&parts[p]);
        for (size_t n = (size_t)N * p / STATS_PARTS; n < (size_t)N * (p + 1) / STATS_PARTS; n++)
            for (int h = 0; h < NH; h++) {
                double s = factor_of((double)l[n * ldl + h], factor);
                range_add(&parts[p], s, s, s);
            }
    }
    return range_finish(parts, (size_t)N * NH);
}

static inline Range rms_stats(const floatX *x, int N, int heads, int D, int ld) {
    size_t rows = (size_t)N * heads;
    Range parts[STATS_PARTS];
#pragma omp parallel for schedule(static)
    for (int p = 0; p < STATS_PARTS; p++) {
        range_start(&parts[p]);
        for (size_t n = rows * p / STATS_PARTS; n < rows * (p + 1) / STATS_PARTS; n++) {
            const floatX *row = x + n / heads * ld + n % heads * D;
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < D; i++) sum += (double)row[i] * (double)row[i];
            double rms = sqrt(sum / D);
            range_add(&parts[p], rms, rms, rms);
        }
    }
    return range_finish(parts, rows);
}

static inline double magnitude_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return (double)x;
}

// The bits of floats without the sign have the order of the floats. The median is found digit by digit, the highest
// first, by counting the values with each digit, without a copy of x and without sorting.
static inline Magnitudes magnitude_stats(const floatX *x, size_t count) {
    enum { DIGIT = 11, VALUES = 1 << DIGIT };
    assert(count > 0);
    uint32_t largest = 0;
    uint64_t median = 0; // the digits found so far; the lower digits are 0
    size_t rank = (count - 1) / 2;
    for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
        size_t counts[VALUES] = {0};
#pragma omp parallel for schedule(static) reduction(+ : counts[:VALUES]) reduction(max : largest)
        for (size_t i = 0; i < count; i++) {
            float value = (float)x[i];
            uint32_t bits;
            memcpy(&bits, &value, sizeof(bits));
            bits &= 0x7FFFFFFFu;
            largest = bits > largest ? bits : largest;
            if ((uint64_t)bits >> (shift + DIGIT) == median >> (shift + DIGIT)) counts[bits >> shift & (VALUES - 1)]++;
        }
        uint64_t digit = 0;
        while (rank >= counts[digit]) rank -= counts[digit++];
        median |= digit << shift;
    }
    Magnitudes m;
    m.largest = magnitude_of_bits(largest);
    m.median = magnitude_of_bits((uint32_t)median);
    return m;
}

static inline int attention_stats_rows(int B, int T) {
    int64_t candidates = (int64_t)B * (T - 1);
    return candidates < ATTENTION_STATS_ROWS ? (int)candidates : ATTENTION_STATS_ROWS;
}
static inline void attention_stats_row(int r, int rows, int B, int T, int *b, int *t) {
    *b = r % B;
    *t = 1 + (int)((2 * (int64_t)r + 1) * (T - 1) / (2 * (int64_t)rows));
}

static inline double larger_or_nan(double a, double b) { return isnan(a) || b <= a ? a : b; }

// The operands of one query head for the row (b,t).
typedef struct {
    const floatX *q, *k; // (D); (T, D) with the row stride ldkv
    double lse;
    const int *list; // sparse_row
} StatsMap;

static inline StatsMap stats_map(const floatX *q, const floatX *k, const real *lse, AttentionShape s, int key_sets,
                                 int b, int t, int head) {
    int set = head % key_sets, h = head / key_sets, kv = h / (s.NQ / s.NKV);
    size_t sequence = (size_t)b * s.T;
    StatsMap m;
    m.q = q + (sequence + t) * s.ldq + (h * s.q_head + set * s.D);
    m.k = k + sequence * s.ldkv + (kv * s.k_head + set * s.D);
    m.list = sparse_row(s, b, h, set, t);
    m.lse = (double)lse[set * lse_set_stride(s) + ((size_t)b * s.NQ + h) * s.T + t];
    return m;
}

// Sums over the output heads of one sampled row.
typedef struct {
    double first[2], effective, largest_logit;
    int effective_count;
    bool used;
} AttentionRowStats;

// Adds one output head whose second map has the factor `lambda`, over the visible keys [low, high). start: of the
// document; a window may hide it.
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
            if (j == start) r->first[m] += a[m];
        }
        double e = fabs(a[0] - lambda * a[1]);
        if (j == start) first = e;
        sum += e;
    }
    if (map_count == 1) sum = 1; // including the probability of a sink
    if (sum == 0) return;
    r->effective += first / sum;
    r->effective_count++;
}

static inline AttentionStats attention_stats(const floatX *q, const floatX *k, const real *lse, const floatX *l,
                                             AttentionShape s, int key_sets, int ldl, HeadGroups groups,
                                             Factor factor) {
    int maps = groups.noise ? 2 : 1, NH = output_heads(groups, s.NQ * key_sets);
    int rows = attention_stats_rows(s.B, s.T), count = 0, used = 0;
    AttentionRowStats parts[ATTENTION_STATS_ROWS];
    memset(parts, 0, sizeof(parts));
#pragma omp parallel for schedule(dynamic)
    for (int r = 0; r < rows; r++) {
        int b, t;
        attention_stats_row(r, rows, s.B, s.T, &b, &t);
        int start = s.first_key ? s.first_key[b * s.T + t] : 0, low = attention_first_key(s, b, t);
        if (low == t) continue; // the first row of a document attends only to itself
        parts[r].used = true;
        for (int h = 0; h < NH; h++) {
            double lambda = maps > 1 ? factor_of((double)l[((size_t)b * s.T + t) * ldl + h], factor) : 0;
            StatsMap map[2];
            for (int m = 0; m < maps; m++)
                map[m] = stats_map(q, k, lse, s, key_sets, b, t, m ? noise_head(groups, h) : signal_head(groups, h));
            attention_stats_head(&parts[r], map, maps, lambda, start, low, t + 1, s);
        }
    }
    AttentionStats stats;
    memset(&stats, 0, sizeof(stats));
    for (int r = 0; r < rows; r++) {
        for (int m = 0; m < 2; m++) stats.first[m] += parts[r].first[m];
        stats.first_effective += parts[r].effective;
        count += parts[r].effective_count;
        used += parts[r].used;
        stats.largest_logit = larger_or_nan(stats.largest_logit, parts[r].largest_logit);
    }
    for (int m = 0; m < 2; m++) stats.first[m] = m < maps && used ? stats.first[m] / ((double)used * NH) : NAN;
    stats.first_effective = count ? stats.first_effective / count : NAN;
    if (!used) stats.largest_logit = NAN;
    return stats;
}
