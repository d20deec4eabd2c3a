/*
layer_lambda.cuh: a lambda that is not projected from the input. Equations in layer_lambda.h.

  mapping   forward: exp: one block computes the dot products; then a thread per pack writes the numbers.
            Backward: LAMBDA_PARTS blocks sum parts of dl; a thread adds the parts in order.
  numerics  sums and dot products in double, l rounded once
  traffic   count out; backward count in
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

// l[:] = learned[0], computed[0], or value: the first that is not NULL
template <int W>
static __global__ void fill_kernel(size_t begin, size_t end, floatX *l, real value, const real *computed,
                                   const floatX *learned) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float v[W], x = learned ? to_float(learned[0]) : computed ? computed[0] : value;
    UNROLL
    for (int k = 0; k < W; k++) v[k] = x;
    store<W>(l + i, v);
}

static inline void fill_forward(floatX *l, real value, size_t count) {
    OPERATION();
    LAUNCH_ELEMENTS(fill_kernel, packed(0, l), count, l, value, nullptr, nullptr);
}
static inline void lambda_learned_forward(floatX *l, const floatX *lambda, size_t count) {
    OPERATION();
    LAUNCH_ELEMENTS(fill_kernel, packed(0, l), count, l, (real)0, nullptr, lambda);
}

enum { LAMBDA_PARTS = 64, LAMBDA_THREADS = 256 };

// partial (LAMBDA_PARTS): each block sums a part of the elements
static __global__ void lambda_sum_kernel(double *partial, const floatX *dl, size_t count) {
    SHARED(double, memory, WARP);
    size_t begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
    double sum = 0;
    for (size_t i = begin + threadIdx.x; i < end; i += LAMBDA_THREADS) sum += (double)to_float(dl[i]);
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

static __device__ inline double lambda_total(const double *partial) {
    double sum = 0;
    for (int part = 0; part < LAMBDA_PARTS; part++) sum += partial[part];
    return sum;
}

// exp(a.b), the same in every thread of the block
static __device__ inline float lambda_exp_dot(const floatX *a, const floatX *b, int D, double *memory) {
    double dot = 0;
    for (int i = (int)threadIdx.x; i < D; i += (int)blockDim.x) dot += (double)to_float(a[i]) * (double)to_float(b[i]);
    return (float)exp(block_sum(dot, memory));
}

static __global__ void lambda_learned_backward_kernel(grad_t *dlambda, const double *partial) {
    dlambda[0] += (float)lambda_total(partial);
}

static inline const double *lambda_partial_sums(const floatX *dl, size_t count) {
    double *partial = (double *)ops_scratch(LAMBDA_PARTS * sizeof(double));
    LAUNCH(lambda_sum_kernel, LAMBDA_PARTS, LAMBDA_THREADS, 0, partial, dl, count);
    return partial;
}

static inline void lambda_learned_backward(grad_t *dlambda, const floatX *dl, size_t count) {
    OPERATION();
    LAUNCH(lambda_learned_backward_kernel, 1, 1, 0, dlambda, lambda_partial_sums(dl, count));
}

static __global__ void lambda_exp_forward_kernel(real *lambda, const floatX *q1, const floatX *k1, const floatX *q2,
                                                 const floatX *k2, int D, real init) {
    SHARED(double, memory, WARP);
    float e1 = lambda_exp_dot(q1, k1, D, memory), e2 = lambda_exp_dot(q2, k2, D, memory);
    if (threadIdx.x == 0) lambda[0] = e1 - e2 + init;
}

static inline void lambda_exp_forward(floatX *l, const floatX *q1, const floatX *k1, const floatX *q2, const floatX *k2,
                                      int D, real init, size_t count) {
    OPERATION();
    real *lambda = (real *)ops_scratch(sizeof(real));
    LAUNCH(lambda_exp_forward_kernel, 1, LAMBDA_THREADS, 0, lambda, q1, k1, q2, k2, D, init);
    LAUNCH_ELEMENTS(fill_kernel, packed(0, l), count, l, (real)0, lambda, nullptr);
}

static __global__ void lambda_exp_backward_kernel(grad_t *dq1, grad_t *dk1, grad_t *dq2, grad_t *dk2,
                                                  const double *partial, const floatX *q1, const floatX *k1,
                                                  const floatX *q2, const floatX *k2, int D) {
    SHARED(double, memory, WARP);
    float sum = (float)lambda_total(partial);
    float e1 = sum * lambda_exp_dot(q1, k1, D, memory), e2 = sum * lambda_exp_dot(q2, k2, D, memory);
    for (int i = (int)threadIdx.x; i < D; i += (int)blockDim.x) { // backward of l = exp(q1.k1) - exp(q2.k2) + init
        dq1[i] += e1 * to_float(k1[i]);
        dk1[i] += e1 * to_float(q1[i]);
        dq2[i] -= e2 * to_float(k2[i]);
        dk2[i] -= e2 * to_float(q2[i]);
    }
}

static inline void lambda_exp_backward(grad_t *dq1, grad_t *dk1, grad_t *dq2, grad_t *dk2, const floatX *dl,
                                       const floatX *q1, const floatX *k1, const floatX *q2, const floatX *k2, int D,
                                       size_t count) {
    OPERATION();
    const double *partial = lambda_partial_sums(dl, count);
    LAUNCH(lambda_exp_backward_kernel, 1, LAMBDA_THREADS, 0, dq1, dk1, dq2, dk2, partial, q1, k1, q2, k2, D);
}
