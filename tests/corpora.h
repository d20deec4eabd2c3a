/*
corpora.h: tests of corpus directories, of several corpora with weights, and of attention that stays within documents.
*/
#ifndef TESTS_CORPORA_H
#define TESTS_CORPORA_H
#include "data.h"
#include "harness.h"
#include "model.h"
#include "program.h"

enum { CORPORA_T = 5 };

// Makes a corpus directory with `shards` training shards of 101 tokens each, starting at `first`, and one for
// validation.
static void corpora_make(const char *directory, const char *name, int shards, uint32_t first, const char *json) {
    char path[800];
    FORMAT(path, "%s/%s", directory, name);
    CHECK(mkdir(path, 0777) == 0, "cannot make %s", path);
    for (int i = 0; i <= shards; i++) {
        FORMAT(path, "%s/%s/%s_%06d.bin", directory, name, i ? "train" : "val", i);
        data_write_shard(path, 2, first + (uint32_t)i * 101, 65536, 101);
    }
    FORMAT(path, "%s/%s/corpus.json", directory, name);
    if (json) data_write_file(path, json, strlen(json));
}

// The first tokens of the `count` windows from global index 0.
static void corpora_windows(int *starts, const char *text, uint64_t seed, int count, bool shuffle) {
    int inputs[CORPORA_T], targets[CORPORA_T];
    DataLoader l;
    dataloader_open(&l, text, 1, CORPORA_T, 65536, 0, 1, seed, shuffle);
    dataloader_start(&l, 0);
    for (int i = 0; i < count; i++) {
        dataloader_next(&l, inputs, targets, NULL);
        starts[i] = inputs[0];
    }
    dataloader_close(&l);
}

// At the end of each block the numbers of windows deviate from the weights by less than one, and the windows of a
// corpus are the next in its own order.
static void test_mixture_weights_and_order(void) {
    TestDirectory d = test_make_directory();
    char text[2000], path[700];
    enum { BLOCKS = 3, COUNT = BLOCKS * MIXTURE_BLOCK, SOURCES = 3 };
    static const char *const names[SOURCES] = {"web", "code", "books"};
    const int first[SOURCES] = {0, 10000, 20000}, shards[SOURCES] = {4, 2, 1};
    const double want[SOURCES] = {0.7, 0.29, 0.01};
    for (int s = 0; s < SOURCES; s++)
        corpora_make(d.path, names[s], shards[s], (uint32_t)first[s], "{\"format\": 1, \"vocab_size\": 65536}");
    FORMAT(text, "web=%s/web:7 code=%s/co\\de:2.9  books=%s/books/train_*.bin:.1", d.path, d.path, d.path);
    int *starts = (int *)checked_calloc(COUNT, sizeof(int)), *alone = (int *)checked_calloc(COUNT, sizeof(int));
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        corpora_windows(starts, text, 3, COUNT, shuffle);
        for (int s = 0; s < SOURCES; s++) {
            FORMAT(path, "%s/%s", d.path, names[s]);
            corpora_windows(alone, path, random_key(names[s], 3), COUNT, shuffle);
            if (s == 2 && !shuffle) continue; // the pattern names the training shards
            int seen = 0, runs = 0;
            int64_t sum = 0; // of the squares of first tokens, which no other windows are likely to have
            for (int i = 0; i < COUNT; i++) {
                bool own = starts[i] / 10000 == s;
                if (own) {
                    sum += (int64_t)starts[i] * starts[i] - (int64_t)alone[seen] * alone[seen];
                    seen++;
                }
                runs += own && i > 0 && starts[i - 1] / 10000 == s;
                if (i % MIXTURE_BLOCK == MIXTURE_BLOCK - 1)
                    EXPECT(fabs(seen - want[s] * (i + 1)) < 1 && sum == 0,
                           "%d windows of %s after %d; %lld from its next ones", seen, names[s], i + 1, (long long)sum);
            }
            double expected = COUNT * want[s] * want[s], deviation = sqrt(expected);
            EXPECT(fabs(runs - expected) < 6 * deviation + 3, "%s follows itself %d times, not %.0f: it is not mixed",
                   names[s], runs, expected);
        }
    }
    corpora_windows(alone, text, 4, COUNT, true);
    int same = 0;
    for (int i = 0; i < COUNT; i++) same += starts[i] == alone[i];
    EXPECT(same < COUNT / 20, "with another seed %d of %d windows are the same", same, COUNT);
    free(starts);
    free(alone);
    test_remove_directory(&d);
}

// A loader of `count` corpora with about `windows` windows each, for dataloader_locate only.
static DataLoader corpora_bare(const double *weights, int count, uint64_t windows, bool shuffle) {
    DataLoader l;
    double sum = 0;
    memset(&l, 0, sizeof(l));
    l.corpus_count = count, l.seed = 11, l.shuffle = shuffle;
    l.corpora = (Corpus *)checked_calloc(count, sizeof(Corpus));
    for (int i = 0; i < count; i++) sum += weights[i];
    for (int i = 0; i < count; i++) {
        l.corpora[i].weight = weights[i] / sum;
        l.corpora[i].window_count = windows + 3 * (uint64_t)i;
        l.corpora[i].seed = 100 + (uint64_t)i;
    }
    dataloader_set_weights(&l);
    return l;
}

// Simulates which corpus each index of a block belongs to, and which window of the corpus is next.
static void test_mixture_simulation(void) {
    enum { SOURCES = 64, BLOCKS = 40, WINDOWS = 500 };
    TestRandom r = {21};
    for (int round = 0; round < 4; round++) {
        const int count = round == 0 ? 2 : round == 1 ? SOURCES : 2 + test_random_int(&r, 9);
        double weights[SOURCES];
        for (int i = 0; i < count; i++) weights[i] = round == 1 ? 1 + i % 2 : 0.02 + fabs(test_random_real(&r));
        if (round == 0) weights[0] = 1, weights[1] = 4094.9; // just above the least share
        DataLoader l = corpora_bare(weights, count, WINDOWS, round != 3);
        uint64_t owed[SOURCES], served[SOURCES];
        int visits[SOURCES][WINDOWS + 3 * SOURCES];
        memset(owed, 0, sizeof(owed)), memset(served, 0, sizeof(served)), memset(visits, 0, sizeof(visits));
        for (uint64_t block = 0; block < BLOCKS; block++) {
            int lies[MIXTURE_BLOCK], filled = 0;
            uint64_t number[MIXTURE_BLOCK];
            for (int i = 0; i < count; i++) { // all up to corpus i get so many together
                owed[i] += l.corpora[i].weight_end * MIXTURE_BLOCK;
                int weight_end = 0;
                for (; owed[i] >= MIXTURE_ONE; owed[i] -= MIXTURE_ONE) weight_end++;
                for (; filled < weight_end; filled++) lies[filled] = i, number[filled] = served[i]++;
            }
            EXPECT(filled == MIXTURE_BLOCK, "block %d has %d windows", (int)block, filled);
            for (uint64_t i = 0; i < MIXTURE_BLOCK; i++) {
                uint64_t at = permutation_at(i, MIXTURE_BLOCK, l.shuffle ? 11 : 0, block);
                const Corpus *s = &l.corpora[lies[at]];
                uint64_t n = number[at], W = s->window_count,
                         want = l.shuffle ? permutation_at(n % W, W, s->seed, n / W) : n % W;
                CorpusWindow p = dataloader_locate(&l, block * MIXTURE_BLOCK + i);
                EXPECT(p.corpus == s && p.window == want, "round %d block %d place %d: corpus %d window %d, not %d %d",
                       round, (int)block, (int)i, (int)(p.corpus - l.corpora), (int)p.window, lies[at], (int)want);
                visits[p.corpus - l.corpora][p.window]++;
            }
            for (int i = 0; i < count; i++)
                EXPECT(fabs((double)served[i] - l.corpora[i].weight * MIXTURE_BLOCK * (double)(block + 1)) < 1,
                       "round %d block %d: %d windows of %d for %g", round, (int)block, (int)served[i], i,
                       l.corpora[i].weight);
        }
        for (int i = 0; i < count; i++)
            for (uint64_t w = 0; w < l.corpora[i].window_count; w++) {
                int epochs = (int)(served[i] / l.corpora[i].window_count);
                EXPECT(visits[i][w] == epochs || visits[i][w] == epochs + 1,
                       "corpus %d: window %d is read %d times in %d epochs", i, (int)w, visits[i][w], epochs);
            }
        free(l.corpora);
    }
    const double far[3] = {0.7, 0.2999, 0.0001 + 1.0 / MIXTURE_BLOCK};
    DataLoader l = corpora_bare(far, 3, WINDOWS, true);
    for (int k = 0; k < 20; k++) { // as far as an index goes
        uint64_t block = ((1ull << 62) >> k) / MIXTURE_BLOCK - 1 + (uint64_t)(k % 3), counts[3] = {0, 0, 0};
        for (uint64_t i = 0; i < MIXTURE_BLOCK; i++)
            counts[dataloader_locate(&l, block * MIXTURE_BLOCK + i).corpus - l.corpora]++;
        for (int i = 0; i < 3; i++)
            EXPECT(fabs((double)counts[i] - l.corpora[i].weight * MIXTURE_BLOCK) < 2,
                   "block %llu: %d windows of corpus %d", (unsigned long long)block, (int)counts[i], i);
    }
    free(l.corpora);
}

// Inputs and document starts of `count` windows from global index `first`, collected from all ranks.
static void corpora_gather(int *inputs, int *starts, const char *text, int B, int ranks, uint64_t first, int count) {
    size_t row = B * CORPORA_T;
    int *targets = (int *)checked_calloc(row, sizeof(int));
    for (int rank = 0; rank < ranks; rank++) {
        DataLoader l;
        dataloader_open(&l, text, B, CORPORA_T, 65536, rank, ranks, 6, true);
        l.documents = true;
        dataloader_start(&l, first);
        for (int base = 0; base < count; base += ranks * B) {
            size_t at = (base + rank * B) * CORPORA_T;
            dataloader_next(&l, inputs + at, targets, starts + at);
            for (size_t i = 0; i < row; i++)
                EXPECT(i % CORPORA_T == CORPORA_T - 1 || targets[i] == inputs[at + i + 1],
                       "the target of input %zu is %d", at + i, targets[i]);
        }
        dataloader_close(&l);
    }
    free(targets);
}

// The corpora have different separators: 3 begins a document of one, 12 ends a document of the other.
static void test_mixture_resume_and_separators(void) {
    enum { COUNT = MIXTURE_BLOCK + 240 };
    TestDirectory d = test_make_directory();
    char text[1500], path[700];
    corpora_make(d.path, "a", 2, 0,
                 "{\"format\": 1, \"vocab_size\": 7, \"separator\": {\"token\": 3, \"place\": \"before\"}}");
    corpora_make(d.path, "b", 3, 0,
                 "{\"format\": 1, \"vocab_size\": 20, \"separator\": {\"token\": 12, \"place\": \"after\"}}");
    for (int i = 1; i < 3; i++) {
        FORMAT(path, "%s/a/train_%06d.bin", d.path, i);
        data_write_shard(path, 2, (uint32_t)i, 7, 300);
    }
    for (int i = 1; i < 4; i++) { // 10, 11, 12, 13
        FORMAT(path, "%s/b/train_%06d.bin", d.path, i);
        int32_t header[256] = {20240520, 1, 150};
        uint16_t tokens[150];
        for (int t = 0; t < 150; t++) tokens[t] = (uint16_t)(10 + (t + i) % 4);
        char shard[sizeof(header) + sizeof(tokens)];
        memcpy(shard, header, sizeof(header));
        memcpy(shard + sizeof(header), tokens, sizeof(tokens));
        data_write_file(path, shard, sizeof(shard));
    }
    FORMAT(text, "one=%s/a:2 other=%s/b:1", d.path, d.path);
    int *inputs = (int *)checked_calloc(4 * COUNT * CORPORA_T, sizeof(int)), *starts = inputs + COUNT * CORPORA_T;
    int *again = starts + COUNT * CORPORA_T, *starts_again = again + COUNT * CORPORA_T;
    corpora_gather(inputs, starts, text, 1, 1, 0, COUNT);
    int others = 0;
    for (int i = 0; i < COUNT; i++)
        for (int t = 0; t < CORPORA_T; t++) {
            const int *row = inputs + i * CORPORA_T;
            bool other = row[0] >= 10;
            int want = t;
            while (want > 0 && (other ? row[want - 1] != 12 : row[want] != 3)) want--;
            EXPECT(starts[i * CORPORA_T + t] == want, "window %d token %d: its document begins at %d, not %d", i, t,
                   starts[i * CORPORA_T + t], want);
            others += other;
        }
    EXPECT(others > COUNT * CORPORA_T / 4 && others < COUNT * CORPORA_T / 2, "%d tokens of the second corpus", others);
    static const int B[] = {1, 4, 2, 3, 12, 8}, ranks[] = {1, 1, 3, 1, 1, 3},
                     places[] = {0, 1, 77, MIXTURE_BLOCK - 24, MIXTURE_BLOCK - 1, MIXTURE_BLOCK};
    for (size_t k = 0; k < sizeof(B) / sizeof(B[0]); k++)
        for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
            size_t at = places[i] * CORPORA_T, bytes = 48 * CORPORA_T * sizeof(int);
            corpora_gather(again, starts_again, text, B[k], ranks[k], (uint64_t)places[i], 48);
            EXPECT(memcmp(again, inputs + at, bytes) == 0 && memcmp(starts_again, starts + at, bytes) == 0,
                   "B %d ranks %d from %d: other windows", B[k], ranks[k], places[i]);
        }
    free(inputs);
    test_remove_directory(&d);
}

static void test_corpus_directory_and_pattern(void) {
    TestDirectory d = test_make_directory();
    char directory[700], pattern[700], weighted[700];
    enum { COUNT = 200 };
    int a[COUNT], b[COUNT], c[COUNT];
    corpora_make(d.path, "a", 3, 0, "{\"format\": 1, \"vocab_size\": 1000}");
    FORMAT(directory, "%s/a", d.path);
    FORMAT(pattern, "%s/a/train_*.bin", d.path);
    FORMAT(weighted, "a=%s/a:0.3", d.path);
    corpora_windows(a, directory, 5, COUNT, true);
    corpora_windows(b, pattern, 5, COUNT, true);
    corpora_windows(c, weighted, 5, COUNT, true);
    EXPECT(memcmp(a, b, sizeof(a)) == 0 && memcmp(a, c, sizeof(a)) == 0, "the orders differ");
    corpora_windows(a, directory, 5, 20, false);
    for (int i = 0; i < 20; i++) EXPECT(a[i] == i * CORPORA_T, "validation window %d begins with %d", i, a[i]);
    DataLoader l;
    dataloader_open(&l, directory, 1, CORPORA_T, 65536, 0, 1, 1, true);
    uint64_t fingerprint = dataloader_fingerprint(&l);
    dataloader_close(&l);
    dataloader_open(&l, pattern, 1, CORPORA_T, 65536, 0, 1, 1, true);
    EXPECT(dataloader_fingerprint(&l) == fingerprint, "the same shards have another fingerprint");
    dataloader_close(&l);
    test_remove_directory(&d);
}

static void test_document_starts(void) {
    enum { T = 40 };
    TestRandom r = {8};
    int tokens[T], start[T];
    for (int round = 0; round < 200; round++) {
        Separator s = {3, round % 2 == 1};
        for (int t = 0; t < T; t++) tokens[t] = test_random_int(&r, 4 + round % 9);
        document_starts(start, tokens, T, s);
        for (int t = 0; t < T; t++) {
            int expected = t;
            if (s.after)
                while (expected > 0 && tokens[expected - 1] != 3) expected--;
            else
                while (expected > 0 && tokens[expected] != 3) expected--;
            EXPECT(start[t] == expected, "%s: token %d begins at %d, not %d", s.after ? "after" : "before", t, start[t],
                   expected);
        }
    }
    Separator s;
    EXPECT(separator_parse("50256", &s) && s.token == 50256 && !s.after && separator_parse("7:after", &s) &&
               s.token == 7 && s.after && separator_parse("0:before", &s) && s.token == 0 && !s.after,
           "a separator is read as %d", s.token);
    static const char *const bad[] = {"", "x", "-1", "5:", "5:behind", "99999999999", "5 "};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        EXPECT(!separator_parse(bad[i], &s), "'%s' is a separator", bad[i]);
}

// The loss and gradients of packed documents equal those of separate documents.
static void test_packed_documents(void) {
    enum { T = 24, DOCUMENTS = 3 };
    const int begin[DOCUMENTS + 1] = {0, 7, 8, T};
    for (int v = 0; v < ATTENTION_VARIANT_COUNT; v++) {
        const ModelCase mc = {"", 50, 24, 2, 4, 2, 8, 20, 1, T, true, 0, 0, false, v % 2 == 1};
        ModelConfig c = case_config(&mc, &attention_variants[v]);
        Model packed, alone;
        case_open(&alone, &c, 1, T, FOR_TRAINING);
        case_open(&packed, &c, 1, T, FOR_TRAINING);
        case_randomize(&packed, 4);
        memcpy(alone.state.params, packed.state.params, packed.plan.params_bytes);
        int *tokens = case_tokens(T + 1, c.V, 5), starts[T];
        for (int d = 0; d < DOCUMENTS; d++)
            for (int t = begin[d]; t < begin[d + 1]; t++) starts[t] = begin[d];
        buffer_zero(packed.acts.losses, T * sizeof(real));
        model_micro_step(&packed, tokens, tokens + 1, starts, 1, T, T);
        double loss = loss_sum(&packed.acts, T), sum = 0, worst = 0, largest = 0;
        for (int d = 0; d < DOCUMENTS; d++) {
            int length = begin[d + 1] - begin[d];
            buffer_zero(alone.acts.losses, T * sizeof(real));
            alone.state.micro_step = d;
            model_micro_step(&alone, tokens + begin[d], tokens + begin[d] + 1, NULL, 1, length, T);
            sum += loss_sum(&alone.acts, length);
        }
        for (size_t e = 0; e < packed.plan.tensors.buffer_count; e++) {
            worst = fmax(worst, fabs((double)(packed.state.grads[e] - alone.state.grads[e])));
            largest = fmax(largest, fabs((double)alone.state.grads[e]));
        }
        double tolerance = sizeof(real) == 8 ? 1e-12 : 1e-5;
        EXPECT(fabs(loss - sum) < tolerance * sum && worst < tolerance * largest,
               "%s: loss %.9g, alone %.9g; gradients differ by %.2g of %.2g", c.attention->name, loss, sum, worst,
               largest);
        buffer_zero(packed.acts.losses, T * sizeof(real));
        model_micro_step(&packed, tokens, tokens + 1, NULL, 1, T, T);
        double whole = loss_sum(&packed.acts, T);
        EXPECT(fabs(whole - sum) > 20 * tolerance * sum, "%s: loss %.9g within documents, %.9g across them",
               c.attention->name, sum, whole);
        free(tokens);
        model_free(&packed, true);
        case_close(&alone);
    }
}

static void corpora_run(ProgramResult *r, const TestDirectory *d, const char *options) {
    run_command(r,
                "cd '%s' && %s --layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 --seq-len 16 "
                "--batch-size 4 --warmup 1 "
                "--threads 1 %s",
                d->path, test_program_path(), options);
}

// Checks the data of the run `mix` in run.json: 4 steps of 4 windows, a quarter from a and the rest from b.
static void corpora_check_run_json(const TestDirectory *d) {
    char path[700];
    size_t size = 0;
    FORMAT(path, "%s/mix/run.json", d->path);
    char *text = file_read(path, 1 << 20, &size);
    cJSON *json = text ? json_parse(text, size) : NULL;
    const cJSON *y = cJSON_GetArrayItem(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "data"), "train"), 1);
    double tokens = 0, windows = 0, weight = 0, epochs = 0;
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(y, "name"));
    EXPECT(name && strcmp(name, "y") == 0 && json_get_number(y, "tokens", &tokens) &&
               json_get_number(y, "windows", &windows) && json_get_number(y, "weight", &weight) &&
               json_get_number(y, "epochs", &epochs) && tokens == 202 && windows == 12 && weight == 0.75 && epochs == 1,
           "run.json: tokens %g, windows %g, weight %g, epochs %g", tokens, windows, weight, epochs);
    cJSON_Delete(json);
    free(text);
}

// A directory without corpus.json, with files of interrupted programs, and with shards that corpus.json does not list.
static void corpora_refuse_directories(const TestDirectory *d) {
    ProgramResult r;
    corpora_run(&r, d, "--train-data open --steps 1");
    EXPECT(r.status == 0 && !r.err[0] && strstr(r.out, "--train-data open has no corpus.json"), "status %d, %.300s",
           r.status, r.err);
    corpora_run(&r, d, "--train-data './x=1/*.bin' --steps 1");
    EXPECT_ONE_LINE(r, 1, "no file matches './x=1/*.bin'");
    run_command(&r, "cd '%s' && mkdir lang=en && cp open/train_*.bin lang=en", d->path);
    corpora_run(&r, d, "--train-data 'lang=en/*.bin' --steps 1"); // a pattern, although it begins with NAME=
    EXPECT_STATUS(r, 0);
    static const struct {
        const char *before, *words;
    } cases[] = {
        {"touch open/progress.json", "progress.json"},
        {"touch open/train_000002.bin.tmp", "train_000002.bin.tmp"},
        {"touch open/corpus.json.tmp", "corpus.json.tmp"},
        {"mkdir open/corpus.json", "open/corpus.json"},
        {"echo '{\"format\": 1, \"vocab_size\": 103, \"shards\": [{\"file\": \"train_000001.bin\", \"tokens\": 102}]}' "
         ">open/corpus.json",
         "101 tokens"},
        {"echo '{\"format\": 1, \"vocab_size\": 203, \"shards\": [{\"file\": \"train_000001.bin\", \"tokens\": 101}, "
         "{\"file\": \"train_000007.bin\", \"tokens\": 101}]}' >open/corpus.json",
         "train_000007.bin is missing"},
        {"echo '{\"format\": 1, \"vocab_size\": 203, \"shards\": [{\"file\": \"val_000000.bin\", \"tokens\": 101}]}' "
         ">open/corpus.json",
         "lists 0 of them"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        run_command(&r, "cd '%s' && rm -rf open/*.json open/*.tmp && %s", d->path, cases[i].before);
        EXPECT_STATUS(r, 0);
        corpora_run(&r, d, "--train-data open --vocab 300 --steps 1");
        EXPECT_ONE_LINE(r, 1, cases[i].words);
    }
    run_command(&r,
                "cd '%s' && echo '{\"format\": 1, \"vocab_size\": 203, \"shards\": [{\"file\": \"val_000000.bin\", "
                "\"tokens\": 101}, "
                "{\"file\": \"train_000001.bin\", \"tokens\": 101}]}' >open/corpus.json",
                d->path);
    corpora_run(&r, d, "--train-data open --val-data open --steps 1");
    EXPECT_STATUS(r, 0);
}

// --init and --vocab, then the data, then the preset, which is also used for data that do not state a vocabulary.
static void test_vocabulary_sources(void) {
    TestDirectory d = test_make_directory();
    ProgramResult r;
    corpora_make(d.path, "a", 1, 1, "{\"format\": 1, \"vocab_size\": 203}");
    corpora_make(d.path, "b", 1, 1, "{\"format\": 1, \"vocab_size\": 204}");
    corpora_make(d.path, "plain", 1, 1, NULL);
    static const struct {
        const char *options;
        int status;
        const char *words; // of the start-up print or of the error
    } cases[] = {
        {"--train-data a", 0, " vocab=203 "},
        {"--train-data a --preset 124m", 0, " vocab=203 "},
        {"--train-data a --vocab 1000", 0, " vocab*=1000 "},
        {"--train-data 'x=a:1 y=b:1'", 0, " vocab=204 "},
        {"--train-data a --val-data b", 0, " vocab=204 "},
        {"--train-data plain", 0, " vocab=256 "},
        {"--train-data plain/train_000001.bin --preset 124m", 0, " vocab=50257 "},
        {"--train-data 'x=a:1 y=plain:1'", 0, " vocab=256 "},
        {"--train-data b --init run/checkpoints/step_00000001", 1,
         "go up to 203 and the model has a vocabulary of 203"},
        {"--train-data b --vocab 203", 1, "--vocab 204"},
        {"--train-data a --val-data b --vocab 203", 1, "--vocab 204"},
    };
    corpora_run(&r, &d, "--train-data a --steps 1 --out run");
    EXPECT_STATUS(r, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char command[300];
        FORMAT(command, "%s --steps 1", cases[i].options);
        corpora_run(&r, &d, command);
        for (char *c = r.out; *c; c++) *c = *c == '\n' ? ' ' : *c;
        EXPECT(r.status == cases[i].status && strstr(r.status ? r.err : r.out, cases[i].words),
               "%s: status %d, no '%s': %.200s", cases[i].options, r.status, cases[i].words, r.err);
    }
    test_remove_directory(&d);
}

// A resume with other data than those of the checkpoint.
static void corpora_refuse_other_data(const TestDirectory *d) {
    ProgramResult r;
    static const struct {
        const char *data, *words;
    } others[] = {
        {"x=a:1 y=b:2", ": the weight of 'x' was 0.25 and is now 0.333333333;"},
        {"x=a:1 z=b:3", ": 'z' has replaced a corpus of another name;"},
        {"x=a:1 y=b:3 z=c:4", ": it had 2 corpora and there are 3 now;"},
        {"a", ": it had 2 corpora and there is 1 now;"},
        {"x=b:1 y=c:3", ": x had 303 tokens in 3 shards and now has 202 in 2;"},
        {"x=a:1 y=c:3", ": y had different tokens in its 2 shards;"},
    };
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        run_command(&r, "cd '%s' && %s --out mix --resume --train-data '%s'", d->path, test_program_path(),
                    others[i].data);
        EXPECT_ONE_LINE(r, 1, others[i].words);
    }
}

// --doc-mask changes the loss, but not that of data without a separator.
static void corpora_mask_documents(const TestDirectory *d) {
    ProgramResult r;
    double loss[3];
    static const char *const masks[] = {"", "--doc-mask", "--doc-mask --separator 110:after"};
    for (int i = 0; i < 3; i++) {
        char options[200];
        FORMAT(options, "--val-data a --init run/checkpoints/step_00000002 --eval %s", masks[i]);
        run_command(&r, "cd '%s' && %s --threads 1 %s", d->path, test_program_path(), options);
        EXPECT(r.status == 0 && sscanf(r.out, "validation loss %lf", &loss[i]) == 1, "status %d, %.200s %.200s",
               r.status, r.out, r.err);
    }
    EXPECT(loss[0] == loss[1], "validation has no separator and yet the loss changes from %.9g to %.9g", loss[0],
           loss[1]);
    corpora_run(&r, d, "--train-data a --doc-mask --steps 6 --stats-every 1 --out masked");
    EXPECT_STATUS(r, 0);
    corpora_run(&r, d,
                "--train-data a --steps 6 --out plain && for run in masked plain; do grep -o '\"loss\": [^,]*' "
                "$run/log.jsonl > $run.losses; done; "
                "cmp masked.losses plain.losses");
    EXPECT(r.status == 1 && strstr(r.out, "differ"), "attention within documents gives the same losses: %.300s", r.out);
}

// Invalid arguments of --train-data, and separators that are missing.
static void corpora_refuse_arguments(const TestDirectory *d) {
    ProgramResult r;
    static const struct {
        const char *options, *words;
    } refused[] = {
        {"--train-data a --vocab 699", "--vocab 700"},
        {"--train-data run", "corpus.json"},
        {"--train-data 'x=a:1 y=b'", "no weight"},
        {"--train-data 'x=a:1 x=b:1'", "more than once"},
        {"--train-data 'x=a:1 y=b:0'", "weight '0'"},
        {"--train-data 'x=a:1 y=./a/train_000002.bin:1'", "in 'y' and in an earlier corpus"},
        {"--train-data 'x=a:1 y=b:nan'", "weight 'nan'"},
        {"--train-data 'x=a:1 y=b:-1'", "weight '-1'"},
        {"--train-data 'x=a:1e308 y=b:1e308'", "overflows"},
        {"--train-data 'x=a:1 y+=b:1'", "'y+=b:1'"},
        {"--train-data 'x=a:1 =b:1'", "'=b:1'"},
        {"--train-data 'x=a y=b'", "NAME=PATH:WEIGHT"},
        {"--train-data 'x=a:1 y=b:1e-9'", "less than 1/4096"},
        {"--train-data 'x=a:1 b:1'", "'b:1'"},
        {"--train-data 'x=a:1 y=none:1'", "none"},
        {"--train-data b --doc-mask", "--separator"},
        {"--train-data b --doc-mask --separator 800", "vocabulary of 800"},
        {"--train-data b/train_000001.bin --vocab 65536 --doc-mask", "--separator"},
    };
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        corpora_run(&r, d, refused[i].options);
        EXPECT(r.status == 1 && count_lines(r.err) == 1 && strstr(r.err, refused[i].words),
               "%s: status %d, stderr %.300s", refused[i].options, r.status, r.err);
    }
}

// Invalid files corpus.json.
static void corpora_refuse_descriptions(const TestDirectory *d) {
    ProgramResult r;
    static const char *const broken[] = {
        "",
        "{",
        "{\"format\": 2, \"vocab_size\": 5}",
        "{\"format\": 1}",
        "{\"format\": 1, \"vocab_size\": 0}",
        "{\"format\": 1, \"vocab_size\": 5, \"separator\": {\"token\": 1}}",
        "{\"format\": 1, \"vocab_size\": 5, \"separator\": {\"token\": -1, \"place\": \"after\"}}",
        "{\"format\": 1, \"vocab_size\": 5, \"separator\": {\"token\": 5, \"place\": \"after\"}}",
        "{\"format\": 1, \"vocab_size\": 500, \"shards\": [{\"file\": 5, \"tokens\": 101}]}",
        "{\"format\": 1, \"vocab_size\": 500, \"shards\": [{\"file\": \"train_000001.bin\"}]}"};
    for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
        char path[700];
        FORMAT(path, "%s/open/corpus.json", d->path);
        data_write_file(path, broken[i], strlen(broken[i]));
        corpora_run(&r, d, "--train-data open");
        EXPECT_ONE_LINE(r, 1, "open/corpus.json");
    }
}

static void test_corpus_vocabulary_and_separator(void) {
    TestDirectory d = test_make_directory();
    ProgramResult r;
    corpora_make(d.path, "a", 3, 1,
                 "{\"format\": 1, \"vocab_size\": 700, \"separator\": {\"token\": 110, \"place\": \"before\"}}");
    corpora_make(d.path, "b", 2, 200, "{\"format\": 1, \"vocab_size\": 800, \"separator\": null}");
    corpora_make(d.path, "open", 1, 1, NULL);
    corpora_run(&r, &d,
                "--train-data a --val-data a --preset small --steps 2 --out run && grep -o '\"vocab_size\": [0-9]*' "
                "run/checkpoints/*/config.json");
    EXPECT(r.status == 0 && strstr(r.out, "\"vocab_size\": 700"), "status %d, %.300s", r.status, r.err);
    corpora_run(&r, &d, "--train-data 'x=a:1 y=b:3' --steps 2 --dry-run --vocab 900");
    EXPECT_STATUS(r, 0);
    corpora_run(&r, &d,
                "--train-data 'x=a:1 y=b:3' --steps 4 --stop-after 2 --out mix && grep -o '\"vocab_size\": [0-9]*' "
                "mix/checkpoints/*/config.json");
    EXPECT(r.status == 0 && strstr(r.out, "\"vocab_size\": 800") && strstr(r.out, " 25.00% of the windows"),
           "status %d, %.300s %.300s", r.status, r.out, r.err);
    corpora_make(d.path, "c", 2, 300, NULL);
    corpora_check_run_json(&d);
    corpora_refuse_other_data(&d);
    run_command(&r, "cd '%s' && %s --out mix --resume", d.path, test_program_path());
    EXPECT_STATUS(r, 0);
    corpora_mask_documents(&d);
    corpora_refuse_arguments(&d);
    corpora_run(&r, &d, "--train-data b --separator 5:behind");
    EXPECT_ONE_LINE(r, EXIT_USAGE, "5:behind");
    corpora_refuse_directories(&d);
    corpora_refuse_descriptions(&d);
    test_remove_directory(&d);
}

// A corpus of text_to_shards states its vocabulary and separator, so it requires no options.
static void test_corpus_of_bytes(void) {
    TestDirectory d = test_make_directory();
    ProgramResult r;
    run_command(
        &r,
        "for i in $(seq 400); do printf 'document %%d of bytes.\\n' $i; done > '%s/text' && %s --out '%s/bytes' "
        "--delimiter '\\n' --val-fraction 0.1 '%s/text'",
        d.path, data_converter(), d.path, d.path);
    EXPECT_STATUS(r, 0);
    corpora_run(&r, &d,
                "--train-data bytes --val-data bytes --doc-mask --steps 2 --sample-every 2 --prompt docu --out run");
    EXPECT(r.status == 0 && !r.err[0] && !strstr(r.out, "corpus.json") && strstr(r.out, "vocab=256") &&
               strstr(r.out, "\ndocu"),
           "status %d, %.300s %.2000s", r.status, r.err, r.out);
    corpora_run(&r, &d, "--init run/checkpoints/step_00000002 --generate 20 --prompt docu");
    EXPECT(r.status == 0 && !r.err[0] && strncmp(r.out, "docu", 4) == 0, "status %d, %.300s %.300s", r.status, r.err,
           r.out);
    run_command(&r, "cd '%s' && %s --preset 124m --train-data bytes --dry-run", d.path, test_program_path());
    EXPECT(r.status == 0 && strstr(r.out, "vocabulary 256"), "status %d, %.300s %.300s", r.status, r.err, r.out);
    run_command(&r, "cd '%s' && %s --preset 124m --vocab 300 --train-data bytes --dry-run", d.path,
                test_program_path());
    EXPECT(r.status == 0 && strstr(r.out, "vocabulary 300"), "status %d, %.300s %.300s", r.status, r.err, r.out);
    test_remove_directory(&d);
}

static const Test corpora_tests[] = {
    {"a mixture keeps its weights in every block, and each corpus its order", test_mixture_weights_and_order},
    {"a mixture equals a step-by-step simulation, and every epoch of a corpus is complete", test_mixture_simulation},
    {"a mixture resumes at any window, batch size and rank count, with the separator of each corpus",
     test_mixture_resume_and_separators},
    {"a corpus directory and a pattern of its shards give the same data", test_corpus_directory_and_pattern},
    {"document starts equal those of a backward search", test_document_starts},
    {"the vocabulary comes from the model, --vocab, the data or the preset, in this order", test_vocabulary_sources},
    {"a run uses the vocabulary and separator of the corpus, and rejects invalid ones",
     test_corpus_vocabulary_and_separator},
    {"a corpus of text_to_shards requires no options", test_corpus_of_bytes},
};
enum { CORPORA_TEST_COUNT = sizeof(corpora_tests) / sizeof(corpora_tests[0]) };
static const Test documents_tests[] = {
    {"packed documents give the loss and gradients of separate documents, in every variant", test_packed_documents},
};
enum { DOCUMENTS_TEST_COUNT = sizeof(documents_tests) / sizeof(documents_tests[0]) };
#endif
