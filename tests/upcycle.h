/*
upcycle.h: tests of the starts of variants from a baseline (llmc/model/upcycle.h).
*/
#pragma once
#include "model.h"

// Opens the model of a fixture, upcycled, and runs its batch. Returns the logits, (B*T, V).
static inline float *upcycled_logits(Model *model, const Fixture *f, const Upcycle *u) {
    case_open(model, &u->config, f->B, f->T, FOR_TRAINING);
    CheckpointBuffers buffers = checkpoint_buffers(&model->state);
    buffers.upcycle = u->row ? u : NULL;
    checkpoint_load_weights(f->dir.path, &buffers, false);
    int N = f->B * f->T, *tokens = case_tokens(N + 1, u->config.V, 3);
    case_loss(model, tokens, f->B, f->T, true);
    float *logits = (float *)checked_calloc((size_t)N * u->config.V, sizeof(float));
    for (int n = 0; n < N; n++)
        model_logits(model, model->acts.norm_final + (size_t)n * u->config.C, 1, logits + (size_t)n * u->config.V);
    free(tokens);
    return logits;
}

// The cosine of the gradients of both heads of the first pair of layer 0.
static inline double pair_cosine(const Model *model) {
    const Tensor *t = tensor_of(&model->plan.tensors, T_Q, 0);
    size_t head = (size_t)model->plan.dims.QD * t->shape[1];
    return cosine(model->state.grads + t->offset, model->state.grads + t->offset + head, head);
}

static inline void check_upcycle(const Fixture *f, const ModelConfig *base, const float *wanted,
                                 const AttentionVariant *v) {
    Upcycle u = {upcycle_row(v), *base, *base, 5};
    Model model;
    u.config.attention = v;
    if (v == base->attention) u.config.NH *= 2;
    float *found = upcycled_logits(&model, f, &u);
    size_t count = (size_t)f->B * f->T * base->V;
    double largest = 0, difference = 0;
    for (size_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)wanted[i]));
        difference = fmax(difference, fabs((double)found[i] - (double)wanted[i]));
    }
    EXPECT(difference <= 1e-5 * largest, "%s as %s: logits differ by %.3g of %.3g", f->name, v->name, difference,
           largest);
    double angle = pair_cosine(&model);
    bool opposite = v->lambda != LAMBDA_NONE && v->factor == S_SIGMOID;
    EXPECT(opposite ? angle < -0.999 : v != base->attention || angle < 0.9999,
           "%s as %s: the cosine of the gradients of a pair is %.4f", f->name, v->name, angle);
    free(found);
    case_close(&model);
}

static void test_upcycled_logits(void) {
    for (const char *size = "abfkmqvwy"; *size; size++) { // windows, YOCO, experts, QK-norm: tests/model.h
        char name[2] = {*size, 0};
        Fixture f = fixture_open("baseline", name);
        Upcycle plain;
        memset(&plain, 0, sizeof(plain));
        plain.config = config_json_read(f.dir.path);
        Model model;
        float *wanted = upcycled_logits(&model, &f, &plain);
        case_close(&model);
        for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
            if (upcycle_row(&attention_variants[v])->o_factor > 0)
                check_upcycle(&f, &plain.config, wanted, &attention_variants[v]);
        free(wanted);
        safetensors_close(f.file);
    }
}

static const Test upcycle_tests[] = {
    {"a variant that starts from a baseline has its logits, and pairs whose gradients differ", test_upcycled_logits},
};
