/*
gemm_tuning.h: --tune-gemm: the file with the algorithm of each matrix product. Rank 0 reads it, or measures and writes
it; all ranks use the same table.
*/
#ifndef LLMC_GEMM_TUNING_H
#define LLMC_GEMM_TUNING_H
#include "../base/files.h"
#include "../comm/comm.h"
#include "../ops/all_ops.h"
#include "../evaluate/evaluation_model.h"
#include <xxhash.h>

// On rank 0: the file's text, which the caller frees; NULL when there is no file.
static inline char *gemm_table_read(const char *path, size_t *size) {
    char *text = file_read(path, (size_t)1 << 24, size);
    CHECK(text || errno == ENOENT, "cannot read --tune-gemm %s: %s", path, strerror(errno));
    return text;
}

// On rank 0, after matmul_tune_measure() and the products of a step: writes the file and returns its text.
static inline char *gemm_table_write(const char *path, double seconds, size_t *size) {
    char *text = matmul_tune_table(size);
    file_write_atomic(path, text, *size);
    printf("--tune-gemm: matrix products measured in %.1f s, %s written\n", seconds, path);
    return text;
}

// All ranks call it; text is rank 0's, NULL elsewhere. Frees the text; returns its digest.
static inline uint64_t gemm_table_use(const char *path, char *text, size_t size) {
    char why[600];
    comm_broadcast(&size, sizeof(size));
    if (!text) text = (char *)checked_calloc(size + 1, 1);
    comm_broadcast(text, size);
    CHECK(matmul_tune_read(text, size, why, sizeof(why)),
          "--tune-gemm %s: %s; remove the file to measure again, or do not give --tune-gemm", path, why);
    uint64_t digest = XXH3_64bits(text, size);
    free(text);
    return digest;
}

// Measures the matrix products of two micro-steps: one writes the gradients, one adds to them. With --zero 3 the other
// ranks compute them too.
static inline char *gemm_table_measure(const EvaluationModel *m, const char *path, bool documents, size_t *size) {
    int B = m->plan->B, T = m->plan->T;
    int *tokens = (int *)checked_calloc((size_t)B * T, sizeof(int)); // all 0
    double start = now_seconds();
    if (comm_rank() == 0) matmul_tune_measure();
    for (m->state->micro_step = 0; m->state->micro_step < 2; m->state->micro_step++)
        m->gradients(m->model, tokens, tokens, documents ? tokens : NULL, B, T, B * T);
    m->state->micro_step = 0;
    buffer_zero(m->acts->losses, (size_t)(B * T) * sizeof(real));
    free(tokens);
    return comm_rank() == 0 ? gemm_table_write(path, now_seconds() - start, size) : NULL;
}

// Returns the digest of the table. documents: attention of this run stays within documents. All ranks call it.
static inline uint64_t gemm_table_open(const EvaluationModel *m, const char *path, bool documents) {
    size_t size = 0;
    char *table = comm_rank() == 0 ? gemm_table_read(path, &size) : NULL;
    bool measure = comm_rank() == 0 && !table;
    if (params_two_layers(m->plan)) comm_broadcast(&measure, sizeof(measure));
    if (measure) table = gemm_table_measure(m, path, documents, &size);
    return gemm_table_use(path, table, size);
}

// After the first step. missed: matmul_tune_missed() before it.
static inline void gemm_table_warn(const char *path, int missed) {
    if (path && matmul_tune_missed() > missed)
        warn("--tune-gemm %s lacks %d of the matrix products of a step, for which the library's first choice is used",
             path, matmul_tune_missed() - missed);
}
#endif
