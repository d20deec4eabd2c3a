/*
launch.cuh: kernel launches and shared memory, in the GPU build and in the build that runs kernels on the CPU
(dev/emulator, selected by CUDA_ON_CPU). Kernel files do not distinguish the two.

  LAUNCH(kernel, grid, block, shared_bytes, args...)   on the stream `main_stream`; a failed launch ends the program
  LAUNCH_ON(stream, kernel, ...)                       on another stream
  SHARED(type, name, count);                           type name[count], shared by the block, not initialized
  DYNAMIC_SHARED(type, name);                          type *name: the shared_bytes of the launch, 16-byte aligned

A kernel that is a template is written in parentheses: LAUNCH((kernel<float, 4>), grid, block, 0, x). grid and block are
integers or dim3. Null pointers among the arguments are written nullptr. shared_bytes above 48 KiB require one call of
LAUNCH_ALLOW_SHARED(kernel, bytes) before. A SHARED array has the alignment of its type: 16-byte accesses require a
16-byte type.
*/
#pragma once
#include "../base/common.h"
#include <cuda_runtime.h>
#if !defined(CUDA_ON_CPU) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else
#define nvtxRangePushA(name) ((void)(name))
#define nvtxRangePop() ((void)0)
#endif

// OPERATION() is the first statement of each CUDA operation. It names a range after the function, which Nsight shows. A
// program that measures operations defines OPERATION_HOOK(name) before it includes any header of llmc/ops or llmc/cuda;
// the hook is called with the name at the beginning and with NULL at the end. It is empty in the trainer.
#ifndef OPERATION_HOOK
#define OPERATION_HOOK(name) ((void)(name))
#endif
struct OperationRange {
    explicit OperationRange(const char *name) {
        nvtxRangePushA(name);
        OPERATION_HOOK(name);
    }
    ~OperationRange() {
        OPERATION_HOOK((const char *)NULL);
        nvtxRangePop();
    }
};
#define OPERATION() const OperationRange operation_range(__func__)

// Errors of kernels (illegal or misaligned addresses and the like) are reported by a later call.
static inline const char *launch_remark(cudaError_t error) {
    bool late = error >= cudaErrorIllegalAddress && error <= cudaErrorLaunchFailure;
    return late ? "; an earlier kernel may be the cause; CUDA_LAUNCH_BLOCKING=1 identifies it" : "";
}

#define LAUNCH_CHECK(call, kernel_name)                                                                                \
    do {                                                                                                               \
        cudaError_t launch_error = (call);                                                                             \
        if (launch_error == cudaErrorMemoryAllocation) out_of_memory("device memory", 0, kernel_name, "");             \
        CHECK(launch_error == cudaSuccess, "%s:%d: kernel %s was not launched: %s%s", __FILE__, __LINE__, kernel_name, \
              cudaGetErrorString(launch_error), launch_remark(launch_error));                                          \
    } while (0)
#define LAUNCH_ALLOW_SHARED(kernel, bytes) \
    LAUNCH_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)), #kernel)

#ifdef CUDA_ON_CPU

#include <emulator/device.h>
#define LAUNCH_ON(stream, kernel, grid, block, shared_bytes, ...)                               \
    do {                                                                                        \
        cuda_on_cpu::launcher(kernel, #kernel, grid, block, shared_bytes, stream)(__VA_ARGS__); \
        LAUNCH_CHECK(cudaGetLastError(), #kernel);                                              \
    } while (0)
#define SHARED(type, name, count)               \
    static cuda_on_cpu::SharedSite name##_site; \
    type(&name)[count] = *static_cast<type(*)[count]>(name##_site.array(sizeof(type[count]), alignof(type), #name))
#define DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(cuda_on_cpu::dynamic_shared())

#else

#define LAUNCH_ON(stream, kernel, grid, block, shared_bytes, ...)           \
    do {                                                                    \
        kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__); \
        LAUNCH_CHECK(cudaGetLastError(), #kernel);                          \
    } while (0)
#define SHARED(type, name, count) __shared__ type name[count]
// one declaration for all types, since templates of one file may use different types
#define DYNAMIC_SHARED(type, name)                   \
    extern __shared__ uint4 launch_dynamic_shared[]; \
    type *name = reinterpret_cast<type *>(launch_dynamic_shared)

#endif
#define LAUNCH(kernel, grid, block, shared_bytes, ...) \
    LAUNCH_ON(main_stream, kernel, grid, block, shared_bytes, __VA_ARGS__)
