/*
test_layer.cu: what the layer promises and no kernel of the trainer shows: poison in memory that was not written and in
lanes that have exited, and the orders of threads. Every kernel runs in all orders.

  build/oncpu/test_layer           the last line is `N passed, N failed`
*/
#include "../../llmc/cuda/launch.cuh"
#include "../../tests/harness.h"
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

// A loop that lanes leave one after another, and a last warp that is not full.
static __global__ void exited_lanes_kernel(float *out, int *rounds) {
    int lane = (int)threadIdx.x;
    if (lane >= 20) return; // of 24
    float next = __shfl_sync(everyone, (float)lane, lane + 4);
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

static const Test tests[] = {
    {"lanes that have exited and unwritten memory read as NaN", test_exited_lanes},
    {"shared memory is new and poisoned for every block", test_shared_poison},
    {"forward, reverse and shuffled orders are as documented", test_orders},
};

int main(void) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    cudaStreamCreate(&main_stream);
    int failed = 0, count = 0;
    for (const Test &test : tests) {
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
        failed += test_failures > 0, count++;
    }
    printf("%d passed, %d failed\n", count - failed, failed);
    return failed ? EXIT_FAILED : EXIT_DONE;
}
