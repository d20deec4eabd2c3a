/*
gemm_table.h: --tune-gemm: the file with the algorithm of each matrix product. Rank 0 reads it, or measures and writes
it; all ranks use the same table.
*/
#ifndef LLMC_GEMM_TABLE_H
#define LLMC_GEMM_TABLE_H
#include "../base/files.h"
#include "../comm/comm.h"
#include "../ops/all_ops.h"
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
#endif
