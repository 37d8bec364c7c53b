// Random numbers that are pure functions of a seed: hashes, normal initialisation, a sampling stream, a shuffle in
// O(1) memory. Nothing here keeps hidden state, so any thread, rank or program that asks for element i gets the same
// bits.
#ifndef LLMC_RAND_H
#define LLMC_RAND_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define RAND_GOLDEN 0x9E3779B97F4A7C15ull // 2^64 / golden ratio, odd: the step of splitmix64's counter

// Finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): a bijection of
// 64-bit words in which each input bit changes each output bit with probability close to a half.
static inline uint64_t hash64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Goes on with a hash of bytes, at first HASH_BEGIN: FNV-1a on words; the last one is filled up with zeros. No single
// changed word goes unnoticed.
#define HASH_BEGIN 0xCBF29CE484222325u
static inline uint64_t hash_bytes(uint64_t h, const void* bytes, size_t n) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char*)bytes + i, n - i < 8 ? n - i : 8);
        h = (h ^ word) * 0x100000001B3u;
        h ^= h >> 32;
    }
    return h;
}

// 64-bit FNV-1a of a C string, finalised with hash64 because FNV's high bits are weak for short names.
static inline uint64_t hash_string(const char* s) {
    uint64_t h = HASH_BEGIN;
    for (; *s; s++) { h = (h ^ (unsigned char)*s) * 0x100000001B3ull; }
    return hash64(h);
}

// ----------------------------------------------------------------------------
// normal numbers, counter based

// 32 random bits -> standard normal: the sign from the top bit, the size from the inverse of the normal distribution.
// With v in (0, 0.5) the tail probability, x = 1 - 2v and w = -log(4v(1-v)), z = x * P(w) where P is smooth (the
// variable is Giles' 2010, "Approximating the erfinv function"; the two polynomials, below and above w = 6, are our
// own fits). Relative error below 3e-6, |z| <= 6.4. Every multiply-add is an explicit fmaf, so the bits do not depend
// on whether the compiler contracts a*b+c, nor on its optimisation level; no branch, so loops over it vectorise.
static inline float normal_from_bits(uint32_t bits) {
    float v = fmaf((float)(int32_t)(bits & 0x7FFFFFFFu), 0x1p-32f, 0x1p-33f);
    float x = 1.0f - 2.0f * v; // exact product, so contraction cannot change it
    float q = (4.0f * v) * (1.0f - v);

    // log(q) = e*log(2) + log1p(r) with 1+r in [sqrt(1/2), sqrt(2))
    int32_t qbits;
    memcpy(&qbits, &q, sizeof(qbits));
    int32_t shifted = qbits - 0x3F3504F3; // the bits of sqrt(1/2)
    float e = (float)(shifted >> 23);
    int32_t mbits = (shifted & 0x007FFFFF) + 0x3F3504F3;
    float m;
    memcpy(&m, &mbits, sizeof(m));
    float r = m - 1.0f;
    float p = -0.103478931f;
    p = fmaf(p, r, 0.162789673f);
    p = fmaf(p, r, -0.172015786f);
    p = fmaf(p, r, 0.198939979f);
    p = fmaf(p, r, -0.24973385f);
    p = fmaf(p, r, 0.333350897f);
    p = fmaf(p, r, -0.500002861f);
    p = fmaf(p, r, 1.0f);
    float w = -fmaf(p, r, e * 0.693147182f);

    int tail = w > 6.0f; // 1 number in 800
    float t = w - (tail ? 13.0f : 2.5f);
    float z = tail ? -3.81678744e-10f : 4.76246868e-07f;
    z = fmaf(z, t, tail ? -3.55512442e-09f : -4.44951047e-06f);
    z = fmaf(z, t, tail ? 3.02423672e-07f : -6.0576881e-06f);
    z = fmaf(z, t, tail ? -6.49615504e-06f : 0.000306880305f);
    z = fmaf(z, t, tail ? 0.000137002382f : -0.00177373132f);
    z = fmaf(z, t, tail ? -0.00372335152f : -0.00590517046f);
    z = fmaf(z, t, tail ? 0.19768478f : 0.348803431f);
    z = fmaf(z, t, tail ? 4.86749887f : 2.12331295f);
    z = z * x;
    return (bits & 0x80000000u) ? -z : z;
}

// The key of one tensor's numbers: where in splitmix64's sequence its elements begin.
static inline uint64_t normal_key(uint64_t seed, const char* tensor_name) {
    return hash64(hash64(seed + RAND_GOLDEN) ^ hash_string(tensor_name));
}

// out[j] = stddev * z(seed, name, begin + j) for j < count: mean 0, standard deviation stddev. Element i is output i of
// splitmix64 started at the tensor's key, so any split into ranges, over threads or ranks, gives the same bits. Uses
// all OpenMP threads when called outside a parallel region; inside one, the caller splits the range.
static inline void normal_fill(float* out, uint64_t seed, const char* tensor_name, size_t begin, size_t count,
                               float stddev) {
    uint64_t key = normal_key(seed, tensor_name) + (uint64_t)begin * RAND_GOLDEN;
    #pragma omp parallel for schedule(static)
    for (size_t j = 0; j < count; j++) {
        uint64_t h = hash64(key + (uint64_t)(j + 1) * RAND_GOLDEN);
        out[j] = stddev * normal_from_bits((uint32_t)(h >> 32));
    }
}

// ----------------------------------------------------------------------------
// a small stream for sampling: splitmix64, whose whole state is one word that a checkpoint can hold

// the next 64 random bits; *state may start at any value, the seed for instance
static inline uint64_t rng_next(uint64_t* state) {
    *state += RAND_GOLDEN;
    return hash64(*state);
}

// uniform in [0, 1), a multiple of 2^-24, so that 1.0 cannot come out by rounding
static inline float rng_uniform(uint64_t* state) {
    return (float)(rng_next(state) >> 40) * 0x1p-24f;
}

// ----------------------------------------------------------------------------
// a shuffle without a table

// Where position i of [0, n) goes under the permutation that `key` names; n < 2^62, i < n. A Feistel network (Luby,
// Rackoff 1988) permutes the next larger power of four, and what lands outside [0, n) walks on until it is inside
// (cycle walking: Black, Rogaway 2002), fewer than four rounds of it on average. n = 0 and n = 1 return 0.
static inline uint64_t permute_index(uint64_t i, uint64_t n, uint64_t key) {
    if (n < 2) { return 0; }
    int half_bits = 1;
    while (half_bits < 31 && (1ull << (2 * half_bits)) < n) { half_bits++; }
    uint64_t mask = (1ull << half_bits) - 1;
    do {
        uint64_t left = i >> half_bits, right = i & mask;
        for (int round = 0; round < 8; round++) { // many rounds, because halves of one or two bits mix slowly
            uint64_t f = hash64(key + RAND_GOLDEN * (uint64_t)(round + 1) + hash64(right + (uint64_t)(round + 1)));
            uint64_t next = left ^ ((f >> 32) & mask);
            left = right;
            right = next;
        }
        i = (left << half_bits) | right;
    } while (i >= n);
    return i;
}

#endif // LLMC_RAND_H
