/*
fp8.h: numbers of 8 bits, and the scales that tensors need to be stored in them.

  fp8_round(x, format)        x rounded to the nearest number of the format, ties to even; larger x become the largest
                              number (saturation), NaN stays NaN
  fp8_scale(max, format)      the scale of a tensor whose largest magnitude is max. An element x is stored as
                              fp8_round(x * (largest number / max)), and the stored number times the scale is about x.

  formats   E4M3: 4 bits of exponent, 3 of mantissa, largest number 448, no infinity: weights and activations
            E5M2: 5 and 2 bits, 57344: gradients
  scale     one per tensor, from its own largest magnitude (just-in-time scaling). A tensor of zeros has the scale of
            FP8_SMALLEST. With an infinity or a NaN in the tensor, all products with it are NaN.
  numerics  one fp32 division per tensor, one fp32 product and one rounding per element, on the CPU and on a GPU
  source    Micikevicius et al. 2022, "FP8 Formats for Deep Learning"
*/
#ifndef LLMC_FP8_H
#define LLMC_FP8_H
#include "operations.h"

typedef enum { FP8_E4M3, FP8_E5M2 } Fp8Format;
static const Fp8Format FP8_WEIGHT = FP8_E4M3, FP8_ACTIVATION = FP8_E4M3, FP8_GRADIENT = FP8_E5M2;

static const struct {
    int mantissa_bits, smallest_exponent; // smallest_exponent: the smallest of normal numbers
    float largest;
} fp8_formats[] = {{3, -6, 448}, {2, -14, 57344}};

#define FP8_SMALLEST 0x1p-100f // smaller maxima are treated as this number, whose quotients are finite

static inline float absmax_value(absmax_t max) {
    float value;
    memcpy(&value, &max, sizeof(value));
    return fabsf(value) < FP8_SMALLEST ? FP8_SMALLEST : value; // NaN stays NaN
}
static inline float fp8_multiplier(absmax_t max, Fp8Format f) { return fp8_formats[f].largest / absmax_value(max); }
static inline float fp8_scale(absmax_t max, Fp8Format f) { return absmax_value(max) / fp8_formats[f].largest; }

// Adding 1.5 * 2^23 units and subtracting it again rounds to a multiple of the unit, as fp32 sums round to even.
static inline float fp8_round(float x, Fp8Format f) {
    const float largest = fp8_formats[f].largest, magnitude = fabsf(x);
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof(bits));
    // the exponent of x, or of the smallest normal number if that is larger; then 1.5 * 2^23 times the unit there
    int32_t exponent = (int32_t)(bits >> 23) - 127, smallest = fp8_formats[f].smallest_exponent;
    exponent = exponent > smallest ? exponent : smallest;
    bits = (uint32_t)(exponent - fp8_formats[f].mantissa_bits + 23 + 127) << 23 | 0x400000;
    float big;
    memcpy(&big, &bits, sizeof(big));
    float rounded = magnitude > largest ? largest : (magnitude + big) - big; // NaN + big is NaN
    return copysignf(rounded, x);
}

#endif
