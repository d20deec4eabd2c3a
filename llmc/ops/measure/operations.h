/*
operations.h: numbers for the log and for clipping.
*/
#ifndef LLMC_MEASURE_OPERATIONS_H
#define LLMC_MEASURE_OPERATIONS_H
#include "../ops.h"

// sum[0] = sum of squares, in double and in an order that does not depend on the number of threads; sum is memory of
// buffer_alloc, so that the program does not wait for each of several sums
static inline void sum_of_squares(double *sum, const grad_t *x, size_t count);
static inline size_t sum_of_squares_bytes(size_t count) { return count * FP32_BYTES; }

// Statistics for the log: a few numbers on the host, independent of the number of threads. A NaN among the values gives
// NaN. Equations in stats.h.
typedef struct {
    double first_position_share; // share of the first position of the row's document in |A1 - s A2|, or in A1
    double largest_logit;        // |scale q.k|
} AttentionStats;

// mean factor of the second maps, as in diff_combine_forward         l (N,NH) with row stride ldl
static inline double lambda_mean(const floatX *l, int N, int NH, int ldl, Factor factor);
// mean of the root mean squares of heads, which are adjacent in a row  x (N,heads*D) with row stride ld, N > 0
static inline double rms_mean(const floatX *x, int N, int heads, int D, int ld);
// the largest |x|                                                    x (N,C)
static inline double magnitude_max(const floatX *x, int N, int C);

// Measures sampled query rows that attend to more than one key; NaN if there are none. s describes key set 0 of
// `key_sets`, whose heads alternate within q and k; lse (key_sets, lse_set_stride). l, ldl, groups and factor are the
// arguments of diff_combine_forward; without noise heads there is one map, and l is not read
static inline AttentionStats attention_stats(const floatX *q, const floatX *k, const real *lse, const floatX *l,
                                             AttentionShape s, int key_sets, int ldl, HeadGroups groups, Factor factor);

// The sampled rows (stats.h), and the operands of a query head in one of them.
enum { ATTENTION_STATS_ROWS = 64 };
static inline int attention_stats_rows(int B, int T) {
    int64_t candidates = (int64_t)B * (T - 1);
    return candidates < ATTENTION_STATS_ROWS ? (int)candidates : ATTENTION_STATS_ROWS;
}
HOST_DEVICE void attention_stats_row(int r, int rows, int B, int T, int *b, int *t) {
    *b = r % B;
    *t = 1 + (int)((2 * (int64_t)r + 1) * (T - 1) / (2 * (int64_t)rows));
}
typedef struct {
    const floatX *q, *k, *l;
    const real *lse;
    AttentionShape shape;
    size_t lse_set; // elements of lse per key set
    int key_sets, ldl, rows, NH;
    HeadGroups groups;
    Factor factor;
} AttentionStatsInput;
typedef struct {
    const floatX *q, *k; // (D); (T, D) with the row stride ldkv
    double lse;
    const int *list; // sparse_row
} StatsMap;
HOST_DEVICE StatsMap stats_map(const AttentionStatsInput *in, int b, int t, int head) {
    const AttentionShape s = in->shape;
    int set = head % in->key_sets, h = head / in->key_sets, kv = h / (s.NQ / s.NKV);
    size_t sequence = (size_t)b * s.T;
    StatsMap m;
    m.q = in->q + (sequence + t) * s.ldq + (h * s.q_head + set * s.D);
    m.k = in->k + sequence * s.ldkv + (kv * s.k_head + set * s.D);
    m.list = sparse_row(s, b, h, t);
    m.lse = (double)in->lse[set * in->lse_set + ((size_t)b * s.NQ + h) * s.T + t];
    return m;
}
HOST_DEVICE double larger_or_nan(double a, double b) { return isnan(a) || b <= a ? a : b; }
#endif
