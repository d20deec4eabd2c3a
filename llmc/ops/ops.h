/*
ops.h: the contract between the trainer and the operations.

Every operation is declared here once, with its shapes, and defined twice under the same name: in `NAME.h` (C) and in
`NAME.cuh` (CUDA, selected by DEVICE_OPS). An operation that is declared but not defined is a compiler warning, which is
treated as an error. The operations of a training step have a third definition, which records their cost for predictions
(dev/predict/recorded_operations.h, selected by RECORDED_OPS).

  floatX   storage of parameters and activations
  grad_t   storage of gradients
  real     statistics, moments, arithmetic
  On the CPU all three are `float`, or `double` with -DREAL=double.

  B sequences, T positions, N = B*T rows, C hidden size, L layers, V vocabulary, Vp row stride of the logits, F MLP
  width, D head dimension, NH output heads, NKV key/value heads, NQ query heads.
  Matrices are row-major; weights are [out, in]. `ld` is a row stride in elements.
  "=" overwrites, "+=" accumulates. Gradients of vectors and of the embedding accumulate; others do if `add` is true.

Pointers refer to memory of buffer_alloc. Only operations dereference them.
*/
#ifndef LLMC_OPS_H
#define LLMC_OPS_H
#include "../base/common.h"
#include "../cuda/device_peak.h"
#include "head_groups.h"
#include "../experts/routing.h"

#ifdef DEVICE_OPS
#include "../cuda/device_types.cuh"
#elif defined RECORDED_OPS // the types of the bf16 program, which no operation reads
typedef uint16_t floatX;
typedef float real, grad_t;
#else
#ifndef REAL
#define REAL float
#endif
typedef REAL real;
typedef REAL floatX;
typedef REAL grad_t;
#endif

// A matrix of activations, or their gradient. An operation that writes an Activation also computes its largest
// magnitude, for a product in FP8 that reads it: *max = max(*max, |x|), unless max is NULL. The bits are in absmax.h.
typedef uint32_t absmax_t;
typedef struct {
    floatX *data;
    absmax_t *max;
} Activation;
static inline Activation activation(const floatX *data, absmax_t *max) {
    Activation a = {(floatX *)data, max};
    return a;
}

// x[n,:] = weight[tokens[n],:]                               x (N,C), weight (V,C); every token is in [0,V)
static inline void embedding_forward(floatX *x, const int *tokens, const floatX *weight, int N, int C);
static inline void embedding_backward(grad_t *dweight, const floatX *dx, const int *tokens, int N, int C); // +=
static inline size_t embedding_workspace_bytes(int N); // for the backward

// y = x * rstd * weight, rstd = 1/sqrt(mean(x^2) + eps)      x, y (N,C), weight (C), rstd (N)
static inline void rmsnorm_forward(Activation y, real *rstd, const floatX *x, const floatX *weight, int N, int C,
                                   real eps);
static inline void rmsnorm_backward(Activation dx, grad_t *dweight, const floatX *dy, const floatX *x,
                                    const floatX *weight, const real *rstd, int N, int C,
                                    bool add);       // dx =, or with add +=; dweight +=
static inline size_t rmsnorm_workspace_bytes(int C); // for the backward
// sum = a + b, y = rmsnorm(sum): bitwise equal to rmsnorm_forward of the stored sum
static inline void residual_rmsnorm_forward(floatX *sum, Activation y, real *rstd, const floatX *a, const floatX *b,
                                            const floatX *weight, int N, int C, real eps); // a, b, sum, y (N,C)

// y = x weight^T                                             x (N,IC), weight (OC,IC), y (N,OC) with row stride ldy
static inline void matmul_forward(floatX *y, const floatX *x, const floatX *weight, int N, int IC, int OC, int ldy);
static inline void matmul_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x, const floatX *weight,
                                   int N, int IC, int OC, int ldy, bool add); // dx =; dweight =, or with add +=
// The number of rows of the logits to compute per call; row_bytes is the size of one row. Sums over rows depend on it,
// so it depends on its argument alone.
static inline size_t matmul_rows_at_a_time(size_t row_bytes);

// The same product with operands rounded as --gemm says: linear.h. `copy` holds the rounded weight, made once per
// update. Without a copy nothing is rounded: the product is that of matmul_forward. Columns of y between OC and ld may
// be overwritten.
typedef enum { GEMM_FP32, GEMM_BF16, GEMM_FP8 } GemmType;
typedef struct {
    const floatX *weight; // (OC,IC)
    grad_t *dweight;      // likewise; NULL without a backward
    void *copy;           // linear_copy_bytes, in memory of buffer_alloc; or NULL
    int IC, OC, ld;       // ld: row stride of y
} Linear;
static inline void linear_forward(floatX *y, Activation x, const Linear *w, int N);
static inline void linear_backward(floatX *dx, Activation dy, Activation x, const Linear *w, int N,
                                   bool add); // dx =; dweight =, or with add +=
static inline void linear_copy_weight(const Linear *w);
static inline size_t linear_copy_bytes(int IC, int OC, bool plain); // plain: of a layer that FP8 leaves out
static inline size_t linear_workspace_bytes(int N, int IC, int OC); // for the forward, the backward and the copy
// Selects the type; called once, before the functions above. Returns NULL, or the reason why it is not supported.
static inline const char *linear_configure(GemmType type);
static inline bool linear_in_fp8(void);
static inline bool linear_experts_in_fp8(void); // on GPUs where their product in FP8 is not faster, FP8 leaves them out

// The largest magnitude of an Activation that an operation without it has written; does nothing if x.max is NULL.
// x (N,columns) with row stride ld
static inline void absmax_update(Activation x, int N, int columns, int ld);

// rotates `heads` heads of width D in place, half-split pairs (i, i + D/2); row n = b*T + t has position first[b] + t,
// or t if first is NULL
// x (N, heads, D) with row stride ldx and head stride `head`; table (positions, 2, D/2) of cosines, sines, filled by
// rope_table on the host
static inline void rope_forward(floatX *x, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                const int *first);
static inline void rope_backward(floatX *dx, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                 const int *first);

// Block-sparse attention (sparse.h): a row attends to the blocks of keys of its list alone. Operations named sparse_*
// and statistics read this; other operations attend to all keys.
enum { SPARSE_BLOCKS_LIMIT = 64 };
typedef struct {
    int blocks, size; // blocks of a list besides the first and the row's own; positions of a block; blocks 0: attention
                      // to all keys
    int count;        // complete blocks of a sequence in the array of means
    int base;         // position of the first row of keys; > 0 only in generation
    const int *lists; // (B, NKV, T, blocks + 2): ascending block numbers, then -1
} SparseShape;
#ifdef DEVICE_OPS
#define SPARSE_INLINE static __host__ __device__ inline
#else
#define SPARSE_INLINE static inline
#endif
SPARSE_INLINE int sparse_width(SparseShape p) { return p.blocks + 2; }

// Causal attention of NQ query heads over NKV key/value heads; query head j uses key/value head j / (NQ/NKV). Rows of
// q, k, v and of the output have separate strides, and so do the heads within a row, so that q, k and v are read
// directly from the output of the fused GEMM. Query row t has position first + t and attends to the keys 0 .. first+t;
// keys and values have first + T rows (first > 0 only in generation, with B = 1).
typedef struct {
    int B, T, first;
    int NQ, NKV, D, DV;                 // D: width of a query and key head, DV: of a value head
    int ldq, ldkv, ldo;                 // row strides
    int q_head, k_head, v_head, o_head; // head strides
    real scale;
    int window;           // a row attends to the last `window` keys up to its own position; 0: to all of them
    const int *first_key; // (B,T): the first key that a row may attend to, nondecreasing in T; NULL: 0
    HeadGroups groups;    // of diff_attention; without noise heads: attention
    // With a table the backward includes rope_backward of this many heads from the first one of q on, with its strides:
    // those of q, or of q and k.
    const real *rope;
    int rope_heads;
    SparseShape sparse;
} AttentionShape;

// The list of row t of query head h of a key set; NULL: the row attends to all keys.
SPARSE_INLINE const int *sparse_row(AttentionShape s, int b, int h, int t) {
    size_t row = (size_t)(b * s.NKV + h / (s.NQ / s.NKV)) * s.T + t;
    return s.sparse.blocks ? s.sparse.lists + row * sparse_width(s.sparse) : NULL;
}
SPARSE_INLINE bool sparse_reads(const int *list, SparseShape p, int key) {
    bool found = !list;
    for (int i = 0; !found && i < p.blocks + 2 && list[i] >= 0; i++) found = list[i] == key / p.size;
    return found;
}
#undef SPARSE_INLINE
// The means of the keys of those blocks that are complete with the T rows from position first[b] on (NULL: 0), read
// from rows (position - base) % capacity of k, (B, capacity, ...). s: of key set 0 of `sets`, whose heads alternate in
// q and k; means (B, count, NKV, sets, D)
static inline void sparse_means(real *means, const floatX *k, const int *first, int capacity, int sets,
                                AttentionShape s);
// The lists of T rows of each sequence from position first[b] on (NULL: 0); not differentiated.
static inline void sparse_select(int *lists, const floatX *q, const real *means, const int *first, int sets,
                                 AttentionShape s);

// Query heads that are computed together, since their outputs are subtracted.
static inline int attention_maps(AttentionShape s) { return max_int(1, s.groups.signals + s.groups.noise); }
// Of attention alone, whose output has every query head.
static inline AttentionShape attention_of_heads(AttentionShape s) {
    if (s.groups.noise) s.o_head = s.DV, s.ldo = s.NQ * s.DV;
    s.groups.signals = s.groups.noise = 0;
    return s;
}

// Elements of lse per key set: a multiple of 16 bytes, the alignment that cuDNN requires.
static inline size_t lse_set_stride(AttentionShape s) { return round_up((size_t)s.B * s.NQ * s.T, 16 / sizeof(float)); }

// out (N, NQ, DV), lse (B, NQ, T): log of the sum of exp(scale q.k), kept for the backward; NULL: no backward follows
static inline void attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s);
static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, bool add_dv); // =; with add_dv dv += (a second key set reads
                                                                      // the same values); strides of q, k, v and out
static inline size_t attention_workspace_bytes(AttentionShape s, int threads); // for both, of the plans so far
// Block-sparse twins of attention_forward and attention_backward. With first and capacity: that of attention_decode;
// first NULL: no cache
static inline void sparse_attention_forward(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                            const int *first, int capacity, AttentionShape s);
static inline void sparse_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                             const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                             AttentionShape s, bool add_dv);
static inline size_t sparse_attention_workspace_bytes(AttentionShape s, int threads);

// Attention whose noise heads are subtracted, where the heads of a group share K and V: attention of all query heads,
// then diff_combine. out (N,OH,DV) has the strides ldo and o_head of s, whose groups have one noise head; l (N,OH) with
// row stride ldl and factor are those of diff_combine.
// kept (N, diff_attention_kept, DV): what the backward reads besides. Where that is every query head, the backward
// needs dkept, which is as large; else dkept is NULL.
static inline int diff_attention_kept(AttentionShape s);
static inline void diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q, const floatX *k,
                                          const floatX *v, const floatX *l, int ldl, AttentionShape s, Factor factor);
static inline void diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                           const floatX *dout, const floatX *out, const floatX *kept, const real *lse,
                                           const floatX *q, const floatX *k, const floatX *v, const floatX *l, int ldl,
                                           AttentionShape s, Factor factor);
// Block-sparse twins
static inline int sparse_diff_attention_kept(AttentionShape s);
static inline void sparse_diff_attention_forward(Activation out, floatX *kept, real *lse, const floatX *q,
                                                 const floatX *k, const floatX *v, const floatX *l, int ldl,
                                                 AttentionShape s, Factor factor);
static inline void sparse_diff_attention_backward(floatX *dq, floatX *dk, floatX *dv, floatX *dl, floatX *dkept,
                                                  const floatX *dout, const floatX *out, const floatX *kept,
                                                  const real *lse, const floatX *q, const floatX *k, const floatX *v,
                                                  const floatX *l, int ldl, AttentionShape s, Factor factor);

// Announces the documents of a batch of N rows, before attention with first_key, a copy of starts. starts is a host
// array: where the document of each row begins in its sequence of T rows. list (N+1) is overwritten, and read until the
// next batch.
static inline void attention_documents(int *list, const int *first_key, const int *starts, int N, int T);

// The backend of attention: the built-in kernels, or a library (cuDNN).
typedef struct {
    bool builtin, cudnn; // required; neither: cuDNN for the shapes that it supports
    bool deterministic;  // bitwise reproducible
    bool documents;      // first_key will be set
} AttentionOptions;
static inline void attention_configure(AttentionOptions options);
// `bytes` is the device memory that the rest of the run needs. It limits the workspace of the library.
static inline void attention_reserve(size_t bytes);
// Makes the plans for a shape, before attention_workspace_bytes is called. backward: also for the backward, with
// add_dv for both values of that argument.
static inline void attention_prepare(AttentionShape s, bool backward, bool add_dv);
static inline const char *attention_backend(void);         // a description; NULL: there is no choice
static inline const char *attention_library_version(void); // of the library, used or not
// A line about a shape, prepared since the last call, that is slower than the user may expect, with the remedy; NULL:
// no further warning.
static inline const char *attention_warning(void);
static inline size_t attention_deterministic_bytes(void); // workspace that AttentionOptions.deterministic costs

// The key/value cache of a layer: (B, capacity, width), rows [k | v]. The row of position p is p % capacity, so that a
// layer with a window of W positions needs W rows.
// Stores T rows per sequence, rows (B*T, width) with row stride ld, at positions first[b] .. first[b]+T-1;
// or with first NULL from 0 on. Of rows with the same place the last is stored.
static inline void cache_store(floatX *cache, const floatX *rows, const int *first, int B, int T, int capacity,
                               int width, int ld);
// Loads `count` rows of one sequence, positions first .. first+count-1, which are in the cache; rows (count, width)
static inline void cache_load(floatX *rows, const floatX *cache, int first, int count, int capacity, int width);
// Attention of one new position per sequence, first[b], over a cache whose last row is that position's: out (B,NQ,DV),
// lse (B,NQ), q (B, ...). k and v point to the first key and value of a cache with ldkv = width; s.T is 1, s.first is
// not used. A sequence attends to min(first[b] + 1, capacity) rows, so the window of the layer is its capacity.
static inline void attention_decode(floatX *out, real *lse, const floatX *q, const floatX *k, const floatX *v,
                                    const int *first, int capacity, AttentionShape s);
static inline size_t attention_decode_workspace_bytes(AttentionShape s, int capacity, int threads);

// sum = x, or with add sum += x; then x = sum: a running sum in `real` whose last value x receives
static inline void accumulate(real *sum, floatX *x, size_t count, bool add);

// Replaces out (N,NH,D) and lse (B,NH,T) of attention_forward by those of a softmax with one additional logit per head,
// sinks (NH) or 0 (NULL), whose column is dropped. attention_backward with these gives the correct gradients.
static inline void sink_forward(floatX *out, real *lse, const floatX *sinks, int B, int T, int NH, int D);
static inline void sink_backward(grad_t *dsinks, const floatX *dout, const floatX *out, const real *lse,
                                 const floatX *sinks, int B, int T, int NH, int D); // +=

// o[n,h,:] = a[n,h1,:] - s a[n,h2,:]                         o (N,NH,D), l (N,NH) with row stride ldl
// a (N, NH + NH noise/signals, D): h1 = signal_head(groups, h), h2 = noise_head(groups, h); s = factor(l[n,h])
static inline void diff_combine_forward(Activation o, const floatX *a, const floatX *l, int N, int NH, int D, int ldl,
                                        HeadGroups groups, Factor factor);
static inline void diff_combine_backward(floatX *da, floatX *dl, const floatX *do_, const floatX *a, const floatX *l,
                                         int N, int NH, int D, int ldl, HeadGroups groups,
                                         Factor factor); // =; dl with the stride of l

// l[:] = value                                               a lambda that is the same for all rows: layer_lambda.h
static inline void fill_forward(floatX *l, real value, size_t count);
// l[:] = lambda[0]
static inline void lambda_learned_forward(floatX *l, const floatX *lambda, size_t count);
static inline void lambda_learned_backward(grad_t *dlambda, const floatX *dl, size_t count); // +=
// l[:] = exp(q1.k1) - exp(q2.k2) + init; q1, k1, q2, k2 (D) each
static inline void lambda_exp_forward(floatX *l, const floatX *q1, const floatX *k1, const floatX *q2, const floatX *k2,
                                      int D, real init, size_t count);
static inline void lambda_exp_backward(grad_t *dq1, grad_t *dk1, grad_t *dq2, grad_t *dk2, const floatX *dl,
                                       const floatX *q1, const floatX *k1, const floatX *q2, const floatX *k2, int D,
                                       size_t count); // +=

// RMSNorm of each of `heads` adjacent heads of width D, in place: x (N, heads*D) with row stride ld, weight (D).
// kept (N, heads*D) with row stride ldk, or NULL: x before the norm, which the backward reads
static inline void head_norm_forward(floatX *x, floatX *kept, const floatX *weight, int N, int heads, int D, int ld,
                                     int ldk, real eps);
static inline void head_norm_backward(floatX *dx, grad_t *dweight, const floatX *kept, const floatX *weight, int N,
                                      int heads, int D, int ld, int ldk, real eps); // dx in place, dweight +=
static inline size_t head_norm_workspace_bytes(int D);

// x[:] *= factor; its own backward
static inline void scale_inplace(floatX *x, real factor, size_t count);

// y[n,h,:] = x[n,h,:] sigmoid(g)                             x, y (N,heads,D), g (N,heads*width) with row stride ldg;
// width 1: one gate per head, or D: one per element
static inline void gate_forward(Activation y, const floatX *x, const floatX *g, int N, int heads, int D, int ldg,
                                int width);
static inline void gate_backward(floatX *dx, floatX *dg, const floatX *dy, const floatX *x, const floatX *g, int N,
                                 int heads, int D, int ldg, int width); // =; dg with the stride of g

// y = silu(gate) * up                                        gate_up (N,2F) rows [gate | up], y (N,F)
static inline void swiglu_forward(Activation y, const floatX *gate_up, int N, int F);
static inline void swiglu_backward(Activation dgate_up, const floatX *dy, const floatX *gate_up, int N, int F); // =

// log_z[n] = log sum_v exp(logits[n,v]);  losses[n] += log_z[n] - logits[n,targets[n]]
//                                                            logits (N,V) with row stride Vp; losses, log_z (N)
// if dloss != 0, the logits are then overwritten by the gradient of dloss * (loss + z_loss log_z^2), the padding by 0
static inline void cross_entropy(real *losses, real *log_z, floatX *logits, const int *targets, int N, int V, int Vp,
                                 real dloss, real z_loss);

// One AdamW step (decoupled decay) over `count` elements, g = grad_scale * grads:
//   m = beta1 m + (1-beta1) g,  v = beta2 v + (1-beta2) g^2,  w -= lr (m^ / (sqrt(v^) + eps) + weight_decay w)
// master: fp32 weights when params are narrower, else NULL
static inline void adamw_update(floatX *params, real *master, const grad_t *grads, real *m, real *v, size_t count,
                                double grad_scale, double lr, double beta1, double beta2, double eps,
                                double weight_decay, int64_t step);

// Muon, an optimizer of matrices: a step along the orthogonalized momentum (muon.h). g = grad_scale * grads:
//   m = momentum m + (1-momentum) g,  direction = momentum m + (1-momentum) g                     all (count)
static inline void muon_direction(floatX *direction, real *m, const grad_t *grads, size_t count, double grad_scale,
                                  double momentum);
// out = 0.2 sqrt(max(rows,columns)) orthogonal(x); with second the orthogonal matrix is divided by the root of
// second = beta2 second + (1-beta2) (mean square of its rows), and has the same size as a whole.
// x, out (rows,columns); second (rows); NULL: Muon
static inline void muon_orthogonalize(grad_t *out, real *second, const floatX *x, int rows, int columns, double beta2);
static inline size_t muon_workspace_bytes(int rows, int columns);
// w = (1 - lr weight_decay) w - lr step                                                            all (count)
static inline void muon_update(floatX *params, real *master, const grad_t *step, size_t count, double lr,
                               double weight_decay);

// sum[0] = sum of squares, in double and in an order that does not depend on the number of threads; sum is memory of
// buffer_alloc, so that the program does not wait for each of several sums
static inline void sum_of_squares(double *sum, const grad_t *x, size_t count);

// Statistics for the log: a few numbers on the host, independent of the number of threads. A NaN among the values gives
// NaN. Equations in stats.h.
typedef struct {
    double first_effective; // share of position 0 (of the row's document) in |A1 - s A2|; with one map in A1
    double largest_logit;   // |scale q.k|
} AttentionStats;

// mean factor of the second maps, as in diff_combine_forward         l (N,NH) with row stride ldl
static inline double lambda_mean(const floatX *l, int N, int NH, int ldl, Factor factor);
// mean of the root mean squares of heads, which are adjacent in a row  x (N,heads*D) with row stride ld, N > 0
static inline double rms_mean(const floatX *x, int N, int heads, int D, int ld);
// the largest |x|                                                    x (N,C)
static inline double magnitude_max(const floatX *x, int N, int C);
// The sum of squares of the change of w that adamw_update with the same arguments makes, without weight decay.
static inline double update_squares(const grad_t *grads, const real *m, const real *v, size_t count, double grad_scale,
                                    double lr, double beta1, double beta2, double eps, int64_t step);
// On sampled query rows that attend to more than themselves; NaN if there are none. s describes key set 0 of
// `key_sets`, whose heads alternate within q and k; lse (key_sets, lse_set_stride). l, ldl, groups and factor as in
// diff_combine_forward; without noise heads one map, no l
static inline AttentionStats attention_stats(const floatX *q, const floatX *k, const real *lse, const floatX *l,
                                             AttentionShape s, int key_sets, int ldl, HeadGroups groups, Factor factor);

// Called before the first operation; allocates the workspace that the operations share, the maximum of
// *_workspace_bytes.
static inline void ops_init(size_t workspace_bytes);
static inline void ops_free(void);
// Waits for all operations called so far. On a device they run asynchronously.
static inline void ops_wait(void);

// Facts for run.json, --dry-run and messages: descriptions of the device and its driver; false on the CPU.
static inline bool ops_device(char *device, char *driver, size_t size);
// The rates of a bf16 build's device; NULL: a CPU, an fp32 build or a device that is not listed, to be measured.
static inline const DevicePeak *ops_rated(void);

// A part of the memory of a process.
typedef struct {
    const char *what;
    size_t bytes;
    bool about; // an estimate
} MemoryPart;
static inline MemoryPart memory_part(const char *what, size_t bytes, bool about) {
    MemoryPart part = {what, bytes, about};
    return part;
}
// Lists the memory of operations and their libraries besides the program's buffers; returns the number of parts.
static inline int ops_memory_parts(MemoryPart *parts);

typedef struct {
    size_t used, total, at_start; // bytes, used by all processes; at_start: used before this process's first buffer
} DeviceMemory;
// ops_use_host_memory: a constant, true if buffers are in host memory.
// The memory of the device; false on the CPU, or if there is no device.
static inline bool ops_memory(DeviceMemory *m);
#endif
