// clang-format off
/*
comm_launch.h: detection of the launcher, this process's rank, and the rendezvous of the ranks.

  int    launch_process_count()    processes that the launcher has started; 1 without a launcher
  bool   launch_has_launcher()     whether a launcher started this process, even as the only one
  int    launch_rank()             rank of this process, from the launcher's environment
  Launch launch_by_mpi(count, start)
                                   initializes MPI and queries it (a build with MPI). MPI has no time limit: after
                                   launch_limit() the process ends with a line. Ranks on one machine use shared memory,
                                   so that MPI opens no port
  Launch launch_by_slurm(count)    from the variables that srun sets, without MPI
  void   launch_connect(l, start, data, bytes)
                                   all ranks get the data of rank 0, then open the directory of their states
                                   (watchdog.h)

The directory is ranks.IDENTITY in --rendezvous or --out, of mode 0700. Rank 0 creates it.
  MPI       Rank 0 draws a random identity and broadcasts the path and the data. Without --rendezvous and --out the
            directory is in TMPDIR or /tmp, which serves one machine.
  srun      The identity is cluster, job, step and restart, so that a file of another start is never read. Rank 0 writes
            the data to `start`, for which the other ranks wait. The file has mode 0600 and appears complete, by a
            rename; a file of another user is refused. Before they look for it, ranks open its parent, so that a network
            file system asks its server.
*/
// clang-format on
#pragma once
#include "../base/start_parts.h"
#include "comm_state.h"

typedef struct {
    int rank, ranks;
    int local_rank, ranks_here; // place among the ranks on this machine, and their number
    bool mpi;                   // started by MPI, which is initialized
} Launch;

// The argument of comm_open. Seconds until all ranks must be connected, to which launch_limit adds time per rank;
// --rendezvous or --out, or NULL; nvls: NCCL may add in NVLink switches.
typedef struct {
    double timeout;
    const char *directory;
    bool nvls;
} CommStart;

enum { LAUNCH_LIMIT = 1 << 20 }; // processes

static const char *const launch_mpi_variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"};

// Whether srun started this process. In a batch script SLURM_STEP_ID is not a number.
static inline bool launch_in_slurm_step(void) {
    const char *id = getenv("SLURM_STEP_ID");
    return id && isdigit((unsigned char)id[0]) && getenv("SLURM_STEP_NUM_TASKS");
}

static inline int launch_environment_int(const char *name, int low, int high) {
    const char *text = getenv(name);
    bool digits = text && *text && strspn(text, "0123456789") == strlen(text) && strlen(text) < 18;
    long long value = digits ? strtoll(text, NULL, 10) : -1;
    CHECK(digits && value >= low && value <= high, "%s is '%.40s'; it must be a number from %d to %d: %s", name,
          text ? text : "", low, high, strncmp(name, "SLURM", 5) == 0 ? "srun sets it" : "correct or unset it");
    return (int)value;
}

static inline int launch_process_count(void) {
    for (size_t i = 0; i < sizeof(launch_mpi_variables) / sizeof(launch_mpi_variables[0]); i++)
        if (getenv(launch_mpi_variables[i])) return launch_environment_int(launch_mpi_variables[i], 1, LAUNCH_LIMIT);
    if (launch_in_slurm_step()) return launch_environment_int("SLURM_STEP_NUM_TASKS", 1, LAUNCH_LIMIT);
    const char *torch = getenv("TORCHELASTIC_RUN_ID") ? getenv("WORLD_SIZE") : NULL;
    CHECK(!torch || atoi(torch) < 2,
          "torchrun has started %s processes, and each would train alone: use mpirun or srun", torch);
    return 1;
}

static inline bool launch_has_launcher(void) {
    for (size_t i = 0; i < sizeof(launch_mpi_variables) / sizeof(launch_mpi_variables[0]); i++)
        if (getenv(launch_mpi_variables[i])) return true;
    return launch_in_slurm_step();
}

static inline int launch_rank(void) {
    static const char *const variables[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"};
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
        if (getenv(variables[i])) return atoi(getenv(variables[i]));
    return launch_in_slurm_step() && getenv("SLURM_PROCID") ? atoi(getenv("SLURM_PROCID")) : 0;
}

// Whether srun's variables describe this process. If mpirun was started in a step, they describe mpirun.
static inline bool launch_uses_slurm(void) {
    return launch_in_slurm_step() && !getenv("OMPI_COMM_WORLD_SIZE") && !getenv("MV2_COMM_WORLD_SIZE");
}

// Makes the parent of the directory of states on rank 0. A parent that did not exist is removed at the end, if empty.
static inline void launch_make_parent(const char *parent) {
    watch.made_parent = !directory_exists(parent);
    if (watch.made_parent) directory_create(parent);
}

// Seconds that a start may take.
static inline double launch_limit(const CommStart *start, int ranks) { return start->timeout + ranks / 10.0; }

// Rank 0 removes the directory at `path` if the start fails before watch_open, which replaces the hook.
static inline void launch_abandon(int status) {
    (void)status;
    watch_remove();
}
static inline void launch_made(const char *path) {
    FORMAT(watch.path, "%s", path);
    exit_hook = launch_abandon;
}

#ifdef USE_MPI
#define MPI_OK(call) CHECK((call) == MPI_SUCCESS, "rank %d: MPI failed: %s", comm.rank, #call)

static inline Launch launch_by_mpi(int launched, const CommStart *start) {
    static char problem[200];
    int provided = 0;
    MPI_Comm here;
    Launch l;
    memset(&l, 0, sizeof(l));
    const char *local = getenv("OMPI_COMM_WORLD_LOCAL_SIZE"), *all = getenv("OMPI_COMM_WORLD_SIZE");
    // transports, unless the user has chosen them
    if (local && all && strcmp(local, all) == 0) setenv("OMPI_MCA_btl", "self,vader", 0);
    FORMAT(problem,
           "MPI has not connected the ranks within %.0f s (--start-timeout): a rank is missing, or another process has "
           "connected to a port of MPI (docs/cluster.md)",
           launch_limit(start, launched));
    watch_begin(launch_rank(), launch_limit(start, launched), problem);
    CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided) == MPI_SUCCESS &&
              provided >= MPI_THREAD_SERIALIZED,
          "MPI does not support calls from a separate thread (MPI_THREAD_SERIALIZED)");
    MPI_OK(MPI_Comm_rank(MPI_COMM_WORLD, &l.rank));
    MPI_OK(MPI_Comm_size(MPI_COMM_WORLD, &l.ranks));
    CHECK(
        l.ranks == launched,
        "started as one of %d processes, but MPI reports %d: with Slurm use srun --mpi=pmix (srun --mpi=list lists the "
        "supported types), or use the mpirun of this MPI",
        launched, l.ranks);
    MPI_OK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, l.rank, MPI_INFO_NULL, &here));
    MPI_OK(MPI_Comm_size(here, &l.ranks_here));
    MPI_OK(MPI_Comm_rank(here, &l.local_rank));
    MPI_OK(MPI_Comm_free(&here));
    l.mpi = true;
    return l;
}

// Returns whether the directory could be made.
static inline bool launch_make_directory(const char *parent, char *path) {
    char made[PATH_SIZE];
    snprintf(made, sizeof(made), "%s/ranks.XXXXXX", parent);
    return mkdtemp(made) && realpath(made, path); // the ranks may have other working directories
}

static inline void launch_connect_by_mpi(const CommStart *start, char *path, void *data, size_t bytes) {
    const char *temporary = getenv("TMPDIR") && *getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
    if (comm.rank == 0) {
        struct stat st; // a file in the place of --out: the options are refused later
        bool usable = start->directory && (stat(start->directory, &st) != 0 || S_ISDIR(st.st_mode));
        if (usable) launch_make_parent(start->directory);
        CHECK((usable && launch_make_directory(start->directory, path)) || launch_make_directory(temporary, path),
              "cannot create a directory for the states of the ranks in %s: %s; --rendezvous selects another",
              start->directory ? start->directory : temporary, strerror(errno));
        launch_made(path);
    }
    MPI_OK(MPI_Bcast(path, PATH_SIZE, MPI_BYTE, 0, MPI_COMM_WORLD));
    MPI_OK(MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD));
    int failed = access(path, R_OK | W_OK | X_OK) == 0 ? comm.ranks : comm.rank, first = 0;
    MPI_OK(MPI_Allreduce(&failed, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD));
    if (first < comm.ranks && comm.rank == 0) watch_remove(); // before the launcher kills the other ranks
    if (first < comm.ranks) MPI_OK(MPI_Barrier(MPI_COMM_WORLD));
    CHECK(first != comm.rank, "rank %d on %s cannot open %s: --rendezvous selects a directory that all machines share",
          comm.rank, watch.self.host, path);
    if (first < comm.ranks) program_exit(EXIT_FAILED); // that rank prints the line
}
#endif

// GPUs that srun gives each process of a step, from --gpus-per-task=[TYPE:]N; 1 if that is not set.
static inline int launch_gpus_per_task(void) {
    const char *text = launch_uses_slurm() ? getenv("SLURM_GPUS_PER_TASK") : NULL,
               *colon = text ? strrchr(text, ':') : NULL;
    return text ? atoi(colon ? colon + 1 : text) : 1;
}

// The number of processes on a machine, from a list such as "4(x3),2": 4 on each of three machines, 2 on the next.
static inline int launch_tasks_on_node(const char *list, int machine) {
    for (const char *at = list; *at;) {
        char *end = NULL;
        long count = strtol(at, &end, 10), times = 1;
        if (end == at || count < 1 || count > LAUNCH_LIMIT) return -1;
        if (strncmp(end, "(x", 2) == 0) {
            times = strtol(end + 2, &end, 10);
            if (times < 1 || times > LAUNCH_LIMIT || *end++ != ')') return -1;
        }
        if (machine < times) return (int)count;
        machine -= (int)times;
        if (*end && *end != ',') return -1;
        at = end + (*end == ',');
    }
    return -1;
}

static inline Launch launch_by_slurm(int launched) {
    const char *counts = getenv("SLURM_STEP_TASKS_PER_NODE");
    Launch l;
    memset(&l, 0, sizeof(l));
    l.ranks = launched;
    l.rank = launch_environment_int("SLURM_PROCID", 0, launched - 1);
    l.local_rank = launch_environment_int("SLURM_LOCALID", 0, launched - 1);
    l.ranks_here = counts ? launch_tasks_on_node(counts, launch_environment_int("SLURM_NODEID", 0, launched - 1)) : -1;
    CHECK(l.ranks_here > l.local_rank,
          "SLURM_STEP_TASKS_PER_NODE is '%s', which has no process %d on machine SLURM_NODEID: srun sets both",
          counts ? counts : "", l.local_rank);
    return l;
}

// Opens a file, and waits for rank 0 to create it.
static inline int launch_open(const char *file, int flags, const CommStart *start) {
    double limit = launch_limit(start, comm.ranks), until = now_seconds() + limit;
    int fd;
    struct stat st;
    while ((fd = open(file, flags | O_CLOEXEC | O_NOFOLLOW, 0600)) < 0) {
        // ESTALE: replaced meanwhile, on NFS
        CHECK(errno == ENOENT || errno == ESTALE, "cannot open %s: %s", file, strerror(errno));
        DIR *parent = opendir(start->directory);
        if (parent) closedir(parent);
        CHECK(now_seconds() < until,
              "rank %d on %s: rank 0 has not written %s within %.0f s (--start-timeout): start all ranks with the same "
              "--out or --rendezvous, in a directory that all machines share",
              comm.rank, watch.self.host, file, limit);
        usleep(50000);
    }
    CHECK(fstat(fd, &st) == 0 && st.st_uid == geteuid(),
          "rank %d on %s: %s is a file of another user: start all ranks as one user, or select another directory with "
          "--rendezvous",
          comm.rank, watch.self.host, file);
    return fd;
}

static inline void launch_write(const char *file, const CommStart *start, const void *data, size_t bytes) {
    char made[PATH_SIZE];
    FORMAT(made, "%s.new", file);
    int fd = launch_open(made, O_WRONLY | O_CREAT | O_EXCL, start), number = comm.ranks;
    file_write(fd, &number, sizeof(number), made);
    file_write(fd, data, bytes, made);
    file_close_synced(fd, made);
    CHECK(rename(made, file) == 0, "cannot rename %s: %s", made, strerror(errno));
}

static inline void launch_read(const char *file, const CommStart *start, void *data, size_t bytes) {
    int fd = launch_open(file, O_RDONLY, start), number = 0;
    CHECK(file_pread(fd, &number, sizeof(number), 0) && number == comm.ranks &&
              file_pread(fd, data, bytes, sizeof(number)),
          "rank %d is one of %d, and rank 0 one of %d: start all ranks with the same number of ranks", comm.rank,
          comm.ranks, number);
    close(fd);
}

static inline void launch_exchange(const char *path, const CommStart *start, void *data, size_t bytes) {
    char file[PATH_SIZE];
    if (comm.rank == 0) {
        launch_make_parent(start->directory);
        CHECK(mkdir(path, 0700) == 0, "cannot create %s: %s%s", path, strerror(errno),
              errno == EEXIST ? "; another start has the same job, step and restart" : "");
        launch_made(path);
    }
    FORMAT(file, "%s/start", path);
    if (comm.rank == 0) launch_write(file, start, data, bytes);
    else launch_read(file, start, data, bytes);
}

static inline void launch_connect_by_files(const CommStart *start, char *path, void *data, size_t bytes) {
    static const char *const names[] = {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"};
    char identity[400] = "";
    for (int i = 0, length = 0; i < 4; i++) {
        const char *value = getenv(names[i]) ? getenv(names[i]) : "0";
        CHECK(!strchr(value, '/'), "%s '%.90s' must not contain a slash", names[i], value);
        length += snprintf(identity + length, sizeof(identity) - (size_t)length, ".%.90s", value);
    }
    CHECK(start->directory,
          "srun has started %d ranks without MPI, which find each other in a directory: specify --out or --rendezvous",
          comm.ranks);
    CHECK(snprintf(path, PATH_SIZE, "%s/ranks%s", start->directory, identity) < PATH_SIZE - 100,
          "the path of --out or --rendezvous is too long");
    // later than launch_open, which says what is missing
    watch_begin(comm.rank, launch_limit(start, comm.ranks) + WATCH_SPARE,
                "the directory of --rendezvous or --out does not answer");
    if (getenv("SLURMD_NODENAME")) { // the node's name in Slurm, which may differ: --exclude takes it
        FORMAT(watch.self.host, "%.*s", WATCH_HOST - 1, getenv("SLURMD_NODENAME"));
        watch_clean_host(watch.self.host);
    }
    launch_exchange(path, start, data, bytes);
}

static inline void launch_connect(const Launch *l, const CommStart *start, void *data, size_t bytes) {
    char path[PATH_SIZE] = "";
#ifdef USE_MPI
    if (l->mpi) launch_connect_by_mpi(start, path, data, bytes);
    else
#endif
        launch_connect_by_files(start, path, data, bytes);
    watch_open(path, l->rank, l->ranks);
}
