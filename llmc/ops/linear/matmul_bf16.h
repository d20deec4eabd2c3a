/*
matmul_bf16.h: matrices rounded to bf16 or to FP8 (--matmul-dtype), and products of bf16 matrices with sums in fp32.

  bool bf16_begin(void)                   whether oneDNN multiplies bf16 on this CPU
  void bf16_round_matrix(...)             fp32 to bf16
  void fp8_round_matrix(...)              fp32 to FP8, after multiplication by a factor, stored as bf16
  void ..._round_matrix_wide(...)         rounds to bf16 or FP8, stored as fp32
  void gemm_bf16(shape, A, B, C, scale)   by oneDNN: C = op(A) op(B), or C += ...; with shape.scaled times `scale`

  shapes    op(A) M x K, op(B) K x N, bf16, row-major; C M x N, fp32
  numerics  each element of A and B rounded once, to nearest, ties to even, NaN to NaN; products exact; sums fp32
  memory    the caller provides it for the rounded matrices (linear.h); oneDNN allocates some for packing
  speed     A CPU with AVX512_BF16 multiplies bf16 at least twice as fast as fp32; oneDNN uses AMX where the CPU has it.
            On other CPUs the rounded numbers are stored as fp32 and multiplied in fp32, which gives the same products
            at the speed of fp32 (oneDNN's emulation is five times slower). oneDNN compiles a kernel for the shape of
            each product; the kernels are kept.
  source    the interface of oneDNN's matmul primitive, versions 2 and 3
*/
#pragma once
#include "fp8.h"
#include "operations.h"

typedef uint16_t bf16_t;

// C (M,N) = op(A) op(B), op(A) M x K; row-major with row strides lda, ldb, ldc
typedef struct {
    bool ta, tb, add, scaled;
    int M, N, K, lda, ldb, ldc;
} MatmulShape;

static inline uint32_t bf16_bits(float x) { // in the upper 16 bits; the lower 16 bits are undefined
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bool nan = (bits & 0x7FFFFFFF) > 0x7F800000; // a NaN must not become infinity
    return nan ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1);
}

// in (rows, columns) with row stride ld; out with row stride ldo
static inline void bf16_round_matrix(bf16_t *out, int ldo, const float *in, int ld, int rows, int columns) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        const float *from = in + (size_t)r * ld;
        bf16_t *to = out + (size_t)r * ldo;
        for (int c = 0; c < columns; c++) to[c] = (bf16_t)(bf16_bits(from[c]) >> 16);
    }
}
static inline void bf16_round_matrix_wide(float *out, int ldo, const float *in, int ld, int rows, int columns) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        const float *from = in + (size_t)r * ld;
        float *to = out + (size_t)r * ldo;
        for (int c = 0; c < columns; c++) {
            uint32_t bits = bf16_bits(from[c]) & 0xFFFF0000;
            memcpy(&to[c], &bits, 4);
        }
    }
}

static inline uint32_t fp8_bits(float x, float multiplier, Fp8Format f) {
    float rounded = fp8_round(x * multiplier, f);
    uint32_t bits;
    memcpy(&bits, &rounded, 4);
    return bits;
}
static inline void fp8_round_matrix(bf16_t *out, int ldo, const float *in, int ld, int rows, int columns,
                                    float multiplier, Fp8Format f) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        const float *from = in + (size_t)r * ld;
        bf16_t *to = out + (size_t)r * ldo;
        for (int c = 0; c < columns; c++) to[c] = (bf16_t)(fp8_bits(from[c], multiplier, f) >> 16); // exact
    }
}
static inline void fp8_round_matrix_wide(float *out, int ldo, const float *in, int ld, int rows, int columns,
                                         float multiplier, Fp8Format f) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        const float *from = in + (size_t)r * ld;
        float *to = out + (size_t)r * ldo;
        for (int c = 0; c < columns; c++) to[c] = fp8_round(from[c] * multiplier, f);
    }
}

#ifdef ONEDNN
typedef struct {
    MatmulShape shape;
    dnnl_primitive_t primitive;
    dnnl_memory_t A, B, C, scale;
} Bf16Product;

#ifndef BF16_PRODUCTS
#define BF16_PRODUCTS 64 // more than the shapes of a model; the oldest is replaced
#endif

static struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    Bf16Product products[BF16_PRODUCTS];
    int made; // in total
} bf16_state;

// The parts of the interface that differ between versions: descriptions of memory and products.
#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t Bf16Layout;
static inline bool bf16_layout(Bf16Layout *layout, dnnl_data_type_t type, int rows, int columns, int row_stride,
                               int column_stride) {
    dnnl_dims_t dims = {rows, columns}, strides = {row_stride, column_stride};
    return dnnl_memory_desc_create_with_strides(layout, 2, dims, type, strides) == dnnl_success;
}
static inline void bf16_layout_free(Bf16Layout layout) { dnnl_memory_desc_destroy(layout); }
static inline bool bf16_memory(dnnl_memory_t *memory, Bf16Layout layout) {
    return dnnl_memory_create(memory, layout, bf16_state.engine, DNNL_MEMORY_NONE) == dnnl_success;
}
static inline bool bf16_add_to_result(dnnl_post_ops_t after) {
    return dnnl_post_ops_append_sum(after, 1, 0, dnnl_data_type_undef) == dnnl_success;
}
static inline bool bf16_scale_result(dnnl_post_ops_t after, Bf16Layout scale) {
    return dnnl_post_ops_append_binary(after, dnnl_binary_mul, scale) == dnnl_success;
}
static inline bool bf16_describe(dnnl_primitive_desc_t *description, Bf16Layout A, Bf16Layout B, Bf16Layout C,
                                 dnnl_primitive_attr_t attr) {
    return dnnl_matmul_primitive_desc_create(description, bf16_state.engine, A, B, NULL, C, attr) == dnnl_success;
}
#else
typedef dnnl_memory_desc_t Bf16Layout;
static inline bool bf16_layout(Bf16Layout *layout, dnnl_data_type_t type, int rows, int columns, int row_stride,
                               int column_stride) {
    dnnl_dims_t dims = {rows, columns}, strides = {row_stride, column_stride};
    return dnnl_memory_desc_init_by_strides(layout, 2, dims, type, strides) == dnnl_success;
}
static inline void bf16_layout_free(Bf16Layout layout) { (void)layout; }
static inline bool bf16_memory(dnnl_memory_t *memory, Bf16Layout layout) {
    return dnnl_memory_create(memory, &layout, bf16_state.engine, DNNL_MEMORY_NONE) == dnnl_success;
}
static inline bool bf16_add_to_result(dnnl_post_ops_t after) {
    return dnnl_post_ops_append_sum(after, 1) == dnnl_success;
}
static inline bool bf16_scale_result(dnnl_post_ops_t after, Bf16Layout scale) {
    return dnnl_post_ops_append_binary(after, dnnl_binary_mul, &scale) == dnnl_success;
}
static inline bool bf16_describe(dnnl_primitive_desc_t *description, Bf16Layout A, Bf16Layout B, Bf16Layout C,
                                 dnnl_primitive_attr_t attr) {
    dnnl_matmul_desc_t product;
    return dnnl_matmul_desc_init(&product, &A, &B, NULL, &C) == dnnl_success &&
           dnnl_primitive_desc_create(description, &product, attr, bf16_state.engine, NULL) == dnnl_success;
}
#endif

static inline void bf16_free(Bf16Product *p) {
    dnnl_primitive_destroy(p->primitive);
    dnnl_memory_destroy(p->A);
    dnnl_memory_destroy(p->B);
    dnnl_memory_destroy(p->C);
    dnnl_memory_destroy(p->scale);
    memset(p, 0, sizeof(*p));
}

// Creates the primitive for a shape; false if the library has none for this CPU.
static inline bool bf16_make(Bf16Product *p, MatmulShape s) {
    Bf16Layout A, B, C, scale;
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t after = NULL;
    dnnl_primitive_desc_t description = NULL;
    memset(p, 0, sizeof(*p));
    p->shape = s;
    if (!bf16_layout(&A, dnnl_bf16, s.M, s.K, s.ta ? 1 : s.lda, s.ta ? s.lda : 1)) return false;
    if (!bf16_layout(&B, dnnl_bf16, s.K, s.N, s.tb ? 1 : s.ldb, s.tb ? s.ldb : 1)) return false;
    if (!bf16_layout(&C, dnnl_f32, s.M, s.N, s.ldc, 1)) return false;
    if (!bf16_layout(&scale, dnnl_f32, 1, 1, 1, 1)) return false;
    bool made = dnnl_primitive_attr_create(&attr) == dnnl_success && dnnl_post_ops_create(&after) == dnnl_success &&
                (!s.scaled || bf16_scale_result(after, scale)) && (!s.add || bf16_add_to_result(after)) &&
                dnnl_primitive_attr_set_post_ops(attr, after) == dnnl_success &&
                bf16_describe(&description, A, B, C, attr) &&
                dnnl_primitive_create(&p->primitive, description) == dnnl_success && bf16_memory(&p->A, A) &&
                bf16_memory(&p->B, B) && bf16_memory(&p->C, C) && bf16_memory(&p->scale, scale);
    dnnl_primitive_desc_destroy(description);
    dnnl_post_ops_destroy(after);
    dnnl_primitive_attr_destroy(attr);
    bf16_layout_free(A);
    bf16_layout_free(B);
    bf16_layout_free(C);
    bf16_layout_free(scale);
    if (!made) bf16_free(p);
    return made;
}

static inline Bf16Product *bf16_product(MatmulShape s) {
    int kept = min_int(bf16_state.made, BF16_PRODUCTS);
    for (int i = 0; i < kept; i++) {
        const MatmulShape *has = &bf16_state.products[i].shape;
        if (has->ta == s.ta && has->tb == s.tb && has->add == s.add && has->scaled == s.scaled && has->M == s.M &&
            has->N == s.N && has->K == s.K && has->lda == s.lda && has->ldb == s.ldb && has->ldc == s.ldc)
            return &bf16_state.products[i];
    }
    Bf16Product *p = &bf16_state.products[bf16_state.made % BF16_PRODUCTS];
    if (bf16_state.made >= BF16_PRODUCTS) bf16_free(p);
    CHECK(bf16_make(p, s), "oneDNN has no bf16 product %d x %d x %d on this CPU: use --matmul-dtype fp32", s.M, s.N,
          s.K);
    bf16_state.made++;
    return p;
}

// Whether oneDNN supports such products on this CPU, at any speed.
static inline bool bf16_probe(void) {
    if (bf16_state.engine == NULL && dnnl_engine_create(&bf16_state.engine, dnnl_cpu, 0) != dnnl_success) return false;
    if (bf16_state.stream == NULL &&
        dnnl_stream_create(&bf16_state.stream, bf16_state.engine, dnnl_stream_default_flags) != dnnl_success)
        return false;
    Bf16Product probe;
    MatmulShape shape = {true, false, true, false, 64, 64, 64, 64, 64, 64};
    if (!bf16_make(&probe, shape)) return false;
    bf16_free(&probe);
    return true;
}

static inline bool bf16_begin(void) {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
    return bf16_probe();
}

static inline void gemm_bf16(MatmulShape s, const bf16_t *A, const bf16_t *B, float *C, float scale) {
    Bf16Product *p = bf16_product(s);
    dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, p->A},
                                   {DNNL_ARG_WEIGHTS, p->B},
                                   {DNNL_ARG_DST, p->C},
                                   {DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, p->scale}};
    bool done = dnnl_memory_set_data_handle(p->A, (void *)(uintptr_t)A) == dnnl_success && // read only
                dnnl_memory_set_data_handle(p->B, (void *)(uintptr_t)B) == dnnl_success &&
                dnnl_memory_set_data_handle(p->C, C) == dnnl_success &&
                dnnl_memory_set_data_handle(p->scale, &scale) == dnnl_success &&
                dnnl_primitive_execute(p->primitive, bf16_state.stream, s.scaled ? 4 : 3, arguments) == dnnl_success &&
                dnnl_stream_wait(bf16_state.stream) == dnnl_success;
    CHECK(done, "oneDNN failed to multiply %d x %d x %d in bf16: out of memory?", s.M, s.N, s.K);
}
#else
static inline bool bf16_begin(void) { return false; }
#endif
