/*
evaluation_attention.h: what attention does on the first MAP_TOKENS tokens of validation windows (attention_maps.h), for
--eval. Included by the trainer, whose forward it runs.

  --dump-attention FILE   safetensors, F32, of the first window: tokens [P], and for each layer and output head
                          layer.L.head.H.a1 [P,P], and with a second map .a2 [P,P] and .lambda [P]

Measured without --doc-mask. Nothing here is fast or has to be: maps are made on the host, so that one function serves
every backend.
*/
#ifndef LLMC_EVALUATION_ATTENTION_H
#define LLMC_EVALUATION_ATTENTION_H

enum { ATTENTION_WINDOWS = 64 };

// What the windows of an evaluation say of one layer.
typedef struct {
    double first_mass[3], sinks[3]; // sums over windows and heads: first map, second map, effective
    int64_t heads;                  // windows times output heads
    float *logits, *hidden;         // magnitudes; of the visible logits of all maps, and of the residual stream
    size_t logit_count, hidden_count;
} LayerAttention;

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}
static void add_magnitudes(cJSON *json, const char *name, float *values, size_t count) {
    char key[64];
    qsort(values, count, sizeof(float), compare_floats);
    FORMAT(key, "%s_max", name);
    cJSON_AddNumberToObject(json, key, (double)values[count - 1]);
    FORMAT(key, "%s_median", name);
    cJSON_AddNumberToObject(json, key, (double)values[(count - 1) / 2]);
}

// Copies of a layer's attention on the host; free() lse, q and, where it has rows of its own, lambda.
typedef struct {
    HostAttention source;
    floatX *fused, *own_lambda;
    real *lse;
} LayerOnHost;

static LayerOnHost layer_to_host(const Model *model, int l, int B, int T) {
    const AttentionDims *d = &model->plan.dims;
    const LayerActivations *a = &model->acts.layers[l];
    size_t N = (size_t)B * (size_t)T, fused = N * (size_t)d->fused_ld, own = a->lambda ? N * (size_t)d->OH : 1,
           lse = lse_count(&model->plan, B, T);
    KeySet s = model_key_set(model, 0, B, T, 0);
    LayerOnHost h;
    memset(&h, 0, sizeof(h));
    h.fused = (floatX *)checked_calloc(fused, sizeof(floatX));
    h.own_lambda = (floatX *)checked_calloc(own, sizeof(floatX));
    h.lse = (real *)checked_calloc(lse, sizeof(real));
    buffer_download(h.fused, a->fused, fused * sizeof(floatX));
    buffer_download(h.lse, a->lse, lse * sizeof(real));
    if (a->lambda) buffer_download(h.own_lambda, a->lambda, own * sizeof(floatX));
    LambdaRows lambda = lambda_rows(d, a->lambda ? h.own_lambda : NULL, h.fused);
    h.source.shape = s.shape;
    h.source.key_sets = model->plan.config.attention->key_sets;
    h.source.stride = d->pair_stride;
    h.source.sigmoid = model->plan.config.attention->lambda == LAMBDA_SIGMOID;
    h.source.q = h.fused + s.q;
    h.source.k = h.fused + s.k;
    h.source.lse = h.lse;
    h.source.lambda = lambda.rows;
    h.source.ldl = lambda.ld;
    return h;
}
static void layer_on_host_free(LayerOnHost *h) {
    free(h->fused);
    free(h->own_lambda);
    free(h->lse);
}

// --dump-attention: what the file will hold, and then holds.
typedef struct {
    SafeTensorsWriter *writer; // NULL: not asked for
    int maps, next;            // per output head; the tensor that is written next
} AttentionDump;

static AttentionDump attention_dump_open(const Model *model, const char *path, int T) {
    int maps = model->plan.dims.pair_stride ? 2 : 1, per_head = maps == 2 ? 3 : 1, heads = model->plan.dims.OH,
        count = 0;
    static const char *const parts[] = {"a1", "a2", "lambda"};
    SafeTensorSpec *specs =
        (SafeTensorSpec *)checked_calloc(1 + (size_t)(model->plan.config.L * heads * per_head), sizeof(SafeTensorSpec));
    FORMAT(specs[count].name, "tokens");
    for (int l = 0; l < model->plan.config.L; l++)
        for (int h = 0; h < heads; h++)
            for (int p = 0; p < per_head; p++) FORMAT(specs[++count].name, "layer.%d.head.%d.%s", l, h, parts[p]);
    for (int i = 0; i <= count; i++) {
        bool map = i > 0 && (i - 1) % per_head < 2;
        specs[i].dtype = DTYPE_F32;
        specs[i].ndim = map ? 2 : 1;
        specs[i].shape[0] = specs[i].shape[1] = (size_t)T;
    }
    AttentionDump dump = {safetensors_create(path, specs, count + 1, true), maps, 0};
    free(specs);
    return dump;
}

static void attention_dump_write(AttentionDump *dump, const float *values, size_t count) {
    if (dump->writer) safetensors_write(dump->writer, dump->next++, 0, values, DTYPE_F32, count);
}

// Adds one layer's maps of B sequences; the first sequence's go into the dump.
static void layer_attention_add(LayerAttention *sums, AttentionDump *dump, const LayerOnHost *host, float *maps[2],
                                float *logits) {
    const HostAttention *m = &host->source;
    int T = m->shape.T, count = m->stride ? 2 : 1;
    size_t square = (size_t)T * (size_t)T;
    for (int b = 0; b < m->shape.B; b++)
        for (int h = 0; h < maps_output_heads(m); h++) {
            double alpha[3] = {0, 0, 0};
            for (int i = 0; i < count; i++) {
                attention_map(maps[i], logits, m, b, maps_query_head(m, h) + i * m->stride);
                alpha[i] = map_first_mass(maps[i], T);
                for (int t = 0; t < T; t++)
                    for (int j = 0; j <= t; j++) sums->logits[sums->logit_count++] = fabsf(logits[t * T + j]);
                if (b == 0) attention_dump_write(dump, maps[i], square);
            }
            alpha[2] = count == 2 ? map_effective_first_mass(maps[0], maps[1], m, b, h) : alpha[0];
            for (int i = 0; i < 3; i++) sums->first_mass[i] += alpha[i], sums->sinks[i] += alpha[i] > SINK_ALPHA;
            sums->heads++;
            for (int t = 0; t < T && b == 0 && count == 2; t++) logits[t] = (float)map_lambda(m, b, t, h);
            if (b == 0 && count == 2) attention_dump_write(dump, logits, (size_t)T);
        }
    dump->writer = NULL; // of the first batch alone
}

static void layer_attention_json(cJSON *list, LayerAttention *s, int layer, bool pairs) {
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
    }
    add_magnitudes(json, "logit", s->logits, s->logit_count);
    add_magnitudes(json, "hidden", s->hidden, s->hidden_count);
    cJSON_AddItemToArray(list, json);
    printf("  %5d %16.3f %16.2f%% %12.2f %12.3f %12.2f %12.3f\n", layer, s->first_mass[2] / (double)s->heads,
           100 * s->sinks[2] / (double)s->heads, (double)s->logits[s->logit_count - 1],
           (double)s->logits[(s->logit_count - 1) / 2], (double)s->hidden[s->hidden_count - 1],
           (double)s->hidden[(s->hidden_count - 1) / 2]);
}

// One layer after another of a batch of windows, since without a backward all layers share their memory.
static void attention_batch(Run *run, LayerAttention *layers, AttentionDump *dump, int windows, int T) {
    Model *model = &run->model;
    Activations *a = &model->acts;
    int N = windows * T, C = model->plan.config.C;
    size_t square = (size_t)T * (size_t)T, stream = (size_t)N * (size_t)C;
    float *scratch = (float *)checked_calloc(3 * square, sizeof(float)), *maps[2] = {scratch, scratch + square};
    floatX *hidden = (floatX *)checked_calloc(stream, sizeof(floatX));
    SafeTensorsWriter *writer = dump->writer;
    model_forward_embedding(model, N);
    for (int l = 0; l < model->plan.config.L; l++) {
        block_forward(model, l, block_input(model, l), windows, T, 0);
        LayerOnHost host = layer_to_host(model, l, windows, T);
        dump->writer = writer;
        layer_attention_add(&layers[l], dump, &host, maps, scratch + 2 * square);
        layer_on_host_free(&host);
        buffer_download(hidden, a->layers[l].x_out, stream * sizeof(floatX));
        for (size_t i = 0; i < stream; i++) layers[l].hidden[layers[l].hidden_count++] = fabsf((float)hidden[i]);
    }
    free(scratch);
    free(hidden);
}

// Of the first windows of the validation data, their first MAP_TOKENS tokens.
static void evaluate_attention(Run *run, const int *first_tokens, int windows, int T, cJSON *json) {
    Model *model = &run->model;
    int L = model->plan.config.L, NQ = model->plan.dims.NQ;
    size_t logits = (size_t)windows * (size_t)NQ * (size_t)T * (size_t)(T + 1) / 2,
           hidden = (size_t)windows * (size_t)T * (size_t)model->plan.config.C;
    LayerAttention *layers = (LayerAttention *)checked_calloc((size_t)L, sizeof(LayerAttention));
    for (int l = 0; l < L; l++) {
        layers[l].logits = (float *)checked_calloc(logits, sizeof(float));
        layers[l].hidden = (float *)checked_calloc(hidden, sizeof(float));
    }
    const char *path = run->options.dump_attention;
    char temporary[PATH_SIZE];
    AttentionDump dump = {NULL, 0, 0};
    if (path) {
        FORMAT(temporary, "%s.tmp", path);
        dump = attention_dump_open(model, temporary, T);
        float tokens[MAP_TOKENS];
        for (int t = 0; t < T; t++) tokens[t] = (float)first_tokens[t];
        attention_dump_write(&dump, tokens, (size_t)T);
    }
    SafeTensorsWriter *writer = dump.writer;
    for (int done = 0; done < windows; done += model->plan.B) {
        int count = min_int(model->plan.B, windows - done);
        const int *tokens = first_tokens + (size_t)done * (size_t)T;
        model_read_batch(model, tokens, tokens, NULL, count * T);
        dump.writer = done ? NULL : writer;
        attention_batch(run, layers, &dump, count, T);
    }
    if (path) {
        safetensors_finish(writer);
        file_rename_synced(temporary, path);
    }
    cJSON *attention = cJSON_AddObjectToObject(json, "attention");
    cJSON_AddNumberToObject(attention, "windows", windows);
    cJSON_AddNumberToObject(attention, "tokens", T);
    cJSON *list = cJSON_AddArrayToObject(attention, "layers");
    printf("attention on the first %d tokens of %d windows; mass on position 0, sinks (mass above %g), largest and "
           "median magnitudes\n",
           T, windows, SINK_ALPHA);
    printf("  %5s %16s %17s %12s %12s %12s %12s\n", "layer", "mass", "sink rate", "logit max", "median", "hidden max",
           "median");
    for (int l = 0; l < L; l++) {
        layer_attention_json(list, &layers[l], l, model->plan.dims.pair_stride > 0);
        free(layers[l].logits);
        free(layers[l].hidden);
    }
    free(layers);
}
#endif
