// exp.c: e^x for an array of floats, the inner loop of softmax, cross-entropy and SwiGLU: at V = 151936 a training step
// takes 78 million of them in the loss alone. Bound by arithmetic, where it becomes vectors.
//
//     make build/dev_cpu/exp
//
// kernel 1: expf of the C library. Right to the last bit but rarely, and a call for each number: glibc offers vectors
//           only under -ffast-math, which would also let the compiler assume that there are no NaNs.
// kernel 2: e^x = 2^n 2^f with x log2(e) = n + f, |f| <= 1/2: n goes into the exponent bits, 2^f is a Taylor
//           polynomial. Plain C without a branch, so the compiler makes vectors of it. But x log2(e) is rounded before
//           n is taken from it: at x = 87 its fraction has lost 7 bits.
// kernel 3: the trainer's exp_poly: n as before, then f = x - n ln2 with ln2 in two parts, the first so short that its
//           product with n is exact (Cody and Waite 1980): nothing is lost. One degree more, one multiply-add more.
// winner: 3
//
// One core of a Zen 4, a row of 151936, kernel 1 to 3: 3.3, 0.43, 0.52 ns a number, and at most 0.5, 63, 1.2 ulp off
// (0.5, 3.1, 1.1 between -1 and 1). A fifth more time is what the last five bits cost.
#include "common.h"

enum { NUM_KERNELS = 3 };

static inline float exp_taylor(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float z = x * 1.44269504f, n = rintf(z), f = (z - n) * 0.693147181f;
    float p = 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    union {
        uint32_t u;
        float f;
    } two_n;
    two_n.u = (uint32_t)((int32_t)(n == n ? n : 0) + 127) << 23; // a NaN is no integer, and is still in p
    return p * two_n.f;
}

void exp_all(int kernel, float* out, const float* x, size_t n) {
    if (kernel == 1) {
        #pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) { out[i] = expf(x[i]); }
    } else if (kernel == 2) {
        #pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) { out[i] = exp_taylor(x[i]); }
    } else {
        #pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) { out[i] = exp_poly(x[i]); }
    }
}

// ----------------------------------------------------------------------------
// checks and benchmark

static double ulps(float got, float x) {
    // how far from e^x, in steps between the floats there; the library's exp of a double is the truth
    double want = exp((double)x);
    return fabs(got - want) / ldexp(1, ilogb(want) - 23);
}

void check_range(int kernel, float low, float high, double most) {
    // 2 million floats of [low, high], evenly spaced
    const size_t n = 2000003;
    float *x = fresh(n), *y = fresh(n);
    for (size_t i = 0; i < n; i++) { x[i] = low + (high - low) * ((float)i / (float)(n - 1)); }
    exp_all(kernel, y, x, n);
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        double error = ulps(y[i], x[i]);
        if (!(error <= worst)) { worst = error, at = i; } // a NaN is the worst
    }
    printf("kernel %d, %g .. %g: at most %.2f ulp\n", kernel, low, high, worst);
    char what[80], detail[120];
    snprintf(what, sizeof(what), "kernel %d, %g .. %g", kernel, low, high);
    snprintf(detail, sizeof(detail), "exp(%.9g) = %.9g is %.2f ulp off, more than %.2f", x[at], y[at], worst, most);
    check_result(worst <= most, what, detail);
    free_arrays();
}

void check_special(int kernel) {
    const float in[7] = {NAN, 0, -0.0f, 1e-30f, -200, -INFINITY, 87};
    float out[7];
    exp_all(kernel, out, in, 7);
    check_result(out[0] != out[0], "a NaN stays one", "it became a number");
    check_result(out[1] == 1 && out[2] == 1 && out[3] == 1, "exp(0) is 1", "it is not");
    check_result(out[4] >= 0 && out[4] <= 2e-38f && out[5] >= 0 && out[5] <= 2e-38f,
                 "exp of what is far below is next to nothing", "it is not");
    check_result(out[6] < INFINITY, "exp(87) is finite", "it is not");
}

void check_all(int kernel) {
    // what the roundings of a kernel add up to: of the result alone; and of the polynomial, whose own error is below
    // half an ulp with degree 7, 1.2 with degree 6; and of z, half of 2^-17 of one at 87, which is 64 ulp
    const double near[4] = {0, 1, 4, 2}, far[4] = {0, 1, 68, 2};
    check_range(kernel, -1, 1, near[kernel]);
    check_range(kernel, -87, 88, far[kernel]);
    check_special(kernel);
}

typedef struct {
    size_t n;
    float *out, *x;
} Work;

static void run(int kernel, const void* work) {
    const Work* w = (const Work*)work;
    exp_all(kernel, w->out, w->x, w->n);
}

void bench_all(void) {
    const size_t sizes_n[2] = {151936, 1 << 24};
    const char* names[2] = {"a row of 151936", "2^24 numbers"};
    for (int i = 0; i < 2; i++) {
        size_t n = sizes_n[i];
        Work w = {n, fresh(n), random_floats(n, 20, 1)};
        Bench b = {"", 1, 3, 0, 8.0 * n, run, NULL, &w, NULL};
        snprintf(b.what, sizeof(b.what), "%s", names[i]);
        bench(&b);
        free_arrays();
    }
}

int main(int argc, char** argv) { return dev_main(argc, argv, NUM_KERNELS, 0, check_all, bench_all); }
