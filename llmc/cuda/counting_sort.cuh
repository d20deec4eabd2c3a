/*
counting_sort.cuh: the parts of a stable sort by small numbers, the digits: three launches, without atomics.

  1. A warp counts the digits of its consecutive rows: counts (digit, warp).
  2. sort_scan turns the counts into places: a warp's first row of each digit.
  3. The warp passes its rows again, and places each one. Rows of a digit stay in their order.
*/
#pragma once
#include "kernel_utils.cuh"

// The lanes of `active` with the same digit as the calling lane. All lanes of `active` call it.
static __device__ inline unsigned sort_same_digit(unsigned active, int digit, int bits) {
    unsigned same = active;
    for (int bit = 0; bit < bits; bit++) {
        unsigned with = __ballot_sync(active, digit >> bit & 1);
        same &= digit >> bit & 1 ? with : ~with;
    }
    return same;
}

// A warp passes rows begin .. end-1, 32 at a time, with digits of at most `bits` bits. at[digit], in shared memory: the
// place of the digit's next row, or the number of its rows so far. Calls row(i, place) for each row.
template <typename Digit, typename Row>
static __device__ inline void sort_rows(int *at, int begin, int end, int bits, Digit digit_of, Row row) {
    int lane = (int)threadIdx.x % WARP;
    __syncwarp();
    for (int i = begin + lane; i - lane < end; i += WARP) {
        unsigned active = __ballot_sync(ALL_LANES, i < end);
        if (i < end) {
            int digit = digit_of(i);
            unsigned same = sort_same_digit(active, digit, bits);
            int before = __popc(same & ((1u << lane) - 1)), to = at[digit] + before;
            __syncwarp(active); // all lanes have read `at`
            if (before == 0) at[digit] += __popc(same);
            row(i, to);
        }
        __syncwarp(); // `at` is up to date
    }
}

// counts[i] = sum of counts[0 .. i-1]; one block, one range per thread
enum { SORT_SCAN_THREADS = 1024 };
static __global__ void sort_scan_kernel(int *counts, int count) {
    SHARED(int, sums, SORT_SCAN_THREADS);
    int each = (count + SORT_SCAN_THREADS - 1) / SORT_SCAN_THREADS, thread = (int)threadIdx.x;
    int begin = min(count, thread * each), end = min(count, begin + each), sum = 0;
    for (int i = begin; i < end; i++) sum += counts[i];
    sums[thread] = sum;
    for (int distance = 1; distance < SORT_SCAN_THREADS; distance *= 2) {
        __syncthreads();
        int before = thread >= distance ? sums[thread - distance] : 0;
        __syncthreads();
        sums[thread] += before;
    }
    int at = sums[thread] - sum;
    for (int i = begin; i < end; i++) {
        int next = at + counts[i];
        counts[i] = at;
        at = next;
    }
}
static inline void sort_scan(int *counts, int count) {
    LAUNCH(sort_scan_kernel, 1, SORT_SCAN_THREADS, 0, counts, count);
}
