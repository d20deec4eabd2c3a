/*
safetensors.h: tests of types of numbers (llmc/base/dtype.h) and of safetensors files (llmc/checkpoint/safetensors.h).
*/
#pragma once
#include "checkpoint_files.h"

// ---------------------------------------------------------------------------------------------------------------------
// dtype.h

enum { CKPT_HALVES = 65536 };

// The number a 16-bit pattern stands for, from the definition of the format.
static double ckpt_half_value(unsigned h, int exponent_bits) {
    int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = (int)(h & 0x7FFF) >> mantissa_bits, mantissa = (int)(h & ((1u << mantissa_bits) - 1));
    double x = exponent == 0 ? ldexp(mantissa, 1 - bias - mantissa_bits)
                             : ldexp(1 + ldexp(mantissa, -mantissa_bits), exponent - bias);
    if (exponent == 2 * bias + 1) x = mantissa ? NAN : INFINITY;
    return copysign(x, h & 0x8000 ? -1 : 1);
}

static void test_half_round_trip(void) {
    const DType halves[] = {DTYPE_BF16, DTYPE_F16}, wide[] = {DTYPE_F32, DTYPE_F64};
    uint16_t *h = (uint16_t *)checked_calloc(2 * CKPT_HALVES, 2), *back = h + CKPT_HALVES;
    void *x = checked_calloc(CKPT_HALVES, 8);
    double *value = (double *)checked_calloc(CKPT_HALVES, 8);
    for (int i = 0; i < CKPT_HALVES; i++) h[i] = (uint16_t)i;
    for (int t = 0; t < 2; t++)
        for (int w = 0; w < 2; w++) {
            unsigned quiet = t == 0 ? 0x40 : 0x200;
            convert_elements(x, wide[w], h, halves[t], CKPT_HALVES);
            convert_elements(value, DTYPE_F64, x, wide[w], CKPT_HALVES);
            convert_elements(back, halves[t], x, wide[w], CKPT_HALVES);
            for (unsigned i = 0; i < CKPT_HALVES; i++) {
                double want = ckpt_half_value(i, t == 0 ? 8 : 5);
                EXPECT(isnan(want) ? isnan(value[i]) : value[i] == want && !signbit(value[i]) == !signbit(want),
                       "%s %04x is %g, not %g", dtype_table[halves[t]].name, i, value[i], want);
                unsigned same = isnan(want) ? i | quiet : i;
                EXPECT(back[i] == same, "%s %04x comes back through %s as %04x", dtype_table[halves[t]].name, i,
                       dtype_table[wide[w]].name, (unsigned)back[i]);
            }
        }
    free(h);
    free(x);
    free(value);
}

static void test_half_rounding(void) {
    const DType halves[] = {DTYPE_BF16, DTYPE_F16}, wide[] = {DTYPE_F32, DTYPE_F64};
    const int exponents[] = {8, 5};
    for (int t = 0; t < 2; t++)
        for (int w = 0; w < 2; w++)
            for (unsigned h = 0; h < CKPT_HALVES; h++) {
                unsigned infinity = t == 0 ? 0x7F80 : 0x7C00, magnitude = h & 0x7FFF;
                if (magnitude >= infinity) continue;
                // between h and the next pattern; above the largest number this is the place where infinity begins
                double a = ckpt_half_value(magnitude, exponents[t]), b = ckpt_half_value(magnitude + 1, exponents[t]);
                if (magnitude + 1 == infinity) b = t == 0 ? 0x1p128 : 0x1p16;
                double middle = copysign(a + (b - a) / 2, h & 0x8000 ? -1 : 1), x[3] = {0, middle, 0};
                x[0] = w == 0 ? (double)nextafterf((float)middle, 0) : nextafter(middle, 0);
                x[2] = w == 0 ? (double)nextafterf((float)middle, copysignf(INFINITY, (float)middle))
                              : nextafter(middle, copysign(INFINITY, middle));
                float f[3] = {(float)x[0], (float)x[1], (float)x[2]};
                uint16_t got[3];
                convert_elements(got, halves[t], w == 0 ? (const void *)f : (const void *)x, wide[w], 3);
                EXPECT(got[0] == h && got[1] == h + (h & 1) && got[2] == h + 1,
                       "%s to %s: below, at and above the middle of %04x and the next: %04x %04x %04x",
                       dtype_table[wide[w]].name, dtype_table[halves[t]].name, h, got[0], got[1], got[2]);
            }
}

static void test_half_single_rounding(void) {
    // just above a tie of F16 and of BF16; the nearest F32 is the tie itself, which would go down
    const double x[] = {1 + 0x1p-11 + 0x1p-40, 1 + 0x1p-8 + 0x1p-40, 1e300, -1e-300, 0x1.fffffffp127, -NAN};
    uint16_t h[6], b[6];
    float f[6];
    convert_elements(h, DTYPE_F16, x, DTYPE_F64, 6);
    convert_elements(b, DTYPE_BF16, x, DTYPE_F64, 6);
    convert_elements(f, DTYPE_F32, x, DTYPE_F64, 6);
    EXPECT(h[0] == 0x3C01 && b[1] == 0x3F81, "rounded twice: %04x %04x", h[0], b[1]);
    EXPECT(h[2] == 0x7C00 && b[2] == 0x7F80 && isinf(f[2]), "1e300 is %04x %04x %g", h[2], b[2], (double)f[2]);
    EXPECT(h[3] == 0x8000 && b[3] == 0x8000 && f[3] == 0 && signbit(f[3]), "-1e-300 is %04x %04x", h[3], b[3]);
    EXPECT(h[4] == 0x7C00 && b[4] == 0x7F80 && isinf(f[4]), "2^128 - is %04x %04x %g", h[4], b[4], (double)f[4]);
    EXPECT((h[5] & 0x7E00) == 0x7E00 && (b[5] & 0x7FC0) == 0x7FC0 && isnan(f[5]), "NaN is %04x %04x", h[5], b[5]);
    const uint64_t signalling = 0xFFF0000000000001; // a NaN whose payload is only in the bits that go
    convert_elements(b, DTYPE_BF16, &signalling, DTYPE_F64, 1);
    convert_elements(h, DTYPE_F16, &signalling, DTYPE_F64, 1);
    EXPECT(b[0] == 0xFFC0 && h[0] == 0xFE00, "a NaN with a small payload is %04x %04x", b[0], h[0]);
    EXPECT(DTYPE_OF(double) == DTYPE_F64 && DTYPE_OF(float) == DTYPE_F32 && DTYPE_OF(uint16_t) == DTYPE_BF16,
           "the type of a size");
}

// ---------------------------------------------------------------------------------------------------------------------
// safetensors.h

static SafeTensorSpec ckpt_spec(const char *name, DType dtype, int ndim, size_t n0, size_t n1) {
    SafeTensorSpec s;
    memset(&s, 0, sizeof(s));
    FORMAT(s.name, "%s", name);
    s.dtype = dtype, s.ndim = ndim, s.shape[0] = n0, s.shape[1] = n1;
    return s;
}

static void test_safetensors_round_trip(void) {
    enum { COUNT = 3 * 7 };
    const char *path = test_file("x.safetensors");
    const SafeTensorSpec specs[] = {
        ckpt_spec("z.F16", DTYPE_F16, 2, 3, 7),    ckpt_spec("a.F64", DTYPE_F64, 2, 3, 7),
        ckpt_spec("empty", DTYPE_F32, 2, 0, 7),    ckpt_spec("one", DTYPE_F64, 0, 0, 0),
        ckpt_spec("b.BF16", DTYPE_BF16, 1, 21, 0), ckpt_spec("a\"\\.F32", DTYPE_F32, 1, 21, 0),
    };
    double x[COUNT], y[COUNT];
    for (int i = 0; i < COUNT; i++) x[i] = (i - 10) * 0.25; // exact in all types
    SafeTensorsWriter *w = safetensors_create(path, specs, 6);
    for (int t = 5; t >= 0; t--) // a regular file takes parts in any order
        for (size_t n = safetensors_spec_elements(&specs[t]), half = n / 2, k = 0; k < 2; k++)
            safetensors_write(w, t, k ? 0 : half, k ? x : x + half, DTYPE_F64, k ? half : n - half);
    safetensors_finish(w);

    const char *want = "{\"__metadata__\":{\"format\":\"pt\"},"
                       "\"z.F16\":{\"dtype\":\"F16\",\"shape\":[3,7],\"data_offsets\":[0,42]},"
                       "\"a.F64\":{\"dtype\":\"F64\",\"shape\":[3,7],\"data_offsets\":[42,210]},"
                       "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[210,210]},"
                       "\"one\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[210,218]},"
                       "\"b.BF16\":{\"dtype\":\"BF16\",\"shape\":[21],\"data_offsets\":[218,260]},"
                       "\"a\\\"\\\\.F32\":{\"dtype\":\"F32\",\"shape\":[21],\"data_offsets\":[260,344]}}";
    size_t size = 0;
    char *text = ckpt_read_file(path, &size);
    uint64_t length = 0;
    memcpy(&length, text, 8);
    EXPECT(length % 8 == 0 && length - strlen(want) < 8 && size == 8 + length + 344, "header of %" PRIu64 " bytes",
           length);
    EXPECT(memcmp(text + 8, want, strlen(want)) == 0, "the header is %.600s", text + 8);
    for (size_t i = strlen(want); i < length; i++) EXPECT(text[8 + i] == ' ', "padding is %d", text[8 + i]);
    free(text);

    SafeTensors *s = safetensors_open(path);
    EXPECT(s->count == 6, "%zu tensors", s->count);
    const char *names[] = {"z.F16", "a.F64", "b.BF16", "a\"\\.F32"};
    for (int n = 0; n < 4; n++)
        for (size_t first = 0; first < COUNT; first += 5) {
            safetensors_read(s, names[n], first, COUNT - first, y, DTYPE_F64);
            EXPECT(memcmp(y, x + first, (COUNT - first) * 8) == 0, "%s from %zu differs", names[n], first);
        }
    const SafeTensor *one = safetensors_find(s, "one"), *empty = safetensors_find(s, "empty");
    EXPECT(one && one->count == 1 && empty && empty->count == 0 && !safetensors_find(s, "none"), "the list of tensors");
    safetensors_close(s);

    w = safetensors_create(path, specs, 0);
    safetensors_finish(w);
    text = ckpt_read_file(path, &size);
    EXPECT(size == 40 && memcmp(text + 8, "{\"__metadata__\":{\"format\":\"pt\"}}", 32) == 0,
           "an empty file has %zu bytes", size);
    free(text);
    s = safetensors_open(path);
    EXPECT(s->count == 0 && !safetensors_find(s, "x"), "an empty file has %zu tensors", s->count);
    safetensors_close(s);
}

static void ckpt_write_safetensors(const char *path, const char *header, size_t data_bytes) {
    uint64_t length = strlen(header);
    char *file = (char *)checked_calloc(8 + length + data_bytes, 1);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, length);
    test_write_file(path, file, 8 + length + data_bytes);
    free(file);
}

static void test_safetensors_hostile_headers(void) {
#define ENTRY(dtype, shape, begin, end) \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"
    static const struct {
        const char *header;
        size_t data;
        const char *word;
    } cases[] = {
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8") "}", 7, "data_offsets are not within"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8") "}", 9, "after the last tensor"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8") ",\"b\":" ENTRY("F32", "[2]", "4", "12") "}", 12, "overlap"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8") ",\"b\":" ENTRY("F32", "[2]", "0", "8") "}", 8, "overlap"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8") ",\"b\":" ENTRY("F32", "[2]", "12", "20") "}", 20, "gap"},
        {"{\"a\":" ENTRY("F32", "[2]", "4", "12") "}", 12, "gap"},
        {"{\"a\":" ENTRY("F32", "[2]", "8", "0") "}", 8, "data_offsets are not within"},
        {"{\"a\":" ENTRY("F32", "[2]", "-8", "0") "}", 8, "data_offsets are not within"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8.5") "}", 8, "data_offsets are not within"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "1e300") "}", 8, "data_offsets are not within"},
        {"{\"a\":" ENTRY("F32", "[3]", "0", "8") "}", 8, "need 3 elements"},
        {"{\"a\":" ENTRY("F64", "[2]", "0", "8") "}", 8, "of F64"},
        {"{\"a\":" ENTRY("F32", "[-2]", "0", "8") "}", 8, "not a valid size"},
        {"{\"a\":" ENTRY("F32", "[\"2\"]", "0", "8") "}", 8, "not a valid size"},
        {"{\"a\":" ENTRY("F32", "[4294967296,4294967296]", "0", "0") "}", 0, "not a valid size"},     // 2^64 = 0
        {"{\"a\":" ENTRY("F32", "[2147483648,2147483648]", "0", "0") "}", 0, "shape and dtype need"}, // 4 * 2^62 = 0
        {"{\"a\":" ENTRY("F32", "[1,1,1,1,1,1,1,1,2]", "0", "8") "}", 8, "more than 8 dimensions"},
        {"{\"a\":" ENTRY("F32", "[1]", "0", "4") ",\"a\":" ENTRY("F32", "[1]", "4", "8") "}", 8, "duplicate tensor a"},
        {"{\"a\":" ENTRY("F32", "[0]", "0", "0") ",\"a\":" ENTRY("F32", "[0]", "0", "0") "}", 0, "duplicate tensor a"},
        {"{\"a\\nb\":" ENTRY("F32", "[2]", "0", "8") "}", 8, "control characters"},
        {"{\"a\":" ENTRY("F\\n32", "[2]", "0", "8") "}", 8, "control characters"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "no dtype, shape and data_offsets"},
        {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "no dtype, shape and data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", 8, "data_offsets are not within"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "data_offsets are not within"},
        {"{\"a\":8}", 8, "no dtype, shape and data_offsets"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
        {"[]", 8, "not a JSON object"},
        {"  {}", 0, "not a JSON object"},
        {"{}{}", 0, "not a JSON object"},
        {"{\"a\":", 8, "not a JSON object"},
        {"{\"a\":1,", 8, "not a JSON object"},
        {"{", 8, "a header of 1 bytes"},
    };
    TestDirectory d = test_make_directory();
    const char *path = test_text("%s/x.safetensors", d.path);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckpt_write_safetensors(path, cases[i].header, cases[i].data);
        ckpt_refused("open", path, "", cases[i].word);
    }
    static char deep[300000]; // deeper than any stack would like
    strcpy(deep, "{\"a\":");
    memset(deep + 5, '[', sizeof(deep) - 6);
    ckpt_write_safetensors(path, deep, 8);
    ckpt_refused("open", path, "", "not a JSON object");
    const uint64_t lengths[] = {0, 1, 9, 1ull << 40, UINT64_MAX - 7, UINT64_MAX};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        char file[16] = "........{}     ";
        memcpy(file, &lengths[i], 8);
        test_write_file(path, file, 16);
        ckpt_refused("open", path, "", "a header of");
    }
    test_write_file(path, "1234567", 7);
    ckpt_refused("open", path, "", "has 7 bytes");
    CHECK(truncate(path, 0) == 0, "cannot truncate %s", path);
    ckpt_refused("open", path, "", "has 0 bytes");
    ckpt_refused("open", test_text("%s/none", d.path), "", "No such file");
    ckpt_refused("open", d.path, "", "neither model.safetensors nor");
    CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0, "cannot make the pipe %s", path);
    ckpt_refused("open", path, "", "Invalid argument");
}

static void test_safetensors_unknown_type(void) {
    const char *path = test_file("x.safetensors");
    ckpt_write_safetensors(path, "{\"ids\":" ENTRY("I64", "[1]", "0", "8") ",\"x\":" ENTRY("F32", "[1]", "8", "12") "}",
                           12);
    ckpt_accepted("read", path, "x", "0\n");
    ckpt_refused("read", path, "ids", "tensor ids has type I64");
    ckpt_refused("read", path, "y", "has no tensor y");
}

static void test_safetensors_sharded(void) {
    TestDirectory d = test_make_directory();
    const char *index = test_text("%s/model.safetensors.index.json", d.path);
    const char *names[] = {"b", "a", "c"};
    for (int i = 0; i < 3; i++) {
        SafeTensorSpec spec = ckpt_spec(names[i], DTYPE_F32, 1, 1, 0);
        double x = i + 1;
        SafeTensorsWriter *w = safetensors_create(test_text("%s/%d.safetensors", d.path, i), &spec, 1);
        safetensors_write(w, 0, 0, &x, DTYPE_F64, 1);
        safetensors_finish(w);
    }
    test_write_text(index, "{\"metadata\":{},\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"0.safetensors\"}}");
    ckpt_accepted("read", d.path, "a", "2\n");
    ckpt_accepted("read", d.path, "b", "1\n");
    ckpt_refused("read", d.path, "c", "has no tensor c");
    static const struct {
        const char *index, *word;
    } cases[] = {
        {"{\"weight_map\":{\"a\":\"0.safetensors\"}}", "tensor a is not in 0.safetensors"},
        {"{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"1.safetensors\",\"c\":\"0.safetensors\"}}", "is not in"},
        {"{\"weight_map\":{\"a\":\"../1.safetensors\"}}", "an entry that is not a file name"},
        {"{\"weight_map\":{\"a\":\"\"}}", "an entry that is not a file name"},
        {"{\"weight_map\":{\"a\":1}}", "an entry that is not a file name"},
        {"{\"weight_map\":{\"a\":\"9.safetensors\"}}", "No such file"},
        {"{\"weight_map\":[]}", "no object weight_map"},
        {"{", "no object weight_map"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        test_write_text(index, cases[i].index);
        ckpt_refused("open", d.path, "", cases[i].word);
    }
    // the same tensor in two shards
    ckpt_write_safetensors(test_text("%s/2.safetensors", d.path), "{\"a\":" ENTRY("F32", "[1]", "0", "4") "}", 4);
    test_write_text(index, "{\"weight_map\":{\"a\":\"1.safetensors\",\"c\":\"2.safetensors\"}}");
    ckpt_refused("open", d.path, "", "duplicate tensor a");
}
#undef ENTRY

// ---------------------------------------------------------------------------------------------------------------------

// Far more than a model has that is read here, and less than the limit of a header's values.
static void test_safetensors_many_tensors(void) {
    enum { TENSORS = 100000 };
    const char *path = test_file("many.safetensors");
    char *text = (char *)checked_calloc(TENSORS, 150);
    size_t n = 0;
    for (int i = 0; i < TENSORS; i++)
        n += (size_t)sprintf(text + n,
                             "%s\"model.layers.%d.mlp.experts.up_proj.weight\":{\"dtype\":\"F32\",\"shape\":[1,1],"
                             "\"data_offsets\":[%d,%d]}",
                             i ? "," : "{", i, 4 * i, 4 * i + 4);
    strcpy(text + n, "}");
    ckpt_write_safetensors(path, text, 4 * (size_t)TENSORS);
    free(text);
    SafeTensors *s = safetensors_open(path);
    EXPECT(s->count == TENSORS && safetensors_find(s, "model.layers.99999.mlp.experts.up_proj.weight"), "%zu tensors",
           s->count);
    safetensors_close(s);
}

static const Test safetensors_tests[] = {
    {"a file of 100,000 tensors is read", test_safetensors_many_tensors},
    {"every 16-bit pattern converts to the number that its format defines, and back to the same bits",
     test_half_round_trip},
    {"a conversion to 16 bits rounds to nearest, ties to even, and overflows to infinity", test_half_rounding},
    {"a double is converted to 16 bits with one rounding, not through a float", test_half_single_rounding},
    {"tensors of every type are read back from a safetensors file with the expected header",
     test_safetensors_round_trip},
    {"a malicious safetensors header is rejected with a one-line error", test_safetensors_hostile_headers},
    {"a tensor of an unknown type is rejected when it is read, not before", test_safetensors_unknown_type},
    {"shards with an index are read as one file, and an incorrect index is rejected", test_safetensors_sharded},
};
