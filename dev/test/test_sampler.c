// Sampling: the right distribution, and no NaN where logits and temperatures are extreme (known fault: llm.c's sampler
// does not subtract the maximum).
#include "testing.h"
#include "../../llmc/sampler.h"

enum { V = 8 };
static char scratch[1000 * 16];

// how often each of n tokens comes in `draws`, as shares
static void shares_of(double* shares, const float* logits, int n, float temperature, int top_k, float top_p,
                      int draws) {
    uint64_t rng = 1234;
    for (int i = 0; i < n; i++) { shares[i] = 0.0; }
    for (int d = 0; d < draws; d++) {
        int id = sample_token(logits, n, temperature, top_k, top_p, &rng, scratch);
        if (!CHECK(id >= 0 && id < n)) { return; }
        shares[id] += 1.0 / draws;
    }
}

static void log_of(float* logits, const double* p, int n) {
    for (int i = 0; i < n; i++) { logits[i] = (float)log(p[i]); }
}

static const double probabilities[V] = {0.02, 0.30, 0.05, 0.08, 0.25, 0.15, 0.10, 0.05};
static const double draw_error = 0.006; // 5 standard deviations of a share of 0.3 in 160,000 draws

static void plain_sampling_follows_softmax(void) {
    float logits[V];
    double shares[V];
    log_of(logits, probabilities, V);
    for (int i = 0; i < V; i++) { logits[i] += 50.0f; } // softmax does not see a shift
    shares_of(shares, logits, V, 1.0f, 0, 1.0f, 160000);
    for (int i = 0; i < V; i++) { CHECK_NEAR(shares[i], probabilities[i], draw_error); }
}

static void temperature_sharpens_and_flattens(void) {
    float logits[V];
    double shares[V], expected[V], sum = 0.0;
    log_of(logits, probabilities, V);
    for (int i = 0; i < V; i++) { sum += expected[i] = pow(probabilities[i], 2.0); }
    shares_of(shares, logits, V, 0.5f, 0, 1.0f, 160000);
    for (int i = 0; i < V; i++) { CHECK_NEAR(shares[i], expected[i] / sum, draw_error); }
    shares_of(shares, logits, V, 1e6f, 0, 1.0f, 160000);
    for (int i = 0; i < V; i++) { CHECK_NEAR(shares[i], 1.0 / V, draw_error); }
}

static void temperature_zero_is_the_likeliest_and_draws_no_number(void) {
    float logits[V];
    uint64_t rng = 7;
    log_of(logits, probabilities, V);
    CHECK(sample_token(logits, V, 0.0f, 3, 0.5f, &rng, scratch) == 1);
    CHECK(rng == 7);
    CHECK(sample_token(logits, V, 1e-6f, 0, 1.0f, &rng, scratch) == 1);
    CHECK(sample_token(logits, V, 1e-44f, 0, 1.0f, &rng, scratch) == 1); // a denormal
    CHECK(rng != 7);
}

static void ties_go_to_the_lower_id(void) {
    float logits[4] = {1.0f, 2.0f, 2.0f, 2.0f};
    uint64_t rng = 1;
    CHECK(sample_token(logits, 4, 0.0f, 0, 1.0f, &rng, scratch) == 1);
    for (int i = 0; i < 100; i++) { // top-2 of the three equals: the first two
        int id = sample_token(logits, 4, 1.0f, 2, 1.0f, &rng, scratch);
        CHECK(id == 1 || id == 2);
    }
}

static void huge_logits_do_not_overflow(void) {
    float logits[V];
    double shares[V];
    log_of(logits, probabilities, V);
    for (int i = 0; i < V; i++) { logits[i] = logits[i] * 100.0f + 3e38f * (float)(i == 4) * 0.1f; }
    const float temperatures[] = {1e-6f, 1.0f, 1e6f};
    for (int t = 0; t < 3; t++) {
        shares_of(shares, logits, V, temperatures[t], 0, 1.0f, 1000);
        CHECK_NEAR(shares[4], 1.0, 1e-9);
    }
}

static void top_k_keeps_the_k_likeliest(void) {
    float logits[V];
    double shares[V];
    log_of(logits, probabilities, V);
    shares_of(shares, logits, V, 1.0f, 1, 1.0f, 1000);
    CHECK_NEAR(shares[1], 1.0, 1e-9);
    shares_of(shares, logits, V, 1.0f, 3, 1.0f, 160000); // 0.30, 0.25, 0.15
    CHECK_NEAR(shares[1], 0.30 / 0.70, draw_error);
    CHECK_NEAR(shares[4], 0.25 / 0.70, draw_error);
    CHECK_NEAR(shares[5], 0.15 / 0.70, draw_error);
    const int all[] = {V, V + 1, 2147483647};
    for (int k = 0; k < 3; k++) {
        shares_of(shares, logits, V, 1.0f, all[k], 1.0f, 160000);
        for (int i = 0; i < V; i++) { CHECK_NEAR(shares[i], probabilities[i], draw_error); }
    }
}

static void top_p_keeps_the_smallest_set_that_reaches_p(void) {
    float logits[V];
    double shares[V];
    log_of(logits, probabilities, V);
    shares_of(shares, logits, V, 1.0f, 0, 0.54f, 160000); // 0.30 + 0.25 reach it
    CHECK_NEAR(shares[1], 0.30 / 0.55, draw_error);
    CHECK_NEAR(shares[4], 0.25 / 0.55, draw_error);
    shares_of(shares, logits, V, 1.0f, 0, 0.56f, 160000); // 0.15 is needed, too
    CHECK_NEAR(shares[5], 0.15 / 0.70, draw_error);
    shares_of(shares, logits, V, 1.0f, 0, 1e-9f, 1000); // never less than one token
    CHECK_NEAR(shares[1], 1.0, 1e-9);
}

static void top_p_counts_within_what_top_k_left(void) {
    float logits[V];
    double shares[V];
    log_of(logits, probabilities, V);
    shares_of(shares, logits, V, 1.0f, 3, 0.7f, 160000); // of 0.70 in all, 0.30 + 0.25 are 79%
    CHECK_NEAR(shares[1] + shares[4], 1.0, 1e-9);
    CHECK_NEAR(shares[1], 0.30 / 0.55, draw_error);
}

static void nan_and_infinite_logits_give_a_token_of_sense(void) {
    float logits[4] = {NAN, 1.0f, -INFINITY, 1.0f};
    uint64_t rng = 3;
    for (int i = 0; i < 200; i++) {
        int id = sample_token(logits, 4, 1.0f, i % 3, i % 2 ? 0.9f : 1.0f, &rng, scratch);
        CHECK(id == 1 || id == 3);
    }
    float nothing[3] = {NAN, NAN, NAN}, infinite[3] = {0.0f, INFINITY, 0.0f}, minus[2] = {-INFINITY, -INFINITY};
    CHECK(sample_token(nothing, 3, 1.0f, 0, 1.0f, &rng, scratch) == 0);
    CHECK(sample_token(infinite, 3, 1.0f, 2, 0.5f, &rng, scratch) == 1);
    CHECK(sample_token(minus, 2, 1.0f, 0, 1.0f, &rng, scratch) == 0);
}

static void logits_are_left_alone_and_the_seed_decides(void) {
    float logits[V], before[V];
    log_of(logits, probabilities, V);
    memcpy(before, logits, sizeof(before));
    uint64_t a = 99, b = 99;
    for (int i = 0; i < 1000; i++) {
        int first = sample_token(logits, V, 0.8f, 5, 0.9f, &a, scratch);
        CHECK(sample_token(logits, V, 0.8f, 5, 0.9f, &b, scratch) == first);
    }
    CHECK(memcmp(before, logits, sizeof(before)) == 0);
}

// the heap's choice against a full sort, on a larger vocabulary with many ties
static void top_k_of_a_thousand_equals_sorting(void) {
    enum { N = 1000, K = 37 };
    static float logits[N];
    uint64_t rng = 5;
    bool allowed[N];
    for (int i = 0; i < N; i++) { logits[i] = (float)(rng_next(&rng) % 100) * 0.1f; }
    for (int i = 0; i < N; i++) { // rank of i: how many come before it
        int rank = 0;
        for (int j = 0; j < N; j++) { rank += logits[j] > logits[i] || (logits[j] == logits[i] && j < i); }
        allowed[i] = rank < K;
    }
    for (int d = 0; d < 3000; d++) { CHECK(allowed[sample_token(logits, N, 50.0f, K, 1.0f, &rng, scratch)]); }
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(plain_sampling_follows_softmax);
    RUN(temperature_sharpens_and_flattens);
    RUN(temperature_zero_is_the_likeliest_and_draws_no_number);
    RUN(ties_go_to_the_lower_id);
    RUN(huge_logits_do_not_overflow);
    RUN(top_k_keeps_the_k_likeliest);
    RUN(top_p_keeps_the_smallest_set_that_reaches_p);
    RUN(top_p_counts_within_what_top_k_left);
    RUN(nan_and_infinite_logits_give_a_token_of_sense);
    RUN(logits_are_left_alone_and_the_seed_decides);
    RUN(top_k_of_a_thousand_equals_sorting);
    return test_summary();
}
