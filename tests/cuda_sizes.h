/*
cuda_sizes.h: operations at the shapes of a model (test_diffv2cu --sizes), where a complete comparison would take
minutes on the CPU. All of a tensor is computed, and samples of it are compared:

  rows        of operation_sizes.h: the first, the last and some between. The C twin computes the case of these rows
              alone from the same numbers.
  sums        over rows (gradients of weights): output gradients are zero except in the sampled rows
  products    of the library, against gemm_plain, which other cases compare with its twin
  attention   by cuDNN and by the built-in kernel, for one group of heads in the last sequence
  experts     all rows, with the model's numbers of rows and of experts, but of 64 columns

Tensors repeat a sequence of random numbers of prime length, so that rows differ. Outputs are poisoned.
*/
#pragma once
#include "../llmc/model/presets.h"
#include "cuda_attention.h"
#include "operation_sizes.h"

typedef std::vector<double> Values;
typedef std::vector<size_t> Rows;

// A matrix on the device.
struct Big {
    TensorType type;
    size_t rows, ld;
    char *at;
    size_t element_bytes() const { return type_bytes(type); }
    size_t row_bytes() const { return ld * element_bytes(); }
    floatX *x(size_t row = 0) const { return (floatX *)(void *)(at + row * row_bytes()); }
    float *f() const { return (float *)(void *)at; }
    int *i() const { return (int *)(void *)at; }
};

// The tensors of one case, and the sampled rows.
class Sizes {
  public:
    enum { PERIOD = 1000003, SAMPLES = 32 };
    Rows rows;
    explicit Sizes(size_t N) : rows(choose(N)) {}
    ~Sizes() {
        for (Big &t : tensors) buffer_free(t.at);
    }
    Sizes(const Sizes &) = delete;

    static Rows choose(size_t N) { // the first, the last, random ones between
        Rows r = {0, N - 1};
        for (int s = 2; s < SAMPLES; s++) r.push_back((size_t)test_random_bits(&test_random) % N);
        std::sort(r.begin(), r.end());
        r.erase(std::unique(r.begin(), r.end()), r.end());
        return r;
    }
    Big &poisoned(size_t row_count, size_t ld, TensorType type = STORED) { return bytes(row_count, ld, type, POISON); }
    Big &zero(size_t row_count, size_t ld, TensorType type = STORED) { return bytes(row_count, ld, type, 0); }
    // The tensor of a case, as it is before a call.
    Big &given(const Tensor &of) {
        Big &t = add(1, of.count, of.type);
        buffer_upload(t.at, of.initial.data() + of.begin, of.bytes);
        return t;
    }
    Big &copy(const Big &from) {
        Big &t = add(from.rows, from.ld, from.type);
        CUDA_CHECK(cudaMemcpyAsync(t.at, from.at, t.rows * t.row_bytes(), cudaMemcpyDeviceToDevice, main_stream));
        return t;
    }
    // Uniform in (-spread, spread).
    Big &random(size_t row_count, size_t ld, double spread = 1, TensorType type = STORED) {
        return periodic(row_count, ld, type, [spread] { return spread * test_random_real(&test_random); });
    }
    // As input i of a case.
    Big &random(size_t row_count, size_t ld, const OpCase &c, const OpTensor &of) {
        const long i = &of >= c.x && &of < c.x + OP_TENSORS ? &of - c.x : 0;
        OpCase like = c;
        like.x[i] = of;
        return periodic(row_count, ld, of.type, [&] { return op_input(&like, (int)i, 1, &test_random); });
    }
    // Zero except in the sampled rows.
    Big &sparse(size_t row_count, size_t ld) {
        Big &t = zero(row_count, ld);
        std::vector<floatX> row(ld);
        for (size_t r : rows) {
            for (floatX &x : row) x = (floatX)(float)test_random_real(&test_random);
            buffer_upload(t.x(r), row.data(), t.row_bytes());
        }
        return t;
    }
    Values sample(const Big &t) const { return sample(t, rows); }
    Values sample(const Big &t, const Rows &of) const {
        Values values(of.size() * t.ld);
        std::vector<char> row(t.row_bytes());
        for (size_t s = 0; s < of.size(); s++) {
            buffer_download(row.data(), t.at + of[s] * t.row_bytes(), row.size());
            for (size_t k = 0; k < t.ld; k++) values[s * t.ld + k] = load_value(&row[k * t.element_bytes()], t.type);
        }
        return values;
    }
    void expect(const char *name, const Big &t, const Values &want, Error error) {
        expect_values(name, t.type, sample(t), want, error);
    }

  private:
    std::deque<Big> tensors;
    Big &add(size_t row_count, size_t ld, TensorType type) {
        Big t = {type, row_count, ld, nullptr};
        t.at = (char *)buffer_alloc(row_count * t.row_bytes(), "a tensor of --sizes");
        tensors.push_back(t);
        return tensors.back();
    }
    template <typename Number> Big &periodic(size_t row_count, size_t ld, TensorType type, Number number) {
        Big &t = add(row_count, ld, type);
        size_t count = row_count * ld, size = t.element_bytes(), filled = min_size(count, PERIOD);
        std::vector<char> host(filled * size);
        for (size_t k = 0; k < filled; k++) store_value(&host[k * size], type, number());
        buffer_upload(t.at, host.data(), host.size());
        for (size_t n; filled < count; filled += n) { // the filled part is a multiple of the period
            n = min_size(filled, count - filled);
            CUDA_CHECK(cudaMemcpyAsync(t.at + filled * size, t.at, n * size, cudaMemcpyDeviceToDevice, main_stream));
        }
        return t;
    }
    Big &bytes(size_t row_count, size_t ld, TensorType type, int value) {
        Big &t = add(row_count, ld, type);
        CUDA_CHECK(cudaMemsetAsync(t.at, value, row_count * t.row_bytes(), main_stream));
        return t;
    }
};

static inline void with_workspace(size_t bytes, const std::function<void()> &operation) {
    ops_init(bytes);
    operation();
    ops_wait();
    ops_free();
}

// The dimensions of a case: those of the model of `--sizes`.
#define SIZES_DIMS "B T C F NH NKV D V"
static OpModel sizes_model(const Case *c) {
    OpModel m;
    memset(&m, 0, sizeof(m));
    m.B = c->n[0], m.T = c->n[1], m.C = c->n[2], m.F = c->n[3], m.NH = c->n[4], m.NKV = c->n[5], m.D = c->n[6];
    m.V = m.Vw = c->n[7], m.Vp = (int)round_up((size_t)m.V, 64);
    m.NQ = 2 * m.NH, m.QD = m.D, m.rotated = m.NQ + m.NKV;
    m.width = (m.NQ + 2 * m.NKV) * m.D + m.NH;
    m.ld = (int)round_up((size_t)m.width, 64); // of diff_v2's fused row
    m.logit_rows = 8192, m.update_rows = m.V;  // an update of the embedding
    return m;
}
#include "cuda_sizes_checks.h"
