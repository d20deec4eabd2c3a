/*
cuda_engine.h: compares a CUDA operation with its C twin.

  twin::NAME     the C operation, compiled in this file with real = double: the reference
  Operands       the tensors of one call. InputKind are random and rounded to the storage type, so that both twins read
                 the same numbers. Outputs are poisoned (all bits set: NaN). Guard bytes precede and follow each tensor.
                 `shift` offsets every floatX tensor by that many elements, so that packs of 16 bytes are unaligned.
  run            calls the operation several times on the same data: in dev/emulator with threads in forward, reverse
                 and shuffled order (forward only with AddressSanitizer, which is slow), on a device twice.
                 Every byte must be equal. The workspace has exactly the size that the operation requests, and is
                 poisoned, as is the scratch memory.
  expect         compares with the twin: |got - want| <= rounding to storage + fp32 error (Error). NaN where and only
                 where the twin has NaN, which includes elements that the operation must not write.
  Pass           a forward or backward of a case of operations/catalogue.h, by these means
*/
#pragma once
#include "operations/operation.h"

#include "../llmc/cuda/device_peak.h" // which ops.h includes, in the namespace below for the first time

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#ifdef __CUDACC__
#pragma nv_diag_suppress 1675 // nvcc passes pragmas to the host compiler, and warns about unknown ones
#endif
namespace twin {
static inline void *buffer_alloc(size_t bytes, const char *) { return checked_calloc(bytes, 1); }
static inline void buffer_free(void *p) { free(p); }
static inline void buffer_download(void *host, const void *from, size_t bytes) { memcpy(host, from, bytes); }
#undef DEVICE_OPS
#define REAL double
#include "../llmc/experts/all_operations.h"
#include "operations/catalogue.h"
#undef REAL
#define DEVICE_OPS 1
} // namespace twin
#ifdef __CUDACC__
#pragma nv_diag_default 1675
#endif
#undef LLMC_ALL_OPERATIONS_H
#undef LLMC_ATTENTION_OPERATIONS_H
#undef LLMC_ELEMENT_TYPES_H
#undef LLMC_EXPERTS_OPERATIONS_H
#undef LLMC_FP8_H
#undef LLMC_GATES_OPERATIONS_H
#undef LLMC_LINEAR_OPERATIONS_H
#undef LLMC_MEASURE_OPERATIONS_H
#undef LLMC_OPS_H
#undef LLMC_OPS_RUNTIME_H
#undef LLMC_OPTIMIZER_OPERATIONS_H
#undef LLMC_ROWS_OPERATIONS_H
#undef FP8_SMALLEST
#include "../llmc/experts/all_operations.h"
#include "operations/catalogue.h"

static TestRandom test_random;
enum { WAYS = 5 };
// Orders and kinds of copies in which Operands::run runs: so many, from first_way on; the first follows the last.
[[maybe_unused]] static int first_way = 0, way_count = WAYS;
static inline size_t product(int a, int b, int c) { return product(a, b) * (size_t)c; }

// Unit roundoffs: of fp32, and of the storage type (8 bits of significand in bf16).
static const double ROUND_FP32 = 0x1p-24, ROUND_STORE = sizeof(floatX) == 2 ? 0x1p-8 : 0x1p-24;

enum Role { INPUT, OUTPUT, UPDATED }; // outputs are poisoned, updated tensors are initialized

static inline double load_value(const void *p, TensorType type) {
    if (type == INT32) return *(const int *)p;
    if (type == FP64) return *(const double *)p;
    return type == FP32 ? (double)*(const float *)p : (double)(float)*(const floatX *)p;
}
static inline void store_value(void *p, TensorType type, double v) {
    if (type == INT32) *(int *)p = (int)v;
    else if (type == FP32) *(float *)p = (float)v;
    else *(floatX *)p = (floatX)(float)v;
}
static inline size_t type_bytes(TensorType type) { return type == STORED ? sizeof(floatX) : type == FP64 ? 8 : 4; }

// Whether all values are within the rounding of their storage and the error of their computation; NaN where and only
// where NaN is wanted.
static inline void expect_values(const char *name, TensorType type, const std::vector<double> &got,
                                 const std::vector<double> &want, Error error) {
    const double round = type == STORED ? ROUND_STORE : type == FP64 ? 0x1p-53 : ROUND_FP32;
    size_t wrong = 0, worst = 0;
    double excess = 0;
    assert(got.size() == want.size());
    for (size_t k = 0; k < want.size(); k++) {
        double size = fabs(want[k]), difference = fabs(got[k] - want[k]);
        double allowed = 1.01 * round * size + ROUND_FP32 * (error.relative * size + error.absolute);
        if (isnan(want[k]) ? isnan(got[k]) : isinf(want[k]) ? got[k] == want[k] : difference <= allowed) continue;
        double by = isnan(got[k]) ? INFINITY : difference / (allowed > 0 ? allowed : 1e-300);
        if (wrong++ == 0 || by > excess) worst = k, excess = by;
    }
    EXPECT(wrong == 0, "%s: %zu of %zu wrong, worst [%zu] is %.9g, the twin's %.9g, %.3g times the tolerance", name,
           wrong, want.size(), worst, got[worst], want[worst], excess);
}

static const unsigned char GUARD = 0xA5, POISON = 0xFF;

struct Operand {
    std::string name;
    TensorType type;
    Role role;
    size_t count;
    char *allocation = nullptr;                 // device memory, with guards
    size_t begin = 0, bytes = 0;                // of the elements in it
    std::vector<unsigned char> initial, result; // the allocation's bytes
    std::vector<double> twin;
    std::vector<int> twin_ints;

    void *at() const { return allocation + begin; }
    floatX *x() const { return (floatX *)at(); }
    float *f() const { return (float *)at(); }
    int *i() const { return (int *)at(); }
    double *t() { return twin.data(); }
    double *d() const { return (double *)at(); }
    size_t element_bytes() const { return type_bytes(type); }
    double value(const std::vector<unsigned char> &from, size_t k) const {
        return load_value(from.data() + begin + k * element_bytes(), type);
    }
    void poison() {
        memset(initial.data() + begin, POISON, bytes);
        std::fill(twin.begin(), twin.end(), NAN);
    }
    void set(size_t k, double v) { // rounds v to the type; the twin reads the rounded value
        store_value(initial.data() + begin + k * element_bytes(), type, v);
        if (type == INT32) twin_ints[k] = (int)v;
        else twin[k] = value(initial, k);
    }
};

#ifdef __SANITIZE_ADDRESS__
static const bool SANITIZED = true;
static const size_t GUARD_BYTES = 0; // the zones of the sanitizer adjoin each tensor
#else
static const bool SANITIZED = false;
static const size_t GUARD_BYTES = 256;
#endif

class Operands {
  public:
    explicit Operands(int shift_elements) : shift(shift_elements) {}
    ~Operands() {
        for (Operand &t : tensors) CUDA_CHECK(cudaFree(t.allocation));
    }
    Operands(const Operands &) = delete;

    // With integers > 0 values are whole numbers of at most that size; else uniform in (-spread, spread).
    Operand &in(const std::string &name, size_t count, double spread = 1) {
        return filled(name, STORED, INPUT, count, spread);
    }
    Operand &in_fp32(const std::string &name, size_t count, double spread = 1) {
        return filled(name, FP32, INPUT, count, spread);
    }
    Operand &updated(const std::string &name, size_t count, double spread = 1) {
        return filled(name, STORED, UPDATED, count, spread);
    }
    Operand &updated_fp32(const std::string &name, size_t count, double spread = 1) {
        return filled(name, FP32, UPDATED, count, spread);
    }
    Operand &out(const std::string &name, size_t count) { return add(name, STORED, OUTPUT, count); }
    Operand &out_fp32(const std::string &name, size_t count) { return add(name, FP32, OUTPUT, count); }
    Operand &out_fp64(const std::string &name, size_t count) { return add(name, FP64, OUTPUT, count); }
    Operand &out_ints(const std::string &name, size_t count) { return add(name, INT32, OUTPUT, count); }
    Operand &ints(const std::string &name, size_t count, int limit) { // in [0, limit)
        Operand &t = add(name, INT32, INPUT, count);
        for (size_t k = 0; k < count; k++) t.set(k, test_random_int(&test_random, limit));
        return t;
    }
    Operand &max(const std::string &name, uint32_t start) {
        Operand &t = add(name, INT32, UPDATED, 1);
        t.set(0, start);
        return t;
    }
    // The tensor of a case. Its views are random with `values` or where they are added to; all other elements are NaN.
    Operand &of_case(const OpTensor &x, TensorType type, Role role, bool values) {
        Operand &t = add(x.view->name, type, role, x.count);
        for (const OpView *v = x.view; v < x.view + x.views; v++)
            for (size_t i = 0; i < op_size(v) && (values || v->adds); i++) t.set(op_at(v, i), random(x.spread));
        return t;
    }
    Operand &input_of_case(const OpCase &c, int i) {
        Operand &t = of_case(c.x[i], c.x[i].type, INPUT, integers > 0);
        for (const OpView *v = c.x[i].view; v < c.x[i].view + c.x[i].views && !integers; v++)
            for (size_t k = 0; k < op_size(v); k++) t.set(op_at(v, k), op_input(&c, i, k, &test_random));
        return t;
    }
    int integers = 0;

    void run(size_t workspace_bytes, const std::function<void()> &operation) {
        ops_init(workspace_bytes);
        size_t runs = 0;
        auto once = [&](const char *name) {
            start();
            operation();
            finish(name, runs++ == 0);
        };
#ifdef CUDA_ON_CPU
        using cuda_on_cpu::Copies, cuda_on_cpu::Order;
        static const struct {
            Order order;
            Copies copies;
            const char *name;
        } ways[WAYS] = {{Order::forward, Copies::late, "forward"},
                        {Order::reverse, Copies::late, "reverse"},
                        {Order::shuffled, Copies::late, "shuffled"},
                        {Order::reverse, Copies::early, "reverse, copies land early"},
                        {Order::shuffled, Copies::mixed, "shuffled, copies land early or late"}};
        uint64_t copies = cuda_on_cpu::copies_started();
        for (int w = 0; w < WAYS && (int)runs < way_count; w++) {
            const auto &way = ways[(first_way + w) % WAYS];
            if (runs && SANITIZED) break;
            if (runs && way.copies != Copies::late && cuda_on_cpu::copies_started() == copies)
                continue; // it has no cp.async
            cuda_on_cpu::set_order(way.order, test_random_bits(&test_random));
            cuda_on_cpu::set_copies(way.copies);
            once(way.name);
        }
        cuda_on_cpu::set_copies(Copies::late);
#else
        once("first");
        if (!SANITIZED) once("second");
#endif
        ops_free(); // keeps what cuDNN has answered
    }

    void expect(const Operand &t, Error error) {
        std::vector<double> got(t.count);
        for (size_t k = 0; k < t.count; k++) got[k] = t.value(t.result, k);
        expect_values(t.name.c_str(), t.type, got, t.twin, error);
    }

    void expect_ints(const Operand &t) {
        size_t wrong = 0, first = 0;
        for (size_t k = 0; k < t.count; k++)
            if ((int)t.value(t.result, k) != t.twin_ints[k] && wrong++ == 0) first = k;
        EXPECT(wrong == 0, "%s: %zu of %zu wrong, first [%zu] is %g, the twin's %d", t.name.c_str(), wrong, t.count,
               first, t.value(t.result, first), t.twin_ints[first]);
    }

  private:
    std::deque<Operand> tensors; // a deque keeps references valid
    int shift;

    Operand &add(const std::string &name, TensorType type, Role role, size_t count) {
        tensors.emplace_back();
        Operand &t = tensors.back();
        t.name = name, t.type = type, t.role = role, t.count = count;
        t.bytes = count * t.element_bytes();
        t.begin = GUARD_BYTES + (type == STORED ? (size_t)shift * sizeof(floatX) : 0);
        size_t total = t.begin + t.bytes + GUARD_BYTES;
        CUDA_CHECK(cudaMalloc((void **)&t.allocation, total));
        t.initial.assign(total, GUARD);
        t.twin.resize(type == INT32 ? 0 : count);
        t.poison();
        t.twin_ints.assign(type == INT32 ? count : 0, 0);
        return t;
    }
    Operand &filled(const std::string &name, TensorType type, Role role, size_t count, double spread) {
        Operand &t = add(name, type, role, count);
        for (size_t k = 0; k < count; k++) t.set(k, random(spread));
        return t;
    }
    double random(double spread) const {
        return integers ? test_random_int(&test_random, 2 * integers + 1) - integers
                        : spread * test_random_real(&test_random);
    }
    void start() {
        for (Operand &t : tensors)
            CUDA_CHECK(
                cudaMemcpyAsync(t.allocation, t.initial.data(), t.initial.size(), cudaMemcpyHostToDevice, main_stream));
        CUDA_CHECK(cudaMemsetAsync(device.workspace, POISON, device.workspace_bytes, main_stream));
        CUDA_CHECK(cudaMemsetAsync(device.scratch, POISON, SCRATCH_BYTES, main_stream));
    }
    void finish(const char *order, bool first) {
        for (Operand &t : tensors) {
            std::vector<unsigned char> bytes(t.initial.size());
            buffer_download(bytes.data(), t.allocation, bytes.size());
            size_t end = t.begin + t.bytes, size = bytes.size();
            bool guards = memcmp(bytes.data(), t.initial.data(), t.begin) == 0 &&
                          memcmp(bytes.data() + end, t.initial.data() + end, size - end) == 0;
            EXPECT(guards, "%s: bytes outside of it were written (%s)", t.name.c_str(), order);
            EXPECT(t.role != INPUT || bytes == t.initial, "%s: an input was changed (%s)", t.name.c_str(), order);
            EXPECT(first || bytes == t.result, "%s: other bits when run %s", t.name.c_str(), order);
            if (first) t.result = bytes;
        }
    }
};

// Makes the workspace of the C operations at least this large.
static inline void twin_workspace(size_t bytes) {
    if (twin::ops_workspace.memory && bytes <= twin::ops_workspace.bytes) return;
    twin::ops_free();
    twin::ops_init(bytes);
}

// ---------------------------------------------------------------------------------------------------
// The cases of the catalogue

struct Case;
struct Check {
    const char *operation;
    void (*run)(const Case *c);
    const char *dims; // the names of n
};
struct Case {
    const Check *check;
    int n[OP_DIMS];
    int shift; // of every floatX tensor, in elements
    const char *why;
};

static double largest(const std::vector<double> &x) {
    double most = 0;
    for (double v : x)
        if (isfinite(v)) most = fmax(most, fabs(v));
    return most;
}

// What x becomes in FP8, with the scale or without.
static double twin_rounded(double x, absmax_t max, Fp8Format f, bool scaled) {
    twin::Fp8Format format = (twin::Fp8Format)f;
    float rounded = twin::fp8_round((float)x * twin::fp8_multiplier(max, format), format);
    return scaled ? (double)rounded * (double)twin::fp8_scale(max, format) : (double)rounded;
}
// What the numbers of a view become, by one scale or one for each row.
static std::vector<double> twin_operand(const Operand &t, const OpView &v, Fp8Format f, bool each_row) {
    std::vector<double> to = t.twin;
    for (int row = 0, rows = each_row ? 1 : v.rows; row < v.rows; row += rows) {
        const size_t begin = product(row, v.ld);
        twin::absmax_t max = 0;
        twin::absmax_update(twin::activation(t.twin.data() + begin, &max), rows, v.width, v.ld);
        for (int r = 0; r < rows; r++)
            for (size_t i = begin + product(r, v.ld), end = i + (size_t)v.width; i < end; i++)
                to[i] = twin_rounded(to[i], max, f, true);
    }
    return to;
}

// Values of the inputs of a case. With all but the first the operation computes the largest magnitude of its output.
enum InputKind { ORDINARY_AND_SPECIAL, ORDINARY, ORDINARY_FROM_LARGE_MAX, INFINITE, INFINITE_AND_NAN, INPUTS_COUNT };

// One forward or backward of a case. The backward has the inputs of the forward, and the outputs of the twin's forward.
class Pass {
  public:
    OpCase c;
    Operands o;
    Operand *x[OP_TENSORS], *dx[OP_TENSORS], *y[OP_TENSORS], *dy = nullptr, *index = nullptr, *max = nullptr;

    Pass(const OpCase &described, int shift, int integers, const Pass *before = nullptr,
         InputKind kind = ORDINARY_AND_SPECIAL)
        : c(described), o(shift), inputs(kind), forward(before) {
        o.integers = integers;
        make_index();
        for (int i = 0; i < OP_TENSORS; i++) {
            x[i] = dx[i] = y[i] = nullptr;
            if (c.x[i].views) {
                x[i] = forward ? &o.of_case(c.x[i], c.x[i].type, INPUT, false) : &o.input_of_case(c, i);
                if (forward) copy(x[i], forward->x[i]->twin);
                else if (c.kind == OP_ROPE && c.x[i].constant) make_rope_table(x[i]);
            }
            if (c.y[i].views) {
                y[i] = &o.of_case(c.y[i], c.y[i].type, forward && !c.dloss ? INPUT : OUTPUT, false);
                if (forward && !c.y[i].view->adds) copy(y[i], forward->y[i]->twin);
                for (size_t k = 0; k < (forward ? y[i]->twin_ints.size() : 0); k++)
                    y[i]->set(k, forward->y[i]->twin_ints[k]);
                for (size_t k = 0; k < c.y[i].count && forward && c.y[i].high > 0; k++)
                    y[i]->set(k, c.y[i].low + (c.y[i].high - c.y[i].low) * fabs(test_random_real(&test_random)));
            }
        }
        if (!forward) set_special();
        if (inputs != ORDINARY_AND_SPECIAL && (forward ? c.max_of_dx : c.max_of_y))
            max = &o.max("max", inputs == ORDINARY_FROM_LARGE_MAX ? OP_LARGE_MAX : 0);
        if (forward) dy = &o.of_case(c.y[0], c.y[0].type, INPUT, true);
        EXPECT(!dy || op_size(c.y->view) < 20 || largest(dy->twin) > 0, "dy is 0: the gradients show nothing");
        for (int i = 0; i < OP_TENSORS && forward; i++)
            if (c.dx[i].views) dx[i] = &o.of_case(c.dx[i], c.dx[i].type, OUTPUT, false);
        if (forward && c.in_place && dx[0]) copy(dx[0], dy->twin);
        start_in_place();
        if (c.dloss != 0 && forward) copy(dx[0], x[0]->twin);
        if (c.fp8) make_operands();
    }
    void start_in_place() {
        for (int i = 0; i < c.in_place && !forward; i++)
            if (y[i]) copy(y[i], x[i]->twin);
    }
    void run() {
        size_t workspace = op_cost_of(&c, forward).workspace; // which may read the index, on the host
        bind(true);
        o.run(workspace, [&] {
            if (c.fp8) op_prepare_fp8(&c, forward);
            op_call(&c, forward);
        });
        run_twin();
    }
    void run_twin() {
        bind(false);
        twin_workspace(twin::op_cost_of(&c, forward).workspace);
        twin::op_call(&c, forward);
    }
    void expect() {
        for (int i = 0; i < OP_TENSORS; i++) {
            if (y[i] && (!forward || c.dloss)) expect(y[i], c.y[i]);
            if (dx[i]) expect(dx[i], c.dx[i]);
        }
        for (size_t k = 0; k < c.y[0].count && c.kind == OP_ADAMW && y[1]; k++) {
            double stored = y[0]->value(y[0]->result, k),
                   rounded = (double)(float)(floatX)(float)y[1]->value(y[1]->result, k);
            EXPECT(stored == rounded, "params [%zu] is %.9g, the master weight rounded is %.9g", k, stored, rounded);
        }
        if (max) forward ? expect_max(*dx[0], c.dx[0]) : expect_max(*y[0], c.y[0]);
    }
    void bind(bool on_device) { // sets the pointers that op_call reads
        auto data = [on_device](Operand *t) {
            return !t ? nullptr : on_device ? t->at() : t->type == INT32 ? (void *)t->twin_ints.data() : t->t();
        };
        for (int i = 0; i < OP_TENSORS; i++)
            c.x[i].data = data(x[i]), c.dx[i].data = data(dx[i]), c.y[i].data = data(y[i]);
        c.dy = data(dy);
        c.max = on_device && max ? (uint32_t *)max->at() : nullptr;
        if (index) c.index = on_device ? index->i() : index->twin_ints.data();
        if (!c.fp8) return;
        c.copy = on_device ? weights->at() : nullptr; // of the twin: products of the rounded numbers
        for (int i = 0; i < 2; i++) c.operand_max[i] = on_device ? (uint32_t *)operand_max[i]->at() : nullptr;
        if (on_device) return;
        for (int i = 0; i < 2; i++) c.x[i].data = operands[i].data();
        if (forward) c.dy = operands[2].data();
    }

  private:
    InputKind inputs;
    const Pass *forward;
    Operand *weights = nullptr, *operand_max[2];
    std::vector<double> operands[3]; // x, the weights and dy as the twin multiplies them

    void make_operands() {
        bool experts = c.kind == OP_EXPERT_LINEAR_FP8;
        if (!experts && c.d[4] == 1 && forward) dy->set(0, INFINITY);
        size_t bytes =
            experts ? (size_t)c.d[2] * op_expert_linear(&c).copy_stride : linear_copy_bytes(c.d[1], c.d[2], false);
        weights = &o.out_fp32("copy", bytes / sizeof(float));
        operand_max[0] = &o.max("x_max", 0), operand_max[1] = &o.max("dy_max", 0);
        operands[0] = twin_operand(*x[0], *c.x[0].view, FP8_ACTIVATION, false);
        operands[1] = twin_operand(*x[1], *c.x[1].view, FP8_WEIGHT, experts);
        if (forward) operands[2] = twin_operand(*dy, *c.y[0].view, FP8_GRADIENT, false);
    }

    // The bits of the largest magnitude that was stored.
    void expect_max(const Operand &t, const OpTensor &of) {
        uint32_t want = (uint32_t)max->value(max->initial, 0), got = (uint32_t)max->value(max->result, 0);
        for (const OpView *v = of.view; v < of.view + of.views; v++)
            for (size_t i = 0; i < op_size(v); i++) want = op_max(want, t.value(t.result, op_at(v, i)));
        EXPECT(got == want, "the largest magnitude of %s is %08x, not %08x", t.name.c_str(), got, want);
        // NaN: infinity times a sum that is 0
        EXPECT(forward || inputs != INFINITE ||
                   (c.kind == OP_RESIDUAL_RMSNORM ? want >= OP_INFINITE_MAX : want == OP_INFINITE_MAX),
               "%s is not infinite", t.name.c_str());
        EXPECT(forward || inputs != INFINITE_AND_NAN || want > OP_INFINITE_MAX, "%s has no NaN", t.name.c_str());
    }
    static void copy(Operand *to, const std::vector<double> &from) {
        for (size_t k = 0; k < from.size(); k++)
            if (!isnan(from[k])) to->set(k, from[k]);
    }
    void expect(Operand *t, const OpTensor &of) {
        if (of.type == INT32) return o.expect_ints(*t);
        Error e = of.error;
        if (o.integers && !c.integers) e.relative = e.absolute = 0;
        if (of.error_grows) e.absolute *= 1 + largest(t->twin);
        o.expect(*t, e);
    }
    void make_index() {
        if (!c.index_count) return;
        std::vector<int> values((size_t)c.index_count);
        if (forward) values = forward->index->twin_ints;
        else op_fill_index(&c, values.data(), &test_random);
        index = &o.ints("index", values.size(), 1);
        for (size_t n = 0; n < values.size(); n++) index->set(n, values[n]);
        c.index = index->twin_ints.data();
    }
    void make_rope_table(Operand *table) { // both twins read the same numbers
        std::vector<float> angles(table->count);
        op_rope_table(angles.data(), &c);
        twin::op_rope_table(table->t(), &c);
        for (size_t k = 0; k < angles.size(); k++) {
            EXPECT(fabs((double)angles[k] - table->twin[k]) <= ROUND_FP32, "rope_table [%zu] is %.9g, the twin's %.9g",
                   k, (double)angles[k], table->twin[k]);
            table->set(k, (double)angles[k]);
        }
    }
    void set_special() {
        // a factor of the output: values that are not finite reach it
        Operand *factor = c.kind == OP_RMSNORM ? x[1] : c.kind == OP_RESIDUAL_RMSNORM ? x[2] : x[0];
        if (inputs == INFINITE_AND_NAN) factor->set(0, INFINITY);
        if (inputs >= INFINITE) factor->set(factor->count - 1, inputs == INFINITE ? INFINITY : NAN);
        if (inputs != ORDINARY_AND_SPECIAL) return;
        if (c.kind == OP_DIFF_ATTENTION) { // factors of exactly 0 and, in the second row, 1
            x[1]->set(0, c.d[8] == S_SIGMOID ? -INFINITY : 0);
            if (c.d[1] > 1) x[1]->set((size_t)c.x[1].view->ld, c.d[8] == S_LINEAR ? 1 : 100);
        }
        if (c.kind == OP_LINEAR_FP8 && c.d[4] == 2) x[0]->set(0, NAN);
        if (c.kind == OP_SINK) x[1]->set(0, 90), x[1]->set(x[1]->count - 1, -90); // where exp alone would overflow
        for (int e = 1; c.kind == OP_ROUTER && c.d[4] == 2 && e < c.d[2]; e += c.d[2] - 2)
            for (int i = 0; i < c.d[1]; i++) x[1]->set(product(e, c.d[1]) + (size_t)i, NAN);
        for (const OpView *v = c.x[1].view; v < c.x[1].view + c.x[1].views; v++)
            for (size_t i = 0; i < op_size(v); i++)
                if (op_in_empty_row(&c, v, i)) x[1]->set(op_at(v, i), NAN);
        // sigmoids that are 1, less than 2^-125, which the device may take for 0, and NaN
        const double saturated[] = {100, -87.5, -88.5, -100, -INFINITY, NAN};
        Operand *gates = c.kind == OP_SWIGLU ? x[0] : c.kind == OP_GATE && c.d[4] > 1 ? x[1] : nullptr;
        for (size_t k = 0; gates && k < min_size(6, gates->count); k++) gates->set(k, saturated[k]);
        if (c.kind != OP_CROSS_ENTROPY || !c.d[3]) return;
        int N = c.d[0], V = c.d[1], Vp = c.d[2]; // one row each: a certain prediction, -inf, NaN, +inf
        for (int v = 0; v < V; v++) x[0]->set((size_t)v, v == index->twin_ints[0] ? 60 : -60);
        if (N > 1 && V > 1) x[0]->set(product(1, Vp) + (size_t)(index->twin_ints[1] ? 0 : 1), -INFINITY);
        if (N > 2) x[0]->set(product(2, Vp) + (size_t)(V / 2), NAN);
        if (N > 3) x[0]->set(product(3, Vp) + (size_t)(V / 2), INFINITY);
    }
};

static void check_passes(const OpCase &c, int shift, bool exact, InputKind inputs) {
    Pass forward(c, shift, exact ? 3 : c.integers, nullptr, inputs);
    forward.run();
    forward.expect();
    if (c.no_backward || (inputs != ORDINARY_AND_SPECIAL && !c.max_of_dx)) return;
    for (int add = 0; add < (c.add_tensor ? 2 : 1); add++) {
        OpCase with = c;
        const int t = c.add_tensor - 1, v = c.add_view;
        if (c.add_tensor) with.x[t].view[v].adds = with.dx[t].view[v].adds = add;
        Pass backward(with, shift, exact ? 3 : 0, &forward, inputs);
        backward.run();
        backward.expect();
    }
}

static Check operation_checks[OP_KIND_COUNT];
static void check_operation(const Case *row) {
    OpCase c;
    op_describe(&c, (OpKindName)(row->check - operation_checks), row->n);
    const char *refused = c.fp8 ? linear_configure(GEMM_FP8) : NULL; // by a device without FP8
    if (refused) test_skip("%s", refused);
    const double store = 1.01 * ROUND_STORE / ROUND_FP32; // of what is stored twice
    for (OpTensor &dx : c.dx) dx.error.absolute += dx.rounded_terms * ROUND_STORE / ROUND_FP32;
    for (OpTensor &y : c.y) y.error.absolute += y.rounded_terms * ROUND_STORE / ROUND_FP32;
    if (c.kind == OP_SINKS) c.y[0].error.relative += store;
    if (c.kind == OP_ATTENTION_SETS) c.dx[0].error.absolute += store;
    // the weights of the values rounded to bf16: their sum, times the largest value, is at most x.spread
    const bool weights = c.kind == OP_ATTENTION || c.kind == OP_ATTENTION_SETS || c.kind == OP_SINKS;
    if (weights && attention_mma_fits(op_attention_shape(&c)))
        c.y[0].error.absolute += c.x[0].spread * ROUND_STORE / ROUND_FP32;
    // P and dS rounded to bf16, and dS computed from the rounded P, in sums whose results are little more than a term
    if (weights && attention_mma_backward_fits(op_attention_shape(&c)))
        c.dx[0].error.absolute += ROUND_STORE / ROUND_FP32;
    // the weights of the values as sums of two bf16 numbers
    if (c.kind == OP_DECODE) c.y[0].error.absolute += c.x[1].spread * ROUND_STORE * ROUND_STORE / ROUND_FP32;
    const AttentionOptions both[2] = {{false, false, false, false}, {true, false, false, false}};
    for (int own = 0; own <= (c.kind == OP_DIFF_ATTENTION && !row->shift ? 1 : 0); own++) {
        attention_configure(both[own]); // heads that are subtracted afterwards, or by the built-in kernels at once
        if (own) check_passes(c, row->shift, false, ORDINARY_AND_SPECIAL);
    }
    attention_configure(both[0]);
    // sums of whole numbers are exact
    for (int exact = 0; exact <= (c.exact ? 1 : 0) && !refused; exact++)
        check_passes(c, row->shift, exact, ORDINARY_AND_SPECIAL);
    for (int inputs = ORDINARY; c.max_of_y && inputs < INPUTS_COUNT; inputs++)
        check_passes(c, row->shift, false, (InputKind)inputs);
    if (c.fp8) linear_configure(sizeof(floatX) == 2 ? GEMM_BF16 : GEMM_FP32);
}
static const Check *operation_check(int kind) {
    operation_checks[kind] = {op_kind((OpKindName)kind)->name, check_operation, op_kind((OpKindName)kind)->dims};
    return &operation_checks[kind];
}
// The cases of the catalogue; those with small tensors also at addresses that are no multiple of a pack.
static void operation_cases(std::vector<Case> &table) {
    const OpRow *row;
    for (int i = 0; (row = op_row(i)) != NULL; i++)
        for (int kind = 0; kind < OP_KIND_COUNT; kind++) {
            if (row->engines == C_ONLY || op_cases_of((OpKindName)kind) != row->kind) continue;
            OpCase layout;
            op_describe(&layout, (OpKindName)kind, row->d);
            size_t most = kind == OP_SINK ? 80000 : kind == OP_EXPERT_LINEAR_FP8 ? 4000 : 10000;
            bool small = layout.y->count <= most && layout.a.T <= 20;
            for (int shift = 0; shift <= (small ? 1 : 0); shift++) {
                table.push_back({operation_check(kind), {}, shift, row->why});
                std::copy(std::begin(row->d), std::end(row->d), table.back().n);
            }
        }
}
