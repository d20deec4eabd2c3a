/*
synthetic.h: tests of --eval-needles and --eval-shots: prompts against an independent reading of them; models that
ignore the question are right by chance, and one that finds the answer is always right; scores against a
calculation by hand; the program.
*/
#ifndef TESTS_SYNTHETIC_H
#define TESTS_SYNTHETIC_H
#include "data.h"
#include "evaluation.h"
#include "harness.h"
#include "model.h"
#include "program.h"
#include "ranks.h"
#include "tokenizer.h"

// Text of 300 tokens, of which every third is a symbol; symbols are the tokens 10, 11, ..
enum { TEST_TEXT = 300, FIRST_SYMBOL = 10, FIRST_TEXT = 200 };

static SyntheticWords made_words(int symbols) {
    SyntheticWords w;
    memset(&w, 0, sizeof(w));
    w.symbol_count = symbols;
    for (int i = 0; i < symbols; i++) w.symbols[i] = FIRST_SYMBOL + i;
    w.text = (int *)checked_calloc(TEST_TEXT, sizeof(int));
    w.text_count = TEST_TEXT;
    for (int i = 0; i < TEST_TEXT; i++) w.text[i] = i % 3 ? FIRST_TEXT + i : FIRST_SYMBOL + i / 3 % symbols;
    return w;
}

static int times_of(int token, const int *tokens, int count, int *last) {
    int times = 0;
    for (int i = 0; i < count; i++)
        if (tokens[i] == token) times++, *last = i;
    return times;
}

// ---- needles

// Reads a prompt: where the pairs are, that the rest continues the text, that each key and value is there once, and
// that the pair of a question has the depth that is stated.
static void expect_needles(const SyntheticPrompt *p, const int *tokens, const SyntheticTasks *t, int length,
                           const SyntheticWords *w, const char *what) {
    int body = length - (2 * t->asked - 1), text = body - 2 * t->needles, before[512] = {0}, value_at[NEEDLE_LIMIT];
    bool of_pair[512] = {false};
    EXPECT(p->length == length && p->questions == t->asked && p->candidates == t->needles, "%s: %d positions", what,
           p->length);
    for (int c = 0; c < p->candidates; c++) {
        EXPECT(c == 0 || p->candidate[c] > p->candidate[c - 1], "%s: candidates are not different and sorted", what);
        EXPECT(times_of(p->candidate[c], tokens, body, &value_at[c]) == 1 && value_at[c] > 0,
               "%s: a value is not there once", what);
        of_pair[value_at[c]] = of_pair[value_at[c] - 1] = true;
    }
    size_t next = TEST_TEXT;
    int read = 0, key_at = 0, answer_at = 0;
    for (int i = 0; i < body; i++) { // before: tokens of the text before a position
        before[i] = read;
        if (of_pair[i]) continue;
        read++;
        if (next == TEST_TEXT && tokens[i] >= FIRST_TEXT) next = (size_t)(tokens[i] - FIRST_TEXT); // which place it is
        if (next == TEST_TEXT) continue;
        for (int skipped = 0; w->text[next % TEST_TEXT] != tokens[i] && skipped < 3; next++, skipped++) {
            int token = w->text[next % TEST_TEXT];
            bool drawn = false;
            for (int j = 0; j < body; j++) drawn = drawn || (of_pair[j] && tokens[j] == token);
            EXPECT(drawn, "%s: the text lacks its token %d", what, token);
        }
        EXPECT(w->text[next % TEST_TEXT] == tokens[i], "%s: token %d is not of the text", what, tokens[i]);
        next++;
    }
    EXPECT(read == text, "%s: %d tokens of text, not %d", what, read, text);
    for (int q = 0; q < p->questions; q++) {
        int at = body + 2 * q;
        EXPECT(p->at[q] == at && (q + 1 == t->asked || tokens[at + 1] == p->answer[q]), "%s: question %d", what, q);
        EXPECT(times_of(tokens[at], tokens, body, &key_at) == 1 && tokens[key_at + 1] == p->answer[q] &&
                   times_of(p->answer[q], p->candidate, p->candidates, &answer_at) == 1,
               "%s: the answer does not follow the key", what);
        for (int e = 0; e < q; e++) EXPECT(tokens[p->at[e]] != tokens[at], "%s: a key is asked for twice", what);
        EXPECT(before[key_at] == text * p->depth[q] / (NEEDLE_DEPTHS - 1), "%s: %d tokens before a pair of depth %d",
               what, before[key_at], p->depth[q]);
    }
}

static void test_needle_prompts(void) {
    static const struct {
        int needles, asked, length, symbols;
    } cases[] = {{2, 1, 9, 4}, {4, 2, 64, 30}, {8, 7, 61, 36}, {64, 5, 400, 128}};
    for (int c = 0; c < 4; c++) {
        SyntheticTasks t = {cases[c].needles, cases[c].asked, {0}, 0};
        SyntheticWords w = made_words(cases[c].symbols);
        int tokens[512], again[512], length = cases[c].length, depths[NEEDLE_DEPTHS] = {0}, first = 0;
        char what[100];
        EXPECT(needles_shortest(&t) <= length, "a case is too short");
        for (int i = 0; i < 100; i++) {
            SyntheticPrompt p;
            bool stated = false;
            FORMAT(what, "%d:%d, prompt %d", t.needles, t.asked, i);
            needles_generate(&p, tokens, &t, length, i % NEEDLE_DEPTHS, &w, random_mix((uint64_t)i));
            expect_needles(&p, tokens, &t, length, &w, what);
            for (int q = 0; q < p.questions; q++)
                stated = stated || p.depth[q] == i % NEEDLE_DEPTHS, depths[p.depth[q]]++;
            EXPECT(stated, "%s: no question about its depth", what);
            needles_generate(&p, again, &t, length, i % NEEDLE_DEPTHS, &w, random_mix((uint64_t)i));
            EXPECT(memcmp(tokens, again, (size_t)length * sizeof(int)) == 0, "%s: not the same again", what);
            needles_generate(&p, again, &t, length, i % NEEDLE_DEPTHS, &w, random_mix((uint64_t)i + 1000));
            first += memcmp(tokens, again, (size_t)length * sizeof(int)) == 0;
        }
        EXPECT(first == 0, "%d prompts are those of another key", first);
        for (int d = 0; d < NEEDLE_DEPTHS; d++) EXPECT(depths[d] >= 20, "depth %d has %d questions", d, depths[d]);
        free(w.text);
    }
}

// Models that prefer candidates by something else than the key, or know the answer.
typedef enum {
    PREFERS_NOTHING,
    PREFERS_FIRST,
    PREFERS_LAST,
    PREFERS_LOW_IDS,
    PREFERS_HIGH_IDS,
    PREFERS_BY_KEY,
    KNOWS,
    IS_NAN
} Guess;
static float guess_logit(Guess guess, const SyntheticPrompt *p, int q, int c, const int *tokens) {
    int at = 0;
    while (at < p->at[q] && tokens[at] != p->candidate[c]) at++; // where it is first
    switch (guess) {
    case PREFERS_FIRST: return (float)-at;
    case PREFERS_LAST: return (float)at;
    case PREFERS_LOW_IDS: return (float)-p->candidate[c];
    case PREFERS_HIGH_IDS: return (float)p->candidate[c];
    case PREFERS_BY_KEY: return (float)(random_bits((uint64_t)tokens[p->at[q]], (uint64_t)p->candidate[c]) >> 40);
    case KNOWS: return (float)(p->candidate[c] == p->answer[q]);
    case IS_NAN: return NAN;
    default: return 1;
    }
}

// 3000 prompts: the share of right answers of a guess has a standard deviation below 0.01.
static void expect_chance(const SyntheticTally *right, const char *what) {
    for (int g = 0; g <= IS_NAN; g++) {
        double share = right[g].right / right[g].asked, chance = right[g].chance / right[g].asked;
        double wanted = g == KNOWS ? 1 : g == IS_NAN ? 0 : chance;
        EXPECT(fabs(share - wanted) <= (g >= KNOWS ? 0 : 0.035), "%s: guess %d is right in %.4f, chance is %.4f", what,
               g, share, chance);
    }
}

static void test_guesses(void) {
    static const int needles[][2] = {{2, 1}, {4, 2}, {6, 5}};
    int tokens[512];
    for (int part = 0; part < 4; part++) { // the last: shots
        SyntheticWords w = made_words(40);
        SyntheticTally right[IS_NAN + 1];
        char what[100];
        memset(right, 0, sizeof(right));
        for (int i = 0; i < 3000; i++) {
            SyntheticPrompt p;
            if (part < 3) {
                SyntheticTasks t = {needles[part][0], needles[part][1], {0}, 0};
                needles_generate(&p, tokens, &t, 50, i % NEEDLE_DEPTHS, &w, random_mix((uint64_t)i));
                FORMAT(what, "needles %d:%d", t.needles, t.asked);
            } else {
                shots_generate(&p, tokens, 9, i / 20, i % SHOT_ORDERS, i / SHOT_ORDERS % SHOT_QUERIES, &w, 5);
                FORMAT(what, "shots");
            }
            for (int g = 0; g <= IS_NAN; g++)
                for (int q = 0; q < p.questions; q++) {
                    float logits[NEEDLE_LIMIT];
                    for (int c = 0; c < p.candidates; c++) logits[c] = guess_logit((Guess)g, &p, q, c, tokens);
                    right[g].asked++, right[g].right += synthetic_right(&p, q, logits);
                    right[g].chance += synthetic_chance(&p, q);
                }
        }
        double chance = right[0].chance / right[0].asked;
        EXPECT(fabs(chance - (part == 0   ? 1 / 2.0
                              : part == 1 ? (1 / 4.0 + 1 / 3.0) / 2
                              : part == 2 ? (1 / 6.0 + 1 / 5.0 + 1 / 4.0 + 1 / 3.0 + 1 / 2.0) / 5
                                          : 1 / 4.0)) < 1e-9,
               "%s: chance is %g", what, chance);
        expect_chance(right, what);
        EXPECT(right[PREFERS_NOTHING].right == right[PREFERS_LOW_IDS].right, "%s: of equal logits not the first", what);
        free(w.text);
    }
}

// ---- shots

// The rule of a prompt by its examples: label_of[token]: of a trigger its label, of a filler 0. Every example has one
// trigger.
static void read_rule(const int *tokens, int K, int *label_of, const char *what) {
    bool label[FIRST_TEXT] = {false};
    memset(label_of, 0, FIRST_TEXT * sizeof(int));
    for (int e = 0; e < K; e++)
        for (int i = 0; i < SHOT_WORDS; i++) { // seen with two labels: -1
            int *of = &label_of[tokens[4 * e + i]], now = tokens[4 * e + 3];
            *of = *of == 0 || *of == now ? now : -1;
            label[now] = true;
        }
    int labels = 0;
    for (int v = 0; v < FIRST_TEXT; v++) {
        labels += label[v];
        EXPECT(!label[v] || label_of[v] == 0, "%s: a label is in an example", what);
    }
    for (int e = 0; e < K; e++) {
        int triggers = 0;
        for (int i = 0; i < SHOT_WORDS; i++) triggers += label_of[tokens[4 * e + i]] == tokens[4 * e + 3];
        EXPECT(triggers == 1, "%s: example %d has %d triggers", what, e, triggers);
    }
    EXPECT(labels == SHOT_CLASSES, "%s: %d labels", what, labels);
}

static int compare_examples(const void *a, const void *b) { return memcmp(a, b, 4 * sizeof(int)); }

// With four fillers, each of them is seen with several labels in 64 examples.
static void test_shot_prompts(void) {
    enum { K = 64, LENGTH = 4 * K + 3 };
    SyntheticWords w = made_words(SHOT_SYMBOLS);
    int tokens[LENGTH], sorted[LENGTH], first[LENGTH] = {0}, label_of[FIRST_TEXT], same = 0, answers[SHOT_QUERIES];
    for (int set = 0; set < 3; set++)
        for (int query = 0; query < SHOT_QUERIES; query++)
            for (int order = 0; order < SHOT_ORDERS; order++) {
                SyntheticPrompt p;
                char what[100];
                FORMAT(what, "set %d, query %d, order %d", set, query, order);
                shots_generate(&p, tokens, K, set, order, query, &w, 5);
                EXPECT(p.length == LENGTH && p.questions == 1 && p.at[0] == LENGTH - 1 && p.candidates == SHOT_CLASSES,
                       "%s: %d positions", what, p.length);
                read_rule(tokens, K, label_of, what);
                int triggers = 0, times[FIRST_TEXT] = {0}, at;
                for (int i = 0; i < SHOT_WORDS; i++) triggers += label_of[tokens[4 * K + i]] == p.answer[0];
                EXPECT(triggers == 1 && times_of(p.answer[0], p.candidate, SHOT_CLASSES, &at) == 1,
                       "%s: the query has %d triggers of its answer", what, triggers);
                for (int e = 0; e < K; e++) times[tokens[4 * e + 3]]++;
                for (int c = 0; c < SHOT_CLASSES; c++)
                    EXPECT(times[p.candidate[c]] == K / SHOT_CLASSES, "%s: label %d is there %d times", what,
                           p.candidate[c], times[p.candidate[c]]);
                memcpy(sorted, tokens, sizeof(sorted));
                qsort(sorted, K, 4 * sizeof(int), compare_examples);
                if (order == 0) {
                    EXPECT(query == 0 || memcmp(first, sorted, 4 * K * sizeof(int)) == 0, "%s: other examples", what);
                    EXPECT(query > 0 || memcmp(first, sorted, 4 * K * sizeof(int)) != 0, "%s: the same examples", what);
                    same += query > 0 && memcmp(first + 4 * K, sorted + 4 * K, 3 * sizeof(int)) == 0;
                    memcpy(first, sorted, sizeof(sorted));
                    EXPECT(times_of(p.answer[0], answers, query, &at) == 0, "%s: the answer of another query", what);
                    answers[query] = p.answer[0];
                } else EXPECT(memcmp(first, sorted, sizeof(sorted)) == 0, "%s: not the examples and query", what);
                EXPECT(memcmp(tokens, sorted, sizeof(sorted)) != 0, "%s: examples are sorted", what);
            }
    EXPECT(same < 3, "%d queries are those before them", same);
    free(w.text);
}

// Orders differ, also from one set to the next.
static void test_shot_orders(void) {
    enum { K = 16, LENGTH = 4 * K + 3 };
    SyntheticWords w = made_words(40);
    SyntheticPrompt p;
    int orders[SHOT_ORDERS][LENGTH];
    for (int o = 0; o < SHOT_ORDERS; o++) {
        shots_generate(&p, orders[o], K, 1, o, 2, &w, 5);
        for (int e = 0; e < o; e++)
            EXPECT(memcmp(orders[o], orders[e], sizeof(orders[o])) != 0, "orders %d and %d are the same", e, o);
    }
    free(w.text);
}

// ---- scores

static void test_intervals_by_hand(void) {
    // Wilson's interval of 10 of 20, 0 of 10, 10 of 10, 30 of 100
    static const double cases[][4] = {
        {10, 20, 0.299298, 0.700702}, {0, 10, 0, 0.277533}, {10, 10, 0.722467, 1}, {30, 100, 0.218949, 0.395849}};
    for (int i = 0; i < 4; i++) {
        SyntheticTally t = {cases[i][1], cases[i][0], 0, 0.25 * cases[i][1]};
        SyntheticScore s = synthetic_score(t, t.asked);
        EXPECT(fabs(s.low - cases[i][2]) < 1e-6 && fabs(s.high - cases[i][3]) < 1e-6, "%g of %g: [%.6f, %.6f]", t.right,
               t.asked, s.low, s.high);
        const char *wanted = i == 1 || i == 3 ? "at chance" : "above chance";
        EXPECT(strcmp(synthetic_verdict(&s), wanted) == 0, "%g of %g is %s", t.right, t.asked, synthetic_verdict(&s));
    }
    SyntheticTally none = {100, 10, 0, 25};
    SyntheticScore s = synthetic_score(none, 100);
    EXPECT(strcmp(synthetic_verdict(&s), "below chance") == 0, "10 of 100 is %s", synthetic_verdict(&s));
}

// Of two sets: in the first all queries are right in orders 0 and 1 only; in the second one query is right, in order 3.
static void test_spread_by_hand(void) {
    SyntheticTally right[SHOT_ORDERS * SHOT_QUERIES];
    OrderSpread sums = {0, 0};
    memset(right, 0, sizeof(right));
    for (int i = 0; i < 2 * SHOT_QUERIES; i++) right[i].right = 1;
    shots_add_spread(&sums, right);
    double variance = (2 * 0.6 * 0.6 + 3 * 0.4 * 0.4) / 4;
    EXPECT(fabs(sums.variance - variance) < 1e-12 && fabs(sums.independent - variance / SHOT_QUERIES) < 1e-12,
           "variances %g and %g", sums.variance, sums.independent);
    memset(right, 0, sizeof(right));
    right[3 * SHOT_QUERIES + 2].right = 1;
    shots_add_spread(&sums, right);
    double one = (0.8 * 0.8 + 4 * 0.2 * 0.2) / 4 / (SHOT_QUERIES * SHOT_QUERIES);
    EXPECT(fabs(sums.variance - variance - one) < 1e-12 &&
               fabs(sums.independent - variance / SHOT_QUERIES - one) < 1e-12,
           "variances %g and %g with a second set", sums.variance, sums.independent);
}

// ---- a model that finds the answer

// The LM head is the identity; in place of the blocks, position t gets a logit for every token: that which followed the
// last occurrence of tokens[t], or in a prompt of examples the label that only one class has.
static void induction_forward(void *data, const int *tokens, int B, int T, LayerVisit visit, void *visit_data) {
    Model *model = (Model *)data;
    int C = model->plan.config.C;
    (void)visit, (void)visit_data;
    memset(model->acts.norm_final, 0, (size_t)B * T * C * sizeof(floatX));
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            const int *row = tokens + (size_t)b * T;
            floatX *logits = model->acts.norm_final + (size_t)(b * T + t) * C;
            for (int i = 0; i < t; i++)
                if (row[i] == row[t]) logits[row[i + 1]] = (floatX)(i + 1);
        }
}

static void shots_forward(void *data, const int *tokens, int B, int T, LayerVisit visit, void *visit_data) {
    Model *model = (Model *)data;
    int C = model->plan.config.C, label_of[FIRST_TEXT];
    (void)visit, (void)visit_data;
    memset(model->acts.norm_final, 0, (size_t)B * T * C * sizeof(floatX));
    for (int b = 0; b < B; b++) {
        const int *row = tokens + (size_t)b * T;
        int K = 64, last = 4 * K + 2;
        read_rule(row, K, label_of, "the model");
        for (int i = 0; i < SHOT_WORDS; i++)
            if (label_of[row[4 * K + i]] > 0)
                model->acts.norm_final[(size_t)(b * T + last) * C + label_of[row[4 * K + i]]] = 1;
    }
}

static void constant_forward(void *data, const int *tokens, int B, int T, LayerVisit visit, void *visit_data) {
    Model *model = (Model *)data;
    (void)tokens, (void)visit, (void)visit_data;
    memset(model->acts.norm_final, 0, (size_t)B * T * model->plan.config.C * sizeof(floatX));
}

// Batches of 1 and of 3 rows of 272 positions, pieces of 7 rows of logits, and the prompts of three ranks.
static void test_answers_of_models(void) {
    enum { V = 500, LENGTH = 259 };
    ModelCase mc = {"the identity", V, V, 1, 2, 1, 8, 12, 3, 272, false, 0, 0, false, false};
    ModelConfig config = case_config(&mc, &attention_variants[0]);
    floatX *identity = (floatX *)checked_calloc((size_t)V * V, sizeof(floatX));
    for (int v = 0; v < V; v++) identity[(size_t)v * V + v] = 1;
    for (int B = 1; B <= 3; B += 2) {
        Model model;
        case_open(&model, &config, B, mc.T, FOR_EVALUATION);
        EvaluationModel m = evaluation_model(&model);
        m.head.weight = identity, m.head.copy = NULL;
        for (int shots = 0; shots < 2; shots++) {
            Synthetic s = {{6, 3, {64}, 1}, made_words(shots ? SHOT_SYMBOLS : 40), true, 9};
            SyntheticPart part = {shots ? 64 : 0, LENGTH, 50};
            for (int constant = 0; constant < 2; constant++) {
                SyntheticTally tallies[50], shared[50], sum;
                memset(tallies, 0, sizeof(tallies));
                memset(shared, 0, sizeof(shared));
                m.forward = constant ? constant_forward : shots ? shots_forward : induction_forward;
                synthetic_measure(&m, &s, part, 0, 1, tallies);
                for (int rank = 0; rank < 3; rank++) synthetic_measure(&m, &s, part, rank, 3, shared);
                for (int i = 0; i < 50; i++)
                    EXPECT(shared[i].asked == tallies[i].asked && shared[i].right == tallies[i].right &&
                               shared[i].exact == tallies[i].exact && fabs(shared[i].chance - tallies[i].chance) < 1e-9,
                           "three ranks count %g right answers of %g, one %g of %g", shared[i].right, shared[i].asked,
                           tallies[i].right, tallies[i].asked);
                sum = tallies_sum(tallies, shots ? 50 : NEEDLE_DEPTHS);
                SyntheticScore score = synthetic_score(sum, 50);
                EXPECT(sum.asked == (shots ? 50 : 150), "%g questions", sum.asked);
                EXPECT(strcmp(synthetic_verdict(&score), constant ? "at chance" : "above chance") == 0,
                       "%d rows, shots %d, constant %d: %g is %s", B, shots, constant, score.accuracy,
                       synthetic_verdict(&score));
                EXPECT(score.exact == !constant && (constant || score.accuracy == 1),
                       "%d rows, shots %d, constant %d: accuracy %g, exact %g", B, shots, constant, score.accuracy,
                       score.exact);
            }
            free(s.words.text);
        }
        case_close(&model);
    }
    free(identity);
}

// ---- symbols

static void test_words(void) {
    static ToyTable toy;
    TestDirectory d = test_make_directory();
    char path[600];
    int words = 0;
    for (int v = 0; v < 256; v++)
        EXPECT(is_word(v, 256, NULL) == ((v >= '0' && v <= '9') || (v >= 'A' && v <= 'Z')), "byte %d", v);
    EXPECT(!is_word('A', 300, NULL), "a token without text is a word");
    FORMAT(path, "%s/t.bin", d.path);
    for (uint64_t seed = 1; seed <= 5; seed++) { // tokens of a, b, c and spaces
        toy_make(&toy, seed, PATTERN_NONE, 0, "");
        Tokenizer *t = toy_open(&toy, path);
        for (int v = 0; v < TOY_VOCABULARY; v++) {
            int length = toy.lengths[v];
            bool word = toy.tokens[v][0] == ' ' && length >= 4 && v != TOY_END;
            for (int i = 1; i < length; i++) word = word && toy.tokens[v][i] != ' ';
            EXPECT(is_word(v, TOY_VOCABULARY, t) == word, "'%.*s'", length, toy.tokens[v]);
            words += word;
        }
        tokenizer_close(t);
    }
    EXPECT(words > 5, "%d words", words);
    test_remove_directory(&d);
}

// Bytes: 0, which separates documents, then capitals of which A is the most frequent, then lower-case letters.
static void test_text_and_symbols(void) {
    TestDirectory d = test_make_directory();
    char path[600];
    for (int words = 4; words <= 12; words += 8) { // 4 are too few
        uint16_t shard[512 + 10 * 101] = {0};
        const int32_t header[3] = {SHARD_MAGIC_U16, SHARD_VERSION_U16, 10 * 101};
        memcpy(shard, header, sizeof(header));
        for (int i = 0; i < 10 * 101; i++)
            shard[512 + i] = (uint16_t)(i % 10 == 0  ? 0
                                        : i % 10 < 3 ? 'A' + i / 10 % words * (i % 10 - 1)
                                                     : 'a' + i % 26);
        FORMAT(path, "%s/val.bin", d.path);
        data_write_file(path, shard, sizeof(shard));
        Options o;
        DataLoader val;
        Synthetic s;
        options_defaults(&o);
        o.val_data = path, o.model.T = 10, o.eval_needles = "4:1", o.eval_shots = "4";
        dataloader_open(&val, path, 1, 10, 256, 0, 1, 0, false);
        synthetic_open(&s, &o, &val, 256, NULL, 0);
        int zeros = 0, capitals = 0, ignored;
        for (size_t i = 0; i < s.words.text_count; i++) zeros += s.words.text[i] == 0;
        for (int i = 0; i < s.words.symbol_count; i++)
            capitals += s.words.symbols[i] >= 'A' && s.words.symbols[i] <= 'Z';
        EXPECT(s.words.text_count == 64 * 9 && zeros == 0 && s.words.text[0] == 'A', "a text of %zu tokens, %d zeros",
               s.words.text_count, zeros);
        EXPECT(s.are_words == (words == 12) && capitals == words, "%d words, %d capitals", words, capitals);
        EXPECT(s.words.symbol_count == (words == 12 ? 12 : 4 + 26) && s.words.symbols[0] == 'A' &&
                   times_of(0, s.words.symbols, s.words.symbol_count, &ignored) == 0,
               "%d symbols of %d capitals", s.words.symbol_count, words);
        synthetic_close(&s);
        dataloader_close(&val);
    }
    test_remove_directory(&d);
}

// ---- the program

static void run_eval(ProgramResult *r, const ProgramData *d, const char *options) {
    run_command(r,
                "cd '%s' && %s --init run/checkpoints/step_00000002 --eval --val-data val.bin --val-steps 2 "
                "--eval-out eval %s && cat eval",
                d->dir.path, test_program_path(), options);
}

static cJSON *json_of(const ProgramResult *r) { return cJSON_Parse(strchr(r->out, '{') ? strchr(r->out, '{') : ""); }

static void expect_rows(const cJSON *json) {
    const cJSON *needles = cJSON_GetObjectItemCaseSensitive(json, "needles"), *cell;
    double questions = 0, one = 0;
    EXPECT(cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(needles, "cells")) == NEEDLE_LENGTHS * NEEDLE_DEPTHS,
           "cells");
    cJSON_ArrayForEach(cell, cJSON_GetObjectItemCaseSensitive(needles, "cells")) questions +=
        json_get_number(cell, "questions", &one) ? one : 0;
    EXPECT(questions == NEEDLE_LENGTHS * NEEDLE_DEPTHS * NEEDLE_PROMPTS * 2 &&
               json_get_number(needles, "questions", &one) && one == questions,
           "%g questions", questions);
    EXPECT(json_get_number(needles, "chance", &one) && fabs(one - (1 / 3.0 + 1 / 2.0) / 2) < 1e-12, "chance %g", one);
    EXPECT(cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(needles, "words")), "lower case letters are no words");
    const cJSON *shots = cJSON_GetObjectItemCaseSensitive(json, "shots");
    EXPECT(cJSON_GetArraySize(shots) == 2 && json_get_number(cJSON_GetArrayItem(shots, 1), "examples", &one) &&
               one == 9,
           "%d rows of shots", cJSON_GetArraySize(shots));
}

// The same answers from other batches, threads and ranks.
static void test_synthetic_of_program(void) {
    static const char *const options[] = {"--batch-size 3 --threads 1", "--batch-size 7 --threads 2"};
    static const char tasks[] = "--seq-len 52 --eval-needles 3:2 --eval-shots 4,9";
    ProgramData d = program_data();
    ProgramResult r;
    char text[400], *printed = NULL;
    cJSON *whole = NULL;
    run_trainer(&r, &d, "run", "--steps 2");
    EXPECT_STATUS(r, 0);
    for (int i = 0; i < 2; i++) {
        FORMAT(text, "%s %s", tasks, options[i]);
        run_eval(&r, &d, text);
        EXPECT(r.status == 0 && strstr(r.out, "retrieval of 2 of 3 needles") && strstr(r.out, "K = 9: "),
               "status %d: %.300s", r.status, r.err);
        cJSON *json = json_of(&r);
        expect_rows(json);
        for (int k = 0; k < 2 && i; k++)
            EXPECT(cJSON_Compare(cJSON_GetObjectItemCaseSensitive(whole, k ? "shots" : "needles"),
                                 cJSON_GetObjectItemCaseSensitive(json, k ? "shots" : "needles"), true),
                   "batches of 7 give other scores");
        if (i == 0) {
            char *begin = strstr(r.out, "retrieval"), *end = begin ? strstr(begin, "associative") : NULL;
            whole = json;
            EXPECT(begin && end, "no output");
            if (end) *end = 0;
            if (end) printed = strdup(begin);
        } else cJSON_Delete(json);
    }
#ifdef USE_MPI
    run_command(&r,
                "cd '%s' && %s && timeout 120 mpirun -q -n 3 %s --init run/checkpoints/step_00000002 --eval --val-data "
                "val.bin --val-steps 2 --threads 1 --batch-size 2 %s",
                d.dir.path, ranks_environment, test_program_path(), tasks);
    EXPECT(r.status == 0 && printed && strstr(r.out, printed), "of 3 ranks: status %d, %.300s", r.status, r.err);
#endif
    run_eval(&r, &d, "--seq-len 48 --threads 1 --eval-needles 20:2");
    EXPECT_ONE_LINE(r, 2, "--eval-needles 20:2 requires --seq-len 188 or more, and it is 48");
    run_eval(&r, &d, "--seq-len 260 --threads 1 --eval-needles 26:2");
    EXPECT(r.status == 1 && count_lines(r.err) == 1 &&
               strstr(r.err, "--eval-needles requires 53 different tokens in the first 64 validation windows"),
           "status %d: %.300s", r.status, r.err);
    cJSON_Delete(whole);
    free(printed);
    test_remove_directory(&d.dir);
}

static const Test synthetic_tests[] = {
    {"needles are at their depths, and their keys and values nowhere else", test_needle_prompts},
    {"a guess is right by chance, an answer always and a NaN never", test_guesses},
    {"examples of a set follow a rule that its query requires, in several orders", test_shot_prompts},
    {"orders of examples differ", test_shot_orders},
    {"intervals of shares equal Wilson's", test_intervals_by_hand},
    {"the spread over orders equals a calculation by hand", test_spread_by_hand},
    {"a model that finds the answer is always right, and one that finds nothing at chance", test_answers_of_models},
    {"words are tokens of letters after a space, or capitals and digits", test_words},
    {"the text has no separators, and symbols are its most frequent words", test_text_and_symbols},
};
enum { SYNTHETIC_TEST_COUNT = sizeof(synthetic_tests) / sizeof(synthetic_tests[0]) };
static const Test synthetic_program_tests[] = {
    {"--eval measures synthetic tasks, whatever the batches and ranks", test_synthetic_of_program},
};
enum { SYNTHETIC_PROGRAM_TEST_COUNT = sizeof(synthetic_program_tests) / sizeof(synthetic_program_tests[0]) };
#endif
