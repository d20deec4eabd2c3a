/*
sum_of_squares.h: the sum of squares, for the global gradient norm.
  numerics  products and sums in double; the range is divided into a fixed number of parts, so the result does not
            depend on the number of threads
  traffic   1 in per element
*/
#pragma once
#include "operations.h"

static inline void sum_of_squares(double *sum, const grad_t *x, size_t count) {
    enum { PARTS = 256 };
    double partial[PARTS];
    size_t size = round_up((count + PARTS - 1) / PARTS, 16);
#pragma omp parallel for schedule(static)
    for (int p = 0; p < PARTS; p++) {
        size_t begin = min_size(count, p * size), end = min_size(count, begin + size);
        double squares = 0;
#pragma omp simd reduction(+ : squares)
        for (size_t i = begin; i < end; i++) squares += (double)x[i] * (double)x[i];
        partial[p] = squares;
    }
    double total = 0;
    for (int p = 0; p < PARTS; p++) total += partial[p];
    sum[0] = total;
}
