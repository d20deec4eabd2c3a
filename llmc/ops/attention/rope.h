/*
rope.h: rotary position embedding: rotates pairs of elements of a query or key head by an angle proportional to the
position.

  forward   (x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin),  x1 = x[i], x2 = x[i + D/2],
            angle = position * theta^(-2i/D)
  backward  a rotation is orthogonal: rotates the gradient by the opposite angle
  shapes    x (N, heads, D) in place with strides ldx and head; table (positions, 2, D/2): cosines, then sines
  pairs     half-split, as in Llama checkpoints on the Hub
  numerics  angles in double, rounded once into the table
  source    Su et al. 2021, "RoFormer"
*/
#pragma once
#include "operations.h"

static inline void rope_rotate(floatX *x, const real *table, int B, int T, int heads, int D, int ldx, int head,
                               const int *first, real sign) {
    int half = D / 2;
#pragma omp parallel for schedule(static) if (worth_threads((size_t)B * T * heads * D))
    for (int n = 0; n < B * T; n++) {
        const real *cosines = table + (size_t)((first ? first[n / T] : 0) + n % T) * D, *sines = cosines + half;
        for (int h = 0; h < heads; h++) {
            floatX *x1 = x + (size_t)n * ldx + h * head, *x2 = x1 + half;
#pragma omp simd
            for (int i = 0; i < half; i++) {
                real c = cosines[i], s = sign * sines[i], a = x1[i], b = x2[i];
                x1[i] = a * c - b * s;
                x2[i] = b * c + a * s;
            }
        }
    }
}

static inline void rope_forward(floatX *x, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                const int *first) {
    rope_rotate(x, table, B, T, heads, D, ldx, head, first, 1);
}

static inline void rope_backward(floatX *dx, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                 const int *first) {
    rope_rotate(dx, table, B, T, heads, D, ldx, head, first, -1);
}
