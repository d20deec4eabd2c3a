/*
corpora.h: tests of corpus directories and of several corpora with weights.
Those of the program's options and errors are in tests/programs/test_corpora.py.
*/
#pragma once
#include "../llmc/data/positions.h"
#include "data.h"
#include "harness.h"

enum { CORPORA_T = 5, CORPORA_B = 20000 };

// Makes a corpus directory with `shards` training shards of 101 tokens each, starting at `first`, and one for
// validation.
static void corpora_make(const char *directory, const char *name, int shards, uint32_t first, const char *json) {
    const char *path = test_text("%s/%s", directory, name);
    CHECK(mkdir(path, 0777) == 0, "cannot make %s", path);
    for (int i = 0; i <= shards; i++)
        data_write_shard(test_text("%s/%s_%06d.bin", path, i ? "train" : "val", i), 2, first + (uint32_t)i * 101, 65536,
                         101);
    test_write_text(test_text("%s/corpus.json", path), json);
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

// Two corpora a and b of equal weight, with so many windows each. b begins with token CORPORA_B.
static const char *corpora_pair(int a, int b) {
    TestDirectory d = test_make_directory();
    data_write_shard(test_text("%s/a.bin", d.path), 2, 0, 65536, (size_t)a * CORPORA_T + 1);
    data_write_shard(test_text("%s/b.bin", d.path), 2, CORPORA_B, 65536, (size_t)b * CORPORA_T + 1);
    return test_text("a=%s/a.bin:1 b=%s/b.bin:1", d.path, d.path);
}

// 1000 windows, of which 514 are those of a corpus of 500. Other windows are looked up meanwhile.
static void test_mixture_epochs(void) {
    enum { A = 500, COUNT = 1000 };
    int inputs[CORPORA_T], targets[CORPORA_T], visits[A] = {0}, times[4] = {0};
    DataLoader l;
    dataloader_open(&l, corpora_pair(A, 5000), 1, CORPORA_T, 65536, 0, 1, 1, true);
    dataloader_start(&l, 0);
    for (uint64_t i = 0; i < COUNT; i++) {
        if (i % 10 == 0) dataloader_locate(&l, i * MIXTURE_BLOCK);
        CorpusWindow at = dataloader_locate(&l, i);
        dataloader_next(&l, inputs, targets, NULL);
        int want = CORPORA_B * (at.corpus != l.corpora) + (int)at.window * CORPORA_T;
        EXPECT(inputs[0] == want, "index %d begins with token %d, not %d", (int)i, inputs[0], want);
        if (inputs[0] < CORPORA_B) visits[inputs[0] / CORPORA_T]++;
    }
    dataloader_close(&l);
    for (int w = 0; w < A; w++) times[min_int(visits[w], 3)]++;
    EXPECT(times[0] == 0 && times[1] == 486 && times[2] == 14,
           "%d windows are read once, %d twice, %d more often, %d never; 486 once and 14 twice are right", times[1],
           times[2], times[3], times[0]);
}

// A loader of `count` corpora with about `windows` windows each, for dataloader_locate only.
static DataLoader corpora_bare(const double *weights, int count, uint64_t windows, bool shuffle) {
    DataLoader l;
    double sum = 0;
    memset(&l, 0, sizeof(l));
    l.corpus_count = count, l.seed = 11, l.shuffle = shuffle;
    l.corpora = (Corpus *)checked_calloc(count, sizeof(Corpus));
    l.blocks = (MixtureBlock *)checked_calloc(2, sizeof(MixtureBlock));
    for (int i = 0; i < count; i++) sum += weights[i];
    for (int i = 0; i < count; i++) {
        l.corpora[i].weight = weights[i] / sum;
        l.corpora[i].window_count = windows + 3 * (uint64_t)i;
        l.window_count += l.corpora[i].window_count;
        l.corpora[i].seed = 100 + (uint64_t)i;
    }
    dataloader_set_weights(&l);
    return l;
}

static void corpora_bare_free(DataLoader *l) {
    free(l->corpora);
    free(l->blocks);
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
        uint64_t owed[SOURCES], served[SOURCES], index = 0;
        int visits[SOURCES][WINDOWS + 3 * SOURCES];
        memset(owed, 0, sizeof(owed)), memset(served, 0, sizeof(served)), memset(visits, 0, sizeof(visits));
        for (uint64_t block = 0; block < BLOCKS; block++) {
            int lies[MIXTURE_BLOCK], filled = 0;
            for (int i = 0; i < count; i++) { // all up to corpus i get so many together
                owed[i] += l.corpora[i].weight_end * MIXTURE_BLOCK;
                int weight_end = 0;
                for (; owed[i] >= MIXTURE_ONE; owed[i] -= MIXTURE_ONE) weight_end++;
                for (; filled < weight_end; filled++) lies[filled] = i;
            }
            EXPECT(filled == MIXTURE_BLOCK, "block %d has %d windows", (int)block, filled);
            for (uint64_t i = 0; i < MIXTURE_BLOCK; i++) {
                int c = lies[permutation_at(i, MIXTURE_BLOCK, l.shuffle ? 11 : 0, block)];
                const Corpus *s = &l.corpora[c];
                if (!l.shuffle && served[c] == s->window_count) continue; // validation reads each window once
                uint64_t n = served[c]++, W = s->window_count,
                         want = l.shuffle ? permutation_at(n % W, W, s->seed, n / W) : n;
                CorpusWindow p = dataloader_locate(&l, index++);
                EXPECT(p.corpus == s && p.window == want, "round %d block %d place %d: corpus %d window %d, not %d %d",
                       round, (int)block, (int)i, (int)(p.corpus - l.corpora), (int)p.window, c, (int)want);
                visits[p.corpus - l.corpora][p.window]++;
            }
            for (int i = 0; l.shuffle && i < count; i++)
                EXPECT(fabs((double)served[i] - l.corpora[i].weight * MIXTURE_BLOCK * (double)(block + 1)) < 1,
                       "round %d block %d: %d windows of %d for %g", round, (int)block, (int)served[i], i,
                       l.corpora[i].weight);
        }
        EXPECT(l.shuffle || index == l.window_count, "validation reads %d of %d windows", (int)index,
               (int)l.window_count);
        for (int i = 0; i < count; i++)
            for (uint64_t w = 0; w < l.corpora[i].window_count; w++) {
                int epochs = (int)(served[i] / l.corpora[i].window_count);
                EXPECT(visits[i][w] == epochs || visits[i][w] == epochs + 1,
                       "corpus %d: window %d is read %d times in %d epochs", i, (int)w, visits[i][w], epochs);
            }
        corpora_bare_free(&l);
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
    corpora_bare_free(&l);
}

// Three corpora are read up to some index, then two of them and a new one with windows of another length.
static void test_positions(void) {
    enum { WINDOWS = 500 };
    const double weights[3] = {0.7, 0.2, 0.1};
    static const uint64_t ends[] = {0, 1, 4095, 4096, 10000};
    for (size_t e = 0; e < sizeof(ends) / sizeof(ends[0]); e++) {
        static DataPositions p, copy;
        DataLoader l = corpora_bare(weights, 3, WINDOWS, true), next = corpora_bare(weights, 3, WINDOWS, true);
        uint64_t counts[3] = {0, 0, 0}, read[3];
        for (uint64_t i = 0; i < ends[e]; i++) counts[dataloader_locate(&l, i).corpus - l.corpora]++;
        dataloader_windows_read(&l, ends[e], read);
        p.count = 0;
        l.T = 16, next.T = 24;
        for (int i = 0; i < 3; i++)
            l.corpora[i].fingerprint = (uint64_t)i, next.corpora[i].fingerprint = (uint64_t)i + 1;
        for (int i = 0; i < 3; i++) l.corpora[i].seed = 100 + (uint64_t)i, next.corpora[i].seed = 7; // of other names
        l.corpora[1].begin = 5;                                                                      // of earlier data
        positions_leave(&p, &l, ends[e]);
        cJSON *json = positions_to_json(&p);
        EXPECT(positions_from_json(&copy, json), "positions do not survive JSON");
        cJSON_Delete(json);
        positions_enter(&copy, &next);
        for (int i = 0; i < 3; i++) {
            uint64_t tokens = i < 2 ? (counts[i + 1] + (i == 0 ? 5 : 0)) * 16 : 0, want = (tokens + 23) / 24;
            EXPECT(read[i] == counts[i], "%d windows of corpus %d, not %d", (int)read[i], i, (int)counts[i]);
            EXPECT(next.corpora[i].begin == want, "after %d windows, corpus %d continues at %d, not %d", (int)ends[e],
                   i, (int)next.corpora[i].begin, (int)want);
            EXPECT(next.corpora[i].seed == (i < 2 ? 101 + (uint64_t)i : 7), "corpus %d has the order of seed %d", i,
                   (int)next.corpora[i].seed);
        }
        positions_leave(&copy, &next, 0);
        for (int i = 0; i < p.count; i++)
            EXPECT(copy.items[i].tokens == p.items[i].tokens, "the position %d of a corpus that was not read became %d",
                   (int)p.items[i].tokens, (int)copy.items[i].tokens);
        corpora_bare_free(&l);
        DataLoader one = corpora_bare(weights, 1, WINDOWS, true);
        uint64_t later = dataloader_locate(&one, ends[e] + 3).window;
        one.corpora[0].begin = ends[e];
        EXPECT(dataloader_locate(&one, 3).window == later, "a corpus does not continue in its order");
        corpora_bare_free(&one);
        corpora_bare_free(&next);
    }
}

// Data are opened again, with other weights, inside a block: each corpus continues in its order.
static void test_positions_inside_block(void) {
    enum { WINDOWS = 500, PHASES = 4, COUNT = 700 };
    static const double weights[PHASES][2] = {{1, 1}, {9, 1}, {1, 2}, {1, 1}};
    static DataPositions p;
    uint64_t served[2] = {0, 0};
    p.count = 0;
    for (int phase = 0; phase < PHASES; phase++) {
        DataLoader l = corpora_bare(weights[phase], 2, WINDOWS, true);
        l.T = 16, l.corpora[1].fingerprint = 1;
        positions_enter(&p, &l);
        for (uint64_t i = 0; i < COUNT; i++) {
            CorpusWindow at = dataloader_locate(&l, i);
            uint64_t W = at.corpus->window_count, n = served[at.corpus - l.corpora]++,
                     want = permutation_at(n % W, W, at.corpus->seed, n / W);
            EXPECT(at.window == want, "phase %d index %d: window %d of corpus %d, not %d", phase, (int)i,
                   (int)at.window, (int)(at.corpus - l.corpora), (int)want);
        }
        positions_leave(&p, &l, COUNT);
        corpora_bare_free(&l);
    }
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
    corpora_make(d.path, "a", 2, 0,
                 "{\"format\": 1, \"vocab_size\": 7, \"separator\": {\"token\": 3, \"place\": \"before\"}}");
    corpora_make(d.path, "b", 3, 0,
                 "{\"format\": 1, \"vocab_size\": 20, \"separator\": {\"token\": 12, \"place\": \"after\"}}");
    for (int i = 1; i < 3; i++) data_write_shard(test_text("%s/a/train_%06d.bin", d.path, i), 2, (uint32_t)i, 7, 300);
    for (int i = 1; i < 4; i++) {
        int tokens[150];
        for (int t = 0; t < 150; t++) tokens[t] = 10 + (t + i) % 4;
        test_write_shard(test_text("%s/b/train_%06d.bin", d.path, i), 2, tokens, 150);
    }
    const char *text = test_text("one=%s/a:2 other=%s/b:1", d.path, d.path);
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
}

static void test_corpus_directory_and_pattern(void) {
    TestDirectory d = test_make_directory();
    enum { COUNT = 200 };
    int a[COUNT], b[COUNT], c[COUNT];
    corpora_make(d.path, "a", 3, 0, "{\"format\": 1, \"vocab_size\": 1000}");
    const char *directory = test_text("%s/a", d.path), *pattern = test_text("%s/a/train_*.bin", d.path);
    corpora_windows(a, directory, 5, COUNT, true);
    corpora_windows(b, pattern, 5, COUNT, true);
    corpora_windows(c, test_text("a=%s/a:0.3", d.path), 5, COUNT, true);
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
}

static void test_document_starts(void) {
    enum { T = 40 };
    TestRandom r = {8};
    int tokens[T], start[T];
    for (int round = 0; round < 200; round++) {
        Separator s = {3, round % 2 == 1};
        for (int t = 0; t < T; t++) tokens[t] = test_random_int(&r, 4 + round % 9);
        documents_find(start, tokens, T, s);
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

static const Test corpora_tests[] = {
    {"a mixture equals a step-by-step simulation, and every epoch of a corpus is complete", test_mixture_simulation},
    {"a small corpus of a mixture is read in epochs", test_mixture_epochs},
    {"a mixture resumes at any window, batch size and rank count, with the separator of each corpus",
     test_mixture_resume_and_separators},
    {"each corpus continues at its position when data are opened with other windows", test_positions},
    {"each corpus continues in its order when data are opened inside a block", test_positions_inside_block},
    {"a corpus directory and a pattern of its shards give the same data", test_corpus_directory_and_pattern},
    {"document starts equal those of a backward search", test_document_starts},
};
