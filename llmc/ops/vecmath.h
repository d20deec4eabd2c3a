/*
vecmath.h: exp as an arithmetic expression, so that compilers vectorize the loops that call it.

  exp(x) = 2^n exp(r),  n = round(x / ln 2),  r = x - n ln 2 in [-ln2/2, ln2/2]
  exp(r) by its Taylor polynomial of degree 7: the first omitted term is below 2^-27 of the result.

  numerics  fp32: relative error below 2 ulp for -87.3 <= x <= 88.3; 0 below, saturated at 2.2e38 above (never inf); NaN
            gives NaN. fp64 calls libm.
*/
#pragma once
#include "ops.h"

static inline float exp_float(float x) {
    const float round_magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    float clamped = x < -87.3f ? -87.3f : x;
    clamped = clamped > 88.3f ? 88.3f : clamped;
    float shifted = clamped * 1.44269504f + round_magic;
    float n = shifted - round_magic;
    float r = clamped - n * 0.693359375f; // ln 2 in two parts: the first has 10 bits, so the product is exact
    r = r - n * -2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits + 127u) << 23; // 2^n: the low bits of `shifted` are n, the others are shifted out
    float power;
    memcpy(&power, &bits, sizeof(power));
    return x < -87.3f ? 0.0f : p * power;
}

static inline real real_exp(real x) { return sizeof(real) == 4 ? (real)exp_float((float)x) : (real)exp((double)x); }
static inline real real_sigmoid(real x) { return 1 / (1 + real_exp(-x)); }
