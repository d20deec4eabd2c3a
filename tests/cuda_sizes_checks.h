/*
cuda_sizes_checks.h: the checks of cuda_sizes.h at the shapes of a model (struct SizesShape): N rows of B sequences, as
in a step of the trainer.
*/
#ifndef TESTS_CUDA_SIZES_CHECKS_H
#define TESTS_CUDA_SIZES_CHECKS_H
#include "cuda_sizes.h"

static void sizes_embedding(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    Big &x = s.poisoned((size_t)m.N, (size_t)m.C), &tokens = s.random((size_t)m.N, 1, m.V, INT32),
        &weight = s.random((size_t)m.V, (size_t)m.C), &dx = s.sparse((size_t)m.N, (size_t)m.C),
        &dweight = s.zero((size_t)m.V, (size_t)m.C, FP32);
    with_workspace(embedding_workspace_bytes(m.N), [&] {
        embedding_forward(x.x(), tokens.i(), weight.x(), m.N, m.C);
        embedding_backward(dweight.f(), dx.x(), tokens.i(), m.N, m.C);
    });
    Rows of;
    for (double token : s.sample(tokens)) of.push_back((size_t)token);
    s.expect("x", x, s.sample(weight, of), {0, 0});
    Rows distinct = of;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    std::vector<int> local;
    for (size_t token : of)
        local.push_back((int)(std::lower_bound(distinct.begin(), distinct.end(), token) - distinct.begin()));
    Values want(distinct.size() * (size_t)m.C, 0);
    twin::embedding_backward(want.data(), s.sample(dx).data(), local.data(), (int)of.size(), m.C);
    expect_values("dweight", FP32, s.sample(dweight, distinct), want, {4, error_of_sum(m.S)});
}

static void sizes_rmsnorm(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    size_t N = (size_t)m.N, C = (size_t)m.C;
    int rows = (int)s.rows.size();
    Big &sum = s.poisoned(N, C), &y = s.poisoned(N, C), &rstd = s.poisoned(N, 1, FP32), &a = s.random(N, C, 3),
        &b = s.random(N, C), &weight = s.random(1, C, 2), &dx = s.zero(N, C), &dy = s.sparse(N, C),
        &dweight = s.zero(1, C, FP32);
    with_workspace(rmsnorm_workspace_bytes(m.C), [&] {
        residual_rmsnorm_forward(sum.x(), y.x(), rstd.f(), a.x(), b.x(), weight.x(), m.N, m.C, 1e-5f, NULL);
        rmsnorm_backward(dx.x(), dweight.f(), dy.x(), sum.x(), weight.x(), rstd.f(), m.N, m.C, true, NULL);
    });
    twin_workspace(twin::rmsnorm_workspace_bytes(m.C));
    Values xs = s.sample(sum), ws = s.sample(weight, {0}), dys = s.sample(dy), want_y(xs.size()), want_r(s.rows.size()),
           want_sum(xs.size()), want_dx(xs.size(), 0), want_dw(C, 0);
    Values as = s.sample(a), bs = s.sample(b);
    for (size_t i = 0; i < xs.size(); i++) want_sum[i] = as[i] + bs[i];
    twin::rmsnorm_forward(want_y.data(), want_r.data(), xs.data(), ws.data(), rows, m.C, 1e-5, NULL);
    twin::rmsnorm_backward(want_dx.data(), want_dw.data(), dys.data(), xs.data(), ws.data(), want_r.data(), rows, m.C,
                           true, NULL);
    const double z = 3 * 4 / 1.7, g = 2; // largest |x r| and |dy weight|
    s.expect("sum", sum, want_sum, {1, 0});
    s.expect("rstd", rstd, want_r, {error_of_sum(m.C), 0});
    s.expect("y", y, want_y, {error_of_sum(m.C) + 4, 0});
    s.expect("dx", dx, want_dx, {4, 4 * g + z * z * g * error_of_sum(m.C) / sqrt((double)m.C)});
    expect_values("dweight", FP32, s.sample(dweight, {0}), want_dw, {4, z * (error_of_sum(m.S) + error_of_sum(m.C))});
}

static void sizes_rope(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    int heads = 2 * m.NH + m.NKV;
    Big &x = s.random((size_t)m.N, (size_t)m.ld), &table = s.poisoned((size_t)m.T, (size_t)m.D, FP32);
    std::vector<float> angles(product(m.T, m.D));
    rope_table(angles.data(), m.T, m.D, 10000);
    buffer_upload(table.at, angles.data(), angles.size() * sizeof(float));
    Values exact(angles.begin(), angles.end()), want = s.sample(x);
    for (size_t r = 0; r < s.rows.size(); r++) {
        const int position = (int)(s.rows[r] % (size_t)m.T);
        twin::rope_forward(&want[r * (size_t)m.ld], exact.data(), 1, 1, heads, m.D, m.ld, &position);
    }
    with_workspace(0, [&] { rope_forward(x.x(), table.f(), m.B, m.T, heads, m.D, m.ld, nullptr); });
    s.expect("x", x, want, {0, 4});
    want = s.sample(x);
    for (size_t r = 0; r < s.rows.size(); r++) {
        const int position = (int)(s.rows[r] % (size_t)m.T);
        twin::rope_backward(&want[r * (size_t)m.ld], exact.data(), 1, 1, heads, m.D, m.ld, &position);
    }
    with_workspace(0, [&] { rope_backward(x.x(), table.f(), m.B, m.T, heads, m.D, m.ld, nullptr); });
    s.expect("dx", x, want, {0, 4});
}

static void sizes_diff_combine(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    size_t N = (size_t)m.N, narrow = product(m.NH, m.D), wide = 2 * narrow, ld = (size_t)m.ld;
    int rows = (int)s.rows.size();
    Big &o = s.poisoned(N, narrow), &a = s.random(N, wide), &l = s.random(N, ld, 6), &da = s.poisoned(N, wide),
        &dl = s.poisoned(N, ld), &dout = s.random(N, narrow);
    const HeadGroups pairs = {1, 1};
    with_workspace(0, [&] {
        diff_combine_forward(o.x(), a.x(), l.x(), m.N, m.NH, m.D, m.ld, pairs, S_SIGMOID, NULL);
        diff_combine_backward(da.x(), dl.x(), dout.x(), a.x(), l.x(), m.N, m.NH, m.D, m.ld, pairs, S_SIGMOID);
    });
    Values as = s.sample(a), ls = s.sample(l), douts = s.sample(dout), want_o(douts.size()), want_da(as.size()),
           want_dl(ls.size(), NAN);
    twin::diff_combine_forward(want_o.data(), as.data(), ls.data(), rows, m.NH, m.D, m.ld, pairs, S_SIGMOID, NULL);
    twin::diff_combine_backward(want_da.data(), want_dl.data(), douts.data(), as.data(), ls.data(), rows, m.NH, m.D,
                                m.ld, pairs, S_SIGMOID);
    s.expect("o", o, want_o, {0, 16});
    s.expect("da", da, want_da, {16, 0});
    s.expect("dl", dl, want_dl, {16, error_of_sum(m.D)});
}

static void sizes_exclusive(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    size_t N = (size_t)m.N, width = product(m.NH, m.D), ld = (size_t)m.ld;
    int rows = (int)s.rows.size(), D = m.D, shared = m.NH / m.NKV;
    Big &y = s.poisoned(N, width), &x = s.random(N, width), &v = s.random(N, ld), &dx = s.poisoned(N, width),
        &dv = s.poisoned(N, ld), &dy = s.random(N, width);
    with_workspace(0, [&] {
        exclusive_forward(y.x(), x.x(), v.x(), m.N, m.NH, m.NKV, D, m.ld, NULL);
        exclusive_backward(dx.x(), dv.x(), dy.x(), x.x(), v.x(), m.N, m.NH, m.NKV, D, m.ld, m.ld);
    });
    Values xs = s.sample(x), vs = s.sample(v), dys = s.sample(dy), want_y(xs.size()), want_dx(xs.size()),
           want_dv(vs.size(), NAN);
    twin::exclusive_forward(want_y.data(), xs.data(), vs.data(), rows, m.NH, m.NKV, D, m.ld, NULL);
    twin::exclusive_backward(want_dx.data(), want_dv.data(), dys.data(), xs.data(), vs.data(), rows, m.NH, m.NKV, D,
                             m.ld, m.ld);
    const double error = 4 * error_of_sum(D) * 12 / D; // as in the catalogue
    s.expect("y", y, want_y, {4, 4 + error});
    s.expect("dx", dx, want_dx, {4, 4 + error});
    s.expect("dv", dv, want_dv, {4, shared * (8 + 8 * error)});
}

static void sizes_head_norm(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    size_t N = (size_t)m.N, ld = (size_t)m.ld, D = (size_t)m.D;
    int rows = (int)s.rows.size(), heads = 2 * m.NH, ldk = heads * m.D;
    Big &x = s.random(N, ld), &kept = s.poisoned(N, (size_t)ldk), &weight = s.random(1, D, 2), &dx = s.sparse(N, ld),
        &dweight = s.zero(1, D, FP32);
    Values want_y = s.sample(x), want_kept(s.rows.size() * (size_t)ldk), want_dx = s.sample(dx), want_dw(D, 0),
           ws = s.sample(weight, {0});
    with_workspace(head_norm_workspace_bytes(m.D), [&] {
        head_norm_forward(x.x(), kept.x(), weight.x(), m.N, heads, m.D, m.ld, ldk, 1e-5f);
        head_norm_backward(dx.x(), dweight.f(), kept.x(), weight.x(), m.N, heads, m.D, m.ld, ldk, 1e-5f);
    });
    twin_workspace(twin::head_norm_workspace_bytes(m.D));
    twin::head_norm_forward(want_y.data(), want_kept.data(), ws.data(), rows, heads, m.D, m.ld, ldk, 1e-5);
    twin::head_norm_backward(want_dx.data(), want_dw.data(), want_kept.data(), ws.data(), rows, heads, m.D, m.ld, ldk,
                             1e-5);
    const double z = 4, r = 4, g = 2; // as in the catalogue
    s.expect("kept", kept, want_kept, {0, 0});
    s.expect("y", x, want_y, {error_of_sum(m.D) + 4, 0});
    s.expect("dx", dx, want_dx,
             {4 + error_of_sum(m.D), r * (4 * g + z * z * g * error_of_sum(m.D) / sqrt((double)m.D))});
    expect_values("dweight", FP32, s.sample(dweight, {0}), want_dw,
                  {4, z * (error_of_sum(m.S * heads) + error_of_sum(m.D))});
}

static void sizes_gate(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    size_t N = (size_t)m.N, ld = product(m.NH, m.D);
    int rows = (int)s.rows.size(), ldg = (int)ld;
    Big &y = s.poisoned(N, ld), &x = s.random(N, ld), &g = s.random(N, ld, 6), &dx = s.poisoned(N, ld),
        &dg = s.poisoned(N, ld), &dy = s.random(N, ld);
    with_workspace(0, [&] {
        gate_forward(y.x(), x.x(), g.x(), m.N, m.NH, m.D, ldg, m.D, NULL);
        gate_backward(dx.x(), dg.x(), dy.x(), x.x(), g.x(), m.N, m.NH, m.D, ldg, m.D);
    });
    Values xs = s.sample(x), gs = s.sample(g), dys = s.sample(dy), want_y(xs.size()), want_dx(xs.size()),
           want_dg(xs.size());
    twin::gate_forward(want_y.data(), xs.data(), gs.data(), rows, m.NH, m.D, ldg, m.D, NULL);
    twin::gate_backward(want_dx.data(), want_dg.data(), dys.data(), xs.data(), gs.data(), rows, m.NH, m.D, ldg, m.D);
    s.expect("y", y, want_y, {16, 0});
    s.expect("dx", dx, want_dx, {16, 0});
    s.expect("dg", dg, want_dg, {16, 8});
}

static void sizes_swiglu(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    size_t N = (size_t)m.N, F = (size_t)m.F;
    int rows = (int)s.rows.size();
    Big &y = s.poisoned(N, F), &gate_up = s.random(N, 2 * F, 6), &dgate_up = s.poisoned(N, 2 * F), &dy = s.random(N, F);
    with_workspace(0, [&] {
        swiglu_forward(y.x(), gate_up.x(), m.N, m.F, NULL);
        swiglu_backward(dgate_up.x(), dy.x(), gate_up.x(), m.N, m.F, NULL);
    });
    Values gs = s.sample(gate_up), dys = s.sample(dy), want_y(dys.size()), want_dg(gs.size());
    twin::swiglu_forward(want_y.data(), gs.data(), rows, m.F, NULL);
    twin::swiglu_backward(want_dg.data(), dys.data(), gs.data(), rows, m.F, NULL);
    s.expect("y", y, want_y, {16, 0});
    s.expect("dgate_up", dgate_up, want_dg, {16, 6 * 8});
}

static void sizes_cross_entropy(const Case *c) {
    SizesShape m(c);
    int N = min_int(m.N, 8192); // the logits of a chunk
    Sizes s((size_t)N);
    size_t Vp = (size_t)m.Vp;
    Big &losses = s.zero((size_t)N, 1, FP32), &logits = s.random((size_t)N, Vp, 8),
        &targets = s.random((size_t)N, 1, m.V, INT32);
    Values want = s.sample(logits), want_losses(s.rows.size(), 0);
    std::vector<int> ids;
    for (double target : s.sample(targets)) ids.push_back((int)target);
    double dloss = 1.0 / 64;
    with_workspace(0, [&] { cross_entropy(losses.f(), logits.x(), targets.i(), N, m.V, m.Vp, (float)dloss); });
    twin::cross_entropy(want_losses.data(), want.data(), ids.data(), (int)s.rows.size(), m.V, m.Vp, dloss);
    s.expect("losses", losses, want_losses, {4, 4 + error_of_sum(m.V)});
    s.expect("dlogits", logits, want, {16 + 16 + error_of_sum(m.V), 2 * dloss * error_of_sum(m.V) / 4});
}

static void sizes_update(const Case *c) {
    SizesShape m(c);
    size_t rows = (size_t)m.V, C = (size_t)m.C, count = rows * C; // the embedding
    Sizes s(rows);
    Big &params = s.random(rows, C), &master = s.random(rows, C, 1, FP32), &grads = s.random(rows, C, 1, FP32),
        &mean = s.random(rows, C, 1, FP32), &square = s.zero(rows, C, FP32), &sum = s.poisoned(1, 2, FP32);
    Values p = s.sample(params), w = s.sample(master), g = s.sample(grads), m1 = s.sample(mean), v1(p.size(), 0);
    double squares = 0;
    std::vector<float> all(count);
    with_workspace(0, [&] {
        sum_of_squares((double *)(void *)sum.at, grads.f(), count);
        adamw_update(params.x(), master.f(), grads.f(), mean.f(), square.f(), count, 0.5, 1e-2, 0.9, 0.95, 1e-8, 0.1,
                     7);
    });
    twin::adamw_update(p.data(), w.data(), g.data(), m1.data(), v1.data(), p.size(), 0.5, 1e-2, 0.9, 0.95, 1e-8, 0.1,
                       7);
    s.expect("m", mean, m1, {2, 4});
    s.expect("v", square, v1, {2, 4});
    double ratio = 1e-2 / (1 - pow(0.9, 7)) * sqrt(1 - pow(0.95, 7)), largest = 0;
    for (size_t k = 0; k < m1.size(); k++) largest = fmax(largest, fabs(m1[k]) / (sqrt(v1[k]) + 1e-8));
    s.expect("master", master, w, {4, 16 * ratio * largest});
    s.expect("params", params, p, {4, 16 * ratio * largest});
    double got;
    buffer_download(&got, sum.at, sizeof(got));
    buffer_download(all.data(), grads.at, count * sizeof(float));
#pragma omp parallel for reduction(+ : squares)
    for (size_t k = 0; k < count; k++) squares += (double)all[k] * (double)all[k];
    EXPECT(fabs(got - squares) <= 1e-9 * squares, "the sum of squares is %.12g and should be %.12g", got, squares);
}

// One layer's products: N rows, IC inputs, OC outputs in rows of ldy. Both round an output once.
static void sizes_product(const char *name, int N, int IC, int OC, int ldy) {
    Sizes s((size_t)N);
    int some = min_int(64, N), few = min_int(64, OC); // rows that gemm_plain computes, at the end
    size_t row = (size_t)(N - some), column = (size_t)(OC - few);
    Big &y = s.poisoned((size_t)N, (size_t)ldy), &x = s.random((size_t)N, (size_t)IC),
        &weight = s.random((size_t)OC, (size_t)IC), &dx = s.poisoned((size_t)N, (size_t)IC),
        &dweight = s.zero((size_t)OC, (size_t)IC, FP32), &dy = s.random((size_t)N, (size_t)ldy);
    Big &y2 = s.poisoned((size_t)some, (size_t)ldy), &dx2 = s.poisoned((size_t)some, (size_t)IC),
        &dweight2 = s.zero((size_t)few, (size_t)IC, FP32);
    GemmShape forward = {false, true, false, false, some, OC, IC, IC, IC, ldy},
              inputs = {false, false, false, false, some, IC, OC, ldy, IC, IC},
              weights = {true, false, true, true, few, IC, N, ldy, IC, IC};
    with_workspace(0, [&] {
        matmul_forward(y.x(), x.x(), weight.x(), N, IC, OC, ldy);
        matmul_backward(dx.x(), dweight.f(), dy.x(), x.x(), weight.x(), N, IC, OC, ldy, true);
        gemm_plain(forward, y2.at, x.x(row), weight.x());
        gemm_plain(inputs, dx2.at, dy.x(row), weight.x());
        gemm_plain(weights, dweight2.at, dy.x() + column, x.x());
    });
    Rows rows, columns, own, own_columns;
    for (int r = 0; r < some; r++) rows.push_back(row + (size_t)r), own.push_back((size_t)r);
    for (int r = 0; r < few; r++) columns.push_back(column + (size_t)r), own_columns.push_back((size_t)r);
    const double twice = 1.01 * ROUND_STORE / ROUND_FP32; // the rounding of both outputs
    char what[64];
    FORMAT(what, "%s: y", name);
    expect_values(what, STORED, s.sample(y, rows), s.sample(y2, own), {twice, 2 * error_of_product(IC)});
    FORMAT(what, "%s: dx", name);
    expect_values(what, STORED, s.sample(dx, rows), s.sample(dx2, own), {twice, 2 * error_of_product(OC)});
    FORMAT(what, "%s: dweight", name);
    expect_values(what, FP32, s.sample(dweight, columns), s.sample(dweight2, own_columns),
                  {2, 2 * error_of_product(N)});
}
static void sizes_products(const Case *c) {
    SizesShape m(c);
    sizes_product("q, k, v, lambda", m.N, m.C, (2 * m.NH + 2 * m.NKV) * m.D + m.NH, m.ld);
    sizes_product("o_proj", m.N, m.NH * m.D, m.C, m.C);
    sizes_product("gate, up", m.N, m.C, 2 * m.F, 2 * m.F);
    sizes_product("down", m.N, m.F, m.C, m.C);
    sizes_product("head", min_int(m.N, 8192), m.C, m.V, m.Vp);
}

static void sizes_sink(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    size_t N = (size_t)m.N, T = (size_t)m.T, NH = (size_t)m.NH, ld = product(m.NH, m.D);
    Big &out = s.random(N, ld), &lse = s.random(product(m.B, m.NH), T, 20, FP32), &sinks = s.random(1, NH, 2),
        &dsinks = s.zero(1, NH, FP32), &dout = s.sparse(N, ld);
    Values want = s.sample(out), before = want, douts = s.sample(dout), sink = s.sample(sinks, {0}), want_d(NH, 0);
    Rows all;
    for (size_t r = 0; r < lse.rows; r++) all.push_back(r);
    Values lses = s.sample(lse, all);
    for (size_t r = 0; r < s.rows.size(); r++) { // one row at a time: lse is by heads, then positions
        Values of(NH);
        for (size_t h = 0; h < NH; h++) of[h] = lses[(s.rows[r] / T * NH + h) * T + s.rows[r] % T];
        twin::sink_backward(want_d.data(), &douts[r * ld], &before[r * ld], of.data(), sink.data(), 1, 1, m.NH, m.D);
        twin::sink_forward(&want[r * ld], of.data(), sink.data(), 1, 1, m.NH, m.D);
    }
    with_workspace(0, [&] {
        sink_backward(dsinks.f(), dout.x(), out.x(), lse.f(), sinks.x(), m.B, m.T, m.NH, m.D);
        sink_forward(out.x(), lse.f(), sinks.x(), m.B, m.T, m.NH, m.D);
    });
    s.expect("out", out, want, {8 + 128, 1e-20});
    double size = sqrt((double)m.D) * error_of_sum(m.D + m.S) * (8 + 128);
    expect_values("dsinks", FP32, s.sample(dsinks, {0}), want_d, {8 + 128, size});
}

// ---------------------------------------------------------------------------------------------------
// Attention

// Within `limit` of the norm: many gradients are far below the rounding error of the largest.
static void expect_near(const char *who, const char *name, const Values &got, const Values &want, double limit) {
    double norm = 0, error = 0;
    assert(got.size() == want.size());
    for (size_t k = 0; k < got.size(); k++) {
        norm += want[k] * want[k];
        error += (got[k] - want[k]) * (got[k] - want[k]);
    }
    EXPECT(norm > 0 && sqrt(error) <= limit * sqrt(norm), "%s, %s: off by %.3g of its norm, at most %.3g", who, name,
           sqrt(error / norm), limit);
}
static Values columns_of(const Values &x, size_t ld, size_t first, size_t count) {
    Values y;
    for (size_t row = 0; row < x.size() / ld; row++)
        y.insert(y.end(), &x[row * ld + first], &x[row * ld + first] + count);
    return y;
}

// Attention of diff_v2 by one of the two kernels: the last group of heads in the last sequence against the twin.
static void sizes_attention_by(const SizesShape &m, const char *who, bool own) {
    Sizes s((size_t)m.N);
    int width = (2 * m.NH + 2 * m.NKV) * m.D;
    const int d[OP_DIMS] = {m.B, m.T, 2 * m.NH, m.NKV, m.D, m.D, 1, (int)round_up((size_t)width + 3, 64) - width};
    OpCase c;
    op_describe(&c, OP_ATTENTION, d);
    AttentionShape shape = op_attention_shape(&c);
    OpKeySet a = op_key_set(&c.a, 0);
    size_t N = (size_t)m.N, T = (size_t)m.T, ld = (size_t)c.a.ld, ldo = (size_t)shape.ldo, D = (size_t)m.D;
    Big &fused = s.random(N, ld, 2), &out = s.poisoned(N, ldo), &dfused = s.poisoned(N, ld), &dout = s.random(N, ldo),
        &lse = s.poisoned(product(m.B, shape.NQ), T, FP32);
    AttentionOptions use = {own, !own, true, false, false};
    attention_stop();
    attention_configure(use);
    attention_prepare(shape, true, false);
    with_workspace(attention_workspace_bytes(shape, 1), [&] {
        floatX *q = fused.x() + a.q, *k = fused.x() + a.k, *v = fused.x() + a.v;
        attention_forward(out.x(), lse.f(), q, k, v, shape);
        attention_backward(dfused.x() + a.q, dfused.x() + a.k, dfused.x() + a.v, dout.x(), out.x(), lse.f(), q, k, v,
                           shape, false);
    });
    attention_stop();
    Rows last;
    for (size_t t = 0; t < T; t++) last.push_back(N - T + t);
    Values xs = s.sample(fused, last), douts = s.sample(dout, last), want_out(douts.size()), want_d(xs.size(), 0);
    twin::AttentionShape one = twin_shape(shape, nullptr);
    one.B = 1, one.NQ = shape.NQ / m.NKV, one.NKV = 1;
    size_t group = (size_t)one.NQ * D, first = (size_t)(shape.NQ - one.NQ) * D, q = a.q + first,
           k = a.k + (size_t)(m.NKV - 1) * D, v = a.v + (size_t)(m.NKV - 1) * D;
    Values want_lse((size_t)one.NQ * T);
    twin_workspace(twin::attention_workspace_bytes(one, omp_get_max_threads()));
    twin::attention_forward(&want_out[first], want_lse.data(), &xs[q], &xs[k], &xs[v], one);
    twin::attention_backward(&want_d[q], &want_d[k], &want_d[v], &douts[first], &want_out[first], want_lse.data(),
                             &xs[q], &xs[k], &xs[v], one, false);
    Values got_out = s.sample(out, last), got_d = s.sample(dfused, last);
    double limit = sizeof(floatX) == 2 ? 0.02 : 1e-4;
    expect_near(who, "out", columns_of(got_out, ldo, first, group), columns_of(want_out, ldo, first, group), limit);
    expect_near(who, "dq", columns_of(got_d, ld, q, group), columns_of(want_d, ld, q, group), limit);
    expect_near(who, "dk", columns_of(got_d, ld, k, D), columns_of(want_d, ld, k, D), limit);
    expect_near(who, "dv", columns_of(got_d, ld, v, D), columns_of(want_d, ld, v, D), limit);
}
static void sizes_attention(const Case *c) {
    SizesShape m(c);
    sizes_attention_by(m, "built-in attention", true);
    if (sizeof(floatX) == 2) sizes_attention_by(m, "cuDNN", false);
}

// attention_decode of diff_v2 after T positions: the last group of heads in the last sequence against the twin.
static void sizes_decode(const Case *c) {
    SizesShape m(c);
    Sizes s((size_t)m.N);
    int NQ = 2 * m.NH, group = NQ / m.NKV, width = 2 * m.NKV * m.D;
    AttentionShape shape;
    memset(&shape, 0, sizeof(shape));
    shape.B = m.B, shape.T = 1, shape.NQ = NQ, shape.NKV = m.NKV, shape.D = shape.DV = m.D;
    shape.ldq = shape.ldo = NQ * m.D, shape.ldkv = width;
    shape.q_head = shape.k_head = shape.v_head = shape.o_head = m.D;
    shape.scale = (real)(1 / sqrt((double)m.D));
    size_t B = (size_t)m.B, T = (size_t)m.T, ld = (size_t)shape.ldq, D = (size_t)m.D, v_at = product(m.NKV, m.D);
    Big &cache = s.random((size_t)m.N, (size_t)width, 2), &q = s.random(B, ld, 2), &out = s.poisoned(B, ld),
        &lse = s.poisoned(B, (size_t)NQ, FP32), &first = s.zero(B, 1, INT32);
    std::vector<int> positions(B, m.T - 1);
    buffer_upload(first.at, positions.data(), B * sizeof(int));
    with_workspace(attention_decode_workspace_bytes(shape, m.T, 1), [&] {
        attention_decode(out.x(), lse.f(), q.x(), cache.x(), cache.x() + v_at, first.i(), m.T, shape);
    });
    Rows last;
    for (size_t t = 0; t < T; t++) last.push_back((size_t)m.N - T + t);
    Values kv = s.sample(cache, last), qs = s.sample(q, {B - 1}), want(ld), want_lse((size_t)NQ);
    twin::AttentionShape one = twin_shape(shape, nullptr);
    one.B = 1, one.NQ = group, one.NKV = 1;
    size_t h = (size_t)(NQ - group), k = v_at - D;
    twin_workspace(twin::attention_decode_workspace_bytes(one, m.T, omp_get_max_threads()));
    twin::attention_decode(&want[h * D], &want_lse[h], &qs[h * D], &kv[k], &kv[v_at + k], positions.data(), m.T, one);
    Values got = s.sample(out, {B - 1}), got_lse = s.sample(lse, {B - 1});
    double limit = sizeof(floatX) == 2 ? 2 * ROUND_STORE : 1e-4;
    expect_near("decoding", "out", columns_of(got, ld, h * D, ld - h * D), columns_of(want, ld, h * D, ld - h * D),
                limit);
    expect_near("decoding", "lse", columns_of(got_lse, (size_t)NQ, h, (size_t)group),
                columns_of(want_lse, (size_t)NQ, h, (size_t)group), 1e-4);
}

// The cases at the shapes of a preset.
static std::vector<Case> sizes_cases(const char *preset, int NKV, int B, int T) {
    const Preset *p = NULL;
    for (const Preset &known : presets)
        if (strcmp(known.name, preset) == 0) p = &known;
    CHECK(p, "--sizes %s: no such preset", preset);
    CHECK(B > 0 && T > 0 && NKV > 0 && p->NH % NKV == 0,
          "--sizes %s %d %d %d: NH %d is not divisible by NKV, or B or T is 0", preset, NKV, B, T, p->NH);
    static const Check checks[] = {{"embedding", sizes_embedding, SIZES_DIMS},
                                   {"rmsnorm", sizes_rmsnorm, SIZES_DIMS},
                                   {"rope", sizes_rope, SIZES_DIMS},
                                   {"diff_combine", sizes_diff_combine, SIZES_DIMS},
                                   {"exclusive", sizes_exclusive, SIZES_DIMS},
                                   {"head_norm", sizes_head_norm, SIZES_DIMS},
                                   {"gate", sizes_gate, SIZES_DIMS},
                                   {"swiglu", sizes_swiglu, SIZES_DIMS},
                                   {"cross_entropy", sizes_cross_entropy, SIZES_DIMS},
                                   {"sink", sizes_sink, SIZES_DIMS},
                                   {"update", sizes_update, SIZES_DIMS},
                                   {"products", sizes_products, SIZES_DIMS},
                                   {"attention", sizes_attention, SIZES_DIMS},
                                   {"attention_decode", sizes_decode, SIZES_DIMS}};
    std::vector<Case> cases;
    for (const Check &check : checks) cases.push_back({&check, {B, T, p->C, p->F, p->NH, NKV, p->D, p->V}, 0, p->name});
    return cases;
}
#endif
