/*
compare_cute.cpp: compares wgmma_layout.h with the layouts and descriptors of CuTe, the headers of CUTLASS: fragments of
A and D, and every byte of A or B for each swizzle, element size and transposition.

scripts/test.sh --all compiles and runs it with the packages of requirements.txt. Prints the number of comparisons, or
the first difference. (CuTe itself prints that a host has no address of shared memory.)
*/
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <emulator/ptx/wgmma_layout.h>
#include <stdio.h>
#include <stdlib.h>
using namespace cute;
using namespace cute::SM90::GMMA;

static int compared;
static void compare(const char *what, int x, int y, long theirs, long ours) {
    compared++;
    if (theirs == ours) return;
    printf("FAIL wgmma: %s (%d,%d): %ld in CuTe, %ld here\n0 passed, 1 failed\n", what, x, y, theirs, ours);
    exit(1);
}

// CuTe: the index in a matrix of 64 rows, column by column
template <class L, class F> static void fragments(const char *what, L theirs, F ours) {
    for (int t = 0; t < size<0>(theirs); t++)
        for (int i = 0; i < size<1>(theirs); i++) {
            ptx::Coordinates e = ours((uint32_t)t, (uint32_t)i);
            compare(what, t, i, theirs(t, i), e.row + 64 * e.column);
        }
}
template <int N> static void accumulators() {
    fragments("D", CLayout_64xN<N>{}, ptx::element_of_d);
    if constexpr (N > 8) accumulators<N - 8>();
}

alignas(4096) static char memory[1 << 16];

// The tiles of 64 rows and the depth of a wgmma, in a matrix of 128 rows.
template <Major MAJOR, class T, class ATOM> static void matrix(const char *what, ATOM atom) {
    constexpr int depth = 32 / sizeof(T), columns = 128 / sizeof(T);
    Tensor all = make_tensor(make_smem_ptr((T *)memory), tile_to_shape(atom, Shape<_128, Int<columns>>{}));
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < columns / depth; j++) {
            Tensor tile = local_tile(all, Shape<_64, Int<depth>>{}, make_coord(i, j));
            GmmaDescriptor descriptor = make_gmma_desc<MAJOR>(tile);
            descriptor.bitfield.start_address_ = (uint16_t)(((char *)&tile(0, 0) - memory) >> 4); // unknown to a host
            const ptx::Matrix ours(descriptor.desc_, MAJOR == Major::MN);
            for (int row = 0; row < 64; row++)
                for (int k = 0; k < depth; k++)
                    compare(what, row, k, (char *)&tile(row, k) - memory, ours.byte(row, k, sizeof(T)));
        }
}

int main() {
    accumulators<256>();
    fragments("A of bf16", ALayout_64x16{}, [](uint32_t t, uint32_t i) { return ptx::element_of_a(t, i, 2); });
    fragments("A of FP8", ALayout_64x32{}, [](uint32_t t, uint32_t i) { return ptx::element_of_a(t, i, 1); });
    matrix<Major::K, bfloat16_t>("no swizzle", Layout_K_INTER_Atom<bfloat16_t>{});
    matrix<Major::K, bfloat16_t>("swizzle of 32", Layout_K_SW32_Atom<bfloat16_t>{});
    matrix<Major::K, bfloat16_t>("swizzle of 64", Layout_K_SW64_Atom<bfloat16_t>{});
    matrix<Major::K, bfloat16_t>("swizzle of 128", Layout_K_SW128_Atom<bfloat16_t>{});
    matrix<Major::K, float_e4m3_t>("FP8, no swizzle", Layout_K_INTER_Atom<float_e4m3_t>{});
    matrix<Major::K, float_e4m3_t>("FP8, swizzle of 32", Layout_K_SW32_Atom<float_e4m3_t>{});
    matrix<Major::K, float_e4m3_t>("FP8, swizzle of 64", Layout_K_SW64_Atom<float_e4m3_t>{});
    matrix<Major::K, float_e4m3_t>("FP8, swizzle of 128", Layout_K_SW128_Atom<float_e4m3_t>{});
    matrix<Major::MN, bfloat16_t>("transposed, no swizzle", Layout_MN_INTER_Atom<bfloat16_t>{});
    matrix<Major::MN, bfloat16_t>("transposed, swizzle of 32", Layout_MN_SW32_Atom<bfloat16_t>{});
    matrix<Major::MN, bfloat16_t>("transposed, swizzle of 64", Layout_MN_SW64_Atom<bfloat16_t>{});
    matrix<Major::MN, bfloat16_t>("transposed, swizzle of 128", Layout_MN_SW128_Atom<bfloat16_t>{});
    printf("ok   wgmma: %d places of elements are those of CuTe\n1 passed, 0 failed\n", compared);
}
