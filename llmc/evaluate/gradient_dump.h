/*
gradient_dump.h: --dump-grads: the gradients of one batch, the first B*T + 1 tokens of the training shards in file
order.
*/
#pragma once
#include "../checkpoint/checkpoint.h"
#include "../data/data_identity.h"
#include "evaluation_model.h"

static inline void dump_gradients(const EvaluationModel *m, DataLoader *train, const char *path) {
    int B = m->plan->B, T = m->plan->T;
    size_t N = (size_t)B * T;
    const Corpus *first = &train->corpora[0];
    int *tokens = (int *)checked_calloc(N + 1, sizeof(int)), *starts = NULL;
    dataloader_read_first_tokens(train, tokens, N + 1);
    if (train->documents) {
        CHECK(train->corpus_count == 1 || first->token_count > N,
              "--dump-grads --doc-mask: the first corpus has %zu tokens, and %zu are read: give one corpus",
              first->token_count, N + 1);
        starts = (int *)checked_calloc(N, sizeof(int));
        for (size_t at = 0; at < N; at += (size_t)T) documents_find(starts + at, tokens + at, T, first->separator);
    }
    m->gradients(m->model, tokens, tokens + 1, starts, B, T, (double)N);
    double loss = loss_sum(m->acts, (int)N) / (double)N;
    checkpoint_save_gradients(path, &m->plan->tensors, m->state->grads, loss);
    printf("loss %.9g, gradients written to %s\n", signless_nan(loss), path);
    CHECK(isfinite(loss), "the loss is not finite: the model's weights are broken or training diverged");
    free(tokens);
    free(starts);
}
