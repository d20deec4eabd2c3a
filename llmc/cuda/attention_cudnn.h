/*
attention_cudnn.h: causal attention by cuDNN, as a C interface. It is implemented by attention_cudnn.cpp, a separate
translation unit, since the headers that it needs compile slowly. If kernels run on the CPU, it is implemented by
dev/emulator/attention_cudnn.cpp; in a build without cuDNN (no USE_CUDNN), by the functions at the end of this file.

  tensors    bf16, lse fp32. q (B, T, NQ, D), k (B, T, NKV, D), v (B, T, NKV, DV), out and dout (B, T, NQ, DV), with any
             strides of rows and heads; the elements of a head are contiguous, and a sequence is T rows.
             lse (B, NQ, T): log of the sum of exp(scale q.k). Row t attends to the keys 0 .. t, or with a window W to
             t-W+1 .. t.
  documents  the B sequences have lengths from 0 to T and begin at any element of each tensor. Sequences of length 0
             come last. The tensors have the strides of rows and heads; the heads of lse are T elements apart.
  outputs    are overwritten
  backward   out and lse come from the forward, or (sinks) are another pair with out = P v, P = exp(scale q.k - lse)
  errors     A function that can fail writes the reason to `why`, in one line, and changes nothing.
*/
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    int row, head; // strides in elements
} CudnnStrides;

typedef struct { // only ints and a float: without padding, so that bytes can be compared
    int backward;
    int deterministic; // for the backward: bitwise reproducible; the forward always is
    int B, T, NQ, NKV, D, DV;
    int window;    // number of keys that a row attends to, up to its own; 0: all of them
    int documents; // with CudnnTensors.lengths and .offsets
    float scale;
    CudnnStrides q, k, v, out; // out: strides of out and dout
    CudnnStrides dq, dk, dv;   // for the backward
} CudnnAttention;

// Tables of offsets for documents, in elements: B + 1 of int64 each. dout uses the table of out.
typedef enum {
    CUDNN_Q,
    CUDNN_K,
    CUDNN_V,
    CUDNN_OUT,
    CUDNN_LSE,
    CUDNN_DQ,
    CUDNN_DK,
    CUDNN_DV,
    CUDNN_OFFSETS
} CudnnTable;
static inline size_t cudnn_table_stride(int B) { return ((size_t)B + 2) & ~(size_t)1; } // a multiple of 16 bytes

typedef struct {
    const void *q, *k, *v;
    void *out, *lse; // written by the forward, read by the backward
    const void *dout;
    void *dq, *dk, *dv;
    const void *lengths, *offsets; // for documents: (B) of int, (CUDNN_OFFSETS, cudnn_table_stride(B)) of int64
} CudnnTensors;

typedef struct CudnnPlan CudnnPlan;

// version: 91900 is 9.19.0. cuDNN's frontend also refuses the backward of 9.10.0 and 9.10.1.
static inline bool cudnn_version_usable(size_t version, char *why, size_t size) {
    if (version != 90800 && version != 91000 && version != 91001) return true;
    snprintf(why, size, "cuDNN %zu.%zu.%zu has known bugs in attention: 9.11 or newer is required", version / 10000,
             version / 100 % 100, version % 100);
    return false;
}

#ifdef USE_CUDNN
enum { CUDNN_ATTENTION = 1 }; // the build has cuDNN
#ifdef __cplusplus
extern "C" {
#endif

// Opens the library on the current device, before any plan; later calls have no effect. Refuses versions of cuDNN whose
// attention has known bugs.
bool cudnn_attention_open(char *why, size_t size);
// Closes the library, after all plans are freed.
void cudnn_attention_close(void);
// Name and version of the library; may be called before it is opened.
const char *cudnn_attention_version(void);

// The compute capability of the device; 90 is 9.0. The library must be open.
int cudnn_attention_capability(void);

// A plan for the description; NULL if cuDNN does not support it. It needs *workspace_bytes of device memory to run.
CudnnPlan *cudnn_attention_plan(const CudnnAttention *a, size_t *workspace_bytes, char *why, size_t size);
void cudnn_attention_free(CudnnPlan *plan);

// Runs a plan on the stream (a cudaStream_t).
bool cudnn_attention_run(CudnnPlan *plan, const CudnnTensors *tensors, void *workspace, void *stream, char *why,
                         size_t size);

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
