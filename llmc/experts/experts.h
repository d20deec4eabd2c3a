/*
experts.h: the experts of a mixture of experts: rows grouped by expert, grouped products, and the weighted sum.

  forward   places p of expert e:  xg = x[token of p];  gate_up = xg Wgu_e^T;  h = w silu(gate) * up;  o = h Wd_e^T
            y[n] = sum of o over the K places of token n.  The weight w of a choice is applied before Wd, which is the
            same product, so that the backward does not need o: dw = <dh, silu(gate) * up>
  backward  do = dy[token of p];  dh = do Wd_e, dWd_e = do^T h;  the activation;  dxg = dgu Wgu_e, dWgu_e = dgu^T xg;
            dx[n] = sum of dxg over the K places of token n
  shapes    N tokens, R = N*K places; starts (E+1). Every token keeps its K experts: nothing is dropped or padded
  order     places of an expert follow the order of tokens, so that sums do not depend on the number of threads
  source    the experts are the MLP of swiglu.h
*/
#pragma once
#include "../ops/gates/swiglu.h"
#include "../ops/linear/linear.h"
#include "operations.h"
#include "../ops/vecmath.h"

static inline void expert_group(int *starts, int *entries, int *places, const int *experts, Routing r) {
    int R = r.N * r.K;
    memset(starts, 0, (size_t)(r.E + 1) * sizeof(int));
    for (int i = 0; i < R; i++) starts[experts[i] + 1]++;
    for (int e = 0; e < r.E; e++) starts[e + 1] += starts[e];
    for (int i = 0; i < R; i++) { // starts[e]: the next place of expert e; at the end, the first place of e + 1
        int p = starts[experts[i]]++;
        entries[p] = i;
        places[i] = p;
    }
    memmove(starts + 1, starts, (size_t)r.E * sizeof(int));
    starts[0] = 0;
}

static inline void expert_gather(floatX *y, const floatX *x, const int *entries, Routing r) {
#pragma omp parallel for schedule(static)
    for (int p = 0; p < r.N * r.K; p++)
        memcpy(y + (size_t)p * r.C, x + (size_t)(entries[p] / r.K) * r.C, (size_t)r.C * sizeof(floatX));
}

static inline void expert_combine(floatX *y, const floatX *x, const int *places, Routing r, bool add) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < r.N; n++) {
        floatX *to = y + (size_t)n * r.C;
        if (!add) memset(to, 0, (size_t)r.C * sizeof(floatX));
        for (int k = 0; k < r.K; k++) {
            const floatX *from = x + (size_t)places[(size_t)n * r.K + k] * r.C;
            for (int c = 0; c < r.C; c++) to[c] += from[c];
        }
    }
}

static inline void expert_swiglu_forward(Activation y, const floatX *gate_up, const real *weights, const int *entries,
                                         int R, int F) {
    swiglu_weighted_forward(y, gate_up, weights, entries, R, F);
}

static inline void expert_swiglu_backward(Activation dgate_up, real *dweights, const floatX *dy, const floatX *gate_up,
                                          const real *weights, const int *entries, int R, int F) {
#pragma omp parallel for schedule(static)
    for (int p = 0; p < R; p++) {
        const floatX *g = gate_up + 2 * (size_t)p * F, *u = g + F, *d = dy + (size_t)p * F;
        floatX *dg = dgate_up.data + 2 * (size_t)p * F, *du = dg + F;
        real w = weights[entries[p]], sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < F; i++) {
            real s = real_sigmoid(g[i]);
            sum += d[i] * (g[i] * s * u[i]);                    // backward of w in y = w g s u
            du[i] = w * d[i] * g[i] * s;                        // backward of u
            dg[i] = w * d[i] * u[i] * s * (1 + g[i] * (1 - s)); // backward of g s, with ds/dg = s (1 - s)
        }
        dweights[entries[p]] = sum;
    }
    absmax_update(dgate_up, R, 2 * F, 2 * F);
}

static inline Linear expert_linear_of(const ExpertLinear *w, int e) {
    Linear one = w->first;
    one.weight += (size_t)e * w->stride;
    if (one.dweight) one.dweight += (size_t)e * w->stride;
    if (one.copy) one.copy = (char *)one.copy + (size_t)e * w->copy_stride;
    return one;
}

// An expert has at most all N tokens.
static inline size_t expert_linear_workspace_bytes(int N, int R, int E, int IC, int OC) {
    (void)R, (void)E;
    return linear_workspace_bytes(N, IC, OC);
}
static inline void expert_linear_copy_weights(const ExpertLinear *w) {
    for (int e = 0; e < w->count; e++) {
        Linear one = expert_linear_of(w, e);
        linear_copy_weight(&one);
    }
}

static inline void expert_linear_forward(floatX *y, Activation x, const ExpertLinear *w, const int *starts, int N,
                                         int R) {
    (void)N, (void)R;
    for (int e = 0; e < w->count; e++) {
        Linear one = expert_linear_of(w, e);
        size_t at = (size_t)starts[e];
        int rows = starts[e + 1] - starts[e];
        if (rows) linear_forward(y + at * one.OC, activation(x.data + at * one.IC, x.max), &one, rows);
    }
}

static inline void expert_linear_backward(floatX *dx, Activation dy, Activation x, const ExpertLinear *w,
                                          const int *starts, int N, int R, bool add) {
    (void)N, (void)R;
    for (int e = 0; e < w->count; e++) {
        Linear one = expert_linear_of(w, e);
        size_t at = (size_t)starts[e];
        int rows = starts[e + 1] - starts[e];
        if (rows)
            linear_backward(dx + at * one.IC, activation(dy.data + at * one.OC, dy.max),
                            activation(x.data + at * one.IC, x.max), &one, rows, add);
        else if (!add) memset(one.dweight, 0, (size_t)one.OC * one.IC * sizeof(grad_t));
    }
}
