/*
program.h: tests of the trainer as its user runs it, in processes of its own: whole runs, resumes, the other
modes, and what it refuses. Directories are compared file by file, so a resumed run must be the same run.
*/
#ifndef TESTS_PROGRAM_H
#define TESTS_PROGRAM_H
#include "harness.h"
#include "model.h"

// Sentences of one form, each of four words drawn from eight: a source whose entropy is known.
static const char *const grammar_words[4][8] = {
    {"some ", "the ", "every ", "no ", "a ", "this ", "that ", "one "},
    {"cat ", "poet ", "river ", "king ", "theorem ", "sparrow ", "engine ", "child "},
    {"sees ", "forgets ", "carries ", "proves ", "follows ", "becomes ", "hears ", "loves "},
    {"gold.\n", "music.\n", "snow.\n", "itself.\n", "nothing.\n", "bread.\n", "numbers.\n", "home.\n"},
};

// Writes a shard of `bytes` byte tokens and returns the source's entropy in nats per byte.
static double write_grammar_shard(const char *path, size_t bytes, uint64_t seed) {
    TestRandom r = {seed};
    int32_t header[256];
    memset(header, 0, sizeof(header));
    header[0] = SHARD_MAGIC_U16, header[1] = SHARD_VERSION_U16, header[2] = (int32_t)bytes;
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(header, sizeof(header), 1, f) == 1, "cannot write %s", path);
    double letters = 0;
    for (int w = 0; w < 4; w++)
        for (int i = 0; i < 8; i++) letters += (double)strlen(grammar_words[w][i]) / 8;
    const char *word = "";
    for (size_t i = 0, w = 0; i < bytes; i++) {
        if (!*word) word = grammar_words[w++ % 4][test_random_int(&r, 8)];
        uint16_t token = (uint16_t)*word++;
        CHECK(fwrite(&token, sizeof(token), 1, f) == 1, "cannot write %s", path);
    }
    CHECK(fclose(f) == 0, "cannot write %s", path);
    return 4 * log(8) / letters;
}

typedef struct {
    TestDirectory dir;
    double entropy;
} ProgramData; // train.bin and val.bin

static ProgramData program_data(void) {
    ProgramData d;
    char path[600];
    d.dir = test_make_directory();
    FORMAT(path, "%s/train.bin", d.dir.path);
    d.entropy = write_grammar_shard(path, 200000, 1);
    FORMAT(path, "%s/val.bin", d.dir.path);
    write_grammar_shard(path, 20000, 2);
    return d;
}

// A model of a few thousand parameters, for runs of a few milliseconds a step.
static const char *const small_model =
    "--layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 --seq-len 16 --batch-size 4 "
    "--schedule constant --warmup 2 --threads 2";

#define EXPECT_STATUS(r, wanted) \
    EXPECT((r).status == (wanted), "exit status %d, not %d; stderr: %.200s", (r).status, (int)(wanted), (r).err)
#define EXPECT_ONE_LINE(r, wanted, words)                                                                              \
    EXPECT((r).status == (wanted) && count_lines((r).err) == 1 && strstr((r).err, words), "status %d, stderr: %.300s", \
           (r).status, (r).err)

static void run_trainer(ProgramResult *r, const ProgramData *d, const char *out, const char *options) {
    run_command(r, "%s --train-data '%s/train.bin' %s --out '%s/%s' %s", test_program(), d->dir.path, small_model,
                d->dir.path, out, options);
}

static void expect_same_directories(const ProgramData *d, const char *a, const char *b) {
    ProgramResult r;
    run_command(&r, "diff -rq '%s/%s' '%s/%s'", d->dir.path, a, d->dir.path, b);
    EXPECT(r.status == 0, "%s and %s differ: %.300s", a, b, r.out);
}

// Reads log.jsonl; every line must be JSON. Returns the number of records of a kind, and the last one's `key`.
static int log_records(const ProgramData *d, const char *run, const char *kind, const char *key, double *last) {
    char path[600], line[4096];
    FORMAT(path, "%s/%s/log.jsonl", d->dir.path, run);
    FILE *f = fopen(path, "r");
    int count = 0;
    EXPECT(f != NULL, "there is no %s", path);
    while (f && fgets(line, sizeof(line), f)) {
        cJSON *record = cJSON_Parse(line);
        const cJSON *of = cJSON_GetObjectItemCaseSensitive(record, "kind");
        EXPECT(record && cJSON_IsString(of) && line[strlen(line) - 1] == '\n', "not a record: %.200s", line);
        if (cJSON_IsString(of) && strcmp(of->valuestring, kind) == 0) {
            count++;
            json_get_number(record, key, last);
        }
        cJSON_Delete(record);
    }
    if (f) fclose(f);
    return count;
}

// A key of the train record of a step.
static void log_value_of_step(const ProgramData *d, const char *run, int step, const char *key, double *value) {
    char path[600], line[4096];
    FORMAT(path, "%s/%s/log.jsonl", d->dir.path, run);
    FILE *f = fopen(path, "r");
    bool found = false;
    while (f && !found && fgets(line, sizeof(line), f)) {
        cJSON *record = cJSON_Parse(line);
        const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "kind"));
        double at = 0;
        found = kind && strcmp(kind, "train") == 0 && json_get_number(record, "step", &at) && at == step &&
                json_get_number(record, key, value);
        cJSON_Delete(record);
    }
    EXPECT(found, "%s has no %s of step %d", path, key, step);
    if (f) fclose(f);
}

// What --eval prints: the perplexity and the losses by position, of T positions, fit the loss. Returns the loss.
static double expect_printed_losses(const char *out, int T) {
    double loss = 0, perplexity = 0, mean = 0, x = 0;
    int begin = 0, end = -1, length = 0;
    const char *rows = strstr(out, "loss by position\n");
    for (rows += rows ? strlen("loss by position\n") : 0;
         rows && sscanf(rows, " %d .. %d %lf\n%n", &begin, &end, &x, &length) == 3; rows += length)
        mean += (end + 1 - begin) * x / T;
    EXPECT(sscanf(out, "validation loss %lf (perplexity %lf)", &loss, &perplexity) == 2 && end + 1 == T &&
               fabs(mean - loss) < 1e-4 && fabs(perplexity - exp(loss)) < 0.01,
           "loss %g, perplexity %g, rows of %d positions with a mean of %g: %.300s", loss, perplexity, end + 1, mean,
           out);
    return loss;
}

// Else it could read a checkpoint, wait for the process that goes on from there, and take back what that has done.
static void test_resume_locks_first(void) {
    ProgramData d = program_data();
    ProgramResult r;
    Log *log = (Log *)checked_calloc(1, sizeof(Log));
    char path[600];
    run_trainer(&r, &d, "run", "--steps 2");
    EXPECT_STATUS(r, 0);
    FORMAT(path, "%s/run", d.dir.path);
    log->lock = log_lock(path);
    run_command(&r, "rm -r '%s/checkpoints/step_00000002' && mkdir '%s/checkpoints/step_00000002'", path, path);
    run_command(&r, "%s --out '%s' --resume --steps 3", test_program(), path);
    EXPECT_ONE_LINE(r, 1, "another process is running this run");
    EXPECT(r.out[0] == 0, "stdout: %.300s", r.out);
    log_close(log);
    free(log);
    run_command(&r, "%s --out '%s' --resume --steps 3", test_program(), path);
    EXPECT(r.status == 1 && strstr(r.err, "no valid checkpoint"), "status %d: %.300s", r.status, r.err);
    test_remove_directory(&d.dir);
}

static cJSON *run_json_of(const ProgramData *d, const char *run) {
    char path[600];
    FORMAT(path, "%s/%s", d->dir.path, run);
    return log_read_run_json(path);
}

// An option after the first `count` of the starts have changed it.
static double option_after(const cJSON *options, const cJSON *starts, int count, const char *name) {
    double value = NAN;
    json_get_number(options, name, &value);
    for (int i = 0; i < count; i++) {
        const cJSON *change;
        cJSON_ArrayForEach(change, json_member(cJSON_GetArrayItem(starts, i), "changed")) {
            if (strcmp(cJSON_GetStringValue(json_member(change, "name")), name) == 0)
                json_get_number(change, "new", &value);
        }
    }
    return value;
}

// The starts of run.json, and those of the log, must each give the learning rate and the tokens of every step. The
// run's schedule is constant after two steps.
static void expect_steps_follow_the_starts(const ProgramData *d, const char *run, int steps) {
    static const char *const names[] = {"lr", "total-batch"};
    char path[600], line[8192];
    FORMAT(path, "%s/%s/log.jsonl", d->dir.path, run);
    cJSON *json = run_json_of(d, run), *events = cJSON_CreateArray();
    const cJSON *options = json_member(json, "options"), *starts = json_member(json, "starts");
    double tokens = 0;
    int step = 0;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof(line), f)) {
        cJSON *record = cJSON_Parse(line);
        if (strcmp(cJSON_GetStringValue(json_member(record, "kind")), "train") != 0) {
            cJSON_AddItemToArray(events, record);
            continue;
        }
        double logged[2] = {NAN, NAN}, at = 0, before = tokens;
        int count = 0, index = 0;
        const cJSON *start;
        step++;
        cJSON_ArrayForEach(start, starts) {
            index++;
            if (json_get_number(start, "step", &at) && at < step) count = index;
        }
        json_get_number(record, "lr", &logged[0]);
        json_get_number(record, "tokens", &tokens);
        logged[1] = tokens - before;
        for (int i = step > 2 ? 0 : 1; i < 2; i++) {
            double by_run = option_after(options, starts, count, names[i]),
                   by_log = option_after(options, events, cJSON_GetArraySize(events), names[i]);
            EXPECT(by_run == logged[i] && by_log == logged[i], "step %d: --%s %g, by run.json %g, by the log %g", step,
                   names[i], logged[i], by_run, by_log);
        }
        cJSON_Delete(record);
    }
    if (f) fclose(f);
    EXPECT(step == steps, "%d train records, not %d", step, steps);
    cJSON_Delete(json);
    cJSON_Delete(events);
}

static void resume_with(const ProgramData *d, const char *run, const char *options) {
    ProgramResult r;
    run_command(&r, "%s --out '%s/%s' --resume --threads 2 %s", test_program(), d->dir.path, run, options);
    EXPECT_STATUS(r, 0);
}

static void test_recorded_options(void) {
    static const double steps[] = {0, 4, 4, 8, 4};
    ProgramData d = program_data();
    ProgramResult r;
    run_trainer(&r, &d, "run", "--steps 4 --lr 0.001 --total-batch 64");
    EXPECT_STATUS(r, 0);
    expect_steps_follow_the_starts(&d, "run", 4);
    resume_with(&d, "run", "--steps 6 --lr 0.002 --total-batch 128");
    expect_steps_follow_the_starts(&d, "run", 6);
    // a start that leaves no checkpoint: the next one has the options of the checkpoint again
    run_command(&r, "rm -r '%s/run/checkpoints/step_00000006'", d.dir.path);
    resume_with(&d, "run", "--steps 8");
    expect_steps_follow_the_starts(&d, "run", 8);
    // an older checkpoint, from before a change that the next start makes as well
    resume_with(&d, "run", "--steps 10 --lr 0.003 --total-batch 128");
    expect_steps_follow_the_starts(&d, "run", 10);
    run_command(&r, "rm -r '%s/run/checkpoints/step_00000010' '%s/run/checkpoints/step_00000008'", d.dir.path,
                d.dir.path);
    resume_with(&d, "run", "--steps 9 --lr 0.003 --total-batch 128");
    expect_steps_follow_the_starts(&d, "run", 9);

    cJSON *json = run_json_of(&d, "run");
    const cJSON *starts = json_member(json, "starts"), *first = cJSON_GetArrayItem(starts, 0);
    static const char *const keys[] = {"command_line", "revision", "host", "ranks"};
    double lr = 0, at = -1;
    EXPECT(cJSON_GetArraySize(starts) == 5, "%d starts", cJSON_GetArraySize(starts));
    for (int i = 0; i < 5; i++)
        EXPECT(json_get_number(cJSON_GetArrayItem(starts, i), "step", &at) && at == steps[i], "start %d after step %g",
               i, at);
    for (int i = 0; i < 4; i++)
        EXPECT(cJSON_Compare(json_member(json, keys[i]), json_member(first, keys[i]), true), "the first start's %s",
               keys[i]);
    EXPECT(json_get_number(json_member(json, "options"), "lr", &lr) && lr == 0.001, "run.json has --lr %g", lr);
    const cJSON *words = json_member(cJSON_GetArrayItem(starts, 4), "command_line");
    EXPECT(strcmp(cJSON_GetStringValue(cJSON_GetArrayItem(words, cJSON_GetArraySize(words) - 1)), "128") == 0,
           "the last start has the command line of another");
    cJSON_Delete(json);
    test_remove_directory(&d.dir);
}

static void test_run_of_older_version(void) {
    ProgramData d = program_data();
    ProgramResult r;
    char path[600];
    size_t size = 0;
    run_trainer(&r, &d, "run", "--steps 2");
    EXPECT_STATUS(r, 0);
    cJSON *json = run_json_of(&d, "run");
    cJSON_DeleteItemFromObject(json, "starts");
    char *text = json_text(json, &size);
    FORMAT(path, "%s/run/run.json", d.dir.path);
    file_write_atomic(path, text, size);
    resume_with(&d, "run", "--steps 3");
    cJSON *after = run_json_of(&d, "run"), *starts = cJSON_DetachItemFromObject(after, "starts");
    const cJSON *first = cJSON_GetArrayItem(starts, 0), *second = cJSON_GetArrayItem(starts, 1);
    double step = -1;
    EXPECT(cJSON_Compare(json, after, true), "the other keys of run.json have changed");
    EXPECT(cJSON_GetArraySize(starts) == 2 && json_get_number(first, "step", &step) && step == 0 &&
               json_get_number(second, "step", &step) && step == 2,
           "%d starts, the last after step %g", cJSON_GetArraySize(starts), step);
    EXPECT(cJSON_Compare(json_member(json, "command_line"), json_member(first, "command_line"), true) &&
               cJSON_GetArraySize(json_member(first, "changed")) == 0 &&
               cJSON_GetArraySize(json_member(second, "changed")) == 1,
           "the entries of the starts are not as expected");
    cJSON_Delete(json);
    cJSON_Delete(after);
    cJSON_Delete(starts);
    free(text);
    test_remove_directory(&d.dir);

    cJSON *old = cJSON_Parse("{\"options\": {\"total-batch\": 192}}"),
          *new_one = cJSON_Parse("{\"options\": {\"total-batch\": 192}, \"tokens\": 1000}");
    EXPECT(state_tokens(old, 5, "x") == 960 && state_tokens(new_one, 5, "x") == 1000, "tokens of a checkpoint: %d, %d",
           (int)state_tokens(old, 5, "x"), (int)state_tokens(new_one, 5, "x"));
    cJSON_Delete(old);
    cJSON_Delete(new_one);
}

// The state of a run that is computed here, in double but for the gradients, from the definitions.
typedef struct {
    Model model;
    DataLoader loader;
    double *w, *m, *v; // [parameters]
    int *inputs, *targets;
    double loss, norm, rate; // of the last step
} ReferenceRun;

enum { REFERENCE_B = 12, REFERENCE_T = 16, REFERENCE_STEPS = 8, REFERENCE_WARMUP = 3 };

static void reference_open(ReferenceRun *r, const ProgramData *d, uint64_t seed) {
    const ModelCase mc = {"", 256, 24, 2, 2, 1, 8, 40, REFERENCE_B, REFERENCE_T, true, 0, 0, false, false};
    ModelConfig config = case_config(&mc, variant_find("sink"));
    char path[600];
    FORMAT(path, "%s/train.bin", d->dir.path);
    case_open(&r->model, &config, REFERENCE_B, REFERENCE_T, FOR_TRAINING);
    model_init(&r->model.plan, r->model.state.params, r->model.state.master, seed);
    dataloader_open(&r->loader, path, REFERENCE_B, REFERENCE_T, config.V, 0, 1, seed, true);
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
    ProgramData d = program_data();
    ProgramResult r;
    ReferenceRun reference;
    double rounding = 2e-6, clipped = 0;
    run_command(&r,
                "%s --train-data '%s/train.bin' --attention sink --layers 2 --hidden 24 --heads 2 --kv-heads 1 "
                "--head-dim 8 --ffn 40 --seq-len %d --batch-size 4 --total-batch %d --steps %d --warmup %d --lr 0.02 "
                "--min-lr-ratio 0.3 --grad-clip 0.9 --weight-decay 0.3 --beta1 0.8 --beta2 0.9 --eps 1e-3 --seed 7 "
                "--threads 1 --checkpoint-every 1 --keep 100 --out '%s/run'",
                test_program(), d.dir.path, REFERENCE_T, REFERENCE_B * REFERENCE_T, REFERENCE_STEPS, REFERENCE_WARMUP,
                d.dir.path);
    EXPECT_STATUS(r, 0);
    reference_open(&reference, &d, 7);
    for (int step = 1; step <= REFERENCE_STEPS; step++) {
        double loss = 0, norm = 0, rate = 0, error = 0, size = 0;
        const TensorList *list = &reference.model.plan.tensors;
        reference_step(&reference, step, 0.02, 0.3, 0.9, 0.3, 0.8, 0.9, 1e-3);
        clipped += reference.norm > 0.9;
        log_value_of_step(&d, "run", step, "loss", &loss);
        log_value_of_step(&d, "run", step, "grad_norm", &norm);
        log_value_of_step(&d, "run", step, "lr", &rate);
        EXPECT(fabs(loss - reference.loss) <= rounding * loss, "step %d: loss %.9g, not %.9g", step, loss,
               reference.loss);
        EXPECT(fabs(norm - reference.norm) <= 10 * rounding * norm, "step %d: norm %.9g, not %.9g", step, norm,
               reference.norm);
        EXPECT(fabs(rate - reference.rate) <= 1e-8 * rate, "step %d: lr %.9g, not %.9g", step, rate, reference.rate);
        char path[700];
        FORMAT(path, "%s/run/checkpoints/step_%08d/model.safetensors", d.dir.path, step);
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
    test_remove_directory(&d.dir);
}

// The logged speed is that of a step of this many tokens. Its share of the peak is that of a rank.
static void expect_speed(const ProgramData *d, const char *run, double tokens, int ranks) {
    cJSON *json = run_json_of(d, run);
    double flops = 0, gflops = 0, share = 0, rate = 0, ms = 0;
    json_get_number(cJSON_GetObjectItemCaseSensitive(json, "model"), "flops_per_token", &flops);
    json_get_number(cJSON_GetObjectItemCaseSensitive(json, "peak"), "gflops", &gflops);
    log_records(d, run, "train", "flops_util", &share);
    log_records(d, run, "train", "tokens_per_s", &rate);
    log_records(d, run, "train", "ms", &ms);
    EXPECT(fabs(rate * ms / 1e3 / tokens - 1) < 1e-6, "%s: %g tokens/s for %g ms, not %g tokens", run, rate, ms,
           tokens);
    EXPECT(fabs(share * gflops * 1e9 * ms / 1e3 * ranks / (flops * tokens) - 1) < 1e-6,
           "%s: %g of %g GFLOP/s for %g ms on each of %d ranks: %g FLOPs, not %g tokens of %g", run, share, gflops, ms,
           ranks, share * gflops * ms * 1e6 * ranks, tokens, flops);
    cJSON_Delete(json);
}

// Three micro-steps of 4 x 16, and the time that is left by the steps since a resume.
static void test_speed_of_micro_steps(void) {
    ProgramData d = program_data();
    ProgramResult r;
    double tokens = 0, ms[3], left[2] = {0, 0};
    char unit[2] = "s";
    run_trainer(&r, &d, "run", "--steps 1000000 --stop-after 5 --total-batch 192");
    EXPECT_STATUS(r, 0);
    expect_speed(&d, "run", 192, 1); // a resume measures the peak again
    run_trainer(&r, &d, "run", "--resume --stop-after 8");
    EXPECT_STATUS(r, 0);
    log_records(&d, "run", "train", "tokens", &tokens);
    EXPECT(tokens == 8 * 192, "%g tokens after 8 steps of 192", tokens);
    for (int i = 0; i < 3; i++) log_value_of_step(&d, "run", 6 + i, "ms", &ms[i]);
    const char *line = strstr(r.out, "8/1000000 |"), *end = line ? strstr(line, " left") : NULL;
    while (end && end > line && end[-1] != ' ') end--;
    sscanf(end ? end : "", "%lf%c%lf", &left[0], &unit[0], &left[1]);
    double scale = unit[0] == 'd'   ? 86400
                   : unit[0] == 'h' ? 3600
                   : unit[0] == 'm' ? 60
                                    : 1,
           seconds = left[0] * scale + left[1] * (unit[0] == 'd' ? 3600 : scale / 60),
           wanted = (ms[0] + ms[1] + ms[2]) / 3e3 * (1000000 - 8);
    EXPECT(fabs(seconds / wanted - 1) < 0.05, "%g s are left, by the last three steps %g s: %.200s", seconds, wanted,
           line ? line : r.out);
    test_remove_directory(&d.dir);
}

static void test_dump_grads(void) {
    TestDirectory d = test_make_directory();
    ProgramResult r;
    Fixture f = fixture_open("diff_v2", "a");
    char path[700], name[160];
    run_command(&r,
                "%s --init '%s' --train-data '%s/tokens.bin' --batch-size %d --seq-len %d --dump-grads '%s/grads' "
                "--threads 2",
                test_program(), f.dir.path, f.dir.path, f.B, f.T, d.path);
    EXPECT_STATUS(r, 0);
    FORMAT(path, "%s/grads", d.path);
    SafeTensors *dump = safetensors_open(path);
    EXPECT(dump->count == (size_t)fixture_gradient_count(&f) + 1, "%zu tensors, the reference has %d", dump->count,
           fixture_gradient_count(&f) + 1);
    for (size_t i = 0; i < dump->count; i++) {
        const SafeTensor *t = &dump->tensors[i];
        FORMAT(name, "%s%s", strcmp(t->name, "loss") == 0 ? "" : "grad.", t->name);
        const SafeTensor *u = safetensors_find(f.file, name);
        EXPECT(t->dtype == DTYPE_F32 && u && u->count == t->count && u->ndim == t->ndim,
               "%s is not F32 of the reference's shape", t->name);
        if (!u || u->count != t->count) continue;
        double *a = (double *)checked_calloc(t->count, sizeof(double)),
               *b = (double *)checked_calloc(t->count, sizeof(double));
        safetensors_read(dump, t->name, 0, t->count, a, DTYPE_F64);
        safetensors_read(f.file, name, 0, t->count, b, DTYPE_F64);
        double norm = norm_of(b, t->count);
        for (size_t e = 0; e < t->count; e++) a[e] -= b[e];
        EXPECT(norm > 0 && norm_of(a, t->count) <= 2e-4 * norm, "%s: error %.3g of a norm of %.3g", t->name,
               norm_of(a, t->count), norm);
        free(a);
        free(b);
    }
    safetensors_close(dump);
    fixture_close(&f);
    test_remove_directory(&d);
}

// The words of the samples in log.jsonl are those in the output.
static void expect_samples(const ProgramData *d, const char *run, const char *out) {
    char path[600], line[4096];
    int words = 0;
    FORMAT(path, "%s/%s/log.jsonl", d->dir.path, run);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof(line), f)) {
        cJSON *record = cJSON_Parse(line);
        const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "text"));
        EXPECT(!text || strncmp(text, "The ", 4) != 0, "a sample includes the prompt: %.100s", text);
        while (text && *text) {
            char word[200] = "";
            size_t length = 0;
            for (; *text > ' ' && *text < 0x7F; text++) word[length++] = *text;
            text += length == 0;
            words += length > 1;
            EXPECT(strstr(out, word), "the log has %s, the output %.600s", word, out);
        }
        cJSON_Delete(record);
    }
    EXPECT(words > 10, "%d words in the samples of %s", words, path);
    if (f) fclose(f);
}

static void test_generation_seed(void) {
    ProgramData d = program_data();
    ProgramResult a, b;
    double tokens = 0;
    run_trainer(&a, &d, "run", "--steps 2 --sample-every 1 --prompt 'The '");
    EXPECT(a.status == 0 && strstr(a.out, "The "), "status %d: %.200s", a.status, a.err);
    EXPECT(log_records(&d, "run", "sample", "tokens", &tokens) == 2 && tokens == 200, "%g tokens", tokens);
    expect_samples(&d, "run", a.out);
    // at a rate that moves no weight, the step alone tells two samples apart
    run_trainer(&a, &d, "still", "--steps 2 --sample-every 1 --prompt 'The ' --lr 1e-30");
    char *first = strstr(a.out, "step 1\nThe "), *second = strstr(a.out, "step 2\nThe ");
    EXPECT(first && second && strncmp(first + 7, second + 7, 60) != 0, "the same sample after two steps: %.600s",
           a.out);
    for (int seed = 1; seed <= 2; seed++) {
        run_command(&a, "%s --init '%s/run/checkpoints/step_00000002' --generate 60 --prompt 'every king' --seed %d",
                    test_program(), d.dir.path, seed);
        run_command(&b, "%s --init '%s/run/checkpoints/step_00000002' --generate 60 --prompt 'every king' --seed 1",
                    test_program(), d.dir.path);
        EXPECT(a.status == 0 && strncmp(a.out, "every king", 10) == 0, "status %d, output %.100s", a.status, a.out);
        EXPECT((strcmp(a.out, b.out) == 0) == (seed == 1), "seeds 1 and %d: %.100s and %.100s", seed, a.out, b.out);
    }
    run_command(&a, "%s --vocab 300 --generate 5 --prompt x", test_program());
    EXPECT_ONE_LINE(a, 1, "no tokenizer");
    run_command(&a, "%s --vocab 300 --generate 5 | tr -cd '0-9 ' | wc -w", test_program());
    EXPECT(atoi(a.out) == 5, "5 tokens of a vocabulary without text: %.100s", a.out);
    test_remove_directory(&d.dir);
}

// The line of ids with which a checkpoint continues tokens[0 .. length-1], the first `hidden` of which are not shown.
static void expected_numbers(char line[4096], const char *checkpoint, const int *prompt, int length, int hidden,
                             int count) {
    ModelConfig config = config_json_read(checkpoint);
    Model model;
    int tokens[256];
    assert(length + count <= 256);
    case_open(&model, &config, 1, config.T, FOR_GENERATION);
    CheckpointBuffers buffers = checkpoint_buffers(&model.state);
    checkpoint_load_weights(checkpoint, &buffers, false);
    memcpy(tokens, prompt, (size_t)length * sizeof(int));
    int generated = case_generate(&model, tokens, length, count, 0, 0, 1);
    EXPECT(generated == count, "%d tokens of %d", generated, count);
    size_t n = 0;
    for (int i = hidden; i < length + count; i++)
        n += (size_t)snprintf(line + n, 4096 - n, "%s%d", i > hidden ? " " : "", tokens[i]);
    snprintf(line + n, 4096 - n, "\n");
    case_close(&model);
}

static void test_generation_prompt(void) {
    const char *corpus = "{\"format\": 1, \"vocab_size\": 37, \"separator\": {\"token\": 35, \"place\": \"after\"}}";
    static const struct {
        const char *options;
        int prompt[3], length, hidden;
        const char *warning; // NULL: none
        bool sampled;        // also during training
    } cases[] = {
        {"--prompt-tokens 5", {5}, 1, 0, NULL, false},
        {"--prompt-tokens 5,9,0 --separator 36", {5, 9, 0}, 3, 0, NULL, true},
        {"--separator 36", {36}, 1, 1, NULL, true},
        {"--separator 11:after", {11}, 1, 1, NULL, false},
        {"--train-data '%s'", {35}, 1, 1, NULL, true},
        {"--train-data '%s' --separator 36", {36}, 1, 1, NULL, true},
        {"--train-data '%s' --prompt-tokens 5,9", {5, 9}, 2, 0, NULL, false},
        {"", {0}, 1, 1, "begins after token 0", true},
    };
    ProgramResult r;
    TestDirectory d = test_make_directory();
    // 37 tokens, 13 positions, and weights large enough for temperature 0 to visit many tokens
    Fixture fixture = fixture_open("diff_v2", "a");
    const char *checkpoint = fixture.dir.path;
    char path[700], options[2000], line[4096];
    FORMAT(path, "%s/corpus.json", d.path);
    data_write_file(path, corpus, strlen(corpus));
    run_command(&r, "cp '%s/tokens.bin' '%s/train_000000.bin'", checkpoint, d.path);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        snprintf(options, sizeof(options), cases[i].options, d.path);
        expected_numbers(line, checkpoint, cases[i].prompt, cases[i].length, cases[i].hidden, 30);
        run_command(&r, "%s --init %s --temperature 0 --generate 30 %s", test_program(), checkpoint, options);
        EXPECT(r.status == 0 && strcmp(r.out, line) == 0, "%s: status %d, %.200s instead of %.200s", options, r.status,
               r.out, line);
        EXPECT(cases[i].warning ? strstr(r.err, cases[i].warning) && count_lines(r.err) == 1 : !r.err[0], "%s: %.300s",
               options, r.err);
        if (!cases[i].sampled) continue; // a run whose weights stay as they are
        bool directory = strstr(cases[i].options, "--train-data") != NULL;
        run_command(&r, "%s --init %s --temperature 0 --steps 1 --lr 0 --sample-every 1 --batch-size 2 %s %s%s%s",
                    test_program(), checkpoint, options, directory ? "" : "--train-data ", directory ? "" : checkpoint,
                    directory ? "" : "/tokens.bin");
        expected_numbers(line, checkpoint, cases[i].prompt, cases[i].length, cases[i].hidden, SAMPLE_TOKENS);
        EXPECT(r.status == 0 && strstr(r.out, line), "%s: status %d, no sample %.100s in %.900s", options, r.status,
               line, r.out);
        EXPECT(cases[i].warning ? strstr(r.err, cases[i].warning) && count_lines(r.err) == 1 : !r.err[0], "%s: %.300s",
               options, r.err);
    }
    run_command(&r, "%s --init %s --generate 3 --separator 37", test_program(), checkpoint);
    EXPECT_ONE_LINE(r, EXIT_FAILED, "vocabulary of 37");
    run_command(&r, "sed -i s/35/37/ '%s/corpus.json' && sed -i 's/size.: 37/size\": 38/' '%s/corpus.json'", d.path,
                d.path);
    run_command(&r, "%s --init %s --generate 3 --train-data '%s'", test_program(), checkpoint, d.path);
    EXPECT_ONE_LINE(r, EXIT_FAILED, "the separator 37 of");
    fixture_close(&fixture);
    test_remove_directory(&d);
}

// A text follows byte 0, as in the corpora of bytes, or --separator; its tokens given as numbers follow nothing. Line
// ends are left out, as a separator that is printed ends a paragraph.
static void test_prompt_separator(void) {
    ProgramData d = program_data();
    ProgramResult text, with, exact;
    run_trainer(&text, &d, "run", "--steps 30 --lr 0.03");
    EXPECT_STATUS(text, EXIT_DONE);
    char common[1024];
    FORMAT(common, "%s --init '%s/run/checkpoints/step_00000030' --temperature 1 --generate 60", test_program(),
           d.dir.path);
    for (int separator = 0; separator <= 10; separator += 10) {
        run_command(&text, "%s --prompt Th --separator %d | tr -d '\\n'", common, separator);
        run_command(&with, "%s --prompt-tokens %d,84,104 | tr -d '\\n'", common, separator);
        run_command(&exact, "%s --prompt-tokens 84,104 --separator %d | tr -d '\\n'", common, separator);
        EXPECT(text.status == 0 && strncmp(text.out, "Th", 2) == 0, "status %d: %.200s", text.status, text.err);
        EXPECT(strcmp(with.out, text.out) == 0, "separator %d: %.100s instead of %.100s", separator, with.out,
               text.out);
        EXPECT(strncmp(exact.out, "Th", 2) == 0 && strcmp(exact.out, text.out) != 0,
               "exact tokens continue as if %d were before them: %.100s", separator, exact.out);
        if (separator) continue;
        run_command(&with, "%s --prompt Th | tr -d '\\n'", common);
        EXPECT(strcmp(with.out, text.out) == 0, "without --separator: %.100s instead of %.100s", with.out, text.out);
    }
    test_remove_directory(&d.dir);
}

// A link to a file that is not there, a pipe, and a full device, in a directory with a file of the user's.
static void test_output_files(void) {
    static const char *const modes[] = {
        "$init --train-data train.bin --dump-grads", "$init --val-data val.bin --eval --eval-out",
        "$init --val-data val.bin --eval --dump-attention", "$init --val-data val.bin --eval --dump-qkv",
        "--dry-run --device h100 --dry-run-out"};
    ProgramData d = program_data();
    ProgramResult r;
    run_trainer(&r, &d, "run", "--steps 2");
    EXPECT_STATUS(r, 0);
    for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++) {
        run_command(
            &r,
            "cd '%s' && rm -rf o && mkdir -p o/far && cd o && echo mine > link.tmp && ln -s far/file link && "
            "ln -s /dev/full full && mkfifo pipe && cd .. && init='--init run/checkpoints/step_00000002 "
            "--batch-size 2 --seq-len 16 --threads 1' && program=\"%s %s\" && $program o/link && "
            "{ timeout 9 cat o/pipe > piped & } && $program o/pipe && wait && cmp piped o/far/file && test -s piped && "
            "cat o/link.tmp >&2 && { $program o/full; echo $? $(find o -type l -o -type f | sort) >&2; }",
            d.dir.path, test_program_path(), modes[i]);
        EXPECT(strcmp(r.err, "mine\ndiffv2: cannot write o/full: No space left on device\n1 o/far/file o/full o/link "
                             "o/link.tmp\n") == 0,
               "%s: %.400s", modes[i], r.err);
    }
    const char *dry_run = "--dry-run --device h100 --dry-run-out";
    run_command(&r, "cd '%s' && ln -s loop loop && %s %s loop", d.dir.path, test_program_path(), dry_run);
    EXPECT_ONE_LINE(r, 1, "cannot create loop: Too many levels of symbolic links");
    run_command(&r, "cd '%s' && ln -s /dev/stdout out && %s %s out > both && head -n 1 both && tail -n 1 both",
                d.dir.path, test_program_path(), dry_run);
    EXPECT(strncmp(r.out, "model: ", 7) == 0 && strstr(r.out, "\n}\n"), "stdout as the file: %.300s", r.out);
    test_remove_directory(&d.dir);
}

static void test_dry_run_allocates_nothing(void) {
    ProgramResult r;
#ifdef __SANITIZE_ADDRESS__
    const char *limit = "true"; // the sanitizer's shadow alone is larger than any limit that would mean something
#else
    const char *limit = "ulimit -v 4000000"; // KiB; the weights alone would be 49 GiB
#endif
    run_command(&r, "%s; %s --preset 13.1b --attention baseline --dry-run", limit, test_program());
    EXPECT(r.status == 0 && strstr(r.out, "13123015680"), "status %d: %.500s%.200s", r.status, r.out, r.err);
}

static void test_library_variables(void) {
    ProgramData d = program_data();
    ProgramResult r;
    char path[600];
    static char text[65536];
    for (int i = 0; i < LIBRARY_VARIABLE_COUNT; i++) {
        const LibraryVariable *v = &library_variables[i];
        run_command(&r, "cd '%s' && %s=1 %s --dry-run", d.dir.path, v->name, test_program_path());
        if (v->harmless) EXPECT_ONE_LINE(r, EXIT_FAILED, v->name);
        else EXPECT_STATUS(r, EXIT_DONE);
        if (v->harmless) EXPECT(strstr(r.err, v->effect), "%s: %.300s", v->name, r.err);
    }
    run_command(&r,
                "cd '%s' && NVIDIA_TF32_OVERRIDE=0 ONEDNN_DEFAULT_FPMATH_MODE=strict CUBLAS_EMULATION_STRATEGY=eager "
                "%s --train-data train.bin --steps 1 --layers 1 --hidden 8 --heads 2 --kv-heads 1 --head-dim 8 --ffn 8 "
                "--seq-len 16 --out run",
                d.dir.path, test_program_path());
    EXPECT_STATUS(r, EXIT_DONE);
    FORMAT(path, "%s/run/run.json", d.dir.path);
    test_read_file(path, text, sizeof(text));
    cJSON *json = cJSON_Parse(text);
    const cJSON *start = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(json, "starts"), 0),
                *set[] = {json_member(json, "environment"), json_member(start, "environment")};
    for (int i = 0; i < 2; i++) {
        const char *strategy = cJSON_GetStringValue(json_member(set[i], "CUBLAS_EMULATION_STRATEGY"));
        EXPECT(cJSON_GetArraySize(set[i]) == 3 && strategy && strcmp(strategy, "eager") == 0,
               "run.json has %d variables, CUBLAS_EMULATION_STRATEGY %s", cJSON_GetArraySize(set[i]),
               strategy ? strategy : "missing");
    }
    cJSON_Delete(json);
    test_remove_directory(&d.dir);
}

#ifndef __clang__
// OMP_DISPLAY_ENV makes GCC's OpenMP print what it has read, before main: once for each start of the program.
static void test_spin_count(void) {
    static const struct {
        const char *environment, *last;
        int starts;
    } cases[] = {
        {"", "GOMP_SPINCOUNT = '3000'", 2},
        {"GOMP_SPINCOUNT=777", "GOMP_SPINCOUNT = '777'", 1},
        {"OMP_WAIT_POLICY=passive", "GOMP_SPINCOUNT = '0'", 1},
        {"OMP_WAIT_POLICY=active", "OMP_WAIT_POLICY = 'ACTIVE'", 1},
        {"LD_PRELOAD=libvgpreload_none.so", "GOMP_SPINCOUNT = '300000'", 1}, // as valgrind sets it
    };
    ProgramResult r;
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        run_command(&r,
                    "env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY OPENBLAS_CORETYPE=Haswell OMP_DISPLAY_ENV=verbose %s %s "
                    "--dry-run",
                    cases[c].environment, test_program_path());
        int starts = 0;
        const char *last = r.err;
        for (const char *at = r.err; (at = strstr(at, "GOMP_SPINCOUNT = ")) != NULL; at++) starts++;
        for (const char *at = r.err; (at = strstr(at, "OPENMP DISPLAY ENVIRONMENT BEGIN")) != NULL; at++) last = at;
        EXPECT(r.status == 0 && starts == cases[c].starts && strstr(last, cases[c].last),
               "with '%s' the program is started %d times and reads, status %d, not %s: %.900s", cases[c].environment,
               starts, r.status, cases[c].last, last);
    }
}

static void test_reexecution_arguments(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_command(&r,
                "cd '%s' && unset GOMP_SPINCOUNT OMP_WAIT_POLICY && bash -c 'exec -a \"odd name\" \"$0\" \"$@\"' "
                "%s --train-data train.bin --steps 1 --layers 1 --hidden 8 --heads 2 --kv-heads 1 --head-dim 8 --ffn 8 "
                "--seq-len 16 --out 'a b'",
                d.dir.path, test_program_path());
    EXPECT_STATUS(r, 0);
    run_command(&r, "tr -d '\\n\\t ' <'%s/a b/run.json'", d.dir.path);
    EXPECT(strstr(r.out, "\"command_line\":[\"oddname\",\"--train-data\",\"train.bin\"") &&
               strstr(r.out, "\"--out\",\"ab\"]"),
           "run.json has the command line %.400s", r.out);
    test_remove_directory(&d.dir);
}

static void test_reexecution_name(void) {
    ProgramData d = program_data();
    ProgramResult r;
    run_command(&r,
                "cd '%s' || exit; unset GOMP_SPINCOUNT OMP_WAIT_POLICY; ln -s '%s' a_trainer; "
                "./a_trainer --train-data train.bin --steps 100000 %s --out run >printed & p=$!; "
                "for i in $(seq 400); do [ ! -s run/log.jsonl ] || break; sleep 0.05; done; "
                "cat /proc/$p/comm; kill $p; wait $p",
                d.dir.path, test_program_path(), small_model);
    EXPECT(strcmp(r.out, "a_trainer\n") == 0, "the process is called %.100s: %.300s", r.out, r.err);
    test_remove_directory(&d.dir);
}

static void test_reexecution_failure(void) {
    ProgramResult r;
#ifndef __SANITIZE_ADDRESS__ // which does not start without /proc
    run_command(&r, "unshare -rm true");
    if (r.status != 0) {
        test_skip("there are no mount namespaces here");
        return;
    }
    run_command(&r,
                "p=%s; env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY OPENBLAS_CORETYPE=Haswell unshare -rm sh -c "
                "'mount -t tmpfs tmpfs /proc && exec \"$0\" --dry-run' \"$p\"",
                test_program_path());
    EXPECT(r.status == 0 && r.out[0] && count_lines(r.err) == 1 && strstr(r.err, "set GOMP_SPINCOUNT=3000"),
           "without /proc: status %d, %.400s", r.status, r.err);
#endif
    run_command(
        &r,
        "loader=$(ls /lib64/ld-linux-*.so.2 /lib/ld-linux-*.so.1 2>/dev/null | head -n 1); env -u GOMP_SPINCOUNT "
        "-u OMP_WAIT_POLICY $loader %s --dry-run",
        test_program_path());
    EXPECT(r.status == 0 && r.out[0], "run by the loader: status %d, %.400s", r.status, r.err);
}
#endif

static const Test program_tests[] = {
    {"a resume locks the run before it reads its files", test_resume_locks_first},
    {"run.json and the log record the options in force at each step", test_recorded_options},
    {"a resume of a run of an older version adds the missing start and token count", test_run_of_older_version},
    {"the log of a run agrees with the definitions of a step", test_run_equals_definitions},
    {"the speed of a step includes all its micro-steps", test_speed_of_micro_steps},
    {"--dump-grads writes the gradients of the reference", test_dump_grads},
    {"a file that an option names may be a link, a pipe or a device, and no other file is changed", test_output_files},
    {"generation prints text that depends only on the seed", test_generation_seed},
    {"generation begins with the specified prompt, or the separator", test_generation_prompt},
    {"a text prompt follows the separator, and a prompt of tokens does not", test_prompt_separator},
    {"environment variables that change matrix products are rejected, or recorded in run.json", test_library_variables},
#ifndef __clang__
    {"threads spin briefly unless the user sets otherwise, and the program re-executes at most once", test_spin_count},
    {"a re-executed program has its arguments", test_reexecution_arguments},
    {"a re-executed program keeps its name", test_reexecution_name},
    {"a program that cannot re-execute continues", test_reexecution_failure},
#endif
    {"a dry run of the largest preset allocates nothing", test_dry_run_allocates_nothing},
};
enum { PROGRAM_TEST_COUNT = sizeof(program_tests) / sizeof(program_tests[0]) };
#endif
