/*
bench_host.h: memory of the trainer and speed of the data loader (bench.c). Included after bench_operations.h.
*/
#pragma once
#include <sys/resource.h>

// Peak resident bytes of build/train_diffv2 with these arguments; stdout goes to `out`.
static double trainer_peak(char *const *arguments, FILE *out) {
    fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0, "cannot start a process: %s", strerror(errno));
    if (pid == 0) {
        dup2(fileno(out), 1);
        execv(arguments[0], arguments);
        _exit(127);
    }
    int status;
    struct rusage usage;
    CHECK(wait4(pid, &status, 0, &usage) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "%s failed (see above): build it with make", arguments[0]);
    return 1024.0 * (double)usage.ru_maxrss;
}

static double dry_run_total(FILE *out) {
    char line[512];
    double total = 0, mib;
    bool memory = false;
    rewind(out);
    while (fgets(line, sizeof(line), out)) {
        if (strstr(line, "memory of this process")) memory = true;
        if (memory && total == 0 && sscanf(line, " total %lf MiB", &mib) == 1) total = mib * 1048576;
    }
    return total;
}

static void table_memory(void) {
    if (!wanted("memory")) return;
    printf("\nmemory                         peak of the process     --dry-run\n");
    const char *shard = "build/bench_tokens.bin";
    write_shard(shard, 100000, 0);
    for (size_t i = 0; i < sizeof(step_cases) / sizeof(step_cases[0]); i++) {
        const StepCase *c = &step_cases[i];
        char B[16], T[16], threads[16], program[] = "build/train_diffv2";
        FORMAT(B, "%d", c->B);
        FORMAT(T, "%d", c->T);
        FORMAT(threads, "%d", bench.threads);
        const char *train[] = {program, "--preset",  c->preset, "--attention", c->attention, "--batch-size",
                               B,       "--seq-len", T,         "--threads",   threads,      "--train-data",
                               shard,   "--steps",   "2",       NULL,          NULL};
        FILE *out = tmpfile();
        CHECK(out, "cannot make a temporary file: %s", strerror(errno));
        double peak = trainer_peak((char *const *)(uintptr_t)train, out);
        train[15] = "--dry-run";
        rewind(out);
        CHECK(ftruncate(fileno(out), 0) == 0, "cannot empty a temporary file: %s", strerror(errno));
        trainer_peak((char *const *)(uintptr_t)train, out);
        double planned = dry_run_total(out);
        printf("  %-8s %-8s %d x %-6d %10.1f MiB %12.1f MiB   %+.1f%%\n", c->preset, c->attention, c->B, c->T,
               peak / 1048576, planned / 1048576, 100 * (peak / planned - 1));
        fclose(out);
    }
    remove(shard);
}

// ---------------------------------------------------------------------------------------------------
// Data loader

enum { LOADER_SHARDS = 4, LOADER_TOKENS = 8 << 20, LOADER_SEPARATOR = 700 };

// Seconds for `count` tokens in batches of B windows, requested without a pause.
static double loader_seconds(const char *text, int B, int T, bool documents, int count) {
    DataLoader l;
    int *batch = (int *)checked_calloc(3 * (size_t)B * (size_t)T, sizeof(int)),
        *starts = documents ? batch + 2 * B * T : NULL;
    dataloader_open(&l, text, B, T, 50257, 0, 1, 1, true);
    l.documents = documents;
    for (int i = 0; i < l.corpus_count; i++) l.corpora[i].separator.token = LOADER_SEPARATOR;
    double start = now_seconds();
    dataloader_start(&l, 0);
    for (int done = 0; done < count; done += B * T) dataloader_next(&l, batch, batch + B * T, starts);
    double seconds = now_seconds() - start;
    dataloader_close(&l);
    free(batch);
    return seconds;
}

static void table_loader(void) {
    static const struct {
        const char *name;
        int B, T;
        bool mixed, documents;
    } cases[] = {
        {"one corpus", 8, 256, false, false},
        {"one corpus", 4, 1024, false, false},
        {"two corpora", 8, 256, true, false},
        {"two corpora, --doc-mask", 8, 256, true, true},
        {"two corpora, --doc-mask", 4, 1024, true, true},
    };
    enum { COUNT = 8 << 20 };
    if (!wanted("loader")) return;
    char directory[300], path[400], mixed[900];
    const char *tmp = getenv("TMPDIR");
    FORMAT(directory, "%s/diffv2_bench_XXXXXX", tmp && *tmp ? tmp : "/tmp");
    CHECK(mkdtemp(directory) != NULL, "cannot make a temporary directory %s: %s", directory, strerror(errno));
    for (int i = 0; i < LOADER_SHARDS; i++) {
        FORMAT(path, "%s/%c_%d.bin", directory, i % 2 ? 'b' : 'a', i);
        write_shard(path, LOADER_TOKENS, (uint64_t)i);
    }
    FORMAT(path, "%s/*.bin", directory);
    FORMAT(mixed, "a=%s/a_*.bin:0.7 b=%s/b_*.bin:0.3", directory, directory);
    printf("\nloader                              B     T   Mtokens/s  ns/token\n");
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        double seconds[64];
        for (int r = 0; r < bench.rounds; r++)
            seconds[r] =
                loader_seconds(cases[c].mixed ? mixed : path, cases[c].B, cases[c].T, cases[c].documents, COUNT);
        double each = median(seconds, bench.rounds) / COUNT;
        printf("  %-30s %5d %5d %11.1f %9.2f\n", cases[c].name, cases[c].B, cases[c].T, 1e-6 / each, 1e9 * each);
    }
    for (int i = 0; i < LOADER_SHARDS; i++) {
        FORMAT(path, "%s/%c_%d.bin", directory, i % 2 ? 'b' : 'a', i);
        unlink(path);
    }
    rmdir(directory);
}
