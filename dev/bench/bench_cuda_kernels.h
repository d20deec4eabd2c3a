/*
bench_cuda_kernels.h: the time of each CUDA operation at the shapes of a model (bench_cuda.cu).

A case lists the tensors that an operation reads and writes. They are stored one after another in a set. As many sets as
exceed the L2 cache are used in turns, so that tensors are read from memory. They contain random numbers: with zeros a
GPU takes less power and reaches a higher clock.
*/
#pragma once
#include "bench_operation.h"

enum { TENSORS = 12, TEMPLATE_BYTES = 4 << 20, MOST_REPEATS = 200, MOST_SETS = 64 };

static struct {
    char *pool; // device memory for the tensors
    size_t pool_bytes;
    char *random[3]; // device memory: TEMPLATE_BYTES of SIGNED, POSITIVE and TOKENS each
    int V, l2_bytes;
    cudaEvent_t events[MOST_REPEATS + 1];
    const char *word;                         // only operations whose name contains it
    double copy_gbs, gemm_tflops, fp8_tflops; // fp8_tflops 0: the device has no FP8
} kernels;

// Contents of a tensor: floatX in [-1, 1), fp32 in [-1, 1), fp32 in [0, 1), tokens.
typedef enum { FLOATX, SIGNED, POSITIVE, TOKENS } Kind;
typedef struct {
    char name[64], shape[250];
    double bytes, flops;
    bool fp8; // products
    int tensors;
    Kind kind[TENSORS];
    size_t count[TENSORS], at[TENSORS], set_bytes;
} KernelCase;

PRINTF_LIKE(4, 5)
static KernelCase kernel_case(const char *name, double bytes, double flops, const char *fmt, ...) {
    KernelCase c;
    memset(&c, 0, sizeof(c));
    FORMAT(c.name, "%s", name);
    c.bytes = bytes, c.flops = flops;
    va_list args;
    va_start(args, fmt);
    vsnprintf(c.shape, sizeof(c.shape), fmt, args);
    va_end(args);
    return c;
}
static void add_tensor(KernelCase &c, Kind kind, size_t count) {
    int i = c.tensors++;
    assert(i < TENSORS);
    c.kind[i] = kind, c.count[i] = count, c.at[i] = c.set_bytes;
    c.set_bytes += round_up(count * (kind == FLOATX ? sizeof(floatX) : sizeof(float)), 256);
}
// Adds tensors of `counts` elements; kinds has a letter for each: x floatX, f fp32, p positive fp32, t tokens.
template <typename... Counts> static KernelCase &tensors(KernelCase &c, const char *kinds, Counts... counts) {
    static const char *const letters = "xfpt"; // in the order of Kind
    const size_t all[] = {(size_t)counts...};
    assert(c.tensors == 0 && strlen(kinds) == sizeof...(counts));
    for (size_t count : all) add_tensor(c, (Kind)(strchr(letters, kinds[c.tensors]) - letters), count);
    return c;
}

// bytes: of the tensors, at most
static void kernels_open(int V, size_t bytes) {
    size_t free_bytes = 0, total = 0;
    kernels.V = V;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    kernels.pool_bytes = min_size(free_bytes / 10 * 8, bytes);
    kernels.pool = (char *)buffer_alloc(kernels.pool_bytes, "the tensors of the benchmark");
    CUDA_CHECK(cudaDeviceGetAttribute(&kernels.l2_bytes, cudaDevAttrL2CacheSize, 0));
    if (kernels.l2_bytes < 1 << 20) kernels.l2_bytes = 1 << 20;
    for (int i = 0; i <= MOST_REPEATS; i++) CUDA_CHECK(cudaEventCreate(&kernels.events[i]));
    for (int i = 0; i < 3; i++) {
        uint32_t *host = (uint32_t *)checked_calloc(TEMPLATE_BYTES / 4, 4);
        // two bf16 numbers below 1 are also one fp32 number below 1
        for (size_t e = 0; e < TEMPLATE_BYTES / 4; e++) {
            uint64_t bits = random_bits(5, e);
            for (int part = 0; part < 2; part++) {
                float x = (float)(bits >> (32 * part) & 0xFFFF) / 65536;
                uint32_t word;
                if (i == 0 && (bits >> (32 * part + 16) & 1)) x = -x;
                memcpy(&word, &x, 4);
                host[e] |= part ? word & 0xFFFF0000u : word >> 16;
            }
            if (i == 2) host[e] = (uint32_t)zipf_token(bits, V);
        }
        kernels.random[i] = (char *)buffer_alloc(TEMPLATE_BYTES, "random numbers");
        buffer_upload(kernels.random[i], host, TEMPLATE_BYTES);
        free(host);
    }
}
static size_t kernels_pool(void) { return bench_tiny ? (size_t)32 << 20 : (size_t)24 << 30; }
static void kernels_close(void) {
    buffer_free(kernels.pool);
    for (int i = 0; i < 3; i++) buffer_free(kernels.random[i]);
    for (int i = 0; i <= MOST_REPEATS; i++) CUDA_CHECK(cudaEventDestroy(kernels.events[i]));
}

static void kernel_fill(char *to, size_t bytes, Kind kind) {
    const char *from = kernels.random[kind == TOKENS ? 2 : kind == POSITIVE ? 1 : 0];
    for (size_t at = 0; at < bytes; at += TEMPLATE_BYTES)
        CUDA_CHECK(cudaMemcpyAsync(to + at, from, min_size(TEMPLATE_BYTES, bytes - at), cudaMemcpyDeviceToDevice,
                                   main_stream));
}

// Milliseconds of each function of the tensors, in turns.
typedef struct {
    double ms[2][MOST_REPEATS];
    int repeats;
} KernelTimes;

static void kernel_prepare_nothing(void **t) { (void)t; }

// The functions leave the values of the tensors finite. prepare: called once for each set, before the measurement.
template <typename Prepare, typename... Runs>
static KernelTimes kernel_times(const KernelCase &c, Prepare prepare, Runs... runs) {
    enum { RUNS = sizeof...(runs), MOST = MOST_REPEATS / RUNS };
    size_t wanted_sets = 2 + 3 * (size_t)kernels.l2_bytes / max_size(c.set_bytes, 1);
    if (bench_repeats) wanted_sets = min_size(wanted_sets, (size_t)RUNS * (size_t)(1 + bench_repeats));
    int sets = (int)min_size(min_size(wanted_sets, MOST_SETS), kernels.pool_bytes / max_size(c.set_bytes, 1)), next = 0;
    CHECK(sets > 0, "%s %s takes %.1f MiB, more than the benchmark has: choose a smaller model", c.name, c.shape,
          (double)c.set_bytes / 1048576);
    auto with_set = [&](int set, auto &run) {
        void *tensors[TENSORS];
        for (int t = 0; t < c.tensors; t++) tensors[t] = kernels.pool + (size_t)set * c.set_bytes + c.at[t];
        run(tensors);
    };
    for (int s = 0; s < sets; s++) {
        for (int t = 0; t < c.tensors; t++)
            kernel_fill(kernels.pool + (size_t)s * c.set_bytes + c.at[t],
                        c.count[t] * (c.kind[t] == FLOATX ? sizeof(floatX) : sizeof(float)), c.kind[t]);
        with_set(s, prepare);
    }
    KernelTimes times;
    auto timed = [&](int repeats) { // events between all calls
        int calls = 0;
        auto once = [&](auto &run) {
            with_set(next, run);
            next = (next + 1) % sets;
            CUDA_CHECK(cudaEventRecord(kernels.events[++calls], main_stream));
        };
        CUDA_CHECK(cudaEventRecord(kernels.events[0], main_stream));
        for (int r = 0; r < repeats; r++) (once(runs), ...);
        ops_wait();
        for (int i = 0; i < calls; i++) {
            float between = 0;
            CUDA_CHECK(cudaEventElapsedTime(&between, kernels.events[i], kernels.events[i + 1]));
            times.ms[i % RUNS][i / RUNS] = (double)between;
        }
    };
    timed(1); // makes plans, loads code
    if (!bench_repeats) timed(2);
    double round = 0;
    for (int i = 0; i < RUNS; i++) round += times.ms[i][bench_repeats ? 0 : 1];
    times.repeats = bench_repeats ? min_int(bench_repeats, MOST)
                                  : (int)fmin(MOST, fmax(round < 100 ? 7 : 2, 150 / fmax(round, 1e-3)));
    timed(times.repeats);
    return times;
}
// The median milliseconds of run(tensors).
template <typename Run, typename Prepare = void (*)(void **)>
static double kernel_ms(const KernelCase &c, Run run, Prepare prepare = kernel_prepare_nothing) {
    KernelTimes times = kernel_times(c, prepare, run);
    return median(times.ms[0], times.repeats);
}

// The limit of a case that has both bytes and FLOPs is the one that takes longer.
static void kernel_record(const KernelCase &c, double ms) {
    double copy_ms = 1e-6 * c.bytes / kernels.copy_gbs,
           product_ms = c.flops > 0 ? 1e-9 * c.flops / (c.fp8 ? kernels.fp8_tflops : kernels.gemm_tflops) : 0;
    bool product = product_ms > copy_ms;
    Ratio share = {fmax(copy_ms, product_ms) / ms, 0, 0};
    record(c.name, c.shape, ms, "ms", fmax(copy_ms, product_ms), product ? "product" : "copy", share, "%.2f %s",
           product ? 1e-9 * c.flops / ms : 1e-6 * c.bytes / ms, product ? "TFLOP/s" : "GB/s");
}
// The medians of rounds that alternate with a peer, whose milliseconds are `expected`.
static void kernel_record_rounds(const char *name, const char *of, double *ms, double *expected, int rounds,
                                 const char *against, const char *note) {
    double ratio[MOST_REPEATS];
    for (int r = 0; r < rounds; r++) ratio[r] = expected[r] / ms[r];
    double middle = median(ratio, rounds); // medians sort
    Ratio ratios = {middle, ratio[0], ratio[rounds - 1]};
    record(name, of, median(ms, rounds), "ms", median(expected, rounds), against, ratios, "%s", note);
}
template <typename Run, typename Prepare = void (*)(void **)>
static void kernel_measure(const KernelCase &c, Run run, Prepare prepare = kernel_prepare_nothing) {
    if (strstr(c.name, kernels.word)) kernel_record(c, kernel_ms(c, run, prepare));
}
// Also a second record: beside a peer of equal FLOPs, in turns. Ratios are of one round.
template <typename Run, typename Peer>
static void kernel_compare(const KernelCase &c, Run run, const char *peer_name, Peer peer) {
    KernelTimes times = kernel_times(c, kernel_prepare_nothing, run, peer);
    double sorted[MOST_REPEATS];
    memcpy(sorted, times.ms[0], sizeof(sorted));
    kernel_record(c, median(sorted, times.repeats));
    kernel_record_rounds(c.name, c.shape, times.ms[0], times.ms[1], times.repeats, "a dense product", peer_name);
}

// ---------------------------------------------------------------------------------------------------
// Peaks: GB/s of a copy, counted as read and written; TFLOP/s of the fastest product of the library

static __global__ void copy_kernel(uint4 *to, const uint4 *from, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        to[i] = from[i];
}

static void kernel_record_peak(const char *name, const char *shape, double rate, const char *unit, double ms) {
    record(name, shape, rate, unit, 0, "", NO_RATIO, "%.4f ms", ms);
}
static void kernel_peaks(void) {
    size_t bytes = bench_tiny ? (size_t)1 << 20 : min_size((size_t)2 << 30, kernels.pool_bytes / 4 / 256 * 256);
    KernelCase copy = kernel_case("copy", 2.0 * (double)bytes, 0, "%zu MiB", bytes >> 20);
    tensors(copy, "ff", bytes / 4, bytes / 4);
    double library = kernel_ms(
        copy, [=](void **t) { CUDA_CHECK(cudaMemcpyAsync(t[0], t[1], bytes, cudaMemcpyDeviceToDevice, main_stream)); });
    double by_kernel = kernel_ms(copy, [=](void **t) {
        LAUNCH(copy_kernel, (unsigned)device.sm_count * 16, 256, 0, (uint4 *)t[0], (const uint4 *)t[1], bytes / 16);
    });
    kernels.copy_gbs = 1e-6 * copy.bytes / fmin(library, by_kernel);
    static const int sizes[][3] = {{8192, 8192, 8192}, {16384, 8192, 4096}, {16384, 16384, 2048}};
    for (int i = 0; i < (bench_tiny ? 1 : 3); i++) {
        int M = bench_tiny ? 64 : sizes[i][0], N = bench_tiny ? 64 : sizes[i][1], K = bench_tiny ? 64 : sizes[i][2];
        KernelCase product = kernel_case("gemm", 0, 2.0 * M * N * K, "%d x %d x %d", M, N, K);
        tensors(product, "xxx", (size_t)M * (size_t)N, (size_t)M * (size_t)K, (size_t)N * (size_t)K);
        double ms = kernel_ms(
            product, [=](void **t) { matmul_forward((floatX *)t[0], (floatX *)t[1], (floatX *)t[2], M, K, N, N); });
        kernel_record_peak("gemm", product.shape, 1e-9 * product.flops / ms, "TFLOP/s", ms);
        kernels.gemm_tflops = fmax(kernels.gemm_tflops, 1e-9 * product.flops / ms);
    }
    kernel_record_peak("copy by the library", copy.shape, 1e-6 * copy.bytes / library, "GB/s", library);
    kernel_record_peak("copy by a kernel", copy.shape, 1e-6 * copy.bytes / by_kernel, "GB/s", by_kernel);
}

// The codes of x (M,K) in FP8, in `memory`.
static Fp8Codes kernel_codes(void *memory, const void *x, int M, int K) {
    char *at = (char *)memory;
    Fp8Codes codes = fp8_codes_at(&at, M, K, false);
    absmax_t *max = (absmax_t *)(void *)((char *)memory + FP8_ALIGN);
    buffer_zero(max, sizeof(*max));
    Activation operand = activation((const floatX *)x, max);
    absmax_update(operand, M, K, K);
    fp8_quantize(codes, operand, M, K, K, FP8_ACTIVATION);
    return codes;
}
// A product y (M,N) = x (M,K) weight (N,K)^T of codes alone: milliseconds, TFLOP/s of the kernel case.
static double kernel_fp8_product(KernelCase &c, int M, int N, int K) {
    const size_t counts[] = {(size_t)M * (size_t)N, (size_t)M * (size_t)K, (size_t)N * (size_t)K};
    tensors(c, "xxxff", counts[0], counts[1], counts[2], FP8_HEADER / 4 + fp8_codes_bytes(M, K) / 4,
            FP8_HEADER / 4 + fp8_codes_bytes(N, K) / 4);
    auto run = [=](void **t) {
        char *at[2] = {(char *)t[3], (char *)t[4]};
        Fp8Codes x = fp8_codes_at(&at[0], M, K, false), weight = fp8_codes_at(&at[1], N, K, false);
        GemmShape s = {false, true, false, sizeof(floatX) == 4, M, N, K, K, K, N};
        gemm_fp8(s, t[0], linear_operands(x.codes, weight.codes, x, weight, OPERAND_E4M3));
    };
    return kernel_ms(c, run, [=](void **t) { kernel_codes(t[3], t[1], M, K), kernel_codes(t[4], t[2], N, K); });
}
static void kernel_peak_fp8(void) {
    const char *why = linear_configure(GEMM_FP8);
    linear_configure(GEMM_BF16);
    if (why) {
        record("FP8", "", 0, "", 0, "", NO_RATIO, "%s", why);
        return;
    }
    int size = bench_tiny ? 64 : 8192;
    KernelCase product = kernel_case("gemm in fp8", 0, 2.0 * size * size * size, "%d x %d x %d", size, size, size);
    double ms = kernel_fp8_product(product, size, size, size);
    kernels.fp8_tflops = 1e-9 * product.flops / ms;
    kernel_record_peak(product.name, product.shape, kernels.fp8_tflops, "TFLOP/s", ms);
}

// ---------------------------------------------------------------------------------------------------
// The operations

// An operation of the catalogue as a case, whose tensors are those of the operation; what is changed in place is one of
// them.
class KernelOperation {
  public:
    BenchOperation o;
    KernelCase k;
    KernelOperation(const OpSize &size, bool backward, const char *note = "") {
        char shape[180];
        operation_describe(&o, &size, backward);
        if (!o.measured) return;
        op_shape_text(shape, sizeof(shape), op_kind(size.kind)->dims, size.d, " ");
        k = kernel_case(o.name, (double)o.cost.bytes, o.cost.flops, "%s%s%s%s", size.what, *size.what ? ": " : "",
                        shape, note);
        k.fp8 = c.fp8;
        add_tensors();
        if (c.index_count) {
            on_device = (int *)buffer_alloc((size_t)c.index_count * sizeof(int), "the indices of the benchmark");
            buffer_upload(on_device, o.index, (size_t)c.index_count * sizeof(int));
        }
        c.index = on_device;
        ops_init(max_size(o.cost.workspace, 1));
    }
    ~KernelOperation() {
        ops_wait();
        buffer_free(on_device);
        free(o.index);
    }
    KernelOperation(const KernelOperation &) = delete;
    bool wanted() const { return o.measured && strstr(o.name, kernels.word); }
    void bind(void **t) {
        for (int i = 0; i < k.tensors; i++) *to[i] = t[i];
        c.dy = o.dy;
    }
    void run(void **t) {
        bind(t);
        op_call(&c, o.backward);
    }
    void prepare(void **t) {
        bind(t);
        if (c.kind == OP_ATTENTION && o.backward) op_call(&c, false); // whose output the backward reads
        for (int i = 0; i < 2 && c.fp8; i++) buffer_zero(c.operand_max[i], sizeof(uint32_t));
        if (c.fp8) op_prepare_fp8(&c, o.backward);
    }
    double ms() {
        return kernel_ms(k, [&](void **t) { run(t); });
    }

  private:
    OpCase &c = o.c;
    void **to[TENSORS];
    int *on_device = nullptr;
    void add(const OpTensor &t, void **data) {
        if (!t.views) return;
        to[k.tensors] = data;
        add_tensor(k,
                   t.type == STORED  ? FLOATX
                   : t.type == INT32 ? TOKENS
                   : t.high > 0      ? POSITIVE
                                     : SIGNED,
                   t.count * (t.type == FP64 ? 2 : 1));
    }
    void add_tensors() {
        OpTensor max = {}, copy = {};
        for (int i = 0; i < OP_TENSORS; i++) {
            bool same = i < c.in_place;
            if (!same) add(c.x[i], &c.x[i].data);
            if (o.backward) add(c.dx[i], &c.dx[i].data);
            add(same && !o.backward ? c.x[i] : c.y[i], &c.y[i].data);
        }
        if (o.backward && c.dloss == 0) add(c.y[0], &o.dy);
        if (!c.fp8) return;
        op_statistics(&max, "max", 1, 1, 0, 0);
        op_statistics(&copy, "copy", 1, (int)(linear_copy_bytes(o.size.d[1], o.size.d[2], false) / 4), 0, 0);
        for (int i = 0; i < 2; i++) add(max, (void **)&c.operand_max[i]);
        add(copy, &c.copy);
    }
};
static void kernel_of_operation(const OpSize &size, bool backward, const char *note = "") {
    KernelOperation k(size, backward, note);
    if (!k.wanted()) return;
    kernel_measure(
        k.k, [&](void **t) { k.run(t); }, [&](void **t) { k.prepare(t); });
}
// y = x weight^T, dx = dy weight, dweight += dy^T x of all experts. They alternate with one product of equal FLOPs by
// the matrix library: that of all rows with the weight of one expert. It reads, or writes, one weight instead of E, so
// that it is faster where the weights limit the grouped product. The share of a grouped product, of the limit by its
// own bytes or FLOPs, does not have this difference.
static void kernels_of_expert_linear(const OpSize &size) {
    static const char *const names[] = {"expert_linear_forward", "expert_linear_to_input", "expert_linear_to_weight"};
    const int R = size.d[0] * size.d[3], IC = size.d[1], OC = 2 * size.d[4];
    const GemmShape dense[] = {{false, true, false, false, R, OC, IC, IC, IC, OC},
                               {false, false, false, false, R, IC, OC, OC, IC, IC},
                               {true, false, true, true, OC, IC, R, OC, IC, IC}};
    for (int part = 0; part < 3; part++) {
        if (!strstr(names[part], kernels.word)) continue;
        KernelOperation of(size, part > 0);
        const OpCase *c = &of.o.c;
        const double forward = (double)op_cost_of(c, false).bytes;
        char peer[96];
        FORMAT(of.k.name, "%s", names[part]);
        FORMAT(peer, "%d x %d x %d", dense[part].M, dense[part].N, dense[part].K);
        if (part) of.k.flops /= 2, of.k.bytes = part == 1 ? forward : of.k.bytes - forward;
        kernel_compare(
            of.k,
            [&](void **t) {
                of.bind(t);
                ExpertLinear w = op_expert_linear(c);
                if (part == 0) op_call(c, false);
                else if (part == 1)
                    expert_gemm(OP_DX(0), expert_to_input_shape(&w), expert_operands(OP_DY, w.first.weight),
                                expert_starts(c), w.count, w.stride * sizeof(floatX), R);
                else
                    expert_gemm(w.first.dweight, expert_to_weight_shape(&w, true), expert_operands(OP_DY, OP_X(0)),
                                expert_starts(c), w.count, w.stride * sizeof(grad_t), R);
            },
            peer,
            [&](void **t) {
                of.bind(t);
                void *const out[] = {OP_Y(0), OP_DX(0), OP_DW(1)};
                gemm(dense[part], out[part], part ? OP_DY : OP_X(0), part == 2 ? OP_X(0) : OP_X(1));
            });
    }
}
static void kernels_of_operations(const Model *m, int B, int T) {
    OpModel model = op_model_of(m, B, T);
    if (bench_tiny) model.update_rows = min_int(model.update_rows, (1 << 16) / model.C);
    OpSize sizes[OP_SIZES];
    int count = op_sizes(sizes, &model);
    for (int i = 0; i < count; i++)
        for (int backward = 0; backward < 2; backward++)
            if (sizes[i].kind != OP_EXPERT_LINEAR) kernel_of_operation(sizes[i], backward);
            else if (!backward) kernels_of_expert_linear(sizes[i]);
    size_t set = product(model.update_rows, model.C);
    KernelCase k = kernel_case("buffer_zero", (double)(set * sizeof(grad_t)), 0, "%zu gradients", set);
    kernel_measure(tensors(k, "f", set), [=](void **t) { buffer_zero(t[0], set * sizeof(grad_t)); });
}

#define X(i) ((floatX *)t[i])

// The linear layers of a block in FP8: rounding alone, and whole operations, with the rounding of their operands.
static void kernels_of_fp8(const Model *m, int N) {
    static const char *const names[] = {"q, k, v, lambda", "o_proj", "gate, up", "down"};
    if (kernels.fp8_tflops == 0) return;
    linear_configure(GEMM_FP8);
    for (int i = 0; i <= LINEAR_DOWN; i++) {
        Linear shape = linear_shape(&m->plan, (LinearKind)i, 0);
        int IC = shape.IC, OC = shape.OC;
        if (OC == 0) continue; // a layer with experts alone
        size_t in = (size_t)N * (size_t)IC, weight = (size_t)IC * (size_t)OC;
        size_t copy = linear_copy_bytes(IC, OC, false) / sizeof(float);
        ops_init(max_size(m->plan.workspace_bytes, linear_workspace_bytes(N, IC, OC)));
        KernelCase k = kernel_case("fp8_quantize", (double)fp8_quantize_bytes(N, IC, 2), 0, "%s: N %d IC %d, both",
                                   names[i], N, IC);
        tensors(k, "xff", in, FP8_HEADER / 4 + 2 * fp8_codes_bytes(N, IC) / 4, 1);
        kernel_measure(k, [=](void **t) {
            char *memory = (char *)t[1];
            fp8_quantize(fp8_codes_at(&memory, N, IC, true), activation(X(0), (absmax_t *)t[2]), N, IC, IC,
                         FP8_ACTIVATION);
        });
        k = kernel_case("linear_copy_weight", (double)(absmax_bytes(OC, IC) + fp8_quantize_bytes(OC, IC, 2)), 0,
                        "%s: OC %d IC %d", names[i], OC, IC);
        kernel_measure(tensors(k, "fx", copy, weight), [=](void **t) {
            Linear w = shape;
            w.weight = X(1), w.copy = t[0];
            linear_copy_weight(&w);
        });
        const OpSize size = {OP_LINEAR_FP8, names[i], {N, IC, OC, shape.ld, 0}, {0, 0}};
        for (int backward = 0; backward < 2; backward++) kernel_of_operation(size, backward);
        k = kernel_case("gemm in fp8", 0, matmul_forward_flops(N, IC, OC), "%s: N %d IC %d OC %d", names[i], N, IC, OC);
        k.fp8 = true;
        if (N % FP8_ALIGN || IC % FP8_ALIGN || OC % FP8_ALIGN || !strstr(k.name, kernels.word)) continue;
        kernel_record(k, kernel_fp8_product(k, N, OC, IC));
    }
    linear_configure(GEMM_BF16);
}

// Attention of a key set, in the fused rows, by the backend of `use`.
static void kernels_of_attention(const char *what, const char *preset, const char *attention, int NKV, int B, int T,
                                 AttentionOptions use) {
    if (!strstr("attention_forward", kernels.word) && !strstr("attention_backward", kernels.word)) return;
    Model m;
    char by[84];
    attention_stop();
    attention_configure(use);
    plan_model(&m, preset, attention, NKV, B, T, FOR_TRAINING);
    FORMAT(by, "; %.80s", attention_backend());
    for (int backward = 0; backward < 2; backward++) kernel_of_operation(attention_size(&m, what, B, T), backward, by);
    model_free(&m, false);
}

#undef X

static void kernels_run(const char *preset, int NKV, int B, int T, const char *word) {
    Model m;
    kernels.word = word;
    plan_model(&m, preset, "diff_v2", NKV, B, T, FOR_TRAINING);
    kernels_open(m.plan.config.V, kernels_pool());
    ops_init(max_size(m.plan.workspace_bytes, embedding_workspace_bytes(B * T)));
    kernel_peaks();
    kernel_peak_fp8();
    kernels_of_operations(&m, B, T);
    ops_init(m.plan.workspace_bytes);
    kernels_of_fp8(&m, B * T);
    char twice[64];
    const AttentionOptions usual = {false, false, true, false}, faster = {false, false, false, false},
                           builtin = {true, false, true, false};
    FORMAT(twice, "%s-2h", preset);
    kernels_of_attention("baseline", preset, "baseline", NKV, B, T, usual);
    kernels_of_attention("diff_v2", preset, "diff_v2", NKV, B, T, usual);
    kernels_of_attention("diff_v2", preset, "diff_v2", NKV, B, T, faster);
    kernels_of_attention("baseline, 2 NH", twice, "baseline", NKV, B, T, usual);
    kernels_of_attention("diff_v1, one of its two", preset, "diff_v1", NKV, B, T, usual);
    kernels_of_attention("diff_v1, one of its two", preset, "diff_v1", NKV, B, T, faster);
    kernels_of_attention("diff_v2", preset, "diff_v2", NKV, B, T, builtin);
    attention_stop();
    kernels_close();
    model_free(&m, false);
}
