/*
evaluation_model.h: the model as measurements see it: plain data, and callbacks that run it; its validation loss, and
the windows that --eval reads.
*/
#pragma once
#include "../data/dataloader.h"
#include "../model/state.h"

typedef struct {
    const ModelPlan *plan;
    const Activations *acts;
    ModelState *state;
    Linear head; // the LM head
    void *model;
    // Runs B sequences of T tokens up to acts->norm_final, without --doc-mask. After each layer it calls visit(data,
    // layer), unless visit is NULL: layers share the memory of their activations.
    void (*forward)(void *model, const int *tokens, int B, int T, LayerVisit visit, void *data);
    // Adds the losses of a batch to acts->losses. starts: of documents, or NULL.
    void (*losses)(void *model, const int *inputs, const int *targets, const int *starts, int B, int T);
    // The same, and computes the gradients of their sum over total_rows.
    void (*gradients)(void *model, const int *inputs, const int *targets, const int *starts, int B, int T,
                      double total_rows);
} EvaluationModel;

// The sum of the losses of N rows.
static inline double loss_sum(const Activations *a, int N) {
    real *losses = (real *)checked_calloc(N, sizeof(real));
    double sum = 0;
    buffer_download(losses, a->losses, (size_t)N * sizeof(real));
    for (int n = 0; n < N; n++) sum += (double)losses[n];
    free(losses);
    return sum;
}

// Adds the losses of `rows` rows to sums [T], those at each position.
static inline void losses_by_position(const Activations *a, double *sums, int rows, int T) {
    real *losses = (real *)checked_calloc(rows, sizeof(real));
    buffer_download(losses, a->losses, (size_t)rows * sizeof(real));
    for (int n = 0; n < rows; n++) sums[n % T] += (double)losses[n];
    free(losses);
}

// sums [shards of val]: adds the losses of B sequences, the windows from `first` on, to those of their shards.
static inline void losses_by_shard(const Activations *a, const DataLoader *val, double *sums, uint64_t first, int B,
                                   int T) {
    real *losses = (real *)checked_calloc((size_t)B * T, sizeof(real));
    buffer_download(losses, a->losses, (size_t)B * T * sizeof(real));
    for (int n = 0; n < B * T; n++)
        sums[dataloader_shard(val, dataloader_locate(val, first + (uint64_t)(n / T)))] += (double)losses[n];
    free(losses);
}

// Mean loss of the targets that count in the first windows of the validation data, the same ones each time.
// by_position (T), by_shard (shards of val), or NULL: the mean loss of each position and shard, NaN where none counts.
// All ranks call it.
static inline double validate(const EvaluationModel *m, DataLoader *val, uint64_t windows, double *by_position,
                              double *by_shard) {
    int B = m->plan->B, T = m->plan->T;
    size_t N = (size_t)B * T;
    uint64_t ranks = (uint64_t)comm_ranks(), mine = (uint64_t)comm_rank() * (uint64_t)B;
    int *batch = (int *)checked_calloc(3 * N, sizeof(int)); // inputs, targets, starts of documents
    int *starts = val->documents ? batch + 2 * N : NULL;
    double sum = 0;
    watch_phase(PHASE_VALIDATION);
    dataloader_start(val, 0);
    for (uint64_t first = 0; first < windows; first += (uint64_t)B * ranks) {
        uint64_t done = first + mine;
        if (done >= windows) {
            follow_forward(m->state);
            break;
        }
        int rows = T * (windows - done < (uint64_t)B ? (int)(windows - done) : B); // the last batch may be partial
        dataloader_next(val, batch, batch + N, starts);
        buffer_zero(m->acts->losses, (size_t)rows * sizeof(real));
        m->losses(m->model, batch, batch + N, starts, rows / T, T);
        sum += loss_sum(m->acts, rows);
        if (by_position) losses_by_position(m->acts, by_position, rows, T);
        if (by_shard) losses_by_shard(m->acts, val, by_shard, done, rows / T, T);
    }
    free(batch);
    comm_sum_f64(&sum, 1);
    double *counted = (double *)checked_calloc(T, sizeof(double));
    double targets = (double)dataloader_counted(val, 0, windows, counted);
    if (by_position) comm_sum_f64(by_position, T);
    for (int t = 0; by_position && t < T; t++) by_position[t] /= counted[t];
    free(counted);
    if (by_shard) {
        double *of_shard = (double *)checked_calloc(val->shard_count, sizeof(double));
        for (uint64_t w = 0; w < windows; w++)
            of_shard[dataloader_shard(val, dataloader_locate(val, w))] += (double)dataloader_counted(val, w, 1, NULL);
        comm_sum_f64(by_shard, (int)val->shard_count);
        for (size_t s = 0; s < val->shard_count; s++) by_shard[s] /= of_shard[s];
        free(of_shard);
    }
    return sum / targets;
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
