/*
test_layer.cu: the layer has the semantics of CUDA: shuffles, votes and masks, barriers, shared memory, grids, atomics,
streams and copies. Every kernel runs in all orders of threads.

  build/oncpu/test_layer           all tests; the last line is `N passed, N failed`
  build/oncpu/test_layer WORDS     those whose sentence contains WORDS
  build/oncpu/test_layer --bench   nanoseconds per thread, shuffle and barrier, microseconds per launch
*/
#include "../../llmc/cuda/launch.cuh"
#include "../../tests/harness.h"
#ifdef USE_NCCL
#include <nccl.h>
#endif
#include <thread>
#include <vector>
using cuda_on_cpu::Order;

static cudaStream_t main_stream;
static const unsigned everyone = 0xffffffffu;

// An order for every run of a test.
static const struct {
    Order order;
    uint64_t seed;
    const char *name;
} orders[] = {{Order::forward, 0, "forward"},
              {Order::reverse, 0, "reverse"},
              {Order::shuffled, 1, "shuffled"},
              {Order::shuffled, 2, "shuffled again"}};
static const char *order_name = "";

static std::vector<void *> arrays; // main frees them after each test
template <class T> static T *device_array(size_t count) {
    T *p = nullptr;
    CHECK(cudaMalloc(&p, count * sizeof(T)) == cudaSuccess, "no device memory for %zu elements", count);
    arrays.push_back(p);
    return p;
}
template <class T> static void download(T *host, const T *device, size_t count) {
    cudaStreamSynchronize(main_stream);
    cudaMemcpy(host, device, count * sizeof(T), cudaMemcpyDeviceToHost);
}

// ---------------------------------------------------------------------------------------------------------------------
// shuffles and votes, against their definition in PTX

enum { IDX, UP, DOWN, XOR, KINDS };
template <class T> static __global__ void shuffle_kernel(T *out, int kind, int argument, int width) {
    int lane = (int)threadIdx.x % 32;
    T value = (T)(100 + threadIdx.x), got = 0;
    if (kind == IDX) got = __shfl_sync(everyone, value, argument, width);
    if (kind == UP) got = __shfl_up_sync(everyone, value, (unsigned)argument, width);
    if (kind == DOWN) got = __shfl_down_sync(everyone, value, (unsigned)argument, width);
    if (kind == XOR) got = __shfl_xor_sync(everyone, value, argument, width);
    out[threadIdx.x / 32 * 32 + (unsigned)lane] = got;
}
// The definition, in terms of a segment of `width` lanes.
static int shuffle_source(int kind, int lane, int argument, int width) {
    int segment = lane / width * width, within = lane % width;
    if (kind == IDX) return segment + argument % width;
    if (kind == UP) return within >= argument ? lane - argument : lane;
    if (kind == DOWN) return within + argument < width ? lane + argument : lane;
    int other = lane ^ argument;
    return other < segment + width ? other : lane;
}
template <class T> static void expect_shuffles(void) {
    T *out = device_array<T>(64), host[64];
    for (int kind = 0; kind < KINDS; kind++)
        for (int width = 1; width <= 32; width *= 2)
            for (int argument = 0; argument < 32; argument += 1 + (argument > 5) * 6) {
                LAUNCH((shuffle_kernel<T>), 1, 64, 0, out, kind, argument, width);
                download(host, out, 64);
                for (int t = 0; t < 64; t++) {
                    int from = t / 32 * 32 + shuffle_source(kind, t % 32, argument, width);
                    EXPECT(host[t] == (T)(100 + from),
                           "%s: kind %d, argument %d, width %d: thread %d got %g, not thread %d's value", order_name,
                           kind, argument, width, t, (double)host[t], from);
                }
            }
}
static void test_shuffles(void) {
    expect_shuffles<float>();
    expect_shuffles<long long>();
}

static __global__ void vote_kernel(unsigned *out) {
    unsigned t = threadIdx.x, *row = out + 6 * t;
    row[0] = __ballot_sync(everyone, t % 3 == 0);
    row[1] = (unsigned)__any_sync(everyone, t == 40);
    row[2] = __reduce_add_sync(everyone, t);
    row[3] = __reduce_max_sync(everyone, t * 7 % 64);
    // halves of a warp, each with its own mask, at different places
    if (t % 32 < 16) row[4] = __ballot_sync(0x0000ffffu, t % 2);
    else row[4] = __ballot_sync(0xffff0000u, t % 2 == 0);
    __syncwarp();
    row[5] = __shfl_sync(everyone, row[4], 20);
}
static void test_votes(void) {
    unsigned *out = device_array<unsigned>(64 * 6), host[64 * 6];
    LAUNCH(vote_kernel, 1, 64, 0, out);
    download(host, out, 64 * 6);
    for (unsigned t = 0; t < 64; t++) {
        unsigned base = t / 32 * 32, ballot = 0, sum = 0, most = 0;
        for (unsigned i = base; i < base + 32; i++) {
            if (i % 3 == 0) ballot |= 1u << (i - base);
            sum += i;
            most = i * 7 % 64 > most ? i * 7 % 64 : most;
        }
        unsigned wanted[6] = {ballot, base == 32, sum, most, t % 32 < 16 ? 0xaaaau : 0x55550000u, 0x55550000u};
        for (int k = 0; k < 6; k++)
            EXPECT(host[6 * t + k] == wanted[k], "%s: thread %u, vote %d: 0x%x instead of 0x%x", order_name, t, k,
                   host[6 * t + k], wanted[k]);
    }
}

// A loop that lanes leave one after another, and a last warp that is not full.
static __global__ void exited_lanes_kernel(float *out, int *rounds) {
    int lane = (int)threadIdx.x;
    if (lane >= 20) return; // of 24
    float next = __shfl_down_sync(everyone, (float)lane, 4);
    out[lane] = next;
    unsigned mask = (1u << 20) - 1;
    int count = 0;
    for (int left = lane; __any_sync(mask, left > 0); left--) count++;
    rounds[lane] = count;
}
static void test_exited_lanes(void) {
    float *out = device_array<float>(24), host[24];
    int *rounds = device_array<int>(24), host_rounds[24];
    LAUNCH(exited_lanes_kernel, 1, 24, 0, out, rounds);
    download(host, out, 24);
    download(host_rounds, rounds, 24);
    for (int lane = 0; lane < 20; lane++) {
        EXPECT(lane < 16 ? host[lane] == (float)(lane + 4) : isnan(host[lane]), "%s: lane %d got %g", order_name, lane,
               (double)host[lane]);
        EXPECT(host_rounds[lane] == 19, "%s: lane %d did %d rounds", order_name, lane, host_rounds[lane]);
    }
    EXPECT(isnan(host[20]), "what no thread wrote is %g, not poison", (double)host[20]);
}

// ---------------------------------------------------------------------------------------------------------------------
// blocks

// out[block] = sum of the block's rows, by a tree in dynamic shared memory and by shuffles; both must agree
static __global__ void block_sum_kernel(long long *out, const int *in, int count) {
    DYNAMIC_SHARED(long long, tree);
    SHARED(long long, parts, 32);
    int t = (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    int size = (int)(blockDim.x * blockDim.y * blockDim.z);
    int block = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    int blocks = (int)(gridDim.x * gridDim.y * gridDim.z);
    long long sum = 0;
    for (int i = block * size + t; i < count; i += blocks * size) sum += in[i];
    tree[t] = sum;
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(everyone, sum, lanes);
    if (t % 32 == 0) parts[t / 32] = sum;
    __syncthreads();
    for (int stride = size / 2; stride > 0; stride /= 2) { // size is a power of two
        if (t < stride) tree[t] += tree[t + stride];
        __syncthreads();
    }
    if (t == 0) {
        long long by_warps = 0;
        for (int w = 0; w < size / 32; w++) by_warps += parts[w];
        out[2 * block] = tree[0];
        out[2 * block + 1] = by_warps;
    }
}
static void test_block_sums(void) {
    enum { COUNT = 10000 };
    static int host_in[COUNT];
    int *in = device_array<int>(COUNT);
    long long *out = device_array<long long>(2 * 64), host[2 * 64], wanted = 0;
    for (int i = 0; i < COUNT; i++) wanted += host_in[i] = i * 7919 % 1000;
    cudaMemcpy(in, host_in, sizeof(host_in), cudaMemcpyHostToDevice);
    const dim3 grids[] = {dim3(1), dim3(5), dim3(2, 3), dim3(2, 3, 4)},
               blocks[] = {dim3(32), dim3(1024), dim3(8, 16), dim3(4, 4, 16)};
    for (dim3 grid : grids)
        for (dim3 block : blocks) {
            unsigned size = block.x * block.y * block.z, count = grid.x * grid.y * grid.z;
            LAUNCH(block_sum_kernel, grid, block, size * sizeof(long long), out, in, COUNT);
            download(host, out, 2 * count);
            long long sums[2] = {0, 0};
            for (unsigned i = 0; i < count; i++) sums[0] += host[2 * i], sums[1] += host[2 * i + 1];
            EXPECT(sums[0] == wanted && sums[1] == wanted,
                   "%s: %u blocks of %u: %lld by a tree, %lld by shuffles, not %lld", order_name, count, size, sums[0],
                   sums[1], wanted);
        }
}

// Shared memory as a block finds it, and what the one before left there.
static __global__ void fresh_shared_kernel(unsigned *out) {
    SHARED(unsigned, words, 8);
    DYNAMIC_SHARED(unsigned, dynamic);
    out[2 * blockIdx.x] = words[3];
    out[2 * blockIdx.x + 1] = dynamic[5];
    words[3] = dynamic[5] = blockIdx.x;
}
static void test_shared_poison(void) {
    unsigned *out = device_array<unsigned>(8), host[8];
    LAUNCH(fresh_shared_kernel, 4, 1, 32, out);
    download(host, out, 8);
    for (int i = 0; i < 8; i++) EXPECT(host[i] == 0xffffffffu, "%s: word %d is 0x%x", order_name, i, host[i]);
}

// Two instances of a template have arrays of their own, and a function that several kernels call has one in each.
static __device__ int *scratch_of_function(void) {
    SHARED(int, scratch, 4);
    return scratch;
}
template <class T> static __global__ void shared_sites_kernel(int *out) {
    SHARED(T, a, 4);
    SHARED(T, b, 4);
    int *s = scratch_of_function(), *again = scratch_of_function();
    a[threadIdx.x] = (T)threadIdx.x;
    b[threadIdx.x] = (T)(10 * threadIdx.x);
    s[threadIdx.x] = (int)(100 * threadIdx.x);
    __syncthreads();
    unsigned other = 3 - threadIdx.x;
    out[threadIdx.x] = (int)a[other] + (int)b[other] + again[other] + (int)(1000 * sizeof(a));
}
static void test_shared_arrays(void) {
    int *out = device_array<int>(8), host[8];
    LAUNCH((shared_sites_kernel<double>), 1, 4, 0, out);
    LAUNCH((shared_sites_kernel<int>), 1, 4, 0, out + 4);
    download(host, out, 8);
    for (int i = 0; i < 8; i++)
        EXPECT(host[i] == 111 * (3 - i % 4) + (i < 4 ? 32000 : 16000), "%s: thread %d got %d", order_name, i, host[i]);
}

// The last block to finish adds up what all have written.
static __global__ void last_block_kernel(int *total, int *parts, unsigned *finished) {
    SHARED(int, is_last, 1);
    int sum = (int)__reduce_add_sync(everyone, threadIdx.x + blockIdx.x);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
        __threadfence();
        is_last[0] = atomicAdd(finished, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last[0]) return;
    sum = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += 32) sum += parts[i];
    sum = (int)__reduce_add_sync(everyone, (unsigned)sum);
    if (threadIdx.x == 0) *total = sum;
}
static void test_last_block(void) {
    int *total = device_array<int>(1), *parts = device_array<int>(100), host = 0;
    unsigned *finished = device_array<unsigned>(1);
    for (int blocks = 1; blocks <= 100; blocks += 33) {
        cudaMemset(finished, 0, sizeof(*finished));
        LAUNCH(last_block_kernel, blocks, 32, 0, total, parts, finished);
        download(&host, total, 1);
        int wanted = blocks * 496 + 32 * (blocks * (blocks - 1) / 2);
        EXPECT(host == wanted, "%s: %d blocks: %d instead of %d", order_name, blocks, host, wanted);
    }
}

static __global__ void atomics_kernel(int *ints, float *f, unsigned *u) {
    atomicAdd(&ints[0], 3);
    atomicMax(&ints[1], (int)threadIdx.x - 5);
    atomicAdd(f, 0.5f);
    atomicOr(u, 1u << threadIdx.x % 32);
}
static void test_atomics(void) {
    int *ints = device_array<int>(2), host_ints[2];
    float *f = device_array<float>(1), host_f;
    unsigned *u = device_array<unsigned>(1), host_u;
    cudaMemset(ints, 0, 8);
    cudaMemset(f, 0, 4);
    cudaMemset(u, 0, 4);
    LAUNCH(atomics_kernel, 3, 100, 0, ints, f, u);
    download(host_ints, ints, 2);
    download(&host_f, f, 1);
    download(&host_u, u, 1);
    EXPECT(host_ints[0] == 900 && host_ints[1] == 94, "%s: %d %d", order_name, host_ints[0], host_ints[1]);
    EXPECT(host_f == 150.0f, "%s: %g", order_name, (double)host_f);
    EXPECT(host_u == everyone, "%s: 0x%x", order_name, host_u);
}

// Each thread that runs takes a number: the order itself.
static __global__ void order_kernel(int *out, int *turn) {
    int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    out[t] = atomicAdd(turn, 1);
    __syncthreads();
    out[128 + t] = atomicAdd(turn, 1);
}
static void test_orders(void) {
    int *out = device_array<int>(256), *turn = device_array<int>(1), host[256];
    cudaMemset(turn, 0, sizeof(int));
    LAUNCH(order_kernel, 2, 64, 0, out, turn);
    download(host, out, 256);
    bool seen[256] = {false};
    int straight = 0, backward = 0;
    for (int part = 0; part < 2; part++)
        for (int t = 0; t < 128; t++) {
            int i = 128 * part + t, block = t / 64,
                within = t % 64; // a block does its two parts before the next block starts
            seen[host[i]] = true;
            straight += host[i] == 128 * block + 64 * part + within;
            backward += host[i] == 128 * (1 - block) + 64 * part + 63 - within;
        }
    for (int i = 0; i < 256; i++) EXPECT(seen[i], "%s: nobody had turn %d", order_name, i);
    EXPECT((straight == 256) == !strcmp(order_name, "forward") && (backward == 256) == !strcmp(order_name, "reverse"),
           "%s: %d of 256 in forward order, %d in reverse order", order_name, straight, backward);
}

// ---------------------------------------------------------------------------------------------------------------------
// streams and copies

static __global__ void add_kernel(int *x, int n) {
    if (threadIdx.x == 0) *x += n;
}
static void test_streams(void) {
    int *x = device_array<int>(1), *pinned = nullptr;
    cudaStream_t other;
    cudaEvent_t event, late;
    float ms = -1;
    cudaMallocHost(&pinned, sizeof(int));
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    cudaEventCreate(&event);
    cudaEventCreate(&late);
    *pinned = 7;
    cudaMemcpyAsync(x, pinned, sizeof(int), cudaMemcpyHostToDevice, main_stream);
    LAUNCH(add_kernel, 1, 32, 0, x, 5);
    cudaEventRecord(event, main_stream);
    cudaStreamWaitEvent(other, event, 0);
    cudaMemcpyAsync(pinned, x, sizeof(int), cudaMemcpyDeviceToHost, other);
    cudaEventRecord(late, other);
    EXPECT(*pinned == 7, "%s: a copy that nobody waited for is done", order_name);
    cudaStreamSynchronize(other);
    EXPECT(*pinned == 12, "%s: %d instead of 12", order_name, *pinned);
    EXPECT(cudaEventElapsedTime(&ms, event, late) == cudaSuccess && ms >= 0, "%s: %g ms between the events", order_name,
           (double)ms);
    // an emulated library runs in stream order
    cuda_on_cpu::on_stream(main_stream, "double", [x] { *x *= 2; });
    LAUNCH(add_kernel, 1, 32, 0, x, 1);
    int host = 0; // pageable: the call returns when the copy is done
    cudaMemcpyAsync(&host, x, sizeof(int), cudaMemcpyDeviceToHost, main_stream);
    EXPECT(host == 25, "%s: %d instead of 25", order_name, host);
    cudaEventDestroy(event);
    cudaEventDestroy(late);
    cudaStreamDestroy(other);
    cudaFreeHost(pinned);
}

// A collective: until the others have come, its stream stands still, and neither the host nor another stream does.
static void test_waiting_work(void) {
    int *x = device_array<int>(1), *y = device_array<int>(1);
    cudaStream_t other;
    cudaEvent_t begun, ended;
    static bool others_are_here;
    others_are_here = false;
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    cudaEventCreate(&begun);
    cudaEventCreate(&ended);
    cudaMemsetAsync(x, 0, sizeof(int), other);
    cudaMemsetAsync(y, 0, sizeof(int), main_stream);
    cudaEventRecord(begun, other);
    cuda_on_cpu::on_stream_when(
        other, "a collective", [] { return others_are_here; }, [x] { *x += 3; });
    cudaEventRecord(ended, other);
    LAUNCH(add_kernel, 1, 32, 0, y, 1);
    cudaStreamSynchronize(main_stream);
    EXPECT(cudaEventQuery(begun) == cudaSuccess && cudaEventQuery(ended) == cudaErrorNotReady, "%s: it does not wait",
           order_name);
    EXPECT(cudaGetLastError() == cudaErrorNotReady && cudaStreamQuery(other) == cudaErrorNotReady, "%s: it is not said",
           order_name);
    cudaGetLastError();
    cudaStreamWaitEvent(main_stream, ended, 0);
    EXPECT(cudaStreamQuery(main_stream) == cudaErrorNotReady, "%s: a stream does not wait for it", order_name);
    cudaGetLastError();
    others_are_here = true;
    cudaStreamSynchronize(main_stream);
    int host[2];
    cudaMemcpy(&host[0], x, sizeof(int), cudaMemcpyDeviceToHost);
    cudaMemcpy(&host[1], y, sizeof(int), cudaMemcpyDeviceToHost);
    EXPECT(host[0] == 3 && host[1] == 1, "%s: %d and %d", order_name, host[0], host[1]);
    cudaEventDestroy(begun);
    cudaEventDestroy(ended);
    cudaStreamDestroy(other);
}

static void test_out_of_memory(void) {
    size_t available = 0, total = 0, after = 0;
    cudaMemGetInfo(&available, &total);
    void *p = &p;
    EXPECT(cudaMalloc(&p, total + 1) == cudaErrorMemoryAllocation && p == nullptr, "more than all memory was given");
    EXPECT(cudaMalloc(&p, 1000) == cudaSuccess && (uintptr_t)p % 256 == 0, "%p is not aligned to 256", p);
    cudaFree(p);
    setenv("CUDA_ON_CPU_OTHERS", "16000", 1); // of 16384 MiB
    cudaMemGetInfo(&after, &total);
    EXPECT(after == available - ((size_t)16000 << 20), "%zu bytes are free beside other processes", after);
    EXPECT(cudaMalloc(&p, (size_t)385 << 20) == cudaErrorMemoryAllocation, "others' memory was given");
    cudaGetLastError();
    unsetenv("CUDA_ON_CPU_OTHERS");
    cudaMemGetInfo(&after, &total);
    EXPECT(after == available, "%zu bytes were free, now %zu", available, after);
}

// A sanitizer may keep some of it, but not all that was ever allocated: the tests allocate for hours.
static void test_freed_memory(void) {
    long pages[2] = {0, 0}, size;
    for (int i = 0; i < 20; i++) {
        FILE *f = fopen("/proc/self/statm", "r");
        CHECK(f && fscanf(f, "%ld %ld", &size, &pages[i > 0]) == 2, "cannot read /proc/self/statm");
        fclose(f);
        void *x = nullptr;
        CHECK(cudaMalloc(&x, 32 << 20) == cudaSuccess, "no device memory");
        cudaMemset(x, i, 32 << 20);
        cudaDeviceSynchronize();
        cudaFree(x);
    }
    long mib = (pages[1] - pages[0]) * sysconf(_SC_PAGESIZE) >> 20;
    EXPECT(mib < 400, "%s: %ld MiB are kept of 20 times 32 MiB", order_name, mib);
}

static void test_failed_kernel(void) {
    int *x = nullptr, host = 7;
    cudaEvent_t event;
    cudaMalloc(&x, sizeof(int));
    cudaEventCreate(&event);
    cuda_on_cpu::plant_fault("add_kernel");
    LAUNCH(add_kernel, 1, 32, 0, x, 5);
    EXPECT(cudaGetLastError() == cudaSuccess, "%s: known before anybody has waited", order_name);
    const cudaError_t wanted = cudaErrorIllegalAddress;
    EXPECT(cudaStreamSynchronize(main_stream) == wanted, "%s: not said", order_name);
    EXPECT(cudaGetLastError() == wanted && cudaGetLastError() == wanted, "%s: forgotten", order_name);
    EXPECT(cudaMemcpy(&host, x, sizeof(int), cudaMemcpyDeviceToHost) == wanted && host == 7, "%s: a copy", order_name);
    void *p = nullptr;
    size_t available, total;
    EXPECT(cudaMalloc(&p, 8) == wanted && cudaFree(x) == wanted && cudaMemGetInfo(&available, &total) == wanted,
           "%s: memory", order_name);
    EXPECT(cudaEventRecord(event, main_stream) == wanted && cudaEventQuery(event) == wanted, "%s: events", order_name);
    cudaStream_t stream = nullptr;
    EXPECT(cudaStreamCreate(&stream) == wanted && cudaDeviceSynchronize() == wanted, "%s: streams", order_name);
    cudaDeviceReset();
    EXPECT(cudaGetLastError() == cudaSuccess && cudaFree(x) == cudaSuccess, "%s: not reset", order_name);
    cudaEventDestroy(event);
}

static void test_default_device(void) {
    int here = -1, there = -1;
    setenv("CUDA_ON_CPU_DEVICES", "3", 1);
    setenv("CUDA_ON_CPU_VISIBLE", "2,1,7,0", 1);
    int count = 0;
    cudaGetDeviceCount(&count);
    EXPECT(count == 2, "%d devices, of 3 those that CUDA_ON_CPU_VISIBLE names before its mistake", count);
    cudaSetDevice(1);
    std::thread([&] { cudaGetDevice(&there); }).join();
    cudaGetDevice(&here);
    EXPECT(here == 1 && there == 0, "devices %d and %d", here, there);
    cudaSetDevice(0);
    unsetenv("CUDA_ON_CPU_VISIBLE");
    unsetenv("CUDA_ON_CPU_DEVICES");
}

#ifdef USE_NCCL
static void expect_nccl(ncclResult_t status, ncclResult_t wanted, const char *text) {
    EXPECT(status == wanted && (status == ncclSuccess || strstr(ncclGetLastError(nullptr), text)), "%s: %d: %s", text,
           (int)status, ncclGetLastError(nullptr));
}

// Two ranks; the second is a process of its own, on device `second` of two that are called `name`.
static void expect_two_ranks(const char *second, const char *name, ncclResult_t wanted) {
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ncclGetUniqueId(&id);
    fflush(nullptr);
    pid_t child = fork();
    setenv("CUDA_ON_CPU_DEVICES", "2", 1);
    setenv("CUDA_ON_CPU_NAME", name, 1);
    if (child == 0) setenv("CUDA_ON_CPU_VISIBLE", second, 1);
    ncclResult_t status = ncclCommInitRank(&comm, 2, id, child == 0);
    if (child == 0) _exit(status);
    int ended = 0;
    waitpid(child, &ended, 0);
    expect_nccl(status, wanted, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device");
    EXPECT(WIFEXITED(ended) && WEXITSTATUS(ended) == wanted, "the second rank: %d", WEXITSTATUS(ended));
    unsetenv("CUDA_ON_CPU_NAME");
    unsetenv("CUDA_ON_CPU_DEVICES");
}
static void test_nccl_shared_gpu(void) {
    expect_two_ranks("1", "A GPU", ncclSuccess);
    expect_two_ranks("0", "A GPU", ncclInvalidUsage);
    expect_two_ranks("1", "A GPU MIG 1g.5gb", ncclInvalidUsage);
}

static void test_nccl_roots(void) {
    ncclUniqueId ids[2];
    ncclComm_t comm = nullptr;
    ncclGetUniqueId(&ids[0]);
    ncclGetUniqueId(&ids[1]);
    expect_nccl(ncclCommInitRankScalable(&comm, 1, 0, 0, ids, nullptr), ncclInvalidArgument, "nId = 0, nranks=1\n");
    expect_nccl(ncclCommInitRankScalable(&comm, 1, 0, 2, ids, nullptr), ncclInvalidArgument, "nId = 2, nranks=1\n");
    expect_nccl(ncclCommInitRankScalable(&comm, 1, 0, 1, ids, nullptr), ncclSuccess, "");
    expect_nccl(ncclCommDestroy(comm), ncclSuccess, "");
}

static void test_nccl_failed_collective(void) {
    float *x = device_array<float>(2), host = 0;
    ncclUniqueId id;
    ncclComm_t comm;
    ncclResult_t error = ncclSuccess;
    expect_nccl(ncclAllGather(x, x, 4, ncclChar, nullptr, main_stream), ncclInvalidArgument, "comm argument");
    setenv("CUDA_ON_CPU_NCCL_ASYNC", "0:1:NET/IB : a port is down", 1);
    ncclGetUniqueId(&id);
    ncclCommInitRank(&comm, 1, id, 0);
    cudaMemsetAsync(x, 0, 8, main_stream);
    ncclAllGather(x, x + 1, 4, ncclChar, comm, main_stream);
    cudaStreamSynchronize(main_stream);
    expect_nccl(ncclCommGetAsyncError(comm, &error), ncclSuccess, "");
    EXPECT(error == ncclSuccess, "%s: an error too early", order_name);
    ncclAllGather(x, x + 1, 4, ncclChar, comm, main_stream);
    EXPECT(cudaStreamQuery(main_stream) == cudaErrorNotReady, "%s: it ends", order_name);
    cudaGetLastError();
    ncclCommGetAsyncError(comm, &error);
    expect_nccl(error, ncclRemoteError, "NET/IB : a port is down\n");
    expect_nccl(ncclAllGather(x, x + 1, 4, ncclChar, comm, main_stream), ncclRemoteError, "a port is down");
    unsetenv("CUDA_ON_CPU_NCCL_ASYNC");
    ncclCommAbort(comm);
    cudaStreamSynchronize(main_stream);
    cudaMemcpy(&host, x + 1, 4, cudaMemcpyDeviceToHost);
    EXPECT(isnan(host), "%s: what was aborted gave %g", order_name, (double)host);
    expect_nccl(ncclCommDestroy(comm), ncclInvalidArgument, "comm argument");
}
#endif

// ---------------------------------------------------------------------------------------------------------------------

static __global__ void empty_kernel(int *) {}
static __global__ void shuffles_kernel(float *out, int count) {
    float x = (float)threadIdx.x;
    for (int i = 0; i < count; i++) x += __shfl_xor_sync(everyone, x, 16 >> i % 5);
    if (threadIdx.x == 0) *out = x;
}
static __global__ void barriers_kernel(int *, int count) {
    for (int i = 0; i < count; i++) __syncthreads();
}
static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
// The best of five, in CPU time: other programs run beside.
template <class F> static double best_ns(double operations, F run) {
    double best = INFINITY;
    for (int i = 0; i < 5; i++) {
        double start = cpu_seconds();
        run();
        cudaDeviceSynchronize();
        double ns = (cpu_seconds() - start) * 1e9 / operations;
        if (ns < best) best = ns;
    }
    return best;
}
static int bench(void) {
    float *f = device_array<float>(1);
    for (auto &o : orders) {
        cuda_on_cpu::set_order(o.order, o.seed);
        int *none = nullptr;
        printf("%-15s empty thread %5.1f ns", o.name,
               best_ns(4096.0 * 256, [&] { LAUNCH(empty_kernel, 4096, 256, 0, none); }));
        printf(", lane and shuffle %5.1f ns",
               best_ns(64.0 * 256 * 100, [&] { LAUNCH(shuffles_kernel, 64, 256, 0, f, 100); }));
        printf(", thread and barrier %5.1f ns\n",
               best_ns(64.0 * 256 * 100, [&] { LAUNCH(barriers_kernel, 64, 256, 0, none, 100); }));
    }
    device_array<char>(64 << 20); // a workspace, and a few tensors
    for (int i = 0; i < 10; i++) device_array<char>(1 << 16);
    double ns = best_ns(1000, [&] {
        for (int i = 0; i < 1000; i++) {
            LAUNCH(empty_kernel, 1, 1, 0, nullptr);
            cudaStreamSynchronize(main_stream);
        }
    });
    printf("launch and wait, with 65 MiB in 11 allocations %.1f us\n", ns * 1e-3);
    return EXIT_DONE;
}

static const Test tests[] = {
    {"shuffles up, down, xor and by index read the lanes that PTX defines, for every width", test_shuffles},
    {"votes and reductions count the lanes of their mask, halves of a warp apart", test_votes},
    {"lanes that have exited and unwritten memory read as NaN", test_exited_lanes},
    {"block sums over grids and blocks of three dimensions are exact", test_block_sums},
    {"shared memory is new and poisoned for every block", test_shared_poison},
    {"shared arrays are one per declaration and block, also in templates and functions", test_shared_arrays},
    {"the last block reads the results of all others", test_last_block},
    {"atomics of many threads are exact", test_atomics},
    {"forward, reverse and shuffled orders are as documented", test_orders},
    {"streams keep their order, run late, and events join them", test_streams},
    {"work that waits for other processes blocks only its stream", test_waiting_work},
    {"out of memory is an error code and does not end the program", test_out_of_memory},
    {"freed device memory is available again", test_freed_memory},
    {"after a kernel fails, every call fails until a reset", test_failed_kernel},
    {"a thread has the first visible device until it selects another", test_default_device},
#ifdef USE_NCCL
    {"two ranks on one GPU, or on two slices of one, are an error of NCCL", test_nccl_shared_gpu},
    {"ranks cannot join by more roots than there are ranks, or none", test_nccl_roots},
    {"a collective that fails has its error, and an abort ends it", test_nccl_failed_collective},
#endif
};

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    cudaStreamCreate(&main_stream);
    if (argc > 1 && !strcmp(argv[1], "--bench")) return bench();
    int passed = 0, failed = 0;
    for (const Test &test : tests) {
        if (argc > 1 && !strstr(test.sentence, argv[1])) continue;
        double start = now_seconds();
        test_failures = 0;
        for (auto &o : orders) {
            cuda_on_cpu::set_order(o.order, o.seed);
            order_name = o.name;
            test.run();
            for (void *array : arrays) cudaFree(array);
            arrays.clear();
#ifdef CUDA_ON_CPU_TSAN
            break; // what races does so in any order
#endif
        }
        printf("%s layer: %s (%.2f s)\n", test_failures ? "FAIL" : "ok  ", test.sentence, now_seconds() - start);
        if (test_failures) failed++;
        else passed++;
    }
    CHECK(passed + failed > 0, "no test's sentence contains '%s'", argc > 1 ? argv[1] : "");
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? EXIT_FAILED : EXIT_DONE;
}
