/*
adamw.h: one step of Adam with decoupled weight decay.

  g = grad_scale * grad                                   grad_scale includes the clipping factor
  m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
  w -= lr (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay w)
  shapes    all (count); step counts from 1
            master: the weights in `real` if params are narrower; then w is master, and params are w rounded
  numerics  the scalars are combined in double, the elements computed in `real`
  update    update_squares: the sum of u^2, u = lr m^ / (sqrt(v^) + eps): the change of w without the weight decay.
            Elements are in `real`, the sum is as in parts.h
  traffic   4 in, 3 out per element; update_squares 3 in
  source    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"
*/
#pragma once
#include "../measure/parts.h"
#include "operations.h"

static inline void adamw_update(floatX *params, real *master, const grad_t *grads, real *m, real *v, size_t count,
                                double grad_scale, double lr, double beta1, double beta2, double eps,
                                double weight_decay, int64_t step) {
    const AdamwScalars s = adamw_scalars(grad_scale, lr, beta1, beta2, eps, weight_decay, step);
#pragma omp parallel for simd schedule(static) firstprivate(s)
    for (size_t i = 0; i < count; i++) {
        real g = s.scale * grads[i];
        real mi = s.b1 * m[i] + s.rest1 * g;
        real vi = s.b2 * v[i] + s.rest2 * g * g;
        m[i] = mi;
        v[i] = vi;
        real root = sizeof(real) == 4 ? (real)sqrtf((float)vi) : (real)sqrt((double)vi);
        real w = (master ? master[i] : params[i]) * s.keep - s.rate * mi / (root * s.rsqrt_correction2 + s.epsilon);
        if (master) master[i] = w;
        params[i] = w;
    }
    fault_point(FAULT_UPDATE, params, count);
    fault_point(FAULT_MOMENT, m, count);
}

static inline double update_squares(const grad_t *grads, const real *m, const real *v, size_t count, double grad_scale,
                                    double lr, double beta1, double beta2, double eps, int64_t step) {
    double parts[STATS_PARTS];
    const AdamwScalars s = adamw_scalars(grad_scale, lr, beta1, beta2, eps, 0, step);
#pragma omp parallel for schedule(static) firstprivate(s)
    for (int p = 0; p < STATS_PARTS; p++) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = part_begin(count, p); i < part_begin(count, p + 1); i++) {
            real g = s.scale * grads[i], mi = s.b1 * m[i] + s.rest1 * g, vi = s.b2 * v[i] + s.rest2 * g * g;
            real root = sizeof(real) == 4 ? (real)sqrtf((float)vi) : (real)sqrt((double)vi);
            double u = (double)(s.rate * mi / (root * s.rsqrt_correction2 + s.epsilon));
            sum += u * u;
        }
        parts[p] = sum;
    }
    return parts_sum(parts);
}
