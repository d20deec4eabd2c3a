/*
wgmma_layout.h: where wgmma has the elements of its matrices: in registers, and in shared memory as a matrix descriptor
says. compare_cute.cpp compares it with CuTe.

  thread   of the warpgroup, 0 to 127; warp w has rows 16 w and later
  size     bytes of an element of A and B: 2 (bf16) or 1 (FP8)
  source   PTX ISA 8.7, "Register Fragments for wgmma.mma_async.m64nNk16", "... m64nNk32", "Shared Memory Matrix
           Layout", "Matrix Descriptor"
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
inline Coordinates element_of_a(uint32_t thread, uint32_t i, uint32_t size) { // the i-th in the four registers
    const uint32_t each = 4 / size, j = i / each;
    return {thread / 32 * 16 + thread % 32 / 4 + j % 2 * 8, thread % 4 * each + i % each + j / 2 * 4 * each};
}

// Bits 4 to 6 of an address change by bits 7 to 9, of which `mask` has as many as the swizzle.
inline uint32_t swizzled(uint32_t address, uint32_t mask) { return address ^ (address >> 7 & mask) << 4; }

// A or B in shared memory; a row is of A, or a column of B.
struct Matrix {
    uint32_t start, leading, stride, width; // the width of the swizzle is in 16 bytes; 1: none
    bool transposed;                        // rows are adjacent in memory, not the elements of a row
    Matrix(uint64_t descriptor, bool is_transposed)
        : start((uint32_t)(descriptor & 0x3FFF) << 4), leading((uint32_t)(descriptor >> 16 & 0x3FFF) << 4),
          stride((uint32_t)(descriptor >> 32 & 0x3FFF) << 4), width("\1\10\4\2"[descriptor >> 62]),
          transposed(is_transposed) {}
    static bool valid(uint64_t descriptor) { return !(descriptor & 0x3FFFC000C000C000); } // without a base offset
    uint32_t byte(uint32_t row, uint32_t k, uint32_t size) const {
        const uint32_t in16 = 16 / size, repeat = width * 16;
        uint32_t offset;
        if (transposed && width == 1) offset = row / 8 * stride + k % 8 * 16 + k / 8 * leading;
        else if (transposed)
            offset = row / 8 % width * 16 + row / 8 / width * leading + k % 8 * repeat + k / 8 * stride;
        else offset = row % 8 * repeat + row / 8 * stride + k / in16 * (width == 1 ? leading : 16);
        return swizzled(start + offset, width - 1) + (transposed ? row % 8 : k % in16) * size;
    }
};

} // namespace ptx
