/*
fuzz_index.c: safetensors_open with a directory of three valid files and a damaged model.safetensors.index.json. When it
is accepted, every tensor is found and read.
*/
#include "fuzz.h"
#define SAFETENSORS_STAGING 64
#include "../../llmc/checkpoint/safetensors.h"
#include "../../llmc/checkpoint/safetensors_writer.h"

const char fuzz_file[] = "model.safetensors.index.json";

static void write_part(const char *file, const char *first, const char *second) {
    SafeTensorSpec specs[2];
    const double values[2] = {1, 2};
    char path[PATH_SIZE];
    memset(specs, 0, sizeof(specs));
    FORMAT(path, "%s/%s", fuzz_directory(), file);
    FORMAT(specs[0].name, "%s", first);
    FORMAT(specs[1].name, "%s", second);
    for (int i = 0; i < 2; i++) specs[i].dtype = DTYPE_F16, specs[i].ndim = 1, specs[i].shape[0] = 2;
    SafeTensorsWriter *w = safetensors_create(path, specs, 2);
    for (int i = 0; i < 2; i++) safetensors_write(w, i, 0, values, DTYPE_F64, 2);
    safetensors_finish(w);
}

void fuzz_prepare(void) {
    write_part("a.safetensors", "x", "y");
    write_part("b.safetensors", "z", "w");
    write_part("c.safetensors", "x", "v"); // a name that is also in the first file
}

void fuzz_seeds(void) {
    const char *const texts[] = {
        ("{\"metadata\":{\"total_size\":16},\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"a.safetensors\","
         "\"z\":\"b.safetensors\",\"w\":\"b.safetensors\"}}"),
        "{\"weight_map\":{\"x\":\"a.safetensors\",\"v\":\"c.safetensors\"}}",
        "{\"weight_map\":{}}",
    };
    const char *const names[] = {"two_files", "twice", "none"};
    for (int i = 0; i < 3; i++) fuzz_seed(names[i], texts[i], strlen(texts[i]));
}

void fuzz_large(void) {
    fuzz_large_text("one array", "{\"weight_map\": [", "0,", "0]}", 32 << 20);
    fuzz_large_text("tensors of one name", "{\"weight_map\": {\"b\":\"a\"", ",\"a\":\"a\"", "}}", 8 << 20);
}

void fuzz_one(const uint8_t *data, size_t size) {
    (void)data, (void)size;
    SafeTensors *s = safetensors_open(fuzz_directory());
    for (size_t i = 0; i < s->count; i++) {
        float values[2];
        FUZZ_EXPECT(safetensors_find(s, s->tensors[i].name) == &s->tensors[i], "a tensor is not found");
        safetensors_read(s, s->tensors[i].name, 0, 2, values, DTYPE_F32);
        FUZZ_EXPECT(values[0] == 1 && values[1] == 2, "a tensor has other values");
    }
    safetensors_close(s);
}
