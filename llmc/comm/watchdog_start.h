/*
watchdog_start.h: how the watchdogs of ranks find each other and prove to each other that they belong to one run.

  void watch_listen(address, port)   rank 0 first: listens at `port`; with 0 at any, and fills the whole address, with a
                                     random secret, for the others to be told
  void watch_accept_ranks(secret)          rank 0: returns when all ranks have proved themselves; the port is closed then
  void watch_connect(address)           the other ranks: returns when rank 0 has proved itself and has accepted this one
  void watch_send_payload(payload, bytes), watch_receive_payload(payload, bytes)   what rank 0 knows and all others are to know

  secret     128 random bits. By mpirun rank 0 draws them and MPI broadcasts them. By srun they are in the environment
             (comm_launch.h).
  proof      rank 0 sends a random number, a rank answers with another and HELLO, rank 0 with WELCOME. Two keys, one for
             each direction, are derived from the secret and both numbers; every message carries a keyed hash. So the
             secret is never sent, and nothing that was recorded can be used again.
  bounds     WATCH_PENDING connections wait for their proof at a time, 5 s each, none of them for another. When they are
             too many, the oldest is closed; a rank whose connection is closed tries again, until --start-timeout.

Whom this stops
  Anybody who can open connections to rank 0's port, or listen at it before rank 0 does, and knows all of the run but
  its secret: job id, options, program. Such a stranger gets no data, cannot be taken for a rank or for rank 0, and can
  neither end the run nor print in its name. What is left to it: connections at a rate beyond what rank 0 can turn away
  delay the start, which fails after --start-timeout; so does a process that holds rank 0's port.
Whom it does not stop
  - Who can read the network on which srun or MPI carry the secret to the processes: Slurm's messages and MPI's are not
    encrypted unless they are set up to be. The user's own processes and root can read it from /proc.
  - Who can read packets between the ranks sees hosts, steps, error lines and NCCL's id: nothing here is encrypted. Who
    can change them can break connections, which ends the run, but cannot forge messages of the watchdog.
  - What MPI and NCCL themselves send and accept: gradients and weights are neither encrypted nor authenticated. Use
    a network whose machines are trusted not to read and change the traffic of others.
*/
#ifndef LLMC_WATCHDOG_START_H
#define LLMC_WATCHDOG_START_H
#include "watchdog_peers.h"

enum { WATCH_PENDING = 128 };
static const double WATCH_AUTH_SECONDS = 5, WATCH_PENDING_MIN_SECONDS = 0.2;

typedef struct {
    uint64_t word[2];
} WatchNonce; // random, for one connection

static inline WatchNonce watch_random_nonce(void) {
    HashKey random = hash_key_random();
    WatchNonce n = {{random.word[0], random.word[1]}};
    return n;
}

// Keys of a connection, from the random numbers of both ends.
static inline void watch_set_keys(WatchPeer *p, const HashKey *secret, WatchNonce of_rank_0, WatchNonce of_rank) {
    WatchNonce both[2] = {of_rank_0, of_rank};
    HashKey by_rank_0 = hash_key_derive(secret, "from rank 0", both, sizeof(both));
    HashKey by_rank = hash_key_derive(secret, "to rank 0", both, sizeof(both));
    p->key_out = watch.rank == 0 ? by_rank_0 : by_rank;
    p->key_in = watch.rank == 0 ? by_rank : by_rank_0;
}

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
    a->secret = hash_key_random();
}

static inline void watch_listen(WatchAddress *a, uint16_t port) {
    int yes = 1;
    if (port == 0) watch_fill_address(a);
    struct sockaddr_in in;
    socklen_t length = sizeof(in);
    memset(&in, 0, sizeof(in));
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = htonl(INADDR_ANY);
    in.sin_port = htons(port);
    watch.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    // the last run's port is this one's
    if (port) setsockopt(watch.listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    CHECK(watch.listener >= 0 && bind(watch.listener, (struct sockaddr *)&in, sizeof(in)) == 0 &&
              listen(watch.listener, 1024) == 0 && getsockname(watch.listener, (struct sockaddr *)&in, &length) == 0,
          "cannot listen for the other ranks at port %d: %s%s", port, strerror(errno),
          port ? "; MASTER_PORT chooses another port" : "");
    a->port = ntohs(in.sin_port);
}

// ---- rank 0

// A connection whose other end has proved nothing yet.
typedef struct {
    WatchPeer peer;
    WatchNonce own, other;
    size_t have; // bytes of `other`
    double since;
} WatchPending;

typedef enum { AUTH_PENDING, AUTH_PASSED, AUTH_FAILED } WatchAuth;

static inline WatchAuth watch_authenticate(WatchPending *c, const HashKey *secret, WatchMessage *hello) {
    while (c->have < sizeof(c->other)) {
        ssize_t n = recv(c->peer.fd, (char *)&c->other + c->have, sizeof(c->other) - c->have, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return AUTH_PENDING;
        if (n <= 0) return AUTH_FAILED;
        c->have += n;
        if (c->have == sizeof(c->other)) watch_set_keys(&c->peer, secret, c->own, c->other);
    }
    WatchReceiveStatus receipt = watch_receive(&c->peer, hello);
    return receipt == WATCH_MESSAGE ? AUTH_PASSED : receipt == WATCH_NOTHING ? AUTH_PENDING : AUTH_FAILED;
}

static inline bool watch_has_closed(int fd) {
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

// A process of the run. It is refused when it cannot be the rank that it says it is. A rank that has come before and is
// gone has come again.
static inline bool watch_admit_rank(WatchPeer *p, const WatchMessage *hello) {
    WatchMessage answer = watch_message(WATCH_WELCOME);
    bool is_rank = hello->rank > 0 && hello->rank < watch.ranks && hello->ranks == watch.ranks;
    WatchPeer *place = is_rank ? &watch.peers[hello->rank] : NULL;
    bool again = place && place->fd >= 0 && watch_has_closed(place->fd);
    if (!is_rank)
        snprintf(answer.text, WATCH_TEXT, "it is rank %d of %d, and rank 0 is one of %d: start all ranks alike",
                 hello->rank, hello->ranks, watch.ranks);
    else if (place->fd >= 0 && !again)
        snprintf(answer.text, WATCH_TEXT, "rank %d is there already, on %s: start each rank once", hello->rank,
                 place->last.host);
    if (answer.text[0]) answer.kind = WATCH_REFUSED;
    else {
        if (again) close(place->fd);
        *place = *p;
        place->last = *hello;
        p = place;
    }
    watch_send(p, &answer);
    if (answer.kind == WATCH_REFUSED) close(p->fd);
    return answer.kind == WATCH_WELCOME && !again;
}

typedef struct {
    WatchPending *of[WATCH_PENDING]; // in the order in which they came
    int count, turned_away;
} WatchPendingList;

static inline void watch_drop_pending(WatchPendingList *crowd, int i, bool turn_away) {
    if (turn_away) close(crowd->of[i]->peer.fd), crowd->turned_away++;
    free(crowd->of[i]);
    crowd->count--;
    memmove(&crowd->of[i], &crowd->of[i + 1], (crowd->count - i) * sizeof(crowd->of[0]));
}

// Takes a new connection and sends it this end's number. When too many are waiting, the oldest goes, unless it has
// just come.
static inline void watch_accept_connection(WatchPendingList *crowd) {
    if (crowd->count == WATCH_PENDING) {
        if (now_seconds() - crowd->of[0]->since < WATCH_PENDING_MIN_SECONDS) return;
        watch_drop_pending(crowd, 0, true);
    }
    int fd = accept4(watch.listener, NULL, NULL, SOCK_CLOEXEC);
    bool full = fd < 0 && (errno == EMFILE || errno == ENFILE);
    CHECK(!full || crowd->count > 0, "cannot accept the connections of %d ranks: %s; raise ulimit -n", watch.ranks,
          strerror(errno));
    if (full) watch_drop_pending(crowd, 0, true);
    if (fd < 0) return;
    WatchPending *c = (WatchPending *)checked_calloc(1, sizeof(WatchPending));
    c->peer.fd = fd;
    c->own = watch_random_nonce();
    c->since = now_seconds();
    crowd->of[crowd->count++] = c;
    ssize_t n = send(fd, &c->own, sizeof(c->own), MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)n; // a connection that is lost is seen when it is read
}

// Waits for the listener or a connection, at most until the next time limit.
static inline void watch_poll_pending(const WatchPendingList *crowd) {
    struct pollfd fds[WATCH_PENDING + 1];
    bool full = crowd->count == WATCH_PENDING;
    fds[0].fd = full ? -1 : watch.listener, fds[0].events = POLLIN;
    for (int i = 0; i < crowd->count; i++) fds[i + 1].fd = crowd->of[i]->peer.fd, fds[i + 1].events = POLLIN;
    poll(fds, (nfds_t)crowd->count + 1, full ? 20 : 200);
}

static inline void watch_check_start(const WatchPendingList *crowd, int missing, double until) {
    char strangers[100] = "";
    int first = 1;
    if (now_seconds() < until) return;
    while (first < watch.ranks - 1 && watch.peers[first].fd >= 0) first++;
    if (crowd->turned_away)
        snprintf(strangers, sizeof(strangers), "; %d connections without the run's secret were turned away",
                 crowd->turned_away);
    CHECK(false, "%d of %d ranks, the first of them rank %d, have not come to rank 0 within %g s (--start-timeout)%s",
          missing, watch.ranks, first, watch.start_timeout, strangers);
}

static inline void watch_accept_ranks(const HashKey *secret) {
    WatchPendingList crowd;
    double until = now_seconds() + watch.start_timeout;
    memset(&crowd, 0, sizeof(crowd));
    for (int missing = watch.ranks - 1; missing > 0;) {
        watch_check_start(&crowd, missing, until);
        watch_poll_pending(&crowd);
        for (int i = 0; i < crowd.count;) {
            WatchMessage hello;
            WatchAuth proof = watch_authenticate(crowd.of[i], secret, &hello);
            if (proof == AUTH_PASSED) missing -= watch_admit_rank(&crowd.of[i]->peer, &hello);
            bool late = now_seconds() - crowd.of[i]->since > WATCH_AUTH_SECONDS;
            if (proof != AUTH_PENDING || late) watch_drop_pending(&crowd, i, proof != AUTH_PASSED);
            else i++;
        }
        watch_accept_connection(&crowd);
    }
    while (crowd.count > 0) watch_drop_pending(&crowd, 0, true);
    close(watch.listener);
    watch.listener = -1;
}

// Once all are there: no rank goes on before.
static inline void watch_send_payload(const void *payload, size_t bytes) {
    WatchMessage m = watch_message(WATCH_START);
    assert(bytes <= WATCH_TEXT);
    if (bytes) memcpy(m.text, payload, bytes);
    for (int i = 1; i < watch.peer_count; i++) watch_send(&watch.peers[i], &m);
}

// ---- the other ranks

static inline bool watch_connect_socket(uint32_t ip, uint16_t port, int *fd) {
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

static inline bool watch_poll_until(int fd, double until) {
    struct pollfd one = {fd, POLLIN, 0};
    double left = until - now_seconds();
    return left > 0 && poll(&one, 1, (int)(1000 * fmin(left, 1e6)) + 1) >= 0;
}

// The next message from rank 0; false when the connection ends, time is up or the message is not rank 0's.
static inline bool watch_receive_until(WatchPeer *p, WatchMessage *m, double until) {
    for (;;) {
        WatchReceiveStatus receipt = watch_receive(p, m);
        if (receipt != WATCH_NOTHING) return receipt == WATCH_MESSAGE;
        if (!watch_poll_until(p->fd, until)) return false;
    }
}

// Proves to the other end of a new connection that this is a rank, and sees that it is rank 0.
static inline bool watch_handshake(WatchPeer *p, const WatchAddress *a, double until, WatchMessage *answer) {
    WatchNonce own = watch_random_nonce(), other;
    size_t have = 0;
    while (have < sizeof(other)) {
        ssize_t n = recv(p->fd, (char *)&other + have, sizeof(other) - have, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
        if (n > 0) have += n;
        else if (!watch_poll_until(p->fd, until)) return false;
    }
    WatchMessage hello = watch_message(WATCH_HELLO);
    p->sent = p->received = 0, p->have = 0;
    p->last = hello;
    p->last.rank = 0;
    memcpy(p->last.host, a->host, WATCH_HOST);
    watch_set_keys(p, &a->secret, other, own);
    if (send(p->fd, &own, sizeof(own), MSG_NOSIGNAL) != (ssize_t)sizeof(own)) return false;
    watch_send(p, &hello);
    return watch_receive_until(p, answer, until);
}

// Tries an address of rank 0; `reached` counts those where somebody listens, whoever it is.
static inline bool watch_connect_address(WatchPeer *p, const WatchAddress *a, uint32_t ip, double patience,
                                         int *reached) {
    WatchMessage answer;
    if (!watch_connect_socket(ip, a->port, &p->fd)) return false;
    ++*reached;
    if (watch_handshake(p, a, now_seconds() + patience, &answer)) {
        CHECK(answer.kind == WATCH_WELCOME, "rank %d on %s is refused by rank 0 on %s: %s", watch.rank, watch.host,
              answer.host, answer.text);
        return true;
    }
    close(p->fd);
    p->fd = -1;
    return false;
}

static inline void watch_connect(const WatchAddress *a) {
    WatchPeer *p = &watch.peers[0];
    double until = now_seconds() + watch.start_timeout, patience = WATCH_AUTH_SECONDS;
    int reached = 0, before, error;
    do {
        before = reached;
        patience = fmin(patience, fmax(until - now_seconds(), 0));
        if (strcmp(a->host, watch.host) == 0 && watch_connect_address(p, a, htonl(INADDR_LOOPBACK), patience, &reached))
            return;
        for (int i = 0; i < WATCH_ADDRESSES && a->ip[i]; i++)
            if (watch_connect_address(p, a, a->ip[i], patience, &reached)) return;
        error = errno;
        if (reached > before) patience *= 2; // it may be rank 0, which is busy
        else if (!a->later) break;
    } while (now_seconds() < until && usleep(100000) == 0);
    CHECK(false, "rank %d on %s cannot reach rank 0 on %s (port %d): %s", watch.rank, watch.host, a->host, a->port,
          reached ? "who listens there does not prove to be rank 0 of this run" : strerror(error));
}

static inline void watch_receive_payload(void *payload, size_t bytes) {
    WatchMessage m;
    // rank 0 waits that long for the last of them
    CHECK(watch_receive_until(&watch.peers[0], &m, now_seconds() + watch.start_timeout + 5),
          "rank %d has lost rank 0 at the start", watch.rank);
    assert(bytes <= WATCH_TEXT && m.kind == WATCH_START);
    if (bytes) memcpy(payload, m.text, bytes);
}
#endif
