/*
sharding.h: tests of what ranks compute without each other: the elements that each of them owns, the padding of
gradients, and when a rollback or a checkpoint is due. The tests of whole runs of ranks are in tests/programs.
*/
#pragma once
#include "experts.h"
#include "harness.h"
#include "program.h"
#include "spikes.h"

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
                    Sharding s = sharding_build(&list, (RunRanks){rank, ranks, ranks, level, OPTIMIZER_ADAMW}, limit);
                    unsigned char *used = (unsigned char *)checked_calloc(s.owned, 1);
                    EXPECT(s.owned * ranks == list.buffer_count, "%d ranks: %zu elements each of %zu", ranks, s.owned,
                           list.buffer_count);
                    for (int i = 0; i < list.count; i++) {
                        const Tensor *t = &list.tensors[i];
                        for (RankRange r = sharding_ranges(&s, t); sharding_next(&s, t, &r);)
                            for (size_t e = 0; e < r.count; e++) {
                                EXPECT(r.at + e == t->offset + r.begin + e && r.compact_at + e < s.owned &&
                                           !used[r.compact_at + e],
                                       "%s of %s, rank %d of %d: element %zu is in place %zu of %zu", t->name,
                                       variant->name, rank, ranks, r.begin + e, r.compact_at + e, s.owned);
                                used[min_size(r.compact_at + e, s.owned - 1)] = 1;
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
    model_plan(&m, c, 1, c->T, FOR_TRAINING, RECOMPUTE_NOTHING, (RunRanks){0, 3, 3, 2, OPTIMIZER_ADAMW});
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

// The groups that Muon orthogonalizes together contain each of its matrices once, at its place, on one rank, and are
// the same for all numbers of ranks. FE 13: 26 rows are padded to 32, so only the two matrices of an expert are joined.
static void test_groups_of_muon(void) {
    static const struct {
        int E, FE, C, groups; // of the experts
    } cases[] = {{5, 16, 24, 2}, {5, 13, 24, 5 + 1}, {128, 768, 2048, 256 / 8 + 128 / 8}, {3, 3072, 4096, 9}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (int ranks = 1; ranks <= 16; ranks *= 4) {
            ModelConfig c = expert_config(2, "diff_v2");
            c.E = cases[i].E, c.FE = cases[i].FE, c.C = cases[i].C, c.shared = 0;
            int groups[2] = {0, 0}; // of layer 1, without and with experts
            Model m;
            model_plan(&m, &c, 1, c.T, FOR_TRAINING, RECOMPUTE_NOTHING,
                       (RunRanks){0, ranks, ranks, 1, OPTIMIZER_NORMUON});
            for (int k = 0, next; k < m.plan.tensors.count; k = next) {
                const Tensor *t = &m.plan.tensors.tensors[k];
                const MuonMatrices of = muon_matrices(t);
                next = k + of.count;
                EXPECT(of.count == 1 || (size_t)of.count * t->count <= MUON_TOGETHER, "%d matrices", of.count);
                if (!t->muon || t->layer != 1) continue;
                groups[t->row->per_expert]++;
                for (int n = 0; n < of.count; n++) {
                    const Tensor *u = t + n;
                    EXPECT(u->muon && u->layer == 1 && u->owner == t->owner && (int)u->shape[0] == of.rows &&
                               (int)u->shape[1] == of.columns && u->offset == t->offset + n * of.apart &&
                               u->moment2_at[1] == t->moment2_at[1] + n * u->rows,
                           "%d ranks: %s is not matrix %d of %s", ranks, u->name, n, t->name);
                }
            }
            EXPECT(groups[0] == 4 && groups[1] == cases[i].groups, "%d ranks: %d groups, %d of experts", ranks,
                   groups[0], groups[1]);
            plan_free(&m.plan);
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
    TestDirectory d = program_data();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        InnerRun *inner = inner_open(&d, cases[i].options);
        inner->run.checkpointer.saved_at = now_seconds() - 60 * cases[i].minutes;
        run_step(&inner->run);
        EXPECT(inner->run.checkpointer.due == cases[i].due, "%s: after %g minutes it is due: %d", cases[i].options,
               cases[i].minutes, inner->run.checkpointer.due);
        inner_close(inner);
    }
}

static void test_time_of_checkpoint(void) {
    TestDirectory d = program_data();
    InnerRun *inner = inner_open(&d, "--out %s --checkpoint-minutes 0.5", d.path);
    Checkpointer *c = &inner->run.checkpointer;
    c->saved_at = now_seconds() - 60;
    run_step(&inner->run);
    EXPECT(c->due, "none is due after a minute");
    checkpointer_save(c, false);
    run_step(&inner->run);
    EXPECT(!c->due, "another one is due at once");
    inner_close(inner);
}

static const Test sharding_tests[] = {
    {"after a checkpoint none is due for --checkpoint-minutes", test_time_of_checkpoint},
    {"a checkpoint is due --checkpoint-minutes after the last one", test_checkpoint_minutes},
    {"every element has one owner, for any number of ranks, level and bucket size", test_shard_owners},
    {"with --zero 2 no gradient of a group remains in the padding of another", test_padding_of_gradients},
    {"Muon's groups of experts have each matrix once, and do not depend on the ranks", test_groups_of_muon},
    {"a rollback is due if enough of the last steps are bad", test_rollback_condition},
};
