/*
optimizer.h: updates of parameters: a case file of operations/catalogue.h.
*/

// --- adamw_update: params (rows,width), master or none, m, v in place; gradients ---

static void adamw_setup(OpCase *c) {
    static const char *const names[] = {"params", "master", "m", "v", "grads"};
    const AdamwNumbers *a = &adamw_numbers[c->d[4]];
    const int step = c->d[3];
    for (int i = 0; i < 5; i++) {
        if (i == 1 && !c->d[2]) continue;
        op_rows(&c->x[i], names[i], c->d[0], c->d[1], c->d[1]);
        c->x[i].type = i ? FP32 : STORED;
        if (i == 4) break;
        op_rows(&c->y[i], names[i], c->d[0], c->d[1], c->d[1]);
        c->y[i].type = c->x[i].type;
    }
    c->x[3].low = 0.01, c->x[3].high = 1;
    c->in_place = 4;
    // of m / sqrt(v) in an update
    double ratio = a->lr / (1 - pow(a->beta1, step)) * sqrt(1 - pow(a->beta2, step));
    double most = (a->beta1 + (1 - a->beta1) * a->grad_scale) / sqrt(a->beta2 * c->x[3].low);
    op_error(&c->y[0], 4, 16 * ratio * most);
    op_error(&c->y[1], 4, 16 * ratio * most);
    op_error(&c->y[2], 2, 4);
    op_error(&c->y[3], 2, 4);
}
static void adamw_reference(OpCase *c) {
    const AdamwNumbers *a = &adamw_numbers[c->d[4]];
    const int step = c->d[3];
    for (size_t i = 0; i < c->x[0].count; i++) {
        double g = a->grad_scale * c->x[4].ref[i], m = a->beta1 * c->x[2].ref[i] + (1 - a->beta1) * g,
               v = a->beta2 * c->x[3].ref[i] + (1 - a->beta2) * g * g, w = c->x[c->d[2] ? 1 : 0].ref[i];
        w -= a->lr *
             (m / (1 - pow(a->beta1, step)) / (sqrt(v / (1 - pow(a->beta2, step))) + a->eps) + a->weight_decay * w);
        c->y[0].ref[i] = w, c->y[2].ref[i] = m, c->y[3].ref[i] = v;
        if (c->d[2]) c->y[1].ref[i] = w;
    }
}
static void adamw_call(const OpCase *c) {
    const AdamwNumbers *a = &adamw_numbers[c->d[4]];
    adamw_update(OP_Y(0), c->d[2] ? OP_STAT(1) : NULL, (const grad_t *)c->x[4].data, OP_STAT(2), OP_STAT(3),
                 product(c->d[0], c->d[1]), a->grad_scale, a->lr, a->beta1, a->beta2, a->eps, a->weight_decay, c->d[3]);
}
static OpCost adamw_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(adamw_bytes(product(c->d[0], c->d[1]), c->d[2] != 0), 0, 0);
}

// --- muon_direction: direction, m in place; gradients (count) ---

static void muon_direction_setup(OpCase *c) {
    static const char *const names[] = {"direction", "m", "grads"};
    for (int i = 0; i < 3; i++) {
        op_rows(&c->x[i], names[i], 1, c->d[0], c->d[0]);
        c->x[i].type = i ? FP32 : STORED;
        if (i == 2) break;
        op_rows(&c->y[i], names[i], 1, c->d[0], c->d[0]);
        c->y[i].type = c->x[i].type;
        op_error(&c->y[i], 6, 6);
    }
    c->in_place = 2; // the direction is overwritten
}
static void muon_direction_reference(OpCase *c) {
    for (size_t i = 0; i < c->x[0].count; i++) {
        double g = 0.05 * 0.37 * c->x[2].ref[i], m = 0.95 * c->x[1].ref[i] + g;
        c->y[1].ref[i] = m, c->y[0].ref[i] = 0.95 * m + g;
    }
}
static void muon_direction_call(const OpCase *c) {
    muon_direction(OP_Y(0), OP_STAT(1), (const grad_t *)c->x[2].data, (size_t)c->d[0], 0.37, 0.95);
}
static OpCost muon_direction_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(muon_direction_bytes((size_t)c->d[0]), 0, 0);
}

// --- muon_orthogonalize: step, v in place; the direction. A row of the views is a matrix, and a gap follows it ---

static MuonMatrices muon_matrices_of(const OpCase *c) {
    return (MuonMatrices){c->d[0], c->d[1], max_int(1, c->d[3]), product(c->d[0], c->d[1]) + 7};
}
static void muon_orthogonalize_setup(OpCase *c) {
    const MuonMatrices m = muon_matrices_of(c);
    const int rows = m.rows, columns = m.columns, size = rows * columns, apart = (int)m.apart;
    op_rows(&c->x[0], "step", m.count, size, apart);
    if (c->d[2]) op_rows(&c->x[1], "second", m.count, rows, rows);
    op_rows(&c->x[2], "direction", m.count, size, apart);
    op_rows(&c->y[0], "step", m.count, size, apart);
    if (c->d[2]) op_rows(&c->y[1], "second", m.count, rows, rows);
    c->x[0].type = c->x[1].type = c->y[0].type = c->y[1].type = FP32;
    c->x[1].low = 0.5 / columns, c->x[1].high = 2.0 / columns;
    c->in_place = 2;
    c->length = 1e5; // singular values that are small beside the largest grow 3.4^5 times, and so do their errors
    c->threads_change_sums = true;
    const double most = max_int(rows, columns), k = min_int(rows, columns);
    op_error(&c->y[0], 0, 64 * sqrt(most));
    op_error(&c->y[1], 0, 64.0 / columns);
    c->y[0].rounded_terms = k > 1 ? 12 : 2; // of elements whose root mean square is 0.2: rounded in 15 products
    c->y[1].rounded_terms = 1.0 / columns;
}
static void muon_orthogonalize_reference_of(OpCase *c, size_t matrix) {
    const int m = c->d[0], n = c->d[1];
    const size_t size = product(m, n), first = matrix * muon_matrices_of(c).apart, first_row = matrix * (size_t)m;
    double *X = (double *)checked_calloc(2 * size + 2 * product(m, m), sizeof(double)), *next = X + size,
           *A = next + size, *P = A + product(m, m);
    double norm = 0, factor = 0.2 * sqrt(max_int(m, n));
    for (size_t e = 0; e < size; e++) {
        X[e] = c->x[2].ref[first + e];
        norm += X[e] * X[e];
    }
    for (size_t e = 0; e < size; e++) X[e] /= fmax(sqrt(norm), 1e-7);
    for (int step = 0; step < 5; step++) { // always by A = X X^T: the tall form is the same polynomial
        for (int a = 0; a < m; a++)
            for (int b = 0; b < m; b++) {
                A[a * m + b] = 0;
                for (int k = 0; k < n; k++) A[a * m + b] += X[a * n + k] * X[b * n + k];
            }
        for (int a = 0; a < m; a++)
            for (int b = 0; b < m; b++) {
                P[a * m + b] = -4.7750 * A[a * m + b] + (a == b ? 3.4445 : 0);
                for (int k = 0; k < m; k++) P[a * m + b] += 2.0315 * A[a * m + k] * A[k * m + b];
            }
        for (int a = 0; a < m; a++)
            for (int b = 0; b < n; b++) {
                next[a * n + b] = 0;
                for (int k = 0; k < m; k++) next[a * n + b] += P[a * m + k] * X[k * n + b];
            }
        memcpy(X, next, size * sizeof(double));
    }
    for (int a = 0; a < m && c->d[2]; a++) { // NorMuon
        double mean = 0, *v = &c->y[1].ref[first_row + a];
        for (int k = 0; k < n; k++) mean += X[a * n + k] * X[a * n + k] / n;
        *v = 0.95 * c->x[1].ref[first_row + a] + 0.05 * mean;
        for (int k = 0; k < n; k++) X[a * n + k] /= sqrt(*v) + 1e-10;
    }
    norm = 0;
    for (size_t e = 0; e < size; e++) norm += X[e] * X[e];
    if (c->d[2]) factor = 0.2 * sqrt((double)size) / fmax(sqrt(norm), 1e-7);
    for (size_t e = 0; e < size; e++) c->y[0].ref[first + e] = factor * X[e];
    free(X);
}
static void muon_orthogonalize_reference(OpCase *c) {
    for (int i = 0; i < muon_matrices_of(c).count; i++) muon_orthogonalize_reference_of(c, (size_t)i);
}
static void muon_orthogonalize_call(const OpCase *c) {
    muon_orthogonalize((grad_t *)c->y[0].data, c->d[2] ? OP_STAT(1) : NULL, OP_X(2), muon_matrices_of(c), 0.95);
}
static OpCost muon_orthogonalize_cost(const OpCase *c, bool backward) {
    (void)backward;
    const MuonMatrices m = muon_matrices_of(c);
    return op_cost((size_t)m.count * muon_orthogonalize_bytes(m.rows, m.columns),
                   m.count * muon_flops(m.rows, m.columns), muon_workspace_bytes(m));
}

// --- muon_update: params, master or none in place; the step (count) ---

static void muon_update_setup(OpCase *c) {
    static const char *const names[] = {"params", "master", "step"};
    for (int i = 0; i < 3; i++) {
        if (i == 1 && !c->d[1]) continue;
        op_rows(&c->x[i], names[i], 1, c->d[0], c->d[0]);
        c->x[i].type = i ? FP32 : STORED;
        if (i == 2) break;
        op_rows(&c->y[i], names[i], 1, c->d[0], c->d[0]);
        c->y[i].type = c->x[i].type;
        op_error(&c->y[i], 4, 1);
    }
    c->in_place = 2;
}
static void muon_update_reference(OpCase *c) {
    for (size_t i = 0; i < c->x[0].count; i++) {
        double w = (1 - 0.3 * 0.1) * c->x[c->d[1] ? 1 : 0].ref[i] - 0.3 * c->x[2].ref[i];
        c->y[0].ref[i] = w;
        if (c->d[1]) c->y[1].ref[i] = w;
    }
}
static void muon_update_call(const OpCase *c) {
    muon_update(OP_Y(0), c->d[1] ? OP_STAT(1) : NULL, (const grad_t *)c->x[2].data, (size_t)c->d[0], 0.3, 0.1);
}
static OpCost muon_update_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(muon_update_bytes((size_t)c->d[0], c->d[1] != 0), 0, 0);
}

// --- cases ---

static const OpKind optimizer_kinds[] = {
    {OP_ADAMW, "adamw_update", "rows width master step numbers", OP_FORWARD(adamw), adamw_cost},
    {OP_MUON_DIRECTION, "muon_direction", "count", OP_FORWARD(muon_direction), muon_direction_cost},
    {OP_MUON_ORTHOGONALIZE, "muon_orthogonalize", "rows columns normuon matrices", OP_FORWARD(muon_orthogonalize),
     muon_orthogonalize_cost},
    {OP_MUON_UPDATE, "muon_update", "count master", OP_FORWARD(muon_update), muon_update_cost},
};
static const OpRow optimizer_cases[] = {
    {OP_ADAMW, {1, 1, 0, 1, 1}, BOTH, "a single element"},
    {OP_ADAMW, {1, 257, 0, 5, 2}, BOTH, "no multiple of a vector, no master weights"},
    {OP_ADAMW, {1, 67, 0, 2, 3}, BOTH, "a large eps"},
    {OP_ADAMW, {1, 4099, 0, 1, 4}, BOTH, "no momentum"},
    {OP_ADAMW, {1, 77, 1, 3, 0}, BOTH, "master weights: the parameters become their copies"},
    {OP_ADAMW, {1, 4096, 1, 1, 0}, BOTH, "master weights, the first step"},
    {OP_ADAMW, {1, 2603, 1, 7, 0}, BOTH, "packs, the last block of them partial, and a remainder of 3"},
    {OP_ADAMW, {1, 515, 1, 100, 0}, BOTH, "less than a block"},
    {OP_ADAMW, {1, 1003, 0, 7, 0}, BOTH, "no master weights"},

    {OP_MUON_DIRECTION, {1}, BOTH, "a single element"},
    {OP_MUON_DIRECTION, {2603}, BOTH, "packs and a remainder of 3"},

    {OP_MUON_ORTHOGONALIZE, {1, 1, 0}, BOTH, "a single element"},
    {OP_MUON_ORTHOGONALIZE, {1, 40, 1}, BOTH, "1 x n"},
    {OP_MUON_ORTHOGONALIZE, {37, 1, 0}, BOTH, "n x 1"},
    {OP_MUON_ORTHOGONALIZE, {16, 72, 0}, BOTH, "wide"},
    {OP_MUON_ORTHOGONALIZE, {91, 17, 1}, BOTH, "tall, nothing aligned; NorMuon"},
    {OP_MUON_ORTHOGONALIZE, {300, 40, 1}, BOTH, "more rows than threads of a block"},
    {OP_MUON_ORTHOGONALIZE, {24, 50, 0, 5}, BOTH, "five matrices together, wide"},
    {OP_MUON_ORTHOGONALIZE, {33, 20, 1, 3}, BOTH, "three matrices together, tall; NorMuon"},

    {OP_MUON_UPDATE, {1, 0}, BOTH, "a single element"},
    {OP_MUON_UPDATE, {2603, 0}, BOTH, "packs and a remainder of 3"},
    {OP_MUON_UPDATE, {2603, 1}, BOTH, "the same with master weights"},
};
static inline int optimizer_sizes(OpSize *list, const OpModel *m) {
    const OpSize sizes[] = {
        {OP_ADAMW, "", {m->update_rows, m->C, OP_MASTER, 100, 0}, {1, 0}},
        {OP_MUON_DIRECTION, "", {m->update_rows * m->C}, {0, 0}},
        {OP_MUON_UPDATE, "", {m->update_rows * m->C, OP_MASTER}, {0, 0}},
    };
    memcpy(list, sizes, sizeof(sizes));
    return OP_COUNT(sizes);
}
