/*
embedding.cuh: a row of the table per token. Equations in embedding.h.

  forward   a thread per pack of a row
  backward  The rows of a token are added in the order of n, as on the CPU, without atomics. The rows are first sorted
            by token (a stable radix sort, 8 bits per pass, so that equal tokens stay in the order of n). One warp then
            adds the rows of a token, for 256 columns; for tokens with many rows, for 32 columns, 32 rows at a time.
            Sorting takes three launches and 16 bytes per row and pass.
  sorting   by counting_sort.cuh; a warp has SORT_ROWS consecutive rows
  numerics  the sum over the rows in fp32 in the order of n: in the fp32 build bitwise equal to the CPU
  traffic   forward C in, C out per row; backward C in per row, 2C fp32 per distinct token
*/
#pragma once
#include "../../cuda/counting_sort.cuh"
#include "operations.h"

template <int W>
static __global__ void embedding_forward_kernel(floatX *x, const int *tokens, const floatX *weight, int C) {
    unsigned n = blockIdx.x, c = column_index<W>();
    if (c >= (unsigned)C) return;
    float v[W];
    load<W>(v, weight + (size_t)tokens[n] * C + c);
    store<W>(x + n * (size_t)C + c, v);
}

static inline void embedding_forward(floatX *x, const int *tokens, const floatX *weight, int N, int C) {
    OPERATION();
    LAUNCH_COLUMNS(embedding_forward_kernel, packed(C, x, weight), N, C, x, tokens, weight, C);
}

enum { SORT_BITS = 8, SORT_DIGITS = 1 << SORT_BITS, SORT_PASSES = 32 / SORT_BITS, SORT_ROWS = 1024 };

// The sort's arrays in the workspace: (token, row) pairs twice, and a count per (digit, warp).
typedef struct {
    int *tokens[2], *rows[2], *counts;
    int N, warps;
} EmbeddingSort;

static inline EmbeddingSort embedding_sort_plan(int N, int *memory) {
    EmbeddingSort s;
    s.N = N;
    s.warps = (N + SORT_ROWS - 1) / SORT_ROWS;
    for (int i = 0; i < 2; i++) {
        s.tokens[i] = memory + (size_t)(2 * i) * N;
        s.rows[i] = memory + (size_t)(2 * i + 1) * N;
    }
    s.counts = memory + 4 * (size_t)N;
    return s;
}

static inline size_t embedding_workspace_bytes(int N) {
    return (4 * (size_t)N + SORT_DIGITS * ((N + SORT_ROWS - 1) / SORT_ROWS)) * sizeof(int);
}

// One warp per block. place false: counts (digit, warp) = number of the warp's rows with the digit.
// place true: counts are destinations; moves the rows there, equal digits in their order.
static __global__ void embedding_sort_kernel(EmbeddingSort s, const int *tokens, const int *rows, int *tokens_out,
                                             int *rows_out, int shift, bool place) {
    SHARED(int, at, SORT_DIGITS);
    int lane = (int)threadIdx.x, warp = (int)blockIdx.x, end = min(s.N, (warp + 1) * SORT_ROWS);
    for (int digit = lane; digit < SORT_DIGITS; digit += WARP) at[digit] = place ? s.counts[digit * s.warps + warp] : 0;
    __syncwarp();
    auto digit_of = [=](int i) { return tokens[i] >> shift & (SORT_DIGITS - 1); };
    sort_rows(at, warp * SORT_ROWS, end, SORT_BITS, digit_of, [=](int i, int to) {
        if (!place) return;
        tokens_out[to] = tokens[i];
        rows_out[to] = rows ? rows[i] : i;
    });
    if (place) return;
    for (int digit = lane; digit < SORT_DIGITS; digit += WARP) s.counts[digit * s.warps + warp] = at[digit];
}

// A warp adds the rows of the token that begins at `first`, for W columns per lane. It loads AHEAD rows at once: the
// sum stays in the order of the rows, and waits for memory once per AHEAD rows.
template <int W, int AHEAD>
static __device__ inline void embedding_add_rows(grad_t *dweight, const floatX *dx, const int *tokens, const int *rows,
                                                 int first, int N, int C, int c) {
    int lane = (int)threadIdx.x % WARP, token = tokens[first], i = first + lane;
    bool active = c < C; // inactive lanes help to read row numbers
    float sum[W] = {0}, v[AHEAD][W];
    grad_t *dw = dweight + (size_t)token * C + c;
    const floatX *d = dx + (active ? c : 0);
    if (active) load_fp32<W>(sum, dw);
    int row = i < N && tokens[i] == token ? rows[i] : -1;
    for (int count = WARP; count == WARP;) {
        int here = row;
        count = __popc(__ballot_sync(ALL_LANES, here >= 0)); // sorted, so these are the first lanes
        i += WARP;
        row = i < N && tokens[i] == token ? rows[i] : -1; // loaded while these rows are added
        for (int j = 0; j < count; j += AHEAD) {
            UNROLL
            for (int k = 0; k < AHEAD; k++) // beyond the end the last row again: no branch between loads
                load<W>(v[k], d + (size_t)__shfl_sync(ALL_LANES, here, min(j + k, count - 1)) * (size_t)C);
            UNROLL
            for (int k = 0; k < AHEAD; k++) {
                UNROLL
                for (int e = 0; e < W; e++) sum[e] = j + k < count ? sum[e] + v[k][e] : sum[e];
            }
        }
    }
    if (active) store_fp32<W>(dw, sum);
}

// blockIdx.x is a sorted row; the first row of a token adds it. Tokens with WARP rows or more are left to the next
// kernel. Backward of x[n,c] = weight[tokens[n],c].
enum { ADD_AHEAD = 4 };
template <int W>
static __global__ void embedding_add_kernel(grad_t *dweight, const floatX *dx, const int *tokens, const int *rows,
                                            int N, int C) {
    int first = (int)blockIdx.x, token = tokens[first], last = first + WARP - 1;
    if ((first > 0 && tokens[first - 1] == token) || (last < N && tokens[last] == token)) return;
    embedding_add_rows<W, ADD_AHEAD>(dweight, dx, tokens, rows, first, N, C, (int)column_index<W>());
}

// Adds tokens with many rows: each has a row whose index is a multiple of WARP, and the first such row adds all rows.
// One element per thread, so that many multiprocessors share a token; WARP rows at once.
static __global__ void embedding_add_often_kernel(grad_t *dweight, const floatX *dx, const int *tokens, const int *rows,
                                                  int N, int C) {
    int at = (int)blockIdx.x * WARP, token = tokens[at], i = at - 1 - (int)threadIdx.x;
    int before = __popc(__ballot_sync(ALL_LANES, i >= 0 && tokens[i] == token)), last = at - before + WARP - 1;
    if (before == WARP || last >= N || tokens[last] != token) return;
    embedding_add_rows<1, WARP>(dweight, dx, tokens, rows, at - before, N, C, (int)column_index<1>());
}

static inline void embedding_backward(grad_t *dweight, const floatX *dx, const int *tokens, int N, int C) {
    OPERATION();
    EmbeddingSort s = embedding_sort_plan(N, (int *)(void *)ops_workspace_take(embedding_workspace_bytes(N)));
    int *none = nullptr;
    for (int pass = 0; pass < SORT_PASSES; pass++) {
        const int *from = pass ? s.tokens[(pass - 1) % 2] : tokens, *rows = pass ? s.rows[(pass - 1) % 2] : nullptr;
        int shift = pass * SORT_BITS;
        LAUNCH(embedding_sort_kernel, s.warps, WARP, 0, s, from, rows, none, none, shift, false);
        sort_scan(s.counts, SORT_DIGITS * s.warps);
        LAUNCH(embedding_sort_kernel, s.warps, WARP, 0, s, from, rows, s.tokens[pass % 2], s.rows[pass % 2], shift,
               true);
    }
    const int *sorted = s.tokens[(SORT_PASSES - 1) % 2], *rows = s.rows[(SORT_PASSES - 1) % 2];
    LAUNCH_COLUMNS(embedding_add_kernel, packed(C, dx, dweight), N, C, dweight, dx, sorted, rows, N, C);
    dim3 often((unsigned)(N + WARP - 1) / WARP, (unsigned)(C + WARP - 1) / WARP);
    LAUNCH(embedding_add_often_kernel, often, WARP, 0, dweight, dx, sorted, rows, N, C);
}
