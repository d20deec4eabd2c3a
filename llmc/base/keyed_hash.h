/*
keyed_hash.h: a keyed hash to prove knowledge of a shared secret, random keys and derived keys.

  uint64_t keyed_hash(key, data, bytes)           cannot be computed or predicted without the key
  HashKey  hash_key_random()                      128 bits from the system's random number generator
  HashKey  hash_key_derive(key, use, data, bytes) a separate key for each use and data
  bool     hash_key_parse(key, text)              reads 32 hexadecimal digits, the form in an environment variable

The hash is SipHash-2-4, a pseudorandom function for short messages. XXH3 with a secret is not one: its key can be
recovered from hashes. A hash has 64 bits. Each guess requires a connection and succeeds with probability 2^-64. Hashes
are compared as machine words in one instruction, so the duration does not depend on how many bits agree.

  source   J.-P. Aumasson, D. J. Bernstein, SipHash: a fast short-input PRF, 2012, sections 2 and 7, appendix A (vector)
*/
#ifndef LLMC_KEYED_HASH_H
#define LLMC_KEYED_HASH_H
#include "common.h"

typedef struct {
    uint64_t word[2];
} HashKey;

static inline uint64_t rotate_left(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline void keyed_hash_rounds(uint64_t v[4], int rounds) {
    for (int i = 0; i < rounds; i++) {
        v[0] += v[1], v[2] += v[3];
        v[1] = rotate_left(v[1], 13) ^ v[0], v[3] = rotate_left(v[3], 16) ^ v[2];
        v[0] = rotate_left(v[0], 32);
        v[2] += v[1], v[0] += v[3];
        v[1] = rotate_left(v[1], 17) ^ v[2], v[3] = rotate_left(v[3], 21) ^ v[0];
        v[2] = rotate_left(v[2], 32);
    }
}

static inline uint64_t keyed_hash(const HashKey *key, const void *data, size_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    uint64_t v[4] = {key->word[0] ^ UINT64_C(0x736f6d6570736575), key->word[1] ^ UINT64_C(0x646f72616e646f6d),
                     key->word[0] ^ UINT64_C(0x6c7967656e657261), key->word[1] ^ UINT64_C(0x7465646279746573)};
    for (size_t done = 0; done <= bytes; done += 8) { // little-endian words; the last one contains the length
        size_t n = min_size(8, bytes - done);
        uint64_t word = n < 8 ? (uint64_t)bytes << 56 : 0;
        for (size_t i = 0; i < n; i++) word |= (uint64_t)at[done + i] << (8 * i);
        v[3] ^= word;
        keyed_hash_rounds(v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    keyed_hash_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static inline HashKey hash_key_random(void) {
    HashKey key;
    CHECK(getrandom(&key, sizeof(key), 0) == (ssize_t)sizeof(key), "cannot get random numbers from the system: %s",
          strerror(errno));
    return key;
}

static inline HashKey hash_key_derive(const HashKey *key, const char *use, const void *data, size_t bytes) {
    unsigned char text[512];
    HashKey derived;
    size_t length = strlen(use) + 1; // the terminating 0 separates it from the data
    assert(1 + length + bytes <= sizeof(text));
    memcpy(text + 1, use, length);
    memcpy(text + 1 + length, data, bytes);
    for (int w = 0; w < 2; w++) {
        text[0] = (unsigned char)w;
        derived.word[w] = keyed_hash(key, text, 1 + length + bytes);
    }
    return derived;
}

static inline bool hash_key_parse(HashKey *key, const char *text) {
    if (strlen(text) != 32 || strspn(text, "0123456789abcdefABCDEF") != 32) return false;
    for (int w = 0; w < 2; w++) {
        char digits[17];
        memcpy(digits, text + 16 * w, 16);
        digits[16] = 0;
        key->word[w] = strtoull(digits, NULL, 16);
    }
    return true;
}
#endif
