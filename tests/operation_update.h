/*
operation_update.h: the operations of an update, a part of operation_catalogue.h.
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
