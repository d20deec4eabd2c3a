/*
experts.h: tests of mixtures of experts: routing, models with experts and their config.json. tests/model.h compares
their gradients with the reference, and tests/programs/test_experts.py tests whole runs.
*/
#pragma once
#include "model.h"
#include "program.h"

static const struct ExpertCase {
    int E, K, FE, shared, dense_layers;
    bool bias;
    ModelCase model;
} expert_cases[] = {
    {5, 2, 13, 0, 0, false, {"widths no multiple of 8", 19, 20, 2, 4, 2, 8, 12, 2, 11, true, 0, 0, false, false}},
    {3, 3, 8, 0, 0, false, {"a row more than a block", 23, 16, 2, 2, 1, 8, 12, 1, 65, false, 0, 0, false, false}},
    {4, 1, 16, 2, 1, false, {"shared and dense, QK-norm", 29, 24, 3, 4, 2, 8, 20, 2, 21, true, 0, 0, false, true}},
    {9, 2, 8, 0, 1, false, {"5 tokens, windows", 19, 16, 3, 2, 1, 8, 12, 1, 5, true, 3, 2, false, false}},
    {4, 2, 8, 1, 1, true, {"YOCO, a bias", 19, 16, 4, 4, 2, 8, 12, 2, 11, true, 4, 0, true, false}},
};
enum { EXPERT_CASE_COUNT = sizeof(expert_cases) / sizeof(expert_cases[0]) };

static ModelConfig expert_config(int i, const char *variant) {
    const struct ExpertCase *e = &expert_cases[i];
    ModelConfig c = case_config(&e->model, variant_find(variant));
    c.E = e->E, c.K = e->K, c.FE = e->FE, c.shared = e->shared, c.dense_layers = e->dense_layers,
    c.router_bias = e->bias;
    return c;
}

// Random parameters; the bias is small, so that every expert is chosen.
static void expert_randomize(Model *m, uint64_t seed) {
    const ModelConfig *c = &m->plan.config;
    case_randomize(m, seed);
    for (int l = 0; l < c->L && c->router_bias; l++) {
        const Tensor *bias = tensor_of(&m->plan.tensors, T_ROUTER_BIAS, l);
        for (size_t e = 0; bias && e < bias->count; e++) m->state.params[bias->offset + e] *= (floatX)0.05;
    }
}

// A model of the case with random parameters and large losses of the routers; returns B*T + 3 tokens.
static int *expert_start(Model *m, int i, const char *variant, Purpose purpose, Recompute recompute) {
    const ModelCase *mc = &expert_cases[i].model;
    ModelConfig config = expert_config(i, variant);
    model_plan(m, &config, mc->B, mc->T, purpose, recompute, one_rank);
    model_alloc(m, NULL);
    ops_init(m->plan.workspace_bytes);
    expert_randomize(m, 7);
    m->router.aux_weight = 0.5, m->router.z_weight = 0.1;
    return case_tokens(mc->B * mc->T + 3, mc->V, 3);
}

// The sum that is minimized, with the routers' losses by their definition, and the z-loss.
static double expert_loss(Model *m, const int *tokens, int B, int T) {
    double loss = case_loss(m, tokens, B, T, false);
    router_count(&m->router, m->mlps, B * T, B * T, true);
    router_measure(&m->router, B * T);
    loss += m->router.aux_weight * m->router.aux + m->router.z_weight * m->router.z;
    for (int n = 0; n < B * T; n++) loss += (double)(m->z_loss * m->acts.log_z[n] * m->acts.log_z[n]) / (B * T);
    return loss;
}

static void test_expert_differences(void) {
    static const char *const variants[] = {"diff_v2", "baseline", "diff_v1", "diff_v2", "diff_v2"};
    for (int i = 0; i < EXPERT_CASE_COUNT; i++) {
        Model m;
        int *tokens = expert_start(&m, i, variants[i], FOR_TRAINING, RECOMPUTE_NOTHING);
        const ModelCase *mc = &expert_cases[i].model;
        m.z_loss = (real)0.05;
        for (int t = 0; t < 2; t++) case_loss(&m, tokens, mc->B, mc->T, true); // the second writes all again
        if (i != 3) expect_differences(&m, tokens, mc->B, mc->T, expert_loss, mc->why);
        else { // some experts have no token, hence no gradient
            int silent = 0;
            for (int k = 0; k < m.plan.tensors.count; k++) {
                const Tensor *t = &m.plan.tensors.tensors[k];
                double norm = 0;
                for (size_t e = 0; e < t->count; e++) norm += pow((double)m.state.grads[t->offset + e], 2);
                EXPECT(isfinite(norm), "%s: %s has no gradient", mc->why, t->name);
                if (t->row->per_expert) silent += norm == 0;
            }
            EXPECT(silent >= 3, "%s: %d tensors of experts have a gradient of zero", mc->why, silent);
        }
        case_end(&m, tokens);
    }
}

// Equal logits: the experts with the smaller numbers. NaN comes first, so that it is not hidden.
static void test_router_ties(void) {
    enum { N = 4, C = 1, E = 5, K = 3 };
    static const real x[N] = {1, 1, 1, 1}, rows[N][E] = {{0, 0, 0, 0, 0},
                                                         {1, 2, 2, 1, 2},
                                                         {3, (real)-INFINITY, 3, (real)-INFINITY, 5},
                                                         {1, (real)NAN, 7, 2, (real)NAN}};
    static const int want[N][K] = {{0, 1, 2}, {1, 2, 4}, {4, 0, 2}, {1, 4, 2}};
    Routing r = {1, C, E, K};
    ops_init(1 << 16);
    for (int n = 0; n < N; n++) {
        real logits[E], lse, weights[K], sum = 0;
        int experts[K];
        router_forward(logits, &lse, experts, weights, &x[n], rows[n], NULL, r);
        for (int k = 0; k < K; k++)
            EXPECT(experts[k] == want[n][k], "row %d: choice %d is %d, not %d", n, k, experts[k], want[n][k]);
        for (int k = 0; k < K; k++) sum += weights[k];
        EXPECT(n == 3 ? isnan(sum) : fabs((double)sum - 1) < 1e-6, "row %d: the weights sum to %g", n, (double)sum);
    }
    ops_free();
}

// The bias may choose an expert whose logit is far below the largest one; its weight is that of the chosen ones alone.
static void test_router_far_choice(void) {
    floatX x[1] = {1}, weight[3] = {120, 1, 0}, bias[3] = {0, 3, 2};
    real logits[3], lse, weights[2];
    int experts[2];
    ops_init(1 << 16);
    for (int K = 1; K <= 2; K++) {
        Routing r = {1, 1, 3, K};
        router_forward(logits, &lse, experts, weights, x, weight, bias, r);
        double first = K == 1 ? 1 : 1 / (1 + exp(-1));
        EXPECT(experts[0] == 1 && fabs((double)weights[0] - first) < 1e-6, "K %d: expert %d with weight %g, not %g", K,
               experts[0], (double)weights[0], first);
    }
    ops_free();
}

// A Mixtral holds experts alone; what else a model with experts has makes it a diffv2. Both are read back equal.
static void test_expert_configs(void) {
    static const struct {
        const char *attention;
        int shared, dense_layers, window, full_every;
        bool bias, qk_norm, yoco;
        const char *type;
    } cases[] = {
        {"baseline", 0, 0, 0, 0, false, false, false, "mixtral"},
        {"baseline", 0, 0, 4, 0, false, false, false, "mixtral"},
        {"diff_v2", 0, 0, 0, 0, false, false, false, "diffv2"},
        {"baseline", 2, 0, 0, 0, false, false, false, "diffv2"},
        {"baseline", 0, 1, 0, 0, false, false, false, "diffv2"},
        {"baseline", 0, 0, 4, 2, false, false, false, "diffv2"},
        {"baseline", 0, 0, 0, 0, true, false, false, "diffv2"},
        {"baseline", 0, 0, 0, 0, false, true, false, "diffv2"},
        {"baseline", 0, 0, 4, 0, false, false, true, "diffv2"},
        {"gated_elem", 1, 2, 4, 0, true, true, true, "diffv2"},
    };
    TestDirectory d = test_make_directory();
    const char *path = test_text("%s/config.json", d.path);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ModelConfig c = case_config(&expert_cases[4].model, variant_find(cases[i].attention));
        c.E = 5, c.K = 3, c.FE = 24, c.shared = cases[i].shared, c.dense_layers = cases[i].dense_layers;
        c.window = cases[i].window, c.full_every = cases[i].full_every, c.yoco = cases[i].yoco;
        c.router_bias = cases[i].bias, c.qk_norm = cases[i].qk_norm;
        config_json_write(path, &c, DTYPE_F32);
        size_t size = 0;
        char *text = file_read(path, 1 << 20, &size);
        const char *wanted = test_text("\"model_type\": \"%s\"", cases[i].type);
        EXPECT(text && strstr(text, wanted), "case %d is no %s: %s", (int)i, cases[i].type, text);
        free(text);
        if (!c.dense_layers) c.F = c.FE; // not in the file
        c.sparse_size = 64;              // likewise
        ModelConfig back = config_json_read(d.path);
        EXPECT(memcmp(&back, &c, sizeof(c)) == 0, "case %d came back otherwise", (int)i);
    }
}

static void expert_micro_steps(Model *m, int i, const int *tokens) {
    const ModelCase *mc = &expert_cases[i].model;
    for (int step = 0; step < 3; step++) {
        m->state.micro_step = step;
        model_micro_step(m, tokens + step, tokens + step + 1, NULL, mc->B, mc->T, 3.0 * mc->B * mc->T);
    }
    router_measure(&m->router, 3 * (int64_t)mc->B * mc->T);
}

static void test_experts_recomputed(void) {
    for (int type = GEMM_FP32; type <= (sizeof(real) == sizeof(float) ? GEMM_FP8 : GEMM_FP32); type++)
        for (int i = 0; i < EXPERT_CASE_COUNT; i++) {
            Model kept, m;
            linear_configure((GemmType)type);
            int *tokens = expert_start(&kept, i, "diff_v2", FOR_TRAINING, RECOMPUTE_NOTHING);
            expert_micro_steps(&kept, i, tokens);
            EXPECT(isfinite(case_grad_norm(&kept)), "%s: the gradient norm is %g", expert_cases[i].model.why,
                   case_grad_norm(&kept));
            for (int level = 1; level < RECOMPUTE_LEVELS; level++) {
                free(expert_start(&m, i, "diff_v2", FOR_TRAINING, (Recompute)level));
                expert_micro_steps(&m, i, tokens);
                for (int t = 0; t < m.plan.tensors.count; t++) {
                    const Tensor *of = &m.plan.tensors.tensors[t];
                    EXPECT(memcmp(kept.state.grads + of->offset, m.state.grads + of->offset,
                                  of->count * sizeof(grad_t)) == 0,
                           "%s, %s: --recompute %d changes the gradient of %s", gemm_choice(type),
                           expert_cases[i].model.why, level, of->name);
                }
                EXPECT(m.router.aux == kept.router.aux && m.router.z == kept.router.z,
                       "%s: --recompute %d changes the routers' losses", expert_cases[i].model.why, level);
                model_free(&m, true);
            }
            case_end(&kept, tokens);
        }
    linear_configure(GEMM_FP32);
}

// Products in bf16 are near those of fp32, in each expert. Every expert is selected, so that no choice differs.
static void test_experts_rounded(void) {
    enum { CASE = 1 };
    const ModelCase *mc = &expert_cases[CASE].model;
    Model exact, m;
    if (sizeof(real) != sizeof(float)) return;
    int *tokens = expert_start(&exact, CASE, "diff_v2", FOR_TRAINING, RECOMPUTE_NOTHING);
    case_loss(&exact, tokens, mc->B, mc->T, true);
    linear_configure(GEMM_BF16);
    free(expert_start(&m, CASE, "diff_v2", FOR_TRAINING, RECOMPUTE_NOTHING));
    case_loss(&m, tokens, mc->B, mc->T, true);
    for (int t = 0; t < m.plan.tensors.count; t++) {
        const Tensor *of = &m.plan.tensors.tensors[t];
        double error = gradient_distance(m.state.grads + of->offset, exact.state.grads + of->offset, of->count);
        EXPECT(!of->row->per_expert || (error > 0 && error < 0.05),
               "the gradient of %s differs by %.3g from that of fp32", of->name, error);
    }
    model_free(&m, true);
    linear_configure(GEMM_FP32);
    case_end(&exact, tokens);
}

// Largest magnitude of an operand, measured by the test.
static Activation expert_operand(const floatX *x, absmax_t *max, int R, int columns) {
    *max = 0;
    absmax_update(activation(x, max), R, columns, columns);
    return activation(x, max);
}

// y, dx and the gradients of the weights have the bits that result from x and dy with their own maxima.
static void expect_experts_round(const ExpertLinear *w, const floatX *y, const floatX *dx, const floatX *dy,
                                 const floatX *x, const int *starts, int N, int R, const char *what) {
    absmax_t max[2];
    int IC = w->first.IC, OC = w->first.OC;
    Activation in = expert_operand(x, &max[0], R, IC), gradient = expert_operand(dy, &max[1], R, OC);
    ExpertLinear own = *w;
    size_t weights = (size_t)w->count * w->stride * sizeof(grad_t);
    floatX *y_apart = (floatX *)checked_calloc((size_t)R * OC, sizeof(floatX)),
           *dx_apart = (floatX *)checked_calloc((size_t)R * IC, sizeof(floatX));
    own.first.dweight = (grad_t *)checked_calloc(1, weights);
    expert_linear_forward(y_apart, in, &own, starts, N, R);
    expert_linear_backward(dx_apart, gradient, in, &own, starts, N, R, false);
    EXPECT(memcmp(y, y_apart, (size_t)R * OC * sizeof(floatX)) == 0, "%s: other outputs", what);
    EXPECT(memcmp(dx, dx_apart, (size_t)R * IC * sizeof(floatX)) == 0, "%s: other gradients of the input", what);
    for (int e = 0; e < w->count; e++)
        EXPECT(memcmp(own.first.dweight + e * w->stride, w->first.dweight + e * w->stride,
                      (size_t)OC * IC * sizeof(grad_t)) == 0,
               "%s: expert %d has another gradient of the weight", what, e);
    free(y_apart);
    free(dx_apart);
    free(own.first.dweight);
}

static void test_experts_round(void) {
    for (int i = 0; i < EXPERT_CASE_COUNT && sizeof(real) == sizeof(float); i++) {
        const struct ExpertCase *e = &expert_cases[i];
        Model m;
        linear_configure(GEMM_FP8);
        int *tokens = expert_start(&m, i, "diff_v2", FOR_TRAINING, RECOMPUTE_NOTHING);
        int l = e->dense_layers, N = e->model.B * e->model.T, R = N * e->K, C = e->model.C;
        const Mlp *mlp = &m.mlps[l];
        const int *starts = mlp->a->expert_starts;
        Activation x = m.acts.layers[l].norm2, dy = m.acts.layers[l].dx_out;
        size_t bytes = (size_t)R * C * sizeof(floatX);
        floatX *out = (floatX *)checked_calloc(1, bytes), *dout = (floatX *)checked_calloc(1, bytes);
        case_loss(&m, tokens, e->model.B, e->model.T, true);
        activations_begin(&m.acts, &m.plan);
        absmax_update(x, N, C, C);
        absmax_update(dy, N, C, C); // any gradient will do
        mlp_forward(m.acts.branch, x, mlp, N);
        memcpy(out, mlp->expert_out, bytes);
        mlp_backward(m.acts.dnorm, dy, x, mlp, &m.router, N, false); // leaves the rows of x in mlp->rows
        expert_gather(dout, dy.data, mlp->a->entries, mlp_routing(mlp, N));
        expect_experts_round(&mlp->expert_down, out, mlp->dexpert_hidden, dout, mlp->expert_hidden.data, starts, N, R,
                             test_text("%s: down", e->model.why));
        expect_experts_round(&mlp->expert_gate_up, mlp->a->expert_gate_up, mlp->expert_out, mlp->dexpert_gate_up.data,
                             mlp->rows, starts, N, R, test_text("%s: gate and up", e->model.why));
        free(out);
        free(dout);
        case_end(&m, tokens);
    }
    linear_configure(GEMM_FP32);
}

// The losses of the routers are functions of the update, not of its division into micro-steps. So are the gradients
// without the load-balancing loss, whose shares grow with the micro-steps.
static void test_experts_accumulate(void) {
    const ModelCase *mc = &expert_cases[0].model;
    Model m;
    int *tokens = expert_start(&m, 0, "diff_v2", FOR_TRAINING, RECOMPUTE_NOTHING), T = mc->T;
    m.router.aux_weight = 0;
    case_loss(&m, tokens, 2, T, true);
    router_measure(&m.router, 2 * T);
    double aux = m.router.aux, z = m.router.z;
    size_t count = m.plan.tensors.buffer_count;
    grad_t *whole = (grad_t *)checked_calloc(count, sizeof(grad_t));
    memcpy(whole, m.state.grads, count * sizeof(grad_t));
    for (int b = 0; b < 2; b++) {
        m.state.micro_step = b;
        model_micro_step(&m, tokens + b * T, tokens + b * T + 1, NULL, 1, T, 2.0 * T);
    }
    router_measure(&m.router, 2 * T);
    double epsilon = sizeof(real) == 8 ? 0x1p-52 : 0x1p-23, error = gradient_distance(m.state.grads, whole, count);
    EXPECT(error <= 50 * epsilon, "one micro-step or two: relative difference %.3g", error);
    EXPECT(fabs(m.router.aux - aux) < 50 * epsilon && fabs(m.router.z - z) < 50 * epsilon,
           "one micro-step or two: load balancing %.9g and %.9g, z %.9g and %.9g", aux, m.router.aux, z, m.router.z);
    EXPECT(aux > 0.9 && z > 0, "load balancing %g, z %g", aux, z);
    free(whole);
    case_end(&m, tokens);
}

static void test_experts_match_parameters(void) {
    for (int i = 0; i < 3; i++) {
        ModelConfig c = expert_config(i, "diff_v2");
        c.FE = 500;
        ModelConfig plain = model_as_baseline(&c), wider;
        c.FE = model_match_ffn(&c);
        wider = c, wider.FE++;
        double want = (double)model_parameter_count(&plain, false), have = (double)model_parameter_count(&c, false),
               step = (double)model_parameter_count(&wider, false) - have;
        EXPECT(c.FE < 500 && fabs(have - want) <= step / 2 + 1, "case %d: %g parameters instead of %g", i, have, want);
    }
}

static const Test expert_tests[] = {
    {"a router prefers experts with smaller numbers, and does not hide NaN", test_router_ties},
    {"an expert that the bias chooses has a weight wherever its logit is", test_router_far_choice},
    {"config.json holds a model with experts, as a Mixtral where that has all of it", test_expert_configs},
    {"gradients of experts are bitwise equal at every level of recomputation", test_experts_recomputed},
    {"products of every expert in bf16 are near those of fp32", test_experts_rounded},
    {"in fp8 the products of experts round their rows with their own maxima", test_experts_round},
    {"gradients and losses of experts add up over micro-steps", test_experts_accumulate},
    {"--match-params changes the width of the experts", test_experts_match_parameters},
};
static const Test expert_fp64_tests[] = {
    {"gradients of models with experts equal finite differences", test_expert_differences},
};
