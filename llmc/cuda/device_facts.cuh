/*
device_facts.cuh: what the program says of its device: name and driver, the peak of its matrix units, its memory.

  context   What CUDA takes besides our buffers (its context, the kernels of the program and of the libraries as they
            are loaded) depends on the driver and the device; CONTEXT_BYTES stands for it where nothing can be measured.
            A run says at its first step what was planned and what is in use.
*/
#ifndef LLMC_DEVICE_FACTS_CUH
#define LLMC_DEVICE_FACTS_CUH
#include "device_peak.h"

static const size_t CONTEXT_BYTES = (size_t)560 << 20; // an H100's context and the libraries' kernels, about

static inline cudaDeviceProp device_properties(void) {
    int index = 0;
    cudaDeviceProp facts;
    device_start();
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaGetDeviceProperties(&facts, index));
    return facts;
}

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

// fp32 products do not use the units that the table is about (never TF32).
static inline double ops_rated_gflops(const char **document) {
    cudaDeviceProp facts = device_properties();
    const DevicePeak *row = sizeof(floatX) == 2 ? device_peak_find(facts.name, facts.multiProcessorCount) : NULL;
    if (row) *document = peak_source_names[row->source];
    return row ? 1e3 * row->tflops : 0;
}

static inline int ops_memory_parts(MemoryPart *parts) {
    parts[0] = memory_part("workspace of matrix products", GEMM_WORKSPACE_BYTES, false);
    parts[1] = memory_part("partial sums", SCRATCH_BYTES, false);
    parts[2] = memory_part("CUDA and the libraries' kernels, about", CONTEXT_BYTES, true);
    return 3;
}

static const bool ops_use_host_memory = false; // the buffers are in the memory of a device

static inline bool ops_memory(DeviceMemory *m) {
    int count = 0;
    size_t free_bytes = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) { // a dry run, then
        cudaGetLastError();
        return false;
    }
    device_start();
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &m->total));
    m->used = m->total - free_bytes;
    m->at_start = device.used_at_start;
    return true;
}
#endif
