/*
hopper.h: what sm_90a adds: barriers in shared memory, bulk copies, products of a warpgroup, and their rules. What a GPU
does not define is an error here; hopper.cpp reports it.

  mbarrier     a phase ends when all arrivals and all bytes that were announced (expect_tx) have come. Threads wait for
               the end of the phase of a parity
  bulk copies  from global to shared memory: of one dimension, or boxes of a tensor that a tensor map describes. They
               land at once, or not before all threads wait (set_copies)
  wgmma        D (64,N) = A (64,K) B (K,N) + D of a warpgroup, each warp 16 rows. It takes place at once, or in the wait
               for its group when no other thread can run. A thread's registers are named by their addresses
  proxies      what threads store to shared memory is visible to bulk copies and wgmma after fence.proxy.async: of the
               thread itself, or of another thread after a __syncthreads
  source       PTX ISA 8.7, "mbarrier", "cp.async.bulk", "Asynchronous Warpgroup Level Matrix Instructions", "Async
               proxy"; CUDA driver API, "Tensor Map Object Management"
*/
#pragma once
#include "machine.h"
#include <initializer_list>

namespace ptx {

void barrier_init(u32 address, u32 count, const Site &site);
u64 barrier_arrive(u32 address, u32 expected_bytes, const Site &site); // returns the phase
bool barrier_wait(u32 address, u32 parity, const Site &site);          // true

struct Tile { // a box of a tensor in global memory
    u64 map;
    std::initializer_list<u32> first; // coordinates, the innermost dimension first
};
void bulk_load(u32 to, u64 from, u32 bytes, u32 barrier, const Site &site);
void bulk_load(u32 to, const Tile &from, u32 barrier, const Site &site);
void proxy_fence();

struct Operands {
    int n;
    bool a_in_registers;
    u64 a, b; // descriptors
    bool accumulate;
    int scale_a, scale_b, transpose_a, transpose_b;
};
void wgmma(const Operands &what, std::initializer_list<float *> d, std::initializer_list<u32 *> a, const Site &site);
void wgmma_fence(const Site &site);
void wgmma_commit(const Site &site);
void wgmma_wait(int groups_left, const Site &site);
// Before an instruction other than wgmma that reads or writes registers of a wgmma.
void touched(std::initializer_list<const void *> registers, const Site &site);

// Lane 8 j + i has the address of row i of matrix j.
inline void store_matrices(u32 row, V<u32, 4> values, const Site &site) {
    const u32 lane = (u32)cuda_on_cpu::thread_number() % 32;
    for (u32 j = 0; j < 4; j++) {
        u32 to = (u32)cuda_on_cpu::warp(WarpOp::shfl, ~0u, row, (int)(8 * j + lane / 4), 32, place(site));
        shared<16>(to, site);
        store_shared<u32, 1>({{values.v[j]}}, to + lane % 4 * 4, site);
    }
}
void set_registers(bool more, int count, const Site &site);

void begin_hopper_block(bool asynchronous);

} // namespace ptx
