/*
cuda_engine.h: runs one CUDA operation and compares it with its C twin.

  twin::NAME     the C operation, compiled here once more with real = double: what it computes is the truth
  Operands       the tensors of one call. Inputs are random and rounded to the storage type, so that both twins read
                 the same numbers; outputs are poisoned (all bits set: NaN); guard bytes lie before and behind each
                 tensor. `shift` moves every floatX tensor by that many elements, off the 16 bytes that packs want.
  run            calls the operation from the same start several times: under the layer (dev/cuda_on_cpu) with threads
                 in forward, reverse and shuffled order (with AddressSanitizer, which is slow, forward only), on a
                 device twice. Every byte must be equal. The workspace has exactly the size that the operation asked
                 for and is poisoned, as is the scratch memory.
  expect         compares with the twin: |got - want| <= rounding to storage + fp32 error, see Error. NaN where and
                 only where the twin has NaN; for an output this includes what it must not touch.
*/
#ifndef TESTS_CUDA_ENGINE_H
#define TESTS_CUDA_ENGINE_H
#include "../llmc/base/common.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <vector>

#ifdef __CUDACC__
#pragma nv_diag_suppress 1675 // nvcc passes pragmas on to the host compiler, and warns of those that it does not know
#endif
namespace twin {
static inline void *buffer_alloc(size_t bytes, const char *) { return checked_calloc(bytes, 1); }
static inline void buffer_free(void *p) { free(p); }
static inline void buffer_download(void *host, const void *from, size_t bytes) { memcpy(host, from, bytes); }
#undef DEVICE_OPS
#define REAL double
#include "../llmc/ops/all_ops.h"
#undef REAL
#define DEVICE_OPS 1
} // namespace twin
#ifdef __CUDACC__
#pragma nv_diag_default 1675
#endif
#undef LLMC_ALL_OPS_H
#undef LLMC_OPS_H
#undef LLMC_TRAFFIC_H
#include "../llmc/ops/all_ops.h"
#include "harness.h"

static TestRandom test_random;

// Unit roundoffs: of fp32, and of the storage type (8 bits of significand in bf16).
static const double ROUND_FP32 = 0x1p-24, ROUND_STORE = sizeof(floatX) == 2 ? 0x1p-8 : 0x1p-24;

// What fp32 arithmetic may add to the rounding at the store, in units of ROUND_FP32.
struct Error {
    double relative; // times |want|: the number of rounded operations that a result passes through
    double absolute; // for sums with cancellation: the size of their terms times error_of_sum of their number
};
// Rounding errors of a sum of `length` terms that several lanes share.
static inline double error_of_sum(double length) { return 4 + length / 16 + 4 * sqrt(length); }
// The same where a library adds them, perhaps one after another: a random walk of steps that grow with the sum.
static inline double error_of_product(double length) { return 8 + length; }

enum Type { STORED, FP32, FP64, INT32 };
enum Role { INPUT, OUTPUT, UPDATED }; // an output is poisoned before, an updated tensor has a value that counts

struct Tensor {
    const char *name;
    Type type;
    Role role;
    size_t count;
    char *allocation = nullptr;                 // device memory with its guards
    size_t begin = 0, bytes = 0;                // of the elements within it
    std::vector<unsigned char> initial, result; // the allocation's bytes
    std::vector<double> twin;
    std::vector<int> twin_ints;

    void *at() const { return allocation + begin; }
    floatX *x() const { return (floatX *)at(); }
    float *f() const { return (float *)at(); }
    int *i() const { return (int *)at(); }
    double *t() { return twin.data(); }
    double *d() const { return (double *)at(); }
    size_t element_bytes() const { return type == STORED ? sizeof(floatX) : type == FP64 ? 8 : 4; }
    double value(const std::vector<unsigned char> &from, size_t k) const {
        const unsigned char *p = from.data() + begin + k * element_bytes();
        if (type == INT32) return *(const int *)(const void *)p;
        if (type == FP64) return *(const double *)(const void *)p;
        return type == FP32 ? (double)*(const float *)(const void *)p : (double)(float)*(const floatX *)(const void *)p;
    }
    void set(size_t k, double v) { // rounds v to the type; the twin reads what it became
        unsigned char *p = initial.data() + begin + k * element_bytes();
        if (type == INT32) *(int *)(void *)p = twin_ints[k] = (int)v;
        else if (type == FP32) *(float *)(void *)p = (float)v;
        else *(floatX *)(void *)p = (floatX)(float)v;
        if (type != INT32) twin[k] = value(initial, k);
    }
};

#ifdef __SANITIZE_ADDRESS__
static const bool SANITIZED = true;
static const size_t GUARD_BYTES = 0; // the sanitizer's own zones begin at once behind a tensor
#else
static const bool SANITIZED = false;
static const size_t GUARD_BYTES = 256;
#endif
static const unsigned char GUARD = 0xA5, POISON = 0xFF;

class Operands {
  public:
    explicit Operands(int shift_elements) : shift(shift_elements) {}
    ~Operands() {
        for (Tensor &t : tensors) CUDA_CHECK(cudaFree(t.allocation));
    }
    Operands(const Operands &) = delete;

    // With integers > 0 values are whole numbers of at most that size; else uniform in (-spread, spread).
    Tensor &in(const char *name, size_t count, double spread = 1) { return filled(name, STORED, INPUT, count, spread); }
    Tensor &in_fp32(const char *name, size_t count, double spread = 1) {
        return filled(name, FP32, INPUT, count, spread);
    }
    Tensor &updated(const char *name, size_t count, double spread = 1) {
        return filled(name, STORED, UPDATED, count, spread);
    }
    Tensor &updated_fp32(const char *name, size_t count, double spread = 1) {
        return filled(name, FP32, UPDATED, count, spread);
    }
    Tensor &out(const char *name, size_t count) { return add(name, STORED, OUTPUT, count); }
    Tensor &out_fp32(const char *name, size_t count) { return add(name, FP32, OUTPUT, count); }
    Tensor &out_fp64(const char *name, size_t count) { return add(name, FP64, OUTPUT, count); }
    Tensor &ints(const char *name, size_t count, int limit) { // in [0, limit)
        Tensor &t = add(name, INT32, INPUT, count);
        for (size_t k = 0; k < count; k++) t.set(k, test_random_int(&test_random, limit));
        return t;
    }
    int integers = 0;

    void run(size_t workspace_bytes, const std::function<void()> &operation) {
        ops_init(workspace_bytes);
#ifdef CUDA_ON_CPU
        const cuda_on_cpu::Order orders[] = {cuda_on_cpu::Order::forward, cuda_on_cpu::Order::reverse,
                                             cuda_on_cpu::Order::shuffled};
        const char *names[] = {"forward", "reverse", "shuffled"};
#else
        const char *names[] = {"first", "second"};
#endif
        for (size_t k = 0; k < (SANITIZED ? 1 : sizeof(names) / sizeof(names[0])); k++) {
#ifdef CUDA_ON_CPU
            cuda_on_cpu::set_order(orders[k], test_random_bits(&test_random));
#endif
            start();
            operation();
            finish(names[k], k == 0);
        }
        ops_free();
    }

    void expect(Tensor &t, Error error) {
        size_t wrong = 0, worst = 0;
        double excess = 0;
        for (size_t k = 0; k < t.count; k++) {
            double got = t.value(t.result, k), want = t.twin[k];
            double allowed =
                1.01 * ROUND_OF(t) * fabs(want) + ROUND_FP32 * (error.relative * fabs(want) + error.absolute);
            bool right = isnan(want) ? isnan(got) : isinf(want) ? got == want : fabs(got - want) <= allowed;
            if (right) continue;
            double by = isnan(got) ? INFINITY : fabs(got - want) / (allowed > 0 ? allowed : 1e-300);
            if (wrong++ == 0 || by > excess) worst = k, excess = by;
        }
        EXPECT(wrong == 0, "%s: %zu of %zu wrong, worst [%zu] is %.9g, the twin's %.9g, %.3g times the tolerance",
               t.name, wrong, t.count, worst, t.value(t.result, worst), t.twin[worst], excess);
    }

  private:
    std::deque<Tensor> tensors; // references stay valid
    int shift;

    static double ROUND_OF(const Tensor &t) {
        return t.type == STORED ? ROUND_STORE : t.type == FP64 ? 0x1p-53 : ROUND_FP32;
    }

    Tensor &add(const char *name, Type type, Role role, size_t count) {
        tensors.emplace_back();
        Tensor &t = tensors.back();
        t.name = name, t.type = type, t.role = role, t.count = count;
        t.bytes = count * t.element_bytes();
        t.begin = GUARD_BYTES + (type == STORED ? (size_t)shift * sizeof(floatX) : 0);
        size_t total = t.begin + t.bytes + GUARD_BYTES;
        CUDA_CHECK(cudaMalloc((void **)&t.allocation, total));
        t.initial.assign(total, GUARD);
        memset(t.initial.data() + t.begin, POISON, t.bytes);
        t.twin.assign(type == INT32 ? 0 : count, NAN);
        t.twin_ints.assign(type == INT32 ? count : 0, 0);
        return t;
    }
    Tensor &filled(const char *name, Type type, Role role, size_t count, double spread) {
        Tensor &t = add(name, type, role, count);
        for (size_t k = 0; k < count; k++)
            t.set(k, integers ? test_random_int(&test_random, 2 * integers + 1) - integers
                              : spread * test_random_real(&test_random));
        return t;
    }
    void start() {
        for (Tensor &t : tensors)
            CUDA_CHECK(
                cudaMemcpyAsync(t.allocation, t.initial.data(), t.initial.size(), cudaMemcpyHostToDevice, main_stream));
        CUDA_CHECK(cudaMemsetAsync(device.workspace, POISON, device.workspace_bytes, main_stream));
        CUDA_CHECK(cudaMemsetAsync(device.scratch, POISON, SCRATCH_BYTES, main_stream));
    }
    void finish(const char *order, bool first) {
        for (Tensor &t : tensors) {
            std::vector<unsigned char> bytes(t.initial.size());
            buffer_download(bytes.data(), t.allocation, bytes.size());
            size_t end = t.begin + t.bytes, size = bytes.size();
            bool guards = memcmp(bytes.data(), t.initial.data(), t.begin) == 0 &&
                          memcmp(bytes.data() + end, t.initial.data() + end, size - end) == 0;
            EXPECT(guards, "%s: bytes outside of it were written (%s)", t.name, order);
            EXPECT(t.role != INPUT || bytes == t.initial, "%s: an input was changed (%s)", t.name, order);
            EXPECT(first || bytes == t.result, "%s: other bits when run %s", t.name, order);
            if (first) t.result = bytes;
        }
    }
};

static inline twin::AttentionShape twin_shape(AttentionShape s, const int *first_key) {
    twin::AttentionShape r;
    r.B = s.B, r.T = s.T, r.first = s.first;
    r.NQ = s.NQ, r.NKV = s.NKV, r.D = s.D, r.DV = s.DV;
    r.ldq = s.ldq, r.ldkv = s.ldkv, r.ldo = s.ldo;
    r.q_head = s.q_head, r.k_head = s.k_head, r.v_head = s.v_head, r.o_head = s.o_head;
    r.scale = (double)s.scale;
    r.first_key = first_key;
    return r;
}

// The C operations' workspace, at least this large.
static inline void twin_workspace(size_t bytes) {
    if (twin::ops_workspace.memory && bytes <= twin::ops_workspace.bytes) return;
    twin::ops_free();
    twin::ops_init(bytes);
}
#endif
