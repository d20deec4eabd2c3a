// clang-format off
/*
watchdog_peers.h: state and messages of the watchdogs (watchdog.h).

A message carries its sequence number on the connection and a keyed hash (keyed_hash.h) over itself, under a key that
only the two ends of the connection have (watchdog_start.h). It is used only after the hash, the number and every field
have been checked. Control characters in texts are replaced by '?', so that a peer cannot write to the terminal.
*/
// clang-format on
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
static const double WATCH_TIMEOUT = 600, WATCH_GRACE = 0.4; // seconds; WATCH_GRACE: to collect other ranks' failures

typedef struct {
    char host[WATCH_HOST];
    uint32_t ip[WATCH_ADDRESSES]; // network byte order; 0: none
    uint16_t port;
    bool later;     // rank 0 may not listen yet
    HashKey secret; // shared by the processes of the run only
} WatchAddress;

// A rank sends HELLO. Rank 0 answers WELCOME or REFUSED, and START when all ranks have connected.
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
    uint64_t hash;   // of everything after it
    uint64_t number; // sequence number of the sender on this connection, from 0
    int kind, rank, ranks, status, phase;
    int zero; // explicit padding
    int64_t step;
    uint64_t collectives; // completed by the host, or reached by the device
    double waiting;       // seconds in the current wait; 0: it does not wait
    uint64_t device;      // unique id of this rank's device; 0: none
    char host[WATCH_HOST];
    char text[WATCH_TEXT]; // WATCH_FAILED: lines; WATCH_REFUSED: the reason; WATCH_START: rank 0's payload
} WatchMessage;
// Other kinds are sent without the text.
static inline size_t watch_bytes(int kind) {
    bool text = kind == WATCH_FAILED || kind == WATCH_REFUSED || kind == WATCH_START;
    return text ? sizeof(WatchMessage) : offsetof(WatchMessage, text);
}

typedef struct {
    int fd; // -1: closed
    bool closed;
    double last_received; // time of its last message
    HashKey key_out, key_in;
    uint64_t sent, received; // messages
    WatchMessage last, incoming;
    size_t have; // bytes of `incoming`
} WatchPeer;

static struct {
    bool exiting;
    int rank, ranks, status, listener;
    uint64_t device;
    double start_timeout, timeout, resumed; // resumed: when this process last continued after a stop; 0: never
    char host[WATCH_HOST];
    // what this rank is doing
    int phase;
    int64_t step;
    uint64_t collectives;
    double wait_begin; // 0: does not wait
    // hashes of lines that rank 0 has printed; lines that another rank sends if it fails
    uint64_t printed[WATCH_LINES];
    int printed_count;
    char pending[WATCH_TEXT];
    pthread_mutex_t lock; // for the lines and for sending
    pthread_t thread;
    WatchPeer *peers; // rank 0: one per rank; other ranks: only rank 0
    int peer_count;
} watch = {false, 0, 1, 0, -1, 0, 0, 0, 0, "", 0, 0, 0, 0, {0}, 0, "", PTHREAD_MUTEX_INITIALIZER, 0, NULL, 0};

#define WATCH_SET(field, value) __atomic_store_n(&watch.field, (value), __ATOMIC_RELAXED)
#define WATCH_GET(field) __atomic_load_n(&watch.field, __ATOMIC_RELAXED)
static inline void watch_phase(Phase phase) {
    WATCH_SET(phase, (int)phase);
    fault_point(FAULT_PHASE, NULL, (size_t)phase);
}
static inline void watch_step(int64_t step) { WATCH_SET(step, step); }
static inline double watch_wait_start(void) { // __atomic_load_n does not support doubles
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
// The progress of a device, which runs asynchronously: collectives that it has reached, and whether it waits in one.
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

// Does not block on a peer that has ended, or that is stopped and whose buffers are full.
static inline void watch_send(WatchPeer *p, const WatchMessage *m) {
    enum { BACKLOG = 2048 }; // bytes; a heartbeat that might be sent partly is skipped
    bool beat = m->kind == WATCH_HEARTBEAT, is_long = watch_bytes(m->kind) == sizeof(WatchMessage);
    int queued = 0;
    pthread_mutex_lock(&watch.lock);
    if (p->fd >= 0 && !(beat && ioctl(p->fd, SIOCOUTQ, &queued) == 0 && queued > BACKLOG)) {
        WatchMessage sealed;
        memcpy(&sealed, m, watch_bytes(m->kind));
        sealed.number = p->sent;
        sealed.hash = watch_hash(&p->key_out, &sealed);
        ssize_t n = send(p->fd, &sealed, watch_bytes(m->kind), MSG_NOSIGNAL | (is_long ? 0 : MSG_DONTWAIT));
        p->sent += n > 0; // the reader detects a lost connection
    }
    pthread_mutex_unlock(&watch.lock);
}

// ---- messages from a peer

// Replaces control characters, including U+0080 to U+009F, and invalid UTF-8 by '?'. Returns false if the text does not
// end within its array. lines: newlines are allowed.
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

// Whether a message of this kind may have this sequence number.
static inline bool watch_is_expected_kind(bool from_rank_0, uint64_t number, int kind) {
    if (number == 0) return from_rank_0 ? kind == WATCH_WELCOME || kind == WATCH_REFUSED : kind == WATCH_HELLO;
    if (number == 1 && from_rank_0) return kind == WATCH_START;
    return kind == WATCH_HEARTBEAT || kind == WATCH_GOODBYE || kind == (from_rank_0 ? WATCH_END : WATCH_FAILED);
}

// Whether this is a valid next message of this peer. A HELLO may name any rank; watch_admit_rank checks it.
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

// Receives without waiting. Sets *m if a message is complete.
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
