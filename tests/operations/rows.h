/*
rows.h: operations on rows: a case file of operations/catalogue.h.
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

// --- add_to_sum: x and y[0] (count), y[1] the running sum ---

static void add_to_sum_setup(OpCase *c) {
    op_rows(&c->x[0], "x", 1, c->d[0], c->d[0]);
    op_rows(&c->y[0], "x", 1, c->d[0], c->d[0]);
    op_error(&c->y[0], 1, 0);
    op_statistics(&c->y[1], "sum", 1, c->d[0], 0, 0);
    c->y[1].view->adds = c->d[1] != 0;
    c->in_place = 1, c->no_backward = true;
}
static void add_to_sum_reference(OpCase *c) {
    for (int i = 0; i < c->d[0]; i++) {
        c->y[1].ref[i] = c->x->ref[i];
        c->y[0].ref[i] = c->x->ref[i] + (c->d[1] ? op_start((size_t)i) : 0);
    }
}
static void add_to_sum_call(const OpCase *c) { add_to_sum(OP_STAT(1), OP_Y(0), (size_t)c->d[0], c->d[1] != 0); }
static OpCost add_to_sum_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(add_to_sum_bytes(c->d[0], c->d[1] != 0), 0, 0);
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

// --- cases ---

static const OpKind rows_kinds[] = {
    {OP_EMBEDDING, "embedding", "N V C", OP_BOTH_WAYS(embedding), embedding_cost},
    {OP_RMSNORM, "rmsnorm", "N C 1/scale add", OP_BOTH_WAYS(rmsnorm), rmsnorm_cost},
    {OP_RESIDUAL_RMSNORM, "residual_rmsnorm", "N C", OP_FORWARD(residual_rmsnorm), residual_rmsnorm_cost},
    {OP_HEAD_NORM, "head_norm", "N heads D ld ldk,NULL=0 1/scale", OP_BOTH_WAYS(head_norm), head_norm_cost},
    {OP_CROSS_ENTROPY, "cross_entropy", "N V Vp special z", OP_BOTH_WAYS(cross_entropy), cross_entropy_cost},
    {OP_ADD_TO_SUM, "add_to_sum", "count add", OP_FORWARD(add_to_sum), add_to_sum_cost},
    {OP_SCALE, "scale_inplace", "count 10*factor", OP_BOTH_WAYS(scale), scale_cost},
};
static const OpRow rows_cases[] = {
    {OP_EMBEDDING, {1, 1, 1}, BOTH, "the smallest"},
    {OP_EMBEDDING, {129, 3, 37}, BOTH, "few tokens, each many times; C is one block of columns and a remainder"},
    {OP_EMBEDDING, {7, 257, 64}, BOTH, "packs; most rows are not used: their gradient does not change"},
    {OP_EMBEDDING, {13, 5, 100}, BOTH, "C is no multiple of 16, 32 or 64"},
    {OP_EMBEDDING, {70, 11, 16}, BOTH, "packs, repeated tokens"},
    {OP_EMBEDDING, {2500, 70000, 5}, BOTH, "three warps of the sort, tokens of three digits"},
    {OP_EMBEDDING, {1100, 259, 8}, BOTH, "V % 8 = 3, two warps"},
    {OP_EMBEDDING, {5130, 300, 8}, BOTH, "more counts than threads that add them"},
    {OP_EMBEDDING, {200, 1, 2568}, BOTH, "two blocks of columns and part of a third, more rows than threads"},
    {OP_EMBEDDING, {5, 2, 300}, BOTH, "two blocks of columns without packs"},

    {OP_RMSNORM, {1, 1, 200, 1}, BOTH, "one element: without eps its gradient would vanish"},
    {OP_RMSNORM, {1, 1, 1, 1}, CUDA_ONLY, "the smallest; its gradient vanishes but for eps"},
    {OP_RMSNORM, {7, 64, 1, 0}, BOTH, "exactly one block of columns; packs"},
    {OP_RMSNORM, {13, 130, 1, 1}, BOTH, "C is two blocks of 64 and a remainder of 2"},
    {OP_RMSNORM, {3, 37, 200, 0}, BOTH, "rows so small that eps is as large as they are"},
    {OP_RMSNORM, {129, 100, 1, 1}, BOTH, "C is no multiple of 16; many rows for dweight"},
    {OP_RMSNORM, {7, 64, 1, 1}, BOTH, "packs, dx is added to"},
    {OP_RMSNORM, {130, 19, 1, 1}, BOTH, "no packs, more rows than a block"},
    {OP_RMSNORM, {3, 1096, 1, 1}, BOTH, "a row of several packs per lane, not evenly"},
    {OP_RMSNORM, {33, 8, 1, 1}, BOTH, "heads of width 8: several rows per warp"},
    {OP_RMSNORM, {140, 768, 1, 1}, BOTH, "several warps per row, several rows at once, in turns"},
    {OP_RMSNORM, {2100, 8, 1, 1}, BOTH, "more rows than parts, heads of width 8"},
    {OP_RMSNORM, {3, 4104, 1, 1}, BOTH, "more packs than threads in fp32"},
    {OP_RMSNORM, {3, 12304, 1, 1}, BOTH, "more packs than threads"},
    {OP_RMSNORM, {65, 12296, 1, 1}, BOTH, "the same, and more rows than parts"},
    {OP_RMSNORM, {5, 19, 1, 0}, BOTH, "dx is overwritten, no packs"},

    {OP_RESIDUAL_RMSNORM, {1, 1}, BOTH, "the smallest"},
    {OP_RESIDUAL_RMSNORM, {7, 64}, BOTH, "packs"},
    {OP_RESIDUAL_RMSNORM, {13, 130}, BOTH, "C is two blocks of 64 and a remainder of 2"},
    {OP_RESIDUAL_RMSNORM, {129, 100}, BOTH, "C is no multiple of 16"},
    {OP_RESIDUAL_RMSNORM, {13, 19}, BOTH, "no packs"},
    {OP_RESIDUAL_RMSNORM, {5, 328}, BOTH, "a row of several packs"},

    {OP_HEAD_NORM, {1, 1, 1, 1, 1, 200}, BOTH, "one element: without eps its gradient would vanish"},
    {OP_HEAD_NORM, {7, 3, 8, 64, 24, 1}, BOTH, "packs, in rows padded to 64, kept without padding"},
    {OP_HEAD_NORM, {7, 3, 8, 64, 0, 1}, BOTH, "the same, nothing kept"},
    {OP_HEAD_NORM, {13, 6, 4, 29, 31, 1}, BOTH, "the narrowest heads; no packs"},
    {OP_HEAD_NORM, {9, 4, 40, 192, 320, 1}, BOTH, "D is no multiple of 16; kept beside the keys"},
    {OP_HEAD_NORM, {5, 2, 12, 40, 24, 1}, BOTH, "packs of fp32 but not of bf16"},
    {OP_HEAD_NORM, {3, 2, 256, 576, 512, 1}, BOTH, "the widest head"},
    {OP_HEAD_NORM, {5, 3, 128, 403, 385, 1}, BOTH, "unaligned rows"},
    {OP_HEAD_NORM, {33, 1, 75, 80, 75, 100}, BOTH, "rows so small that eps matters; three elements per lane"},
    {OP_HEAD_NORM, {9, 2, 96, 192, 192, 1}, BOTH, "D = 96: lanes without a pack"},
    {OP_HEAD_NORM, {700, 3, 16, 48, 48, 1}, BOTH, "more heads than parts, in several turns of a block"},
    {OP_HEAD_NORM, {300, 2, 10, 20, 20, 1}, BOTH, "the same without packs"},

    {OP_CROSS_ENTROPY, {1, 1, 64}, BOTH, "one class: loss 0, gradient 0"},
    {OP_CROSS_ENTROPY, {7, 3, 64}, BOTH, "mostly padding"},
    {OP_CROSS_ENTROPY, {13, 257, 320}, BOTH, "bytes and a separator, padded to a multiple of 64"},
    {OP_CROSS_ENTROPY, {67, 100, 100}, BOTH, "no padding"},
    {OP_CROSS_ENTROPY, {13, 257, 320, 0, 1}, BOTH, "with a z-loss"},
    {OP_CROSS_ENTROPY, {5, 256, 256}, BOTH, "whole packs"},
    {OP_CROSS_ENTROPY, {5, 259, 320, 1}, BOTH, "V % 8 = 3; rows with a certain target, -inf, NaN and +inf"},
    {OP_CROSS_ENTROPY, {3, 5003, 5056}, BOTH, "a large vocabulary"},
    {OP_CROSS_ENTROPY, {3, 603, 704}, BOTH, "more packs, and more padding, than threads"},
    {OP_CROSS_ENTROPY, {4, 3, 3, 1}, BOTH, "tiny V, unaligned rows"},
    {OP_CROSS_ENTROPY, {2, 1027, 1088}, BOTH, "packs and a remainder of 3"},

    {OP_ADD_TO_SUM, {1, 0}, BOTH, "the smallest, the first layer"},
    {OP_ADD_TO_SUM, {1, 1}, BOTH, "the smallest, a later layer"},
    {OP_ADD_TO_SUM, {4999, 0}, BOTH, "packs, the last block of them partial, and a remainder of 7"},
    {OP_ADD_TO_SUM, {4999, 1}, BOTH, "the same, added"},
    {OP_ADD_TO_SUM, {4096, 1}, BOTH, "whole packs"},

    {OP_SCALE, {1, 8}, BOTH, "the smallest; 1 - lambda_init of the first layer"},
    {OP_SCALE, {13, -3}, BOTH, "less than a vector"},
    {OP_SCALE, {67, 0}, BOTH, "everything becomes 0"},
    {OP_SCALE, {4096, 8}, BOTH, "whole packs"},
    {OP_SCALE, {4999, 2}, BOTH, "packs, the last block of them partial, and a remainder of 7; a late layer"},
};
static inline int rows_sizes(OpSize *list, const OpModel *m) {
    const int N = m->B * m->T, rows = min_int(m->B * m->T, m->logit_rows);
    const double L = m->L, chunks = (double)m->B * m->T / min_int(m->B * m->T, m->logit_rows);
    const OpSize sizes[] = {
        {OP_EMBEDDING, "", {N, m->V, m->C}, {1, 1}},
        {OP_RMSNORM, "", {N, m->C, 1, 1}, {1, 2 * L + 1}},
        {OP_RESIDUAL_RMSNORM, "", {N, m->C}, {2 * L, 0}},
        {OP_HEAD_NORM, "query heads", {N, m->NQ, m->QD, m->ld, m->NQ * m->QD, 1}, {0, 0}},
        {OP_CROSS_ENTROPY, "", {rows, m->V, m->Vp}, {0, chunks}},
        {OP_SCALE, "", {N * m->C, -10}, {0, -1}},
    };
    memcpy(list, sizes, sizeof(sizes));
    return OP_COUNT(sizes);
}
