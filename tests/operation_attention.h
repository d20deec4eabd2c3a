/*
operation_attention.h: attention, its sinks and its caches, a part of operation_catalogue.h.
*/

// --- attention: x fused rows [q | k | v | padding], y[0] out (N,NQ,DV), y[1] lse (B,NQ,T) ---
// With maps 2 the heads of two key sets alternate, [heads][2][width], and both sets have the same values. "attention"
// runs the last set; "attention of two sets" runs both, as for diff_v1, and the second adds to dv.

typedef struct {
    size_t q, k, v, out, lse; // first elements of a key set
} OpKeySet;
static OpKeySet op_key_set(const OpAttention *a, int set) {
    OpKeySet s;
    s.q = product(a->first, a->ld) + product(set, a->D);
    s.k = product(a->NQ * a->maps, a->D) + product(set, a->D);
    s.v = product((a->NQ + a->NKV) * a->maps, a->D);
    s.out = product(set, a->DV);
    s.lse = (size_t)set * round_up(product(a->B * a->NQ, a->T), 4); // lse_set_stride
    return s;
}
static double attention_error(const OpAttention *a) { return error_of_sum(a->D) + error_of_sum(a->T + a->first) + 16; }
// The error of CUDA, and the sums of C, of the output and lse of attention to the keys 0 .. first + T - 1.
static void attention_rounding(OpCase *c, const OpAttention *a) {
    c->y[1].type = FP32;
    op_error(&c->y[0], 4, 2 * attention_error(a));
    op_error(&c->y[1], 4, attention_error(a));
    c->length = 4 * max_int(a->T + a->first, a->D); // errors of scores grow with their size, up to 4
}
// The key sets from `set` on.
static void attention_layout(OpCase *c, int maps, int set, int padding, int ldo_padding) {
    const int *d = c->d;
    OpAttention a = {d[0], d[1], c->a.first, d[2], d[3], d[4], d[5], maps, 0, 0, c->a.window};
    a.ld = (a.NQ + a.NKV) * maps * a.D + a.NKV * a.DV + padding;
    a.ldo = a.NQ * maps * a.DV + ldo_padding;
    c->a = a;
    OpKeySet s = op_key_set(&a, set);
    int rows = a.B * a.T, keys = a.B * (a.first + a.T), of = maps - set, step = set ? maps : 1;
    op_view(&c->x[0], "q", s.q, rows, of * a.NQ, a.D, a.ld, step * a.D);
    op_view(&c->x[0], "k", s.k, keys, of * a.NKV, a.D, a.ld, step * a.D);
    op_view(&c->x[0], "v", s.v, keys, a.NKV, a.DV, a.ld, a.DV);
    c->x[0].spread = 2; // scores spread enough for some keys to matter more than others
    op_view(&c->y[0], "out", s.out, rows, of * a.NQ, a.DV, a.ldo, step * a.DV);
    op_view(&c->y[1], "lse", s.lse, of, a.B * a.NQ, a.T, (int)op_key_set(&a, 1).lse, a.T);
    attention_rounding(c, &a);
    op_error(&c->dx[0], 4, attention_error(&a) + error_of_sum(a.DV));
    c->dx[0].error_grows = true;
}
static void attention_setup(OpCase *c) {
    const int *d = c->d;
    c->a.first = d[9], c->a.window = d[11];
    c->documents = d[8] == 2;
    c->no_backward = d[9] > 0;
    attention_layout(c, d[6], d[6] - 1, d[7], d[7]);
    c->x[0].view[2].adds = d[8] == 1;
    c->add_tensor = 1, c->add_view = 2;
    if (c->documents) op_index(c, d[0] * d[1], 0);
    if (d[10]) c->y[1].views = 0;
}
static void attention_sets_setup(OpCase *c) {
    c->a.window = c->d[8];
    attention_layout(c, 2, 0, c->d[7], c->d[7]);
}
static void sinks_setup(OpCase *c) {
    attention_layout(c, 1, 0, c->d[7], 0); // sink_forward reads rows without padding
    if (!c->d[6]) return;
    op_error(op_parameter(c, 1, "sinks", 1, c->a.NQ, 2), 4,
             exp(4.0) * sqrt((double)c->a.DV) * error_of_sum(c->a.DV + c->a.B * c->a.T));
    c->length = 4 * max_int(c->a.B * c->a.T, c->a.D);
}
// The definition for one query row, which attends to the keys [low, end): the sum of exp(scale q.k). The softmax has
// `sum` more in its denominator.
static double attention_define_row(double *out, const double *q, const double *k, const double *v, int ld, int low,
                                   int end, const OpAttention *s, double sum) {
    double scale = 1 / sqrt((double)s->D);
    assert(low < end);
    for (int i = 0; i < s->DV; i++) out[i] = 0;
    for (int j = low; j < end; j++) {
        double score = 0;
        for (int i = 0; i < s->D; i++) score += scale * (q[i] * k[j * ld + i]);
        double p = exp(score); // scores are small: no maximum is needed
        sum += p;
        for (int i = 0; i < s->DV; i++) out[i] += p * v[j * ld + i];
    }
    for (int i = 0; i < s->DV; i++) out[i] /= sum;
    return sum;
}
// The definition, for one key set; `sinks` has one more logit per head, NULL: there is none.
static void attention_define(OpCase *c, int set, const double *sinks) {
    OpAttention s = c->a;
    OpKeySet at = op_key_set(&s, set);
    double *all_lse = c->y[1].views ? c->y[1].ref + at.lse : NULL;
    int head = s.maps * s.D;
#pragma omp parallel for
    for (int bh = 0; bh < s.B * s.NQ; bh++) {
        int b = bh / s.NQ, h = bh % s.NQ, kv = h / (s.NQ / s.NKV);
        const double *x = c->x->ref + b * s.T * s.ld, *q = x + at.q + h * head, *k = x + at.k + kv * head;
        const double *v = x + at.v + kv * s.DV;
        for (int t = 0; t < s.T; t++) {
            double *out = c->y->ref + at.out + (b * s.T + t) * s.ldo + h * s.maps * s.DV;
            int low = c->documents ? c->index[b * s.T + t] : 0, end = s.first + t + 1;
            if (s.window) low = max_int(low, end - s.window);
            double sum = attention_define_row(out, q + t * s.ld, k, v, s.ld, low, end, &s, sinks ? exp(sinks[h]) : 0);
            if (all_lse) all_lse[bh * s.T + t] = log(sum);
        }
    }
}
static void attention_reference(OpCase *c) { attention_define(c, c->a.maps - 1, NULL); }
static void attention_sets_reference(OpCase *c) {
    for (int set = 0; set < 2; set++) attention_define(c, set, NULL);
}
static void sinks_reference(OpCase *c) {
    static const double zeros[16] = {0};
    attention_define(c, 0, c->d[6] ? c->x[1].ref : zeros);
}
static AttentionShape op_attention_shape(const OpCase *c) {
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = c->a.B, s.T = c->a.T, s.first = c->a.first, s.window = c->a.window;
    s.NQ = c->a.NQ, s.NKV = c->a.NKV, s.D = c->a.D, s.DV = c->a.DV;
    s.ldq = s.ldkv = c->a.ld;
    s.ldo = c->a.ldo;
    s.q_head = s.k_head = c->a.maps * s.D;
    s.v_head = s.DV;
    s.o_head = c->a.maps * s.DV;
    s.scale = (real)(1 / sqrt((double)s.D));
    s.first_key = c->documents ? c->index : NULL;
    return s;
}
static void attention_run(const OpCase *c, int set) {
    OpKeySet a = op_key_set(&c->a, set);
    attention_forward(OP_Y(0) + a.out, c->y[1].views ? OP_STAT(1) + a.lse : NULL, OP_X(0) + a.q, OP_X(0) + a.k,
                      OP_X(0) + a.v, op_attention_shape(c));
}
static void attention_run_backward(const OpCase *c, int set, bool add_dv) {
    OpKeySet a = op_key_set(&c->a, set);
    attention_backward(OP_DX(0) + a.q, OP_DX(0) + a.k, OP_DX(0) + a.v, OP_DY + a.out, OP_Y(0) + a.out,
                       OP_STAT(1) + a.lse, OP_X(0) + a.q, OP_X(0) + a.k, OP_X(0) + a.v, op_attention_shape(c), add_dv);
}
static void attention_call(const OpCase *c) { attention_run(c, c->a.maps - 1); }
static void attention_call_backward(const OpCase *c) { attention_run_backward(c, c->a.maps - 1, c->x[0].view[2].adds); }
static void attention_sets_call(const OpCase *c) {
    for (int set = 0; set < 2; set++) attention_run(c, set);
}
static void attention_sets_call_backward(const OpCase *c) {
    for (int set = 0; set < 2; set++) attention_run_backward(c, set, set > 0);
}
static void sinks_call(const OpCase *c) {
    attention_run(c, 0);
    sink_forward(OP_Y(0), OP_STAT(1), c->d[6] ? OP_X(1) : NULL, c->a.B, c->a.T, c->a.NQ, c->a.DV);
}
static void sinks_call_backward(const OpCase *c) {
    const OpAttention *a = &c->a;
    if (c->d[6]) sink_backward(OP_DW(1), OP_DY, OP_Y(0), OP_STAT(1), OP_X(1), a->B, a->T, a->NQ, a->DV);
    attention_run_backward(c, 0, false);
}
static OpCost attention_cost(const OpCase *c, bool backward) {
    AttentionShape s = op_attention_shape(c);
    size_t workspace = attention_workspace_bytes(s, omp_get_max_threads());
    if (!backward) return op_cost(attention_forward_bytes(s), attention_forward_flops(s), workspace);
    return op_cost(attention_backward_bytes(s), attention_backward_flops(s), workspace);
}

// --- diff_attention: x[0] fused rows [q | k | v | padding], x[1] l (N,OH) with row stride ldl, y[0] out (N,OH,DV),
// y[1] lse. What it keeps has no fixed layout, so the backward is called after another forward ---

static HeadGroups diff_attention_groups(const OpCase *c) {
    HeadGroups g = {c->d[6], 1};
    return g;
}
static void diff_attention_setup(OpCase *c) {
    const int *d = c->d, units = d[2], signals = d[6], rows = d[0] * d[1];
    OpAttention a = {d[0], d[1], 0, units * (signals + 1), d[3], d[4], d[5], 1, 0, 0, d[10]};
    a.ld = (a.NQ + a.NKV) * a.D + a.NKV * a.DV + d[7];
    a.ldo = units * signals * a.DV;
    c->a = a;
    op_view(&c->x[0], "q", 0, rows, a.NQ, a.D, a.ld, a.D);
    op_view(&c->x[0], "k", product(a.NQ, a.D), rows, a.NKV, a.D, a.ld, a.D);
    op_view(&c->x[0], "v", product(a.NQ + a.NKV, a.D), rows, a.NKV, a.DV, a.ld, a.DV);
    op_rows(&c->x[1], "l", rows, units * signals, units * signals + d[7]);
    c->x[0].spread = 2, c->x[1].spread = d[8] == S_SIGMOID ? 6 : 1.5;
    op_view(&c->y[0], "out", 0, rows, units * signals, a.DV, a.ldo, a.DV);
    op_view(&c->y[1], "lse", 0, 1, a.B * a.NQ, a.T, a.B * a.NQ * a.T, a.T);
    attention_rounding(c, &a);
    c->y[0].error.absolute *= 3, c->y[0].rounded_terms = 4; // two heads, which are stored where they are kept
    // a key's gradient sums over the signal heads and the noise head, whose gradient is itself a sum over the former
    op_error(&c->dx[0], 4, 3 * signals * (attention_error(&a) + error_of_sum(a.DV)));
    op_error(&c->dx[1], 16, 4 * (attention_error(&a) + error_of_sum(a.DV)));
    c->dx[0].rounded_terms = c->dx[1].rounded_terms = 3 * signals;
    c->dx[0].error_grows = c->dx[1].error_grows = true;
    c->documents = d[9];
    if (c->documents) op_index(c, rows, 0);
}
static void diff_attention_reference(OpCase *c) {
    const OpAttention *s = &c->a;
    const int signals = c->d[6], maps = signals + 1, OH = c->y->view->heads, ldl = c->x[1].view->ld;
    double *heads = (double *)checked_calloc(product(s->B * s->T, s->NQ * s->DV), sizeof(double)), *out = c->y->ref;
    OpCase all = *c; // attention of all heads
    all.a.ldo = s->NQ * s->DV;
    all.y->ref = heads;
    attention_define(&all, 0, NULL);
    for (size_t i = 0; i < product(s->B * s->T, OH * s->DV); i++) {
        size_t n = i / (size_t)(OH * s->DV), h = i / (size_t)s->DV % (size_t)OH, k = i % (size_t)s->DV;
        const double *unit = heads + (n * (size_t)s->NQ + h / (size_t)signals * (size_t)maps) * (size_t)s->DV + k;
        double f = factor_of(c->x[1].ref[n * (size_t)ldl + h], (Factor)c->d[8]);
        out[i] = unit[h % (size_t)signals * (size_t)s->DV] - f * unit[signals * s->DV];
    }
    free(heads);
}
static AttentionShape diff_attention_shape(const OpCase *c) {
    AttentionShape s = op_attention_shape(c);
    s.groups = diff_attention_groups(c);
    return s;
}
static floatX *diff_attention_buffer(const OpCase *c) {
    AttentionShape s = diff_attention_shape(c);
    return (floatX *)buffer_alloc(product(s.B * s.T, diff_attention_kept(s) * s.DV) * sizeof(floatX), "kept heads");
}
static void diff_attention_run(const OpCase *c, floatX *out, real *lse, floatX *kept) {
    const OpView *x = c->x->view;
    diff_attention_forward(activation(out, NULL), kept, lse, OP_X(0), OP_X(0) + x[1].offset, OP_X(0) + x[2].offset,
                           OP_X(1), c->x[1].view->ld, diff_attention_shape(c), (Factor)c->d[8]);
}
static void diff_attention_call(const OpCase *c) {
    floatX *kept = diff_attention_buffer(c);
    diff_attention_run(c, OP_Y(0), OP_STAT(1), kept);
    ops_wait();
    buffer_free(kept);
}
static void diff_attention_call_backward(const OpCase *c) {
    const OpView *x = c->x->view;
    AttentionShape s = diff_attention_shape(c);
    floatX *kept = diff_attention_buffer(c), *dkept = diff_attention_kept(s) == s.NQ ? diff_attention_buffer(c) : NULL;
    floatX *out = (floatX *)buffer_alloc(c->y[0].count * sizeof(floatX), "an output");
    real *lse = (real *)buffer_alloc(c->y[1].count * sizeof(real), "an output");
    diff_attention_run(c, out, lse, kept);
    diff_attention_backward(OP_DX(0), OP_DX(0) + x[1].offset, OP_DX(0) + x[2].offset, OP_DX(1), dkept, OP_DY, OP_Y(0),
                            kept, OP_STAT(1), OP_X(0), OP_X(0) + x[1].offset, OP_X(0) + x[2].offset, OP_X(1),
                            c->x[1].view->ld, s, (Factor)c->d[8]);
    ops_wait();
    buffer_free(kept), buffer_free(dkept), buffer_free(out), buffer_free(lse);
}
static OpCost diff_attention_cost(const OpCase *c, bool backward) {
    AttentionShape s = diff_attention_shape(c);
    size_t workspace = attention_workspace_bytes(s, omp_get_max_threads());
    return op_cost(0, backward ? attention_backward_flops(s) : attention_forward_flops(s), workspace);
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

// --- cache_store: x[0] and y the cache (B,capacity,width), x[1] rows (B,T,width) with row stride ld ---

static void cache_store_setup(OpCase *c) {
    const int *d = c->d;
    op_rows(&c->x[0], "cache", d[0] * d[2], d[3], d[3]);
    op_rows(&c->x[1], "rows", d[0] * d[1], d[3], d[4]);
    op_rows(&c->y[0], "cache", d[0] * d[2], d[3], d[3]);
    if (d[5] >= 0) op_index(c, d[0], d[5] + 1); // the first positions of the sequences
    c->in_place = 1, c->no_backward = true;
}
static void cache_store_reference(OpCase *c) {
    int T = c->d[1], capacity = c->d[2], width = c->d[3];
    memcpy(c->y->ref, c->x->ref, c->y->count * sizeof(double));
    for (int n = 0; n < c->d[0] * T; n++) {
        int place = n / T * capacity + ((c->index ? c->index[n / T] : 0) + n % T) % capacity;
        memcpy(c->y->ref + place * width, c->x[1].ref + n * c->d[4], (size_t)width * sizeof(double));
    }
}
static void cache_store_call(const OpCase *c) {
    const int *d = c->d;
    cache_store(OP_Y(0), OP_X(1), c->index, d[0], d[1], d[2], d[3], d[4]);
}
static OpCost cache_store_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(cache_store_bytes(product(c->d[0], c->d[1]), c->d[3]), 0, 0);
}

// --- cache_load: x the cache (capacity,width), y rows (count,width) ---

static void cache_load_setup(OpCase *c) {
    op_rows(&c->x[0], "cache", c->d[2], c->d[3], c->d[3]);
    op_rows(&c->y[0], "rows", c->d[1], c->d[3], c->d[3]);
    c->no_backward = true;
}
static void cache_load_reference(OpCase *c) {
    for (int i = 0, width = c->d[3]; i < c->d[1]; i++)
        memcpy(c->y->ref + i * width, c->x->ref + (c->d[0] + i) % c->d[2] * width, (size_t)width * sizeof(double));
}
static void cache_load_call(const OpCase *c) {
    const int *d = c->d;
    cache_load(OP_Y(0), OP_X(0), d[0], d[1], d[2], d[3]);
}
static OpCost cache_load_cost(const OpCase *c, bool backward) {
    (void)backward;
    return op_cost(cache_store_bytes(c->d[1], c->d[3]), 0, 0);
}

// --- attention_decode: x[0] q (B,NQ,D), x[1] caches (B,capacity) of rows [k | v], y[0] out (B,NQ,DV), y[1] lse (B,NQ)
// With maps 2 the last of two key sets, as for attention, or with all 1 both. Rows of the cache without a position are
// NaN.

static void decode_setup(OpCase *c) {
    const int *d = c->d;
    OpAttention a = {d[0], 1, min_int(d[8], d[7] - 1), d[1], d[2], d[3], d[4], d[5], 0, 0, 0};
    int set = d[10] ? 0 : a.maps - 1, of = a.maps - set, step = set ? a.maps : 1;
    int keys = a.NKV * a.maps * a.D, width = keys + a.NKV * a.DV;
    a.ld = a.NQ * a.maps * a.D + d[6];
    a.ldo = a.NQ * a.maps * a.DV + d[6];
    c->a = a;
    op_view(&c->x[0], "q", product(set, a.D), a.B, of * a.NQ, a.D, a.ld, step * a.D);
    op_view(&c->x[1], "k", product(set, a.D), a.B * d[7], of * a.NKV, a.D, width, step * a.D);
    op_view(&c->x[1], "v", (size_t)keys, a.B * d[7], a.NKV, a.DV, width, a.DV);
    c->x[0].spread = c->x[1].spread = 2;
    op_view(&c->y[0], "out", product(set, a.DV), a.B, of * a.NQ, a.DV, a.ldo, step * a.DV);
    if (!d[9]) op_view(&c->y[1], "lse", 0, of, a.B * a.NQ, 1, (int)op_key_set(&a, 1).lse, 1);
    attention_rounding(c, &a);
    op_index(c, a.B, d[8] + 1); // the positions of the sequences
    c->no_backward = true;
}
static int decode_sets(const OpCase *c) { return c->y->view->heads / c->a.NQ; }
static void decode_reference(OpCase *c) {
    const OpAttention *s = &c->a;
    const OpView *k = &c->x[1].view[0], *v = &c->x[1].view[1];
    const int sets = decode_sets(c), heads = sets * s->NQ, capacity = c->d[7];
    for (int i = 0; i < s->B * heads; i++) {
        int b = i / heads, h = i % heads / sets, set = i % sets, kv = h / (s->NQ / s->NKV);
        const double *cache = c->x[1].ref + b * capacity * k->ld;
        double sum = attention_define_row(
            c->y->ref + op_at(c->y->view, (size_t)(i * s->DV)), c->x->ref + op_at(c->x->view, (size_t)(i * s->D)),
            cache + k->offset + (kv * sets + set) * k->stride, cache + v->offset + kv * v->stride, k->ld, 0,
            min_int(c->index[b] + 1, capacity), s, 0);
        if (c->y[1].views) c->y[1].ref[set * c->y[1].view->ld + b * s->NQ + h] = log(sum);
    }
}
// Whether element i of a view of x[1] is in a row that no position has.
static inline bool op_in_empty_row(const OpCase *c, const OpView *v, size_t i) {
    int row = c->kind == OP_DECODE ? (int)(i / (size_t)v->width) / v->heads : 0;
    return c->kind == OP_DECODE && row % c->d[7] > c->index[row / c->d[7]];
}
static AttentionShape decode_shape(const OpCase *c) {
    AttentionShape s = op_attention_shape(c);
    s.first = 0;
    s.ldkv = c->x[1].view->ld;
    return s;
}
static void decode_call(const OpCase *c) {
    const OpView *q = c->x->view, *k = c->x[1].view, *v = k + 1, *out = c->y->view;
    for (int set = 0; set < decode_sets(c); set++)
        attention_decode(OP_Y(0) + out->offset + set * c->a.DV,
                         c->y[1].views ? OP_STAT(1) + set * c->y[1].view->ld : NULL, OP_X(0) + q->offset + set * c->a.D,
                         OP_X(1) + k->offset + set * c->a.D, OP_X(1) + v->offset, c->index, c->d[7], decode_shape(c));
}
static OpCost decode_cost(const OpCase *c, bool backward) {
    (void)backward;
    AttentionShape s = decode_shape(c);
    size_t bytes = attention_decode_bytes(s, min_int(c->d[8] + 1, c->d[7]));
    return op_cost((size_t)decode_sets(c) * bytes, 0,
                   attention_decode_workspace_bytes(s, c->d[7], omp_get_max_threads()));
}
