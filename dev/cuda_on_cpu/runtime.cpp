/*
runtime.cpp: launches as the host sees them, and the CUDA runtime calls that are neither memory nor streams. CUDA's own
header declares them all, so a signature that differs from NVIDIA's does not compile.
*/
#include "internal.h"
#include <map>

namespace cuda_on_cpu {
namespace {

std::map<const void *, size_t> allowed_shared; // by cudaFuncSetAttribute

thread_local cudaError_t last_error = cudaSuccess;
int chosen_device;

int device_count() { // CUDA_ON_CPU_DEVICES: that a program may choose one of (1)
    static const char *text = getenv("CUDA_ON_CPU_DEVICES");
    static const int count = text && *text ? atoi(text) : 1;
    return count;
}

void check_extent(const Launch &l, const char *what, Extent e, long long x, long long y, long long z) {
    if (e.x < 1 || e.y < 1 || e.z < 1 || e.x > x || e.y > y || e.z > z)
        fail("kernel %s launched in %s:%d: its %s is (%lld,%lld,%lld); each is at least 1 and at most (%lld,%lld,%lld)",
             l.kernel, l.place.file, l.place.line, what, e.x, e.y, e.z, x, y, z);
}

} // namespace

cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

size_t dynamic_shared_limit(const void *kernel) {
    auto found = allowed_shared.find(kernel);
    return found == allowed_shared.end() ? shared_default : max(shared_default, found->second);
}

void check_launch(const Launch &l) {
    if (in_kernel()) fail("a kernel launches kernel %s in %s:%d", l.kernel, l.place.file, l.place.line);
    check_extent(l, "grid", l.grid, 2147483647, 65535, 65535);
    check_extent(l, "block", l.block, 1024, 1024, 64);
    if (l.block.x * l.block.y * l.block.z > max_block)
        fail("kernel %s launched in %s:%d: a block of %lld threads; at most %d", l.kernel, l.place.file, l.place.line,
             l.block.x * l.block.y * l.block.z, max_block);
    if (l.shared_bytes > dynamic_shared_limit(l.function))
        fail("kernel %s launched in %s:%d: %zu bytes of shared memory; at most %zu, or up to %zu after "
             "LAUNCH_ALLOW_SHARED",
             l.kernel, l.place.file, l.place.line, l.shared_bytes, dynamic_shared_limit(l.function), shared_limit);
}

void launch_on_stream(const Launch &l, std::function<void()> thread) {
    enqueue(l.stream, [l, thread] { run_grid(l, thread); });
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess; // a preference
    if (value < 0 || (size_t)value > shared_limit) return remember(cudaErrorInvalidValue);
    allowed_shared[kernel] = (size_t)value;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = device_count();
    return *count > 0 ? cudaSuccess : remember(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) {
    *device = chosen_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { // once: what there is of memory and streams is of one device
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    static const int first = chosen_device = device;
    if (device != first)
        fail("cudaSetDevice(%d) after cudaSetDevice(%d): a process has one device here", device, first);
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    memset(p, 0, sizeof(*p));
    p->uuid.bytes[0] = (char)(device + 1);
    const char *name = getenv("CUDA_ON_CPU_NAME"); // of a device to pass for
    snprintf(p->name, sizeof(p->name), "%s", name ? name : "CUDA on the CPU");
    size_t available;
    cudaMemGetInfo(&available, &p->totalGlobalMem);
    p->major = 8;
    p->multiProcessorCount = multiprocessors;
    p->warpSize = 32;
    p->maxThreadsPerBlock = max_block;
    p->maxThreadsPerMultiProcessor = threads_per_multiprocessor;
    p->maxBlocksPerMultiProcessor = 16;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = shared_default;
    p->sharedMemPerBlockOptin = shared_limit;
    p->sharedMemPerMultiprocessor = shared_limit + 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->l2CacheSize = 32 << 20;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    default: fail("cudaDeviceGetAttribute: attribute %d is not among those of this layer", (int)attribute);
    }
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int block_size, size_t) {
    *blocks = block_size > 0 && block_size <= max_block ? threads_per_multiprocessor / block_size : 0;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaDeviceReset(void) { return cudaDeviceSynchronize(); }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidPitchValue: return "cudaErrorInvalidPitchValue";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    default: return "another error";
    }
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    default: return cudaGetErrorName(error);
    }
}
}
