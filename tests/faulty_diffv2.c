/*
faulty_diffv2.c: the trainer, with faults that are caused on purpose, for the tests of many ranks (tests/ranks.h).

  FAULT=KIND:RANK:STEP[:WHERE]    those of planned_faults.h, and
    kill, stop   also at `write`, in the middle of a file of this step's checkpoint
    nan          a gradient of this step that is not a number
    spike        a large gradient of this step
    flip         one bit of the last weight of a tensor, after the update
    broken       that weight is not a number
    signal       a SIGTERM that arrives just before this step asks for the WHEREth time (1, 2, ...) whether one has
  BUSY=TEXT      directories that cannot be removed, see busy_directory.h
  SLOW=MS        the first tensor of a file of a checkpoint takes so many milliseconds longer to write
  SCARCE=RANK    this rank gets no memory for a copy of the state
  BUCKET=N       elements of a bucket
  LATE=MS        what other ranks send arrives so many milliseconds later
  PEAK=FILE      each rank appends its largest resident size in KiB at the end

Pieces of work are small, so that a tiny model has several of each (small_sizes.h); here also the buckets of a group and
the parts of a file that have checksums of their own. The queue of operations (COMM_QUEUE) has room for the
buckets of three layers: were it shorter, beginning an operation would wait for late data in the trainer's place.
*/
#include "small_sizes.h"
#define BUCKET_ELEMENTS faulty_bucket_elements
#define CHECKSUM_CHUNK 5000
#include "../llmc/base/common.h"
static size_t faulty_bucket_elements(int ranks) {
    (void)ranks;
    return getenv("BUCKET") ? (size_t)atoi(getenv("BUCKET")) : 3000;
}
#include "../llmc/ops/all_ops.h"
#ifdef USE_MPI
static void arrive_late(void) {
    if (getenv("LATE")) usleep((useconds_t)(1000 * atoi(getenv("LATE"))));
}
static int late_allgather(const void *mine, int count, MPI_Datatype type, void *all, int all_count,
                          MPI_Datatype all_type, MPI_Comm ranks, MPI_Request *request) {
    if (mine == MPI_IN_PLACE) arrive_late(); // parameters or gradients
    return MPI_Iallgather(mine, count, type, all, all_count, all_type, ranks, request);
}
static int late_alltoall(const void *mine, int count, MPI_Datatype type, void *all, int all_count,
                         MPI_Datatype all_type, MPI_Comm ranks, MPI_Request *request) {
    arrive_late();
    return MPI_Ialltoall(mine, count, type, all, all_count, all_type, ranks, request);
}
#define MPI_Iallgather late_allgather
#define MPI_Ialltoall late_alltoall
#endif
#include "../llmc/comm/comm.h"
#include "busy_directory.h"
#include "../llmc/base/files.h"
#include "../llmc/run/stop_signals.h"
#include "planned_faults.h"
#include <sys/resource.h>

static void faulty_pwrite(int fd, const void *from, size_t bytes, uint64_t offset, const char *path) {
    static __thread int slow_fd = -1;
    const char *of_step = strstr(path, "step_");
    if (getenv("SLOW") && slow_fd != fd) usleep((useconds_t)(1000 * atoi(getenv("SLOW"))));
    slow_fd = fd;
    file_pwrite(fd, from, bytes / 2, offset, path);
    if (of_step) fault_at(strtoll(of_step + 5, NULL, 10), "write");
    file_pwrite(fd, (const char *)from + bytes / 2, bytes - bytes / 2, offset + bytes / 2, path);
}

static void *scarce_alloc(size_t bytes) {
    bool scarce = getenv("SCARCE") && atoi(getenv("SCARCE")) == watch.rank;
    return scarce ? NULL : download_alloc(bytes);
}

static void faulty_embedding_backward(grad_t *dweight, const floatX *dx, const int *tokens, int N, int C) {
    embedding_backward(dweight, dx, tokens, N, C);
    if (fault_is("nan", NULL)) dweight[0] = (grad_t)NAN;
    if (fault_is("spike", NULL)) dweight[0] = (grad_t)1e4;
}

static void faulty_adamw(floatX *params, real *master, const grad_t *grads, real *m, real *v, size_t count,
                         double grad_scale, double lr, double beta1, double beta2, double eps, double weight_decay,
                         int64_t step) {
    static int64_t changed;
    adamw_update(params, master, grads, m, v, count, grad_scale, lr, beta1, beta2, eps, weight_decay, step);
    bool broken = fault_is("broken", NULL);
    if (changed || !(broken || fault_is("flip", NULL))) return;
    changed = step;
    if (broken) params[count - 1] = (floatX)NAN;
    else ((unsigned char *)(params + count - 1))[2] ^= 0x10; // high enough that no later rounding hides it
}

static int faulty_stop_signal(void) {
    static int64_t step, asked;
    char where[24];
    asked = step == WATCH_GET(step) ? asked + 1 : 1;
    step = WATCH_GET(step);
    FORMAT(where, "%" PRId64, asked);
    if (fault_is("signal", where)) stop_signal = SIGTERM;
    return stop_signal;
}

static void faulty_end(void) {
    struct rusage usage;
    if (!getenv("PEAK") || getrusage(RUSAGE_SELF, &usage) != 0) return;
    FILE *f = fopen(getenv("PEAK"), "a");
    if (!f) return;
    fprintf(f, "%ld\n", usage.ru_maxrss);
    fclose(f);
}

#define watch_phase faulty_phase
#define file_pwrite faulty_pwrite
#define download_alloc scarce_alloc
#define embedding_backward faulty_embedding_backward
#define adamw_update faulty_adamw
#define stop_signal faulty_stop_signal()
#define main trainer_main
#include "../train_diffv2.c"
#undef main

int main(int argc, char **argv) {
    atexit(faulty_end);
    return trainer_main(argc, argv);
}
