/*
fuzz_safetensors.c: safetensors_open with a damaged file. Each small tensor is found by its name and read as each type,
whole and in parts; the results must equal each other and the bytes of the file. Then the tensors are compared with
those of a model with experts (checkpoint_compare), which may be parts of the file's tensors (foreign_tensors_view).

Two of three mutations repair the length of the header; otherwise the reader rejects the file before the parser.
*/
#include "fuzz.h"
#define SAFETENSORS_STAGING 64
#include "../../llmc/experts/all_operations.h"
#include "../../llmc/checkpoint/checkpoint_tensors.h"

const char fuzz_file[] = "model.safetensors";

enum { READ_LIMIT = 1024, LENGTH_BYTES = 8 };
static char path[PATH_SIZE];
static TensorList list;
static SafeTensorSpec *specs;
static int spec_total;
static double whole[READ_LIMIT], part[READ_LIMIT]; // large enough for every type

static ModelConfig small_config(void) {
    ModelConfig c;
    memset(&c, 0, sizeof(c));
    c.attention = variant_find("diff_v2");
    c.V = 3, c.C = 2, c.L = 1, c.NH = 1, c.NKV = 1, c.D = 8, c.F = 2, c.T = 4, c.E = 2, c.K = 1, c.FE = 2;
    c.rope_theta = 10000, c.rms_norm_eps = 1e-5, c.tied = true;
    return c;
}

void fuzz_prepare(void) {
    ModelConfig c = small_config();
    list = tensor_list_build(&c, 1);
    CheckpointPart all = checkpoint_part("", NULL, DTYPE_F32, false);
    FORMAT(path, "%s/%s", fuzz_directory(), fuzz_file);
    specs = checkpoint_specs(&list, &all, 1, DTYPE_F32, &spec_total);
}

static void seed_types(void) {
    SafeTensorSpec small[DTYPE_COUNT + 1];
    const double values[6] = {0, -1.5, 65504, 1e-8, INFINITY, NAN};
    char to[PATH_SIZE];
    FORMAT(to, "%s/types", fuzz_seed_path);
    memset(small, 0, sizeof(small));
    for (int t = 0; t <= DTYPE_COUNT; t++) {
        FORMAT(small[t].name, "t%d", t);
        small[t].dtype = t < DTYPE_COUNT ? (DType)t : DTYPE_F32;
        small[t].ndim = t < DTYPE_COUNT ? 2 : 0;
        small[t].shape[0] = 2, small[t].shape[1] = 3;
    }
    SafeTensorsWriter *w = safetensors_create(to, small, DTYPE_COUNT + 1);
    for (int t = 0; t <= DTYPE_COUNT; t++) safetensors_write(w, t, 0, values, DTYPE_F64, t < DTYPE_COUNT ? 6 : 1);
    safetensors_finish(w);
}

// The model as foreign_tensors.h describes it.
static void seed_elsewhere(void) {
    SafeTensorSpec *stored = (SafeTensorSpec *)checked_calloc((size_t)spec_total, sizeof(SafeTensorSpec));
    static const size_t shapes[2][3] = {{2, 4, 2}, {2, 2, 2}};
    static const char *const names[2] = {"gate_up_proj", "down_proj"};
    int count = 0, experts = 0;
    char to[PATH_SIZE];
    for (int i = 0; i < spec_total; i++) {
        SafeTensorSpec spec = specs[i];
        bool expert = strstr(spec.name, ".experts.") != NULL;
        if (expert && experts == 2) continue;
        if (expert) {
            FORMAT(spec.name, "model.layers.0.mlp.experts.%s", names[experts]);
            spec.ndim = 3;
            memcpy(spec.shape, shapes[experts++], sizeof(shapes[0]));
        } else if (strstr(spec.name, "block_sparse_moe.gate")) FORMAT(spec.name, "model.layers.0.mlp.gate.weight");
        else if (strstr(spec.name, "embed_tokens")) FORMAT(spec.name, "lm_head.weight");
        stored[count++] = spec;
    }
    FORMAT(to, "%s/elsewhere", fuzz_seed_path);
    SafeTensorsWriter *w = safetensors_create(to, stored, count);
    for (int i = 0; i < count; i++) {
        size_t elements = 1;
        for (int d = 0; d < stored[i].ndim; d++) elements *= stored[i].shape[d];
        safetensors_write(w, i, 0, whole, DTYPE_F64, elements);
    }
    safetensors_finish(w);
    free(stored);
}

void fuzz_seeds(void) {
    ModelConfig c = small_config();
    CheckpointBuffers b;
    memset(&b, 0, sizeof(b));
    char to[PATH_SIZE];
    FORMAT(to, "%s/model", fuzz_seed_path);
    b.config = &c, b.tensors = &list;
    b.params = (floatX *)checked_calloc(list.buffer_count, sizeof(floatX));
    SafeTensorsWriter *w = checkpoint_weights_open(to, &b, true);
    checkpoint_weights_write(w, &b);
    checkpoint_file_close(w);
    seed_types();
    seed_elsewhere();
    fuzz_seed("empty", "\2\0\0\0\0\0\0\0{}", 10);
    fuzz_seed("other", "\100\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"I64\",\"shape\":[0,9],\"data_offsets\":[0,0]}}          ",
              72);
    free(b.params);
}

static void read_tensor(const SafeTensors *s, const SafeTensor *t, const uint8_t *data, size_t size) {
    size_t bytes = t->count * dtype_size(t->dtype), third = t->count / 3;
    FUZZ_EXPECT(t->end <= size && t->end - t->begin == bytes, "tensor %s lies outside the file", t->name);
    for (int d = 0; d < DTYPE_COUNT; d++) {
        size_t wide = dtype_size((DType)d);
        safetensors_read(s, t->name, 0, t->count, whole, (DType)d);
        safetensors_read(s, t->name, third, t->count - third, part, (DType)d);
        FUZZ_EXPECT(memcmp((char *)whole + third * wide, part, (t->count - third) * wide) == 0,
                    "a part of tensor %s differs from the whole", t->name);
        FUZZ_EXPECT(d != (int)t->dtype || memcmp(whole, data + t->begin, bytes) == 0, "tensor %s is not the file's",
                    t->name);
    }
}

static void large_header(const char *name, const char *head, const char *piece, const char *tail, size_t size) {
    char *file = (char *)checked_calloc(size + LENGTH_BYTES + 1, 1), *text = file + LENGTH_BYTES;
    uint64_t length = fuzz_repeat(text, head, piece, tail, size);
    memcpy(file, &length, LENGTH_BYTES);
    fuzz_large_input(name, file, LENGTH_BYTES + (size_t)length);
    free(file);
}

void fuzz_large(void) {
    const char *entry = ",\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}";
    large_header("100 MB", "{\"a\":{\"b\":[0", ",0", "]}}", 100000000);
    large_header("one array", "{\"a\":{\"b\":[0", ",0", "]}}", 32 << 20);
    large_header("values up to the limit", "{\"a\":{\"b\":[0", ",0", "]}}", 4 << 20);
    large_header("tensors of one name", "{\"__metadata__\":{}", entry, "}", 12 << 20);
    large_header("members without values", "{\"__metadata__\":{}", ",\"\":{}", "}", 6 << 20);
}

void fuzz_one(const uint8_t *data, size_t size) {
    SafeTensors *s = safetensors_open(path);
    for (size_t i = 0; i < s->count; i++) {
        const SafeTensor *t = &s->tensors[i];
        FUZZ_EXPECT(safetensors_find(s, t->name) == t, "tensor %s is not found", t->name);
        if (t->dtype != DTYPE_COUNT && t->count <= READ_LIMIT) read_tensor(s, t, data, size);
    }
    foreign_tensors_view(s, &list);
    for (size_t i = 0; i < s->count; i++)
        FUZZ_EXPECT(s->tensors[i].end <= size && s->tensors[i].begin <= s->tensors[i].end, "tensor %s lies outside",
                    s->tensors[i].name);
    checkpoint_compare(s, specs, spec_total, "it is not the model of this test");
    safetensors_close(s);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    uint64_t length = 0;
    static uint8_t rest[FUZZ_INPUT_LIMIT];
    if (size >= LENGTH_BYTES) memcpy(&length, data, LENGTH_BYTES);
    if (seed % 3 == 0 || size < LENGTH_BYTES || length > size - LENGTH_BYTES || max_size > sizeof(rest))
        return LLVMFuzzerMutate(data, size, max_size);
    size_t rest_bytes = size - LENGTH_BYTES - (size_t)length;
    memcpy(rest, data + LENGTH_BYTES + length, rest_bytes);
    length = LLVMFuzzerMutate(data + LENGTH_BYTES, (size_t)length, max_size - LENGTH_BYTES - rest_bytes);
    memcpy(data, &length, LENGTH_BYTES);
    memcpy(data + LENGTH_BYTES + length, rest, rest_bytes);
    return LENGTH_BYTES + (size_t)length + rest_bytes;
}
