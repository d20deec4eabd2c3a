/*
sparse.cuh: the CUDA twin of sparse.h.

  mapping   means: a thread per element. Lists: a block per 8 rows, a thread per earlier block, whose mean it reads once
            for all of them; one thread of each row keeps the best ones, so that they have the order of the C code
  loads     a warp reads 32 neighbouring elements of a row of keys, queries or means. Means pass through shared memory,
            32 columns of 128 blocks at a time, where each thread reads its own row, in the order of the columns
  numerics  fp32; means are not rounded
*/
#pragma once
#include "../../cuda/kernel_utils.cuh"
#include "operations.h"

enum { SPARSE_THREADS = 128, SPARSE_ROWS = 8, SPARSE_QUERY = 512 }; // the widest query of all key sets
enum { SPARSE_LD = WARP + 1 };                                      // row stride of means, without conflicts of banks

static __global__ void sparse_means_kernel(real *means, const floatX *k, const int *first, int capacity, int width,
                                           AttentionShape s) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, blocks = i / (unsigned)width;
    int c = (int)(i % (unsigned)width), b = (int)(blocks / (unsigned)s.sparse.count);
    int j = (int)(blocks % (unsigned)s.sparse.count), size = s.sparse.size, end = (j + 1) * size;
    if (b >= s.B) return;
    int from = first ? first[b] : 0;
    if (end <= from || end > from + s.T) return; // complete before, or not yet
    float sum = 0;
    for (int p = j * size; p < end; p++)
        sum += to_float(k[((size_t)b * capacity + (p - s.sparse.base) % capacity) * s.ldkv + c]);
    means[i] = sum / size;
}

static inline void sparse_means(real *means, const floatX *k, const int *first, int capacity, int sets,
                                AttentionShape s) {
    OPERATION();
    int width = s.NKV * sets * s.D;
    size_t count = (size_t)s.B * s.sparse.count * width;
    if (count) LAUNCH(sparse_means_kernel, blocks_of(count, 256), 256, 0, means, k, first, capacity, width, s);
}

// A row of the tile of a block, and its candidates: blocks [from, self) besides the first.
typedef struct {
    int position, self, document, low, from; // document, low: blocks of the first key of either
} SparseChooser;
static __device__ inline SparseChooser sparse_chooser(const AttentionShape &s, const int *first, int b, int t) {
    SparseChooser r;
    const int document = s.first_key ? s.first_key[(size_t)b * s.T + t] : 0;
    r.position = (first ? first[b] : 0) + t, r.self = r.position / s.sparse.size;
    r.document = document / s.sparse.size;
    r.low = (s.window ? max(document, r.position - s.window + 1) : document) / s.sparse.size;
    r.from = max(r.low, r.document + 1);
    return r;
}

static __global__ void __launch_bounds__(SPARSE_THREADS, 6)
    sparse_select_kernel(int *lists, const floatX *q, const real *means, const int *first, int sets, AttentionShape s) {
    SHARED(float, sums, SPARSE_ROWS *SPARSE_QUERY);
    SHARED(float, scores, SPARSE_ROWS *SPARSE_THREADS);
    SHARED(float, panel, SPARSE_THREADS *SPARSE_LD);
    SHARED(int, bests, SPARSE_ROWS *SPARSE_BLOCKS_LIMIT); // for each row, the best one first
    SHARED(float, values, SPARSE_ROWS *SPARSE_BLOCKS_LIMIT);
    const SparseShape p = s.sparse;
    const int thread = (int)threadIdx.x, kv = (int)blockIdx.x % s.NKV, tile = (int)blockIdx.x / s.NKV;
    const int tiles = (s.T + SPARSE_ROWS - 1) / SPARSE_ROWS, b = tile / tiles;
    const int t0 = tile % tiles * SPARSE_ROWS, rows = min((int)SPARSE_ROWS, s.T - t0), group = s.NQ / s.NKV;
    const int width = sets * s.D;
    for (int i = thread; i < rows * width; i += SPARSE_THREADS) {
        float x = 0;
        size_t row = ((size_t)b * s.T + t0 + i / width) * s.ldq;
        for (int h = kv * group; h < (kv + 1) * group; h++) x += to_float(q[row + (size_t)h * s.q_head + i % width]);
        sums[i / width * SPARSE_QUERY + i % width] = x;
    }
    // One thread of each row keeps its best blocks. The first row has the first candidate, the last row the last one.
    const int chooses = thread % (SPARSE_THREADS / SPARSE_ROWS) ? rows : thread / (SPARSE_THREADS / SPARSE_ROWS);
    const SparseChooser chooser = sparse_chooser(s, first, b, t0 + min(chooses, rows - 1));
    const int from = sparse_chooser(s, first, b, t0).from, end = sparse_chooser(s, first, b, t0 + rows - 1).self;
    int count = 0, *best = bests + min(chooses, rows - 1) * SPARSE_BLOCKS_LIMIT;
    float *value = values + (best - bests);
    for (int j0 = from; j0 < end; j0 += SPARSE_THREADS) {
        float dot[SPARSE_ROWS] = {0};
        for (int c0 = 0; c0 < width; c0 += WARP) {
            const int column = c0 + thread % WARP;
            __syncthreads(); // the sums are written, earlier scores and means are read
            for (int j = thread / WARP; j < min((int)SPARSE_THREADS, end - j0); j += SPARSE_THREADS / WARP)
                if (column < width)
                    panel[j * SPARSE_LD + column - c0] =
                        means[(((size_t)b * p.count + j0 + j) * s.NKV + kv) * width + column];
            __syncthreads();
            for (int i = 0; j0 + thread < end && i < min(WARP, width - c0); i++) {
                const float m = panel[thread * SPARSE_LD + i];
                UNROLL
                for (int r = 0; r < SPARSE_ROWS; r++) dot[r] += sums[r * SPARSE_QUERY + c0 + i] * m;
            }
        }
        UNROLL
        for (int r = 0; r < SPARSE_ROWS; r++) scores[r * SPARSE_THREADS + thread] = dot[r];
        __syncthreads();
        if (chooses >= rows) continue;
        for (int j = max(chooser.from, j0); j < min(chooser.self, j0 + SPARSE_THREADS); j++) {
            const float score = scores[chooses * SPARSE_THREADS + j - j0];
            int at = count;
            while (at > 0 && score > value[at - 1]) at--;
            if (at == p.blocks) continue;
            if (count < p.blocks) count++;
            for (int r = count - 1; r > at; r--) best[r] = best[r - 1], value[r] = value[r - 1];
            best[at] = j, value[at] = score;
        }
    }
    if (chooses >= rows) return;
    const size_t row = (size_t)(b * s.NKV + kv) * s.T + t0 + chooses;
    int *list = lists + row * sparse_width(p), filled = 0;
    if (chooser.document >= chooser.low && chooser.document < chooser.self) list[filled++] = chooser.document;
    for (int i = 0; i < count; i++) { // in ascending order
        int at = filled++;
        for (; at > 0 && list[at - 1] > best[i]; at--) list[at] = list[at - 1];
        list[at] = best[i];
    }
    list[filled++] = chooser.self;
    while (filled < sparse_width(p)) list[filled++] = -1;
}

static inline void sparse_select(int *lists, const floatX *q, const real *means, const int *first, int sets,
                                 AttentionShape s) {
    OPERATION();
    size_t tiles = (size_t)s.B * ((s.T + SPARSE_ROWS - 1) / SPARSE_ROWS);
    assert(sets * s.D <= SPARSE_QUERY && s.sparse.blocks <= SPARSE_BLOCKS_LIMIT);
    LAUNCH(sparse_select_kernel, blocks_of(tiles * s.NKV, 1), SPARSE_THREADS, 0, lists, q, means, first, sets, s);
}
