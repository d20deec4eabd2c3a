/*
cuda_sizes.h: operations at the shapes of a model (test_diffv2cu --sizes), where a complete comparison would take
minutes on the CPU. All of a tensor is computed, and samples of it are compared:

  rows        the first, the last and some between: the C twin computes these rows from the same numbers
  sums        over rows (gradients of weights): output gradients are zero except in the sampled rows
  products    of the library, against gemm_plain, which other cases compare with its twin
  attention   by cuDNN and by the built-in kernel, for one group of heads in the last sequence

Tensors repeat a sequence of random numbers of prime length, so that rows differ. Outputs are poisoned.
*/
#ifndef TESTS_CUDA_SIZES_H
#define TESTS_CUDA_SIZES_H
#include "../llmc/model/presets.h"
#include "cuda_attention.h"

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
    // Uniform in (-spread, spread); tokens: in [0, spread).
    Big &random(size_t row_count, size_t ld, double spread = 1, TensorType type = STORED) {
        Big &t = add(row_count, ld, type);
        size_t count = row_count * ld, size = t.element_bytes(), filled = min_size(count, PERIOD);
        std::vector<char> host(filled * size);
        for (size_t k = 0; k < filled; k++)
            store_value(&host[k * size], type,
                        type == INT32 ? test_random_int(&test_random, (int)spread)
                                      : spread * test_random_real(&test_random));
        buffer_upload(t.at, host.data(), host.size());
        for (size_t n; filled < count; filled += n) { // the filled part is a multiple of the period
            n = min_size(filled, count - filled);
            CUDA_CHECK(cudaMemcpyAsync(t.at + filled * size, t.at, n * size, cudaMemcpyDeviceToDevice, main_stream));
        }
        return t;
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
struct SizesShape {
    int B, T, C, F, NH, NKV, D, V, N, Vp, ld, S;
    explicit SizesShape(const Case *c)
        : B(c->n[0]), T(c->n[1]), C(c->n[2]), F(c->n[3]), NH(c->n[4]), NKV(c->n[5]), D(c->n[6]), V(c->n[7]) {
        N = B * T, S = Sizes::SAMPLES;
        Vp = (int)round_up((size_t)V, 64);
        ld = (int)round_up(product(2 * NH + 2 * NKV, D) + (size_t)NH, 64); // of diff_v2's fused row
    }
};
#include "cuda_sizes_checks.h"
#endif
