/*
operations.h: functions between the products of a block: gates, SwiGLU, sinks, and the lambda of a layer.
*/
#ifndef LLMC_GATES_OPERATIONS_H
#define LLMC_GATES_OPERATIONS_H
#include "../ops.h"

// y[n,h,:] = x[n,h,:] sigmoid(g)                             x, y (N,heads,D), g (N,heads*width) with row stride ldg;
// width 1: one gate per head, or D: one per element
static inline void gate_forward(Activation y, const floatX *x, const floatX *g, int N, int heads, int D, int ldg,
                                int width);
static inline void gate_backward(floatX *dx, floatX *dg, const floatX *dy, const floatX *x, const floatX *g, int N,
                                 int heads, int D, int ldg, int width); // =; dg with the stride of g
static inline size_t gate_forward_bytes(size_t N, size_t heads, size_t D, size_t width) {
    return N * heads * (2 * D + width) * FLOATX_BYTES;
}
static inline size_t gate_backward_bytes(size_t N, size_t heads, size_t D, size_t width) {
    return N * heads * (3 * D + 2 * width) * FLOATX_BYTES;
}

// y = silu(gate) * up                                        gate_up (N,2F) rows [gate | up], y (N,F)
static inline void swiglu_forward(Activation y, const floatX *gate_up, int N, int F);
static inline void swiglu_backward(Activation dgate_up, const floatX *dy, const floatX *gate_up, int N, int F); // =
static inline size_t swiglu_forward_bytes(size_t N, size_t F) { return 3 * N * F * FLOATX_BYTES; }
static inline size_t swiglu_backward_bytes(size_t N, size_t F) { return 5 * N * F * FLOATX_BYTES; }

// Replaces out (N,NH,D) and lse (B,NH,T) of attention_forward by the results of a softmax with one additional logit per
// head, sinks (NH) or 0 (NULL), whose column is dropped. attention_backward with these gives the correct gradients.
static inline void sink_forward(floatX *out, real *lse, const floatX *sinks, int B, int T, int NH, int D);
static inline void sink_backward(grad_t *dsinks, const floatX *dout, const floatX *out, const real *lse,
                                 const floatX *sinks, int B, int T, int NH, int D); // +=
static inline size_t sink_forward_bytes(size_t N, size_t NH, size_t D) {
    return 2 * N * NH * (D * FLOATX_BYTES + FP32_BYTES);
}
static inline size_t sink_backward_bytes(size_t N, size_t NH, size_t D) {
    return N * NH * (2 * D * FLOATX_BYTES + FP32_BYTES);
}

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
static inline size_t layer_lambda_bytes(size_t count) { return count * FLOATX_BYTES; }
#endif
