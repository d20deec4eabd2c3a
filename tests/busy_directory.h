/*
busy_directory.h: directories that cannot be removed, as on a network file system where another process has one of their
files open. BUSY=TEXT in the environment: rmdir of a path with this text fails.

Include before what includes llmc/base/files.h.
*/
#ifndef TESTS_BUSY_DIRECTORY_H
#define TESTS_BUSY_DIRECTORY_H
#include "../llmc/base/common.h"

static inline int busy_rmdir(const char *path) {
    const char *busy = getenv("BUSY");
    if (!busy || !*busy || !strstr(path, busy)) return rmdir(path);
    errno = EBUSY;
    return -1;
}
#define rmdir busy_rmdir
#endif
