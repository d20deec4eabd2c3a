/*
data.h: tests of the data loader (llmc/data/dataloader.h) and of the converter (data/text_to_shards.c).

Errors that exit are tested in a child process: this executable with `--child data-ACTION ...`, which main passes to
data_test_child first. The converter is $TEXT_TO_SHARDS, or ./text_to_shards.
*/
#ifndef TESTS_DATA_H
#define TESTS_DATA_H
#include "../llmc/data/dataloader.h"
#include "harness.h"

// ---------------------------------------------------------------------------------------------------------------------
// helpers

static void data_write_file(const char *path, const void *bytes, size_t count) {
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL, "cannot write %s: %s", path, strerror(errno));
    CHECK(fwrite(bytes, 1, count, f) == count && fclose(f) == 0, "cannot write %s: %s", path, strerror(errno));
}

// A shard of `count` tokens first, first + 1, ... modulo `modulus`, of 2 or 4 bytes each.
static void data_write_shard(const char *path, int token_bytes, uint32_t first, uint32_t modulus, size_t count) {
    int32_t header[256];
    memset(header, 0, sizeof(header));
    header[0] = token_bytes == 2 ? 20240520 : 20240801;
    header[1] = token_bytes == 2 ? 1 : 7;
    header[2] = (int32_t)count;
    size_t bytes = sizeof(header) + count * token_bytes;
    unsigned char *file = (unsigned char *)checked_calloc(bytes, 1);
    memcpy(file, header, sizeof(header));
    for (size_t i = 0; i < count; i++) {
        uint32_t token = (uint32_t)((first + i) % modulus);
        unsigned char *to = file + sizeof(header) + i * token_bytes;
        to[0] = token & 255, to[1] = token >> 8 & 255;
        if (token_bytes == 4) to[2] = token >> 16 & 255, to[3] = token >> 24;
    }
    data_write_file(path, file, bytes);
    free(file);
}

// Overwrites bytes of a file in place.
static void data_patch(const char *path, int64_t offset, const void *bytes, size_t count) {
    int fd = open(path, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, bytes, count, (off_t)offset) == (ssize_t)count && close(fd) == 0, "cannot patch %s: %s",
          path, strerror(errno));
}

static void data_flip_bit(const char *path, int64_t offset) {
    unsigned char byte = 0;
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && pread(fd, &byte, 1, (off_t)offset) == 1 && close(fd) == 0, "cannot read %s", path);
    byte ^= 1;
    data_patch(path, offset, &byte, 1);
}

// Three shards in which the token at position i, counted across the shards, is i. They have 19 windows of T = 5.
enum { DATA_T = 5, DATA_TOKENS = 31 + 26 + 43, DATA_WINDOWS = 6 + 5 + 8 };
typedef struct {
    TestDirectory directory;
    char pattern[600];
} DataShards;
static DataShards data_make_shards(void) {
    DataShards d;
    d.directory = test_make_directory();
    char path[600];
    // 31 = 6T+1 and 26 = 5T+1, in the other format, end with a window; 43 = 8T+3 leaves tokens that no window has
    static const int counts[] = {31, 26, 43}, token_bytes[] = {2, 4, 2};
    uint32_t first = 0;
    for (int i = 0; i < 3; i++) {
        FORMAT(path, "%s/shard_%d.bin", d.directory.path, i);
        data_write_shard(path, token_bytes[i], first, 65536, counts[i]);
        first += (uint32_t)counts[i];
    }
    FORMAT(d.pattern, "%s/shard_*.bin", d.directory.path);
    return d;
}
// The first token of window w of these shards.
static int data_window_start(uint64_t w) {
    return w < 6 ? (int)w * DATA_T : w < 11 ? 31 + (int)(w - 6) * DATA_T : 57 + (int)(w - 11) * DATA_T;
}

// starts[i] = first token of the window at global index first + i, collected from all ranks. `count` is a multiple of
// ranks*B. Checks the other tokens of the windows and the position as well.
static void data_collect(int *starts, const DataShards *d, int B, int ranks, uint64_t seed, bool shuffle,
                         uint64_t first, int count) {
    int inputs[16 * DATA_T], targets[16 * DATA_T];
    assert(B <= 16 && count % (ranks * B) == 0);
    for (int rank = 0; rank < ranks; rank++) {
        DataLoader l;
        dataloader_open(&l, d->pattern, B, DATA_T, 65536, rank, ranks, seed, shuffle);
        dataloader_start(&l, first);
        for (int base = 0; base < count; base += ranks * B) {
            EXPECT(dataloader_position(&l) == first + (uint64_t)base, "B %d ranks %d: position %llu at %d", B, ranks,
                   (unsigned long long)dataloader_position(&l), base);
            dataloader_next(&l, inputs, targets, NULL);
            for (int b = 0; b < B; b++) {
                starts[base + rank * B + b] = inputs[b * DATA_T];
                for (int t = 0; t < DATA_T; t++)
                    EXPECT(inputs[b * DATA_T + t] == inputs[b * DATA_T] + t &&
                               targets[b * DATA_T + t] == inputs[b * DATA_T] + t + 1,
                           "B %d ranks %d index %d: token %d is %d, target %d", B, ranks, base + rank * B + b, t,
                           inputs[b * DATA_T + t], targets[b * DATA_T + t]);
            }
        }
        dataloader_close(&l);
    }
}

// The path of this executable; /proc/self/exe would name the shell that starts the child.
static const char *data_self(void) {
    static char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    CHECK(n > 0, "cannot find this executable: %s", strerror(errno));
    path[n] = 0;
    return path;
}

// The actions of children. `windows`: reads and prints `count` windows one by one, and runs the shell command ACTION
// after the first. `tokens`: prints the first `count` tokens in file order. Returns -1 if this process is no such
// child.
static int data_test_child(int argc, char **argv) {
    if (argc < 3 || strcmp(argv[1], "--child") != 0 || strncmp(argv[2], "data-", 5) != 0) return -1;
    CHECK(argc == 8, "a child of the data tests wants: --child data-WHAT GLOB T V COUNT ACTION");
    alarm(20); // a loader that waits for ever becomes a failure
    const char *what = argv[2] + 5, *pattern = argv[3], *action = argv[7];
    int T = atoi(argv[4]), V = atoi(argv[5]), count = atoi(argv[6]);
    int *inputs = (int *)checked_calloc(max_int(T, count), sizeof(int));
    int *targets = (int *)checked_calloc(T, sizeof(int));
    DataLoader l;
    dataloader_open(&l, pattern, 1, T, V, 0, 1, 1, false);
    if (strcmp(what, "tokens") == 0) {
        dataloader_read_first_tokens(&l, inputs, count);
        for (int i = 0; i < count; i++) printf("%d\n", inputs[i]);
    } else {
        dataloader_start(&l, 0);
        for (int i = 0; i < count; i++) {
            if (i < 10) usleep(2000); // so that the reader is ahead and meets a bad window early
            dataloader_next(&l, inputs, targets, NULL);
            printf("window %d: %d\n", i, inputs[0]);
            fflush(stdout);
            if (i == 0 && *action) CHECK(system(action) == 0, "the child could not do: %s", action);
        }
    }
    dataloader_close(&l);
    free(inputs);
    free(targets);
    return EXIT_DONE;
}

// Expects a child to fail with status 1 and one line that contains both words.
static void data_expect_failure(const char *label, const ProgramResult *r, const char *word, const char *other) {
    EXPECT(r->status == EXIT_FAILED && count_lines(r->err) == 1 && strstr(r->err, word) && strstr(r->err, other),
           "%s: status %d instead of 1, or not one line with '%s' and '%s': %s", label, r->status, word, other, r->err);
}

// ---------------------------------------------------------------------------------------------------------------------
// the loader

static void test_data_windows_in_order(void) {
    DataShards d = data_make_shards();
    int starts[2 * DATA_WINDOWS];
    data_collect(starts, &d, 1, 1, 1, false, 0, 2 * DATA_WINDOWS);
    for (int i = 0; i < 2 * DATA_WINDOWS; i++)
        EXPECT(starts[i] == data_window_start((uint64_t)i % DATA_WINDOWS), "index %d: starts at %d instead of %d", i,
               starts[i], data_window_start((uint64_t)i % DATA_WINDOWS));
    DataLoader l;
    dataloader_open(&l, d.pattern, 1, DATA_T, 65536, 0, 1, 1, false);
    EXPECT(l.shard_count == 3 && l.window_count == DATA_WINDOWS && l.token_count == DATA_TOKENS,
           "%zu shards, %llu windows, %zu tokens", l.shard_count, (unsigned long long)l.window_count, l.token_count);
    dataloader_close(&l);
    test_remove_directory(&d.directory);
}

static void test_data_order_of_ranks(void) {
    static const int B[] = {1, 4, 2, 1, 3, 12, 8, 1}, ranks[] = {1, 1, 3, 6, 2, 1, 3, 8}; // products divide 48
    DataShards d = data_make_shards();
    int want[48], got[48]; // two and a half epochs
    for (int shuffle = 0; shuffle < 2; shuffle++)
        for (uint64_t first = 0; first < 100; first += 37) {
            data_collect(want, &d, 1, 1, 3, shuffle, first, 48);
            for (size_t k = 0; k < sizeof(B) / sizeof(B[0]); k++) {
                data_collect(got, &d, B[k], ranks[k], 3, shuffle, first, 48);
                EXPECT(memcmp(want, got, sizeof(want)) == 0, "B %d ranks %d shuffle %d first %d: other windows", B[k],
                       ranks[k], shuffle, (int)first);
            }
        }
    test_remove_directory(&d.directory);
}

static void test_data_resume(void) {
    enum { COUNT = 3 * DATA_WINDOWS };
    DataShards d = data_make_shards();
    int all[COUNT], rest[COUNT];
    data_collect(all, &d, 1, 1, 9, true, 0, COUNT);
    for (int first = 1; first < COUNT; first++) { // every place, hence both ends of epochs
        data_collect(rest, &d, 1, 1, 9, true, (uint64_t)first, COUNT - first);
        EXPECT(memcmp(rest, all + first, sizeof(int) * (COUNT - first)) == 0, "resumed at %d: other windows", first);
    }
    DataLoader l; // and without a new loader, with batches read ahead that must be forgotten
    int inputs[2 * DATA_T], targets[2 * DATA_T];
    dataloader_open(&l, d.pattern, 2, DATA_T, 65536, 0, 1, 9, true);
    static const int places[] = {0, 30, 17, 18, 18, 3};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        dataloader_start(&l, (uint64_t)places[i]);
        for (int k = 0; k < 3; k++) {
            usleep(1000 * (i % 3)); // more or less is read ahead
            dataloader_next(&l, inputs, targets, NULL);
            EXPECT(inputs[0] == all[places[i] + 2 * k] && inputs[DATA_T] == all[places[i] + 2 * k + 1],
                   "started again at %d: batch %d has windows at %d and %d", places[i], k, inputs[0], inputs[DATA_T]);
        }
    }
    dataloader_close(&l);
    test_remove_directory(&d.directory);
}

static void test_data_epochs(void) {
    DataShards d = data_make_shards();
    enum { RUNS = 4 }; // seed 1: epochs 0, 1, 2; seed 2: epoch 0
    int orders[RUNS][DATA_WINDOWS];
    for (int run = 0; run < RUNS; run++) {
        data_collect(orders[run], &d, 1, 1, run < 3 ? 1 : 2, true, run < 3 ? (uint64_t)(run * DATA_WINDOWS) : 0,
                     DATA_WINDOWS);
        for (uint64_t w = 0; w < DATA_WINDOWS; w++) {
            int seen = 0;
            for (int i = 0; i < DATA_WINDOWS; i++) seen += orders[run][i] == data_window_start(w);
            EXPECT(seen == 1, "run %d: window %d occurs %d times", run, (int)w, seen);
        }
        for (int other = 0; other < run; other++)
            EXPECT(memcmp(orders[run], orders[other], sizeof(orders[run])) != 0, "runs %d and %d have the same order",
                   run, other);
    }
    test_remove_directory(&d.directory);
    // one window; sizes beside powers of 4, where the number of bits changes; a prime
    static const int sizes[] = {1, 2, 3, 63, 64, 65, 256, 257, 4096, 4097, 9973};
    static unsigned char seen[10000];
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++)
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            memset(seen, 0, sizeof(seen));
            int distinct = 0;
            for (int i = 0; i < sizes[k]; i++) {
                uint64_t w = permutation_at((uint64_t)i, (uint64_t)sizes[k], 5, epoch);
                EXPECT(w < (uint64_t)sizes[k], "W %d: window %llu", sizes[k], (unsigned long long)w);
                if (w < (uint64_t)sizes[k]) distinct += !seen[w], seen[w] = 1;
            }
            EXPECT(distinct == sizes[k], "W %d epoch %d: %d windows are read", sizes[k], (int)epoch, distinct);
        }
    uint64_t large = (1ull << 41) + 12345; // more windows than there will be
    for (uint64_t i = 0; i < 1000; i++)
        EXPECT(permutation_at(i * 1000003, large, 1, 0) < large, "W %llu: out of range", (unsigned long long)large);
}

// Expects the chi-square statistic of `count` counts, of which `zeros` are always 0, to stay below its mean k by six
// standard deviations sqrt(2k). k: degrees of freedom; the counts sum to `total`.
static void expect_uniform(const char *what, const double *counts, int count, int zeros, double total, int k) {
    double expected = total / (count - zeros), chi = -zeros * expected;
    for (int i = 0; i < count; i++) chi += (counts[i] - expected) * (counts[i] - expected) / expected;
    EXPECT(chi < k + 6 * sqrt(2 * k), "chi-square of %s is %.1f for %d", what, chi, k);
}

static void test_data_mixing(void) {
    enum { W = 7, EPOCHS = 7000, MANY = 100003, BINS = 50 };
    for (int by_seed = 0; by_seed < 2; by_seed++) {
        double count[W][W], pair[W][W], triples[6];
        memset(count, 0, sizeof(count)), memset(pair, 0, sizeof(pair)), memset(triples, 0, sizeof(triples));
        for (uint64_t e = 0; e < EPOCHS; e++) {
            uint64_t seed = by_seed ? e : 1, epoch = by_seed ? 0 : e, w[W], three[3];
            for (uint64_t i = 0; i < W; i++) w[i] = permutation_at(i, W, seed, epoch);
            for (int i = 0; i < W; i++) count[i][w[i]]++;
            pair[w[0]][w[1]]++;
            for (uint64_t i = 0; i < 3; i++) three[i] = permutation_at(i, 3, seed, epoch);
            triples[2 * three[0] + (three[1] > three[2])]++;
        }
        expect_uniform(by_seed ? "(place, window) by seed" : "(place, window)", count[0], W * W, 0, W * EPOCHS, 36);
        expect_uniform(by_seed ? "successors by seed" : "successors", pair[0], W * W, W, EPOCHS, 41);
        expect_uniform(by_seed ? "orders of 3 windows by seed" : "orders of 3 windows", triples, 6, 0, EPOCHS, 5);
    }
    double bins[BINS]; // distances between the images of neighbours
    memset(bins, 0, sizeof(bins));
    for (uint64_t i = 0; i + 1 < MANY; i++) {
        uint64_t a = permutation_at(i, MANY, 1, 0), b = permutation_at(i + 1, MANY, 1, 0);
        bins[(b + MANY - a) % MANY * BINS / MANY]++;
    }
    expect_uniform("neighbours' distances", bins, BINS, 0, MANY, 49);
}

static void test_data_order_is_kept(void) {
    static const uint64_t first[8] = {132, 913, 995, 413, 283, 997, 958, 48};
    static const uint64_t few[7] = {5, 3, 1, 2, 0, 6, 4};
    static const uint64_t later[8] = {46983430, 74190938, 17331405, 30364, 24222575, 2570526, 83270617, 38822122};
    for (uint64_t i = 0; i < 8; i++) {
        uint64_t a = permutation_at(i, 1000, 1, 0), b = permutation_at(i, 123456789, 42, 7);
        EXPECT(a == first[i] && b == later[i], "place %d: windows %llu and %llu", (int)i, (unsigned long long)a,
               (unsigned long long)b);
        if (i < 7) EXPECT(permutation_at(i, 7, 3, 2) == few[i], "place %d of 7 windows", (int)i);
    }
}

static void test_data_refused_shards(void) {
    static const struct {
        const char *label;
        int32_t magic, version, count;
        int64_t bytes;
        const char *word;
    } cases[] = {
        {"an empty file", 0, 0, 0, 0, "0 bytes"},
        {"half a header", 20240520, 1, 100, 512, "512 bytes"},
        {"text instead of a shard", 0x6e652065, 1, 100, 1224, "not a token shard"},
        {"the magic number of the other byte order", (int32_t)0x98d83401, 1, 100, 1224, "not a token shard"},
        {"uint16 with a later version", 20240520, 2, 100, 1224, "version 2"},
        {"uint32 with the version of uint16", 20240801, 1, 100, 1424, "version 1"},
        {"one byte missing", 20240520, 1, 100, 1223, "1224"},
        {"one token too many", 20240520, 1, 100, 1226, "1226"},
        {"uint32 tokens with the size of uint16", 20240801, 7, 100, 1224, "1424"},
        {"a negative count", 20240520, 1, -1, 1022, "1022 bytes"},
        {"a negative count, nothing behind the header", 20240520, 1, -1, 1024, "4294967295"},
        {"no tokens", 20240520, 1, 0, 1024, "0 tokens"},
        {"as many tokens as a window less one", 20240520, 1, 5, 1034, "--seq-len"},
    };
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    char path[600];
    FORMAT(path, "%s/good_and_bad.bin", d.path);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int32_t header[256];
        memset(header, 0, sizeof(header));
        header[0] = cases[i].magic, header[1] = cases[i].version, header[2] = cases[i].count;
        data_write_file(path, header, min_size(sizeof(header), cases[i].bytes));
        CHECK(truncate(path, (off_t)cases[i].bytes) == 0, "cannot truncate %s", path);
        run_command(&r, "%s --child data-windows '%s' 5 256 1 ''", data_self(), path);
        data_expect_failure(cases[i].label, &r, path, cases[i].word);
    }
    data_write_shard(path, 2, 0, 256, 6); // the least that is accepted
    run_command(&r, "%s --child data-windows '%s' 5 256 1 ''", data_self(), path);
    EXPECT(r.status == 0 && r.err[0] == 0, "a shard of one window: status %d, %s", r.status, r.err);
    run_command(&r, "%s --child data-windows '%s/none_*.bin' 5 256 1 ''", data_self(), d.path);
    data_expect_failure("a glob that matches nothing", &r, "none_*.bin", "no file matches");
    run_command(&r, "%s --child data-windows '%s' 5 256 1 ''", data_self(), d.path);
    data_expect_failure("a directory without shards", &r, d.path, "no val_");
    run_command(&r, "mkfifo '%s/bad.bin' ; %s --child data-windows '%s/*.bin' 5 256 1 ''", d.path, data_self(), d.path);
    data_expect_failure("a pipe", &r, "/bad.bin", "not a regular file");
    test_remove_directory(&d);
}

static void test_data_names(void) {
    static const char *const names[] = {"b_10.bin", "a[1].bin", "B_2.bin"};
    static const struct {
        const char *pattern;
        int shards, first[3];               // the first token of each shard
    } cases[] = {{"*.bin", 3, {20, 10, 0}}, // byte order: B_2, a[1], b_10
                 {"a[1].bin", 1, {10}},     // the name of a file, not a pattern
                 {"{b_10,B_2}.bin", 2, {20, 0}}};
    TestDirectory d = test_make_directory();
    char path[600];
    for (int i = 0; i < 3; i++) {
        FORMAT(path, "%s/%s", d.path, names[i]);
        data_write_shard(path, 2, (uint32_t)i * 10, 256, 6);
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        DataLoader l;
        int tokens[18];
        FORMAT(path, "%s/%s", d.path, cases[i].pattern);
        dataloader_open(&l, path, 1, 5, 256, 0, 1, 1, false);
        EXPECT(l.token_count == 6u * (unsigned)cases[i].shards, "%s: %zu tokens", cases[i].pattern, l.token_count);
        dataloader_read_first_tokens(&l, tokens, l.token_count);
        for (int s = 0; s < cases[i].shards; s++)
            EXPECT(tokens[6 * s] == cases[i].first[s], "%s: shard %d begins with token %d", cases[i].pattern, s,
                   tokens[6 * s]);
        dataloader_close(&l);
    }
    test_remove_directory(&d);
}

static void test_data_vocabulary(void) {
    static const uint32_t bad[] = {256, 65535, 65536, 0xFFFFFFFFu};
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    char path[600], word[64];
    FORMAT(path, "%s/a.bin", d.path);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int token_bytes = bad[i] > 65535 ? 4 : 2;
        data_write_shard(path, token_bytes, 0, 256, 31);
        run_command(&r, "%s --child data-windows '%s' 5 256 6 ''", data_self(), path);
        EXPECT(r.status == 0, "tokens below 256 are refused: %s", r.err);
        data_patch(path, 1024 + 17 * token_bytes, &bad[i], token_bytes); // in window 3 alone
        run_command(&r, "%s --child data-windows '%s' 5 256 6 ''", data_self(), path);
        FORMAT(word, "is %u, outside the vocabulary of 256", bad[i]);
        data_expect_failure("a token outside the vocabulary", &r, path, word);
        data_expect_failure("a token outside the vocabulary", &r, "token 17", "--vocab");
        EXPECT(count_lines(r.out) == 3, "%d windows before the bad one instead of 3", count_lines(r.out));
        run_command(&r, "%s --child data-tokens '%s' 5 256 18 ''", data_self(), path);
        data_expect_failure("a token outside the vocabulary, in file order", &r, "token 17", word);
        run_command(&r, "%s --child data-tokens '%s' 5 256 17 ''", data_self(), path);
        EXPECT(r.status == 0 && count_lines(r.out) == 17, "the tokens before it: status %d", r.status);
    }
    test_remove_directory(&d);
}

static void test_data_large_shards(void) {
    TestDirectory d = test_make_directory();
    char path[600];
    FORMAT(path, "%s/large.bin", d.path);
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2) { // 2.4 GB, beyond 2^31, and 4.8 GB, beyond 2^32
        enum { T = 1000, COUNT = 1200000001 };
        int64_t bytes = 1024 + (int64_t)COUNT * token_bytes;
        data_write_shard(path, token_bytes, 0, 256, 0);
        int32_t count = COUNT;
        data_patch(path, 8, &count, 4);
        int rc = truncate(path, (off_t)bytes); // sparse
        EXPECT(rc == 0, "cannot make a sparse file of %lld bytes in %s: %s", (long long)bytes, d.path, strerror(errno));
        if (rc != 0) break;
        for (int i = 0; i <= T; i++) {
            uint32_t token = 7 + (uint32_t)i;
            data_patch(path, bytes + (int64_t)(i - T - 1) * token_bytes, &token, token_bytes);
        }
        DataLoader l;
        int inputs[T], targets[T];
        dataloader_open(&l, path, 1, T, 65536, 0, 1, 1, false);
        EXPECT(l.window_count == 1200000, "%llu windows", (unsigned long long)l.window_count);
        dataloader_start(&l, l.window_count - 1);
        dataloader_next(&l, inputs, targets, NULL);
        for (int t = 0; t < T; t++)
            EXPECT(inputs[t] == 7 + t && targets[t] == 8 + t, "%d bytes a token: input %d is %d", token_bytes, t,
                   inputs[t]);
        uint64_t before = dataloader_fingerprint(&l);
        uint32_t other = 99;
        data_patch(path, bytes - token_bytes, &other, token_bytes);
        EXPECT(dataloader_fingerprint(&l) != before, "%d bytes a token: the last token is not in the fingerprint",
               token_bytes);
        dataloader_close(&l);
    }
    test_remove_directory(&d);
}

static void test_data_many_shards(void) {
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    char path[600];
    for (int i = 0; i < 300; i++) {
        FORMAT(path, "%s/%03d.bin", d.path, i);
        data_write_shard(path, 2, (uint32_t)i, 65536, 6);
    }
    run_command(&r, "( ulimit -n 100 ; exec %s --child data-windows '%s/*.bin' 5 65536 700 '' )", data_self(), d.path);
    EXPECT(r.status == 0 && count_lines(r.out) == 700, "status %d after %d windows: %s", r.status, count_lines(r.out),
           r.err);
    const char *line = r.out;
    for (int i = 0; i < 700 && *line; i++, line = strchr(line, '\n') + 1) {
        int window = -1, token = -1;
        EXPECT(sscanf(line, "window %d: %d", &window, &token) == 2 && window == i && token == i % 300,
               "window %d begins with token %d", i, token);
    }
    run_command(&r, "%s --child data-tokens '%s/*.bin' 5 65536 1801 ''", data_self(), d.path);
    data_expect_failure("more tokens than there are", &r, "1801", "1800");
    test_remove_directory(&d);
}

static void test_data_changing_files(void) {
    static const struct {
        const char *label, *action, *word;
    } cases[] = {
        {"a shard is cut off", "truncate -s -2 '%s/001.bin'", "001.bin"},
        {"a shard is emptied", "truncate -s 0 '%s/001.bin'", "has 0 now"},
        {"a shard grows", "truncate -s +2 '%s/001.bin'", "001.bin"},
        {"a shard that was in use is removed", "rm '%s/000.bin'", "removed or replaced"},
        {"a shard that was not in use is removed", "rm '%s/001.bin'", "cannot open"},
        {"a shard is replaced", "cp '%s/000.bin' '%s/x' && mv '%s/x' '%s/000.bin'", "removed or replaced"},
    };
    static ProgramResult r;
    char path[600], action[3000];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TestDirectory d = test_make_directory();
        for (int k = 0; k < 2; k++) {
            FORMAT(path, "%s/%03d.bin", d.path, k);
            data_write_shard(path, 2, 0, 256, 31);
        }
        action[0] = 0;
        for (const char *p = cases[i].action; *p; p++) { // %s: the directory; quotes become double, inside the shell's
            size_t n = strlen(action);
            if (p[0] == '%') snprintf(action + n, sizeof(action) - n, "%s", d.path), p++;
            else snprintf(action + n, sizeof(action) - n, "%c", *p == '\'' ? '"' : *p);
        }
        run_command(&r, "%s --child data-windows '%s/*.bin' 5 256 40 '%s'", data_self(), d.path, action);
        data_expect_failure(cases[i].label, &r, d.path, cases[i].word);
        EXPECT(count_lines(r.out) >= 1 && count_lines(r.out) < 40, "%s: it failed after %d windows", cases[i].label,
               count_lines(r.out));
        test_remove_directory(&d);
    }
}

static void test_data_reads_ahead(void) {
    DataShards d = data_make_shards();
    DataLoader l;
    int inputs[4 * DATA_T], targets[4 * DATA_T];
    dataloader_open(&l, d.pattern, 4, DATA_T, 65536, 0, 1, 1, true);
    dataloader_start(&l, 0);
    for (int batch = 0; batch < 5; batch++) {
        uint64_t ahead = 0;
        for (double until = now_seconds() + 20; ahead < DATALOADER_SLOTS && now_seconds() < until; usleep(1000)) {
            pthread_mutex_lock(&l.lock);
            ahead = l.produced - l.consumed;
            pthread_mutex_unlock(&l.lock);
        }
        EXPECT(ahead == DATALOADER_SLOTS, "batch %d: %llu batches are read ahead", batch, (unsigned long long)ahead);
        if (ahead != DATALOADER_SLOTS) break;
        dataloader_next(&l, inputs, targets, NULL);
        EXPECT(l.wait_seconds == 0, "batch %d: %g s of waiting for what is there", batch, l.wait_seconds);
    }
    dataloader_start(&l, 0);
    for (int batch = 0; batch < 1000; batch++) dataloader_next(&l, inputs, targets, NULL); // faster than it can be read
    EXPECT(l.wait_seconds > 0 && l.wait_seconds < 20, "%g s of waiting", l.wait_seconds);
    dataloader_close(&l);
    test_remove_directory(&d.directory);
}

static void test_data_first_tokens(void) {
    DataShards d = data_make_shards();
    DataLoader l;
    int tokens[DATA_TOKENS + 1];
    static const int counts[] = {1, 31, 32, 57, 58, DATA_TOKENS}; // around the shards' ends
    dataloader_open(&l, d.pattern, 2, DATA_T, 65536, 1, 2, 1, true);
    for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++) {
        memset(tokens, 255, sizeof(tokens));
        dataloader_read_first_tokens(&l, tokens, counts[k]);
        for (int i = 0; i < counts[k]; i++) EXPECT(tokens[i] == i, "of %d: token %d is %d", counts[k], i, tokens[i]);
        EXPECT(tokens[counts[k]] == -1, "of %d: one more is written", counts[k]);
    }
    dataloader_close(&l);
    test_remove_directory(&d.directory);
}

static uint64_t data_fingerprint_of(const char *directory) {
    char pattern[600];
    DataLoader l;
    FORMAT(pattern, "%s/*.bin", directory);
    dataloader_open(&l, pattern, 1, 5, 65536, 0, 1, 1, false);
    uint64_t fingerprint = dataloader_fingerprint(&l);
    dataloader_close(&l);
    return fingerprint;
}

static void test_data_fingerprint(void) {
    TestDirectory d = test_make_directory(), copy = test_make_directory();
    static ProgramResult r;
    char path[600];
    enum { COUNT = 500000 }; // 1 MB: sampled; the other shard, 62 bytes, is not
    FORMAT(path, "%s/a.bin", d.path);
    data_write_shard(path, 2, 0, 65521, COUNT);
    FORMAT(path, "%s/b.bin", d.path);
    data_write_shard(path, 2, 0, 65521, 31);
    uint64_t original = data_fingerprint_of(d.path);
    run_command(&r, "cp '%s'/*.bin '%s' && touch -d 2001-01-01 '%s'/*.bin", d.path, copy.path, copy.path);
    EXPECT(r.status == 0 && data_fingerprint_of(copy.path) == original, "a copy has another fingerprint");
    static const struct {
        const char *file;
        int64_t offset;
    } changes[] = {
        {"a.bin", 0},  {"a.bin", 4095}, {"a.bin", (2 * COUNT - 4096) / 15}, {"a.bin", 2 * COUNT - 1}, {"b.bin", 0},
        {"b.bin", 33}, {"b.bin", 61}};
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        FORMAT(path, "%s/%s", copy.path, changes[i].file);
        for (int restored = 0; restored < 2; restored++) {
            data_flip_bit(path, 1024 + changes[i].offset);
            EXPECT((data_fingerprint_of(copy.path) == original) == restored, "%s: byte %lld %s", changes[i].file,
                   (long long)changes[i].offset, restored ? "restored" : "changes nothing");
        }
    }
    FORMAT(path, "%s/b.bin", copy.path);
    data_write_shard(path, 2, 0, 65521, 30);
    EXPECT(data_fingerprint_of(copy.path) != original, "a token less changes nothing");
    data_write_shard(path, 4, 0, 65521, 31);
    EXPECT(data_fingerprint_of(copy.path) != original, "the other format changes nothing");
    run_command(&r, "cp '%s/b.bin' '%s/b.bin' && mv '%s/a.bin' '%s/c.bin'", d.path, copy.path, copy.path, copy.path);
    EXPECT(data_fingerprint_of(copy.path) != original, "the other order changes nothing");
    run_command(&r, "rm '%s/c.bin'", copy.path);
    EXPECT(data_fingerprint_of(copy.path) != original, "a shard less changes nothing");
    static const struct {
        int token_bytes;
        size_t count;
    } zeros[] = {{2, 60000}, {2, 60002}, {4, 30000}}; // the same blocks; the same bytes
    uint64_t fingerprints[3];
    FORMAT(path, "%s/b.bin", copy.path);
    for (int i = 0; i < 3; i++) {
        data_write_shard(path, zeros[i].token_bytes, 0, 1, zeros[i].count);
        fingerprints[i] = data_fingerprint_of(copy.path);
        for (int k = 0; k < i; k++)
            EXPECT(fingerprints[i] != fingerprints[k], "zeros, cases %d and %d: the same fingerprint", k, i);
    }
    test_remove_directory(&d);
    test_remove_directory(&copy);
}

// ---------------------------------------------------------------------------------------------------------------------
// the converter

static const char *data_converter(void) {
    const char *converter = getenv("TEXT_TO_SHARDS");
    return converter && *converter ? converter : "./text_to_shards";
}

// Reads all tokens of a split and checks the headers. Returns their number, and the number of shards in *shards.
static size_t data_read_split(const char *directory, const char *split, unsigned char *bytes, size_t size, int *shards,
                              size_t *longest) {
    size_t n = 0;
    *shards = 0;
    if (longest) *longest = 0;
    for (;; ++*shards) {
        char path[700];
        FORMAT(path, "%s/%s_%06d.bin", directory, split, *shards);
        FILE *f = fopen(path, "rb");
        if (f == NULL) return n;
        int32_t header[256];
        size_t before = n;
        EXPECT(fread(header, sizeof(header), 1, f) == 1 && header[0] == 20240520 && header[1] == 1, "%s: header", path);
        for (int i = 3; i < 256; i++) EXPECT(header[i] == 0, "%s: header[%d] is %d", path, i, (int)header[i]);
        for (int low; (low = getc(f)) != EOF; n++) {
            EXPECT(getc(f) == 0, "%s: a token above 255", path);
            if (n < size) bytes[n] = (unsigned char)low;
        }
        EXPECT((size_t)header[2] == n - before, "%s: %d tokens stated, %zu there", path, (int)header[2], n - before);
        if (longest) *longest = max_size(*longest, n - before);
        fclose(f);
    }
}

// The expected tokens of a text that is split at a delimiter (NULL: not split): a 0 before each document.
static size_t data_documents(unsigned char *out, const unsigned char *text, size_t count, const char *delimiter) {
    size_t n = 0, length = delimiter ? strlen(delimiter) : 0;
    bool begun = false;
    for (size_t i = 0; i < count;) {
        if (delimiter && count - i >= length && memcmp(text + i, delimiter, length) == 0) {
            begun = false;
            i += length;
            continue;
        }
        if (!begun) out[n++] = 0;
        begun = true;
        out[n++] = text[i++];
    }
    return n;
}

// Writes `text` in the syntax of --delimiter.
static void data_escape(char *out, const char *text) {
    *out = 0;
    for (; *text; text++) out += sprintf(out, *text == '\n' ? "\\n" : "%c", *text);
}

static void test_converter_bytes(void) {
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    static unsigned char want[4000], got[4000], text[300];
    char path[700];
    // z precedes a, as on the command line; in a directory names are in byte order, and .hidden is not read
    static const char *const names[] = {"z", "in/B", "in/a/x", "in/a.txt", "in/b", "in/.hidden"};
    size_t want_count = 0;
    run_command(&r, "mkdir -p '%s/in/a' && ln -s .. '%s/in/a/loop'", d.path, d.path);
    for (int i = 0; i < 6; i++) {
        size_t n = 0;
        if (i == 0)
            for (; n < 255; n++) text[n] = (unsigned char)(n + 1); // every byte but 0
        else n = sprintf((char *)text, "text %d\r\nno newline at its end", i);
        FORMAT(path, "%s/%s", d.path, names[i]);
        data_write_file(path, text, n);
        if (i < 5) want_count += data_documents(want + want_count, text, n, NULL);
    }
    FORMAT(path, "%s/in/empty", d.path);
    data_write_file(path, "", 0);
    run_command(&r, "%s --out '%s/out' --val-fraction 0 --shard-tokens 100 '%s/z' '%s/in'", data_converter(), d.path,
                d.path, d.path);
    EXPECT(r.status == 0 && r.err[0] == 0, "status %d: %s", r.status, r.err);
    EXPECT(strstr(r.out, "6 files (1 empty), 5 documents") != NULL, "it says: %s", r.out);
    FORMAT(path, "%s/out", d.path);
    int shards = 0;
    size_t longest, n = data_read_split(path, "train", got, sizeof(got), &shards, &longest);
    EXPECT(n == want_count && memcmp(got, want, min_size(n, want_count)) == 0, "%zu tokens instead of %zu, or others",
           n, want_count);
    EXPECT(shards == (int)((want_count + 99) / 100) && longest == (want_count + shards - 1) / shards,
           "%d shards, the longest of %zu tokens", shards, longest);
    EXPECT(data_read_split(path, "val", got, sizeof(got), &shards, NULL) == 0 && shards == 0,
           "there are validation shards");
    run_command(&r, "ls -A '%s/out' | grep -v -e 'train_00000[0-9].bin' -e '^corpus.json$'", d.path);
    EXPECT(r.out[0] == 0, "other files are left: %s", r.out);
    test_remove_directory(&d);
}

static void test_converter_delimiters(void) {
    enum { RANDOM = 40, SIZE = 300000 };
    static const struct {
        const char *delimiter, *text;
    } cases[] = {
        {"\n\n", "one\n\ntwo\n\n\n\nthree\n"},
        {"\n\n", "\n\n\n"},
        {"aab", "aaabaaab"},
        {"aab", "xaa"},
        {"abab", "abaabababb"},
        {"%", "%a%%b%"},
        {"<|end|>", "a<|end|>b<|end<|end|>c<|en"},
    };
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    static unsigned char text[SIZE], want[2 * SIZE], got[2 * SIZE];
    char path[700], escaped[64];
    TestRandom random = {1};
    size_t fixed = sizeof(cases) / sizeof(cases[0]);
    for (size_t i = 0; i < fixed + RANDOM + 1; i++) {
        char delimiter[16] = "\n\n";
        size_t n = 0;
        if (i < fixed) {
            FORMAT(delimiter, "%s", cases[i].delimiter);
            n = strlen(cases[i].text);
            memcpy(text, cases[i].text, n);
        } else if (i < fixed + RANDOM) { // two letters: many false starts
            int length = 1 + test_random_int(&random, 5);
            for (int k = 0; k < length; k++) delimiter[k] = "ab"[test_random_int(&random, 2)], delimiter[k + 1] = 0;
            for (n = 0; n < 200; n++) text[n] = (unsigned char)"ab"[test_random_int(&random, 2)];
        } else { // a delimiter across every place where a read may end
            for (n = 0; n < SIZE; n++) text[n] = 'x';
            for (size_t k = 4096; k < SIZE; k += 4096) text[k - 1] = text[k] = '\n';
        }
        size_t want_count = data_documents(want, text, n, delimiter);
        FORMAT(path, "%s/text", d.path);
        data_write_file(path, text, n);
        data_escape(escaped, delimiter);
        // by name and by stdin
        run_command(&r, "%s --out '%s/out' --force --val-fraction 0 --delimiter '%s' %s'%s'", data_converter(), d.path,
                    escaped, i & 1 ? "- <" : "", path);
        FORMAT(path, "%s/out", d.path);
        int shards = 0;
        size_t got_count = want_count ? data_read_split(path, "train", got, sizeof(got), &shards, NULL) : 0;
        EXPECT(r.status == (want_count ? 0 : 1), "case %zu: status %d: %s", i, r.status, r.err);
        EXPECT(got_count == want_count && memcmp(got, want, want_count) == 0,
               "case %zu, delimiter '%s': %zu tokens instead of %zu, or others", i, escaped, got_count, want_count);
    }
    test_remove_directory(&d);
}

// Documents of a text of numbered lines, by the number they begin with: where[number] is 1 for training, 2 for
// validation.
static void data_mark_documents(const char *directory, unsigned char *where, int count, size_t tokens[2]) {
    static unsigned char bytes[1 << 20];
    static const char *const splits[] = {"train", "val"};
    memset(where, 0, count);
    for (int split = 0; split < 2; split++) {
        int shards = 0, before = -1;
        size_t n = data_read_split(directory, splits[split], bytes, sizeof(bytes) - 1, &shards, NULL);
        bytes[n] = 0;
        tokens[split] = n;
        for (size_t i = 0; i < n; i++) {
            if (bytes[i] != 0) continue;
            int number = atoi((const char *)bytes + i + 1);
            EXPECT(number > before && number < count && where[number] == 0, "%s: document %d after %d, or twice",
                   splits[split], number, before);
            if (number >= 0 && number < count) where[number] |= (unsigned char)(1 << split);
            before = number;
        }
    }
}

static const struct {
    const char *options;
    double fraction, tokens; // what is wanted
} converter_validations[] = {{"", 0.01, 0},
                             {"--val-fraction 0.2", 0.2, 0},
                             {"--val-tokens 5000", 0, 5000},
                             {"--val-tokens 1", 0, 1},
                             {"--val-fraction 0.9999", 0.9999, 0}};

static void test_converter_validation(void) {
    enum { DOCUMENTS = 3000 };
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    static unsigned char where[DOCUMENTS];
    char path[700];
    FORMAT(path, "%s/text", d.path);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL, "cannot write %s", path);
    for (int i = 0; i < DOCUMENTS; i++) fprintf(f, "%d %*s.\n", i, 50 + i % 37, "");
    CHECK(fclose(f) == 0, "cannot write %s", path);
    for (size_t i = 0; i < sizeof(converter_validations) / sizeof(converter_validations[0]); i++) {
        size_t tokens[2];
        run_command(&r,
                    "for k in 1 2; do %s --out '%s/out'$k --force --delimiter '\\n' %s '%s' ; done ; cmp "
                    "'%s/out1/train_000000.bin' '%s/out2/train_000000.bin' && cmp '%s/out1/val_000000.bin' "
                    "'%s/out2/val_000000.bin'",
                    data_converter(), d.path, converter_validations[i].options, path, d.path, d.path, d.path, d.path);
        EXPECT(r.status == 0, "'%s': two runs differ: %s%s", converter_validations[i].options, r.out, r.err);
        char out[700];
        FORMAT(out, "%s/out1", d.path);
        data_mark_documents(out, where, DOCUMENTS, tokens);
        int lost = 0, val = 0, val_in_tenth[10] = {0};
        for (int k = 0; k < DOCUMENTS; k++) {
            lost += where[k] == 0;
            val += where[k] == 2;
            val_in_tenth[k * 10 / DOCUMENTS] += where[k] == 2;
        }
        double target = converter_validations[i].tokens > 0
                            ? converter_validations[i].tokens
                            : converter_validations[i].fraction * (double)(tokens[0] + tokens[1]);
        EXPECT(lost == 0, "'%s': %d documents are lost", converter_validations[i].options, lost);
        EXPECT(val >= 1 && val < DOCUMENTS, "'%s': %d documents for validation", converter_validations[i].options, val);
        EXPECT((double)tokens[1] <= max_int(88, (int)target) && (double)tokens[1] >= target - 100,
               "'%s': %zu tokens for validation, %.0f wanted", converter_validations[i].options, tokens[1], target);
        if (val < 100) continue;
        for (int k = 0; k < 10; k++) // binomial, six standard deviations
            EXPECT(fabs(val_in_tenth[k] - val / 10.0) < 6 * sqrt(val / 10.0 * 0.9), "'%s': %d of %d in tenth %d",
                   converter_validations[i].options, val_in_tenth[k], val, k);
    }
    run_command(&r, "%s --out '%s/one' '%s' && ls '%s/one'", data_converter(), d.path, path, d.path);
    EXPECT(r.status == 0 && strstr(r.out, "train_000000.bin") && !strstr(r.out, "val_000000.bin") &&
               count_lines(r.err) == 1 && strstr(r.err, "--delimiter"),
           "one document: status %d: %s%s", r.status, r.out, r.err);
    run_command(&r, "%s --out '%s/two' --val-fraction 0.1 '%s'", data_converter(), d.path, path);
    data_expect_failure("one document and --val-fraction", &r, "one document", "--delimiter");
    static unsigned char bytes[100];
    for (int i = 0; i < 2; i++) { // the smaller one first, and last
        int shards = 0;
        run_command(&r, "printf '%s' > '%s/a' ; printf '%s' > '%s/b' ; %s --out '%s/three' --force '%s/a' '%s/b'",
                    i ? "short" : "a long text", d.path, i ? "a long text" : "short", d.path, data_converter(), d.path,
                    d.path, d.path);
        FORMAT(path, "%s/three", d.path);
        EXPECT(r.status == 0 && data_read_split(path, "val", bytes, sizeof(bytes), &shards, NULL) == 6 &&
                   memcmp(bytes, "\0short", 6) == 0,
               "two documents, the smaller is number %d: it is not for validation: %s%s", 2 - i, r.out, r.err);
    }
    test_remove_directory(&d);
}

static const struct {
    const char *label,
        *command; // @: the converter with its --out, in a directory with the files t (text) and e (empty)
    int status;
    const char *word;
} converter_errors[] = {
    {"no option", "@", 2, "no input"},
    {"no --out", "$T2S t", 2, "--out"},
    {"an unknown option", "@ --sharding 3 t", 2, "--sharding"},
    {"an unknown letter", "@ -x t", 2, "-x"},
    {"a missing value", "@ t --delimiter", 2, "--delimiter"},
    {"a value where none is", "@ --force=1 t", 2, "--force=1"},
    {"no number", "@ --shard-tokens many t", 2, "many"},
    {"a number with a tail", "@ --shard-tokens 10x t", 2, "10x"},
    {"a negative number", "@ --val-tokens -5 t", 2, "-5"},
    {"no shard tokens", "@ --shard-tokens 0 t", 2, "--shard-tokens 0"},
    {"more than a header can say", "@ --shard-tokens 3G t", 2, "3G"},
    {"more than 64 bits", "@ --val-tokens 99999999999999999999 t", 2, "--val-tokens"},
    {"a fraction of 1", "@ --val-fraction 1 t", 2, "--val-fraction 1"},
    {"a fraction that is no number", "@ --val-fraction nan t", 2, "nan"},
    {"two ways to say it", "@ --val-fraction 0.1 --val-tokens 10 t", 2, "exclusive"},
    {"an empty delimiter", "@ --delimiter '' t", 2, "empty"},
    {"an unknown escape", "@ --delimiter 'a\\q' t", 2, "\\q"},
    {"an escaped NUL", "@ --delimiter '\\x00' t", 2, "\\x00"},
    {"stdin twice", "@ - -", 2, "once"},
    {"a missing file", "@ t nowhere", 1, "nowhere"},
    {"an empty file", "@ t e", 1, "e is empty"},
    {"empty stdin", "@ -", 1, "stdin is empty"},
    {"a directory without text", "mkdir d ; cp e d ; @ d", 1, "no text"},
    {"a file of NUL bytes", "head -c 10 /dev/zero > z ; @ z", 1, "no text"},
    {"a broken link in a directory", "mkdir d ; ln -s nowhere d/link ; @ d", 1, "d/link"},
    {"--out is a file", "$T2S --out t t", 1, "cannot open directory t"},
    {"--out below nothing", "$T2S --out no/where t", 1, "no/where"},
    {"shards are there", "@ t 2>n ; @ t", 1, "--force"},
    {"a shard as input", "$T2S --out o2 t 2>n ; @ o2/train_000000.bin", 1, "is a token shard, not text"},
    {"too much validation", "@ --val-tokens 1000 t", 1, "1000"},
    {"a full disk while spooling", "head -c 90000 /dev/zero | tr '\\0' a > l ; ( ulimit -f 8 ; @ l )", 1, "out"},
    {"a full disk while writing", "head -c 9000 /dev/zero | tr '\\0' a > l ; ( ulimit -f 20 ; @ --val-fraction 0 l )",
     1, "cannot write shard 0"},
    {"a full disk at the last flush",
     "head -c 1400 /dev/zero | tr '\\0' a > l ; ( ulimit -f 4 ; @ --val-fraction 0 l )", 1, "cannot write shard 0"},
    {"a signal", "{ cat t ; sleep 1 ; } | timeout --preserve-status 0.6 $T2S --out out -", 1, "signal 15"},
};

static void test_converter_errors(void) {
    static ProgramResult r;
    char converter[PATH_MAX], command[2000];
    CHECK(realpath(data_converter(), converter) != NULL, "cannot find %s: build it, or set TEXT_TO_SHARDS",
          data_converter());
    for (size_t i = 0; i < sizeof(converter_errors) / sizeof(converter_errors[0]); i++) {
        TestDirectory d = test_make_directory();
        command[0] = 0;
        for (const char *p = converter_errors[i].command; *p; p++) {
            size_t n = strlen(command);
            snprintf(command + n, sizeof(command) - n, *p == '@' ? "$T2S --out out" : "%c", *p);
        }
        run_command(&r, "cd '%s' ; T2S='%s' ; printf 'some text' > t ; : > e ; %s", d.path, converter, command);
        EXPECT(r.status == converter_errors[i].status && count_lines(r.err) == 1 &&
                   strstr(r.err, converter_errors[i].word) && r.err[0] == 't',
               "%s: status %d instead of %d, or not one line with '%s': %s", converter_errors[i].label, r.status,
               converter_errors[i].status, converter_errors[i].word, r.err);
        bool had_shards = strstr(converter_errors[i].command, "2>n ; @ t") != NULL;
        run_command(&r, "ls -A '%s/out'", d.path);
        EXPECT(had_shards || r.out[0] == 0, "%s: it leaves %s", converter_errors[i].label, r.out);
        test_remove_directory(&d);
    }
}

static void test_converter_force_and_nul(void) {
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    static unsigned char bytes[100];
    char path[700];
    int shards = 0;
    FORMAT(path, "%s/out", d.path);
    run_command(
        &r, "printf 'abcdefghij' | %s --out '%s' --shard-tokens 2 --val-fraction 0 - ; printf x > '%s/train_note.txt'",
        data_converter(), path, path);
    EXPECT(r.status == 0 && data_read_split(path, "train", bytes, sizeof(bytes), &shards, NULL) == 11 && shards == 6,
           "%d shards: %s", shards, r.err);
    run_command(&r, "printf 'a\\0\\0b' | %s --out '%s' --force --val-fraction 0 - && ls '%s'", data_converter(), path,
                path);
    EXPECT(r.status == 0 && data_read_split(path, "train", bytes, sizeof(bytes), &shards, NULL) == 3 &&
               memcmp(bytes, "\0ab", 3) == 0 && shards == 1,
           "replaced by a smaller text: %d shards: %s", shards, r.err);
    EXPECT(strstr(r.out, "train_000001.bin") == NULL && strstr(r.out, "train_note.txt") != NULL,
           "old shards stay, or other files go: %s", r.out);
    static const char *const others[] = {"corpus.json", "progress.json", "tokenizer.json", "tokenizer.bin"};
    for (int i = 0; i < 4; i++) { // of another corpus, without its shards
        ProgramResult again;
        run_command(&again, "rm -f '%s'/train_0* '%s'/corpus.json ; echo x > '%s/%s' ; printf a | %s --out '%s' -",
                    path, path, path, others[i], data_converter(), path);
        EXPECT(again.status == 1 && strstr(again.err, others[i]) && strstr(again.err, "--force"), "%s: status %d, %s",
               others[i], again.status, again.err);
        run_command(&again, "printf 'a\\0\\0b' | %s --out '%s' --force --val-fraction 0 - 2>/dev/null && ls -A '%s'",
                    data_converter(), path, path);
        EXPECT(strstr(again.out, "\ncorpus.json\ntrain_000000.bin\ntrain_note.txt\n") != NULL,
               "--force over %s leaves %s", others[i], again.out);
    }
    EXPECT(count_lines(r.err) == 1 && strstr(r.err, "dropped 2 NUL bytes, the first in stdin"),
           "of NUL bytes it says: %s", r.err);
    DataLoader l; // and the trainer's loader takes what comes out
    int inputs[2], targets[2];
    FORMAT(path, "%s/out/train_*.bin", d.path);
    dataloader_open(&l, path, 1, 2, 256, 0, 1, 1, false);
    dataloader_start(&l, 0);
    dataloader_next(&l, inputs, targets, NULL);
    EXPECT(inputs[0] == 0 && inputs[1] == 'a' && targets[0] == 'a' && targets[1] == 'b', "tokens %d %d -> %d %d",
           inputs[0], inputs[1], targets[0], targets[1]);
    dataloader_close(&l);
    test_remove_directory(&d);
}

// The digest of a file, in the format of data/prepare.py and data/inspect.
static uint64_t data_file_digest(const char *path) {
    size_t size = 0;
    char *bytes = file_read(path, 1 << 30, &size);
    CHECK(bytes != NULL, "cannot read %s: %s", path, strerror(errno));
    uint64_t digest = XXH64(bytes, size, 0);
    free(bytes);
    return digest;
}

// corpus.json states the files that exist, for any names, and their digests.
static void test_converter_description(void) {
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    char converter[PATH_MAX];
    CHECK(realpath(data_converter(), converter) != NULL, "cannot find %s: build it, or set TEXT_TO_SHARDS",
          data_converter());
    static const char *const names[] = {"plain", "q\"b\\s", "\xC3\xA4\xFF\n"};
    for (int i = 0; i < 3; i++) {
        char path[700], shown[16];
        FORMAT(path, "%s/%s", d.path, names[i]);
        FILE *f = fopen(path, "w");
        CHECK(f != NULL, "cannot write %s", path);
        for (int k = 0; k < 300; k++) fprintf(f, "document %d\n", k);
        fclose(f);
        run_command(&r, "cd '%s' && '%s' --out out --force --delimiter '\\n' --shard-tokens 1000 '%s'", d.path,
                    converter, names[i]);
        EXPECT(r.status == 0, "%s: status %d, %s", names[i], r.status, r.err);
        FORMAT(path, "%s/out", d.path);
        CorpusInfo about;
        EXPECT(corpus_read_info(path, &about) && about.vocab_size == 256 && about.separator.token == 0 &&
                   !about.separator.after,
               "%s: vocabulary %d, separator %d", names[i], about.vocab_size, about.separator.token);
        cJSON *json = corpus_read(path), *item;
        const char *source = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "source"));
        FORMAT(shown, "%s", i < 2 ? names[i] : "\xC3\xA4\xEF\xBF\xBD\n");
        EXPECT(source && strcmp(source, shown) == 0, "the source %s is %s", names[i], source ? source : "(none)");
        double documents = 0, bytes = 0, train = 0, val = 0;
        EXPECT(json_get_number(json, "documents", &documents) && documents == 300 &&
                   json_get_number(json, "text_bytes", &bytes) && json_get_number(json, "train_tokens", &train) &&
                   json_get_number(json, "val_tokens", &val) && train + val == bytes + 300 && val > 0,
               "%g documents, %g bytes, %g and %g tokens", documents, bytes, train, val);
        int shards = 0;
        cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(json, "shards")) {
            const char *file = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "file"));
            const char *digest = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "xxh64"));
            char wanted[32];
            FORMAT(path, "%s/out/%s", d.path, file ? file : "");
            FORMAT(wanted, "%016" PRIx64, data_file_digest(path));
            EXPECT(digest && strcmp(digest, wanted) == 0, "%s has the digest %s, not %s", path, wanted, digest);
            shards++;
        }
        EXPECT(shards == 5, "%d shards", shards); // four of the 3990 bytes and separators or so, one for validation
        cJSON_Delete(json);
    }
    test_remove_directory(&d);
}

static const Test data_tests[] = {
    {"an unshuffled loader reads the windows of its shards in order, in both formats", test_data_windows_in_order},
    {"the windows of an update do not depend on the micro-batch and the rank count", test_data_order_of_ranks},
    {"a loader that starts at any window continues exactly, across the ends of epochs", test_data_resume},
    {"every window occurs once in an epoch, and epochs and seeds differ in their order", test_data_epochs},
    {"the shuffle is uniform over places, successors and distances", test_data_mixing},
    {"the order of a seed equals the order that existing checkpoints rely on", test_data_order_is_kept},
    {"an invalid or incomplete shard is rejected with a one-line error that names it", test_data_refused_shards},
    {"shards are read in byte order of their names", test_data_names},
    {"a token outside the vocabulary is reported with its position, at its batch", test_data_vocabulary},
    {"shards larger than 2 and 4 GiB are read up to their end", test_data_large_shards},
    {"hundreds of shards require few file descriptors", test_data_many_shards},
    {"a shard that changes or disappears during a run stops it with a one-line error", test_data_changing_files},
    {"batches are read ahead, and wait_seconds counts only waits", test_data_reads_ahead},
    {"the first tokens are in file order, across shards", test_data_first_tokens},
    {"the fingerprint depends on the content of the data, not on its path", test_data_fingerprint},
    {"the converter keeps every byte and puts a 0 before each document", test_converter_bytes},
    {"the converter splits documents at every delimiter", test_converter_delimiters},
    {"the converter selects the same evenly spread validation documents in each run", test_converter_validation},
    {"the converter rejects invalid options and input, and leaves no files", test_converter_errors},
    {"the converter describes its corpus in corpus.json", test_converter_description},
    {"the converter replaces a corpus only with --force, and reports dropped bytes", test_converter_force_and_nul},
};
enum { DATA_TEST_COUNT = sizeof(data_tests) / sizeof(data_tests[0]) };
#endif
