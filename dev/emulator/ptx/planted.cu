/*
planted.cu: small kernels, one per kind of access or exchange. test_translate.py plants mistakes in their PTX.

  build/ptx/sm_90/planted [NAME]      prints the results of all kernels, or of this one
  build/oncpu/planted [NAME]          the same for what g++ compiled; it must print the same numbers
*/
#include "../../../llmc/cuda/async_copy.cuh"
#include "../../../llmc/cuda/mma.cuh"
#include "../../../tests/harness.h"
#include <cuda_fp8.h>

enum { COUNT_OF_THREADS = 64 };
typedef struct {
    char first;
    int numbers[3];
} Numbers;

static __global__ void vectors(float4 *to, const float4 *from, Numbers n) {
    float4 x = from[threadIdx.x];
    x.x += (float)n.numbers[2];
    to[threadIdx.x] = x;
}
static __global__ void arrays(float4 *to, const float4 *from, Numbers n) { // in the opposite order
    SHARED(float, before, COUNT_OF_THREADS);
    SHARED(float4, tile, COUNT_OF_THREADS);
    before[threadIdx.x] = (float)n.numbers[2];
    tile[threadIdx.x] = from[threadIdx.x];
    __syncthreads();
    float4 x = tile[COUNT_OF_THREADS - 1 - threadIdx.x];
    x.x += before[COUNT_OF_THREADS - 1 - threadIdx.x];
    to[threadIdx.x] = x;
}
static __global__ void exchanges(float4 *to, const float4 *from, Numbers n) {
    float4 x = from[threadIdx.x];
    x.x = lanes_sum(x.x, WARP) + (float)n.numbers[2];
    x.y = (float)__popc(__ballot_sync(ALL_LANES, x.y > 20));
    to[threadIdx.x] = x;
}
static __global__ void copies(float4 *to, const float4 *from, Numbers n) {
    SHARED(float4, tile, COUNT_OF_THREADS);
    copy_async(&tile[threadIdx.x], from + threadIdx.x, (int)threadIdx.x != n.numbers[1]);
    copy_commit();
    copy_wait<0>();
    to[threadIdx.x] = tile[threadIdx.x];
}
// a (16,16) of rows of 16 bf16 in memory times b (16,8), its transpose
static __global__ void products(float4 *to, const float4 *from, Numbers) {
    SHARED(uint4, rows, 32);
    int lane = (int)threadIdx.x;
    float4 x = from[lane];
    rows[lane] = make_uint4(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w), bf16_pair(x.y, x.x), bf16_pair(x.w, 1));
    __syncthreads();
    unsigned a[4];
    float c[4] = {1, 2, 3, 4};
    matrices_load<true>(a, &rows[lane]);
    const unsigned b[2] = {a[1], a[2]};
    mma_bf16(c, a, b);
    to[lane] = make_float4(c[0], c[1], c[2], c[3]);
}
static __global__ void conversions(float4 *to, const float4 *from, Numbers) {
    float4 x = from[threadIdx.x];
    __nv_fp8x2_storage_t pair = __nv_cvt_float2_to_fp8x2(make_float2(x.x, x.y), __NV_SATFINITE, __NV_E4M3);
    x.x = (float)(pair & 0xFF), x.y = (float)(pair >> 8);
    x.z = to_float(__float2bfloat16_rn(x.z * 1.01f));
    x.w = sqrtf(x.w) / 3;
    to[threadIdx.x] = x;
}

typedef void (*KernelOfNumbers)(float4 *to, const float4 *from, Numbers n);
static const struct {
    const char *name;
    KernelOfNumbers kernel;
    int threads;
} kernels[] = {{"vectors", vectors, COUNT_OF_THREADS}, {"arrays", arrays, COUNT_OF_THREADS},
               {"exchanges", exchanges, WARP},         {"copies", copies, COUNT_OF_THREADS},
               {"products", products, WARP},           {"conversions", conversions, COUNT_OF_THREADS}};

int main(int argc, char **argv) {
    const Numbers numbers = {1, {2, 5, 4}};
    float from[4 * COUNT_OF_THREADS], to[4 * COUNT_OF_THREADS];
    for (int i = 0; i < 4 * COUNT_OF_THREADS; i++) from[i] = (float)(i * 37 % 101);
    float4 *device_from = (float4 *)buffer_alloc(sizeof(from), "inputs"),
           *device_to = (float4 *)buffer_alloc(sizeof(to), "outputs");
    for (const auto &k : kernels) {
        if (argc > 1 && strcmp(k.name, argv[1]) != 0) continue;
        memset(to, 0, sizeof(to));
        buffer_upload(device_from, from, sizeof(from));
        buffer_upload(device_to, to, sizeof(to));
        LAUNCH(k.kernel, 1, k.threads, 0, device_to, device_from, numbers);
        buffer_download(to, device_to, sizeof(to));
        printf("%s", k.name);
        for (int i = 0; i < 4 * k.threads; i++) printf(" %.9g", to[i]);
        printf("\n");
    }
    return EXIT_DONE;
}
