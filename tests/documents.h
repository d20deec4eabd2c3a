/*
documents.h: tests of attention that stays within documents.
*/
#pragma once
#include "harness.h"
#include "model.h"

// The loss and gradients of packed documents equal those of separate documents.
static void test_packed_documents(void) {
    enum { T = 24, DOCUMENTS = 3 };
    const int begin[DOCUMENTS + 1] = {0, 7, 8, T};
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        const int window = v % 3 ? 5 : 0; // some variants with windows, some of those with YOCO
        const ModelCase mc = {"", 50, 24, 2, 4, 2, 8, 20, 1, T, true, window, 0, v % 3 == 2, v % 2 == 1};
        ModelConfig c = case_config(&mc, &attention_variants[v]);
        Model packed, alone;
        case_open(&alone, &c, 1, T, FOR_TRAINING);
        case_open(&packed, &c, 1, T, FOR_TRAINING);
        case_randomize(&packed, 4);
        memcpy(alone.state.params, packed.state.params, packed.plan.params_bytes);
        int *tokens = case_tokens(T + 1, c.V, 5), starts[T];
        for (int d = 0; d < DOCUMENTS; d++)
            for (int t = begin[d]; t < begin[d + 1]; t++) starts[t] = begin[d];
        buffer_zero(packed.acts.losses, T * sizeof(real));
        model_micro_step(&packed, tokens, tokens + 1, starts, 1, T, T);
        double loss = loss_sum(&packed.acts, T), sum = 0, worst = 0, largest = 0;
        for (int d = 0; d < DOCUMENTS; d++) {
            int length = begin[d + 1] - begin[d];
            buffer_zero(alone.acts.losses, T * sizeof(real));
            alone.state.micro_step = d;
            model_micro_step(&alone, tokens + begin[d], tokens + begin[d] + 1, NULL, 1, length, T);
            sum += loss_sum(&alone.acts, length);
        }
        for (size_t e = 0; e < packed.plan.tensors.buffer_count; e++) {
            worst = fmax(worst, fabs((double)(packed.state.grads[e] - alone.state.grads[e])));
            largest = fmax(largest, fabs((double)alone.state.grads[e]));
        }
        double tolerance = sizeof(real) == 8 ? 1e-12 : 1e-5;
        EXPECT(fabs(loss - sum) < tolerance * sum && worst < tolerance * largest,
               "%s: loss %.9g, alone %.9g; gradients differ by %.2g of %.2g", c.attention->name, loss, sum, worst,
               largest);
        buffer_zero(packed.acts.losses, T * sizeof(real));
        model_micro_step(&packed, tokens, tokens + 1, NULL, 1, T, T);
        double whole = loss_sum(&packed.acts, T);
        EXPECT(fabs(whole - sum) > 20 * tolerance * sum, "%s: loss %.9g within documents, %.9g across them",
               c.attention->name, sum, whole);
        free(tokens);
        model_free(&packed, true);
        case_close(&alone);
    }
}

static const Test documents_tests[] = {
    {"packed documents give the loss and gradients of separate documents, in every variant", test_packed_documents},
};
