/*
model.h: tests of the whole model for all attention variants: gradients against finite differences and against the
fixtures of dev/reference, causality, head pairs, identities between variants, generation with a cache, updates and
initial values.
*/
#pragma once
#include "fixture.h"
#include "harness.h"

typedef struct {
    const char *why;
    int V, C, L, NH, NKV, D, F, B, T;
    bool tied;
    int window, full_every;
    bool yoco, qk_norm;
} ModelCase;

static const ModelCase model_cases[] = {
    {"one token, one layer, one key/value head", 11, 16, 1, 2, 1, 8, 12, 1, 1, true, 0, 0, false, false},
    {"NH*D differs from C, groups of 3 heads, prime T, untied", 37, 20, 2, 6, 2, 8, 28, 2, 13, false, 0, 0, false,
     false},
    {"as many key/value heads as heads, one row more than a block of 64", 29, 24, 2, 2, 2, 16, 20, 1, 65, true, 0, 0,
     false, false},
    {"head dimension 256, one key/value head for all", 5, 12, 1, 2, 1, 256, 8, 1, 3, false, 0, 0, false, false},
    {"QK-norm, head dimension 12, untied", 17, 20, 2, 4, 2, 12, 20, 2, 9, false, 0, 0, false, true},
    {"windows of 3 positions in both layers", 19, 16, 2, 4, 2, 8, 12, 2, 11, true, 3, 0, false, false},
    {"windows, every second layer full, untied", 23, 20, 4, 2, 2, 8, 12, 1, 17, false, 5, 2, false, false},
    {"YOCO of two layers, 20 rows of keys and values, tied", 19, 16, 2, 4, 1, 10, 12, 2, 11, true, 4, 0, true, false},
    {"YOCO of four layers, fused rows no multiple of 8, untied", 37, 20, 4, 6, 2, 8, 28, 2, 13, false, 3, 0, true,
     false},
    {"YOCO with QK-norm, tied", 19, 20, 2, 4, 2, 8, 12, 2, 11, true, 4, 0, true, true},
};
enum { MODEL_CASE_COUNT = sizeof(model_cases) / sizeof(model_cases[0]), PLAIN_CASE_COUNT = 5 }; // without windows

static struct { int blocks, size, score; } case_sparse; // of the configurations of cases

static inline ModelConfig case_config(const ModelCase *m, const AttentionVariant *attention) {
    ModelConfig c;
    memset(&c, 0, sizeof(c));
    c.attention = attention;
    c.V = m->V, c.C = m->C, c.L = m->L, c.NH = m->NH, c.NKV = m->NKV, c.D = m->D, c.F = m->F, c.T = m->T;
    c.rope_theta = 10000;
    c.rms_norm_eps = 1e-5;
    c.tied = m->tied;
    c.window = m->window, c.full_every = m->full_every, c.yoco = m->yoco;
    c.qk_norm = m->qk_norm;
    c.sparse_blocks = case_sparse.blocks, c.sparse_size = case_sparse.size, c.sparse_score = case_sparse.score;
    while (attention->signals > 1 && c.NH / c.NKV % attention->signals) c.NH += c.NKV;
    return c;
}

static inline void case_open(Model *model, const ModelConfig *config, int B, int T, Purpose purpose) {
    model_plan(model, config, B, T, purpose, RECOMPUTE_NOTHING, one_rank);
    model_alloc(model, NULL);
    ops_init(model->plan.workspace_bytes);
}

static int case_generate(Model *model, int *tokens, int length, int count, double temperature, int top_k,
                         uint64_t key) {
    Generator generator = model_generator(model, temperature, top_k, -1);
    StopReason stopped;
    return generate_tokens(&generator, tokens, length, count, key, &stopped);
}

// Of the gradients of one rank, before clipping.
static inline double case_grad_norm(Model *model) {
    own_squares(&model->state, model->state.squares);
    return squares_norm(&model->state, 0, model->plan.sharding.groups - 1);
}

static inline void case_close(Model *model) {
    model_free(model, true);
    ops_free();
}

// Random parameters that give every tensor a large gradient: norms around 1, matrices with standard deviation
// 1/sqrt(columns).
static inline void case_randomize(Model *model, uint64_t seed) {
    for (int i = 0; i < model->plan.tensors.count; i++) {
        const Tensor *t = &model->plan.tensors.tensors[i];
        uint64_t key = random_key(t->name, seed);
        double scale = t->ndim == 2 ? 1 / sqrt((double)t->shape[1]) : 0.2, centre = t->row->init == INIT_ONE ? 1 : 0;
        for (size_t e = 0; e < t->count; e++)
            model->state.params[t->offset + e] = (floatX)(centre + scale * random_normal(key, e));
    }
}

static inline int *case_tokens(int count, int V, uint64_t seed) {
    TestRandom r = {seed};
    int *tokens = (int *)checked_calloc(count, sizeof(int));
    for (int i = 0; i < count; i++) tokens[i] = test_random_int(&r, V);
    return tokens;
}

// Opens a model of the case with random parameters. Returns B*T + 1 tokens, or NULL if the variant does not support the
// case. case_end frees both.
static inline int *case_start(Model *model, const ModelCase *mc, const AttentionVariant *variant, Purpose purpose) {
    ModelConfig config = case_config(mc, variant);
    Problem problem;
    if (model_config_problems(&config, &problem, 1)) return NULL;
    case_open(model, &config, mc->B, mc->T, purpose);
    case_randomize(model, 7);
    return case_tokens(mc->B * mc->T + 1, mc->V, 3);
}

static inline void case_end(Model *model, int *tokens) {
    free(tokens);
    case_close(model);
}

// Fills the gradients with NaN, so that a test detects elements that the backward does not write.
static inline void case_poison_gradients(Model *model) {
    for (int i = 0; i < model->plan.tensors.count; i++) {
        const Tensor *t = &model->plan.tensors.tensors[i];
        memset(tensor_grad(&model->state, t), 0xFF, t->count * sizeof(grad_t));
    }
}

// Returns the mean loss of one batch; computes its gradients if with_gradients.
static inline double case_loss(Model *model, const int *tokens, int B, int T, bool with_gradients) {
    size_t N = (size_t)B * T;
    buffer_zero(model->acts.losses, N * sizeof(real));
    if (with_gradients) {
        case_poison_gradients(model);
        model_micro_step(model, tokens, tokens + 1, NULL, B, T, (double)N);
    } else {
        buffer_upload(model->acts.inputs, tokens, N * sizeof(int));
        buffer_upload(model->acts.targets, tokens + 1, N * sizeof(int));
        model_forward(model, B, T, NULL, NULL);
        model_classify(model, (int)N, 0);
    }
    return loss_sum(&model->acts, (int)N) / (double)N;
}

// The derivative of the loss along a random direction d of each tensor is <gradient, d>. The difference quotient
// (8 D(h) - D(2h)) / 12h with D(h) = loss(w + h d) - loss(w - h d) has a truncation error of order h^4 and a rounding
// error of order 1e-16/h. For h = 1e-5 both are far below the tolerance. loss: the sum that is minimized
typedef double CaseLoss(Model *model, const int *tokens, int B, int T);
static void expect_differences(Model *model, const int *tokens, int B, int T, CaseLoss *loss, const char *why) {
    const char *name = model->plan.config.attention->name;
    case_loss(model, tokens, B, T, true);
    for (int i = 0; i < model->plan.tensors.count; i++) {
        const Tensor *t = &model->plan.tensors.tensors[i];
        floatX *w = model->state.params + t->offset, *saved = (floatX *)checked_calloc(t->count, sizeof(floatX));
        memcpy(saved, w, t->count * sizeof(floatX));
        const double h = 1e-5;
        const double offsets[] = {h, -h, 2 * h, -2 * h};
        double dot = 0, scale = 0, losses[4];
        for (int side = 0; side < 4; side++) {
            TestRandom r = {99};
            dot = scale = 0;
            for (size_t e = 0; e < t->count; e++) {
                double d = test_random_real(&r), g = (double)model->state.grads[t->offset + e];
                w[e] = saved[e] + (floatX)(offsets[side] * d);
                dot += g * d;
                scale += g * g * d * d;
            }
            losses[side] = loss(model, tokens, B, T);
        }
        memcpy(w, saved, t->count * sizeof(floatX));
        free(saved);
        double difference = (8 * (losses[0] - losses[1]) - (losses[2] - losses[3])) / (12 * h);
        EXPECT(isfinite(dot) && fabs(difference - dot) <= 1e-7 * sqrt(scale) + 1e-9,
               "%s, %s: %s: %.12g from differences, %.12g from the backward", name, why, t->name, difference, dot);
        EXPECT((scale > 0 || T == 1) == (t->row->kind != T_ROUTER_BIAS), "%s, %s: %s has %s gradient", name, why,
               t->name, scale > 0 ? "a" : "no");
    }
}

static double plain_loss(Model *model, const int *tokens, int B, int T) {
    return case_loss(model, tokens, B, T, false);
}

// All variants but the first two have every second case with windows.
static void test_finite_differences(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int m = 0; m < MODEL_CASE_COUNT; m++) {
            const ModelCase *mc = &model_cases[m];
            if (v > 1 && m >= PLAIN_CASE_COUNT && (v + m) % 2) continue;
            Model model;
            int *tokens = case_start(&model, mc, &attention_variants[v], FOR_TRAINING);
            if (!tokens) continue;
            expect_differences(&model, tokens, mc->B, mc->T, plain_loss, mc->why);
            case_end(&model, tokens);
        }
}

static inline double norm_of(const double *x, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

// Tolerance relative to each tensor's norm: 2e-4 in fp32 (at least 1e-5 of the largest norm), 1e-10 in fp64.
static inline void compare_with_fixture(const Fixture *f, const Model *model, double loss) {
    double tolerance = sizeof(real) == 8 ? 1e-10 : 2e-4, floor_share = sizeof(real) == 8 ? 1e-12 : 1e-5, largest = 0,
           expected_loss;
    const TensorList *tensors = &model->plan.tensors;
    safetensors_read(f->file, "loss", 0, 1, &expected_loss, DTYPE_F64);
    EXPECT(fabs(loss - expected_loss) <= tolerance * expected_loss, "%s: loss %.12g, reference %.12g", f->name, loss,
           expected_loss);
    EXPECT(fixture_gradient_count(f) == tensors->count, "%s: the reference has %d gradients, the model %d", f->name,
           fixture_gradient_count(f), tensors->count);
    for (int pass = 0; pass < 2; pass++) // pass 0 finds the largest norm
        for (int i = 0; i < tensors->count; i++) {
            const Tensor *t = &tensors->tensors[i];
            double *expected = fixture_gradient(f, t->name, t->count);
            EXPECT(expected, "%s: the reference has no %s of this size", f->name, t->name);
            if (!expected) return;
            double norm = norm_of(expected, t->count);
            if (pass == 0) largest = norm > largest ? norm : largest;
            for (size_t e = 0; e < t->count; e++) expected[e] -= (double)model->state.grads[t->offset + e];
            double error = norm_of(expected, t->count);
            EXPECT(pass == 0 || error <= tolerance * norm + floor_share * largest,
                   "%s: %s: error %.3g of a norm of %.3g", f->name, t->name, error, norm);
            free(expected);
        }
}

// Compares the gradients of one fixture; returns its configuration.
static inline ModelConfig check_fixture(const char *variant, const char *size) {
    char path[600];
    Fixture f = fixture_open(variant, size);
    ModelConfig config = config_json_read(f.dir.path);
    EXPECT(strcmp(config.attention->name, variant) == 0, "%s is read as %s", f.name, config.attention->name);
    Model model;
    case_open(&model, &config, f.B, f.T, FOR_TRAINING);
    model.router.aux_weight = 0.5, model.router.z_weight = 0.1; // as make_fixtures.py
    model.z_loss = (real)(*size == 'z' ? 0.25 : 0);
    CheckpointBuffers buffers = checkpoint_buffers(&model.state);
    checkpoint_load_weights(f.dir.path, &buffers, false);
    DataLoader loader;
    FORMAT(path, "%s/tokens.bin", f.dir.path);
    dataloader_open(&loader, path, f.B, f.T, config.V, 0, 1, 0, false);
    int *tokens = (int *)checked_calloc(f.B * f.T + 1, sizeof(int));
    dataloader_read_first_tokens(&loader, tokens, f.B * f.T + 1);
    dataloader_close(&loader);
    compare_with_fixture(&f, &model, case_loss(&model, tokens, f.B, f.T, true));
    case_end(&model, tokens);
    fixture_close(&f);
    return config;
}

static void test_gradients_equal_reference(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        check_fixture(attention_variants[v].name, "a");
        check_fixture(attention_variants[v].name, "b");
    }
}

static void test_gradients_of_windows_equal_reference(void) {
    const char *const variants[] = {"baseline", "diff_v2", "diff_v1"};
    for (int v = 0; v < 3; v++) {
        ModelConfig all = check_fixture(variants[v], "w"), some = check_fixture(variants[v], "f");
        EXPECT(all.window == 6 && all.full_every == 0, "%s_w: window %d, full every %d", variants[v], all.window,
               all.full_every);
        EXPECT(some.window == 4 && some.full_every == 2, "%s_f: window %d, full every %d", variants[v], some.window,
               some.full_every);
    }
}

static void test_gradients_of_yoco_equal_reference(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        ModelConfig config = check_fixture(attention_variants[v].name, "y");
        EXPECT(config.yoco && config.window == 5 && config.full_every == 0, "%s_y: YOCO %d, window %d, full every %d",
               attention_variants[v].name, config.yoco, config.window, config.full_every);
    }
}

// q: QK-norm, v: with windows and full layers, k: with YOCO. Those of the baseline are a Qwen3 without YOCO.
static void test_gradients_of_head_norms_equal_reference(void) {
    static const char *const fixtures[][2] = {{"baseline", "q"},    {"diff_v2", "q"}, {"diff_v1", "q"},
                                              {"diff_scalar", "q"}, {"xsa", "q"},     {"baseline", "v"},
                                              {"baseline", "k"},    {"diff_v2", "k"}, {"diff_v1", "k"}};
    for (size_t i = 0; i < sizeof(fixtures) / sizeof(fixtures[0]); i++) {
        ModelConfig config = check_fixture(fixtures[i][0], fixtures[i][1]);
        EXPECT(config.qk_norm && config.rms_norm_eps == 0.02 && (config.window > 0) == (fixtures[i][1][0] != 'q') &&
                   config.yoco == (fixtures[i][1][0] == 'k'),
               "%s_%s: QK-norm %d, rms_norm_eps %g, window %d, YOCO %d", fixtures[i][0], fixtures[i][1], config.qk_norm,
               config.rms_norm_eps, config.window, config.yoco);
    }
}

// m: experts; x: with a shared one, a layer without experts, and QK-norm; e: with a bias of the router. That of the
// baseline is a Mixtral.
static void test_gradients_of_experts_equal_reference(void) {
    static const char *const fixtures[][2] = {{"baseline", "m"}, {"diff_v2", "m"}, {"xsa", "m"},
                                              {"diff_v1", "x"},  {"diff_v2", "x"}, {"diff_v2", "e"}};
    for (int i = 0; i < 6; i++) {
        bool mixed = fixtures[i][1][0] == 'x', bias = fixtures[i][1][0] == 'e';
        ModelConfig c = check_fixture(fixtures[i][0], fixtures[i][1]);
        EXPECT(c.E == 4 + mixed + bias && c.router_bias == bias && c.K == 2 + mixed && c.shared == mixed &&
                   c.dense_layers == mixed && c.F == (mixed ? 7 : c.FE),
               "%s_%s: %d experts, %d active, %d shared, %d dense layers of width %d", fixtures[i][0], fixtures[i][1],
               c.E, c.K, c.shared, c.dense_layers, c.F);
    }
}

static void test_gradients_of_z_loss_equal_reference(void) { check_fixture("diff_v2", "z"); }

// Fixtures with rms_norm_eps far from 1e-5: the norm before o_proj uses it in diff_scalar, and 1e-5 in diff_v1.
static void test_head_norm_epsilon(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        if (attention_variants[v].norm == NORM_NONE) continue;
        ModelConfig config = check_fixture(attention_variants[v].name, "c");
        EXPECT(config.rms_norm_eps == 0.02, "%s_c has rms_norm_eps %g, not 0.02", attention_variants[v].name,
               config.rms_norm_eps);
    }
}

// ||a - b|| / ||b||; infinite if b is zero.
static double gradient_distance(const grad_t *a, const grad_t *b, size_t count) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        error += pow((double)a[i] - (double)b[i], 2);
        norm += pow((double)b[i], 2);
    }
    return norm > 0 ? sqrt(error / norm) : INFINITY;
}

// Two sequences in one micro-step, or in two. A sum that a micro-step leaves in the activations would join the next.
static void test_gradient_accumulation(void) {
    const double epsilon = sizeof(real) == 8 ? 0x1p-52 : 0x1p-23;
    for (int i = 0; i < MODEL_CASE_COUNT; i++) {
        const ModelCase *mc = &model_cases[i];
        if (mc->B != 2) continue;
        Model model;
        int *tokens = case_start(&model, mc, variant_find("diff_v2"), FOR_TRAINING);
        case_loss(&model, tokens, 2, mc->T, true);
        size_t count = model.plan.tensors.buffer_count;
        grad_t *whole = (grad_t *)checked_calloc(count, sizeof(grad_t));
        memcpy(whole, model.state.grads, count * sizeof(grad_t));
        for (int b = 0; b < 2; b++) {
            model.state.micro_step = b;
            model_micro_step(&model, tokens + b * mc->T, tokens + b * mc->T + 1, NULL, 1, mc->T, 2.0 * mc->T);
        }
        double error = gradient_distance(model.state.grads, whole, count);
        EXPECT(error <= 50 * epsilon, "%s: in one micro-step or in two: relative difference %.3g", mc->why, error);
        free(whole);
        case_end(&model, tokens);
    }
}

// The padding rows of a matrix lie in its group's buffer, belong to no tensor, and stay zero.
static void expect_zero_rows(const Model *m, TensorKind kind, int layer, int rows, int width, const char *what) {
    const Tensor *t = tensor_of(&m->plan.tensors, kind, layer);
    size_t C = m->plan.config.C, begin = t->offset + rows * C, end = t->offset + width * C;
    EXPECT(width % 8 == 0 && width >= rows && width < rows + 8, "%s: %d rows are padded to %d", what, rows, width);
    EXPECT(end <= m->plan.tensors.group_offset[t->layer + 2], "%s: the padding lies outside its group", what);
    for (int i = 0; i < m->plan.tensors.count; i++) {
        const Tensor *u = &m->plan.tensors.tensors[i];
        EXPECT(u->offset >= end || u->offset + u->count <= begin, "%s: the padding overlaps %s", what, u->name);
    }
    for (size_t e = begin; e < end; e++)
        EXPECT(m->state.params[e] == 0 && m->state.grads[e] == 0, "%s: element %zu is %g, its gradient %g", what,
               e - begin, (double)m->state.params[e], (double)m->state.grads[e]);
}

static void test_padded_widths(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int i = 0; i < MODEL_CASE_COUNT; i++) {
            const ModelCase *mc = &model_cases[i];
            Model m;
            int *tokens = case_start(&m, mc, &attention_variants[v], FOR_TRAINING);
            if (!tokens) continue;
            for (m.state.micro_step = 0; m.state.micro_step < 2; m.state.micro_step++)
                model_micro_step(&m, tokens, tokens + 1, NULL, mc->B, mc->T, mc->B * mc->T);
            for (int l = 0; l < mc->L; l++)
                expect_zero_rows(&m, T_Q, l, plan_dims(&m.plan, l)->fused_rows, plan_dims(&m.plan, l)->fused_width,
                                 mc->why);
            Linear kv = linear_shape(&m.plan, LINEAR_KV, 0);
            if (kv.OC) expect_zero_rows(&m, T_YOCO_K, mc->L / 2, m.plan.dims.kv_rows, kv.OC, mc->why);
            expect_zero_rows(&m, head_kind(&m.plan), 0, m.plan.config.V, m.plan.Vw, mc->why);
            case_end(&m, tokens);
        }
}

// Changing a token leaves all earlier positions unchanged, bit for bit.
static void test_model_is_causal(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        const ModelCase *mc = &model_cases[2];
        Model model;
        int *tokens = case_start(&model, mc, &attention_variants[v], FOR_EVALUATION);
        size_t row = mc->C * sizeof(floatX);
        char *before = (char *)checked_calloc(mc->T, row);
        case_loss(&model, tokens, 1, mc->T, false);
        memcpy(before, model.acts.norm_final, mc->T * row);
        const int changed[] = {1, 31, 63, 64};
        for (int i = 0; i < 4; i++) {
            int t = changed[i], old = tokens[t];
            tokens[t] = (old + 1) % mc->V;
            case_loss(&model, tokens, 1, mc->T, false);
            EXPECT(memcmp(before, model.acts.norm_final, t * row) == 0, "%s: token %d changed an earlier position",
                   attention_variants[v].name, t);
            EXPECT(memcmp(before + t * row, (char *)model.acts.norm_final + t * row, row) != 0,
                   "%s: token %d did not change its own position", attention_variants[v].name, t);
            tokens[t] = old;
        }
        free(before);
        case_end(&model, tokens);
    }
}

// With equal queries, both heads of a pair give the same map, because they share keys and values: o = (1 - s) a.
static void test_head_pairs(void) {
    const ModelCase *mc = &model_cases[1];
    Model model;
    int *tokens = case_start(&model, mc, variant_find("diff_v2"), FOR_EVALUATION);
    ModelConfig config = model.plan.config;
    size_t head = (size_t)config.D * config.C;
    for (int l = 0; l < config.L; l++)
        for (int h = 0; h < config.NH; h++) {
            floatX *q = param(&model.state, T_Q, l) + 2 * h * head;
            memcpy(q + head, q, head * sizeof(floatX));
        }
    case_loss(&model, tokens, mc->B, mc->T, false);
    const LayerActivations *a = &model.acts.layers[config.L - 1];
    const AttentionDims *d = &model.plan.dims;
    for (int n = 0; n < mc->B * mc->T; n++)
        for (int h = 0; h < config.NH; h++) {
            double l = (double)a->fused[n * d->fused_ld + d->fused_rows - d->lambda_rows + h], s = 1 / (1 + exp(-l));
            for (int i = 0; i < config.D; i++) {
                double first = (double)a->heads[(n * d->NQ + 2 * h) * d->DV + i];
                double context = (double)a->attn_out[(n * config.NH + h) * d->DV + i];
                EXPECT(fabs(context - (1 - s) * first) <= 1e-5 * fabs(first) + 1e-7,
                       "row %d, head %d, element %d: %g, not %g", n, h, i, context, (1 - s) * first);
            }
        }
    case_end(&model, tokens);
}

// ---- identities between variants

// Makes column 0 of every layer's normed input positive: the residual stream keeps the value 3 of the embedding.
static void make_constant_column(Model *model) {
    const ModelConfig *c = &model->plan.config;
    floatX *embed = param(&model->state, T_EMBED, 0);
    for (int v = 0; v < c->V; v++) embed[(size_t)v * c->C] = 3;
    for (int l = 0; l < c->L; l++) {
        param(&model->state, T_NORM1, l)[0] = 1;
        memset(param(&model->state, T_O, l), 0, (c->NH * c->D) * sizeof(floatX)); // row 0 adds to column 0
        memset(param(&model->state, T_MLP_DOWN, l), 0, c->F * sizeof(floatX));
    }
}
// Makes a projection read only column 0: row r has values[r % count] there.
static void read_constant_column(Model *model, TensorKind kind, const double *values, int count) {
    for (int l = 0; l < model->plan.config.L; l++) {
        const Tensor *t = tensor_of(&model->plan.tensors, kind, l);
        floatX *w = param(&model->state, kind, l);
        for (size_t e = 0; e < t->count; e++) w[e] = e % t->shape[1] == 0 ? (floatX)values[e / t->shape[1] % count] : 0;
    }
}
// Makes all rows of the first layer's normed input equal except for signs, by giving all embeddings the magnitudes of
// the first one. Returns the value of column 0 of the normed input.
static double make_equal_rows(Model *model) {
    const ModelConfig *c = &model->plan.config;
    floatX *embed = param(&model->state, T_EMBED, 0);
    double mean = 0;
    make_constant_column(model);
    for (int v = 1; v < c->V; v++)
        for (int i = 1; i < c->C; i++) {
            floatX *e = embed + v * c->C + i;
            *e = *e < 0 ? -(floatX)fabs((double)embed[i]) : (floatX)fabs((double)embed[i]);
        }
    for (int i = 0; i < c->C; i++) mean += (double)embed[i] * (double)embed[i] / c->C;
    return 3 / sqrt(mean + c->rms_norm_eps);
}

// The functions of the table below. `a` has random parameters; `b` has the same values where names and shapes agree.
static void sinks_at_zero(Model *a, Model *b) {
    (void)a;
    for (int l = 0; l < b->plan.config.L; l++)
        memset(param(&b->state, T_SINKS, l), 0, b->plan.config.NH * sizeof(floatX));
}
static void sinks_far_below(Model *a, Model *b) {
    (void)b;
    for (int l = 0; l < a->plan.config.L; l++)
        for (int h = 0; h < a->plan.config.NH; h++) param(&a->state, T_SINKS, l)[h] = -10000;
}
static void copy_common(Model *b, const Model *a) {
    for (int i = 0; i < b->plan.tensors.count; i++) {
        const Tensor *t = &b->plan.tensors.tensors[i],
                     *from =
                         tensor_of(&a->plan.tensors, t->row->kind, max_int(0, min_int(t->layer, a->plan.config.L - 1)));
        if (from && from->count == t->count)
            memcpy(b->state.params + t->offset, a->state.params + from->offset, t->count * sizeof(floatX));
    }
}
static void gates_open(Model *a, Model *b) {
    const double far_above = 10000;
    make_constant_column(a);
    read_constant_column(a, T_GATE, &far_above, 1);
    copy_common(b, a);
}
// Copies the query heads of a to b: head h from head of[h].
static void move_query_heads(Model *b, const Model *a, const int *of) {
    size_t head = (size_t)b->plan.dims.QD * b->plan.config.C;
    for (int l = 0; l < b->plan.config.L; l++)
        for (int h = 0; h < b->plan.dims.NQ; h++)
            memcpy(param(&b->state, T_Q, l) + h * head, param(&a->state, T_Q, l) + of[h] * head, head * sizeof(floatX));
}
static void lambda_far_below(Model *a, Model *b) {
    const double far_below = -10000;
    int of[64];
    make_constant_column(a);
    read_constant_column(a, T_LAMBDA, &far_below, 1);
    copy_common(b, a);
    for (int h = 0; h < b->plan.config.NH; h++) of[h] = 2 * h;
    move_query_heads(b, a, of);
}
// b, which is linear in lambda, projects the factors that a computes from its own lambda.
static void lambda_is_the_factor(Model *a, Model *b) {
    double column = make_equal_rows(a), l[3] = {-1.5, 0.25, 2}, projection[3], factor[3];
    bool sigmoid = strcmp(a->plan.config.attention->name, "diff_v2") == 0;
    for (int i = 0; i < 3; i++) {
        projection[i] = l[i] / column;
        factor[i] = (sigmoid ? 1 / (1 + exp(-l[i])) : (exp(2 * l[i]) - 1) / (exp(2 * l[i]) + 1)) / column;
    }
    read_constant_column(a, T_LAMBDA, projection, 3);
    copy_common(b, a);
    read_constant_column(b, T_LAMBDA, factor, 3);
}
static void lambda_is_one(Model *a, Model *b) {
    double one = 1 / make_equal_rows(a);
    copy_common(b, a);
    read_constant_column(b, T_LAMBDA, &one, 1);
}
static void groups_are_equal(Model *a, Model *b) {
    const TensorKind kinds[] = {T_K, T_V};
    int of[64];
    for (int l = 0; l < a->plan.config.L; l++)
        for (int k = 0; k < 2; k++) {
            const Tensor *t = tensor_of(&a->plan.tensors, kinds[k], l);
            size_t group = t->count / a->plan.config.NKV;
            for (size_t e = group; e < t->count; e++)
                a->state.params[t->offset + e] = a->state.params[t->offset + e - group];
        }
    copy_common(b, a);
    for (int h = 0; h < a->plan.config.NH; h++) of[2 * h] = h, of[2 * h + 1] = h + a->plan.config.NH;
    move_query_heads(b, a, of);
}

static void own_lambdas_are_equal(Model *a, Model *b) {
    for (int l = 0; l < a->plan.config.L; l++)
        for (int h = 0; h < a->plan.config.NH; h++)
            param(&a->state, T_OWN_LAMBDA, l)[h] = param(&b->state, T_OWN_LAMBDA, l)[0] = (floatX)(0.75 - l);
}
static void own_lambda_far_above(Model *a, Model *b) {
    (void)b;
    for (int l = 0; l < a->plan.config.L; l++) param(&a->state, T_OWN_LAMBDA, l)[0] = 10000;
}
// b has a copy of the noise head of each group of a for every signal head.
static void noise_heads_are_copied(Model *a, Model *b) {
    int of[64], g = a->plan.config.attention->name[strlen("diff_grouped_")] - '0';
    copy_common(b, a);
    for (int h = 0; h < a->plan.config.NH; h++)
        of[2 * h] = h / g * (g + 1) + h % g, of[2 * h + 1] = h / g * (g + 1) + g;
    move_query_heads(b, a, of);
}
// Windows of one position: a head of a is its own value, of which XSA leaves nothing. b adds nothing either.
static void only_own_values(Model *a, Model *b) {
    (void)a;
    for (int l = 0; l < b->plan.config.L; l++) {
        const Tensor *o = tensor_of(&b->plan.tensors, T_O, l);
        memset(b->state.params + o->offset, 0, o->count * sizeof(floatX));
    }
}
// Values without a direction: nothing is removed along them.
static void values_are_zero(Model *a, Model *b) {
    for (int l = 0; l < a->plan.config.L; l++) {
        const Tensor *v = tensor_of(&a->plan.tensors, T_V, l);
        memset(a->state.params + v->offset, 0, v->count * sizeof(floatX));
    }
    copy_common(b, a);
}

#define BIT(kind) (1u << (kind))
#define ATTENTION_BITS (BIT(T_Q) | BIT(T_K) | BIT(T_V) | BIT(T_O))
static const struct {
    const char *a, *b;
    void (*make)(Model *a, Model *b);
    int layers;
    bool exact; // bitwise equal; else equal up to rounding, because the fused GEMMs have different shapes
    // kinds of tensors whose gradients differ: only one model has a gradient through lambda, or their order differs
    unsigned except;
    int window;
} identities[] = {
    {"off_by_one", "sink", sinks_at_zero, 2, true, 0, 0},
    {"sink", "baseline", sinks_far_below, 2, true, 0, 0},
    {"gated_head", "baseline", gates_open, 2, false, 0, 0},
    {"gated_elem", "baseline", gates_open, 2, false, 0, 0},
    {"diff_v2_gated_head", "diff_v2", gates_open, 2, false, 0, 0},
    {"diff_v2_gated_elem", "diff_v2", gates_open, 2, false, 0, 0},
    {"diff_v2", "baseline", lambda_far_below, 2, false, 0, 0},
    {"diff_v2_xsa", "xsa", lambda_far_below, 2, false, 0, 0},
    {"diff_v2", "diff_v2_no_sigmoid", lambda_is_the_factor, 1, false, BIT(T_EMBED) | BIT(T_NORM1) | BIT(T_LAMBDA), 0},
    {"diff_v2_signed", "diff_v2_no_sigmoid", lambda_is_the_factor, 1, false,
     BIT(T_EMBED) | BIT(T_NORM1) | BIT(T_LAMBDA), 0},
    {"diff_v2_no_lambda", "diff_v2_no_sigmoid", lambda_is_one, 1, false, BIT(T_EMBED) | BIT(T_NORM1), 0},
    {"diff_v2_head_lambda", "diff_v2_layer_lambda", own_lambdas_are_equal, 2, true, 0, 0},
    {"diff_v2_layer_lambda", "diff_v2_no_lambda", own_lambda_far_above, 2, true, 0, 0},
    {"diff_grouped_2", "diff_v2", noise_heads_are_copied, 2, false, BIT(T_Q), 0},
    {"diff_grouped_4", "diff_v2", noise_heads_are_copied, 2, false, BIT(T_Q), 0},
    {"diff_v2_cross_group", "diff_v2", groups_are_equal, 2, false, BIT(T_Q) | BIT(T_K) | BIT(T_V), 0},
    {"xsa", "baseline", only_own_values, 2, false, ATTENTION_BITS | BIT(T_NORM1), 1},
    {"xsa", "baseline", values_are_zero, 2, true, 0, 0},
};

// Compares loss and gradients of two variants whose parameters make them the same function.
static void test_equivalent_variants(void) {
    const ModelCase *mc = &model_cases[1];
    double epsilon = sizeof(real) == 8 ? 0x1p-52 : 0x1p-23;
    for (size_t i = 0; i < sizeof(identities) / sizeof(identities[0]); i++) {
        const char *a_name = identities[i].a, *b_name = identities[i].b;
        ModelConfig a_config = case_config(mc, variant_find(a_name)), b_config = case_config(mc, variant_find(b_name));
        a_config.L = b_config.L = identities[i].layers;
        a_config.window = b_config.window = identities[i].window;
        b_config.NH = a_config.NH;
        Model a, b;
        case_open(&a, &a_config, mc->B, mc->T, FOR_TRAINING);
        model_plan(&b, &b_config, mc->B, mc->T, FOR_TRAINING, RECOMPUTE_NOTHING, one_rank);
        model_alloc(&b, NULL);
        ops_init(max_size(a.plan.workspace_bytes, b.plan.workspace_bytes));
        case_randomize(&a, 5);
        case_randomize(&b, 5);
        identities[i].make(&a, &b);
        int *tokens = case_tokens(mc->B * mc->T + 1, mc->V, 8), compared = 0;
        double a_loss = case_loss(&a, tokens, mc->B, mc->T, true), b_loss = case_loss(&b, tokens, mc->B, mc->T, true);
        EXPECT(fabs(a_loss - b_loss) <= (identities[i].exact ? 0 : 20 * epsilon * b_loss),
               "the loss of %s is %.12g, of %s %.12g", a_name, a_loss, b_name, b_loss);
        for (int t = 0; t < a.plan.tensors.count; t++) {
            const Tensor *ta = &a.plan.tensors.tensors[t], *tb = NULL;
            for (int u = 0; u < b.plan.tensors.count; u++)
                if (strcmp(ta->name, b.plan.tensors.tensors[u].name) == 0) tb = &b.plan.tensors.tensors[u];
            if (!tb || tb->count != ta->count || identities[i].except & BIT(ta->row->kind)) continue;
            double error = gradient_distance(a.state.grads + ta->offset, b.state.grads + tb->offset, ta->count);
            if (memcmp(a.state.grads + ta->offset, b.state.grads + tb->offset, ta->count * sizeof(grad_t)) == 0)
                error = 0;
            EXPECT(error <= (identities[i].exact ? 0 : 100 * epsilon),
                   "%s and %s: the gradients of %s differ by %.3g of their norm", a_name, b_name, ta->name, error);
            compared++;
        }
        EXPECT(compared >= 3 + 3 * a_config.L, "%s and %s: only %d gradients were compared", a_name, b_name, compared);
        free(tokens);
        model_free(&b, true);
        case_close(&a);
    }
}

// XSA leaves each output head without a component along its position's own value. At a first position, which attends to
// itself alone, nothing is left. Rounding: the dot product of the head, its factor, and the elements that are stored.
static void test_exclusive_heads(void) {
    double epsilon = sizeof(real) == 8 ? 0x1p-53 : 0x1p-24;
    int rows = 0, changed = 0;
    for (int v = 0; v < 2 * MODEL_CASE_COUNT; v++) {
        const ModelCase *mc = &model_cases[v / 2];
        Model m;
        int *tokens = case_start(&m, mc, variant_find(v % 2 ? "diff_v2_xsa" : "xsa"), FOR_TRAINING), N = mc->B * mc->T;
        double loss = case_loss(&m, tokens, mc->B, mc->T, true);
        const AttentionDims *d = &m.plan.dims;
        EXPECT(isfinite(loss) && isfinite(case_grad_norm(&m)), "%s: loss %g, gradient norm %g", mc->why, loss,
               case_grad_norm(&m));
        for (int l = 0; l < mc->L; l++)
            for (int i = 0; i < N * d->OH; i++, rows++) {
                const LayerActivations *a = &m.acts.layers[l];
                bool cross = mc->yoco && l >= mc->L / 2;
                const floatX *own =
                    cross ? m.acts.kv + i / d->OH * d->kv_ld + d->k_rows : a->fused + i / d->OH * d->fused_ld + d->v_at;
                double along = 0, left = 0, square = 0, before = 0;
                for (int e = 0; e < d->DV; e++) {
                    double y = (double)a->attn_out[i * d->DV + e], x = (double)a->combined[i * d->DV + e],
                           value = (double)own[i % d->OH / (d->OH / d->NV) * d->DV + e];
                    along += y * value, left += y * y, square += value * value, before += x * x;
                }
                double bound = (2 * d->DV + 4) * epsilon * sqrt(before);
                EXPECT(fabs(along) <= bound * sqrt(square), "%s, layer %d, head %d: %g along a value of length %g",
                       mc->why, l, i, along, sqrt(square));
                bool first = i / d->OH % mc->T == 0 || mc->window == 1;
                EXPECT(sqrt(left) <= (first ? bound : sqrt(before)), "%s, layer %d, head %d: %g of %g is left", mc->why,
                       l, i, sqrt(left), sqrt(before));
                changed += sqrt(left) > bound && left < before * (1 - 1e-6);
            }
        case_end(&m, tokens);
    }
    EXPECT(rows > 1000 && changed > rows / 2, "of %d rows, %d are changed, and not to zero", rows, changed);
}

// QK-norm without an epsilon, because products with 4 are exact: queries and keys that are 4 times as large do
// not change a bit of the loss and of the gradients, except that the gradients of q_proj and k_proj are a quarter.
static void test_head_norm_scale(void) {
    static const TensorKind kinds[] = {T_Q, T_K, T_YOCO_K};
    for (int v = 0; v < 2 * ATTENTION_VARIANT_COUNT; v++) {
        const ModelCase *mc = &model_cases[v % 2 ? 9 : 4];
        ModelConfig config = case_config(mc, &attention_variants[v / 2]);
        const char *name = config.attention->name;
        config.rms_norm_eps = 0;
        Model m;
        case_open(&m, &config, mc->B, mc->T, FOR_TRAINING);
        case_randomize(&m, 7);
        size_t bytes = m.plan.grads_bytes;
        int *tokens = case_tokens(mc->B * mc->T + 1, mc->V, 3);
        grad_t *before = (grad_t *)checked_calloc(1, bytes);
        double loss = case_loss(&m, tokens, mc->B, mc->T, true);
        memcpy(before, m.state.grads, bytes);
        assert(mc->qk_norm);
        for (int scaled = 0; scaled < 3; scaled++)
            for (int i = 0; i < m.plan.tensors.count; i++) {
                const Tensor *t = &m.plan.tensors.tensors[i];
                if (t->row->kind != kinds[scaled]) continue;
                for (size_t e = 0; e < t->count; e++) m.state.params[t->offset + e] *= 4, before[t->offset + e] /= 4;
            }
        double other = case_loss(&m, tokens, mc->B, mc->T, true);
        EXPECT(loss == other, "%s, %s: the loss is %.9g, with larger queries and keys %.9g", name, mc->why, loss,
               other);
        for (int i = 0; i < m.plan.tensors.count; i++) {
            const Tensor *t = &m.plan.tensors.tensors[i];
            EXPECT(memcmp(before + t->offset, m.state.grads + t->offset, t->count * sizeof(grad_t)) == 0,
                   "%s, %s: the gradient of %s has other bits", name, mc->why, t->name);
        }
        free(before);
        case_end(&m, tokens);
    }
}

// Draws a token from the logits after tokens[begin .. end-1], which are at positions from 0, without a cache.
static inline int draw_uncached(Model *model, const int *tokens, int begin, int end, uint64_t key, int drawn) {
    float logits[64];
    assert(model->plan.config.V <= 64 && end - begin <= model->plan.T);
    model_prefill(model, 0, tokens + begin, end - begin, logits);
    Sampler sampler = sampler_open(model->plan.config.V);
    int token = sample_token(logits, model->plan.config.V, 1, 0, random_uniform(key, (uint64_t)drawn), &sampler);
    sampler_close(&sampler);
    return token;
}

// The context begins with the last T tokens of the prompt. When it is full, its last T/2 tokens remain. Compares every
// token with the one drawn from exactly that context. Half of that context must often give a different token.
static void test_generation_full_context(void) {
    const ModelCase *mc = &model_cases[1];
    ModelConfig config = case_config(mc, variant_find("diff_v2"));
    Model model, fresh;
    const int T = mc->T;
    const int lengths[] = {1, T - 1, T, T + 1, 2 * T + 3};
    enum { COUNT = 40 };
    case_open(&model, &config, 1, T, FOR_GENERATION);
    case_randomize(&model, 5);
    model_plan(&fresh, &config, 1, T, FOR_GENERATION, RECOMPUTE_NOTHING, one_rank);
    model_alloc(&fresh, &model);
    for (int i = 0; i < 5; i++) {
        int length = lengths[i], begin = max_int(0, length - T), others = 0;
        int *tokens = case_tokens(length + COUNT, mc->V, 30 + (uint64_t)i);
        case_generate(&model, tokens, length, COUNT, 1.0, 0, 42);
        for (int end = length; end < length + COUNT; end++) {
            if (end - begin > T) begin = end - T / 2;
            int wanted = draw_uncached(&fresh, tokens, begin, end, 42, end - length);
            EXPECT(tokens[end] == wanted, "a prompt of %d tokens, T = %d: token %d is %d; its context gives %d", length,
                   T, end, tokens[end], wanted);
            int half = begin + (end - begin) / 2;
            others += draw_uncached(&fresh, tokens, half, end, 42, end - length) != wanted;
        }
        EXPECT(others >= COUNT / 4, "half of the context gives different tokens only %d times of %d", others, COUNT);
        free(tokens);
    }
    model_free(&fresh, false);
    case_close(&model);
}

static void test_generation_beyond_context(void) {
    const ModelCase *mc = &model_cases[1];
    ModelConfig config = case_config(mc, variant_find("diff_v2"));
    Model model;
    case_open(&model, &config, 1, mc->T, FOR_GENERATION);
    case_randomize(&model, 5);
    enum { COUNT = 50 };
    int tokens[2][1 + COUNT];
    for (int i = 0; i < 2; i++) {
        tokens[i][0] = 1;
        case_generate(&model, tokens[i], 1, COUNT, 1.0, 0, 42);
        for (int t = 0; t <= COUNT; t++)
            EXPECT(tokens[i][t] >= 0 && tokens[i][t] < config.V, "token %d is %d", t, tokens[i][t]);
    }
    EXPECT(memcmp(tokens[0], tokens[1], sizeof(tokens[0])) == 0, "the same key gave different tokens");
    case_generate(&model, tokens[1], 1, COUNT, 1.0, 0, 43);
    EXPECT(memcmp(tokens[0], tokens[1], sizeof(tokens[0])) != 0, "different keys gave the same tokens");
    case_generate(&model, tokens[0], 1, COUNT, 0, 0, 1);
    case_generate(&model, tokens[1], 1, COUNT, 1.0, 1, 2);
    EXPECT(memcmp(tokens[0], tokens[1], sizeof(tokens[0])) == 0, "temperature 0 and top-k 1 differ");
    case_close(&model);
}

// The factor is clip/norm, neither clip/norm^2 nor always 1.
static void test_gradient_clipping(void) {
    EXPECT(clip_factor(4, 1) == 0.25 && clip_factor(4, 8) == 1 && clip_factor(4, 0) == 1 && clip_factor(4, 2) == 0.5,
           "factors %g %g %g %g", clip_factor(4, 1), clip_factor(4, 8), clip_factor(4, 0), clip_factor(4, 2));
}

// Compares one update with the AdamW formula, tensor by tensor: weight decay of matrices only, the clipped gradient.
static void expect_decay_of_matrices_only(const AttentionVariant *variant) {
    const ModelCase *mc = &model_cases[4];
    assert(mc->qk_norm);
    Model model;
    int *tokens = case_start(&model, mc, variant, FOR_TRAINING);
    double loss = case_loss(&model, tokens, mc->B, mc->T, true), lr = 0.01;
    floatX *before = (floatX *)checked_calloc(model.plan.tensors.buffer_count, sizeof(floatX));
    memcpy(before, model.state.params, model.plan.params_bytes);
    Options o;
    options_defaults(&o);
    o.grad_clip = 0.01;
    o.eps = 1e-3; // as large as the gradients, so that their scale matters
    o.beta1 = 0.8, o.beta2 = 0.7;
    double grad_norm = case_grad_norm(&model);
    model_update(&model, &o, lr, 1, grad_norm);
    EXPECT(isfinite(loss) && grad_norm > o.grad_clip, "a norm of %g is not clipped", grad_norm);
    for (int i = 0; i < model.plan.tensors.count; i++) {
        const Tensor *t = &model.plan.tensors.tensors[i];
        for (size_t e = t->offset; e < t->offset + t->count; e++) {
            double g = (double)model.state.grads[e] * o.grad_clip / grad_norm, w = (double)before[e];
            double decay = t->ndim == 2 ? o.weight_decay : 0;
            double expected = w - lr * (g / (fabs(g) + o.eps) + decay * w); // the first step: m^ = g, sqrt(v^) = |g|
            EXPECT(fabs((double)model.state.params[e] - expected) <= 1e-6 * fabs(w) + 1e-7,
                   "%s, %s: %g became %g, not %g", variant->name, t->name, w, (double)model.state.params[e], expected);
            double m = (1 - o.beta1) * g, v = (1 - o.beta2) * g * g;
            EXPECT(fabs((double)model.state.m[e] - m) <= 1e-6 * fabs(m) &&
                       fabs((double)model.state.v[e] - v) <= 1e-6 * v,
                   "%s, %s: moments %g and %g, not %g and %g", variant->name, t->name, (double)model.state.m[e],
                   (double)model.state.v[e], m, v);
        }
    }
    model.state.grads[3] = (grad_t)NAN;
    EXPECT(!isfinite(case_grad_norm(&model)), "the norm of a gradient with a NaN is %g", case_grad_norm(&model));
    free(before);
    free(tokens);
    options_free(&o);
    case_close(&model);
}

static void test_update_decay_and_clipping(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) expect_decay_of_matrices_only(&attention_variants[v]);
    for (int r = 0; r < TENSOR_ROW_COUNT; r++) // including tensors that no variant here has
        EXPECT(tensor_rows[r].decay == (tensor_rows[r].shape[1] != DIM_NONE), "decay is %d for %s",
               tensor_rows[r].decay, tensor_rows[r].name);
}

// Computes each value by itself: it does not depend on chunks or on other tensors.
static void test_initial_values(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        ModelConfig config = case_config(&model_cases[1], &attention_variants[v]);
        config.qk_norm = true;
        Model model;
        size_t pieces = 0;
        model_plan(&model, &config, 1, 1, FOR_EVALUATION, RECOMPUTE_NOTHING, one_rank);
        model_alloc(&model, NULL);
        model_init(&model.plan, model.state.params, model.state.master, 17);
        for (int i = 0; i < model.plan.tensors.count; i++) {
            const Tensor *t = &model.plan.tensors.tensors[i];
            static const double deviations[] = {0, 0, 0.02, 0.02, 0.1, 0}; // in the order of Init
            double mean = t->row->init == INIT_ONE ? 1 : 0,
                   deviation = deviations[t->row->init] / (t->row->init == INIT_RESIDUAL ? sqrt(2.0 * config.L) : 1);
            if (t->row->init == INIT_LAMBDA && strcmp(config.attention->name, "diff_scalar") == 0)
                mean = lambda_init(t->layer); // else before a sigmoid: 0
            pieces = max_size(pieces, (t->count + INIT_CHUNK - 1) / INIT_CHUNK);
            for (size_t e = 0; e < t->count; e++) {
                floatX want = (floatX)(float)(mean + deviation * random_normal(random_key(t->name, 17), e));
                EXPECT(model.state.params[t->offset + e] == want, "%s: element %zu of %s is %g, not %g",
                       attention_variants[v].name, e, t->name, (double)model.state.params[t->offset + e], (double)want);
            }
        }
        EXPECT(pieces > 2, "no tensor is initialized in several chunks");
        model_free(&model, true);
    }
}

// Counts the products one by one, and attention query by query.
static void test_step_flops(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int m = 0; m < MODEL_CASE_COUNT; m++) {
            const ModelCase *mc = &model_cases[m];
            ModelConfig c = case_config(mc, &attention_variants[v]);
            Problem problem;
            if (model_config_problems(&c, &problem, 1)) continue;
            Model model;
            model_plan(&model, &c, mc->B, mc->T, FOR_TRAINING, RECOMPUTE_NOTHING, one_rank);
            const AttentionDims *d = &model.plan.dims;
            double layers = c.yoco ? (double)mc->T * d->kv_rows * c.C : 0;
            for (int l = 0; l < c.L; l++) {
                bool own = !c.yoco || l < c.L / 2, all = !c.window || (c.full_every && (l + 1) % c.full_every == 0);
                int rows = d->q_rows + (own ? d->kv_rows : 0) + d->lambda_rows + d->gate_rows;
                double per_row = (double)rows * c.C + (double)c.NH * c.D * c.C + 3.0 * c.C * c.F;
                for (int t = 0; t < mc->T; t++)
                    for (int j = 0; j <= t; j++)
                        layers += (j == 0) * per_row + (all || !own || t - j < c.window) * d->NQ * (d->QD + d->DV);
            }
            double want = 3 * 2 * (mc->B * (layers + (double)mc->T * c.V * c.C)),
                   got = training_flops(&model.plan, mc->B, mc->T);
            EXPECT(fabs(got - want) <= 1e-12 * want, "%s, %s: %.17g FLOPs, not %.17g", attention_variants[v].name,
                   mc->why, got, want);
            model_free(&model, false);
        }
}

static void test_initial_values_of_variants(void) {
    Model models[2];
    for (int v = 0; v < 2; v++) {
        ModelConfig config = case_config(&model_cases[1], variant_find(v ? "diff_v2" : "baseline"));
        model_plan(&models[v], &config, 1, 1, FOR_EVALUATION, RECOMPUTE_NOTHING, one_rank);
        model_alloc(&models[v], NULL);
        model_init(&models[v].plan, models[v].state.params, models[v].state.master, 17);
    }
    double sum = 0, squares = 0, count = 0;
    for (int i = 0; i < models[0].plan.tensors.count; i++) {
        const Tensor *t = &models[0].plan.tensors.tensors[i], *u = NULL;
        for (int j = 0; j < models[1].plan.tensors.count; j++)
            if (strcmp(t->name, models[1].plan.tensors.tensors[j].name) == 0) u = &models[1].plan.tensors.tensors[j];
        EXPECT(u && memcmp(models[0].state.params + t->offset, models[1].state.params + u->offset,
                           t->count * sizeof(floatX)) == 0,
               "%s differs between baseline and diff_v2", t->name);
        for (size_t e = 0; e < t->count; e++) {
            double w = (double)models[0].state.params[t->offset + e];
            if (t->row->init == INIT_ONE) EXPECT(w == 1, "%s starts at %g, not 1", t->name, w);
            if (t->row->init != INIT_NORMAL) continue;
            sum += w, squares += w * w, count++;
        }
    }
    // the mean of n normals has standard deviation sigma/sqrt(n), their variance sqrt(2/n) of itself; 5 of each
    EXPECT(fabs(sum / count) < 5 * 0.02 / sqrt(count) && fabs(squares / count / 4e-4 - 1) < 5 * sqrt(2 / count),
           "mean %g, standard deviation %g of %g values of normal(0, 0.02)", sum / count, sqrt(squares / count), count);
    for (int v = 0; v < 2; v++) model_free(&models[v], true);
}

// Each kind of tensor has one rule, and at the base shape no rule changes a number or splits an update.
static void test_scaling_at_the_base(void) {
    for (int kind = 0; kind < TENSOR_KINDS; kind++) {
        int rules = 0;
        for (int r = 0; r < SCALING_ROW_COUNT; r++) rules += scaling_rows[r].kinds >> kind & 1;
        EXPECT(rules == 1, "tensor kind %d has %d rules", kind, rules);
    }
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        ModelConfig standard = case_config(&model_cases[1], &attention_variants[v]), c = standard;
        c.parametrization = PARAMETRIZATION_COMPLETEP;
        c.base_width = c.C, c.base_depth = c.L, c.base_head = c.D;
        TensorList lists[2] = {tensor_list_build(&standard, 1), tensor_list_build(&c, 1)};
        EXPECT(lists[0].run_count == lists[1].run_count, "%s has %d updates, not %d", attention_variants[v].name,
               lists[1].run_count, lists[0].run_count);
        for (int i = 0; i < lists[1].count; i++) {
            Scaling k = scaling_of(&c, lists[1].tensors[i].row->kind);
            EXPECT(k.init == 1 && k.rate == 1 && k.eps == 1, "%s is scaled by %g, %g and %g", lists[1].tensors[i].name,
                   k.init, k.rate, k.eps);
        }
        for (int i = 0; i < 2; i++) tensor_list_free(&lists[i]);
    }
}

// The first matrices of a model of twice the width, four times the depth and four times the head width as its base.
static void test_scaling_of_kinds(void) {
    static const struct {
        TensorKind kind;
        bool qk_norm;
        Scaling want;
    } cases[] = {
        {T_EMBED, false, {1, 1, 0.5}},        {T_NORM_FINAL, false, {0.5, 0.5, 1}},
        {T_K, false, {0, 0.5, 0.125}},        {T_Q, false, {0, 0.25, 0.25}},
        {T_Q, true, {0, 0.5, 0.125}},         {T_Q_NORM, true, {0.5, 0.5, 0.25}},
        {T_MLP_DOWN, false, {0, 0.125, 0.5}}, {T_LAMBDA, false, {0, 0.5, 0.125}},
        {T_ROUTER, false, {0.5, 0.5, 0.125}}, {T_SINKS, false, {1, 1, 0.125}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ModelConfig c = case_config(&model_cases[1], variant_find("diff_v2"));
        c.parametrization = PARAMETRIZATION_COMPLETEP, c.qk_norm = cases[i].qk_norm;
        c.base_width = 64, c.base_depth = 2, c.base_head = 8, c.C = 128, c.L = 8, c.D = 32;
        Scaling got = scaling_of(&c, cases[i].kind), want = cases[i].want;
        if (want.init == 0) want.init = got.init; // a root
        EXPECT(got.init == want.init && got.rate == want.rate && got.eps == want.eps,
               "kind %d is scaled by %g, %g and %g", cases[i].kind, got.init, got.rate, got.eps);
        for (int muon = 1; muon <= 2; muon++) { // the rank of a matrix grows with the width, that of a slice with D
            Tensor t;
            memset(&t, 0, sizeof(t));
            for (int r = 0; r < TENSOR_ROW_COUNT; r++)
                if (tensor_rows[r].kind == cases[i].kind) t.row = &tensor_rows[r];
            t.muon = true, t.sliced = muon == 2;
            double rate = tensor_scaling(&c, &t).rate / got.rate;
            EXPECT(fabs(rate - (t.sliced ? 2 : sqrt(2))) < 1e-12, "Muon's rate of kind %d is %g times AdamW's",
                   cases[i].kind, rate);
        }
    }
}

static const Test model_tests[] = {
    {"gradients equal those of the float64 reference", test_gradients_equal_reference},
    {"gradients of models with windows equal those of the float64 reference",
     test_gradients_of_windows_equal_reference},
    {"gradients of YOCO models equal those of the float64 reference", test_gradients_of_yoco_equal_reference},
    {"gradients of models with QK-norm equal those of the float64 reference",
     test_gradients_of_head_norms_equal_reference},
    {"gradients of models with experts equal those of the float64 reference",
     test_gradients_of_experts_equal_reference},
    {"gradients of the z-loss equal those of the float64 reference", test_gradients_of_z_loss_equal_reference},
    {"the norm before o_proj has the epsilon of its variant", test_head_norm_epsilon},
    {"gradients add up over micro-steps", test_gradient_accumulation},
    {"zero rows pad matrices so that products have widths of whole 16 bytes", test_padded_widths},
    {"no position attends to a later one", test_model_is_causal},
    {"the heads of a pair share keys and values", test_head_pairs},
    {"variants with equivalent sinks, gates or lambdas have equal losses and gradients", test_equivalent_variants},
    {"XSA leaves nothing along the own value, and nothing at a first position", test_exclusive_heads},
    {"QK-norm makes the size of queries and keys irrelevant", test_head_norm_scale},
    {"generation keeps the last half of a full context, and reads all of a prompt that fills it",
     test_generation_full_context},
    {"generation continues beyond the context, and depends on its key", test_generation_beyond_context},
    {"clipping scales the gradient norm to the limit", test_gradient_clipping},
    {"an update decays matrices only and applies the clipped gradient; a NaN makes the norm NaN",
     test_update_decay_and_clipping},
    {"a step has the FLOPs of its matrix products and attention", test_step_flops},
    {"an initial value depends only on the seed, the tensor's name and the element", test_initial_values},
    {"variants have equal initial values of tensors with equal names and shapes", test_initial_values_of_variants},
    {"completep at the base shape is standard, and has one rule for each kind of tensor", test_scaling_at_the_base},
    {"completep scales rates and epsilons with the shape", test_scaling_of_kinds},
};

static const Test model_fp64_tests[] = {
    {"gradients of every tensor equal finite differences", test_finite_differences},
};
