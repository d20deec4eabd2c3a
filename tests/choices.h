/*
choices.h: tests of --eval-choices: scores against those of generation with a cache, one token at a time; accuracies and
errors against a calculation by hand; files that are refused.
*/
#pragma once
#include "choice_file.h"
#include "experts.h"
#include "harness.h"
#include "model.h"

static ChoiceTask open_choices(const char *path, int V, int T) {
    ChoiceSpec spec = {"task", ""};
    ChoiceTask t;
    FORMAT(spec.path, "%s", path);
    choices_open(&t, &spec, V, T);
    choices_find_text(&t, V, NULL);
    return t;
}

// ---- scores

// By generation: the context at once, then token by token.
static double score_by_generation(Model *model, const ChoiceTask *t, const ChoiceRow *row) {
    const ChoiceExample *e = &t->examples[row->example];
    int V = model->plan.config.V, tokens[256], length = e->context_length + row->length;
    float *logits = (float *)checked_calloc(V, sizeof(float));
    double score = 0;
    for (int i = 0; i < length; i++)
        tokens[i] = (int)t->words[i < e->context_length ? e->context + i : row->tokens + i - e->context_length];
    for (int first = e->context_length, n = first; n < length; n++) {
        double sum = 0;
        int last = n - 1;
        if (n == first) generation_prefill(generation_model(model), 0, tokens, n, logits);
        else generation_decode(generation_model(model), tokens + last, &last, 1, logits);
        for (int v = 0; v < V; v++) sum += exp((double)logits[v]);
        score += (double)logits[tokens[n]] - log(sum);
    }
    free(logits);
    return score;
}

// A score adds up to 40 losses, each of a few sums of some tens of products of numbers near 1: an error of 64 epsilon
// each.
static void expect_scores(const ModelConfig *config, int B, const char *why, const ChoiceTask *t, Purpose purpose) {
    const char *name = config->attention->name;
    Model model;
    EXPECT(t->row_count <= 64, "%d rows", t->row_count);
    double wanted[64], scores[64];
    int order[64];
    case_open(&model, config, 1, config->T, FOR_GENERATION);
    expert_randomize(&model, 7);
    for (int i = 0; i < t->row_count; i++) wanted[i] = score_by_generation(&model, t, &t->rows[i]);
    case_close(&model);
    case_open(&model, config, B, config->T, purpose);
    expert_randomize(&model, 7);
    EvaluationModel m = evaluation_model(&model);
    memset(scores, 0, sizeof(scores));
    choices_score(&m, t, order, choices_deal(t, 0, 1, order), scores);
    for (int i = 0; i < t->row_count; i++) {
        double tolerance = 64 * 0x1p-23 * t->rows[i].length;
        EXPECT(fabs(scores[i] - wanted[i]) <= tolerance && scores[i] < 0,
               "%s, %s: completion %d scores %.9g, by generation %.9g", name, why, i, scores[i], wanted[i]);
    }
    case_close(&model);
}

// The LM head is the identity, and the logit of token 1 is the place of the row in the batch: the score of completions
// of token 1 grows with it, as rounding may.
static void rows_forward(void *data, const int *tokens, int B, int T, LayerVisit visit, void *visit_data) {
    Model *model = (Model *)data;
    int C = model->plan.config.C;
    (void)tokens, (void)visit, (void)visit_data;
    memset(model->acts.norm_final, 0, (size_t)B * T * C * sizeof(floatX));
    for (int n = 0; n < B * T; n++) model->acts.norm_final[(size_t)n * C + 1] = (floatX)(n / T);
}

// Each example has three completions, of token 1 or 2: the last one has the largest score unless equal ones share a
// score.
static void test_equal_completions(void) {
    static const int context = 1, tokens[3][3] = {{1, 1, 1}, {1, 2, 1}, {2, 2, 1}}, answers[3] = {0, 0, 2};
    enum { V = 8 };
    ModelCase mc = {"the identity", V, V, 4, 2, 1, 8, 12, 3, 16, false, 0, 0, false, false};
    ModelConfig config = case_config(&mc, &attention_variants[0]);
    const char *path = test_file("choices.bin");
    floatX identity[V * V] = {0};
    for (int v = 0; v < V; v++) identity[v * V + v] = 1;
    for (int label = 0; label < 3; label++) {
        int order[9], right = 0;
        ChoiceFile *f = choice_file(1);
        for (int e = 0; e < 3; e++) {
            choice_begin(f, label, 3, &context, 1);
            for (int c = 0; c < 3; c++) choice_completion(f, &tokens[e][c], 1);
            choice_end(f);
            right += answers[e] == label;
        }
        choice_write(f, path);
        ChoiceTask t = open_choices(path, V, mc.T);
        Model model;
        case_open(&model, &config, mc.B, mc.T, FOR_EVALUATION);
        EvaluationModel m = evaluation_model(&model);
        model.head.weight = identity, model.head.copy = NULL;
        m.forward = rows_forward;
        int rows = choices_deal(&t, 0, 1, order);
        EXPECT(rows == 5, "%d rows are computed for 5 different completions", rows);
        ChoiceScore s = choices_measure(&m, &t);
        EXPECT(s.accuracy == right / 3.0, "label %d: accuracy %g, not %g", label, s.accuracy, right / 3.0);
        EXPECT(s.accuracy_norm == right / 3.0, "label %d: by tokens %g", label, s.accuracy_norm);
        case_close(&model);
        choices_close(&t);
    }
}

// The experts of a token do not depend on the rows beside it, nor on those that pad a batch.
static void test_expert_scores_by_generation(void) {
    const char *path = test_file("choices.bin");
    for (int i = 0; i < EXPERT_CASE_COUNT; i++) {
        ModelConfig config = expert_config(i, "diff_v2");
        config.T = 40;
        choice_write_random(path, 1 + i % 2, 4, 3, config.V, config.T, (uint64_t)i);
        ChoiceTask t = open_choices(path, config.V, config.T);
        expect_scores(&config, 3, expert_cases[i].model.why, &t, i % 2 ? FOR_EVALUATION : FOR_TRAINING);
        choices_close(&t);
    }
}

// ---- sums

static void add_texts(ChoiceFile *f, int label, const char *const *texts, int count) {
    int context = 'x';
    choice_begin(f, label, count, &context, 1);
    for (int c = 0; c < count; c++) {
        int tokens[16], n = 0;
        for (const char *p = texts[c]; *p; p++) tokens[n++] = (unsigned char)*p;
        choice_completion(f, tokens, n);
    }
    choice_end(f);
}

static ChoiceScore add_scores(const ChoiceTask *t, const double *scores) {
    ChoiceSums sums;
    memset(&sums, 0, sizeof(sums));
    for (int i = 0; i < t->count; i++) choices_add(&sums, t, &t->examples[i], scores);
    return choices_finish(t, &sums);
}

#define EXPECT_NEAR(x, wanted) EXPECT(fabs((x) - (wanted)) < 1e-12, #x " is %.15g, by hand %.15g", x, (double)(wanted))

// By characters without one leading space: 2 and 3; 1 and 4; none, which counts as one, and 2; 1, 2, 2 and 1.
static void test_sums_by_hand(void) {
    static const char *const texts[4][4] = {
        {" ab", "cde"}, {" \xC3\xA9", "abcd"}, {" ", "  z"}, {"a", "bb", "cc", "d"}};
    static const int labels[4] = {1, 0, 1, 2}, counts[4] = {2, 2, 2, 4};
    // right; right by the tie's first, wrong by characters; wrong; right, beside a NaN
    static const double scores[10] = {-4, -3.9, -3, -3, -2.2, -5, NAN, -9, -8, -8.5};
    static const double nats[4] = {3.9, 3, 5, 8}, bytes[4] = {3, 3, 3, 2};
    const char *path = test_file("choices.bin");
    for (int version = 1; version <= 2; version++) {
        ChoiceFile *f = choice_file(version);
        double x = 0, y = 0, squares = 0;
        for (int e = 0; e < 4; e++) {
            add_texts(f, labels[e], texts[e], counts[e]);
            x += nats[e] / log(2), y += bytes[e];
        }
        for (int e = 0; e < 4; e++) squares += pow(nats[e] / log(2) - x / y * bytes[e], 2);
        choice_write(f, path);
        ChoiceTask t = open_choices(path, 256, 8);
        ChoiceScore s = add_scores(&t, scores);
        choices_close(&t);
        EXPECT_NEAR(s.accuracy, 3 / 4.0);
        EXPECT_NEAR(s.accuracy_se, 0.25);
        EXPECT_NEAR(s.accuracy_norm, 2 / 4.0);
        EXPECT_NEAR(s.accuracy_norm_se, sqrt(0.25 / 3));
        EXPECT_NEAR(s.bits_per_byte, x / y);
        EXPECT_NEAR(s.bits_per_byte_se, sqrt(4 / 3.0 * squares) / y);
        EXPECT_NEAR(s.chance, (3 / 2.0 + 1 / 4.0) / 4);
        EXPECT(s.text, "version %d has no text", version);
        t = open_choices(path, 300, 8); // tokens that may not be bytes
        s = add_scores(&t, scores);
        EXPECT(!s.text && isnan(s.bits_per_byte), "version %d without text: %g", version, s.bits_per_byte);
        EXPECT_NEAR(s.accuracy_norm, 3 / 4.0); // by tokens -4/3, -3.9/3; -1, -3/4; -2.2, -5/3 ..
        choices_close(&t);
    }
    ChoiceFile *f = choice_file(1);
    add_texts(f, labels[0], texts[0], counts[0]);
    choice_write(f, path);
    ChoiceTask t = open_choices(path, 256, 8);
    ChoiceScore s = add_scores(&t, scores);
    EXPECT(isnan(s.accuracy_se) && isnan(s.bits_per_byte_se), "errors of one example: %g, %g", s.accuracy_se,
           s.bits_per_byte_se);
    choices_close(&t);
}

static void test_dealing(void) {
    const char *path = test_file("choices.bin");
    choice_write_random(path, 2, 20, 3, 100, 50, 3);
    ChoiceTask t = open_choices(path, 100, 50);
    for (int ranks = 1; ranks <= 25; ranks += 3) {
        int owner[60], times[60] = {0}, order[60];
        for (int rank = 0; rank < ranks; rank++) {
            int count = choices_deal(&t, rank, ranks, order);
            EXPECT(abs(count / 3 - 20 / ranks) <= 1, "rank %d of %d has %d rows", rank, ranks, count);
            for (int i = 0; i < count; i++) {
                times[order[i]]++;
                owner[order[i]] = rank;
                EXPECT(i == 0 || choice_length(&t, order[i]) <= choice_length(&t, order[i - 1]), "not sorted");
            }
        }
        for (int i = 0; i < 60; i++)
            EXPECT(times[i] == 1 && owner[i] == owner[i / 3 * 3], "%d ranks: row %d is dealt %d times, to %d and %d",
                   ranks, i, times[i], owner[i], owner[i / 3 * 3]);
    }
    choices_close(&t);
}

// ---- files that are refused

// Two examples of version 1, of 14 words: a context of three tokens, completions of two and one.
static void write_two_examples(const char *path, int version) {
    static const int tokens[3] = {1, 2, 255};
    ChoiceFile *f = choice_file(version);
    for (int e = 0; e < 2; e++) {
        choice_begin(f, 0, 2, tokens, 3);
        choice_completion(f, tokens, 2);
        choice_completion(f, tokens, 1);
        choice_end(f);
    }
    choice_write(f, path);
}

static const struct {
    int header, at; // a word of the header, or -1; a word of the body, or -1
    int value, cut; // what it becomes; bytes that are removed from the end, negative: added
    const char *message;
} choice_damages[] = {
    {0, -1, 20240520, 0, "is not a file of choices, which begins with 20240522"},
    {1, -1, 0, 0, "has version 0 and must have 1 or 2"},
    {1, -1, 3, 0, "has version 3 and must have 1 or 2: write it again; data/prepare_choices.py"},
    {2, -1, 0, 0, "and its header states 0 examples"},
    {2, -1, 4, 0, "has 1080 bytes, and its header states 4 examples"},
    {2, -1, -1, 0, "states -1 examples"},
    {2, -1, 3, 0, "and its header states 3 examples"},
    {2, -1, 1, 0, "has 28 bytes after its 1 examples"},
    {3, -1, 26, 0, "example 0 states 28 bytes"},
    {-1, 14, 7, 0, "example 1 begins with 7 instead of 65535"},
    {-1, 1, 27, 0, "example 0 states 27 bytes"},
    {-1, 1, 16, 0, "example 0 states 16 bytes"},
    {-1, 1, 26, 0, "a completion of 1 tokens, beyond its end"},
    {-1, 15, 30, 0, "example 1 states 30 bytes"},
    {-1, 16, 2, 0, "example 1 has index 2"},
    {-1, 3, 2, 0, "example 0 has label 2 of 2 completions"},
    {-1, 4, 0, 0, "example 0 has label 0 of 0 completions"},
    {-1, 4, 1, 0, "example 0 has one completion, and 2 or more are required"},
    {-1, 4, 3, 0, "example 0 ends within its tokens"},
    {-1, 5, 200, 0, "example 0 has a context of 200 tokens, beyond its end"},
    {-1, 5, 0, 0, "example 0 has no context"},
    {-1, 5, 1, 0, "example 0 has 2 words after its completions"},
    {-1, 6, 256, 0, "example 0 has token 256, outside the vocabulary of 256"},
    {-1, 13, 300, 0, "example 0 has token 300, outside the vocabulary of 256"},
    {-1, 9, 0, 0, "example 0 has a completion of 0 tokens"},
    {-1, -1, 0, 1, "its header states 2 examples"},
    {-1, -1, 0, 2, "example 1 states 28 bytes"},
    {-1, -1, 0, 12, "ends before example 1"},
    {-1, -1, 0, 100, "is not a file of choices"},
    {-1, -1, 0, -2, "has 2 bytes after its 2 examples"},
};
enum { CHOICE_DAMAGES = sizeof(choice_damages) / sizeof(choice_damages[0]) };

// In a process of its own: a refusal ends it.
static int refused_choices(const char *path, int T, char *line, size_t size) {
    int status = 0;
    const char *err = test_text("%s.err", path);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen(err, "w", stderr)) _exit(99);
        open_choices(path, 256, T);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "cannot run a child process: %s", strerror(errno));
    test_read_file(err, line, size);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_refused_files(void) {
    char line[4096];
    const char *path = test_file("choices.bin");
    for (int i = 0; i < CHOICE_DAMAGES; i++) {
        write_two_examples(path, 1);
        FILE *f = fopen(path, "r+b");
        int32_t wide = choice_damages[i].value;
        uint16_t narrow = (uint16_t)wide;
        long at = choice_damages[i].header >= 0 ? 4L * choice_damages[i].header : 1024 + 2L * choice_damages[i].at;
        bool header = choice_damages[i].header >= 0, word = header || choice_damages[i].at >= 0;
        CHECK(f && (!word || (fseek(f, at, SEEK_SET) == 0 &&
                              fwrite(header ? (void *)&wide : (void *)&narrow, header ? 4 : 2, 1, f) == 1)),
              "cannot write %s", path);
        CHECK(fclose(f) == 0 && truncate(path, 1024 + 56 - choice_damages[i].cut) == 0, "cannot write %s", path);
        int status = refused_choices(path, 4, line, sizeof(line));
        EXPECT(status == 1 && count_lines(line) == 1 && strstr(line, choice_damages[i].message) && strstr(line, path),
               "damage %d: status %d, %.300s, not '%s'", i, status, line, choice_damages[i].message);
    }
    for (int version = 1; version <= 2; version++) {
        write_two_examples(path, version);
        EXPECT(refused_choices(path, 4, line, sizeof(line)) == 0, "version %d: %.300s", version, line);
        EXPECT(refused_choices(path, 3, line, sizeof(line)) == 1 &&
                   strstr(line, "example 0 has 5 tokens with its longest completion, and --seq-len 3 allows 4"),
               "version %d: %.300s", version, line);
    }
    unlink(path);
    EXPECT(refused_choices(path, 4, line, sizeof(line)) == 1 && strstr(line, "--eval-choices task: cannot read"),
           "%.300s", line);
}

static const Test choices_tests[] = {
    {"scores of completions by a model with experts equal those of generation", test_expert_scores_by_generation},
    {"equal completions of an example have one score", test_equal_completions},
    {"accuracies, bits per byte and their errors equal a calculation by hand", test_sums_by_hand},
    {"each rank gets whole examples of all lengths", test_dealing},
    {"a damaged file of choices is refused with one line", test_refused_files},
};
