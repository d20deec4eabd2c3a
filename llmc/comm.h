/*
comm.h: what the ranks of a run say to each other: MPI, started only under a launcher.

  void comm_open()                          first of all in main: rank and number of ranks, and the watchdog
  void comm_alloc(bytes)                    memory for buckets of up to `bytes`, before step 1
  int  comm_rank(), comm_ranks()            0 and 1 without a launcher
  int  comm_ranks_here()                    ranks on this machine, which share its cores
  void comm_close()

  On the host, the same call on every rank, returns when done:
    comm_gather(all, mine, bytes)           all [ranks][bytes]
    comm_sum_f64(x, count)                  in the order of ranks, so that all have the same bits
    comm_broadcast(data, bytes)             rank 0's
    comm_barrier()

  On operation memory, begun in the same order on every rank, done in that order behind the caller's back:
    ticket = comm_reduce_scatter(bucket, piece, out, add)   bucket [ranks][piece]: out [piece] = (or +=) the sum over ranks of
                                                            piece `rank` of their buckets; out may be that piece
    ticket = comm_all_gather(bucket, piece_bytes)           bucket [ranks][piece_bytes], each rank's piece from that rank
    comm_wait(ticket)                                       until it is done, and all that was begun before; 0: nothing

  threads   One thread per rank makes all MPI calls, in the order in which they were begun, and sleeps between two looks
            at a message that has not come: the cores belong to the computation that goes on meanwhile. No MPI
            progress thread and no MPI_THREAD_MULTIPLE are needed.
  numerics  MPI only moves pieces (Ialltoall); their sum is formed here, in the order of ranks. It depends on the number of
            ranks alone, not on the algorithm that a library chooses for a size.
  traffic   (ranks-1)/ranks of a bucket sent and received per rank, by either collective
  faults    A peer that is gone is the watchdog's business: comm_wait tells it how long it waits.
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H
#include "common.h"
#include "ops.h"
#include "watchdog.h"

enum { COMM_QUEUE = 4096 }; // operations begun and not done; beyond that the beginner waits

typedef enum { COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_GATHER, COMM_BROADCAST } CommKind;
typedef struct {
    CommKind kind;
    void *buffer; // bucket; what is broadcast; where gathered pieces go
    const void *mine;
    size_t count; // elements of a piece, for a reduction; else bytes
    grad_t *out;
    bool add;
} CommOp;

static struct {
    bool on;
    int rank, ranks, ranks_here;
    double wait_seconds; // that comm_wait has taken; may be reset
    grad_t *staging;     // [ranks][piece] received pieces
    size_t staging_bytes;
    CommOp queue[COMM_QUEUE];
    uint64_t begun, done; // operations; a ticket is the number of those begun with it
    bool stop;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} comm = {false, 0, 1, 1, 0, NULL, 0, {{COMM_GATHER, NULL, NULL, 0, NULL, false}}, 0, 0, false, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};

static inline int comm_rank(void) { return comm.rank; }
static inline int comm_ranks(void) { return comm.ranks; }
static inline int comm_ranks_here(void) { return comm.ranks_here; }

// How many processes the launcher says it has started: 1 also without one.
static inline int comm_launched(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (getenv(names[i])) return atoi(getenv(names[i]));
    const char *step = getenv("SLURM_STEP_NUM_TASKS"), *id = getenv("SLURM_STEP_ID");
    if (step && id && isdigit((unsigned char)id[0])) return atoi(step); // srun; a batch script alone is no step with a number
    return 1;
}

#ifdef USE_MPI
#define MPI_OK(call) CHECK((call) == MPI_SUCCESS, "rank %d: MPI failed: %s", comm.rank, #call)

// Looks again and again, first at once and then after short sleeps.
static inline void comm_finish_request(MPI_Request *request) {
    int done = 0;
    for (int looks = 0; !done; looks++) {
        MPI_OK(MPI_Test(request, &done, MPI_STATUS_IGNORE));
        if (done) break;
        if (looks < 20) sched_yield();
        else usleep(looks < 200 ? 50 : 200);
    }
}

// out = (or +=) the sum of the pieces in the order of ranks
static inline void comm_sum_pieces(grad_t *out, const grad_t *pieces, int ranks, size_t piece, bool add) {
    enum { BLOCK = 2048 };
    grad_t sum[BLOCK];
    for (size_t begin = 0; begin < piece; begin += BLOCK) {
        size_t n = min_size(BLOCK, piece - begin);
        memcpy(sum, pieces + begin, n * sizeof(grad_t));
        for (int r = 1; r < ranks; r++) {
            const grad_t *next = pieces + (size_t)r * piece + begin;
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

static inline void comm_do(const CommOp *op) {
    MPI_Request request;
    int count = (int)op->count;
    MPI_Datatype type = sizeof(grad_t) == sizeof(double) ? MPI_DOUBLE : MPI_FLOAT;
    switch (op->kind) {
    case COMM_REDUCE_SCATTER:
        MPI_OK(MPI_Ialltoall(op->buffer, count, type, comm.staging, count, type, MPI_COMM_WORLD, &request));
        comm_finish_request(&request);
        comm_sum_pieces(op->out, comm.staging, comm.ranks, op->count, op->add);
        return;
    case COMM_ALL_GATHER: MPI_OK(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, op->buffer, count, MPI_BYTE, MPI_COMM_WORLD, &request)); break;
    case COMM_GATHER: MPI_OK(MPI_Iallgather(op->mine, count, MPI_BYTE, op->buffer, count, MPI_BYTE, MPI_COMM_WORLD, &request)); break;
    case COMM_BROADCAST: MPI_OK(MPI_Ibcast(op->buffer, count, MPI_BYTE, 0, MPI_COMM_WORLD, &request)); break;
    }
    comm_finish_request(&request);
}

static inline void *comm_loop(void *unused) {
    (void)unused;
    pthread_mutex_lock(&comm.lock);
    for (;;) {
        while (comm.done == comm.begun && !comm.stop) pthread_cond_wait(&comm.changed, &comm.lock);
        if (comm.done == comm.begun) break;
        CommOp op = comm.queue[comm.done % COMM_QUEUE];
        pthread_mutex_unlock(&comm.lock);
        comm_do(&op);
        pthread_mutex_lock(&comm.lock);
        comm.done++;
        pthread_cond_broadcast(&comm.changed);
    }
    pthread_mutex_unlock(&comm.lock);
    return NULL;
}
#endif

static inline uint64_t comm_begin(CommKind kind, void *buffer, const void *mine, size_t count, grad_t *out, bool add) {
    assert(count <= INT_MAX);
    CommOp op = {kind, buffer, mine, count, out, add};
    pthread_mutex_lock(&comm.lock);
    while (comm.begun - comm.done == COMM_QUEUE) pthread_cond_wait(&comm.changed, &comm.lock);
    comm.queue[comm.begun++ % COMM_QUEUE] = op;
    uint64_t ticket = comm.begun;
    pthread_cond_broadcast(&comm.changed);
    pthread_mutex_unlock(&comm.lock);
    return ticket;
}

static inline void comm_wait(uint64_t ticket) {
    if (ticket == 0) return;
    pthread_mutex_lock(&comm.lock);
    if (comm.done < ticket) {
        double begin = now_seconds();
        watch_wait_begin();
        while (comm.done < ticket) pthread_cond_wait(&comm.changed, &comm.lock);
        watch_wait_end();
        comm.wait_seconds += now_seconds() - begin;
    }
    pthread_mutex_unlock(&comm.lock);
}

static inline uint64_t comm_reduce_scatter(grad_t *bucket, size_t piece, grad_t *out, bool add) {
    assert(comm.ranks > 1 && comm.staging_bytes >= (size_t)comm.ranks * piece * sizeof(grad_t));
    return comm_begin(COMM_REDUCE_SCATTER, bucket, NULL, piece, out, add);
}
static inline uint64_t comm_all_gather(void *bucket, size_t piece_bytes) { return comm_begin(COMM_ALL_GATHER, bucket, NULL, piece_bytes, NULL, false); }

static inline void comm_gather(void *all, const void *mine, size_t bytes) {
    if (comm.ranks == 1) memcpy(all, mine, bytes);
    else comm_wait(comm_begin(COMM_GATHER, all, mine, bytes, NULL, false));
}
static inline void comm_broadcast(void *data, size_t bytes) {
    if (comm.ranks > 1) comm_wait(comm_begin(COMM_BROADCAST, data, NULL, bytes, NULL, false));
}
static inline void comm_sum_f64(double *x, int count) {
    double *all = (double *)checked_calloc((size_t)comm.ranks * (size_t)count, sizeof(double));
    comm_gather(all, x, (size_t)count * sizeof(double));
    for (int i = 0; i < count; i++) {
        x[i] = all[i];
        for (int r = 1; r < comm.ranks; r++) x[i] += all[r * count + i];
    }
    free(all);
}
static inline void comm_barrier(void) {
    char none = 0, *all = (char *)checked_calloc((size_t)comm.ranks, 1);
    comm_gather(all, &none, 1);
    free(all);
}

static inline void comm_alloc(size_t bucket_bytes) {
    if (comm.ranks == 1) return;
    comm.staging_bytes = bucket_bytes;
    comm.staging = (grad_t *)buffer_alloc(bucket_bytes, "gradients of other ranks");
}

// What the library for many ranks takes in each of them, and its name (MPI's measured: tests/ranks.h).
static inline size_t comm_own_bytes(int ranks, const char **of) {
    *of = "MPI, about";
    return ranks > 1 ? (size_t)12 << 20 : 0;
}

static inline void comm_close(void) {
#ifdef USE_MPI
    if (!comm.on) return;
    watch_phase(PHASE_END);
    comm_barrier();
    pthread_mutex_lock(&comm.lock);
    comm.stop = true;
    pthread_cond_broadcast(&comm.changed);
    pthread_mutex_unlock(&comm.lock);
    pthread_join(comm.thread, NULL);
    buffer_free(comm.staging);
    comm.staging = NULL;
    comm.on = false;
    MPI_Finalize();
#endif
}

#ifdef USE_MPI
// exit() where all is well and main is not the way out: --help, say.
static inline void comm_leave(int status, void *unused) {
    (void)unused;
    if (status == EXIT_DONE) comm_close();
}

static inline void comm_start(int launched) {
    int provided = 0;
    MPI_Comm here;
    WatchAddress address;
    CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided) == MPI_SUCCESS && provided >= MPI_THREAD_SERIALIZED,
          "MPI cannot be called from a thread of its own (MPI_THREAD_SERIALIZED)");
    MPI_OK(MPI_Comm_rank(MPI_COMM_WORLD, &comm.rank));
    MPI_OK(MPI_Comm_size(MPI_COMM_WORLD, &comm.ranks));
    CHECK(comm.ranks == launched, "started as one of %d processes, but MPI knows of %d: with Slurm give srun --mpi=pmix (srun --mpi=list says what it has), or use this MPI's mpirun",
          launched, comm.ranks);
    MPI_OK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, comm.rank, MPI_INFO_NULL, &here));
    MPI_OK(MPI_Comm_size(here, &comm.ranks_here));
    MPI_OK(MPI_Comm_free(&here));
    if (comm.ranks == 1) return;
    memset(&address, 0, sizeof(address));
    if (comm.rank == 0) watch_listen(&address);
    MPI_OK(MPI_Bcast(&address, sizeof(address), MPI_BYTE, 0, MPI_COMM_WORLD));
    watch_open(comm.rank, comm.ranks, &address);
    thread_start(&comm.thread, comm_loop, NULL, "that speaks to other ranks");
    comm.on = true;
    CHECK(on_exit(comm_leave, NULL) == 0, "cannot register the end of the program"); // before the watchdog's: last in, first out
}
#endif

static inline void comm_open(void) {
    int launched = comm_launched();
#ifdef USE_MPI
    if (launched > 1) comm_start(launched);
#else
    CHECK(launched == 1, "started as one of %d processes, but this program was built without MPI and knows no others: scripts/install_deps.sh --with-mpi, then make",
          launched);
#endif
}

#endif
