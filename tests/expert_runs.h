/*
expert_runs.h: a test of a rollback with experts; tests/programs/test_experts.py tests whole runs.
*/
#pragma once
#include "program.h"
#include "spikes.h"

// Two steps and a checkpoint, two bad steps, a rollback, and two steps on the data that follow. Not back: the data of
// the bad steps are passed over.
typedef struct {
    floatX *params;
    real *moments; // m, then v
    size_t params_bytes, moments_bytes;
    double aux, z;  // of the last step
    size_t changed; // weights that the bad steps changed
} RolledBack;
static RolledBack run_rolled_back(const TestDirectory *d, const char *gemm, bool back) {
    StepResult last;
    memset(&last, 0, sizeof(last));
    InnerRun *inner = inner_open(
        d,
        "--experts 4 --experts-active 2 --expert-ffn 16 --router-bias --router-bias-rate 0.01 --router-aux 0.1 "
        "--total-batch 128 --gemm %s --rollback 1:1 --lr 1e-2 --checkpoint-every 9 "
        "--out %s/%s%d",
        gemm, d->path, gemm, back);
    Run *run = &inner->run;
    Model *model = &run->model;
    size_t params_bytes = model->plan.params_bytes, moments_bytes = model->plan.moments_bytes;
    RolledBack r = {(floatX *)checked_calloc(1, params_bytes),
                    (real *)checked_calloc(1, moments_bytes),
                    params_bytes,
                    moments_bytes,
                    0,
                    0,
                    0};
    for (int step = 0; step < 2; step++) run_step(run);
    checkpointer_save(&run->checkpointer, false);
    memcpy(r.params, model->state.params, params_bytes);
    if (back) {
        for (int step = 0; step < 2; step++) run_step(run);
        for (size_t i = 0; i < params_bytes / sizeof(floatX); i++) r.changed += r.params[i] != model->state.params[i];
        int B = model->plan.B, T = model->plan.T, *tokens = case_tokens(B * T + 1, 256, 3);
        case_loss(model, tokens, B, T, false); // makes rounded copies of the weights, as a validation does
        free(tokens);
        rollback_record_step(&run->state.rollback, run->state.step, true);
        checkpointer_roll_back(&run->checkpointer);
    } else {
        uint64_t of_step = run->state.next_window / 2;
        dataloader_start(&run->data.train, run->state.next_window + 2 * of_step);
    }
    EXPECT(run->state.step == 2 && run->state.updates == 2 && run->state.tokens == 2 * 128,
           "%s: the run is at step %d, %d tokens", gemm, (int)run->state.step, (int)run->state.tokens);
    for (int step = 0; step < 2; step++) last = run_step(run);
    memcpy(r.params, model->state.params, params_bytes);
    memcpy(r.moments, model->state.m, moments_bytes);
    r.aux = last.router_aux, r.z = last.router_z;
    const Tensor *bias = tensor_of(&model->plan.tensors, T_ROUTER_BIAS, 1);
    double moved = 0;
    for (size_t e = 0; e < bias->count; e++) moved += fabs((double)r.params[bias->offset + e]);
    EXPECT(moved > 0, "%s: the biases are %g in sum", gemm, moved);
    inner_close(inner);
    return r;
}

static void test_expert_rollback(void) {
    static const char *const gemms[] = {"fp32", "bf16", "fp8"}; // the last two: with rounded copies of the weights
    TestDirectory d = program_data();
    for (int i = 0; i < 3; i++) {
        RolledBack skipped = run_rolled_back(&d, gemms[i], false), back = run_rolled_back(&d, gemms[i], true);
        EXPECT(back.changed > 1000, "%s: the bad steps changed %zu weights", gemms[i], back.changed);
        EXPECT(memcmp(skipped.params, back.params, back.params_bytes) == 0, "%s: other weights after a rollback",
               gemms[i]);
        EXPECT(memcmp(skipped.moments, back.moments, back.moments_bytes) == 0, "%s: other moments after a rollback",
               gemms[i]);
        EXPECT(skipped.aux == back.aux && skipped.z == back.z && back.aux > 0 && back.z > 0,
               "%s: the routers' losses are %.9g and %.9g, after a rollback %.9g and %.9g", gemms[i], skipped.aux,
               skipped.z, back.aux, back.z);
        free(skipped.params);
        free(skipped.moments);
        free(back.params);
        free(back.moments);
    }
}

static const Test expert_runs_tests[] = {
    {"a run with experts that was rolled back equals one that passed over the same data", test_expert_rollback},
};
