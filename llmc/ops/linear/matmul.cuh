/*
matmul.cuh: a linear layer without bias. Equations in matmul.h; products by gemm.cuh.

  numerics  x, weight, y, dx in floatX, sums in fp32; with add dweight accumulates in fp32 inside the product (beta = 1)
  flops     2 N IC OC forward, twice that backward
*/
#pragma once
#include "../../cuda/gemm.cuh"
#include "operations.h"

static inline size_t matmul_rows_at_a_time(size_t row_bytes) { return gpu_logit_rows(row_bytes); }

static inline void matmul_forward(floatX *y, const floatX *x, const floatX *weight, int N, int IC, int OC, int ldy) {
    OPERATION();
    GemmShape forward = {false, true, false, false, N, OC, IC, IC, IC, ldy};
    gemm(forward, y, x, weight);
}

static inline void matmul_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x, const floatX *weight,
                                   int N, int IC, int OC, int ldy, bool add) {
    OPERATION();
    GemmShape to_input = {false, false, false, false, N, IC, OC, ldy, IC, IC};
    GemmShape to_weight = {true, false, add, true, OC, IC, N, ldy, IC, IC};
    gemm(to_input, dx, dy, weight);  // dx = dy weight
    gemm(to_weight, dweight, dy, x); // dweight = dy^T x
}

// ---------------------------------------------------------------------------------------------------
// Choices and facts about the matrix library. The storage type determines the type of the operands; --matmul-dtype has
// an effect only with fp8 (linear.cuh).

static const bool matmul_has_choice = false;
static const bool matmul_in_bf16 = sizeof(floatX) == 2;

// Pseudorandom numbers between -1 and 1, repeated in each stretch.
static inline void matmul_fill(floatX *to, size_t count) {
    enum { STRETCH = 1 << 18 };
    floatX *host = (floatX *)checked_calloc(STRETCH, sizeof(floatX));
    uint32_t state = 1;
    for (int i = 0; i < STRETCH; i++) {
        state = state * 1664525u + 1013904223u;
        host[i] = (floatX)((float)(state >> 8) / 8388608.0f - 1);
    }
    for (size_t at = 0; at < count; at += STRETCH)
        buffer_upload(to + at, host, min_size(STRETCH, count - at) * sizeof(floatX));
    free(host);
}

// GFLOP/s of the library on a large product, the maximum of a few: the reference for the speed of a step. The trainer
// measures it before it allocates its buffers, hence before ops_init; the library is started for the measurement.
static inline double matmul_peak_gflops(void) {
#ifdef CUDA_ON_CPU
    enum { SIZE = 256, TRIES = 2 };
#else
    enum { SIZE = 8192, TRIES = 10 };
#endif
    const size_t count = (size_t)SIZE * SIZE;
    bool started = gemm_started();
    if (!started) gemm_start();
    floatX *m = (floatX *)buffer_alloc(3 * count * sizeof(floatX), "measuring the peak of the GEMM library");
    matmul_fill(m, 2 * count); // zeros would be multiplied at a higher clock rate than other numbers
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    double best = 0;
    for (int i = 0; i < TRIES; i++) {
        float ms = 0;
        CUDA_CHECK(cudaEventRecord(begin, main_stream));
        matmul_forward(m + 2 * count, m, m + count, SIZE, SIZE, SIZE, SIZE);
        CUDA_CHECK(cudaEventRecord(end, main_stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (ms > 0) best = fmax(best, 1e-6 * matmul_forward_flops(SIZE, SIZE, SIZE) / (double)ms);
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    buffer_free(m);
    if (!started) gemm_stop();
    return best;
}
