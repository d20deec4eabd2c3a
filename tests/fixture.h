/*
fixture.h: a fixture of dev/reference (fixtures.py describes the format) as a checkpoint directory and a token shard.
*/
#pragma once
#include "../llmc/checkpoint/safetensors.h"
#include "../llmc/checkpoint/safetensors_writer.h"
#include "harness.h"

// The model's plan, without memory.
static void model_plan(Model *model, const ModelConfig *config, int B, int T, Purpose purpose, Recompute recompute,
                       RunRanks ranks) {
    memset(model, 0, sizeof(*model));
    plan_build(&model->plan, config, B, T, purpose, recompute, ranks);
}

typedef struct {
    char name[64];
    TestDirectory dir; // config.json, model.safetensors, tokens.bin
    int B, T;
    SafeTensors *file; // `loss` and `grad.NAME`, F64
} Fixture;

static inline bool fixture_is_weight(const char *name) {
    return strcmp(name, "loss") != 0 && strcmp(name, "tokens") != 0 && strncmp(name, "grad.", 5) != 0;
}

static inline const char *fixture_metadata(const Fixture *f, const char *key) {
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(f->file->files[0].header, "__metadata__");
    const char *value = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, key));
    CHECK(value, "fixture %s has no %s", f->name, key);
    return value;
}

static inline void fixture_write(const Fixture *f, const char *file, const void *head, size_t head_bytes,
                                 const void *data, size_t bytes) {
    char path[600];
    FORMAT(path, "%s/%s", f->dir.path, file);
    int fd = file_create(path);
    file_write(fd, head, head_bytes, path);
    file_write(fd, data, bytes, path);
    CHECK(close(fd) == 0, "cannot write %s: %s", path, strerror(errno));
}

static inline void fixture_write_tokens(const Fixture *f) {
    const SafeTensor *t = safetensors_find(f->file, "tokens");
    int32_t header[256] = {20240520, 1};
    uint16_t tokens[256];
    CHECK(t && t->count <= 256 && t->end - t->begin == 2 * t->count &&
              file_pread(f->file->files[0].fd, tokens, 2 * t->count, t->begin),
          "fixture %s has no tokens", f->name);
    header[2] = (int32_t)t->count;
    fixture_write(f, "tokens.bin", header, sizeof(header), tokens, 2 * t->count);
}

static inline void fixture_write_weights(const Fixture *f) {
    char path[600];
    int count = 0;
    SafeTensorSpec *specs = (SafeTensorSpec *)checked_calloc(f->file->count, sizeof(SafeTensorSpec));
    for (size_t i = 0; i < f->file->count; i++) {
        const SafeTensor *t = &f->file->tensors[i];
        if (!fixture_is_weight(t->name)) continue;
        SafeTensorSpec *s = &specs[count++];
        FORMAT(s->name, "%s", t->name);
        s->dtype = t->dtype, s->ndim = t->ndim;
        memcpy(s->shape, t->shape, sizeof(s->shape));
    }
    FORMAT(path, "%s/model.safetensors", f->dir.path);
    SafeTensorsWriter *w = safetensors_create(path, specs, count, true);
    for (int i = 0; i < count; i++) {
        size_t elements = safetensors_spec_elements(&specs[i]);
        float *values = (float *)checked_calloc(elements, sizeof(float));
        safetensors_read(f->file, specs[i].name, 0, elements, values, DTYPE_F32);
        safetensors_write(w, i, 0, values, DTYPE_F32, elements);
        free(values);
    }
    safetensors_finish(w);
    free(specs);
}

static inline Fixture fixture_open(const char *variant, const char *size) {
    Fixture f;
    char path[256];
    memset(&f, 0, sizeof(f));
    FORMAT(f.name, "%s_%s", variant, size);
    FORMAT(path, "dev/reference/fixtures/%s.safetensors", f.name);
    f.dir = test_make_directory();
    f.file = safetensors_open(path);
    f.B = atoi(fixture_metadata(&f, "batch_size")), f.T = atoi(fixture_metadata(&f, "seq_len"));
    const char *config = fixture_metadata(&f, "config");
    fixture_write(&f, "config.json", "", 0, config, strlen(config));
    fixture_write_tokens(&f);
    fixture_write_weights(&f);
    return f;
}
static inline void fixture_close(Fixture *f) {
    safetensors_close(f->file);
    test_remove_directory(&f->dir);
}

// The gradient of a parameter, to be freed; NULL when there is none of `count` elements.
static inline double *fixture_gradient(const Fixture *f, const char *name, size_t count) {
    char of[160];
    FORMAT(of, "grad.%s", name);
    const SafeTensor *t = safetensors_find(f->file, of);
    if (!t || t->count != count) return NULL;
    double *values = (double *)checked_calloc(count, sizeof(double));
    safetensors_read(f->file, of, 0, count, values, DTYPE_F64);
    return values;
}
static inline int fixture_gradient_count(const Fixture *f) {
    int count = 0;
    for (size_t i = 0; i < f->file->count; i++) count += strncmp(f->file->tensors[i].name, "grad.", 5) == 0;
    return count;
}
