/*
checkpoint_background.h: a checkpoint that is written while training goes on.

The state of a step is copied to host memory, which is all that training waits for. A thread of each rank then writes
this rank's pieces from the copy. The thread makes no call of MPI, NCCL or CUDA: where ranks depend on one another (all
have written; all have read their share for the checksums; rank 0 has given the checkpoint its name) their main threads
agree, in what they exchange at each step anyway. One rank does all in a row.

  size_t background_copy_bytes(sharding)    host memory of a rank for the copy
  bool   background_open(b)                 all ranks: allocates it, at the first call; false and a warning: no room
  CheckpointBuffers background_copy(b)      the copy; no checkpoint must be under way
  void   background_start(run_dir, step, keep, copy, state)   all ranks: begins to write it; afterwards rank 0 prunes to
                                            `keep`, unless that is negative. Takes over `state`
  int    background_progress()              how far this rank's thread has come; ends the program if it has failed
  bool   background_advance(least)          all ranks, with the least progress of any: the next stage, where all have
                                            ended the last one. true: the checkpoint is there
  bool   background_finish()                all ranks: waits for the end; true: one was under way
  void   background_close()                 frees the copy

  memory   this rank's own pieces (sharding.h) of parameters, moments and master weights, from the first such checkpoint
           to the end of the run; pinned in a CUDA program
  cost     the thread uses one core at most, at a lower priority than the threads that compute
  failure  of the thread: the main thread ends the program with its line, at the end of the step under way
*/
#ifndef LLMC_CHECKPOINT_BACKGROUND_H
#define LLMC_CHECKPOINT_BACKGROUND_H
#include "checkpoint.h"
#include "../base/host.h"
#include <sys/resource.h>

enum { BACKGROUND_WRITE, BACKGROUND_READ_BACK, BACKGROUND_PUBLISH }; // stages
enum { BACKGROUND_NICE = 5 };

static struct {
    bool tried; // to allocate the copy
    char *copy; // NULL: none
    // of the checkpoint under way
    bool on, running; // running: there is a thread that the main thread has not joined
    int stage;        // the thread's while there is one: that it is in, then that it has ended
    char run_dir[PATH_SIZE];
    int64_t keep;
    CheckpointBuffers buffers;
    cJSON *state;
    CheckpointSave save;
    pthread_t thread;
    char failure[FAILURE_SIZE];
    double begin, end;    // from before the copying, which the caller sets, until this rank's thread has done its last
    double stall_seconds; // that training has waited for it: the caller's
} background;

// ---- the copy

static inline size_t background_copy_bytes(const Sharding *s) {
    size_t moments = 2 * sizeof(real), master = sizeof(floatX) < sizeof(real) ? sizeof(real) : 0;
    return s->own * (sizeof(floatX) + moments + master);
}

static inline bool background_open(const CheckpointBuffers *b) {
    size_t bytes = background_copy_bytes(b->sharding);
    HostMemory host = {0, "this machine"};
    if (background.tried) return background.copy != NULL;
    background.tried = true;
    bool room = !host_memory("", &host) || (uint64_t)comm_ranks_here() * bytes <= host.available;
    double missing = !room;
    comm_sum_f64(&missing, 1); // none allocates before all have looked
    if (missing == 0 && !fault_point(FAULT_COPY, NULL, bytes)) background.copy = (char *)download_alloc(bytes);
    missing += background.copy == NULL;
    comm_sum_f64(&missing, 1);
    if (missing == 0) return true;
    download_free(background.copy);
    background.copy = NULL;
    warn("training stops while a checkpoint is written: a copy of the state takes %.1f MiB%s, and %s has %.1f MiB "
         "available; --no-checkpoint-background does not try",
         (double)bytes / 1048576, comm_ranks_here() > 1 ? " per rank" : "", host.limit,
         (double)host.available / 1048576);
    return false;
}

// This rank's pieces of a buffer, in the order of the buckets.
static inline void *background_copy_part(char **to, const void *from, size_t size, const Sharding *s, bool compact) {
    char *begin = *to;
    *to += s->own * size;
    if (compact || s->ranks == 1) buffer_download(begin, from, s->own * size);
    for (int i = 0; i < s->count && !compact && s->ranks > 1; i++) {
        const Bucket *b = &s->buckets[i];
        size_t at = b->begin + s->rank * b->piece;
        buffer_download(begin + b->begin / s->ranks * size, (const char *)from + at * size, b->piece * size);
    }
    return begin;
}

static inline CheckpointBuffers background_copy(const CheckpointBuffers *b) {
    CheckpointBuffers c = *b;
    char *to = background.copy;
    bool compact = checkpoint_is_compact(b);
    c.copied = true;
    c.m = (real *)background_copy_part(&to, b->m, sizeof(real), b->sharding, compact);
    c.v = (real *)background_copy_part(&to, b->v, sizeof(real), b->sharding, compact);
    if (b->master) c.master = (real *)background_copy_part(&to, b->master, sizeof(real), b->sharding, compact);
    c.params = (floatX *)background_copy_part(&to, b->params, sizeof(floatX), b->sharding, false);
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
    omp_set_num_threads(1);                        // of this thread's loops
    setpriority(PRIO_PROCESS, 0, BACKGROUND_NICE); // of this thread; a failure costs speed alone
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

// 0: in the stage; else one more than the stage that it has ended.
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
    background.on = false;
    return true;
}

static inline bool background_finish(void) {
    bool was_on = background.on;
    for (bool there = !was_on; !there;) {
        if (background.running) pthread_join(background.thread, NULL);
        background.running = false;
        int own = background_progress();
        comm_barrier(); // all have come as far
        there = background_advance(own);
    }
    return was_on;
}

static inline void background_close(void) {
    download_free(background.copy);
    background.copy = NULL;
    background.tried = false;
}
#endif
