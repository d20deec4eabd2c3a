/*
operations.h: attention, its caches, and the subtraction of heads.
*/
#ifndef LLMC_ATTENTION_OPERATIONS_H
#define LLMC_ATTENTION_OPERATIONS_H
#include "../ops.h"

// Rotates `heads` heads of width D in place, in half-split pairs (i, i + D/2). Row n = b*T + t has position
// first[b] + t, or t if first is NULL. x (N, heads, D), row stride ldx, head stride `head`; table (positions, 2, D/2):
// cosines, then sines, which rope_table fills on the host.
static inline void rope_forward(floatX *x, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                const int *first);
static inline void rope_backward(floatX *dx, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                 const int *first);
// Fills a host table for `positions` positions: positions * D reals.
static inline void rope_table(real *table, int positions, int D, double theta);
#ifndef RECORDED_OPS // predictions read no table
static inline void rope_table(real *table, int positions, int D, double theta) {
    for (int t = 0; t < positions; t++, table += D)
        for (int i = 0; i < D / 2; i++) {
            double angle = (double)t * pow(theta, -2.0 * i / D);
            table[i] = (real)cos(angle);
            table[D / 2 + i] = (real)sin(angle);
        }
}
#endif
static inline size_t rope_bytes(size_t N, size_t heads, size_t D) {
    return N * D * (2 * heads * FLOATX_BYTES + FP32_BYTES);
}

// out (N, NQ, DV), lse (B, NQ, T): log of the sum of exp(scale q.k), kept for the backward; NULL: no backward follows
static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s);
static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv); // =; with add_dv dv += (a second key set reads
                                                                      // the same values); strides of q, k, v and out
static inline size_t attention_workspace_bytes(AttentionShape s, int threads); // for both; covers the plans so far
// Block-sparse attention: returns the pairs of a query and a key that it attends to, per head, in B sequences; sets
// *scored to the scored blocks of all rows of a sequence. Positions are from 0, there are no documents, and each scored
// block is equally likely to be selected. The first and the lowest block may be partly outside of a row's window.
static inline double sparse_visible_keys(AttentionShape s, double *scored) {
    double pairs = 0;
    *scored = 0;
    for (int t = 0, size = s.sparse.size; t < s.T; t++) {
        int first = s.window ? max_int(0, t - s.window + 1) : 0, low = first / size, self = t / size;
        int blocks = max_int(0, self - max_int(low, 1)), hidden = low > 0 && low < self ? first % size : 0;
        pairs += t + 1 - max_int(first, self * size) + (low == 0 && self > 0 ? size - first : 0);
        if (blocks) pairs += ((double)blocks * size - hidden) * min_int(blocks, s.sparse.blocks) / blocks;
        *scored += blocks;
    }
    return s.B * pairs;
}
// Pairs of a query and a key that it attends to, per head.
static inline double attention_visible(AttentionShape s) {
    double scored;
    if (s.sparse.blocks) return sparse_visible_keys(s, &scored);
    double keys = (double)s.T * s.query_offset + 0.5 * s.T * (s.T + 1.0), last = (double)s.query_offset + s.T, hidden;
    double beyond = s.window ? fmax(0, last - s.window) : 0; // what the window hides from the last row
    double rows = fmin(beyond, s.T);                         // rows from which it hides something
    hidden = rows * (beyond - 0.5 * (rows - 1));
    return s.B * (keys - hidden);
}
static inline double attention_forward_flops(AttentionShape s) {
    return 2.0 * s.NQ * attention_visible(s) * (s.D + s.DV);
}
static inline double attention_backward_flops(AttentionShape s) {
    return 2.0 * attention_visible(s) * (s.NQ * 3.0 * s.D + output_heads(s.groups, s.NQ) * 2.0 * s.DV);
}
static inline size_t attention_forward_bytes(AttentionShape s) {
    size_t B = s.B, T = s.T, NQ = s.NQ, keys = B * (s.query_offset + T) * s.NKV;
    return (B * T * NQ + keys) * (s.D + s.DV) * FLOATX_BYTES + B * T * NQ * FP32_BYTES;
}
static inline size_t attention_backward_bytes(AttentionShape s) {
    size_t B = s.B, T = s.T, NQ = s.NQ, heads = NQ + s.NKV;
    return B * T * heads * 2 * (s.D + s.DV) * FLOATX_BYTES + 3 * B * T * NQ * FP32_BYTES;
}

// Attention whose noise heads are subtracted, where the heads of a group share K and V: attention of all query heads,
// then diff_combine. out (N,OH,DV) has the strides ldo and o_head of s, whose groups have one noise head; l (N,OH),
// with row stride ldl, and factor are as in diff_combine. kept (N, diff_attention_kept, DV): heads before the
// subtraction, which the backward also reads. If kept has all query heads, the backward requires dkept, a buffer of the
// same shape; else dkept is NULL.
static inline int diff_attention_kept(AttentionShape s);
static inline void diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                          const floatX *v, const floatX *l, int ldl, AttentionShape s, Factor factor);
static inline void diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                           const floatX *dout, const floatX *out, const floatX *kept, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v, const floatX *l, int ldl,
                                           AttentionShape s, Factor factor);
// Bytes with groups of signal heads and one noise head: `heads` of NQ are outputs, the others are kept.
static inline size_t diff_attention_forward_bytes(AttentionShape s) {
    size_t rows = (size_t)s.B * s.T, heads = output_heads(s.groups, s.NQ);
    return attention_forward_bytes(s) + rows * heads * FLOATX_BYTES;
}
static inline size_t diff_attention_backward_bytes(AttentionShape s) {
    size_t rows = (size_t)s.B * s.T, heads = output_heads(s.groups, s.NQ), NQ = s.NQ;
    size_t each = 2 * (NQ + s.NKV) * s.D + (NQ + heads + 2 * s.NKV) * s.DV + 2 * heads;
    return rows * (each * FLOATX_BYTES + 3 * NQ * FP32_BYTES);
}

// o[n,h,:] = a[n,h1,:] - s a[n,h2,:]                         o (N,NH,D), l (N,NH) with row stride ldl
// a (N, NH + NH noise/signals, D): h1 = signal_head(groups, h), h2 = noise_head(groups, h); s = factor(l[n,h])
static inline void diff_combine_forward(Activation o, const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                        HeadGroups groups, Factor factor);
static inline void diff_combine_backward(floatX *da, floatX *dl, const floatX *do_, const floatX *a, const floatX *l,
                                         int N, int NH, int D, int ldl, HeadGroups groups,
                                         Factor factor); // =; dl with the stride of l
// NQ heads in, NH out
static inline size_t diff_combine_forward_bytes(size_t N, size_t NQ, size_t NH, size_t D) {
    return N * (NQ * D + NH * (D + 1)) * FLOATX_BYTES;
}
static inline size_t diff_combine_backward_bytes(size_t N, size_t NQ, size_t NH, size_t D) {
    return N * 2 * (NQ * D + NH) * FLOATX_BYTES;
}

// Prepares attention for a batch of N rows with documents: required before operations whose shape has first_key.
// document_starts (N), on the host: the position in its sequence of T rows at which each row's document begins;
// first_key: its copy on the device. list (N+1) is overwritten; attention reads it until the next batch.
static inline void attention_documents(int *list, const int *first_key, const int *document_starts, int N, int T);

// The backend of attention: the built-in kernels, or a library (cuDNN).
typedef struct {
    bool builtin, cudnn; // required; neither: cuDNN for the shapes that it supports
    bool deterministic;  // bitwise reproducible
    bool documents;      // first_key will be set
} AttentionOptions;
static inline void attention_configure(AttentionOptions options);
// `bytes` is the device memory that the rest of the run needs. It limits the workspace of the library.
static inline void attention_reserve(size_t bytes);
// Makes the plans for a shape, before attention_workspace_bytes is called. backward: also plans the backward; add_dv:
// both with and without that argument of attention_backward.
static inline void attention_prepare(AttentionShape s, bool backward, bool add_dv);
static inline const char *attention_backend(void);         // a description; NULL: there is no choice
static inline const char *attention_library_version(void); // used or not
// Returns a warning, with the remedy, about a shape that was prepared since the last call and is unexpectedly slow;
// NULL: no further warning.
static inline const char *attention_warning(void);
static inline size_t attention_deterministic_bytes(void); // workspace that AttentionOptions.deterministic costs
// Frees the plans, which outlive ops_init: they are made before the size of the workspace is known.
static inline void attention_close(void);

// Limit of the workspace on a GPU, in bytes, when the device's memory is unknown.
enum { GPU_ATTENTION_LIMIT = 1 << 30 };

// The key/value cache of a layer: (B, capacity, width), rows [k | v]. The row of position p is p % capacity, so that a
// layer with a window of W positions needs W rows.
// Stores T rows per sequence, rows (B*T, width) with row stride ld, at positions first[b] .. first[b]+T-1;
// or from 0 on if first is NULL. If several rows have the same place, the last one is stored.
static inline void cache_store(floatX *cache, const floatX *rows, const int *first, int B, int T, int capacity,
                               int width, int ld);
// Loads `count` rows of one sequence, positions first .. first+count-1, which are in the cache; rows (count, width)
static inline void cache_load(floatX *rows, const floatX *cache, int first, int count, int capacity, int width);
// Attention of one new position per sequence, first[b], over a cache that already holds its row: out (B,NQ,DV),
// lse (B,NQ), q (B, ...). k and v point to the first key and value of a cache with ldkv = width; s.T is 1, s.first is
// not used. A sequence attends to min(first[b] + 1, capacity) rows, so the window of the layer is its capacity.
static inline void attention_decode(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                    const int *first, int capacity, AttentionShape s);
static inline size_t attention_decode_workspace_bytes(AttentionShape s, int capacity, int threads);
// Bytes for one new position per sequence, over `keys` positions of a cache.
static inline size_t attention_decode_bytes(AttentionShape s, size_t keys) {
    return s.B * (s.D + s.DV) * (keys * s.NKV + s.NQ) * FLOATX_BYTES;
}
static inline size_t cache_store_bytes(size_t rows, size_t width) { return 2 * rows * width * FLOATX_BYTES; }

// Computes the means of the keys of each block that the T rows from position first[b] on (NULL: 0) complete. The keys
// are rows (position - base) % capacity of k, (B, capacity, ...). s describes key set 0 of `sets`, whose heads
// alternate in q and k; means (B, count, NKV, sets, D)
static inline void sparse_means(real *means, const floatX *k, const int *first, int capacity, int sets,
                                AttentionShape s);
// Selects the lists of T rows of each sequence from position first[b] on (NULL: 0); not differentiated.
static inline void sparse_select(int *lists, const floatX *q, const real *means, const int *first, int sets,
                                 AttentionShape s);
// FLOPs of the scores in sparse_select.
static inline double sparse_select_flops(AttentionShape s) {
    double scored = 0;
    if (s.sparse.blocks) sparse_visible_keys(s, &scored);
    return (double)s.B * s.NKV * 2 * s.D * scored;
}

// Block-sparse twins of attention_forward and attention_backward. With first and capacity (NULL: no cache) the forward
// is the twin of attention_decode.
static inline void sparse_attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                            const int *first, int capacity, AttentionShape s);
static inline void sparse_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                             const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                             AttentionShape s, bool add_dv);
static inline size_t sparse_attention_workspace_bytes(AttentionShape s, int threads);
// Block-sparse twins of diff_attention_kept, diff_attention_forward and diff_attention_backward
static inline int sparse_diff_attention_kept(AttentionShape s);
static inline void sparse_diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q,
                                                 const floatX *k, const floatX *v, const floatX *l, int ldl,
                                                 AttentionShape s, Factor factor);
static inline void sparse_diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                                  const floatX *dout, const floatX *out, const floatX *kept,
                                                  const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                                  const floatX *l, int ldl, AttentionShape s, Factor factor);
#endif
