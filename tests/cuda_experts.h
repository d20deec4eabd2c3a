/*
cuda_experts.h: the operations of a mixture of experts on the device against their C twins.
*/
#ifndef TESTS_CUDA_EXPERTS_H
#define TESTS_CUDA_EXPERTS_H
#include "cuda_engine.h"

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
#endif
