/*
experts.h: the operations of a mixture of experts; N tokens, R = N*K rows: a case file of operations/catalogue.h.
*/

// --- router: x (N,C), weight (E,C), bias (E) or none, loads (E); y[0] weights (N,K), y[1] logits (N,E), y[2] lse (N),
// y[3] experts (N,K). losses 1: with both losses of the router; 2: without, and the logits of two experts are NaN ---

static Routing op_routing(const OpCase *c) {
    Routing r = {c->d[0], c->d[1], c->d[2], c->d[3]};
    return r;
}
static double router_balance_weight(const OpCase *c) { return c->d[4] == 1 ? 0.75 : 0; }
static double router_z_weight(const OpCase *c) { return c->d[4] == 1 ? 0.0625 : 0; }
static void router_setup(OpCase *c) {
    int N = c->d[0], C = c->d[1], E = c->d[2], K = c->d[3];
    op_rows(&c->x[0], "x", N, C, C)->adds = true;
    op_error(op_parameter(c, 1, "weight", E, C, 0.5), 0, 0);
    c->x[1].view->adds = c->d[6] != 0;
    if (c->d[5]) op_rows(&c->x[2], "bias", 1, E, E);
    op_statistics(&c->x[3], "loads", 1, E, 0, 0);
    c->x[2].constant = c->x[3].constant = true;
    c->x[3].low = 1, c->x[3].high = 9;
    c->x[0].spread = c->x[2].spread = 0.5;
    // logits are exact, and many are equal, so that both choose the same experts
    c->x[0].step = c->x[1].step = c->x[2].step = 0.125;
    op_statistics(&c->y[0], "weights", N, K, 8 + error_of_sum(K), 0);
    op_statistics(&c->y[1], "logits", N, E, 0, 0);
    op_statistics(&c->y[2], "lse", N, 1, 4 + error_of_sum(E), 1);
    op_statistics(&c->y[3], "experts", N, K, 0, 0);
    c->y[3].type = INT32;
    // the gradient of a logit is at most `most`, and is rounded to floatX before the products
    double most = 1 + 2 * router_balance_weight(c) + 2 * router_z_weight(c) * 8;
    op_error(&c->dx[0], 4, most / 2 * error_of_product(E));
    op_error(&c->dx[1], 4, most / 2 * error_of_product(N));
    c->dx[0].rounded_terms = most / 2 * sqrt((double)E) * 3, c->dx[1].rounded_terms = most / 2 * sqrt((double)N) * 3;
    c->length = max_int(max_int(N, C), E);
    c->threads_change_sums = true, c->add_tensor = 2; // both ways
}
static void router_reference(OpCase *c) {
    int N = c->d[0], C = c->d[1], E = c->d[2], K = c->d[3];
    double loads = 0;
    c->loss = 0;
    for (int e = 0; e < E; e++) loads += c->x[3].ref[e];
    for (int n = 0; n < N; n++) {
        double *logits = c->y[1].ref + n * E, sum = 0, chosen = 0, *weights = c->y->ref + n * K;
        for (int e = 0; e < E; e++) {
            logits[e] = 0;
            for (int i = 0; i < C; i++) logits[e] += c->x->ref[n * C + i] * c->x[1].ref[e * C + i];
            sum += exp(logits[e]);
        }
        double lse = log(sum), last = HUGE_VAL;
        c->y[2].ref[n] = lse;
        for (int k = 0, before = -1; k < K; k++) { // the largest score after the last one, the first of equal ones
            int best = -1;
            double most = -HUGE_VAL;
            for (int e = 0; e < E; e++) {
                double score = c->d[5] ? exp(logits[e] - lse) + c->x[2].ref[e] : logits[e];
                if (score > most && (score < last || (score == last && e > before))) most = score, best = e;
            }
            last = most, before = best;
            c->y[3].ref[n * K + k] = best;
            chosen += weights[k] = exp(logits[best]);
        }
        for (int k = 0; k < K; k++) weights[k] /= chosen;
        for (int e = 0; e < E && c->d[4] == 1; e++)
            c->loss += router_balance_weight(c) * c->x[3].ref[e] / loads * exp(logits[e] - lse);
        c->loss += router_z_weight(c) * lse * lse;
    }
}
static void router_call(const OpCase *c) {
    router_forward(OP_STAT(1), OP_STAT(2), (int *)c->y[3].data, OP_STAT(0), OP_X(0), OP_X(1), c->d[5] ? OP_X(2) : NULL,
                   op_routing(c));
}
static void router_call_backward(const OpCase *c) {
    router_backward(OP_DX(0), OP_DW(1), (const real *)c->dy, OP_X(0), OP_X(1), OP_STAT(1), OP_STAT(2),
                    (const int *)c->y[3].data, OP_STAT(0), OP_REAL(3), (real)router_balance_weight(c),
                    (real)router_z_weight(c), op_routing(c), c->x[1].view->adds);
}
static OpCost router_cost(const OpCase *c, bool backward) {
    Routing r = op_routing(c);
    double flops = matmul_forward_flops(r.N, r.C, r.E);
    if (!backward) return op_cost(router_forward_bytes(r), flops, 0);
    return op_cost(router_backward_bytes(r, c->x[1].view->adds), 2 * flops, router_workspace_bytes(r));
}

// --- the index of experts: [experts (N,K) | starts (E+1) | entries (R) | places (R)] ---

static int expert_rows(const OpCase *c) { return c->d[0] * c->d[3]; }
static int *expert_starts(const OpCase *c) { return c->index + expert_rows(c); }
static int *expert_entries(const OpCase *c) { return expert_starts(c) + c->d[2] + 1; }
static int *expert_places(const OpCase *c) { return expert_entries(c) + expert_rows(c); }
static void experts_index(OpCase *c) {
    op_index(c, 3 * expert_rows(c) + c->d[2] + 1, 0);
    c->max_experts = c->d[2], c->grouped = true;
}

// --- router_totals: logits (N,E), lse (N), starts (E+1); y totals (2E+1), which are added to ---

static void router_totals_setup(OpCase *c) {
    int N = c->d[0], E = c->d[2];
    experts_index(c);
    op_statistics(&c->x[0], "logits", N, E, 0, 0);
    op_statistics(&c->x[1], "lse", N, 1, 0, 0);
    c->x[0].spread = 4, c->x[1].low = 4, c->x[1].high = 8;
    // exp(x), x from -16, has the error of x; a sum of up to 1 may cancel what was there
    op_statistics(&c->y[0], "totals", 1, 2 * E + 1, 24 + error_of_sum(N), 24 + error_of_sum(N));
    c->y->view->adds = true;
    c->length = 16 * N;
}
static void router_totals_reference(OpCase *c) {
    int N = c->d[0], E = c->d[2], K = c->d[3];
    for (int i = 0; i < 2 * E + 1; i++) c->y->ref[i] = 0;
    for (int i = 0; i < N * K; i++) c->y->ref[c->index[i]]++;
    for (int i = 0; i < N * E; i++) c->y->ref[E + i % E] += exp(c->x[0].ref[i] - c->x[1].ref[i / E]);
    for (int n = 0; n < N; n++) c->y->ref[2 * E] += c->x[1].ref[n] * c->x[1].ref[n];
}
static void router_totals_call(const OpCase *c) {
    router_totals(OP_STAT(0), OP_REAL(0), OP_REAL(1), expert_starts(c), op_routing(c));
}
static OpCost router_totals_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(router_totals_bytes(op_routing(c)), 0, 0);
}

// --- router_balance: bias (count) and its master or none, in place; loads (E) ---

static void router_balance_setup(OpCase *c) {
    int E = c->d[0], count = E - c->d[1];
    for (int i = 0; i < 1 + (c->d[2] != 0); i++) {
        op_rows(&c->x[i], i ? "master" : "bias", 1, count, count);
        op_rows(&c->y[i], i ? "master" : "bias", 1, count, count);
        c->x[i].spread = 0.5, c->x[i].step = 0.125;
        op_error(&c->y[i], 1, 0);
        c->x[i].type = c->y[i].type = i ? FP32 : STORED;
    }
    op_statistics(&c->x[2], "loads", 1, E, 0, 0);
    c->x[2].low = 1, c->x[2].high = 9, c->x[2].step = 1; // some are equal to the mean
    c->in_place = 2;
}
static void router_balance_reference(OpCase *c) {
    int E = c->d[0], begin = c->d[1];
    double mean = 0;
    for (int e = 0; e < E; e++) mean += c->x[2].ref[e];
    for (int i = 0; i < E - begin; i++) {
        double load = E * c->x[2].ref[begin + i], rate = load < mean ? 0.125 : load > mean ? -0.125 : 0;
        c->y->ref[i] = c->x[c->d[2] ? 1 : 0].ref[i] + rate;
        if (c->d[2]) c->y[1].ref[i] = c->y->ref[i];
    }
}
static void router_balance_call(const OpCase *c) {
    router_balance(OP_Y(0), c->d[2] ? OP_STAT(1) : NULL, OP_REAL(2), 0.125, c->d[0], c->d[1], c->d[0] - c->d[1]);
}
static OpCost router_balance_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(router_balance_bytes(c->d[0], c->d[0] - c->d[1], c->d[2] != 0), 0, 0);
}

// --- experts, with the cases of expert_group ---

static void expert_group_setup(OpCase *c) {
    static const char *const names[] = {"starts", "entries", "places"};
    experts_index(c);
    for (int i = 0; i < 3; i++) {
        op_statistics(&c->y[i], names[i], 1, i ? expert_rows(c) : c->d[2] + 1, 0, 0);
        c->y[i].type = INT32;
    }
}
static void expert_group_reference(OpCase *c) {
    const int *from[] = {expert_starts(c), expert_entries(c), expert_places(c)};
    for (int i = 0; i < 3; i++)
        for (size_t k = 0; k < c->y[i].count; k++) c->y[i].ref[k] = from[i][k];
}
static void expert_group_call(const OpCase *c) {
    expert_group((int *)c->y[0].data, (int *)c->y[1].data, (int *)c->y[2].data, c->index, op_routing(c));
}
static OpCost expert_group_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(expert_group_bytes(op_routing(c)), 0, 0);
}

// x (N,C), y rows (R,C). Its backward is expert_combine.
static void expert_gather_setup(OpCase *c) {
    int C = c->d[1], K = c->d[3];
    experts_index(c);
    op_rows(&c->x[0], "x", c->d[0], C, C)->adds = c->d[6] != 0;
    op_rows(&c->y[0], "rows", expert_rows(c), C, C);
    op_error(&c->dx[0], 4 + K, K);
    c->length = K, c->add_tensor = 1;
}
static void expert_gather_reference(OpCase *c) {
    int C = c->d[1];
    for (int i = 0; i < expert_rows(c) * C; i++)
        c->y->ref[i] = c->x->ref[expert_entries(c)[i / C] / c->d[3] * C + i % C];
}
static void expert_gather_call(const OpCase *c) { expert_gather(OP_Y(0), OP_X(0), expert_entries(c), op_routing(c)); }
static void expert_gather_call_backward(const OpCase *c) {
    expert_combine(OP_DX(0), OP_DY, expert_places(c), op_routing(c), c->x[0].view->adds);
}
static OpCost expert_gather_cost(const OpCase *c, bool backward) {
    Routing r = op_routing(c);
    return op_cost(backward ? expert_combine_bytes(r, c->x[0].view->adds) : expert_gather_bytes(r), 0, 0);
}

// x[0] rows [gate | up] (R,2F), x[1] weights (R) by entry; y (R,F)
static void expert_swiglu_setup(OpCase *c) {
    int R = expert_rows(c), F = c->d[4];
    experts_index(c);
    op_rows(&c->x[0], "gate", R, F, 2 * F);
    op_view(&c->x[0], "up", (size_t)F, R, 1, F, 2 * F, F);
    c->x[0].spread = 3;
    op_statistics(&c->x[1], "weights", R, 1, 0, 0);
    op_rows(&c->y[0], "y", R, F, F);
    op_error(&c->y[0], 16, 0);
    op_error(&c->dx[0], 24, 24);
    op_error(&c->dx[1], 8, 9 * error_of_sum(F));
    c->dx[1].type = FP32;
    c->length = F, c->max_of_y = c->max_of_dx = true;
}
static void expert_swiglu_reference(OpCase *c) {
    for (int i = 0, F = c->d[4]; i < expert_rows(c) * F; i++) {
        double g = c->x->ref[i / F * 2 * F + i % F], u = c->x->ref[i / F * 2 * F + F + i % F];
        c->y->ref[i] = c->x[1].ref[expert_entries(c)[i / F]] * g / (1 + exp(-g)) * u;
    }
}
static void expert_swiglu_call(const OpCase *c) {
    expert_swiglu_forward(OP_MEASURED_Y, OP_X(0), OP_REAL(1), expert_entries(c), expert_rows(c), c->d[4]);
}
static void expert_swiglu_call_backward(const OpCase *c) {
    expert_swiglu_backward(OP_MEASURED_DX, (real *)c->dx[1].data, OP_DY, OP_X(0), OP_REAL(1), expert_entries(c),
                           expert_rows(c), c->d[4]);
}
static OpCost expert_swiglu_cost(const OpCase *c, bool backward) {
    return op_cost((backward ? expert_swiglu_backward_bytes : expert_swiglu_forward_bytes)(expert_rows(c), c->d[4]), 0,
                   0);
}

// x (R,C), weights of E experts (OC,C) with gaps between them; y (R,OC). OC is 2F
static int expert_columns(const OpCase *c) { return c->fp8 ? c->d[4] : 2 * c->d[4]; }
static size_t expert_stride(const OpCase *c) { return round_up(product(expert_columns(c), c->d[1]), 8); }
static void expert_linear_setup(OpCase *c) {
    int R = expert_rows(c), C = c->d[1], OC = expert_columns(c);
    experts_index(c);
    op_rows(&c->x[0], "x", R, C, C);
    op_error(&c->dx[0], 4, error_of_product(OC));
    op_rows(&c->x[1], "weight", c->d[2], OC * C, (int)expert_stride(c))->adds = c->d[6] != 0;
    c->dx[1].type = FP32;
    op_error(&c->dx[1], 4, error_of_product(c->d[0]));
    op_rows(&c->y[0], "y", R, OC, OC);
    op_error(&c->y[0], 4, error_of_product(C));
    c->length = max_int(c->d[0], max_int(C, OC));
    c->threads_change_sums = true, c->add_tensor = 2;
}
// The same of operands in FP8: x and dy by one scale, the weights of each expert, up to 16, by its own.
static void expert_linear_fp8_setup(OpCase *c) {
    const double largest = 16;
    c->fp8 = true;
    expert_linear_setup(c);
    op_error_fp8(&c->y[0], c->d[1], largest);
    op_error_fp8(&c->dx[0], c->d[4], largest);
    op_error_fp8(&c->dx[1], c->d[0], 1);
}
static void expert_linear_reference(OpCase *c) {
    int C = c->d[1], OC = expert_columns(c);
    for (int p = 0, e = 0; p < expert_rows(c); p++) {
        while (p >= expert_starts(c)[e + 1]) e++;
        for (int o = 0; o < OC; o++) {
            const double *w = c->x[1].ref + (size_t)e * expert_stride(c) + o * C;
            double sum = 0;
            for (int i = 0; i < C; i++) sum += c->x->ref[p * C + i] * w[i];
            c->y->ref[p * OC + o] = sum;
        }
    }
}
static ExpertLinear op_expert_linear(const OpCase *c) {
    int IC = c->d[1], OC = expert_columns(c);
    ExpertLinear w = {{OP_X(1), OP_DW(1), c->copy, IC, OC, OC},
                      c->d[2],
                      expert_stride(c),
                      round_up(linear_copy_bytes(IC, OC, false), 256)};
    return w;
}
static void expert_linear_call(const OpCase *c) {
    const ExpertLinear w = op_expert_linear(c);
    expert_linear_forward(OP_Y(0), OP_OPERAND_X, &w, expert_starts(c), c->d[0], expert_rows(c));
}
static void expert_linear_call_backward(const OpCase *c) {
    const ExpertLinear w = op_expert_linear(c);
    expert_linear_backward(OP_DX(0), OP_OPERAND_DY, OP_OPERAND_X, &w, expert_starts(c), c->d[0], expert_rows(c),
                           c->x[1].view->adds);
}
static OpCost expert_linear_cost(const OpCase *c, bool backward) {
    Routing r = op_routing(c);
    int C = c->d[1], OC = expert_columns(c);
    size_t size = c->fp8 ? 1 : FLOATX_BYTES;
    double forward = expert_linear_forward_bytes(r, (size_t)C, (size_t)OC, size),
           dweight = expert_linear_dweight_bytes(r, (size_t)C, (size_t)OC, size, c->x[1].view->adds),
           flops = matmul_forward_flops(expert_rows(c), C, OC);
    return op_cost((size_t)(forward + (backward ? dweight : 0)), backward ? 2 * flops : flops,
                   expert_linear_workspace_bytes(c->d[0], expert_rows(c), c->d[2], C, OC));
}

// --- cases ---

static const OpKind experts_kinds[] = {
    {OP_ROUTER, "router", "N C E K losses bias add", OP_BOTH_WAYS(router), router_cost},
    {OP_ROUTER_TOTALS, "router_totals", "N C E K", OP_FORWARD(router_totals), router_totals_cost},
    {OP_ROUTER_BALANCE, "router_balance", "E begin master", OP_FORWARD(router_balance), router_balance_cost},
    {OP_EXPERT_GROUP, "expert_group", "N C E K F skew", OP_FORWARD(expert_group), expert_group_cost},
    {OP_EXPERT_GATHER, "expert_gather", "N C E K F skew add", OP_BOTH_WAYS(expert_gather), expert_gather_cost},
    {OP_EXPERT_SWIGLU, "expert_swiglu", "N C E K F skew", OP_BOTH_WAYS(expert_swiglu), expert_swiglu_cost},
    {OP_EXPERT_LINEAR, "expert_linear", "N IC E K OC/2 skew add", OP_BOTH_WAYS(expert_linear), expert_linear_cost},
    {OP_EXPERT_LINEAR_FP8, "expert_linear in fp8", "N IC E K OC skew", expert_linear_fp8_setup, NULL,
     expert_linear_call, expert_linear_call_backward, expert_linear_cost},
};
static const OpRow experts_cases[] = {
    {OP_ROUTER, {1, 8, 1, 1, 0, 0}, BOTH, "one expert"},
    {OP_ROUTER, {7, 16, 4, 2, 0, 0}, BOTH, "equal logits: the first experts"},
    {OP_ROUTER, {37, 24, 8, 8, 1, 1}, BOTH, "all experts"},
    {OP_ROUTER, {13, 40, 70, 8, 1, 1, 1}, BOTH, "more experts than lanes, not evenly"},
    {OP_ROUTER, {300, 8, 5, 3, 1, 0}, BOTH, "more rows than threads; an odd number of experts"},
    {OP_ROUTER, {65, 16, 12, 3, 0, 1, 1}, BOTH, "a bias, equal logits"},
    {OP_ROUTER, {9, 16, 40, 3, 2, 0}, CUDA_ONLY, "NaN comes first"},

    {OP_ROUTER_BALANCE, {1, 0, 0}, BOTH, "one expert: the mean"},
    {OP_ROUTER_BALANCE, {5, 1, 1}, BOTH, "a part of an odd number, master weights"},
    {OP_ROUTER_BALANCE, {12, 4, 0}, BOTH, "a part"},
    {OP_ROUTER_BALANCE, {70, 23, 1}, BOTH, "more experts than lanes"},

    {OP_EXPERT_GROUP, {1, 8, 1, 1, 8, 0}, BOTH, "one expert, one row"},
    {OP_EXPERT_GROUP, {37, 16, 4, 2, 24, 0}, BOTH, "packs"},
    {OP_EXPERT_GROUP, {300, 72, 3, 2, 72, 1, 1}, BOTH, "all rows at two experts, none at the third; several pieces"},
    {OP_EXPERT_GROUP, {65, 40, 9, 3, 20, 2}, BOTH, "experts without rows"},
    {OP_EXPERT_GROUP, {140, 136, 2, 2, 80, 0}, BOTH, "every expert has all rows; more than a tile of 128 columns"},
    {OP_EXPERT_GROUP, {70, 16, 70, 3, 8, 0}, BOTH, "more experts than lanes"},
    {OP_EXPERT_GROUP, {128, 64, 1, 1, 64, 0}, BOTH, "one expert with exactly a tile of rows"},
    {OP_EXPERT_GROUP, {130, 72, 3, 1, 72, 3, 1}, BOTH, "exactly a tile of rows, then experts of one row"},
    {OP_EXPERT_GROUP, {131, 72, 2, 1, 72, 3}, BOTH, "one row more than a tile, and no block to spare"},
    {OP_EXPERT_GROUP, {260, 40, 4, 2, 40, 3}, BOTH, "two experts of a tile and more, then few rows"},
    {OP_EXPERT_GROUP, {100, 8, 5, 4, 8, 2}, BOTH, "more than 32 rows for a warp"},
    {OP_EXPERT_GROUP, {37, 13, 5, 2, 7, 0, 1}, BOTH, "no packs"},
    {OP_EXPERT_GROUP, {37, 16, 4, 2, 8, 0, 1}, BOTH, "packs, narrow"},

    {OP_EXPERT_LINEAR_FP8, {1, 16, 1, 1, 16, 0}, CUDA_ONLY, "one expert, one row"},
    {OP_EXPERT_LINEAR_FP8, {37, 32, 4, 2, 48, 0}, CUDA_ONLY, "multiples of 16"},
    {OP_EXPERT_LINEAR_FP8, {300, 144, 3, 2, 136, 1}, CUDA_ONLY, "two experts have all rows; several pieces"},
    {OP_EXPERT_LINEAR_FP8, {65, 40, 9, 3, 20, 2}, CUDA_ONLY, "experts without rows; no multiples of 16"},
    {OP_EXPERT_LINEAR_FP8, {64, 264, 2, 2, 16, 0}, CUDA_ONLY, "no spare rows, a deeper sum than three pieces"},
    {OP_EXPERT_LINEAR_FP8, {70, 16, 70, 3, 24, 0}, CUDA_ONLY, "more experts than lanes"},
    {OP_EXPERT_LINEAR_FP8, {37, 13, 5, 2, 7, 0}, CUDA_ONLY, "nothing aligned"},
    {OP_EXPERT_LINEAR_FP8, {37, 16, 4, 2, 32, 0}, CUDA_ONLY, "packs"},
};
static inline int experts_sizes(OpSize *list, const OpModel *m) {
    if (!m->E) return 0;
    const int N = m->B * m->T;
    const OpSize sizes[] = {
        {OP_ROUTER, "", {N, m->C, m->E, m->K, 1, 0, 1}, {0, 0}},
        {OP_ROUTER, "bias", {N, m->C, m->E, m->K, 1, 1, 1}, {0, -1}},
        {OP_ROUTER_TOTALS, "", {N, m->C, m->E, m->K}, {0, 0}},
        {OP_ROUTER_BALANCE, "", {m->E, 0, OP_MASTER}, {0, 0}},
        {OP_EXPERT_GROUP, "", {N, m->C, m->E, m->K, m->FE}, {0, 0}},
        {OP_EXPERT_GATHER, "", {N, m->C, m->E, m->K, m->FE}, {0, 0}},
        {OP_EXPERT_GATHER, "adds", {N, m->C, m->E, m->K, m->FE, 0, 1}, {-1, 0}},
        {OP_EXPERT_SWIGLU, "", {N, m->C, m->E, m->K, m->FE}, {0, 0}},
        {OP_EXPERT_LINEAR, "gate, up", {N, m->C, m->E, m->K, m->FE, 0, 1}, {0, 0}},
        {OP_EXPERT_LINEAR, "down", {N, m->FE, m->E, m->K, m->C / 2, 0, 1}, {0, 0}},
    };
    memcpy(list, sizes, sizeof(sizes));
    return OP_COUNT(sizes);
}
