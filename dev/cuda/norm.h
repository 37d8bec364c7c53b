// norm.h: what the backward passes of rmsnorm and qk_norm_rope share, as in train_moe.cu.
#ifndef DEV_CUDA_NORM_H
#define DEV_CUDA_NORM_H

// The gradient of a norm's weight is a sum over all tokens. The tokens are cut into ranges whose number depends on
// nothing but N, a block sums a range into its row of partials, and the rows are added in one order: one result on
// every card.
enum { NORM_BLOCKS = 256 }; // at most; and a block has 16 warps, each of which should find a row

unsigned norm_blocks(size_t N) { return (unsigned)(N < 16 * NORM_BLOCKS ? ceil_div(N, 16) : (size_t)NORM_BLOCKS); }

// d_weight[c] += sum over blocks of partials[block * stride + c]
// A block owns 32 columns. 8 warps take every eighth row, so that 32 loads follow each other and not 256; a row's 32
// columns are one 128-byte line. Bound by latency: at most 256 rows.
__global__ void norm_weight_reduce_kernel1(float* d_weight, const float* partials, int blocks, size_t stride, int C) {
    __shared__ float sums[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0;
    if (c < C) {
        #pragma unroll 8
        for (int block = warp; block < blocks; block += 8) { sum += partials[block * stride + c]; }
    }
    sums[warp][lane] = sum;
    __syncthreads(); // the sums of all warps are there
    if (warp > 0 || c >= C) { return; }
    float total = 0;
    for (int i = 0; i < 8; i++) { total += sums[i][lane]; }
    d_weight[c] += total;
}

void norm_weight_reduce(float* d_weight, const float* partials, unsigned blocks, size_t stride, size_t C,
                        cudaStream_t stream) {
    // d_weight (C) += the sums over the rows of partials (blocks, stride)
    norm_weight_reduce_kernel1<<<ceil_div(C, 32), 256, 0, stream>>>(d_weight, partials, (int)blocks, stride, (int)C);
    launchCheck("norm_weight_reduce_kernel1");
}
#endif
