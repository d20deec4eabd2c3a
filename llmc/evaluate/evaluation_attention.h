/*
evaluation_attention.h: attention statistics of the first MAP_TOKENS tokens of validation windows (attention_maps.h),
for --eval.

Measured without --doc-mask. Maps are computed on the host, by one function for all backends; speed does not matter
here.
*/
#pragma once
#include "attention_maps.h"
#include "evaluation_model.h"

enum { ATTENTION_WINDOWS = 64 };

// Statistics of one layer over all windows.
typedef struct {
    double first_mass[3], sinks[3], entropy[3]; // sums over windows and heads: first map, second map, effective
    int64_t heads;                              // windows times output heads
    float *logits, *hidden; // magnitudes of the visible logits of all maps, and of the residual stream
    size_t logit_count, hidden_count;
} LayerAttention;

static inline int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}
static inline void add_magnitudes(cJSON *json, const char *name, float *values, size_t count) {
    char key[64];
    qsort(values, count, sizeof(float), compare_floats);
    FORMAT(key, "%s_max", name);
    cJSON_AddNumberToObject(json, key, (double)values[count - 1]);
    FORMAT(key, "%s_median", name);
    cJSON_AddNumberToObject(json, key, (double)values[(count - 1) / 2]);
}

static inline void *host_copy(HostAttention *h, const void *buffer, size_t bytes) {
    void *copy = checked_calloc(bytes, 1);
    buffer_download(copy, buffer, bytes);
    h->copies[h->copy_count++] = copy;
    return copy;
}

// Copies a layer's attention to the host; attention_on_host_free() frees it. s: key set 0 of layer l in the forward
// that filled the activations.
static inline HostAttention attention_to_host(const ModelPlan *plan, const LayerActivations *a, int l, KeySet s) {
    const AttentionDims *d = plan_dims(plan, l);
    bool projected = a->lambda == a->fused + d->lambda_at; // lambda is in columns of the fused rows
    size_t N = (size_t)s.shape.B * s.shape.T, row = N * sizeof(floatX);
    HostAttention h;
    memset(&h, 0, sizeof(h));
    const floatX *fused = (const floatX *)host_copy(&h, a->fused, row * d->fused_ld), *kv = fused;
    if (a->kv != a->fused) kv = (const floatX *)host_copy(&h, a->kv, row * s.shape.ldkv); // the rows of YOCO
    h.shape = s.shape;
    if (a->lists) {
        size_t lists = N * s.shape.NKV * sparse_width(s.shape.sparse);
        h.shape.sparse.lists = (int *)host_copy(&h, a->lists, lists * sizeof(int));
    }
    h.key_sets = plan->config.attention->key_sets;
    h.groups = d->groups;
    h.factor = plan->config.attention->factor;
    h.q = fused + s.q;
    h.k = kv + s.k;
    h.lse = (const real *)host_copy(&h, a->lse, lse_count(plan, s.shape.B, s.shape.T) * sizeof(real));
    h.lambda = fused + d->lambda_at;
    if (!projected) h.lambda = (const floatX *)host_copy(&h, a->lambda, row * d->OH);
    h.ldl = d->lambda_ld;
    return h;
}
static inline void attention_on_host_free(HostAttention *h) {
    for (int i = 0; i < h->copy_count; i++) free(h->copies[i]);
}

// Adds the maps of one layer for B sequences.
static inline void layer_attention_add(LayerAttention *sums, const HostAttention *m, float *maps[2], float *logits) {
    int T = m->shape.T, count = m->groups.noise ? 2 : 1;
    for (int b = 0; b < m->shape.B; b++)
        for (int h = 0; h < maps_output_heads(m); h++) {
            MapMeans means[3];
            memset(means, 0, sizeof(means));
            for (int i = 0; i < count; i++) {
                int head = maps_query_head(m, h, i);
                bool again = i == 1 && h > 0 && head == maps_query_head(m, h - 1, i); // a shared noise head
                attention_map(maps[i], logits, m, b, head);
                means[i] = map_means(maps[i], NULL, m, b, h);
                for (int t = 0; t < T && !again; t++)
                    for (int j = map_first_key(m->shape, t); j <= t; j++)
                        if (sparse_reads(sparse_row(m->shape, b, head / m->key_sets, t), m->shape.sparse, j))
                            sums->logits[sums->logit_count++] = fabsf(logits[t * T + j]);
            }
            means[2] = count == 2 ? map_means(maps[0], maps[1], m, b, h) : means[0];
            means[2].first_mass = means[2].first_share;
            for (int i = 0; i < 3; i++) {
                sums->first_mass[i] += means[i].first_mass;
                sums->sinks[i] += means[i].first_mass > SINK_ALPHA;
                sums->entropy[i] += means[i].entropy;
            }
            sums->heads++;
        }
}

static inline void layer_attention_json(cJSON *list, LayerAttention *s, int layer, bool pairs) {
    static const char *const names[] = {"map0", "map1", "effective"};
    cJSON *json = cJSON_CreateObject();
    char key[64];
    cJSON_AddNumberToObject(json, "layer", layer);
    for (int i = 0; i < 3; i++) {
        bool has = i != 1 || pairs;
        FORMAT(key, "first_mass_%s", names[i]);
        cJSON_AddNumberToObject(json, key, has ? s->first_mass[i] / (double)s->heads : NAN);
        FORMAT(key, "sink_rate_%s", names[i]);
        cJSON_AddNumberToObject(json, key, has ? 100 * s->sinks[i] / (double)s->heads : NAN);
        FORMAT(key, "entropy_%s", names[i]);
        cJSON_AddNumberToObject(json, key, has ? s->entropy[i] / (double)s->heads : NAN);
    }
    add_magnitudes(json, "logit", s->logits, s->logit_count);
    add_magnitudes(json, "hidden", s->hidden, s->hidden_count);
    cJSON_AddItemToArray(list, json);
    printf("  %5d %8.3f %9.2f%% %9.3f %12.2f %12.3f %12.2f %12.3f\n", layer,
           signless_nan(s->first_mass[2] / (double)s->heads), 100 * s->sinks[2] / (double)s->heads,
           signless_nan(s->entropy[2] / (double)s->heads), (double)s->logits[s->logit_count - 1],
           (double)s->logits[(s->logit_count - 1) / 2], (double)s->hidden[s->hidden_count - 1],
           (double)s->hidden[(s->hidden_count - 1) / 2]);
}

// Sums of attention_visit over batches of `windows` windows of T tokens.
typedef struct {
    const EvaluationModel *model;
    int windows, T;
    LayerAttention *layers; // [L]
    float *scratch;         // [3 T T]: two maps, logits
    floatX *hidden;         // (N, C)
} AttentionSums;

// Adds a layer of the batch, right after its forward.
static inline void attention_visit(void *data, int l) {
    AttentionSums *sums = (AttentionSums *)data;
    const EvaluationModel *m = sums->model;
    const LayerActivations *a = &m->acts->layers[l];
    size_t square = (size_t)sums->T * sums->T, stream = (size_t)(sums->windows * sums->T) * m->plan->config.C;
    float *maps[2] = {sums->scratch, sums->scratch + square};
    HostAttention host = attention_to_host(m->plan, a, l, key_set(m->plan, l, 0, sums->windows, sums->T, 0));
    layer_attention_add(&sums->layers[l], &host, maps, sums->scratch + 2 * square);
    attention_on_host_free(&host);
    buffer_download(sums->hidden, a->x_out, stream * sizeof(floatX));
    LayerAttention *layer = &sums->layers[l];
    for (size_t i = 0; i < stream; i++) layer->hidden[layer->hidden_count++] = fabsf((float)sums->hidden[i]);
}

static inline void attention_sums_alloc(AttentionSums *sums, const EvaluationModel *m, int windows, int T) {
    const ModelConfig *c = &m->plan->config;
    size_t square = (size_t)T * T, C = (size_t)c->C, logits = (size_t)windows * m->plan->dims.NQ * T * (T + 1) / 2;
    memset(sums, 0, sizeof(*sums));
    sums->model = m;
    sums->T = T;
    sums->layers = (LayerAttention *)checked_calloc(c->L, sizeof(LayerAttention));
    for (int l = 0; l < c->L; l++) {
        sums->layers[l].logits = (float *)checked_calloc(logits, sizeof(float));
        sums->layers[l].hidden = (float *)checked_calloc((size_t)(windows * T) * C, sizeof(float));
    }
    sums->scratch = (float *)checked_calloc(3 * square, sizeof(float));
    sums->hidden = (floatX *)checked_calloc((size_t)(m->plan->B * T) * C, sizeof(floatX));
}
static inline void attention_sums_free(AttentionSums *sums) {
    for (int l = 0; l < sums->model->plan->config.L; l++) {
        free(sums->layers[l].logits);
        free(sums->layers[l].hidden);
    }
    free(sums->layers);
    free(sums->scratch);
    free(sums->hidden);
}

// first_tokens (windows, T): the beginnings of validation windows.
static inline void evaluate_attention(const EvaluationModel *m, const int *first_tokens, int windows, int T,
                                      cJSON *json) {
    AttentionSums sums;
    attention_sums_alloc(&sums, m, windows, T);
    for (int done = 0; done < windows; done += m->plan->B) {
        sums.windows = min_int(m->plan->B, windows - done);
        m->forward(m->model, first_tokens + (size_t)done * T, sums.windows, T, attention_visit, &sums);
    }
    cJSON *attention = cJSON_AddObjectToObject(json, "attention");
    cJSON_AddNumberToObject(attention, "windows", windows);
    cJSON_AddNumberToObject(attention, "tokens", T);
    cJSON *list = cJSON_AddArrayToObject(attention, "layers");
    printf(
        "attention on the first %d tokens of %d windows; mass on position 0, sinks (mass above %g), entropy in nats, "
        "largest and median magnitudes\n",
        T, windows, SINK_ALPHA);
    printf("  %5s %8s %10s %9s %12s %12s %12s %12s\n", "layer", "mass", "sink rate", "entropy", "logit max", "median",
           "hidden max", "median");
    for (int l = 0; l < m->plan->config.L; l++)
        layer_attention_json(list, &sums.layers[l], l, m->plan->dims.groups.noise > 0);
    attention_sums_free(&sums);
}
