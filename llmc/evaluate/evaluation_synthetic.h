/*
evaluation_synthetic.h: --eval-needles and --eval-shots: synthetic tasks (data/synthetic.h), answered by the model.

  text       the haystack: the first SYNTHETIC_WINDOWS windows of the validation data, without separators of documents
  symbols    the most frequent words of the text: with a tokenizer, tokens of a space and three letters or more; where
             tokens are bytes, digits and capital letters. Where there are too few, and without a text of tokens, the
             most frequent tokens.
  accuracy   the share of questions whose answer has the largest logit of the candidates; exact: of all tokens
  interval   Wilson's, 95 %. Needles: over questions, which are independent where a model guesses. Shots: the orders of
             a query count as one, and the four queries of a set as three. Of a model that prefers a label for each
             trigger, and does not look at the examples, 1 of 4 answers of a set is right on average, with a variance of
             up to 1 (the fixed points of a permutation), 4/3 of that of four independent answers.
  at chance  the interval contains chance
  spread     of shots, over orders: the standard deviation of the accuracy on the four queries of a set, root mean
             square over sets. spread_independent: what it would be if each order changed answers independently, with
             the same share of right answers for each query. A larger spread is an effect of the order on many queries.
  ranks      Ranks share the prompts. Scores are counts, and do not depend on the number of ranks and the sizes of
             batches, except where these round logits differently.
*/
#ifndef LLMC_EVALUATION_SYNTHETIC_H
#define LLMC_EVALUATION_SYNTHETIC_H
#include "evaluation_choices.h"
#include "../options/options_model.h"

enum { SYNTHETIC_WINDOWS = 64, WORD_LETTERS = 3 };

typedef struct {
    SyntheticTasks tasks;
    SyntheticWords words;
    bool are_words; // the symbols
    uint64_t seed;
} Synthetic;

// ---- symbols and text

static inline bool is_word(int token, int V, const Tokenizer *tokenizer) {
    size_t size = 0, letters = 1;
    unsigned char *text = tokens_text(&token, 1, V, tokenizer, &size);
    bool word = false;
    if (text && !tokenizer) word = isdigit(text[0]) || isupper(text[0]);
    if (text && tokenizer && size > 0) { // bytes from 0x80 on are letters of other scripts, nearly always
        while (letters < size && (isalpha(text[letters]) || text[letters] >= 0x80)) letters++;
        word = text[0] == ' ' && letters == size && size > WORD_LETTERS;
    }
    free(text);
    return word;
}

// val: the validation data, whose separators are not part of the text; separator: another one, or -1.
static inline void synthetic_read_text(Synthetic *s, const Options *o, const DataLoader *val, int V, int separator) {
    DataLoader all; // of all ranks together
    int T = o->model.T, *window = (int *)checked_calloc(2 * T, sizeof(int));
    dataloader_open(&all, o->val_data, 1, T, V, 0, 1, 0, false);
    int windows = (int)min_size(SYNTHETIC_WINDOWS, (size_t)all.window_count);
    s->words.text = (int *)checked_calloc((size_t)windows * T, sizeof(int));
    dataloader_start(&all, 0);
    for (int i = 0; i < windows; i++) {
        dataloader_next(&all, window, window + T, NULL);
        for (int t = 0; t < T; t++) {
            bool separates = window[t] == separator;
            for (int c = 0; c < val->corpus_count; c++)
                separates = separates || window[t] == val->corpora[c].separator.token;
            if (!separates) s->words.text[s->words.text_count++] = window[t];
        }
    }
    dataloader_close(&all);
    free(window);
}

static inline void synthetic_open(Synthetic *s, const Options *o, const DataLoader *val, int V,
                                  const Tokenizer *tokenizer, int separator) {
    const char *why[2];
    memset(s, 0, sizeof(*s));
    s->tasks = options_synthetic(o, why);
    assert(!why[0] && !why[1]);
    s->seed = o->seed;
    if (!s->tasks.needles && !s->tasks.shot_count) return;
    synthetic_read_text(s, o, val, V, separator);
    SyntheticWords *w = &s->words;
    int64_t *counts = (int64_t *)checked_calloc(2 * (size_t)V, sizeof(int64_t)), *of_words = counts + V;
    int wanted = synthetic_symbols(&s->tasks), different = 0;
    for (size_t i = 0; i < w->text_count; i++) counts[w->text[i]]++;
    for (int v = 0; v < V; v++) {
        different += counts[v] > 0;
        of_words[v] = counts[v] && is_word(v, V, tokenizer) ? counts[v] : 0;
    }
    CHECK(different > wanted,
          "--%s requires %d different tokens in the first %d validation windows, and they have %d: use more data%s",
          s->tasks.needles * 2 == wanted ? "eval-needles" : "eval-shots", wanted + 1, SYNTHETIC_WINDOWS, different,
          s->tasks.needles * 2 == wanted ? ", or fewer needles" : "");
    w->symbol_count = recall_symbols(w->symbols, of_words, V);
    s->are_words = w->symbol_count >= wanted;
    if (!s->are_words) w->symbol_count = recall_symbols(w->symbols, counts, V);
    free(counts);
}

static inline void synthetic_close(Synthetic *s) {
    free(s->words.text);
    memset(s, 0, sizeof(*s));
}

// ---- answers

// Prompts of one length.
typedef struct {
    int shots, length, prompts; // shots: K; 0: needles
} SyntheticPart;

// Sums over questions, of numbers that ranks add.
typedef struct {
    double asked, right, exact, chance;
} SyntheticTally;

static inline void synthetic_generate(SyntheticPrompt *p, int *tokens, const Synthetic *s, SyntheticPart part,
                                      int index) {
    uint64_t key = random_mix(random_key(part.shots ? "shots" : "needles", s->seed) + (uint64_t)part.length);
    if (part.shots)
        shots_generate(p, tokens, part.shots, index / SHOT_QUERIES / SHOT_ORDERS, index / SHOT_QUERIES % SHOT_ORDERS,
                       index % SHOT_QUERIES, &s->words, key);
    else
        needles_generate(p, tokens, &s->tasks, part.length, index % NEEDLE_DEPTHS, &s->words,
                         random_mix(key + (uint64_t)index));
    p->index = index;
}

// Needles are added by depth, shots by prompt. logits: the row of the question
static inline void synthetic_add(SyntheticTally *tallies, SyntheticPart part, const SyntheticPrompt *p, int q,
                                 const floatX *logits, int V) {
    SyntheticTally *t = &tallies[part.shots ? p->index : p->depth[q]];
    float own[NEEDLE_LIMIT];
    for (int c = 0; c < p->candidates; c++) own[c] = (float)logits[p->candidate[c]];
    t->asked++;
    t->right += synthetic_right(p, q, own);
    t->exact += choices_greedy(logits, p->answer[q], V);
    t->chance += synthetic_chance(p, q);
}

// Adds the answers to `count` prompts; inputs (count, T). logits (logit_rows, Vp): scratch memory on the host.
static inline void synthetic_answer(const EvaluationModel *m, SyntheticTally *tallies, SyntheticPart part,
                                    const SyntheticPrompt *prompts, const int *inputs, int count, int T,
                                    floatX *logits) {
    const ModelPlan *plan = m->plan;
    const Activations *a = m->acts;
    int C = plan->config.C, rows = 0, i = 0, q = 0;
    m->forward(m->model, inputs, count, T, NULL, NULL);
    for (int n = 0; n < count; n++) // branch: nothing reads it after the last block
        for (int k = 0; k < prompts[n].questions; k++)
            cache_load(a->branch + (size_t)rows++ * C, a->norm_final + (size_t)(n * T + prompts[n].at[k]) * C, 0, 1, 1,
                       C);
    for (int n = 0; n < rows; n += plan->logit_rows) {
        int part_rows = min_int(plan->logit_rows, rows - n);
        choices_head(m, n, part_rows);
        buffer_download(logits, a->logits, (size_t)part_rows * plan->Vp * sizeof(floatX));
        for (int r = 0; r < part_rows; r++) {
            synthetic_add(tallies, part, &prompts[i], q++, logits + (size_t)r * plan->Vp, plan->config.V);
            if (q == prompts[i].questions) q = 0, i++;
        }
    }
}

// Adds the answers to the prompts of a rank.
static inline void synthetic_measure(const EvaluationModel *m, const Synthetic *s, SyntheticPart part, int rank,
                                     int ranks, SyntheticTally *tallies) {
    const ModelPlan *p = m->plan;
    int T = min_int(p->T, (int)round_up((size_t)part.length, CHOICES_STEP)), room = choices_batch(p, T);
    int *inputs = (int *)checked_calloc((size_t)room * T, sizeof(int));
    SyntheticPrompt *prompts = (SyntheticPrompt *)checked_calloc(room, sizeof(SyntheticPrompt));
    floatX *logits = (floatX *)checked_calloc((size_t)p->logit_rows * p->Vp, sizeof(floatX));
    for (int next = rank; next < part.prompts;) {
        int count = 0;
        for (; count < room && next < part.prompts; count++, next += ranks)
            synthetic_generate(&prompts[count], inputs + (size_t)count * T, s, part, next);
        synthetic_answer(m, tallies, part, prompts, inputs, count, T, logits);
    }
    free(inputs);
    free(prompts);
    free(logits);
}

// The answers to all prompts. All ranks call it.
static inline void synthetic_measure_all(const EvaluationModel *m, const Synthetic *s, SyntheticPart part,
                                         SyntheticTally *tallies, int count) {
    memset(tallies, 0, (size_t)count * sizeof(SyntheticTally));
    synthetic_measure(m, s, part, comm_rank(), comm_ranks(), tallies);
    comm_sum_f64(&tallies->asked, count * (int)(sizeof(SyntheticTally) / sizeof(double)));
}

// ---- scores

typedef struct {
    double accuracy, low, high, exact, chance;
} SyntheticScore;

// n: independent questions
static inline SyntheticScore synthetic_score(SyntheticTally t, double n) {
    const double z = 1.959963984540054; // 95 %
    SyntheticScore s = {t.right / t.asked, 0, 0, t.exact / t.asked, t.chance / t.asked};
    double middle = s.accuracy + z * z / (2 * n), scale = 1 + z * z / n;
    double width = z * sqrt(s.accuracy * (1 - s.accuracy) / n + z * z / (4 * n * n));
    s.low = fmax(0, (middle - width) / scale);
    s.high = fmin(1, (middle + width) / scale);
    return s;
}

static inline bool synthetic_at_chance(const SyntheticScore *s) { return s->low <= s->chance && s->chance <= s->high; }
static inline const char *synthetic_verdict(const SyntheticScore *s) {
    return synthetic_at_chance(s) ? "at chance" : s->low > s->chance ? "above chance" : "below chance";
}

static inline void synthetic_json(cJSON *json, const SyntheticScore *s) {
    cJSON_AddNumberToObject(json, "accuracy", s->accuracy);
    cJSON_AddNumberToObject(json, "low", s->low);
    cJSON_AddNumberToObject(json, "high", s->high);
    cJSON_AddNumberToObject(json, "exact", s->exact);
    cJSON_AddNumberToObject(json, "chance", s->chance);
}

static inline SyntheticTally tallies_sum(const SyntheticTally *tallies, int count) {
    SyntheticTally sum = {0, 0, 0, 0};
    for (int i = 0; i < count; i++) {
        sum.asked += tallies[i].asked, sum.right += tallies[i].right;
        sum.exact += tallies[i].exact, sum.chance += tallies[i].chance;
    }
    return sum;
}

static inline void evaluate_needles(const EvaluationModel *m, const Synthetic *s, cJSON *json) {
    enum { CELLS = NEEDLE_LENGTHS * NEEDLE_DEPTHS };
    SyntheticTally tallies[CELLS];
    cJSON *needles = cJSON_AddObjectToObject(json, "needles"), *cells = cJSON_CreateArray();
    printf("retrieval of %d of %d needles, of %d %s, by length and depth; * at chance\n  %6s", s->tasks.asked,
           s->tasks.needles, s->words.symbol_count, s->are_words ? "words" : "tokens", "");
    for (int d = 0; d < NEEDLE_DEPTHS; d++) printf(" %7d%% ", 100 * d / (NEEDLE_DEPTHS - 1));
    printf("\n");
    for (int l = 0; l < NEEDLE_LENGTHS; l++) {
        SyntheticTally *row = tallies + l * NEEDLE_DEPTHS;
        SyntheticPart part = {0, needles_length(l, m->plan->T), NEEDLE_DEPTHS * NEEDLE_PROMPTS};
        synthetic_measure_all(m, s, part, row, NEEDLE_DEPTHS);
        printf("  %6d", part.length);
        for (int d = 0; d < NEEDLE_DEPTHS; d++) {
            SyntheticScore score = synthetic_score(row[d], row[d].asked);
            cJSON *cell = cJSON_CreateObject();
            printf(" %7.2f%%%s", 100 * score.accuracy, synthetic_at_chance(&score) ? "*" : " ");
            cJSON_AddNumberToObject(cell, "length", part.length);
            cJSON_AddNumberToObject(cell, "depth", (double)d / (NEEDLE_DEPTHS - 1));
            cJSON_AddNumberToObject(cell, "questions", row[d].asked);
            synthetic_json(cell, &score);
            cJSON_AddItemToArray(cells, cell);
        }
        printf("\n");
    }
    SyntheticTally sum = tallies_sum(tallies, CELLS);
    SyntheticScore all = synthetic_score(sum, sum.asked);
    printf("  all: %.2f%% [%.2f%%, %.2f%%], %s (%.2f%%); the most likely of all tokens %.2f%%\n", 100 * all.accuracy,
           100 * all.low, 100 * all.high, synthetic_verdict(&all), 100 * all.chance, 100 * all.exact);
    cJSON_AddNumberToObject(needles, "needles", s->tasks.needles);
    cJSON_AddNumberToObject(needles, "asked", s->tasks.asked);
    cJSON_AddNumberToObject(needles, "symbols", s->words.symbol_count);
    cJSON_AddBoolToObject(needles, "words", s->are_words);
    cJSON_AddNumberToObject(needles, "questions", sum.asked);
    synthetic_json(needles, &all);
    cJSON_AddItemToObject(needles, "cells", cells);
}

// Variances over orders of the accuracy on the queries of a set, summed over sets.
typedef struct {
    double variance, independent;
} OrderSpread;

// right [SHOT_ORDERS * SHOT_QUERIES]: 0 or 1
static inline void shots_add_spread(OrderSpread *sums, const SyntheticTally *right) {
    double mean = tallies_sum(right, SHOT_ORDERS * SHOT_QUERIES).right / (SHOT_ORDERS * SHOT_QUERIES);
    for (int o = 0; o < SHOT_ORDERS; o++) {
        double accuracy = tallies_sum(right + o * SHOT_QUERIES, SHOT_QUERIES).right / SHOT_QUERIES;
        sums->variance += (accuracy - mean) * (accuracy - mean) / (SHOT_ORDERS - 1);
    }
    for (int q = 0; q < SHOT_QUERIES; q++) {
        double share = 0;
        for (int o = 0; o < SHOT_ORDERS; o++) share += right[o * SHOT_QUERIES + q].right / SHOT_ORDERS;
        sums->independent +=
            share * (1 - share) * SHOT_ORDERS / (SHOT_ORDERS - 1) / ((double)SHOT_QUERIES * SHOT_QUERIES);
    }
}

static inline void evaluate_shots(const EvaluationModel *m, const Synthetic *s, cJSON *json) {
    enum { OF_SET = SHOT_ORDERS * SHOT_QUERIES, PROMPTS = SHOT_SETS * OF_SET };
    cJSON *list = cJSON_AddArrayToObject(json, "shots");
    printf("classification after K examples of %d classes: %d sets of examples in %d orders, %d queries each\n",
           SHOT_CLASSES, SHOT_SETS, SHOT_ORDERS, SHOT_QUERIES);
    for (int k = 0; k < s->tasks.shot_count; k++) {
        SyntheticPart part = {s->tasks.shots[k], (int)shots_length(s->tasks.shots[k]), PROMPTS};
        SyntheticTally tallies[PROMPTS];
        OrderSpread sums = {0, 0};
        synthetic_measure_all(m, s, part, tallies, PROMPTS);
        SyntheticScore score = synthetic_score(tallies_sum(tallies, PROMPTS), SHOT_SETS * (SHOT_QUERIES - 1));
        for (int i = 0; i < SHOT_SETS; i++) shots_add_spread(&sums, tallies + i * OF_SET);
        double spread = sqrt(sums.variance / SHOT_SETS), independent = sqrt(sums.independent / SHOT_SETS);
        printf("  K = %d: %.2f%% [%.2f%%, %.2f%%], %s (%.2f%%); deviation over orders %.2f%% (of independent "
               "answers %.2f%%); the most likely of all tokens %.2f%%\n",
               part.shots, 100 * score.accuracy, 100 * score.low, 100 * score.high, synthetic_verdict(&score),
               100 * score.chance, 100 * spread, 100 * independent, 100 * score.exact);
        cJSON *row = cJSON_CreateObject();
        cJSON_AddNumberToObject(row, "examples", part.shots);
        cJSON_AddNumberToObject(row, "classes", SHOT_CLASSES);
        cJSON_AddNumberToObject(row, "sets", SHOT_SETS);
        cJSON_AddNumberToObject(row, "queries", SHOT_SETS * SHOT_QUERIES);
        cJSON_AddNumberToObject(row, "orders", SHOT_ORDERS);
        synthetic_json(row, &score);
        cJSON_AddNumberToObject(row, "spread", spread);
        cJSON_AddNumberToObject(row, "spread_independent", independent);
        cJSON_AddItemToArray(list, row);
    }
}

static inline void evaluate_synthetic(const EvaluationModel *m, const Synthetic *s, cJSON *json) {
    if (s->tasks.needles) evaluate_needles(m, s, json);
    if (s->tasks.shot_count) evaluate_shots(m, s, json);
}
#endif
