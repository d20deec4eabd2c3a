/*
operations.h: every operation against a naive one in double precision, by the engine of operation_engine.h. An
operation is a kind (how its buffers lie, how it is called, what it should give) and a table of shapes, each with
the reason why it is there.
*/
#ifndef TESTS_OPERATIONS_H
#define TESTS_OPERATIONS_H
#include "operation_engine.h"

// --- embedding: x[0] weight (V,C), y (N,C) ---

static void embedding_setup(OpCase *c) {
    c->index_limit = c->d[1];
    c->length = c->d[0];
    op_rows(&c->x[0], "dweight", c->d[1], c->d[2], c->d[2]);
    op_rows(&c->y[0], "x", c->d[0], c->d[2], c->d[2]);
    c->dx[0].adds = true;
}
static void embedding_run_forward(OpCase *c) { embedding_forward(c->y->data, c->index, c->x->data, c->d[0], c->d[2]); }
static void embedding_run_backward(OpCase *c) { embedding_backward(c->dx->data, c->dy, c->index, c->d[0], c->d[2]); }
static void embedding_reference(OpCase *c) {
    for (int i = 0, C = c->d[2]; i < c->d[0] * C; i++) c->y->ref[i] = c->x->ref[c->index[i / C] * C + i % C];
}
static void test_embedding(void) {
    static const OpKind kind = {
        "embedding", "N V C", embedding_setup, embedding_run_forward, embedding_run_backward, embedding_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1},    // the smallest of everything
        {129, 3, 37}, // few tokens, each many times; C one block of columns and a rest
        {7, 257, 64}, // most rows never seen: their gradient stays as it was
        {13, 5, 100}, // C no multiple of 16, 32 or 64
    };
    OP_CHECK_ALL(kind, shapes);
}

// The scratch memory as an operation may find it, all NaN, and whether the operation used more than it asked for.
enum { SCRATCH_TAIL = 1024 };
static void scratch_poison(size_t need) {
    if (ops_workspace.bytes < need + SCRATCH_TAIL) ops_init(need + SCRATCH_TAIL);
    memset(ops_workspace.memory, 0xFF, ops_workspace.bytes);
}
static void scratch_check(size_t need, const char *what) {
    int written = 0;
    const unsigned char *tail = (unsigned char *)ops_workspace.memory + need;
    for (int i = 0; i < SCRATCH_TAIL; i++) written += tail[i] != 0xFF;
    EXPECT(written == 0, "%s: the workspace is too small for %d threads", what, omp_get_max_threads());
}

// --- rmsnorm: x[0] x (N,C), x[1] weight (C), y[0] y (N,C), y[1] rstd (N) ---

#define RMSNORM_EPS 1e-5
static void rmsnorm_setup(OpCase *c) {
    int N = c->d[0], C = c->d[1];
    c->scale = 1.0 / c->d[2];
    c->length = max_int(N, C);
    op_rows(&c->x[0], "dx", N, C, C);
    op_rows(&c->x[1], "dweight", 1, C, C);
    op_rows(&c->y[0], "y", N, C, C);
    op_rows(&c->y[1], "rstd", 1, N, N);
    c->dx[0].adds = c->d[3];
    c->dx[1].adds = true;
}
static void rmsnorm_run_forward(OpCase *c) {
    rmsnorm_forward(c->y[0].data, c->y[1].data, c->x[0].data, c->x[1].data, c->d[0], c->d[1], (real)RMSNORM_EPS);
}
static void rmsnorm_run_backward(OpCase *c) {
    scratch_poison(rmsnorm_workspace_bytes(c->d[1]));
    rmsnorm_backward(c->dx[0].data, c->dx[1].data, c->dy, c->x[0].data, c->x[1].data, c->y[1].data, c->d[0], c->d[1],
                     c->d[3]);
    scratch_check(rmsnorm_workspace_bytes(c->d[1]), c->what);
}
static void rmsnorm_reference(OpCase *c) {
    for (int n = 0, C = c->d[1]; n < c->d[0]; n++) {
        const double *x = c->x->ref + n * C;
        double mean = 0, *y = c->y->ref + n * C;
        for (int i = 0; i < C; i++) mean += x[i] * x[i] / C;
        c->y[1].ref[n] = 1 / sqrt(mean + RMSNORM_EPS);
        for (int i = 0; i < C; i++) y[i] = x[i] * c->y[1].ref[n] * c->x[1].ref[i];
    }
}
static void test_rmsnorm(void) {
    static const OpKind kind = {"rmsnorm",           "N C 1/scale add",    rmsnorm_setup,
                                rmsnorm_run_forward, rmsnorm_run_backward, rmsnorm_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 200, 1},   // one element: but for eps, its gradient would vanish
        {7, 64, 1, 0},    // exactly one block of columns
        {13, 130, 1, 1},  // C two blocks of 64 and a rest of 2
        {3, 37, 200, 0},  // rows so small that eps counts as much as they do
        {129, 100, 1, 1}, // C no multiple of 16; many rows for dweight
    };
    OP_CHECK_ALL(kind, shapes);
    real x[5] = {0, 0, 0, 0, 0}, weight[5] = {1, 2, 3, 4, 5}, y[5], rstd; // a row of zeros
    rmsnorm_forward(y, &rstd, x, weight, 1, 5, (real)RMSNORM_EPS);
    EXPECT(y[0] == 0 && y[4] == 0 && isfinite((double)rstd), "zeros became %g, rstd %g", (double)y[0], (double)rstd);
}

// --- matmul: x[0] x (N,IC), x[1] weight (OC,IC), y (N,OC) with row stride ldy ---

static void matmul_setup(OpCase *c) {
    const int *d = c->d;
    c->length = max_int(d[0], max_int(d[1], d[2]));
    c->threads_change_sums = true;
    op_rows(&c->x[0], "dx", d[0], d[1], d[1]);
    op_rows(&c->x[1], "dweight", d[2], d[1], d[1]);
    op_rows(&c->y[0], "y", d[0], d[2], d[3]);
    c->dx[1].adds = d[4];
}
static void matmul_run_forward(OpCase *c) {
    const int *d = c->d;
    matmul_forward(c->y->data, c->x[0].data, c->x[1].data, d[0], d[1], d[2], d[3]);
}
static void matmul_run_backward(OpCase *c) {
    const int *d = c->d;
    matmul_backward(c->dx[0].data, c->dx[1].data, c->dy, c->x[0].data, c->x[1].data, d[0], d[1], d[2], d[3], d[4]);
}
static void matmul_reference(OpCase *c) {
    for (int i = 0, IC = c->d[1], OC = c->d[2]; i < c->d[0] * OC; i++) {
        double *y = c->y->ref + i / OC * c->d[3] + i % OC;
        *y = 0;
        for (int j = 0; j < IC; j++) *y += c->x[0].ref[i / OC * IC + j] * c->x[1].ref[i % OC * IC + j];
    }
}
static void test_matmul(void) {
    static const OpKind kind = {"matmul",           "N IC OC ldy add",   matmul_setup,
                                matmul_run_forward, matmul_run_backward, matmul_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1, 1, 1},       // the smallest
        {7, 37, 5, 64, 1},     // a fused row padded to 64: columns 5 .. 63 belong to nobody
        {67, 64, 129, 192, 0}, // one past a multiple of 64, padded
        {13, 300, 1, 64, 1},   // one output column, as lambda has with one head
        {1, 16, 48, 48, 0},    // one row, as in generation; no padding
    };
    OP_CHECK_ALL(kind, shapes);
}

// bf16 has the upper half of a float's bits: against the conversion of files, which goes by the exact value.
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

// In bf16 the products are those of the rounded matrices, whoever multiplies; few rows are not rounded.
static void test_matmul_bf16(void) {
    if (sizeof(real) != sizeof(float)) return; // there --gemm bf16 is refused
    enum { IC = 40, OC = 70, LDY = 80, ROWS = 50 };
    TestRandom random = {17};
    real *x[2] = {op_alloc_random(&random, ROWS * IC, 1), NULL}, *w[2] = {op_alloc_random(&random, OC * IC, 1), NULL};
    real *dy[2] = {op_alloc_random(&random, ROWS * LDY, 1), NULL}, *y[2], *dx[2], *dw[2];
    for (int i = 0; i < 2; i++) {
        y[i] = op_alloc(ROWS * LDY), dx[i] = op_alloc(ROWS * IC), dw[i] = op_alloc(OC * IC);
        for (int j = 0; j < OC * IC; j++) dw[i][j] = (real)j / 1000;
    }
    x[1] = op_alloc(ROWS * IC), w[1] = op_alloc(OC * IC), dy[1] = op_alloc(ROWS * LDY);
    bf16_round_matrix_wide((float *)(void *)x[1], IC, (float *)(void *)x[0], IC, ROWS, IC);
    bf16_round_matrix_wide((float *)(void *)w[1], IC, (float *)(void *)w[0], IC, OC, IC);
    bf16_round_matrix_wide((float *)(void *)dy[1], LDY, (float *)(void *)dy[0], LDY, ROWS, LDY);
    matmul_forward(y[1], x[1], w[1], ROWS, IC, OC, LDY);
    matmul_backward(dx[1], dw[1], dy[1], x[1], w[1], ROWS, IC, OC, LDY, true);
    for (int native = 0; native < 2; native++) {
        matmul_use_bf16(true);
#ifdef ONEDNN
        // oneDNN widens bf16 on CPUs with AVX-512 that do not multiply it: its way can be tried on those too
        matmul_bf16_native = native && (bf16_begin() || bf16_probe());
#endif
        if (matmul_bf16_native != (native == 1)) break;
        size_t need = matmul_workspace_bytes(ROWS, IC, OC);
        scratch_poison(need);
        for (int j = 0; j < OC * IC; j++) dw[0][j] = (real)j / 1000;
        matmul_forward(y[0], x[0], w[0], ROWS, IC, OC, LDY);
        matmul_backward(dx[0], dw[0], dy[0], x[0], w[0], ROWS, IC, OC, LDY, true);
        scratch_check(need, "matmul in bf16");
        double worst[3] = {0, 0, 0};
        for (int i = 0; i < ROWS * OC; i++)
            worst[0] = fmax(worst[0], fabs((double)(y[0][i / OC * LDY + i % OC] - y[1][i / OC * LDY + i % OC])));
        for (int i = 0; i < ROWS * IC; i++) worst[1] = fmax(worst[1], fabs((double)(dx[0][i] - dx[1][i])));
        for (int i = 0; i < OC * IC; i++) worst[2] = fmax(worst[2], fabs((double)(dw[0][i] - dw[1][i])));
        EXPECT(worst[0] < 1e-5 && worst[1] < 1e-5 && worst[2] < 1e-5, "%s: y, dx, dweight differ by %.2g, %.2g, %.2g",
               native ? "oneDNN" : "wide", worst[0], worst[1], worst[2]);
        matmul_forward(y[0], x[0], w[0], BF16_ROWS - 1, IC, OC, LDY);
        matmul_use_bf16(false);
        matmul_forward(dy[1], x[0], w[0], BF16_ROWS - 1, IC, OC, LDY);
        bool same = true;
        for (int i = 0; i < (BF16_ROWS - 1) * OC; i++)
            same &= y[0][i / OC * LDY + i % OC] == dy[1][i / OC * LDY + i % OC];
        EXPECT(same, "%d rows were rounded", BF16_ROWS - 1);
    }
    matmul_use_bf16(false);
    op_free("matmul in bf16");
}

// --- rope: x[0] and y (N,heads,D) with row stride ldx; in place, so runs copy first ---

#define ROPE_THETA 10000.0
static void rope_setup(OpCase *c) {
    const int *d = c->d;
    c->length = 2;
    c->table = op_alloc((size_t)(OP_ROWS * d[3]));
    rope_table(c->table, OP_ROWS, d[3], ROPE_THETA);
    op_view(&c->x[0], "dx", 0, d[0] * d[1], d[2], d[3], d[4], d[3]);
    op_view(&c->y[0], "x", 0, d[0] * d[1], d[2], d[3], d[4], d[3]);
}
static void rope_copy(real *to, const real *from, const OpView *v) {
    for (size_t i = 0; i < op_size(v); i++) to[op_at(v, i)] = from[op_at(v, i)];
}
static void rope_run_forward(OpCase *c) {
    rope_copy(c->y->data, c->x->data, c->y->view);
    rope_forward(c->y->data, c->table, c->d[0], c->d[1], c->d[2], c->d[3], c->d[4], c->d[5]);
}
static void rope_run_backward(OpCase *c) {
    rope_copy(c->dx->data, c->dy, c->y->view);
    rope_backward(c->dx->data, c->table, c->d[0], c->d[1], c->d[2], c->d[3], c->d[4], c->d[5]);
}
static void rope_reference(OpCase *c) {
    for (size_t i = 0; i < op_size(c->y->view); i++) {
        size_t at = op_at(c->y->view, i), D = (size_t)c->d[3], T = (size_t)c->d[1], half = D / 2;
        size_t t = (size_t)c->d[5] + i / D / (size_t)c->d[2] % T;
        double angle = (double)t * pow(ROPE_THETA, -2.0 * (double)(i % half) / (double)D);
        const double *x = c->x->ref + at;
        c->y->ref[at] =
            i % D < half ? cos(angle) * x[0] - sin(angle) * x[half] : cos(angle) * x[0] + sin(angle) * *(x - half);
    }
}
static void test_rope(void) {
    static const OpKind kind = {"rope",           "B T heads D ldx first", rope_setup,
                                rope_run_forward, rope_run_backward,       rope_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1, 2, 2, 0},       // one position, one pair
        {3, 7, 2, 8, 40, 0},      // each of several sequences starts at `first`; columns beyond the heads
        {1, 13, 5, 40, 200, 0},   // D no power of two
        {2, 3, 1, 6, 64, 0},      // an odd number of pairs
        {1, 7, 2, 256, 512, 130}, // the widest head, far positions
    };
    OP_CHECK_ALL(kind, shapes);
}
static void test_rope_properties(void) {
    enum { T = 67, D = 40, HEADS = 3, LD = HEADS * D, COUNT = T * LD, PAST = 60 * LD };
    TestRandom random = {3};
    real *table = op_alloc(T * D), *x = op_alloc_random(&random, COUNT, 1), *y = op_alloc_copy(x, COUNT);
    real *tail = op_alloc_copy(x + PAST, COUNT - PAST), *constant = op_alloc(COUNT);
    rope_table(table, T, D, ROPE_THETA);
    rope_forward(y, table, 1, T, HEADS, D, LD, 0);
    rope_forward(tail, table, 1, T - PAST / LD, HEADS, D, LD, PAST / LD);
    EXPECT(op_same(y + PAST, tail, COUNT - PAST), "rows from position %d on differ from the whole's", PAST / LD);
    for (int h = 0; h < T * HEADS; h++) {
        double before = 0, after = 0;
        for (int i = h * D; i < (h + 1) * D; i++) {
            before += (double)x[i] * (double)x[i];
            after += (double)y[i] * (double)y[i];
        }
        EXPECT(fabs(after - before) <= 8 * op_epsilon * before, "head %d: squared norm %.9g became %.9g", h, before,
               after);
    }
    rope_backward(y, table, 1, T, HEADS, D, LD, 0);
    double largest = 0;
    for (int i = 0; i < COUNT; i++) largest = fmax(largest, fabs((double)y[i] - (double)x[i]));
    EXPECT(largest <= 8 * op_epsilon, "forward and backward do not cancel: %.3g", largest);
    // <rope(q, m), rope(k, n)> depends on m - n alone: head 0 is q, head 1 is k, the same at all positions
    for (int i = 0; i < COUNT; i++) constant[i] = x[i % LD];
    rope_forward(constant, table, 1, T, HEADS, D, LD, 0);
    for (int n = 0; n < T; n++)
        for (int m = n; m < T; m++) {
            double here = 0, at_zero = 0;
            for (int i = 0; i < D; i++) {
                here += (double)constant[m * LD + i] * (double)constant[n * LD + D + i];
                at_zero += (double)constant[(m - n) * LD + i] * (double)constant[D + i];
            }
            EXPECT(fabs(here - at_zero) <= 8 * op_epsilon * D * T, "positions %d, %d: %.9g, not %.9g", m, n, here,
                   at_zero);
        }
    op_free("rope");
}

// --- attention: x[0] fused rows [q | k | v | padding], y[0] out (N,NQ,DV), y[1] lse (B,NQ,T) ---
// With `maps` 2 the heads of two attention maps interleave, [heads][2][width]; the second is the one under test.

static AttentionShape attention_shape(const int *d) { // B, T, NQ, NKV, D, DV, maps, padding
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = d[0], s.T = d[1], s.NQ = d[2], s.NKV = d[3], s.D = d[4], s.DV = d[5];
    s.q_head = s.k_head = d[6] * s.D;
    s.v_head = s.DV;
    s.o_head = d[6] * s.DV;
    s.ldq = s.ldkv = (s.NQ + s.NKV) * s.q_head + s.NKV * s.DV + d[7];
    s.ldo = s.NQ * s.o_head + d[7];
    s.scale = (real)(1 / sqrt((double)s.D));
    return s;
}
static void attention_setup(OpCase *c) {
    AttentionShape s = c->s = attention_shape(c->d);
    int rows = s.B * s.T, map = c->d[6] - 1;
    size_t k_at = (size_t)(s.NQ * s.q_head), v_at = k_at + (size_t)(s.NKV * s.k_head), of_map = (size_t)(map * s.D);
    c->scale = 2;                      // scores spread enough for some keys to matter more than others
    c->length = 4 * max_int(s.T, s.D); // errors of scores grow with their size, up to 4
    op_view(&c->x[0], "dq", of_map, rows, s.NQ, s.D, s.ldq, s.q_head);
    op_view(&c->x[0], "dk", k_at + of_map, rows, s.NKV, s.D, s.ldkv, s.k_head);
    op_view(&c->x[0], "dv", v_at, rows, s.NKV, s.DV, s.ldkv, s.v_head);
    op_view(&c->y[0], "out", (size_t)(map * s.DV), rows, s.NQ, s.DV, s.ldo, s.o_head);
    op_rows(&c->y[1], "lse", s.B * s.NQ, s.T, s.T);
}
static size_t attention_need(AttentionShape s) {
    return attention_workspace_bytes(s, max_int(OP_THREADS, omp_get_max_threads()));
}
static void workspace_poison(AttentionShape s) { scratch_poison(attention_need(s)); }
static void workspace_check(AttentionShape s, const char *what) {
    scratch_check(attention_workspace_bytes(s, omp_get_max_threads()), what);
}
static void attention_run_forward(OpCase *c) {
    const real *q = c->x->data + c->x->view[0].offset, *k = c->x->data + c->x->view[1].offset;
    workspace_poison(c->s);
    attention_forward(c->y[0].data + c->y->view->offset, c->y[1].data, q, k, c->x->data + c->x->view[2].offset, c->s);
    workspace_check(c->s, c->what);
}
static void attention_run_backward(OpCase *c) {
    size_t q = c->x->view[0].offset, k = c->x->view[1].offset, v = c->x->view[2].offset, o = c->y->view->offset;
    const real *x = c->x->data;
    real *dx = c->dx->data;
    workspace_poison(c->s);
    attention_backward(dx + q, dx + k, dx + v, c->dy + o, c->y[0].data + o, c->y[1].data, x + q, x + k, x + v, c->s,
                       false);
    workspace_check(c->s, c->what);
}
// The definition, for heads that begin at these elements; `sinks` has one more logit per head, NULL: there is none.
static void attention_define(OpCase *c, size_t q_at, size_t k_at, size_t v_at, size_t out_at, size_t lse_at,
                             const double *sinks) {
    AttentionShape s = c->s;
#pragma omp parallel for
    for (int bh = 0; bh < s.B * s.NQ; bh++) {
        int b = bh / s.NQ, h = bh % s.NQ, kv = h / (s.NQ / s.NKV);
        const double *x = c->x->ref + b * s.T * s.ldq, *q = x + q_at + h * s.q_head;
        const double *k = x + k_at + kv * s.k_head, *v = x + v_at + kv * s.v_head;
        for (int t = 0; t < s.T; t++) {
            double sum = sinks ? exp(sinks[h]) : 0, *out = c->y->ref + out_at + (b * s.T + t) * s.ldo + h * s.o_head;
            for (int i = 0; i < s.DV; i++) out[i] = 0;
            for (int j = 0; j <= t; j++) {
                double score = 0;
                for (int i = 0; i < s.D; i++) score += q[t * s.ldq + i] * k[j * s.ldkv + i];
                double p = exp(score * (double)s.scale); // scores are small: no maximum is needed
                sum += p;
                for (int i = 0; i < s.DV; i++) out[i] += p * v[j * s.ldkv + i];
            }
            for (int i = 0; i < s.DV; i++) out[i] /= sum;
            c->y[1].ref[lse_at + (size_t)(bh * s.T + t)] = log(sum);
        }
    }
}
static void attention_reference(OpCase *c) {
    const OpView *v = c->x->view;
    attention_define(c, v[0].offset, v[1].offset, v[2].offset, c->y->view->offset, 0, NULL);
}
static void test_attention(void) {
    static const OpKind kind = {"attention",           "B T NQ NKV D DV maps padding", attention_setup,
                                attention_run_forward, attention_run_backward,         attention_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1, 1, 8, 8, 1, 0},      // one key: the output is its value, dq = dk = 0
        {1, 7, 6, 1, 16, 16, 1, 13},   // one KV head for all queries; padded rows, as for lambda
        {3, 13, 2, 2, 8, 8, 1, 0},     // several sequences, NKV = NQ, prime T
        {1, 64, 3, 3, 8, 8, 1, 64},    // exactly one panel of keys (fp32, AVX-512)
        {1, 96, 6, 2, 16, 16, 1, 5},   // exactly one block of rows; groups of 3
        {2, 97, 2, 1, 40, 40, 1, 0},   // one past it; D no multiple of a vector
        {1, 193, 2, 2, 24, 72, 1, 0},  // one past a block of keys; wider values
        {1, 389, 2, 1, 16, 16, 1, 3},  // three blocks of keys, five of rows, prime T
        {1, 13, 2, 1, 256, 256, 1, 0}, // the widest head
        {3, 7, 4, 2, 8, 16, 2, 6},     // diff_v1: interleaved key sets, value heads of width 2D
        {1, 199, 2, 1, 8, 16, 2, 0},   // the same beyond one block of keys
    };
    OP_CHECK_ALL(kind, shapes);
}

// --- attention of two key sets that read the same values: buffers as above, both sets under test ---
// As the trainer runs diff_v1 and diff_scalar: query and key heads are [heads][2][D], set m has the m-th of each two,
// its output is the m-th of each two output heads, and lse is (2,B,NQ,T). The second call adds to dv.

typedef struct {
    size_t q, k, v, out, lse; // first elements of a set
} AttentionSet;
static AttentionSet attention_set(const OpCase *c, int set) {
    AttentionShape s = c->s;
    AttentionSet a;
    a.q = (size_t)(set * s.D);
    a.k = (size_t)(s.NQ * s.q_head + set * s.D);
    a.v = (size_t)(s.NQ * s.q_head + s.NKV * s.k_head);
    a.out = (size_t)(set * s.DV);
    a.lse = (size_t)(set * s.B * s.NQ * s.T);
    return a;
}
static void attention_sets_setup(OpCase *c) {
    AttentionShape s = c->s = attention_shape(c->d);
    AttentionSet first = attention_set(c, 0);
    int rows = s.B * s.T;
    c->scale = 2;
    c->length = 4 * max_int(s.T, s.D);
    op_view(&c->x[0], "dq", first.q, rows, 2 * s.NQ, s.D, s.ldq, s.D);
    op_view(&c->x[0], "dk", first.k, rows, 2 * s.NKV, s.D, s.ldkv, s.D);
    op_view(&c->x[0], "dv", first.v, rows, s.NKV, s.DV, s.ldkv, s.v_head);
    op_view(&c->y[0], "out", 0, rows, 2 * s.NQ, s.DV, s.ldo, s.DV);
    op_rows(&c->y[1], "lse", 2 * s.B * s.NQ, s.T, s.T);
}
static void attention_sets_run_forward(OpCase *c) {
    const real *x = c->x->data;
    for (int set = 0; set < 2; set++) {
        AttentionSet a = attention_set(c, set);
        workspace_poison(c->s);
        attention_forward(c->y[0].data + a.out, c->y[1].data + a.lse, x + a.q, x + a.k, x + a.v, c->s);
    }
}
static void attention_sets_run_backward(OpCase *c) {
    const real *x = c->x->data;
    real *dx = c->dx->data;
    for (int set = 0; set < 2; set++) {
        AttentionSet a = attention_set(c, set);
        workspace_poison(c->s);
        attention_backward(dx + a.q, dx + a.k, dx + a.v, c->dy + a.out, c->y[0].data + a.out, c->y[1].data + a.lse,
                           x + a.q, x + a.k, x + a.v, c->s, set > 0);
    }
}
static void attention_sets_reference(OpCase *c) {
    for (int set = 0; set < 2; set++) {
        AttentionSet a = attention_set(c, set);
        attention_define(c, a.q, a.k, a.v, a.out, a.lse, NULL);
    }
}
static void test_attention_sets(void) {
    static const OpKind kind = {"attention of two key sets", "B T NQ NKV D DV maps padding", attention_sets_setup,
                                attention_sets_run_forward,  attention_sets_run_backward,    attention_sets_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1, 1, 8, 16, 2, 0},    // one key: dv is the sum of both gradients of the output
        {2, 13, 6, 2, 8, 16, 2, 11},  // diff_v1: values of width 2D, groups of 3, padded rows
        {1, 7, 3, 3, 20, 40, 2, 64},  // diff_scalar: half-width keys, values of a whole head; D no multiple of 16
        {1, 199, 2, 1, 8, 16, 2, 0},  // beyond one block of keys
        {1, 5, 2, 1, 256, 512, 2, 0}, // the widest head, values of twice its width
    };
    OP_CHECK_ALL(kind, shapes);
}

// q (T,NQ,D), k and v (T,NKV,D) of one sequence, in separate buffers, and what comes of them
typedef struct {
    AttentionShape s;
    size_t q_count, kv_count, lse_count;
    real *q, *k, *v, *out, *lse;
} AttentionSequence;
static AttentionSequence attention_sequence(int T, double scale) {
    AttentionSequence a;
    const int d[8] = {1, T, 4, 2, 24, 24, 1, 0};
    TestRandom random = {(uint64_t)T};
    a.s = attention_shape(d);
    a.s.ldq = a.s.ldo = a.s.NQ * a.s.D;
    a.s.ldkv = a.s.NKV * a.s.D;
    a.q_count = (size_t)(T * a.s.ldq), a.kv_count = (size_t)(T * a.s.ldkv), a.lse_count = (size_t)(T * a.s.NQ);
    a.q = op_alloc_random(&random, a.q_count, scale);
    a.k = op_alloc_random(&random, a.kv_count, scale);
    a.v = op_alloc_random(&random, a.kv_count, 1);
    a.out = op_alloc(a.q_count);
    a.lse = op_alloc(a.lse_count);
    workspace_poison(a.s);
    attention_forward(a.out, a.lse, a.q, a.k, a.v, a.s);
    return a;
}
static void test_attention_is_causal(void) {
    enum { T = 295 };
    // the first, around the blocks' ends, all but one
    static const int last[] = {0, 12, 94, 95, 96, 190, 191, 192, 293};
    for (size_t i = 0; i < sizeof(last) / sizeof(last[0]); i++) {
        AttentionSequence a = attention_sequence(T, 2);
        size_t rows = (size_t)last[i] + 1, at = rows * (size_t)a.s.ldq;
        TestRandom random = {99};
        for (size_t j = rows * (size_t)a.s.ldkv; j < a.kv_count; j++) {
            a.k[j] = (real)(3 * test_random_real(&random));
            a.v[j] = (real)(3 * test_random_real(&random));
        }
        real *out = op_alloc(a.q_count), *lse = op_alloc(a.lse_count);
        attention_forward(out, lse, a.q, a.k, a.v, a.s);
        EXPECT(op_same(out, a.out, at), "other keys after row %d changed an output up to it", last[i]);
        EXPECT(!op_same(out + at, a.out + at, a.q_count - at), "other keys after row %d changed nothing", last[i]);
        for (int h = 0; h < a.s.NQ; h++)
            EXPECT(op_same(lse + h * T, a.lse + h * T, rows), "other keys after row %d changed lse, head %d", last[i],
                   h);
        op_free("attention");
    }
}
static void test_attention_generates(void) {
    enum { T = 307 };
    static const int first[] = {1, 63, 96, 191, 192, 193, 306}; // around the blocks; 306: one new row, as in generation
    AttentionSequence a = attention_sequence(T, 2);
    double tolerance = 8 * op_epsilon * sqrt(4.0 * T);
    for (size_t i = 0; i < sizeof(first) / sizeof(first[0]); i++) {
        AttentionShape s = a.s;
        s.first = first[i];
        s.T = T - first[i];
        size_t at = (size_t)(first[i] * s.ldq), count = a.q_count - at;
        real *out = op_alloc(count), *lse = op_alloc((size_t)(s.NQ * s.T)), *no_lse = op_alloc(count);
        workspace_poison(s);
        attention_forward(out, lse, a.q + at, a.k, a.v, s);
        workspace_check(s, "generation");
        attention_forward(no_lse, NULL, a.q + at, a.k, a.v, s);
        EXPECT(op_same(out, no_lse, count), "first %d: the output depends on whether lse is wanted", first[i]);
        double error = 0;
        for (size_t j = 0; j < count; j++) error = fmax(error, fabs((double)out[j] - (double)a.out[at + j]));
        for (int h = 0; h < s.NQ; h++)
            for (int t = 0; t < s.T; t++)
                error = fmax(error, fabs((double)lse[h * s.T + t] - (double)a.lse[h * T + first[i] + t]));
        EXPECT(error <= tolerance, "first %d: rows are %.3g off the whole's, tolerance %.3g", first[i], error,
               tolerance);
    }
    op_free("attention");
}
// Documents in a row that do not see each other, against each of them alone: outputs, lse and gradients.
static void test_attention_documents(void) {
    enum { T = 421, DOCUMENTS = 6 };
    static const int starts[DOCUMENTS + 1] = {0, 1, 7, 190, 195, 400, T}; // one token, within a block, across blocks
    AttentionSequence a = attention_sequence(T, 2);
    size_t count = a.q_count + 2 * a.kv_count;
    int first_key[T];
    for (int d = 0; d < DOCUMENTS; d++)
        for (int t = starts[d]; t < starts[d + 1]; t++) first_key[t] = starts[d];
    real *dout = op_alloc(a.q_count), *dx = op_alloc(count), *alone = op_alloc(count);
    TestRandom random = {5};
    for (size_t i = 0; i < a.q_count; i++) dout[i] = (real)test_random_real(&random);
    real *out = op_alloc(a.q_count), *lse = op_alloc(a.lse_count);
    AttentionShape s = a.s;
    s.first_key = first_key;
    workspace_poison(s);
    attention_forward(out, lse, a.q, a.k, a.v, s);
    attention_backward(dx, dx + a.q_count, dx + a.q_count + a.kv_count, dout, out, lse, a.q, a.k, a.v, s, false);
    double error = 0, tolerance = 8 * op_epsilon * sqrt(4.0 * T);
    for (int d = 0; d < DOCUMENTS; d++) {
        size_t q = (size_t)(starts[d] * s.ldq), kv = (size_t)(starts[d] * s.ldkv), at = 0;
        AttentionShape one = a.s;
        one.T = starts[d + 1] - starts[d];
        real *o = op_alloc((size_t)(one.T * s.ldo)), *l = op_alloc((size_t)(one.T * s.NQ));
        attention_forward(o, l, a.q + q, a.k + kv, a.v + kv, one);
        attention_backward(alone + q, alone + a.q_count + kv, alone + a.q_count + a.kv_count + kv, dout + q, o, l,
                           a.q + q, a.k + kv, a.v + kv, one, false);
        for (int h = 0; h < s.NQ; h++)
            for (int t = 0; t < one.T; t++, at++)
                error = fmax(error, fabs((double)l[at] - (double)lse[h * T + starts[d] + t]));
        for (int i = 0; i < one.T * s.ldo; i++) error = fmax(error, fabs((double)o[i] - (double)out[q + (size_t)i]));
    }
    EXPECT(error <= tolerance, "outputs are %.3g off those of the documents alone, tolerance %.3g", error, tolerance);
    error = 0;
    for (size_t i = 0; i < count; i++) error = fmax(error, fabs((double)dx[i] - (double)alone[i]));
    EXPECT(error <= 4 * tolerance, "gradients are %.3g off those of the documents alone, tolerance %.3g", error,
           4 * tolerance);
    op_free("attention");
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

// --- sink: x[0] fused rows [q | k | v | padding], x[1] sinks (NQ), y[0] out (N,NQ,DV), y[1] lse (B,NQ,T) ---
// sink_forward after attention_forward against the definition with one more column, and their two backwards.

static void sink_setup(OpCase *c) { // attention's, and whether sinks are learned
    int d[OP_DIMS];
    memcpy(d, c->d, sizeof(d));
    d[6] = 1;
    AttentionShape s = c->s = attention_shape(d);
    c->s.ldo = s.NQ * s.o_head; // sink_forward takes its rows without padding
    int rows = s.B * s.T, k_at = s.NQ * s.D, v_at = k_at + s.NKV * s.D;
    c->scale = 2;
    c->length = 4 * max_int(s.B * s.T, s.D);
    op_view(&c->x[0], "dq", 0, rows, s.NQ, s.D, s.ldq, s.q_head);
    op_view(&c->x[0], "dk", (size_t)k_at, rows, s.NKV, s.D, s.ldkv, s.k_head);
    op_view(&c->x[0], "dv", (size_t)v_at, rows, s.NKV, s.DV, s.ldkv, s.v_head);
    if (c->d[6]) op_rows(&c->x[1], "dsinks", 1, s.NQ, s.NQ);
    c->dx[1].adds = true;
    op_rows(&c->y[0], "out", rows, s.NQ * s.DV, s.NQ * s.DV);
    op_rows(&c->y[1], "lse", s.B * s.NQ, s.T, s.T);
}
static void sink_run_forward(OpCase *c) {
    attention_run_forward(c);
    sink_forward(c->y[0].data, c->y[1].data, c->x[1].data, c->s.B, c->s.T, c->s.NQ, c->s.DV);
}
static void sink_run_backward(OpCase *c) {
    if (c->d[6])
        sink_backward(c->dx[1].data, c->dy, c->y[0].data, c->y[1].data, c->x[1].data, c->s.B, c->s.T, c->s.NQ, c->s.DV);
    attention_run_backward(c);
}
static void sink_reference(OpCase *c) {
    static const double zeros[OP_ROWS];
    const OpView *v = c->x->view;
    attention_define(c, v[0].offset, v[1].offset, v[2].offset, 0, 0, c->d[6] ? c->x[1].ref : zeros);
}
static void test_sink(void) {
    static const OpKind kind = {
        "sink", "B T NQ NKV D DV learned padding", sink_setup, sink_run_forward, sink_run_backward, sink_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1, 1, 8, 8, 0, 0},     // one key beside the sink: dq and dk are no longer 0
        {1, 1, 1, 1, 8, 8, 1, 0},     // the same, learned
        {2, 13, 6, 2, 16, 16, 0, 9},  // off_by_one: groups, padded rows
        {2, 13, 6, 2, 16, 16, 1, 9},  // several sequences add to one gradient of a sink
        {1, 67, 5, 1, 8, 40, 1, 0},   // beyond one block; values wider than keys, no multiple of 16
        {1, 7, 2, 1, 256, 256, 1, 0}, // the widest head
    };
    OP_CHECK_ALL(kind, shapes);
}
// A sink far below the scores is none, to the last bit; one far above takes everything and leaves no gradient.
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
        double largest = 0;
        for (int h = 0; h < NQ; h++) largest = fmax(largest, fabs((double)dsinks[h]));
        if (logits[k] < 0)
            EXPECT(op_same(out, a.out, a.q_count) && op_same(lse, a.lse, a.lse_count) && op_same(dx, plain, count),
                   "sink %g: out, lse or a gradient is not plain attention's", logits[k]);
        else {
            for (size_t i = 0; i < a.q_count; i++) largest = fmax(largest, fabs((double)out[i]));
            for (size_t i = 0; i < count; i++) largest = fmax(largest, fabs((double)dx[i]));
        }
        EXPECT(largest <= 1e-20, "sink %g: %g is left of what should vanish", logits[k], largest);
        op_free("sink");
    }
}

// --- diff_combine: x[0] a (N,2NH,D), x[1] l (N,NH) with row stride ldl, y (N,NH,D) ---

static void diff_combine_setup(OpCase *c) {
    int N = c->d[0], NH = c->d[1], D = c->d[2];
    c->scale = 3; // lambdas between 0.05 and 0.95
    c->length = D;
    op_rows(&c->x[0], "da", N, 2 * NH * D, 2 * NH * D);
    op_rows(&c->x[1], "dl", N, NH, c->d[3]);
    op_rows(&c->y[0], "o", N, NH * D, NH * D);
}
static void diff_combine_run_forward(OpCase *c) {
    const int *d = c->d;
    diff_combine_forward(c->y->data, c->x[0].data, c->x[1].data, d[0], d[1], d[2], d[3], d[4], d[5]);
}
static void diff_combine_run_backward(OpCase *c) {
    const int *d = c->d;
    diff_combine_backward(c->dx[0].data, c->dx[1].data, c->dy, c->x[0].data, c->x[1].data, d[0], d[1], d[2], d[3], d[4],
                          d[5]);
}
static void diff_combine_reference(OpCase *c) {
    int NH = c->d[1], D = c->d[2];
    for (int i = 0; i < c->d[0] * NH * D; i++) {
        int n = i / D / NH, h = i / D % NH, h1 = c->d[4] == 1 ? 2 * h : h, h2 = c->d[4] == 1 ? 2 * h + 1 : h + NH;
        const double *a = c->x[0].ref + n * 2 * NH * D + i % D;
        double l = c->x[1].ref[n * c->d[3] + h];
        c->y->ref[i] = a[h1 * D] - a[h2 * D] * (c->d[5] ? 1 / (1 + exp(-l)) : l);
    }
}
static void test_diff_combine(void) {
    static const OpKind kind = {"diff_combine",           "N NH D ldl stride sigmoid", diff_combine_setup,
                                diff_combine_run_forward, diff_combine_run_backward,   diff_combine_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1, 1, 1, 1},   // one pair of one element
        {7, 3, 8, 64, 1, 1},  // odd NH; l in a row padded to 64
        {13, 4, 40, 4, 1, 1}, // D no multiple of 16
        {7, 3, 8, 64, 3, 1},  // pairs (h, h + NH)
        {3, 5, 256, 5, 5, 1}, // the widest head
        {7, 3, 8, 64, 1, 0},  // the factor is l itself
    };
    OP_CHECK_ALL(kind, shapes);
}
static void test_diff_combine_pairs(void) {
    enum { NH = 4 };
    static const int pairs[][1 + 2 * NH] = {
        // stride, then the two heads of each pair
        {1, 0, 1, 2, 3, 4, 5, 6, 7}, // diff_v2
        {2, 0, 2, 1, 3, 4, 6, 5, 7}, // between the two
        {4, 0, 4, 1, 5, 2, 6, 3, 7}, // diff_v2_cross_group
    };
    for (size_t k = 0; k < sizeof(pairs) / sizeof(pairs[0]); k++) {
        real a[2 * NH], l[NH] = {0, 0, 0, 0}, o[NH], da[2 * NH], dl[NH], g[NH] = {1, 2, 4, 8};
        for (int h = 0; h < 2 * NH; h++) a[h] = (real)(1 << h);
        diff_combine_forward(o, a, l, 1, NH, 1, NH, pairs[k][0], true);
        diff_combine_backward(da, dl, g, a, l, 1, NH, 1, NH, pairs[k][0], true);
        for (int h = 0; h < NH; h++) { // s = 1/2: all is exact
            int h1 = pairs[k][1 + 2 * h], h2 = pairs[k][2 + 2 * h];
            bool right =
                o[h] == a[h1] - a[h2] / 2 && da[h1] == g[h] && da[h2] == -g[h] / 2 && dl[h] == -g[h] * a[h2] / 4;
            EXPECT(right, "stride %d: head %d is not made of (%d, %d)", pairs[k][0], h, h1, h2);
        }
    }
}

// --- layer lambdas: x[0] rows [q1 | k1 | gap], x[1] rows [q2 | k2 | gap], or x[0] lambda (1); y l (count) ---

static void lambda_exp_setup(OpCase *c) {
    int D = c->d[0], ld = 2 * D + 3;
    c->scale = 0.5;
    c->length = max_int(D, c->d[1]);
    op_view(&c->x[0], "dq1", 0, 1, 1, D, ld, D);
    op_view(&c->x[0], "dk1", (size_t)D, 1, 1, D, ld, D);
    op_view(&c->x[1], "dq2", 0, 1, 1, D, ld, D);
    op_view(&c->x[1], "dk2", (size_t)D, 1, 1, D, ld, D);
    op_rows(&c->y[0], "l", 1, c->d[1], c->d[1]);
    c->dx[0].adds = c->dx[1].adds = true;
}
static void lambda_exp_run_forward(OpCase *c) {
    const real *a = c->x[0].data, *b = c->x[1].data;
    int D = c->d[0];
    lambda_exp_forward(c->y->data, a, a + D, b, b + D, D, (real)lambda_init(c->d[2]), (size_t)c->d[1]);
}
static void lambda_exp_run_backward(OpCase *c) {
    const real *a = c->x[0].data, *b = c->x[1].data;
    real *da = c->dx[0].data, *db = c->dx[1].data;
    int D = c->d[0];
    lambda_exp_backward(da, da + D, db, db + D, c->dy, a, a + D, b, b + D, D, (size_t)c->d[1]);
}
static void lambda_exp_reference(OpCase *c) {
    double dot[2] = {0, 0};
    for (int m = 0; m < 2; m++)
        for (int i = 0, D = c->d[0]; i < D; i++) dot[m] += c->x[m].ref[i] * c->x[m].ref[D + i];
    for (int i = 0; i < c->d[1]; i++) c->y->ref[i] = exp(dot[0]) - exp(dot[1]) + lambda_init(c->d[2]);
}
static void lambda_scalar_setup(OpCase *c) {
    c->length = c->d[0];
    op_rows(&c->x[0], "dlambda", 1, 1, 1);
    op_rows(&c->y[0], "l", 1, c->d[0], c->d[0]);
    c->dx[0].adds = true;
}
static void lambda_scalar_run_forward(OpCase *c) { lambda_scalar_forward(c->y->data, c->x->data, (size_t)c->d[0]); }
static void lambda_scalar_run_backward(OpCase *c) { lambda_scalar_backward(c->dx->data, c->dy, (size_t)c->d[0]); }
static void lambda_scalar_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) c->y->ref[i] = c->x->ref[0];
}
static void test_layer_lambda(void) {
    static const OpKind of_exp = {"lambda_exp",           "D count layer",         lambda_exp_setup,
                                  lambda_exp_run_forward, lambda_exp_run_backward, lambda_exp_reference};
    static const OpKind scalar = {
        "lambda_scalar",        "count", lambda_scalar_setup, lambda_scalar_run_forward, lambda_scalar_run_backward,
        lambda_scalar_reference};
    static const int exp_shapes[][OP_DIMS] = {
        {1, 1, 0},       // the smallest; the first layer, whose init is 0.2
        {40, 67, 5},     // no multiple of 16
        {256, 4099, 30}, // the widest head, many rows; a layer whose init is 0.8 to within 1e-4
    };
    static const int scalar_shapes[][OP_DIMS] = {{1}, {13}, {4099}}; // the smallest, less than a vector, past a page
    OP_CHECK_ALL(of_exp, exp_shapes);
    OP_CHECK_ALL(scalar, scalar_shapes);
    for (int count = 0; count <= 67; count += 67) { // the constant of diff_v2_no_lambda
        real *l = op_alloc((size_t)count);
        int wrong = 0;
        fill_forward(l, 1, (size_t)count);
        for (int i = 0; i < count; i++) wrong += l[i] != 1;
        EXPECT(wrong == 0, "fill_forward: %d of %d elements are not 1", wrong, count);
        op_free("fill_forward");
    }
}

// --- scale_inplace: x[0] and y (count); in place, so runs copy first ---

static void scale_setup(OpCase *c) {
    op_rows(&c->x[0], "dx", 1, c->d[0], c->d[0]);
    op_rows(&c->y[0], "x", 1, c->d[0], c->d[0]);
}
static void scale_run_forward(OpCase *c) {
    rope_copy(c->y->data, c->x->data, c->y->view);
    scale_inplace(c->y->data, (real)(c->d[1] / 10.0), (size_t)c->d[0]);
}
static void scale_run_backward(OpCase *c) {
    rope_copy(c->dx->data, c->dy, c->y->view);
    scale_inplace(c->dx->data, (real)(c->d[1] / 10.0), (size_t)c->d[0]);
}
static void scale_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) c->y->ref[i] = c->x->ref[i] * (c->d[1] / 10.0);
}
static void test_scale(void) {
    static const OpKind kind = {"scale_inplace",   "count 10*factor",  scale_setup,
                                scale_run_forward, scale_run_backward, scale_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 8},    // the smallest; 1 - lambda_init of the first layer
        {13, -3},  // less than a vector
        {4099, 2}, // one page and a rest; 1 - lambda_init of a late layer
        {67, 0},   // everything becomes 0
    };
    OP_CHECK_ALL(kind, shapes);
}

// --- gate: x[0] x (N,heads,D), x[1] g (N,heads*width) with row stride ldg, y (N,heads,D) ---

static void gate_setup(OpCase *c) {
    int N = c->d[0], heads = c->d[1], D = c->d[2];
    c->scale = 3; // gates between 0.05 and 0.95
    c->length = D;
    op_rows(&c->x[0], "dx", N, heads * D, heads * D);
    op_rows(&c->x[1], "dg", N, heads * c->d[4], c->d[3]);
    op_rows(&c->y[0], "y", N, heads * D, heads * D);
}
static void gate_run_forward(OpCase *c) {
    const int *d = c->d;
    gate_forward(c->y->data, c->x[0].data, c->x[1].data, d[0], d[1], d[2], d[3], d[4]);
}
static void gate_run_backward(OpCase *c) {
    const int *d = c->d;
    gate_backward(c->dx[0].data, c->dx[1].data, c->dy, c->x[0].data, c->x[1].data, d[0], d[1], d[2], d[3], d[4]);
}
static void gate_reference(OpCase *c) {
    int heads = c->d[1], D = c->d[2];
    for (int i = 0; i < c->d[0] * heads * D; i++) {
        int of_head = i / D % heads * c->d[4] + (c->d[4] == 1 ? 0 : i % D);
        c->y->ref[i] = c->x[0].ref[i] / (1 + exp(-c->x[1].ref[i / D / heads * c->d[3] + of_head]));
    }
}
static void test_gate(void) {
    static const OpKind kind = {"gate",           "N heads D ldg width", gate_setup,
                                gate_run_forward, gate_run_backward,     gate_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1, 1, 1},       // one element: both kinds of gate in one
        {7, 3, 8, 64, 1},      // a gate per head, in a row padded to 64
        {7, 3, 8, 64, 8},      // a gate per element, padded
        {13, 4, 40, 4, 1},     // D no multiple of 16
        {13, 4, 40, 160, 40},  // the same per element, rows without padding
        {3, 5, 256, 64, 1},    // the widest head
        {2, 2, 256, 512, 256}, // per element
    };
    OP_CHECK_ALL(kind, shapes);
    // saturated gates let everything or nothing through and have no gradient; halves are exact
    enum { D = 4 };
    real x[D] = {1, 2, 3, 4}, g[D] = {(real)1e4, (real)-1e4, 0, (real)1e4}, dy[D] = {5, 6, 7, 8}, y[D], dx[D], dg[D];
    static const double want_y[D] = {1, 0, 1.5, 4}, want_dx[D] = {5, 0, 3.5, 8}, want_dg[D] = {0, 0, 5.25, 0};
    gate_forward(y, x, g, 1, 1, D, D, D);
    gate_backward(dx, dg, dy, x, g, 1, 1, D, D, D);
    for (int i = 0; i < D; i++)
        EXPECT(fabs((double)y[i] - want_y[i]) < 1e-30 && fabs((double)dx[i] - want_dx[i]) < 1e-30 &&
                   fabs((double)dg[i] - want_dg[i]) < 1e-30,
               "gate %g: y %g, dx %g, dg %g", (double)g[i], (double)y[i], (double)dx[i], (double)dg[i]);
}

// --- swiglu: x[0] rows [gate | up] (N,2F), y (N,F) ---

static void swiglu_setup(OpCase *c) {
    int N = c->d[0], F = c->d[1];
    c->scale = c->d[2];
    op_rows(&c->x[0], "dgate", N, F, 2 * F);
    op_view(&c->x[0], "dup", (size_t)F, N, 1, F, 2 * F, F);
    op_rows(&c->y[0], "y", N, F, F);
}
static void swiglu_run_forward(OpCase *c) { swiglu_forward(c->y->data, c->x->data, c->d[0], c->d[1]); }
static void swiglu_run_backward(OpCase *c) { swiglu_backward(c->dx->data, c->dy, c->x->data, c->d[0], c->d[1]); }
static void swiglu_reference(OpCase *c) {
    for (int i = 0, F = c->d[1]; i < c->d[0] * F; i++) {
        double g = c->x->ref[i / F * 2 * F + i % F], u = c->x->ref[i / F * 2 * F + F + i % F];
        c->y->ref[i] = g / (1 + exp(-g)) * u;
    }
}
static void test_swiglu(void) {
    static const OpKind kind = {"swiglu",           "N F scale",         swiglu_setup,
                                swiglu_run_forward, swiglu_run_backward, swiglu_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 1},    // the smallest
        {13, 37, 4},  // F no multiple of 16
        {3, 257, 30}, // sigmoids that are 0 or 1 to within rounding
    };
    OP_CHECK_ALL(kind, shapes);
}

// --- residual: x[0], x[1], y (count) ---

static void residual_setup(OpCase *c) {
    op_rows(&c->x[0], "a", 1, c->d[0], c->d[0]);
    op_rows(&c->x[1], "b", 1, c->d[0], c->d[0]);
    op_rows(&c->y[0], "y", 1, c->d[0], c->d[0]);
}
static void residual_run_forward(OpCase *c) {
    residual_forward(c->y->data, c->x[0].data, c->x[1].data, (size_t)c->d[0]);
}
static void residual_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) c->y->ref[i] = c->x[0].ref[i] + c->x[1].ref[i];
}
static void test_residual(void) {
    static const OpKind kind = {"residual", "count", residual_setup, residual_run_forward, NULL, residual_reference};
    static const int shapes[][OP_DIMS] = {{1}, {13}, {4097}}; // the smallest, less than a vector, one past a page
    OP_CHECK_ALL(kind, shapes);
}

// --- residual and rmsnorm in one pass ---

// Bit for bit what the two operations give one after the other, for any number of threads; nothing else is written.
static void the_fused_norm_of_a_sum_equals_the_two_operations(void) {
    static const int shapes[][2] = {{1, 1}, {7, 64}, {13, 130}, {129, 100}, {3, 37}}; // as for rmsnorm
    TestRandom random = {8};
    int before = omp_get_max_threads();
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        int N = shapes[i][0], C = shapes[i][1];
        size_t count = (size_t)N * (size_t)C;
        real *a = op_alloc_random(&random, count, 1), *b = op_alloc_random(&random, count, 2);
        real *weight = op_alloc_random(&random, (size_t)C, 1), *sum[2], *y[2], *rstd[2];
        for (int fused = 0; fused < 2; fused++)
            sum[fused] = op_alloc(count), y[fused] = op_alloc(count), rstd[fused] = op_alloc((size_t)N);
        residual_forward(sum[0], a, b, count);
        rmsnorm_forward(y[0], rstd[0], sum[0], weight, N, C, (real)RMSNORM_EPS);
        for (int threads = 1; threads <= OP_THREADS; threads++) {
            omp_set_num_threads(threads);
            for (size_t e = 0; e < count; e++) sum[1][e] = y[1][e] = (real)NAN;
            for (int n = 0; n < N; n++) rstd[1][n] = (real)NAN;
            residual_rmsnorm_forward(sum[1], y[1], rstd[1], a, b, weight, N, C, (real)RMSNORM_EPS);
            EXPECT(op_same(sum[0], sum[1], count), "%d x %d: the sum has other bits", N, C);
            EXPECT(op_same(y[0], y[1], count), "%d x %d: the norm has other bits", N, C);
            EXPECT(op_same(rstd[0], rstd[1], (size_t)N), "%d x %d: rstd has other bits", N, C);
        }
        op_free("residual and rmsnorm");
    }
    omp_set_num_threads(before);
}

// --- cross_entropy: x[0] logits (N,V) with row stride Vp, y losses (N), which are added to ---

static void cross_entropy_setup(OpCase *c) {
    c->index_limit = c->d[1];
    c->scale = 4;
    c->length = c->d[1];
    c->dloss = 0.375;
    op_rows(&c->x[0], "dlogits", c->d[0], c->d[1], c->d[2]);
    op_rows(&c->y[0], "losses", 1, c->d[0], c->d[0]);
    c->y[0].adds = true;
}
static void cross_entropy_run_forward(OpCase *c) { // without dloss: the logits, an input here, stay as they are
    cross_entropy(c->y->data, c->x->data, c->index, c->d[0], c->d[1], c->d[2], 0);
}
static void cross_entropy_run_backward(OpCase *c) {
    memcpy(c->dx->data, c->x->data, c->x->count * sizeof(real)); // with NaN in the padding
    cross_entropy(c->y->data, c->dx->data, c->index, c->d[0], c->d[1], c->d[2], c->dy[0]);
}
static void cross_entropy_reference(OpCase *c) {
    for (int n = 0; n < c->d[0]; n++) {
        const double *x = c->x->ref + n * c->d[2];
        double sum = 0;
        for (int v = 0; v < c->d[1]; v++) sum += exp(x[v]);
        c->y->ref[n] = log(sum) - x[c->index[n]];
    }
}
static void test_cross_entropy(void) {
    static const OpKind kind = {
        "cross_entropy",        "N V Vp", cross_entropy_setup, cross_entropy_run_forward, cross_entropy_run_backward,
        cross_entropy_reference};
    static const int shapes[][OP_DIMS] = {
        {1, 1, 64},     // one class: loss 0, gradient 0
        {7, 3, 64},     // mostly padding
        {13, 257, 320}, // bytes and a separator, padded to a multiple of 64
        {67, 100, 100}, // no padding
    };
    OP_CHECK_ALL(kind, shapes);
}
static void test_cross_entropy_extremes(void) {
    enum { V = 4 };
    static const struct {
        double logits[V];
        int target;
        double loss, gradient[V];
    } cases[] = {
        {{1e4, -1e4, 0, 0}, 1, 2e4, {1, -1, 0, 0}},                        // sure and wrong
        {{1e4, -1e4, 0, 0}, 0, 0, {0, 0, 0, 0}},                           // sure and right
        {{-3e4, -3e4, -3e4, -3e4}, 2, 1.386294361, {.25, .25, -.75, .25}}, // all far below 0: log 4
        {{1e30, 1e30, -1e30, 0}, 0, 0.693147181, {-.5, .5, 0, 0}},         // a tie at the top: log 2
    };
    for (int k = 0; k < (int)(sizeof(cases) / sizeof(cases[0])); k++) {
        real x[V], loss = 0;
        double error = 0, tolerance = 1e-9 + 4 * op_epsilon * fabs(cases[k].logits[0]); // losses round as logits do
        for (int v = 0; v < V; v++) x[v] = (real)cases[k].logits[v];
        cross_entropy(&loss, x, &cases[k].target, 1, V, V, 1);
        for (int v = 0; v < V; v++) error = fmax(error, fabs((double)x[v] - cases[k].gradient[v]));
        EXPECT(fabs((double)loss - cases[k].loss) <= tolerance, "case %d: loss %.9g, not %.9g", k, (double)loss,
               cases[k].loss);
        EXPECT(error <= 4 * op_epsilon && op_not_finite(x, V) == 0, "case %d: the gradient is %.3g off", k, error);
    }
}
static void test_cross_entropy_offset(void) {
    enum { N = 13, V = 257, OFFSET = 4096 };
    TestRandom random = {6};
    int targets[N];
    real *x = op_alloc(N * V), *y = op_alloc(N * V), loss_x[N], loss_y[N];
    for (int i = 0; i < N * V; i++) {
        x[i] = (real)((test_random_int(&random, 1024) - 512) / 64.0); // exact with and without the offset
        y[i] = x[i] + OFFSET;
    }
    for (int n = 0; n < N; n++) targets[n] = test_random_int(&random, V), loss_x[n] = loss_y[n] = 0;
    cross_entropy(loss_x, x, targets, N, V, V, 1);
    cross_entropy(loss_y, y, targets, N, V, V, 1);
    EXPECT(op_same(x, y, N * V), "the gradient changes when all logits grow by %d", OFFSET);
    for (int n = 0; n < N; n++)
        EXPECT(fabs((double)loss_x[n] - (double)loss_y[n]) <= 2 * op_epsilon * OFFSET, "row %d: loss %.9g became %.9g",
               n, (double)loss_x[n], (double)loss_y[n]);
    op_free("cross_entropy");
}
static void test_cross_entropy_nan(void) {
    enum { N = 3, V = 40 };
    static const int bad[] = {0, 17, 39}, targets[N] = {1, 1, 1}; // first, in a vector, last
    for (int k = 0; k < 3; k++)
        for (int infinite = 0; infinite < 2; infinite++) {
            real x[N * V], losses[N] = {0, 0, 0};
            for (int i = 0; i < N * V; i++) x[i] = (real)(i % 7);
            x[V + bad[k]] = infinite ? (real)INFINITY : (real)NAN;
            cross_entropy(losses, x, targets, N, V, V, 0);
            EXPECT(isnan((double)losses[1]), "%s at %d: the loss is %g", infinite ? "inf" : "NaN", bad[k],
                   (double)losses[1]);
            EXPECT(isfinite((double)(losses[0] + losses[2])), "%s at %d reaches other rows", infinite ? "inf" : "NaN",
                   bad[k]);
        }
}

// --- the operations of the update ---

static void test_adamw(void) {
    static const struct {
        int count;
        double grad_scale, lr, beta1, beta2, eps, weight_decay;
    } cases[] = {
        {1, 1, 1e-3, 0.9, 0.95, 1e-8, 0},        // a single element
        {257, 0.37, 1e-2, 0.9, 0.95, 1e-8, 0.1}, // a scale below 1, as clipping makes it; no multiple of a vector
        {67, 1, 1e-2, 0.9, 0.999, 0.5, 0.1},     // eps as large as the gradients: it stands outside the root
        {4099, 8, 1e-2, 0, 0.5, 1e-8, 3},        // no momentum, a decay that shows
    };
    enum { STEPS = 5 };
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++) {
        int count = cases[k].count, before = omp_get_max_threads();
        double error[3] = {0, 0, 0}, norm[3] = {0, 0, 0},
               *ref = (double *)op_alloc_bytes(3 * (size_t)count * sizeof(double));
        real *state[2], *start = op_alloc(3 * (size_t)count), *g = op_alloc((size_t)count); // state: w, m, v in turn
        for (int run = 0; run < 2; run++) {
            TestRandom random = {7};
            for (int i = 0; i < 3 * count; i++) start[i] = i < count ? (real)test_random_real(&random) : 0;
            for (int i = 0; i < 3 * count; i++) ref[i] = (double)start[i];
            real *w = state[run] = op_alloc_copy(start, 3 * (size_t)count);
            omp_set_num_threads(1 + run);
            for (int step = 1; step <= STEPS; step++) {
                for (int i = 0; i < count; i++) g[i] = (real)test_random_real(&random);
                if (count > 1) g[0] = 0; // a gradient of 0 moves nothing and divides nothing by 0
                adamw_update(w, NULL, g, w + count, w + 2 * count, (size_t)count, cases[k].grad_scale, cases[k].lr,
                             cases[k].beta1, cases[k].beta2, cases[k].eps, cases[k].weight_decay, step);
                for (int i = 0; i < count; i++) {
                    double *wi = ref + i, *m = wi + count, *v = m + count, gi = cases[k].grad_scale * (double)g[i];
                    *m = cases[k].beta1 * *m + (1 - cases[k].beta1) * gi;
                    *v = cases[k].beta2 * *v + (1 - cases[k].beta2) * gi * gi;
                    double mhat = *m / (1 - pow(cases[k].beta1, step)), vhat = *v / (1 - pow(cases[k].beta2, step));
                    *wi -= cases[k].lr * (mhat / (sqrt(vhat) + cases[k].eps) + cases[k].weight_decay * *wi);
                }
            }
        }
        omp_set_num_threads(before);
        EXPECT(op_same(state[0], state[1], 3 * (size_t)count), "case %d: the threads change the result", (int)k);
        EXPECT(op_not_finite(state[0], 3 * (size_t)count) == 0, "case %d: NaN or infinite", (int)k);
        for (int i = 0; i < 3 * count; i++) {
            error[i / count] += (ref[i] - (double)state[0][i]) * (ref[i] - (double)state[0][i]);
            norm[i / count] += ref[i] * ref[i];
        }
        for (int p = 0; p < 3; p++)
            EXPECT(sqrt(error[p]) <= 4 * op_epsilon * STEPS * sqrt(norm[p]), "case %d: %c is off by %.3g of its norm",
                   (int)k, "wmv"[p], sqrt(error[p] / norm[p]));
        op_free("adamw");
    }
}
// The weights are the master's, whatever the parameters were; both get the update.
static void master_weights_decide(void) {
    enum { COUNT = 77 };
    TestRandom random = {5};
    real *w[2], *m[2], *v[2], *master = op_alloc_random(&random, COUNT, 1), *g = op_alloc_random(&random, COUNT, 1);
    for (int i = 0; i < 2; i++) {
        w[i] = op_alloc_copy(master, COUNT);
        m[i] = op_alloc(COUNT), v[i] = op_alloc(COUNT);
        memset(m[i], 0, COUNT * sizeof(real)), memset(v[i], 0, COUNT * sizeof(real));
    }
    for (int64_t step = 1; step <= 3; step++) {
        for (int i = 0; i < COUNT; i++) w[1][i] = (real)NAN;
        for (int i = 0; i < 2; i++)
            adamw_update(w[i], i ? master : NULL, g, m[i], v[i], COUNT, 0.5, 0.1, 0.9, 0.95, 1e-8, 0.1, step);
        EXPECT(op_same(w[0], w[1], COUNT) && op_same(w[0], master, COUNT), "step %d: the weights are not the master's",
               (int)step);
    }
    op_free("adamw with master weights");
}
static double squares_of(const real *x, size_t count) {
    double *sum = (double *)op_alloc_bytes(sizeof(double));
    sum_of_squares(sum, x, count);
    return *sum;
}
static void test_sum_of_squares(void) {
    static const int counts[] = {0, 1, 15, 16, 17, 4095, 4096, 4097, 100003}; // around a part of 16 and all 256 of them
    int before = omp_get_max_threads();
    for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++) {
        size_t count = (size_t)counts[k];
        TestRandom random = {k};
        real *x = op_alloc(count), *y = op_alloc_random(&random, count, 1);
        double want = 0;
        for (size_t i = 0; i < count; i++) {
            x[i] = (real)(test_random_int(&random, 2001) - 1000);
            want += (double)x[i] * (double)x[i];
        }
        double got = squares_of(x, count), sums[3];
        EXPECT(got == want, "count %d: %.17g, not %.17g", counts[k], got, want);
        for (int t = 0; t < 3; t++) {
            omp_set_num_threads(1 + t);
            sums[t] = squares_of(y, count);
        }
        omp_set_num_threads(before);
        EXPECT(sums[0] == sums[1] && sums[1] == sums[2], "count %d: %.17g, %.17g, %.17g with 1, 2, 3 threads",
               counts[k], sums[0], sums[1], sums[2]);
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
            float x[BLOCK], y[BLOCK]; // a plain loop, so that the vectorised code is what is tested
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
    {"exp is within 2 ulp, 0 far below, finite far above, and keeps NaN", test_exp},
    {"the sigmoid is right to rounding everywhere and saturates", test_sigmoid},
    {"the embedding copies rows and its backward adds repeated tokens up", test_embedding},
    {"rmsnorm and its backward agree with the definition", test_rmsnorm},
    {"matmul and its backward agree with the definition", test_matmul},
    {"rounding to bf16 is to the nearest, and keeps NaN and infinity", test_bf16_rounding},
    {"matmul in bf16 multiplies rounded matrices, by oneDNN and without it", test_matmul_bf16},
    {"rope and its backward agree with the definition", test_rope},
    {"rope keeps norms, is undone by its backward and sees distances only", test_rope_properties},
    {"attention and its backward agree with the definition", test_attention},
    {"attention never looks ahead, to the last bit", test_attention_is_causal},
    {"attention from a position on gives the rows of the whole sequence", test_attention_generates},
    {"attention within documents is attention of each document alone", test_attention_documents},
    {"attention survives scores of 100,000", test_attention_large_scores},
    {"attention of two key sets adds both gradients of the values they share", test_attention_sets},
    {"a sink and its backward agree with a softmax of one more column", test_sink},
    {"a sink far below the scores is none, one far above takes everything", test_sink_extremes},
    {"diff_combine and its backward agree with the definition", test_diff_combine},
    {"diff_combine pairs the heads that the variants name", test_diff_combine_pairs},
    {"layer lambdas and their backwards agree with the definitions", test_layer_lambda},
    {"scale_inplace multiplies and takes the gradient back", test_scale},
    {"the gates and their backward agree with the definition", test_gate},
    {"swiglu and its backward agree with the definition", test_swiglu},
    {"the residual adds with one rounding", test_residual},
    {"the fused norm of a sum equals the two operations, bit for bit",
     the_fused_norm_of_a_sum_equals_the_two_operations},
    {"cross_entropy and the gradient that it leaves agree with the definition", test_cross_entropy},
    {"cross_entropy of extreme logits is finite and right", test_cross_entropy_extremes},
    {"cross_entropy does not change when all logits grow alike", test_cross_entropy_offset},
    {"cross_entropy of a row with a NaN or an infinity is NaN", test_cross_entropy_nan},
    {"adamw agrees with a loop in double over several steps", test_adamw},
    {"with master weights an update is theirs, and the parameters follow", master_weights_decide},
    {"sum_of_squares is exact on integers, for any threads, and shows NaN", test_sum_of_squares},
};
enum { OPERATIONS_TEST_COUNT = sizeof(operations_tests) / sizeof(operations_tests[0]) };
#endif
