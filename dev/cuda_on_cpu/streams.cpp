/*
streams.cpp: streams and events.

What is put on a stream runs as late as CUDA allows: when the host waits for it. So a host that reads a result without
waiting reads the old value, and work on one stream that should wait for another and does not, runs without it.
CUDA_ON_CPU_STREAMS=eager runs everything at once instead, which is easier to step through.

Waiting for an event runs its stream up to the record. The null stream and blocking streams wait for each other as CUDA's do.
*/
#include "internal.h"
#include <deque>
#include <vector>
#include <time.h>

struct CUstream_st {
    bool blocking;
    std::deque<std::function<void()>> queue;
    uint64_t queued, done;
};
struct CUevent_st {
    CUstream_st *stream; // of the last record, or nullptr
    uint64_t number;     // of the record in its stream
    double ms;           // when it ran
};

namespace cuda_on_cpu {
namespace {

CUstream_st null_stream = {true, {}, 0, 0};
std::vector<CUstream_st *> streams = {&null_stream};

bool eager() {
    static const char *text = getenv("CUDA_ON_CPU_STREAMS");
    static const bool is = text && !strcmp(text, "eager");
    if (text && *text && !is && strcmp(text, "late")) fail("CUDA_ON_CPU_STREAMS is '%s': eager or late is expected", text);
    return is;
}

CUstream_st *find(cudaStream_t stream) {
    if (stream == nullptr || stream == cudaStreamLegacy) return &null_stream;
    for (CUstream_st *s : streams)
        if (s == stream) return s;
    fail("stream %p does not exist, or no longer", (void *)stream);
}

void run_until(CUstream_st *s, uint64_t number) {
    while (s->done < number) {
        std::function<void()> work = std::move(s->queue.front());
        s->queue.pop_front();
        s->done++; // before it runs: work that waits for this stream means what comes before it
        work();
    }
}

void push(CUstream_st *s, std::function<void()> work) {
    s->queue.push_back(std::move(work));
    s->queued++;
    if (eager() || s->queue.size() > 1 << 16) {
        open_device_memory();
        run_until(s, s->queued);
        close_device_memory();
    }
}

// The null stream waits for blocking streams, and they for it.
void wait_as_null_stream_does(CUstream_st *s) {
    for (CUstream_st *other : streams) {
        if (other == s || !other->blocking || (s != &null_stream && other != &null_stream)) continue;
        uint64_t number = other->queued;
        if (s->blocking && other->done < number) push(s, [other, number] { run_until(other, number); });
    }
}

double now_ms() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

void drain_one(CUstream_st *s) {
    open_device_memory();
    run_until(s, s->queued);
    close_device_memory();
}

} // namespace

void enqueue(cudaStream_t stream, std::function<void()> work) {
    CUstream_st *s = find(stream);
    wait_as_null_stream_does(s);
    push(s, std::move(work));
}
void drain(cudaStream_t stream) { drain_one(find(stream)); }
void drain_all() {
    for (CUstream_st *s : streams) drain_one(s);
}
void drain_for_blocking_call() {
    for (CUstream_st *s : streams)
        if (s->blocking) drain_one(s);
}

void on_stream(cudaStream_t stream, const char *name, std::function<void()> work, Place place) {
    enqueue(stream, [name, work, place] {
        stand_in = name, stand_in_place = place;
        work();
        stand_in = nullptr;
    });
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    *stream = new CUstream_st{flags != cudaStreamNonBlocking, {}, 0, 0};
    streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) { return cudaStreamCreateWithFlags(stream, flags); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { // what is queued still runs
    CUstream_st *s = find(stream);
    if (s == &null_stream) fail("cudaStreamDestroy of the null stream");
    drain_one(s);
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == s) streams.erase(streams.begin() + (long)i--);
    delete s;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    drain(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    drain(stream); // a loop that waits for it must come to an end
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    drain_all();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = new CUevent_st{nullptr, 0, 0};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (event->stream) drain_one(event->stream); // a record may still be queued
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    enqueue(stream, [event] { event->ms = now_ms(); });
    event->stream = find(stream);
    event->number = event->stream->queued;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (!event->stream) return cudaSuccess; // never recorded: nothing to wait for
    CUstream_st *other = event->stream;
    uint64_t number = event->number;
    enqueue(stream, [other, number] { run_until(other, number); });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!event->stream) return cudaSuccess;
    open_device_memory();
    run_until(event->stream, event->number);
    close_device_memory();
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->stream || !end->stream) return cudaErrorInvalidResourceHandle;
    if (start->stream->done < start->number || end->stream->done < end->number) return cudaErrorNotReady;
    *ms = (float)(end->ms - start->ms);
    return cudaSuccess;
}
}
