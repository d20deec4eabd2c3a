/*
cuda_operations.h: every operation but attention against its C twin. A check reads the parameters of its case, n[0],
n[1], ... in the order of the names in the table of test_diffv2.cu.
*/
#ifndef TESTS_CUDA_OPERATIONS_H
#define TESTS_CUDA_OPERATIONS_H
#include "cuda_engine.h"

struct Case {
    const char *operation;
    void (*check)(const Case *c);
    const char *names;
    int n[10];
    int shift; // of every floatX tensor, in elements
    const char *why;
};
static inline size_t product(int a, int b, int c = 1, int d = 1) {
    return (size_t)a * (size_t)b * (size_t)c * (size_t)d;
}

// ---------------------------------------------------------------------------------------------------
// Rows

static void check_embedding_forward(const Case *c) {
    int N = c->n[0], V = c->n[1], C = c->n[2];
    Operands o(c->shift);
    Tensor &x = o.out("x", product(N, C)), &tokens = o.ints("tokens", (size_t)N, V),
           &weight = o.in("weight", product(V, C));
    tokens.set((size_t)N - 1, V - 1);
    o.run(0, [&] { embedding_forward(x.x(), tokens.i(), weight.x(), N, C); });
    twin::embedding_forward(x.t(), tokens.twin_ints.data(), weight.t(), N, C);
    o.expect(x, {0, 0}); // copies
}

static void check_embedding_backward(const Case *c) {
    int N = c->n[0], V = c->n[1], C = c->n[2];
    Operands o(c->shift);
    o.integers = 7; // sums are exact
    Tensor &dx = o.in("dx", product(N, C)), &tokens = o.ints("tokens", (size_t)N, V);
    Tensor &dweight = o.updated_fp32("dweight", product(V, C));
    for (int n = 0; n < N; n += 3) tokens.set((size_t)n, V / 2); // one that occurs often
    o.run(embedding_workspace_bytes(N), [&] { embedding_backward(dweight.f(), dx.x(), tokens.i(), N, C); });
    twin::embedding_backward(dweight.t(), dx.t(), tokens.twin_ints.data(), N, C);
    o.expect(dweight, {0, 0});
}

// In the fp32 build the rows of a token are added in the order of the C twin in fp32: the same bits.
static void check_embedding_order(const Case *c) {
    int N = c->n[0], V = c->n[1], C = c->n[2];
    Operands o(c->shift);
    Tensor &dx = o.in("dx", product(N, C)), &tokens = o.ints("tokens", (size_t)N, V);
    Tensor &dweight = o.updated_fp32("dweight", product(V, C));
    std::vector<float> want(product(V, C));
    for (size_t k = 0; k < want.size(); k++) want[k] = (float)dweight.twin[k];
    o.run(embedding_workspace_bytes(N), [&] { embedding_backward(dweight.f(), dx.x(), tokens.i(), N, C); });
    for (int n = 0; n < N; n++)
        for (int k = 0; k < C; k++)
            want[product(tokens.twin_ints[(size_t)n], C) + (size_t)k] += (float)dx.twin[product(n, C) + (size_t)k];
    for (size_t k = 0; k < want.size(); k++) dweight.twin[k] = (double)want[k];
    o.expect(dweight, {-1, 0}); // the store's rounding, taken back: equality
}

static void check_rmsnorm_forward(const Case *c) {
    int N = c->n[0], C = c->n[1];
    Operands o(c->shift);
    Tensor &y = o.out("y", product(N, C)), &rstd = o.out_fp32("rstd", (size_t)N);
    Tensor &x = o.in("x", product(N, C), 3), &weight = o.in("weight", (size_t)C, 2);
    o.run(0, [&] { rmsnorm_forward(y.x(), rstd.f(), x.x(), weight.x(), N, C, 1e-5f); });
    twin::rmsnorm_forward(y.t(), rstd.t(), x.t(), weight.t(), N, C, 1e-5);
    o.expect(rstd, {error_of_sum(C), 0});
    o.expect(y, {error_of_sum(C) + 4, 0});
}

// Also: the same bits as by the two operations that it stands for.
static void check_residual_rmsnorm(const Case *c) {
    int N = c->n[0], C = c->n[1];
    Operands o(c->shift);
    Tensor &sum = o.out("sum", product(N, C)), &y = o.out("y", product(N, C)), &rstd = o.out_fp32("rstd", (size_t)N);
    Tensor &sum2 = o.out("sum by residual", product(N, C)), &y2 = o.out("y by rmsnorm", product(N, C)),
           &rstd2 = o.out_fp32("rstd by rmsnorm", (size_t)N);
    Tensor &a = o.in("a", product(N, C), 3), &b = o.in("b", product(N, C)), &weight = o.in("weight", (size_t)C, 2);
    o.run(0, [&] {
        residual_rmsnorm_forward(sum.x(), y.x(), rstd.f(), a.x(), b.x(), weight.x(), N, C, 1e-5f);
        residual_forward(sum2.x(), a.x(), b.x(), product(N, C));
        rmsnorm_forward(y2.x(), rstd2.f(), sum2.x(), weight.x(), N, C, 1e-5f);
    });
    EXPECT(sum.result == sum2.result, "the sum has other bits than residual_forward gives");
    EXPECT(y.result == y2.result && rstd.result == rstd2.result, "the norm has other bits than rmsnorm_forward gives");
    twin::residual_forward(sum.t(), a.t(), b.t(), product(N, C));
    o.expect(sum, {1, 0});
    for (size_t k = 0; k < sum.count; k++) sum.twin[k] = sum.value(sum.result, k); // the norm is of the sum as stored
    twin::rmsnorm_forward(y.t(), rstd.t(), sum.t(), weight.t(), N, C, 1e-5);
    o.expect(rstd, {error_of_sum(C), 0});
    o.expect(y, {error_of_sum(C) + 4, 0});
}

static void check_rmsnorm_backward(const Case *c) {
    int N = c->n[0], C = c->n[1];
    bool add = c->n[2] == 0;
    Operands o(c->shift);
    Tensor &dx = add ? o.updated("dx", product(N, C)) : o.out("dx", product(N, C)),
           &dweight = o.updated_fp32("dweight", (size_t)C), &dy = o.in("dy", product(N, C));
    Tensor &x = o.in("x", product(N, C), 3), &weight = o.in("weight", (size_t)C, 2),
           &rstd = o.in_fp32("rstd", (size_t)N);
    for (size_t n = 0; n < (size_t)N; n++) rstd.set(n, 0.5 + fabs(rstd.twin[n]));
    o.run(rmsnorm_workspace_bytes(C),
          [&] { rmsnorm_backward(dx.x(), dweight.f(), dy.x(), x.x(), weight.x(), rstd.f(), N, C, add); });
    twin_workspace(twin::rmsnorm_workspace_bytes(C));
    twin::rmsnorm_backward(dx.t(), dweight.t(), dy.t(), x.t(), weight.t(), rstd.t(), N, C, add);
    const double z = 3 * 1.5, g = 2; // largest |x r| and |dy weight|
    o.expect(dx, {4, 1.5 * (4 * g + z * z * g * error_of_sum(C) / sqrt((double)C))});
    o.expect(dweight, {4, z * error_of_sum(N)});
}

// ---------------------------------------------------------------------------------------------------
// Products

static void check_matmul(const Case *c) {
    int N = c->n[0], IC = c->n[1], OC = c->n[2], ldy = c->n[3];
    for (int integers = 0; integers < 4; integers += 3) { // with whole numbers sums are exact
        Operands o(c->shift);
        bool add = integers == 0;
        o.integers = integers;
        Tensor &y = o.out("y", product(N, ldy)), &x = o.in("x", product(N, IC)),
               &weight = o.in("weight", product(OC, IC));
        Tensor &dx = o.out("dx", product(N, IC)),
               &dweight = add ? o.updated_fp32("dweight", product(OC, IC)) : o.out_fp32("dweight", product(OC, IC)),
               &dy = o.in("dy", product(N, ldy));
        o.run(matmul_workspace_bytes(N, IC, OC), [&] {
            matmul_forward(y.x(), x.x(), weight.x(), N, IC, OC, ldy);
            matmul_backward(dx.x(), dweight.f(), dy.x(), x.x(), weight.x(), N, IC, OC, ldy, add);
        });
        twin::matmul_forward(y.t(), x.t(), weight.t(), N, IC, OC, ldy);
        twin::matmul_backward(dx.t(), dweight.t(), dy.t(), x.t(), weight.t(), N, IC, OC, ldy, add);
        o.expect(y, {0, integers ? 0 : error_of_product(IC)});
        o.expect(dx, {0, integers ? 0 : error_of_product(OC)});
        o.expect(dweight, {0, integers ? 0 : error_of_product(N)});
    }
}

// The kernel for what the library refuses: every way of storing the operands, with each kind of output. n: M N K, gap
// of the rows
static void check_gemm_plain(const Case *c) {
    for (int way = 0; way < 16; way++) {
        GemmShape s = {
            (way & 1) != 0, (way & 2) != 0, (way & 4) != 0, (way & 8) != 0, c->n[0], c->n[1], c->n[2], 0, 0, 0};
        s.lda = (s.transpose_a ? s.M : s.K) + c->n[3];
        s.ldb = (s.transpose_b ? s.K : s.N) + c->n[3];
        s.ldc = s.N + c->n[3];
        Operands o(c->shift);
        o.integers = 3; // sums are exact
        size_t count = product(s.M, s.ldc);
        Tensor &A = o.in("A", product(s.transpose_a ? s.K : s.M, s.lda)),
               &B = o.in("B", product(s.transpose_b ? s.N : s.K, s.ldb));
        Tensor &C = s.add        ? s.fp32_out ? o.updated_fp32("C", count) : o.updated("C", count)
                           : s.fp32_out ? o.out_fp32("C", count)
                                 : o.out("C", count);
        o.run(0, [&] { gemm_plain(s, C.at(), A.x(), B.x()); });
        for (int m = 0; m < s.M; m++)
            for (int n = 0; n < s.N; n++) {
                double sum = 0, &to = C.twin[product(m, s.ldc) + (size_t)n];
                for (int k = 0; k < s.K; k++)
                    sum += A.twin[s.transpose_a ? product(k, s.lda) + (size_t)m : product(m, s.lda) + (size_t)k] *
                           B.twin[s.transpose_b ? product(n, s.ldb) + (size_t)k : product(k, s.ldb) + (size_t)n];
                to = sum + (s.add ? to : 0);
            }
        o.expect(C, {0, 0});
    }
}

#ifdef CUDA_ON_CPU
// A library that likes to divide sums over K, and then leaves out a rest. n: K, parts of the sum
static void check_gemm_split(const Case *c) {
    GemmShape s = {false, true, true, true, 9, 16, c->n[0], c->n[0], c->n[0], 16};
    Operands o(c->shift);
    o.integers = 3; // sums are exact
    Tensor &A = o.in("A", product(s.M, s.K)), &B = o.in("B", product(s.N, s.K)),
           &C = o.updated_fp32("C", product(s.M, s.N));
    setenv("CUDA_ON_CPU_GEMM", "split", 1);
    o.run(0, [&] {
        gemm(s, C.at(), A.x(), B.x());
        int parts = gemm_parts_of_k(&gemm_state.plans[0].algorithm);
        EXPECT(gemm_state.count == 1 && parts == c->n[1], "%d plans, the first in %d parts", gemm_state.count, parts);
    });
    unsetenv("CUDA_ON_CPU_GEMM");
    for (int m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++)
            for (int k = 0; k < s.K; k++)
                C.twin[product(m, s.N) + (size_t)n] +=
                    A.twin[product(m, s.K) + (size_t)k] * B.twin[product(n, s.K) + (size_t)k];
    o.expect(C, {0, 0});
}
#endif

// Small uploads go through pinned memory in turn, large ones wait. n: bytes, times
static void check_buffers(const Case *c) {
    size_t bytes = (size_t)c->n[0];
    std::vector<unsigned char> sent(bytes), got(bytes);
    std::vector<char *> buffers((size_t)c->n[1]);
    for (char *&buffer : buffers) {
        buffer = (char *)buffer_alloc(bytes, "a test");
        buffer_download(got.data(), buffer, bytes);
        EXPECT(got == std::vector<unsigned char>(bytes), "a new buffer is not zero");
    }
    for (size_t i = 0; i < buffers.size(); i++) { // nothing waits for the device between them
        for (unsigned char &x : sent) x = (unsigned char)test_random_bits(&test_random);
        sent[0] = (unsigned char)i;
        buffer_upload(buffers[i], sent.data(), bytes);
        std::fill(sent.begin() + 1, sent.end(), (unsigned char)0); // what was sent is not needed any more
    }
    for (size_t i = 0; i < buffers.size(); i++) {
        buffer_download(got.data(), buffers[i], bytes);
        size_t zeros = (size_t)std::count(got.begin() + 1, got.end(), 0);
        EXPECT(got[0] == (unsigned char)i && (bytes < 100 || zeros < bytes / 50),
               "buffer %zu has not what was sent: %d, %zu zeros", i, got[0], zeros);
        buffer_zero(buffers[i], bytes - 1);
        buffer_download(got.data() + 1, buffers[i], bytes - 1);
        EXPECT(std::count(got.begin() + 1, got.end(), 0) == (ptrdiff_t)(bytes - 1), "buffer_zero left something");
        buffer_free(buffers[i]);
    }
    ops_wait();
}

// ---------------------------------------------------------------------------------------------------
// Heads

static void check_rope(const Case *c) {
    int B = c->n[0], T = c->n[1], heads = c->n[2], D = c->n[3], ldx = c->n[4], first = c->n[5];
    Operands o(c->shift);
    Tensor &x = o.updated("x", product(B * T, ldx)), &dx = o.updated("dx", product(B * T, ldx)),
           &table = o.in_fp32("table", product(first + T, D));
    std::vector<float> angles(table.count);
    rope_table(angles.data(), first + T, D, 10000);
    twin::rope_table(table.t(), first + T, D, 10000);
    for (size_t k = 0; k < angles.size(); k++) {
        EXPECT(fabs((double)angles[k] - table.twin[k]) <= ROUND_FP32, "rope_table [%zu] is %.9g, the twin's %.9g", k,
               (double)angles[k], table.twin[k]);
        table.set(k, (double)angles[k]);
    }
    o.run(0, [&] {
        rope_forward(x.x(), table.f(), B, T, heads, D, ldx, first);
        rope_backward(dx.x(), table.f(), B, T, heads, D, ldx, first);
    });
    twin::rope_forward(x.t(), table.t(), B, T, heads, D, ldx, first);
    twin::rope_backward(dx.t(), table.t(), B, T, heads, D, ldx, first);
    o.expect(x, {0, 4});
    o.expect(dx, {0, 4});
}

static void check_sink(const Case *c) {
    int B = c->n[0], T = c->n[1], NH = c->n[2], D = c->n[3], learned = c->n[4];
    Operands o(c->shift);
    size_t count = product(B * T, NH, D), rows = product(B * T, NH);
    Tensor &out = o.updated("out", count), &lse = o.updated_fp32("lse", rows, 20),
           &sinks = o.in("sinks", (size_t)NH, 2);
    lse.set(0, 90), lse.set(rows - 1, -90); // where exp alone would overflow
    o.run(0, [&] { sink_forward(out.x(), lse.f(), learned ? sinks.x() : nullptr, B, T, NH, D); });
    twin::sink_forward(out.t(), lse.t(), learned ? sinks.t() : nullptr, B, T, NH, D);
    o.expect(out, {8 + 128, 1e-20}); // expf(x) is off by the rounding of x, which is up to 92 here
    o.expect(lse, {4, 4});
    if (!learned) return;
    Operands b(c->shift);
    Tensor &dsinks = b.updated_fp32("dsinks", (size_t)NH), &dout = b.in("dout", count), &o2 = b.in("out", count);
    Tensor &l2 = b.in_fp32("lse", rows, 2), &s2 = b.in("sinks", (size_t)NH, 2);
    b.run(0, [&] { sink_backward(dsinks.f(), dout.x(), o2.x(), l2.f(), s2.x(), B, T, NH, D); });
    twin::sink_backward(dsinks.t(), dout.t(), o2.t(), l2.t(), s2.t(), B, T, NH, D);
    b.expect(dsinks, {4, exp(4.0) * sqrt((double)D) * error_of_sum(D + B * T)});
}

static void check_diff_combine(const Case *c) {
    int N = c->n[0], NH = c->n[1], D = c->n[2], ldl = c->n[3], stride = c->n[4], sigmoid = c->n[5];
    for (int integers = 0; integers < (sigmoid ? 1 : 4); integers += 3) {
        Operands o(c->shift);
        o.integers = integers; // without a sigmoid all is exact but the roundings to storage
        size_t wide = product(N, 2 * NH, D), narrow = product(N, NH, D);
        Tensor &out = o.out("o", narrow), &a = o.in("a", wide), &l = o.in("l", product(N, ldl), 6);
        Tensor &da = o.out("da", wide), &dl = o.out("dl", product(N, ldl)), &dout = o.in("do", narrow);
        o.run(0, [&] {
            diff_combine_forward(out.x(), a.x(), l.x(), N, NH, D, ldl, stride, sigmoid);
            diff_combine_backward(da.x(), dl.x(), dout.x(), a.x(), l.x(), N, NH, D, ldl, stride, sigmoid);
        });
        twin::diff_combine_forward(out.t(), a.t(), l.t(), N, NH, D, ldl, stride, sigmoid);
        twin::diff_combine_backward(da.t(), dl.t(), dout.t(), a.t(), l.t(), N, NH, D, ldl, stride, sigmoid);
        double any = integers ? 0 : 1;
        o.expect(out, {0, any * 16});
        o.expect(da, {any * 16, 0});
        o.expect(dl, {any * 16, any * error_of_sum(D)});
    }
}

// Arguments of a sigmoid that is 1, less than 2^-125, which the device may take for 0, and NaN.
static const double TINY = 1e-20; // times ROUND_FP32
static void set_saturated(Tensor &t) {
    const double values[] = {100, -87.5, -88.5, -100, -INFINITY, NAN};
    for (size_t k = 0; k < 6; k++) t.set(k, values[k]);
}

static void check_gate(const Case *c) {
    int N = c->n[0], heads = c->n[1], D = c->n[2], ldg = c->n[3], width = c->n[4];
    Operands o(c->shift);
    size_t count = product(N, heads, D);
    Tensor &y = o.out("y", count), &x = o.in("x", count), &g = o.in("g", product(N, ldg), 6);
    Tensor &dx = o.out("dx", count), &dg = o.out("dg", product(N, ldg)), &dy = o.in("dy", count);
    if (width > 1) set_saturated(g);
    o.run(0, [&] {
        gate_forward(y.x(), x.x(), g.x(), N, heads, D, ldg, width);
        gate_backward(dx.x(), dg.x(), dy.x(), x.x(), g.x(), N, heads, D, ldg, width);
    });
    twin::gate_forward(y.t(), x.t(), g.t(), N, heads, D, ldg, width);
    twin::gate_backward(dx.t(), dg.t(), dy.t(), x.t(), g.t(), N, heads, D, ldg, width);
    o.expect(y, {16, TINY});
    o.expect(dx, {16, TINY});
    o.expect(dg, {16, width == 1 ? error_of_sum(D) : 8}); // 1 - s loses digits near 1
}

// ---------------------------------------------------------------------------------------------------
// Elements

static void check_swiglu(const Case *c) {
    int N = c->n[0], F = c->n[1];
    Operands o(c->shift);
    Tensor &y = o.out("y", product(N, F)), &gate_up = o.in("gate_up", product(N, 2 * F), 6);
    Tensor &dgate_up = o.out("dgate_up", product(N, 2 * F)), &dy = o.in("dy", product(N, F));
    set_saturated(gate_up);
    o.run(0, [&] {
        swiglu_forward(y.x(), gate_up.x(), N, F);
        swiglu_backward(dgate_up.x(), dy.x(), gate_up.x(), N, F);
    });
    twin::swiglu_forward(y.t(), gate_up.t(), N, F);
    twin::swiglu_backward(dgate_up.t(), dy.t(), gate_up.t(), N, F);
    o.expect(y, {16, TINY});
    o.expect(dgate_up, {16, 6 * 8}); // 1 + g (1 - p) cancels somewhere
}

static void check_elements(const Case *c) {
    size_t count = (size_t)c->n[0];
    Operands o(c->shift);
    Tensor &y = o.out("y", count), &a = o.in("a", count), &b = o.in("b", count), &scaled = o.updated("x", count),
           &l = o.out("l", count);
    Tensor &l2 = o.out("l from a parameter", count), &lambda = o.in("lambda", 1);
    o.run(0, [&] {
        residual_forward(y.x(), a.x(), b.x(), count);
        scale_inplace(scaled.x(), 0.75f, count);
        fill_forward(l.x(), 0.625f, count);
        lambda_scalar_forward(l2.x(), lambda.x(), count);
    });
    twin::residual_forward(y.t(), a.t(), b.t(), count);
    twin::scale_inplace(scaled.t(), 0.75, count);
    twin::fill_forward(l.t(), 0.625, count);
    twin::lambda_scalar_forward(l2.t(), lambda.t(), count);
    o.expect(y, {0, 0});
    o.expect(scaled, {0, 0});
    o.expect(l, {0, 0});
    o.expect(l2, {0, 0});
}

static void check_layer_lambda(const Case *c) {
    int D = c->n[0];
    size_t count = (size_t)c->n[1];
    Operands o(c->shift);
    Tensor &l = o.out("l", count), &dl = o.in("dl", count), &dlambda = o.updated_fp32("dlambda", 1);
    Tensor *v[4], *dv[4];
    for (int i = 0; i < 4; i++)
        v[i] = &o.in("q1, k1, q2 or k2", (size_t)D, 0.3), dv[i] = &o.updated_fp32("its gradient", (size_t)D);
    o.run(0, [&] {
        lambda_scalar_backward(dlambda.f(), dl.x(), count);
        lambda_exp_forward(l.x(), v[0]->x(), v[1]->x(), v[2]->x(), v[3]->x(), D, 0.2f, count);
        lambda_exp_backward(dv[0]->f(), dv[1]->f(), dv[2]->f(), dv[3]->f(), dl.x(), v[0]->x(), v[1]->x(), v[2]->x(),
                            v[3]->x(), D, count);
    });
    twin::lambda_scalar_backward(dlambda.t(), dl.t(), count);
    twin::lambda_exp_forward(l.t(), v[0]->t(), v[1]->t(), v[2]->t(), v[3]->t(), D, (double)0.2f, count);
    twin::lambda_exp_backward(dv[0]->t(), dv[1]->t(), dv[2]->t(), dv[3]->t(), dl.t(), v[0]->t(), v[1]->t(), v[2]->t(),
                              v[3]->t(), D, count);
    double e = 1, dot[2] = {0, 0}; // the largest of 1 and the two exponentials, whose arguments are in double
    for (size_t i = 0; i < 2 * (size_t)D; i++)
        dot[i / (size_t)D] += v[i / (size_t)D * 2]->twin[i % (size_t)D] * v[i / (size_t)D * 2 + 1]->twin[i % (size_t)D];
    for (int i = 0; i < 2; i++) e = fmax(e, exp(dot[i]));
    o.expect(l, {4, 4 * e});
    o.expect(dlambda, {2, 2});
    for (int i = 0; i < 4; i++) o.expect(*dv[i], {4, 4 * e * sqrt((double)count)});
}

// ---------------------------------------------------------------------------------------------------
// Loss and update

static void check_cross_entropy(const Case *c) {
    int N = c->n[0], V = c->n[1], Vp = c->n[2], special = c->n[3];
    for (int gradient = 0; gradient < 2; gradient++) {
        Operands o(c->shift);
        Tensor &losses = o.updated_fp32("losses", (size_t)N), &logits = o.updated("logits", product(N, Vp), 8),
               &targets = o.ints("targets", (size_t)N, V);
        for (int n = 0; n < N; n++) // what lies beyond V is not read
            for (int v = V; v < Vp; v++) logits.set(product(n, Vp) + (size_t)v, NAN);
        targets.set((size_t)N - 1, V - 1);
        if (special) { // a sure prediction, -inf, NaN, +inf: one row each
            for (int v = 0; v < V; v++) logits.set((size_t)v, -60);
            logits.set((size_t)targets.twin_ints[0], 60);
            if (N > 1 && V > 1) logits.set(product(1, Vp) + (size_t)(targets.twin_ints[1] ? 0 : 1), -INFINITY);
            if (N > 2) logits.set(product(2, Vp) + (size_t)(V / 2), NAN);
            if (N > 3) logits.set(product(3, Vp) + (size_t)(V / 2), INFINITY);
        }
        double dloss = gradient ? 1.0 / 64 : 0;
        o.run(0, [&] { cross_entropy(losses.f(), logits.x(), targets.i(), N, V, Vp, (float)dloss); });
        twin::cross_entropy(losses.t(), logits.t(), targets.twin_ints.data(), N, V, Vp, dloss);
        o.expect(losses, {4, 4 + error_of_sum(V)});
        // the exponent's own rounding, and the difference to 1 at the target
        o.expect(logits, {16 + 16 + error_of_sum(V), 2 * dloss * error_of_sum(V) / 4});
    }
}

static void check_adamw(const Case *c) {
    size_t count = (size_t)c->n[0];
    int with_master = c->n[1], step = c->n[2];
    Operands o(c->shift);
    Tensor &params = o.updated("params", count), &master = o.updated_fp32("master", count),
           &grads = o.in_fp32("grads", count);
    Tensor &m = o.updated_fp32("m", count), &v = o.updated_fp32("v", count);
    for (size_t k = 0; k < count; k++) v.set(k, fabs(v.twin[k]));
    const double clip = 0.5, lr = 1e-2, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;
    o.run(0, [&] {
        adamw_update(params.x(), with_master ? master.f() : nullptr, grads.f(), m.f(), v.f(), count, clip, lr, beta1,
                     beta2, eps, decay, step);
    });
    twin::adamw_update(params.t(), with_master ? master.t() : nullptr, grads.t(), m.t(), v.t(), count, clip, lr, beta1,
                       beta2, eps, decay, step);
    o.expect(m, {2, 4});
    o.expect(v, {2, 4});
    double ratio = lr / (1 - pow(beta1, step)) * sqrt(1 - pow(beta2, step)); // of m / sqrt(v) in an update
    double largest = 0;
    for (size_t k = 0; k < count; k++) largest = fmax(largest, fabs(m.twin[k]) / (sqrt(v.twin[k]) + eps));
    o.expect(master, {4, 16 * ratio * largest});
    o.expect(params, {4, 16 * ratio * largest});
    if (with_master)
        for (size_t k = 0; k < count; k++) {
            double stored = params.value(params.result, k),
                   rounded = (double)(float)(floatX)(float)master.value(master.result, k);
            EXPECT(stored == rounded, "params [%zu] is %.9g, the master weight rounded is %.9g", k, stored, rounded);
        }
}

// n: count, first element (off the pack)
static void check_sum_of_squares(const Case *c) {
    size_t count = (size_t)c->n[0], first = (size_t)c->n[1];
    for (int special = 0; special < 3; special++) {
        Operands o(c->shift);
        Tensor &sum = o.out_fp64("sum", 1), &x = o.in_fp32("x", count + 1);
        x.set(count, 1e30);                       // behind the end
        if (special == 1) x.set(count / 2, 3e38); // its square is infinite in fp32
        if (special == 2) x.set(count - 1, NAN);
        o.run(0, [&] { sum_of_squares(sum.d(), x.f() + first, count - first); });
        twin::sum_of_squares(sum.t(), x.t() + first, count - first);
        o.expect(sum, {0x1p-29 * error_of_sum((double)count), 0}); // in double
    }
}
#endif
