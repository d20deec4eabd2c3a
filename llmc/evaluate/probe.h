/*
probe.h: --probe FILE: what the attention of a checkpoint has learned, layer by layer, printed and written as JSON.

  subtraction   probe_subtraction.h; of variants without noise heads
  maps          probe_maps.h: means over output heads, windows and rows; of the first MAP_TOKENS tokens of the first
                PROBE_WINDOWS validation windows. Ranks are of the first RANK_WINDOWS of these
  lambda        the factor s of the noise heads by class of the token at the position: mean and standard deviation over
                windows, positions and output heads, and their number
  classes       first: position 0. punctuation: the token's text is ASCII punctuation, apart from ASCII white space;
                unknown where tokens have no text. rare: the least frequent tokens of the rest, which together are at
                most 5 % of the probed tokens. other
  frequency     of a token in the validation windows that are read, in their whole length; of equally frequent ones the
                larger ID is rarer, as tokenizers number tokens by frequency
  without --doc-mask, as --eval. One process. No result depends on the number of threads.
*/
#ifndef LLMC_PROBE_H
#define LLMC_PROBE_H
#include "../checkpoint/checkpoint.h"
#include "evaluation_attention.h"
#include "probe_maps.h"
#include "probe_subtraction.h"
#include "run_tokenizer.h"

enum { PROBE_WINDOWS = 64, RANK_WINDOWS = 32 };
static const double RARE_SHARE = 0.05;

typedef enum { TOKENS_ALL, TOKENS_FIRST, TOKENS_PUNCTUATION, TOKENS_RARE, TOKENS_OTHER, TOKEN_CLASSES } TokenClass;
static const char *const token_class_names[TOKEN_CLASSES] = {"all", "first", "punctuation", "rare", "other"};

typedef struct {
    double mean, squares; // squares: sum of squared deviations
    int64_t count;
} LambdaProbe;
static inline void lambda_probe_add(LambdaProbe *p, double x) {
    double before = x - p->mean;
    p->mean += before / (double)++p->count;
    p->squares += before * (x - p->mean);
}

typedef struct {
    SubtractionProbe subtraction;
    MapProbe maps;
    LambdaProbe lambda[TOKEN_CLASSES];
} LayerProbe;

typedef struct {
    EvaluationModel model;
    const floatX *params;
    DataLoader *val;
    const Tokenizer *tokenizer; // or NULL
    int windows;
    uint64_t seed;
    const char *checkpoint; // directory, or NULL
    const char *out;
    int T, done, batch;     // positions; windows so far, and of the running forward
    unsigned char *classes; // [windows][T]: a TokenClass
    bool text;              // whether tokens have a text
    LayerProbe *layers;     // [L]
} Probe;

// ---- classes of tokens

static inline bool token_is_punctuation(const unsigned char *text, size_t size) {
    bool any = false;
    for (size_t i = 0; i < size; i++) {
        if (text[i] < 128 && isspace(text[i])) continue;
        if (text[i] >= 128 || !ispunct(text[i])) return false;
        any = true;
    }
    return any;
}

typedef struct {
    int id;
    int64_t count;
} TokenCount;
static inline int rarer_token(const void *a, const void *b) {
    const TokenCount *x = (const TokenCount *)a, *y = (const TokenCount *)b;
    return x->count != y->count ? (x->count > y->count) - (x->count < y->count) : (x->id < y->id) - (x->id > y->id);
}

// The class [V] of tokens that are not at position 0. counts [V]: frequencies; tokens [count]: the probed ones.
static inline unsigned char *token_classes(const int64_t *counts, const int *tokens, int count, int V,
                                           const Tokenizer *tokenizer, bool *text) {
    unsigned char *classes = (unsigned char *)checked_calloc(V, 1);
    TokenCount *order = (TokenCount *)checked_calloc(V, sizeof(TokenCount));
    int64_t *probed = (int64_t *)checked_calloc(V, sizeof(int64_t)), sum = 0;
    int candidates = 0;
    for (int i = 0; i < count; i++) probed[tokens[i]]++;
    for (int v = 0; v < V; v++) {
        size_t size = 0;
        unsigned char *bytes = tokens_text(&v, 1, V, tokenizer, &size);
        *text = bytes != NULL;
        classes[v] = bytes && token_is_punctuation(bytes, size) ? TOKENS_PUNCTUATION : TOKENS_OTHER;
        free(bytes);
        if (classes[v] == TOKENS_PUNCTUATION || !probed[v]) continue;
        order[candidates].id = v;
        order[candidates++].count = counts[v];
    }
    qsort(order, candidates, sizeof(TokenCount), rarer_token);
    for (int i = 0; i < candidates; i++) {
        sum += probed[order[i].id];
        if ((double)sum > RARE_SHARE * count) break;
        classes[order[i].id] = TOKENS_RARE;
    }
    free(order);
    free(probed);
    return classes;
}

// ---- measurement

static inline void probe_lambda(Probe *p, LayerProbe *layer, const HostAttention *m) {
    int T = m->shape.T, heads = maps_output_heads(m);
    for (int b = 0; b < m->shape.B; b++)
        for (int t = 0; t < T; t++)
            for (int h = 0; h < heads; h++) {
                double s = map_lambda(m, b, t, h);
                lambda_probe_add(&layer->lambda[TOKENS_ALL], s);
                lambda_probe_add(&layer->lambda[p->classes[(size_t)(p->done + b) * T + t]], s);
            }
}

// Adds a layer of the batch, right after its forward.
static inline void probe_visit(void *data, int l) {
    Probe *p = (Probe *)data;
    const EvaluationModel *m = &p->model;
    LayerOnHost host = layer_to_host(m->plan, &m->acts->layers[l], l, key_set(m->plan, l, 0, p->batch, p->T, 0));
    maps_probe_add(&p->layers[l].maps, &host.attention, RANK_WINDOWS - p->done);
    if (m->plan->dims.groups.noise) probe_lambda(p, &p->layers[l], &host.attention);
    layer_on_host_free(&host);
}

static inline void probe_maps(Probe *p) {
    const ModelPlan *plan = p->model.plan;
    int V = plan->config.V, T = p->T = min_int(MAP_TOKENS, plan->T), count = p->windows * T;
    int64_t *counts = (int64_t *)checked_calloc(V, sizeof(int64_t));
    int *tokens = evaluation_windows(&p->model, p->val, p->windows, T, counts);
    unsigned char *class_of = token_classes(counts, tokens, count, V, p->tokenizer, &p->text);
    p->classes = (unsigned char *)checked_calloc(count, 1);
    for (int i = 0; i < count; i++) p->classes[i] = i % T ? class_of[tokens[i]] : (unsigned char)TOKENS_FIRST;
    for (p->done = 0; p->done < p->windows; p->done += p->batch) {
        p->batch = min_int(plan->B, p->windows - p->done);
        p->model.forward(p->model.model, tokens + (size_t)p->done * T, p->batch, T, probe_visit, p);
    }
    free(p->classes);
    free(class_of);
    free(tokens);
    free(counts);
}

static inline void probe_weights(Probe *p) {
    const ModelPlan *plan = p->model.plan;
    const ModelConfig *c = &plan->config;
    for (int l = 0; l < c->L && plan->dims.groups.noise == 0; l++) {
        const Tensor *t = tensor_of(&plan->tensors, T_O, l);
        floatX *o_proj = (floatX *)checked_calloc(t->count, sizeof(floatX));
        buffer_download(o_proj, p->params + param_place(plan, t), t->count * sizeof(floatX));
        p->layers[l].subtraction = probe_subtraction(o_proj, c->C, c->NH, c->NKV, c->D, random_key(t->name, p->seed));
        free(o_proj);
    }
}

// ---- output

static inline void add_permuted(cJSON *json, const char *name, const PermutedStatistic *s) {
    char key[64];
    cJSON_AddNumberToObject(json, name, s->observed);
    FORMAT(key, "%s_permuted", name);
    cJSON *permuted = cJSON_AddObjectToObject(json, key);
    cJSON_AddNumberToObject(permuted, "mean", s->mean);
    cJSON_AddNumberToObject(permuted, "low", s->low);
    cJSON_AddNumberToObject(permuted, "high", s->high);
    FORMAT(key, "%s_p", name);
    cJSON_AddNumberToObject(json, key, s->p);
}

static inline cJSON *layer_probe_json(const Probe *p, int l) {
    const LayerProbe *layer = &p->layers[l];
    const SubtractionProbe *s = &layer->subtraction;
    const MapProbe *m = &layer->maps;
    cJSON *json = cJSON_CreateObject(), *part;
    cJSON_AddNumberToObject(json, "layer", l);
    if (s->heads_in_group < 2) cJSON_AddNullToObject(json, "subtraction");
    else {
        part = cJSON_AddObjectToObject(json, "subtraction");
        cJSON_AddNumberToObject(part, "heads_in_group", s->heads_in_group);
        add_permuted(part, "adjacent", &s->adjacent);
        add_permuted(part, "closest", &s->closest);
    }
    part = cJSON_AddObjectToObject(json, "maps");
    cJSON_AddNumberToObject(part, "correlation", probe_mean(m->correlation));
    cJSON_AddNumberToObject(part, "cancelled", probe_mean(m->cancelled));
    cJSON_AddNumberToObject(part, "negative", probe_mean(m->negative));
    cJSON_AddNumberToObject(part, "effective_rank", probe_mean(m->rank[RANK_EFFECTIVE]));
    cJSON_AddNumberToObject(part, "effective_rank_signal", probe_mean(m->rank[RANK_SIGNAL]));
    cJSON_AddNumberToObject(part, "effective_rank_noise", probe_mean(m->rank[RANK_NOISE]));
    if (p->model.plan->dims.groups.noise == 0) cJSON_AddNullToObject(json, "lambda");
    else {
        part = cJSON_AddObjectToObject(json, "lambda");
        for (int i = 0; i < TOKEN_CLASSES; i++) {
            const LambdaProbe *lambda = &layer->lambda[i];
            if (i == TOKENS_PUNCTUATION && !p->text) {
                cJSON_AddNullToObject(part, token_class_names[i]);
                continue;
            }
            cJSON *of_class = cJSON_AddObjectToObject(part, token_class_names[i]);
            cJSON_AddNumberToObject(of_class, "mean", lambda->count ? lambda->mean : NAN);
            cJSON_AddNumberToObject(of_class, "sd",
                                    lambda->count ? sqrt(lambda->squares / (double)lambda->count) : NAN);
            cJSON_AddNumberToObject(of_class, "count", (double)lambda->count);
        }
    }
    return json;
}

static inline void print_probe_number(double x, int width) {
    if (isnan(x)) printf(" %*s", width, "-");
    else printf(" %*.3f", width, x);
}

static inline void print_probe_subtraction(const Probe *p) {
    printf("opposition of the blocks of o_proj of two heads, cos(W, -W'), and with permuted columns (95 %% of draws)\n"
           "  %5s %8s %8s %17s %7s %8s %8s %17s %7s\n",
           "layer", "adjacent", "permuted", "", "p", "closest", "permuted", "", "p");
    for (int l = 0; l < p->model.plan->config.L; l++) {
        const SubtractionProbe *s = &p->layers[l].subtraction;
        const PermutedStatistic *both[] = {&s->adjacent, &s->closest};
        printf("  %5d", l);
        for (int i = 0; i < 2; i++) {
            print_probe_number(both[i]->observed, 8);
            print_probe_number(both[i]->mean, 8);
            if (isnan(both[i]->low)) printf(" %17s", "");
            else printf(" (%6.3f .. %6.3f)", both[i]->low, both[i]->high);
            print_probe_number(both[i]->p, 6);
        }
        printf("\n");
    }
}

static inline void print_probe_layers(const Probe *p) {
    bool pairs = p->model.plan->dims.groups.noise > 0;
    int L = p->model.plan->config.L;
    printf("maps: correlation of a pair, cancelled and negative mass; effective ranks of all, signal and noise maps\n"
           "  %5s %11s %11s %11s %11s %11s %11s\n",
           "layer", "correlation", "cancelled", "negative", "rank", "signal", "noise");
    for (int l = 0; l < L; l++) {
        const MapProbe *m = &p->layers[l].maps;
        const ProbeMean list[] = {m->correlation,          m->cancelled,         m->negative,
                                  m->rank[RANK_EFFECTIVE], m->rank[RANK_SIGNAL], m->rank[RANK_NOISE]};
        printf("  %5d", l);
        for (int i = 0; i < 6; i++) print_probe_number(probe_mean(list[i]), 11);
        printf("\n");
    }
    if (!pairs) return;
    printf("factor of the noise heads by token%s\n  %5s",
           p->text ? "" : " (without a tokenizer, punctuation is unknown: give --tokenizer FILE)", "layer");
    for (int i = 0; i < TOKEN_CLASSES; i++) printf(" %11s", token_class_names[i]);
    printf("\n");
    for (int l = 0; l < L; l++) {
        printf("  %5d", l);
        for (int i = 0; i < TOKEN_CLASSES; i++)
            print_probe_number(p->layers[l].lambda[i].count ? p->layers[l].lambda[i].mean : NAN, 11);
        printf("\n");
    }
}

// The step of a checkpoint of this program; -1: unknown.
static inline int64_t probe_step(const char *checkpoint) {
    Reason why;
    uint64_t step;
    cJSON *state = checkpoint ? checkpoint_init_state(checkpoint, why) : NULL;
    bool known = state && json_get_u64(state, "step", &step);
    cJSON_Delete(state);
    return known ? (int64_t)step : -1;
}

static inline void probe_write(const Probe *p) {
    const ModelPlan *plan = p->model.plan;
    int64_t step = probe_step(p->checkpoint);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "attention", plan->config.attention->name);
    cJSON_AddNumberToObject(json, "step", step < 0 ? NAN : (double)step);
    json_add_u64(json, "parameters", plan->tensors.parameter_count);
    cJSON_AddNumberToObject(json, "windows", p->windows);
    cJSON_AddNumberToObject(json, "positions", p->T);
    cJSON_AddNumberToObject(json, "rank_windows", min_int(RANK_WINDOWS, p->windows));
    cJSON_AddBoolToObject(json, "token_text", p->text);
    json_add_u64(json, "seed", p->seed);
    cJSON *layers = cJSON_AddArrayToObject(json, "layers");
    for (int l = 0; l < plan->config.L; l++) cJSON_AddItemToArray(layers, layer_probe_json(p, l));
    size_t size = 0;
    char *text = json_text(json, &size);
    file_write_atomic(p->out, text, size);
    free(text);
    cJSON_Delete(json);
}

// Fills p->layers, prints them and writes them to p->out. The caller sets the fields up to `out`; p->windows: at most
// PROBE_WINDOWS of them are read.
static inline void probe(Probe *p) {
    const ModelPlan *plan = p->model.plan;
    p->windows = min_int(p->windows, PROBE_WINDOWS);
    p->layers = (LayerProbe *)checked_calloc(plan->config.L, sizeof(LayerProbe));
    probe_weights(p);
    probe_maps(p);
    printf("%s, %zu parameters: the first %d tokens of %d windows; ranks of %d of them\n", plan->config.attention->name,
           plan->tensors.parameter_count, p->T, p->windows, min_int(RANK_WINDOWS, p->windows));
    if (p->layers[0].subtraction.heads_in_group > 1) print_probe_subtraction(p);
    print_probe_layers(p);
    probe_write(p);
    for (int l = 0; l < plan->config.L; l++)
        CHECK(p->layers[l].maps.broken == 0,
              "the attention maps of layer %d are not finite: the model's weights are broken or training diverged", l);
    free(p->layers);
}
#endif
