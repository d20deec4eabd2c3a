/*
logger.h: the directory of a run: run.json and log.jsonl.

  bool   log_run_exists(dir)           whether it has run.json
  cJSON *log_read_run_json(dir)        cJSON_Delete()
  RunLock log_lock(dir)                locks an existing run; ends the program when another process holds the lock. The
                                       caller sets log->lock to it
  void   log_refuse_run(dir)           ends the program if the directory contains a run
  void   log_create(log, dir, run)     a new run: creates the directory, locks it, writes run.json; refuses an existing
         run
  void   log_resume(log, dir, step, measures)
                                       an existing run: locks it, drops a torn last line and the records after `step`.
                                       measures: also drops measurements after `step`, which will be repeated
  int64_t log_last_step(dir, &saved)   the last step in the log, and the last step for which it records a checkpoint;
                                       0: none
  void   log_write_run(log, dir, run)  replaces run.json of a locked run
  void   log_sync(log)                 flushes the log to the disk; required before a checkpoint is saved. Writes
                                       run.json and log.jsonl again if they were deleted
  void   log_close(log)

  A record: log_begin(log, kind, step), its values, log_end(log). It allocates no memory.
  log_number(log, key, double)   log_integer(log, key, int64_t)   log_bool(log, key, bool)
  log_string(log, key, text)     log_bytes(log, key, bytes, size): with bytes that are not UTF-8, and NUL
  log_record(log, record)              a whole record of any length, as JSON

  A Log that is all zero is closed: records are discarded.

  format   run.json: an object with everything that the run depends on, and its starts (starts.h). It is replaced
           atomically; a directory with a run.json is a run. log.jsonl: append-only, one JSON object per line that
           begins with "kind" and "step".
  numerics 9 significant digits, which distinguish neighbouring fp32 values. NaN and infinities are null.
  atomic   one write() per line; a failing write ends the program: on a full disk a checkpoint would fail too
  lock     One process at a time uses a run: it locks run.json, on file systems with locks. A new run.json is locked
           under its temporary name, before it is written, and keeps the lock when it is renamed. If two first
           starts run at the same time, one gets the lock and the other changes nothing.
  links    run.json.tmp and log.jsonl.tmp are created anew, and log.jsonl is not written through a link. log_lock
           removes what a killed start has left.
  errors   CHECK, with the path
*/
#pragma once
#include "../base/common.h"
#include "../base/files.h"
#include "../base/json.h"

enum { LOG_LINE_SIZE = 64 << 10, LOG_STRING_LIMIT = 32 << 10, LOG_RUN_LIMIT = 16 << 20 };

typedef struct {
    bool held;
    int fd; // run.json
} RunLock;

typedef struct {
    RunLock lock;
    bool open, full; // full: a record has more than LOG_LINE_SIZE bytes
    int fd;
    char path[PATH_SIZE];
    size_t length;
    char line[LOG_LINE_SIZE];
} Log;

static inline void log_path(const char *dir, const char *name, char out[PATH_SIZE]) {
    int n = snprintf(out, PATH_SIZE, "%s/%s", dir, name);
    CHECK(n > 0 && n < PATH_SIZE, "a name is too long: %.80s...", dir);
}

static inline bool log_run_exists(const char *dir) {
    char path[PATH_SIZE];
    log_path(dir, "run.json", path);
    return file_exists(path);
}

static inline void log_check_run(const char *dir) {
    CHECK(log_run_exists(dir), "%s has no run.json: it is not a run; start a new run without --resume", dir);
}

static inline cJSON *log_read_run_json(const char *dir) {
    char path[PATH_SIZE];
    size_t size = 0;
    log_check_run(dir);
    log_path(dir, "run.json", path);
    char *text = file_read(path, LOG_RUN_LIMIT, &size);
    CHECK(text, "cannot read %s: %s", path, strerror(errno));
    cJSON *run = json_parse(text, size);
    free(text);
    CHECK(cJSON_IsObject(run), "%s is not a JSON object; restore it, or use another --out", path);
    return run;
}

// Locks an open file. Ends the program when another process holds the lock. false: another process renamed or replaced
// the file before it was locked.
static inline bool log_lock_file(int fd, const char *dir, const char *path) {
    struct flock lock;
    memset(&lock, 0, sizeof(lock));
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    int taken = fcntl(fd, F_OFD_SETLK, &lock); // other failures: the file system has no locks
    CHECK(taken == 0 || (errno != EAGAIN && errno != EACCES), "%s: another process is running this run", dir);
    return file_is_named(fd, path);
}

// Creates and locks run.json.tmp. Removes one that a killed start left, without writing to it.
static inline int log_lock_new(const char *dir, const char *path) {
    for (;;) {
        int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        bool made = fd >= 0;
        if (!made && errno == EEXIST) fd = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT && directory_exists(dir)) continue; // another start has renamed it
        CHECK(fd >= 0, "cannot create %s: %s", path, errno == ELOOP ? "it is a link; remove it" : strerror(errno));
        bool locked = log_lock_file(fd, dir, path);
        if (made && locked) return fd;
        if (locked) CHECK(unlink(path) == 0 || errno == ENOENT, "cannot remove %s: %s", path, strerror(errno));
        close(fd);
    }
}

// Also removes files of a start that was killed before it renamed them.
static inline RunLock log_lock(const char *dir) {
    static const char *const temporary[] = {"run.json.tmp", "log.jsonl.tmp"};
    char path[PATH_SIZE];
    struct stat st;
    RunLock lock = {true, -1};
    log_check_run(dir);
    log_path(dir, "run.json", path);
    do {
        if (lock.fd >= 0) close(lock.fd);
        lock.fd = open(path, O_RDWR | O_CLOEXEC);
        CHECK(lock.fd >= 0, "cannot open %s: %s", path, strerror(errno));
    } while (!log_lock_file(lock.fd, dir, path));
    for (int i = 0; i < 2; i++) {
        log_path(dir, temporary[i], path);
        CHECK(unlink(path) == 0 || errno == ENOENT, "cannot remove %s: %s", path, strerror(errno));
    }
    log_path(dir, "log.jsonl", path);
    CHECK(lstat(path, &st) != 0 || !S_ISLNK(st.st_mode), "%s is a link: move the file that it names to its place",
          path);
    return lock;
}

// fd: run.json.tmp, locked. Its lock replaces the lock of the old run.json.
static inline void log_publish_run(Log *log, const char *dir, int fd, const cJSON *run) {
    char path[PATH_SIZE], temporary[PATH_SIZE];
    size_t size = 0;
    log_path(dir, "run.json", path);
    log_path(dir, "run.json.tmp", temporary);
    char *text = json_text(run, &size);
    unfinished_begin(temporary);
    CHECK(ftruncate(fd, 0) == 0, "cannot write %s: %s", temporary, strerror(errno));
    file_write(fd, text, size, temporary);
    CHECK(fsync(fd) == 0, "cannot flush %s to the disk: %s", temporary, strerror(errno));
    file_rename_synced(temporary, path);
    unfinished_end();
    free(text);
    if (log->lock.held) close(log->lock.fd);
    log->lock.held = true;
    log->lock.fd = fd;
}

static inline void log_write_run(Log *log, const char *dir, const cJSON *run) {
    char temporary[PATH_SIZE];
    assert(log->lock.held);
    log_path(dir, "run.json.tmp", temporary);
    log_publish_run(log, dir, log_lock_new(dir, temporary), run);
}

static inline void log_open(Log *log, const char *dir, int flags) {
    log_path(dir, "log.jsonl", log->path);
    log->fd = open(log->path, O_RDWR | O_APPEND | O_CLOEXEC | O_NOFOLLOW | flags, 0666);
    CHECK(log->fd >= 0, "cannot open %s: %s", log->path, strerror(errno));
    log->open = true;
}

static inline void log_refuse_run(const char *dir) {
    CHECK(!log_run_exists(dir), "%s already contains a run; use --resume to continue it, or another --out", dir);
}

static inline void log_create(Log *log, const char *dir, const cJSON *run) {
    static const char *const names[] = {"log.jsonl", "checkpoints"};
    char temporary[PATH_SIZE], remains[2][PATH_SIZE];
    directory_create(dir);
    log_path(dir, "run.json.tmp", temporary);
    bool is_run = log_run_exists(dir);
    int fd = is_run ? -1 : log_lock_new(dir, temporary);
    is_run = log_run_exists(dir); // another process may have started it since
    for (int i = 0; i < 2; i++) {
        log_path(dir, names[i], remains[i]);
        if (!file_exists(remains[i])) remains[i][0] = 0;
    }
    if (fd >= 0 && (is_run || remains[0][0] || remains[1][0])) unlink(temporary);
    if (is_run) log_refuse_run(dir);
    for (int i = 0; i < 2; i++)
        CHECK(!remains[i][0], "%s exists without a run.json: restore run.json, then --resume, or use another --out",
              remains[i]);
    log_publish_run(log, dir, fd, run);
    log_open(log, dir, O_CREAT | O_EXCL);
}

// Creates PATH.tmp, a copy of log.jsonl that log_publish_copy renames to it. After a kill the next start removes it.
static inline int log_create_copy(const char *path, char temporary[PATH_SIZE]) {
    int n = snprintf(temporary, PATH_SIZE, "%s.tmp", path);
    CHECK(n < PATH_SIZE, "a name is too long: %.80s...", path);
    unfinished_begin(temporary);
    return file_create(temporary);
}
static inline void log_publish_copy(const char *temporary, const char *path) {
    file_rename_synced(temporary, path);
    unfinished_end();
}

static inline void log_close(Log *log) {
    if (log->open) file_close_synced(log->fd, log->path);
    if (log->lock.held) close(log->lock.fd);
    log->open = log->lock.held = false;
}

// Restores deleted files of the log. The directory belongs to the run unless another file has the name run.json.
static inline void log_restore(Log *log) {
    char dir[PATH_SIZE], path[PATH_SIZE], temporary[PATH_SIZE];
    size_t size = 0;
    directory_of(log->path, dir, sizeof(dir));
    log_path(dir, "run.json", path);
    if (log->lock.held && !file_is_named(log->lock.fd, path)) {
        CHECK(
            errno == ENOENT,
            "%s was replaced during the run, so %s may be another run's, and nothing more is saved there; restore the "
            "directory, then --resume",
            path, dir);
        warn("%s was deleted during the run; it is written again", path);
        char *text = file_read_open(log->lock.fd, LOG_RUN_LIMIT, &size);
        CHECK(text, "cannot read the deleted %s: %s", path, strerror(errno));
        cJSON *run = json_parse(text, size);
        directory_create(dir);
        log_write_run(log, dir, run);
        cJSON_Delete(run);
        free(text);
    }
    if (file_is_named(log->fd, log->path)) return;
    warn("%s was %s during the run; it is written again", log->path, errno == ENOENT ? "deleted" : "replaced");
    char *text = file_read_open(log->fd, SIZE_MAX, &size);
    CHECK(text, "cannot read the deleted %s: %s", log->path, strerror(errno));
    close(log->fd);
    int copy = log_create_copy(log->path, temporary);
    file_write(copy, text, size, log->path);
    file_close_synced(copy, log->path);
    log_publish_copy(temporary, log->path);
    free(text);
    log_open(log, dir, 0);
}

static inline void log_sync(Log *log) {
    if (log->open) log_restore(log);
    if (log->open) CHECK(fsync(log->fd) == 0, "cannot flush %s to the disk: %s", log->path, strerror(errno));
}

static inline bool log_is_measured(const char *kind) {
    return strcmp(kind, "val") == 0 || strcmp(kind, "choices") == 0 || strcmp(kind, "sample") == 0;
}

// Whether the line is a complete record of a step up to `step`. *broken: it is not a record. A run that starts again
// from step 0 measures again; its events stay.
static inline bool log_line_stays(char *line, size_t length, int64_t step, bool measures, bool *broken) {
    double at = 0;
    *broken = length == 0 || line[length - 1] != '\n';
    if (*broken) return false;
    line[length - 1] = 0;
    cJSON *record = json_parse(line, length - 1);
    line[length - 1] = '\n';
    *broken = !cJSON_IsObject(record);
    const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "kind"));
    bool dated = json_get_number(record, "step", &at), last = dated && at == (double)step;
    bool again =
        (step == 0 && kind && strcmp(kind, "event") != 0) || (measures && last && kind && log_is_measured(kind));
    bool stays = !*broken && !again && (!dated || at <= (double)step);
    cJSON_Delete(record);
    return stays;
}

static inline int64_t log_last_step(const char *dir, int64_t *saved) {
    char path[PATH_SIZE], *line = NULL;
    double step = 0, of_step = 0, last = 0;
    size_t room = 0;
    *saved = 0;
    log_path(dir, "log.jsonl", path);
    FILE *f = fopen(path, "rb");
    if (!f && !file_exists(path)) return 0; // the run was stopped before its first record
    CHECK(f, "cannot read %s: %s", path, strerror(errno));
    for (ssize_t length; (length = getline(&line, &room, f)) > 0;) {
        cJSON *record = json_parse(line, (size_t)length);
        if (json_get_number(record, "step", &step)) last = fmax(last, fmin(step, 1e15)); // it may be any number
        if (json_get_number(record, "of_step", &of_step)) *saved = (int64_t)fmax(0, fmin(of_step, 1e15));
        cJSON_Delete(record);
    }
    CHECK(!ferror(f), "cannot read %s: %s", path, strerror(errno));
    fclose(f);
    free(line);
    return (int64_t)last;
}

static inline void log_drop_after(const char *path, int64_t step, bool measures) {
    char *line = NULL, temporary[PATH_SIZE];
    FILE *from = fopen(path, "rb");
    if (!from && errno == ENOENT) {
        if (step) warn("%s is missing: the records up to step %" PRId64 " are lost, and a new log begins", path, step);
        return; // without a step, the run was stopped before its first record
    }
    CHECK(from, "cannot read %s: %s", path, strerror(errno));
    FILE *to = fdopen(log_create_copy(path, temporary), "wb");
    CHECK(to, "cannot write %s: %s", path, strerror(errno));
    size_t room = 0, broken_count = 0;
    bool was_broken = false;
    for (ssize_t length; (length = getline(&line, &room, from)) > 0;) {
        broken_count += was_broken; // not the last line
        if (log_line_stays(line, (size_t)length, step, measures, &was_broken)) fwrite(line, 1, (size_t)length, to);
    }
    CHECK(!ferror(from), "cannot read %s: %s", path, strerror(errno));
    if (broken_count) warn("%s: dropped %zu lines that are not records", path, broken_count);
    fclose(from);
    free(line);
    CHECK(fflush(to) == 0 && !ferror(to) && fsync(fileno(to)) == 0 && fclose(to) == 0, "cannot write %s: %s", path,
          strerror(errno));
    log_publish_copy(temporary, path);
}

static inline void log_resume(Log *log, const char *dir, int64_t step, bool measures) {
    char path[PATH_SIZE];
    if (!log->lock.held) log->lock = log_lock(dir);
    log_path(dir, "log.jsonl", path);
    log_drop_after(path, step, measures);
    log_open(log, dir, O_CREAT);
}

// ---- records

static inline void log_append(Log *log, const char *text, size_t length) {
    log->full = log->full || log->length + length > LOG_LINE_SIZE;
    if (log->full) return;
    memcpy(log->line + log->length, text, length);
    log->length += length;
}

// text[size] is 0.
static inline void log_quoted(Log *log, const char *text, size_t size) {
    char piece[8];
    const char *text_end = text + size;
    size_t end = log->length + LOG_STRING_LIMIT; // longer strings are cut: the line has a fixed size
    log_append(log, "\"", 1);
    while (text < text_end && log->length < end) {
        size_t length = json_escape(&text, piece);
        log_append(log, piece, length);
    }
    log_append(log, "\"", 1);
}

static inline void log_key(Log *log, const char *key) {
    log_append(log, log->length ? ", " : "{", log->length ? 2 : 1);
    log_quoted(log, key, strlen(key));
    log_append(log, ": ", 2);
}

static inline void log_value(Log *log, const char *key, const char *text) {
    log_key(log, key);
    log_append(log, text, strlen(text));
}

static inline void log_bool(Log *log, const char *key, bool value) { log_value(log, key, value ? "true" : "false"); }
static inline void log_integer(Log *log, const char *key, int64_t value) {
    char digits[24];
    FORMAT(digits, "%" PRId64, value);
    log_value(log, key, digits);
}
static inline void log_number(Log *log, const char *key, double value) {
    char digits[32];
    if (!isfinite(value)) FORMAT(digits, "null");
    else FORMAT(digits, "%.9g", value);
    log_value(log, key, digits);
}
static inline void log_bytes(Log *log, const char *key, const char *bytes, size_t size) {
    log_key(log, key);
    log_quoted(log, bytes, size);
}
static inline void log_string(Log *log, const char *key, const char *text) { log_bytes(log, key, text, strlen(text)); }

static inline void log_begin(Log *log, const char *kind, int64_t step) {
    log->length = 0;
    log->full = false;
    log_string(log, "kind", kind);
    log_integer(log, "step", step);
}

static inline void log_write_line(Log *log, const char *line, size_t length) {
    if (!log->open) return;
    ssize_t n;
    do n = write(log->fd, line, length);
    while (n < 0 && errno == EINTR);
    CHECK(n == (ssize_t)length, "cannot write %s: %s", log->path,
          n < 0 ? strerror(errno) : "a line was written only in part; is the disk full?");
}

static inline void log_end(Log *log) {
    log_append(log, "}\n", 2);
    assert(!log->full);
    log_write_line(log, log->line, log->length);
}

static inline void log_record(Log *log, const cJSON *record) {
    size_t size = 0;
    char *line = json_line(record, &size);
    log_write_line(log, line, size);
    free(line);
}
