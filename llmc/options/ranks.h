/*
ranks.h: checks at the start that the ranks of a run have the same options and builds.

  void ranks_compare(text, remedy, status)    text: lines "NAME VALUE". Ends the program with the first line that
                                              differs from rank 0's
  char *ranks_describe(options)               the build and the options of this rank, as such lines; free()

All ranks call them together. With one rank they do nothing.
*/
#pragma once
#include "../comm/comm.h"
#include "../experts/all_operations.h"
#include "environment.h"
#include "../base/files.h"
#include "options.h"
#include "../base/revision.h"

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
        const char *shown = strcmp(option_rows[r].name, "threads") == 0 ? NULL : option_text(value, o, r);
        if (shown) fprintf(f, "--%s %s\n", option_rows[r].name, shown);
    }
    CHECK(fclose(f) == 0, "out of memory for the description of this rank");
    return text;
}
