/*
safetensors.h: reading of tensors from files. safetensors_writer.h writes them.

  SafeTensors *safetensors_open(path)                              a file, or a directory with model.safetensors or
                                                                   model.safetensors.index.json
  const SafeTensor *safetensors_find(s, name)                      NULL if there is none; s->tensors is sorted by name
  void safetensors_read(s, name, first, count, host, dtype)        elements first .. first+count-1, converted
  void safetensors_close(s)

  format   8 bytes: the length of the header, little-endian; the header, a JSON object
           {"__metadata__": {string: string}, NAME: {"dtype": "F32", "shape": [2,3], "data_offsets": [begin, end]}, ...}
           padded with spaces; then the data, without gaps. Offsets are relative to the data.
  source   the safetensors format description: https://github.com/huggingface/safetensors
  numerics dtype.h
  errors   A file may come from an untrusted source. Everything in it is checked against the size of the file before
           use, and every error exits with one line. Tensors of unsupported types are rejected only when they are read.
           Not thread-safe.
*/
#pragma once
#include "../base/common.h"
#include "../base/dtype.h"
#include "../base/files.h"
#include "../base/json.h"

enum { SAFETENSORS_DIMS = 8, SAFETENSORS_HEADER_LIMIT = 32 << 20 }; // a 13.1b model with its optimizer needs 200 KB
#ifndef SAFETENSORS_STAGING
// bytes for conversions; small in fuzzing, so that small files have several pieces
#define SAFETENSORS_STAGING (4 << 20)
#endif

typedef struct {
    const char *name;       // in the JSON tree of the header
    const char *dtype_name; // in the JSON tree of the header
    DType dtype;            // DTYPE_COUNT: an unsupported type
    int ndim;
    size_t shape[SAFETENSORS_DIMS];
    size_t count;        // elements; 1 without dimensions
    uint64_t begin, end; // bytes in the file
    int file;
} SafeTensor;

typedef struct {
    char path[PATH_SIZE];
    int fd;
    cJSON *header;
} SafeTensorsFile;

typedef struct {
    char path[PATH_SIZE]; // the argument of safetensors_open
    SafeTensor *tensors;
    size_t count;
    SafeTensorsFile *files;
    int file_count;
    void *staging;
} SafeTensors;

static inline SafeTensor safetensors_parse_entry(const char *path, const cJSON *entry, uint64_t data_begin,
                                                 uint64_t data_bytes) {
    SafeTensor t;
    memset(&t, 0, sizeof(t));
    t.name = entry->string;
    CHECK(printable(t.name), "%s: a tensor's name has control characters; the file is damaged", path);
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(entry, "dtype");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(entry, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    CHECK(cJSON_IsObject(entry) && cJSON_IsString(dtype) && cJSON_IsArray(shape) && cJSON_IsArray(offsets),
          "%s: tensor %.100s has no dtype, shape and data_offsets; the file is damaged", path, t.name);
    CHECK(printable(dtype->valuestring), "%s: the dtype of tensor %.100s has control characters", path, t.name);
    t.dtype_name = dtype->valuestring;
    t.dtype = dtype_find(t.dtype_name);

    uint64_t count = 1, bytes = 0;
    for (const cJSON *d = shape->child; d; d = d->next) {
        uint64_t size = 0;
        CHECK(t.ndim < SAFETENSORS_DIMS, "%s: tensor %.100s has more than %d dimensions", path, t.name,
              SAFETENSORS_DIMS);
        CHECK(json_size(d, &size) && !__builtin_mul_overflow(count, size, &count),
              "%s: tensor %.100s: dimension %d of its shape is not a valid size; the file is damaged", path, t.name,
              t.ndim);
        t.shape[t.ndim++] = size;
    }
    t.count = count;
    CHECK(offsets->child && offsets->child->next && !offsets->child->next->next &&
              json_size(offsets->child, &t.begin) && json_size(offsets->child->next, &t.end) && t.begin <= t.end &&
              t.end <= data_bytes,
          "%s: tensor %.100s: data_offsets are not within the %" PRIu64
          " bytes of data; the file is damaged or truncated: copy it again",
          path, t.name, data_bytes);
    CHECK(t.dtype == DTYPE_COUNT ||
              (!__builtin_mul_overflow(count, (uint64_t)dtype_size(t.dtype), &bytes) && bytes == t.end - t.begin),
          "%s: tensor %.100s: shape and dtype need %" PRIu64 " elements of %s, data_offsets have %" PRIu64
          " bytes; the file is damaged",
          path, t.name, count, t.dtype_name, t.end - t.begin);
    t.begin += data_begin, t.end += data_begin;
    return t;
}

static inline int compare_tensor_place(const void *a, const void *b) {
    const SafeTensor *x = (const SafeTensor *)a, *y = (const SafeTensor *)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : x->end < y->end ? -1 : x->end > y->end;
}
static inline int compare_tensor_name(const void *a, const void *b) {
    return strcmp(((const SafeTensor *)a)->name, ((const SafeTensor *)b)->name);
}

static inline void safetensors_add_file(SafeTensors *s, const char *path) {
    s->files = (SafeTensorsFile *)realloc(s->files, (s->file_count + 1) * sizeof(SafeTensorsFile));
    CHECK(s->files != NULL, "out of memory for the header of %s", path);
    SafeTensorsFile *f = &s->files[s->file_count];
    FORMAT(f->path, "%s", path);
    uint64_t size = 0, length = 0;
    f->fd = file_open_regular(path, &size);
    CHECK(f->fd >= 0, "cannot open %s: %s", path, strerror(errno));
    CHECK(size >= 10, "%s has %" PRIu64 " bytes: not a safetensors file, or truncated", path, size);
    CHECK(file_pread(f->fd, &length, 8, 0), "cannot read %s: %s", path, strerror(errno));
    CHECK(length >= 2 && length <= size - 8,
          "%s: a header of %" PRIu64 " bytes in a file of %" PRIu64 " bytes: not a safetensors file, or truncated",
          path, length, size);
    CHECK(length <= SAFETENSORS_HEADER_LIMIT,
          "%s: a header of %" PRIu64
          " bytes exceeds the limit of %d: split the file, or check the program that wrote it",
          path, length, (int)SAFETENSORS_HEADER_LIMIT);
    char *text = (char *)checked_calloc(length + 8, 1);
    CHECK(file_pread(f->fd, text, length, 8), "cannot read %s: %s", path, strerror(errno));
    CHECK(
        json_bounded(text, length),
        "%s: the header has more than %d JSON values (100,000 tensors have 1.2 million): split the file, or check the "
        "program that wrote it",
        path, (int)JSON_VALUE_LIMIT);
    f->header = text[0] == '{' ? json_parse(text, length) : NULL;
    free(text);
    CHECK(cJSON_IsObject(f->header), "%s: the header is not a JSON object: not a safetensors file, or damaged", path);

    size_t first = s->count, added = 0;
    for (const cJSON *entry = f->header->child; entry; entry = entry->next) added++;
    s->tensors = (SafeTensor *)realloc(s->tensors, (s->count + added + 1) * sizeof(SafeTensor));
    CHECK(s->tensors != NULL, "out of memory for the header of %s", path);
    for (const cJSON *entry = f->header->child; entry; entry = entry->next) {
        if (strcmp(entry->string, "__metadata__") == 0) {
            CHECK(cJSON_IsObject(entry), "%s: __metadata__ is not an object; the file is damaged", path);
            continue;
        }
        s->tensors[s->count] = safetensors_parse_entry(path, entry, 8 + length, size - 8 - length);
        s->tensors[s->count++].file = s->file_count;
    }
    qsort(s->tensors + first, s->count - first, sizeof(SafeTensor), compare_tensor_place);
    uint64_t end = 8 + length; // tensors must not overlap or leave gaps
    for (size_t i = first; i < s->count; i++) {
        CHECK(s->tensors[i].begin == end, "%s: the data of tensor %.100s %s; the file is damaged", path,
              s->tensors[i].name, s->tensors[i].begin < end ? "overlap the data of another" : "follow a gap");
        end = s->tensors[i].end;
    }
    CHECK(end == size, "%s: %" PRIu64 " bytes after the last tensor; the file is damaged", path, size - end);
    s->file_count++;
}

static inline const SafeTensor *safetensors_find(const SafeTensors *s, const char *name) {
    SafeTensor key;
    key.name = name;
    if (!s->count) return NULL;
    return (const SafeTensor *)bsearch(&key, s->tensors, s->count, sizeof(SafeTensor), compare_tensor_name);
}

static inline void safetensors_sort(SafeTensors *s) {
    if (s->count) qsort(s->tensors, s->count, sizeof(SafeTensor), compare_tensor_name);
    for (size_t i = 1; i < s->count; i++)
        CHECK(strcmp(s->tensors[i - 1].name, s->tensors[i].name) != 0, "%s: duplicate tensor %.100s", s->path,
              s->tensors[i].name);
}

static inline int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// {"weight_map": {NAME: FILE, ...}}: opens each file once. Each tensor must be in the file that the map states.
static inline void safetensors_add_index(SafeTensors *s, const char *directory, const char *index) {
    size_t size = 0, count = 0;
    char *text = file_read(index, SAFETENSORS_HEADER_LIMIT, &size);
    CHECK(text != NULL, "cannot read %s: %s", index, strerror(errno));
    CHECK(json_bounded(text, size), "%s has more than %d JSON values: the index has too many tensors", index,
          (int)JSON_VALUE_LIMIT);
    cJSON *json = json_parse(text, size);
    free(text);
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map");
    CHECK(cJSON_IsObject(map), "%s has no object weight_map; the file is damaged", index);
    for (const cJSON *e = map->child; e; e = e->next) count++;
    const char **files = (const char **)checked_calloc(count, sizeof(char *));
    count = 0;
    for (const cJSON *e = map->child; e; e = e->next) {
        const char *file = cJSON_IsString(e) ? e->valuestring : "";
        CHECK(*file && printable(file) && printable(e->string) && !strchr(file, '/'),
              "%s: weight_map has an entry that is not a file name", index);
        files[count++] = file;
    }
    if (count) qsort(files, count, sizeof(char *), compare_strings);
    for (size_t i = 0; i < count; i++) {
        char path[PATH_SIZE];
        if (i && strcmp(files[i], files[i - 1]) == 0) continue;
        FORMAT(path, "%s/%s", directory, files[i]);
        safetensors_add_file(s, path);
    }
    safetensors_sort(s);
    for (const cJSON *e = map->child; e; e = e->next) {
        const SafeTensor *t = safetensors_find(s, e->string);
        CHECK(t && strcmp(strrchr(s->files[t->file].path, '/') + 1, e->valuestring) == 0,
              "%s: tensor %.100s is not in %.100s, as the index states", index, e->string, e->valuestring);
    }
    free(files);
    cJSON_Delete(json);
}

static inline SafeTensors *safetensors_open(const char *path) {
    SafeTensors *s = (SafeTensors *)checked_calloc(1, sizeof(SafeTensors));
    FORMAT(s->path, "%s", path);
    s->staging = checked_calloc(SAFETENSORS_STAGING, 1);
    char file[PATH_SIZE], index[PATH_SIZE];
    FORMAT(file, "%s/model.safetensors", path);
    FORMAT(index, "%s/model.safetensors.index.json", path);
    if (!directory_exists(path)) safetensors_add_file(s, path);
    else if (access(file, F_OK) == 0) safetensors_add_file(s, file);
    else {
        CHECK(access(index, F_OK) == 0, "%s has neither model.safetensors nor model.safetensors.index.json", path);
        safetensors_add_index(s, path, index);
    }
    safetensors_sort(s);
    return s;
}

static inline void safetensors_close(SafeTensors *s) {
    for (int i = 0; i < s->file_count; i++) {
        close(s->files[i].fd);
        cJSON_Delete(s->files[i].header);
    }
    free(s->files);
    free(s->tensors);
    free(s->staging);
    free(s);
}

static inline void safetensors_read(const SafeTensors *s, const char *name, size_t first, size_t count, void *host,
                                    DType dtype) {
    const SafeTensor *t = safetensors_find(s, name);
    CHECK(t != NULL, "%s has no tensor %s", s->path, name);
    const SafeTensorsFile *f = &s->files[t->file];
    CHECK(t->dtype != DTYPE_COUNT, "%s: tensor %s has type %.20s; supported are F64, F32, BF16 and F16", f->path, name,
          t->dtype_name);
    assert(first <= t->count && count <= t->count - first);
    size_t size = dtype_size(t->dtype), chunk = SAFETENSORS_STAGING / size;
    bool direct = t->dtype == dtype;
    for (size_t done = 0; done < count;) {
        size_t n = direct ? count : min_size(chunk, count - done);
        char *to = (char *)host + done * dtype_size(dtype);
        CHECK(file_pread(f->fd, direct ? to : s->staging, n * size, t->begin + (first + done) * size),
              "%s: cannot read tensor %s: %s", f->path, name, strerror(errno));
        if (!direct) convert_elements(to, dtype, s->staging, t->dtype, n);
        done += n;
    }
}
