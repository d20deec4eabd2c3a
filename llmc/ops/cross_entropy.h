/*
cross_entropy.h: the loss of each row and, in the same buffer, its gradient with respect to the logits.

  forward   loss[n] += log(sum_v exp(x[n,v])) - x[n,target]
  backward  dx[n,v] = dloss (softmax(x[n,:])[v] - [v == target]),  written over x
  shapes    x (N,V) with row stride Vp >= V; targets (N) in [0,V); losses (N)
  numerics  the row's maximum is subtracted before exp; a NaN or +inf in a row makes its loss NaN
  traffic   V in, V out: a row stays in the cache for its three passes, and there is no second N x V buffer
*/
#ifndef LLMC_CROSS_ENTROPY_H
#define LLMC_CROSS_ENTROPY_H
#include "ops.h"
#include "vecmath.h"

static inline void cross_entropy(real *losses, floatX *logits, const int *targets, int N, int V, int Vp, real dloss) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        floatX *x = logits + (size_t)n * Vp;
        real max = x[0], sum = 0;
#pragma omp simd reduction(max : max)
        for (int v = 0; v < V; v++) max = x[v] > max ? x[v] : max;
        real below = max - x[targets[n]];
        if (dloss == 0) {
#pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) sum += real_exp(x[v] - max);
        } else {
#pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) sum += x[v] = real_exp(x[v] - max);
        }
        losses[n] += (real)log((double)sum) + below; // near 0 for a confident correct prediction
        if (dloss == 0) continue;
        real scale = dloss / sum;
        for (int v = 0; v < V; v++) x[v] *= scale; // backward of log sum exp(x): softmax
        x[targets[n]] -= dloss;                    // backward of - x[target]
        for (int v = V; v < Vp; v++) x[v] = 0;
    }
}
#endif
