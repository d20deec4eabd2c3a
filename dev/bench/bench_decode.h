/*
bench_decode.h: generation with a key/value cache. In bench.c: one more token of each sequence, and prompts; included
after bench_operations.h. In bench_cuda.cu: the operations of a token at
several contexts, and whole steps of a model; included after bench_cuda_kernels.h.

The arms have the same key/value heads, and so, except with YOCO, caches of the same size; DIFF V1 reads the values
twice. Their measurements alternate, and ratios to the first arm are of one round.
*/
#pragma once

typedef struct {
    const char *name, *attention;
    double heads; // times the preset's NH
    bool yoco;
    int sparse; // blocks of 64 positions
} DecodeArm;
static const DecodeArm decode_arms[] = {
    {"Transformer NH", "baseline", 1, false, 0},   {"Transformer 1.5 NH", "baseline", 1.5, false, 0},
    {"Transformer 2 NH", "baseline", 2, false, 0}, {"DIFF V1", "diff_v1", 1, false, 0},
    {"DIFF V2", "diff_v2", 1, false, 0},           {"DIFF V2 sparse", "diff_v2", 1, false, 8},
    {"DIFF V2 YOCO", "diff_v2", 1, true, 0},
};
enum { ARM_DIFF_V2 = 4, ARM_YOCO = 6, SPARSE_SIZE = 64 };
#ifdef DEVICE_OPS
enum { DECODE_ARMS = ARM_DIFF_V2 + 1, DECODE_ROUNDS = 5, DECODE_STEPS = 8 };
#else
enum { DECODE_ARMS = ARM_YOCO + 1, DECODE_SHORTEST = 1024 };
static int decode_window(void) { return bench_layers.window ? bench_layers.window : 512; }
#endif

// A model for generation, without memory. On a device its layers have the traits of the options.
static void decode_plan(Model *model, const char *preset, const DecodeArm *arm, int NKV, int B, int T) {
    ModelConfig c;
    Problem problem;
    CHECK(find_model(&c, preset, arm->attention, NKV, T), "no preset '%s'", preset);
    c.NH = (int)(arm->heads * c.NH);
#ifndef DEVICE_OPS
    c.yoco = arm->yoco;
    c.sparse_blocks = arm->sparse, c.sparse_size = SPARSE_SIZE;
    c.window = arm->yoco ? decode_window() : 0, c.full_every = 0;
#endif
    CHECK(model_config_problems(&c, &problem, 1) == 0, "%s", problem);
    plan_config(model, &c, B, T, FOR_GENERATION);
}

#ifndef DEVICE_OPS
// With one thread the time of the CPU, which other processes on the machine change less.
static double decode_now(void) {
    struct timespec t;
    if (bench.threads > 1) return now_seconds();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static double decode_bandwidth(void) {
    double start = decode_now();
    probe_bandwidth(READ, PROBE_COUNT);
    return sizeof(float) * (double)PROBE_COUNT / (decode_now() - start);
}

// A model for generation whose caches are full.
static void decode_open(BenchModel *b, const DecodeArm *arm, int B, int T) {
    decode_plan(&b->model, bench.preset, arm, 0, B, T);
    bench_alloc(b);
    for (int l = 0; l < b->model.plan.config.L; l++) {
        size_t count = (size_t)B * (size_t)cache_capacity(&b->model.plan, l) * (size_t)b->model.plan.dims.kv_rows;
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < count; i++) b->model.acts.layers[l].kv[i] = (real)((double)(i * 37 % 101) / 50 - 1);
    }
}

// Bytes that a token of each of B sequences reads: weights, then keys and values, the values once per key set.
static void decode_bytes(const Model *model, int B, double *weights, double *cache) {
    const ModelPlan *plan = &model->plan;
    const AttentionDims *d = &plan->dims;
    *weights = *cache = 0;
    for (int i = 0; i < plan->tensors.count; i++)
        if (is_product_weight(plan, &plan->tensors.tensors[i])) *weights += (double)plan->tensors.tensors[i].count;
    int listed = plan->config.sparse_blocks ? (plan->config.sparse_blocks + 2) * SPARSE_SIZE : INT_MAX;
    for (int l = 0; l < plan->config.L; l++)
        *cache += (double)B * min_int(listed, cache_capacity(plan, l)) *
                  (d->NK * d->QD + plan->config.attention->key_sets * d->NV * d->DV);
    *weights *= sizeof(floatX), *cache *= sizeof(floatX);
}

// Attention of one token alone, in all layers.
static void decode_attention(Model *model, int B) {
    const ModelPlan *plan = &model->plan;
    for (int l = 0; l < plan->config.L; l++)
        for (int set = 0; set < plan->config.attention->key_sets; set++) {
            AttentionTensors t = attention_tensors(plan, &model->acts, l, set, B, 1, 0); // lists of the last token
            (t.shape.sparse.blocks ? sparse_attention_forward : attention_decode)(
                t.out, t.lse, t.q, t.k, t.v, model->acts.start_position, cache_capacity(plan, l), t.shape);
        }
}

// Seconds of one token, or of its attention alone; the mean of enough calls.
static double decode_seconds(BenchModel *b, bool attention, int calls) {
    float *logits = (float *)checked_calloc((size_t)b->B * (size_t)b->model.plan.config.V, sizeof(float));
    int *first = (int *)checked_calloc((size_t)b->B, sizeof(int));
    for (int i = 0; i < b->B; i++) first[i] = b->T - 1;
    double start = decode_now();
    for (int i = 0; i < calls; i++)
        attention ? decode_attention(&b->model, b->B)
                  : generation_decode(generation_model(&b->model), b->tokens, first, b->B, logits);
    double seconds = (decode_now() - start) / calls;
    CHECK(attention || isfinite(logits[0]), "the logits of a model with random weights are not finite");
    free(first);
    free(logits);
    return seconds;
}

// The median of `rounds` values and, in brackets, the first and the last quartile.
static const char *with_quartiles(char *text, size_t size, const double *values) {
    double sorted[64];
    memcpy(sorted, values, (size_t)bench.rounds * sizeof(double));
    double middle = median(sorted, bench.rounds);
    snprintf(text, size, "%5.3f [%5.3f %5.3f]", middle, sorted[bench.rounds / 4], sorted[bench.rounds * 3 / 4]);
    return text;
}

typedef struct {
    double token[64], attention[64], share[64], attention_share[64]; // of the bandwidth
    double token_ratio[64], attention_ratio[64], rest_ratio[64];     // to the first arm, in the same round
} DecodeTimes;

static double decode_memory(int B, int T) {
    double bytes = 0;
    for (int i = 0; i < DECODE_ARMS; i++) {
        Model model;
        decode_plan(&model, bench.preset, &decode_arms[i], 0, B, T);
        bytes += (double)(model.plan.params_bytes + model.plan.activations_bytes + model.plan.workspace_bytes);
        plan_free(&model.plan);
    }
    return bytes;
}

static void decode_round(BenchModel *models, DecodeTimes *times, int r, const int *calls, int B) {
    for (int k = 0; k < DECODE_ARMS; k++) {
        int i = (k + r) % DECODE_ARMS; // no arm always follows the same one
        DecodeTimes *t = &times[i];
        double weights, cache, bandwidth = decode_bandwidth();
        decode_bytes(&models[i].model, B, &weights, &cache);
        t->token[r] = decode_seconds(&models[i], false, calls[i]);
        t->attention[r] = decode_seconds(&models[i], true, calls[i]);
        bandwidth = 0.5 * (bandwidth + decode_bandwidth());
        t->share[r] = (weights + cache) / t->token[r] / bandwidth;
        t->attention_share[r] = cache / t->attention[r] / bandwidth;
    }
    for (int i = 0; i < DECODE_ARMS; i++) {
        DecodeTimes *t = &times[i];
        t->token_ratio[r] = t->token[r] / times->token[r];
        t->attention_ratio[r] = t->attention[r] / times->attention[r];
        t->rest_ratio[r] = (t->token[r] - t->attention[r]) / (times->token[r] - times->attention[r]);
    }
}

static void decode_case(int B, int T) {
    double need = decode_memory(B, T);
    if (need > bench.memory) {
        printf("  batch %d, context %d: not measured: all arms need %.1f GiB, --memory is %.1f\n", B, T,
               need / (1 << 30), bench.memory / (1 << 30));
        return;
    }
    BenchModel models[DECODE_ARMS];
    static DecodeTimes times[DECODE_ARMS];
    int calls[DECODE_ARMS];
    size_t workspace = 0;
    for (int i = 0; i < DECODE_ARMS; i++) {
        decode_open(&models[i], &decode_arms[i], B, T);
        workspace = max_size(workspace, models[i].model.plan.workspace_bytes);
    }
    ops_init(workspace);
    for (int i = 0; i < DECODE_ARMS; i++) {
        decode_seconds(&models[i], false, 1);
        calls[i] = 1 + (int)(0.01 / decode_seconds(&models[i], false, 1)); // 10 ms
    }
    for (int r = 0; r < bench.rounds; r++) decode_round(models, times, r, calls, B);
    for (int i = 0; i < DECODE_ARMS; i++) {
        DecodeTimes *t = &times[i];
        double weights, cache, token = median(t->token, bench.rounds);
        char ratio[3][48];
        decode_bytes(&models[i].model, B, &weights, &cache);
        printf("  %3d %6d  %-18s %9.1f %8.2f %8.1f %5.0f%%  %-21s  %8.2f %5.0f%%  %-21s  %-21s\n", B, T,
               decode_arms[i].name, B / token, 1e3 * token, 1e-6 * (weights + cache),
               100 * median(t->share, bench.rounds), with_quartiles(ratio[0], sizeof(ratio[0]), t->token_ratio),
               1e3 * median(t->attention, bench.rounds), 100 * median(t->attention_share, bench.rounds),
               with_quartiles(ratio[1], sizeof(ratio[1]), t->attention_ratio),
               with_quartiles(ratio[2], sizeof(ratio[2]), t->rest_ratio));
        bench_close(&models[i]);
    }
    fflush(stdout);
}

static void table_decode(void) {
    printf("\ndecode %s, window of YOCO %d; ratios to the first arm in the same round, with quartiles\n"
           "  batch context                   tokens/s ms/token  MB read share  ratio                  attn. ms share"
           "  ratio                  ratio of the rest\n",
           bench.preset, decode_window());
    for (int B = 1; B <= 8; B += 7)
        for (int T = DECODE_SHORTEST; T <= bench.longest; T *= 2)
            if (!bench.batch || bench.batch == B) decode_case(B, T);
}

// ---------------------------------------------------------------------------------------------------
// Prompts

static void table_prefill(void) {
    printf("\nprefill %s, window of YOCO %d: seconds of a prompt, tokens/s\n"
           "  context  %22s %22s %22s\n",
           bench.preset, decode_window(), decode_arms[0].name, decode_arms[ARM_DIFF_V2].name,
           decode_arms[ARM_YOCO].name);
    static const int arms[] = {0, ARM_DIFF_V2, ARM_YOCO};
    double last[3] = {0, 0, 0}; // seconds at half the length
    for (int T = DECODE_SHORTEST; T <= bench.longest; T *= 2) {
        printf("  %7d", T);
        for (int i = 0; i < 3; i++) {
            double seconds[64];
            if (last[i] > bench.seconds) {
                printf(" %22s", "not measured");
                continue;
            }
            BenchModel b;
            decode_open(&b, &decode_arms[arms[i]], 1, T);
            float *logits = (float *)checked_calloc((size_t)b.model.plan.config.V, sizeof(float));
            int rounds = last[i] > 1 ? 1 : min_int(3, bench.rounds);
            for (int r = 0; r < rounds; r++) {
                double start = decode_now();
                generation_prefill(generation_model(&b.model), 0, b.tokens, T, logits);
                seconds[r] = decode_now() - start;
            }
            CHECK(isfinite(logits[0]), "the logits of a model with random weights are not finite");
            last[i] = median(seconds, rounds);
            printf(" %9.2f s %8.0f /s", last[i], T / last[i]);
            fflush(stdout);
            free(logits);
            bench_close(&b);
        }
        printf("\n");
    }
}

#else

// attention_decode of a layer, all key sets, after `context` positions of each sequence; or cache_store of a position.
static OpSize decode_size(const char *preset, int arm, int NKV, int B, int context, bool store) {
    Model m;
    decode_plan(&m, preset, &decode_arms[arm], NKV, B, context);
    const AttentionDims *d = &m.plan.dims;
    const int sets = m.plan.config.attention->key_sets, capacity = cache_capacity(&m.plan, 0),
              padding = d->fused_ld - d->NQ * d->QD;
    OpSize stored = {
        OP_CACHE_STORE, decode_arms[arm].name, {B, 1, capacity, d->kv_rows, d->fused_ld, context - 1}, {0, 0}};
    OpSize read = {OP_DECODE,
                   decode_arms[arm].name,
                   {B, d->NQ / sets, d->NV, d->QD, d->DV, sets, padding, capacity, context - 1, 0, 1},
                   {0, 0}};
    model_free(&m, false);
    return store ? stored : read;
}

// One context: every arm in each of the rounds.
static void decode_context(const char *preset, int NKV, int B, int context, bool store) {
    int rounds = bench_tiny ? 2 : DECODE_ROUNDS;
    double ms[DECODE_ARMS][DECODE_ROUNDS];
    KernelCase cases[DECODE_ARMS];
    for (int round = 0; round < rounds; round++)
        for (int arm = 0; arm < DECODE_ARMS; arm++) {
            KernelOperation of(decode_size(preset, arm, NKV, B, context, store), false);
            ms[arm][round] = of.ms();
            cases[arm] = of.k;
        }
    for (int arm = 0; arm < DECODE_ARMS; arm++) {
        double sorted[DECODE_ROUNDS], first_arm[DECODE_ROUNDS]; // medians sort
        char of[100];
        memcpy(sorted, ms[arm], sizeof(sorted));
        memcpy(first_arm, ms[0], sizeof(sorted));
        FORMAT(of, "%s, B %d, context %d", decode_arms[arm].name, B, context);
        kernel_record_rounds(cases[arm].name, of, sorted, first_arm, rounds, decode_arms[0].name, "");
        kernel_record(cases[arm], median(sorted, rounds));
    }
}

static void run_decode(const char *preset, int NKV, int B, int count, char **contexts) {
    device_start();
    kernels_open(1, kernels_pool());
    ops_init(1);
    kernel_peaks();
    for (int i = 0; i < count; i++)
        for (int store = 0; store < 2; store++) decode_context(preset, NKV, B, number(contexts[i], 1), store != 0);
    kernels_close();
}

// Random keys and values of all positions: uniform, as those of kernels_open.
static void decode_fill(Model *m) {
    for (int l = 0; l < m->plan.config.L; l++)
        kernel_fill((char *)m->acts.layers[l].kv,
                    (size_t)m->plan.B * cache_capacity(&m->plan, l) * m->plan.dims.kv_rows * sizeof(floatX), FLOATX);
}

// What a step reads of a position to which every layer attends.
static size_t decode_position_bytes(const ModelPlan *plan) {
    size_t bytes = 0;
    for (int l = 0; l < plan->config.L; l++) {
        AttentionShape s = key_set(plan, l, 0, 1, 1, 0).shape;
        bytes += (size_t)(plan->config.attention->key_sets * s.NKV * (s.D + s.DV)) * sizeof(floatX);
    }
    return bytes;
}

// For each line on stdin with a context, prints the milliseconds of a step that decodes one token of each sequence
// after that many positions: the median of several.
static void run_decode_turns(const char *preset, const char *attention, int NKV, int B, int T) {
    BenchModel b;
    kernels_open(1, (size_t)32 << 20);
    bench_open(&b, preset, attention, NKV, B, T, FOR_GENERATION);
    decode_fill(&b.model);
    float *logits = (float *)checked_calloc((size_t)B * (size_t)b.model.plan.config.V, sizeof(float));
    int *first = (int *)checked_calloc((size_t)B, sizeof(int));
    printf("%zu bytes of weights, %zu bytes of keys and values of a position\n", b.model.plan.params_bytes,
           decode_position_bytes(&b.model.plan));
    fflush(stdout);
    for (int context; scanf("%d", &context) == 1;) {
        double ms[DECODE_STEPS];
        CHECK(context > 0 && context <= T, "a context of %d; the cache has room for %d positions", context, T);
        for (int i = 0; i < B; i++) first[i] = context - 1;
        for (int step = 0; step < DECODE_STEPS; step++) {
            double start = now_seconds();
            generation_decode(generation_model(&b.model), b.tokens, first, B, logits);
            ms[step] = 1e3 * (now_seconds() - start);
        }
        CHECK(isfinite((double)logits[0]), "the logits of a model with random weights are not finite");
        printf("%.5f\n", median(ms, DECODE_STEPS));
        fflush(stdout);
    }
    free(first);
    free(logits);
    bench_close(&b);
    kernels_close();
}
#endif
