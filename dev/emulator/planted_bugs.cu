/*
planted_bugs.cu: small kernels and launches: one bug for each check of the layer, and the corrected version. The layer
must detect the first with the expected message, and the second must pass in every order of threads.

  build/oncpu/planted_bugs              all; the last line is `N passed, N failed`
  build/oncpu/planted_bugs WORDS...     those whose sentence contains one of the WORDS

Each runs in a child process, since detection ends the program. A bug that changes results is detected if a result
differs from the correct one, computed on the host in integers, in one of the orders. Builds without sanitizers skip the
bugs that only a sanitizer detects.
*/
#include "../../llmc/cuda/launch.cuh"
#ifdef USE_NCCL
#include <nccl.h>
#endif
#include "../../llmc/cuda/async_copy.cuh"
#include "../../llmc/cuda/attention_cudnn.h"
#include "../../llmc/cuda/mma.cuh"
#include "../../tests/harness.h"
#include <regex.h>
#include <thread>
using cuda_on_cpu::Copies;
using cuda_on_cpu::Order;

static const unsigned everyone = 0xffffffffu;
enum { CHILD_RIGHT = 0, CHILD_WRONG_RESULT = 3, CHILD_RACE = 66 }; // others: a message of the layer or a sanitizer

template <class T> static T *device_array(size_t count) {
    T *p = nullptr;
    CHECK(cudaMalloc(&p, count * sizeof(T)) == cudaSuccess, "no device memory for %zu elements", count);
    return p;
}
// Whether n numbers on the device are wanted(0), wanted(1), ...; ends the child otherwise.
template <class F> static void expect_device(const int *values, int n, F wanted) {
    int *host = (int *)checked_calloc((size_t)n, sizeof(int));
    cudaStreamSynchronize(main_stream);
    cudaMemcpy(host, values, (size_t)n * sizeof(int), cudaMemcpyDeviceToHost);
    for (int i = 0; i < n; i++)
        if (host[i] != wanted(i)) {
            fprintf(stderr, "element %d is %d (0x%x) and not %d\n", i, host[i], (unsigned)host[i], wanted(i));
            _exit(CHILD_WRONG_RESULT);
        }
    free(host);
}
// n numbers on the device, the first argument of the kernel that is launched; `more`: its others.
template <class Kernel, class... More>
static int *launched(int n, Kernel kernel, int blocks, int threads, More... more) {
    int *out = device_array<int>((size_t)n);
    LAUNCH(kernel, blocks, threads, 0, out, more...);
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// order: races between threads, which some orders hide and others show

template <bool bug> static __global__ void from_the_thread_before(int *out) { // the forward order hides the bug
    SHARED(int, x, 128);
    x[threadIdx.x] = (int)threadIdx.x;
    if (!bug) __syncthreads();
    out[threadIdx.x] = x[threadIdx.x ? threadIdx.x - 1 : 0];
}
template <bool bug> static void missing_barrier(void) {
    expect_device(launched(128, from_the_thread_before<bug>, 1, 128), 128, [](int i) { return i ? i - 1 : 0; });
}

// No order shows these, since one thread runs at a time: ThreadSanitizer detects them.

template <bool bug>
static __global__ void shuffle_as_barrier(int *out) { // a shuffle makes lanes meet, but orders no memory
    SHARED(int, x, 32);
    x[threadIdx.x] = (int)threadIdx.x;
    int most = (int)__reduce_max_sync(everyone, threadIdx.x);
    if (!bug) __syncwarp();
    out[threadIdx.x] = x[31 - threadIdx.x] + most;
}
template <bool bug> static void shuffle_in_place_of_syncwarp(void) {
    expect_device(launched(32, shuffle_as_barrier<bug>, 1, 32), 32, [](int i) { return 31 - i + 31; });
}

template <bool bug> static __global__ void last_block_adds(int *total, int *parts, int *finished) {
    if (threadIdx.x != 0) return;
    parts[blockIdx.x] = (int)blockIdx.x;
    if (!bug) __threadfence();
    if (atomicAdd(finished, 1) != (int)gridDim.x - 1) return;
    int sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++) sum += parts[i];
    *total = sum;
}
template <bool bug> static void missing_threadfence(void) {
    int *total = device_array<int>(1), *parts = device_array<int>(9), *finished = device_array<int>(1);
    cudaMemsetAsync(finished, 0, sizeof(int), main_stream);
    LAUNCH((last_block_adds<bug>), 9, 32, 0, total, parts, finished);
    expect_device(total, 1, [](int) { return 36; });
}

// ---------------------------------------------------------------------------------------------------------------------
// memory

template <bool bug> static __global__ void fill(int *out, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (bug ? i > n : i >= n) return;
    out[i] = i;
}
template <bool bug> static void one_past_the_end_of_a_page(void) { // where plain builds see it too
    const int n = 1024;
    expect_device(launched(n, fill<bug>, 9, 128, n), n, [](int i) { return i; });
}

static __global__ void shift_in_shared(int *out) {
    DYNAMIC_SHARED(int, x);
    x[threadIdx.x] = (int)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = x[(threadIdx.x + 1) % 64];
}
template <bool bug> static void too_little_dynamic_shared_memory(void) {
    int *out = device_array<int>(64);
    LAUNCH(shift_in_shared, 1, 64, (bug ? 63 : 64) * sizeof(int), out);
    expect_device(out, 64, [](int i) { return (i + 1) % 64; });
}

struct alignas(16) Four {
    int x[4];
};
static __global__ void fours_in_shared(int *out, bool bug) {
    SHARED(Four, aligned, 2);
    SHARED(int, plain, 8);
    Four *fours = bug ? reinterpret_cast<Four *>(plain) : aligned;
    fours[threadIdx.x] = Four{{1, 2, 3, 4}};
    out[threadIdx.x] = fours[threadIdx.x].x[3];
}
template <bool bug> static void vector_access_to_a_plain_shared_array(void) {
    expect_device(launched(2, fours_in_shared, 1, 2, bug), 2, [](int) { return 4; });
}

template <bool bug> static __global__ void double_all(int *out, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = 2 * i;
}
template <bool bug> static void output_that_is_not_all_written(void) { // the grid is rounded down
    const int n = 1000;
    expect_device(launched(n, double_all<bug>, bug ? n / 128 : (n + 127) / 128, 128, n), n,
                  [](int i) { return 2 * i; });
}

template <bool bug> static __global__ void accumulate(int *out) {
    SHARED(int, sum, 1);
    if (!bug && threadIdx.x == 0) sum[0] = 0;
    __syncthreads();
    atomicAdd(sum, 1);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = sum[0];
}
template <bool bug> static void shared_memory_that_is_not_initialized(void) {
    expect_device(launched(2, accumulate<bug>, 2, 96), 2, [](int) { return 96; });
}

struct Pair {
    int *a, *b;
};
static __global__ void copy_pair(Pair p) { p.a[threadIdx.x] = p.b[threadIdx.x]; }
template <bool bug> static void freed_memory_in_a_kernel(void) {
    int *out = device_array<int>(32), *in = device_array<int>(32);
    cudaMemset(in, 0, 32 * sizeof(int));
    cudaDeviceSynchronize();
    if (bug) cudaFree(in);
    LAUNCH(copy_pair, 1, 32, 0, Pair{out, in});
    expect_device(out, 32, [](int) { return 0; });
}
template <bool bug> static void freed_memory_as_an_argument(void) {
    int *out = device_array<int>(32);
    if (bug) cudaFree(out);
    LAUNCH((double_all<false>), 1, 32, 0, out, 32);
    expect_device(out, 32, [](int i) { return 2 * i; });
}

static __global__ void divide(int *out, int by) { out[threadIdx.x] = (int)threadIdx.x / by; }
template <bool bug> static void integer_division_by_zero(void) {
    expect_device(launched(32, divide, 1, 32, bug ? 0 : 2), 32, [](int i) { return i / 2; });
}

// 0 + 1 + ... + n, by frames of 1 KiB that have to be kept
static __device__ int sum_by_recursion(const volatile int *above, int n) {
    volatile int frame[256];
    frame[0] = 0;
    frame[n % 256] = n;
    return n == 0 ? above[0] : sum_by_recursion(frame, n - 1) + frame[n % 256];
}
static __global__ void recurse(int *out, int n) {
    int zero[256] = {0};
    out[threadIdx.x] = sum_by_recursion(zero, n) - zero[n % 256];
}
template <bool bug> static void a_stack_that_is_full(void) {
    expect_device(launched(32, recurse, 1, 32, bug ? 1000 : 20), 32, [](int) { return 210; });
}

// ---------------------------------------------------------------------------------------------------------------------
// barriers and lane masks

template <bool bug> static __global__ void barrier_in_both_branches(int *out) {
    SHARED(int, x, 64);
    x[threadIdx.x] = (int)threadIdx.x;
    if (bug && threadIdx.x < 32) __syncthreads();
    else if (bug) __syncthreads(); // another line
    else __syncthreads();
    out[threadIdx.x] = x[63 - threadIdx.x];
}
template <bool bug> static void barrier_on_two_lines(void) {
    expect_device(launched(64, barrier_in_both_branches<bug>, 1, 64), 64, [](int i) { return 63 - i; });
}

// Rows that are no multiple of the block: threads without a row leave before the barrier.
template <bool bug> static __global__ void rows_of_a_block(int *out, int rows) {
    SHARED(int, x, 16);
    int row = (int)(blockIdx.x * 16 + threadIdx.x);
    if (bug && row >= rows) return;
    x[threadIdx.x] = row < rows ? row : 0;
    __syncthreads();
    if (row < rows) out[row] = x[threadIdx.x];
}
template <bool bug> static void barrier_after_an_early_return(void) {
    expect_device(launched(37, rows_of_a_block<bug>, 3, 16, 37), 37, [](int i) { return i; });
}

template <bool bug> static __global__ void half_a_warp(int *out, unsigned mask) {
    int x = (int)threadIdx.x;
    if (threadIdx.x < 16) x = __shfl_xor_sync(mask, x, 8); // a mask with the other half, which does not come
    __syncthreads();
    out[threadIdx.x] = x;
}
template <bool bug> static void mask_with_lanes_that_do_not_come(void) {
    expect_device(launched(32, half_a_warp<bug>, 1, 32, bug ? everyone : 0xffffu), 32,
                  [](int i) { return i < 16 ? i ^ 8 : i; });
}

static __global__ void vote_with(int *out, unsigned low, unsigned high) {
    unsigned mask = threadIdx.x < 16 ? low : high;
    out[threadIdx.x] = __popc(__ballot_sync(mask, 1));
}
template <bool bug> static void mask_without_the_calling_lane(void) {
    expect_device(launched(32, vote_with, 1, 32, 0xffffu, bug ? 0xffffu : 0xffff0000u), 32, [](int) { return 16; });
}

template <bool bug> static __global__ void four_lanes_on(int *out) {
    int lane = (int)threadIdx.x;
    if (bug && lane >= 20) return; // lanes 16 to 19 read from these
    int x = __shfl_sync(everyone, lane < 20 ? lane : 0, lane + 4);
    if (lane < 20) out[lane] = x;
}
template <bool bug> static void shuffle_from_lanes_that_have_exited(void) {
    expect_device(launched(20, four_lanes_on<bug>, 1, 32), 20, [](int i) { return i < 16 ? i + 4 : 0; });
}

template <bool bug> static __global__ void two_operations(int *out) {
    int x = (int)threadIdx.x;
    if (bug && threadIdx.x % 2) x = __shfl_up_sync(everyone, x, 1);
    else x = __shfl_xor_sync(everyone, x, 1);
    out[threadIdx.x] = x;
}
template <bool bug> static void different_operations_in_one_warp(void) {
    expect_device(launched(32, two_operations<bug>, 1, 32), 32, [](int i) { return i ^ 1; });
}

// A stride that is 0 for small blocks.
template <bool bug> static __global__ void strided(int *out, int n) {
    int step = bug ? (int)blockDim.x / 64 * 64 : (int)blockDim.x;
    for (int i = (int)threadIdx.x; i < n; i += step) out[i] = i;
}
template <bool bug> static void loop_without_an_end(void) {
    expect_device(launched(100, strided<bug>, 1, 32, 100), 100, [](int i) { return i; });
}

// ---------------------------------------------------------------------------------------------------------------------
// the host: launches, copies, streams

template <int what, bool bug> static void illegal_launch(void) {
    int n = 96, *out = device_array<int>((size_t)n);
    size_t over = ((size_t)48 << 10) + 1;
    dim3 block = what == 0 && bug ? dim3(33, 32) : dim3(96);
    LAUNCH((double_all<false>), what == 1 && bug ? 0 : 1, block, what == 2 && bug ? over : 48 << 10, out, n);
    expect_device(out, n, [](int i) { return 2 * i; });
}
static __global__ void much_shared(int *out) {
    SHARED(int, x, 10 << 10);
    DYNAMIC_SHARED(int, y);
    x[threadIdx.x] = y[threadIdx.x] = (int)threadIdx.x;
    out[threadIdx.x] = x[threadIdx.x] + y[threadIdx.x];
}
template <bool bug> static void static_and_dynamic_shared_memory_over_the_limit(void) {
    int *out = device_array<int>(32);
    if (!bug) LAUNCH_ALLOW_SHARED(much_shared, 60 << 10);
    LAUNCH(much_shared, 1, 32, 20 << 10, out);
    expect_device(out, 32, [](int i) { return 2 * i; });
}

template <int what, bool bug> static void wrong_copy(void) {
    int host[8] = {0, 1, 2, 3, 4, 5, 6, 7}, *numbers = device_array<int>(8);
    cudaMemcpyKind down = what == 0 && bug ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    cudaMemcpy(numbers, host, sizeof(host), cudaMemcpyHostToDevice);
    if (what == 1 && bug) cudaMemcpy(numbers + 1, host, sizeof(host), cudaMemcpyHostToDevice);
    cudaMemcpy(host, numbers, sizeof(host), down);
    expect_device(numbers, 8, [](int i) { return i; });
}
template <bool bug> static void device_pointer_on_the_host(void) {
    int *out = device_array<int>(32), first = -1;
    LAUNCH((double_all<false>), 1, 32, 0, out, 32);
    cudaDeviceSynchronize();
    if (bug) first = *(volatile int *)out;
    else cudaMemcpy(&first, out, sizeof(int), cudaMemcpyDeviceToHost);
    if (first != 0) _exit(CHILD_WRONG_RESULT);
}
template <bool bug> static void freed_twice(void) {
    int *out = device_array<int>(32);
    cudaFree(out);
    if (bug) cudaFree(out);
}

template <bool bug> static void result_read_without_waiting(void) {
    int *out = device_array<int>(1), *pinned = nullptr;
    cudaMallocHost(&pinned, sizeof(int));
    *pinned = -1;
    LAUNCH((double_all<false>), 1, 1, 0, out, 1);
    cudaMemcpyAsync(pinned, out, sizeof(int), cudaMemcpyDeviceToHost, main_stream);
    if (!bug) cudaStreamSynchronize(main_stream);
    if (*pinned != 0) _exit(CHILD_WRONG_RESULT);
}
// The host waits for the first stream before the second, which hides the bug unless the second is hasty.
template <bool bug> static void streams_without_an_event(void) {
    setenv("CUDA_ON_CPU_STREAMS", "hasty", 1);
    int *out = device_array<int>(64), *pinned = nullptr;
    cudaStream_t second;
    cudaEvent_t ready;
    cudaMallocHost(&pinned, 64 * sizeof(int));
    cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
    cudaEventCreate(&ready);
    LAUNCH((double_all<false>), 2, 32, 0, out, 64);
    cudaEventRecord(ready, main_stream);
    if (!bug) cudaStreamWaitEvent(second, ready, 0);
    cudaMemcpyAsync(pinned, out, 64 * sizeof(int), cudaMemcpyDeviceToHost, second);
    cudaStreamSynchronize(main_stream);
    cudaStreamSynchronize(second);
    for (int i = 0; i < 64; i++)
        if (pinned[i] != 2 * i) _exit(CHILD_WRONG_RESULT);
}
#ifdef USE_NCCL
template <bool bug> static void ranks_that_do_not_make_the_same_calls(void) {
    ncclUniqueId id;
    ncclComm_t comm;
    ncclGetUniqueId(&id);
    int rank = fork() == 0;
    setenv("CUDA_ON_CPU_DEVICES", "2", 1);
    setenv("CUDA_ON_CPU_VISIBLE", rank ? "1" : "0", 1);
    char *all = device_array<char>(32);
    if (ncclCommInitRank(&comm, 2, id, rank) != ncclSuccess) _exit(CHILD_WRONG_RESULT);
    size_t bytes = bug && rank == 1 ? 8 : 16;
    ncclAllGather(all + (size_t)rank * bytes, all, bytes, ncclChar, comm, main_stream);
    cudaStreamSynchronize(main_stream);
    if (rank == 1) _exit(CHILD_RIGHT);
    ncclCommDestroy(comm);
}
template <bool bug> static void a_split_while_a_collective_runs(void) {
    ncclUniqueId id;
    ncclComm_t comm, part;
    float *x = device_array<float>(2), host = 0;
    ncclGetUniqueId(&id);
    if (ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess) _exit(CHILD_WRONG_RESULT);
    cudaMemsetAsync(x, 0, 8, main_stream);
    ncclAllGather(x, x, 4, ncclChar, comm, main_stream);
    if (!bug) cudaStreamSynchronize(main_stream);
    if (ncclCommSplit(comm, 0, 0, &part, nullptr) != ncclSuccess) _exit(CHILD_WRONG_RESULT);
    ncclAllReduce(x, x + 1, 1, ncclFloat, ncclSum, part, main_stream);
    ncclCommDestroy(part);
    ncclCommDestroy(comm);
    cudaMemcpy(&host, x + 1, 4, cudaMemcpyDeviceToHost);
    if (host != 0) _exit(CHILD_WRONG_RESULT);
}
#endif
template <bool bug> static void a_thread_that_does_not_choose_its_device(void) {
    setenv("CUDA_ON_CPU_DEVICES", "2", 1);
    cudaStreamDestroy(main_stream);
    cudaDeviceReset();
    cudaSetDevice(1);
    cudaStreamCreate(&main_stream);
    std::thread([] {
        int *x = nullptr;
        if (!bug) cudaSetDevice(1);
        if (cudaMalloc(&x, sizeof(int)) != cudaSuccess || cudaFree(x) != cudaSuccess) _exit(CHILD_WRONG_RESULT);
    }).join();
}
// what 0: a plan before the library is open, 1: a run after the plan's end, 2: a plan when the library closes
template <int what, bool bug> static void wrong_order_of_cudnn(void) {
    char why[256];
    size_t bytes;
    CudnnAttention a;
    CudnnTensors t;
    memset(&a, 0, sizeof(a));
    a.B = a.NQ = a.NKV = 1, a.T = a.D = a.DV = 8;
    a.q = a.k = a.v = a.out = CudnnStrides{8, 8};
    t.q = t.k = t.v = t.out = device_array<char>(128), t.lse = device_array<float>(8);
    if (!bug || what != 0) cudnn_attention_open(why, sizeof(why));
    CudnnPlan *plan = cudnn_attention_plan(&a, &bytes, why, sizeof(why));
    if (bug && what == 1) cudnn_attention_free(plan);
    cudnn_attention_run(plan, &t, nullptr, main_stream, why, sizeof(why));
    if (!bug || what != 2) cudnn_attention_free(plan);
    cudnn_attention_close();
}
// ---------------------------------------------------------------------------------------------------------------------
// asynchronous copies and tensor cores

// out = 2 in, by way of shared memory: a ring of 3 stages, of which 2 are under way
enum { RING = 3, RING_ROUNDS = 7, RING_THREADS = 64, RING_INTS = RING_THREADS * 4 };
enum RingBug { SHORT_WAIT, EARLY_FETCH };
template <int what, bool bug> static __global__ void copy_ring(int *out, const int *in) {
    SHARED(uint4, ring, RING * RING_THREADS);
    const int t = (int)threadIdx.x, other = (t + 33) % RING_THREADS; // reads what another warp has copied
    auto fetch = [&](int round) {
        if (round < RING_ROUNDS)
            copy_async(ring + round % RING * RING_THREADS + t, in + round * RING_INTS + 4 * t, true);
        copy_commit();
    };
    fetch(0);
    fetch(1);
    for (int round = 0; round < RING_ROUNDS; round++) {
        if (bug && what == EARLY_FETCH) fetch(round + 2);
        if (bug) copy_wait<2>(); // right for the order of EARLY_FETCH
        else copy_wait<1>();
        __syncthreads();
        if (!(bug && what == EARLY_FETCH)) fetch(round + 2);
        uint4 x = ring[round % RING * RING_THREADS + other];
        int *to = out + round * RING_INTS + 4 * other;
        to[0] = 2 * (int)x.x, to[1] = 2 * (int)x.y, to[2] = 2 * (int)x.z, to[3] = 2 * (int)x.w;
    }
    copy_wait<0>();
}
template <int what, bool bug> static void wrong_ring(void) {
    enum { N = RING_ROUNDS * RING_INTS };
    int *out = device_array<int>(N), *in = device_array<int>(N), host[N];
    for (int i = 0; i < N; i++) host[i] = 3 * i;
    cudaMemcpy(in, host, sizeof(host), cudaMemcpyHostToDevice);
    LAUNCH((copy_ring<what, bug>), 1, RING_THREADS, 0, out, in);
    expect_device(out, N, [](int i) { return 6 * i; });
}

static __global__ void copy_four(int *out, const int *in) {
    SHARED(uint4, x, 1);
    copy_async(x, in, true);
    copy_commit();
    copy_wait<0>();
    out[0] = (int)x[0].x;
}
template <bool bug> static void misaligned_copy(void) {
    int *out = device_array<int>(1), *in = device_array<int>(8);
    cudaMemset(in, 0, 8 * sizeof(int));
    LAUNCH(copy_four, 1, 1, 0, out, in + (bug ? 2 : 4));
    expect_device(out, 1, [](int) { return 0; });
}

static __global__ void load_matrices(int *out, bool bug) {
    SHARED(uint4, rows, 33);
    rows[threadIdx.x] = uint4{1, 2, 3, 4};
    __syncwarp();
    unsigned x[4];
    matrices_load<false>(x, (const char *)(rows + threadIdx.x) + (bug ? 8 : 0));
    out[threadIdx.x] = (int)x[0];
}
template <bool bug> static void misaligned_row(void) {
    expect_device(launched(32, load_matrices, 1, 32, bug), 32, [](int i) { return i % 4 + 1; });
}

// ---------------------------------------------------------------------------------------------------------------------

// builds that see a bug: without sanitizer, with AddressSanitizer and UBSan, with ThreadSanitizer
enum { PLAIN = 1, ADDRESS = 2, THREAD = 4, SCHEDULER = PLAIN | ADDRESS, EVERY = SCHEDULER | THREAD };
#if defined(CUDA_ON_CPU_ASAN)
static const int this_build = ADDRESS;
#elif defined(CUDA_ON_CPU_TSAN)
static const int this_build = THREAD;
#else
static const int this_build = PLAIN;
#endif
struct Bug {
    const char *sentence, *caught_by; // what stderr must contain, a regular expression; nullptr: a wrong result
    void (*planted)(void), (*corrected)(void);
    int builds = SCHEDULER;
};
#define BUG(f) f<true>, f<false>
#define BUG_OF(f, what) f<what, true>, f<what, false>

static const Bug bugs[] = {
    {"a missing barrier between a write and a read of shared memory", nullptr, BUG(missing_barrier), EVERY},
    {"a shuffle in place of a __syncwarp", nullptr, BUG(shuffle_in_place_of_syncwarp), THREAD},
    {"a missing __threadfence before the last block reads", nullptr, BUG(missing_threadfence), THREAD},
    {"one past the end of a page of global memory",
     "heap-buffer-overflow|out of bounds: byte 4096 of an allocation of 4096", BUG(one_past_the_end_of_a_page)},
    {"one past the end of dynamic shared memory", "heap-buffer-overflow", BUG(too_little_dynamic_shared_memory),
     ADDRESS},
    {"a vector store to a shared array of a plain type", "misaligned address",
     BUG(vector_access_to_a_plain_shared_array), ADDRESS},
    {"a wait for too few groups of copies", nullptr, BUG_OF(wrong_ring, SHORT_WAIT), EVERY},
    {"a copy to a stage that others still read", nullptr, BUG_OF(wrong_ring, EARLY_FETCH)},
    {"a misaligned asynchronous copy", "not multiples of 16", BUG(misaligned_copy)},
    {"ldmatrix from a misaligned row", "not a multiple of 16", BUG(misaligned_row)},
    {"an output that is partly written", nullptr, BUG(output_that_is_not_all_written), EVERY},
    {"uninitialized shared memory", nullptr, BUG(shared_memory_that_is_not_initialized), EVERY},
    {"a kernel that reads freed memory", "heap-use-after-free|use of freed memory", BUG(freed_memory_in_a_kernel)},
    {"freed memory as an argument", "is freed memory", BUG(freed_memory_as_an_argument)},
    {"an integer division by zero", "division by zero", BUG(integer_division_by_zero)},
    {"a stack overflow", "stack-overflow|stack is full", BUG(a_stack_that_is_full)},
    {"one barrier reached on two lines", "divergent barrier", BUG(barrier_on_two_lines)},
    {"a barrier after an early return", "divergent barrier", BUG(barrier_after_an_early_return)},
    {"a lane mask with lanes that do not arrive", "a lane mask is not met", BUG(mask_with_lanes_that_do_not_come)},
    {"a lane mask without the calling lane", "wrong lane mask", BUG(mask_without_the_calling_lane)},
    {"a shuffle from lanes that have exited", nullptr, BUG(shuffle_from_lanes_that_have_exited)},
    {"different operations in one warp", "meet at different operations", BUG(different_operations_in_one_warp)},
    {"an endless loop", "does not end", BUG(loop_without_an_end), PLAIN},
    {"a block of more than 1024 threads", "a block of 1056 threads", BUG_OF(illegal_launch, 0)},
    {"a grid of 0 blocks", "its grid is \\(0,1,1\\)", BUG_OF(illegal_launch, 1)},
    {"dynamic shared memory over the limit", "49153 bytes of shared memory", BUG_OF(illegal_launch, 2)},
    {"static and dynamic shared memory over the limit", "take 61440 bytes",
     BUG(static_and_dynamic_shared_memory_over_the_limit)},
    {"a copy in the wrong direction", "should be device memory and is host memory", BUG_OF(wrong_copy, 0)},
    {"a copy that runs past its allocation", "end 4 bytes behind its allocation of 32", BUG_OF(wrong_copy, 1)},
    {"a device pointer that the host dereferences", "the host dereferences device memory",
     BUG(device_pointer_on_the_host), PLAIN},
    {"memory freed twice", "cudaFree", BUG(freed_twice)},
    {"a result read without waiting for it", nullptr, BUG(result_read_without_waiting)},
    {"a second stream that runs too early", nullptr, BUG(streams_without_an_event)},
#ifdef USE_NCCL
    {"ranks that do not make the same calls of NCCL", "collective 0 is ncclAllGather of",
     BUG(ranks_that_do_not_make_the_same_calls)},
    {"a communicator that is split while a collective runs", "ncclCommSplit: collectives of the parent",
     BUG(a_split_while_a_collective_runs)},
#endif
    {"a thread that does not select its device", "cudaMalloc by a thread whose device is 0",
     BUG(a_thread_that_does_not_choose_its_device), EVERY},
    {"a plan of cuDNN before it is opened", "before it is opened", BUG_OF(wrong_order_of_cudnn, 0)},
    {"a run of a plan of cuDNN after its end", "a plan that does not exist", BUG_OF(wrong_order_of_cudnn, 1)},
    {"a plan of cuDNN that outlives the library", "while 1 of its plans exist", BUG_OF(wrong_order_of_cudnn, 2)},
};

static const struct {
    Order order;
    Copies copies;
    const char *name;
} orders[] = {{Order::forward, Copies::late, "forward"},
              {Order::reverse, Copies::early, "reverse, copies land early"},
              {Order::shuffled, Copies::mixed, "shuffled, copies land early or late"},
              {Order::forward, Copies::early, "forward, copies land early"},
              {Order::reverse, Copies::late, "reverse"}};
// what races does so in any order
static const int order_count = this_build == THREAD ? 1 : (int)(sizeof(orders) / sizeof(orders[0]));

// Runs it in a child, in one order. Returns the exit status.
static int in_child(void (*run)(void), int order, char *err, size_t size) {
    FILE *file = tmpfile();
    fflush(nullptr);
    pid_t child = fork();
    CHECK(file && child >= 0, "no file or process: %s", strerror(errno));
    if (child == 0) {
        dup2(fileno(file), 2);
        cudaStreamCreate(&main_stream);
        cuda_on_cpu::set_order(orders[order].order, 1);
        cuda_on_cpu::set_copies(orders[order].copies);
        run();
        cudaDeviceSynchronize();
        _exit(CHILD_RIGHT);
    }
    int status = 0;
    waitpid(child, &status, 0);
    ssize_t length = pread(fileno(file), err, size - 1, 0);
    err[length > 0 ? length : 0] = 0;
    fclose(file);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static bool matches(const char *text, const char *expression) {
    regex_t regex;
    CHECK(regcomp(&regex, expression, REG_EXTENDED | REG_NOSUB) == 0, "not a regular expression: %s", expression);
    bool found = regexec(&regex, text, 0, nullptr, 0) == 0;
    regfree(&regex);
    return found;
}

static void test_bug(const Bug *bug) {
    static char err[65536];
    bool caught = false;
    for (int o = 0; o < order_count && !caught; o++) {
        int status = in_child(bug->planted, o, err, sizeof(err));
        caught = bug->caught_by ? status != CHILD_RIGHT && status != CHILD_WRONG_RESULT
                                : status == CHILD_WRONG_RESULT || (status == CHILD_RACE && strstr(err, "data race"));
        if (status == CHILD_RIGHT) continue;
        EXPECT(caught, "planted, %s: caught in another way, status %d: %.400s", orders[o].name, status, err);
        if (bug->caught_by)
            EXPECT(matches(err, bug->caught_by), "planted, %s: the message has nothing of '%s': %.1000s",
                   orders[o].name, bug->caught_by, err);
        if (bug->caught_by)
            EXPECT(strstr(err, "CUDA on the CPU: "), "planted, %s: no line of the layer: %.1000s", orders[o].name, err);
    }
    EXPECT(caught, "planted: not caught in any order");
    for (int o = 0; o < order_count; o++) {
        int status = in_child(bug->corrected, o, err, sizeof(err));
        EXPECT(status == CHILD_RIGHT && !*err, "corrected, %s: status %d: %.1000s", orders[o].name, status, err);
    }
}

int main(int argc, char **argv) {
    TestCounts counts = {0, 0, 0};
    setvbuf(stdout, nullptr, _IOLBF, 0);
    setenv("CUDA_ON_CPU_TIMEOUT", "1", 1);
    for (const Bug &bug : bugs) {
        if (!(bug.builds & this_build) || !test_chosen(argc - 1, argv + 1, "", bug.sentence)) continue;
        double begin = test_begin();
        test_bug(&bug);
        test_finish(&counts, test_text("caught: %s", bug.sentence), begin);
    }
    return test_end(&counts);
}
