/*
interactive.h: --interactive: continues each line of stdin, and prints the text token by token.

  void interactive_check(tokenizer, V)             exits with one line if tokens have no text
  bool interactive(g, tokenizer, generate, key)    until the end of stdin. Returns whether all lines were texts and all
                                                   logits finite
  StreamedText, stream_tokens, stream_end          text of tokens, as whole characters

  stdout     the continuations, each followed by a line end; on a terminal also "> " before each line
  stderr     on a terminal, why a continuation ended, and its speed
  line       a text without NUL bytes, in UTF-8; line i draws with the stream key ^ random_mix(i), as with --prompts.
             Lines are prompts of their own: the model does not see the lines before. A prompt longer than the context
             begins with its last tokens
  empty line continues the last text, unless it ended with its document: then, and at first, it begins a document
  Ctrl-C     ends a continuation; while the program waits, it discards the line that is being typed
*/
#pragma once
#include "../evaluate/generated_text.h"
#include "stop_signals.h"

// Text that is printed as its tokens arrive. A character whose last bytes are missing waits for them.
typedef struct {
    int V;
    const Tokenizer *tokenizer;
    bool begins;           // a document begins with the next token
    unsigned char held[4]; // the beginning of a character
    size_t count;          // its bytes
} StreamedText;

// The bytes at the end of text that begin a character.
static inline size_t utf8_begun(const unsigned char *text, size_t size) {
    for (size_t back = 1; back <= 3 && back <= size; back++) {
        unsigned char c = text[size - back];
        size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
        if (c < 0x80) return 0;
        if (c >= 0xC0) return length > back ? back : 0;
    }
    return 0;
}

static inline void stream_tokens(FILE *out, StreamedText *s, const int *tokens, int count) {
    size_t size = 0, held = s->count;
    unsigned char *bytes = tokens_text(tokens, count, s->begins, s->V, s->tokenizer, &size);
    unsigned char *text = (unsigned char *)checked_calloc(held + size + 4, 1);
    memcpy(text, s->held, held);
    memcpy(text + held, bytes, size);
    s->count = utf8_begun(text, held + size);
    memcpy(s->held, text + held + size - s->count, s->count);
    print_text(out, text, held + size - s->count);
    s->begins = false;
    free(text);
    free(bytes);
}

static inline void stream_end(FILE *out, StreamedText *s) {
    unsigned char text[8] = {0};
    memcpy(text, s->held, s->count);
    print_text(out, text, s->count);
    s->count = 0;
}

static inline void interactive_check(const RunTokenizer *tokenizer, int V) {
    const Tokenizer *t = tokenizer->tokenizer;
    CHECK(t || V == BYTE_VOCABULARY,
          "--interactive: there is no tokenizer for a vocabulary of %d: give --tokenizer FILE, or use --prompts with "
          "{\"tokens\": [ID, ...]}",
          V);
    CHECK(!t || !t->reason[0],
          "--interactive: text cannot be encoded exactly: %s; use --prompts with {\"tokens\": [ID, ...]}", t->reason);
}

typedef struct {
    const RunTokenizer *tokenizer;
    int generate;
    Sequence s;
    Sequence *next; // of only_sequence
    StreamedText text;
} Talk;

static inline Sequence *talk_next(void *to, bool wait) { return only_sequence(&((Talk *)to)->next, wait); }

static inline void talk_advanced(void *to, Sequence *s) {
    Talk *t = (Talk *)to;
    bool drawn = s->stopped == NOT_STOPPED || s->stopped == STOPPED_AT_LENGTH;
    if (drawn) stream_tokens(stdout, &t->text, s->tokens + s->end - 1, 1);
    if (s->stopped) stream_end(stdout, &t->text);
    CHECK(fflush(stdout) == 0, "cannot write to stdout: %s", strerror(errno));
}

// Begins a new sequence with a text, or a document with a text of 0 bytes.
static inline void talk_begin(Talk *t, const Generator *g, char *text, size_t size, int line, uint64_t key) {
    Prompt prompt = {text, size, NULL, 0, line};
    int length = 1, *tokens;
    free(t->s.tokens);
    if (size) tokens = prompt_tokens(&prompt, "standard input", t->tokenizer, g->V, t->generate, &length);
    else {
        tokens = (int *)checked_calloc(1 + (size_t)t->generate, sizeof(int));
        tokens[0] = max_int(t->tokenizer->separator, 0);
    }
    t->s = sequence_of(g->T, tokens, length, t->generate, key);
    t->text = (StreamedText){g->V, t->tokenizer->tokenizer, size == 0, {0}, 0};
}

static inline void talk_continue(Talk *t) {
    t->s.count = t->s.end - t->s.length + t->generate;
    t->s.stopped = NOT_STOPPED;
    t->s.tokens = (int *)realloc(t->s.tokens, (size_t)(t->s.length + t->s.count) * sizeof(int));
    CHECK(t->s.tokens, "out of memory for %d tokens", t->s.count);
}

// Generates and prints a continuation.
static inline void talk_generate(Talk *t, const Generator *g, bool terminal) {
    static const char *const ends[] = {"Ctrl-C; an empty line continues", "an empty line continues",
                                       "the document ends", "the model's logits are not finite"}; // by StopReason
    SequenceQueue queue = {t, talk_next, talk_advanced};
    int before = t->s.end;
    t->next = &t->s;
    GenerationTimes times = generate_sequences(g, &queue);
    if (!t->s.stopped) stream_end(stdout, &t->text);
    printf("\n");
    CHECK(fflush(stdout) == 0, "cannot write to stdout: %s", strerror(errno));
    double seconds = times.decode_seconds / fmax((double)times.decode_tokens, 1);
    if (terminal)
        fprintf(stderr, "[%d tokens, %.3g ms each: %s]\n", t->s.end - before, 1e3 * seconds, ends[t->s.stopped]);
}

static inline bool interactive(Generator *g, const RunTokenizer *tokenizer, int generate, uint64_t key) {
    bool terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO), good = true;
    Prompts input = prompts_open("-");
    Talk t;
    memset(&t, 0, sizeof(t));
    t.tokenizer = tokenizer;
    t.generate = generate;
    t.s.stopped = STOPPED_AT_SEPARATOR; // there is no text yet
    size_t size;
    if (terminal) {
        interrupts_catch("\n> ");
        g->abandons = interrupt_arrived;
        fprintf(stderr, "type a text to continue; Ctrl-C ends a continuation, Ctrl-D the program\n");
    }
    for (uint64_t texts = 0;;) {
        interrupts_at_prompt(true); // before the prompt is seen
        if (terminal) printf("> ");
        fflush(stdout);
        char *line = prompts_line(&input, true, &size);
        interrupts_at_prompt(false);
        if (!line) break;
        size_t invalid = utf8_invalid_at(line, size);
        if (invalid || memchr(line, 0, size)) {
            warn("line %d of standard input %s: type it again", input.line,
                 invalid ? "is not valid UTF-8" : "has a NUL byte");
            good = false;
            continue;
        }
        if (size || t.s.stopped == STOPPED_AT_SEPARATOR)
            talk_begin(&t, g, line, size, input.line, key ^ random_mix(texts++));
        else talk_continue(&t);
        talk_generate(&t, g, terminal);
        good = good && t.s.stopped != STOPPED_NOT_FINITE;
    }
    if (terminal) printf("\n");
    free(t.s.tokens);
    prompts_close(&input);
    return good;
}
