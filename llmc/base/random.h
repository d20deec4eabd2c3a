/*
random.h: stateless random numbers, a function of (key, index). Every rank, thread, backend and resumed run draws the
same numbers.

  bits    two rounds of the splitmix64 finalizer over key + index * golden ratio
  normal  Box-Muller transform of the bits of an index pair
  key     seeded XXH3 of a name. Tensors are keyed by name, so variants initialize equal tensors equally
  source  Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"
*/
#pragma once
#include "common.h"

static inline uint64_t random_key(const char *name, uint64_t seed) {
    return XXH3_64bits_withSeed(name, strlen(name), seed);
}

static inline uint64_t random_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline uint64_t random_bits(uint64_t key, uint64_t index) {
    return random_mix(key ^ random_mix((index + 1) * 0x9E3779B97F4A7C15ull));
}

// Uniform in (0, 1). Never 0, so that its logarithm is finite.
static inline double random_uniform(uint64_t key, uint64_t index) {
    return ((double)(random_bits(key, index) >> 11) + 0.5) * 0x1p-53;
}

static inline double random_normal(uint64_t key, uint64_t index) {
    const double two_pi = 6.283185307179586;
    double radius = sqrt(-2 * log(random_uniform(key, 2 * index)));
    return radius * cos(two_pi * random_uniform(key, 2 * index + 1));
}
