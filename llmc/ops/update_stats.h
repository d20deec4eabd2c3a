/*
update_stats.h: statistics of an update before it is made, for the log and --change. Equations of AdamW in
adamw.h.

  weights    sum of w^2, of the master weights where there are some
  update     sum of u^2, u = lr m^ / (sqrt(v^) + eps): the change of w without the weight decay
  extremes   of |m| and v after the update
  numerics   elements as in adamw_update, sums in double over a fixed number of parts. A NaN among m or v makes the sum
             NaN
  traffic    4 in per element
*/
#pragma once
#include "stats.h"

static inline UpdateStats update_stats(const floatX *params, const real *master, const grad_t *grads, const real *m,
                                       const real *v, size_t count, double grad_scale, double lr, double beta1,
                                       double beta2, double eps, int64_t step) {
    UpdateStats parts[STATS_PARTS], s = no_update_stats;
    real rate = (real)lr / (real)(1 - pow(beta1, (double)step)), scale = (real)grad_scale;
    real rsqrt_correction2 = (real)(1 / sqrt(1 - pow(beta2, (double)step)));
    real b1 = (real)beta1, b2 = (real)beta2, rest1 = (real)(1 - beta1), rest2 = (real)(1 - beta2);
#pragma omp parallel for schedule(static)
    for (int p = 0; p < STATS_PARTS; p++) {
        double weights = 0, update = 0;
        real largest_m = 0, least_v = (real)INFINITY, largest_v = 0;
        size_t begin = count / STATS_PARTS * p + min_size(count % STATS_PARTS, p),
               end = begin + count / STATS_PARTS + ((size_t)p < count % STATS_PARTS);
#pragma omp simd reduction(+ : weights, update) reduction(max : largest_m, largest_v) reduction(min : least_v)
        for (size_t i = begin; i < end; i++) {
            real g = scale * grads[i], mi = b1 * m[i] + rest1 * g, vi = b2 * v[i] + rest2 * g * g;
            real root = sizeof(real) == 4 ? (real)sqrtf((float)vi) : (real)sqrt((double)vi);
            double w = (double)(master ? master[i] : params[i]);
            double u = (double)(rate * mi / (root * rsqrt_correction2 + (real)eps));
            real size = mi < 0 ? -mi : mi;
            weights += w * w;
            update += u * u;
            largest_m = size > largest_m ? size : largest_m;
            largest_v = vi > largest_v ? vi : largest_v;
            least_v = vi < least_v ? vi : least_v;
        }
        parts[p] = (UpdateStats){weights, update, (double)largest_m, (double)least_v, (double)largest_v};
    }
    for (int p = 0; p < STATS_PARTS; p++) update_stats_add(&s, &parts[p]);
    return s;
}
