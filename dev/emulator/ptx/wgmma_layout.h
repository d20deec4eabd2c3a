/*
wgmma_layout.h: where wgmma has the elements of its matrices of bf16: in registers, and in shared memory as a matrix
descriptor says, with the swizzle of 128 bytes. All places agree with those of CuTe (nvidia-cutlass 4.2.0.0).

  thread   of the warpgroup, 0 to 127; warp w has rows 16 w and later
  source   PTX ISA 8.7, "Register Fragments for wgmma.mma_async.m64nNk16", "Shared Memory Matrix Layout", "Matrix
           Descriptor"
*/
#pragma once
#include <stdint.h>

namespace ptx {

struct Coordinates {
    uint32_t row, column;
};
inline Coordinates element_of_d(uint32_t thread, uint32_t i) { // in the i-th register
    return {thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2};
}
inline Coordinates element_of_a(uint32_t thread, uint32_t i) { // the i-th in the four registers
    return {thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, thread % 4 * 2 + i % 2 + i / 4 * 8};
}

// Bits 4 to 6 of an address change by bits 7 to 9.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// A or B in shared memory; a row is of A, or a column of B.
struct Matrix {
    uint32_t start, leading, stride;
    bool transposed; // rows are adjacent in memory, not the elements of a row
    Matrix(uint64_t descriptor, bool is_transposed)
        : start((uint32_t)(descriptor & 0x3FFF) << 4), leading((uint32_t)(descriptor >> 16 & 0x3FFF) << 4),
          stride((uint32_t)(descriptor >> 32 & 0x3FFF) << 4), transposed(is_transposed) {}
    static bool valid(uint64_t descriptor) { // the swizzle of 128 bytes, without a base offset
        return (descriptor & 0xFFFFC000C000C000) == (uint64_t)1 << 62;
    }
    uint32_t byte(uint32_t row, uint32_t k) const {
        if (transposed)
            return swizzled(start + row / 8 % 8 * 16 + row / 64 * leading + k % 8 * 128 + k / 8 * stride) + row % 8 * 2;
        return swizzled(start + row % 8 * 128 + row / 8 * stride + k / 8 * 16) + k % 8 * 2;
    }
};

} // namespace ptx
