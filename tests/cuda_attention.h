/*
cuda_attention.h: attention by cuDNN, and the statistics, against their C twins.
*/
#pragma once
#include "cuda_operations.h"

// First keys of random documents: not decreasing, at most the row itself. Each sequence has two documents or more.
static void fill_first_keys(Operand &first_key, int B, int T) {
    for (int b = 0; b < B; b++)
        for (int t = 0, start = 0; t < T; t++) {
            if (t == T / 2 || test_random_int(&test_random, min_int(40, T / 4 + 2)) == 0) start = t;
            first_key.set(product(b, T) + (size_t)t, start);
        }
}

// n: B T NQ NKV D DV, key sets, parts in which the columns of the values are computed (0: any), groups of heads of one
// sequence for which the workspace has room (0: no limit), the calls that are then expected (of documents: at least),
// the window, and whether there are documents, which cuDNN takes on an H200 or a B200. Where parts are given,
// cuDNN must take the shape; a shape that cuDNN may refuse is then computed by our kernel. cuDNN needs no workspace for
// a forward; its emulation requests as much as for the backward, so that both take the same number of calls.
#ifdef CUDA_ON_CPU
static const bool STAND_IN = true;
#else
static const bool STAND_IN = false;
#endif
// The emulation's answers depend on variables, which cases with a limit or documents set.
static void drop_plans(const Case *c) {
    if (STAND_IN && (c->n[8] || c->n[11])) attention_close();
    else attention_stop();
}
static bool prepare_library(const Case *c, AttentionShape s, bool split) {
    int parts = c->n[7], room = split ? c->n[8] : 0, calls = room ? c->n[9] : 1;
    bool documents = c->n[11] != 0;
    AttentionOptions use = {false, parts > 0 && !documents, true, documents};
    size_t limit = attention_limit;
    drop_plans(c);
    attention_configure(use);
    attention_fewest_parts = max_int(1, parts);
    if (room) { // the limit for this number of groups
        attention_prepare(s, true, true);
        const AttentionPlan *whole = attention_plan(s, true, false);
        size_t each = whole->plan_bytes / (size_t)max_int(1, whole->sequences);
        attention_limit = each / (size_t)s.NKV * (size_t)room;
        drop_plans(c);
        setenv("CUDA_ON_CPU_CUDNN_FORWARD", test_text("%zu", each), 1);
    }
    attention_prepare(s, true, true);
    unsetenv("CUDA_ON_CPU_CUDNN_FORWARD");
    const AttentionPlan *r = attention_plan(s, true, true), *forward = attention_plan(s, false, false);
    bool taken = r && forward && r->parts && forward->parts;
    EXPECT(taken || (documents ? !STAND_IN : !parts), "cuDNN does not support the shape");
    if (!taken) printf("     not by cuDNN: %s\n", r ? r->why : "no plan");
    else if (parts && !documents)
        EXPECT(r->parts == parts && attention_calls(r) == calls && (!STAND_IN || attention_calls(forward) == calls),
               "%d parts in %d calls (%d in the forward), not %d in %d", r->parts, attention_calls(r),
               attention_calls(forward), parts, calls);
    attention_fewest_parts = 1;
    attention_limit = limit;
    return taken;
}

// The rounding of P and dS to bf16 in sums of terms up to `size` whose results are little more than it.
static double library_error(double size) { return size * ROUND_STORE / ROUND_FP32; }

// Runs a pass, after its documents have been announced.
static void run_attention(Pass &pass, const Case *row, AttentionShape s, int calls) {
    int *list = nullptr;
    if (pass.c.documents) {
        list = (int *)buffer_alloc((product(s.B, s.T) + 1) * sizeof(int), "a list of documents");
        attention_documents(list, pass.index->i(), pass.index->twin_ints.data(), s.B * s.T, s.T);
        const AttentionPlan *p = attention_plan(s, true, false);
        EXPECT(!p->parts || (attention_calls(p) >= calls && (!row->n[7] || p->parts == row->n[7])),
               "%d calls for %d documents, in %d parts", attention_calls(p), attention_state.documents.count, p->parts);
    }
    pass.run();
    buffer_free(list);
}

static void check_attention_cudnn(const Case *row) {
    if (sizeof(floatX) != 2) return; // an error; tests/cuda/test_cuda_attention.py checks the message
    const int *n = row->n, sets = n[6], width = (n[2] + n[3]) * sets * n[4] + n[3] * n[5];
    const int padding = (int)round_up((size_t)width + 3, 64) - width, some = 0;
    const int d[OP_DIMS] = {n[0], n[1], n[2], n[3], n[4], n[5], sets, padding, n[11] ? 2 : 0, 0, 0, n[10]};
    OpCase c;
    op_describe(&c, OP_ATTENTION, d);
    AttentionShape s = op_attention_shape(&c);
    if (n[11]) s.first_key = &some;
    if (n[11] && STAND_IN) setenv("CUDA_ON_CPU_NAME", "H200", 1);
    if (prepare_library(row, s, true)) {
        c.y[0].error.absolute += library_error(2);
        c.y[1].error.absolute += 1024; // its exponentials and logarithms are the device's fast ones
        c.dx[0].error.absolute += library_error(1);
    }
    Pass forward(c, 0, 0);
    run_attention(forward, row, s, n[9]);
    forward.expect();
    for (int add_dv = 0; add_dv < 2; add_dv++) {
        c.x[0].view[2].adds = c.dx[0].view[2].adds = add_dv;
        Pass backward(c, 0, 0, &forward);
        std::vector<double> start = backward.dx[0]->twin;
        std::vector<unsigned char> bits[2];
        for (int split = 0; split < (n[8] ? 2 : 1); split++) { // in one call, and in several: the same bits
            prepare_library(row, s, split || !n[8]);
            backward.dx[0]->twin = start;
            run_attention(backward, row, s, split ? n[9] : 1);
            bits[split] = backward.dx[0]->result;
        }
        EXPECT(!n[8] || bits[0] == bits[1], "several calls give other bits than one");
        backward.expect();
    }
    drop_plans(row);
    if (n[11] && STAND_IN) unsetenv("CUDA_ON_CPU_NAME");
}
static const Check cudnn_check = {"attention cuDNN", check_attention_cudnn,
                                  "B T NQ NKV D DV sets parts room calls window documents"};

// One number of q and one of k are NaN: so are the rows that read them, and no others. n: T NQ NKV D window pairs
static void check_attention_nan(const Case *row) {
    const int *n = row->n, T = n[0], NQ = n[1], D = n[3], ld = (NQ + 2 * n[2]) * D, OH = n[5] ? NQ / 2 : NQ,
              key = T / 2;
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = 1, s.T = T, s.NQ = NQ, s.NKV = n[2], s.D = s.DV = D, s.window = n[4];
    s.ldq = s.ldkv = ld, s.ldo = OH * D;
    s.q_head = s.k_head = s.v_head = s.o_head = D;
    s.scale = (real)(1 / sqrt((double)D));
    s.groups.signals = s.groups.noise = n[5];
    Operands o(0);
    Operand &x = o.in("q, k and v", product(T, ld), 2), &l = o.in("l", product(T, OH), 6);
    Operand &out = o.out("out", product(T, s.ldo)), &lse = o.out_fp32("lse", product(NQ, T));
    Operand &kept = o.out("kept", product(T, NQ * D));
    x.set(product(T - 2, ld), NAN);                // q of the first head
    x.set(product(key, ld) + product(NQ, D), NAN); // k of the first head
    const AttentionOptions builtin = {true, false, false, false}, none = {false, false, false, false};
    attention_configure(builtin);
    o.run(attention_workspace_bytes(s, 1), [&] {
        const floatX *k = x.x() + NQ * D, *v = k + n[2] * D;
        Activation o_out = activation(out.x(), nullptr);
        if (n[5]) diff_attention_forward(o_out, kept.x(), lse.f(), x.x(), k, v, l.x(), OH, s, S_SIGMOID);
        else attention_forward(out.x(), lse.f(), x.x(), k, v, s);
    });
    attention_configure(none);
    for (int i = 0; i < T * NQ; i++) {
        int t = i / NQ, h = i % NQ, map = n[5] ? 2 : 1, first = h / map * map;
        bool of_k = h / (NQ / n[2]) == 0 && t >= key && (!s.window || t < key + s.window);
        bool stat = isnan(lse.value(lse.result, product(h, T) + (size_t)t));
        size_t at = product(t, s.ldo) + product(h / map, D) + (size_t)(t % D);
        EXPECT(stat == (of_k || (t == T - 2 && h == 0)), "lse of row %d of head %d: %s", t, h, stat ? "NaN" : "no NaN");
        EXPECT(isnan(out.value(out.result, at)) == (of_k || (t == T - 2 && first == 0)), "row %d of head %d", t, h);
    }
}
static const Check attention_nan_check = {"attention of NaN", check_attention_nan, "T NQ NKV D window pairs"};

// The backward with the rotation, against the backward and then rope_backward, which rounds each gradient once more. By
// a kernel that includes the rotation other bits, otherwise the same. n: T NQ NKV D pairs, sets of keys, of which the
// first is used, and whether the keys are rotated
static void check_attention_rotated(const Case *row) {
    const int *n = row->n, B = 2, T = n[0], NQ = n[1], NKV = n[2], D = n[3], sets = n[5], heads = NQ + (n[6] ? NKV : 0);
    const int OH = n[4] ? NQ / 2 : NQ, k_at = sets * NQ * D, v_at = k_at + sets * NKV * D, ld = v_at + NKV * D;
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = B, s.T = T, s.NQ = NQ, s.NKV = NKV, s.D = s.DV = D, s.ldq = s.ldkv = ld, s.ldo = OH * D;
    s.q_head = s.k_head = sets * D, s.v_head = s.o_head = D, s.scale = (real)(1 / sqrt((double)D));
    s.groups.signals = s.groups.noise = n[4];
    Operands o(0);
    const size_t N = product(B, T), count = N * (size_t)ld;
    Operand &x = o.in("q, k and v", count, 2), &l = o.in("l", N * (size_t)OH, 6),
            &dout = o.in("dout", N * (size_t)s.ldo);
    Operand &out = o.out("out", dout.count), &lse = o.out_fp32("lse", N * (size_t)NQ),
            &table = o.in_fp32("table", product(T, D));
    Operand &kept = o.out("kept", N * (size_t)(NQ * D)), &dkept = o.out("dkept", kept.count),
            &dl = o.out("dl", l.count);
    Operand *dx[2] = {&o.updated("dx", count), &o.updated("dx in two steps", count)};
    dx[1]->initial = dx[0]->initial; // the heads of the other set
    std::vector<real> angles(table.count);
    rope_table(angles.data(), T, D, OP_THETA);
    for (size_t i = 0; i < table.count; i++) table.set(i, (double)angles[i]);
    const AttentionOptions builtin = {true, false, false, false}, none = {false, false, false, false};
    attention_configure(builtin);
    o.run(attention_workspace_bytes(s, 1), [&] {
        const floatX *q = x.x(), *k = q + k_at, *v = q + v_at;
        Activation o_out = activation(out.x(), nullptr);
        if (n[4]) diff_attention_forward(o_out, kept.x(), lse.f(), q, k, v, l.x(), OH, s, S_SIGMOID);
        else attention_forward(out.x(), lse.f(), q, k, v, s);
        for (int steps = 1; steps <= 2; steps++) {
            floatX *dq = dx[steps - 1]->x(), *dk = dq + k_at, *dv = dq + v_at;
            s.rope = steps == 1 ? table.f() : nullptr, s.rope_heads = heads;
            if (n[4])
                diff_attention_backward(dq, dk, dv, dl.x(), dkept.x(), dout.x(), out.x(), kept.x(), lse.f(), q, k, v,
                                        l.x(), OH, s, S_SIGMOID);
            else attention_backward(dq, dk, dv, dout.x(), out.x(), lse.f(), q, k, v, s, false);
            if (steps == 2) rope_backward(dq, table.f(), B, T, heads, D, ld, s.q_head, nullptr);
        }
    });
    attention_configure(none);
    size_t others = 0, wrong = 0;
    for (size_t i = 0; i < count; i++) {
        int head = (int)(i % (size_t)ld) / D, pair = i % (size_t)D < (size_t)D / 2 ? D / 2 : -D / 2;
        double a = dx[0]->value(dx[0]->result, i), b = dx[1]->value(dx[1]->result, i);
        if (a == b) continue;
        bool rotated = head < sets * heads && head % sets == 0;
        double size = hypot(b, dx[1]->value(dx[1]->result, (size_t)((ptrdiff_t)i + pair)));
        others++, wrong += !rotated || !(fabs(a - b) <= 3.03 * ROUND_STORE * size);
    }
    const bool fused = sizeof(floatX) == 2 && (D == 64 || D == 128) && !hopper_heads(D, D);
    EXPECT(wrong == 0 && (others > 0) == fused, "%zu of %zu numbers differ, %zu of them too much", others, count,
           wrong);
}
static const Check attention_rotated_check = {"attention rotated", check_attention_rotated,
                                              "T NQ NKV D pairs sets keys"};

static inline twin::AttentionShape twin_shape(AttentionShape s, const int *first_key) {
    twin::AttentionShape r;
    memset(&r, 0, sizeof(r));
    r.B = s.B, r.T = s.T, r.query_offset = s.query_offset;
    r.NQ = s.NQ, r.NKV = s.NKV, r.D = s.D, r.DV = s.DV;
    r.ldq = s.ldq, r.ldkv = s.ldkv, r.ldo = s.ldo;
    r.q_head = s.q_head, r.k_head = s.k_head, r.v_head = s.v_head, r.o_head = s.o_head;
    r.scale = (double)s.scale;
    r.window = s.window;
    r.first_key = first_key;
    r.groups.signals = s.groups.signals, r.groups.noise = s.groups.noise;
    return r;
}

// Block-sparse attention in training, and with documents unless there is one sequence: then its last row is decoded
// from a cache too. n: B T NQ NKV D DV blocks size window
static void check_attention_sparse(const Case *row) {
    const int *n = row->n, B = n[0], T = n[1], NQ = n[2], NKV = n[3], D = n[4], DV = n[5];
    const int k_at = NQ * D, v_at = k_at + NKV * D, ld = (int)round_up((size_t)(v_at + NKV * DV), 8);
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = B, s.T = T, s.NQ = NQ, s.NKV = NKV, s.D = D, s.DV = DV, s.ldq = s.ldkv = ld, s.ldo = NQ * DV;
    s.q_head = s.k_head = D, s.v_head = s.o_head = DV, s.scale = (real)(1 / sqrt((double)D)), s.window = n[8];
    s.sparse.blocks = n[6], s.sparse.size = n[7], s.sparse.count = T / n[7];
    const size_t N = product(B, T), lists = product(B * NKV, sparse_width(s.sparse));
    Operands o(row->shift);
    Operand &x = o.in("q, k and v", N * (size_t)ld, 2), &dout = o.in("dout", N * (size_t)s.ldo);
    Operand &out = o.out("out", dout.count), &lse = o.out_fp32("lse", N * (size_t)NQ), &dx = o.updated("dx", x.count);
    Operand &means = o.out_fp32("means", product(B * s.sparse.count, NKV * D)),
            &list = o.out_ints("lists", lists * (size_t)T), &last_list = o.out_ints("the last row's lists", lists);
    Operand &first_key = o.ints("first_key", N, 1), &first = o.ints("first", (size_t)B, 1);
    Operand &last = o.out("the last row", (size_t)s.ldo), &last_lse = o.out_fp32("its lse", (size_t)NQ);
    if (B > 1) fill_first_keys(first_key, B, T);
    first.set(0, T - 1);
    AttentionShape one = s;
    one.T = 1, one.ldq = T * ld;
    const size_t last_row = product(T - 1, ld);
    const bool decodes = B == 1 && !s.window;
    if (B > 1) s.first_key = first_key.i();
    s.sparse.lists = list.i(), one.sparse.lists = last_list.i();
    o.run(sparse_attention_workspace_bytes(s, 1), [&] {
        const floatX *q = x.x(), *k = q + k_at, *v = q + v_at;
        floatX *dq = dx.x();
        sparse_means(means.f(), k, nullptr, T, 1, s);
        sparse_select(list.i(), q, means.f(), nullptr, 1, s);
        sparse_attention_forward(out.x(), lse.f(), q, k, v, nullptr, 0, s);
        sparse_attention_backward(dq, dq + k_at, dq + v_at, dout.x(), out.x(), lse.f(), q, k, v, s, true);
        if (!decodes) return;
        sparse_select(last_list.i(), q + last_row, means.f(), first.i(), 1, one);
        sparse_attention_forward(last.x(), last_lse.f(), q + last_row, k, v, first.i(), T, one);
    });
    twin::AttentionShape t = twin_shape(s, B > 1 ? first_key.twin_ints.data() : nullptr);
    memcpy(&t.sparse, &s.sparse, sizeof(t.sparse));
    t.sparse.lists = list.twin_ints.data();
    twin_workspace(twin::sparse_attention_workspace_bytes(t, omp_get_max_threads()));
    double *q = x.t(), *k = q + k_at, *v = q + v_at, *dq = dx.t();
    twin::sparse_means(means.t(), k, nullptr, T, 1, t);
    twin::sparse_select(list.twin_ints.data(), q, means.t(), nullptr, 1, t);
    o.expect_ints(list);
    twin::sparse_attention_forward(out.t(), lse.t(), q, k, v, nullptr, 0, t);
    for (int i = 0; i < (decodes ? s.ldo : 0); i++) last.twin[(size_t)i] = out.twin[product(T - 1, s.ldo) + (size_t)i];
    const double error = 16 * error_of_sum(T);
    o.expect(out, {0, error});
    o.expect(lse, {0, error});
    if (decodes) o.expect(last, {0, error});
    for (size_t i = 0; i < out.count; i++) out.twin[i] = out.value(out.result, i); // which the backward reads
    twin::sparse_attention_backward(dq, dq + k_at, dq + v_at, dout.t(), out.t(), lse.t(), q, k, v, t, true);
    o.expect(dx, {0, 8 * error});
}
static const Check attention_sparse_check = {"attention sparse", check_attention_sparse,
                                             "B T NQ NKV D DV blocks size window"};

#ifdef CUDA_ON_CPU
// The calls of a deterministic backward whose workspace is limited, down to one group of heads of one sequence. n: B T
// NQ NKV D, limit in MiB, sequences and groups per call, whether they exceed the limit
static void check_attention_split(const Case *c) {
    const int *n = c->n;
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = n[0], s.T = n[1], s.NQ = n[2], s.NKV = n[3], s.D = s.DV = n[4], s.scale = 1;
    s.q_head = s.k_head = s.v_head = s.o_head = s.D;
    s.ldq = s.ldkv = (s.NQ + 2 * s.NKV) * s.D, s.ldo = s.NQ * s.D;
    const AttentionOptions use = {false, false, true, false};
    size_t before = attention_limit;
    attention_configure(use);
    attention_limit = (size_t)n[5] << 20;
    attention_prepare(s, true, false);
    const AttentionPlan *p = attention_plan(s, true, false);
    EXPECT(sizeof(floatX) != 2 || (p->sequences == n[6] && p->groups == n[7]), "%d sequences and %d groups per call",
           p->sequences, p->groups);
    EXPECT(sizeof(floatX) != 2 || n[8] == (p->plan_bytes > attention_limit), "%zu bytes", p->plan_bytes);
    attention_stop();
    attention_limit = before;
}
static const Check attention_split_check = {"attention split", check_attention_split,
                                            "B T NQ NKV D limit sequences groups exceeds"};

// cuDNN is asked once for each description, also for one that it refuses. n: heads' width, descriptions (0: any number)
static void check_attention_answers(const Case *c) {
    AttentionShape s;
    if (sizeof(floatX) != 2) return; // not asked
    memset(&s, 0, sizeof(s));
    s.B = 2, s.T = 64, s.NQ = 4, s.NKV = 2, s.D = s.DV = c->n[0], s.scale = 1;
    s.q_head = s.k_head = s.v_head = s.o_head = s.D;
    s.ldq = s.ldkv = (s.NQ + 2 * s.NKV) * s.D, s.ldo = s.NQ * s.D;
    const AttentionOptions loose = {false, false, false, false}, exact = {false, false, true, false};
    uint64_t asked[4];
    attention_close();
    for (int time = 0; time < 4; time++) { // at first; again; other backwards; at the next start
        const uint64_t before = cuda_on_cpu::cudnn_plans_asked();
        attention_configure(time == 2 ? loose : exact);
        attention_prepare(s, true, true);
        asked[time] = cuda_on_cpu::cudnn_plans_asked() - before;
        EXPECT((attention_plan(s, true, true)->parts > 0) == (c->n[1] > 0), "%s", attention_plan(s, true, true)->why);
        if (time == 2) attention_close();
        else attention_stop();
    }
    EXPECT(asked[0] > 0 && (!c->n[1] || (int)asked[0] == c->n[1]), "asked %d times", (int)asked[0]);
    EXPECT(asked[1] == 0 && (!c->n[1] || (int)asked[2] == c->n[1] - 1) && asked[3] == asked[0],
           "asked %d times again, %d times for other backwards, %d times at the next start", (int)asked[1],
           (int)asked[2], (int)asked[3]);
    attention_close();
}
static const Check attention_answers_check = {"attention answers", check_attention_answers, "D descriptions"};

// The kernel of both directions on a device that has been measured, and what a run prints about the choice. n: T,
// signal heads of a group, window, whether there are documents, the kernel (1: own, 2: cudnn), whether the device
// has been measured; whether the built-in kernel computes the forward, and the backward
static void check_attention_choice(const Case *c) {
    static const AttentionTimes rows[] = {{"B200", 1, 16, 16, 64, true, {2, 8}, {4, 4}},
                                          {"B200", 1, 16, 16, 512, true, {2, 8}, {10, 10}},
                                          {"B200", 0, 16, 16, 64, true, {3, 8}, {4, 4}},
                                          {NULL, 0, 0, 0, 0, false, {0, 0}, {0, 0}}};
    const int *n = c->n, signals = n[1], units = 2;
    const bool bf16 = sizeof(floatX) == 2;
    AttentionShape s;
    if (n[4] == 2 && !bf16) return; // cuDNN refuses fp32
    memset(&s, 0, sizeof(s));
    s.B = 1, s.T = n[0], s.NQ = units * (signals + 1), s.NKV = units, s.D = s.DV = 16, s.scale = 1, s.window = n[2];
    s.q_head = s.k_head = s.v_head = s.o_head = s.D;
    s.ldq = s.ldkv = (s.NQ + 2 * s.NKV) * s.D, s.ldo = units * max_int(1, signals) * s.D;
    s.groups.signals = signals, s.groups.noise = signals > 0;
    const AttentionOptions use = {n[4] == 1, n[4] == 2, true, n[3] != 0};
    setenv("CUDA_ON_CPU_NAME", n[5] ? "NVIDIA B200" : "NVIDIA H200", 1);
    attention_times = rows;
    attention_configure(use);
    attention_prepare(s, true, false);
    for (int i = 0; i < attention_state.count; i++)
        EXPECT(!bf16 || (attention_state.plans[i].parts == 0) == (n[6 + i] != 0), "plan %d: %d parts", i,
               attention_state.plans[i].parts);
    const double speed = signals ? (n[0] > 180 ? 0.5 : 1.25)
                         : n[6]  ? 0.75
                                 : 2; // of both directions, or of the backward
    const bool measured = n[5] && !n[2] && !n[3];
    const char *why = n[4] == 1   ? "(--attention-kernel own)"
                      : n[4] == 2 ? "(--attention-kernel cudnn)"
                      : !measured ? "(the default, not measured on this GPU)"
                      : n[7]      ? test_text("(%.2f times as fast as cuDNN on this GPU)", speed)
                                  : test_text("(%.2f times as fast as the built-in kernel on this GPU)", 1 / speed);
    const char *text = attention_backend();
    EXPECT(!bf16 || strstr(text, why), "'%s' does not contain '%s'", text, why);
    EXPECT(!bf16 || !attention_state.plans[0].parts == (n[6] != 0), "parts of cuDNN: %d",
           attention_state.plans[0].parts);
    EXPECT(!bf16 || !attention_warning(), "a warning");
    attention_stop();
    attention_times = attention_measured;
    unsetenv("CUDA_ON_CPU_NAME");
}
static const Check attention_choice_check = {"attention choice", check_attention_choice,
                                             "T signals window documents sdpa measured forward backward"};
#endif

// ---------------------------------------------------------------------------------------------------
// Statistics

static void expect_number(const char *what, double got, double want, double tolerance) {
    EXPECT(isnan(want) ? isnan(got) : got == want || fabs(got - want) <= tolerance * fmax(1, fabs(want)),
           "%s is %.12g, the twin's %.12g", what, got, want);
}
// n: rows, heads, ldl, width
static void check_means(const Case *c) {
    int N = c->n[0], NH = c->n[1], ldl = c->n[2], D = c->n[3];
    for (int special = 0; special < 2; special++) {
        Operands o(c->shift);
        Operand &l = o.in("l", product(N, ldl), 6), &x = o.in("x", product(N, D), 3);
        if (special) l.set(product(N - 1, ldl) + (size_t)(NH - 1), NAN), x.set(0, NAN);
        o.run(0, [&] {
            for (int f = S_LINEAR; f <= S_SIGMOID; f++)
                expect_number("lambda", lambda_mean(l.x(), N, NH, ldl, (Factor)f),
                              twin::lambda_mean(l.t(), N, NH, ldl, (Factor)f), 1e-12);
            expect_number("rms", rms_mean(x.x(), N, 1, D, D), twin::rms_mean(x.t(), N, 1, D, D), 1e-12);
            if (N > 1 && D > 1)
                expect_number("rms of heads", rms_mean(x.x(), N / 2, 2, D / 2, 2 * D),
                              twin::rms_mean(x.t(), N / 2, 2, D / 2, 2 * D), 1e-12);
            expect_number("the largest magnitude", magnitude_max(x.x(), N, D), twin::magnitude_max(x.t(), N, D), 0);
        });
    }
}
static const Check means_check = {"lambda_mean, rms_mean, magnitude_max", check_means, "N NH ldl D"};

static void check_update_squares(const Case *c) {
    size_t count = (size_t)c->n[0];
    Operands o(c->shift);
    Operand &g = o.in_fp32("grads", count), &m = o.in_fp32("m", count), &v = o.in_fp32("v", count);
    for (size_t k = 0; k < count; k++) v.set(k, fabs(v.twin[k]) + 0.01);
    double want = twin::update_squares(g.t(), m.t(), v.t(), count, 0.5, 1e-3, 0.9, 0.95, 1e-8, 7);
    o.run(0, [&] {
        double got = update_squares(g.f(), m.f(), v.f(), count, 0.5, 1e-3, 0.9, 0.95, 1e-8, 7);
        expect_number("the squares of the update", got, want, 1e-6);
    });
}
static const Check update_squares_check = {"update_squares", check_update_squares, "count"};

static __global__ void attention_order_kernel(AttentionTile *order, int rows) {
    if (threadIdx.x == 0) order[(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = attention_tile(rows);
}

// The order of blocks: each tile once, the longest of a section first. The keys and values of a section fit in the
// cache, and use at least half of it if there are enough heads. n: B, NQ, NKV, T, rows of a tile
static void check_attention_order(const Case *c) {
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = c->n[0], s.NQ = c->n[1], s.NKV = c->n[2], s.T = c->n[3], s.D = s.DV = 128;
    const int rows = c->n[4], tiles = (s.T + rows - 1) / rows, heads = s.B * s.NQ, group = s.NQ / s.NKV;
    const size_t fit = max_size(1, ATTENTION_SECTION / (product(s.T, 2 * 128) * sizeof(floatX)));
    const dim3 grid = attention_grid(s, s.NQ, rows);
    std::vector<AttentionTile> order(grid.x * grid.y * grid.z);
    AttentionTile *buffer = (AttentionTile *)buffer_alloc(order.size() * sizeof(AttentionTile), "a test");
    LAUNCH(attention_order_kernel, grid, WARP, 0, buffer, rows);
    buffer_download(order.data(), buffer, order.size() * sizeof(AttentionTile));
    buffer_free(buffer);
    std::vector<int> seen(product(heads, tiles)), section_of(product(s.B, s.NKV), -1), in_section(1);
    int before = INT_MAX;
    for (AttentionTile at : order) {
        if (at.t0 > before) in_section.push_back(0);
        before = at.t0;
        if (at.head >= heads) continue;
        seen[product(at.head, tiles) + (size_t)(at.t0 / rows)]++;
        int &section = section_of[(size_t)(at.head / group)], now = (int)in_section.size() - 1;
        if (section < 0) section = now, in_section.back()++;
        EXPECT(section == now, "head %d is in sections %d and %d", at.head, section, now);
    }
    EXPECT(std::count(seen.begin(), seen.end(), 1) == (ptrdiff_t)seen.size(), "a tile is not computed once");
    const size_t most = (size_t)*std::max_element(in_section.begin(), in_section.end());
    EXPECT(most <= fit && 2 * most > min_size(fit, product(s.B, s.NKV)), "%zu of %zu heads in a section", most, fit);
}
static const Check attention_order_check = {"the order of attention's blocks", check_attention_order,
                                            "B NQ NKV T rows"};

// n: B, T, output heads, signal and noise heads per block (0: one map), key sets, documents, window. Packs if 8 divides
// T.
static void check_attention_stats(const Case *c) {
    int B = c->n[0], T = c->n[1], NH = c->n[2], sets = c->n[5], documents = c->n[6], D = T % 8 ? 12 : 16;
    const HeadGroups groups = {c->n[3], c->n[4]};
    const Factor factor = sets > 1 || groups.signals > 1 ? S_LINEAR : S_SIGMOID;
    const bool two = groups.noise > 0;
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = B, s.T = T, s.NQ = (NH + (two ? NH / groups.signals * groups.noise : 0)) / sets,
    s.NKV = s.NQ > 1 && s.NQ % 2 == 0 ? s.NQ / 2 : s.NQ, s.D = D, s.DV = D;
    s.q_head = s.k_head = sets * D;
    int q_width = s.NQ * sets * D, ld = q_width + s.NKV * sets * D + (T % 8 ? 1 : 8), ldl = NH + 2;
    s.ldq = s.ldkv = ld;
    s.scale = (float)(1 / sqrt((double)D));
    s.window = c->n[7];
    Operands o(c->shift);
    Operand &fused = o.in("q and k", product(B * T, ld), 2), &l = o.in("l", product(B * T, ldl), 3);
    Operand &lse = o.in_fp32("lse", (size_t)sets * lse_set_stride(s)),
            &first_key = o.ints("first_key", product(B, T), 1);
    if (documents) fill_first_keys(first_key, B, T);
    for (size_t k = 0; k < lse.count; k++) lse.set(k, 3 + lse.twin[k]); // as with sinks
    s.first_key = documents ? first_key.i() : nullptr;
    twin::AttentionShape t = twin_shape(s, documents ? first_key.twin_ints.data() : nullptr);
    twin::AttentionStats want = twin::attention_stats(fused.t(), fused.t() + q_width, lse.t(), two ? l.t() : nullptr, t,
                                                      sets, ldl, groups, factor);
    // with documents: seven rows at a time
    if (documents) attention_stats_limit = 7 * (size_t)NH * sizeof(AttentionHeadStats);
    o.run(0, [&] {
        AttentionStats got = attention_stats(fused.x(), fused.x() + q_width, lse.f(), two ? l.x() : nullptr, s, sets,
                                             ldl, groups, factor);
        double error = ROUND_FP32 * 4 * error_of_sum(D); // products q.k in fp32
        expect_number("effective mass", got.first_position_share, want.first_position_share, 16 * error);
        expect_number("largest logit", got.largest_logit, want.largest_logit, error);
    });
    attention_stats_limit = SCRATCH_BYTES;
}
static const Check attention_stats_check = {"attention_stats", check_attention_stats,
                                            "B T heads signals noise sets documents window"};
