// clang-format off
/*
comm_launch.h: detection of the launcher, this process's rank, and the address of rank 0.

  int    launch_process_count()    processes that the launcher has started; 1 without a launcher
  bool   launch_has_launcher()     whether a launcher started this process, even as the only one
  int    launch_rank()             of this process, from the launcher's environment
  Launch launch_by_mpi(count, start_timeout, finalize)
                                   initializes MPI and queries it (a build with MPI), then finalizes it on request.
                                   MPI has no time limit: after start_timeout the process ends with a line. Ranks on one
                                   machine use shared memory, so that MPI opens no port
  Launch launch_by_slurm(count)    from the variables that srun sets, without MPI. Rank 0 runs on the first host of the
                                   step, at a port derived from the secret of the run. MASTER_ADDR and MASTER_PORT
                                   override both.

With srun, the secret of a run (watchdog_start.h) is derived from DIFFV2_SECRET, which scripts/recipe.sh draws at each
start, and from the step, so that two steps with one variable are two runs. srun passes the variable to all ranks. The
program requires it: other users can know what Slurm tells all ranks, such as the job id.
*/
// clang-format on
#ifndef LLMC_COMM_LAUNCH_H
#define LLMC_COMM_LAUNCH_H
#include "comm_state.h"

typedef struct {
    int rank, ranks;
    int local_rank, ranks_here; // among the ranks on this machine
    WatchAddress address;       // of rank 0
} Launch;

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
    return launch_in_slurm_step() ? launch_environment_int("SLURM_STEP_NUM_TASKS", 1, LAUNCH_LIMIT) : 1;
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

#ifdef USE_MPI
#define MPI_OK(call) CHECK((call) == MPI_SUCCESS, "rank %d: MPI failed: %s", comm.rank, #call)

typedef struct {
    double start_timeout;
    bool done;
} LaunchTimer;

static inline void *launch_timer_thread(void *argument) {
    LaunchTimer *t = (LaunchTimer *)argument;
    // rank 0 first, whose exit makes mpirun kill the others
    double until = now_seconds() + t->start_timeout + (launch_rank() == 0 ? 0 : 5);
    while (!__atomic_load_n(&t->done, __ATOMIC_RELAXED)) {
        usleep(10000);
        if (now_seconds() < until) continue;
        warn("rank %d: MPI has not connected the ranks within %g s (--start-timeout): a rank is missing, or another "
             "process has connected to a port of MPI (docs/cluster.md)",
             launch_rank(), t->start_timeout);
        _exit(EXIT_FAILED);
    }
    return NULL;
}

// The transports of OpenMPI, unless the user has chosen them.
static inline void launch_choose_transport(void) {
    const char *here = getenv("OMPI_COMM_WORLD_LOCAL_SIZE"), *all = getenv("OMPI_COMM_WORLD_SIZE");
    if (here && all && strcmp(here, all) == 0) setenv("OMPI_MCA_btl", "self,vader", 0);
}

static inline Launch launch_by_mpi(int launched, double start_timeout, bool finalize) {
    int provided = 0;
    LaunchTimer timer = {start_timeout, false};
    pthread_t thread;
    MPI_Comm here;
    Launch l;
    memset(&l, 0, sizeof(l));
    launch_choose_transport();
    thread_start(&thread, launch_timer_thread, &timer, "that limits the time of the start");
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
    if (l.rank == 0) watch_listen(&l.address, 0);
    MPI_OK(MPI_Bcast(&l.address, sizeof(l.address), MPI_BYTE, 0, MPI_COMM_WORLD));
    if (finalize) MPI_OK(MPI_Finalize());
    __atomic_store_n(&timer.done, true, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    return l;
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

// The first host of a list such as "gpu[003-007,9]-x,login": "gpu003-x".
static inline void launch_first_host(const char *list, char *name, size_t size) {
    size_t length = 0;
    for (const char *at = list; *at && *at != ','; at++) {
        if (*at == '[') {
            for (at++; *at && !strchr("-,]", *at); at++)
                if (length + 1 < size) name[length++] = *at;
            while (*at && *at != ']') at++;
            if (!*at) break;
        } else if (length + 1 < size) name[length++] = *at;
    }
    name[length] = 0;
}

static inline HashKey launch_slurm_secret(void) {
    static const char *const step[] = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"};
    const char *secret = getenv("DIFFV2_SECRET");
    char text[400];
    int length = 0;
    HashKey key;
    for (size_t i = 0; i < sizeof(step) / sizeof(step[0]); i++) {
        const char *value = getenv(step[i]);
        length += snprintf(text + length, sizeof(text) - length, "%.90s.", value ? value : "");
    }
    CHECK(secret && hash_key_parse(&key, secret), // do not print its value
          "DIFFV2_SECRET, which authenticates the ranks, %s: before srun, export DIFFV2_SECRET=$(od -An -N16 -tx1 "
          "/dev/urandom | tr -d ' ')",
          secret ? "is not 32 hexadecimal digits" : "is not set");
    return hash_key_derive(&key, "step", text, length);
}

// The same on all ranks, from information that all ranks have.
static inline WatchAddress launch_slurm_address(void) {
    const char *machines = getenv("SLURM_STEP_NODELIST"), *chosen = getenv("MASTER_ADDR");
    char host[256];
    WatchAddress a;
    struct addrinfo want, *found = NULL;
    int count = 0;
    memset(&a, 0, sizeof(a));
    memset(&want, 0, sizeof(want));
    a.secret = launch_slurm_secret();
    // below the ephemeral ports, and not predictable
    int own_port = (int)(20000 + keyed_hash(&a.secret, "port", 4) % 10000);
    a.port = (uint16_t)(getenv("MASTER_PORT") ? launch_environment_int("MASTER_PORT", 1, 65535) : own_port);
    a.later = true;
    if (chosen) FORMAT(host, "%s", chosen);
    else launch_first_host(machines ? machines : "", host, sizeof(host));
    watch_clean_text(host, sizeof(host), false);
    CHECK(host[0], "neither SLURM_STEP_NODELIST, which srun sets, nor MASTER_ADDR names the host of rank 0");
    want.ai_family = AF_INET;
    want.ai_socktype = SOCK_STREAM;
    int error = getaddrinfo(host, NULL, &want, &found);
    CHECK(error == 0,
          "cannot resolve the host of rank 0, %s: %s; set MASTER_ADDR to an address that all machines can reach", host,
          gai_strerror(error));
    for (struct addrinfo *i = found; i && count < WATCH_ADDRESSES; i = i->ai_next) {
        struct sockaddr_in in;
        memcpy(&in, i->ai_addr, sizeof(in));
        a.ip[count++] = in.sin_addr.s_addr;
    }
    freeaddrinfo(found);
    snprintf(a.host, sizeof(a.host), "%.*s", (int)sizeof(a.host) - 1, host);
    return a;
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
    l.address = launch_slurm_address();
    if (l.rank == 0) watch_listen(&l.address, l.address.port);
    return l;
}
#endif
