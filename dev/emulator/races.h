/*
races.h: annotations for ThreadSanitizer, in builds with it; empty otherwise.

Each thread of a block is a fiber of TSan, so that two threads are ordered only by __syncthreads, __syncwarp, and a
fence before an atomic. Shuffles and votes order nothing. Blocks are ordered after the launch and before its end, but
not among each other. To create a fiber takes a millisecond, and TSan is fast with up to 255 of them. Therefore the
threads of later blocks reuse fibers, each with its own stack: a race between two blocks is not detected if both threads
had the same fiber.

The layer itself is compiled without instrumentation; Unseen hides the accesses of its calls into the C library.
*/
#pragma once

#include "device.h"

#ifdef CUDA_ON_CPU_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
}
#endif

namespace cuda_on_cpu {

#ifdef CUDA_ON_CPU_TSAN

constexpr bool finds_races = true;

struct Unseen {
    Unseen() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Unseen() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
};

// Synchronization objects of TSan; freeing them deletes their history.
struct BlockTokens {
    uint64_t barrier[2];         // two, used in turn: threads can enter the next while others leave the first
    uint64_t warp_group[32][64]; // of each warp, used in turn
};
struct GridTokens {
    uint64_t start, end;
};

static BlockTokens *block_tokens;
static GridTokens *grid_tokens;
static void *host_fiber, *fibers[1024];
static int fiber_count, fiber_shift, block_threads; // thread t of the block has fiber (t + shift) % count
static bool fenced[1024];                           // the thread has passed a fence since its last atomic

static inline int races_fiber(int t) { return (t + fiber_shift) % fiber_count; }

static inline void races_grid_begins(int threads) {
    host_fiber = __tsan_get_current_fiber();
    grid_tokens = new GridTokens;
    __tsan_release(&grid_tokens->start);
    block_threads = threads;
    fiber_count = max(threads, 240);
}
static inline void races_grid_ends() {
    __tsan_acquire(&grid_tokens->end);
    delete grid_tokens;
}
static inline void races_block_begins(uint64_t block) {
    block_tokens = new BlockTokens;
    fiber_shift = (int)(block * 37 % (uint64_t)fiber_count);
    for (int t = 0; t < block_threads; t++) {
        void **fiber = &fibers[races_fiber(t)];
        if (!*fiber) *fiber = __tsan_create_fiber(0);
        fenced[t] = false;
    }
}
static inline void races_block_ends() { delete block_tokens; }
static inline void races_become(int t) {
    __tsan_switch_to_fiber(t < 0 ? host_fiber : fibers[races_fiber(t)], __tsan_switch_to_fiber_no_sync);
}
static inline void races_release(void *token) { __tsan_release(token); }
static inline void races_acquire(void *token) { __tsan_acquire(token); }
static inline void races_thread_begins() { __tsan_acquire(&grid_tokens->start); }
static inline void races_thread_ends() { __tsan_release(&grid_tokens->end); }
#define RACES_TOKEN(member) (&block_tokens->member)

#else

constexpr bool finds_races = false;
struct Unseen {
    Unseen() {}
};
static inline void races_grid_begins(int) {}
static inline void races_grid_ends() {}
static inline void races_block_begins(uint64_t) {}
static inline void races_block_ends() {}
static inline int races_fiber(int) { return 0; }
static inline void races_thread_begins() {}
static inline void races_thread_ends() {}
static inline void races_become(int) {}
static inline void races_release(void *) {}
static inline void races_acquire(void *) {}
#define RACES_TOKEN(member) nullptr

#endif

} // namespace cuda_on_cpu
