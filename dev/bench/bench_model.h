/*
bench_model.h: models, tokens and steps for bench.c and bench_cuda.cu. Included after the trainer.
*/
#pragma once

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof(double), compare_doubles);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

// Traits of the layers of all models of a call, as the trainer's: --window W, --full-every K, --shared-experts S,
// --dense-layers N, --sparse-blocks K, --yoco and --qk-norm; --doc-mask: documents of a third of T.
static struct {
    int window, full_every, shared, dense, sparse;
    bool yoco, qk_norm, documents;
} bench_layers;
// Reads one of these options at argv[*i], and its value; false: it is another one.
static bool bench_layer_option(int argc, char **argv, int *i) {
    const char *names[] = {"--window", "--full-every", "--shared-experts", "--dense-layers", "--sparse-blocks"};
    int *values[] = {&bench_layers.window, &bench_layers.full_every, &bench_layers.shared, &bench_layers.dense,
                     &bench_layers.sparse};
    if (strcmp(argv[*i], "--yoco") == 0) return bench_layers.yoco = true;
    if (strcmp(argv[*i], "--qk-norm") == 0) return bench_layers.qk_norm = true;
    if (strcmp(argv[*i], "--doc-mask") == 0) return bench_layers.documents = true;
    for (int k = 0; k < 5; k++)
        if (strcmp(argv[*i], names[k]) == 0 && *i + 1 < argc && sscanf(argv[*i + 1], "%d", values[k]) == 1)
            return (*i)++, true;
    return false;
}

// A preset with NKV key/value heads (0: the preset's); false for an unknown preset or variant.
static bool find_model(ModelConfig *c, const char *preset, const char *attention, int NKV, int T) {
    const Preset *p = NULL;
    for (int i = 0; i < PRESET_COUNT; i++)
        if (strcmp(presets[i].name, preset) == 0) p = &presets[i];
    if (!p || !variant_find(attention)) return false;
    *c = p->model;
    c->attention = variant_find(attention);
    c->T = T;
    if (NKV) c->NKV = NKV;
    c->shared = bench_layers.shared, c->dense_layers = bench_layers.dense;
    c->window = bench_layers.window, c->full_every = bench_layers.full_every, c->yoco = bench_layers.yoco;
    c->qk_norm = bench_layers.qk_norm, c->sparse_blocks = bench_layers.sparse, c->sparse_size = 64;
    return true;
}

static bool bench_no_update; // steps of forward and backward alone, without the memory of the update

// Plan a model without allocating memory.
static void plan_config(Model *model, const ModelConfig *c, int B, int T, Purpose purpose) {
    memset(model, 0, sizeof(*model));
    plan_build(&model->plan, c, B, T, purpose, RECOMPUTE_NOTHING, one_rank);
}
static void plan_model(Model *model, const char *preset, const char *attention, int NKV, int B, int T,
                       Purpose purpose) {
    ModelConfig c;
    Problem problem;
    CHECK(find_model(&c, preset, attention, NKV, T), "no preset '%s' or no variant '%s'", preset, attention);
    CHECK(model_config_problems(&c, &problem, 1) == 0, "%s", problem);
    plan_config(model, &c, B, T, purpose);
#ifdef DEVICE_OPS
    if (!bench_no_update || purpose != FOR_TRAINING) return;
    ModelPlan *plan = &model->plan;
    plan->moments_bytes = plan->master_bytes = plan->moment2_count = 0;
    attention_stop(); // attention may take half of the memory that is left
    plan->workspace_bytes = max_size(plan->workspace_bytes, plan_attention(plan));
#endif
}

// Returns the norm of the gradients of one rank, before clipping.
static double bench_grad_norm(Model *model) {
    rank_squares(&model->state, model->state.grad_square_sums);
    return squares_norm(&model->state, 0, model->plan.sharding.groups - 1);
}

// Tokens are distributed as in text: the r-th most frequent has a probability of about 1/r. V^u for uniform u.
static int zipf_token(uint64_t bits, int V) {
    double u = (double)(bits >> 11) * 0x1p-53;
    return min_int(V - 1, (int)pow((double)V, u) - 1);
}

// `count` tokens below V, on the host.
static int *bench_tokens(size_t count, int V) {
    int *tokens = (int *)checked_calloc(count, sizeof(int));
    for (size_t t = 0; t < count; t++) tokens[t] = zipf_token(random_bits(7, t), V);
    return tokens;
}
// Random weights that repeat: to draw all of them would take longer than a hundred steps of a large model.
static void bench_init(Model *model) {
    enum { CHUNK = 1 << 20 };
    floatX *host = (floatX *)checked_calloc(2 * CHUNK, sizeof(floatX)), *ones = host + CHUNK;
    real *exact = (real *)checked_calloc(2 * CHUNK, sizeof(real)), *exact_ones = exact + CHUNK;
    for (size_t e = 0; e < CHUNK; e++) {
        exact[e] = (real)(0.02 * random_normal(9, e)), exact_ones[e] = 1;
        host[e] = (floatX)exact[e], ones[e] = (floatX)1.0f;
    }
    for (int i = 0; i < model->plan.tensors.count; i++) {
        const Tensor *t = &model->plan.tensors.tensors[i];
        bool one = t->row->init == INIT_ONE;
        for (size_t begin = 0; begin < t->count; begin += CHUNK) {
            size_t count = min_size(CHUNK, t->count - begin);
            buffer_upload(model->state.params + t->offset + begin, one ? ones : host, count * sizeof(floatX));
            if (model->state.master)
                buffer_upload(model->state.master + t->offset + begin, one ? exact_ones : exact, count * sizeof(real));
        }
    }
    free(host);
    free(exact);
}

typedef struct {
    Model model;
    int B, T, *tokens;
    int *document_starts; // of each position's document; NULL without --doc-mask
} BenchModel;

// A planned model.
static void bench_alloc(BenchModel *b) {
    const int B = b->model.plan.B, T = b->model.plan.T;
    b->B = B, b->T = T;
    model_alloc(&b->model, NULL);
    ops_init(b->model.plan.workspace_bytes);
    bench_init(&b->model);
    b->tokens = bench_tokens((size_t)B * (size_t)T + 1, b->model.plan.config.V);
    b->document_starts = bench_layers.documents ? (int *)checked_calloc((size_t)B * (size_t)T, sizeof(int)) : NULL;
    for (int n = 0; b->document_starts && n < B * T; n++)
        b->document_starts[n] = n % T / max_int(1, T / 3) * max_int(1, T / 3);
}
static void bench_open(BenchModel *b, const char *preset, const char *attention, int NKV, int B, int T,
                       Purpose purpose) {
    plan_model(&b->model, preset, attention, NKV, B, T, purpose);
    bench_alloc(b);
}
static void bench_close(BenchModel *b) {
    model_free(&b->model, true);
#ifdef DEVICE_OPS
    ops_free(); // the next model needs the memory
#endif
    free(b->tokens);
    free(b->document_starts);
}

// One update as in the trainer, forward and backward alone, or a forward with its loss. Returns seconds; part: those of
// the forward with the classifier, of the backward and of the update, on the CPU, where operations are done when they
// return.
static double bench_step(BenchModel *b, double part[3]) {
    Model *model = &b->model;
    bool training = model->plan.purpose == FOR_TRAINING;
    Options o;
    memset(&o, 0, sizeof(o));
    o.beta1 = 0.9, o.beta2 = 0.95, o.eps = 1e-8, o.weight_decay = 0.1, o.grad_clip = 1;
    int N = b->B * b->T;
    double start = now_seconds();
    buffer_zero(model->acts.losses, (size_t)N * sizeof(real));
    model_read_batch(model, b->tokens, b->tokens + 1, b->document_starts, N);
    model_forward(model, b->B, b->T, NULL, NULL);
    if (training) router_count(&model->router, model->mlps, N, N, true);
    if (training && model->plan.config.tied) grads_open(&model->state, -1); // as model_micro_step
    if (training) grads_open(&model->state, model->plan.config.L);
    model_classify(model, N, training ? (real)(1.0 / N) : 0);
    double forward = now_seconds();
    if (training) model_backward(model, b->B, b->T);
    double backward = now_seconds();
    CHECK(isfinite(loss_sum(&model->acts, N)), "the loss of a model with random weights is not finite");
    if (training && !bench_no_update) {
        double norm = bench_grad_norm(model);
        CHECK(isfinite(norm), "the gradient of a model with random weights is not finite");
        model_update(model, &o, 1e-5, 10, norm);
    }
    ops_wait();
    double end = now_seconds();
    if (part) part[0] = forward - start, part[1] = backward - forward, part[2] = end - backward;
    return end - start;
}
