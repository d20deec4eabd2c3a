/*
evaluation_model.h: the model as --eval and --probe see it: plain data, and one callback that runs its forward; and the
validation windows that they read.
*/
#ifndef LLMC_EVALUATION_MODEL_H
#define LLMC_EVALUATION_MODEL_H
#include "../data/dataloader.h"
#include "model_memory.h"

typedef void (*LayerVisit)(void *data, int layer);

typedef struct {
    const ModelPlan *plan;
    const Activations *acts;
    Linear head; // the LM head
    void *model;
    // Runs B sequences of T tokens up to acts->norm_final, without --doc-mask. After each layer it calls visit(data,
    // layer), unless visit is NULL: layers share the memory of their activations.
    void (*forward)(void *model, const int *tokens, int B, int T, LayerVisit visit, void *data);
} EvaluationModel;

// The first T tokens of the first windows, as (windows, T). counts [V]: how often each token occurs in whole windows.
static inline int *evaluation_windows(const EvaluationModel *m, DataLoader *val, int windows, int T, int64_t *counts) {
    int B = m->plan->B, window = m->plan->T;
    size_t N = (size_t)B * window;
    int *first = (int *)checked_calloc((size_t)windows * T, sizeof(int));
    int *batch = (int *)checked_calloc(3 * N, sizeof(int)); // inputs, targets, starts of documents
    dataloader_start(val, 0);
    for (int done = 0; done < windows; done += B) {
        int count = min_int(B, windows - done);
        dataloader_next(val, batch, batch + N, val->documents ? batch + 2 * N : NULL);
        for (int n = 0; n < count * window; n++) counts[batch[n]]++;
        for (int b = 0; b < count; b++)
            memcpy(first + (size_t)(done + b) * T, batch + (size_t)b * window, (size_t)T * sizeof(int));
    }
    free(batch);
    return first;
}
#endif
