/*
cuda_experts.h: the products of experts in FP8 on the device.
*/
#ifndef TESTS_CUDA_EXPERTS_H
#define TESTS_CUDA_EXPERTS_H
#include "cuda_linear.h"

// The products of experts are those of the rounded operands: x and dy by one scale, the weights of each expert by its
// own. n: N IC OC E K skew
static void check_experts_fp8(const Case *c) {
    const int N = c->n[0], IC = c->n[1], OC = c->n[2], E = c->n[3], K = c->n[4], R = N * K;
    Routing r = {N, IC, E, K};
    const char *refused = linear_configure(GEMM_FP8); // by a device without FP8
    if (refused) {
        test_skip("%s", refused);
        linear_configure(sizeof(floatX) == 2 ? GEMM_BF16 : GEMM_FP32);
        return;
    }
    for (int add = 0; add < 2; add++) {
        Operands o(c->shift);
        size_t size = product(OC, IC), stride = round_up(size, 8) + 8 * (size_t)c->shift,
               copy_stride = round_up(linear_copy_bytes(IC, OC, false), 256);
        Tensor &experts = o.ints("experts", (size_t)R, E), &starts = o.out_ints("starts", (size_t)E + 1),
               &entries = o.out_ints("entries", (size_t)R), &places = o.out_ints("places", (size_t)R),
               &x = o.in("x", product(R, IC)), &weight = o.in("weight", (size_t)E * stride),
               &dy = o.in("dy", product(R, OC)), &y = o.out("y", product(R, OC)), &dx = o.out("dx", product(R, IC)),
               &dweight = o.updated_fp32("dweight", (size_t)E * stride), &x_max = o.updated_fp32("x_max", 1),
               &dy_max = o.updated_fp32("dy_max", 1),
               &copy = o.out_fp32("copy", (size_t)E * copy_stride / sizeof(float));
        const int dims[OP_DIMS] = {N, IC, E, K, OC, c->n[5]};
        OpCase choices; // of the catalogue
        op_describe(&choices, OP_EXPERT_GROUP, dims);
        std::vector<int> index((size_t)choices.index_count);
        op_fill_index(&choices, index.data(), &test_random);
        for (size_t i = 0; i < (size_t)R; i++) experts.set(i, index[i]);
        for (size_t i = 0; i < weight.count; i++) // magnitudes that differ by expert; NaN between them
            weight.set(i, i % stride < size ? ldexp(weight.twin[i], (int)(i / stride) % 5) : NAN);
        for (size_t i = 0; i < dweight.count && !add; i++)
            if (i % stride < size) dweight.set(i, NAN);
        x_max.set(0, 0), dy_max.set(0, 0);
        ExpertLinear w = {{weight.x(), copy.at(), IC, OC, OC, (absmax_t *)x_max.at(), (absmax_t *)dy_max.at()},
                          E,
                          stride,
                          copy_stride};
        o.run(expert_linear_workspace_bytes(N, R, E, IC, OC), [&] {
            expert_group(starts.i(), entries.i(), places.i(), experts.i(), r);
            absmax_update(w.first.x_max, x.x(), R, IC, IC);
            absmax_update(w.first.dy_max, dy.x(), R, OC, OC);
            expert_linear_copy_weights(w);
            expert_linear_forward(y.x(), x.x(), w, starts.i(), N, R);
            expert_linear_backward(dx.x(), dweight.f(), dy.x(), x.x(), w, starts.i(), N, R, add);
        });
        int *at = starts.twin_ints.data();
        twin::expert_group(at, entries.twin_ints.data(), places.twin_ints.data(), experts.twin_ints.data(), r);
        std::vector<double> xs = rounded_matrix(x, R, IC, IC, FP8_ACTIVATION),
                            dys = rounded_matrix(dy, R, OC, OC, FP8_GRADIENT), ws((size_t)E * stride);
        for (int e = 0; e < E; e++) {
            const double *from = weight.twin.data() + (size_t)e * stride;
            twin::absmax_t max = 0;
            twin::absmax_update(&max, from, OC, IC, IC);
            for (size_t i = 0; i < size; i++) ws[(size_t)e * stride + i] = twin_rounded(from[i], max, FP8_WEIGHT, true);
        }
        twin::ExpertLinear v = {{ws.data(), nullptr, IC, OC, OC, nullptr, nullptr}, E, stride, 0};
        twin::expert_linear_forward(y.t(), xs.data(), v, at, N, R);
        twin::expert_linear_backward(dx.t(), dweight.t(), dys.data(), xs.data(), v, at, N, R, add);
        const double largest = 16; // of the weights
        Error of_y = fp8_product_error(IC), of_dx = fp8_product_error(OC);
        o.expect(y, {of_y.relative, largest * of_y.absolute});
        o.expect(dx, {of_dx.relative, largest * of_dx.absolute});
        o.expect(dweight, fp8_product_error(N));
    }
    linear_configure(sizeof(floatX) == 2 ? GEMM_BF16 : GEMM_FP32);
}
static const Check experts_fp8_check = {"experts in FP8", check_experts_fp8, "N IC OC E K skew"};
#endif
