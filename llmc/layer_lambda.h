/*
layer_lambda: a factor of the second map that is one number for a layer, not projected from the input.

It fills the rows l (count) that diff_combine reads as its lambda, so that the subtraction has one form; the
backward sums their gradients dl. That costs one number per row and head.

  constant   l[:] = value; nothing to learn
  scalar     l[:] = lambda;   dlambda += sum(dl)
  traffic    count out; backward count in
*/
#ifndef LLMC_LAYER_LAMBDA_H
#define LLMC_LAYER_LAMBDA_H

static inline void fill_forward(floatX *l, real value, size_t count) {
    for (size_t i = 0; i < count; i++) l[i] = value;
}

// In one order and in double: count is small beside the heads' work.
static inline real lambda_gradient(const floatX *dl, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += (double)dl[i];
    return (real)sum;
}

static inline void lambda_scalar_forward(floatX *l, const floatX *lambda, size_t count) { fill_forward(l, lambda[0], count); }

static inline void lambda_scalar_backward(grad_t *dlambda, const floatX *dl, size_t count) {
    dlambda[0] += lambda_gradient(dl, count);
}
#endif
