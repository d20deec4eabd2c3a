/*
files.h: reading, atomic writing and removal of files and directories.

  char *file_read_open(fd, limit, &size)     an open file, also one that was deleted; otherwise like file_read
  char *file_read(path, limit, &size)        a complete regular file, followed by zero bytes; NULL and errno; free()
  bool  file_pread(fd, to, bytes, offset)    all bytes, or false and errno (ENODATA: the file is shorter)
  void  file_write(fd, from, bytes, path)    all bytes, at the current position
  void  file_pwrite(fd, from, bytes, offset, path)
  bool  file_exists(path)                    also a link to nothing; failures other than absence end the program
  int   file_create(path)                    opens a new file for writing, in the place of an old one or of a link
  void  file_close_synced(fd, path)          fsync (regular files only) and close
  void  file_write_new(path, data, size)     creates a file, writes it and flushes it to the disk
  int   output_open(o, path)                 a file that a user names: it is complete or unchanged. output_publish(o)
                                             after the descriptor is closed
  void  file_write_atomic(path, text, size)  writes all of it
  void  file_rename_synced(from, to)         rename, and fsync of the directory
  void  directory_sync(path)                 makes a rename survive a power failure
  void  directory_of(path, out, out_size)
  void  directory_create(path)               with its parents; existing directories are no error
  bool  directory_remove(path)               with its contents; false and errno; a missing one is no error
  void  unfinished_begin(path), unfinished_end()   in between a failure removes the file or directory PATH.tmp

  output files   written under a random temporary name, flushed, renamed. Symbolic links are followed. A device, a pipe,
                 and the file that stdout or stderr already is, are written directly, in order.
  own files      Temporary files of a run or a corpus have fixed names, so that the next start replaces what a killed
                 one left. Links are not followed.

Functions that return void exit through CHECK with the path and the system's error message.
*/
#pragma once
#include "common.h"

enum { PATH_SIZE = 4096 };
#ifndef FILE_PIECE
#define FILE_PIECE (1 << 30) // bytes per system call; Linux transfers less than 2 GiB at a time
#endif

static inline bool file_pread(int fd, void *to, size_t bytes, uint64_t offset) {
    char *p = (char *)to;
    while (bytes) {
        ssize_t n = pread(fd, p, min_size(bytes, FILE_PIECE), (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENODATA;
        if (n <= 0) return false;
        p += n, bytes -= n, offset += (uint64_t)n;
    }
    return true;
}

// O_NONBLOCK: opening a named pipe must not block; it is rejected below.
static inline int file_open_regular(const char *path, uint64_t *size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return -1;
    struct stat st;
    int error = fstat(fd, &st) != 0 ? errno : S_ISDIR(st.st_mode) ? EISDIR : !S_ISREG(st.st_mode) ? EINVAL : 0;
    if (error) {
        close(fd);
        errno = error;
        return -1;
    }
    *size = (uint64_t)st.st_size;
    return fd;
}

static inline char *file_read_open(int fd, size_t limit, size_t *size) {
    struct stat st;
    if (fstat(fd, &st) != 0) return NULL;
    errno = EFBIG;
    if ((uint64_t)st.st_size > limit) return NULL;
    char *text = (char *)checked_calloc((size_t)st.st_size + 8, 1);
    *size = (size_t)st.st_size;
    if (file_pread(fd, text, *size, 0)) return text;
    int error = errno;
    free(text);
    errno = error;
    return NULL;
}

static inline char *file_read(const char *path, size_t limit, size_t *size) {
    uint64_t bytes = 0;
    int fd = file_open_regular(path, &bytes);
    if (fd < 0) return NULL;
    char *text = file_read_open(fd, limit, size);
    int error = errno;
    close(fd);
    errno = error;
    return text;
}

// Whether a path names an open file. If not, errno is ENOENT if there is no file, and 0 if it is another file.
static inline bool file_is_named(int fd, const char *path) {
    struct stat ours, named;
    CHECK(fstat(fd, &ours) == 0, "cannot look at %s: %s", path, strerror(errno));
    errno = 0;
    return stat(path, &named) == 0 && named.st_dev == ours.st_dev && named.st_ino == ours.st_ino;
}

static inline void file_write(int fd, const void *from, size_t bytes, const char *path) {
    const char *p = (const char *)from;
    while (bytes) {
        ssize_t n = write(fd, p, min_size(bytes, FILE_PIECE));
        if (n < 0 && errno == EINTR) continue;
        CHECK(n > 0, "cannot write %s: %s", path, n < 0 ? strerror(errno) : "nothing was written");
        p += n, bytes -= n;
    }
}

static inline void file_pwrite(int fd, const void *from, size_t bytes, uint64_t offset, const char *path) {
    const char *p = (const char *)from;
    while (bytes) {
        ssize_t n = pwrite(fd, p, min_size(bytes, FILE_PIECE), (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        CHECK(n > 0, "cannot write %s: %s", path, n < 0 ? strerror(errno) : "nothing was written");
        p += n, bytes -= n, offset += (uint64_t)n;
        fault_point(FAULT_WRITE, (void *)path, bytes);
    }
}

// O_EXCL: does not write through a link, or into a file that also has another name.
static inline int file_create(const char *path) {
    bool free_name = unlink(path) == 0 || errno == ENOENT;
    int fd = free_name ? open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : -1;
    CHECK(fd >= 0, "cannot create %s: %s", path, strerror(errno));
    return fd;
}

static inline bool file_is_regular(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
}

static inline void file_close_synced(int fd, const char *path) {
    CHECK(!file_is_regular(fd) || fsync(fd) == 0, "cannot flush %s to disk: %s", path, strerror(errno));
    CHECK(close(fd) == 0, "cannot close %s: %s", path, strerror(errno));
}

static inline void directory_of(const char *path, char *out, size_t out_size) {
    const char *slash = strrchr(path, '/');
    size_t length = !slash ? 1 : slash == path ? 1 : (slash - path);
    CHECK(length < out_size, "a name is too long: %.80s...", path);
    memcpy(out, slash ? path : ".", length);
    out[length] = 0;
}

static inline void directory_sync(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(fd >= 0, "cannot open the directory %s: %s", path, strerror(errno));
    // some network file systems cannot sync a directory and return EINVAL
    CHECK(fsync(fd) == 0 || errno == EINVAL, "cannot flush the directory %s to disk: %s", path, strerror(errno));
    close(fd);
}

static inline void file_rename_synced(const char *from, const char *to) {
    char directory[PATH_SIZE];
    CHECK(rename(from, to) == 0, "cannot rename %s to %s: %s", from, to, strerror(errno));
    directory_of(to, directory, sizeof(directory));
    directory_sync(directory);
}

static inline void file_write_new(const char *path, const void *data, size_t size) {
    int fd = file_create(path);
    file_write(fd, data, size, path);
    file_close_synced(fd, path);
}

static inline bool file_exists(const char *path) {
    struct stat st;
    bool exists = lstat(path, &st) == 0;
    CHECK(exists || errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG, "cannot look at %s: %s", path,
          strerror(errno));
    return exists;
}

static inline bool directory_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static inline void directory_create(const char *path) {
    char part[PATH_SIZE];
    FORMAT(part, "%s", path);
    for (char *p = part + 1;; p++) {
        if (*p && *p != '/') continue;
        char end = *p;
        *p = 0;
        struct stat st;
        int error = mkdir(part, 0777) == 0 ? 0 : errno;
        bool link = error == EEXIST && stat(part, &st) != 0; // a link to nothing, or in a loop
        if (link) error = errno;
        CHECK(!error || directory_exists(part), "cannot create the directory %s: %s%s", part,
              link ? "it is a link, " : "", strerror(error));
        *p = end;
        if (!end) return;
    }
}

static inline bool directory_remove(const char *path) {
    struct stat st;
    if (lstat(path, &st) != 0) return errno == ENOENT;
    if (!S_ISDIR(st.st_mode)) return unlink(path) == 0 || errno == ENOENT;
    DIR *d = opendir(path);
    if (!d) return errno == ENOENT; // another process removes it too
    bool done = true;
    for (struct dirent *e; done && (e = readdir(d)) != NULL;) {
        char child[PATH_SIZE];
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        FORMAT(child, "%s/%s", path, e->d_name);
        done = directory_remove(child);
    }
    closedir(d);
    return done && !fault_point(FAULT_REMOVE, (void *)path, 0) && (rmdir(path) == 0 || errno == ENOENT);
}

// ---- files that are incomplete

static char unfinished[PATH_SIZE]; // empty: none

// Removes the unfinished file. The new name prevents a thread that still writes from publishing it.
static inline void unfinished_remove(void) {
    char path[PATH_SIZE + 8];
    snprintf(path, sizeof(path), "%.*s.old.tmp", (int)(strlen(unfinished) - strlen(".tmp")), unfinished);
    if (rename(unfinished, path) == 0) directory_remove(path);
}

static inline void unfinished_begin(const char *path) {
    assert(!unfinished[0]);
    FORMAT(unfinished, "%s", path);
    failure_hook = unfinished_remove;
}

static inline void unfinished_end(void) {
    unfinished[0] = 0;
    failure_hook = NULL;
}

typedef struct {
    char target[PATH_SIZE], temporary[PATH_SIZE]; // without links; temporary is empty if the file is written directly
} OutputFile;

static inline int output_open(OutputFile *o, const char *path) {
    char link[PATH_SIZE], directory[PATH_SIZE];
    struct stat st;
    uint32_t suffix;
    int fd = -1;
    bool exists = stat(path, &st) == 0;
    o->temporary[0] = 0;
    for (int i = STDOUT_FILENO; fd < 0 && i <= STDERR_FILENO; i++)
        if (file_is_named(i, path) && fflush(stdout) == 0) fd = fcntl(i, F_DUPFD_CLOEXEC, 0);
    if (fd < 0 && exists && !S_ISREG(st.st_mode)) fd = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0 || !exists || S_ISREG(st.st_mode), "cannot open %s: %s", path, strerror(errno));
    if (fd >= 0) return fd;
    FORMAT(o->target, "%s", path);
    for (ssize_t n, links = 0; (n = readlink(o->target, link, sizeof(link) - 1)) >= 0; links++) {
        CHECK(links < 40, "cannot create %s: %s", path, strerror(ELOOP));
        link[n] = 0;
        directory_of(o->target, directory, sizeof(directory));
        FORMAT(o->target, "%s%s%s", link[0] == '/' ? "" : directory, link[0] == '/' ? "" : "/", link);
    }
    CHECK(getrandom(&suffix, sizeof(suffix), 0) == sizeof(suffix), "cannot get a random number: %s", strerror(errno));
    FORMAT(o->temporary, "%s.%08" PRIx32 ".tmp", o->target, suffix);
    unfinished_begin(o->temporary); // before it exists: a signal at any point removes it
    fd = open(o->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    CHECK(fd >= 0, "cannot create %s: %s", path, strerror(errno));
    return fd;
}

static inline void output_publish(const OutputFile *o) {
    if (!o->temporary[0]) return;
    file_rename_synced(o->temporary, o->target);
    unfinished_end();
}

static inline void file_write_atomic(const char *path, const char *text, size_t size) {
    OutputFile o;
    int fd = output_open(&o, path);
    file_write(fd, text, size, path);
    file_close_synced(fd, path);
    output_publish(&o);
}
