/*
common.h: system headers, error handling and buffers, for every file of the project.

  system headers   are included only here, so that a test can include an operation twice, once inside a namespace
  CHECK            for errors that a user can cause: prints one line on stderr and exits with status 1
  assert           for bugs only. Assertions have no side effects and are enabled in every build: NDEBUG is an error
  buffers          the only access to memory that operations work on (device memory in the CUDA build): allocate,
                   free, zero, upload, download. download_alloc allocates the host side of large downloads

Valid as C11 and as C++17.
*/
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#ifdef NDEBUG
#error "assertions must stay enabled: do not define NDEBUG"
#endif

#include <assert.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <glob.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cblas.h>
#include <cjson/cJSON.h>
#ifdef ONEDNN
#include <dnnl.h>
#endif
#ifdef USE_MPI
#define OMPI_SKIP_MPICXX 1 // the C interface, also in C++
#include <mpi.h>
#endif
#include <xxhash.h>
#ifdef DEVICE_OPS
#include <cuda_runtime.h>
#define HOST_DEVICE static __host__ __device__ inline // begins a function that kernels, too, call
#else
#define HOST_DEVICE static inline
#endif

#include "fault_point.h"

#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a)))

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_SIGNALLED = 3 };

static const char *program_name = "diffv2"; // before each line on stderr

// Receives each warning of a process that is one of several ranks (watchdog.h). Returns true if this process must not
// print the line.
static bool (*warn_hook)(const char *line);

PRINTF_LIKE(1, 2)
static inline void warn(const char *fmt, ...) {
    char line[8192];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    if (!warn_hook || !warn_hook(line)) fprintf(stderr, "%s: %s\n", program_name, line);
}

// Called by program_exit, before anything else; it may end the process itself (watchdog.h).
static void (*exit_hook)(int status);

// The only way to end the program: main returns through it, and so does every failure. The first thread that calls it
// ends the program; other threads that call it meanwhile wait for that.
__attribute__((noreturn)) static inline void program_exit(int status) {
    static bool ending;
    static __thread bool ending_here;
    if (ending_here) _exit(status); // a failure of the hook
    ending_here = true;
    while (__atomic_exchange_n(&ending, true, __ATOMIC_SEQ_CST)) pause();
    if (exit_hook) exit_hook(status);
    exit(status);
}

// Called by a failing CHECK of the main thread after its line: removes incomplete files (files.h).
static void (*failure_hook)(void);

// Set when a signal is about to end the process: later failures are not reported.
static bool ended_by_signal;

// Set in a thread that works for the main thread: a failing CHECK stores its line here, [FAILURE_SIZE], and ends only
// the thread. The main thread then ends the program: exit() runs exit handlers of libraries that it may be using.
enum { FAILURE_SIZE = 8192 };
static __thread char *failure_line;

PRINTF_LIKE(1, 2)
__attribute__((noreturn)) static inline void check_failed(const char *fmt, ...) {
    char line[FAILURE_SIZE];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    if (failure_line) {
        memcpy(failure_line, line, sizeof(line));
        pthread_exit(NULL);
    }
    while (__atomic_load_n(&ended_by_signal, __ATOMIC_SEQ_CST)) pause();
    fflush(stdout);
    warn("%s", line);
    if (failure_hook) failure_hook();
    program_exit(EXIT_FAILED);
}

// Exits with one line if the condition is false. The line says what is wrong, the value, and what to do.
#define CHECK(cond, ...)                        \
    do {                                        \
        if (!(cond)) check_failed(__VA_ARGS__); \
    } while (0)

enum { STACK_LEAST = 1 << 20 }; // bytes, also of each thread that computes

// Called first in main. Opens stdin, stdout and stderr if they are closed: a file with their descriptor would receive
// the output. A write beyond the limit of a file's size (ulimit -f) fails with EFBIG instead of a signal.
static inline void program_begin(void) {
    struct rlimit stack;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        CHECK(fcntl(fd, F_GETFD) >= 0 || open("/dev/null", O_RDWR) == fd, "cannot open /dev/null: %s", strerror(errno));
    signal(SIGXFSZ, SIG_IGN);
    CHECK(getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= STACK_LEAST,
          "the stack is limited to %llu KiB, and %d KiB are required: raise it with ulimit -s",
          (unsigned long long)stack.rlim_cur >> 10, STACK_LEAST >> 10);
}

// The exit status of a program that has printed everything.
static inline int end_of_output(int status) {
    CHECK(fflush(stdout) == 0 && !ferror(stdout), "cannot write to stdout: %s", strerror(errno));
    return status;
}

// Discards the output on stdout from here on: ranks other than 0 call it, and a process whose reader has closed stdout.
static inline void stdout_discard(void) {
    CHECK(freopen("/dev/null", "w", stdout) != NULL, "cannot open /dev/null: %s", strerror(errno));
}

// Starts a thread in which all signals are blocked; the main thread and the thread of stop_signals.h handle them.
// `what` the thread does completes the error message.
static inline void thread_start(pthread_t *thread, void *(*run)(void *), void *argument, const char *what) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    CHECK(rc == 0, "cannot start the thread %s: %s", what, strerror(rc));
}

static inline double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Clears the sign of a NaN, which printf would print.
static inline double signless_nan(double x) { return isnan(x) ? (double)NAN : x; }

static inline size_t round_up(size_t x, size_t multiple) { return (x + multiple - 1) / multiple * multiple; }
static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }
// For qsort: sorts numbers in ascending order.
static inline int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Zeroed host memory for small objects; never NULL.
static inline void *checked_calloc(size_t count, size_t size) {
    void *p = calloc(count ? count : 1, size ? size : 1);
    CHECK(p != NULL, "out of host memory: cannot allocate %zu bytes", count * size);
    return p;
}

// Writes the end of the message when an allocation fails: the planned total and the options that need less memory.
static void (*memory_advice)(char *text, size_t size);
// True once an allocation has failed. Planning then queries no library, since a query may allocate memory itself.
static bool memory_is_short;
static inline void memory_advise(char *text, size_t size) {
    memory_is_short = true;
    if (memory_advice) memory_advice(text, size);
}

// Exits with an error. memory: which kind; bytes: requested bytes, 0 if only the library knows; room: available bytes.
static inline void out_of_memory(const char *memory, size_t bytes, const char *what, const char *room) {
    char advice[2048] = "reduce --batch-size or --seq-len", wanted[32] = "memory";
    memory_advise(advice, sizeof(advice));
    if (bytes) snprintf(wanted, sizeof(wanted), "%.1f MiB", (double)bytes / 1048576.0);
    CHECK(false, "out of %s: cannot allocate %s for %s%s; %s", memory, wanted, what, room, advice);
}

// snprintf into an array. Text that does not fit is a user's path that is too long, hence CHECK.
#define FORMAT(array, ...)                                                                                             \
    do {                                                                                                               \
        size_t format_length = snprintf((array), sizeof(array), __VA_ARGS__); /* -1: SIZE_MAX */                       \
        CHECK(format_length < sizeof(array), "a name is too long (limit %zu characters): %.80s...", sizeof(array) - 1, \
              (array));                                                                                                \
    } while (0)

#if !defined DEVICE_OPS && !defined RECORDED_OPS

// Zeroed memory for operations, aligned to a page. Pages are touched in parallel, so that step 1 has no page faults.
// Large buffers request huge pages, which reduces TLB misses between distant rows and speeds up the first touch.
// `what` names the buffer in the error message.
static inline void *buffer_alloc(size_t bytes, const char *what) {
    const size_t huge = 2 << 20, page = 4096;
    size_t alignment = bytes >= 4 * huge ? huge : page, size = round_up(max_size(bytes, 1), page);
    void *p = NULL;
    if (posix_memalign(&p, alignment, size) != 0) out_of_memory("memory", bytes, what, "");
#ifdef MADV_HUGEPAGE
    if (alignment == huge) madvise(p, size, MADV_HUGEPAGE); // failure costs speed only
#endif
    size_t parts = (size + alignment - 1) / alignment;
#pragma omp parallel for schedule(static)
    for (size_t part = 0; part < parts; part++)
        memset((char *)p + part * alignment, 0, min_size(alignment, size - part * alignment));
    return p;
}
static inline void buffer_free(void *p) { free(p); }
static inline void buffer_zero(void *p, size_t bytes) {
    size_t pages = (bytes + 4095) / 4096;
#pragma omp parallel for schedule(static)
    for (size_t page = 0; page < pages; page++) memset((char *)p + page * 4096, 0, min_size(4096, bytes - page * 4096));
}
static inline void buffer_upload(void *to, const void *host, size_t bytes) { memcpy(to, host, bytes); }
static inline void buffer_download(void *host, const void *from, size_t bytes) {
    const size_t piece = 1 << 20;
    size_t pieces = (bytes + piece - 1) / piece;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (size_t i = 0; i < pieces; i++)
        memcpy((char *)host + i * piece, (const char *)from + i * piece, min_size(piece, bytes - i * piece));
}
// Untouched host memory for downloads at full speed; NULL if there is too little.
static inline void *download_alloc(size_t bytes) { return malloc(max_size(bytes, 1)); }
static inline void download_free(void *p) { free(p); }

#endif
