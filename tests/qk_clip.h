/*
qk_clip.h: tests of --qk-clip against the definition in double (direct_inputs of stats.h).
*/
#pragma once
#include "stats.h"

// The largest logit of query head h of layer l in the last micro-step.
static double direct_largest_logit(const Model *m, int l, const DirectInputs *in, int h, int B, int T) {
    const AttentionDims *d = &m->plan.dims;
    double largest = -INFINITY;
    for (int n = 0; n < B * T; n++)
        for (int j = n - n % T + direct_low(m, l, n / T, n % T, T); j <= n; j++) {
            double dot = 0;
            for (int i = 0; i < d->QD; i++)
                dot += in->q[(n * d->NQ + h) * d->QD + i] * in->k[(j * d->NK + direct_key_head(d, h)) * d->QD + i];
            largest = fmax(largest, dot / sqrt(d->QD));
        }
    return largest;
}

// Two micro-steps of an update, the second with documents. largest [L][NQ]
static void qk_clip_steps(double *largest, Model *m, const int *tokens, int B, int T) {
    int NQ = m->plan.dims.NQ;
    for (int i = 0; i < m->plan.config.L * NQ; i++) largest[i] = -INFINITY;
    for (int micro = 0; micro < 2; micro++) {
        m->state.micro_step = micro;
        if (micro) documents_step(m, tokens, B, T);
        else case_loss(m, tokens, B, T, true);
        for (int l = 0; l < m->plan.config.L; l++) {
            DirectInputs in = direct_inputs(m, l, l ? m->acts.layers[l - 1].x_out : m->acts.embedded, B, T);
            for (int h = 0; h < NQ; h++)
                largest[l * NQ + h] = fmax(largest[l * NQ + h], direct_largest_logit(m, l, &in, h, B, T));
            double *const owned[] = {in.q, in.k, in.v, in.l, in.gate};
            for (int i = 0; i < 5; i++) free(owned[i]);
        }
    }
}

// What an update with the learning rate 0 multiplies element e of a tensor by.
static double qk_clip_factor(const Model *m, const double *largest, const Tensor *t, size_t e) {
    const AttentionDims *d = &m->plan.dims;
    bool own = d->NK == d->NQ && !layer_cross(&m->plan.config, t->layer);
    if (t->row->kind != T_Q && !(own && t->row->kind == T_K)) return 1;
    double factor = fmin(1, (double)m->qk_clip / largest[t->layer * d->NQ + (int)(e / t->shape[1]) / d->QD]);
    return own ? sqrt(factor) : factor;
}

static void expect_clipped(Model *m, const char *why, const int *tokens, int B, int T) {
    const int heads = m->plan.config.L * m->plan.dims.NQ, NQ = m->plan.dims.NQ;
    const double tolerance = 64 * (sizeof(real) == 8 ? 0x1p-53 : 0x1p-24), limit = (double)m->qk_clip;
    double *before = (double *)checked_calloc(heads, sizeof(double)),
           *after = (double *)checked_calloc(heads, sizeof(double)), most = 0;
    floatX *weights = (floatX *)checked_calloc(m->plan.tensors.buffer_count, sizeof(floatX));
    Options o;
    memset(&o, 0, sizeof(o));
    o.eps = 1e-8;
    qk_clip_steps(before, m, tokens, B, T);
    memcpy(weights, m->state.params, m->plan.tensors.buffer_count * sizeof(floatX));
    int clipped = 0;
    for (int i = 0; i < heads; i++) {
        double got = (double)m->acts.largest_logits[i], scale = fmax(10, before[i]);
        clipped += before[i] > limit;
        most = fmax(most, got);
        EXPECT(before[i] > limit ? fabs(got - before[i]) <= tolerance * scale
                                 : got <= limit && got >= before[i] - tolerance * scale,
               "%s, %s: the largest logit of head %d is %.9g, not %.9g", m->plan.config.attention->name, why, i, got,
               before[i]);
    }
    QkClip clip = qk_clip_agree(&m->plan, &m->acts, m->qk_clip);
    EXPECT(clip.on && clip.heads == clipped && clip.largest == most && clipped > 0,
           "%s, %s: %d heads are clipped, not %d of %d; the largest logit is %.9g, not %.9g",
           m->plan.config.attention->name, why, clip.heads, clipped, heads, clip.largest, most);
    model_update(m, &o, 0, 1, 1);
    for (const Tensor *t = m->plan.tensors.tensors; t < m->plan.tensors.tensors + m->plan.tensors.count; t++)
        for (size_t e = 0; e < t->count; e++) {
            double got = (double)m->state.params[t->offset + e],
                   wanted = (double)weights[t->offset + e] * qk_clip_factor(m, before, t, e);
            if (fabs(got - wanted) <= 2 * tolerance * fabs(wanted)) continue;
            EXPECT(false, "%s, %s: element %zu of %s is %.9g, not %.9g", m->plan.config.attention->name, why, e,
                   t->name, got, wanted);
            break;
        }
    qk_clip_steps(after, m, tokens, B, T); // of the first layer, whose input is the same
    for (int h = 0; h < NQ; h++)
        EXPECT(fabs(after[h] - fmin(before[h], limit)) <= tolerance * fmax(10, before[h]),
               "%s, %s: the largest logit of head %d was %.9g and is %.9g after an update with --qk-clip %g",
               m->plan.config.attention->name, why, h, before[h], after[h], limit);
    free(before);
    free(after);
    free(weights);
}

static void test_qk_clip(void) {
    static const int cases[] = {1, 2, 5, 8}; // of model_cases
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int c = 0; c < 4; c++) {
            const ModelCase *mc = &model_cases[cases[c]];
            Model m;
            int *tokens = case_start(&m, mc, &attention_variants[v], FOR_TRAINING);
            if (!tokens) continue;
            // one head of the first layer has logits of about 100, some others exceed 2.5
            size_t head = (size_t)m.plan.dims.QD * mc->C;
            floatX *q = param(&m.state, T_Q, 0) + (size_t)(m.plan.dims.NQ / 2) * head;
            for (size_t e = 0; e < head; e++) q[e] *= 40;
            m.qk_clip = (real)2.5;
            m.acts.largest_logits = (real *)buffer_alloc(qk_clip_count(&m.plan) * sizeof(real), "largest logits");
            expect_clipped(&m, mc->why, tokens, mc->B, mc->T);
            buffer_free(m.acts.largest_logits);
            case_end(&m, tokens);
        }
}

static const Test qk_clip_tests[] = {
    {"--qk-clip brings the largest logit of each head down to the limit, for every variant", test_qk_clip},
};
