/*
linear.cuh: a linear layer without bias whose operands are rounded as --matmul-dtype says. Equations in linear.h.

  y = x8 w8^T,   dx = dy8 w8,   dweight = dy8^T x8, each times the scales of its operands

  layout     cuBLASLt multiplies FP8 matrices that are contiguous along K only (gemm_shape.cuh): forward x8 (N,IC) by w8
             (OC,IC); dx: dy8 (N,OC) by w8^T (IC,OC); dweight: dy8^T (OC,N) by x8^T (IC,N). fp8_quantize makes the
             transposed codes in the same pass.
  copy       {scale and largest magnitude, w8, w8^T}, made once per update
  workspace  the codes of x and dy, and a piece of an output
  padding    N, IC and OC are padded to multiples of 16 with zeros. Where an output has other sizes, or its rows are not
             aligned to 16 bytes, the product is written to the workspace, some rows at a time, and copied. Columns of
             y between OC and ld belong to the padding: zeros are written there.
  numerics   sums in fp32; y and dx are rounded once to floatX; dweight accumulates in fp32
*/
#pragma once
#include "../../cuda/device_peak.h"
#include "fp8.cuh"
#include "matmul.cuh"
#include "operations.h"

static inline bool linear_native(void) { return true; }
static GemmType linear_type;
static bool linear_fp8_experts;

static inline const char *linear_configure(GemmType type) {
    static char text[400];
    int count = 0, index = 0;
    cudaDeviceProp facts;
    cudaFuncAttributes code;
    linear_type = type;
    linear_fp8_experts = true;
    if (type != GEMM_FP8) return NULL;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) { // a dry run without a device
        cudaGetLastError();
        return NULL;
    }
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaGetDeviceProperties(&facts, index));
    if (sizeof(floatX) == 2) // in fp32 experts have no tensor cores
        linear_fp8_experts = generation_mma_fp8[device_generation(facts.major, facts.minor)];
    CUDA_CHECK(cudaFuncGetAttributes(&code, absmax_clear_kernel)); // kernels of experts stop without FP8 instructions
    if (10 * facts.major + facts.minor < 89)
        FORMAT(text, "requires a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell); %.250s has %d.%d",
               facts.name, facts.major, facts.minor);
    else if (code.ptxVersion < 89)
        FORMAT(text,
               "this GPU runs the program's code for %d.%d, and 8.9 or higher is required: compile with ARCHS=%d%d",
               code.ptxVersion / 10, code.ptxVersion % 10, facts.major, facts.minor);
    else return NULL;
    return text;
}
static inline bool linear_in_fp8(void) { return linear_type == GEMM_FP8; }
static inline bool linear_experts_in_fp8(void) { return linear_in_fp8() && linear_fp8_experts; }

static inline size_t linear_copy_bytes(int IC, int OC, bool plain) {
    return linear_in_fp8() && !plain ? fp8_copy_bytes(IC, OC) : 0;
}
static inline size_t linear_workspace_bytes(int N, int IC, int OC) {
    return linear_in_fp8() ? fp8_workspace_bytes(N, IC, OC) : 0;
}

static inline void linear_copy_weight(const Linear *w) {
    OPERATION();
    const MatrixBatch one = {1, 0, 0};
    fp8_copy_weights(w->copy, w->weight, w->IC, w->OC, one);
}

// to[n,:] = from[n,:], or +=       to (rows, columns) with row stride ld
template <typename T>
static __global__ void linear_piece_kernel(T *to, const T *from, int columns, int ld, int from_ld, bool add) {
    T *row = to + (size_t)blockIdx.x * ld;
    for (int c = (int)threadIdx.x; c < columns; c += (int)blockDim.x) {
        T value = from[(size_t)blockIdx.x * from_ld + c];
        row[c] = add ? (T)((float)row[c] + (float)value) : value;
    }
}

// C (M, N) = A B^T, or C +=, times the scales; A and B are codes with rows of K, padded. piece: memory for some rows
template <typename T>
static inline void linear_product(T *C, int M, int N, int K, int ldc, bool add, GemmOperands operands, char *piece) {
    int padded_n = (int)fp8_padded(N), padded_k = (int)fp8_padded(K);
    bool fp32_out = sizeof(T) == sizeof(float);
    if (M % FP8_ALIGN == 0 && N == padded_n && (uintptr_t)C % 16 == 0 && ldc * sizeof(T) % 16 == 0) {
        GemmShape whole = {false, true, add, fp32_out, M, N, padded_k, padded_k, padded_k, ldc};
        gemm_fp8(whole, C, operands);
        return;
    }
    int rows = (int)fp8_piece_rows(M, N, sizeof(T));
    for (int m = 0; m < M; m += rows) {
        int some = min_int(rows, M - m), padded_some = (int)fp8_padded(some);
        GemmShape part = {false, true, false, fp32_out, padded_some, padded_n, padded_k, padded_k, padded_k, padded_n};
        GemmOperands from = operands;
        from.A = (const uint8_t *)operands.A + (size_t)m * padded_k;
        gemm_fp8(part, piece, from);
        LAUNCH(linear_piece_kernel<T>, some, 256, 0, C + (size_t)m * ldc, (const T *)(const void *)piece, N, ldc,
               padded_n, add);
    }
}

static inline GemmOperands linear_operands(const uint8_t *A, const uint8_t *B, Fp8Codes a, Fp8Codes b,
                                           OperandType type) {
    GemmOperands operands = {A, B, a.scale, b.scale, {type, OPERAND_E4M3}};
    return operands;
}

static inline void linear_forward(floatX *y, Activation x, const Linear *w, int N) {
    OPERATION();
    if (!w->copy) {
        matmul_forward(y, x.data, w->weight, N, w->IC, w->OC, w->ld);
        return;
    }
    char *memory = (char *)ops_workspace_take(linear_workspace_bytes(N, w->IC, w->OC)), *copy = (char *)w->copy;
    Fp8Codes x8 = fp8_codes_at(&memory, N, w->IC, false), w8 = fp8_codes_at(&copy, w->OC, w->IC, true);
    int width = (int)fp8_padded(w->OC) <= w->ld ? (int)fp8_padded(w->OC) : w->OC; // q, k, v, lambda: no copy
    fp8_quantize(x8, x, N, w->IC, w->IC, FP8_ACTIVATION);
    linear_product(y, N, width, w->IC, w->ld, false, linear_operands(x8.codes, w8.codes, x8, w8, OPERAND_E4M3), memory);
}

static inline void linear_backward(floatX *dx, Activation dy, Activation x, const Linear *w, int N, bool add) {
    OPERATION();
    if (!w->copy) {
        matmul_backward(dx, w->dweight, dy.data, x.data, w->weight, N, w->IC, w->OC, w->ld, add);
        return;
    }
    char *memory = (char *)ops_workspace_take(linear_workspace_bytes(N, w->IC, w->OC)), *copy = (char *)w->copy;
    Fp8Codes x8 = fp8_codes_at(&memory, N, w->IC, false), dy8 = fp8_codes_at(&memory, N, w->OC, true),
             w8 = fp8_codes_at(&copy, w->OC, w->IC, true);
    x8.transposed = x8.codes, x8.codes = NULL;
    fp8_quantize(x8, x, N, w->IC, w->IC, FP8_ACTIVATION);
    fp8_quantize(dy8, dy, N, w->OC, w->ld, FP8_GRADIENT);
    linear_product(dx, N, w->IC, w->OC, w->IC, false, // dx = dy weight
                   linear_operands(dy8.codes, w8.transposed, dy8, w8, OPERAND_E5M2), memory);
    linear_product(w->dweight, w->OC, w->IC, N, w->IC, add, // dweight = dy^T x
                   linear_operands(dy8.transposed, x8.transposed, dy8, x8, OPERAND_E5M2), memory);
}

// Name, version and types of the library, for run.json.
static inline const char *matmul_library(void) {
    static char text[160];
    FORMAT(text, "%s, %s%s", gemm_library(), sizeof(floatX) == 2 ? "bf16 with fp32 sums" : "fp32",
           linear_in_fp8() ? ", in the blocks fp8: E4M3, gradients E5M2" : "");
    return text;
}
