// clang-format off
/*
comm_nccl_watch.cuh: the state of comm_nccl.cuh, and its error handling. By itself NCCL waits for ever for a failed
rank.

A thread queries the events for the progress of this device and passes it to the watchdog: the collectives that the
device has reached, and since when it has been in an unfinished one. The state of a rank then shows for which rank
the others wait, even if a host is blocked in a CUDA call, or in an NCCL call: the first call between two ranks
connects them, which requires both. The thread also queries NCCL's asynchronous errors. The communicator is aborted
before the program ends.
*/
// clang-format on
#pragma once
#include "../cuda/kernel_utils.cuh"
#include "comm_launch.h"
#include <nccl.h>

#ifndef NCCL_HOST_BYTES // a rank's part of host collectives; next, the lengths of two rings; smaller in tests
#define NCCL_HOST_BYTES (16 << 10)
#define NCCL_EVENTS 2048
#define NCCL_WAITS 512
#endif

static struct {
    int device;
    ncclUniqueId id;
    // all ranks, NULL until the first collective; this group; the ranks with this place in their groups, or NULL
    ncclComm_t handle, group, across;
    cudaStream_t stream;
    // events of collective n in slot n % NCCL_EVENTS: main_stream has reached it; it has ended
    cudaEvent_t come[NCCL_EVENTS], end[NCCL_EVENTS];
    uint64_t begun, awaited;        // the latest collective, and the latest that main_stream waits for
    uint64_t come_count, end_count; // as the thread has seen them
    cudaEvent_t wait_begin[NCCL_WAITS], wait_end[NCCL_WAITS];
    uint64_t waits, waits_read; // waits of main_stream, and how many durations were added up
    char *host, *memory;        // pinned and device memory: [1+ranks][NCCL_HOST_BYTES]
    grad_t *received;           // [piece]: --zero 2 and 3
    size_t received_bytes;
    size_t device_bytes;         // device memory that NCCL uses
    bool measured;               // device_bytes includes all connections
    bool inside, stop;           // the main thread is in an NCCL call; the thread must end
    uint64_t calls, calls_count; // calls of the main thread, and the number that the thread has seen
    pthread_t thread;
} nccl;

#define NCCL_SET(field, value) __atomic_store_n(&nccl.field, (value), __ATOMIC_SEQ_CST)
#define NCCL_GET(field) __atomic_load_n(&nccl.field, __ATOMIC_SEQ_CST)

// ---- errors

// A failed peer causes an error here too. Waits so that the watchdog, which knows the rank and its step, reports it
// first.
static inline void nccl_failed(const char *call, ncclResult_t status) {
    for (double until = now_seconds() + 3;
         now_seconds() < until && status != ncclInvalidArgument && status != ncclInvalidUsage;)
        usleep(10000);
    const char *text = ncclGetLastError(nccl.handle); // also valid without a communicator
    char more[400];
    snprintf(more, sizeof(more), "%s", text ? text : "");
    for (char *c = more; *c; c++) *c = iscntrl((unsigned char)*c) ? ' ' : *c; // the text ends with a newline
    if (strstr(more, "out of memory")) out_of_device_memory(0, "NCCL");
    CHECK(false, "NCCL failed: %s (%s)%s%s; NCCL_DEBUG=WARN prints details", ncclGetErrorString(status), call,
          *more ? ": " : "", more);
}

static inline bool nccl_ending(void) { return __atomic_load_n(&device_ending, __ATOMIC_SEQ_CST); }

static inline void nccl_call_begin(void) {
    NCCL_SET(inside, true);
    NCCL_SET(calls, nccl.calls + 1);
    if (nccl_ending()) NCCL_SET(inside, false);
    device_wait_if_ending();
}
static inline void nccl_call_end(const char *call, ncclResult_t status) {
    NCCL_SET(inside, false);
    device_wait_if_ending();
    if (status != ncclSuccess) nccl_failed(call, status);
}
// Around the main thread's calls. While the program ends, device_wait_if_ending does not return.
#define NCCL_CHECK(call)              \
    do {                              \
        nccl_call_begin();            \
        nccl_call_end(#call, (call)); \
    } while (0)

// The communicators of this rank; returns their number.
static inline int nccl_handles(ncclComm_t handles[3]) {
    handles[0] = nccl.handle, handles[1] = nccl.group, handles[2] = nccl.across;
    return NCCL_GET(across) ? 3 : 1;
}

static inline void *nccl_abort(void *done) {
    ncclComm_t handles[3];
    for (int i = nccl_handles(handles) - 1; i >= 0; i--) ncclCommAbort(handles[i]); // the program ends in any case
    __atomic_store_n((bool *)done, true, __ATOMIC_SEQ_CST);
    return NULL;
}

// The watchdog's exit hook. Aborting ends collectives that would block the device; the abort itself may hang. It must
// not run concurrently with an NCCL call of the main thread, which normally returns soon.
static inline void nccl_abort_at_exit(void) {
    static bool done;
    pthread_t thread;
    __atomic_store_n(&device_ending, true, __ATOMIC_SEQ_CST);
    for (double until = now_seconds() + 0.5; now_seconds() < until && NCCL_GET(inside);) usleep(1000);
    if (NCCL_GET(inside) || !nccl.handle || pthread_create(&thread, NULL, nccl_abort, &done)) return;
    for (double until = now_seconds() + 1; now_seconds() < until && !__atomic_load_n(&done, __ATOMIC_SEQ_CST);)
        usleep(1000);
}

// ---- progress of the device

static inline bool nccl_event_done(cudaEvent_t event) {
    cudaError_t status = cudaEventQuery(event);
    if (status != cudaSuccess)
        cudaGetLastError(); // "not ready" is stored like an error; a true error is reported again, to the main thread
    return status == cudaSuccess;
}

static inline void nccl_update_progress(void) {
    // if a call below never returns, the device is stuck, which counts as waiting
    if (watch_wait_start() <= 0) watch_wait_begin();
    uint64_t come = nccl.come_count, end = nccl.end_count, begun = NCCL_GET(begun);
    while (nccl.end_count < begun && nccl_event_done(nccl.end[(nccl.end_count + 1) % NCCL_EVENTS])) nccl.end_count++;
    nccl.come_count = nccl.come_count < nccl.end_count ? nccl.end_count : nccl.come_count;
    while (nccl.come_count < begun && nccl_event_done(nccl.come[(nccl.come_count + 1) % NCCL_EVENTS]))
        nccl.come_count++;
    uint64_t calls = NCCL_GET(calls);
    bool moves = come != nccl.come_count || end != nccl.end_count || calls != nccl.calls_count;
    bool waits = nccl.come_count > nccl.end_count || NCCL_GET(inside);
    nccl.calls_count = calls;
    if (moves || !waits) watch_device(nccl.come_count, waits); // it waits from now on, or does not wait
}

static inline void *nccl_watch_thread(void *unused) {
    (void)unused;
    if (cudaSetDevice(nccl.device) != cudaSuccess) return NULL; // cannot happen: the main thread uses it
    while (!NCCL_GET(stop) && !nccl_ending()) {
        ncclComm_t handles[3];
        for (int i = nccl_handles(handles) - 1; i >= 0; i--) {
            ncclResult_t status = ncclSuccess, asked = ncclCommGetAsyncError(handles[i], &status);
            if (asked != ncclSuccess || (status != ncclSuccess && status != ncclInProgress))
                nccl_failed("in the background", asked != ncclSuccess ? asked : status);
        }
        nccl_update_progress();
        usleep(20000);
    }
    return NULL;
}
