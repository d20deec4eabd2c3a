/*
absmax.h: the largest magnitude of a tensor, for its scale in FP8 (fp8.h).

  absmax_t  the bits of a nonnegative fp32 number: as integers they have the order of the numbers, with NaN above
            infinity, so a maximum does not depend on the order of its arguments
*/
#pragma once
#include "ops.h"

static inline void absmax_update(Activation x, int N, int columns, int ld) {
    if (!x.max) return;
    uint32_t largest = *x.max;
#pragma omp parallel for schedule(static) reduction(max : largest)
    for (int n = 0; n < N; n++) {
        const floatX *row = x.data + (size_t)n * ld;
        for (int c = 0; c < columns; c++) {
            float value = (float)row[c];
            uint32_t bits;
            memcpy(&bits, &value, sizeof(bits));
            bits &= 0x7FFFFFFF;
            largest = bits > largest ? bits : largest;
        }
    }
    *x.max = largest;
}
