/*
races.h: what ThreadSanitizer is told, in builds with it; nothing otherwise.

Each thread of a block runs as a TSan fiber of its own, so that two threads are ordered only by what CUDA orders:
__syncthreads and __syncwarp, and a fence before an atomic. Shuffles and votes order nothing. Blocks are ordered after the
host's launch and before its end, not with each other. Making a fiber takes a millisecond, so they are used again, in turns:
a race between two threads that have the same number within their block, some blocks apart, is missed.

The layer itself is compiled without instrumentation; what its calls into the C library touch is hidden by Unseen.
Memory whose history must be forgotten, such as a stack that another thread has used, is mapped anew.
*/
#ifndef CUDA_ON_CPU_RACES_H
#define CUDA_ON_CPU_RACES_H

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

// Places that hold orderings; their history goes when they are freed.
struct BlockTokens {
    uint64_t barrier[2];         // in turns: one may still be left while the next is entered
    uint64_t warp_group[32][64]; // of each warp, in turns
};
struct GridTokens {
    uint64_t start, end;
};

static BlockTokens *block_tokens;
static GridTokens *grid_tokens;
enum { FIBERS = 256 }; // and twice a block where that is more
static void *host_fiber, *fibers[2 * 1024];
static int first_fiber, fiber_sets, block_threads;
static bool fenced[1024]; // the thread has passed a fence since its last atomic

static inline void races_grid_begins(int threads) {
    host_fiber = __tsan_get_current_fiber();
    grid_tokens = new GridTokens;
    __tsan_release(&grid_tokens->start);
    block_threads = threads;
    fiber_sets = max(2, FIBERS / threads);
    for (int i = 0; i < fiber_sets * threads; i++)
        if (!fibers[i]) fibers[i] = __tsan_create_fiber(0);
}
static inline void races_grid_ends() {
    __tsan_acquire(&grid_tokens->end);
    delete grid_tokens;
}
static inline void races_block_begins(uint64_t block) {
    block_tokens = new BlockTokens;
    first_fiber = (int)(block % (uint64_t)fiber_sets) * block_threads;
    for (int t = 0; t < block_threads; t++) fenced[t] = false;
}
static inline void races_block_ends() { delete block_tokens; }
static inline void races_become(int t) { __tsan_switch_to_fiber(t < 0 ? host_fiber : fibers[first_fiber + t], __tsan_switch_to_fiber_no_sync); }
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
static inline void races_thread_begins() {}
static inline void races_thread_ends() {}
static inline void races_become(int) {}
static inline void races_release(void *) {}
static inline void races_acquire(void *) {}
#define RACES_TOKEN(member) nullptr

#endif

} // namespace cuda_on_cpu
#endif
