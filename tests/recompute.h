/*
recompute.h: tests of --recompute. Gradients and statistics are bitwise equal at every level. tests/golden has the
memory of each level.
*/
#pragma once
#include "harness.h"

enum { RECOMPUTE_LEVELS = 3 };

// Three micro-steps: the second with documents, the third with statistics.
static void recompute_steps(Model *m, const ModelCase *mc, const int *tokens, LayerStats *stats) {
    int N = mc->B * mc->T;
    int *starts = (int *)checked_calloc(N, sizeof(int)), *marks = case_tokens(N, 5, 9);
    Separator s = {0, false};
    for (int b = 0; b < mc->B; b++) documents_find(starts + b * mc->T, marks + b * mc->T, mc->T, s);
    for (int step = 0; step < 3; step++) {
        m->stats = step == 2 ? stats : NULL;
        m->state.micro_step = step;
        model_micro_step(m, tokens + step, tokens + step + 1, step == 1 ? starts : NULL, mc->B, mc->T, 3.0 * N);
    }
    free(marks);
    free(starts);
}

static void expect_equal_levels(GemmType type) {
    static const ModelCase deep[] = {
        {"three layers, so that one is neither first nor last", 29, 24, 3, 4, 2, 8, 20, 2, 21, true, 0, 0, false,
         false},
        {"windows, every third layer full, QK-norm", 29, 24, 4, 4, 2, 8, 20, 2, 21, true, 6, 3, false, true},
        {"YOCO with QK-norm", 29, 24, 4, 4, 2, 8, 20, 2, 21, false, 6, 0, true, true},
    };
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int c = 0; c < 3; c++) {
            const ModelCase *mc = &deep[c];
            ModelConfig config = case_config(mc, &attention_variants[v]);
            Problem problem;
            if (model_config_problems(&config, &problem, 1)) continue;
            int *tokens = case_tokens(mc->B * mc->T + 3, mc->V, 3);
            grad_t *kept = NULL;
            LayerStats stats[RECOMPUTE_LEVELS][4];
            for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
                Model m;
                model_plan(&m, &config, mc->B, mc->T, FOR_TRAINING, (Recompute)level, one_rank);
                model_alloc(&m, NULL);
                ops_init(m.plan.workspace_bytes);
                // NaN in all activations but the tables
                memset(m.activations_memory + m.plan.activations_bytes / 2, 0xFF, m.plan.activations_bytes / 2);
                memset(m.acts.dfused, 0, (size_t)(mc->B * mc->T) * m.plan.dims.fused_ld * sizeof(floatX));
                if (mc->yoco) memset(m.acts.dkv.data, 0, (size_t)(mc->B * mc->T) * m.plan.dims.kv_ld * sizeof(floatX));
                case_randomize(&m, 7);
                recompute_steps(&m, mc, tokens, stats[level]);
                EXPECT(isfinite(case_grad_norm(&m)) && case_grad_norm(&m) > 0, "%s, %s: the gradient norm is %g",
                       attention_variants[v].name, mc->why, case_grad_norm(&m));
                if (level == 0) kept = m.state.grads, m.state.grads = NULL;
                else
                    for (int i = 0; i < m.plan.tensors.count; i++) {
                        const Tensor *t = &m.plan.tensors.tensors[i];
                        EXPECT(memcmp(kept + t->offset, m.state.grads + t->offset, t->count * sizeof(grad_t)) == 0,
                               "%s, %s, %s: --recompute %d changes the gradient of %s", gemm_choice(type),
                               attention_variants[v].name, mc->why, level, t->name);
                    }
                EXPECT(memcmp(stats[0], stats[level], config.L * sizeof(LayerStats)) == 0,
                       "%s, %s: --recompute %d changes the statistics", attention_variants[v].name, mc->why, level);
                case_close(&m);
            }
            buffer_free(kept);
            free(tokens);
        }
}

static void test_recompute_gradients(void) {
    static const GemmType types[] = {GEMM_FP32, GEMM_FP8};
    for (int i = 0; i < (sizeof(real) == sizeof(float) ? 2 : 1); i++) {
        CHECK(!linear_configure(types[i]), "--matmul-dtype %s is refused", gemm_choice(types[i]));
        expect_equal_levels(types[i]);
    }
    linear_configure(GEMM_FP32);
}

static const Test recompute_tests[] = {
    {"gradients and statistics of every variant are bitwise equal at every level", test_recompute_gradients},
};
