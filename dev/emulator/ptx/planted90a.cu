/*
planted90a.cu: a product of matrices with the asynchronous instructions of sm_90a. test_translate.py plants mistakes in
its PTX.

  D (M,N) bf16 = A (M,K) B (N,K)^T, in one block: a warpgroup that copies tiles of 128 bytes of each row, in two stages,
  and one that multiplies. REGISTERS: A comes from registers

  build/ptx/sm_90a/planted90a [NAME]      prints a line per kernel: whether D is right
*/
#include "../../../llmc/cuda/mma.cuh"
#include "../../../tests/harness.h"
#include <cuda.h>

enum { M = 60, TILE_M = 64, N = 32, STAGES = 2, TILES = 4, ROW = 128, TILE_A = TILE_M * ROW, TILE_B = N * ROW };
enum { DEPTH = TILES * ROW / 2 };

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
static __device__ u64 descriptor(const char *start) { // rows of 128 bytes, swizzled
    return (u64)(shared(start) >> 4) | (u64)(8 * ROW >> 4) << 32 | (u64)1 << 62;
}
#define D16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define OF_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA(A, TO, ...) /* TO: operand that says whether D is added to */               \
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " TO ", 0;\n"                      \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " D16 ", " A "; }" \
                 : OF_D(0), OF_D(4), OF_D(8), OF_D(12)                                    \
                 : __VA_ARGS__)
#define FENCE(WHAT) asm volatile(WHAT ";" ::: "memory")
#endif

template <bool REGISTERS>
static __global__ void __launch_bounds__(256, 1)
    product(const __grid_constant__ CUtensorMap of_a, const __grid_constant__ CUtensorMap of_b, unsigned *to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ alignas(1024) char tiles_a[STAGES][TILE_A], tiles_b[STAGES][TILE_B];
    __shared__ alignas(16) unsigned tile_d[TILE_M * N / 2];
    __shared__ u64 full[STAGES], empty[STAGES];
    const int lane = (int)threadIdx.x % 32;
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
        for (int i = 0; i < TILES && threadIdx.x == 0; i++) {
            int stage = i % STAGES;
            if (i >= STAGES) barrier_wait(&empty[stage], i / STAGES - 1 & 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&full[stage])),
                         "r"(TILE_A + TILE_B)
                         : "memory");
            load(tiles_a[stage], &of_a, 0, 0, i, &full[stage]);
            load(tiles_b[stage], &of_b, 0, 0, i, &full[stage]);
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
                const int adds = i + k;
                if (REGISTERS) {
                    unsigned r[4];
                    matrices_load<false>(r, a + row * ROW + (k / 16 + lane / 16 ^ row % 8) * 16);
                    FENCE("wgmma.fence.sync.aligned");
                    WGMMA("{%16, %17, %18, %19}, %20, adds, 1, 1, 0", "%21", "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]),
                          "l"(descriptor(b + k)), "r"(adds));
                } else
                    WGMMA("%16, %17, adds, 1, 1, 0, 0", "%18", "l"(descriptor(a + k)), "l"(descriptor(b + k)),
                          "r"(adds));
            }
            FENCE("wgmma.commit_group.sync.aligned");
            FENCE("wgmma.wait_group.sync.aligned 0");
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&empty[i % STAGES])) : "memory");
        }
        for (int n = 0; n < N; n += 16)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             shared(tile_d + (row * N + n + lane / 16 * 8) / 2)),
                         "r"(bf16_pair(d[n / 2], d[n / 2 + 1])), "r"(bf16_pair(d[n / 2 + 2], d[n / 2 + 3])),
                         "r"(bf16_pair(d[n / 2 + 4], d[n / 2 + 5])), "r"(bf16_pair(d[n / 2 + 6], d[n / 2 + 7]))
                         : "memory");
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < M * N / 2; i += (int)blockDim.x) to[i] = tile_d[i];
#else // what g++ compiles is replaced
    (void)of_a, (void)of_b, (void)to;
#endif
}

// to = from + 1, of 256 numbers, by copies of one dimension: each number is copied twice
static __global__ void plain(float *to, const float *from) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ alignas(16) float buffer[256];
    __shared__ u64 barrier;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&barrier)) : "memory");
        FENCE("fence.mbarrier_init.release.cluster");
    }
    __syncthreads();
    float sum = 0;
    for (int round = 0; round < 2; round++) {
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(shared(&barrier)) : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(
                    shared(buffer)),
                "l"(from), "r"(shared(&barrier))
                : "memory");
        }
        barrier_wait(&barrier, round);
        sum += buffer[threadIdx.x];
        buffer[threadIdx.x] = 0;
        FENCE("fence.proxy.async.shared::cta");
        __syncthreads();
    }
    to[threadIdx.x] = sum / 2 + 1;
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

// Rows of 128 bytes of a matrix (rows,DEPTH), as boxes: (columns, rows, boxes)
static CUtensorMap boxes(void *matrix, int rows, int box_rows) {
    const cuuint64_t sizes[] = {ROW / 2, (cuuint64_t)rows, TILES}, strides[] = {DEPTH * 2, ROW};
    const cuuint32_t box[] = {ROW / 2, (cuuint32_t)box_rows, 1}, ones[] = {1, 1, 1};
    CUtensorMap map;
    CHECK(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, matrix, sizes, strides, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS,
          "cuTensorMapEncodeTiled");
    return map;
}

typedef void (*Product)(const CUtensorMap of_a, const CUtensorMap of_b, unsigned *to);
static const struct {
    const char *name;
    Product kernel;
} kernels[] = {{"product", product<false>}, {"registers", product<true>}};

static int number(int i) { return (i * 2654435761u >> 13) % 3 - 1; } // -1, 0, 1
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
        cuuint64_t sizes[] = {64, i == 0 ? 0u : 8u, 1}, strides[] = {i == 1 ? 136u : 128u, 1024};
        cuuint32_t box[] = {i == 2 ? 72u : i == 3 ? 60u : 64u, i == 4 ? 257u : 8u, 1}, ones[] = {1, 1, 1};
        CUtensorMap map;
        refused += cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, matrix + (i == 5 ? 8 : 0), sizes,
                                          strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_ERROR_INVALID_VALUE;
    }
    printf("tensor_maps %s\n", refused == 6 ? "right" : "wrong results");
}

int main(int argc, char **argv) {
    static __nv_bfloat16 a[M * DEPTH], b[N * DEPTH], d[M * N];
    void *on_device[] = {buffer_alloc(sizeof(a), "A"), buffer_alloc(sizeof(b), "B"), buffer_alloc(sizeof(d), "D")};
    if (argc == 1) refused_tensor_maps((char *)on_device[0]);
    float *to = (float *)on_device[0], *from = (float *)on_device[1];
    if (argc == 1 || strcmp(argv[1], "plain") == 0) of_one_dimension("plain", plain, to, from);
    if (argc == 1 || strcmp(argv[1], "vectors") == 0) of_one_dimension("vectors", vectors, to, from);
    for (const auto &k : kernels) {
        if (argc > 1 && strcmp(k.name, argv[1]) != 0) continue;
        for (int i = 0; i < M * DEPTH; i++) a[i] = __float2bfloat16((float)number(i));
        for (int i = 0; i < N * DEPTH; i++) b[i] = __float2bfloat16((float)number(~i));
        buffer_upload(on_device[0], a, sizeof(a));
        buffer_upload(on_device[1], b, sizeof(b));
        LAUNCH(k.kernel, 1, 256, 0, boxes(on_device[0], M, TILE_M), boxes(on_device[1], N, N),
               (unsigned *)on_device[2]);
        buffer_download(d, on_device[2], sizeof(d));
        int wrong = 0;
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) {
                int sum = 0;
                for (int i = 0; i < DEPTH; i++) sum += number(m * DEPTH + i) * number(~(n * DEPTH + i));
                wrong += __bfloat162float(d[m * N + n]) != (float)sum;
            }
        printf("%s %s\n", k.name, wrong ? "wrong results" : "right");
    }
    return EXIT_DONE;
}
