/*
low_precision.h: tests of --gemm bf16 and fp8 in the model: what each linear layer rounds, gradients beside those in
fp32, zeros, numbers that are not finite, and copies of weights. tests/programs/test_low_precision.py has the tests of
runs, recompute.h those of --recompute, operations.h and fp8_test.py those of the rounding.
*/
#pragma once
#include "recompute.h"
#include "spikes.h"

// A number is rounded by at most this share of it (if it is not subnormal): half a unit of the last bit of 1.
static double rounding_share(GemmType type, bool gradient) {
    return type == GEMM_BF16 ? 0x1p-8 : 0.5 * exp2(-fp8_formats[gradient ? FP8_GRADIENT : FP8_WEIGHT].mantissa_bits);
}

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
    floatX *fused = fresh_output(m, LINEAR_FUSED, l, a->norm1.data, N),
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
                                   const floatX *wanted, TensorKind weight, int N, const char *what) {
    absmax_t max[2];
    Linear w = fresh_linear(m, kind, l);
    floatX *dx = (floatX *)checked_calloc((size_t)N * w.IC, sizeof(floatX));
    grad_t *dw = (grad_t *)checked_calloc((size_t)w.OC * w.IC, sizeof(grad_t));
    w.dweight = dw;
    linear_backward(dx, fresh_operand(dy, &max[1], N, w.OC, w.ld), fresh_operand(x, &max[0], N, w.IC, w.IC), &w, N,
                    false);
    size_t weights = different(dw, grad(&m->state, weight, l), w.OC, w.IC, w.IC),
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
        expect_backward_rounds(m, LINEAR_DOWN, l, layer->mlp.hidden.data, before, a->dhidden, T_MLP_DOWN, N, what);
        expect_backward_rounds(m, LINEAR_GATE_UP, l, layer->norm2.data, a->dgate_up, NULL, T_MLP_GATE, N, what);
        expect_backward_rounds(m, LINEAR_O, l, layer->attn_out.data, a->dx, NULL, T_O, N, what);
        expect_backward_rounds(m, LINEAR_FUSED, l, layer->norm1.data, a->dfused, yoco ? NULL : a->dnorm, T_Q, N, what);
        if (yoco) expect_backward_rounds(m, LINEAR_KV, l, a->kv_norm.data, a->dkv.data, a->dnorm, T_YOCO_K, N, what);
    }
    free(before);
    free(norm1);
}

// wide: as on a CPU that does not multiply bf16.
static void low_precision_begin(GemmType type, bool wide) {
    CHECK(!linear_configure(type), "--gemm %s is refused", gemm_choice(type));
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

// A product with (0, 1) is the second number of an operand (1, v) as it is rounded. E4M3 holds 9/448 of the largest
// number, but not 2^-20 of it; E5M2 rounds 9 to 8 and holds 2^-20.
static void test_formats_of_operands(void) {
    static const char *const names[] = {"x", "the weight", "dy"};
    const floatX small = (floatX)0x1p-20, nine = (floatX)(9.0 / 448);
    for (int of = 0; of < 3; of++)
        for (int i = 0; i < 2; i++) {
            floatX v = i ? small : nine, rounded[2] = {1, v}, chosen[2] = {0, 1}, y = 0, dw[2];
            absmax_t max[2] = {0, 0};
            low_precision_begin(GEMM_FP8, false);
            floatX *x = of == 0 ? rounded : chosen, *weight = of == 1 ? rounded : chosen, *dy = rounded;
            int IC = of == 2 ? 1 : 2, OC = of == 2 ? 2 : 1;
            Activation of_x = fresh_operand(x, &max[0], 1, IC, IC), of_dy = fresh_operand(dy, &max[1], 1, OC, OC);
            Linear w = {weight, dw, buffer_alloc(linear_copy_bytes(IC, OC, false), "a test"), IC, OC, OC};
            ops_init(linear_workspace_bytes(1, IC, OC));
            linear_copy_weight(&w);
            if (of == 2) linear_backward(&y, of_dy, of_x, &w, 1, false);
            else linear_forward(&y, of_x, &w, 1);
            double is = (double)y / (double)v, wanted = of == 2 ? (i ? 1 : 8.0 / 9) : (i ? 0 : 1);
            // the rounding of 2^-20 in E5M2 is at most 2^-3 of it; the others are exact except for the scales
            EXPECT(fabs(is - wanted) <= (of == 2 && i ? 0x1p-3 : 0x1p-20), "%s: %g becomes %g of it, not %g", names[of],
                   (double)v, is, wanted);
            buffer_free(w.copy);
            ops_free();
        }
    low_precision_begin(GEMM_FP32, false);
}

// ---- gradients beside those in fp32

// The smallest cosine of the gradient of a tensor with that in fp32. Each of the 4L products (in bf16 one more, of the
// LM head) rounds two operands in the forward, and W and dy in the backward; dweight rounds x and dy. If the relative
// errors of these steps are independent, their squares add up. It is assumed that what is between the products at most
// doubles an error: swiglu multiplies two numbers that have errors, and softmax and norms subtract means; with windows
// at most triples it, because a sum over few keys averages less; QK-norm, which subtracts a mean from each head's
// gradient, adds as much. Maps that are subtracted with a factor of up to 1 cancel: errors of both are in a difference
// that may be no larger than one of them. The norm of
// diff_v2_norm gives small differences the weight of large ones; so does that of DIFF V1, which stays within the bound
// without it. With a relative error e, orthogonal to the gradient, the cosine is 1/sqrt(1 + e^2).
static double least_cosine(GemmType type, const ModelCase *mc, const AttentionVariant *variant) {
    double products = 4 * mc->L + (type == GEMM_BF16), u = rounding_share(type, false),
           u_dy = rounding_share(type, true), growth = 2 + (mc->window > 0) + mc->qk_norm,
           differences =
               1 + (variant->lambda == LAMBDA_ONE) + (variant->lambda == LAMBDA_INPUT && variant->norm == NORM_HEAD);
    double squares = (3 * products + 1) * u * u + (products + 1) * u_dy * u_dy;
    return 1 / sqrt(1 + differences * growth * growth * squares);
}
static double tensor_norm(const Model *m, const grad_t *grads, int i) {
    const Tensor *t = &m->plan.tensors.tensors[i];
    double squares = 0;
    for (size_t e = 0; e < t->count; e++) squares += pow((double)grads[t->offset + e], 2);
    return sqrt(squares);
}

static void test_gradients_of_types(void) {
    double worst[2] = {1, 1};
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int c = 0; c < MODEL_CASE_COUNT; c++) {
            const ModelCase *mc = &model_cases[c];
            grad_t *exact = NULL;
            if (mc->window && c < MODEL_CASE_COUNT - 1) continue; // a window changes no product; the last has YOCO
            for (int type = GEMM_FP32; type <= GEMM_FP8; type++) {
                Model m;
                if (type == GEMM_FP8 && mc->L > 2) continue; // little is left of the direction after four layers
                low_precision_begin((GemmType)type, false);
                int *tokens = case_start(&m, mc, &attention_variants[v], FOR_TRAINING);
                if (!tokens) continue;
                double loss = case_loss(&m, tokens, mc->B, mc->T, true), largest = 0,
                       least = least_cosine((GemmType)type, mc, &attention_variants[v]);
                if (type == GEMM_FP32) exact = m.state.grads, m.state.grads = NULL;
                for (int i = 0; i < m.plan.tensors.count; i++) largest = fmax(largest, tensor_norm(&m, exact, i));
                for (int i = 0; i < m.plan.tensors.count && type != GEMM_FP32; i++) {
                    const Tensor *t = &m.plan.tensors.tensors[i];
                    if (tensor_norm(&m, exact, i) < 1e-5 * largest) continue; // zero in exact arithmetic
                    if (t->row->kind == T_OWN_LAMBDA || strstr(t->name, ".lambda_q") || strstr(t->name, ".lambda_k"))
                        continue; // one number, times a vector that is not rounded: the cosine is its sign
                    double is = cosine(m.state.grads + t->offset, exact + t->offset, t->count);
                    worst[type - 1] = fmin(worst[type - 1], is);
                    EXPECT(isfinite(loss) && is >= least,
                           "%s, %s, %s: the cosine of %s is %.6f, at least %.6f is expected", gemm_choice(type),
                           attention_variants[v].name, mc->why, t->name, is, least);
                }
                case_end(&m, tokens);
            }
            buffer_free(exact);
        }
    EXPECT(worst[0] < 1 && worst[1] < worst[0], "the smallest cosines are %.9f in bf16 and %.9f in fp8", worst[0],
           worst[1]);
    low_precision_begin(GEMM_FP32, false);
}

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

// Zero weights and zero activations have the largest magnitude 0, and products of 0, not NaN.
static void test_zero_tensors(void) {
    static const TensorKind kinds[] = {T_Q, T_O, T_MLP_GATE, T_MLP_DOWN, T_NORM1, T_NORM2};
    const ModelCase *mc = &model_cases[1];
    for (int k = 0; k < 6; k++) {
        Model m;
        low_precision_begin(GEMM_FP8, false);
        int *tokens = case_start(&m, mc, variant_find("diff_v2"), FOR_TRAINING);
        const Tensor *t = tensor_of(&m.plan.tensors, kinds[k], 1);
        memset(m.state.params + t->offset, 0, t->count * sizeof(floatX));
        double loss = case_loss(&m, tokens, mc->B, mc->T, true), norm = case_grad_norm(&m);
        EXPECT(isfinite(loss) && isfinite(norm) && norm > 0, "%s = 0: loss %g, gradient norm %g", t->name, loss, norm);
        // without the down projection no gradient reaches the MLP's other matrices; without norm2 their input is 0
        const Tensor *gate = tensor_of(&m.plan.tensors, T_MLP_GATE, 1);
        double of_gate = 0;
        for (size_t e = 0; e < gate->count; e++) of_gate += fabs((double)m.state.grads[gate->offset + e]);
        bool none = kinds[k] == T_MLP_DOWN || kinds[k] == T_NORM2;
        EXPECT((of_gate == 0) == none, "%s = 0: the sum of gradients of %s is %g", t->name, gate->name, of_gate);
        case_end(&m, tokens);
    }
    low_precision_begin(GEMM_FP32, false);
}

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

// A step with an infinity or a NaN in a weight leaves the weights and the moments as they are.
static void test_not_finite_steps(void) {
    static const TensorKind kinds[] = {T_Q, T_O, T_MLP_GATE, T_MLP_DOWN};
    TestDirectory d = program_data();
    InnerRun *inner = inner_open(&d, "--gemm fp8");
    Model *model = &inner->run.model;
    size_t params_bytes = model->plan.params_bytes, moments_bytes = model->plan.moments_bytes;
    floatX *params = (floatX *)checked_calloc(1, params_bytes);
    real *moments = (real *)checked_calloc(1, moments_bytes);
    EXPECT(run_step(&inner->run).decision.apply, "the first step is not applied");
    for (int k = 0; k < 8; k++) {
        floatX *weight = param(&model->state, kinds[k % 4], 0) + 5, kept = *weight;
        *weight = (floatX)(k < 4 ? INFINITY : NAN);
        weight_copies_forget(&model->state.copies, &model->plan);
        memcpy(params, model->state.params, params_bytes);
        memcpy(moments, model->state.m, moments_bytes);
        StepResult r = run_step(&inner->run);
        EXPECT(!r.decision.finite && !r.decision.apply, "matrix %d: loss %g, norm %g, applied %d", k, r.loss,
               r.grad_norm, r.decision.apply);
        EXPECT(memcmp(params, model->state.params, params_bytes) == 0 &&
                   memcmp(moments, model->state.m, moments_bytes) == 0,
               "matrix %d: weights or moments changed", k);
        *weight = kept;
        weight_copies_forget(&model->state.copies, &model->plan);
        EXPECT(run_step(&inner->run).decision.apply, "matrix %d: the next step is not applied", k);
    }
    free(params);
    free(moments);
    inner_close(inner);
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
        InnerRun *inner = inner_open(&d, "%s --gemm %s --out %s/%d --rollback 1:1 --checkpoint-every 9",
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
        rollback_record_step(&run->state.rollback, run->state.step, true);
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
    {"weights and activations are rounded to E4M3, gradients to E5M2", test_formats_of_operands},
    {"each linear layer rounds its operands with their own maxima, in all variants", test_each_layer_rounds},
    {"the largest gradient below YOCO's keys and values includes theirs", test_maxima_of_shared_keys},
    {"gradients of all variants in bf16 and fp8 have the directions of those in fp32", test_gradients_of_types},
    {"gradients accumulate over micro-batches, each with its own scales", test_micro_batches_of_types},
    {"tensors of zeros have products of zero in fp8", test_zero_tensors},
    {"products of operands that are not finite are NaN in fp8", test_not_finite_operands},
    {"a step with a weight that is not finite is left out in fp8", test_not_finite_steps},
    {"rounded copies of weights are current after an update and a rollback", test_copies_after_changes},
};
