/*
bench_cuda_decode.h: decoding with a key/value cache (bench_cuda.cu): the operations at several contexts, and whole
steps of a model.

The arms have the same key/value heads, and so caches of the same size; DIFF V1 reads the values twice. Their
measurements alternate, and ratios to the first arm are of one round.
*/
#pragma once

enum { DECODE_ROUNDS = 5, DECODE_STEPS = 8 };

static const struct {
    const char *name, *attention, *heads; // heads: the end of the preset's name
} decode_arms[] = {{"Transformer NH", "baseline", ""},
                   {"Transformer 1.5 NH", "baseline", "-1.5h"},
                   {"Transformer 2 NH", "baseline", "-2h"},
                   {"DIFF V1", "diff_v1", ""},
                   {"DIFF V2", "diff_v2", ""}};
enum { DECODE_ARMS = sizeof(decode_arms) / sizeof(decode_arms[0]) };

// A model for generation, without memory. Its prompts use the built-in kernel, which needs no plan.
static void decode_plan(Model *m, const char *preset, int arm, int NKV, int B, int T) {
    char name[64];
    FORMAT(name, "%s%s", preset, decode_arms[arm].heads);
    plan_model(m, name, decode_arms[arm].attention, NKV, B, T, FOR_GENERATION);
}

// attention_decode of a layer, all key sets, after `context` positions of each sequence; or cache_store of a position.
static OpSize decode_size(const char *preset, int arm, int NKV, int B, int context, bool store) {
    Model m;
    decode_plan(&m, preset, arm, NKV, B, context);
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
        double own[DECODE_ROUNDS], first_arm[DECODE_ROUNDS]; // medians sort
        char of[100];
        memcpy(own, ms[arm], sizeof(own));
        memcpy(first_arm, ms[0], sizeof(own));
        FORMAT(of, "%s, B %d, context %d", decode_arms[arm].name, B, context);
        kernel_record_rounds(cases[arm].name, of, own, first_arm, rounds, decode_arms[0].name, "");
        kernel_record(cases[arm], median(own, rounds));
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
            model_decode(&b.model, b.tokens, first, B, logits);
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
