/*
device_math.h: device functions that need no scheduler: fences, atomics, and what CUDA has beyond the C library. Each
computes what the device computes, up to the rounding of the C library's exp, log and so on.
*/
#pragma once

#include <cuda_fp8.h>

// Fences: the threads of a block take turns on one OS thread, so that every write is seen at once. ThreadSanitizer
// learns that a fence and then an atomic order what came before. Atomics return the old value and order nothing alone.
#ifdef CUDA_ON_CPU_TSAN
inline void __threadfence() { cuda_on_cpu::fence(); }
#define CUDA_ON_CPU_AROUND_ATOMIC(when, address) cuda_on_cpu::when##_atomic(address)
#else
inline void __threadfence() {}
#define CUDA_ON_CPU_AROUND_ATOMIC(when, address) (void)0
#endif

template <class T, class F> T cuda_on_cpu_atomic(T *address, F change) {
    T old, wanted;
    CUDA_ON_CPU_AROUND_ATOMIC(before, address);
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do wanted = change(old);
    while (!__atomic_compare_exchange(address, &old, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    CUDA_ON_CPU_AROUND_ATOMIC(after, address);
    return old;
}
#define CUDA_ON_CPU_ATOMIC(name, type, expression)                                            \
    inline type name(type *address, type value) {                                             \
        return cuda_on_cpu_atomic(address, [value](type old) -> type { return expression; }); \
    }
CUDA_ON_CPU_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)value))
CUDA_ON_CPU_ATOMIC(atomicAdd, unsigned, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, float, old + value)
CUDA_ON_CPU_ATOMIC(atomicMax, int, old > value ? old : value)
CUDA_ON_CPU_ATOMIC(atomicMax, unsigned, old > value ? old : value)
#undef CUDA_ON_CPU_ATOMIC

// bits
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class To, class From> To cuda_on_cpu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same number of bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
inline int __float_as_int(float x) { return cuda_on_cpu_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu_bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu_bits<float>(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) { // four bytes of those of a, then b
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selectors >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

// arithmetic
inline float __fdividef(float x, float y) { // 0 for a divisor of 2^126 and more, NaN if x is infinite too
    return fabsf(y) > 0x1p126f && fabsf(y) <= 0x1.fffffep127f ? x * 0.0f : x / y;
}
inline float __expf(float x) { return exp2f(x * 1.44269504f); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
#define CUDA_ON_CPU_MIN_MAX(type)                             \
    inline type min(type a, type b) { return a < b ? a : b; } \
    inline type max(type a, type b) { return a > b ? a : b; }
CUDA_ON_CPU_MIN_MAX(int)
CUDA_ON_CPU_MIN_MAX(unsigned)
CUDA_ON_CPU_MIN_MAX(long)
CUDA_ON_CPU_MIN_MAX(unsigned long)
CUDA_ON_CPU_MIN_MAX(long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long)
#undef CUDA_ON_CPU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// The products of llmc/cuda/mma.cuh, of `count` numbers in two registers, which `number` gives.
template <typename A, typename B>
inline void cuda_on_cpu_mma_of(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], int count, A a_number,
                               B b_number) {
    struct Operands {
        unsigned a[4], b[2];
    } own, all[32];
    const int lane = (int)(threadIdx.x % 32), g = lane / 4, r = lane % 4;
    auto both = [](unsigned low, unsigned high) { return (uint64_t)high << 32 | low; };
    memcpy(own.a, a, sizeof(a)), memcpy(own.b, b, sizeof(b));
    cuda_on_cpu::exchange(&own, sizeof(own), all);
    for (int from = 0; from < 4; from++) { // the columns of a, and rows of b, that these lanes hold
        const unsigned *x = all[4 * g + from].a;
        for (int i = 0; i < 4; i++) {
            const unsigned *y = all[4 * (2 * r + i % 2) + from].b;
            const uint64_t row = both(x[i / 2], x[i / 2 + 2]), column = both(y[0], y[1]);
            for (int k = 0; k < count; k++) c[i] += a_number(row, k) * b_number(column, k);
        }
    }
}
inline void cuda_on_cpu_mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    auto number = [](uint64_t bits, int i) { return __uint_as_float((unsigned)(bits >> 16 * i & 0xFFFF) << 16); };
    cuda_on_cpu_mma_of(c, a, b, 4, number, number);
}
// Codes are converted by tables.
inline const float *cuda_on_cpu_fp8_numbers(bool e4m3) {
    struct Tables {
        float numbers[2][256];
        Tables() {
            for (int i = 0; i < 512; i++)
                numbers[i / 256][i % 256] = (float)(__half)__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(i % 256),
                                                                                   i / 256 ? __NV_E4M3 : __NV_E5M2);
        }
    };
    static const Tables tables;
    return tables.numbers[e4m3];
}
inline void cuda_on_cpu_mma_fp8(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool a_is_e4m3) {
    const float *as = cuda_on_cpu_fp8_numbers(a_is_e4m3), *bs = cuda_on_cpu_fp8_numbers(true);
    cuda_on_cpu_mma_of(
        c, a, b, 8, [&](uint64_t bits, int i) { return as[bits >> 8 * i & 0xFF]; },
        [&](uint64_t bits, int i) { return bs[bits >> 8 * i & 0xFF]; });
}

// ldmatrix of llmc/cuda/mma.cuh: each lane reads from the rows whose addresses other lanes give.
inline void cuda_on_cpu_ldmatrix(unsigned (&to)[4], const void *row, bool transposed) {
    if ((uintptr_t)row % 16) cuda_on_cpu::fail("ldmatrix reads from %p, which is not a multiple of 16", row);
    const int lane = (int)(threadIdx.x % 32), g = lane / 4, r = lane % 4;
    const uint16_t *rows[32];
    cuda_on_cpu::exchange(&row, sizeof(row), rows);
    for (int j = 0; j < 4; j++) {
        uint16_t pair[2];
        for (int i = 0; i < 2; i++) pair[i] = transposed ? rows[8 * j + 2 * r + i][g] : rows[8 * j + g][2 * r + i];
        to[j] = (unsigned)pair[1] << 16 | pair[0];
    }
}

// cp.async of llmc/cuda/async_copy.cuh, for blocks of one dimension. A copy takes place as late or as early as the
// rules allow (set_copies). scheduler.cpp keeps the lists of those that are under way.
namespace cuda_on_cpu {
struct AsyncCopy {
    void *to;
    const void *from;
    bool valid;
    int group;
};
bool copy_waits(AsyncCopy copy); // whether the copy takes place later, and then adds it to the list of the thread
void copy_commit();
bool copy_due(int left, AsyncCopy *copy); // the next copy of the groups before the last `left`; false: there is none
inline void copy_now(AsyncCopy copy) {
    if (copy.valid) memcpy(copy.to, copy.from, 16);
    else memset(copy.to, 0, 16);
}
inline void copy_async(void *to, const void *from, bool valid) {
    AsyncCopy copy = {to, from, valid, 0};
    if (!copy_waits(copy)) copy_now(copy);
}
inline void copy_wait(int left) {
    for (AsyncCopy copy; copy_due(left, &copy);) copy_now(copy);
}
} // namespace cuda_on_cpu

// a load with a caching hint: a plain one
template <class T> T __ldcg(const T *p) { return *p; }
