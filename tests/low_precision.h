/*
low_precision.h: tests of --matmul-dtype bf16 and fp8 in the model: what each linear layer rounds, sums over
micro-batches, zeros, numbers that are not finite, and copies of weights. tests/programs/test_low_precision.py has the
tests of runs, recompute.h those of --recompute, operations.h and cuda_linear.h those of the rounding.
*/
#pragma once
#include "recompute.h"
#include "spikes.h"

// ---- what each linear layer rounds

// The layer with its own copy of the weight.
static Linear fresh_linear(const Model *m, LinearKind kind, int l) {
    Linear w = linear_of(&m->state, kind, l);
    w.copy = buffer_alloc(linear_copy_bytes(w.IC, w.OC, false), "a test");
    linear_copy_weight(&w);
    return w;
}
// An operand with its largest magnitude in *max.
static Activation fresh_operand(const floatX *x, absmax_t *max, int N, int columns, int ld) {
    Activation a = activation(x, max);
    *max = 0;
    absmax_update(a, N, columns, ld);
    return a;
}

// y of a layer, computed with fresh_linear.
static floatX *fresh_output(const Model *m, LinearKind kind, int l, const floatX *x, int N) {
    absmax_t max;
    Linear w = fresh_linear(m, kind, l);
    floatX *y = (floatX *)checked_calloc((size_t)N * w.ld, sizeof(floatX));
    linear_forward(y, fresh_operand(x, &max, N, w.IC, w.IC), &w, N);
    buffer_free(w.copy);
    return y;
}
static size_t different(const floatX *a, const floatX *b, int N, int columns, int ld) {
    size_t count = 0;
    for (int n = 0; n < N; n++)
        for (int c = 0; c < columns; c++) count += memcmp(&a[n * ld + c], &b[n * ld + c], sizeof(floatX)) != 0;
    return count;
}
static void add_to(floatX *y, const floatX *x, size_t count) {
    for (size_t i = 0; i < count; i++) y[i] += x[i];
}

// The forward has left the input of each layer, and v, gate_up and the residual stream. RoPE has rotated q and k.
static void expect_forward_rounds(const Model *m, int l, int N, const char *what) {
    const LayerActivations *a = &m->acts.layers[l];
    const AttentionDims *d = plan_dims(&m->plan, l);
    int C = m->plan.config.C, F = m->plan.config.F;
    floatX *fused = fresh_output(m, LINEAR_QKVG, l, a->norm1.data, N),
           *o = fresh_output(m, LINEAR_O, l, a->attn_out.data, N),
           *gate_up = fresh_output(m, LINEAR_GATE_UP, l, a->norm2.data, N),
           *down = fresh_output(m, LINEAR_DOWN, l, a->mlp.hidden.data, N);
    add_to(o, a->x, (size_t)N * C);
    add_to(down, a->x_mid, (size_t)N * C);
    size_t wrong[] = {different(fused + d->v_at, a->fused + d->v_at, N, d->fused_rows - d->v_at, d->fused_ld),
                      different(o, a->x_mid, N, C, C), different(gate_up, a->mlp.gate_up, N, 2 * F, 2 * F),
                      different(down, a->x_out, N, C, C)};
    for (int kind = 0; kind <= LINEAR_DOWN; kind++)
        EXPECT(!wrong[kind], "%s: layer %d, matrix %d: %zu outputs are not those of operands with their own maxima",
               what, l, kind, wrong[kind]);
    free(fused);
    free(o);
    free(gate_up);
    free(down);
    if (l != yoco_layer(&m->plan.config)) return;
    floatX *kv = fresh_output(m, LINEAR_KV, l, m->acts.kv_norm.data, N);
    int k_rows = d->NK * d->QD;
    size_t values = different(kv + k_rows, m->acts.kv + k_rows, N, d->NV * d->DV, d->kv_ld);
    EXPECT(!values, "%s: %zu shared values are not those of operands with their own maxima", what, values);
    free(kv);
}

// dweight of a layer, computed with fresh_linear, beside the model's; and dx, unless `wanted` is NULL.
static void expect_backward_rounds(Model *m, LinearKind kind, int l, const floatX *x, const floatX *dy,
                                   const floatX *wanted, int N, const char *what) {
    absmax_t max[2];
    Linear w = fresh_linear(m, kind, l);
    floatX *dx = (floatX *)checked_calloc((size_t)N * w.IC, sizeof(floatX));
    grad_t *dw = (grad_t *)checked_calloc((size_t)w.OC * w.IC, sizeof(grad_t));
    w.dweight = dw;
    linear_backward(dx, fresh_operand(dy, &max[1], N, w.OC, w.ld), fresh_operand(x, &max[0], N, w.IC, w.IC), &w, N,
                    false);
    size_t weights = different(dw, grad(&m->state, linear_weight(&m->plan, kind), l), w.OC, w.IC, w.IC),
           inputs = wanted ? different(dx, wanted, N, w.IC, w.IC) : 0;
    EXPECT(!weights && !inputs, "%s: layer %d, matrix %d: %zu gradients of the weight and %zu of the input are wrong",
           what, l, (int)kind, weights, inputs);
    buffer_free(w.copy);
    free(dx);
    free(dw);
}

// The gradient of o_proj's output is dx before norm1, and the norm of shared keys, add to it: they add zeros while
// their weights are zero.
static void expect_model_rounds(Model *m, const ModelCase *mc, const int *tokens, const char *what) {
    Activations *a = &m->acts;
    int N = mc->B * mc->T, C = mc->C, L = mc->L;
    size_t bytes = (size_t)N * C * sizeof(floatX);
    floatX *before = (floatX *)checked_calloc(1, bytes), *norm1 = (floatX *)checked_calloc(C, sizeof(floatX));
    model_read_batch(m, tokens, tokens + 1, NULL, N);
    model_forward(m, mc->B, mc->T, NULL, NULL);
    for (int l = 0; l < L; l++) expect_forward_rounds(m, l, N, what);
    model_classify(m, N, (real)(1.0 / N));
    rmsnorm_backward(a->layers[L - 1].dx_out, grad(&m->state, T_NORM_FINAL, 0), a->dnorm, a->layers[L - 1].x_out,
                     param(&m->state, T_NORM_FINAL, 0), a->rstd_final, N, C, false);
    for (int l = L - 1; l >= 0; l--) {
        const LayerActivations *layer = &a->layers[l];
        memcpy(before, a->dx, bytes);
        memcpy(norm1, param(&m->state, T_NORM1, l), C * sizeof(floatX));
        memset(param(&m->state, T_NORM1, l), 0, C * sizeof(floatX));
        bool yoco = l == yoco_layer(&m->plan.config); // dnorm is then that of the shared keys and values
        if (yoco) memset(param(&m->state, T_YOCO_NORM, l), 0, C * sizeof(floatX)); // which no later backward reads
        block_backward(m, l, mc->B, mc->T);
        memcpy(param(&m->state, T_NORM1, l), norm1, C * sizeof(floatX));
        expect_backward_rounds(m, LINEAR_DOWN, l, layer->mlp.hidden.data, before, a->dhidden, N, what);
        expect_backward_rounds(m, LINEAR_GATE_UP, l, layer->norm2.data, a->dgate_up, NULL, N, what);
        expect_backward_rounds(m, LINEAR_O, l, layer->attn_out.data, a->dx, NULL, N, what);
        expect_backward_rounds(m, LINEAR_QKVG, l, layer->norm1.data, a->dfused, yoco ? NULL : a->dnorm, N, what);
        if (yoco) expect_backward_rounds(m, LINEAR_KV, l, a->kv_norm.data, a->dkv.data, a->dnorm, N, what);
    }
    free(before);
    free(norm1);
}

// wide: as on a CPU that does not multiply bf16.
static void low_precision_begin(GemmType type, bool wide) {
    CHECK(!linear_configure(type), "--matmul-dtype %s is refused", gemm_choice(type));
    if (wide) linear_storage = STORE_FP32;
}

static void test_each_layer_rounds(void) {
    for (int type = GEMM_BF16; type <= GEMM_FP8; type++)
        for (int wide = 0; wide < 2; wide++)
            for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
                for (int c = 0; c < MODEL_CASE_COUNT; c++) {
                    const ModelCase *mc = &model_cases[c];
                    Model m;
                    low_precision_begin((GemmType)type, wide);
                    int *tokens = case_start(&m, mc, &attention_variants[v], FOR_TRAINING);
                    if (!tokens) continue;
                    const char *what = test_text("%s%s, %s, %s", gemm_choice(type), wide ? " in fp32" : "",
                                                 attention_variants[v].name, mc->why);
                    expect_model_rounds(&m, mc, tokens, what);
                    case_end(&m, tokens);
                }
    low_precision_begin(GEMM_FP32, false);
}

// The gradient of the shared keys and values adds to dx, the output gradient of the down projection below.
static void test_maxima_of_shared_keys(void) {
    low_precision_begin(GEMM_FP8, false);
    for (int c = 0; c < MODEL_CASE_COUNT; c++) {
        const ModelCase *mc = &model_cases[c];
        Model m;
        int *tokens = mc->yoco ? case_start(&m, mc, variant_find("diff_v2"), FOR_TRAINING) : NULL;
        if (!tokens) continue;
        int N = mc->B * mc->T, l = mc->L - 1, below = yoco_layer(&m.plan.config) - 1;
        absmax_t max = 0;
        model_read_batch(&m, tokens, tokens + 1, NULL, N);
        model_forward(&m, mc->B, mc->T, NULL, NULL);
        model_classify(&m, N, (real)(1.0 / N));
        rmsnorm_backward(m.acts.layers[l].dx_out, grad(&m.state, T_NORM_FINAL, 0), m.acts.dnorm, m.acts.layers[l].x_out,
                         param(&m.state, T_NORM_FINAL, 0), m.acts.rstd_final, N, mc->C, false);
        for (; l > below; l--) block_backward(&m, l, mc->B, mc->T);
        absmax_update(activation(m.acts.dx, &max), N, mc->C, mc->C);
        const absmax_t *got = m.acts.layers[below].dx_out.max;
        EXPECT(max == *got, "%s: the maximum is %g, that of the gradient %g", mc->why, (double)absmax_value(*got),
               (double)absmax_value(max));
        case_end(&m, tokens);
    }
    low_precision_begin(GEMM_FP32, false);
}

// ---- micro-batches

// Each micro-batch has its own maxima: the gradients of two add up, also if the first one's numbers are larger. A
// product is added in fp32.
static void test_micro_batches_of_types(void) {
    const ModelCase *mc = &model_cases[1];
    for (int type = GEMM_BF16; type <= GEMM_FP8; type++) {
        Model m;
        low_precision_begin((GemmType)type, false);
        int *tokens = case_start(&m, mc, variant_find("diff_v2"), FOR_TRAINING), N = mc->B * mc->T;
        size_t count = m.plan.tensors.buffer_count;
        grad_t *sum = (grad_t *)checked_calloc(count, sizeof(grad_t));
        int *batches[] = {case_tokens(N + 1, mc->V, 31), tokens};
        // the first batch is 5 times as important, so that its gradients are larger
        const double rows[] = {0.2 * N, N};
        for (int b = 0; b < 2; b++) {
            m.state.micro_step = 0;
            model_micro_step(&m, batches[b], batches[b] + 1, NULL, mc->B, mc->T, rows[b]);
            for (size_t i = 0; i < count; i++) sum[i] += m.state.grads[i];
        }
        for (int b = 0; b < 2; b++) {
            m.state.micro_step = b;
            model_micro_step(&m, batches[b], batches[b] + 1, NULL, mc->B, mc->T, rows[b]);
        }
        double error = gradient_distance(m.state.grads, sum, count);
        EXPECT(error <= 50 * 0x1p-23, "%s: two micro-batches: relative difference %.3g", gemm_choice(type), error);
        free(batches[0]);
        free(sum);
        case_end(&m, tokens);
    }
    low_precision_begin(GEMM_FP32, false);
}

// ---- zeros, and numbers that are not finite

// Every product with an infinity or NaN in an operand is NaN, also where that element meets zeros, and also if the
// other operand is zero.
static void test_not_finite_operands(void) {
    enum { N = 20, IC = 24, OC = 16 };
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (int wide = 0; wide < 2; wide++)
        for (int of = 0; of < 3; of++)              // x, the weight, dy
            for (int zeros = 0; zeros < 2; zeros++) // whether the other operands are 0
                for (int b = 0; b < 3; b++) {
                    floatX x[N * IC], weight[OC * IC], dy[N * OC], y[N * OC], dx[N * IC];
                    grad_t dw[OC * IC];
                    floatX *const operands[] = {x, weight, dy};
                    absmax_t max[2] = {0, 0};
                    for (int i = 0; i < N * IC; i++) x[i] = (floatX)(zeros ? 0 : 1);
                    for (int i = 0; i < OC * IC; i++) weight[i] = (floatX)(zeros ? 0 : 1);
                    for (int i = 0; i < N * OC; i++) dy[i] = (floatX)(zeros ? 0 : 1);
                    operands[of][37] = (floatX)bad[b];
                    low_precision_begin(GEMM_FP8, wide);
                    Activation of_x = fresh_operand(x, &max[0], N, IC, IC),
                               of_dy = fresh_operand(dy, &max[1], N, OC, OC);
                    Linear w = {weight, dw, buffer_alloc(linear_copy_bytes(IC, OC, false), "a test"), IC, OC, OC};
                    ops_init(linear_workspace_bytes(N, IC, OC));
                    linear_copy_weight(&w);
                    linear_forward(y, of_x, &w, N);
                    linear_backward(dx, of_dy, of_x, &w, N, false);
                    int good[3] = {0, 0, 0};
                    for (int i = 0; i < N * OC; i++) good[0] += !isnan((double)y[i]);
                    for (int i = 0; i < N * IC; i++) good[1] += !isnan((double)dx[i]);
                    for (int i = 0; i < OC * IC; i++) good[2] += !isnan((double)dw[i]);
                    EXPECT((good[0] == 0 || of == 2) && (good[1] == 0 || of == 0) && (good[2] == 0 || of == 1),
                           "%s, operand %d has %g: %d of y, %d of dx, %d of dweight are not NaN",
                           wide ? "in fp32" : "as on this CPU", of, (double)bad[b], good[0], good[1], good[2]);
                    buffer_free(w.copy);
                    ops_free();
                }
    low_precision_begin(GEMM_FP32, false);
}

// ---- copies of weights

// The loss of a batch with the copies as they are, and with new ones.
static void expect_current_copies(Model *model, const int *tokens, int B, int T, const char *what) {
    double as_is = case_loss(model, tokens, B, T, false);
    weight_copies_forget(&model->state.copies, &model->plan);
    double current = case_loss(model, tokens, B, T, false);
    EXPECT(as_is == current, "%s after %s: the loss is %.9g, with new copies %.9g", gemm_choice((int)linear_type), what,
           as_is, current);
}

static void test_copies_after_changes(void) {
    TestDirectory d = program_data();
    for (int i = 0; i < 4; i++) {
        int type = i % 2 ? GEMM_FP8 : GEMM_BF16;
        InnerRun *inner = inner_open(&d, "%s --matmul-dtype %s --out %s/%d --rollback 1:1 --checkpoint-every 9",
                                     i < 2 ? "" : "--window 20 --yoco", gemm_choice(type), d.path, i);
        Run *run = &inner->run;
        Model *model = &run->model;
        int B = model->plan.B, T = model->plan.T, *tokens = case_tokens(B * T + 1, 256, 3);
        double first = case_loss(model, tokens, B, T, false);
        run_step(run);
        expect_current_copies(model, tokens, B, T, "an update");
        double saved = case_loss(model, tokens, B, T, false);
        checkpointer_save(&run->checkpointer, false);
        run_step(run);
        double last = case_loss(model, tokens, B, T, false);
        rollback_record_step(&run->trainer.rollback, run->trainer.step, true);
        checkpointer_roll_back(&run->checkpointer);
        EXPECT(first != saved && saved != last, "the losses are %.9g, %.9g and %.9g", first, saved, last);
        double back = case_loss(model, tokens, B, T, false);
        EXPECT(back == saved, "%s: the loss after a rollback is %.9g, in the checkpoint it was %.9g", gemm_choice(type),
               back, saved);
        expect_current_copies(model, tokens, B, T, "a rollback");
        free(tokens);
        inner_close(inner);
    }
    low_precision_begin(GEMM_FP32, false);
}

static const Test low_precision_tests[] = {
    {"each linear layer rounds its operands with their own maxima, in all variants", test_each_layer_rounds},
    {"the largest gradient below YOCO's keys and values includes theirs", test_maxima_of_shared_keys},
    {"gradients accumulate over micro-batches, each with its own scales", test_micro_batches_of_types},
    {"products of operands that are not finite are NaN in fp8", test_not_finite_operands},
    {"rounded copies of weights are current after an update and a rollback", test_copies_after_changes},
};
