/*
cuda_sizes_checks.h: the checks of cuda_sizes.h at the shapes of a model (struct SizesShape): N rows of B sequences, as
in a step of the trainer.
*/
#pragma once
#include "cuda_sizes.h"

// An operation of all rows on the device, and the twin's of the sampled rows alone: its case and its passes.
class Sampled {
  public:
    Sampled(const OpSize &size)
        : two_dims(size.kind == OP_ROPE || size.kind == OP_SINK),
          N(two_dims ? product(size.d[0], size.d[1]) : (size_t)size.d[0]), s(N) {
        const size_t T = two_dims ? (size_t)size.d[1] : 1;
        op_describe(&all, size.kind, size.d);
        std::copy(std::begin(size.d), std::end(size.d), dims);
        dims[0] = (int)s.rows.size();
        if (two_dims) dims[1] = 1;
        if (size.kind == OP_ROPE) dims[5] += (int)T - 1; // every row has another position
        op_describe(&some, size.kind, dims);
        if (!all.index_count) return;
        host_index.resize((size_t)all.index_count);
        op_fill_index(&all, host_index.data(), &test_random);
        for (size_t r : s.rows) index.push_back(host_index[r / T] + (int)(r % T));
        big_index = &s.zero(host_index.size(), 1, INT32);
        buffer_upload(big_index->at, host_index.data(), host_index.size() * sizeof(int));
    }
    void check() {
        Pass forward(some, 0, 0, nullptr, ORDINARY);
        for (size_t n = 0; n < index.size(); n++) forward.index->set(n, index[n]);
        for (int i = 0; i < OP_TENSORS; i++) make(all.x[i], some.x[i], forward.x[i], x[i], true);
        for (int i = 0; i < OP_TENSORS; i++)
            if (forward.y[i] && i < all.in_place) y[i] = &s.copy(*x[i]);
            else make(all.y[i], some.y[i], forward.y[i], y[i], all.y[i].view->adds);
        forward.start_in_place();
        run(forward, false);
        for (int i = 0; i < OP_TENSORS; i++) expect(some.y[i], forward.y[i], y[i]);
        if (all.no_backward) return;
        Pass backward(some, 0, 0, &forward, ORDINARY);
        bool sums = false;
        Big *dy = nullptr;
        for (int i = 0; i < OP_TENSORS; i++) {
            sums = sums || (backward.dx[i] && backward.dx[i]->type == FP32);
            if (all.dloss != 0) make(all.y[i], some.y[i], backward.y[i], y[i], all.y[i].view->adds);
            else if (backward.y[i]) take(some.y[i], backward.y[i], *y[i]); // both read what the device has stored
        }
        make(all.y[0], some.y[0], backward.dy, dy, true, sums);
        all.dy = dy->at;
        for (int i = 0; i < OP_TENSORS; i++)
            if (backward.dx[i] && i == 0 && (all.in_place || all.dloss != 0)) {
                dx[i] = &s.copy(all.in_place ? *dy : *x[i]);
                take(some.dx[i], backward.dx[i], *dx[i]);
            } else make(all.dx[i], some.dx[i], backward.dx[i], dx[i], all.dx[i].views && all.dx[i].view->adds);
        run(backward, true);
        for (int i = 0; i < OP_TENSORS; i++) {
            expect(some.dx[i], backward.dx[i], dx[i]);
            if (all.dloss != 0) expect(some.y[i], backward.y[i], y[i]);
        }
    }

  private:
    bool two_dims; // N = B*T
    size_t N;
    Sizes s;
    OpCase all, some;
    int dims[OP_DIMS];
    std::vector<int> host_index, index; // of all rows, and of the sampled ones
    Big *big_index = nullptr, *x[OP_TENSORS] = {}, *dx[OP_TENSORS] = {}, *y[OP_TENSORS] = {};

    // The numbers of the sampled rows; of a tensor that does not depend on the rows all of them.
    Values values_of(const OpTensor &of, const Big &t) {
        if (t.rows == 1) return s.sample(t, {0});
        if (strcmp(of.view->name, "lse") != 0) return s.sample(t);
        Values values; // lse (B,NH,T)
        const size_t NH = (size_t)all.d[2], T = (size_t)all.d[1];
        Values whole = s.sample(t, every_row(t));
        for (size_t r : s.rows)
            for (size_t h = 0; h < NH; h++) values.push_back(whole[(r / T * NH + h) * T + r % T]);
        return values;
    }
    static Rows every_row(const Big &t) {
        Rows rows(t.rows);
        for (size_t r = 0; r < t.rows; r++) rows[r] = r;
        return rows;
    }
    void take(const OpTensor &of, Tensor *t, const Big &from) {
        Values values = values_of(of, from);
        assert(values.size() == t->count);
        for (size_t k = 0; k < values.size(); k++) t->set(k, values[k]);
    }
    // Random numbers where there are `values`, else poison. What does not depend on the rows is that of the case.
    void make(const OpTensor &of, const OpTensor &of_some, Tensor *t, Big *&to, bool values, bool sparse = false) {
        if (!t) return;
        size_t ld = of.count / N;
        if (of.count == of_some.count) to = &s.given(*t);
        else if (!values) to = &s.poisoned(N, ld, of.type);
        else {
            to = sparse ? &s.sparse(N, ld) : &s.random(N, ld, all, of);
            take(of_some, t, *to);
        }
    }
    void run(Pass &pass, bool backward) {
        for (int i = 0; i < OP_TENSORS; i++) {
            all.x[i].data = x[i] ? x[i]->at : nullptr;
            all.dx[i].data = dx[i] ? dx[i]->at : nullptr;
            all.y[i].data = y[i] ? y[i]->at : nullptr;
        }
        all.index = host_index.data();
        size_t workspace = op_cost_of(&all, backward).workspace;
        all.index = big_index ? big_index->i() : nullptr;
        with_workspace(workspace, [&] { op_call(&all, backward); });
        pass.run_twin();
    }
    void expect(const OpTensor &of, const Tensor *t, const Big *big) {
        if (t) expect_values(t->name.c_str(), t->type, values_of(of, *big), t->twin, of.error);
    }
};

static void sizes_squares(int rows, int width) {
    Sizes s((size_t)rows);
    const size_t count = product(rows, width);
    Big &x = s.random((size_t)rows, (size_t)width, 1, FP32), &sum = s.poisoned(1, 1, FP64);
    std::vector<float> all(count);
    double squares = 0, got;
    with_workspace(0, [&] { sum_of_squares((double *)(void *)sum.at, x.f(), count); });
    buffer_download(&got, sum.at, sizeof(got));
    buffer_download(all.data(), x.at, count * sizeof(float));
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
    expect_values(test_text("%s: y", name), STORED, s.sample(y, rows), s.sample(y2, own),
                  {twice, 2 * error_of_product(IC)});
    expect_values(test_text("%s: dx", name), STORED, s.sample(dx, rows), s.sample(dx2, own),
                  {twice, 2 * error_of_product(OC)});
    expect_values(test_text("%s: dweight", name), FP32, s.sample(dweight, columns), s.sample(dweight2, own_columns),
                  {2, 2 * error_of_product(N)});
}
// All rows of operation_sizes.h of one operation.
static void sizes_of_kind(const Case *c) {
    OpModel m = sizes_model(c);
    OpSize sizes[OP_SIZES];
    int count = op_sizes(sizes, &m);
    for (const OpSize *size = sizes; size < sizes + count; size++) {
        if (strcmp(op_kinds[size->kind].name, c->check->operation) != 0) continue;
        const int *d = size->d;
        if (size->kind == OP_MATMUL) sizes_product(size->what, d[0], d[1], d[2], d[3]);
        else if (size->kind == OP_SUM_OF_SQUARES) sizes_squares(m.update_rows, m.C);
        else Sampled(*size).check();
    }
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
static void sizes_attention_by(const OpModel &m, const char *who, bool own) {
    Sizes s(product(m.B, m.T));
    int width = (2 * m.NH + 2 * m.NKV) * m.D;
    const int d[OP_DIMS] = {m.B, m.T, 2 * m.NH, m.NKV, m.D, m.D, 1, (int)round_up((size_t)width + 3, 64) - width};
    OpCase c;
    op_describe(&c, OP_ATTENTION, d);
    AttentionShape shape = op_attention_shape(&c);
    OpKeySet a = op_key_set(&c.a, 0);
    size_t N = product(m.B, m.T), T = (size_t)m.T, ld = (size_t)c.a.ld, ldo = (size_t)shape.ldo, D = (size_t)m.D;
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
    OpModel m = sizes_model(c);
    sizes_attention_by(m, "built-in attention", true);
    if (sizeof(floatX) == 2) sizes_attention_by(m, "cuDNN", false);
}

// attention_decode of diff_v2 after T positions: the last group of heads in the last sequence against the twin.
static void sizes_decode(const Case *c) {
    OpModel m = sizes_model(c);
    Sizes s(product(m.B, m.T));
    int NQ = 2 * m.NH, group = NQ / m.NKV, width = 2 * m.NKV * m.D;
    const int d[OP_DIMS] = {m.B, NQ, m.NKV, m.D, m.D, 1, 0, m.T, m.T - 1};
    OpCase of;
    op_describe(&of, OP_DECODE, d);
    AttentionShape shape = decode_shape(&of);
    size_t B = (size_t)m.B, T = (size_t)m.T, ld = (size_t)shape.ldq, D = (size_t)m.D, v_at = product(m.NKV, m.D);
    Big &cache = s.random(product(m.B, m.T), (size_t)width, 2), &q = s.random(B, ld, 2), &out = s.poisoned(B, ld),
        &lse = s.poisoned(B, (size_t)NQ, FP32), &first = s.zero(B, 1, INT32);
    std::vector<int> positions(B, m.T - 1);
    buffer_upload(first.at, positions.data(), B * sizeof(int));
    with_workspace(attention_decode_workspace_bytes(shape, m.T, 1), [&] {
        attention_decode(out.x(), lse.f(), q.x(), cache.x(), cache.x() + v_at, first.i(), m.T, shape);
    });
    Rows last;
    for (size_t t = 0; t < T; t++) last.push_back(product(m.B, m.T) - T + t);
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
    CHECK(B > 0 && T > 0 && NKV > 0 && p->model.NH % NKV == 0,
          "--sizes %s %d %d %d: NH %d is not divisible by NKV, or B or T is 0", preset, NKV, B, T, p->model.NH);
    static const Check attention[] = {{"attention", sizes_attention, SIZES_DIMS},
                                      {"attention_decode", sizes_decode, SIZES_DIMS}};
    static Check checks[OP_KIND_COUNT];
    std::vector<Case> cases;
    const ModelConfig &m = p->model;
    auto add = [&](const Check &check) {
        cases.push_back({&check, {B, T, m.C, m.F, m.NH, NKV, m.D, m.V}, 0, p->name});
    };
    add(attention[0]);
    add(attention[1]);
    OpSize sizes[OP_SIZES];
    OpModel model = sizes_model(&cases[0]);
    for (int i = 0, count = op_sizes(sizes, &model); i < count; i++) {
        Check &check = checks[sizes[i].kind];
        if (check.run) continue;
        check = {op_kinds[sizes[i].kind].name, sizes_of_kind, SIZES_DIMS};
        add(check);
    }
    if (m.E == 0) return cases;
    model.E = m.E, model.K = m.K, model.C = 64, model.FE = 32; // narrow: the twins compute all rows
    for (int i = 0, count = op_sizes(sizes, &model); i < count; i++) {
        if (sizes[i].kind < OP_ROUTER) continue;
        cases.push_back({operation_check(sizes[i].kind), {}, 0, p->name});
        std::copy(std::begin(sizes[i].d), std::end(sizes[i].d), cases.back().n);
    }
    return cases;
}
