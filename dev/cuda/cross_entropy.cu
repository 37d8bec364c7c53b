// cross_entropy.cu: the loss of a chunk of rows and its gradient, written over the logits:
//     losses (rows) = log(sum of exp(logits[n,:])) - logits[n,targets[n]]
//     logits (rows,V) = d_loss * (softmax(logits[n,:]) - one-hot(targets[n])) where the gradient is wanted
// A row with target < 0 counts nothing. The last V - vocab_size columns are padding: not in the sum, gradient 0. And
// the sum of many losses. Reference: cpu::cross_entropy_row of train_moe_cpu.c.
// A vocabulary of 151936 makes these the largest arrays of the program (300 KB a row), so what counts is how often they
// are read and written.
//
//     nvcc -O3 -std=c++17 -I. -o build/dev/cross_entropy dev/cuda/cross_entropy.cu -lcjson -lcublasLt
//
// kernel 1: a thread a row, the CPU's loops. Neighbouring lanes read 300 KB apart.
// kernel 2: a block a row: neighbouring threads read neighbouring logits, 2 bytes each; three passes: maximum, sum,
//           gradient.
// kernel 3: two passes: the sum is kept relative to the largest logit so far (online softmax, Milakov and Gimelshein
//           2018), 16 bytes a thread and access, and the second pass goes backwards: what was read last is still in L2.
//
// winner: 3
#include "common.h"

// ----------------------------------------------------------------------------
// kernel 1

// A thread owns a row, a block 32. Bound by sectors: each lane walks through a row of its own, 2 bytes at a time, three
// times.
__global__ void cross_entropy_kernel1(float* losses, bf16* logits, const int* targets, size_t rows, size_t V,
                                      int vocab_size, float d_loss, bool want_grad) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows) { return; }
    int target = targets[n];
    bf16* row = logits + n * V;
    float maximum = -INFINITY;
    for (int v = 0; v < vocab_size; v++) { maximum = fmaxf(maximum, __bfloat162float(row[v])); }
    double sum = 0; // 151936 floats added one by one would lose the loss's fifth digit
    for (int v = 0; v < vocab_size; v++) { sum += expf(__bfloat162float(row[v]) - maximum); }
    losses[n] = target < 0 ? 0.0f : (float)log(sum) + maximum - __bfloat162float(row[target]);
    if (!want_grad) { return; }
    for (size_t v = 0; v < V; v++) {
        float d = d_loss * expf(__bfloat162float(row[v]) - maximum) / (float)sum - ((int)v == target ? d_loss : 0.0f);
        row[v] = __float2bfloat16(target < 0 || v >= (size_t)vocab_size ? 0.0f : d);
    }
}

// ----------------------------------------------------------------------------
// kernels 2 and 3

// maximum over a block of whole warps, at most 1024 threads; every thread gets it. warp_maxima: 32 floats of shared
// memory
__device__ inline float block_max(float x, float* warp_maxima) {
    x = warp_max(x);
    __syncthreads(); // all have read what an earlier call left in warp_maxima
    if (threadIdx.x % 32 == 0) { warp_maxima[threadIdx.x / 32] = x; }
    __syncthreads(); // the maxima of all warps are there
    return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? warp_maxima[threadIdx.x % 32] : -INFINITY);
}

// A block owns a row, a thread every 1024th logit. Bound by memory: three reads and a write, 64 bytes a request.
__global__ void cross_entropy_kernel2(float* losses, bf16* logits, const int* targets, size_t V, int vocab_size,
                                      float d_loss, bool want_grad) {
    __shared__ float scratch[32];
    size_t n = blockIdx.x;
    int target = targets[n];
    bf16* row = logits + n * V;
    float maximum = -INFINITY, sum = 0;
    for (int v = threadIdx.x; v < vocab_size; v += blockDim.x) {
        maximum = fmaxf(maximum, __bfloat162float(row[v]));
    }
    maximum = block_max(maximum, scratch);
    for (int v = threadIdx.x; v < vocab_size; v += blockDim.x) { sum += expf(__bfloat162float(row[v]) - maximum); }
    if (threadIdx.x == 0) { losses[n] = target < 0 ? 0.0f : maximum - __bfloat162float(row[target]); }
    sum = block_sum(sum, scratch); // its barriers also part the reading of row[target] from the writing below
    if (threadIdx.x == 0 && target >= 0) { losses[n] += logf(sum); }
    if (!want_grad) { return; }
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) {
        float d = d_loss / sum * expf(__bfloat162float(row[v]) - maximum) - ((int)v == target ? d_loss : 0.0f);
        row[v] = __float2bfloat16(target < 0 || v >= (size_t)vocab_size ? 0.0f : d);
    }
}

// the 8 logits from column v on; padding becomes -inf, which no sum or maximum notices
__device__ inline void load_logits(float (&x)[8], const bf16* row, size_t v, size_t vocab_size) {
    load8(x, row + v);
    if (v + 8 <= vocab_size) { return; }
    #pragma unroll
    for (int i = 0; i < 8; i++) { x[i] = v + i < vocab_size ? x[i] : -INFINITY; }
}

// A block owns a row, a thread every 1024th group of 8 logits: 19 of them at V = 151936. Bound by memory: the row is
// read once from memory, once (mostly) from L2, and written once. Blocks as large as they get, so that the rows being
// worked on are few enough for L2 to hold (one or two an SM, 300 KB each). The 151936 terms of the sum are added as
// sums of 152 in a thread, then as a tree over the block, which keeps six digits in fp32.
// Powers of two are what the hardware has: e^(x - max) = 2^(x log2e - max_log2e). max_log2e is rounded, but it is the
// same number wherever it is subtracted, in the loss too, so that its rounding cancels.
__global__ void __launch_bounds__(1024) cross_entropy_kernel3(float* losses, bf16* logits, const int* targets, size_t V,
                                                              int vocab_size, float d_loss, bool want_grad) {
    __shared__ float scratch[32];
    const float log2e = 1.44269504f;
    size_t n = blockIdx.x, step = 8 * (size_t)blockDim.x, first = 8 * (size_t)threadIdx.x;
    int target = targets[n];
    bf16* row = logits + n * V;
    if (target < 0) { // the whole block
        if (threadIdx.x == 0) { losses[n] = 0; }
        if (!want_grad) { return; }
        for (size_t v = first; v < V; v += step) { store16(row + v, make_uint4(0, 0, 0, 0)); }
        return;
    }
    float target_logit = __bfloat162float(row[target]); // now, because it is overwritten below

    float x[8], max_log2e = -1e30f, sum = 0; // of the x so far; a NaN passes into sum
    for (size_t v = first; v < V; v += step) {
        load_logits(x, row, v, (size_t)vocab_size);
        float largest = x[0];
        #pragma unroll
        for (int i = 1; i < 8; i++) { largest = fmaxf(largest, x[i]); }
        float before = max_log2e;
        max_log2e = fmaxf(before, largest * log2e);
        sum *= exp2_approx(before - max_log2e);
        #pragma unroll
        for (int i = 0; i < 8; i++) { sum += exp2_approx(fmaf(x[i], log2e, -max_log2e)); }
    }
    float row_max = block_max(max_log2e, scratch);
    float row_sum = block_sum(sum * exp2_approx(max_log2e - row_max), scratch); // its barriers: row[target] was read
    if (threadIdx.x == 0) { losses[n] = logf(row_sum) - fmaf(target_logit, log2e, -row_max) / log2e; }
    if (!want_grad) { return; }

    float scale = d_loss / row_sum;
    size_t groups = first < V ? ceil_div(V - first, step) : 0;
    for (size_t group = groups; group-- > 0;) {
        size_t v = first + group * step;
        load_logits(x, row, v, (size_t)vocab_size);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            float p = exp2_approx(fmaf(x[i], log2e, -row_max));
            x[i] = scale * p - (v + i == (size_t)target ? d_loss : 0.0f);
        }
        store8(row + v, x);
    }
}

void cross_entropy(float* losses, bf16* logits, const int* targets, size_t rows, size_t V, int vocab_size, float d_loss,
                   bool want_grad, cudaStream_t stream) {
    // losses (rows) = -log softmax(logits[n,:])[targets[n]], 0 if targets[n] < 0; want_grad: logits (rows,V) =
    // d_loss * (softmax - one-hot); else they stay. V is padded: the columns from vocab_size on count nothing.
    if (rows == 0) { return; }
    if (V % 8 != 0 || vocab_size < 1 || (size_t)vocab_size > V || (uintptr_t)logits % 16 != 0) {
        fatal("cross_entropy: rows of %zu at %p must be whole groups of 16 bytes and hold vocab_size %d >= 1", V,
              (void*)logits, vocab_size);
    }
    size_t threads = V / 8 < 1024 ? 32 * ceil_div(V / 8, 32) : 1024; // 8 logits a thread at least
    cross_entropy_kernel3<<<(unsigned)rows, (unsigned)threads, 0, stream>>>(losses, logits, targets, V, vocab_size,
                                                                            d_loss, want_grad);
    launchCheck("cross_entropy_kernel3");
}

// ----------------------------------------------------------------------------
// the sum of the losses

// One block, one order: a thread adds every 1024th loss. Bound by latency, once a microbatch.
__global__ void __launch_bounds__(1024) losses_add_kernel1(double* sum, const float* losses, size_t N) {
    __shared__ double warp_sums[32];
    double x = 0;
    for (size_t n = threadIdx.x; n < N; n += 1024) { x += losses[n]; }
    x = block_sum(x, warp_sums);
    if (threadIdx.x == 0) { *sum += x; }
}

void losses_add(double* sum, const float* losses, size_t N, cudaStream_t stream) {
    // sum (1) += sum of losses (N)
    if (N == 0) { return; }
    losses_add_kernel1<<<1, 1024, 0, stream>>>(sum, losses, N);
    launchCheck("losses_add_kernel1");
}

// ----------------------------------------------------------------------------
// checks and benchmark

void run(int kernel, float* losses, bf16* logits, const int* targets, size_t rows, size_t V, int vocab_size,
         float d_loss, bool want_grad) {
    if (kernel == 1) {
        cross_entropy_kernel1<<<(unsigned)ceil_div(rows, 32), 32>>>(losses, logits, targets, rows, V, vocab_size,
                                                                    d_loss, want_grad);
        launchCheck("cross_entropy_kernel1");
    } else if (kernel == 2) {
        cross_entropy_kernel2<<<(unsigned)rows, 1024>>>(losses, logits, targets, V, vocab_size, d_loss, want_grad);
        launchCheck("cross_entropy_kernel2");
    } else {
        cross_entropy(losses, logits, targets, rows, V, vocab_size, d_loss, want_grad, 0);
    }
}

// random targets, every fifth of them ignored; the first is the first token, the last the last
std::vector<int> random_targets(size_t rows, int vocab_size, uint64_t seed) {
    std::vector<int> targets(rows);
    for (size_t n = 0; n < rows; n++) { targets[n] = n % 5 == 4 ? -1 : (int)(hash64(seed + n) % (uint64_t)vocab_size); }
    targets[rows - 1] = vocab_size - 1;
    targets[0] = 0;
    return targets;
}

void cross_entropy_matches_cpu(int kernel, size_t rows, int vocab_size, size_t V, float scale, float offset) {
    std::vector<float> logits = random_floats(rows * V, scale, 1), losses(rows), gradient(rows * V, 0.0f);
    std::vector<int> targets = random_targets(rows, vocab_size, 2);
    const float d_loss = 1.0f / 64;
    for (float& x : logits) { x = bf16_to_f32(f32_to_bf16(x + offset)); } // the padding, too: it must not matter
    #pragma omp parallel for
    for (size_t n = 0; n < rows; n++) {
        std::vector<float> row(logits.begin() + n * V, logits.begin() + n * V + vocab_size);
        cpu::cross_entropy_row(&losses[n], row.data(), targets[n], (size_t)vocab_size, d_loss, true);
        std::copy(row.begin(), row.end(), gradient.begin() + n * V);
    }
    Device<bf16> d_logits(to_bf16(logits));
    Device<int> d_targets(targets);
    Device<float> d_losses(rows);
    run(kernel, d_losses, d_logits, d_targets, rows, V, vocab_size, d_loss, false);
    check_f32("losses", d_losses.get(), losses, 2e-6);
    check_equal("logits without want_grad", d_logits.get(), to_bf16(logits));
    run(kernel, d_losses, d_logits, d_targets, rows, V, vocab_size, d_loss, true);
    check_f32("losses with want_grad", d_losses.get(), losses, 2e-6);
    std::vector<float> got = to_float(d_logits.get());
    check_bf16("gradient of the logits", got, gradient, 1, 1e-6); // an exp and a rounding; no sum of products here
    bool padding_is_zero = true;
    for (size_t i = 0; i < got.size(); i++) { padding_is_zero &= i % V < (size_t)vocab_size || got[i] == 0; }
    check_result(padding_is_zero, "gradient in the padding", "is not 0");
}

// A chunk of the trainer at smol-500m, 4096 rows of 151936 logits: as above, but compared 64 rows at a time, since the
// reference in fp32 would fill gigabytes.
void chunk_matches_cpu(int kernel, size_t rows, size_t V, float scale) {
    std::vector<int> targets = random_targets(rows, (int)V, 7);
    std::vector<bf16> logits(rows * V);
    #pragma omp parallel for
    for (size_t n = 0; n < rows; n++) {
        std::vector<bf16> row = to_bf16(random_floats(V, scale, 100 + n));
        std::copy(row.begin(), row.end(), logits.begin() + n * V);
    }
    Device<bf16> d_logits(logits);
    Device<int> d_targets(targets);
    Device<float> d_losses(rows);
    const float d_loss = 1.0f / 32768;
    run(kernel, d_losses, d_logits, d_targets, rows, V, (int)V, d_loss, true);
    std::vector<bf16> got = d_logits.get();
    std::vector<float> losses(rows);
    const size_t batch = 64;
    for (size_t first = 0; first < rows; first += batch) {
        std::vector<float> gradient(batch * V);
        #pragma omp parallel for
        for (size_t i = 0; i < batch; i++) {
            size_t n = first + i;
            for (size_t v = 0; v < V; v++) { gradient[i * V + v] = __bfloat162float(logits[n * V + v]); }
            cpu::cross_entropy_row(&losses[n], &gradient[i * V], targets[n], V, d_loss, true);
        }
        std::vector<bf16> part(got.begin() + first * V, got.begin() + (first + batch) * V);
        check_bf16("gradient of a chunk of smol-500m", part, gradient, 1, 1e-6);
    }
    check_f32("losses of a chunk of smol-500m", d_losses.get(), losses, 2e-6);
}

void nan_and_inf_reach_the_loss(int kernel) {
    const size_t rows = 2, V = 40;
    std::vector<float> logits = random_floats(rows * V, 1, 3);
    logits[17] = NAN;
    logits[V + 39] = INFINITY;
    Device<bf16> d_logits(to_bf16(logits));
    Device<int> d_targets(std::vector<int>{3, 4});
    Device<float> d_losses(rows);
    run(kernel, d_losses, d_logits, d_targets, rows, V, (int)V, 1, true);
    std::vector<float> losses = d_losses.get();
    check_result(!isfinite(losses[0]) && !isfinite(losses[1]), "a NaN and an infinite logit", "the loss is finite");
}

void losses_add_adds(size_t N) {
    std::vector<float> losses = random_floats(N, 10, 4);
    double want = 1.5;
    for (float x : losses) { want += x; }
    Device<float> d_losses(losses);
    Device<double> sum(std::vector<double>{1.5});
    losses_add(sum, d_losses, N, 0);
    double got = sum.get()[0];
    check_result(fabs(got - want) <= 1e-12 * (double)(N + 1), "losses_add", "another sum");
}

void check_all(int kernel) {
    cross_entropy_matches_cpu(kernel, 1, 2, 8, 1, 0);
    cross_entropy_matches_cpu(kernel, 3, 5, 8, 1, 0);
    cross_entropy_matches_cpu(kernel, 7, 250, 256, 10, 0);
    cross_entropy_matches_cpu(kernel, 2, 8200, 8208, 4, 90); // more than a group a thread, exp(90) overflows
    cross_entropy_matches_cpu(kernel, 1, 9000, 9000, 4, -300);
    nan_and_inf_reach_the_loss(kernel);
    for (size_t N : {0, 1, 1025, 5000}) { losses_add_adds(N); }
    cross_entropy_matches_cpu(kernel, 2, 151936, 151936, 5, 0); // the vocabulary of smol-500m
    if (dev_is_large(kernel)) { chunk_matches_cpu(kernel, dev_benchmarks() ? 4096 : 512, 151936, 5); }
}

void bench_all(int kernel) {
    const size_t rows = kernel == 1 ? 512 : 4096, V = 151936; // kernel 1 is slow: an eighth of a chunk
    Device<bf16> logits(rows * V);
    fill_random(logits, 5, 5);
    Device<int> targets(random_targets(rows, (int)V, 6));
    Device<float> losses(rows);
    double bytes = 2.0 * (double)(rows * V) * sizeof(bf16); // read once, written once
    char name[64];
    snprintf(name, sizeof(name), "cross_entropy %d rows=%zu%s V=%zu", kernel, rows, kernel == 1 ? " of 4096" : "", V);
    bench(name, bytes, 0, [&] { run(kernel, losses, logits, targets, rows, V, (int)V, 1e-4f, true); });
    if (kernel != 3) { return; }
    bench_library("cross_entropy: a copy in place of it", bytes, 0, [&] {
        cudaCheck(cudaMemcpyAsync(logits.data, logits.data + rows * V / 2, rows * V, cudaMemcpyDeviceToDevice, 0));
        cudaCheck(cudaMemcpyAsync(logits.data + rows * V / 2, logits.data, rows * V, cudaMemcpyDeviceToDevice, 0));
    });
}

int main(int argc, char** argv) {
    const int num_kernels = 3;
    dev_open(argc, argv, num_kernels);
    for (int kernel = 1; kernel <= num_kernels; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    return dev_close();
}
