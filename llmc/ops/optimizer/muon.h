/*
muon.h: Muon, a step along the orthogonalized momentum of a matrix, and NorMuon, whose rows have equal sizes.

  direction      m = momentum m + (1-momentum) g,  d = momentum m + (1-momentum) g,  g = grad_scale * grads; Nesterov
  orthogonal     X = d / max(|d|, 1e-7), |d| of Frobenius; then MUON_STEPS (5) times
                 A = X X^T,  X = (a I + b A + c A A) X;   a tall matrix: A = X^T X,  X = X (a I + b A + c A A)
                 a, b, c = 3.4445, -4.7750, 2.0315: singular values end between about 0.7 and 1.2, except values far
                 below 1/500 of |d|. d = U S V^T becomes about U V^T, whose largest side n gives a root mean square
                 of 1/sqrt(n)
  step           0.2 sqrt(max(rows, columns)) X: the root mean square of an AdamW step, so learning rates transfer
  NorMuon        v = beta2 v + (1-beta2) mean(X^2) of each row;  Y = X / (sqrt(v) + 1e-10);
                 step = 0.2 sqrt(rows columns) Y / max(|Y|, 1e-7)
  update         w = (1 - lr weight_decay) w - lr step
  shapes         x, out (rows, columns); v (rows)
  numerics       all in `real`; one thread sums a row, in double, so the number of threads changes the bits of products
                 alone (matmul.h)
  flops          5 (4 k k n + 2 k k k), k the smaller and n the larger side
  source         Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; for the factor Liu et
                 al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982); Li et al. 2025, "NorMuon: Making Muon
                 more efficient and scalable" (arXiv 2510.05491)
*/
#pragma once
#include "../linear/matmul.h"
#include "operations.h"

static inline void muon_direction(floatX *direction, real *m, const grad_t *grads, size_t count, double grad_scale,
                                  double momentum) {
    real keep = (real)momentum, rest = (real)(1 - momentum), scale = (real)grad_scale;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < count; i++) {
        real g = rest * (scale * grads[i]);
        m[i] = keep * m[i] + g;
        direction[i] = keep * m[i] + g;
    }
    fault_point(FAULT_MOMENT, m, count);
}

// X, the next X, A, P, and the sums of squares of the rows, of one matrix.
static inline size_t muon_workspace_bytes(MuonMatrices m) {
    size_t k = (size_t)min_int(m.rows, m.columns);
    return (2 * (size_t)m.rows * (size_t)m.columns + 2 * k * k) * sizeof(real) + (size_t)m.rows * sizeof(double);
}

static inline void muon_row_squares(double *squares, const real *x, int rows, int columns) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        const real *row = x + (size_t)r * columns;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < columns; c++) sum += (double)row[c] * (double)row[c];
        squares[r] = sum;
    }
}

// to[r] = scale * from[r]; row_scales: an additional factor for each row, or NULL
static inline void muon_copy_rows(real *to, const real *from, int rows, int columns, double scale,
                                  const double *row_scales) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        real *y = to + (size_t)r * columns, factor = (real)(row_scales ? scale * row_scales[r] : scale);
        const real *x = from + (size_t)r * columns;
#pragma omp simd
        for (int c = 0; c < columns; c++) y[c] = factor * x[c];
    }
}

// next = one step of Newton-Schulz on X (rows,columns); A, P (k,k)
static inline void muon_step(real *next, const real *X, real *A, real *P, int rows, int columns) {
    const double *c = muon_coefficients;
    bool tall = rows > columns;
    int k = min_int(rows, columns), n = max_int(rows, columns);
    if (tall) gemm(CblasTrans, CblasNoTrans, k, k, n, 1, X, columns, X, columns, 0, A, k); // A = X^T X
    else gemm(CblasNoTrans, CblasTrans, k, k, n, 1, X, columns, X, columns, 0, A, k);      // A = X X^T
    gemm(CblasNoTrans, CblasNoTrans, k, k, k, (real)c[2], A, k, A, k, 0, P, k);            // P = c A A
#pragma omp parallel for schedule(static)
    for (int i = 0; i < k; i++)
        for (int j = 0; j < k; j++) {
            size_t at = (size_t)i * k + j;
            P[at] += (real)c[1] * A[at] + (i == j ? (real)c[0] : 0);
        }
    if (tall) gemm(CblasNoTrans, CblasNoTrans, rows, k, k, 1, X, columns, P, k, 0, next, columns); // X P
    else gemm(CblasNoTrans, CblasNoTrans, k, columns, k, 1, P, k, X, columns, 0, next, columns);   // P X
}

// Updates the second moments of the rows of X from their sums of squares, and replaces the sums by factors of the rows.
// Returns the factor of all rows.
static inline double muon_normalize(double *squares, real *row_v, int rows, int columns, double beta2) {
    double total = 0;
    for (int r = 0; r < rows; r++) {
        row_v[r] = (real)(beta2 * (double)row_v[r] + (1 - beta2) * squares[r] / columns);
        double factor = 1 / (sqrt((double)row_v[r]) + 1e-10);
        total += squares[r] * factor * factor;
        squares[r] = factor;
    }
    return 0.2 * sqrt((double)rows * columns) / fmax(sqrt(total), 1e-7);
}

static inline void muon_orthogonalize_one(grad_t *out, real *row_v, const floatX *x, MuonMatrices m, double beta2) {
    const int rows = m.rows, columns = m.columns, k = min_int(rows, columns);
    const size_t size = (size_t)rows * (size_t)columns;
    real *X = ops_workspace_take(muon_workspace_bytes(m)), *next = X + size, *A = next + size, *P = A + (size_t)k * k;
    double *squares = (double *)(void *)(P + (size_t)k * k), total = 0;
    muon_row_squares(squares, x, rows, columns);
    for (int r = 0; r < rows; r++) total += squares[r];
    muon_copy_rows(X, x, rows, columns, 1 / fmax(sqrt(total), 1e-7), NULL);
    for (int step = 0; step < MUON_STEPS; step++) {
        muon_step(next, X, A, P, rows, columns);
        real *before = X;
        X = next, next = before;
    }
    double factor = 0.2 * sqrt((double)max_int(rows, columns));
    if (row_v) {
        muon_row_squares(squares, X, rows, columns);
        factor = muon_normalize(squares, row_v, rows, columns, beta2);
    }
    muon_copy_rows(out, X, rows, columns, factor, row_v ? squares : NULL);
}

static inline void muon_orthogonalize(grad_t *out, real *row_v, const floatX *x, MuonMatrices m, double beta2) {
    for (int i = 0; i < m.count; i++)
        muon_orthogonalize_one(out + i * m.apart, row_v ? row_v + (size_t)i * m.rows : NULL, x + i * m.apart, m, beta2);
}

static inline void muon_update(floatX *params, real *master, const grad_t *step, size_t count, double lr,
                               double weight_decay) {
    real keep = (real)(1 - lr * weight_decay), rate = (real)lr;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < count; i++) {
        real w = (master ? master[i] : params[i]) * keep - rate * step[i];
        if (master) master[i] = w;
        params[i] = w;
    }
    fault_point(FAULT_UPDATE, params, count);
}
