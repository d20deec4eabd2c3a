/*
probe_maps.h: statistics of the two maps of an output head, A1 of its signal head and A2 of its noise head, and of the
effective map E = A1 - s A2 (attention_maps.h), on the host.

  correlation     of a row: Pearson's, of A1 and A2 over the visible keys; of rows with 3 or more of them in which both
                  maps vary by more than the rounding of their elements
  cancelled       of a row: 1 - sum|E| / sum(A1 + |s| A2): the share of the mass of both maps that the subtraction
                  removes. Of two equal maps 2s / (1 + s) for 0 <= s <= 1, and 0 for s <= 0
  negative        of a row: sum max(0, -E) / sum|E|; of rows in which more remains than rounding errors
  effective rank  of a map [T, T]: exp(-sum p ln p), p = singular values divided by their sum; between 1 and T. Not of a
                  map of zeros
  singular values one-sided Jacobi in double: rotates pairs of rows until all are orthogonal; then their norms are the
                  singular values. Rows whose cosine is below 1e-10 count as orthogonal
  not finite      output heads with such a map are counted, and not measured
  sources         Roy and Vetterli 2007, "The effective rank"; Hestenes 1958, "Inversion of matrices by
                  biorthogonalization"
*/
#ifndef LLMC_PROBE_MAPS_H
#define LLMC_PROBE_MAPS_H
#include "attention_maps.h"

// A mean that is NaN where nothing was added.
typedef struct {
    double sum;
    int64_t count;
} ProbeMean;
static inline void probe_add(ProbeMean *m, double x) { m->sum += x, m->count++; }
static inline double probe_mean(ProbeMean m) { return m.count ? m.sum / (double)m.count : (double)NAN; }

typedef enum { RANK_EFFECTIVE, RANK_SIGNAL, RANK_NOISE, RANK_KINDS } RankKind;
typedef struct {
    ProbeMean correlation, cancelled, negative, rank[RANK_KINDS];
    int64_t broken; // output heads with a map that is not finite
} MapProbe;

static inline void map_probe_join(MapProbe *to, const MapProbe *from) {
    ProbeMean *a[] = {&to->correlation, &to->cancelled, &to->negative};
    const ProbeMean *b[] = {&from->correlation, &from->cancelled, &from->negative};
    for (int i = 0; i < 3; i++) a[i]->sum += b[i]->sum, a[i]->count += b[i]->count;
    to->broken += from->broken;
    for (int i = 0; i < RANK_KINDS; i++) to->rank[i].sum += from->rank[i].sum, to->rank[i].count += from->rank[i].count;
}

static inline double row_dot(const double *x, const double *y, int n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

// Singular values of a [n][n], unsorted. Overwrites a. norms: scratch [n].
static inline void singular_values(double *values, double *a, double *norms, int n) {
    const double orthogonal = 1e-10;
    const int sweeps = 60; // it takes about 10
    bool rotated = true;
    for (int sweep = 0; sweep < sweeps && rotated; sweep++) {
        rotated = false;
        for (int p = 0; p < n; p++) norms[p] = row_dot(a + (size_t)p * n, a + (size_t)p * n, n);
        for (int p = 0; p < n; p++)
            for (int q = p + 1; q < n; q++) {
                double *x = a + (size_t)p * n, *y = a + (size_t)q * n, dot = row_dot(x, y, n);
                if (!(dot * dot > orthogonal * orthogonal * norms[p] * norms[q])) continue;
                double zeta = (norms[q] - norms[p]) / (2 * dot);
                double t = copysign(1, zeta) / (fabs(zeta) + sqrt(1 + zeta * zeta)), c = 1 / sqrt(1 + t * t), s = c * t;
#pragma omp simd
                for (int i = 0; i < n; i++) {
                    double of_p = x[i];
                    x[i] = c * of_p - s * y[i];
                    y[i] = s * of_p + c * y[i];
                }
                norms[p] -= t * dot;
                norms[q] += t * dot;
                rotated = true;
            }
    }
    for (int p = 0; p < n; p++) values[p] = sqrt(row_dot(a + (size_t)p * n, a + (size_t)p * n, n));
}

// exp of the entropy of the normalized singular values of a [n][n]; NaN for a matrix of zeros. Overwrites a.
static inline double effective_rank(double *a, int n) {
    double values[2 * MAP_TOKENS], sum = 0, entropy = 0;
    assert(n <= MAP_TOKENS);
    singular_values(values, a, values + MAP_TOKENS, n);
    for (int i = 0; i < n; i++) sum += values[i];
    for (int i = 0; i < n; i++)
        if (values[i] > 0) entropy -= values[i] / sum * log(values[i] / sum);
    return sum > 0 ? exp(entropy) : NAN;
}

// Adds Pearson's correlation of n elements of two rows, where it is defined.
static inline void row_correlation(ProbeMean *to, const float *x, const float *y, int n) {
    double mean_x = 0, mean_y = 0, xx = 0, yy = 0, xy = 0;
    for (int j = 0; j < n; j++) mean_x += (double)x[j] / n, mean_y += (double)y[j] / n;
    for (int j = 0; j < n; j++) {
        double dx = (double)x[j] - mean_x, dy = (double)y[j] - mean_y;
        xx += dx * dx, yy += dy * dy, xy += dx * dy;
    }
    const double rounding = 0x1p-20; // of an element: a few 2^-24, from its own and from that of its logit
    if (!(xx > n * pow(rounding * mean_x, 2) && yy > n * pow(rounding * mean_y, 2)) || n < 3) return;
    probe_add(to, xy / sqrt(xx * yy));
}

// Adds the rows of a pair of maps of output head h of sequence b, and writes the effective map.
static inline void map_pair_add(MapProbe *to, double *effective, const float *a1, const float *a2,
                                const HostAttention *m, int b, int h) {
    const double rounding =
        0x1p-14; // below 512 an lse in fp32 has errors below 2^-15, and with it each element of a row
    int T = m->shape.T;
    for (int t = 0; t < T; t++) {
        int first = map_first_key(m->shape, t);
        size_t at = (size_t)t * T + first;
        double s = map_lambda(m, b, t, h), mass = 0, rest = 0, negative = 0;
        for (int j = first; j <= t; j++) {
            size_t e = (size_t)t * T + j;
            effective[e] = (double)a1[e] - s * (double)a2[e];
            mass += (double)a1[e] + fabs(s) * (double)a2[e];
            rest += fabs(effective[e]);
            negative += fmax(0, -effective[e]);
        }
        row_correlation(&to->correlation, a1 + at, a2 + at, t + 1 - first);
        probe_add(&to->cancelled, 1 - rest / mass);
        if (rest > rounding * mass) probe_add(&to->negative, negative / rest);
    }
}

static inline void map_rank_add(ProbeMean *to, const float *map, int T) {
    double a[MAP_TOKENS * MAP_TOKENS];
    for (int i = 0; i < T * T; i++) a[i] = (double)map[i];
    double rank = effective_rank(a, T);
    if (!isnan(rank)) probe_add(to, rank);
}

// Adds output head h of sequence b. ranks: whether effective ranks are computed, which takes most of the time.
static inline void head_probe_add(MapProbe *to, const HostAttention *m, int b, int h, bool ranks) {
    float maps[2][MAP_TOKENS * MAP_TOKENS];
    double effective[MAP_TOKENS * MAP_TOKENS];
    int T = m->shape.T, count = m->groups.noise ? 2 : 1;
    assert(T <= MAP_TOKENS);
    for (int i = 0; i < count; i++) attention_map(maps[i], NULL, m, b, maps_query_head(m, h, i));
    if (!isfinite(map_first_mass(maps[0], T) + map_first_mass(maps[count - 1], T))) {
        to->broken++;
        return;
    }
    if (count == 1) {
        if (ranks) map_rank_add(&to->rank[RANK_EFFECTIVE], maps[0], T);
        return;
    }
    memset(effective, 0, (size_t)T * T * sizeof(double));
    map_pair_add(to, effective, maps[0], maps[1], m, b, h);
    if (!ranks) return;
    double rank = effective_rank(effective, T);
    if (!isnan(rank)) probe_add(&to->rank[RANK_EFFECTIVE], rank);
    map_rank_add(&to->rank[RANK_SIGNAL], maps[0], T);
    bool counted = h > 0 && maps_query_head(m, h, 1) == maps_query_head(m, h - 1, 1); // of another signal head
    if (!counted) map_rank_add(&to->rank[RANK_NOISE], maps[1], T);
}

// Adds all heads of all sequences, in an order that does not depend on the number of threads. The first
// `rank_windows` sequences have ranks.
static inline void maps_probe_add(MapProbe *to, const HostAttention *m, int rank_windows) {
    int heads = maps_output_heads(m), count = m->shape.B * heads;
    MapProbe *each = (MapProbe *)checked_calloc(count, sizeof(MapProbe));
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < count; i++) head_probe_add(&each[i], m, i / heads, i % heads, i / heads < rank_windows);
    for (int i = 0; i < count; i++) map_probe_join(to, &each[i]);
    free(each);
}
#endif
