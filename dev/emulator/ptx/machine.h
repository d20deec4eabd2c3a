/*
machine.h: what the C++ of translate.py calls: the instructions that are no operators of C++, memory with its checks,
and the table of kernels. Barriers, exchanges, tensor cores and asynchronous copies are those of dev/emulator.

  addresses     global, local and parameters: pointers of the host. shared: 32 bits, from the start of the block's
                shared memory
  approximate   the instructions ".approx" return the exact result plus an error, which depends on the result only,
                up to the largest documented one. PTX ISA 9.1, "Floating Point Instructions": ex2 2 ulps of the
                correctly rounded result for all inputs; div 2 ulps for divisors from 2^-126 to 2^126; rcp 1 ulp
*/
#pragma once
#include "../internal.h"

namespace ptx {

typedef uint8_t u8;
typedef int8_t s8;
typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;

using cuda_on_cpu::fail;
using cuda_on_cpu::position;
using cuda_on_cpu::WarpOp;

// The place of an instruction in the source and in the PTX.
struct Site {
    const char *file;
    int line, ptx_line;
};
std::string where(const Site &site); // for messages
struct Range {
    const char *begin, *end;
};
template <class T, int N> struct V { T v[N]; };

// ---------------------------------------------------------------------------------------------------------------------
// kernels

struct SharedArray {
    u32 offset, bytes;
};
struct Kernel {
    const char *name;
    const void *host; // the function of the emulated program
    void (*run)(Range parameters);
    u32 parameter_bytes;
    int most_threads; // of a block
    const SharedArray *arrays;
    int array_count;
    bool dynamic;      // uses the launch's shared memory
    bool asynchronous; // has instructions of hopper.h
};
struct AddKernels {
    AddKernels(const char *architecture, const Kernel *kernels, size_t count);
};

// Shared memory of the running block. A byte is `usable` if it belongs to an array.
extern char *shared_memory;
extern const u8 *shared_usable;
extern u32 shared_bytes, dynamic_offset;
// In asynchronous kernels, for each 4 bytes of shared memory: the last write of a thread, or a bulk copy under way.
struct WordState {
    u64 written; // number of the write
    const Site *site;
    int barriers; // that the thread had passed
    s16 thread;
    bool copied_to; // a bulk copy to it is under way
    int readers;    // warps whose wgmma reads it
    const Site *reader;
};
extern WordState *word_states;                                                // nullptr in other kernels
void thread_access(u32 address, u32 bytes, bool writes_it, const Site &site); // hopper.cpp
void passed_barrier();
// Parts of device memory that this block has accessed.
constexpr int spans = 16;
extern Range recent[spans];

// ---------------------------------------------------------------------------------------------------------------------
// memory

[[noreturn]] void misaligned(const char *space, u64 address, size_t bytes, const Site &site);
[[noreturn]] void out_of_shared(u32 address, size_t bytes, const Site &site);
[[noreturn]] void out_of_range(const char *space, u64 address, size_t bytes, Range range, const Site &site);
void find_span(u64 address, size_t bytes, const Site &site);
[[noreturn]] void trapped(const Site &site);

template <size_t BYTES> inline char *global(u64 address, const Site &site) {
    if (__builtin_expect(address % BYTES != 0, 0)) misaligned("global", address, BYTES, site);
    const Range span = recent[(size_t)site.ptx_line % spans];
    if (__builtin_expect(address < (u64)(uintptr_t)span.begin || address + BYTES > (u64)(uintptr_t)span.end, 0))
        find_span(address, BYTES, site);
    return (char *)(uintptr_t)address;
}
template <size_t BYTES> inline char *shared(u32 address, const Site &site) {
    char *pointer = shared_memory + address;
    if (__builtin_expect((u64)address + BYTES > shared_bytes || !shared_usable[address], 0) ||
        !shared_usable[address + BYTES - 1])
        out_of_shared(address, BYTES, site);
    if (__builtin_expect((uintptr_t)pointer % BYTES != 0, 0)) misaligned("shared", address, BYTES, site);
    return pointer;
}
template <size_t BYTES> inline char *within(const char *space, u64 address, Range range, const Site &site) {
    char *pointer = (char *)(uintptr_t)address;
    if (__builtin_expect(pointer < range.begin || pointer + BYTES > range.end, 0))
        out_of_range(space, address, BYTES, range, site);
    if (__builtin_expect(address % BYTES != 0, 0)) misaligned(space, address, BYTES, site);
    return pointer;
}

template <class T, int N> inline V<T, N> load(const char *from) {
    V<T, N> value;
    memcpy(&value, from, sizeof(value));
    return value;
}
template <class T, int N> inline V<T, N> load_global(u64 address, const Site &site) {
    return load<T, N>(global<sizeof(T) * N>(address, site));
}
template <size_t BYTES> inline char *shared_of_thread(u32 address, bool writes_it, const Site &site) {
    char *pointer = shared<BYTES>(address, site);
    if (__builtin_expect(word_states != nullptr, 0)) thread_access(address, BYTES, writes_it, site);
    return pointer;
}
template <class T, int N> inline V<T, N> load_shared(u32 address, const Site &site) {
    return load<T, N>(shared_of_thread<sizeof(T) * N>(address, false, site));
}
template <class T, int N> inline V<T, N> load_local(u64 address, Range depot, const Site &site) {
    return load<T, N>(within<sizeof(T) * N>("local", address, depot, site));
}
template <class T, int N> inline V<T, N> load_param(u64 address, Range parameters, const Site &site) {
    return load<T, N>(within<sizeof(T) * N>("parameter", address, parameters, site));
}
template <class T, int N> inline void store_global(V<T, N> value, u64 address, const Site &site) {
    memcpy(global<sizeof(value)>(address, site), &value, sizeof(value));
}
template <int N> inline void add_vector(u64 address, V<float, N> value, const Site &site) {
    float *to = (float *)(void *)global<sizeof(value)>(address, site);
    for (int i = 0; i < N; i++) atomicAdd(to + i, value.v[i]);
}
template <class T, int N> inline void store_shared(V<T, N> value, u32 address, const Site &site) {
    memcpy(shared_of_thread<sizeof(value)>(address, true, site), &value, sizeof(value));
}
template <class T, int N> inline void store_local(V<T, N> value, u64 address, Range depot, const Site &site) {
    memcpy(within<sizeof(value)>("local", address, depot, site), &value, sizeof(value));
}

// ---------------------------------------------------------------------------------------------------------------------
// bits and integers

template <class To, class From> inline To same_bits(From from) { return __builtin_bit_cast(To, from); }
template <class T, class From> inline V<T, 2> halves(From x) { return {{(T)x, (T)(x >> 8 * sizeof(T))}}; }
template <class To, class T> inline To joined(V<T, 2> x) { return (To)((To)x.v[1] << 8 * sizeof(T) | x.v[0]); }
inline u32 clz(u32 x) { return (u32)__builtin_clz(x); }
inline u32 bits_of(u32 x, u32 first, u32 count) {
    first &= 0xFF, count &= 0xFF;
    return first < 32 ? x >> first & (count < 32 ? (1u << count) - 1 : ~0u) : 0;
}
inline u32 with_bits(u32 bits, u32 x, u32 first, u32 count) { // x, where `count` bits from `first` on are those
    const u32 places = bits_of(~0u, 0, count);
    first &= 0xFF;
    return first < 32 ? (x & ~(places << first)) | (bits & places) << first : x;
}
inline u32 reversed(u32 x) {
    u32 y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
inline u32 permuted(u32 a, u32 b, u32 selectors) { // bit 3 of a selector: the sign of the byte in all its bits
    u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        u32 selector = selectors >> 4 * i & 15, byte = (u32)(bytes >> 8 * (selector & 7) & 0xFF);
        result |= (selector & 8 ? byte >> 7 ? 0xFFu : 0u : byte) << 8 * i;
    }
    return result;
}
// A division by zero has no trap on a GPU, and nvcc may move it before the test of its divisor.
template <class T> inline T divide(T a, T b) { return b == 0 ? (T)-1 : b == -1 ? (T)(0 - (u64)a) : a / b; }
template <class T> inline T modulo(T a, T b) { return b == 0 ? a : b == -1 ? 0 : a % b; }

// ---------------------------------------------------------------------------------------------------------------------
// numbers

inline float magnitude(float x) { return __builtin_fabsf(x); }
inline double magnitude(double x) { return __builtin_fabs(x); }
inline float with_sign(float x, float sign) { return __builtin_copysignf(x, sign); }
inline double with_sign(double x, double sign) { return __builtin_copysign(x, sign); }
// of two numbers of which one is NaN, the other; -0 is below +0
template <class T> inline T largest(T a, T b) {
    return a != a ? b : b != b ? a : a == b ? __builtin_signbit(a) ? b : a : a > b ? a : b;
}
template <class T> inline T least(T a, T b) {
    return a != a ? b : b != b ? a : a == b ? __builtin_signbit(a) ? a : b : a < b ? a : b;
}
inline float flushed(float x) { return magnitude(x) < 0x1p-126f ? with_sign(0, x) : x; }

// The largest fp32 number up to sum + error, where |error| is at most half an ulp of the fp64 sum.
inline float round_down(double sum, double error) {
    float x = (float)sum;
    if (!((double)x - sum > 0 || ((double)x == sum && error < 0))) return x;
    return __builtin_nextafterf(x, -__builtin_inff());
}
inline float fma_down(float a, float b, float c) {
    double product = (double)a * b, sum = product + c, part = sum - product; // the product is exact
    if (!(magnitude(sum) < __builtin_inf())) return (float)sum;
    return round_down(sum, (product - (sum - part)) + (c - part));
}
inline float add_toward_zero(float a, float b) {
    double sum = (double)a + b, part = sum - a;
    if (!(magnitude(sum) < __builtin_inf())) return (float)sum;
    double error = (a - (sum - part)) + (b - part);
    return sum < 0 ? -round_down(-sum, -error) : round_down(sum, error);
}

inline float from_bf16(u16 x) { return same_bits<float>((u32)x << 16); }
inline u16 to_bf16(float x) {
    u32 bits = same_bits<u32>(x);
    if (x != x) return 0x7FFF;
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline u16 to_fp8_pair(float high, float low, __nv_fp8_interpretation_t format) {
    return (u16)(__nv_cvt_float_to_fp8(high, __NV_SATFINITE, format) << 8 |
                 __nv_cvt_float_to_fp8(low, __NV_SATFINITE, format));
}

inline float approximate(float exact, int ulps) {
    u32 bits = same_bits<u32>(exact), size = bits & 0x7FFFFFFF;
    if (size == 0 || size >= 0x7F800000 - 4 || size < 0x00800004 || !(bits & 0x007FFFFF)) return exact;
    return same_bits<float>(bits + (u32)((s32)(bits * 2654435761u >> 8) % (2 * ulps + 1) - ulps));
}
inline float divide_approximately(float a, float b) { // 0 for a divisor of more than 2^126, NaN if a is infinite too
    if (magnitude(b) > 0x1p126f && magnitude(b) < __builtin_inff()) return a * with_sign(0, b);
    return approximate(a / b, 2);
}
inline double reciprocal_high(double x) { // from and to the upper 32 bits
    const u64 upper = ~0xFFFFFFFFull;
    double y = 1 / same_bits<double>(same_bits<u64>(x) & upper);
    return magnitude(y) < 0x1p-1022 ? with_sign(0, y) : same_bits<double>(same_bits<u64>(y) & upper);
}

// ---------------------------------------------------------------------------------------------------------------------
// barriers, exchanges, tensor cores, asynchronous copies

inline cuda_on_cpu::Place place(const Site &site) { return {site.file, site.line}; }
inline void block_barrier(int number, const Site &site) {
    if (number != 0) fail("bar.sync %d (line %d of the PTX): only barrier 0 is known", number, site.ptx_line);
    cuda_on_cpu::barrier(place(site));
    if (word_states) passed_barrier();
}
inline void warp_barrier(u32 mask, const Site &site) { cuda_on_cpu::warp(WarpOp::sync, mask, 0, 0, 32, place(site)); }
// `segment`: 32 - width in bits 8 to 12, and in bits 0 to 4 the last lane, or the first one for "up"
inline V<u32, 2> shuffle(WarpOp op, u32 value, u32 by, u32 segment, u32 mask, const Site &site) {
    int width = 32 - (int)(segment >> 8);
    if ((segment & 0xFF) != (op == WarpOp::shfl_up ? 0u : 31u) || width < 1)
        fail("shfl.sync has 0x%x for its segment, in %s:%d (line %d of the PTX)", segment, site.file, site.line,
             site.ptx_line);
    int lane = (int)(position.thread.x +
                     position.block_size.x * (position.thread.y + position.block_size.y * position.thread.z)) %
               32;
    int within = lane & (width - 1), distance = (int)by & 31;
    bool inside = op == WarpOp::shfl_up ? within >= distance : op == WarpOp::shfl || (within ^ distance) < width;
    return {{(u32)cuda_on_cpu::warp(op, mask, value, (int)by, width, place(site)), inside}};
}
inline u32 vote(WarpOp op, bool yes, u32 mask, const Site &site) {
    return (u32)cuda_on_cpu::warp(op, mask, yes, 0, 32, place(site));
}
inline u32 reduce(WarpOp op, u32 value, u32 mask, const Site &site) {
    return (u32)cuda_on_cpu::warp(op, mask, value, 0, 32, place(site));
}

inline V<u32, 4> load_matrices(u32 row, bool transposed, const Site &site) {
    V<u32, 4> to;
    cuda_on_cpu_ldmatrix(to.v, shared_of_thread<16>(row, false, site), transposed);
    return to;
}
inline V<float, 4> multiply_bf16(V<u32, 4> a, V<u32, 2> b, V<float, 4> c) {
    cuda_on_cpu_mma(c.v, a.v, b.v);
    return c;
}
inline V<float, 4> multiply_fp8(V<u32, 4> a, V<u32, 2> b, V<float, 4> c, bool a_is_e4m3) {
    cuda_on_cpu_mma_fp8(c.v, a.v, b.v, a_is_e4m3);
    return c;
}
inline void copy_async(u32 to, u64 from, int bytes, u32 valid, const Site &site) {
    if (bytes != 16 || (valid != 0 && valid != 16))
        fail("cp.async of %u of %d bytes, in %s:%d: all or none of 16 are known", valid, bytes, site.file, site.line);
    if (valid) global<16>(from, site);
    cuda_on_cpu::copy_async(shared_of_thread<16>(to, true, site), (const void *)(uintptr_t)from, valid != 0);
}

} // namespace ptx
