// clang-format off
/*
comm_nccl.cuh: the backend of comm.h for operations on GPUs, over NCCL. One process per GPU, started by mpirun (MPI is
used only at the start) or by srun without MPI.

  order     Collectives run on their own stream, nccl.stream, beside main_stream. A collective waits for the work that
            main_stream had when it was started; comm_wait makes main_stream wait for the collective. Both use events,
            so the host does not wait and continues to queue work.
  host      comm_gather and comm_broadcast move host memory through pinned and device memory on the same stream. They
            are for small data, where the host waits anyway.
  numerics  NCCL sums fp32 gradients in an order that depends on its version, the topology and the number of ranks.
            Runs are repeatable bit for bit on the same machines. The sum of each group is then reduced over the
            groups by an all-reduce. The sums of switches (NVLS) are not repeatable, so NVLS is off, except with
            --no-deterministic and NCCL_NVLS_ENABLE. All ranks have the same bits after an all-gather.
  time      wait_seconds: events around each wait of main_stream, plus the waits of the host
  start     ncclCommInitRank has one root, rank 0, to which every rank connects
  rejected  Registered buffers: windows (ncclCommWindowRegister, NCCL 2.27) require parameters and gradients in memory
            of ncclMemAlloc, in pages of 2 MiB and of one size on all ranks. They save NCCL's copies and latency within
            an NVLink domain, for small messages above all. Buckets of many ranks have 128 MiB, the backward hides most
            of the reduction, and sums in switches are not repeatable. To be measured on 8 GPUs before it is built
  watchdog  comm_nccl_watch.cuh
  source    NCCL user guide: stream semantics; fault tolerance; environment variables. NVLS: issue 1497 of NVIDIA/nccl
*/
// clang-format on
#pragma once
#include "../cuda/kernel_utils.cuh"
#include "comm_nccl_watch.cuh"

// ---- initialization

// Two MIG slices of a GPU have the same identity: NCCL accepts one rank per bus address, whatever the UUIDs.
static inline uint64_t nccl_device_identity(const cudaDeviceProp *facts) {
    char machine[40] = "", text[100];
    FILE *boot = fopen("/proc/sys/kernel/random/boot_id", "r"); // host names may not be unique
    bool known = boot && fgets(machine, sizeof(machine), boot);
    if (boot) fclose(boot);
    if (!known) return XXH3_64bits(&facts->uuid, sizeof(facts->uuid));
    FORMAT(text, "%s %x:%x:%x", machine, facts->pciDomainID, facts->pciBusID, facts->pciDeviceID);
    return XXH3_64bits(text, strlen(text));
}

// Selects the GPU with the local rank's number, or the only GPU that the process sees. Returns the number of GPUs.
static inline int nccl_choose_device(const Launch *l, cudaError_t *status) {
    int count = 0;
    cudaDeviceProp facts;
    *status = cudaGetDeviceCount(&count);
    if (*status != cudaSuccess || count == 0) return 0;
    nccl.device = count == 1 ? 0 : l->local_rank;
    if (nccl.device >= count) return count;
    *status = cudaSetDevice(nccl.device);
    if (*status == cudaSuccess) *status = cudaGetDeviceProperties(&facts, nccl.device);
    if (*status == cudaSuccess) watch.self.device = nccl_device_identity(&facts);
    return count;
}

static inline void nccl_refuse_shared_devices(const WatchState *ranks) {
    for (int a = 0; a < comm.ranks; a++)
        for (int b = 0; b < a; b++)
            CHECK(ranks[a].device != ranks[b].device || ranks[a].device == 0,
                  "ranks %d and %d (%s) would share one GPU: start at most one process per GPU, also with MIG slices",
                  b, a, ranks[a].host);
}

static inline Launch nccl_launch(int launched, const CommStart *start) {
    if (launch_uses_slurm()) return launch_by_slurm(launched);
#ifdef USE_MPI
    return launch_by_mpi(launched, start); // used only for the start
#else
    (void)start;
    CHECK(false,
          "started as one of %d processes by mpirun, but this program was built without MPI: use srun, or install "
          "OpenMPI (scripts/install_deps.sh --with-mpi) and run make",
          launched);
    Launch none;
    memset(&none, 0, sizeof(none));
    return none;
#endif
}

static inline void comm_open(const CommStart *start) {
    int launched = launch_process_count();
    if (launched == 1) return;
    Launch l = nccl_launch(launched, start);
    cudaError_t status;
    int count = nccl_choose_device(&l, &status);
    comm.rank = l.rank, comm.ranks = l.ranks, comm.ranks_here = l.ranks_here;
    setenv("NCCL_NVLS_ENABLE", "0", !start->nvls); // see numerics
    ncclResult_t id_status = ncclSuccess;
    if (l.rank == 0 && count > 0) id_status = ncclGetUniqueId(&nccl.id);
    launch_connect(&l, start, &nccl.id, sizeof(nccl.id));
#ifdef USE_MPI
    watch_wait_begin();
    if (l.mpi) MPI_OK(MPI_Finalize());
    watch_wait_end();
#endif
    // from here on an error that several ranks have is printed once
    CHECK(count > 0, "no CUDA device: %s; train_diffv2 is the program for CPUs",
          status == cudaSuccess ? "none is installed" : cudaGetErrorString(status));
    CHECK(
        launch_gpus_per_task() <= 1,
        "srun gives each process %d GPUs, and a rank uses one: start one task per GPU, with --gpus-per-task=1 or with "
        "equal numbers for --gpus-per-node and --ntasks-per-node",
        launch_gpus_per_task());
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    CHECK(nccl.device < count,
          "%d processes on a machine with %d GPUs%s%.60s%s: start at most one process per GPU, each of which sees one "
          "GPU or all of them",
          comm.ranks_here, count, visible ? " in CUDA_VISIBLE_DEVICES='" : "", visible ? visible : "",
          visible ? "'" : "");
    CUDA_CHECK(status);
    if (id_status != ncclSuccess) nccl_failed("ncclGetUniqueId", id_status);
    if (comm.rank == 0) {
        WatchState *ranks = watch_await_ranks(launch_limit(start, comm.ranks));
        nccl_refuse_shared_devices(ranks);
        free(ranks);
    }
    comm.on = true;
}

static inline void nccl_make_events(cudaEvent_t *events, int count, unsigned flags) {
    for (int i = 0; i < count; i++) CUDA_CHECK(cudaEventCreateWithFlags(&events[i], flags));
}

static inline size_t nccl_free_bytes(void) {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available;
}

// Called by all ranks before the first collective.
static inline void nccl_init(void) {
    int least = 0, greatest = 0;
    size_t bytes = (comm.ranks + 1) * NCCL_HOST_BYTES;
    if (nccl.handle) return;
    assert(comm.on);
    const char *part = start_part("communicator");
    device_start();
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&nccl.stream, cudaStreamNonBlocking,
                                            greatest)); // high priority: other work waits for it
    nccl_make_events(nccl.come, NCCL_EVENTS, cudaEventDisableTiming);
    nccl_make_events(nccl.end, NCCL_EVENTS, cudaEventDisableTiming);
    nccl_make_events(nccl.wait_begin, NCCL_WAITS, cudaEventDefault);
    nccl_make_events(nccl.wait_end, NCCL_WAITS, cudaEventDefault);
    CUDA_CHECK(cudaMallocHost((void **)&nccl.host, bytes));
    nccl.memory = (char *)buffer_alloc(bytes, "small messages between ranks");
    CUDA_CHECK(cudaStreamSynchronize(main_stream)); // it is used on the other stream
    size_t before = nccl_free_bytes();
    ncclComm_t handle = NULL;
    watch_wait_begin();
    NCCL_CHECK(ncclCommInitRank(&handle, comm.ranks, nccl.id, comm.rank));
    watch_wait_end();
    nccl.handle = handle;
    nccl.device_bytes = before - min_size(before, nccl_free_bytes());
    thread_start(&nccl.thread, nccl_watch_thread, NULL, "that monitors collectives");
    watch_exit_hook = nccl_abort_at_exit;
    start_part(part);
}

static inline const char *comm_library(void) {
    static char text[64];
    int version = 0;
    NCCL_CHECK(ncclGetVersion(&version));
    snprintf(text, sizeof(text), "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return text;
}

// ---- collectives

// Starts a collective: nccl.stream waits for the work that `stream` has so far.
static inline uint64_t nccl_begin(cudaStream_t stream) {
    uint64_t ticket = nccl.begun + 1;
    cudaEvent_t come = nccl.come[ticket % NCCL_EVENTS];
    CUDA_CHECK(cudaEventRecord(come, stream));
    if (stream != nccl.stream) CUDA_CHECK(cudaStreamWaitEvent(nccl.stream, come, 0));
    return ticket;
}
static inline uint64_t nccl_end(uint64_t ticket) {
    CUDA_CHECK(cudaEventRecord(nccl.end[ticket % NCCL_EVENTS], nccl.stream));
    NCCL_SET(begun, ticket);
    return ticket;
}

// Adds up the durations of waits that have ended; all: waits for the others.
static inline void nccl_read_waits(bool all) {
    for (; nccl.waits_read < nccl.waits; nccl.waits_read++) {
        uint64_t slot = nccl.waits_read % NCCL_WAITS;
        float ms = 0;
        if (all) CUDA_CHECK(cudaEventSynchronize(nccl.wait_end[slot]));
        else if (!nccl_event_done(nccl.wait_end[slot])) return;
        CUDA_CHECK(cudaEventElapsedTime(&ms, nccl.wait_begin[slot], nccl.wait_end[slot]));
        comm.wait_seconds += 1e-3 * ms;
    }
}

static inline void comm_wait(uint64_t ticket) {
    if (ticket <= nccl.awaited) return; // main_stream already waits for it
    nccl_read_waits(nccl.waits - nccl.waits_read == NCCL_WAITS);
    uint64_t slot = nccl.waits++ % NCCL_WAITS;
    CUDA_CHECK(cudaEventRecord(nccl.wait_begin[slot], main_stream));
    CUDA_CHECK(cudaStreamWaitEvent(main_stream, nccl.end[ticket % NCCL_EVENTS], 0));
    CUDA_CHECK(cudaEventRecord(nccl.wait_end[slot], main_stream));
    nccl.awaited = ticket;
}

template <int W> static __global__ void add_piece_kernel(size_t begin, size_t end, grad_t *out, const grad_t *piece) {
    size_t i = element_index<W>(begin);
    if (i >= end) return;
    float sum[W], v[W];
    load_fp32<W>(sum, out + i);
    load_fp32<W>(v, piece + i);
    UNROLL
    for (int k = 0; k < W; k++) sum[k] += v[k];
    store_fp32<W>(out + i, sum);
}

static inline uint64_t comm_reduce_scatter(grad_t *bucket, size_t piece, grad_t *out, bool add, bool all_groups) {
    static_assert(sizeof(grad_t) == sizeof(float), "gradients are summed as ncclFloat");
    assert(nccl.group && (!add || nccl.received_bytes >= piece * sizeof(grad_t)));
    uint64_t ticket = nccl_begin(main_stream);
    NCCL_CHECK(
        ncclReduceScatter(bucket, add ? nccl.received : out, piece, ncclFloat, ncclSum, nccl.group, nccl.stream));
    if (add)
        LAUNCH_ELEMENTS_ON(nccl.stream, add_piece_kernel, packed(0, out, nccl.received), piece, out, nccl.received);
    if (all_groups && nccl.across)
        NCCL_CHECK(ncclAllReduce(out, out, piece, ncclFloat, ncclSum, nccl.across, nccl.stream));
    return nccl_end(ticket);
}

static inline uint64_t comm_all_gather(void *bucket, const void *piece, size_t piece_bytes) {
    uint64_t ticket = nccl_begin(main_stream);
    NCCL_CHECK(ncclAllGather(piece, bucket, piece_bytes, ncclChar, nccl.group, nccl.stream));
    return nccl_end(ticket);
}

// Waits on the host for a collective, and for all earlier ones.
static inline void nccl_host_wait(uint64_t ticket) {
    double begin = now_seconds();
    CUDA_CHECK(cudaEventSynchronize(nccl.end[ticket % NCCL_EVENTS]));
    comm.wait_seconds += now_seconds() - begin;
    nccl_read_waits(false);
}

static inline void comm_gather(void *all, const void *mine, size_t bytes) {
    if (comm.ranks == 1) memcpy(all, mine, bytes);
    for (size_t at = 0, n; comm.ranks > 1 && at < bytes; at += n) {
        n = min_size(NCCL_HOST_BYTES, bytes - at);
        nccl_init();
        uint64_t ticket = nccl_begin(nccl.stream);
        char *host_all = nccl.host + NCCL_HOST_BYTES, *device_all = nccl.memory + NCCL_HOST_BYTES;
        memcpy(nccl.host, (const char *)mine + at, n);
        CUDA_CHECK(cudaMemcpyAsync(nccl.memory, nccl.host, n, cudaMemcpyHostToDevice, nccl.stream));
        NCCL_CHECK(ncclAllGather(nccl.memory, device_all, n, ncclChar, nccl.handle, nccl.stream));
        CUDA_CHECK(cudaMemcpyAsync(host_all, device_all, n * comm.ranks, cudaMemcpyDeviceToHost, nccl.stream));
        nccl_host_wait(nccl_end(ticket));
        for (int r = 0; r < comm.ranks; r++) memcpy((char *)all + r * bytes + at, host_all + r * n, n);
    }
}

static inline void comm_broadcast(void *data, size_t bytes) {
    for (size_t at = 0, n; comm.ranks > 1 && at < bytes; at += n) {
        n = min_size(NCCL_HOST_BYTES, bytes - at);
        nccl_init();
        uint64_t ticket = nccl_begin(nccl.stream);
        memcpy(nccl.host, (char *)data + at, n);
        CUDA_CHECK(cudaMemcpyAsync(nccl.memory, nccl.host, n, cudaMemcpyHostToDevice, nccl.stream));
        NCCL_CHECK(ncclBroadcast(nccl.memory, nccl.memory, n, ncclChar, 0, nccl.handle, nccl.stream));
        CUDA_CHECK(cudaMemcpyAsync(nccl.host, nccl.memory, n, cudaMemcpyDeviceToHost, nccl.stream));
        nccl_host_wait(nccl_end(ticket));
        memcpy((char *)data + at, nccl.host, n);
    }
}

// ---- memory, shutdown

// NCCL connects ranks at their first collective, which may take seconds and memory. This does it now, with a bucket of
// the final size, and checks the result: misconfigured machines (an IOMMU between two GPUs, for example) deliver wrong
// data. The numbers and their sums are exact in fp32.
static inline void nccl_self_test(size_t bucket_bytes) {
    size_t piece = bucket_bytes / sizeof(grad_t) / comm.group_ranks, count = piece * comm.group_ranks, wrong = 0;
    size_t before = nccl_free_bytes();
    grad_t *bucket = (grad_t *)buffer_alloc(bucket_bytes, "a bucket for the test of collectives");
    grad_t *host = (grad_t *)checked_calloc(count, sizeof(grad_t)), shares = 0;
    for (int r = 0; r < comm.ranks; r++) shares += (grad_t)(r % 5);
    for (size_t i = 0; i < count; i++) host[i] = (grad_t)(i % 251) + (grad_t)(comm.rank % 5);
    buffer_upload(bucket, host, count * sizeof(grad_t));
    grad_t *sum = bucket + comm_place() * piece;
    comm_reduce_scatter(bucket, piece, sum, false, true);
    comm_wait(comm_all_gather(bucket, sum, piece * sizeof(grad_t)));
    buffer_download(host, bucket, count * sizeof(grad_t));
    for (size_t i = 0; i < count; i++) wrong += host[i] != (grad_t)comm.ranks * (grad_t)(i % 251) + shares;
    CHECK(wrong == 0,
          "%zu of %zu sums over the GPUs are wrong on this rank: direct access between the GPUs of this machine fails; "
          "NCCL_P2P_DISABLE=1 disables it",
          wrong, count);
    free(host);
    buffer_free(bucket);
    nccl.device_bytes += before - min_size(before, nccl_free_bytes());
    printf("%s, %d ranks (%d on this machine), %.1f MiB of this GPU\n", comm_library(), comm.ranks, comm.ranks_here,
           (double)nccl.device_bytes / 1048576);
}

static inline void nccl_split(int group) {
    ncclComm_t across = NULL;
    comm.group_ranks = group;
    nccl.group = nccl.handle;
    if (comm_groups() == 1) return;
    size_t before = nccl_free_bytes();
    NCCL_CHECK(ncclCommSplit(nccl.handle, comm_group(), comm.rank, &nccl.group, NULL));
    NCCL_CHECK(ncclCommSplit(nccl.handle, comm_place(), comm.rank, &across, NULL));
    NCCL_SET(across, across);
    nccl.device_bytes += before - min_size(before, nccl_free_bytes());
}

static inline void comm_alloc(size_t bucket_bytes, int level, int group) {
    if (comm.ranks == 1) return;
    const char *part = start_part("communicator");
    nccl_init();
    nccl_split(group);
    nccl.received_bytes = comm_received_bytes(bucket_bytes, group, level);
    if (nccl.received_bytes) nccl.received = (grad_t *)buffer_alloc(nccl.received_bytes, "gradients of other ranks");
    nccl_self_test(bucket_bytes);
    nccl.measured = true;
    start_part(part);
}

static inline void comm_barrier(void); // comm.h
static inline void comm_close(void) {
    if (!comm.on) return;
    watch_stage(STAGE_END);
    comm.on = false;
    if (!nccl.handle) return;
    comm_barrier();
    NCCL_SET(stop, true);
    pthread_join(nccl.thread, NULL);
    watch_exit_hook = NULL;
    buffer_free(nccl.received);
    buffer_free(nccl.memory);
    CUDA_CHECK(cudaFreeHost(nccl.host));
    ncclComm_t handles[3];
    for (int i = nccl_handles(handles) - 1; i >= 0; i--) NCCL_CHECK(ncclCommDestroy(handles[i]));
    for (int i = 0; i < NCCL_EVENTS; i++) {
        CUDA_CHECK(cudaEventDestroy(nccl.come[i]));
        CUDA_CHECK(cudaEventDestroy(nccl.end[i]));
    }
    for (int i = 0; i < NCCL_WAITS; i++) {
        CUDA_CHECK(cudaEventDestroy(nccl.wait_begin[i]));
        CUDA_CHECK(cudaEventDestroy(nccl.wait_end[i]));
    }
    CUDA_CHECK(cudaStreamDestroy(nccl.stream));
    memset(&nccl, 0, sizeof(nccl));
}
