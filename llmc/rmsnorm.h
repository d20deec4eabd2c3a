/*
rmsnorm: divide a row by its root mean square.

  forward   r = 1/sqrt(mean_c(x[n,c]^2) + eps),   y[n,c] = x[n,c] r weight[c]
  backward  with z = x r (the normalised row) and g = dy * weight:
              y = z weight           =>  dweight[c] += sum_n dy[n,c] z[n,c]
              r = (mean(x^2)+eps)^-1/2  =>  dr/dx[c] = -r^3 x[c] / C
              dx[c] = r g[c] + (sum_j g[j] x[j]) dr/dx[c] = r (g[c] - z[c] mean_j(g[j] z[j]))
            dx accumulates, since the row also flows past the norm (the residual stream).
  shapes    x, y (N,C), weight (C), rstd (N)
  numerics  sums in `real`; dweight is summed over n in order, by columns, for any number of threads
  traffic   forward C in (twice, from cache), C out; backward 4C in, C out, and 2C in for dweight
  source    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"
*/
#ifndef LLMC_RMSNORM_H
#define LLMC_RMSNORM_H

static inline void rmsnorm_forward(floatX *y, real *rstd, const floatX *x, const floatX *weight, int N, int C, real eps) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const floatX *xn = x + (size_t)n * (size_t)C;
        floatX *yn = y + (size_t)n * (size_t)C;
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; c++) sum += xn[c] * xn[c];
        real r = 1 / (real)sqrt((double)(sum / (real)C + eps));
        for (int c = 0; c < C; c++) yn[c] = xn[c] * r * weight[c];
        rstd[n] = r;
    }
}

static inline void rmsnorm_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x,
                                    const floatX *weight, const real *rstd, int N, int C) {
    enum { COLUMNS = 64 };
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int n = 0; n < N; n++) {
            size_t row = (size_t)n * (size_t)C;
            const floatX *xn = x + row, *dyn = dy + row;
            floatX *dxn = dx + row;
            real r = rstd[n], dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int c = 0; c < C; c++) dot += dyn[c] * weight[c] * xn[c];
            real mean = dot * r / (real)C; // mean_j(g[j] z[j])
            for (int c = 0; c < C; c++) dxn[c] += r * (dyn[c] * weight[c] - xn[c] * r * mean); // r in y = x r weight
        }
#pragma omp for schedule(static)
        for (int c0 = 0; c0 < C; c0 += COLUMNS) {
            int columns = min_int(COLUMNS, C - c0);
            real sum[COLUMNS] = {0};
            for (int n = 0; n < N; n++) {
                size_t at = (size_t)n * (size_t)C + (size_t)c0;
                for (int c = 0; c < columns; c++) sum[c] += dy[at + (size_t)c] * x[at + (size_t)c] * rstd[n]; // y = z weight
            }
            for (int c = 0; c < columns; c++) dweight[c0 + c] += sum[c];
        }
    }
}
#endif
