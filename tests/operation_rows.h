/*
operation_rows.h: operations on rows and their products, a part of operation_catalogue.h.
*/

// --- embedding: x weight (V,C), y (N,C) ---

static void embedding_setup(OpCase *c) {
    int N = c->d[0], V = c->d[1], C = c->d[2];
    op_index(c, N, V);
    // N sequential roundings of a sum near its value: 4 standard deviations of a random walk
    op_error(op_parameter(c, 0, "weight", V, C, 1), 4 + 4 * sqrt(N / 3.0), error_of_product(N));
    op_rows(&c->y[0], "x", N, C, C);
    c->length = N, c->exact = true;
}
static void embedding_reference(OpCase *c) {
    for (int i = 0, C = c->d[2]; i < c->d[0] * C; i++) c->y->ref[i] = c->x->ref[c->index[i / C] * C + i % C];
}
static void embedding_call(const OpCase *c) { embedding_forward(OP_Y(0), c->index, OP_X(0), c->d[0], c->d[2]); }
static void embedding_call_backward(const OpCase *c) {
    embedding_backward(OP_DW(0), OP_DY, c->index, c->d[0], c->d[2]);
}
static OpCost embedding_cost(const OpCase *c, bool backward) {
    int N = c->d[0], C = c->d[2];
    if (!backward) return op_cost(embedding_forward_bytes(N, C), 0, 0);
    return op_cost(embedding_backward_bytes(N, C, op_distinct(c)), 0, embedding_workspace_bytes(N));
}

// --- rmsnorm: x (N,C), weight (C); y (N,C), rstd (N) ---

static void rmsnorm_setup(OpCase *c) {
    int N = c->d[0], C = c->d[1];
    op_rows(&c->x[0], "x", N, C, C)->adds = c->d[3] != 0;
    c->x[0].spread = 3.0 / c->d[2];
    op_rows(&c->y[0], "y", N, C, C);
    op_error(&c->y[0], error_of_sum(C) + 4, 0);
    op_statistics(&c->y[1], "rstd", N, 1, error_of_sum(C), 0);
    c->y[1].low = 0.5, c->y[1].high = 1.5;
    const double z = 3 * 1.5, g = 2; // largest |x rstd| and |dy weight|
    op_error(&c->dx[0], 4, 1.5 * (4 * g + z * z * g * error_of_sum(C) / sqrt((double)C)));
    op_error(op_parameter(c, 1, "weight", 1, C, 2), 4, z * error_of_sum(N));
    c->length = max_int(N, C), c->max_of_y = c->max_of_dx = true;
}
static void rmsnorm_reference(OpCase *c) {
    for (int n = 0, C = c->d[1]; n < c->d[0]; n++) {
        const double *x = c->x->ref + n * C;
        double mean = 0, *y = c->y->ref + n * C;
        for (int i = 0; i < C; i++) mean += x[i] * x[i] / C;
        c->y[1].ref[n] = 1 / sqrt(mean + OP_EPS);
        for (int i = 0; i < C; i++) y[i] = x[i] * c->y[1].ref[n] * c->x[1].ref[i];
    }
}
static void rmsnorm_call(const OpCase *c) {
    const int *d = c->d;
    rmsnorm_forward(OP_MEASURED_Y, OP_STAT(1), OP_X(0), OP_X(1), d[0], d[1], (real)OP_EPS);
}
static void rmsnorm_call_backward(const OpCase *c) {
    const int *d = c->d;
    rmsnorm_backward(OP_MEASURED_DX, OP_DW(1), OP_DY, OP_X(0), OP_X(1), OP_STAT(1), d[0], d[1], d[3] != 0);
}
static OpCost rmsnorm_cost(const OpCase *c, bool backward) {
    int N = c->d[0], C = c->d[1];
    if (!backward) return op_cost(rmsnorm_forward_bytes(N, C), 0, 0);
    return op_cost(rmsnorm_backward_bytes(N, C), 0, rmsnorm_workspace_bytes(C));
}

// --- residual_rmsnorm: a and b (N,C), weight (C); y[0] y and y[1] the sum (N,C), y[2] rstd (N) ---

static void residual_rmsnorm_setup(OpCase *c) {
    int N = c->d[0], C = c->d[1];
    op_rows(&c->x[0], "a", N, C, C);
    op_rows(&c->x[1], "b", N, C, C);
    op_rows(&c->x[2], "weight", 1, C, C);
    op_rows(&c->y[0], "y", N, C, C);
    op_rows(&c->y[1], "sum", N, C, C);
    op_statistics(&c->y[2], "rstd", N, 1, error_of_sum(C), 0);
    op_error(&c->y[0], error_of_sum(C) + 4, 0);
    c->integers = 60; // sums are exact in bf16, so that the norm is of the stored sum
    c->length = C, c->max_of_y = true;
}
static void residual_rmsnorm_reference(OpCase *c) {
    for (int n = 0, C = c->d[1]; n < c->d[0]; n++) {
        double mean = 0, *sum = c->y[1].ref + n * C;
        for (int i = 0; i < C; i++)
            sum[i] = c->x[0].ref[n * C + i] + c->x[1].ref[n * C + i], mean += sum[i] * sum[i] / C;
        c->y[2].ref[n] = 1 / sqrt(mean + OP_EPS);
        for (int i = 0; i < C; i++) c->y->ref[n * C + i] = sum[i] * c->y[2].ref[n] * c->x[2].ref[i];
    }
}
static void residual_rmsnorm_call(const OpCase *c) {
    residual_rmsnorm_forward(OP_Y(1), OP_MEASURED_Y, OP_STAT(2), OP_X(0), OP_X(1), OP_X(2), c->d[0], c->d[1],
                             (real)OP_EPS);
}
static OpCost residual_rmsnorm_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(residual_rmsnorm_forward_bytes(c->d[0], c->d[1]), 0, 0);
}

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

// --- rope: x and y (N,heads,D) with row stride ldx, table (positions,D) ---

static void rope_setup(OpCase *c) {
    const int *d = c->d;
    op_view(&c->x[0], "x", 0, d[0] * d[1], d[2], d[3], d[4], d[3]);
    op_view(&c->y[0], "y", 0, d[0] * d[1], d[2], d[3], d[4], d[3]);
    op_statistics(&c->x[1], "table", d[5] + d[1], d[3], 0, 0);
    c->x[1].constant = true;
    op_index(c, d[0], d[5] + 1); // the first positions of the sequences
    op_error(&c->y[0], 0, 4);
    op_error(&c->dx[0], 0, 4);
    c->length = 2, c->in_place = 1;
}
static void rope_reference(OpCase *c) {
    for (size_t i = 0; i < op_size(c->y->view); i++) {
        size_t at = op_at(c->y->view, i), D = (size_t)c->d[3], T = (size_t)c->d[1], pairs = D / 2;
        size_t n = i / D / (size_t)c->d[2], t = (size_t)c->index[n / T] + n % T;
        double angle = (double)t * pow(OP_THETA, -2.0 * (double)(i % pairs) / (double)D);
        const double *x = c->x->ref + at;
        c->y->ref[at] =
            i % D < pairs ? cos(angle) * x[0] - sin(angle) * x[pairs] : cos(angle) * x[0] + sin(angle) * *(x - pairs);
    }
}
static void rope_call(const OpCase *c) {
    const int *d = c->d;
    rope_forward(OP_Y(0), OP_REAL(1), d[0], d[1], d[2], d[3], d[4], d[3], c->index);
}
static void rope_call_backward(const OpCase *c) {
    const int *d = c->d;
    rope_backward(OP_DX(0), OP_REAL(1), d[0], d[1], d[2], d[3], d[4], d[3], c->index);
}
static OpCost rope_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(rope_bytes(product(c->d[0], c->d[1]), c->d[2], c->d[3]), 0, 0);
}
// Its table, which the engines let both twins read.
static inline void op_rope_table(real *table, const OpCase *c) {
    rope_table(table, c->d[5] + c->d[1], c->d[3], OP_THETA);
}

// --- diff_combine: a (N,NQ,D), l (N,NH) with row stride ldl, y (N,NH,D); blocks of signal heads, then noise heads ---

static void diff_combine_setup(OpCase *c) {
    int N = c->d[0], NH = c->d[1], D = c->d[2], NQ = NH + NH / c->d[4] * c->d[5], shared = c->d[4] / c->d[5];
    op_rows(&c->x[0], "a", N, NQ * D, NQ * D);
    op_rows(&c->x[1], "l", N, NH, c->d[3]);
    c->x[1].spread = 6;
    op_rows(&c->y[0], "o", N, NH * D, NH * D);
    op_error(&c->y[0], 0, 16);
    // of a noise head: a sum of terms up to the largest factor
    op_error(&c->dx[0], 16, shared > 1 ? 16 * shared * (c->d[6] == S_LINEAR ? c->x[1].spread : 1) : 0);
    op_error(&c->dx[1], 16, error_of_sum(D));
    c->length = D, c->exact = c->d[6] == S_LINEAR;
    c->max_of_y = true;
}
static void diff_combine_reference(OpCase *c) {
    int NH = c->d[1], D = c->d[2], signals = c->d[4], noise = c->d[5], NQ = NH + NH / signals * noise;
    for (int i = 0; i < c->d[0] * NH * D; i++) {
        int n = i / D / NH, h = i / D % NH, block = h / signals * (signals + noise);
        const double *a = c->x[0].ref + n * NQ * D + i % D;
        double l = c->x[1].ref[n * c->d[3] + h];
        double s = c->d[6] == S_SIGMOID ? 1 / (1 + exp(-l)) : l;
        int h1 = block + h % signals, h2 = block + signals + h % signals * noise / signals;
        c->y->ref[i] = a[h1 * D] - a[h2 * D] * s;
    }
}
static HeadGroups diff_combine_groups(const OpCase *c) {
    HeadGroups g = {c->d[4], c->d[5]};
    return g;
}
static void diff_combine_call(const OpCase *c) {
    const int *d = c->d;
    diff_combine_forward(OP_MEASURED_Y, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], diff_combine_groups(c), (Factor)d[6]);
}
static void diff_combine_call_backward(const OpCase *c) {
    const int *d = c->d;
    diff_combine_backward(OP_DX(0), OP_DX(1), OP_DY, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], diff_combine_groups(c),
                          (Factor)d[6]);
}
static OpCost diff_combine_cost(const OpCase *c, bool backward) {
    int N = c->d[0], NH = c->d[1], D = c->d[2], NQ = NH + NH / c->d[4] * c->d[5];
    return op_cost((backward ? diff_combine_backward_bytes : diff_combine_forward_bytes)(N, NQ, NH, D), 0, 0);
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

// --- scale_inplace: x and y (count) ---

static double op_factor(const OpCase *c) { return (double)(float)(c->d[1] / 10.0); } // the same in both types
static void scale_setup(OpCase *c) {
    op_rows(&c->x[0], "x", 1, c->d[0], c->d[0]);
    op_rows(&c->y[0], "y", 1, c->d[0], c->d[0]);
    c->in_place = 1;
}
static void scale_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) c->y->ref[i] = c->x->ref[i] * op_factor(c);
}
static void scale_call(const OpCase *c) { scale_inplace(OP_Y(0), (real)op_factor(c), (size_t)c->d[0]); }
static void scale_call_backward(const OpCase *c) { scale_inplace(OP_DX(0), (real)op_factor(c), (size_t)c->d[0]); }
static OpCost scale_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(scale_bytes(c->d[0]), 0, 0);
}

// --- accumulate: x and y[0] (count), y[1] the running sum ---

static void accumulate_setup(OpCase *c) {
    op_rows(&c->x[0], "x", 1, c->d[0], c->d[0]);
    op_rows(&c->y[0], "x", 1, c->d[0], c->d[0]);
    op_error(&c->y[0], 1, 0);
    op_statistics(&c->y[1], "sum", 1, c->d[0], 0, 0);
    c->y[1].view->adds = c->d[1] != 0;
    c->in_place = 1, c->no_backward = true;
}
static void accumulate_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) {
        c->y[1].ref[i] = c->x->ref[i];
        c->y[0].ref[i] = c->x->ref[i] + (c->d[1] ? op_start((size_t)i) : 0);
    }
}
static void accumulate_call(const OpCase *c) { accumulate(OP_STAT(1), OP_Y(0), (size_t)c->d[0], c->d[1] != 0); }
static OpCost accumulate_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(accumulate_bytes(c->d[0], c->d[1] != 0), 0, 0);
}

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

// --- head_norm: x and y[0] (N,heads,D) with row stride ld, weight (D), y[1] x before, with row stride ldk, or none ---

static void head_norm_setup(OpCase *c) {
    int N = c->d[0], heads = c->d[1], D = c->d[2], ld = c->d[3], ldk = c->d[4];
    op_view(&c->x[0], "x", 0, N, heads, D, ld, D);
    c->x[0].spread = 1.0 / c->d[5];
    op_view(&c->y[0], "y", 0, N, heads, D, ld, D);
    if (ldk) op_view(&c->y[1], "kept", 0, N, heads, D, ldk, D);
    op_error(&c->y[0], error_of_sum(D) + 4, 0);
    // largest |x r|, r and |dy weight|: the root mean square of x is at least a quarter of the spread
    const double z = fmin(sqrt((double)D), 4), r = fmin(4 * c->d[5], 1 / sqrt(OP_EPS)), g = 2;
    op_error(&c->dx[0], 4 + error_of_sum(D), r * (4 * g + z * z * g * error_of_sum(D) / sqrt((double)D)));
    op_error(op_parameter(c, 1, "weight", 1, D, 2), 4, z * (error_of_sum(N * heads) + error_of_sum(D)));
    c->length = max_int(N * heads, D);
    c->in_place = 1, c->no_backward = ldk == 0;
}
static void head_norm_reference(OpCase *c) {
    int heads = c->d[1], D = c->d[2];
    for (int i = 0; i < c->d[0] * heads; i++) {
        size_t at = op_at(c->y->view, (size_t)(i * D));
        const double *x = c->x->ref + at;
        double mean = 0;
        for (int k = 0; k < D; k++) mean += x[k] * x[k] / D;
        for (int k = 0; k < D; k++) c->y->ref[at + (size_t)k] = x[k] / sqrt(mean + OP_EPS) * c->x[1].ref[k];
        for (int k = 0; k < D && c->y[1].views; k++) c->y[1].ref[op_at(c->y[1].view, (size_t)(i * D + k))] = x[k];
    }
}
static void head_norm_call(const OpCase *c) {
    const int *d = c->d;
    head_norm_forward(OP_Y(0), d[4] ? OP_Y(1) : NULL, OP_X(1), d[0], d[1], d[2], d[3], d[4], (real)OP_EPS);
}
static void head_norm_call_backward(const OpCase *c) {
    const int *d = c->d;
    head_norm_backward(OP_DX(0), OP_DW(1), OP_Y(1), OP_X(1), d[0], d[1], d[2], d[3], d[4], (real)OP_EPS);
}
static OpCost head_norm_cost(const OpCase *c, bool backward) {
    const int *d = c->d;
    if (!backward) return op_cost(head_norm_forward_bytes(d[0], d[1], d[2], d[4] != 0), 0, 0);
    return op_cost(head_norm_backward_bytes(d[0], d[1], d[2]), 0, head_norm_workspace_bytes(d[2]));
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

// --- cross_entropy: x logits (N,V) with row stride Vp, y losses (N), which are added to ---

static void cross_entropy_setup(OpCase *c) {
    int N = c->d[0], V = c->d[1];
    op_index(c, N, V);
    op_rows(&c->x[0], "logits", N, V, c->d[2]);
    c->x[0].spread = 8;
    op_statistics(&c->y[0], "losses", N, 1, 4, 4 + error_of_sum(V));
    c->y[0].view->adds = true;
    op_statistics(&c->y[1], "log_z", N, 1, 4, 4 + error_of_sum(V));
    c->length = V, c->dloss = 0.375;
    // the exponent's own rounding, and the difference to 1 at the target
    op_error(&c->dx[0], 16 + 16 + error_of_sum(V), 2 * c->dloss * error_of_sum(V) / 4);
}
static double cross_entropy_z_loss(const OpCase *c) { return c->d[4] ? 0.0625 : 0; }
static void cross_entropy_reference(OpCase *c) {
    c->loss = 0;
    for (int n = 0; n < c->d[0]; n++) {
        const double *x = c->x->ref + n * c->d[2];
        double sum = 0;
        for (int v = 0; v < c->d[1]; v++) sum += exp(x[v]);
        c->y[1].ref[n] = log(sum);
        c->y->ref[n] = log(sum) - x[c->index[n]];
        c->loss += c->dloss * cross_entropy_z_loss(c) * log(sum) * log(sum);
    }
}
static void cross_entropy_call(const OpCase *c) {
    cross_entropy(OP_STAT(0), OP_STAT(1), OP_X(0), c->index, c->d[0], c->d[1], c->d[2], 0, 0);
}
static void cross_entropy_call_backward(const OpCase *c) {
    cross_entropy(OP_STAT(0), OP_STAT(1), OP_DX(0), c->index, c->d[0], c->d[1], c->d[2], (real)c->dloss,
                  (real)cross_entropy_z_loss(c));
}
static OpCost cross_entropy_cost(const OpCase *c, bool backward) {
    return op_cost(cross_entropy_bytes(c->d[0], c->d[1], c->d[2], backward), 0, 0);
}
