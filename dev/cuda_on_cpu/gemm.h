/*
gemm.h: what llmc/gemm.cuh calls where kernels run on the CPU. Numbers are widened to fp32, multiplied by CBLAS, and
rounded once; a product is queued on the stream as a kernel would be. It refuses what cuBLASLt would refuse: a product
before gemm_start, empty shapes, row strides shorter than rows, null pointers, an output that overlaps an operand.
*/
#ifndef CUDA_ON_CPU_GEMM_H
#define CUDA_ON_CPU_GEMM_H
#include <vector>

static void *gemm_workspace; // not used, but as on a device it takes its part of the memory
static inline bool gemm_started(void) { return gemm_workspace != NULL; }
static inline void gemm_start(void) { gemm_workspace = buffer_alloc(GEMM_WORKSPACE_BYTES, "cuBLASLt's workspace"); }
static inline void gemm_stop(void) {
    buffer_free(gemm_workspace);
    gemm_workspace = NULL;
}
static inline const char *gemm_library(void) { return "CBLAS in the place of cuBLASLt"; }

static inline std::vector<float> gemm_widen(const floatX *x, int rows, int columns, int ld) {
    std::vector<float> wide((size_t)rows * (size_t)columns);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            wide[(size_t)r * (size_t)columns + (size_t)c] = (float)x[(size_t)r * (size_t)ld + (size_t)c];
    return wide;
}

// The elements of a matrix from the first to the last.
static inline size_t gemm_extent(int rows, int columns, int ld) {
    return (size_t)(rows - 1) * (size_t)ld + (size_t)columns;
}

static inline bool gemm_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y + b_bytes && y < x + a_bytes;
}

static inline void gemm_run(GemmShape s, void *C, const floatX *A, const floatX *B) {
    int a_rows = s.transpose_a ? s.K : s.M, a_columns = s.transpose_a ? s.M : s.K;
    int b_rows = s.transpose_b ? s.N : s.K, b_columns = s.transpose_b ? s.K : s.N;
    std::vector<float> a = gemm_widen(A, a_rows, a_columns, s.lda), b = gemm_widen(B, b_rows, b_columns, s.ldb);
    std::vector<float> c((size_t)s.M * (size_t)s.N);
    cblas_sgemm(CblasRowMajor, s.transpose_a ? CblasTrans : CblasNoTrans, s.transpose_b ? CblasTrans : CblasNoTrans,
                s.M, s.N, s.K, 1, a.data(), a_columns, b.data(), b_columns, 0, c.data(), s.N);
    for (int m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++) {
            size_t to = (size_t)m * (size_t)s.ldc + (size_t)n;
            float sum = c[(size_t)m * (size_t)s.N + (size_t)n];
            if (s.fp32_out) ((float *)C)[to] = sum + (s.add ? ((float *)C)[to] : 0);
            else ((floatX *)C)[to] = (floatX)(sum + (s.add ? (float)((floatX *)C)[to] : 0));
        }
}

static inline void gemm(GemmShape s, void *C, const floatX *A, const floatX *B) {
    int a_rows = s.transpose_a ? s.K : s.M, a_columns = s.transpose_a ? s.M : s.K;
    int b_rows = s.transpose_b ? s.N : s.K, b_columns = s.transpose_b ? s.K : s.N;
    bool possible =
        s.M > 0 && s.N > 0 && s.K > 0 && s.lda >= a_columns && s.ldb >= b_columns && s.ldc >= s.N && A && B && C;
    CHECK(gemm_started(), "gemm: a product of %d x %d x %d before gemm_start", s.M, s.N, s.K);
    CHECK(possible, "gemm: a product of %d x %d x %d with row strides %d, %d, %d is not possible", s.M, s.N, s.K, s.lda,
          s.ldb, s.ldc);
    size_t bytes = gemm_extent(s.M, s.N, s.ldc) * (s.fp32_out ? sizeof(float) : sizeof(floatX));
    CHECK(!gemm_overlap(C, bytes, A, gemm_extent(a_rows, a_columns, s.lda) * sizeof(floatX)) &&
              !gemm_overlap(C, bytes, B, gemm_extent(b_rows, b_columns, s.ldb) * sizeof(floatX)),
          "gemm: the output overlaps an operand");
    cuda_on_cpu::on_stream(main_stream, "gemm", [=] { gemm_run(s, C, A, B); });
}
#endif
