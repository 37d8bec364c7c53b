// rand.h: normal numbers of the right distribution, the same bits everywhere, a stream in [0,1), a bijective shuffle.
// Tolerances are 4 standard deviations of the estimate unless a comment says otherwise; seeds are fixed.
#include "testing.h"

#include "../../llmc/rand.h"

static const size_t N = 1000000;
static float* sample(uint64_t seed, const char* name) {
    float* z = (float*)mallocCheck(N * sizeof(float));
    normal_fill(z, seed, name, 0, N, 1.0f);
    return z;
}

static double correlation(const float* a, const float* b, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) { sum += (double)a[i] * b[i]; }
    return sum / (double)n;
}

static void normal_fill_has_the_moments_and_tails_of_a_normal_distribution(void) {
    float* z = sample(42, "model.embed_tokens.weight");
    double m1 = 0, m2 = 0, m3 = 0, m4 = 0, above2 = 0, above4 = 0, positive = 0;
    for (size_t i = 0; i < N; i++) {
        double x = z[i];
        m1 += x; m2 += x * x; m3 += x * x * x; m4 += x * x * x * x;
        above2 += fabs(x) > 2.0; above4 += fabs(x) > 4.0; positive += x > 0.0;
    }
    double n = (double)N, root = sqrt(n);
    CHECK_NEAR(m1 / n, 0.0, 4.0 / root);
    CHECK_NEAR(m2 / n, 1.0, 4.0 * sqrt(2.0) / root);
    CHECK_NEAR(m3 / n, 0.0, 4.0 * sqrt(15.0) / root);
    CHECK_NEAR(m4 / n, 3.0, 4.0 * sqrt(96.0) / root);
    CHECK_NEAR(positive / n, 0.5, 4.0 * 0.5 / root);
    CHECK_NEAR(above2 / n, 0.0455003, 4.0 * sqrt(0.0455) / root);
    CHECK_NEAR(above4, 63.34, 4.0 * sqrt(63.34));
    free(z);
}

static void normal_from_bits_inverts_the_distribution(void) {
    // the tail probability of z must be the v it was made from; dv/v is about z*dz in the tail, hence the factor
    for (uint32_t bits = 0; bits < 0x7FFFFF00u; bits += 0x3FFD) {
        double z = normal_from_bits(bits | 0x80000000u), v = (bits + 0.5) * 0x1p-32;
        double back = 0.5 * erfc(-z / sqrt(2.0));
        if (!CHECK_NEAR(back / v, 1.0, 1e-6 + 3e-6 * (1.0 + z * z))) { return; }
        if (!CHECK(normal_from_bits(bits) == -(float)z)) { return; }
    }
    CHECK_NEAR(normal_from_bits(0), 6.34, 0.01);          // the largest there is
    CHECK_NEAR(normal_from_bits(0x7FFFFFFFu), 0.0, 1e-6); // the smallest
}

static void normal_fill_gives_the_same_bits_on_every_compiler(void) {
    // the number was made with gcc -O3 -march=native; clang, C++, -O0 and builds without FMA hardware must agree
    float z[4099];
    normal_fill(z, 1234, "model.layers.0.mlp.gate.weight", 7, 4099, 0.02f);
    uint64_t h = 0;
    for (size_t i = 0; i < 4099; i++) {
        uint32_t bits;
        memcpy(&bits, &z[i], sizeof(bits));
        h = hash64(h ^ bits);
    }
    CHECK(h == 0x7D862864D3E4CB40ull);
}

static void normal_fill_in_any_pieces_gives_the_same_bits(void) {
    float whole[1000], pieces[1000];
    normal_fill(whole, 5, "w", 0, 1000, 0.02f);
    for (size_t begin = 0, step = 1; begin < 1000; begin += step, step = step % 37 + 3) {
        normal_fill(pieces + begin, 5, "w", begin, begin + step < 1000 ? step : 1000 - begin, 0.02f);
    }
    CHECK(memcmp(whole, pieces, sizeof(whole)) == 0);
    float far[2], again[1];
    normal_fill(far, 5, "w", 0xFFFFFFFFull, 2, 1.0f); // across 2^32, as in a large embedding
    normal_fill(again, 5, "w", 0x100000000ull, 1, 1.0f);
    CHECK(far[1] == again[0]);
    normal_fill(again, 5, "w", 0, 1, 1.0f);
    CHECK(far[1] != again[0]);
}

static void normal_fill_is_uncorrelated_between_neighbours_names_and_seeds(void) {
    float* a = sample(1, "model.layers.0.self_attn.q_proj.weight");
    float* b = sample(1, "model.layers.1.self_attn.q_proj.weight");
    float* c = sample(2, "model.layers.0.self_attn.q_proj.weight");
    double tol = 4.0 / sqrt((double)N);
    CHECK_NEAR(correlation(a, a + 1, N - 1), 0.0, tol);
    CHECK_NEAR(correlation(a, a + 64, N - 64), 0.0, tol);
    CHECK_NEAR(correlation(a, b, N), 0.0, tol);
    CHECK_NEAR(correlation(a, c, N), 0.0, tol);
    CHECK_NEAR(correlation(b, c, N), 0.0, tol);
    free(a); free(b); free(c);
}

static void normal_fill_scales_and_takes_no_elements(void) {
    float a[8], b[8] = {0};
    normal_fill(a, 3, "w", 0, 8, 1.0f);
    normal_fill(b, 3, "w", 0, 8, 0.5f);
    for (int i = 0; i < 8; i++) { CHECK(b[i] == 0.5f * a[i]); }
    normal_fill(NULL, 3, "w", 0, 0, 1.0f);
    normal_fill(b, 3, "w", 0, 8, 0.0f);
    CHECK(b[0] == 0.0f);
}

static void rng_uniform_is_uniform_and_below_one(void) {
    uint64_t state = 7, ones = UINT64_MAX;
    double sum = 0.0;
    int bins[10] = {0};
    for (int i = 0; i < 100000; i++) {
        float u = rng_uniform(&state);
        if (!CHECK(u >= 0.0f && u < 1.0f)) { return; }
        bins[(int)(u * 10.0f)]++;
        sum += u;
    }
    CHECK_NEAR(sum / 1e5, 0.5, 4.0 * sqrt(1.0 / 12.0 / 1e5));
    for (int b = 0; b < 10; b++) { CHECK_NEAR(bins[b], 1e4, 4.0 * sqrt(1e4)); }
    CHECK((float)(ones >> 40) * 0x1p-24f < 1.0f); // the largest value rng_uniform can give
}

static void rng_stream_continues_from_its_saved_state(void) {
    uint64_t a = 99;
    for (int i = 0; i < 10; i++) { rng_next(&a); }
    uint64_t b = a;
    for (int i = 0; i < 10; i++) { CHECK(rng_next(&a) == rng_next(&b)); }
}

static void permute_index_is_a_bijection_for_every_size(void) {
    static unsigned char seen[70000];
    const uint64_t sizes[] = {1,  2,  3,  4,  5,   7,   8,   9,   15,   16,   17,   31,
                              63, 64, 65, 100, 255, 256, 257, 1000, 4096, 4097, 65537, 69999};
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        for (uint64_t key = 0; key < 3; key++) {
            memset(seen, 0, sizeof(seen));
            for (uint64_t i = 0; i < sizes[s]; i++) {
                uint64_t j = permute_index(i, sizes[s], key);
                if (!CHECK(j < sizes[s] && !seen[j])) { return; }
                seen[j] = 1;
            }
        }
    }
    CHECK(permute_index(0, 0, 1) == 0);
    uint64_t big = (1ull << 40) + 12345; // far more than any data set, still in O(1) memory
    for (uint64_t i = 0; i < 1000; i++) { CHECK(permute_index(big - 1 - i, big, 3) < big); }
}

static void permute_index_mixes_well_for_small_and_large_sizes(void) {
    // over many keys each place of a small set is equally likely; in a large set neighbours land far apart
    for (uint64_t n = 2; n <= 9; n++) {
        int counts[9] = {0};
        for (uint64_t key = 0; key < 9000; key++) { counts[permute_index(0, n, hash64(key))]++; }
        double expected = 9000.0 / (double)n;
        for (uint64_t j = 0; j < n; j++) { CHECK_NEAR(counts[j], expected, 4.5 * sqrt(expected)); }
    }
    double sum = 0.0, n = 100000.0;
    for (uint64_t i = 0; i < 100000; i++) { // correlation of place and value: 0 with standard deviation 1/sqrt(n)
        sum += ((double)i / n - 0.5) * ((double)permute_index(i, 100000, 11) / n - 0.5);
    }
    CHECK_NEAR(sum / n * 12.0, 0.0, 4.0 / sqrt(n));
}

static void hashes_tell_apart_what_is_nearly_equal(void) {
    CHECK(hash_string("a") != hash_string("b"));
    CHECK(hash_string("") != hash_string("a"));
    CHECK(hash_string("model.layers.1.x") != hash_string("model.layers.11.x"));
    double flipped = 0.0; // each input bit flips half of the output bits
    for (int bit = 0; bit < 64; bit++) {
        for (uint64_t x = 0; x < 64; x++) { flipped += __builtin_popcountll(hash64(x) ^ hash64(x ^ (1ull << bit))); }
    }
    CHECK_NEAR(flipped / (64 * 64 * 64), 0.5, 0.005);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(normal_fill_has_the_moments_and_tails_of_a_normal_distribution);
    RUN(normal_from_bits_inverts_the_distribution);
    RUN(normal_fill_gives_the_same_bits_on_every_compiler);
    RUN(normal_fill_in_any_pieces_gives_the_same_bits);
    RUN(normal_fill_is_uncorrelated_between_neighbours_names_and_seeds);
    RUN(normal_fill_scales_and_takes_no_elements);
    RUN(rng_uniform_is_uniform_and_below_one);
    RUN(rng_stream_continues_from_its_saved_state);
    RUN(permute_index_is_a_bijection_for_every_size);
    RUN(permute_index_mixes_well_for_small_and_large_sizes);
    RUN(hashes_tell_apart_what_is_nearly_equal);
    return test_summary();
}
