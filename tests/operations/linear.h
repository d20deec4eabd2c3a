/*
linear.h: matrix products and linear layers: a case file of operations/catalogue.h.
*/

// --- matmul: x (N,IC), weight (OC,IC), y (N,OC) with row stride ldy ---

static void matmul_setup(OpCase *c) {
    int N = c->d[0], IC = c->d[1], OC = c->d[2];
    op_rows(&c->x[0], "x", N, IC, IC);
    op_error(&c->dx[0], 0, error_of_product(OC));
    op_error(op_parameter(c, 1, "weight", OC, IC, 1), 0, error_of_product(N));
    c->x[1].view->adds = c->d[4] != 0;
    op_rows(&c->y[0], "y", N, OC, c->d[3]);
    op_error(&c->y[0], 0, error_of_product(IC));
    c->length = max_int(N, max_int(IC, OC));
    c->threads_change_sums = c->exact = true;
}
static void matmul_reference(OpCase *c) {
    for (int i = 0, IC = c->d[1], OC = c->d[2]; i < c->d[0] * OC; i++) {
        double *y = c->y->ref + i / OC * c->d[3] + i % OC;
        *y = 0;
        for (int j = 0; j < IC; j++) *y += c->x[0].ref[i / OC * IC + j] * c->x[1].ref[i % OC * IC + j];
    }
}
static void matmul_call(const OpCase *c) {
    const int *d = c->d;
    matmul_forward(OP_Y(0), OP_X(0), OP_X(1), d[0], d[1], d[2], d[3]);
}
static void matmul_call_backward(const OpCase *c) {
    const int *d = c->d;
    matmul_backward(OP_DX(0), OP_DW(1), OP_DY, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], d[4] != 0);
}
static OpCost matmul_cost(const OpCase *c, bool backward) {
    int N = c->d[0], IC = c->d[1], OC = c->d[2];
    size_t bytes = matmul_forward_bytes(N, IC, OC);
    if (!backward) return op_cost(bytes, matmul_forward_flops(N, IC, OC), 0);
    return op_cost(bytes + matmul_dweight_bytes(N, IC, OC, c->d[4] != 0), matmul_backward_flops(N, IC, OC), 0);
}

// --- linear in FP8: matmul of the rounded operands. special 1: an infinity in dy, 2: a NaN in x ---

static void linear_fp8_setup(OpCase *c) {
    int N = c->d[0], IC = c->d[1], OC = c->d[2];
    op_rows(&c->x[0], "x", N, IC, IC);
    op_error_fp8(&c->dx[0], OC, 1);
    op_error_fp8(op_parameter(c, 1, "weight", OC, IC, 1), N, 1);
    op_rows(&c->y[0], "y", N, OC, c->d[3]);
    op_error_fp8(&c->y[0], IC, 1);
    c->add_tensor = 2, c->fp8 = true;
}
static Linear op_linear(const OpCase *c) {
    Linear w = {OP_X(1), OP_DW(1), c->copy, c->d[1], c->d[2], c->d[3]};
    return w;
}
static void linear_fp8_call(const OpCase *c) {
    const Linear w = op_linear(c);
    linear_forward(OP_Y(0), OP_OPERAND_X, &w, c->d[0]);
    // products of padded codes are zeros up to a multiple of 16 columns, if the rows have room for them
    int OC = c->d[2], padded = (int)round_up((size_t)OC, 16);
    for (int n = 0; n < c->d[0] && !c->copy && padded <= c->d[3] && !c->d[4]; n++)
        for (int k = OC; k < padded; k++) OP_Y(0)[product(n, c->d[3]) + (size_t)k] = 0;
}
static void linear_fp8_call_backward(const OpCase *c) {
    const Linear w = op_linear(c);
    linear_backward(OP_DX(0), OP_OPERAND_DY, OP_OPERAND_X, &w, c->d[0], c->x[1].view->adds);
}
static OpCost linear_fp8_cost(const OpCase *c, bool backward) {
    int N = c->d[0], IC = c->d[1], OC = c->d[2];
    return op_cost(0, backward ? matmul_backward_flops(N, IC, OC) : matmul_forward_flops(N, IC, OC),
                   linear_workspace_bytes(N, IC, OC));
}

// --- cases ---

static const OpKind linear_kinds[] = {
    {OP_MATMUL, "matmul", "N IC OC ldy add", OP_BOTH_WAYS(matmul), matmul_cost},
    {OP_LINEAR_FP8, "linear in fp8", "N IC OC ld special", linear_fp8_setup, NULL, linear_fp8_call,
     linear_fp8_call_backward, linear_fp8_cost},
};
static const OpRow linear_cases[] = {
    {OP_MATMUL, {1, 1, 1, 1, 1}, BOTH, "the smallest"},
    {OP_MATMUL, {7, 37, 5, 64, 1}, BOTH, "a fused row padded to 64: columns 5 .. 63 are not written"},
    {OP_MATMUL, {67, 64, 129, 192, 0}, BOTH, "one past a multiple of 64, padded"},
    {OP_MATMUL, {13, 300, 1, 64, 1}, BOTH, "one output column, as lambda has with one head"},
    {OP_MATMUL, {1, 16, 48, 48, 0}, BOTH, "one row, as in generation; no padding"},
    {OP_MATMUL, {1, 64, 259, 320, 0}, BOTH, "one row, an output of whole vectors and a remainder of 3"},
    {OP_MATMUL, {8, 112, 37, 40, 1}, BOTH, "few rows"},
    {OP_MATMUL, {7, 128, 259, 320, 1}, BOTH, "few rows: 4 + 2 + 1, and a weight for several threads"},
    {OP_MATMUL, {9, 112, 37, 40, 1}, BOTH, "more than few rows"},
    {OP_MATMUL, {64, 64, 64, 64, 1}, BOTH, "all aligned"},
    {OP_MATMUL, {13, 24, 259, 320, 1}, BOTH, "V % 8 = 3, rows padded to 64"},
    {OP_MATMUL, {9, 5, 3, 3, 1}, BOTH, "nothing aligned"},

    {OP_LINEAR_FP8, {32, 64, 48, 48, 0}, CUDA_ONLY, "multiples of 16: no copies"},
    {OP_LINEAR_FP8, {32, 64, 48, 64, 0}, CUDA_ONLY, "padded rows"},
    {OP_LINEAR_FP8, {32, 64, 48, 51, 0}, CUDA_ONLY, "multiples of 16, unaligned outputs"},
    {OP_LINEAR_FP8, {39, 20, 27, 27, 0}, CUDA_ONLY, "nothing aligned"},
    {OP_LINEAR_FP8, {39, 20, 27, 64, 0}, CUDA_ONLY, "nothing aligned, padded rows"},
    {OP_LINEAR_FP8, {1, 16, 80, 128, 0}, CUDA_ONLY, "one row"},
    {OP_LINEAR_FP8, {1, 1, 1, 1, 0}, CUDA_ONLY, "the smallest"},
    {OP_LINEAR_FP8, {144, 136, 264, 320, 0}, CUDA_ONLY, "several tiles; IC and OC are multiples of 8"},
    {OP_LINEAR_FP8, {32, 32, 16, 16, 1}, CUDA_ONLY, "an infinite gradient: dx and dweight are NaN"},
    {OP_LINEAR_FP8, {20, 24, 10, 12, 2}, CUDA_ONLY, "an input that is NaN: y and dweight are NaN"},
};
static inline int linear_sizes(OpSize *list, const OpModel *m) {
    const int N = m->B * m->T, NH = m->NH, D = m->D, rows = min_int(m->B * m->T, m->logit_rows);
    const double L = m->L, chunks = (double)m->B * m->T / min_int(m->B * m->T, m->logit_rows);
    const OpSize sizes[] = {
        {OP_MATMUL, "q, k, v, lambda", {N, m->C, m->width, m->ld, 1}, {L, L}},
        {OP_MATMUL, "o_proj", {N, NH * D, m->C, m->C, 1}, {L, L}},
        {OP_MATMUL, "gate, up", {N, m->C, 2 * m->F, 2 * m->F, 1}, {L, L}},
        {OP_MATMUL, "down", {N, m->F, m->C, m->C, 1}, {L, L}},
        {OP_MATMUL, "head", {rows, m->C, m->Vw, m->Vp, 1}, {chunks, chunks}},
    };
    memcpy(list, sizes, sizeof(sizes));
    return OP_COUNT(sizes);
}
