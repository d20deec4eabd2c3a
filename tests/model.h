/*
model.h: tests of the whole model for all attention variants: gradients against finite differences and against the
fixtures of dev/reference, generation with a full context and initial values. Identities between variants
are those of the reference (dev/reference/test_reference.py).
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

static struct { int blocks, size; } case_sparse; // of the configurations of cases

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
    c.sparse_blocks = case_sparse.blocks, c.sparse_size = case_sparse.size;
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
    Generator generator = generator_of(generation_model(model), temperature, top_k, -1);
    StopReason stopped;
    return generate_tokens(&generator, tokens, length, count, key, &stopped);
}

// Returns the norm of the gradients of one rank, before clipping.
static inline double case_grad_norm(Model *model) {
    rank_squares(&model->state, model->state.grad_square_sums);
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

// Compares the gradients of one fixture; returns its variant.
static inline const AttentionVariant *check_fixture(const char *variant, const char *size) {
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
    const char *path = test_text("%s/tokens.bin", f.dir.path);
    dataloader_open(&loader, path, f.B, f.T, config.V, 0, 1, 0, false);
    int *tokens = (int *)checked_calloc(f.B * f.T + 1, sizeof(int));
    dataloader_read_first_tokens(&loader, tokens, f.B * f.T + 1);
    dataloader_close(&loader);
    compare_with_fixture(&f, &model, case_loss(&model, tokens, f.B, f.T, true));
    case_end(&model, tokens);
    safetensors_close(f.file);
    return config.attention;
}

// Every fixture: of each variant at least `odd`, `even` and `yoco`. Others have windows, QK-norm, experts, the z-loss,
// selected blocks, or an rms_norm_eps far from the 1e-5 that the norm before o_proj has in diff_v1.
static void test_gradients_equal_reference(void) {
    int counts[ATTENTION_VARIANT_COUNT] = {0};
    glob_t found;
    CHECK(glob("dev/reference/fixtures/*.safetensors", 0, NULL, &found) == 0, "dev/reference has no fixtures");
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char *variant = strtok(strrchr(found.gl_pathv[i], '/') + 1, "."), *size = strtok(NULL, ".");
        counts[check_fixture(variant, size) - attention_variants]++;
    }
    globfree(&found);
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        EXPECT(counts[v] >= 3, "%s has %d fixtures", attention_variants[v].name, counts[v]);
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
static void expect_zero_rows(const Model *m, LinearKind kind, int layer, int rows, int width, const char *what) {
    const Tensor *t = tensor_of(&m->plan.tensors, linear_weight(&m->plan, kind), layer);
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
                expect_zero_rows(&m, LINEAR_QKVG, l, plan_dims(&m.plan, l)->fused_rows,
                                 plan_dims(&m.plan, l)->fused_width, mc->why);
            Linear kv = linear_shape(&m.plan, LINEAR_KV, 0);
            if (kv.OC) expect_zero_rows(&m, LINEAR_KV, mc->L / 2, m.plan.dims.kv_rows, kv.OC, mc->why);
            expect_zero_rows(&m, LINEAR_HEAD, 0, m.plan.config.V, m.plan.Vw, mc->why);
            case_end(&m, tokens);
        }
}

// Draws a token from the logits after tokens[begin .. end-1], which are at positions from 0, without a cache.
static inline int draw_uncached(Model *model, const int *tokens, int begin, int end, uint64_t key, int drawn) {
    float logits[64];
    assert(model->plan.config.V <= 64 && end - begin <= model->plan.T);
    generation_prefill(generation_model(model), 0, tokens + begin, end - begin, logits);
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
        double sum = 0, squares = 0, count = 0;
        for (int i = 0; i < model.plan.tensors.count; i++) {
            const Tensor *t = &model.plan.tensors.tensors[i];
            static const double deviations[] = {0, 0, 0.02, 0.02, 0.1, 0}; // in the order of Init
            double mean = t->row->init == INIT_ONE ? 1 : 0,
                   deviation = deviations[t->row->init] / (t->row->init == INIT_RESIDUAL ? sqrt(2.0 * config.L) : 1);
            if (t->row->init == INIT_LAMBDA && strcmp(config.attention->name, "diff_scalar") == 0)
                mean = lambda_init(t->layer); // else before a sigmoid: 0
            pieces = max_size(pieces, (t->count + INIT_CHUNK - 1) / INIT_CHUNK);
            for (size_t e = 0; e < t->count; e++) {
                double x = random_normal(random_key(t->name, 17), e);
                floatX want = (floatX)(float)(mean + deviation * x);
                sum += x, squares += x * x, count++;
                EXPECT(model.state.params[t->offset + e] == want, "%s: element %zu of %s is %g, not %g",
                       attention_variants[v].name, e, t->name, (double)model.state.params[t->offset + e], (double)want);
            }
        }
        EXPECT(pieces > 2, "no tensor is initialized in several chunks");
        // the mean of n normals has standard deviation 1/sqrt(n), that of their squares sqrt(2/n); 5 of each
        EXPECT(fabs(sum / count) < 5 / sqrt(count) && fabs(squares / count - 1) < 5 * sqrt(2 / count),
               "%g normals have the mean %g and the mean square %g", count, sum / count, squares / count);
        model_free(&model, true);
    }
}

// The first matrices of a model of twice the width and four times the depth as its base.
static void test_scaling_of_kinds(void) {
    static const struct {
        TensorKind kind;
        Scaling want;
    } cases[] = {
        {T_EMBED, {1, 1, 0.5}},      {T_NORM_FINAL, {0.5, 0.5, 1}}, {T_K, {0, 0.5, 0.125}},
        {T_Q, {0, 0.5, 0.125}},      {T_Q_NORM, {1, 1, 0.125}},     {T_MLP_DOWN, {0, 0.125, 0.5}},
        {T_LAMBDA, {0, 0.5, 0.125}}, {T_ROUTER, {0.5, 0.5, 0.125}}, {T_SINKS, {1, 1, 0.125}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ModelConfig c = case_config(&model_cases[1], variant_find("diff_v2"));
        c.parametrization = PARAMETRIZATION_COMPLETEP;
        c.base_width = 64, c.base_depth = 2, c.C = 128, c.L = 8;
        Scaling got = scaling_of(&c, cases[i].kind), want = cases[i].want;
        if (want.init == 0) want.init = got.init; // a root
        EXPECT(got.init == want.init && got.rate == want.rate && got.eps == want.eps,
               "kind %d is scaled by %g, %g and %g", cases[i].kind, got.init, got.rate, got.eps);
        Tensor t;
        memset(&t, 0, sizeof(t));
        for (int r = 0; r < TENSOR_ROW_COUNT; r++)
            if (tensor_rows[r].kind == cases[i].kind) t.row = &tensor_rows[r];
        t.muon = true;
        double rate = tensor_scaling(&c, &t).rate / got.rate; // the rank of a matrix grows with the width
        EXPECT(fabs(rate - sqrt(2)) < 1e-12, "Muon's rate of kind %d is %g times AdamW's", cases[i].kind, rate);
    }
}

static const Test model_tests[] = {
    {"gradients equal those of every fixture of the float64 reference", test_gradients_equal_reference},
    {"gradients add up over micro-steps", test_gradient_accumulation},
    {"zero rows pad matrices so that products have widths of whole 16 bytes", test_padded_widths},
    {"generation keeps the last half of a full context, and reads all of a prompt that fills it",
     test_generation_full_context},
    {"an initial value depends only on the seed, the tensor's name and the element", test_initial_values},
    {"completep scales rates and epsilons with the shape", test_scaling_of_kinds},
};

static const Test model_fp64_tests[] = {
    {"gradients of every tensor equal finite differences", test_finite_differences},
};
