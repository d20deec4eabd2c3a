/*
ranks.h: tests of runs with several ranks. They compute the same as one rank, and all ranks hold the same data. If a
rank is killed, stopped, rejected or wrong, all ranks exit with a line that names it, and a restart continues.

mpirun starts the programs on this machine. Faults come from tests/faulty_diffv2.c, the trainer with planned faults.
*/
#ifndef TESTS_RANKS_H
#define TESTS_RANKS_H
#include <netinet/in.h>
#include <sys/socket.h>
#include "choice_file.h"
#include "experts.h"
#include "faults.h"
#include "harness.h"
#include "program.h"

// ---- sharding

static void test_shard_owners(void) {
    static const int rank_counts[] = {1, 2, 3, 4, 7, 64};
    static const size_t limits[] = {1, 1000, 4096, 8 << 20};
    for (int v = 0; v < 2 * ATTENTION_VARIANT_COUNT; v++) // without and with YOCO
        for (int k = 0; k < 6; k++)
            for (int level = 0; level <= ZERO_MOST; level++) {
                int ranks = rank_counts[k];
                const AttentionVariant *variant = &attention_variants[v / 2];
                ModelConfig c = case_config(&model_cases[v % 2 ? 7 : 1], variant);
                TensorList list = tensor_list_build(&c, ranks);
                unsigned char *owners = (unsigned char *)checked_calloc(list.buffer_count, 1);
                size_t limit = limits[(k + level) % 4];
                for (int rank = 0; rank < ranks; rank++) {
                    Sharding s = sharding_build(&list, rank, level, limit);
                    unsigned char *used = (unsigned char *)checked_calloc(s.own, 1);
                    EXPECT(s.own * ranks == list.buffer_count, "%d ranks: %zu elements each of %zu", ranks, s.own,
                           list.buffer_count);
                    for (int i = 0; i < list.count; i++) {
                        const Tensor *t = &list.tensors[i];
                        for (OwnRange r = sharding_ranges(&s, t); sharding_next(&s, t, &r);)
                            for (size_t e = 0; e < r.count; e++) {
                                EXPECT(r.at + e == t->offset + r.begin + e && r.compact_at + e < s.own &&
                                           !used[r.compact_at + e],
                                       "%s of %s, rank %d of %d: element %zu is in place %zu of %zu", t->name,
                                       variant->name, rank, ranks, r.begin + e, r.compact_at + e, s.own);
                                used[min_size(r.compact_at + e, s.own - 1)] = 1;
                                owners[r.at + e]++;
                            }
                    }
                    free(used);
                    sharding_free(&s);
                }
                for (int i = 0; i < list.count; i++)
                    for (size_t e = 0; e < list.tensors[i].count; e++)
                        EXPECT(owners[list.tensors[i].offset + e] == 1, "element %zu of %s has %d owners of %d ranks",
                               e, list.tensors[i].name, owners[list.tensors[i].offset + e], ranks);
                free(owners);
                tensor_list_free(&list);
            }
}

// Opens and fills the gradients of all groups, in the order of a micro-step with --zero 2. What lies between the
// tensors of a group, which the norm includes, is 0, whatever the group before it left in the same place.
static void expect_clean_padding(const ModelConfig *c, const char *why) {
    Model m;
    model_plan(&m, c, 1, c->T, FOR_TRAINING, RECOMPUTE_NOTHING, 0, 3, 2);
    model_alloc(&m, NULL);
    const TensorList *list = &m.plan.tensors;
    for (int i = c->tied ? -1 : 0; i < 2 * (c->L + 2 - c->tied); i++) { // tied: group 0 comes first, else last
        int group = i < 0 ? 0 : c->L + 1 - i % (c->L + 2 - c->tied);
        size_t count = list->group_offset[group + 1] - list->group_offset[group], filled = 0, left = 0;
        grads_open(&m.state, group - 1);
        for (int k = 0; k < list->count; k++) {
            const Tensor *t = &list->tensors[k];
            if (t->layer + 1 != group) continue;
            for (size_t e = 0; e < t->count; e++) tensor_grad(&m.state, t)[e] = 1;
            filled += t->count;
        }
        for (size_t e = 0; e < count; e++) left += m.state.group_grads[group][e] != 0;
        EXPECT(left == filled, "%s, %s, tied %d: group %d of %d layers has %zu gradients, %zu are not 0",
               c->attention->name, why, c->tied, group, c->L, filled, left);
    }
    model_free(&m, true);
}

static void test_padding_of_gradients(void) {
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (int i = 0; i < MODEL_CASE_COUNT + EXPERT_CASE_COUNT; i++)
            for (int tied = 0; tied < 2; tied++) {
                bool dense = i < MODEL_CASE_COUNT;
                ModelConfig c = dense ? case_config(&model_cases[i], &attention_variants[v])
                                      : expert_config(i - MODEL_CASE_COUNT, attention_variants[v].name);
                Problem problem;
                c.tied = tied;
                if (!model_config_problems(&c, &problem, 1))
                    expect_clean_padding(&c, dense ? model_cases[i].why : expert_cases[i - MODEL_CASE_COUNT].model.why);
            }
}

static void test_bucket_sizes(void) {
    for (int ranks = 1; ranks <= 65536; ranks++) {
        size_t n = bucket_elements(ranks), before = bucket_elements(max_int(1, ranks - 1)), bytes = n * sizeof(float);
        EXPECT(n >= before && bytes >= 32 << 20 && bytes <= 256 << 20,
               "%d ranks: buckets of %zu elements, of one rank less %zu", ranks, n, before);
        EXPECT(ranks > 128 || bytes / ranks >= 2 << 20, "%d ranks: pieces of %zu bytes", ranks, bytes / ranks);
    }
    ModelConfig c = case_config(&model_cases[1], &attention_variants[0]);
    int ranks[] = {8, 64};
    for (int i = 0; i < 2; i++) { // the model's buckets are of this size, where a group is larger
        Model model;
        c.V = 1 << 22;
        model_plan(&model, &c, 1, 8, FOR_TRAINING, RECOMPUTE_NOTHING, 0, ranks[i], 1);
        EXPECT(model.plan.sharding.largest == bucket_elements(ranks[i]),
               "%d ranks: the largest bucket has %zu elements", ranks[i], model.plan.sharding.largest);
        model_free(&model, false);
    }
}

static void test_rollback_condition(void) {
    Rollback r;
    memset(&r, 0, sizeof(r));
    EXPECT(rollback_parse("3:5", &r.count, &r.steps) && r.count == 3 && r.steps == 5, "3:5 is %" PRId64 ":%" PRId64,
           r.count, r.steps);
    static const char *const wrong[] = {"",    ":",    "3",     "3:",   ":5",     "0:5",
                                        "6:5", "3:5x", "3:5:7", "-1:5", "1:1001", "3 :5"};
    int64_t a, b;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        EXPECT(!rollback_parse(wrong[i], &a, &b), "'%s' was accepted", wrong[i]);
    static const int bad[] = {3, 7, 9, 11}, due_at = 11; // 3, 7, 9 span seven steps, 7, 9, 11 five
    for (int step = 1, next = 0; step <= due_at; step++) {
        bool is_bad = next < 4 && bad[next] == step;
        next += is_bad;
        rollback_record_step(&r, step, is_bad);
        EXPECT(rollback_due(&r, step) == (step == due_at ? 7 : 0), "at step %d: %" PRId64, step,
               rollback_due(&r, step));
    }
    EXPECT(rollback_due(&r, 12) == 0, "a step later the first one is too far back");
    cJSON *json = rollback_to_json(&r);
    Rollback read;
    memset(&read, 0, sizeof(read));
    read.count = 3, read.steps = 5;
    EXPECT(rollback_from_json(&read, json) && memcmp(&read, &r, sizeof(r)) == 0, "the state does not come back");
    cJSON_Delete(json);
    for (int i = 1; i <= ROLLBACK_TIMES; i++) EXPECT(rollback_restart_from(&r, 4) && r.bad_count == 0, "time %d", i);
    EXPECT(!rollback_restart_from(&r, 4), "one time more helps no more");
    EXPECT(rollback_restart_from(&r, 8), "another checkpoint does");
}

static void test_checkpoint_minutes(void) {
    static const struct {
        const char *options;
        double minutes; // since the last one
        bool due;
    } cases[] = {{"--out x", 29.9, false},
                 {"--out x", 30, true},
                 {"", 30, false},
                 {"--out x --checkpoint-minutes 0.5", 0.4, false},
                 {"--out x --checkpoint-minutes 0.5", 0.5, true},
                 {"--out x --checkpoint-minutes 0", 1e6, false}};
    ProgramData d = program_data();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        InnerRun *inner = inner_open(&d, cases[i].options);
        inner->run.checkpointer.saved_at = now_seconds() - 60 * cases[i].minutes;
        run_step(&inner->run);
        EXPECT(inner->run.checkpointer.due == cases[i].due, "%s: after %g minutes it is due: %d", cases[i].options,
               cases[i].minutes, inner->run.checkpointer.due);
        inner_close(inner);
    }
    test_remove_directory(&d.dir);
}

static const Test ranks_tests[] = {
    {"a checkpoint is due --checkpoint-minutes after the last one", test_checkpoint_minutes},
    {"every element has one owner, for any number of ranks, level and bucket size", test_shard_owners},
    {"with --zero 2 no gradient of a group remains in the padding of another", test_padding_of_gradients},
    {"buckets grow with the number of ranks, between bounds", test_bucket_sizes},
    {"a rollback is due if enough of the last steps are bad", test_rollback_condition},
};
enum { RANKS_TEST_COUNT = sizeof(ranks_tests) / sizeof(ranks_tests[0]) };

// ---- programs

// The path of a program in the directory of the program under test.
static const char *ranks_program(const char *name) {
    static char path[PATH_MAX];
    char directory[PATH_MAX];
    FORMAT(directory, "%s", test_program_path());
    *strrchr(directory, '/') = 0;
    FORMAT(path, "%s/%s", directory, name);
    if (access(path, X_OK) != 0) {
        FORMAT(path, "%s/build/%s", directory, name);
        CHECK(access(path, X_OK) == 0, "cannot find %s beside %s: make build/%s", name, test_program_path(), name);
    }
    return path;
}

static const char *const ranks_environment =
    "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 "
    "OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_WAIT_POLICY=passive";
#define RANKS_MODEL "--hidden 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn 40 --seq-len 16 --warmup 2 --threads 1"
#define EXPERTS "--experts 4 --experts-active 2 --expert-ffn 20"
static const char *const ranks_model_of_layers = RANKS_MODEL, *const ranks_model = "--layers 3 " RANKS_MODEL;
// removes the messages of mpirun and OpenMPI about failed processes from stderr
static const char *const ranks_filter = "2> raw; status=$?; grep -a '^diffv2: ' raw >&2; (exit $status)";

// fault: environment variables, FAULT=... or PEAK=...
static void ranks_run(ProgramResult *r, const ProgramData *d, int ranks, const char *fault, const char *options) {
    run_command(r, "cd '%s' && %s && %s timeout 120 mpirun -q -n %d %s %s", d->dir.path, ranks_environment, fault,
                ranks, ranks_program("faulty_diffv2"), options);
    char *kept = r->err, *line = r->err;
    while (*line) { // remove the messages of mpirun and OpenMPI
        size_t n = strcspn(line, "\n") + 1;
        if (strncmp(line, "diffv2: ", 8) == 0) memmove(kept, line, n), kept += n;
        line += n;
    }
    *kept = 0;
}
static void ranks_train(ProgramResult *r, const ProgramData *d, int ranks, const char *fault, const char *out,
                        const char *options) {
    char text[1000];
    // YOCO requires an even number of layers
    const char *layers = strstr(options, "--layers") ? "" : strstr(options, "--yoco") ? "--layers 4" : "--layers 3";
    FORMAT(text, "--train-data train.bin %s %s --out '%s' %s", layers, ranks_model_of_layers, out, options);
    ranks_run(r, d, ranks, fault, text);
}
static void ranks_resume(ProgramResult *r, const ProgramData *d, int ranks, const char *out, const char *options) {
    char text[600];
    FORMAT(text, "--out '%s' --resume --threads 1 %s", out, options);
    ranks_run(r, d, ranks, "", text);
}

// The values of a key in the train records of a run.
static int ranks_log(const ProgramData *d, const char *out, const char *key, double *values, int limit) {
    char path[700], line[4096];
    int count = 0;
    FORMAT(path, "%s/%s/log.jsonl", d->dir.path, out);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof(line), f) && count < limit) {
        cJSON *record = cJSON_Parse(line);
        const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "kind"));
        if (kind && strcmp(kind, "train") == 0 && !json_get_number(record, key, &values[count++]))
            values[count - 1] = NAN;
        cJSON_Delete(record);
    }
    if (f) fclose(f);
    return count;
}
static void expect_losses(const ProgramData *d, const char *a, const char *b, double tolerance) {
    static const char *const keys[] = {"loss", "grad_norm"};
    for (int k = 0; k < 2; k++) {
        double x[100], y[100];
        int count = ranks_log(d, a, keys[k], x, 100);
        EXPECT(count > 0 && ranks_log(d, b, keys[k], y, 100) == count, "%s has %d steps, %s has others", a, count, b);
        for (int i = 0; i < count; i++)
            EXPECT(fabs(x[i] - y[i]) <= tolerance * fabs(x[i]), "%s of step %d: %.9g in %s, %.9g in %s", keys[k], i + 1,
                   x[i], a, y[i], b);
    }
}
static void expect_same_weights(const ProgramData *d, const char *a, const char *b, int step) {
    static const char *const files[] = {"model", "optimizer"};
    ProgramResult r;
    for (int i = 0; i < 2; i++) {
        run_command(&r,
                    "cd '%s' && cmp %s/checkpoints/step_%08d/%s.safetensors %s/checkpoints/step_%08d/%s.safetensors",
                    d->dir.path, a, step, files[i], b, step, files[i]);
        EXPECT(r.status == 0, "%s", r.out[0] ? r.out : r.err);
    }
}

// fp32 sums in a different order; twelve Adam updates, which divide by the size of a gradient, amplify the difference
static const double RANKS_TOLERANCE = 2e-4;

// If a rank is killed or stopped, the others print a line with its number and the step, and the run can be resumed.
// last_step: the latest step at which the fault may occur.
static void expect_fault(const ProgramData *d, int ranks, const char *fault, const char *word, const char *out,
                         int last_step) {
    ProgramResult r;
    double begin = now_seconds();
    ranks_train(&r, d, ranks, fault, out,
                "--steps 12 --total-batch 192 --batch-size 2 --checkpoint-every 2 --timeout 2");
    double seconds = now_seconds() - begin;
    int lines = count_lines(r.err);
    EXPECT(r.status != 0 && strstr(r.err, word), "%s: status %d, stderr: %.300s", fault, r.status, r.err);
    EXPECT(lines >= 1 && lines < ranks, "%s: %d lines: %.300s", fault, lines, r.err);
    bool named = false;
    for (const char *at = r.err; (at = strstr(at, "at step ")) != NULL; at++)
        named = named || (atoi(at + strlen("at step ")) >= 5 && atoi(at + strlen("at step ")) <= last_step);
    EXPECT(named, "%s: no step from 5 to %d in %.300s", fault, last_step, r.err);
    EXPECT(seconds < 30, "%s: the others took %.0f s to notice", fault, seconds);
    ranks_resume(&r, d, ranks, out, "");
    EXPECT_STATUS(r, 0);
    expect_same_weights(d, "whole", out, 12);
}

static void test_rank_killed_or_stopped(void) {
    static const char *const places[] = {"data", "backward", "gradients", "update", "save", "write"};
    ProgramData d = fault_data();
    ProgramResult r;
    ranks_train(&r, &d, 3, "", "whole", "--steps 12 --total-batch 192 --batch-size 2 --checkpoint-every 2 --timeout 2");
    EXPECT_STATUS(r, 0);
    for (int i = 0; i < 6; i++) {
        char fault[100], word[100], out[20];
        int rank = 1 + i % 2;
        FORMAT(fault, "FAULT=kill:%d:6:%s", rank, places[i]);
        FORMAT(word, "rank %d (", rank);
        FORMAT(out, "kill%d", i);
        bool writes = strcmp(places[i], "write") == 0; // while step 7 or 8 is computed
        expect_fault(&d, 3, fault, word, out, writes ? 8 : 6);
        if (i % 2) continue;
        FORMAT(fault, "FAULT=stop:%d:6:%s", rank, places[i]);
        FORMAT(out, "stop%d", i);
        expect_fault(&d, 3, fault, word, out, 6);
    }
    // rank 0, which prints the warnings and removes the files
    expect_fault(&d, 3, "FAULT=kill:0:6:backward", "rank 0 (", "kill", 6);
    expect_fault(&d, 3, "FAULT=stop:0:6:gradients", "rank 0 (", "stop", 6);
    test_remove_directory(&d.dir);
}

static void test_signal_to_ranks(void) {
    static const char *const kills[] = {"kill -TERM $(echo $pids | cut -d' ' -f2)",
                                        "kill -USR1 $(echo $pids | cut -d' ' -f1)",
                                        "kill -INT $pids",
                                        "kill -HUP $(echo $pids | cut -d' ' -f2)",
                                        "kill -USR1 $launcher",
                                        "kill -TERM $launcher"};
    for (int i = 0; i < 6; i++) {
        ProgramData d = fault_data();
        ProgramResult r;
        // mpirun forwards SIGUSR1; on SIGTERM it ends its processes, and the newest checkpoint remains
        run_command(&r,
                    "cd '%s' && %s && { mpirun -q -n 2 %s --train-data train.bin %s --steps 1000000 --schedule "
                    "constant --batch-size 2 --checkpoint-every 3 --out run > printed & } && "
                    "launcher=$! && until grep -qs '\"step\": *5,' run/log.jsonl; do sleep 0.02; done; pids=$(pgrep -P "
                    "$launcher -f faulty_diffv2); %s; wait $launcher; "
                    "status=$?; cat printed; exit $status",
                    d.dir.path, ranks_environment, ranks_program("faulty_diffv2"), ranks_model, kills[i]);
        if (i < 5)
            EXPECT(r.status == EXIT_SIGNALLED && strstr(r.out, "--resume"), "%s: status %d, %.200s", kills[i], r.status,
                   r.err);
        else EXPECT(r.status != 0, "%s: status %d", kills[i], r.status);
        int answers = count_of(r.err, "a checkpoint is saved"); // of one rank for all
        EXPECT(i == 5 || answers == 1, "%s: %d answers", kills[i], answers);
        double saved = 0, step = 0;
        run_command(&r, "ls '%s/run/checkpoints' | grep -v tmp | tail -n 1 | tr -dc 0-9", d.dir.path);
        saved = atof(r.out);
        char options[100];
        FORMAT(options, "--steps %d", (int)saved + 3);
        ranks_resume(&r, &d, 2, "run", options);
        EXPECT_STATUS(r, 0);
        int records = log_records(&d, "run", "train", "step", &step);
        EXPECT(saved > 0 && step == saved + 3 && records == (int)step, "%s: resumed from %g, %d records up to step %g",
               kills[i], saved, records, step);
        test_remove_directory(&d.dir);
    }
}

// A few milliseconds, so that ranks that used their own clocks would disagree.
static void test_ranks_save_together(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    ranks_train(&r, &d, 3, "", "whole", "--steps 60 --batch-size 2 --checkpoint-minutes 0");
    EXPECT_STATUS(r, 0);
    ranks_train(&r, &d, 3, "", "run", "--steps 60 --batch-size 2 --checkpoint-minutes 5e-5 --keep 0 --timeout 5");
    EXPECT_STATUS(r, 0);
    expect_same_weights(&d, "whole", "run", 60);
    run_command(&r, "cd '%s' && ls whole/checkpoints | wc -l; ls run/checkpoints | wc -l", d.dir.path);
    EXPECT(atoi(r.out) == 1 && atoi(r.out + 2) > 2, "without and with: %.100s", r.out);
    // a resume has the option from the checkpoint
    ranks_resume(&r, &d, 3, "run", "--steps 80");
    EXPECT(r.status == 0 && count_of(r.out, "written in") > 1, "status %d, %.300s", r.status, r.err);
    test_remove_directory(&d.dir);
}

// At whichever point of a step a signal arrives, the run ends with status 3 and a checkpoint of its last step.
static void test_signal_at_any_point(void) {
    for (int i = 0; i < 5; i++) {
        int ranks = i < 3 ? 1 : 2;
        ProgramData d = fault_data();
        ProgramResult r;
        char fault[40];
        double step = 0;
        FORMAT(fault, "FAULT=signal:%d:5:%d", i == 4, i < 3 ? i + 1 : 1);
        ranks_train(&r, &d, ranks, fault, "run", "--steps 12 --batch-size 2");
        log_records(&d, "run", "train", "step", &step);
        EXPECT(r.status == (step < 12 ? EXIT_SIGNALLED : EXIT_DONE) && (step == 5 || i == 2),
               "%s: status %d at step %g, %.300s", fault, r.status, step, r.err);
        run_command(&r, "ls '%s/run/checkpoints'", d.dir.path);
        EXPECT(atoi(r.out + strlen("step_")) == (int)step, "%s: stopped at step %g, saved are %.100s", fault, step,
               r.out);
        test_remove_directory(&d.dir);
    }
}

static void test_ranks_differ(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    char common[600];
    FORMAT(common, "--train-data train.bin %s --batch-size 2 --steps 3", ranks_model);
    const char *trainer = test_program_path();
    run_command(&r, "cd '%s' && %s && mpirun -q -n 1 %s %s --lr 1e-3 : -n 1 %s %s --lr 2e-3 %s", d.dir.path,
                ranks_environment, trainer, common, trainer, common, ranks_filter);
    EXPECT_ONE_LINE(r, 2, "--lr is '0.002' here and '0.001' on rank 0");
    run_command(&r, "cd '%s' && %s && mpirun -q -n 1 %s %s : -n 1 %s %s %s", d.dir.path, ranks_environment, trainer,
                common, ranks_program("faulty_diffv2"), common, ranks_filter);
    EXPECT_ONE_LINE(r, 2, "program is '");
    run_command(&r, "cd '%s' && %s && mpirun -q -n 1 %s %s : -n 1 env CUBLAS_EMULATION_STRATEGY=eager %s %s %s",
                d.dir.path, ranks_environment, trainer, common, trainer, common, ranks_filter);
    EXPECT_ONE_LINE(r, 2, "CUBLAS_EMULATION_STRATEGY is 'eager' here and '(unset)' on rank 0");
    run_command(&r,
                "cd '%s' && %s && mkdir other && cp train.bin other && printf x | dd of=other/train.bin bs=1 seek=1100 "
                "conv=notrunc status=none && "
                "mpirun -q -n 1 %s %s : -n 1 sh -c 'cd other && exec \"$@\"' sh %s %s %s",
                d.dir.path, ranks_environment, trainer, common, trainer, common, ranks_filter);
    EXPECT_ONE_LINE(r, 1, "the-fingerprint-of-the-training-data is '");
    run_command(
        &r,
        "cd '%s' && %s && mkdir more && cp train.bin more && cp train.bin val.bin && cp other/train.bin more/val.bin "
        "&& "
        "mpirun -q -n 1 %s %s --val-data val.bin : -n 1 sh -c 'cd more && exec \"$@\"' sh %s %s --val-data val.bin %s",
        d.dir.path, ranks_environment, trainer, common, trainer, common, ranks_filter);
    EXPECT_ONE_LINE(r, 1, "the-fingerprint-of-the-validation-data is '");
    run_command(&r, "cd '%s' && %s && mpirun -q -n 3 %s %s --batch-sizes 3 %s", d.dir.path, ranks_environment, trainer,
                common, ranks_filter);
    EXPECT_ONE_LINE(r, 2, "unknown option --batch-sizes"); // once, though all three say it
    run_command(&r, "cd '%s' && %s && mpirun -q -n 2 %s %s --total-batch 96 %s", d.dir.path, ranks_environment, trainer,
                common, ranks_filter);
    EXPECT_ONE_LINE(r, 2, "not a multiple");
    run_command(&r, "cd '%s' && %s && mpirun -q -n 2 %s %s --dump-grads x %s", d.dir.path, ranks_environment, trainer,
                common, ranks_filter);
    EXPECT_ONE_LINE(r, 2, "requires a single process, not 2 ranks");
    // a build without MPI, and a launcher that MPI does not support
    run_command(&r, "cd '%s' && OMPI_COMM_WORLD_SIZE=2 %s %s", d.dir.path, ranks_program("single_diffv2"), common);
    EXPECT_ONE_LINE(r, 1, "built without MPI");
    run_command(&r, "cd '%s' && %s && SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 %s %s %s", d.dir.path, ranks_environment,
                trainer, common, ranks_filter);
    EXPECT_ONE_LINE(r, 1, "started as one of 4 processes");
    test_remove_directory(&d.dir);
}

static void test_help_of_ranks(void) {
    static const char *const programs[] = {"faulty_diffv2", "single_diffv2"};
    static const struct {
        const char *option, *text;
    } asks[] = {{"--help", "Usage: "}, {"--version", "train_diffv2, revision "}};
    ProgramResult r;
    for (int p = 0; p < 2; p++)
        for (int a = 0; a < 2; a++) {
            const char *path = ranks_program(programs[p]), *text = asks[a].text;
            run_command(&r, "%s && mpirun -q -n 3 %s %s", ranks_environment, path, asks[a].option);
            EXPECT(r.status == 0 && strstr(r.out, text) == r.out && !strstr(r.out + 1, text),
                   "mpirun %s %s: status %d, %.200s %.300s", programs[p], asks[a].option, r.status, r.out, r.err);
            for (int rank = 0; rank < 2; rank++) { // as srun starts them
                run_command(&r, "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=%d timeout 20 %s %s", rank, path,
                            asks[a].option);
                EXPECT(r.status == 0 && r.err[0] == 0 && (rank == 0 ? strstr(r.out, text) == r.out : r.out[0] == 0),
                       "rank %d, %s %s: status %d, %.100s %.300s", rank, programs[p], asks[a].option, r.status, r.out,
                       r.err);
            }
        }
}

// Sends a byte to each of OpenMPI's ports as soon as it is open, and keeps the connections.
static pid_t start_stranger(uint16_t first, int ports) {
    pid_t parent = getpid(), pid = fork();
    CHECK(pid >= 0, "cannot fork: %s", strerror(errno));
    if (pid > 0) return pid;
    for (bool hit[8] = {false}; getppid() == parent; usleep(500))
        for (int i = 0; i < ports; i++) {
            struct sockaddr_in to = {AF_INET, htons((uint16_t)(first + i)), {htonl(INADDR_LOOPBACK)}, {0}};
            int fd = hit[i] ? -1 : socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (fd < 0) continue;
            hit[i] = connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0 && send(fd, "x", 1, MSG_NOSIGNAL) == 1;
            if (!hit[i]) close(fd);
        }
    _exit(0);
}

// OpenMPI's TCP transport waits for ever for the rest of what a stranger has begun to send.
static void test_stranger_at_start(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    char environment[200];
    uint16_t first = (uint16_t)(10000 + getpid() % 1250 * 8); // below the ports that the system assigns
    pid_t stranger = start_stranger(first, 8);
    FORMAT(environment, "OMPI_MCA_btl_tcp_port_min_v4=%d OMPI_MCA_btl_tcp_port_range_v4=8", first);
    ranks_train(&r, &d, 2, environment, "shared", "--steps 2 --batch-size 2 --start-timeout 20");
    EXPECT(r.status == 0 && !r.err[0], "on one machine: status %d, %.300s", r.status, r.err);
    strcat(environment, " OMPI_MCA_btl=self,tcp");
    ranks_train(&r, &d, 2, environment, "tcp", "--steps 2 --batch-size 2 --start-timeout 1");
    EXPECT_ONE_LINE(r, 1, "rank 0: MPI has not connected the ranks within 1 s (--start-timeout)");
    kill(stranger, SIGKILL);
    waitpid(stranger, NULL, 0);
    test_remove_directory(&d.dir);
}

static void test_nan_on_one_rank(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    for (int k = 0; k <= 4; k++) {
        int zero = k % 4;
        char options[200], out[20];
        FORMAT(out, "nan%d", k);
        FORMAT(options, "--steps 8 --batch-size 2 --zero %d --check-ranks-every 1%s", zero,
               k == 4 ? " --gemm fp8" : "");
        ranks_train(&r, &d, 3, "FAULT=nan:2:4", out, options);
        EXPECT(r.status == 0 && count_lines(r.err) == 1 && strstr(r.err, "step 4:") && strstr(r.err, "not finite"),
               "%s: status %d, %.300s", options, r.status, r.err);
    }
    for (int k = 1; k <= 3; k++) expect_same_weights(&d, "nan0", k == 1 ? "nan1" : k == 2 ? "nan2" : "nan3", 8);
    test_remove_directory(&d.dir);
}

static void test_bit_flip_on_one_rank(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    ranks_train(&r, &d, 3, "FAULT=flip:1:5", "run",
                "--steps 12 --batch-size 2 --checkpoint-every 2 --check-ranks-every 100");
    // before the checkpoint of step 6
    EXPECT_ONE_LINE(r, 1, "after step 6 rank 1 has different values in model.embed_tokens.weight than most ranks");
    ranks_train(&r, &d, 3, "", "whole", "--steps 12 --batch-size 2 --checkpoint-every 2 --check-ranks-every 100");
    ranks_resume(&r, &d, 3, "run", "");
    EXPECT_STATUS(r, 0);
    expect_same_weights(&d, "whole", "run", 12);
    test_remove_directory(&d.dir);
}

static void test_ranks_save_finite_weights(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    ranks_train(&r, &d, 3, "FAULT=broken:0:6,broken:1:6,broken:2:6", "run",
                "--steps 12 --batch-size 2 --checkpoint-every 3 --timeout 5");
    EXPECT(r.status == 1 && strstr(r.err, "weights after step 6 are not finite and are not saved"),
           "status %d, stderr: %.300s", r.status, r.err);
    run_command(&r, "ls '%s/run/checkpoints' | tr '\n' ' '", d.dir.path);
    EXPECT(strcmp(r.out, "step_00000003 ") == 0, "checkpoints: %s", r.out); // nor was it begun
    test_remove_directory(&d.dir);
}

static void test_zero_3_refuses(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    ranks_train(&r, &d, 2, "", "samples", "--steps 2 --zero 3 --sample-every 1");
    EXPECT_ONE_LINE(r, 2, "--zero 3 does not support --sample-every");
    char path[600];
    FORMAT(path, "%s/choices", d.dir.path);
    choice_write_random(path, 3, 12, 3, 256, 16, 5);
    ranks_train(&r, &d, 2, "", "choices", "--steps 2 --zero 3 --eval-choices c=choices --val-every 2");
    EXPECT_ONE_LINE(r, 2, "--zero 3 does not support --eval-choices");
    for (int most = 2; most <= 3; most++) { // a dry run offers what is supported
        run_command(&r, "cd '%s' && %s --dry-run --ranks 2 --train-data train.bin %s %s", d.dir.path,
                    test_program_path(), ranks_model, most == 2 ? "--eval-choices c=choices --val-every 2" : "");
        EXPECT(r.status == 0 && strstr(r.out, "\n  2 ") && (strstr(r.out, "\n  3 ") != NULL) == (most == 3),
               "%d: %.300s%.900s", most, r.err, r.out);
    }
    ranks_train(&r, &d, 2, "", "samples", "--steps 2 --zero 4");
    EXPECT_ONE_LINE(r, 2, "--zero");
    test_remove_directory(&d.dir);
}

static void test_full_disk_on_one_rank(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    char common[600];
    const char *trainer = ranks_program("faulty_diffv2");
    FORMAT(common, "--train-data train.bin %s --batch-size 2 --steps 12 --checkpoint-every 5 --out run", ranks_model);
    // a file size limit acts like a full disk: a write fails, on this rank only. The files of shared memory are larger
    run_command(&r,
                "cd '%s' && %s && OMPI_MCA_btl=self,tcp mpirun -q -n 1 %s %s : -n 1 sh -c 'ulimit -f 4; exec \"$@\"' "
                "sh %s %s %s",
                d.dir.path, ranks_environment, trainer, common, trainer, common, ranks_filter);
    EXPECT_ONE_LINE(r, 1, "diffv2: rank 1 (");
    EXPECT(strstr(r.err, "cannot write run/checkpoints/step_00000005.tmp"), "stderr: %.300s", r.err);
    run_command(&r, "ls '%s/run/checkpoints'", d.dir.path);
    EXPECT(!r.out[0], "a checkpoint, or a part of it, is left: %s", r.out);
    ranks_resume(&r, &d, 2, "run", "");
    EXPECT_STATUS(r, 0);
    ranks_train(&r, &d, 2, "", "whole", "--batch-size 2 --steps 12 --checkpoint-every 5");
    expect_same_weights(&d, "whole", "run", 12);
    test_remove_directory(&d.dir);
}

// The number of checkpoints that were written during at least one step; all: the number of checkpoints in the log.
static int checkpoints_beside_steps(const ProgramData *d, const char *out, int *all) {
    char path[700], line[4096];
    int count = *all = 0;
    FORMAT(path, "%s/%s/log.jsonl", d->dir.path, out);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof(line), f)) {
        cJSON *record = cJSON_Parse(line);
        double step = 0, of_step = 0, ms = 0, stall_ms = 0;
        if (json_get_number(record, "of_step", &of_step) && json_get_number(record, "step", &step) &&
            json_get_number(record, "ms", &ms) && json_get_number(record, "stall_ms", &stall_ms)) {
            bool beside = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(record, "background"));
            EXPECT(beside || (step == of_step && ms == stall_ms), "%s: %.200s", out, line);
            count += beside && step > of_step && ms > 0 && stall_ms > 0;
            ++*all;
        }
        cJSON_Delete(record);
    }
    if (f) fclose(f);
    return count;
}

static const char *const background_options =
    "--steps 9 --total-batch 192 --batch-size 2 --checkpoint-every 3 --keep 0";

// Writing takes several steps, during which the whole state changes.
static void test_background_checkpoint(void) {
    static const int ranks[] = {1, 2, 3, 3, 2}, zero[] = {0, 0, 1, 2, 1};
    for (int k = 0; k < 5; k++) {
        ProgramData d = fault_data();
        ProgramResult r;
        char options[300];
        int all = 0;
        FORMAT(options, "%s --zero %d --no-checkpoint-background", background_options, zero[k]);
        ranks_train(&r, &d, ranks[k], "", "waits", options);
        EXPECT(r.status == 0 && checkpoints_beside_steps(&d, "waits", &all) == 0 && all == 3, "%d checkpoints: %.300s",
               all, r.err);
        FORMAT(options, "%s --zero %d", background_options, zero[k]);
        ranks_train(&r, &d, ranks[k], k < 4 ? "SLOW=150" : "NO_COPY=1", "goes_on", options);
        int beside = checkpoints_beside_steps(&d, "goes_on", &all), warned = count_of(r.err, "training waits while");
        EXPECT(r.status == 0 && beside == (k < 4 ? 2 : 0) && all == 3 && warned == (k == 4),
               "%d of %d checkpoints were written beside steps: %.300s", beside, all, r.err);
        expect_same_directories(&d, "waits/checkpoints", "goes_on/checkpoints");
        test_remove_directory(&d.dir);
    }
}

static void test_background_checkpoint_faults(void) {
    static const struct {
        const char *fault, *there; // the checkpoints afterwards
    } cases[] = {{"SLOW=150 FAULT=kill:0:6:write", "step_00000003\n"},
                 {"SLOW=150 FAULT=signal:0:4:1", "step_00000003\nstep_00000004\n"}};
    ProgramData d = fault_data();
    ProgramResult r;
    for (int ranks = 1; ranks <= 2; ranks++) {
        char whole[20], out[20];
        FORMAT(whole, "whole%d", ranks);
        ranks_train(&r, &d, ranks, "", whole, background_options);
        EXPECT_STATUS(r, 0);
        for (int c = 0; c < 2; c++) {
            FORMAT(out, "run%d%d", ranks, c);
            ranks_train(&r, &d, ranks, cases[c].fault, out, background_options);
            EXPECT(c == 0 ? r.status != 0 : r.status == EXIT_SIGNALLED, "%s, %d ranks: status %d, %.300s",
                   cases[c].fault, ranks, r.status, r.err);
            run_command(&r, "ls '%s/%s/checkpoints' | grep -v tmp", d.dir.path, out);
            EXPECT(strcmp(r.out, cases[c].there) == 0, "%s, %d ranks: there are %.200s", cases[c].fault, ranks, r.out);
            ranks_resume(&r, &d, ranks, out, "");
            EXPECT(r.status == 0 && !strstr(r.err, "skipping checkpoint"), "status %d, %.300s", r.status, r.err);
            expect_same_weights(&d, whole, out, 9);
        }
    }
    test_remove_directory(&d.dir);
}

static void test_checkpoints_not_removable(void) {
    for (int ranks = 1; ranks <= 2; ranks++) {
        ProgramData d = fault_data();
        ProgramResult r;
        const char *const options = "--steps 8 --batch-size 2 --total-batch 64 --checkpoint-every 2 --keep 1";
        ranks_train(&r, &d, ranks, "", "whole", options);
        EXPECT_STATUS(r, 0);
        ranks_train(&r, &d, ranks, "BUSY=step_0000000", "run", options);
        EXPECT(r.status == 0 && count_of(r.err, "cannot remove") >= 3, "status %d, %.300s", r.status, r.err);
        expect_same_directories(&d, "whole/checkpoints/step_00000008", "run/checkpoints/step_00000008");
        ranks_resume(&r, &d, ranks, "run", "--steps 9 --schedule constant");
        EXPECT(r.status == 0 && !strstr(r.err, "cannot remove"), "status %d, %.300s", r.status, r.err);
        run_command(&r, "ls '%s/run/checkpoints'", d.dir.path);
        EXPECT(strcmp(r.out, "step_00000009\n") == 0, "left are: %.200s", r.out);
        test_remove_directory(&d.dir);
    }
}

static void test_ranks_verify_init(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    ranks_train(&r, &d, 1, "", "run", "--steps 2 --batch-size 2");
    EXPECT_STATUS(r, 0);
    const char *const start =
        "--init run/checkpoints/step_00000002 --train-data train.bin --steps 2 --batch-size 2 --threads 1";
    ranks_run(&r, &d, 3, "", start);
    EXPECT_STATUS(r, 0);
    run_command(
        &r, "cd '%s'/run/checkpoints/step_00000002 && printf x | dd of=model.safetensors bs=1 seek=5001 conv=notrunc",
        d.dir.path);
    ranks_run(&r, &d, 3, "", start);
    EXPECT_ONE_LINE(r, EXIT_FAILED, "its model.safetensors does not match its checksum");
    test_remove_directory(&d.dir);
}

static void test_rollback_skips_data(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    // steps 7 and 8 are bad: from step 8 back to the checkpoint of step 6, then on with window 48
    const char *const options =
        "--steps 12 --batch-size 2 --total-batch 96 --checkpoint-every 3 --schedule constant --rollback 2:4";
    for (int ranks = 1; ranks <= 3; ranks += 2) {
        char out[20], text[300];
        FORMAT(out, "run%d", ranks);
        ranks_train(&r, &d, ranks, "FAULT=nan:0:7,nan:0:8", out, options);
        // the fault depends on the step, so it occurs twice more; the third time the run gives up
        EXPECT(r.status == 1 && strstr(r.err, "does not help"), "%d ranks: status %d, stderr %.400s", ranks, r.status,
               r.err);
        EXPECT(
            strstr(r.err, "back to the checkpoint of step 6, training continues with the data that follow (window 48)"),
            "stderr %.400s", r.err);
        // without the fault: continues from step 6, with the data after the last bad step
        ranks_resume(&r, &d, ranks, out, "");
        EXPECT(r.status == 0 && strstr(r.out, "training from step 6"), "status %d, %.300s", r.status, r.err);
        double step = 0, at = 0, tokens = 0;
        EXPECT(log_records(&d, out, "train", "step", &step) == 12 && step == 12, "the log ends at step %g", step);
        log_records(&d, out, "train", "tokens", &tokens);
        EXPECT(tokens == 12 * 96, "%d ranks: %g tokens in 12 steps of 96", ranks, tokens);
        double first_bad = 0;
        int events = log_records(&d, out, "event", "from_step", &at);
        log_records(&d, out, "event", "first_bad_step", &first_bad);
        EXPECT(events >= 1 && at == 8 && first_bad == 7, "%d events, the last from step %g, of which %g was bad",
               events, at, first_bad);
        run_command(&r, "grep -h -m 1 next_window '%s/%s/checkpoints/step_00000012/trainer_state.json' | tr -dc 0-9",
                    d.dir.path, out);
        FORMAT(text, "%d", 12 * 6 + 3 * 2 * 6); // three times two steps of six windows were passed over and saved
        EXPECT(strcmp(r.out, text) == 0, "%d ranks: the next window is %s, not %s", ranks, r.out, text);
    }
    expect_losses(&d, "run1", "run3", RANKS_TOLERANCE);
    ranks_train(&r, &d, 1, "FAULT=nan:0:2", "early", "--steps 12 --batch-size 2 --checkpoint-every 6 --rollback 1:1");
    EXPECT(r.status == 0 && strstr(r.err, "there is no checkpoint before step 2: training continues"),
           "status %d, %.300s", r.status, r.err);
    test_remove_directory(&d.dir);
}

// The update of step 8 is reverted, although no rank has all parameters: the losses that follow are those of --zero 2.
static void test_rollback_of_pieces(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    for (int zero = 2; zero <= ZERO_MOST; zero++) {
        char out[20], options[200];
        FORMAT(out, "run%d", zero);
        FORMAT(options, "--steps 12 --batch-size 2 --checkpoint-every 3 --rollback 2:4 --gemm bf16 --zero %d", zero);
        ranks_train(&r, &d, 3, "FAULT=nan:0:7,nan:0:9", out, options);
        EXPECT(r.status == 1 && strstr(r.err, "back to the checkpoint of step 6"), "--zero %d: status %d, %.400s", zero,
               r.status, r.err);
    }
    run_command(&r,
                "cd '%s' && for i in 2 3; do grep -o '\"loss\": *[0-9.]*' run$i/log.jsonl > losses$i; done; "
                "cmp losses2 losses3 && wc -l < losses3",
                d.dir.path);
    EXPECT(r.status == 0 && atoi(r.out) > 12, "status %d, %.200s", r.status, r.out);
    test_remove_directory(&d.dir);
}

static void expect_newest(const ProgramData *d, const char *out, int step) {
    ProgramResult r;
    char wanted[40];
    FORMAT(wanted, "step_%08d\n", step);
    run_command(&r, "ls '%s/%s/checkpoints' | grep -v tmp | tail -n 1", d->dir.path, out);
    EXPECT(strcmp(r.out, wanted) == 0, "the newest checkpoint of %s is %s, not %s", out, r.out, wanted);
}

// Steps 135 and 137 are spikes, whose updates are applied. The checkpoint of step 135 includes the first one, so the
// run returns to that of step 134, where the first start was stopped.
static void test_rollback_reverts_updates(void) {
    static const char *const back =
        "back to the checkpoint of step 134, training continues with the data that follow (window 822)";
    static TrainRecord records[140];
    ProgramData d = fault_data();
    ProgramResult r;
    for (int ranks = 1; ranks <= 3; ranks += 2) {
        ranks_train(&r, &d, ranks, "", "base",
                    "--steps 140 --batch-size 2 --total-batch 96 --checkpoint-every 3 --schedule constant "
                    "--rollback 2:4 --stop-after 134");
        EXPECT_STATUS(r, 0);
        run_command(&r, "cd '%s' && for run in killed stopped again; do cp -r base $run; done", d.dir.path);
        // Killed between the removal of the abandoned checkpoints and the next one: they must not be resumed. In the
        // background the checkpoint of step 135 could still be saved in step 137, before the removal.
        ranks_run(&r, &d, ranks, "FAULT=spike:0:135,spike:0:137,kill:0:137:save",
                  "--out killed --resume --threads 1 --no-checkpoint-background");
        EXPECT(r.status != 0, "%d ranks: status %d, %.300s", ranks, r.status, r.err);
        expect_newest(&d, "killed", 134);
        // the first bad step is known after a resume
        ranks_run(&r, &d, ranks, "FAULT=spike:0:135", "--out stopped --resume --threads 1 --stop-after 136");
        EXPECT_STATUS(r, 0);
        EXPECT(read_records(&d, "stopped", records, 140).spikes == 1, "the log has no event of the spike");
        ranks_run(&r, &d, ranks, "FAULT=spike:0:137", "--out stopped --resume --threads 1");
        EXPECT(r.status == 0 && count_of(r.err, back) == 1, "%d ranks: status %d, %.500s", ranks, r.status, r.err);
        // it occurs three more times, then the run gives up, and again at once after a resume
        for (int i = 0; i < 2; i++) {
            ranks_run(&r, &d, ranks, "FAULT=spike:0:135,spike:0:137", "--out again --resume --threads 1");
            EXPECT(r.status == 1 && strstr(r.err, "for the 4th time in a row to the checkpoint of step 134"),
                   "%d ranks: status %d, %.500s", ranks, r.status, r.err);
            EXPECT(count_of(r.err, "back to the checkpoint of step 134,") == (i ? 0 : ROLLBACK_TIMES),
                   "%d ranks, start %d: %.900s", ranks, i, r.err);
            expect_newest(&d, "again", 134);
        }
        ranks_resume(&r, &d, ranks, "again", "");
        EXPECT(r.status == 0 && strstr(r.out, "training from step 134 to 140"), "%d ranks: status %d, %.300s", ranks,
               r.status, r.err);
        run_command(&r, "rm -r '%s'/base '%s'/killed '%s'/stopped '%s'/again", d.dir.path, d.dir.path, d.dir.path,
                    d.dir.path);
    }
    test_remove_directory(&d.dir);
}

static void test_dry_run_of_ranks(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    // enough parameters that buffers dominate the memory, and enough layers that two of them are a small part
    const char *const model = "--layers 12 --hidden 256 --heads 4 --kv-heads 2 --head-dim 64 --ffn 768 --vocab 512 "
                              "--seq-len 32 --batch-size 1";
    for (int zero = 0; zero <= ZERO_MOST; zero++) {
        run_command(&r, "%s %s --dry-run --ranks 2 --zero %d --link-gbs 10", ranks_program("faulty_diffv2"), model,
                    zero);
        EXPECT_STATUS(r, 0);
        const char *memory = strstr(r.out, "memory of one of 2 ranks"),
                   *total = memory ? strstr(memory, "  total") : NULL;
        double predicted = total ? atof(total + 7) : 0, by_level[ZERO_MOST + 1] = {0}, sent[ZERO_MOST + 1] = {0},
               ms[ZERO_MOST + 1] = {0};
        const char *table = strstr(r.out, "by --zero level");
        for (int z = 0; table && z <= ZERO_MOST; z++) {
            table = strchr(table, '\n') + 1;
            int level = -1, fields = sscanf(table, "%d %lf MiB %lf MiB %lf ms", &level, &by_level[z], &sent[z], &ms[z]);
            EXPECT(fields == 4 && level == z, "no row of level %d: %.100s", z, table);
            EXPECT(fabs(ms[z] - sent[z] * 1.048576 / 10) < 0.1, "level %d: %g MiB take %g ms at 10 GB/s", z, sent[z],
                   ms[z]);
        }
        const char *copy = strstr(r.out, "copy for checkpoints, in host memory"), *of = strstr(r.out, "  total");
        double bytes = copy ? 1048576 * atof(copy + strlen("copy for checkpoints, in host memory")) : 0,
               wanted = of ? atof(of + strlen("  total")) * 3 * sizeof(real) / 2 : 0; // weights and moments of half
        EXPECT(wanted > 0 && fabs(bytes - wanted) < 0.01 * wanted, "the copy takes %g bytes, not %g", bytes, wanted);
        EXPECT(fabs(predicted - by_level[zero]) < 0.2, "the total is %g MiB, in the table %g", predicted,
               by_level[zero]);
        EXPECT(sent[0] == sent[1] && sent[2] == sent[1] && by_level[1] < by_level[0] && by_level[2] < by_level[1] &&
                   by_level[3] < by_level[2],
               "sent %g %g %g, memory %g %g %g %g", sent[0], sent[1], sent[2], by_level[0], by_level[1], by_level[2],
               by_level[3]);
        // more than --zero 2: one of 2 ranks sends half of 10 layers: all 12 in the backward except for the last two,
        // and in the forward except for the first two, which the update has gathered
        const char *attention = strstr(r.out, "  attention "), *mlp = strstr(r.out, "  MLP ");
        double layers = attention && mlp ? atof(attention + 12) + atof(mlp + 6) : 0,
               more = 0.5 * 10 / 12 * layers * sizeof(floatX) / 1048576;
        EXPECT(layers > 0 && fabs(sent[3] - sent[2] - more) < 0.01 * more, "level 3 sends %g MiB more, not %g",
               sent[3] - sent[2], more);
#ifndef __SANITIZE_ADDRESS__ // which more than doubles the memory of a rank
        run_command(&r,
                    "cd '%s' && rm -f peak && %s && PEAK=peak mpirun -q -n 2 %s --train-data train.bin %s --threads 1 "
                    "--steps 3 --zero %d && sort -n peak | tail -n 1",
                    d.dir.path, ranks_environment, ranks_program("faulty_diffv2"), model, zero);
        const char *last = r.out + strlen(r.out);
        while (last > r.out + 1 && last[-2] != '\n') last--;
        double peak = atof(last > r.out ? last - 1 : last) / 1024;
        EXPECT(fabs(peak - predicted) < 0.1 * predicted + 24, "--zero %d: a rank took %.1f MiB, the dry run says %.1f",
               zero, peak, predicted);
#endif
    }
    run_command(&r, "%s --dry-run --ranks 4 --link-gbs 0", test_program());
    EXPECT_ONE_LINE(r, 2, "--link-gbs");
    run_command(&r, "%s --train-data x --ranks 4", test_program());
    EXPECT_ONE_LINE(r, 2, "--ranks requires --dry-run");
    test_remove_directory(&d.dir);
}

// A model that takes about 60% of the available memory: one rank fits, two do not.
static void test_memory_of_ranks(void) {
    ProgramData d = program_data();
    ProgramResult r;
    HostMemory host = {0, ""};
    Options o;
    char name[] = "x", preset[] = "--preset=1.4b", vocabulary[] = "--vocab=256", dry_run[] = "--dry-run";
    char *arguments[] = {name, preset, vocabulary, dry_run};
    options_parse(&o, 4, arguments);
    options_finish(&o, 1);
    ModelConfig c = options_model(&o);
    double layer_bytes = 16.0 * (double)model_parameter_count(&c, false) / c.L; // weights, gradients and two moments
    options_free(&o);
    EXPECT(host_memory("", &host), "the system does not say how much memory is available");
    char options[300];
    FORMAT(options, "--preset 1.4b --vocab 256 --layers %d --seq-len 8 --batch-size 1 --train-data train.bin",
           max_int(1, (int)(0.6 * (double)host.available / layer_bytes)));
    run_command(&r, "cd '%s' && %s %s --dry-run", d.dir.path, test_program_path(), options);
    EXPECT(r.status == EXIT_DONE && strstr(r.out, "available: enough"), "status %d: %.900s", r.status, r.out);
    ranks_run(&r, &d, 2, "", options);
    EXPECT(r.status == EXIT_FAILED && strstr(r.err, "too little memory: ") &&
               strstr(r.err, ", 2 times on this machine;"),
           "status %d: %.900s", r.status, r.err);
    test_remove_directory(&d.dir);
}

static const Test ranks_program_tests[] = {
    {"a killed or stopped rank is reported, and a restart resumes bitwise", test_rank_killed_or_stopped},
    {"a signal to one rank, to all or to the launcher leaves a checkpoint", test_signal_to_ranks},
    {"all ranks save at the step that the clock of rank 0 determines", test_ranks_save_together},
    {"a signal at any point of a step loses no data", test_signal_at_any_point},
    {"--help and --version are printed once by many ranks, and by a program for one process", test_help_of_ranks},
    {"ranks with different builds, options or data are rejected, with the difference", test_ranks_differ},
    {"a stranger at MPI's ports cannot hang a start", test_stranger_at_start},
    {"all ranks skip an update if a gradient of one rank is NaN", test_nan_on_one_rank},
    {"a bit flip on one rank is detected", test_bit_flip_on_one_rank},
    {"no rank saves weights that are not finite", test_ranks_save_finite_weights},
    {"--zero 3 refuses what ranks do not compute together", test_zero_3_refuses},
    {"a full disk on one rank leaves no checkpoint", test_full_disk_on_one_rank},
    {"a background checkpoint has exactly the state of its step", test_background_checkpoint},
    {"a kill or signal during a background checkpoint loses no data", test_background_checkpoint_faults},
    {"a run continues if old checkpoints cannot be removed", test_checkpoints_not_removable},
    {"ranks verify the weights of --init", test_ranks_verify_init},
    {"a rollback returns to a checkpoint and skips the data of the bad steps", test_rollback_skips_data},
    {"a rollback with --zero 3 reverts the updates of all pieces", test_rollback_of_pieces},
    {"the memory check includes all ranks of a machine", test_memory_of_ranks},
    {"a rollback reverts all bad updates and their checkpoints, also across a resume", test_rollback_reverts_updates},
    {"a dry run with ranks prints the memory and traffic of a rank", test_dry_run_of_ranks},
};

static void test_ranks_unavailable(void) { test_skip("this build has no MPI"); }
static const Test no_ranks_tests[] = {{"many processes train one model", test_ranks_unavailable}};
#ifdef USE_MPI
enum {
    RANKS_PROGRAM_TEST_COUNT = sizeof(ranks_program_tests) / sizeof(ranks_program_tests[0]),
    NO_RANKS_TEST_COUNT = 0
};
#else
enum { RANKS_PROGRAM_TEST_COUNT = 0, NO_RANKS_TEST_COUNT = 1 };
#endif
#endif
