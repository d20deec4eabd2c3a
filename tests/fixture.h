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

static inline void fixture_write_tokens(const Fixture *f) {
    const SafeTensor *t = safetensors_find(f->file, "tokens");
    uint16_t read[256];
    int tokens[256];
    CHECK(t && t->count <= 256 && t->end - t->begin == 2 * t->count &&
              file_pread(f->file->files[0].fd, read, 2 * t->count, t->begin),
          "fixture %s has no tokens", f->name);
    for (size_t i = 0; i < t->count; i++) tokens[i] = read[i];
    test_write_shard(test_text("%s/tokens.bin", f->dir.path), 2, tokens, t->count);
}

static inline void fixture_write_weights(const Fixture *f) {
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
    SafeTensorsWriter *w = safetensors_create(test_text("%s/model.safetensors", f->dir.path), specs, count);
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
    memset(&f, 0, sizeof(f));
    FORMAT(f.name, "%s.%s", variant, size);
    f.dir = test_make_directory();
    f.file = safetensors_open(test_text("dev/reference/fixtures/%s.safetensors", f.name));
    f.B = atoi(fixture_metadata(&f, "batch_size")), f.T = atoi(fixture_metadata(&f, "seq_len"));
    test_write_text(test_text("%s/config.json", f.dir.path), fixture_metadata(&f, "config"));
    fixture_write_tokens(&f);
    fixture_write_weights(&f);
    return f;
}

// The gradient of a parameter, to be freed; NULL when there is none of `count` elements.
static inline double *fixture_gradient(const Fixture *f, const char *name, size_t count) {
    const SafeTensor *t = safetensors_find(f->file, test_text("grad.%s", name));
    if (!t || t->count != count) return NULL;
    double *values = (double *)checked_calloc(count, sizeof(double));
    safetensors_read(f->file, t->name, 0, count, values, DTYPE_F64);
    return values;
}
static inline int fixture_gradient_count(const Fixture *f) {
    int count = 0;
    for (size_t i = 0; i < f->file->count; i++) count += strncmp(f->file->tensors[i].name, "grad.", 5) == 0;
    return count;
}
