/*
checkpoint_tensors.h: transfers of tensors between operation memory and the safetensors files of a checkpoint.

  void checkpoint_check_weights(dir, tensors)   checks names and shapes of a directory's weights, before memory is
                                                allocated for the model that its config.json describes
  void checkpoint_load_weights(dir, buffers, with_optimizer)
  void checkpoint_weights_open(path, buffers, create), checkpoint_optimizer_open(path, buffers, create)
                                                a file for checkpoint_weights_write or checkpoint_optimizer_write, which
                                                write this rank's pieces; checkpoint_file_close(writer) closes it
  void checkpoint_check_size(buffers)           refuses a model with more tensors than safetensors.h reads
  bool checkpoint_weights_finite(buffers)       whether the weights of all ranks are finite
  void checkpoint_save_gradients(path, tensors, grads, loss)

A file consists of parts. A part is a buffer in the layout of the tensor list, or of this rank's pieces of it
(sharding.h); its tensors are called prefix + NAME. Each rank writes its pieces to the same files and reads them; if
several groups have the same pieces, each writes some of the tensors. A rank gets the pieces of other ranks from these
ranks, not from the disk. Formats and errors: checkpoint.h. Data pass through
CHECKPOINT_STAGING bytes of host memory, unless the buffers are a copy in host memory.
*/
#pragma once
#include "../base/common.h"
#include "../base/dtype.h"
#include "../base/files.h"
#include "../model/tensors.h"
#include "../ops/ops.h"
#include "foreign_tensors.h"
#include "safetensors.h"
#include "safetensors_writer.h"
#include "../model/sharding.h"

#ifndef CHECKPOINT_STAGING
#define CHECKPOINT_STAGING (16 << 20) // a multiple of 8
#endif
#ifndef CHECKPOINT_PIECE
#define CHECKPOINT_PIECE 4096 // elements that are checked at a time
#endif

typedef struct {
    const ModelConfig *config;
    const TensorList *tensors;
    floatX *params;
    real *master;             // NULL if params are not narrower than F32
    real *m, *v;              // may be NULL if the optimizer is not loaded
    const Sharding *sharding; // NULL: one rank; from level 1 on, master, m and v are compact, at level 3 params too
    bool copied;              // all four are compact copies in host memory (checkpoint_background.h)
    struct {
        const char *data; // NULL: none
        size_t size;
    } tokenizer[2]; // tokenizer.bin and tokenizer.json, saved unchanged
} CheckpointBuffers;

static inline DType checkpoint_weights_dtype(void) { return DTYPE_OF(floatX) == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32; }

static inline void *checkpoint_staging(void) {
    static void *staging;
    if (!staging) staging = checked_calloc(CHECKPOINT_STAGING, 1);
    return staging;
}

typedef struct {
    const char *prefix;
    void *buffer;
    DType dtype; // in memory
    bool compact, on_host;
    bool moment2; // second moments of a model with tensors that Muon updates (muon_plan.h)
} CheckpointPart;
enum { CHECKPOINT_PARTS = 3 };

static inline CheckpointPart checkpoint_part(const char *prefix, void *buffer, DType dtype, bool compact) {
    CheckpointPart p;
    p.prefix = prefix, p.buffer = buffer, p.dtype = dtype, p.compact = compact, p.on_host = p.moment2 = false;
    return p;
}
static inline bool checkpoint_is_compact(const CheckpointBuffers *b) {
    return b->copied || (b->sharding && b->sharding->level > 0);
}
static inline bool checkpoint_weights_compact(const CheckpointBuffers *b) {
    return b->copied || (b->sharding && b->sharding->level >= 3);
}

static inline CheckpointPart checkpoint_weights_part(const CheckpointBuffers *b) {
    CheckpointPart p = checkpoint_part("", b->params, DTYPE_OF(floatX), checkpoint_weights_compact(b));
    p.on_host = b->copied;
    return p;
}

static inline int checkpoint_optimizer_parts(const CheckpointBuffers *b, CheckpointPart parts[CHECKPOINT_PARTS]) {
    int n = 0;
    bool compact = checkpoint_is_compact(b);
    parts[n++] = checkpoint_part("exp_avg.", b->m, DTYPE_OF(real), compact);
    parts[n++] = checkpoint_part("exp_avg_sq.", b->v, DTYPE_OF(real), compact);
    parts[1].moment2 = b->tensors->muon;
    if (b->master) parts[n++] = checkpoint_part("master.", b->master, DTYPE_OF(real), compact);
    for (int i = 0; i < n; i++) parts[i].on_host = b->copied;
    return n;
}

// Whether a part has the second moments of a Muon matrix: one number per row, or none.
static inline bool checkpoint_has_rows(const CheckpointPart *p, const Tensor *t) { return p->moment2 && t->muon; }
static inline bool checkpoint_has(const CheckpointPart *p, const Tensor *t) {
    return !checkpoint_has_rows(p, t) || t->rows > 0;
}

// sharding_next for the elements of a tensor that a part has.
static inline bool checkpoint_next(const CheckpointPart *p, const Sharding *s, const Tensor *t, RankRange *r) {
    if (checkpoint_has_rows(p, t)) {
        bool first = r->count == 0;
        r->count = t->rows, r->at = t->moment2_at[0], r->compact_at = t->moment2_at[1];
        return first && t->rows > 0;
    }
    if (!sharding_next(s, t, r)) return false;
    if (p->moment2) r->at -= t->moment2_at[0], r->compact_at -= t->moment2_at[1];
    return true;
}

// Returns [*count]: the specs of the parts of each tensor; free()
static inline SafeTensorSpec *checkpoint_specs(const TensorList *list, const CheckpointPart *parts, int part_count,
                                               DType dtype, int *count) {
    SafeTensorSpec *specs = (SafeTensorSpec *)checked_calloc(list->count * part_count, sizeof(SafeTensorSpec));
    *count = 0;
    for (int i = 0; i < list->count * part_count; i++) {
        const Tensor *t = &list->tensors[i / part_count];
        const CheckpointPart *p = &parts[i % part_count];
        if (!checkpoint_has(p, t)) continue;
        SafeTensorSpec *spec = &specs[(*count)++];
        FORMAT(spec->name, "%s%s", p->prefix, t->name);
        spec->dtype = dtype;
        spec->ndim = checkpoint_has_rows(p, t) ? 1 : t->ndim;
        for (int d = 0; d < spec->ndim; d++) spec->shape[d] = checkpoint_has_rows(p, t) ? t->rows : t->shape[d];
    }
    return specs;
}

// Copies `count` elements of a part, from element `done` of a range on, to the host.
static inline const void *checkpoint_part_data(const CheckpointPart *p, const RankRange *r, size_t done, size_t count) {
    size_t size = dtype_size(p->dtype);
    const char *from = (const char *)p->buffer + ((p->compact ? r->compact_at : r->at) + done) * size;
    if (p->on_host) return from;
    buffer_download(checkpoint_staging(), from, count * size);
    return checkpoint_staging();
}

// Writes this rank's pieces of the tensors from `first` on, in the order of checkpoint_specs.
static inline void checkpoint_write_parts(SafeTensorsWriter *w, int first, const TensorList *list,
                                          const Sharding *sharding, const CheckpointPart *parts, int part_count) {
    for (int i = 0, spec = first - 1; i < list->count * part_count; i++) {
        const Tensor *t = &list->tensors[i / part_count];
        const CheckpointPart *p = &parts[i % part_count];
        size_t chunk = CHECKPOINT_STAGING / dtype_size(p->dtype);
        if (!checkpoint_has(p, t)) continue;
        spec++;
        if (sharding && i % comm_groups() != comm_group()) continue;
        if (sharding && checkpoint_has_rows(p, t) && t->owner != sharding->rank) continue;
        for (RankRange r = sharding_ranges(sharding, t); checkpoint_next(p, sharding, t, &r);)
            for (size_t done = 0, n; done < r.count; done += n) {
                n = min_size(chunk, r.count - done);
                safetensors_write(w, spec, r.begin + done, checkpoint_part_data(p, &r, done, n), p->dtype, n);
            }
    }
}

static inline SafeTensorsWriter *checkpoint_open_parts(const char *path, const TensorList *list,
                                                       const CheckpointPart *parts, int part_count, DType dtype,
                                                       bool create) {
    int count = 0;
    SafeTensorSpec *specs = checkpoint_specs(list, parts, part_count, dtype, &count);
    SafeTensorsWriter *w =
        create ? safetensors_create(path, specs, count) : safetensors_open_existing(path, specs, count);
    free(specs);
    return w;
}

static inline void checkpoint_file_close(SafeTensorsWriter *w) {
    if (comm_ranks() == 1) safetensors_finish(w);
    else safetensors_close_writer(w);
}

// Whether lm_head.weight has the type, shape and bytes of the embedding: some programs store it in tied models, too.
static inline bool checkpoint_head_is_embedding(const SafeTensors *s) {
    const SafeTensor *e = safetensors_find(s, "model.embed_tokens.weight"), *h = safetensors_find(s, "lm_head.weight");
    if (!e || !h || e->dtype != h->dtype || e->dtype == DTYPE_COUNT || e->ndim != h->ndim ||
        memcmp(e->shape, h->shape, sizeof(e->shape)) != 0)
        return false;
    char *a = (char *)checkpoint_staging(), *b = a + CHECKPOINT_STAGING / 2;
    size_t chunk = CHECKPOINT_STAGING / 2 / dtype_size(e->dtype);
    for (size_t done = 0, n; done < e->count; done += n) {
        n = min_size(chunk, e->count - done);
        safetensors_read(s, e->name, done, n, a, e->dtype);
        safetensors_read(s, h->name, done, n, b, e->dtype);
        if (memcmp(a, b, n * dtype_size(e->dtype)) != 0) return false;
    }
    return true;
}

static inline int compare_spec_name(const void *a, const void *b) {
    return strcmp(((const SafeTensorSpec *)a)->name, ((const SafeTensorSpec *)b)->name);
}

// Exits unless the file has exactly the tensors of `specs`, with their shapes. `reason` explains a difference.
static inline void checkpoint_compare(const SafeTensors *s, const SafeTensorSpec *specs, size_t count,
                                      const char *reason) {
    for (size_t i = 0; i < count; i++) {
        const SafeTensor *t = safetensors_find(s, specs[i].name);
        CHECK(t, "%s: tensor %s is missing; %s", s->path, specs[i].name, reason);
        tensor_check_shape(s, t, specs[i].ndim, specs[i].shape);
    }
    SafeTensorSpec *sorted = (SafeTensorSpec *)checked_calloc(count, sizeof(SafeTensorSpec));
    memcpy(sorted, specs, count * sizeof(SafeTensorSpec));
    qsort(sorted, count, sizeof(SafeTensorSpec), compare_spec_name);
    for (size_t i = 0, k = 0; i < s->count; i++) {
        const char *name = s->tensors[i].name;
        if (k < count && strcmp(name, sorted[k].name) == 0) {
            k++;
            continue;
        }
        // old Llama files store the rotation angles, which rope_theta determines
        size_t length = strlen(name), tail = strlen(".rotary_emb.inv_freq");
        if (length > tail && strcmp(name + length - tail, ".rotary_emb.inv_freq") == 0) continue;
        bool head = strcmp(name, "lm_head.weight") == 0;
        if (head && checkpoint_head_is_embedding(s)) continue;
        CHECK(!head,
              "%s: tensor lm_head.weight differs from the embedding, but config.json has tie_word_embeddings true: set "
              "it to false, or remove the tensor",
              s->path);
        CHECK(false, "%s: unexpected tensor %.100s; %s", s->path, name, reason);
    }
    free(sorted);
}

// Each rank reads its pieces. Buffers that are not compact are then gathered from all ranks, except second moments with
// Muon, which have another layout: each rank reads all of them.
static inline void checkpoint_load_parts(const SafeTensors *s, const TensorList *list, const Sharding *sharding,
                                         const CheckpointPart *parts, int part_count, const char *reason) {
    int count = 0;
    SafeTensorSpec *specs = checkpoint_specs(list, parts, part_count, DTYPE_F32, &count);
    checkpoint_compare(s, specs, count, reason);
    for (int i = 0, spec = -1; i < list->count * part_count; i++) {
        const Tensor *t = &list->tensors[i / part_count];
        const CheckpointPart *p = &parts[i % part_count];
        const Sharding *pieces = p->moment2 && !p->compact ? NULL : sharding;
        size_t size = dtype_size(p->dtype), chunk = CHECKPOINT_STAGING / size;
        if (!checkpoint_has(p, t)) continue;
        spec++;
        for (RankRange r = sharding_ranges(pieces, t); checkpoint_next(p, pieces, t, &r);) {
            char *to = (char *)p->buffer + (p->compact ? r.compact_at : r.at) * size;
            for (size_t done = 0, n; done < r.count; done += n) {
                n = min_size(chunk, r.count - done);
                safetensors_read(s, specs[spec].name, r.begin + done, n, checkpoint_staging(), p->dtype);
                buffer_upload(to + done * size, checkpoint_staging(), n * size);
            }
        }
    }
    free(specs);
    for (int i = 0; sharding && i < part_count; i++)
        if (!parts[i].compact && !parts[i].moment2)
            sharding_gather_all(sharding, parts[i].buffer, dtype_size(parts[i].dtype));
}

static inline SafeTensorsWriter *checkpoint_weights_open(const char *path, const CheckpointBuffers *b, bool create) {
    CheckpointPart part = checkpoint_weights_part(b);
    return checkpoint_open_parts(path, b->tensors, &part, 1, checkpoint_weights_dtype(), create);
}
static inline SafeTensorsWriter *checkpoint_optimizer_open(const char *path, const CheckpointBuffers *b, bool create) {
    CheckpointPart parts[CHECKPOINT_PARTS];
    int count = checkpoint_optimizer_parts(b, parts);
    return checkpoint_open_parts(path, b->tensors, parts, count, DTYPE_F32, create);
}

// The file of the optimizer has the most tensors.
static inline void checkpoint_check_size(const CheckpointBuffers *b) {
    CheckpointPart parts[CHECKPOINT_PARTS];
    int count = 0, part_count = checkpoint_optimizer_parts(b, parts);
    size_t size = 0;
    SafeTensorSpec *specs = checkpoint_specs(b->tensors, parts, part_count, DTYPE_F32, &count);
    char *header = safetensors_header(specs, count, &size);
    CHECK(size <= SAFETENSORS_HEADER_LIMIT && json_bounded(header, size),
          "a checkpoint of this model has %d tensors of optimizer state, more than --resume can read: use fewer "
          "--experts or --layers",
          count);
    free(header);
    free(specs);
}

static inline void checkpoint_weights_write(SafeTensorsWriter *w, const CheckpointBuffers *b) {
    CheckpointPart part = checkpoint_weights_part(b);
    checkpoint_write_parts(w, 0, b->tensors, b->sharding, &part, 1);
}
static inline void checkpoint_optimizer_write(SafeTensorsWriter *w, const CheckpointBuffers *b) {
    CheckpointPart parts[CHECKPOINT_PARTS];
    int count = checkpoint_optimizer_parts(b, parts);
    checkpoint_write_parts(w, 0, b->tensors, b->sharding, parts, count);
}

// The number of elements that are not finite in the file's type.
static inline double checkpoint_count_broken(const floatX *x, size_t count) {
    double broken = 0;
#pragma omp parallel for schedule(static) reduction(+ : broken) if (count > 16 * CHECKPOINT_PIECE)
    for (size_t e = 0; e < count; e += CHECKPOINT_PIECE) {
        float piece[CHECKPOINT_PIECE];
        size_t n = min_size(CHECKPOINT_PIECE, count - e);
        convert_elements(piece, DTYPE_F32, x + e, DTYPE_OF(floatX), n);
        for (size_t k = 0; k < n; k++) broken += !isfinite(piece[k]);
    }
    return broken;
}

static inline bool checkpoint_weights_finite(const CheckpointBuffers *b) {
    CheckpointPart part = checkpoint_weights_part(b);
    double broken = 0;
    for (int i = 0; i < b->tensors->count; i++) {
        const Tensor *t = &b->tensors->tensors[i];
        const size_t chunk = CHECKPOINT_STAGING / sizeof(floatX);
        for (RankRange r = sharding_ranges(b->sharding, t); sharding_next(b->sharding, t, &r);)
            for (size_t done = 0, n; done < r.count; done += n) {
                n = min_size(chunk, r.count - done);
                broken += checkpoint_count_broken((const floatX *)checkpoint_part_data(&part, &r, done, n), n);
            }
    }
    if (b->sharding) comm_sum_f64(&broken, 1);
    return broken == 0;
}

static inline SafeTensors *checkpoint_open_weights(const char *dir, const TensorList *list) {
    SafeTensors *s = safetensors_open(dir);
    foreign_tensors_view(s, list);
    return s;
}

static const char *const checkpoint_other_model = "the weights do not match config.json";
static const char *const checkpoint_other_optimizer =
    "another --optimizer or precision saved it: use --init to load only the weights";

static inline void checkpoint_check_weights(const char *dir, const TensorList *list) {
    CheckpointPart part = checkpoint_part("", NULL, DTYPE_F32, false);
    SafeTensors *s = checkpoint_open_weights(dir, list);
    int count = 0;
    SafeTensorSpec *specs = checkpoint_specs(list, &part, 1, DTYPE_F32, &count);
    checkpoint_compare(s, specs, count, checkpoint_other_model);
    free(specs);
    safetensors_close(s);
}

static inline void checkpoint_load_weights(const char *dir, const CheckpointBuffers *b, bool with_optimizer) {
    CheckpointPart parts[CHECKPOINT_PARTS];
    const char *other_build = "this build has a different precision from the one that saved the checkpoint: use --init "
                              "to load only the weights";
    SafeTensors *s = checkpoint_open_weights(dir, b->tensors);
    parts[0] = checkpoint_weights_part(b);
    checkpoint_load_parts(s, b->tensors, b->sharding, parts, 1, checkpoint_other_model);
    if (b->master && !with_optimizer) { // from the file, not the rounded weights
        parts[0] = checkpoint_part("", b->master, DTYPE_OF(real), checkpoint_is_compact(b));
        checkpoint_load_parts(s, b->tensors, b->sharding, parts, 1, checkpoint_other_model);
    }
    safetensors_close(s);
    if (!with_optimizer) return;
    char path[PATH_SIZE];
    FORMAT(path, "%s/optimizer.safetensors", dir);
    s = safetensors_open(path);
    int count = checkpoint_optimizer_parts(b, parts);
    checkpoint_load_parts(s, b->tensors, b->sharding, parts, count,
                          b->tensors->muon ? checkpoint_other_optimizer : other_build);
    safetensors_close(s);
}

static inline void checkpoint_save_gradients(const char *path, const TensorList *list, const grad_t *grads,
                                             double loss) {
    OutputFile output;
    CheckpointPart part = checkpoint_part("", (void *)(uintptr_t)grads, DTYPE_OF(grad_t), false); // read only
    int count = 0;
    SafeTensorSpec *tensors = checkpoint_specs(list, &part, 1, DTYPE_F32, &count);
    SafeTensorSpec *specs = (SafeTensorSpec *)checked_calloc(count + 1, sizeof(SafeTensorSpec));
    FORMAT(specs[0].name, "loss");
    specs[0].dtype = DTYPE_F32;
    specs[0].ndim = 1;
    specs[0].shape[0] = 1;
    memcpy(specs + 1, tensors, count * sizeof(SafeTensorSpec));
    SafeTensorsWriter *w = safetensors_begin(output_open(&output, path), path, specs, count + 1);
    safetensors_write(w, 0, 0, &loss, DTYPE_F64, 1);
    checkpoint_write_parts(w, 1, list, NULL, &part, 1);
    safetensors_finish(w);
    free(specs);
    free(tensors);
    output_publish(&output);
}
