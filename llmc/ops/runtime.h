/*
runtime.h: start and end of the operations, their workspace, and the facts about the device.

Operations run one after another, so they share one block of memory: the trainer takes the maximum of
NAME_workspace_bytes over the operations and passes it to ops_init before the first step.
*/
#ifndef LLMC_OPS_RUNTIME_H
#define LLMC_OPS_RUNTIME_H
#include "../cuda/device_peak.h"
#include "ops.h"

// Called before the first operation; allocates the workspace that the operations share, the maximum of
// *_workspace_bytes.
static inline void ops_init(size_t workspace_bytes);
static inline void ops_free(void);
// Waits for all operations called so far. On a device they run asynchronously.
static inline void ops_wait(void);

// Facts for run.json, --dry-run and messages: descriptions of the device and its driver; false on the CPU.
static inline bool ops_device(char *device, char *driver, size_t size);
// The documented rates of a bf16 build's device. NULL: a CPU, an fp32 build or an unlisted device; the caller measures.
static inline const DevicePeak *ops_rated(void);

// Lists the memory of operations and their libraries besides the program's buffers; returns the number of parts.
static inline int ops_memory_parts(MemoryPart *parts);

// ops_use_host_memory: a constant, true if buffers are in host memory.
// The memory of the device; false on the CPU, or if there is no device.
static inline bool ops_memory(DeviceMemory *m);

#ifdef DEVICE_OPS
#include "runtime.cuh"
#elif !defined RECORDED_OPS
static struct {
    void *memory;
    size_t bytes;
} ops_workspace;

static inline void ops_init(size_t workspace_bytes) {
    buffer_free(ops_workspace.memory);
    ops_workspace.memory = buffer_alloc(workspace_bytes, "the operations' workspace");
    ops_workspace.bytes = workspace_bytes;
}

static inline void ops_free(void) {
    buffer_free(ops_workspace.memory);
    ops_workspace.memory = NULL;
    ops_workspace.bytes = 0;
}

static const bool ops_use_host_memory = true; // the buffers are in host memory

static inline void ops_wait(void) {} // operations are synchronous

static inline bool ops_device(char *device, char *driver, size_t size) {
    (void)device, (void)driver, (void)size;
    return false;
}

static inline const DevicePeak *ops_rated(void) { return NULL; }

static inline int ops_memory_parts(MemoryPart *parts) {
    // code and the GEMM library's memory (measured: dev/BENCH.md)
    parts[0] = memory_part("program and libraries, about", (size_t)24 << 20, true);
    return 1;
}

static inline bool ops_memory(DeviceMemory *m) {
    (void)m;
    return false;
}

static inline real *ops_workspace_take(size_t bytes) {
    assert(ops_workspace.memory != NULL && bytes <= ops_workspace.bytes);
    return (real *)ops_workspace.memory;
}
#endif
#endif
