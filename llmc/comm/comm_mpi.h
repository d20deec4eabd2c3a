// clang-format off
/*
comm_mpi.h: the backend of comm.h for operations on the CPU, over MPI.

  threads   One thread per rank makes all MPI calls, in the order in which operations were started. It sleeps between
            polls, which leaves the cores to the computation. It requires neither an MPI progress thread nor
            MPI_THREAD_MULTIPLE.
  numerics  MPI only moves pieces (Ialltoall). They are summed here in the order of ranks, and the sums of groups in
            the order of groups, so the result depends on the numbers of ranks and groups, not on a library's algorithm.
*/
// clang-format on
#pragma once
#ifdef USE_MPI
#include "comm_launch.h"

#ifndef COMM_QUEUE
#define COMM_QUEUE 4096 // pending operations; the caller waits when there are more
#endif
#ifndef COMM_BLOCK
#define COMM_BLOCK 2048 // elements that are summed at a time
#endif

typedef enum { COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_GATHER, COMM_BROADCAST } CommKind;
typedef struct {
    CommKind kind;
    void *buffer;     // bucket, data to broadcast, or destination of a gather
    const void *mine; // this rank's part of a gather
    size_t count;     // elements of a piece for a reduction, otherwise bytes
    grad_t *out;
    bool add, all_groups;
} CommOp;

static struct {
    MPI_Comm group, across; // the ranks of this group; the ranks with this rank's place in their groups
    grad_t *staging;        // [ranks][piece]: received pieces
    size_t staging_bytes;
    CommOp queue[COMM_QUEUE];
    uint64_t begun, done; // operations; the ticket of an operation is the value of `begun` after it
    bool stop;
    pthread_t thread;
} comm_mpi;
static pthread_mutex_t comm_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t comm_changed = PTHREAD_COND_INITIALIZER;

// Polls a request, first without and then with short sleeps.
static inline void comm_wait_request(MPI_Request *request) {
    int done = 0;
    for (int looks = 0; !done; looks++) {
        MPI_OK(MPI_Test(request, &done, MPI_STATUS_IGNORE));
        if (done) break;
        if (looks < 20) sched_yield();
        else usleep(looks < 200 ? 50 : 200);
    }
}

// out = (add: +=) the sum of the pieces, in the order of ranks
static inline void comm_sum_pieces(grad_t *out, const grad_t *pieces, int ranks, size_t piece, bool add) {
    grad_t sum[COMM_BLOCK];
    for (size_t begin = 0; begin < piece; begin += COMM_BLOCK) {
        size_t n = min_size(COMM_BLOCK, piece - begin);
        memcpy(sum, pieces + begin, n * sizeof(grad_t));
        for (int r = 1; r < ranks; r++) {
            const grad_t *next = pieces + r * piece + begin;
#pragma omp simd
            for (size_t i = 0; i < n; i++) sum[i] += next[i];
        }
        if (!add) memcpy(out + begin, sum, n * sizeof(grad_t));
        else {
#pragma omp simd
            for (size_t i = 0; i < n; i++) out[begin + i] += sum[i];
        }
    }
}

// x = the sum of x over the groups, as many elements at a time as fit
static inline void comm_sum_groups(grad_t *x, size_t count, MPI_Datatype type) {
    size_t room = comm_mpi.staging_bytes / sizeof(grad_t) / (size_t)comm_groups();
    for (size_t begin = 0; begin < count && comm_groups() > 1; begin += room) {
        int n = (int)min_size(room, count - begin);
        MPI_Request request;
        MPI_OK(MPI_Iallgather(x + begin, n, type, comm_mpi.staging, n, type, comm_mpi.across, &request));
        comm_wait_request(&request);
        comm_sum_pieces(x + begin, comm_mpi.staging, comm_groups(), (size_t)n, false);
    }
}

// The sum over the ranks of a group.
static inline void comm_sum_group(const CommOp *op, MPI_Datatype type) {
    MPI_Request request;
    int count = (int)op->count;
    MPI_OK(MPI_Ialltoall(op->buffer, count, type, comm_mpi.staging, count, type, comm_mpi.group, &request));
    comm_wait_request(&request);
    comm_sum_pieces(op->out, comm_mpi.staging, comm.group_ranks, op->count, op->add);
}

static inline void comm_execute(const CommOp *op) {
    MPI_Request request;
    int count = (int)op->count;
    bool in_place;
    MPI_Datatype type = sizeof(grad_t) == sizeof(double) ? MPI_DOUBLE : MPI_FLOAT;
    switch (op->kind) {
    case COMM_REDUCE_SCATTER:
        fault_point(FAULT_RECEIVE, NULL, op->count);
        comm_sum_group(op, type);
        if (op->all_groups) comm_sum_groups(op->out, op->count, type);
        return;
    case COMM_ALL_GATHER:
        fault_point(FAULT_RECEIVE, NULL, op->count);
        in_place = op->mine == (char *)op->buffer + (size_t)comm_place() * op->count;
        MPI_OK(MPI_Iallgather(in_place ? MPI_IN_PLACE : op->mine, count, MPI_BYTE, op->buffer, count, MPI_BYTE,
                              comm_mpi.group, &request));
        break;
    case COMM_GATHER:
        MPI_OK(MPI_Iallgather(op->mine, count, MPI_BYTE, op->buffer, count, MPI_BYTE, MPI_COMM_WORLD, &request));
        break;
    case COMM_BROADCAST: MPI_OK(MPI_Ibcast(op->buffer, count, MPI_BYTE, 0, MPI_COMM_WORLD, &request)); break;
    }
    comm_wait_request(&request);
}

static inline void *comm_thread(void *unused) {
    (void)unused;
    pthread_mutex_lock(&comm_lock);
    for (;;) {
        while (comm_mpi.done == comm_mpi.begun && !comm_mpi.stop) pthread_cond_wait(&comm_changed, &comm_lock);
        if (comm_mpi.done == comm_mpi.begun) break;
        CommOp op = comm_mpi.queue[comm_mpi.done % COMM_QUEUE];
        pthread_mutex_unlock(&comm_lock);
        comm_execute(&op);
        pthread_mutex_lock(&comm_lock);
        comm_mpi.done++;
        pthread_cond_broadcast(&comm_changed);
    }
    pthread_mutex_unlock(&comm_lock);
    return NULL;
}

// Waits until `count` operations are done; the caller holds the lock.
static inline void comm_await(uint64_t done) {
    if (comm_mpi.done >= done) return;
    double begin = now_seconds();
    watch_wait_begin();
    while (comm_mpi.done < done) pthread_cond_wait(&comm_changed, &comm_lock);
    watch_wait_end();
    comm.wait_seconds += now_seconds() - begin;
}

static inline uint64_t comm_enqueue(CommOp op) {
    assert(op.count <= INT_MAX);
    pthread_mutex_lock(&comm_lock);
    if (comm_mpi.begun >= COMM_QUEUE) comm_await(comm_mpi.begun - COMM_QUEUE + 1);
    comm_mpi.queue[comm_mpi.begun++ % COMM_QUEUE] = op;
    uint64_t ticket = comm_mpi.begun;
    WATCH_SET(self.collectives, ticket);
    pthread_cond_broadcast(&comm_changed);
    while (fault_point(FAULT_COMPLETE, NULL, 0) && comm_mpi.done < ticket) pthread_cond_wait(&comm_changed, &comm_lock);
    pthread_mutex_unlock(&comm_lock);
    return ticket;
}

static inline void comm_wait(uint64_t ticket) {
    if (ticket == 0) return;
    pthread_mutex_lock(&comm_lock);
    comm_await(ticket);
    pthread_mutex_unlock(&comm_lock);
}

static inline uint64_t comm_reduce_scatter(grad_t *bucket, size_t piece, grad_t *out, bool add, bool all_groups) {
    CommOp op = {COMM_REDUCE_SCATTER, bucket, NULL, piece, out, add, all_groups};
    assert(comm.ranks > 1 && comm_mpi.staging_bytes >= comm.group_ranks * piece * sizeof(grad_t));
    return comm_enqueue(op);
}
static inline uint64_t comm_all_gather(void *bucket, const void *piece, size_t piece_bytes) {
    CommOp op = {COMM_ALL_GATHER, bucket, piece, piece_bytes, NULL, false, false};
    return comm_enqueue(op);
}

static inline void comm_gather(void *all, const void *mine, size_t bytes) {
    CommOp op = {COMM_GATHER, all, mine, bytes, NULL, false, false};
    if (comm.ranks == 1) memcpy(all, mine, bytes);
    else comm_wait(comm_enqueue(op));
}
static inline void comm_broadcast(void *data, size_t bytes) {
    CommOp op = {COMM_BROADCAST, data, NULL, bytes, NULL, false, false};
    if (comm.ranks > 1) comm_wait(comm_enqueue(op));
}

// Meanwhile the thread for communication is idle, so only this thread calls MPI.
static inline void comm_alloc(size_t bucket_bytes, int level, int group) {
    (void)level;
    if (comm.ranks == 1) return;
    comm.group_ranks = group;
    comm_mpi.group = MPI_COMM_WORLD;
    watch_wait_begin();
    if (comm_groups() > 1) {
        MPI_OK(MPI_Comm_split(MPI_COMM_WORLD, comm_group(), comm.rank, &comm_mpi.group));
        MPI_OK(MPI_Comm_split(MPI_COMM_WORLD, comm_place(), comm.rank, &comm_mpi.across));
    }
    watch_wait_end();
    comm_mpi.staging_bytes = max_size(bucket_bytes, comm_groups() * sizeof(grad_t));
    comm_mpi.staging = (grad_t *)buffer_alloc(comm_mpi.staging_bytes, "gradients of other ranks");
}

static inline const char *comm_library(void) { return NULL; }

static inline void comm_barrier(void); // comm.h
static inline void comm_close(void) {
    if (!comm.on) return;
    watch_stage(STAGE_END);
    comm_barrier();
    pthread_mutex_lock(&comm_lock);
    comm_mpi.stop = true;
    pthread_cond_broadcast(&comm_changed);
    pthread_mutex_unlock(&comm_lock);
    pthread_join(comm_mpi.thread, NULL);
    buffer_free(comm_mpi.staging);
    comm_mpi.staging = NULL;
    comm.on = false;
    watch_wait_begin();
    MPI_Finalize();
    watch_wait_end();
}

static inline void comm_open(const CommStart *start) {
    int launched = launch_process_count();
    if (launched == 1) return;
    Launch l = launch_by_mpi(launched, start);
    comm.rank = l.rank, comm.ranks = l.ranks, comm.ranks_here = l.ranks_here;
    launch_connect(&l, start, NULL, 0);
    thread_start(&comm_mpi.thread, comm_thread, NULL, "for communication");
    comm.on = true;
}
#endif // USE_MPI
