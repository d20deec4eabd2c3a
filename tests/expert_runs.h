/*
expert_runs.h: tests of the trainer with experts, as its user runs it: whole runs, resumes, and mistakes in options.
*/
#ifndef TESTS_EXPERT_RUNS_H
#define TESTS_EXPERT_RUNS_H
#include "program.h"
#include "spikes.h"

// Trains "whole" without and "parts" with an interruption after half of the steps, and compares their weights.
static void expect_resumed(const ProgramData *d, const char *experts, int steps) {
    ProgramResult r;
    char options[1024];
    const char *dir = d->dir.path;
    FORMAT(options, "%s --steps %d --checkpoint-every %d", experts, steps, steps / 2);
    run_trainer(&r, d, "whole", options);
    EXPECT_STATUS(r, 0);
    FORMAT(options, "%s --steps %d --checkpoint-every %d --stop-after %d", experts, steps, steps / 2, steps / 2);
    run_trainer(&r, d, "parts", options);
    EXPECT_STATUS(r, 0);
    run_command(&r, "%s --resume --out '%s/parts' --stop-after %d", test_program(), dir, steps);
    EXPECT_STATUS(r, 0);
    run_command(
        &r,
        "cd '%s' && cmp whole/checkpoints/step_%08d/model.safetensors parts/checkpoints/step_%08d/model.safetensors",
        dir, steps, steps);
    EXPECT(r.status == 0, "a resumed run has other weights: %.200s", r.out);
}

// A run with a bias is resumed bit for bit, from a model whose class has the bias.
static void test_router_bias_resumes(void) {
    ProgramData d = program_data();
    ProgramResult r;
    const char *dir = d.dir.path, *experts = "--experts 8 --experts-active 2 --expert-ffn 16 --router-bias "
                                             "--router-bias-rate 0.01 --lr 2e-2";
    expect_resumed(&d, experts, 8);
    run_command(&r, "grep '\"model_type\": \"diffv2\"' '%s/parts/checkpoints/step_00000008/config.json'", dir);
    EXPECT(r.status == 0, "the class is another: %.200s", r.err);
    char path[600];
    float bias[8];
    int moved = 0;
    FORMAT(path, "%s/whole/checkpoints/step_00000008", dir);
    SafeTensors *s = safetensors_open(path);
    safetensors_read(s, "model.layers.1.block_sparse_moe.gate.e_score_correction_bias", 0, 8, bias, DTYPE_F32);
    safetensors_close(s);
    for (int e = 0; e < 8; e++) { // eight updates of -0.01, 0 or 0.01
        double steps = (double)bias[e] / 0.01;
        moved += bias[e] != 0;
        EXPECT(fabs(steps) < 8.01 && fabs(steps - round(steps)) < 1e-4, "the bias of expert %d is %g", e,
               (double)bias[e]);
    }
    EXPECT(moved >= 2, "%d of 8 experts have a bias", moved);
    run_command(&r, "%s --init '%s/whole/checkpoints/step_00000008' --no-router-bias --eval --val-data '%s/val.bin'",
                test_program(), dir, dir);
    EXPECT_ONE_LINE(r, 2, "--no-router-bias contradicts the loaded model");
    test_remove_directory(&d.dir);
}

// Two steps and a checkpoint, two bad steps, a rollback, and two steps on the data that follow. Not back: the data of
// the bad steps are passed over.
typedef struct {
    floatX *params;
    real *moments; // m, then v
    size_t params_bytes, moments_bytes;
    double aux, z;  // of the last step
    size_t changed; // weights that the bad steps changed
} RolledBack;
static RolledBack run_rolled_back(const ProgramData *d, const char *gemm, bool back) {
    char options[700];
    StepResult last;
    memset(&last, 0, sizeof(last));
    FORMAT(options,
           "--experts 4 --experts-active 2 --expert-ffn 16 --router-bias --router-bias-rate 0.01 --router-aux 0.1 "
           "--total-batch 128 --gemm %s --rollback 1:1 --lr 1e-2 --checkpoint-every 9 --no-checkpoint-background "
           "--out %s/%s%d",
           gemm, d->dir.path, gemm, back);
    InnerRun *inner = inner_open(d, options);
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
    ProgramData d = program_data();
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
    test_remove_directory(&d.dir);
}

// Each mistake in the sizes of experts is one line.
static void test_expert_mistakes(void) {
    static const struct {
        const char *options, *line;
    } cases[] = {
        {"--experts 4 --experts-active 5 --expert-ffn 32", "from 1 to 4 active experts, the number of experts, not 5"},
        {"--preset moe-tiny --experts-active 0", "from 1 to 8 active experts, the number of experts, not 0"},
        {"--preset moe-tiny --experts 1025", "--experts '1025' is not accepted"},
        {"--preset moe-tiny --experts 128 --experts-active 65", "--experts-active '65' is not accepted"},
        {"--preset moe-tiny --expert-ffn 0", "--expert-ffn must be at least 1, not 0"},
        {"--preset moe-tiny --dense-layers 4", "dense layers: 4 leave no layer with experts"},
        {"--preset moe-tiny --experts 1024 --layers 1025", "1025 layers of 1024 experts are more"},
        {"--preset tiny --experts-active 2", "require --experts E"},
        {"--preset tiny --shared-experts 1", "require --experts E"},
        {"--preset tiny --dense-layers 1", "require --experts E"},
        {"--preset tiny --router-bias", "--router-bias requires --experts E"},
        {"--preset tiny --match-active", "--match-active requires --experts E"},
        {"--preset moe-tiny --match-active --match-params", "are mutually exclusive"},
    };
    ProgramResult r;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        run_command(&r, "'%s' --dry-run %s", test_program_path(), cases[i].options);
        EXPECT(r.status == EXIT_USAGE && count_lines(r.err) == 1 && strstr(r.err, cases[i].line),
               "%s: status %d: %.500s", cases[i].options, r.status, r.err);
    }
    run_command(&r, "'%s' --dry-run --preset tiny --router-aux 0.1", test_program_path());
    EXPECT(r.status == EXIT_DONE && strstr(r.err, "--router-aux has no effect without --experts"), "%.500s", r.err);
    run_command(&r, "'%s' --dry-run --preset moe-tiny --dense-layers 1 --router-aux 0.1", test_program_path());
    EXPECT(
        r.status == EXIT_DONE && r.err[0] == 0 && !strstr(r.out, "MLP 352") &&
            strstr(r.out, "\nMLP of 1 layer: dense, width 352\nMLP of 3 layers: experts, 8 of width 176, 2 of them "),
        "status %d: %.500s%.500s", r.status, r.out, r.err);
}

// Each weight of a router's loss has an effect of its own.
static void test_router_loss_options(void) {
    static const char *const weights[3] = {"--router-aux 0 --router-z 0", "--router-aux 0 --router-z 1",
                                           "--router-aux 1 --router-z 0"};
    ProgramData d = program_data();
    ProgramResult r;
    const char *dir = d.dir.path;
    for (int i = 0; i < 3; i++) {
        run_command(&r,
                    "%s --train-data '%s/train.bin' %s --experts 4 --experts-active 2 --expert-ffn 16 %s --dump-grads "
                    "'%s/grads%d.safetensors'",
                    test_program(), dir, small_model, weights[i], dir, i);
        EXPECT_STATUS(r, 0);
        for (int j = 0; j < i; j++) {
            run_command(&r, "cmp '%s/grads%d.safetensors' '%s/grads%d.safetensors'", dir, i, dir, j);
            EXPECT(r.status == 1, "the same gradients with %s and %s", weights[i], weights[j]);
        }
    }
    // with a bias the default of --router-aux is 0
    for (int i = 0; i < 2; i++)
        run_command(&r,
                    "%s --train-data '%s/train.bin' %s --experts 4 --experts-active 2 --expert-ffn 16 --router-bias %s "
                    "--dump-grads '%s/bias%d.safetensors'",
                    test_program(), dir, small_model, i ? "--router-aux 0" : "", dir, i);
    run_command(&r, "cmp '%s/bias0.safetensors' '%s/bias1.safetensors'", dir, dir);
    EXPECT(r.status == 0, "--router-bias without --router-aux: %.200s", r.out);
    test_remove_directory(&d.dir);
}

// The loss is that of the language model alone, the gradients and updates include the losses of the routers. A run with
// micro-steps is resumed bit for bit. A dense model has no experts, and a model with experts is not a dense one.
static void test_expert_runs(void) {
    ProgramData d = program_data();
    ProgramResult r, other;
    const char *dir = d.dir.path, *experts = "--experts 4 --experts-active 2 --expert-ffn 16 --router-aux 1 "
                                             "--total-batch 128";
    for (int aux = 0; aux < 2; aux++)
        run_command(aux ? &other : &r,
                    "%s --train-data '%s/train.bin' %s --experts 4 --experts-active 2 --expert-ffn 16 --router-aux %d "
                    "--dump-grads '%s/grads%d.safetensors' | cut -d ' ' -f 2",
                    test_program(), dir, small_model, aux, dir, aux);
    EXPECT(r.out[0] && strcmp(r.out, other.out) == 0, "the loss is %s with --router-aux 0 and %s with 1", r.out,
           other.out);
    run_command(&r, "cmp '%s/grads0.safetensors' '%s/grads1.safetensors'", dir, dir);
    EXPECT(r.status == 1, "--router-aux does not change the gradients");
    expect_resumed(&d, experts, 6);
    const char *const keys[] = {"loss", "router_aux", "router_z"};
    for (int k = 0; k < 3; k++) {
        double whole = 0, parts = -1;
        log_value_of_step(&d, "whole", 6, keys[k], &whole);
        log_value_of_step(&d, "parts", 6, keys[k], &parts);
        EXPECT(whole == parts && whole > 0, "%s of step 6 is %.9g, resumed %.9g", keys[k], whole, parts);
        // of the whole update: 1 if all experts are equal, and the square of ln 4 if all logits are 0
        double equal = k == 1 ? 1 : pow(log(4), 2);
        EXPECT(k == 0 || fabs(whole / equal - 1) < 0.2, "%s of step 6 is %.9g", keys[k], whole);
    }
    run_command(&r, "%s --init '%s/whole/checkpoints/step_00000006' --eval --dump-qkv '%s/qkv' --val-data '%s/val.bin'",
                test_program(), dir, dir, dir);
    EXPECT_STATUS(r, 0);
    run_command(&r, "%s --init '%s/whole/checkpoints/step_00000006' --experts 0 --eval --val-data '%s/val.bin'",
                test_program(), dir, dir);
    EXPECT_ONE_LINE(r, 2, "--experts 0 contradicts the loaded model, which has 4");
    run_trainer(&r, &d, "dense", "--steps 2");
    EXPECT_STATUS(r, 0);
    run_command(&r, "%s --init '%s/dense/checkpoints/step_00000002' --experts 4 --eval --val-data '%s/val.bin'",
                test_program(), dir, dir);
    EXPECT_ONE_LINE(r, 2, "--experts 4 contradicts the loaded model, which has 0");
    test_remove_directory(&d.dir);
}

static const Test expert_runs_tests[] = {
    {"a run with --router-bias resumes bit for bit", test_router_bias_resumes},
    {"losses of routers are not part of the loss, and runs with experts resume bit for bit", test_expert_runs},
    {"a run with experts that was rolled back equals one that passed over the same data", test_expert_rollback},
    {"--router-aux and --router-z weigh losses of their own", test_router_loss_options},
    {"mistakes in the sizes of experts are one line each", test_expert_mistakes},
};
enum { EXPERT_RUNS_TEST_COUNT = sizeof(expert_runs_tests) / sizeof(expert_runs_tests[0]) };
#endif
