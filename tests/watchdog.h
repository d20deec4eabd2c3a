/*
watchdog.h: tests of the rendezvous and of the watchdog. Each test starts ranks as processes of this program that find
each other in a directory, as srun starts them, and stops, kills or fails some of them.
*/
#pragma once
#include "../llmc/comm/comm.h"
#include "../llmc/options/options.h"
#include "harness.h"

// ---- processes

typedef struct {
    TestDirectory dir;     // of their output and of the rendezvous
    int opened[2], end[2]; // pipes: a byte per rank that has opened its watchdog; closed to end all ranks
    int ranks;
    double start_timeout;
    const char *restart; // part of the identity of the start
} RankGroup;

static const char group_payload[] = "for all";

static void group_begin(RankGroup *c, int ranks, double start_timeout) {
    memset(c, 0, sizeof(*c));
    c->dir = test_make_directory();
    c->ranks = ranks, c->start_timeout = start_timeout, c->restart = "0";
    CHECK(pipe(c->opened) == 0 && pipe(c->end) == 0, "no pipes: %s", strerror(errno));
}

static void group_live(const RankGroup *c, int rank, void (*act)(int), int which) {
    char payload[sizeof(group_payload)] = "";
    CommStart start = {c->start_timeout, c->dir.path, false};
    Launch l;
    memset(&l, 0, sizeof(l));
    l.rank = comm.rank = rank, l.ranks = comm.ranks = c->ranks;
    setenv("SLURM_JOB_ID", "17", 1), setenv("SLURM_STEP_ID", "0", 1), setenv("SLURM_RESTART_COUNT", c->restart, 1);
    if (rank == 0) memcpy(payload, group_payload, sizeof(payload));
    launch_connect(&l, &start, payload, sizeof(payload));
    watch_timeout(1.5);
    CHECK(memcmp(payload, group_payload, sizeof(payload)) == 0, "rank %d did not get what rank 0 gives", rank);
    if (rank == 0) free(watch_await_ranks(launch_limit(&start, c->ranks)));
    CHECK(write(c->opened[1], "x", 1) == 1, "cannot tell that rank %d is open", rank);
    if (act) act(which);
    struct pollfd end = {c->end[0], POLLIN, 0};
    poll(&end, 1, 20000);
    program_exit(EXIT_DONE);
}

// stderr goes to the file `name`. act: what the rank does once it is open; NULL: it waits for the end of the test.
static pid_t group_start(const RankGroup *c, int rank, const char *name, void (*act)(int), int which) {
    const char *path = test_text("%s/%s", c->dir.path, name);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0, "cannot fork: %s", strerror(errno));
    if (pid > 0) return pid;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd < 0 || dup2(fd, 2) != 2 || close(c->end[1])) _exit(99);
    group_live(c, rank, act, which);
    return 0;
}

// Whether `count` ranks open within 10 s.
static bool group_opens(const RankGroup *c, int count) {
    char byte;
    for (double until = now_seconds() + 10; count > 0;) {
        struct pollfd one = {c->opened[0], POLLIN, 0};
        int left = (int)(1000 * (until - now_seconds()));
        if (left <= 0 || poll(&one, 1, left) != 1 || read(c->opened[0], &byte, 1) != 1) return false;
        count--;
    }
    return true;
}

// Waits for a process; returns its exit status and the text of the file `name`.
static int group_wait(const RankGroup *c, pid_t pid, const char *name, char *text, size_t size) {
    int status = 0;
    for (double until = now_seconds() + 20; waitpid(pid, &status, WNOHANG) == 0; usleep(2000))
        if (now_seconds() > until) kill(pid, SIGKILL);
    test_read_file(test_text("%s/%s", c->dir.path, name), text, size);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void group_ends(RankGroup *c) {
    if (c->end[1] >= 0) close(c->end[1]);
    c->end[1] = -1;
}
static void group_finish(RankGroup *c) {
    group_ends(c);
    close(c->opened[0]), close(c->opened[1]), close(c->end[0]);
}
static void group_expect(const RankGroup *c, pid_t pid, const char *name, int status, const char *words) {
    char text[16384];
    int is = group_wait(c, pid, name, text, sizeof(text));
    EXPECT(is == status, "%s ends with status %d, not %d: %.300s", name, is, status, text);
    EXPECT(words ? count_lines(text) == 1 && strstr(text, words) : !text[0], "%s prints: %.300s", name, text);
}
// Whether the directory of the start is there.
static bool group_directory(const RankGroup *c, const char *restart) {
    return directory_exists(test_text("%s/ranks.0.17.0.%s", c->dir.path, restart));
}

// ---- starts

// Only the directory that the identity names is read, and nothing of it is readable by others.
static void test_start_identity(void) {
    RankGroup c;
    struct stat directory, state, start;
    group_begin(&c, 2, 1);
    pid_t zero = group_start(&c, 0, "zero", NULL, 0), one = group_start(&c, 1, "one", NULL, 0);
    EXPECT(group_opens(&c, 2), "two ranks did not open");
    const char *path = test_text("%s/ranks.0.17.0.0", c.dir.path);
    EXPECT(stat(path, &directory) == 0 && stat(test_text("%s/1", path), &state) == 0 &&
               stat(test_text("%s/start", path), &start) == 0,
           "%s: %s", path, strerror(errno));
    EXPECT((directory.st_mode & 0777) == 0700 && (state.st_mode & 0777) == 0600 && (start.st_mode & 0777) == 0600,
           "modes %o, %o, %o", directory.st_mode, state.st_mode, start.st_mode);
    kill(zero, SIGKILL), kill(one, SIGKILL); // the files remain
    waitpid(zero, NULL, 0), waitpid(one, NULL, 0);
    EXPECT(group_directory(&c, "0"), "the directory of killed ranks is gone");
    c.restart = "1";
    zero = group_start(&c, 0, "again", NULL, 0);
    group_expect(&c, zero, "again", 1, "1 of 2 ranks (the first is rank 1) have not started within 1 s");
    EXPECT(!group_directory(&c, "1"), "the directory of a start that failed remains");
    c.restart = "2";
    one = group_start(&c, 1, "late", NULL, 0);
    group_expect(&c, one, "late", 1, "/ranks.0.17.0.2/start within 1 s");
    c.restart = "0";
    zero = group_start(&c, 0, "twice", NULL, 0);
    group_expect(&c, zero, "twice", 1, "another start has the same job, step and restart");
    group_finish(&c);
}

static void test_start_invalid_rank(void) {
    static const struct {
        int rank, ranks;
        const char *words;
    } cases[] = {{1, 3, "rank 1 has already started: start each rank once"},
                 {2, 4, "rank 2 is one of 4, and rank 0 one of 3: start all ranks with the same number of ranks"}};
    RankGroup c, other;
    group_begin(&c, 3, 10);
    pid_t zero = group_start(&c, 0, "zero", NULL, 0), one = group_start(&c, 1, "one", NULL, 0);
    EXPECT(group_opens(&c, 1), "rank 1 does not open");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *name = test_text("other%zu", i);
        other = c;
        other.ranks = cases[i].ranks;
        group_expect(&c, group_start(&other, cases[i].rank, name, NULL, 0), name, 1, cases[i].words);
    }
    pid_t two = group_start(&c, 2, "two", NULL, 0);
    EXPECT(group_opens(&c, 2), "rank 0 does not open when all ranks are there");
    group_ends(&c);
    group_expect(&c, zero, "zero", 0, NULL);
    group_expect(&c, one, "one", 0, NULL);
    group_expect(&c, two, "two", 0, NULL);
    EXPECT(!group_directory(&c, "0"), "the directory remains after a run without failures");
    group_finish(&c);
}

static void test_start_temporary_file(void) {
    RankGroup c;
    group_begin(&c, 2, 1);
    const char *path = test_text("%s/ranks.0.17.0.0", c.dir.path);
    CHECK(mkdir(path, 0700) == 0, "%s", strerror(errno));
    test_write_text(test_text("%s/start.new", path), "x");
    group_expect(&c, group_start(&c, 1, "one", NULL, 0), "one", 1, "has not written");
    CHECK(symlink("start", test_text("%s/start", path)) == 0, "%s", strerror(errno));
    group_expect(&c, group_start(&c, 1, "loop", NULL, 0), "loop", 1, "cannot open");
    const char *file = test_text("%s/start", path);
    CHECK(rename(test_text("%s/start.new", path), file) == 0, "%s", strerror(errno));
    if (chown(file, 65534, 65534) != 0) test_skip("only root can make a file of another user");
    else group_expect(&c, group_start(&c, 1, "two", NULL, 0), "two", 1, "/start is a file of another user");
    group_finish(&c);
}

// Rank 0 cannot write its file.
static void test_start_abandoned(void) {
    RankGroup c;
    Launch l = {0, 2, 0, 1, false};
    char payload[sizeof(group_payload)] = "";
    int status = 0;
    group_begin(&c, 2, 0.1);
    CommStart start = {c.start_timeout, test_text("%s/new", c.dir.path), false};
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0, "cannot fork: %s", strerror(errno));
    if (pid == 0) {
        const struct rlimit none = {0, 0};
        comm.ranks = 2;
        setenv("SLURM_JOB_ID", "17", 1);
        signal(SIGXFSZ, SIG_IGN);
        if (!freopen("/dev/null", "w", stderr) || setrlimit(RLIMIT_FSIZE, &none) != 0) _exit(99);
        launch_connect(&l, &start, payload, sizeof(payload));
        _exit(98);
    }
    EXPECT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 1, "status %d", status);
    EXPECT(!directory_exists(start.directory), "the directory of a start that failed remains");
    group_finish(&c);
}

// ---- failures

static void rank_waits(int collectives) {
    watch_step(8), watch_stage(STAGE_FORWARD);
    WATCH_SET(self.collectives, (uint64_t)collectives);
    watch_wait_begin();
    poll(NULL, 0, 20000);
}

static void rank_fails(int which) {
    if (which == 2) usleep(1500000); // a rank that comes late
    if (which == 3) warn("a line of rank 3 alone");
    warn("--lr is wrong");
    program_exit(EXIT_USAGE);
}
static void test_failure_once(void) {
    enum { RANKS = 12 };
    pid_t pids[RANKS];
    char text[16384];
    RankGroup c;
    group_begin(&c, RANKS, 10);
    for (int r = 0; r < RANKS; r++) pids[r] = group_start(&c, r, "all", rank_fails, r);
    for (int r = 0; r < RANKS; r++) {
        int status = group_wait(&c, pids[r], "all", text, sizeof(text));
        EXPECT(status == EXIT_USAGE, "rank %d: status %d", r, status);
    }
    EXPECT(count_lines(text) == 2 && strstr(text, "diffv2: --lr is wrong\n") &&
               strstr(text, "): a line of rank 3 alone"),
           "%.600s", text);
    EXPECT(!group_directory(&c, "0"), "the directory of a start that failed remains");
    group_finish(&c);
}

// A pipe without a reader in the place of the own file blocks the thread that writes it.
static void rank_files_stall(int unused) {
    (void)unused;
    const char *path = test_text("%s/%d", watch.path, watch.rank);
    if (unlink(path) != 0 || mkfifo(path, 0600) != 0) _exit(98);
    rank_waits(0);
}
static void test_files_stall(void) {
    RankGroup c;
    group_begin(&c, 2, 10);
    double begin = now_seconds();
    pid_t zero = group_start(&c, 0, "zero", rank_files_stall, 0), one = group_start(&c, 1, "one", NULL, 0);
    group_expect(&c, zero, "zero", 1, " s at step 8, in the forward, and ");
    EXPECT(now_seconds() - begin < 10, "that took %.1f s", now_seconds() - begin);
    kill(one, SIGKILL);
    waitpid(one, NULL, 0);
    group_finish(&c);
}

// ---- state files

static void test_state_fields(void) {
    static const char right[] =
        "5 host a step 3 phase save collectives 9 waiting 1.500000 device 1f locked 1 status -1 counter 5 time 1\n";
    static const struct {
        const char *what, *from, *to;
    } wrong[] = {{"a phase beyond the table", "save", "none"},
                 {"a phase without an end", "save", "savesavesavesavesave"},
                 {"a negative step", "step 3", "step -3"},
                 {"a wait that is not a number", "1.500000", "nan"},
                 {"a negative wait", "1.500000", "-1"},
                 {"an endless wait", "1.500000", "inf"},
                 {"a status beyond those of a process", "status -1", "status 256"},
                 {"a status below that of a rank that runs", "status -1", "status -2"},
                 {"a part of an older state", "counter 5", "counter 4"},
                 {"a field left out", "locked 1 ", ""},
                 {"a text that ends early", " status", ""},
                 {"no text", "5 host", ""}};
    WatchState s;
    EXPECT(watch_parse(right, &s), "a right state is refused");
    EXPECT(s.counter == 5 && strcmp(s.host, "a") == 0 && s.step == 3 && s.stage == STAGE_SAVE && s.collectives == 9 &&
               s.waiting == 1.5 && s.device == 0x1f && s.locked == 1 && s.status == -1,
           "a state is read as others");
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        const char *at = strstr(right, wrong[i].from);
        CHECK(at, "'%s' is no part of the state", wrong[i].from);
        bool ends = !wrong[i].to[0] && strcmp(wrong[i].from, "locked 1 ") != 0;
        const char *text =
            test_text("%.*s%s%s", (int)(at - right), right, wrong[i].to, ends ? "" : at + strlen(wrong[i].from));
        EXPECT(!watch_parse(text, &s), "%s is accepted: %s", wrong[i].what, text);
    }
}

// What is written is read, a longer state leaves nothing in a shorter one, and a file of another length is not used.
static void test_state_file(void) {
    char text[WATCH_BYTES + 1];
    WatchState s, self = watch.self;
    const char *path = test_file("0");
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    FORMAT(watch.self.host, "ho\x1b[31mst\n\xC3\xA4");
    watch_clean_host(watch.self.host);
    watch.self.step = INT64_MAX, watch.self.device = UINT64_MAX, watch.self.stage = STAGE_PARAMETERS;
    EXPECT(watch_write(fd) && watch_read(fd, &s), "a state is not read again");
    EXPECT(strcmp(s.host, "ho?[31mst???") == 0 && s.step == INT64_MAX && s.device == UINT64_MAX, "%s", s.host);
    watch.self.step = 1, watch.self.device = 0;
    EXPECT(watch_write(fd) && watch_read(fd, &s) && s.step == 1 && s.status == -1, "a shorter state is not read");
    test_read_file(path, text, sizeof(text));
    EXPECT(count_lines(text) == 1, "%s", text);
    EXPECT(ftruncate(fd, WATCH_BYTES / 2) == 0 && !watch_read(fd, &s), "half a state is accepted");
    close(fd);
    watch.self = self;
    char control[] =
        "5 host a\x1b]0;b\x7F\xC2\x9B step 3 phase save collectives 9 waiting 1 device 0 locked 1 status -1 counter 5";
    EXPECT(watch_parse(control, &s) && strcmp(s.host, "a?]0;b???") == 0, "%s", s.host);
}

static void test_start_options(void) {
    static const struct {
        const char *options;
        CommStart start;
    } cases[] = {
        {"", {60, NULL, false}},
        {"--lr x --out --no-deterministic", {60, NULL, true}},
        {"--lr --start-timeout=1e3 --out a", {1000, "a", false}},
        {"--start-timeout -1 --out=a", {60, "a", false}},
        {"--start-timeout 2.5 --rendezvous=b --out a", {2.5, "b", false}},
        {"--out a --rendezvous=", {60, "a", false}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *words[8];
        Options o;
        options_read(&o, test_words(words, 8, test_text("t %s", cases[i].options)), words);
        CommStart start = options_comm_start(&o), want = cases[i].start;
        EXPECT(start.nvls == want.nvls, "%s: nvls is %d", cases[i].options, start.nvls);
        EXPECT(start.timeout == want.timeout, "%s: %g s", cases[i].options, start.timeout);
        EXPECT(want.directory ? start.directory && strcmp(start.directory, want.directory) == 0 : !start.directory,
               "%s: directory %s", cases[i].options, start.directory ? start.directory : "(none)");
        options_free(&o);
    }
    CommStart start = {60, NULL, false};
    EXPECT(launch_limit(&start, 2) < 61 && launch_limit(&start, 1000) >= 120, "1000 ranks have as long as 2");
}

static const Test watchdog_tests[] = {
    {"a file of an earlier start is not read", test_start_identity},
    {"a process with an invalid rank number is rejected", test_start_invalid_rank},
    {"a rendezvous file that is not complete is not read", test_start_temporary_file},
    {"a start that fails before all ranks have connected leaves no directory", test_start_abandoned},
    {"a line of several ranks is printed once, and all end with the same status", test_failure_once},
    {"a file system that does not answer does not stop the end of the run", test_files_stall, 2},
    {"every field of a state is checked", test_state_fields},
    {"incomplete states are not used, and states cannot control the terminal", test_state_file},
    {"--start-timeout, the directory and --no-deterministic decide how ranks connect", test_start_options},
};
