// embedding: rows of a table, and the sums of their gradients.
//
//   nvcc -std=c++17 -O3 -arch=native -I. -o build/dev/embedding dev/cuda/embedding.cu -lcjson -lcublasLt
//   dev/emu/emucc -I. -o build/dev/embedding dev/cuda/embedding.cu -lcjson          (no GPU: the emulator)
//
// forward:  out (N,C)[n,:] = embed_tokens (V,C)[tokens (N)[n],:]
// backward: d_embed_tokens (V,C)[tokens[n],:] += d_out (N,C)[n,:], in fp32, but for tokens that are pad_token
// Reference: cpu::embedding_forward, embedding_backward. Both only move bytes.
//
//   1  a thread an element
//   2  16 bytes a thread forward, a warp a row backward: whole sectors, and a token's number is read once a row
//   3  forward a warp a row, so that nobody divides; backward a warp for every 128 columns, which looks ahead: at the
//      tokens of 32 positions at once, for 8 rows at once, since a comma has 1,600 rows and each has to wait for memory
// winner: 3
//
// Backward: several tokens of a batch may be the same, and then their gradients belong to one row. Atomic additions
// would sum them in another order on every run. Here the loader sorts the positions by token (token_order), so equal
// tokens are neighbours, a *run*, and each run has one owner, which adds in a fixed order.
#include "common.h"

enum { NUM_KERNELS = 3 };

// ----------------------------------------------------------------------------
// kernel 1

// A thread owns an element of out, a block 256. Bound by instructions: a division of 64 bits for each 2 bytes moved.
__global__ void embedding_forward_kernel1(bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, int C) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= N * C) { return; }
    out[i] = embed_tokens[tokens[i / C] * (size_t)C + i % C];
}

// A thread owns a column of a sorted position. If a run begins there, it walks the run and sums the column. Bound by
// latency: the longest run is walked one row after the other.
__global__ void embedding_backward_kernel1(float* d_embed_tokens, const bf16* d_out, const int* tokens,
                                           const int* token_order, size_t N, int C, int pad_token) {
    size_t thread = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    size_t i = thread / C, c = thread % C;
    if (i >= N) { return; }
    int token = tokens[token_order[i]];
    if (token == pad_token || (i > 0 && tokens[token_order[i - 1]] == token)) { return; }
    float sum = d_embed_tokens[(size_t)token * C + c];
    for (; i < N && tokens[token_order[i]] == token; i++) {
        sum += __bfloat162float(d_out[(size_t)token_order[i] * C + c]);
    }
    d_embed_tokens[(size_t)token * C + c] = sum;
}

void embedding_forward1(bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, size_t C,
                        cudaStream_t stream) {
    embedding_forward_kernel1<<<ceil_div(N * C, 256), 256, 0, stream>>>(out, tokens, embed_tokens, N, (int)C);
    launchCheck("embedding_forward_kernel1");
}
void embedding_backward1(float* d_embed_tokens, const bf16* d_out, const int* tokens, const int* token_order, size_t N,
                         size_t C, int pad_token, cudaStream_t stream) {
    embedding_backward_kernel1<<<ceil_div(N * C, 256), 256, 0, stream>>>(d_embed_tokens, d_out, tokens, token_order, N,
                                                                        (int)C, pad_token);
    launchCheck("embedding_backward_kernel1");
}

// ----------------------------------------------------------------------------
// kernel 2

// A thread owns 16 bytes of out, a block 256 times that. Bound by memory, if it were not for the division.
__global__ void embedding_forward_kernel2(bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, int C) {
    size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * 8;
    if (i >= N * C) { return; }
    store16(out + i, load16(embed_tokens + tokens[i / C] * (size_t)C + i % C));
}

// A warp owns a sorted position. If a run begins there, it walks the run once for every 128 columns, 4 a lane: 16 bytes
// of the float sums and 8 of each bf16 row, so that the lanes of a warp lie side by side in both. Bound by
// latency, as before: of the longest run.
__global__ void embedding_backward_kernel2(float* d_embed_tokens, const bf16* d_out, const int* tokens,
                                           const int* token_order, size_t N, int C, int pad_token) {
    size_t i = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (i >= N) { return; }
    int token = tokens[token_order[i]];
    if (token == pad_token || (i > 0 && tokens[token_order[i - 1]] == token)) { return; }
    float* row = d_embed_tokens + (size_t)token * C;
    for (int c = threadIdx.x % 32 * 4; c < C; c += 32 * 4) {
        float sum[4], x[4];
        load4(sum, row + c);
        for (size_t j = i; j < N && tokens[token_order[j]] == token; j++) {
            load4(x, d_out + (size_t)token_order[j] * C + c);
            for (int q = 0; q < 4; q++) { sum[q] += x[q]; }
        }
        store4(row + c, sum);
    }
}

void embedding_forward2(bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, size_t C,
                        cudaStream_t stream) {
    embedding_forward_kernel2<<<ceil_div(N * C / 8, 256), 256, 0, stream>>>(out, tokens, embed_tokens, N, (int)C);
    launchCheck("embedding_forward_kernel2");
}
void embedding_backward2(float* d_embed_tokens, const bf16* d_out, const int* tokens, const int* token_order, size_t N,
                         size_t C, int pad_token, cudaStream_t stream) {
    embedding_backward_kernel2<<<ceil_div(N, 8), 256, 0, stream>>>(d_embed_tokens, d_out, tokens, token_order, N,
                                                                  (int)C, pad_token);
    launchCheck("embedding_backward_kernel2");
}

// ----------------------------------------------------------------------------
// kernel 3, as in train_moe.cu

// out[n,:] = embed_tokens[tokens[n],:]
// A warp owns a row, a lane the 16-byte pieces lane, lane + 32, ... of it. Bandwidth: 4*C bytes a token.
__global__ void embedding_forward_kernel3(bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, int C) {
    size_t n = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (n >= N) { return; }
    const bf16* row = embed_tokens + (size_t)tokens[n] * C;
    for (int c = threadIdx.x % 32 * 8; c < C; c += 32 * 8) { store16(out + n * C + c, load16(row + c)); }
}

void embedding_forward(bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, size_t C,
                       cudaStream_t stream) {
    // out (N,C) =
    if (N * C == 0) { return; }
    if (C % 8 != 0) { fatal("embedding_forward: C must be a multiple of 8, is %zu", C); }
    const int warps = 8;
    embedding_forward_kernel3<<<ceil_div(N, warps), warps * 32, 0, stream>>>(out, tokens, embed_tokens, N, (int)C);
    launchCheck("embedding_forward_kernel3");
}

// d_embed_tokens[token,:] += its rows of d_out
// A warp owns a sorted position and 128 columns, 4 a lane. If a run begins there, it adds the run's rows in order: the
// lanes look at the next 32 positions together, and 8 rows are on their way at once (without the launch bounds there
// are no registers for so many); else it goes home. Bandwidth: 2*C bytes a token, 8*C a different token. The longest
// run ends last: a comma may be a twentieth of 32,768 tokens, 1,600 rows or 200 times the wait for memory. That is 0.1
// to 0.2 ms where a microbatch takes 200, an estimate that no GPU has confirmed.
__global__ void __launch_bounds__(256, 4)
embedding_backward_kernel3(float* d_embed_tokens, const bf16* d_out, const int* tokens, const int* token_order,
                           size_t N, int C, int pad_token) {
    size_t i = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (i >= N) { return; }
    int lane = threadIdx.x % 32, c = blockIdx.y * 128 + lane * 4, token = tokens[token_order[i]];
    if (token == pad_token || (i > 0 && tokens[token_order[i - 1]] == token)) { return; }
    float sum[4] = {0, 0, 0, 0}, *row = d_embed_tokens + (size_t)token * C + c;
    if (c < C) { load4(sum, row); }
    for (int length = 32; length == 32; i += 32) { // a shorter piece is the run's last
        int n = i + lane < N ? token_order[i + lane] : -1;
        length = __popc(__ballot_sync(0xffffffff, n >= 0 && tokens[n] == token));
        for (int j = 0; j < length; j += 8) {
            float x[8][4] = {};
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const bf16* from = d_out + (size_t)__shfl_sync(0xffffffff, n, j + k) * C + c;
                if (j + k < length && c < C) { load4(x[k], from); }
            }
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                for (int q = 0; q < 4; q++) { sum[q] += x[k][q]; }
            }
        }
    }
    if (c < C) { store4(row, sum); }
}

void embedding_backward(float* d_embed_tokens, const bf16* d_out, const int* tokens, const int* token_order, size_t N,
                        size_t C, int pad_token, cudaStream_t stream) {
    // d_embed_tokens[tokens[n],:] += d_out[n,:] except for pad_token (-1: none). token_order (N): see sort_tokens in
    // llmc/dataloader.h
    if (N * C == 0) { return; }
    if (C % 8 != 0) { fatal("embedding_backward: C must be a multiple of 8, is %zu", C); }
    const int warps = 8;
    dim3 grid(ceil_div(N, warps), ceil_div(C, 128));
    embedding_backward_kernel3<<<grid, warps * 32, 0, stream>>>(d_embed_tokens, d_out, tokens, token_order, N, (int)C,
                                                                pad_token);
    launchCheck("embedding_backward_kernel3");
}

// ----------------------------------------------------------------------------
// checks

void forward(int kernel, bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, size_t C) {
    if (kernel == 1) { embedding_forward1(out, tokens, embed_tokens, N, C, 0); }
    if (kernel == 2) { embedding_forward2(out, tokens, embed_tokens, N, C, 0); }
    if (kernel == 3) { embedding_forward(out, tokens, embed_tokens, N, C, 0); }
}
void backward(int kernel, float* d_embed_tokens, const bf16* d_out, const int* tokens, const int* token_order, size_t N,
              size_t C, int pad_token) {
    if (kernel == 1) { embedding_backward1(d_embed_tokens, d_out, tokens, token_order, N, C, pad_token, 0); }
    if (kernel == 2) { embedding_backward2(d_embed_tokens, d_out, tokens, token_order, N, C, pad_token, 0); }
    if (kernel == 3) { embedding_backward(d_embed_tokens, d_out, tokens, token_order, N, C, pad_token, 0); }
}

std::vector<int> order_of(const std::vector<int>& tokens, int V) {
    std::vector<int> order(tokens.size()), scratch(V);
    sort_tokens(order.data(), tokens.data(), tokens.size(), V, scratch.data());
    return order;
}

void check(int kernel, const char* what, const std::vector<int>& tokens, size_t C, int V, int pad_token) {
    size_t N = tokens.size();
    std::vector<float> table = random_floats(V * C, 1, 1), gradient = random_floats(N * C, 1, 2), want(N * C);
    Device<int> device_tokens(tokens), token_order(order_of(tokens, V));

    Device<bf16> out(N * C), embed_tokens(to_bf16(table));
    forward(kernel, out, device_tokens, embed_tokens, N, C);
    cpu::embedding_forward(want.data(), tokens.data(), table.data(), N, C);
    check_equal(what, out.get(), to_bf16(want));

    std::vector<float> sums = random_floats(V * C, 1, 3); // += : something is there already
    Device<float> d_embed_tokens(sums);
    Device<bf16> d_out(to_bf16(gradient));
    backward(kernel, d_embed_tokens, d_out, device_tokens, token_order, N, C, pad_token);
    cpu::embedding_backward(sums.data(), gradient.data(), tokens.data(), N, C, V, pad_token, 1);
    check_equal(what, d_embed_tokens.get(), sums); // each sum has the CPU's order, so bit for bit
}

// Tokens as frequent as words are: the k-th with a probability that falls like 1/k. The most frequent one is about 8 %.
std::vector<int> zipf_tokens(size_t N, int V) {
    std::vector<int> tokens(N);
    for (size_t n = 0; n < N; n++) {
        uint64_t state = hash64(n + 1);
        tokens[n] = std::min(V - 1, (int)exp(rng_uniform(&state) * log((double)V)) - 1);
    }
    return tokens;
}

void check_all(int kernel) {
    check(kernel, "one token", {2}, 8, 3, -1);
    check(kernel, "padding token", {1, 0, 1, 2, 0}, 24, 3, 1);
    check(kernel, "all the same", std::vector<int>(200, 4), 136, 5, -1);
    check(kernel, "all padding", std::vector<int>(70, 4), 136, 5, 4);
    for (int length = 30; length <= 35; length++) { // about the 32 that are looked at together
        std::vector<int> tokens;
        for (int token = 0; token < 6; token++) { tokens.insert(tokens.end(), token == 3 ? 5 : length, token); }
        check(kernel, "runs of about 32", tokens, 16, 6, 5);
    }
    check(kernel, "a run of 32 at the end", std::vector<int>(32, 1), 16, 2, -1);
    check(kernel, "Zipf", zipf_tokens(777, 50), 328, 50, 0);
    check(kernel, "the vocabulary of smol-500m", zipf_tokens(99, 151936), 8, 151936, -1);
    if (dev_is_large(kernel)) { check(kernel, "smol-500m", zipf_tokens(8 * 4096, 151936), 896, 151936, -1); }
}

void bench_all(int kernel) {
    size_t N = 8 * 4096, C = 896;
    int V = 151936;
    std::vector<int> tokens = zipf_tokens(N, V), order = order_of(tokens, V), seen(V);
    size_t different = 0;
    for (int token : tokens) { different += seen[token]++ == 0; }
    Device<int> device_tokens(tokens), token_order(order);
    Device<bf16> out(N * C), embed_tokens(V * C);
    fill_random(embed_tokens, 1, 1);
    Device<float> d_embed_tokens(V * C);
    cudaCheck(cudaMemset(d_embed_tokens, 0, V * C * sizeof(float)));
    std::string name = " kernel " + std::to_string(kernel) + ", N 32768, C 896";
    double bytes = 2.0 * C * N + 2.0 * C * different; // a row that is read again comes from the cache
    bench(("embedding_forward" + name).c_str(), bytes, 0,
          [&] { forward(kernel, out, device_tokens, embed_tokens, N, C); });
    forward(kernel, out, device_tokens, embed_tokens, N, C);
    bench(("embedding_backward" + name).c_str(), 2.0 * C * N + 8.0 * C * different, 0,
          [&] { backward(kernel, d_embed_tokens, out, device_tokens, token_order, N, C, -1); });
    Device<int> same(std::vector<int>(N, 7)), same_order(order_of(std::vector<int>(N, 7), V));
    bench(("embedding_backward" + name + ", all the same token").c_str(), 2.0 * C * N, 0,
          [&] { backward(kernel, d_embed_tokens, out, same, same_order, N, C, -1); });
}

int main(int argc, char** argv) {
    dev_open(argc, argv, NUM_KERNELS);
    for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    return dev_close();
}
