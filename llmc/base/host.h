/*
host.h: CPU cores and memory of this machine that the process may use.

  int  host_cores(root)          cores in the affinity mask, at most the CPU quota of the cgroups, rounded up
  bool host_memory(root, &m)     bytes that can be allocated now without swapping, and what limits them; false if the
                                 system does not report them

A cgroup's limit applies to everything below it, so each level from the process's own cgroup to the root is read, in
cgroup version 2. In a container the path in /proc/self/cgroup may not exist under /sys/fs/cgroup; levels that do not
exist are skipped. Reclaimable page cache counts as available.
`root` is "" or, in tests, a directory that contains proc/ and sys/.
Sources: Linux, Documentation/admin-guide/cgroup-v2.rst; proc(5).
*/
#pragma once
#include "files.h"

enum { HOST_PATH_SIZE = 2 * PATH_SIZE + 64 }; // for a file in a cgroup's directory

typedef struct {
    uint64_t available;
    const char *limit; // "this machine" or "its cgroup"
} HostMemory;

// Reads up to `size` - 1 bytes of a file in /proc or /sys, for which stat reports no length; false if it is missing.
static inline bool host_read(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    size_t length = 0;
    for (ssize_t n; length + 1 < size && (n = read(fd, text + length, size - 1 - length)) > 0;) length += n;
    close(fd);
    text[length] = 0;
    return length > 0;
}

// The number that follows `key` at the start of a line; false if there is none.
static inline bool host_number(const char *text, const char *key, uint64_t *value) {
    size_t length = strlen(key);
    for (const char *line = text; line && *line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, length) == 0) return sscanf(line + length, "%" SCNu64, value) == 1;
    }
    return false;
}

// This process's path in the cgroup hierarchy: the line 0::PATH.
static inline bool host_cgroup_path(const char *root, char *path, size_t size) {
    char file[PATH_SIZE], text[16384], *rest = text;
    FORMAT(file, "%s/proc/self/cgroup", root);
    if (!host_read(file, text, sizeof(text))) return false;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;)
        if (strncmp(line, "0::", 3) == 0) return snprintf(path, size, "%s", line + 3) < (int)size;
    return false;
}

// Calls `level` for the process's cgroup directory and for each of its parents.
static inline void host_cgroup_levels(const char *root, void (*level)(const char *directory, void *into), void *into) {
    char path[PATH_SIZE], directory[2 * PATH_SIZE];
    if (!host_cgroup_path(root, path, sizeof(path))) return;
    for (;;) {
        snprintf(directory, sizeof(directory), "%s/sys/fs/cgroup%s", root, strcmp(path, "/") == 0 ? "" : path);
        level(directory, into);
        char *slash = strrchr(path, '/');
        if (!slash || !slash[1]) return;
        slash[slash == path] = 0; // the level above; the root keeps its slash
    }
}

// The number in a file; false if the file is missing or contains "max".
static inline bool host_file_number(const char *directory, const char *name, uint64_t *value) {
    char path[HOST_PATH_SIZE], text[256];
    return snprintf(path, sizeof(path), "%s/%s", directory, name) < (int)sizeof(path) &&
           host_read(path, text, sizeof(text)) && sscanf(text, "%" SCNu64, value) == 1;
}

// Lowers the available memory to the remaining memory of this cgroup.
static inline void host_memory_level(const char *directory, void *into) {
    HostMemory *m = (HostMemory *)into;
    char path[HOST_PATH_SIZE], stat[16384];
    uint64_t limit, used = 0, cached = 0;
    if (!host_file_number(directory, "memory.max", &limit)) return;
    if (!host_file_number(directory, "memory.current", &used)) return;
    snprintf(path, sizeof(path), "%s/memory.stat", directory);
    if (host_read(path, stat, sizeof(stat))) host_number(stat, "inactive_file ", &cached);
    used -= cached < used ? cached : used;
    uint64_t left = limit > used ? limit - used : 0;
    if (left >= m->available) return;
    m->available = left;
    m->limit = "its cgroup";
}

static inline bool host_memory(const char *root, HostMemory *m) {
    char path[PATH_SIZE], text[16384];
    FORMAT(path, "%s/proc/meminfo", root);
    if (!host_read(path, text, sizeof(text)) || !host_number(text, "MemAvailable:", &m->available)) return false;
    m->available *= 1024;
    m->limit = "this machine";
    host_cgroup_levels(root, host_memory_level, m);
    return true;
}

// Lowers the number of cores to the quota of this cgroup: CPU microseconds per period.
static inline void host_cores_level(const char *directory, void *into) {
    char path[HOST_PATH_SIZE], text[256];
    uint64_t quota = 0, period = 0;
    int *cores = (int *)into;
    snprintf(path, sizeof(path), "%s/cpu.max", directory); // "QUOTA PERIOD" or "max PERIOD"
    if (!host_read(path, text, sizeof(text)) || sscanf(text, "%" SCNu64 " %" SCNu64, &quota, &period) != 2) return;
    if (quota > 0 && period > 0 && quota / period < (uint64_t)*cores)
        *cores = min_int(*cores, max_int(1, (int)((quota + period - 1) / period)));
}

static inline int host_cores(const char *root) {
    int cores = omp_get_num_procs(); // cores in the affinity mask
    host_cgroup_levels(root, host_cores_level, &cores);
    return cores;
}
