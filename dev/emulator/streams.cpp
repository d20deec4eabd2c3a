/*
streams.cpp: streams and events.

Work on a stream runs as late as CUDA allows: when the host waits for it. Therefore a host that reads a result without
waiting reads the old value, and work that lacks a wait for another stream runs without that stream's work.
CUDA_ON_CPU_STREAMS=hasty runs the first stream that a program creates late, and the others as early as possible: their
work that lacks a wait for the first stream runs before it.

A wait for an event runs its stream up to the record. Work can wait for another process (a collective): until then no
later work of its stream runs, and queries return "not ready". The null stream is an error.
*/
#include "internal.h"
#include <atomic>
#include <deque>
#include <thread>
#include <vector>
#include <time.h>
#include <unistd.h>

namespace {
struct Item {
    std::function<bool()> ready; // asked until it says yes; empty: at once
    std::function<void()> work;  // may be empty
};
} // namespace
struct CUstream_st {
    std::deque<Item> queue;
    uint64_t queued;
    std::atomic<uint64_t> done; // other threads ask
    bool running;               // one of its items is being polled or runs
};
struct CUevent_st {
    std::atomic<CUstream_st *> stream; // of the last record, or nullptr
    std::atomic<uint64_t> number;      // of the record in its stream
    double ms;                         // when it ran
};

namespace cuda_on_cpu {
namespace {

std::vector<CUstream_st *> streams;
CUstream_st *first_stream;      // that the program created
std::thread::id streams_thread; // the thread that runs them

bool hasty() {
    static const char *text = getenv("CUDA_ON_CPU_STREAMS");
    static const bool is = text && !strcmp(text, "hasty");
    if (text && *text && !is && strcmp(text, "late"))
        fail("CUDA_ON_CPU_STREAMS is '%s': hasty or late is expected", text);
    return is;
}

CUstream_st *find(cudaStream_t stream) {
    for (CUstream_st *s : streams)
        if (s == stream) return s;
    fail("stream %p does not exist, or no longer", (void *)stream);
}

// Runs a stream up to `number`, as far as possible. Returns whether it reached it.
bool try_run(CUstream_st *s, uint64_t number) {
    while (s->done < number) {
        if (s->running) return false; // its own item asks
        Item &first = s->queue.front();
        if (device_error() != cudaSuccess) { // the device does nothing any more
            s->queue.pop_front();
            s->done++;
            continue;
        }
        s->running = true;
        bool ready = !first.ready || first.ready();
        s->running = false;
        if (!ready) return false;
        std::function<void()> work = std::move(first.work);
        s->queue.pop_front();
        s->running = true;
        if (work) work();
        s->running = false;
        s->done++;
    }
    return true;
}

void run_until(CUstream_st *s, uint64_t number) {
    for (unsigned looks = 0; !try_run(s, number); looks++) usleep(looks < 100 ? 20 : 200);
}

void hurry() {
    for (CUstream_st *s : streams)
        if (s != first_stream) try_run(s, s->queued);
}

void push(CUstream_st *s, Item item) {
    s->queue.push_back(std::move(item));
    s->queued++;
    bool full = s->queue.size() > 1 << 16;
    if (!hasty() && !full) return; // opening and closing memory costs more than many kernels
    open_device_memory();
    if (!full) hurry();
    else run_until(s, s->queued);
    close_device_memory();
}

Item wait_for(CUstream_st *other, uint64_t number) {
    return {[other, number] { return try_run(other, number); }, {}};
}

double now_ms() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

void drain_one(CUstream_st *s) {
    if (s->done == s->queued) return;
    open_device_memory();
    run_until(s, s->queued);
    close_device_memory();
}

} // namespace

void enqueue(cudaStream_t stream, std::function<void()> work) { push(find(stream), {{}, std::move(work)}); }
void drain(cudaStream_t stream) { drain_one(find(stream)); }
void drain_all() {
    for (CUstream_st *s : streams) drain_one(s);
}

void on_stream(cudaStream_t stream, const char *name, std::function<void()> work, Place place) {
    enter(name);
    enqueue(stream, [name, work, place] {
        stand_in = name, stand_in_place = place;
        work();
        stand_in = nullptr;
    });
}

void on_stream_when(cudaStream_t stream, const char *name, std::function<bool()> ready, std::function<void()> work,
                    Place place) {
    enter(name);
    auto named = [name, place](auto of) {
        return [name, place, of]() mutable {
            struct Named {
                Named(const char *n, Place p) { stand_in = n, stand_in_place = p; }
                ~Named() { stand_in = nullptr; }
            } now(name, place);
            return of();
        };
    };
    push(find(stream), {named(ready), named(work)});
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    if (enter("cudaStreamCreate") != cudaSuccess) return device_error();
    *stream = new CUstream_st{{}, 0, {0}, false};
    if (!first_stream) first_stream = *stream, streams_thread = std::this_thread::get_id();
    streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { // queued work still runs
    CUstream_st *s = find(stream);
    drain_one(s);
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == s) streams.erase(streams.begin() + (long)i--);
    if (first_stream == s) first_stream = nullptr;
    delete s;
    return device_error();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    drain(stream);
    return device_error();
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    enter("cudaDeviceSynchronize");
    drain_all();
    return device_error();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    if (enter("cudaEventCreate") != cudaSuccess) return device_error();
    *event = new CUevent_st{{nullptr}, {0}, 0};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (event->stream) drain_one(event->stream); // a record may still be queued
    delete event;
    return device_error();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (enter("cudaEventRecord") != cudaSuccess) return device_error();
    enqueue(stream, [event] { event->ms = now_ms(); });
    CUstream_st *s = find(stream);
    event->stream = s;
    event->number = s->queued;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (device_error() != cudaSuccess || !event->stream) return device_error(); // never recorded: nothing to wait for
    push(find(stream), wait_for(event->stream, event->number));
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!event->stream) return device_error();
    open_device_memory();
    run_until(event->stream, event->number);
    close_device_memory();
    return device_error();
}
// A thread that does not run the streams only reads the state.
cudaError_t cudaEventQuery(cudaEvent_t event) {
    CUstream_st *s = event->stream;
    if (device_error() != cudaSuccess || !s) return device_error();
    bool done = s->done >= event->number;
    if (!done && std::this_thread::get_id() == streams_thread) {
        open_device_memory();
        done = try_run(s, event->number);
        close_device_memory();
    }
    return done ? device_error() : remember(cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    CUstream_st *s = start->stream, *e = end->stream;
    if (device_error() != cudaSuccess) return device_error();
    if (!s || !e) return cudaErrorInvalidResourceHandle;
    if (s->done < start->number || e->done < end->number) return cudaErrorNotReady;
    *ms = (float)(end->ms - start->ms);
    return cudaSuccess;
}
}
