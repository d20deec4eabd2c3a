/*
checkpoint_files.h: what tests of the files of a run share: small models, their checkpoints, and programs that end.

What ends a program is tested in a child: this executable again, as `--child checkpoint-ACTION ...`, for which
main calls checkpoint_test_child before anything else.
*/
#pragma once
#include "../llmc/checkpoint/checkpoint.h"
#include "../llmc/log/logger.h"
#include "harness.h"

// ---------------------------------------------------------------------------------------------------------------------
// helpers

static char *ckpt_read_file(const char *path, size_t *size) {
    char *text = file_read(path, 1 << 30, size);
    CHECK(text != NULL, "cannot read %s: %s", path, strerror(errno));
    return text;
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
    } else if (strcmp(action, "save") == 0) ckpt_save(path, strtoll(more, NULL, 10), 1);
    else if (strcmp(action, "clean") == 0) checkpoint_clean(path);
    else if (strcmp(action, "prune") == 0) checkpoint_prune(path, strtoll(more, NULL, 10), 40);
    else if (strcmp(action, "drop") == 0) checkpoint_drop_after(path, strtoll(more, NULL, 10));
    else if (strcmp(action, "state") == 0) cJSON_Delete(checkpoint_load_state(path));
    else if (strcmp(action, "create") == 0 || strcmp(action, "resume") == 0) {
        Log *log = (Log *)checked_calloc(1, sizeof(Log));
        cJSON *run = cJSON_CreateObject();
        cJSON_AddStringToObject(run, "by", more);
        if (*action == 'c') log_create(log, path, run);
        else log_resume(log, path, strtoll(more, NULL, 10), false);
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
    run_command(&r, "%s --child checkpoint-%s '%s' '%s'", test_self(), action, path, more);
    EXPECT(r.status == EXIT_FAILED && count_lines(r.err) == 1 && strncmp(r.err, "diffv2: ", 8) == 0 &&
               strstr(r.err, word),
           "%s %s %s: status %d, not 1 and one line with '%s': %.300s", action, path, more, r.status, word, r.err);
}
static void ckpt_accepted(const char *action, const char *path, const char *more, const char *out) {
    static ProgramResult r;
    run_command(&r, "%s --child checkpoint-%s '%s' '%s'", test_self(), action, path, more);
    EXPECT(r.status == 0 && strcmp(r.out, out) == 0, "%s %s %s: status %d, printed '%s', not '%s': %.300s", action,
           path, more, r.status, r.out, out, r.err);
}
