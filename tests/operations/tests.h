/*
tests.h: tests of the C operations: the cases of the catalogue, and properties that involve several calls.
*/
#pragma once
#include "muon.h"
#include "engine.h"
#include "traffic.h"

static void test_embedding(void) { op_check_all(OP_EMBEDDING); }
static void test_rmsnorm(void) {
    op_check_all(OP_RMSNORM);
    op_check_all(OP_RESIDUAL_RMSNORM);
}
static void test_matmul(void) { op_check_all(OP_MATMUL); }
static void test_rope(void) { op_check_all(OP_ROPE); }
static bool op_has_window(const OpRow *row) { return row->d[11] > 0; }
static bool op_continues(const OpRow *row) { return row->d[9] > 0 && !op_has_window(row); }
static bool op_is_whole(const OpRow *row) { return row->d[9] == 0 && !op_has_window(row); }
static void test_attention(void) { op_check_some(OP_ATTENTION, op_is_whole); }
static void test_attention_continues(void) { op_check_some(OP_ATTENTION, op_continues); }
static void test_attention_windows(void) { op_check_some(OP_ATTENTION, op_has_window); }
static void test_attention_sets(void) { op_check_all(OP_ATTENTION_SETS); }
static void test_sink(void) {
    op_check_all(OP_SINKS);
    op_check_all(OP_SINK);
}
static void test_diff_combine(void) { op_check_all(OP_DIFF_COMBINE); }
static void test_diff_attention(void) { op_check_all(OP_DIFF_ATTENTION); }
static void test_layer_lambda(void) {
    op_check_all(OP_LAMBDA_EXP);
    op_check_all(OP_LAMBDA_LEARNED);
    op_check_all(OP_FILL);
}
static void test_scale(void) { op_check_all(OP_SCALE); }
static void test_add_to_sum(void) { op_check_all(OP_ADD_TO_SUM); }
static void test_cache(void) {
    op_check_all(OP_CACHE_STORE);
    op_check_all(OP_CACHE_LOAD);
}
static void test_decode(void) { op_check_all(OP_DECODE); }
static void test_gate(void) { op_check_all(OP_GATE); }
static void test_head_norm(void) { op_check_all(OP_HEAD_NORM); }
static void test_swiglu(void) { op_check_all(OP_SWIGLU); }
static void test_cross_entropy(void) { op_check_all(OP_CROSS_ENTROPY); }
static void test_adamw(void) { op_check_all(OP_ADAMW); }
static void test_router(void) {
    op_check_all(OP_ROUTER);
    op_check_all(OP_ROUTER_TOTALS);
    op_check_all(OP_ROUTER_BALANCE);
}
static void test_experts(void) {
    op_check_all(OP_EXPERT_GROUP);
    op_check_all(OP_EXPERT_GATHER);
    op_check_all(OP_EXPERT_SWIGLU);
    op_check_all(OP_EXPERT_LINEAR);
}

// bf16 is the upper half of the bits of a float. Compares with the conversion of files, which rounds the exact value.
static void test_bf16_rounding(void) {
    enum { N = 100000, COLUMNS = 100, LD = 104 };
    float *in = (float *)checked_calloc(N, sizeof(float)),
          *wide = (float *)checked_calloc(N / COLUMNS * LD, sizeof(float));
    bf16_t *narrow = (bf16_t *)checked_calloc(N / COLUMNS * LD, sizeof(bf16_t));
    static const uint32_t special[] = {0,          0x80000000, 0x7F800000, 0xFF800000,
                                       0x7F7FFFFF, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, // zero, infinite, largest, NaN
                                       0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF,
                                       1,          0x8000,     0x807F8000, 0x007FFFFF}; // ties, subnormal
    TestRandom random = {16};
    for (int i = 0; i < N; i++) {
        uint32_t bits = (uint32_t)test_random_bits(&random);
        if (i < (int)(sizeof(special) / sizeof(special[0]))) bits = special[i];
        memcpy(&in[i], &bits, 4);
    }
    bf16_round_matrix(narrow, LD, in, COLUMNS, N / COLUMNS, COLUMNS);
    bf16_round_matrix_wide(wide, LD, in, COLUMNS, N / COLUMNS, COLUMNS);
    int wrong = 0, different = 0;
    for (int i = 0; i < N; i++) {
        int at = i / COLUMNS * LD + i % COLUMNS;
        bf16_t expected;
        convert_elements(&expected, DTYPE_BF16, &in[i], DTYPE_F32, 1);
        uint32_t bits;
        memcpy(&bits, &wide[at], 4);
        wrong += narrow[at] != expected;
        different += bits != (uint32_t)narrow[at] << 16;
    }
    EXPECT(wrong == 0 && different == 0, "of %d numbers %d are rounded wrongly, %d differently when they stay wide", N,
           wrong, different);
    free(in);
    free(wide);
    free(narrow);
}

// A linear layer in bf16 or FP8 is the product of the rounded operands, in each implementation. In bf16 few rows are
// not rounded.
enum { LINEAR_IC = 40, LINEAR_OC = 70, LINEAR_LD = 80, LINEAR_TEST_ROWS = 50 };
typedef struct {
    real *x, *w, *dy, *y, *dx, *dw;
} LinearBuffers;

static LinearBuffers linear_buffers(void) {
    LinearBuffers b = {op_alloc(LINEAR_TEST_ROWS * LINEAR_IC), op_alloc(LINEAR_OC * LINEAR_IC),
                       op_alloc(LINEAR_TEST_ROWS * LINEAR_LD), op_alloc(LINEAR_TEST_ROWS * LINEAR_LD),
                       op_alloc(LINEAR_TEST_ROWS * LINEAR_IC), op_alloc(LINEAR_OC * LINEAR_IC)};
    return b;
}
static void linear_start_dw(LinearBuffers b) {
    for (int j = 0; j < LINEAR_OC * LINEAR_IC; j++) b.dw[j] = (real)j / 1000;
}
static void linear_round_reference(real *to, const real *from, int rows, int columns, int ld, GemmType type,
                                   Fp8Format f) {
    absmax_t max = 0;
    absmax_update(activation(from, &max), rows, columns, ld);
    for (int n = 0; n < rows; n++)
        for (int c = 0; c < columns; c++) {
            float x = (float)from[n * ld + c], rounded;
            if (type == GEMM_BF16) bf16_round_matrix_wide(&rounded, 1, &x, 1, 1, 1);
            else rounded = fp8_round(x * fp8_multiplier(max, f), f) * fp8_scale(max, f);
            to[n * ld + c] = (real)rounded;
        }
}
static double linear_difference(const real *a, const real *b, int rows, int columns, int ld) {
    double worst = 0;
    for (int n = 0; n < rows; n++) worst = fmax(worst, op_difference(a + n * ld, b + n * ld, (size_t)columns));
    return worst;
}

// False if this machine cannot store rounded numbers so.
static bool linear_test_configure(GemmType type, LinearStorage storage) {
    EXPECT(!linear_configure(type), "type %d is refused", type);
    bool supported = storage == STORE_FP32;
#ifdef ONEDNN
    // oneDNN converts bf16 to fp32 on CPUs with AVX-512 without bf16 products: tests its path there too
    supported = supported || (storage == STORE_BF16 && (bf16_begin() || bf16_probe()));
#endif
    if (supported) linear_storage = storage;
    return supported;
}

// The product whose time is the peak has the mean square of a sum of products of uniform numbers.
static void test_peak_numbers(void) {
    real *m = (real *)buffer_alloc(3 * PEAK_COUNT * sizeof(real), "a test"); // as matmul_peak_gflops does
    for (int type = GEMM_FP32; type <= (sizeof(real) == sizeof(float) ? GEMM_FP8 : GEMM_FP32); type++)
        for (int storage = STORE_FP32; storage <= (type == GEMM_FP32 ? STORE_FP32 : STORE_BF16); storage++) {
            if (!linear_test_configure((GemmType)type, (LinearStorage)storage)) continue;
            double squares = 0, wanted = PEAK_SIZE / 9.0;
            peak_fill(m);
            peak_product(m);
            for (size_t i = 0; i < (size_t)PEAK_SIZE * PEAK_SIZE; i++)
                squares += pow((double)m[2 * (size_t)PEAK_COUNT + i], 2) / PEAK_SIZE / PEAK_SIZE;
            EXPECT(fabs(squares - wanted) < 0.05 * wanted, "type %d, storage %d: the mean square is %g, not %g", type,
                   storage, squares, wanted);
        }
    linear_configure(GEMM_FP32);
    buffer_free(m);
}

static void test_linear_rounds(void) {
    if (sizeof(real) != sizeof(float)) { // where rounding is an error
        EXPECT(linear_configure(GEMM_FP8) && linear_configure(GEMM_BF16), "a build with doubles rounds");
        return;
    }
    enum { ROWS = LINEAR_TEST_ROWS, IC = LINEAR_IC, OC = LINEAR_OC, LD = LINEAR_LD };
    TestRandom random = {17};
    LinearBuffers own = linear_buffers(), reference = linear_buffers();
    for (int i = 0; i < ROWS * IC; i++)
        own.x[i] = (real)(test_random_real(&random) * exp(4 * test_random_real(&random)));
    for (int i = 0; i < OC * IC; i++) own.w[i] = (real)test_random_real(&random);
    for (int i = 0; i < ROWS * LD; i++) own.dy[i] = (real)(1e-6 * test_random_real(&random));
    for (int type = GEMM_BF16; type <= GEMM_FP8; type++) {
        linear_round_reference(reference.x, own.x, ROWS, IC, IC, (GemmType)type, FP8_ACTIVATION);
        linear_round_reference(reference.w, own.w, OC, IC, IC, (GemmType)type, FP8_WEIGHT);
        linear_round_reference(reference.dy, own.dy, ROWS, OC, LD, (GemmType)type, FP8_GRADIENT);
        linear_start_dw(reference);
        matmul_forward(reference.y, reference.x, reference.w, ROWS, IC, OC, LD);
        matmul_backward(reference.dx, reference.dw, reference.dy, reference.x, reference.w, ROWS, IC, OC, LD, true);
        for (int storage = STORE_FP32; storage <= STORE_BF16; storage++) {
            if (!linear_test_configure((GemmType)type, (LinearStorage)storage)) continue;
            absmax_t max[2] = {0, 0};
            Activation x = activation(own.x, &max[0]), dy = activation(own.dy, &max[1]);
            absmax_update(x, ROWS, IC, IC);
            absmax_update(dy, ROWS, OC, LD);
            Linear w = {own.w, own.dw, buffer_alloc(linear_copy_bytes(IC, OC, false), "a test"), IC, OC, LD};
            size_t need = linear_workspace_bytes(ROWS, IC, OC);
            workspace_poison(need);
            linear_start_dw(own);
            linear_copy_weight(&w);
            linear_forward(own.y, x, &w, ROWS);
            linear_backward(own.dx, dy, x, &w, ROWS, true);
            workspace_check(need, "a linear layer");
            double worst[] = {linear_difference(own.y, reference.y, ROWS, OC, LD),
                              1e6 * linear_difference(own.dx, reference.dx, ROWS, IC, IC),
                              linear_difference(own.dw, reference.dw, OC, IC, IC)};
            // sums of up to 70 products below 50 in fp32
            EXPECT(worst[0] < 2e-3 && worst[1] < 1e-4 && worst[2] < 1e-4,
                   "type %d, %s: y, dx, dweight differ by %.2g, %.2g, %.2g", type,
                   storage == STORE_FP32 ? "wide" : "oneDNN", worst[0], worst[1], worst[2]);
            linear_forward(own.y, x, &w, LINEAR_ROWS - 1);
            matmul_forward(reference.y, own.x, own.w, LINEAR_ROWS - 1, IC, OC, LD);
            bool same = linear_difference(own.y, reference.y, LINEAR_ROWS - 1, OC, LD) == 0;
            EXPECT(same == (type == GEMM_BF16), "type %d: %d rows are %s", type, LINEAR_ROWS - 1,
                   same ? "not rounded" : "rounded");
            matmul_forward(reference.y, reference.x, reference.w, ROWS, IC, OC, LD);
            buffer_free(w.copy);
        }
    }
    linear_configure(GEMM_FP32);
    op_free("a linear layer");
}

// q (T,NQ,D), k and v (T,NKV,D) of one sequence in separate buffers, and their attention
typedef struct {
    AttentionShape s;
    size_t q_count, kv_count, lse_count;
    real *q, *k, *v, *out, *lse;
} AttentionSequence;
static AttentionSequence attention_sequence(int T, double scale) {
    AttentionSequence a;
    TestRandom random = {(uint64_t)T};
    memset(&a.s, 0, sizeof(a.s));
    a.s.B = 1, a.s.T = T, a.s.NQ = 4, a.s.NKV = 2;
    a.s.D = a.s.DV = a.s.q_head = a.s.k_head = a.s.v_head = a.s.o_head = 24;
    a.s.ldq = a.s.ldo = a.s.NQ * a.s.D;
    a.s.ldkv = a.s.NKV * a.s.D;
    a.s.scale = (real)(1 / sqrt(24.0));
    a.q_count = (size_t)(T * a.s.ldq), a.kv_count = (size_t)(T * a.s.ldkv), a.lse_count = (size_t)(T * a.s.NQ);
    a.q = op_alloc_random(&random, a.q_count, scale);
    a.k = op_alloc_random(&random, a.kv_count, scale);
    a.v = op_alloc_random(&random, a.kv_count, 1);
    a.out = op_alloc(a.q_count);
    a.lse = op_alloc(a.lse_count);
    workspace_poison(attention_workspace_bytes(a.s, omp_get_max_threads()));
    attention_forward(a.out, a.lse, a.q, a.k, a.v, a.s);
    return a;
}
static void test_attention_large_scores(void) {
    enum { T = 67 };
    AttentionSequence a = attention_sequence(T, 500); // scores of 1e5: exp overflows unless the maximum is subtracted
    size_t count = a.q_count + 2 * a.kv_count;
    real *dx = op_alloc(count);
    attention_backward(dx, dx + a.q_count, dx + a.q_count + a.kv_count, a.out, a.out, a.lse, a.q, a.k, a.v, a.s, false);
    int bad = op_not_finite(a.out, a.q_count) + op_not_finite(a.lse, a.lse_count) + op_not_finite(dx, count), clear = 0;
    EXPECT(bad == 0, "%d elements of out, lse, dq, dk, dv are not finite", bad);
    for (int row = 0; row < T * a.s.NQ; row++) { // where one key is far ahead, the output is its value
        int D = a.s.D, kv = row % a.s.NQ / (a.s.NQ / a.s.NKV), best = 0;
        double largest = -HUGE_VAL, second = -HUGE_VAL;
        for (int j = 0; j <= row / a.s.NQ; j++) {
            double score = 0;
            for (int i = 0; i < D; i++)
                score += (double)a.s.scale * (double)a.q[row * D + i] * (double)a.k[(j * a.s.NKV + kv) * D + i];
            second = fmax(second, fmin(score, largest));
            if (score > largest) largest = score, best = (j * a.s.NKV + kv) * D;
        }
        if (largest - second < 1000) continue;
        clear++;
        EXPECT(op_same(a.out + row * D, a.v + best, (size_t)D), "row %d: the output is not the best key's value", row);
    }
    EXPECT(clear > T, "only %d rows have a key that is far ahead: the case tests nothing", clear);
    op_free("attention");
}

// A sink far below the scores changes no bit. One far above them makes outputs and gradients 0.
static void test_sink_extremes(void) {
    enum { T = 67, NQ = 4, D = 24 };
    static const double logits[] = {-60, -1e4, -1e30, 100, 1e4, 1e30};
    for (size_t k = 0; k < sizeof(logits) / sizeof(logits[0]); k++) {
        AttentionSequence a = attention_sequence(T, 2);
        real sinks[NQ], dsinks[NQ], *out = op_alloc_copy(a.out, a.q_count), *lse = op_alloc_copy(a.lse, a.lse_count);
        size_t count = a.q_count + 2 * a.kv_count;
        real *dx = op_alloc(count), *plain = op_alloc(count), *v = dx + a.q_count + a.kv_count;
        for (int h = 0; h < NQ; h++) sinks[h] = (real)logits[k], dsinks[h] = 0;
        sink_forward(out, lse, sinks, 1, T, NQ, D);
        sink_backward(dsinks, a.out, out, lse, sinks, 1, T, NQ, D);
        attention_backward(dx, dx + a.q_count, v, a.out, out, lse, a.q, a.k, a.v, a.s, false);
        attention_backward(plain, plain + a.q_count, plain + a.q_count + a.kv_count, a.out, a.out, a.lse, a.q, a.k, a.v,
                           a.s, false);
        int bad = op_not_finite(out, a.q_count) + op_not_finite(lse, a.lse_count) + op_not_finite(dx, count) +
                  op_not_finite(dsinks, NQ);
        EXPECT(bad == 0, "sink %g: %d numbers are not finite", logits[k], bad);
        double largest = op_difference(dsinks, NULL, NQ);
        if (logits[k] < 0)
            EXPECT(op_same(out, a.out, a.q_count) && op_same(lse, a.lse, a.lse_count) && op_same(dx, plain, count),
                   "sink %g: out, lse or a gradient is not plain attention's", logits[k]);
        else largest = fmax(largest, fmax(op_difference(out, NULL, a.q_count), op_difference(dx, NULL, count)));
        EXPECT(largest <= 1e-20, "sink %g: %g is left of what should vanish", logits[k], largest);
        op_free("sink");
    }
}

// The order of magnitudes: numbers, infinity, NaN; whichever thread finds them.
static void test_absmax(void) {
    enum { ROWS = 5, COLUMNS = 37, LD = 40, LAST = (ROWS - 1) * LD + COLUMNS - 1 };
    static const struct {
        real first, last;
        uint32_t max;
    } cases[] = {
        {1, -2, 0x40000000},
        {-0.0f, 0, 0x3F800000}, // the rest is 1
        {(real)-INFINITY, 2, 0x7F800000},
        {2, (real)INFINITY, 0x7F800000},
        {(real)INFINITY, (real)NAN, 0x7FC00000},
        {(real)-NAN, (real)INFINITY, 0x7FC00000},
    };
    int before = omp_get_max_threads();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (int threads = 1; threads <= OP_THREADS; threads++) {
            real x[ROWS * LD];
            for (int e = 0; e < ROWS * LD; e++) x[e] = e % LD < COLUMNS ? 1 : (real)NAN; // rows have gaps
            x[0] = cases[i].first, x[LAST] = cases[i].last;
            absmax_t max = 0, larger = 0x7FFFFFFF;
            omp_set_num_threads(threads);
            absmax_update(activation(x, &max), ROWS, COLUMNS, LD);
            absmax_update(activation(x, &larger), ROWS, COLUMNS, LD);
            absmax_update(activation(x, NULL), ROWS, COLUMNS, LD);
            EXPECT(max == cases[i].max, "case %zu: %08x, not %08x", i, max, cases[i].max);
            EXPECT(larger == 0x7FFFFFFF, "case %zu: a larger magnitude became %08x", i, larger);
        }
    omp_set_num_threads(before);
}

static void test_cross_entropy_extremes(void) {
    enum { V = 4 };
    static const struct {
        double logits[V];
        int target;
        double loss, gradient[V];
    } cases[] = {
        {{1e4, -1e4, 0, 0}, 1, 2e4, {1, -1, 0, 0}},                        // certain and wrong
        {{1e4, -1e4, 0, 0}, 0, 0, {0, 0, 0, 0}},                           // certain and correct
        {{-3e4, -3e4, -3e4, -3e4}, 2, 1.386294361, {.25, .25, -.75, .25}}, // all far below 0: log 4
        {{1e30, 1e30, -1e30, 0}, 0, 0.693147181, {-.5, .5, 0, 0}},         // a tie at the top: log 2
    };
    for (int k = 0; k < (int)(sizeof(cases) / sizeof(cases[0])); k++) {
        real x[V], loss = 0, z = 0;
        double error = 0, tolerance = 1e-9 + 4 * op_epsilon * fabs(cases[k].logits[0]); // losses round as logits do
        for (int v = 0; v < V; v++) x[v] = (real)cases[k].logits[v];
        cross_entropy(&loss, &z, x, &cases[k].target, 1, V, V, 1, 0);
        for (int v = 0; v < V; v++) error = fmax(error, fabs((double)x[v] - cases[k].gradient[v]));
        EXPECT(fabs((double)loss - cases[k].loss) <= tolerance, "case %d: loss %.9g, not %.9g", k, (double)loss,
               cases[k].loss);
        EXPECT(error <= 4 * op_epsilon && op_not_finite(x, V) == 0, "case %d: the gradient is %.3g off", k, error);
    }
}
static void test_cross_entropy_nan(void) {
    enum { N = 3, V = 40 };
    static const int bad[] = {0, 17, 39}, targets[N] = {1, 1, 1}; // first, in a vector, last
    for (int k = 0; k < 3; k++)
        for (int infinite = 0; infinite < 2; infinite++) {
            real x[N * V], z[N], losses[N] = {0, 0, 0};
            for (int i = 0; i < N * V; i++) x[i] = (real)(i % 7);
            x[V + bad[k]] = infinite ? (real)INFINITY : (real)NAN;
            cross_entropy(losses, z, x, targets, N, V, V, 0, 0);
            EXPECT(isnan((double)losses[1]), "%s at %d: the loss is %g", infinite ? "inf" : "NaN", bad[k],
                   (double)losses[1]);
            EXPECT(isfinite((double)(losses[0] + losses[2])), "%s at %d reaches other rows", infinite ? "inf" : "NaN",
                   bad[k]);
        }
}

// --- the operations of the update ---

static double squares_of(const real *x, size_t count) {
    double *sum = (double *)op_alloc_bytes(sizeof(double));
    sum_of_squares(sum, x, count);
    return *sum;
}
static void test_sum_of_squares(void) {
    static const int counts[] = {0, 1, 15, 16, 17, 4095, 4096, 4097, 100003}; // around a part of 16 and all 256 of them
    op_check_all(OP_SUM_OF_SQUARES);
    for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++) {
        size_t count = (size_t)counts[k];
        TestRandom random = {k};
        real *x = op_alloc(count);
        double want = 0;
        for (size_t i = 0; i < count; i++) {
            x[i] = (real)(test_random_int(&random, 2001) - 1000);
            want += (double)x[i] * (double)x[i];
        }
        double got = squares_of(x, count);
        EXPECT(got == want, "count %d: %.17g, not %.17g", counts[k], got, want);
        if (count > 0) {
            x[count - 1] = (real)NAN;
            EXPECT(isnan(squares_of(x, count)), "count %d: the last element is NaN, the sum is not", counts[k]);
            for (size_t i = 0; i < count; i++) x[i] = (real)1e30; // squares beyond fp32
            EXPECT(isfinite(squares_of(x, count)), "count %d: squares overflow", counts[k]);
        }
        op_free("sum_of_squares");
    }
}

// --- vecmath ---

static float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
static void test_exp(void) {
    enum { BLOCK = 1024 };
    const uint32_t step = 467;                                  // prime: all mantissas and exponents get their turn
    uint32_t end[2] = {0x42B09999u, 0x80000000u | 0x42AE9999u}; // 88.3 and -87.3
    for (int side = 0; side < 2; side++)
        for (uint32_t bits = side ? 0x80000000u : 0; bits <= end[side]; bits += step * BLOCK) {
            float x[BLOCK], y[BLOCK]; // a plain loop, so that the vectorized code is what is tested
            for (uint32_t i = 0; i < BLOCK; i++)
                x[i] = float_of_bits(bits + i * step <= end[side] ? bits + i * step : end[side]);
            for (int i = 0; i < BLOCK; i++) y[i] = exp_float(x[i]);
            for (int i = 0; i < BLOCK; i++) {
                double want = exp((double)x[i]), ulp = ldexp(1, ilogb(want) - 23);
                EXPECT(fabs((double)y[i] - want) < 2 * ulp, "exp(%.9g) is %.9g, %.2f ulp off", (double)x[i],
                       (double)y[i], fabs((double)y[i] - want) / ulp);
            }
        }
    static const float low[] = {-87.4f, -100, -1e10f, -3.4e38f, -INFINITY},
                       high[] = {88.4f, 100, 1e10f, 3.4e38f, INFINITY};
    for (int i = 0; i < 5; i++) {
        EXPECT(exp_float(low[i]) == 0, "exp(%g) is %g, not 0", (double)low[i], (double)exp_float(low[i]));
        EXPECT(exp_float(high[i]) > 2.1e38f && isfinite((double)exp_float(high[i])),
               "exp(%g) is %g, not the largest value", (double)high[i], (double)exp_float(high[i]));
    }
    EXPECT(exp_float(0) == 1 && exp_float(-0.0f) == 1, "exp(0) is not 1");
    EXPECT(isnan((double)exp_float(NAN)) && isnan((double)exp_float(-NAN)), "exp(NaN) is a number");
}
static void test_sigmoid(void) {
    for (int i = -4000; i <= 4000; i++) {
        double x = i / 100.0, want = 1 / (1 + exp(-(double)(real)x));
        EXPECT(fabs((double)real_sigmoid((real)x) - want) <= 4 * op_epsilon * want, "sigmoid(%g) is %.9g, not %.9g", x,
               (double)real_sigmoid((real)x), want);
    }
    EXPECT(real_sigmoid((real)1e4) == 1 && (double)real_sigmoid((real)-1e4) < 1e-38, "sigmoid of +-1e4 is not 1 and 0");
    EXPECT(real_sigmoid(0) == (real)0.5, "sigmoid(0) is not 1/2");
    EXPECT(isnan((double)real_sigmoid((real)NAN)), "sigmoid(NaN) is a number");
}

static const Test operations_tests[] = {
    {"exp is within 2 ulp, saturates to 0 and to the largest value, and preserves NaN", test_exp},
    {"the sigmoid is correct to rounding and saturates at 0 and 1", test_sigmoid},
    {"the embedding copies rows, and its backward sums over repeated tokens", test_embedding},
    {"rmsnorm and its backward agree with the definition", test_rmsnorm},
    {"matmul and its backward agree with the definition", test_matmul},
    {"conversion to bf16 rounds to nearest and preserves NaN and infinity", test_bf16_rounding},
    {"the peak is measured with random numbers, in every type and storage", test_peak_numbers},
    {"a linear layer in bf16 or FP8 multiplies rounded matrices, in fp32 and by oneDNN", test_linear_rounds},
    {"rope and its backward agree with the definition", test_rope},
    {"attention and its backward agree with the definition", test_attention},
    {"attention to earlier keys agrees with the definition", test_attention_continues},
    {"attention with windows and its backward agree with the definition", test_attention_windows},
    {"attention of scores of 100,000 is finite and selects the largest", test_attention_large_scores},
    {"attention of two key sets sums the gradients of their shared values", test_attention_sets},
    {"a sink and its backward agree with a softmax with one more column", test_sink},
    {"a sink far below the scores has no effect, one far above makes the output 0", test_sink_extremes},
    {"diff_combine and its backward agree with the definition", test_diff_combine},
    {"diff_attention and its backward agree with the definition", test_diff_attention},
    {"lambdas of layers and their backward agree with the definitions", test_layer_lambda},
    {"scale_inplace scales values and gradients", test_scale},
    {"add_to_sum adds to the sum and copies it", test_add_to_sum},
    {"a cache has the row of position p at p % capacity, and gives rows back in order", test_cache},
    {"attention of one position over a cache agrees with the definition and ignores empty rows", test_decode},
    {"the gates and their backward agree with the definition", test_gate},
    {"the norm of heads and its backward agree with the definition", test_head_norm},
    {"swiglu and its backward agree with the definition", test_swiglu},
    {"the largest magnitude of a tensor with infinity is infinity, and with NaN it is NaN", test_absmax},
    {"cross_entropy and the gradient in its logits agree with the definition", test_cross_entropy},
    {"cross_entropy of extreme logits is finite and correct", test_cross_entropy_extremes},
    {"cross_entropy of a row with NaN or infinity is NaN", test_cross_entropy_nan},
    {"a router, its losses and its backward agree with the definition", test_router},
    {"the operations of experts and their backward agree with the definition", test_experts},
    {"the bytes that the contracts state for each operation are those of its tensors", test_traffic},
    {"adamw agrees with the definition; it updates the master weights, and the parameters are their copies",
     test_adamw},
    {"muon agrees with the definition", test_muon},
    {"muon of vectors, zeros and matrices of rank 1 is finite", test_muon_degenerate},
    {"muon agrees with torch.optim.Muon in fp32", test_muon_reference},
    {"sum_of_squares is exact for integers, deterministic, and propagates NaN", test_sum_of_squares},
};
