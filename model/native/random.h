// The engine's random numbers (`engine.sampler.uniform`): BLAKE2b (RFC 7693) of a counter, no state to hand over.
#pragma once

#include <cstdint>

namespace mr {

enum class Purpose : uint32_t { kSample, kDraft, kAccept };  // engine.sampler.Purpose

struct Blake2b {
    static constexpr uint64_t kInitial[8] = {
        0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
        0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
    static constexpr uint8_t kOrder[10][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
        {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
        {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
        {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
        {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

    static uint64_t turned(uint64_t x, int by) { return x >> by | x << (64 - by); }

    static void mix(uint64_t* v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
        v[a] += v[b] + x, v[d] = turned(v[d] ^ v[a], 32);
        v[c] += v[d], v[b] = turned(v[b] ^ v[c], 24);
        v[a] += v[b] + y, v[d] = turned(v[d] ^ v[a], 16);
        v[c] += v[d], v[b] = turned(v[b] ^ v[c], 63);
    }

    // The first eight bytes of the digest of one message of `bytes` <= 128 bytes, with digest_size 8 and this `person`.
    static uint64_t first_word(const uint64_t* message, uint64_t bytes, const uint64_t* person) {
        uint64_t h[8], v[16];
        for (int i = 0; i < 8; ++i) h[i] = kInitial[i];
        h[0] ^= 0x01010008, h[6] ^= person[0], h[7] ^= person[1];
        for (int i = 0; i < 8; ++i) v[i] = h[i], v[i + 8] = kInitial[i];
        v[12] ^= bytes, v[14] = ~v[14];
        for (int round = 0; round < 12; ++round) {
            const uint8_t* o = kOrder[round % 10];
            for (int i = 0; i < 4; ++i) mix(v, i, i + 4, i + 8, i + 12, message[o[2 * i]], message[o[2 * i + 1]]);
            for (int i = 0; i < 4; ++i)
                mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, message[o[2 * i + 8]], message[o[2 * i + 9]]);
        }
        return h[0] ^ v[0] ^ v[8];
    }
};

// In [0, 1), 53 bits. The counter is `struct.pack("<QIQI", seed, choice, position, purpose | slot << 8)`, as words.
inline double uniform(uint64_t seed, uint32_t choice, uint64_t position, Purpose purpose, uint32_t slot = 0) {
    constexpr uint64_t kPerson[2] = {0x616c65726e6f6f6d, 0x6d6f646e61722d79};  // "moonrelay-random"
    const uint64_t message[16] = {seed, choice | position << 32, position >> 32 | uint64_t(uint32_t(purpose) | slot << 8) << 32};
    return double(Blake2b::first_word(message, 24, kPerson) >> 11) * 0x1p-53;
}

}  // namespace mr
