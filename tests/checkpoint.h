/*
checkpoint.h: tests of the files of a run (llmc/base/dtype.h, json.h, safetensors.h, config_json.h, checkpoint.h,
logger.h).

What ends a program is tested in a child: this executable again, as `--child checkpoint-ACTION ...`, for which
main calls checkpoint_test_child before anything else.
*/
#ifndef TESTS_CHECKPOINT_H
#define TESTS_CHECKPOINT_H
#include "../llmc/checkpoint/checkpoint.h"
#include "../llmc/log/logger.h"
#include "data.h"
#include "harness.h"

// ---------------------------------------------------------------------------------------------------------------------
// helpers

static void ckpt_write_file(const char *path, const void *bytes, size_t count) {
    int fd = file_create(path);
    file_write(fd, bytes, count, path);
    close(fd);
}
static void ckpt_write_text(const char *path, const char *text) { ckpt_write_file(path, text, strlen(text)); }

static char *ckpt_read_file(const char *path, size_t *size) {
    char *text = file_read(path, 1 << 30, size);
    CHECK(text != NULL, "cannot read %s: %s", path, strerror(errno));
    return text;
}

static bool ckpt_same_files(const char *a, const char *b) {
    size_t n = 0, m = 0;
    char *x = ckpt_read_file(a, &n), *y = ckpt_read_file(b, &m);
    bool same = n == m && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

typedef struct {
    char text[PATH_SIZE];
} CkptPath;
PRINTF_LIKE(1, 2)
static CkptPath ckpt_path(const char *fmt, ...) {
    CkptPath p;
    va_list args;
    va_start(args, fmt);
    vsnprintf(p.text, sizeof(p.text), fmt, args);
    va_end(args);
    return p;
}

// The path of this executable; /proc/self/exe would name the shell that starts the child.
static const char *ckpt_self(void) {
    static char path[PATH_SIZE];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    CHECK(n > 0, "cannot read /proc/self/exe: %s", strerror(errno));
    path[n] = 0;
    return path;
}

// A tiny model with its buffers. Elements are a function of (seed, place).
typedef struct {
    ModelConfig config;
    TensorList list;
    CheckpointBuffers b;
} CkptModel;

static ModelConfig ckpt_config(const char *variant, bool tied) {
    ModelConfig c;
    memset(&c, 0, sizeof(c));
    c.attention = variant_find(variant);
    c.V = 11, c.C = 12, c.L = 2, c.NH = 2, c.NKV = 1, c.D = 8, c.F = 20, c.T = 32;
    c.rope_theta = 10000, c.rms_norm_eps = 1e-5;
    c.tied = tied;
    return c;
}

static void ckpt_fill(const TensorList *list, real *to, uint64_t seed) {
    TestRandom random = {seed};
    for (int i = 0; i < list->count; i++)
        for (size_t k = 0; k < list->tensors[i].count; k++) {
            // every magnitude of an fp32, so that what is saved as F32 comes back in any build
            double x = ldexp(test_random_real(&random), test_random_int(&random, 250) - 140);
            to[list->tensors[i].offset + k] = (real)(float)x;
        }
}

static CkptModel ckpt_model_of(ModelConfig config, uint64_t seed) {
    CkptModel m;
    memset(&m, 0, sizeof(m));
    m.config = config;
    m.list = tensor_list_build(&m.config, 1);
    size_t bytes = m.list.buffer_count * sizeof(real);
    m.b.params = (floatX *)buffer_alloc(bytes, "a test");
    m.b.m = (real *)buffer_alloc(bytes, "a test");
    m.b.v = (real *)buffer_alloc(bytes, "a test");
    if (!seed) return m;
    ckpt_fill(&m.list, (real *)m.b.params, seed);
    ckpt_fill(&m.list, m.b.m, seed + 1);
    ckpt_fill(&m.list, m.b.v, seed + 2);
    return m;
}

static CkptModel ckpt_model(const char *variant, bool tied, uint64_t seed) {
    return ckpt_model_of(ckpt_config(variant, tied), seed);
}

// The addresses in b are of the struct itself, so only after it has its place.
static const CheckpointBuffers *ckpt_buffers(CkptModel *m) {
    m->b.config = &m->config;
    m->b.tensors = &m->list;
    return &m->b;
}

static void ckpt_model_free(CkptModel *m) {
    buffer_free(m->b.params);
    buffer_free(m->b.m);
    buffer_free(m->b.v);
    buffer_free(m->b.master);
    tensor_list_free(&m->list);
}

static bool ckpt_same(const CkptModel *a, const void *x, const void *y) {
    return memcmp(x, y, a->list.buffer_count * sizeof(real)) == 0;
}

static void ckpt_save(const char *run_dir, int64_t step, uint64_t seed) {
    CkptModel m = ckpt_model("diff_v2", true, seed);
    cJSON *state = cJSON_CreateObject();
    json_add_u64(state, "step", (uint64_t)step);
    json_add_u64(state, "seed", UINT64_MAX - 1);
    cJSON_AddNumberToObject(state, "loss", 0.1 + 0.2);
    checkpoint_save(run_dir, step, ckpt_buffers(&m), state);
    cJSON_Delete(state);
    ckpt_model_free(&m);
}

// ---------------------------------------------------------------------------------------------------------------------
// what children do

static bool checkpoint_test_child(int argc, char **argv) {
    if (argc < 4 || strcmp(argv[1], "--child") != 0 || strncmp(argv[2], "checkpoint-", 11) != 0) return false;
    const char *action = argv[2] + 11, *path = argv[3], *more = argc > 4 ? argv[4] : "";
    if (sizeof(real) == 8) omp_set_num_threads(1);
    if (strcmp(action, "open") == 0) safetensors_close(safetensors_open(path));
    else if (strcmp(action, "read") == 0) {
        SafeTensors *s = safetensors_open(path);
        double x = 0;
        safetensors_read(s, more, 0, 1, &x, DTYPE_F64);
        printf("%g\n", x);
        safetensors_close(s);
    } else if (strcmp(action, "config") == 0) {
        ModelConfig c = config_json_read(path);
        printf("%s C %d NH %d NKV %d D %d theta %g eps %g tied %d", c.attention->name, c.C, c.NH, c.NKV, c.D,
               c.rope_theta, c.rms_norm_eps, c.tied);
        if (c.window) printf(", window %d, full every %d, yoco %d", c.window, c.full_every, c.yoco);
        if (c.qk_norm) printf(", qk-norm");
        if (c.E) printf(", %d of %d experts of %d", c.K, c.E, c.FE);
        printf("\n");
    } else if (strncmp(action, "load", 4) == 0) { // load-weights, load-all, load-master
        ModelConfig config = ckpt_config("diff_v2", strcmp(more, "untied") != 0);
        config.qk_norm = strcmp(more, "qk-norm") == 0;
        CkptModel m = ckpt_model_of(config, 0);
        if (strcmp(action, "load-master") == 0)
            m.b.master = (real *)buffer_alloc(m.list.buffer_count * sizeof(real), "a test");
        checkpoint_load_weights(path, ckpt_buffers(&m), strcmp(action, "load-weights") != 0);
        ckpt_model_free(&m);
    } else if (strcmp(action, "save-for-ever") == 0) {
        for (int64_t step = 1;; step++) ckpt_save(path, step, (uint64_t)step);
    } else if (strcmp(action, "newest") == 0) {
        char found[PATH_SIZE];
        printf("%" PRId64 "\n", checkpoint_find_newest(path, found));
    } else if (strcmp(action, "save") == 0) ckpt_save(path, strtoll(more, NULL, 10), 1);
    else if (strcmp(action, "clean") == 0) checkpoint_clean(path);
    else if (strcmp(action, "prune") == 0) checkpoint_prune(path, strtoll(more, NULL, 10), 40);
    else if (strcmp(action, "drop") == 0) checkpoint_drop_after(path, strtoll(more, NULL, 10));
    else if (strcmp(action, "state") == 0) cJSON_Delete(checkpoint_load_state(path));
    else if (strcmp(action, "dump") == 0) {
        CkptModel m = ckpt_model("diff_v2", true, 5);
        checkpoint_save_gradients(path, &m.list, (const grad_t *)m.b.m, 1.5);
        ckpt_model_free(&m);
    } else if (strcmp(action, "create") == 0 || strcmp(action, "resume") == 0) {
        Log *log = (Log *)checked_calloc(1, sizeof(Log));
        cJSON *run = cJSON_CreateObject();
        cJSON_AddStringToObject(run, "by", more);
        if (*action == 'c') log_create(log, path, run);
        else log_resume(log, path, strtoll(more, NULL, 10));
        cJSON_Delete(run);
        if (*more) {
            log_begin(log, "train", strtoll(more, NULL, 10) + 1);
            log_end(log);
        }
        log_close(log);
        free(log);
    } else CHECK(false, "a child of the checkpoint tests cannot do %s", action);
    return true;
}

// A child that should fail: status 1 and one line with the word.
static const char *ckpt_refusal; // the line of the last one
static void ckpt_refused(const char *action, const char *path, const char *more, const char *word) {
    static ProgramResult r;
    ckpt_refusal = r.err;
    run_command(&r, "%s --child checkpoint-%s '%s' '%s'", ckpt_self(), action, path, more);
    EXPECT(r.status == EXIT_FAILED && count_lines(r.err) == 1 && strncmp(r.err, "diffv2: ", 8) == 0 &&
               strstr(r.err, word),
           "%s %s %s: status %d, not 1 and one line with '%s': %.300s", action, path, more, r.status, word, r.err);
}
static void ckpt_accepted(const char *action, const char *path, const char *more, const char *out) {
    static ProgramResult r;
    run_command(&r, "%s --child checkpoint-%s '%s' '%s'", ckpt_self(), action, path, more);
    EXPECT(r.status == 0 && strcmp(r.out, out) == 0, "%s %s %s: status %d, printed '%s', not '%s': %.300s", action,
           path, more, r.status, r.out, out, r.err);
}

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
// json.h

static void test_json_numbers(void) {
    TestRandom random = {3};
    for (int i = 0; i < 3000; i++) {
        uint64_t bits = test_random_bits(&random), u = bits >> test_random_int(&random, 64), back = 0;
        double x;
        memcpy(&x, &bits, 8);
        if (i % 3 == 0) x = test_random_real(&random);
        if (i % 3 == 1) x = floor(ldexp(test_random_real(&random), 54));
        if (!isfinite(x)) continue;
        cJSON *o = cJSON_CreateObject();
        cJSON_AddNumberToObject(o, "x", x);
        json_add_u64(o, "u", u);
        size_t size = 0;
        char *text = json_text(o, &size);
        cJSON_Delete(o);
        o = json_parse(text, size);
        double y = 0;
        EXPECT(json_get_number(o, "x", &y) && memcmp(&x, &y, 8) == 0, "%a came back as %a from %s", x, y, text);
        EXPECT(json_get_u64(o, "u", &back) && back == u, "%" PRIu64 " came back as %" PRIu64 " from %s", u, back, text);
        cJSON_Delete(o);
        free(text);
    }
    const char *bad[] = {"{\"u\":\"18446744073709551616\"}",
                         "{\"u\":\"-1\"}",
                         "{\"u\":\"\"}",
                         "{\"u\":1.5}",
                         "{\"u\":-1}",
                         "{\"u\":\" 1\"}",
                         "{\"u\":1e300}",
                         "{\"v\":1}",
                         "{\"u\":null}"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        uint64_t u = 0;
        cJSON *o = json_parse(bad[i], strlen(bad[i]));
        EXPECT(o && !json_get_u64(o, "u", &u), "%s has an integer %" PRIu64, bad[i], u);
        cJSON_Delete(o);
    }
    EXPECT(!json_parse("{} x", 4) && !json_parse("{\"a\":1,", 7) && !json_parse("{}\0{}", 5) && !json_parse("", 0),
           "not one JSON value, and parsed");
}

static void test_json_strings(void) {
    static const struct {
        const char *from, *to;
    } cases[] = {
        {"a\"b\\c\n\t\x01\x7f", "a\\\"b\\\\c\\u000a\\u0009\\u0001\\u007f"},
        {"\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80", "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"}, // 2, 3 and 4 bytes
        {"\xC3", "\xEF\xBF\xBD"},                                                             // cut
        {"\x80z", "\xEF\xBF\xBDz"},                                                           // no first byte
        {"\xC0\xAF", "\xEF\xBF\xBD\xEF\xBF\xBD"},                                             // overlong
        {"\xE0\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},                             // overlong
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},                             // a surrogate
        {"\xF5\x80", "\xEF\xBF\xBD\xEF\xBF\xBD"},                                             // beyond U+10FFFF
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char want[128];
        size_t size = 0;
        cJSON *s = cJSON_CreateString(cases[i].from);
        char *text = json_text(s, &size);
        FORMAT(want, "\"%s\"\n", cases[i].to);
        EXPECT(strcmp(text, want) == 0, "case %zu is %s", i, text);
        cJSON_Delete(s);
        free(text);
    }
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
    TestDirectory d = test_make_directory();
    CkptPath path = ckpt_path("%s/x.safetensors", d.path);
    const SafeTensorSpec specs[] = {
        ckpt_spec("z.F16", DTYPE_F16, 2, 3, 7),    ckpt_spec("a.F64", DTYPE_F64, 2, 3, 7),
        ckpt_spec("empty", DTYPE_F32, 2, 0, 7),    ckpt_spec("one", DTYPE_F64, 0, 0, 0),
        ckpt_spec("b.BF16", DTYPE_BF16, 1, 21, 0), ckpt_spec("a\"\\.F32", DTYPE_F32, 1, 21, 0),
    };
    double x[COUNT], y[COUNT];
    for (int i = 0; i < COUNT; i++) x[i] = (i - 10) * 0.25; // exact in all types
    SafeTensorsWriter *w = safetensors_create(path.text, specs, 6, true);
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
    char *text = ckpt_read_file(path.text, &size);
    uint64_t length = 0;
    memcpy(&length, text, 8);
    EXPECT(length % 8 == 0 && length - strlen(want) < 8 && size == 8 + length + 344, "header of %" PRIu64 " bytes",
           length);
    EXPECT(memcmp(text + 8, want, strlen(want)) == 0, "the header is %.600s", text + 8);
    for (size_t i = strlen(want); i < length; i++) EXPECT(text[8 + i] == ' ', "padding is %d", text[8 + i]);
    free(text);

    SafeTensors *s = safetensors_open(path.text);
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

    w = safetensors_create(path.text, specs, 0, false);
    safetensors_finish(w);
    text = ckpt_read_file(path.text, &size);
    EXPECT(size == 16 && memcmp(text + 8, "{}      ", 8) == 0, "an empty file has %zu bytes", size);
    free(text);
    s = safetensors_open(path.text);
    EXPECT(s->count == 0 && !safetensors_find(s, "x"), "an empty file has %zu tensors", s->count);
    safetensors_close(s);
    test_remove_directory(&d);
}

static void ckpt_write_safetensors(const char *path, const char *header, size_t data_bytes) {
    uint64_t length = strlen(header);
    char *file = (char *)checked_calloc(8 + length + data_bytes, 1);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, length);
    ckpt_write_file(path, file, 8 + length + data_bytes);
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
    CkptPath path = ckpt_path("%s/x.safetensors", d.path);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckpt_write_safetensors(path.text, cases[i].header, cases[i].data);
        ckpt_refused("open", path.text, "", cases[i].word);
    }
    static char deep[300000]; // deeper than any stack would like
    strcpy(deep, "{\"a\":");
    memset(deep + 5, '[', sizeof(deep) - 6);
    ckpt_write_safetensors(path.text, deep, 8);
    ckpt_refused("open", path.text, "", "not a JSON object");
    const uint64_t lengths[] = {0, 1, 9, 1ull << 40, UINT64_MAX - 7, UINT64_MAX};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        char file[16] = "........{}     ";
        memcpy(file, &lengths[i], 8);
        ckpt_write_file(path.text, file, 16);
        ckpt_refused("open", path.text, "", "a header of");
    }
    ckpt_write_file(path.text, "1234567", 7);
    ckpt_refused("open", path.text, "", "has 7 bytes");
    CHECK(truncate(path.text, 0) == 0, "cannot truncate %s", path.text);
    ckpt_refused("open", path.text, "", "has 0 bytes");
    ckpt_refused("open", ckpt_path("%s/none", d.path).text, "", "No such file");
    ckpt_refused("open", d.path, "", "neither model.safetensors nor");
    CHECK(unlink(path.text) == 0 && mkfifo(path.text, 0600) == 0, "cannot make the pipe %s", path.text);
    ckpt_refused("open", path.text, "", "Invalid argument");
    test_remove_directory(&d);
}

static void test_safetensors_unknown_type(void) {
    TestDirectory d = test_make_directory();
    CkptPath path = ckpt_path("%s/x.safetensors", d.path);
    ckpt_write_safetensors(path.text,
                           "{\"ids\":" ENTRY("I64", "[1]", "0", "8") ",\"x\":" ENTRY("F32", "[1]", "8", "12") "}", 12);
    ckpt_accepted("read", path.text, "x", "0\n");
    ckpt_refused("read", path.text, "ids", "tensor ids has type I64");
    ckpt_refused("read", path.text, "y", "has no tensor y");
    test_remove_directory(&d);
}

// Whatever a damaged file holds, opening it ends with a message or a list of tensors, not with a signal.
static void test_safetensors_damaged(void) {
    TestDirectory d = test_make_directory();
    CkptPath path = ckpt_path("%s/x.safetensors", d.path);
    ckpt_write_safetensors(
        path.text, "{\"a\":" ENTRY("F32", "[2,3]", "0", "24") ",\"b\":" ENTRY("BF16", "[4]", "24", "32") "}", 32);
    size_t size = 0;
    char *file = ckpt_read_file(path.text, &size);
    TestRandom random = {7};
    for (int i = 0; i < 80; i++) {
        char *copy = (char *)checked_calloc(size, 1);
        memcpy(copy, file, size);
        size_t n = i < 40 ? size : (size_t)test_random_int(&random, (int)size);
        for (int k = 0; k < 1 + i % 3 && n; k++)
            copy[test_random_int(&random, (int)n)] = (char)test_random_bits(&random);
        ckpt_write_file(path.text, copy, n);
        static ProgramResult r;
        run_command(&r, "%s --child checkpoint-open '%s'", ckpt_self(), path.text);
        EXPECT(r.status == 0 || (r.status == 1 && count_lines(r.err) == 1), "case %d: status %d: %.300s", i, r.status,
               r.err);
        EXPECT(n == size || r.status == 1, "case %d: %zu of %zu bytes were taken for a file", i, n, size);
        free(copy);
    }
    free(file);
    test_remove_directory(&d);
}

static void test_safetensors_sharded(void) {
    TestDirectory d = test_make_directory();
    CkptPath index = ckpt_path("%s/model.safetensors.index.json", d.path);
    const char *names[] = {"b", "a", "c"};
    for (int i = 0; i < 3; i++) {
        SafeTensorSpec spec = ckpt_spec(names[i], DTYPE_F32, 1, 1, 0);
        double x = i + 1;
        SafeTensorsWriter *w = safetensors_create(ckpt_path("%s/%d.safetensors", d.path, i).text, &spec, 1, true);
        safetensors_write(w, 0, 0, &x, DTYPE_F64, 1);
        safetensors_finish(w);
    }
    ckpt_write_text(index.text, "{\"metadata\":{},\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"0.safetensors\"}}");
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
        ckpt_write_text(index.text, cases[i].index);
        ckpt_refused("open", d.path, "", cases[i].word);
    }
    // the same tensor in two shards
    ckpt_write_safetensors(ckpt_path("%s/2.safetensors", d.path).text, "{\"a\":" ENTRY("F32", "[1]", "0", "4") "}", 4);
    ckpt_write_text(index.text, "{\"weight_map\":{\"a\":\"1.safetensors\",\"c\":\"2.safetensors\"}}");
    ckpt_refused("open", d.path, "", "duplicate tensor a");
    test_remove_directory(&d);
}
#undef ENTRY

// ---------------------------------------------------------------------------------------------------------------------
// config_json.h

static void test_config_round_trip(void) {
    TestDirectory d = test_make_directory();
    CkptPath path = ckpt_path("%s/config.json", d.path);
#define SHAPES                                                                                                    \
    "  \"vocab_size\": 11,\n  \"hidden_size\": 12,\n  \"num_hidden_layers\": 2,\n  \"num_attention_heads\": 2,\n" \
    "  \"num_key_value_heads\": 1,\n  \"head_dim\": 8,\n  \"intermediate_size\": 20,\n"                           \
    "  \"max_position_embeddings\": 32,\n  \"rope_theta\": 10000,\n  \"rms_norm_eps\": 1e-05,\n"
#define PLAIN(class_name, type, windows)                                                                      \
    "{\n  \"architectures\": [\"" class_name "ForCausalLM\"],\n  \"model_type\": \"" type "\",\n" SHAPES      \
    "  \"tie_word_embeddings\": false,\n  \"torch_dtype\": \"float32\",\n" windows                            \
    "  \"hidden_act\": \"silu\",\n  \"attention_bias\": false,\n  \"mlp_bias\": false,\n  \"bos_token_id\": " \
    "null,\n  \"eos_token_id\": null\n}\n"
#define DIFFV2(attention, dtype, more)                                                                   \
    "{\n  \"architectures\": [\"DiffV2ForCausalLM\"],\n  \"model_type\": \"diffv2\",\n  \"attention\": " \
    "\"" attention "\",\n" SHAPES "  \"tie_word_embeddings\": true,\n  \"torch_dtype\": \"" dtype "\"" more "\n}\n"
#define WINDOWS(window, first, second) \
    "  \"sliding_window\": " window ",\n  \"layer_types\": [\"" first "_attention\", \"" second "_attention\"]"
#define SWITCHED(window, first, second)                                                                 \
    "  \"sliding_window\": " window ",\n  \"use_sliding_window\": true,\n  \"max_window_layers\": 0,\n" \
    "  \"layer_types\": [\"" first "_attention\", \"" second "_attention\"],\n"
#define QK_NORM "  \"use_qk_norm\": true"
    static const struct {
        const char *attention;
        int window, full_every;
        bool yoco, qk_norm;
        const char *text;
    } cases[] = {
        {"baseline", 0, 0, false, false, PLAIN("Llama", "llama", "")},
        {"diff_v2", 0, 0, false, false, DIFFV2("diff_v2", "bfloat16", "")},
        {"baseline", 4, 0, false, false, PLAIN("Ministral", "ministral", WINDOWS("4", "sliding", "sliding") ",\n")},
        {"baseline", 4, 2, false, false, PLAIN("Ministral", "ministral", WINDOWS("4", "sliding", "full") ",\n")},
        // these classes generate other tokens with a window of 1, and have no YOCO
        {"baseline", 1, 0, false, false, DIFFV2("baseline", "bfloat16", ",\n" WINDOWS("1", "sliding", "sliding"))},
        {"baseline", 4, 0, true, false,
         DIFFV2("baseline", "bfloat16", ",\n" WINDOWS("4", "sliding", "full") ",\n  \"yoco\": true")},
        {"diff_v2", 4, 2, false, false, DIFFV2("diff_v2", "bfloat16", ",\n" WINDOWS("4", "sliding", "full"))},
        {"baseline", 0, 0, false, true, PLAIN("Qwen3", "qwen3", QK_NORM ",\n")},
        {"baseline", 4, 0, false, true, PLAIN("Qwen3", "qwen3", SWITCHED("4", "sliding", "sliding") QK_NORM ",\n")},
        {"baseline", 4, 2, false, true, PLAIN("Qwen3", "qwen3", SWITCHED("4", "sliding", "full") QK_NORM ",\n")},
        {"baseline", 1, 0, false, true,
         DIFFV2("baseline", "bfloat16", ",\n" WINDOWS("1", "sliding", "sliding") ",\n" QK_NORM)},
        {"baseline", 4, 0, true, true,
         DIFFV2("baseline", "bfloat16", ",\n" WINDOWS("4", "sliding", "full") ",\n  \"yoco\": true,\n" QK_NORM)},
        {"diff_grouped_2", 0, 0, false, true, DIFFV2("diff_grouped_2", "bfloat16", ",\n" QK_NORM)},
        {"xsa", 4, 0, false, true, DIFFV2("xsa", "bfloat16", ",\n" WINDOWS("4", "sliding", "sliding") ",\n" QK_NORM)},
    };
#undef SHAPES
#undef PLAIN
#undef DIFFV2
#undef WINDOWS
#undef SWITCHED
#undef QK_NORM
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool plain = !strstr(cases[i].text, "diffv2");
        ModelConfig c = ckpt_config(cases[i].attention, !plain);
        c.window = cases[i].window, c.full_every = cases[i].full_every, c.yoco = cases[i].yoco;
        c.qk_norm = cases[i].qk_norm;
        config_json_write(path.text, &c, plain ? DTYPE_F32 : DTYPE_BF16);
        size_t size = 0;
        char *text = ckpt_read_file(path.text, &size);
        EXPECT(strcmp(text, cases[i].text) == 0, "config.json is\n%s", text);
        free(text);
        ModelConfig back = config_json_read(d.path);
        EXPECT(back.attention == c.attention && back.V == c.V && back.C == c.C && back.L == c.L && back.NH == c.NH &&
                   back.NKV == c.NKV && back.D == c.D && back.F == c.F && back.T == c.T &&
                   back.rope_theta == c.rope_theta && back.rms_norm_eps == c.rms_norm_eps && back.tied == c.tied &&
                   back.window == c.window && back.full_every == c.full_every && back.yoco == c.yoco &&
                   back.qk_norm == c.qk_norm,
               "the configuration of %s came back otherwise", c.attention->name);
    }
    test_remove_directory(&d);
}

// A Llama's configuration with `more` members; "KEY" in `without` is left out.
static void ckpt_write_config(const char *directory, const char *without, const char *more) {
    static const char *const members[] = {"\"model_type\": \"llama\"",
                                          "\"vocab_size\": 32",
                                          "\"hidden_size\": 64",
                                          "\"num_hidden_layers\": 2",
                                          "\"num_attention_heads\": 4",
                                          "\"intermediate_size\": 128",
                                          "\"max_position_embeddings\": 64",
                                          "\"architectures\": [\"LlamaForCausalLM\"]",
                                          "\"use_cache\": true"};
    char text[2048] = "{";
    for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++)
        if (!*without || !strstr(members[i], without)) {
            if (text[1]) strcat(text, ", ");
            strcat(text, members[i]);
        }
    if (*more) strcat(strcat(text, ", "), more);
    strcat(text, "}");
    ckpt_write_text(ckpt_path("%s/config.json", directory).text, text);
}

#define MINISTRAL "\"model_type\": \"ministral\", \"num_key_value_heads\": null"
#define QWEN3 "\"model_type\": \"qwen3\", \"num_key_value_heads\": 2, \"head_dim\": 8"
#define QWEN3_WINDOW QWEN3 ", \"use_sliding_window\": true, \"sliding_window\": 8"
#define EXPERTS_OF(E, K) "\"attention\": \"sink\", \"num_local_experts\": " E ", \"num_experts_per_tok\": " K
#define MIXTRAL_WITHOUT "\"model_type\": \"mixtral\", \"num_key_value_heads\": null"
#define MIXTRAL MIXTRAL_WITHOUT ", \"rope_theta\": 1e6, \"rms_norm_eps\": 1e-5"
static void test_config_defaults(void) {
    static const struct {
        const char *without, *more, *want;
    } cases[] = {
        {"", "", "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"",
         "\"num_key_value_heads\": 2, \"head_dim\": 32, \"rope_theta\": 500000.0, \"rms_norm_eps\": 1e-5, "
         "\"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\"",
         "baseline C 64 NH 4 NKV 2 D 32 theta 500000 eps 1e-05 tied 1\n"},
        {"",
         "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 20000}, \"dtype\": \"float16\", "
         "\"rope_scaling\": null, \"head_dim\": null, \"sliding_window\": null, \"attention_dropout\": 0.0, "
         "\"hidden_act\": \"silu\", \"attention_bias\": false, \"mlp_bias\": false",
         "baseline C 64 NH 4 NKV 4 D 16 theta 20000 eps 1e-06 tied 0\n"},
        {"", "\"rope_scaling\": {\"type\": \"default\", \"rope_theta\": 500}",
         "baseline C 64 NH 4 NKV 4 D 16 theta 500 eps 1e-06 tied 0\n"},
        {"", "\"rope_scaling\": {\"rope_type\": \"default\"}, \"rope_theta\": 5",
         "baseline C 64 NH 4 NKV 4 D 16 theta 5 eps 1e-06 tied 0\n"},
        {"model_type", "\"attention\": \"diff_v2\"", "diff_v2 C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", "\"model_type\": \"gpt2\", \"attention\": \"baseline\"",
         "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8",
         "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0, window 8, full every 0, yoco 0\n"},
        {"model_type", MINISTRAL ", \"sliding_window\": null",
         "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"layer_types\": [\"full_attention\", \"full_attention\"]",
         "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", "\"attention\": \"sink\", \"sliding_window\": 8, \"yoco\": true",
         "sink C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0, window 8, full every 0, yoco 1\n"},
        {"model_type", "\"attention\": \"sink\", \"use_qk_norm\": true",
         "sink C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0, qk-norm\n"},
        {"", "\"use_qk_norm\": false", "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        // with the keys of the smallest published Qwen3; the class ignores a window that is not switched on
        {"model_type",
         QWEN3 ", \"attention_bias\": false, \"attention_dropout\": 0.0, \"bos_token_id\": 1, \"eos_token_id\": 2, "
               "\"hidden_act\": \"silu\", \"initializer_range\": 0.02, \"max_window_layers\": 28, "
               "\"rms_norm_eps\": 1e-06, \"rope_scaling\": null, \"rope_theta\": 1000000, \"sliding_window\": null, "
               "\"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\", \"use_sliding_window\": false",
         "baseline C 64 NH 4 NKV 2 D 8 theta 1e+06 eps 1e-06 tied 1, qk-norm\n"},
        {"model_type", QWEN3 ", \"sliding_window\": 4096, \"layer_types\": [\"full_attention\", \"full_attention\"]",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, qk-norm\n"},
        {"model_type", QWEN3_WINDOW ", \"max_window_layers\": 2",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, qk-norm\n"},
        {"model_type", QWEN3_WINDOW ", \"max_window_layers\": 0",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, window 8, full every 0, yoco 0, qk-norm\n"},
        {"model_type",
         QWEN3_WINDOW ", \"max_window_layers\": 1, \"layer_types\": [\"sliding_attention\", \"full_attention\"]",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, window 8, full every 2, yoco 0, qk-norm\n"},
        {"model_type", QWEN3 ", \"use_sliding_window\": true, \"sliding_window\": null, \"use_qk_norm\": true",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, qk-norm\n"},
        {"model_type",
         "\"attention\": \"sink\", \"num_shared_experts\": 0, \"num_dense_layers\": 0, \"router_bias\": false",
         "sink C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", EXPERTS_OF("4", "2") ", \"num_shared_experts\": 0, \"num_dense_layers\": 0",
         "sink C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0, 2 of 4 experts of 128\n"},
        // the class has other defaults of theta and eps, which must be there; those of experts need not
        {"model_type", MIXTRAL, "baseline C 64 NH 4 NKV 4 D 16 theta 1e+06 eps 1e-05 tied 0, 2 of 8 experts of 128\n"},
        {"model_type", MIXTRAL ", \"num_local_experts\": 3, \"num_experts_per_tok\": 1, \"sliding_window\": 8",
         "baseline C 64 NH 4 NKV 4 D 16 theta 1e+06 eps 1e-05 tied 0, window 8, full every 0, yoco 0, 1 of 3 experts "
         "of "
         "128\n"},
        {"model_type", MIXTRAL_WITHOUT ", \"rms_norm_eps\": 1e-6, \"rope_parameters\": {\"rope_theta\": 7}",
         "baseline C 64 NH 4 NKV 4 D 16 theta 7 eps 1e-06 tied 0, 2 of 8 experts of 128\n"},
    };
    TestDirectory d = test_make_directory();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckpt_write_config(d.path, cases[i].without, cases[i].more);
        ckpt_accepted("config", d.path, "", cases[i].want);
    }
    test_remove_directory(&d);
}

static void test_config_refusals(void) {
    static const struct {
        const char *without, *more, *word;
    } cases[] = {
        {"", "\"rope_scaling\": {\"rope_type\": \"llama3\"}", "rope_scaling has rope_type = \"llama3\""},
        {"", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}", "rope_scaling has type = \"linear\""},
        {"", "\"rope_scaling\": \"linear\"", "rope_scaling is \"linear\"; it must be an object"},
        {"", "\"rope_scaling\": {\"rope_theta\": 1}, \"rope_theta\": 2", "rope_theta is 2, but 1 in rope_scaling"},
        {"", "\"rope_parameters\": {\"rope_type\": \"yarn\"}", "rope_type = \"yarn\""},
        {"", "\"rope_parameters\": {\"factor\": 8}", "factor = 8"},
        {"", "\"rope_parameters\": 5", "rope_parameters is 5"},
        {"", "\"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "partial_rotary_factor = 0.5"},
        {"", "\"rope_theta\": 1e4, \"rope_parameters\": {\"rope_theta\": 2e4}",
         "rope_theta is 10000, but 20000 in rope_parameters"},
        {"", "\"rope_theta\": 0", "rope theta must be positive"},
        {"", "\"rope_theta\": 1e999", "must be a finite number"},
        {"", "\"rope_theta\": \"10000\"", "rope_theta is \"10000\""},
        {"", "\"attention_bias\": true", "attention_bias is true"},
        {"", "\"mlp_bias\": true", "mlp_bias is true"},
        {"", "\"hidden_act\": \"gelu\"", "hidden_act is \"gelu\""},
        {"", "\"sliding_window\": 4096", "sliding_window is 4096"},
        {"model_type", MINISTRAL, "the key sliding_window is missing"},
        {"model_type", "\"model_type\": \"ministral\", \"sliding_window\": 8",
         "the key num_key_value_heads is missing"},
        {"model_type", MINISTRAL ", \"sliding_window\": 0", "sliding_window is 0"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"layer_types\": \"full_attention\"", "layer_types is"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"layer_types\": [\"full_attention\"]", "layer_types is"},
        {"model_type",
         MINISTRAL ", \"sliding_window\": 8, \"layer_types\": [\"full_attention\", \"sliding_attention\"]",
         "layer_types: layer 1"},
        {"model_type",
         MINISTRAL ", \"sliding_window\": 8, \"layer_types\": [\"chunked_attention\", \"full_attention\"]",
         "layer_types has \"chunked_attention\""},
        {"", "\"layer_types\": [\"sliding_attention\", \"full_attention\"]", "there is no sliding_window"},
        {"model_type", "\"attention\": \"sink\", \"yoco\": true", "YOCO requires a window"},
        {"model_type",
         "\"attention\": \"sink\", \"yoco\": true, \"sliding_window\": 8, \"layer_types\": [\"sliding_attention\", "
         "\"sliding_attention\"]",
         "layer_types: layer 1"},
        {"model_type", "\"attention\": \"sink\", \"yoco\": 1, \"sliding_window\": 8", "yoco is 1"},
        {"", "\"layer_types\": [\"full_attention\", null]", "layer_types has null; supported are"},
        {"", "\"use_qk_norm\": true",
         "use_qk_norm is true, but model_type is \"llama\", which does not have this norm"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"use_qk_norm\": true",
         "use_qk_norm is true, but model_type is \"ministral\""},
        {"model_type", QWEN3 ", \"use_qk_norm\": false",
         "use_qk_norm is false, but model_type is \"qwen3\", which always has this norm"},
        {"", "\"use_qk_norm\": 1", "use_qk_norm is 1; it must be true or false"},
        {"model_type", "\"model_type\": \"qwen3\", \"head_dim\": 8",
         "the key num_key_value_heads is missing, and model_type is \"qwen3\""},
        {"model_type", "\"model_type\": \"qwen3\", \"num_key_value_heads\": 2", "the key head_dim is missing"},
        {"model_type", QWEN3 ", \"attention_bias\": true", "attention_bias is true"},
        {"model_type", QWEN3 ", \"use_sliding_window\": 1", "use_sliding_window is 1; it must be true or false"},
        {"model_type", QWEN3 ", \"use_sliding_window\": true", "the key sliding_window is missing"},
        {"model_type", QWEN3_WINDOW, "one of the keys layer_types and max_window_layers is required"},
        {"model_type", QWEN3_WINDOW ", \"max_window_layers\": 1",
         "max_window_layers is 1; supported are 0, a window in every layer, and 2 or more"},
        {"model_type", QWEN3_WINDOW ", \"max_window_layers\": -1", "max_window_layers is -1"},
        {"model_type", QWEN3 ", \"sliding_window\": 8, \"layer_types\": [\"sliding_attention\", \"sliding_attention\"]",
         "layer_types has \"sliding_attention\", but there is no sliding_window with use_sliding_window true"},
        {"model_type", QWEN3_WINDOW ", \"layer_types\": [\"full_attention\", \"sliding_attention\"]",
         "layer_types: layer 1"},
        {"model_type", MINISTRAL ", \"sliding_window\": true", "sliding_window is true; it must be an integer"},
        {"model_type", MINISTRAL ", \"sliding_window\": 20000000", "a dimension is too large"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"yoco\": true", "a model with it has the key attention"},
        {"num_hidden_layers", "\"num_hidden_layers\": 2147483647, \"layer_types\": [\"full_attention\"]",
         "each of the 2147483647 layers"},
        {"num_hidden_layers", "\"num_hidden_layers\": 2147483647", "a dimension is too large"},
        {"", "\"attention_dropout\": 0.1", "attention_dropout is 0.1"},
        {"", "\"quantization_config\": {}", "quantization_config is {}"},
        {"", "\"partial_rotary_factor\": 0.5", "partial_rotary_factor is 0.5"},
        {"", "\"num_local_experts\": 8", "num_local_experts is 8"},
        {"model_type", MIXTRAL_WITHOUT ", \"rope_theta\": 1e6", "the key rms_norm_eps is missing"},
        {"model_type", MIXTRAL_WITHOUT ", \"rms_norm_eps\": 1e-5",
         "the key rope_theta is missing, and model_type is \"mixtral\""},
        {"model_type", MIXTRAL ", \"num_experts_per_tok\": 9",
         "from 1 to 8 active experts, the number of experts, not 9"},
        {"model_type", MIXTRAL ", \"num_shared_experts\": 1", "model_type is \"mixtral\", which does not have it"},
        {"model_type", MIXTRAL ", \"router_bias\": true", "model_type is \"mixtral\", which has no such bias"},
        {"model_type", MIXTRAL ", \"router_jitter_noise\": 0.1", "router_jitter_noise is 0.1"},
        {"model_type", MIXTRAL ", \"layer_types\": [\"full_attention\", \"full_attention\"]", "which ignores it"},
        {"model_type", MIXTRAL ", \"use_qk_norm\": true", "use_qk_norm is true, but model_type is \"mixtral\""},
        {"model_type", "\"attention\": \"sink\", \"num_local_experts\": 4", "num_experts_per_tok is missing"},
        {"model_type", "\"attention\": \"sink\", \"num_experts_per_tok\": 2", "requires num_local_experts"},
        {"model_type", "\"attention\": \"sink\", \"router_bias\": true", "router_bias requires num_local_experts"},
        {"model_type", "\"attention\": \"sink\", \"num_shared_experts\": 1",
         "num_shared_experts requires num_local_experts"},
        {"model_type", "\"attention\": \"sink\", \"num_dense_layers\": -1",
         "num_dense_layers is -1; it must be an integer from 0"},
        {"model_type", EXPERTS_OF("4", "2") ", \"router_bias\": 1", "router_bias is 1; it must be true or false"},
        {"model_type", EXPERTS_OF("0", "1"), "num_local_experts is 0; it must be an integer from 1"},
        {"model_type", EXPERTS_OF("-1", "1"), "num_local_experts is -1"},
        {"model_type", EXPERTS_OF("1e10", "1"), "num_local_experts is 10000000000"},
        {"model_type", EXPERTS_OF("2000000", "1"), "2 layers of 2000000 experts are more"},
        {"model_type", EXPERTS_OF("2000", "1"), "at most 1024 experts, not 2000"},
        {"model_type", EXPERTS_OF("128", "65"), "at most 64 active experts, not 65"},
        {"model_type", EXPERTS_OF("4", "2") ", \"num_shared_experts\": 1000000", "are too wide"},
        {"model_type", EXPERTS_OF("4", "2") ", \"num_dense_layers\": 1", "dense_intermediate_size is missing"},
        {"model_type", EXPERTS_OF("4", "2") ", \"num_dense_layers\": 2, \"dense_intermediate_size\": 8",
         "dense layers: 2 leave no layer with experts"},
        {"", "\"attention\": \"diff_v9\"", "attention is \"diff_v9\"; supported are baseline, diff_v2"},
        {"", "\"attention\": 2", "attention is 2; supported are"},
        {"model_type", "\"model_type\": \"gpt2\"",
         "model_type is \"gpt2\"; without the key attention it must be one of "
         "llama, ministral, qwen3, mixtral"},
        {"model_type", "", "the key model_type is missing"},
        {"vocab_size", "", "the key vocab_size is missing"},
        {"hidden_size", "", "the key hidden_size is missing"},
        {"num_hidden_layers", "", "the key num_hidden_layers is missing"},
        {"num_attention_heads", "", "the key num_attention_heads is missing"},
        {"intermediate_size", "", "the key intermediate_size is missing"},
        {"max_position_embeddings", "", "the key max_position_embeddings is missing"},
        {"vocab_size", "\"vocab_size\": 32.5", "vocab_size is 32.5"},
        {"vocab_size", "\"vocab_size\": \"32\"", "vocab_size is \"32\""},
        {"vocab_size", "\"vocab_size\": 0", "vocab_size is 0"},
        {"vocab_size", "\"vocab_size\": -1", "vocab_size is -1"},
        {"vocab_size", "\"vocab_size\": 1e10", "vocab_size is 10000000000"},
        {"vocab_size", "\"vocab_size\": null", "the key vocab_size is missing"},
        {"hidden_size", "\"hidden_size\": 65", "the key head_dim is missing"},
        {"", "\"hidden_size\": 64", "duplicate key hidden_size"},
        {"", "\"num_key_value_heads\": 3", "not a multiple of 3 key/value heads"},
        {"", "\"head_dim\": 7", "head dimension must be even"},
        {"", "\"rms_norm_eps\": -1", "rms_norm_eps must be in"},
        {"", "\"tie_word_embeddings\": 1", "tie_word_embeddings is 1"},
        {"", "\"torch_dtype\": \"int8\"", "torch_dtype is \"int8\""},
        {"", "\"dtype\": 5", "dtype is 5"},
        {"", "\"rope_parameters\": {\"a\\nb\": 1}", "has a key = 1"},
        {"", "\"rms_norm_eps\": NaN}", "config.json is not valid JSON from byte 243: NaN}}"},
        {"", "\"head_dim\": 8} x", "config.json has more than a JSON value, from byte 242: x}"},
        {"", "x", "config.json is not valid JSON from byte"},
    };
    TestDirectory d = test_make_directory();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckpt_write_config(d.path, cases[i].without, cases[i].more);
        ckpt_refused("config", d.path, "", cases[i].word); // no message names an option, which nobody has given
        EXPECT(!strstr(ckpt_refusal, "--"), "%s", ckpt_refusal);
    }
    static const char *const texts[][2] = {
        {"", "config.json is empty"}, {" \n", "is empty"}, {"[]", "is not a JSON object"}};
    for (int i = 0; i < 3; i++) {
        ckpt_write_file(ckpt_path("%s/config.json", d.path).text, texts[i][0], strlen(texts[i][0]));
        ckpt_refused("config", d.path, "", texts[i][1]);
    }
#undef MINISTRAL
#undef QWEN3
#undef QWEN3_WINDOW
#undef MIXTRAL
#undef MIXTRAL_WITHOUT
    ckpt_refused("config", ckpt_path("%s/none", d.path).text, "", "none/config.json: No such file");
    test_remove_directory(&d);
}

// ---------------------------------------------------------------------------------------------------------------------
// checkpoint.h

static const char *const ckpt_files[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                         "trainer_state.json"};

static void test_checkpoint_round_trip(void) {
    TestDirectory d = test_make_directory();
    for (int i = 0; i < 3; i++) {
        ModelConfig config = ckpt_config(i == 1 ? "diff_v2" : "baseline", i > 0);
        const char *name = config.attention->name;
        if (i == 2) config.V = CHECKPOINT_STAGING / (int)sizeof(real) / config.C + 1; // a tensor of two chunks
        CkptModel a = ckpt_model_of(config, 10), b = ckpt_model_of(config, 0);
        if (i == 1) { // as in a build whose weights are narrower than its moments
            size_t bytes = a.list.buffer_count * sizeof(real);
            a.b.master = (real *)buffer_alloc(bytes, "a test");
            b.b.master = (real *)buffer_alloc(bytes, "a test");
            ckpt_fill(&a.list, a.b.master, 13);
        }
        cJSON *state = cJSON_CreateObject();
        json_add_u64(state, "step", (uint64_t)(i + 1));
        json_add_u64(state, "next_window", UINT64_MAX);
        cJSON_AddNumberToObject(state, "mean", 1.0 / 3);
        checkpoint_save(d.path, i + 1, ckpt_buffers(&a), state);
        cJSON_Delete(state);

        char dir[PATH_SIZE];
        EXPECT(checkpoint_find_newest(d.path, dir) == i + 1, "%s: the newest is %s", name, dir);
        ModelConfig c = config_json_read(dir);
        EXPECT(c.attention == a.config.attention && c.tied == a.config.tied, "%s: config.json", name);
        state = checkpoint_load_state(dir);
        uint64_t window = 0;
        double mean = 0;
        EXPECT(json_get_u64(state, "next_window", &window) && window == UINT64_MAX &&
                   json_get_number(state, "mean", &mean) && mean == 1.0 / 3,
               "%s: the state has %" PRIu64 " and %.17g", name, window, mean);
        cJSON_Delete(state);
        checkpoint_load_weights(dir, ckpt_buffers(&b), true);
        EXPECT(ckpt_same(&a, a.b.params, b.b.params), "%s: the weights differ", name);
        EXPECT(ckpt_same(&a, a.b.m, b.b.m) && ckpt_same(&a, a.b.v, b.b.v), "%s: the moments differ", name);
        EXPECT(i != 1 || ckpt_same(&a, a.b.master, b.b.master), "%s: the master weights differ", name);
        ckpt_model_free(&a);
        ckpt_model_free(&b);
    }
    test_remove_directory(&d);
}

// One weight at a time, so in every piece of every chunk, the last ones too.
static void test_checkpoint_not_finite(void) {
    ModelConfig config = ckpt_config("diff_v1", false);
    config.V = 61;
    CkptModel m = ckpt_model_of(config, 10);
    const CheckpointBuffers *b = ckpt_buffers(&m);
    static const floatX broken[] = {(floatX)NAN, (floatX)INFINITY, -(floatX)INFINITY};
    size_t chunk = CHECKPOINT_STAGING / sizeof(floatX), largest = 0;
    EXPECT(checkpoint_weights_finite(b), "good weights are taken for broken ones");
    for (int i = 0; i < m.list.count; i++) {
        const Tensor *t = &m.list.tensors[i];
        largest = max_size(largest, t->count);
        for (size_t e = 0; e < t->count; e++) {
            floatX *w = m.b.params + t->offset + e, kept = *w;
            *w = broken[e % 3];
            EXPECT(!checkpoint_weights_finite(b), "%g in element %zu of %s is not seen", (double)*w, e, t->name);
            *w = kept;
        }
    }
    EXPECT(largest > chunk && largest % chunk > CHECKPOINT_PIECE && chunk % CHECKPOINT_PIECE,
           "no tensor has several chunks of several pieces: the largest has %zu elements", largest);
    ckpt_model_free(&m);
}

static void test_checkpoint_same_bytes(void) {
    TestDirectory d = test_make_directory(), e = test_make_directory();
    ckpt_save(d.path, 7, 1);
    omp_set_num_threads(1);
    ckpt_save(e.path, 7, 1);
    omp_set_num_threads(omp_get_num_procs());
    for (int i = 0; i < 4; i++)
        EXPECT(ckpt_same_files(ckpt_path("%s/checkpoints/step_00000007/%s", d.path, ckpt_files[i]).text,
                               ckpt_path("%s/checkpoints/step_00000007/%s", e.path, ckpt_files[i]).text),
               "%s of two checkpoints of the same differs", ckpt_files[i]);
    test_remove_directory(&d);
    test_remove_directory(&e);
}

static void test_trainer_state_format(void) {
    TestDirectory d = test_make_directory();
    ckpt_save(d.path, 7, 1);
    size_t size = 0;
    char *text = ckpt_read_file(ckpt_path("%s/checkpoints/step_00000007/trainer_state.json", d.path).text, &size);
    cJSON *state = json_parse(text, size);
    static const char *const keys[] = {"step", "seed", "loss", "checksums", "checksum"};
    const cJSON *member = state ? state->child : NULL;
    for (int i = 0; i < 5; i++, member = member ? member->next : NULL)
        EXPECT(member && strcmp(member->string, keys[i]) == 0, "member %d is not %s in %s", i, keys[i], text);
    EXPECT(!member, "there are members behind the checksum: %s", text);
    char want[20];
    const char *tail = strstr(text, "\"checksum\":");
    FORMAT(want, "%016llx", (unsigned long long)XXH3_64bits(text, tail ? (size_t)(tail - text) : 0));
    EXPECT(tail && strstr(tail, want), "the checksum is %s, not %s", tail, want);
    const cJSON *checksums = cJSON_GetObjectItemCaseSensitive(state, "checksums");
    for (int i = 0; i < 3; i++) {
        size_t bytes = 0;
        char *file = ckpt_read_file(ckpt_path("%s/checkpoints/step_00000007/%s", d.path, ckpt_files[i]).text, &bytes);
        const cJSON *entry = cJSON_GetObjectItemCaseSensitive(checksums, ckpt_files[i]);
        const cJSON *digest = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(entry, "xxh3_64"), 0);
        double stated = 0;
        FORMAT(want, "%016llx", (unsigned long long)XXH3_64bits(file, bytes));
        EXPECT(json_get_number(entry, "bytes", &stated) && stated == (double)bytes && cJSON_IsString(digest) &&
                   strcmp(digest->valuestring, want) == 0,
               "the checksums of %s are wrong in %s", ckpt_files[i], text);
        free(file);
    }
    cJSON_Delete(state);
    free(text);
    test_remove_directory(&d);
}

// Chunks of a sparse file of more than one chunk, against the digests of its parts.
static void test_checkpoint_chunk_digests(void) {
    TestDirectory d = test_make_directory();
    CkptPath path = ckpt_path("%s/big", d.path);
    size_t bytes = (size_t)CHECKSUM_CHUNK + 100001, count = 0;
    char *content = (char *)checked_calloc(bytes, 1);
    for (size_t i = 0; i < bytes; i += 4093) content[i] = (char)(i >> 12);
    ckpt_write_file(path.text, content, bytes);
    uint64_t size = 0, *digests = file_digests(path.text, 0, 1, &count, &size);
    EXPECT(digests && count == 2 && size == bytes, "%zu chunks of %" PRIu64 " bytes", count, size);
    if (digests && count == 2) {
        EXPECT(digests[0] == XXH3_64bits(content, CHECKSUM_CHUNK), "the digest of the first chunk");
        EXPECT(digests[1] == XXH3_64bits(content + CHECKSUM_CHUNK, bytes - CHECKSUM_CHUNK),
               "the digest of the second chunk");
    }
    free(digests);
    free(content);
    test_remove_directory(&d);
}

static void test_checkpoint_flipped_bits(void) {
    TestDirectory d = test_make_directory();
    ckpt_save(d.path, 7, 1);
    CkptPath dir = ckpt_path("%s/checkpoints/step_00000007", d.path);
    TestRandom random = {11};
    Reason why;
    EXPECT(checkpoint_verify(dir.text, 7, why), "a good checkpoint was refused: %s", why);
    for (int f = 0; f < 4; f++) {
        CkptPath path = ckpt_path("%s/%s", dir.text, ckpt_files[f]);
        size_t size = 0;
        char *text = ckpt_read_file(path.text, &size);
        for (size_t i = 0; i < 150; i++) {
            // the first bytes, the last bytes (the state's checksum), and a sample between
            size_t at = i < 20 ? i : i < 100 ? size - 1 - (i - 20) : (size_t)test_random_int(&random, (int)size);
            char old = text[at];
            text[at] = (char)(old ^ (1 << test_random_int(&random, 8)));
            ckpt_write_file(path.text, text, size);
            FORMAT(why, "(nothing)");
            EXPECT(!checkpoint_verify(dir.text, 7, why), "a bit of byte %zu of %s was not missed", at, ckpt_files[f]);
            EXPECT(strstr(why, ckpt_files[f]) || f == 3, "%s was damaged, but the message is %s", ckpt_files[f], why);
            text[at] = old;
        }
        ckpt_write_file(path.text, text, size - 1);
        EXPECT(!checkpoint_verify(dir.text, 7, why), "the last byte of %s was not missed", ckpt_files[f]);
        text[size] = '\n';
        ckpt_write_file(path.text, text, size + 1);
        EXPECT(!checkpoint_verify(dir.text, 7, why), "a byte more in %s was not seen", ckpt_files[f]);
        ckpt_write_file(path.text, text, 0);
        EXPECT(!checkpoint_verify(dir.text, 7, why), "%s was emptied, and not missed", ckpt_files[f]);
        CHECK(unlink(path.text) == 0, "cannot remove %s", path.text);
        EXPECT(!checkpoint_verify(dir.text, 7, why) && strstr(why, "No such file"), "%s is not there: %s",
               ckpt_files[f], why);
        ckpt_write_file(path.text, text, size);
        EXPECT(checkpoint_verify(dir.text, 7, why), "%s is as it was, but: %s", ckpt_files[f], why);
        free(text);
    }
    EXPECT(!checkpoint_verify(dir.text, 8, why) && strstr(why, "saved at step 7"),
           "a checkpoint of step 7 as one of step 8");
    CHECK(truncate(ckpt_path("%s/trainer_state.json", dir.text).text, 100) == 0, "cannot truncate");
    ckpt_refused("state", dir.text, "", "trainer_state.json does not match its checksum");
    test_remove_directory(&d);
}

static void test_checkpoint_newest(void) {
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    char found[PATH_SIZE];
    EXPECT(checkpoint_find_newest(d.path, found) == -1, "a checkpoint in an empty directory");
    for (int64_t step = 8; step <= 11; step++) ckpt_save(d.path, step, (uint64_t)step);
    EXPECT(checkpoint_find_newest(d.path, found) == 11 && strstr(found, "/step_00000011"), "the newest is %s", found);
    // names that are not a checkpoint's, all of them newer
    static const char *const foreign[] = {"step_00000012.tmp", "step_000000012",    "step_0000012",  "step_0000001x",
                                          "Step_00000012",     "step_00000012.bak", "step_+0000012", "latest"};
    for (size_t i = 0; i < sizeof(foreign) / sizeof(foreign[0]); i++)
        run_command(&r, "cp -r '%s/checkpoints/step_00000011' '%s/checkpoints/%s'", d.path, d.path, foreign[i]);
    ckpt_write_text(ckpt_path("%s/checkpoints/step_00000099", d.path).text, "not a directory");
    EXPECT(checkpoint_find_newest(d.path, found) == 11, "the newest is %s", found);
    // a copy under a later name, a changed byte, a lost file: skipped, each with a line
    run_command(&r, "cp -r '%s/checkpoints/step_00000011' '%s/checkpoints/step_00000013'", d.path, d.path);
    run_command(&r, "printf x | dd of='%s/checkpoints/step_00000011/optimizer.safetensors' bs=1 seek=5000 conv=notrunc",
                d.path);
    run_command(&r, "rm '%s/checkpoints/step_00000010/config.json'", d.path);
    run_command(&r, "%s --child checkpoint-newest '%s'", ckpt_self(), d.path);
    EXPECT(r.status == 0 && strcmp(r.out, "9\n") == 0 && count_lines(r.err) == 3 && strstr(r.err, "saved at step 11") &&
               strstr(r.err, "optimizer.safetensors does not match its checksum") &&
               strstr(r.err, "cannot read its config.json"),
           "status %d, newest %s, %s", r.status, r.out, r.err);
    run_command(&r, "rm '%s'/checkpoints/step_0000000?/trainer_state.json", d.path);
    run_command(&r, "%s --child checkpoint-newest '%s'", ckpt_self(), d.path);
    EXPECT(r.status == 1 && count_lines(r.err) == 6 && strstr(r.err, "has no valid checkpoint"),
           "with all broken: status %d, %s", r.status, r.err);
    test_remove_directory(&d);
}

static int ckpt_count_entries(const char *path) {
    DIR *dir = opendir(path);
    int n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n - 2;
}

static void test_checkpoint_leftovers(void) {
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    Reason why;
    CkptPath dir = ckpt_path("%s/checkpoints/step_00000005", d.path);
    run_command(&r, "mkdir -p '%s.tmp/deep/er' ; echo old > '%s.tmp/deep/er/x' ; echo old > '%s.tmp/model.safetensors'",
                dir.text, dir.text, dir.text);
    ckpt_save(d.path, 5, 1); // over what an interrupted save of the same step left
    EXPECT(checkpoint_verify(dir.text, 5, why) && ckpt_count_entries(dir.text) == 4, "after an interrupted one: %s",
           why);
    run_command(&r, "echo x >> '%s/model.safetensors' ; mkdir '%s.old.tmp'", dir.text, dir.text);
    ckpt_save(d.path, 5, 2); // over a checkpoint that a resume found broken
    EXPECT(checkpoint_verify(dir.text, 5, why), "over a broken one: %s", why);
    checkpoint_clean(d.path); // where the two exchanged their names, a run's start removes what another left
    EXPECT(ckpt_count_entries(ckpt_path("%s/checkpoints", d.path).text) == 1, "something was left behind");
    test_remove_directory(&d);
}

static void test_checkpoint_killed_while_saving(void) {
    TestDirectory d = test_make_directory();
    int64_t reached = 0;
    for (int i = 0; i < 6; i++) {
        static ProgramResult r;
        run_command(&r, "timeout -s KILL %g %s --child checkpoint-save-for-ever '%s/%d'", 0.02 * (1 << i), ckpt_self(),
                    d.path, i);
        EXPECT(r.status == 137, "the child ended with status %d: %s", r.status, r.err);
        CkptPath run = ckpt_path("%s/%d", d.path, i);
        size_t count = 0;
        int64_t *steps = checkpoint_steps(run.text, &count);
        reached += (int64_t)count;
        for (size_t k = 0; k < count; k++) {
            Reason why;
            EXPECT(
                checkpoint_verify(ckpt_path("%s/checkpoints/step_%08" PRId64, run.text, steps[k]).text, steps[k], why),
                "checkpoint %" PRId64 " of a killed run: %s", steps[k], why);
        }
        free(steps);
    }
    EXPECT(reached > 0, "no child lived long enough to save a checkpoint");
    test_remove_directory(&d);
}

// Checkpoints of the steps 10, 20, 30 and 40.
static TestDirectory ckpt_four(void) {
    TestDirectory d = test_make_directory();
    for (int64_t step = 10; step <= 40; step += 10) ckpt_save(d.path, step, (uint64_t)step);
    return d;
}

// The steps that have a checkpoint.
static CkptPath ckpt_left(const char *run_dir) {
    size_t count = 0;
    int64_t *steps = checkpoint_steps(run_dir, &count);
    CkptPath left = ckpt_path("%s", "");
    for (size_t k = count; k-- > 0;) snprintf(left.text + strlen(left.text), 20, "%" PRId64 " ", steps[k]);
    free(steps);
    return left;
}

static void test_checkpoint_prune(void) {
    static const struct {
        int64_t keep, step; // of the steps 10, 20, 30, 40 and some foreign names
        const char *left;
    } cases[] = {
        {2, 40, "30 40 "},
        {1, 40, "40 "},
        {4, 40, "10 20 30 40 "},
        {5, 40, "10 20 30 40 "},
        {1000, 40, "10 20 30 40 "},
        {0, 40, "10 20 30 40 "},
        {-1, 40, "10 20 30 40 "},
        {INT64_MIN, 40, "10 20 30 40 "},
        {INT64_MAX, 40, "10 20 30 40 "},
        {1, 20, "20 30 40 "}, // 30 and 40 are broken ones of an earlier life: 20 is the newest that is whole
        {2, 30, "20 30 40 "},
    };
    TestDirectory four = ckpt_four();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TestDirectory d = test_make_directory();
        static ProgramResult r;
        run_command(&r,
                    "cp -r '%s/checkpoints' '%s' && cd '%s/checkpoints' && mkdir step_00000005.tmp best step_5 "
                    "step_00000010.old.tmp && echo x | tee step_00000010/x best/x > step_00000001",
                    four.path, d.path, d.path);
        checkpoint_prune(d.path, cases[i].keep, cases[i].step);
        CkptPath left = ckpt_left(d.path);
        EXPECT(strcmp(left.text, cases[i].left) == 0, "keep %" PRId64 " after step %" PRId64 " leaves %s, not %s",
               cases[i].keep, cases[i].step, left.text, cases[i].left);
        run_command(&r, "ls '%s/checkpoints' | grep -vc 'step_000000[1-4]0$'", d.path);
        EXPECT(atoi(r.out) == 3, "keep %" PRId64 ": %s entries that are foreign are left", cases[i].keep, r.out);
        test_remove_directory(&d);
    }
    TestDirectory d = test_make_directory();
    checkpoint_prune(d.path, 3, 10); // a run without checkpoints
    test_remove_directory(&d);
    test_remove_directory(&four);
}

// A broken checkpoint is not one of those that are kept; it goes when enough newer ones are whole.
static void test_checkpoint_prune_broken(void) {
    static const char *const damages[] = {
        "truncate -s -1 model.safetensors",         "rm optimizer.safetensors", "rm trainer_state.json",
        "truncate -s -1 trainer_state.json",        "printf x >> config.json",
        "cp ../step_00000010/trainer_state.json .", // of another step
        "rm config.json && mkdir config.json"};
    static const char *const left[] = {"10 20 30 40 ", "40 ", "10 20 30 40 "}; // keep 3, 1, 2
    TestDirectory four = ckpt_four();
    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++)
        for (int keep = 1; keep <= 3; keep++) {
            TestDirectory d = test_make_directory();
            static ProgramResult r;
            run_command(
                &r, "cp -r '%s/checkpoints' '%s' && for n in 20 30; do (cd '%s'/checkpoints/step_000000$n && %s); done",
                four.path, d.path, d.path, damages[i]);
            EXPECT(r.status == 0, "%s: %s", damages[i], r.err);
            checkpoint_prune(d.path, keep, 40);
            CkptPath have = ckpt_left(d.path);
            EXPECT(strcmp(have.text, left[keep % 3]) == 0, "%s: keep %d leaves %s, not %s", damages[i], keep, have.text,
                   left[keep % 3]);
            test_remove_directory(&d);
        }
    test_remove_directory(&four);
}

// What a child does to four checkpoints while directories with this text cannot be removed, and what is left.
static void ckpt_busy(const TestDirectory *d, const char *busy, const char *action, const char *more, int warnings,
                      const char *left, const char *leftovers) {
    static ProgramResult r;
    run_command(&r, "BUSY='%s' %s --child checkpoint-%s '%s' %s", busy, ckpt_self(), action, d->path, more);
    EXPECT(r.status == 0 && count_lines(r.err) == warnings && (!warnings || strstr(r.err, "trying again")),
           "%s %s with %s busy: status %d, %s", action, more, busy, r.status, r.err);
    CkptPath have = ckpt_left(d->path);
    EXPECT(strcmp(have.text, left) == 0, "%s %s with %s busy leaves %s, not %s", action, more, busy, have.text, left);
    run_command(&r, "cd '%s/checkpoints' && ls -d *.tmp 2>/dev/null | tr '\\n' ' '", d->path);
    EXPECT(strcmp(r.out, leftovers) == 0, "%s %s with %s busy: left over are %s, not %s", action, more, busy, r.out,
           leftovers);
}

static void test_checkpoint_removal_failure(void) {
    TestDirectory d = ckpt_four();
    static ProgramResult r;
    ckpt_busy(&d, "step_00000010", "prune", "3", 1, "20 30 40 ", "step_00000010.old.tmp ");
    ckpt_busy(&d, "step_00000010", "clean", "", 1, "20 30 40 ", "step_00000010.old.tmp "); // a start
    ckpt_busy(&d, "step_00000010", "save", "10", 0, "10 20 30 40 ", "step_00000010.old.tmp ");
    ckpt_busy(&d, "step_00000010", "prune", "3", 2, "10 20 30 40 ", "step_00000010.old.tmp ");
    ckpt_busy(&d, "", "prune", "3", 0, "20 30 40 ", "");
    run_command(&r, "mkdir '%s/checkpoints/step_00000050.tmp'", d.path); // of an interrupted save
    ckpt_busy(&d, "step_00000050", "save", "50", 0, "20 30 40 50 ", "step_00000050.old.tmp ");
    ckpt_busy(&d, "step_00000050", "drop", "50", 0, "20 30 40 50 ", "step_00000050.old.tmp ");
    ckpt_busy(&d, "", "clean", "", 0, "20 30 40 50 ", "");
    ckpt_busy(&d, "step_00000050", "drop", "30", 1, "20 30 ", "step_00000050.old.tmp ");
    ckpt_busy(&d, "step_00000030", "save", "30", 1, "20 30 ", "step_00000030.tmp step_00000050.old.tmp "); // replaced
    ckpt_busy(&d, "", "prune", "2", 0, "20 30 ", "");
    test_remove_directory(&d);
}

static void test_checkpoint_wrong_tensors(void) {
    TestDirectory d = test_make_directory();
    ckpt_save(d.path, 1, 3); // diff_v2, tied
    CkptPath dir = ckpt_path("%s/checkpoints/step_00000001", d.path), other = ckpt_path("%s/other", d.path);
    ckpt_accepted("load-all", dir.text, "", "");
    ckpt_accepted("load-weights", dir.text, "", "");
    ckpt_refused("load-weights", dir.text, "untied", "tensor lm_head.weight is missing");
    ckpt_refused("load-weights", dir.text, "qk-norm", "tensor model.layers.0.self_attn.q_norm.weight is missing");
    ckpt_refused("load-master", dir.text, "",
                 "tensor master.model.embed_tokens.weight is missing; this build has a different precision");

    // written from a list of tensors that has one more, one less, one of another shape
    static const struct {
        const char *remove, *add, *reshape, *word;
    } cases[] = {
        {"", "lm_head.weight", "", NULL}, // a copy of the embedding
        {"", "lm_head.weight", "",
         "lm_head.weight differs from the embedding, but config.json has tie_word_embeddings"},
        {"", "score.weight", "", "unexpected tensor score.weight"},
        {"", "model.layers.2.input_layernorm.weight", "", "unexpected tensor model.layers.2.input_layernorm.weight"},
        {"model.layers.1.self_attn.lambda_proj.weight", "", "",
         "model.layers.1.self_attn.lambda_proj.weight is missing"},
        {"model.norm.weight", "model.norm.weights", "", "model.norm.weight is missing"},
        {"", "", "model.norm.weight", "model.norm.weight has shape [1,12]; config.json implies [12]"},
        {"", "", "model.embed_tokens.weight",
         "model.embed_tokens.weight has shape [12,11]; config.json implies [11,12]"},
        {"", "model.layers.0.self_attn.rotary_emb.inv_freq", "", NULL},
    };
    directory_create(other.text);
    CkptModel m = ckpt_model("diff_v2", true, 3);
    CheckpointPart part = checkpoint_part("", m.b.params, DTYPE_OF(floatX), false);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        SafeTensorSpec specs[64];
        int count = 0;
        SafeTensorSpec *all = checkpoint_specs(&m.list, &part, 1, DTYPE_F32);
        for (int t = 0; t < m.list.count; t++) {
            if (strcmp(all[t].name, cases[i].remove) == 0) continue;
            specs[count] = all[t];
            if (strcmp(all[t].name, cases[i].reshape) == 0) {
                specs[count].shape[0] = all[t].ndim == 1 ? 1 : all[t].shape[1];
                specs[count].shape[1] = all[t].shape[0];
                specs[count].ndim = 2;
            }
            count++;
        }
        free(all);
        bool head = strcmp(cases[i].add, "lm_head.weight") == 0; // of the model's V and C
        if (*cases[i].add) specs[count++] = ckpt_spec(cases[i].add, DTYPE_F32, head ? 2 : 1, head ? 11 : 3, 12);
        real zeros[512];
        memset(zeros, 0, sizeof(zeros));
        SafeTensorsWriter *w =
            safetensors_create(ckpt_path("%s/model.safetensors", other.text).text, specs, count, true);
        for (int t = 0; t < count; t++) {
            if (t == count - 1 && head && cases[i].word) zeros[11 * 12 - 1] = 1; // the last element of the head
            safetensors_write(w, t, 0, zeros, DTYPE_OF(real), safetensors_spec_elements(&specs[t]));
        }
        safetensors_finish(w);
        if (cases[i].word) ckpt_refused("load-weights", other.text, "", cases[i].word);
        else ckpt_accepted("load-weights", other.text, "", "");
    }
    ckpt_model_free(&m);
    test_remove_directory(&d);
}

// Weights alone, of every type, in shards: what a directory of the Hub may be.
static void test_checkpoint_weight_types(void) {
    TestDirectory d = test_make_directory();
    CkptModel a = ckpt_model("baseline", false, 21), b = ckpt_model("baseline", false, 0);
    b.b.master = (real *)buffer_alloc(b.list.buffer_count * sizeof(real), "a test");
    ckpt_buffers(&b);
    // values that every type has, so that the test is exact
    for (int i = 0; i < a.list.count; i++)
        for (size_t k = 0; k < a.list.tensors[i].count; k++)
            a.b.params[a.list.tensors[i].offset + k] = (floatX)((double)((k + (size_t)i) % 255) - 127);
    CheckpointPart part = checkpoint_part("", a.b.params, DTYPE_OF(floatX), false);
    SafeTensorSpec *specs = checkpoint_specs(&a.list, &part, 1, DTYPE_F32);
    char index[8192] = "{\"weight_map\": {";
    for (int shard = 0; shard < 3; shard++) {
        SafeTensorSpec mine[64];
        int tensor[64], count = 0;
        for (int i = 0; i < a.list.count; i++) {
            if (i % 3 != shard) continue;
            mine[count] = specs[i];
            mine[count].dtype = (DType)(i % 4);
            tensor[count++] = i;
            snprintf(index + strlen(index), 200, "%s\"%s\": \"%d.safetensors\"", index[16] ? ", " : "", specs[i].name,
                     shard);
        }
        SafeTensorsWriter *w =
            safetensors_create(ckpt_path("%s/%d.safetensors", d.path, shard).text, mine, count, shard == 0);
        for (int i = 0; i < count; i++)
            safetensors_write(w, i, 0, a.b.params + a.list.tensors[tensor[i]].offset, DTYPE_OF(floatX),
                              safetensors_spec_elements(&mine[i]));
        safetensors_finish(w);
    }
    strcat(index, "}}");
    ckpt_write_text(ckpt_path("%s/model.safetensors.index.json", d.path).text, index);
    checkpoint_load_weights(d.path, &b.b, false);
    EXPECT(ckpt_same(&a, a.b.params, b.b.params), "the weights differ");
    EXPECT(ckpt_same(&a, a.b.params, b.b.master), "the master weights are not those of the file");
    free(specs);
    ckpt_model_free(&a);
    ckpt_model_free(&b);
    test_remove_directory(&d);
}

static void test_gradient_dump(void) {
    TestDirectory d = test_make_directory();
    CkptPath path = ckpt_path("%s/grads.safetensors", d.path);
    CkptModel m = ckpt_model("diff_v2", true, 5);
    ckpt_accepted("dump", path.text, "", "");
    SafeTensors *s = safetensors_open(path.text);
    EXPECT(s->count == (size_t)m.list.count + 1, "%zu tensors", s->count);
    double loss = 0;
    safetensors_read(s, "loss", 0, 1, &loss, DTYPE_F64);
    EXPECT(loss == 1.5, "the loss is %g", loss);
    const SafeTensor *first = safetensors_find(s, "loss");
    uint64_t place = first->end;
    EXPECT(first->ndim == 1 && first->shape[0] == 1 && first->dtype == DTYPE_F32, "the shape of the loss");
    for (int i = 0; i < m.list.count; i++) {
        const Tensor *t = &m.list.tensors[i];
        const SafeTensor *e = safetensors_find(s, t->name);
        real x[512];
        CHECK(e && e->count == t->count && t->count <= 512, "no gradient of %s", t->name);
        EXPECT(e->begin == place && e->dtype == DTYPE_F32, "%s is not in the order of the table", t->name);
        place = e->end;
        safetensors_read(s, t->name, 0, t->count, x, DTYPE_OF(real));
        EXPECT(memcmp(x, m.b.m + t->offset, t->count * sizeof(real)) == 0, "the gradient of %s differs", t->name);
    }
    safetensors_close(s);
    EXPECT(ckpt_count_entries(d.path) == 1, "more than the dump was left behind");
    ckpt_accepted("dump", path.text, "", ""); // again over the same file
    ckpt_accepted("dump", "/dev/null", "", "");
    ckpt_refused("dump", "/dev/full", "", "cannot write /dev/full: No space left");
    ckpt_refused("dump", ckpt_path("%s/none/x", d.path).text, "", "none/x: No such file");
    ckpt_refused("dump", ckpt_path("%s/x", path.text).text, "", "Not a directory");
    static ProgramResult r; // a pipe takes it in order
    run_command(&r, "%s --child checkpoint-dump /dev/stdout | cmp - '%s'", ckpt_self(), path.text);
    EXPECT(r.status == 0, "through a pipe the dump is another: %s%s", r.out, r.err);
    ckpt_model_free(&m);
    test_remove_directory(&d);
}

// ---------------------------------------------------------------------------------------------------------------------
// logger.h

static Log *ckpt_log_open(const char *dir) {
    Log *log = (Log *)checked_calloc(1, sizeof(Log));
    cJSON *run = cJSON_CreateObject();
    cJSON_AddStringToObject(run, "command", "x");
    log_create(log, dir, run);
    cJSON_Delete(run);
    return log;
}

static void ckpt_log_record(Log *log, const char *kind, int64_t step) {
    log_begin(log, kind, step);
    log_end(log);
}

static void test_log_records(void) {
    TestDirectory d = test_make_directory();
    CkptPath dir = ckpt_path("%s/a/b", d.path); // parents are made
    Log *log = ckpt_log_open(dir.text);
    log_begin(log, "train", 3);
    log_number(log, "loss", (double)(float)3.14159274);
    log_number(log, "nan", NAN);
    log_number(log, "inf", -INFINITY);
    log_integer(log, "tokens", INT64_MIN);
    log_number(log, "loss_z", NAN);
    log_bool(log, "skipped", true);
    log_string(log, "text", "a \"b\"\n\xFF");
    log_bytes(log, "bytes", "c\0d", 3);
    log_end(log);
    static char text[200000];
    memset(text, '\n', sizeof(text) - 1); // twelve times too long when escaped
    log_begin(log, "event", 3);
    log_string(log, "long", text);
    log_end(log);
    cJSON *whole = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(whole, "list");
    cJSON_AddItemToArray(list, cJSON_CreateString(text));
    cJSON_AddItemToArray(list, cJSON_CreateObject());
    cJSON_AddNumberToObject(cJSON_GetArrayItem(list, 1), "x", 1);
    cJSON_AddNullToObject(cJSON_GetArrayItem(list, 1), "y");
    log_record(log, whole);
    Log *none = (Log *)checked_calloc(1, sizeof(Log)); // a closed log takes records, too
    ckpt_log_record(none, "train", 1);
    log_record(none, whole);
    log_sync(none);
    log_close(none);
    log_sync(log);
    log_close(log);
    free(none);
    free(log);

    size_t size = 0;
    char *lines = ckpt_read_file(ckpt_path("%s/log.jsonl", dir.text).text, &size);
    const char *want = "{\"kind\": \"train\", \"step\": 3, \"loss\": 3.14159274, \"nan\": null, \"inf\": null, "
                       "\"tokens\": -9223372036854775808, \"loss_z\": null, \"skipped\": true, "
                       "\"text\": \"a \\\"b\\\"\\u000a\xEF\xBF\xBD\", \"bytes\": \"c\\u0000d\"}\n";
    EXPECT(strncmp(lines, want, strlen(want)) == 0, "the record is %.300s", lines);
    EXPECT(count_lines(lines) == 3, "%d lines", count_lines(lines));
    char *second = strchr(lines, '\n') + 1, *third = strchr(second, '\n') + 1;
    third[-1] = 0;
    cJSON *record = json_parse(second, strlen(second));
    EXPECT(cJSON_IsObject(record), "a cut string leaves no JSON: %.100s", second);
    cJSON_Delete(record);
    record = json_parse(third, strlen(third));
    EXPECT(cJSON_Compare(record, whole, true) && strstr(third, "\", {\"x\": 1, \"y\": null}]}\n"),
           "a long record is another: %.100s", third);
    cJSON_Delete(record);
    cJSON_Delete(whole);
    free(lines);
    cJSON *run = log_read_run_json(dir.text);
    EXPECT(run->child && strcmp(run->child->string, "command") == 0, "run.json is not what was given");
    cJSON_Delete(run);
    test_remove_directory(&d);
}

static void test_log_resume(void) {
    static const struct {
        const char *add, *left; // behind the records of steps 1 to 4, with a checkpoint at step 2
        int warnings;
    } cases[] = {
        {"", "", 0},
        {"{\"kind\": \"train\", \"step\": 2, \"lo", "", 0},
        {"{\"kind\": \"train\", \"step\": 2}", "", 0}, // whole but for its newline
        {"{\"kind\": \"val\", \"step\": 2}\n", "{\"kind\": \"val\", \"step\": 2}\n", 0},
        {"{\"kind\": \"tr\n{\"kind\": \"val\", \"step\": 1}\n", "{\"kind\": \"val\", \"step\": 1}\n", 1},
        {"{\"kind\": \"val\", \"step\": 10}\n{\"kind\": \"val\", \"step\": 1}\n", "{\"kind\": \"val\", \"step\": 1}\n",
         0},
        {"\n", "", 0},
        {"[1]\n", "", 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TestDirectory d = test_make_directory();
        CkptPath dir = ckpt_path("%s/run", d.path), path = ckpt_path("%s/run/log.jsonl", d.path);
        Log *log = ckpt_log_open(dir.text);
        for (int64_t step = 1; step <= 4; step++) ckpt_log_record(log, "train", step);
        log_close(log);
        int fd = open(path.text, O_WRONLY | O_APPEND);
        file_write(fd, cases[i].add, strlen(cases[i].add), path.text);
        close(fd);
        free(log);
        static ProgramResult r;
        run_command(&r, "%s --child checkpoint-resume '%s' 2", ckpt_self(), dir.text);
        EXPECT(r.status == 0 && count_lines(r.err) == cases[i].warnings, "case %zu: status %d: %s", i, r.status, r.err);
        char want[500];
        FORMAT(want,
               "{\"kind\": \"train\", \"step\": 1}\n{\"kind\": \"train\", \"step\": 2}\n%s{\"kind\": \"train\", "
               "\"step\": 3}\n",
               cases[i].left);
        size_t size = 0;
        char *text = ckpt_read_file(path.text, &size);
        EXPECT(strcmp(text, want) == 0 && size == strlen(want), "case %zu: the log is\n%s", i, text);
        EXPECT(ckpt_count_entries(dir.text) == 2, "case %zu: something was left behind", i);
        free(text);
        test_remove_directory(&d);
    }
}

static void test_run_directories(void) {
    TestDirectory d = test_make_directory();
    CkptPath dir = ckpt_path("%s/run", d.path), log_file = ckpt_path("%s/run/log.jsonl", d.path);
    ckpt_refused("resume", dir.text, "", "has no run.json: it is not a run");
    ckpt_accepted("create", dir.text, "", "");
    ckpt_refused("create", dir.text, "", "already contains a run; use --resume");
    ckpt_accepted("resume", dir.text, "", "");
    CHECK(unlink(log_file.text) == 0, "cannot remove %s", log_file.text);
    ckpt_accepted("resume", dir.text, "", ""); // stopped between run.json and its log
    Log *log = (Log *)checked_calloc(1, sizeof(Log));
    log_resume(log, dir.text, 0);
    ckpt_refused("resume", dir.text, "", "another process is running this run");
    log_close(log);
    free(log);
    ckpt_accepted("resume", dir.text, "", "");
    CHECK(unlink(ckpt_path("%s/run.json", dir.text).text) == 0, "cannot remove run.json");
    ckpt_refused("create", dir.text, "", "log.jsonl exists without a run.json");
    CHECK(unlink(log_file.text) == 0, "cannot remove %s", log_file.text);
    directory_create(ckpt_path("%s/checkpoints", dir.text).text);
    ckpt_refused("create", dir.text, "", "checkpoints exists without a run.json");
    ckpt_write_text(log_file.text, "");
    ckpt_refused("create", log_file.text, "", "log.jsonl: File exists");
    test_remove_directory(&d);
}

// The one that the log names by its first record has written run.json, and the other has changed nothing.
static void test_run_simultaneous_starts(void) {
    enum { TRIES = 60 };
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    run_command(
        &r,
        "for try in $(seq %d); do for n in 1 2; do { %s --child checkpoint-create '%s/run'$try $n 2>> '%s/err'; } "
        "& done; wait; done",
        TRIES, ckpt_self(), d.path, d.path);
    EXPECT(r.status == 0, "status %d: %s", r.status, r.err);
    for (int try_count = 1; try_count <= TRIES; try_count++) {
        CkptPath dir = ckpt_path("%s/run%d", d.path, try_count);
        double step = 0;
        size_t size = 0;
        char *text = ckpt_read_file(ckpt_path("%s/log.jsonl", dir.text).text, &size);
        cJSON *run = log_read_run_json(dir.text), *record = cJSON_Parse(text);
        const char *by = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(run, "by"));
        EXPECT(json_get_number(record, "step", &step) && by && strtod(by, NULL) == step - 1 && count_lines(text) == 1,
               "try %d: run.json is by start %s, the log by start %g: %s", try_count, by ? by : "?", step - 1, text);
        EXPECT(ckpt_count_entries(dir.text) == 2, "try %d: something was left behind", try_count);
        cJSON_Delete(run);
        cJSON_Delete(record);
        free(text);
    }
    char lines[16384];
    test_read_file(ckpt_path("%s/err", d.path).text, lines, sizeof(lines));
    int refused = 0;
    for (char *line = strtok(lines, "\n"); line; line = strtok(NULL, "\n")) {
        EXPECT(strstr(line, "another process is running this run") || strstr(line, "already contains a run"), "%s",
               line);
        refused++;
    }
    EXPECT(refused == TRIES, "%d of %d starts were refused", refused, TRIES);
    test_remove_directory(&d);
}

static void test_run_locked_out(void) {
    TestDirectory d = test_make_directory();
    CkptPath dir = ckpt_path("%s/run", d.path), temporary = ckpt_path("%s/run/run.json.tmp", d.path);
    directory_create(dir.text);
    int fd = log_lock_file(dir.text, temporary.text, O_CREAT); // another start, before it writes
    file_write(fd, "x", 1, temporary.text);
    ckpt_refused("create", dir.text, "", "another process is running this run");
    struct stat st;
    EXPECT(fstat(fd, &st) == 0 && st.st_size == 1 && ckpt_count_entries(dir.text) == 1, "the loser changed something");
    close(fd); // it died: what it left is no obstacle
    ckpt_accepted("create", dir.text, "", "");
    EXPECT(ckpt_count_entries(dir.text) == 2, "something was left behind");

    Log *log = (Log *)checked_calloc(1, sizeof(Log));
    cJSON *run = log_read_run_json(dir.text);
    log->lock = log_lock(dir.text);
    for (int i = 0; i < 3; i++) {
        log_write_run(log, dir.text, run);
        ckpt_refused("resume", dir.text, "", "another process is running this run");
        ckpt_refused("create", dir.text, "", "already contains a run");
        EXPECT(ckpt_count_entries(dir.text) == 2, "something was left behind");
    }
    cJSON_Delete(run);
    log_close(log);
    free(log);
    ckpt_accepted("resume", dir.text, "", "");
    test_remove_directory(&d);
}

// ---------------------------------------------------------------------------------------------------------------------

// Far more than a model has that is read here, and less than the limit of a header's values.
static void test_safetensors_many_tensors(void) {
    enum { TENSORS = 100000 };
    TestDirectory d = test_make_directory();
    char path[600];
    FORMAT(path, "%s/many.safetensors", d.path);
    char *text = (char *)checked_calloc(TENSORS, 150);
    size_t n = 8;
    for (int i = 0; i < TENSORS; i++)
        n += (size_t)sprintf(text + n,
                             "%s\"model.layers.%d.mlp.experts.up_proj.weight\":{\"dtype\":\"F32\",\"shape\":[1,1],"
                             "\"data_offsets\":[%d,%d]}",
                             i ? "," : "{", i, 4 * i, 4 * i + 4);
    text[n++] = '}';
    uint64_t length = n - 8;
    memcpy(text, &length, 8);
    memset(text + n, 0, 4 * (size_t)TENSORS);
    data_write_file(path, text, n + 4 * (size_t)TENSORS);
    free(text);
    SafeTensors *s = safetensors_open(path);
    EXPECT(s->count == TENSORS && safetensors_find(s, "model.layers.99999.mlp.experts.up_proj.weight"), "%zu tensors",
           s->count);
    safetensors_close(s);
    test_remove_directory(&d);
}

static const Test checkpoint_tests[] = {
    {"a file of 100,000 tensors is read", test_safetensors_many_tensors},
    {"every 16-bit pattern converts to the number that its format defines, and back to the same bits",
     test_half_round_trip},
    {"a conversion to 16 bits rounds to nearest, ties to even, and overflows to infinity", test_half_rounding},
    {"a double is converted to 16 bits with one rounding, not through a float", test_half_single_rounding},
    {"numbers written to JSON are read back bit for bit", test_json_numbers},
    {"strings in JSON are escaped and are UTF-8", test_json_strings},
    {"tensors of every type are read back from a safetensors file with the expected header",
     test_safetensors_round_trip},
    {"a malicious safetensors header is rejected with a one-line error", test_safetensors_hostile_headers},
    {"a tensor of an unknown type is rejected when it is read, not before", test_safetensors_unknown_type},
    {"a damaged safetensors file causes an error message, never a signal", test_safetensors_damaged},
    {"shards with an index are read as one file, and an incorrect index is rejected", test_safetensors_sharded},
    {"config.json has its keys in a fixed order and is read back unchanged", test_config_round_trip},
    {"a Llama's config.json is read with Llama's defaults", test_config_defaults},
    {"a config.json of an unsupported model is rejected with the key and value", test_config_refusals},
    {"a checkpoint is read back bit for bit", test_checkpoint_round_trip},
    {"a weight that is not finite is detected at any position", test_checkpoint_not_finite},
    {"two checkpoints of the same state have the same bytes", test_checkpoint_same_bytes},
    {"trainer_state.json ends in the checksums of all files and its own", test_trainer_state_format},
    {"a file of several chunks has one digest per chunk", test_checkpoint_chunk_digests},
    {"a flipped bit or a missing or additional byte in any file is detected", test_checkpoint_flipped_bits},
    {"the newest valid checkpoint is found, and damaged ones are reported", test_checkpoint_newest},
    {"a checkpoint replaces the files of an interrupted or damaged one", test_checkpoint_leftovers},
    {"a process killed while saving leaves only complete checkpoints", test_checkpoint_killed_while_saving},
    {"pruning keeps the newest checkpoints, and all if there are fewer than it should keep", test_checkpoint_prune},
    {"pruning does not count a damaged checkpoint as kept", test_checkpoint_prune_broken},
    {"a checkpoint that cannot be removed causes a warning and is removed later", test_checkpoint_removal_failure},
    {"a missing tensor, an unknown tensor and a wrong shape are reported by name", test_checkpoint_wrong_tensors},
    {"weights of all types are read from shards", test_checkpoint_weight_types},
    {"a gradient dump to a file, a device or a pipe contains the loss and every gradient", test_gradient_dump},
    {"a log record is one line of valid JSON", test_log_records},
    {"a resume removes an incomplete line and the records after its checkpoint from the log", test_log_resume},
    {"a directory that contains a run is not started again, and one without a run is not resumed",
     test_run_directories},
    {"of two simultaneous first starts one locks the run, and the other changes nothing", test_run_simultaneous_starts},
    {"a start without the lock changes nothing, and a replaced run.json stays locked", test_run_locked_out},
};
enum { CHECKPOINT_TEST_COUNT = sizeof(checkpoint_tests) / sizeof(checkpoint_tests[0]) };
#endif
