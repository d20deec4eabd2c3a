/*
probe_subtraction.h: does a model without noise heads learn to subtract one head from another? W_h = the [C, D] block of
o_proj of head h: its columns h*D .. h*D + D-1. Two heads that read the same values with W_g = -W_h are a subtraction.

  opposition  cos(W_h, -W_g) = -<W_h, W_g> / (|W_h| |W_g|) of two heads of one key/value group; 0 where a block is zero
  adjacent    mean over the pairs of heads 2i, 2i+1, as DIFF V2 pairs them; NaN: a group has an odd number of heads
  closest     mean over the heads of the largest opposition to another head of the group
  permuted    the same of 1000 draws. A draw permutes the D columns of each head independently, which keeps norms and
              the distribution of elements, and removes any relation between the columns of two heads. Mean, and
              quantiles of 2.5 and 97.5 %, interpolated linearly between draws
  p           (1 + draws that reach the observed value) / 1001
  cost        a draw costs D products for each pair of heads: it reads the diagonal of a permuted [D, D] matrix of
              products of columns
  sources     GQA heads of one group share values: Ye and others 2026, the post on DIFF V2, which says that
              W_O^{2i} = -W_O^{2i+1} is not learned; p: Phipson and Smyth 2010, "Permutation P-values should never be
              zero"
*/
#ifndef LLMC_PROBE_SUBTRACTION_H
#define LLMC_PROBE_SUBTRACTION_H
#include "../base/permute.h"
#include "../ops/ops.h"

enum { PROBE_DRAWS = 1000 };

// A statistic of a layer, and its distribution under permutations.
typedef struct {
    double observed, mean, low, high, p;
} PermutedStatistic;

typedef struct {
    int heads_in_group; // below 2: nothing is measured
    PermutedStatistic adjacent, closest;
} SubtractionProbe;

static inline int ascending_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Of sorted values.
static inline double quantile_of(const double *sorted, int count, double share) {
    double at = share * (count - 1);
    int below = (int)at;
    double next = sorted[min_int(below + 1, count - 1)];
    return sorted[below] + (at - below) * (next - sorted[below]);
}

// values [1 + PROBE_DRAWS]: observed, then the draws, which are sorted.
static inline PermutedStatistic permuted_statistic(double *values) {
    PermutedStatistic s = {values[0], 0, 0, 0, 0};
    double *draws = values + 1;
    int reached = 0;
    for (int i = 0; i < PROBE_DRAWS; i++) s.mean += draws[i] / PROBE_DRAWS, reached += draws[i] >= s.observed;
    qsort(draws, PROBE_DRAWS, sizeof(double), ascending_doubles);
    s.low = quantile_of(draws, PROBE_DRAWS, 0.025);
    s.high = quantile_of(draws, PROBE_DRAWS, 0.975);
    s.p = (1.0 + reached) / (1.0 + PROBE_DRAWS);
    return s;
}

// o_proj (C, ld); products [D][D]: of the columns of the blocks that begin at g and h.
static inline void block_products(double *products, const floatX *o_proj, int C, int D, size_t ld, int g, int h) {
    memset(products, 0, (size_t)D * D * sizeof(double));
    for (int c = 0; c < C; c++) {
        const floatX *row = o_proj + (size_t)c * ld;
        for (int i = 0; i < D; i++) {
            double x = (double)row[g + i];
            for (int j = 0; j < D; j++) products[i * D + j] += x * (double)row[h + j];
        }
    }
}

static inline double block_norm(const floatX *o_proj, int C, int D, size_t ld, int h) {
    double sum = 0;
    for (int c = 0; c < C; c++)
        for (int i = 0; i < D; i++)
            sum += (double)o_proj[(size_t)c * ld + h + i] * (double)o_proj[(size_t)c * ld + h + i];
    return sqrt(sum);
}

// The oppositions [1 + PROBE_DRAWS] of heads g and h: observed, then of each draw. order [heads][1 + PROBE_DRAWS][D].
static inline void pair_oppositions(double *out, const floatX *o_proj, const unsigned char *order, int C, int D,
                                    size_t ld, int g, int h) {
    double *products = (double *)checked_calloc((size_t)D * D, sizeof(double));
    double norms = block_norm(o_proj, C, D, ld, g * D) * block_norm(o_proj, C, D, ld, h * D);
    block_products(products, o_proj, C, D, ld, g * D, h * D);
    for (int r = 0; r <= PROBE_DRAWS; r++) {
        const unsigned char *of_g = order + ((size_t)g * (1 + PROBE_DRAWS) + r) * D;
        const unsigned char *of_h = order + ((size_t)h * (1 + PROBE_DRAWS) + r) * D;
        double sum = 0;
        for (int i = 0; i < D; i++) sum += products[of_g[i] * D + of_h[i]];
        out[r] = norms > 0 ? -sum / norms : 0;
    }
    free(products);
}

// Adds one group's heads to the sums [1 + PROBE_DRAWS] of adjacent pairs and of closest heads. oppositions
// [k][k][1 + PROBE_DRAWS]: of the heads of the group.
static inline void group_add(double *adjacent, double *closest, const double *oppositions, int k) {
    for (int r = 0; r <= PROBE_DRAWS; r++)
        for (int g = 0; g < k; g++) {
            double largest = -INFINITY;
            for (int h = 0; h < k; h++) {
                double x = oppositions[((size_t)g * k + h) * (1 + PROBE_DRAWS) + r];
                if (h != g) largest = fmax(largest, x);
                if (h == g + 1 && g % 2 == 0) adjacent[r] += x;
            }
            closest[r] += largest;
        }
}

// The order of the columns of each head in each draw; in the first, as they are. D is at most 256.
static inline unsigned char *probe_orders(int NH, int D, uint64_t key) {
    unsigned char *order = (unsigned char *)checked_calloc((size_t)NH * (1 + PROBE_DRAWS) * D, 1), *to = order;
    for (int h = 0; h < NH; h++)
        for (int r = 0; r <= PROBE_DRAWS; r++)
            for (int i = 0; i < D; i++)
                *to++ = (unsigned char)(r ? permutation_at((uint64_t)i, (uint64_t)D, key + (uint64_t)h, (uint64_t)r)
                                          : (uint64_t)i);
    return order;
}

// o_proj [C][NH*D] on the host, of NKV key/value groups. key: of the draws.
static inline SubtractionProbe probe_subtraction(const floatX *o_proj, int C, int NH, int NKV, int D, uint64_t key) {
    enum { VALUES = 1 + PROBE_DRAWS };
    SubtractionProbe s;
    memset(&s, 0, sizeof(s));
    int k = s.heads_in_group = NH / NKV;
    if (k < 2) return s;
    unsigned char *order = probe_orders(NH, D, key);
    double *sums = (double *)checked_calloc(2 * VALUES, sizeof(double)), *adjacent = sums, *closest = sums + VALUES;
    double *oppositions = (double *)checked_calloc((size_t)k * k * VALUES, sizeof(double));
    for (int group = 0; group < NKV; group++) {
#pragma omp parallel for schedule(dynamic)
        for (int pair = 0; pair < k * k; pair++) {
            int g = pair / k, h = pair % k;
            double *of_pair = oppositions + (size_t)pair * VALUES;
            if (g >= h) continue;
            pair_oppositions(of_pair, o_proj, order, C, D, (size_t)NH * D, group * k + g, group * k + h);
            memcpy(oppositions + (size_t)(h * k + g) * VALUES, of_pair, VALUES * sizeof(double));
        }
        group_add(adjacent, closest, oppositions, k);
    }
    for (int r = 0; r < VALUES; r++) adjacent[r] /= NH / 2, closest[r] /= NH;
    PermutedStatistic none = {NAN, NAN, NAN, NAN, NAN};
    s.adjacent = k % 2 ? none : permuted_statistic(adjacent);
    s.closest = permuted_statistic(closest);
    free(oppositions);
    free(sums);
    free(order);
    return s;
}
#endif
