// clang-format off
/*
watchdog.h: detection of ranks that have ended or hang, so that no rank waits for ever.

Collectives (comm.h) do not notice a peer that was killed, stopped or blocks in I/O: they wait. Each rank therefore has
a watchdog thread and a separate TCP connection to rank 0, which receives the state of all ranks and decides for all.

  void watch_open(rank, ranks, address, start_timeout, payload, bytes)
                                            rank 0 already listens at `address`; the others connect within start_timeout
                                            seconds. Afterwards all ranks have rank 0's `payload`
  void watch_timeout(seconds)               sets the limit of inactivity and of waits; WATCH_TIMEOUT until it is called
  void watch_phase(phase), watch_step(n)    what this rank is doing, for error messages
  void watch_wait_begin(), watch_wait_end() around a wait for other ranks
  void watch_device(collectives, waiting)   the same for a device, for which the host does not wait
  watch_exit_hook                           called before the watchdog ends the process; must take about a second at
                                            most

  heartbeat   Every rank sends its state several times per timeout; rank 0 answers with its own.
  decision    Rank 0 reports a rank whose connection has closed (killed; detected at once), that has sent nothing for
              the timeout (stopped, or its machine has failed), or that others have waited for during the timeout while
              it is responsive. It prints one line with rank, host, step and phase, and ends all ranks with status 1. If
              rank 0 itself fails, each of the next few ranks prints a line.
  security    Only processes that have the secret of the run become ranks (watchdog_start.h). Messages are validated
              before use. A connection whose messages are invalid ends the run, like one that has closed.
  failure     If a rank ends with an error, rank 0 prints its lines, each line once, however many ranks send it: a wrong
              option gives one line for a thousand ranks. The other ranks end with its status.
  warnings    Rank 0 prints its own. Those of other ranks are printed only if the rank fails afterwards.

With one rank the watchdog does nothing, and no thread is started.
*/
// clang-format on
#ifndef LLMC_WATCHDOG_H
#define LLMC_WATCHDOG_H
#include "watchdog_start.h"

static void (*watch_exit_hook)(void);

__attribute__((noreturn)) static inline void watch_exit(int status) {
    if (watch_exit_hook) watch_exit_hook();
    _exit(status);
}

// ---- lines

// The warn hook (common.h). Rank 0 records hashes of what it prints; other ranks keep their lines in case they fail.
static inline bool watch_record_line(const char *line) {
    pthread_mutex_lock(&watch.lock);
    if (watch.rank == 0) {
        if (watch.printed_count < WATCH_LINES) watch.printed[watch.printed_count++] = XXH3_64bits(line, strlen(line));
    } else {
        size_t have = strlen(watch.pending), length = min_size(strlen(line), WATCH_TEXT - 2);
        if (have + length + 2 > WATCH_TEXT) have = 0; // keep the last lines
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

// Prints those lines of a failed rank that were not printed yet.
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
    // Give the ranks time to exit before a launcher kills them. Received data are drained: closing a socket with unread
    // data resets the connection, and the peer could lose the message.
    for (double until = now_seconds() + 0.1; now_seconds() < until; usleep(2000)) {
        char taken[4096];
        for (int i = 0; i < watch.peer_count; i++)
            while (watch.peers[i].fd >= 0 && recv(watch.peers[i].fd, taken, sizeof(taken), MSG_DONTWAIT) > 0) {
            }
    }
    watch_exit(status);
}

// Collects the failures of other ranks for a short time, prints them and ends the program. A line that all ranks have
// is printed by rank 0 itself, which may be slightly later than the others.
__attribute__((noreturn)) static inline void watch_fail_run(WatchMessage *first, int status) {
    WatchMessage *failed = (WatchMessage *)checked_calloc(watch.ranks + 1, sizeof(WatchMessage));
    int count = 0;
    if (first) failed[count++] = *first;
    for (double until = now_seconds() + WATCH_GRACE; now_seconds() < until;) {
        bool all = true;
        for (int i = 1; i < watch.peer_count; i++) {
            WatchPeer *p = &watch.peers[i];
            struct pollfd poll_one = {p->fd, POLLIN, 0};
            if (p->closed || p->fd < 0) continue;
            all = false;
            if (poll(&poll_one, 1, 5) <= 0) continue;
            WatchReceiveStatus receipt = watch_receive(p, &failed[count]);
            if (receipt == WATCH_NOTHING) continue;
            p->closed = receipt != WATCH_MESSAGE || failed[count].kind != WATCH_HEARTBEAT;
            if (receipt == WATCH_MESSAGE && failed[count].kind == WATCH_FAILED) count++;
        }
        if (all) break;
    }
    if (!WATCH_GET(exiting)) usleep(100000); // let rank 0 print its own lines
    for (int i = 0; i < count; i++) watch_print_failure(&failed[i]);
    watch_end_run(status);
}

// Includes rank 0's own step, since ranks run in step: it is more recent than the last message of the failed rank.
static inline void watch_report_failure(const WatchMessage *m, const char *what, double seconds) {
    char since[64] = "";
    if (seconds > 0) snprintf(since, sizeof(since), " %.0f s", seconds);
    fprintf(stderr,
            "diffv2: rank %d (%s) %s%s; last message at step %" PRId64 ", %s; rank %d is at step %" PRId64
            ", %s; all ranks exit; --resume continues from the newest checkpoint\n",
            m->rank, m->host, what, since, m->step, phases[m->phase].description, watch.rank, WATCH_GET(step),
            phases[WATCH_GET(phase)].description);
}

// Of the ranks that others wait for, reports the one with the least progress.
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
                         slowest->waiting > 0.1 ? "waits like the other ranks, and no message has arrived for"
                                                : "has not reached the collective in which other ranks have waited for",
                         longest);
    watch_end_run(EXIT_FAILED);
}

static inline void watch_handle_message(WatchPeer *p) {
    WatchMessage m;
    WatchReceiveStatus receipt = watch_receive(p, &m);
    if (receipt == WATCH_NOTHING) return;
    if (receipt != WATCH_MESSAGE) {
        __atomic_store_n(&p->closed, true, __ATOMIC_RELAXED);
        // this process was stopped; the others have reported it
        if (watch.resumed > 0 && now_seconds() - watch.resumed < watch_limit()) watch_exit(EXIT_FAILED);
        watch_report_failure(
            &p->last, receipt == WATCH_CLOSED ? "has closed its connection (killed?)" : "has sent an invalid message",
            0);
        if (watch.rank == 0) watch_end_run(EXIT_FAILED);
        watch_exit(EXIT_FAILED);
    }
    p->last_received = now_seconds();
    if (m.kind == WATCH_END) watch_exit(m.status);
    p->last = m;
    if (m.kind == WATCH_GOODBYE) __atomic_store_n(&p->closed, true, __ATOMIC_RELAXED);
    if (m.kind != WATCH_FAILED) return;
    __atomic_store_n(&p->closed, true, __ATOMIC_RELAXED);
    watch_fail_run(&m, m.status);
}

static inline void watch_check_heartbeats(double limit) {
    for (int i = 0; i < watch.peer_count; i++) {
        WatchPeer *p = &watch.peers[i];
        double silent = now_seconds() - p->last_received;
        if (p->fd < 0 || p->closed || silent < limit) continue;
        // if rank 0 is unresponsive, only a few ranks print
        if (watch.rank <= 4) watch_report_failure(&p->last, "has been unresponsive for", silent);
        if (watch.rank == 0) watch_end_run(EXIT_FAILED);
        watch_exit(EXIT_FAILED);
    }
}

// This process itself was stopped for a while (for example, the whole job was suspended): restarts all time limits.
static inline void watch_reset_timers(double now) {
    watch.resumed = now;
    for (int i = 0; i < watch.peer_count; i++) watch.peers[i].last_received = now;
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
            fds[i].fd = watch.peers[i].closed ? -1 : watch.peers[i].fd;
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
        if (now_seconds() - now > fmax(0.5, limit / 4)) continue; // receive first
        watch_check_heartbeats(limit);
        if (watch.rank == 0) watch_check_waiting(limit);
    }
    free(fds);
    return NULL;
}

// ---- begin and end

// Waits until the peers have closed their connections. Closing a socket with unread data resets the connection; the
// peer could lose the last message and report this rank as failed.
static inline void watch_close_connections(void) {
    bool all = false;
    for (int i = 0; i < watch.peer_count; i++)
        if (watch.peers[i].fd >= 0) shutdown(watch.peers[i].fd, SHUT_WR); // no more heartbeats
    for (double until = now_seconds() + 2; !all && now_seconds() < until; usleep(1000)) {
        all = true;
        for (int i = 0; i < watch.peer_count; i++)
            all = all && (watch.peers[i].fd < 0 || __atomic_load_n(&watch.peers[i].closed, __ATOMIC_RELAXED));
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

// After watch_listen on rank 0; all ranks have its address. Returns when all are connected.
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
    for (int i = 0; i < watch.peer_count; i++) watch.peers[i].last_received = now_seconds();
    warn_hook = watch_record_line;
    exit_hook = watch_on_exit;
    thread_start(&watch.thread, watch_thread, NULL, "that watches the ranks");
}
#endif
