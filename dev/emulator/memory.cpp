/*
memory.cpp: device memory.

cudaMalloc returns memory filled with 0xFF, so that elements that were never written read as NaN. In plain builds each
allocation has its own pages, which are accessible only while the device runs: the program ends if the host dereferences
a device pointer, or a kernel accesses freed memory. In builds with AddressSanitizer, memory comes from its heap, with
an inaccessible zone on both sides. Every copy is checked against the kinds and sizes of its two ends.
*/
#include "internal.h"
#include "races.h"
#include <map>
#include <sys/mman.h>
#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_on_cpu {
namespace {

struct Allocation {
    size_t bytes, mapped; // mapped: with its page of guard, 0 when it is from the heap
    Memory kind;
};
std::map<const char *, Allocation> allocations; // freed ones stay, to report their use
size_t in_use;
int open_count;
constexpr size_t page = 4096, huge = 2 << 20;

size_t mib_of(const char *variable, size_t otherwise) {
    const char *text = getenv(variable);
    return (text && *text ? strtoull(text, nullptr, 10) : otherwise) << 20;
}

size_t free_bytes() { // CUDA_ON_CPU_OTHERS: what other processes have of it, in MiB
    const size_t others = mib_of("CUDA_ON_CPU_OTHERS", 0);
    size_t taken = in_use + others;
    return device_bytes() - (taken < device_bytes() ? taken : device_bytes());
}

bool protects_memory() { // CUDA_ON_CPU_PROTECT=0: leave device memory accessible to the host
    static const char *text = getenv("CUDA_ON_CPU_PROTECT");
    static const bool yes = !(text && !strcmp(text, "0"));
    return yes;
}

void protect_all(int protection) {
    for (auto &[base, a] : allocations)
        if (a.kind == Memory::device && a.mapped) mprotect((void *)base, a.mapped - page, protection);
}

const char *kind_name(Memory kind) {
    static const char *const names[] = {"host memory", "device memory", "pinned host memory", "freed memory"};
    return names[(int)kind];
}

// The source or destination of a copy.
void check_range(const char *call, const char *end, const void *pointer, size_t bytes, bool want_device,
                 bool want_host) {
    Found f = find_memory(pointer);
    if (f.kind == Memory::freed) fail("%s: the %s %p is freed memory", call, end, pointer);
    if (want_device && f.kind != Memory::device)
        fail("%s: the %s %p should be device memory and is %s", call, end, pointer, kind_name(f.kind));
    if (want_host && f.kind == Memory::device)
        fail("%s: the %s %p should be host memory and is device memory", call, end, pointer);
    if (f.base && (const char *)pointer + bytes > f.base + f.bytes)
        fail("%s: %zu bytes at the %s %p end %zu bytes behind its allocation of %zu", call, bytes, end, pointer,
             (size_t)((const char *)pointer + bytes - (f.base + f.bytes)), f.bytes);
}

void check_copy(const char *call, const void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    check_range(call, "destination", to, bytes, to_device, !to_device);
    check_range(call, "source", from, bytes, from_device, !from_device);
}

// Hidden from ThreadSanitizer: its shadow memory, four times the bytes, would remain after the memory is freed.
void move(void *to, const void *from, size_t bytes) {
    Unseen unseen;
    open_device_memory();
    memmove(to, from, bytes);
    close_device_memory();
}
void fill(void *to, int value, size_t bytes) {
    Unseen unseen;
    memset(to, value, bytes);
}

cudaError_t allocate(const char *call, void **pointer, size_t bytes, Memory kind) {
    *pointer = nullptr;
    if (enter(call) != cudaSuccess) return device_error();
    if (!bytes) return cudaSuccess;
    if (kind == Memory::device && bytes > free_bytes()) return remember(cudaErrorMemoryAllocation);
    void *p = nullptr;
    size_t mapped = 0;
#ifndef CUDA_ON_CPU_ASAN
    if (kind == Memory::device) {
        mapped = (bytes + page - 1) / page * page + page;
        size_t slack = bytes >= 2 * huge ? huge : 0; // huge pages: fewer entries to change at every opening and closing
        p = mmap(nullptr, mapped + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return cudaErrorMemoryAllocation;
        if (slack) {
            p = (void *)(((uintptr_t)p + huge - 1) / huge * huge);
            madvise(p, mapped - page, MADV_HUGEPAGE);
        }
        mprotect((char *)p + mapped - page, page, PROT_NONE);
    }
#endif
    if (!p && posix_memalign(&p, 256, bytes)) return cudaErrorMemoryAllocation;
    fill(p, 0xFF, bytes);
    if (kind == Memory::device) in_use += bytes;
    // forgets what was freed there: AddressSanitizer's heap reuses addresses
    const char *base = (const char *)p;
    allocations.erase(allocations.lower_bound(base), allocations.lower_bound(base + bytes));
    allocations[base] = {bytes, mapped, kind};
    catch_faults();
    if (mapped && !open_count && protects_memory()) mprotect(p, mapped - page, PROT_NONE);
    *pointer = p;
    return cudaSuccess;
}

cudaError_t release(const char *call, void *pointer, Memory kind) {
    if (!pointer) return cudaSuccess;
    auto found = allocations.find((const char *)pointer);
    if (found == allocations.end() || found->second.kind != kind) {
        Found f = find_memory(pointer);
        fail("%s: %p is %s%s, not the start of an allocation of this kind", call, pointer,
             f.base && f.base != pointer ? "inside " : "", kind_name(f.kind));
    }
    drain_all(); // which cudaFree waits for
    if (device_error() != cudaSuccess) return device_error();
    Allocation &a = found->second;
    if (kind == Memory::device) in_use -= a.bytes;
    a.kind = Memory::freed;
    if (a.mapped) { // the addresses stay taken, so that they are not given to another allocation
        madvise(pointer, a.mapped, MADV_DONTNEED);
        mprotect(pointer, a.mapped, PROT_NONE);
    } else {
        free(pointer);
#ifndef CUDA_ON_CPU_ASAN
        allocations.erase(found); // the heap gives the address to others
#endif
    }
    return cudaSuccess;
}

} // namespace

size_t device_bytes() { // CUDA_ON_CPU_MEMORY: in MiB
    static const size_t bytes = mib_of("CUDA_ON_CPU_MEMORY", 16384);
    return bytes;
}

Found find_memory(const volatile void *pointer) {
    const char *p = (const char *)pointer;
    auto after = allocations.upper_bound(p);
    if (after == allocations.begin()) return {Memory::unknown, nullptr, 0};
    const auto &[base, a] = *--after;
    if (p > base + a.bytes) return {Memory::unknown, nullptr, 0};
#ifdef CUDA_ON_CPU_ASAN
    // the heap reuses freed addresses, also for host memory
    if (a.kind == Memory::freed && !__asan_address_is_poisoned((const volatile char *)pointer))
        return {Memory::unknown, nullptr, 0};
#endif
    return {a.kind, base, a.bytes};
}

std::string describe_fault(const volatile void *pointer) {
    if (const char *what = stack_fault(pointer)) return what;
    const char *p = (const char *)pointer;
    auto after = allocations.upper_bound(p);
    if (after == allocations.begin()) return "";
    const auto &[base, a] = *--after;
    char text[256];
    size_t at = (size_t)(p - base);
    if (!a.mapped || at >= a.mapped) return "";
    if (a.kind == Memory::freed)
        snprintf(text, sizeof(text), "use of freed memory: byte %zu of an allocation of %zu", at, a.bytes);
    else if (at >= a.bytes)
        snprintf(text, sizeof(text), "out of bounds: byte %zu of an allocation of %zu", at, a.bytes);
    else
        snprintf(text, sizeof(text), "the host dereferences device memory: byte %zu of an allocation of %zu", at,
                 a.bytes);
    return text;
}

void open_device_memory() {
    if (open_count++ == 0 && protects_memory()) protect_all(PROT_READ | PROT_WRITE);
}
void close_device_memory() {
    if (--open_count == 0 && protects_memory()) protect_all(PROT_NONE);
}

void check_pointer(const Launch &what, int argument, const volatile void *pointer) {
    if (!pointer) return;
    Found f = find_memory(pointer);
    if (f.kind == Memory::device || f.kind == Memory::pinned) return;
    fail("kernel %s launched in %s:%d: argument %d, %p, is %s", what.kernel, what.place.file, what.place.line, argument,
         (const void *)pointer, kind_name(f.kind));
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaMalloc(void **pointer, size_t bytes) { return allocate("cudaMalloc", pointer, bytes, Memory::device); }
cudaError_t cudaFree(void *pointer) { return release("cudaFree", pointer, Memory::device); }
cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    return allocate("cudaMallocHost", pointer, bytes, Memory::pinned);
}
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
    return allocate("cudaHostAlloc", pointer, bytes, Memory::pinned);
}
cudaError_t cudaFreeHost(void *pointer) { return release("cudaFreeHost", pointer, Memory::pinned); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    if (enter("cudaMemGetInfo") != cudaSuccess) return device_error();
    *total = device_bytes();
    *available = free_bytes();
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (device_error() != cudaSuccess) return device_error(); // in CUDA any thread can copy on a stream
    if (!bytes) return cudaSuccess;
    check_copy("cudaMemcpyAsync", to, from, bytes, kind);
    if (find_memory(from).kind == Memory::unknown) { // pageable memory is read before the call returns
        char *staged = (char *)malloc(bytes);
        if (!staged) return cudaErrorMemoryAllocation;
        memcpy(staged, from, bytes);
        enqueue(stream, [=] {
            move(to, staged, bytes);
            free(staged);
        });
    } else enqueue(stream, [=] { move(to, from, bytes); });
    if (find_memory(to).kind == Memory::unknown) drain(stream); // and written before it returns
    return device_error();
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    if (enter("cudaMemcpy") != cudaSuccess) return device_error();
    if (!bytes) return cudaSuccess;
    check_copy("cudaMemcpy", to, from, bytes, kind);
    drain_all();
    if (device_error() == cudaSuccess) move(to, from, bytes);
    return device_error();
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    if (enter("cudaMemset") != cudaSuccess) return device_error();
    if (!bytes) return cudaSuccess;
    check_range("cudaMemset", "destination", to, bytes, true, false);
    enqueue(stream, [=] {
        open_device_memory();
        fill(to, value, bytes);
        close_device_memory();
    });
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    if (enter("cudaMemset") != cudaSuccess) return device_error();
    check_range("cudaMemset", "destination", to, bytes, true, false);
    drain_all();
    open_device_memory();
    fill(to, value, bytes);
    close_device_memory();
    return device_error();
}
}
