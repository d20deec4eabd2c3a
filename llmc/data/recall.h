/*
recall.h: associative recall, a synthetic task: retrieve the value that followed a key.

  sequence   k1 v1 k2 v2 .. kP vP | noise | q1 a1 q2 a2 .. qP aP
             Keys, values and noise of a sequence are distinct tokens, drawn at random for each sequence. The queries q
             are the keys in another order, each followed by its value. The noise may be empty.
  scores     For the prediction after each query: whether the value has the highest probability of all tokens (exact
             match), whether it has the highest of the P values (chance level 1/P), and its loss.
  symbols    the most frequent tokens of the validation data, which the model has seen
  random     all random choices are functions of a key of the caller

  int  recall_symbols(symbols, counts, V)             number of symbols; most frequent first, then lower ids first
  int  recall_cells(cells, T, symbol_count)           the combinations of P and noise that fit
  void recall_generate(tokens, cell, symbols, count, key)   recall_length(cell) tokens
  void recall_score(score, logits, V, tokens, cell, query)  adds the prediction after query number `query`
  source     Arora et al. 2024, "Zoology" (multi-query associative recall)
*/
#pragma once
#include "../base/common.h"
#include "../base/random.h"

enum { RECALL_PAIRS = 64, RECALL_SYMBOLS = 256, RECALL_CELLS = 10, RECALL_SEQUENCES = 128 };

typedef struct {
    int pairs, noise; // P; tokens of noise
} RecallCell;

typedef struct {
    int64_t answers, exact, among;
    double loss; // summed over the answers, in nats
} RecallScore;

static inline int recall_length(RecallCell c) { return 4 * c.pairs + c.noise; }
// The position of query number `query`; its answer is the next token.
static inline int recall_query(RecallCell c, int query) { return 2 * c.pairs + c.noise + 2 * query; }

static inline int recall_symbols(int symbols[RECALL_SYMBOLS], const int64_t *counts, int V) {
    int count = 0;
    for (int v = 0; v < V; v++) {
        int at = count; // insertion into a short sorted list
        while (at > 0 && counts[symbols[at - 1]] < counts[v]) at--;
        if (counts[v] == 0 || at == RECALL_SYMBOLS) continue;
        count = min_int(count + 1, RECALL_SYMBOLS);
        memmove(symbols + at + 1, symbols + at, (count - 1 - at) * sizeof(int));
        symbols[at] = v;
    }
    return count;
}

// P = 4, 8, .. RECALL_PAIRS, each without noise and with as much noise as fits into T positions.
static inline int recall_cells(RecallCell cells[RECALL_CELLS], int T, int symbol_count) {
    int count = 0;
    for (int pairs = 4; pairs <= RECALL_PAIRS && 4 * pairs <= T && 2 * pairs <= symbol_count; pairs *= 2) {
        RecallCell plain = {pairs, 0}, noisy = {pairs, T - 4 * pairs};
        cells[count++] = plain;
        if (noisy.noise > 0 && 2 * pairs < symbol_count) cells[count++] = noisy;
    }
    return count;
}

// Fisher-Yates shuffle: the first n items become a random sample in random order. *drawn is the position in the stream.
static inline void recall_shuffle(int *items, int count, int n, uint64_t key, uint64_t *drawn) {
    for (int i = 0; i < n; i++) {
        int j = i + (int)(random_bits(key, (*drawn)++) % (uint64_t)(count - i));
        int item = items[i];
        items[i] = items[j];
        items[j] = item;
    }
}

static inline void recall_generate(int *tokens, RecallCell c, const int *symbols, int count, uint64_t key) {
    int drawn_symbols[RECALL_SYMBOLS], order[RECALL_PAIRS], P = c.pairs;
    uint64_t drawn = 0;
    assert(P <= RECALL_PAIRS && count <= RECALL_SYMBOLS && 2 * P + (c.noise > 0) <= count);
    memcpy(drawn_symbols, symbols, count * sizeof(int));
    recall_shuffle(drawn_symbols, count, 2 * P, key, &drawn); // keys, then values, then the rest
    for (int i = 0; i < P; i++) {
        order[i] = i;
        tokens[2 * i] = drawn_symbols[i];
        tokens[2 * i + 1] = drawn_symbols[P + i];
    }
    for (int i = 0; i < c.noise; i++)
        tokens[2 * P + i] = drawn_symbols[2 * P + (int)(random_bits(key, drawn++) % (uint64_t)(count - 2 * P))];
    recall_shuffle(order, P, P, key, &drawn);
    for (int i = 0; i < P; i++) {
        tokens[recall_query(c, i)] = drawn_symbols[order[i]];
        tokens[recall_query(c, i) + 1] = drawn_symbols[P + order[i]];
    }
}

// logits (V): the logits after query number `query`. A tie is not a match, nor is a NaN.
static inline void recall_score(RecallScore *score, const float *logits, int V, const int *tokens, RecallCell c,
                                int query) {
    int answer = tokens[recall_query(c, query) + 1];
    double largest = -INFINITY, sum = 0;
    bool exact = true, among = true;
    for (int v = 0; v < V; v++) {
        exact = exact && (v == answer || logits[v] < logits[answer]);
        largest = fmax(largest, (double)logits[v]);
    }
    for (int v = 0; v < V; v++) sum += exp((double)logits[v] - largest);
    for (int i = 0; i < c.pairs; i++) {
        int value = tokens[2 * i + 1];
        among = among && (value == answer || logits[value] < logits[answer]);
    }
    score->answers++;
    score->exact += exact;
    score->among += among;
    score->loss += log(sum) + largest - (double)logits[answer];
}
