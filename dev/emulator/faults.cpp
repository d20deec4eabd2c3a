/*
faults.cpp: a fault in a kernel (a signal, a failed assertion or a report of a sanitizer) ends the program with a line
that names kernel, launch, block and thread. Faults of the host are not handled here, except for accesses to device
memory. A block that takes more than CUDA_ON_CPU_TIMEOUT seconds of CPU time (300; 0: no limit) counts as an endless
loop.
*/
#include "internal.h"
#include <signal.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>
#if defined(CUDA_ON_CPU_ASAN) || defined(CUDA_ON_CPU_TSAN)
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_on_cpu {
namespace {

void sanitizer_reports() {
    if (in_kernel() || stand_in) report("stopped by a sanitizer, whose report is beside this line");
}

#if defined(CUDA_ON_CPU_ASAN) || defined(CUDA_ON_CPU_TSAN)

void prepare_process() { __sanitizer_set_death_callback(sanitizer_reports); }
void prepare_os_thread() {}

#else

// Handlers run on a stack of their own: the fault may be that the stack is full.
void prepare_os_thread() {
    static thread_local char stack[64 << 10];
    stack_t s = {};
    s.ss_sp = stack;
    s.ss_size = sizeof(stack);
    sigaltstack(&s, nullptr);
}

void handle(int number, siginfo_t *info, void *) {
    signal(number, SIG_DFL); // what follows may fault again, or returns to the faulting instruction
    std::string what;
    if (number == SIGSEGV || number == SIGBUS) what = describe_fault(info->si_addr);
    if (what.empty()) {
        if (!in_kernel() && !stand_in) return;
        what = number == SIGFPE    ? "integer division by zero, or overflow of a division"
               : number == SIGABRT ? "aborted"
                                   : std::string("signal ") + strsignal(number);
    }
    report(what.c_str());
    if (number != SIGABRT) _exit(1); // abort() goes on to end the program itself
}

void prepare_process() {
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
        struct sigaction old, action = {};
        if (sigaction(number, nullptr, &old) || old.sa_handler != SIG_DFL) continue; // the program has its own
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(number, &action, nullptr);
    }
}

#endif
// Once per second of the process's CPU time: does the same block still run?
int timeout_seconds, seconds_of_block;
uint64_t block_of_last_tick;
void tick(int) {
    if (!in_kernel() || block_serial != block_of_last_tick) seconds_of_block = 0;
    block_of_last_tick = block_serial;
    if (++seconds_of_block <= timeout_seconds) return;
    report("this block does not end: a loop without an end, or one that waits for another thread or block");
    _exit(1);
}
void watch_time() {
    const char *text = getenv("CUDA_ON_CPU_TIMEOUT");
    timeout_seconds = text && *text ? atoi(text) : 300;
    if (timeout_seconds <= 0) return;
    struct sigaction action = {};
    action.sa_handler = tick;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    sigaction(SIGVTALRM, &action, nullptr);
    const struct itimerval every_second = {{1, 0}, {1, 0}};
    setitimer(ITIMER_VIRTUAL, &every_second, nullptr);
}

} // namespace

void catch_faults() {
    static bool done;
    static thread_local bool thread_done;
    if (!done) prepare_process();
    if (!done) watch_time();
    if (!thread_done) prepare_os_thread();
    done = thread_done = true;
}

} // namespace cuda_on_cpu

#ifdef CUDA_ON_CPU_TSAN
extern "C" const char *__tsan_default_options(void) { return "halt_on_error=1"; } // the line names the thread of now
#endif

// UndefinedBehaviorSanitizer calls this before each of its reports; it has its own library, which the callback above is
// not for.
extern "C" void __ubsan_on_report(void) { cuda_on_cpu::sanitizer_reports(); }
