/*
attention.h: attention, its caches, and the subtraction of heads: a case file of operations/catalogue.h.
*/

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
    s.B = c->a.B, s.T = c->a.T, s.query_offset = c->a.first, s.window = c->a.window;
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
    s.query_offset = 0;
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

// --- cases ---

static const OpKind attention_kinds[] = {
    {OP_ROPE, "rope", "B T heads D ldx first", OP_BOTH_WAYS(rope), rope_cost},
    {OP_ATTENTION, "attention", "B T NQ NKV D DV maps padding add_dv=1,documents=2 first no_lse window",
     OP_BOTH_WAYS(attention), attention_cost},
    {OP_ATTENTION_SETS, "attention of two sets", "B T NQ NKV D DV maps padding window", OP_BOTH_WAYS(attention_sets),
     attention_cost},
    {OP_SINKS, "attention with sinks", "B T NQ NKV D DV learned padding", OP_BOTH_WAYS(sinks), attention_cost},
    {OP_DIFF_COMBINE, "diff_combine", "N NH D ldl signals noise factor", OP_BOTH_WAYS(diff_combine), diff_combine_cost},
    {OP_DIFF_ATTENTION, "diff_attention", "B T groups NKV D DV signals padding factor documents window",
     OP_BOTH_WAYS(diff_attention), diff_attention_cost},
    {OP_CACHE_STORE, "cache_store", "B T capacity width ld first,NULL=-1", OP_FORWARD(cache_store), cache_store_cost},
    {OP_CACHE_LOAD, "cache_load", "first count capacity width", OP_FORWARD(cache_load), cache_load_cost},
    {OP_DECODE, "attention_decode", "B NQ NKV D DV maps padding capacity first no_lse all", OP_FORWARD(decode),
     decode_cost},
};
static const OpRow attention_cases[] = {
    {OP_ROPE, {1, 1, 1, 2, 2, 0}, BOTH, "one position, one pair"},
    {OP_ROPE, {3, 7, 2, 8, 40, 0}, BOTH, "each of several sequences starts at `first`; columns beyond the heads"},
    {OP_ROPE, {1, 13, 5, 40, 200, 0}, BOTH, "D is no power of two"},
    {OP_ROPE, {2, 3, 1, 6, 64, 0}, BOTH, "an odd number of pairs"},
    {OP_ROPE, {1, 7, 2, 256, 512, 130}, BOTH, "the widest head, far positions"},
    {OP_ROPE, {2, 9, 3, 16, 64, 0}, BOTH, "packs, a row with other columns after the heads"},
    {OP_ROPE, {2, 33, 2, 10, 23, 0}, BOTH, "D = 10, odd rows"},
    {OP_ROPE, {1, 3, 2, 128, 256, 7}, BOTH, "generation: positions from 7 on"},
    {OP_ROPE, {2, 5, 3, 40, 132, 0}, BOTH, "half of 40: half packs in bf16"},
    {OP_ROPE, {1, 5, 3, 40, 130, 0}, BOTH, "the same, rows unaligned to half packs"},
    {OP_ROPE, {1, 3, 41, 128, 5312, 0}, BOTH, "columns of two blocks and part of a third"},

    {OP_ATTENTION, {1, 1, 1, 1, 8, 8, 1, 0}, BOTH, "one key: the output is its value, dq = dk = 0"},
    {OP_ATTENTION, {1, 7, 6, 1, 16, 16, 1, 13}, BOTH, "one KV head for all queries; padded rows, as for lambda"},
    {OP_ATTENTION, {3, 13, 2, 2, 8, 8, 1, 0}, BOTH, "several sequences, NKV = NQ, prime T"},
    {OP_ATTENTION, {1, 64, 3, 3, 8, 8, 1, 64}, BOTH, "exactly one panel of keys (fp32, AVX-512)"},
    {OP_ATTENTION, {1, 96, 6, 2, 16, 16, 1, 5}, BOTH, "exactly one block of rows; groups of 3"},
    {OP_ATTENTION, {2, 97, 2, 1, 40, 40, 1, 0}, BOTH, "one past a block of rows; D is no multiple of a vector"},
    {OP_ATTENTION, {1, 193, 2, 2, 24, 72, 1, 0}, BOTH, "one past a block of keys; wider values"},
    {OP_ATTENTION, {1, 389, 2, 1, 16, 16, 1, 3}, BOTH, "three blocks of keys, five of rows, prime T"},
    {OP_ATTENTION, {1, 13, 2, 1, 256, 256, 1, 0}, BOTH, "the widest head"},
    {OP_ATTENTION, {3, 7, 4, 2, 8, 16, 2, 6, 1}, BOTH, "diff_v1: alternating key sets, values of width 2D; dv +="},
    {OP_ATTENTION, {1, 199, 2, 1, 8, 16, 2, 0}, BOTH, "the same beyond one block of keys"},
    {OP_ATTENTION, {2, 64, 2, 1, 64, 64, 1, 64}, BOTH, "whole tiles"},
    {OP_ATTENTION, {1, 70, 4, 2, 16, 16, 1, 64}, BOTH, "T is a tile and 6 more, GQA"},
    {OP_ATTENTION, {1, 40, 7, 7, 64, 64, 1, 64}, BOTH, "on a GPU sections of heads, the last one smaller"},
    {OP_ATTENTION, {2, 33, 3, 3, 10, 10, 1, 3}, BOTH, "D = 10: no packs"},
    {OP_ATTENTION, {1, 131, 2, 1, 8, 16, 1, 24}, BOTH, "values of width 2D; three tiles"},
    {OP_ATTENTION, {1, 66, 2, 1, 128, 128, 1, 64}, BOTH, "D = 128"},
    {OP_ATTENTION, {1, 65, 1, 1, 128, 256, 1, 64}, BOTH, "D = 128, values of width 2D"},
    {OP_ATTENTION, {1, 65, 1, 1, 256, 512, 1, 64}, BOTH, "the widest: D = 256, values of width 2D"},
    {OP_ATTENTION, {3, 1, 2, 1, 16, 16, 1, 64}, BOTH, "one row"},
    {OP_ATTENTION, {2, 17, 4, 1, 72, 72, 1, 3}, BOTH, "a piece of 8 columns"},
    {OP_ATTENTION, {1, 5, 2, 2, 1, 3, 1, 3}, BOTH, "the narrowest"},
    {OP_ATTENTION, {2, 200, 2, 1, 16, 16, 1, 64, 2}, BOTH, "document masks that skip tiles"},
    {OP_ATTENTION, {1, 150, 2, 2, 10, 20, 1, 3, 2}, BOTH, "document masks, no packs"},
    {OP_ATTENTION, {2, 37, 2, 1, 8, 8, 1, 0, 2}, BOTH, "document masks"},
    {OP_ATTENTION, {1, 1, 4, 2, 16, 16, 1, 64, 0, 70, 1}, BOTH, "generation: one query after 70 keys"},
    {OP_ATTENTION, {1, 67, 2, 1, 10, 10, 1, 3, 0, 5, 1}, BOTH, "generation: a prompt that follows another"},
    {OP_ATTENTION, {1, 306, 4, 2, 24, 24, 1, 0, 0, 1}, BOTH, "generation: one key before"},
    {OP_ATTENTION, {1, 244, 4, 2, 24, 24, 1, 0, 0, 63}, BOTH, "generation: from within a block on"},
    {OP_ATTENTION, {1, 211, 4, 2, 24, 24, 1, 0, 0, 96}, BOTH, "generation: from the end of a block of rows on"},
    {OP_ATTENTION, {1, 116, 4, 2, 24, 24, 1, 0, 0, 191}, BOTH, "generation: from one before a block of keys on"},
    {OP_ATTENTION, {1, 115, 4, 2, 24, 24, 1, 0, 0, 192}, BOTH, "generation: from a block of keys on"},
    {OP_ATTENTION, {1, 114, 4, 2, 24, 24, 1, 0, 0, 193}, BOTH, "generation: from one past a block of keys on"},
    {OP_ATTENTION, {1, 1, 4, 2, 24, 24, 1, 0, 0, 306}, BOTH, "generation: one new row"},
    {OP_ATTENTION, {2, 37, 4, 2, 16, 16, 1, 64, 0, 0, 0, 1}, BOTH, "window 1: the output is the row's own value"},
    {OP_ATTENTION, {2, 37, 4, 2, 8, 8, 1, 0, 1, 0, 0, 5}, BOTH, "a window within a tile, GQA; dv +="},
    {OP_ATTENTION, {1, 70, 2, 1, 16, 16, 1, 3, 0, 0, 0, 70}, BOTH, "a window of T: the last row attends to all"},
    {OP_ATTENTION, {1, 70, 2, 1, 16, 16, 1, 64, 0, 0, 0, 69}, BOTH, "a window of T - 1: the last row omits one key"},
    {OP_ATTENTION, {1, 33, 2, 2, 16, 16, 1, 0, 0, 0, 0, 1000}, BOTH, "a window larger than T"},
    {OP_ATTENTION, {1, 130, 2, 1, 16, 16, 1, 0, 0, 0, 0, 5}, BOTH, "a small window, across the borders of tiles"},
    {OP_ATTENTION, {1, 260, 3, 1, 16, 16, 1, 0, 0, 0, 0, 64}, BOTH, "a window of one tile of 64 keys, skips tiles"},
    {OP_ATTENTION, {1, 260, 3, 1, 16, 16, 1, 64, 0, 0, 0, 65}, BOTH, "one key more: rows reach into the next tile"},
    {OP_ATTENTION, {1, 450, 4, 2, 16, 16, 1, 0, 0, 0, 0, 37}, BOTH, "skips whole blocks of keys; GQA"},
    {OP_ATTENTION, {1, 450, 2, 2, 24, 24, 1, 0, 0, 0, 0, 192}, BOTH, "a window of a block of keys (C)"},
    {OP_ATTENTION, {1, 450, 2, 1, 10, 20, 1, 3, 0, 0, 0, 193}, BOTH, "one key more; no packs, wider values"},
    {OP_ATTENTION, {1, 199, 4, 2, 8, 16, 2, 6, 1, 0, 0, 50}, BOTH, "diff_v1 with a window; dv +="},
    {OP_ATTENTION, {1, 150, 2, 1, 128, 128, 1, 64, 0, 0, 0, 40}, BOTH, "D = 128 with a window"},
    {OP_ATTENTION, {2, 200, 2, 1, 16, 16, 1, 64, 2, 0, 0, 30}, BOTH, "documents longer and shorter than the window"},
    {OP_ATTENTION, {2, 61, 4, 2, 10, 10, 1, 3, 2, 0, 0, 7}, BOTH, "documents and a small window, GQA, no packs"},
    {OP_ATTENTION, {1, 67, 4, 2, 24, 24, 1, 0, 0, 200, 0, 20}, BOTH, "prefill after 200 keys, most out of reach"},
    {OP_ATTENTION, {1, 120, 4, 2, 24, 24, 1, 0, 0, 331, 1, 300}, BOTH, "prefill: rows with different first blocks"},
    {OP_ATTENTION, {1, 66, 2, 2, 16, 16, 1, 0, 0, 63, 0, 64}, BOTH, "prefill: the gathered W - 1 rows and a chunk"},
    {OP_ATTENTION, {1, 1, 4, 2, 16, 16, 1, 64, 0, 70, 1, 9}, BOTH, "one query after 70 keys, 9 in reach"},
    {OP_ATTENTION, {1, 5, 4, 2, 16, 16, 1, 64, 0, 70, 0, 1}, BOTH, "prefill with window 1"},
    {OP_ATTENTION, {1, 63, 2, 1, 64, 64, 1, 64}, CUDA_ONLY, "one before a tile of 64 keys"},
    {OP_ATTENTION, {1, 127, 1, 1, 96, 96, 1, 0}, CUDA_ONLY, "one before two tiles, D = 96"},
    {OP_ATTENTION, {1, 128, 2, 1, 64, 128, 1, 64}, CUDA_ONLY, "two tiles, wider values"},
    {OP_ATTENTION, {1, 129, 1, 1, 128, 128, 1, 0}, CUDA_ONLY, "one past two tiles, D = 128"},
    {OP_ATTENTION, {1, 500, 1, 1, 64, 64, 1, 64}, CUDA_ONLY, "many tiles"},
    {OP_ATTENTION, {1, 300, 2, 2, 128, 128, 1, 0, 2, 0, 0, 100}, CUDA_ONLY, "D = 128, documents and a window"},
    {OP_ATTENTION, {3, 2, 4, 2, 64, 64, 1, 0}, CUDA_ONLY, "two rows, several sequences"},
    {OP_ATTENTION, {2, 65, 2, 1, 64, 64, 1, 0, 0, 0, 0, 1}, CUDA_ONLY, "window 1, one past a tile of 64 keys"},
    {OP_ATTENTION, {1, 150, 4, 2, 64, 64, 1, 64, 0, 331, 1, 300}, CUDA_ONLY, "prefill, D = 64"},

    {OP_ATTENTION_SETS, {1, 1, 1, 1, 8, 16, 2, 0}, BOTH, "one key: dv is the sum of both gradients of the output"},
    {OP_ATTENTION_SETS, {2, 13, 6, 2, 8, 16, 2, 11}, BOTH, "diff_v1: values of width 2D, groups of 3, padded rows"},
    {OP_ATTENTION_SETS, {1, 7, 3, 3, 20, 40, 2, 64}, BOTH, "diff_scalar: half-width keys, values of a whole head"},
    {OP_ATTENTION_SETS, {1, 199, 2, 1, 8, 16, 2, 0}, BOTH, "beyond one block of keys"},
    {OP_ATTENTION_SETS, {1, 5, 2, 1, 256, 512, 2, 0}, BOTH, "the widest head, values of twice its width"},
    {OP_ATTENTION_SETS, {2, 77, 6, 2, 8, 16, 2, 11, 10}, BOTH, "diff_v1 with a window, groups of 3, padded rows"},
    {OP_ATTENTION_SETS, {1, 300, 2, 1, 8, 16, 2, 0, 33}, BOTH, "a window that skips blocks of keys"},
    {OP_ATTENTION_SETS,
     {1, 7, 3, 3, 20, 40, 2, 64, 1},
     BOTH,
     "window 1: dv is the sum of both gradients of the output"},

    {OP_SINKS, {1, 1, 1, 1, 8, 8, 0, 0}, BOTH, "one key besides the sink: dq and dk are not 0"},
    {OP_SINKS, {1, 1, 1, 1, 8, 8, 1, 0}, BOTH, "the same, learned"},
    {OP_SINKS, {2, 13, 6, 2, 16, 16, 0, 9}, BOTH, "off_by_one: groups, padded rows"},
    {OP_SINKS, {2, 13, 6, 2, 16, 16, 1, 9}, BOTH, "several sequences add to one gradient of a sink"},
    {OP_SINKS, {1, 67, 5, 1, 8, 40, 1, 0}, BOTH, "beyond one block; values wider than keys, no multiple of 16"},
    {OP_SINKS, {1, 7, 2, 1, 256, 256, 1, 0}, BOTH, "the widest head"},

    {OP_DIFF_COMBINE, {1, 1, 1, 1, 1, 1, S_SIGMOID}, BOTH, "one pair of one element"},
    {OP_DIFF_COMBINE, {7, 3, 8, 64, 1, 1, S_SIGMOID}, BOTH, "packs; odd NH; l in a row padded to 64"},
    {OP_DIFF_COMBINE, {13, 4, 40, 4, 1, 1, S_SIGMOID}, BOTH, "D is no multiple of 16"},
    {OP_DIFF_COMBINE, {7, 3, 8, 64, 3, 3, S_SIGMOID}, BOTH, "pairs (h, h + NH)"},
    {OP_DIFF_COMBINE, {3, 5, 256, 5, 5, 5, S_SIGMOID}, BOTH, "the widest head"},
    {OP_DIFF_COMBINE, {7, 3, 8, 64, 1, 1, S_LINEAR}, BOTH, "the factor is l itself"},
    {OP_DIFF_COMBINE, {5, 6, 128, 67, 6, 6, S_SIGMOID}, BOTH, "pairs (h, h + NH)"},
    {OP_DIFF_COMBINE, {33, 3, 10, 3, 1, 1, S_LINEAR}, BOTH, "no packs, no sigmoid"},
    {OP_DIFF_COMBINE, {9, 2, 256, 2, 1, 1, S_LINEAR}, BOTH, "width 256"},
    {OP_DIFF_COMBINE, {9, 3, 96, 5, 1, 1, S_SIGMOID}, BOTH, "D = 96: fewer lanes with several packs each"},
    {OP_DIFF_COMBINE, {9, 3, 80, 5, 3, 3, S_SIGMOID}, BOTH, "D = 80: the same, and not evenly"},
    {OP_DIFF_COMBINE, {3, 2, 520, 2, 1, 1, S_SIGMOID}, BOTH, "two packs per lane and part of a third"},
    {OP_DIFF_COMBINE, {5, 2, 75, 3, 1, 1, S_LINEAR}, BOTH, "the same without packs"},
    {OP_DIFF_COMBINE, {7, 6, 8, 64, 2, 1, S_SIGMOID}, BOTH, "two signal heads share a noise head"},
    {OP_DIFF_COMBINE, {5, 8, 128, 67, 4, 1, S_SIGMOID}, BOTH, "four signal heads share a noise head"},
    {OP_DIFF_COMBINE, {9, 4, 75, 5, 4, 1, S_LINEAR}, BOTH, "the same without packs, the factor is l itself"},
    {OP_DIFF_COMBINE, {3, 8, 520, 9, 4, 2, S_SIGMOID}, BOTH, "blocks of four signal heads and two noise heads"},

    {OP_DIFF_ATTENTION, {1, 1, 1, 1, 8, 8, 1, 0, S_SIGMOID}, BOTH, "one key: both maps are 1"},
    {OP_DIFF_ATTENTION, {2, 2, 2, 1, 8, 8, 1, 5, S_SIGMOID}, BOTH, "two keys; padded rows"},
    {OP_DIFF_ATTENTION, {1, 63, 2, 2, 16, 16, 1, 0, S_LINEAR}, BOTH, "one before a tile; s is l"},
    {OP_DIFF_ATTENTION, {1, 64, 2, 1, 64, 64, 1, 64, S_SIGMOID}, BOTH, "whole tiles"},
    {OP_DIFF_ATTENTION,
     {1, 40, 7, 7, 64, 64, 1, 0, S_SIGMOID},
     BOTH,
     "on a GPU sections of pairs, the last one smaller"},
    {OP_DIFF_ATTENTION, {1, 65, 2, 2, 24, 24, 1, 0, S_LINEAR}, BOTH, "one past a tile; negative factors"},
    {OP_DIFF_ATTENTION, {1, 97, 1, 1, 10, 10, 1, 3, S_SIGMOID}, BOTH, "one past a block of rows in C; no packs"},
    {OP_DIFF_ATTENTION, {1, 127, 2, 1, 40, 40, 1, 0, S_SIGMOID}, BOTH, "one before two tiles; D is no multiple of 16"},
    {OP_DIFF_ATTENTION, {1, 128, 1, 1, 128, 128, 1, 0, S_SIGMOID}, BOTH, "two tiles, D = 128"},
    {OP_DIFF_ATTENTION, {1, 129, 2, 2, 16, 24, 1, 0, S_SIGMOID}, BOTH, "one past two tiles; wider values"},
    {OP_DIFF_ATTENTION, {1, 193, 1, 1, 96, 96, 1, 0, S_SIGMOID}, BOTH, "one past a block of keys in C; D = 96"},
    {OP_DIFF_ATTENTION, {1, 389, 2, 1, 16, 16, 1, 3, S_SIGMOID}, BOTH, "three blocks of keys, five of rows, prime T"},
    {OP_DIFF_ATTENTION, {2, 70, 2, 1, 16, 16, 2, 0, S_SIGMOID}, BOTH, "two signal heads"},
    {OP_DIFF_ATTENTION, {1, 70, 2, 2, 16, 16, 4, 24, S_SIGMOID}, BOTH, "four signal heads"},
    {OP_DIFF_ATTENTION, {1, 130, 2, 2, 8, 8, 2, 0, S_LINEAR, 1}, BOTH, "two signal heads, documents"},
    {OP_DIFF_ATTENTION, {2, 200, 2, 1, 16, 16, 1, 64, S_SIGMOID, 1}, BOTH, "documents that skip tiles"},
    {OP_DIFF_ATTENTION,
     {2, 37, 2, 1, 16, 16, 1, 0, S_SIGMOID, 0, 1},
     BOTH,
     "window 1: the output is 1 - s of the value"},
    {OP_DIFF_ATTENTION, {1, 150, 2, 2, 16, 16, 1, 0, S_SIGMOID, 0, 70}, BOTH, "a window beyond a tile"},
    {OP_DIFF_ATTENTION, {1, 70, 1, 1, 16, 16, 1, 3, S_LINEAR, 0, 70}, BOTH, "a window of T"},
    {OP_DIFF_ATTENTION, {1, 500, 1, 1, 64, 64, 1, 0, S_SIGMOID}, CUDA_ONLY, "many tiles"},
    {OP_DIFF_ATTENTION, {2, 65, 4, 2, 64, 128, 1, 0, S_LINEAR, 1}, CUDA_ONLY, "documents, GQA, values of width 2D"},
    {OP_DIFF_ATTENTION, {1, 13, 1, 1, 256, 256, 1, 0, S_SIGMOID}, BOTH, "the widest head"},

    {OP_CACHE_STORE, {1, 1, 1, 1, 1, 0}, BOTH, "the smallest"},
    {OP_CACHE_STORE, {3, 1, 7, 16, 16, 6}, BOTH, "one row per sequence, at different positions"},
    {OP_CACHE_STORE, {3, 1, 7, 13, 20, 100}, BOTH, "a ring that was filled several times; no packs"},
    {OP_CACHE_STORE, {1, 5, 16, 24, 64, 0}, BOTH, "a prompt, in rows of a fused product; the other rows do not change"},
    {OP_CACHE_STORE, {2, 5, 7, 24, 64, 40}, BOTH, "a chunk across the end of the ring"},
    {OP_CACHE_STORE, {1, 37, 9, 8, 11, 5}, BOTH, "a chunk longer than the ring: its last rows stay"},
    {OP_CACHE_STORE, {2, 9, 9, 8, 8, 13}, BOTH, "a chunk as long as the ring"},
    {OP_CACHE_STORE, {1, 3, 5, 2568, 2600, 4}, BOTH, "rows wider than a block of packs"},
    {OP_CACHE_STORE, {2, 5, 7, 24, 64, -1}, BOTH, "without first: from position 0 on"},
    {OP_CACHE_STORE, {70, 2, 4, 9, 9, 3}, BOTH, "more rows than a block, no packs"},

    {OP_CACHE_LOAD, {0, 1, 1, 1}, BOTH, "the smallest"},
    {OP_CACHE_LOAD, {0, 5, 9, 24}, BOTH, "before the ring is full"},
    {OP_CACHE_LOAD, {40, 9, 9, 16}, BOTH, "all of the ring, in the order of positions"},
    {OP_CACHE_LOAD, {39, 6, 7, 13}, BOTH, "across the end of the ring; no packs"},
    {OP_CACHE_LOAD, {1, 3, 5, 2568}, BOTH, "rows wider than a block of packs"},
    {OP_CACHE_LOAD, {130, 130, 150, 9}, BOTH, "more rows than a block"},

    {OP_DECODE, {1, 1, 1, 8, 8, 1, 0, 1, 0}, BOTH, "one key: the output is its value"},
    {OP_DECODE, {3, 2, 2, 8, 8, 1, 0, 13, 12}, BOTH, "NKV = NQ, each sequence at its own position"},
    {OP_DECODE, {2, 6, 1, 16, 16, 1, 13, 40, 39}, BOTH, "one KV head for all queries; padded rows"},
    {OP_DECODE, {2, 6, 2, 10, 10, 1, 3, 40, 70, 1}, BOTH, "rings, full; groups of 3, no packs, no lse"},
    {OP_DECODE, {1, 4, 2, 64, 64, 1, 0, 700, 699}, BOTH, "several parts of the keys, the last partial"},
    {OP_DECODE, {1, 4, 2, 64, 64, 1, 0, 256, 255}, BOTH, "256 keys"},
    {OP_DECODE, {1, 4, 2, 64, 64, 1, 0, 257, 256}, BOTH, "257 keys"},
    {OP_DECODE, {1, 4, 2, 64, 64, 1, 0, 1000, 3}, BOTH, "few keys in a large cache"},
    {OP_DECODE, {5, 8, 2, 24, 24, 1, 0, 300, 600}, BOTH, "sequences with different numbers of parts; some rings"},
    {OP_DECODE, {1, 16, 2, 40, 40, 1, 0, 130, 129}, BOTH, "groups of 8; D is no multiple of a vector"},
    {OP_DECODE, {1, 12, 1, 128, 128, 1, 0, 130, 140}, BOTH, "a group of 12, D = 128"},
    {OP_DECODE, {1, 40, 1, 16, 16, 1, 0, 67, 60}, BOTH, "a group of 40"},
    {OP_DECODE, {2, 4, 2, 8, 16, 2, 6, 290, 289}, BOTH, "diff_v1: alternating key sets, values of width 2D"},
    {OP_DECODE, {2, 4, 2, 8, 16, 2, 6, 290, 289, 0, 1}, BOTH, "both key sets, of the same values"},
    {OP_DECODE, {3, 3, 1, 10, 20, 2, 3, 40, 70, 0, 1}, BOTH, "both key sets, lse of an odd number of rows; no packs"},
    {OP_DECODE, {1, 6, 2, 128, 256, 2, 0, 65, 64}, BOTH, "diff_v1, D = 128"},
    {OP_DECODE, {1, 3, 3, 20, 40, 2, 64, 7, 30}, BOTH, "diff_scalar: half-width keys, values of a whole head"},
    {OP_DECODE, {1, 2, 1, 256, 512, 1, 0, 70, 69}, BOTH, "the widest"},
    {OP_DECODE, {2, 5, 1, 1, 3, 1, 3, 9, 8}, BOTH, "the narrowest, a group of 5"},
    {OP_DECODE, {1, 20, 1, 8, 512, 1, 0, 20, 19}, BOTH, "a group of 20, values of 512: two blocks of heads"},
    {OP_DECODE, {200, 1, 1, 8, 8, 1, 0, 130, 140}, BOTH, "many sequences: one part of three turns each"},
};
static inline int attention_sizes(OpSize *list, const OpModel *m) {
    const int N = m->B * m->T, NH = m->NH, D = m->D, block = NH % 4 ? 1 : 4;
    const double L = m->L;
    const OpSize sizes[] = {
        {OP_ROPE, "", {m->B, m->T, m->rotated, m->QD, m->ld, 0}, {L, L}},
        {OP_DIFF_COMBINE, "", {N, NH, D, m->ld, 1, 1, S_SIGMOID}, {L, L}},
        {OP_DIFF_COMBINE, "shared", {N, NH, D, m->ld, block, 1, S_SIGMOID}, {0, 0}},
    };
    memcpy(list, sizes, sizeof(sizes));
    return OP_COUNT(sizes);
}
