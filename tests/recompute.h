/*
recompute.h: tests of --recompute. Gradients and statistics are bitwise equal at every level. Activations that are
recomputed take no memory in the plan.
*/
#pragma once
#include "harness.h"

enum { RECOMPUTE_LEVELS = 3 };

// Three micro-steps: the second with documents, the third with statistics.
static void recompute_steps(Model *m, const ModelCase *mc, const int *tokens, LayerStats *stats) {
    int N = mc->B * mc->T;
    int *starts = (int *)checked_calloc(N, sizeof(int)), *marks = case_tokens(N, 5, 9);
    Separator s = {0, false};
    for (int b = 0; b < mc->B; b++) document_starts(starts + b * mc->T, marks + b * mc->T, mc->T, s);
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
        for (int c = type == GEMM_FP32 ? 0 : PLAIN_CASE_COUNT; c < PLAIN_CASE_COUNT + 3; c++) { // else the deep ones
            const ModelCase *mc = c < PLAIN_CASE_COUNT ? &model_cases[c] : &deep[c - PLAIN_CASE_COUNT];
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
    for (int type = GEMM_FP32; type <= (sizeof(real) == sizeof(float) ? GEMM_FP8 : GEMM_FP32); type++) {
        CHECK(!linear_configure((GemmType)type), "--gemm %s is refused", gemm_choice(type));
        expect_equal_levels((GemmType)type);
    }
    linear_configure(GEMM_FP32);
}

// Bytes of an activation tensor, rounded up to the alignment of the arena.
static size_t tensor_bytes(size_t N, size_t width) { return round_up(N * width * sizeof(real), 256); }

static void test_recompute_allocations(void) {
    for (int v = 0; v < 2 * ATTENTION_VARIANT_COUNT; v++) {
        bool yoco = v >= ATTENTION_VARIANT_COUNT;
        const ModelCase mc = {"", 29, 24, yoco ? 6 : 5, 4, 2, 8, 20, 2, 21, true, yoco ? 5 : 0, 0, yoco, v % 2 == 1};
        ModelConfig config = case_config(&mc, &attention_variants[v % ATTENTION_VARIANT_COUNT]);
        Model m;
        size_t bytes[RECOMPUTE_LEVELS], N = 42, NHD = (size_t)config.NH * 8;
        for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
            model_plan(&m, &config, mc.B, mc.T, FOR_TRAINING, (Recompute)level, one_rank);
            bytes[level] = m.plan.activations_bytes;
            if (level < 2) model_free(&m, true);
        }
        const AttentionDims *d = &m.plan.dims;
        const AttentionVariant *a = config.attention;
        size_t norms = 2 * tensor_bytes(N, 24) + 2 * tensor_bytes(N, 1),
               mlp = tensor_bytes(N, 40) + tensor_bytes(N, 20);
        if (d->norm_width) norms += tensor_bytes(N, NHD) + tensor_bytes(N, d->norm_count);
        size_t again = (size_t)mc.L - 1, upper = yoco ? 3 : 0, fused = (again - upper) * tensor_bytes(N, d->fused_ld);
        if (yoco) fused += upper * tensor_bytes(N, round_up(d->fused_rows - d->kv_rows, 64));
        size_t rest = tensor_bytes(N, heads_kept(&m.plan, 0) * d->DV) + tensor_bytes(N, d->NQ) + tensor_bytes(N, 24);
        if (d->groups.noise) rest += tensor_bytes(N, NHD);
        if (mc.qk_norm) // kept before the norm: in the upper half of YOCO queries only
            fused += (again - upper) * tensor_bytes(N, d->q_rows + d->k_rows) + upper * tensor_bytes(N, d->q_rows);
        if (d->groups.noise && !d->lambda_rows) rest += tensor_bytes(N, d->OH);
        if (d->gate_width) rest += tensor_bytes(N, NHD);
        EXPECT(bytes[0] - bytes[1] == again * (norms + mlp), "%s: level 1 saves %zu bytes, not %zu", a->name,
               bytes[0] - bytes[1], again * (norms + mlp));
        EXPECT(bytes[1] - bytes[2] == fused + again * rest, "%s: level 2 saves %zu bytes more, not %zu", a->name,
               bytes[1] - bytes[2], fused + again * rest);
        model_free(&m, true);
        for (Purpose p = FOR_EVALUATION; p <= FOR_GENERATION; p = (Purpose)(p + 1)) {
            size_t other[2];
            for (int level = 0; level < 2; level++) {
                model_plan(&m, &config, 1, mc.T, p, level ? RECOMPUTE_BLOCK : RECOMPUTE_NOTHING, one_rank);
                other[level] = m.plan.activations_bytes;
                model_free(&m, true);
            }
            EXPECT(other[0] == other[1], "%s: --recompute changes the memory of a model without a backward", a->name);
        }
    }
}

static const Test recompute_tests[] = {
    {"gradients and statistics of every variant are bitwise equal at every level", test_recompute_gradients},
    {"recomputed activations take no memory", test_recompute_allocations},
};
