/*
attention_stats.cuh: the attention statistics. Equations in stats.h.

  mapping   a block per sampled row and output head; its threads divide the keys among them. The host adds the results
            of the blocks, rows in order, heads in order.
  traffic   per sampled row and map, the keys before it
*/
#pragma once
#include "../attention/attention_kernels.cuh"
#include "operations.h"
#include "stats.cuh"

enum { ATTENTION_STATS_THREADS = 128 };
static size_t attention_stats_limit = SCRATCH_BYTES; // bytes of the results of a launch; smaller in tests

// The result of one sampled row and output head.
typedef struct {
    double first;   // |E| at the row's first key
    double sum;     // sum of |E| over the keys
    double largest; // |logit|; -1: the row attends only to itself
} AttentionHeadStats;

static __global__ void attention_stats_kernel(AttentionHeadStats *results, AttentionStatsInput in, int first_row) {
    SHARED(double, memory, WARP);
    SHARED(double, largest, ATTENTION_STATS_THREADS);
    SHARED(double, first, 1);
    const AttentionShape s = in.shape;
    AttentionHeadStats *result = results + blockIdx.y * (size_t)in.NH + blockIdx.x;
    int h = (int)blockIdx.x, b, t, thread = (int)threadIdx.x, maps = in.groups.noise ? 2 : 1;
    attention_stats_row(first_row + (int)blockIdx.y, in.rows, s.B, s.T, &b, &t);
    int start = s.first_key ? s.first_key[b * s.T + t] : 0, low = attention_first_key(s, b, t);
    double lambda = maps > 1 ? factor_of((double)to_float(in.l[((size_t)b * s.T + t) * in.ldl + h]), in.factor) : 0;
    double sum = 0, local = -1;
    for (int j = low + thread; j <= t; j += ATTENTION_STATS_THREADS) {
        double a[2] = {0, 0}; // A1[j], A2[j]
        for (int m = 0; m < maps; m++) {
            StatsMap map = stats_map(&in, b, t, m ? noise_head(in.groups, h) : signal_head(in.groups, h));
            float dot = 0;
            if (!sparse_reads(map.list, s.sparse, j)) continue;
            for (int i = 0; i < s.D; i++) dot += to_float(map.q[i]) * to_float(map.k[(size_t)j * s.ldkv + i]);
            double logit = (double)s.scale * (double)dot;
            local = larger_or_nan(local, fabs(logit));
            a[m] = exp(logit - map.lse);
        }
        double e = fabs(a[0] - lambda * a[1]);
        if (j == start) first[0] = e;
        sum += e;
    }
    largest[thread] = local;
    sum = block_sum(sum, memory); // its barriers precede the reads below
    if (thread > 0) return;
    for (int i = 1; i < ATTENTION_STATS_THREADS; i++) local = larger_or_nan(local, largest[i]);
    *result = AttentionHeadStats{start >= low ? first[0] : 0, sum, local}; // a window may hide the first key
    if (low == t) *result = AttentionHeadStats{0, 0, -1};                  // the first row of a document
}

static inline AttentionStats attention_stats(const floatX *q, const floatX *k, const real *lse, const floatX *l,
                                             AttentionShape s, int key_sets, int ldl, HeadGroups groups,
                                             Factor factor) {
    int NH = output_heads(groups, s.NQ * key_sets), rows = attention_stats_rows(s.B, s.T);
    AttentionStatsInput in = {q, k, l, lse, s, lse_set_stride(s), key_sets, ldl, rows, NH, groups, factor};
    size_t row_bytes = NH * sizeof(AttentionHeadStats);
    int at_once = (int)min_size(ATTENTION_STATS_ROWS, attention_stats_limit / row_bytes); // rows per launch
    AttentionHeadStats *results = (AttentionHeadStats *)ops_scratch(at_once * row_bytes);
    AttentionHeadStats *host = (AttentionHeadStats *)checked_calloc(at_once, row_bytes);
    AttentionStats stats = {0, -1};
    int count = 0; // heads with a sum
    for (int row = 0; row < rows; row += at_once) {
        int now = min_int(at_once, rows - row);
        LAUNCH(attention_stats_kernel, dim3((unsigned)NH, (unsigned)now), ATTENTION_STATS_THREADS, 0, results, in, row);
        buffer_download(host, results, now * row_bytes);
        for (const AttentionHeadStats *h = host; h < host + (size_t)now * NH; h++) {
            stats.largest_logit = larger_or_nan(stats.largest_logit, h->largest);
            if (h->sum == 0) continue;
            stats.first_position_share += h->first / h->sum;
            count++;
        }
    }
    free(host);
    stats.first_position_share = count ? stats.first_position_share / count : NAN;
    if (stats.largest_logit < 0) stats.largest_logit = NAN;
    return stats;
}
