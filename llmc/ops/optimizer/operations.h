/*
operations.h: updates of parameters.
*/
#ifndef LLMC_OPTIMIZER_OPERATIONS_H
#define LLMC_OPTIMIZER_OPERATIONS_H
#include "../ops.h"

// One AdamW step (decoupled decay) over `count` elements, g = grad_scale * grads:
//   m = beta1 m + (1-beta1) g,  v = beta2 v + (1-beta2) g^2,  w -= lr (m^ / (sqrt(v^) + eps) + weight_decay w)
// master: fp32 weights when params are narrower, else NULL
static inline void adamw_update(floatX *params, real *master, const grad_t *grads, real *m, real *v, size_t count,
                                double grad_scale, double lr, double beta1, double beta2, double eps,
                                double weight_decay, int64_t step);
// Weights (fp32), two moments and the gradient; if the weights are master weights, the parameters are written, too.
static inline size_t adamw_bytes(size_t count, bool master) {
    return count * (7 * FP32_BYTES + (master ? FLOATX_BYTES : 0));
}

// The constants of an update, which the host combines in double.
typedef struct {
    real scale, b1, b2, rest1, rest2, rsqrt_correction2, rate, keep, epsilon;
} AdamwScalars;
static inline AdamwScalars adamw_scalars(double grad_scale, double lr, double beta1, double beta2, double eps,
                                         double weight_decay, int64_t step) {
    AdamwScalars s;
    s.scale = (real)grad_scale;
    s.b1 = (real)beta1;
    s.b2 = (real)beta2;
    s.rest1 = (real)(1 - beta1);
    s.rest2 = (real)(1 - beta2);
    s.rsqrt_correction2 = (real)(1 / sqrt(1 - pow(beta2, (double)step)));
    s.rate = (real)lr / (real)(1 - pow(beta1, (double)step));
    s.keep = (real)(1 - lr * weight_decay);
    s.epsilon = (real)eps;
    return s;
}

// The sum of squares of the change of w in adamw_update with the same arguments, without weight decay.
static inline double update_squares(const grad_t *grads, const real *m, const real *v, size_t count, double grad_scale,
                                    double lr, double beta1, double beta2, double eps, int64_t step);

// Muon, an optimizer of matrices: a step along the orthogonalized momentum (muon.h). g = grad_scale * grads:
//   m = momentum m + (1-momentum) g,  direction = momentum m + (1-momentum) g                     all (count)
static inline void muon_direction(floatX *direction, real *m, const grad_t *grads, size_t count, double grad_scale,
                                  double momentum);
// out = 0.2 sqrt(max(rows,columns)) O with O = orthogonal(x). NorMuon (row_v != NULL) updates one number per row,
// row_v = beta2 row_v + (1-beta2) (mean square of the row of O), divides each row of O by sqrt(row_v), and scales O
// back to its previous norm. x, out (rows,columns), `count` times; row_v (count,rows); NULL: Muon
typedef struct {
    int rows, columns, count;
    size_t apart; // elements from one matrix to the next of x and out
} MuonMatrices;
static inline void muon_orthogonalize(grad_t *out, real *row_v, const floatX *x, MuonMatrices m, double beta2);
static inline size_t muon_workspace_bytes(MuonMatrices m);
// w = (1 - lr weight_decay) w - lr step                                                            all (count)
static inline void muon_update(floatX *params, real *master, const grad_t *step, size_t count, double lr,
                               double weight_decay);
// Per element the moment is read and written, the gradient is read, and the direction is written.
static inline size_t muon_direction_bytes(size_t count) { return count * (3 * FP32_BYTES + FLOATX_BYTES); }
static inline size_t muon_update_bytes(size_t count, bool master) {
    return count * (FP32_BYTES + (master ? 2 * FP32_BYTES + FLOATX_BYTES : 2 * FLOATX_BYTES));
}
// Newton-Schulz of a matrix (k,n), k <= n: MUON_STEPS times X = P X with P = a I + b A + c A A, A = X X^T. The bytes
// count X and A in each operation.
enum { MUON_STEPS = 5 };
static const double muon_momentum = 0.95, muon_coefficients[3] = {3.4445, -4.7750, 2.0315};
static inline double muon_flops(int rows, int columns) {
    double k = min_int(rows, columns), n = max_int(rows, columns);
    return MUON_STEPS * (4 * k * k * n + 2 * k * k * k);
}
static inline size_t muon_orthogonalize_bytes(int rows, int columns) {
    size_t k = (size_t)min_int(rows, columns), n = (size_t)max_int(rows, columns);
    size_t x = k * n, a = k * k, steps = MUON_STEPS * (3 * x + 6 * a), ends = 4 * x;
    return (steps + ends) * FLOATX_BYTES + x * FP32_BYTES;
}
// Row strides of X and of A in the workspace: packs of 16 bytes, whatever the shape.
static inline int muon_ld(int columns) { return (int)round_up((size_t)columns, 8); }
// Per matrix X twice, A twice, then per row its sum of squares, and a factor.
enum { MUON_ALIGN = 128 }; // elements
static inline size_t muon_gpu_workspace_bytes(MuonMatrices m) {
    size_t k = (size_t)min_int(m.rows, m.columns);
    size_t x = (size_t)m.rows * (size_t)muon_ld(m.columns), a = k * (size_t)muon_ld((int)k);
    size_t elements = 2 * (round_up(x, MUON_ALIGN) + round_up(a, MUON_ALIGN));
    return (size_t)m.count * (elements * FLOATX_BYTES + ((size_t)m.rows + 1) * FP32_BYTES);
}
#endif
