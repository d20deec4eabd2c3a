/*
synthetic.h: prompts of two synthetic tasks whose answers are single tokens, for --eval-needles and --eval-shots. They
are functions of a key, of token IDs (symbols) and of a text (the haystack).

  needles    H tokens of the haystack, in which N pairs "key value" stand, and then R of the keys, each followed by its
             value:  text k3 v3 text k1 v1 .. text | k1 v1 k5 -> v5. Keys and values of a prompt are distinct symbols,
             which the text of the prompt does not contain. A pair has one of NEEDLE_DEPTHS depths: 0, 1/4, .. 1 of the
             H tokens precede it. The prompts of a depth have an asked pair there; the other pairs have random depths,
             and pairs of one depth are in random order.
  shots      K examples and a query:  a a t2 L2 | t1 a a L1 | .. | a t2 a -> L2. An example has SHOT_WORDS tokens, of
             which one, at a random place, is a trigger; each of SHOT_CLASSES classes has a trigger and a label. The
             classes of the examples occur equally often. A set has its own triggers and labels, K examples, and a query
             of each class, which are asked after SHOT_ORDERS random orders of the same examples.
  answer     the candidate with the largest logit: the N values, except those that earlier questions of the prompt have
             shown, or the labels. Of equal logits the lowest ID is the answer: a random one, as IDs are drawn.
  chance     A model that does not look up the key, or the trigger, is right in 1 of the remaining candidates, whatever
             it prefers: over all depths of a length, the pairs are exchangeable; triggers and labels of a set are
             paired at random. At a single depth it may differ: the last value is right at depth 1 and wrong at depth 0.
  source     Ye et al. 2024, "Differential Transformer", arXiv 2410.05258, sections 3.4 and 3.5: N needles with R asked,
             by length and depth; classification with many examples in several orders. There, text of several tokens is
             generated; here single tokens are compared, so that small models and any vocabulary can be measured, and
             the other needles have the depths of the asked ones, so that chance is exact.
*/
#ifndef LLMC_SYNTHETIC_H
#define LLMC_SYNTHETIC_H
#include "recall.h"

enum {
    NEEDLE_LIMIT = 64,  // N; 2 N symbols
    NEEDLE_LENGTHS = 4, // of the context: 1/4, 1/2, 3/4 and all of it
    NEEDLE_DEPTHS = 5,
    NEEDLE_PROMPTS = 50, // per length and depth
    SHOT_LIMIT = 16,     // values of K
    SHOT_CLASSES = 4,
    SHOT_WORDS = 3, // tokens of an example, without its label
    SHOT_FILLERS = 4,
    SHOT_SETS = 32,
    SHOT_ORDERS = 5,
    SHOT_QUERIES = SHOT_CLASSES,                   // per set
    SHOT_SYMBOLS = 2 * SHOT_CLASSES + SHOT_FILLERS // at least
};

typedef struct {
    int needles, asked;    // N, R; 0: not measured
    int shots[SHOT_LIMIT]; // values of K
    int shot_count;
} SyntheticTasks;

typedef struct {
    int symbols[RECALL_SYMBOLS], symbol_count;
    int *text; // the haystack
    size_t text_count;
} SyntheticWords;

typedef struct {
    int index, length, questions, candidates;                        // index: the caller's number
    int candidate[NEEDLE_LIMIT];                                     // ascending IDs
    int at[NEEDLE_LIMIT], answer[NEEDLE_LIMIT], depth[NEEDLE_LIMIT]; // by question: position, token, depth of the pair
} SyntheticPrompt;

// ---- the options

// A number of at most 9 digits, at *text, which it advances; -1: none.
static inline int synthetic_number(const char **text) {
    size_t digits = strspn(*text, "0123456789");
    int number = digits >= 1 && digits <= 9 ? atoi(*text) : -1;
    *text += digits;
    return number;
}

// --eval-needles: N:R. Returns what is wrong, or NULL.
static inline const char *needles_parse(SyntheticTasks *tasks, const char *text) {
    tasks->needles = synthetic_number(&text);
    if (tasks->needles < 0 || *text++ != ':') return "it must be N:R, such as 4:2";
    tasks->asked = synthetic_number(&text);
    if (tasks->asked < 0 || *text) return "it must be N:R, such as 4:2";
    if (tasks->needles < 2 || tasks->needles > NEEDLE_LIMIT) return "N must be 2 to 64";
    if (tasks->asked < 1 || tasks->asked >= tasks->needles)
        return "R must be 1 to N - 1: the last question must have several candidates";
    return NULL;
}

// --eval-shots: K,K,... Returns what is wrong, or NULL.
static inline const char *shots_parse(SyntheticTasks *tasks, const char *text) {
    for (tasks->shot_count = 0;; text++) {
        int K = synthetic_number(&text);
        if (K < 0 || (*text && *text != ',')) return "it must be K,K,..., such as 8,32";
        if (K < SHOT_CLASSES) return "K must be at least 4, one example per class";
        if (tasks->shot_count == SHOT_LIMIT) return "it has more than 16 numbers";
        if (tasks->shot_count && K <= tasks->shots[tasks->shot_count - 1]) return "numbers must ascend";
        tasks->shots[tasks->shot_count++] = K;
        if (!*text) return NULL;
    }
}

static inline int64_t shots_length(int64_t K) { return K * (SHOT_WORDS + 1) + SHOT_WORDS; }

// Positions of the shortest prompts, in which every depth is another place.
static inline int needles_shortest(const SyntheticTasks *t) {
    return 2 * t->needles + 2 * t->asked - 1 + NEEDLE_DEPTHS - 1;
}

// Length number i of the grid.
static inline int needles_length(int i, int T) { return (int)((int64_t)T * (i + 1) / NEEDLE_LENGTHS); }

// The contexts that the tasks require.
static inline int64_t needles_context(const SyntheticTasks *t) {
    return t->needles ? NEEDLE_LENGTHS * (int64_t)needles_shortest(t) : 0;
}
static inline int64_t shots_context(const SyntheticTasks *t) {
    return t->shot_count ? shots_length(t->shots[t->shot_count - 1]) : 0;
}

// The symbols that they require.
static inline int synthetic_symbols(const SyntheticTasks *t) {
    return max_int(2 * t->needles, t->shot_count ? SHOT_SYMBOLS : 0);
}

// ---- prompts

static inline int compare_ids(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static inline void synthetic_candidates(SyntheticPrompt *p, const int *tokens, int count) {
    p->candidates = count;
    memcpy(p->candidate, tokens, (size_t)count * sizeof(int));
    qsort(p->candidate, count, sizeof(int), compare_ids);
}

static inline void synthetic_ask(SyntheticPrompt *p, int at, int answer, int depth) {
    p->at[p->questions] = at;
    p->answer[p->questions] = answer;
    p->depth[p->questions++] = depth;
}

static inline bool is_among(int token, const int *tokens, int count) {
    for (int i = 0; i < count; i++)
        if (tokens[i] == token) return true;
    return false;
}

// Writes `count` tokens of the haystack that are not among the drawn ones; *from: its next token. Some token of it is
// not drawn.
static inline int *needles_text(int *to, const SyntheticWords *w, size_t *from, const int *drawn, int drawn_count,
                                int count) {
    for (int i = 0; i < count;) {
        int token = w->text[(*from)++ % w->text_count];
        if (!is_among(token, drawn, drawn_count)) *to++ = token, i++;
    }
    return to;
}

// tokens [length]: a prompt whose pair 0 has the depth, and is asked
static inline void needles_generate(SyntheticPrompt *p, int *tokens, const SyntheticTasks *t, int length, int depth,
                                    const SyntheticWords *w, uint64_t key) {
    int drawn[RECALL_SYMBOLS], depths[NEEDLE_LIMIT], order[NEEDLE_LIMIT], N = t->needles, R = t->asked;
    int text = length - 2 * N - (2 * R - 1), written = 0, *to = tokens;
    uint64_t next = 0;
    assert(N <= NEEDLE_LIMIT && R < N && 2 * N <= w->symbol_count && text >= NEEDLE_DEPTHS - 1);
    memset(p, 0, sizeof(*p));
    p->length = length;
    memcpy(drawn, w->symbols, (size_t)w->symbol_count * sizeof(int));
    recall_shuffle(drawn, w->symbol_count, 2 * N, key, &next); // keys, then values
    size_t from = (size_t)(random_bits(key, next++) % w->text_count);
    for (int i = 0; i < N; i++) {
        order[i] = i;
        depths[i] = i ? (int)(random_bits(key, next++) % NEEDLE_DEPTHS) : depth;
    }
    recall_shuffle(order, N, N, key, &next);
    for (int d = 0; d < NEEDLE_DEPTHS; d++) {
        int until = (int)((int64_t)text * d / (NEEDLE_DEPTHS - 1));
        to = needles_text(to, w, &from, drawn, 2 * N, until - written);
        written = until;
        for (int i = 0; i < N; i++)
            if (depths[order[i]] == d) *to++ = drawn[order[i]], *to++ = drawn[N + order[i]];
    }
    for (int i = 0; i < R; i++) order[i] = i;
    recall_shuffle(order, R, R, key, &next);
    for (int q = 0; q < R; q++) {
        int i = order[q];
        synthetic_ask(p, (int)(to - tokens), drawn[N + i], depths[i]);
        *to++ = drawn[i];
        if (q + 1 < R) *to++ = drawn[N + i];
    }
    assert(to == tokens + length);
    synthetic_candidates(p, drawn + N, N);
}

// Writes the tokens of an example of a class: fillers, and its trigger among them. drawn: triggers, labels, fillers
static inline int *shots_example(int *to, const int *drawn, int symbol_count, int trigger, uint64_t key) {
    int place = (int)(random_bits(key, 0) % SHOT_WORDS), fillers = symbol_count - 2 * SHOT_CLASSES;
    for (int i = 0; i < SHOT_WORDS; i++) {
        int filler = (int)(random_bits(key, (uint64_t)i + 1) % (uint64_t)fillers);
        *to++ = i == place ? drawn[trigger] : drawn[2 * SHOT_CLASSES + filler];
    }
    return to;
}

// tokens [shots_length(K)]. set, order, query: which one; key: of all sets of K examples
static inline void shots_generate(SyntheticPrompt *p, int *tokens, int K, int set, int order, int query,
                                  const SyntheticWords *w, uint64_t key) {
    int drawn[RECALL_SYMBOLS], *to = tokens, *places = (int *)checked_calloc(K, sizeof(int));
    uint64_t of_set = random_mix(key + (uint64_t)set), of_examples = random_mix(of_set + 1), next = 0;
    uint64_t of_query = random_mix(random_mix(of_set + 2) + (uint64_t)query);
    assert(w->symbol_count >= SHOT_SYMBOLS && query < SHOT_QUERIES);
    memset(p, 0, sizeof(*p));
    p->length = (int)shots_length(K);
    memcpy(drawn, w->symbols, (size_t)w->symbol_count * sizeof(int));
    recall_shuffle(drawn, w->symbol_count, w->symbol_count, of_set, &next);
    for (int i = 0; i < K; i++) places[i] = i;
    next = 0;
    recall_shuffle(places, K, K, random_mix(random_mix(of_set + 3) + (uint64_t)order), &next);
    for (int i = 0; i < K; i++) {
        int of = places[i] % SHOT_CLASSES;
        to = shots_example(to, drawn, w->symbol_count, of, random_mix(of_examples + (uint64_t)places[i]));
        *to++ = drawn[SHOT_CLASSES + of];
    }
    to = shots_example(to, drawn, w->symbol_count, query, of_query);
    assert(to == tokens + p->length);
    synthetic_ask(p, p->length - 1, drawn[SHOT_CLASSES + query], 0);
    synthetic_candidates(p, drawn + SHOT_CLASSES, SHOT_CLASSES);
    free(places);
}

// ---- scores

// Whether the answer to question q is right. logits: of the candidates. A NaN is never the largest.
static inline bool synthetic_right(const SyntheticPrompt *p, int q, const float *logits) {
    int best = -1;
    for (int c = 0; c < p->candidates; c++) {
        bool shown = is_among(p->candidate[c], p->answer, q);
        if (!shown && logits[c] > (best < 0 ? -INFINITY : logits[best])) best = c;
    }
    return best >= 0 && p->candidate[best] == p->answer[q];
}
static inline double synthetic_chance(const SyntheticPrompt *p, int q) { return 1.0 / (p->candidates - q); }
#endif
