/*
bench_cuda_attention.h: the time of a layer's attention in training, by the kernel of --attention-kernel. dev/gpu_check
runs both kernels in turns (dev/gpu_check/attention.py). Included after bench_cuda_kernels.h.
*/
#pragma once

// For each `forward` or `backward` on stdin, prints the milliseconds: the median of several. The first line is a row of
// llmc/ops/attention/attention_choice.h without times, and what computes attention.
static void run_attention_turns(const char *preset, const char *attention, int NKV, int B, int T, bool deterministic) {
    enum { FUSED, DFUSED, KEPT, DKEPT, OUT, DOUT, LSE };
    enum { POOL_SETS = 4 };
    Model m;
    plan_model(&m, preset, attention, NKV, B, T, FOR_TRAINING);
    const AttentionDims *d = &m.plan.dims;
    const KeySet k = key_set(&m.plan, 0, 0, B, T, 0);
    const AttentionShape s = k.shape;
    const bool group = m.plan.diff_attention;
    const Factor factor = m.plan.config.attention->factor;
    const size_t N = product(B, T), width = (size_t)d->DV;
    const int heads = heads_kept(&m.plan, 0), at = d->lambda_at, ld = d->fused_ld;
    KernelCase c = kernel_case("attention", 0, 0, "%s %s, B %d T %d", preset, attention, B, T);
    tensors(c, "xxxxxxf", N * (size_t)ld, N * (size_t)ld, N * (size_t)heads * width, N * (size_t)d->NQ * width,
            N * (size_t)s.ldo, N * (size_t)s.ldo, lse_set_stride(s));
    kernels_open(1, POOL_SETS * c.set_bytes);
    ops_init(m.plan.workspace_bytes);
    auto forward = [&](void **t) {
        floatX *x = (floatX *)t[FUSED];
        if (group)
            diff_attention_forward(activation((floatX *)t[OUT], NULL), (floatX *)t[KEPT], (real *)t[LSE], x + k.q,
                                   x + k.k, x + k.v, x + at, ld, s, factor);
        else attention_forward((floatX *)t[OUT], (real *)t[LSE], x + k.q, x + k.k, x + k.v, s);
    };
    auto backward = [&](void **t) {
        floatX *x = (floatX *)t[FUSED], *dx = (floatX *)t[DFUSED];
        if (group)
            diff_attention_backward(dx + k.q, dx + k.k, dx + k.v, dx + at, heads == d->NQ ? (floatX *)t[DKEPT] : NULL,
                                    (floatX *)t[DOUT], (floatX *)t[OUT], (floatX *)t[KEPT], (real *)t[LSE], x + k.q,
                                    x + k.k, x + k.v, x + at, ld, s, factor);
        else
            attention_backward(dx + k.q, dx + k.k, dx + k.v, (floatX *)t[DOUT], (floatX *)t[OUT], (real *)t[LSE],
                               x + k.q, x + k.k, x + k.v, s, false);
    };
    printf("{\"%s\", %d, %d, %d, %d, %s}: %s\n", ops_rated() ? ops_rated()->name : "unlisted",
           group ? d->groups.signals : 0, s.D, s.DV, T, deterministic ? "true" : "false", attention_backend());
    fflush(stdout);
    for (char what[16]; scanf("%15s", what) == 1; fflush(stdout)) {
        bool back = strcmp(what, "backward") == 0;
        CHECK(back || strcmp(what, "forward") == 0, "'%s': expected forward or backward", what);
        printf("%.5f\n", back ? kernel_ms(c, backward, forward) : kernel_ms(c, forward));
    }
    kernels_close();
    model_free(&m, false);
    attention_stop();
}
