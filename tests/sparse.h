/*
sparse.h: tests of block-sparse attention in the whole model: gradients against finite differences, identity with
attention to all keys, causality, documents, ties, and generation with caches. model.h has the fixtures.
*/
#pragma once
#include "model.h"
#include "windows.h"

typedef struct {
    int blocks, size;
    ModelCase model;
} SparseCase;
// Blocks of 4 positions, of which most rows see more than they select.
static const SparseCase sparse_cases[] = {
    {2, 4, {"sparse", 29, 24, 2, 4, 2, 8, 20, 3, 40, false, 0, 0, false, false}},
    {1, 4, {"sparse, windows, full layers, QK-norm", 29, 24, 2, 4, 2, 8, 20, 3, 40, true, 18, 2, false, true}},
    {1, 5, {"sparse, YOCO", 29, 24, 4, 4, 2, 8, 20, 3, 40, false, 13, 0, true, false}},
    {3, 4, {"sparse, every second layer full", 29, 24, 2, 4, 2, 8, 20, 3, 40, true, 0, 2, false, false}},
};
enum { SPARSE_CASES = sizeof(sparse_cases) / sizeof(sparse_cases[0]) };

// Calls visit for each case and variant that are supported; of most variants one case.
static void sparse_visit(void (*visit)(const ModelCase *mc, const AttentionVariant *variant)) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int i = 0; i < SPARSE_CASES; i++) {
            const SparseCase *c = &sparse_cases[i];
            Problem problem;
            if (v > 1 && i != v % SPARSE_CASES) continue;
            case_sparse.blocks = c->blocks, case_sparse.size = c->size;
            ModelConfig config = case_config(&c->model, &attention_variants[v]);
            if (model_config_problems(&config, &problem, 1) == 0) visit(&c->model, &attention_variants[v]);
        }
    case_sparse.blocks = case_sparse.size = 0;
}

// A change of the parameters by 1e-5 changes no list here.
static void sparse_differences(const ModelCase *mc, const AttentionVariant *variant) {
    Model model;
    ModelCase small = *mc;
    small.B = 1, small.T = 20;
    int *tokens = case_start(&model, &small, variant, FOR_TRAINING);
    expect_differences(&model, tokens, small.B, small.T, plain_loss, small.why);
    case_end(&model, tokens);
}
static void test_sparse_finite_differences(void) { sparse_visit(sparse_differences); }

// With every block selected, and documents.
static void sparse_all(const ModelCase *mc, const AttentionVariant *variant) {
    Model sparse, full;
    int N = mc->B * mc->T, size = case_sparse.size, *starts = (int *)checked_calloc(N, sizeof(int));
    for (int n = 0; n < N; n++) starts[n] = n % mc->T < 22 ? 0 : 22;
    case_sparse.blocks = mc->T / size;
    int *tokens = case_start(&sparse, mc, variant, FOR_TRAINING);
    case_sparse.blocks = 0;
    ModelCase dense = *mc;
    if (!dense.window) dense.full_every = 0;
    free(case_start(&full, &dense, variant, FOR_TRAINING));
    // a gradient passes sums of C, D, F and T terms in each layer, and is a sum over N rows
    double terms = N + mc->L * (mc->C + mc->D + mc->F + mc->T),
           tolerance = terms * (sizeof(real) == 8 ? 0x1p-53 : 0x1p-24);
    for (int documents = 0; documents < 2; documents++) {
        ops_init(max_size(sparse.plan.workspace_bytes, full.plan.workspace_bytes));
        model_micro_step(&sparse, tokens, tokens + 1, documents ? starts : NULL, mc->B, mc->T, N);
        model_micro_step(&full, tokens, tokens + 1, documents ? starts : NULL, mc->B, mc->T, N);
        double worst = 0, largest = 0;
        for (size_t i = 0; i < full.plan.tensors.buffer_count; i++) {
            worst = fmax(worst, fabs((double)sparse.state.grads[i] - (double)full.state.grads[i]));
            largest = fmax(largest, fabs((double)full.state.grads[i]));
        }
        EXPECT(worst <= largest * tolerance, "%s, %s, all blocks, documents %d: gradients differ by %.3g of %.3g",
               variant->name, mc->why, documents, worst, largest);
    }
    free(starts);
    model_free(&full, true);
    case_end(&sparse, tokens);
}
static void test_all_blocks(void) { sparse_visit(sparse_all); }

// A change of token u changes no earlier row and no row of another document, and later ones of its own.
static void sparse_causal(const ModelCase *mc, const AttentionVariant *variant) {
    enum { DOCUMENT = 22 };
    Model m;
    int T = mc->T, starts[64], *tokens = case_start(&m, mc, variant, FOR_EVALUATION);
    size_t C = m.plan.config.C;
    floatX *before = (floatX *)checked_calloc(T * C, sizeof(floatX));
    for (int t = 0; t < T; t++) starts[t] = t < DOCUMENT ? 0 : DOCUMENT;
    for (int u = 3; u < T; u += 9) {
        int wrong = 0, changed = 0;
        for (int side = 0; side < 2; side++) {
            tokens[u] = (tokens[u] + 1) % mc->V;
            model_read_batch(&m, tokens, tokens + 1, starts, T);
            model_forward(&m, 1, T, NULL, NULL);
            if (side == 0) memcpy(before, m.acts.norm_final, T * C * sizeof(floatX));
        }
        for (int t = 0; t < T; t++) {
            bool same = memcmp(before + t * C, m.acts.norm_final + t * C, C * sizeof(floatX)) == 0;
            bool visible = t >= u && starts[t] <= u;
            wrong += !visible && !same, changed += visible && !same;
        }
        EXPECT(!wrong && changed, "%s, %s: token %d changes %d rows that do not see it, and %d of the others",
               variant->name, mc->why, u, wrong, changed);
    }
    free(before);
    case_end(&m, tokens);
}
static void test_sparse_causality(void) { sparse_visit(sparse_causal); }

static void test_sparse_cached_logits(void) { sparse_visit(expect_cached_logits); }

// The mean of a block in a ring; then queries of zero, whose scores are all 0. Rows 44 .. 47 are a document.
static void test_ties(void) {
    enum { T = 48, D = 8, WIDTH = 5 };
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = s.NQ = s.NKV = 1, s.T = T, s.D = D, s.ldq = s.ldkv = D, s.q_head = s.k_head = D;
    s.sparse.blocks = WIDTH - 2, s.sparse.size = 4, s.sparse.count = T / 4;
    floatX *q = (floatX *)checked_calloc(T * D, sizeof(floatX));
    real *means = (real *)checked_calloc(T / 4 * D, sizeof(real));
    int *lists = (int *)checked_calloc(T * WIDTH, sizeof(int)), starts[T] = {0};
    static const struct {
        int t, window, list[WIDTH];
    } rows[] = {{0, 0, {0, -1, -1, -1, -1}}, {7, 0, {0, 1, -1, -1, -1}},  {23, 0, {0, 1, 2, 3, 5}},
                {43, 0, {0, 1, 2, 3, 10}},   {43, 18, {6, 7, 8, 10, -1}}, {47, 18, {11, -1, -1, -1, -1}}};
    for (int t = 44; t < T; t++) starts[t] = 44;
    s.first_key = starts;
    // positions 18 .. 21 of a ring of 7 rows from position 10 on complete block 4, the only one
    for (int p = 15; p < 22; p++)
        for (int c = 0; c < D; c++) q[(p - 10) % 7 * D + c] = (floatX)(p * c);
    const int first = 18;
    AttentionShape ring = s;
    ring.T = 4, ring.sparse.base = 10;
    sparse_means(means, q, &first, 7, 1, ring);
    for (int i = 0; i < T / 4 * D; i++) {
        double want = i / D == 4 ? 17.5 * (i % D) : 0;
        EXPECT((double)means[i] == want, "element %d of the mean of block %d is %g, not %g", i % D, i / D,
               (double)means[i], want);
    }
    memset(q, 0, T * D * sizeof(floatX)), memset(means, 0, T / 4 * D * sizeof(real));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        s.window = rows[i].window;
        sparse_select(lists, q, means, NULL, 1, s);
        const int *list = lists + rows[i].t * WIDTH;
        EXPECT(memcmp(list, rows[i].list, sizeof(rows[i].list)) == 0, "row %d, window %d: blocks %d %d %d %d %d",
               rows[i].t, s.window, list[0], list[1], list[2], list[3], list[4]);
    }
    free(q), free(means), free(lists);
}

// Groups of two signal heads and a noise head, against attention of all heads and diff_combine.
static void test_sparse_groups(void) {
    enum { T = 40, D = 8, NKV = 2, OH = 8, NQ = 12, BLOCKS = 2, K = NQ * D, V = K + NKV * D, LD = V + NKV * D };
    static floatX x[T * LD], l[T * OH], dout[T * OH * D], kept[T * NQ * D], dkept[T * NQ * D];
    static floatX out[2][T * OH * D], dl[2][T * OH], dx[2][T * LD];
    static real means[T * NKV * D], lse[NQ * T];
    static int lists[NKV * T * (BLOCKS + 2)];
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = 1, s.T = T, s.NQ = NQ, s.NKV = NKV, s.D = s.DV = D, s.ldq = s.ldkv = LD, s.ldo = OH * D;
    s.q_head = s.k_head = s.v_head = s.o_head = D, s.scale = (real)0.35;
    s.groups.signals = 2, s.groups.noise = 1;
    s.sparse.blocks = BLOCKS, s.sparse.size = 4, s.sparse.count = T / 4, s.sparse.lists = lists;
    for (int i = 0; i < T * LD; i++) x[i] = (floatX)(4 * random_uniform((uint64_t)i, 1) - 2);
    for (int i = 0; i < T * OH; i++) l[i] = (floatX)(4 * random_uniform((uint64_t)i, 2) - 2);
    for (int i = 0; i < T * OH * D; i++) dout[i] = (floatX)(4 * random_uniform((uint64_t)i, 3) - 2);
    ops_init(sparse_attention_workspace_bytes(s, omp_get_max_threads()));
    sparse_means(means, x + K, NULL, T, 1, s);
    sparse_select(lists, x, means, NULL, 1, s);
    sparse_diff_attention_forward(activation(out[0], NULL), kept, lse, x, x + K, x + V, l, OH, s, S_SIGMOID);
    sparse_diff_attention_backward(dx[0], dx[0] + K, dx[0] + V, dl[0], NULL, dout, out[0], kept, lse, x, x + K, x + V,
                                   l, OH, s, S_SIGMOID);
    AttentionShape heads = attention_of_heads(s);
    sparse_attention_forward(kept, lse, x, x + K, x + V, NULL, 0, heads);
    diff_combine_forward(activation(out[1], NULL), kept, l, T, OH, D, OH, s.groups, S_SIGMOID);
    diff_combine_backward(dkept, dl[1], dout, kept, l, T, OH, D, OH, s.groups, S_SIGMOID);
    sparse_attention_backward(dx[1], dx[1] + K, dx[1] + V, dkept, kept, lse, x, x + K, x + V, heads, false);
    ops_free();
    const struct {
        const char *name;
        const floatX *a, *b;
        int count;
    } pairs[] = {{"out", out[0], out[1], T * OH * D}, {"dl", dl[0], dl[1], T * OH}, {"dx", dx[0], dx[1], T * LD}};
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < pairs[k].count; i++)
            EXPECT(fabs((double)(pairs[k].a[i] - pairs[k].b[i])) < 1e-4, "%s, element %d: %g, not %g", pairs[k].name, i,
                   (double)pairs[k].a[i], (double)pairs[k].b[i]);
    EXPECT(out[0][T * OH * D - 1] != 0 && dx[0][T * LD - 1] != 0, "nothing was computed");
}

static const Test sparse_tests[] = {
    {"block-sparse attention to all blocks equals attention", test_all_blocks},
    {"what block-sparse attention reads depends on no later token and no other document", test_sparse_causality},
    {"logits with caches equal those of whole sequences with block-sparse attention", test_sparse_cached_logits},
    {"of blocks with equal scores the lowest are selected, within window and document", test_ties},
    {"block-sparse attention of groups equals attention of heads, then subtracted", test_sparse_groups},
};
static const Test sparse_fp64_tests[] = {
    {"gradients of block-sparse attention equal finite differences", test_sparse_finite_differences},
};
