// matmul.h: the products of a linear layer, as in train_moe.cu, for the files here that need one. Call gemm_open() before
// the first product and gemm_close() after the last; link with -lcublasLt.
#ifndef DEV_CUDA_MATMUL_H
#define DEV_CUDA_MATMUL_H

#include "../../llmc/gemm.h"

void matmul_forward(bf16* out, const bf16* inp, const bf16* weight, size_t N, size_t C, size_t OC,
                    cudaStream_t stream) {
    // out (N,OC) = inp (N,C) weight^T, weight is (OC,C)
    gemm(false, true, N, OC, C, inp, C, weight, C, 0, out, CUDA_R_16BF, OC, stream);
}

void matmul_backward(bf16* d_inp, float* d_weight, const bf16* d_out, const bf16* inp, const bf16* weight, size_t N,
                     size_t C, size_t OC, cudaStream_t stream) {
    // d_inp (N,C) = d_out (N,OC) weight;  d_weight (OC,C) += d_out^T inp
    gemm(false, false, N, C, OC, d_out, OC, weight, C, 0, d_inp, CUDA_R_16BF, C, stream);
    gemm(true, false, OC, C, N, d_out, OC, inp, C, 1, d_weight, CUDA_R_32F, C, stream);
}

#endif
