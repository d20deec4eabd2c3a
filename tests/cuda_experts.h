/*
cuda_experts.h: the operations of a mixture of experts on the device against their C twins.
*/
#ifndef TESTS_CUDA_EXPERTS_H
#define TESTS_CUDA_EXPERTS_H
#include "cuda_linear.h"

// Eighths of small whole numbers: every logit is exact, and many are equal, so that both choose the same experts.
static void fill_eighths(Tensor &t) {
    for (size_t k = 0; k < t.count; k++) t.set(k, (test_random_int(&test_random, 9) - 4) / 8.0);
}

// n: N C E K, whether the two losses of the router have weights (2: no, and the logits of two experts are NaN), whether
// there is a bias
static void check_router(const Case *c) {
    Routing r = {c->n[0], c->n[1], c->n[2], c->n[3]};
    twin::Routing t = {r.N, r.C, r.E, r.K};
    const double balance = c->n[4] == 1 ? 0.75 : 0, z = c->n[4] == 1 ? 0.0625 : 0;
    for (int add = 0; add < 2; add++) {
        Operands o(c->shift);
        size_t NE = product(r.N, r.E), NK = product(r.N, r.K), totals_count = 2 * (size_t)r.E + 1;
        Tensor &x = o.in("x", product(r.N, r.C)), &weight = o.in("weight", product(r.E, r.C)),
               &dweights = o.in_fp32("dweights", NK), &logits = o.out_fp32("logits", NE),
               &lse = o.out_fp32("lse", (size_t)r.N), &weights = o.out_fp32("weights", NK),
               &experts = o.out_ints("experts", NK), &totals = o.updated_fp32("totals", totals_count),
               &loads = o.in_fp32("loads", (size_t)r.E), &dx = o.updated("dx", product(r.N, r.C)),
               &dweight = o.updated_fp32("dweight", product(r.E, r.C)), &bias = o.updated("bias", (size_t)r.E),
               &master = o.updated_fp32("master", (size_t)r.E);
        int begin = r.E / 3, count = r.E - begin;
        fill_eighths(x);
        fill_eighths(weight);
        fill_eighths(bias);
        for (int i = 0; i < r.C && c->n[4] == 2; i++)
            for (int e = 1; e < r.E; e += r.E - 2) weight.set(product(e, r.C) + (size_t)i, NAN);
        for (size_t e = 0; e < (size_t)r.E; e++)
            loads.set(e, c->n[4] == 1 ? 1 + test_random_int(&test_random, 9) : NAN);
        if (!add) dweight.poison();
        o.run(router_workspace_bytes(r), [&] {
            router_forward(logits.f(), lse.f(), experts.i(), weights.f(), x.x(), weight.x(),
                           c->n[5] ? bias.x() : nullptr, r);
            router_totals(totals.f(), logits.f(), lse.f(), experts.i(), r);
            router_backward(dx.x(), dweight.f(), dweights.f(), x.x(), weight.x(), logits.f(), lse.f(), experts.i(),
                            weights.f(), loads.f(), (float)balance, (float)z, r, add);
            router_balance(bias.x() + begin, add ? master.f() + begin : nullptr, loads.f(), 0.125, r.E, begin, count);
        });
        twin_workspace(twin::router_workspace_bytes(t));
        twin::router_forward(logits.t(), lse.t(), experts.twin_ints.data(), weights.t(), x.t(), weight.t(),
                             c->n[5] ? bias.t() : nullptr, t);
        twin::router_totals(totals.t(), logits.t(), lse.t(), experts.twin_ints.data(), t);
        twin::router_backward(dx.t(), dweight.t(), dweights.t(), x.t(), weight.t(), logits.t(), lse.t(),
                              experts.twin_ints.data(), weights.t(), loads.t(), balance, z, t, add);
        twin::router_balance(bias.t() + begin, add ? master.t() + begin : nullptr, loads.t(), 0.125, r.E, begin, count);
        o.expect(bias, {1, 0});
        o.expect(master, {1, 0});
        o.expect_ints(experts);
        o.expect(logits, {0, 0});
        o.expect(lse, {4 + error_of_sum(r.E), 1});
        o.expect(weights, {8 + error_of_sum(r.K), 0});
        o.expect(totals, {24 + error_of_sum(r.N), 0}); // exp(x) for x from -16 has the error of x
        // the gradient of a logit is at most `most`, and is rounded to floatX before the products
        double most = 1 + 2 * balance + 2 * z * 8, step = ROUND_STORE / ROUND_FP32;
        o.expect(dx, {4, most / 2 * (error_of_product(r.E) + step * sqrt((double)r.E) * 3)});
        o.expect(dweight, {4, most / 2 * (error_of_product(r.N) + step * sqrt((double)r.N) * 3)});
    }
}
static const Check router_check = {"router", check_router, "N C E K losses bias"};

// K different experts for each token. skew 0: any; 1: the same for all tokens; 2: only those with even numbers, if
// there are enough; 3: the first K for a whole tile of tokens, then for each token the K that follow
static void fill_experts(Tensor &experts, Routing r, int skew) {
    std::vector<int> order((size_t)r.E);
    for (int n = 0; n < r.N; n++) {
        for (int e = 0; e < r.E; e++) order[(size_t)e] = skew == 2 && 2 * r.K <= r.E ? 2 * e % r.E : e;
        int choices = skew == 2 && 2 * r.K <= r.E ? (r.E + 1) / 2 : r.E;
        for (int k = 0; k < r.K; k++) {
            if (skew == 3) order[(size_t)k] = n < EXPERT_TILE ? k : (r.K * (n - EXPERT_TILE + 1) + k) % r.E;
            else if (skew != 1)
                std::swap(order[(size_t)k], order[(size_t)(k + test_random_int(&test_random, choices - k))]);
            experts.set(product(n, r.K) + (size_t)k, order[(size_t)k]);
        }
    }
}

// n: N C E K F skew
static void check_experts(const Case *c) {
    Routing r = {c->n[0], c->n[1], c->n[2], c->n[3]};
    twin::Routing t = {r.N, r.C, r.E, r.K};
    int F = c->n[4], R = r.N * r.K;
    for (int add = 0; add < 2; add++) {
        Operands o(c->shift);
        size_t RC = product(R, r.C), RF = product(R, F), stride = round_up(product(2 * F, r.C), 8);
        Tensor &experts = o.ints("experts", (size_t)R, r.E), &starts = o.out_ints("starts", (size_t)r.E + 1),
               &entries = o.out_ints("entries", (size_t)R), &places = o.out_ints("places", (size_t)R),
               &weights = o.in_fp32("weights", (size_t)R), &x = o.in("x", product(r.N, r.C)), &rows = o.out("rows", RC),
               &matrix = o.in("weight", (size_t)r.E * stride), &gate_up = o.out("gate_up", 2 * RF),
               &given = o.in("given gate_up", 2 * RF, 3), &hidden = o.out("hidden", RF), &ahidden = o.in("dhidden", RF),
               &dgate_up = o.out("dgate_up", 2 * RF), &dweights = o.out_fp32("dweights", (size_t)R),
               &dy = o.in("dy", 2 * RF), &drows = o.out("drows", RC),
               &dweight = o.updated_fp32("dweight", (size_t)r.E * stride), &sum = o.updated("sum", product(r.N, r.C)),
               &given_rows = o.in("given rows", RC), &max = o.max("max", 0), &dmax = o.max("dmax", 0);
        fill_experts(experts, r, c->n[5]);
        if (!add) sum.poison();
        for (size_t i = 0; i < dweight.count && !add; i++) // between the experts nothing is written
            if (i % stride < product(2 * F, r.C)) dweight.set(i, NAN);
        ExpertLinear w = {{matrix.x(), nullptr, r.C, 2 * F, 2 * F, nullptr, nullptr}, r.E, stride, 0};
        o.run(0, [&] {
            expert_group(starts.i(), entries.i(), places.i(), experts.i(), r);
            expert_gather(rows.x(), x.x(), entries.i(), r);
            expert_linear_forward(gate_up.x(), given_rows.x(), w, starts.i(), r.N, R);
            expert_swiglu_forward(hidden.x(), given.x(), weights.f(), entries.i(), R, F, (absmax_t *)max.at());
            expert_swiglu_backward(dgate_up.x(), dweights.f(), ahidden.x(), given.x(), weights.f(), entries.i(), R, F,
                                   (absmax_t *)dmax.at());
            expert_linear_backward(drows.x(), dweight.f(), dy.x(), given_rows.x(), w, starts.i(), r.N, R, add);
            expert_combine(sum.x(), given_rows.x(), places.i(), r, add);
        });
        twin::ExpertLinear v = {{matrix.t(), nullptr, r.C, 2 * F, 2 * F, nullptr, nullptr}, r.E, stride, 0};
        int *of = entries.twin_ints.data(), *at = starts.twin_ints.data(), *to = places.twin_ints.data();
        twin::expert_group(at, of, to, experts.twin_ints.data(), t);
        twin::expert_gather(rows.t(), x.t(), of, t);
        twin::expert_linear_forward(gate_up.t(), given_rows.t(), v, at, r.N, R);
        twin::expert_swiglu_forward(hidden.t(), given.t(), weights.t(), of, R, F, nullptr);
        twin::expert_swiglu_backward(dgate_up.t(), dweights.t(), ahidden.t(), given.t(), weights.t(), of, R, F,
                                     nullptr);
        twin::expert_linear_backward(drows.t(), dweight.t(), dy.t(), given_rows.t(), v, at, r.N, R, add);
        twin::expert_combine(sum.t(), given_rows.t(), to, t, add);
        o.expect_ints(starts);
        o.expect_ints(entries);
        o.expect_ints(places);
        o.expect(rows, {0, 0});
        o.expect(gate_up, {4, error_of_product(r.C)});
        o.expect(hidden, {16, 0});
        o.expect(dgate_up, {24, 24});
        o.expect(dweights, {8, 9 * error_of_sum(F)});
        o.expect(drows, {4, error_of_product(2 * F)});
        o.expect(dweight, {4, error_of_product(r.N)});
        o.expect(sum, {4 + (double)r.K, (double)r.K});
        double most = 0, dmost = 0; // of what is stored
        for (size_t k = 0; k < RF; k++) most = fmax(most, fabs(hidden.value(hidden.result, k)));
        for (size_t k = 0; k < 2 * RF; k++) dmost = fmax(dmost, fabs(dgate_up.value(dgate_up.result, k)));
        float got, dgot;
        memcpy(&got, &max.result[max.begin], sizeof(got));
        memcpy(&dgot, &dmax.result[dmax.begin], sizeof(dgot));
        EXPECT(fabs(got - most) <= ROUND_STORE * most, "max is %g, the largest %g", (double)got, most);
        EXPECT(fabs(dgot - dmost) <= ROUND_STORE * dmost, "dmax is %g, the largest %g", (double)dgot, dmost);
    }
}
static const Check experts_check = {"experts", check_experts, "N C E K F skew"};

// The products of experts are those of the rounded operands: x and dy by one scale, the weights of each expert by its
// own. n: N IC OC E K skew
static void check_experts_fp8(const Case *c) {
    const int N = c->n[0], IC = c->n[1], OC = c->n[2], E = c->n[3], K = c->n[4], R = N * K;
    Routing r = {N, IC, E, K};
    twin::Routing t = {N, IC, E, K};
    const char *refused = linear_configure(GEMM_FP8); // by a device without FP8
    if (refused) {
        test_skip("%s", refused);
        linear_configure(sizeof(floatX) == 2 ? GEMM_BF16 : GEMM_FP32);
        return;
    }
    for (int add = 0; add < 2; add++) {
        Operands o(c->shift);
        size_t size = product(OC, IC), stride = round_up(size, 8) + 8 * (size_t)c->shift,
               copy_stride = round_up(linear_copy_bytes(IC, OC, false), 256);
        Tensor &experts = o.ints("experts", (size_t)R, E), &starts = o.out_ints("starts", (size_t)E + 1),
               &entries = o.out_ints("entries", (size_t)R), &places = o.out_ints("places", (size_t)R),
               &x = o.in("x", product(R, IC)), &weight = o.in("weight", (size_t)E * stride),
               &dy = o.in("dy", product(R, OC)), &y = o.out("y", product(R, OC)), &dx = o.out("dx", product(R, IC)),
               &dweight = o.updated_fp32("dweight", (size_t)E * stride), &x_max = o.updated_fp32("x_max", 1),
               &dy_max = o.updated_fp32("dy_max", 1),
               &copy = o.out_fp32("copy", (size_t)E * copy_stride / sizeof(float));
        fill_experts(experts, r, c->n[5]);
        for (size_t i = 0; i < weight.count; i++) // magnitudes that differ by expert; NaN between them
            weight.set(i, i % stride < size ? ldexp(weight.twin[i], (int)(i / stride) % 5) : NAN);
        for (size_t i = 0; i < dweight.count && !add; i++)
            if (i % stride < size) dweight.set(i, NAN);
        x_max.set(0, 0), dy_max.set(0, 0);
        ExpertLinear w = {{weight.x(), copy.at(), IC, OC, OC, (absmax_t *)x_max.at(), (absmax_t *)dy_max.at()},
                          E,
                          stride,
                          copy_stride};
        o.run(expert_linear_workspace_bytes(N, R, E, IC, OC), [&] {
            expert_group(starts.i(), entries.i(), places.i(), experts.i(), r);
            absmax_update(w.first.x_max, x.x(), R, IC, IC);
            absmax_update(w.first.dy_max, dy.x(), R, OC, OC);
            expert_linear_copy_weights(w);
            expert_linear_forward(y.x(), x.x(), w, starts.i(), N, R);
            expert_linear_backward(dx.x(), dweight.f(), dy.x(), x.x(), w, starts.i(), N, R, add);
        });
        int *at = starts.twin_ints.data();
        twin::expert_group(at, entries.twin_ints.data(), places.twin_ints.data(), experts.twin_ints.data(), t);
        std::vector<double> xs = rounded_matrix(x, R, IC, IC, FP8_ACTIVATION),
                            dys = rounded_matrix(dy, R, OC, OC, FP8_GRADIENT), ws((size_t)E * stride);
        for (int e = 0; e < E; e++) {
            const double *from = weight.twin.data() + (size_t)e * stride;
            twin::absmax_t max = 0;
            twin::absmax_update(&max, from, OC, IC, IC);
            for (size_t i = 0; i < size; i++) ws[(size_t)e * stride + i] = twin_rounded(from[i], max, FP8_WEIGHT, true);
        }
        twin::ExpertLinear v = {{ws.data(), nullptr, IC, OC, OC, nullptr, nullptr}, E, stride, 0};
        twin::expert_linear_forward(y.t(), xs.data(), v, at, N, R);
        twin::expert_linear_backward(dx.t(), dweight.t(), dys.data(), xs.data(), v, at, N, R, add);
        const double largest = 16; // of the weights
        Error of_y = fp8_product_error(IC), of_dx = fp8_product_error(OC);
        o.expect(y, {of_y.relative, largest * of_y.absolute});
        o.expect(dx, {of_dx.relative, largest * of_dx.absolute});
        o.expect(dweight, fp8_product_error(N));
    }
    linear_configure(sizeof(floatX) == 2 ? GEMM_BF16 : GEMM_FP32);
}
static const Check experts_fp8_check = {"experts in FP8", check_experts_fp8, "N IC OC E K skew"};
#endif
