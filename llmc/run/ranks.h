/*
ranks.h: checks that the ranks of a run are equal: in their options and builds at the start, and bit for bit in their
parameters after updates.

  void ranks_compare(text, remedy, status)    text: lines "NAME VALUE". Ends the program with the first line that
                                              differs from rank 0's
  char *ranks_describe(options)               the build and the options of this rank, as such lines; free()
  void ranks_check(model, step)               compares hashes of every tensor that all ranks hold whole: parameters, and
                                              without --zero the optimizer state; ends the program with the first tensor
                                              that differs

All ranks call them together. With one rank they do nothing.
*/
#ifndef LLMC_RANKS_H
#define LLMC_RANKS_H
#include "../comm/comm.h"
#include "environment.h"
#include "../base/files.h"
#include "model_state.h"
#include "options.h"
#include "../base/revision.h"

#ifndef RANKS_PIECE
#define RANKS_PIECE ((size_t)1 << 20) // bytes hashed at a time
#endif

static inline void ranks_compare(const char *text, const char *remedy, int status) {
    if (comm_ranks() == 1) return;
    size_t size = strlen(text) + 1, wanted_size = size;
    comm_broadcast(&wanted_size, sizeof(wanted_size));
    char *wanted = (char *)checked_calloc(wanted_size, 1);
    if (comm_rank() == 0) memcpy(wanted, text, size);
    comm_broadcast(wanted, wanted_size);
    const char *a = text, *b = wanted;
    while (*a || *b) {
        int a_length = (int)strcspn(a, "\n"), b_length = (int)strcspn(b, "\n");
        if (a_length != b_length || strncmp(a, b, (size_t)a_length) != 0) {
            int name = (int)strcspn(*a ? a : b, " \n");
            warn("%.*s is '%.*s' here and '%.*s' on rank 0: %s", name, *a ? a : b,
                 a_length > name ? a_length - name - 1 : 0, a + min_int(name + 1, a_length),
                 b_length > name ? b_length - name - 1 : 0, b + min_int(name + 1, b_length), remedy);
            program_exit(status);
        }
        a += a_length + (a[a_length] == '\n'), b += b_length + (b[b_length] == '\n');
    }
    free(wanted);
    comm_barrier(); // no rank continues when one is refused
}

// Digest of the program file, which distinguishes two builds of one revision.
static inline uint64_t ranks_program_digest(void) {
    size_t size = 0;
    char *program = file_read("/proc/self/exe", (size_t)1 << 30, &size);
    uint64_t digest = program ? XXH3_64bits(program, size) : 0;
    free(program);
    return digest;
}

static inline char *ranks_describe(const Options *o) {
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    CHECK(f, "out of memory for the description of this rank");
    fprintf(f, "revision %s\nprogram %016" PRIx64 "\ngemm-library %s\nattention-library %s\n", source_revision(),
            ranks_program_digest(), matmul_library(), attention_library_version());
    for (int i = 0; i < LIBRARY_VARIABLE_COUNT; i++)
        fprintf(f, "%s %s\n", library_variables[i].name, library_variable(i) ? library_variable(i) : "(unset)");
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        OptionText value;
        const char *shown = option_rows[r].kind == OPTION_ACTION || strcmp(option_rows[r].name, "threads") == 0
                                ? NULL
                                : option_text(value, o, r);
        if (shown) fprintf(f, "--%s %s\n", option_rows[r].name, shown);
    }
    CHECK(fclose(f) == 0, "out of memory for the description of this rank");
    return text;
}

typedef struct {
    const char *prefix;
    const void *data;
    size_t element_bytes;
} RankBuffer;

static inline uint64_t ranks_hash(const char *data, size_t bytes) {
    static char *host;
    if (!host) host = (char *)checked_calloc(RANKS_PIECE, 1);
    XXH3_state_t *state = XXH3_createState();
    CHECK(state && XXH3_64bits_reset(state) == XXH_OK, "out of memory for a hash");
    for (size_t at = 0, n; at < bytes; at += n) {
        n = min_size(RANKS_PIECE, bytes - at);
        buffer_download(host, data + at, n);
        XXH3_64bits_update(state, host, n);
    }
    uint64_t hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return hash;
}

// The hash that most ranks have; of two ranks, rank 0's.
static inline uint64_t ranks_majority(const uint64_t *hash, int ranks, size_t stride) {
    int best = 0, best_count = 0;
    for (int r = 0; r < ranks; r++) {
        int count = 0;
        for (int q = 0; q < ranks; q++) count += hash[(size_t)q * stride] == hash[(size_t)r * stride];
        if (count > best_count) best = r, best_count = count;
    }
    return hash[(size_t)best * stride];
}

static inline void ranks_check(const ModelState *model, int64_t step) {
    const ModelPlan *plan = model->plan;
    const RankBuffer buffers[] = {{"", model->params, sizeof(floatX)},
                                  {"exp_avg.", model->m, sizeof(real)},
                                  {"exp_avg_sq.", model->v, sizeof(real)},
                                  {"master.", model->master, sizeof(real)}};
    int count = plan->sharding.level ? 1 : model->master ? 4 : 3;
    if (comm_ranks() == 1) return;
    watch_phase(PHASE_CHECK);
    params_await(model);
    const TensorList *list = &plan->tensors;
    int ranks = comm_ranks();
    size_t width = (size_t)(list->count * count);
    uint64_t *own = (uint64_t *)checked_calloc(width * (size_t)(ranks + 1), sizeof(uint64_t)), *all = own + width;
    for (int b = 0; b < count; b++)
        for (int i = 0; i < list->count; i++) {
            const Tensor *t = &list->tensors[i];
            const char *data = (const char *)buffers[b].data + param_place(plan, t) * buffers[b].element_bytes;
            if (params_two_layers(plan) && t->layer >= 0 && t->layer < list->L) continue;
            own[b * list->count + i] = ranks_hash(data, t->count * buffers[b].element_bytes);
        }
    comm_gather(all, own, width * sizeof(uint64_t));
    for (size_t k = 0; k < width; k++) {
        uint64_t right = ranks_majority(all + k, ranks, width);
        for (int r = 0; r < ranks; r++)
            CHECK(all[(size_t)r * width + k] == right,
                  "after step %" PRId64 " rank %d has different values in %s%s than %s: its memory or processor is "
                  "faulty; --resume continues from the newest checkpoint",
                  step, ranks == 2 ? 1 : r, buffers[k / (size_t)list->count].prefix,
                  list->tensors[k % (size_t)list->count].name,
                  ranks == 2 ? "rank 0 (one of the two is wrong)" : "most ranks");
    }
    free(own);
}
#endif
