/*
generation.h: tests of sampling, of generation in batches with a model that is a hash of its context, and of files of
prompts.
*/
#pragma once
#include "harness.h"
#include "model.h"
#include "../llmc/run/interactive.h"

// ---- sampling

static inline int compare_candidates(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->token - y->token; // ties: lower token first
}

// The definition: all logits sorted, all weights of the top_k largest summed.
static int sample_by_sorting(const float *logits, int V, double temperature, int top_k, double uniform) {
    Candidate *c = (Candidate *)checked_calloc(V, sizeof(Candidate));
    for (int v = 0; v < V; v++) c[v].logit = logits[v], c[v].token = v;
    qsort(c, V, sizeof(Candidate), compare_candidates);
    int count = temperature == 0 ? 1 : top_k > 0 ? min_int(top_k, V) : V, i = 0;
    double sum = 0, running = 0;
    for (int k = 0; k < count && count > 1; k++) sum += exp(((double)c[k].logit - c[0].logit) / temperature);
    for (; i < count - 1; i++) {
        running += exp(((double)c[i].logit - c[0].logit) / temperature);
        if (running >= uniform * sum) break;
    }
    int token = c[i].token;
    free(c);
    return token;
}

// Logits of several kinds: normal, with many ties and both zeros, with one far above the others, spread over floats.
static void make_logits(float *logits, int V, int kind, TestRandom *random) {
    for (int v = 0; v < V; v++) {
        float x = (float)(test_random_real(random) + test_random_real(random) + test_random_real(random));
        if (kind == 0) logits[v] = 5 * x;
        else if (kind == 1) logits[v] = test_random_int(random, 2) ? roundf(2 * x) : -roundf(fabsf(x) / 3);
        else if (kind == 2) logits[v] = x / 100 + (v == V / 2 ? 50.0f : 0);
        else logits[v] = copysignf(powf(10, 38 * x / 3), x);
    }
}

static void test_sampling_equals_sorting(void) {
    static const double temperatures[] = {0, 1e-300, 1e-3, 0.8, 1, 30, 1e300};
    static const double uniforms[] = {0x1p-54, 0.01, 0.3, 0.5, 0.9, 0.999999, 1 - 0x1p-53, 1};
    static const int sizes[] = {1, 2, 7, 300, 6000};
    enum { LARGEST = 6000 };
    static float logits[LARGEST];
    TestRandom random = {7};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        int V = sizes[i];
        const int top_ks[] = {0, 1, 2, 50, V - 1, V, V + 5};
        Sampler sampler = sampler_open(V);
        for (int n = 0; n < 4 * 7 * 7; n++) {
            int kind = n % 4, top_k = max_int(0, top_ks[n / 4 % 7]);
            double temperature = temperatures[n / 28];
            make_logits(logits, V, kind, &random);
            for (size_t u = 0; u < sizeof(uniforms) / sizeof(uniforms[0]); u++) {
                if (V == LARGEST && (n + (int)u) % 8) continue; // sorting is slow
                int token = sample_token(logits, V, temperature, top_k, uniforms[u], &sampler);
                int wanted = sample_by_sorting(logits, V, temperature, top_k, uniforms[u]);
                EXPECT(token == wanted,
                       "V %d, kind %d, temperature %g, top-k %d, uniform %g: %d (%g) instead of %d (%g)", V, kind,
                       temperature, top_k, uniforms[u], token, (double)logits[max_int(token, 0)], wanted,
                       (double)logits[wanted]);
            }
        }
        static const float broken[] = {NAN, INFINITY, -INFINITY};
        for (int b = 0; b < 3; b++)
            for (int greedy = 0; greedy < 2; greedy++) {
                make_logits(logits, V, 0, &random);
                logits[V - 1] = broken[b];
                int token = sample_token(logits, V, greedy ? 0 : 1, 0, 0.5, &sampler);
                EXPECT(token == -1, "a logit of %g: token %d", (double)broken[b], token);
            }
        sampler_close(&sampler);
    }
}

// Where uniform * sum equals a running sum, the order in which sums are rounded decides between two tokens.
static void test_sampling_rounds_as_sorting(void) {
    enum { V = 500 };
    static float logits[V];
    static Candidate sorted[V];
    TestRandom random = {8};
    Sampler sampler = sampler_open(V);
    for (int n = 0; n < 4; n++) {
        double sum = 0, running = 0;
        make_logits(logits, V, 0, &random);
        for (int v = 0; v < V; v++) sorted[v].logit = logits[v], sorted[v].token = v;
        qsort(sorted, V, sizeof(Candidate), compare_candidates);
        for (int i = 0; i < V; i++) sum += exp((double)sorted[i].logit - sorted[0].logit);
        for (int i = 0; i < V; i++) {
            running += exp((double)sorted[i].logit - sorted[0].logit);
            double uniform = fmin(running / sum, 1 - 0x1p-53);
            int token = sample_token(logits, V, 1, 0, uniform, &sampler);
            int wanted = sample_by_sorting(logits, V, 1, 0, uniform);
            EXPECT(token == wanted, "uniform %.17g, rank %d: token %d instead of %d", uniform, i, token, wanted);
        }
    }
    sampler_close(&sampler);
}

// ---- batches

enum { STUB_B = 5, STUB_T = 12, STUB_V = 31, STUB_SEPARATOR = 3 };

// A model whose logits are a hash of the tokens in its cache. After the token `broken` they are not finite.
typedef struct {
    int cache[STUB_B][STUB_T], filled[STUB_B];
    int broken, errors, decodes, rows;
} Stub;

static void stub_logits(const Stub *m, int b, float *logits) {
    const int *tokens = m->cache[b];
    uint64_t key = XXH3_64bits(tokens, (size_t)m->filled[b] * sizeof(int));
    for (int v = 0; v < STUB_V; v++) logits[v] = (float)(2 * random_normal(key, (uint64_t)v));
    if (tokens[m->filled[b] - 1] == m->broken) logits[STUB_V / 2] = NAN;
}

static void stub_prefill(const void *model, int b, const int *tokens, int count, float *logits) {
    Stub *m = (Stub *)model;
    if (b < 0 || b >= STUB_B || count < 1 || count > STUB_T) {
        m->errors++;
        return;
    }
    memcpy(m->cache[b], tokens, (size_t)count * sizeof(int));
    m->filled[b] = count;
    stub_logits(m, b, logits);
}

static void stub_decode(const void *model, const int *tokens, const int *first, int B, float *logits) {
    Stub *m = (Stub *)model;
    m->decodes++;
    m->rows += B;
    for (int b = 0; b < B; b++) {
        m->errors += first[b] != m->filled[b] && first[b] != 0; // a place without a sequence starts at 0
        m->errors += first[b] >= STUB_T || tokens[b] < 0 || tokens[b] >= STUB_V;
        m->cache[b][first[b]] = tokens[b];
        m->filled[b] = first[b] + 1;
        stub_logits(m, b, logits + (size_t)b * STUB_V);
    }
}

// Sequences of different lengths, with equal prompts among them.
enum { STUB_COUNT = 17, STUB_ROOM = 3 * STUB_T + 40 };
typedef struct {
    int tokens[STUB_COUNT][STUB_ROOM];
    Sequence list[STUB_COUNT];
    int started, stopped, asked, drawn[STUB_COUNT], wrong;
} StubSequences;

// The queue says every third time that the next sequence has not yet arrived.
static Sequence *stub_next(void *to, bool wait) {
    StubSequences *s = (StubSequences *)to;
    s->wrong += wait && s->started > s->stopped;
    if (!wait && s->asked++ % 3 == 0) return NULL;
    return s->started < STUB_COUNT ? &s->list[s->started++] : NULL;
}

static void stub_advanced(void *to, Sequence *q) {
    StubSequences *s = (StubSequences *)to;
    int i = (int)(q - s->list);
    s->drawn[i] += q->stopped == NOT_STOPPED || q->stopped == STOPPED_AT_LENGTH;
    s->wrong += i >= s->started || q->end != q->length + s->drawn[i];
    s->stopped += q->stopped != NOT_STOPPED;
}

static void stub_generate(StubSequences *s, Stub *m, int B, int broken, int stop, int longest) {
    Generator g = {m, stub_prefill, stub_decode, B, STUB_T, STUB_V, 1.0, 0, stop, NULL};
    memset(m, 0, sizeof(*m));
    memset(s, 0, sizeof(*s));
    m->broken = broken;
    for (int i = 0; i < STUB_COUNT; i++) {
        int length = 1 + (i * 5) % longest, count = 1 + (i * 7) % 9;
        if (longest > STUB_T) count += 20;
        for (int t = 0; t < length; t++) s->tokens[i][t] = 5 + (i / 2 + t) % (STUB_V - 5);
        s->list[i] = sequence_of(g.T, s->tokens[i], length, count, 1000 + (uint64_t)i);
    }
    SequenceQueue queue = {s, stub_next, stub_advanced};
    generate_sequences(&g, &queue);
}

static void test_batches(void) {
    static StubSequences alone, batch;
    static const struct {
        int broken, stop, longest;
    } cases[] = {{-1, -1, 3}, {-1, STUB_SEPARATOR, 3}, {9, STUB_SEPARATOR, 3}, {9, -1, 3}, {-1, -1, 2 * STUB_T + 3}};
    Stub m;
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        int reasons[4] = {0, 0, 0, 0}, broken = cases[c].broken, stop = cases[c].stop, longest = cases[c].longest;
        stub_generate(&alone, &m, 1, broken, stop, longest);
        EXPECT(m.errors == 0 && m.rows == m.decodes, "one at a time: %d errors, %d rows of %d", m.errors, m.rows,
               m.decodes);
        for (int i = 0; i < STUB_COUNT; i++) {
            const Sequence *s = &alone.list[i];
            int last = s->tokens[s->end - 1];
            reasons[s->stopped]++;
            EXPECT(s->end <= s->length + s->count &&
                       (s->stopped != STOPPED_AT_LENGTH || s->end == s->length + s->count),
                   "sequence %d has %d tokens of %d and reason %d", i, s->end - s->length, s->count, s->stopped);
            EXPECT((s->stopped == STOPPED_NOT_FINITE) == (last == broken && s->end < s->length + s->count),
                   "sequence %d ends with token %d, reason %d", i, last, s->stopped);
        }
        EXPECT((reasons[STOPPED_AT_SEPARATOR] > 0) == (stop >= 0) &&
                   (reasons[STOPPED_NOT_FINITE] > 0) == (broken >= 0) && reasons[STOPPED_AT_LENGTH] > 0 &&
                   reasons[NOT_STOPPED] == 0,
               "case %zu: %d, %d and %d sequences of the reasons", c, reasons[1], reasons[2], reasons[3]);
        for (int B = 2; B <= STUB_B; B++) {
            stub_generate(&batch, &m, B, broken, stop, longest);
            EXPECT(m.errors == 0 && batch.wrong == 0 && batch.stopped == STUB_COUNT,
                   "%d at a time: %d errors, %d wrong calls of the queue, %d of %d stopped", B, m.errors, batch.wrong,
                   batch.stopped, STUB_COUNT);
            for (int i = 0; i < STUB_COUNT; i++)
                EXPECT(batch.list[i].end == alone.list[i].end && batch.list[i].stopped == alone.list[i].stopped &&
                           memcmp(batch.tokens[i], alone.tokens[i], sizeof(batch.tokens[i])) == 0,
                       "case %zu, sequence %d differs when %d are generated at a time", c, i, B);
        }
    }
}

// ---- files of prompts

static void test_prompts_are_read(void) {
    static const struct {
        const char *file;
        int count, empty;
        const char *texts[4]; // NULL: tokens 7, 8, 9
        int lines[4];
    } cases[] = {
        {"one", 1, 0, {"one"}, {1}},
        {"one\ntwo\n", 2, 0, {"one", "two"}, {1, 2}},
        {"\r\none \r\n\r\n\n two\r\n\t", 3, 3, {"one ", " two", "\t"}, {2, 5, 6}},
        {"\xEF\xBB\xBF\xC3\xA9\n", 1, 0, {"\xC3\xA9"}, {1}},
        {"a {\"prompt\": 1}\n{", 2, 0, {"a {\"prompt\": 1}", "{"}, {1, 2}},
        {"{\"prompt\": \"a\\nb\\u00e9\\\\u0000\"}\r\n{\"tokens\":[7,8,9]}",
         2,
         0,
         {"a\nb\xC3\xA9\\u0000", NULL},
         {1, 2}},
        {" \n\xEF\xBB\xBF\n ", 2, 1, {"\xEF\xBB\xBF", " "}, {2, 3}},
        {"\xEF\xBB\xBF \n\n {\"prompt\": \"\"} \n\n", 1, 3, {""}, {3}},
    };
    TestDirectory d = test_make_directory();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *path = test_text("%s/%zu", d.path, i);
        test_write_text(path, cases[i].file);
        Prompts p = prompts_read(path);
        EXPECT(p.count == cases[i].count && p.empty == cases[i].empty, "case %zu: %d prompts, %d empty lines", i,
               p.count, p.empty);
        for (int k = 0; k < min_int(p.count, cases[i].count); k++) {
            const Prompt *q = &p.items[k];
            const char *text = cases[i].texts[k];
            EXPECT(q->line == cases[i].lines[k], "case %zu, prompt %d is in line %d", i, k, q->line);
            if (text) EXPECT(q->text && !q->tokens && strcmp(q->text, text) == 0, "case %zu: '%s'", i, q->text);
            else
                EXPECT(!q->text && q->count == 3 && q->tokens[0] == 7 && q->tokens[2] == 9, "case %zu: %d tokens", i,
                       q->count);
        }
        prompts_close(&p);
    }
}

static void test_streamed_text(void) {
    static const char text[] = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z\xE2\x82z\xF0\x9F\xC3\xA9\x80\xFF\xE2\x82";
    TestDirectory d = test_make_directory();
    const char *path = test_text("%s/streamed", d.path);
    FILE *file = fopen(path, "w");
    StreamedText s = {BYTE_VOCABULARY, NULL, true, {0}, 0};
    for (size_t i = 0, before = 0; i + 1 < sizeof(text); i++) {
        int byte = (unsigned char)text[i];
        stream_tokens(file, &s, &byte, 1);
        size_t now = (size_t)ftell(file);
        bool whole = i < 11 && (i == 0 || i == 2 || i == 5 || i == 9 || i == 10); // bytes that end a character
        EXPECT(i >= 11 || (now > before) == whole, "byte %zu prints %zu bytes", i, now - before);
        before = now;
    }
    stream_end(file, &s);
    fclose(file);
    size_t size, wanted_size;
    char *streamed = file_read(path, 1000, &size);
    file = fopen(path, "w");
    unsigned char all[sizeof(text) + 4] = {0};
    memcpy(all, text, sizeof(text));
    print_text(file, all, sizeof(text) - 1);
    fclose(file);
    char *wanted = file_read(path, 1000, &wanted_size);
    EXPECT(size == wanted_size && memcmp(streamed, wanted, size) == 0, "'%s' instead of '%s'", streamed, wanted);
    free(streamed);
    free(wanted);
}

static const Test generation_tests[] = {
    {"sampling gives the token that sorting all logits gives", test_sampling_equals_sorting},
    {"sampling rounds as sorting all logits does", test_sampling_rounds_as_sorting},
    {"a sequence does not depend on how many are generated at a time", test_batches},
    {"prompts are read from lines and JSON lines", test_prompts_are_read},
    {"text that is printed token by token has whole characters", test_streamed_text},
};
