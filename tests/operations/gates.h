/*
gates.h: gates, SwiGLU, sinks and lambdas of layers: a case file of operations/catalogue.h.
*/

// --- gate: x (N,heads,D), g (N,heads*width) with row stride ldg, y (N,heads,D) ---

static void gate_setup(OpCase *c) {
    int N = c->d[0], heads = c->d[1], D = c->d[2];
    op_rows(&c->x[0], "x", N, heads * D, heads * D);
    op_rows(&c->x[1], "g", N, heads * c->d[4], c->d[3]);
    c->x[1].spread = 6;
    op_rows(&c->y[0], "y", N, heads * D, heads * D);
    op_error(&c->y[0], 16, OP_TINY);
    op_error(&c->dx[0], 16, OP_TINY);
    op_error(&c->dx[1], 16, c->d[4] == 1 ? error_of_sum(D) : 8); // 1 - s loses digits near 1
    c->length = D, c->max_of_y = true;
}
static void gate_reference(OpCase *c) {
    int heads = c->d[1], D = c->d[2];
    for (int i = 0; i < c->d[0] * heads * D; i++) {
        int of_head = i / D % heads * c->d[4] + (c->d[4] == 1 ? 0 : i % D);
        c->y->ref[i] = c->x[0].ref[i] / (1 + exp(-c->x[1].ref[i / D / heads * c->d[3] + of_head]));
    }
}
static void gate_call(const OpCase *c) {
    const int *d = c->d;
    gate_forward(OP_MEASURED_Y, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], d[4]);
}
static void gate_call_backward(const OpCase *c) {
    const int *d = c->d;
    gate_backward(OP_DX(0), OP_DX(1), OP_DY, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], d[4]);
}
static OpCost gate_cost(const OpCase *c, bool backward) {
    const int *d = c->d;
    return op_cost((backward ? gate_backward_bytes : gate_forward_bytes)(d[0], d[1], d[2], d[4]), 0, 0);
}

// --- swiglu: x rows [gate | up] (N,2F), y (N,F) ---

static void swiglu_setup(OpCase *c) {
    int N = c->d[0], F = c->d[1];
    op_rows(&c->x[0], "gate", N, F, 2 * F);
    op_view(&c->x[0], "up", (size_t)F, N, 1, F, 2 * F, F);
    c->x[0].spread = c->d[2];
    op_rows(&c->y[0], "y", N, F, F);
    op_error(&c->y[0], 16, OP_TINY);
    op_error(&c->dx[0], 16, 8 * c->d[2]); // 1 + g (1 - p) cancels for some g
    c->max_of_y = c->max_of_dx = true;
}
static void swiglu_reference(OpCase *c) {
    for (int i = 0, F = c->d[1]; i < c->d[0] * F; i++) {
        double g = c->x->ref[i / F * 2 * F + i % F], u = c->x->ref[i / F * 2 * F + F + i % F];
        c->y->ref[i] = g / (1 + exp(-g)) * u;
    }
}
static void swiglu_call(const OpCase *c) { swiglu_forward(OP_MEASURED_Y, OP_X(0), c->d[0], c->d[1]); }
static void swiglu_call_backward(const OpCase *c) { swiglu_backward(OP_MEASURED_DX, OP_DY, OP_X(0), c->d[0], c->d[1]); }
static OpCost swiglu_cost(const OpCase *c, bool backward) {
    return op_cost((backward ? swiglu_backward_bytes : swiglu_forward_bytes)(c->d[0], c->d[1]), 0, 0);
}

// --- sink: out (N,NH,D), lse (B,NH,T), both in place; sinks (NH), or zeros. Its backward reads the new ones ---

static void sink_setup(OpCase *c) {
    const int *d = c->d, N = d[0] * d[1], NH = d[2], D = d[3];
    op_rows(&c->x[0], "out", N, NH * D, NH * D);
    op_statistics(&c->x[1], "lse", d[0] * NH, d[1], 0, 0);
    c->x[1].spread = 20;
    op_rows(&c->y[0], "out", N, NH * D, NH * D);
    op_error(&c->y[0], 8 + 128, OP_TINY); // expf(x) is off by the rounding of x, which is up to 92 here
    op_statistics(&c->y[1], "lse", d[0] * NH, d[1], 4, 4);
    c->in_place = 2;
    c->x[0].constant = c->x[1].constant = true; // their gradients are those of attention_backward
    c->no_backward = !d[4];
    if (d[4]) op_error(op_parameter(c, 2, "sinks", 1, NH, 2), 4, exp(4.0) * sqrt((double)D) * error_of_sum(D + N));
    c->length = max_int(N * D, 8); // exp(x) is off by the rounding of x, which is up to 22 in C
}
static void sink_reference(OpCase *c) {
    const int *d = c->d, T = d[1], NH = d[2], D = d[3];
    for (int i = 0; i < d[0] * T * NH; i++) {
        int at = (i / NH / T * NH + i % NH) * T + i / NH % T;
        double sink = d[4] ? c->x[2].ref[i % NH] : 0, above = c->x[1].ref[at] - sink;
        for (int k = 0; k < D; k++) c->y->ref[i * D + k] = c->x->ref[i * D + k] / (1 + exp(-above));
        c->y[1].ref[at] = fmax(c->x[1].ref[at], sink) + log1p(exp(-fabs(above)));
    }
}
static void sink_call(const OpCase *c) {
    sink_forward(OP_Y(0), OP_STAT(1), c->d[4] ? OP_X(2) : NULL, c->d[0], c->d[1], c->d[2], c->d[3]);
}
static void sink_call_backward(const OpCase *c) {
    sink_backward(OP_DW(2), OP_DY, OP_Y(0), OP_STAT(1), OP_X(2), c->d[0], c->d[1], c->d[2], c->d[3]);
}
static OpCost sink_cost(const OpCase *c, bool backward) {
    size_t N = product(c->d[0], c->d[1]);
    return op_cost((backward ? sink_backward_bytes : sink_forward_bytes)(N, c->d[2], c->d[3]), 0, 0);
}

// --- lambdas of layers: x[0] [q1 | k1 | gap], x[1] [q2 | k2 | gap], or x[0] lambda (1), or a constant; y l (count) ---

static void lambda_exp_setup(OpCase *c) {
    static const char *const names[] = {"q1", "k1", "q2", "k2"};
    int D = c->d[0], count = c->d[1];
    // the largest of the exponentials, of sums with a deviation of spread^2/3 sqrt(D)
    const double spread = 0.3, e = exp(4 * spread * spread / 3 * sqrt((double)D));
    for (int i = 0; i < 4; i++) {
        op_view(&c->x[i / 2], names[i], (size_t)(i % 2 * D), 1, 1, D, 2 * D + 3, D)->adds = true;
        c->x[i / 2].spread = spread;
        c->dx[i / 2].type = FP32;
        op_error(&c->dx[i / 2], 4, 4 * e * sqrt((double)count));
    }
    op_rows(&c->y[0], "l", 1, count, count);
    op_error(&c->y[0], 4, 4 * e);
    c->length = max_int(D, count);
}
static void lambda_exp_reference(OpCase *c) {
    double dot[2] = {0, 0};
    for (int m = 0; m < 2; m++)
        for (int i = 0, D = c->d[0]; i < D; i++) dot[m] += c->x[m].ref[i] * c->x[m].ref[D + i];
    for (int i = 0; i < c->d[1]; i++) c->y->ref[i] = exp(dot[0]) - exp(dot[1]) + lambda_init(c->d[2]);
}
static void lambda_learned_setup(OpCase *c) {
    op_error(op_parameter(c, 0, "lambda", 1, 1, 1), 2, 2);
    op_rows(&c->y[0], "l", 1, c->d[0], c->d[0]);
    c->length = c->d[0];
}
static void lambda_learned_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) c->y->ref[i] = c->x->ref[0];
}
static void fill_setup(OpCase *c) {
    op_rows(&c->y[0], "l", 1, c->d[0], c->d[0]);
    c->no_backward = true;
}
static void fill_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) c->y->ref[i] = c->d[1] / 8.0;
}
static void lambda_exp_call(const OpCase *c) {
    int D = c->d[0];
    lambda_exp_forward(OP_Y(0), OP_X(0), OP_X(0) + D, OP_X(1), OP_X(1) + D, D, (real)lambda_init(c->d[2]),
                       (size_t)c->d[1]);
}
static void lambda_exp_call_backward(const OpCase *c) {
    int D = c->d[0];
    lambda_exp_backward(OP_DW(0), OP_DW(0) + D, OP_DW(1), OP_DW(1) + D, OP_DY, OP_X(0), OP_X(0) + D, OP_X(1),
                        OP_X(1) + D, D, (size_t)c->d[1]);
}
static void lambda_learned_call(const OpCase *c) { lambda_learned_forward(OP_Y(0), OP_X(0), (size_t)c->d[0]); }
static void lambda_learned_call_backward(const OpCase *c) { lambda_learned_backward(OP_DW(0), OP_DY, (size_t)c->d[0]); }
static void fill_call(const OpCase *c) { fill_forward(OP_Y(0), (real)(c->d[1] / 8.0), (size_t)c->d[0]); }
static OpCost layer_lambda_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(layer_lambda_bytes(op_size(c->y->view)), 0, 0);
}

// --- cases ---

static const OpKind gates_kinds[] = {
    {OP_GATE, "gate", "N heads D ldg width", OP_BOTH_WAYS(gate), gate_cost},
    {OP_SWIGLU, "swiglu", "N F scale", OP_BOTH_WAYS(swiglu), swiglu_cost},
    {OP_SINK, "sink", "B T NH D learned", OP_BOTH_WAYS(sink), sink_cost},
    {OP_LAMBDA_EXP, "lambda_exp", "D count layer", OP_BOTH_WAYS(lambda_exp), layer_lambda_cost},
    {OP_LAMBDA_LEARNED, "lambda_learned", "count", OP_BOTH_WAYS(lambda_learned), layer_lambda_cost},
    {OP_FILL, "fill", "count 8*value", OP_FORWARD(fill), layer_lambda_cost},
};
static const OpRow gates_cases[] = {
    {OP_GATE, {1, 1, 1, 1, 1}, BOTH, "one element: both kinds of gate in one"},
    {OP_GATE, {7, 3, 8, 64, 1}, BOTH, "packs, a gate per head, in a row padded to 64"},
    {OP_GATE, {7, 3, 8, 64, 8}, BOTH, "a gate per element, padded"},
    {OP_GATE, {13, 4, 40, 4, 1}, BOTH, "D is no multiple of 16"},
    {OP_GATE, {13, 4, 40, 160, 40}, BOTH, "the same per element, rows without padding"},
    {OP_GATE, {3, 5, 256, 64, 1}, BOTH, "the widest head"},
    {OP_GATE, {2, 2, 256, 512, 256}, BOTH, "the widest head, a gate per element"},
    {OP_GATE, {13, 3, 10, 37, 10}, BOTH, "no packs"},
    {OP_GATE, {5, 2, 128, 259, 128}, BOTH, "unaligned rows of gates"},
    {OP_GATE, {3, 2, 520, 2, 1}, BOTH, "two packs per lane and part of a third"},
    {OP_GATE, {3, 2, 520, 1048, 520}, BOTH, "the same, a gate per element"},

    {OP_SWIGLU, {1, 1, 1}, BOTH, "the smallest"},
    {OP_SWIGLU, {13, 37, 4}, BOTH, "F is no multiple of 16"},
    {OP_SWIGLU, {3, 257, 30}, BOTH, "sigmoids that are 0 or 1 to within rounding"},
    {OP_SWIGLU, {7, 64, 6}, BOTH, "packs"},
    {OP_SWIGLU, {65, 40, 6}, BOTH, "many rows"},
    {OP_SWIGLU, {3, 2568, 6}, BOTH, "two blocks of columns in a row and part of a third"},
    {OP_SWIGLU, {2, 300, 6}, BOTH, "two blocks of columns without packs"},

    {OP_SINK, {1, 1, 1, 1, 1}, BOTH, "the smallest"},
    {OP_SINK, {2, 9, 3, 16, 1}, BOTH, "packs"},
    {OP_SINK, {1, 33, 2, 10, 1}, BOTH, "no packs"},
    {OP_SINK, {2, 70, 2, 96, 1}, BOTH, "D = 96: fewer lanes with several packs each"},
    {OP_SINK, {1, 300, 1, 256, 1}, CUDA_ONLY, "several parts"},
    {OP_SINK, {2, 5, 3, 128, 0}, BOTH, "off_by_one"},
    {OP_SINK, {1, 530, 1, 512, 1}, CUDA_ONLY, "all parts; two packs per lane and more"},

    {OP_LAMBDA_EXP, {1, 1, 0}, BOTH, "the smallest; the first layer, whose init is 0.2"},
    {OP_LAMBDA_EXP, {40, 67, 5}, BOTH, "no multiple of 16"},
    {OP_LAMBDA_EXP, {256, 4099, 30}, BOTH, "the widest head, many rows; init is 0.8 to within 1e-4"},
    {OP_LAMBDA_EXP, {10, 5003, 0}, BOTH, "no packs"},
    {OP_LAMBDA_EXP, {300, 1, 0}, BOTH, "more numbers than threads, one row"},
    {OP_LAMBDA_EXP, {16, 20003, 0}, BOTH, "more rows than threads"},

    {OP_LAMBDA_LEARNED, {1}, BOTH, "the smallest"},
    {OP_LAMBDA_LEARNED, {13}, BOTH, "less than a vector"},
    {OP_LAMBDA_LEARNED, {20001}, BOTH, "past a page; more rows than threads"},

    {OP_FILL, {0, 8}, C_ONLY, "nothing"},
    {OP_FILL, {67, 8}, BOTH, "the constant of diff_v2_no_lambda"},
    {OP_FILL, {4999, 5}, BOTH, "packs, the last block of them partial, and a remainder of 7"},
};
static inline int gates_sizes(OpSize *list, const OpModel *m) {
    const int N = m->B * m->T, NH = m->NH, D = m->D, gates = NH * D, ldg = (int)round_up((size_t)NH, 64);
    const double L = m->L;
    const OpSize sizes[] = {
        {OP_GATE, "per head", {N, NH, D, ldg, 1}, {0, 0}},
        {OP_GATE, "per element", {N, NH, D, gates, D}, {0, 0}},
        {OP_SWIGLU, "", {N, m->F, 1}, {L, L}},
        {OP_SINK, "", {m->B, m->T, NH, D, 1}, {0, 0}},
    };
    memcpy(list, sizes, sizeof(sizes));
    return OP_COUNT(sizes);
}
