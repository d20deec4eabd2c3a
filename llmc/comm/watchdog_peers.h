/*
watchdog_peers.h: what the watchdogs of ranks are to each other: state and messages (watchdog.h).

A message carries its number on the connection and a keyed hash (keyed_hash.h) over itself, under a key that only the
two ends of this connection have (watchdog_start.h). Nothing of it is used before the hash, the number and every field
have been checked. Control characters in texts become '?', so that a peer cannot write to the terminal.
*/
#ifndef LLMC_WATCHDOG_PEERS_H
#define LLMC_WATCHDOG_PEERS_H
#include "../base/json.h"
#include "../base/keyed_hash.h"

// What a rank is doing: constant, short name, description in messages.
// clang-format off
#define PHASES(PHASE)                                             \
    PHASE(PHASE_START, "start", "starting")                       \
    PHASE(PHASE_DATA, "data", "reading data")                     \
    PHASE(PHASE_FORWARD, "forward", "in the forward")             \
    PHASE(PHASE_BACKWARD, "backward", "in the backward")          \
    PHASE(PHASE_GRADIENTS, "gradients", "reducing gradients")     \
    PHASE(PHASE_UPDATE, "update", "updating weights")             \
    PHASE(PHASE_PARAMETERS, "parameters", "gathering parameters") \
    PHASE(PHASE_VALIDATION, "validation", "validating")           \
    PHASE(PHASE_CHECK, "check", "comparing ranks")                \
    PHASE(PHASE_SAVE, "save", "saving a checkpoint")              \
    PHASE(PHASE_LOG, "log", "writing the log")                    \
    PHASE(PHASE_END, "end", "ending")
// clang-format on
#define PHASE_CONSTANT(constant, name, description) constant,
#define PHASE_ROW(constant, name, description) {name, description},
typedef enum { PHASES(PHASE_CONSTANT) PHASE_COUNT } Phase;
static const struct { const char *name, *description; } phases[PHASE_COUNT] = {PHASES(PHASE_ROW)};
#undef PHASE_CONSTANT
#undef PHASE_ROW

enum { WATCH_HOST = 64, WATCH_TEXT = 6000, WATCH_ADDRESSES = 8, WATCH_LINES = 64 };
static const double WATCH_TIMEOUT = 600, WATCH_GRACE = 0.4; // seconds; the latter to hear of other ranks' failures

typedef struct {
    char host[WATCH_HOST];
    uint32_t ip[WATCH_ADDRESSES]; // network byte order; 0: none
    uint16_t port;
    bool later;     // it may not listen there yet
    HashKey secret; // that the run's processes have, and no others
} WatchAddress;

// First a rank's HELLO, which rank 0 answers by WELCOME or REFUSED, and by START when all are there.
typedef enum {
    WATCH_HELLO,
    WATCH_WELCOME,
    WATCH_REFUSED,
    WATCH_START,
    WATCH_HEARTBEAT,
    WATCH_GOODBYE,
    WATCH_FAILED,
    WATCH_END
} WatchKind;
typedef struct {
    uint64_t hash;   // of all that follows
    uint64_t number; // of this message among those that its sender has sent on the connection, from 0
    int kind, rank, ranks, status, phase;
    int zero; // no bytes between fields
    int64_t step;
    uint64_t collectives; // that the rank has waited for to their end, or to which its device has come
    double waiting;       // seconds in the present one; 0: it does not wait
    uint64_t device;      // that this rank computes on, unlike all others of the world; 0: shared ones
    char host[WATCH_HOST];
    char text[WATCH_TEXT]; // of WATCH_FAILED: lines; of WATCH_REFUSED: why; of WATCH_START: what rank 0 gives to all
} WatchMessage;
// others go without the text
static inline size_t watch_bytes(int kind) {
    bool text = kind == WATCH_FAILED || kind == WATCH_REFUSED || kind == WATCH_START;
    return text ? sizeof(WatchMessage) : offsetof(WatchMessage, text);
}

typedef struct {
    int fd; // -1: closed
    bool gone;
    double heard; // when
    HashKey key_out, key_in;
    uint64_t sent, received; // messages
    WatchMessage last, incoming;
    size_t have; // bytes of the latter
} WatchPeer;

static struct {
    bool exiting;
    int rank, ranks, status, listener;
    uint64_t device;
    double start_timeout, timeout, resumed; // the last: when this process was last found to have been stopped; 0: never
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
} watch = {false, 0, 1, 0, -1, 0, 0, 0, 0, "", 0, 0, 0, 0, {0}, 0, "", PTHREAD_MUTEX_INITIALIZER, 0, NULL, 0};

#define WATCH_SET(field, value) __atomic_store_n(&watch.field, (value), __ATOMIC_RELAXED)
#define WATCH_GET(field) __atomic_load_n(&watch.field, __ATOMIC_RELAXED)
static inline void watch_phase(Phase phase) {
    WATCH_SET(phase, (int)phase);
    fault_point(FAULT_PHASE, NULL, (size_t)phase);
}
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
    m.kind = (int)kind, m.rank = watch.rank, m.ranks = watch.ranks, m.status = WATCH_GET(status);
    m.phase = WATCH_GET(phase), m.step = WATCH_GET(step);
    m.device = watch.device;
    m.collectives = WATCH_GET(collectives), m.waiting = begin > 0 ? now_seconds() - begin : 0;
    memcpy(m.host, watch.host, WATCH_HOST);
    return m;
}

static inline uint64_t watch_hash(const HashKey *key, const WatchMessage *m) {
    size_t skipped = offsetof(WatchMessage, number);
    return keyed_hash(key, &m->number, watch_bytes(m->kind) - skipped);
}

// A peer that is gone, or whose buffers are full because it is stopped, does not hold the sender up.
static inline void watch_send(WatchPeer *p, const WatchMessage *m) {
    enum { BACKLOG = 2048 }; // bytes; a heartbeat that might fit in part only is left out
    bool beat = m->kind == WATCH_HEARTBEAT, is_long = watch_bytes(m->kind) == sizeof(WatchMessage);
    int queued = 0;
    pthread_mutex_lock(&watch.lock);
    if (p->fd >= 0 && !(beat && ioctl(p->fd, SIOCOUTQ, &queued) == 0 && queued > BACKLOG)) {
        WatchMessage sealed;
        memcpy(&sealed, m, watch_bytes(m->kind));
        sealed.number = p->sent;
        sealed.hash = watch_hash(&p->key_out, &sealed);
        ssize_t n = send(p->fd, &sealed, watch_bytes(m->kind), MSG_NOSIGNAL | (is_long ? 0 : MSG_DONTWAIT));
        p->sent += n > 0; // a connection that is lost is seen by its reader
    }
    pthread_mutex_unlock(&watch.lock);
}

// ---- what comes from a peer

// Whether a text ends within its array. What would move a cursor or change a terminal becomes '?': control characters,
// also those of U+0080 to U+009F, and bytes that are not UTF-8. `lines`: the text may have several.
static inline bool watch_clean_text(char *text, size_t size, bool lines) {
    if (!memchr(text, 0, size)) return false;
    for (unsigned char *at = (unsigned char *)text; *at;) {
        int length = utf8_length(at);
        bool control = (*at < 0x20 && !(lines && *at == '\n')) || *at == 0x7F || (*at == 0xC2 && at[1] < 0xA0);
        if (length == 0 || control) *at = '?', length = 1;
        at += length;
    }
    return true;
}

// The kinds that a rank sends at this place of a connection.
static inline bool watch_is_expected_kind(bool from_rank_0, uint64_t number, int kind) {
    if (number == 0) return from_rank_0 ? kind == WATCH_WELCOME || kind == WATCH_REFUSED : kind == WATCH_HELLO;
    if (number == 1 && from_rank_0) return kind == WATCH_START;
    return kind == WATCH_HEARTBEAT || kind == WATCH_GOODBYE || kind == (from_rank_0 ? WATCH_END : WATCH_FAILED);
}

// Whether this can be the next message of this peer. An introduction may come from any rank: who takes it looks.
static inline bool watch_is_valid(const WatchPeer *p, WatchMessage *m) {
    bool fails = m->kind == WATCH_FAILED || m->kind == WATCH_END, hello = m->kind == WATCH_HELLO;
    bool good_end = m->status == EXIT_DONE || m->status == EXIT_SIGNALLED;
    if (m->hash != watch_hash(&p->key_in, m) || m->number != p->received) return false;
    if (!watch_is_expected_kind(watch.rank != 0, m->number, m->kind)) return false;
    bool alike = m->ranks == watch.ranks || m->kind == WATCH_REFUSED;
    if (!hello && (m->rank != p->last.rank || !alike)) return false;
    if (m->status < 0 || m->status > 255 || (fails && good_end) || (m->kind == WATCH_GOODBYE && !good_end))
        return false;
    if (m->phase < 0 || m->phase >= PHASE_COUNT || m->step < 0) return false;
    if (!(m->waiting >= 0 && m->waiting < 1e9)) return false;
    if (!watch_clean_text(m->host, WATCH_HOST, false)) return false;
    return m->kind == WATCH_START || watch_clean_text(m->text, WATCH_TEXT, true);
}

typedef enum { WATCH_NOTHING, WATCH_MESSAGE, WATCH_CLOSED, WATCH_INVALID } WatchReceiveStatus;

// Takes what has come and waits for nothing: *m is set when a message is complete.
static inline WatchReceiveStatus watch_receive(WatchPeer *p, WatchMessage *m) {
    const size_t least = watch_bytes(WATCH_HEARTBEAT);
    for (;;) {
        size_t want = p->have < least ? least : watch_bytes(p->incoming.kind);
        if (p->have == want) break;
        ssize_t n = recv(p->fd, (char *)&p->incoming + p->have, want - p->have, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return WATCH_NOTHING;
        if (n <= 0) return WATCH_CLOSED;
        p->have += n;
    }
    memset(m, 0, sizeof(*m));
    memcpy(m, &p->incoming, p->have);
    p->have = 0;
    if (!watch_is_valid(p, m)) return WATCH_INVALID;
    p->received++;
    return WATCH_MESSAGE;
}
#endif
