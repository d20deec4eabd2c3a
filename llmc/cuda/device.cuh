/*
device.cuh: the device of this process: its stream, errors, buffers and scratch memory.

  stream            all operations run on main_stream, in the order of their calls
  buffer_alloc      one cudaMalloc, zeroed
  buffer_upload     Small uploads (tokens) are copied to pinned memory first, so the host does not wait for the device.
                    Large uploads (weights at the start) wait.
  buffer_download   waits for all earlier work on main_stream; the only wait of a training step
  scratch           ops_workspace_take: the size that NAME_workspace_bytes requested; ops_scratch: SCRATCH_BYTES for
                    partial sums, available to every operation. Operations run one after another on one stream, so they
                    share both.
*/
#pragma once
#include "../base/element_types.h"
#include "launch.cuh"

// Set when the program ends and aborts the collectives of this device. A thread that waited for a collective would
// continue with undefined data, so it waits here until the process exits.
static bool device_ending;
static inline void device_wait_if_ending(void) {
    while (__atomic_load_n(&device_ending, __ATOMIC_SEQ_CST)) pause();
}

// Ends the program. bytes 0: CUDA's own memory for the call that failed.
static inline void out_of_device_memory(size_t bytes, const char *what) {
    size_t free_bytes = 0, total = 0;
    char room[100] = "";
    cudaGetLastError(); // clears the error, which is reported here
    if (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess)
        FORMAT(room, ", %.1f of %.1f MiB free", (double)free_bytes / 1048576, (double)total / 1048576);
    out_of_memory("device memory", bytes, what, room);
}

// Ends the program if a call of CUDA failed.
static inline void cuda_check(cudaError_t status, const char *call, const char *file, int line) {
    device_wait_if_ending();
    if (status == cudaErrorMemoryAllocation) out_of_device_memory(0, call);
    CHECK(status == cudaSuccess, "CUDA failed: %s (%s, %s:%d)%s", cudaGetErrorString(status), call, file, line,
          launch_remark(status));
}
#define CUDA_CHECK(call) cuda_check(call, #call, __FILE__, __LINE__)

static cudaStream_t main_stream; // created by device_start

enum { UPLOAD_SLOTS = 8, UPLOAD_BYTES = 1 << 20, SCRATCH_BYTES = 1 << 20 };

static struct {
    bool started;
    int sm_count;
    size_t used_at_start; // bytes of device memory used by all processes before the first buffer
    size_t workspace_bytes;
    char *workspace, *scratch; // device memory
    char *pinned;              // host memory: UPLOAD_SLOTS of UPLOAD_BYTES, used in turn
    cudaEvent_t uploaded[UPLOAD_SLOTS];
    int slot;
} device;

static inline void device_start(void) {
    if (device.started) return;
    int count = 0, index = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    CHECK(status == cudaSuccess && count > 0, "no CUDA device: %s; train_diffv2 is the program for CPUs",
          status == cudaSuccess ? "none is installed" : cudaGetErrorString(status));
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaDeviceGetAttribute(&device.sm_count, cudaDevAttrMultiProcessorCount, index));
    CUDA_CHECK(cudaStreamCreateWithFlags(&main_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMallocHost((void **)&device.pinned, (size_t)UPLOAD_SLOTS * UPLOAD_BYTES));
    for (int i = 0; i < UPLOAD_SLOTS; i++)
        CUDA_CHECK(cudaEventCreateWithFlags(&device.uploaded[i], cudaEventDisableTiming));
    size_t free_bytes = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    device.used_at_start = total - free_bytes;
    device.started = true;
}

static inline void *buffer_alloc(size_t bytes, const char *what) {
    device_start();
    void *p = NULL;
    size_t size = max_size(bytes, 1);
    cudaError_t status = cudaMalloc(&p, size);
    if (status == cudaErrorMemoryAllocation) out_of_device_memory(bytes, what);
    CUDA_CHECK(status);
    CUDA_CHECK(cudaMemsetAsync(p, 0, size, main_stream));
    return p;
}
static inline void buffer_free(void *p) {
    if (p == NULL) return;
    CUDA_CHECK(cudaStreamSynchronize(main_stream));
    CUDA_CHECK(cudaFree(p));
}
static inline void buffer_zero(void *p, size_t bytes) {
    OPERATION();
    if (bytes) CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, main_stream));
}
static inline void buffer_upload(void *to, const void *host, size_t bytes) {
    OPERATION();
    if (bytes == 0) return;
    if (bytes > UPLOAD_BYTES) {
        CUDA_CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, main_stream));
        CUDA_CHECK(cudaStreamSynchronize(main_stream));
        return;
    }
    int slot = device.slot++ % UPLOAD_SLOTS;
    char *pinned = device.pinned + (size_t)slot * UPLOAD_BYTES;
    CUDA_CHECK(cudaEventSynchronize(device.uploaded[slot])); // the slot's last copy is complete
    memcpy(pinned, host, bytes);
    CUDA_CHECK(cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, main_stream));
    CUDA_CHECK(cudaEventRecord(device.uploaded[slot], main_stream));
    device.slot %= UPLOAD_SLOTS;
}
static inline void buffer_download(void *host, const void *from, size_t bytes) {
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, main_stream));
    CUDA_CHECK(cudaStreamSynchronize(main_stream));
}

// Pinned host memory; NULL if there is too little.
static inline void *download_alloc(size_t bytes) {
    void *p = NULL;
    if (cudaMallocHost(&p, max_size(bytes, 1)) == cudaSuccess) return p;
    cudaGetLastError(); // clears the error; the caller has an alternative
    return NULL;
}
static inline void download_free(void *p) {
    if (p) CUDA_CHECK(cudaFreeHost(p));
}

static inline real *ops_workspace_take(size_t bytes) {
    assert(device.workspace != NULL && bytes <= device.workspace_bytes);
    return (real *)(void *)device.workspace;
}
static inline void *ops_scratch(size_t bytes) {
    assert(device.scratch != NULL && bytes <= SCRATCH_BYTES);
    return device.scratch;
}

static inline cudaDeviceProp device_properties(void) {
    int index = 0;
    cudaDeviceProp facts;
    device_start();
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaGetDeviceProperties(&facts, index));
    return facts;
}
