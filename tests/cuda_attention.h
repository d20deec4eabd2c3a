/*
cuda_attention.h: attention and the statistics against their C twins.
*/
#ifndef TESTS_CUDA_ATTENTION_H
#define TESTS_CUDA_ATTENTION_H
#include "cuda_operations.h"

// n: B T NQ NKV D DV; the fused row is [q | k | v | gap], as the trainer's
enum { FUSED_GAP = 3 };

struct AttentionCase {
    AttentionShape shape;
    size_t q, k, v; // offsets within a fused row
    int ld;
};

static AttentionCase attention_case(const Case *c, int sets = 1) {
    AttentionCase a;
    AttentionShape &s = a.shape;
    memset(&s, 0, sizeof(s));
    s.B = c->n[0], s.T = c->n[1], s.NQ = c->n[2], s.NKV = c->n[3], s.D = c->n[4], s.DV = c->n[5];
    a.q = product(sets - 1, s.D); // the last of the key sets, whose heads alternate
    a.k = a.q + product(sets, s.NQ, s.D);
    a.v = product(sets, s.NQ, s.D) + product(sets, s.NKV, s.D);
    a.ld = (int)round_up(a.v + product(s.NKV, s.DV) + FUSED_GAP, s.D % 8 || c->shift ? 1 : 64);
    s.ldq = s.ldkv = a.ld;
    s.ldo = sets * s.NQ * s.DV;
    s.q_head = s.k_head = sets * s.D;
    s.v_head = s.DV;
    s.o_head = sets * s.DV;
    s.scale = (float)(1 / sqrt((double)s.D));
    return a;
}

// First keys as documents give them: not decreasing, never beyond the row itself. Each sequence has two or more.
static void fill_first_keys(Tensor &first_key, int B, int T) {
    for (int b = 0; b < B; b++)
        for (int t = 0, start = 0; t < T; t++) {
            if (t == T / 2 || test_random_int(&test_random, min_int(40, T / 4 + 2)) == 0) start = t;
            first_key.set(product(b, T) + (size_t)t, start);
        }
}

static double attention_error(AttentionShape s) { return error_of_sum(s.D) + error_of_sum(s.T) + 16; }
static double largest(const std::vector<double> &x) {
    double most = 0;
    for (double v : x)
        if (isfinite(v)) most = fmax(most, fabs(v));
    return most;
}

static void check_attention(const Case *c, bool documents) {
    AttentionCase a = attention_case(c);
    AttentionShape s = a.shape;
    int N = s.B * s.T;
    size_t outs = product(N, s.ldo), stats = product(s.B, s.NQ, s.T);
    size_t twin_bytes = twin::attention_workspace_bytes(twin_shape(s, nullptr), omp_get_max_threads());
    twin_workspace(twin_bytes);
    Operands o(c->shift);
    Tensor &out = o.out("out", outs), &lse = o.out_fp32("lse", stats), &fused = o.in("fused", product(N, a.ld), 2);
    Tensor &first_key = o.ints("first_key", (size_t)N, 1);
    if (documents) fill_first_keys(first_key, s.B, s.T);
    s.first_key = documents ? first_key.i() : nullptr;
    twin::AttentionShape t = twin_shape(s, documents ? first_key.twin_ints.data() : nullptr);
    o.run(0, [&] { attention_forward(out.x(), lse.f(), fused.x() + a.q, fused.x() + a.k, fused.x() + a.v, s); });
    twin::attention_forward(out.t(), lse.t(), fused.t() + a.q, fused.t() + a.k, fused.t() + a.v, t);
    o.expect(out, {4, 2 * attention_error(s)});
    o.expect(lse, {4, attention_error(s)});

    // backward of the twin's output as it is stored; add_dv by turns
    for (int add_dv = 0; add_dv < 2; add_dv++) {
        Operands b(c->shift);
        Tensor &out2 = b.in("out", outs), &lse2 = b.in_fp32("lse", stats), &dout = b.in("dout", outs),
               &from = b.in("fused", product(N, a.ld));
        Tensor &keys = b.ints("first_key", (size_t)N, 1),
               &dfused = add_dv ? b.updated("dfused", product(N, a.ld)) : b.out("dfused", product(N, a.ld));
        for (size_t k = 0; k < outs; k++) out2.set(k, out.twin[k]);
        for (size_t k = 0; k < stats; k++) lse2.set(k, lse.twin[k]);
        for (size_t k = 0; k < from.count; k++) from.set(k, fused.twin[k]);
        for (size_t k = 0; k < (size_t)N; k++) keys.set(k, first_key.twin_ints[k]);
        s.first_key = documents ? keys.i() : nullptr;
        t.first_key = documents ? keys.twin_ints.data() : nullptr;
        b.run(attention_workspace_bytes(s, 1), [&] {
            attention_backward(dfused.x() + a.q, dfused.x() + a.k, dfused.x() + a.v, dout.x(), out2.x(), lse2.f(),
                               from.x() + a.q, from.x() + a.k, from.x() + a.v, s, add_dv);
        });
        twin::attention_backward(dfused.t() + a.q, dfused.t() + a.k, dfused.t() + a.v, dout.t(), out2.t(), lse2.t(),
                                 from.t() + a.q, from.t() + a.k, from.t() + a.v, t, add_dv);
        b.expect(dfused, {4, (attention_error(s) + error_of_sum(s.DV)) * (1 + largest(dfused.twin))});
    }
}
static void check_attention_plain(const Case *c) { check_attention(c, false); }
static void check_attention_documents(const Case *c) { check_attention(c, true); }

// n: B T NQ NKV D DV, key sets, parts that the values' columns are to be computed in (0: whichever), groups of heads of
// one sequence that the workspace has room for (0: no limit), and the calls that there are to be then. The route must
// be cuDNN's where parts are demanded; what cuDNN may refuse is our kernel's then, and said. A forward needs no
// workspace of cuDNN's; its stand-in asks for as much as for the backward, so that it is done in as many calls.
#ifdef CUDA_ON_CPU
static const bool STAND_IN = true;
#else
static const bool STAND_IN = false;
#endif
static bool prepare_library(const Case *c, AttentionShape s, bool split) {
    int parts = c->n[7], room = split ? c->n[8] : 0, calls = room ? c->n[9] : 1;
    AttentionOptions use = {false, parts > 0, true, false, false};
    size_t limit = attention_limit;
    attention_configure(use);
    attention_fewest_parts = max_int(1, parts);
    if (room) { // a limit that these just keep
        attention_prepare(s, true, true);
        size_t each = attention_plan(s, true, false)->plan_bytes / (size_t)s.B;
        attention_limit = each / (size_t)s.NKV * (size_t)room;
        attention_stop();
        char text[32];
        FORMAT(text, "%zu", each);
        setenv("CUDA_ON_CPU_CUDNN_FORWARD", text, 1);
    }
    attention_prepare(s, true, true);
    unsetenv("CUDA_ON_CPU_CUDNN_FORWARD");
    const AttentionPlan *r = attention_plan(s, true, true), *forward = attention_plan(s, false, false);
    bool taken = r && forward && r->parts && forward->parts;
    EXPECT(taken || !parts, "cuDNN does not take it");
    if (!taken) printf("     not by cuDNN: %s\n", r ? r->why : "no route");
    else if (parts)
        EXPECT(r->parts == parts && attention_calls(r) == calls && (!STAND_IN || attention_calls(forward) == calls),
               "%d parts in %d calls (%d in the forward), not %d in %d", r->parts, attention_calls(r),
               attention_calls(forward), parts, calls);
    attention_fewest_parts = 1;
    attention_limit = limit;
    return taken;
}

// What rounding P and dS to bf16 adds to sums of terms up to `size` that add up to little more than it.
static double library_error(double size) { return size * ROUND_STORE / ROUND_FP32; }

static void check_attention_cudnn(const Case *c) {
    if (sizeof(floatX) != 2) return; // refused; tests/cuda_trainer.h looks at what is said
    AttentionCase a = attention_case(c, c->n[6]);
    AttentionShape s = a.shape;
    int N = s.B * s.T;
    size_t outs = product(N, s.ldo), stats = product(s.B, s.NQ, s.T), heads = product(N, a.ld),
           o_at = product(c->n[6] - 1, s.DV);
    twin::AttentionShape t = twin_shape(s, nullptr);
    twin_workspace(twin::attention_workspace_bytes(t, omp_get_max_threads()));
    Operands o(0);
    Tensor &out = o.out("out", outs), &lse = o.out_fp32("lse", stats), &fused = o.in("fused", heads, 2);
    bool taken = prepare_library(c, s, true);
    double loose = taken ? 1 : 0;
    o.run(attention_workspace_bytes(s, 1),
          [&] { attention_forward(out.x() + o_at, lse.f(), fused.x() + a.q, fused.x() + a.k, fused.x() + a.v, s); });
    twin::attention_forward(out.t() + o_at, lse.t(), fused.t() + a.q, fused.t() + a.k, fused.t() + a.v, t);
    o.expect(out, {4, 2 * attention_error(s) + loose * library_error(2)});
    o.expect(lse, {4, attention_error(s) + loose * 1024}); // its exponentials and logarithms are the device's fast ones
    for (int add_dv = 0; add_dv < 2; add_dv++) {
        Operands b(0);
        Tensor &out2 = b.in("out", outs), &lse2 = b.in_fp32("lse", stats), &dout = b.in("dout", outs),
               &from = b.in("fused", heads);
        Tensor &dfused = add_dv ? b.updated("dfused", heads) : b.out("dfused", heads);
        for (size_t k = 0; k < outs; k++) out2.set(k, isnan(out.twin[k]) ? 0 : out.twin[k]);
        for (size_t k = 0; k < stats; k++) lse2.set(k, lse.twin[k]);
        for (size_t k = 0; k < heads; k++) from.set(k, fused.twin[k]);
        std::vector<unsigned char> bits[2];
        for (int split = 0; split < (c->n[8] ? 2 : 1); split++) { // in one call, and in several: the same bits
            prepare_library(c, s, split || !c->n[8]);
            b.run(attention_workspace_bytes(s, 1), [&] {
                attention_backward(dfused.x() + a.q, dfused.x() + a.k, dfused.x() + a.v, dout.x() + o_at,
                                   out2.x() + o_at, lse2.f(), from.x() + a.q, from.x() + a.k, from.x() + a.v, s,
                                   add_dv);
            });
            bits[split] = dfused.result;
        }
        EXPECT(!c->n[8] || bits[0] == bits[1], "several calls give other bits than one");
        twin::attention_backward(dfused.t() + a.q, dfused.t() + a.k, dfused.t() + a.v, dout.t() + o_at, out2.t() + o_at,
                                 lse2.t(), from.t() + a.q, from.t() + a.k, from.t() + a.v, t, add_dv);
        double most = 1 + largest(dfused.twin);
        b.expect(dfused, {4, (attention_error(s) + error_of_sum(s.DV)) * most + loose * library_error(most)});
    }
}

// n: positions before, T, NQ, NKV, D, DV; one sequence, keys and values of the positions before come first
static void check_attention_generation(const Case *c) {
    Case whole = *c;
    whole.n[0] = 1;
    AttentionCase a = attention_case(&whole);
    AttentionShape s = a.shape;
    s.first = c->n[0];
    size_t keys = (size_t)(s.first + s.T);
    twin_workspace(twin::attention_workspace_bytes(twin_shape(s, nullptr), omp_get_max_threads()));
    Operands o(c->shift);
    Tensor &out = o.out("out", product(s.T, s.ldo)), &fused = o.in("fused", keys * (size_t)a.ld, 2);
    size_t row = (size_t)s.first * (size_t)a.ld;
    o.run(0, [&] { attention_forward(out.x(), nullptr, fused.x() + row + a.q, fused.x() + a.k, fused.x() + a.v, s); });
    twin::attention_forward(out.t(), nullptr, fused.t() + row + a.q, fused.t() + a.k, fused.t() + a.v,
                            twin_shape(s, nullptr));
    s.T += s.first; // for the error
    o.expect(out, {4, 2 * attention_error(s)});
}

// ---------------------------------------------------------------------------------------------------
// Statistics

static void expect_number(const char *what, double got, double want, double tolerance) {
    EXPECT(isnan(want) ? isnan(got) : got == want || fabs(got - want) <= tolerance * fmax(1, fabs(want)),
           "%s is %.12g, the twin's %.12g", what, got, want);
}
static void expect_range(const char *what, Range got, twin::Range want) {
    expect_number(what, got.min, want.min, 1e-12);
    expect_number(what, got.mean, want.mean, 1e-12);
    expect_number(what, got.max, want.max, 1e-12);
}

// n: rows, heads, ldl, width
static void check_ranges(const Case *c) {
    int N = c->n[0], NH = c->n[1], ldl = c->n[2], D = c->n[3];
    for (int special = 0; special < 2; special++) {
        Operands o(c->shift);
        Tensor &l = o.in("l", product(N, ldl), 6), &x = o.in("x", product(N, D), 3);
        if (special) l.set(product(N - 1, ldl) + (size_t)(NH - 1), NAN), x.set(0, NAN);
        o.run(0, [&] {
            for (int sigmoid = 0; sigmoid < 2; sigmoid++)
                expect_range("lambda", lambda_stats(l.x(), N, NH, ldl, sigmoid),
                             twin::lambda_stats(l.t(), N, NH, ldl, sigmoid));
            expect_range("rms", rms_stats(x.x(), (size_t)N, D), twin::rms_stats(x.t(), (size_t)N, D));
        });
    }
}

static void check_magnitudes(const Case *c) {
    size_t count = (size_t)c->n[0];
    // random; all equal; with a NaN and an infinity; the largest number near the end
    for (int special = 0; special < 4; special++) {
        Operands o(c->shift);
        Tensor &x = o.in("x", count, 100);
        for (size_t k = 0; k < count && special == 1; k++) x.set(k, -3);
        if (special == 2) x.set(0, NAN), x.set(count - 1, -INFINITY);
        if (special == 3) x.set(count - min_size(count, 9), -200);
        twin::Magnitudes want = twin::magnitude_stats(x.t(), count);
        o.run(0, [&] {
            Magnitudes got = magnitude_stats(x.x(), count);
            expect_number("the largest magnitude", got.largest, want.largest, 0);
            expect_number("the median magnitude", got.median, want.median, 0);
        });
    }
}

// n: B, T, output heads, pair stride (0: one map), key sets, documents
static void check_attention_stats(const Case *c) {
    int B = c->n[0], T = c->n[1], NH = c->n[2], stride = c->n[3], sets = c->n[4], documents = c->n[5], D = 12,
        maps = stride ? 2 : 1;
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = B, s.T = T, s.NQ = maps * NH / sets, s.NKV = s.NQ > 1 && s.NQ % 2 == 0 ? s.NQ / 2 : s.NQ, s.D = D, s.DV = D;
    s.q_head = s.k_head = sets * D;
    int q_width = s.NQ * sets * D, ld = q_width + s.NKV * sets * D + 1, ldl = NH + 2;
    s.ldq = s.ldkv = ld;
    s.scale = (float)(1 / sqrt((double)D));
    Operands o(c->shift);
    Tensor &fused = o.in("q and k", product(B * T, ld), 2), &l = o.in("l", product(B * T, ldl), 3);
    Tensor &lse = o.in_fp32("lse", (size_t)sets * lse_set_stride(s)),
           &first_key = o.ints("first_key", product(B, T), 1);
    if (documents) fill_first_keys(first_key, B, T);
    for (size_t k = 0; k < lse.count; k++) lse.set(k, 3 + lse.twin[k]); // as if there were sinks
    s.first_key = documents ? first_key.i() : nullptr;
    twin::AttentionShape t = twin_shape(s, documents ? first_key.twin_ints.data() : nullptr);
    twin::AttentionStats want = twin::attention_stats(fused.t(), fused.t() + q_width, lse.t(), stride ? l.t() : nullptr,
                                                      t, sets, ldl, stride, true);
    // of documents: seven rows at a time
    if (documents) attention_stats_limit = 7 * (size_t)NH * sizeof(AttentionHeadStats);
    o.run(0, [&] {
        AttentionStats got = attention_stats(fused.x(), fused.x() + q_width, lse.f(), stride ? l.x() : nullptr, s, sets,
                                             ldl, stride, true);
        double error = ROUND_FP32 * 4 * error_of_sum(D); // products q.k in fp32
        expect_number("mass of the first map", got.first[0], want.first[0], error);
        expect_number("mass of the second map", got.first[1], want.first[1], error);
        expect_number("effective mass", got.first_effective, want.first_effective, 16 * error);
        expect_number("largest logit", got.largest_logit, want.largest_logit, error);
    });
    attention_stats_limit = SCRATCH_BYTES;
}
#endif
