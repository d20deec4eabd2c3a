/*
mma.cuh: a product of small matrices on the tensor cores, by a warp: bf16 operands (sm_80 and later) or FP8 (sm_89 and
later), sums in fp32.

  mma_bf16         c (16,8) += a (16,16) b (16,8)
  mma_fp8<TYPE>    c (16,8) += a (16,32) b (32,8), a of this type, b in E4M3. Native on sm_89 and sm_120: QMMA.16832.
                   ptxas 13.0 translates it for sm_90 and sm_100 to conversions to fp16, which are exact, and two
                   HMMA.16816: the rate of bf16, less the conversions
  matrices_load    four matrices of 8 x 8 bf16 from shared memory; lane 8j + i gives the address, a multiple of 16, of
                   row i of matrix j. to[j] of lane 4g + r: columns 2r and 2r+1 of row g of matrix j, or, transposed,
                   rows 2r and 2r+1 of column g

Lane 4g + r holds these elements, two bf16 in an unsigned, the first in its low half:
  a[0] row g, a[1] row g+8, columns 2r and 2r+1;  a[2], a[3] the same rows, columns 2r+8 and 2r+9
  b[0] rows 2r and 2r+1, b[1] rows 2r+8 and 2r+9 of column g
  c[0], c[1] row g, c[2], c[3] row g+8, columns 2r and 2r+1
The columns of a and rows of b may be in any order, if it is the same for both. With FP8 each bf16 is a pair of codes.
  source     PTX ISA, "Matrix Fragments for mma.m16n8k16", "... m16n8k32" and "ldmatrix"
*/
#pragma once
#include "gemm_shape.cuh"
#include "kernel_utils.cuh"

static __device__ inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef CUDA_ON_CPU
    cuda_on_cpu_mma(c, a, b);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

template <OperandType TYPE>
static __device__ inline void mma_fp8(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef CUDA_ON_CPU
    cuda_on_cpu_mma_fp8(c, a, b, TYPE == OPERAND_E4M3);
#elif __CUDA_ARCH__ >= 890
    if (TYPE == OPERAND_E4M3)
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    (void)c, (void)a, (void)b;
    __trap(); // linear_configure refuses such devices and such code
#endif
}

template <bool TRANSPOSED> static __device__ inline void matrices_load(unsigned (&to)[4], const void *row) {
#ifdef CUDA_ON_CPU
    cuda_on_cpu_ldmatrix(to, row, TRANSPOSED);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
#endif
}

// The bits of two numbers rounded to bf16, the first in the low half.
static __device__ inline unsigned bf16_pair(float first, float second) {
    __nv_bfloat16 pair[2] = {__float2bfloat16_rn(first), __float2bfloat16_rn(second)};
    unsigned bits;
    memcpy(&bits, pair, sizeof(bits));
    return bits;
}
static __device__ inline float bf16_first(unsigned pair) { return __uint_as_float(pair << 16); }
static __device__ inline float bf16_second(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }
