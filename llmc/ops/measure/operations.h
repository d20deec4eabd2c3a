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
#endif
