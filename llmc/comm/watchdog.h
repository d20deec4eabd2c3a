// clang-format off
/*
watchdog.h: detection of ranks that have ended or hang, so that no rank waits for ever.

Collectives (comm.h) do not notice a peer that was killed, stopped or blocks in I/O: they wait. The ranks of a start
share a directory (comm_launch.h) of mode 0700, in which each keeps a file with its state. MPI and NCCL make the only
connections between ranks.

  void watch_begin(rank, start_limit, problem)
                                            before the ranks are connected: ends the program with the line `problem`
                                            if the connection takes longer than start_limit seconds
  void watch_open(path, rank, ranks)        the directory exists; writes this rank's file
  WatchState *watch_await_ranks(seconds)    rank 0: waits for the files of all ranks; [ranks], free()
  void watch_timeout(seconds)               sets the limit of waits; WATCH_TIMEOUT until it is called
  void watch_stage(stage), watch_step(n)    what this rank is doing, for error messages
  void watch_wait_begin(), watch_wait_end() around a wait for other ranks in collective number self.collectives
  void watch_device(collectives, waiting)   reports waits of a device, for which the host does not wait
  void watch_end_all(status, line)          ends this process, in any thread, and all other ranks; one of them prints
                                            the line
  watch_exit_hook                           called before the watchdog ends the process; takes at most about a second

  N           file of rank N: host, step, stage, collectives, wait, and a counter that rises with each write. Its
              process holds a lock (flock) on it
  neighbor    A thread of each rank tries the lock of the next rank's file, which the system releases when that process
              ends for any reason. Unless the file states an exit status, the process was killed.
  wait        A rank that has waited longer than the limit reads all files twice. A counter that has not risen belongs
              to a rank that is stopped or whose machine has failed. Otherwise the rank with the fewest collectives
              is the rank that hangs. Clocks of two machines are never compared.
  report      Only the first rank that creates `report` prints its line; it then creates `failed`, which ends the other
              ranks. The launcher ends ranks that do not see it.
  timer       A second thread never touches files: it ends the process when the first is blocked in a file system.
  failure     A rank that fails creates `line.HASH` for each of its lines, and prints those that it was the first to
              create: a wrong option gives one line for a thousand ranks. The other ranks end with its status.
  warnings    Rank 0 prints its warnings. Another rank's warnings are printed only if that rank fails afterwards.
  end         Rank 0 removes the directory; after a failure the other ranks end later. The directory remains if
              processes were killed, as a record of their last states.
  source      PyTorch's flight recorder: compare the numbers of collectives, name the ranks that have fewer; a monitor
              of the watchdog's own thread. NCCL: query asynchronous errors and abort the communicator
              (comm_nccl_watch.cuh). llm.c: NCCL's id in a file (comm_launch.h).

Without locks in the file system (NFS 2 and 3 without lockd, some settings of Lustre), a killed rank is found only by
the limit of waits. With one rank the watchdog does nothing, and no thread is started.
*/
// clang-format on
#pragma once
#include "../base/files.h"

// What a rank is doing: constant, short name, description in messages.
// clang-format off
#define STAGES(STAGE)                                             \
    STAGE(STAGE_START, "start", "starting")                       \
    STAGE(STAGE_DATA, "data", "reading data")                     \
    STAGE(STAGE_FORWARD, "forward", "in the forward")             \
    STAGE(STAGE_BACKWARD, "backward", "in the backward")          \
    STAGE(STAGE_GRADIENTS, "gradients", "reducing gradients")     \
    STAGE(STAGE_UPDATE, "update", "updating weights")             \
    STAGE(STAGE_PARAMETERS, "parameters", "gathering parameters") \
    STAGE(STAGE_VALIDATION, "validation", "validating")           \
    STAGE(STAGE_CHECK, "check", "comparing ranks")                \
    STAGE(STAGE_SAVE, "save", "saving a checkpoint")              \
    STAGE(STAGE_LOG, "log", "writing the log")                    \
    STAGE(STAGE_END, "end", "ending")
// clang-format on
#define STAGE_CONSTANT(constant, name, description) constant,
#define STAGE_ROW(constant, name, description) {name, description},
typedef enum { STAGES(STAGE_CONSTANT) STAGE_COUNT } Stage;
static const struct { const char *name, *description; } watch_stages[STAGE_COUNT] = {STAGES(STAGE_ROW)};
#undef STAGE_CONSTANT
#undef STAGE_ROW

enum { WATCH_HOST = 64, WATCH_TEXT = 6000, WATCH_LINES = 64, WATCH_BYTES = 400 };
static const double WATCH_TIMEOUT = 600, WATCH_GRACE = 0.3; // seconds; WATCH_GRACE: rank 0 prints first
#ifndef WATCH_SPARE // seconds after the limit in which files must answer; fewer in tests
#define WATCH_SPARE 15
#endif

typedef struct {
    uint64_t counter, collectives, device; // device: unique id of the rank's device; 0: none
    int64_t step;
    double waiting;    // seconds in the current wait; 0: it does not wait
    int stage, status; // status: -1 until the rank ends
    int locked;        // its process holds the lock of the file
    char host[WATCH_HOST];
} WatchState;

static struct {
    bool ending, reports; // main has begun to end; this rank has created `report`
    int rank, ranks;
    int dir, file;    // descriptors; -1: not open. file: this rank's file, which is locked
    bool made_parent; // this process has created the parent of the directory
    const char *problem;
    double timeout, wait_begin; // wait_begin: 0: does not wait
    WatchState self;            // all but `waiting`
    char path[PATH_SIZE];
    uint64_t printed[WATCH_LINES]; // hashes of the lines of rank 0
    int printed_count;
    char pending[WATCH_TEXT]; // lines of another rank, in case it fails
    pthread_mutex_t lock;     // protects the lines and this rank's file
} watch = {false,
           false,
           0,
           1,
           -1,
           -1,
           false,
           NULL,
           0,
           0,
           {0, 0, 0, 0, 0, 0, -1, 0, ""},
           "",
           {0},
           0,
           "",
           PTHREAD_MUTEX_INITIALIZER};
static void (*watch_exit_hook)(void);

#define WATCH_SET(field, value) __atomic_store_n(&watch.field, (value), __ATOMIC_RELAXED)
#define WATCH_GET(field) __atomic_load_n(&watch.field, __ATOMIC_RELAXED)
static inline void watch_stage(Stage stage) {
    WATCH_SET(self.stage, (int)stage);
    fault_point(FAULT_STAGE, NULL, (size_t)stage);
}
static inline void watch_step(int64_t step) { WATCH_SET(self.step, step); }
static inline void watch_set_wait(double since) { __atomic_store(&watch.wait_begin, &since, __ATOMIC_RELAXED); }
static inline double watch_wait_start(void) { // __atomic_load_n does not support doubles
    double t;
    __atomic_load(&watch.wait_begin, &t, __ATOMIC_RELAXED);
    return t;
}
static inline double watch_waited(void) {
    double begin = watch_wait_start();
    return begin > 0 ? now_seconds() - begin : 0;
}
static inline void watch_wait_begin(void) { watch_set_wait(now_seconds()); }
static inline void watch_wait_end(void) { watch_set_wait(0); }
// Reports the progress of a device, which runs asynchronously: the collectives that it has reached, and whether it
// waits.
static inline void watch_device(uint64_t collectives, bool waiting) {
    WATCH_SET(self.collectives, collectives);
    watch_set_wait(waiting ? now_seconds() : 0);
}
static inline void watch_timeout(double seconds) { __atomic_store(&watch.timeout, &seconds, __ATOMIC_RELAXED); }
static inline double watch_limit(void) {
    double t;
    __atomic_load(&watch.timeout, &t, __ATOMIC_RELAXED);
    return t;
}
// Seconds between two writes of a state: a thousand ranks write 250 files per second.
static inline double watch_beat(void) {
    return fmin(fmin(4, fmax(0.2, watch.ranks / 250.0)), fmax(0.02, watch_limit() / 8));
}

// ---- files

static inline void watch_clean_host(char *host) {
    for (; *host; host++)
        if (!isascii((unsigned char)*host) || !isgraph((unsigned char)*host)) *host = '?';
}

#define WATCH_FORMAT(u64, i64, x64, text, name)                                                           \
    "%" u64 " host %" text " step %" i64 " phase %" name " collectives %" u64 " waiting %lf device %" x64 \
    " locked %d status %d counter %" u64

// The counter is at both ends, so that a text with an outdated part is not used.
static inline bool watch_parse(const char *text, WatchState *s) {
    char stage[16];
    uint64_t counter = 0;
    int found = sscanf(text, WATCH_FORMAT(SCNu64, SCNd64, SCNx64, "63s", "15s"), &s->counter, s->host, &s->step, stage,
                       &s->collectives, &s->waiting, &s->device, &s->locked, &s->status, &counter);
    s->stage = STAGE_COUNT;
    for (int i = 0; found == 10 && i < STAGE_COUNT; i++)
        if (strcmp(stage, watch_stages[i].name) == 0) s->stage = i;
    watch_clean_host(s->host);
    return found == 10 && counter == s->counter && s->stage < STAGE_COUNT && s->step >= 0 && s->waiting >= 0 &&
           s->waiting < 1e9 && s->status >= -1 && s->status <= 255;
}

// Writes this rank's state, and the time for a person who reads it. Other machines
// of a network file system see the write if `fd` was opened for it and is closed afterwards.
static inline bool watch_write(int fd) {
    char text[WATCH_BYTES];
    pthread_mutex_lock(&watch.lock);
    WatchState *s = &watch.self;
    s->counter++;
    int n =
        snprintf(text, sizeof(text), WATCH_FORMAT(PRIu64, PRId64, PRIx64, "s", "s") " time %lld", s->counter, s->host,
                 WATCH_GET(self.step), watch_stages[WATCH_GET(self.stage)].name, WATCH_GET(self.collectives),
                 watch_waited(), s->device, s->locked, s->status, s->counter, (long long)time(NULL));
    assert(n < WATCH_BYTES);
    memset(text + n, ' ', (size_t)(WATCH_BYTES - n)); // over the rest of a longer text
    text[WATCH_BYTES - 1] = '\n';
    bool done = pwrite(fd, text, sizeof(text), 0) == (ssize_t)sizeof(text);
    pthread_mutex_unlock(&watch.lock);
    return done;
}

static inline int watch_open_state(int rank, int flags) {
    char name[24];
    FORMAT(name, "%d", rank);
    return openat(watch.dir, name, flags | O_CLOEXEC | O_NOFOLLOW);
}

static inline bool watch_read(int fd, WatchState *s) {
    char text[WATCH_BYTES];
    memset(s, 0, sizeof(*s));
    ssize_t n = fd >= 0 ? pread(fd, text, sizeof(text), 0) : -1;
    text[WATCH_BYTES - 1] = 0;
    return n == WATCH_BYTES && watch_parse(text, s);
}

static inline bool watch_read_rank(int rank, WatchState *s) {
    int fd = watch_open_state(rank, O_RDONLY);
    bool read = watch_read(fd, s);
    if (fd >= 0) close(fd);
    return read;
}

// Creates a name in the directory, with a text. False if another rank has; true if the file system cannot tell, so that
// no line is lost.
static inline bool watch_claim(const char *name, const char *text) {
    return symlinkat(text, watch.dir, name) == 0 || errno != EEXIST;
}
static inline bool watch_claim_line(const char *line) {
    char name[40];
    FORMAT(name, "line.%016" PRIx64, (uint64_t)XXH3_64bits(line, strlen(line)));
    return watch_claim(name, "-");
}

// ---- the end of this process

static inline void watch_remove(void) {
    char parent[PATH_SIZE];
    if (!directory_remove(watch.path) || !watch.made_parent) return;
    directory_of(watch.path, parent, sizeof(parent));
    rmdir(parent); // if it is empty
}
static inline bool watch_is_removed(void) {
    struct stat st;
    return fstat(watch.file, &st) == 0 && st.st_nlink == 0;
}

// Whether the other ranks that have started have ended. *absent: ranks that have not started.
static inline bool watch_others_have_ended(int *absent) {
    *absent = 0;
    for (int r = 0; r < watch.ranks; r++) {
        WatchState s;
        int fd = r == watch.rank ? -1 : watch_open_state(r, O_RDONLY);
        bool ended = fd < 0 || !watch_read(fd, &s) || s.status >= 0 || flock(fd, LOCK_SH | LOCK_NB) == 0;
        if (fd >= 0) close(fd);
        else *absent += r != watch.rank;
        if (!ended) return false;
    }
    return true;
}

// The launcher kills the other processes when one has failed, so rank 0 removes the directory first. The lock shows
// that rank 0 has ended, even after it has removed its file.
static inline void watch_await_rank_0(void) {
    int fd = -1;
    for (double until = now_seconds() + 1 + watch_beat(); now_seconds() < until; usleep(20000)) {
        if (fd < 0) fd = watch_open_state(0, O_RDONLY);
        if (fd < 0 && watch_is_removed()) return;
        if (fd >= 0 && (flock(fd, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK)) return;
    }
}

// States the exit status. in_order: all ranks end by themselves. Else the directory is removed if all others end within
// a second; ranks that start late have this time to find it.
static inline void watch_finish(int status, bool in_order) {
    bool ended = in_order;
    int absent = !in_order;
    watch.self.status = status & 0xFF; // as the system does
    watch_write(watch.file);           // even if the directory is gone
    if (watch.rank != 0 && !in_order && !watch.reports) watch_await_rank_0();
    if (watch.rank != 0 && (in_order || !watch.reports)) return;
    for (double until = now_seconds() + 1; (!ended || absent) && now_seconds() < until; usleep(20000)) {
        ended = watch_others_have_ended(&absent);
        if (watch_is_removed()) break;
    }
    if (ended) watch_remove();
}

__attribute__((noreturn)) static inline void watch_exit(int status) {
    static bool ending;
    while (__atomic_exchange_n(&ending, true, __ATOMIC_SEQ_CST)) pause();
    signal(SIGTERM, SIG_IGN); // the launcher sends it to all ranks when one has ended
    if (watch_exit_hook) watch_exit_hook();
    watch_finish(status, false);
    _exit(status);
}

// Ends this process if another rank has failed.
static inline void watch_follow(void) {
    char status[8] = "";
    if (readlinkat(watch.dir, "failed", status, sizeof(status) - 1) <= 0 || WATCH_GET(ending)) return;
    watch_exit(atoi(status) > 0 && atoi(status) <= 255 ? atoi(status) : EXIT_FAILED);
}

// Includes this rank's step, which is more recent than the last state of a failed rank; ranks run in step.
__attribute__((noreturn)) static inline void watch_report(int rank, const WatchState *s, const char *what,
                                                          const char *more) {
    fprintf(stderr,
            "diffv2: rank %d (%s) %s; last state at step %" PRId64 ", %s; rank %d is at step %" PRId64
            ", %s%s; all ranks exit; --resume continues from the newest checkpoint\n",
            rank, s->host[0] ? s->host : "?", what, s->step, watch_stages[s->stage].description, watch.rank,
            WATCH_GET(self.step), watch_stages[WATCH_GET(self.stage)].description, more);
    watch_claim("failed", "1");
    watch_exit(EXIT_FAILED);
}

static inline bool watch_may_report(void) {
    watch_follow();
    watch.reports = !WATCH_GET(ending) && watch_claim("report", "-");
    return watch.reports;
}

__attribute__((noreturn)) static inline void watch_end_all(int status, const char *line) {
    char text[12];
    bool open = WATCH_GET(dir) >= 0;
    FORMAT(text, "%d", status & 0xFF);
    if (!open || watch_may_report()) fprintf(stderr, "diffv2: %s\n", line);
    if (!open) _exit(status);
    watch_claim("failed", text);
    watch_exit(status);
}

// ---- threads

static inline void *watch_neighbor_thread(void *unused) {
    (void)unused;
    int fd, next = (watch.rank + 1) % watch.ranks;
    WatchState s;
    while ((fd = watch_open_state(next, O_RDONLY)) < 0) usleep(50000);
    bool killed = watch_read(fd, &s) && s.locked;
    // not a blocking call, which NFS 4 repeats only every 30 s
    while (killed && flock(fd, LOCK_SH | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) killed = false; // no locks here
        usleep((useconds_t)(1e6 * fmin(0.5, watch_beat())));
    }
    killed = killed && watch_read(fd, &s) && s.status < 0;
    close(fd);
    if (killed && watch_may_report()) watch_report(next, &s, "has ended without a message (killed?)", "");
    return NULL;
}

// Names the rank for which the others wait: its counter does not rise, or it has the fewest collectives.
static inline void watch_report_wait(double waited) {
    WatchState *first = (WatchState *)checked_calloc(watch.ranks, sizeof(WatchState)),
               *last = (WatchState *)checked_calloc(watch.ranks, sizeof(WatchState));
    int slowest = watch.rank, count = 0, length = 0;
    char what[120], more[200] = "";
    for (int r = 0; r < watch.ranks; r++) watch_read_rank(r, &first[r]);
    usleep((useconds_t)(3e6 * watch_beat()));
    for (int r = 0; r < watch.ranks; r++)
        if (!watch_read_rank(r, &last[r])) last[r] = first[r];
    last[watch.rank].counter++; // this thread does not write now
    last[watch.rank].waiting = waited, last[watch.rank].collectives = WATCH_GET(self.collectives);
#define WATCH_STUCK(r) (last[r].counter == first[r].counter)
#define WATCH_AS_LATE(r)                                                                           \
    (WATCH_STUCK(r) == WATCH_STUCK(slowest) && last[r].collectives == last[slowest].collectives && \
     (last[r].waiting > 0) == (last[slowest].waiting > 0))
    for (int r = 0; r < watch.ranks; r++) {
        bool behind = last[r].collectives != last[slowest].collectives
                          ? last[r].collectives < last[slowest].collectives
                          : last[r].waiting == 0 && last[slowest].waiting > 0;
        if (WATCH_STUCK(r) != WATCH_STUCK(slowest) ? WATCH_STUCK(r) : behind) slowest = r;
    }
    for (int r = 0; r < watch.ranks && length < 150; r++)
        if (r != slowest && WATCH_AS_LATE(r) && last[slowest].waiting == 0)
            length +=
                snprintf(more + length, sizeof(more) - (size_t)length, count++ ? ", %d" : "; as late: rank %d", r);
    if (length >= 150) snprintf(more + length, sizeof(more) - (size_t)length, ", ...");
    FORMAT(what, "%s %.0f s",
           WATCH_STUCK(slowest)          ? "has been unresponsive while other ranks have waited for"
           : last[slowest].waiting > 0.1 ? "waits like the other ranks, and no message has arrived for"
                                         : "has not reached the collective in which other ranks have waited for",
           waited);
    watch_report(slowest, &last[slowest], what, more);
}

static inline void *watch_files_thread(void *unused) {
    (void)unused;
    for (;;) {
        int fd = watch_open_state(watch.rank, O_WRONLY);
        if (fd >= 0) watch_write(fd), close(fd);
        watch_follow();
        for (double until = now_seconds() + watch_beat(); now_seconds() < until; usleep(10000)) {
            double waited = watch_waited();
            if (waited > watch_limit() && watch_may_report()) watch_report_wait(waited);
        }
    }
    return NULL;
}

static inline void *watch_timer_thread(void *unused) {
    (void)unused;
    for (double before = now_seconds(), now;; before = now) {
        usleep(20000);
        now = now_seconds();
        double limit = watch_limit(), waited = watch_waited();
        // this process, or the whole job, was stopped for a while
        if (now - before > fmax(0.5, limit / 4) && waited > 0) watch_wait_begin();
        bool open = WATCH_GET(dir) >= 0;
        // rank 0 first: its exit makes the launcher end the other ranks
        if (watch_waited() < limit + (open ? WATCH_SPARE + 5 * watch_beat() : 0) + (watch.rank == 0 ? 0 : 5)) continue;
        if (!open) fprintf(stderr, "diffv2: rank %d: %s\n", watch.rank, watch.problem);
        else
            fprintf(stderr,
                    "diffv2: rank %d (%s) has waited for other ranks for %.0f s at step %" PRId64
                    ", %s, and %s does not answer\n",
                    watch.rank, watch.self.host, waited, WATCH_GET(self.step),
                    watch_stages[WATCH_GET(self.stage)].description, watch.path);
        if (watch_exit_hook) watch_exit_hook();
        _exit(EXIT_FAILED);
    }
    return NULL;
}

// ---- lines, begin and end

// The warn hook (common.h). Returns true if the line must not be printed now.
static inline bool watch_record_line(const char *line) {
    if (watch.rank == 0) {
        uint64_t hash = XXH3_64bits(line, strlen(line));
        for (int i = 0; i < watch.printed_count; i++)
            if (watch.printed[i] == hash) return false;
        if (watch.printed_count < WATCH_LINES) watch.printed[watch.printed_count++] = hash;
        return !watch_claim_line(line);
    }
    pthread_mutex_lock(&watch.lock);
    size_t have = strlen(watch.pending), length = min_size(strlen(line), WATCH_TEXT - 2);
    if (have + length + 2 > WATCH_TEXT) have = 0; // keep the last lines
    memcpy(watch.pending + have, line, length);
    memcpy(watch.pending + have + length, "\n", 2);
    pthread_mutex_unlock(&watch.lock);
    return true;
}

static inline void watch_print_pending(int status) {
    if (!watch.pending[0])
        fprintf(stderr, "diffv2: rank %d (%s) ended with status %d, step %" PRId64 ", %s\n", watch.rank,
                watch.self.host, status, watch.self.step, watch_stages[watch.self.stage].description);
    for (char *line = watch.pending, *end; *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = 0;
        if (watch_claim_line(line)) fprintf(stderr, "diffv2: rank %d (%s): %s\n", watch.rank, watch.self.host, line);
    }
}

// The exit hook (common.h).
static inline void watch_on_exit(int status) {
    char text[12];
    WATCH_SET(ending, true);
    fflush(NULL);
    if (status == EXIT_DONE || status == EXIT_SIGNALLED) {
        watch_finish(status, true);
        return;
    }
    signal(SIGTERM, SIG_IGN); // as in watch_exit
    watch_wait_begin();       // the timer also ends this wait
    usleep((useconds_t)(1e6 * WATCH_GRACE));
    if (watch.rank != 0) watch_print_pending(status & 0xFF);
    FORMAT(text, "%d", status & 0xFF);
    watch_claim("failed", text);
    watch_exit(status);
}

static inline void watch_begin(int rank, double start_limit, const char *problem) {
    pthread_t timer;
    watch.rank = rank, watch.problem = problem;
    gethostname(watch.self.host, WATCH_HOST - 1);
    watch_clean_host(watch.self.host);
    watch_timeout(start_limit);
    watch_wait_begin();
    thread_start(&timer, watch_timer_thread, NULL, "that limits waits");
}

static inline void watch_open(const char *path, int rank, int ranks) {
    char name[24], made[32];
    pthread_t files, neighbor;
    FORMAT(watch.path, "%s", path);
    FORMAT(name, "%d", rank);
    FORMAT(made, "%d.new", rank);
    int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(dir >= 0, "cannot open %s: %s", path, strerror(errno));
    watch.file = openat(dir, made, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    CHECK(watch.file >= 0 ? faccessat(dir, name, F_OK, 0) != 0 : errno != EEXIST,
          "rank %d has already started: start each rank once", rank);
    watch.self.locked = flock(watch.file, LOCK_EX | LOCK_NB) == 0;
    CHECK(watch_write(watch.file) && renameat(dir, made, dir, name) == 0, "cannot write %s/%s: %s", path, name,
          strerror(errno));
    watch.rank = rank, watch.ranks = ranks;
    watch_timeout(WATCH_TIMEOUT);
    watch_set_wait(0);
    WATCH_SET(dir, dir);
    warn_hook = watch_record_line;
    exit_hook = watch_on_exit;
    thread_start(&files, watch_files_thread, NULL, "that writes the state of this rank");
    thread_start(&neighbor, watch_neighbor_thread, NULL, "that waits for the end of another rank");
}

static inline WatchState *watch_await_ranks(double seconds) {
    WatchState *states = (WatchState *)checked_calloc(watch.ranks, sizeof(WatchState));
    double until = now_seconds() + seconds;
    for (int first = 0; first < watch.ranks;) {
        int missing = 0;
        if (watch_read_rank(first, &states[first])) {
            first++;
            continue;
        }
        for (int r = first; now_seconds() > until && r < watch.ranks; r++) missing += !watch_read_rank(r, &states[r]);
        CHECK(missing == 0, "%d of %d ranks (the first is rank %d) have not started within %.0f s (--start-timeout)",
              missing, watch.ranks, first, seconds);
        usleep(10000);
    }
    return states;
}
