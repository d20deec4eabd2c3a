/*
runtime.cpp: the host side of launches, and the CUDA runtime calls for neither memory nor streams. CUDA's header
declares them, so that a signature that differs from NVIDIA's does not compile.
*/
#include "internal.h"
#include <atomic>
#include <cuda.h>
#include <map>
#include <vector>
#pragma weak cuTensorMapEncodeTiled // defined by dev/emulator/ptx

namespace cuda_on_cpu {

std::function<void()> (*replace_kernel)(const Launch &launch, const std::vector<char> &parameters);

namespace {

std::map<const void *, size_t> allowed_shared; // set by cudaFuncSetAttribute

thread_local cudaError_t last_error = cudaSuccess;
thread_local int chosen_device;               // 0 until the thread selects another, as in CUDA
std::atomic<int> used_device{-1};             // the owner of memory and streams: a process uses one
std::atomic<cudaError_t> failed{cudaSuccess}; // the error of a kernel: every call returns it until a reset

// The visible devices: CUDA_ON_CPU_DEVICES (1), or those that CUDA_ON_CPU_VISIBLE lists, up to its first invalid entry.
std::vector<int> visible_devices() {
    const char *text = getenv("CUDA_ON_CPU_DEVICES"), *named = getenv("CUDA_ON_CPU_VISIBLE");
    int count = text && *text ? atoi(text) : 1;
    std::vector<int> devices;
    for (int i = 0; i < count && !named; i++) devices.push_back(i);
    for (char *end; named && *named >= '0' && *named <= '9'; named = *end == ',' ? end + 1 : "") {
        long number = strtol(named, &end, 10);
        if (number >= count) break;
        devices.push_back((int)number);
    }
    return devices;
}
int device_count() { return (int)visible_devices().size(); }

const char *device_name() { // CUDA_ON_CPU_NAME, or the default
    const char *name = getenv("CUDA_ON_CPU_NAME");
    return name ? name : "CUDA on the CPU";
}

std::string fault_kernel; // the kernel whose launches fail, from number `fault_launch` on
int fault_launch;

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

cudaError_t device_error() { return remember(failed); }

cudaError_t enter(const char *call) {
    int first = -1;
    if (!used_device.compare_exchange_strong(first, chosen_device) && first != chosen_device)
        fail("%s by a thread whose device is %d; the memory and streams of this process are of device %d: a thread has "
             "device 0 until it calls cudaSetDevice, and a process has one device here",
             call, chosen_device, first);
    return device_error();
}

int current_device() { return chosen_device; }
DeviceIdentity device_identity(int device) { // MIG slices have the bus of their GPU
    int number = visible_devices()[(size_t)device];
    return {number, strstr(device_name(), "MIG") ? 0 : number};
}

bool planted_fault(const char *kernel) {
    static const char *text = getenv("CUDA_ON_CPU_FAULT");
    if (text) {
        const char *number = strchr(text, ':');
        fault_kernel = std::string(text, number ? (size_t)(number - text) : strlen(text));
        fault_launch = number ? atoi(number + 1) : 1;
        text = nullptr;
    }
    if (fault_kernel.empty() || !strstr(kernel, fault_kernel.c_str()) || --fault_launch > 0) return false;
    fault_kernel.clear();
    failed = cudaErrorIllegalAddress;
    return true;
}

static size_t shared_limit_now() {
    const char *text = getenv("CUDA_ON_CPU_SHARED");
    return (text ? strtoul(text, nullptr, 10) : 99) << 10;
}
const size_t shared_limit = shared_limit_now();
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
    if (enter(l.kernel) != cudaSuccess) return;
    enqueue(l.stream, [l, thread] {
        if (!planted_fault(l.kernel)) run_grid(l, thread);
    });
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    if (enter("cudaFuncSetAttribute") != cudaSuccess) return device_error();
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
cudaError_t cudaSetDevice(int device) { // of this thread
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    chosen_device = device;
    return device_error();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    memset(p, 0, sizeof(*p));
    p->uuid.bytes[0] = (char)(device_identity(device).number + 1);
    p->pciBusID = device_identity(device).bus + 1;
    snprintf(p->name, sizeof(p->name), "%s", device_name());
    p->totalGlobalMem = device_bytes();
    const char *capability = getenv("CUDA_ON_CPU_CAPABILITY");
    p->major = capability ? atoi(capability) / 10 : 9;
    p->minor = capability ? atoi(capability) % 10 : 0;
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
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *of, const void *) { // the program's code, of any kernel
    cudaDeviceProp p;
    memset(of, 0, sizeof(*of));
    if (cudaGetDeviceProperties(&p, chosen_device) != cudaSuccess) return cudaErrorInvalidDevice;
    const char *code = getenv("CUDA_ON_CPU_CODE"), *registers = getenv("CUDA_ON_CPU_REGISTERS");
    of->numRegs = registers ? atoi(registers) : 168; // as kernels of 384 threads may have
    of->ptxVersion = of->binaryVersion = code ? atoi(code) : 10 * p.major + p.minor;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    default: fail("cudaDeviceGetAttribute: attribute %d is not among those of this layer", (int)attribute);
    }
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *) {
    *function = strcmp(name, "cuTensorMapEncodeTiled") == 0 ? (void *)cuTensorMapEncodeTiled : nullptr;
    return cudaSuccess;
}
cudaError_t cudaDeviceReset(void) { // memory and streams stay as they are
    cudaDeviceSynchronize();
    failed = last_error = cudaSuccess;
    used_device = -1;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = failed;
    return error;
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return "another error";
    }
}
}
