// combine: the weighted way back from the experts' rows to the tokens.
//
//   nvcc -std=c++17 -O3 -arch=native -I. -o build/dev/combine dev/cuda/combine.cu -lcjson -lcublasLt
//   dev/emu/emucc -I. -o build/dev/combine dev/cuda/combine.cu -lcjson              (no GPU: the emulator)
//
// forward:  out (N,C)[n,:] = sum over k of router_weights (N,K)[n,k] * expert_out (R,C)[slot_row[n,k],:]
// backward: d_expert_out (R,C)[row,:] = weight of its slot * d_out (N,C)[its token,:]
//           d_router_weight_rows (R)[row] = d_out[its token,:] . expert_out[row,:]
//
//   1  a thread an element (forward), a thread a row (backward)
//   2  a warp a token (forward) or a row (backward), 16 bytes a lane
// winner: 2
//
// The sum over k is a gather: scattering rows to tokens would need float atomics, whose order changes from run to run.
// Reference: cpu::combine_forward, combine_backward.
#include "common.h"

const int NUM_KERNELS = 2;

// ----------------------------------------------------------------------------
// first rungs

// A thread owns an element of out, a block 256. Bound by instructions: for 2 bytes of each of K rows it divides to find
// its token, and fetches K weights and K places.
__global__ void combine_forward_kernel1(bf16* out, const bf16* expert_out, const float* router_weights,
                                        const int* slot_row, size_t N, int K, size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * C) { return; }
    size_t n = i / C, c = i % C;
    float sum = 0;
    for (int k = 0; k < K; k++) {
        sum += router_weights[n * K + k] * __bfloat162float(expert_out[slot_row[n * K + k] * C + c]);
    }
    out[i] = __float2bfloat16(sum);
}

// A thread owns a row: the 32 lanes of a warp read 32 rows at once, 2 bytes of each. Bound by the sectors that
// this wastes.
__global__ void combine_backward_kernel1(bf16* d_expert_out, float* d_router_weight_rows, const bf16* d_out,
                                         const bf16* expert_out, const float* router_weights, const int* row_slot,
                                         size_t R, int K, size_t C) {
    size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= R) { return; }
    size_t slot = row_slot[row];
    float w = router_weights[slot], dot = 0;
    for (size_t c = 0; c < C; c++) {
        float d = __bfloat162float(d_out[slot / K * C + c]);
        dot += d * __bfloat162float(expert_out[row * C + c]);
        d_expert_out[row * C + c] = __float2bfloat16(w * d);
    }
    d_router_weight_rows[row] = dot;
}

// ---- train_moe.cu has from here
// A warp owns a token, 16 bytes a lane. Bound by bandwidth: R*C read, N*C written.
__global__ void __launch_bounds__(256)
combine_forward_kernel2(bf16* out, const bf16* expert_out, const float* router_weights, const int* slot_row,
                        size_t N, int K, size_t C) {
    size_t n = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (n >= N) { return; }
    for (size_t c = 8 * (threadIdx.x % 32); c < C; c += 256) {
        float sum[8] = {};
        for (int k = 0; k < K; k++) { // k ascends, so the sum has one order and the result one value
            float row[8], w = router_weights[n * K + k];
            load8(row, expert_out + slot_row[n * K + k] * C + c);
            #pragma unroll
            for (int i = 0; i < 8; i++) { sum[i] += w * row[i]; }
        }
        store8(out + n * C + c, sum);
    }
}

void combine_forward(bf16* out, const bf16* expert_out, const float* router_weights, const int* slot_row, size_t N,
                     int K, size_t C, cudaStream_t stream) {
    // out (N,C)[n,:] = sum over k of router_weights (N,K)[n,k] * expert_out (R,C)[slot_row[n,k],:]
    if (C % 8 != 0) { fatal("combine_forward: C must be a multiple of 8, is %zu", C); }
    if (N == 0) { return; }
    combine_forward_kernel2<<<ceil_div(N, 8), 256, 0, stream>>>(out, expert_out, router_weights, slot_row, N, K, C);
    launchCheck("combine_forward_kernel2");
}

// A warp owns a row, 16 bytes a lane; the dot product is a sum over the warp. Bound by bandwidth: 2*R*C read, R*C
// written.
__global__ void __launch_bounds__(256)
combine_backward_kernel2(bf16* d_expert_out, float* d_router_weight_rows, const bf16* d_out, const bf16* expert_out,
                         const float* router_weights, const int* row_slot, size_t R, int K, size_t C) {
    size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= R) { return; } // the whole warp: nobody is missing from the sum below
    size_t slot = row_slot[row];
    float w = router_weights[slot], dot = 0;
    for (size_t c = 8 * (threadIdx.x % 32); c < C; c += 256) {
        float d[8], x[8];
        load8(d, d_out + slot / K * C + c);
        load8(x, expert_out + row * C + c);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            dot += d[i] * x[i];
            d[i] *= w;
        }
        store8(d_expert_out + row * C + c, d);
    }
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) { d_router_weight_rows[row] = dot; }
}

void combine_backward(bf16* d_expert_out, float* d_router_weight_rows, const bf16* d_out, const bf16* expert_out,
                      const float* router_weights, const int* row_slot, size_t R, int K, size_t C,
                      cudaStream_t stream) {
    // d_expert_out (R,C)[row,:] = weight of its slot * d_out (N,C)[its token,:]; d_router_weight_rows (R)[row] =
    // d_out[its token,:] . expert_out (R,C)[row,:]
    if (C % 8 != 0) { fatal("combine_backward: C must be a multiple of 8, is %zu", C); }
    if (R == 0) { return; }
    combine_backward_kernel2<<<ceil_div(R, 8), 256, 0, stream>>>(d_expert_out, d_router_weight_rows, d_out, expert_out,
                                                                 router_weights, row_slot, R, K, C);
    launchCheck("combine_backward_kernel2");
}
// ---- train_moe.cu has up to here

// ----------------------------------------------------------------------------
// launchers of all rungs

void run_forward(int kernel, bf16* out, const bf16* expert_out, const float* router_weights, const int* slot_row,
                 size_t N, int K, size_t C) {
    if (kernel == 2) { return combine_forward(out, expert_out, router_weights, slot_row, N, K, C, 0); }
    combine_forward_kernel1<<<ceil_div(N * C, 256), 256>>>(out, expert_out, router_weights, slot_row, N, K, C);
    launchCheck("combine_forward_kernel1");
}

void run_backward(int kernel, bf16* d_expert_out, float* d_router_weight_rows, const bf16* d_out,
                  const bf16* expert_out, const float* router_weights, const int* row_slot, size_t R, int K, size_t C) {
    if (kernel == 2) {
        return combine_backward(d_expert_out, d_router_weight_rows, d_out, expert_out, router_weights, row_slot, R, K,
                                C, 0);
    }
    combine_backward_kernel1<<<ceil_div(R, 256), 256>>>(d_expert_out, d_router_weight_rows, d_out, expert_out,
                                                        router_weights, row_slot, R, K, C);
    launchCheck("combine_backward_kernel1");
}

// ----------------------------------------------------------------------------
// checks

struct Slots { // a routing of N tokens to K different ones of E experts
    std::vector<int> row_slot, slot_row;
    Slots(size_t N, int E, int K, bool one_expert) : row_slot(N * K), slot_row(N * K) {
        std::vector<int> indices(N * K), tokens(E), offsets(E + 1), order(E);
        std::vector<float> random = random_floats(N, 1, 31);
        for (size_t slot = 0; slot < N * K; slot++) {
            int first = one_expert ? 0 : (int)(fabsf(random[slot / K]) * 0.999f * E);
            indices[slot] = (first + (int)(slot % K)) % E;
        }
        cpu::route_rows(tokens.data(), offsets.data(), order.data(), row_slot.data(), slot_row.data(), indices.data(),
                        N, E, K);
    }
};

void matches_cpu(int kernel, size_t N, size_t C, int E, int K, bool one_expert) {
    char what[128];
    snprintf(what, sizeof(what), "combine %d N %zu C %zu E %d K %d one expert %d", kernel, N, C, E, K, one_expert);
    size_t R = N * K;
    Slots slots(N, E, K, one_expert);
    std::vector<float> expert_out = random_floats(R * C, 2, 32), weights = random_floats(R, 1, 33);
    std::vector<float> d_out = random_floats(N * C, 2, 34);
    Device<bf16> d_expert_out(to_bf16(expert_out)), d_d_out(to_bf16(d_out)), out(N * C), d_rows(R * C);
    Device<float> d_weights(weights), d_weight_rows(R);
    Device<int> row_slot(slots.row_slot), slot_row(slots.slot_row);

    run_forward(kernel, out, d_expert_out, d_weights, slot_row, N, K, C);
    std::vector<float> want(N * C);
    cpu::combine_forward(want.data(), expert_out.data(), weights.data(), slots.slot_row.data(), N, K, C);
    check_bf16(what, out.get(), want);

    run_backward(kernel, d_rows, d_weight_rows, d_d_out, d_expert_out, d_weights, row_slot, R, K, C);
    std::vector<float> want_rows(R * C), want_weights(R), got_weights(R), got_rows = d_weight_rows.get();
    cpu::combine_backward(want_rows.data(), want_weights.data(), d_out.data(), expert_out.data(), weights.data(),
                          slots.row_slot.data(), 0, R, K, C);
    for (size_t row = 0; row < R; row++) { got_weights[slots.row_slot[row]] = got_rows[row]; }
    check_bf16(what, d_rows.get(), want_rows);
    check_f32(what, got_weights, want_weights);
}

void check_all(int kernel) {
    const size_t shapes[][4] = {{1, 8, 1, 1},    {1, 48, 3, 3},     {17, 48, 3, 2},   {50, 72, 6, 6},
                                {9, 896, 16, 2}, {30, 264, 33, 33}, {7, 520, 128, 8}, {65, 8, 16, 4}};
    for (const size_t* s : shapes) {
        for (int one_expert = 0; one_expert < 2; one_expert++) {
            matches_cpu(kernel, s[0], s[1], (int)s[2], (int)s[3], one_expert);
        }
    }
    matches_cpu(kernel, smol_500m_tokens(kernel), 896, 16, 2, false);
}

void bench_all(int kernel) {
    const size_t N = 8 * 4096, C = 896;
    const int E = 16, K = 2;
    const size_t R = N * K;
    Slots slots(N, E, K, false);
    Device<bf16> expert_out(to_bf16(random_floats(R * C, 2, 1))), d_out(to_bf16(random_floats(N * C, 2, 2))),
        rows(R * C);
    Device<float> weights(random_floats(R, 1, 3)), d_weight_rows(R);
    Device<int> row_slot(slots.row_slot), slot_row(slots.slot_row);
    bench("combine_backward", kernel, 2.0 * (2 * R + N) * C + 12.0 * R, 0,
          [&] { run_backward(kernel, rows, d_weight_rows, d_out, expert_out, weights, row_slot, R, K, C); });
    bench("combine_forward", kernel, 2.0 * (R + N) * C + 8.0 * R, 0,
          [&] { run_forward(kernel, d_out, expert_out, weights, slot_row, N, K, C); });
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
