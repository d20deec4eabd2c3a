/*
evaluation.h: --eval: the validation loss, by position, by shard and by token frequency, multiple-choice tasks
(evaluation_choices.h), associative recall (recall.h) and attention statistics (evaluation_attention.h), printed and,
with --eval-out FILE, written as JSON. Recall is measured without --doc-mask.
*/
#pragma once
#include "../base/random.h"
#include "../data/data_identity.h"
#include "../data/recall.h"
#include "evaluation_attention.h"
#include "evaluation_choices.h"

// ---- loss by position

static inline void print_by_position(const double *mean, int T) {
    printf("loss by position\n");
    for (int begin = 0; begin < T; begin = begin ? 2 * begin : 1) {
        int end = min_int(T, begin ? 2 * begin : 1);
        double sum = 0;
        for (int t = begin; t < end; t++) sum += mean[t];
        printf("  %5d .. %-5d %9.4f\n", begin, end - 1, signless_nan(sum / (end - begin)));
    }
}

// ---- loss by shard

static inline void report_by_shard(const DataLoader *val, const double *mean, cJSON *json) {
    cJSON *list = cJSON_AddArrayToObject(json, "loss_by_shard");
    if (val->shard_count > 1) printf("loss by validation shard\n");
    for (size_t i = 0; i < val->shard_count; i++) {
        const char *slash = strrchr(val->shards[i].path, '/'), *file = slash ? slash + 1 : val->shards[i].path;
        if (val->shard_count > 1) printf("  %-32s %9.4f\n", file, signless_nan(mean[i]));
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "file", file);
        cJSON_AddNumberToObject(one, "loss", mean[i]);
        cJSON_AddItemToArray(list, one);
    }
}

// ---- loss by token frequency

// Tokens are grouped by their share of all targets, [2^k, 2^(k+1)): the mean loss of the targets of each group.
static inline void report_by_frequency(const LossTable *tokens, cJSON *json) {
    enum { SHARES = 65 }; // a share is at least 1 / 2^64
    struct {
        double tokens, targets, losses;
    } groups[SHARES] = {{0, 0, 0}};
    double all = 0;
    for (size_t v = 0; v < tokens->n; v++) all += tokens->targets[v];
    for (size_t v = 0; v < tokens->n; v++) {
        if (tokens->targets[v] == 0) continue;
        int k = -ilogb(tokens->targets[v] / all);
        groups[k].tokens++;
        groups[k].targets += tokens->targets[v];
        groups[k].losses += tokens->losses[v] * tokens->targets[v];
    }
    cJSON *list = cJSON_AddArrayToObject(json, "loss_by_frequency");
    printf("loss by the token's share of the targets\n");
    for (int k = 0; k < SHARES; k++) {
        if (groups[k].tokens == 0) continue;
        double loss = groups[k].losses / groups[k].targets;
        printf("  from 2^%-3d %7.0f tokens, %5.1f%% of the targets %9.4f\n", -k, groups[k].tokens,
               100 * groups[k].targets / all, signless_nan(loss));
        cJSON *one = cJSON_CreateObject();
        cJSON_AddNumberToObject(one, "share", ldexp(1.0, -k));
        cJSON_AddNumberToObject(one, "tokens", groups[k].tokens);
        cJSON_AddNumberToObject(one, "targets", groups[k].targets);
        cJSON_AddNumberToObject(one, "loss", loss);
        cJSON_AddItemToArray(list, one);
    }
}

// ---- recall

// Scores the logits at the queries of `sequences` sequences. The LM head computes all rows, logit_rows at a time; rows
// and logits are scratch memory on the host.
static inline void recall_classify(const EvaluationModel *m, RecallScore *score, const int *tokens, int sequences,
                                   RecallCell cell, floatX *rows, float *logits) {
    const ModelPlan *p = m->plan;
    const Activations *acts = m->acts;
    int T = recall_length(cell), C = p->config.C, V = p->config.V, N = sequences * T;
    for (int n = 0; n < N; n += p->logit_rows) {
        int count = min_int(p->logit_rows, N - n);
        linear_forward(acts->logits, activation(acts->norm_final + (size_t)n * C, NULL), m->head, count);
        buffer_download(rows, acts->logits, (size_t)count * p->Vp * sizeof(floatX));
        for (int i = 0; i < sequences * cell.pairs; i++) {
            int sequence = i / cell.pairs, query = i % cell.pairs, row = sequence * T + recall_query(cell, query) - n;
            if (row < 0 || row >= count) continue;
            for (int v = 0; v < V; v++) logits[v] = (float)rows[(size_t)row * p->Vp + v];
            recall_score(score, logits, V, tokens + (size_t)sequence * T, cell, query);
        }
    }
}

static inline RecallScore recall_measure(const EvaluationModel *m, RecallCell cell, const int *symbols,
                                         int symbol_count, uint64_t seed) {
    const ModelPlan *p = m->plan;
    int T = recall_length(cell), room = p->B;
    floatX *rows = (floatX *)checked_calloc((size_t)p->logit_rows * p->Vp, sizeof(floatX));
    float *logits = (float *)checked_calloc(p->config.V, sizeof(float));
    int *tokens = (int *)checked_calloc((size_t)room * T, sizeof(int));
    uint64_t key = random_mix(random_key("recall", seed) + (uint64_t)cell.pairs * 2 + (cell.noise > 0));
    RecallScore score;
    memset(&score, 0, sizeof(score));
    for (int done = 0; done < RECALL_SEQUENCES; done += room) {
        int count = min_int(room, RECALL_SEQUENCES - done);
        for (int s = 0; s < count; s++)
            recall_generate(tokens + (size_t)s * T, cell, symbols, symbol_count,
                            random_mix(key + (uint64_t)(done + s)));
        m->forward(m->model, tokens, count, T, NULL, NULL);
        recall_classify(m, &score, tokens, count, cell, rows, logits);
    }
    free(rows);
    free(logits);
    free(tokens);
    return score;
}

static inline void evaluate_recall(const EvaluationModel *m, const int64_t *counts, uint64_t seed, cJSON *json) {
    int symbols[RECALL_SYMBOLS], symbol_count = recall_symbols(symbols, counts, m->plan->config.V);
    RecallCell cells[RECALL_CELLS];
    int cell_count = recall_cells(cells, m->plan->T, symbol_count);
    cJSON *list = cJSON_AddArrayToObject(json, "recall");
    printf("associative recall, %d sequences each, of %d symbols%s\n", RECALL_SEQUENCES, symbol_count,
           cell_count ? "" : ": not measured, too few symbols or too short a context");
    for (int i = 0; i < cell_count; i++) {
        RecallScore s = recall_measure(m, cells[i], symbols, symbol_count, seed);
        double n = (double)s.answers;
        if (i == 0)
            printf("  %5s %6s %12s %12s %12s %9s\n", "pairs", "noise", "exact match", "among values", "by chance",
                   "loss");
        printf("  %5d %6d %11.2f%% %11.2f%% %11.2f%% %9.4f\n", cells[i].pairs, cells[i].noise,
               100 * (double)s.exact / n, 100 * (double)s.among / n, 100.0 / cells[i].pairs, signless_nan(s.loss / n));
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

// ---- all measurements

// Measures recall and attention, in one process. windows: number of windows of the losses, from the first on.
static inline void evaluate_model(const EvaluationModel *m, DataLoader *val, uint64_t windows, uint64_t seed,
                                  cJSON *json) {
    int first_windows = (int)min_size(ATTENTION_WINDOWS, (size_t)windows), T = min_int(MAP_TOKENS, m->plan->T);
    int64_t *counts = (int64_t *)checked_calloc(m->plan->config.V, sizeof(int64_t));
    int *first = evaluation_windows(m, val, first_windows, T, counts);
    evaluate_recall(m, counts, seed, json);
    evaluate_attention(m, first, first_windows, T, json);
    free(first);
    free(counts);
}

static inline void evaluate(const EvaluationModel *m, DataLoader *val, uint64_t windows, uint64_t data_fingerprint,
                            const ChoiceTasks *choices, const Options *o) {
    int T = m->plan->T;
    LossTable tables[LOSS_TABLES];
    loss_tables_create(tables, m, val);
    Validation result = validate(m, val, windows, tables);
    double loss = result.loss, *by_position = tables[LOSS_BY_POSITION].losses;
    printf("validation loss %.9g (perplexity %.2f", signless_nan(loss), signless_nan(exp(loss)));
    if (!isnan(result.bits_per_byte)) printf(", %.4f bits per byte", result.bits_per_byte);
    printf(")\n");
    print_by_position(by_position, T);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddNumberToObject(json, "loss", loss);
    if (!isnan(result.bits_per_byte)) cJSON_AddNumberToObject(json, "bits_per_byte", result.bits_per_byte);
    cJSON_AddItemToObject(json, "loss_by_position", cJSON_CreateDoubleArray(by_position, T));
    report_by_shard(val, tables[LOSS_BY_SHARD].losses, json);
    report_by_frequency(&tables[LOSS_BY_TOKEN], json);
    json_add_u64(json, "windows", windows);
    json_add_u64(json, "data_fingerprint", data_fingerprint);
    json_add_u64(json, "seed", o->seed);
    evaluate_choices(m, choices, json);
    if (comm_ranks() == 1) evaluate_model(m, val, windows, o->seed, json);
    else printf("recall and attention are measured by one process, not by %d ranks\n", comm_ranks());
    if (o->eval_out) {
        size_t size = 0;
        char *text = json_text(json, &size);
        file_write_atomic(o->eval_out, text, size);
        free(text);
    }
    cJSON_Delete(json);
    loss_tables_free(tables);
    CHECK(isfinite(loss), "the validation loss is not finite: the model's weights are broken or training diverged");
}
