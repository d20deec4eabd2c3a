/*
evaluation_model.h: the model as --eval sees it: plain data, and one callback that runs its forward.
*/
#ifndef LLMC_EVALUATION_MODEL_H
#define LLMC_EVALUATION_MODEL_H
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
#endif
