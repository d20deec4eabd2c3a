/*
evaluation.h: --eval: the validation loss, the loss by position, associative recall (recall.h), and what attention does
(evaluation_attention.h). Included by the trainer, whose forward it runs.

  --eval-out FILE   all of it as JSON

Recall is asked for without --doc-mask.
*/
#ifndef LLMC_EVALUATION_H
#define LLMC_EVALUATION_H
#include "evaluation_attention.h"

// ---- loss by position

static void print_by_position(const double *mean, int T) {
    printf("loss by position\n");
    for (int begin = 0; begin < T; begin = begin ? 2 * begin : 1) {
        int end = min_int(T, begin ? 2 * begin : 1);
        double sum = 0;
        for (int t = begin; t < end; t++) sum += mean[t];
        printf("  %5d .. %-5d %9.4f\n", begin, end - 1, sum / (end - begin));
    }
}

// ---- recall

// Logits behind the queries of `rows / T` sequences: the head runs over chunks of rows, of which few are looked at.
static void recall_classify(Model *model, RecallScore *score, const int *tokens, int sequences, RecallCell cell,
                            floatX *rows, float *logits) {
    Activations *a = &model->acts;
    int T = recall_length(cell), V = model->plan.config.V, N = sequences * T;
    for (int n = 0; n < N; n += model->plan.logit_rows) {
        int count = min_int(model->plan.logit_rows, N - n);
        matmul_forward(a->logits, a->norm_final + (size_t)n * (size_t)model->plan.config.C,
                       param(model, head_kind(model), 0), count, model->plan.config.C, model->plan.Vw, model->plan.Vp);
        buffer_download(rows, a->logits, (size_t)count * (size_t)model->plan.Vp * sizeof(floatX));
        for (int i = 0; i < sequences * cell.pairs; i++) {
            int sequence = i / cell.pairs, query = i % cell.pairs, row = sequence * T + recall_query(cell, query) - n;
            if (row < 0 || row >= count) continue;
            for (int v = 0; v < V; v++) logits[v] = (float)rows[(size_t)row * (size_t)model->plan.Vp + (size_t)v];
            recall_score(score, logits, V, tokens + (size_t)sequence * (size_t)T, cell, query);
        }
    }
}

static RecallScore recall_measure(Run *run, RecallCell cell, const int *symbols, int symbol_count) {
    Model *model = &run->model;
    int T = recall_length(cell), room = model->plan.B;
    floatX *rows = (floatX *)checked_calloc((size_t)model->plan.logit_rows * (size_t)model->plan.Vp, sizeof(floatX));
    float *logits = (float *)checked_calloc((size_t)model->plan.config.V, sizeof(float));
    int *tokens = (int *)checked_calloc((size_t)room * (size_t)T, sizeof(int));
    uint64_t key = random_mix(random_key("recall", run->options.seed) + (uint64_t)cell.pairs * 2 + (cell.noise > 0));
    RecallScore score;
    memset(&score, 0, sizeof(score));
    for (int done = 0; done < RECALL_SEQUENCES; done += room) {
        int count = min_int(room, RECALL_SEQUENCES - done);
        for (int s = 0; s < count; s++)
            recall_generate(tokens + (size_t)s * (size_t)T, cell, symbols, symbol_count,
                            random_mix(key + (uint64_t)(done + s)));
        model_read_batch(model, tokens, tokens, NULL, count * T);
        model_forward(model, count, T, 0);
        recall_classify(model, &score, tokens, count, cell, rows, logits);
    }
    free(rows);
    free(logits);
    free(tokens);
    return score;
}

static void evaluate_recall(Run *run, const int64_t *counts, cJSON *json) {
    int symbols[RECALL_SYMBOLS], symbol_count = recall_symbols(symbols, counts, run->model.plan.config.V);
    RecallCell cells[RECALL_CELLS];
    int cell_count = recall_cells(cells, run->model.plan.T, symbol_count);
    cJSON *list = cJSON_AddArrayToObject(json, "recall");
    printf("associative recall, %d sequences each, of %d symbols%s\n", RECALL_SEQUENCES, symbol_count,
           cell_count ? "" : ": too few, or too short a context");
    for (int i = 0; i < cell_count; i++) {
        RecallScore s = recall_measure(run, cells[i], symbols, symbol_count);
        double n = (double)s.answers;
        if (i == 0)
            printf("  %5s %6s %12s %12s %12s %9s\n", "pairs", "noise", "exact match", "among values", "by chance",
                   "loss");
        printf("  %5d %6d %11.2f%% %11.2f%% %11.2f%% %9.4f\n", cells[i].pairs, cells[i].noise,
               100 * (double)s.exact / n, 100 * (double)s.among / n, 100.0 / cells[i].pairs, s.loss / n);
        cJSON *cell = cJSON_CreateObject();
        cJSON_AddNumberToObject(cell, "pairs", cells[i].pairs);
        cJSON_AddNumberToObject(cell, "noise", cells[i].noise);
        cJSON_AddNumberToObject(cell, "answers", n);
        cJSON_AddNumberToObject(cell, "exact", (double)s.exact / n);
        cJSON_AddNumberToObject(cell, "among_values", (double)s.among / n);
        cJSON_AddNumberToObject(cell, "loss", s.loss / n);
        cJSON_AddItemToArray(list, cell);
    }
}

// ---- all of it

// The beginnings of the first windows (windows, T), and how often each token occurs in them (whole windows).
static int *evaluation_windows(Run *run, int windows, int T, int64_t *counts) {
    Model *model = &run->model;
    int *first = (int *)checked_calloc((size_t)windows * (size_t)T, sizeof(int));
    dataloader_start(&run->val, 0);
    for (int done = 0; done < windows; done += model->plan.B) {
        int count = min_int(model->plan.B, windows - done);
        dataloader_next(&run->val, run->inputs, run->targets, run->starts);
        for (int n = 0; n < count * model->plan.T; n++) counts[run->inputs[n]]++;
        for (int b = 0; b < count; b++)
            memcpy(first + (size_t)(done + b) * (size_t)T, run->inputs + (size_t)b * (size_t)model->plan.T,
                   (size_t)T * sizeof(int));
    }
    return first;
}

// What one process measures: recall and attention.
static void evaluate_model(Run *run, uint64_t seen, cJSON *json) {
    int windows = (int)min_size(ATTENTION_WINDOWS, (size_t)seen), T = min_int(MAP_TOKENS, run->model.plan.T);
    int64_t *counts = (int64_t *)checked_calloc((size_t)run->model.plan.config.V, sizeof(int64_t));
    int *first = evaluation_windows(run, windows, T, counts);
    evaluate_recall(run, counts, json);
    evaluate_attention(run, first, windows, T, json);
    free(counts);
    free(first);
}

static void run_evaluate(Run *run) {
    const Options *o = &run->options;
    int T = run->model.plan.T;
    double *by_position = (double *)checked_calloc((size_t)T, sizeof(double));
    double loss = run_validate(run, by_position);
    printf("validation loss %.9g (perplexity %.2f)\n", signless_nan(loss), signless_nan(exp(loss)));
    print_by_position(by_position, T);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddNumberToObject(json, "loss", loss);
    cJSON_AddItemToObject(json, "loss_by_position", cJSON_CreateDoubleArray(by_position, T));
    uint64_t seen = run_validation_windows(run);
    json_add_u64(json, "windows", seen);
    json_add_u64(json, "data_fingerprint", run->val_fingerprint);
    json_add_u64(json, "seed", o->seed);
    if (comm_ranks() == 1) evaluate_model(run, seen, json);
    else printf("recall and attention are for one process to measure, not for %d ranks\n", comm_ranks());
    if (o->eval_out) {
        size_t size = 0;
        char *text = json_text(json, &size);
        file_write_atomic(o->eval_out, text, size);
        free(text);
    }
    cJSON_Delete(json);
    free(by_position);
    CHECK(isfinite(loss), "the validation loss is not finite: the model's weights are broken or training diverged");
}
#endif
