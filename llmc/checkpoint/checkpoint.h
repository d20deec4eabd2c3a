/*
checkpoint.h: checkpoints of a run, written atomically and verified before they are loaded.

  void    checkpoint_save(run_dir, step, buffers, state)           writes run_dir/checkpoints/step_NNNNNNNN
  int64_t checkpoint_find_newest(run_dir, path_out[PATH_SIZE])     the newest valid one, with a warning for each invalid
                                                                   one; -1 if there are no checkpoints
  int64_t checkpoint_find_before(run_dir, step, path_out)          the newest valid one before `step`; -1: none
  cJSON  *checkpoint_load_state(dir)                               trainer_state.json, verified; cJSON_Delete()
  void    checkpoint_load_weights(dir, buffers, with_optimizer)    names and shapes must equal buffers->tensors
  void    checkpoint_create_directory(run_dir)                     checkpoints/, at each start
  void    checkpoint_clean(run_dir)                                removes the files of interrupted saves
  void    checkpoint_prune(run_dir, keep, step)                    after saving `step`: keeps the newest `keep` complete
                                                                   ones, and invalid ones that are newer than these
  void    checkpoint_save_gradients(path, tensors, grads, loss)    the file of --dump-grads

A directory from elsewhere (--init) needs only config.json (config_json_read) and weights.
checkpoint_load_weights(dir, buffers, false) reads F64, F32, BF16 and F16, in one file or in shards. If the directory
has a trainer_state.json of this program, checkpoint_check_init(dir) verifies the files that are read;
optimizer.safetensors may be missing.

  format   config.json            config_json.h
           model.safetensors      the tensors in table order; BF16 if floatX is BF16, else F32
           optimizer.safetensors  per tensor, in table order: exp_avg.NAME, exp_avg_sq.NAME (Muon's matrices
                                  have none, NorMuon's one number for each row) and, if the weights are narrower than
                                  F32, master.NAME; F32
           tokenizer.bin, tokenizer.json   if the run has them
           trainer_state.json     the caller's object (counters, seeds, spike detector, options, fingerprint), then
                                  "checksums": {FILE: {"bytes": SIZE, "xxh3_64": [DIGEST of each 64 MiB]}} and last
                                  "checksum": the digest of the text of this file up to this member's opening quote.
                                  A digest is XXH3-64 as 16 hexadecimal digits.
  atomic   Written under step_NNNNNNNN.tmp; each file is fsynced, then the directory; it is renamed, and its parent
           fsynced. A failure of the program removes it, so that it does not keep a full disk full.
  threads  checkpoint_background.h writes a copy of the state while training continues.
  ranks    All ranks call checkpoint_save, _find_*, _check_init and _load_weights together: each writes, reads and
           hashes its part of the same files. Rank 0 alone calls checkpoint_clean, _prune and _drop_after.
  removal  If a directory cannot be removed (a busy file on NFS, for example), a warning is printed and checkpoint_clean
           tries again, at every start and after every save. It has been renamed by then, so it is not taken for a
           checkpoint. It is an error only if the rename fails and the directory would replace or be resumed as another
           checkpoint.
  errors   CHECK, with the path. Only checkpoint_find_newest skips invalid checkpoints. It exits if all are invalid,
           since a restart from step 0 would silently lose the run; resume.h exits if they are gone.
*/
#pragma once
#include "../base/common.h"
#include "checkpoint_checksums.h"
#include "checkpoint_tensors.h"
#include "../model/config_json.h"

static const int64_t CHECKPOINT_STEP_LIMIT = 99999999; // eight digits

static inline cJSON *checkpoint_load_state(const char *dir) {
    Reason why;
    cJSON *state = checkpoint_state_read(dir, why);
    CHECK(state, "%s: %s", dir, why);
    return state;
}

static inline bool checkpoint_verify(const char *dir, int64_t step, Reason why) {
    cJSON *state = checkpoint_state_read(dir, why);
    double readable = state != NULL;
    comm_sum_f64(&readable, 1);
    if (readable < comm_ranks()) {
        if (state) snprintf(why, sizeof(Reason), "a rank cannot read its trainer_state.json");
        cJSON_Delete(state);
        return false;
    }
    uint64_t saved = 0;
    bool good = json_get_u64(state, "step", &saved) && saved == (uint64_t)step;
    if (!good) snprintf(why, sizeof(Reason), "it was saved at step %" PRIu64, saved);
    good = good && checksums_verify(dir, cJSON_GetObjectItemCaseSensitive(state, "checksums"), true, why);
    cJSON_Delete(state);
    return good;
}

// trainer_state.json of a directory that may come from elsewhere. NULL and an empty `why`: the file is missing or
// belongs to another program (Transformers writes a file of this name). NULL and a reason: it is damaged.
static inline cJSON *checkpoint_init_state(const char *dir, Reason why) {
    char path[PATH_SIZE];
    size_t size = 0;
    FORMAT(path, "%s/trainer_state.json", dir);
    char *text = file_read(path, CHECKPOINT_STATE_LIMIT, &size);
    bool missing = !text && (errno == ENOENT || errno == ENOTDIR);
    cJSON *any = text ? json_parse(text, size) : NULL;
    bool foreign =
        cJSON_IsObject(any) && !cJSON_HasObjectItem(any, "checksums") && !cJSON_HasObjectItem(any, "checksum");
    cJSON_Delete(any);
    free(text);
    why[0] = 0;
    return missing || foreign ? NULL : checkpoint_state_read(dir, why);
}

static inline void checkpoint_check_init(const char *dir) {
    Reason why;
    cJSON *state = checkpoint_init_state(dir, why);
    double stated = state != NULL;
    CHECK(!why[0], "%s: %s; restore it, or remove it to load the weights unverified", dir, why);
    comm_sum_f64(&stated, 1);
    CHECK(stated == 0 || stated == comm_ranks(), "%s: only %.0f of %d ranks can read its trainer_state.json", dir,
          stated, comm_ranks());
    bool good = !state || checksums_verify(dir, cJSON_GetObjectItemCaseSensitive(state, "checksums"), false, why);
    CHECK(good, "%s: %s; restore it, or remove trainer_state.json to load it unverified", dir, why);
    cJSON_Delete(state);
}

static inline void checkpoint_path(const char *run_dir, int64_t step, const char *suffix, char out[PATH_SIZE]) {
    int n = snprintf(out, PATH_SIZE, "%s/checkpoints/step_%08" PRId64 "%s", run_dir, step, suffix);
    CHECK(n > 0 && n < PATH_SIZE, "a name is too long: %.80s...", run_dir);
}

static inline int compare_steps_down(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

// The steps of all directories step_NNNNNNNN, newest first. Other names are ignored. free()
static inline int64_t *checkpoint_steps(const char *run_dir, size_t *count) {
    char path[PATH_SIZE];
    FORMAT(path, "%s/checkpoints", run_dir);
    *count = 0;
    size_t room = 0;
    int64_t *steps = NULL;
    DIR *d = opendir(path);
    CHECK(d || errno == ENOENT, "cannot read the directory %s: %s", path, strerror(errno));
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        const char *name = e->d_name;
        if (strlen(name) != 13 || strncmp(name, "step_", 5) != 0 || strspn(name + 5, "0123456789") != 8) continue;
        char child[PATH_SIZE];
        FORMAT(child, "%s/%s", path, name);
        struct stat st;
        if (stat(child, &st) == 0 && !S_ISDIR(st.st_mode)) continue; // a checkpoint that cannot be read is not absent
        if (*count == room) {
            room = 2 * room + 16;
            steps = (int64_t *)realloc(steps, room * sizeof(int64_t));
            CHECK(steps, "out of memory for the list of checkpoints in %s", path);
        }
        steps[(*count)++] = strtoll(name + 5, NULL, 10);
    }
    if (d) closedir(d);
    if (*count) qsort(steps, *count, sizeof(int64_t), compare_steps_down);
    return steps;
}

// Gives all ranks the list of rank 0.
static inline int64_t *checkpoint_steps_all(const char *run_dir, size_t *count) {
    *count = 0;
    int64_t *steps = comm_rank() == 0 ? checkpoint_steps(run_dir, count) : NULL;
    comm_broadcast(count, sizeof(*count));
    if (comm_rank() != 0) steps = (int64_t *)checked_calloc(*count, sizeof(int64_t));
    if (*count) comm_broadcast(steps, *count * sizeof(int64_t));
    return steps;
}

static inline int64_t checkpoint_find(const char *run_dir, int64_t before, char path_out[PATH_SIZE], size_t *count) {
    int64_t *steps = checkpoint_steps_all(run_dir, count), found = -1;
    for (size_t i = 0; i < *count && found < 0; i++) {
        Reason why;
        if (steps[i] >= before) continue;
        checkpoint_path(run_dir, steps[i], "", path_out);
        if (checkpoint_verify(path_out, steps[i], why)) found = steps[i];
        else warn("skipping checkpoint %s: %s", path_out, why);
    }
    free(steps);
    return found;
}

static inline int64_t checkpoint_find_before(const char *run_dir, int64_t step, char path_out[PATH_SIZE]) {
    size_t count = 0;
    return checkpoint_find(run_dir, step, path_out, &count);
}

static inline int64_t checkpoint_find_newest(const char *run_dir, char path_out[PATH_SIZE]) {
    size_t count = 0;
    int64_t found = checkpoint_find(run_dir, INT64_MAX, path_out, &count);
    CHECK(count == 0 || found >= 0,
          "%s/checkpoints has no valid checkpoint: restore one, or start a new run with another --out", run_dir);
    return found;
}

// Removes a directory that was renamed or is unfinished, and does not have the name of a checkpoint.
static inline void checkpoint_remove_leftover(const char *path) {
    if (!directory_remove(path))
        warn("cannot remove %s: %s; trying again at the next checkpoint", path, strerror(errno));
}

// Removes a checkpoint. Renames it first, so that a partly removed checkpoint never has the name of one. false and
// errno: it still has its name.
static inline bool checkpoint_remove(const char *run_dir, int64_t step) {
    char path[PATH_SIZE], old[PATH_SIZE];
    checkpoint_path(run_dir, step, "", path);
    checkpoint_path(run_dir, step, ".old.tmp", old);
    if (!directory_remove(old) || rename(path, old) != 0) return false;
    checkpoint_remove_leftover(old);
    return true;
}

// Removes the files of interrupted saves and removals. The caller holds the lock of the run (log_create, log_resume).
static inline void checkpoint_clean(const char *run_dir) {
    char parent[PATH_SIZE], path[PATH_SIZE];
    FORMAT(parent, "%s/checkpoints", run_dir);
    DIR *d = opendir(parent);
    CHECK(d || errno == ENOENT, "cannot read the directory %s: %s", parent, strerror(errno));
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        const char *name = e->d_name, *suffix = name + min_size(strlen(name), 13);
        if (strncmp(name, "step_", 5) != 0 || strspn(name + 5, "0123456789") != 8) continue;
        if (strcmp(suffix, ".tmp") != 0 && strcmp(suffix, ".old.tmp") != 0) continue;
        FORMAT(path, "%s/%s", parent, name);
        checkpoint_remove_leftover(path);
    }
    if (d) closedir(d);
}

// Exits if one cannot be removed, since a resume would load it.
static inline void checkpoint_drop_after(const char *run_dir, int64_t step) {
    size_t count = 0;
    int64_t *steps = checkpoint_steps(run_dir, &count);
    for (size_t i = 0; i < count && steps[i] > step; i++)
        CHECK(checkpoint_remove(run_dir, steps[i]), "cannot remove the checkpoint of step %" PRId64 " in %s: %s",
              steps[i], run_dir, strerror(errno));
    free(steps);
}

// Whether a checkpoint looks complete, without reading its tensors: trainer_state.json has the right checksum and step,
// and the other files have the sizes that it states. checkpoint_verify compares every byte.
static inline bool checkpoint_looks_complete(const char *run_dir, int64_t step) {
    char dir[PATH_SIZE];
    Reason why;
    uint64_t saved = 0;
    checkpoint_path(run_dir, step, "", dir);
    cJSON *state = checkpoint_state_read(dir, why);
    bool complete = state && json_get_u64(state, "step", &saved) && saved == (uint64_t)step &&
                    checksums_sizes_match(dir, cJSON_GetObjectItemCaseSensitive(state, "checksums"));
    cJSON_Delete(state);
    return complete;
}

// Checkpoints of later steps were skipped by a resume as invalid. They are neither counted nor removed.
static inline void checkpoint_prune(const char *run_dir, int64_t keep, int64_t step) {
    size_t count = 0;
    checkpoint_clean(run_dir);
    int64_t *steps = checkpoint_steps(run_dir, &count), kept = 0;
    for (size_t i = 0; i < count && keep > 0; i++) {
        if (steps[i] > step) continue;
        if (kept < keep) kept += checkpoint_looks_complete(run_dir, steps[i]);
        else if (!checkpoint_remove(run_dir, steps[i]))
            warn("cannot remove the checkpoint of step %" PRId64 " in %s: %s; trying again at the next checkpoint",
                 steps[i], run_dir, strerror(errno));
    }
    free(steps);
}

// Renames a complete checkpoint to its final name. An existing one of the same step (skipped by a resume, replayed, or
// replaced by a rollback) is exchanged atomically where the file system supports it, so that one always exists.
static inline void checkpoint_publish(const char *run_dir, int64_t step, const char *temporary, const char *dir) {
    if (directory_exists(dir)) {
        if (renameat2(AT_FDCWD, temporary, AT_FDCWD, dir, RENAME_EXCHANGE) == 0) {
            char parent[PATH_SIZE];
            directory_of(dir, parent, sizeof(parent));
            directory_sync(parent);
            checkpoint_remove_leftover(temporary);
            return;
        }
        CHECK(checkpoint_remove(run_dir, step), "cannot replace the checkpoint %s: %s", dir, strerror(errno));
    }
    file_rename_synced(temporary, dir);
}

// A checkpoint that is being written: by checkpoint_save at once, or by checkpoint_background.h in stages.
typedef struct {
    const char *run_dir;
    int64_t step;
    const CheckpointBuffers *buffers;
    const cJSON *state; // must have "step"
    char temporary[PATH_SIZE];
    SafeTensorsWriter *weights, *optimizer;
    FileDigests files[CHECKPOINT_FILE_COUNT];
    cJSON *checksums;
} CheckpointSave;

static inline void checkpoint_create_directory(const char *run_dir) {
    char path[PATH_SIZE];
    FORMAT(path, "%s/checkpoints", run_dir);
    if (directory_exists(path)) return;
    directory_create(path);
    directory_sync(run_dir);
}

// Creates an empty directory for the files; it is renamed at the end.
static inline void checkpoint_save_make_directory(const CheckpointSave *s) {
    char old[PATH_SIZE];
    checkpoint_create_directory(s->run_dir);
    checkpoint_path(s->run_dir, s->step, ".old.tmp", old); // its new name if it cannot be removed
    CHECK(directory_remove(s->temporary) || rename(s->temporary, old) == 0,
          "cannot remove the unfinished checkpoint %s: %s; remove it, then --resume", s->temporary, strerror(errno));
    directory_create(s->temporary);
}

// First stage, on all ranks: opens the files, which all ranks write.
static inline void checkpoint_save_open(CheckpointSave *s, const char *run_dir, int64_t step,
                                        const CheckpointBuffers *b, const cJSON *state) {
    uint64_t state_step = 0;
    bool has_step = json_get_u64(state, "step", &state_step) && state_step == (uint64_t)step, first = comm_rank() == 0;
    assert(has_step);
    assert(!cJSON_GetObjectItemCaseSensitive(state, "checksums") &&
           !cJSON_GetObjectItemCaseSensitive(state, "checksum"));
    CHECK(step >= 0 && step <= CHECKPOINT_STEP_LIMIT,
          "cannot save a checkpoint at step %" PRId64 ": the limit is eight digits", step);
    static bool warned;
    if (sizeof(real) == 8 && !warned) warn("a double-precision build saves checkpoints in single precision");
    warned = true;

    char path[2][PATH_SIZE];
    memset(s, 0, sizeof(*s));
    s->run_dir = run_dir, s->step = step, s->buffers = b, s->state = state;
    checkpoint_path(run_dir, step, ".tmp", s->temporary);
    unfinished_begin(s->temporary); // until it is published
    if (first) checkpoint_save_make_directory(s);
    FORMAT(path[0], "%s/model.safetensors", s->temporary);
    FORMAT(path[1], "%s/optimizer.safetensors", s->temporary);
    for (int turn = 0; turn < 2; turn++) { // rank 0, then the other ranks
        if (first == (turn == 0)) {
            s->weights = checkpoint_weights_open(path[0], b, first);
            s->optimizer = checkpoint_optimizer_open(path[1], b, first);
        }
        if (turn == 0 && comm_ranks() > 1) comm_barrier();
    }
}

// Second stage, in any thread of each rank: writes the rank's pieces of the tensors; rank 0 also writes the other
// files.
static inline void checkpoint_save_write(CheckpointSave *s) {
    const CheckpointBuffers *b = s->buffers;
    char path[PATH_SIZE];
    FORMAT(path, "%s/config.json", s->temporary);
    if (comm_rank() == 0) config_json_write(path, b->config, checkpoint_weights_dtype());
    for (int i = CHECKPOINT_REQUIRED; i < CHECKPOINT_FILE_COUNT && comm_rank() == 0; i++) {
        if (!b->tokenizer[i - CHECKPOINT_REQUIRED].data) continue;
        FORMAT(path, "%s/%s", s->temporary, checkpoint_files[i]);
        file_write_new(path, b->tokenizer[i - CHECKPOINT_REQUIRED].data, b->tokenizer[i - CHECKPOINT_REQUIRED].size);
    }
    checkpoint_weights_write(s->weights, b);
    checkpoint_optimizer_write(s->optimizer, b);
    checkpoint_file_close(s->weights);
    checkpoint_file_close(s->optimizer);
}

// After all ranks have written, in any thread of each rank.
static inline void checkpoint_save_read_back(CheckpointSave *s) { checksums_read(s->temporary, s->files); }

// After all ranks have read, on all ranks.
static inline void checkpoint_save_gather(CheckpointSave *s) { s->checksums = checksums_build(s->temporary, s->files); }

// Last, in any thread: rank 0 publishes the checkpoint; the other ranks free their memory.
static inline void checkpoint_save_publish(CheckpointSave *s) {
    char dir[PATH_SIZE], path[PATH_SIZE];
    cJSON *state = cJSON_Duplicate(s->state, true);
    CHECK(state && cJSON_AddItemToObject(state, "checksums", s->checksums), "out of memory for %s", s->temporary);
    checkpoint_path(s->run_dir, s->step, "", dir);
    FORMAT(path, "%s/trainer_state.json", s->temporary);
    if (comm_rank() == 0) {
        checkpoint_state_write(path, state);
        directory_sync(s->temporary);
        checkpoint_publish(s->run_dir, s->step, s->temporary, dir);
    }
    cJSON_Delete(state);
}

// Called by all ranks. The caller keeps ownership of `state`.
static inline void checkpoint_save(const char *run_dir, int64_t step, const CheckpointBuffers *b, const cJSON *state) {
    CheckpointSave s;
    checkpoint_save_open(&s, run_dir, step, b, state);
    checkpoint_save_write(&s);
    comm_barrier();
    checkpoint_save_read_back(&s);
    checkpoint_save_gather(&s);
    checkpoint_save_publish(&s);
    unfinished_end();
    comm_barrier();
}
