/*
safetensors_writer.h: writing of tensors to a file in the format of safetensors.h.

  SafeTensorsWriter *safetensors_create(path, specs, count)
  SafeTensorsWriter *safetensors_begin(fd, path, specs, count)          an open file
  SafeTensorsWriter *safetensors_open_existing(path, specs, count)      a file that another process has created
  void safetensors_write(w, tensor, first, host, dtype, count)          converts to the tensor's type
  void safetensors_finish(w)                                            after all elements: fsync and close
  void safetensors_close_writer(w)                                      closes the file; others write the rest

The header depends only on the list of tensors. Its length is a multiple of 8, so that the data are aligned. Parts of a
file may be written in any order. A file of safetensors_begin, which may be a device or a pipe, is written in order.
Failures, such as a full disk, exit with the path and the system's error message.
*/
#pragma once
#include "safetensors.h"

typedef struct {
    char name[128];
    DType dtype;
    int ndim;
    size_t shape[SAFETENSORS_DIMS];
} SafeTensorSpec;

typedef struct {
    char path[PATH_SIZE];
    int fd, count;
    bool in_order;
    SafeTensorSpec *specs;
    uint64_t *begin;  // [count+1]: offsets of the tensors in the file
    uint64_t written; // bytes, including the header
    void *staging;
} SafeTensorsWriter;

static inline size_t safetensors_spec_elements(const SafeTensorSpec *s) {
    size_t count = 1;
    for (int d = 0; d < s->ndim; d++) count *= s->shape[d];
    return count;
}

static inline char *safetensors_header(const SafeTensorSpec *specs, int count, size_t *size) {
    char *text = NULL;
    FILE *f = open_memstream(&text, size);
    CHECK(f != NULL, "out of memory for a safetensors header");
    fprintf(f, "{\"__metadata__\":{\"format\":\"pt\"}%s", count ? "," : "");
    uint64_t begin = 0;
    for (int i = 0; i < count; i++) {
        const SafeTensorSpec *s = &specs[i];
        uint64_t end = begin + safetensors_spec_elements(s) * dtype_size(s->dtype);
        json_print_string(f, s->name);
        fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", dtype_table[s->dtype].name);
        for (int d = 0; d < s->ndim; d++) fprintf(f, "%s%zu", d ? "," : "", s->shape[d]);
        fprintf(f, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}%s", begin, end, i + 1 < count ? "," : "");
        begin = end;
    }
    fputc('}', f);
    for (long at = ftell(f); at % 8; at++) fputc(' ', f);
    bool failed = ferror(f) != 0;
    CHECK(fclose(f) == 0 && !failed, "out of memory for a safetensors header");
    return text;
}

static inline SafeTensorsWriter *safetensors_open_writer(int fd, const char *path, const SafeTensorSpec *specs,
                                                         int count, bool create) {
    SafeTensorsWriter *w = (SafeTensorsWriter *)checked_calloc(1, sizeof(SafeTensorsWriter));
    FORMAT(w->path, "%s", path);
    w->count = count;
    w->specs = (SafeTensorSpec *)checked_calloc(count, sizeof(SafeTensorSpec));
    if (count) memcpy(w->specs, specs, count * sizeof(SafeTensorSpec));
    w->staging = checked_calloc(SAFETENSORS_STAGING, 1);
    w->fd = fd;
    size_t size = 0;
    char *header = safetensors_header(specs, count, &size);
    uint64_t length = size;
    if (create) {
        file_write(w->fd, &length, 8, path);
        file_write(w->fd, header, size, path);
    }
    free(header);
    w->written = 8 + size;
    w->begin = (uint64_t *)checked_calloc(count + 1, sizeof(uint64_t));
    w->begin[0] = w->written;
    for (int i = 0; i < count; i++)
        w->begin[i + 1] = w->begin[i] + safetensors_spec_elements(&specs[i]) * dtype_size(specs[i].dtype);
    return w;
}
static inline SafeTensorsWriter *safetensors_create(const char *path, const SafeTensorSpec *specs, int count) {
    return safetensors_open_writer(file_create(path), path, specs, count, true);
}
static inline SafeTensorsWriter *safetensors_begin(int fd, const char *path, const SafeTensorSpec *specs, int count) {
    SafeTensorsWriter *w = safetensors_open_writer(fd, path, specs, count, true);
    w->in_order = true;
    return w;
}
static inline SafeTensorsWriter *safetensors_open_existing(const char *path, const SafeTensorSpec *specs, int count) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0, "cannot open %s, which rank 0 has created: %s; all ranks must see the same --out directory", path,
          strerror(errno));
    return safetensors_open_writer(fd, path, specs, count, false);
}

static inline void safetensors_write(SafeTensorsWriter *w, int tensor, size_t first, const void *host, DType dtype,
                                     size_t count) {
    assert(tensor >= 0 && tensor < w->count);
    const SafeTensorSpec *s = &w->specs[tensor];
    assert(first + count <= safetensors_spec_elements(s));
    size_t size = dtype_size(s->dtype), chunk = SAFETENSORS_STAGING / size;
    bool direct = s->dtype == dtype;
    for (size_t done = 0; done < count;) {
        size_t n = direct ? count : min_size(chunk, count - done);
        const void *from = (const char *)host + done * dtype_size(dtype);
        if (!direct) convert_elements(w->staging, s->dtype, from, dtype, n);
        uint64_t place = w->begin[tensor] + (first + done) * size;
        assert(!w->in_order || place == w->written);
        if (w->in_order) {
            file_write(w->fd, direct ? from : w->staging, n * size, w->path);
            fault_point(FAULT_WRITE, (void *)w->path, count - done - n);
        } else file_pwrite(w->fd, direct ? from : w->staging, n * size, place, w->path);
        w->written += n * size;
        done += n;
    }
}

static inline void safetensors_close_writer(SafeTensorsWriter *w) {
    file_close_synced(w->fd, w->path);
    free(w->specs);
    free(w->begin);
    free(w->staging);
    free(w);
}
static inline void safetensors_finish(SafeTensorsWriter *w) {
    assert(w->written == w->begin[w->count]);
    safetensors_close_writer(w);
}
