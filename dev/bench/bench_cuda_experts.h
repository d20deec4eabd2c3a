/*
bench_cuda_experts.h: the time of the grouped products of a mixture of experts (bench_cuda.cu), a part of
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

// y = x weight^T, dx = dy weight, dweight += dy^T x of all experts; tensors t: the output, its operands, the places.
static void kernels_of_expert_products(const char *layer, Linear shape, Routing r, const int *choices) {
    int N = r.N, R = r.N * r.K, IC = shape.IC, OC = shape.OC;
    size_t rows = (size_t)R, in = rows * (size_t)IC, out = rows * (size_t)OC,
           stride = round_up(round_up((size_t)OC, MATRIX_ROWS) * (size_t)IC, TENSOR_ALIGN),
           weights = (size_t)r.E * stride;
    double flops = matmul_forward_flops(R, IC, OC), bytes = expert_linear_forward_bytes(r, IC, OC, FLOATX_BYTES);
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
    k = kernel_case("expert_linear_to_weight", expert_linear_dweight_bytes(r, IC, OC, FLOATX_BYTES, true), flops, "%s",
                    what);
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
    kernels_of_expert_products("gate, up", linear_shape(&m->plan, LINEAR_EXPERT_GATE_UP, last), r, choices);
    kernels_of_expert_products("down", linear_shape(&m->plan, LINEAR_EXPERT_DOWN, last), r, choices);
    ops_wait();
    buffer_free(choices);
}
#endif
