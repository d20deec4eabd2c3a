/*
data.h: tests of the data loader (llmc/data/dataloader.h). Errors that end the program are tested by
tests/programs/test_data.py, and the converter by test_text_to_shards.py.
*/
#pragma once
#include "../llmc/data/data_identity.h"
#include "harness.h"
#include <sys/resource.h>

// ---------------------------------------------------------------------------------------------------------------------
// helpers

// A shard of `count` tokens first, first + 1, ... modulo `modulus`, of 2 or 4 bytes each.
static void data_write_shard(const char *path, int token_bytes, uint32_t first, uint32_t modulus, size_t count) {
    int *tokens = (int *)checked_calloc(count, sizeof(int));
    for (size_t i = 0; i < count; i++) tokens[i] = (int)((first + i) % modulus);
    test_write_shard(path, token_bytes, tokens, count);
    free(tokens);
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
// Returns the pattern of their names.
static const char *data_make_shards(void) {
    TestDirectory d = test_make_directory();
    // 31 = 6T+1 and 26 = 5T+1, in the other format, end with a window; 43 = 8T+3 leaves tokens that no window has
    static const int counts[] = {31, 26, 43}, token_bytes[] = {2, 4, 2};
    uint32_t first = 0;
    for (int i = 0; i < 3; i++) {
        data_write_shard(test_text("%s/shard_%d.bin", d.path, i), token_bytes[i], first, 65536, counts[i]);
        first += (uint32_t)counts[i];
    }
    return test_text("%s/shard_*.bin", d.path);
}
// The first token of window w of these shards.
static int data_window_start(uint64_t w) {
    return w < 6 ? (int)w * DATA_T : w < 11 ? 31 + (int)(w - 6) * DATA_T : 57 + (int)(w - 11) * DATA_T;
}

// starts[i] = first token of the window at global index first + i, collected from all ranks. `count` is a multiple of
// ranks*B. Checks the other tokens of the windows and the position as well.
static void data_collect(int *starts, const char *shards, int B, int ranks, uint64_t seed, bool shuffle, uint64_t first,
                         int count) {
    int inputs[16 * DATA_T], targets[16 * DATA_T];
    assert(B <= 16 && count % (ranks * B) == 0);
    for (int rank = 0; rank < ranks; rank++) {
        DataLoader l;
        dataloader_open(&l, shards, B, DATA_T, 65536, rank, ranks, seed, shuffle);
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

// ---------------------------------------------------------------------------------------------------------------------
// the loader

static void test_data_windows_in_order(void) {
    const char *shards = data_make_shards();
    int starts[2 * DATA_WINDOWS];
    data_collect(starts, shards, 1, 1, 1, false, 0, 2 * DATA_WINDOWS);
    for (int i = 0; i < 2 * DATA_WINDOWS; i++)
        EXPECT(starts[i] == data_window_start((uint64_t)i % DATA_WINDOWS), "index %d: starts at %d instead of %d", i,
               starts[i], data_window_start((uint64_t)i % DATA_WINDOWS));
    DataLoader l;
    dataloader_open(&l, shards, 1, DATA_T, 65536, 0, 1, 1, false);
    EXPECT(l.shard_count == 3 && l.window_count == DATA_WINDOWS && l.token_count == DATA_TOKENS,
           "%zu shards, %llu windows, %zu tokens", l.shard_count, (unsigned long long)l.window_count, l.token_count);
    dataloader_close(&l);
}

static void test_data_order_of_ranks(void) {
    static const int B[] = {1, 4, 2, 1, 3, 12, 8, 1}, ranks[] = {1, 1, 3, 6, 2, 1, 3, 8}; // products divide 48
    const char *shards = data_make_shards();
    int want[48], got[48]; // two and a half epochs
    for (int shuffle = 0; shuffle < 2; shuffle++)
        for (uint64_t first = 0; first < 100; first += 37) {
            data_collect(want, shards, 1, 1, 3, shuffle, first, 48);
            for (size_t k = 0; k < sizeof(B) / sizeof(B[0]); k++) {
                data_collect(got, shards, B[k], ranks[k], 3, shuffle, first, 48);
                EXPECT(memcmp(want, got, sizeof(want)) == 0, "B %d ranks %d shuffle %d first %d: other windows", B[k],
                       ranks[k], shuffle, (int)first);
            }
        }
}

static void test_data_resume(void) {
    enum { COUNT = 3 * DATA_WINDOWS };
    const char *shards = data_make_shards();
    int all[COUNT], rest[COUNT];
    data_collect(all, shards, 1, 1, 9, true, 0, COUNT);
    for (int first = 1; first < COUNT; first++) { // every place, hence both ends of epochs
        data_collect(rest, shards, 1, 1, 9, true, (uint64_t)first, COUNT - first);
        EXPECT(memcmp(rest, all + first, sizeof(int) * (COUNT - first)) == 0, "resumed at %d: other windows", first);
    }
    DataLoader l; // and without a new loader, with batches read ahead that must be forgotten
    int inputs[2 * DATA_T], targets[2 * DATA_T];
    dataloader_open(&l, shards, 2, DATA_T, 65536, 0, 1, 9, true);
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
}

static void test_data_epochs(void) {
    const char *shards = data_make_shards();
    enum { RUNS = 4 }; // seed 1: epochs 0, 1, 2; seed 2: epoch 0
    int orders[RUNS][DATA_WINDOWS];
    for (int run = 0; run < RUNS; run++) {
        data_collect(orders[run], shards, 1, 1, run < 3 ? 1 : 2, true, run < 3 ? (uint64_t)(run * DATA_WINDOWS) : 0,
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

static void test_data_names(void) {
    static const char *const names[] = {"b_10.bin", "a[1].bin", "B_2.bin"};
    static const struct {
        const char *pattern;
        int shards, first[3];               // the first token of each shard
    } cases[] = {{"*.bin", 3, {20, 10, 0}}, // byte order: B_2, a[1], b_10
                 {"a[1].bin", 1, {10}},     // the name of a file, not a pattern
                 {"{b_10,B_2}.bin", 2, {20, 0}}};
    TestDirectory d = test_make_directory();
    for (int i = 0; i < 3; i++) data_write_shard(test_text("%s/%s", d.path, names[i]), 2, (uint32_t)i * 10, 256, 6);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        DataLoader l;
        int tokens[18];
        dataloader_open(&l, test_text("%s/%s", d.path, cases[i].pattern), 1, 5, 256, 0, 1, 1, false);
        EXPECT(l.token_count == 6u * (unsigned)cases[i].shards, "%s: %zu tokens", cases[i].pattern, l.token_count);
        dataloader_read_first_tokens(&l, tokens, l.token_count);
        for (int s = 0; s < cases[i].shards; s++)
            EXPECT(tokens[6 * s] == cases[i].first[s], "%s: shard %d begins with token %d", cases[i].pattern, s,
                   tokens[6 * s]);
        dataloader_close(&l);
    }
}

static void test_data_large_shards(void) {
    TestDirectory d = test_make_directory();
    const char *path = test_text("%s/large.bin", d.path);
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
        clock_t begin = clock();
        dataloader_open(&l, path, 1, T, 65536, 0, 1, 1, false);
        double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC; // of the processor
        EXPECT(seconds < 0.1, "the loader opens in %.2f s: does it visit every token?", seconds);
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
}

static void test_data_many_shards(void) {
    TestDirectory d = test_make_directory();
    struct rlimit before, few;
    int inputs[DATA_T], targets[DATA_T];
    DataLoader l;
    for (int i = 0; i < 300; i++)
        data_write_shard(test_text("%s/%03d.bin", d.path, i), 2, (uint32_t)i, 65536, DATA_T + 1);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0, "cannot read the limit of open files");
    few = before, few.rlim_cur = 100;
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0, "cannot set the limit of open files");
    dataloader_open(&l, test_text("%s/*.bin", d.path), 1, DATA_T, 65536, 0, 1, 1, false);
    dataloader_start(&l, 0);
    for (int i = 0; i < 700; i++) {
        dataloader_next(&l, inputs, targets, NULL);
        EXPECT(inputs[0] == i % 300, "window %d begins with token %d", i, inputs[0]);
    }
    dataloader_close(&l);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "cannot reset the limit of open files");
}

// A file gets this size, or is removed or replaced.
enum { REMOVED = -1, REPLACED = -2 };
static void data_change(const char *path, int bytes) {
    const char *other = test_text("%s.new", path);
    if (bytes == REPLACED) data_write_shard(other, 2, 0, 256, 31);
    CHECK((bytes == REMOVED    ? unlink(path)
           : bytes == REPLACED ? rename(other, path)
                               : truncate(path, bytes)) == 0,
          "cannot change %s: %s", path, strerror(errno));
}

// dataloader_next ends the program with the error that the thread leaves.
static void test_data_changing_files(void) {
    static const struct {
        const char *label;
        int file, bytes;
        const char *word;
    } cases[] = {
        {"a shard is cut off", 1, 1084, "001.bin"},
        {"a shard is emptied", 1, 0, "has 0 now"},
        {"a shard grows", 1, 1088, "001.bin"},
        {"a shard that was in use is removed", 0, REMOVED, "removed or replaced"},
        {"a shard that was not in use is removed", 1, REMOVED, "cannot open"},
        {"a shard is replaced", 0, REPLACED, "removed or replaced"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TestDirectory d = test_make_directory();
        int inputs[DATA_T], targets[DATA_T], windows = 0;
        DataLoader l;
        for (int k = 0; k < 2; k++) data_write_shard(test_text("%s/%03d.bin", d.path, k), 2, 0, 256, 31);
        dataloader_open(&l, test_text("%s/*.bin", d.path), 1, DATA_T, 256, 0, 1, 1, false);
        dataloader_start(&l, 0);
        for (bool ready = true; ready && windows < 40; windows += ready) {
            pthread_mutex_lock(&l.lock);
            while (l.produced == l.consumed && !l.failed) pthread_cond_wait(&l.changed, &l.lock);
            ready = l.produced != l.consumed;
            pthread_mutex_unlock(&l.lock);
            if (ready) dataloader_next(&l, inputs, targets, NULL);
            if (windows == 0) data_change(test_text("%s/%03d.bin", d.path, cases[i].file), cases[i].bytes);
        }
        EXPECT(windows >= 1 && windows < 40 && strstr(l.error, d.path) && strstr(l.error, cases[i].word),
               "%s: after %d windows: %s", cases[i].label, windows, l.error);
        dataloader_close(&l);
    }
}

static void test_data_reads_ahead(void) {
    const char *shards = data_make_shards();
    DataLoader l;
    int inputs[4 * DATA_T], targets[4 * DATA_T];
    dataloader_open(&l, shards, 4, DATA_T, 65536, 0, 1, 1, true);
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
}

static void test_data_first_tokens(void) {
    const char *shards = data_make_shards();
    DataLoader l;
    int tokens[DATA_TOKENS + 1];
    static const int counts[] = {1, 31, 32, 57, 58, DATA_TOKENS}; // around the shards' ends
    dataloader_open(&l, shards, 2, DATA_T, 65536, 1, 2, 1, true);
    for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++) {
        memset(tokens, 255, sizeof(tokens));
        dataloader_read_first_tokens(&l, tokens, counts[k]);
        for (int i = 0; i < counts[k]; i++) EXPECT(tokens[i] == i, "of %d: token %d is %d", counts[k], i, tokens[i]);
        EXPECT(tokens[counts[k]] == -1, "of %d: one more is written", counts[k]);
    }
    dataloader_close(&l);
}

static uint64_t data_fingerprint_of(const char *directory) {
    DataLoader l;
    dataloader_open(&l, test_text("%s/*.bin", directory), 1, 5, 65536, 0, 1, 1, false);
    uint64_t fingerprint = dataloader_fingerprint(&l);
    dataloader_close(&l);
    return fingerprint;
}

static void test_data_fingerprint(void) {
    TestDirectory d = test_make_directory(), copy = test_make_directory();
    static ProgramResult r;
    const char *b = test_text("%s/b.bin", copy.path);
    enum { COUNT = 500000 }; // 1 MB: sampled; the other shard, 62 bytes, is not
    data_write_shard(test_text("%s/a.bin", d.path), 2, 0, 65521, COUNT);
    data_write_shard(test_text("%s/b.bin", d.path), 2, 0, 65521, 31);
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
        const char *path = test_text("%s/%s", copy.path, changes[i].file);
        for (int restored = 0; restored < 2; restored++) {
            data_flip_bit(path, 1024 + changes[i].offset);
            EXPECT((data_fingerprint_of(copy.path) == original) == restored, "%s: byte %lld %s", changes[i].file,
                   (long long)changes[i].offset, restored ? "restored" : "changes nothing");
        }
    }
    data_write_shard(b, 2, 0, 65521, 30);
    EXPECT(data_fingerprint_of(copy.path) != original, "a token less changes nothing");
    data_write_shard(b, 4, 0, 65521, 31);
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
    for (int i = 0; i < 3; i++) {
        data_write_shard(b, zeros[i].token_bytes, 0, 1, zeros[i].count);
        fingerprints[i] = data_fingerprint_of(copy.path);
        for (int k = 0; k < i; k++)
            EXPECT(fingerprints[i] != fingerprints[k], "zeros, cases %d and %d: the same fingerprint", k, i);
    }
}

static const Test data_tests[] = {
    {"an unshuffled loader reads the windows of its shards in order, in both formats", test_data_windows_in_order},
    {"the windows of an update do not depend on the micro-batch and the rank count", test_data_order_of_ranks},
    {"a loader that starts at any window continues exactly, across the ends of epochs", test_data_resume},
    {"every window occurs once in an epoch, and epochs and seeds differ in their order", test_data_epochs},
    {"the order of a seed equals the order that existing checkpoints rely on", test_data_order_is_kept},
    {"shards are read in byte order of their names", test_data_names},
    {"shards larger than 2 and 4 GiB are read up to their end", test_data_large_shards},
    {"hundreds of shards require few file descriptors", test_data_many_shards},
    {"a shard that changes or disappears during a run stops it with a one-line error", test_data_changing_files},
    {"batches are read ahead, and wait_seconds counts only waits", test_data_reads_ahead},
    {"the first tokens are in file order, across shards", test_data_first_tokens},
    {"the fingerprint depends on the content of the data, not on its path", test_data_fingerprint},
};
