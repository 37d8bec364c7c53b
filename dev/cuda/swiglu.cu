/*
swiglu.cu: act = silu(gate) * up and its backward (Shazeer 2020, "GLU Variants Improve Transformer"), as a dense MLP and
--experts loop use it. The grouped experts have it in the epilogue of their products (grouped_matmul.cu).
    gate_up (N,2F) has gate (F) and up (F) of a row side by side; all is bf16, arithmetic in fp32
    forward:  act (N,F) = gate * sigmoid(gate) * up
    backward: d_gate_up (N,2F), which may be gate_up itself: of d_act (N,F)
              d_gate = d_act * up * silu'(gate), d_up = d_act * silu(gate)
Reference: cpu::swiglu_forward, swiglu_backward.

nvcc -std=c++17 -O3 -arch=native -I. -o build/dev/swiglu dev/cuda/swiglu.cu -lcjson -lcublasLt
dev/emu/emucc -I. -o build/dev/swiglu dev/cuda/swiglu.cu -lcjson

kernel 1: the loop body of train_moe_cpu.c, a thread an element
kernel 2: eight neighbours a thread, so that memory is asked for 16 bytes at a time (swiglu.h)
// winner: 2
*/
#include "common.h"
#include "swiglu.h"

// ----------------------------------------------------------------------------
// kernel 1. A block owns 256 neighbouring elements, a thread one. 2-byte loads: a warp asks for 64 bytes at a time,
// half a line, and each thread divides to find its row.

__global__ void swiglu_forward_kernel1(bf16* act, const bf16* gate_up, size_t N, size_t F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * F) { return; }
    const bf16* row = gate_up + i / F * 2 * F;
    float gate = __bfloat162float(row[i % F]), up = __bfloat162float(row[F + i % F]);
    act[i] = __float2bfloat16(gate * sigmoid(gate) * up);
}

// A block owns 256 neighbouring elements of d_act, a thread one; bound as above.
__global__ void swiglu_backward_kernel1(bf16* d_gate_up, const bf16* d_act, const bf16* gate_up, size_t N, size_t F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * F) { return; }
    size_t at = i / F * 2 * F + i % F;
    float gate = __bfloat162float(gate_up[at]), up = __bfloat162float(gate_up[at + F]);
    float d = __bfloat162float(d_act[i]), s = sigmoid(gate);
    d_gate_up[at] = __float2bfloat16(d * up * (s * (1 + gate * (1 - s))));
    d_gate_up[at + F] = __float2bfloat16(d * (gate * s));
}

// ----------------------------------------------------------------------------
// checks and benchmark

enum { NUM_KERNELS = 2 };

void forward(int kernel, bf16* act, const bf16* gate_up, size_t N, size_t F) {
    if (kernel == 2) { return swiglu_forward(act, gate_up, N, F, 0); }
    swiglu_forward_kernel1<<<(unsigned)ceil_div(N * F, 256), 256>>>(act, gate_up, N, F);
    launchCheck("swiglu_forward_kernel1");
}

void backward(int kernel, bf16* d_gate_up, const bf16* d_act, const bf16* gate_up, size_t N, size_t F) {
    if (kernel == 2) { return swiglu_backward(d_gate_up, d_act, gate_up, N, F, 0); }
    swiglu_backward_kernel1<<<(unsigned)ceil_div(N * F, 256), 256>>>(d_gate_up, d_act, gate_up, N, F);
    launchCheck("swiglu_backward_kernel1");
}

void check_shape(int kernel, size_t N, size_t F, float scale) {
    std::vector<float> gate_up = random_floats(N * 2 * F, scale, 1), d_act = random_floats(N * F, 2, 2);
    std::vector<float> want_act(N * F), want_d(N * 2 * F);
    cpu::swiglu_forward(want_act.data(), gate_up.data(), N, F);
    cpu::swiglu_backward(want_d.data(), d_act.data(), gate_up.data(), N, F);

    Device<bf16> d_gate_up(to_bf16(gate_up)), d_d_act(to_bf16(d_act)), act(N * F), d(N * 2 * F);
    char what[128];
    forward(kernel, act, d_gate_up, N, F);
    backward(kernel, d, d_d_act, d_gate_up, N, F);
    backward(kernel, d_gate_up, d_d_act, d_gate_up, N, F);
    snprintf(what, sizeof(what), "kernel %d, N %zu, F %zu, scale %g: act", kernel, N, F, scale);
    check_bf16(what, act.get(), want_act);
    snprintf(what, sizeof(what), "kernel %d, N %zu, F %zu, scale %g: d_gate_up", kernel, N, F, scale);
    check_bf16(what, d.get(), want_d);
    snprintf(what, sizeof(what), "kernel %d, N %zu, F %zu, scale %g: d_gate_up in place", kernel, N, F, scale);
    check_equal(what, d_gate_up.get(), d.get());
}

void check_all(int kernel) {
    check_shape(kernel, 1, 8, 2);
    check_shape(kernel, 3, 24, 2);
    check_shape(kernel, 17, 264, 4);
    check_shape(kernel, 5, 1032, 1);
    check_shape(kernel, 33, 512, 100); // sigmoid 0 and 1, exp(-x) infinite
    forward(2, NULL, NULL, 0, 8);      // nothing to do, nothing launched
    check_shape(kernel, 2 * smol_500m_tokens(kernel), 512, 4); // an MoE layer of smol-500m: K = 2 rows a token
}

void bench_all(int kernel) {
    const size_t R = 65536, F = 512; // an MoE layer of smol-500m at batch 8
    Device<bf16> gate_up(to_bf16(random_floats(R * 2 * F, 4, 1))), d_act(to_bf16(random_floats(R * F, 1, 2))),
        act(R * F), d(R * 2 * F);
    char name[64];
    snprintf(name, sizeof(name), "swiglu_forward %d", kernel);
    bench(name, 6.0 * R * F, 0, [&] { forward(kernel, act, gate_up, R, F); });
    snprintf(name, sizeof(name), "swiglu_backward %d", kernel);
    bench(name, 10.0 * R * F, 0, [&] { backward(kernel, d, d_act, gate_up, R, F); });
    if (kernel == NUM_KERNELS) {
        bench_library("memcpy of as many bytes as swiglu_forward moves", 6.0 * R * F, 0,
                      [&] { cudaCheck(cudaMemcpyAsync(d, gate_up, 3 * R * F, cudaMemcpyDeviceToDevice, 0)); });
    }
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
