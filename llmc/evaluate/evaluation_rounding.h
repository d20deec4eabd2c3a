/*
evaluation_rounding.h: the rounding error of bf16 attention, for --eval: of each head's output, and of what remains of a
pair after the subtraction, which may cancel the errors of its maps or amplify them.

  row        the output of a token and query head, or of a token and output head after the subtraction and before
             norms and gates: DV numbers
  error      ||row - exact row|| / ||exact row||; the largest and the mean over the rows. Rows of zeros are left out,
             and differences below 2^-40 of their first term: such a pair cancels, as that of the first token without
             lambda
  exact      in double, from the q, k, v and lambda that the attention has read
  row        bf16 program: as the device has stored it. Otherwise bf16 attention is emulated: q, k, v and lambda are
             rounded to bf16; products, exp and sums are fp32; P = exp(S - max) is rounded to bf16 before the product
             with v, the sum of P is not; the output is rounded to bf16, and once more after the subtraction. All keys
             of a row are one block.
  of inputs  emulation: the same errors relative to exact rows of the q, k, v and lambda before they were rounded
  sinks      scale a row, which does not change its relative error: the emulation leaves them out
  sample     the first ROUNDING_TOKENS tokens of the first ROUNDING_WINDOWS validation windows, without --doc-mask
  source     Qiu and Yao 2025 (arXiv 2510.04212): rounding with a bias in bf16 flash attention
*/
#ifndef LLMC_EVALUATION_ROUNDING_H
#define LLMC_EVALUATION_ROUNDING_H
#include "../base/dtype.h"
#include "evaluation_attention.h"

enum { ROUNDING_WINDOWS = 4, ROUNDING_TOKENS = 256 };

static inline float rounding_bf16(double x) { return (float)half_to_double(double_to_half(x, 8), 8); }

// What the attention of a layer has read.
typedef struct {
    LayerOnHost layer;
    const floatX *v;
    bool sink;
} RoundingInput;

static inline RoundingInput rounding_input(const EvaluationModel *m, const LayerActivations *a, int l, KeySet s,
                                           bool round) {
    RoundingInput in;
    size_t N = (size_t)s.shape.B * s.shape.T, fused = N * (size_t)plan_dims(m->plan, l)->fused_ld;
    in.layer = layer_to_host(m->plan, a, l, s);
    in.v = in.layer.kv + s.v;
    in.sink = m->plan->config.attention->sink != SINK_NONE;
    for (size_t i = 0; i < fused && round; i++) in.layer.fused[i] = (floatX)rounding_bf16((double)in.layer.fused[i]);
    for (size_t i = 0; i < N * s.shape.ldkv && round && in.layer.kv != in.layer.fused; i++)
        in.layer.kv[i] = (floatX)rounding_bf16((double)in.layer.kv[i]);
    for (size_t i = 0; i < N * (size_t)m->plan->dims.OH && round && a->lambda; i++)
        in.layer.own_lambda[i] = (floatX)rounding_bf16((double)in.layer.own_lambda[i]);
    return in;
}

// Row t of a query head: its first query, keys and values.
typedef struct {
    const floatX *q, *k, *v;
    const real *lse;
    int keys, D, DV, ld;
    double scale;
} RoundingRow;
static inline RoundingRow rounding_row(const RoundingInput *in, int b, int t, int head) {
    const HostAttention *m = &in->layer.attention;
    AttentionShape s = m->shape;
    int set = head % m->key_sets, h = head / m->key_sets, kv = h / (s.NQ / s.NKV);
    int low = map_first_key(s, t);
    size_t sequence = (size_t)b * s.T, first = sequence + low;
    RoundingRow r = {m->q + (sequence + t) * s.ldq + (h * s.q_head + set * s.D),
                     m->k + first * s.ldkv + (kv * s.k_head + set * s.D),
                     in->v + first * s.ldkv + kv * s.v_head,
                     m->lse + set * lse_set_stride(s) + ((size_t)b * s.NQ + h) * s.T + t,
                     t + 1 - low,
                     s.D,
                     s.DV,
                     s.ldkv,
                     (double)s.scale};
    return r;
}

// out (DV), scores (keys). sink: with its factor, from the stored lse
static inline void rounding_exact(double *out, double *scores, RoundingRow r, bool sink) {
    double max = -INFINITY, sum = 0;
    for (int j = 0; j < r.keys; j++) {
        scores[j] = 0;
        for (int i = 0; i < r.D; i++) scores[j] += (double)r.q[i] * (double)r.k[(size_t)j * r.ld + i];
        scores[j] *= r.scale;
        max = fmax(max, scores[j]);
    }
    for (int i = 0; i < r.DV; i++) out[i] = 0;
    for (int j = 0; j < r.keys; j++) {
        double p = exp(scores[j] - max);
        sum += p;
        for (int i = 0; i < r.DV; i++) out[i] += p * (double)r.v[(size_t)j * r.ld + i];
    }
    double factor = sink ? exp(max - (double)*r.lse) : 1 / sum;
    for (int i = 0; i < r.DV; i++) out[i] *= factor;
}

// out (DV), scores (keys)
static inline void rounding_emulate(float *out, float *scores, RoundingRow r) {
    float max = -INFINITY, sum = 0;
    for (int j = 0; j < r.keys; j++) {
        float dot = 0;
        for (int i = 0; i < r.D; i++) dot += (float)r.q[i] * (float)r.k[(size_t)j * r.ld + i];
        scores[j] = (float)r.scale * dot;
        max = fmaxf(max, scores[j]);
    }
    for (int i = 0; i < r.DV; i++) out[i] = 0;
    for (int j = 0; j < r.keys; j++) {
        float p = expf(scores[j] - max), rounded = rounding_bf16((double)p);
        sum += p;
        for (int i = 0; i < r.DV; i++) out[i] += rounded * (float)r.v[(size_t)j * r.ld + i];
    }
    for (int i = 0; i < r.DV; i++) out[i] = rounding_bf16((double)(out[i] / sum));
}

// term: what the exact row is the remainder of, or the row itself. NaN for a row that is left out
static inline double rounding_error(const float *got, const double *exact, const double *term, int count) {
    double error = 0, norm = 0, of = 0;
    for (int i = 0; i < count; i++) {
        error += ((double)got[i] - exact[i]) * ((double)got[i] - exact[i]);
        norm += exact[i] * exact[i];
        of += term[i] * term[i];
    }
    return norm > 0x1p-80 * of ? sqrt(error / norm) : NAN;
}

// The errors of a layer's rows, of B sequences: heads (N,NQ) and combined (N,OH), NULL without pairs. got_*: rows that
// a device has stored, or NULL: emulated from `read`. exact: what the exact rows are computed from.
static inline void rounding_errors(double *heads, double *combined, const RoundingInput *read,
                                   const RoundingInput *exact, const floatX *got_heads, const floatX *got_combined) {
    const HostAttention *m = &read->layer.attention, *e = &exact->layer.attention;
    int T = m->shape.T, DV = m->shape.DV, NQ = m->shape.NQ * m->key_sets, OH = maps_output_heads(m);
#pragma omp parallel for schedule(dynamic)
    for (int n = 0; n < m->shape.B * T; n++) {
        double *want = (double *)checked_calloc((size_t)NQ * DV + T + DV, sizeof(double)), *rest = want + NQ * DV + T;
        float *got = (float *)checked_calloc((size_t)NQ * DV + T + DV, sizeof(float)), *difference = got + NQ * DV + T;
        for (int h = 0; h < NQ; h++) {
            double *w = want + h * DV;
            float *g = got + h * DV;
            rounding_exact(w, want + NQ * DV, rounding_row(exact, n / T, n % T, h), got_heads && exact->sink);
            if (!got_heads) rounding_emulate(g, got + NQ * DV, rounding_row(read, n / T, n % T, h));
            for (int i = 0; i < DV && got_heads; i++) g[i] = (float)got_heads[((size_t)n * NQ + h) * DV + i];
            heads[(size_t)n * NQ + h] = rounding_error(g, w, w, DV);
        }
        for (int h = 0; h < OH && combined; h++) {
            int h1 = maps_query_head(m, h, 0) * DV, h2 = maps_query_head(m, h, 1) * DV;
            double s = map_lambda(e, n / T, n % T, h);
            float s_read = (float)map_lambda(m, n / T, n % T, h);
            for (int i = 0; i < DV; i++) {
                rest[i] = want[h1 + i] - s * want[h2 + i];
                difference[i] = got_combined ? (float)got_combined[((size_t)n * OH + h) * DV + i]
                                             : rounding_bf16((double)(got[h1 + i] - s_read * got[h2 + i]));
            }
            combined[(size_t)n * OH + h] = rounding_error(difference, rest, want + h1, DV);
        }
        free(want);
        free(got);
    }
}

typedef struct {
    double largest, sum;
    int64_t rows;
} RoundingSum;
static inline void rounding_sum(RoundingSum *s, const double *errors, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (isnan(errors[i])) continue;
        s->largest = fmax(s->largest, errors[i]);
        s->sum += errors[i];
        s->rows++;
    }
}

// ---- all layers

enum { ROUNDING_HEADS, ROUNDING_COMBINED, ROUNDING_KINDS };
typedef struct {
    const EvaluationModel *model;
    int windows, T;
    RoundingSum (*layers)[2][ROUNDING_KINDS]; // [L]: relative to exact rows of the rounded inputs, of the inputs
} RoundingSums;

static inline void rounding_visit(void *data, int l) {
    RoundingSums *sums = (RoundingSums *)data;
    const EvaluationModel *m = sums->model;
    const AttentionDims *d = &m->plan->dims;
    const LayerActivations *a = &m->acts->layers[l];
    const bool stored = sizeof(floatX) == 2, pairs = d->groups.noise > 0;
    KeySet s = key_set(m->plan, l, 0, sums->windows, sums->T, 0);
    size_t N = (size_t)sums->windows * sums->T, heads = N * (size_t)d->NQ, outputs = pairs ? N * (size_t)d->OH : 0;
    double *errors = (double *)checked_calloc(heads + outputs, sizeof(double));
    floatX *rows = (floatX *)checked_calloc((heads + outputs) * (size_t)d->DV, sizeof(floatX));
    RoundingInput read = rounding_input(m, a, l, s, !stored), inputs = rounding_input(m, a, l, s, false);
    if (stored) buffer_download(rows, a->heads, heads * d->DV * sizeof(floatX));
    if (stored && pairs) buffer_download(rows + heads * d->DV, a->combined, outputs * d->DV * sizeof(floatX));
    for (int of = 0; of < (stored ? 1 : 2); of++) {
        rounding_errors(errors, pairs ? errors + heads : NULL, &read, of ? &inputs : &read, stored ? rows : NULL,
                        stored ? rows + heads * d->DV : NULL);
        rounding_sum(&sums->layers[l][of][ROUNDING_HEADS], errors, heads);
        rounding_sum(&sums->layers[l][of][ROUNDING_COMBINED], errors + heads, outputs);
    }
    layer_on_host_free(&read.layer);
    layer_on_host_free(&inputs.layer);
    free(errors);
    free(rows);
}

static inline void rounding_layer_json(cJSON *list, RoundingSum (*layer)[ROUNDING_KINDS], int l) {
    static const char *const names[2][ROUNDING_KINDS] = {{"heads", "combined"},
                                                         {"heads_of_inputs", "combined_of_inputs"}};
    cJSON *json = cJSON_CreateObject();
    char key[64];
    cJSON_AddNumberToObject(json, "layer", l);
    printf("  %5d", l);
    for (int of = 0; of < 2; of++)
        for (int kind = 0; kind < ROUNDING_KINDS; kind++) {
            const RoundingSum *s = &layer[of][kind];
            double mean = s->rows ? s->sum / (double)s->rows : NAN, largest = s->rows ? s->largest : NAN;
            FORMAT(key, "%s_mean", names[of][kind]);
            cJSON_AddNumberToObject(json, key, mean);
            FORMAT(key, "%s_max", names[of][kind]);
            cJSON_AddNumberToObject(json, key, largest);
            if (of == 0) printf(" %12.3g %12.3g", signless_nan(mean), signless_nan(largest));
        }
    printf("\n");
    cJSON_AddItemToArray(list, json);
}

// tokens (windows, T): the beginnings of validation windows
static inline void evaluate_rounding(const EvaluationModel *m, const int *tokens, int windows, int T, cJSON *json) {
    int L = m->plan->config.L;
    RoundingSums sums = {m, 0, T, NULL};
    sums.layers = (RoundingSum(*)[2][ROUNDING_KINDS])checked_calloc(L, sizeof(*sums.layers));
    for (int done = 0; done < windows; done += m->plan->B) {
        sums.windows = min_int(m->plan->B, windows - done);
        m->forward(m->model, tokens + (size_t)done * T, sums.windows, T, rounding_visit, &sums);
    }
    const bool emulated = sizeof(floatX) != 2;
    cJSON *rounding = cJSON_AddObjectToObject(json, "attention_rounding");
    cJSON_AddNumberToObject(rounding, "windows", windows);
    cJSON_AddNumberToObject(rounding, "tokens", T);
    cJSON_AddBoolToObject(rounding, "emulated", emulated);
    cJSON *list = cJSON_AddArrayToObject(rounding, "layers");
    printf("rounding errors of %sattention in bf16, relative to the norm of a row, on %d tokens of %d windows\n",
           emulated ? "emulated " : "", T, windows);
    printf("  %5s %12s %12s %12s %12s\n", "layer", "heads: mean", "max", "pairs: mean", "max");
    for (int l = 0; l < L; l++) rounding_layer_json(list, sums.layers[l], l);
    free(sums.layers);
}
#endif
