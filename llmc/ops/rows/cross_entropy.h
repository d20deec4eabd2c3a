/*
cross_entropy.h: the loss of each row and, in the same buffer, its gradient with respect to the logits.

  forward   z[n] = log(sum_v exp(x[n,v])),  loss[n] += z[n] - x[n,target]
  backward  for dloss (loss + w z^2):  dx[n,v] = dloss ((1 + 2 w z[n]) softmax(x[n,:])[v] - [v == target]) overwrites
            x. The second term, the z-loss, keeps the logits near a normalized distribution; the losses exclude it.
  shapes    x (N,V) with row stride Vp >= V; targets (N) in [0,V); losses, z (N)
  numerics  the row's maximum is subtracted before exp; a NaN or +inf in a row makes its loss NaN
  traffic   V in, V out: a row stays in the cache for its three passes, and there is no second N x V buffer
  source    z-loss: Chowdhery et al. 2022, "PaLM", section 5
*/
#pragma once
#include "operations.h"
#include "../vecmath.h"

static inline void cross_entropy(real *losses, real *log_z, floatX *logits, const int *targets, int N, int V, int Vp,
                                 real dloss, real z_loss) {
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
        real log_sum = (real)log((double)sum);
        log_z[n] = max + log_sum;
        losses[n] += log_sum + below; // near 0 for a confident correct prediction
        if (dloss == 0) continue;
        real scale = dloss * (1 + 2 * z_loss * log_z[n]) / sum;
        for (int v = 0; v < V; v++) x[v] *= scale; // backward of log sum exp(x): softmax
        x[targets[n]] -= dloss;                    // backward of - x[target]
        for (int v = V; v < Vp; v++) x[v] = 0;
    }
}
