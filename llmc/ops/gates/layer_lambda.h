/*
layer_lambda.h: a lambda that is not projected from the input: one number per layer.

The number is written to all rows l (N,NH) that diff_combine reads as its lambda, so that the subtraction has one
form. The backward sums their gradients dl. The cost is one number per row and head; count = N*NH.

  constant   l[:] = value; no parameter
  learned    l[:] = lambda;   dlambda += sum(dl)
  exp        l[:] = exp(q1.k1) - exp(q2.k2) + init
             dq1 += sum(dl) exp(q1.k1) k1;  dq2 -= sum(dl) exp(q2.k2) k2;  dk1 and dk2 with q and k exchanged
             (DIFF V1, arXiv 2410.05258)
  traffic    count out; backward count in
*/
#pragma once
#include "operations.h"

static inline void fill_forward(floatX *l, real value, size_t count) {
    for (size_t i = 0; i < count; i++) l[i] = value;
}

// Sums in a fixed order and in double. This takes little time compared with the heads.
static inline real lambda_gradient(const floatX *dl, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += (double)dl[i];
    return (real)sum;
}

static inline void lambda_learned_forward(floatX *l, const floatX *lambda, size_t count) {
    for (size_t i = 0; i < count; i++) l[i] = lambda[0];
}

static inline void lambda_learned_backward(grad_t *dlambda, const floatX *dl, size_t count) {
    dlambda[0] += lambda_gradient(dl, count);
}

static inline real lambda_exp_dot(const floatX *a, const floatX *b, int D) {
    double dot = 0;
    for (int i = 0; i < D; i++) dot += (double)a[i] * (double)b[i];
    return (real)exp(dot);
}

static inline void lambda_exp_forward(floatX *l, const floatX *q1, const floatX *k1, const floatX *q2, const floatX *k2,
                                      int D, real init, size_t count) {
    fill_forward(l, lambda_exp_dot(q1, k1, D) - lambda_exp_dot(q2, k2, D) + init, count);
}

static inline void lambda_exp_backward(grad_t *dq1, grad_t *dk1, grad_t *dq2, grad_t *dk2, const floatX *dl,
                                       const floatX *q1, const floatX *k1, const floatX *q2, const floatX *k2, int D,
                                       size_t count) {
    real sum = lambda_gradient(dl, count), e1 = sum * lambda_exp_dot(q1, k1, D), e2 = sum * lambda_exp_dot(q2, k2, D);
    for (int i = 0; i < D; i++) { // backward of l = exp(q1.k1) - exp(q2.k2) + init
        dq1[i] += e1 * k1[i];
        dk1[i] += e1 * q1[i];
        dq2[i] -= e2 * k2[i];
        dk2[i] -= e2 * q2[i];
    }
}
