/*
bench_cuda_experts.h: the time of the operations of a mixture of experts (bench_cuda.cu), a part of
bench_cuda_kernels.h.

Each token has K random experts, all equally likely, as the byte counts of traffic.h assume. The grouped products
alternate with one product of equal FLOPs by the matrix library: that of all rows with the weight of one expert. It
reads, or writes, one weight instead of E, so that it is faster where the weights limit the grouped product. The share
of a grouped product, of the limit by its own bytes or FLOPs, does not have this difference.
*/
#ifndef DEV_BENCH_CUDA_EXPERTS_H
#define DEV_BENCH_CUDA_EXPERTS_H

// The experts of all tokens (N,K), in device memory.
static int *kernel_choices(Routing r) {
    int *host = (int *)checked_calloc((size_t)r.N * (size_t)r.K, sizeof(int)), order[MAX_EXPERTS];
    for (int e = 0; e < r.E; e++) order[e] = e;
    for (int i = 0; i < r.N * r.K; i++) { // the first K of a random order
        int k = i % r.K, other = k + (int)(random_bits(11, (uint64_t)i) % (uint64_t)(r.E - k)), e = order[other];
        order[other] = order[k], order[k] = e;
        host[i] = e;
    }
    int *choices = (int *)buffer_alloc((size_t)r.N * (size_t)r.K * sizeof(int), "the experts of the benchmark");
    buffer_upload(choices, host, (size_t)r.N * (size_t)r.K * sizeof(int));
    free(host);
    return choices;
}

static void kernels_of_router(Routing r, const int *choices) {
    size_t n = (size_t)r.N, E = (size_t)r.E, R = n * (size_t)r.K, NC = n * (size_t)r.C, NE = n * E,
           EC = E * (size_t)r.C;
    double flops = matmul_forward_flops(r.N, r.C, r.E);
    KernelCase k;
    for (int biased = 0; biased < 2; biased++) {
        k = kernel_case("router_forward", (double)router_forward_bytes(r), flops, "N %d C %d, %d of %d experts%s", r.N,
                        r.C, r.K, r.E, biased ? ", bias" : "");
        tensors(k, "fftfxxx", NE, n, R, R, NC, EC, E);
        kernel_measure(k,
                       [=](void **t) { router_forward(F(0), F(1), I(2), F(3), X(4), X(5), biased ? X(6) : NULL, r); });
    }
    auto choose = [=](int at) {
        return [=](void **t) {
            CUDA_CHECK(cudaMemcpyAsync(t[at], choices, R * sizeof(int), cudaMemcpyDeviceToDevice, main_stream));
        };
    };
    k = kernel_case("router_totals", (double)router_totals_bytes(r), 0, "N %d, %d of %d experts", r.N, r.K, r.E);
    tensors(k, "ffft", 2 * E + 1, NE, n, R);
    kernel_measure(
        k, [=](void **t) { router_totals(F(0), F(1), F(2), I(3), r); }, choose(3));
    k = kernel_case("router_backward", (double)router_backward_bytes(r, true), 2 * flops, "N %d C %d, %d of %d experts",
                    r.N, r.C, r.K, r.E);
    tensors(k, "xffxxfftfp", NC, EC, R, NC, EC, NE, n, R, R, E);
    kernel_measure(
        k,
        [=](void **t) {
            router_backward(X(0), F(1), F(2), X(3), X(4), F(5), F(6), I(7), F(8), F(9), (real)1e-3, (real)1e-3, r,
                            true);
        },
        choose(7));
    bool master = sizeof(floatX) == 2;
    k = kernel_case("router_balance", (double)router_balance_bytes(E, E, master), 0, "%d experts", r.E);
    kernel_measure(tensors(k, "xfp", E, E, E),
                   [=](void **t) { router_balance(X(0), master ? F(1) : NULL, F(2), 1e-3, r.E, 0, r.E); });
}

// What moves rows: N tokens, R rows of experts.
static void kernels_of_expert_rows(Routing r, int FE, const int *choices) {
    size_t n = (size_t)r.N, rows = n * (size_t)r.K, E = (size_t)r.E, NC = n * (size_t)r.C, RC = rows * (size_t)r.C,
           RF = rows * (size_t)FE;
    int R = (int)rows;
    auto group = [=](int starts) { // and the two tensors after it
        return [=](void **t) { expert_group(I(starts), I(starts + 1), I(starts + 2), choices, r); };
    };
    KernelCase k =
        kernel_case("expert_group", (double)expert_group_bytes(r), 0, "N %d, %d of %d experts", r.N, r.K, r.E);
    tensors(k, "tttt", E + 1, rows, rows, rows);
    kernel_measure(
        k, [=](void **t) { expert_group(I(0), I(1), I(2), I(3), r); },
        [=](void **t) {
            CUDA_CHECK(cudaMemcpyAsync(t[3], choices, rows * sizeof(int), cudaMemcpyDeviceToDevice, main_stream));
        });
    k = kernel_case("expert_gather", (double)expert_gather_bytes(r), 0, "N %d C %d, %d experts", r.N, r.C, r.K);
    tensors(k, "xxttt", RC, NC, E + 1, rows, rows);
    kernel_measure(
        k, [=](void **t) { expert_gather(X(0), X(1), I(3), r); }, group(2));
    for (int add = 0; add < 2; add++) {
        k = kernel_case("expert_combine", (double)expert_combine_bytes(r, add), 0, "N %d C %d, %d experts%s", r.N, r.C,
                        r.K, add ? ", adds" : "");
        tensors(k, "xxttt", NC, RC, E + 1, rows, rows);
        kernel_measure(
            k, [=](void **t) { expert_combine(X(0), X(1), I(4), r, add); }, group(2));
    }
    k = kernel_case("expert_swiglu_forward", (double)expert_swiglu_forward_bytes(rows, (size_t)FE), 0, "R %d F %d", R,
                    FE);
    tensors(k, "xxpttt", RF, 2 * RF, rows, E + 1, rows, rows);
    kernel_measure(
        k, [=](void **t) { expert_swiglu_forward(X(0), X(1), F(2), I(4), R, FE, NULL); }, group(3));
    k = kernel_case("expert_swiglu_backward", (double)expert_swiglu_backward_bytes(rows, (size_t)FE), 0, "R %d F %d", R,
                    FE);
    tensors(k, "xfxxpttt", 2 * RF, rows, RF, 2 * RF, rows, E + 1, rows, rows);
    kernel_measure(
        k, [=](void **t) { expert_swiglu_backward(X(0), F(1), X(2), X(3), F(4), I(6), R, FE, NULL); }, group(5));
}

// y = x weight^T, dx = dy weight, dweight += dy^T x of all experts; tensors t: the output, its operands, the places.
static void kernels_of_expert_products(const char *layer, Linear shape, Routing r, const int *choices) {
    int N = r.N, R = r.N * r.K, IC = shape.IC, OC = shape.OC;
    size_t rows = (size_t)R, in = rows * (size_t)IC, out = rows * (size_t)OC,
           stride = round_up(round_up((size_t)OC, MATRIX_ROWS) * (size_t)IC, TENSOR_ALIGN),
           weights = (size_t)r.E * stride;
    double flops = matmul_forward_flops(R, IC, OC), bytes = expert_linear_forward_bytes(r, IC, OC);
    auto group = [=](void **t) { expert_group(I(3), I(4), I(5), choices, r); };
    auto of = [=](const floatX *weight) {
        ExpertLinear w = {shape, r.E, stride, 0};
        w.first.weight = weight;
        return w;
    };
    char what[96], peer[96];
    FORMAT(what, "%s: R %d IC %d OC %d, %d experts", layer, R, IC, OC, r.E);
    FORMAT(peer, "%d x %d x %d", R, OC, IC);
    KernelCase k = kernel_case("expert_linear_forward", bytes, flops, "%s", what);
    kernel_compare(
        tensors(k, "xxxttt", out, in, weights, r.E + 1, rows, rows),
        [=](void **t) { expert_linear_forward(X(0), X(1), of(X(2)), I(3), N, R); }, peer,
        [=](void **t) { matmul_forward(X(0), X(1), X(2), R, IC, OC, OC); }, group);
    k = kernel_case("expert_linear_to_input", bytes, flops, "%s", what);
    FORMAT(peer, "%d x %d x %d", R, IC, OC);
    kernel_compare(
        tensors(k, "xxxttt", in, out, weights, r.E + 1, rows, rows),
        [=](void **t) { expert_linear_to_input(X(0), X(1), of(X(2)), I(3), R); }, peer,
        [=](void **t) {
            GemmShape to_input = {false, false, false, false, R, IC, OC, OC, IC, IC};
            gemm(to_input, X(0), X(1), X(2));
        },
        group);
    k = kernel_case("expert_linear_to_weight", expert_linear_dweight_bytes(r, IC, OC, true), flops, "%s", what);
    FORMAT(peer, "%d x %d x %d", OC, IC, R);
    kernel_compare(
        tensors(k, "fxxttt", weights, out, in, r.E + 1, rows, rows),
        [=](void **t) { expert_linear_to_weight(F(0), X(1), X(2), of(NULL), I(3), R, true); }, peer,
        [=](void **t) {
            GemmShape to_weight = {true, false, true, true, OC, IC, R, OC, IC, IC};
            gemm(to_weight, F(0), X(1), X(2));
        },
        group);
}

// Of the last layer: the first ones may have no experts.
static void kernels_of_experts(const Model *m, int N) {
    Routing r = plan_routing(&m->plan, N);
    int last = m->plan.config.L - 1, *choices = kernel_choices(r);
    ops_init(max_size(m->plan.workspace_bytes, router_workspace_bytes(r)));
    kernels_of_router(r, choices);
    kernels_of_expert_rows(r, m->plan.config.FE, choices);
    kernels_of_expert_products("gate, up", linear_shape(&m->plan, LINEAR_EXPERT_GATE_UP, last), r, choices);
    kernels_of_expert_products("down", linear_shape(&m->plan, LINEAR_EXPERT_DOWN, last), r, choices);
    ops_wait();
    buffer_free(choices);
}
#endif
