/*
async_copy.cuh: copies from device memory to shared memory that do not pass through registers (sm_80 and later).

  copy_async(to, from, valid)   16 bytes, both aligned to 16; zeros, and `from` is not read, if not valid
  copy_commit()                 the copies of this thread since the last commit are a group
  copy_wait<LEFT>()             until at most LEFT groups of this thread are under way. Other threads see the copies
                                after a barrier that follows
  source     PTX ISA, "cp.async"
*/
#pragma once
#include "kernel_utils.cuh"

static __device__ inline void copy_async(void *to, const void *from, bool valid) {
#ifdef CUDA_ON_CPU
    cuda_on_cpu::copy_async(to, from, valid);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}
static __device__ inline void copy_commit(void) {
#ifdef CUDA_ON_CPU
    cuda_on_cpu::copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int LEFT> static __device__ inline void copy_wait(void) {
#ifdef CUDA_ON_CPU
    cuda_on_cpu::copy_wait(LEFT);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
