// grad_norm.cu: the L2 norm of all gradients, norm (1) = sqrt(sum of grads[i]^2), grads (count), on the device: AdamW
// reads it there, and no launch waits for the host. Squares and sums are double, as in the reference,
// cpu::grad_norm_forward of train_moe_cpu.c: a NaN or an infinity among the gradients becomes one in the norm, and
// nothing else does.
//
//     nvcc -O3 -std=c++17 -I. -o build/dev/grad_norm dev/cuda/grad_norm.cu -lcjson -lcublasLt -lcublas
//
// kernel 1: one block for everything: one order of additions for nothing, but one SM of a hundred works.
// kernel 2: many blocks with a partial sum each, and a block that adds those; the order still depends on the count of
//           numbers alone. 16 bytes a thread and access.
//
// winner: 2
#include "common.h"
#ifndef EMU
#include <cublas_v2.h>
#endif

// ----------------------------------------------------------------------------
// kernel 1

// A block owns all, a thread every 1024th number; then the halves of the block are added to each other. Bound by what
// one SM can have in flight.
__global__ void __launch_bounds__(1024) grad_norm_kernel1(float* norm, const float* grads, size_t count) {
    __shared__ double partial[1024];
    double sum = 0;
    for (size_t i = threadIdx.x; i < count; i += 1024) { sum += (double)grads[i] * grads[i]; }
    partial[threadIdx.x] = sum;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads(); // the sums of the round before are there
        if (threadIdx.x < half) { partial[threadIdx.x] += partial[threadIdx.x + half]; }
    }
    if (threadIdx.x == 0) { *norm = (float)sqrt(partial[0]); }
}

// ----------------------------------------------------------------------------
// kernel 2

// A block owns every gridDim-th piece of 512 * 4 numbers, a thread 4 neighbours of each: partials (gridDim) = the
// block's sum of squares. Bound by memory: each gradient is read once. (Where doubles are slow, at 1/64 of the floats'
// rate, their arithmetic takes about as long as the reading, beside it.)
__global__ void __launch_bounds__(512) grad_norm_kernel2(double* partials, const float* grads, size_t count) {
    __shared__ double warp_sums[32];
    double sum = 0;
    size_t step = (size_t)gridDim.x * 512 * 4;
    for (size_t i = ((size_t)blockIdx.x * 512 + threadIdx.x) * 4; i < count; i += step) {
        uint4 bits = load16(grads + i);
        double a = __uint_as_float(bits.x), b = __uint_as_float(bits.y);
        double c = __uint_as_float(bits.z), d = __uint_as_float(bits.w);
        sum += (a * a + b * b) + (c * c + d * d);
    }
    sum = block_sum(sum, warp_sums);
    if (threadIdx.x == 0) { partials[blockIdx.x] = sum; }
}

// one block adds the partial sums: bound by latency
__global__ void __launch_bounds__(512) grad_norm_sum_kernel2(float* norm, const double* partials, size_t num_partials) {
    __shared__ double warp_sums[32];
    double sum = 0;
    for (size_t i = threadIdx.x; i < num_partials; i += 512) { sum += partials[i]; }
    sum = block_sum(sum, warp_sums);
    if (threadIdx.x == 0) { *norm = (float)sqrt(sum); }
}

size_t grad_norm_doubles(size_t count) { // length of partials, = blocks: enough for any GPU, the same on each
    size_t pieces = ceil_div(count, 512 * 4);
    return pieces < 1024 ? pieces : 1024;
}

void grad_norm(float* norm, double* partials, const float* grads, size_t count, cudaStream_t stream) {
    // norm (1) = sqrt(sum of squares of grads (count)); partials (grad_norm_doubles(count)) is scratch
    if (count % 4 != 0 || (uintptr_t)grads % 16 != 0) {
        fatal("grad_norm: grads must be 16-byte aligned and a multiple of 4 numbers, are %zu at %p", count, grads);
    }
    size_t blocks = grad_norm_doubles(count);
    if (blocks > 0) {
        grad_norm_kernel2<<<(unsigned)blocks, 512, 0, stream>>>(partials, grads, count);
        launchCheck("grad_norm_kernel2");
    }
    grad_norm_sum_kernel2<<<1, 512, 0, stream>>>(norm, partials, blocks);
    launchCheck("grad_norm_sum_kernel2");
}

// ----------------------------------------------------------------------------
// checks and benchmark

void run(int kernel, float* norm, double* partials, const float* grads, size_t count) {
    if (kernel == 1) {
        grad_norm_kernel1<<<1, 1024>>>(norm, grads, count);
        launchCheck("grad_norm_kernel1");
    } else {
        grad_norm(norm, partials, grads, count, 0);
    }
}

float norm_of(int kernel, const std::vector<float>& grads) {
    Device<float> d_grads(grads), norm(1);
    Device<double> partials(grad_norm_doubles(grads.size()));
    run(kernel, norm, partials, d_grads, grads.size());
    return norm.get()[0];
}

void grad_norm_matches_cpu(int kernel, size_t count, float scale) {
    std::vector<float> grads = random_floats(count, scale, count);
    std::vector<double> partials(count / cpu::SUM_BLOCK + 1);
    double want = cpu::grad_norm_forward(grads.data(), partials.data(), count);
    check_f32("norm", std::vector<float>{norm_of(kernel, grads)}, std::vector<float>{(float)want}, 2e-7);
}

void nan_and_inf_reach_the_norm(int kernel) {
    for (float bad : {NAN, INFINITY, -INFINITY}) {
        for (size_t at : {0, 1025, 4999}) {
            std::vector<float> grads = random_floats(5000, 1, 1);
            grads[at] = bad;
            check_result(!isfinite(norm_of(kernel, grads)), "a gradient that is not finite", "the norm is finite");
        }
    }
}

const size_t SMOL_500M = 580753408; // gradients of smol-500m

void check_all(int kernel) {
    for (size_t count : {0, 4, 8, 2048, 2052, 10000}) { grad_norm_matches_cpu(kernel, count, 1); }
    grad_norm_matches_cpu(kernel, 3 * 512 * 4 * 1024 / 2, 1); // more pieces than blocks
    grad_norm_matches_cpu(kernel, 1000, 1e30f);               // squares beyond fp32
    grad_norm_matches_cpu(kernel, 1000, 1e-30f);
    nan_and_inf_reach_the_norm(kernel);
    // the emulator walks kernel 1's one block thread by thread: an eighth of the gradients
    const size_t count = kernel == 1 && !dev_benchmarks() ? SMOL_500M / 8 : SMOL_500M;
    if (dev_is_large(kernel)) { grad_norm_matches_cpu(kernel, count, 0.01f); }
}

void bench_all(int kernel) {
    const size_t count = SMOL_500M;
    Device<float> grads(count), norm(1);
    Device<double> partials(grad_norm_doubles(count));
    fill_random(grads, 1, 2);
    char name[64];
    snprintf(name, sizeof(name), "grad_norm %d count=%zu", kernel, count);
    bench(name, (double)count * sizeof(float), 0, [&] { run(kernel, norm, partials, grads, count); });
#ifndef EMU
    if (kernel != 2) { return; }
    cublasHandle_t handle;
    cublasCheck(cublasCreate(&handle));
    cublasCheck(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_DEVICE));
    bench_library("cublasSnrm2, sums in fp32", (double)count * sizeof(float), 0,
                  [&] { cublasCheck(cublasSnrm2(handle, (int)count, grads, 1, norm)); });
    cublasCheck(cublasDestroy(handle));
#endif
}

int main(int argc, char** argv) {
    const int num_kernels = 2;
    dev_open(argc, argv, num_kernels);
    for (int kernel = 1; kernel <= num_kernels; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    return dev_close();
}
