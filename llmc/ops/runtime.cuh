/*
runtime.cuh: start and end of the operations, and the facts about the device: name, driver, peak, memory.

  memory   Besides our buffers CUDA allocates memory for the kernels of the program and of the libraries. The amount
           depends on the driver and the device; CUDA_OVERHEAD_BYTES is the estimate where it cannot be measured. A run
           logs the plan and the memory in use at its first step.
*/
#pragma once
#include "../cuda/device_peak.h"
#include "../cuda/gemm.cuh"
#include "ops.h"

static const size_t CUDA_OVERHEAD_BYTES = (size_t)560 << 20; // approximately, on an H100

static inline void ops_free(void) {
    buffer_free(device.workspace);
    buffer_free(device.scratch);
    device.workspace = device.scratch = NULL;
    device.workspace_bytes = 0;
    gemm_stop();
}

static inline void ops_init(size_t workspace_bytes) {
    ops_free();
    device.workspace = (char *)buffer_alloc(workspace_bytes, "the operations' workspace");
    device.workspace_bytes = workspace_bytes;
    device.scratch = (char *)buffer_alloc(SCRATCH_BYTES, "the operations' partial sums");
    gemm_start();
}

static inline void ops_wait(void) { CUDA_CHECK(cudaStreamSynchronize(main_stream)); }

static inline bool ops_device(char *text, char *driver, size_t size) {
    int runtime_version = 0, driver_version = 0;
    cudaDeviceProp facts = device_properties();
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime_version));
    CUDA_CHECK(cudaDriverGetVersion(&driver_version));
    snprintf(text, size, "%.100s: compute capability %d.%d, %d multiprocessors, %.1f GiB", facts.name, facts.major,
             facts.minor, facts.multiProcessorCount, (double)facts.totalGlobalMem / 1073741824);
    snprintf(driver, size, "runtime %d.%d, driver for %d.%d, %s storage", runtime_version / 1000,
             runtime_version % 1000 / 10, driver_version / 1000, driver_version % 1000 / 10,
             sizeof(floatX) == 2 ? "bf16" : "fp32");
    return true;
}

// NULL in the fp32 build: its products do not use the matrix units that the table is for (never TF32).
static inline const DevicePeak *ops_rated(void) {
    cudaDeviceProp facts = device_properties();
    return sizeof(floatX) == 2 ? device_peak_find(facts.name, facts.multiProcessorCount) : NULL;
}

static inline int ops_memory_parts(MemoryPart *parts) {
    parts[0] = memory_part("workspace of matrix products", GEMM_WORKSPACE_BYTES, false);
    parts[1] = memory_part("partial sums", SCRATCH_BYTES, false);
    parts[2] = memory_part("CUDA and the libraries' kernels, about", CUDA_OVERHEAD_BYTES, true);
    return 3;
}

static const bool ops_use_host_memory = false; // the buffers are in device memory

static inline bool ops_memory(DeviceMemory *m) {
    int count = 0;
    size_t free_bytes = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) { // a dry run without a device
        cudaGetLastError();
        return false;
    }
    device_start();
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &m->total));
    m->used = m->total - free_bytes;
    m->at_start = device.used_at_start;
    return true;
}
