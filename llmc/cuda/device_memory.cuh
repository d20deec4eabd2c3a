/*
device_memory.cuh: buffers in device memory, and the scratch memory that the operations share.

  buffer_alloc      one cudaMalloc, zeroed
  buffer_upload     small ones (tokens) go through pinned memory, so that the host does not wait for the device;
                    large ones (weights at the start) wait
  buffer_download   waits for everything before it: the only place where a training step does
  scratch           ops_workspace_take: what NAME_workspace_bytes asked for; ops_scratch: SCRATCH_BYTES for partial
                    sums, there for every operation. Operations follow one another on one stream, so all share both.
*/
#ifndef LLMC_DEVICE_MEMORY_CUH
#define LLMC_DEVICE_MEMORY_CUH

enum { UPLOAD_SLOTS = 8, UPLOAD_BYTES = 1 << 20, SCRATCH_BYTES = 1 << 20 };

static struct {
    bool started;
    int sm_count;
    size_t used_at_start; // of the device's memory, by all processes, before the first buffer
    size_t workspace_bytes;
    char *workspace, *scratch; // device memory
    char *pinned;              // host memory: UPLOAD_SLOTS of UPLOAD_BYTES, used in turn
    cudaEvent_t uploaded[UPLOAD_SLOTS];
    int slot;
} device;

static inline void device_start(void) {
    if (device.started) return;
    int count = 0, index = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    CHECK(status == cudaSuccess && count > 0, "no CUDA device: %s; train_diffv2 is the program for CPUs",
          status == cudaSuccess ? "none is installed" : cudaGetErrorString(status));
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaDeviceGetAttribute(&device.sm_count, cudaDevAttrMultiProcessorCount, index));
    CUDA_CHECK(cudaStreamCreateWithFlags(&main_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMallocHost((void **)&device.pinned, (size_t)UPLOAD_SLOTS * UPLOAD_BYTES));
    for (int i = 0; i < UPLOAD_SLOTS; i++)
        CUDA_CHECK(cudaEventCreateWithFlags(&device.uploaded[i], cudaEventDisableTiming));
    size_t free_bytes = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    device.used_at_start = total - free_bytes;
    device.started = true;
}

static inline void *buffer_alloc(size_t bytes, const char *what) {
    device_start();
    void *p = NULL;
    size_t size = max_size(bytes, 1);
    cudaError_t status = cudaMalloc(&p, size);
    if (status == cudaErrorMemoryAllocation) out_of_device_memory(bytes, what);
    CUDA_CHECK(status);
    CUDA_CHECK(cudaMemsetAsync(p, 0, size, main_stream));
    return p;
}
static inline void buffer_free(void *p) {
    if (p == NULL) return;
    CUDA_CHECK(cudaStreamSynchronize(main_stream));
    CUDA_CHECK(cudaFree(p));
}
static inline void buffer_zero(void *p, size_t bytes) {
    OPERATION();
    if (bytes) CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, main_stream));
}
static inline void buffer_upload(void *to, const void *host, size_t bytes) {
    OPERATION();
    if (bytes == 0) return;
    if (bytes > UPLOAD_BYTES) {
        CUDA_CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, main_stream));
        CUDA_CHECK(cudaStreamSynchronize(main_stream));
        return;
    }
    int slot = device.slot++ % UPLOAD_SLOTS;
    char *pinned = device.pinned + (size_t)slot * UPLOAD_BYTES;
    CUDA_CHECK(cudaEventSynchronize(device.uploaded[slot])); // its last copy is over
    memcpy(pinned, host, bytes);
    CUDA_CHECK(cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, main_stream));
    CUDA_CHECK(cudaEventRecord(device.uploaded[slot], main_stream));
    device.slot %= UPLOAD_SLOTS;
}
static inline void buffer_download(void *host, const void *from, size_t bytes) {
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, main_stream));
    CUDA_CHECK(cudaStreamSynchronize(main_stream));
}

// Pinned host memory; NULL: there is too little.
static inline void *download_alloc(size_t bytes) {
    void *p = NULL;
    if (cudaMallocHost(&p, max_size(bytes, 1)) == cudaSuccess) return p;
    cudaGetLastError(); // the caller has another way
    return NULL;
}
static inline void download_free(void *p) {
    if (p) CUDA_CHECK(cudaFreeHost(p));
}

static inline void gemm_start(void); // gemm.cuh
static inline void gemm_stop(void);
static inline void attention_stop(void); // attention_library.cuh

static inline void ops_release(void) {
    buffer_free(device.workspace);
    buffer_free(device.scratch);
    device.workspace = device.scratch = NULL;
    device.workspace_bytes = 0;
    gemm_stop();
}

static inline void ops_free(void) {
    ops_release();
    attention_stop();
}

static inline void ops_init(size_t workspace_bytes) {
    ops_release(); // attention's plans are older than their workspace
    device.workspace = (char *)buffer_alloc(workspace_bytes, "the operations' workspace");
    device.workspace_bytes = workspace_bytes;
    device.scratch = (char *)buffer_alloc(SCRATCH_BYTES, "the operations' partial sums");
    gemm_start();
}

static inline void ops_wait(void) { CUDA_CHECK(cudaStreamSynchronize(main_stream)); }

static inline real *ops_workspace_take(size_t bytes) {
    assert(device.workspace != NULL && bytes <= device.workspace_bytes);
    return (real *)(void *)device.workspace;
}
static inline void *ops_scratch(size_t bytes) {
    assert(device.scratch != NULL && bytes <= SCRATCH_BYTES);
    return device.scratch;
}
#endif
