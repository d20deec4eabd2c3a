/*
generated_text.h: what --generate prints: text for a terminal, or with --prompts a JSON line for each prompt.

  StopReason print_generated(g, tokenizer, count, key, log, step)
                                                                 prints the prompt of the options and its continuation,
                                                                 and logs a record `sample` (log NULL: none); does
                                                                 neither if the generator aborts it: NOT_STOPPED
  Answers answers_of(prompts, tokenizer, V, T, count, key)       the prompts that have been read, as tokens. Exits with
                                                                 one line if a prompt has no tokens in the vocabulary,
                                                                 or is too long for the context
  int  print_answers(g, a)                                       generates and prints them in the order of the file,
                                                                 and those that are read meanwhile

  stdout   {"prompt": TEXT or [ID, ...], "text": TEXT, "tokens": [ID, ...], "stopped": "length"}: the prompt as it was
           given, the generated tokens and their text, and why generation ended: "length", "separator" or
           "not_finite". Bytes that are not UTF-8 become U+FFFD; "text" is null if tokens have no text. A line is
           written as soon as its prompt and those before it are done; prompts of a pipe are continued as they come
  stderr   the speed, at the end
  random   prompt i of the file draws with the stream key ^ random_mix(i); prompt 0 equals a single prompt
*/
#pragma once
#include "../text/prompts.h"
#include "generation.h"
#include "../log/logger.h"
#include "../text/run_tokenizer.h"

static const char *const stop_reasons[] = {NULL, "length", "separator", "not_finite"}; // by StopReason

static inline void log_sample(Log *log, int64_t step, const int *tokens, int count, bool begins, int V,
                              const Tokenizer *tokenizer, StopReason stopped) {
    size_t size = 0;
    unsigned char *text = tokens_text(tokens, count, begins, V, tokenizer, &size);
    log_begin(log, "sample", step);
    if (text) log_bytes(log, "text", (const char *)text, size);
    else log_value(log, "text", "null");
    log_integer(log, "tokens", count);
    log_string(log, "stopped", stop_reasons[stopped]);
    log_end(log);
    free(text);
}

static inline StopReason print_generated(const Generator *g, const RunTokenizer *tokenizer, int count, uint64_t key,
                                         Log *log, int64_t step) {
    int length = tokenizer->prompt_length;
    int *tokens = (int *)checked_calloc((size_t)length + (size_t)count, sizeof(int));
    StopReason stopped;
    memcpy(tokens, tokenizer->prompt, (size_t)length * sizeof(int));
    int generated = generate_tokens(g, tokens, length, count, key, &stopped);
    if (stopped) {
        print_tokens(stdout, tokens + tokenizer->implied, length - tokenizer->implied + generated, g->V,
                     tokenizer->tokenizer, tokenizer->separator);
        printf("\n");
        fflush(stdout);
        bool begins = length == tokenizer->implied; // the prompt is empty
        if (log) log_sample(log, step, tokens + length, generated, begins, g->V, tokenizer->tokenizer, stopped);
    }
    free(tokens);
    return stopped;
}

// The tokens of a prompt, with the separator before a text as for --prompt; *length of them, and room for `count` more.
static inline int *prompt_tokens(const Prompt *prompt, const char *name, const RunTokenizer *tokenizer, int V,
                                 int count, int *length) {
    TokenList list = {NULL, 0, 0};
    CHECK(
        prompt->tokens || tokenizer->tokenizer || V == BYTE_VOCABULARY,
        "%s, line %d: there is no tokenizer for a vocabulary of %d: give --tokenizer FILE, or {\"tokens\": [ID, ...]}",
        name, prompt->line, V);
    CHECK(prompt->size || prompt->tokens || tokenizer->separator >= 0,
          "%s, line %d is an empty prompt, and the token that separates documents is unknown: give --separator ID",
          name, prompt->line);
    if (!prompt->tokens && tokenizer->separator >= 0) tokens_add(&list, tokenizer->separator);
    int *ids = NULL, size = prompt->count;
    if (!prompt->tokens) size = text_tokens(tokenizer, prompt->text, prompt->size, &ids);
    for (int i = 0; i < size; i++) {
        int id = ids ? ids[i] : prompt->tokens[i];
        CHECK(id < V, "%s, line %d: token %d is outside the vocabulary of %d", name, prompt->line, id, V);
        tokens_add(&list, id);
    }
    free(ids);
    *length = (int)list.count;
    list.ids = (int *)realloc(list.ids, (list.count + (size_t)count) * sizeof(int));
    CHECK(list.ids != NULL, "out of memory for %d tokens", count);
    return list.ids;
}

typedef struct {
    Sequence s; // first: a pointer to it is one to the answer
    bool ended; // the queue has been told that it has stopped
} Answer;

// Prompts and their continuations, in the order of the file.
typedef struct {
    Prompts *prompts;
    const RunTokenizer *tokenizer;
    int V, T, generate;
    uint64_t key;
    Answer **list;        // [count]; NULL: printed
    int count, room;      // prompts that have tokens
    int started, printed; // of the list
    int not_finite;       // sequences that stopped for this reason
} Answers;

// Adds the sequence of the next prompt.
static inline void answers_add(Answers *a) {
    const Prompt *prompt = &a->prompts->items[a->count];
    const Tokenizer *t = a->tokenizer->tokenizer;
    const char *name = a->prompts->name;
    CHECK(!t || !t->reason[0] || prompt->tokens,
          "%s, line %d: text cannot be encoded exactly: %s; give {\"tokens\": [ID, ...]}", name, prompt->line,
          t->reason);
    int length, *tokens = prompt_tokens(prompt, name, a->tokenizer, a->V, a->generate, &length);
    CHECK((int64_t)length + a->generate <= a->T,
          "%s, line %d: a prompt of %d tokens%s and --generate %d do not fit into --seq-len %d: generate less, or "
          "use --init with --seq-len %" PRId64 " or more",
          name, prompt->line, length, prompt->text && a->tokenizer->separator >= 0 ? " with the separator" : "",
          a->generate, a->T, (int64_t)length + a->generate);
    if (a->count == a->room) {
        a->room = 2 * a->room + 64;
        a->list = (Answer **)realloc(a->list, (size_t)a->room * sizeof(Answer *));
        CHECK(a->list, "out of memory for %d prompts", a->room);
    }
    Answer *answer = (Answer *)checked_calloc(1, sizeof(Answer));
    answer->s = sequence_of(a->T, tokens, length, a->generate, a->key ^ random_mix((uint64_t)a->count));
    a->list[a->count++] = answer;
}

static inline Answers answers_of(Prompts *prompts, const RunTokenizer *tokenizer, int V, int T, int count,
                                 uint64_t key) {
    Answers a = {prompts, tokenizer, V, T, count, key, NULL, 0, 0, 0, 0, 0};
    while (a.count < prompts->count) answers_add(&a);
    return a;
}

static inline void answers_free(Answers *a, int i) {
    free(a->list[i]->s.tokens);
    free(a->list[i]);
    a->list[i] = NULL;
    prompt_free(&a->prompts->items[i]);
}

static inline void answers_close(Answers *a) {
    for (; a->printed < a->count; a->printed++) answers_free(a, a->printed);
    free(a->list);
}

static inline void print_json_tokens(const int *tokens, int count) {
    putchar('[');
    print_numbers(stdout, tokens, count, ", ");
    putchar(']');
}

static inline void print_answer(const Prompt *prompt, const Sequence *s, int V, const Tokenizer *tokenizer) {
    const int *tokens = s->tokens + s->length;
    int count = s->end - s->length;
    size_t size = 0;
    unsigned char *text = tokens_text(tokens, count, false, V, tokenizer, &size);
    printf("{\"prompt\": ");
    if (prompt->text) json_print_bytes(stdout, prompt->text, prompt->size);
    else print_json_tokens(prompt->tokens, prompt->count);
    printf(", \"text\": ");
    if (text) json_print_bytes(stdout, (char *)text, size);
    else printf("null");
    printf(", \"tokens\": ");
    print_json_tokens(tokens, count);
    printf(", \"stopped\": \"%s\"}\n", stop_reasons[s->stopped]);
    CHECK(fflush(stdout) == 0, "cannot write to stdout: %s", strerror(errno));
    free(text);
}

static inline Sequence *answers_next(void *to, bool wait) {
    Answers *a = (Answers *)to;
    if (a->started == a->count && prompts_next(a->prompts, wait)) answers_add(a);
    return a->started < a->count ? &a->list[a->started++]->s : NULL;
}

// Prints the sequences that have stopped, and those before them.
static inline void answers_advanced(void *to, Sequence *s) {
    Answers *a = (Answers *)to;
    a->not_finite += s->stopped == STOPPED_NOT_FINITE;
    ((Answer *)s)->ended = s->stopped != NOT_STOPPED;
    for (int i; (i = a->printed) < a->started && a->list[i]->ended; a->printed++) {
        print_answer(&a->prompts->items[i], &a->list[i]->s, a->V, a->tokenizer->tokenizer);
        answers_free(a, i);
    }
}

// Returns how many of the sequences have stopped because logits were not finite.
static inline int print_answers(const Generator *g, Answers *a) {
    SequenceQueue queue = {a, answers_next, answers_advanced};
    GenerationTimes t = generate_sequences(g, &queue);
    fprintf(stderr,
            "%d prompt%s, up to %d at a time: prefill of %" PRId64
            " tokens in %.3g s, %.0f tokens/s; decoding of %" PRId64 " tokens in %.3g s, %.0f tokens/s\n",
            a->count, a->count == 1 ? "" : "s", g->B, t.prefill_tokens, t.prefill_seconds,
            (double)t.prefill_tokens / fmax(t.prefill_seconds, 1e-9), t.decode_tokens, t.decode_seconds,
            (double)t.decode_tokens / fmax(t.decode_seconds, 1e-9));
    return a->not_finite;
}
