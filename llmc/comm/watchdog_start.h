// clang-format off
/*
watchdog_start.h: connection and mutual authentication of the watchdogs of a run.

  void watch_listen(address, port)   rank 0, first: listens on `port`. With port 0 it selects a port and fills the
                                     address with a random secret, to be sent to the other ranks
  void watch_accept_ranks(secret)    rank 0: returns when all ranks have authenticated; then closes the port
  void watch_connect(address)        other ranks: returns when rank 0 has authenticated and has accepted this rank
  void watch_send_payload(payload, bytes), watch_receive_payload(payload, bytes)
                                     data that rank 0 sends to all ranks

  secret     128 random bits. With mpirun, rank 0 draws them and MPI broadcasts them. With srun they come from the
             environment (comm_launch.h).
  handshake  Rank 0 sends a nonce, a rank answers with its nonce and HELLO, and rank 0 with WELCOME. Two keys, one per
             direction, are derived from the secret and both nonces, and every message carries a keyed hash. The secret
             is never sent, and recorded messages cannot be replayed.
  limits     At most WATCH_PENDING connections are unauthenticated at a time, each for 5 s. They are handled
             concurrently. If there are more, the oldest is closed. A rank whose connection is closed tries again until
             --start-timeout.

Protects against
  A process that can connect to rank 0's port, or listens on it before rank 0 does, and knows everything about the run
  but its secret: job id, options, program. It gets no data, cannot act as a rank or as rank 0, and can neither end the
  run nor print messages. It can delay the start by opening connections faster than rank 0 rejects them, or by occupying
  rank 0's port; the start then fails after --start-timeout.
Does not protect against
  - Reading the network over which srun or MPI distribute the secret: the messages of Slurm and MPI are not encrypted
    unless configured. Processes of the same user and root can read the secret from /proc.
  - Reading packets between ranks: hosts, steps, error messages and NCCL's id are not encrypted. Changing packets can
    break connections, which ends the run, but cannot forge messages.
  - Connections to the ports of MPI, which authenticates nobody: they can end the start after --start-timeout, and the
    run after --timeout. Ranks on one machine open no such port (comm_launch.h).
  - Attacks on what MPI and NCCL transfer: gradients and weights are neither encrypted nor authenticated. Use a network
    whose machines are trusted.
*/
// clang-format on
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
    // the port may still be in TIME_WAIT from the last run
    if (port) setsockopt(watch.listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    CHECK(watch.listener >= 0 && bind(watch.listener, (struct sockaddr *)&in, sizeof(in)) == 0 &&
              listen(watch.listener, 1024) == 0 && getsockname(watch.listener, (struct sockaddr *)&in, &length) == 0,
          "cannot listen on port %d for the other ranks: %s%s", port, strerror(errno),
          port ? "; MASTER_PORT selects another port" : "");
    a->port = ntohs(in.sin_port);
}

// ---- rank 0

// A connection that is not authenticated yet.
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

// Admits an authenticated process as the rank that it claims to be, or refuses it. A rank whose connection has closed
// may connect again. Returns whether this rank is new.
static inline bool watch_admit_rank(WatchPeer *p, const WatchMessage *hello) {
    WatchMessage answer = watch_message(WATCH_WELCOME);
    bool is_rank = hello->rank > 0 && hello->rank < watch.ranks && hello->ranks == watch.ranks;
    WatchPeer *place = is_rank ? &watch.peers[hello->rank] : NULL;
    bool again = place && place->fd >= 0 && watch_has_closed(place->fd);
    if (!is_rank)
        snprintf(answer.text, WATCH_TEXT,
                 "it is rank %d of %d, and rank 0 has %d ranks: start all ranks with the same number of ranks",
                 hello->rank, hello->ranks, watch.ranks);
    else if (place->fd >= 0 && !again)
        snprintf(answer.text, WATCH_TEXT, "rank %d has already connected from %s: start each rank once", hello->rank,
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
    WatchPending *of[WATCH_PENDING]; // oldest first
    int count, rejected;
} WatchPendingList;

static inline void watch_drop_pending(WatchPendingList *crowd, int i, bool reject) {
    if (reject) close(crowd->of[i]->peer.fd), crowd->rejected++;
    free(crowd->of[i]);
    crowd->count--;
    memmove(&crowd->of[i], &crowd->of[i + 1], (crowd->count - i) * sizeof(crowd->of[0]));
}

// Accepts a connection and sends this end's nonce. If too many are pending, the oldest is closed, unless it is very
// recent.
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
    (void)n; // the reader detects a lost connection
}

// Waits for the listener or a connection, for a short time.
static inline void watch_poll_pending(const WatchPendingList *crowd) {
    struct pollfd fds[WATCH_PENDING + 1];
    bool full = crowd->count == WATCH_PENDING;
    fds[0].fd = full ? -1 : watch.listener, fds[0].events = POLLIN;
    for (int i = 0; i < crowd->count; i++) fds[i + 1].fd = crowd->of[i]->peer.fd, fds[i + 1].events = POLLIN;
    poll(fds, (nfds_t)crowd->count + 1, full ? 20 : 200);
}

static inline void watch_check_start(const WatchPendingList *crowd, int missing, double until) {
    char others[100] = "";
    int first = 1;
    if (now_seconds() < until) return;
    while (first < watch.ranks - 1 && watch.peers[first].fd >= 0) first++;
    if (crowd->rejected)
        snprintf(others, sizeof(others), "; %d connections without the run's secret were rejected", crowd->rejected);
    CHECK(false, "%d of %d ranks (the first is rank %d) have not connected to rank 0 within %g s (--start-timeout)%s",
          missing, watch.ranks, first, watch.start_timeout, others);
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

// When all ranks have connected; they wait for it.
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
    struct timeval limit = {10, 0}; // also limits connect
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

// Receives a message from rank 0; false if the connection ends, the time is over or the message is invalid.
static inline bool watch_receive_until(WatchPeer *p, WatchMessage *m, double until) {
    for (;;) {
        WatchReceiveStatus receipt = watch_receive(p, m);
        if (receipt != WATCH_NOTHING) return receipt == WATCH_MESSAGE;
        if (!watch_poll_until(p->fd, until)) return false;
    }
}

// Authenticates this rank on a new connection, and checks that the other end is rank 0.
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

// Tries an address of rank 0. Increments *reached if any process listens there.
static inline bool watch_connect_address(WatchPeer *p, const WatchAddress *a, uint32_t ip, double time_limit,
                                         int *reached) {
    WatchMessage answer;
    if (!watch_connect_socket(ip, a->port, &p->fd)) return false;
    ++*reached;
    if (watch_handshake(p, a, now_seconds() + time_limit, &answer)) {
        CHECK(answer.kind == WATCH_WELCOME, "rank 0 on %s refuses rank %d on %s: %s", answer.host, watch.rank,
              watch.host, answer.text);
        return true;
    }
    close(p->fd);
    p->fd = -1;
    return false;
}

static inline void watch_connect(const WatchAddress *a) {
    WatchPeer *p = &watch.peers[0];
    double until = now_seconds() + watch.start_timeout, time_limit = WATCH_AUTH_SECONDS;
    int reached = 0, before, error;
    do {
        before = reached;
        time_limit = fmin(time_limit, fmax(until - now_seconds(), 0));
        if (strcmp(a->host, watch.host) == 0 &&
            watch_connect_address(p, a, htonl(INADDR_LOOPBACK), time_limit, &reached))
            return;
        for (int i = 0; i < WATCH_ADDRESSES && a->ip[i]; i++)
            if (watch_connect_address(p, a, a->ip[i], time_limit, &reached)) return;
        error = errno;
        if (reached > before) time_limit *= 2; // rank 0 may be busy
        else if (!a->later) break;
    } while (now_seconds() < until && usleep(100000) == 0);
    CHECK(false, "rank %d on %s cannot connect to rank 0 on %s (port %d): %s", watch.rank, watch.host, a->host, a->port,
          reached ? "the process that listens there does not authenticate as rank 0 of this run" : strerror(error));
}

static inline void watch_receive_payload(void *payload, size_t bytes) {
    WatchMessage m;
    // rank 0 waits that long for the last rank
    CHECK(watch_receive_until(&watch.peers[0], &m, now_seconds() + watch.start_timeout + 5),
          "rank %d lost its connection to rank 0 during the start", watch.rank);
    assert(bytes <= WATCH_TEXT && m.kind == WATCH_START);
    if (bytes) memcpy(payload, m.text, bytes);
}
#endif
