// common.h: what every file of dev/cpu shares: the trainer itself (its functions are called, none is copied), arrays,
// comparison with a reference in double, timing in turns, and what the command line says.
#ifndef DEV_CPU_COMMON_H
#define DEV_CPU_COMMON_H

#define TESTING
#include "../../train_moe_cpu.c"
#include "../bench/turns.h"

// ----------------------------------------------------------------------------
// the command line: ./op, ./op 3, ./op --check. dev_main is all of a main.

static int dev_only = 0; // 0: all kernels
static bool dev_only_check = false;
static int dev_num_kernels = 0, dev_bf16_kernel = 0;
static int checks_passed = 0, checks_failed = 0;
static Neighbours dev_neighbours; // since the program began

static inline void dev_open(int argc, char** argv, int num_kernels, int bf16_kernel) {
    // bf16_kernel: the one whose products read bf16 (--precision bf16); 0: there is none
    program_name = argv[0];
    dev_num_kernels = num_kernels;
    dev_neighbours = neighbours_begin();
    dev_bf16_kernel = bf16_kernel;
    for (int i = 1; i < argc; i++) {
        char* end;
        long kernel = strtol(argv[i], &end, 10);
        if (strcmp(argv[i], "--check") == 0) {
            dev_only_check = true;
        } else if (*argv[i] != '\0' && *end == '\0' && kernel >= 1 && kernel <= num_kernels) {
            dev_only = (int)kernel;
        } else {
            fatal("'%s' is no argument: give a kernel from 1 to %d, or none for all; --check: no times", argv[i],
                  num_kernels);
        }
    }
    if (bf16_kernel == 0 || bf16_product_missing() == NULL) { return; }
    if (dev_only == bf16_kernel) { fatal("kernel %d cannot run: %s", bf16_kernel, bf16_product_missing()); }
    printf("kernel %d is left out: %s\n", bf16_kernel, bf16_product_missing());
}

static inline bool dev_runs(int kernel) {
    if (kernel == dev_bf16_kernel && bf16_product_missing() != NULL) { return false; }
    return dev_only == 0 || dev_only == kernel;
}
static inline bool dev_benchmarks(void) { return !dev_only_check; }

static inline int dev_main(int argc, char** argv, int num_kernels, int bf16_kernel, void (*check_all)(int kernel),
                           void (*bench_all)(void)) {
    dev_open(argc, argv, num_kernels, bf16_kernel);
    for (int kernel = 1; kernel <= num_kernels; kernel++) {
        if (dev_runs(kernel)) { check_all(kernel); }
    }
    if (dev_benchmarks()) {
        bench_all();
        printf("%d thread%s, products by %s; others used %.2f cores\n", num_threads(), num_threads() == 1 ? "" : "s",
               gemm_library(false), neighbours_cores(dev_neighbours));
    }
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed > 0;
}

// ----------------------------------------------------------------------------
// arrays: each an allocation of its own, so that AddressSanitizer sees its ends; free_arrays frees them all

static void* dev_arrays[64];
static int dev_num_arrays = 0;

static inline void* dev_alloc(size_t bytes) {
    if (dev_num_arrays == 64) { fatal("more than 64 arrays"); }
    return dev_arrays[dev_num_arrays++] = arena_alloc(bytes);
}

static inline void free_arrays(void) {
    for (int i = 0; i < dev_num_arrays; i++) {
        bf16_copy_remove((float*)dev_arrays[i]);
        free(dev_arrays[i]);
    }
    dev_num_arrays = 0;
}

static inline double* zeros(size_t n) {
    double* x = (double*)dev_alloc(n * sizeof(double));
    for (size_t i = 0; i < n; i++) { x[i] = 0; }
    return x;
}

// full of NaNs, so that what a kernel forgot to write shows
static inline float* fresh(size_t n) {
    float* x = (float*)dev_alloc(n * sizeof(float));
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) { x[i] = NAN; }
    return x;
}

// Numbers in [-scale, scale], each exactly a bf16, so that products in bf16 read the same inputs; the same for the same
// seed.
static inline float* random_floats(size_t n, float scale, uint64_t seed) {
    float* x = (float*)dev_alloc(n * sizeof(float));
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        uint64_t state = hash64(seed * RAND_GOLDEN + i);
        x[i] = bf16_to_f32(f32_to_bf16((2 * rng_uniform(&state) - 1) * scale));
    }
    return x;
}

static inline float* copy_of(const float* from, size_t n) {
    float* x = (float*)dev_alloc(n * sizeof(float));
    memcpy(x, from, n * sizeof(float));
    return x;
}

// from here on products read x in bf16
static inline void in_bf16(float* x, size_t n) {
    bf16_copy_add(x, n > 0 ? n : 1, false); // of an empty array, too, it must be known that it has one
    to_bf16_all(x, n);
}

// ----------------------------------------------------------------------------
// checks, written so that a NaN fails

static inline void check_result(bool ok, const char* what, const char* detail) {
    if (ok) {
        checks_passed++;
    } else {
        checks_failed++;
        printf("FAIL %s: %s\n", what, detail);
    }
}

static inline double rms_of(const double* x, size_t n) {
    double squares = 0;
    for (size_t i = 0; i < n; i++) { squares += x[i] * x[i]; }
    return sqrt(squares / (double)(n > 0 ? n : 1));
}

// Each number within `relative` of its own size plus the rms of all that should be: what rounding may do to a sum. The
// first that is not is reported.
PRINTF_LIKE(5, 6)
static inline void check_near(const float* got, const double* want, size_t n, double relative, const char* fmt, ...) {
    char what[256], detail[256] = "";
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof(what), fmt, args);
    va_end(args);
    double rms = rms_of(want, n);
    size_t i = 0;
    while (i < n && fabs(got[i] - want[i]) <= relative * (fabs(want[i]) + rms) + 1e-30) { i++; }
    if (i < n) {
        snprintf(detail, sizeof(detail), "element %zu of %zu is %.9g, not %.9g (tolerance %.3g)", i, n, got[i], want[i],
                 relative * (fabs(want[i]) + rms));
    }
    check_result(i == n, what, detail);
}

// The same where operands were rounded to bf16 on the way, each off by up to 2^-9 of itself: how far an element may be
// off depends on its terms, but all together are off by no more than 2^-8 of their rms.
static inline void check_bf16(const float* got, const double* want, size_t n, const char* what) {
    double squares = 0;
    for (size_t i = 0; i < n; i++) { squares += (got[i] - want[i]) * (got[i] - want[i]); }
    double off = sqrt(squares / (double)(n > 0 ? n : 1)), rms = rms_of(want, n);
    char detail[128];
    snprintf(detail, sizeof(detail), "the rms of the difference is %.3g, of what should be %.3g", off, rms);
    check_result(off <= rms / 256 + 1e-30, what, detail);
}

// The results of a kernel at one shape, of which `what` tells.
typedef struct {
    const char* name;
    const float* got;
    const double* want;
    size_t count;
} Result;

static inline void check_results(const Result* results, int count, int kernel, double relative, const char* what) {
    for (int i = 0; i < count; i++) {
        const Result* r = &results[i];
        char name[256];
        snprintf(name, sizeof(name), "kernel %d, %s: %s", kernel, what, r->name);
        if (kernel == dev_bf16_kernel) {
            check_bf16(r->got, r->want, r->count, name);
        } else {
            check_near(r->got, r->want, r->count, relative, "%s", name);
        }
    }
}

// ----------------------------------------------------------------------------
// timing. In a round each kernel runs once, in alternating order, so that all meet the same noise; before each, a sweep
// over a large array empties the caches and is the measure of bandwidth; a 1536^3 product is that of arithmetic.

typedef struct {
    char what[64];
    int first, winner;   // kernels before `first` would take too long at this shape; winner: the trainer's
    double flops, bytes; // what the operation must compute or move; one of them is 0
    void (*run)(int kernel, const void* work);
    void (*prepare)(const void* work); // not timed, before each run; may be NULL
    const void *work, *work_bf16;      // arrays; the second for the kernel whose products read bf16
} Bench;

static inline double dev_clock_us(void) {
    // by the clock on the wall; one thread alone has a better one, the processor's, which stops while others have it
    return num_threads() == 1 ? cpu_seconds_of_mine() * 1e6 : profiler_clock_us();
}

static inline double memory_rate(void) {
    // bytes per second of a sweep that changes each number of an array in place, read and written bytes counted. (Of a
    // copy it would be unclear how many there are: most processors read what they are about to write over.)
    enum { COUNT = 32 << 20 }; // 128 MiB: more than the caches hold, which it empties of all else
    static float* x = NULL;
    if (!x) {
        x = (float*)arena_alloc(COUNT * sizeof(float));
        zero_real(x, COUNT);
    }
    double begin = dev_clock_us();
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < COUNT; i++) { x[i] = 1 - x[i]; }
    return 2.0 * COUNT * sizeof(float) / (dev_clock_us() - begin) * 1e6;
}

enum { MOST_ROUNDS = 31, MOST_KERNELS = 8 };

static inline double run_us(const Bench* b, int kernel) {
    const void* work = kernel == dev_bf16_kernel ? b->work_bf16 : b->work;
    if (b->prepare) { b->prepare(work); }
    double begin = dev_clock_us();
    b->run(kernel, work);
    return dev_clock_us() - begin;
}

// One line a kernel; dev/bench/bench_cpu_ops.py reads it.
static inline void bench_line(const Bench* b, int kernel, double ms, double winner_ms, double peak) {
    double rate = (b->flops > 0 ? b->flops : b->bytes) / ms * 1e3;
    printf("bench %s kernel %d: %.4f ms, %.1f %s/s = %.1f %% of %s %.1f", b->what, kernel, ms, rate / 1e9,
           b->flops > 0 ? "GFLOP" : "GB", 100 * rate / peak, b->flops > 0 ? "GEMM" : "memory", peak / 1e9);
    if (winner_ms > 0) { printf(", %.2f times as long as the trainer's", ms / winner_ms); }
    printf("\n");
}

static inline void bench(const Bench* b) {
    static double ms[MOST_KERNELS + 1][MOST_ROUNDS], products[2][MOST_ROUNDS], sweeps[MOST_ROUNDS];
    double medians[MOST_KERNELS + 1] = {0}, peaks[2] = {0};
    double begin = profiler_clock_us();
    int rounds = 0;
    bool any_bf16 = dev_bf16_kernel > 0 && dev_runs(dev_bf16_kernel);
    if (dev_only > 0 && dev_only < b->first) { return; }
    for (int round = -1; round < 3 || (round < MOST_ROUNDS && profiler_clock_us() - begin < 2e6); round++) {
        int r = round < 0 ? 0 : round; // round -1 warms up
        if (round == 0) { begin = profiler_clock_us(); }
        for (int i = 1; i <= dev_num_kernels; i++) {
            int kernel = round % 2 == 0 ? i : dev_num_kernels + 1 - i;
            if (kernel < b->first || !dev_runs(kernel)) { continue; }
            sweeps[r] = memory_rate();
            ms[kernel][r] = run_us(b, kernel) / 1e3;
        }
        if (b->flops > 0) { products[0][r] = product_rate(false, dev_clock_us); }
        if (b->flops > 0 && any_bf16) { products[1][r] = product_rate(true, dev_clock_us); }
        rounds = r + 1;
    }
    for (int p = 0; p < 2; p++) { peaks[p] = median(b->flops > 0 ? products[p] : sweeps, rounds); }
    for (int kernel = b->first; kernel <= dev_num_kernels; kernel++) {
        if (dev_runs(kernel)) { medians[kernel] = median(ms[kernel], rounds); }
    }
    for (int kernel = b->first; kernel <= dev_num_kernels; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        bench_line(b, kernel, medians[kernel], medians[b->winner], peaks[kernel == dev_bf16_kernel]);
    }
    fflush(stdout);
}
#endif
