// common.h: what every file of dev/cuda shares: the device helpers of train_moe.cu (the same tokens: dev/test checks
// it), and for the host: arrays on the device, comparison with the CPU reference, timing, measured peaks.
#ifndef DEV_CUDA_COMMON_H
#define DEV_CUDA_COMMON_H

#include <algorithm>
#include <malloc.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>
#include <string>
#include <vector>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#ifndef EMU
#include "../../llmc/gemm.h" // for the measured GEMM peak
#endif
#include "../../llmc/cuda_check.h"
#include "../../llmc/ptx.cuh"

// ----------------------------------------------------------------------------
// device helpers, as in train_moe.cu

__host__ __device__ inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// sum and maximum over a warp, or each group of `lanes` neighbours in it, a power of 2; every lane gets its group's
template <class T> __device__ inline T warp_sum(T x, int lanes = 32) {
    for (int offset = 1; offset < lanes; offset *= 2) { x += __shfl_xor_sync(0xffffffff, x, offset); }
    return x;
}
template <class T> __device__ inline T warp_max(T x, int lanes = 32) {
    for (int offset = 1; offset < lanes; offset *= 2) { x = max(x, __shfl_xor_sync(0xffffffff, x, offset)); }
    return x;
}

// sum over a block of whole warps, at most 1024 threads; every thread gets it. warp_sums: 32 numbers of shared memory
template <class T> __device__ inline T block_sum(T x, T* warp_sums) {
    x = warp_sum(x);
    __syncthreads(); // all have read what an earlier call left in warp_sums
    if (threadIdx.x % 32 == 0) { warp_sums[threadIdx.x / 32] = x; }
    __syncthreads(); // the sums of all warps are there
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? warp_sums[threadIdx.x % 32] : T(0));
}

// ----------------------------------------------------------------------------
// the CPU reference: cpu::rmsnorm_forward and so on are the functions of train_moe_cpu.c

#define TESTING
#include "../../llmc/batch_file.h"
#include "../../llmc/config.h"
#include "../../llmc/logger.h"
#include "../../llmc/profiler.h"
#include "../../llmc/rand.h"
#include "../../llmc/run.h"
#include "../../llmc/sampler.h"
#include "../../llmc/schedule.h"
#ifdef _OPENMP
#include <omp.h>
#endif
#include <limits.h>
#include <signal.h>
#include <unistd.h>
#ifdef USE_CBLAS
#include <cblas.h>
#endif
namespace cpu {
#include "../../train_moe_cpu.c"
}

// ----------------------------------------------------------------------------
// arrays

// Random numbers in [-scale, scale], each exactly a bf16, so that both sides compute from the same inputs; the same for
// the same seed.
inline std::vector<float> random_floats(size_t n, float scale, uint64_t seed) {
    std::vector<float> x(n);
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        uint64_t state = hash64(seed * 0x9E3779B97F4A7C15u + i);
        x[i] = bf16_to_f32(f32_to_bf16((2 * rng_uniform(&state) - 1) * scale));
    }
    return x;
}

// An array on the device that frees itself. Fresh memory holds NaNs (0xff bytes), so that what a kernel forgot to write
// shows.
template <class T> struct Device {
    T* data = nullptr;
    size_t count = 0;
    explicit Device(size_t n) : count(n) {
        cudaCheck(cudaMalloc((void**)&data, std::max<size_t>(n, 1) * sizeof(T)));
        cudaCheck(cudaMemset(data, 0xff, n * sizeof(T)));
    }
    explicit Device(const std::vector<T>& host) : Device(host.size()) { set(host); }
    Device(const Device&) = delete;
    ~Device() { cudaFree(data); }
    operator T*() const { return data; }
    void set(const std::vector<T>& host) {
        cudaCheck(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get() const {
        std::vector<T> host(count); // the copy waits for the kernels before it
        cudaCheck(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

inline std::vector<bf16> to_bf16(const std::vector<float>& x) {
    std::vector<bf16> y(x.size());
    #pragma omp parallel for
    for (size_t i = 0; i < x.size(); i++) { y[i] = __float2bfloat16(x[i]); }
    return y;
}
inline std::vector<float> to_float(const std::vector<bf16>& x) {
    std::vector<float> y(x.size());
    #pragma omp parallel for
    for (size_t i = 0; i < x.size(); i++) { y[i] = __bfloat162float(x[i]); }
    return y;
}

// Random numbers for a benchmark: a block of 2^20 again and again. Hundreds of millions of different ones would keep
// the host busy for longer than all the times take.
template <class T> void fill_random(const Device<T>& x, float scale, uint64_t seed) {
    std::vector<float> numbers = random_floats(std::min(x.count, (size_t)1 << 20), scale, seed);
    std::vector<T> block(numbers.begin(), numbers.end());
    cudaCheck(cudaMemcpy(x.data, block.data(), block.size() * sizeof(T), cudaMemcpyHostToDevice));
    for (size_t i = block.size(); i < x.count; i += block.size()) {
        size_t bytes = std::min(block.size(), x.count - i) * sizeof(T);
        cudaCheck(cudaMemcpy(x.data + i, x.data, bytes, cudaMemcpyDeviceToDevice));
    }
}

// ----------------------------------------------------------------------------
// checks. Written so that a NaN fails.

static int checks_passed = 0, checks_failed = 0;
static uint64_t checks_bits = 0; // a hash of all results: equal bits, whatever order the threads ran in?

template <class T> void hash_results(const std::vector<T>& x) {
    const unsigned char* bytes = (const unsigned char*)x.data();
    const size_t size = x.size() * sizeof(T), words = ceil_div(size, sizeof(uint64_t));
    uint64_t sum = 0; // of hashes that know their place: in whatever order threads add them
    #pragma omp parallel for reduction(+ : sum)
    for (size_t i = 0; i < words; i++) {
        uint64_t word = 0;
        memcpy(&word, bytes + 8 * i, std::min(sizeof(word), size - 8 * i));
        sum += hash64(word ^ hash64(i));
    }
    checks_bits = hash64(checks_bits ^ sum);
}

inline double rms(const std::vector<float>& x) {
    double sum = 0;
    #pragma omp parallel for reduction(+ : sum)
    for (size_t i = 0; i < x.size(); i++) { sum += (double)x[i] * x[i]; }
    return sqrt(sum / std::max<size_t>(x.size(), 1));
}

inline void check_result(bool ok, const char* what, const char* detail) {
    if (ok) { checks_passed++; return; }
    checks_failed++;
    printf("FAIL %s: %s\n", what, detail);
}
inline bool same_length(const char* what, size_t got, size_t want) {
    if (got == want) { return true; }
    char detail[64];
    snprintf(detail, sizeof(detail), "%zu elements, not %zu", got, want);
    check_result(false, what, detail);
    return false;
}

// the step from a bf16 to the next at the size of x: 2^-7 of the power of 2 below it
inline double bf16_ulp(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    bits &= 0x7f800000u;
    memcpy(&x, &bits, sizeof(bits));
    return (double)x / 128;
}

// Each element within tolerance_of(i) of what it should be; the first that is not is reported.
template <class Tolerance>
void check_within(const char* what, const std::vector<float>& got, const std::vector<float>& want,
                  Tolerance tolerance_of) {
    hash_results(got);
    if (!same_length(what, got.size(), want.size())) { return; }
    size_t bad = want.size();
    #pragma omp parallel for reduction(min : bad)
    for (size_t i = 0; i < want.size(); i++) {
        if (!(fabs((double)got[i] - want[i]) <= tolerance_of(i) + 1e-30)) { bad = std::min(bad, i); }
    }
    char detail[256] = "";
    if (bad < want.size()) {
        snprintf(detail, sizeof(detail), "element %zu of %zu is %g, not %g (tolerance %.3g)", bad, want.size(),
                 got[bad], want[bad], tolerance_of(bad));
    }
    check_result(bad == want.size(), what, detail);
}

// Each element within `ulps` bf16 steps of its own size plus `slack` times its own spread, the root of the sum of the
// squares of its terms: for a sum of K products that is sqrt(K) times their rms.
inline void check_bf16(const char* what, const std::vector<float>& got, const std::vector<float>& want,
                       const std::vector<double>& spread, double ulps = 1, double slack = 1.0 / 256) {
    if (!same_length(what, spread.size(), want.size())) { return; }
    check_within(what, got, want, [&](size_t i) { return ulps * bf16_ulp(want[i]) + slack * spread[i]; });
}
// The same where the rms of the reference is the spread of all elements. For a sum of K products of bf16 numbers in
// fp32 the defaults hold: rounding the result costs half a step, and the rms of the result is sqrt(K) times that of a
// product.
inline void check_bf16(const char* what, const std::vector<float>& got, const std::vector<float>& want, double ulps = 1,
                       double slack = 1.0 / 256) {
    double typical = rms(want);
    check_within(what, got, want, [&](size_t i) { return ulps * bf16_ulp(want[i]) + slack * typical; });
}
inline void check_bf16(const char* what, const std::vector<bf16>& got, const std::vector<float>& want, double ulps = 1,
                       double slack = 1.0 / 256) {
    check_bf16(what, to_float(got), want, ulps, slack);
}

// fp32 results: within `relative` of the rms of the reference and of the element's own size
inline void check_f32(const char* what, const std::vector<float>& got, const std::vector<float>& want,
                      double relative = 1e-5) {
    double typical = rms(want);
    check_within(what, got, want, [&](size_t i) { return relative * (fabs(want[i]) + typical); });
}

// integers, and bits that must not differ
template <class T> inline void check_equal(const char* what, const std::vector<T>& got, const std::vector<T>& want) {
    hash_results(got);
    if (!same_length(what, got.size(), want.size())) { return; }
    size_t bad = want.size();
    #pragma omp parallel for reduction(min : bad)
    for (size_t i = 0; i < want.size(); i++) {
        if (memcmp(&got[i], &want[i], sizeof(T)) != 0) { bad = std::min(bad, i); }
    }
    char detail[256] = "";
    if (bad < want.size()) {
        snprintf(detail, sizeof(detail), "element %zu of %zu is %g, not %g", bad, want.size(), (double)got[bad],
                 (double)want[bad]);
    }
    check_result(bad == want.size(), what, detail);
}

// ----------------------------------------------------------------------------
// the harness: which kernels run, at which sizes, and what the exit code is. A main is
//     dev_open(argc, argv, NUM_KERNELS);
//     for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
//         if (dev_runs(kernel)) { check_all(kernel); }
//         if (dev_times(kernel)) { bench_all(kernel); }
//     }
//     return dev_close();

static int dev_only = 0; // 0: all kernels
static bool dev_long = false;
static std::vector<int> dev_large; // the kernels that --large names; none: all

// "2,3" of --large
inline void dev_read_large(const char* list, int num_kernels) {
    for (const char* at = list; at == list || at[-1] == ',';) {
        char* end;
        long kernel = strtol(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || kernel < 0 || kernel > num_kernels) {
            fatal("--large %s: give kernels from 1 to %d as 2,3 (0: cuDNN's)", list, num_kernels);
        }
        dev_large.push_back((int)kernel);
        at = end + 1;
    }
}

// ./op, ./op 3, ./op --long, ./op --large 3
inline void dev_open(int argc, char** argv, int num_kernels) {
    program_name = argv[0];
    for (int i = 1; i < argc; i++) {
        char* end;
        long kernel = strtol(argv[i], &end, 10);
        if (strcmp(argv[i], "--long") == 0) {
            dev_long = true;
        } else if (strcmp(argv[i], "--large") == 0 && i + 1 < argc) {
            dev_read_large(argv[++i], num_kernels);
        } else if (*argv[i] != '\0' && *end == '\0' && kernel >= 1 && kernel <= num_kernels) {
            dev_only = (int)kernel;
        } else {
            fatal("'%s' is no argument: give a kernel from 1 to %d, or none for all; --long for large shapes in the "
                  "emulator, too; --large 2,3 for large shapes with these kernels only", argv[i], num_kernels);
        }
    }
    mallopt(M_MMAP_MAX, 0); // keep what is freed: fresh pages for each large vector took half of the host's time
    mallopt(M_TRIM_THRESHOLD, -1);
    cudaCheck(cudaSetDevice(0));
#ifdef EMU
    emu::count_kernels(); // there are no times to print: counters
#endif
}
inline bool dev_runs(int kernel) { return dev_only == 0 || dev_only == kernel; }

// Whether a kernel is checked with all tokens of smol-500m, 8 sequences of 4096: on a GPU, in the emulator with --long.
// Fewer tokens meet the model's widths (hidden size 896, experts' 512, heads of 64) everywhere.
#ifdef EMU
inline bool dev_benchmarks() { return false; } // the emulator has no time to measure
#else
inline bool dev_benchmarks() { return true; }
#endif
inline bool dev_is_large(int kernel) {
    bool named = dev_large.empty() || std::find(dev_large.begin(), dev_large.end(), kernel) != dev_large.end();
    return named && (dev_benchmarks() || dev_long);
}
inline size_t smol_500m_tokens(int kernel) { return dev_is_large(kernel) ? 8 * 4096 : 33; }
inline bool dev_times(int kernel) { return dev_benchmarks() && dev_runs(kernel) && dev_is_large(kernel); }

inline int dev_close() {
    cudaCheck(cudaDeviceSynchronize());
#ifdef EMU
    emu::count_table(stdout);
#endif
    printf("bits of all results: %016llx\n", (unsigned long long)checks_bits);
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed > 0;
}

// ----------------------------------------------------------------------------
// timing: the median of many runs, none of which finds its data in the L2 cache, beside what this very card reaches
// when it only copies (GB/s) or only multiplies (TFLOP/s, cuBLASLt). Nominal peaks are not used: no card holds them.

inline double median(std::vector<float> times) {
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

// One run after another: the L2 cache is overwritten, then launch() is timed on the default stream.
struct Stopwatch {
    size_t flush_bytes;
    Device<unsigned char> flush;
    cudaEvent_t begin, end;
    static size_t twice_l2() {
        int bytes = 0;
        cudaCheck(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, 0));
        return 2 * (size_t)bytes + 1;
    }
    Stopwatch() : flush_bytes(twice_l2()), flush(flush_bytes) {
        cudaCheck(cudaEventCreate(&begin));
        cudaCheck(cudaEventCreate(&end));
    }
    ~Stopwatch() {
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
    }
    template <class Launch> float ms(Launch launch) {
        cudaCheck(cudaMemsetAsync(flush, 0, flush_bytes, 0)); // the card is busy while the launch is queued
        cudaCheck(cudaEventRecord(begin, 0));
        launch();
        cudaCheck(cudaEventRecord(end, 0));
        cudaCheck(cudaEventSynchronize(end));
        float result;
        cudaCheck(cudaEventElapsedTime(&result, begin, end));
        return result;
    }
};

// Milliseconds of launch() on the default stream.
template <class Launch> double median_ms(Launch launch) {
    Stopwatch watch;
    double warm = 0, total = 0;
    for (int run = 0; run < 10 && warm < 200; run++) { warm += watch.ms(launch); }
    std::vector<float> times; // half a second of runs, at most 200, and at least 10, or 5 where they are slow
    while (times.size() < 5 || (times.size() < 10 && total < 1000) || (times.size() < 200 && total < 500)) {
        times.push_back(watch.ms(launch));
        total += times.back();
    }
    return median(times);
}

// GB/s of a large copy from device to device, read and written bytes counted
inline double peak_bandwidth() {
    static double peak = 0;
    if (peak > 0) { return peak; }
    size_t bytes = (size_t)512 << 20;
    Device<unsigned char> from(bytes), to(bytes);
    double ms = median_ms([&] { cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, 0)); });
    return peak = 2.0 * (double)bytes / ms / 1e6;
}

#ifndef EMU
// TFLOP/s of cuBLASLt's bf16 product of two 8192 x 8192 matrices, fp32 accumulation
inline double peak_gemm() {
    static double peak = 0;
    if (peak > 0) { return peak; }
    return peak = gemm_peak() / 1e12;
}
#else
inline double peak_gemm() { return 0; } // dev_benchmarks() is false here
#endif

// One line a measurement; dev/bench/bench_cuda.py reads it. bytes, flops: what the op must move and compute, 0: not of
// interest.
template <class Launch> void bench_line(const char* kind, const char* name, double bytes, double flops, Launch launch) {
    double ms = median_ms(launch);
    printf("%s %s: %.4f ms", kind, name, ms);
    if (bytes > 0) {
        double rate = bytes / ms / 1e6;
        printf(", %.0f GB/s = %.1f %% of copy %.0f", rate, 100 * rate / peak_bandwidth(), peak_bandwidth());
    }
    if (flops > 0) {
        double rate = flops / ms / 1e9;
        printf(", %.1f TFLOP/s = %.1f %% of GEMM %.0f", rate, 100 * rate / peak_gemm(), peak_gemm());
    }
    printf("\n");
    fflush(stdout);
}
template <class Launch> void bench(const char* name, double bytes, double flops, Launch launch) {
    bench_line("bench", name, bytes, flops, launch);
}
// the same for an operation with several kernels: "route_rows kernel 2"
template <class Launch> void bench(const char* op, int kernel, double bytes, double flops, Launch launch) {
    char name[96];
    snprintf(name, sizeof(name), "%s kernel %d", op, kernel);
    bench_line("bench", name, bytes, flops, launch);
}
// the same work by NVIDIA's library, to be seen beside it
template <class Launch> void bench_library(const char* name, double bytes, double flops, Launch launch) {
    bench_line("library", name, bytes, flops, launch);
}
#endif
