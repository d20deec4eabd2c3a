/*
prediction.h: tests of predict_diffv2: FLOPs agree with those that the trainer counts, times agree with values derived
by hand, and slower rates and links make a step slower.
*/
#pragma once
#include "harness.h"

// The plan of a preset on a device, with --zero 1 and one micro-step of B sequences per rank.
typedef struct {
    ModelPlan model;
    Options options;
} PredictedRun;
typedef struct {
    int window, full_every;
    bool yoco;
    int shared, dense; // of presets with experts
    int sparse;        // --sparse-blocks
} PredictedLayers;
static bool predicted_layers_run(PredictedRun *run, const char *device, const char *preset, const char *attention,
                                 int NKV, int B, int ranks, PredictedLayers layers) {
    Problem problem;
    int i = 0;
    while (strcmp(presets[i].name, preset) != 0) i++;
    ModelConfig c = presets[i].model;
    c.attention = variant_find(attention);
    c.window = layers.window, c.full_every = layers.full_every, c.yoco = layers.yoco;
    c.sparse_blocks = layers.sparse, c.sparse_size = 64;
    if (c.E) c.shared = layers.shared, c.dense_layers = layers.dense;
    if (NKV) c.NKV = NKV;
    if (model_config_problems(&c, &problem, 1)) return false;
    options_defaults(&run->options);
    run->options.device = strdup(device);
    run->options.matmul_dtype = GEMM_BF16;
    run->options.total_batch = (int64_t)B * c.T * ranks;
    run->options.steps = 100;
    predicted_plan(&run->model, &c, B, c.T, FOR_TRAINING, RECOMPUTE_NOTHING, ranks, 1, &run->options);
    return true;
}
static bool predicted_run(PredictedRun *run, const char *device, const char *preset, const char *attention, int NKV,
                          int B, int ranks) {
    const PredictedLayers full = {0, 0, false, 0, 0, 0};
    return predicted_layers_run(run, device, preset, attention, NKV, B, ranks, full);
}
// The plan after a change of options.
static void predicted_again(PredictedRun *run) {
    ModelPlan old = run->model;
    predicted_plan_like(&run->model, &old, 1, &run->options);
    plan_free(&old);
}
static void predicted_run_free(PredictedRun *run) {
    plan_free(&run->model);
    options_free(&run->options);
}

// The times were derived by hand for 1.4b, 8 key/value heads, B 16 x T 2048 on one H200 from instructions, bytes and
// published rates, most of them of short measurements; those of the head for 334 rows of logits at a time and for
// enough rows to fill the GPU.
static void test_prediction_step_times(void) {
    static const struct {
        PredictionClass kind;
        double least, most;
    } budget[] = {{CLASS_BLOCK_GEMMS, 306, 338},
                  {CLASS_LM_HEAD, 52, 57},
                  {CLASS_ATTENTION_FORWARD, 26, 28},
                  {CLASS_ATTENTION_BACKWARD, 105, 130},
                  {CLASS_SWIGLU, 16, 18},
                  {CLASS_UPDATE, 11.6, 15.2}, // 34 bytes per element with the norm
                  {CLASS_ROPE, 7.6, 8.4},
                  {CLASS_NORMS, 12, 15},
                  {CLASS_CROSS_ENTROPY, 6.6, 7.4},
                  {CLASS_COMBINE, 5.2, 5.8}};
    PredictedRun run;
    predicted_run(&run, "H200", "1.4b", "diff_v2", 8, 16, 1);
    Prediction p = predict_step(&run.model, &run.options, ALL_MEAN);
    Prediction fast = predict_step(&run.model, &run.options, ALL_FAST);
    Prediction slow = predict_step(&run.model, &run.options, ALL_SLOW);
    for (size_t i = 0; i < sizeof(budget) / sizeof(budget[0]); i++) {
        PredictionClass kind = budget[i].kind;
        double ms = p.class_ms[kind], least = budget[i].least, most = budget[i].most;
        EXPECT(ms >= 0.95 * least && ms <= 1.05 * most && fast.class_ms[kind] < most && slow.class_ms[kind] > least,
               "%s: %.2f ms, %.2f to %.2f, not %g to %g", prediction_classes[kind].name, ms, fast.class_ms[kind],
               slow.class_ms[kind], least, most);
    }
    run.model.logit_rows = 334;
    p = predict_step(&run.model, &run.options, ALL_MEAN);
    fast = predict_step(&run.model, &run.options, ALL_FAST), slow = predict_step(&run.model, &run.options, ALL_SLOW);
    EXPECT(fabs(p.class_ms[CLASS_LM_HEAD] / 93 - 1) < 0.17, "head with 334 rows at a time: %.1f ms, not 93",
           p.class_ms[CLASS_LM_HEAD]); // derived with split K = 100,288, which is no longer split
    EXPECT(fabs(p.step_ms / 629 - 1) < 0.05 && fast.step_ms < 629 && slow.step_ms > 629,
           "a step with 334 rows at a time: %.1f ms, %.1f to %.1f, not 629", p.step_ms, fast.step_ms, slow.step_ms);
    predicted_run_free(&run);
}

// Matrix products in bf16 by cuBLAS, as published: square and skinny ones, short and long sums, odd sizes.
static const struct {
    const char *device;
    int M, N, K;
    double tflops;
} published_products[] = {
    // clang-format off
    {"H100", 2048, 2048, 2048, 677}, {"H100", 4096, 4096, 4096, 789}, {"H100", 8192, 8192, 8192, 798},
    {"H100", 10240, 10240, 10240, 720}, // torch-performance-test-data #79, whose 1024^3 waits for the host
    {"H100 PCIe", 1024, 1024, 1024, 218}, {"H100 PCIe", 4096, 4096, 4096, 496}, // #95
    {"A100-PCIE-40GB", 4096, 4096, 4096, 234}, {"A100-PCIE-40GB", 8192, 8192, 8192, 215}, // #108
    {"RTX 4090", 4096, 4096, 4096, 152}, {"RTX 4090", 8192, 8192, 8192, 160}, // #78
    {"RTX 5080", 8192, 8192, 8192, 103}, {"A40", 10240, 10240, 10240, 122}, // #104, #185
    {"RTX 4090", 2040, 2040, 2040, 156}, {"RTX 4090", 2057, 2057, 2057, 107}, // pytorch #181718
    {"H100", 4224, 2048, 8192, 780}, // "H100 peak matmul FLOPS", a script by H. He
    {"H100", 2048, 8192, 8192, 722}, {"H100", 8193, 5008, 2501, 509}, // triton #2339, float8_experimental #145
    {"B200", 2048, 2048, 2048, 1006}, {"B200", 4096, 4096, 4096, 1532}, {"B200", 4096, 8192, 8192, 1652},
    {"B200", 8192, 8192, 8192, 1610}, // pyptx.dev/performance
    {"B200", 512, 4096, 4096, 1336}, {"B200", 2048, 4096, 4096, 1444}, // vllm #19566
    {"GB300", 8192, 8192, 512, 1596}, {"GB300", 8192, 8192, 16384, 1812}, // facebookexperimental/triton #740
    // clang-format on
};
// The four products of each kind of a layer of hidden size 4096 with 15872 tokens, in turn.
static const struct {
    const char *device;
    double forward_ms, dx_ms, dweight_ms; // of Transformer Engine's GEMM profiling tutorial
} published_layers[] = {{"H200 NVL", 10.632, 10.747, 10.530}, {"B300", 4.250, 4.434, 4.418}};

// Milliseconds of a product alone, with all assumptions at an end.
static double predicted_product(const char *device, AssumptionEnd end, int M, int N, int K) {
    PredictedRun run;
    predicted_run(&run, device, "tiny", "baseline", 0, 1, 1);
    Prediction p = predict_step(&run.model, &run.options, end);
    double bytes = 2.0 * ((double)M * K + (double)N * K + (double)M * N);
    double ms = gemm_ms(&p, M, N, K, bytes, gemm_rate(&p, K, N, false)) + 1e-3 * p.assumed[ASSUME_LAUNCH];
    predicted_run_free(&run);
    return ms;
}
static void expect_in_range(const char *what, const char *device, double ms, double fast, double slow) {
    EXPECT(ms > 0.86 * fast && ms < 1.16 * slow && fast < slow, "%s on %s: %.4f ms, predicted %.4f to %.4f", what,
           device, ms, fast, slow);
}

static void test_published_products(void) {
    for (size_t i = 0; i < sizeof(published_products) / sizeof(published_products[0]); i++) {
        const char *device = published_products[i].device;
        int M = published_products[i].M, N = published_products[i].N, K = published_products[i].K;
        const char *what = test_text("%d x %d x %d", M, N, K);
        expect_in_range(what, device, 2e-9 * M * N * K / published_products[i].tflops,
                        predicted_product(device, ALL_FAST, M, N, K), predicted_product(device, ALL_SLOW, M, N, K));
    }
    // one more row and column of tiles than 16: 107 instead of 156 TFLOP/s, 1.49 times as long
    double ratio = predicted_product("RTX 4090", ALL_FAST, 2057, 2057, 2057) /
                   predicted_product("RTX 4090", ALL_FAST, 2040, 2040, 2040);
    EXPECT(ratio > 1.35 && ratio < 1.65, "2057^3 takes %.2f times as long as 2040^3, not 1.49", ratio);
    enum { C = 4096, F = 16384, N = 15872 };
    static const int weights[][2] = {{3 * C, C}, {C, C}, {F, C}, {C, F}};
    for (size_t i = 0; i < sizeof(published_layers) / sizeof(published_layers[0]); i++) {
        const char *device = published_layers[i].device;
        double sums[2][3] = {{0}};
        for (int end = 0; end < 2; end++)
            for (int w = 0; w < 4; w++) {
                int OC = weights[w][0], IC = weights[w][1];
                AssumptionEnd all = end ? ALL_SLOW : ALL_FAST;
                sums[end][0] += predicted_product(device, all, N, OC, IC);
                sums[end][1] += predicted_product(device, all, N, IC, OC);
                sums[end][2] += predicted_product(device, all, OC, IC, N);
            }
        expect_in_range("forward", device, published_layers[i].forward_ms, sums[0][0], sums[1][0]);
        expect_in_range("dx", device, published_layers[i].dx_ms, sums[0][1], sums[1][1]);
        expect_in_range("dweight", device, published_layers[i].dweight_ms, sums[0][2], sums[1][2]);
    }
}

static double predicted_sum(const Prediction *p, const char *name, bool flops) {
    double sum = 0;
    for (int i = 0; i < p->op_count; i++)
        if (!name || strcmp(p->ops[i].name, name) == 0) sum += flops ? p->ops[i].flops : p->ops[i].bytes;
    return sum;
}

// Elements of the rows of zeros of weights of matrix products.
static double padded_weights(const ModelPlan *m) {
    double C = m->config.C, sum = C * (m->Vw - m->config.V);
    for (int l = 0; l < m->config.L; l++) sum += C * (plan_dims(m, l)->fused_width - plan_dims(m, l)->fused_rows);
    return sum + (m->config.yoco ? C * (double)(round_up(m->dims.kv_rows, MATRIX_ROWS) - m->dims.kv_rows) : 0);
}

static void expect_predicted_flops(const char *preset, const char *variant, PredictedLayers layers) {
    PredictedRun run;
    if (!predicted_layers_run(&run, "H200", preset, variant, 0, 2, 1, layers)) return;
    const ModelPlan *m = &run.model;
    Prediction p = predict_step(m, &run.options, ALL_MEAN);
    // the trainer counts the backward as twice the forward; flash attention also recomputes the scores
    const char *sparse = layers.sparse ? "sparse_" : "";
    double flops = predicted_sum(&p, NULL, true) - predicted_sum(&p, test_text("%sattention_backward", sparse), true) +
                   2 * predicted_sum(&p, test_text("%sattention_forward", sparse), true);
    double want = training_flops(m, m->B, m->T) + 6.0 * m->B * m->T * padded_weights(m); // which are computed, too
    EXPECT(fabs(flops / want - 1) < 1e-12,
           "%s %s, window %d, every %d, yoco %d, blocks %d: %.9g FLOPs, %.9g in the trainer", preset, variant,
           layers.window, layers.full_every, layers.yoco, layers.sparse, flops, want);
    double values = 0, N = (double)m->B * m->T; // each expert row is computed in the forward and in the backward
    for (int l = 0; l < m->config.L; l++) values += N * mlp_dims(&m->config, l).width;
    EXPECT(predicted_sum(&p, "swiglu_forward", false) == values * 3 * 2, "%s: bytes of swiglu", variant);
    double rows = 2 * N * m->config.K * expert_layers(&m->config);
    EXPECT(predicted_sum(&p, "expert_swiglu_forward", false) == rows * (m->config.FE * 3.0 * 2 + 8),
           "%s %s: bytes of the experts' activation", preset, variant);
    predicted_run_free(&run);
}
static void test_prediction_flops_and_bytes(void) {
    static const PredictedLayers layers[] = {{0, 0, false, 0, 0, 0},
                                             {100, 0, false, 0, 0, 0},
                                             {100, 3, false, 2, 1, 0},
                                             {100, 0, true, 1, 3, 0},
                                             {0, 0, false, 0, 0, 4}};
    for (int i = 0; i < PRESET_COUNT; i += 3) // the two after each differ from it in heads alone
        for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
            for (int k = 0; k < 5; k++) expect_predicted_flops(presets[i].name, attention_variants[v].name, layers[k]);
}

// Pairs of a query and a key, counted one by one.
static void test_visible_pairs(void) {
    static const int windows[] = {0, 1, 2, 5, 7, 8, 12, 13, 40};
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = 3;
    for (s.T = 1; s.T < 12; s.T += 5)
        for (s.query_offset = 0; s.query_offset < 9; s.query_offset += 4)
            for (int w = 0; w < 9; w++) {
                double count = 0;
                s.window = windows[w];
                for (int t = s.query_offset; t < s.query_offset + s.T; t++)
                    count += s.window ? min_int(s.window, t + 1) : t + 1;
                EXPECT(attention_visible(s) == s.B * count, "T %d, first %d, window %d: %g pairs, not %g", s.T,
                       s.query_offset, s.window, attention_visible(s), s.B * count);
            }
}

// Selected blocks: each of those between the first and the own one is as likely, where the window leaves a part of it.
static void test_visible_pairs_of_blocks(void) {
    static const int lengths[] = {3, 16, 37}, windows[] = {0, 1, 5, 6, 13, 40}, most[] = {1, 2, 64};
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = 2, s.NKV = s.D = 1, s.sparse.size = 4;
    for (int i = 0; i < 3 * 6 * 3; i++) {
        double pairs = 0, scored = 0;
        s.T = lengths[i % 3], s.window = windows[i / 3 % 6], s.sparse.blocks = most[i / 18];
        for (int t = 0; t < s.T; t++) {
            double keys[16] = {0}, between = 0, blocks = 0;
            for (int key = 0; key <= t; key++) keys[key / 4] += !s.window || key > t - s.window;
            pairs += keys[t / 4] + (t >= 4 ? keys[0] : 0);
            for (int j = 1; j < t / 4; j++) between += keys[j], blocks += keys[j] > 0;
            if (blocks > 0) pairs += between * fmin(1, s.sparse.blocks / blocks);
            scored += blocks;
        }
        EXPECT(fabs(attention_visible(s) - s.B * pairs) < 1e-9 && sparse_select_flops(s) == s.B * 2 * scored,
               "T %d, window %d, K %d: %g pairs, not %g; %g FLOPs, not %g", s.T, s.window, s.sparse.blocks,
               attention_visible(s), s.B * pairs, sparse_select_flops(s), s.B * 2 * scored);
    }
}

// The time of attention grows with the window, to that of full attention. YOCO saves products of the upper half.
static void test_prediction_of_windows(void) {
    static const int windows[] = {128, 512, 1024, 2048};
    const PredictedLayers full = {0, 0, false, 0, 0, 0}, half = {256, 2, false, 0, 0, 0},
                          yoco = {256, 0, true, 0, 0, 0};
    PredictedRun run;
    double before = 0, times[3];
    for (int w = 0; w < 4; w++) {
        const PredictedLayers layers = {windows[w], 0, false, 0, 0, 0};
        predicted_layers_run(&run, "H200", "1.4b", "diff_v2", 8, 16, 1, layers);
        double ms = predict_step(&run.model, &run.options, ALL_MEAN).class_ms[CLASS_ATTENTION_FORWARD];
        EXPECT(ms > 1.05 * before, "window %d: %g ms, half of it %g", windows[w], ms, before);
        predicted_run_free(&run);
        before = ms;
    }
    const PredictedLayers layers[] = {full, half, yoco};
    double products[3];
    for (int k = 0; k < 3; k++) {
        predicted_layers_run(&run, "H200", "1.4b", "diff_v2", 8, 16, 1, layers[k]);
        Prediction p = predict_step(&run.model, &run.options, ALL_MEAN);
        times[k] = p.class_ms[CLASS_ATTENTION_FORWARD], products[k] = p.class_ms[CLASS_BLOCK_GEMMS];
        EXPECT((p.class_ms[CLASS_YOCO] > 0) == layers[k].yoco, "%g ms of sums", p.class_ms[CLASS_YOCO]);
        predicted_run_free(&run);
    }
    EXPECT(fabs(before / times[0] - 1) < 1e-12, "a window of T: %g ms, full attention %g", before, times[0]);
    // a row attends to 240.1 keys of 1024.5, at 479 / (479 + 914 + 112) of the rate of long sequences, not 2048 / 2962
    EXPECT(fabs(times[1] / times[0] - 0.7545) < 0.0005, "half of the layers with windows: %g of %g ms", times[1],
           times[0]);
    EXPECT(fabs(times[2] / times[1] - 1) < 1e-12, "YOCO: %g ms, the same windows %g", times[2], times[1]);
    EXPECT(products[2] < 0.99 * products[0] && fabs(products[1] / products[0] - 1) < 1e-12,
           "products take %g, %g and %g ms", products[0], products[1], products[2]);
}

// cuDNN has no backward of documents on an A100 and on cards, where the built-in kernel computes that of all heads: 10
// products instead of the 8 of --attention-kernel own.
static void test_prediction_of_documents(void) {
    static const char *const devices[] = {"A100", "H200", "B200", "RTX 5090"};
    for (int d = 0; d < 4; d++) {
        PredictedRun run;
        predicted_run(&run, devices[d], "1.4b", "diff_v2", 8, 16, 1);
        Prediction p[3];
        for (int i = 0; i < 3; i++) {
            run.options.doc_mask = i > 0, run.options.attention_kernel = i == 2 ? SDPA_BUILTIN : SDPA_AUTO;
            p[i] = predict_step(&run.model, &run.options, ALL_MEAN);
        }
        bool builtin = d == 0 || d == 3;
        double backward =
                   p[1].class_ms[CLASS_ATTENTION_BACKWARD] / p[builtin ? 2 : 0].class_ms[CLASS_ATTENTION_BACKWARD],
               forward = p[1].class_ms[CLASS_ATTENTION_FORWARD] / p[0].class_ms[CLASS_ATTENTION_FORWARD];
        EXPECT(fabs(backward - (builtin ? 1.25 : 1)) < 1e-12 && forward > 1 && forward < 1.001,
               "%s: forward and backward take %g and %g times as long", devices[d], forward, backward);
        predicted_run_free(&run);
    }
}

// The built-in kernels for 1.4b, 8 key/value heads, B 16 x T 2048: 8 products of a pair in the backward instead of 10,
// no combination; heads kept for the backward: 16 per row instead of 32, and no gradients of heads.
static void test_prediction_of_groups(void) {
    enum { N = 16 * 2048, L = 24, HEADS = 32, D = 128 };
    static const char *const devices[] = {"A100", "H200", "B200", "RTX 5090"};
    for (int d = 0; d < 4; d++) {
        PredictedRun run;
        predicted_run(&run, devices[d], "1.4b", "diff_v2", 8, 16, 1);
        size_t bytes = run.model.activations_bytes;
        Prediction p = predict_step(&run.model, &run.options, ALL_MEAN);
        run.options.attention_kernel = SDPA_BUILTIN;
        predicted_again(&run);
        Prediction builtin = predict_step(&run.model, &run.options, ALL_MEAN);
        double ratio =
            predicted_sum(&builtin, "diff_attention_backward", true) / predicted_sum(&p, "attention_backward", true);
        EXPECT(fabs(ratio - 0.8) < 1e-12, "%g of the products of the backward", ratio);
        EXPECT(predicted_sum(&builtin, "diff_attention_forward", true) == predicted_sum(&p, "attention_forward", true),
               "other products of the forward");
        EXPECT(builtin.class_ms[CLASS_COMBINE] == 0 && p.class_ms[CLASS_COMBINE] > 0, "%g ms of combinations",
               builtin.class_ms[CLASS_COMBINE]);
        ratio = builtin.class_ms[CLASS_ROPE] / p.class_ms[CLASS_ROPE];
        double rope = builtin.device->generation == HOPPER ? 1 : 0.5; // whose kernel does not rotate
        EXPECT(fabs(ratio - rope) < 1e-12, "RoPE takes %g of its time, not %g", ratio, rope);
        size_t saved = (size_t)N * HEADS * D * 2 * L / 2 + (size_t)N * HEADS * D * 2;
        EXPECT(bytes - run.model.activations_bytes == saved, "%zu bytes saved, not %zu",
               bytes - run.model.activations_bytes, saved);
        Options loose = run.options;
        loose.deterministic = false;
        EXPECT(predict_step(&run.model, &loose, ALL_MEAN).step_ms == builtin.step_ms, "--no-deterministic");
        predicted_run_free(&run);
    }
}

// Attention without a mask by FlashAttention-2, whose instructions are those of the built-in kernels, in TFLOP/s. A row
// attends to as many keys as one of a causal sequence of twice the length.
static void test_published_attention(void) {
    static const struct {
        const char *device;
        int B, T, NH, D;
        bool backward;
        double tflops;
    } published[] = {
        {"RTX 5090", 1, 8192, 8, 128, false, 190.6}, // gau-nernst's blog
        {"H100", 128, 1024, 8, 128, false, 287},
        {"H100", 128, 16384, 8, 128, false, 304}, // pytorch/benchmark #2296
        {"B200", 8, 2048, 16, 128, false, 352},
        {"B200", 8, 8192, 16, 128, false, 362}, // tritonbench #171
        {"H100", 8, 2048, 32, 64, true, 264},
        {"B200", 8, 2048, 32, 64, true, 302}, // flash-attention #2688, #1589
    };
    for (size_t i = 0; i < sizeof(published) / sizeof(published[0]); i++) {
        PredictedRun run;
        predicted_run(&run, published[i].device, "tiny", "baseline", 0, 1, 1);
        Prediction p = predict_step(&run.model, &run.options, ALL_FAST);
        AttentionShape s;
        memset(&s, 0, sizeof(s));
        s.B = published[i].B, s.T = 2 * published[i].T, s.NQ = s.NKV = published[i].NH, s.D = s.DV = published[i].D;
        s.DV += 8 * predicted_wgmma(p.device, s); // no width of wgmma
        double flops = published[i].backward ? attention_backward_flops(s) : attention_forward_flops(s);
        double rate = 1e-9 * flops / attention_ms(&p, s, BY_TENSOR_CORES, flops, 0, published[i].backward);
        EXPECT(fabs(rate / published[i].tflops - 1) < 0.16, "%s, T %d: %g TFLOP/s, published %g", published[i].device,
               published[i].T, rate, published[i].tflops);
        predicted_run_free(&run);
    }
}

// --attention-kernel auto takes the kernel that the rows of the device say, of the nearest length: of attention by
// direction, of groups by the sum; cuDNN for what was not measured.
static void test_attention_choice(void) {
    static const AttentionTimes rows[] = {
        {"H200", 1, 128, 128, 2048, true, {2, 8}, {3, 6}}, // 10 and 9 ms
        {"H200", 1, 128, 128, 8192, true, {2, 6}, {3, 6}}, // 8 and 9 ms
        {"H200", 0, 128, 128, 2048, true, {2, 8}, {3, 6}}, {"A100-SXM4-80GB", 1, 128, 128, 2048, false, {2, 8}, {3, 6}},
        {NULL, 0, 0, 0, 0, false, {0, 0}, {0, 0}},
    };
    static const struct {
        const char *device;
        int signals, D, T, window, kernel;
        bool nondeterministic, documents, builtin[2]; // forward, backward
    } cases[] = {
        {"H200", 1, 128, 2048, 0, SDPA_AUTO, false, false, {true, true}},
        {"H200", 1, 128, 4000, 0, SDPA_AUTO, false, false, {true, true}},
        {"H200", 1, 128, 4100, 0, SDPA_AUTO, false, false, {false, false}},
        {"H200", 0, 128, 2048, 0, SDPA_AUTO, false, false, {false, true}},
        {"H200", 1, 128, 2048, 0, SDPA_CUDNN, false, false, {false, false}},
        {"H200", 1, 128, 8192, 0, SDPA_BUILTIN, false, false, {true, true}},
        {"H200", 1, 64, 2048, 0, SDPA_AUTO, false, false, {false, false}},
        {"H200", 2, 128, 2048, 0, SDPA_AUTO, false, false, {false, false}},
        {"H200", 1, 128, 2048, 1024, SDPA_AUTO, false, false, {false, false}},
        {"H200", 1, 128, 2048, 0, SDPA_AUTO, false, true, {false, false}},
        {"H200", 1, 128, 2048, 0, SDPA_AUTO, true, false, {false, false}},
        {"H100", 1, 128, 2048, 0, SDPA_AUTO, false, false, {false, false}},
        {"A100", 1, 128, 2048, 0, SDPA_AUTO, false, false, {false, false}},
        {"A100", 1, 128, 2048, 0, SDPA_AUTO, true, false, {true, true}},
    };
    attention_times = rows;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        AttentionShape s;
        Options o;
        memset(&s, 0, sizeof(s));
        options_defaults(&o);
        s.B = 1, s.NQ = s.NKV = 6, s.T = cases[i].T, s.D = s.DV = cases[i].D, s.window = cases[i].window;
        s.groups.signals = cases[i].signals, s.groups.noise = cases[i].signals > 0;
        o.deterministic = !cases[i].nondeterministic, o.doc_mask = cases[i].documents;
        o.attention_kernel = cases[i].kernel;
        for (int backward = 0; backward < 2; backward++) {
            AttentionKernel by = predicted_attention(device_peak_named(cases[i].device), &o, s, backward);
            EXPECT(by == (cases[i].builtin[backward] ? BY_TENSOR_CORES : BY_CUDNN), "case %zu, backward %d: kernel %d",
                   i, backward, by);
        }
        options_free(&o);
    }
    attention_times = attention_measured;
    EXPECT(attention_builtin_speed(NULL, 1, 128, 128, 2048, true, false) == 0, "an unknown device was measured");
}

// The cache by hand, for 1.4b with 8 key/value heads of width 128: 2 x 8 x 128 numbers per position and layer.
static void test_cache_bytes(void) {
    enum { B = 3, T = 4096, W = 1000, L = 24, POSITION = 2 * 8 * 128 * 2 };
    static const struct {
        PredictedLayers layers;
        size_t positions; // of all layers, per sequence
    } cases[] = {{{0, 0, false, 0, 0, 0}, (size_t)L * T},
                 {{W, 0, false, 0, 0, 0}, (size_t)L * W},
                 {{W, 6, false, 0, 0, 0}, (size_t)20 * W + 4 * T},
                 {{W, 0, true, 0, 0, 0}, (size_t)L / 2 * W + T},
                 {{2 * T, 0, false, 0, 0, 0}, (size_t)L * T}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        PredictedRun run;
        ModelPlan plan;
        predicted_layers_run(&run, "H200", "1.4b", "baseline", 8, 1, 1, cases[i].layers);
        predicted_plan(&plan, &run.model.config, B, T, FOR_GENERATION, RECOMPUTE_NOTHING, 1, 0, &run.options);
        size_t want = B * POSITION * cases[i].positions;
        EXPECT(plan.cache_bytes == want, "case %zu: %zu bytes of keys and values, not %zu", i, plan.cache_bytes, want);
        EXPECT(plan.activations_bytes > want, "case %zu: all activations have %zu bytes", i, plan.activations_bytes);
        plan_free(&plan);
        predicted_run_free(&run);
    }
}

static void test_prediction_is_monotone(void) {
    static const char *const devices[] = {"H200", "A100", "B200", "RTX 5090"};
    for (size_t d = 0; d < sizeof(devices) / sizeof(devices[0]); d++) {
        double before = 0;
        for (int ranks = 1; ranks <= 4096; ranks *= 2) {
            PredictedRun run;
            predicted_run(&run, devices[d], "1.4b", "diff_v2", 8, 4, ranks);
            Prediction p = predict_step(&run.model, &run.options, ALL_MEAN);
            PredictedRange r = predict_range(&run.model, &run.options);
            EXPECT(r.fast.step_ms < p.step_ms && p.step_ms < r.slow.step_ms, "%s, %d ranks: %g, %g and %g ms",
                   devices[d], ranks, r.fast.step_ms, p.step_ms, r.slow.step_ms);
            double exchanged = p.reduce_ms + p.gather_ms;
            EXPECT(ranks == 1 ? exchanged == 0 : exchanged > before,
                   "%s: %g ms of collectives for %d ranks, %g for half", devices[d], exchanged, ranks, before);
            EXPECT(p.exposed_ms <= exchanged + 1e-9, "%s, %d ranks: %g ms exposed of %g", devices[d], ranks,
                   p.exposed_ms, exchanged);
            before = exchanged;
            run.options.link_gbs = 1;
            EXPECT(ranks == 1 || predict_step(&run.model, &run.options, ALL_MEAN).step_ms > p.step_ms,
                   "%s, %d ranks: a link of 1 GB/s does not slow the step", devices[d], ranks);
            run.options.link_gbs = 0;
            run.model.recompute = RECOMPUTE_BLOCK;
            EXPECT(predict_step(&run.model, &run.options, ALL_MEAN).step_ms > p.step_ms,
                   "%s, %d ranks: recomputation does not slow the step", devices[d], ranks);
            predicted_run_free(&run);
        }
    }
}

// By hand from NCCL's table for 32 MiB: 8 GPUs use Simple, 8.4 + 7 x 3.4 us and 7/8 of the bytes at 360 GB/s; 4096 use
// LL, 6.6 + 3584 x 0.6 + 511 x 2.7 us and the bytes at 36 GB/s.
static void test_prediction_ring_times(void) {
    static const struct {
        int ranks;
        double ms;
    } cases[] = {{8, 0.0322 + 0.0815528}, {4096, 3.5367 + 0.9318400}};
    for (int i = 0; i < 2; i++) {
        PredictedRun run;
        predicted_run(&run, "H200", "124m", "diff_v2", 0, 1, cases[i].ranks);
        Prediction p = predict_step(&run.model, &run.options, ALL_MEAN);
        double ms = ring_of(&p, ring_in_group(&p), 32 * 1048576.0).ms;
        EXPECT(fabs(ms / cases[i].ms - 1) < 1e-4, "%d ranks: %.6f ms, not %.6f", cases[i].ranks, ms, cases[i].ms);
        predicted_run_free(&run);
    }
}

// 32 MiB over the machines of groups of 8, at 40 GB/s a GPU: over 2 machines two rings of 8.4 + 14 us and half of the
// bytes; over 512 trees of 8.4 + 2 x 9 x 14 us and twice the bytes at 92% of the rate.
static void test_prediction_groups(void) {
    static const struct {
        int ranks;
        double ms;
    } cases[] = {{16, 2 * (0.0224 + 0.4194304)}, {4096, 0.2604 + 1.8236104}};
    for (int i = 0; i < 2; i++) {
        PredictedRun run;
        predicted_run(&run, "H200", "124m", "diff_v2", 0, 1, cases[i].ranks);
        Prediction one = predict_step(&run.model, &run.options, ALL_MEAN);
        run.options.zero_group = 8;
        predicted_again(&run);
        Prediction p = predict_step(&run.model, &run.options, ALL_MEAN);
        double ms = all_reduce_of(&p, ring_across_groups(&p), 32 * 1048576.0).ms;
        EXPECT(fabs(ms / cases[i].ms - 1) < 1e-4, "%d ranks: %.6f ms, not %.6f", cases[i].ranks, ms, cases[i].ms);
        EXPECT((p.step_ms < one.step_ms) == (cases[i].ranks > 16), "%d ranks: %.2f ms in groups, %.2f in one",
               cases[i].ranks, p.step_ms, one.step_ms);
        predicted_run_free(&run);
    }
}

// --matmul-dtype fp8 on an H200, for the model of test_prediction_step_times. Products: FLOPs at 70% of 1978.8 TFLOP/s,
// tiles that are not full, and the roundings of operands.
static void test_prediction_fp8(void) {
    enum { L = 24, C = 2048, HEADS = 16 * 128, FUSED = 2 * HEADS + 2 * 8 * 128 + 16, F = 5504, N = 16 * 2048 };
    static const int weights[][2] = {{FUSED, C}, {C, HEADS}, {2 * F, C}, {C, F}};
    PredictedRun bf16, fp8;
    predicted_run(&fp8, "H200", "1.4b", "diff_v2", 8, 16, 1);
    fp8.options.matmul_dtype = GEMM_FP8;
    predicted_again(&fp8);
    predicted_run(&bf16, "H200", "1.4b", "diff_v2", 8, 16, 1);
    double count = 0, copies = 0, work = 0;
    for (int i = 0; i < 4; i++) {
        double out = weights[i][0], in = weights[i][1];
        count += L * out * in;
        copies += L * (256 + 2 * out * in); // both are multiples of 16, and the sum of 256
        work += 6 * L * out * in * N;
    }
    Prediction p = predict_step(&fp8.model, &fp8.options, ALL_MEAN);
    Prediction q = predict_step(&bf16.model, &bf16.options, ALL_MEAN);
    double products = 1e-9 * work / (0.7 * 1978.8), ms = p.class_ms[CLASS_BLOCK_GEMMS], ratio = q.step_ms / p.step_ms;
    EXPECT((double)fp8.model.copies_bytes == copies && bf16.model.copies_bytes == 0,
           "copies of %zu and %zu bytes, %.0f", fp8.model.copies_bytes, bf16.model.copies_bytes, copies);
    EXPECT(fp8.model.activations_bytes == bf16.model.activations_bytes + round_up(L * LINEAR_BLOCK_COUNT * 2 * 4, 256),
           "%zu and %zu bytes of activations", fp8.model.activations_bytes, bf16.model.activations_bytes);
    EXPECT(predicted_sum(&p, "linear_copy_weight", false) == 6 * count, "copies move %.6g bytes, not %.6g",
           predicted_sum(&p, "linear_copy_weight", false), 6 * count);
    EXPECT(ms > products && ms < 1.5 * products, "block GEMMs take %.1f ms, products at the peak %.1f", ms, products);
    EXPECT(ratio > 1.15 && ratio < 1.3, "a step in bf16 takes %.3f times that in fp8", ratio);
    EXPECT(predicted_sum(&p, NULL, true) == predicted_sum(&q, NULL, true), "other FLOPs");
    EXPECT(q.class_ms[CLASS_FP8] == 0 && p.class_ms[CLASS_LM_HEAD] == q.class_ms[CLASS_LM_HEAD] &&
               p.class_ms[CLASS_ATTENTION_BACKWARD] == q.class_ms[CLASS_ATTENTION_BACKWARD],
           "FP8 changes what stays in bf16");
    predicted_run_free(&fp8);
    predicted_run_free(&bf16);
}

// Experts are in FP8 on the generations where that is assumed to be faster; elsewhere they take the time of bf16.
static void test_prediction_of_fp8_experts(void) {
    static const char *const devices[] = {"L40S", "H200", "B200"};
    for (int g = 0; g < DEVICE_GENERATIONS; g++)
        EXPECT(generation_mma_fp8[g] == (assumption_value(ASSUME_EXPERT_FP8, (DeviceGeneration)g, ALL_MEAN) > 1),
               "generation %d", g);
    for (int i = 0; i < 3; i++) {
        PredictedRun runs[2];
        double ms[2];
        for (int fp8 = 0; fp8 < 2; fp8++) {
            predicted_run(&runs[fp8], devices[i], "30b-a3b", "diff_v2", 0, 4, 1);
            runs[fp8].options.matmul_dtype = fp8 ? GEMM_FP8 : GEMM_BF16;
            predicted_again(&runs[fp8]);
            Prediction p = predict_step(&runs[fp8].model, &runs[fp8].options, ALL_MEAN);
            ms[fp8] = p.class_ms[CLASS_EXPERT_GEMMS];
            EXPECT((predicted_sum(&p, "expert_linear_copy_weights", false) > 0) == (fp8 && i == 0), "%s", devices[i]);
        }
        EXPECT(i ? ms[1] == ms[0] : ms[1] < ms[0], "%s: %g ms in fp8, %g in bf16", devices[i], ms[1], ms[0]);
        for (int fp8 = 0; fp8 < 2; fp8++) predicted_run_free(&runs[fp8]);
    }
}

static void test_device_abbreviations(void) {
    static const char *const names[][2] = {{"H200", "H200"},
                                           {"a100", "A100-SXM4-80GB"},
                                           {"H100", "H100 * HBM3"},
                                           {"H100 80GB HBM3", "H100 * HBM3"},
                                           {"rtx 5090", "RTX 5090"},
                                           {"NVIDIA GeForce RTX 4090", "RTX 4090"},
                                           {"B200", "B200"},
                                           {"NVIDIA H100 PCIe", "H100 PCIe"},
                                           {"RTX 40", ""},
                                           {"H20", ""},
                                           {"", ""},
                                           {"H200 MIG 1g.10gb", ""}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const DevicePeak *row = device_peak_named(names[i][0]);
        EXPECT(strcmp(row ? row->name : "", names[i][1]) == 0, "'%s' is %s, not '%s'", names[i][0],
               row ? row->name : "none", names[i][1]);
    }
}

// A step of 30b-a3b on an H200. Weights are counted by hand: 48 layers with 128 experts of 3 * 768 * 2048.
static void test_prediction_of_experts(void) {
    const double weights = 48.0 * 128 * 3 * 768 * 2048, rows = 48.0 * 4096 * 8;
    PredictedRun run;
    predicted_run(&run, "H200", "30b-a3b", "diff_v2", 0, 1, 1);
    Prediction p = predict_step(&run.model, &run.options, ALL_MEAN);
    double bytes = predicted_sum(&p, "expert_linear_forward", false);
    double want = 2 * (weights + rows * (2048 + 2 * 768 + 768 + 2048));
    EXPECT(fabs(bytes / want - 1) < 1e-9, "the products read %.9g bytes, not %.9g", bytes, want);
    // the weights are read for dx, and their gradients are written in fp32
    bytes = predicted_sum(&p, "expert_linear_backward", false);
    want += 4 * weights + 2 * rows * (2048 + 2 * 768 + 768 + 2048);
    EXPECT(fabs(bytes / want - 1) < 1e-9, "the backward moves %.9g bytes, not %.9g", bytes, want);
    double flops = predicted_sum(&p, "expert_linear_forward", true);
    EXPECT(flops == 2 * rows * 3 * 768 * 2048, "%.9g FLOPs", flops);
    // half a tile of each expert is wasted, 64 of 320 rows; waves and bytes are a part of the rest
    double least = 3 * flops * 320 / 256 / (1e9 * 989.4 * 0.425), ms = p.class_ms[CLASS_EXPERT_GEMMS];
    EXPECT(ms > least && ms < 2 * least, "%g ms, at least %g", ms, least);
    predicted_run_free(&run);

    predicted_run(&run, "H200", "30b-a3b", "diff_v2", 0, 1, 1);
    run.model.T = 1, run.options.total_batch = 1; // of one token: 8 experts per layer
    p = predict_step(&run.model, &run.options, ALL_MEAN);
    bytes = predicted_sum(&p, "expert_linear_forward", false);
    want = 2 * (weights / 16 + 48.0 * 8 * (2048 + 2 * 768 + 768 + 2048));
    EXPECT(fabs(bytes / want - 1) < 1e-9, "one token reads %.9g bytes, not %.9g", bytes, want);
    predicted_run_free(&run);
}

// Milliseconds of a gather of a group's parameters.
static double gather_ms(const Prediction *p, int group) {
    const Sharding *s = &p->plan->sharding;
    double sum = 0;
    for (int i = s->first[group]; i < s->first[group + 1]; i++)
        sum += ring_of(p, ring_in_group(p), 2.0 * (double)s->buckets[i].piece * s->ranks).ms;
    return sum;
}

// Gathers of --zero 3: of the embedding, the head and the first two layers after the update; in each forward all layers
// but the first two, and in each backward all but the last two. Slow links expose them, fast ones nothing but latency.
static void test_prediction_of_sharded_parameters(void) {
    static const double links[] = {1, 0, 1e6};
    for (int micro_steps = 1; micro_steps <= 4; micro_steps += 3)
        for (int i = 0; i < 3; i++) {
            PredictedRun run;
            predicted_run(&run, "H100", "1.4b", "diff_v2", 8, 4, 8);
            run.options.link_gbs = links[i];
            run.options.total_batch *= micro_steps;
            run.model.sharding.level = 2;
            Prediction two = predict_step(&run.model, &run.options, ALL_MEAN);
            run.model.sharding.level = 3;
            Prediction p = predict_step(&run.model, &run.options, ALL_MEAN);
            int L = run.model.config.L, layers = 2 + 2 * micro_steps * (L - 2);
            double want = gather_ms(&p, 0) + gather_ms(&p, L + 1) + layers * gather_ms(&p, 1);
            EXPECT(fabs(p.gather_ms / want - 1) < 1e-9 && p.reduce_ms == two.reduce_ms,
                   "%d micro-steps gather for %.9g ms, not %.9g", micro_steps, p.gather_ms, want);
            double least = p.reduce_ms + p.gather_ms - 2 * (two.step_ms - two.exposed_ms);
            EXPECT(p.exposed_ms <= p.reduce_ms + p.gather_ms + 1e-9 && p.exposed_ms >= least &&
                       (i != 0 || (least > 0 && p.exposed_ms > two.exposed_ms)) && p.step_ms >= two.step_ms,
                   "%g GB/s: %g ms exposed of %g, at least %g; --zero 2: %g", links[i], p.exposed_ms,
                   p.reduce_ms + p.gather_ms, least, two.exposed_ms);
            predicted_run_free(&run);
        }
}

static const Test prediction_tests[] = {
    {"a step of 1.4b on an H200 has the times derived by hand", test_prediction_step_times},
    {"published times of matrix products of many shapes lie in the predicted range", test_published_products},
    {"operations have the FLOPs that the trainer counts, and bytes of bf16", test_prediction_flops_and_bytes},
    {"the pairs that attention computes are those that a window leaves", test_visible_pairs},
    {"so are those of selected blocks", test_visible_pairs_of_blocks},
    {"windows and YOCO take the time of the pairs and products that they leave", test_prediction_of_windows},
    {"--doc-mask takes the built-in backward where cuDNN has none for documents", test_prediction_of_documents},
    {"the built-in kernels compute pairs of heads in fewer products and less memory", test_prediction_of_groups},
    {"published times of attention by the instructions of the built-in kernels are the fast end",
     test_published_attention},
    {"--attention-kernel auto takes the kernel that is measured to be faster", test_attention_choice},
    {"the cache has the positions of windows, and one of YOCO's upper half", test_cache_bytes},
    {"--zero 3 gathers layers in each forward and backward", test_prediction_of_sharded_parameters},
    {"slow rates and links make a step slower, up to 4096 ranks", test_prediction_is_monotone},
    {"rings take the time of their hops and bytes", test_prediction_ring_times},
    {"sums over groups take the time of the faster of rings and trees", test_prediction_groups},
    {"--matmul-dtype fp8 halves the products' time, and adds copies, maxima and roundings", test_prediction_fp8},
    {"experts are in FP8 on the devices where that is faster", test_prediction_of_fp8_experts},
    {"device names may be abbreviated", test_device_abbreviations},
    {"a step of 30b-a3b has the bytes and FLOPs derived by hand", test_prediction_of_experts},
};
