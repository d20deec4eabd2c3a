/*
planted90a.cu: a product of matrices with the asynchronous instructions of sm_90a. test_translate.py plants mistakes in
its PTX.

  D (M,N) bf16 = A (M,K) B (N,K)^T, in one block: a warpgroup that copies tiles of 128 bytes of each row, in two stages,
  and one that multiplies. In shared memory a tile is 128 / (16 W) boxes of rows of 16 W bytes, swizzled for W > 1.
  TRANSPOSED: B is (K,N) in memory. REGISTERS: A comes from registers. FP8: A and B are e4m3 instead of bf16

  build/ptx/sm_90a/planted90a [NAME]      prints a line per kernel: whether D is right
*/
#include "../../../llmc/cuda/mma.cuh"
#include "../../../tests/harness.h"
#include <cuda.h>
#include <cuda_fp8.h>

enum { M = 60, TILE_M = 64, N = 32, STAGES = 2, TILES = 4, ROW = 128, TILE_A = TILE_M * ROW, TILE_B = N * ROW };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
typedef unsigned long long u64;
static __device__ unsigned shared(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
static __device__ void barrier_wait(u64 *barrier, int parity) {
    asm volatile("{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again%=; }" ::"r"(shared(barrier)),
                 "r"(parity)
                 : "memory");
}
static __device__ void load(void *to, const CUtensorMap *map, int x, int y, int z, u64 *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(shared(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared(barrier))
        : "memory");
}
static __device__ u64 descriptor(const char *start, int leading, int stride, int swizzle) {
    return (u64)(shared(start) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)swizzle << 62;
}
#define D16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define OF_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA(OPERATION, A, TO, ...) /* TO: operand that says whether D is added to */ \
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " TO ", 0;\n"                   \
                 "wgmma.mma_async.sync.aligned." OPERATION " " D16 ", " A "; }"        \
                 : OF_D(0), OF_D(4), OF_D(8), OF_D(12)                                 \
                 : __VA_ARGS__)
#define FENCE(WHAT) asm volatile(WHAT ";" ::: "memory")
#endif

template <int W, bool TRANSPOSED, bool REGISTERS, bool FP8>
static __global__ void __launch_bounds__(256, 1)
    product(const __grid_constant__ CUtensorMap of_a, const __grid_constant__ CUtensorMap of_b,
            const __grid_constant__ CUtensorMap of_d) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ alignas(1024) char tiles_a[STAGES][TILE_A], tiles_b[STAGES][TILE_B], tile_d[TILE_M * N * 2];
    __shared__ u64 full[STAGES], empty[STAGES];
    const int swizzle = W == 8 ? 1 : W == 4 ? 2 : W == 2 ? 3 : 0, lane = (int)threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(shared(&empty[i])) : "memory");
        }
        FENCE("fence.mbarrier_init.release.cluster");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        FENCE("setmaxnreg.dec.sync.aligned.u32 40");
        unsigned leader = 0;
        if (threadIdx.x < 32)
            asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(leader));
        for (int i = 0; i < TILES && leader; i++) {
            int stage = i % STAGES, box = i * ROW / (16 * W), step = FP8 ? ROW : ROW / 2;
            if (i >= STAGES) barrier_wait(&empty[stage], i / STAGES - 1 & 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&full[stage])),
                         "r"(TILE_A + TILE_B)
                         : "memory");
            load(tiles_a[stage], &of_a, 0, 0, box, &full[stage]);
            load(tiles_b[stage], &of_b, 0, TRANSPOSED ? i * step : 0, TRANSPOSED ? 0 : box, &full[stage]);
        }
    } else {
        FENCE("setmaxnreg.inc.sync.aligned.u32 232");
        const int warp = (int)threadIdx.x / 32 % 4, row = 16 * warp + lane % 16;
        float d[16];
        for (int i = 0; i < TILES; i++) {
            const char *a = tiles_a[i % STAGES], *b = tiles_b[i % STAGES];
            barrier_wait(&full[i % STAGES], i / STAGES & 1);
            FENCE("wgmma.fence.sync.aligned");
#pragma unroll
            for (int k = 0; k < ROW; k += 32) { // bytes of a row: the depth of one wgmma
                const int box = k / (16 * W), within = k % (16 * W), adds = i + k;
                u64 of_a_tile = descriptor(a + box * TILE_M * 16 * W + within, TILE_M * 16, 8 * 16 * W, swizzle);
                u64 of_b_tile = descriptor(b + box * N * 16 * W + within, N * 16, 8 * 16 * W, swizzle);
                if (TRANSPOSED) // 16 rows of B; its columns are in boxes of 64 rows
                    of_b_tile = W == 1 ? descriptor(b + k / 2 * 16, 8 * 16, 64 * 16, swizzle)
                                       : descriptor(b + k / 2 * 16 * W, 64 * 16 * W, 8 * 16 * W, swizzle);
                if (REGISTERS) {
                    unsigned r[4];
                    matrices_load<false>(r, a + (k / 16 + lane / 16) * TILE_M * 16 + row * 16);
                    FENCE("wgmma.fence.sync.aligned");
                    WGMMA("m64n32k16.f32.bf16.bf16", "{%16, %17, %18, %19}, %20, adds, 1, 1, 0", "%21", "r"(r[0]),
                          "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(of_b_tile), "r"(adds));
                } else if (FP8)
                    WGMMA("m64n32k32.f32.e4m3.e4m3", "%16, %17, adds, 1, 1", "%18", "l"(of_a_tile), "l"(of_b_tile),
                          "r"(adds));
                else
                    WGMMA("m64n32k16.f32.bf16.bf16", "%16, %17, adds, 1, 1, 0, %19", "%18", "l"(of_a_tile),
                          "l"(of_b_tile), "r"(adds), "n"(TRANSPOSED));
            }
            FENCE("wgmma.commit_group.sync.aligned");
            FENCE("wgmma.wait_group.sync.aligned 0");
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&empty[i % STAGES])) : "memory");
        }
        for (int n = 0; n < N; n += 16)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             shared(tile_d + (row * N + n + lane / 16 * 8) * 2)),
                         "r"(bf16_pair(d[n / 2], d[n / 2 + 1])), "r"(bf16_pair(d[n / 2 + 2], d[n / 2 + 3])),
                         "r"(bf16_pair(d[n / 2 + 4], d[n / 2 + 5])), "r"(bf16_pair(d[n / 2 + 6], d[n / 2 + 7]))
                         : "memory");
        FENCE("fence.proxy.async.shared::cta");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %1}], [%2];" ::"l"(&of_d), "r"(0),
                     "r"(shared(tile_d))
                     : "memory");
        FENCE("cp.async.bulk.commit_group");
        FENCE("cp.async.bulk.wait_group 0");
    }
#else // what g++ compiles is replaced
    (void)of_a, (void)of_b, (void)of_d;
#endif
}

// to = from + 1, of 256 numbers, by copies of one dimension
static __global__ void plain(float *to, const float *from) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ alignas(16) float buffer[256];
    __shared__ u64 barrier;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&barrier)) : "memory");
        FENCE("fence.mbarrier_init.release.cluster");
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 1024;" ::"r"(shared(&barrier)) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(
                         shared(buffer)),
                     "l"(from), "r"(shared(&barrier))
                     : "memory");
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&barrier)) : "memory");
    }
    __syncthreads();
    barrier_wait(&barrier, 0);
    buffer[threadIdx.x] += 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        FENCE("fence.proxy.async.shared::cta"); // after the barrier: also for the other threads
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared(&barrier)) : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" ::"l"(to), "r"(shared(buffer))
                     : "memory");
        FENCE("cp.async.bulk.commit_group");
        FENCE("cp.async.bulk.wait_group.read 0");
    }
#else
    (void)to, (void)from;
#endif
}

// to += from, of 256 numbers, four at a time
static __global__ void vectors(float *to, const float *from) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (threadIdx.x >= 64) return;
    const float4 x = ((const float4 *)from)[threadIdx.x];
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"((float4 *)to + threadIdx.x),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
#else
    (void)to, (void)from;
#endif
}

// Rows of 16 W bytes of a matrix whose rows have `row` bytes, as boxes: (bytes, rows, boxes)
static CUtensorMap boxes(void *matrix, int w, bool fp8, int rows, int row, int box_rows, int box_count) {
    static const CUtensorMapSwizzle swizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                                  CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
    const int width = 16 * w / (fp8 ? 1 : 2);
    cuuint64_t sizes[] = {(cuuint64_t)width, (cuuint64_t)rows, (cuuint64_t)(row / (16 * w))};
    cuuint64_t strides[] = {(cuuint64_t)row, (cuuint64_t)(16 * w)};
    cuuint32_t box[] = {(cuuint32_t)width, (cuuint32_t)box_rows, (cuuint32_t)box_count}, ones[] = {1, 1, 1};
    CUtensorMap map;
    CHECK(cuTensorMapEncodeTiled(&map, fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                                 matrix, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 swizzles[w == 8   ? 3
                                          : w == 4 ? 2
                                                   : w - 1],
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS,
          "cuTensorMapEncodeTiled");
    return map;
}

typedef void (*Product)(const CUtensorMap of_a, const CUtensorMap of_b, const CUtensorMap of_d);
static const struct {
    const char *name;
    Product kernel;
    int w;
    bool transposed, fp8;
} kernels[] = {{"swizzle_128", product<8, false, false, false>, 8, false, false},
               {"swizzle_64", product<4, false, false, false>, 4, false, false},
               {"swizzle_32_transposed", product<2, true, false, false>, 2, true, false},
               {"swizzle_none_transposed", product<1, true, false, false>, 1, true, false},
               {"registers", product<1, false, true, false>, 1, false, false},
               {"fp8", product<8, false, false, true>, 8, false, true}};

static int number(int i) { return (i * 2654435761u >> 13) % 3 - 1; } // -1, 0, 1
static void put(unsigned char *bytes, int i, int x, bool fp8) {
    if (fp8) bytes[i] = (unsigned char)__nv_cvt_float_to_fp8((float)x, __NV_SATFINITE, __NV_E4M3);
    else ((__nv_bfloat16 *)bytes)[i] = __float2bfloat16((float)x);
}

static void of_one_dimension(const char *name, void (*kernel)(float *, const float *), float *to, float *from) {
    float numbers[256], results[256];
    for (int i = 0; i < 256; i++) numbers[i] = (float)i, results[i] = 1;
    buffer_upload(from, numbers, sizeof(numbers));
    buffer_upload(to, results, sizeof(results));
    LAUNCH(kernel, 1, 256, 0, to, from);
    buffer_download(results, to, sizeof(results));
    int wrong = 0;
    for (int i = 0; i < 256; i++) wrong += results[i] != (float)(i + 1);
    printf("%s %s\n", name, wrong ? "wrong results" : "right");
}

// What the driver refuses: one value of a valid call is replaced in each.
static void refused_tensor_maps(char *matrix) {
    int refused = 0;
    for (int i = 0; i < 6; i++) {
        cuuint64_t sizes[] = {64, i == 0 ? 0u : 8u}, strides[] = {i == 1 ? 136u : 128u};
        cuuint32_t box[] = {i == 2 ? 72u : i == 3 ? 60u : 64u, i == 4 ? 257u : 8u}, ones[] = {1, 1};
        CUtensorMap map;
        refused += cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix + (i == 5 ? 8 : 0), sizes,
                                          strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_ERROR_INVALID_VALUE;
    }
    printf("tensor_maps %s\n", refused == 6 ? "right" : "wrong results");
}

int main(int argc, char **argv) {
    enum { BYTES = TILES * ROW }; // of a row of A
    static unsigned char a[M * BYTES], b[N * BYTES];
    static __nv_bfloat16 d[M * N];
    void *on_device[] = {buffer_alloc(sizeof(a), "A"), buffer_alloc(sizeof(b), "B"), buffer_alloc(sizeof(d), "D")};
    if (argc == 1) refused_tensor_maps((char *)on_device[0]);
    float *to = (float *)on_device[0], *from = (float *)on_device[1];
    if (argc == 1 || strcmp(argv[1], "plain") == 0) of_one_dimension("plain", plain, to, from);
    if (argc == 1 || strcmp(argv[1], "vectors") == 0) of_one_dimension("vectors", vectors, to, from);
    for (const auto &k : kernels) {
        if (argc > 1 && strcmp(k.name, argv[1]) != 0) continue;
        const int depth = k.fp8 ? BYTES : BYTES / 2;
        for (int i = 0; i < M * depth; i++) put(a, i, number(i), k.fp8);
        for (int n = 0; n < N; n++)
            for (int i = 0; i < depth; i++)
                put(b, k.transposed ? i * N + n : n * depth + i, number(~(n * depth + i)), k.fp8);
        buffer_upload(on_device[0], a, sizeof(a));
        buffer_upload(on_device[1], b, sizeof(b));
        CUtensorMap of_a = boxes(on_device[0], k.w, k.fp8, M, BYTES, TILE_M, ROW / (16 * k.w));
        CUtensorMap of_b = k.transposed ? boxes(on_device[1], k.w, k.fp8, depth, N * 2, 64, N * 2 / (16 * k.w))
                                        : boxes(on_device[1], k.w, k.fp8, N, BYTES, N, ROW / (16 * k.w));
        CUtensorMap of_d;
        cuuint64_t sizes[] = {N, M}, strides[] = {N * 2};
        cuuint32_t box[] = {N, TILE_M}, ones[] = {1, 1};
        CHECK(cuTensorMapEncodeTiled(&of_d, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, on_device[2], sizes, strides, box,
                                     ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                     CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS,
              "cuTensorMapEncodeTiled");
        LAUNCH(k.kernel, 1, 256, 0, of_a, of_b, of_d);
        buffer_download(d, on_device[2], sizeof(d));
        int wrong = 0;
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) {
                int sum = 0;
                for (int i = 0; i < depth; i++) sum += number(m * depth + i) * number(~(n * depth + i));
                wrong += __bfloat162float(d[m * N + n]) != (float)sum;
            }
        printf("%s %s\n", k.name, wrong ? "wrong results" : "right");
    }
    return EXIT_DONE;
}
