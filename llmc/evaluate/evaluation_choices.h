/*
evaluation_choices.h: --eval-choices: multiple-choice tasks (data/choices.h), scored by the model.

  score      the sum of log p of a completion's tokens, given the context and its earlier tokens
  accuracy   the share of examples whose label has the largest score; among equal scores the first counts
  accuracy_norm     accuracy by score / characters of the text of its tokens without one leading space; without such a
             text, score / tokens
  bits_per_byte     -sum of scores / ln 2 / bytes of the text of the correct completions
  chance     mean of 1 / completions
  errors     standard errors over examples: sqrt(p (1 - p) / (n - 1)), and for the ratio bits_per_byte = sum x / sum y
             sqrt(n / (n - 1) sum (x - ratio y)^2) / sum y
  batches    Rows of one batch have the length of the longest, rounded up to CHOICES_STEP: padding on the right does not
             reach earlier positions, since attention is causal. A batch has as many rows as the memory of B sequences
             of T positions allows. The LM head runs for the positions that predict tokens of a completion. Only
             activations need device memory. --doc-mask is ignored: the file contains whole contexts.
  ranks      choices_deal deals examples to ranks. Counts are integers and do not depend on the number of ranks;
             other sums are added in the order of ranks. Scores depend on the sizes of batches by rounding.
  agreement  The results agree with lm-evaluation-harness (acc, acc_norm), for files of data/prepare_choices.py
*/
#pragma once
#include "../data/choices.h"
#include "evaluation_model.h"
#include "../log/logger.h"
#include "../options/options_table.h"
#include "../log/progress.h"
#include "../options/ranks.h"
#include "../text/sampler.h"

// Row lengths are multiples of CHOICES_STEP, and rows of the LM head of CHOICES_HEAD_STEP, so that matrix products have
// few different sizes: a library prepares each of them.
enum { CHOICES_STEP = 16, CHOICES_HEAD_STEP = 64 };

// ---- tasks

typedef struct {
    ChoiceTask *tasks;
    int count;
} ChoiceTasks;

// The lengths of the text of completions: bytes, and characters without one leading space; 0 where tokens have no text.
static inline void choices_find_text(ChoiceTask *t, int V, const Tokenizer *tokenizer) {
    for (int i = 0; i < t->row_count; i++) {
        ChoiceRow *row = &t->rows[i];
        size_t bytes = 0, characters = 0;
        const int *tokens = (const int *)(t->words + row->tokens);
        unsigned char *text = tokens_text(tokens, row->length, false, V, tokenizer, &bytes);
        if (!text) return;
        for (size_t k = text[0] == ' '; k < bytes; k++) characters += (text[k] & 0xC0) != 0x80; // not a continuation
        row->bytes = (uint32_t)bytes;
        row->characters = (uint32_t)max_size(characters, 1);
        free(text);
    }
}

// text: --eval-choices, which options_exclusions has checked, or NULL. tokenizer: or NULL.
static inline ChoiceTasks choices_open_all(const char *text, int V, int T, const Tokenizer *tokenizer) {
    const char *why = NULL;
    ChoiceTasks all = {NULL, 0};
    if (!text) return all;
    ChoiceSpecs list = choices_parse(text, &why);
    assert(!why);
    all.tasks = (ChoiceTask *)checked_calloc(list.count, sizeof(ChoiceTask));
    for (; all.count < list.count; all.count++) {
        ChoiceTask *t = &all.tasks[all.count];
        char described[100];
        choices_open(t, &list.items[all.count], V, T);
        choices_find_text(t, V, tokenizer);
        FORMAT(described, "the-fingerprint-of-%s %016" PRIx64 "\n", t->spec.name, t->fingerprint);
        ranks_compare(described, "all ranks must read the same files under --eval-choices", EXIT_FAILED);
    }
    free(list.items);
    return all;
}

static inline void choices_close_all(ChoiceTasks *all) {
    for (int i = 0; i < all->count; i++) choices_close(&all->tasks[i]);
    free(all->tasks);
    memset(all, 0, sizeof(*all));
}

// The tasks for run.json.
static inline cJSON *choices_describe(const ChoiceTasks *all) {
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < all->count; i++) {
        const ChoiceTask *t = &all->tasks[i];
        cJSON *task = cJSON_CreateObject();
        cJSON_AddStringToObject(task, "name", t->spec.name);
        cJSON_AddStringToObject(task, "file", t->spec.path);
        cJSON_AddNumberToObject(task, "examples", t->count);
        json_add_u64(task, "fingerprint", t->fingerprint);
        cJSON_AddItemToArray(list, task);
    }
    return list;
}

// ---- scores of completions

// Windows of T tokens with as many tokens as the rows of all tasks.
static inline double choices_windows(const ChoiceTasks *all, int T) {
    double tokens = 0;
    for (int i = 0; i < all->count; i++)
        for (int row = 0; row < all->tasks[i].row_count; row++) tokens += choice_length(&all->tasks[i], row);
    return tokens / T;
}

// The number of rows of T positions that fit into the memory of the plan; shorter rows than the plan's: more rows.
static inline int choices_batch(const ModelPlan *p, int T) {
    int rows = p->rows / T;
    for (int l = 0; l < p->config.L; l++)
        while (rows > 1 && attention_bytes_of(key_set(p, l, 0, rows, T, 0).shape) > p->workspace_bytes) rows--;
    return rows;
}

// Host memory of a task's batches.
typedef struct {
    const EvaluationModel *model;
    const ChoiceTask *task;
    int *inputs, *targets; // [rows of the plan]
    real *losses;          // [rows of the plan]
    double *scores;        // scores of the task's rows
} ChoiceBatches;

// Computes acts->logits for rows n .. n + rows - 1 of acts->branch; at most logit_rows rows.
static inline void choices_head(const EvaluationModel *m, int n, int rows) {
    const ModelPlan *p = m->plan;
    int padded = min_int(p->logit_rows, min_int(p->rows - n, (int)round_up((size_t)rows, CHOICES_HEAD_STEP)));
    linear_forward(m->acts->logits, activation(m->acts->branch + (size_t)n * p->config.C, NULL), m->head, padded);
}

// Adds the losses of `count` predictions, whose rows of the final norm are in acts->branch, to acts->losses.
static inline void choices_classify(const ChoiceBatches *b, int count) {
    const ModelPlan *p = b->model->plan;
    const Activations *a = b->model->acts;
    buffer_zero(a->losses, (size_t)count * sizeof(real));
    for (int n = 0; n < count; n += p->logit_rows) {
        int rows = min_int(p->logit_rows, count - n);
        choices_head(b->model, n, rows);
        cross_entropy(a->losses + n, a->log_z + n, a->logits, a->targets + n, rows, p->config.V, p->Vp, 0, 0);
    }
}

// Scores the completions of `count` rows, padded to T positions.
static inline void choices_score_batch(const ChoiceBatches *b, const int *order, int count, int T) {
    const EvaluationModel *m = b->model;
    const ChoiceTask *t = b->task;
    const Activations *a = m->acts;
    int C = m->plan->config.C, predictions = 0;
    memset(b->inputs, 0, (size_t)count * T * sizeof(int));
    for (int i = 0; i < count; i++) {
        const ChoiceRow *row = &t->rows[order[i]];
        const ChoiceExample *e = &t->examples[row->example];
        int *to = b->inputs + (size_t)i * T;
        memcpy(to, t->words + e->context, (size_t)e->context_length * sizeof(int));
        memcpy(to + e->context_length, t->words + row->tokens, (size_t)(row->length - 1) * sizeof(int));
    }
    m->forward(m->model, b->inputs, count, T, NULL, NULL);
    for (int i = 0; i < count; i++) { // in branch, which nothing reads after the last block
        const ChoiceRow *row = &t->rows[order[i]];
        size_t first = (size_t)(i * T + t->examples[row->example].context_length - 1);
        cache_load(a->branch + (size_t)predictions * C, a->norm_final + first * C, 0, row->length, row->length, C);
        memcpy(b->targets + predictions, t->words + row->tokens, (size_t)row->length * sizeof(int));
        predictions += row->length;
    }
    buffer_upload(a->targets, b->targets, (size_t)predictions * sizeof(int));
    choices_classify(b, predictions);
    buffer_download(b->losses, a->losses, (size_t)predictions * sizeof(real));
    for (int i = 0, n = 0; i < count; i++)
        for (int end = n + t->rows[order[i]].length; n < end; n++) b->scores[order[i]] -= (double)b->losses[n];
}

// The rows of the batch that begins with order[done], padded to *T positions.
static inline int choices_next_batch(const ModelPlan *p, const ChoiceTask *t, const int *order, int done, int count,
                                     int *T) {
    *T = min_int(p->T, (int)round_up((size_t)choice_length(t, order[done]), CHOICES_STEP)); // the longest
    return min_int(choices_batch(p, *T), count - done);
}

// The number of batches of the rank that has most batches.
static inline int choices_most_batches(const ModelPlan *p, const ChoiceTask *t, const int *order, int count) {
    int *all = (int *)checked_calloc(comm_ranks(), sizeof(int)), batches = 0, most = 0, T;
    for (int done = 0; done < count; batches++) done += choices_next_batch(p, t, order, done, count, &T);
    comm_gather(all, &batches, sizeof(int));
    for (int r = 0; r < comm_ranks(); r++) most = max_int(most, all[r]);
    free(all);
    return most;
}

// scores [row_count]: scores of this rank's rows, order [count]; the other scores are 0.
static inline void choices_score(const EvaluationModel *m, const ChoiceTask *t, const int *order, int count,
                                 double *scores) {
    const ModelPlan *p = m->plan;
    ChoiceBatches b = {m,
                       t,
                       (int *)checked_calloc(p->rows, sizeof(int)),
                       (int *)checked_calloc(p->rows, sizeof(int)),
                       (real *)checked_calloc(p->rows, sizeof(real)),
                       scores};
    int batches = choices_most_batches(p, t, order, count);
    for (int batch = 0, done = 0, T; batch < batches && !measurement_ends(m); batch++) {
        if (done == count) continue; // other ranks have more
        int rows = choices_next_batch(p, t, order, done, count, &T);
        choices_score_batch(&b, order + done, rows, T);
        done += rows;
    }
    free(b.inputs);
    free(b.targets);
    free(b.losses);
}

// ---- scores of tasks

// Sums over examples; the ranks add them.
typedef struct {
    double correct, correct_norm, chance;
    double x, y, xx, xy, yy; // x: bits of the correct completion; y: bytes of its text
} ChoiceSums;

typedef struct {
    const ChoiceTask *task;
    double accuracy, accuracy_se, accuracy_norm, accuracy_norm_se, bits_per_byte, bits_per_byte_se, chance;
    bool text; // lengths of text are known; else accuracy_norm divides by tokens
} ChoiceScore;

// The numbers of a record.
static const struct {
    const char *key;
    size_t field;
} choice_numbers[] = {{"accuracy", offsetof(ChoiceScore, accuracy)},
                      {"accuracy_se", offsetof(ChoiceScore, accuracy_se)},
                      {"accuracy_norm", offsetof(ChoiceScore, accuracy_norm)},
                      {"accuracy_norm_se", offsetof(ChoiceScore, accuracy_norm_se)},
                      {"bits_per_byte", offsetof(ChoiceScore, bits_per_byte)},
                      {"bits_per_byte_se", offsetof(ChoiceScore, bits_per_byte_se)},
                      {"chance", offsetof(ChoiceScore, chance)}};
enum { CHOICE_NUMBERS = sizeof(choice_numbers) / sizeof(choice_numbers[0]) };
static inline double choice_number(const ChoiceScore *s, int i) {
    return *(const double *)(const void *)((const char *)s + choice_numbers[i].field);
}

// scores: scores of the task's rows.
static inline void choices_add(ChoiceSums *sums, const ChoiceTask *t, const ChoiceExample *e, const double *scores) {
    int best = -1, best_norm = -1;
    double largest = -INFINITY, largest_norm = -INFINITY;
    for (int c = 0; c < e->count; c++) {
        const ChoiceRow *row = &t->rows[e->first + c];
        double score = scores[row->equal], norm = score / (row->characters ? row->characters : (double)row->length);
        if (score > largest) largest = score, best = c;
        if (norm > largest_norm) largest_norm = norm, best_norm = c;
        if (c != e->label) continue;
        double x = -score / log(2), y = row->bytes;
        sums->x += x, sums->y += y, sums->xx += x * x, sums->xy += x * y, sums->yy += y * y;
    }
    sums->correct += best == e->label;
    sums->correct_norm += best_norm == e->label;
    sums->chance += 1.0 / e->count;
}

static inline double choices_se(double p, double n) { return n > 1 ? sqrt(p * (1 - p) / (n - 1)) : NAN; }

static inline ChoiceScore choices_finish(const ChoiceTask *t, const ChoiceSums *s) {
    ChoiceScore score;
    double n = t->count, ratio = s->y > 0 ? s->x / s->y : NAN;
    double squares = s->xx - 2 * ratio * s->xy + ratio * ratio * s->yy;
    score.task = t;
    score.text = t->rows[0].characters > 0;
    score.accuracy = s->correct / n;
    score.accuracy_norm = s->correct_norm / n;
    score.accuracy_se = choices_se(score.accuracy, n);
    score.accuracy_norm_se = choices_se(score.accuracy_norm, n);
    score.bits_per_byte = ratio;
    score.bits_per_byte_se = n > 1 && !isnan(squares) ? sqrt(n / (n - 1) * fmax(squares, 0)) / s->y : NAN;
    score.chance = s->chance / n;
    return score;
}

// All ranks call it; each scores its examples.
static inline ChoiceScore choices_measure(const EvaluationModel *m, const ChoiceTask *t) {
    int *order = (int *)checked_calloc(t->row_count, sizeof(int));
    int count = choices_deal(t, comm_rank(), comm_ranks(), order);
    double *scores = (double *)checked_calloc(t->row_count, sizeof(double));
    bool *measured = (bool *)checked_calloc(t->count, sizeof(bool));
    ChoiceSums sums;
    memset(&sums, 0, sizeof(sums));
    choices_score(m, t, order, count, scores);
    for (int i = 0; i < count; i++) measured[t->rows[order[i]].example] = true;
    for (int i = 0; i < t->count; i++)
        if (measured[i]) choices_add(&sums, t, &t->examples[i], scores);
    comm_sum_f64(&sums.correct, sizeof(sums) / sizeof(double));
    free(order);
    free(scores);
    free(measured);
    return choices_finish(t, &sums);
}

// ---- output

static inline const char *choices_norm(const ChoiceScore *s) { return s->text ? "characters" : "tokens"; }

static inline void print_choices(const ChoiceScore *s) {
    printf("%s: accuracy %.2f%% +- %.2f%% (chance %.2f%%), by %s %.2f%% +- %.2f%%", s->task->spec.name,
           100 * s->accuracy, 100 * signless_nan(s->accuracy_se), 100 * s->chance, choices_norm(s),
           100 * s->accuracy_norm, 100 * signless_nan(s->accuracy_norm_se));
    if (s->text)
        printf(", %.4f +- %.4f bits per byte", signless_nan(s->bits_per_byte), signless_nan(s->bits_per_byte_se));
    printf(", %d examples\n", s->task->count);
}

// Writes the record of log.jsonl, and prints a line.
static inline void log_choices(Log *log, int64_t step, const ChoiceScore *s) {
    char fingerprint[24];
    FORMAT(fingerprint, "%" PRIu64, s->task->fingerprint);
    log_begin(log, "choices", step);
    log_string(log, "name", s->task->spec.name);
    log_integer(log, "examples", s->task->count);
    for (int i = 0; i < CHOICE_NUMBERS; i++) log_number(log, choice_numbers[i].key, choice_number(s, i));
    log_string(log, "norm", choices_norm(s));
    log_string(log, "fingerprint", fingerprint);
    log_end(log);
    progress_break();
    printf("step %" PRId64 ": ", step);
    print_choices(s);
    progress_flush();
}

// For --eval: prints the scores of all tasks, and adds them to the JSON.
static inline void evaluate_choices(const EvaluationModel *m, const ChoiceTasks *all, cJSON *json) {
    if (all->count == 0) return;
    cJSON *list = cJSON_AddArrayToObject(json, "choices");
    printf("multiple choice\n");
    for (int t = 0; t < all->count; t++) {
        char fingerprint[24];
        cJSON *task = cJSON_CreateObject();
        cJSON_AddStringToObject(task, "name", all->tasks[t].spec.name);
        ChoiceScore s = choices_measure(m, &all->tasks[t]);
        FORMAT(fingerprint, "%" PRIu64, s.task->fingerprint);
        cJSON_AddNumberToObject(task, "examples", s.task->count);
        for (int i = 0; i < CHOICE_NUMBERS; i++)
            cJSON_AddNumberToObject(task, choice_numbers[i].key, choice_number(&s, i));
        cJSON_AddStringToObject(task, "norm", choices_norm(&s));
        cJSON_AddStringToObject(task, "fingerprint", fingerprint);
        cJSON_AddItemToArray(list, task);
        printf("  ");
        print_choices(&s);
    }
}
