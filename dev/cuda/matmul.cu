// matmul.cu: the products of a linear layer, and the gemm behind them and behind everything else that is dense:
//     forward:  out (N,OC) = inp (N,C) weight^T, weight is (OC,C)
//     backward: d_inp (N,C) = d_out (N,OC) weight;  d_weight (OC,C) += d_out^T inp, in fp32
// inp, weight, out are bf16, sums are fp32. References: cpu::matmul_forward and cpu::gemm of train_moe_cpu.c.
//
//     nvcc -O3 -std=c++17 -I. -o build/dev/matmul dev/cuda/matmul.cu -lcjson -lcublasLt
//
// kernel 1: a thread an output. Each number is fetched from memory (or L1) for each product it is part of.
// kernel 2: tiles in shared memory and registers: a block fetches a number once for 64 products, a thread once for 4.
// kernel 3: cuBLASLt (llmc/gemm.h): tensor cores, tiles and pipelines chosen for the shape and the GPU. (How tensor
//           cores are used by hand is the subject of grouped_matmul.cu, whose products no library call fits.)
//
// winner: 3 (matmul.h)
#include "common.h"
#include "matmul.h"

// ----------------------------------------------------------------------------
// kernels 1 and 2: out (N,OC) = inp (N,C) weight^T

// A thread owns an output, a block 16 x 16 of them. Bound by loads: two for each multiply-add.
__global__ void matmul_forward_kernel1(bf16* out, const bf16* inp, const bf16* weight, size_t N, size_t C, size_t OC) {
    size_t n = (size_t)blockIdx.y * 16 + threadIdx.y, o = (size_t)blockIdx.x * 16 + threadIdx.x;
    if (n >= N || o >= OC) { return; }
    float sum = 0;
    for (size_t c = 0; c < C; c++) { sum += __bfloat162float(inp[n * C + c]) * __bfloat162float(weight[o * C + c]); }
    out[n * OC + o] = __float2bfloat16(sum);
}

// A block of 256 owns 64 x 64 outputs and walks along C in steps of 16; a thread owns 4 x 4 of the outputs, 16 apart,
// and fetches 8 numbers a step. Bound by reads of shared memory: 8 for 16 multiply-adds.
__global__ void matmul_forward_kernel2(bf16* out, const bf16* inp, const bf16* weight, size_t N, size_t C, size_t OC) {
    __shared__ float inp_tile[16][65], weight_tile[16][65]; // [c][row]; 65, so that a column meets different banks
    size_t first_n = (size_t)blockIdx.y * 64, first_o = (size_t)blockIdx.x * 64;
    int t = threadIdx.x, row = t % 128 / 2, col = t % 2 * 8; // the first 128 threads fetch inp, the others weight
    bool is_inp = t < 128, inside = is_inp ? first_n + row < N : first_o + row < OC;
    const bf16* source = is_inp ? inp + (first_n + row) * C : weight + (first_o + row) * C;
    float sums[4][4] = {};
    for (size_t c = 0; c < C; c += 16) {
        float x[8] = {};
        if (inside && c + col < C) { load8(x, source + c + col); }
        __syncthreads(); // all are done with the tiles of the step before
        for (int i = 0; i < 8; i++) { (is_inp ? inp_tile : weight_tile)[col + i][row] = x[i]; }
        __syncthreads(); // the tiles are complete
        for (int k = 0; k < 16; k++) {
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) {
                    sums[i][j] += inp_tile[k][t / 16 + 16 * i] * weight_tile[k][t % 16 + 16 * j];
                }
            }
        }
    }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            size_t n = first_n + t / 16 + 16 * i, o = first_o + t % 16 + 16 * j;
            if (n < N && o < OC) { out[n * OC + o] = __float2bfloat16(sums[i][j]); }
        }
    }
}

void run_forward(int kernel, bf16* out, const bf16* inp, const bf16* weight, size_t N, size_t C, size_t OC) {
    if (kernel == 1) {
        dim3 grid((unsigned)ceil_div(OC, 16), (unsigned)ceil_div(N, 16)), block(16, 16);
        matmul_forward_kernel1<<<grid, block>>>(out, inp, weight, N, C, OC);
        launchCheck("matmul_forward_kernel1");
    } else if (kernel == 2) {
        dim3 grid((unsigned)ceil_div(OC, 64), (unsigned)ceil_div(N, 64));
        matmul_forward_kernel2<<<grid, 256>>>(out, inp, weight, N, C, OC);
        launchCheck("matmul_forward_kernel2");
    } else {
        matmul_forward(out, inp, weight, N, C, OC, 0);
    }
}

// ----------------------------------------------------------------------------
// checks and benchmark

void forward_matches_cpu(int kernel, size_t N, size_t C, size_t OC) {
    std::vector<float> inp = random_floats(N * C, 1, 1), weight = random_floats(OC * C, 1, 2), want(N * OC);
    cpu::matmul_forward(want.data(), inp.data(), weight.data(), N, C, OC);
    Device<bf16> out(N * OC), d_inp(to_bf16(inp)), d_weight(to_bf16(weight));
    run_forward(kernel, out, d_inp, d_weight, N, C, OC);
    check_bf16("matmul_forward", out.get(), want);
}

void backward_matches_cpu(size_t N, size_t C, size_t OC) {
    std::vector<float> inp = random_floats(N * C, 1, 3), weight = random_floats(OC * C, 1, 4);
    std::vector<float> d_out = random_floats(N * OC, 1, 5), d_weight = random_floats(OC * C, 1, 6), d_inp(N * C);
    Device<bf16> g_inp(to_bf16(inp)), g_weight(to_bf16(weight)), g_d_out(to_bf16(d_out)), g_d_inp(N * C);
    Device<float> g_d_weight(d_weight);
    matmul_backward(g_d_inp, g_d_weight, g_d_out, g_inp, g_weight, N, C, OC, 0);
    cpu::matmul_backward(d_inp.data(), d_weight.data(), d_out.data(), inp.data(), weight.data(), N, C, OC, 0, 1);
    check_bf16("matmul_backward, d_inp", g_d_inp.get(), d_inp);
    check_f32("matmul_backward, d_weight +=", g_d_weight.get(), d_weight);
}

// all four ways to transpose, both types of result, with rows longer than what is used of them
void gemm_matches_cpu(size_t M, size_t N, size_t K, bool trans_a, bool trans_b, float beta, cudaDataType_t c_type) {
    size_t lda = ceil_div(trans_a ? M : K, 8) * 8 + 8, ldb = ceil_div(trans_b ? K : N, 8) * 8 + 16;
    size_t ldc = ceil_div(N, 8) * 8 + 8;
    std::vector<float> a = random_floats((trans_a ? K : M) * lda, 1, 7), c = random_floats(M * ldc, 1, 9);
    std::vector<float> b = random_floats((trans_b ? N : K) * ldb, 1, 8), want = c;
    cpu::gemm(trans_a, trans_b, M, N, K, a.data(), lda, b.data(), ldb, beta, want.data(), ldc);
    Device<bf16> d_a(to_bf16(a)), d_b(to_bf16(b)), c_bf16(to_bf16(c));
    Device<float> c_f32(c);
    bool f32 = c_type == CUDA_R_32F;
    for (int again = 0; again < 2; again++) { // the second time with the plan of the first
        c_bf16.set(to_bf16(c));
        c_f32.set(c);
        gemm(trans_a, trans_b, M, N, K, d_a, lda, d_b, ldb, beta, f32 ? (void*)c_f32.data : (void*)c_bf16.data, c_type,
             ldc, 0);
        if (f32) {
            check_f32("gemm, float", c_f32.get(), want);
        } else {
            check_bf16("gemm, bf16", c_bf16.get(), want);
        }
    }
}

// A product of smol-500m against the CPU at 48 rows that stand for all: at many places of a tile, the first and the last
// row. In float64, because a sum of so many terms in fp32 would be little better than the result.
std::vector<size_t> some_rows(size_t count) {
    std::vector<size_t> rows;
    size_t step = count / 47;
    for (size_t i = 0; i < 47; i++) { rows.push_back(i * step + i % step); }
    rows.push_back(count - 1);
    return rows;
}

// want (rows,N)[i,:] = sum over k of a(rows[i],k) b(k,:), b (K,N) or, transposed, (N,K)
template <class A>
std::vector<float> product_of_rows(A a, const std::vector<float>& b, bool trans_b, const std::vector<size_t>& rows,
                                   size_t N, size_t K) {
    std::vector<float> want(rows.size() * N);
    #pragma omp parallel for
    for (size_t part = 0; part < ceil_div(N, 64); part++) { // 64 columns, so that their sums stay in the cache
        size_t begin = part * 64, end = std::min(begin + 64, N);
        std::vector<double> sums(end - begin);
        for (size_t i = 0; i < rows.size(); i++) {
            std::fill(sums.begin(), sums.end(), 0.0);
            for (size_t k = 0; k < K && !trans_b; k++) {
                double x = a(rows[i], k);
                for (size_t n = begin; n < end; n++) { sums[n - begin] += x * b[k * N + n]; }
            }
            for (size_t n = begin; n < end && trans_b; n++) {
                for (size_t k = 0; k < K; k++) { sums[n - begin] += (double)a(rows[i], k) * b[n * K + k]; }
            }
            for (size_t n = begin; n < end; n++) { want[i * N + n] = (float)sums[n - begin]; }
        }
    }
    return want;
}

template <class T> std::vector<float> pick_rows(const std::vector<T>& x, const std::vector<size_t>& rows, size_t C) {
    std::vector<float> picked(rows.size() * C);
    #pragma omp parallel for
    for (size_t i = 0; i < rows.size(); i++) { std::copy_n(&x[rows[i] * C], C, &picked[i * C]); }
    return picked;
}

// as random_floats, for arrays that would take gigabytes in fp32
std::vector<bf16> many_random(size_t n, uint64_t seed) {
    const size_t piece = 1 << 20;
    std::vector<bf16> x(n);
    #pragma omp parallel for
    for (size_t i = 0; i < n; i += piece) {
        std::vector<bf16> part = to_bf16(random_floats(std::min(piece, n - i), 1, seed + i));
        std::copy(part.begin(), part.end(), x.begin() + i);
    }
    return x;
}

void rows_match(int kernel, const char* product, size_t N, size_t C, size_t OC) {
    std::vector<float> inp = random_floats(N * C, 1, 20), weight = random_floats(OC * C, 1, 21);
    std::vector<size_t> rows = some_rows(N), columns = some_rows(OC);
    char what[96];
    snprintf(what, sizeof(what), "matmul_forward %d, %s of smol-500m", kernel, product);
    Device<bf16> out(N * OC), g_inp(to_bf16(inp)), g_weight(to_bf16(weight));
    run_forward(kernel, out, g_inp, g_weight, N, C, OC);
    check_bf16(what, pick_rows(out.get(), rows, OC),
               product_of_rows([&](size_t n, size_t c) { return inp[n * C + c]; }, weight, true, rows, OC, C));
    if (kernel > 1 && rows.size() < N) { // and every element against kernel 1: each of the two may be off
        Device<bf16> simple(N * OC);
        run_forward(1, simple, g_inp, g_weight, N, C, OC);
        check_bf16(what, out.get(), to_float(simple.get()), 2, 2.0 / 256);
    }
    if (kernel < 3) { return; }

    std::vector<bf16> d_out = many_random(N * OC, 22);
    std::vector<float> before = random_floats(OC * C, 1, 23);
    Device<bf16> g_d_inp(N * C);
    Device<float> d_weight(before);
    out.set(d_out);
    matmul_backward(g_d_inp, d_weight, out, g_inp, g_weight, N, C, OC, 0);
    snprintf(what, sizeof(what), "matmul_backward, d_inp, %s of smol-500m", product);
    check_bf16(what, pick_rows(g_d_inp.get(), rows, C),
               product_of_rows([&](size_t n, size_t o) { return __bfloat162float(d_out[n * OC + o]); }, weight, false,
                               rows, C, OC));
    std::vector<float> want =
        product_of_rows([&](size_t o, size_t n) { return __bfloat162float(d_out[n * OC + o]); }, inp, false, columns, C,
                        N);
    std::vector<float> start = pick_rows(before, columns, C);
    for (size_t i = 0; i < want.size(); i++) { want[i] += start[i]; }
    snprintf(what, sizeof(what), "matmul_backward, d_weight, %s of smol-500m", product);
    // tensor cores cut off what does not fit into the sum, 8 terms at a time: at most 2^-23 of it each time
    check_f32(what, pick_rows(d_weight.get(), columns, C), want, (double)N / 8 / (1 << 23));
}

// On a GPU all rows; the emulator has time for 48, so there each element is compared with the CPU.
void smol_500m_matches(int kernel) {
    const size_t N = dev_benchmarks() ? 8 * 4096 : 48;
    rows_match(kernel, "qkv", N, 896, 3072);
    rows_match(kernel, "o", N, 1024, 896);
    rows_match(kernel, "lm_head", std::min(N, (size_t)4096), 896, 151936); // a chunk
}

void without_rows_or_sum(void) {
    const size_t M = 3, N = 5, ld = 8;
    std::vector<float> c = random_floats(M * ld, 1, 10), zeroed = c;
    for (size_t i = 0; i < M * N; i++) { zeroed[i / N * ld + i % N] = 0; }
    Device<bf16> a(64), b(64);
    Device<float> d_c(c);
    gemm(true, false, 0, N, 8, a, ld, b, ld, 1, d_c, CUDA_R_32F, ld, 0);
    gemm(true, false, M, 0, 8, a, ld, b, ld, 0, d_c, CUDA_R_32F, ld, 0);
    gemm(true, false, M, N, 0, a, ld, b, ld, 1, d_c, CUDA_R_32F, ld, 0);
    check_equal("gemm without rows, columns or terms: c += 0", d_c.get(), c);
    gemm(true, false, M, N, 0, a, ld, b, ld, 0, d_c, CUDA_R_32F, ld, 0);
    check_equal("gemm without terms: c = 0, and only c", d_c.get(), zeroed);
}

// so many shapes that some have the same place in the table of plans: old plans go, results stay right
void plans_are_replaced(void) {
    std::vector<float> a = random_floats(64 * 8, 1, 11), b = random_floats(64 * 8, 1, 12), want(64 * 64);
    Device<bf16> d_a(to_bf16(a)), d_b(to_bf16(b));
    Device<float> c(64 * 64);
    for (size_t M = 1; M <= 64; M++) {
        for (size_t N = 1; N <= 64; N++) {
            gemm(false, true, M, N, 8, d_a, 8, d_b, 8, 0, c, CUDA_R_32F, 64, 0);
            gemm(false, true, M, N, 8, d_a, 8, d_b, 8, 0, c, CUDA_R_32F, 64, 0);
        }
    }
    cpu::gemm(false, true, 64, 64, 8, a.data(), 8, b.data(), 8, 0, want.data(), 64);
    check_f32("gemm after thousands of shapes", c.get(), want);
}

void same_bits_every_run(void) {
    const size_t N = 5000, C = 64, OC = 64; // a long sum for few outputs: where a library splits it
    Device<bf16> inp(to_bf16(random_floats(N * C, 1, 13))), d_out(to_bf16(random_floats(N * OC, 1, 14)));
    std::vector<float> first;
    for (int run = 0; run < 5; run++) {
        Device<float> d_weight(std::vector<float>(OC * C, 0.0f));
        gemm(true, false, OC, C, N, d_out, OC, inp, C, 1, d_weight, CUDA_R_32F, C, 0);
        if (run == 0) { first = d_weight.get(); }
        check_equal("d_weight, run again", d_weight.get(), first);
    }
}

void check_all(int kernel) {
    forward_matches_cpu(kernel, 1, 8, 8);
    forward_matches_cpu(kernel, 3, 24, 40);
    forward_matches_cpu(kernel, 65, 40, 72);
    forward_matches_cpu(kernel, 130, 128, 64);
    if (kernel != 2) { forward_matches_cpu(kernel, 3, 896, 3072); } // qkv of smol-500m; kernel 2 would compute 64 rows
    if (dev_is_large(kernel)) { smol_500m_matches(kernel); }
    if (kernel < 3) { return; }
    backward_matches_cpu(1, 8, 16);
    backward_matches_cpu(77, 72, 40);
    backward_matches_cpu(3, 896, 3072);
    for (int i = 0; i < 4; i++) {
        gemm_matches_cpu(19, 21, 37, i & 1, i & 2, 0, CUDA_R_16BF);
        gemm_matches_cpu(19, 21, 37, i & 1, i & 2, 0, CUDA_R_32F);
        gemm_matches_cpu(1, 70, 5, i & 1, i & 2, 1, CUDA_R_32F);
    }
    without_rows_or_sum();
    if (dev_is_large(kernel)) { plans_are_replaced(); }
    same_bits_every_run();
}

void bench_forward(int kernel, const char* what, size_t N, size_t C, size_t OC) {
    Device<bf16> out(N * OC), inp(N * C), weight(OC * C);
    fill_random(inp, 1, 15);
    fill_random(weight, 1, 16);
    double bytes = 2.0 * (double)(N * C + OC * C + N * OC), flops = 2.0 * (double)(N * C) * (double)OC;
    char name[64];
    snprintf(name, sizeof(name), "matmul_forward %d %s", kernel, what);
    bench(name, bytes, flops, [&] { run_forward(kernel, out, inp, weight, N, C, OC); });
}

void bench_backward(const char* what, size_t N, size_t C, size_t OC) {
    Device<bf16> inp(N * C), weight(OC * C), d_out(N * OC), d_inp(N * C);
    Device<float> d_weight(OC * C);
    fill_random(inp, 1, 17);
    fill_random(weight, 1, 18);
    fill_random(d_out, 1, 19);
    fill_random(d_weight, 1, 24);
    double bytes = 2.0 * (double)(2 * N * C + OC * C + 2 * N * OC) + 8.0 * (double)(OC * C);
    char name[64];
    snprintf(name, sizeof(name), "matmul_backward 3 %s", what);
    bench(name, bytes, 4.0 * (double)(N * C) * (double)OC,
          [&] { matmul_backward(d_inp, d_weight, d_out, inp, weight, N, C, OC, 0); });
}

void bench_all(int kernel) {
    bench_forward(kernel, "qkv N=32768 C=896 OC=3072", 32768, 896, 3072);
    if (kernel < 3) { return; }
    bench_backward("qkv N=32768 C=896 OC=3072", 32768, 896, 3072);
    bench_forward(kernel, "o N=32768 C=1024 OC=896", 32768, 1024, 896);
    bench_backward("o N=32768 C=1024 OC=896", 32768, 1024, 896);
    bench_forward(kernel, "lm_head N=4096 C=896 OC=151936", 4096, 896, 151936);
    bench_backward("lm_head N=4096 C=896 OC=151936", 4096, 896, 151936);
}

int main(int argc, char** argv) {
    const int num_kernels = 3;
    dev_open(argc, argv, num_kernels);
    gemm_open();
    for (int kernel = 1; kernel <= num_kernels; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    gemm_close();
    return dev_close();
}
