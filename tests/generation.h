/*
generation.h: tests of sampling, of generation in batches with a model that is a hash of its context, of files of
prompts, and of --generate --prompts.
*/
#ifndef TESTS_GENERATION_H
#define TESTS_GENERATION_H
#include "data.h"
#include "fixture.h"
#include "harness.h"
#include "model.h"
#include "program.h"

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

static void stub_prefill(void *model, int b, const int *tokens, int count, float *logits) {
    Stub *m = (Stub *)model;
    if (b < 0 || b >= STUB_B || count < 1 || count > STUB_T) {
        m->errors++;
        return;
    }
    memcpy(m->cache[b], tokens, (size_t)count * sizeof(int));
    m->filled[b] = count;
    stub_logits(m, b, logits);
}

static void stub_decode(void *model, const int *tokens, const int *first, int B, float *logits) {
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
    int order[STUB_COUNT], reported, early;
} StubSequences;

static void stub_report(void *to, int i) {
    StubSequences *s = (StubSequences *)to;
    for (int k = 0; k <= i; k++) s->early += !s->list[k].stopped;
    s->order[s->reported++] = i;
}

static void stub_generate(StubSequences *s, Stub *m, int B, int broken, int stop, int longest) {
    Generator g = {m, stub_prefill, stub_decode, B, STUB_T, STUB_V, 1.0, 0, stop};
    memset(m, 0, sizeof(*m));
    memset(s, 0, sizeof(*s));
    m->broken = broken;
    for (int i = 0; i < STUB_COUNT; i++) {
        int length = 1 + (i * 5) % longest, count = 1 + (i * 7) % 9;
        if (longest > STUB_T) count += 20;
        for (int t = 0; t < length; t++) s->tokens[i][t] = 5 + (i / 2 + t) % (STUB_V - 5);
        s->list[i] = sequence_of(&g, s->tokens[i], length, count, 1000 + (uint64_t)i);
    }
    generate_sequences(&g, s->list, STUB_COUNT, stub_report, s);
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
            EXPECT(m.errors == 0 && batch.early == 0 && batch.reported == STUB_COUNT,
                   "%d at a time: %d errors, %d reported early, %d of %d", B, m.errors, batch.early, batch.reported,
                   STUB_COUNT);
            for (int i = 0; i < STUB_COUNT; i++)
                EXPECT(batch.order[i] == i && batch.list[i].end == alone.list[i].end &&
                           batch.list[i].stopped == alone.list[i].stopped &&
                           memcmp(batch.tokens[i], alone.tokens[i], sizeof(batch.tokens[i])) == 0,
                       "case %zu, sequence %d differs when %d are generated at a time", c, i, B);
        }
    }
}

// Places are filled again: the calls of the model are those of the shortest schedule within one sequence.
static void test_batches_are_full(void) {
    static StubSequences s;
    Stub m;
    int tokens = 0, longest = 0;
    stub_generate(&s, &m, 4, -1, -1, 3);
    for (int i = 0; i < STUB_COUNT; i++) tokens += s.list[i].count - 1, longest = max_int(longest, s.list[i].count - 1);
    EXPECT(m.decodes <= tokens / 4 + longest, "%d calls for %d tokens, 4 at a time", m.decodes, tokens);
}

// Every variant, with windows and YOCO: prompts of different lengths that leave the context, three at a time and alone.
static void test_batches_of_models(void) {
    enum { COUNT = 4, NEW = 16, ROOM = 32 };
    static const int cases[] = {1, 6, 8, 9};
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++)
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
            const ModelCase *mc = &model_cases[cases[i]];
            ModelConfig config = case_config(mc, &attention_variants[v]);
            Model batch, alone;
            case_open(&batch, &config, 3, mc->T, FOR_GENERATION);
            case_randomize(&batch, 5);
            model_plan(&alone, &config, 1, mc->T, FOR_GENERATION, RECOMPUTE_NOTHING, 0, 1, 0);
            model_alloc(&alone, &batch);
            Generator many = model_generator(&batch, 1, 0, -1), one = model_generator(&alone, 1, 0, -1);
            Sequence list[COUNT];
            int tokens[2][COUNT][ROOM];
            memset(tokens, 0, sizeof(tokens));
            for (int k = 0; k < COUNT; k++) {
                for (int t = 0; t < 1 + 4 * k; t++) tokens[0][k][t] = tokens[1][k][t] = (7 * k + 3 * t) % mc->V;
                list[k] = sequence_of(&many, tokens[0][k], 1 + 4 * k, NEW, 60 + (uint64_t)k);
            }
            generate_sequences(&many, list, COUNT, NULL, NULL);
            for (int k = 0; k < COUNT; k++) {
                Sequence s = sequence_of(&one, tokens[1][k], 1 + 4 * k, NEW, 60 + (uint64_t)k);
                generate_sequences(&one, &s, 1, NULL, NULL);
                EXPECT(s.end == 1 + 4 * k + NEW && list[k].end == s.end &&
                           memcmp(tokens[0][k], tokens[1][k], sizeof(tokens[0][k])) == 0,
                       "%s, %s: sequence %d differs between 3 at a time and alone", attention_variants[v].name, mc->why,
                       k);
            }
            model_free(&alone, false);
            case_close(&batch);
        }
}

// ---- files of prompts

static void prompts_file(char path[700], const TestDirectory *d, const char *text, size_t size) {
    snprintf(path, 700, "%s/prompts", d->path);
    data_write_file(path, text, size);
}

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
        {" \n\xEF\xBB\xBF", 2, 0, {" ", "\xEF\xBB\xBF"}, {1, 2}},
        {"\xEF\xBB\xBF \n\n {\"prompt\": \"\"} \n\n", 1, 3, {""}, {3}},
    };
    TestDirectory d = test_make_directory();
    char path[700];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        prompts_file(path, &d, cases[i].file, strlen(cases[i].file));
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
    test_remove_directory(&d);
}

static void test_prompts_are_refused(void) {
#define TEXT(s) s, sizeof(s) - 1
    static const struct {
        const char *file;
        size_t size;
        const char *words; // of the message
    } cases[] = {
        {TEXT(""), "has no prompts"},
        {TEXT("\n\r\n"), "has no prompts"},
        {TEXT("one\ntw\0o\n"), "line 2 has a NUL byte at byte 3"},
        {TEXT("one\n\xC3\xA9\xFFx\n"), "line 2 is not valid UTF-8 at byte 3"},
        {TEXT("one\n\xE2\x82"), "line 2 is not valid UTF-8 at byte 1"},
        {TEXT("\xFF\xFEo\0"), "line 1"},
        {TEXT("{\"prompt\": \"a\"}\nplain\n"), "line 2 is not a JSON object"},
        {TEXT("{\"prompt\": \"a\n\"}"), "line 1 is not a JSON object"},
        {TEXT("{\"prompt\": \"\\ud800\"}"), "line 1 is not a JSON object"},
        {TEXT("{\n\"prompt\": \"a\"\n}"), "line 1 is not a JSON object"},
        {TEXT("{\"prompt\": \"a\\u0000b\"}"), "line 1 has the character U+0000"},
        {TEXT("{}"), "line 1 has no prompt"},
        {TEXT("{\"prompt\": 1}"), "line 1: \"prompt\" is not a string"},
        {TEXT("{\"tokens\": \"a\"}"), "line 1: \"tokens\" is not a list"},
        {TEXT("{\"tokens\": []}"), "line 1: \"tokens\" is empty"},
        {TEXT("{\"tokens\": [1, 2.5]}"), "line 1: element 2 of \"tokens\" is not a token ID"},
        {TEXT("{\"tokens\": [1, -2]}"), "line 1: element 2"},
        {TEXT("{\"tokens\": [4294967296]}"), "line 1: element 1"},
        {TEXT("{\"prompt\": \"a\", \"tokens\": [1]}"), "line 1 has more than one prompt"},
        {TEXT("{\"prompt\": \"a\", \"prompt\": \"b\"}"), "line 1 has more than one prompt"},
        {TEXT("\n{\"prompt\": \"a\", \"temper\\nature\\u007f\": 1}"), "line 2 has the key \"temper\\nature?\""},
        {TEXT("{\"tokens\": [5, 256]}"), "line 1: token 256 is outside the vocabulary of 256"},
    };
#undef TEXT
    TestDirectory d = test_make_directory();
    ProgramResult r;
    char path[700];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        prompts_file(path, &d, cases[i].file, cases[i].size);
        run_command(&r, "%s --vocab 256 --seq-len 16 --generate 2 --prompts %s", test_program(), path);
        EXPECT_ONE_LINE(r, EXIT_FAILED, cases[i].words);
        EXPECT(r.out[0] == 0, "%s: printed %.200s", cases[i].words, r.out);
    }
    run_command(&r, "%s --generate 2 --prompts '%s/none'", test_program(), d.path);
    EXPECT_ONE_LINE(r, EXIT_FAILED, "none cannot be opened: No such file");
    run_command(&r, "%s --generate 2 --prompts '%s'", test_program(), d.path);
    EXPECT_ONE_LINE(r, EXIT_FAILED, "cannot be read: Is a directory");
    run_command(&r, "%s --generate 2 --prompts - < /dev/null", test_program());
    EXPECT_ONE_LINE(r, EXIT_FAILED, "standard input has no prompts");
    run_command(&r, "yes | head -c 300000000 | %s --generate 2 --prompts -", test_program());
    EXPECT_ONE_LINE(r, EXIT_FAILED, "standard input is larger than 256 MiB");
    run_command(&r, "yes | head -c 2200000 | %s --generate 2 --prompts -", test_program());
    EXPECT_ONE_LINE(r, EXIT_FAILED, "more than 1048576 prompts");
    test_remove_directory(&d);
}

static void test_prompts_that_do_not_fit(void) {
    static const struct {
        const char *options, *file, *words; // words NULL: accepted
    } cases[] = {
        {"--vocab 256 --seq-len 16 --generate 5", "aaaa\n1234567890", NULL}, // with the separator, 16
        {"--vocab 256 --seq-len 16 --generate 6", "aaaa\n1234567890",
         "line 2: a prompt of 11 tokens with the separator"},
        {"--vocab 256 --seq-len 16 --generate 6", "aaaa\n1234567890", "--seq-len 17 or more"},
        {"--vocab 256 --seq-len 16 --generate 16", "{\"tokens\": [1]}",
         "line 1: a prompt of 1 tokens and --generate 16"},
        {"--vocab 256 --seq-len 16 --generate 15", "{\"tokens\": [1]}", NULL},
        {"--vocab 300 --generate 5", "aaaa", "line 1: there is no tokenizer for a vocabulary of 300"},
        {"--vocab 300 --generate 5", "{\"tokens\": [299]}", NULL},
        {"--vocab 300 --generate 5 --stop-at-separator", "{\"tokens\": [299]}", "--separator ID"},
        {"--vocab 300 --generate 5 --separator 7", "{\"prompt\": \"\"}", "there is no tokenizer"},
        {"--vocab 256 --generate 5 --separator 7", "{\"prompt\": \"\"}", NULL},
    };
    TestDirectory d = test_make_directory();
    ProgramResult r;
    char path[700];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        prompts_file(path, &d, cases[i].file, strlen(cases[i].file));
        run_command(&r, "%s %s --prompts %s", test_program(), cases[i].options, path);
        if (cases[i].words) EXPECT_ONE_LINE(r, EXIT_FAILED, cases[i].words);
        else
            EXPECT(r.status == 0 && count_lines(r.err) == 2, "%s: status %d: %.300s", cases[i].options, r.status,
                   r.err);
        EXPECT((r.out[0] == 0) == (cases[i].words != NULL), "%s: printed %.200s", cases[i].options, r.out);
    }
    run_command(&r, "seq 64 | %s --vocab 256 --seq-len 16777216 --batch-size 64 --generate 5 --prompts -",
                test_program());
    EXPECT_ONE_LINE(r, EXIT_FAILED, "options that save memory: --batch-size 32 (");
    static const char *const usage[][2] = {
        {"--prompts x --train-data y", "--prompts requires --generate"},
        {"--stop-at-separator --train-data y", "--stop-at-separator requires --generate"},
        {"--generate 3 --prompts x --prompt y", "--prompts and --prompt are mutually exclusive"},
        {"--generate 3 --prompts x --prompt-tokens 1", "--prompts and --prompt-tokens are mutually exclusive"},
    };
    for (size_t i = 0; i < sizeof(usage) / sizeof(usage[0]); i++) {
        run_command(&r, "%s %s", test_program(), usage[i][0]);
        EXPECT_ONE_LINE(r, EXIT_USAGE, usage[i][1]);
    }
    test_remove_directory(&d);
}

// ---- the program

// One line of output as JSON. Fails if a byte is not printable UTF-8, or a key is missing.
static cJSON *result_line(const char **at) {
    const char *end = strchr(*at, '\n');
    size_t size = end ? (size_t)(end - *at) : 0;
    char *line = strndup(*at, size);
    for (size_t i = 0, length; i < size; i += length) {
        length = (size_t)utf8_length((unsigned char *)line + i);
        EXPECT(length > 0 && (unsigned char)line[i] >= 0x20, "byte %zu of %.300s", i, line);
        length = max_size(length, 1);
    }
    cJSON *json = cJSON_Parse(line);
    EXPECT(cJSON_GetArraySize(json) == 4 && cJSON_IsArray(json_member(json, "tokens")) && json_member(json, "prompt") &&
               json_member(json, "text") && cJSON_IsString(json_member(json, "stopped")),
           "%.300s", line);
    free(line);
    *at = end ? end + 1 : *at;
    return json;
}

static const char *result_string(const cJSON *json, const char *key) {
    const char *text = cJSON_GetStringValue(json_member(json, key));
    return text ? text : "(none)";
}

static void train_for_prompts(const ProgramData *d) {
    static ProgramResult r;
    run_command(&r,
                "%s --train-data '%s/train.bin' --layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 "
                "--seq-len 64 --batch-size 4 --steps 30 --lr 0.03 --out '%s/run'",
                test_program(), d->dir.path, d->dir.path);
    EXPECT_STATUS(r, EXIT_DONE);
}

static void test_results_of_prompts(void) {
    static const char *const prompts[] = {"The ", "every king", "a", "some poet sees ", "a", "x\"\\\t\xC3\xA9"};
    enum { COUNT = 6, TOKENS = 40 };
    ProgramData d = program_data();
    static ProgramResult r, single, other;
    char path[700], common[1200];
    train_for_prompts(&d);
    FORMAT(path, "%s/prompts", d.dir.path);
    FILE *f = fopen(path, "w");
    for (int i = 0; i < COUNT; i++) fprintf(f, "%s\n", prompts[i]);
    fclose(f);
    FORMAT(common, "%s --init '%s/run/checkpoints/step_00000030' --temperature 0.7 --generate %d", test_program(),
           d.dir.path, TOKENS);
    run_command(&r, "%s --prompts '%s' --batch-size 1", common, path);
    EXPECT(r.status == 0 && count_lines(r.out) == COUNT && count_lines(r.err) == 2, "status %d: %.300s", r.status,
           r.err);
    EXPECT(strncmp(r.err, "keys and values: 0.0 MiB for 1 sequence of up to 64 positions\n", 62) == 0, "%.300s", r.err);
    EXPECT(strstr(r.err, "6 prompts, up to 1 at a time: prefill of 43 tokens in"), "%.300s", r.err);
    const char *at = r.out;
    for (int i = 0; i < COUNT; i++) {
        cJSON *json = result_line(&at);
        char whole[1024];
        const char *text = result_string(json, "text");
        const cJSON *tokens = json_member(json, "tokens");
        EXPECT(strcmp(result_string(json, "prompt"), prompts[i]) == 0, "prompt %d is %s", i,
               result_string(json, "prompt"));
        EXPECT(strcmp(result_string(json, "stopped"), "length") == 0 && cJSON_GetArraySize(tokens) == TOKENS,
               "prompt %d: %d tokens", i, cJSON_GetArraySize(tokens));
        for (int t = 0; t < TOKENS && strlen(text) == TOKENS; t++)
            EXPECT(cJSON_GetArrayItem(tokens, t)->valueint == (unsigned char)text[t], "prompt %d, token %d", i, t);
        snprintf(whole, sizeof(whole), "%s%s\n", prompts[i], text);
        run_command(&single, "%s --prompt '%s'", common, prompts[i]);
        EXPECT((strcmp(single.out, whole) == 0) == (i == 0), "prompt %d: %.100s and alone %.100s", i, whole,
               single.out);
        cJSON_Delete(json);
    }
    for (int B = 2; B <= 8; B += 3) {
        run_command(&other, "%s --prompts - --batch-size %d < '%s'", common, B, path);
        EXPECT(other.status == 0 && strcmp(r.out, other.out) == 0, "--batch-size %d: %.300s%.300s", B, other.out,
               other.err);
    }
    // notes of a resume are not on stdout; updates of 4 sequences do not restrict generation
    run_command(
        &other,
        "%s --out '%s/run' --resume --temperature 0.7 --generate %d --prompts '%s' --batch-size 3 --prompt-tokens 9",
        test_program(), d.dir.path, TOKENS, path);
    EXPECT_ONE_LINE(other, EXIT_USAGE, "mutually exclusive");
    run_command(&other, "%s --out '%s/run' --resume --temperature 0.7 --generate %d --prompts '%s' --batch-size 3",
                test_program(), d.dir.path, TOKENS, path);
    EXPECT(other.status == 0 && strcmp(r.out, other.out) == 0, "--resume: %.300s%.300s", other.out, other.err);
    EXPECT(strstr(other.err, "option --batch-size: 4 in the checkpoint, 3 now\n"), "%.300s", other.err);
    test_remove_directory(&d.dir);
}

static void test_stop_at_separator(void) {
    ProgramData d = program_data();
    static ProgramResult whole, stopped;
    char path[700], common[1200];
    train_for_prompts(&d);
    const char *lines = "{\"tokens\": [97, 32]}\n{\"prompt\": \"th\"}\n{\"prompt\": \"on\"}";
    prompts_file(path, &d.dir, lines, strlen(lines));
    FORMAT(common, "%s --init '%s/run/checkpoints/step_00000030' --temperature 1 --generate 24 --separator 115",
           test_program(), d.dir.path); // 's'
    run_command(&whole, "%s --prompts '%s'", common, path);
    run_command(&stopped, "%s --prompts '%s' --stop-at-separator", common, path);
    EXPECT(whole.status == 0 && stopped.status == 0 && count_lines(stopped.out) == 3, "%.300s", stopped.err);
    const char *a = whole.out, *b = stopped.out;
    int early = 0;
    for (int i = 0; i < 3; i++) {
        cJSON *x = result_line(&a), *y = result_line(&b);
        const char *text = result_string(x, "text");
        size_t length = strcspn(text, "s");
        bool has = text[length] == 's';
        EXPECT(cJSON_IsArray(json_member(y, "prompt")) == (i == 0), "prompt %d", i);
        EXPECT(strncmp(result_string(y, "text"), text, length) == 0 && strlen(result_string(y, "text")) == length &&
                   cJSON_GetArraySize(json_member(y, "tokens")) == (int)length,
               "'%s' of '%s'", result_string(y, "text"), text);
        EXPECT(strcmp(result_string(y, "stopped"), has ? "separator" : "length") == 0, "%s",
               result_string(y, "stopped"));
        early += has;
        cJSON_Delete(x);
        cJSON_Delete(y);
    }
    EXPECT(early > 0, "no text has the separator");
    FORMAT(common, "%s --init '%s/run/checkpoints/step_00000030' --temperature 1 --generate 200 --separator 115",
           test_program(), d.dir.path); // enough for an 's'
    run_command(&whole, "%s --prompt th", common);
    run_command(&stopped, "%s --prompt th --stop-at-separator", common);
    size_t n = strlen(stopped.out) - 1; // without the newline; an empty line stands for the separator
    EXPECT(stopped.status == 0 && strncmp(whole.out, stopped.out, n) == 0 && strncmp(whole.out + n, "\n\n", 2) == 0,
           "%.300s and %.300s", whole.out, stopped.out);
    test_remove_directory(&d.dir);
}

// A model without training draws all bytes; the lines are JSON all the same.
static void test_results_are_utf8(void) {
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    char path[700];
    int invalid = 0, control = 0;
    prompts_file(path, &d, "\x01\x7F\xC2\x80\nb\nc\n", 9);
    run_command(&r, "%s --vocab 256 --seq-len 256 --temperature 2 --generate 200 --prompts %s", test_program(), path);
    EXPECT(r.status == 0 && count_lines(r.out) == 3, "status %d: %.300s", r.status, r.err);
    const char *at = r.out;
    for (int i = 0; i < 3; i++) {
        cJSON *json = result_line(&at);
        const char *text = result_string(json, "text");
        const cJSON *token = cJSON_GetArrayItem(json_member(json, "tokens"), 0);
        EXPECT(i || strcmp(result_string(json, "prompt"), "\x01\x7F\xC2\x80") == 0, "%s",
               result_string(json, "prompt"));
        for (; token && *text; token = token->next) {
            int id = token->valueint;
            if (id == 0) break; // ends the string of the parser
            control += id < 0x20;
            if (id < 0x80) EXPECT((unsigned char)*text == id, "byte %d instead of %d", *text, id);
            else if (strncmp(text, "\xEF\xBF\xBD", 3) != 0) break; // a valid character
            else invalid++, text += 2;
            text++;
        }
        cJSON_Delete(json);
    }
    EXPECT(invalid > 10 && control > 0, "only %d invalid bytes and %d control characters", invalid, control);
    test_remove_directory(&d);
}

// A weight that is not a number in the embedding of token 5: sequences that have it stop, the others do not. The text
// is null: the 37 tokens have none.
static void test_not_finite_prompts(void) {
    Fixture f = fixture_open("diff_v2", "a");
    static ProgramResult r;
    char path[700], model[700], command[2000];
    FORMAT(model, "%s/model.safetensors", f.dir.path);
    SafeTensors *file = safetensors_open(model);
    const SafeTensor *t = safetensors_find(file, "model.embed_tokens.weight");
    uint64_t row = t ? (t->end - t->begin) / 37 : 0, at = t ? t->begin + 5 * row : 0;
    EXPECT(t && t->shape[0] == 37, "the fixture has no embedding");
    safetensors_close(file);
    const char *lines = "{\"tokens\":[1]}\n{\"tokens\":[5]}\n{\"tokens\":[2,5]}\n{\"tokens\":[30]}\n";
    prompts_file(path, &f.dir, lines, strlen(lines));
    FORMAT(command, "%s --init %s --temperature 0 --generate 4 --prompts %s", test_program(), f.dir.path, path);
    for (int broken = 0; broken < 2; broken++) {
        if (broken) {
            int fd = open(model, O_WRONLY);
            unsigned char bytes[1024];
            memset(bytes, 0xFF, sizeof(bytes));
            file_pwrite(fd, bytes, row, at, model);
            close(fd);
        }
        run_command(&r, "%s", command);
        if (broken)
            EXPECT(r.status == EXIT_FAILED && strstr(r.err, "not finite after 2 of 4 prompts"), "%.300s", r.err);
        else EXPECT_STATUS(r, EXIT_DONE);
        const char *line = r.out;
        EXPECT(count_lines(r.out) == 4, "%.500s", r.out);
        for (int i = 0; i < 4; i++) {
            cJSON *json = result_line(&line);
            bool stops = broken && (i == 1 || i == 2);
            EXPECT(strcmp(result_string(json, "stopped"), stops ? "not_finite" : "length") == 0 &&
                       cJSON_GetArraySize(json_member(json, "tokens")) == (stops ? 0 : 4) &&
                       cJSON_IsNull(json_member(json, "text")),
                   "prompt %d: %.300s", i, r.out);
            cJSON_Delete(json);
        }
    }
    fixture_close(&f);
}

static const Test generation_tests[] = {
    {"sampling gives the token that sorting all logits gives", test_sampling_equals_sorting},
    {"a sequence does not depend on how many are generated at a time", test_batches},
    {"a place whose sequence has stopped is filled again", test_batches_are_full},
    {"every variant, with windows and YOCO, generates the same tokens in a batch and alone", test_batches_of_models},
    {"prompts are read from lines and JSON lines", test_prompts_are_read},
};
enum { GENERATION_TEST_COUNT = sizeof(generation_tests) / sizeof(generation_tests[0]) };

static const Test generation_program_tests[] = {
    {"a file of prompts with a mistake is refused with its line", test_prompts_are_refused},
    {"prompts that do not fit and options that exclude each other are refused", test_prompts_that_do_not_fit},
    {"--prompts prints JSON lines in the order of the file, for every --batch-size", test_results_of_prompts},
    {"--stop-at-separator stops before the separator", test_stop_at_separator},
    {"results of all bytes are JSON in UTF-8", test_results_are_utf8},
    {"prompts whose logits are not finite stop alone, and the program fails", test_not_finite_prompts},
};
enum { GENERATION_PROGRAM_TEST_COUNT = sizeof(generation_program_tests) / sizeof(generation_program_tests[0]) };
#endif
