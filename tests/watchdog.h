/*
watchdog.h: tests of authentication and of the watchdog's messages. Each test starts ranks as processes of this program,
on loopback, and connects to them as an intruder without the secret, as a rank that sends invalid messages, or listens
on the port of rank 0.
*/
#ifndef TESTS_WATCHDOG_H
#define TESTS_WATCHDOG_H
#include "../llmc/options/options.h"
#include "../llmc/comm/watchdog.h"
#include "harness.h"

// ---- processes

typedef struct {
    TestDirectory dir; // of their output
    WatchAddress address;
    int opened[2], end[2]; // pipes: a byte per rank that has opened its watchdog; closed to end all ranks
    int ranks;
    double start_timeout;
} RankGroup;

typedef struct {
    const RankGroup *group;
    int rank;
    void (*tamper)(WatchPeer *peer,
                   int which); // sends invalid messages once all ranks are connected; NULL: a normal rank
    int which;
} GroupMember;

static const char group_payload[] = "for all";

static void group_begin(RankGroup *c, int ranks, double start_timeout) {
    memset(c, 0, sizeof(*c));
    c->dir = test_make_directory();
    c->ranks = ranks, c->start_timeout = start_timeout;
    CHECK(pipe(c->opened) == 0 && pipe(c->end) == 0, "no pipes: %s", strerror(errno));
    watch_listen(&c->address, 0);
    memset(c->address.ip, 0, sizeof(c->address.ip)); // loopback alone
}

static void group_live(const GroupMember *m) {
    char payload[sizeof(group_payload)] = "";
    if (m->rank == 0) memcpy(payload, group_payload, sizeof(payload));
    watch_open(m->rank, m->group->ranks, &m->group->address, m->group->start_timeout, payload, sizeof(payload));
    watch_timeout(1.5);
    CHECK(memcmp(payload, group_payload, sizeof(payload)) == 0, "rank %d did not get what rank 0 gives", m->rank);
    CHECK(write(m->group->opened[1], "x", 1) == 1, "cannot tell that rank %d is open", m->rank);
    if (m->tamper) m->tamper(&watch.peers[m->rank == 0 ? 1 : 0], m->which);
    struct pollfd end = {m->group->end[0], POLLIN, 0};
    poll(&end, 1, 20000);
    program_exit(EXIT_DONE);
}

// stderr goes to the file `name`.
static pid_t group_start(const RankGroup *c, int rank, const char *name, void (*tamper)(WatchPeer *, int), int which) {
    char path[600];
    GroupMember m = {c, rank, tamper, which};
    FORMAT(path, "%s/%s", c->dir.path, name);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0, "cannot fork: %s", strerror(errno));
    if (pid > 0) return pid;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || dup2(fd, 2) != 2 || close(c->end[1]) || (rank != 0 && close(watch.listener))) _exit(99);
    group_live(&m);
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

// Waits for a process; returns its exit status and its stderr in `text`.
static int group_wait(const RankGroup *c, pid_t pid, const char *name, char *text, size_t size) {
    char path[600];
    int status = 0;
    for (double until = now_seconds() + 20; waitpid(pid, &status, WNOHANG) == 0; usleep(2000))
        if (now_seconds() > until) kill(pid, SIGKILL);
    FORMAT(path, "%s/%s", c->dir.path, name);
    test_read_file(path, text, size);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Connects to rank 0 as `rank`, without a process; returns the connection, or -1 if it is not admitted.
static int group_join_here(const RankGroup *c, int rank) {
    WatchPeer *p = (WatchPeer *)checked_calloc(1, sizeof(WatchPeer));
    WatchMessage answer;
    watch.rank = rank, watch.ranks = c->ranks;
    bool admitted = watch_connect_socket(htonl(INADDR_LOOPBACK), c->address.port, &p->fd) &&
                    watch_handshake(p, &c->address, now_seconds() + 10, &answer) && answer.kind == WATCH_WELCOME;
    int fd = admitted ? p->fd : -1;
    free(p);
    watch.rank = 0, watch.ranks = 1;
    return fd;
}

// Closes this process's copy of the listener, after rank 0 has been started.
static void group_stop_listening(void) {
    if (watch.listener >= 0) close(watch.listener);
    watch.listener = -1;
}
static void group_ends(RankGroup *c) {
    if (c->end[1] >= 0) close(c->end[1]);
    c->end[1] = -1;
}
static void group_finish(RankGroup *c) {
    group_ends(c);
    group_stop_listening();
    close(c->opened[0]), close(c->opened[1]), close(c->end[0]);
    test_remove_directory(&c->dir);
}
static void group_expect(const RankGroup *c, pid_t pid, const char *name, int status, const char *words) {
    char text[16384];
    int is = group_wait(c, pid, name, text, sizeof(text));
    EXPECT(is == status, "%s ends with status %d, not %d: %.300s", name, is, status, text);
    EXPECT(words ? count_lines(text) == 1 && strstr(text, words) : !text[0], "%s prints: %.300s", name, text);
}

// ---- intruders

static int intruder_connect(uint16_t port) {
    int fd = -1;
    return watch_connect_socket(htonl(INADDR_LOOPBACK), port, &fd) ? fd : -1;
}

typedef enum { INTRUDER_SILENT, INTRUDER_HALF, INTRUDER_GARBAGE, INTRUDER_GUESSES, INTRUDER_KINDS } IntruderKind;

// Connects as an intruder of this kind; the connection stays open.
static int intruder_comes(uint16_t port, IntruderKind kind) {
    static unsigned char bytes[1 << 16];
    int fd = intruder_connect(port);
    TestRandom random = {(uint64_t)kind + 1};
    if (fd < 0 || kind == INTRUDER_SILENT) return fd;
    size_t n = kind == INTRUDER_HALF ? sizeof(WatchNonce) + 20 : sizeof(bytes);
    for (size_t i = 0; i < n; i++) bytes[i] = (unsigned char)test_random_bits(&random);
    if (kind == INTRUDER_GUESSES) { // a correct message of rank 1 of 2, except for the hash
        WatchMessage hello;
        memset(&hello, 0, sizeof(hello));
        hello.kind = WATCH_HELLO, hello.rank = 1, hello.ranks = 2;
        memcpy(bytes + sizeof(WatchNonce), &hello, watch_bytes(WATCH_HELLO));
        n = sizeof(WatchNonce) + watch_bytes(WATCH_HELLO);
    }
    ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent;
    return fd;
}

static void test_start_intruders(void) {
    enum { INTRUDERS = WATCH_PENDING + 40 };
    int fds[INTRUDERS];
    RankGroup c;
    group_begin(&c, 3, 10);
    for (int i = 0; i < INTRUDERS; i++)
        fds[i] = intruder_comes(c.address.port, i < INTRUDERS - 20 ? INTRUDER_SILENT : (IntruderKind)(i % 4 + 1));
    pid_t zero = group_start(&c, 0, "zero", NULL, 0);
    usleep(100000);
    double begin = now_seconds();
    pid_t one = group_start(&c, 1, "one", NULL, 0), two = group_start(&c, 2, "two", NULL, 0);
    group_stop_listening();
    EXPECT(group_opens(&c, 3), "three ranks did not open within 10 s beside %d intruders", INTRUDERS);
    EXPECT(now_seconds() - begin < 4, "they took %.1f s", now_seconds() - begin);
    int late = intruder_connect(c.address.port);
    EXPECT(late < 0, "rank 0 listens after the start");
    group_ends(&c);
    group_expect(&c, zero, "zero", 0, NULL);
    group_expect(&c, one, "one", 0, NULL);
    group_expect(&c, two, "two", 0, NULL);
    for (int i = 0; i < INTRUDERS; i++)
        if (fds[i] >= 0) close(fds[i]);
    group_finish(&c);
}

static void test_start_timeout(void) {
    RankGroup c;
    group_begin(&c, 3, 1);
    double begin = now_seconds();
    int garbage = intruder_comes(c.address.port, INTRUDER_GARBAGE),
        guess = intruder_comes(c.address.port, INTRUDER_GUESSES);
    pid_t zero = group_start(&c, 0, "zero", NULL, 0), one = group_start(&c, 1, "one", NULL, 0);
    group_expect(&c, zero, "zero", 1,
                 "1 of 3 ranks (the first is rank 2) have not connected to rank 0 within 1 s (--start-timeout); 2 "
                 "connections without the run's secret were rejected");
    group_expect(&c, one, "one", 1, "rank 1 lost its connection to rank 0 during the start");
    EXPECT(now_seconds() - begin < 6, "that took %.1f s", now_seconds() - begin);
    close(garbage), close(guess);
    group_finish(&c);
}

static void test_connection_unauthenticated(void) {
    static const IntruderKind kinds[] = {INTRUDER_SILENT, INTRUDER_HALF};
    int fds[2];
    char bytes[100];
    RankGroup c;
    group_begin(&c, 2, 30);
    pid_t zero = group_start(&c, 0, "zero", NULL, 0);
    group_stop_listening();
    for (int i = 0; i < 2; i++) fds[i] = intruder_comes(c.address.port, kinds[i]);
    double begin = now_seconds();
    for (int i = 0; i < 2; i++) {
        struct timeval limit = {15, 0};
        setsockopt(fds[i], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        EXPECT(recv(fds[i], bytes, sizeof(WatchNonce), MSG_WAITALL) == (ssize_t)sizeof(WatchNonce), "no number came");
        ssize_t n = recv(fds[i], bytes, sizeof(bytes), 0);
        EXPECT(n == 0 || (n < 0 && errno == ECONNRESET), "connection %d is not closed", i);
        close(fds[i]);
    }
    EXPECT(now_seconds() - begin < 15, "they were closed after %.1f s", now_seconds() - begin);
    kill(zero, SIGKILL);
    group_expect(&c, zero, "zero", 128 + SIGKILL, NULL);
    group_finish(&c);
}

// Processes of the run that were started with wrong numbers: rank 0 refuses them and continues.
static void test_connection_invalid_rank(void) {
    static const struct {
        int rank, ranks;
        const char *words;
    } cases[] = {{1, 3, "rank 1 has already connected"},
                 {3, 3, "it is rank 3 of 3, and rank 0 has 3 ranks"},
                 {2, 4, "it is rank 2 of 4, and rank 0 has 3 ranks"},
                 {INT_MAX, 3, "it is rank 2147483647 of 3"},
                 {-5, 3, "it is rank -5 of 3"}};
    RankGroup c, other;
    group_begin(&c, 3, 30);
    pid_t zero = group_start(&c, 0, "zero", NULL, 0);
    int first = group_join_here(&c, 1);
    EXPECT(first >= 0, "rank 1 is not admitted");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        other = c;
        other.ranks = cases[i].ranks;
        group_expect(&c, group_start(&other, cases[i].rank, "other", NULL, 0), "other", 1, cases[i].words);
    }
    close(first); // it has failed before all are there, and is started again
    int again = group_join_here(&c, 1), two = group_join_here(&c, 2);
    group_stop_listening();
    EXPECT(again >= 0 && two >= 0, "rank 1 is not admitted again, or rank 2 is not");
    EXPECT(group_opens(&c, 1), "rank 0 does not open when all ranks are there");
    close(again);
    group_expect(&c, zero, "zero", 1, "rank 1 (");
    close(two);
    group_finish(&c);
}

// A process listens on the port of rank 0 and sends nothing, random bytes, or the rank's own bytes.
static void test_connection_false_rank_0(void) {
    for (int kind = 0; kind < 3; kind++) {
        static unsigned char bytes[65536];
        RankGroup c;
        group_begin(&c, 2, 0.6);
        memset(bytes, 'x', sizeof(bytes));
        double until = now_seconds() + 1.5;
        pid_t one = group_start(&c, 1, "one", NULL, 0);
        int taken = 0;
        while (now_seconds() < until) {
            struct pollfd ready = {watch.listener, POLLIN, 0};
            int fd = poll(&ready, 1, 100) == 1 ? accept(watch.listener, NULL, NULL) : -1;
            if (fd < 0) continue;
            taken++;
            ssize_t n = kind ? send(fd, bytes, kind == 1 ? sizeof(bytes) : sizeof(WatchNonce), MSG_NOSIGNAL) : 0;
            struct timeval limit = {0, 100000};
            setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
            while (kind == 2 && (n = recv(fd, bytes, sizeof(bytes), 0)) > 0) send(fd, bytes, n, MSG_NOSIGNAL);
            if (kind) close(fd);
        }
        EXPECT(taken > 0, "nobody came to the listener");
        group_stop_listening();
        group_expect(&c, one, "one", 1, "the process that listens there does not authenticate as rank 0 of this run");
        group_finish(&c);
    }
}

// The bytes that a rank has sent to one listener do not authenticate to another.
static void test_handshake_replay(void) {
    const size_t bytes = sizeof(WatchNonce) + watch_bytes(WATCH_HELLO);
    char recorded[1000], more[1000];
    RankGroup c;
    WatchNonce number = {{1, 2}};
    CHECK(bytes <= sizeof(recorded), "HELLO has %zu bytes", bytes);
    group_begin(&c, 2, 1.5);
    pid_t one = group_start(&c, 1, "one", NULL, 0);
    struct pollfd ready = {watch.listener, POLLIN, 0};
    poll(&ready, 1, 5000);
    int fd = accept(watch.listener, NULL, NULL);
    EXPECT(send(fd, &number, sizeof(number), MSG_NOSIGNAL) == (ssize_t)sizeof(number), "%s", strerror(errno));
    EXPECT(recv(fd, recorded, bytes, MSG_WAITALL) == (ssize_t)bytes, "no introduction came");
    kill(one, SIGKILL);
    group_expect(&c, one, "one", 128 + SIGKILL, NULL);
    close(fd);
    pid_t zero = group_start(&c, 0, "zero", NULL, 0);
    fd = intruder_connect(c.address.port);
    EXPECT(recv(fd, more, sizeof(number), MSG_WAITALL) == (ssize_t)sizeof(number), "rank 0 sends no number");
    EXPECT(send(fd, recorded, bytes, MSG_NOSIGNAL) == (ssize_t)bytes, "%s", strerror(errno));
    memcpy(&number, more, sizeof(number));
    ssize_t answer = recv(fd, more, sizeof(more), 0);
    EXPECT(answer <= 0, "rank 0 answers with %zd bytes", answer);
    int other = intruder_connect(c.address.port);
    EXPECT(recv(other, more, sizeof(number), MSG_WAITALL) == (ssize_t)sizeof(number) &&
               memcmp(more, &number, sizeof(number)) != 0,
           "rank 0 uses one number twice");
    close(other);
    group_stop_listening();
    group_expect(&c, zero, "zero", 1, "2 connections without the run's secret were rejected");
    close(fd);
    group_finish(&c);
}

// ---- ranks that send invalid messages

typedef struct {
    const char *what;
    int kind, rank, ranks, status, phase;
    int64_t step;
    double waiting;
    int number; // added to the right one
    char host_fill, text_fill;
} Forgery;

static const Forgery forgeries_by_rank_1[] = {
    {"a phase beyond the table", WATCH_HEARTBEAT, 1, 2, 0, 100000000, 0, 0, 0, 0, 0},
    {"a phase one beyond the table", WATCH_HEARTBEAT, 1, 2, 0, PHASE_COUNT, 0, 0, 0, 0, 0},
    {"a negative phase", WATCH_FAILED, 1, 2, 1, -1, 0, 0, 0, 0, 0},
    {"a failure with status 0", WATCH_FAILED, 1, 2, 0, 0, 0, 0, 0, 0, 0},
    {"a failure with status 3", WATCH_FAILED, 1, 2, 3, 0, 0, 0, 0, 0, 0},
    {"a failure with status 256", WATCH_FAILED, 1, 2, 256, 0, 0, 0, 0, 0, 0},
    {"a farewell with status 1", WATCH_GOODBYE, 1, 2, 1, 0, 0, 0, 0, 0, 0},
    {"the end of the run", WATCH_END, 1, 2, 1, 0, 0, 0, 0, 0, 0},
    {"a kind that does not exist", 77, 1, 2, 0, 0, 0, 0, 0, 0, 0},
    {"a second introduction", WATCH_HELLO, 1, 2, 0, 0, 0, 0, 0, 0, 0},
    {"another rank", WATCH_HEARTBEAT, 0, 2, 0, 0, 0, 0, 0, 0, 0},
    {"a rank beyond the last", WATCH_HEARTBEAT, 1000000, 2, 0, 0, 0, 0, 0, 0, 0},
    {"another number of ranks", WATCH_HEARTBEAT, 1, 3, 0, 0, 0, 0, 0, 0, 0},
    {"a negative step", WATCH_HEARTBEAT, 1, 2, 0, 0, -1, 0, 0, 0, 0},
    {"a wait that is not a number", WATCH_HEARTBEAT, 1, 2, 0, 0, 0, (double)NAN, 0, 0, 0},
    {"a negative wait", WATCH_HEARTBEAT, 1, 2, 0, 0, 0, -1, 0, 0, 0},
    {"an endless wait", WATCH_HEARTBEAT, 1, 2, 0, 0, 0, (double)INFINITY, 0, 0, 0},
    {"a message left out", WATCH_HEARTBEAT, 1, 2, 0, 0, 0, 0, 1, 0, 0},
    {"a message twice", WATCH_HEARTBEAT, 1, 2, 0, 0, 0, 0, -1, 0, 0},
    {"a host without an end", WATCH_HEARTBEAT, 1, 2, 0, 0, 0, 0, 0, 'h', 0},
    {"a text without an end", WATCH_FAILED, 1, 2, 1, 0, 0, 0, 0, 0, 't'}};
static const Forgery forgeries_by_rank_0[] = {
    {"an end with status 0", WATCH_END, 0, 2, 0, 0, 0, 0, 0, 0, 0},
    {"an end with status 3", WATCH_END, 0, 2, 3, 0, 0, 0, 0, 0, 0},
    {"an end with status 512", WATCH_END, 0, 2, 512, 0, 0, 0, 0, 0, 0},
    {"a second start", WATCH_START, 0, 2, 0, 0, 0, 0, 0, 0, 0},
    {"a second welcome", WATCH_WELCOME, 0, 2, 0, 0, 0, 0, 0, 0, 0},
    {"a rank's failure", WATCH_FAILED, 0, 2, 1, 0, 0, 0, 0, 0, 0},
    {"another rank's heartbeat", WATCH_HEARTBEAT, 1, 2, 0, 0, 0, 0, 0, 0, 0},
    {"a phase beyond the table", WATCH_HEARTBEAT, 0, 2, 0, 100000000, 0, 0, 0, 0, 0}};

// With a valid hash, as from a rank with damaged memory, or from another program that has the secret.
static void forge(WatchPeer *p, const Forgery *f) {
    WatchMessage m = watch_message(WATCH_HEARTBEAT);
    m.kind = f->kind, m.rank = f->rank, m.ranks = f->ranks, m.status = f->status, m.phase = f->phase;
    m.step = f->step, m.waiting = f->waiting;
    if (f->host_fill) memset(m.host, f->host_fill, WATCH_HOST);
    if (f->text_fill) memset(m.text, f->text_fill, WATCH_TEXT);
    m.number = p->sent + (uint64_t)(int64_t)f->number;
    m.hash = watch_hash(&p->key_out, &m);
    ssize_t n = (ssize_t)watch_bytes(m.kind);
    if (send(p->fd, &m, n, MSG_NOSIGNAL) != n) _exit(98);
    poll(NULL, 0, 10000); // no more
}
static void forge_by_rank_1(WatchPeer *p, int which) {
    WATCH_SET(exiting, true); // no heartbeats besides
    pthread_join(watch.thread, NULL);
    forge(p, &forgeries_by_rank_1[which]);
}
static void forge_by_rank_0(WatchPeer *p, int which) {
    WATCH_SET(exiting, true);
    pthread_join(watch.thread, NULL);
    forge(p, &forgeries_by_rank_0[which]);
}

static void expect_forgery_is_noticed(const char *what, int forger, void (*tamper)(WatchPeer *, int), int which,
                                      const char *words) {
    char name[2][8] = {"zero", "one"}, text[16384];
    pid_t pids[2];
    RankGroup c;
    group_begin(&c, 2, 10);
    double begin = now_seconds();
    for (int rank = 0; rank < 2; rank++)
        pids[rank] = group_start(&c, rank, name[rank], rank == forger ? tamper : NULL, which);
    group_stop_listening();
    int status = group_wait(&c, pids[!forger], name[!forger], text, sizeof(text));
    double seconds = now_seconds() - begin;
    EXPECT(status == 1 && count_lines(text) == 1 && strstr(text, words), "%s by rank %d: status %d, %.300s", what,
           forger, status, text);
    EXPECT(seconds < 8, "%s by rank %d: noticed after %.1f s", what, forger, seconds);
    kill(pids[forger], SIGKILL);
    waitpid(pids[forger], NULL, 0);
    group_finish(&c);
}

static void test_message_fields(void) {
    for (size_t i = 0; i < sizeof(forgeries_by_rank_1) / sizeof(forgeries_by_rank_1[0]); i++)
        expect_forgery_is_noticed(forgeries_by_rank_1[i].what, 1, forge_by_rank_1, (int)i,
                                  ") has sent an invalid message");
    for (size_t i = 0; i < sizeof(forgeries_by_rank_0) / sizeof(forgeries_by_rank_0[0]); i++)
        expect_forgery_is_noticed(forgeries_by_rank_0[i].what, 0, forge_by_rank_0, (int)i,
                                  ") has sent an invalid message");
}

// A byte changed in transit, an intruder's bytes on a rank's connection, and half a message.
static void send_raw(WatchPeer *p, int which) {
    WatchMessage m = watch_message(WATCH_FAILED);
    WATCH_SET(exiting, true);
    pthread_join(watch.thread, NULL);
    m.status = 2;
    m.number = p->sent;
    m.hash = watch_hash(&p->key_out, &m);
    if (which == 0) m.status = 1;
    if (which == 1) memset(&m, 'x', sizeof(m));
    size_t n = which == 2 ? 50 : sizeof(m);
    if (send(p->fd, &m, n, MSG_NOSIGNAL) != (ssize_t)n) _exit(98);
    poll(NULL, 0, 10000);
}
static void test_message_damage(void) {
    expect_forgery_is_noticed("a changed byte", 1, send_raw, 0, "rank 1 (");
    expect_forgery_is_noticed("noise", 1, send_raw, 1, ") has sent an invalid message");
    expect_forgery_is_noticed("half a message", 1, send_raw, 2, ") has been unresponsive for 2 s");
}

static void fail_with_escapes(WatchPeer *p, int which) {
    (void)p, (void)which;
    FORMAT(watch.host, "ho\x1b[31mst\n");
    warn("a line\r\x1b]0;title\a with \xC3\xA4, \xC2\x9B"
         "2J, \x9B and \xFF");
    program_exit(EXIT_USAGE);
}
static void test_message_control_characters(void) {
    char text[16384];
    RankGroup c;
    group_begin(&c, 2, 10);
    pid_t zero = group_start(&c, 0, "zero", NULL, 0), one = group_start(&c, 1, "one", fail_with_escapes, 0);
    group_stop_listening();
    int status = group_wait(&c, zero, "zero", text, sizeof(text));
    EXPECT(status == EXIT_USAGE && count_lines(text) == 1, "status %d, %s", status, text);
    EXPECT(strstr(text, "): a line??]0;title? with \xC3\xA4, ??2J, ? and ?\n"), "%s", text);
    group_expect(&c, one, "one", EXIT_USAGE, NULL);
    group_finish(&c);

    char host[] = "a\nb\x1b\x7F\xC2\x85z";
    EXPECT(watch_clean_text(host, sizeof(host), true) && strcmp(host, "a\nb????z") == 0, "%s", host);
    EXPECT(watch_clean_text(host, sizeof(host), false) && strcmp(host, "a?b????z") == 0, "%s", host);
    char open_end[3] = {'a', 'b', 'c'};
    EXPECT(!watch_clean_text(open_end, sizeof(open_end), true), "a text without an end is accepted");
}

// A peer that was stopped for a long time finds complete messages when it reads again.
static void test_heartbeats_skipped(void) {
    enum { SENT = 20000 };
    WatchAddress a;
    static WatchPeer sender, reader;
    WatchMessage m = watch_message(WATCH_HELLO);
    WatchReceiveStatus receipt = WATCH_NOTHING;
    int small = 8192, taken = 0;
    watch_listen(&a, 0);
    sender.fd = intruder_connect(a.port), reader.fd = accept(watch.listener, NULL, NULL);
    setsockopt(sender.fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
    setsockopt(reader.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    sender.key_out = reader.key_in = a.secret;
    m.rank = reader.last.rank = 1;
    for (int i = 0; i < SENT; i++, m.kind = WATCH_HEARTBEAT) watch_send(&sender, &m);
    for (double until = now_seconds() + 1; now_seconds() < until; usleep(1000))
        while ((receipt = watch_receive(&reader, &m)) == WATCH_MESSAGE) taken++;
    EXPECT(receipt == WATCH_NOTHING && reader.have == 0, "after %d messages one is not whole", taken);
    EXPECT(taken > 10 && taken < SENT && (uint64_t)taken == sender.sent, "%d messages came of %d, %d were sent", taken,
           SENT, (int)sender.sent);
    close(sender.fd), close(reader.fd);
    group_stop_listening();
}

// ---- parts

static void test_siphash(void) {
    HashKey key, parsed;
    unsigned char bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = (unsigned char)i;
    key.word[0] = UINT64_C(0x0706050403020100), key.word[1] = UINT64_C(0x0f0e0d0c0b0a0908);
    EXPECT(keyed_hash(&key, bytes, 15) == UINT64_C(0xa129ca6149be45e5), "%" PRIx64, keyed_hash(&key, bytes, 15));
    EXPECT(keyed_hash(&key, bytes, 0) == UINT64_C(0x726fdb47dd0e0e31), "%" PRIx64, keyed_hash(&key, bytes, 0));
    EXPECT(keyed_hash(&key, bytes, 8) != keyed_hash(&key, bytes, 7), "the length does not count");
    HashKey a = hash_key_derive(&key, "a", "bc", 2), b = hash_key_derive(&key, "ab", "c", 1);
    EXPECT(memcmp(&a, &b, sizeof(a)) != 0 && a.word[0] != a.word[1], "two uses have one key");
    a = hash_key_random(), b = hash_key_random();
    EXPECT(memcmp(&a, &b, sizeof(a)) != 0 && a.word[0] != 0 && a.word[1] != 0, "two random keys are one");
    static WatchPeer peer;
    WatchNonce ours = watch_random_nonce(), theirs = watch_random_nonce();
    watch_set_keys(&peer, &key, ours, theirs);
    EXPECT(memcmp(&peer.key_in, &peer.key_out, sizeof(key)) != 0, "both directions of a connection have one key");
    EXPECT(hash_key_parse(&parsed, "0706050403020100"
                                   "0F0e0d0c0b0a0908") &&
               memcmp(&parsed, &key, sizeof(key)) == 0,
           "%" PRIx64 " %" PRIx64, parsed.word[0], parsed.word[1]);
    static const char *const wrong[] = {"00112233445566778899aabbccddeeffx",
                                        "",
                                        "0",
                                        "0706050403020100"
                                        "0f0e0d0c0b0a090",
                                        "0706050403020100"
                                        "0f0e0d0c0b0a09080",
                                        "0x06050403020100"
                                        "0f0e0d0c0b0a0908",
                                        " 706050403020100"
                                        "0f0e0d0c0b0a0908"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        EXPECT(!hash_key_parse(&parsed, wrong[i]), "'%s' is accepted", wrong[i]);
}

static void test_start_timeout_option(void) {
    static const struct {
        const char *arguments[4];
        double seconds;
    } cases[] = {{{"t", NULL, NULL, NULL}, 60},
                 {{"t", "--start-timeout", "2.5", NULL}, 2.5},
                 {{"t", "--start-timeout=7", NULL, NULL}, 7},
                 {{"t", "--start-timeout", NULL, NULL}, 60},
                 {{"t", "--start-timeout", "x", NULL}, 60},
                 {{"t", "--start-timeout=-1", NULL, NULL}, 60},
                 {{"t", "--start-timeouts", "3", NULL}, 60},
                 {{"t", "--lr", "--start-timeout=1e3", NULL}, 1000}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *argv[5] = {NULL, NULL, NULL, NULL, NULL};
        int argc = 0;
        for (; argc < 4 && cases[i].arguments[argc]; argc++) argv[argc] = (char *)cases[i].arguments[argc];
        double seconds = options_start_timeout(argc, argv);
        EXPECT(seconds == cases[i].seconds, "case %zu: %g s", i, seconds);
    }
}

static const Test watchdog_tests[] = {
    {"unauthenticated processes cannot join a start, delay it, or connect after it", test_start_intruders},
    {"a start without all ranks fails after --start-timeout", test_start_timeout},
    {"a connection that does not authenticate is closed", test_connection_unauthenticated},
    {"a process with an invalid rank number is rejected", test_connection_invalid_rank},
    {"a process that listens at rank 0's address without the secret is rejected", test_connection_false_rank_0},
    {"a recorded handshake cannot be replayed", test_handshake_replay},
    {"every field of a message is checked", test_message_fields},
    {"changed and incomplete messages are detected", test_message_damage},
    {"heartbeats to a peer that does not read are skipped, never truncated", test_heartbeats_skipped},
    {"messages of a rank cannot control the terminal", test_message_control_characters},
    {"the keyed hash is SipHash-2-4", test_siphash},
    {"--start-timeout is parsed before other options", test_start_timeout_option},
};
enum { WATCHDOG_TEST_COUNT = sizeof(watchdog_tests) / sizeof(watchdog_tests[0]) };
#endif
