/*
bench_model.h: models for benchmarks (dev/bench/bench.c, dev/bench/bench_cuda.cu), by preset and without files. To be included after
train_diffv2.c.
*/
#ifndef DEV_BENCH_MODEL_H
#define DEV_BENCH_MODEL_H

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof(double), compare_doubles);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

// A preset's shape with NKV key/value heads, 0: its own; false where there is no such preset or variant.
static bool find_model(ModelConfig *c, const char *preset, const char *attention, int NKV, int T) {
    const Preset *p = NULL;
    memset(c, 0, sizeof(*c));
    for (int i = 0; i < PRESET_COUNT; i++)
        if (strcmp(presets[i].name, preset) == 0) p = &presets[i];
    c->attention = variant_find(attention);
    if (!p || !c->attention) return false;
    c->L = p->L, c->C = p->C, c->NH = p->NH, c->NKV = NKV ? NKV : p->NKV, c->D = p->D, c->F = p->F, c->T = T,
    c->V = p->V, c->tied = p->tied;
    c->rope_theta = 10000;
    c->rms_norm_eps = 1e-5;
    return true;
}

// A model's sizes without its memory.
static void plan_model(Model *model, const char *preset, const char *attention, int NKV, int B, int T,
                       Purpose purpose) {
    ModelConfig c;
    CHECK(find_model(&c, preset, attention, NKV, T), "no preset '%s' or no variant '%s'", preset, attention);
    model_plan(model, &c, B, T, purpose, RECOMPUTE_NOTHING, 0, 1, 0);
}

// Of the gradients of one rank, before clipping.
static double bench_grad_norm(Model *model) {
    model_own_squares(model, model->squares);
    return squares_norm(model, 0, model->plan.sharding.groups - 1);
}

static Options bench_options(void) {
    Options o;
    memset(&o, 0, sizeof(o));
    o.beta1 = 0.9, o.beta2 = 0.95, o.eps = 1e-8, o.weight_decay = 0.1, o.grad_clip = 1;
    return o;
}

// A token of rank r with a chance of about 1/r, as in text: V^u for uniform u. The most frequent one is 1 in log2(V).
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
#endif
