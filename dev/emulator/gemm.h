/*
gemm.h: the library of llmc/cuda/gemm.cuh where kernels run on the CPU. It converts numbers to fp32, multiplies them by
CBLAS, and rounds once. A product runs in stream order, as a kernel does. Errors, as in cuBLASLt: a product before the
library has started, empty shapes, row strides shorter than rows, null pointers, an output that overlaps an operand.
Products in FP8: see gemm_fp8_refusal.

  CUDA_ON_CPU_GEMM=split     the algorithm divides the sum over K, where that is allowed
  CUDA_ON_CPU_GEMM=aligned   does not support addresses and row strides that are no multiple of 16 bytes: what cuBLASLt
                             supports is not documented, and a trainer must not depend on it
  CUDA_ON_CPU_GEMM=no-fp8    does not support FP8
  CUDA_ON_CPU_GEMM=fails     the first product fails
*/
#pragma once
#include <cuda_fp8.h>
#include <vector>

typedef struct {
    GemmProblem problem;
    const float *scales[2]; // of A and B
} GemmHandles;

static bool gemm_library_started;
static inline void gemm_library_start(void) { gemm_library_started = true; }
static inline void gemm_library_stop(void) { gemm_library_started = false; }
static inline const char *gemm_library(void) { return "CBLAS in the place of cuBLASLt"; }

static inline bool gemm_mode_is(const char *mode) {
    const char *set = getenv("CUDA_ON_CPU_GEMM");
    return set && strcmp(set, mode) == 0;
}

static inline void gemm_describe(GemmHandles *h, const GemmProblem *p) {
    const GemmShape s = p->shape;
    int a_columns = s.transpose_a ? s.M : s.K, b_columns = s.transpose_b ? s.K : s.N;
    CHECK(gemm_library_started, "gemm: a product before gemm_library_start");
    CHECK(s.M > 0 && s.N > 0 && s.K > 0 && s.lda >= a_columns && s.ldb >= b_columns && s.ldc >= s.N && p->count > 0 &&
              p->apart % 128 == 0,
          "gemm: a product of %d x %d x %d with row strides %d, %d, %d is not possible", s.M, s.N, s.K, s.lda, s.ldb,
          s.ldc);
    h->problem = *p, h->scales[0] = h->scales[1] = NULL;
}
static inline void gemm_set_scales(GemmHandles *h, const GemmOperands *x) {
    h->scales[0] = x->A_scale, h->scales[1] = x->B_scale;
}
static inline void gemm_forget(GemmHandles *h) { memset(h, 0xFF, sizeof(*h)); }

// An algorithm is {GEMM_ALGORITHM, in how many parts it sums over K}.
static const uint64_t GEMM_ALGORITHM = 0x6D6D6567;
static inline int gemm_parts_of_k(const GemmAlgorithm *algorithm) { return (int)algorithm->data[1]; }

// Why cuBLASLt does not support a product in FP8, or NULL: the rules of the cuBLAS documentation, "cublasLtMatmul". The
// layout is free for compute capability 10.
static inline const char *gemm_fp8_refusal(const GemmProblem *p) {
    const GemmShape *s = &p->shape;
    const size_t out = s->fp32_out ? sizeof(float) : sizeof(floatX);
    int capability = 0;
    if (p->types[0] == OPERAND_STORED && p->types[1] == OPERAND_STORED) return NULL;
    if (p->types[0] == OPERAND_STORED || p->types[1] == OPERAND_STORED) return "one operand is not in FP8";
    if (p->types[0] == OPERAND_E5M2 && p->types[1] == OPERAND_E5M2) return "both operands are E5M2";
    CUDA_CHECK(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, 0));
    if (capability != 10 && (s->transpose_a || !s->transpose_b)) return "the layout is not TN";
    if (s->M % 16 || s->N % 16 || s->K % 16) return "a size is not a multiple of 16";
    if (s->lda % 16 || s->ldb % 16 || s->ldc * out % 16) return "rows are not aligned to 16 bytes";
    for (int i = 0; i < 3; i++)
        if (p->alignment[i] < 16) return "an address is not aligned to 16 bytes";
    return NULL;
}

static inline bool gemm_accepts(const GemmHandles *h, const GemmProblem *p, const GemmAlgorithm *algorithm) {
    (void)h;
    return !gemm_fp8_refusal(p) && algorithm->data[0] == GEMM_ALGORITHM && algorithm->data[1] >= 1 &&
           algorithm->data[1] <= 4;
}

static inline int gemm_find(GemmAlgorithm *found, int limit, const GemmHandles *h, const GemmProblem *p, bool may_split,
                            const char **why) {
    int pack = 16 / (int)sizeof(floatX);
    const GemmShape *s = &p->shape;
    bool aligned = s->lda % pack == 0 && s->ldb % pack == 0 && s->ldc % (s->fp32_out ? 4 : pack) == 0;
    for (int i = 0; i < 3; i++) aligned = aligned && p->alignment[i] >= 16;
    *why = gemm_in_fp8(p) && !(h->scales[0] && h->scales[1]) ? "a scale is missing" : gemm_fp8_refusal(p);
    if (gemm_in_fp8(p) && gemm_mode_is("no-fp8")) *why = "FP8 is not supported";
    if (*why) return 0;
    if (!aligned && gemm_mode_is("aligned")) {
        *why = "the operands are not aligned";
        return 0;
    }
    memset(found, 0, (size_t)limit * sizeof(*found));
    found[0].data[0] = GEMM_ALGORITHM;
    found[0].data[1] = may_split && gemm_mode_is("split") ? 4 : 1;
    return 1;
}

static inline float gemm_widen_code(uint8_t code, OperandType type) {
    return (float)(__half)__nv_cvt_fp8_to_halfraw(code, type == OPERAND_E4M3 ? __NV_E4M3 : __NV_E5M2);
}
static inline std::vector<float> gemm_widen(const void *x, OperandType type, int rows, int columns, int ld) {
    std::vector<float> wide((size_t)rows * (size_t)columns);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            size_t from = (size_t)r * (size_t)ld + (size_t)c;
            wide[(size_t)r * (size_t)columns + (size_t)c] = type == OPERAND_STORED
                                                                ? (float)((const floatX *)x)[from]
                                                                : gemm_widen_code(((const uint8_t *)x)[from], type);
        }
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

// One part of the sum over K, added to c (M, N).
static inline void gemm_part(GemmShape s, float *c, const float *a, int lda, const float *b, int ldb, int k0, int K) {
    cblas_sgemm(CblasRowMajor, s.transpose_a ? CblasTrans : CblasNoTrans, s.transpose_b ? CblasTrans : CblasNoTrans,
                s.M, s.N, K, 1, a + (size_t)k0 * (s.transpose_a ? (size_t)lda : 1), lda,
                b + (size_t)k0 * (s.transpose_b ? 1 : (size_t)ldb), ldb, 1, c, s.N);
}

// As the library does, a sum in parts leaves out what is no multiple of its tile.
static inline void gemm_run(GemmShape s, int parts, void *C, const GemmOperands &x) {
    float scale = x.A_scale ? *x.A_scale * *x.B_scale : 1;
    int a_rows = s.transpose_a ? s.K : s.M, a_columns = s.transpose_a ? s.M : s.K;
    int b_rows = s.transpose_b ? s.N : s.K, b_columns = s.transpose_b ? s.K : s.N;
    std::vector<float> a = gemm_widen(x.A, x.types[0], a_rows, a_columns, s.lda),
                       b = gemm_widen(x.B, x.types[1], b_rows, b_columns, s.ldb);
    std::vector<float> c((size_t)s.M * (size_t)s.N);
    int K = parts > 1 ? s.K / 128 * 128 : s.K;
    for (int part = 0; part < parts; part++) {
        int begin = (int)((int64_t)K * part / parts), end = (int)((int64_t)K * (part + 1) / parts);
        if (end > begin) gemm_part(s, c.data(), a.data(), a_columns, b.data(), b_columns, begin, end - begin);
    }
    for (int m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++) {
            size_t to = (size_t)m * (size_t)s.ldc + (size_t)n;
            float sum = c[(size_t)m * (size_t)s.N + (size_t)n] * scale;
            if (s.fp32_out) ((float *)C)[to] = sum + (s.add ? ((float *)C)[to] : 0);
            else ((floatX *)C)[to] = (floatX)(sum + (s.add ? (float)((floatX *)C)[to] : 0));
        }
}

static inline void gemm_multiply(const GemmHandles *h, const GemmProblem *p, const GemmAlgorithm *algorithm, void *C,
                                 const GemmOperands *operands, void *workspace) {
    const GemmShape s = p->shape;
    const GemmOperands x = *operands;
    const size_t in = gemm_in_fp8(p) ? 1 : sizeof(floatX);
    int a_rows = s.transpose_a ? s.K : s.M, a_columns = s.transpose_a ? s.M : s.K, parts = gemm_parts_of_k(algorithm);
    int b_rows = s.transpose_b ? s.N : s.K, b_columns = s.transpose_b ? s.K : s.N;
    CHECK(gemm_library_started && workspace, "gemm: a product of %d x %d x %d before gemm_start", s.M, s.N, s.K);
    CHECK(x.A && x.B && C && memcmp(&h->problem, p, sizeof(*p)) == 0, "gemm: a product that was not described");
    CHECK(!gemm_in_fp8(p) || (x.A_scale && x.B_scale && h->scales[0] == x.A_scale && h->scales[1] == x.B_scale),
          "gemm: a product in FP8 without its scales");
    CHECK(!gemm_mode_is("fails"), "cuBLASLt failed: the GPU program failed to execute (planted)");
    CHECK(gemm_accepts(h, p, algorithm), "gemm: this is no algorithm");
    const size_t out = s.fp32_out ? sizeof(float) : sizeof(floatX), count = p->count, apart = p->apart;
    size_t bytes = gemm_extent(s.M, s.N, s.ldc) * out;
    CHECK(!gemm_overlap(C, bytes, x.A, gemm_extent(a_rows, a_columns, s.lda) * in) &&
              !gemm_overlap(C, bytes, x.B, gemm_extent(b_rows, b_columns, s.ldb) * in) &&
              (count == 1 || apart * out >= bytes),
          "gemm: the output overlaps an operand, or the next output");
    cuda_on_cpu::on_stream(main_stream, "gemm", [=] {
        memset(workspace, 0xFF, 4096); // nobody else keeps anything there
        memset((char *)workspace + GEMM_WORKSPACE_BYTES - 4096, 0xFF, 4096);
        GemmOperands of = x;
        for (size_t i = 0; i < count; i++) {
            of.A = (const char *)x.A + i * apart * in, of.B = (const char *)x.B + i * apart * in;
            gemm_run(s, parts, (char *)C + i * apart * out, of);
        }
    });
}
