/*
cuda_linear.h: FP8 on the device, where NVIDIA's conversion rounds: codes and scales equal the twin's bit for bit.
*/
#pragma once
#include "cuda_engine.h"

// The number of a code, from the definition of the format: sign, exponent, mantissa.
static double fp8_decode(unsigned char code, Fp8Format f) {
    int mantissa_bits = fp8_formats[f].mantissa_bits, smallest = fp8_formats[f].smallest_exponent;
    int mantissa = code & ((1 << mantissa_bits) - 1), exponent = (code & 0x7F) >> mantissa_bits;
    bool nan = f == FP8_E4M3 ? (code & 0x7F) == 0x7F : exponent == 31 && mantissa;
    double size = exponent ? ldexp((1 << mantissa_bits) + mantissa, exponent - 1 + smallest - mantissa_bits)
                           : ldexp(mantissa, smallest - mantissa_bits);
    if (f == FP8_E5M2 && exponent == 31) size = INFINITY; // never stored
    return nan ? NAN : code & 0x80 ? -size : size;
}

static absmax_t twin_absmax(const Operand &x, int rows, int columns, int ld) {
    twin::absmax_t max = 0;
    twin::absmax_update(twin::activation(x.twin.data(), &max), rows, columns, ld);
    return max;
}

static bool same_bits(double a, double b) { return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b); }

// Every code of the matrix (rows, columns) or, with `across`, of its transpose, and zeros in the padding.
static void expect_codes(const char *what, const Operand &codes, const Operand &x, int rows, int columns, int ld,
                         absmax_t max, Fp8Format f, bool across) {
    size_t padded_rows = fp8_padded(rows), padded_columns = fp8_padded(columns), wrong = 0;
    for (size_t r = 0; r < padded_rows; r++)
        for (size_t c = 0; c < padded_columns; c++) {
            bool inside = r < (size_t)rows && c < (size_t)columns;
            double want = twin_rounded(inside ? x.twin[r * (size_t)ld + c] : 0, max, f, false); // NaN if max is
            unsigned char code = codes.result[codes.begin + (across ? c * padded_rows + r : r * padded_columns + c)];
            if (same_bits(fp8_decode(code, f), want)) continue;
            EXPECT(wrong++ > 0, "%s: [%zu,%zu] is %.9g, the twin's %.9g", what, r, c, fp8_decode(code, f), want);
        }
    EXPECT(wrong == 0, "%s: %zu codes are wrong", what, wrong);
}

// Special tensors: random numbers of all magnitudes, and the following values.
enum { FP8_PLAIN, FP8_ZERO, FP8_INF, FP8_NAN, FP8_TINY, FP8_BEYOND, FP8_TIES, FP8_SPECIALS };

static void fill_for_fp8(Operand &x, int rows, int columns, int ld, int special) {
    for (int r = 0; r < rows; r++) // with the columns beyond, which are not read
        for (int c = 0; c < ld; c++) {
            double v = test_random_real(&test_random) * exp2(12 * test_random_real(&test_random));
            if (special == FP8_ZERO) v = c % 2 ? -0.0 : 0;
            if (special == FP8_TINY) v = ldexp(v, -135); // many are subnormal in fp32
            if (special == FP8_TIES)
                v = ldexp(test_random_int(&test_random, 127) - 63, test_random_int(&test_random, 32) - 18);
            x.set(product(r, ld) + (size_t)c, c < columns ? v : NAN);
        }
    size_t last = product(rows - 1, ld) + (size_t)columns - 1;
    if (special == FP8_INF) x.set(last, -INFINITY);
    if (special == FP8_NAN) x.set(last, NAN);
}

// absmax_update and fp8_quantize. n: rows, columns, columns that are not read
static void check_fp8_quantize(const Case *c) {
    int rows = c->n[0], columns = c->n[1], ld = columns + c->n[2];
    for (int way = 0; way < 2 * FP8_SPECIALS; way++) {
        int special = way / 2, outputs = way % 3; // both; codes; their transpose
        Fp8Format f = way % 2 ? FP8_E5M2 : FP8_E4M3;
        Operands o(c->shift);
        size_t words = fp8_padded(rows) * fp8_padded(columns) / sizeof(float);
        Operand &x = o.in("x", product(rows, ld)), &max = o.updated_fp32("max", 1), &scale = o.out_fp32("scale", 1),
                &codes = o.out_fp32("codes", words), &across = o.out_fp32("transposed codes", words);
        fill_for_fp8(x, rows, columns, ld, special);
        max.set(0, 0);
        absmax_t given = twin_absmax(x, rows, columns, ld);
        if (special == FP8_BEYOND) given = 0x3C000000; // 2^-7: most numbers are beyond the largest
        if (special == FP8_TIES) memcpy(&given, &fp8_formats[f].largest, sizeof(given)); // nothing is scaled
        Fp8Codes to = {outputs == 2 ? nullptr : (uint8_t *)codes.at(), outputs == 1 ? nullptr : (uint8_t *)across.at(),
                       scale.f()};
        o.run(0, [&] {
            if (special >= FP8_BEYOND) buffer_upload(max.at(), &given, sizeof(given));
            else absmax_update(activation(x.x(), (absmax_t *)max.at()), rows, columns, ld);
            fp8_quantize(to, activation(x.x(), (absmax_t *)max.at()), rows, columns, ld, f);
        });
        absmax_t got;
        memcpy(&got, &max.result[max.begin], sizeof(got));
        bool both_nan = got > 0x7F800000 && given > 0x7F800000;
        EXPECT(got == given || both_nan, "way %d: the largest magnitude is %08x, the twin's %08x", way, got, given);
        double want = (double)twin::fp8_scale(given, (twin::Fp8Format)f), is = scale.value(scale.result, 0);
        EXPECT(same_bits(is, want), "way %d: the scale is %.9g, the twin's %.9g", way, is, want);
        if (to.codes) expect_codes("codes", codes, x, rows, columns, ld, given, f, false);
        if (to.transposed) expect_codes("transposed codes", across, x, rows, columns, ld, given, f, true);
    }
}
static const Check fp8_quantize_check = {"fp8_quantize", check_fp8_quantize, "rows columns gap"};
