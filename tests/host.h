/*
host.h: tests of the available cores and memory, on copies of /proc and /sys, and of the program's limits.
*/
#pragma once
#include "harness.h"
#include "program.h"

typedef struct {
    const char *path, *text;
} HostFile;

// A machine with 8000 kB available, under several cgroup limits.
static const struct {
    const char *what;
    HostFile files[8];
    uint64_t available; // bytes
    const char *limit;
} host_memory_cases[] = {
    {"a machine without cgroups",
     {{"proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}},
     8192000,
     "this machine"},
    {"a cgroup without a limit",
     {{"proc/meminfo", "MemAvailable: 8000 kB\n"},
      {"proc/self/cgroup", "0::/job\n"},
      {"sys/fs/cgroup/job/memory.max", "max\n"},
      {"sys/fs/cgroup/job/memory.current", "4096\n"}},
     8192000,
     "this machine"},
    {"the limit of the parent, with the page cache counted as available",
     {{"proc/meminfo", "MemAvailable: 8000 kB\n"},
      {"proc/self/cgroup", "9:name=systemd:/other\n0::/slurm/job/step\n"},
      {"sys/fs/cgroup/slurm/job/step/memory.max", "max\n"},
      {"sys/fs/cgroup/slurm/job/step/memory.current", "1000\n"},
      {"sys/fs/cgroup/slurm/job/memory.max", "1000000\n"},
      {"sys/fs/cgroup/slurm/job/memory.current", "700000\n"},
      {"sys/fs/cgroup/slurm/job/memory.stat", "anon 300000\ninactive_file 400000\nactive_file 0\n"}},
     700000,
     "its cgroup"},
    {"a container whose own path does not exist",
     {{"proc/meminfo", "MemAvailable: 8000 kB\n"},
      {"proc/self/cgroup", "0::/docker/0123\n"},
      {"sys/fs/cgroup/memory.max", "500000\n"},
      {"sys/fs/cgroup/memory.current", "600000\n"}},
     0,
     "its cgroup"},
};

static void host_write_files(const TestDirectory *d, const HostFile *files, int limit) {
    for (int i = 0; i < limit && files[i].path; i++) {
        char directory[PATH_SIZE];
        const char *path = test_text("%s/%s", d->path, files[i].path);
        directory_of(path, directory, sizeof(directory));
        directory_create(directory);
        file_write_atomic(path, files[i].text, strlen(files[i].text));
    }
}

static void test_cgroup_memory(void) {
    for (size_t i = 0; i < sizeof(host_memory_cases) / sizeof(host_memory_cases[0]); i++) {
        TestDirectory d = test_make_directory();
        HostMemory m = {0, ""};
        host_write_files(&d, host_memory_cases[i].files, 8);
        bool known = host_memory(d.path, &m);
        EXPECT(known && m.available == host_memory_cases[i].available &&
                   strcmp(m.limit, host_memory_cases[i].limit) == 0,
               "%s: %" PRIu64 " bytes of %s", host_memory_cases[i].what, m.available, m.limit);
    }
    TestDirectory d = test_make_directory();
    HostMemory m;
    EXPECT(!host_memory(d.path, &m), "a system without this information has an amount");
    EXPECT(host_memory("", &m) && m.available > 1 << 20, "this machine has %" PRIu64 " bytes", m.available);
}

static void test_core_count(void) {
    static const struct {
        HostFile files[3];
        int cores;
    } cases[] = {
        {{{"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/cpu.max", "max 100000\n"}}, 4096},
        {{{"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/cpu.max", "50000 100000\n"}}, 1},
        {{{"proc/self/cgroup", "0::/a\n"}, {"sys/fs/cgroup/cpu.max", "100001 100000\n"}}, 2},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TestDirectory d = test_make_directory();
        host_write_files(&d, cases[i].files, 3);
        int expected = min_int(cases[i].cores, omp_get_num_procs()), cores = host_cores(d.path);
        EXPECT(cores == expected, "case %d: %d cores, not %d", (int)i, cores, expected);
    }
}

static void test_too_many_threads(void) {
    TestDirectory d = program_data();
    ProgramResult r;
    run_command(&r, "cd '%s' && taskset -c 0 '%s' --train-data train.bin --steps 2 --threads 1000 --out run", d.path,
                test_program_path());
    EXPECT(r.status == EXIT_DONE && count_lines(r.err) == 1 &&
               strstr(r.err, "--threads 1000: this process may use 1 core; 1 thread is used"),
           "status %d: %.600s", r.status, r.err);
    run_command(&r, "'%s' --train-data train.bin --threads 4097", test_program_path());
    EXPECT(r.status == EXIT_USAGE && strstr(r.err, "[1, 4096]"), "status %d: %.600s", r.status, r.err);
}

static const Test host_tests[] = {
    {"available memory is the minimum over all cgroup levels", test_cgroup_memory},
    {"the number of cores is that of the affinity mask, limited by the CPU quota", test_core_count},
};

static const Test host_program_tests[] = {
    {"more threads than cores cause a warning, more than 4096 an error", test_too_many_threads},
};
