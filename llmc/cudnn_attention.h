// cudnn_attention.h: --attention cudnn, NVIDIA's library in place of our flash attention. Only in a program built with
// USE_CUDNN=1 (make deps-cudnn brings what it needs); any other refuses the option and says so. The library is called
// in llmc/cudnn_attention.cpp, a unit of its own: its headers take half a minute to compile.
#ifndef LLMC_CUDNN_ATTENTION_H
#define LLMC_CUDNN_ATTENTION_H

#include "check.h"
#include <cuda_runtime.h>

typedef struct {
    size_t B, T;              // sequences, their length
    int NH, NKV, HD;          // query heads, key/value heads, head size
    size_t ld_qk, ld_v, ld_d; // elements from a token's row to the next: of q and k; of v; of d_q, d_k, d_v
} CudnnAttentionShape;        // out and d_out are (B,T,NH*HD) without gaps

#ifdef USE_CUDNN
// All matrices bf16; lse (B,NH,T) float is what forward leaves for backward.
void cudnn_attention_forward(void* out, float* lse, const void* q, const void* k, const void* v,
                             const CudnnAttentionShape* s, cudaStream_t stream);
void cudnn_attention_backward(void* d_q, void* d_k, void* d_v, const void* d_out, const void* out, const float* lse,
                              const void* q, const void* k, const void* v, const CudnnAttentionShape* s,
                              cudaStream_t stream);
// cuDNN's version is new enough, and what it cannot do is not asked for; fatal otherwise.
void attention_cudnn_check(bool doc_mask, int head_dim);
#else
static inline void cudnn_attention_forward(void*, float*, const void*, const void*, const void*,
                                           const CudnnAttentionShape*, cudaStream_t) {}
static inline void cudnn_attention_backward(void*, void*, void*, const void*, const void*, const float*, const void*,
                                            const void*, const void*, const CudnnAttentionShape*, cudaStream_t) {}
static inline void attention_cudnn_check(bool, int) {
    fatal("--attention cudnn: this program was built without cuDNN: make deps-cudnn, then make train_moe USE_CUDNN=1; "
          "or take --attention flash, which is ours (a resumed run keeps the option that it was begun with)");
}
#endif

template <class Shape> CudnnAttentionShape cudnn_attention_shape(const Shape& s) { // of train_moe.cu's AttentionShape
    CudnnAttentionShape c;
    c.B = s.B, c.T = s.T, c.NH = s.NH, c.NKV = s.NKV, c.HD = s.HD;
    c.ld_qk = s.ld_qk, c.ld_v = s.ld_v, c.ld_d = s.ld_d;
    return c;
}
template <class Shape>
void attention_cudnn_forward(void* out, float* lse, const void* q, const void* k, const void* v, Shape s,
                             cudaStream_t stream) {
    CudnnAttentionShape shape = cudnn_attention_shape(s);
    cudnn_attention_forward(out, lse, q, k, v, &shape, stream);
}
template <class Shape>
void attention_cudnn_backward(void* d_q, void* d_k, void* d_v, const void* d_out, const void* out, const float* lse,
                              const void* q, const void* k, const void* v, Shape s, cudaStream_t stream) {
    CudnnAttentionShape shape = cudnn_attention_shape(s);
    cudnn_attention_backward(d_q, d_k, d_v, d_out, out, lse, q, k, v, &shape, stream);
}

#endif
