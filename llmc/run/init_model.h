/*
init_model.h: requirements of --init, in addition to the requirements of config_json.h and checkpoint.h.
*/
#pragma once
#include "../checkpoint/checkpoint.h"
#include "../options/options_model.h"

// Refuses a run directory as --init, with the name of its newest checkpoint.
static inline void init_refuse_run(const char *dir) {
    char path[PATH_SIZE];
    size_t count = 0;
    FORMAT(path, "%s/config.json", dir);
    if (access(path, F_OK) == 0 || !directory_exists(dir)) return;
    int64_t *steps = checkpoint_steps(dir, &count);
    if (count) checkpoint_path(dir, steps[0], "", path);
    free(steps);
    CHECK(count == 0, "--init %s is the directory of a run: use its newest checkpoint, --init %s", dir, path);
}

// Refuses --init of a baseline with another --attention, or with twice the --heads, and names what converts it.
static inline void init_refuse_conversion(const Options *o, const ModelConfig *config, const char *dir) {
    bool variant = o->resume || options_given(o, "attention"), heads = o->resume || options_given(o, "heads");
    const AttentionVariant *baseline = variant_find("baseline"), *to = variant ? o->model.attention : baseline;
    int problems = 0;
    if (config->attention != baseline) return;
    if (to != baseline)
        REFUSE(problems,
               "--attention %s: the model of --init %s is a baseline: convert it with scripts/export/convert.py %s "
               "--attention %s OUT, and use --init OUT",
               to->name, dir, dir, to->name);
    else if (heads && o->model.NH == 2 * config->NH)
        REFUSE(problems,
               "--heads %d: the model of --init %s has %d: convert it with scripts/export/convert.py %s --heads %d "
               "OUT, and use --init OUT",
               o->model.NH, dir, config->NH, dir, o->model.NH);
    if (problems) program_exit(EXIT_USAGE);
}

// --init with --sparse-blocks or --sparse-block-size: sets them in `config`, the model of the directory. No weight
// depends on them.
static inline void init_sparse(const Options *o, ModelConfig *config) {
    if (o->resume || options_given(o, "sparse-blocks")) config->sparse_blocks = o->model.sparse_blocks;
    if (o->resume || options_given(o, "sparse-block-size")) config->sparse_size = o->model.sparse_size;
}
