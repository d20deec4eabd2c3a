/*
checkpoint.h: tests of checkpoints (llmc/checkpoint/checkpoint.h). tests/programs/test_program.py tests gradient dumps.
*/
#pragma once
#include "checkpoint_files.h"

// ---------------------------------------------------------------------------------------------------------------------
// checkpoint.h

static const char *const ckpt_files[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                         "trainer_state.json"};

static int ckpt_count_entries(const char *path) {
    DIR *dir = opendir(path);
    int n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n - 2;
}

static void test_checkpoint_round_trip(void) {
    TestDirectory d = test_make_directory();
    for (int i = 0; i < 3; i++) {
        ModelConfig config = ckpt_config(i == 1 ? "diff_v2" : "baseline", i > 0);
        const char *name = config.attention->name;
        if (i == 2) config.V = CHECKPOINT_STAGING / (int)sizeof(real) / config.C + 1; // a tensor of two chunks
        CkptModel a = ckpt_model_of(config, 10), b = ckpt_model_of(config, 0);
        if (i == 1) { // as in a build whose weights are narrower than its moments
            size_t bytes = a.list.buffer_count * sizeof(real);
            a.b.master = (real *)buffer_alloc(bytes, "a test");
            b.b.master = (real *)buffer_alloc(bytes, "a test");
            ckpt_fill(&a.list, a.b.master, 13);
        }
        cJSON *state = cJSON_CreateObject();
        json_add_u64(state, "step", (uint64_t)(i + 1));
        json_add_u64(state, "next_window", UINT64_MAX);
        cJSON_AddNumberToObject(state, "mean", 1.0 / 3);
        checkpoint_save(d.path, i + 1, ckpt_buffers(&a), state);
        cJSON_Delete(state);

        char dir[PATH_SIZE];
        EXPECT(checkpoint_find_newest(d.path, dir) == i + 1, "%s: the newest is %s", name, dir);
        ModelConfig c = config_json_read(dir);
        EXPECT(c.attention == a.config.attention && c.tied == a.config.tied, "%s: config.json", name);
        state = checkpoint_load_state(dir);
        uint64_t window = 0;
        double mean = 0;
        EXPECT(json_get_u64(state, "next_window", &window) && window == UINT64_MAX &&
                   json_get_number(state, "mean", &mean) && mean == 1.0 / 3,
               "%s: the state has %" PRIu64 " and %.17g", name, window, mean);
        cJSON_Delete(state);
        checkpoint_load_weights(dir, ckpt_buffers(&b), true);
        EXPECT(ckpt_same(&a, a.b.params, b.b.params), "%s: the weights differ", name);
        EXPECT(ckpt_same(&a, a.b.m, b.b.m) && ckpt_same(&a, a.b.v, b.b.v), "%s: the moments differ", name);
        EXPECT(i != 1 || ckpt_same(&a, a.b.master, b.b.master), "%s: the master weights differ", name);
        ckpt_model_free(&a);
        ckpt_model_free(&b);
    }
}

// One weight at a time, so in every piece of every chunk, the last ones too.
static void test_checkpoint_not_finite(void) {
    ModelConfig config = ckpt_config("diff_v1", false);
    config.V = 61;
    CkptModel m = ckpt_model_of(config, 10);
    const CheckpointBuffers *b = ckpt_buffers(&m);
    static const floatX broken[] = {(floatX)NAN, (floatX)INFINITY, -(floatX)INFINITY};
    size_t chunk = CHECKPOINT_STAGING / sizeof(floatX), largest = 0;
    EXPECT(checkpoint_weights_finite(b), "good weights are taken for broken ones");
    for (int i = 0; i < m.list.count; i++) {
        const Tensor *t = &m.list.tensors[i];
        largest = max_size(largest, t->count);
        for (size_t e = 0; e < t->count; e++) {
            floatX *w = m.b.params + t->offset + e, kept = *w;
            *w = broken[e % 3];
            EXPECT(!checkpoint_weights_finite(b), "%g in element %zu of %s is not seen", (double)*w, e, t->name);
            *w = kept;
        }
    }
    EXPECT(largest > chunk && largest % chunk > CHECKPOINT_PIECE && chunk % CHECKPOINT_PIECE,
           "no tensor has several chunks of several pieces: the largest has %zu elements", largest);
    ckpt_model_free(&m);
}

// Chunks of a sparse file of more than one chunk, against the digests of its parts.
static void test_checkpoint_chunk_digests(void) {
    const char *path = test_file("big");
    size_t bytes = (size_t)CHECKSUM_CHUNK + 100001, count = 0;
    char *content = (char *)checked_calloc(bytes, 1);
    for (size_t i = 0; i < bytes; i += 4093) content[i] = (char)(i >> 12);
    test_write_file(path, content, bytes);
    uint64_t size = 0, *digests = file_digests(path, 0, 1, &count, &size);
    EXPECT(digests && count == 2 && size == bytes, "%zu chunks of %" PRIu64 " bytes", count, size);
    if (digests && count == 2) {
        EXPECT(digests[0] == XXH3_64bits(content, CHECKSUM_CHUNK), "the digest of the first chunk");
        EXPECT(digests[1] == XXH3_64bits(content + CHECKSUM_CHUNK, bytes - CHECKSUM_CHUNK),
               "the digest of the second chunk");
    }
    free(digests);
    free(content);
}

static void test_checkpoint_flipped_bits(void) {
    TestDirectory d = test_make_directory();
    ckpt_save(d.path, 7, 1);
    const char *dir = test_text("%s/checkpoints/step_00000007", d.path);
    TestRandom random = {11};
    Reason why;
    EXPECT(checkpoint_verify(dir, 7, why), "a good checkpoint was refused: %s", why);
    for (int f = 0; f < 4; f++) {
        const char *path = test_text("%s/%s", dir, ckpt_files[f]);
        size_t size = 0;
        char *text = ckpt_read_file(path, &size);
        for (size_t i = 0; i < 150; i++) {
            // the first bytes, the last bytes (the state's checksum), and a sample between
            size_t at = i < 20 ? i : i < 100 ? size - 1 - (i - 20) : (size_t)test_random_int(&random, (int)size);
            char old = text[at];
            text[at] = (char)(old ^ (1 << test_random_int(&random, 8)));
            test_write_file(path, text, size);
            FORMAT(why, "(nothing)");
            EXPECT(!checkpoint_verify(dir, 7, why), "a bit of byte %zu of %s was not missed", at, ckpt_files[f]);
            EXPECT(strstr(why, ckpt_files[f]) || f == 3, "%s was damaged, but the message is %s", ckpt_files[f], why);
            text[at] = old;
        }
        test_write_file(path, text, size - 1);
        EXPECT(!checkpoint_verify(dir, 7, why), "the last byte of %s was not missed", ckpt_files[f]);
        text[size] = '\n';
        test_write_file(path, text, size + 1);
        EXPECT(!checkpoint_verify(dir, 7, why), "a byte more in %s was not seen", ckpt_files[f]);
        test_write_file(path, text, 0);
        EXPECT(!checkpoint_verify(dir, 7, why), "%s was emptied, and not missed", ckpt_files[f]);
        CHECK(unlink(path) == 0, "cannot remove %s", path);
        EXPECT(!checkpoint_verify(dir, 7, why) && strstr(why, "No such file"), "%s is not there: %s", ckpt_files[f],
               why);
        test_write_file(path, text, size);
        EXPECT(checkpoint_verify(dir, 7, why), "%s is as it was, but: %s", ckpt_files[f], why);
        free(text);
    }
    EXPECT(!checkpoint_verify(dir, 8, why) && strstr(why, "saved at step 7"),
           "a checkpoint of step 7 as one of step 8");
    CHECK(truncate(test_text("%s/trainer_state.json", dir), 100) == 0, "cannot truncate");
    ckpt_refused("state", dir, "", "trainer_state.json does not match its checksum");
}

static void test_checkpoint_leftovers(void) {
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    Reason why;
    const char *dir = test_text("%s/checkpoints/step_00000005", d.path);
    run_command(&r, "mkdir -p '%s.tmp/deep/er' ; echo old > '%s.tmp/deep/er/x' ; echo old > '%s.tmp/model.safetensors'",
                dir, dir, dir);
    ckpt_save(d.path, 5, 1); // over what an interrupted save of the same step left
    EXPECT(checkpoint_verify(dir, 5, why) && ckpt_count_entries(dir) == 4, "after an interrupted one: %s", why);
    run_command(&r, "echo x >> '%s/model.safetensors' ; mkdir '%s.old.tmp'", dir, dir);
    ckpt_save(d.path, 5, 2); // over a checkpoint that a resume found broken
    EXPECT(checkpoint_verify(dir, 5, why), "over a broken one: %s", why);
    checkpoint_clean(d.path); // where the two exchanged their names, a run's start removes what another left
    EXPECT(ckpt_count_entries(test_text("%s/checkpoints", d.path)) == 1, "something was left behind");
}

static void test_checkpoint_killed_while_saving(void) {
    TestDirectory d = test_make_directory();
    int64_t reached = 0;
    for (int i = 0; i < 6; i++) {
        static ProgramResult r;
        run_command(&r, "timeout -s KILL %g %s --child checkpoint-save-for-ever '%s/%d'", 0.02 * (1 << i), test_self(),
                    d.path, i);
        EXPECT(r.status == 137, "the child ended with status %d: %s", r.status, r.err);
        const char *run = test_text("%s/%d", d.path, i);
        size_t count = 0;
        int64_t *steps = checkpoint_steps(run, &count);
        reached += (int64_t)count;
        for (size_t k = 0; k < count; k++) {
            Reason why;
            EXPECT(checkpoint_verify(test_text("%s/checkpoints/step_%08" PRId64, run, steps[k]), steps[k], why),
                   "checkpoint %" PRId64 " of a killed run: %s", steps[k], why);
        }
        free(steps);
    }
    EXPECT(reached > 0, "no child lived long enough to save a checkpoint");
}

// Checkpoints of the steps 10, 20, 30 and 40.
static TestDirectory ckpt_four(void) {
    TestDirectory d = test_make_directory();
    for (int64_t step = 10; step <= 40; step += 10) ckpt_save(d.path, step, (uint64_t)step);
    return d;
}

// The steps that have a checkpoint.
static const char *ckpt_left(const char *run_dir) {
    size_t count = 0;
    int64_t *steps = checkpoint_steps(run_dir, &count);
    const char *left = "";
    for (size_t k = count; k-- > 0;) left = test_text("%s%" PRId64 " ", left, steps[k]);
    free(steps);
    return left;
}

static void test_checkpoint_prune(void) {
    static const struct {
        int64_t keep, step; // of the steps 10, 20, 30, 40 and some foreign names
        const char *left;
    } cases[] = {
        {2, 40, "30 40 "},
        {1, 40, "40 "},
        {4, 40, "10 20 30 40 "},
        {5, 40, "10 20 30 40 "},
        {1000, 40, "10 20 30 40 "},
        {0, 40, "10 20 30 40 "},
        {-1, 40, "10 20 30 40 "},
        {INT64_MIN, 40, "10 20 30 40 "},
        {INT64_MAX, 40, "10 20 30 40 "},
        {1, 20, "20 30 40 "}, // 30 and 40 are broken ones of an earlier life: 20 is the newest that is whole
        {2, 30, "20 30 40 "},
    };
    TestDirectory four = ckpt_four();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TestDirectory d = test_make_directory();
        static ProgramResult r;
        run_command(&r,
                    "cp -r '%s/checkpoints' '%s' && cd '%s/checkpoints' && mkdir step_00000005.tmp best step_5 "
                    "step_000000x0 step_00000015.bak step_00000010.old.tmp && echo x | tee step_00000010/x best/x > "
                    "step_00000001",
                    four.path, d.path, d.path);
        checkpoint_prune(d.path, cases[i].keep, cases[i].step);
        const char *left = ckpt_left(d.path);
        EXPECT(strcmp(left, cases[i].left) == 0, "keep %" PRId64 " after step %" PRId64 " leaves %s, not %s",
               cases[i].keep, cases[i].step, left, cases[i].left);
        run_command(&r, "ls '%s/checkpoints' | grep -vc 'step_000000[1-4]0$'", d.path);
        EXPECT(atoi(r.out) == 5, "keep %" PRId64 ": %s entries that are foreign are left", cases[i].keep, r.out);
    }
    TestDirectory d = test_make_directory();
    checkpoint_prune(d.path, 3, 10); // a run without checkpoints
}

// A broken checkpoint is not one of those that are kept; it goes when enough newer ones are whole.
static void test_checkpoint_prune_broken(void) {
    static const char *const damages[] = {
        "truncate -s -1 model.safetensors",         "rm optimizer.safetensors", "rm trainer_state.json",
        "truncate -s -1 trainer_state.json",        "printf x >> config.json",
        "cp ../step_00000010/trainer_state.json .", // of another step
        "rm config.json && mkdir config.json"};
    static const char *const left[] = {"10 20 30 40 ", "40 ", "10 20 30 40 "}; // keep 3, 1, 2
    TestDirectory four = ckpt_four();
    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++)
        for (int keep = 1; keep <= 3; keep++) {
            TestDirectory d = test_make_directory();
            static ProgramResult r;
            run_command(
                &r, "cp -r '%s/checkpoints' '%s' && for n in 20 30; do (cd '%s'/checkpoints/step_000000$n && %s); done",
                four.path, d.path, d.path, damages[i]);
            EXPECT(r.status == 0, "%s: %s", damages[i], r.err);
            checkpoint_prune(d.path, keep, 40);
            const char *have = ckpt_left(d.path);
            EXPECT(strcmp(have, left[keep % 3]) == 0, "%s: keep %d leaves %s, not %s", damages[i], keep, have,
                   left[keep % 3]);
        }
}

// What a child does to four checkpoints while directories with this text cannot be removed, and what is left.
static void ckpt_busy(const TestDirectory *d, const char *busy, const char *action, const char *more, int warnings,
                      const char *left, const char *leftovers) {
    static ProgramResult r;
    run_command(&r, "BUSY='%s' %s --child checkpoint-%s '%s' %s", busy, test_self(), action, d->path, more);
    EXPECT(r.status == 0 && count_lines(r.err) == warnings && (!warnings || strstr(r.err, "trying again")),
           "%s %s with %s busy: status %d, %s", action, more, busy, r.status, r.err);
    const char *have = ckpt_left(d->path);
    EXPECT(strcmp(have, left) == 0, "%s %s with %s busy leaves %s, not %s", action, more, busy, have, left);
    run_command(&r, "cd '%s/checkpoints' && ls -d *.tmp 2>/dev/null | tr '\\n' ' '", d->path);
    EXPECT(strcmp(r.out, leftovers) == 0, "%s %s with %s busy: left over are %s, not %s", action, more, busy, r.out,
           leftovers);
}

static void test_checkpoint_removal_failure(void) {
    TestDirectory d = ckpt_four();
    static ProgramResult r;
    ckpt_busy(&d, "step_00000010", "prune", "3", 1, "20 30 40 ", "step_00000010.old.tmp ");
    ckpt_busy(&d, "step_00000010", "clean", "", 1, "20 30 40 ", "step_00000010.old.tmp "); // a start
    ckpt_busy(&d, "step_00000010", "save", "10", 0, "10 20 30 40 ", "step_00000010.old.tmp ");
    ckpt_busy(&d, "step_00000010", "prune", "3", 2, "10 20 30 40 ", "step_00000010.old.tmp ");
    ckpt_busy(&d, "", "prune", "3", 0, "20 30 40 ", "");
    run_command(&r, "mkdir '%s/checkpoints/step_00000050.tmp'", d.path); // of an interrupted save
    ckpt_busy(&d, "step_00000050", "save", "50", 0, "20 30 40 50 ", "step_00000050.old.tmp ");
    ckpt_busy(&d, "step_00000050", "drop", "50", 0, "20 30 40 50 ", "step_00000050.old.tmp ");
    ckpt_busy(&d, "", "clean", "", 0, "20 30 40 50 ", "");
    ckpt_busy(&d, "step_00000050", "drop", "30", 1, "20 30 ", "step_00000050.old.tmp ");
    ckpt_busy(&d, "step_00000030", "save", "30", 1, "20 30 ", "step_00000030.tmp step_00000050.old.tmp "); // replaced
    ckpt_busy(&d, "", "prune", "2", 0, "20 30 ", "");
}

static void test_checkpoint_wrong_tensors(void) {
    TestDirectory d = test_make_directory();
    ckpt_save(d.path, 1, 3); // diff_v2, tied
    const char *dir = test_text("%s/checkpoints/step_00000001", d.path), *other = test_text("%s/other", d.path);
    ckpt_accepted("load-all", dir, "", "");
    ckpt_accepted("load-weights", dir, "", "");
    ckpt_refused("load-weights", dir, "untied", "tensor lm_head.weight is missing");
    ckpt_refused("load-weights", dir, "qk-norm", "tensor model.layers.0.self_attn.q_norm.weight is missing");
    ckpt_refused("load-master", dir, "",
                 "tensor master.model.embed_tokens.weight is missing; this build has a different precision");

    // written from a list of tensors that has one more, one less, one of another shape
    static const struct {
        const char *remove, *add, *reshape, *word;
    } cases[] = {
        {"", "lm_head.weight", "", NULL}, // a copy of the embedding
        {"", "lm_head.weight", "",
         "lm_head.weight differs from the embedding, but config.json has tie_word_embeddings"},
        {"", "score.weight", "", "unexpected tensor score.weight"},
        {"", "model.layers.2.input_layernorm.weight", "", "unexpected tensor model.layers.2.input_layernorm.weight"},
        {"model.layers.1.self_attn.lambda_proj.weight", "", "",
         "model.layers.1.self_attn.lambda_proj.weight is missing"},
        {"model.norm.weight", "model.norm.weights", "", "model.norm.weight is missing"},
        {"", "", "model.norm.weight", "model.norm.weight has shape [1,12]; config.json implies [12]"},
        {"", "", "model.embed_tokens.weight",
         "model.embed_tokens.weight has shape [12,11]; config.json implies [11,12]"},
        {"", "model.layers.0.self_attn.rotary_emb.inv_freq", "", NULL},
    };
    directory_create(other);
    CkptModel m = ckpt_model("diff_v2", true, 3);
    CheckpointPart part = checkpoint_part("", m.b.params, DTYPE_OF(floatX), false);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        SafeTensorSpec specs[64];
        int count = 0;
        int spec_count = 0;
        SafeTensorSpec *all = checkpoint_specs(&m.list, &part, 1, DTYPE_F32, &spec_count);
        for (int t = 0; t < m.list.count; t++) {
            if (strcmp(all[t].name, cases[i].remove) == 0) continue;
            specs[count] = all[t];
            if (strcmp(all[t].name, cases[i].reshape) == 0) {
                specs[count].shape[0] = all[t].ndim == 1 ? 1 : all[t].shape[1];
                specs[count].shape[1] = all[t].shape[0];
                specs[count].ndim = 2;
            }
            count++;
        }
        free(all);
        bool head = strcmp(cases[i].add, "lm_head.weight") == 0; // of the model's V and C
        if (*cases[i].add) specs[count++] = ckpt_spec(cases[i].add, DTYPE_F32, head ? 2 : 1, head ? 11 : 3, 12);
        real zeros[512];
        memset(zeros, 0, sizeof(zeros));
        SafeTensorsWriter *w = safetensors_create(test_text("%s/model.safetensors", other), specs, count);
        for (int t = 0; t < count; t++) {
            if (t == count - 1 && head && cases[i].word) zeros[11 * 12 - 1] = 1; // the last element of the head
            safetensors_write(w, t, 0, zeros, DTYPE_OF(real), safetensors_spec_elements(&specs[t]));
        }
        safetensors_finish(w);
        if (cases[i].word) ckpt_refused("load-weights", other, "", cases[i].word);
        else ckpt_accepted("load-weights", other, "", "");
    }
    ckpt_model_free(&m);
}

static const Test checkpoint_tests[] = {
    {"a checkpoint is read back bit for bit", test_checkpoint_round_trip},
    {"a weight that is not finite is detected at any position", test_checkpoint_not_finite},
    {"a file of several chunks has one digest per chunk", test_checkpoint_chunk_digests},
    {"a flipped bit or a missing or additional byte in any file is detected", test_checkpoint_flipped_bits},
    {"a checkpoint replaces the files of an interrupted or damaged one", test_checkpoint_leftovers},
    {"a process killed while saving leaves only complete checkpoints", test_checkpoint_killed_while_saving},
    {"pruning keeps the newest checkpoints, and all if there are fewer than it should keep", test_checkpoint_prune},
    {"pruning does not count a damaged checkpoint as kept", test_checkpoint_prune_broken},
    {"a checkpoint that cannot be removed causes a warning and is removed later", test_checkpoint_removal_failure},
    {"a missing tensor, an unknown tensor and a wrong shape are reported by name", test_checkpoint_wrong_tensors},
};
