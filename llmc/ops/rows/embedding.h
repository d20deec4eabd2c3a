/*
embedding.h: a row of the table per token.

  forward   x[n,:] = weight[tokens[n],:]
  backward  dweight[tokens[n],:] += dx[n,:]
  shapes    tokens (N), weight (V,C), x (N,C)
  numerics  the rows of a token are added in the order of n. Threads divide the columns, not the rows, so the sum does
            not depend on their number and needs no atomics.
  traffic   forward C in, C out per row; backward 2C in, C out
*/
#pragma once
#include "operations.h"

static inline void embedding_forward(floatX *x, const int *tokens, const floatX *weight, int N, int C) {
#pragma omp parallel for schedule(static) if (worth_threads((size_t)N * C))
    for (int n = 0; n < N; n++) memcpy(x + (size_t)n * C, weight + (size_t)tokens[n] * C, C * sizeof(floatX));
}

static inline size_t embedding_workspace_bytes(int N) {
    (void)N; // the CUDA twin sorts the rows
    return 0;
}

static inline void embedding_backward(grad_t *dweight, const floatX *dx, const int *tokens, int N, int C) {
#pragma omp parallel
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int c0 = (int)(C * thread / threads), c1 = (int)(C * (thread + 1) / threads);
        for (int n = 0; n < N; n++) {
            grad_t *dw = dweight + (size_t)tokens[n] * C;
            const floatX *d = dx + (size_t)n * C;
            for (int c = c0; c < c1; c++) dw[c] += d[c]; // backward of x[n,c] = weight[tokens[n],c]
        }
    }
    fault_point(FAULT_GRADIENT, dweight, (size_t)C);
}
