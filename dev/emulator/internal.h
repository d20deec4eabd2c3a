/*
internal.h: the interfaces between the parts of the layer.

  scheduler.cpp   runs the threads of a launch as fibers: order, barriers, warp operations, messages
  streams.cpp     streams and events: the queues of launches
  memory.cpp      device memory: allocations, copies, access checks
  faults.cpp      signals and sanitizers: names the thread of a fault
  runtime.cpp     the rest of the CUDA runtime calls
*/
#pragma once

#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string>

namespace cuda_on_cpu {

// The limits of a kernel on all of sm_80, 90, 100 and 120: the smallest of each.
constexpr int max_block = 1024, multiprocessors = 2, threads_per_multiprocessor = 1536;
constexpr size_t shared_default = 48 << 10;
extern const size_t shared_limit; // on request

// scheduler.cpp
void run_grid(const Launch &launch, const std::function<void()> &thread);
bool in_kernel();
std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));
void report(const char *what); // one line on stderr
const char *
stack_fault(const volatile void *address); // the error if it is below the stack of the running thread, or nullptr
extern const char *stand_in;               // name of the running emulation (on_stream) or copy, for messages
extern Place stand_in_place;
int thread_number(); // of the running thread in its block
// The running thread waits until ready(), which is called until it is true once. The message of a deadlock contains
// what().
void wait_until(const std::function<bool()> &ready, const std::function<std::string()> &what);
extern bool (*when_idle)();  // no thread of the block can run: does asynchronous work; false: there is none
extern void (*block_ends)(); // all threads of the block have exited
bool lands_late();           // the next asynchronous copy, as set_copies selects it

// streams.cpp
void enqueue(cudaStream_t stream, std::function<void()> work);
void drain(cudaStream_t stream); // runs all its queued work, and the work that this waits for
void drain_all();

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
std::string describe_fault(const volatile void *address); // empty: not memory of this layer

// faults.cpp
void catch_faults();

// runtime.cpp
size_t dynamic_shared_limit(const void *kernel);
cudaError_t remember(cudaError_t error); // for cudaGetLastError of this thread
cudaError_t device_error();              // of a kernel that failed, and of every later call
cudaError_t enter(const char *call);     // begins a call that uses this thread's device; returns device_error()
bool planted_fault(const char *kernel);  // whether this launch fails, and the device with it
struct DeviceIdentity {
    int number, bus; // index among the devices of the machine, and bus of its GPU
};
DeviceIdentity device_identity(int device);
int current_device(); // of this thread

} // namespace cuda_on_cpu
