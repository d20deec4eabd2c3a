/*
program.h: runs of the trainer in processes of its own, for other tests, and one that is compared with the definitions
of a step. The tests of the trainer as its user runs it are in tests/programs.
*/
#pragma once
#include "harness.h"
#include "model.h"
#include "run_log.h"

// Sentences of one form, each of four words drawn from eight.
static const char *const grammar_words[4][8] = {
    {"some ", "the ", "every ", "no ", "a ", "this ", "that ", "one "},
    {"cat ", "poet ", "river ", "king ", "theorem ", "sparrow ", "engine ", "child "},
    {"sees ", "forgets ", "carries ", "proves ", "follows ", "becomes ", "hears ", "loves "},
    {"gold.\n", "music.\n", "snow.\n", "itself.\n", "nothing.\n", "bread.\n", "numbers.\n", "home.\n"},
};

// Writes a shard of `bytes` byte tokens.
static void write_grammar_shard(const char *path, size_t bytes, uint64_t seed) {
    TestRandom r = {seed};
    int *tokens = (int *)checked_calloc(bytes, sizeof(int));
    const char *word = "";
    for (size_t i = 0, w = 0; i < bytes; i++) {
        if (!*word) word = grammar_words[w++ % 4][test_random_int(&r, 8)];
        tokens[i] = *word++;
    }
    test_write_shard(path, 2, tokens, bytes);
    free(tokens);
}

// A directory with train.bin and val.bin.
static TestDirectory program_data(void) {
    TestDirectory d = test_make_directory();
    write_grammar_shard(test_text("%s/train.bin", d.path), 200000, 1);
    write_grammar_shard(test_text("%s/val.bin", d.path), 20000, 2);
    return d;
}

// A model of a few thousand parameters, for runs of a few milliseconds a step.
static const char *const small_model =
    "--layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 --seq-len 16 --batch-size 4 "
    "--schedule constant --warmup 2 --threads 2";

#define EXPECT_STATUS(r, wanted) \
    EXPECT((r).status == (wanted), "exit status %d, not %d; stderr: %.200s", (r).status, (int)(wanted), (r).err)

// The state of a run that is computed here, in double but for the gradients, from the definitions.
typedef struct {
    Model model;
    DataLoader loader;
    double *w, *m, *v; // [parameters]
    int *inputs, *targets;
    double loss, norm, rate; // of the last step
} ReferenceRun;

enum { REFERENCE_B = 12, REFERENCE_T = 16, REFERENCE_STEPS = 8, REFERENCE_WARMUP = 3 };

static void reference_open(ReferenceRun *r, const TestDirectory *d, uint64_t seed) {
    const ModelCase mc = {"", 256, 24, 2, 2, 1, 8, 40, REFERENCE_B, REFERENCE_T, true, 0, 0, false, false};
    ModelConfig config = case_config(&mc, variant_find("sink"));
    case_open(&r->model, &config, REFERENCE_B, REFERENCE_T, FOR_TRAINING);
    model_init(&r->model.plan, r->model.state.params, r->model.state.master, seed);
    dataloader_open(&r->loader, test_text("%s/train.bin", d->path), REFERENCE_B, REFERENCE_T, config.V, 0, 1, seed,
                    true);
    dataloader_start(&r->loader, 0);
    size_t count = r->model.plan.tensors.buffer_count;
    r->w = (double *)checked_calloc(3 * count, sizeof(double)), r->m = r->w + count, r->v = r->m + count;
    for (size_t e = 0; e < count; e++) r->w[e] = (double)r->model.state.params[e];
    r->inputs = (int *)checked_calloc(2 * REFERENCE_B * REFERENCE_T, sizeof(int));
    r->targets = r->inputs + REFERENCE_B * REFERENCE_T;
}

static void reference_close(ReferenceRun *r) {
    dataloader_close(&r->loader);
    free(r->w);
    free(r->inputs);
    case_close(&r->model);
}

// Gradients of all windows of the step at once; then their norm, the rate, and AdamW.
static void reference_step(ReferenceRun *r, int step, double lr, double floor_ratio, double clip, double decay,
                           double beta1, double beta2, double eps) {
    const TensorList *list = &r->model.plan.tensors;
    double N = REFERENCE_B * REFERENCE_T, squares = 0,
           p = (double)(step - REFERENCE_WARMUP) / (REFERENCE_STEPS - REFERENCE_WARMUP);
    buffer_zero(r->model.acts.losses, (size_t)N * sizeof(real));
    dataloader_next(&r->loader, r->inputs, r->targets, NULL);
    model_micro_step(&r->model, r->inputs, r->targets, NULL, REFERENCE_B, REFERENCE_T, N);
    r->loss = loss_sum(&r->model.acts, (int)N) / N;
    for (size_t e = 0; e < list->buffer_count; e++) squares += pow((double)r->model.state.grads[e], 2);
    r->norm = sqrt(squares);
    r->rate = step <= REFERENCE_WARMUP ? lr * step / REFERENCE_WARMUP
                                       : lr * (floor_ratio + (1 - floor_ratio) * (1 + cos(M_PI * p)) / 2);
    for (int i = 0; i < list->count; i++)
        for (size_t e = list->tensors[i].offset; e < list->tensors[i].offset + list->tensors[i].count; e++) {
            double g = (double)r->model.state.grads[e] * fmin(1, clip / r->norm);
            r->m[e] = beta1 * r->m[e] + (1 - beta1) * g;
            r->v[e] = beta2 * r->v[e] + (1 - beta2) * g * g;
            double mean = r->m[e] / (1 - pow(beta1, step)), root = sqrt(r->v[e] / (1 - pow(beta2, step)));
            r->w[e] -= r->rate * (mean / (root + eps) + (list->tensors[i].ndim == 2 ? decay * r->w[e] : 0));
            r->model.state.params[e] = (floatX)r->w[e];
        }
}

// The whole of a step, in the program: its windows, their sum over micro-steps, clipping, schedule and update.
static void test_run_equals_definitions(void) {
    TestDirectory d = program_data();
    ProgramResult r;
    ReferenceRun reference;
    double rounding = 2e-6, clipped = 0;
    run_command(&r,
                "%s --train-data '%s/train.bin' --attention sink --layers 2 --hidden 24 --heads 2 --kv-heads 1 "
                "--head-dim 8 --ffn 40 --seq-len %d --batch-size 4 --total-batch %d --steps %d --warmup %d --lr 0.02 "
                "--min-lr-ratio 0.3 --grad-clip 0.9 --weight-decay 0.3 --beta1 0.8 --beta2 0.9 --eps 1e-3 --seed 7 "
                "--threads 1 --checkpoint-every 1 --keep 100 --out '%s/run'",
                test_program(), d.path, REFERENCE_T, REFERENCE_B * REFERENCE_T, REFERENCE_STEPS, REFERENCE_WARMUP,
                d.path);
    EXPECT_STATUS(r, 0);
    reference_open(&reference, &d, 7);
    cJSON *records = read_records(&d, "run", "train");
    for (int step = 1; step <= REFERENCE_STEPS; step++) {
        const cJSON *record = cJSON_GetArrayItem(records, step - 1);
        double loss = record_number(record, "loss"), norm = record_number(record, "grad_norm"),
               rate = record_number(record, "lr"), error = 0, size = 0;
        const TensorList *list = &reference.model.plan.tensors;
        reference_step(&reference, step, 0.02, 0.3, 0.9, 0.3, 0.8, 0.9, 1e-3);
        clipped += reference.norm > 0.9;
        EXPECT(record_number(record, "step") == step, "record %d is of step %g", step, record_number(record, "step"));
        EXPECT(fabs(loss - reference.loss) <= rounding * loss, "step %d: loss %.9g, not %.9g", step, loss,
               reference.loss);
        EXPECT(fabs(norm - reference.norm) <= 10 * rounding * norm, "step %d: norm %.9g, not %.9g", step, norm,
               reference.norm);
        EXPECT(fabs(rate - reference.rate) <= 1e-8 * rate, "step %d: lr %.9g, not %.9g", step, rate, reference.rate);
        const char *path = test_text("%s/run/checkpoints/step_%08d/model.safetensors", d.path, step);
        SafeTensors *saved = safetensors_open(path);
        for (int i = 0; i < list->count; i++) {
            const Tensor *t = &list->tensors[i];
            double *w = (double *)checked_calloc(t->count, sizeof(double));
            safetensors_read(saved, t->name, 0, t->count, w, DTYPE_F64);
            for (size_t e = 0; e < t->count; e++) {
                error += pow(w[e] - reference.w[t->offset + e], 2);
                size += pow(w[e], 2);
            }
            free(w);
        }
        safetensors_close(saved);
        EXPECT(error <= pow(rounding, 2) * size, "step %d: the weights are off by %.3g of their norm", step,
               sqrt(error / size));
    }
    EXPECT(clipped > 0 && clipped < REFERENCE_STEPS, "%g steps of %d are clipped", clipped, REFERENCE_STEPS);
    reference_close(&reference);
    cJSON_Delete(records);
}

static const Test program_tests[] = {
    {"the log of a run agrees with the definitions of a step", test_run_equals_definitions},
};
