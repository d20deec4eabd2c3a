/*
dtype.h: element types in files, and conversion between them.

  const DTypeInfo dtype_table[]                          name in safetensors, name in config.json, size in bytes
  DType dtype_find(const char *name)                     by the name in safetensors; DTYPE_COUNT if unknown
  DType DTYPE_OF(type)                                   type of floatX, real or grad_t: 2 bytes BF16, 4 F32, 8 F64
  void  convert_elements(dst, DType, src, DType, n)      host memory; dst and src do not overlap

  format     F64, F32, F16: IEEE 754 binary64, binary32, binary16; BF16: the upper half of a binary32
  numerics   The exact source value is rounded once, to nearest, ties to even. Overflow gives infinity. Subnormals are
             kept. A NaN stays a quiet NaN with its sign and leading mantissa bits.
*/
#pragma once
#include "common.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian and are read without byte swapping");

typedef enum { DTYPE_F64, DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_COUNT } DType;

typedef struct {
    const char *name, *torch_name;
    size_t size; // bytes of an element
} DTypeInfo;

static const DTypeInfo dtype_table[DTYPE_COUNT] = {
    {"F64", "float64", 8},
    {"F32", "float32", 4},
    {"BF16", "bfloat16", 2},
    {"F16", "float16", 2},
};

#define DTYPE_OF(type) (sizeof(type) == 2 ? DTYPE_BF16 : sizeof(type) == 4 ? DTYPE_F32 : DTYPE_F64)

static inline size_t dtype_size(DType t) { return dtype_table[t].size; }

static inline DType dtype_find(const char *name) {
    for (int t = 0; t < DTYPE_COUNT; t++)
        if (strcmp(dtype_table[t].name, name) == 0) return (DType)t;
    return DTYPE_COUNT;
}

// BF16 and F16 differ only in the number of exponent bits. A double represents all of their values.
static inline double half_to_double(uint16_t h, int exponent_bits) {
    int mantissa_bits = 15 - exponent_bits, top = (1 << exponent_bits) - 1, bias = top / 2;
    uint64_t sign = (uint64_t)(h >> 15) << 63, mantissa = h & ((1u << mantissa_bits) - 1), bits;
    int exponent = (h >> mantissa_bits) & top;
    double x;
    if (exponent == 0) { // mantissa * 2^(1 - bias - mantissa_bits)
        bits = (uint64_t)(1023 + 1 - bias - mantissa_bits) << 52;
        memcpy(&x, &bits, 8);
        x *= (double)mantissa;
        return sign ? -x : x;
    }
    bits = sign | (uint64_t)(exponent == top ? 2047 : exponent - bias + 1023) << 52 | mantissa << (52 - mantissa_bits);
    memcpy(&x, &bits, 8);
    return x;
}

static inline uint16_t double_to_half(double x, int exponent_bits) {
    int mantissa_bits = 15 - exponent_bits, top = (1 << exponent_bits) - 1, bias = top / 2;
    uint64_t bits;
    memcpy(&bits, &x, 8);
    unsigned sign = (unsigned)(bits >> 63) << 15, infinity = (unsigned)top << mantissa_bits;
    uint64_t magnitude = bits & ~(1ull << 63), mantissa = magnitude & ((1ull << 52) - 1);
    int exponent = (int)(magnitude >> 52) - 1023;
    if (exponent == 1024 && mantissa)
        return (uint16_t)(sign | infinity | 1u << (mantissa_bits - 1) | (unsigned)(mantissa >> (52 - mantissa_bits)));
    if (exponent > bias) return (uint16_t)(sign | infinity);

    uint64_t significand = mantissa | (exponent > -1023 ? 1ull << 52 : 0);
    int smallest = 1 - bias, shift = 52 - mantissa_bits; // bits to drop; subnormal results drop more
    if (exponent < smallest) shift += smallest - exponent;
    if (shift > 53) return (uint16_t)sign; // less than half of the smallest subnormal
    uint64_t kept = significand >> shift, rest = significand & ((1ull << shift) - 1), midpoint = 1ull << (shift - 1);
    kept += rest > midpoint || (rest == midpoint && (kept & 1));
    // a carry out of the mantissa increments the exponent, possibly to infinity
    if (exponent >= smallest) kept += (uint64_t)(exponent - smallest) << mantissa_bits;
    return (uint16_t)(sign | (unsigned)kept);
}

enum { BF16_EXPONENT_BITS = 8, F16_EXPONENT_BITS = 5 };

// memcpy: elements of a file need not be aligned
static inline double element_load(const unsigned char *p, DType t) {
    double d;
    float f;
    uint16_t h;
    switch (t) {
    case DTYPE_F64: memcpy(&d, p, 8); return d;
    case DTYPE_F32: memcpy(&f, p, 4); return (double)f;
    case DTYPE_BF16: memcpy(&h, p, 2); return half_to_double(h, BF16_EXPONENT_BITS);
    case DTYPE_F16: memcpy(&h, p, 2); return half_to_double(h, F16_EXPONENT_BITS);
    default: break;
    }
    assert(!"a known element type");
    return 0;
}

static inline void element_store(unsigned char *p, DType t, double x) {
    float f = (float)x;
    uint16_t h;
    switch (t) {
    case DTYPE_F64: memcpy(p, &x, 8); return;
    case DTYPE_F32: memcpy(p, &f, 4); return;
    case DTYPE_BF16: h = double_to_half(x, BF16_EXPONENT_BITS), memcpy(p, &h, 2); return;
    case DTYPE_F16: h = double_to_half(x, F16_EXPONENT_BITS), memcpy(p, &h, 2); return;
    default: assert(!"a known element type");
    }
}

static inline void convert_elements(void *dst, DType dst_type, const void *src, DType src_type, size_t n) {
    unsigned char *to = (unsigned char *)dst;
    const unsigned char *from = (const unsigned char *)src;
    size_t to_size = dtype_size(dst_type), from_size = dtype_size(src_type);
    if (dst_type == src_type) {
        if (n) memcpy(to, from, n * to_size);
        return;
    }
#pragma omp parallel for schedule(static) if (n >= 65536)
    for (size_t i = 0; i < n; i++)
        element_store(to + i * to_size, dst_type, element_load(from + i * from_size, src_type));
}
