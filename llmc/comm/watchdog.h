/*
watchdog.h: the ranks of a run watch one another, so that none waits for ever for one that is gone.

Collectives (comm.h) know nothing of a peer that was killed, stopped or is stuck in a disk: they wait. So each rank has
a thread and a TCP connection of its own to rank 0, which hears from all and decides for all.

  void watch_open(rank, ranks, address, start_timeout, payload, bytes)   rank 0 has listened at `address`, the others
                                           connect within start_timeout seconds; then all have rank 0's `payload`
  void watch_timeout(seconds)              how long silence or waiting may last; WATCH_TIMEOUT until it is called
  void watch_phase(phase), watch_step(n)   what this rank is doing, for the line that names it
  void watch_wait_begin(), watch_wait_end()   around a wait for other ranks
  void watch_device(collectives, waiting)  the same of a device, which the host does not wait for
  watch_exit_hook                           what is to be done before the program ends, within about a second

  heartbeat   Every rank sends what it is doing, several times in a timeout; rank 0 answers with its own.
  verdict     by rank 0, on a rank whose connection has closed (killed: at once), that was silent for the timeout
              (stopped, or its machine is gone), or that others have waited for that long although it is alive. Rank 0
              prints one line with rank, host, step and phase and tells all to end, with status 1. Should rank 0
              itself be the one, each of the next few ranks says so.
  strangers   Only processes that have the run's secret become ranks (watchdog_start.h), and what a rank sends is
              checked before use. A connection whose messages are not valid ends the run like one that has closed.
  failure     A rank that ends with an error has its lines printed by rank 0, each once however many ranks say it, so
              that a mistake in the command line is one line for a thousand ranks. The others end with its status.
  warnings    Rank 0 prints its own. The others' are printed only if they fail afterwards.

One rank: nothing here does anything, and no thread is started.
*/
#ifndef LLMC_WATCHDOG_H
#define LLMC_WATCHDOG_H
#include "watchdog_start.h"

static void (*watch_exit_hook)(void);

__attribute__((noreturn)) static inline void watch_exit(int status) {
    if (watch_exit_hook) watch_exit_hook();
    _exit(status);
}

// ---- lines

// Rank 0 remembers what it prints; another rank keeps its lines for the case that it fails.
static inline bool watch_record_line(const char *line) {
    pthread_mutex_lock(&watch.lock);
    if (watch.rank == 0) {
        if (watch.printed_count < WATCH_LINES) watch.printed[watch.printed_count++] = XXH3_64bits(line, strlen(line));
    } else {
        size_t have = strlen(watch.pending), length = min_size(strlen(line), WATCH_TEXT - 2);
        if (have + length + 2 > WATCH_TEXT) have = 0; // the last lines are those that matter
        memcpy(watch.pending + have, line, length);
        memcpy(watch.pending + have + length, "\n", 2);
    }
    pthread_mutex_unlock(&watch.lock);
    return watch.rank != 0;
}

static inline bool watch_is_printed(const char *line) {
    uint64_t hash = XXH3_64bits(line, strlen(line));
    for (int i = 0; i < watch.printed_count; i++)
        if (watch.printed[i] == hash) return true;
    return false;
}

// The lines of a rank that has failed, those that nobody has printed yet.
static inline void watch_print_failure(WatchMessage *m) {
    bool any = false;
    for (char *line = m->text, *end; *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = 0;
        if (watch_is_printed(line)) {
            any = true;
            continue;
        }
        watch_record_line(line);
        fprintf(stderr, "diffv2: rank %d (%s): %s\n", m->rank, m->host, line);
        any = true;
    }
    if (!any)
        fprintf(stderr, "diffv2: rank %d (%s) ended with status %d, step %" PRId64 ", %s\n", m->rank, m->host,
                m->status, m->step, phases[m->phase].description);
}

// ---- what rank 0 decides

__attribute__((noreturn)) static inline void watch_end_run(int status) {
    WatchMessage end = watch_message(WATCH_END);
    end.status = status;
    for (int i = 0; i < watch.peer_count; i++) {
        watch_send(&watch.peers[i], &end);
        if (watch.peers[i].fd >= 0) shutdown(watch.peers[i].fd, SHUT_WR);
    }
    // until they have ended by themselves, not by a launcher; what they send is taken, or else the connection would be
    // reset and they might lose the end
    for (double until = now_seconds() + 0.1; now_seconds() < until; usleep(2000)) {
        char taken[4096];
        for (int i = 0; i < watch.peer_count; i++)
            while (watch.peers[i].fd >= 0 && recv(watch.peers[i].fd, taken, sizeof(taken), MSG_DONTWAIT) > 0) {
            }
    }
    watch_exit(status);
}

// Hears for a moment what else has failed, then prints and ends the program. Lines that all ranks have come from rank 0
// itself, which may be a moment later than the first of the others.
__attribute__((noreturn)) static inline void watch_fail_run(WatchMessage *first, int status) {
    WatchMessage *failed = (WatchMessage *)checked_calloc(watch.ranks + 1, sizeof(WatchMessage));
    int count = 0;
    if (first) failed[count++] = *first;
    for (double until = now_seconds() + WATCH_GRACE; now_seconds() < until;) {
        bool all = true;
        for (int i = 1; i < watch.peer_count; i++) {
            WatchPeer *p = &watch.peers[i];
            struct pollfd poll_one = {p->fd, POLLIN, 0};
            if (p->gone || p->fd < 0) continue;
            all = false;
            if (poll(&poll_one, 1, 5) <= 0) continue;
            WatchReceiveStatus receipt = watch_receive(p, &failed[count]);
            if (receipt == WATCH_NOTHING) continue;
            p->gone = receipt != WATCH_MESSAGE || failed[count].kind != WATCH_HEARTBEAT;
            if (receipt == WATCH_MESSAGE && failed[count].kind == WATCH_FAILED) count++;
        }
        if (all) break;
    }
    if (!WATCH_GET(exiting)) usleep(100000); // rank 0's own turn
    for (int i = 0; i < count; i++) watch_print_failure(&failed[i]);
    watch_end_run(status);
}

// Ranks go in step, so where rank 0 is now says more about one that is gone than what was last heard of it.
static inline void watch_report_failure(const WatchMessage *m, const char *what, double seconds) {
    char since[64] = "";
    if (seconds > 0) snprintf(since, sizeof(since), " %.0f s", seconds);
    fprintf(stderr,
            "diffv2: rank %d (%s) %s%s; last heard at step %" PRId64 ", %s; rank %d is at step %" PRId64
            ", %s; all ranks end, --resume goes on from the newest checkpoint\n",
            m->rank, m->host, what, since, m->step, phases[m->phase].description, watch.rank, WATCH_GET(step),
            phases[WATCH_GET(phase)].description);
}

// Of the ranks that others wait for, the one that has come least far.
static inline void watch_check_waiting(double limit) {
    WatchMessage own = watch_message(WATCH_HEARTBEAT);
    const WatchMessage *slowest = &own;
    double longest = own.waiting;
    for (int i = 1; i < watch.peer_count; i++) {
        const WatchMessage *m = &watch.peers[i].last;
        longest = m->waiting > longest ? m->waiting : longest;
        bool behind = m->collectives < slowest->collectives, free_now = m->waiting == 0 && slowest->waiting > 0;
        if (behind || (m->collectives == slowest->collectives && free_now)) slowest = m;
    }
    if (longest < limit) return;
    watch_report_failure(slowest,
                         slowest->waiting > 0.1 ? "and the others wait in vain: no message arrives for"
                                                : "does not come to where the others have waited for it for",
                         longest);
    watch_end_run(EXIT_FAILED);
}

static inline void watch_handle_message(WatchPeer *p) {
    WatchMessage m;
    WatchReceiveStatus receipt = watch_receive(p, &m);
    if (receipt == WATCH_NOTHING) return;
    if (receipt != WATCH_MESSAGE) {
        __atomic_store_n(&p->gone, true, __ATOMIC_RELAXED);
        // this one was stopped, and the others have said so
        if (watch.resumed > 0 && now_seconds() - watch.resumed < watch_limit()) watch_exit(EXIT_FAILED);
        watch_report_failure(
            &p->last, receipt == WATCH_CLOSED ? "has ended without a word (killed?)" : "has sent an invalid message",
            0);
        if (watch.rank == 0) watch_end_run(EXIT_FAILED);
        watch_exit(EXIT_FAILED);
    }
    p->heard = now_seconds();
    if (m.kind == WATCH_END) watch_exit(m.status);
    p->last = m;
    if (m.kind == WATCH_GOODBYE) __atomic_store_n(&p->gone, true, __ATOMIC_RELAXED);
    if (m.kind != WATCH_FAILED) return;
    __atomic_store_n(&p->gone, true, __ATOMIC_RELAXED);
    watch_fail_run(&m, m.status);
}

static inline void watch_check_heartbeats(double limit) {
    for (int i = 0; i < watch.peer_count; i++) {
        WatchPeer *p = &watch.peers[i];
        double silent = now_seconds() - p->heard;
        if (p->fd < 0 || p->gone || silent < limit) continue;
        bool speaks = watch.rank <= 4; // when it is rank 0 that is silent, a few lines do
        if (speaks) watch_report_failure(&p->last, "has been silent for", silent);
        if (watch.rank == 0) watch_end_run(EXIT_FAILED);
        watch_exit(EXIT_FAILED);
    }
}

// This process itself was stopped for a while (the whole job suspended, say): that is nobody's silence.
static inline void watch_reset_timers(double now) {
    watch.resumed = now;
    for (int i = 0; i < watch.peer_count; i++) watch.peers[i].heard = now;
    if (watch_wait_start() > 0) watch_wait_begin();
}

static inline void *watch_thread(void *unused) {
    (void)unused;
    struct pollfd *fds = (struct pollfd *)checked_calloc(watch.peer_count, sizeof(struct pollfd));
    double sent = 0, before = now_seconds();
    while (!WATCH_GET(exiting)) {
        double limit = watch_limit(), beat = fmin(watch.ranks <= 64 ? 0.2 : 1, fmax(0.02, limit / 8)),
               now = now_seconds();
        if (now - before > fmax(0.5, limit / 4)) watch_reset_timers(now);
        before = now;
        for (int i = 0; i < watch.peer_count; i++) {
            fds[i].fd = watch.peers[i].gone ? -1 : watch.peers[i].fd;
            fds[i].events = POLLIN;
        }
        if (now - sent > beat) {
            WatchMessage m = watch_message(WATCH_HEARTBEAT);
            for (int i = 0; i < watch.peer_count; i++) watch_send(&watch.peers[i], &m);
            sent = now;
        }
        poll(fds, (nfds_t)watch.peer_count, (int)(1000 * fmin(beat / 2, 0.1)) + 1);
        if (WATCH_GET(exiting)) break;
        if (now_seconds() - now > fmax(0.5, limit / 4)) watch_reset_timers(now_seconds());
        for (int i = 0; i < watch.peer_count; i++)
            if (fds[i].fd >= 0 && fds[i].revents) watch_handle_message(&watch.peers[i]);
        if (now_seconds() - now > fmax(0.5, limit / 4)) continue; // hear the others first
        watch_check_heartbeats(limit);
        if (watch.rank == 0) watch_check_waiting(limit);
    }
    free(fds);
    return NULL;
}

// ---- begin and end

// Waits for peers to close. Closing a connection with unread data resets it, and the peer may then lose our last message
// and report this rank as dead.
static inline void watch_close_connections(void) {
    bool all = false;
    for (int i = 0; i < watch.peer_count; i++)
        if (watch.peers[i].fd >= 0) shutdown(watch.peers[i].fd, SHUT_WR); // nothing follows it, no heartbeat either
    for (double until = now_seconds() + 2; !all && now_seconds() < until; usleep(1000)) {
        all = true;
        for (int i = 0; i < watch.peer_count; i++)
            all = all && (watch.peers[i].fd < 0 || __atomic_load_n(&watch.peers[i].gone, __ATOMIC_RELAXED));
    }
}

// The exit hook (common.h). A failure is reported to rank 0, which prints its lines and ends all ranks.
static inline void watch_on_exit(int status) {
    WATCH_SET(status, status & 0xFF); // as the system does
    fflush(NULL);
    bool failed = status != EXIT_DONE && status != EXIT_SIGNALLED;
    if (failed && watch.rank == 0) { // the thread stops receiving, then this one does
        WATCH_SET(exiting, true);
        if (!pthread_equal(watch.thread, pthread_self())) pthread_join(watch.thread, NULL);
        watch_fail_run(NULL, status);
    }
    WatchMessage m = watch_message(failed ? WATCH_FAILED : WATCH_GOODBYE);
    if (failed) memcpy(m.text, watch.pending, WATCH_TEXT);
    for (int i = 0; i < watch.peer_count; i++) watch_send(&watch.peers[i], &m); // rank 0 tells all
    if (!failed) {
        watch_close_connections();
        return;
    }
    sleep(3); // the thread ends the process when rank 0 answers
    if (watch.rank <= 4) fprintf(stderr, "%s", watch.pending);
    _exit(status);
}

// After watch_listen on rank 0, whose address all have; returns when all are connected.
static inline void watch_open(int rank, int ranks, const WatchAddress *address, double start_timeout, void *payload,
                              size_t payload_bytes) {
    watch.rank = rank, watch.ranks = ranks, watch.start_timeout = start_timeout;
    watch_timeout(WATCH_TIMEOUT);
    gethostname(watch.host, sizeof(watch.host) - 1);
    watch.peer_count = rank == 0 ? ranks : 1;
    watch.peers = (WatchPeer *)checked_calloc(watch.peer_count, sizeof(WatchPeer));
    for (int i = 0; i < watch.peer_count; i++) watch.peers[i].fd = -1;
    if (rank == 0) {
        watch_accept_ranks(&address->secret);
        watch_send_payload(payload, payload_bytes);
    } else {
        watch_connect(address);
        watch_receive_payload(payload, payload_bytes);
    }
    for (int i = 0; i < watch.peer_count; i++) watch.peers[i].heard = now_seconds();
    warn_hook = watch_record_line;
    exit_hook = watch_on_exit;
    thread_start(&watch.thread, watch_thread, NULL, "that watches the ranks");
}
#endif
