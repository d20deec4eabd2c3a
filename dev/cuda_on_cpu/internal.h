/*
internal.h: what the parts of the layer know of each other.

  scheduler.cpp   runs the threads of a launch as fibers: order, barriers, warp operations, messages
  streams.cpp     streams and events: the queues in front of it
  memory.cpp      device memory: allocations, copies, who may touch what
  faults.cpp      signals and sanitizers: which thread it was
  runtime.cpp     the rest of the CUDA runtime calls
*/
#ifndef CUDA_ON_CPU_INTERNAL_H
#define CUDA_ON_CPU_INTERNAL_H

#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string>

namespace cuda_on_cpu {

// What a kernel may use on all of sm_80, 90, 100 and 120: the least of them.
constexpr int max_block = 1024, multiprocessors = 2, threads_per_multiprocessor = 1536;
constexpr size_t shared_default = 48 << 10, shared_limit = 99 << 10;

// scheduler.cpp
void run_grid(const Launch &launch, const std::function<void()> &thread);
bool in_kernel();
void report(const char *what); // one line on stderr
const char *
stack_fault(const volatile void *address); // what is wrong when it is below the running thread's stack, or nullptr
extern const char *stand_in;               // name of the stand-in (on_stream) or copy that is running, for messages
extern Place stand_in_place;

// streams.cpp
void enqueue(cudaStream_t stream, std::function<void()> work);
void drain(cudaStream_t stream); // runs all that is queued on it, and what that waits for
void drain_all();
void drain_for_blocking_call(); // what a call without a stream waits for

// memory.cpp
enum class Memory { unknown, device, pinned, freed };
struct Found {
    Memory kind;
    const char *base;
    size_t bytes;
};
Found find_memory(const volatile void *pointer);
void open_device_memory();                                // the device runs: device memory is accessible
void close_device_memory();                               // the host runs again
size_t device_bytes();                                    // of the device's memory
std::string describe_fault(const volatile void *address); // empty: no memory of the layer's

// faults.cpp
void catch_faults();

// runtime.cpp
size_t dynamic_shared_limit(const void *kernel);
cudaError_t remember(cudaError_t error); // for cudaGetLastError of this thread
cudaError_t device_error();              // of a kernel that has failed: of every later call too
cudaError_t enter(const char *call);     // begins a call that uses this thread's device; returns device_error()
bool planted_fault(const char *kernel);  // whether this launch fails, and the device with it
struct DeviceIdentity {
    int number, bus; // of the machine's devices, and of the GPU that it is a part of
};
DeviceIdentity device_identity(int device);
int current_device(); // of this thread

} // namespace cuda_on_cpu
#endif
