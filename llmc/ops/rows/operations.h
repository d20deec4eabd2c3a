/*
operations.h: operations on rows of activations: embedding, norms, the loss, sums. They are bound by memory.
*/
#ifndef LLMC_ROWS_OPERATIONS_H
#define LLMC_ROWS_OPERATIONS_H
#include "../ops.h"

// x[n,:] = weight[tokens[n],:]                               x (N,C), weight (V,C); every token is in [0,V)
static inline void embedding_forward(floatX *x, const int *tokens, const floatX *weight, int N, int C);
static inline void embedding_backward(grad_t *dweight, const floatX *dx, const int *tokens, int N, int C); // +=
static inline size_t embedding_workspace_bytes(int N); // for the backward
static inline size_t embedding_forward_bytes(size_t N, size_t C) { return N * (2 * C * FLOATX_BYTES + sizeof(int)); }
// distinct: number of different tokens among the N. The rows are sorted by token: four passes that read and write a
// token and a row number.
static inline size_t embedding_backward_bytes(size_t N, size_t C, size_t distinct) {
    return N * (C * FLOATX_BYTES + 4 * 16) + 2 * distinct * C * FP32_BYTES;
}

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
static inline size_t rmsnorm_forward_bytes(size_t N, size_t C) { return N * (2 * C * FLOATX_BYTES + FP32_BYTES); }
static inline size_t residual_rmsnorm_forward_bytes(size_t N, size_t C) {
    return N * (4 * C * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t rmsnorm_backward_bytes(size_t N, size_t C) { // without the partial sums of dweight
    return N * (4 * C * FLOATX_BYTES + FP32_BYTES);
}

// RMSNorm of each of `heads` adjacent heads of width D, in place: x (N, heads*D) with row stride ld, weight (D).
// kept (N, heads*D) with row stride ldk, or NULL: x before the norm, which the backward reads
static inline void head_norm_forward(floatX *x, floatX *kept, const floatX *weight, int N, int heads, int D, int ld,
                                     int ldk, real eps);
static inline void head_norm_backward(floatX *dx, grad_t *dweight, const floatX *kept, const floatX *weight, int N,
                                      int heads, int D, int ld, int ldk, real eps); // dx in place, dweight +=
static inline size_t head_norm_workspace_bytes(int D);
// kept: whether the input is kept for a backward
static inline size_t head_norm_forward_bytes(size_t N, size_t heads, size_t D, bool kept) {
    return N * heads * D * (2 + kept) * FLOATX_BYTES;
}
static inline size_t head_norm_backward_bytes(size_t N, size_t heads, size_t D) {
    return 3 * N * heads * D * FLOATX_BYTES;
}

// log_z[n] = log sum_v exp(logits[n,v]);  losses[n] += log_z[n] - logits[n,targets[n]]
//                                                            logits (N,V) with row stride Vp; losses, log_z (N)
// if dloss != 0, the logits are then overwritten by the gradient of dloss * (loss + z_loss log_z^2), the padding by 0
static inline void cross_entropy(real *losses, real *log_z, floatX *logits, const int *targets, int N, int V, int Vp,
                                 real dloss, real z_loss);
static inline size_t cross_entropy_bytes(size_t N, size_t V, size_t Vp, bool gradient) {
    return N * (gradient ? 2 * V + Vp : V) * FLOATX_BYTES;
}

// sum = x, or with add sum += x; then x = sum, rounded: a running sum in `real`
static inline void add_to_sum(real *sum, floatX *x, size_t count, bool add);
static inline size_t add_to_sum_bytes(size_t count, bool add) {
    return count * (2 * FLOATX_BYTES + (add ? 2 : 1) * FP32_BYTES);
}

// x[:] *= factor; the backward is the same operation
static inline void scale_inplace(floatX *x, real factor, size_t count);
static inline size_t scale_bytes(size_t count) { return 2 * count * FLOATX_BYTES; }
#endif
