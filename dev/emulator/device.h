/*
device.h: what a kernel sees when g++ compiles it: threadIdx and its like, barriers, warp shuffles and votes, shared
memory, atomics, and the launch. llmc/cuda/launch.cuh includes it; README.md describes it and its limitations.

A launch, a barrier or a shuffle carries the file and line of its caller (default arguments), for messages.
*/
#pragma once

#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <vector>

// A __shared__ array would silently become an array per thread: use SHARED of llmc/cuda/launch.cuh.
#undef __shared__
#define __shared__ static_assert(false, "use SHARED or DYNAMIC_SHARED of llmc/cuda/launch.cuh");
#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#ifndef __grid_constant__
#define __grid_constant__
#endif

// gcc defines macros for sanitizers, clang has __has_feature
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if (defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)) && !defined(CUDA_ON_CPU_TSAN)
#error "a build with ThreadSanitizer defines CUDA_ON_CPU_TSAN, and does not instrument the layer (rules.mk)"
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define CUDA_ON_CPU_ASAN 1
#endif

namespace cuda_on_cpu {

// A place in the source. As a default argument, it is the place of the caller.
struct Place {
    const char *file;
    int line;
    static constexpr Place here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

// The order of threads that can run. A warp runs until its lanes wait, then the next warp runs; the order restarts
// after every barrier. Shuffled: a new permutation of blocks, warps and lanes each time, from the seed.
enum class Order { forward, reverse, shuffled };
void set_order(Order order, uint64_t seed = 1); // also CUDA_ON_CPU_ORDER=forward|reverse|shuffled[:SEED]

// When a cp.async takes place: when its thread waits for its group, at once, or some so and some so. A missing wait
// shows in the first, a copy to memory that is still read in the second.
enum class Copies { late, early, mixed };
void set_copies(Copies copies); // also CUDA_ON_CPU_COPIES=late|early|mixed
uint64_t copies_started();      // by kernels, until now
uint64_t cudnn_plans_asked();   // descriptions for which a plan was requested, until now

// Queues `work` on a stream like a kernel. Emulated libraries (a GEMM) run here: they can read and write device memory,
// and use threads.
void on_stream(cudaStream_t stream, const char *name, std::function<void()> work, Place place = Place::here());
// The same for work that waits for another process: `ready` is polled until it returns true.
void on_stream_when(cudaStream_t stream, const char *name, std::function<bool()> ready, std::function<void()> work,
                    Place place = Place::here());

// Ends the program with one line that names kernel, launch, block and thread.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---------------------------------------------------------------------------------------------------------------------
// indices of the running thread; one OS thread runs all threads, so these are plain variables

struct Position {
    uint3 thread, block;
    dim3 block_size, grid_size;
};
extern Position position;
#ifdef CUDA_ON_CPU_TSAN // in functions that hide them: switches order scheduler and threads
Position position_now();
void fence();
void before_atomic(volatile void *address);
void after_atomic(volatile void *address);
#endif

// ---------------------------------------------------------------------------------------------------------------------
// shared memory: on the heap, new and filled with 0xFF for each block

extern uint64_t block_serial; // of the running block, counted over all launches
void *dynamic_shared();

class SharedSite {
  public:
    void *array(size_t bytes, size_t alignment, const char *name) {
#ifndef CUDA_ON_CPU_TSAN
        if (serial == block_serial) return memory;
#endif
        return allocate(bytes, alignment, name);
    }

  private:
    void *allocate(size_t bytes, size_t alignment, const char *name);
    uint64_t serial = 0;
    void *memory = nullptr;
};

// ---------------------------------------------------------------------------------------------------------------------
// the launch

// grid or block, in 64 bits to report a count that a dim3 would truncate
struct Extent {
    long long x = 1, y = 1, z = 1;
    Extent(dim3 d) : x(d.x), y(d.y), z(d.z) {}
    template <class I, class = std::enable_if_t<std::is_integral<I>::value || std::is_enum<I>::value>>
    Extent(I n) : x((long long)n) {}
};
struct Launch {
    const char *kernel;
    const void *function;
    Place place;
    Extent grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};
void check_launch(const Launch &launch);
void check_pointer(const Launch &launch, int argument, const volatile void *pointer);
void launch_on_stream(const Launch &launch, std::function<void()> thread);
// If it is set, it gives what a thread runs instead of the kernel (dev/emulator/ptx). The parameters lie as CUDA passes
// them: each at a multiple of its alignment.
extern std::function<void()> (*replace_kernel)(const Launch &launch, const std::vector<char> &parameters);
template <class T> void append_parameter(std::vector<char> &all, const T &value) {
    all.resize((all.size() + alignof(T) - 1) / alignof(T) * alignof(T));
    const char *bytes = reinterpret_cast<const char *>(&value);
    all.insert(all.end(), bytes, bytes + sizeof(T));
}

template <class... P> class Launcher {
  public:
    Launcher(void (*function)(P...), const Launch &what) : kernel(function), launch(what) {}
    // Converts arguments to the parameter types of the kernel once; each thread has its own copies.
    template <class... A> void operator()(A &&...args) const {
        check_launch(launch);
        std::tuple<P...> values(std::forward<A>(args)...);
        std::apply(
            [this](const auto &...value) {
                int argument = 0;
                (check(++argument, value), ...);
            },
            values);
        if (replace_kernel) {
            std::vector<char> parameters;
            std::apply([&](const auto &...value) { (append_parameter(parameters, value), ...); }, values);
            launch_on_stream(launch, replace_kernel(launch, parameters));
            return;
        }
        void (*function)(P...) = kernel;
        launch_on_stream(launch, [function, values] { std::apply(function, values); });
    }

  private:
    template <class T> void check(int argument, const T &value) const {
        if constexpr (std::is_pointer<T>::value) check_pointer(launch, argument, value);
        else (void)argument, (void)value;
    }
    void (*kernel)(P...);
    Launch launch;
};
template <class... P>
Launcher<P...> launcher(void (*kernel)(P...), const char *name, Extent grid, Extent block, size_t shared_bytes,
                        cudaStream_t stream, Place place = Place::here()) {
    return {kernel, {name, reinterpret_cast<const void *>(kernel), place, grid, block, shared_bytes, stream}};
}

// ---------------------------------------------------------------------------------------------------------------------
// barriers and warp operations

void barrier(Place place);

enum class WarpOp { sync, shfl, shfl_up, shfl_xor, ballot, any, reduce_max };
uint64_t warp(WarpOp op, unsigned mask, uint64_t value, int argument, int width, Place place);
// all[i] = what lane i of the warp gives, of `bytes` bytes. Orders no memory, as a shuffle.
enum { EXCHANGE_BYTES = 32 };
void exchange(const void *own, size_t bytes, void *all, Place place = Place::here());

template <class T> T shuffle(WarpOp op, unsigned mask, T value, int argument, int width, Place place) {
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles move 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = warp(op, mask, bits, argument, width, place);
    memcpy(&value, &bits, sizeof(T));
    return value;
}

} // namespace cuda_on_cpu

// ---------------------------------------------------------------------------------------------------------------------
// the names that kernels use

#ifdef CUDA_ON_CPU_TSAN
#define CUDA_ON_CPU_POSITION cuda_on_cpu::position_now()
#else
#define CUDA_ON_CPU_POSITION cuda_on_cpu::position
#endif
#define threadIdx (CUDA_ON_CPU_POSITION.thread)
#define blockIdx (CUDA_ON_CPU_POSITION.block)
#define blockDim (CUDA_ON_CPU_POSITION.block_size)
#define gridDim (CUDA_ON_CPU_POSITION.grid_size)

#define CUDA_ON_CPU_PLACE cuda_on_cpu::Place place = cuda_on_cpu::Place::here()
inline void __syncthreads(CUDA_ON_CPU_PLACE) { cuda_on_cpu::barrier(place); }
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_ON_CPU_PLACE) {
    cuda_on_cpu::warp(cuda_on_cpu::WarpOp::sync, mask, 0, 0, 32, place);
}
template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::shuffle(cuda_on_cpu::WarpOp::shfl, mask, value, lane, width, place);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::shuffle(cuda_on_cpu::WarpOp::shfl_up, mask, value, (int)delta, width, place);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::shuffle(cuda_on_cpu::WarpOp::shfl_xor, mask, value, lane_mask, width, place);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_PLACE) {
    return (unsigned)cuda_on_cpu::warp(cuda_on_cpu::WarpOp::ballot, mask, predicate != 0, 0, 32, place);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_PLACE) {
    return (int)cuda_on_cpu::warp(cuda_on_cpu::WarpOp::any, mask, predicate != 0, 0, 32, place);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, CUDA_ON_CPU_PLACE) {
    return (unsigned)cuda_on_cpu::warp(cuda_on_cpu::WarpOp::reduce_max, mask, value, 0, 32, place);
}
#undef CUDA_ON_CPU_PLACE

// Calls with a kernel argument, which CUDA's header overloads only for nvcc.
template <class... P> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *of, void (*kernel)(P...)) {
    return cudaFuncGetAttributes(of, reinterpret_cast<const void *>(kernel));
}
template <class... P> cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

#include "device_math.h"
