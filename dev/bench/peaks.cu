// peaks.cu: what this GPU reaches when it does one thing only, for seconds, so that clocks and power settle: copying
// (GB/s, bytes read and written) and cuBLASLt's bf16 products (TFLOP/s) of 8192 x 8192 and of smol-500m's lm_head.
// dev/bench/gpu_check.sh runs it and logs clocks and power meanwhile; percentages of a peak are of these.
//
//   nvcc -std=c++17 -O3 -arch=native -I. -o build/peaks dev/bench/peaks.cu -lcublasLt && build/peaks [SECONDS]
#include <algorithm>
#include <vector>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include "llmc/check.h"
#include "llmc/cuda_check.h"
#include "llmc/cuda_device.h"
#include "llmc/gemm.h"
#include "llmc/rand.h"

typedef __nv_bfloat16 bf16;

__global__ void touch(char* p) { *p = 0; } // shows whether this program was built for this GPU

static double seconds = 3;

// Milliseconds of one launch(), as the median of batches of about 50 ms over the last half of `seconds`.
template <class Launch> double sustained_ms(Launch launch) {
    cudaEvent_t begin, end;
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    std::vector<double> times;
    int runs = 1;
    double total = 0;
    while (total < 1e3 * seconds) {
        cudaCheck(cudaEventRecord(begin, 0));
        for (int i = 0; i < runs; i++) { launch(); }
        cudaCheck(cudaEventRecord(end, 0));
        cudaCheck(cudaEventSynchronize(end));
        float ms;
        cudaCheck(cudaEventElapsedTime(&ms, begin, end));
        total += ms + 1e-3;
        times.push_back(ms / runs);
        runs = (int)std::min(1000.0, std::max(1.0, 50 / std::max(1e-3, (double)ms / runs)));
    }
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    times.erase(times.begin(), times.begin() + (long)times.size() / 2);
    std::nth_element(times.begin(), times.begin() + (long)times.size() / 2, times.end());
    return times[times.size() / 2];
}

static void* device_bytes(size_t bytes) {
    void* p;
    cudaCheck(cudaMalloc(&p, bytes));
    return p;
}

// random numbers: zeros would draw less power, and run faster than any real product
static bf16* random_matrix(size_t n) {
    std::vector<bf16> host(std::min(n, (size_t)1 << 22));
    uint64_t state = hash64(n);
    for (bf16& x : host) { x = __float2bfloat16(2 * (float)rng_uniform(&state) - 1); }
    bf16* p = (bf16*)device_bytes(n * sizeof(bf16));
    for (size_t at = 0; at < n; at += host.size()) {
        size_t count = std::min(host.size(), n - at);
        cudaCheck(cudaMemcpy(p + at, host.data(), count * sizeof(bf16), cudaMemcpyHostToDevice));
    }
    return p;
}

static void copy(size_t bytes) {
    void *from = device_bytes(bytes), *to = device_bytes(bytes);
    cudaCheck(cudaMemset(from, 1, bytes));
    double ms = sustained_ms([&] { cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, 0)); });
    printf("peak copy: %.0f GB/s\n", 2.0 * (double)bytes / ms / 1e6);
    cudaCheck(cudaFree(from));
    cudaCheck(cudaFree(to));
}

// c (M,N) = op(a) op(b), fp32 c accumulated into where it is a gradient of weights
static void product(const char* name, bool trans_a, bool trans_b, size_t M, size_t N, size_t K, bool fp32) {
    bf16 *a = random_matrix(M * K), *b = random_matrix(K * N);
    void* c = device_bytes(M * N * (fp32 ? sizeof(float) : sizeof(bf16)));
    cudaCheck(cudaMemset(c, 0, M * N * (fp32 ? sizeof(float) : sizeof(bf16))));
    double ms = sustained_ms([&] {
        gemm(trans_a, trans_b, M, N, K, a, trans_a ? M : K, b, trans_b ? K : N, fp32 ? 1.0f : 0.0f, c,
             fp32 ? CUDA_R_32F : CUDA_R_16BF, N, 0);
    });
    printf("peak %s: %.1f TFLOP/s\n", name, 2.0 * (double)M * (double)N * (double)K / ms / 1e9);
    fflush(stdout);
    cudaCheck(cudaFree(a));
    cudaCheck(cudaFree(b));
    cudaCheck(cudaFree(c));
}

int main(int argc, char** argv) {
    program_name = "peaks";
    if (argc > 1) { seconds = atof(argv[1]); }
    int cards = cuda_count_devices();
    cudaDeviceProp p = cuda_use_device(0, touch);
    printf("%s, sm_%d%d, %d multiprocessors, %.1f GiB\n", p.name, p.major, p.minor, p.multiProcessorCount,
           (double)p.totalGlobalMem / (double)(1 << 30));
    size_t free_bytes, total;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    printf("cards: %d, %.2f GiB free\n", cards, (double)free_bytes / (double)(1 << 30));
    gemm_open();
#ifdef EMU
    const size_t n = 64, rows = 32, C = 64, V = 512; // no times worth having: that it runs is all there is to see
#else
    const size_t n = 8192, rows = 4096, C = 896, V = 151936;
#endif
    copy(n * n * 8);
    product("gemm", false, true, n, n, n, false);
    product("lm_head", false, true, rows, V, C, false);
    product("lm_head dX", false, false, rows, C, V, false);
    product("lm_head dW", true, false, V, C, rows, true);
    gemm_close();
    return 0;
}
