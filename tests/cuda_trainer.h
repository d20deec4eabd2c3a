/*
cuda_trainer.h: what is tested of the CUDA trainer in its process: how often a step waits for the device, and the lists
of Slurm. tests/cuda compares runs of the program with those of the CPU trainer.
*/
#pragma once
#include "fixture.h"
#include "harness.h"

static void test_host_waits(void) {
    enum { B = 3, T = 13, MICRO_STEPS = 12 }; // more uploads than buffers for them
    char arguments[] = "x --layers 2 --hidden 20 --heads 6 --kv-heads 2 --head-dim 12 --ffn 27 --vocab 43 --seq-len 13 "
                       "--batch-size 3 --train-data x",
         *argv[32];
    int argc = test_words(argv, 32, arguments), tokens[B * T + 1];
    Options o;
    options_read(&o, argc, argv);
    options_check(&o);
    options_finish(&o, 1);
    ModelConfig config = options_config(&o);
    Model m;
    model_plan(&m, &config, B, T, FOR_TRAINING, RECOMPUTE_BLOCK, one_rank);
    model_alloc(&m, NULL);
    ops_init(m.plan.workspace_bytes);
    model_init(&m.plan, m.state.params, m.state.master, 1);
    for (int i = 0; i <= B * T; i++) tokens[i] = i * 7 % 43;
    ops_wait();
    for (int64_t step = 1; step <= 2; step++) {
        host_waits = 0;
        buffer_zero(m.acts.losses, B * T * sizeof(real));
        for (m.state.micro_step = 0; m.state.micro_step < MICRO_STEPS; m.state.micro_step++)
            model_micro_step(&m, tokens, tokens + 1, NULL, B, T, MICRO_STEPS * B * T);
        EXPECT(host_waits == 0, "%d waits in the micro-steps", host_waits);
        rank_squares(&m.state, m.state.grad_square_sums);
        double loss = loss_sum(&m.acts, B * T) / (MICRO_STEPS * B * T),
               norm = squares_norm(&m.state, 0, m.plan.sharding.groups - 1);
        EXPECT(host_waits == 2, "%d waits for the loss and the norm", host_waits);
        EXPECT(fabs(loss - log(43)) < 0.1 && norm > 0 && isfinite(norm), "loss %g, norm %g", loss, norm);
        model_update(&m, &o, 1e-3, step, norm);
        EXPECT(host_waits == 2, "%d waits with the update", host_waits);
    }
    options_free(&o);
    model_free(&m, true);
    ops_free();
}

#ifdef USE_NCCL
static void test_slurm_lists(void) {
    static const struct {
        const char *list;
        int machine, count;
    } counts[] = {{"4", 0, 4},
                  {"4(x3),2", 0, 4},
                  {"4(x3),2", 2, 4},
                  {"4(x3),2", 3, 2},
                  {"4(x3),2", 4, -1},
                  {"1,8,2", 1, 8},
                  {"", 0, -1},
                  {"x", 0, -1},
                  {"2;3", 1, -1},
                  {"0", 0, -1},
                  {"4(x-1),2", 0, -1},
                  {"4(x0)", 0, -1},
                  {"4(x4294967297)", 0, -1},
                  {"4(x2", 0, -1},
                  {"4(x2]", 0, -1},
                  {"99999999999", 0, -1},
                  {"4(x2)3", 2, -1}};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        EXPECT(launch_tasks_on_node(counts[i].list, counts[i].machine) == counts[i].count,
               "machine %d of %s has %d processes", counts[i].machine, counts[i].list,
               launch_tasks_on_node(counts[i].list, counts[i].machine));
}

#endif

static const Test cuda_trainer_tests[] = {
    {"a step waits for the device only to read the loss and the norm", test_host_waits},
#ifdef USE_NCCL
    {"the lists that srun sets are parsed", test_slurm_lists},
#endif
};
