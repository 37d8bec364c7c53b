// A block sums 256 numbers by halving. One line is missing: can you see it before the emulator tells you?
#include <cstdio>
#include <cuda_runtime.h>

__global__ void sum(float* out, const float* in) {
    __shared__ float partial[256];
    partial[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *out = partial[0];
}

int main() {
    float h[256], *in, *out, result;
    for (int i = 0; i < 256; i++) h[i] = 1;
    cudaMalloc(&in, sizeof h);
    cudaMalloc(&out, sizeof result);
    cudaMemcpy(in, h, sizeof h, cudaMemcpyHostToDevice);
    sum<<<1, 256>>>(out, in);
    cudaMemcpy(&result, out, sizeof result, cudaMemcpyDeviceToHost);
    printf("sum = %g, expected 256\n", result);
    cudaFree(in);
    cudaFree(out);
    return 0;
}
