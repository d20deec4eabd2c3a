/*
hopper.cuh: the asynchronous instructions of sm_90a: barriers in shared memory, copies of boxes of a tensor (TMA), and
products of a warpgroup, 128 threads whose first is a multiple of 128.

  mbarrier   mbarrier_init(b, arrivals) by one thread, then mbarrier_init_fence() by it, then __syncthreads. A phase
             ends when all arrivals and all expected bytes have come; mbarrier_wait(b, p) waits for the end of the phase
             of parity p: 0 is the first one, 1 the second
  copies     tensor_load: a box, by one thread, after mbarrier_expect (which is an arrival) of its bytes. Elements
             outside of the tensor are zeros and count. bulk_load: a multiple of 16 bytes of device memory as they are,
             by one thread after mbarrier_expect. proxy_fence(): by writers of shared memory, before a barrier, wgmma
  boxes      64 columns of bf16, 128 bytes a row, with swizzle: at a multiple of 1024 of shared memory, pack p (16
             bytes) of row r is at 128 r + 16 (p ^ r % 8). A wider matrix is boxes of all its rows, one after another
  wgmma      d (64,N) = a (64,16) b (16,N) + (add ? d : 0), bf16, sums in fp32. Lane 4g + r of warp w has in d[n][c] row
             16w + g + 8 (c / 2), column 8n + 2r + c % 2, and in registers of a what mma.cuh has: d and a as if the
             products of mma.cuh were side by side. Descriptors for matrices in boxes:
               tile_of_rows(box, k)             a or b whose 16 columns (sums are over columns) are from column k on
               tile_of_columns(box, k, rows)    b whose sums are over rows, 16 from row k on (B_TRANSPOSED, and
                                                A_TRANSPOSED); boxes of `rows` rows
             Before the first wgmma, and when registers of one were accessed: wgmma_fence(). wgmma_commit() ends a
             group; wgmma_wait<LEFT>() waits until at most LEFT groups are under way. wgmma_pin(registers) keeps the
             compiler from moving accesses across it: after a wait, and before a fence
  registers  registers_less<24>, registers_more<240> set the registers per thread of a warpgroup; see launch bounds. A
             kernel of three warpgroups with fewer than HOPPER_REGISTERS at its launch would hang: hopper_starts(...)
  device     hopper_device(), hopper_heads(D, DV): whether this program has code for sm_90a, and the device runs it
  source     PTX ISA, "mbarrier", "cp.async.bulk.tensor", "Asynchronous Warpgroup Level Matrix Instructions",
             "setmaxnreg"; CUDA driver API, "Tensor Map Object Management"
*/
#pragma once
#include "device_peak.h"
#include "kernel_utils.cuh"
#include <cuda.h>

enum { WARPGROUP = 128, BOX_COLUMNS = 64, BOX_ROW = 128, BOX_ALIGNMENT = 1024 };

// ---------------------------------------------------------------------------------------------------
// On the host

static inline bool hopper_device(void) {
#ifdef CUDA_ON_CPU
    const char *compiled_for = getenv("CUDA_ON_CPU_CAPABILITY");
    return compiled_for && strcmp(compiled_for, "90a") == 0;
#elif defined(CODE_FOR_SM_90A)
    static int known; // 1: no, 2: yes
    if (!known) {
        cudaDeviceProp facts = device_properties();
        known = facts.major == 9 && facts.minor == 0 ? 2 : 1;
    }
    return known == 2;
#else
    return false;
#endif
}

static inline bool hopper_heads(int D, int DV) { return hopper_device() && wgmma_widths(D, DV); }

enum { HOPPER_REGISTERS = (24 + 240 + 240) / 3 }; // registers of each thread at the launch
// Whether the compiler has given a kernel enough registers; otherwise a warning, which names it with its parameters.
template <class Kernel> static inline bool hopper_starts(Kernel kernel, const char *name, int a, int b, int c) {
    cudaFuncAttributes is;
    CUDA_CHECK(cudaFuncGetAttributes(&is, kernel));
    if (is.numRegs >= HOPPER_REGISTERS) return true;
    warn("%s<%d, %d, %d> has %d registers per thread and requires %d: a slower kernel replaces it; build with the "
         "compiler of CUDA 13.0",
         name, a, b, c, is.numRegs, HOPPER_REGISTERS);
    return false;
}

// Describes (count, rows, columns) numbers at `tensor`, rows ld apart and matrices rows * ld, in boxes of box_rows rows
// and 64 columns.
static inline CUtensorMap tensor_map(const void *tensor, int columns, int rows, int count, int ld, int box_rows) {
    static decltype(&cuTensorMapEncodeTiled) encode; // a function of the driver, which is not linked
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        void *function = NULL;
        CUDA_CHECK(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
        CHECK(function, "the CUDA driver has no cuTensorMapEncodeTiled; install a newer driver");
        memcpy(&encode, &function, sizeof(encode));
    }
    const cuuint64_t row = (cuuint64_t)ld * sizeof(uint16_t);
    const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)count};
    const cuuint64_t strides[] = {row, row * (cuuint64_t)rows};
    const cuuint32_t box[] = {BOX_COLUMNS, (cuuint32_t)box_rows, 1}, ones[] = {1, 1, 1};
    CUtensorMap map;
    CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void *>(tensor), sizes, strides, box,
                             ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled: error %d for %d matrices of %d rows of %d, %d apart",
          (int)status, count, rows, columns, ld);
    return map;
}

// ---------------------------------------------------------------------------------------------------
// On the device

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
static __device__ inline unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

static __device__ inline void mbarrier_init(uint64_t *b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
static __device__ inline void mbarrier_init_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ inline void mbarrier_arrive(uint64_t *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
static __device__ inline void mbarrier_expect(uint64_t *b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}
static __device__ inline void mbarrier_wait(uint64_t *b, int parity) {
    asm volatile("{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again%=; }" ::"r"(shared_address(b)),
                 "r"(parity)
                 : "memory");
}

static __device__ inline void tensor_load(void *to, const CUtensorMap *map, int column, int row, int matrix,
                                          uint64_t *b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(shared_address(b))
        : "memory");
}
static __device__ inline void bulk_load(void *to, const void *from, int bytes, uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(b))
                 : "memory");
}
static __device__ inline void proxy_fence(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int COUNT> static __device__ inline void registers_less(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ inline void registers_more(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Bits 0-13, 16-29 and 32-45: address and two distances in units of 16 bytes; bits 62 and 63: swizzle of 128 bytes.
static __device__ inline uint64_t tile_descriptor(const void *start, int leading, int stride) {
    return (uint64_t)(shared_address(start) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62;
}
static __device__ inline uint64_t tile_of_rows(const void *box, int k) { // k: column within the box
    return tile_descriptor((const char *)box + k * 2, 0, 8 * BOX_ROW);
}
static __device__ inline uint64_t tile_of_columns(const void *box, int k, int rows) {
    return tile_descriptor((const char *)box + k * BOX_ROW, rows * BOX_ROW, 8 * BOX_ROW);
}

static __device__ inline void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ inline void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> static __device__ inline void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int N> static __device__ inline void wgmma_pin(float (&d)[N][4]) {
    UNROLL
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
template <int N> static __device__ inline void wgmma_pin(unsigned (&a)[N][4]) {
    UNROLL
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Keeps the next wgmma_wait after the computation of x: ptxas moves a wait up, but not across a store to shared memory.
// to: 4 bytes of this thread.
static __device__ inline void wgmma_wait_after(float *to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared_address(to)), "f"(x) : "memory");
}

#define WGMMA_OF_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_32                                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_64                                                                                                 \
    WGMMA_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
             "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_ROW(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_ROWS(i) WGMMA_ROW(i), WGMMA_ROW(i + 1), WGMMA_ROW(i + 2), WGMMA_ROW(i + 3)
#define WGMMA_8 WGMMA_ROWS(0), WGMMA_ROWS(4)
#define WGMMA_16 WGMMA_8, WGMMA_ROWS(8), WGMMA_ROWS(12)
// D: its registers; ADD: the operand that says whether D is added to; REST: the other operands, in the text's order
#define WGMMA(N, D, REST, ADD, OF_D, ...)                                                        \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, " ADD ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" D "}, " REST "; }" \
                 : OF_D                                                                          \
                 : __VA_ARGS__)

// a, b: descriptors
template <bool A_TRANSPOSED, bool B_TRANSPOSED, int ROWS>
static __device__ inline void wgmma_shared(float (&d)[ROWS][4], uint64_t a, uint64_t b, bool add) {
    static_assert(ROWS == 4 || ROWS == 8 || ROWS == 16, "N of 32, 64 and 128 are written");
    if constexpr (ROWS == 4)
        WGMMA(32, WGMMA_OF_16, "%16, %17, add, 1, 1, %19, %20", "%18", WGMMA_ROWS(0), "l"(a), "l"(b), "r"((int)add),
              "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));
    else if constexpr (ROWS == 8)
        WGMMA(64, WGMMA_32, "%32, %33, add, 1, 1, %35, %36", "%34", WGMMA_8, "l"(a), "l"(b), "r"((int)add),
              "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));
    else
        WGMMA(128, WGMMA_64, "%64, %65, add, 1, 1, %67, %68", "%66", WGMMA_16, "l"(a), "l"(b), "r"((int)add),
              "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));
}
template <bool B_TRANSPOSED, int ROWS>
static __device__ inline void wgmma_registers(float (&d)[ROWS][4], const unsigned (&a)[4], uint64_t b, bool add) {
    static_assert(ROWS == 8 || ROWS == 16, "N of 64 and 128 are written");
    if constexpr (ROWS == 8)
        WGMMA(64, WGMMA_32, "{%32, %33, %34, %35}, %36, add, 1, 1, %38", "%37", WGMMA_8, "r"(a[0]), "r"(a[1]),
              "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(B_TRANSPOSED));
    else
        WGMMA(128, WGMMA_64, "{%64, %65, %66, %67}, %68, add, 1, 1, %70", "%69", WGMMA_16, "r"(a[0]), "r"(a[1]),
              "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(B_TRANSPOSED));
}

// Stores four matrices of 8 x 8 bf16 to shared memory, in the layout that matrices_load reads.
static __device__ inline void matrices_store(void *row, const unsigned (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// to[0 .. 3] += x in device memory; `to` is at a multiple of 16
static __device__ inline void add_four(float *to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}
#endif
