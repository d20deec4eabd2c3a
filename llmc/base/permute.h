/*
permute.h: a pseudorandom permutation of [0, count), computed element by element without a table.

  method  8 Feistel rounds on an even number of bits that covers the count (at least 6, since fewer mix badly). They are
          repeated while the result is not below the count (cycle walking: at most 4 times on average, 64/count times
          for count < 16).
  fixed   Existing checkpoints depend on it: changing the rounds or the mixing changes the data order of every run.

  source  Black and Rogaway, "Ciphers with arbitrary finite domains" (2002). The mixing is the finalizer of splitmix64.
*/
#pragma once
#include "random.h"

// The image of `x` under a permutation of [0, count) that depends only on (seed, epoch).
static inline uint64_t permutation_at(uint64_t x, uint64_t count, uint64_t seed, uint64_t epoch) {
    assert(x < count && count <= 1ull << 62);
    int half_bits = 3;
    while ((1ull << (2 * half_bits)) < count) half_bits++;
    const uint64_t golden = 0x9E3779B97F4A7C15ull, mask = (1ull << half_bits) - 1;
    uint64_t key = random_mix(random_mix(seed + golden) + epoch);
    do {
        uint64_t left = x >> half_bits, right = x & mask;
        for (uint64_t round = 1; round <= 8; round++) {
            uint64_t mixed = left ^ (random_mix((key + round * golden) ^ right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half_bits | right;
    } while (x >= count);
    return x;
}
