/*
fiber.h: threads of control that switch by hand, on one OS thread. On x86-64 a switch is a few instructions that
exchange the stack pointer and the registers a callee preserves; elsewhere (or with CUDA_ON_CPU_UCONTEXT) it is
swapcontext, which also makes a system call. AddressSanitizer is told of every switch, or it would take the new stack
for an overflow.

Stacks have 256 KiB of lazily mapped memory, with an inaccessible page below.
*/
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#if !defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
#define CUDA_ON_CPU_UCONTEXT 1
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
#include <ucontext.h>
#endif

#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_on_cpu {

constexpr size_t stack_bytes = 256 << 10, guard_bytes = 4096;

struct Fiber {
#ifdef CUDA_ON_CPU_UCONTEXT
    ucontext_t context;
#else
    void *stack_pointer = nullptr;
#endif
    const void *stack = nullptr; // lowest address; for the stack of the OS thread: known after the first switch
    size_t size = 0;
    void *fake_stack = nullptr; // AddressSanitizer's
};

#ifndef CUDA_ON_CPU_UCONTEXT
// Saves the callee-saved registers and the stack pointer, and continues where `to` stopped.
extern "C" void cuda_on_cpu_switch(void **from, void *to);
asm(R"(
    .text
    .globl cuda_on_cpu_switch
    .type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
#endif

// A fiber calls this first after a switch to it; `from` is the previous fiber.
static inline void fiber_arrived(Fiber *self, Fiber *from) {
#ifdef CUDA_ON_CPU_ASAN
    __sanitizer_finish_switch_fiber(self->fake_stack, &from->stack, &from->size);
#else
    (void)self, (void)from;
#endif
}

static inline void fiber_switch(Fiber *from, Fiber *to) {
#ifdef CUDA_ON_CPU_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->size);
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
    swapcontext(&from->context, &to->context);
#else
    cuda_on_cpu_switch(&from->stack_pointer, to->stack_pointer);
#endif
}

// A fiber that calls entry(), which never returns. nullptr: out of memory.
static inline Fiber *fiber_create(void (*entry)()) {
    char *stack = (char *)mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED) return nullptr;
    mprotect(stack, guard_bytes, PROT_NONE);
    // Stacks begin in different lines of a page: in the same one, they would compete for a few sets of the cache.
    static size_t created;
    Fiber *f = new Fiber;
    f->stack = stack + guard_bytes;
    f->size = stack_bytes - created++ % 64 * 64;
#ifdef CUDA_ON_CPU_UCONTEXT
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = (void *)f->stack;
    f->context.uc_stack.ss_size = f->size;
    f->context.uc_link = nullptr;
    makecontext(&f->context, entry, 0);
#else
    // From the top: no return address, where backtraces end; the entry, to which the first switch returns, so that it
    // begins with the stack at 8 modulo 16 as after a call; six registers, all 0.
    void **top = (void **)((char *)f->stack + f->size) - 4;
    top[0] = (void *)entry;
    f->stack_pointer = top - 6;
#endif
    return f;
}

} // namespace cuda_on_cpu
