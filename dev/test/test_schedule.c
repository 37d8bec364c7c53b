// The learning-rate schedules against their formulas, and in the corners where such code divides by zero
// (known faults: nanoGPT #691, gpt-neox #1008, torchtitan #1010 and #1261).
#include "testing.h"
#include "../../llmc/schedule.h"

static const char* const schedules[] = {"constant", "cosine", "wsd"};

static void no_rate_is_nan_zero_or_above_the_peak(void) {
    const int64_t lengths[] = {1, 2, 3, 10, 100}, warmups[] = {0, 1, 2, 9, 10, 11, 100, 1000};
    for (int s = 0; s < 3; s++) {
        for (size_t n = 0; n < 5; n++) {
            for (size_t w = 0; w < 8; w++) {
                for (int64_t step = 0; step < lengths[n] + 5; step++) {
                    double rate = learning_rate(schedules[s], step, warmups[w], lengths[n], 2.0, 0.2);
                    CHECK(rate > 0.0 && rate <= 2.0);
                }
            }
        }
    }
}

static void warmup_starts_above_zero_and_reaches_the_peak_at_its_last_step(void) {
    const double expected[] = {0.25, 0.5, 0.75, 1.0, 1.0};
    for (int s = 0; s < 3; s++) {
        for (int64_t step = 0; step < 5; step++) {
            CHECK_NEAR(learning_rate(schedules[s], step, 4, 100, 1.0, 0.1), expected[step], 1e-15);
        }
    }
}

static void rates_fall_without_a_flat_end_to_within_a_step_of_the_floor(void) {
    for (int s = 1; s < 3; s++) {
        for (int64_t step = 10; step < 100; step++) {
            double before = learning_rate(schedules[s], step - 1, 10, 100, 1.0, 0.1);
            double now = learning_rate(schedules[s], step, 10, 100, 1.0, 0.1);
            CHECK(now <= before);
            if (step > 81) { CHECK(now < before); } // strictly, to the very end
        }
        double last = learning_rate(schedules[s], 99, 10, 100, 1.0, 0.1);
        double before = learning_rate(schedules[s], 98, 10, 100, 1.0, 0.1);
        CHECK(last > 0.1 && last - 0.1 <= before - last + 1e-12);
    }
}

static void cosine_is_the_formula(void) {
    for (int64_t step = 20; step < 120; step++) {
        double formula = 0.3 + 0.5 * (3.0 - 0.3) * (1.0 + cos(acos(-1.0) * (double)(step - 20) / 100.0));
        CHECK_NEAR(learning_rate("cosine", step, 20, 120, 3.0, 0.3), formula, 1e-12);
    }
}

static void wsd_is_flat_then_linear_over_the_last_fifth(void) {
    CHECK(learning_rate("wsd", 79, 5, 100, 1.0, 0.0) == 1.0);
    CHECK(learning_rate("wsd", 80, 5, 100, 1.0, 0.0) == 1.0);
    CHECK_NEAR(learning_rate("wsd", 90, 5, 100, 1.0, 0.0), 0.5, 1e-15);
    CHECK_NEAR(learning_rate("wsd", 99, 5, 100, 1.0, 0.0), 0.05, 1e-15);
    CHECK_NEAR(learning_rate("wsd", 95, 90, 100, 1.0, 0.0), 0.5, 1e-15); // a long warm-up shortens the decay
}

static void constant_does_not_use_the_floor(void) {
    CHECK(learning_rate("constant", 0, 0, 10, 1e-3, 0.0) == 1e-3);
    CHECK(learning_rate("constant", 9, 0, 10, 1e-3, 0.0) == 1e-3);
}

static void a_prolonged_run_stays_where_it_ended(void) {
    CHECK(learning_rate("cosine", 10, 0, 10, 1.0, 0.1) == 0.1);
    CHECK(learning_rate("wsd", 1000000, 0, 10, 1.0, 0.1) == 0.1);
    CHECK(learning_rate("cosine", 0, 0, 0, 1.0, 0.1) == 0.1);
}

static void very_long_runs_are_exact(void) {
    int64_t steps = (int64_t)1 << 50;
    CHECK_NEAR(learning_rate("cosine", steps / 2, 0, steps, 1.0, 0.0), 0.5, 1e-12);
}

static void an_unknown_schedule_is_an_error(void) {
    EXPECT_FATAL(learning_rate("linear", 5, 0, 10, 1.0, 0.1), "'linear' is not constant, cosine or wsd");
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(an_unknown_schedule_is_an_error);
    RUN(no_rate_is_nan_zero_or_above_the_peak);
    RUN(warmup_starts_above_zero_and_reaches_the_peak_at_its_last_step);
    RUN(rates_fall_without_a_flat_end_to_within_a_step_of_the_floor);
    RUN(cosine_is_the_formula);
    RUN(wsd_is_flat_then_linear_over_the_last_fifth);
    RUN(constant_does_not_use_the_floor);
    RUN(a_prolonged_run_stays_where_it_ended);
    RUN(very_long_runs_are_exact);
    return test_summary();
}
