/*
watchdog_peers.h: what the watchdogs of ranks are to each other: state, messages, connections (watchdog.h).
*/
#ifndef LLMC_WATCHDOG_PEERS_H
#define LLMC_WATCHDOG_PEERS_H
#include "common.h"

// clang-format off
typedef enum {
    PHASE_START, PHASE_DATA, PHASE_FORWARD, PHASE_BACKWARD, PHASE_GRADIENTS, PHASE_UPDATE, PHASE_PARAMETERS,
    PHASE_VALIDATION, PHASE_CHECK, PHASE_SAVE, PHASE_LOG, PHASE_END
} Phase;
// clang-format on
static const char *const phase_names[] = {
    "starting",           "reading data",        "in the forward",       "in the backward",
    "reducing gradients", "updating weights",    "gathering parameters", "validating",
    "comparing ranks",    "saving a checkpoint", "writing the log",      "ending"};

enum { WATCH_HOST = 64, WATCH_TEXT = 6000, WATCH_ADDRESSES = 8, WATCH_LINES = 64 };
static const double WATCH_TIMEOUT = 600, WATCH_GRACE = 0.4; // seconds; the latter to hear of other ranks' failures

typedef struct {
    char host[WATCH_HOST];
    uint32_t ip[WATCH_ADDRESSES]; // network byte order; 0: none
    uint16_t port;
    uint64_t token;  // of the run: a stranger's connection is not a rank's
    double patience; // seconds until it must listen there; 0: it does
} WatchAddress;

typedef enum { WATCH_HELLO, WATCH_BEAT, WATCH_BYE, WATCH_FAILED, WATCH_END } WatchKind;
typedef struct {
    uint64_t token;
    int kind, rank, status, phase;
    int64_t step;
    uint64_t collectives; // that the rank has waited for to their end, or to which its device has come
    double waiting;       // seconds in the present one; 0: it does not wait
    uint64_t device;      // that this rank computes on, unlike all others of the world; 0: shared ones
    char host[WATCH_HOST];
    char text[WATCH_TEXT]; // of WATCH_FAILED: lines
} WatchMessage;
// a heartbeat goes without the text
static inline size_t watch_bytes(int kind) {
    return kind == WATCH_FAILED ? sizeof(WatchMessage) : offsetof(WatchMessage, text);
}

typedef struct {
    int fd; // -1: closed
    bool gone;
    double heard; // when
    WatchMessage last;
} WatchPeer;

static struct {
    bool on, leaving;
    int rank, ranks, status, listener;
    uint64_t token, device;
    double timeout, resumed; // the latter: when this process was last found to have been stopped; 0: never
    char host[WATCH_HOST];
    // what this rank is doing
    int phase;
    int64_t step;
    uint64_t collectives;
    double wait_begin; // 0: does not wait
    // lines that rank 0 has printed, as hashes, or that another rank would print should it fail
    uint64_t printed[WATCH_LINES];
    int printed_count;
    char pending[WATCH_TEXT];
    pthread_mutex_t lock; // of the lines and of sending
    pthread_t thread;
    WatchPeer *peers; // rank 0: of each rank; else one, rank 0
    int peer_count;
} watch = {false, false, 0, 1, 0, -1, 0, 0, 0, 0, "", 0, 0, 0, 0, {0}, 0, "", PTHREAD_MUTEX_INITIALIZER, 0, NULL, 0};

#define WATCH_SET(field, value) __atomic_store_n(&watch.field, (value), __ATOMIC_RELAXED)
#define WATCH_GET(field) __atomic_load_n(&watch.field, __ATOMIC_RELAXED)
static inline void watch_phase(Phase phase) { WATCH_SET(phase, (int)phase); }
static inline void watch_step(int64_t step) { WATCH_SET(step, step); }
static inline double watch_wait_start(void) { // doubles have no atomic builtins for the load of a value
    double t;
    __atomic_load(&watch.wait_begin, &t, __ATOMIC_RELAXED);
    return t;
}
static inline void watch_wait_begin(void) {
    double now = now_seconds();
    __atomic_store(&watch.wait_begin, &now, __ATOMIC_RELAXED);
}
static inline void watch_wait_end(void) {
    double none = 0;
    __atomic_store(&watch.wait_begin, &none, __ATOMIC_RELAXED);
    WATCH_SET(collectives, WATCH_GET(collectives) + 1);
}
// A device goes on behind the host's back: the collectives it has come to, and whether it waits in one.
static inline void watch_device(uint64_t collectives, bool waiting) {
    double none = 0;
    WATCH_SET(collectives, collectives);
    if (waiting) watch_wait_begin();
    else __atomic_store(&watch.wait_begin, &none, __ATOMIC_RELAXED);
}
static inline void watch_timeout(double seconds) { __atomic_store(&watch.timeout, &seconds, __ATOMIC_RELAXED); }
static inline double watch_limit(void) {
    double t;
    __atomic_load(&watch.timeout, &t, __ATOMIC_RELAXED);
    return t;
}

static inline WatchMessage watch_message(WatchKind kind) {
    WatchMessage m;
    memset(&m, 0, sizeof(m));
    double begin = watch_wait_start();
    m.token = watch.token, m.kind = (int)kind, m.rank = watch.rank, m.status = watch.status, m.phase = WATCH_GET(phase),
    m.step = WATCH_GET(step);
    m.device = watch.device;
    m.collectives = WATCH_GET(collectives), m.waiting = begin > 0 ? now_seconds() - begin : 0;
    memcpy(m.host, watch.host, WATCH_HOST);
    return m;
}

// A peer that is gone, or whose buffers are full because it is stopped, does not hold the sender up.
static inline void watch_send(WatchPeer *p, const WatchMessage *m) {
    pthread_mutex_lock(&watch.lock);
    if (p->fd >= 0) {
        ssize_t n = send(p->fd, m, watch_bytes(m->kind), MSG_NOSIGNAL | (m->kind == WATCH_FAILED ? 0 : MSG_DONTWAIT));
        (void)n; // a heartbeat that is lost is late; a connection that is lost is seen by its reader
    }
    pthread_mutex_unlock(&watch.lock);
}

// One message; false when the connection has ended.
static inline bool watch_receive(int fd, WatchMessage *m) {
    char *to = (char *)m;
    size_t have = 0, want = watch_bytes(WATCH_BEAT);
    memset(m, 0, sizeof(*m));
    while (have < want) {
        ssize_t n = recv(fd, to + have, want - have, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        have += (size_t)n;
        if (have >= watch_bytes(WATCH_BEAT)) want = watch_bytes(m->kind);
    }
    return m->token == watch.token;
}

// ---- connections

static inline void watch_fill_address(WatchAddress *a) {
    struct ifaddrs *all = NULL;
    int count = 0;
    memset(a, 0, sizeof(*a));
    gethostname(a->host, sizeof(a->host) - 1);
    if (getifaddrs(&all) == 0) {
        for (struct ifaddrs *i = all; i && count < WATCH_ADDRESSES; i = i->ifa_next) {
            if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET) continue;
            struct sockaddr_in in;
            memcpy(&in, i->ifa_addr, sizeof(in));
            if (in.sin_addr.s_addr != htonl(INADDR_LOOPBACK)) a->ip[count++] = in.sin_addr.s_addr;
        }
        freeifaddrs(all);
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t words[3] = {(uint64_t)now.tv_sec, (uint64_t)now.tv_nsec, (uint64_t)getpid()};
    a->token = XXH3_64bits(words, sizeof(words));
}

// Rank 0, first half: listens, at a port that the others know or, with 0, at any, so that they can be told where.
static inline void watch_listen(WatchAddress *a, uint16_t port) {
    int yes = 1;
    if (port == 0) watch_fill_address(a);
    struct sockaddr_in in;
    socklen_t length = sizeof(in);
    memset(&in, 0, sizeof(in));
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = htonl(INADDR_ANY);
    in.sin_port = htons(port);
    watch.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    // the last run's port is this one's
    if (port) setsockopt(watch.listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    CHECK(watch.listener >= 0 && bind(watch.listener, (struct sockaddr *)&in, sizeof(in)) == 0 &&
              listen(watch.listener, 1024) == 0 && getsockname(watch.listener, (struct sockaddr *)&in, &length) == 0,
          "cannot listen for the other ranks%s: %s",
          port ? " at the port that follows from the job (MASTER_PORT is another)" : "", strerror(errno));
    a->port = ntohs(in.sin_port);
}

static inline bool watch_connect_to(uint32_t ip, uint16_t port, int *fd) {
    struct sockaddr_in in;
    memset(&in, 0, sizeof(in));
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = ip;
    in.sin_port = htons(port);
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {10, 0}; // of connect too
    if (*fd >= 0) setsockopt(*fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (*fd >= 0 && connect(*fd, (struct sockaddr *)&in, sizeof(in)) == 0) return true;
    if (*fd >= 0) close(*fd);
    return false;
}

static inline int watch_connect(const WatchAddress *a) {
    int fd = -1;
    double until = now_seconds() + a->patience;
    do {
        if (strcmp(a->host, watch.host) == 0 && watch_connect_to(htonl(INADDR_LOOPBACK), a->port, &fd)) return fd;
        for (int i = 0; i < WATCH_ADDRESSES && a->ip[i]; i++)
            if (watch_connect_to(a->ip[i], a->port, &fd)) return fd;
    } while (now_seconds() < until && usleep(100000) == 0);
    CHECK(false, "rank %d on %s cannot reach rank 0 on %s (port %d): %s", watch.rank, watch.host, a->host, a->port,
          strerror(errno));
    return -1;
}

// Rank 0, second half: takes the connections of all ranks.
static inline void watch_accept(void) {
    for (int missing = watch.ranks - 1; missing > 0;) {
        struct pollfd ready = {watch.listener, POLLIN, 0};
        CHECK(poll(&ready, 1, 60000) > 0, "%d of %d ranks have not come to rank 0 within 60 s", missing, watch.ranks);
        int fd = accept4(watch.listener, NULL, NULL, SOCK_CLOEXEC);
        struct timeval limit = {10, 0};
        if (fd < 0) continue;
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        WatchMessage m;
        bool one_of_us = watch_receive(fd, &m) && m.kind == WATCH_HELLO && m.rank > 0 && m.rank < watch.ranks &&
                         watch.peers[m.rank].fd < 0;
        if (!one_of_us) {
            close(fd);
            continue;
        }
        watch.peers[m.rank].fd = fd;
        watch.peers[m.rank].last = m;
        missing--;
    }
    close(watch.listener);
}

// What rank 0 knows and all others are to know, once all are connected.
static inline void watch_give(void *data, size_t bytes) {
    size_t have = 0;
    for (int i = 0; i < watch.peer_count; i++) {
        if (watch.peers[i].fd < 0 || bytes == 0) continue;
        ssize_t n = watch.rank == 0 ? send(watch.peers[i].fd, data, bytes, MSG_NOSIGNAL) : 0;
        while (watch.rank > 0 && have < bytes &&
               (n = recv(watch.peers[i].fd, (char *)data + have, bytes - have, 0)) > 0)
            have += (size_t)n;
        CHECK(watch.rank == 0 ? n == (ssize_t)bytes : have == bytes, "rank %d has lost rank %d at the start",
              watch.rank, watch.rank == 0 ? i : 0);
    }
}
#endif
