/*
checkpoint_background.h: checkpoints that are written while training continues.

Training waits only until the state of a step is copied to host memory. A thread of each rank then writes this rank's
pieces from the copy. The thread makes no MPI, NCCL or CUDA calls. Where ranks depend on one another (all have written;
all have read their share for the checksums; rank 0 has published the checkpoint), their main threads synchronize by the
data that they exchange at each step anyway. A single rank runs all stages in sequence.

  size_t background_copy_bytes(sharding)    host memory of a rank for the copy
  bool   background_open(b)                 all ranks: the first call allocates the copy; false and a warning: no memory
  CheckpointBuffers background_copy(b)      the copy; no checkpoint may be in progress
  void   background_start(run_dir, step, keep, copy, state)   all ranks: starts to write it; afterwards rank 0 prunes to
                                            `keep` checkpoints, unless it is negative. Takes ownership of `state`
  int    background_progress()              progress of this rank's thread; exits if it has failed
  bool   background_advance(least)          all ranks, with the minimum of their progress: starts the next stage if all
                                            have finished the last one. true: the checkpoint is complete
  bool   background_finish()                all ranks: waits for the end; true: one was in progress
  void   background_close()                 frees the copy

  memory   this rank's pieces (sharding.h) of parameters, moments and master weights, from the first such checkpoint to
           the end of the run; pinned in a CUDA program
  cost     The thread uses at most one core, at a lower priority than the compute threads.
  failure  If the thread fails, the main thread exits with its line at the end of the current step.
*/
#pragma once
#include "checkpoint.h"
#include "../base/host.h"

enum { BACKGROUND_WRITE, BACKGROUND_READ_BACK, BACKGROUND_PUBLISH }; // stages
enum { BACKGROUND_NICE = 5 };

static struct {
    bool tried; // the allocation of the copy was tried
    char *copy; // NULL: none
    // the checkpoint in progress
    bool on, running; // running: the thread exists and was not joined
    int stage;        // the thread's current or last stage
    char run_dir[PATH_SIZE];
    int64_t keep;
    CheckpointBuffers buffers;
    cJSON *state;
    CheckpointSave save;
    pthread_t thread;
    char failure[FAILURE_SIZE];
    double begin, end;    // begin: before the copy, set by the caller; end: when this rank's thread finished
    double stall_seconds; // time that training has waited; set by the caller
} background;

// ---- the copy

static inline size_t background_copy_bytes(const Sharding *s) {
    size_t master = sizeof(floatX) < sizeof(real) ? sizeof(real) : 0;
    return s->owned * (sizeof(floatX) + sizeof(real) + master) + s->moment2_count * sizeof(real);
}

static inline bool background_open(const CheckpointBuffers *b) {
    size_t bytes = background_copy_bytes(b->sharding);
    HostMemory host = {0, "this machine"};
    if (background.tried) return background.copy != NULL;
    background.tried = true;
    bool room = !host_memory("", &host) || (uint64_t)comm_ranks_here() * bytes <= host.available;
    double missing = !room;
    comm_sum_f64(&missing, 1); // all ranks check before one of them allocates
    if (missing == 0 && !fault_point(FAULT_COPY, NULL, bytes)) background.copy = (char *)download_alloc(bytes);
    missing += background.copy == NULL;
    comm_sum_f64(&missing, 1);
    if (missing == 0) return true;
    download_free(background.copy);
    background.copy = NULL;
    warn("training waits while a checkpoint is written: a copy of the state takes %.1f MiB%s, and %s has %.1f MiB "
         "available",
         (double)bytes / 1048576, comm_ranks_here() > 1 ? " per rank" : "", host.limit,
         (double)host.available / 1048576);
    return false;
}

// This rank's pieces of a buffer, in the order of the buckets.
static inline void *background_copy_part(char **to, const void *from, size_t size, const Sharding *s, bool compact) {
    char *begin = *to;
    *to += s->owned * size;
    if (compact || s->ranks == 1) buffer_download(begin, from, s->owned * size);
    for (int i = 0; i < s->count && !compact && s->ranks > 1; i++) {
        const Bucket *b = &s->buckets[i];
        size_t at = b->begin + s->rank * b->piece;
        buffer_download(begin + b->begin / s->ranks * size, (const char *)from + at * size, b->piece * size);
    }
    return begin;
}

// This rank's pieces of the second moments, in a model with tensors that Muon updates.
static inline real *background_copy_moment2(char **to, const CheckpointBuffers *b) {
    CheckpointPart parts[CHECKPOINT_PARTS];
    real *begin = (real *)(void *)*to;
    *to += b->sharding->moment2_count * sizeof(real);
    checkpoint_optimizer_parts(b, parts);
    for (const Tensor *t = b->tensors->tensors; t < b->tensors->tensors + b->tensors->count; t++)
        for (RankRange r = sharding_ranges(b->sharding, t); checkpoint_next(&parts[1], b->sharding, t, &r);)
            buffer_download(begin + r.compact_at, b->v + (parts[1].compact ? r.compact_at : r.at),
                            r.count * sizeof(real));
    return begin;
}

static inline CheckpointBuffers background_copy(const CheckpointBuffers *b) {
    CheckpointBuffers c = *b;
    char *to = background.copy;
    bool compact = checkpoint_is_compact(b);
    c.copied = true;
    c.m = (real *)background_copy_part(&to, b->m, sizeof(real), b->sharding, compact);
    c.v = b->tensors->muon ? background_copy_moment2(&to, b)
                           : (real *)background_copy_part(&to, b->v, sizeof(real), b->sharding, compact);
    if (b->master) c.master = (real *)background_copy_part(&to, b->master, sizeof(real), b->sharding, compact);
    c.params =
        (floatX *)background_copy_part(&to, b->params, sizeof(floatX), b->sharding, checkpoint_weights_compact(b));
    return c;
}

// ---- the thread

static inline void background_run_stage(int stage) {
    CheckpointSave *s = &background.save;
    switch (stage) {
    case BACKGROUND_WRITE: checkpoint_save_write(s); break;
    case BACKGROUND_READ_BACK: checkpoint_save_read_back(s); break;
    default:
        checkpoint_save_publish(s);
        if (comm_rank() == 0 && background.keep >= 0) checkpoint_prune(background.run_dir, background.keep, s->step);
    }
}

static inline void *background_thread(void *unused) {
    failure_line = background.failure;
    omp_set_num_threads(1);                        // for the loops of this thread
    setpriority(PRIO_PROCESS, 0, BACKGROUND_NICE); // for this thread; failure costs speed only
    background_run_stage(background.stage);
    while (comm_ranks() == 1 && background.stage < BACKGROUND_PUBLISH) {
        if (background.stage == BACKGROUND_READ_BACK) checkpoint_save_gather(&background.save);
        background_run_stage(++background.stage);
    }
    background.end = now_seconds();
    return unused;
}

static inline void background_start_stage(int stage) {
    background.stage = stage;
    background.running = true;
    thread_start(&background.thread, background_thread, NULL, "that writes a checkpoint");
}

// ---- the main thread

static inline void background_start(const char *run_dir, int64_t step, int64_t keep, const CheckpointBuffers *b,
                                    cJSON *state) {
    assert(!background.on && background.copy);
    FORMAT(background.run_dir, "%s", run_dir);
    background.buffers = *b, background.keep = keep, background.state = state;
    checkpoint_save_open(&background.save, background.run_dir, step, &background.buffers, state);
    background.on = true;
    background_start_stage(BACKGROUND_WRITE);
}

// 0 while a stage is running; otherwise 1 + the last finished stage.
static inline int background_progress(void) {
    if (background.running && pthread_tryjoin_np(background.thread, NULL) == 0) background.running = false;
    if (!background.on || background.running) return 0;
    CHECK(!background.failure[0], "%s", background.failure);
    return background.stage + 1;
}

static inline bool background_advance(int least) {
    if (!background.on || background.running || least <= background.stage) return false;
    if (background.stage < BACKGROUND_PUBLISH) {
        if (background.stage == BACKGROUND_READ_BACK) checkpoint_save_gather(&background.save);
        background_start_stage(background.stage + 1);
        return false;
    }
    cJSON_Delete(background.state);
    unfinished_end();
    background.on = false;
    return true;
}

static inline bool background_finish(void) {
    bool was_on = background.on;
    for (bool complete = !was_on; !complete;) {
        if (background.running) pthread_join(background.thread, NULL);
        background.running = false;
        int stage = background_progress();
        comm_barrier(); // all ranks have finished the stage
        complete = background_advance(stage);
    }
    return was_on;
}

static inline void background_close(void) {
    download_free(background.copy);
    background.copy = NULL;
    background.tried = false;
}
