/*
evaluation_model.h: the interface of a model for measurements: plain data, and callbacks that run it; its validation
loss, and the windows that --eval reads.
*/
#pragma once
#include "../data/dataloader.h"
#include "../model/state.h"

typedef struct {
    const ModelPlan *plan;
    const Activations *acts;
    ModelState *state;
    const Linear *head;     // the LM head
    const int *token_bytes; // [V]: bytes of the text of a token; NULL: unknown
    void *model;
    // Runs B sequences of T tokens up to acts->norm_final, without --doc-mask. After each layer it calls visit(data,
    // layer), unless visit is NULL: layers share the memory of their activations.
    void (*forward)(void *model, const int *tokens, int B, int T, LayerVisit visit, void *data);
    // Adds the losses of a batch to acts->losses. document_starts: or NULL.
    void (*losses)(void *model, const int *inputs, const int *targets, const int *document_starts, int B, int T);
    // Also computes the gradients of the sum of losses / total_rows.
    void (*gradients)(void *model, const int *inputs, const int *targets, const int *document_starts, int B, int T,
                      double total_rows);
    // Whether to abort the measurement, whose result is then not used. All ranks call it equally often, before their
    // batches. NULL: never.
    bool (*abandons)(void *agreement);
    void *agreement;
} EvaluationModel;

static inline bool measurement_ends(const EvaluationModel *m) { return m->abandons && m->abandons(m->agreement); }

// The sum of the losses of N rows.
static inline double loss_sum(const Activations *acts, int N) {
    real *losses = (real *)checked_calloc(N, sizeof(real));
    double sum = 0;
    buffer_download(losses, acts->losses, (size_t)N * sizeof(real));
    for (int n = 0; n < N; n++) sum += (double)losses[n];
    free(losses);
    return sum;
}

// Losses by class: for each of n classes of targets the sum, then the mean.
typedef struct {
    size_t n;
    double *losses, *targets;
} LossTable;

enum { LOSS_BY_POSITION, LOSS_BY_SHARD, LOSS_BY_TOKEN, LOSS_TABLES }; // T, shards of the validation data, V classes

static inline void loss_tables_create(LossTable tables[LOSS_TABLES], const EvaluationModel *m, const DataLoader *val) {
    size_t sizes[LOSS_TABLES] = {(size_t)m->plan->T, val->shard_count, (size_t)m->plan->config.V};
    for (int i = 0; i < LOSS_TABLES; i++) {
        double *numbers = (double *)checked_calloc(2 * sizes[i], sizeof(double));
        tables[i] = (LossTable){sizes[i], numbers, numbers + sizes[i]};
    }
}

static inline void loss_tables_free(LossTable tables[LOSS_TABLES]) {
    for (int i = 0; i < LOSS_TABLES; i++) free(tables[i].losses);
}

static inline void loss_table_add(LossTable *table, size_t at, double loss) {
    table->losses[at] += loss;
    table->targets[at] += 1;
}

// Sums over the ranks, and the mean of each class, NaN where there is no target.
static inline void loss_table_means(LossTable *table) {
    comm_sum_f64(table->losses, (int)(2 * table->n));
    for (size_t i = 0; i < table->n; i++) table->losses[i] /= table->targets[i];
}

typedef struct {
    double loss;          // mean, in nats per token
    double bits_per_byte; // of text; NaN where the bytes of tokens are unknown
} Validation;

// Measures the first windows of the validation data, the same ones each time. The result is not valid if it was
// abandoned. Data that cannot be read end the program; with m->abandons they set val->any_unread on all ranks, the
// loss is not valid, and the caller saves the run first. tables: receive the means of their classes; or NULL. All ranks
// call it.
static inline Validation validate(const EvaluationModel *m, DataLoader *val, uint64_t windows,
                                  LossTable tables[LOSS_TABLES]) {
    int B = m->plan->B, T = m->plan->T;
    size_t N = (size_t)B * T;
    uint64_t ranks = (uint64_t)comm_ranks(), mine = (uint64_t)comm_rank() * (uint64_t)B;
    int *batch = (int *)checked_calloc(3 * N, sizeof(int)); // inputs, targets, starts of documents
    int *targets = batch + N, *document_starts = val->documents ? batch + 2 * N : NULL;
    real *losses = (real *)checked_calloc(N, sizeof(real));
    double all[3] = {0, 0, 0}; // the sum of the losses, ranks that could not read, bytes of the targets
    watch_stage(STAGE_VALIDATION);
    dataloader_start(val, 0);
    for (uint64_t first = 0; first < windows && !measurement_ends(m); first += (uint64_t)B * ranks) {
        uint64_t done = first + mine;
        if (done >= windows) {
            follow_forward(m->state);
            break;
        }
        int rows = T * (windows - done < (uint64_t)B ? (int)(windows - done) : B); // the last batch may be partial
        if (!dataloader_read(val, batch, targets, document_starts)) {
            if (!m->abandons) dataloader_fail(val, "");
            follow_forward(m->state);
            continue;
        }
        buffer_zero(m->acts->losses, (size_t)rows * sizeof(real));
        m->losses(m->model, batch, targets, document_starts, rows / T, T);
        buffer_download(losses, m->acts->losses, (size_t)rows * sizeof(real));
        for (int n = 0; n < rows; n++) {
            double loss = (double)losses[n];
            all[0] += loss;
            if (m->token_bytes) all[2] += m->token_bytes[targets[n]];
            if (!tables) continue;
            CorpusWindow window = dataloader_locate(val, done + (uint64_t)(n / T));
            loss_table_add(&tables[LOSS_BY_POSITION], (size_t)(n % T), loss);
            loss_table_add(&tables[LOSS_BY_SHARD], dataloader_shard(val, window), loss);
            loss_table_add(&tables[LOSS_BY_TOKEN], (size_t)targets[n], loss);
        }
    }
    free(batch);
    free(losses);
    all[1] = val->unread;
    comm_sum_f64(all, 3);
    val->any_unread = all[1] > 0;
    for (int i = 0; tables && i < LOSS_TABLES; i++) loss_table_means(&tables[i]);
    return (Validation){all[0] / ((double)windows * T), m->token_bytes ? all[0] / log(2) / all[2] : NAN};
}

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
