// swiglu.h: the trainer's SwiGLU: the two device functions that the expert kernels share with it, kernel 2 of swiglu.cu
// and its launchers. common.h first.
#ifndef DEV_CUDA_SWIGLU_H
#define DEV_CUDA_SWIGLU_H

// ----------------------------------------------------------------------------
// swiglu: act = silu(gate) * up, silu(x) = x sigmoid(x)

// The only sigmoid of this program: backward computes act again from gate and up and must find the same bits.
// (Fast division and exponential, each within 2 ulp of fp32; exp(-x) = inf gives 0.)
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ inline void swiglu8(float (&act)[8], const float (&gate)[8], const float (&up)[8]) {
    #pragma unroll
    for (int q = 0; q < 8; q++) { act[q] = gate[q] * sigmoid(gate[q]) * up[q]; }
}

// silu'(x) = s + x s (1 - s) with s = sigmoid(x). d_gate may be gate, d_up may be up.
__device__ inline void swiglu8_backward(float (&d_gate)[8], float (&d_up)[8], const float (&d_act)[8],
                                        const float (&gate)[8], const float (&up)[8]) {
    #pragma unroll
    for (int q = 0; q < 8; q++) {
        float g = gate[q], u = up[q], s = sigmoid(g);
        d_gate[q] = d_act[q] * u * (s * (1 + g * (1 - s)));
        d_up[q] = d_act[q] * (g * s);
    }
}

// A block owns a row, or threads * 8 columns of it; a thread owns 8 neighbouring columns: two 16-byte loads and a
// 16-byte store, and no division to find its row. Bound by bandwidth: 6 bytes an element, some 20 instructions.
__global__ void swiglu_forward_kernel2(bf16* act, const bf16* gate_up, int F) {
    int f = (int)(blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (f >= F) { return; }
    const bf16* row = gate_up + (size_t)blockIdx.x * 2 * F;
    float gate[8], up[8], out[8];
    load8(gate, row + f);
    load8(up, row + F + f);
    swiglu8(out, gate, up);
    store8(act + (size_t)blockIdx.x * F + f, out);
}

// As above, bound by bandwidth: 10 bytes an element. Each thread has read its 8 gates and ups before it overwrites
// them, if it does.
__global__ void swiglu_backward_kernel2(bf16* d_gate_up, const bf16* d_act, const bf16* gate_up, int F) {
    int f = (int)(blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (f >= F) { return; }
    const bf16* row = gate_up + (size_t)blockIdx.x * 2 * F;
    bf16* d_row = d_gate_up + (size_t)blockIdx.x * 2 * F;
    float gate[8], up[8], d[8];
    load8(gate, row + f);
    load8(up, row + F + f);
    load8(d, d_act + (size_t)blockIdx.x * F + f);
    swiglu8_backward(gate, up, d, gate, up);
    store8(d_row + f, gate);
    store8(d_row + F + f, up);
}

// a thread for 8 columns, whole warps, at most 128 threads: small blocks fill an SM as well as large ones here
dim3 swiglu_block(size_t F) { return dim3(F / 8 > 96 ? 128 : (unsigned)ceil_div(F / 8, 32) * 32); }

dim3 swiglu_grid(size_t N, size_t F) {
    if (F % 8 != 0) { fatal("swiglu: intermediate size must be padded to a multiple of 8, is %zu", F); }
    if (N > INT_MAX || F > INT_MAX / 4) { fatal("swiglu: %zu rows of %zu are more than it can count", N, F); }
    return dim3((unsigned)N, (unsigned)ceil_div(F / 8, swiglu_block(F).x));
}

void swiglu_forward(bf16* act, const bf16* gate_up, size_t N, size_t F, cudaStream_t stream) {
    // act (N,F) = silu(gate) * up; gate_up (N,2F) holds gate, then up
    if (N == 0 || F == 0) { return; }
    swiglu_forward_kernel2<<<swiglu_grid(N, F), swiglu_block(F), 0, stream>>>(act, gate_up, (int)F);
    launchCheck("swiglu_forward");
}

void swiglu_backward(bf16* d_gate_up, const bf16* d_act, const bf16* gate_up, size_t N, size_t F, cudaStream_t stream) {
    // d_gate_up (N,2F) =; it may be gate_up itself
    if (N == 0 || F == 0) { return; }
    swiglu_backward_kernel2<<<swiglu_grid(N, F), swiglu_block(F), 0, stream>>>(d_gate_up, d_act, gate_up, (int)F);
    launchCheck("swiglu_backward");
}

#endif
