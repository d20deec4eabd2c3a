/*
nccl.cpp: NCCL where kernels run on the CPU, between processes of one machine. nccl.h declares the calls, so a signature
that differs from NVIDIA's does not compile.

The first collective of each name between the ranks of a communicator connects them, as NCCL does: the host returns from
it when all ranks have made the call. CUDA_ON_CPU_NCCL_HANG=NAME: this rank does not return from the first one of this
name, and the others wait for it.

A collective runs in stream order. It copies this rank's data to memory that the processes share, and ends when all
ranks have done so; until then its stream stops, and the host continues. If a rank lacks a wait before it sends, the
other ranks receive old values. Sums are in the order of ranks. All ranks must make the same calls in the same order;
processes that detect another call end with one line.

A collective waits for a lost rank without a limit, as in NCCL. An abort ends waiting collectives: their streams
continue, with NaN as results. CUDA_ON_CPU_NCCL_ABORTS=FILE: ncclCommAbort appends a line.

Errors, as in NCCL: an invalid or destroyed communicator; any call after an error. CUDA_ON_CPU_NCCL_INIT=TEXT:
ncclCommInitRank fails, with TEXT as the last error.
CUDA_ON_CPU_NCCL_ASYNC=RANK:NUMBER:TEXT: the collectives of this rank do not end from that number on, and TEXT is the
error of the communicator.

CUDA_ON_CPU_NCCL_JOINS=FILE: a rank that joins the others appends a line with NCCL_NVLS_ENABLE.
*/
#include "internal.h"
#include <algorithm>
#include <atomic>
#include <fcntl.h>
#include <string>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#if __has_include(<nccl.h>)
#include <nccl.h>

namespace {

using namespace cuda_on_cpu;

enum { slots = 2, largest_ranks = 16, largest_splits = 4, largest_names = 8 };
constexpr size_t slot_bytes = (size_t)64 << 20; // of a rank; pages that are not written take no memory

struct Call {
    char name[24];
    size_t bytes;
    int detail; // root or operation
};
struct Shared {
    std::atomic<int> ranks_here;
    std::atomic<uint64_t> sent[largest_ranks], taken[largest_ranks]; // collectives
    std::atomic<int> connected[largest_names];                       // ranks, for the names in the order of calls
    Call calls[slots][largest_ranks];
    struct {
        std::atomic<int> ranks_here;
        int color[largest_ranks], key[largest_ranks];
        ncclUniqueId id[largest_ranks];
    } splits[largest_splits];
};
constexpr size_t header_bytes = (sizeof(Shared) + 4095) / 4096 * 4096;

} // namespace

struct ncclComm {
    int rank, ranks;
    uint64_t queued;
    int split;                          // how often
    std::vector<std::string> connected; // names of collectives
    Shared *shared;
    std::atomic<bool> aborted, ended;
    std::atomic<ncclResult_t> error; // in the background
    char *data(uint64_t number, int of) const {
        return (char *)shared + header_bytes + ((size_t)(number % slots) * (size_t)ranks + (size_t)of) * slot_bytes;
    }
};

namespace {

size_t total_bytes(int ranks) { return header_bytes + (size_t)slots * (size_t)ranks * slot_bytes; }

void check_buffer(const char *name, const void *buffer, size_t bytes) {
    Found f = find_memory(buffer);
    if (f.kind != Memory::device || (const char *)buffer + bytes > f.base + f.bytes)
        fail("%s: %zu bytes at %p are not device memory of one allocation", name, bytes, buffer);
}

std::string last_error;

ncclResult_t fails(ncclResult_t status, const std::string &text) { // texts of NCCL end in a newline
    last_error = text + "\n";
    return status;
}

ncclResult_t check_communicator(const char *call, ncclComm_t comm) {
    if (!comm || comm->ended) return fails(ncclInvalidArgument, std::string(call) + " : comm argument is invalid");
    return comm->error;
}

// Whether a planned error applies to this collective, which then does not end.
bool breaks(ncclComm_t comm, uint64_t number) {
    const char *planned = getenv("CUDA_ON_CPU_NCCL_ASYNC");
    int rank = -1, text = 0;
    unsigned long long first = 0;
    if (!planned || sscanf(planned, "%d:%llu:%n", &rank, &first, &text) != 2 || rank != comm->rank || number < first)
        return false;
    if (comm->error == ncclSuccess) comm->error = fails(ncclRemoteError, planned + text);
    return true;
}

// Connects the ranks for the first collective of a name.
void connect(const char *name, ncclComm_t comm) {
    const char *hang = getenv("CUDA_ON_CPU_NCCL_HANG");
    size_t at = comm->connected.size();
    if (std::count(comm->connected.begin(), comm->connected.end(), name)) return;
    if (at == largest_names) fail("%s: more than %d kinds of collectives", name, largest_names);
    while (hang && !strcmp(hang, name)) pause();
    comm->connected.push_back(name);
    for (++comm->shared->connected[at]; comm->shared->connected[at] < comm->ranks && !comm->aborted;) usleep(1000);
}

// Sends `bytes` in stream order, and calls arrive(collective) when all ranks have sent theirs.
ncclResult_t collective(const char *name, ncclComm_t comm, cudaStream_t stream, size_t bytes, int detail,
                        const void *from, void *to, size_t to_bytes, std::function<void(uint64_t)> arrive) {
    ncclResult_t status = check_communicator(name, comm);
    if (status != ncclSuccess) return status;
    check_buffer(name, from, bytes);
    check_buffer(name, to, to_bytes);
    connect(name, comm);
    uint64_t number = comm->queued++;
    bool sent = false;
    Call call = {"", bytes, detail};
    snprintf(call.name, sizeof(call.name), "%s", name);
    if (call.bytes > slot_bytes) fail("%s: %zu bytes are more than this emulation supports", call.name, call.bytes);
    auto ready = [=]() mutable {
        Shared *s = comm->shared;
        if (comm->aborted) return true;
        if (breaks(comm, number)) return false;
        for (int r = 0; r < comm->ranks && !sent; r++)
            if (s->taken[r] + slots <= number) return false; // the slot is still another collective's
        if (!sent) {
            memcpy(comm->data(number, comm->rank), from, call.bytes);
            s->calls[number % slots][comm->rank] = call;
            s->sent[comm->rank] = number + 1;
            sent = true;
        }
        for (int r = 0; r < comm->ranks; r++)
            if (s->sent[r] <= number) return false;
        return true;
    };
    on_stream_when(stream, name, ready, [=] {
        if (comm->aborted) {
            memset(to, 0xFF, to_bytes);
            return;
        }
        for (int r = 0; r < comm->ranks; r++) {
            const Call &other = comm->shared->calls[number % slots][r];
            if (strcmp(other.name, call.name) || other.bytes != call.bytes || other.detail != call.detail)
                fail("collective %llu is %s of %zu bytes (%d) on rank %d and %s of %zu (%d) on rank %d",
                     (unsigned long long)number, call.name, call.bytes, call.detail, comm->rank, other.name,
                     other.bytes, other.detail, r);
        }
        arrive(number);
        comm->shared->taken[comm->rank] = number + 1;
    });
    return ncclSuccess;
}

// to [count] = the sum over the ranks of what they have sent from element `begin` on
void sum_floats(float *to, ncclComm_t comm, uint64_t number, size_t begin, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int r = 0; r < comm->ranks; r++) sum += ((const float *)(const void *)comm->data(number, r))[begin + i];
        to[i] = sum;
    }
}

ncclResult_t join(ncclComm_t *comm, int ranks, int rank, const ncclUniqueId &id) {
    if (getenv("CUDA_ON_CPU_NCCL_INIT")) { // a planned error: its text, with a newline as NCCL's texts have
        std::string text = getenv("CUDA_ON_CPU_NCCL_INIT");
        return fails(text.find("Cuda failure") == 0 ? ncclUnhandledCudaError : ncclInvalidUsage, text);
    }
    if (enter("ncclCommInitRank") != cudaSuccess) return ncclUnhandledCudaError;
    if (ranks < 1 || ranks > largest_ranks || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    int fd = open(id.internal, O_RDWR | O_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)total_bytes(ranks))) return ncclSystemError;
    void *p = mmap(nullptr, total_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) return ncclSystemError;
    Shared *shared = (Shared *)p;
    ++shared->ranks_here;
    while (shared->ranks_here < ranks) usleep(1000);
    const char *path = getenv("CUDA_ON_CPU_NCCL_JOINS"), *nvls = getenv("NCCL_NVLS_ENABLE");
    FILE *f = path ? fopen(path, "a") : nullptr;
    if (f) fprintf(f, "NCCL_NVLS_ENABLE=%s\n", nvls ? nvls : ""), fclose(f);
    static auto *made = new std::vector<ncclComm_t>; // they stay, so that the use of one that has ended is refused
    made->push_back(*comm = new ncclComm{rank, ranks, 0, 0, {}, shared, {false}, {false}, {ncclSuccess}});
    return ncclSuccess;
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    int fd = memfd_create("cuda_on_cpu_nccl", MFD_CLOEXEC); // gone with the last process that has it
    if (fd < 0) return ncclSystemError;
    memset(id, 0, sizeof(*id));
    snprintf(id->internal, sizeof(id->internal), "/proc/%d/fd/%d", (int)getpid(), fd);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    return join(comm, ranks, rank, id);
}
// The ranks of a color, in the order of their keys; the first one's memory is that of the new communicator.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
    ncclResult_t status = check_communicator("ncclCommSplit", comm);
    if (status != ncclSuccess) return status;
    if (config || color < 0) fail("ncclCommSplit: a configuration, and ranks without a color, are not stood in for");
    if (comm->shared->taken[comm->rank] != comm->queued) fail("ncclCommSplit: collectives of the parent are under way");
    if (comm->split == largest_splits) fail("ncclCommSplit: more than %d", largest_splits);
    auto &s = comm->shared->splits[comm->split++];
    s.color[comm->rank] = color, s.key[comm->rank] = key;
    status = ncclGetUniqueId(&s.id[comm->rank]);
    if (status != ncclSuccess) return status;
    ++s.ranks_here;
    while (s.ranks_here < comm->ranks && !comm->aborted) usleep(1000);
    int ranks = 0, rank = 0, first = comm->rank;
    auto before = [&](int a, int b) { return s.key[a] != s.key[b] ? s.key[a] < s.key[b] : a < b; };
    for (int r = 0; r < comm->ranks; r++) {
        if (s.color[r] != color) continue;
        ranks++;
        rank += before(r, comm->rank);
        if (before(r, first)) first = r;
    }
    return ncclCommInitRank(made, ranks, s.id[first], rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    ncclResult_t status = check_communicator("ncclCommDestroy", comm);
    if (status != ncclSuccess) return status;
    drain_all();
    munmap(comm->shared, total_bytes(comm->ranks));
    comm->ended = true;
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm || comm->ended) return fails(ncclInvalidArgument, "ncclCommAbort : comm argument is invalid");
    const char *path = getenv("CUDA_ON_CPU_NCCL_ABORTS");
    FILE *f = path ? fopen(path, "a") : nullptr;
    if (f) fprintf(f, "rank %d\n", comm->rank), fclose(f);
    comm->aborted = true;
    usleep(200000); // what NCCL takes to let go of its resources, while streams and host go on
    comm->ended = true;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (!comm || comm->ended) return fails(ncclInvalidArgument, "ncclCommGetAsyncError : comm argument is invalid");
    *error = comm->error;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t error) {
    return error == ncclSuccess           ? "no error"
           : error == ncclInvalidArgument ? "invalid argument"
           : error == ncclSystemError     ? "unhandled system error"
           : error == ncclInvalidUsage    ? "invalid usage"
           : error == ncclRemoteError     ? "remote process exited or there was a network error"
                                          : "another error";
}
const char *ncclGetLastError(ncclComm_t) { return last_error.c_str(); } // of any communicator

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    if (type != ncclChar) fail("ncclAllGather: only ncclChar is stood in for");
    size_t all = comm ? count * (size_t)comm->ranks : 0;
    return collective("ncclAllGather", comm, stream, count, 0, from, to, all, [=](uint64_t number) {
        for (int r = 0; r < comm->ranks; r++) memcpy((char *)to + (size_t)r * count, comm->data(number, r), count);
    });
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    if (type != ncclChar) fail("ncclBroadcast: only ncclChar is stood in for");
    return collective("ncclBroadcast", comm, stream, count, root, from, to, count,
                      [=](uint64_t number) { memcpy(to, comm->data(number, root), count); });
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    if (type != ncclFloat || op != ncclSum) fail("ncclReduceScatter: only sums of ncclFloat are stood in for");
    size_t piece = count * sizeof(float), bytes = comm ? piece * (size_t)comm->ranks : 0;
    return collective("ncclReduceScatter", comm, stream, bytes, (int)op, from, to, piece, [=](uint64_t number) {
        sum_floats((float *)to, comm, number, (size_t)comm->rank * count, count);
    });
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    if (type != ncclFloat || op != ncclSum) fail("ncclAllReduce: only sums of ncclFloat are stood in for");
    size_t bytes = count * sizeof(float);
    return collective("ncclAllReduce", comm, stream, bytes, (int)op, from, to, bytes,
                      [=](uint64_t number) { sum_floats((float *)to, comm, number, 0, count); });
}
}
#endif
