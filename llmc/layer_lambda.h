/*
layer_lambda: a factor of the second map that is one number for a layer, not projected from the input.

It fills the rows l (count) that diff_combine reads as its lambda, so that the subtraction has one form; the
backward sums their gradients dl. That costs one number per row and head.

  constant   l[:] = value; nothing to learn
  traffic    count out; backward count in
*/
#ifndef LLMC_LAYER_LAMBDA_H
#define LLMC_LAYER_LAMBDA_H

static inline void fill_forward(floatX *l, real value, size_t count) {
    for (size_t i = 0; i < count; i++) l[i] = value;
}
#endif
