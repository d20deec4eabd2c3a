/*
files.h: reading, atomic writing and removal of files and directories.

  char *file_read(path, limit, &size)        a complete regular file, followed by zero bytes; NULL and errno; free()
  bool  file_pread(fd, to, bytes, offset)    all bytes, or false and errno (ENODATA: the file is shorter)
  void  file_write(fd, from, bytes, path)    all bytes, at the current position
  void  file_pwrite(fd, from, bytes, offset, path)
  int   file_create(path)                    opens an empty file for writing
  void  file_close_synced(fd, path)          fsync (regular files only) and close
  void  file_write_atomic(path, text, size)  temporary name, fsync, rename, fsync of the directory
  void  file_rename_synced(from, to)         rename, and fsync of the directory
  void  directory_sync(path)                 makes a rename survive a power failure
  void  directory_of(path, out, out_size)
  void  directory_create(path)               with its parents; existing directories are no error
  bool  directory_remove(path)               with its contents; false and errno; a missing one is no error

Functions that return void exit through CHECK with the path and the system's error message.
*/
#ifndef LLMC_FILES_H
#define LLMC_FILES_H
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

static inline char *file_read(const char *path, size_t limit, size_t *size) {
    uint64_t bytes = 0;
    int fd = file_open_regular(path, &bytes);
    if (fd < 0) return NULL;
    char *text = NULL;
    int error = EFBIG;
    if (bytes <= limit) {
        text = (char *)checked_calloc(bytes + 8, 1);
        error = file_pread(fd, text, bytes, 0) ? 0 : errno;
    }
    close(fd);
    if (error) {
        free(text);
        errno = error;
        return NULL;
    }
    *size = bytes;
    return text;
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

static inline int file_create(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
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

static inline void file_write_atomic(const char *path, const char *text, size_t size) {
    char temporary[PATH_SIZE];
    FORMAT(temporary, "%s.tmp", path);
    int fd = file_create(temporary);
    file_write(fd, text, size, temporary);
    file_close_synced(fd, temporary);
    file_rename_synced(temporary, path);
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
        int error = mkdir(part, 0777) == 0 ? 0 : errno; // directory_exists sets errno too
        CHECK(!error || directory_exists(part), "cannot create the directory %s: %s", part, strerror(error));
        *p = end;
        if (!end) return;
    }
}

static inline bool directory_remove(const char *path) {
    struct stat st;
    if (lstat(path, &st) != 0) return errno == ENOENT;
    if (!S_ISDIR(st.st_mode)) return unlink(path) == 0;
    DIR *d = opendir(path);
    if (!d) return false;
    bool done = true;
    for (struct dirent *e; done && (e = readdir(d)) != NULL;) {
        char child[PATH_SIZE];
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        FORMAT(child, "%s/%s", path, e->d_name);
        done = directory_remove(child);
    }
    closedir(d);
    return done && !fault_point(FAULT_REMOVE, (void *)path, 0) && rmdir(path) == 0;
}
#endif
