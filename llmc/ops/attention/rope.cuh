/*
rope.cuh: rotary position embedding. Equations in rope.h.

  mapping   a thread computes a pack of a head's first half and the same pack of its second half; in bf16 4 elements of
            each if D/2 is not a multiple of a pack (D % 16 == 8)
  numerics  angles in double on the host, rounded once into the fp32 table; each result rounded once
  traffic   D in and out per (n, head), D fp32 of the table per row (from the cache for all heads but the first)
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

// One row per block; its columns are the first halves of the heads: (heads, D/2).
template <int W>
static __global__ void rope_kernel(floatX *x, const real *table, int T, int heads, int D, int ldx, int stride,
                                   const int *first, real sign) {
    unsigned n = blockIdx.x, pairs = (unsigned)D / 2, column = column_index<W>(), head = column / pairs,
             i = column % pairs;
    if (head >= (unsigned)heads) return;
    const real *cosines = table + ((first ? (unsigned)first[n / (unsigned)T] : 0) + n % (unsigned)T) * (size_t)D + i;
    floatX *x1 = x + n * (size_t)ldx + head * (size_t)stride + i, *x2 = x1 + pairs;
    float a[W], b[W], c[W], s[W], a_new[W], b_new[W];
    load<W>(a, x1);
    load<W>(b, x2);
    load_fp32<W>(c, cosines);
    load_fp32<W>(s, cosines + pairs);
    UNROLL
    for (int k = 0; k < W; k++) {
        a_new[k] = a[k] * c[k] - b[k] * (sign * s[k]);
        b_new[k] = b[k] * c[k] + a[k] * (sign * s[k]);
    }
    store<W>(x1, a_new);
    store<W>(x2, b_new);
}

static inline void rope_rotate(floatX *x, const real *table, int B, int T, int heads, int D, int ldx, int head,
                               const int *first, real sign) {
    int rows = B * T, columns = heads * (D / 2);
    uintptr_t places = (uintptr_t)x | (size_t)(ldx | head | D / 2) * sizeof(floatX); // their common bits
    if (places % 16 == 0 && packed(0, table))
        LAUNCH_COLUMNS_OF(PACK, rope_kernel<PACK>, rows, columns, x, table, T, heads, D, ldx, head, first, sign);
    else if (D % 8 == 0 && places % (4 * sizeof(floatX)) == 0 && packed(0, table)) // D = 40 or 72 in bf16
        LAUNCH_COLUMNS_OF(4, rope_kernel<4>, rows, columns, x, table, T, heads, D, ldx, head, first, sign);
    else LAUNCH_COLUMNS_OF(1, rope_kernel<1>, rows, columns, x, table, T, heads, D, ldx, head, first, sign);
}
static inline void rope_forward(floatX *x, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                const int *first) {
    OPERATION();
    rope_rotate(x, table, B, T, heads, D, ldx, head, first, 1);
}
static inline void rope_backward(floatX *dx, const real *table, int B, int T, int heads, int D, int ldx, int head,
                                 const int *first) {
    OPERATION();
    rope_rotate(dx, table, B, T, heads, D, ldx, head, first, -1);
}
