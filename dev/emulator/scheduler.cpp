/*
scheduler.cpp: the threads of a block as fibers.

A fiber whose thread finishes runs the next thread that has not started, on the same stack, so that a kernel without
barriers never switches. A fiber whose thread waits switches to the next thread that can run: lanes of its own warp
first (a warp runs until it blocks), then the next warp in order. If no thread can run, either all threads are at the
barrier, which then opens, or the kernel is in a deadlock. The lanes of a warp that can run are a mask with bit i for
the i-th lane in the order, so that the lowest bit is the next lane in any order.

A warp operation waits for all lanes of its mask; the last lane to arrive computes the results of all. A lane that reads
from a lane that has exited or is not in the mask gets 0xFF bytes, a NaN.
*/
#include "internal.h"
#include "fiber.h"
#include "races.h"
#include <stdarg.h>
#include <string>
#include <unistd.h>
#include <vector>

namespace cuda_on_cpu {

Position position;
uint64_t block_serial;
const char *stand_in;
Place stand_in_place;
bool (*when_idle)();
void (*block_ends)();

namespace {

enum class State : uint8_t { fresh, ready, at_barrier, in_warp, waiting, exited };
constexpr uint64_t poison = ~(uint64_t)0;

struct Thread {
    State state;
    Fiber *fiber; // nullptr: not started, or finished
    WarpOp op;
    unsigned mask;
    int argument, width;
    uint64_t value; // in: the operand; out: the result
    Place place;    // where it waits
};
struct Group { // lanes that wait with the same mask
    unsigned mask, arrived, number;
};
struct Warp {
    unsigned ready;   // by rank
    unsigned present; // lanes that exist and have not exited
    uint8_t lane_of[32], rank_of[32];
    int group_count;
    unsigned meetings;
    Group groups[32];
};

// the running launch and block
const Launch *launch;
const std::function<void()> *body;
int thread_count, warp_count;
Thread threads[max_block];
uint3 thread_index[max_block];
Warp warps[max_block / 32];
int warp_order[max_block / 32], warp_position;
int current, live, at_barrier;
Place barrier_place;
unsigned barrier_number;
struct Waiting {
    int thread;
    const std::function<bool()> *ready;
    const std::function<std::string()> *what;
};
std::vector<Waiting> waiting;

Fiber host, *running = &host, *came_from = &host;
Fiber *idle[max_block + 1];
int idle_count;
Fiber *own[finds_races ? max_block : 1]; // for ThreadSanitizer: those of its fibers

// shared memory of the block
struct Shared {
    void *memory;
};
std::vector<Shared> shared;
void *dynamic_memory;
size_t shared_used;

// ---------------------------------------------------------------------------------------------------------------------
// order

Order order = Order::forward;
Copies copies = Copies::late;
uint64_t order_seed = 1, random_state = 1;

uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}
template <class T> void permute(T *items, int count) {
    for (int i = 0; i < count; i++) items[i] = (T)(order == Order::reverse ? count - 1 - i : i);
    if (order != Order::shuffled) return;
    for (int i = count - 1; i > 0; i--) std::swap(items[i], items[random_below((uint32_t)i + 1)]);
}

void read_environment() {
    static bool done;
    if (done) return;
    done = true;
    const char *text = getenv("CUDA_ON_CPU_COPIES");
    if (text && !strcmp(text, "early")) copies = Copies::early;
    else if (text && !strcmp(text, "mixed")) copies = Copies::mixed;
    else if (text && *text && strcmp(text, "late"))
        fail("CUDA_ON_CPU_COPIES is '%s': late, early or mixed is expected", text);
    text = getenv("CUDA_ON_CPU_ORDER");
    if (!text || !*text) return;
    char *end = nullptr;
    if (!strcmp(text, "forward")) order = Order::forward;
    else if (!strcmp(text, "reverse")) order = Order::reverse;
    else if (!strcmp(text, "shuffled")) order = Order::shuffled;
    else if (!strncmp(text, "shuffled:", 9) && text[9] >= '0' && text[9] <= '9') {
        order = Order::shuffled;
        order_seed = strtoull(text + 9, &end, 10);
        if (*end) fail("CUDA_ON_CPU_ORDER is '%s': the seed after shuffled: is a number", text);
    } else fail("CUDA_ON_CPU_ORDER is '%s': forward, reverse, shuffled or shuffled:SEED is expected", text);
    random_state = order_seed;
}

// ---------------------------------------------------------------------------------------------------------------------
// messages

const char *op_name(WarpOp op) {
    static const char *const names[] = {"__syncwarp",    "__shfl_sync", "__shfl_up_sync",   "__shfl_xor_sync",
                                        "__ballot_sync", "__any_sync",  "__reduce_max_sync"};
    return names[(int)op];
}
std::string thread_name(int t) { return text("(%u,%u,%u)", thread_index[t].x, thread_index[t].y, thread_index[t].z); }
std::string waits_in(const Thread &t) {
    switch (t.state) {
    case State::at_barrier: return text("at __syncthreads in %s:%d", t.place.file, t.place.line);
    case State::in_warp:
        return text("in %s with mask 0x%08x in %s:%d", op_name(t.op), t.mask, t.place.file, t.place.line);
    case State::waiting:
        for (const Waiting &w : waiting)
            if (&threads[w.thread] == &t) return (*w.what)();
        return "";
    case State::exited: return "exited";
    default: return "able to run";
    }
}

// One line with the places where threads wait: threads of one place together, with the first thread of each.
std::string who_waits_where() {
    std::vector<std::pair<std::string, std::pair<int, int>>> kinds; // what, how many, first thread
    for (int t = 0; t < thread_count; t++) {
        std::string what = waits_in(threads[t]);
        size_t k = 0;
        while (k < kinds.size() && kinds[k].first != what) k++;
        if (k == kinds.size()) kinds.push_back({what, {0, t}});
        kinds[k].second.first++;
    }
    std::string all;
    for (size_t k = 0; k < kinds.size() && k < 6; k++)
        all += text("%s%d %s (first %s)", k ? ", " : "", kinds[k].second.first, kinds[k].first.c_str(),
                    thread_name(kinds[k].second.second).c_str());
    if (kinds.size() > 6) all += text(", and %zu more kinds", kinds.size() - 6);
    return all;
}

[[noreturn]] void hang() {
    bool in_warp = false;
    for (int t = 0; t < thread_count; t++)
        if (threads[t].state == State::in_warp) current = t, in_warp = true;
    fail("%s: of %d threads %s", in_warp ? "deadlock, a lane mask is not met" : "deadlock", thread_count,
         who_waits_where().c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// who runs next

void make_ready(Warp &w, int warp_index, int lane) {
    threads[warp_index * 32 + lane].state = State::ready;
    w.ready |= 1u << w.rank_of[lane];
}

void order_warps() {
    permute(warp_order, warp_count);
    warp_position = 0;
}
void order_lanes(Warp &w) {
    permute(w.lane_of, 32);
    for (int rank = 0; rank < 32; rank++) w.rank_of[w.lane_of[rank]] = (uint8_t)rank;
}

void open_barrier() {
    if (live < thread_count)
        fail("divergent barrier: __syncthreads in %s:%d is reached by %d of %d threads, the others have exited",
             barrier_place.file, barrier_place.line, live, thread_count);
    at_barrier = 0;
    barrier_number++;
    order_warps();
    for (int i = 0; i < warp_count; i++) {
        order_lanes(warps[i]);
        for (unsigned lanes = warps[i].present; lanes; lanes &= lanes - 1)
            make_ready(warps[i], i, __builtin_ctz(lanes));
    }
}

// Whether a thread of wait_until can continue.
bool wake() {
    size_t before = waiting.size(), left = 0;
    for (const Waiting &w : waiting)
        if ((*w.ready)()) make_ready(warps[w.thread / 32], w.thread / 32, w.thread % 32);
        else waiting[left++] = w;
    waiting.resize(left);
    if (left < before) order_warps();
    return left < before;
}

// The next thread to run, or -1 at the end of the block.
int next_thread() {
    for (;;) {
        for (; warp_position < warp_count; warp_position++) {
            Warp &w = warps[warp_order[warp_position]];
            if (!w.ready) continue;
            int rank = __builtin_ctz(w.ready);
            w.ready &= w.ready - 1;
            return warp_order[warp_position] * 32 + w.lane_of[rank];
        }
        if (live == 0) return -1;
        if (wake()) continue;
        if (at_barrier == live) open_barrier();
        else if (!when_idle || !when_idle()) hang();
    }
}

void become(int t) {
    current = t;
    position.thread = thread_index[t];
    races_become(t);
}

void fiber_main();

// The fiber of thread t: its own, or a new one.
Fiber *fiber_of(int t) {
    if (threads[t].fiber) return threads[t].fiber;
    Unseen unseen;
    Fiber *f = finds_races ? own[races_fiber(t)] : idle_count ? idle[--idle_count] : nullptr;
    if (!f && !(f = fiber_create(fiber_main))) fail("no memory for the stack of a thread");
    if (finds_races) own[races_fiber(t)] = f;
    return f;
}

void go_to(Fiber *to) {
    Fiber *self = running;
    came_from = self;
    running = to;
    fiber_switch(self, to);
    fiber_arrived(self, came_from);
}

// Blocks the current thread; returns when it can continue.
void wait() {
    threads[current].fiber = running;
    int next = next_thread();
    if (next == current) return become(next);
    Fiber *to = fiber_of(next);
    become(next);
    go_to(to);
}

void compute(Warp &w, int warp_index, Group group);
void meet(Warp &w, int warp_index, Group &group) {
    Group complete = group;
    group = w.groups[--w.group_count];
    compute(w, warp_index, complete);
}

void exit_thread() {
    Thread &t = threads[current];
    t.state = State::exited;
    t.fiber = nullptr;
    live--;
    int warp_index = current / 32;
    Warp &w = warps[warp_index];
    w.present &= ~(1u << current % 32);
    for (int i = 0; i < w.group_count; i++) // those that waited for this lane as well
        if (!(w.groups[i].mask & w.present & ~w.groups[i].arrived)) meet(w, warp_index, w.groups[i--]);
}

// Runs threads one after another on its stack; idle while one of them waits.
void fiber_main() {
    fiber_arrived(running, came_from);
    for (;;) {
        races_thread_begins();
        (*body)();
        races_thread_ends();
        exit_thread();
        int next = next_thread();
        if (next >= 0 && !threads[next].fiber && !finds_races) {
            become(next);
            continue;
        }
        Fiber *to = next >= 0 ? fiber_of(next) : &host;
        if (!finds_races) idle[idle_count++] = running;
        if (next >= 0) become(next);
        else races_become(-1);
        go_to(to);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// warp operations

// The source lane of PTX's shfl for this lane; the lane itself if the source is outside of its segment.
int source_lane(WarpOp op, int lane, int argument, int width) {
    int first = lane & ~(width - 1), last = first + width - 1, by = argument & 31, from;
    switch (op) {
    case WarpOp::shfl: return first + (argument & (width - 1));
    case WarpOp::shfl_up: from = lane - by; return from >= first ? from : lane;
    default: from = lane ^ by; return from <= last ? from : lane;
    }
}

void compute(Warp &w, int warp_index, Group group) {
    Thread *lanes = &threads[warp_index * 32];
    uint64_t in[32];
    unsigned ballot = 0, most = 0;
    WarpOp op = lanes[__builtin_ctz(group.arrived)].op;
    for (int lane = 0; lane < 32; lane++) {
        in[lane] = poison;
        if (!(group.arrived >> lane & 1)) continue;
        in[lane] = lanes[lane].value;
        unsigned x = (unsigned)in[lane];
        if (x) ballot |= 1u << lane;
        most = max(most, x);
    }
    for (unsigned left = group.arrived; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        Thread &t = lanes[lane];
        switch (op) {
        case WarpOp::sync: break;
        case WarpOp::ballot: t.value = ballot; break;
        case WarpOp::any: t.value = ballot != 0; break;
        case WarpOp::reduce_max: t.value = most; break;
        default: t.value = in[source_lane(op, lane, t.argument, t.width)];
        }
        make_ready(w, warp_index, lane);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// blocks

void *poisoned(size_t bytes, size_t alignment) {
    // 16-byte aligned memory, offset so that an array has the alignment of its type and no more
    size_t shift = alignment < 16 ? alignment : 0, around = alignment > 16 ? alignment : 16;
    void *p = nullptr;
    Unseen unseen;
    if (posix_memalign(&p, around, bytes + shift)) fail("no memory for %zu bytes of shared memory", bytes);
    memset(p, 0xFF, bytes + shift);
    shared.push_back({p});
    return (char *)p + shift;
}
void use_shared(size_t bytes, const char *name) {
    shared_used += bytes;
    if (shared_used - launch->shared_bytes > shared_default)
        fail("shared arrays up to %s take %zu bytes, of which a block has %zu", name,
             shared_used - launch->shared_bytes, shared_default);
    if (shared_used > max(shared_default, dynamic_shared_limit(launch->function)))
        fail("shared arrays up to %s and %zu bytes of dynamic shared memory take %zu bytes, of which a block has %zu",
             name, launch->shared_bytes, shared_used, max(shared_default, dynamic_shared_limit(launch->function)));
}

void run_block() {
    block_serial++;
    live = thread_count;
    at_barrier = 0;
    shared_used = launch->shared_bytes;
    for (int t = 0; t < thread_count; t++) threads[t].state = State::fresh, threads[t].fiber = nullptr;
    for (int i = 0; i < warp_count; i++) {
        Warp &w = warps[i];
        int lanes = thread_count - i * 32;
        w.present = lanes >= 32 ? ~0u : (1u << lanes) - 1;
        w.ready = 0;
        w.group_count = 0;
        w.meetings = 0;
        order_lanes(w);
        for (unsigned left = w.present; left; left &= left - 1) w.ready |= 1u << w.rank_of[__builtin_ctz(left)];
    }
    order_warps();
    races_block_begins(block_serial);
    int first = next_thread();
    Fiber *to = fiber_of(first);
    become(first);
    go_to(to);
    if (block_ends) block_ends();
    races_block_ends();
    Unseen unseen;
    for (Shared &s : shared) free(s.memory);
    shared.clear();
    dynamic_memory = nullptr;
}

// A number coprime to n: its multiples modulo n visit all blocks.
uint64_t coprime_below(uint64_t n) {
    for (;;) {
        uint64_t a = 1 + random_below((uint32_t)(n < 1u << 30 ? n : 1u << 30)), x = a, y = n;
        while (y) {
            uint64_t z = x % y;
            x = y;
            y = z;
        }
        if (x == 1) return a;
    }
}

} // namespace

// ---------------------------------------------------------------------------------------------------------------------

void set_order(Order wanted, uint64_t seed) {
    read_environment(); // which the call overrides
    order = wanted;
    order_seed = random_state = seed;
}

void set_copies(Copies wanted) {
    read_environment(); // which the call overrides
    copies = wanted;
}

bool in_kernel() { return launch != nullptr; }

int thread_number() { return current; }

std::string text(const char *format, ...) {
    char buffer[512];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof(buffer), format, args);
    va_end(args);
    return buffer;
}

void wait_until(const std::function<bool()> &ready, const std::function<std::string()> &what) {
    if (ready()) return;
    threads[current].state = State::waiting;
    waiting.push_back({current, &ready, &what});
    wait();
}

void report(const char *what) {
    std::string where;
    if (launch)
        where = text("kernel %s launched in %s:%d, block (%u,%u,%u), thread %s: ", launch->kernel, launch->place.file,
                     launch->place.line, position.block.x, position.block.y, position.block.z,
                     thread_name(current).c_str());
    else if (stand_in) where = text("%s in %s:%d: ", stand_in, stand_in_place.file, stand_in_place.line);
    fprintf(stderr, "CUDA on the CPU: %s%s\n", where.c_str(), what);
}

void fail(const char *format, ...) {
    char what[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    fflush(stdout);
    report(what);
    fflush(nullptr);
    _exit(1);
}

const char *stack_fault(const volatile void *address) {
    const char *bottom = (const char *)running->stack, *p = (const char *)address;
    if (!launch || running == &host || p >= bottom || p < bottom - guard_bytes) return nullptr;
    return "a thread's stack is full (256 KiB)";
}

void run_grid(const Launch &what, const std::function<void()> &thread) {
    read_environment();
    catch_faults();
    launch = &what;
    body = &thread;
    dim3 g((unsigned)what.grid.x, (unsigned)what.grid.y, (unsigned)what.grid.z);
    dim3 b((unsigned)what.block.x, (unsigned)what.block.y, (unsigned)what.block.z);
    position.grid_size = g;
    position.block_size = b;
    thread_count = (int)(b.x * b.y * b.z);
    warp_count = (thread_count + 31) / 32;
    for (int t = 0; t < thread_count; t++)
        thread_index[t] = {(unsigned)t % b.x, (unsigned)t / b.x % b.y, (unsigned)t / (b.x * b.y)};
    races_grid_begins(thread_count);
    uint64_t blocks = (uint64_t)g.x * g.y * g.z;
    uint64_t step = order == Order::shuffled ? coprime_below(blocks) : 1,
             start = order == Order::shuffled ? random_below((uint32_t)(blocks < 1u << 30 ? blocks : 1u << 30)) : 0;
    for (uint64_t i = 0, at = start; i < blocks; i++, at = (at + step) % blocks) {
        uint64_t block = order == Order::reverse ? blocks - 1 - i : at;
        position.block = {(unsigned)(block % g.x), (unsigned)(block / g.x % g.y), (unsigned)(block / g.x / g.y)};
        run_block();
    }
    races_grid_ends();
    launch = nullptr;
}

void barrier(Place place) {
    if (at_barrier == 0) barrier_place = place;
    else if (barrier_place.line != place.line ||
             (barrier_place.file != place.file && strcmp(barrier_place.file, place.file)))
        fail("divergent barrier: this thread is at __syncthreads in %s:%d, others at the one in %s:%d", place.file,
             place.line, barrier_place.file, barrier_place.line);
    at_barrier++;
    Thread &t = threads[current];
    t.state = State::at_barrier;
    t.place = place;
    void *token = RACES_TOKEN(barrier[barrier_number % 2]);
    races_release(token);
    wait();
    races_acquire(token);
}

uint64_t warp(WarpOp op, unsigned mask, uint64_t value, int argument, int width, Place place) {
    int warp_index = current / 32, lane = current % 32;
    Warp &w = warps[warp_index];
    Thread &t = threads[current];
    t.state = State::in_warp;
    t.op = op, t.mask = mask, t.value = value, t.argument = argument, t.width = width, t.place = place;
    if (!(mask >> lane & 1))
        fail("wrong lane mask: lane %d calls %s with mask 0x%08x, which does not name it, in %s:%d", lane, op_name(op),
             mask, place.file, place.line);
    if (width < 1 || width > 32 || (width & (width - 1)))
        fail("%s has width %d, not a power of two up to 32, in %s:%d", op_name(op), width, place.file, place.line);
    int i = 0;
    while (i < w.group_count && w.groups[i].mask != mask) i++;
    if (i == w.group_count) w.groups[w.group_count++] = {mask, 0, w.meetings++};
    else {
        const Thread &other = threads[warp_index * 32 + __builtin_ctz(w.groups[i].arrived)];
        if (other.op != op)
            fail("lanes with mask 0x%08x meet at different operations: lane %d at %s in %s:%d, lane %d at %s in %s:%d",
                 mask, lane, op_name(op), place.file, place.line, __builtin_ctz(w.groups[i].arrived), op_name(other.op),
                 other.place.file, other.place.line);
    }
    w.groups[i].arrived |= 1u << lane;
    void *token = RACES_TOKEN(warp_group[warp_index][w.groups[i].number % 64]);
    if (op == WarpOp::sync) races_release(token); // no other operation orders memory
    if (!(mask & w.present & ~w.groups[i].arrived)) meet(w, warp_index, w.groups[i]);
    wait();
    if (op == WarpOp::sync) races_acquire(token);
    return t.value;
}

void exchange(const void *own, size_t bytes, void *all, Place place) {
    static char tables[2][1024][EXCHANGE_BYTES]; // in turn: a lane may be ahead of others by one exchange
    static unsigned char turns[1024];
    char(*table)[EXCHANGE_BYTES] = tables[turns[current]++ % 2] + current / 32 * 32;
    {
        Unseen unseen; // registers are exchanged, not memory
        memcpy(table[current % 32], own, bytes);
    }
    warp(WarpOp::shfl, ~0u, 0, 0, 32, place);
    Unseen unseen;
    for (int i = 0; i < 32; i++) memcpy((char *)all + (size_t)i * bytes, table[i], bytes);
}

void *dynamic_shared() {
    if (!dynamic_memory && launch->shared_bytes) dynamic_memory = poisoned(launch->shared_bytes, 16);
    return dynamic_memory;
}

void *SharedSite::allocate(size_t bytes, size_t alignment, const char *name) {
    if (serial != block_serial) {
        use_shared(bytes, name);
        memory = poisoned(bytes, alignment);
        serial = block_serial;
    }
    return memory;
}

// Copies of the running thread that are under way, in order.
struct AsyncCopies {
    uint64_t block;
    int group; // that the next copy belongs to
    std::vector<AsyncCopy> pending;
};
static AsyncCopies &async_copies() {
    static AsyncCopies threads[1024];
    AsyncCopies &own = threads[current];
    if (own.block != block_serial) {
        own.block = block_serial;
        own.group = 0;
        own.pending.clear();
    }
    return own;
}
static uint64_t started;
uint64_t copies_started() { return started; }
bool lands_late() {
    started++;
    return copies == Copies::late || (copies == Copies::mixed && random_below(2));
}
bool copy_waits(AsyncCopy copy) {
    Unseen unseen;
    if (((uintptr_t)copy.to | (uintptr_t)copy.from) % 16)
        fail("cp.async from %p to %p: not multiples of 16", copy.from, copy.to);
    if (!lands_late()) return false;
    AsyncCopies &own = async_copies();
    copy.group = own.group;
    own.pending.push_back(copy);
    return true;
}
void copy_commit() { async_copies().group++; }
bool copy_due(int left, AsyncCopy *copy) {
    Unseen unseen;
    AsyncCopies &own = async_copies();
    if (own.pending.empty() || own.pending[0].group >= own.group - left) return false;
    *copy = own.pending[0];
    own.pending.erase(own.pending.begin());
    return true;
}

#ifdef CUDA_ON_CPU_TSAN
Position position_now() { return position; }
void fence() { fenced[current] = true; }
void before_atomic(
    volatile void *address) { // what the thread wrote before its fence is seen by whoever sees the atomic
    if (launch && fenced[current]) races_release((void *)address), fenced[current] = false;
}
void after_atomic(volatile void *address) {
    if (launch) races_acquire((void *)address);
}
#endif

} // namespace cuda_on_cpu
