/*
attention_cudnn.h: causal attention by cuDNN, as plain C. Behind it is attention_cudnn.cpp, a translation unit of its
own, since the headers it needs compile slowly; where kernels run on the CPU, dev/cuda_on_cpu/attention_cudnn.cpp; in a
build without cuDNN (no USE_CUDNN), what is at the end here.

Tensors are bf16, lse fp32. q is (B, T, NQ, D), k (B, T, NKV, D), v (B, T, NKV, DV), out and dout (B, T, NQ, DV), with
rows and heads at any distance and no gap within a head; a sequence is T rows. lse is (B, NQ, T): log of the sum of
exp(scale q.k). Row t sees the keys 0 .. t. All that is written is overwritten. A backward reads what the forward wrote
as out and lse, or another out and lse that belong to the same probabilities exp(scale q.k - lse) (sinks).

A function that can fail says why in one line, which it leaves in `why`, and changes nothing.
*/
#ifndef LLMC_ATTENTION_CUDNN_H
#define LLMC_ATTENTION_CUDNN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    int row, head; // strides in elements
} CudnnStrides;

typedef struct { // only ints and a float, so that there is no padding and bytes can be compared
    int backward;
    int deterministic; // of the backward: the same bits in every run; the forward's always are
    int linear;        // of a deterministic backward: memory linear in T, at the cost of speed
    int B, T, NQ, NKV, D, DV;
    float scale;
    CudnnStrides q, k, v, out; // dout as out
    CudnnStrides dq, dk, dv;   // of the backward
} CudnnAttention;

typedef struct {
    const void *q, *k, *v;
    void *out, *lse; // of the forward; the backward reads them
    const void *dout;
    void *dq, *dk, *dv;
} CudnnTensors;

typedef struct CudnnPlan CudnnPlan;

// Whether there is a backward as `linear` asks for one: by cuDNN's frontend on 9.x, by any deterministic one on 10.x.
static inline bool cudnn_linear_exists(const CudnnAttention *a, int capability, size_t version, char *why,
                                       size_t size) {
    if (!a->linear || capability / 10 == 10 || (capability / 10 == 9 && version >= 92500)) return true;
    snprintf(why, size,
             "--sdpa-linear: cuDNN %zu.%zu has no such backward for compute capability %d.%d (9.25 has, for "
             "9.0)",
             version / 10000, version / 100 % 100, capability / 10, capability % 10);
    return false;
}

// version: 91900 is 9.19.0. 9.10.0 and 9.10.1: cuDNN's frontend refuses their backward, too.
static inline bool cudnn_version_usable(size_t version, char *why, size_t size) {
    if (version != 90800 && version != 91000 && version != 91001) return true;
    snprintf(why, size, "cuDNN %zu.%zu.%zu has known bugs in attention: 9.11 or newer is needed", version / 10000,
             version / 100 % 100, version % 100);
    return false;
}

#ifdef USE_CUDNN
enum { CUDNN_ATTENTION = 1 }; // the build has it
#ifdef __cplusplus
extern "C" {
#endif

// Before plans are made, on the device that the thread has chosen; more often does nothing. Refuses versions of cuDNN
// whose attention is known to be wrong.
bool cudnn_attention_open(char *why, size_t size);
// After all plans are forgotten.
void cudnn_attention_close(void);
// Name and version of the library, which need not be open.
const char *cudnn_attention_version(void);

// The device's compute capability; 90 is 9.0. The library is open.
int cudnn_attention_capability(void);

// What computes this; NULL where cuDNN does not. It takes *workspace_bytes of device memory while it runs.
CudnnPlan *cudnn_attention_plan(const CudnnAttention *a, size_t *workspace_bytes, char *why, size_t size);
void cudnn_attention_free(CudnnPlan *plan);

// On the stream (a cudaStream_t).
bool cudnn_attention_run(CudnnPlan *plan, const CudnnTensors *tensors, void *workspace, void *stream, char *why,
                         size_t size);

// Whether the frontend takes the description for a device of compute capability `capability` (90 is 9.0); needs none.
bool cudnn_attention_valid(const CudnnAttention *a, int capability, char *why, size_t size);

#ifdef __cplusplus
}
#endif
#else

enum { CUDNN_ATTENTION = 0 };
static inline bool cudnn_attention_open(char *why, size_t size) {
    static const char reason[] = "this build has no cuDNN";
    memcpy(why, reason, size < sizeof(reason) ? size : sizeof(reason));
    return false;
}
static inline void cudnn_attention_close(void) {}
static inline int cudnn_attention_capability(void) { return 0; }
static inline const char *cudnn_attention_version(void) { return "no cuDNN"; }
static inline CudnnPlan *cudnn_attention_plan(const CudnnAttention *a, size_t *workspace_bytes, char *why,
                                              size_t size) {
    (void)a;
    *workspace_bytes = 0;
    cudnn_attention_open(why, size);
    return NULL;
}
static inline void cudnn_attention_free(CudnnPlan *plan) { (void)plan; }
static inline bool cudnn_attention_run(CudnnPlan *plan, const CudnnTensors *tensors, void *workspace, void *stream,
                                       char *why, size_t size) {
    (void)plan, (void)tensors, (void)workspace, (void)stream;
    return cudnn_attention_open(why, size);
}
#endif
#endif
