/*
measure.h: numbers for clipping: a case file of operations/catalogue.h.
*/

// --- sum_of_squares: x (count), y one number in double ---

static void sum_of_squares_setup(OpCase *c) {
    op_statistics(&c->x[0], "x", 1, c->d[0], 0, 0);
    op_rows(&c->y[0], "sum", 1, 1, 1);
    c->y[0].type = FP64;
    op_error(&c->y[0], 0x1p-29 * error_of_sum(c->d[0]), 0); // in double
}
static void sum_of_squares_reference(OpCase *c) {
    c->y->ref[0] = 0;
    for (int i = 0; i < c->d[0]; i++) c->y->ref[0] += c->x->ref[i] * c->x->ref[i];
}
static void sum_of_squares_call(const OpCase *c) {
    sum_of_squares((double *)c->y[0].data, (const grad_t *)c->x[0].data, (size_t)c->d[0]);
}
static OpCost sum_of_squares_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(sum_of_squares_bytes(c->d[0]), 0, 0);
}

// --- cases ---

static const OpKind measure_kinds[] = {
    {OP_SUM_OF_SQUARES, "sum_of_squares", "count", OP_FORWARD(sum_of_squares), sum_of_squares_cost},
};
static const OpRow measure_cases[] = {
    {OP_SUM_OF_SQUARES, {3}, BOTH, "less than a pack"},
    {OP_SUM_OF_SQUARES, {150011}, BOTH, "all blocks, two rounds and a remainder each"},
};
static inline int measure_sizes(OpSize *list, const OpModel *m) {
    const OpSize sizes[] = {
        {OP_SUM_OF_SQUARES, "", {m->update_rows * m->C}, {1, 0}},
    };
    memcpy(list, sizes, sizeof(sizes));
    return OP_COUNT(sizes);
}
