/*
generated_text.h: what --generate prints: text for a terminal, or with --prompts a JSON line for each prompt.

  StopReason print_generated(g, tokenizer, count, key, log, step)
                                                                 prints the prompt of the options and its continuation,
                                                                 and logs a record `sample` (log NULL: none); does
                                                                 neither if the generator aborts it: NOT_STOPPED
  Sequence *prompts_sequences(p, tokenizer, V, T, count, key)    the prompts of a file, as tokens; free_sequences().
                                                                 Exits with one line if a prompt has no tokens in the
                                                                 vocabulary, or is too long for the context
  int  print_results(g, list, p, tokenizer)                      generates and prints them in the order of the file

  stdout   {"prompt": TEXT or [ID, ...], "text": TEXT, "tokens": [ID, ...], "stopped": "length"}: the prompt as it was
           given, the generated tokens and their text, and why generation ended: "length", "separator" or
           "not_finite". Bytes that are not UTF-8 become U+FFFD; "text" is null if tokens have no text. A line is
           written as soon as its prompt and those before it are done
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

static inline void free_sequences(Sequence *list, int count) {
    for (int i = 0; list && i < count; i++) free(list[i].tokens);
    free(list);
}

static inline Sequence *prompts_sequences(const Prompts *p, const RunTokenizer *tokenizer, int V, int T, int count,
                                          uint64_t key) {
    const Tokenizer *t = tokenizer->tokenizer;
    Sequence *list = (Sequence *)checked_calloc((size_t)p->count, sizeof(Sequence));
    for (int i = 0; i < p->count; i++) {
        const Prompt *prompt = &p->items[i];
        CHECK(!t || !t->reason[0] || prompt->tokens,
              "%s, line %d: text cannot be encoded exactly: %s; give {\"tokens\": [ID, ...]}", p->name, prompt->line,
              t->reason);
        int length, *tokens = prompt_tokens(prompt, p->name, tokenizer, V, count, &length);
        CHECK((int64_t)length + count <= T,
              "%s, line %d: a prompt of %d tokens%s and --generate %d do not fit into --seq-len %d: generate less, or "
              "use --init with --seq-len %" PRId64 " or more",
              p->name, prompt->line, length, prompt->text && tokenizer->separator >= 0 ? " with the separator" : "",
              count, T, (int64_t)length + count);
        list[i].tokens = tokens;
        list[i].length = list[i].end = length;
        list[i].count = count;
        list[i].key = key ^ random_mix((uint64_t)i);
    }
    return list;
}

typedef struct {
    const Generator *g;
    Sequence *list;
    const Prompts *prompts;
    const Tokenizer *tokenizer;
    int not_finite; // sequences that stopped for this reason
} Results;

static inline void print_json_tokens(const int *tokens, int count) {
    putchar('[');
    print_numbers(stdout, tokens, count, ", ");
    putchar(']');
}

// Prints the line of sequence i, and frees its tokens.
static inline void print_result(void *to, int i) {
    Results *r = (Results *)to;
    Sequence *s = &r->list[i];
    const Prompt *prompt = &r->prompts->items[i];
    const int *tokens = s->tokens + s->length;
    int count = s->end - s->length;
    size_t size = 0;
    unsigned char *text = tokens_text(tokens, count, false, r->g->V, r->tokenizer, &size);
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
    r->not_finite += s->stopped == STOPPED_NOT_FINITE;
    free(text);
    free(s->tokens);
    s->tokens = NULL;
}

// Returns how many of the sequences have stopped because logits were not finite.
static inline int print_results(const Generator *g, Sequence *list, const Prompts *p, const RunTokenizer *tokenizer) {
    Results r = {g, list, p, tokenizer->tokenizer, 0};
    GenerationTimes t = generate_sequences(g, list, p->count, print_result, &r);
    fprintf(stderr,
            "%d prompt%s, up to %d at a time: prefill of %" PRId64
            " tokens in %.3g s, %.0f tokens/s; decoding of %" PRId64 " tokens in %.3g s, %.0f tokens/s\n",
            p->count, p->count == 1 ? "" : "s", min_int(g->B, p->count), t.prefill_tokens, t.prefill_seconds,
            (double)t.prefill_tokens / fmax(t.prefill_seconds, 1e-9), t.decode_tokens, t.decode_seconds,
            (double)t.decode_tokens / fmax(t.decode_seconds, 1e-9));
    return r.not_finite;
}
